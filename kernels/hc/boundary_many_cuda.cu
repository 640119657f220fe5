/* kernels/hc/boundary_many_cuda.cu - the boundary of many rows (sm_90a): clusters of sixteen blocks
 * of threads go through tiles of sixteen rows, see boundary_row.cuh.
 *
 * Streams lie in a ring of shared memory from the copy engine's load to the collapse, and are
 * expanded in place. Blocks tell each other twice what they need of a tile, and nobody waits: in
 * the time of one tile four are worked on, each in another state.
 *
 *     expand    tile i: y (+ routed), new streams, which leave by the copy engine
 *     multiply  tile i: the products of all warps' steps
 *     norm      tile i - 3: x, to memory
 *     collapse  tile i - 2: x, and its squares, to all blocks
 *     send      tile i: warp k adds up row k and sends it to block k, its owner
 *
 * Beside the warps that have a row each:
 *
 *     own       one warp adds up the sums of all blocks for the own row of each tile: pre, to all;
 *               and post and comb, for a row in each lane when there are 32, because this takes as
 *               long as a good part of a tile
 *     scales    one warp adds up the squares of all blocks for the norm
 *     copy      one thread fills slots that are free and stores streams; its warp waits for what
 *               comes, for all, as a wait takes 150 cycles even where there is nothing to wait for
 *
 * What a block sends, the other has read before it lets the sender go on: sums of tile i + 2 come
 * after the collapse of tile i, which needs pre of all owners. So two buffers are enough; squares
 * of tile i + 4 come after sums of that tile from all blocks, which have read those of tile i.
 */
#include "kernels/cuda/wgmma.cuh"
#include "kernels/hc/boundary_row.cuh"

enum {
    OWN_WARP = WARPS,
    NORM_WARP,
    COPY_WARP,
    THREADS = 32 * (WARPS + 4), /* a warpgroup for these */
    BOX_BYTES = ROWS * TILE_BYTES,
    BOXES = COLUMNS * 2 / TILE_BYTES, /* of a stream and of y */
    STREAM_BYTES = BOXES * BOX_BYTES,
    ROUTED_BYTES = 2 * STREAM_BYTES,
    H_BYTES = STREAMS * STREAM_BYTES,
    SLOTS = 4,
    Y_SLOTS = 2, /* y, routed, post, comb: free when expanded */
    SUM_BUFFERS = 2,
    SUMS_BYTES = BLOCKS * SUMS * 4,
    SQUARE_BUFFERS = 4,
    COLLAPSE_AFTER = 2, /* tiles */
    NORM_AFTER = 3,
    ALIGN = 1024
};

struct tile_memory {
    union {
        struct {
            uint8_t h[SLOTS][H_BYTES], y[Y_SLOTS][STREAM_BYTES], routed[Y_SLOTS][ROUTED_BYTES];
        };
        struct weight_rows fn; /* before */
    };
    struct products products[WARPS];
    float post[Y_SLOTS][ROWS][STREAMS], comb[Y_SLOTS][ROWS][COMB];
    float sums[SUM_BUFFERS][SUMS][BLOCKS + 4];   /* of the own row, by all blocks */
    float pre[SUM_BUFFERS][ROWS][STREAMS];       /* by the rows' owners */
    float squares[SQUARE_BUFFERS][ROWS][BLOCKS]; /* of x, by all blocks */
    float scales[SQUARE_BUFFERS][ROWS];          /* of the norm */
    uint4 x[ROWS][32];                           /* pieces, until they are normed */
    float kept[32][GATED + 1];                   /* of own rows, for post and comb */
    float norm[COLUMNS];
    uint64_t fn_in[STREAMS], in[SLOTS]; /* in: what a tile is made of */
    uint64_t sums_in[SUM_BUFFERS], pre_in[SUM_BUFFERS];
    uint64_t squares_in[SQUARE_BUFFERS], scales_in[SQUARE_BUFFERS];
};
static_assert(sizeof(struct tile_memory) + ALIGN <= 227 * 1024, "what sm_90 has");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Where a block and a thread are. */
struct place {
    int rank, warp, lane;
    int32_t first, step;
    uint32_t n; /* tiles of the cluster: first + i step, i < n */
    int own;    /* the lane's piece of the warp's row in a stream or y */
};
static __device__ __forceinline__ int32_t row_of(const struct place &at, uint32_t i)
{
    return (at.first + (int32_t)i * at.step) * ROWS;
}

