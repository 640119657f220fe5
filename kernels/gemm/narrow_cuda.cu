/* kernels/gemm/narrow_cuda.cu - up to 128 rows of x times placed fp8 or bf16 weights by wgmma: the
 * decode product of sm_90a, of both kinds, where turns_cuda.cu (bf16 kind) and codes_narrow_cuda.cu
 * (fp8 kind) do not take it: above all with many weight rows.
 *
 * Two threads keep a ring of blocks of 128 k filled by the copy engine, which has enough bytes
 * under way to keep memory busy; they begin with weights, before the rows of x are quantized. Two
 * warpgroups multiply: codes as they lie in the ring, or else weights that become operands in
 * registers, where rows of x have k in the order of slots (mma.cuh).
 * Many tiles of weight rows: a block of threads takes several of 128 rows, one after the other,
 * each warpgroup having 64 of them. Few: tiles of 64 rows, of whose blocks of k the warpgroups
 * take every other one; the totals go from one to the other through shared memory. Clusters that
 * share out k were tried and are slower for all but the narrowest (wo_b at 64 rows: 68 us, not
 * 34): what blocks of threads send each other seems to wait behind the weights under way.
 */
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/gemm/product.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    WARPS = 8,   /* that multiply */
    FILLERS = 2, /* more, of which one thread works: one alone would take too long */
    THREADS = 32 * (WARPS + FILLERS),
    ALIGN = 1024,
    MOST_SHARED = 227 * 1024,
    MOST_STAGES = 16,
    BAR_BYTES = 16 * MOST_STAGES + 16,
};
/* x, and weights for it: widened to bf16; codes with their scales. */
enum kind { WIDENED, CODES };

/* ROWS weight rows, which have one scale a block, x N rows of x. */
template <int ROWS, int N, kern_wfmt F, kind K> struct tile {
    enum {
        /* Of a block of k there are so many pieces of 128 bytes a row. */
        W_PIECES = F == KERN_W_BF16 ? 2 : 1,
        X_PIECES = K == CODES ? 1 : 2,
        W_PIECE = ROWS * TILE_BYTES,
        X_PIECE = N * TILE_BYTES,
        W_BYTES = W_PIECES * W_PIECE,
        STAGE = W_BYTES + X_PIECES * X_PIECE,
        OUT = N * 4 * 64, /* totals on their way, or two finished tiles of 64 rows */
        SCALE_BYTES = K == CODES ? 20 * 1024 : 0, /* of all blocks of k */
        ROOM = (MOST_SHARED - ALIGN - BAR_BYTES - SCALE_BYTES - OUT) / STAGE,
        S = ROOM < MOST_STAGES ? ROOM : MOST_STAGES,
        SCALES = S * STAGE + OUT, /* where they lie */
        BARS = SCALES + SCALE_BYTES,
        BYTES = BARS + BAR_BYTES + ALIGN,
        /* Columns summed at a time. With bf16 weights all at once are no faster. */
        NS = N < 64 || F != KERN_W_BF16 ? N : 64,
    };
    static_assert((int)S >= 3, "enough under way");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct bars {
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], turn[2];
};
static_assert(sizeof(struct bars) <= BAR_BYTES, "the room for them");

/* What one block of threads has: tiles from `tile` on, `step` apart. */
struct share {
    uint8_t *ring, *out;
    float *scales; /* [n_blocks, N] of x, where it is codes */
    struct bars *bars;
    int32_t tile, step, tiles, n_blocks;
    int32_t group, t; /* first row of x */
};

template <int ROWS, int N, kern_wfmt F, kind K>
static __device__ __forceinline__ void fill(const CUtensorMap &x, const CUtensorMap &w,
                                            const struct cuda_product &p, const struct share &m)
{
    using C = struct tile<ROWS, N, F, K>;
    const int32_t all = (m.tiles - m.tile + m.step - 1) / m.step * m.n_blocks;
    const auto load_w = [&](int32_t i) {
        uint64_t *full = &m.bars->full[i % C::S];
        bar_expect(full, C::STAGE);
#pragma unroll
        for (int q = 0; q < C::W_PIECES; q++)
            tile_load(m.ring + i % C::S * C::STAGE + q * C::W_PIECE, &w, full,
                      (i % m.n_blocks * C::W_PIECES + q) * TILE_BYTES,
                      m.group * p.N + (m.tile + i / m.n_blocks * m.step) * ROWS);
    };
    const auto load_x = [&](int32_t i) {
#pragma unroll
        for (int q = 0; q < C::X_PIECES; q++)
            tile_load(m.ring + i % C::S * C::STAGE + C::W_BYTES + q * C::X_PIECE, &x,
                      &m.bars->full[i % C::S],
                      ((m.group * m.n_blocks + i % m.n_blocks) * C::X_PIECES + q) * TILE_BYTES,
                      m.t);
    };
    const int32_t me = threadIdx.x / 32 - WARPS, first = all < C::S ? all : C::S;
    for (int32_t i = me; i < first; i += FILLERS) load_w(i);
    cudaGridDependencySynchronize(); /* what makes x may have been still at work */
    int32_t i = me;
    for (; i < first; i += FILLERS) load_x(i);
    for (; i < all; i += FILLERS) {
        bar_wait(&m.bars->empty[i % C::S], (i / C::S - 1) & 1);
        load_w(i);
        load_x(i);
    }
}

