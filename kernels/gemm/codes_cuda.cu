/* kernels/gemm/codes_cuda.cu - many rows of e4m3 codes times fp8 weights as they are stored: the
 * prefill product of the fp8 kind, on sm_90a.
 *
 * A block of threads makes tiles of 128 rows of x x 128 H weight rows, one after the other: one
 * thread keeps a ring of blocks of 128 k filled by the copy engine, two warpgroups of 64 rows each
 * multiply from there. H = 2 where there are enough tiles: then a tile takes 48 KiB of the second-
 * level cache for 128 x 256 x 128 products, and less because two blocks of threads with
 * neighbouring rows are a cluster that shares its weights, each fetching half for both.
 * Rows of x become operands in registers, once for all columns of a tile. The sum of a block of k
 * and 64 columns is the accumulator of four wgmma and goes to its total by fmaf, while those of
 * the next 64 columns are under way. 132 multiprocessors reach 1300 TFLOP/s at 8192 rows of wo_b
 * (without their quantization), and 1100 once power, 700 W, has brought the clock to 1.4 to
 * 1.7 GHz. At full rate shared memory would have to give and take all it can (by reckoning), 128
 * bytes a cycle: 64 of weights to the matrix unit, 16 of rows of x, 48 from the copy engine.
 */
#include "kernels/cuda/wgmma.cuh"
#include "kernels/gemm/frame.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    ROWS = 128,     /* of x, of a tile */
    OUT = 16 * 128, /* a piece of a warp's finished tile: 16 rows x 64 columns of bf16 */
    CHUNK = 64,     /* columns summed at a time */
    LAG = 2,        /* blocks of k that one warpgroup is behind the other, see multiply() */
};
template <int H> struct tile {
    enum {
        COLUMNS = H * BLOCK_N,
        X_BYTES = ROWS * BLOCK_K,
        W_BYTES = COLUMNS * BLOCK_K,
        STAGE = X_BYTES + W_BYTES,
        S = H == 2 ? 4 : 5,
    };
    static_assert((int)S > (int)LAG, "else the one ahead waits for the other, which waits for it");
};
template <int H> struct layout {
    uint8_t ring[tile<H>::S * tile<H>::STAGE];
    uint8_t out[WARPS][2][OUT];
    float x_scales[tile<H>::S][ROWS];
    float w_scales[tile<H>::S][2];
    struct ring_bars<tile<H>::S> bars;
};
static_assert(sizeof(struct layout<1>) <= 227 * 1024 && sizeof(struct layout<2>) <= 227 * 1024,
              "fits a multiprocessor of sm_90");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct place {
    int32_t group, t, n; /* first row of this block's tile, first column */
};
template <int H>
static __device__ __forceinline__ struct place place_of(const struct cuda_product &p, int32_t item)
{
    const struct tile_place l = tile_place_of(item, (p.T + PAIR * ROWS - 1) / (PAIR * ROWS),
                                              (p.N + tile<H>::COLUMNS - 1) / tile<H>::COLUMNS);
    const struct place at = {l.group, (l.t * PAIR + cluster_rank()) * ROWS, l.n * tile<H>::COLUMNS};
    return at;
}

template <int H>
static __device__ __forceinline__ void fill(const CUtensorMap &x, const CUtensorMap &w,
                                            const struct cuda_product &p, struct layout<H> *l,
                                            int32_t items)
{
    using C = struct tile<H>;
    const int rank = cluster_rank();
    const int32_t n_blocks = p.Kx / BLOCK_K, last_scale = (p.groups * p.N - 1) / BLOCK_N;
    int slot = 0, phase = 0;
    for (int32_t item = blockIdx.x / PAIR; item < items; item += gridDim.x / PAIR) {
        const struct place at = place_of<H>(p, item);
        const int32_t row = at.group * p.N + at.n + rank * (C::COLUMNS / PAIR);
        int32_t scale_row[H];
#pragma unroll
        for (int h = 0; h < H; h++) {
            const int32_t r = (at.group * p.N + at.n) / BLOCK_N + h;
            scale_row[h] = r < last_scale ? r : last_scale; /* beyond N: goes nowhere */
        }
        const float *scales = p.x_scales + (int64_t)at.group * n_blocks * p.ld_scales + at.t;
        uint32_t next[H];
#pragma unroll
        for (int h = 0; h < H; h++) next[h] = scale_bits(p, scale_row[h], 0);
        for (int32_t b = 0; b < n_blocks; b++) {
            uint8_t *to = l->ring + slot * C::STAGE;
            uint64_t *full = &l->bars.full[slot];
            bar_wait(&l->bars.empty[slot], phase ^ 1);
#pragma unroll
            for (int h = 0; h < H; h++) l->w_scales[slot][h] = scale_of(p, next[h]);
            bar_expect(full, C::STAGE + (int)sizeof l->x_scales[slot]);
            tile_load_to(to + C::X_BYTES + rank * (C::W_BYTES / PAIR), &w, full, b * BLOCK_K, row,
                         (1 << PAIR) - 1);
            tile_load(to, &x, full, at.group * p.Kx + b * BLOCK_K, at.t);
            bulk_load(l->x_scales[slot], scales + b * p.ld_scales, sizeof l->x_scales[slot], full);
#pragma unroll
            for (int h = 0; h < H; h++) /* here before the next place is free */
                next[h] = scale_bits(p, scale_row[h], b + 1 < n_blocks ? b + 1 : b);
            if (++slot == C::S) slot = 0, phase ^= 1;
        }
    }
}