/* All warps that have rows, and the one that copies. */
static __device__ __forceinline__ void meet(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"(32 * (WARPS + 1)) : "memory");
}

/* ------------------------------------------------------------------ copy */

static __device__ __forceinline__ void fill_h(const struct place &at, const CUtensorMap &h,
                                              struct tile_memory *m, uint32_t i)
{
    if (i >= at.n) return;
    uint64_t *const in = &m->in[i % SLOTS];
    bar_expect(in, H_BYTES);
    parts_load(m->h[i % SLOTS], &h, in, at.rank * COLUMNS * 2, row_of(at, i));
}
template <bool ROUTED>
static __device__ __forceinline__ void
fill_y(const struct kern_hc_boundary &p, const struct place &at, const CUtensorMap &y,
       const CUtensorMap &routed, struct tile_memory *m, uint32_t i)
{
    if (i >= at.n) return;
    const uint32_t slot = i % Y_SLOTS;
    const int32_t t = row_of(at, i), rows = p.T - t < ROWS ? p.T - t : (int)ROWS;
    const int post = rows * (int)sizeof **m->post, comb = rows * (int)sizeof **m->comb;
    uint64_t *const in = &m->in[i % SLOTS];
    bar_expect(in, STREAM_BYTES + (ROUTED ? ROUTED_BYTES : 0) + post + comb);
    parts_load(m->y[slot], &y, in, at.rank * COLUMNS * 2, t);
    if (ROUTED) parts_load(m->routed[slot], &routed, in, at.rank * COLUMNS * 4, t);
    bulk_load(m->post[slot], p.post + (int64_t)t * STREAMS, post, in);
    bulk_load(m->comb[slot], p.comb + (int64_t)t * COMB, comb, in);
}
template <bool ROUTED>
static __device__ __forceinline__ void
copy_all(const struct kern_hc_boundary &p, const struct place &at, const CUtensorMap &h,
         const CUtensorMap &y, const CUtensorMap &routed, struct tile_memory *m)
{
    const bool copies = at.lane == 0;
    if (copies) {
        for (uint32_t i = 0; i < SLOTS; i++) fill_h(at, h, m, i);
        for (uint32_t i = 0; i < Y_SLOTS && p.y; i++) fill_y<ROUTED>(p, at, y, routed, m, i);
    }
    bar_wait(&m->in[0], 0);
    meet(); /* tile 0 is there */
    for (uint32_t i = 0; i < at.n + NORM_AFTER; i++) {
        const uint32_t late = i - COLLAPSE_AFTER, last = i - NORM_AFTER;
        if (late < at.n) {
            uint64_t *const in = &m->pre_in[late % SUM_BUFFERS];
            bar_wait(in, late / SUM_BUFFERS & 1);
            if (copies) bar_expect(in, (int)sizeof *m->pre);
        }
        if (last < at.n) bar_wait(&m->scales_in[last % SQUARE_BUFFERS], last / SQUARE_BUFFERS & 1);
        __syncwarp();
        meet(); /* tile i is expanded; what the two before need is there */
        if (copies && i < at.n && p.y) {
            parts_store(&h, m->h[i % SLOTS], at.rank * COLUMNS * 2, row_of(at, i));
            tile_store_commit();
            fill_y<ROUTED>(p, at, y, routed, m, i + Y_SLOTS);
        }
        if (i + 1 < at.n) bar_wait(&m->in[(i + 1) % SLOTS], (i + 1) / SLOTS & 1);
        __syncwarp();
        meet(); /* tile i - 2 is collapsed, the next one there */
        if (copies && i >= COLLAPSE_AFTER) {
            tile_store_wait_read<COLLAPSE_AFTER>();
            fill_h(at, h, m, late + SLOTS);
        }
    }
    if (copies) tile_store_wait();
}

/* ------------------------------------------------------------------ own rows */

