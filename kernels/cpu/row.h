/* kernels/cpu/row.h - rows of activations to and from f32, and the small row operations ops share.
 *
 * Rules    A row buffer is as long as its row rounded up to 16; the rest is zero, so loops take
 *          whole vectors.
 */
#ifndef KERN_CPU_ROW_H
#define KERN_CPU_ROW_H

#include "kernels/cpu/math.h"
#include "kernels/types.h"

V_INLINE int64_t kern_pad16(int64_t n)
{
    return (n + 15) & ~(int64_t)15;
}

/* Distance of float rows that a tile reads side by side: rows a power of two apart fall into the
 * same few sets of the first-level cache and push each other out; 2112 bytes more spreads them
 * evenly over its 4096. */
V_INLINE int64_t kern_row_ld(int64_t padded)
{
    return padded < 512 ? padded + 16 : padded + ((528 - padded) & 1023);
}

/* Element i of an activation tensor. */
V_INLINE const void *kern_at(const void *x, int64_t i, enum kern_dtype t)
{
    return (const uint8_t *)x + i * kern_dtype_bytes(t);
}
V_INLINE void *kern_at_mut(void *x, int64_t i, enum kern_dtype t)
{
    return (uint8_t *)x + i * kern_dtype_bytes(t);
}

static inline __attribute__((unused)) void kern_row_load(const void *x, enum kern_dtype t,
                                                         int64_t n, float *out)
{
    int64_t i = 0, whole = n & ~(int64_t)15;
    if (t == KERN_F32) {
        memcpy(out, x, (size_t)n * 4);
        i = n;
    } else {
        for (; i < whole; i += 16) v_store(out + i, v_load_bf16((const uint16_t *)x + i));
        for (; i < n; i++) out[i] = kern_bf16_decode(((const uint16_t *)x)[i]);
    }
    for (; i < kern_pad16(n); i++) out[i] = 0.0f;
}

/* The rounding point: F32 keeps the value. */
static inline __attribute__((unused)) void kern_row_store(void *y, enum kern_dtype t, int64_t n,
                                                          const float *x)
{
    int64_t i = 0, whole = n & ~(int64_t)15;
    if (t == KERN_F32) {
        memcpy(y, x, (size_t)n * 4);
        return;
    }
    for (; i < whole; i += 16) v_store_bf16((uint16_t *)y + i, v_load(x + i));
    for (; i < n; i++) ((uint16_t *)y)[i] = kern_bf16_encode(x[i]);
}

V_INLINE void kern_row_load1(const void *x, enum kern_dtype t, float *out)
{
    *out = t == KERN_F32 ? *(const float *)x : kern_bf16_decode(*(const uint16_t *)x);
}

V_INLINE float kern_round_act(float x, enum kern_dtype t)
{
    return t == KERN_BF16 ? kern_bf16_round(x) : x;
}
V_INLINE v16 v_round_act(v16 x, enum kern_dtype t)
{
    return t == KERN_BF16 ? v_round_bf16(x) : x;
}

/* Rounds a padded row where it stands. */
static inline __attribute__((unused)) void kern_row_round(float *x, int64_t n, enum kern_dtype t)
{
    if (t == KERN_BF16)
        for (int64_t i = 0; i < n; i += 16) v_store(x + i, v_round_bf16(v_load(x + i)));
}

/* Sum of squares of a padded row: lane j adds elements j, j+16, ... */
static inline __attribute__((unused)) float kern_row_sumsq(const float *x, int64_t n)
{
    v16 s = v_zero();
    for (int64_t i = 0; i < n; i += 16) {
        v16 a = v_load(x + i);
        s = v_fma(a, a, s);
    }
    return v_sum(s);
}

/* Element i of floats that lie in a mapped checkpoint, at any address. */
V_INLINE float kern_f32_at(const float *p, int64_t i)
{
    float f;
    memcpy(&f, (const uint8_t *)p + i * 4, 4);
    return f;
}

