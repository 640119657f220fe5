/* tests/kernels/amx_test.c - products on the matrix unit against their definition, bit for bit.
 *
 * The twin below is the definition in docs/numerics.md in plain C: per 32 values two chains, even
 * and odd, whose sum is added. linear and moe must give its bits for any number of rows, any shape,
 * and odd values.
 */
#include "tests/support/check.h"

#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct kern_dev *amx, *plain;
static uint64_t rng = 1;

static uint32_t below(uint32_t n)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return (uint32_t)((rng * UINT64_C(0x2545f4914f6cdd1d)) >> 33) % n;
}
static uint16_t random_bf16(void)
{
    float x = ((float)below(20001) - 10000.0f) * 1e-4f;
    return kern_bf16_encode(ldexpf(x, (int)below(9) - 4));
}

/* Owned data and scales; odd addresses. */
struct matrix {
    struct kern_weight w;
    uint8_t *data, *scale;
};

static struct matrix matrix_new(enum kern_wfmt fmt, int32_t n, int32_t k, bool f32_scale)
{
    struct matrix m = {.w = {.fmt = fmt, .n = n, .k = k, .scale2 = 1.0f}};
    int64_t row = fmt == KERN_W_BF16 ? 2 * k : fmt == KERN_W_FP8 ? k : k / 2;
    int64_t block = fmt == KERN_W_FP8 ? 128 : fmt == KERN_W_MXFP4 ? 32 : 16;
    int64_t rows = fmt == KERN_W_FP8 ? (n + 127) / 128 : n, cols = (k + block - 1) / block;
    m.w.row_bytes = row + 3;
    m.data = malloc((size_t)(n * m.w.row_bytes + 1));
    for (int64_t i = 0; i < n * m.w.row_bytes + 1; i++) m.data[i] = 0xff; /* NaN in the gaps */
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < row; j++) {
            uint8_t *d = m.data + 1 + i * m.w.row_bytes + j, b = (uint8_t)below(256);
            if (fmt == KERN_W_FP8 && (b & 127) == 127) b ^= 1;
            if (fmt != KERN_W_BF16) {
                *d = b;
            } else if (j % 2 == 0) {
                uint16_t h = random_bf16();
                memcpy(d, &h, 2);
            }
        }
    m.w.data = m.data + 1;
    if (fmt == KERN_W_BF16) return m;
    m.w.sfmt = fmt == KERN_W_NVFP4 ? KERN_S_E4M3 : f32_scale ? KERN_S_F32 : KERN_S_UE8M0;
    m.w.scale_row_bytes = cols * (f32_scale ? 4 : 1);
    m.scale = malloc((size_t)(rows * m.w.scale_row_bytes));
    for (int64_t i = 0; i < rows * cols; i++) {
        float s = 0.01f + (float)below(100) * 0.01f;
        if (f32_scale)
            memcpy(m.scale + 4 * i, &s, 4);
        else
            m.scale[i] = (uint8_t)(fmt == KERN_W_NVFP4 ? 20 + below(60) : 119 + below(8));
    }
    m.w.scale = m.scale;
    if (fmt == KERN_W_NVFP4) m.w.scale2 = 0.03f;
    return m;
}
static void matrix_free(struct matrix *m)
{
    free(m->data);
    free(m->scale);
}

static float weight_at(const struct kern_weight *w, int64_t n, int64_t k)
{
    const uint8_t *d = (const uint8_t *)w->data + n * w->row_bytes;
    const uint8_t *s = (const uint8_t *)w->scale;
    uint16_t h;
    switch (w->fmt) {
    case KERN_W_BF16: memcpy(&h, d + 2 * k, 2); return kern_bf16_decode(h);
    case KERN_W_FP8:
        return kern_e4m3_decode(d[k]) *
               kern_ue8m0_decode(s[n / 128 * w->scale_row_bytes + k / 128]);
    default:
        return kern_e2m1_decode(kern_nibble(d, k)) *
               kern_ue8m0_decode(s[n * w->scale_row_bytes + k / 32]);
    }
}