/* Lanes have the sums as begin_gates() has them, behind them those of pre and the squares. */
static __device__ __forceinline__ void own_rows(const struct kern_hc_boundary &p,
                                                const struct place &at, struct tile_memory *m)
{
    const int lane = at.lane, j = lane - GATED;
    const int mine = j < 0 ? gated_of(lane) + STREAMS : j < STREAMS ? j : (int)MIXES;
    float scale = 0.0f, base = 0.0f;
    if (j >= 0 && j < STREAMS) scale = p.scale[0], base = p.base[j];
    if (j < 0 && !p.head) scale = p.scale[lane < COMB ? 2 : 1], base = p.base[mine];
    for (uint32_t i = 0; i < at.n; i++) {
        const uint32_t buffer = i % SUM_BUFFERS;
        bar_wait(&m->sums_in[buffer], i / SUM_BUFFERS & 1);
        const float sum = sum_of_blocks(m->sums[buffer][mine]);
        const float squares = __shfl_sync(0xffffffffu, sum, GATED + STREAMS);
        const float rs = inverse_rms(squares, STREAMS * D, p.norm_eps);
        const float x = pre_of(sum, rs, scale, base, p.hc_eps);
        float pre[STREAMS];
#pragma unroll
        for (int k = 0; k < STREAMS; k++) pre[k] = __shfl_sync(0xffffffffu, x, GATED + k);
        if (lane == 0) bar_expect(&m->sums_in[buffer], SUMS_BYTES);
        if (lane < BLOCKS)
            put_at(dev_shared_of(m->pre[buffer][at.rank], lane),
                   dev_shared_of(&m->pre_in[buffer], lane),
                   make_float4(pre[0], pre[1], pre[2], pre[3]));
        if (p.head) continue;
        const float c = begin_gates(p, sum, rs, scale, base, lane);
        if (lane < GATED) m->kept[i % 32][lane] = c;
        if (i % 32 < 31 && i < at.n - 1) continue;
        __syncwarp();
        const int32_t t = row_of(at, i - i % 32 + (uint32_t)lane) + at.rank;
        if ((uint32_t)lane <= i % 32 && t < p.T) finish_gates(p, m->kept[lane], t);
        __syncwarp();
    }
}

/* ------------------------------------------------------------------ scales */

/* A lane a row. */
static __device__ __forceinline__ void norm_scales(const struct kern_hc_boundary &p,
                                                   const struct place &at, struct tile_memory *m)
{
    const int row = at.lane % ROWS;
    for (uint32_t i = 0; i < at.n; i++) {
        const uint32_t buffer = i % SQUARE_BUFFERS;
        bar_wait(&m->squares_in[buffer], i / SQUARE_BUFFERS & 1);
        const float squares = sum_of_far_blocks(m->squares[buffer][row]);
        m->scales[buffer][row] = inverse_rms(squares, D, p.norm_eps);
        if (at.lane == 0) bar_expect(&m->squares_in[buffer], (int)sizeof *m->squares);
        bar_arrive(&m->scales_in[buffer]);
    }
}

/* ------------------------------------------------------------------ rows */

