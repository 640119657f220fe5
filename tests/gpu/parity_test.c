/* tests/gpu/parity_test.c - every CUDA op against its CPU twin over the random cases of op_cases,
 * and against itself however its rows are cut into calls: bit for bit.
 *
 * Exit 77 where there is no device. usage: parity_test [OP]; TOW_TEST_QUICK=N: the first N cases of
 * each op, and no rows one by one.
 */
#include "tests/kernels/op_cases.h"
#include "tests/support/check.h"
#include "tests/support/device.h"

#include "common/base/err.h"
#include "kernels/cpu/team.h"
#include "kernels/mirror.h"
#include "kernels/numeric.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct kern_dev *cpu, *gpu;

/* How far a piece may be from the CPU's: root mean square and largest error, each relative to that
 * of the reference. With f32 activations only the order of sums differs; with bf16 a sum on the
 * other side of a rounding border moves a value by 2^-8, and a quantized one behind it by up to
 * 2^-3. */
struct bound {
    double rms, most;
};
static struct bound bound_of(int op, bool f32)
{
    if ((op == OP_CASE_linear || op == OP_CASE_linears) && f32) return (struct bound){5e-6, 5e-5};
    if (f32) return (struct bound){2e-6, 1e-5};
    switch (op) {
    case OP_CASE_linears:
    case OP_CASE_attend:
    case OP_CASE_moe:
    case OP_CASE_ffn: return (struct bound){1e-2, 6e-2};
    case OP_CASE_compress:
    case OP_CASE_kv_prep:
    case OP_CASE_prepare:
    case OP_CASE_index_query: return (struct bound){1e-2, 8e-2};
    default: return (struct bound){2e-3, 1e-2};
    }
}

static float number(const uint8_t *p, int elem)
{
    float f;
    uint16_t h;
    if (elem == 4) return memcpy(&f, p, 4), f;
    return memcpy(&h, p, 2), kern_bf16_decode(h);
}

static void compare(const char *name, int op, int variant, const struct op_run *want,
                    const struct op_run *got, double *worst)
{
    assert_int_equal(got->n, want->n);
    assert_int_equal(got->n_pieces, want->n_pieces);
    for (int i = 0; i < want->n_pieces; i++) {
        const struct op_piece *p = &want->pieces[i];
        const uint8_t *a = want->out + p->at, *b = got->out + p->at;
        if (p->view == OP_VIEW_NONE) continue;
        if (p->view == OP_VIEW_EXACT) {
            for (size_t k = 0; k < p->n; k++)
                if (a[k] != b[k])
                    fail_msg("%s variant %d piece %d: byte %zu of %zu is %d, not %d", name, variant,
                             i, k, p->n, b[k], a[k]);
            continue;
        }
        double err = 0, mag = 0, most = 0, top = 0;
        size_t at = 0;
        for (size_t k = 0; k < p->n; k += (size_t)p->elem) {
            const double x = (double)number(a + k, p->elem), y = (double)number(b + k, p->elem);
            if (isnan(x) != isnan(y) || isinf(x) != isinf(y) || (isinf(x) && x != y))
                fail_msg("%s variant %d piece %d: element %zu of %zu is %g, not %g", name, variant,
                         i, k / (size_t)p->elem, p->n / (size_t)p->elem, y, x);
            if (!isfinite(x)) continue;
            const double d = fabs(x - y);
            err += d * d, mag += x * x;
            if (fabs(x) > top) top = fabs(x);
            if (d > most) most = d, at = k / (size_t)p->elem;
        }
        const struct bound limit = bound_of(op, want->f32);
        const double rms = mag > 0 ? sqrt(err / mag) : sqrt(err), big = top > 0 ? most / top : most;
        if (rms > worst[0]) worst[0] = rms;
        if (big > worst[1]) worst[1] = big;
        if (rms > limit.rms || big > limit.most)
            fail_msg("%s variant %d piece %d (%s): rms %.2e, largest %.2e at element %zu of %zu: "
                     "%g, not "
                     "%g",
                     name, variant, i, want->f32 ? "f32" : "bf16", rms, big, at,
                     p->n / (size_t)p->elem, (double)number(b + at * (size_t)p->elem, p->elem),
                     (double)number(a + at * (size_t)p->elem, p->elem));
    }
}

