/* kernels/gemm/narrow_cuda.cu - up to 128 rows of x times placed fp8 or bf16 weights by wgmma: the decode
 * product of sm_90a, of both kinds.
 *
 * A block of threads has 128 weight rows x N rows of x, 8 to 128. One thread keeps a ring of blocks of 128 k
 * filled by the copy engine, which has enough bytes under way to keep memory busy; it begins with
 * weights, before the rows of x are quantized. Two warpgroups of 64 weight rows each multiply: codes as
 * they lie in the ring, or else weights that become operands in registers, where rows of x have k in
 * the order of slots (mma.cuh).
 * Many tiles of weight rows: each block of threads takes several, one after the other, and totals stay in
 * registers. Few: a cluster of 2 to 8 shares out the blocks of k in turns. Then sums of blocks go, as they
 * lie in registers, to the shared memory of the one that adds up these rows (each has its part of the
 * 128), which puts them into their order; two areas, so that one is filled while the other is added up.
 */
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/gemm/product.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    WARPS = 8, /* that multiply; one more, of which one thread works */
    THREADS = 32 * WARPS + 32,
    ROWS = 128, /* weight rows of a tile: one scale */
    ALIGN = 1024,
    MOST_SHARED = 227 * 1024,
    MOST = 8, /* blocks of threads of a cluster, that every machine with clusters has */
    MOST_STAGES = 8,
    FRAGMENT = 32 * 16,   /* of a warp: 16 rows x 8 columns of sums */
    AREA = 64 * FRAGMENT, /* for sums on their way */
    BAR_BYTES = 256,
};
/* Codes: weights F are FP8, and x is codes too. */
template <int N, kern_wfmt F, bool CODES> struct tile {
    enum {
        /* Of a block of k there are so many pieces of 128 bytes a row. */
        W_PIECES = F == KERN_W_BF16 ? 2 : 1,
        X_PIECES = CODES ? 1 : 2,
        W_PIECE = ROWS * TILE_BYTES,
        X_PIECE = N * TILE_BYTES,
        W_BYTES = W_PIECES * W_PIECE,
        STAGE = W_BYTES + X_PIECES * X_PIECE,
        SHARES = N <= 64,           /* may be a cluster's */
        HELD = SHARES ? 64 / N : 1, /* blocks of k of one block of threads in an area */
        OUT = N * 2 * ROWS,         /* a finished tile, where no sums are on their way */
        AREAS = SHARES ? 2 * AREA : OUT,
        SCALE_BYTES = CODES             ? 20 * 1024
                      : F == KERN_W_FP8 ? 2048
                                        : 0, /* of all blocks of k */
        ROOM = (MOST_SHARED - ALIGN - BAR_BYTES - SCALE_BYTES - AREAS) / STAGE,
        S = ROOM < MOST_STAGES ? ROOM : MOST_STAGES,
        SCALES = S * STAGE + AREAS, /* where they lie */
        BARS = SCALES + SCALE_BYTES,
        BYTES = BARS + BAR_BYTES + ALIGN,
        NS = N < 64 ? N : 64, /* columns summed at a time */
    };
    static_assert((int)S >= 2 && (int)OUT <= (int)AREAS, "enough under way");
    static_assert(!SHARES || HELD * WARPS * (N / 8) * FRAGMENT == AREA, "an area is full");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct bars {
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
    uint64_t came[2], added[2]; /* of areas: sums of a turn have come; all have added up theirs */
};
static_assert(sizeof(struct bars) <= BAR_BYTES, "the room for them");

/* What one block of threads has: tiles from `tile` on, `step` apart; of each, blocks of k from `rank` on, ks
 * apart. */
struct share {
    uint8_t *ring, *areas;
    float *scales; /* [n_blocks, N] of x, where it is codes; [n_blocks] of weights */
    struct bars *bars;
    int32_t tile, step, tiles;
    int32_t rank, ks, n_blocks;
    int32_t group, t; /* first row of x */
};

template <int N, kern_wfmt F, bool CODES>
static __device__ __forceinline__ void fill(const CUtensorMap &x, const CUtensorMap &w,
                                            const struct cuda_product &p, const struct share &m)
{
    using C = struct tile<N, F, CODES>;
    const int32_t each = (m.n_blocks - m.rank + m.ks - 1) / m.ks;
    const int32_t all = (m.tiles - m.tile + m.step - 1) / m.step * each;
    const auto load_w = [&](int32_t i) {
        uint64_t *full = &m.bars->full[i % C::S];
        bar_expect(full, C::STAGE);
#pragma unroll
        for (int q = 0; q < C::W_PIECES; q++)
            tile_load(m.ring + i % C::S * C::STAGE + q * C::W_PIECE, &w, full,
                      ((m.rank + i % each * m.ks) * C::W_PIECES + q) * TILE_BYTES,
                      m.group * p.N + (m.tile + i / each * m.step) * ROWS);
    };
    const auto load_x = [&](int32_t i) {
#pragma unroll
        for (int q = 0; q < C::X_PIECES; q++)
            tile_load(m.ring + i % C::S * C::STAGE + C::W_BYTES + q * C::X_PIECE, &x,
                      &m.bars->full[i % C::S],
                      ((m.group * m.n_blocks + m.rank + i % each * m.ks) * C::X_PIECES + q) *
                          TILE_BYTES,
                      m.t);
    };
    const int32_t first = all < C::S ? all : C::S;
    for (int32_t i = 0; i < first; i++) load_w(i);
    cudaGridDependencySynchronize(); /* what makes x may have been still at work */
    for (int32_t i = 0; i < first; i++) load_x(i);
    for (int32_t i = first; i < all; i++) {
        bar_wait(&m.bars->empty[i % C::S], (i / C::S - 1) & 1);
        load_w(i);
        load_x(i);
    }
}

/* Weights of a block of k in stage i, when it has come: this thread's, as operands. */
template <int N, kern_wfmt F>
static __device__ __forceinline__ void operands(const uint8_t *stage, uint32_t a[8][4])
{
    using C = struct tile<N, F, false>;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, c = lane % 4;
#pragma unroll
    for (int q = 0; q < 2; q++) {
        struct weights16<F> ws;
        enum { EACH = weights16<F>::EACH / 16 }; /* pieces of 16 bytes that a thread has of a row */
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                /* bf16: this half of the block is a piece of its own. */
                const uint8_t *from =
                    stage + (F == KERN_W_BF16 ? q * C::W_PIECE : 0) + (row + 8 * r) * TILE_BYTES;
                const int piece = (F == KERN_W_BF16 ? 0 : 4 * q) + c * EACH + i;
                const uint4 v = *(const uint4 *)(from + (piece ^ (row & 7)) * 16);
                ws.v[r][4 * i] = v.x, ws.v[r][4 * i + 1] = v.y;
                ws.v[r][4 * i + 2] = v.z, ws.v[r][4 * i + 3] = v.w;
            }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t one[1][4];
            weights_operand<F>(ws, i, one);
#pragma unroll
            for (int e = 0; e < 4; e++) a[4 * q + i][e] = one[0][e];
        }
    }
}

