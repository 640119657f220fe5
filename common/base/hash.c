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

void tow_hash_copy_begin(struct tow_hash_copy *c, void *dst, size_t n, bool past_cache)
{
    c->dst = dst;
    c->n = n;
    c->at = 0;
    c->past_cache = past_cache;
#if defined(__x86_64__)
    if (n > SHORT && has_avx512()) {
        tow_hash_copy_begin_avx512(c);
        return;
    }
    if (n > SHORT && has_avx2()) {
        tow_hash_copy_begin_avx2(c);
        return;
    }
#endif
    tow_hash_copy_begin_plain(c);
}

static void add(struct tow_hash_copy *c, const void *src, size_t n)
{
#if defined(__x86_64__)
    if (c->n > SHORT && has_avx512()) {
        tow_hash_copy_add_avx512(c, src, n);
        return;
    }
    if (c->n > SHORT && has_avx2()) {
        tow_hash_copy_add_avx2(c, src, n);
        return;
    }
#endif
    tow_hash_copy_add_plain(c, src, n);
}

void tow_hash_copy_add(struct tow_hash_copy *c, const void *src, size_t n)
{
    add(c, src, n);
    c->at += n;
}

uint64_t tow_hash_copy_end(const struct tow_hash_copy *c)
{
    if (c->at < c->n) return tow_hash64(c->dst, c->n);
#if defined(__x86_64__)
    if (c->n > SHORT && has_avx512()) return tow_hash_copy_end_avx512(c);
    if (c->n > SHORT && has_avx2()) return tow_hash_copy_end_avx2(c);
#endif
    return tow_hash_copy_end_plain(c);
}
