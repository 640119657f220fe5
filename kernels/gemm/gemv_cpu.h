/* kernels/gemm/gemv_cpu.h - a few rows times stored weights, converted in registers on the way.
 *
 * Why      Decoding reads every weight once for a handful of rows: the product must run at the speed of memory,
 *          so nothing is written between the checkpoint's bytes and the sums.
 * How      Four weight rows at once against up to four rows of x; the rows after those are fetched ahead. Lanes of
 *          4-bit weights come in mixed order (see vec.h); x is stored in the same order and the sums are put
 *          right at the end, so that each lane adds what it always adds.
 * Numerics The same bits as kern_weight_row and kern_tile.
 */
#ifndef KERN_GEMM_GEMV_CPU_H
#define KERN_GEMM_GEMV_CPU_H

#include "kernels/gemm/weight_cpu.h"

enum { KERN_GEMV_ROWS = 8 }; /* more rows than this are faster through panels */

V_INLINE bool kern_gemv_mixed(const struct kern_weight *w)
{
    return w->fmt == KERN_W_MXFP4 || w->fmt == KERN_W_NVFP4;
}
V_INLINE bool kern_gemv_fits(const struct kern_weight *w, int64_t rows, bool round_bf16)
{
    return rows <= KERN_GEMV_ROWS && !(round_bf16 && kern_weight_rounds(w));
}
/* Puts a padded row of x into the lane order that w wants. */
static inline __attribute__((unused)) void kern_gemv_prepare(const struct kern_weight *w, float *x,
                                                             int64_t n)
{
    if (kern_gemv_mixed(w))
        for (int64_t i = 0; i < n; i += 16) v_store(x + i, v_mix(v_load(x + i)));
}

enum { KERN_GEMV_R = 4, KERN_GEMV_T = 4 };

/* nt rows of x times nr weight rows from row n on; c[t * ld_c + r]. False: a NaN code was met, c is not right. */
V_INLINE bool kern_gemv_fixed(const struct kern_weight *w, int64_t n, const float *const *x,
                              float *c, int64_t ld_c, const enum kern_wfmt fmt, const int nr,
                              const int nt, const bool careful)
{
    v16 acc[KERN_GEMV_R][KERN_GEMV_T];
    const uint8_t *d[KERN_GEMV_R];
    v_seen seen = v_seen_none();
    int64_t k = w->k, ahead = nr * w->row_bytes;
#pragma GCC unroll 4
    for (int r = 0; r < nr; r++) {
        d[r] = (const uint8_t *)w->data + (n + r) * w->row_bytes;
#pragma GCC unroll 4
        for (int t = 0; t < nt; t++) acc[r][t] = v_zero();
    }
#define GEMV_ADD(at, r, wv)                                                                        \
    _Pragma("GCC unroll 4") for (int t = 0; t < nt; t++) acc[r][t] =                               \
        v_fma(v_load(x[t] + (at)), wv, acc[r][t])

    if (fmt == KERN_W_FP8) {
        for (int64_t b = 0; b < k; b += 128) {
            v16 s[KERN_GEMV_R], s2[KERN_GEMV_R];
            int64_t i = b, end = k - b < 128 ? k : b + 128;
#pragma GCC unroll 4
            for (int r = 0; r < nr; r++) {
                s[r] = v_set1(kern_weight_scale(w, n + r, b));
                s2[r] = v_mul(s[r], v_set1(V_E4M3X2_SCALE));
                V_PREFETCH(d[r] + ahead + b);
                V_PREFETCH(d[r] + ahead + b + 64);
            }
            for (; !careful && i + 32 <= end; i += 32)
#pragma GCC unroll 4
                for (int r = 0; r < nr; r++) {
                    v16 lo, hi;
                    v_load_e4m3x2(d[r] + i, &lo, &hi, &seen);
                    lo = v_mul(lo, s2[r]);
                    hi = v_mul(hi, s2[r]);
                    GEMV_ADD(i, r, lo);
                    GEMV_ADD(i + 16, r, hi);
                }
            for (; i + 16 <= end; i += 16)
                for (int r = 0; r < nr; r++) {
                    v16 v = v_mul(v_load_e4m3(d[r] + i), s[r]);
                    GEMV_ADD(i, r, v);
                }
            if (i < end)
                for (int r = 0; r < nr; r++) {
                    float f[16] = {0};
                    for (int64_t j = i; j < end; j++)
                        f[j - i] = kern_e4m3_decode(d[r][j]) * kern_lane0(s[r]);
                    v16 v = v_load(f);
                    GEMV_ADD(i, r, v);
                }
        }
    } else if (fmt == KERN_W_MXFP4 || fmt == KERN_W_NVFP4) {
        const int group = fmt == KERN_W_MXFP4 ? 32 : 16, run = 16 * group;
        const uint8_t *sc[KERN_GEMV_R];
        const v16 table = v_load(kern_e2m1_value);
        for (int r = 0; r < nr; r++)
            sc[r] = (const uint8_t *)w->scale + (n + r) * w->scale_row_bytes;
        for (int64_t b = 0; b < k; b += run) {
            int64_t end = k - b < run ? k : b + run, groups = (end - b) / group;
            float s[KERN_GEMV_R][16]; /* of sixteen groups */
#pragma GCC unroll 4
            for (int r = 0; r < nr; r++) {
                const uint8_t *p = sc[r] + b / group;
                uint8_t t[16] = {0};
                if (groups < 16) {
                    memcpy(t, p, (size_t)groups);
                    p = t;
                }
                v_store(s[r], fmt == KERN_W_MXFP4 ? v_load_ue8m0(p) : v_load_e4m3(p));
                for (int i = 0; i < run / 2; i += 64) V_PREFETCH(d[r] + ahead + b / 2 + i);
            }
            for (int64_t g = 0; g < groups; g++)
#pragma GCC unroll 4
                for (int r = 0; r < nr; r++) {
                    int64_t i = b + g * group;
                    v16 tab = v_mul(table, v_set1(s[r][g]));
                    v16 v = v_lookup16_mixed(d[r] + i / 2, tab);
                    GEMV_ADD(i, r, v);
                    if (fmt == KERN_W_NVFP4) continue;
                    v = v_lookup16_mixed(d[r] + i / 2 + 8, tab);
                    GEMV_ADD(i + 16, r, v);
                }
        }
    } else {
        const int bytes = fmt == KERN_W_F32 ? 4 : 2;
        int64_t i = 0;
        for (; i + 32 <= k; i += 32)
#pragma GCC unroll 4
            for (int r = 0; r < nr; r++) {
                const uint8_t *p = d[r] + i * bytes;
                v16 lo, hi;
                V_PREFETCH(p + ahead);
                if (fmt == KERN_W_F32) {
                    V_PREFETCH(p + ahead + 64);
                    lo = v_load((const float *)p), hi = v_load((const float *)(p + 64));
                } else {
                    lo = v_load_bf16(p), hi = v_load_bf16(p + 32);
                }
                GEMV_ADD(i, r, lo);
                GEMV_ADD(i + 16, r, hi);
            }
        for (; i < k; i += 16)
            for (int r = 0; r < nr; r++) {
                float f[16] = {0};
                for (int64_t j = i; j < k && j < i + 16; j++) {
                    uint16_t h;
                    if (fmt == KERN_W_F32)
                        memcpy(&f[j - i], d[r] + j * 4, 4);
                    else
                        memcpy(&h, d[r] + j * 2, 2), f[j - i] = kern_bf16_decode(h);
                }
                v16 v = v_load(f);
                GEMV_ADD(i, r, v);
            }
    }
#undef GEMV_ADD
    if (v_seen_nan(seen)) return false;
    bool mixed = fmt == KERN_W_MXFP4 || fmt == KERN_W_NVFP4;
#pragma GCC unroll 4
    for (int t = 0; t < nt; t++)
#pragma GCC unroll 4
        for (int r = 0; r < nr; r++)
            c[t * ld_c + r] =
                v_sum(mixed ? v_unmix(acc[r][t]) : acc[r][t]) * kern_weight_post(w, false);
    return true;
}

