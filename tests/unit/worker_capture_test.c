/* Tests of common/worker/capture.c: which asks are kept, which rows are asked for, and how what the
 * engine found reaches the wire. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/worker/capture.h"

#include <math.h>
#include <string.h>

static const uint32_t layers[2] = {2, 4}, entries[3] = {0, 7, 40};

static struct wire_capture an_ask(void)
{
    return (struct wire_capture){.steps = WIRE_CAPTURE_ALL,
                                 .shadow = 1 << WIRE_SHADOW_FP8,
                                 .max_steps = 3,
                                 .layers = {layers, 2},
                                 .entries = {entries, 3}};
}

/* Valid until the next call. */
static struct wire_bytes packed(const struct wire_capture *a)
{
    static uint8_t bytes[WIRE_MAX_CAPTURE];
    struct wire_writer w = {.data = bytes, .cap = sizeof bytes};
    wire_put_capture(&w, a);
    assert_false(w.failed);
    return (struct wire_bytes){bytes, (uint32_t)w.len};
}

static struct work_capture *kept(const struct wire_capture *a)
{
    struct work_capture *c = NULL;
    bool shadowed;
    assert_null(work_capture_check(packed(a), true, &shadowed));
    assert_int_equal(shadowed, a->shadow != 0);
    assert_int_equal(work_capture_new(&c, packed(a)), 0);
    assert_non_null(c);
    assert_int_equal(work_capture_shadowed(c), shadowed);
    return c;
}

static void test_work_capture__no_ask_is_nothing(void **state)
{
    (void)state;
    struct work_capture *c = (void *)&c;
    struct wire_captured row;
    bool shadowed = true;
    assert_null(work_capture_check((struct wire_bytes){NULL, 0}, false, &shadowed));
    assert_false(shadowed);
    assert_int_equal(work_capture_new(&c, (struct wire_bytes){NULL, 0}), 0);
    assert_null(c);
    assert_null(work_capture_begin(NULL, 0));
    assert_false(work_capture_take(NULL, &row));
    assert_false(work_capture_shadowed(NULL));
    work_capture_warn("p0", NULL);
    work_capture_free(NULL);
}

static void test_work_capture__an_ask_that_cannot_be_kept_names_its_field(void **state)
{
    (void)state;
    static const uint32_t far[1] = {UINT32_C(1) << 31};
    struct wire_capture a = an_ask();
    bool shadowed;
    assert_non_null(strstr(work_capture_check(packed(&a), false, &shadowed), "capture.shadow"));
    a.shadow = 0;
    assert_null(work_capture_check(packed(&a), false, &shadowed));
    assert_false(shadowed);
    a.layers = (struct wire_ids){far, 1};
    assert_non_null(strstr(work_capture_check(packed(&a), true, &shadowed), "capture.layers"));
    a = an_ask();
    a.entries = (struct wire_ids){far, 1};
    assert_non_null(strstr(work_capture_check(packed(&a), true, &shadowed), "capture.entries"));
    a = an_ask();
    a.steps = 0;
    assert_non_null(strstr(work_capture_check(packed(&a), true, &shadowed), "capture:"));
}

static void test_work_capture__steps_asked_for_are_given_and_no_others(void **state)
{
    (void)state;
    static const bool want[4][6] = {[WIRE_CAPTURE_PREFILL] = {true},
                                    [WIRE_CAPTURE_DECODE] = {false, true, true, true},
                                    [WIRE_CAPTURE_ALL] = {true, true, true, true}};
    for (uint8_t steps = WIRE_CAPTURE_PREFILL; steps <= WIRE_CAPTURE_ALL; steps++) {
        struct wire_capture a = an_ask();
        a.steps = steps;
        struct work_capture *c = kept(&a);
        for (uint32_t step = 0; step < 6; step++) {
            const struct model_capture *m = work_capture_begin(c, step);
            assert_int_equal(m != NULL, want[steps][step]);
            if (!m) continue;
            assert_int_equal(m->n_layers, 2);
            assert_int_equal(m->n_entries, 3);
            for (int i = 0; i < 2; i++) assert_int_equal(m->layers[i], layers[i]);
            for (int i = 0; i < 3; i++) assert_int_equal(m->entries[i], entries[i]);
            assert_int_equal(m->shadow, 1 << KERN_SHADOW_FP8);
            assert_false(m->lists);
        }
        work_capture_free(c);
    }
}

