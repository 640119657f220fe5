/* tests/gpu/moe_test.c - routed experts at V4-Flash shapes: a row has the same bits in any batch, and is
 * near the CPU's, and wgmma's are those of mma.sync; skewed routing, repeated experts and none.
 *
 * Exit 77 where there is no device.
 */
#include "tests/support/check.h"
#include "tests/support/device.h"

#include "common/base/err.h"
#include "kernels/cuda/table.h"
#include "kernels/dev.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct kern_dev *cpu, *gpu;

struct shape {
    const char *name;
    enum kern_wfmt fmt;
    enum kern_act_quant aq;
    int32_t E, k, D, I, T;
    bool skewed;
};
struct fixture {
    struct shape s;
    struct kern_weight w[2][3][256]; /* host, device; w1, w2, w3 */
    uint8_t *block;                  /* all weights are stretches of it */
    uint16_t *x;
    int32_t *experts;
    float *weights;
};

static uint64_t seed = 0x853c49e6748fea9bu;
static uint32_t next(void)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (uint32_t)(seed * UINT64_C(0x2545f4914f6cdd1d) >> 33);
}
static float normal(void)
{
    float s = 0;
    for (int i = 0; i < 4; i++) s += (float)(next() & 0xffff) * 0x1p-16f - 0.5f;
    return s * 1.7f;
}

enum { BLOCK = 40 << 20, SCALES_AT = 36 << 20 };

static struct kern_weight weight(const struct fixture *f, int at, int32_t n, int32_t k)
{
    const enum kern_wfmt fmt = f->s.fmt;
    const bool fp8 = fmt == KERN_W_FP8, bf16 = fmt == KERN_W_BF16;
    const int64_t row = bf16 ? 2 * k : fp8 ? k : k / 2;
    return (struct kern_weight){.data = f->block + 4096 * at,
                                .scale = bf16 ? NULL : f->block + SCALES_AT + 64 * at,
                                .fmt = fmt,
                                .sfmt = bf16                  ? KERN_S_NONE
                                        : fmt == KERN_W_NVFP4 ? KERN_S_E4M3
                                                              : KERN_S_UE8M0,
                                .n = n,
                                .k = k,
                                .row_bytes = row,
                                .scale_row_bytes = bf16                  ? 0
                                                   : fp8                 ? (k + 127) / 128
                                                   : fmt == KERN_W_NVFP4 ? k / 16
                                                                         : k / 32,
                                .scale2 = fmt == KERN_W_NVFP4 ? 0.5f + 0.01f * (float)at : 1,
                                .input_scale =
                                    fmt == KERN_W_NVFP4 ? 0.01f + 0.0001f * (float)at : 0};
}

static void set_up(struct fixture *f, const struct shape *s)
{
    struct tow_err err = {0};
    memset(f, 0, sizeof *f);
    f->s = *s;
    f->block = malloc(BLOCK);
    f->x = malloc((size_t)s->T * (size_t)s->D * 2);
    f->experts = malloc((size_t)s->T * (size_t)s->k * 4);
    f->weights = malloc((size_t)s->T * (size_t)s->k * 4);
    assert_true(f->block && f->x && f->experts && f->weights);
    for (int i = 0; i < BLOCK; i++) {
        uint8_t b = (uint8_t)next();
        if (s->fmt == KERN_W_FP8 && (b & 127) == 127) b ^= 1;
        if (s->fmt == KERN_W_BF16 && i % 2) b = (uint8_t)((b & 0x80) | 0x3c);
        if (i >= SCALES_AT) b = (uint8_t)((s->fmt == KERN_W_NVFP4 ? 16 : 116) + b % 8);
        f->block[i] = b;
    }
    for (int32_t e = 0; e < s->E; e++) {
        f->w[0][0][e] = weight(f, 3 * e, s->I, s->D);
        f->w[0][1][e] = weight(f, 3 * e + 1, s->D, s->I);
        f->w[0][2][e] = weight(f, 3 * e + 2, s->I, s->D);
    }
    memcpy(f->w[1], f->w[0], sizeof f->w[0]);
    for (int i = 0; i < 3; i++)
        if (kern_dev_place(gpu, f->w[1][i], s->E, &err) < 0) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < (int64_t)s->T * s->D; i++) f->x[i] = kern_bf16_encode(normal());
    for (int32_t t = 0; t < s->T; t++)
        for (int32_t i = 0; i < s->k; i++) {
            int32_t e = (int32_t)next() % s->E;
            if (s->skewed && t % 4) e = t % 4 == 1 ? 3 : (int32_t)next() % 2; /* repeats, too */
            if (s->skewed && next() % 8 == 0) e = -1;
            f->experts[t * s->k + i] = e;
            f->weights[t * s->k + i] = fabsf(normal()) + 0.1f;
        }
}
static void tear_down(struct fixture *f)
{
    for (int i = 0; i < 3; i++) kern_dev_unplace(gpu, f->w[1][i][0].data);
    free(f->block), free(f->x), free(f->experts), free(f->weights);
}

