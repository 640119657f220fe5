/* kernels/hc/boundary_many_cuda.cu - the boundary of many rows (sm_90a): clusters of sixteen blocks
 * of threads go through tiles of sixteen rows, see boundary_row.cuh.
 *
 * Streams lie in a ring of shared memory from the copy engine's load to the collapse, and are
 * expanded in place. Blocks tell each other twice what they need of a tile, and nobody waits: in
 * the time of one tile five are worked on, each in another state. Of the warps that have rows
 *
 *     expand    tile i: y (+ routed), new streams,             each has sixteen columns
 *               which leave by the copy engine
 *     multiply  tile i: the products of a step                 two have a step
 *     collapse  tile i - 2: x, and its squares                 each has a row
 *     norm      tile i - 4: x, to memory                       each has a row
 *
 * What all of them must do is done by warps that have no rows,
 *
 *     send      adds up the block's steps of each row and sends them to the row's owner
 *     own       adds up the sums of all blocks for the own row of each tile: pre, to all; and post
 *               and comb, for a row in each lane when there are 32, a round of comb in the time of
 *               a tile, because all of them take as long as two
 *     guide     adds up the squares of all blocks for the norm, and waits for all that a tile needs
 *               to begin and to go on, for the others: a wait takes 150 cycles even where there is
 *               nothing to wait for
 *     copy      fills slots that are free, stores streams, and sends squares
 *
 * What a block sends goes where the other has read what was there, because that one lets the sender
 * go on: products of tile i come after those of i - 2 are sent, and after the collapse of i - 3,
 * which needs pre of all owners. So there are two buffers of products, three of sums and of pre;
 * squares of tile i + 5 come after sums of that tile from all blocks, which have read those of
 * tile i.
 */
#include "kernels/cuda/wgmma.cuh"
#include "kernels/hc/boundary_row.cuh"

enum {
    SEND_WARP = WARPS,
    OWN_WARP,
    GUIDE_WARP,
    COPY_WARP,
    THREADS = 32 * (WARPS + 4), /* a warpgroup for these */
    BOX_BYTES = ROWS * TILE_BYTES,
    BOXES = COLUMNS * 2 / TILE_BYTES, /* of a stream and of y */
    STREAM_BYTES = BOXES * BOX_BYTES,
    ROUTED_BYTES = 2 * STREAM_BYTES,
    H_BYTES = STREAMS * STREAM_BYTES,
    Y_SLOTS = 2, /* y, routed, post, comb: free when expanded */
    PRODUCT_BUFFERS = 2,
    SUM_BUFFERS = 3,
    SUMS_ROOM = 28, /* the next multiple of 16 bytes */
    SUMS_BYTES = BLOCKS * SUMS * 4,
    SQUARE_BUFFERS = 5,
    COLLAPSE_AFTER = 2, /* tiles */
    NORM_AFTER = 4,
    ALIGN = 1024
};

