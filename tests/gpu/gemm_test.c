/* tests/gpu/gemm_test.c - linear on the device at the shapes of V4-Flash and at odd ones: sampled
 * outputs against double, rows against the CPU's, and rows computed alone or in pieces against the
 * same rows computed all at once, bit by bit. Offsets beyond 2^31. Both kinds of products of fp8
 * weights, and one against the other. */
#include "common/base/err.h"
#include "kernels/cuda/table.h"
#include "kernels/dev.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"
#include "tests/support/check.h"
#include "tests/support/device.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SAMPLES = 48, CPU_ROWS = 2 };

static struct kern_dev *gpu, *cpu;

struct shape {
    const char *name;
    enum kern_wfmt fmt;
    enum kern_sfmt sfmt;
    enum kern_act_quant aq;
    int32_t T, N, K, groups;
    bool round_w;
};
static const struct shape shapes[] = {
    {"wq_b", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 600, 32768, 1024, 1, false},
    {"wo_b", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 900, 4096, 8192, 1, false},
    {"wo_a", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_NONE, 300, 1024, 4096, 8, true},
    {"wq_a", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 2100, 1024, 4096, 1, false},
    {"wkv", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 1030, 512, 4096, 1, false},
    {"shared w2", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 700, 4096, 2048, 1, false},
    {"f32 scales", KERN_W_FP8, KERN_S_F32, KERN_AQ_A128, 300, 2048, 4096, 1, false},
    {"compressor", KERN_W_BF16, KERN_S_NONE, KERN_AQ_NONE, 2500, 1024, 4096, 1, false},
    {"head", KERN_W_BF16, KERN_S_NONE, KERN_AQ_NONE, 140, 17000, 1024, 1, false},
    {"index weights", KERN_W_BF16, KERN_S_NONE, KERN_AQ_NONE, 300, 64, 4096, 1, false},
    {"gate", KERN_W_F32, KERN_S_NONE, KERN_AQ_NONE, 300, 256, 4096, 1, false},
    {"index wq_b", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 1030, 8192, 1024, 1, false},
    {"groups", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 310, 384, 640, 3, false},
    {"ragged groups", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 140, 130, 512, 2, false},
    {"e4m3 scales", KERN_W_FP8, KERN_S_E4M3, KERN_AQ_A128, 530, 333, 1000, 1, false},
    {"no scales", KERN_W_FP8, KERN_S_NONE, KERN_AQ_A128, 270, 5000, 100, 1, false},
    {"mxfp4", KERN_W_MXFP4, KERN_S_UE8M0, KERN_AQ_A128, 200, 512, 2048, 1, false},
    {"nvfp4", KERN_W_NVFP4, KERN_S_E4M3, KERN_AQ_NVFP4, 200, 512, 2048, 1, false},
    {"tall K", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 140, 80, 20000, 1, false},
    {"odd fp8", KERN_W_FP8, KERN_S_F32, KERN_AQ_A128, 210, 333, 1000, 3, false},
    {"odd bf16", KERN_W_BF16, KERN_S_NONE, KERN_AQ_NONE, 150, 77, 4104, 2, false},
    {"odd f32", KERN_W_F32, KERN_S_NONE, KERN_AQ_NONE, 150, 77, 1001, 1, false},
    {"odd mxfp4", KERN_W_MXFP4, KERN_S_UE8M0, KERN_AQ_NONE, 150, 131, 1056, 2, false},
    {"odd nvfp4", KERN_W_NVFP4, KERN_S_E4M3, KERN_AQ_A128, 150, 131, 1040, 1, false},
};

/* fp8 products keep some 13 bits of the largest product of a block of 128 k: an error of 2^-14.3 of
 * the sum of magnitudes S (rms), 2^-10.3 at worst (kernels/cuda/wgmma.cuh). Blocks' errors add up
 * to at most 2^-10.3 of all summands; that is the bound of one output. In the norm of a row of
 * outputs: the error of a block is 2^-14.3 S, S = 128 m for products of mean magnitude m, and
 * outputs of B blocks are about sqrt(128 B) r for products of root mean square r >= m; so sqrt(B)
 * 2^-14.3 128 m / (sqrt(128 B) r) <= 2^-14.3 sqrt(128) = 5.6e-4 if errors of blocks are
 * independent. Twice that is the bound. */
