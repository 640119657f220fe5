/* kernels/cuda/dequant.cuh - placed weights to bf16 in registers.
 *
 * Why      Products run on the matrix unit in bf16, and every stored code is a bf16 number. Codes
 *          are moved into place by shifts and one product by a power of two makes their value,
 *          exactly, subnormal codes included.
 * Placed   kern_dev_place() leaves rows 16-byte aligned and changes, in each 32-bit word of a row:
 *            fp8     bytes k, k+2, k+1, k+3, so that the low bytes of both halves are a pair
 *            4-bit   eight codes; pair j = codes 2j, 2j+1 in the lower and the upper half, where a
 *                    code's sign and its three other bits lie at
 *                      pair 0: 15; 8 7 6     pair 1: 12; 5 4 3     (one shift and a mask, as a bf16
 *                      pair 2:  9; 2 1 0     pair 3: 13; 11 10 14   wants 15; 8 7 6)
 *          and MXFP4 scales: byte b becomes b + 110, the exponent of dev_e2m1x8's factor.
 *          MXFP4 arrays meant for products of codes (cuda_placed_e4m3) have another word, of
 *          nibbles: what prmt looks up, three bits of a code each, is in the order 0 2 1 3 in the
 *          lower half and 4 6 5 7 in the upper; the signs of the former are on top of nibbles 1, 3,
 *          5, 7, those of the latter on top of 0, 2, 4, 6.
 *          Behind the scales of these three formats lies a byte for each row, 1 if a code or a
 *          scale of it is NaN (cuda_nan_rows): NaN codes convert to numbers here, and such a row's
 *          sums are NaN whatever it is multiplied with. Scales of fp8 blocks carry their own NaN.
 *          Behind those of MXFP4 lies another for each row, the largest of its scales that is of
 *          any weight (cuda_row_tops).
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

/* [n], of a placed MXFP4 weight. */
static inline __host__ __device__ const uint8_t *cuda_row_tops(const void *scale, int64_t n,
                                                               int64_t k)
{
    return cuda_nan_rows(scale, KERN_W_MXFP4, KERN_S_UE8M0, n, k) + n;
}
/* Bytes of scales with what lies behind them. */
static inline __host__ __device__ int64_t cuda_scale_room(enum kern_wfmt fmt, enum kern_sfmt sfmt,
                                                          int64_t n, int64_t k)
{
    return cuda_scale_bytes(fmt, sfmt, n, k) + (cuda_has_nan_rows(fmt) ? n : 0) +
           (fmt == KERN_W_MXFP4 ? n : 0);
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

/* Bits of a where `which` has ones, else of b. */
static __device__ __forceinline__ uint32_t dev_select(uint32_t a, uint32_t b, uint32_t which)
{
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
    return r;
}

/* A placed word of fp8: p[0] = elements k, k+1, p[1] = k+2, k+3. */
static __device__ __forceinline__ void dev_e4m3x4(uint32_t v, uint32_t p[2])
{
    /* Sign and the other seven bits in bf16's places: the value times 2^-120. */
    const uint32_t value = 0x07f007f0u;
    uint32_t signs; /* told so, the compiler would mask them again where they are shifted */
    asm("and.b32 %0, %1, 0x80808080;" : "=r"(signs) : "r"(v));
    p[0] = dev_mul_bf16x2(dev_select(v << 4, signs << 8, value), 0x7b807b80u); /* 2^120 */
    p[1] = dev_mul_bf16x2(dev_select(v >> 4, signs, value), 0x7b807b80u);
}

/* A placed word of 4-bit codes: p[j] = elements k+2j, k+2j+1, times factor (both halves: a scale
 * times 2^110, see below) and so the weight's value times 2^-16. */
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

/* A word of nibbles (see above) as e4m3: p0 = elements k, k+2, k+1, k+3, p1 = k+4, k+6, k+5, k+7.
 * table: what codes 0 to 7 are. */
static __device__ __forceinline__ void dev_e2m1x8_e4m3(uint32_t v, uint2 table, uint32_t *p0,
                                                       uint32_t *p1)
{
    const uint32_t at = v & 0x77777777u;
    uint32_t lower, upper; /* __byte_perm() would mask `at` again */
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(lower) : "r"(table.x), "r"(table.y), "r"(at));
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(upper) : "r"(table.x), "r"(table.y), "r"(at >> 16));
    *p0 = lower | (v & 0x80808080u);
    *p1 = upper | (v << 4 & 0x80808080u);
}
/* What codes 0 to 7 are in e4m3 if the largest placed scale of a row is `top` and theirs is
 * `scale`: times 2^6 for top itself. A code's exponent and its scale's add up in e4m3's bits, 8 for
 * a power of two, so all eight are linear in scale. Down to 2^-5, where 0.5 is e4m3's least number
 * that is not subnormal; 0 is always 0. */
static __device__ __forceinline__ uint2 dev_mxfp4_table(int top)
{
    const uint32_t one = (uint32_t)(13 - top) * 8; /* plus 8 scale: 1 in e4m3 */
    return make_uint2(one * 0x01010100u + 0x03fff800u, one * 0x01010101u + 0x14100c08u);
}
static __device__ __forceinline__ uint2 dev_mxfp4_table_at(uint2 table, uint32_t scale)
{
    return make_uint2(scale * 0x08080800u + table.x, scale * 0x08080808u + table.y);
}
/* Powers of two that scales may be below the largest of their row. */
enum { CUDA_E4M3_SPREAD = 11 };
/* What 2^6 of a row's stands for, divided by 2^6: a power of two, maybe subnormal. */
static __device__ __forceinline__ float dev_mxfp4_unit(int top)
{
    const int e = top - (110 + 127) - 6 + 127; /* as placed, less the bias, as a float's exponent */
    return kern_float(e > 0 ? (uint32_t)e << 23 : 1u << (22 + e));
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
