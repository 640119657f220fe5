/* tests/gpu/moe_test.c - routed experts at V4-Flash shapes: a row has the same bits in any batch,
 * and is near the CPU's, and wgmma's are those of mma.sync; skewed routing, repeated experts and
 * none. The same for products of codes, which are the bits of bf16 where sums are exact, and near
 * them elsewhere. All experts of a layer at once have the bits of the ops one by one.
 *
 * Exit 77 where there is no device. usage: moe_test [NAME]
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
    bool codes; /* experts are placed for products of codes, and multiplied so */
    /* mxfp4 scales are this many powers of two apart; 0: 7; negative: so are they, and blocks of x
     * are up to 20 apart */
    int spread;
};
enum { HOST, DEVICE, WIDENED /* on the device, products in bf16 */, N_PLACES };
struct fixture {
    struct shape s;
    struct kern_weight w[N_PLACES][3][256]; /* w1, w2, w3 */
    uint8_t *block;                         /* all weights are stretches of it */
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

static void place(struct fixture *f, int at)
{
    struct tow_err err = {0};
    memcpy(f->w[at], f->w[HOST], sizeof f->w[HOST]);
    kern_dev_fp8_products(gpu, at == DEVICE && f->s.codes);
    for (int i = 0; i < 3; i++)
        if (kern_dev_place(gpu, f->w[at][i], f->s.E, &err) < 0) fail_msg("%s", err.msg);
}
static void unplace(struct fixture *f, int at)
{
    for (int i = 0; i < 3; i++) kern_dev_unplace(gpu, f->w[at][i][0].data);
}

static void draw(struct fixture *f, const struct shape *s)
{
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
        if (i >= SCALES_AT)
            b = (uint8_t)((s->fmt == KERN_W_NVFP4 ? 16 : 116) +
                          b % (s->spread ? abs(s->spread) + 1 : 8));
        f->block[i] = b;
    }
    for (int32_t e = 0; e < s->E; e++) {
        f->w[0][0][e] = weight(f, 3 * e, s->I, s->D);
        f->w[0][1][e] = weight(f, 3 * e + 1, s->D, s->I);
        f->w[0][2][e] = weight(f, 3 * e + 2, s->I, s->D);
    }
    for (int64_t i = 0; i < (int64_t)s->T * s->D; i++)
        f->x[i] = kern_bf16_encode(ldexpf(normal(), s->spread < 0 ? -(int)(i / 128 * 13 % 21) : 0));
    for (int32_t t = 0; t < s->T; t++)
        for (int32_t i = 0; i < s->k; i++) {
            int32_t e = (int32_t)next() % s->E;
            if (s->skewed && t % 4) e = t % 4 == 1 ? 3 : (int32_t)next() % 2; /* repeats, too */
            if (s->skewed && next() % 8 == 0) e = -1;
            f->experts[t * s->k + i] = e;
            f->weights[t * s->k + i] = fabsf(normal()) + 0.1f;
        }
}
static void set_up(struct fixture *f, const struct shape *s)
{
    draw(f, s);
    place(f, DEVICE);
}
static void tear_down(struct fixture *f)
{
    kern_dev_fp8_products(gpu, false);
    free(f->block), free(f->x), free(f->experts), free(f->weights);
}