/* Weights of a block of k in stage i, when it has come: this thread's, as operands. */
template <int ROWS, int N, kern_wfmt F>
static __device__ __forceinline__ void operands(const uint8_t *stage, uint32_t a[8][4])
{
    using C = struct tile<ROWS, N, F, WIDENED>;
    const int lane = threadIdx.x % 32, c = lane % 4;
    const int row = threadIdx.x / 32 % (ROWS / 16) * 16 + lane / 4;
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

/* Sums of a block of k of a warpgroup's 64 rows, of NS columns from h * NS on. */
template <int ROWS, int N, kern_wfmt F, kind K>
static __device__ __forceinline__ void block_sums(const uint8_t *stage, int h,
                                                  const uint32_t a[8][4],
                                                  float (&sum)[tile<ROWS, N, F, K>::NS / 2])
{
    using C = struct tile<ROWS, N, F, K>;
    const uint64_t x = wgmma_rows(stage + C::W_BYTES + h * (C::NS * TILE_BYTES));
    wgmma_fence();
    if (K != WIDENED) {
        const uint64_t w = wgmma_rows(stage + threadIdx.x / 128 % (ROWS / 64) * (64 * TILE_BYTES));
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

/* All scales of x to shared memory. */
template <int N, kind K>
static __device__ __forceinline__ void load_scales(const struct cuda_product &p,
                                                   const struct share &m)
{
    for (int32_t i = threadIdx.x; K == CODES && i < m.n_blocks * N; i += 32 * WARPS)
        m.scales[i] =
            p.x_scales[(int64_t)(m.group * m.n_blocks + i / N) * p.ld_scales + m.t + i % N];
    asm volatile("bar.sync 1, 256;" ::: "memory");
}
/* Of columns 8 n + 2 c and the next one. */
template <int N, kind K>
static __device__ __forceinline__ float2 column_scales(const struct share &m, int32_t b, int n)
{
    if (K == WIDENED) return make_float2(1.0f, 1.0f);
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
template <kern_wfmt F, kind K>
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
                      K != WIDENED ? total[e] : finished<F>(p, of_all, total[e]));
    }
}

/* A warpgroup's finished tile, 64 weight rows from n of the group on: turned in shared memory, so
 * that rows of y are written in wide pieces. */
template <int N, kern_wfmt F, kind K>
static __device__ __forceinline__ void
store_tile_of(const struct cuda_product &p, const struct share &m, int32_t n, float (&total)[N / 2])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4;
    const int64_t first = (int64_t)m.group * p.N + n;
    if (N < 16 || p.y_dtype != KERN_BF16 || p.ld_y % 8 || first % 8 || (uintptr_t)p.y % 16) {
#pragma unroll
        for (int i = 0; i < N / 8; i++)
            store_fragment<F, K>(p, m, n + warp % 4 * 16, i, total + 4 * i);
        return;
    }
    if (K == WIDENED) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = warp % 4 * 16 + lane / 4 + 8 * r;
            if (n + row >= p.N) continue;
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                if (i % 4 / 2 == r) total[i] = finished<F>(p, first + row, total[i]);
        }
    }
    uint8_t *out = m.out + half * (N * 128); /* 64 of bf16 a row */
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
        const int32_t t = m.t + row, to = piece * 8;
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

