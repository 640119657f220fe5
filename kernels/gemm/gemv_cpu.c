/* kernels/gemm/gemv_cpu.c - the decode product.
 *
 * Several weight rows at once against several rows of x; the rows after those are fetched ahead.
 * Each lane of a 4-bit row adds its elements in mixed order; the sums are put right at the end, so
 * that each adds what it always adds. fp8 codes are converted through f16, whose subnormals cost
 * nothing; a NaN code, which that path does not show, is noticed at the end of the row and the row
 * done again with care.
 */
#include "kernels/gemm/gemv_cpu.h"

/* Weight rows and rows of x at once: their sums fill the registers. */
#if KERN_ISA_AVX512
enum { R = 4, T = 4 };
#elif KERN_ISA_AVX2
enum { R = 2, T = 2 };
#else
enum { R = 1, T = 1 };
#endif

/* nt rows of x times nr weight rows from row n on; c[t * ld_c + r].
 * False: a NaN code was met, c is not right. */
V_INLINE bool rows_times(const struct kern_weight *w, int64_t n, const float *const *x, float *c,
                         int64_t ld_c, const enum kern_wfmt fmt, const int nr, const int nt,
                         const bool careful)
{
    v16 acc[R][T];
    const uint8_t *d[R];
    v_seen seen = v_seen_none();
    int64_t k = w->k, ahead = 2 * nr * w->row_bytes;
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
            v16 s[R], s2[R];
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
        const uint8_t *sc[R];
        const v16 table = v_load(kern_e2m1_value);
        for (int r = 0; r < nr; r++)
            sc[r] = (const uint8_t *)w->scale + (n + r) * w->scale_row_bytes;
        for (int64_t b = 0; b < k; b += run) {
            int64_t end = k - b < run ? k : b + run, groups = (end - b) / group;
            float s[R][16]; /* of sixteen groups */
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

/* One format. Whole blocks of R weight rows, then, as after a NaN code, single ones. */
V_INLINE void times(const struct kern_weight *w, int64_t n, int64_t nb, const float *const *x,
                    int64_t nt, float *c, int64_t ld_c, const enum kern_wfmt fmt)
{
    int64_t r = 0;
    for (; r + R <= nb; r += R) {
        bool fine = true;
        int64_t t = 0;
        for (; fine && t + T <= nt; t += T)
            fine = rows_times(w, n + r, x + t, c + t * ld_c + r, ld_c, fmt, R, T, false);
#if KERN_ISA_AVX512
        if (fine && nt - t == 3)
            fine = rows_times(w, n + r, x + t, c + t * ld_c + r, ld_c, fmt, R, 3, false);
        if (fine && nt - t == 2)
            fine = rows_times(w, n + r, x + t, c + t * ld_c + r, ld_c, fmt, R, 2, false);
#endif
        if (T > 1 && fine && nt - t == 1)
            fine = rows_times(w, n + r, x + t, c + t * ld_c + r, ld_c, fmt, R, 1, false);
        if (!fine) break;
    }
    for (; r < nb; r++)
        for (int64_t t = 0; t < nt; t++)
            rows_times(w, n + r, x + t, c + t * ld_c + r, ld_c, fmt, 1, 1, true);
}

void KERN_ISA(kern_gemv)(const struct kern_weight *w, int64_t n, int64_t nb, const float *const *x,
                         int64_t nt, float *c, int64_t ld_c)
{
    switch (w->fmt) {
    case KERN_W_F32: times(w, n, nb, x, nt, c, ld_c, KERN_W_F32); break;
    case KERN_W_BF16: times(w, n, nb, x, nt, c, ld_c, KERN_W_BF16); break;
    case KERN_W_FP8: times(w, n, nb, x, nt, c, ld_c, KERN_W_FP8); break;
    case KERN_W_MXFP4: times(w, n, nb, x, nt, c, ld_c, KERN_W_MXFP4); break;
    case KERN_W_NVFP4: times(w, n, nb, x, nt, c, ld_c, KERN_W_NVFP4); break;
    }
}