template <bool WITH_ROUTED> struct tile_memory {
    enum { ROUTED = WITH_ROUTED, SLOTS = ROUTED ? 4 : 5, ROUTED_SLOTS = ROUTED ? Y_SLOTS : 1 };
    union {
        uint8_t h[SLOTS][H_BYTES];
        struct {
            uint8_t first[H_BYTES]; /* of the ring: filled while weights lie in the others */
            struct weight_rows fn;
        };
    };
    alignas(ALIGN) uint8_t y[Y_SLOTS][STREAM_BYTES];
    uint8_t routed[ROUTED_SLOTS][ROUTED ? ROUTED_BYTES : 16];
    struct products products[PRODUCT_BUFFERS][ALL_STEPS];
    float sums[SUM_BUFFERS][BLOCKS][SUMS_ROOM];  /* of the own row, by all blocks */
    float pre[SUM_BUFFERS][ROWS][STREAMS];       /* by the rows' owners */
    alignas(16) float own_squares[SLOTS][ROWS];  /* of x, by the block */
    float squares[SQUARE_BUFFERS][BLOCKS][ROWS]; /* by all blocks */
    float scales[SQUARE_BUFFERS][ROWS];          /* of the norm */
    float kept[2][32][GATED + 1];                /* of own rows, for post and comb */
    float balance[32][2 * STREAMS + 1];          /* of comb, and whether it goes on */
    float norm[2][COLUMNS / 2];                  /* first and second halves of pieces */
    float gates[Y_SLOTS][ROWS][GATED]; /* comb, post: pieces of eight rows lie in all banks */
    uint64_t fn_in[STREAMS];
    uint64_t in[SLOTS];        /* what a tile is made of */
    uint64_t begins[2];        /* a tile may begin */
    uint64_t goes_on[2];       /* those before may be normed and collapsed */
    uint64_t made[2];          /* streams and products, by all warps that have rows */
    uint64_t collapsed[SLOTS]; /* by these */
    uint64_t sent[PRODUCT_BUFFERS];
    uint64_t sums_in[SUM_BUFFERS], pre_in[SUM_BUFFERS], squares_in[SQUARE_BUFFERS];
};
static_assert(sizeof(struct tile_memory<true>) + ALIGN <= 227 * 1024 &&
                  sizeof(struct tile_memory<false>) + ALIGN <= 227 * 1024,
              "what sm_90 has");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Where a block and a thread are. */
struct place {
    int rank, warp, lane;
    int32_t first, step;
    uint32_t n; /* tiles of the cluster: first + i step, i < n */
};
static __device__ __forceinline__ int32_t row_of(const struct place &at, uint32_t i)
{
    return (at.first + (int32_t)i * at.step) * ROWS;
}
/* Bytes from a stream's or y's start to a piece of a row. */
static __device__ __forceinline__ int piece_at(int row, int piece)
{
    return piece / 8 * BOX_BYTES + row * TILE_BYTES + ((piece ^ row) & 7) * 16;
}
/* Tile i's phase of the one of N barriers that it has. */
template <int N> static __device__ __forceinline__ int phase(uint32_t i)
{
    return i / N & 1;
}
static __device__ __forceinline__ void warp_arrive(uint64_t *bar, int lane)
{
    __syncwarp();
    if (lane == 0) bar_arrive(bar);
}

/* ------------------------------------------------------------------ copy */

