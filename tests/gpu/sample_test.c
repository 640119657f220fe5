/* tests/gpu/sample_test.c - tokens drawn on the device against those of the CPU, byte for byte,
 * over vocabularies of one token up to the released model's.
 *
 * parity_test has many more forms of small rows; here are wide ones, whole steps of mixed requests,
 * rows alone, and calls that are repeated as a graph.
 *
 * Exit 77 where there is no device.
 */
#include "tests/support/check.h"
#include "tests/support/device.h"

#include "kernels/ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CPU, GPU, SIDES, WIDE = 129280, EDITS = 400 };

static struct side {
    struct kern_dev *dev;
    struct kern_stream *s;
    const struct kern_ops *ops;
} sides[SIDES];

static uint64_t rng = 0x9e3779b97f4a7c15u;
static uint64_t next(void)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return rng * UINT64_C(0x2545f4914f6cdd1d);
}
static uint32_t below(uint32_t n)
{
    return (uint32_t)(next() >> 33) % n;
}
static float normal(void)
{
    const uint64_t u = next();
    const float s = (float)(u & 0xffff) + (float)(u >> 16 & 0xffff) + (float)(u >> 32 & 0xffff) +
                    (float)(u >> 48);
    return (s * 0x1p-16f - 2.0f) * 1.7320508f;
}

/* One call's inputs and what both sides made of them. */
struct step {
    int32_t T, V, n_edits;
    float *x;
    struct kern_sample_row *rows;
    struct kern_edit *edits;
    struct kern_choice *got[SIDES];
};

static void *room(size_t bytes)
{
    void *p = calloc(1, bytes + 1);
    assert_non_null(p);
    return p;
}

enum form {
    LIKE_A_MODEL,
    CLOSE,
    WIDE_APART,
    TIES,
    MANY_BANNED,
    INFINITE,
    NOT_A_NUMBER,
    FLAT,
    FORMS
};

static void fill_row(float *x, int32_t V, enum form form)
{
    const float spread = form == CLOSE ? 1e-3f : form == WIDE_APART ? 60.0f : 2.5f;
    for (int32_t i = 0; i < V; i++) {
        x[i] = normal() * spread;
        if (form == TIES) x[i] = rintf(x[i]);
        if (form == MANY_BANNED && below(4)) x[i] = -INFINITY;
        if (form == FLAT) x[i] = below(2) ? 0.0f : -0.0f;
    }
    if (form == LIKE_A_MODEL)
        for (int k = 0; k < 12; k++) x[below((uint32_t)V)] = 8 + normal() * 3;
    if (form == INFINITE) x[below((uint32_t)V)] = INFINITY;
    if (form == NOT_A_NUMBER) x[below((uint32_t)V)] = below(2) ? NAN : -NAN;
}

static void open_step(struct step *st, int32_t T, int32_t V)
{
    *st = (struct step){.T = T, .V = V};
    st->x = room((size_t)T * (size_t)V * sizeof *st->x);
    st->rows = room((size_t)T * sizeof *st->rows);
    st->edits = room((size_t)T * EDITS * sizeof *st->edits);
    for (int i = 0; i < SIDES; i++) st->got[i] = room((size_t)T * sizeof *st->got[i]);
}
static void close_step(struct step *st)
{
    free(st->x), free(st->rows), free(st->edits), free(st->got[CPU]), free(st->got[GPU]);
}

/* Edits of n different tokens. */
static void add_edits(struct step *st, struct kern_sample_row *r, int32_t n)
{
    static const float biases[] = {0, 0, 0, 2, -5, 100, -INFINITY};
    if (n > st->V) n = st->V;
    const int32_t stride = st->V / n, first = (int32_t)below((uint32_t)st->V);
    r->edit0 = st->n_edits;
    r->n_edits = n;
    for (int32_t i = 0; i < n; i++)
        st->edits[st->n_edits++] =
            (struct kern_edit){.id = (int32_t)(((int64_t)first + (int64_t)i * stride) % st->V),
                               .count = (int32_t)below(5),
                               .bias = biases[below(7)]};
}