static const double fp8_output = 0x1p-10, fp8_norm = 1.2e-3;
/* The bits do not depend on how rows are put together; two kinds have two. */
static bool fp8_kind(const struct shape *c)
{
    return c->fmt == KERN_W_FP8 && c->sfmt != KERN_S_F32 && c->aq == KERN_AQ_A128 &&
           (c->groups == 1 || c->N % 128 == 0);
}

static uint64_t seed = 1;
static uint32_t next(void)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (uint32_t)(seed * UINT64_C(0x2545f4914f6cdd1d) >> 32);
}
/* Mostly small, now and then large, as activations are. */
static float draw(void)
{
    float u = (float)(int32_t)next() * 0x1p-31f;
    return next() % 64 ? u : u * 30;
}
static void *get(size_t n)
{
    void *p = malloc(n ? n : 1);
    assert_non_null(p);
    return p;
}

static struct kern_weight random_weight(const struct shape *c)
{
    struct kern_weight w = {.fmt = c->fmt, .sfmt = c->sfmt, .n = c->groups * c->N, .k = c->K};
    int64_t bits = c->fmt == KERN_W_F32    ? 32
                   : c->fmt == KERN_W_BF16 ? 16
                   : c->fmt == KERN_W_FP8  ? 8
                                           : 4;
    w.row_bytes = c->K * bits / 8;
    w.scale2 = 1;
    uint8_t *d = get((size_t)(w.n * w.row_bytes));
    for (int64_t i = 0; i < w.n * w.row_bytes; i++) {
        uint8_t b = (uint8_t)next();
        d[i] = c->fmt == KERN_W_FP8 && (b & 127) == 127 ? b ^ 1 : b;
    }
    if (c->fmt == KERN_W_F32)
        for (int64_t i = 0; i < (int64_t)w.n * c->K; i++) ((float *)d)[i] = draw();
    if (c->fmt == KERN_W_BF16)
        for (int64_t i = 0; i < (int64_t)w.n * c->K; i++)
            ((uint16_t *)d)[i] = kern_bf16_encode(draw());
    w.data = d;
    if (c->sfmt == KERN_S_NONE) return w;
    int64_t rows = c->fmt == KERN_W_FP8 ? (w.n + 127) / 128 : w.n;
    int64_t cols =
        c->fmt == KERN_W_FP8 ? (c->K + 127) / 128 : c->K / (c->fmt == KERN_W_MXFP4 ? 32 : 16);
    w.scale_row_bytes = cols * (c->sfmt == KERN_S_F32 ? 4 : 1);
    uint8_t *s = get((size_t)(rows * w.scale_row_bytes));
    for (int64_t i = 0; i < rows * cols; i++) {
        if (c->sfmt == KERN_S_F32)
            ((float *)s)[i] = 0.003f + (float)(next() % 1000) * 1e-5f;
        else
            s[i] = (uint8_t)(c->sfmt == KERN_S_E4M3 ? 8 + next() % 112 : 112 + next() % 12);
    }
    w.scale = s;
    if (c->fmt == KERN_W_NVFP4) w.scale2 = 0.0371f, w.input_scale = 0.0131f;
    return w;
}
static double weight_at(const struct kern_weight *w, int64_t n, int64_t k)
{
    const uint8_t *d = (const uint8_t *)w->data + n * w->row_bytes, *s = w->scale;
    switch (w->fmt) {
    case KERN_W_F32: return (double)((const float *)d)[k];
    case KERN_W_BF16: return (double)kern_bf16_decode(((const uint16_t *)d)[k]);
    case KERN_W_FP8: {
        const double v = (double)kern_e4m3_decode(d[k]);
        if (w->sfmt == KERN_S_NONE) return v;
        s += n / 128 * w->scale_row_bytes + k / 128 * (w->sfmt == KERN_S_F32 ? 4 : 1);
        return v * (double)(w->sfmt == KERN_S_F32    ? *(const float *)s
                            : w->sfmt == KERN_S_E4M3 ? kern_e4m3_decode(*s)
                                                     : kern_ue8m0_decode(*s));
    }
    case KERN_W_MXFP4:
        return (double)kern_e2m1_decode(kern_nibble(d, k)) *
               (double)kern_ue8m0_decode(s[n * w->scale_row_bytes + k / 32]);
    case KERN_W_NVFP4:
        return (double)kern_e2m1_decode(kern_nibble(d, k)) *
               (double)kern_e4m3_decode(s[n * w->scale_row_bytes + k / 16]) * (double)w->scale2;
    }
    return 0;
}

