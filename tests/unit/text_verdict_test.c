/* Tests of text/verdict.h: each verdict, and the last rank on either side of each border. */
#include "tests/support/check.h"

#include "common/text/verdict.h"

#include <string.h>

static struct text_verdict judge(const struct text_verdict_row *rows, size_t n)
{
    struct text_verdict v;
    text_verdict_judge(&v, rows, n, false, false);
    return v;
}

static enum text_verdict_kind kind_of(struct text_verdict_row row)
{
    return judge(&row, 1).kind;
}

static void test_verdict__nothing_seen_is_no_verdict(void **state)
{
    (void)state;
    const struct text_verdict_row blind = {.step = 3, .layer = 4, .topk = 8};
    assert_int_equal(judge(NULL, 0).kind, TEXT_VERDICT_NONE);
    assert_int_equal(judge(&blind, 1).kind, TEXT_VERDICT_NONE);
    assert_null(text_verdict_name(TEXT_VERDICT_NONE));
}

static void test_verdict__borders_of_rank(void **state)
{
    (void)state;
    assert_int_equal(kind_of((struct text_verdict_row){.topk = 8, .rank = 1}),
                     TEXT_VERDICT_SELECTED);
    assert_int_equal(kind_of((struct text_verdict_row){.topk = 8, .rank = 8}),
                     TEXT_VERDICT_SELECTED);
    assert_int_equal(kind_of((struct text_verdict_row){.topk = 8, .rank = 9}),
                     TEXT_VERDICT_COVERAGE);
    assert_int_equal(kind_of((struct text_verdict_row){.topk = 8, .rank = 32}),
                     TEXT_VERDICT_COVERAGE);
    assert_int_equal(kind_of((struct text_verdict_row){.topk = 8, .rank = 33}),
                     TEXT_VERDICT_DISCRIMINATION);
    /* Four times the largest top-k there is does not wrap. */
    assert_int_equal(kind_of((struct text_verdict_row){.topk = UINT32_MAX / 2, .rank = UINT32_MAX}),
                     TEXT_VERDICT_COVERAGE);
}

static void test_verdict__the_layer_that_looks_decides(void **state)
{
    (void)state;
    const struct text_verdict_row rows[] = {{.step = 0, .layer = 2, .topk = 8, .rank = 900},
                                            {.step = 0, .layer = 4, .topk = 8, .rank = 12},
                                            {.step = 0, .layer = 6, .topk = 8},
                                            {.step = 1, .layer = 4, .topk = 8, .rank = 5},
                                            {.step = 2, .layer = 4, .topk = 8, .rank = 5},
                                            {.step = 1, .layer = 2, .topk = 8, .rank = 5}};
    struct text_verdict v = judge(rows, 3);
    assert_int_equal(v.kind, TEXT_VERDICT_COVERAGE);
    assert_int_equal(v.layer, 4);
    assert_int_equal(v.rank, 12);
    /* Of equal ranks the earlier step, then the lower layer, whatever the order of the rows. */
    v = judge(rows, 6);
    assert_int_equal(v.kind, TEXT_VERDICT_SELECTED);
    assert_int_equal(v.step, 1);
    assert_int_equal(v.layer, 2);
    /* Selected with a worse rank beats not selected with a better one. */
    const struct text_verdict_row mixed[] = {{.layer = 2, .topk = 4, .rank = 5},
                                             {.layer = 4, .topk = 8, .rank = 7}};
    v = judge(mixed, 2);
    assert_int_equal(v.kind, TEXT_VERDICT_SELECTED);
    assert_int_equal(v.layer, 4);
}

static void test_verdict__expected_answer_tells_downstream_from_selected(void **state)
{
    (void)state;
    const struct text_verdict_row in = {.layer = 4, .topk = 8, .rank = 2};
    const struct text_verdict_row out = {.layer = 4, .topk = 8, .rank = 20};
    struct text_verdict v;
    text_verdict_judge(&v, &in, 1, true, true);
    assert_int_equal(v.kind, TEXT_VERDICT_SELECTED);
    assert_true(v.expects && v.found);
    text_verdict_judge(&v, &in, 1, true, false);
    assert_int_equal(v.kind, TEXT_VERDICT_DOWNSTREAM);
    /* What was not selected is no fault of what comes after selection, whatever the answer. */
    text_verdict_judge(&v, &out, 1, true, false);
    assert_int_equal(v.kind, TEXT_VERDICT_COVERAGE);
    text_verdict_judge(&v, &out, 1, true, true);
    assert_int_equal(v.kind, TEXT_VERDICT_COVERAGE);
    assert_true(v.found);
    text_verdict_judge(&v, &in, 1, false, true); /* found means nothing without expects */
    assert_false(v.found);
}

