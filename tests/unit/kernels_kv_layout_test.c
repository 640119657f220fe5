/* tests/unit/kernels_kv_layout_test.c - geometry of pages and tails, and stored rows. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "kernels/kv_layout.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The shape of the smaller released model: sizes are those of the specification's table. */
static struct kern_kv_spec flash(void)
{
    struct kern_kv_spec s = {.n_layers = 44,
                             .n_mtp = 1,
                             .head_dim = 512,
                             .rope_dim = 64,
                             .window = 128,
                             .index_dim = 128,
                             .stream_width = 4 * 4096,
                             .kv_fmt = KERN_KV_FP8,
                             .ik_fmt = KERN_IK_FP4};
    for (int i = 2; i < 42; i++) s.ratios[i] = i % 2 ? 128 : 4;
    s.ratios[42] = 4;
    return s;
}

static void test_kv_layout__sizes_are_those_of_the_model(void **state)
{
    struct kern_kv_layout l;
    struct kern_kv_spec s = flash();
    int64_t main_bytes = 0, index_bytes = 0, window = 0;
    (void)state;
    assert_int_equal(kern_kv_layout_init(&l, &s, NULL), 0);
    assert_int_equal(l.page_tokens, 256);
    for (int i = 0; i < 44; i++) {
        main_bytes += l.layer[i].main_bytes;
        index_bytes += l.layer[i].index_bytes;
        window += l.layer[i].window_bytes;
    }
    assert_int_equal(main_bytes, 256 * 3066 + 256 * 9125 / 100); /* 3,066 + 91.25 bytes a token */
    assert_int_equal(index_bytes, 256 * 357);
    assert_int_equal(window, 3214336 + 74752);
    assert_int_equal(l.layer[3].mstate_bytes, 6144);
    assert_int_equal(l.n_parts, 21 * 2 + 20);
}

static void test_kv_layout__parts_tile_the_page_and_the_tail(void **state)
{
    struct kern_kv_layout l;
    struct kern_kv_spec s = flash();
    (void)state;
    for (int kv = 0; kv < 3; kv++)
        for (int ik = 0; ik < 4; ik++) {
            s.kv_fmt = (enum kern_kv_fmt)kv, s.ik_fmt = (enum kern_ik_fmt)ik;
            assert_int_equal(kern_kv_layout_init(&l, &s, NULL), 0);
            int64_t end = 0, off, bytes;
            for (int i = 0; i < l.n_parts; i++) {
                kern_kv_part(&l, i, &off, &bytes);
                assert_int_equal(off, (end + 255) / 256 * 256);
                assert_true(bytes > 0);
                end = off + bytes;
            }
            assert_true(end <= l.page_bytes && l.page_bytes - end < 4096 + 256);
            assert_int_equal(l.page_bytes % 4096, 0);
            end = sizeof(struct kern_kv_tail_head);
            for (int i = 0; i < s.n_layers; i++) {
                const struct kern_kv_layer *y = &l.layer[i];
                assert_true(y->window_off >= end);
                end = y->window_off + y->window_bytes;
                if (!y->ratio) continue;
                assert_true(y->mstate_off >= end && y->mstate_off % 64 == 0);
                end = y->mstate_off + y->mstate_bytes;
                if (!y->istate_bytes) continue;
                assert_true(y->istate_off >= end && y->istate_off % 64 == 0);
                end = y->istate_off + y->istate_bytes;
            }
            assert_true(l.stream_off >= end && l.stream_off + s.stream_width * 4 <= l.tail_bytes);
        }
}

/* Workers of other builds read these bytes: a change needs a new KERN_KV_LAYOUT_VERSION. */
static void test_kv_layout__version_1_stays_as_it_is(void **state)
{
    /* of a page, of a tail; where layer 42 has its index keys and its index compressor */
    static const int64_t want[3][4][4] = {{{905216, 4554752, 897536, 4402432},
                                           {991232, 4554752, 979456, 4402432},
                                           {1155072, 4554752, 1138176, 4402432},
                                           {1499136, 4554752, 1465856, 4402432}},
                                          {{1511424, 7032832, 1504256, 6824192},
                                           {1597440, 7032832, 1586176, 6824192},
                                           {1761280, 7032832, 1744896, 6824192},
                                           {2105344, 7032832, 2072576, 6824192}},
                                          {{2928640, 12800000, 2921472, 12460288},
                                           {3014656, 12800000, 3003392, 12460288},
                                           {3178496, 12800000, 3162112, 12460288},
                                           {3522560, 12800000, 3489792, 12460288}}};
    struct kern_kv_layout l;
    struct kern_kv_spec s = flash();
    (void)state;
    assert_int_equal(KERN_KV_LAYOUT_VERSION, 1);
    for (int kv = 0; kv < 3; kv++)
        for (int ik = 0; ik < 4; ik++) {
            s.kv_fmt = (enum kern_kv_fmt)kv, s.ik_fmt = (enum kern_ik_fmt)ik;
            assert_int_equal(kern_kv_layout_init(&l, &s, NULL), 0);
            assert_int_equal(l.page_bytes, want[kv][ik][0]);
            assert_int_equal(l.tail_bytes, want[kv][ik][1]);
            assert_int_equal(l.layer[42].index_off, want[kv][ik][2]);
            assert_int_equal(l.layer[42].istate_off, want[kv][ik][3]);
        }
}

