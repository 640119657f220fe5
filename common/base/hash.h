/* base/hash.h - XXH3 digests (xxHash). Source: xxhash.com, XXH3_64bits and XXH3_128bits. [any thread] */
#ifndef TOW_BASE_HASH_H
#define TOW_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t tow_hash64(const void *p, size_t n);
uint64_t tow_hash64_seed(const void *p, size_t n, uint64_t seed); /* chains: seed = hash before */

/* The same digest of bytes that come in pieces. */
struct tow_hash {
    _Alignas(64) unsigned char state[576]; /* XXH3's */
};
void tow_hash_begin(struct tow_hash *h);
void tow_hash_add(struct tow_hash *h, const void *p, size_t n);
uint64_t tow_hash_end(const struct tow_hash *h);

#endif