template <typename M>
static __device__ __forceinline__ void fill_h(const struct place &at, const CUtensorMap &h, M *m,
                                              uint32_t i)
{
    if (i >= at.n || at.lane > 0) return;
    uint64_t *const in = &m->in[i % M::SLOTS];
    bar_expect(in, H_BYTES);
    parts_load(m->h[i % M::SLOTS], &h, in, at.rank * COLUMNS * 2, row_of(at, i));
}
template <typename M>
static __device__ __forceinline__ void fill_y(const struct kern_hc_boundary &p,
                                              const struct place &at, const CUtensorMap &y,
                                              const CUtensorMap &routed, M *m, uint32_t i)
{
    if (i >= at.n || !p.y) return;
    const uint32_t slot = i % Y_SLOTS;
    const int32_t t = row_of(at, i), rows = p.T - t < ROWS ? p.T - t : (int)ROWS;
    uint64_t *const in = &m->in[i % M::SLOTS];
    if (at.lane == 0) {
        bar_expect(in, STREAM_BYTES + (M::ROUTED ? ROUTED_BYTES : 0));
        parts_load(m->y[slot], &y, in, at.rank * COLUMNS * 2, t);
        if (M::ROUTED) parts_load(m->routed[slot], &routed, in, at.rank * COLUMNS * 4, t);
    }
    for (int k = at.lane; k < rows * STREAMS; k += 32)
        dev_copy16(&m->gates[slot][k / STREAMS][k % STREAMS * STREAMS],
                   p.comb + (int64_t)t * COMB + k * STREAMS, true);
    if (at.lane < rows)
        dev_copy16(&m->gates[slot][at.lane][COMB], p.post + (int64_t)(t + at.lane) * STREAMS, true);
    bar_arrive_copied(in);
}
/* Squares of all rows, four a lane: a row at a time they would keep shared memory busy. */
template <typename M>
static __device__ __forceinline__ void send_squares(const struct place &at, M *m, uint32_t i)
{
    const int to = at.lane % BLOCKS, buffer = i % SQUARE_BUFFERS;
#pragma unroll
    for (int k = at.lane / BLOCKS; k < ROWS / 4; k += 32 / BLOCKS)
        put_at(dev_shared_of(&m->squares[buffer][at.rank][4 * k], to),
               dev_shared_of(&m->squares_in[buffer], to),
               ((const float4 *)m->own_squares[i % M::SLOTS])[k]);
}
template <typename M>
static __device__ __forceinline__ void
copy_all(const struct kern_hc_boundary &p, const struct place &at, const CUtensorMap &h,
         const CUtensorMap &y, const CUtensorMap &routed, M *m)
{
    fill_h(at, h, m, 0);
    for (uint32_t i = 0; i < Y_SLOTS; i++) fill_y(p, at, y, routed, m, i);
    /* To L2: memory has nothing else to do while weights become operands. */
    for (uint32_t i = 1; at.lane == 0 && i < M::SLOTS && i < at.n; i++)
        parts_prefetch(&h, at.rank * COLUMNS * 2, row_of(at, i));
    __syncthreads(); /* the ring is free */
    for (uint32_t i = 1; i < M::SLOTS; i++) fill_h(at, h, m, i);
    for (uint32_t i = 0; i < at.n + COLLAPSE_AFTER; i++) {
        if (p.y && i < at.n) {
            bar_wait(&m->made[i % 2], phase<2>(i));
            if (at.lane == 0) {
                wgmma_shared();
                parts_store(&h, m->h[i % M::SLOTS], at.rank * COLUMNS * 2, row_of(at, i));
                tile_store_commit();
            }
            fill_y(p, at, y, routed, m, i + Y_SLOTS);
            if (M::ROUTED && at.lane == 0 && i + Y_SLOTS + 1 < at.n)
                parts_prefetch(&routed, at.rank * COLUMNS * 4, row_of(at, i + Y_SLOTS + 1));
        }
        if (i < COLLAPSE_AFTER) continue;
        const uint32_t late = i - COLLAPSE_AFTER;
        bar_wait(&m->collapsed[late % M::SLOTS], phase<M::SLOTS>(late));
        send_squares(at, m, late);
        if (at.lane == 0 && p.y) tile_store_wait_read<COLLAPSE_AFTER>();
        fill_h(at, h, m, late + M::SLOTS);
        /* The one after it to L2, as slots are few. */
        if (at.lane == 0 && late + M::SLOTS + 1 < at.n)
            parts_prefetch(&h, at.rank * COLUMNS * 2, row_of(at, late + M::SLOTS + 1));
    }
    if (at.lane == 0) tile_store_wait();
}

/* ------------------------------------------------------------------ guide */

/* A lane a row. */
template <typename M>
static __device__ __forceinline__ void guide(const struct kern_hc_boundary &p,
                                             const struct place &at, M *m)
{
    const int row = at.lane % ROWS;
    __syncthreads();
    for (uint32_t i = 0; i < at.n + NORM_AFTER; i++) {
        if (i < at.n) {
            const uint32_t before = i - PRODUCT_BUFFERS;
            bar_wait(&m->in[i % M::SLOTS], phase<M::SLOTS>(i));
            if (i >= PRODUCT_BUFFERS)
                bar_wait(&m->sent[i % PRODUCT_BUFFERS], phase<PRODUCT_BUFFERS>(before));
            warp_arrive(&m->begins[i % 2], at.lane);
        }
        if (i < COLLAPSE_AFTER) continue;
        const uint32_t late = i - COLLAPSE_AFTER, last = i - NORM_AFTER;
        if (i >= NORM_AFTER) {
            const uint32_t buffer = last % SQUARE_BUFFERS;
            bar_wait(&m->squares_in[buffer], phase<SQUARE_BUFFERS>(last));
            alignas(16) float v[BLOCKS];
#pragma unroll
            for (int k = 0; k < BLOCKS; k++) v[k] = m->squares[buffer][k][row];
            m->scales[buffer][row] = inverse_rms(sum_of_far_blocks(v), D, p.norm_eps);
            __syncwarp();
            if (at.lane == 0) bar_expect(&m->squares_in[buffer], (int)sizeof *m->squares);
        }
        if (late < at.n) {
            uint64_t *const in = &m->pre_in[late % SUM_BUFFERS];
            bar_wait(in, phase<SUM_BUFFERS>(late));
            if (at.lane == 0) bar_expect(in, (int)sizeof *m->pre);
        }
        warp_arrive(&m->goes_on[late % 2], at.lane);
    }
}