/* One format and number of x rows; blocks of four weight rows, then single ones. */
V_INLINE void kern_gemv_rows(const struct kern_weight *w, int64_t n, int64_t nb,
                             const float *const *x, float *c, int64_t ld_c,
                             const enum kern_wfmt fmt, const int nt)
{
    int64_t r = 0;
    for (; r + KERN_GEMV_R <= nb; r += KERN_GEMV_R)
        if (!kern_gemv_fixed(w, n + r, x, c + r, ld_c, fmt, KERN_GEMV_R, nt, false)) break;
    for (; r < nb; r++) kern_gemv_fixed(w, n + r, x, c + r, ld_c, fmt, 1, nt, true);
}

#define KERN_GEMV_FMT(name, fmt)                                                                   \
    static __attribute__((noinline, unused)) void kern_gemv_##name(                                \
        const struct kern_weight *w, int64_t n, int64_t nb, const float *const *x, int64_t nt,     \
        float *c, int64_t ld_c)                                                                    \
    {                                                                                              \
        for (; nt >= 4; nt -= 4, x += 4, c += 4 * ld_c)                                            \
            kern_gemv_rows(w, n, nb, x, c, ld_c, fmt, 4);                                          \
        if (nt == 3) kern_gemv_rows(w, n, nb, x, c, ld_c, fmt, 3);                                 \
        if (nt == 2) kern_gemv_rows(w, n, nb, x, c, ld_c, fmt, 2);                                 \
        if (nt == 1) kern_gemv_rows(w, n, nb, x, c, ld_c, fmt, 1);                                 \
    }
KERN_GEMV_FMT(f32, KERN_W_F32)
KERN_GEMV_FMT(bf16, KERN_W_BF16)
KERN_GEMV_FMT(fp8, KERN_W_FP8)
KERN_GEMV_FMT(mxfp4, KERN_W_MXFP4)
KERN_GEMV_FMT(nvfp4, KERN_W_NVFP4)

/* c[t][r] = x[t] . row n+r of w, for nt prepared rows of x and nb weight rows. */
static inline __attribute__((unused)) void kern_gemv(const struct kern_weight *w, int64_t n,
                                                     int64_t nb, const float *const *x, int64_t nt,
                                                     float *c, int64_t ld_c)
{
    switch (w->fmt) {
    case KERN_W_F32: kern_gemv_f32(w, n, nb, x, nt, c, ld_c); break;
    case KERN_W_BF16: kern_gemv_bf16(w, n, nb, x, nt, c, ld_c); break;
    case KERN_W_FP8: kern_gemv_fp8(w, n, nb, x, nt, c, ld_c); break;
    case KERN_W_MXFP4: kern_gemv_mxfp4(w, n, nb, x, nt, c, ld_c); break;
    case KERN_W_NVFP4: kern_gemv_nvfp4(w, n, nb, x, nt, c, ld_c); break;
    }
}

#endif
