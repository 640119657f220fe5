/* Digests: every copy of XXH3 and every way to cut the bytes gives what the library gives. */
#include "tests/support/check.h"

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/hash_impl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

static uint8_t bytes[300000];

static void fill(void)
{
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(i * 131 + (i >> 8) * 7);
}

/* Of these bytes, by libxxhash 0.8.1: XXH3_64bits(), XXH3_64bits_withSeed(77). */
static const struct {
    size_t n;
    uint64_t plain, seeded;
} known[] = {
    {0, 0x2d06800538d394c2u, 0x3e06214a603237b7u},
    {1, 0xc44bdff4074eecdbu, 0xcac5e0f49ba916c6u},
    {3, 0x6811538b444fc6dcu, 0xe9e90f5c18a3dc7fu},
    {8, 0xe5b43ab074c9c13bu, 0x81faddf74373e91du},
    {9, 0x089b8d25b20fb877u, 0x343bc087f5e4e20du},
    {16, 0x0a0ec5ae8679cb7fu, 0xdee1a8f3ba283355u},
    {17, 0x57c52d21ce492c1eu, 0xa1786c36a21dd6e3u},
    {128, 0x696069c4f1e6a91au, 0x98bc48d5835464bbu},
    {129, 0xb1ada52285757bebu, 0x9ca4cff3078a395fu},
    {240, 0xb80284837259eee4u, 0x684538b6bc8c93c4u},
    {241, 0x44dbd3180a664e27u, 0xa0b7839ca3e3ecfcu},
    {255, 0x942ab7e775f54acau, 0xc056febfcd527729u},
    {256, 0x266a2c816cbb31c5u, 0x6e5819af9177d591u},
    {257, 0x7e8b76f1ea8234b8u, 0x2806ab3fd01ab9dfu},
    {1023, 0xf7eb9806eb4ad2fdu, 0x2607d6e6316e308cu},
    {1024, 0xd1abb5dbd52032f9u, 0xe823461b0d4144a6u},
    {1025, 0xa3908b116ddf0191u, 0x704c039e68cf9daeu},
    {4097, 0x1908d046110f25d3u, 0x24d18a308dbc2fbau},
    {8192, 0xbb32ead5cb00c5d1u, 0x1ca5007b88f09e07u},
    {9999, 0x7103f91dd4cc49aeu, 0x614778ed9cea195au},
    {65536, 0xc4717f32a25f9b2bu, 0x48379ecff171013du},
    {131072, 0x0c0113533ae1ecedu, 0x7ff25ca02b59ecf8u},
    {131073, 0x6bb93290272c141fu, 0xf49bc2b632f59ad2u},
    {262144, 0x3cb299305b3c8340u, 0x8f3ee62af3bc9d93u},
    {299990, 0xdd4f7efae3ea7ae4u, 0x12d1ffbaa4defe33u},
};
enum { KNOWN = sizeof known / sizeof *known };

static void test_hash__whole_is_xxh3_at_every_length(void **state)
{
    (void)state;
    static uint8_t moved[sizeof bytes + 16];
    fill();
    for (int i = 0; i < KNOWN; i++)
        for (size_t at = 0; at < 10; at += 3) { /* alignment is nothing to it */
            memcpy(moved + at, bytes, known[i].n);
            assert_true(tow_hash64(moved + at, known[i].n) == known[i].plain);
            assert_true(tow_hash64_seed(moved + at, known[i].n, 77) == known[i].seeded);
        }
}

static void test_hash__pieces_equal_the_whole(void **state)
{
    (void)state;
    static const size_t pieces[] = {1, 63, 64, 100, 256, 1000, 65536, 131072};
    fill();
    for (int i = 0; i < KNOWN; i++)
        for (size_t k = 0; k < sizeof pieces / sizeof *pieces; k++) {
            struct tow_hash h;
            tow_hash_begin(&h);
            for (size_t at = 0; at < known[i].n; at += pieces[k]) {
                size_t left = known[i].n - at;
                tow_hash_add(&h, bytes + at, left < pieces[k] ? left : pieces[k]);
            }
            assert_true(tow_hash_end(&h) == known[i].plain);
        }
}

