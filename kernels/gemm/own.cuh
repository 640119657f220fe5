/* kernels/gemm/own.cuh - rows of x that each block of threads of a product makes for itself, in
 * shared memory: normed or rotated, and quantized.
 *
 * Why      Of one row, or a few short ones, that takes less time than another launch.
 */
#ifndef KERN_GEMM_OWN_CUH
#define KERN_GEMM_OWN_CUH

#include "kernels/cuda/quant.cuh"
#include "kernels/cuda/row.cuh"
#include "kernels/gemm/product.cuh"

enum {
    OWN_SPAN = 128,   /* elements of x that a warp quantizes at a time */
    OWN_BATCH = 8,    /* spans loaded before the first is quantized */
    OWN_SQUARE = 256, /* elements of a row whose squares are one sum (rmsnorm) */
    OWN_SQUARES = 32, /* of these sums, a lane each: a normed row has at most 8192 elements */
};

/* What rows become before they are quantized, and of what: borrowed from the set's norm or rope. */
enum before { AS_THEY_ARE, NORMED, TURNED };
struct change {
    struct kern_vec w; /* NORMED */
    float eps;
    bool w_by_fours;
    const float *cos, *sin; /* TURNED: heads of d whose last rd values are rotated */
    int32_t d, rd;
    float sign;
};

static inline struct change change_of(const struct cuda_set *a)
{
    struct change c = {};
    if (a->norm) {
        c.w = a->norm->w;
        c.eps = a->norm->eps;
        c.w_by_fours = (uintptr_t)c.w.data % (4 * (size_t)kern_dtype_bytes(c.w.dtype)) == 0;
    }
    if (a->rope) {
        c.cos = a->rope->cos;
        c.sin = a->rope->sin;
        c.d = a->rope->d;
        c.rd = a->rope->rd;
        c.sign = a->rope->inverse ? -1.0f : 1.0f;
    }
    return c;
}

/* The sums of squares of T whole rows, OWN_SQUARES for each, as rmsnorm adds them up. */
template <int WARPS>
static __device__ __forceinline__ void own_squares(const struct cuda_product &p, const uint16_t *x,
                                                   int32_t T, float *squares)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int32_t i = warp; i < T * OWN_SQUARES; i += WARPS) {
        const int32_t t = i / OWN_SQUARES, k = i % OWN_SQUARES * OWN_SQUARE + 8 * lane;
        float s = 0.0f;
        if (i % OWN_SQUARES * OWN_SQUARE < p.K) {
            float v[8];
            dev_load4(x, KERN_BF16, t * p.ld_x + k, k, p.K, p.by_fours, v);
            dev_load4(x, KERN_BF16, t * p.ld_x + k + 4, k + 4, p.K, p.by_fours, v + 4);
#pragma unroll
            for (int e = 0; e < 8; e++) s = fmaf(v[e], v[e], s);
            s = dev_pieces_sum(s);
        }
        if (lane == 0) squares[i] = s;
    }
    __syncthreads();
}

/* Elements k .. k+3 of row t, as the norm or the rotation leaves them. */
template <enum before HOW>
static __device__ __forceinline__ void own_change(const struct cuda_product &p,
                                                  const struct change &c, const float *squares,
                                                  int32_t t, int32_t k, float v[4])
{
    if (HOW == NORMED) {
        const float sum = dev_warp_sum(squares[t * OWN_SQUARES + threadIdx.x % 32]);
        const float rs = 1.0f / sqrtf(sum / (float)p.K + c.eps);
        float w[4];
        dev_load4(c.w.data, c.w.dtype, k, k, p.K, c.w_by_fours, w);
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = kern_bf16_round(w[e] * (v[e] * rs));
    }
    const int32_t end = HOW == TURNED ? k % c.d - (c.d - c.rd) : -1;
    if (HOW == TURNED && end >= 0 && k < p.K) {
        const int64_t a = (int64_t)t * (c.rd / 2) + end / 2;
        dev_rotate2(&v[0], &v[1], c.cos[a], c.sign * c.sin[a]);
        dev_rotate2(&v[2], &v[3], c.cos[a + 1], c.sign * c.sin[a + 1]);
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = kern_bf16_round(v[e]);
    }
}

/* The part of T rows of x that this block of threads needs, to shared memory, changed and
 * quantized, ld elements apart: of every kw * ks blocks of k the kw, a power of two, from my_k0
 * on. */
template <int WARPS, enum before HOW>
static __device__ __forceinline__ void
own_rows(const struct cuda_product &p, const uint16_t *x, int32_t T, int kw, int ks, int my_k0,
         const struct change &c, const float *squares, uint16_t *to, int32_t ld)
{
    /* Normed rows are close by: they were read before. */
    enum { AT_ONCE = HOW == NORMED ? 1 : OWN_BATCH };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, shift = __ffs(kw) - 1;
    const int32_t width = ld / GROUP_K * GROUP_K, spans = (p.K + OWN_SPAN - 1) / OWN_SPAN;
    const int32_t mine = (spans + kw * ks - 1) / (kw * ks) * kw;
    const auto k_of = [&](int32_t e) {
        return ((e >> shift) * (kw * ks) + my_k0 + (e & (kw - 1))) * OWN_SPAN + 4 * lane;
    };
    const auto put = [&](int32_t t, int32_t k, float v[4]) {
        own_change<HOW>(p, c, squares, t, k, v);
        if (p.aq == KERN_AQ_A128) dev_quant4_a128(v);
        if (k < width) *(uint2 *)(to + t * ld + k) = dev_pack4(v);
    };
    if (T == 1 && p.by_fours &&
        p.K % OWN_SPAN == 0) { /* a step of decode: nothing to find out by span */
#pragma unroll 1
        for (int32_t e0 = warp; e0 < mine; e0 += WARPS * AT_ONCE) {
            uint2 u[AT_ONCE];
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int32_t k = k_of(e0 + b * WARPS);
                u[b] = make_uint2(0, 0);
                if (k < p.K) u[b] = *(const uint2 *)(x + k);
            }
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int32_t k = k_of(e0 + b * WARPS);
                if (k >= p.K) continue;
                float v[4] = {kern_float(u[b].x << 16), kern_float(u[b].x & 0xffff0000u),
                              kern_float(u[b].y << 16), kern_float(u[b].y & 0xffff0000u)};
                put(0, k, v);
            }
        }
        return;
    }
#pragma unroll 1
    for (int32_t i = warp; i < T * mine; i += WARPS) {
        const int32_t t = i / mine, k = k_of(i - t * mine);
        float v[4];
        dev_load4(x, KERN_BF16, t * p.ld_x + k, k, p.K, p.by_fours, v);
        put(t, k, v);
    }
}

#endif