/* Rows t .. t+n-1 in one call; the caller frees. */
static float *run(struct fixture *f, int at, int32_t t, int32_t n)
{
    const struct shape *s = &f->s;
    struct kern_dev *dev = at == HOST ? cpu : gpu;
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
    kern_dev_fp8_products(gpu, at == DEVICE && s->codes);
    const struct kern_moe p = {.x = x,
                               .experts = e,
                               .weights = w,
                               .w1 = f->w[at][0],
                               .w2 = f->w[at][1],
                               .w3 = f->w[at][2],
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
    float *part = run(f, DEVICE, t, n);
    for (int64_t i = 0; i < (int64_t)n * f->s.D; i++)
        if (kern_bits(part[i]) != kern_bits(all[(int64_t)t * f->s.D + i]))
            fail_msg("%s: row %d, element %d: %a in a call of %d rows, %a in one of %d", f->s.name,
                     t + (int)(i / f->s.D), (int)(i % f->s.D), (double)part[i], n,
                     (double)all[(int64_t)t * f->s.D + i], f->s.T);
    free(part);
}
/* Products of codes: a sum of K is off by 2^-14.3 sqrt(128) 0.7 = 4e-4 of its size (wgmma.cuh), so
 * gate times up by some 6e-4, which lets e4m3 codes of y, 0.09 apart, land next door: sqrt(6e-4 *
 * 0.09) = 7e-3 of what comes out. Three times that. */
enum { CODES_PER_MILLE = 21 };

static void near_cpu(struct fixture *f, const float *all, int32_t t)
{
    float *want = run(f, HOST, t, 1);
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
    if (!(rms <= (f->s.codes ? CODES_PER_MILLE * 1e-3 : 5e-3)))
        fail_msg("%s row %d: rms %.3e", f->s.name, t, rms);
    free(want);
}

static void test_moe__rows_are_near_the_cpus_in_any_batch(void **state)
{
    static struct fixture f;
    set_up(&f, *state);
    float *all = run(&f, DEVICE, 0, f.s.T), *again = run(&f, DEVICE, 0, f.s.T);
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
    unplace(&f, DEVICE);
    tear_down(&f);
}

/* Elements that differ; NaN is NaN. *rms: of the differences, by the size of b's. */
static int64_t differ(const float *a, const float *b, int64_t n, double *rms)
{
    int64_t count = 0;
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(a[i]) && isnan(b[i])) continue;
        const double d = (double)a[i] - (double)b[i];
        count += kern_bits(a[i]) != kern_bits(b[i]);
        diff += d * d, norm += (double)b[i] * (double)b[i];
    }
    *rms = norm > 0 ? sqrt(diff / norm) : sqrt(diff);
    return count;
}

/* Products of codes are near those in bf16; an array whose scales are too far apart has the latter;
 * and one placed for codes gives the latter's bits when the switch says so. */
static void test_moe__codes_are_near_widened(void **state)
{
    static struct fixture f;
    double rms, none;
    draw(&f, *state);
    uint8_t *nan_scale = f.block + SCALES_AT + 64 + 5 * f.s.D / 32; /* a part of w2, too */
    if (f.s.fmt == KERN_W_MXFP4) *nan_scale = 255;
    place(&f, DEVICE), place(&f, WIDENED);
    const int64_t n = (int64_t)f.s.T * f.s.D;
    float *codes = run(&f, DEVICE, 0, f.s.T), *widened = run(&f, WIDENED, 0, f.s.T);
    const int64_t other = differ(codes, widened, n, &rms);
    int64_t n_nan = 0;
    for (int64_t i = 0; i < n; i++) n_nan += isnan(codes[i]);
    print_message("%s: codes: %lld of %lld differ from bf16, rms %.2e; %lld NaN\n", f.s.name,
                  (long long)other, (long long)n, rms, (long long)n_nan);
    if (f.s.fmt == KERN_W_MXFP4) assert_in_range(n_nan, 1, n - 1);
    if (f.s.fmt == KERN_W_MXFP4 && f.s.spread > 11)
        assert_int_equal(other, 0);
    else
        assert_true(other > 0 && rms <= CODES_PER_MILLE * 1e-3);
    f.s.codes = false;
    float *back = run(&f, DEVICE, 0, f.s.T);
    assert_int_equal(differ(back, widened, n, &none), 0);
    free(codes), free(widened), free(back);
    unplace(&f, DEVICE), unplace(&f, WIDENED);
    tear_down(&f);
}

/* All pairs are one expert's; every number of them gives a row the same bits, twice. */
static void test_moe__every_number_of_pairs_gives_the_same_bits(void **state)
{
    static struct fixture f;
    draw(&f, *state);
    for (int64_t i = 0; i < (int64_t)f.s.T * f.s.k; i++) f.experts[i] = 1;
    place(&f, DEVICE);
    float *all = run(&f, DEVICE, 0, f.s.T);
    int bad = 0;
    for (int32_t n = 1; n <= f.s.T; n += n < 40 ? 1 : n < 256 ? 7 : 37) {
        float *part = run(&f, DEVICE, 0, n), *again = run(&f, DEVICE, 0, n);
        double rms;
        const int64_t d = differ(part, all, (int64_t)n * f.s.D, &rms),
                      u = differ(part, again, (int64_t)n * f.s.D, &rms);
        if ((d || u) && bad++ < 12)
            print_message("%s: %d pairs: %lld differ from a call of %d, %lld in two runs\n",
                          f.s.name, n, (long long)d, f.s.T, (long long)u);
        free(part), free(again);
    }
    free(all);
    unplace(&f, DEVICE);
    tear_down(&f);
    assert_int_equal(bad, 0);
}