/* Block of k in stage i of the ring: its sums, h being the first of its columns / NS. */
template <int N, kern_wfmt F, bool CODES>
static __device__ __forceinline__ void block_sums(const uint8_t *stage, int h,
                                                  const uint32_t a[8][4],
                                                  float (&sum)[tile<N, F, CODES>::NS / 2])
{
    using C = struct tile<N, F, CODES>;
    const uint64_t x = wgmma_rows(stage + C::W_BYTES + h * (C::NS * TILE_BYTES));
    wgmma_fence();
    if (CODES) {
        const uint64_t w = wgmma_rows(stage + threadIdx.x / 128 * (64 * TILE_BYTES));
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_e4m3(sum, w + 2 * k, x + 2 * k, k > 0);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++)
            wgmma_bf16(sum, a[k], x + k / 4 * (C::X_PIECE / 16) + k % 4 * 2, k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(sum);
}

/* All scales of x, and of one tile of weights, to shared memory. */
template <int N, kern_wfmt F, bool CODES>
static __device__ __forceinline__ void load_scales(const struct cuda_product &p,
                                                   const struct share &m)
{
    const int32_t first = CODES ? m.n_blocks * N : 0;
    for (int32_t i = threadIdx.x; i < first; i += 32 * WARPS)
        m.scales[i] =
            p.x_scales[(int64_t)(m.group * m.n_blocks + i / N) * p.ld_scales + m.t + i % N];
    if (F == KERN_W_FP8)
        for (int32_t b = threadIdx.x; b < m.n_blocks; b += 32 * WARPS)
            m.scales[first + b] = block_scale(p, (m.group * p.N + m.tile * ROWS) / BLOCK_N, b);
    asm volatile("bar.sync 1, 256;" ::: "memory");
}
/* Of columns 8 n + 2 c and the next one. */
template <int N, bool CODES>
static __device__ __forceinline__ float2 column_scales(const struct share &m, int32_t b, int n)
{
    if (!CODES) return make_float2(1.0f, 1.0f);
    return *(const float2 *)(m.scales + b * N + 8 * n + threadIdx.x % 4 * 2);
}
/* Four sums of a fragment to their totals. */
static __device__ __forceinline__ void add_block(float *total, const float *sum, float w_scale,
                                                 float2 x_scale)
{
    const float s0 = w_scale * x_scale.x, s1 = w_scale * x_scale.y;
    total[0] = fmaf(sum[0], s0, total[0]);
    total[1] = fmaf(sum[1], s1, total[1]);
    total[2] = fmaf(sum[2], s0, total[2]);
    total[3] = fmaf(sum[3], s1, total[3]);
}
/* Rows n + g and n + g + 8 of the group, columns 8 i + 2 c and the next one. */
template <kern_wfmt F, bool CODES>
static __device__ __forceinline__ void store_fragment(const struct cuda_product &p,
                                                      const struct share &m, int32_t n, int i,
                                                      const float *total)
{
    n += threadIdx.x % 32 / 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int32_t row = n + e / 2 * 8, t = m.t + 8 * i + threadIdx.x % 4 * 2 + e % 2;
        const int64_t of_all = (int64_t)m.group * p.N + row;
        if (row < p.N && t < p.T)
            dev_store(p.y, t * p.ld_y + of_all, p.y_dtype,
                      CODES ? total[e] : finished<F>(p, of_all, total[e]));
    }
}

