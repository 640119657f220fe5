/* kernels/attn/attention_group.cuh - what attention_few_cuda.cu and attention_spread_cuda.cu share
 * (sm_90a): a warpgroup's weights of a tile, and how warps tell others of the cluster. */
#ifndef KERN_ATTN_ATTENTION_GROUP_CUH
#define KERN_ATTN_ATTENTION_GROUP_CUH

#include "kernels/attn/attention_warp.cuh"
#include "kernels/attn/key_tile.cuh"
#include "kernels/attn/softmax.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* arrive() at CTA `rank` of the cluster. Only where somebody waits for it: that CTA might have left
 * otherwise. */
static __device__ __forceinline__ void arrive_at(uint64_t *bar, int rank)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive_at(bar, rank);
}

/* The same where it may be this CTA, `own`: then each thread arrives, 32 arrivals a warp. One for
 * all after __syncwarp() would be as good, but racecheck does not follow that order. */
static __device__ __forceinline__ void arrive_at_own(uint64_t *bar, int own, int rank)
{
    if (own == rank)
        bar_arrive(bar);
    else
        arrive_at(bar, rank);
}

/* A tile's weights of this thread's two heads, against the tile's own references: bf16 by twos, as
 * wgmma wants them from registers. Made of scores s, keys from k0 on of n. */
struct weights {
    uint32_t p[16];
    float reference[2];
};
static __device__ __forceinline__ void weigh(int32_t k0, int32_t n, float factor, float (&s)[32],
                                             struct weights *w)
{
    const int col = threadIdx.x % 4 * 2;
    const int32_t there = n - k0; /* keys of this tile */
    float top[2] = {-kern_float(0x7f800000u), -kern_float(0x7f800000u)};
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] *= factor;
    if (there < KEY_ROWS) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i / 4 * 8 + col + i % 2 >= there) s[i] = -kern_float(0x7f800000u);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]); /* passes over NaN */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        w->reference[r] = attn_reference(top[r]);
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        w->p[i] = attn_weights(s[2 * i], s[2 * i + 1], w->reference[i % 2]);
}
/* The sum of a tile's weights of this thread's two heads. */
static __device__ __forceinline__ void sum_weights(const uint32_t (&p)[16], float (&sum)[2])
{
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        sum[i % 2] += kern_float(p[i] << 16);
        sum[i % 2] += kern_float(p[i] & 0xffff0000u);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
}

#endif /* sm_90a */
#endif
