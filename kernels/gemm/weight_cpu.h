/* kernels/gemm/weight_cpu.h - a stored weight row as floats, sixteen at a time.
 *
 * Rules    value = code * scale, exact where the scale is a power of two or an e4m3 number; NVFP4's
 *          second scale is applied to the sums (kern_weight_post).
 *          Every path, panel or register, forms the same values.
 */
#ifndef KERN_GEMM_WEIGHT_CPU_H
#define KERN_GEMM_WEIGHT_CPU_H

#include "kernels/cpu/row.h"
#include "kernels/types.h"

/* Scale of element k of row n, by the weight's block shape. */
V_INLINE float kern_weight_scale(const struct kern_weight *w, int64_t n, int64_t k)
{
    int64_t row = w->fmt == KERN_W_FP8 ? n / 128 : n;
    int64_t col = w->fmt == KERN_W_FP8 ? k / 128 : w->fmt == KERN_W_MXFP4 ? k / 32 : k / 16;
    const uint8_t *s = (const uint8_t *)w->scale + row * w->scale_row_bytes;
    float f;
    switch (w->sfmt) {
    case KERN_S_UE8M0: return kern_ue8m0_decode(s[col]);
    case KERN_S_E4M3: return kern_e4m3_decode(s[col]);
    case KERN_S_F32: memcpy(&f, s + col * 4, 4); return f;
    case KERN_S_NONE: break;
    }
    return 1.0f;
}

/* Can rounding to bf16 change a value of this weight? */
V_INLINE bool kern_weight_rounds(const struct kern_weight *w)
{
    return w->fmt == KERN_W_F32 || w->fmt == KERN_W_NVFP4 || w->sfmt == KERN_S_F32;
}

/* What sums over kern_weight_row's values are multiplied with: NVFP4's second scale is left to the
 * end, where one product does for all and the summed products stay exact. */
V_INLINE float kern_weight_post(const struct kern_weight *w, bool round_bf16)
{
    return w->fmt == KERN_W_NVFP4 && !round_bf16 ? w->scale2 : 1.0f;
}

/* Row n of w as k floats, zero up to the next multiple of 16. */
static inline __attribute__((unused)) void kern_weight_row(const struct kern_weight *w, int64_t n,
                                                           bool round_bf16, float *out)
{
    const uint8_t *d = (const uint8_t *)w->data + n * w->row_bytes;
    int64_t k = w->k, i = 0;
    switch (w->fmt) {
    case KERN_W_F32: memcpy(out, d, (size_t)k * 4); break;
    case KERN_W_BF16:
        for (; i + 16 <= k; i += 16) v_store(out + i, v_load_bf16(d + 2 * i));
        for (; i < k; i++) {
            uint16_t b;
            memcpy(&b, d + 2 * i, 2);
            out[i] = kern_bf16_decode(b);
        }
        break;
    case KERN_W_FP8:
        for (int64_t b = 0; b < k; b += 128) {
            float sc = kern_weight_scale(w, n, b);
            v16 s = v_set1(sc), s2 = v_set1(sc * V_E4M3X2_SCALE), lo, hi;
            int64_t end = k - b < 128 ? k : b + 128;
            v_seen seen = v_seen_none();
            for (i = b; i + 32 <= end; i += 32) {
                v_load_e4m3x2(d + i, &lo, &hi, &seen);
                v_store(out + i, v_mul(lo, s2));
                v_store(out + i + 16, v_mul(hi, s2));
            }
            if (v_seen_nan(seen)) i = b; /* rare: once more, carefully */
            for (; i + 16 <= end; i += 16) v_store(out + i, v_mul(v_load_e4m3(d + i), s));
            for (; i < end; i++) out[i] = kern_e4m3_decode(d[i]) * sc;
        }
        break;
    case KERN_W_MXFP4:
        for (; i < k; i += 32) {
            v16 t = v_mul(v_load(kern_e2m1_value), v_set1(kern_weight_scale(w, n, i)));
            v_store(out + i, v_unmix(v_lookup16_mixed(d + i / 2, t)));
            v_store(out + i + 16, v_unmix(v_lookup16_mixed(d + i / 2 + 8, t)));
        }
        break;
    case KERN_W_NVFP4:
        for (; i < k; i += 16) {
            v16 t = v_mul(v_load(kern_e2m1_value), v_set1(kern_weight_scale(w, n, i)));
            if (round_bf16) t = v_mul(t, v_set1(w->scale2));
            v_store(out + i, v_unmix(v_lookup16_mixed(d + i / 2, t)));
        }
        break;
    }
    for (i = k; i < kern_pad16(k); i++) out[i] = 0.0f;
    /* Rounding changes nothing where the stored value has few bits and a power of two for a
     * scale. */
    if (round_bf16 && kern_weight_rounds(w))
        for (i = 0; i < k; i += 16) v_store(out + i, v_round_bf16(v_load(out + i)));
}

#endif
