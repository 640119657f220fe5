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
 * the next 64 columns are under way. 132 multiprocessors reach 1270 TFLOP/s at 8192 rows of wo_b
 * (without their quantization).
 */
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/gemm/product.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    WARPS = 8, /* that multiply; four more, of which one thread works */
    THREADS = 32 * WARPS + 128,
    ROWS = 128, /* of x, of a tile */
    PAIR = 2,   /* blocks of threads of a cluster */
    ALIGN = 1024,
    RING = 192 * 1024,
    OUT = 16 * 128, /* of a warp: 16 rows x 64 columns of bf16 */
    CHUNK = 64,     /* columns summed at a time */
    BAND = 8,       /* pairs of tiles of x that take turns with the same weights */
};
template <int H> struct tile {
    enum {
        COLUMNS = H * BLOCK_N,
        X_BYTES = ROWS * BLOCK_K,
        W_BYTES = COLUMNS * BLOCK_K,
        STAGE = X_BYTES + W_BYTES,
        S = RING / STAGE,
    };
};
struct layout {
    uint8_t ring[RING];
    uint8_t out[WARPS][OUT];
    float x_scales[tile<1>::S][ROWS];
    float w_scales[tile<1>::S][2];
    uint64_t full[tile<1>::S], empty[tile<1>::S];
};
static_assert(sizeof(struct layout) + ALIGN <= 227 * 1024, "fits a multiprocessor of sm_90");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* What a cluster does next. Tiles that run at the same time are near each other in both directions, so
 * that few rows are read from memory for many tiles. */
struct place {
    int32_t group, t, n; /* first row of this block's tile, first column */
};
template <int H>
static __device__ __forceinline__ struct place place_of(const struct cuda_product &p, int32_t item)
{
    const int32_t pairs = (p.T + PAIR * ROWS - 1) / (PAIR * ROWS),
                  columns = (p.N + tile<H>::COLUMNS - 1) / tile<H>::COLUMNS;
    struct place l;
    l.group = item / (pairs * columns);
    item -= l.group * pairs * columns;
    const int32_t band = item / (BAND * columns);
    item -= band * BAND * columns;
    const int32_t width = pairs - band * BAND < BAND ? pairs - band * BAND : BAND;
    l.t = ((band * BAND + item % width) * PAIR + cluster_rank()) * ROWS;
    l.n = item / width * tile<H>::COLUMNS;
    return l;
}

template <int H>
static __device__ __forceinline__ void fill(const CUtensorMap &x, const CUtensorMap &w,
                                            const struct cuda_product &p, struct layout *l,
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
        for (int32_t b = 0; b < n_blocks; b++) {
            uint8_t *to = l->ring + slot * C::STAGE;
            uint64_t *full = &l->full[slot];
            bar_wait(&l->empty[slot], phase ^ 1);
#pragma unroll
            for (int h = 0; h < H; h++) l->w_scales[slot][h] = block_scale(p, scale_row[h], b);
            bar_expect(full, C::STAGE + (int)sizeof l->x_scales[slot]);
            tile_load_to(to + C::X_BYTES + rank * (C::W_BYTES / PAIR), &w, full, b * BLOCK_K, row,
                         (1 << PAIR) - 1);
            tile_load(to, &x, full, at.group * p.Kx + b * BLOCK_K, at.t);
            bulk_load(l->x_scales[slot], scales + b * p.ld_scales, sizeof l->x_scales[slot], full);
            if (++slot == C::S) slot = 0, phase ^= 1;
        }
    }
}

/* The finished tile of a warpgroup. */
template <int H>
static __device__ __forceinline__ void store(const struct cuda_product &p, const struct place &at,
                                             uint8_t *out, const float (&total)[H][64])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int32_t t = at.t + warp * 16; /* of the warp */
    const int64_t first = (int64_t)at.group * p.N + at.n;
    if (p.y_dtype == KERN_BF16 && p.ld_y % 8 == 0 && first % 8 == 0 && (uintptr_t)p.y % 16 == 0) {
#pragma unroll
        for (int q = 0; q < 2 * H; q++) { /* 64 columns, turned in shared memory */
            const float *v = &total[q / 2][q % 2 * 32];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t r[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const __nv_bfloat162 two =
                        __floats2bfloat162_rn(v[8 * j + 2 * e], v[8 * j + 2 * e + 1]);
                    memcpy(&r[e], &two, 4);
                }
                const int row = lane % 16, piece = 2 * j + lane / 16;
                dev_store_matrix4(out + row * 128 + (piece ^ (row & 7)) * 16, r);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = i * 4 + lane / 8, piece = lane % 8;
                const uint4 u = *(const uint4 *)(out + row * 128 + (piece ^ (row & 7)) * 16);
                const int32_t n = at.n + q * 64 + piece * 8;
                if (t + row >= p.T) continue;
                uint16_t *y = (uint16_t *)p.y + (t + row) * p.ld_y + first + q * 64 + piece * 8;
                if (n + 8 <= p.N) {
                    *(uint4 *)y = u;
                } else {
                    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        if (n + e < p.N) y[e] = (uint16_t)(words[e / 2] >> (e % 2 * 16));
                }
            }
            __syncwarp();
        }
        return;
    }
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

