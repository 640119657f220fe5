/* kernels/hc/boundary.cuh - what the hyper-connection kernels share. */
#ifndef KERN_HC_BOUNDARY_CUH
#define KERN_HC_BOUNDARY_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/row.cuh"

extern "C" {
#include "kernels/hc/hc.h"
}

/* Enqueues the boundary; without norm.data what the collapse makes is stored as it is. False, and nothing
 * is enqueued, where the machine or the shape has no such kernel; that is the same at every T. */
bool cuda_hc_boundary(struct kern_stream *s, const struct kern_hc_boundary *p);

/* comb: softmax over rows, then columns and rows in turn divided by their sums. One thread; c in
 * registers where HC is known. A quotient by the approximate reciprocal is within 2 ulp, and every round
 * divides by sums of what it has, so nothing adds up. */
template <int HC> static __device__ __forceinline__ void divide_rows(float *c, int32_t n, float eps)
{
    const int hc = HC ? HC : n;
#pragma unroll
    for (int j = 0; j < hc; j++) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < hc; k++) sum += c[j * hc + k];
        const float r = __fdividef(1.0f, sum + eps);
#pragma unroll
        for (int k = 0; k < hc; k++) c[j * hc + k] *= r;
    }
}
template <int HC>
static __device__ __forceinline__ void divide_columns(float *c, int32_t n, float eps)
{
    const int hc = HC ? HC : n;
#pragma unroll
    for (int k = 0; k < hc; k++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < hc; j++) sum += c[j * hc + k];
        const float r = __fdividef(1.0f, sum + eps);
#pragma unroll
        for (int j = 0; j < hc; j++) c[j * hc + k] *= r;
    }
}
template <int HC>
static __device__ __forceinline__ void sinkhorn(float *c, int32_t n, int32_t iters, float eps)
{
    const int hc = HC ? HC : n;
#pragma unroll
    for (int j = 0; j < hc; j++) {
        float m = c[j * hc], sum = 0.0f;
#pragma unroll
        for (int k = 1; k < hc; k++) m = c[j * hc + k] > m ? c[j * hc + k] : m;
#pragma unroll
        for (int k = 0; k < hc; k++) {
            c[j * hc + k] = dev_exp(c[j * hc + k] - m);
            sum += c[j * hc + k];
        }
#pragma unroll
        for (int k = 0; k < hc; k++) c[j * hc + k] = c[j * hc + k] / sum + eps;
    }
    if (iters > 0) divide_columns<HC>(c, n, eps);
#pragma unroll 1
    for (int32_t it = 1; it < iters; it++) {
        divide_rows<HC>(c, n, eps);
        divide_columns<HC>(c, n, eps);
    }
}

#endif
