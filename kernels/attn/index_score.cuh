/* kernels/attn/index_score.cuh - scores of all that rows of a batch see; for selection and ranks.
 *
 * Work     A list of tiles: for each block of R rows (of one sequence: a segment) runs of TILE
 *          entries. Every CTA of a fixed grid adds up how many there are, takes an equal and
 *          contiguous share, and walks it; lengths are read on the device and no CTA has more than
 *          one tile above another.
 */
#ifndef KERN_ATTN_INDEX_SCORE_CUH
#define KERN_ATTN_INDEX_SCORE_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/kv.cuh"

enum {
    INDEX_RUN = 16, /* entries, from a multiple of it on, of which the best score is told */
    INDEX_PAD = 64, /* a row's scores are written to a multiple of it */
};

/* Passed to kernels by value. */
struct index_score {
    const void *q;  /* [T, H, w] act */
    const void *wt; /* [T, H] act */
    float factor;
    struct cuda_kv kv;
    enum kern_ik_fmt fmt; /* of the keys */
    int64_t key_off;      /* their part in a page */
    int32_t companion;    /* 1: in the companion pages */
    struct cuda_batch b;
    int32_t H;
    enum kern_dtype act;
    int32_t row0, n_rows; /* rows to score; all below b.T */
    bool all;             /* also of rows that see no more than they keep */
    /* [n_rows, ld], ld a multiple of INDEX_PAD. Behind what a row sees NaN, to the next multiple;
     * what lies further on is nobody's. */
    float *out;
    int64_t ld;
    /* NULL (then there may be no NaN behind), or [n_rows, ld / INDEX_RUN]: the highest score of
     * each run, NaN if all are. */
    float *best;
};

void index_score_launch(struct kern_stream *s, const struct index_score *p);

/* By whole warpgroups, on a device that has them; false: not for this shape. It depends on the
 * model's sizes, never on the batch: other kernels add up in another order. */
bool index_score_wgmma(struct kern_stream *s, const struct index_score *p);

/* Entries that row t of sequence q sees. */
static __device__ __forceinline__ int32_t dev_visible(const struct cuda_kv &kv,
                                                      const struct cuda_seq &q, int32_t t)
{
    return (int32_t)((q.pos0 + (t - q.row0) + 1) / kv.y.ratio);
}

/* Rows t .. of one sequence within the block that ends before `end`. */
struct segment {
    int32_t n;     /* rows */
    int32_t tiles; /* of each */
    int32_t seen;  /* entries the last row sees */
    struct cuda_seq q;
};
template <int TILE>
static __device__ __forceinline__ struct segment segment_at(const struct index_score &p, int32_t t,
                                                            int32_t end)
{
    struct segment g;
    const int32_t i = p.b.row_seq[t];
    g.n = 1;
    g.tiles = g.seen = 0;
    if (i < 0) return g;
    g.q = p.b.seqs[i];
    const int32_t last = g.q.row0 + g.q.n_rows < end ? g.q.row0 + g.q.n_rows : end;
    g.n = last - t;
    g.seen = dev_visible(p.kv, g.q, last - 1);
    if (p.all || g.seen > g.q.topk) g.tiles = (g.seen + TILE - 1) / TILE;
    return g;
}
static __device__ __forceinline__ int32_t block_end(const struct index_score &p, int32_t b, int R)
{
    const int32_t end = p.row0 + p.n_rows, e = p.row0 + (b + 1) * R;
    return e < end ? e : end;
}
template <int TILE>
static __device__ int32_t block_tiles(const struct index_score &p, int32_t b, int R)
{
    int32_t tiles = 0;
    const int32_t end = block_end(p, b, R);
    for (int32_t t = p.row0 + b * R; t < end;) {
        const struct segment g = segment_at<TILE>(p, t, end);
        tiles += g.tiles;
        t += g.n;
    }
    return tiles;
}

struct share {
    int32_t block, tile; /* where it begins: so many tiles into a block */
    int32_t tiles;
};
/* This CTA's share of all tiles. */
template <int TILE, int THREADS>
static __device__ struct share find_share(const struct index_score &p, int R)
{
    constexpr int WARPS = THREADS / 32;
    __shared__ int32_t warp_sums[WARPS];
    __shared__ struct share found;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t n_blocks = (p.n_rows + R - 1) / R, per = (n_blocks + THREADS - 1) / THREADS;
    const int32_t b0 = threadIdx.x * per, b1 = b0 + per < n_blocks ? b0 + per : n_blocks;
    int32_t mine = 0;
    for (int32_t b = b0; b < b1; b++) mine += block_tiles<TILE>(p, b, R);
    int32_t sum = mine;
    for (int d = 1; d < 32; d *= 2) {
        const int32_t o = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += o;
    }
    if (lane == 31) warp_sums[warp] = sum;
    if (threadIdx.x == 0) found.block = found.tile = found.tiles = 0;
    __syncthreads();
    int32_t before = sum - mine, total = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    const int32_t first = (int32_t)((int64_t)total * blockIdx.x / gridDim.x);
    const int32_t last = (int32_t)((int64_t)total * (blockIdx.x + 1) / gridDim.x);
    if (first < last && first >= before && first < before + mine) {
        int32_t b = b0, at = before;
        for (int32_t n; at + (n = block_tiles<TILE>(p, b, R)) <= first; b++) at += n;
        found.block = b;
        found.tile = first - at;
        found.tiles = last - first;
    }
    __syncthreads();
    return found;
}

/* max(x, 0); NaN stays. */
static __device__ __forceinline__ float dev_positive(float x)
{
    float r;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(r) : "f"(x));
    return r;
}

#endif
