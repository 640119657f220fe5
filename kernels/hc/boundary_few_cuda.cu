/* kernels/hc/boundary_few_cuda.cu - the boundary of few rows (sm_90a): sixteen by a cluster of
 * sixteen blocks of threads, see boundary_row.cuh.
 *
 * One row is a chain of latencies, so there is as little of it as can be: a warp a row, a lane a
 * piece, which stays in registers from its load to the end; what blocks tell each other goes from
 * registers straight to the other's shared memory, counted by a barrier there. Before the kernel
 * ahead of it has ended the weights are on their way to shared memory all at once (waiting for one
 * load after the other took three times as long), and from there become operands in registers:
 * sixteen warps have a step and a part of the weights each.
 *
 *     row      y (+ routed), new streams, their squares, which go to all blocks
 *     mixes    the products of a step, from shared memory, by the matrix unit; summed by a thread
 *              for each mix and row, which sends the sum to all blocks, or to the one that makes
 *              the row's post and comb
 *     row      adds up what came: pre, x, its squares, which go to all blocks; norm
 *     gates    a warp, one that has no row if there is one, makes post and comb of the row that has
 *              the block's number
 */
#include "kernels/cuda/mma.cuh"
#include "kernels/hc/boundary_row.cuh"

enum {
    ROWS = 16,
    WARPS = ROWS,
    THREADS = 32 * WARPS,
    TILES = MIXES / 8,                      /* of eight mixes */
    ROW_BYTES = STREAMS * COLUMNS * 2 + 64, /* the gap: two rows of a step lie in all banks */
    SUM_LD = ROWS + 4                       /* spread over banks */
};
static_assert(WARPS == PARTS * HALVES * STEPS && COLUMNS == 32 * VEC, "shares of warps and lanes");

struct tile_memory {
    uint8_t fn[MIXES][STREAMS][COLUMNS * 4]; /* as it is in memory, f32 or bf16 */
    uint8_t h[ROWS][ROW_BYTES];
    float products[WARPS][MIXES][SUM_LD];
    float sums[BLOCKS][SENT][ROWS]; /* by all blocks: mixes of pre, squares of the streams */
    float squares[BLOCKS][ROWS];    /* of x, by all blocks */
    float gated[BLOCKS][GATED];     /* of the block's own row */
    float kept[GATED];
    uint64_t fn_in, sums_in, squares_in;
};
static_assert(sizeof(struct tile_memory) <= 227 * 1024, "what sm_90 has");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Weights of a step, one of their parts, as second operands: of stream j, instruction i, tile n. */
struct weights {
    uint32_t w[STREAMS][2][TILES][2];
};

/* By the first threads, each a row's share of a stream. */
static __device__ __forceinline__ void fetch_weights(const struct kern_weight &fn, int rank,
                                                     struct tile_memory *m)
{
    const int size = fn.fmt == KERN_W_F32 ? 4 : 2, n = threadIdx.x / STREAMS;
    const int j = threadIdx.x % STREAMS;
    if (threadIdx.x == 0) bar_expect(&m->fn_in, fn.n * STREAMS * COLUMNS * size);
    if (n < fn.n)
        bulk_load(m->fn[n][j],
                  (const uint8_t *)fn.data + n * fn.row_bytes +
                      (int64_t)(j * D + rank * COLUMNS) * size,
                  COLUMNS * size, &m->fn_in);
}
/* Zeros where fn has no such row. */
static __device__ __forceinline__ void split_weights(const struct kern_weight &fn,
                                                     const struct tile_memory *m, int step,
                                                     int part, int lane, struct weights *to)
{
    const int g = lane / 4, column = step * STEP + VEC * (lane % 4);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int j = 0; j < STREAMS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint8_t *const row = m->fn[8 * n + g][j];
                const int at = column + 4 * i;
                float4 u = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (8 * n + g < fn.n)
                    u = fn.fmt == KERN_W_F32 ? *(const float4 *)((const float *)row + at)
                                             : widen4(*(const uint2 *)((const uint16_t *)row + at));
                const uint32_t a = split2(&u.x, &u.y), b = split2(&u.z, &u.w);
                to->w[j][i][n][0] = part ? split2(&u.x, &u.y) : a;
                to->w[j][i][n][1] = part ? split2(&u.z, &u.w) : b;
            }
}