/* A copy of a weight in room of its own: those drawn share theirs. */
static void own(struct kern_weight *w)
{
    const size_t codes = (size_t)(w->n * w->row_bytes),
                 scales = (size_t)((w->fmt == KERN_W_FP8 ? (w->n + 127) / 128 : w->n) *
                                   w->scale_row_bytes);
    void *data = malloc(codes), *scale = malloc(scales);
    assert_true(data && scale);
    memcpy(data, w->data, codes), memcpy(scale, w->scale, scales);
    w->data = data, w->scale = scale;
}
static void disown(struct kern_weight *w)
{
    free((void *)(uintptr_t)w->data);
    free((void *)(uintptr_t)w->scale);
}

/* w1 or w3 whose first of each 128 rows gives the largest activation of them, the same one in each
 * 128, whatever one number of x is, if that is small: so blocks of activations have one scale. Has
 * no weight for the first number of x. */
static void level(const struct shape *s, struct kern_weight *w)
{
    uint8_t *data = (uint8_t *)(uintptr_t)w->data, *scale = (uint8_t *)(uintptr_t)w->scale;
    const uint8_t top = (uint8_t)(116 + (s->spread ? s->spread : 7));
    const bool fp8 = s->fmt == KERN_W_FP8;
    for (int64_t n = 0; n < w->n; n++) {
        uint8_t *row = data + n * w->row_bytes, *scales = scale + n * w->scale_row_bytes;
        for (int64_t i = 0; i < w->row_bytes && fp8; i++)
            row[i] = n % 128 ? row[i] & 0xbf : 0x48; /* up to 1.875, and 4 */
        for (int64_t i = 0; i < w->scale_row_bytes && !fp8; i++)
            scales[i] = n % 128 == 0 ? top : scales[i] > top - 2 ? scales[i] - 3 : scales[i];
        if (!fp8 && n % 128 == 0) memset(row, 0x77, (size_t)w->row_bytes);
        row[0] &= fp8 ? 0 : 0xf0;
    }
    for (int64_t i = 0; i < w->n / 128 * w->scale_row_bytes && fp8; i++)
        scale[i] = (uint8_t)(116 + i % w->scale_row_bytes * 5 % 8);
}

/* x as products of codes see it: quantized by one scale a row. Quantized again by blocks, it is the
 * same. */
static void by_one_scale(uint16_t *x, int32_t n)
{
    float most = 0;
    for (int32_t i = 0; i < n; i++) most = fmaxf(most, fabsf(kern_bf16_decode(x[i])));
    const uint8_t c = kern_e4m3_scale_code(most);
    const float inverse = kern_ue8m0_inverse(c), scale = kern_ue8m0_decode(c);
    for (int32_t i = 0; i < n; i++)
        x[i] = kern_bf16_encode(
            kern_e4m3_decode(kern_e4m3_encode(kern_bf16_decode(x[i]) * inverse)) * scale);
}

/* Products of codes and of bf16 of the same numbers are equal; returns those that are zero. */
static int64_t equal_kinds(struct fixture *f, const char *what)
{
    const struct shape *s = &f->s;
    double rms;
    float *codes = run(f, DEVICE, 0, s->T);
    for (int32_t t = 0; t < s->T && s->codes; t++) by_one_scale(f->x + (int64_t)t * s->D, s->D);
    float *widened = run(f, WIDENED, 0, s->T);
    const int64_t n = (int64_t)s->T * s->D, other = differ(codes, widened, n, &rms);
    int64_t zeros = 0, n_nan = 0;
    for (int64_t i = 0; i < n; i++) zeros += widened[i] == 0, n_nan += isnan(widened[i]);
    print_message("%s: %s: %lld of %lld differ, rms %.2e; %lld zeros, %lld NaN\n", s->name, what,
                  (long long)other, (long long)n, rms, (long long)zeros, (long long)n_nan);
    for (int64_t i = 0; i < n && other; i++)
        if (kern_bits(codes[i]) != kern_bits(widened[i]) && !(isnan(codes[i]) && isnan(widened[i])))
            fail_msg("row %lld, element %lld: %a by codes, %a in bf16", (long long)(i / s->D),
                     (long long)(i % s->D), (double)codes[i], (double)widened[i]);
    free(codes), free(widened);
    return zeros;
}