/* Rows t .. t+n-1 in one call; the caller frees. */
static float *run(struct fixture *f, bool on_gpu, int32_t t, int32_t n)
{
    const struct shape *s = &f->s;
    struct kern_dev *dev = on_gpu ? gpu : cpu;
    struct kern_stream *st = kern_dev_stream(dev);
    const size_t x_bytes = (size_t)n * (size_t)s->D * 2, list = (size_t)n * (size_t)s->k * 4,
                 out_bytes = (size_t)n * (size_t)s->D * 4;
    void *x = kern_dev_alloc(dev, x_bytes), *e = kern_dev_alloc(dev, list),
         *w = kern_dev_alloc(dev, list), *out = kern_dev_alloc(dev, out_bytes);
    float *host = malloc(out_bytes);
    assert_true(x && e && w && out && host);
    memset(host, 0xff, out_bytes);
    assert_int_equal(kern_stream_write(st, x, f->x + (int64_t)t * s->D, x_bytes), 0);
    assert_int_equal(kern_stream_write(st, e, f->experts + (int64_t)t * s->k, list), 0);
    assert_int_equal(kern_stream_write(st, w, f->weights + (int64_t)t * s->k, list), 0);
    assert_int_equal(kern_stream_write(st, out, host, out_bytes), 0);
    const struct kern_moe p = {.x = x,
                               .experts = e,
                               .weights = w,
                               .w1 = f->w[on_gpu][0],
                               .w2 = f->w[on_gpu][1],
                               .w3 = f->w[on_gpu][2],
                               .out = out,
                               .T = n,
                               .D = s->D,
                               .I = s->I,
                               .E = s->E,
                               .k = s->k,
                               .limit = 10,
                               .aq = s->aq,
                               .act = KERN_BF16};
    assert_int_equal(kern_dev_ops(dev)->moe(st, &p), 0);
    assert_int_equal(kern_stream_read(st, host, out, out_bytes), 0);
    kern_dev_free(dev, x), kern_dev_free(dev, e), kern_dev_free(dev, w), kern_dev_free(dev, out);
    return host;
}

static void same_bits(struct fixture *f, const float *all, int32_t t, int32_t n)
{
    if (t + n > f->s.T) return;
    float *part = run(f, true, t, n);
    for (int64_t i = 0; i < (int64_t)n * f->s.D; i++)
        if (kern_bits(part[i]) != kern_bits(all[(int64_t)t * f->s.D + i]))
            fail_msg("%s: row %d, element %d: %a in a call of %d rows, %a in one of %d", f->s.name,
                     t + (int)(i / f->s.D), (int)(i % f->s.D), (double)part[i], n,
                     (double)all[(int64_t)t * f->s.D + i], f->s.T);
    free(part);
}
static void near_cpu(struct fixture *f, const float *all, int32_t t)
{
    float *want = run(f, false, t, 1);
    const float *got = all + (int64_t)t * f->s.D;
    double err = 0, mag = 0, most = 0;
    int equal = 0;
    for (int32_t i = 0; i < f->s.D; i++) {
        const double d = (double)got[i] - (double)want[i];
        err += d * d, mag += (double)want[i] * (double)want[i];
        if (fabs(d) > most) most = fabs(d);
        equal += got[i] == want[i];
    }
    const double rms = mag > 0 ? sqrt(err / mag) : sqrt(err);
    print_message("%s row %d: rms %.2e of the CPU's, largest difference %.2e, %.2f %% equal\n",
                  f->s.name, t, rms, most, 100.0 * equal / f->s.D);
    if (!(rms <= 5e-3)) fail_msg("%s row %d: rms %.3e", f->s.name, t, rms);
    free(want);
}

static void test_moe__rows_are_near_the_cpus_in_any_batch(void **state)
{
    static struct fixture f;
    set_up(&f, *state);
    float *all = run(&f, true, 0, f.s.T), *again = run(&f, true, 0, f.s.T);
    assert_memory_equal(all, again, (size_t)f.s.T * (size_t)f.s.D * 4);
    for (int32_t t = 0; t < 6; t++) same_bits(&f, all, t, 1);
    same_bits(&f, all, f.s.T - 1, 1);
    same_bits(&f, all, 3, 8);
    same_bits(&f, all, 11, 9);
    same_bits(&f, all, 100, 129);
    same_bits(&f, all, 17, 300);
    for (int32_t t = 0; t < 4; t++) near_cpu(&f, all, t);
    near_cpu(&f, all, f.s.T - 1);
    free(all), free(again);
    tear_down(&f);
}