/* Products of the warp's step with its part of the weights, for all mixes and rows. */
static __device__ __forceinline__ void multiply(const struct tile_memory *m,
                                                const struct weights &w, int step, int lane,
                                                float (*to)[SUM_LD])
{
    const int g = lane / 4, c = lane % 4;
    float acc[TILES][4];
    uint4 x[STREAMS][2];
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            x[j][r] = *(const uint4 *)(m->h[g + 8 * r] + (j * COLUMNS + step * STEP + VEC * c) * 2);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 u = x[j][0], v = x[j][1];
            const uint32_t a[4] = {i ? u.z : u.x, i ? v.z : v.x, i ? u.w : u.y, i ? v.w : v.y};
#pragma unroll
            for (int n = 0; n < TILES; n++) dev_mma(acc[n], a, w.w[j][i][n]);
        }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) to[8 * n + 2 * c + e % 2][g + e / 2 * 8] = acc[n][e];
}
/* The sum of a mix for a row: parts, steps, halves. */
static __device__ __forceinline__ float sum_of_steps(const struct tile_memory *m, int mix, int row)
{
    float half[HALVES];
#pragma unroll
    for (int k = 0; k < HALVES; k++)
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int warp = (k * STEPS + s) * PARTS;
            const float v = m->products[warp][mix][row] + m->products[warp + 1][mix][row];
            half[k] = s > 0 ? half[k] + v : v;
        }
    return half[0] + half[1];
}
/* By lanes 0 to 15, to all blocks: a value that all lanes have. */
static __device__ __forceinline__ void tell_all(const float *at, uint64_t *bar, float v, int lane)
{
    if (lane < BLOCKS) put_at(dev_shared_of(at, lane), dev_shared_of(bar, lane), v);
}

/* By one warp, when all sums have come. */
static __device__ __forceinline__ void
make_gates(const struct kern_hc_boundary &p, struct tile_memory *m, int rank, int32_t t, int lane)
{
    const int mix = gated_of(lane);
    const float scale = p.scale[lane < COMB ? 2 : 1], base = p.base[STREAMS + mix];
    const float squares = sum_of_blocks<BLOCKS>(m->sums[lane % BLOCKS][STREAMS][rank]);
    const float rs = inverse_rms(squares, STREAMS * D, p.norm_eps);
    const float sum = sum_by_one(&m->gated[0][mix], GATED);
    const float c = begin_gates(p, sum, rs, scale, base, lane);
    if (lane < GATED) m->kept[lane] = c;
    __syncwarp();
    if (lane == 0) finish_gates(p, m->kept, t);
}

/* Row `warp` of the tile, which is row t: the streams, expanded, in memory and shared memory. */
static __device__ __forceinline__ void expand_row(const struct kern_hc_boundary &p,
                                                  struct tile_memory *m, int warp, int lane,
                                                  int64_t t, int column, uint4 h[STREAMS])
{
    uint16_t *const at = (uint16_t *)p.h + t * (STREAMS * D) + column;
#pragma unroll
    for (int j = 0; j < STREAMS; j++) h[j] = *(const uint4 *)(at + j * D);
    if (p.y) {
        uint4 y = *(const uint4 *)((const uint16_t *)p.y + t * D + column);
        float4 comb[STREAMS];
        const float4 post = ((const float4 *)p.post)[t];
#pragma unroll
        for (int j = 0; j < STREAMS; j++) comb[j] = ((const float4 *)p.comb)[t * STREAMS + j];
        if (p.routed) {
            const float4 *const sum = (const float4 *)(p.routed + t * D + column);
            y = add_routed(y, sum[0], sum[1]);
        }
        expand8(post, comb, y, h);
#pragma unroll
        for (int j = 0; j < STREAMS; j++) *(uint4 *)(at + j * D) = h[j];
    }
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
        *(uint4 *)(m->h[warp] + (j * COLUMNS + VEC * lane) * 2) = h[j];
}
/* A mix of a row by each of the first threads: for pre to all blocks, others to the row's. */
static __device__ __forceinline__ void send_mixes(struct tile_memory *m, int rank, int rows,
                                                  bool head)
{
    const int mix = threadIdx.x / ROWS, row = threadIdx.x % ROWS;
    if (row >= rows || mix >= (head ? STREAMS : MIXES)) return;
    const float v = sum_of_steps(m, mix, row);
    if (mix >= STREAMS) {
        put_at(dev_shared_of(&m->gated[rank][mix - STREAMS], row), dev_shared_of(&m->sums_in, row),
               v);
        return;
    }
#pragma unroll
    for (int k = 0; k < BLOCKS; k++)
        put_at(dev_shared_of(&m->sums[rank][mix][row], k), dev_shared_of(&m->sums_in, k), v);
}
/* A piece of x; scale and base are those of mix lane / 8. */
static __device__ __forceinline__ uint4 collapse_row(const struct kern_hc_boundary &p,
                                                     const struct tile_memory *m, int warp,
                                                     int lane, float scale, float base,
                                                     const uint4 h[STREAMS])
{
    const int j = lane / 8, b = lane % 8;
    const float sum = sum_of_blocks<BLOCKS / 2>(m->sums[b][j][warp] + m->sums[b + 8][j][warp]);
    const float squares = sum_of_blocks<BLOCKS>(m->sums[lane % BLOCKS][STREAMS][warp]);
    const float rs = inverse_rms(squares, STREAMS * D, p.norm_eps);
    const float mine = pre_of(sum, rs, scale, base, p.hc_eps);
    float pre[STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) pre[k] = __shfl_sync(0xffffffffu, mine, 8 * k);
    return collapse8(h, pre);
}

