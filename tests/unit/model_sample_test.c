/* Tests of common/model/sample.h. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/model/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct model_sampling greedy = {.top_p = 1, .n_logprobs = -1};

static int draw(float *x, int V, struct model_sampling p, const int32_t *out, int n_out, uint64_t i,
                struct kern_choice *c)
{
    static struct model_sampler *s;
    static int for_V;
    struct model_draw d = {.sampling = p, .output = out, .n_output = n_out, .index = i};
    float was[1000];
    if (V != for_V) {
        model_sampler_free(s);
        s = NULL;
        for_V = V;
        if (V) assert_int_equal(model_sampler_new(&s, V, NULL), 0);
    }
    if (!V) return 0;
    memcpy(was, x, (size_t)V * sizeof *x);
    int rc = model_sample(s, x, &d);
    assert_memory_equal(x, was, (size_t)V * sizeof *x);
    assert_int_equal(rc, d.choice.rc);
    *c = d.choice;
    return rc;
}
static int no_draws(void **state)
{
    (void)state;
    return draw(NULL, 0, greedy, NULL, 0, 0, NULL);
}

static void test_model_sample__row_without_valid_token_is_an_error(void **state)
{
    (void)state;
    enum { V = 37 };
    float x[V];
    struct kern_choice c;
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
        struct kern_choice c;
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
        struct kern_choice c;
        draw(x, 5, s, NULL, 0, (uint64_t)k, &c);
        assert_in_range(c.id, 2, 3);
    }
    s.top_k = 0;
    s.top_p = 0.5f;
    for (int k = 0; k < 500; k++) {
        struct kern_choice c;
        draw(x, 5, s, NULL, 0, (uint64_t)k, &c);
        assert_int_equal(c.id, 3);
    }
    s.top_p = 1;
    s.min_p = 0.1f; /* exp(-1/0.7) = 0.24 stays, exp(-2/0.7) = 0.057 goes */
    for (int k = 0; k < 500; k++) {
        struct kern_choice c;
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
        struct kern_choice a, b, c;
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
    struct kern_choice c;
    struct model_sampling s = greedy;
    s.n_logprobs = 3;
    s.frequency_penalty = 0.1f; /* 0 twice: 0.8; 1 once: a hair less */
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
    /* An id given twice gets the sum, a ban stays one. */
    struct model_bias twice[] = {{3, 50}, {1, 60}, {3, 20}, {1, -100}, {-1, 9}};
    s.bias = twice, s.n_bias = 5;
    draw(x, 4, s, out, 3, 3, &c);
    assert_int_equal(c.id, 3);
    s.bias = twice, s.n_bias = 3;
    draw(x, 4, s, out, 3, 3, &c);
    assert_int_equal(c.id, 3);
    s.n_bias = 2;
    draw(x, 4, s, out, 3, 3, &c);
    assert_int_equal(c.id, 1);
    struct model_bias all[] = {{0, -100}, {1, -100}, {2, -100}, {3, -100}};
    s.bias = all, s.n_bias = 4;
    assert_int_equal(draw(x, 4, s, out, 3, 3, &c), TOW_ENUMERIC);
}

