/* kernels/hc/boundary.cuh - what the hyper-connection kernels share. */
#ifndef KERN_HC_BOUNDARY_CUH
#define KERN_HC_BOUNDARY_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/row.cuh"

extern "C" {
#include "kernels/hc/hc.h"
}

enum {
    STREAMS = 4, /* of the fast kernels */
    VEC = 8      /* bf16 of a 16-byte load */
};

/* Enqueues the boundary; without norm.data what the collapse makes is stored as it is. False, and
 * nothing is enqueued, where the machine or the shape has no such kernel; that is the same at every
 * T. */
bool cuda_hc_boundary(struct kern_stream *s, const struct kern_hc_boundary *p);

/* dev_pack2() as one word from the start: what unpacks it again would else put halves together. */
static __device__ __forceinline__ uint32_t word_of(float lo, float hi)
{
    uint32_t u;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(hi), "f"(lo));
    return u;
}
/* Takes the bf16 nearest to two values out of them: what is left is exact. */
static __device__ __forceinline__ uint32_t split2(float *x, float *y)
{
    const uint32_t u = word_of(*x, *y);
    *x -= __uint_as_float(u << 16);
    *y -= __uint_as_float(u & 0xffff0000u);
    return u;
}

/* Eight values of x from four streams. */
static __device__ __forceinline__ uint4 collapse8(const uint4 h[STREAMS], const float pre[STREAMS])
{
    float f[VEC], s[VEC];
    dev_unpack8(h[0], f);
#pragma unroll
    for (int i = 0; i < VEC; i++) s[i] = pre[0] * f[i];
#pragma unroll
    for (int j = 1; j < STREAMS; j++) {
        dev_unpack8(h[j], f);
#pragma unroll
        for (int i = 0; i < VEC; i++) s[i] = fmaf(pre[j], f[i], s[i]);
    }
    return make_uint4(word_of(s[0], s[1]), word_of(s[2], s[3]), word_of(s[4], s[5]),
                      word_of(s[6], s[7]));
}
static __device__ __forceinline__ float add_squares(uint4 v, float s)
{
    float f[VEC];
    dev_unpack8(v, f);
#pragma unroll
    for (int i = 0; i < VEC; i++) s = fmaf(f[i], f[i], s);
    return s;
}

/* comb: softmax over rows, then columns and rows in turn divided by their sums. One thread; c in
 * registers where HC is known. A quotient by the approximate reciprocal is within 2 ulp, and every
 * round divides by sums of what it has, so nothing adds up. */
template <int HC, bool ROWS>
static __device__ __forceinline__ void divide_lines(float *c, int32_t n, float eps)
{
    const int hc = HC ? HC : n;
#pragma unroll
    for (int j = 0; j < hc; j++) {
        float *const v = ROWS ? c + j * hc : c + j;
        const int next = ROWS ? 1 : hc;
        float sum = HC == 4 ? (v[0] + v[next]) + (v[2 * next] + v[3 * next]) : 0.0f;
#pragma unroll
        for (int k = 0; HC != 4 && k < hc; k++) sum += v[k * next];
        const float r = __fdividef(1.0f, sum + eps);
#pragma unroll
        for (int k = 0; k < hc; k++) v[k * next] *= r;
    }
}
/* After the first division of columns. */
template <int HC>
static __device__ __forceinline__ void sinkhorn_rounds(float *c, int32_t n, int32_t iters,
                                                       float eps)
{
#pragma unroll 1
    for (int32_t it = 1; it < iters; it++) {
        divide_lines<HC, true>(c, n, eps);
        divide_lines<HC, false>(c, n, eps);
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
    if (iters > 0) divide_lines<HC, false>(c, n, eps);
    sinkhorn_rounds<HC>(c, n, iters, eps);
}

#endif