/* One number of each row of x and of w2 is not zero: no sum is rounded, so both kinds have the same
 * bits. Scales of zeros alone may be anything. Then also with another number, 2^0 to 2^23 as large,
 * for which there is no weight, but which all codes of a row count from; with rows of zeros, and
 * NaN. */
static void test_moe__exact_sums_are_equal(void **state)
{
    static struct fixture f;
    draw(&f, *state);
    const struct shape *s = &f.s;
    for (int64_t i = 0; i < (int64_t)s->T * s->D; i++)
        f.x[i] = i % s->D == i / s->D * 37 % s->D
                     ? kern_bf16_encode(kern_bf16_decode(f.x[i]) * 0x1p-4f)
                     : 0;
    for (int32_t e = 0; e < s->E; e++) {
        struct kern_weight *w = &f.w[HOST][1][e];
        own(w);
        uint8_t *data = (uint8_t *)(uintptr_t)w->data, *scale = (uint8_t *)(uintptr_t)w->scale;
        memset(data, 0, (size_t)(w->n * w->row_bytes));
        for (int32_t i = 0; i < w->n; i++) {
            const int32_t c = (int32_t)next() % w->k;
            const uint8_t code = (uint8_t)next();
            if (s->fmt == KERN_W_FP8)
                data[i * w->row_bytes + c] = (code & 127) == 127 ? 1 : code;
            else
                data[i * w->row_bytes + c / 2] = (uint8_t)(c % 2 ? code << 4 : code & 15);
        }
        for (int64_t i = 0;
             i < (s->fmt == KERN_W_FP8 ? (w->n + 127) / 128 : w->n) * w->scale_row_bytes; i++)
            scale[i] = (uint8_t)(s->fmt == KERN_W_FP8 ? 118 + next() % 8 : 90 + next() % 50);
        for (int i = 0; i < 3; i += 2) own(&f.w[HOST][i][e]), level(s, &f.w[HOST][i][e]);
    }
    place(&f, DEVICE), place(&f, WIDENED);
    const int64_t n = (int64_t)s->T * s->D;
    assert_true(equal_kinds(&f, "exact sums") < n * 9 / 10);
    for (int32_t t = 0; t < s->T; t++) {
        uint16_t *x = f.x + (int64_t)t * s->D;
        x[0] = kern_bf16_encode(ldexpf(1.0f + 0.1f * normal(), t % 24 - 4));
        if (t % 50 == 7) x[5] = 0x7fc0;
        if (t % 50 == 9) memset(x, 0, (size_t)s->D * 2);
    }
    assert_true(equal_kinds(&f, "beside large numbers") < n * 9 / 10);
    for (int32_t e = 0; e < s->E; e++)
        for (int i = 0; i < 3; i++) disown(&f.w[HOST][i][e]);
    unplace(&f, DEVICE), unplace(&f, WIDENED);
    tear_down(&f);
}

/* A row with an infinite number changes no other. */
static void test_moe__infinite_rows_stay_alone(void **state)
{
    static struct fixture f;
    set_up(&f, *state);
    const int64_t D = f.s.D;
    float *before = run(&f, DEVICE, 0, f.s.T);
    for (int32_t t = 3; t < f.s.T; t += 7) f.x[t * D + t % D] = t % 2 ? 0x7f80 : 0xff80;
    float *after = run(&f, DEVICE, 0, f.s.T), *again = run(&f, DEVICE, 0, f.s.T);
    assert_memory_equal(after, again, (size_t)(f.s.T * D) * 4);
    for (int32_t t = 0; t < f.s.T; t++)
        if (t < 3 || (t - 3) % 7) assert_memory_equal(after + t * D, before + t * D, (size_t)D * 4);
    free(before), free(after), free(again);
    unplace(&f, DEVICE);
    tear_down(&f);
}

