/* kernels/attn/widen.cuh - stored codes of keys widened to bf16, exactly.
 *
 * e4m3 and e2m1 codes become bf16 by moving their bits below the exponent's bias and one
 * multiplication by a power of two, which also makes subnormals right. Then the scale, another
 * power of two.
 */
#ifndef KERN_ATTN_WIDEN_CUH
#define KERN_ATTN_WIDEN_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/numeric.cuh"

/* Of four e4m3 codes, the low or the high two: bf16 of their values. NaN is not looked at. */
static __device__ __forceinline__ uint32_t dev_e4m3x2_bf16(uint32_t codes, int high)
{
    const uint32_t x = __byte_perm(codes, 0, high ? 0x3424 : 0x1404);
    const uint32_t y = (x & 0x80008000u) | ((x >> 4) & 0x07f007f0u);
    return dev_mul_bf16x2(y, dev_twice(0x7b80)); /* 2^120 */
}
/* Sixteen e4m3 codes to their values. */
static __device__ __forceinline__ void dev_e4m3x16_bf16(const uint4 &codes, uint4 *lo, uint4 *hi)
{
    const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t r[8], nan = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        nan |= dev_e4m3x4_nan(w[i]);
        r[2 * i] = dev_e4m3x2_bf16(w[i], 0);
        r[2 * i + 1] = dev_e4m3x2_bf16(w[i], 1);
    }
    if (nan) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if ((w[i / 4] >> (i % 4 * 8) & 0x7f) == 0x7f) r[i / 2] |= 0x7fc0u << (i % 2 * 16);
    }
    *lo = make_uint4(r[0], r[1], r[2], r[3]);
    *hi = make_uint4(r[4], r[5], r[6], r[7]);
}
static __device__ __forceinline__ uint4 dev_mul_bf16x8(const uint4 &a, uint32_t scale2)
{
    return make_uint4(dev_mul_bf16x2(a.x, scale2), dev_mul_bf16x2(a.y, scale2),
                      dev_mul_bf16x2(a.z, scale2), dev_mul_bf16x2(a.w, scale2));
}
/* Sixteen e4m3 codes, none of them NaN, times factor / 2^120; factor: a power of two in both
 * halves. A pair's codes are put into halves, extended by their signs; four bits further on all but
 * what is a bf16's sign, exponent and mantissa is cleared. */
static __device__ __forceinline__ void dev_e4m3x16_times(const uint4 &codes, uint32_t factor,
                                                         uint4 *lo, uint4 *hi)
{
    const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t r[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t two; /* __byte_perm() knows no signs */
        if (i % 2)
            asm("prmt.b32 %0, %1, 0, 0xb3a2;" : "=r"(two) : "r"(w[i / 2]));
        else
            asm("prmt.b32 %0, %1, 0, 0x9180;" : "=r"(two) : "r"(w[i / 2]));
        r[i] = dev_mul_bf16x2(two << 4 & 0x87f087f0u, factor);
    }
    *lo = make_uint4(r[0], r[1], r[2], r[3]);
    *hi = make_uint4(r[4], r[5], r[6], r[7]);
}
/* Both halves 2^(code - 127). */
static __device__ __forceinline__ uint32_t dev_ue8m0_bf16x2(uint8_t code)
{
    return dev_twice(kern_bits(kern_ue8m0_decode(code)) >> 16);
}
/* Eight e2m1 codes (even index low) to values times scale2. */
static __device__ __forceinline__ uint4 dev_e2m1x8_bf16(uint32_t codes, uint32_t scale2)
{
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t x = codes >> 8 * i, y = (x & 15u) | (x & 0xf0u) << 12;
        const uint32_t z = (y & 0x00070007u) << 6 | (y & 0x00080008u) << 12;
        r[i] = dev_mul_bf16x2(dev_mul_bf16x2(z, dev_twice(0x7e80)), scale2); /* 2^126 */
    }
    return make_uint4(r[0], r[1], r[2], r[3]);
}

#endif
