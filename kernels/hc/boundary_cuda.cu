/* kernels/hc/boundary_cuda.cu - from one sub-layer to the next in one pass over the streams: routed sum,
 * expand, collapse and norm, for four bf16 streams of the deployed width.
 *
 * A cluster of sixteen blocks of threads takes sixteen rows at a time; each block has a sixteenth of the
 * columns of all four streams, and of fn what belongs to them: for good, in registers. So the
 * streams are read once and written once, and fn once. What a block needs of the others - sums over a
 * row - they send to its shared memory, a message a round, counted by a barrier there (a barrier of the
 * cluster would wait for all stores, also those to memory). Three steps of three tiles run side by side,
 * so that what is waited for was sent a round ago:
 *
 *     A  tile i    a warp a row, a lane eight columns: y (+ routed), new streams, their squares; then a warp
 *                  64 of k: 24 mixes of 16 rows on the matrix unit. Sums go to the other blocks.
 *     B  tile i-1  a warp a row: adds up the sums, pre, x, its squares. Squares go to the other blocks.
 *     C  tile i-2  a warp a row: adds up the squares, norm, store.
 *
 * A block also makes post and comb of the tile's row that has its number. Twenty rounds of Sinkhorn are a
 * long chain of small steps: they wait until sixteen tiles have left a row each, a lane a row. Two tiles
 * are on their way from memory meanwhile, by copies whose bytes the same thread uses.
 *
 * The mixes: an f32 weight is read as the sum of two bf16, which is off by 2^-18 of it at most (a third
 * would make it exact, and take registers that there are not; tf32 is off by 2^-12). Slots of k as mma.cuh
 * has them, weights on the M side. Order of sums: 64 k in the matrix unit; sixteen of these by one tree;
 * sixteen blocks by another. A row's result knows nothing of its neighbours, so neither of T.
 *
 * Measured on an H200 with the norm: 464 us for 8,192 rows where memory would allow 158 (a cluster's round of
 * steps takes 6 us, in which warps wait for each other and for chains of sums most of the time), 8 us for
 * one row. Of clusters of sixteen it holds seven.
 */
#include "kernels/cuda/mma.cuh"
#include "kernels/hc/boundary.cuh"

extern "C" {
int kern_add_cuda(struct kern_stream *s, const struct kern_add *p);
int kern_hc_expand_cuda(struct kern_stream *s, const struct kern_hc_expand *p);
int kern_hc_collapse_cuda(struct kern_stream *s, const struct kern_hc_collapse *p);
int kern_rmsnorm_cuda(struct kern_stream *s, const struct kern_rmsnorm *p);
}

enum {
    D = 4096,
    STREAMS = 4,
    MIXES = (2 + STREAMS) * STREAMS,
    BLOCKS = 16, /* of a cluster: more than every machine must have */
    COLUMNS = D / BLOCKS,
    VEC = 8, /* bf16 of a 16-byte load */
    ROWS = 16,
    WARPS = 16,
    THREADS = 32 * WARPS,
    CHUNK = 64,                             /* k of a warp */
    AHEAD = 2,                              /* tiles on their way */
    SLOTS = AHEAD + 2,                      /* and those of A and B */
    ROW_BYTES = STREAMS * COLUMNS * 2 + 16, /* the gap: eight rows of a chunk lie in all banks */
    GATED = MIXES - STREAMS,                /* post and comb */
    PARTS = 2,                              /* bf16 of a weight */
    KEPT = 16,
    /* Floats of a message to all blocks: mixes of pre, squares of the streams, of x; all by rows. */
    SUMS = (STREAMS + 2) * ROWS,
    SUMS_LD = SUMS + 4 /* spread over banks */
};
static_assert(WARPS == BLOCKS && COLUMNS == 32 * VEC && STREAMS * COLUMNS == WARPS * CHUNK,
              "shares of threads");

