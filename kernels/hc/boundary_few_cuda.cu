/* kernels/hc/boundary_few_cuda.cu - the boundary of few rows (sm_90a): a tile of sixteen for each
 * cluster of sixteen blocks of threads that the device holds at a time, see boundary_row.cuh.
 *
 * One row is a chain of latencies, so there is as little of it as can be: no loop, a row's piece
 * stays in registers from its load to the end, and what blocks tell each other goes from registers
 * straight to the other's shared memory, counted by a barrier there. Before the kernel ahead of it
 * has ended the weights are on their way to shared memory all at once (waiting for one load after
 * the other took three times as long), and from there become operands in registers.
 *
 *     row      y (+ routed), new streams
 *     mixes    the products of a step, from shared memory, by the matrix unit; warp k adds up what
 *              block k needs: all rows' mixes of pre and squares, and what makes post and comb of
 *              row k
 *     row      adds up what came: pre, x, its squares, which go to all blocks; norm
 *     gates    a warp, one that has no row if there is one, makes post and comb of the row that has
 *              the block's number
 */
#include "kernels/hc/boundary_row.cuh"

enum {
    THREADS = 32 * WARPS,
    SENT = STREAMS + 1,                    /* sums of a row that every block needs */
    ROW_BYTES = STREAMS * COLUMNS * 2 + 16 /* the gap: eight rows' pieces lie in all banks */
};

struct tile_memory {
    struct weight_rows fn;
    uint8_t h[ROWS][ROW_BYTES];
    struct products products[ALL_STEPS];
    float sums[ROWS][SENT][BLOCKS]; /* by all blocks: mixes of pre, squares of the streams */
    float squares[ROWS][BLOCKS];    /* of x, by all blocks */
    float gated[GATED][BLOCKS];     /* of the block's own row */
    float kept[GATED];
    uint64_t fn_in[STREAMS], sums_in, squares_in;
};
static_assert(sizeof(struct tile_memory) <= 227 * 1024, "what sm_90 has");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

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
            const uint2 a = add_routed(make_uint2(y.x, y.y), sum[0]);
            const uint2 b = add_routed(make_uint2(y.z, y.w), sum[1]);
            y = make_uint4(a.x, a.y, b.x, b.y);
        }
        expand8(post, comb, y, h);
#pragma unroll
        for (int j = 0; j < STREAMS; j++) *(uint4 *)(at + j * D) = h[j];
    }
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
        *(uint4 *)(m->h[warp] + (j * COLUMNS + VEC * lane) * 2) = h[j];
}
/* One of the SUMS of a row, by all steps' products. */
static __device__ __forceinline__ float sum_of_steps(const struct products of[ALL_STEPS], int sum,
                                                     int row)
{
    enum { NEXT = sizeof(struct products) / sizeof(float) };
    const float *const v = sum < MIXES ? &of->mixes[row][sum] : &of->squares[row];
    float half[HALVES];
#pragma unroll
    for (int k = 0; k < HALVES; k++) {
        half[k] = v[k * STEPS * NEXT];
#pragma unroll
        for (int s = 1; s < STEPS; s++) half[k] += v[(k * STEPS + s) * NEXT];
    }
    return half[0] + half[1];
}

/* By the warp that has its number, what block `to` needs. */
static __device__ __forceinline__ void send_sums(struct tile_memory *m, int rank, int to, int rows,
                                                 bool head, int lane)
{
    const int all = rows * SENT, n = all + (to < rows && !head ? (int)GATED : 0);
    for (int i = lane; i < n; i += 32) {
        const int q = i - all, row = q < 0 ? i / SENT : to;
        const int sum = q < 0 ? i % SENT : STREAMS + q;
        const float v = sum_of_steps(m->products, q < 0 && sum == STREAMS ? MIXES : sum, row);
        put_at(dev_shared_of(q < 0 ? &m->sums[row][sum][rank] : &m->gated[q][rank], to),
               dev_shared_of(&m->sums_in, to), v);
    }
}

/* By one warp, when all sums have come; t: the row that has the block's number. scale and base are
 * the lane's. */
static __device__ __forceinline__ void make_gates(const struct kern_hc_boundary &p,
                                                  struct tile_memory *m, int rank, int32_t t,
                                                  int lane, float scale, float base)
{
    const int mix = gated_of(lane);
    const float squares = sum_of_blocks(m->sums[rank][STREAMS]);
    const float rs = inverse_rms(squares, STREAMS * D, p.norm_eps);
    const float c = begin_gates(p, sum_of_blocks(m->gated[mix]), rs, scale, base, lane);
    if (lane < GATED) m->kept[lane] = c;
    __syncwarp();
    if (lane == 0) finish_gates(p, m->kept, t);
}
/* A piece of x; scale and base are those of mix lane / 8. */
static __device__ __forceinline__ uint4 collapse_row(const struct kern_hc_boundary &p,
                                                     const struct tile_memory *m, int warp,
                                                     int lane, float scale, float base,
                                                     const uint4 h[STREAMS])
{
    const float sum = sum_of_blocks(m->sums[warp][lane / 8]);
    const float squares = sum_of_blocks(m->sums[warp][STREAMS]);
    const float rs = inverse_rms(squares, STREAMS * D, p.norm_eps);
    const float mine = pre_of(sum, rs, scale, base, p.hc_eps);
    float pre[STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) pre[k] = __shfl_sync(0xffffffffu, mine, 8 * k);
    return collapse8(h, pre);
}