/* ------------------------------------------------------------------ send */

/* The sum over steps of a step's value, the others' NEXT after it. */
static __device__ __forceinline__ float4 sum_of_steps(const float4 *v)
{
    enum { NEXT = sizeof(struct products) / sizeof(float4) };
    float4 half[HALVES];
#pragma unroll
    for (int k = 0; k < HALVES; k++) {
        half[k] = v[k * STEPS * NEXT];
#pragma unroll
        for (int s = 1; s < STEPS; s++) {
            const float4 u = v[(k * STEPS + s) * NEXT];
            half[k].x += u.x, half[k].y += u.y, half[k].z += u.z, half[k].w += u.w;
        }
    }
    return make_float4(half[0].x + half[1].x, half[0].y + half[1].y, half[0].z + half[1].z,
                       half[0].w + half[1].w);
}
/* Four sums a lane. */
template <typename M> static __device__ __forceinline__ void send_sums(const struct place &at, M *m)
{
    enum { QUADS = MIXES / 4, ALL = ROWS * QUADS };
    static_assert(ALL % 32 == 0 && ROWS == 16, "a lane's four sums, and rows of squares");
    __syncthreads();
    for (uint32_t i = 0; i < at.n; i++) {
        const uint32_t buffer = i % SUM_BUFFERS;
        const struct products *const from = m->products[i % PRODUCT_BUFFERS];
        bar_wait(&m->made[i % 2], phase<2>(i));
#pragma unroll
        for (int k = at.lane; k < ALL; k += 32) {
            const int to = k / QUADS;
            put_at(dev_shared_of(&m->sums[buffer][at.rank][k % QUADS * 4], to),
                   dev_shared_of(&m->sums_in[buffer], to),
                   sum_of_steps((const float4 *)from->mixes + k));
        }
        if (at.lane < ROWS / 4) {
            const float4 sum = sum_of_steps((const float4 *)from->squares + at.lane);
            const float squares[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int k = 0; k < 4; k++)
                put_at(dev_shared_of(&m->sums[buffer][at.rank][MIXES], 4 * at.lane + k),
                       dev_shared_of(&m->sums_in[buffer], 4 * at.lane + k), squares[k]);
        }
        warp_arrive(&m->sent[i % PRODUCT_BUFFERS], at.lane);
    }
}

/* ------------------------------------------------------------------ own rows */

/* Own rows wait for comb in lots of 32, of which the last ends with the last tile: only its rounds
 * are still to come then. Where in its lot tile i is, and which of two places the lot has. */
static __device__ __forceinline__ uint32_t lane_of(const struct place &at, uint32_t i)
{
    return (i - at.n) % 32;
}
static __device__ __forceinline__ uint32_t lot_of(const struct place &at, uint32_t i)
{
    return (at.n - 1 - i) / 32 % 2;
}
/* Some more rounds for comb of the own rows of 32 tiles, the first of them `first`, one in each
 * lane; a lane whose tile were before the cluster's first has none. Rounds are counted from 1 on;
 * returns the next, or 0 when comb and post are in memory. comb is read anew each time: kept in
 * registers it would have others spilled that the rows' pre waits for, a twentieth of the
 * kernel. */
