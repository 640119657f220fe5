/* Tests of proto/capture.c: asks and rows come back as they went, and no other bytes pass. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "proto/capture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t ids[6] = {0, 1, 7, 500, 501, 1u << 20};

static struct wire_capture an_ask(void)
{
    return (struct wire_capture){.steps = WIRE_CAPTURE_DECODE,
                                 .shadow = 7,
                                 .lists = 1,
                                 .max_steps = WIRE_CAPTURE_MAX_STEPS,
                                 .layers = {ids, 3},
                                 .entries = {ids, 6}};
}

static int take_ask(const struct wire_capture *c, struct wire_capture *out)
{
    static uint8_t bytes[WIRE_MAX_CAPTURE];
    struct wire_writer w = {.data = bytes, .cap = sizeof bytes};
    wire_put_capture(&w, c);
    assert_false(w.failed);
    return wire_get_capture(out, bytes, w.len);
}

static void test_capture__ask_comes_back_as_it_went(void **state)
{
    (void)state;
    struct wire_capture c = an_ask(), out;
    assert_int_equal(take_ask(&c, &out), 0);
    assert_int_equal(out.steps, WIRE_CAPTURE_DECODE);
    assert_int_equal(out.shadow, 7);
    assert_int_equal(out.lists, 1);
    assert_int_equal(out.max_steps, WIRE_CAPTURE_MAX_STEPS);
    assert_int_equal(out.layers.n, 3);
    assert_int_equal(out.entries.n, 6);
    for (uint32_t i = 0; i < 6; i++) assert_int_equal(wire_ids_at(out.entries, i), ids[i]);
    c.layers.n = 0; /* all layers */
    assert_int_equal(take_ask(&c, &out), 0);
    assert_int_equal(out.layers.n, 0);
}

static void test_capture__ask_out_of_range_is_refused(void **state)
{
    (void)state;
    static const uint32_t unordered[2] = {5, 4}, twice[2] = {5, 5};
    struct wire_capture c, out;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        c = an_ask();                                                                              \
        change;                                                                                    \
        assert_int_equal(take_ask(&c, &out), TOW_EWIRE);                                           \
    } while (0)
    REFUSED(c.steps = 0);
    REFUSED(c.steps = WIRE_CAPTURE_ALL + 1);
    REFUSED(c.shadow = 1 << WIRE_SHADOWS);
    REFUSED(c.lists = 2);
    REFUSED(c.max_steps = 0);
    REFUSED(c.max_steps = WIRE_CAPTURE_MAX_STEPS + 1);
    REFUSED(c.entries.n = 0);
    REFUSED((c.entries = (struct wire_ids){unordered, 2}));
    REFUSED((c.entries = (struct wire_ids){twice, 2}));
    REFUSED((c.layers = (struct wire_ids){unordered, 2}));
#undef REFUSED
}

/* The largest ask and the largest row there can be fit the caps of their fields. */
static void test_capture__largest_ones_fit_their_caps(void **state)
{
    (void)state;
    uint32_t many[WIRE_CAPTURE_MAX_LIST];
    static uint8_t ranks[WIRE_CAPTURE_MAX_ENTRIES * WIRE_RANK_BYTES];
    static uint8_t bytes[WIRE_MAX_CAPTURED];
    for (uint32_t i = 0; i < WIRE_CAPTURE_MAX_LIST; i++) many[i] = i;
    struct wire_capture c = an_ask(), c_out;
    c.layers = (struct wire_ids){many, WIRE_CAPTURE_MAX_LAYERS};
    c.entries = (struct wire_ids){many, WIRE_CAPTURE_MAX_ENTRIES};
    assert_int_equal(take_ask(&c, &c_out), 0);

    struct wire_writer k = {.data = ranks, .cap = sizeof ranks};
    for (uint32_t i = 0; i < WIRE_CAPTURE_MAX_ENTRIES; i++) {
        wire_put_u32(&k, i + 1);
        wire_put_u32(&k, 0);
        wire_put_f32(&k, 1);
    }
    struct wire_ranks all = {.ranks = {ranks, sizeof ranks}};
    struct wire_capture_row r = {.topk = WIRE_CAPTURE_MAX_LIST,
                                 .n_visible = 5000,
                                 .entries = c.entries,
                                 .own = all,
                                 .shadow = 7,
                                 .shadows = {all, all, all},
                                 .list = {many, WIRE_CAPTURE_MAX_LIST}},
                            out;
    struct wire_writer w = {.data = bytes, .cap = sizeof bytes};
    wire_put_capture_row(&w, &r);
    assert_false(w.failed);
    assert_int_equal(wire_get_capture_row(&out, bytes, w.len), 0);
    assert_int_equal(out.list.n, WIRE_CAPTURE_MAX_LIST);
    assert_int_equal(wire_rank_at(&out.shadows[WIRE_SHADOW_FP4], 511).rank, 512);
    /* One more than the most there may be. */
    c.entries.n++;
    struct wire_writer one_more = {.data = bytes, .cap = sizeof bytes};
    wire_put_capture(&one_more, &c);
    assert_true(one_more.failed);
}

/* A row of two entries; each number in it can be spoiled. */
struct row_case {
    uint32_t topk, n_visible, entries[2], rank[2], shadow_rank, list[2], n_list;
    uint8_t shadow;
};