static void check_companion(const struct kern_kv_layout *l)
{
    int64_t end = 0;
    for (int i = 0; i < l->spec.n_layers; i++)
        for (int s = 0; l->layer[i].index_bytes && s < KERN_SHADOWS; s++) {
            const enum kern_ik_fmt fmt = kern_shadow_fmt((enum kern_shadow)s);
            if (fmt == l->spec.ik_fmt) continue; /* in the page itself */
            assert_int_equal(l->layer[i].shadow_off[s], (end + 255) / 256 * 256);
            end = l->layer[i].shadow_off[s] +
                  kern_ik_rows_bytes(fmt, l->spec.index_dim, l->layer[i].per_page);
        }
    assert_true(end > 0 && end <= l->shadow_bytes && l->shadow_bytes <= l->page_bytes);
}

static void test_kv_layout__companions_hold_the_other_types(void **state)
{
    struct kern_kv_layout l;
    struct kern_kv_spec s = flash();
    (void)state;
    for (int kv = 0; kv < 3; kv++)
        for (int ik = 0; ik < 4; ik++) {
            s.kv_fmt = (enum kern_kv_fmt)kv, s.ik_fmt = (enum kern_ik_fmt)ik;
            assert_int_equal(kern_kv_layout_init(&l, &s, NULL), 0);
            if (ik == KERN_IK_F32)
                assert_int_equal(l.shadow_bytes, 0);
            else
                check_companion(&l);
        }
    /* The demo model's widths. */
    struct kern_kv_spec demo = {.n_layers = 7,
                                .ratios = {0, 0, 4, 128, 4, 128, 4},
                                .head_dim = 256,
                                .rope_dim = 64,
                                .window = 128,
                                .index_dim = 128};
    assert_int_equal(kern_kv_layout_init(&l, &demo, NULL), 0);
    check_companion(&l);
    /* Main entries of 128 values in fp8 are smaller than keys in the other types. */
    demo.head_dim = 128;
    assert_int_equal(kern_kv_layout_init(&l, &demo, NULL), 0);
    assert_int_equal(l.shadow_bytes, 0);
    /* No indexer, nothing to keep. */
    memset(demo.ratios, 0, sizeof demo.ratios);
    assert_int_equal(kern_kv_layout_init(&l, &demo, NULL), 0);
    assert_int_equal(l.shadow_bytes, 0);
}

static void test_kv_layout__page_tokens_follow_the_ratios(void **state)
{
    struct kern_kv_layout l;
    struct tow_err err;
    struct kern_kv_spec s = flash();
    (void)state;
    s.ratios[2] = 96;
    assert_int_equal(kern_kv_layout_init(&l, &s, NULL), 0);
    assert_int_equal(l.page_tokens, 384);
    s.page_tokens = 256;
    assert_int_equal(kern_kv_layout_init(&l, &s, &err), TOW_EINVAL);
    s.page_tokens = 768;
    assert_int_equal(kern_kv_layout_init(&l, &s, NULL), 0);
    s.page_tokens = 0, s.ratios[2] = 1021;
    assert_int_equal(kern_kv_layout_init(&l, &s, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "4096"));
}

static void test_kv_layout__no_compression_is_one_part(void **state)
{
    struct kern_kv_layout l;
    struct kern_kv_spec s = flash();
    int64_t off, bytes;
    (void)state;
    memset(s.ratios, 0, sizeof s.ratios);
    assert_int_equal(kern_kv_layout_init(&l, &s, NULL), 0);
    assert_int_equal(l.n_parts, 1);
    kern_kv_part(&l, 0, &off, &bytes);
    assert_true(off == 0 && bytes > 0 && bytes <= l.page_bytes);
}

