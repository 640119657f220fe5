/* kernels/hc/boundary_many_cuda.cu - the boundary of many rows (sm_90a): sixty-four at a time by a
 * cluster of sixteen blocks of threads, see boundary_row.cuh.
 *
 * What a block holds for good are its weights, in shared memory. Of a tile it has 64 rows x 1024 k,
 * and these are read once, stay in registers - as operands of the matrix unit, and for the collapse
 * - and are written once. Two warpgroups have a half of the columns each, a warp sixteen rows, a
 * thread a piece of two rows in each step:
 *
 *     fill     one thread: steps of the halves in turn from memory to a ring of shared memory
 *     expand   a step: y (+ routed), new streams, their squares, to memory; then as first operand
 *              times the weights, while the next step is expanded
 *     send     sums of both halves to all blocks, sums for post and comb of four rows to the block
 *              that makes these
 *     collapse adds up what came: pre, x, its squares; these to all blocks
 *     norm     adds up the squares, stores x
 *     gates    a warp of its own: post and comb of the block's four rows of the tile
 *
 * Clusters begin one after the other, so that some expand, bound by memory, while others collapse.
 * A tile waits twice for its neighbours, for about 1,500 cycles each time; the ring is filled
 * meanwhile. That is why a tile has 64 rows: with sixteen (and the matrix unit fed by warps)
 * waiting and meeting took longer than the work. What a block sends, the other reads before it
 * sends what lets the sender go on: so one buffer of each kind is enough.
 */
#include "kernels/cuda/wgmma.cuh"
#include "kernels/hc/boundary_row.cuh"

enum {
    ROWS = 64,
    GROUP = 128, /* threads of a warpgroup */
    THREADS = GROUP * (HALVES + 1),
    WARPS = HALVES * 4, /* that calculate; behind them */
    FILL_WARP = WARPS,
    GATE_WARP,
    K16 = STREAMS * 2,   /* instructions of a step */
    N = PARTS * MIXES,   /* rows of weights: larger parts, smaller parts */
    WEIGHT_BLOCK = 64,   /* k */
    OWN = ROWS / BLOCKS, /* rows of a tile whose post and comb a block makes */
    LINE = STEP * 2,     /* bytes of a row in a step */
    STREAM_BYTES = ROWS * LINE,
    ROUTED_BYTES = ROWS * STEP * 4,
    PLAIN_SLOT = (STREAMS + 1) * STREAM_BYTES,
    RING = 3 * (PLAIN_SLOT + ROUTED_BYTES),
    MAX_SLOTS = 4,
    PART_LD = ROWS + 4, /* spread over banks, as the next */
    SUMS_LD = SENT * ROWS + 16,
    ALIGN = 1024,
    TILE_CYCLES = 22000 /* about what a tile takes */
};
template <bool ROUTED> struct ring {
    enum { SLOT = PLAIN_SLOT + (ROUTED ? ROUTED_BYTES : 0), SLOTS = ROUTED ? 3 : 4 };
};
static_assert(ring<false>::SLOT * ring<false>::SLOTS <= RING, "fits");

struct tile_memory {
    uint8_t weights[STREAMS * COLUMNS / WEIGHT_BLOCK][N][2 * WEIGHT_BLOCK]; /* by wgmma_rows() */
    uint8_t ring[RING]; /* slots: a step of each stream, of y, of the routed sum */
    float post[ROWS][STREAMS], comb[ROWS][COMB];
    /* All have read the first before one can write the second, and have met before the next. */
    union {
        float half[HALVES][MIXES + 1][PART_LD]; /* mixes, squares */
        float squares[BLOCKS][HALVES][ROWS];    /* of x, by all blocks */
    };
    float sums[BLOCKS][SUMS_LD]; /* by all blocks: of pre, squares; each by rows */
    float gated[BLOCKS][GATED][OWN];
    float norm[COLUMNS];
    float kept[OWN][GATED + 1];
    float base[MIXES], scale[3];
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS], gates_full, gates_empty;
    uint64_t sums_in, squares_in; /* what blocks send */
    uint64_t gates_read;          /* the gate warp has read the sums */
};
static_assert(sizeof(struct tile_memory) + ALIGN <= 227 * 1024, "what sm_90 has");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Where a cluster is in its tiles. */
struct place {
    int rank;
    int32_t first, step, tiles;
};

