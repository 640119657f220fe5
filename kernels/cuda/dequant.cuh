/* kernels/cuda/dequant.cuh - placed weights to bf16 in registers.
 *
 * Why      Products run on the matrix unit in bf16, and every stored code is a bf16 number. Codes are
 *          moved into place by shifts and one product by a power of two makes their value, exactly,
 *          subnormal codes included.
 * Placed   kern_dev_place() leaves rows 16-byte aligned and changes, in each 32-bit word of a row:
 *            fp8     bytes k, k+2, k+1, k+3, so that the low bytes of both halves are a pair
 *            4-bit   eight codes; pair j = codes 2j, 2j+1 in the lower and the upper half, where a
 *                    code's sign and its three other bits lie at
 *                      pair 0: 15; 8 7 6     pair 1: 12; 5 4 3     (one shift and a mask, as a bf16
 *                      pair 2:  9; 2 1 0     pair 3: 13; 11 10 14   wants 15; 8 7 6)
 *          and MXFP4 scales: byte b becomes b + 110, the exponent of dev_e2m1x8's factor.
 *          Behind the scales of these three formats lies a byte for each row, 1 if a code or a scale
 *          of it is NaN (cuda_nan_rows): NaN codes convert to numbers here, and such a row's sums are
 *          NaN whatever it is multiplied with. Scales of fp8 blocks carry their own NaN.
 */
#ifndef KERN_CUDA_DEQUANT_CUH
#define KERN_CUDA_DEQUANT_CUH

#include "kernels/cuda/numeric.cuh"
#include "kernels/types.h"

/* Bytes of scales, as placed, up to where the row bytes begin. */
static inline __host__ __device__ int64_t cuda_scale_bytes(enum kern_wfmt fmt, enum kern_sfmt sfmt,
                                                           int64_t n, int64_t k)
{
    const int64_t rows = fmt == KERN_W_FP8 ? (n + 127) / 128 : n;
    const int64_t cols = fmt == KERN_W_FP8     ? (k + 127) / 128
                         : fmt == KERN_W_MXFP4 ? k / 32
                                               : k / 16;
    return sfmt == KERN_S_NONE ? 0 : (rows * cols * (sfmt == KERN_S_F32 ? 4 : 1) + 15) / 16 * 16;
}
static inline __host__ __device__ bool cuda_has_nan_rows(enum kern_wfmt fmt)
{
    return fmt == KERN_W_FP8 || fmt == KERN_W_MXFP4 || fmt == KERN_W_NVFP4;
}
/* [n], of a placed weight with scale array `scale`; formats with cuda_has_nan_rows() only. */
static inline __host__ __device__ const uint8_t *
cuda_nan_rows(const void *scale, enum kern_wfmt fmt, enum kern_sfmt sfmt, int64_t n, int64_t k)
{
    return (const uint8_t *)scale + cuda_scale_bytes(fmt, sfmt, n, k);
}

static __device__ __forceinline__ uint32_t dev_mul_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
static __device__ __forceinline__ uint32_t dev_twice(uint32_t bf16)
{
    return bf16 | bf16 << 16;
}

/* Not 0 if one of four e4m3 codes is NaN. */
static __device__ __forceinline__ uint32_t dev_e4m3x4_nan(uint32_t codes)
{
    return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

/* A placed word of fp8: p[0] = elements k, k+1, p[1] = k+2, k+3. */
static __device__ __forceinline__ void dev_e4m3x4(uint32_t v, uint32_t p[2])
{
    /* Sign and the other seven bits in bf16's places: the value times 2^-120. */
    p[0] = (v << 8 & 0x80008000u) | (v << 4 & 0x07f007f0u);
    p[1] = (v & 0x80008000u) | (v >> 4 & 0x07f007f0u);
    p[0] = dev_mul_bf16x2(p[0], 0x7b807b80u); /* 2^120 */
    p[1] = dev_mul_bf16x2(p[1], 0x7b807b80u);
}

/* A placed word of 4-bit codes: p[j] = elements k+2j, k+2j+1, times factor (both halves: a scale times
 * 2^110, see below) and so the weight's value times 2^-16. */
#define DEV_E2M1_POST 65536.0f
static __device__ __forceinline__ void dev_e2m1x8(uint32_t v, uint32_t factor, uint32_t p[4])
{
    p[0] = v & 0x81c081c0u; /* the value times 2^-126 */
    p[1] = v << 3 & 0x81c081c0u;
    p[2] = v << 6 & 0x81c081c0u;
    /* Three left shifts at once: sign by 10, exponent by 5, mantissa by 0; no two bits meet. */
    p[3] = ((v >> 8 & 0x006c006cu) * 0x421u) & 0x81c081c0u;
#pragma unroll
    for (int j = 0; j < 4; j++) p[j] = dev_mul_bf16x2(p[j], factor);
}
/* Factors of a placed MXFP4 scale and of an NVFP4 scale, in both halves. */
static __device__ __forceinline__ uint32_t dev_mxfp4_factor(uint32_t placed)
{
    return dev_twice(placed << 7);
}
static __device__ __forceinline__ uint32_t dev_nvfp4_factor(uint32_t code)
{
    uint32_t s = (code << 8 & 0x8000u) | (code << 4 & 0x07f0u);
    s = dev_mul_bf16x2(s, 0x7b807b80u);
    return dev_mul_bf16x2(dev_twice(s & 0xffffu), 0x76807680u); /* 2^110 */
}

/* One element as a float: for kernels that need no speed. word holds it, i is its place there. */
static __device__ __forceinline__ float dev_e4m3_in(uint32_t word, int i)
{
    const int byte = i == 1 ? 2 : i == 2 ? 1 : i;
    return dev_e4m3_decode((uint8_t)(word >> (8 * byte)));
}
static __device__ __forceinline__ float dev_e2m1_in(uint32_t word, int i)
{
    const uint32_t h = word >> (i % 2 * 16);
    const uint32_t c[4] = {(h >> 12 & 8u) | (h >> 6 & 7u), (h >> 9 & 8u) | (h >> 3 & 7u),
                           (h >> 6 & 8u) | (h & 7u),
                           (h >> 10 & 8u) | (h >> 9 & 6u) | (h >> 14 & 1u)};
    return dev_e2m1_decode(i < 2 ? c[0] : i < 4 ? c[1] : i < 6 ? c[2] : c[3]);
}

#endif
