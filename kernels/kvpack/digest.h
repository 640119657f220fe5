/* kernels/kvpack/digest.h - the constants of XXH3 with its default secret, and its last step, for
 * the twins of pages.h. Written after the algorithm's description (xxhash.com).
 *
 * State    eight numbers. A stripe of 64 bytes adds to number i the product of the halves of (word
 *          i ^ key i), and word i to number i ^ 1; key i of stripe s of a block is secret word s +
 *          i. After each block of 16 stripes but the last the numbers are scrambled by secret words
 *          16 .. 23; in the last block the last stripe has keys of its own.
 */
#ifndef KERN_KVPACK_DIGEST_H
#define KERN_KVPACK_DIGEST_H

#include <stdint.h>

#ifdef __CUDACC__
#define DIGEST_FN    static __host__ __device__ __forceinline__
#define DIGEST_TABLE static __device__ const
#else
#define DIGEST_FN    static inline
#define DIGEST_TABLE static const
#endif

enum { DIGEST_BLOCK = 1024, DIGEST_STRIPE = 64, DIGEST_NUMBERS = 8 };

/* The secret, its 192 bytes as words; the words from byte 121 on; those from byte 11 on. */
DIGEST_TABLE uint64_t digest_secret[24] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
    0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
    0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
    0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};
DIGEST_TABLE uint64_t digest_last_keys[DIGEST_NUMBERS] = {
    0xea647378d9c97e9fu, 0xc5c3ebd33483acc5u, 0x17eb6313faffa081u, 0xd349daf0b751dd0du,
    0x2b9e68d429265516u, 0x8ffca1477d58be16u, 0x45ce31d07ad1b8f8u, 0xaf280416958f3acbu};
DIGEST_TABLE uint64_t digest_merge_keys[DIGEST_NUMBERS] = {
    0x6dd4de1cad21f72cu, 0xa44072db979083e9u, 0xe679cb1f67b3b7a4u, 0xd05a8278e5c0cc4eu,
    0x4608b82172ffcc7du, 0x9035e08e2443f774u, 0x52283c4c263a81e6u, 0x65d088cb00c391bbu};
DIGEST_TABLE uint64_t digest_start[DIGEST_NUMBERS] = {
    0x00000000c2b2ae3du, 0x9e3779b185ebca87u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u,
    0x85ebca77c2b2ae63u, 0x0000000085ebca77u, 0x27d4eb2f165667c5u, 0x000000009e3779b1u};

/* What word x with its key adds to its number. */
DIGEST_FN uint64_t digest_product(uint64_t x, uint64_t key)
{
    const uint64_t v = x ^ key;
    return (v & 0xffffffffu) * (v >> 32);
}
DIGEST_FN uint64_t digest_scramble(uint64_t number, uint64_t key)
{
    return (number ^ number >> 47 ^ key) * 0x9e3779b1u;
}
DIGEST_FN uint64_t digest_fold(uint64_t a, uint64_t b)
{
#ifdef __CUDA_ARCH__
    return a * b ^ __umul64hi(a, b);
#else
    const unsigned __int128 p = (unsigned __int128)a * b;
    return (uint64_t)p ^ (uint64_t)(p >> 64);
#endif
}
/* sum: of the four folds of numbers 2i, 2i + 1, each xor its merge key. */
DIGEST_FN uint64_t digest_end(uint64_t sum, int64_t bytes)
{
    uint64_t h = sum + (uint64_t)bytes * 0x9e3779b185ebca87u;
    h ^= h >> 37;
    h *= 0x165667919e3779f9u;
    return h ^ h >> 32;
}

#endif