/* Element i of a norm weight. */
V_INLINE float kern_vec_at(const struct kern_vec *w, int64_t i)
{
    if (w->dtype == KERN_F32) {
        float f;
        memcpy(&f, (const uint8_t *)w->data + i * 4, 4);
        return f;
    }
    uint16_t b;
    memcpy(&b, (const uint8_t *)w->data + i * 2, 2);
    return kern_bf16_decode(b);
}
V_INLINE v16 v_vec_at(const struct kern_vec *w, int64_t i, int n)
{
    if (n == 16)
        return w->dtype == KERN_F32 ? v_load((const float *)w->data + i)
                                    : v_load_bf16((const uint16_t *)w->data + i);
    float t[16] = {0};
    for (int j = 0; j < n; j++) t[j] = kern_vec_at(w, i + j);
    return v_load(t);
}

/* x = w * (x / rms), unrounded, on a padded row. */
static inline __attribute__((unused)) void kern_row_rmsnorm(float *x, int64_t n, float eps,
                                                            const struct kern_vec *w)
{
    v16 rs = v_set1(1.0f / sqrtf(kern_row_sumsq(x, n) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16) {
        int m = n - i < 16 ? (int)(n - i) : 16;
        v_store(x + i, v_mul(v_vec_at(w, i, m), v_mul(v_load(x + i), rs)));
    }
}

/* Rotates the pairs of the rd values at x. sign -1 turns back. */
V_INLINE void kern_rotate(float *x, const float *cos, const float *sin, int32_t rd, float sign)
{
    for (int32_t i = 0; i < rd / 2; i++) {
        float a = x[2 * i], b = x[2 * i + 1], c = cos[i], s = sign * sin[i];
        x[2 * i] = fmaf(a, c, -(b * s));
        x[2 * i + 1] = fmaf(a, s, b * c);
    }
}

/* Largest magnitude of a padded block. */
V_INLINE float kern_block_amax(const float *x, int64_t n)
{
    v16 m = v_zero();
    for (int64_t i = 0; i < n; i += 16) m = v_max(v_abs(v_load(x + i)), m);
    return v_hmax(m);
}

/* kern_roundtrip_e4m3 and _e2m1 with vectors. x and y padded to 16; block a multiple of 16 or >= n.
 */
static inline __attribute__((unused)) void kern_row_e4m3(const float *x, int64_t n, int64_t block,
                                                         float *y)
{
    for (int64_t b = 0; b < n; b += block) {
        int64_t m = n - b < block ? n - b : block;
        uint8_t c = kern_e4m3_scale_code(kern_block_amax(x + b, m));
        v16 s = v_set1(kern_ue8m0_decode(c)), inv = v_set1(kern_ue8m0_inverse(c));
        for (int64_t i = b; i < b + m; i += 16)
            v_store(y + i, v_mul(v_round_e4m3(v_mul(v_load(x + i), inv)), s));
    }
}
static inline __attribute__((unused)) void kern_row_e2m1(const float *x, int64_t n, int64_t block,
                                                         float *y)
{
    for (int64_t b = 0; b < n; b += block) {
        int64_t m = n - b < block ? n - b : block;
        uint8_t c = kern_e2m1_scale_code(kern_block_amax(x + b, m));
        v16 s = v_set1(kern_ue8m0_decode(c)), inv = v_set1(kern_ue8m0_inverse(c));
        for (int64_t i = b; i < b + m; i += 16)
            v_store(y + i, v_mul(v_round_e2m1(v_mul(v_load(x + i), inv)), s));
    }
}

/* What an activation row undergoes before a product; padded, in place. */
static inline __attribute__((unused)) void kern_row_aq(float *x, int64_t n, enum kern_act_quant aq,
                                                       float input_scale)
{
    if (aq == KERN_AQ_A128) kern_row_e4m3(x, n, 128, x);
    if (aq == KERN_AQ_NVFP4) kern_roundtrip_nvfp4(x, n, input_scale, x);
}

#endif