/* The finished tile, weight rows from n of the group on: turned in shared memory, so that rows of y are
 * written in wide pieces. */
template <int N, kern_wfmt F, bool CODES>
static __device__ __forceinline__ void
store_tile_of(const struct cuda_product &p, const struct share &m, int32_t n, float (&total)[N / 2])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4;
    const int64_t first = (int64_t)m.group * p.N + n;
    if (N < 16 || p.y_dtype != KERN_BF16 || p.ld_y % 8 || first % 8 || (uintptr_t)p.y % 16) {
#pragma unroll
        for (int i = 0; i < N / 8; i++)
            store_fragment<F, CODES>(p, m, n + warp * 16, i, total + 4 * i);
        return;
    }
    if (!CODES) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = warp * 16 + lane / 4 + 8 * r;
            if (n + row >= p.N) continue;
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                if (i % 4 / 2 == r) total[i] = finished<F>(p, first + row, total[i]);
        }
    }
    uint8_t *out = m.areas + half * (N * ROWS); /* 64 of bf16 a row */
#pragma unroll
    for (int j = 0; j < N / 16; j++) {
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const __nv_bfloat162 two =
                __floats2bfloat162_rn(total[8 * j + 2 * e], total[8 * j + 2 * e + 1]);
            memcpy(&r[e], &two, 4);
        }
        const int row = 16 * j + lane / 16 * 8 + lane % 8, piece = warp % 4 * 2 + lane / 8 % 2;
        dev_store_matrix4_trans(out + row * 128 + (piece ^ (row & 7)) * 16, r);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory");
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        const int row = i * 16 + threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
        const uint4 u = *(const uint4 *)(out + row * 128 + (piece ^ (row & 7)) * 16);
        const int32_t t = m.t + row, to = half * 64 + piece * 8;
        if (t >= p.T) continue;
        uint16_t *y = (uint16_t *)p.y + t * p.ld_y + first + to;
        if (n + to + 8 <= p.N) {
            *(uint4 *)y = u;
        } else {
            const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (n + to + e < p.N) y[e] = (uint16_t)(words[e / 2] >> (e % 2 * 16));
        }
    }
    asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory");
}

