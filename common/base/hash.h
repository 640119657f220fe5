/* base/hash.h - XXH3 digests of 64 bits (xxhash.com), the same on every machine. [any thread] */
#ifndef TOW_BASE_HASH_H
#define TOW_BASE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* p: n bytes, at any address; may be NULL when n is 0. */
uint64_t tow_hash64(const void *p, size_t n);
uint64_t tow_hash64_seed(const void *p, size_t n, uint64_t seed); /* chains: seed = hash before */

/* Copies n bytes to where they do not overlap; returns the tow_hash64() of what is at dst then,
 * also when another process changes src meanwhile. One pass: the price of the dearer of the two.
 * past_cache: to memory directly, for more bytes than a cache holds until they are read. */
uint64_t tow_hash_copy(void *dst, const void *src, size_t n, bool past_cache);

/* tow_hash64() of bytes that come in pieces, however they are cut. Nothing in it needs freeing. */
struct tow_hash {
    _Alignas(64) unsigned char state[576]; /* XXH3_state_t; its size is asserted in hash_cpu.c */
};
void tow_hash_begin(struct tow_hash *h); /* also starts it anew */
void tow_hash_add(struct tow_hash *h, const void *p, size_t n);
uint64_t tow_hash_end(const struct tow_hash *h);

/* tow_hash_copy() of a source that comes in runs, however they are cut. */
struct tow_hash_copy {
    struct tow_hash so_far;
    uint8_t *dst; /* borrowed */
    size_t n, at; /* bytes in all; of them copied */
    bool past_cache;
};
void tow_hash_copy_begin(struct tow_hash_copy *c, void *dst, size_t n, bool past_cache);
void tow_hash_copy_add(struct tow_hash_copy *c, const void *src, size_t n); /* n <= c->n - c->at */
/* What came to dst by other ways is digested from there, all anew. */
uint64_t tow_hash_copy_end(const struct tow_hash_copy *c);

#endif
