/* kernels/hc/boundary_few_cuda.cu - the boundary of few rows (sm_90a): a tile of sixteen, or two,
 * for each cluster of sixteen blocks of threads that the device holds at a time, see
 * boundary_row.cuh.
 *
 * One row is a chain of latencies, so there is as little of it as can be: no loop, a row's piece
 * stays in registers from its load to the end, and what blocks tell each other goes from registers
 * straight to the other's shared memory, counted by a barrier there. Before the kernel ahead of it
 * has ended the weights are on their way to shared memory all at once (waiting for one load after
 * the other took three times as long), and from there become operands in registers.
 *
 *     row      y (+ routed), new streams
 *     mixes    the products of a step, from shared memory, by the matrix unit; then the row's warp
 *              adds them up and sends what makes pre, and squares, to all blocks, and what makes
 *              post and comb to the one that has the row's number
 *     row      adds up what came: pre, x, its squares, which go to all blocks; norm
 *     gates    a warp, of up to eight rows one that has none, makes post and comb of the row that has
 *              the block's number
 *
 * A warp has a second row where a cluster has more than sixteen.
 */
#include "kernels/hc/boundary_row.cuh"

enum {
    THREADS = 32 * WARPS,
    ROW_BYTES = STREAMS * COLUMNS * 2 + 16 /* the gap: eight rows' pieces lie in all banks */
};

/* Of TILES tiles. */
template <int TILES> struct tile_memory {
    enum { LATE = TILES > 1 ? ROWS : 1 };
    union {
        struct weight_rows fn;
        struct products products[TILES][ALL_STEPS]; /* when weights are in registers */
    };
    uint8_t h[TILES * ROWS][ROW_BYTES];
    float4 pre[TILES * ROWS][BLOCKS]; /* by all blocks: mixes of pre */
    float squares[TILES * ROWS][BLOCKS], x_squares[TILES * ROWS][BLOCKS];
    float gated[TILES][BLOCKS][GATED]; /* of the block's own rows */
    float kept[TILES][GATED];
    struct { /* of second rows */
        alignas(16) float routed[LATE][COLUMNS];
        float gates[LATE][GATED]; /* comb, post */
        uint16_t y[LATE][COLUMNS];
    } late;
    uint64_t fn_in[STREAMS], sums_in, squares_in;
};
static_assert(sizeof(struct tile_memory<2>) <= 227 * 1024, "what sm_90 has");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Where a lane's part of a row is; all but h only where streams are to be expanded. */
struct parts {
    const uint16_t *h, *y;
    const float *routed, *post, *comb;
};
/* The streams, `next` apart, expanded, to memory and shared memory; of row t, which is row `row` of
 * the block. */
template <typename M>
static __device__ __forceinline__ void
expand_piece(const struct kern_hc_boundary &p, M *m, const struct parts &from, int next, int row,
             int lane, int64_t t, int column, uint4 h[STREAMS])
{
#pragma unroll
    for (int j = 0; j < STREAMS; j++) h[j] = *(const uint4 *)(from.h + j * next);
    if (p.y) {
        uint16_t *const at = (uint16_t *)p.h + t * (STREAMS * D) + column;
        uint4 y = *(const uint4 *)from.y;
        float4 comb[STREAMS];
        const float4 post = *(const float4 *)from.post;
#pragma unroll
        for (int j = 0; j < STREAMS; j++) comb[j] = ((const float4 *)from.comb)[j];
        if (p.routed) {
            const float4 *const sum = (const float4 *)from.routed;
            const uint2 a = add_routed(make_uint2(y.x, y.y), sum[0]);
            const uint2 b = add_routed(make_uint2(y.z, y.w), sum[1]);
            y = make_uint4(a.x, a.y, b.x, b.y);
        }
        expand8(post, comb, y, h);
#pragma unroll
        for (int j = 0; j < STREAMS; j++) *(uint4 *)(at + j * D) = h[j];
    }
#pragma unroll
    for (int j = 0; j < STREAMS; j++) *(uint4 *)(m->h[row] + (j * COLUMNS + VEC * lane) * 2) = h[j];
}
static __device__ __forceinline__ struct parts parts_of(const struct kern_hc_boundary &p, int64_t t,
                                                        int column)
{
    return (struct parts){(const uint16_t *)p.h + t * (STREAMS * D) + column,
                          (const uint16_t *)p.y + t * D + column, p.routed + t * D + column,
                          p.post + t * STREAMS, p.comb + t * COMB};
}
/* A warp's second row is on its way to shared memory while the first is worked on: registers are
 * too few for both. */