/* The block's weights: from sixteen columns 8 c + 4 i + 2 h + e, piece 2 i + h of the step has word
 * c. */
static __device__ __forceinline__ void split_weights(const struct kern_weight &fn, int rank,
                                                     struct tile_memory *m)
{
    enum { ITEMS = MIXES * STREAMS * HALVES * STEPS };
    for (int i = threadIdx.x; i < ITEMS; i += THREADS) {
        const int n = i % MIXES, j = i / MIXES % STREAMS, step = i / MIXES / STREAMS;
        const int64_t k = j * D + rank * COLUMNS + step * STEP;
        const uint8_t *const row = (const uint8_t *)fn.data + n * fn.row_bytes;
        float v[STEP];
#pragma unroll
        for (int e = 0; e < STEP; e += 4) {
            float4 u = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (n < fn.n && fn.fmt == KERN_W_F32) u = *(const float4 *)((const float *)row + k + e);
            if (n < fn.n && fn.fmt != KERN_W_F32)
                u = widen4(*(const uint2 *)((const uint16_t *)row + k + e));
            v[e] = u.x, v[e + 1] = u.y, v[e + 2] = u.z, v[e + 3] = u.w;
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int to = part * MIXES + n;
            uint8_t *const at = m->weights[step * 2 + j / 2][to];
#pragma unroll
            for (int q = 0; q < 4; q++) {
                uint32_t w[4];
#pragma unroll
                for (int c = 0; c < 4; c++) w[c] = split2(&v[8 * c + 2 * q], &v[8 * c + 2 * q + 1]);
                *(uint4 *)(at + ((j % 2 * 4 + q) ^ (to & 7)) * 16) =
                    make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
}

/* ------------------------------------------------------------------ fill */

template <bool ROUTED>
static __device__ __forceinline__ void fill(const struct kern_hc_boundary &p, const CUtensorMap &h,
                                            const CUtensorMap &y, const CUtensorMap &routed,
                                            struct tile_memory *m, const struct place &at)
{
    using R = ring<ROUTED>;
    enum { CHUNKS = HALVES * STEPS, GATES_AFTER = R::SLOTS - 2 };
    const int bytes =
        STREAMS * STREAM_BYTES + (p.y ? STREAM_BYTES : 0) + (ROUTED ? ROUTED_BYTES : 0);
    int slot = 0, phase = 0, gates_phase = 0;
    /* In step all clusters would want the memory at the same time, and leave it alone at the same
     * time. */
    if (at.tiles > 2 * at.step) {
        const long long begin = clock64(), wait = (long long)at.first * (TILE_CYCLES / at.step);
        while (clock64() - begin < wait) __nanosleep(100);
    }
    for (int32_t tile = at.first; tile < at.tiles; tile += at.step) {
        const int32_t t = tile * ROWS, rows = p.T - t < ROWS ? p.T - t : ROWS;
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const int column = at.rank * COLUMNS + (chunk % HALVES * STEPS + chunk / HALVES) * STEP;
            uint8_t *to = m->ring + slot * R::SLOT;
            uint64_t *const full = &m->full[slot];
            bar_wait(&m->empty[slot], phase ^ 1);
            bar_expect(full, bytes);
#pragma unroll
            for (int j = 0; j < STREAMS; j++, to += STREAM_BYTES)
                tile_load(to, &h, full, (j * D + column) * 2, t);
            if (p.y) tile_load(to, &y, full, column * 2, t);
            if (ROUTED) tile_load(to + STREAM_BYTES, &routed, full, column * 4, t);
            if (++slot == R::SLOTS) slot = 0, phase ^= 1;
            /* Not earlier: those of the tile before are read as long as its steps are. */
            if (chunk == GATES_AFTER && p.y) {
                bar_wait(&m->gates_empty, gates_phase ^ 1);
                bar_expect(&m->gates_full, rows * (int)(sizeof *m->post + sizeof *m->comb));
                bulk_load(m->post, p.post + (int64_t)t * STREAMS, rows * (int)sizeof *m->post,
                          &m->gates_full);
                bulk_load(m->comb, p.comb + (int64_t)t * COMB, rows * (int)sizeof *m->comb,
                          &m->gates_full);
                gates_phase ^= 1;
            }
        }
    }
}

/* ------------------------------------------------------------------ gates */

static __device__ __forceinline__ void make_gates(const struct kern_hc_boundary &p,
                                                  struct tile_memory *m, const struct place &at)
{
    const int lane = threadIdx.x & 31, mix = gated_of(lane);
    const float scale = m->scale[lane < COMB ? 2 : 1], base = m->base[STREAMS + mix];
    int phase = 0;
    for (int32_t tile = at.first; tile < at.tiles; tile += at.step, phase ^= 1) {
        bar_wait_cluster(&m->sums_in, phase);
        float sum[OWN], squares[OWN];
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            sum[r] = sum_by_one(&m->gated[0][mix][r], GATED * OWN);
            squares[r] = m->sums[lane % BLOCKS][STREAMS * ROWS + at.rank * OWN + r];
        }
        __syncwarp();
        if (lane == 0) bar_arrive(&m->gates_read); /* soon: the others wait for it */
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            const float rs =
                inverse_rms(sum_of_blocks<BLOCKS>(squares[r]), STREAMS * D, p.norm_eps);
            const float c = begin_gates(p, sum[r], rs, scale, base, lane);
            if (lane < GATED) m->kept[r][lane] = c;
        }
        __syncwarp();
        const int32_t t = tile * ROWS + at.rank * OWN + lane;
        if (lane < OWN && t < p.T) finish_gates(p, m->kept[lane], t);
        __syncwarp();
    }
}