static void test_hash__one_bit_in_any_piece_changes_it(void **state)
{
    (void)state;
    fill();
    uint64_t before = tow_hash64(bytes, sizeof bytes);
    for (size_t at = 0; at < sizeof bytes; at += 9973) {
        bytes[at] ^= 4;
        assert_true(tow_hash64(bytes, sizeof bytes) != before);
        bytes[at] ^= 4;
    }
}

/* --- copies ----------------------------------------------------------------------------------- */

typedef uint64_t (*copy_fn)(void *dst, const void *src, size_t n, bool past_cache);

/* Those that this processor runs, and the smallest size of each. */
static size_t copies(copy_fn *fn, size_t *from)
{
    size_t n = 0;
    fn[n] = tow_hash_copy, from[n++] = 0;
    fn[n] = tow_hash_copy_plain, from[n++] = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) fn[n] = tow_hash_copy_avx2, from[n++] = 241;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        fn[n] = tow_hash_copy_avx512, from[n++] = 241;
#endif
    return n;
}

static void check_copy(copy_fn fn, size_t n, size_t from, size_t to, bool past_cache)
{
    enum { GUARD = 64, FILL = 0xA5 };
    static _Alignas(64) uint8_t dst[GUARD + 64 + sizeof bytes + GUARD];
    uint8_t *at = dst + GUARD + to;
    memset(dst, FILL, GUARD + to);
    memset(at + n, FILL, GUARD);
    memset(at, ~bytes[from], n);
    assert_true(fn(at, bytes + from, n, past_cache) == tow_hash64(bytes + from, n));
    assert_memory_equal(at, bytes + from, n);
    for (int i = 1; i <= GUARD; i++) {
        assert_int_equal(at[-i], FILL);
        assert_int_equal(at[n + (size_t)i - 1], FILL);
    }
}

static void test_hash_copy__equals_copy_and_digest_at_every_size_and_alignment(void **state)
{
    (void)state;
    copy_fn fn[4];
    size_t from[4], n_fn = copies(fn, from);
    fill();
    for (size_t k = 0; k < n_fn; k++) {
        for (size_t n = from[k]; n < 2200; n++) check_copy(fn[k], n, n % 7, n % 64, n % 2);
        for (int i = 0; i < 600; i++) {
            uint64_t r = tow_random_u64();
            size_t off = (r >> 40) % 64, to = i % 3 ? (r >> 50) % 64 : 0;
            size_t n = from[k] + r % (sizeof bytes - 64 - from[k]);
            check_copy(fn[k], i % 4 ? n % 9000 + from[k] : n, off, to, i % 2);
        }
    }
}

struct runs {
    void (*begin)(struct tow_hash_copy *c);
    void (*add)(struct tow_hash_copy *c, const void *src, size_t n);
    uint64_t (*end)(const struct tow_hash_copy *c);
    size_t from; /* the smallest size */
};

static void begin_any(struct tow_hash_copy *c)
{
    tow_hash_copy_begin(c, c->dst, c->n, c->past_cache);
}

static void add_any(struct tow_hash_copy *c, const void *src, size_t n)
{
    tow_hash_copy_add(c, src, n);
    c->at -= n; /* as the others leave it */
}

static size_t run_copies(struct runs *r)
{
    size_t n = 0;
    r[n++] = (struct runs){begin_any, add_any, tow_hash_copy_end, 0};
    r[n++] = (struct runs){tow_hash_copy_begin_plain, tow_hash_copy_add_plain,
                           tow_hash_copy_end_plain, 0};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        r[n++] = (struct runs){tow_hash_copy_begin_avx2, tow_hash_copy_add_avx2,
                               tow_hash_copy_end_avx2, 241};
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        r[n++] = (struct runs){tow_hash_copy_begin_avx512, tow_hash_copy_add_avx512,
                               tow_hash_copy_end_avx512, 241};
#endif
    return n;
}