template <typename M>
static __device__ __forceinline__ int32_t balance_rows(const struct kern_hc_boundary &p,
                                                       const struct place &at, M *m, int32_t first,
                                                       int32_t round, int32_t rounds)
{
    const int32_t i = first + at.lane;
    const float *const kept = m->kept[lot_of(at, (uint32_t)first)][at.lane];
    const volatile float *const c = kept;
    float *const state = m->balance[at.lane];
    struct balance b;
    begin_balance(&b);
    if (round > 1) {
#pragma unroll
        for (int j = 0; j < STREAMS; j++) b.row[j] = state[j], b.column[j] = state[STREAMS + j];
        factors_of(&b);
    }
    bool goes_on = i >= 0 && (round == 1 || state[2 * STREAMS] != 0.0f);
#pragma unroll 1
    for (; rounds > 0 && round < p.iters; rounds--, round++)
        if (goes_on) goes_on = balance_round(c, &b, p.hc_eps);
    if (round < p.iters && __any_sync(0xffffffffu, goes_on)) {
#pragma unroll
        for (int j = 0; j < STREAMS; j++) state[j] = b.row[j], state[STREAMS + j] = b.column[j];
        state[2 * STREAMS] = goes_on ? 1.0f : 0.0f;
        return round;
    }
    const int32_t t = row_of(at, (uint32_t)i) + at.rank;
    if (i >= 0 && t < p.T) store_gates(p, kept, c, b, t);
    __syncwarp();
    return 0;
}

/* Lanes have the sums as begin_gates() has them, behind them those of pre and the squares. */
template <typename M>
static __device__ __forceinline__ void own_rows(const struct kern_hc_boundary &p,
                                                const struct place &at, M *m)
{
    const int lane = at.lane, j = lane - GATED;
    const int mine = j < 0 ? gated_of(lane) + STREAMS : j < STREAMS ? j : (int)MIXES;
    float scale = 0.0f, base = 0.0f;
    if (j >= 0 && j < STREAMS) scale = p.scale[0], base = p.base[j];
    if (j < 0 && !p.head) scale = p.scale[lane < COMB ? 2 : 1], base = p.base[mine];
    int32_t first = 0, round = 0; /* of the lot that has rounds; 0: there is none */
    __syncthreads();
    for (uint32_t i = 0; i < at.n; i++) {
        const uint32_t buffer = i % SUM_BUFFERS;
        bar_wait(&m->sums_in[buffer], phase<SUM_BUFFERS>(i));
        float v[BLOCKS];
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) v[k] = m->sums[buffer][k][mine];
        const float sum = sum_of_blocks(v);
        const float squares = __shfl_sync(0xffffffffu, sum, GATED + STREAMS);
        const float rs = inverse_rms(squares, STREAMS * D, p.norm_eps);
        const float x = pre_of(sum, rs, scale, base, p.hc_eps);
        float pre[STREAMS];
#pragma unroll
        for (int k = 0; k < STREAMS; k++) pre[k] = __shfl_sync(0xffffffffu, x, GATED + k);
        if (lane == 0) bar_expect(&m->sums_in[buffer], SUMS_BYTES);
        __syncwarp();
        if (lane < BLOCKS)
            put_at(dev_shared_of(m->pre[buffer][at.rank], lane),
                   dev_shared_of(&m->pre_in[buffer], lane),
                   make_float4(pre[0], pre[1], pre[2], pre[3]));
        if (p.head) continue;
        const float c = begin_gates(p, sum, rs, scale, base, lane);
        const bool full = lane_of(at, i) == 31;
        if (lane < GATED) m->kept[lot_of(at, i)][lane_of(at, i)][lane] = c;
        if (round > 0) round = balance_rows(p, at, m, first, round, full ? p.iters : 1);
        if (!full) continue;
        __syncwarp();
        first = (int32_t)i - 31, round = 1;
    }
    if (!p.head) balance_rows(p, at, m, first, round, p.iters);
}

/* ------------------------------------------------------------------ rows */

/* The lane's row and piece of the warp's columns, one half after the other, as registers are few:
 * those of the other eight rows first, so that lanes meet all banks. */