/* ------------------------------------------------------------------ rows */

/* A thread's part of a tile: pieces of rows `row` and row + 8. */
struct own {
    int half, warp, lane, row, c;
    int32_t t, column; /* of the piece in step 0 */
};
/* A step of both rows, as operands: [stream][instruction][2 * word + row]. */
typedef uint32_t step_words[STREAMS][2][4];

static __device__ __forceinline__ uint4 piece(const step_words &h, int j, int r)
{
    return make_uint4(h[j][0][r], h[j][0][2 + r], h[j][1][r], h[j][1][2 + r]);
}

static __device__ __forceinline__ void put_piece(step_words &h, int j, int r, const uint4 &v)
{
    h[j][0][r] = v.x, h[j][0][2 + r] = v.y, h[j][1][r] = v.z, h[j][1][2 + r] = v.w;
}

/* What the ring brought, expanded and stored; squares of both rows. */
template <bool ROUTED>
static __device__ __forceinline__ void
expand_step(const struct kern_hc_boundary &p, struct tile_memory *m, const struct own &o,
            const uint8_t *slot, uint64_t *empty, int32_t column, step_words &h, float squares[2])
{
    uint4 y[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = o.row + 8 * r;
        const uint8_t *const from = slot + row * LINE + 16 * o.c;
#pragma unroll
        for (int j = 0; j < STREAMS; j++)
            put_piece(h, j, r, *(const uint4 *)(from + j * STREAM_BYTES));
        if (p.y) y[r] = *(const uint4 *)(from + STREAMS * STREAM_BYTES);
        if (ROUTED) {
            const uint8_t *const sum = slot + PLAIN_SLOT + row * (2 * LINE);
            y[r] = add_routed(y[r], *(const float4 *)(sum + ((2 * o.c) ^ (row & 7)) * 16),
                              *(const float4 *)(sum + ((2 * o.c + 1) ^ (row & 7)) * 16));
        }
    }
    __syncwarp();
    if (o.lane == 0) bar_arrive(empty);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = o.row + 8 * r;
        uint4 v[STREAMS];
#pragma unroll
        for (int j = 0; j < STREAMS; j++) v[j] = piece(h, j, r);
        if (p.y) {
            const float4 post = *(const float4 *)m->post[row];
            float4 comb[STREAMS];
#pragma unroll
            for (int j = 0; j < STREAMS; j++) comb[j] = *(const float4 *)&m->comb[row][STREAMS * j];
            expand8(post, comb, y[r], v);
            const int32_t t = o.t + 8 * r;
            if (t < p.T) {
                uint16_t *const to = (uint16_t *)p.h + (int64_t)t * (STREAMS * D) + column;
#pragma unroll
                for (int j = 0; j < STREAMS; j++) *(uint4 *)(to + j * D) = v[j];
            }
        }
        squares[r] = 0.0f;
#pragma unroll
        for (int j = 0; j < STREAMS; j++) {
            put_piece(h, j, r, v[j]);
            squares[r] = add_squares(v[j], squares[r]);
        }
    }
}

