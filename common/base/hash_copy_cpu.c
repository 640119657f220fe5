/* base/hash_copy_cpu.c - a copy and its XXH3 digest in one pass, or the digest alone; compiled once
 * per instruction set.
 *
 * How      Each vector is loaded once, stored, and digested from its register. So the digest is of
 *          what was stored, whatever another process does to the source meanwhile, and the bytes
 *          pass through the core once: the multiplications hide behind the moves. Four stripes are
 *          moved before they are digested, which keeps loads and stores in long runs.
 *          The library has no such loop, so XXH3's long form (over 240 bytes, no seed) is spelled
 *          out here: lanes of 64 bits, stripes of 64 bytes, a scramble after each 16 of them. The
 *          last 1 to 64 bytes are no stripe: the end digests the last 64 instead.
 *          A source may come in runs. A stripe that one run begins and the next one ends is
 *          digested from where it was copied to.
 *          The same loop without the copy is a quarter faster than the library's, which adds the
 *          data to their neighbour's lane stripe by stripe.
 *          Without vectors the library digests the copy piece by piece, from the first cache.
 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common/base/hash_impl.h"

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>

enum { STRIPE = 64, BLOCK = 1024, GROUP = 4, LANES = 8, SECRET = 192 };
enum { READ_AHEAD = 1024 }; /* bytes: what a digest alone will need is fetched */
enum { AHEAD = 512 }; /* bytes: where the copy will go is fetched for writing, worth 7 % at 64K */
/* bytes: what will be copied is fetched, across the boundaries at which the processor's own
 * fetching stops: worth 5 % from memory, 10 % where source and copy just fit the second-level
 * cache */
enum { COPY_AHEAD = 2048 };
/* Where in the secret: each stripe of a block 8 further, then these. */
enum { SECRET_SCRAMBLE = SECRET - STRIPE, SECRET_LAST = SECRET - STRIPE - 7, SECRET_MERGE = 11 };
static const uint64_t PRIME32_1 = 0x9E3779B1u, PRIME64_1 = 0x9E3779B185EBCA87u;
static const uint64_t START[LANES] = {0xC2B2AE3Du,         0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu,
                                      0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u, 0x85EBCA77u,
                                      0x27D4EB2F165667C5u, 0x9E3779B1u};

#if defined(__AVX512F__)
#define VARIANT(name) name##_avx512
typedef __m512i vec;
#define IN_REGISTER(v)   __asm__ volatile("" : "+v"(v)) /* no second load of it */
#define load(p)          _mm512_loadu_si512(p)
#define store(p, v)      _mm512_storeu_si512(p, v)
#define store_past(p, v) _mm512_stream_si512((void *)(p), v)
#define add(a, b)        _mm512_add_epi64(a, b)
#define xor_of(a, b)     _mm512_xor_si512(a, b)
#define right(a, n)      _mm512_srli_epi64(a, n)
#define left(a, n)       _mm512_slli_epi64(a, n)
#define mul_low(a, b)    _mm512_mul_epu32(a, b)
#define every(x)         _mm512_set1_epi64(x)
#define swap_lanes(a)    _mm512_shuffle_epi32(a, _MM_PERM_BADC)
#else
#define VARIANT(name)    name##_avx2
typedef __m256i vec;
#define IN_REGISTER(v)   __asm__ volatile("" : "+x"(v))
#define load(p)          _mm256_loadu_si256((const vec *)(const void *)(p))
#define store(p, v)      _mm256_storeu_si256((vec *)(void *)(p), v)
#define store_past(p, v) _mm256_stream_si256((vec *)(void *)(p), v)
#define add(a, b)        _mm256_add_epi64(a, b)
#define xor_of(a, b)     _mm256_xor_si256(a, b)
#define right(a, n)      _mm256_srli_epi64(a, n)
#define left(a, n)       _mm256_slli_epi64(a, n)
#define mul_low(a, b)    _mm256_mul_epu32(a, b)
#define every(x)         _mm256_set1_epi64x(x)
#define swap_lanes(a)    _mm256_shuffle_epi32(a, _MM_SHUFFLE(1, 0, 3, 2))
#endif

enum { PER_STRIPE = STRIPE / sizeof(vec) };
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* The lanes so far, without `plain`: the data themselves are added to their neighbour's lane, which
 * can wait until the lanes are needed. */
struct lanes {
    vec acc[PER_STRIPE], plain[PER_STRIPE];
};

INLINE void digest(struct lanes *l, const vec data[PER_STRIPE], const uint8_t *secret)
{
    UNROLL
    for (int i = 0; i < PER_STRIPE; i++) {
        vec keyed = xor_of(data[i], load(secret + i * sizeof(vec)));
        l->acc[i] = add(l->acc[i], mul_low(keyed, right(keyed, 32)));
        l->plain[i] = add(l->plain[i], data[i]);
    }
}

