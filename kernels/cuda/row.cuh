/* kernels/cuda/row.cuh - a row of floats in shared memory, worked on by a team of threads: the
 * device's twin of kernels/cpu/row.h, with the same bits.
 *
 * Team     N threads: one warp (32), or the whole block when N is more. `me` is the thread's number
 *          in its team. All of the team call a function together; when it returns, all see the row.
 * Sums     in the CPU's order, sixteen lanes: short rows (heads, keys) can afford that, and what is
 *          quantized afterwards is then equal byte by byte.
 * Rows     16-byte aligned.
 */
#ifndef KERN_CUDA_ROW_CUH
#define KERN_CUDA_ROW_CUH

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/numeric.cuh"

template <int N> static __device__ __forceinline__ void dev_team_sync()
{
    if (N == 32)
        __syncwarp();
    else
        __syncthreads();
}

/* Eight bf16 of 16 aligned bytes to floats and back; the second is the rounding point. */
static __device__ __forceinline__ void dev_unpack8(uint4 v, float f[8])
{
    const uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = __uint_as_float(u[i] << 16);
        f[2 * i + 1] = __uint_as_float(u[i] & 0xffff0000u);
    }
}
static __device__ __forceinline__ uint32_t dev_pack2(float lo, float hi)
{
    const __nv_bfloat162 b = __floats2bfloat162_rn(lo, hi);
    return (uint32_t)__bfloat16_as_ushort(b.y) << 16 | __bfloat16_as_ushort(b.x);
}
static __device__ __forceinline__ uint4 dev_pack8(const float f[8])
{
    return make_uint4(dev_pack2(f[0], f[1]), dev_pack2(f[2], f[3]), dev_pack2(f[4], f[5]),
                      dev_pack2(f[6], f[7]));
}
/* Over the lanes of a warp, which has 32 neighbouring pieces of eight elements of a row: rmsnorm
 * and the boundary, where other threads have them, add them up in this order. */