template <int N, kern_wfmt F, bool CODES>
static __device__ __forceinline__ void multiply_alone(const struct cuda_product &p,
                                                      const struct share &m)
{
    using C = struct tile<N, F, CODES>;
    enum { NS = C::NS };
    int slot = 0, phase = 0;
    for (int32_t t = m.tile; t < m.tiles; t += m.step) {
        const int32_t scale_row = (m.group * p.N + t * ROWS) / BLOCK_N;
        float sum[NS / 2], total[N / 2];
#pragma unroll
        for (int e = 0; e < N / 2; e++) total[e] = 0;
        for (int32_t b = 0; b < m.n_blocks; b++) {
            const uint8_t *stage = m.ring + slot * C::STAGE;
            const float w_scale = F == KERN_W_FP8 ? block_scale(p, scale_row, b) : 1.0f;
            uint32_t a[8][4];
            bar_wait(&m.bars->full[slot], phase);
            if (!CODES) operands<N, F == KERN_W_BF16 ? KERN_W_BF16 : KERN_W_FP8>(stage, a);
#pragma unroll
            for (int h = 0; h < N / NS; h++) {
                block_sums<N, F, CODES>(stage, h, a, sum);
                if (h == N / NS - 1 && threadIdx.x % 32 == 0) bar_arrive(&m.bars->empty[slot]);
#pragma unroll
                for (int n = 0; n < NS / 8; n++)
                    add_block(total + h * (NS / 2) + 4 * n, sum + 4 * n, w_scale,
                              column_scales<N, CODES>(m, b, h * (NS / 8) + n));
            }
            if (++slot == C::S) slot = 0, phase ^= 1;
        }
        store_tile_of<N, F, CODES>(p, m, t * ROWS, total);
    }
}

template <int N, kern_wfmt F, bool CODES>
static __device__ __forceinline__ void multiply_shared(const struct cuda_product &p,
                                                       const struct share &m)
{
    using C = struct tile<N, F, CODES>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int per = WARPS / m.ks, to = warp / per; /* 16 rows a warp: who adds them up */
    const int32_t turn_blocks = C::HELD * m.ks,
                  turns = (m.n_blocks + turn_blocks - 1) / turn_blocks;
    const float *w_scales = m.scales + (CODES ? m.n_blocks * N : 0);
    enum { MINE = (N / 8 + 1) / 2 }; /* fragments a warp adds up, at most: of two in a cluster */
    float total[MINE][4];
#pragma unroll
    for (int j = 0; j < MINE; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) total[j][e] = 0;
    int slot = 0, phase = 0;
    for (int32_t turn = 0; turn < turns; turn++) {
        const int area = turn & 1;
        const int32_t b0 = turn * turn_blocks,
                      n_now = m.n_blocks - b0 < turn_blocks ? m.n_blocks - b0 : turn_blocks;
        uint64_t *came = &m.bars->came[area], *added = &m.bars->added[area];
        if (turn >= 2) bar_wait(added, (turn / 2 - 1) & 1);
        const uint32_t there = dev_shared_of(m.areas + area * AREA, to);
        for (int32_t b = m.rank; b < n_now; b += m.ks) {
            const uint8_t *stage = m.ring + slot * C::STAGE;
            float sum[N / 2];
            uint32_t a[8][4];
            bar_wait(&m.bars->full[slot], phase);
            if (!CODES) operands<N, F == KERN_W_BF16 ? KERN_W_BF16 : KERN_W_FP8>(stage, a);
            block_sums<N, F, CODES>(stage, 0, a, sum);
            if (lane == 0) bar_arrive(&m.bars->empty[slot]);
            if (++slot == C::S) slot = 0, phase ^= 1;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
                remote_store(there + ((b * per + warp % per) * (N / 8) + n) * FRAGMENT + lane * 16,
                             sum + 4 * n);
        }
        __syncwarp();
        if (lane == 0) bar_arrive_written(came, to);
        bar_wait_cluster(came, turn / 2 & 1);
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const int f = j * WARPS + warp; /* 16 rows x 8 columns */
            if (f >= per * (N / 8)) break;
            const uint8_t *from = m.areas + area * AREA + f * FRAGMENT + lane * 16;
#pragma unroll 4
            for (int32_t b = 0; b < n_now; b++) {
                const float4 v = *(const float4 *)(from + b * per * (N / 8) * FRAGMENT);
                const float sum[4] = {v.x, v.y, v.z, v.w};
                add_block(total[j], sum, F == KERN_W_FP8 ? w_scales[b0 + b] : 1.0f,
                          column_scales<N, CODES>(m, b0 + b, f % (N / 8)));
            }
        }
        if (turn + 2 >= turns) continue; /* nobody waits */
        __syncwarp();
        if (lane < m.ks) bar_arrive_at(added, lane);
    }
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        const int f = j * WARPS + warp;
        if (f >= per * (N / 8)) break;
        store_fragment<F, CODES>(p, m, m.tile * ROWS + (m.rank * per + f / (N / 8)) * 16,
                                 f % (N / 8), total[j]);
    }
}