/* Over the pieces of a step. */
static __device__ __forceinline__ float sum_of_quad(float v)
{
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
/* Threads that calculate. */
static __device__ __forceinline__ void meet(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}

/* Sums of both halves to the others, four rows at a time. */
static __device__ __forceinline__ float4 both_halves(const struct tile_memory *m, int what, int row)
{
    const float4 a = *(const float4 *)&m->half[0][what][row];
    const float4 b = *(const float4 *)&m->half[1][what][row];
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
static __device__ __forceinline__ void send_sums(struct tile_memory *m, int rank, bool head)
{
    static_assert(WARPS * 32 == BLOCKS * ROWS / 4 && OWN == 4, "shares of threads");
    const int to = threadIdx.x / BLOCKS, i = threadIdx.x % BLOCKS;
    const uint32_t bar = dev_shared_of(&m->sums_in, to);
    const uint32_t sums = dev_shared_of(m->sums[rank], to);
    const uint32_t gated = dev_shared_of(m->gated[rank], to);
#pragma unroll
    for (int q = 0; q < SENT; q++)
        put_at(sums + 4 * (q * ROWS + 4 * i), bar,
               both_halves(m, q < STREAMS ? q : (int)MIXES, 4 * i));
    if (head) return;
    for (int k = i; k < GATED; k += BLOCKS)
        put_at(gated + 4 * OWN * k, bar, both_halves(m, STREAMS + k, OWN * to));
}

/* Sums over blocks of what they sent for a lane's row, lane % 16 of the warp's. */
static __device__ __forceinline__ void make_pre(const struct kern_hc_boundary &p,
                                                const struct tile_memory *m, const struct own &o,
                                                float pre[2][STREAMS])
{
    float sums[SENT];
#pragma unroll
    for (int q = 0; q < SENT; q++) {
        float v[BLOCKS / 2];
#pragma unroll
        for (int i = 0; i < BLOCKS / 2; i++)
            v[i] = m->sums[2 * i + o.lane / 16][q * ROWS + o.warp * 16 + o.lane % 16];
        sums[q] = sum_of_every_second(v);
    }
    const float rs = inverse_rms(sums[STREAMS], STREAMS * D, p.norm_eps);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        const float v = pre_of(sums[j], rs, m->scale[0], m->base[j], p.hc_eps);
        pre[0][j] = __shfl_sync(0xffffffffu, v, o.lane / 4);
        pre[1][j] = __shfl_sync(0xffffffffu, v, o.lane / 4 + 8);
    }
}
static __device__ __forceinline__ void send_squares(struct tile_memory *m, const struct own &o,
                                                    int rank, const float squares[2])
{
    const float a = __shfl_sync(0xffffffffu, squares[0], o.lane % 8 * 4);
    const float b = __shfl_sync(0xffffffffu, squares[1], o.lane % 8 * 4);
    const float *const at = &m->squares[rank][o.half][o.warp * 16 + o.lane % 16];
#pragma unroll
    for (int k = 0; k < BLOCKS; k += 2) {
        const int to = k + o.lane / 16;
        put_at(dev_shared_of(at, to), dev_shared_of(&m->squares_in, to), o.lane & 8 ? b : a);
    }
}
static __device__ __forceinline__ void norm_scales(const struct kern_hc_boundary &p,
                                                   const struct tile_memory *m, const struct own &o,
                                                   float rs[2])
{
    float v[BLOCKS / 2];
#pragma unroll
    for (int i = 0; i < BLOCKS / 2; i++) {
        const float(*const of)[ROWS] = m->squares[2 * i + o.lane / 16];
        v[i] = of[0][o.warp * 16 + o.lane % 16] + of[1][o.warp * 16 + o.lane % 16];
    }
    const float s = inverse_rms(sum_of_every_second(v), D, p.norm_eps);
    rs[0] = __shfl_sync(0xffffffffu, s, o.lane / 4);
    rs[1] = __shfl_sync(0xffffffffu, s, o.lane / 4 + 8);
}

/* What was made of these words is made again: the compiler would keep it, where no room is. */
static __device__ __forceinline__ void forget(step_words (&h)[STEPS])
{
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < STREAMS; j++)
#pragma unroll
            for (int i = 0; i < 8; i++) asm volatile("" : "+r"(h[s][j][i / 4][i % 4]));
}
/* The sums of a step join those of the steps before. */
static __device__ __forceinline__ void add_step(float (&sum)[N / 2], float total[MIXES / 2],
                                                bool first)
{
    wgmma_wait<0>();
    wgmma_pin(sum);
#pragma unroll
    for (int i = 0; i < MIXES / 2; i++) {
        const float v = sum[i] + sum[MIXES / 2 + i];
        total[i] = first ? v : total[i] + v;
    }
}