/* x of a shape on both sides, and its weight. */
struct setup {
    const struct shape *c;
    struct kern_weight w, placed;
    uint16_t *x; /* host [T, groups * K] */
    void *x_dev;
    int64_t ld;
};

static void run(const struct setup *u, int32_t t0, int32_t T, void *y, int64_t ld_y,
                enum kern_dtype yt)
{
    const struct shape *c = u->c;
    struct kern_linear p = {.x = (uint16_t *)u->x_dev + t0 * u->ld,
                            .w = u->placed,
                            .y = y,
                            .ld_x = u->ld,
                            .ld_y = ld_y,
                            .T = T,
                            .N = c->N,
                            .K = c->K,
                            .groups = c->groups,
                            .x_dtype = KERN_BF16,
                            .y_dtype = yt,
                            .aq = c->aq,
                            .round_w = c->round_w};
    assert_int_equal(kern_dev_ops(gpu)->linear(kern_dev_stream(gpu), &p), 0);
}

/* Sampled outputs of all rows against double. */
static double against_double(const struct setup *u, const float *y, int64_t width, double bound)
{
    const struct shape *c = u->c;
    double worst = 0;
    float *x = get((size_t)c->K * 4);
    for (int i = 0; i < SAMPLES; i++) {
        int32_t t = i < 2 ? (i ? c->T - 1 : 0) : (int32_t)(next() % (uint32_t)c->T);
        int32_t o = (int32_t)(next() % (uint32_t)width), g = o / c->N;
        if (i < 2) o = i ? (int32_t)width - 1 : 0, g = o / c->N;
        for (int32_t k = 0; k < c->K; k++) x[k] = kern_bf16_decode(u->x[t * u->ld + g * c->K + k]);
        if (c->aq == KERN_AQ_A128) kern_roundtrip_e4m3(x, c->K, 128, x);
        if (c->aq == KERN_AQ_NVFP4) kern_roundtrip_nvfp4(x, c->K, u->w.input_scale, x);
        double sum = 0, mag = 0;
        for (int32_t k = 0; k < c->K; k++) {
            double m = (double)x[k] * weight_at(&u->w, o, k);
            sum += m, mag += fabs(m);
        }
        double e = fabs((double)y[t * width + o] - sum) / (mag + 1e-30);
        if (!(e <= bound))
            fail_msg("%s: row %d, output %d: %.9g, in double %.9g (summands %.9g)", c->name, t, o,
                     (double)y[t * width + o], sum, mag);
        if (e > worst) worst = e;
    }
    free(x);
    return worst;
}

/* Whole rows against the CPU's: relative in the norm. */
static double against_cpu(const struct setup *u, const float *y, int64_t width, double bound)
{
    const struct shape *c = u->c;
    float *z = get((size_t)(CPU_ROWS * width) * 4);
    double worst = 0;
    for (int i = 0; i < CPU_ROWS; i++) {
        int32_t t = i ? c->T / 2 : 0;
        struct kern_linear p = {.x = u->x + t * u->ld,
                                .w = u->w,
                                .y = z,
                                .ld_x = u->ld,
                                .ld_y = width,
                                .T = 1,
                                .N = c->N,
                                .K = c->K,
                                .groups = c->groups,
                                .x_dtype = KERN_BF16,
                                .y_dtype = KERN_F32,
                                .aq = c->aq,
                                .round_w = c->round_w};
        assert_int_equal(kern_dev_ops(cpu)->linear(kern_dev_stream(cpu), &p), 0);
        double diff = 0, norm = 0;
        for (int64_t o = 0; o < width; o++) {
            double d = (double)y[t * width + o] - (double)z[o];
            diff += d * d, norm += (double)z[o] * (double)z[o];
        }
        double e = sqrt(diff / (norm + 1e-300));
        if (!(e < bound)) fail_msg("%s: row %d is %.3g away from the CPU's", c->name, t, e);
        if (e > worst) worst = e;
    }
    free(z);
    return worst;
}