struct tile_memory {
    uint8_t h[SLOTS][ROWS][ROW_BYTES];
    uint4 y[AHEAD][ROWS][32];
    float4 routed[AHEAD][ROWS][2][32];
    float gates[AHEAD][ROWS][GATED]; /* post [k], comb [k][j] */
    float sums[WARPS][MIXES * ROWS]; /* see sum_at() */
    float row_squares[ROWS];
    /* Messages, two rounds in turn. What goes out, and what came from all blocks. */
    struct {
        float sums[SUMS], gated[ROWS][GATED]; /* 16-byte aligned, as what follows */
    } out[2];
    struct {
        float sums[BLOCKS][SUMS_LD], gated[BLOCKS][GATED]; /* gated: of the block's own row */
    } in[2];
    uint64_t all_in[2];                         /* barriers */
    float norm[COLUMNS], base[GATED], scale[2]; /* what comes from the checkpoint */
    float kept[KEPT][GATED + 1];                /* see keep_gates() */
};

static_assert(sizeof(struct tile_memory) <= 227 * 1024, "what sm_90 has");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ void cluster_arrive(void)
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait(void)
{
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
static __device__ __forceinline__ uint32_t cluster_rank(void)
{
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
/* To block `rank`'s shared memory, counted by its barrier; all as in the block's own. */
static __device__ __forceinline__ void send(const void *from, void *to, uint64_t *barrier,
                                            uint32_t bytes, uint32_t rank)
{
    uint32_t at, counter;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(to)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(counter)
        : "r"(shared_address(barrier)), "r"(rank));
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], "
        "%2, [%3];" ::"r"(at),
        "r"(shared_address(from)), "r"(bytes), "r"(counter)
        : "memory");
}
/* One thread says how many bytes the barrier's next round has. */
static __device__ __forceinline__ void expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}
static __device__ __forceinline__ void await_all(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, "
                     "[%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
}
static __device__ __forceinline__ void copy4(float *to, const float *from)
{
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(__cvta_generic_to_global(from))
        : "memory");
}

template <int N> static __device__ __forceinline__ float tree(const float *v)
{
    if constexpr (N == 1)
        return v[0];
    else
        return tree<N / 2>(v) + tree<N / 2>(v + N / 2);
}
/* Over lanes 0..15 and 16..31, which hold the same. */
static __device__ __forceinline__ float sum_of_blocks(float v)
{
#pragma unroll
    for (int m = BLOCKS / 2; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}

/* Takes the bf16 nearest to two values out of them. */
static __device__ __forceinline__ uint32_t split2(float *x, float *y)
{
    const uint32_t u = dev_pack2(*x, *y);
    *x -= __uint_as_float(u << 16);
    *y -= __uint_as_float(u & 0xffff0000u);
    return u;
}

/* A warp's chunk of fn as operands: of rows g, g + 8 and g + 16, in each of four instructions two words,
 * which hold its slots; the largest part first. */
struct weights {
    uint32_t part[PARTS][CHUNK / 16][3][2];
};
/* From k on, sixteen consecutive weights a row and thread; zeros where fn has no such row. */
static __device__ __forceinline__ void load_weights(const struct kern_weight &fn, int32_t k, int g,
                                                    struct weights *w)
{
#pragma unroll
    for (int r = 0; r < 3; r++) {
        const int32_t n = 8 * r + g;
        float v[16];
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = 0.0f;
        const uint8_t *row = (const uint8_t *)fn.data + n * fn.row_bytes;
        if (n < fn.n && fn.fmt == KERN_W_F32) {
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                const float4 u = *(const float4 *)((const float *)row + k + i);
                v[i] = u.x, v[i + 1] = u.y, v[i + 2] = u.z, v[i + 3] = u.w;
            }
        } else if (n < fn.n) {
#pragma unroll
            for (int i = 0; i < 16; i += 8)
                dev_unpack8(*(const uint4 *)((const uint16_t *)row + k + i), v + i);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int i = 0; i < 16; i += 2)
                w->part[part][i / 4][r][i % 4 / 2] = split2(&v[i], &v[i + 1]);
    }
}

/* Where a warp's sum for a mix and a row lies: pairs of rows stay together, quads go to other banks. */
static __device__ __forceinline__ int sum_at(int mix, int row)
{
    return mix * ROWS + (row ^ (mix << 2 & 8));
}