template <int N, kern_wfmt F, bool CODES>
static __global__ void __launch_bounds__(THREADS, 1)
    narrow_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                  const struct cuda_product p, int32_t tiles, int ks)
{
    using C = struct tile<N, F, CODES>;
    extern __shared__ __align__(16) uint8_t shared[];
    struct share m;
    m.ring = shared + (ALIGN - dev_shared(shared) % ALIGN) % ALIGN;
    m.areas = m.ring + C::S * C::STAGE;
    m.scales = (float *)(m.ring + C::SCALES);
    m.bars = (struct bars *)(m.ring + C::BARS);
    m.tile = blockIdx.x / ks, m.step = gridDim.x / ks, m.tiles = tiles;
    m.rank = blockIdx.x % ks, m.ks = ks, m.n_blocks = p.Kx / BLOCK_K;
    m.group = blockIdx.y, m.t = blockIdx.z * N;
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::S; i++)
            bar_init(&m.bars->full[i], 1), bar_init(&m.bars->empty[i], WARPS);
        for (int i = 0; i < 2; i++)
            bar_init(&m.bars->came[i], WARPS), bar_init(&m.bars->added[i], WARPS * ks);
        bar_init_done();
    }
    if (ks > 1)
        cluster_meet(); /* nobody writes to a block that has not begun */
    else
        __syncthreads();
    if (threadIdx.x / 32 == WARPS) {
        if (threadIdx.x % 32 == 0) fill<N, F, CODES>(x, w, p, m);
        return;
    }
    cudaGridDependencySynchronize();
    load_scales<N, F, CODES>(p, m);
    if (!C::SHARES || ks == 1)
        multiply_alone<N, F, CODES>(p, m);
    else if constexpr (C::SHARES)
        multiply_shared<N, F, CODES>(p, m);
}
#else
template <int N, kern_wfmt F, bool CODES>
static __global__ void narrow_kernel(const __grid_constant__ CUtensorMap x,
                                     const __grid_constant__ CUtensorMap w,
                                     const struct cuda_product p, int32_t tiles, int ks)
{
}
#endif

/* How many clusters of ks blocks of threads run at the same time: less than multiprocessors / ks, because a
 * cluster does not span groups of them. */
template <int N, kern_wfmt F, bool CODES>
static int clusters_beside(const struct kern_stream *s, int ks)
{
    static int known[MOST + 1];
    if (!known[ks]) {
        cudaLaunchAttribute attr = {};
        attr.id = cudaLaunchAttributeClusterDimension;
        attr.val.clusterDim.x = (unsigned)ks;
        attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
        cudaLaunchConfig_t c = {};
        c.gridDim = dim3((unsigned)(s->n_sm / ks * ks));
        c.blockDim = dim3(THREADS);
        c.dynamicSmemBytes = tile<N, F, CODES>::BYTES;
        c.attrs = &attr;
        c.numAttrs = 1;
        CUDA_SHARED((narrow_kernel<N, F, CODES>), (tile<N, F, CODES>::BYTES));
        if (cudaOccupancyMaxActiveClusters(&known[ks], narrow_kernel<N, F, CODES>, &c) !=
            cudaSuccess)
            known[ks] = s->n_sm / ks;
    }
    return known[ks];
}

