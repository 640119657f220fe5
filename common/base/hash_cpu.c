/* base/hash_cpu.c - XXH3 in line, so that it is compiled once per instruction set (see the
 * Makefile); hash.c chooses. A digest runs over every byte of a page on both sides: the library's
 * own entry point is SSE2 code, at a third of the speed. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common/base/hash_impl.h"

#if defined(__AVX512F__)
#define VARIANT(name) name##_avx512
#elif defined(__AVX2__)
#define VARIANT(name) name##_avx2
#else
#define VARIANT(name) name##_plain
#endif

uint64_t VARIANT(tow_hash64_seed)(const void *p, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(p, n, seed);
}

_Static_assert(sizeof(XXH3_state_t) <= sizeof(struct tow_hash), "room for XXH3's state");

void VARIANT(tow_hash_add)(struct tow_hash *h, const void *p, size_t n)
{
    XXH3_64bits_update((XXH3_state_t *)(void *)h, p, n);
}

#if !defined(__AVX2__) /* with vectors: hash_copy_cpu.c */
uint64_t tow_hash64_plain(const void *p, size_t n)
{
    return XXH3_64bits(p, n);
}

void tow_hash_begin(struct tow_hash *h)
{
    XXH3_64bits_reset((XXH3_state_t *)(void *)h);
}

uint64_t tow_hash_end(const struct tow_hash *h)
{
    return XXH3_64bits_digest((const XXH3_state_t *)(const void *)h);
}
#endif