static void check_shape(const struct shape *c, bool fp8)
{
    const int64_t width = (int64_t)c->groups * c->N;
    struct setup u = {.c = c, .ld = (int64_t)c->groups * c->K};
    u.w = u.placed = random_weight(c);
    struct tow_err err = {0};
    if (kern_dev_place(gpu, &u.placed, 1, &err) < 0) fail_msg("%s", err.msg);
    u.x = get((size_t)(c->T * u.ld) * 2);
    for (int64_t i = 0; i < c->T * u.ld; i++) u.x[i] = kern_bf16_encode(draw());
    u.x_dev = kern_dev_alloc(gpu, (size_t)(c->T * u.ld) * 2);
    void *y_dev = kern_dev_alloc(gpu, (size_t)(c->T * width) * 4);
    assert_true(u.x_dev && y_dev);
    struct kern_stream *s = kern_dev_stream(gpu);
    kern_stream_write(s, u.x_dev, u.x, (size_t)(c->T * u.ld) * 2);

    const size_t bytes = (size_t)(c->T * width) * 4;
    float *all = get(bytes), *y = get(bytes);
    memset(y, 0xff, bytes);
    kern_stream_write(s, y_dev, y, bytes);
    run(&u, 0, c->T, y_dev, width, KERN_F32);
    assert_int_equal(kern_stream_read(s, all, y_dev, bytes), 0);
    double e = against_double(&u, all, width, fp8 ? fp8_output : 3e-6),
           ec = against_cpu(&u, all, width, fp8 ? fp8_norm : 5e-6);

    /* The same rows in pieces of these lengths, from everywhere. */
    static const int32_t pieces[] = {1,  2,  3,  7,   8,   9,   16,  17,  32, 33,
                                     64, 65, 98, 128, 129, 256, 257, 300, 512};
    int n_bad = 0;
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        const int32_t T = pieces[i];
        if (T > c->T) continue;
        const int32_t t0 = i % 3 == 0 ? 0 : i % 3 == 1 ? c->T - T : (c->T - T) / 2;
        memset(y, 0xff, (size_t)(T * width) * 4);
        kern_stream_write(s, y_dev, y, (size_t)(T * width) * 4);
        run(&u, t0, T, y_dev, width, KERN_F32);
        assert_int_equal(kern_stream_read(s, y, y_dev, (size_t)(T * width) * 4), 0);
        const float *want = all + t0 * width;
        int64_t differ = 0, first = -1;
        for (int64_t j = 0; j < T * width; j++)
            if (memcmp(y + j, want + j, 4) != 0) {
                differ++;
                if (first < 0) first = j;
            }
        if (differ) {
            print_message("%s: %d rows from %d on: %lld of %lld outputs differ, first row %lld, "
                          "output %lld: %a, all at once %a\n",
                          c->name, T, t0, (long long)differ, (long long)(T * width),
                          (long long)(first / width), (long long)(first % width), (double)y[first],
                          (double)want[first]);
            n_bad++;
        }
    }

    /* bf16 out is the f32 result rounded, with gaps between rows left alone: rows at any address,
     * and such as can be stored 16 bytes at a time. */
    const int64_t lds[] = {width + 5, width / 8 * 8 + 16};
    uint16_t *h = get((size_t)(c->T * (width + 16)) * 2);
    for (int way = 0; way < 2; way++) {
        const int32_t few = c->T < 70 ? c->T : 70, T = way ? c->T : few;
        const int64_t ld = lds[way];
        if (ld > 2 * width) continue; /* no room */
        for (int32_t n = T; n >= 1; n = n > few ? few : n > 1 ? 1 : 0) {
            memset(h, 0xa5, (size_t)(n * ld) * 2);
            kern_stream_write(s, y_dev, h, (size_t)(n * ld) * 2);
            run(&u, 0, n, y_dev, ld, KERN_BF16);
            assert_int_equal(kern_stream_read(s, h, y_dev, (size_t)(n * ld) * 2), 0);
            for (int32_t t = 0; t < n; t++)
                for (int64_t o = 0; o < ld; o++) {
                    uint16_t want = o < width ? kern_bf16_encode(all[t * width + o]) : 0xa5a5;
                    if (h[t * ld + o] != want)
                        fail_msg("%s: bf16 row %d of %d, element %lld: %04x, not %04x", c->name, t,
                                 n, (long long)o, h[t * ld + o], want);
                }
        }
    }
    print_message(
        "%-14s%s %d x [%d, %d] x %d: %.2g of the summands from double, %.2g from the CPU\n",
        c->name, fp8 ? " fp8" : "", c->T, c->N, c->K, c->groups, e, ec);
    free(h), free(all), free(y), free(u.x), free((void *)(uintptr_t)u.w.data);
    free((void *)(uintptr_t)u.w.scale);
    kern_dev_free(gpu, u.x_dev), kern_dev_free(gpu, y_dev);
    kern_dev_unplace(gpu, u.placed.data);
    assert_int_equal(n_bad, 0);
}
static void test_shape(void **state)
{
    check_shape(*state, false);
}
static void test_shape_fp8(void **state)
{
    assert_true(kern_dev_fp8_products(gpu, true));
    check_shape(*state, true);
    kern_dev_fp8_products(gpu, false);
}
static int fp8_off(void **state)
{
    (void)state;
    kern_dev_fp8_products(gpu, false);
    return 0;
}

