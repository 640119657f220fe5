/* kernels/moe/route.cuh - one row of the router by one warp, scores and keys of the row in shared
 * memory.
 *
 * A key is a score plus bias as an unsigned number of the same order (NaN lowest, then -inf ...; 0
 * means taken), so the best of a row is two warp-wide integer reductions: the highest key, then the
 * lowest id that has it. The scores' steps are the CPU's, their sums too (softmax: ascending), so
 * ties are the same ties.
 */
#ifndef KERN_MOE_ROUTE_CUH
#define KERN_MOE_ROUTE_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/math.cuh"

/* Monotone; NaN is 1, everything else above it. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    const uint32_t u = kern_bits(x + 0.0f); /* -0 is 0 */
    return x != x ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Of a logit by itself: softmax's is not known without the row. */
static __device__ __forceinline__ float route_score(enum kern_score fn, float a)
{
    if (fn == KERN_SCORE_SQRTSOFTPLUS) return sqrtf(dev_softplus(a));
    return fn == KERN_SCORE_SIGMOID ? dev_sigmoid(a) : a;
}
/* Scores of a row from what route_score() made of its logits; z may be score. */
static __device__ __forceinline__ void route_scores(const struct kern_route &p, const float *z,
                                                    float *score, int lane)
{
    float m = -INFINITY, sum = 0.0f;
    if (p.score_fn == KERN_SCORE_SOFTMAX) {
        for (int32_t e = lane; e < p.E; e += 32) m = z[e] > m ? z[e] : m;
        m = dev_warp_max(m);
        for (int32_t e = lane; e < p.E; e += 32) score[e] = dev_exp(z[e] - m);
        __syncwarp();
        for (int32_t e = 0; e < p.E; e++) sum += score[e];
        __syncwarp();
        for (int32_t e = lane; e < p.E; e += 32) score[e] /= sum;
    }
    __syncwarp();
}

/* The best k to ids, by keys in shared memory; returns the margin. Loads come eight at a time: one
 * by one each would be waited for. */
static __device__ __forceinline__ float route_choose(const struct kern_route &p, const float *score,
                                                     const float *bias, uint32_t *key, int32_t *ids,
                                                     int lane)
{
    uint32_t last = 0, next = 0;
    int32_t last_id = 0, next_id = 0;
#pragma unroll 8
    for (int32_t e = lane; e < p.E; e += 32) key[e] = key_of(bias ? score[e] + bias[e] : score[e]);
    __syncwarp();
    for (int32_t i = 0; i <= p.k && i < p.E; i++) {
        uint32_t best = 0;
        int32_t id = p.E;
#pragma unroll 8
        for (int32_t e = lane; e < p.E; e += 32) {
            const uint32_t k = key[e];
            id = k > best ? e : id;
            best = k > best ? k : best;
        }
        next = __reduce_max_sync(0xffffffffu, best);
        next_id =
            (int32_t)__reduce_min_sync(0xffffffffu, best == next ? (uint32_t)id : (uint32_t)p.E);
        if (i == p.k) break;
        last = next, last_id = next_id;
        if (lane == 0) ids[i] = next_id, key[next_id] = 0;
        __syncwarp();
    }
    if (p.k == p.E || last <= 1 || next <= 1) return INFINITY;
    const float a = bias ? score[last_id] + bias[last_id] : score[last_id];
    const float b = bias ? score[next_id] + bias[next_id] : score[next_id];
    return a - b;
}

/* The table's experts of row t. */
static __device__ __forceinline__ void route_from_table(const struct kern_route &p, int64_t t,
                                                        int32_t *ids, int lane)
{
    const int32_t id = p.ids[t];
    for (int32_t i = lane; i < p.k; i += 32) {
        int64_t e = -1;
        if (id >= 0 && id < p.V) {
            const int64_t at = (int64_t)id * p.k + i;
            e = p.tid_bytes == 8 ? ((const int64_t *)p.tid2eid)[at]
                                 : ((const int32_t *)p.tid2eid)[at];
        }
        ids[i] = e >= 0 && e < p.E ? (int32_t)e : -1;
    }
    __syncwarp();
}

/* What is stored of row t. */
static __device__ __forceinline__ void route_store(const struct kern_route &p, int64_t t,
                                                   const float *score, const int32_t *ids,
                                                   float margin, int lane)
{
    float sum = 0.0f;
    if (p.margin && lane == 0) p.margin[t] = margin;
#pragma unroll 8
    for (int32_t i = 0; i < p.k; i++) sum += ids[i] < 0 ? 0.0f : score[ids[i]];
    const bool divide = p.normalize && p.score_fn != KERN_SCORE_SOFTMAX;
    for (int32_t i = lane; i < p.k; i += 32) {
        const float w = ids[i] < 0 ? 0.0f : score[ids[i]];
        p.experts[t * p.k + i] = ids[i];
        p.weights[t * p.k + i] = ids[i] < 0 ? 0.0f : (divide ? w / sum : w) * p.scale;
    }
}

#endif
