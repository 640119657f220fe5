/* The engine against the end-to-end goldens, by the code behind `towpath-ctl eval`.
 *
 * Every file of tests/golden/data/{exact-bf16,native,nvfp4}/expected, within the tolerances that
 * the goldens' README states; then bit-equality across chunk sizes, thread counts and the
 * hand-over. */
#include "tests/support/device.h"
#include "tests/support/golden.h"
#include "tests/support/golden_cases.h"

#include "common/base/err.h"
#include "deploy/ctl/eval.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char out_path[128];

static const char *root(void)
{
    const char *r = getenv("TOWPATH_GOLDEN_DATA");
    return r ? r : "tests/golden/data";
}

static void run_eval(const struct golden_case *c, int chunk, int threads, bool handover, bool force,
                     bool bf16_kv)
{
    char dir[256], tokens[256];
    snprintf(dir, sizeof dir, "%s/%s/checkpoint", root(), c->ckpt);
    snprintf(tokens, sizeof tokens, "%s/%s/expected/%s-%d.safetensors", root(), c->ckpt, c->variant,
             c->length);
    struct ctl_eval e = {.model_dir = dir,
                         .tokens_path = tokens,
                         .out_path = out_path,
                         .chunk_tokens = chunk,
                         .greedy = -1,
                         .handover = handover,
                         .force = force};
    e.model.device = test_device();
    e.model.n_threads = threads;
    e.model.exact = c->exact;
    e.model.fp8_products = !c->exact && test_products_fp8();
    e.model.kv_fmt = c->exact ? KERN_KV_F32 : bf16_kv ? KERN_KV_BF16 : KERN_KV_FP8;
    e.model.ik_fmt = c->ik;
    e.model.expert_aq = c->aq;
    struct tow_err err = {0};
    if (ctl_eval_run(&e, &err) < 0)
        fail_msg("%s %s-%d: %s", c->ckpt, c->variant, c->length, err.msg);
}

static struct golden *open_golden(const struct golden_case *c)
{
    char name[256];
    snprintf(name, sizeof name, "%s/expected/%s-%d.safetensors", c->ckpt, c->variant, c->length);
    return golden_open(name);
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && !strcmp(s + n - k, tail);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The q-quantile of per-row errors: rms over the row divided by the rms of all golden values. */
static double row_error(const float *a, const float *b, int64_t n_rows, int64_t width, double q)
{
    double all = 0;
    double *e = malloc((size_t)n_rows * sizeof *e);
    for (int64_t i = 0; i < n_rows * width; i++) all += (double)b[i] * b[i];
    all = sqrt(all / (double)(n_rows * width));
    for (int64_t r = 0; r < n_rows; r++) {
        double s = 0;
        for (int64_t i = 0; i < width; i++) {
            double d = (double)a[r * width + i] - (double)b[r * width + i];
            s += d * d;
        }
        e[r] = sqrt(s / (double)width) / all;
    }
    qsort(e, (size_t)n_rows, sizeof *e, compare_doubles);
    int64_t at = (int64_t)ceil(q * (double)n_rows) - 1;
    double v = e[at < 0 ? 0 : at];
    free(e);
    return v;
}

static int argmax(const float *x, int64_t n)
{
    int best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = (int)i;
    return best;
}

static void same_shape(const struct golden_tensor *a, const struct golden_tensor *b)
{
    if (strcmp(a->dtype, b->dtype) != 0 || a->rank != b->rank ||
        memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) != 0)
        fail_msg("%s: type or shape differs from the golden's (%s %s)", b->name, a->dtype,
                 b->dtype);
}

