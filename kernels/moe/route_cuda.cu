/* kernels/moe/route_cuda.cu - the router: one warp per row (route.cuh). */
#include "kernels/moe/route.cuh"

enum { WARPS = 4 }; /* rows of a block */

/* Shared memory of a row, in words. */
static int64_t room_of(const struct kern_route *p)
{
    return 2 * (int64_t)p->E + p->k;
}

static __global__ void __launch_bounds__(WARPS * 32) route_kernel(struct kern_route p)
{
    extern __shared__ float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + warp;
    if (t >= p.T) return;
    const float *z = p.logits + t * p.E;
    float *score = shared + (int64_t)warp * (2 * p.E + p.k), margin = INFINITY;
    uint32_t *key = (uint32_t *)(score + p.E);
    int32_t *ids = (int32_t *)(key + p.E);
#pragma unroll 4
    for (int32_t e = lane; e < p.E; e += 32) score[e] = route_score(p.score_fn, z[e]);
    __syncwarp();
    route_scores(p, score, score, lane);
    if (p.tid2eid)
        route_from_table(p, t, ids, lane);
    else
        margin = route_choose(p, score, p.bias, key, ids, lane);
    route_store(p, t, score, ids, margin, lane);
}

extern "C" int kern_route_cuda(struct kern_stream *s, const struct kern_route *p)
{
    if (p->T == 0) return 0;
    const size_t each = (size_t)room_of(p) * 4;
    if (each > (size_t)s->max_shared) return TOW_EINVAL;
    const int warps = each * WARPS <= 48 * 1024 ? WARPS : 1;
    CUDA_SHARED(route_kernel, s->max_shared);
    route_kernel<<<(unsigned)cuda_ceil(p->T, warps), warps * 32, each *(size_t)warps, s->cu>>>(*p);
    return cuda_done(s, "route");
}