/* most: rows of a cluster. */
static __global__ void __launch_bounds__(THREADS, 1)
    few_kernel(struct kern_hc_boundary p, int32_t most)
{
    extern __shared__ __align__(16) uint8_t memory[];
    struct tile_memory *const m = (struct tile_memory *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, rank = cluster_rank();
    const int column = rank * COLUMNS + VEC * lane;
    const int32_t t0 = (int32_t)blockIdx.x / BLOCKS * most, t = t0 + warp;
    const int rows = p.T - t0 < most ? p.T - t0 : most; /* others send nothing */
    const bool norm = p.norm.data != NULL, own = warp < rows, gates = !p.head && rank < rows;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int j = 0; j < STREAMS; j++) bar_init(&m->fn_in[j], 1);
        bar_init(&m->sums_in, 1), bar_init(&m->squares_in, 1);
        bar_init_done();
        bar_expect(&m->sums_in, 4 * BLOCKS * (SENT * rows + (gates ? GATED : 0)));
        bar_expect(&m->squares_in, 4 * BLOCKS * rows);
    }
    __syncthreads();
    cluster_arrive(); /* all must have begun before one writes to another */
    cuda_hurry();
    fetch_weights(p.fn, rank, &m->fn, m->fn_in);
    float w[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) w[e] = norm ? dev_vec(p.norm, column + e) : 0.0f;
    const float scale = p.scale[0], base = p.base[lane / 8];
    const float gate_scale = p.head ? 0.0f : p.scale[lane < COMB ? 2 : 1];
    const float gate_base = p.head ? 0.0f : p.base[STREAMS + gated_of(lane)];
    struct weights fn;
    split_weights(p.fn, &m->fn, warp, lane, m->fn_in, &fn);
    cuda_await();
    uint4 h[STREAMS], x = make_uint4(0, 0, 0, 0);
    if (own) expand_row(p, m, warp, lane, t, column, h);
    __syncthreads();
    const uint8_t *const step = m->h[lane % ROWS] + warp / SIDES * STEP * 2;
    multiply(
        fn, warp % SIDES, lane,
        [&](int j, int piece) { return step + j * (COLUMNS * 2) + piece * (VEC * 2); },
        &m->products[warp / SIDES]);
    __syncthreads();
    cluster_wait();
    send_sums(m, rank, warp, rows, p.head, lane);
    /* All wait, those without a row too: a block ends when nobody writes to it any more. */
    bar_wait(&m->sums_in, 0);
    if (own) {
        x = collapse_row(p, m, warp, lane, scale, base, h);
        const float squares = dev_pieces_sum(add_squares(x, 0.0f));
        if (lane < BLOCKS)
            put_at(dev_shared_of(&m->squares[warp][rank], lane),
                   dev_shared_of(&m->squares_in, lane), squares);
    }
    if (gates && warp == (rank ^ ROWS / 2))
        make_gates(p, m, rank, t0 + rank, lane, gate_scale, gate_base);
    bar_wait(&m->squares_in, 0);
    if (!own) return;
    const float squares = sum_of_far_blocks(m->squares[warp]);
    if (norm)
        x = norm8(x, make_float4(w[0], w[1], w[2], w[3]), make_float4(w[4], w[5], w[6], w[7]),
                  inverse_rms(squares, D, p.norm_eps));
    *(uint4 *)((uint16_t *)p.x + (int64_t)t * D + column) = x;
}

#else

static __global__ void few_kernel(struct kern_hc_boundary p, int32_t most)
{
    (void)p, (void)most;
}

#endif

bool cuda_hc_boundary_few(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    static struct cuda_clusters found[CUDA_MAX_DEVICES];
    const size_t shared = sizeof(struct tile_memory);
    const int clusters = cuda_hc_clusters(s, (const void *)few_kernel, THREADS, shared, found);
    if (clusters == 0 || p->T > clusters * ROWS) return false;
    /* The fewer rows a cluster has, the sooner it is done; but the next such kernel, which fetches
     * its weights ahead, wants as many. */
    const int32_t half = clusters > 1 ? clusters / 2 : 1;
    const int32_t rows = (int32_t)cuda_ceil(p->T, p->T > half * ROWS ? clusters : half);
    cuda_hc_launch(s, few_kernel, (unsigned)cuda_ceil(p->T, rows), THREADS, shared, *p, rows);
    return true;
}