/* Which value stands at place i: of 128 mxfp4 values each fourth, then the next ones. */
static int64_t place(const struct kern_weight *w, int64_t i)
{
    int64_t run = i / 128 * 128, j = i % 128;
    return w->fmt == KERN_W_MXFP4 ? run + j % 32 * 4 + j / 32 : i;
}

static float twin(const struct kern_weight *w, int64_t n, const float *x)
{
    float sum = 0;
    for (int64_t b = 0; b < (w->k + 127) / 128 * 128; b += 32) {
        float chain[2] = {0, 0};
        for (int64_t i = 0; i < 32; i++) {
            int64_t k = place(w, b + i);
            if (k >= w->k) continue;
            float v = weight_at(w, n, k);
            if (fabsf(v) < 0x1p-126f) v = 0; /* below bf16's normal numbers */
            chain[i % 2] = fmaf(v, x[k], chain[i % 2]);
        }
        sum += chain[0] + chain[1];
    }
    return sum;
}

static bool same(float a, float b)
{
    return memcmp(&a, &b, 4) == 0 || (isnan(a) && isnan(b));
}

static float *quantized_row(const uint16_t *x, int32_t k, enum kern_act_quant aq)
{
    float *row = malloc((size_t)kern_pad16(k) * 4);
    kern_row_load(x, KERN_BF16, k, row);
    kern_row_aq(row, k, aq, 0);
    return row;
}

static uint16_t *random_rows(int64_t n)
{
    uint16_t *x = malloc((size_t)(n ? n : 1) * 2);
    for (int64_t i = 0; i < n; i++) x[i] = random_bf16();
    return x;
}

static void linear_is_twin(const struct matrix *m, int32_t T, int32_t N, int32_t groups,
                           enum kern_act_quant aq)
{
    int32_t K = m->w.k;
    int64_t ld_x = (int64_t)groups * K + 5, ld_y = (int64_t)groups * N + 2;
    uint16_t *x = random_rows(T * ld_x);
    float *y = calloc((size_t)(T * ld_y) + 1, 4);
    struct kern_linear p = {.x = x,
                            .w = m->w,
                            .y = y,
                            .ld_x = ld_x,
                            .ld_y = ld_y,
                            .T = T,
                            .N = N,
                            .K = K,
                            .groups = groups,
                            .x_dtype = KERN_BF16,
                            .y_dtype = KERN_F32,
                            .aq = aq};
    assert_int_equal(kern_cpu.linear(kern_dev_stream(amx), &p), 0);
    for (int64_t t = 0; t < T; t++)
        for (int64_t g = 0; g < groups; g++) {
            float *row = quantized_row(x + t * ld_x + g * K, K, aq);
            for (int64_t n = 0; n < N; n++) {
                float want = twin(&m->w, g * N + n, row), got = y[t * ld_y + g * N + n];
                if (!same(want, got))
                    fail_msg("format %d, T %d N %d K %d groups %d: row %d column %d is %a, not %a",
                             m->w.fmt, T, N, K, groups, (int)t, (int)(g * N + n), (double)got,
                             (double)want);
            }
            free(row);
        }
    free(x);
    free(y);
}

static void test_amx__linear_is_its_twin(void **state)
{
    (void)state;
    static const int32_t Ts[] = {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 65, 300};
    static const int32_t Ns[] = {1, 15, 16, 17, 31, 32, 33, 100, 160};
    static const int32_t Ks[] = {32, 64, 96, 128, 160, 192, 320, 1056};
    static const enum kern_wfmt formats[] = {KERN_W_BF16, KERN_W_FP8, KERN_W_MXFP4};
    for (int f = 0; f < 3; f++)
        for (int i = 0; i < 40; i++) {
            int32_t T = Ts[i % 16], N = Ns[below(9)], K = Ks[below(8)],
                    groups = 1 + (int32_t)below(3);
            if (T > 100 && N > 40) N = 33;
            if (formats[f] != KERN_W_MXFP4 && below(2)) K += (int32_t)below(31);
            struct matrix m = matrix_new(formats[f], groups * N, K, false);
            linear_is_twin(&m, T, N, groups, below(2) ? KERN_AQ_A128 : KERN_AQ_NONE);
            matrix_free(&m);
        }
}