#ifdef TOW_CUDA
/* Tiles of every width and more than one of an expert's; fewer pairs than 24 of each are not wide. */
static const struct shape wide_shapes[] = {
    {"mxfp4 many", KERN_W_MXFP4, KERN_AQ_A128, 64, 6, 4096, 2048, 1700, false},
    {"mxfp4 skewed", KERN_W_MXFP4, KERN_AQ_A128, 256, 6, 4096, 2048, 2500, true},
    {"mxfp4 few experts", KERN_W_MXFP4, KERN_AQ_NONE, 5, 2, 4096, 2048, 1000, false},
    {"mxfp4 small tiles", KERN_W_MXFP4, KERN_AQ_A128, 32, 4, 512, 384, 300, true},
    {"mxfp4 odd width", KERN_W_MXFP4, KERN_AQ_A128, 8, 2, 7168, 3040, 250, false},
    {"nvfp4", KERN_W_NVFP4, KERN_AQ_A128, 32, 6, 4096, 2048, 700, false},
    {"nvfp4 odd width", KERN_W_NVFP4, KERN_AQ_NONE, 8, 2, 1072, 720, 250, true},
};
enum { N_WIDE = sizeof wide_shapes / sizeof *wide_shapes };

/* Rows by wgmma have the bits of rows by mma.sync. */
static void test_moe__wide_rows_have_the_same_bits(void **state)
{
    static struct fixture f;
    set_up(&f, *state);
    const int before = cuda_wide_experts;
    const int64_t n = (int64_t)f.s.T * f.s.D;
    cuda_wide_experts = 0;
    float *want = run(&f, true, 0, f.s.T);
    cuda_wide_experts = 1;
    float *got = run(&f, true, 0, f.s.T), *again = run(&f, true, 0, f.s.T);
    cuda_wide_experts = before;
    int64_t differ = 0, first = -1, unstable = 0;
    int32_t rows = 0;
    double diff = 0, norm = 0;
    for (int64_t i = 0, row = -1; i < n; i++) {
        const double d = (double)got[i] - (double)want[i];
        unstable += kern_bits(got[i]) != kern_bits(again[i]);
        norm += (double)want[i] * (double)want[i];
        if (kern_bits(got[i]) == kern_bits(want[i])) continue;
        diff += d * d;
        if (first < 0) first = i;
        if (row != i / f.s.D) rows++;
        row = i / f.s.D, differ++;
    }
    print_message("%s by wgmma: outputs differ: %lld of %lld (%d rows), rms %.2e; two runs: %lld\n",
                  f.s.name, (long long)differ, (long long)n, rows, sqrt(diff / norm),
                  (long long)unstable);
    if (differ > 0)
        fail_msg("%s: row %lld, element %lld: %a by wgmma, %a by mma.sync", f.s.name,
                 (long long)(first / f.s.D), (long long)(first % f.s.D), (double)got[first],
                 (double)want[first]);
    assert_int_equal(unstable, 0);
    free(want), free(got), free(again);
    tear_down(&f);
}
#endif

int main(void)
{
    static const struct shape shapes[] = {
        {"mxfp4", KERN_W_MXFP4, KERN_AQ_A128, 256, 6, 4096, 2048, 1000, false},
        {"mxfp4 skewed", KERN_W_MXFP4, KERN_AQ_A128, 256, 6, 4096, 2048, 2500, true},
        {"mxfp4 few experts", KERN_W_MXFP4, KERN_AQ_NONE, 5, 2, 4096, 2048, 1000, false},
        {"nvfp4", KERN_W_NVFP4, KERN_AQ_A128, 32, 6, 4096, 2048, 700, false},
        {"nvfp4 w4a4", KERN_W_NVFP4, KERN_AQ_NVFP4, 32, 6, 4096, 2048, 300, true},
        {"fp8", KERN_W_FP8, KERN_AQ_A128, 16, 4, 4096, 2048, 300, true},
        {"bf16", KERN_W_BF16, KERN_AQ_NONE, 16, 4, 2048, 1024, 300, true},
        {"mxfp4 odd width", KERN_W_MXFP4, KERN_AQ_A128, 8, 2, 7168, 3040, 250, false},
    };
    enum { N = sizeof shapes / sizeof *shapes };
    struct CMUnitTest tests[N + 16];
    struct tow_err err = {0};
    if (kern_dev_open(&gpu, "cuda:0", 1, &err) < 0) return test_no_device(&err);
    if (kern_dev_open(&cpu, "cpu", 0, &err) < 0) return 1;
    for (int i = 0; i < N; i++)
        tests[i] =
            (struct CMUnitTest){shapes[i].name, test_moe__rows_are_near_the_cpus_in_any_batch, NULL,
                                NULL, (void *)(uintptr_t)&shapes[i]};
    int n = N;
#ifdef TOW_CUDA
    for (int i = 0; i < N_WIDE && strcmp(kern_dev_isa(gpu), "sm_90") == 0; i++)
        tests[n++] =
            (struct CMUnitTest){wide_shapes[i].name, test_moe__wide_rows_have_the_same_bits, NULL,
                                NULL, (void *)(uintptr_t)&wide_shapes[i]};
#endif
    int rc = _cmocka_run_group_tests("gpu/moe", tests, (size_t)n, NULL, NULL);
    kern_dev_close(cpu);
    kern_dev_close(gpu);
    return rc;
}
