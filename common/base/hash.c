/* base/hash.c - the widest copy of XXH3 that this processor runs; all give the same digest. */
#include "common/base/hash.h"

#include "common/base/hash_impl.h"

#include <stdbool.h>

/* Up to here XXH3 has short ways of its own, without vectors. */
enum { SHORT = 240 };

#if defined(__x86_64__)
/* All that the Makefile lets the compiler use in that copy. */
static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

uint64_t tow_hash64(const void *p, size_t n)
{
#if defined(__x86_64__)
    if (n > SHORT) {
        if (has_avx512()) return tow_hash64_avx512(p, n);
        if (has_avx2()) return tow_hash64_avx2(p, n);
    }
#endif
    return tow_hash64_plain(p, n);
}

uint64_t tow_hash64_seed(const void *p, size_t n, uint64_t seed)
{
#if defined(__x86_64__)
    if (n > SHORT) {
        if (has_avx512()) return tow_hash64_seed_avx512(p, n, seed);
        if (has_avx2()) return tow_hash64_seed_avx2(p, n, seed);
    }
#endif
    return tow_hash64_seed_plain(p, n, seed);
}

uint64_t tow_hash_copy(void *dst, const void *src, size_t n, bool past_cache)
{
#if defined(__x86_64__)
    if (n > SHORT) {
        if (has_avx512()) return tow_hash_copy_avx512(dst, src, n, past_cache);
        if (has_avx2()) return tow_hash_copy_avx2(dst, src, n, past_cache);
    }
#endif
    return tow_hash_copy_plain(dst, src, n, past_cache);
}

void tow_hash_add(struct tow_hash *h, const void *p, size_t n)
{
#if defined(__x86_64__)
    if (has_avx512()) {
        tow_hash_add_avx512(h, p, n);
        return;
    }
    if (has_avx2()) {
        tow_hash_add_avx2(h, p, n);
        return;
    }
#endif
    tow_hash_add_plain(h, p, n);
}