static void test_kv_layout__bad_fields_are_named(void **state)
{
    (void)state;
#define BAD(change, word)                                                                          \
    do {                                                                                           \
        struct kern_kv_layout l = {.page_tokens = 7};                                              \
        struct tow_err err = {0};                                                                  \
        struct kern_kv_spec s = flash();                                                           \
        change;                                                                                    \
        assert_int_equal(kern_kv_layout_init(&l, &s, &err), TOW_EINVAL);                           \
        if (!strstr(err.msg, word)) fail_msg("\"%s\" lacks \"%s\"", err.msg, word);                \
        assert_int_equal(l.page_tokens, 7); /* untouched */                                        \
    } while (0)
    BAD(s.n_layers = 0, "layers");
    BAD(s.n_layers = 257, "256");
    BAD(s.n_mtp = 45, "mtp");
    BAD(s.ratios[5] = -4, "ratio");
    BAD(s.ratios[5] = 1025, "1024");
    BAD(s.head_dim = 0, "head_dim");
    BAD(s.rope_dim = 63, "rope_dim");
    BAD(s.rope_dim = 600, "512");
    BAD(s.head_dim = 500, "64");
    BAD(s.window = 0, "window");
    BAD(s.index_dim = 100, "index_dim");
    BAD(s.index_dim = 32, "rope_dim");
    BAD(s.page_tokens = 100, "page_tokens");
    BAD(s.page_tokens = 8192, "4096");
    BAD(s.kv_fmt = (enum kern_kv_fmt)9, "fp8");
    BAD(s.ik_fmt = (enum kern_ik_fmt)9, "fp4");
    BAD(s.stream_width = 0, "stream_width");
#undef BAD
}

static void test_kv_layout__quantized_rows_come_back_unchanged(void **state)
{
    enum { N = 5, D = 192, RD = 64 };
    (void)state;
    for (int fmt = 0; fmt < 4; fmt++) {
        uint8_t part[N * D * 4], again[sizeof part];
        float x[D], y[D];
        memset(part, 0xa5, sizeof part);
        for (int i = 0; i < N; i++) {
            for (int c = 0; c < D; c++) x[c] = (float)((i * 131 + c * 71) % 97 - 48) * 0.37f;
            if (i == 3) memset(x, 0, sizeof x);
            kern_ik_store((enum kern_ik_fmt)fmt, part, N, i, x, D);
        }
        memcpy(again, part, sizeof part);
        for (int i = 0; i < N; i++) {
            kern_ik_load((enum kern_ik_fmt)fmt, part, N, i, y, D);
            kern_ik_store((enum kern_ik_fmt)fmt, again, N, i, y, D);
            if (i == 3)
                for (int c = 0; c < D; c++) assert_true(y[c] == 0);
        }
        assert_memory_equal(again, part, sizeof part);
        for (int64_t b = kern_ik_rows_bytes((enum kern_ik_fmt)fmt, D, N); b < (int64_t)sizeof part;
             b++)
            assert_int_equal(part[b], 0xa5);
        if (fmt == 3) continue;
        memset(part, 0xa5, sizeof part);
        for (int i = 0; i < N; i++) {
            for (int c = 0; c < D; c++) x[c] = (float)((i * 131 + c * 71) % 97 - 48) * 0.37f;
            kern_kv_store((enum kern_kv_fmt)fmt, part, N, i, x, D, RD);
        }
        memcpy(again, part, sizeof part);
        for (int i = 0; i < N; i++) {
            kern_kv_load((enum kern_kv_fmt)fmt, part, N, i, y, D, RD);
            kern_kv_store((enum kern_kv_fmt)fmt, again, N, i, y, D, RD);
        }
        assert_memory_equal(again, part, sizeof part);
    }
}

static void test_kv_layout__an_infinite_scale_makes_its_key_nan(void **state)
{
    enum { N = 3, D = 64 };
    uint8_t part[N * (D + 4)];
    float x[D], y[D];
    (void)state;
    for (int c = 0; c < D; c++) x[c] = c % 3 ? (float)c : 0;
    for (int i = 0; i < N; i++) {
        const float scale = i == 0 ? INFINITY : -INFINITY;
        kern_ik_store(KERN_IK_FP8, part, N, i, x, D);
        if (i < 2) memcpy(part + N * D + i * 4, &scale, 4);
    }
    for (int i = 0; i < N; i++) {
        kern_ik_load(KERN_IK_FP8, part, N, i, y, D);
        for (int c = 0; c < D; c++) assert_int_equal(isnan(y[c]) != 0, i < 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_layout__sizes_are_those_of_the_model),
        cmocka_unit_test(test_kv_layout__parts_tile_the_page_and_the_tail),
        cmocka_unit_test(test_kv_layout__version_1_stays_as_it_is),
        cmocka_unit_test(test_kv_layout__companions_hold_the_other_types),
        cmocka_unit_test(test_kv_layout__page_tokens_follow_the_ratios),
        cmocka_unit_test(test_kv_layout__no_compression_is_one_part),
        cmocka_unit_test(test_kv_layout__bad_fields_are_named),
        cmocka_unit_test(test_kv_layout__quantized_rows_come_back_unchanged),
        cmocka_unit_test(test_kv_layout__an_infinite_scale_makes_its_key_nan)};
    return cmocka_run_group_tests_name("kernels/kv_layout", tests, NULL, NULL);
}
