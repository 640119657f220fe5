/* base/hash_impl.h - the copies of hash_cpu.c and hash_copy_cpu.c, which hash.c chooses from;
 * nobody else includes it but their test. */
#ifndef TOW_BASE_HASH_IMPL_H
#define TOW_BASE_HASH_IMPL_H

#include "common/base/hash.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TOW_HASH_COPY(isa)                                                                         \
    uint64_t tow_hash64_seed_##isa(const void *p, size_t n, uint64_t seed);                        \
    void tow_hash_add_##isa(struct tow_hash *h, const void *p, size_t n);                          \
    /* but plain: n > 240 */                                                                       \
    uint64_t tow_hash64_##isa(const void *p, size_t n);                                            \
    uint64_t tow_hash_copy_##isa(void *dst, const void *src, size_t n, bool past_cache);           \
    void tow_hash_copy_begin_##isa(struct tow_hash_copy *c);                                       \
    void tow_hash_copy_add_##isa(struct tow_hash_copy *c, const void *src, size_t n);              \
    uint64_t tow_hash_copy_end_##isa(const struct tow_hash_copy *c);
TOW_HASH_COPY(plain)
TOW_HASH_COPY(avx2)
TOW_HASH_COPY(avx512)

#endif