/* The warp's chunk of k, all mixes and rows. */
static __device__ __forceinline__ void mix_chunk(const uint8_t (*h)[ROW_BYTES],
                                                 const struct weights &w, int warp, int g, int c,
                                                 int rows, float *sums)
{
    float acc[2][2][4];
    uint32_t x[2][8];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const uint4 *from = (const uint4 *)(h[8 * n + g] + warp * (2 * CHUNK) + 32 * c);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 v = from[i];
            x[n][4 * i] = v.x, x[n][4 * i + 1] = v.y, x[n][4 * i + 2] = v.z, x[n][4 * i + 3] = v.w;
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[m][n][e] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++)
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint32_t(*const u)[2] = w.part[part][i];
            const uint32_t a0[4] = {u[0][0], u[1][0], u[0][1], u[1][1]};
            const uint32_t a1[4] = {u[2][0], 0, u[2][1], 0};
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (8 * n >= rows) break;
                dev_mma(acc[0][n], a0, x[n] + 2 * i);
                dev_mma(acc[1][n], a1, x[n] + 2 * i);
            }
        }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int k = 0; k < 3; k++) /* mixes from 24 on are none */
            *(float2 *)(sums + sum_at(8 * k + g, 8 * n + 2 * c)) =
                make_float2(acc[k / 2][n][k % 2 * 2], acc[k / 2][n][k % 2 * 2 + 1]);
}

/* Eight columns of a row, two at a time: registers are scarce here. */
static __device__ __forceinline__ void expand8(const float *gates, const uint32_t y[4],
                                               uint32_t v[STREAMS][4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float f[STREAMS][2];
        const float y0 = __uint_as_float(y[e] << 16), y1 = __uint_as_float(y[e] & 0xffff0000u);
#pragma unroll
        for (int j = 0; j < STREAMS; j++) {
            f[j][0] = __uint_as_float(v[j][e] << 16);
            f[j][1] = __uint_as_float(v[j][e] & 0xffff0000u);
        }
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            const float4 c = *(const float4 *)(gates + STREAMS + STREAMS * k);
            float s0 = gates[k] * y0, s1 = gates[k] * y1;
            s0 = fmaf(c.x, f[0][0], s0), s1 = fmaf(c.x, f[0][1], s1);
            s0 = fmaf(c.y, f[1][0], s0), s1 = fmaf(c.y, f[1][1], s1);
            s0 = fmaf(c.z, f[2][0], s0), s1 = fmaf(c.z, f[2][1], s1);
            s0 = fmaf(c.w, f[3][0], s0), s1 = fmaf(c.w, f[3][1], s1);
            v[k][e] = dev_pack2(s0, s1);
        }
    }
}
static __device__ __forceinline__ float add_squares(uint4 v, float s)
{
    float f[VEC];
    dev_unpack8(v, f);
#pragma unroll
    for (int i = 0; i < VEC; i++) s = fmaf(f[i], f[i], s);
    return s;
}
static __device__ __forceinline__ uint4 collapse8(const uint4 h[STREAMS], const float pre[STREAMS])
{
    float f[VEC], s[VEC];
    dev_unpack8(h[0], f);
#pragma unroll
    for (int i = 0; i < VEC; i++) s[i] = pre[0] * f[i];
#pragma unroll
    for (int j = 1; j < STREAMS; j++) {
        dev_unpack8(h[j], f);
#pragma unroll
        for (int i = 0; i < VEC; i++) s[i] = fmaf(pre[j], f[i], s[i]);
    }
    return dev_pack8(s);
}

/* A thread's share of a tile: row `warp`, eight columns of each stream. */
struct share {
    int row, lane;
    int32_t column;
};
static __device__ __forceinline__ uint16_t *stream_at(const struct kern_hc_boundary &p,
                                                      const struct share &s, int32_t t)
{
    return (uint16_t *)p.h + (int64_t)t * (STREAMS * D) + s.column;
}
static __device__ __forceinline__ uint8_t *own_streams(struct tile_memory *m, const struct share &s,
                                                       uint32_t i)
{
    return m->h[i % SLOTS][s.row] + 16 * s.lane;
}