#ifdef TOW_CUDA
/* Tiles of every size and width, and more than one of an expert's. */
static const struct shape wide_shapes[] = {
    {"mxfp4 many", KERN_W_MXFP4, KERN_AQ_A128, 64, 6, 4096, 2048, 1700, false, false, 0},
    {"mxfp4 skewed", KERN_W_MXFP4, KERN_AQ_A128, 256, 6, 4096, 2048, 2500, true, false, 0},
    {"mxfp4 few experts", KERN_W_MXFP4, KERN_AQ_NONE, 5, 2, 4096, 2048, 1000, false, false, 0},
    {"mxfp4 small tiles", KERN_W_MXFP4, KERN_AQ_A128, 32, 4, 1024, 512, 300, true, false, 0},
    {"mxfp4 broad", KERN_W_MXFP4, KERN_AQ_A128, 8, 2, 7168, 3072, 250, false, false, 0},
    {"nvfp4", KERN_W_NVFP4, KERN_AQ_A128, 32, 6, 4096, 2048, 700, false, false, 0},
    {"mxfp4 fewer", KERN_W_MXFP4, KERN_AQ_A128, 256, 6, 4096, 2048, 500, true, false, 0},
    {"mxfp4 a handful", KERN_W_MXFP4, KERN_AQ_A128, 64, 4, 7168, 3072, 90, false, false, 0},
    {"nvfp4 fewer", KERN_W_NVFP4, KERN_AQ_NONE, 16, 2, 1280, 768, 120, true, false, 0},
    {"nvfp4 parts of tiles", KERN_W_NVFP4, KERN_AQ_NONE, 8, 2, 1280, 768, 250, true, false, 0},
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
    float *want = run(&f, DEVICE, 0, f.s.T);
    cuda_wide_experts = 1;
    float *got = run(&f, DEVICE, 0, f.s.T), *again = run(&f, DEVICE, 0, f.s.T);
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
    unplace(&f, DEVICE);
    tear_down(&f);
}
#endif

/* All experts of a layer. [0] host, [1] device. */
struct layer {
    struct fixture f;
    struct kern_weight gate[2], s1[2], s2[2], s3[2];
    float *bias;
};

/* A weight of its own memory, on both devices; fp8 codes without NaN, or bf16 numbers. */
static void dense(struct kern_weight w[2], enum kern_wfmt fmt, int32_t n, int32_t k)
{
    struct tow_err err = {0};
    const bool fp8 = fmt == KERN_W_FP8;
    const int64_t row = fp8 ? k : 2 * k, scales = fp8 ? (k + 127) / 128 : 0;
    const int64_t codes = n * row, all = codes + (n + 127) / 128 * scales;
    uint8_t *p = malloc((size_t)all);
    assert_non_null(p);
    for (int64_t i = 0; i < codes; i += fp8 ? 1 : 2) {
        const uint16_t h = kern_bf16_encode(normal() * 0.02f);
        uint8_t c = (uint8_t)next();
        if ((c & 127) == 127) c ^= 1;
        if (fp8)
            p[i] = c;
        else
            memcpy(p + i, &h, 2);
    }
    for (int64_t i = codes; i < all; i++) p[i] = (uint8_t)(114 + next() % 4);
    w[0] = (struct kern_weight){.data = p,
                                .scale = fp8 ? p + codes : NULL,
                                .fmt = fmt,
                                .sfmt = fp8 ? KERN_S_UE8M0 : KERN_S_NONE,
                                .n = n,
                                .k = k,
                                .row_bytes = row,
                                .scale_row_bytes = scales,
                                .scale2 = 1};
    w[1] = w[0];
    if (kern_dev_place(gpu, &w[1], 1, &err) < 0) fail_msg("%s", err.msg);
}
static void dense_free(struct kern_weight w[2])
{
    kern_dev_unplace(gpu, w[1].data);
    free((void *)(uintptr_t)w[0].data);
}