INLINE void settle(struct lanes *l)
{
    UNROLL
    for (int i = 0; i < PER_STRIPE; i++) {
        l->acc[i] = add(l->acc[i], swap_lanes(l->plain[i]));
        l->plain[i] = every(0);
    }
}

INLINE void scramble(struct lanes *l)
{
    const vec prime = every((long long)PRIME32_1);
    settle(l);
    UNROLL
    for (int i = 0; i < PER_STRIPE; i++) {
        vec a = xor_of(xor_of(l->acc[i], right(l->acc[i], 47)),
                       load(XXH3_kSecret + SECRET_SCRAMBLE + i * sizeof(vec)));
        l->acc[i] = add(mul_low(a, prime), left(mul_low(right(a, 32), prime), 32));
    }
}

/* n stripes from src to dst and into the lanes. */
INLINE void stripes(struct lanes *l, uint8_t *dst, const uint8_t *src, const uint8_t *secret, int n,
                    bool past_cache)
{
    vec data[GROUP * PER_STRIPE];
    UNROLL
    for (int i = 0; i < n; i++)
        __asm__ volatile("prefetcht0 %0" : : "m"(src[COPY_AHEAD + i * STRIPE])); /* no fault */
    UNROLL
    for (int i = 0; i < n && !past_cache; i++)
        __asm__ volatile("prefetchw %0" : : "m"(dst[AHEAD + i * STRIPE])); /* no fault, if beyond */
    UNROLL
    for (int i = 0; i < n * PER_STRIPE; i++) {
        data[i] = load(src + i * sizeof(vec));
        IN_REGISTER(data[i]);
    }
    UNROLL
    for (int i = 0; i < n * PER_STRIPE; i++) {
        if (past_cache)
            store_past(dst + i * sizeof(vec), data[i]);
        else
            store(dst + i * sizeof(vec), data[i]);
    }
    __asm__ volatile("" : : : "memory"); /* the stores stay together */
    UNROLL
    for (int i = 0; i < n; i++) digest(l, data + i * PER_STRIPE, secret + i * 8);
    for (int i = 0; i < PER_STRIPE; i++) {
        IN_REGISTER(l->acc[i]);
        IN_REGISTER(l->plain[i]);
    }
}

static uint64_t merge(const vec acc[PER_STRIPE], size_t n)
{
    uint64_t lanes[LANES], secret[LANES];
    for (int i = 0; i < PER_STRIPE; i++) store((uint8_t *)lanes + i * sizeof(vec), acc[i]);
    memcpy(secret, XXH3_kSecret + SECRET_MERGE, sizeof secret);
    uint64_t sum = n * PRIME64_1;
    for (int i = 0; i < LANES; i += 2) {
        unsigned __int128 p =
            (unsigned __int128)(lanes[i] ^ secret[i]) * (lanes[i + 1] ^ secret[i + 1]);
        sum += (uint64_t)p ^ (uint64_t)(p >> 64);
    }
    sum = (sum ^ (sum >> 37)) * 0x165667919E3779F9u;
    return sum ^ (sum >> 32);
}

INLINE void begin(struct lanes *l)
{
    UNROLL
    for (int i = 0; i < PER_STRIPE; i++) {
        l->acc[i] = load((const uint8_t *)START + i * sizeof(vec));
        l->plain[i] = every(0);
    }
}

/* n bytes from src to dst + at, of total bytes that dst will have. */
INLINE void add_run(struct lanes *l, uint8_t *dst, size_t at, const uint8_t *src, size_t n,
                    size_t total, bool past_cache)
{
    const size_t plain_end = (total - 1) / STRIPE * STRIPE; /* of stripes that are not the last */
    if (at % STRIPE) {
        size_t left = STRIPE - at % STRIPE, k = n < left ? n : left;
        memcpy(dst + at, src, k);
        at += k, src += k, n -= k;
        if (at % STRIPE == 0 && at <= plain_end) {
            vec data[PER_STRIPE];
            for (int i = 0; i < PER_STRIPE; i++)
                data[i] = load(dst + at - STRIPE + i * sizeof(vec));
            digest(l, data, XXH3_kSecret + (at - STRIPE) % BLOCK / STRIPE * 8);
            if (at % BLOCK == 0) scramble(l);
        }
    }
    while (n >= STRIPE && at < plain_end) {
        if (at % BLOCK == 0 && n >= BLOCK && plain_end - at >= BLOCK) {
            UNROLL
            for (int i = 0; i < BLOCK / STRIPE; i += GROUP)
                stripes(l, dst + at + i * STRIPE, src + i * STRIPE, XXH3_kSecret + i * 8, GROUP,
                        past_cache);
            at += BLOCK, src += BLOCK, n -= BLOCK;
        } else {
            stripes(l, dst + at, src, XXH3_kSecret + at % BLOCK / STRIPE * 8, 1, false);
            at += STRIPE, src += STRIPE, n -= STRIPE;
        }
        if (at % BLOCK == 0) scramble(l);
    }
    memcpy(dst + at, src, n);
    if (past_cache) _mm_sfence(); /* such stores are not in order with others */
}