#ifdef TOW_CUDA
/* Two products, the second of what the first made, as they are launched again and again: products
 * that begin before their rows are there do not read them before. */
struct chain {
    struct kern_linear p[2];
};
static int enqueue_chain(void *arg)
{
    const struct chain *c = arg;
    const int rc = kern_dev_ops(gpu)->linear(kern_dev_stream(gpu), &c->p[0]);
    return rc < 0 ? rc : kern_dev_ops(gpu)->linear(kern_dev_stream(gpu), &c->p[1]);
}
static void test_linear__products_that_begin_early_wait_for_their_rows(void **state)
{
    enum { D = 4096, MOST_T = 100 };
    const struct shape c = {"early", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, MOST_T, D,
                            D,       1,          false};
    struct kern_stream *s = kern_dev_stream(gpu);
    struct kern_weight w = random_weight(&c), placed = w;
    assert_int_equal(kern_dev_place(gpu, &placed, 1, NULL), 0);
    const size_t bytes = (size_t)MOST_T * D * 2;
    uint16_t *x = get(bytes), *want = get(bytes), *y = get(bytes);
    void *x_dev = kern_dev_alloc(gpu, bytes), *mid = kern_dev_alloc(gpu, bytes),
         *y_dev = kern_dev_alloc(gpu, bytes);
    assert_true(x_dev && mid && y_dev);
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        if (kind && !kern_dev_fp8_products(gpu, true)) break;
        static const int32_t Ts[] = {1, 5, 16, 30, 64, 100};
        for (size_t i = 0; i < sizeof Ts / sizeof *Ts; i++) {
            struct chain chain;
            for (int j = 0; j < 2; j++)
                chain.p[j] = (struct kern_linear){.x = j ? mid : x_dev,
                                                  .w = placed,
                                                  .y = j ? y_dev : mid,
                                                  .ld_x = D,
                                                  .ld_y = D,
                                                  .T = Ts[i],
                                                  .N = D,
                                                  .K = D,
                                                  .groups = 1,
                                                  .x_dtype = KERN_BF16,
                                                  .y_dtype = KERN_BF16,
                                                  .aq = KERN_AQ_A128};
            for (int turn = 0; turn < 4; turn++) {
                for (size_t k = 0; k < bytes / 2; k++) x[k] = kern_bf16_encode(draw());
                kern_stream_write(s, x_dev, x, bytes);
                cuda_early_products = cuda_early_launches = 0;
                assert_int_equal(enqueue_chain(&chain), 0);
                assert_int_equal(kern_stream_read(s, want, y_dev, bytes), 0);
                cuda_early_products = cuda_early_launches = 1;
                const uint64_t key = 77 + 100 * (uint64_t)kind + i;
                assert_int_equal(kern_stream_repeat(s, key, enqueue_chain, &chain), 0);
                assert_int_equal(kern_stream_read(s, y, y_dev, bytes), 0);
                assert_memory_equal(y, want, (size_t)Ts[i] * D * 2);
            }
        }
    }
    kern_dev_fp8_products(gpu, false);
    kern_dev_free(gpu, x_dev), kern_dev_free(gpu, mid), kern_dev_free(gpu, y_dev);
    kern_dev_unplace(gpu, placed.data);
    free(x), free(want), free(y), free((void *)(uintptr_t)w.data), free((void *)(uintptr_t)w.scale);
}