static int take_row(const struct row_case *v, struct wire_capture_row *out)
{
    static uint8_t bytes[512], own[2 * WIRE_RANK_BYTES], other[2 * WIRE_RANK_BYTES];
    struct wire_writer a = {.data = own, .cap = sizeof own},
                       b = {.data = other, .cap = sizeof other},
                       w = {.data = bytes, .cap = sizeof bytes};
    for (int i = 0; i < 2; i++) {
        wire_put_u32(&a, v->rank[i]);
        wire_put_u32(&a, 4);
        wire_put_f32(&a, -0.5f);
        wire_put_u32(&b, v->shadow_rank);
        wire_put_u32(&b, 0);
        wire_put_f32(&b, 2.5f);
    }
    struct wire_capture_row r = {.topk = v->topk,
                                 .n_visible = v->n_visible,
                                 .entries = {v->entries, 2},
                                 .own = {NAN, NAN, {own, sizeof own}},
                                 .shadow = v->shadow,
                                 .list = {v->list, v->n_list}};
    r.shadows[WIRE_SHADOW_FP8] = (struct wire_ranks){1.5f, 1, {other, sizeof other}};
    wire_put_capture_row(&w, &r);
    assert_false(w.failed);
    /* A copy of the exact size, so that a sanitizer sees a read behind it. */
    uint8_t *exact = malloc(w.len);
    memcpy(exact, bytes, w.len);
    for (size_t cut = 0; cut < w.len; cut++)
        assert_int_equal(wire_get_capture_row(out, exact, cut), TOW_EWIRE);
    int rc = wire_get_capture_row(out, exact, w.len);
    free(exact);
    if (rc == 0) assert_int_equal(wire_get_capture_row(out, bytes, w.len), 0);
    return rc;
}

static const struct row_case good_row = {.topk = 2,
                                         .n_visible = 9,
                                         .entries = {3, 8},
                                         .rank = {1, 9},
                                         .shadow_rank = 2,
                                         .list = {3, 4},
                                         .n_list = 2,
                                         .shadow = 1 << WIRE_SHADOW_FP8};

static void test_capture__row_comes_back_as_it_went(void **state)
{
    (void)state;
    struct wire_capture_row out;
    assert_int_equal(take_row(&good_row, &out), 0);
    assert_int_equal(out.topk, 2);
    assert_int_equal(out.n_visible, 9);
    assert_true(isnan(out.own.kth) && isnan(out.own.next));
    assert_int_equal(wire_ids_at(out.entries, 1), 8);
    struct wire_rank k = wire_rank_at(&out.own, 1);
    assert_int_equal(k.rank, 9);
    assert_int_equal(k.equal, 4);
    assert_true(k.score == -0.5f);
    assert_true(out.shadows[WIRE_SHADOW_FP8].kth == 1.5f);
    assert_int_equal(wire_rank_at(&out.shadows[WIRE_SHADOW_FP8], 0).rank, 2);
    assert_int_equal(wire_ids_at(out.list, 1), 4);
}

static void test_capture__row_that_contradicts_itself_is_refused(void **state)
{
    (void)state;
    struct wire_capture_row out;
    struct row_case v;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        v = good_row;                                                                              \
        change;                                                                                    \
        assert_int_equal(take_row(&v, &out), TOW_EWIRE);                                           \
    } while (0)
    REFUSED(v.topk = 0);
    REFUSED(v.n_visible = 8);   /* entry 8 would not be visible */
    REFUSED(v.entries[0] = 8);  /* twice */
    REFUSED(v.entries[0] = 9);  /* unordered */
    REFUSED(v.rank[0] = 0);     /* ranks are 1-based */
    REFUSED(v.rank[1] = 10);    /* below all entries there are */
    REFUSED(v.shadow_rank = 0); /* by other keys too */
    REFUSED(v.shadow_rank = 10);
    REFUSED(v.list[1] = 3);
    REFUSED(v.list[1] = 9);
    REFUSED(v.topk = 1); /* more selected than are selected */
#undef REFUSED
}

static void test_capture__random_bytes_give_a_value_or_ewire(void **state)
{
    (void)state;
    uint32_t x = 12345;
    struct wire_capture c;
    struct wire_capture_row r;
    for (int round = 0; round < 20000; round++) {
        size_t n = (size_t)(round % 97);
        uint8_t *bytes = malloc(n ? n : 1);
        for (size_t i = 0; i < n; i++) {
            x = x * 1664525 + 1013904223;
            bytes[i] = (x >> 24) % 4 ? 0 : (uint8_t)(x >> 16) % 8; /* small numbers get further */
        }
        int a = wire_get_capture(&c, bytes, n), b = wire_get_capture_row(&r, bytes, n);
        assert_true((a == 0 || a == TOW_EWIRE) && (b == 0 || b == TOW_EWIRE));
        free(bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_capture__ask_comes_back_as_it_went),
        cmocka_unit_test(test_capture__ask_out_of_range_is_refused),
        cmocka_unit_test(test_capture__largest_ones_fit_their_caps),
        cmocka_unit_test(test_capture__row_comes_back_as_it_went),
        cmocka_unit_test(test_capture__row_that_contradicts_itself_is_refused),
        cmocka_unit_test(test_capture__random_bytes_give_a_value_or_ewire),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