/* The finished tile of a warp, 64 columns at a time: they are turned in shared memory and leave by
 * the copy engine, two pieces under way; the next tile begins meanwhile. */
template <int H>
static __device__ __forceinline__ void store(const CUtensorMap &y, const struct place &at,
                                             uint8_t (&out)[2][OUT], const float (&total)[H][64])
{
    const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int q = 0; q < 2 * H; q++) {
        const float *v = &total[q / 2][q % 2 * 32];
        uint8_t *piece = out[q % 2];
        if (lane == 0) tile_store_wait_read<1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const __nv_bfloat162 two =
                    __floats2bfloat162_rn(v[8 * j + 2 * e], v[8 * j + 2 * e + 1]);
                memcpy(&r[e], &two, 4);
            }
            dev_store_matrix4(piece + row * 128 + ((2 * j + lane / 16) ^ (row & 7)) * 16, r);
        }
        wgmma_shared(); /* the copy engine reads what was written here */
        __syncwarp();
        if (lane == 0) {
            tile_store(&y, piece, at.n + q * 64, at.group, at.t + threadIdx.x / 32 * 16);
            tile_store_commit();
        }
    }
}
/* Where the copy engine cannot. */
template <int H>
static __device__ __forceinline__ void
store_singly(const struct cuda_product &p, const struct place &at, const float (&total)[H][64])
{
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int32_t t = at.t + threadIdx.x / 32 * 16;
    const int64_t first = (int64_t)at.group * p.N + at.n;
#pragma unroll
    for (int h = 0; h < H; h++)
#pragma unroll
        for (int i = 0; i < 64; i++) {
            const int32_t row = t + g + i % 4 / 2 * 8, n = h * BLOCK_N + i / 4 * 8 + 2 * c + i % 2;
            if (row < p.T && at.n + n < p.N)
                dev_store(p.y, row * p.ld_y + first + n, p.y_dtype, total[h][i]);
        }
}

/* Rows of x of a block of k as first operands. */
static __device__ __forceinline__ void operands(const uint8_t *x, uint32_t (&a)[4][4])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
        dev_ldmatrix4(a[i], x + row * BLOCK_K + ((2 * i + lane / 16) ^ (row & 7)) * 16);
}

/* Starts the sums of 64 columns over a block of k. */
static __device__ __forceinline__ void start(float (&sum)[CHUNK / 2], const uint32_t (&a)[4][4],
                                             uint64_t w)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_e4m3(sum, a[i], w + 2 * i, i > 0);
    wgmma_commit();
}
static __device__ __forceinline__ void add(float *total, const float (&sum)[CHUNK / 2],
                                           const float (&scale)[2])
{
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) total[i] = fmaf(sum[i], scale[i % 4 / 2], total[i]);
}

/* The second warpgroup begins LAG blocks after the first, so that each has the matrix unit to
 * itself while the other one stores. */