/* What the op leaves of rows t .. t+n-1; zeros where there are fewer. */
enum { LAYER_ROWS = 150 };
struct made {
    int32_t experts[LAYER_ROWS * 6];
    float weights[LAYER_ROWS * 6], routed[LAYER_ROWS * 4096];
    uint16_t shared[LAYER_ROWS * 4096];
};
static void make(struct layer *l, bool at_once, int32_t t, int32_t n, struct made *out)
{
    const struct shape *s = &l->f.s;
    const struct kern_ops *ops = kern_dev_ops(gpu);
    struct kern_stream *st = kern_dev_stream(gpu);
    const size_t list = (size_t)n * (size_t)s->k * 4, row = (size_t)n * (size_t)s->D,
                 inner = (size_t)n * (size_t)s->I * 2;
    void *x = kern_dev_alloc(gpu, row * 2), *e = kern_dev_alloc(gpu, list),
         *w = kern_dev_alloc(gpu, list), *routed = kern_dev_alloc(gpu, row * 4),
         *shared = kern_dev_alloc(gpu, row * 2), *g = kern_dev_alloc(gpu, inner),
         *u = kern_dev_alloc(gpu, inner), *z = kern_dev_alloc(gpu, (size_t)(n * s->E) * 4),
         *bias = kern_dev_alloc(gpu, (size_t)s->E * 4);
    assert_true(x && e && w && routed && shared && g && u && z && bias);
    memset(out, 0, sizeof *out);
    assert_int_equal(kern_stream_write(st, x, l->f.x + (int64_t)t * s->D, row * 2), 0);
    assert_int_equal(kern_stream_write(st, bias, l->bias, (size_t)s->E * 4), 0);
    const struct kern_linear in = {.x = x,
                                   .ld_x = s->D,
                                   .T = n,
                                   .K = s->D,
                                   .groups = 1,
                                   .x_dtype = KERN_BF16,
                                   .y_dtype = KERN_BF16,
                                   .aq = KERN_AQ_A128};
    struct kern_ffn p = {.gate = in,
                         .route = {.logits = z,
                                   .bias = bias,
                                   .T = n,
                                   .E = s->E,
                                   .k = s->k,
                                   .scale = 1.5f,
                                   .normalize = true,
                                   .experts = e,
                                   .weights = w},
                         .moe = {x, e, w, l->f.w[1][0], l->f.w[1][1], l->f.w[1][2], routed, n, s->D,
                                 s->I, s->E, s->k, 10, KERN_AQ_A128, KERN_BF16},
                         .w1 = in,
                         .w3 = in,
                         .swiglu = {g, u, g, n, s->I, 10, KERN_BF16},
                         .w2 = in};
    p.gate.w = l->gate[1], p.gate.y = z, p.gate.N = s->E, p.gate.ld_y = s->E;
    p.gate.y_dtype = KERN_F32, p.gate.aq = KERN_AQ_NONE;
    p.w1.w = l->s1[1], p.w1.y = g, p.w1.N = s->I, p.w1.ld_y = s->I;
    p.w3.w = l->s3[1], p.w3.y = u, p.w3.N = s->I, p.w3.ld_y = s->I;
    p.w2.w = l->s2[1], p.w2.x = g, p.w2.y = shared, p.w2.K = s->I, p.w2.N = s->D;
    p.w2.ld_x = s->I, p.w2.ld_y = s->D;
    if (at_once) {
        assert_int_equal(ops->ffn(st, &p), 0);
    } else {
        assert_int_equal(ops->linear(st, &p.gate), 0);
        assert_int_equal(ops->route(st, &p.route), 0);
        assert_int_equal(ops->moe(st, &p.moe), 0);
        assert_int_equal(ops->linear(st, &p.w1), 0);
        assert_int_equal(ops->linear(st, &p.w3), 0);
        assert_int_equal(ops->swiglu(st, &p.swiglu), 0);
        assert_int_equal(ops->linear(st, &p.w2), 0);
    }
    assert_int_equal(kern_stream_read(st, out->experts, e, list), 0);
    assert_int_equal(kern_stream_read(st, out->weights, w, list), 0);
    assert_int_equal(kern_stream_read(st, out->routed, routed, row * 4), 0);
    assert_int_equal(kern_stream_read(st, out->shared, shared, row * 2), 0);
    void *all[] = {x, e, w, routed, shared, g, u, z, bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) kern_dev_free(gpu, all[i]);
}