/* Row t, of the cluster's tile i. A row that is not there becomes zeros. */
static __device__ __forceinline__ void fetch(const struct kern_hc_boundary &p,
                                             struct tile_memory *m, const struct share &s,
                                             int32_t t, uint32_t i)
{
    const bool there = t < p.T;
    const uint16_t *from = stream_at(p, s, there ? t : 0);
    uint8_t *const own = own_streams(m, s, i);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) dev_copy16(own + j * (2 * COLUMNS), from + j * D, there);
    if (!p.y || !there) return;
    const int64_t at = (int64_t)t * D + s.column;
    dev_copy16(&m->y[i % AHEAD][s.row][s.lane], (const uint16_t *)p.y + at, true);
    if (p.routed) {
        dev_copy16(&m->routed[i % AHEAD][s.row][0][s.lane], p.routed + at, true);
        dev_copy16(&m->routed[i % AHEAD][s.row][1][s.lane], p.routed + at + 4, true);
    }
    float *const gates = m->gates[i % AHEAD][s.row];
    const int e = s.lane - STREAMS; /* comb[j][k] is e = 4 j + k */
    if (s.lane < STREAMS)
        copy4(gates + s.lane, p.post + t * STREAMS + s.lane);
    else if (s.lane < GATED)
        copy4(gates + STREAMS + e % STREAMS * STREAMS + e / STREAMS,
              p.comb + (int64_t)t * (STREAMS * STREAMS) + e);
}

/* What fetch() brought, expanded, to shared memory and back to where it came from; the squares of the row's
 * share of the streams. */