template <int ROWS, int N, kern_wfmt F, kind K>
static __device__ __forceinline__ void multiply_alone(const struct cuda_product &p,
                                                      const struct share &m)
{
    using C = struct tile<ROWS, N, F, K>;
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
            if (K == WIDENED)
                operands<ROWS, N, F == KERN_W_BF16 ? KERN_W_BF16 : KERN_W_FP8>(stage, a);
#pragma unroll
            for (int h = 0; h < N / NS; h++) {
                block_sums<ROWS, N, F, K>(stage, h, a, sum);
                if (h == N / NS - 1 && threadIdx.x % 32 == 0) bar_arrive(&m.bars->empty[slot]);
#pragma unroll
                for (int n = 0; n < NS / 8; n++)
                    add_block(total + h * (NS / 2) + 4 * n, sum + 4 * n, w_scale,
                              column_scales<N, K>(m, b, h * (NS / 8) + n));
            }
            if (++slot == C::S) slot = 0, phase ^= 1;
        }
        store_tile_of<N, F, K>(p, m, t * ROWS + threadIdx.x / 128 * 64, total);
    }
}

/* 64 weight rows; the warpgroups take turns with the blocks of k. */
template <int ROWS, int N, kern_wfmt F, kind K>
static __device__ __forceinline__ void multiply_in_turns(const struct cuda_product &p,
                                                         const struct share &m)
{
    using C = struct tile<ROWS, N, F, K>;
    const int half = threadIdx.x / 128;
    float4 *totals = (float4 *)m.out + threadIdx.x % 128; /* 128 apart */
    int32_t i0 = 0;                                       /* stages before this tile */
    int turn = 0;
    for (int32_t t = m.tile; t < m.tiles; t += m.step, i0 += m.n_blocks) {
        const int32_t scale_row = (m.group * p.N + t * ROWS) / BLOCK_N;
        float sum[N / 2], total[N / 2];
        for (int32_t b = half; b < m.n_blocks; b += 2) {
            const int slot = (i0 + b) % C::S;
            const uint8_t *stage = m.ring + slot * C::STAGE;
            const float w_scale = F == KERN_W_FP8 ? block_scale(p, scale_row, b) : 1.0f;
            uint32_t a[8][4];
            bar_wait(&m.bars->full[slot], (i0 + b) / C::S & 1);
            if (K == WIDENED)
                operands<ROWS, N, F == KERN_W_BF16 ? KERN_W_BF16 : KERN_W_FP8>(stage, a);
            block_sums<ROWS, N, F, K>(stage, 0, a, sum);
            if (threadIdx.x % 32 == 0) bar_arrive(&m.bars->empty[slot]);
            if (b > 0) { /* the other one has added the block before */
                bar_wait(&m.bars->turn[half], turn);
                turn ^= 1;
            }
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                float4 v = make_float4(0, 0, 0, 0);
                if (b > 0) v = totals[128 * n];
                total[4 * n] = v.x, total[4 * n + 1] = v.y;
                total[4 * n + 2] = v.z, total[4 * n + 3] = v.w;
                add_block(total + 4 * n, sum + 4 * n, w_scale, column_scales<N, K>(m, b, n));
                totals[128 * n] =
                    make_float4(total[4 * n], total[4 * n + 1], total[4 * n + 2], total[4 * n + 3]);
            }
            if (b + 1 < m.n_blocks) bar_arrive(&m.bars->turn[1 - half]);
        }
        asm volatile("bar.sync 1, 256;" ::: "memory"); /* nobody reads totals any more */
        if ((m.n_blocks - 1) % 2 == half) store_tile_of<N, F, K>(p, m, t * ROWS, total);
        asm volatile("bar.sync 1, 256;" ::: "memory");
    }
}

template <int ROWS, int N, kern_wfmt F, kind K>
static __global__ void __launch_bounds__(THREADS, 1)
    narrow_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                  const struct cuda_product p, int32_t tiles)
{
    using C = struct tile<ROWS, N, F, K>;
    extern __shared__ __align__(16) uint8_t shared[];
    struct share m;
    m.ring = shared + (ALIGN - dev_shared(shared) % ALIGN) % ALIGN;
    m.out = m.ring + C::S * C::STAGE;
    m.scales = (float *)(m.ring + C::SCALES);
    m.bars = (struct bars *)(m.ring + C::BARS);
    m.tile = blockIdx.x, m.step = gridDim.x, m.tiles = tiles;
    m.n_blocks = p.Kx / BLOCK_K;
    m.group = blockIdx.y, m.t = blockIdx.z * N;
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::S; i++)
            bar_init(&m.bars->full[i], 1), bar_init(&m.bars->empty[i], ROWS / 16);
        for (int i = 0; i < 2; i++) bar_init(&m.bars->turn[i], 128);
        bar_init_done();
    }
    __syncthreads();
    if (threadIdx.x / 32 >= WARPS) {
        if (threadIdx.x % 32 == 0) fill<ROWS, N, F, K>(x, w, p, m);
        return;
    }
    cudaGridDependencySynchronize();
    load_scales<N, K>(p, m);
    if constexpr (ROWS == 64)
        multiply_in_turns<ROWS, N, F, K>(p, m);
    else
        multiply_alone<ROWS, N, F, K>(p, m);
}
#else
template <int ROWS, int N, kern_wfmt F, kind K>
static __global__ void narrow_kernel(const __grid_constant__ CUtensorMap x,
                                     const __grid_constant__ CUtensorMap w,
                                     const struct cuda_product p, int32_t tiles)
{
}
#endif

