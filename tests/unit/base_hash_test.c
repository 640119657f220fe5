/* Digests: every copy of XXH3 and every way to cut the bytes gives what the library gives. */
#include "tests/support/check.h"

#include "common/base/hash.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash__whole_is_xxh3_at_every_length),
        cmocka_unit_test(test_hash__pieces_equal_the_whole),
        cmocka_unit_test(test_hash__one_bit_in_any_piece_changes_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