static int differing(const void *a, const void *b, size_t n, size_t elem)
{
    int differ = 0;
    for (size_t i = 0; i < n; i++)
        differ += memcmp((const uint8_t *)a + i * elem, (const uint8_t *)b + i * elem, elem) != 0;
    return differ;
}
static void test_ffn__has_the_bits_of_its_ops(void **state)
{
    static struct layer l;
    static struct made once, apart, again;
    int bad = 0;
    set_up(&l.f, *state);
    const struct shape *s = &l.f.s;
    dense(l.gate, KERN_W_BF16, s->E, s->D);
    dense(l.s1, KERN_W_FP8, s->I, s->D), dense(l.s3, KERN_W_FP8, s->I, s->D);
    dense(l.s2, KERN_W_FP8, s->D, s->I);
    l.bias = malloc((size_t)s->E * sizeof *l.bias);
    assert_non_null(l.bias);
    for (int32_t i = 0; i < s->E; i++) l.bias[i] = 0.1f * normal();
    kern_dev_fp8_products(gpu, s->codes);
    static const int32_t pieces[] = {1, 2, 3, 4, 5, 70, LAYER_ROWS};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        for (int32_t n = pieces[i], t = 0; t + n <= s->T && n > s->T / 3 - 3; t += n) {
            make(&l, true, t, n, &once);
            make(&l, false, t, n, &apart);
            make(&l, true, t, n, &again);
            const size_t list = (size_t)(n * s->k), row = (size_t)(n * s->D);
            const int d[] = {differing(once.experts, apart.experts, list, 4),
                             differing(once.weights, apart.weights, list, 4),
                             differing(once.routed, apart.routed, row, 4),
                             differing(once.shared, apart.shared, row, 2),
                             differing(&once, &again, sizeof once, 1)};
            if (!d[0] && !d[1] && !d[2] && !d[3] && !d[4]) continue;
            bad++;
            print_message("%s, rows %d to %d: of %d experts %d differ, weights %d, of %d sums %d, "
                          "of the shared expert %d; two runs: %d bytes\n",
                          s->name, t, t + n - 1, (int)list, d[0], d[1], (int)row, d[2], d[3], d[4]);
        }
    assert_int_equal(bad, 0);
    dense_free(l.gate), dense_free(l.s1), dense_free(l.s2), dense_free(l.s3);
    free(l.bias);
    tear_down(&l.f);
}

