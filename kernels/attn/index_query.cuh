/* kernels/attn/index_query.cuh - one head of index queries by a warp: rotation, Hadamard transform and the
 * quantizer's round trip, in place; for index_query and for prepare.
 *
 * The row stays in registers, E neighbours to a lane. Stages of the transform within a lane are plain, those
 * across lanes exchange by shuffle: the additions are the twin's, one for one, so codes are equal.
 */
#ifndef KERN_ATTN_INDEX_QUERY_CUH
#define KERN_ATTN_INDEX_QUERY_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/numeric.cuh"

/* Pair i of a row's rotated part: in bf16 mode the caller rounds. */
static __device__ __forceinline__ void index_rotate(float &a, float &b, float c, float s)
{
    const float x = fmaf(a, c, -(b * s)), y = fmaf(a, s, b * c);
    a = x;
    b = y;
}

/* Largest magnitude over groups of `lanes` neighbouring lanes. */
static __device__ __forceinline__ float group_max(float m, int lanes)
{
    for (int s = 1; s < lanes; s *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, s));
    return m;
}

/* Head `row` of all, 32 * E values wide, by a warp. */
template <int E>
static __device__ __forceinline__ void index_head(const struct kern_index_query &p, int64_t row,
                                                  float hadamard_scale)
{
    if (row >= (int64_t)p.T * p.H) return;
    const int lane = threadIdx.x % 32;
    uint16_t *q = (uint16_t *)__builtin_assume_aligned((uint16_t *)p.q + row * (32 * E) + lane * E,
                                                       E < 8 ? 2 * E : 16);
    const int32_t half = p.rd / 2, first = 32 * E - p.rd;
    const float *cs = p.cos + row / p.H * half, *sn = p.sin + row / p.H * half;
    float x[E];
#pragma unroll
    for (int j = 0; j < E; j++) x[j] = kern_bf16_decode(q[j]);
    if constexpr (E == 1) { /* a pair is two lanes */
        const float other = __shfl_xor_sync(~0u, x[0], 1);
        if (lane >= first) {
            float a = lane % 2 ? other : x[0], b = lane % 2 ? x[0] : other;
            index_rotate(a, b, cs[(lane - first) / 2], sn[(lane - first) / 2]);
            x[0] = kern_bf16_round(lane % 2 ? b : a);
        }
    } else {
#pragma unroll
        for (int j = 0; j < E; j += 2) {
            const int32_t n = lane * E + j - first;
            if (n < 0) continue;
            index_rotate(x[j], x[j + 1], cs[n / 2], sn[n / 2]);
            x[j] = kern_bf16_round(x[j]);
            x[j + 1] = kern_bf16_round(x[j + 1]);
        }
    }
#pragma unroll
    for (int h = 1; h < E; h *= 2)
#pragma unroll
        for (int j = 0; j < E; j++)
            if (!(j & h)) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
#pragma unroll
    for (int s = 1; s < 32; s *= 2)
#pragma unroll
        for (int j = 0; j < E; j++) {
            const float o = __shfl_xor_sync(~0u, x[j], s);
            x[j] = lane & s ? o - x[j] : x[j] + o;
        }
    float m = 0.0f;
#pragma unroll
    for (int j = 0; j < E; j++) {
        x[j] = kern_bf16_round(x[j] * hadamard_scale);
        m = fmaxf(m, fabsf(x[j])); /* passes over NaN */
    }
    if (p.fmt == KERN_IK_FP4) { /* blocks of 32 */
        const uint8_t c = kern_e2m1_scale_code(group_max(m, 32 / E));
        const float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
#pragma unroll
        for (int j = 0; j < E; j++) x[j] = dev_e2m1_decode(kern_e2m1_encode(x[j] * inv)) * s;
    } else if (p.fmt == KERN_IK_FP8) { /* the row is one block */
        const uint8_t c = kern_e4m3_scale_code(group_max(m, 32));
        const float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
#pragma unroll
        for (int j = 0; j < E; j++) x[j] = dev_e4m3_decode(kern_e4m3_encode(x[j] * inv)) * s;
    }
#pragma unroll
    for (int j = 0; j < E; j++) q[j] = kern_bf16_encode(x[j]);
}

#endif
