/* kernels/gemm/wide_cuda.cu - many rows of bf16 times placed fp8 weights by wgmma: the prefill
 * product of the bf16 kind on sm_90a.
 *
 * A block of threads makes tiles of 128 weight rows x 64 H rows of x, one after the other: one
 * thread keeps a ring of groups of 64 k filled by the copy engine, two warpgroups of 64 weight
 * rows each multiply. Codes become bf16 in registers, where wgmma takes its first operand from,
 * once for all columns of a tile, and those of the next block of k are read meanwhile. Block sums
 * of 64 columns at a time go to their totals; while one warpgroup does that, or makes operands,
 * the matrix unit works for the other. The second operand is read from shared memory, so rows of x
 * come with k in the order of slots (cuda_quant.slots): the sums then meet the same factors in the
 * same instructions of 16 k as everywhere. Two blocks of threads with neighbouring weight rows are
 * a cluster that shares its rows of x, each fetching half for both.
 */
#include "kernels/cuda/wgmma.cuh"
#include "kernels/gemm/frame.cuh"

enum {
    M = 128,      /* weight rows of a tile */
    COLUMNS = 64, /* summed at a time */
    RING = 200 * 1024,
    OUT_ROWS = 32,
    OUT = OUT_ROWS * 128, /* a piece of a warpgroup's tile: 32 rows of y, 64 of bf16 of each */
    MOST_STAGES = 8,
};
template <int H> struct tile {
    enum {
        N = H * COLUMNS,
        X_BYTES = N * GROUP_K * 2,
        W_BYTES = M * GROUP_K,
        STAGE = X_BYTES + W_BYTES,
        S = RING / STAGE,
    };
    static_assert((int)S <= (int)MOST_STAGES, "barriers for all");
};
struct layout {
    uint8_t ring[RING];
    uint8_t out[2][2][OUT];
    struct ring_bars<MOST_STAGES> bars;
};
static_assert(sizeof(struct layout) <= 227 * 1024, "fits a multiprocessor of sm_90");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct place {
    int32_t group, n, t; /* first weight row of this block's tile, first row of x */
};
template <int H>
static __device__ __forceinline__ struct place place_of(const struct cuda_product &p, int32_t item)
{
    const struct tile_place l =
        tile_place_of(item, (p.T + tile<H>::N - 1) / tile<H>::N, (p.N + PAIR * M - 1) / (PAIR * M));
    const struct place at = {l.group, (l.n * PAIR + cluster_rank()) * M, l.t * tile<H>::N};
    return at;
}

template <int H>
static __device__ __forceinline__ void fill(const CUtensorMap &x, const CUtensorMap &w,
                                            const struct cuda_product &p, struct layout *l,
                                            int32_t items)
{
    using C = struct tile<H>;
    const int rank = cluster_rank();
    const int32_t n_groups = p.Kx / GROUP_K;
    int slot = 0, phase = 0;
    for (int32_t item = blockIdx.x / PAIR; item < items; item += gridDim.x / PAIR) {
        const struct place at = place_of<H>(p, item);
        for (int32_t q = 0; q < n_groups; q++) {
            uint8_t *to = l->ring + slot * C::STAGE;
            uint64_t *full = &l->bars.full[slot];
            bar_wait(&l->bars.empty[slot], phase ^ 1);
            bar_expect(full, C::STAGE);
            tile_load_to(to + rank * (C::X_BYTES / PAIR), &x, full,
                         (at.group * n_groups + q) * TILE_BYTES, at.t + rank * (C::N / PAIR),
                         (1 << PAIR) - 1);
            tile_load(to + C::X_BYTES, &w, full, q * GROUP_K, at.group * p.N + at.n);
            if (++slot == C::S) slot = 0, phase ^= 1;
        }
    }
}

/* Where a warpgroup is in the ring. */
struct turn {
    int slot, phase;
};
template <int H> static __device__ __forceinline__ struct turn after(struct turn t)
{
    if (++t.slot == tile<H>::S) t.slot = 0, t.phase ^= 1;
    return t;
}

