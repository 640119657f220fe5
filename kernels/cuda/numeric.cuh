/* kernels/cuda/numeric.cuh - number formats on the device: the functions of kernels/numeric.h, and
 * loads and stores of activations. */
#ifndef KERN_CUDA_NUMERIC_CUH
#define KERN_CUDA_NUMERIC_CUH

#include "kernels/numeric.h"
#include "kernels/types.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

/* Exact: every e4m3 is a half, every half a float. */
static __device__ __forceinline__ float dev_e4m3_decode(uint8_t c)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(c, __NV_E4M3)));
}
static __device__ __forceinline__ float dev_e2m1_decode(uint32_t c)
{
    /* 1-2-1 with bias 1 is the top of a half with bias 15 once moved there: the product is
     * exact. */
    const uint32_t h = (c & 8u) << 12 | (c & 7u) << 9;
    return __half2float(__ushort_as_half((unsigned short)h)) * 16384.0f;
}

/* Element i of an activation tensor. */
static __device__ __forceinline__ float dev_load(const void *x, int64_t i, enum kern_dtype t)
{
    return t == KERN_F32 ? ((const float *)x)[i] : kern_bf16_decode(((const uint16_t *)x)[i]);
}
/* The rounding point. */
static __device__ __forceinline__ void dev_store(void *y, int64_t i, enum kern_dtype t, float v)
{
    if (t == KERN_F32)
        ((float *)y)[i] = v;
    else
        ((uint16_t *)y)[i] = kern_bf16_encode(v);
}
static __device__ __forceinline__ float dev_round(float v, enum kern_dtype t)
{
    return t == KERN_BF16 ? kern_bf16_round(v) : v;
}
static __device__ __forceinline__ float dev_vec(const struct kern_vec &w, int64_t i)
{
    return dev_load(w.data, i, w.dtype);
}

/* Sum over the 32 threads of a warp; all get it. The order is fixed: a butterfly. */
static __device__ __forceinline__ float dev_warp_sum(float v)
{
#pragma unroll
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}
static __device__ __forceinline__ float dev_warp_max(float v)
{
#pragma unroll
    for (int m = 16; m; m >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, m));
    return v;
}

#endif