/* Against plain double arithmetic: what is kept by cuts, in which share, and log-probabilities. */
static void test_model_sample__agrees_with_plain_arithmetic(void **state)
{
    (void)state;
    enum { V = 1000, DRAWS = 20000 };
    static float x[V];
    static double p[V], lp[V];
    static int hits[V];
    static const struct {
        float temperature, top_p, min_p;
        int32_t top_k;
    } forms[] = {{1, 1, 0, 0},     {0.6f, 0.9f, 0, 0},  {1.5f, 0.95f, 0, 300},
                 {2, 1, 0, 7},     {0.3f, 1, 0.02f, 0}, {1, 0.5f, 0.1f, 40},
                 {1e-6f, 1, 0, 0}, {1e6f, 0.7f, 0, 0}};
    srand(11);
    for (int i = 0; i < V; i++) x[i] = (float)(rand() % 4000) / 300 - 4;
    double lse = 0;
    for (int i = 0; i < V; i++) lse += exp((double)x[i]);
    for (int i = 0; i < V; i++) lp[i] = (double)x[i] - log(lse);
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        const double t = (double)forms[f].temperature;
        int order[V], n = forms[f].top_k ? forms[f].top_k : V;
        double total = 0, sum = 0, kept = 0;
        struct kern_choice c;
        struct model_sampling s = {.temperature = forms[f].temperature,
                                   .top_p = forms[f].top_p,
                                   .min_p = forms[f].min_p,
                                   .top_k = forms[f].top_k,
                                   .seed = 5,
                                   .n_logprobs = 20};
        for (int i = 0; i < V; i++) order[i] = i;
        for (int i = 1; i < V; i++) /* falling; equals by rising id */
            for (int k = i; k > 0 && x[order[k]] > x[order[k - 1]]; k--) {
                const int was = order[k];
                order[k] = order[k - 1], order[k - 1] = was;
            }
        memset(hits, 0, sizeof hits);
        memset(p, 0, sizeof p);
        for (int k = 0; k < n; k++)
            total += p[order[k]] = exp(((double)x[order[k]] - (double)x[order[0]]) / t);
        for (int k = 0; k < n; k++) {
            const double m = p[order[k]];
            if (sum >= (double)forms[f].top_p * total || m < (double)forms[f].min_p)
                p[order[k]] = 0;
            else
                kept += m;
            sum += m;
        }
        for (int k = 0; k < DRAWS; k++) {
            assert_int_equal(draw(x, V, s, NULL, 0, (uint64_t)k, &c), 0);
            hits[c.id]++;
            assert_true(p[c.id] > 0);
            assert_true(fabs((double)c.logprob - lp[c.id]) < 2e-6);
        }
        double off = 0;
        for (int i = 0; i < V; i++) off += fabs(hits[i] - DRAWS * p[i] / kept);
        assert_true(off < 0.3 * DRAWS);
        assert_int_equal(c.n_top, 20);
        for (int k = 0; k < 20; k++) {
            assert_int_equal(c.top_ids[k], order[k]);
            assert_true(fabs((double)c.top_logprobs[k] - lp[order[k]]) < 2e-6);
        }
    }
}

/* Rows share the room; a row that has none left leaves no trace. */
static void test_model_edits__a_row_that_does_not_fit_is_told(void **state)
{
    (void)state;
    struct model_edits e;
    struct kern_sample_row row;
    const int32_t out[] = {3, 1, 3, 3, -7, 8, 2};
    const struct model_bias bias[] = {{1, 2}, {5, -100}, {8, 1}};
    struct model_draw d = {.sampling = {.presence_penalty = 1, .bias = bias, .n_bias = 3},
                           .output = out,
                           .n_output = 7};
    assert_true(model_edits_init(&e, 8, 9));
    assert_true(model_edits_add(&e, &d, &row)); /* 3, 1, 2, 5 */
    assert_int_equal(row.edit0, 0);
    assert_int_equal(row.n_edits, 4);
    assert_int_equal(e.items[0].id, 3);
    assert_int_equal(e.items[0].count, 3);
    assert_true(e.items[1].id == 1 && e.items[1].count == 1 && e.items[1].bias == 2);
    assert_true(e.items[3].id == 5 && e.items[3].count == 0 && isinf(e.items[3].bias));
    assert_true(model_edits_add(&e, &d, &row));
    assert_int_equal(row.edit0, 4);
    assert_int_equal(row.n_edits, 4);
    assert_false(model_edits_add(&e, &d, &row));
    assert_int_equal(e.n, 8);
    d.sampling.presence_penalty = 0;
    d.sampling.n_bias = 1; /* without penalties the output is nothing */
    assert_true(model_edits_add(&e, &d, &row));
    assert_int_equal(row.n_edits, 1);
    assert_int_equal(e.items[8].id, 1);
    assert_int_equal(e.items[8].count, 0);
    model_edits_fini(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_sample__row_without_valid_token_is_an_error),
        cmocka_unit_test(test_model_sample__frequencies_follow_the_distribution),
        cmocka_unit_test(test_model_sample__same_seed_and_index_draw_the_same),
        cmocka_unit_test(test_model_sample__penalties_and_bias_move_the_choice_not_the_logprobs),
        cmocka_unit_test(test_model_sample__agrees_with_plain_arithmetic),
        cmocka_unit_test(test_model_edits__a_row_that_does_not_fit_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, no_draws);
}