/* Rows by wgmma have the bits of rows by mma.sync. */
static void test_wide(void **state)
{
    const struct shape *c = *state;
    const int64_t width = (int64_t)c->groups * c->N;
    struct setup u = {.c = c, .ld = (int64_t)c->groups * c->K};
    u.w = u.placed = random_weight(c);
    assert_int_equal(kern_dev_place(gpu, &u.placed, 1, NULL), 0);
    u.x = get((size_t)(c->T * u.ld) * 2);
    for (int64_t i = 0; i < c->T * u.ld; i++) u.x[i] = kern_bf16_encode(draw());
    const size_t bytes = (size_t)(c->T * width) * 4;
    u.x_dev = kern_dev_alloc(gpu, (size_t)(c->T * u.ld) * 2);
    void *y_dev = kern_dev_alloc(gpu, bytes);
    assert_true(u.x_dev && y_dev);
    struct kern_stream *s = kern_dev_stream(gpu);
    kern_stream_write(s, u.x_dev, u.x, (size_t)(c->T * u.ld) * 2);
    float *want = get(bytes), *y = get(bytes);
    const int before = cuda_wide_products;
    cuda_wide_products = 0;
    run(&u, 0, c->T, y_dev, width, KERN_F32);
    assert_int_equal(kern_stream_read(s, want, y_dev, bytes), 0);
    memset(y, 0xff, bytes);
    kern_stream_write(s, y_dev, y, bytes);
    cuda_wide_products = 1;
    run(&u, 0, c->T, y_dev, width, KERN_F32);
    cuda_wide_products = before;
    assert_int_equal(kern_stream_read(s, y, y_dev, bytes), 0);
    int64_t differ = 0, first = -1;
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < c->T * width; i++) {
        const double d = (double)y[i] - (double)want[i];
        diff += d * d, norm += (double)want[i] * (double)want[i];
        if (memcmp(y + i, want + i, 4) == 0) continue;
        differ++;
        if (first < 0) first = i;
    }
    print_message("%-14s by wgmma: %lld of %lld outputs differ, %.3g in the norm", c->name,
                  (long long)differ, (long long)(c->T * width), sqrt(diff / norm));
    if (differ)
        print_message("; row %lld, output %lld: %a, not %a", (long long)(first / width),
                      (long long)(first % width), (double)y[first], (double)want[first]);
    print_message("\n");
    free(want), free(y), free(u.x), free((void *)(uintptr_t)u.w.data);
    free((void *)(uintptr_t)u.w.scale);
    kern_dev_free(gpu, u.x_dev), kern_dev_free(gpu, y_dev);
    kern_dev_unplace(gpu, u.placed.data);
    assert_int_equal(differ, 0);
}
#endif