static void fill_step(struct step *st, bool usual)
{
    static const float temperatures[] = {0, 0.6f, 1, 1, 1.3f, 1e-30f, 50, 3e38f, -1};
    static const float top_ps[] = {1, 0.95f, 0.9f, 0.5f, 0.999999f, 1e-9f, 0, 2};
    static const float min_ps[] = {0, 0, 0.05f, 1e-4f, 1, 3, -1};
    const int32_t top_ks[] = {0, 0, 20, 1, 64, 65, 1000, st->V - 1, st->V, INT32_MAX, -1};
    static const double us[] = {0, 0.5, 0x1.fffffffffffffp-1};
    st->n_edits = 0;
    for (int32_t t = 0; t < st->T; t++) {
        struct kern_sample_row *r = &st->rows[t];
        fill_row(st->x + (int64_t)t * st->V, st->V, usual ? LIKE_A_MODEL : (enum form)below(FORMS));
        *r = (struct kern_sample_row){
            .u = below(8) ? (double)(next() >> 11) * 0x1p-53 : us[below(3)],
            .temperature = temperatures[below(usual ? 5 : 9)],
            .top_p = top_ps[below(usual ? 4 : 8)],
            .min_p = min_ps[below(usual ? 3 : 7)],
            .top_k = top_ks[below(usual ? 3 : 11)],
            .repetition = below(2) ? 1 : 1.2f,
            .presence = below(2) ? 0 : 0.5f,
            .frequency = below(2) ? 0 : -0.25f,
            .n_logprobs = below(2) ? -1 : (int32_t)below(KERN_SAMPLE_TOP + 2)};
        if (below(2)) add_edits(st, r, 1 + (int32_t)below(EDITS));
    }
}

/* Rows first .. first + n - 1; the logits must be what they were. */
static void run(struct side *d, const struct step *st, int32_t first, int32_t n,
                struct kern_choice *out)
{
    const size_t bytes = (size_t)n * (size_t)st->V * sizeof *st->x;
    const size_t edits = (size_t)st->n_edits * sizeof *st->edits;
    struct kern_sample p = {.logits = kern_dev_alloc(d->dev, bytes),
                            .edits = kern_dev_alloc(d->dev, edits),
                            .choices = kern_dev_alloc(d->dev, (size_t)n * sizeof *out),
                            .T = n,
                            .V = st->V,
                            .n_edits = st->n_edits};
    struct kern_sample_row *rows = kern_dev_alloc(d->dev, (size_t)n * sizeof *rows);
    float *after = room(bytes);
    assert_true(p.logits && p.edits && p.choices && rows);
    p.rows = rows;
    kern_stream_write(d->s, p.logits, st->x + (int64_t)first * st->V, bytes);
    kern_stream_write(d->s, p.edits, st->edits, edits);
    kern_stream_write(d->s, rows, st->rows + first, (size_t)n * sizeof *rows);
    assert_int_equal(d->ops->sample(d->s, &p), 0);
    assert_int_equal(kern_stream_read(d->s, out, p.choices, (size_t)n * sizeof *out), 0);
    assert_int_equal(kern_stream_read(d->s, after, p.logits, bytes), 0);
    assert_int_equal(memcmp(after, st->x + (int64_t)first * st->V, bytes), 0);
    free(after);
    kern_dev_free(d->dev, p.logits);
    kern_dev_free(d->dev, p.edits);
    kern_dev_free(d->dev, p.choices);
    kern_dev_free(d->dev, rows);
}

static void same(const struct step *st, int32_t t, const struct kern_choice *got)
{
    const struct kern_choice *want = &st->got[CPU][t];
    const struct kern_sample_row *r = &st->rows[t];
    if (memcmp(want, got, sizeof *got) == 0) return;
    for (int k = 0; k < want->n_top; k++)
        if (got->top_ids[k] != want->top_ids[k] || got->top_logprobs[k] != want->top_logprobs[k])
            print_message("top %d: %d %.9g, not %d %.9g\n", k, got->top_ids[k],
                          (double)got->top_logprobs[k], want->top_ids[k],
                          (double)want->top_logprobs[k]);
    fail_msg(
        "V %d row %d: T %g top_p %g min_p %g top_k %d u %.17g logprobs %d edits %d: rc %d id %d "
        "logprob %.9g n_top %d, not %d %d %.9g %d",
        st->V, t, (double)r->temperature, (double)r->top_p, (double)r->min_p, r->top_k, r->u,
        r->n_logprobs, r->n_edits, got->rc, got->id, (double)got->logprob, got->n_top, want->rc,
        want->id, (double)want->logprob, want->n_top);
}

static void compare_step(int32_t T, int32_t V, bool usual)
{
    struct step st;
    open_step(&st, T, V);
    fill_step(&st, usual);
    for (int i = 0; i < SIDES; i++) run(&sides[i], &st, 0, T, st.got[i]);
    for (int32_t t = 0; t < T; t++) same(&st, t, &st.got[GPU][t]);
    close_step(&st);
}

static void test_sample__narrow_rows_have_the_cpus_tokens(void **state)
{
    static const int32_t vs[] = {1, 2, 31, 64, 65, 127, 1000, 4095, 4096, 4097};
    (void)state;
    for (size_t i = 0; i < sizeof vs / sizeof *vs; i++)
        for (int k = 0; k < 4; k++) compare_step(k ? 128 : 1, vs[i], false);
}

static void test_sample__wide_rows_have_the_cpus_tokens(void **state)
{
    (void)state;
    compare_step(128, WIDE, true);
    compare_step(1, WIDE, true);
    compare_step(96, WIDE, false);
    compare_step(40, WIDE + 1, false); /* rows that are not aligned */
    compare_step(3, 1 << 20, false);
}