static const struct kern_rank own[2] = {{3, 0, 0.5f}, {2, 1, -1.5f}};
static const struct kern_rank other[2] = {{1, 0, 0.25f}, {4, 2, INFINITY}};

static void find_row(const struct model_capture *m, int32_t layer)
{
    struct model_capture_row row = {.layer = layer,
                                    .topk = 2,
                                    .n_entries = 2,
                                    .n_visible = 20,
                                    .entries = m->entries,
                                    .own = {own, 0.75f, NAN},
                                    .shadow = m->shadow};
    row.shadows[KERN_SHADOW_FP8] = (struct model_ranks){other, NAN, -2};
    m->on_row(m->ctx, &row);
}

static void test_work_capture__rows_come_out_once_as_the_engine_found_them(void **state)
{
    (void)state;
    struct wire_capture a = an_ask();
    struct work_capture *c = kept(&a);
    const struct model_capture *m = work_capture_begin(c, 2);
    struct wire_captured got;
    struct wire_capture_row r;
    find_row(m, 2);
    find_row(m, 4);
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(work_capture_take(c, &got));
        assert_int_equal(got.step, 2);
        assert_int_equal(got.layer, layers[i]);
        assert_int_equal(wire_get_capture_row(&r, got.row.data, got.row.len), 0);
        assert_int_equal(r.topk, 2);
        assert_int_equal(r.n_visible, 20);
        assert_int_equal(r.entries.n, 2);
        assert_int_equal(wire_ids_at(r.entries, 1), 7);
        assert_true(r.own.kth == 0.75f && isnan(r.own.next));
        assert_int_equal(r.shadow, 1 << WIRE_SHADOW_FP8);
        const struct wire_ranks *f = &r.shadows[WIRE_SHADOW_FP8];
        assert_true(isnan(f->kth) && f->next == -2);
        for (uint32_t e = 0; e < 2; e++) {
            struct wire_rank x = wire_rank_at(&r.own, e), y = wire_rank_at(f, e);
            assert_true(x.rank == (uint32_t)own[e].rank && x.equal == (uint32_t)own[e].equal &&
                        x.score == own[e].score);
            assert_true(y.rank == (uint32_t)other[e].rank && y.equal == (uint32_t)other[e].equal &&
                        y.score == other[e].score);
        }
    }
    assert_false(work_capture_take(c, &got));
    find_row(work_capture_begin(c, 3), 4);
    assert_null(work_capture_begin(c, 4)); /* rows of the step before are gone */
    assert_false(work_capture_take(c, &got));
    work_capture_free(c);
}

static void test_work_capture__no_memory_costs_the_rows_of_the_step_only(void **state)
{
    (void)state;
    struct wire_capture a = an_ask();
    struct work_capture *c = kept(&a);
    struct wire_captured got;
    const struct model_capture *m = work_capture_begin(c, 0);
    find_row(m, 2);
    c->rows.max = c->rows.len; /* no room for another */
    find_row(m, 4);
    find_row(m, 6);
    assert_true(c->lost);
    assert_false(work_capture_take(c, &got));
    work_capture_warn("p0", m);
    find_row(work_capture_begin(c, 1), 2);
    assert_false(c->lost);
    assert_true(work_capture_take(c, &got));
    assert_int_equal(got.step, 1);
    assert_false(work_capture_take(c, &got));
    work_capture_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_work_capture__no_ask_is_nothing),
        cmocka_unit_test(test_work_capture__an_ask_that_cannot_be_kept_names_its_field),
        cmocka_unit_test(test_work_capture__steps_asked_for_are_given_and_no_others),
        cmocka_unit_test(test_work_capture__rows_come_out_once_as_the_engine_found_them),
        cmocka_unit_test(test_work_capture__no_memory_costs_the_rows_of_the_step_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
