/* kernels/gemm/frame.cuh - the frame of codes_cuda.cu and wide_cuda.cu, products of many rows on
 * sm_90a.
 *
 * Roles    A block of threads has one for each multiprocessor and makes tiles, one after the other:
 *          one thread keeps a ring of stages filled by the copy engine, two warpgroups multiply
 *          from there. Two blocks of threads are a cluster; what both need each fetches half of,
 *          for both.
 * Ring     A stage is full when its bytes have come, empty when all warps that multiply, of both
 *          blocks, have said so (ring_read).
 * Not so   Rows of x quantized in the same launch, by warps that do not multiply while tiles before
 *          are under way: slower than a launch of its own (584 us, not 534, for wo_b at 8192 rows;
 *          wq_a 144, not 90). Rows of y quantized by these for the next product, while the next
 *          tile is under way: attention, wo_a and wo_b took as long with a launch between. Results
 *          stored by their threads, 16 bytes of a row or 8 turned by movmatrix, and not through
 *          shared memory: 2 to 5 % slower where it was to be told.
 */
#ifndef KERN_GEMM_FRAME_CUH
#define KERN_GEMM_FRAME_CUH

#include "kernels/cuda/tma.cuh"
#include "kernels/gemm/product.cuh"

enum {
    WARPS = 8, /* that multiply; four more, of which one thread works */
    THREADS = 32 * WARPS + 128,
    PAIR = 2, /* blocks of threads of a cluster */
    ALIGN = 1024,
};

template <int S> struct ring_bars {
    uint64_t full[S], empty[S];
};

/* What a cluster does next: tile t of rows of x times tile n of weight rows, `across` and `down` of
 * them in a group. Tiles that run at the same time are near each other in both directions, so that
 * few rows are read from memory for many tiles. */
struct tile_place {
    int32_t group, t, n;
};
static __device__ __forceinline__ struct tile_place tile_place_of(int32_t item, int32_t across,
                                                                  int32_t down)
{
    enum { BAND = 8 /* tiles of x that take turns with the same weights */ };
    struct tile_place l;
    l.group = item / (across * down);
    item -= l.group * across * down;
    const int32_t band = item / (BAND * down);
    item -= band * BAND * down;
    const int32_t width = across - band * BAND < BAND ? across - band * BAND : (int32_t)BAND;
    l.t = band * BAND + item % width;
    l.n = item / width;
    return l;
}

/* Clusters for so many tiles of them. */
static inline int64_t frame_clusters(const struct kern_stream *s, int64_t items)
{
    return items < s->n_sm / PAIR ? items : s->n_sm / PAIR;
}
/* In rounds of all clusters: a narrow tile takes half as long as a broad one and a little more. */
static inline bool frame_prefers_narrow(const struct kern_stream *s, int64_t narrow, int64_t broad)
{
    return cuda_ceil(narrow, s->n_sm / PAIR) * 6 < cuda_ceil(broad, s->n_sm / PAIR) * 10;
}
/* The kernel may begin early: frame_run() waits for what comes before. */
template <typename... P, typename... A>
static inline void frame_launch(struct kern_stream *s, void (*kernel)(P...), int64_t items,
                                size_t shared, A... args)
{
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = PAIR;
    attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)(frame_clusters(s, items) * PAIR));
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = shared;
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = cuda_early_launches ? 2 : 1;
    cudaLaunchKernelEx(&c, kernel, P(args)...);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* A warp has read a stage. */
static __device__ __forceinline__ void ring_read(uint64_t *empty)
{
    __syncwarp();
    if (threadIdx.x % 32 < PAIR) bar_arrive_at(empty, threadIdx.x % 32);
}

/* fill() by one thread, multiply() by the warps that do. */
template <int S, typename F, typename M>
static __device__ __forceinline__ void frame_run(struct ring_bars<S> *bars, const F &fill,
                                                 const M &multiply)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < S; i++)
            bar_init(&bars->full[i], 1), bar_init(&bars->empty[i], PAIR * WARPS);
        bar_init_done();
    }
    cluster_meet();
    cuda_await(); /* what makes rows of x, or reads where y goes, may have been still at work */
    if (threadIdx.x / 128 == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 32 * WARPS) fill();
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        multiply();
    }
    cluster_meet(); /* a block must be there while the other one writes to it */
}

#endif /* sm_90a */
#endif