/* Rows of x and y so far apart that their offsets need more than 31 bits. */
static void test_linear__offsets_beyond_2_31_are_right(void **state)
{
    (void)state;
    const struct shape c = {"far rows", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_NONE, 2200, 48,
                            256,        1,          false};
    const int64_t ld = 1000000;
    const size_t bytes = (size_t)((c.T - 1) * ld + 1024) * 2;
    struct setup u = {.c = &c, .ld = ld}, near;
    u.w = u.placed = random_weight(&c);
    assert_int_equal(kern_dev_place(gpu, &u.placed, 1, NULL), 0);
    u.x_dev = kern_dev_alloc(gpu, bytes);
    void *y_dev = kern_dev_alloc(gpu, bytes);
    struct kern_stream *s = kern_dev_stream(gpu);
    if (!u.x_dev || !y_dev) {
        print_message("no device memory for 2 x %zu bytes: skipped\n", bytes);
        kern_dev_free(gpu, u.x_dev), kern_dev_free(gpu, y_dev);
        skip();
    }
    near = u;
    near.ld = c.K;
    uint16_t *x = get((size_t)(c.T * c.K) * 2), y[48], *want = get((size_t)c.T * 48 * 2);
    for (int i = 0; i < c.T * c.K; i++) x[i] = kern_bf16_encode(draw());
    near.x_dev = kern_dev_alloc(gpu, (size_t)(c.T * c.K) * 2);
    void *y_near = kern_dev_alloc(gpu, (size_t)c.T * 48 * 2);
    kern_stream_write(s, near.x_dev, x, (size_t)(c.T * c.K) * 2);
    for (int32_t t = 0; t < c.T; t++)
        kern_stream_write(s, (uint16_t *)u.x_dev + t * ld, x + t * c.K, (size_t)c.K * 2);
    run(&near, 0, c.T, y_near, 48, KERN_BF16);
    assert_int_equal(kern_stream_read(s, want, y_near, (size_t)c.T * 48 * 2), 0);
    for (int32_t n = c.T; n > 0; n = n == c.T ? 3 : 0) {
        const int32_t t0 = c.T - n;
        run(&u, t0, n, (uint16_t *)y_dev + t0 * ld, ld, KERN_BF16);
        for (int32_t t = t0; t < c.T; t += 37) {
            assert_int_equal(kern_stream_read(s, y, (uint16_t *)y_dev + t * ld, sizeof y), 0);
            assert_memory_equal(y, want + t * 48, sizeof y);
        }
    }
    kern_dev_free(gpu, u.x_dev), kern_dev_free(gpu, y_dev), kern_dev_free(gpu, near.x_dev);
    kern_dev_free(gpu, y_near), kern_dev_unplace(gpu, u.placed.data);
    free(x), free(want), free((void *)(uintptr_t)u.w.data), free((void *)(uintptr_t)u.w.scale);
}

/* Every code of every 4-bit and 8-bit format, subnormal ones included, by products with one:
 * exact. */