/* This thread's codes of a block of k, when its two groups have come. */
template <int H>
static __device__ __forceinline__ void read_codes(struct layout *l, struct turn t,
                                                  struct weights16<KERN_W_FP8> (&ws)[2])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int q = 0; q < 2; q++, t = after<H>(t)) {
        const uint8_t *w = l->ring + t.slot * tile<H>::STAGE + tile<H>::X_BYTES;
        bar_wait(&l->bars.full[t.slot], t.phase);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint4 v = *(const uint4 *)(w + (row + 8 * r) * GROUP_K + lane % 4 * 16);
            ws[q].v[r][0] = v.x, ws[q].v[r][1] = v.y, ws[q].v[r][2] = v.z, ws[q].v[r][3] = v.w;
        }
    }
}

/* What is stored of a warpgroup's finished tile. */
template <int H>
static __device__ __forceinline__ void finish(const struct cuda_product &p, const struct place &at,
                                              float (&total)[H][COLUMNS / 2])
{
    const int32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (at.n + row + 8 * r >= p.N) continue;
        const int64_t of_all = (int64_t)at.group * p.N + at.n + row + 8 * r;
#pragma unroll
        for (int h = 0; h < H; h++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++)
                if (i % 4 / 2 == r) total[h][i] = finished<KERN_W_FP8>(p, of_all, total[h][i]);
    }
}

/* It is turned in shared memory, 32 rows of y at a time, and leaves by the copy engine, two pieces
 * under way. */
template <int H>
static __device__ __forceinline__ void store(const CUtensorMap &y, const struct place &at,
                                             uint8_t (&out)[2][OUT],
                                             const float (&total)[H][COLUMNS / 2])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4;
    const bool sends = threadIdx.x % 128 == 0;
#pragma unroll
    for (int h = 0; h < H; h++)
#pragma unroll
        for (int q = 0; q < COLUMNS / OUT_ROWS; q++) {
            uint8_t *piece = out[q % 2];
            if (sends) tile_store_wait_read<1>();
            asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory");
#pragma unroll
            for (int j = 0; j < OUT_ROWS / 16; j++) {
                const float *v = &total[h][q * (OUT_ROWS / 2) + 8 * j];
                uint32_t r[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const __nv_bfloat162 two = __floats2bfloat162_rn(v[2 * e], v[2 * e + 1]);
                    memcpy(&r[e], &two, 4);
                }
                const int row = 16 * j + lane / 16 * 8 + lane % 8,
                          at16 = warp % 4 * 2 + lane / 8 % 2;
                dev_store_matrix4_trans(piece + row * 128 + (at16 ^ (row & 7)) * 16, r);
            }
            wgmma_shared(); /* the copy engine reads what was written here */
            asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory");
            if (sends) {
                tile_store(&y, piece, at.n + half * 64, at.group,
                           at.t + h * COLUMNS + q * OUT_ROWS);
                tile_store_commit();
            }
        }
}
/* Where the copy engine cannot. */
template <int H>
static __device__ __forceinline__ void store_singly(const struct cuda_product &p,
                                                    const struct place &at,
                                                    const float (&total)[H][COLUMNS / 2])
{
    const int lane = threadIdx.x % 32, c = lane % 4;
    const int32_t n = at.n + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < H; h++)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) {
            const int32_t t = at.t + h * COLUMNS + i / 4 * 8 + 2 * c + i % 2,
                          row = n + i % 4 / 2 * 8;
            if (t < p.T && row < p.N)
                dev_store(p.y, t * p.ld_y + (int64_t)at.group * p.N + row, p.y_dtype, total[h][i]);
        }
}

template <int H>
static __device__ __forceinline__ int32_t scale_row_of(const struct cuda_product &p, int32_t item)
{
    const struct place at = place_of<H>(p, item);
    const int32_t row = (at.group * p.N + at.n) / BLOCK_N, last = (p.groups * p.N - 1) / BLOCK_N;
    return row < last ? row : last;
}