/* The last stripe ends with the bytes and may overlap the one before it: as stored, for the source
 * may be another by now. */
INLINE uint64_t end(struct lanes *l, const uint8_t *dst, size_t total)
{
    vec last[PER_STRIPE];
    for (int i = 0; i < PER_STRIPE; i++) last[i] = load(dst + total - STRIPE + i * sizeof(vec));
    digest(l, last, XXH3_kSecret + SECRET_LAST);
    settle(l);
    return merge(l->acc, total);
}

INLINE uint64_t copy(uint8_t *dst, const uint8_t *src, size_t n, bool past_cache)
{
    struct lanes l;
    begin(&l);
    add_run(&l, dst, 0, src, n, n, past_cache);
    return end(&l, dst, n);
}

/* As add_run() does it, but all at once and without the copy. */
uint64_t VARIANT(tow_hash64)(const void *p, size_t n)
{
    struct lanes l;
    const uint8_t *src = p;
    begin(&l);
    for (; n - (size_t)(src - (const uint8_t *)p) > BLOCK; src += BLOCK) {
        UNROLL
        for (int i = 0; i < BLOCK / STRIPE; i++) {
            vec data[PER_STRIPE];
            __asm__ volatile("prefetcht0 %0" : : "m"(src[READ_AHEAD + i * STRIPE]));
            UNROLL
            for (int k = 0; k < PER_STRIPE; k++) data[k] = load(src + i * STRIPE + k * sizeof(vec));
            digest(&l, data, XXH3_kSecret + i * 8);
        }
        scramble(&l);
    }
    const uint8_t *secret = XXH3_kSecret;
    for (; n - (size_t)(src - (const uint8_t *)p) > STRIPE; src += STRIPE, secret += 8) {
        vec data[PER_STRIPE];
        for (int k = 0; k < PER_STRIPE; k++) data[k] = load(src + k * sizeof(vec));
        digest(&l, data, secret);
    }
    return end(&l, p, n);
}

uint64_t VARIANT(tow_hash_copy)(void *dst, const void *src, size_t n, bool past_cache)
{
    if (past_cache && (uintptr_t)dst % STRIPE == 0) return copy(dst, src, n, true);
    return copy(dst, src, n, false);
}

_Static_assert(sizeof(struct lanes) <= sizeof(struct tow_hash), "room for lanes");

void VARIANT(tow_hash_copy_begin)(struct tow_hash_copy *c)
{
    begin((struct lanes *)(void *)c->so_far.state);
}

void VARIANT(tow_hash_copy_add)(struct tow_hash_copy *c, const void *src, size_t n)
{
    struct lanes l = *(struct lanes *)(void *)c->so_far.state;
    if (c->past_cache && (uintptr_t)c->dst % STRIPE == 0)
        add_run(&l, c->dst, c->at, src, n, c->n, true);
    else
        add_run(&l, c->dst, c->at, src, n, c->n, false);
    *(struct lanes *)(void *)c->so_far.state = l;
}

uint64_t VARIANT(tow_hash_copy_end)(const struct tow_hash_copy *c)
{
    struct lanes l = *(const struct lanes *)(const void *)c->so_far.state;
    return end(&l, c->dst, c->n);
}

#else

enum { PIECE = 8192 };

static void copy_pieces(struct tow_hash *h, uint8_t *dst, const uint8_t *src, size_t n)
{
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = n - at < PIECE ? n - at : PIECE;
        memcpy(dst + at, src + at, k);
        tow_hash_add_plain(h, dst + at, k);
    }
}

uint64_t tow_hash_copy_plain(void *dst, const void *src, size_t n, bool past_cache)
{
    struct tow_hash h;
    (void)past_cache;
    tow_hash_begin(&h);
    copy_pieces(&h, dst, src, n);
    return tow_hash_end(&h);
}

void tow_hash_copy_begin_plain(struct tow_hash_copy *c)
{
    tow_hash_begin(&c->so_far);
}

void tow_hash_copy_add_plain(struct tow_hash_copy *c, const void *src, size_t n)
{
    copy_pieces(&c->so_far, c->dst + c->at, src, n);
}

uint64_t tow_hash_copy_end_plain(const struct tow_hash_copy *c)
{
    return tow_hash_end(&c->so_far);
}
#endif
