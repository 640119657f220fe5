/* kernels/moe/route_cuda.cu - the router: one warp per row, scores and keys of the row in shared memory.
 *
 * A key is a score plus bias as an unsigned number of the same order (NaN lowest, then -inf ...; 0 means
 * taken), so the best of a row is two warp-wide integer reductions: the highest key, then the lowest id
 * that has it. The scores' steps are the CPU's, their sums too (softmax: ascending), so ties are the
 * same ties.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/math.cuh"

enum { WARPS = 4 }; /* rows of a block */
static const unsigned ALL = 0xffffffffu;

/* Monotone; NaN is 1, everything else above it. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    const uint32_t u = kern_bits(x + 0.0f); /* -0 is 0 */
    return x != x ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}

static __device__ __forceinline__ void score_row(const struct kern_route &p, const float *z,
                                                 float *score, int lane)
{
    float m = -INFINITY, sum = 0.0f;
    if (p.score_fn == KERN_SCORE_SOFTMAX) {
        for (int32_t e = lane; e < p.E; e += 32) m = z[e] > m ? z[e] : m;
        m = dev_warp_max(m);
    }
    for (int32_t e = lane; e < p.E; e += 32) {
        float a = z[e];
        if (p.score_fn == KERN_SCORE_SQRTSOFTPLUS) a = sqrtf(dev_softplus(a));
        if (p.score_fn == KERN_SCORE_SIGMOID) a = dev_sigmoid(a);
        if (p.score_fn == KERN_SCORE_SOFTMAX) a = dev_exp(a - m);
        score[e] = a;
    }
    __syncwarp();
    if (p.score_fn != KERN_SCORE_SOFTMAX) return;
    for (int32_t e = 0; e < p.E; e++) sum += score[e];
    __syncwarp();
    for (int32_t e = lane; e < p.E; e += 32) score[e] /= sum;
    __syncwarp();
}

/* Takes the best k; returns the margin. */
static __device__ __forceinline__ float choose(const struct kern_route &p, const float *score,
                                               uint32_t *key, int32_t *ids, int lane)
{
    uint32_t last = 0, next = 0;
    int32_t last_id = 0, next_id = 0;
    for (int32_t e = lane; e < p.E; e += 32)
        key[e] = key_of(p.bias ? score[e] + p.bias[e] : score[e]);
    __syncwarp();
    for (int32_t i = 0; i <= p.k && i < p.E; i++) {
        uint32_t best = 0;
        int32_t id = p.E;
        for (int32_t e = lane; e < p.E; e += 32)
            if (key[e] > best) best = key[e], id = e;
        next = __reduce_max_sync(ALL, best);
        next_id = (int32_t)__reduce_min_sync(ALL, best == next ? (uint32_t)id : (uint32_t)p.E);
        if (i == p.k) break;
        last = next, last_id = next_id;
        if (lane == 0) ids[i] = next_id, key[next_id] = 0;
        __syncwarp();
    }
    if (p.k == p.E || last <= 1 || next <= 1) return INFINITY;
    const float a = p.bias ? score[last_id] + p.bias[last_id] : score[last_id];
    const float b = p.bias ? score[next_id] + p.bias[next_id] : score[next_id];
    return a - b;
}

static __device__ __forceinline__ void from_table(const struct kern_route &p, int64_t t,
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

static __global__ void __launch_bounds__(WARPS * 32) route_kernel(struct kern_route p)
{
    extern __shared__ float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + warp;
    if (t >= p.T) return;
    float *score = shared + (int64_t)warp * (2 * p.E + p.k), sum = 0.0f, margin = INFINITY;
    uint32_t *key = (uint32_t *)(score + p.E);
    int32_t *ids = (int32_t *)(key + p.E);
    score_row(p, p.logits + t * p.E, score, lane);
    if (p.tid2eid)
        from_table(p, t, ids, lane);
    else
        margin = choose(p, score, key, ids, lane);
    if (p.margin && lane == 0) p.margin[t] = margin;
    for (int32_t i = 0; i < p.k; i++) sum += ids[i] < 0 ? 0.0f : score[ids[i]];
    const bool divide = p.normalize && p.score_fn != KERN_SCORE_SOFTMAX;
    for (int32_t i = lane; i < p.k; i += 32) {
        const float w = ids[i] < 0 ? 0.0f : score[ids[i]];
        p.experts[t * p.k + i] = ids[i];
        p.weights[t * p.k + i] = ids[i] < 0 ? 0.0f : (divide ? w / sum : w) * p.scale;
    }
}

extern "C" int kern_route_cuda(struct kern_stream *s, const struct kern_route *p)
{
    if (p->T == 0) return 0;
    const size_t each = (size_t)(2 * (int64_t)p->E + p->k) * 4;
    if (each > (size_t)s->max_shared) return TOW_EINVAL;
    const int warps = each * WARPS <= 48 * 1024 ? WARPS : 1;
    CUDA_SHARED(route_kernel, s->max_shared);
    route_kernel<<<(unsigned)cuda_ceil(p->T, warps), warps * 32, each *(size_t)warps, s->cu>>>(*p);
    return cuda_done(s, "route");
}