template <int ROWS, int N, kern_wfmt F, kind K>
static bool launch_tiles(struct kern_stream *s, const struct cuda_product *p)
{
    using C = struct tile<ROWS, N, F, K>;
    CUtensorMap x, w;
    const int64_t width = (int64_t)p->groups * p->Kx * (K == CODES ? 1 : 2);
    if (!cuda_tile_map(&x, K == CODES ? (const void *)p->codes : p->x, p->T, width, width, N) ||
        !cuda_tile_map(&w, p->w, (int64_t)p->groups * p->N, p->row_bytes, p->row_bytes, ROWS))
        return false;
    const int64_t tiles = cuda_ceil(p->N, ROWS), columns = cuda_ceil(p->T, N),
                  beside = p->groups * columns;
    const int64_t room = s->n_sm / beside > 1 ? s->n_sm / beside : 1;
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim =
        dim3((unsigned)(tiles < room ? tiles : room), (unsigned)p->groups, (unsigned)columns);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = C::BYTES;
    c.stream = s->cu;
    c.attrs = &attr;
    c.numAttrs = cuda_early_products ? 1 : 0;
    CUDA_SHARED((narrow_kernel<ROWS, N, F, K>), C::BYTES);
    cudaLaunchKernelEx(&c, narrow_kernel<ROWS, N, F, K>, x, w, *p, (int32_t)tiles);
    return true;
}

/* Tiles of 128 rows are better for the matrix unit and for rows of x; those of 64 are more. */
template <int N, kern_wfmt F, kind K>
static bool launch(struct kern_stream *s, const struct cuda_product *p)
{
    const int64_t tiles = cuda_ceil(p->N, 128) * p->groups * cuda_ceil(p->T, N);
    return tiles * 4 <= s->n_sm * 3 ? launch_tiles<64, N, F, K>(s, p)
                                    : launch_tiles<128, N, F, K>(s, p);
}

template <int N, kern_wfmt F, kind K> static bool scales_fit(const struct cuda_product *p)
{
    return K == WIDENED ||
           cuda_ceil(p->K, BLOCK_K) * N * 4 <= (int64_t)tile<128, N, F, K>::SCALE_BYTES;
}

template <kern_wfmt F, kind K>
static bool choose(struct kern_stream *s, const struct cuda_product *p)
{
    if (p->T <= 8 || !scales_fit<16, F, K>(p)) return launch<8, F, K>(s, p);
    if (p->T <= 16 || !scales_fit<32, F, K>(p)) return launch<16, F, K>(s, p);
    if (p->T <= 32 || !scales_fit<64, F, K>(p)) return launch<32, F, K>(s, p);
    /* 128 columns read weights once, but there must be tiles enough. */
    if (p->T <= 64 || !scales_fit<128, F, K>(p) ||
        cuda_ceil(p->N, 128) * p->groups * cuda_ceil(p->T, 128) * 2 <= s->n_sm)
        return launch<64, F, K>(s, p);
    return launch_tiles<128, 128, F, K>(s, p);
}

bool cuda_product_narrow(struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    if (p->codes) return choose<KERN_W_FP8, CODES>(s, p);
    return fmt == KERN_W_FP8 ? choose<KERN_W_FP8, WIDENED>(s, p)
                             : choose<KERN_W_BF16, WIDENED>(s, p);
}

bool cuda_narrow_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    if (s->arch != 90 || (fmt != KERN_W_FP8 && fmt != KERN_W_BF16)) return false;
    /* A tile of fp8 weight rows has one scale a block; scales of x need room. */
    if (fmt == KERN_W_FP8 && p->groups > 1 && p->N % BLOCK_N) return false;
    if (p->codes && !scales_fit<8, KERN_W_FP8, CODES>(p)) return false;
    /* Tiles of 128 x 128 of the product of more would leave much of the machine idle. */
    return fmt == KERN_W_BF16 || p->T <= 128 ||
           cuda_ceil(p->N, 128) * cuda_ceil(p->T, 64) * p->groups <= s->n_sm;
}