template <int N, kern_wfmt F, bool CODES>
static bool launch(struct kern_stream *s, const struct cuda_product *p)
{
    using C = struct tile<N, F, CODES>;
    CUtensorMap x, w;
    const int64_t width = (int64_t)p->groups * p->Kx * (CODES ? 1 : 2);
    if (!cuda_tile_map(&x, CODES ? (const void *)p->codes : p->x, p->T, width, width, N) ||
        !cuda_tile_map(&w, p->w, (int64_t)p->groups * p->N, p->row_bytes, p->row_bytes, ROWS))
        return false;
    const int64_t tiles = cuda_ceil(p->N, ROWS), columns = cuda_ceil(p->T, N),
                  beside = p->groups * columns, n_blocks = p->Kx / BLOCK_K;
    int ks = 1;
    while (C::SHARES && ks < MOST && 4 * ks <= n_blocks &&
           tiles * beside <= clusters_beside<N, F, CODES>(s, 2 * ks))
        ks *= 2;
    const int64_t room = s->n_sm / beside > 1 ? s->n_sm / beside : 1;
    const int64_t across = ks > 1 || tiles < room ? tiles : room;
    cudaLaunchAttribute attrs[2] = {};
    unsigned n_attrs = 0;
    if (ks > 1) {
        attrs[n_attrs].id = cudaLaunchAttributeClusterDimension;
        attrs[n_attrs].val.clusterDim.x = (unsigned)ks;
        attrs[n_attrs].val.clusterDim.y = attrs[n_attrs].val.clusterDim.z = 1;
        n_attrs++;
    }
    if (cuda_early_products) {
        attrs[n_attrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attrs[n_attrs].val.programmaticStreamSerializationAllowed = 1;
        n_attrs++;
    }
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)(across * ks), (unsigned)p->groups, (unsigned)columns);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = C::BYTES;
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = n_attrs;
    CUDA_SHARED((narrow_kernel<N, F, CODES>), C::BYTES);
    cudaLaunchKernelEx(&c, narrow_kernel<N, F, CODES>, x, w, *p, (int32_t)tiles, ks);
    return true;
}

template <int N, kern_wfmt F, bool CODES> static bool scales_fit(const struct cuda_product *p)
{
    return F == KERN_W_BF16 || cuda_ceil(p->K, BLOCK_K) * (CODES ? N + 1 : 1) * 4 <=
                                   (int64_t)tile<N, F, CODES>::SCALE_BYTES;
}

template <kern_wfmt F, bool CODES>
static bool choose(struct kern_stream *s, const struct cuda_product *p)
{
    const int64_t across = cuda_ceil(p->N, ROWS) * p->groups;
    if (p->T <= 8 || !scales_fit<16, F, CODES>(p)) return launch<8, F, CODES>(s, p);
    if (p->T <= 16 || !scales_fit<32, F, CODES>(p)) return launch<16, F, CODES>(s, p);
    if (p->T <= 32 || !scales_fit<64, F, CODES>(p)) return launch<32, F, CODES>(s, p);
    /* 128 columns read weights once, but leave no room for a cluster's sums. */
    if (p->T <= 64 || !scales_fit<128, F, CODES>(p) || across * cuda_ceil(p->T, 128) * 2 <= s->n_sm)
        return launch<64, F, CODES>(s, p);
    return launch<128, F, CODES>(s, p);
}

bool cuda_product_narrow(struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    if (p->codes) return choose<KERN_W_FP8, true>(s, p);
    return fmt == KERN_W_FP8 ? choose<KERN_W_FP8, false>(s, p) : choose<KERN_W_BF16, false>(s, p);
}

bool cuda_narrow_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    if (s->arch != 90 || (fmt != KERN_W_FP8 && fmt != KERN_W_BF16) ||
        (fmt == KERN_W_FP8 && !scales_fit<8, KERN_W_FP8, false>(p)))
        return false;
    /* A tile of fp8 weight rows has one scale a block. */
    if (fmt == KERN_W_FP8 && p->groups > 1 && p->N % BLOCK_N) return false;
    /* Tiles of 128 x 128 of the product of more would leave much of the machine idle. */
    return fmt == KERN_W_BF16 || p->T <= 128 ||
           cuda_ceil(p->N, ROWS) * cuda_ceil(p->T, 64) * p->groups <= s->n_sm;
}