int main(int argc, char **argv)
{
    static const struct shape layer_shapes[] = {
        {"layer", KERN_W_MXFP4, KERN_AQ_A128, 40, 6, 4096, 2048, 8, false, false, 0},
        {"layer of other widths", KERN_W_MXFP4, KERN_AQ_A128, 17, 3, 1280, 768, 8, false, false, 0},
        {"layer of a chunk", KERN_W_MXFP4, KERN_AQ_A128, 17, 3, 1024, 512, LAYER_ROWS, false, false,
         0},
        {"layer by codes", KERN_W_MXFP4, KERN_AQ_A128, 17, 3, 1024, 512, LAYER_ROWS, false, true,
         0},
    };
    enum { N_LAYERS = sizeof layer_shapes / sizeof *layer_shapes };
    static const struct shape shapes[] = {
        {"mxfp4", KERN_W_MXFP4, KERN_AQ_A128, 256, 6, 4096, 2048, 1000, false, false, 0},
        {"mxfp4 skewed", KERN_W_MXFP4, KERN_AQ_A128, 256, 6, 4096, 2048, 2500, true, false, 0},
        {"mxfp4 few experts", KERN_W_MXFP4, KERN_AQ_NONE, 5, 2, 4096, 2048, 1000, false, false, 0},
        {"nvfp4", KERN_W_NVFP4, KERN_AQ_A128, 32, 6, 4096, 2048, 700, false, false, 0},
        {"nvfp4 w4a4", KERN_W_NVFP4, KERN_AQ_NVFP4, 32, 6, 4096, 2048, 300, true, false, 0},
        {"fp8", KERN_W_FP8, KERN_AQ_A128, 16, 4, 4096, 2048, 300, true, false, 0},
        {"bf16", KERN_W_BF16, KERN_AQ_NONE, 16, 4, 2048, 1024, 300, true, false, 0},
        {"mxfp4 odd width", KERN_W_MXFP4, KERN_AQ_A128, 8, 2, 7168, 3040, 250, false, false, 0},
    };
    static const struct shape code_shapes[] = {
        {"mxfp4 by codes", KERN_W_MXFP4, KERN_AQ_A128, 64, 6, 4096, 2048, 2900, false, true, 0},
        {"mxfp4 by codes, skewed", KERN_W_MXFP4, KERN_AQ_A128, 64, 6, 4096, 2048, 500, true, true,
         0},
        {"mxfp4 by codes, hot", KERN_W_MXFP4, KERN_AQ_A128, 4, 2, 1024, 512, 1200, false, true, 11},
        {"fp8 by codes", KERN_W_FP8, KERN_AQ_A128, 16, 4, 4096, 2048, 900, true, true, 0},
        {"mxfp4 by codes, uneven", KERN_W_MXFP4, KERN_AQ_A128, 8, 2, 4096, 2048, 500, false, true,
         -7},
        {"fp8 by codes, uneven", KERN_W_FP8, KERN_AQ_A128, 8, 2, 4096, 2048, 500, false, true, -7},
    };
    static const struct shape pairs[] = {
        {"mxfp4 few pairs", KERN_W_MXFP4, KERN_AQ_A128, 8, 2, 1024, 512, 40, false, true, 0},
        {"mxfp4 many pairs", KERN_W_MXFP4, KERN_AQ_A128, 4, 2, 1024, 512, 300, true, true, 11},
        {"mxfp4 wide scales", KERN_W_MXFP4, KERN_AQ_A128, 4, 2, 1024, 512, 70, false, true, 12},
        {"fp8 few pairs", KERN_W_FP8, KERN_AQ_A128, 8, 2, 1024, 512, 40, false, true, 0},
        {"fp8 many pairs", KERN_W_FP8, KERN_AQ_A128, 4, 2, 1024, 512, 300, true, true, 0},
    };
    static const struct shape numbers[] = {
        {"mxfp4 numbers", KERN_W_MXFP4, KERN_AQ_A128, 64, 1, 1024, 512, 600, false, true, 0},
        {"mxfp4 numbers, deep", KERN_W_MXFP4, KERN_AQ_A128, 32, 1, 4096, 2048, 100, false, true, 0},
        {"fp8 numbers", KERN_W_FP8, KERN_AQ_A128, 64, 1, 1024, 512, 600, false, true, 0},
        /* Tiles of every number of pairs; of fp8 also an odd number of rows of them. */
        {"mxfp4 tiles", KERN_W_MXFP4, KERN_AQ_A128, 2, 1, 1024, 512, 600, false, true, 0},
        {"fp8 tiles", KERN_W_FP8, KERN_AQ_A128, 2, 1, 1152, 384, 600, false, true, 0},
    };
    enum {
        N = sizeof shapes / sizeof *shapes,
        N_CODES = sizeof code_shapes / sizeof *code_shapes,
        N_BOTH = sizeof pairs / sizeof *pairs,
        N_NUMBERS = sizeof numbers / sizeof *numbers
    };
    struct CMUnitTest tests[N + N_CODES + 3 * N_BOTH + N_NUMBERS + N_LAYERS + 16];
    struct tow_err err = {0};
    if (kern_dev_open(&gpu, test_cuda_device(), 1, &err) < 0) return test_no_device(&err);
    if (kern_dev_open(&cpu, "cpu", 0, &err) < 0) return 1;
    for (int i = 0; i < N; i++)
        tests[i] =
            (struct CMUnitTest){shapes[i].name, test_moe__rows_are_near_the_cpus_in_any_batch, NULL,
                                NULL, (void *)(uintptr_t)&shapes[i]};
    int n = N;
    const bool codes = strcmp(kern_dev_isa(gpu), "sm_90") == 0;
    for (int i = 0; i < N_LAYERS; i++)
        tests[n++] = (struct CMUnitTest){layer_shapes[i].name, test_ffn__has_the_bits_of_its_ops,
                                         NULL, NULL, (void *)(uintptr_t)&layer_shapes[i]};
    for (int i = 0; i < N_CODES && codes; i++)
        tests[n++] =
            (struct CMUnitTest){code_shapes[i].name, test_moe__rows_are_near_the_cpus_in_any_batch,
                                NULL, NULL, (void *)(uintptr_t)&code_shapes[i]};
    for (int i = 0; i < N_NUMBERS && codes; i++)
        tests[n++] = (struct CMUnitTest){numbers[i].name,
                                         test_moe__every_number_of_pairs_gives_the_same_bits, NULL,
                                         NULL, (void *)(uintptr_t)&numbers[i]};
    for (int i = 0; i < 3 * N_BOTH && codes; i++)
        tests[n++] = (struct CMUnitTest){pairs[i / 3].name,
                                         i % 3 == 0   ? test_moe__codes_are_near_widened
                                         : i % 3 == 1 ? test_moe__exact_sums_are_equal
                                                      : test_moe__infinite_rows_stay_alone,
                                         NULL, NULL, (void *)(uintptr_t)&pairs[i / 3]};
#ifdef TOW_CUDA
    for (int i = 0; i < N_WIDE && codes; i++)
        tests[n++] =
            (struct CMUnitTest){wide_shapes[i].name, test_moe__wide_rows_have_the_same_bits, NULL,
                                NULL, (void *)(uintptr_t)&wide_shapes[i]};
#endif
    test_choose(argc, argv, tests, (size_t)n);
    int rc = _cmocka_run_group_tests("gpu/moe", tests, (size_t)n, NULL, NULL);
    kern_dev_close(cpu);
    kern_dev_close(gpu);
    return rc;
}