/* max: of a run; the lengths follow from the seed. */
static void check_runs(const struct runs *r, size_t n, size_t to, size_t max, uint64_t seed)
{
    enum { GUARD = 64, FILL = 0xA5 };
    static _Alignas(64) uint8_t dst[GUARD + 64 + sizeof bytes + GUARD];
    uint8_t *out = dst + GUARD + to;
    struct tow_hash_copy c = {.dst = out, .n = n, .past_cache = seed % 2};
    memset(dst, FILL, GUARD + to);
    memset(out, ~bytes[0], n);
    memset(out + n, FILL, GUARD);
    r->begin(&c);
    while (c.at < n) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        size_t k = 1 + (seed >> 33) % max;
        if (k > n - c.at) k = n - c.at;
        r->add(&c, bytes + c.at, k);
        c.at += k;
    }
    assert_true(r->end(&c) == tow_hash64(bytes, n));
    assert_memory_equal(out, bytes, n);
    for (int i = 1; i <= GUARD; i++) {
        assert_int_equal(out[-i], FILL);
        assert_int_equal(out[n + (size_t)i - 1], FILL);
    }
}

static void test_hash_copy__runs_equal_the_whole_however_cut(void **state)
{
    (void)state;
    static const size_t max[] = {1, 3, 64, 65, 200, 1024, 1500, 5000, 70000, 400000};
    enum { MAX = sizeof max / sizeof *max };
    struct runs r[4];
    size_t n_r = run_copies(r);
    fill();
    for (size_t k = 0; k < n_r; k++) {
        for (size_t n = r[k].from; n < 2200; n++)
            check_runs(&r[k], n, n % 3 ? n % 64 : 0, max[n % MAX], n);
        for (int i = 0; i < 400; i++) {
            uint64_t seed = tow_random_u64();
            size_t n = r[k].from + seed % (sizeof bytes - 64 - r[k].from);
            check_runs(&r[k], i % 4 ? n % 9000 + r[k].from : n, i % 3 ? (seed >> 50) % 64 : 0,
                       max[(seed >> 40) % MAX], seed);
        }
    }
}

static void test_hash_copy__what_came_by_other_ways_is_digested_from_there(void **state)
{
    (void)state;
    static uint8_t dst[5000];
    struct tow_hash_copy c;
    fill();
    tow_hash_copy_begin(&c, dst, sizeof dst, false);
    tow_hash_copy_add(&c, bytes, 1000);
    memcpy(dst + 3000, bytes + 3000, 2000); /* before its turn */
    tow_hash_copy_add(&c, bytes + 1000, 2000);
    assert_true(tow_hash_copy_end(&c) == tow_hash64(bytes, sizeof dst));
}

struct scribbler {
    uint8_t *at;
    size_t n;
    atomic_bool over;
};

static void *scribble(void *arg)
{
    struct scribbler *s = arg;
    for (uint8_t v = 0; !atomic_load(&s->over); v++)
        for (size_t i = 0; i < s->n; i += 61) ((volatile uint8_t *)s->at)[i] = v;
    return NULL;
}

static void test_hash_copy__digest_is_of_what_arrived_though_the_source_changes(void **state)
{
    (void)state;
    static _Alignas(64) uint8_t src[100003], dst[sizeof src];
    copy_fn fn[4];
    size_t from[4], n_fn = copies(fn, from);
    struct scribbler s = {.at = src, .n = sizeof src};
    pthread_t thread;
#if defined(__SANITIZE_THREAD__)
    return; /* it would rightly report the race that is asked for here */
#endif
    assert_int_equal(pthread_create(&thread, NULL, scribble, &s), 0);
    unsigned changed = 0;
    for (size_t k = 0; k < n_fn; k++)
        for (int i = 0; i < 400; i++) {
            uint64_t digest = fn[k](dst, src, sizeof src - (size_t)i % 100, i % 2);
            assert_true(digest == tow_hash64(dst, sizeof src - (size_t)i % 100));
            if (memcmp(dst, src, sizeof src - 100) != 0) changed++;
        }
    atomic_store(&s.over, true);
    pthread_join(thread, NULL);
    assert_true(changed > 0); /* or this test has seen nothing */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash__whole_is_xxh3_at_every_length),
        cmocka_unit_test(test_hash__pieces_equal_the_whole),
        cmocka_unit_test(test_hash__one_bit_in_any_piece_changes_it),
        cmocka_unit_test(test_hash_copy__equals_copy_and_digest_at_every_size_and_alignment),
        cmocka_unit_test(test_hash_copy__runs_equal_the_whole_however_cut),
        cmocka_unit_test(test_hash_copy__what_came_by_other_ways_is_digested_from_there),
        cmocka_unit_test(test_hash_copy__digest_is_of_what_arrived_though_the_source_changes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