/* Every code, with scales from the middle to both ends of their range. */
static void test_amx__every_code_and_scale(void **state)
{
    (void)state;
    static const uint8_t scales[] = {127, 9, 10,  11,  60,  245, 246, 247,
                                     2,   3, 251, 252, 253, 254, 255};
    for (int f = 0; f < 2; f++)
        for (size_t i = 0; i < sizeof scales; i++) {
            int32_t K = 256, N = 33;
            struct matrix m = matrix_new(f ? KERN_W_MXFP4 : KERN_W_FP8, N, K, false);
            int64_t n_scales = f ? N * K / 32 : 2;
            for (int64_t s = 0; s < n_scales; s++) m.scale[s] = scales[i];
            for (int32_t n = 0; n < N; n++)
                for (int32_t k = 0; k < (f ? K / 2 : K); k++)
                    m.data[1 + n * m.w.row_bytes + k] = (uint8_t)(f                  ? k * 37 + n
                                                                  : (k & 127) == 127 ? 0
                                                                                     : k);
            /* One value of x at a time, so that each weight is seen alone; powers of two keep
             * products normal. */
            for (int32_t at = 0; at < K; at += 1 + (i > 0) * 7) {
                uint16_t x[256] = {0};
                float y[33];
                x[at] = kern_bf16_encode(scales[i] < 60 ? 0x1p90f : 0x1p-30f);
                struct kern_linear p = {.x = x,
                                        .w = m.w,
                                        .y = y,
                                        .ld_x = K,
                                        .ld_y = N,
                                        .T = 1,
                                        .N = N,
                                        .K = K,
                                        .groups = 1,
                                        .x_dtype = KERN_BF16,
                                        .y_dtype = KERN_F32};
                assert_int_equal(kern_cpu.linear(kern_dev_stream(amx), &p), 0);
                float *row = quantized_row(x, K, KERN_AQ_NONE);
                for (int32_t n = 0; n < N; n++) {
                    float want = twin(&m.w, n, row);
                    if (!same(y[n], want))
                        fail_msg("%s scale %d, row %d, k %d: %a, not %a", f ? "mxfp4" : "fp8",
                                 scales[i], n, at, (double)y[n], (double)want);
                }
                free(row);
            }
            matrix_free(&m);
        }
}

static void test_amx__nan_code_spoils_its_own_row_only(void **state)
{
    (void)state;
    for (int32_t T = 1; T <= 40; T += 39) {
        struct matrix m = matrix_new(KERN_W_FP8, 70, 192, false);
        m.data[1 + 37 * m.w.row_bytes + 130] = 0xff;
        linear_is_twin(&m, T, 70, 1, KERN_AQ_A128);
        assert_true(isnan(weight_at(&m.w, 37, 130)));
        matrix_free(&m);
    }
}

/* What does not fit (values that are no bf16 numbers) takes the other way, with the bits of plain
 * C. */
static void test_amx__other_formats_keep_their_order(void **state)
{
    (void)state;
    for (int f = 0; f < 2; f++) {
        struct matrix m = matrix_new(f ? KERN_W_NVFP4 : KERN_W_FP8, 40, 192, f == 0);
        uint16_t *x = random_rows(3 * 192);
        float y[2][120];
        struct kern_linear p = {.x = x,
                                .w = m.w,
                                .ld_x = 192,
                                .ld_y = 40,
                                .T = 3,
                                .N = 40,
                                .K = 192,
                                .groups = 1,
                                .x_dtype = KERN_BF16,
                                .y_dtype = KERN_F32};
        for (int i = 0; i < 2; i++) {
            p.y = y[i];
            assert_int_equal(kern_cpu.linear(kern_dev_stream(i ? amx : plain), &p), 0);
        }
        assert_memory_equal(y[0], y[1], sizeof y[0]);
        free(x);
        matrix_free(&m);
    }
}

static float gate(float g, float u, float limit)
{
    float out[16];
    v_store(out, kern_gate(v_set1(g), v_set1(u), limit));
    return out[0];
}