template <int H>
static __device__ __forceinline__ void multiply(const CUtensorMap &y, const struct cuda_product &p,
                                                struct layout<H> *l, int32_t items, bool by_tiles)
{
    using C = struct tile<H>;
    enum { CHUNKS = C::COLUMNS / CHUNK };
    const int32_t ahead = (LAG < p.Kx / BLOCK_K ? LAG : p.Kx / BLOCK_K) - 1;
    const bool leads = threadIdx.x < 128;
    if (!leads && LAG > 0) asm volatile("bar.sync 1, 256;" ::: "memory");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t n_blocks = p.Kx / BLOCK_K;
    int slot = 0, phase = 0;
    for (int32_t item = blockIdx.x / PAIR; item < items; item += gridDim.x / PAIR) {
        const struct place at = place_of<H>(p, item);
        float sum[2][CHUNK / 2], total[H][64], scale[H][2];
#pragma unroll
        for (int h = 0; h < H; h++) {
            scale[h][0] = scale[h][1] = 0;
#pragma unroll
            for (int i = 0; i < 64; i++) total[h][i] = 0;
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) sum[1][i] = 0;
        for (int32_t b = 0; b < n_blocks; b++) {
            uint32_t a[4][4];
            const uint8_t *stage = l->ring + slot * C::STAGE;
            const uint64_t w = wgmma_rows(stage + C::X_BYTES);
            bar_wait(&l->bars.full[slot], phase);
            operands(stage, a);
            start(sum[0], a, w);
            wgmma_wait<1>(); /* nothing is left to wait for, but the compiler knows that now */
            wgmma_pin(sum[1]);
            /* The last columns of the block before; of the first: nothing. */
            add(&total[H - 1][64 - CHUNK / 2], sum[1], scale[H - 1]);
#pragma unroll
            for (int h = 0; h < H; h++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    scale[h][r] =
                        l->w_scales[slot][h] * l->x_scales[slot][warp * 16 + lane / 4 + 8 * r];
#pragma unroll
            for (int q = 1; q < CHUNKS;
                 q++) { /* columns q are under way while those before are added */
                start(sum[q % 2], a, w + q * (CHUNK * BLOCK_K / 16));
                wgmma_wait<1>();
                wgmma_pin(sum[(q + 1) % 2]);
                add(&total[(q - 1) / 2][(q - 1) % 2 * (CHUNK / 2)], sum[(q + 1) % 2],
                    scale[(q - 1) / 2]);
            }
            wgmma_wait<0>(); /* the operands in registers are free */
            ring_read(&l->bars.empty[slot]);
            if (++slot == C::S) slot = 0, phase ^= 1;
            if (LAG > 0 && leads && b == ahead && item < (int32_t)(gridDim.x / PAIR))
                asm volatile("bar.arrive 1, 256;" ::: "memory");
        }
        wgmma_pin(sum[1]);
        add(&total[H - 1][64 - CHUNK / 2], sum[1], scale[H - 1]);
        if (by_tiles)
            store<H>(y, at, l->out[warp], total);
        else
            store_singly<H>(p, at, total);
    }
    if (lane == 0) tile_store_wait();
}

template <int H>
static __global__ void __launch_bounds__(THREADS, 1)
    codes_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                 const __grid_constant__ CUtensorMap y, const struct cuda_product p, int32_t items,
                 bool by_tiles)
{
    extern __shared__ __align__(ALIGN) uint8_t shared[];
    struct layout<H> *l = (struct layout<H> *)shared;
    frame_run(
        &l->bars, [&] { fill<H>(x, w, p, l, items); },
        [&] { multiply<H>(y, p, l, items, by_tiles); });
}
#else
template <int H>
static __global__ void codes_kernel(const __grid_constant__ CUtensorMap x,
                                    const __grid_constant__ CUtensorMap w,
                                    const __grid_constant__ CUtensorMap y,
                                    const struct cuda_product p, int32_t items, bool by_tiles)
{
}
#endif

static int64_t items_of(const struct cuda_product *p, int columns)
{
    return cuda_ceil(p->T, PAIR * ROWS) * cuda_ceil(p->N, columns) * p->groups;
}

template <int H> static bool launch(struct kern_stream *s, const struct cuda_product *p)
{
    CUtensorMap x, w, y = {};
    const int64_t width = (int64_t)p->groups * p->Kx;
    if (!cuda_tile_map(&x, p->codes, p->T, width, width, ROWS) ||
        !cuda_tile_map(&w, p->w, (int64_t)p->groups * p->N, p->row_bytes, p->row_bytes,
                       tile<H>::COLUMNS / PAIR))
        return false;
    const bool by_tiles =
        p->y_dtype == KERN_BF16 && cuda_store_map(&y, p->y, p->T, p->groups, p->N, p->ld_y, 16);
    const int64_t items = items_of(p, tile<H>::COLUMNS);
    CUDA_SHARED(codes_kernel<H>, sizeof(struct layout<H>));
    frame_launch(s, codes_kernel<H>, items, sizeof(struct layout<H>), x, w, y, *p, (int32_t)items,
                 by_tiles);
    return true;
}

bool cuda_product_codes(struct kern_stream *s, const struct cuda_product *p)
{
    return frame_prefers_narrow(s, items_of(p, BLOCK_N), items_of(p, 2 * BLOCK_N))
               ? launch<1>(s, p)
               : launch<2>(s, p);
}

bool cuda_codes_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    return cuda_fp8_products && p->sfmt != KERN_S_F32 && p->aq == KERN_AQ_A128 &&
           cuda_wide_fits(s, fmt, p);
}
