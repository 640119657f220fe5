/* kernels/numeric.h - scalar conversions between number formats, and the quantizers built on them.
 *
 * Why      Checkpoints, pages and every CPU kernel must agree on each bit of these; they are
 *          written once.
 * Rules    All rounding is to nearest, ties to even. e4m3 and e2m1 saturate; NaN stays NaN in e4m3
 *          and becomes the largest magnitude in e2m1, which has no NaN. Vector code elsewhere gives
 *          the same bits.
 */
#ifndef KERN_NUMERIC_H
#define KERN_NUMERIC_H

#include <stdint.h>
#include <string.h>

/* nvcc makes them for the device too. */
#ifdef __CUDACC__
#define KERN_FN static inline __host__ __device__ __attribute__((unused))
#else
#define KERN_FN static inline
#endif

KERN_FN uint32_t kern_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
KERN_FN float kern_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* --- bf16 */
KERN_FN float kern_bf16_decode(uint16_t b)
{
    return kern_float((uint32_t)b << 16);
}
KERN_FN uint16_t kern_bf16_encode(float x)
{
    uint32_t u = kern_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
KERN_FN float kern_bf16_round(float x)
{
    return kern_bf16_decode(kern_bf16_encode(x));
}

/* --- e4m3: 1-4-3, bias 7, no infinity, 0x7f and 0xff are NaN */
extern const float kern_e4m3_value[256];
static inline float kern_e4m3_decode(uint8_t c)
{
    return kern_e4m3_value[c];
}
KERN_FN uint8_t kern_e4m3_encode(float x)
{
    uint32_t u = kern_bits(x), sign = (u >> 24) & 0x80u;
    float a = kern_float(u & 0x7fffffffu);
    if (a != a) return (uint8_t)(sign | 0x7fu);
    if (a > 448.0f) a = 448.0f;
    if (a < 0x1p-6f) /* adding 2^14 leaves steps of 2^-9, the subnormal step, in the low bits */
        return (uint8_t)(sign | (kern_bits(a + 16384.0f) - kern_bits(16384.0f)));
    uint32_t v = kern_bits(a);
    v += 0x7ffffu + ((v >> 20) & 1u);
    return (uint8_t)(sign | ((v >> 20) - (120u << 3)));
}

/* --- e2m1: 0 0.5 1 1.5 2 3 4 6 and their negatives from code 8 on */
extern const float kern_e2m1_value[16];
static inline float kern_e2m1_decode(uint8_t c)
{
    return kern_e2m1_value[c & 15];
}
KERN_FN uint8_t kern_e2m1_encode(float x)
{
    uint32_t u = kern_bits(x), sign = (u >> 28) & 8u;
    float a = kern_float(u & 0x7fffffffu);
    if (!(a < 6.0f)) a = 6.0f;
    if (a < 1.0f) return (uint8_t)(sign | (kern_bits(a + 4194304.0f) - kern_bits(4194304.0f)));
    uint32_t v = kern_bits(a);
    v += 0x1fffffu + ((v >> 22) & 1u);
    return (uint8_t)(sign | ((v >> 22) - (126u << 1)));
}
/* Nibble i of a packed row; even index in the low half. */
KERN_FN uint8_t kern_nibble(const uint8_t *row, int64_t i)
{
    return (uint8_t)((row[i >> 1] >> ((i & 1) * 4)) & 15);
}

/* --- ue8m0: byte b is 2^(b-127); 255 is NaN */
KERN_FN float kern_ue8m0_decode(uint8_t b)
{
    if (b == 255) return kern_float(0x7fc00000u);
    return kern_float(b ? (uint32_t)b << 23 : 0x400000u);
}
/* 2^(127-b): what a value is multiplied with before it is rounded to the element format. */
KERN_FN float kern_ue8m0_inverse(uint8_t b)
{
    return kern_ue8m0_decode((uint8_t)(254 - b));
}

/* A stored f32 scale. An infinite one is none: what it scales is not a number. */
KERN_FN float kern_f32_scale(float s)
{
    return s - s == 0.0f ? s : kern_float(0x7fc00000u);
}

/* Code of the smallest power of two >= x, for x >= 0: exponent, plus one if any mantissa bit is
 * set. Kept within 0 .. 254, so that an infinite maximum saturates instead of turning a block into
 * NaN. */
KERN_FN uint8_t kern_pow2_ceil_code(float x)
{
    uint32_t u = kern_bits(x);
    uint32_t e = ((u >> 23) & 255u) + ((u & 0x7fffffu) != 0);
    return (uint8_t)(e > 254 ? 254 : e);
}

/* Scale codes from a block's largest magnitude. The product with 1/top is in f32 on purpose. */
#define KERN_E4M3_AMAX_FLOOR 1e-4f
#define KERN_E2M1_AMAX_FLOOR 0x1.8p-124f /* 6 * 2^-126 */
KERN_FN uint8_t kern_e4m3_scale_code(float amax)
{
    return kern_pow2_ceil_code((amax > KERN_E4M3_AMAX_FLOOR ? amax : KERN_E4M3_AMAX_FLOOR) *
                               (1.0f / 448.0f));
}
KERN_FN uint8_t kern_e2m1_scale_code(float amax)
{
    return kern_pow2_ceil_code((amax > KERN_E2M1_AMAX_FLOOR ? amax : KERN_E2M1_AMAX_FLOOR) *
                               (1.0f / 6.0f));
}

/* Largest magnitude of n values; NaN is passed over. */
float kern_amax(const float *x, int64_t n);

/* n values in blocks (the last may be shorter) -> codes and one ue8m0 scale per block. */
void kern_quant_e4m3(const float *x, int64_t n, int32_t block, uint8_t *codes, uint8_t *scales);
/* n even; two codes a byte. */
void kern_quant_e2m1(const float *x, int64_t n, int32_t block, uint8_t *packed, uint8_t *scales);

/* The same, giving the dequantized values; y may be x. */
void kern_roundtrip_e4m3(const float *x, int64_t n, int32_t block, float *y);
void kern_roundtrip_e2m1(const float *x, int64_t n, int32_t block, float *y);

/* NVFP4 activations: per 16, scale = e4m3(amax / 6 / g) * g, value = e2m1(x / scale) * scale. */
void kern_roundtrip_nvfp4(const float *x, int64_t n, float g, float *y);

/* Normalized Walsh-Hadamard transform in natural order, in place; n a power of two. */
void kern_hadamard(float *x, int32_t n);

#endif