static void moe_is_twin(enum kern_wfmt fmt, int32_t T, int32_t D, int32_t I, int32_t E, int32_t k)
{
    struct matrix m[3][8];
    struct kern_weight w[3][8];
    for (int32_t e = 0; e < E; e++)
        for (int i = 0; i < 3; i++) {
            m[i][e] = matrix_new(fmt, i == 1 ? D : I, i == 1 ? I : D, false);
            w[i][e] = m[i][e].w;
        }
    uint16_t *x = random_rows((int64_t)T * D);
    int32_t *experts = malloc((size_t)(T * k) * 4);
    float *weights = malloc((size_t)(T * k) * 4), *out = malloc((size_t)T * (size_t)D * 4);
    for (int32_t t = 0; t < T; t++)
        for (int32_t i = 0; i < k; i++) {
            experts[t * k + i] = (t + i * 2) % E; /* distinct */
            weights[t * k + i] = 0.1f + (float)below(100) * 0.01f;
            if (below(20) == 0) experts[t * k + i] = -1;
        }
    struct kern_moe p = {.x = x,
                         .experts = experts,
                         .weights = weights,
                         .w1 = w[0],
                         .w2 = w[1],
                         .w3 = w[2],
                         .out = out,
                         .T = T,
                         .D = D,
                         .I = I,
                         .E = E,
                         .k = k,
                         .limit = 7.0f,
                         .aq = KERN_AQ_A128,
                         .act = KERN_BF16};
    assert_int_equal(kern_cpu.moe(kern_dev_stream(amx), &p), 0);
    for (int32_t t = 0; t < T; t++) {
        float *row = quantized_row(x + (int64_t)t * D, D, KERN_AQ_A128);
        float *y = calloc((size_t)kern_pad16(I), 4), *sum = calloc((size_t)D, 4);
        for (int32_t e = 0; e < E; e++)
            for (int32_t i = 0; i < k; i++) {
                if (experts[t * k + i] != e) continue;
                for (int32_t n = 0; n < I; n++) {
                    float g = kern_bf16_round(twin(&w[0][e], n, row));
                    float u = kern_bf16_round(twin(&w[2][e], n, row));
                    y[n] = kern_bf16_round(gate(g, u, 7.0f) * weights[t * k + i]);
                }
                kern_row_aq(y, I, KERN_AQ_A128, 0);
                for (int32_t n = 0; n < D; n++) sum[n] += kern_bf16_round(twin(&w[1][e], n, y));
            }
        for (int32_t n = 0; n < D; n++)
            if (!same(sum[n], out[(int64_t)t * D + n]))
                fail_msg("format %d, T %d D %d I %d: row %d, column %d", fmt, T, D, I, t, n);
        free(row);
        free(y);
        free(sum);
    }
    free(x);
    free(experts);
    free(weights);
    free(out);
    for (int32_t e = 0; e < E; e++)
        for (int i = 0; i < 3; i++) matrix_free(&m[i][e]);
}

static void test_amx__moe_is_its_twin(void **state)
{
    (void)state;
    static const int32_t Ts[] = {1, 2, 7, 20, 90};
    static const enum kern_wfmt formats[] = {KERN_W_BF16, KERN_W_FP8, KERN_W_MXFP4};
    for (int f = 0; f < 3; f++)
        for (int i = 0; i < 5; i++)
            moe_is_twin(formats[f], Ts[i], 96 + 32 * (i % 3), 64 + 32 * (i % 2), 5, 2);
}

int main(void)
{
    if (kern_cpu_best_isa() < KERN_CPU_AMX) {
        puts("this processor has no matrix unit (AMX)");
        return 77;
    }
    if (kern_dev_open_cpu(&amx, 2, KERN_CPU_AMX, NULL) < 0) return 1;
    if (kern_dev_open_cpu(&plain, 1, KERN_CPU_C, NULL) < 0) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_amx__linear_is_its_twin),
        cmocka_unit_test(test_amx__every_code_and_scale),
        cmocka_unit_test(test_amx__nan_code_spoils_its_own_row_only),
        cmocka_unit_test(test_amx__other_formats_keep_their_order),
        cmocka_unit_test(test_amx__moe_is_its_twin),
    };
    int failed = cmocka_run_group_tests_name("kernels/amx", tests, NULL, NULL);
    kern_dev_close(amx);
    kern_dev_close(plain);
    return failed;
}
