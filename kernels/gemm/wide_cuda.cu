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
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/gemm/product.cuh"

enum {
    WARPS = 8, /* that multiply; four more, of which one thread works */
    THREADS = 32 * WARPS + 128,
    M = 128,      /* weight rows of a tile */
    PAIR = 2,     /* blocks of threads of a cluster */
    COLUMNS = 64, /* summed at a time */
    ALIGN = 1024,
    RING = 200 * 1024,
    OUT = COLUMNS * 128, /* of a warpgroup: 64 rows of y, 64 of bf16 of each */
    BAND = 8,            /* tiles of x that take turns with the same weights */
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
    uint8_t out[2][OUT];
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
};
static_assert(sizeof(struct layout) + ALIGN <= 227 * 1024, "fits a multiprocessor of sm_90");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* What a cluster does next: tiles that run at the same time are near each other in both directions. */
struct place {
    int32_t group, n, t; /* first weight row of this block's tile, first row of x */
};
template <int H>
static __device__ __forceinline__ struct place place_of(const struct cuda_product &p, int32_t item)
{
    const int32_t pairs = (p.N + PAIR * M - 1) / (PAIR * M),
                  across = (p.T + tile<H>::N - 1) / tile<H>::N;
    struct place l;
    l.group = item / (pairs * across);
    item -= l.group * pairs * across;
    const int32_t band = item / (BAND * pairs);
    item -= band * BAND * pairs;
    const int32_t width = across - band * BAND < BAND ? across - band * BAND : BAND;
    l.t = (band * BAND + item % width) * tile<H>::N;
    l.n = (item / width * PAIR + cluster_rank()) * M;
    return l;
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
            uint64_t *full = &l->full[slot];
            bar_wait(&l->empty[slot], phase ^ 1);
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
        bar_wait(&l->full[t.slot], t.phase);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint4 v = *(const uint4 *)(w + (row + 8 * r) * GROUP_K + lane % 4 * 16);
            ws[q].v[r][0] = v.x, ws[q].v[r][1] = v.y, ws[q].v[r][2] = v.z, ws[q].v[r][3] = v.w;
        }
    }
}

/* The finished tile of a warpgroup. */
template <int H>
static __device__ __forceinline__ void store(const struct cuda_product &p, const struct place &at,
                                             uint8_t *out, float (&total)[H][COLUMNS / 2])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int half = warp / 4, n = at.n + warp * 16 + g;
    const int64_t first = (int64_t)at.group * p.N + at.n;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (n + 8 * r >= p.N) continue;
#pragma unroll
        for (int h = 0; h < H; h++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++)
                if (i % 4 / 2 == r)
                    total[h][i] =
                        finished<KERN_W_FP8>(p, first + warp * 16 + g + 8 * r, total[h][i]);
    }
    const bool fast =
        p.y_dtype == KERN_BF16 && p.ld_y % 8 == 0 && first % 8 == 0 && (uintptr_t)p.y % 16 == 0;
#pragma unroll
    for (int h = 0; h < H; h++) {
        const int32_t t0 = at.t + h * COLUMNS;
        if (!fast) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) {
                const int32_t t = t0 + i / 4 * 8 + 2 * c + i % 2, row = n + i % 4 / 2 * 8;
                if (t < p.T && row < p.N)
                    dev_store(p.y, t * p.ld_y + (int64_t)at.group * p.N + row, p.y_dtype,
                              total[h][i]);
            }
            continue;
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; j++) { /* 16 columns, turned */
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const __nv_bfloat162 two =
                    __floats2bfloat162_rn(total[h][8 * j + 2 * e], total[h][8 * j + 2 * e + 1]);
                memcpy(&r[e], &two, 4);
            }
            const int row = 16 * j + lane / 16 * 8 + lane % 8, piece = warp % 4 * 2 + lane / 8 % 2;
            dev_store_matrix4_trans(out + row * 128 + (piece ^ (row & 7)) * 16, r);
        }
        asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i * 16 + threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
            const uint4 u = *(const uint4 *)(out + row * 128 + (piece ^ (row & 7)) * 16);
            const int32_t t = t0 + row, to = half * 64 + piece * 8;
            if (t >= p.T) continue;
            uint16_t *y = (uint16_t *)p.y + t * p.ld_y + first + to;
            if (at.n + to + 8 <= p.N) {
                *(uint4 *)y = u;
            } else {
                const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
                for (int e = 0; e < 8; e++)
                    if (at.n + to + e < p.N) y[e] = (uint16_t)(words[e / 2] >> (e % 2 * 16));
            }
        }
        asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory");
    }
}

template <int H>
static __device__ __forceinline__ void multiply(const struct cuda_product &p, struct layout *l,
                                                int32_t items)
{
    using C = struct tile<H>;
    const int lane = threadIdx.x % 32, half = threadIdx.x / 128;
    const int32_t n_blocks = p.Kx / BLOCK_K;
    const int32_t last_scale = (p.groups * p.N - 1) / BLOCK_N;
    struct turn turn = {0, 0};
    struct weights16<KERN_W_FP8> ws[2];
    bool late = half == 1;
    for (int32_t item = blockIdx.x / PAIR; item < items; item += gridDim.x / PAIR) {
        const struct place at = place_of<H>(p, item);
        const int32_t of_all = (at.group * p.N + at.n) / BLOCK_N,
                      scale_row = of_all < last_scale ? of_all : last_scale;
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
                    __syncwarp();
                    if (lane < PAIR) {
                        bar_arrive_at(&l->empty[turn.slot], lane);
                        bar_arrive_at(&l->empty[second.slot], lane);
                    }
                }
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i++)
                    total[h][i] = fmaf(sum[i], scale, total[h][i]);
            }
            turn = then;
        }
        store<H>(p, at, l->out[half], total);
    }
}

template <int H>
static __global__ void __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
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
static __global__ void wide_kernel(const __grid_constant__ CUtensorMap x,
                                   const __grid_constant__ CUtensorMap w,
                                   const struct cuda_product p, int32_t items)
{
}
#endif

static int64_t items_of(const struct cuda_product *p, int columns)
{
    return cuda_ceil(p->N, PAIR * M) * cuda_ceil(p->T, columns) * p->groups;
}

template <int H> static bool launch(struct kern_stream *s, const struct cuda_product *p)
{
    CUtensorMap x, w;
    const int64_t width = (int64_t)p->groups * p->Kx * 2;
    if (!cuda_tile_map(&x, p->x, p->T, width, width, tile<H>::N / PAIR) ||
        !cuda_half_tile_map(&w, p->w, (int64_t)p->groups * p->N, p->row_bytes, p->row_bytes, M))
        return false;
    const int64_t items = items_of(p, tile<H>::N);
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
    CUDA_SHARED(wide_kernel<H>, sizeof(struct layout) + ALIGN);
    cudaLaunchKernelEx(&c, wide_kernel<H>, x, w, *p, (int32_t)items);
    return true;
}

bool cuda_product_wide(struct kern_stream *s, const struct cuda_product *p)
{
    /* In rounds of all clusters, a tile of 128 columns being half of one of 256 and a little more. */
    const int64_t clusters = s->n_sm / PAIR, narrow = cuda_ceil(items_of(p, 128), clusters),
                  broad = cuda_ceil(items_of(p, 256), clusters);
    return narrow * 6 < broad * 10 ? launch<2>(s, p) : launch<4>(s, p);
}

bool cuda_wide_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    return s->arch == 90 && fmt == KERN_W_FP8 && (p->groups == 1 || p->N % BLOCK_N == 0);
}