template <typename M>
static __device__ __forceinline__ void expand_piece(const struct place &at, M *m, uint32_t i)
{
    const uint32_t slot = i % Y_SLOTS;
    const int row = at.lane % ROWS, piece = 2 * at.warp + at.lane / ROWS;
    const float4 *const gates = (const float4 *)m->gates[slot][row];
    const float4 post = gates[STREAMS];
    float4 comb[STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) comb[j] = gates[j];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int half = k ^ row / 8, off = piece_at(row, piece) + half * 8;
        uint8_t *const own = m->h[i % M::SLOTS] + off;
        uint32_t v[2][STREAMS];
        uint2 y = *(const uint2 *)(m->y[slot] + off);
#pragma unroll
        for (int j = 0; j < STREAMS; j++) {
            const uint2 h = *(const uint2 *)(own + j * STREAM_BYTES);
            v[0][j] = h.x, v[1][j] = h.y;
        }
        if (M::ROUTED)
            y = add_routed(y, *(const float4 *)(m->routed[slot] + piece_at(row, 2 * piece + half)));
        expand2(post, comb, y.x, v[0]);
        expand2(post, comb, y.y, v[1]);
#pragma unroll
        for (int j = 0; j < STREAMS; j++)
            *(uint2 *)(own + j * STREAM_BYTES) = make_uint2(v[0][j], v[1][j]);
    }
}
/* The two warps of a step. */
static __device__ __forceinline__ void meet(int step)
{
    asm volatile("bar.sync %0, 64;" ::"r"(step + 1) : "memory");
}
template <typename M>
static __device__ __forceinline__ void multiply_step(const struct place &at, M *m,
                                                     const struct weights &w, uint32_t i)
{
    const int step = at.warp / SIDES, row = at.lane % ROWS;
    const uint8_t *const from = m->h[i % M::SLOTS] + step / 2 * BOX_BYTES + row * TILE_BYTES;
    multiply(
        w, at.warp % SIDES, at.lane,
        [&](int j, int piece) {
            return from + j * STREAM_BYTES + ((step % 2 * 4 + piece) ^ (row & 7)) * 16;
        },
        &m->products[i % PRODUCT_BUFFERS][step]);
}
/* The warp's row: x of tile i - NORM_AFTER, normed, to memory, and x of tile i - COLLAPSE_AFTER,
 * of which the last two are kept. At both ends it works on what is not there, and nothing is kept
 * of it: so the loads of both are under way together. */
template <typename M>
static __device__ __forceinline__ void
finish_row(const struct kern_hc_boundary &p, const struct place &at, M *m, uint4 x[2], uint32_t i)
{
    const uint32_t late = i - COLLAPSE_AFTER, last = i - NORM_AFTER;
    const int32_t t = row_of(at, last) + at.warp;
    const uint8_t *const own = m->h[late % M::SLOTS] + piece_at(at.warp, at.lane);
    const float4 *const w = (const float4 *)m->norm + at.lane;
    const float4 w0 = w[0], w1 = w[COLUMNS / VEC];
    const float scale = m->scales[last % SQUARE_BUFFERS][at.warp];
    const float4 v = *(const float4 *)m->pre[late % SUM_BUFFERS][at.warp];
    const float pre[STREAMS] = {v.x, v.y, v.z, v.w};
    uint4 h[STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) h[j] = *(const uint4 *)(own + j * STREAM_BYTES);
    const uint4 normed = p.norm.data ? norm8(x[1], w0, w1, scale) : x[1];
    if (i >= NORM_AFTER && t < p.T)
        *(uint4 *)((uint16_t *)p.x + (int64_t)t * D + at.rank * COLUMNS + VEC * at.lane) = normed;
    x[1] = x[0], x[0] = collapse8(h, pre);
    const float squares = dev_pieces_sum(add_squares(x[0], 0.0f));
    __syncwarp();
    if (at.lane == 0 && late < at.n) {
        m->own_squares[late % M::SLOTS][at.warp] = squares;
        bar_arrive(&m->collapsed[late % M::SLOTS]);
    }
}