template <int H>
static __device__ __forceinline__ void multiply(const CUtensorMap &y, const struct cuda_product &p,
                                                struct layout *l, int32_t items, bool by_tiles)
{
    using C = struct tile<H>;
    const int half = threadIdx.x / 128;
    const int32_t n_blocks = p.Kx / BLOCK_K;
    struct turn turn = {0, 0};
    struct weights16<KERN_W_FP8> ws[2];
    bool late = half == 1;
    for (int32_t item = blockIdx.x / PAIR; item < items; item += gridDim.x / PAIR) {
        const int32_t scale_row = scale_row_of<H>(p, item);
        float sum[COLUMNS / 2], total[H][COLUMNS / 2];
#pragma unroll
        for (int h = 0; h < H; h++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) total[h][i] = 0;
        uint32_t next = scale_bits(p, scale_row, 0);
        read_codes<H>(l, turn, ws);
        for (int32_t b = 0; b < n_blocks; b++) {
            uint32_t a[8][4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                uint32_t one[1][4];
                weights_operand<KERN_W_FP8>(ws[i / 4], i % 4, one);
#pragma unroll
                for (int e = 0; e < 4; e++) a[i][e] = one[0][e];
            }
            const struct turn second = after<H>(turn), then = after<H>(second);
            const uint64_t x[2] = {wgmma_rows(l->ring + turn.slot * C::STAGE),
                                   wgmma_rows(l->ring + second.slot * C::STAGE)};
            const float scale = scale_of(p, next);
            if (late) asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
            for (int h = 0; h < H; h++) {
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 8; i++)
                    wgmma_bf16(sum, a[i], x[i / 4] + h * (COLUMNS * 128 / 16) + i % 4 * 2, i > 0);
                wgmma_commit();
                if (h == H - 1 && b + 1 < n_blocks) {
                    next = scale_bits(p, scale_row, b + 1);
                    read_codes<H>(l, then, ws);
                }
                wgmma_wait<0>();
                wgmma_pin(sum);
                if (half == 0 && h == 0 && b == 0 && item < (int32_t)(gridDim.x / PAIR))
                    asm volatile("bar.arrive 1, 256;" ::: "memory");
                late = false;
                if (h == H - 1) {
                    ring_read(&l->bars.empty[turn.slot]);
                    ring_read(&l->bars.empty[second.slot]);
                }
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i++)
                    total[h][i] = fmaf(sum[i], scale, total[h][i]);
            }
            turn = then;
        }
        const struct place at = place_of<H>(p, item);
        finish<H>(p, at, total);
        if (by_tiles)
            store<H>(y, at, l->out[half], total);
        else
            store_singly<H>(p, at, total);
    }
    if (threadIdx.x % 128 == 0) tile_store_wait();
}

template <int H>
static __global__ void __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                const __grid_constant__ CUtensorMap y, const struct cuda_product p, int32_t items,
                bool by_tiles)
{
    extern __shared__ __align__(ALIGN) uint8_t shared[];
    struct layout *l = (struct layout *)shared;
    frame_run(
        &l->bars, [&] { fill<H>(x, w, p, l, items); },
        [&] { multiply<H>(y, p, l, items, by_tiles); });
}
#else
template <int H>
static __global__ void wide_kernel(const __grid_constant__ CUtensorMap x,
                                   const __grid_constant__ CUtensorMap w,
                                   const __grid_constant__ CUtensorMap y,
                                   const struct cuda_product p, int32_t items, bool by_tiles)
{
}
#endif

static int64_t items_of(const struct cuda_product *p, int columns)
{
    return cuda_ceil(p->N, PAIR * M) * cuda_ceil(p->T, columns) * p->groups;
}

template <int H> static bool launch(struct kern_stream *s, const struct cuda_product *p)
{
    CUtensorMap x, w, y = {};
    const int64_t width = (int64_t)p->groups * p->Kx * 2;
    if (!cuda_tile_map(&x, p->x, p->T, width, width, tile<H>::N / PAIR) ||
        !cuda_half_tile_map(&w, p->w, (int64_t)p->groups * p->N, p->row_bytes, p->row_bytes, M))
        return false;
    const bool by_tiles = p->y_dtype == KERN_BF16 &&
                          cuda_store_map(&y, p->y, p->T, p->groups, p->N, p->ld_y, OUT_ROWS);
    const int64_t items = items_of(p, tile<H>::N);
    CUDA_SHARED(wide_kernel<H>, sizeof(struct layout));
    frame_launch(s, wide_kernel<H>, items, sizeof(struct layout), x, w, y, *p, (int32_t)items,
                 by_tiles);
    return true;
}

bool cuda_product_wide(struct kern_stream *s, const struct cuda_product *p)
{
    return frame_prefers_narrow(s, items_of(p, 2 * COLUMNS), items_of(p, 4 * COLUMNS))
               ? launch<2>(s, p)
               : launch<4>(s, p);
}

bool cuda_wide_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    return s->arch == 90 && fmt == KERN_W_FP8 && (p->groups == 1 || p->N % BLOCK_N == 0);
}