template <bool ROUTED>
static __device__ __forceinline__ void expand_row(const struct place &at, struct tile_memory *m,
                                                  uint32_t i)
{
    const uint32_t slot = i % Y_SLOTS;
    uint8_t *const own = m->h[i % SLOTS] + at.own;
    uint4 h[STREAMS], y = *(const uint4 *)(m->y[slot] + at.own);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) h[j] = *(const uint4 *)(own + j * STREAM_BYTES);
    if (ROUTED) {
        const uint8_t *const sum = m->routed[slot] + at.lane / 4 * BOX_BYTES + at.warp * TILE_BYTES;
        const int piece = at.lane % 4 * 2, turn = at.warp & 7;
        y = add_routed(y, *(const float4 *)(sum + (piece ^ turn) * 16),
                       *(const float4 *)(sum + ((piece + 1) ^ turn) * 16));
    }
    const float4 post = *(const float4 *)m->post[slot][at.warp];
    float4 comb[STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
        comb[j] = *(const float4 *)&m->comb[slot][at.warp][STREAMS * j];
    expand8(post, comb, y, h);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) *(uint4 *)(own + j * STREAM_BYTES) = h[j];
    wgmma_shared();
}
static __device__ __forceinline__ void multiply_step(const struct place &at, struct tile_memory *m,
                                                     const struct weights &w, uint32_t i)
{
    const int step = at.warp / PARTS, row = at.lane % ROWS;
    const uint8_t *const from = m->h[i % SLOTS] + step / 2 * BOX_BYTES + row * TILE_BYTES;
    multiply(
        w, at.warp % PARTS, at.lane,
        [&](int j, int piece) {
            return from + j * STREAM_BYTES + ((step % 2 * 4 + piece) ^ (row & 7)) * 16;
        },
        &m->products[at.warp]);
}
static __device__ __forceinline__ void send_sums(const struct place &at, struct tile_memory *m,
                                                 uint32_t i)
{
    const uint32_t buffer = i % SUM_BUFFERS;
    if (at.lane < SUMS)
        put_at(dev_shared_of(&m->sums[buffer][at.lane][at.rank], at.warp),
               dev_shared_of(&m->sums_in[buffer], at.warp),
               sum_of_steps(m->products, at.lane, at.warp));
}
static __device__ __forceinline__ void collapse_row(const struct place &at, struct tile_memory *m,
                                                    uint32_t i)
{
    const uint32_t buffer = i % SUM_BUFFERS, to = i % SQUARE_BUFFERS;
    const uint8_t *const own = m->h[i % SLOTS] + at.own;
    uint4 h[STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) h[j] = *(const uint4 *)(own + j * STREAM_BYTES);
    const float4 v = *(const float4 *)m->pre[buffer][at.warp];
    const float pre[STREAMS] = {v.x, v.y, v.z, v.w};
    const uint4 x = collapse8(h, pre);
    m->x[at.warp][at.lane] = x;
    const float squares = dev_pieces_sum(add_squares(x, 0.0f));
    if (at.lane < BLOCKS)
        put_at(dev_shared_of(&m->squares[to][at.warp][at.rank], at.lane),
               dev_shared_of(&m->squares_in[to], at.lane), squares);
}
static __device__ __forceinline__ void norm_row(const struct kern_hc_boundary &p,
                                                const struct place &at, struct tile_memory *m,
                                                uint32_t i)
{
    const uint32_t buffer = i % SQUARE_BUFFERS;
    const int32_t t = row_of(at, i) + at.warp;
    const float4 *const w = (const float4 *)(m->norm + VEC * at.lane);
    uint4 x = m->x[at.warp][at.lane];
    if (p.norm.data) x = norm8(x, w[0], w[1], m->scales[buffer][at.warp]);
    if (t < p.T)
        *(uint4 *)((uint16_t *)p.x + (int64_t)t * D + at.rank * COLUMNS + VEC * at.lane) = x;
}

template <bool ROUTED>
static __device__ __forceinline__ void make_rows(const struct kern_hc_boundary &p,
                                                 const struct place &at, struct tile_memory *m,
                                                 const struct weights &fn)
{
    meet();
#pragma unroll 1
    for (uint32_t i = 0; i < at.n + NORM_AFTER; i++) {
        const bool begins = i < at.n;
        const uint32_t late = i - COLLAPSE_AFTER;
        if (begins && p.y) expand_row<ROUTED>(at, m, i);
        meet();
        /* Half of the warps do this the other way round: so the matrix unit and the others work
         * side by side. */
        const bool first = at.warp / 4 % 2 == 0;
        if (begins && first) multiply_step(at, m, fn, i);
        if (i >= NORM_AFTER) norm_row(p, at, m, i - NORM_AFTER);
        if (late < at.n) collapse_row(at, m, late);
        if (begins && !first) multiply_step(at, m, fn, i);
        meet();
        if (begins) send_sums(at, m, i);
    }
}

