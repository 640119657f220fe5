/* kernels/attn/topk.cuh - the k-th highest of many floats, exactly, by one block of threads.
 *
 * Floats become integers of the same order; three rounds count digits of 11, 11 and 10 bits in shared
 * memory, each among those that agree in the digits before. Counts are exact and so is the result,
 * whatever the values and however many are equal.
 */
#ifndef KERN_ATTN_TOPK_CUH
#define KERN_ATTN_TOPK_CUH

#include "kernels/cuda/numeric.cuh"

enum {
    TOPK_THREADS = 1024,
    TOPK_BINS = 2048,
    TOPK_LOADS = 4,             /* of four scores, under way at a time: a row is read by one CTA */
    TOPK_EACH = 4 * TOPK_LOADS, /* scores of a thread in a run */
};

struct topk_shared {
    uint32_t count[TOPK_BINS];
    uint32_t warp[TOPK_THREADS / 32];
    uint32_t digit;
    int32_t left;
};

/* Integers in the order of the floats; NaN below everything, -0 with +0. */
static __device__ __forceinline__ uint32_t dev_order_of(float x)
{
    if (x != x) return 0;
    const uint32_t u = kern_bits(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
static __device__ __forceinline__ float dev_of_order(uint32_t u)
{
    if (u == 0) return kern_float(0x7fc00000u);
    return kern_float(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}

/* Sum of v over the threads before this one; *total over all. All threads call it. */
static __device__ __forceinline__ uint32_t dev_block_before(uint32_t v, uint32_t *warp,
                                                            uint32_t *total)
{
    const int lane = threadIdx.x % 32, w = threadIdx.x / 32;
    uint32_t sum = v;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t o = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += o;
    }
    if (lane == 31) warp[w] = sum;
    __syncthreads();
    uint32_t all = warp[lane]; /* TOPK_THREADS / 32 of them */
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t o = __shfl_up_sync(~0u, all, d);
        if (lane >= d) all += o;
    }
    const uint32_t before = __shfl_sync(~0u, all, (w + 31) % 32);
    *total = __shfl_sync(~0u, all, 31);
    __syncthreads(); /* warp[] may be written again */
    return sum - v + (w ? before : 0);
}

/* Four scores from i on, i a multiple of four, of n; those past the end are NaN. */
static __device__ __forceinline__ float4 dev_scores(const float *s, int32_t i, int32_t n,
                                                    bool aligned)
{
    const float none = kern_float(0x7fc00000u);
    if (aligned && i + 4 <= n) return *(const float4 *)(s + i);
    return make_float4(i < n ? s[i] : none, i + 1 < n ? s[i + 1] : none,
                       i + 2 < n ? s[i + 2] : none, i + 3 < n ? s[i + 3] : none);
}

/* The k-th highest (1 <= k <= n) as an integer; *equal: how many of its equals belong to the k. */
static __device__ uint32_t dev_kth_highest(const float *s, int32_t n, int32_t k,
                                           struct topk_shared *sh, int32_t *equal)
{
    const bool aligned = (uintptr_t)s % 16 == 0;
    uint32_t prefix = 0, mask = 0;
#pragma unroll 1
    for (int round = 0; round < 3; round++) {
        const int shift = round == 0 ? 21 : round == 1 ? 10 : 0;
        const int bins = round == 2 ? 1024 : 2048, each = bins / TOPK_THREADS;
        for (int i = threadIdx.x; i < TOPK_BINS; i += TOPK_THREADS) sh->count[i] = 0;
        __syncthreads();
        for (int32_t i0 = threadIdx.x * 4; i0 < n; i0 += TOPK_THREADS * TOPK_EACH) {
            float4 v[TOPK_LOADS];
#pragma unroll
            for (int l = 0; l < TOPK_LOADS; l++)
                v[l] = dev_scores(s, i0 + l * TOPK_THREADS * 4, n, aligned);
#pragma unroll
            for (int l = 0; l < TOPK_LOADS; l++) {
                const int32_t i = i0 + l * TOPK_THREADS * 4;
                const float x[4] = {v[l].x, v[l].y, v[l].z, v[l].w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t u = dev_order_of(x[j]);
                    if (i + j < n && (u & mask) == prefix)
                        atomicAdd(&sh->count[(u >> shift) & (bins - 1)], 1u);
                }
            }
        }
        __syncthreads();
        /* Thread by thread from the highest digit down. */
        const int top = bins - 1 - (int)threadIdx.x * each;
        const uint32_t c0 = sh->count[top], c1 = each == 2 ? sh->count[top - 1] : 0;
        uint32_t total;
        const uint32_t before = dev_block_before(c0 + c1, sh->warp, &total);
        if (before < (uint32_t)k && (uint32_t)k <= before + c0 + c1) {
            const bool second = (uint32_t)k > before + c0;
            sh->digit = (uint32_t)(second ? top - 1 : top);
            sh->left = k - (int32_t)(before + (second ? c0 : 0));
        }
        __syncthreads();
        prefix |= sh->digit << shift;
        mask |= (uint32_t)(bins - 1) << shift;
        k = sh->left;
    }
    *equal = k;
    __syncthreads();
    return prefix;
}

#endif
