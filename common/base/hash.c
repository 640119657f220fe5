/* base/hash.c - see hash.h. */
#include "common/base/hash.h"

#include <xxhash.h>

uint64_t tow_hash64(const void *p, size_t n)
{
    return XXH3_64bits(p, n);
}

uint64_t tow_hash64_seed(const void *p, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(p, n, seed);
}