template <bool ROUTED>
static __global__ void __launch_bounds__(THREADS, 1)
    many_kernel(const __grid_constant__ struct kern_hc_boundary p,
                const __grid_constant__ CUtensorMap h, const __grid_constant__ CUtensorMap y,
                const __grid_constant__ CUtensorMap routed)
{
    extern __shared__ __align__(16) uint8_t memory[];
    struct tile_memory *const m =
        (struct tile_memory *)(memory + (-dev_shared(memory) & (ALIGN - 1)));
    struct place at;
    at.rank = cluster_rank();
    /* From a neighbour, or each use asks for the thread's number anew, and waits for that. */
    at.warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    at.lane = __shfl_sync(0xffffffffu, (int)threadIdx.x & 31, (int)threadIdx.x & 31);
    at.first = (int32_t)blockIdx.x / BLOCKS, at.step = (int32_t)gridDim.x / BLOCKS;
    at.n = (uint32_t)(((p.T + ROWS - 1) / ROWS - at.first + at.step - 1) / at.step);
    at.own = at.lane / 8 * BOX_BYTES + at.warp * TILE_BYTES + ((at.lane ^ at.warp) & 7) * 16;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STREAMS; i++) bar_init(&m->fn_in[i], 1);
#pragma unroll
        for (int i = 0; i < SLOTS; i++) bar_init(&m->in[i], p.y ? 2 : 1);
#pragma unroll
        for (int i = 0; i < SUM_BUFFERS; i++)
            bar_init(&m->sums_in[i], 1), bar_init(&m->pre_in[i], 1);
#pragma unroll
        for (int i = 0; i < SQUARE_BUFFERS; i++)
            bar_init(&m->squares_in[i], 1), bar_init(&m->scales_in[i], 32);
        bar_init_done();
#pragma unroll
        for (int i = 0; i < SUM_BUFFERS; i++) {
            bar_expect(&m->sums_in[i], SUMS_BYTES);
            bar_expect(&m->pre_in[i], (int)sizeof *m->pre);
        }
#pragma unroll
        for (int i = 0; i < SQUARE_BUFFERS; i++)
            bar_expect(&m->squares_in[i], (int)sizeof *m->squares);
    }
    __syncthreads();
    cluster_arrive(); /* all must have begun before one writes to another */
    cuda_hurry();
    fetch_weights(p.fn, at.rank, &m->fn, m->fn_in);
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS)
        m->norm[i] = p.norm.data ? dev_vec(p.norm, at.rank * COLUMNS + i) : 0.0f;
    if (at.warp < WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        struct weights fn;
        split_weights(p.fn, &m->fn, at.warp, at.lane, m->fn_in, &fn);
        cuda_await();
        cluster_wait();
        __syncthreads(); /* the ring is free */
        make_rows<ROUTED>(p, at, m, fn);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        cuda_await();
        cluster_wait();
        __syncthreads();
        if (at.warp == OWN_WARP) own_rows(p, at, m);
        if (at.warp == NORM_WARP) norm_scales(p, at, m);
        if (at.warp == COPY_WARP) copy_all<ROUTED>(p, at, h, y, routed, m);
    }
}

#else

template <bool ROUTED>
static __global__ void many_kernel(const __grid_constant__ struct kern_hc_boundary p,
                                   const __grid_constant__ CUtensorMap h,
                                   const __grid_constant__ CUtensorMap y,
                                   const __grid_constant__ CUtensorMap routed)
{
}

#endif

template <bool ROUTED> static bool launch(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    static struct cuda_clusters found[CUDA_MAX_DEVICES];
    const size_t shared = sizeof(struct tile_memory) + ALIGN;
    const int most = cuda_hc_clusters(s, (const void *)many_kernel<ROUTED>, THREADS, shared, found);
    const int64_t tiles = cuda_ceil(p->T, ROWS), clusters = tiles < most ? tiles : most;
    CUtensorMap h, y, routed = {};
    if (most == 0 || !cuda_parts_map(&h, p->h, p->T, STREAMS, D * 2, ROWS, COLUMNS * 2) ||
        !cuda_parts_map(&y, p->y ? p->y : p->x, p->T, 1, D * 2, ROWS, COLUMNS * 2) ||
        (ROUTED && !cuda_parts_map(&routed, p->routed, p->T, 1, D * 4, ROWS, COLUMNS * 4)))
        return false;
    cuda_hc_launch(s, many_kernel<ROUTED>, (unsigned)clusters, THREADS, shared, *p, h, y, routed);
    return true;
}

bool cuda_hc_boundary_many(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    return p->routed ? launch<true>(s, p) : launch<false>(s, p);
}