template <int H>
static __device__ __forceinline__ void multiply(const struct cuda_product &p, struct layout *l,
                                                int32_t items)
{
    using C = struct tile<H>;
    enum { CHUNKS = C::COLUMNS / CHUNK };
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
            bar_wait(&l->full[slot], phase);
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
            __syncwarp();
            if (lane < PAIR) bar_arrive_at(&l->empty[slot], lane);
            if (++slot == C::S) slot = 0, phase ^= 1;
        }
        wgmma_pin(sum[1]);
        add(&total[H - 1][64 - CHUNK / 2], sum[1], scale[H - 1]);
        store<H>(p, at, l->out[warp], total);
    }
}

template <int H>
static __global__ void __launch_bounds__(THREADS, 1)
    codes_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                 const struct cuda_product p, int32_t items)
{
    extern __shared__ __align__(16) uint8_t shared[];
    struct layout *l = (struct layout *)(shared + (ALIGN - dev_shared(shared) % ALIGN) % ALIGN);
    if (threadIdx.x == 0) {
        for (int i = 0; i < tile<H>::S; i++)
            bar_init(&l->full[i], 1), bar_init(&l->empty[i], PAIR * WARPS);
        bar_init_done();
    }
    cluster_meet();
    if (threadIdx.x / 128 == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 32 * WARPS) fill<H>(x, w, p, l, items);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        multiply<H>(p, l, items);
    }
    cluster_meet(); /* a block must be there while the other one writes to it */
}
#else
template <int H>
static __global__ void codes_kernel(const __grid_constant__ CUtensorMap x,
                                    const __grid_constant__ CUtensorMap w,
                                    const struct cuda_product p, int32_t items)
{
}
#endif

static int64_t items_of(const struct cuda_product *p, int columns)
{
    return cuda_ceil(p->T, PAIR * ROWS) * cuda_ceil(p->N, columns) * p->groups;
}

template <int H> static bool launch(struct kern_stream *s, const struct cuda_product *p)
{
    CUtensorMap x, w;
    const int64_t width = (int64_t)p->groups * p->Kx;
    if (!cuda_tile_map(&x, p->codes, p->T, width, width, ROWS) ||
        !cuda_tile_map(&w, p->w, (int64_t)p->groups * p->N, p->row_bytes, p->row_bytes,
                       tile<H>::COLUMNS / PAIR))
        return false;
    const int64_t items = items_of(p, tile<H>::COLUMNS);
    const int64_t clusters = items < s->n_sm / PAIR ? items : s->n_sm / PAIR;
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeClusterDimension;
    attr.val.clusterDim.x = PAIR;
    attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)(clusters * PAIR));
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = sizeof(struct layout) + ALIGN;
    c.stream = s->cu;
    c.attrs = &attr;
    c.numAttrs = 1;
    CUDA_SHARED(codes_kernel<H>, sizeof(struct layout) + ALIGN);
    cudaLaunchKernelEx(&c, codes_kernel<H>, x, w, *p, (int32_t)items);
    return true;
}

bool cuda_product_codes(struct kern_stream *s, const struct cuda_product *p)
{
    /* In rounds of all clusters, a tile of 128 columns being half of one of 256 and a little more. */
    const int64_t clusters = s->n_sm / PAIR, narrow = cuda_ceil(items_of(p, BLOCK_N), clusters),
                  broad = cuda_ceil(items_of(p, 2 * BLOCK_N), clusters);
    return narrow * 6 < broad * 10 ? launch<1>(s, p) : launch<2>(s, p);
}

bool cuda_codes_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    return cuda_fp8_products && p->sfmt != KERN_S_F32 && p->aq == KERN_AQ_A128 &&
           cuda_wide_fits(s, fmt, p);
}