static void on_pool(void *ctx, const void *pages, int64_t bytes)
{
    kern_mirror_know(ctx, pages, (size_t)bytes);
}

static void run_case(const struct op_case *c, struct op_run *r, bool on_gpu, int piece, int variant)
{
    *r = (struct op_run){.ops = kern_dev_ops(on_gpu ? gpu : cpu),
                         .s = kern_dev_stream(on_gpu ? gpu : cpu),
                         .piece = piece,
                         .variant = variant,
                         .twin = !on_gpu,
                         .on_pool = on_gpu ? on_pool : NULL,
                         .ctx = gpu,
                         .cut = (uint64_t)(variant + 7) * UINT64_C(0xd1342543de82ef95) + 1};
    op_case_run(c, r);
    if (on_gpu) kern_mirror_forget(gpu);
}

/* 0, or so many cases of each op, whole and in pieces of any size, but not row by row. */
static int quick(void)
{
    const char *n = getenv("TOW_TEST_QUICK");
    if (!n || !*n) return 0;
    char *end;
    const long v = strtol(n, &end, 10);
    if (*n >= '0' && *n <= '9' && !*end && v <= 1000) return (int)v;
    printf("TOW_TEST_QUICK \"%s\": must be a whole number, 0 to 1000\n", n);
    exit(2);
}

static void test_parity(void **state)
{
    const struct op_case *c = *state;
    double worst[2] = {0, 0};
    const int most = quick();
    const int n = most && most < op_case_variants(c) ? most : op_case_variants(c);
    for (int v = 0; v < n; v++) {
        struct op_run want, whole, part;
        run_case(c, &want, false, 0, v);
        run_case(c, &whole, true, 0, v);
        compare(c->name, (int)(c - op_cases), v, &want, &whole, worst);
        for (int piece = -1; piece <= (most ? -1 : 1); piece += 2) {
            run_case(c, &part, true, piece, v);
            if (part.n != whole.n || (part.n && memcmp(part.out, whole.out, part.n) != 0)) {
                size_t at = 0;
                while (at < part.n && part.out[at] == whole.out[at]) at++;
                fail_msg("%s variant %d in pieces of %d: byte %zu of %zu differs from one call's",
                         c->name, v, piece, at, whole.n);
            }
            free(part.out);
        }
        free(want.out);
        free(whole.out);
    }
    print_message("%-14s rms %.1e, largest %.1e\n", c->name, worst[0], worst[1]);
}

int main(int argc, char **argv)
{
    /* TOW_TEST_DEVICE=cpu tries the mirror itself. */
    char device[64];
    snprintf(device, sizeof device, "mirror:%s", test_cuda_device());
    struct tow_err err = {0};
    if (kern_dev_open(&gpu, device, 1, &err) < 0) return test_no_device(&err);
    if (kern_dev_open_cpu(
            &cpu, 0, KERN_CPU_AVX2 <= kern_cpu_best_isa() ? KERN_CPU_AVX2 : KERN_CPU_C, &err) < 0)
        return 1;
    quick();
    struct CMUnitTest tests[N_OP_CASES];
    for (int i = 0; i < N_OP_CASES; i++)
        tests[i] = (struct CMUnitTest){op_cases[i].name, test_parity, NULL, NULL,
                                       (void *)(uintptr_t)&op_cases[i]};
    TEST_CHOOSE(argc, argv, tests);
    int failed = cmocka_run_group_tests_name("gpu/parity", tests, NULL, NULL);
    kern_dev_close(gpu);
    kern_dev_close(cpu);
    return failed;
}