/* Ids may differ only where the margin of their row is within the noise. */
static void check_choice(struct golden *out, struct golden *g, const char *name,
                         const char *margin_suffix)
{
    const struct golden_tensor *t = golden_get(g, name);
    int32_t *a = golden_i32(out, name), *b = golden_i32(g, name);
    char margin_name[200];
    snprintf(margin_name, sizeof margin_name, "%.*s%s", (int)(strrchr(name, '.') - name) + 1, name,
             margin_suffix);
    const struct golden_tensor *m = golden_find(g, margin_name);
    float *margin = m ? golden_f32(g, margin_name) : NULL;
    for (int64_t r = 0; r < t->shape[0]; r++) {
        if (margin && !(margin[r] > 2e-5f)) continue;
        if (memcmp(a + r * t->shape[1], b + r * t->shape[1], (size_t)t->shape[1] * sizeof *a) != 0)
            fail_msg("%s row %lld differs, margin %g", name, (long long)r,
                     margin ? (double)margin[r] : HUGE_VAL);
    }
}

static void check_exact(struct golden *out, struct golden *g, const struct golden_case *c)
{
    for (int i = 0; i < golden_count(g); i++) {
        const struct golden_tensor *t = golden_at(g, i);
        const char *n = t->name;
        const struct golden_tensor *o = golden_get(out, n);
        same_shape(o, t);
        if (t->n == 0) continue;
        if (ends_with(n, ".experts")) {
            check_choice(out, g, n, "expert_margin");
        } else if (ends_with(n, "index_selected")) {
            check_choice(out, g, n, "index_margin");
        } else if (!strcmp(t->dtype, "I32")) {
            assert_memory_equal(o->data, t->data, (size_t)t->bytes);
        } else if (ends_with(n, "index_scores")) {
            const float *a = golden_f32(out, n), *b = golden_f32(g, n);
            for (int64_t k = 0; k < t->n; k++)
                if (isinf(b[k]) ? a[k] != b[k] : !(fabs((double)a[k] - (double)b[k]) <= 2e-4))
                    fail_msg("%s %s-%d: %s[%lld]: %g, golden %g", c->ckpt, c->variant, c->length, n,
                             (long long)k, (double)a[k], (double)b[k]);
        } else if (!ends_with(n, "margin") && !ends_with(n, "gap")) {
            const float *a = golden_f32(out, n), *b = golden_f32(g, n);
            double rel = golden_rel(a, b, t->n), max = golden_max_diff(a, b, t->n);
            bool weights = ends_with(n, "expert_weights");
            if (!(weights ? max <= 1e-4 : rel <= 5e-5 && (!strncmp(n, "state.", 6) || max <= 1e-3)))
                fail_msg("%s %s-%d: %s: rel %.2e max %.2e", c->ckpt, c->variant, c->length, n, rel,
                         max);
        }
    }
}

static void check_deployed(struct golden *out, struct golden *g, const struct golden_case *c)
{
    const struct golden_tensor *t = golden_get(g, "logits");
    const int64_t P = t->shape[0], V = t->shape[1];
    const float *a = golden_f32(out, "logits"), *b = golden_f32(g, "logits");
    double median = row_error(a, b, P, V, 0.5), p90 = row_error(a, b, P, V, 0.9);
    int64_t same = 0;
    for (int64_t r = 0; r < P; r++) same += argmax(a + r * V, V) == argmax(b + r * V, V);
    print_message("%s %s-%d: logits median %.3f p90 %.3f argmax %lld/%lld\n", c->ckpt, c->variant,
                  c->length, median, p90, (long long)same, (long long)P);
    assert_true(median <= 0.10 && p90 <= 0.20);
    assert_true((double)same >= 0.75 * (double)P);
    const int32_t *ids = golden_i32(out, "greedy"), *want = golden_i32(g, "greedy");
    const float *gap = golden_f32(g, "greedy_gap");
    for (int64_t i = 0; i < golden_get(g, "greedy")->n && gap[i] >= 0.5f; i++)
        assert_int_equal(ids[i], want[i]);
    const float *ma = golden_f32(out, "mtp_logits"), *mb = golden_f32(g, "mtp_logits");
    double mtp = row_error(ma, mb, golden_get(g, "mtp_logits")->shape[0], V, 0.5);
    if (!(mtp <= 0.15)) fail_msg("%s %s-%d: mtp median %.3f", c->ckpt, c->variant, c->length, mtp);
    /* Hand-over state of the first layer, which no earlier rounding has touched. */
    if (golden_find(g, "state.0.window")) {
        const struct golden_tensor *w = golden_get(g, "state.0.window");
        const double share = golden_equal_share(golden_f32(out, "state.0.window"),
                                                golden_f32(g, "state.0.window"), w->n);
        print_message("%s %s-%d: %.4f of state.0.window equal\n", c->ckpt, c->variant, c->length,
                      share);
        assert_true(share >= (test_products_fp8() ? 0.97 : 0.99));
    }
}