static void test_linear__every_code_has_its_value(void **state)
{
    enum { N_FORMS = 4, FP8_KIND = 3 };
    static const struct shape cs[N_FORMS] = {
        {"fp8 codes", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_NONE, 40, 256, 128, 1, false},
        {"mxfp4 codes", KERN_W_MXFP4, KERN_S_UE8M0, KERN_AQ_NONE, 40, 256, 128, 1, false},
        {"nvfp4 codes", KERN_W_NVFP4, KERN_S_E4M3, KERN_AQ_NONE, 40, 256, 128, 1, false},
        {"fp8 kind", KERN_W_FP8, KERN_S_UE8M0, KERN_AQ_A128, 40, 256, 128, 1, false}};
    (void)state;
    for (int f = 0; f < N_FORMS; f++) {
        const struct shape *c = &cs[f];
        if (f == FP8_KIND && !kern_dev_fp8_products(gpu, true)) continue;
        struct setup u = {.c = c, .ld = c->K};
        u.w = random_weight(c);
        for (int32_t n = 0; n < 256; n++)
            for (int64_t i = 0; i < u.w.row_bytes; i++)
                ((uint8_t *)(uintptr_t)u.w.data)[n * u.w.row_bytes + i] = (uint8_t)(n + 3 * i);
        if (c->fmt == KERN_W_NVFP4) /* all scales that are numbers */
            for (int i = 0; i < 256 * 8; i++)
                ((uint8_t *)(uintptr_t)u.w.scale)[i] = (uint8_t)((i & 127) == 127 ? 1 : i);
        if (c->fmt == KERN_W_MXFP4) /* 2^-127 to 2^17 */
            for (int i = 0; i < 256 * 4; i++)
                ((uint8_t *)(uintptr_t)u.w.scale)[i] = (uint8_t)(i % 145);
        u.placed = u.w;
        assert_int_equal(kern_dev_place(gpu, &u.placed, 1, NULL), 0);
        uint16_t *x = get((size_t)(c->K * c->K) * 2); /* unit rows */
        memset(x, 0, (size_t)(c->K * c->K) * 2);
        for (int k = 0; k < c->K; k++) x[k * c->K + k] = 0x3f80;
        u.x_dev = kern_dev_alloc(gpu, (size_t)(c->K * c->K) * 2);
        float *y = get(128 * 256 * 4);
        void *y_dev = kern_dev_alloc(gpu, 128 * 256 * 4);
        struct kern_stream *s = kern_dev_stream(gpu);
        kern_stream_write(s, u.x_dev, x, (size_t)(c->K * c->K) * 2);
        for (int pass = 0; pass < 2; pass++) { /* one by one, all at once */
            for (int t = 0; t < 128; t += pass ? 128 : 1)
                run(&u, t, pass ? 128 : 1, (float *)y_dev + t * 256, 256, KERN_F32);
            assert_int_equal(kern_stream_read(s, y, y_dev, 128 * 256 * 4), 0);
            for (int t = 0; t < 128; t++)
                for (int n = 0; n < 256; n++) {
                    /* Tiny products lose bits: 4-bit ones are summed times 2^-16. */
                    float want = (float)weight_at(&u.w, n, t), got = y[t * 256 + n];
                    bool code_nan = false;
                    for (int k = 0; k < 128 && c->fmt == KERN_W_FP8; k++)
                        code_nan |= (((const uint8_t *)u.w.data)[n * 128 + k] & 127) == 127;
                    if (code_nan ? got == got : got != want && fabsf(want) > 0x1p-100f)
                        fail_msg("%s: element %d of row %d is %a, not %a", c->name, t, n,
                                 (double)got, (double)want);
                }
        }
        kern_dev_free(gpu, u.x_dev), kern_dev_free(gpu, y_dev),
            kern_dev_unplace(gpu, u.placed.data);
        free(x), free(y), free((void *)(uintptr_t)u.w.data), free((void *)(uintptr_t)u.w.scale);
        kern_dev_fp8_products(gpu, false);
    }
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    if (kern_dev_open(&gpu, test_cuda_device(), 0, &err) < 0) return test_no_device(&err);
    if (kern_dev_open(&cpu, "cpu", 0, &err) < 0) return 1;
    enum { N_SHAPES = sizeof shapes / sizeof *shapes };
    struct CMUnitTest tests[3 * N_SHAPES + 3] = {
        cmocka_unit_test(test_linear__every_code_has_its_value),
        cmocka_unit_test(test_linear__offsets_beyond_2_31_are_right)};
    int n = 2;
    for (int i = 0; i < N_SHAPES; i++)
        tests[n++] = (struct CMUnitTest){shapes[i].name, test_shape, NULL, NULL,
                                         (void *)(uintptr_t)&shapes[i]};
    static char names[N_SHAPES][32];
    for (int i = 0; i < N_SHAPES; i++) {
        if (!fp8_kind(&shapes[i]) || !kern_dev_fp8_products(gpu, false)) continue;
        snprintf(names[i], sizeof names[i], "%s fp8", shapes[i].name);
        tests[n++] = (struct CMUnitTest){names[i], test_shape_fp8, NULL, fp8_off,
                                         (void *)(uintptr_t)&shapes[i]};
    }
#ifdef TOW_CUDA
    tests[n++] = (struct CMUnitTest)cmocka_unit_test(
        test_linear__products_that_begin_early_wait_for_their_rows);
    for (int i = 0; i < N_SHAPES; i++) {
        if (shapes[i].fmt != KERN_W_FP8 && shapes[i].fmt != KERN_W_BF16) continue;
        if (strcmp(kern_dev_isa(gpu), "sm_90") != 0) continue;
        tests[n++] = (struct CMUnitTest){shapes[i].name, test_wide, NULL, NULL,
                                         (void *)(uintptr_t)&shapes[i]};
    }
#endif
    test_choose(argc, argv, tests, (size_t)n);
    int failed = _cmocka_run_group_tests("gpu/gemm", tests, (size_t)n, NULL, NULL);
    kern_dev_close(gpu);
    kern_dev_close(cpu);
    return failed;
}