static __device__ __forceinline__ float dev_pieces_sum(float v)
{
    v += __shfl_xor_sync(0xffffffffu, v, 4);
    v += __shfl_xor_sync(0xffffffffu, v, 8);
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    v += __shfl_xor_sync(0xffffffffu, v, 2);
    return v + __shfl_xor_sync(0xffffffffu, v, 16);
}
static __host__ __device__ __forceinline__ bool cuda_aligned16(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

template <int N>
static __device__ __forceinline__ void dev_row_load(const void *x, enum kern_dtype t, int32_t n,
                                                    float *row, int me)
{
    int32_t i = 0;
    if (t == KERN_BF16 && cuda_aligned16(x)) {
        const int32_t whole = n & ~7;
        for (i = 8 * me; i < whole; i += 8 * N) {
            float f[8];
            dev_unpack8(*(const uint4 *)((const uint16_t *)x + i), f);
            *(float4 *)(row + i) = make_float4(f[0], f[1], f[2], f[3]);
            *(float4 *)(row + i + 4) = make_float4(f[4], f[5], f[6], f[7]);
        }
        i = whole;
    }
    for (i += me; i < n; i += N) row[i] = dev_load(x, i, t);
    dev_team_sync<N>();
}

template <int N>
static __device__ __forceinline__ void dev_row_store(void *y, enum kern_dtype t, int32_t n,
                                                     const float *row, int me)
{
    int32_t i = 0;
    if (t == KERN_BF16 && cuda_aligned16(y)) {
        const int32_t whole = n & ~7;
        for (i = 8 * me; i < whole; i += 8 * N) {
            const float4 a = *(const float4 *)(row + i), b = *(const float4 *)(row + i + 4);
            const float f[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            *(uint4 *)((uint16_t *)y + i) = dev_pack8(f);
        }
        i = whole;
    }
    for (i += me; i < n; i += N) dev_store(y, i, t, row[i]);
    dev_team_sync<N>();
}

/* Sum of sixteen lanes (threads j and j+16 of a warp hold lane j): 8 apart, then 4, 2, 1. */
static __device__ __forceinline__ float dev_lanes_sum(float s)
{
#pragma unroll
    for (int m = 8; m; m >>= 1) s += __shfl_xor_sync(0xffffffffu, s, m);
    return s;
}
/* Sum of squares; each warp of the team for itself. */
static __device__ __forceinline__ float dev_row_sumsq(const float *row, int32_t n)
{
    float s = 0.0f;
#pragma unroll 8
    for (int32_t i = threadIdx.x & 15; i < n; i += 16) s = fmaf(row[i], row[i], s);
    return dev_lanes_sum(s);
}
/* The same of squares rounded to bf16. */
static __device__ __forceinline__ float dev_row_sumsq_bf16(const float *row, int32_t n)
{
    float s = 0.0f;
#pragma unroll 8
    for (int32_t i = threadIdx.x & 15; i < n; i += 16) s += kern_bf16_round(row[i] * row[i]);
    return dev_lanes_sum(s);
}

template <int N>
static __device__ __forceinline__ void dev_row_round(float *row, int32_t n, enum kern_dtype t,
                                                     int me)
{
    if (t == KERN_BF16)
        for (int32_t i = me; i < n; i += N) row[i] = kern_bf16_round(row[i]);
    dev_team_sync<N>();
}

/* row = round(w * (row / rms)) */
template <int N>
static __device__ __forceinline__ void dev_row_rmsnorm(float *row, int32_t n, float eps,
                                                       const struct kern_vec &w, enum kern_dtype t,
                                                       int me)
{
    const float rs = 1.0f / sqrtf(dev_row_sumsq(row, n) / (float)n + eps);
    dev_team_sync<N>(); /* all warps have their sum before a value changes */
    for (int32_t i = me; i < n; i += N) row[i] = dev_round(dev_vec(w, i) * (row[i] * rs), t);
    dev_team_sync<N>();
}

static __device__ __forceinline__ void dev_rotate2(float *a, float *b, float c, float s)
{
    const float x = *a, y = *b;
    *a = fmaf(x, c, -(y * s));
    *b = fmaf(x, s, y * c);
}
/* Rotates the pairs of the rd values at row and rounds them. sign -1 turns back. */
template <int N>
static __device__ __forceinline__ void dev_row_rotate(float *row, const float *cos,
                                                      const float *sin, int32_t rd, float sign,
                                                      enum kern_dtype t, int me)
{
    for (int32_t i = me; i < rd / 2; i += N) {
        float a = row[2 * i], b = row[2 * i + 1];
        dev_rotate2(&a, &b, cos[i], sign * sin[i]);
        row[2 * i] = dev_round(a, t);
        row[2 * i + 1] = dev_round(b, t);
    }
    dev_team_sync<N>();
}

/* Largest magnitude of n values, by one warp; NaN is passed over. */
static __device__ __forceinline__ float dev_row_amax(const float *x, int32_t n)
{
    float m = 0.0f;
    for (int32_t i = threadIdx.x & 31; i < n; i += 32) m = fmaxf(m, fabsf(x[i]));
    __syncwarp(); /* the caller may change the values */
    return dev_warp_max(m);
}
/* To the element format and back, in blocks; a warp takes every (N/32)-th block. */
template <int N>
static __device__ __forceinline__ void dev_row_e4m3(float *row, int32_t n, int32_t block, int me)
{
    for (int32_t b = me / 32 * block; b < n; b += N / 32 * block) {
        const int32_t m = n - b < block ? n - b : block;
        const uint8_t c = kern_e4m3_scale_code(dev_row_amax(row + b, m));
        const float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
        for (int32_t i = b + (me & 31); i < b + m; i += 32)
            row[i] = dev_e4m3_decode(kern_e4m3_encode(row[i] * inv)) * s;
    }
    dev_team_sync<N>();
}
template <int N>
static __device__ __forceinline__ void dev_row_e2m1(float *row, int32_t n, int32_t block, int me)
{
    for (int32_t b = me / 32 * block; b < n; b += N / 32 * block) {
        const int32_t m = n - b < block ? n - b : block;
        const uint8_t c = kern_e2m1_scale_code(dev_row_amax(row + b, m));
        const float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
        for (int32_t i = b + (me & 31); i < b + m; i += 32)
            row[i] = dev_e2m1_decode(kern_e2m1_encode(row[i] * inv)) * s;
    }
    dev_team_sync<N>();
}

/* Normalized Walsh-Hadamard transform in natural order; n a power of two. */
template <int N>
static __device__ __forceinline__ void dev_row_hadamard(float *row, int32_t n, int me)
{
    const float s = (float)(1.0 / sqrt((double)n));
    for (int32_t h = 1; h < n; h *= 2) {
        const float f = h * 2 == n ? s : 1.0f;
        for (int32_t p = me; p < n / 2; p += N) {
            const int32_t j = (p & ~(h - 1)) * 2 + (p & (h - 1));
            const float a = row[j], b = row[j + h];
            row[j] = (a + b) * f;
            row[j + h] = (a - b) * f;
        }
        dev_team_sync<N>();
    }
}

#endif