static void check_forced(const struct golden_case *c)
{
    run_eval(c, 64, 2, true, true, false);
    struct golden *out = golden_open(out_path), *g = open_golden(c);
    const struct golden_tensor *t = golden_get(g, "greedy_logits");
    const float *a = golden_f32(out, "greedy_logits"), *b = golden_f32(g, "greedy_logits");
    double median = row_error(a, b, t->shape[0], t->shape[1], 0.5),
           most = row_error(a, b, t->shape[0], t->shape[1], 1);
    print_message("%s %s-%d: forced median %.3f max %.3f\n", c->ckpt, c->variant, c->length, median,
                  most);
    assert_true(median <= 0.12 && most <= 0.4);
    golden_close(out);
    golden_close(g);
}

static void test_eval__goldens_within_their_tolerances(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_CASES; i++) {
        const struct golden_case *c = &golden_cases[i];
        run_eval(c, 100000 > c->length ? c->length : 1, 2, false, false, false);
        struct golden *out = golden_open(out_path), *g = open_golden(c);
        if (c->exact)
            check_exact(out, g, c);
        else
            check_deployed(out, g, c);
        golden_close(out);
        golden_close(g);
        if (!c->exact) check_forced(c);
    }
}

/* Every byte of every tensor the same. */
static void assert_same_bits(struct golden *a, struct golden *b, const struct golden_case *c,
                             const char *what)
{
    assert_int_equal(golden_count(a), golden_count(b));
    for (int i = 0; i < golden_count(a); i++) {
        const struct golden_tensor *t = golden_at(a, i), *u = golden_get(b, t->name);
        same_shape(u, t);
        if (memcmp(t->data, u->data, (size_t)t->bytes) != 0)
            fail_msg("%s %s-%d: %s changes %s", c->ckpt, c->variant, c->length, what, t->name);
    }
}

static void test_eval__same_bits_for_any_chunk_thread_count_and_hand_over(void **state)
{
    (void)state;
    static const int chunks[] = {1, 7, 64, 128, 256};
    char first_path[160];
    snprintf(first_path, sizeof first_path, "%s.first", out_path);
    for (size_t i = 0; i < N_GOLDEN_CASES; i++) {
        const struct golden_case *c = &golden_cases[i];
        run_eval(c, c->length, 1, false, false, false);
        assert_int_equal(rename(out_path, first_path), 0);
        struct golden *first = golden_open(first_path);
        for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++) {
            char what[64];
            snprintf(what, sizeof what, "chunk %d", chunks[k]);
            run_eval(c, chunks[k], 1 + (int)(k & 1), k >= 2, false, false);
            struct golden *out = golden_open(out_path);
            assert_same_bits(first, out, c, what);
            golden_close(out);
        }
        /* the stored values fit bf16 exactly, so the wider cache must change nothing */
        if (!c->exact) {
            run_eval(c, 64, 2, true, false, true);
            struct golden *out = golden_open(out_path);
            assert_same_bits(first, out, c, "kv-dtype bf16");
            golden_close(out);
        }
        golden_close(first);
        unlink(first_path);
    }
}

int main(void)
{
    const int absent = test_device_there(test_device());
    if (absent) return absent;
    snprintf(out_path, sizeof out_path, "/tmp/towpath-eval-test-%d.safetensors", (int)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_eval__goldens_within_their_tolerances),
        cmocka_unit_test(test_eval__same_bits_for_any_chunk_thread_count_and_hand_over),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(out_path);
    return failed;
}