/* The other half's chunk: who leaves one out cannot tell its phase from the one before. */
template <int SLOTS>
static __device__ __forceinline__ void pass(struct tile_memory *m, uint32_t chunk, int lane)
{
    if (lane != 0) return;
    bar_wait(&m->full[chunk % SLOTS], (int)(chunk / SLOTS & 1));
    bar_arrive(&m->empty[chunk % SLOTS]);
}

template <bool ROUTED>
static __device__ __forceinline__ void make_rows(const struct kern_hc_boundary &p,
                                                 struct tile_memory *m, const struct place &at)
{
    using R = ring<ROUTED>;
    struct own o;
    o.half = threadIdx.x / GROUP, o.warp = threadIdx.x / 32 % 4, o.lane = threadIdx.x & 31;
    o.row = o.warp * 16 + o.lane / 4, o.c = o.lane % 4;
    o.column = at.rank * COLUMNS + o.half * (STEPS * STEP) + VEC * o.c;
    const int sums_bytes = 4 * BLOCKS * (SENT * ROWS + (p.head ? 0 : GATED * OWN));
    const uint64_t weights =
        wgmma_rows(m->weights) + o.half * (STEPS * 2 * (int)sizeof *m->weights >> 4);
    const bool norm = p.norm.data != NULL;
    uint32_t chunk = 0;
    int phase = 0;
    for (int32_t tile = at.first; tile < at.tiles; tile += at.step, phase ^= 1) {
        step_words h[STEPS];
        float sum[N / 2], total[MIXES / 2], squares[STEPS][2];
        o.t = tile * ROWS + o.row;
        if (p.y) bar_wait(&m->gates_full, phase);
#pragma unroll
        for (int s = 0; s < STEPS; s++, chunk += HALVES) {
            const uint32_t own = chunk + (uint32_t)o.half, slot = own % R::SLOTS;
            if (o.half == 1) pass<R::SLOTS>(m, chunk, o.lane);
            bar_wait(&m->full[slot], (int)(own / R::SLOTS & 1));
            expand_step<ROUTED>(p, m, o, m->ring + slot * R::SLOT, &m->empty[slot],
                                o.column + s * STEP, h[s], squares[s]);
            if (o.half == 0) pass<R::SLOTS>(m, chunk + 1, o.lane);
            if (s > 0) add_step(sum, total, s == 1);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < K16; k++)
                wgmma_bf16(sum, h[s][k / 2][k % 2],
                           weights + (2 * s + k / 4) * ((int)sizeof *m->weights >> 4) + k % 4 * 2,
                           k > 0);
            wgmma_commit();
        }
        __syncwarp();
        if (p.y && o.lane == 0) bar_arrive(&m->gates_empty);
        add_step(sum, total, false);
#pragma unroll
        for (int i = 0; i < MIXES / 2; i++)
            m->half[o.half][i / 4 * 8 + 2 * o.c + i % 2][o.row + i % 4 / 2 * 8] = total[i];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float v =
                sum_of_quad((squares[0][r] + squares[1][r]) + (squares[2][r] + squares[3][r]));
            if (o.c == 0) m->half[o.half][MIXES][o.row + 8 * r] = v;
        }
        meet();
        send_sums(m, at.rank, p.head);

        bar_wait_cluster(&m->sums_in, phase);
        if (threadIdx.x == 0) bar_expect(&m->sums_in, sums_bytes);
        float pre[2][STREAMS];
        make_pre(p, m, o, pre);
        forget(h);
        uint4 x[STEPS][2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const uint4 v[STREAMS] = {piece(h[s], 0, r), piece(h[s], 1, r), piece(h[s], 2, r),
                                          piece(h[s], 3, r)};
                x[s][r] = collapse8(v, pre[r]);
                squares[s][r] = add_squares(x[s][r], 0.0f);
            }
            squares[0][r] =
                sum_of_quad((squares[0][r] + squares[1][r]) + (squares[2][r] + squares[3][r]));
        }
        if (!p.head && threadIdx.x < 32) bar_wait(&m->gates_read, phase);
        send_squares(m, o, at.rank, squares[0]);

        bar_wait_cluster(&m->squares_in, phase);
        if (threadIdx.x == 0) bar_expect(&m->squares_in, (int)sizeof m->squares);
        float rs[2];
        norm_scales(p, m, o, rs);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const float *const w = m->norm + o.half * (STEPS * STEP) + s * STEP + VEC * o.c;
            const float4 a = *(const float4 *)w, b = *(const float4 *)(w + 4);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int32_t t = o.t + 8 * r;
                if (t >= p.T) continue;
                *(uint4 *)((uint16_t *)p.x + (int64_t)t * D + o.column + s * STEP) =
                    norm ? norm8(x[s][r], a, b, rs[r]) : x[s][r];
            }
        }
        meet();
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
    const int warp = threadIdx.x / 32;
    struct place at;
    at.rank = cluster_rank();
    at.first = (int32_t)blockIdx.x / BLOCKS, at.step = (int32_t)gridDim.x / BLOCKS;
    at.tiles = (p.T + ROWS - 1) / ROWS;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < MAX_SLOTS; i++) bar_init(&m->full[i], 1), bar_init(&m->empty[i], WARPS);
        bar_init(&m->gates_full, 1), bar_init(&m->gates_empty, WARPS), bar_init(&m->gates_read, 1);
        bar_init(&m->sums_in, 1), bar_init(&m->squares_in, 1);
        bar_init_done();
        bar_expect(&m->sums_in, 4 * BLOCKS * (SENT * ROWS + (p.head ? 0 : GATED * OWN)));
        bar_expect(&m->squares_in, (int)sizeof m->squares);
    }
    __syncthreads();
    cluster_arrive(); /* all must have begun before one writes to another */
    cuda_hurry();
    split_weights(p.fn, at.rank, m);
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS)
        m->norm[i] = p.norm.data ? dev_vec(p.norm, at.rank * COLUMNS + i) : 0.0f;
    if ((int)threadIdx.x < (p.head ? (int)STREAMS : (int)MIXES))
        m->base[threadIdx.x] = p.base[threadIdx.x];
    if (threadIdx.x < (p.head ? 1 : 3)) m->scale[threadIdx.x] = p.scale[threadIdx.x];
    wgmma_shared();
    cuda_await();
    cluster_wait();
    __syncthreads();
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == FILL_WARP && threadIdx.x % 32 == 0) fill<ROUTED>(p, h, y, routed, m, at);
        if (warp == GATE_WARP && !p.head) make_gates(p, m, at);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        make_rows<ROUTED>(p, m, at);
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
    CUtensorMap h, y, routed;
    if (most == 0 || !cuda_half_tile_map(&h, p->h, p->T, STREAMS * D * 2, STREAMS * D * 2, ROWS) ||
        !cuda_half_tile_map(&y, p->y ? p->y : p->x, p->T, D * 2, D * 2, ROWS) ||
        !cuda_tile_map(&routed, ROUTED ? (const void *)p->routed : p->h, p->T, D * 4, D * 4, ROWS))
        return false;
    cuda_hc_launch(s, many_kernel<ROUTED>, (unsigned)clusters, THREADS, shared, *p, h, y, routed);
    return true;
}

bool cuda_hc_boundary_many(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    return p->routed ? launch<true>(s, p) : launch<false>(s, p);
}