static void test_sample__a_row_alone_has_its_token_in_a_batch(void **state)
{
    struct step st;
    (void)state;
    open_step(&st, 17, 5003);
    fill_step(&st, true);
    for (int i = 0; i < SIDES; i++) run(&sides[i], &st, 0, st.T, st.got[i]);
    for (int32_t t = 0; t < st.T; t++) {
        struct kern_choice c;
        run(&sides[GPU], &st, t, 1, &c);
        same(&st, t, &c);
    }
    close_step(&st);
}

/* ------------------------------------------------------------------ as a graph */

struct repeated {
    struct side *d;
    struct kern_sample p;
};
static int enqueue(void *arg)
{
    struct repeated *r = arg;
    return r->d->ops->sample(r->d->s, &r->p);
}
static void test_sample__may_be_repeated_with_other_logits(void **state)
{
    enum { T = 5, V = 3000 };
    struct side *d = &sides[GPU];
    struct step st;
    (void)state;
    open_step(&st, T, V);
    struct kern_sample_row *rows = kern_dev_alloc(d->dev, T * sizeof *rows);
    struct repeated r = {d,
                         {.logits = kern_dev_alloc(d->dev, T * V * sizeof(float)),
                          .rows = rows,
                          .edits = kern_dev_alloc(d->dev, T * EDITS * sizeof(struct kern_edit)),
                          .choices = kern_dev_alloc(d->dev, T * sizeof(struct kern_choice)),
                          .T = T,
                          .V = V,
                          .n_edits = T * EDITS}};
    assert_true(rows && r.p.logits && r.p.edits && r.p.choices);
    for (int i = 0; i < 5; i++) { /* plain, captured, launched */
        fill_step(&st, false);
        run(&sides[CPU], &st, 0, T, st.got[CPU]);
        kern_stream_write(d->s, r.p.logits, st.x, T * V * sizeof(float));
        kern_stream_write(d->s, rows, st.rows, T * sizeof *rows);
        kern_stream_write(d->s, r.p.edits, st.edits, (size_t)st.n_edits * sizeof *st.edits);
        assert_int_equal(kern_stream_repeat(d->s, 77, enqueue, &r), 0);
        assert_int_equal(
            kern_stream_read(d->s, st.got[GPU], r.p.choices, T * sizeof(struct kern_choice)), 0);
        for (int32_t t = 0; t < T; t++) same(&st, t, &st.got[GPU][t]);
    }
    kern_dev_free(d->dev, r.p.logits);
    kern_dev_free(d->dev, r.p.edits);
    kern_dev_free(d->dev, r.p.choices);
    kern_dev_free(d->dev, rows);
    close_step(&st);
}

/* ------------------------------------------------------------------ reads */

/* Sizes around the pieces that reads are made of. */
static void test_read__brings_every_byte(void **state)
{
    static const size_t sizes[] = {0,        1,        4095,         4 << 20, (4 << 20) + 1,
                                   12 << 20, 70000000, (8 << 20) - 3};
    struct side *d = &sides[GPU];
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const size_t n = sizes[i];
        uint8_t *a = room(n), *b = room(n), *dev = kern_dev_alloc(d->dev, n);
        assert_non_null(dev);
        for (size_t k = 0; k < n; k++) a[k] = (uint8_t)(next() >> 56);
        b[n] = 0x77;
        assert_int_equal(kern_stream_write(d->s, dev, a, n), 0);
        assert_int_equal(kern_stream_read(d->s, b, dev, n), 0);
        assert_int_equal(memcmp(a, b, n), 0);
        assert_int_equal(b[n], 0x77);
        kern_dev_free(d->dev, dev);
        free(a), free(b);
    }
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    /* TOW_TEST_DEVICE=cpu tries the test itself. */
    if (kern_dev_open(&sides[GPU].dev, test_cuda_device(), 0, &err) < 0)
        return test_no_device(&err);
    if (kern_dev_open(&sides[CPU].dev, "cpu", 0, &err) < 0) {
        printf("sample_test: %s\n", err.msg);
        return 1;
    }
    for (int i = 0; i < SIDES; i++) {
        sides[i].s = kern_dev_stream(sides[i].dev);
        sides[i].ops = kern_dev_ops(sides[i].dev);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sample__narrow_rows_have_the_cpus_tokens),
        cmocka_unit_test(test_sample__wide_rows_have_the_cpus_tokens),
        cmocka_unit_test(test_sample__a_row_alone_has_its_token_in_a_batch),
        cmocka_unit_test(test_sample__may_be_repeated_with_other_logits),
        cmocka_unit_test(test_read__brings_every_byte),
    };
    TEST_CHOOSE(argc, argv, tests);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 0; i < SIDES; i++) kern_dev_close(sides[i].dev);
    return rc;
}