static void test_verdict__coarsest_keys_that_suffice_are_named(void **state)
{
    (void)state;
    struct text_verdict_row row = {.layer = 4, .topk = 8, .rank = 9, .shadow = {1, 8, 9}};
    struct text_verdict v = judge(&row, 1);
    assert_int_equal(v.kind, TEXT_VERDICT_KEY_PRECISION); /* before coverage */
    assert_true(v.has_precision);
    assert_int_equal(v.precision, TEXT_FP8);
    assert_int_equal(v.precision_rank, 8);
    row.shadow[TEXT_FP8] = 9;
    v = judge(&row, 1);
    assert_int_equal(v.precision, TEXT_BF16);
    assert_int_equal(v.precision_rank, 1);
    row.shadow[TEXT_BF16] = 0; /* not looked at */
    assert_int_equal(judge(&row, 1).kind, TEXT_VERDICT_COVERAGE);
    row.rank = 8; /* selected by its own keys: others do not matter */
    assert_int_equal(judge(&row, 1).kind, TEXT_VERDICT_SELECTED);
    /* Another layer's row may be the one they help; the best rank stays that of the best row. */
    const struct text_verdict_row two[] = {{.layer = 2, .topk = 8, .rank = 10, .shadow = {10}},
                                           {.layer = 4, .topk = 8, .rank = 90, .shadow = {3}}};
    v = judge(two, 2);
    assert_int_equal(v.kind, TEXT_VERDICT_KEY_PRECISION);
    assert_int_equal(v.rank, 10);
    assert_int_equal(v.layer, 2);
    assert_int_equal(v.precision_rank, 3);
    assert_int_equal(v.precision_layer, 4);
}

static void test_verdict__discrimination_names_the_best_other_rank(void **state)
{
    (void)state;
    const struct text_verdict_row row = {
        .layer = 4, .topk = 8, .rank = 400, .shadow = {380, 0, 420}};
    struct text_verdict v = judge(&row, 1);
    assert_int_equal(v.kind, TEXT_VERDICT_DISCRIMINATION);
    assert_true(v.has_precision);
    assert_int_equal(v.precision, TEXT_BF16);
    assert_int_equal(v.precision_rank, 380);
    const struct text_verdict_row alone = {.layer = 4, .topk = 8, .rank = 400};
    v = judge(&alone, 1);
    assert_int_equal(v.kind, TEXT_VERDICT_DISCRIMINATION);
    assert_false(v.has_precision);
}

static void test_verdict__line_for_people_has_the_numbers(void **state)
{
    (void)state;
    char line[256], cut[8];
    const struct text_verdict_row row = {
        .step = 7, .layer = 4, .topk = 512, .rank = 700, .shadow = {300, 600}};
    struct text_verdict v = judge(&row, 1);
    text_verdict_print(&v, line, sizeof line);
    assert_string_equal(line, "rank 700 misses top-k 512 (layer 4, step 7); by bf16 keys it would "
                              "be selected with rank 300 (layer 4, step 7)");
    for (int k = TEXT_VERDICT_NONE; k <= TEXT_VERDICT_DOWNSTREAM; k++) {
        v.kind = (enum text_verdict_kind)k;
        text_verdict_print(&v, line, sizeof line);
        assert_true(strlen(line) > 20);
        assert_null(strchr(line, '\n'));
        text_verdict_print(&v, cut, sizeof cut);
        assert_int_equal(strlen(cut), sizeof cut - 1);
    }
    assert_int_equal(text_precision_find("fp4"), TEXT_FP4);
    assert_int_equal(text_precision_find("fp16"), -1);
    assert_string_equal(text_precision_name(TEXT_BF16), "bf16");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_verdict__nothing_seen_is_no_verdict),
        cmocka_unit_test(test_verdict__borders_of_rank),
        cmocka_unit_test(test_verdict__the_layer_that_looks_decides),
        cmocka_unit_test(test_verdict__expected_answer_tells_downstream_from_selected),
        cmocka_unit_test(test_verdict__coarsest_keys_that_suffice_are_named),
        cmocka_unit_test(test_verdict__discrimination_names_the_best_other_rank),
        cmocka_unit_test(test_verdict__line_for_people_has_the_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