template <typename M>
static __device__ __forceinline__ void
make_rows(const struct kern_hc_boundary &p, const struct place &at, M *m, const struct weights &fn)
{
    uint4 x[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
#pragma unroll 1
    for (uint32_t i = 0; i < at.n + NORM_AFTER; i++) {
        const uint32_t late = i - COLLAPSE_AFTER;
        if (i < at.n) {
            bar_wait(&m->begins[i % 2], phase<2>(i));
            if (p.y) {
                expand_piece(at, m, i);
                meet(at.warp / SIDES);
            }
            multiply_step(at, m, fn, i);
            warp_arrive(&m->made[i % 2], at.lane);
        }
        if (i < COLLAPSE_AFTER) continue;
        bar_wait(&m->goes_on[late % 2], phase<2>(late));
        finish_row(p, at, m, x, i);
    }
}

template <bool ROUTED>
static __global__ void __launch_bounds__(THREADS, 1)
    many_kernel(const __grid_constant__ struct kern_hc_boundary p,
                const __grid_constant__ CUtensorMap h, const __grid_constant__ CUtensorMap y,
                const __grid_constant__ CUtensorMap routed)
{
    using M = struct tile_memory<ROUTED>;
    extern __shared__ __align__(16) uint8_t memory[];
    uint32_t room = (dev_shared(memory) + ALIGN - 1) & ~(uint32_t)(ALIGN - 1);
    asm volatile("" : "+r"(room)); /* or each use finds it anew */
    M *const m = (M *)__cvta_shared_to_generic(room);
    struct place at;
    at.rank = cluster_rank();
    /* From a neighbour, or each use asks for the thread's number anew, and waits for that. */
    at.warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    at.lane = __shfl_sync(0xffffffffu, (int)threadIdx.x & 31, (int)threadIdx.x & 31);
    at.first = (int32_t)blockIdx.x / BLOCKS, at.step = (int32_t)gridDim.x / BLOCKS;
    at.n = (uint32_t)(((p.T + ROWS - 1) / ROWS - at.first + at.step - 1) / at.step);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STREAMS; i++) bar_init(&m->fn_in[i], 1);
#pragma unroll
        for (int i = 0; i < M::SLOTS; i++)
            bar_init(&m->in[i], p.y ? 2 + 32 : 1), bar_init(&m->collapsed[i], WARPS);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bar_init(&m->begins[i], 1), bar_init(&m->goes_on[i], 1);
            bar_init(&m->made[i], WARPS);
        }
#pragma unroll
        for (int i = 0; i < SUM_BUFFERS; i++)
            bar_init(&m->sums_in[i], 1), bar_init(&m->pre_in[i], 1);
#pragma unroll
        for (int i = 0; i < SQUARE_BUFFERS; i++) bar_init(&m->squares_in[i], 1);
#pragma unroll
        for (int i = 0; i < PRODUCT_BUFFERS; i++) bar_init(&m->sent[i], 1);
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
    cluster_arrive_relaxed(); /* all must have begun before one writes to another */
    cuda_hurry();
    fetch_weights(p.fn, at.rank, &m->fn, m->fn_in);
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS)
        m->norm[i / 4 % 2][i / VEC * 4 + i % 4] =
            p.norm.data ? dev_vec(p.norm, at.rank * COLUMNS + i) : 0.0f;
    if (at.warp < WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        struct weights fn;
        split_weights(p.fn, &m->fn, at.warp, at.lane, m->fn_in, &fn);
        cuda_await();
        cluster_wait();
        __syncthreads(); /* the ring is free */
        make_rows(p, at, m, fn);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        cuda_await();
        cluster_wait();
        if (at.warp == SEND_WARP) send_sums(at, m);
        if (at.warp == OWN_WARP) own_rows(p, at, m);
        if (at.warp == GUIDE_WARP) guide(p, at, m);
        if (at.warp == COPY_WARP) copy_all(p, at, h, y, routed, m);
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
    const size_t shared = sizeof(struct tile_memory<ROUTED>) + ALIGN;
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
