/* kernels/norm/heads.cuh - query norm and rotation of deployed heads by warps, for heads_rope and
 * for prepare, and which calls are of that kind.
 */
#ifndef KERN_NORM_HEADS_CUH
#define KERN_NORM_HEADS_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/row.cuh"

enum { VEC = 8 }; /* elements of a vector: 16 bytes of bf16 */
enum {
    HEAD = 512,         /* the deployed width */
    HEADS = 4,          /* of a warp */
    GROUP = 32 / HEADS, /* threads that add up a head */
    HEAD_WORDS =
        HEAD / 2 + GROUP /* squares of a head, two a word; the gap keeps heads on other banks */
};

/* Rotates four pairs by the angles there. */
static __device__ __forceinline__ void rotate8(float f[VEC], const float *cos, const float *sin,
                                               float sign)
{
    const float4 c = *(const float4 *)cos, s = *(const float4 *)sin;
    dev_rotate2(&f[0], &f[1], c.x, sign * s.x);
    dev_rotate2(&f[2], &f[3], c.y, sign * s.y);
    dev_rotate2(&f[4], &f[5], c.z, sign * s.z);
    dev_rotate2(&f[6], &f[7], c.w, sign * s.w);
}

/* What the squares of a head, rounded to bf16 and added up, make of its values: 1 / rms, in steps
 * rounded to bf16. The eight threads of a group hold two of the CPU's sixteen lanes each. */
static __device__ __forceinline__ float head_factor(const uint32_t *squares, float eps)
{
    float s0 = 0.0f, s1 = 0.0f;
#pragma unroll 8
    for (int i = 0; i < HEAD / 16; i++) {
        const uint32_t u = squares[i * GROUP];
        s0 += __uint_as_float(u << 16);
        s1 += __uint_as_float(u & 0xffff0000u);
    }
#pragma unroll
    for (int m = GROUP / 2; m; m >>= 1) {
        s0 += __shfl_xor_sync(0xffffffffu, s0, m);
        s1 += __shfl_xor_sync(0xffffffffu, s1, m);
    }
    const float ms = kern_bf16_round((s0 + s1) / (float)HEAD);
    return kern_bf16_round(1.0f / sqrtf(kern_bf16_round(ms + eps)));
}

/* Heads first .. first + HEADS - 1 of all, by a warp. */
static __device__ __forceinline__ void heads_norm(const struct kern_heads_rope &p, int64_t first,
                                                  uint32_t *squares)
{
    const int lane = threadIdx.x & 31;
    const int64_t n = (int64_t)p.T * p.H;
    if (first >= n) return; /* whole warps */
    uint16_t *const q = (uint16_t *)p.q + first * HEAD;
    uint4 v[HEADS][2]; /* elements 8 lane .. and 256 + 8 lane .. of each head */
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            v[h][k] = first + h < n ? *(const uint4 *)(q + h * HEAD + k * 256 + VEC * lane)
                                    : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float f[VEC];
            dev_unpack8(v[h][k], f);
#pragma unroll
            for (int e = 0; e < VEC; e++) f[e] *= f[e];
            *(uint4 *)(squares + h * HEAD_WORDS + k * 128 + 4 * lane) = dev_pack8(f);
        }
    __syncwarp();
    const float mine = head_factor(squares + lane / GROUP * HEAD_WORDS + lane % GROUP, p.eps);
    const int32_t from = HEAD - p.rd; /* where the rotated end begins */
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float factor = __shfl_sync(0xffffffffu, mine, h * GROUP);
        if (first + h >= n) break;
        const int64_t angles = (first + h) / p.H * (p.rd / 2);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int32_t at = k * 256 + VEC * lane;
            float f[VEC];
            dev_unpack8(v[h][k], f);
#pragma unroll
            for (int e = 0; e < VEC; e++) f[e] *= factor;
            uint4 o = dev_pack8(f);
            if (at >= from) {
                const int64_t a = angles + (at - from) / 2;
                dev_unpack8(o, f);
                rotate8(f, p.cos + a, p.sin + a, p.inverse ? -1.0f : 1.0f);
                o = dev_pack8(f);
            }
            *(uint4 *)(q + h * HEAD + at) = o;
        }
    }
}

/* bf16 heads that are read eight values at a time. */
static inline bool heads_are_wide(const struct kern_heads_rope *p)
{
    return p->act == KERN_BF16 && p->d % VEC == 0 && p->rd % VEC == 0 && cuda_aligned16(p->q) &&
           cuda_aligned16(p->cos) && cuda_aligned16(p->sin);
}

#endif