template <typename M>
static __device__ __forceinline__ struct parts late_of(M *m, int warp, int lane)
{
    return (struct parts){(const uint16_t *)m->h[ROWS + warp] + VEC * lane,
                          m->late.y[warp] + VEC * lane, m->late.routed[warp] + VEC * lane,
                          m->late.gates[warp] + COMB, m->late.gates[warp]};
}
static __device__ __forceinline__ void ask(const void *to, const void *from)
{
    dev_copy16((void *)to, from, true);
}
static __device__ __forceinline__ void ask_late(const struct kern_hc_boundary &p,
                                                const struct parts &from, const struct parts &to,
                                                int lane)
{
#pragma unroll
    for (int j = 0; j < STREAMS; j++) ask(to.h + j * COLUMNS, from.h + j * D);
    if (p.y) {
        ask(to.y, from.y);
        if (p.routed) ask(to.routed, from.routed), ask(to.routed + 4, from.routed + 4);
        if (lane < STREAMS) ask(to.comb + 4 * lane, from.comb + 4 * lane);
        if (lane == STREAMS) ask(to.post, from.post);
    }
    dev_copy_commit();
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

/* What the block has of row `warp` of a tile: to all blocks, and for post and comb to the one that
 * has the row's number. */
template <typename M>
static __device__ __forceinline__ void send_sums(M *m, int tile, int rank, int warp, bool head,
                                                 int lane)
{
    const int row = tile * ROWS + warp, to = lane % BLOCKS;
    const float v = sum_of_steps(m->products[tile], lane < MIXES ? lane : (int)MIXES, warp);
    float pre[STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) pre[k] = __shfl_sync(0xffffffffu, v, k);
    const float squares = __shfl_sync(0xffffffffu, v, MIXES);
    const uint32_t in = dev_shared_of(&m->sums_in, to);
    if (lane < BLOCKS)
        put_at(dev_shared_of(&m->pre[row][rank], to), in,
               make_float4(pre[0], pre[1], pre[2], pre[3]));
    else
        put_at(dev_shared_of(&m->squares[row][rank], to), in, squares);
    if (!head && lane >= STREAMS && lane < MIXES)
        put_at(dev_shared_of(&m->gated[tile][rank][lane - STREAMS], warp),
               dev_shared_of(&m->sums_in, warp), v);
}

/* By one warp, when all sums have come, for the row of a tile that has the block's number, which is
 * row t. scale and base are the lane's. */
template <typename M>
static __device__ __forceinline__ void make_gates(const struct kern_hc_boundary &p, M *m, int tile,
                                                  int rank, int32_t t, int lane, float scale,
                                                  float base)
{
    const int mix = gated_of(lane);
    float v[BLOCKS];
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) v[k] = m->gated[tile][k][mix];
    const float squares = sum_of_blocks(m->squares[tile * ROWS + rank]);
    const float rs = inverse_rms(squares, STREAMS * D, p.norm_eps);
    const float c = begin_gates(p, sum_of_blocks(v), rs, scale, base, lane);
    if (lane < GATED) m->kept[tile][lane] = c;
    __syncwarp();
    if (lane == 0) finish_gates(p, m->kept[tile], t);
}
/* A piece of x; scale and base are those of mix lane / 8. */
template <typename M>
static __device__ __forceinline__ uint4 collapse_piece(const struct kern_hc_boundary &p, const M *m,
                                                       int row, int lane, float scale, float base,
                                                       const uint4 h[STREAMS])
{
    float v[BLOCKS];
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) v[k] = ((const float *)&m->pre[row][k])[lane / 8];
    const float squares = sum_of_blocks(m->squares[row]);
    const float rs = inverse_rms(squares, STREAMS * D, p.norm_eps);
    const float mine = pre_of(sum_of_blocks(v), rs, scale, base, p.hc_eps);
    float pre[STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) pre[k] = __shfl_sync(0xffffffffu, mine, 8 * k);
    return collapse8(h, pre);
}