static __device__ __forceinline__ float expand_share(const struct kern_hc_boundary &p,
                                                     struct tile_memory *m, const struct share &s,
                                                     int32_t t, uint32_t i)
{
    uint8_t *const own = own_streams(m, s, i);
    uint32_t v[STREAMS][4];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        const uint4 u = *(const uint4 *)(own + j * (2 * COLUMNS));
        v[j][0] = u.x, v[j][1] = u.y, v[j][2] = u.z, v[j][3] = u.w;
    }
    if (p.y && t < p.T) {
        uint4 u = m->y[i % AHEAD][s.row][s.lane];
        if (p.routed) {
            const float4 a = m->routed[i % AHEAD][s.row][0][s.lane];
            const float4 b = m->routed[i % AHEAD][s.row][1][s.lane];
            float f[VEC];
            dev_unpack8(u, f);
            f[0] = a.x + f[0], f[1] = a.y + f[1], f[2] = a.z + f[2], f[3] = a.w + f[3];
            f[4] = b.x + f[4], f[5] = b.y + f[5], f[6] = b.z + f[6], f[7] = b.w + f[7];
            u = dev_pack8(f);
        }
        const uint32_t y[4] = {u.x, u.y, u.z, u.w};
        expand8(m->gates[i % AHEAD][s.row], y, v);
        uint16_t *const to = stream_at(p, s, t);
#pragma unroll
        for (int j = 0; j < STREAMS; j++) {
            const uint4 o = make_uint4(v[j][0], v[j][1], v[j][2], v[j][3]);
            *(uint4 *)(own + j * (2 * COLUMNS)) = o;
            *(uint4 *)(to + j * D) = o;
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
        squares = add_squares(make_uint4(v[j][0], v[j][1], v[j][2], v[j][3]), squares);
    return dev_warp_sum(squares);
}

/* The sum of all warps for mix threadIdx.x / 16 and row threadIdx.x % 16. */
static __device__ __forceinline__ float sum_of_warps(const struct tile_memory *m)
{
    const int at = sum_at(threadIdx.x / ROWS, threadIdx.x % ROWS);
    float v[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++) v[i] = m->sums[i][at];
    return tree<WARPS>(v);
}

/* A's sums to where they are sent from: what pre needs, and a row's other mixes. */
static __device__ __forceinline__ void put_sums(struct tile_memory *m, uint32_t round, float sum)
{
    enum { OF_ALL = STREAMS * ROWS };
    const int at = threadIdx.x;
    if (at < OF_ALL)
        m->out[round].sums[at] = sum;
    else if (at < MIXES * ROWS)
        m->out[round].gated[at % ROWS][at / ROWS - STREAMS] = sum;
    else if (at < (MIXES + 1) * ROWS)
        m->out[round].sums[OF_ALL + at - MIXES * ROWS] = sum;
}
/* By a warp for each block: all sums, and the other mixes of the row that has the block's number. */
static __device__ __forceinline__ void send_to(struct tile_memory *m, uint32_t round, uint32_t rank,
                                               uint32_t to, bool head)
{
    send(m->out[round].sums, m->in[round].sums[rank], &m->all_in[round], SUMS * 4, to);
    if (!head)
        send(m->out[round].gated[to], m->in[round].gated[rank], &m->all_in[round], GATED * 4, to);
}

static __device__ __forceinline__ float inverse_rms(const struct kern_hc_boundary &p,
                                                    const struct tile_memory *m, uint32_t round,
                                                    int row, int lane)
{
    const float s = sum_of_blocks(m->in[round].sums[lane % BLOCKS][STREAMS * ROWS + row]);
    return 1.0f / sqrtf(s / (float)(STREAMS * D) + p.norm_eps);
}

/* B: eight values of x, and the squares of the row's share of them. Eight lanes add up a mix, by the tree
 * of sum_of_blocks(); scale and base are those of the lane's mix. */
static __device__ __forceinline__ uint4 collapse_share(const struct kern_hc_boundary &p,
                                                       struct tile_memory *m, const struct share &s,
                                                       uint32_t i, uint32_t round, float scale,
                                                       float base, float *squares)
{
    const int mix = s.lane / 8, b = s.lane % 8;
    float mine =
        m->in[round].sums[b][mix * ROWS + s.row] + m->in[round].sums[b + 8][mix * ROWS + s.row];
#pragma unroll
    for (int k = 4; k; k >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, k);
    const float rs = inverse_rms(p, m, round, s.row, s.lane);
    mine = dev_sigmoid(fmaf(mine * rs, scale, base)) + p.hc_eps;
    float pre[STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) pre[j] = __shfl_sync(0xffffffffu, mine, 8 * j);
    const uint8_t *own = own_streams(m, s, i);
    uint4 v[STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) v[j] = *(const uint4 *)(own + j * (2 * COLUMNS));
    const uint4 x = collapse8(v, pre);
    *squares = dev_warp_sum(add_squares(x, 0.0f));
    return x;
}

/* C. */
static __device__ __forceinline__ uint4 norm_share(const struct kern_hc_boundary &p,
                                                   const struct tile_memory *m,
                                                   const struct share &s, uint32_t round, uint4 x)
{
    float f[VEC];
    const float4 a = *(const float4 *)(m->norm + VEC * s.lane);
    const float4 b = *(const float4 *)(m->norm + VEC * s.lane + 4);
    const float w[VEC] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    const float sum =
        sum_of_blocks(m->in[round].sums[s.lane % BLOCKS][(STREAMS + 1) * ROWS + s.row]);
    const float rs = 1.0f / sqrtf(sum / (float)D + p.norm_eps);
    dev_unpack8(x, f);
#pragma unroll
    for (int e = 0; e < VEC; e++) f[e] = w[e] * (f[e] * rs);
    return dev_pack8(f);
}

/* What the mixes of the block's own row say about post and comb, as far as lanes can work side by side; by
 * one warp. Lane 4 j + k has comb[j][k] after the softmax and the first division of columns, lane 16 + k
 * post[k]. */
static __device__ __forceinline__ void keep_gates(const struct kern_hc_boundary &p,
                                                  struct tile_memory *m, uint32_t rank, uint32_t i,
                                                  uint32_t round, int lane)
{
    enum { COMB = STREAMS * STREAMS };
    const int mix = lane < COMB ? STREAMS + lane : lane % STREAMS;
    const float rs = inverse_rms(p, m, round, (int)rank, lane);
    float v[BLOCKS];
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) v[k] = m->in[round].gated[k][mix];
    const float x = fmaf(tree<BLOCKS>(v) * rs, m->scale[lane < COMB], m->base[mix]);
    float top = x;
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float e = dev_exp(lane < COMB ? x - top : -x);
    float sum = e + __shfl_xor_sync(0xffffffffu, e, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    float c = (lane < COMB ? e : 2.0f) / (lane < COMB ? sum : 1.0f + e);
    if (lane < COMB) c += p.hc_eps;
    sum = c + __shfl_xor_sync(0xffffffffu, c, 4);
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    if (lane < COMB && p.iters > 0) c *= __fdividef(1.0f, sum + p.hc_eps);
    if (lane < GATED) m->kept[i % KEPT][lane] = c;
}
/* Post and comb of up to KEPT tiles' rows, the last being row t of the cluster's tile i, `step` from one to
 * the next: a lane a row. */
static __device__ __forceinline__ void make_gates(const struct kern_hc_boundary &p,
                                                  const struct tile_memory *m, uint32_t i,
                                                  int32_t t, int32_t step, int lane)
{
    __syncwarp();
    const int32_t back = (int32_t)(i % KEPT) - lane;
    t -= back * step;
    if (back < 0 || t >= p.T) return;
    float *const post = p.post + (int64_t)t * STREAMS;
    float *const comb = p.comb + (int64_t)t * (STREAMS * STREAMS);
    float c[STREAMS * STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS * STREAMS; k++) c[k] = m->kept[lane][k];
#pragma unroll 1
    for (int32_t k = 1; k < p.iters; k++) {
        divide_rows<STREAMS>(c, STREAMS, p.hc_eps);
        divide_columns<STREAMS>(c, STREAMS, p.hc_eps);
    }
#pragma unroll
    for (int k = 0; k < STREAMS; k++) post[k] = m->kept[lane][STREAMS * STREAMS + k];
#pragma unroll
    for (int k = 0; k < STREAMS * STREAMS; k++) comb[k] = c[k];
}

static __global__ void __launch_bounds__(THREADS, 1) boundary_kernel(struct kern_hc_boundary p)
{
    extern __shared__ __align__(16) uint8_t memory[];
    struct tile_memory *const m = (struct tile_memory *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
    const uint32_t rank = cluster_rank();
    const struct share s = {warp, lane, (int32_t)rank * COLUMNS + VEC * lane};
    const bool norm = p.norm.data != NULL, gates = !p.head && warp == (int)(rank ^ 8);
    /* Rows of the cluster's first tile, and from one tile to its next. */
    const int32_t t0 = (int32_t)(blockIdx.x / BLOCKS) * ROWS + warp;
    const int32_t step = (int32_t)(gridDim.x / BLOCKS) * ROWS;
    const uint32_t n = (uint32_t)(p.T - (t0 - warp) + step - 1) / (uint32_t)step;
    const uint32_t rounds = norm ? n + 1 : n;
    const uint32_t bytes = 4 * BLOCKS * (SUMS + (p.head ? 0 : GATED));
    if (threadIdx.x == 0) {
#pragma unroll
        for (int k = 0; k < 2; k++)
            asm volatile(
                "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&m->all_in[k])));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        expect(&m->all_in[0], bytes);
        expect(&m->all_in[1], bytes);
    }
    if (norm && threadIdx.x < COLUMNS)
        m->norm[threadIdx.x] = dev_vec(p.norm, (int64_t)rank * COLUMNS + threadIdx.x);
    if (!p.head && threadIdx.x < GATED) m->base[threadIdx.x] = p.base[STREAMS + threadIdx.x];
    if (!p.head && threadIdx.x < 2) m->scale[threadIdx.x] = p.scale[1 + threadIdx.x];
    __syncthreads();
    cluster_arrive(); /* all must have begun before one writes to another */
    cuda_hurry();
    struct weights w;
    load_weights(p.fn,
                 warp * CHUNK / COLUMNS * D + (int32_t)rank * COLUMNS + warp * CHUNK % COLUMNS +
                     16 * c,
                 g, &w);
    const float scale = p.scale[0], base = p.base[lane / 8];
    cuda_await();
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++) {
        if (i < n) fetch(p, m, s, t0 + (int32_t)i * step, i);
        dev_copy_commit();
    }
    uint4 x = make_uint4(0, 0, 0, 0);
    int32_t t = t0; /* row of tile i */
#pragma unroll 1
    for (uint32_t i = 0; i <= rounds; i++) {
        float sum = 0.0f;
        if (i < n) {
            dev_copy_wait<AHEAD - 1>();
            __syncwarp(); /* gates came by other lanes */
            const float squares = expand_share(p, m, s, t, i);
            if (lane == 0) m->row_squares[warp] = squares;
            __syncthreads();
            if (i + AHEAD < n) fetch(p, m, s, t + AHEAD * step, i + AHEAD);
            dev_copy_commit();
            if ((int)threadIdx.x >= MIXES * ROWS && threadIdx.x < (MIXES + 1) * ROWS)
                sum = m->row_squares[threadIdx.x - MIXES * ROWS];
            mix_chunk(m->h[i % SLOTS], w, warp, g, c, p.T - (t - warp), m->sums[warp]);
            __syncthreads();
            if (threadIdx.x < MIXES * ROWS) sum = sum_of_warps(m);
        }
        if (i == 0) {
            cluster_wait();
        } else {
            const uint32_t last = (i - 1) % 2;
            await_all(&m->all_in[last], (i - 1) / 2 % 2);
            if (threadIdx.x == 0) expect(&m->all_in[last], bytes);
            if (norm && i >= 2) {
                const uint4 o = norm_share(p, m, s, last, x);
                const int32_t to = t - 2 * step;
                if (to < p.T) *(uint4 *)((uint16_t *)p.x + (int64_t)to * D + s.column) = o;
            }
            if (i <= n) {
                float squares;
                const int32_t to = t - step;
                x = collapse_share(p, m, s, i - 1, last, scale, base, &squares);
                if (norm && lane == 0)
                    m->out[i % 2].sums[(STREAMS + 1) * ROWS + warp] = squares;
                else if (!norm && to < p.T)
                    *(uint4 *)((uint16_t *)p.x + (int64_t)to * D + s.column) = x;
                if (gates) keep_gates(p, m, rank, i - 1, last, lane);
            }
        }
        if (i < rounds) {
            if (i < n) put_sums(m, i % 2, sum);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads(); /* what came in was read, what goes out is there */
            if (lane == 0) send_to(m, i % 2, rank, (uint32_t)warp, p.head);
        }
        if (gates && i >= 1 && i <= n && (i == n || i % KEPT == 0))
            make_gates(p, m, i - 1, t - step - warp + (int32_t)rank, step, lane);
        t += step;
    }
}

#else

static __global__ void boundary_kernel(struct kern_hc_boundary p)
{
    (void)p;
}

#endif

/* Clusters that the device holds at a time; 0 where it has none of this size. Asked once on each. */
static int clusters_at_once(struct kern_stream *s, const cudaLaunchConfig_t *c)
{
    static struct {
        bool known;
        int most;
    } of[CUDA_MAX_DEVICES];
    if (s->arch != 90 || s->number >= CUDA_MAX_DEVICES) return 0;
    CUDA_SHARED(boundary_kernel, s->max_shared);
    if (of[s->number].known) return of[s->number].most;
    int most = 0;
    if (cudaFuncSetAttribute(boundary_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
            cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&most, boundary_kernel, c) != cudaSuccess) {
        cudaGetLastError();
        most = 0;
    }
    of[s->number].known = true;
    return of[s->number].most = most;
}

bool cuda_hc_boundary(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    if (p->act != KERN_BF16 || p->hc != STREAMS || p->D != D || !cuda_aligned16(p->y) ||
        !cuda_aligned16(p->routed) || !cuda_aligned16(p->h) || !cuda_aligned16(p->x) ||
        !cuda_aligned16(p->fn.data) || p->fn.row_bytes % 16 != 0 || !cuda_aligned16(p->norm.data))
        return false;
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = BLOCKS;
    attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(BLOCKS);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = sizeof(struct tile_memory);
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = 1;
    const int most = clusters_at_once(s, &c);
    const int64_t tiles = cuda_ceil(p->T, ROWS);
    if (most == 0) return false;
    c.gridDim = dim3((unsigned)(BLOCKS * (tiles < most ? tiles : most)));
    c.numAttrs = cuda_early_launches ? 2 : 1;
    cudaLaunchKernelEx(&c, boundary_kernel, *p);
    return true;
}

extern "C" int kern_hc_boundary_cuda(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    if (p->T == 0) return 0;
    if (cuda_hc_boundary(s, p)) return cuda_done(s, "hc_boundary");
    const struct kern_add add = kern_hc_boundary_add(p);
    const struct kern_hc_expand expand = kern_hc_boundary_expand(p);
    const struct kern_hc_collapse collapse = kern_hc_boundary_collapse(p);
    const struct kern_rmsnorm norm = kern_hc_boundary_norm(p);
    int rc = p->routed ? kern_add_cuda(s, &add) : 0;
    if (rc == 0 && p->y) rc = kern_hc_expand_cuda(s, &expand);
    if (rc == 0) rc = kern_hc_collapse_cuda(s, &collapse);
    return rc < 0 ? rc : kern_rmsnorm_cuda(s, &norm);
}