static __global__ void __launch_bounds__(THREADS, 1) few_kernel(struct kern_hc_boundary p)
{
    extern __shared__ __align__(16) uint8_t memory[];
    struct tile_memory *const m = (struct tile_memory *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, rank = cluster_rank();
    const int column = rank * COLUMNS + VEC * lane;
    const int32_t tiles = (p.T + ROWS - 1) / ROWS, step = (int32_t)gridDim.x / BLOCKS;
    const bool norm = p.norm.data != NULL;
    if (threadIdx.x == 0) {
        bar_init(&m->fn_in, 1), bar_init(&m->sums_in, 1), bar_init(&m->squares_in, 1);
        bar_init_done();
    }
    __syncthreads();
    cluster_arrive(); /* all must have begun before one writes to another */
    cuda_hurry();
    fetch_weights(p.fn, rank, m);
    float w[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) w[e] = norm ? dev_vec(p.norm, column + e) : 0.0f;
    const float scale = p.scale[0], base = p.base[lane / 8];
    struct weights fn;
    bar_wait(&m->fn_in, 0);
    split_weights(p.fn, m, warp / PARTS, warp % PARTS, lane, &fn);
    cuda_await();
    cluster_wait();
    int phase = 0;
#pragma unroll 1
    for (int32_t tile = (int32_t)blockIdx.x / BLOCKS; tile < tiles; tile += step, phase ^= 1) {
        const int32_t t0 = tile * ROWS, t = t0 + warp;
        const int rows = p.T - t0 < ROWS ? p.T - t0 : (int)ROWS; /* others send nothing */
        const bool own = warp < rows, gates = !p.head && rank < rows;
        uint4 h[STREAMS], x = make_uint4(0, 0, 0, 0);
        if (threadIdx.x == 0) {
            bar_expect(&m->sums_in, 4 * BLOCKS * (SENT * rows + (gates ? GATED : 0)));
            bar_expect(&m->squares_in, 4 * BLOCKS * rows);
        }
        if (own) {
            float squares = 0.0f;
            expand_row(p, m, warp, lane, t, column, h);
#pragma unroll
            for (int j = 0; j < STREAMS; j++) squares = add_squares(h[j], squares);
            tell_all(&m->sums[rank][STREAMS][warp], &m->sums_in, dev_pieces_sum(squares), lane);
        }
        __syncthreads();
        multiply(m, fn, warp / PARTS, lane, m->products[warp]);
        __syncthreads();
        send_mixes(m, rank, rows, p.head);
        /* All wait, those without a row too: a block ends when nobody writes to it any more. */
        bar_wait_cluster(&m->sums_in, phase);
        if (own) {
            x = collapse_row(p, m, warp, lane, scale, base, h);
            const float squares = dev_pieces_sum(add_squares(x, 0.0f));
            tell_all(&m->squares[rank][warp], &m->squares_in, squares, lane);
        }
        if (gates && warp == (rank ^ ROWS / 2)) make_gates(p, m, rank, t0 + rank, lane);
        bar_wait_cluster(&m->squares_in, phase);
        if (own) {
            const float squares = sum_of_blocks<BLOCKS>(m->squares[lane % BLOCKS][warp]);
            if (norm)
                x = norm8(x, make_float4(w[0], w[1], w[2], w[3]),
                          make_float4(w[4], w[5], w[6], w[7]), inverse_rms(squares, D, p.norm_eps));
            *(uint4 *)((uint16_t *)p.x + (int64_t)t * D + column) = x;
        }
        __syncwarp();
        if (tile + step < tiles) cluster_meet(); /* all have read what this tile brought */
    }
}

#else

static __global__ void few_kernel(struct kern_hc_boundary p)
{
    (void)p;
}

#endif

bool cuda_hc_boundary_few(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    static struct cuda_clusters found[CUDA_MAX_DEVICES];
    const size_t shared = sizeof(struct tile_memory);
    const int most = cuda_hc_clusters(s, (const void *)few_kernel, THREADS, shared, found);
    const int64_t tiles = cuda_ceil(p->T, ROWS);
    if (most == 0) return false;
    cuda_hc_launch(s, few_kernel, (unsigned)(tiles < most ? tiles : most), THREADS, shared, *p);
    return true;
}