/* most: rows of a cluster. */
template <int TILES>
static __global__ void __launch_bounds__(THREADS, 1)
    few_kernel(const __grid_constant__ struct kern_hc_boundary p, int32_t most)
{
    extern __shared__ __align__(16) uint8_t memory[];
    uint32_t room = dev_shared(memory);
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    const int rank = __shfl_sync(0xffffffffu, cluster_rank(), 0);
    int lane = threadIdx.x & 31;
    asm volatile("" : "+r"(room), "+r"(lane)); /* or each use finds them anew */
    struct tile_memory<TILES> *const m =
        (struct tile_memory<TILES> *)__cvta_shared_to_generic(room);
    const int column = rank * COLUMNS + VEC * lane;
    const int32_t t0 = (int32_t)blockIdx.x / BLOCKS * most;
    const int rows = p.T - t0 < most ? p.T - t0 : most; /* others send nothing */
    const bool norm = p.norm.data != NULL;
    if (threadIdx.x == 0) {
        const int gates = p.head || rank >= rows ? 0 : (rows - 1 - rank) / ROWS + 1;
#pragma unroll
        for (int j = 0; j < STREAMS; j++) bar_init(&m->fn_in[j], 1);
        bar_init(&m->sums_in, 1), bar_init(&m->squares_in, 1);
        bar_init_done();
        bar_expect(&m->sums_in, 4 * BLOCKS * ((STREAMS + 1) * rows + GATED * gates));
        bar_expect(&m->squares_in, 4 * BLOCKS * rows);
    }
    __syncthreads();
    cluster_arrive_relaxed(); /* all must have begun before one writes to another */
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
    cluster_wait();
    cuda_await();
    const bool second = TILES > 1 && ROWS + warp < rows;
    const struct parts late = late_of(m, warp, lane);
    uint4 h[STREAMS], x[TILES];
    if (second) ask_late(p, parts_of(p, t0 + ROWS + warp, column), late, lane);
    if (warp < rows)
        expand_piece(p, m, parts_of(p, t0 + warp, column), D, warp, lane, t0 + warp, column, h);
    if (second) {
        uint4 other[STREAMS];
        dev_copy_wait<0>();
        __syncwarp();
        expand_piece(p, m, late, COLUMNS, ROWS + warp, lane, t0 + ROWS + warp, column, other);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        const uint8_t *const step = m->h[k * ROWS + lane % ROWS] + warp / SIDES * STEP * 2;
        multiply(
            fn, warp % SIDES, lane,
            [&](int j, int piece) { return step + j * (COLUMNS * 2) + piece * (VEC * 2); },
            &m->products[k][warp / SIDES]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILES; k++)
        if (k * ROWS + warp < rows) send_sums(m, k, rank, warp, p.head, lane);
    /* All wait, those without a row too: a block ends when nobody writes to it any more. */
    bar_wait(&m->sums_in, 0);
#pragma unroll
    for (int k = 0; k < TILES; k++)
        if (k * ROWS + warp < rows) {
            const int row = k * ROWS + warp;
            if (TILES > 1) /* two rows' are more than registers hold */
#pragma unroll
                for (int j = 0; j < STREAMS; j++)
                    h[j] = *(const uint4 *)(m->h[row] + (j * COLUMNS + VEC * lane) * 2);
            x[k] = collapse_piece(p, m, row, lane, scale, base, h);
            const float squares = dev_pieces_sum(add_squares(x[k], 0.0f));
            if (lane < BLOCKS)
                put_at(dev_shared_of(&m->x_squares[row][rank], lane),
                       dev_shared_of(&m->squares_in, lane), squares);
        }
#pragma unroll
    for (int k = 0; k < TILES; k++)
        if (!p.head && k * ROWS + rank < rows && warp == (rank ^ (ROWS / 2 + k)))
            make_gates(p, m, k, rank, t0 + k * ROWS + rank, lane, gate_scale, gate_base);
    bar_wait(&m->squares_in, 0);
#pragma unroll
    for (int k = 0; k < TILES; k++)
        if (k * ROWS + warp < rows) {
            const float squares = sum_of_far_blocks(m->x_squares[k * ROWS + warp]);
            if (norm)
                x[k] =
                    norm8(x[k], make_float4(w[0], w[1], w[2], w[3]),
                          make_float4(w[4], w[5], w[6], w[7]), inverse_rms(squares, D, p.norm_eps));
            *(uint4 *)((uint16_t *)p.x + (int64_t)(t0 + k * ROWS + warp) * D + column) = x[k];
        }
}

#else

template <int TILES>
static __global__ void few_kernel(const __grid_constant__ struct kern_hc_boundary p, int32_t most)
{
}

#endif

template <int TILES> static bool launch(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    static struct cuda_clusters found[CUDA_MAX_DEVICES];
    const size_t shared = sizeof(struct tile_memory<TILES>);
    const int clusters =
        cuda_hc_clusters(s, (const void *)few_kernel<TILES>, THREADS, shared, found);
    if (clusters == 0 || p->T > clusters * TILES * ROWS) return false;
    /* The fewer rows a cluster has, the sooner it is done; but the next such kernel, which fetches
     * its weights ahead, wants as many. */
    const int32_t half = clusters > 1 ? clusters / 2 : 1;
    const int32_t rows = (int32_t)cuda_ceil(p->T, p->T > half * ROWS ? clusters : half);
    cuda_hc_launch(s, few_kernel<TILES>, (unsigned)cuda_ceil(p->T, rows), THREADS, shared, *p,
                   rows);
    return true;
}

bool cuda_hc_boundary_few(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    return launch<1>(s, p) || launch<2>(s, p);
}
