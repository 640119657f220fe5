/* Tests of common/model/sample.h. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/model/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct model_sampling greedy = {.top_p = 1, .n_logprobs = -1};

static int draw(const float *x, int V, struct model_sampling p, const int32_t *out, int n_out,
                uint64_t i, struct model_choice *c)
{
    void *scratch = malloc((size_t)model_sample_scratch(V));
    int rc = model_sample(x, V, &p, out, n_out, i, scratch, c);
    free(scratch);
    return rc;
}

static void test_model_sample__row_without_valid_token_is_an_error(void **state)
{
    (void)state;
    enum { V = 37 };
    float x[V];
    struct model_choice c;
    struct model_sampling forms[] = {greedy, greedy, greedy, greedy};
    forms[1].temperature = 1;
    forms[2].temperature = 1, forms[2].top_p = 1e-9f;
    forms[3].temperature = 1, forms[3].top_k = 1, forms[3].min_p = 1;
    for (size_t f = 0; f < 4; f++) {
        for (int i = 0; i < V; i++) x[i] = -INFINITY;
        assert_int_equal(draw(x, V, forms[f], NULL, 0, 0, &c), TOW_ENUMERIC);
        x[V - 1] = 0;
        assert_int_equal(draw(x, V, forms[f], NULL, 0, 0, &c), 0);
        assert_int_equal(c.id, V - 1);
        x[5] = INFINITY;
        assert_int_equal(draw(x, V, forms[f], NULL, 0, 0, &c), 0);
        assert_int_equal(c.id, 5);
        x[7] = NAN;
        assert_int_equal(draw(x, V, forms[f], NULL, 0, 0, &c), TOW_ENUMERIC);
        for (int i = 0; i < V; i++) x[i] = 2.5f;
        for (uint64_t k = 0; k < 50; k++) {
            assert_int_equal(draw(x, V, forms[f], NULL, 0, k, &c), 0);
            assert_in_range(c.id, 0, V - 1);
            if (f != 1) assert_int_equal(c.id, 0); /* ties: lowest id */
        }
    }
}

static void test_model_sample__frequencies_follow_the_distribution(void **state)
{
    (void)state;
    float x[5] = {0, 1, 2, 3, -1};
    double p[5], sum = 0;
    for (int i = 0; i < 5; i++) sum += p[i] = exp(x[i] / 0.7);
    struct model_sampling s = greedy;
    s.temperature = 0.7f;
    int hits[5] = {0}, n = 40000;
    for (int k = 0; k < n; k++) {
        struct model_choice c;
        s.seed = 1234;
        assert_int_equal(draw(x, 5, s, NULL, 0, (uint64_t)k, &c), 0);
        hits[c.id]++;
    }
    for (int i = 0; i < 5; i++) {
        double want = n * p[i] / sum;
        assert_true(fabs(hits[i] - want) < 5 * sqrt(want) + 5);
    }
    /* top_k 2 leaves the two best; top_p that only the best reaches leaves it alone. */
    s.top_k = 2;
    for (int k = 0; k < 500; k++) {
        struct model_choice c;
        draw(x, 5, s, NULL, 0, (uint64_t)k, &c);
        assert_in_range(c.id, 2, 3);
    }
    s.top_k = 0;
    s.top_p = 0.5f;
    for (int k = 0; k < 500; k++) {
        struct model_choice c;
        draw(x, 5, s, NULL, 0, (uint64_t)k, &c);
        assert_int_equal(c.id, 3);
    }
    s.top_p = 1;
    s.min_p = 0.1f; /* exp(-1/0.7) = 0.24 stays, exp(-2/0.7) = 0.057 goes */
    for (int k = 0; k < 500; k++) {
        struct model_choice c;
        draw(x, 5, s, NULL, 0, (uint64_t)k, &c);
        assert_in_range(c.id, 2, 3);
    }
}

static void test_model_sample__same_seed_and_index_draw_the_same(void **state)
{
    (void)state;
    enum { V = 300 };
    float x[V];
    srand(3);
    for (int i = 0; i < V; i++) x[i] = (float)rand() / (float)RAND_MAX * 6;
    struct model_sampling s = greedy;
    s.temperature = 1, s.top_p = 0.9f, s.seed = 77;
    int differ = 0;
    for (uint64_t k = 0; k < 100; k++) {
        struct model_choice a, b, c;
        draw(x, V, s, NULL, 0, k, &a);
        draw(x, V, s, NULL, 0, k, &b);
        assert_int_equal(a.id, b.id);
        struct model_sampling o = s;
        o.seed = 78;
        draw(x, V, o, NULL, 0, k, &c);
        differ += a.id != c.id;
    }
    assert_true(differ > 50);
}

static void test_model_sample__penalties_and_bias_move_the_choice_not_the_logprobs(void **state)
{
    (void)state;
    float x[4] = {1, 0.9f, 0.5f, -1};
    int32_t out[] = {0, 0, 1, 99};
    struct model_choice c;
    struct model_sampling s = greedy;
    s.n_logprobs = 3;
    s.frequency_penalty = 0.1f; /* 0 twice: 0.8; 1 once: 0.8; tie: lower id */
    assert_int_equal(draw(x, 4, s, out, 3, 3, &c), 0);
    assert_int_equal(c.id, 0);
    s.presence_penalty = 0.5f;
    draw(x, 4, s, out, 4, 3, &c);
    assert_int_equal(c.id, 2);
    struct model_bias b[] = {{2, -100}, {3, 50}, {77, 5}};
    s.bias = b, s.n_bias = 3;
    draw(x, 4, s, out, 3, 3, &c);
    assert_int_equal(c.id, 3);
    double lse = log(exp(1.0) + exp((double)0.9f) + exp(0.5) + exp(-1.0));
    assert_true(fabs((double)c.logprob - (-1 - lse)) < 1e-6);
    assert_int_equal(c.n_top, 3);
    assert_int_equal(c.top_ids[0], 0);
    assert_int_equal(c.top_ids[2], 2);
    assert_true(fabs((double)c.top_logprobs[1] - ((double)0.9f - lse)) < 1e-6);
    struct model_bias all[] = {{0, -100}, {1, -100}, {2, -100}, {3, -100}};
    s.bias = all, s.n_bias = 4;
    assert_int_equal(draw(x, 4, s, out, 3, 3, &c), TOW_ENUMERIC);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_sample__row_without_valid_token_is_an_error),
        cmocka_unit_test(test_model_sample__frequencies_follow_the_distribution),
        cmocka_unit_test(test_model_sample__same_seed_and_index_draw_the_same),
        cmocka_unit_test(test_model_sample__penalties_and_bias_move_the_choice_not_the_logprobs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
