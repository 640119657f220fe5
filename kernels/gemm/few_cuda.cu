/* kernels/gemm/few_cuda.cu - up to 32 rows of activations times placed weights: the decode product
 * where stream_cuda.cu (up to 8 rows of most products) and on sm_90a turns_cuda.cu and
 * narrow_cuda.cu (more rows of fp8 or bf16 weights; codes) do not take it; more rows of a narrow
 * product.
 *
 * A warp streams 16 weight rows from memory straight into registers, several groups of 64 k ahead,
 * so that enough bytes are under way without a barrier; the other operand is NT times eight columns
 * of activations. The warps of a block of threads share out the weight rows and, in turns, the
 * blocks of 128 k; each block's sum goes to shared memory, and now and then one thread per output
 * adds them in ascending order. That order knows nothing of how many warps there were.
 * A narrow product has fewer tiles of rows than the machine has multiprocessors: there a cluster of
 * blocks of threads shares out the blocks of k, and all leave their sums with the first of them.
 * Products of many tiles: as many blocks of threads as fit the machine, each with several tiles,
 * whose loads go on across the end of one tile into the next.
 * A small x (one row, or a few short ones) is quantized by each block of threads for itself, into
 * shared memory and while its first weights are on their way: that takes less time than another
 * launch.
 * Several products of the same rows, up to eight, are one launch, each with its share of the blocks
 * of threads; a norm or a rotation of a small x before them is made on that way too. To ask for the
 * weights of all tiles at the begin (prefetch to the second-level cache) made them slower.
 */
#include "kernels/gemm/own.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

int cuda_early_products = 1;

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    ROWS = 16,   /* of a warp */
    COL_LD = 20, /* floats from column to column of a block's sums: quads fall into other banks */
    SUM_BYTES = 40 * 1024,
    NAN_BYTES = WARPS * ROWS,
    MOST_BLOCKS = 8, /* of a cluster, that every machine with clusters has */
};
static_assert((int)(WARPS * ROWS) <= (int)BLOCK_N, "rows here have at most two rows of scales");

template <enum kern_wfmt F, int NT, bool OWN> struct shape {
    enum {
        W = weights16<F>::EACH / 2, /* registers of a group's weights */
        /* Groups under way, an even number: as many as registers allow. */
        D = OWN                 ? (W <= 8    ? 8
                                   : W <= 16 ? 4
                                             : 2)
            : NT <= 2 && W <= 8 ? 4
                                : 2,
        PER_SM = NT * D <= 4 || NT == 1 ? 2 : 1, /* blocks of threads a multiprocessor */
    };
};

static __device__ __forceinline__ void put16(uint32_t *to, uint4 v)
{
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

template <enum kern_wfmt F, int NT, bool OWN> struct stage {
    struct weights16<F> w;
    uint32_t x[OWN ? 1 : NT][8];
};

/* What a thread reads. Rows and columns that are not there are the last one again: their sums go
 * nowhere. */
template <int NT> struct reader {
    const uint8_t *w[2];
    const uint16_t *x[NT];
    int64_t row[2]; /* of groups * N */
    int c;
};

template <enum kern_wfmt F, int NT, bool OWN>
static __device__ __forceinline__ void load_weights(const struct cuda_product &p,
                                                    const struct reader<NT> &rd, int32_t q,
                                                    struct stage<F, NT, OWN> &s)
{
    enum { EACH = weights16<F>::EACH, ROW = weights16<F>::ROW };
    /* Beyond the row its end is read again: there x is zero. */
    const int32_t at = q * ROW + rd.c * EACH, end = (int32_t)p.row_bytes;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (EACH == 8) {
            const uint2 v = dev_stream8(rd.w[r] + (at + 8 <= end ? at : end - 8));
            s.w.v[r][0] = v.x, s.w.v[r][1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < EACH / 16; i++) {
                const int32_t from = at + 16 * i;
                put16(&s.w.v[r][4 * i],
                      dev_stream16(rd.w[r] + (from + 16 <= end ? from : end - 16)));
            }
        }
        s.w.factor[r] = weight_factor<F>(p, rd.row[r], q, rd.c);
    }
}

template <enum kern_wfmt F, int NT, bool OWN>
static __device__ __forceinline__ void load_x(const struct cuda_product &p,
                                              const struct reader<NT> &rd, int32_t q,
                                              struct stage<F, NT, OWN> &s)
{
    if (!OWN) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t k = q * GROUP_K + rd.c * 16 + 8 * i;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (k < p.Kx) v = *(const uint4 *)(rd.x[n] + k);
                put16(&s.x[n][4 * i], v);
            }
        }
    }
}

/* Clusters, where there are any. A block of threads has begun, is as far as this, waits for the
 * others. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
static __device__ __forceinline__ void cluster_begin(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* The same place in the shared memory of the cluster's first block. */
static __device__ __forceinline__ float *leaders(float *p)
{
    uint64_t q;
    asm("mapa.u64 %0, %1, 0;" : "=l"(q) : "l"(p));
    return (float *)q;
}
#else
static __device__ __forceinline__ void cluster_begin(void) {}
static __device__ __forceinline__ void cluster_arrive(void) {}
static __device__ __forceinline__ void cluster_wait(void) {}
static __device__ __forceinline__ float *leaders(float *p)
{
    return p;
}
#endif
static __device__ __forceinline__ void meet(int ks)
{
    if (ks == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

/* What the end of a tile needs besides sums, asked for early: a scale, as stored, and the mark of a
 * NaN row each thread. first: the tile's first row, of all; rows: as many as it has. */
struct side {
    uint32_t scale;
    uint8_t nan;
};
static __device__ __forceinline__ uint32_t side_scale(const struct cuda_product &p, int64_t first,
                                                      int32_t n_blocks, int i)
{
    const int64_t row = first / BLOCK_N + i / n_blocks;
    return row * BLOCK_N < (int64_t)p.groups * p.N ? scale_bits(p, row, i % n_blocks) : 0;
}
template <enum kern_wfmt F>
static __device__ __forceinline__ struct side side_load(const struct cuda_product &p, int64_t first,
                                                        int rows, int32_t n_blocks)
{
    struct side v = {0, 0};
    const int i = threadIdx.x;
    if (F == KERN_W_FP8 && i < 2 * n_blocks) v.scale = side_scale(p, first, n_blocks, i);
    if (F != KERN_W_F32 && F != KERN_W_BF16 && i < rows && first + i < (int64_t)p.groups * p.N)
        v.nan = __ldg(p.nan_rows + first + i);
    return v;
}
template <enum kern_wfmt F>
static __device__ __forceinline__ void side_put(const struct cuda_product &p, const struct side &v,
                                                int64_t first, int32_t n_blocks, float *scales,
                                                uint8_t *nans)
{
    int i = threadIdx.x;
    if (i < WARPS * ROWS) nans[i] = v.nan;
    if (F != KERN_W_FP8) return;
    if (i < 2 * n_blocks) scales[i] = scale_of(p, v.scale);
#pragma unroll 1
    for (i += THREADS; i < 2 * n_blocks; i += THREADS)
        scales[i] = scale_of(p, side_scale(p, first, n_blocks, i));
}

/* One block's share of a product: the tiles that it takes, the first one of a group and every so
 * many-th. */
struct share {
    int32_t tile, step, tiles, group, column; /* column: of 8 * NT rows of x */
    int rank;                                 /* in its cluster */
    /* kw warps of each of ks blocks of threads share the blocks of k, WARPS / kw have rows of their
     * own; `held` block sums, a multiple of D / 2 * kw * ks, of each 16 rows are kept before they
     * are added. */
    int kw, ks, held;
};

template <enum kern_wfmt F, int NT, bool OWN, enum before HOW>
static __device__ __forceinline__ void
few_tiles(const struct cuda_product &p, const struct share &sh, const struct change &change)
{
    enum { D = shape<F, NT, OWN>::D };
    /* nans [WARPS * ROWS]; scales [2][n_blocks]; sums [rw][held][T][COL_LD]; totals [rw][T][ROWS];
     * x [T][x_ld]; NORMED: squares [T][OWN_SQUARES] */
    extern __shared__ __align__(16) float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int kw = sh.kw, ks = sh.ks, held = sh.held, rank = sh.rank, all_k = kw * ks;
    const int rw = WARPS / kw, my_k = rank * kw + warp % kw, my_r = warp / kw;
    const int32_t t0 = sh.column * (8 * NT), T = p.T - t0 < 8 * NT ? p.T - t0 : 8 * NT;
    const int64_t group_row = (int64_t)sh.group * p.N;
    const int32_t tiles = sh.tiles, tile_step = sh.step;
    const int32_t n_groups = (p.K + GROUP_K - 1) / GROUP_K, n_blocks = (n_groups + 1) / 2;
    const int32_t m = (n_blocks + all_k - 1) / all_k * 2; /* groups of a warp */
    const int32_t sum_ld = T * COL_LD, x_ld = n_groups * GROUP_K + 8;
    uint8_t *nans = (uint8_t *)shared;
    float *scales = shared + NAN_BYTES / 4, *sums = scales + (2 * n_blocks + 3) / 4 * 4;
    float *totals = sums + rw * held * sum_ld;
    uint16_t *xs = (uint16_t *)(totals + rw * T * ROWS);
    const uint16_t *x = p.x + (int64_t)t0 * p.ld_x + sh.group * p.x_group;
    struct reader<NT> rd;
    const auto rows_of = [&](int32_t tile, const uint8_t *w[2], int64_t row[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int32_t n = (tile * rw + my_r) * ROWS + g + 8 * r;
            row[r] = group_row + (n < p.N ? n : p.N - 1);
            w[r] = p.w + row[r] * p.row_bytes;
        }
    };
    int32_t tile = sh.tile;
    rows_of(tile, rd.w, rd.row);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int32_t t = 8 * n + g < T ? 8 * n + g : T - 1;
        rd.x[n] = OWN ? xs + t * x_ld + c * 16 : x + t * p.ld_x;
    }
    rd.c = c;

    if (ks > 1) cluster_begin(); /* all must have begun before one writes to another */
    struct stage<F, NT, OWN> st[D];
#define GROUP_OF(j) (2 * (my_k + all_k * ((j) / 2)) + (j) % 2)
#pragma unroll
    for (int d = 0; d < D; d++)
        if (d < m) load_weights<F, NT, OWN>(p, rd, GROUP_OF(d), st[d]);
    int64_t first = group_row + (int64_t)tile * rw * ROWS; /* row of the tile, of all */
    struct side side = side_load<F>(p, first, rw * ROWS, n_blocks);
    cudaGridDependencySynchronize(); /* what makes x may have been still at work */
#pragma unroll
    for (int d = 0; d < D; d++)
        if (d < m) load_x<F, NT, OWN>(p, rd, GROUP_OF(d), st[d]);
    if (OWN) {
        float *squares = (float *)(xs + T * x_ld);
        if (HOW == NORMED) own_squares<WARPS>(p, x, T, squares);
        own_rows<WARPS, HOW>(p, x, T, kw, ks, rank * kw, change, squares, xs, x_ld);
        __syncthreads();
    }
    side_put<F>(p, side, first, n_blocks, scales, nans);
    if (ks > 1) cluster_wait();
    float *put = ks > 1 ? leaders(sums) : sums;

    const int n_out = rank == 0 ? rw * ROWS * T : 0;
    float sum[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[n][e] = 0;
#pragma unroll 1
    for (;;) {
        const bool next = NT == 1 && tile + tile_step < tiles;
        const int64_t next_first = first + (int64_t)tile_step * rw * ROWS;
        const uint8_t *next_w[2] = {rd.w[0], rd.w[1]};
        int64_t next_row[2] = {rd.row[0], rd.row[1]};
        if (next) {
            side = side_load<F>(p, next_first, rw * ROWS, n_blocks);
            rows_of(tile + tile_step, next_w, next_row);
        }
        int32_t b0 = 0; /* first block kept */
#pragma unroll 1
        for (int32_t j0 = 0; j0 < m; j0 += D) {
#pragma unroll
            for (int d = 0; d < D; d++) {
                const int32_t j = j0 + d, q = GROUP_OF(j);
                if (j >= m) break;
                if (q < n_groups) {
                    if (OWN) {
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            const uint4 *from = (const uint4 *)(rd.x[n] + q * GROUP_K);
                            put16(st[d].x[n], from[0]);
                            put16(st[d].x[n] + 4, from[1]);
                        }
                    }
                    weights_times<F, NT>(sum, st[d].w, st[d].x);
                }
                if (j + D < m || next) {
                    const int32_t to = j + D < m ? j + D : d; /* here, or in the next tile */
                    struct reader<NT> from = rd;
                    if (NT == 1 && j + D >= m)
#pragma unroll
                        for (int r = 0; r < 2; r++)
                            from.w[r] = next_w[r], from.row[r] = next_row[r];
                    load_weights<F, NT, OWN>(p, from, GROUP_OF(to), st[d]);
                    load_x<F, NT, OWN>(p, from, GROUP_OF(to), st[d]);
                }
                if (d % 2 == 0) continue;
                if (q / 2 < n_blocks) {
                    float *to = put + (my_r * held + q / 2 - b0) * sum_ld + g;
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int t = 8 * n + 2 * c + e;
                            if (t < T)
                                to[t * COL_LD] = sum[n][e], to[t * COL_LD + 8] = sum[n][2 + e];
                        }
                }
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[n][e] = 0;
            }
            const bool last = j0 + D >= m;
            const int32_t end = (j0 + D) / 2 * all_k; /* the block after those made so far */
            if (!last && end + D / 2 * all_k - b0 <= held) continue;

            meet(ks);
            const int32_t nb = (end < n_blocks ? end : n_blocks) - b0;
#pragma unroll 1
            for (int o = threadIdx.x; o < n_out; o += THREADS) { /* always the same thread's */
                const int r = o % ROWS, t = o / ROWS % T, own = o / (ROWS * T);
                const int64_t row = first + own * ROWS + r;
                const float *from = sums + own * held * sum_ld + t * COL_LD + r;
                const float *sc = scales + (row / BLOCK_N - first / BLOCK_N) * n_blocks + b0;
                float total = b0 ? totals[o] : 0.0f;
#pragma unroll 8
                for (int32_t b = 0; b < nb; b++)
                    total = fmaf(from[b * sum_ld], F == KERN_W_FP8 ? sc[b] : 1.0f, total);
                if (!last)
                    totals[o] = total;
                else if (row < group_row + p.N)
                    dev_store(p.y, (t0 + t) * p.ld_y + row, p.y_dtype,
                              F != KERN_W_F32 && F != KERN_W_BF16 && nans[own * ROWS + r]
                                  ? kern_float(0x7fc00000u)
                                  : total * p.post);
            }
            b0 = end;
            if (!last || next) meet(ks);
        }
        if (!next) break;
        tile += tile_step, first = next_first;
#pragma unroll
        for (int r = 0; r < 2; r++) rd.w[r] = next_w[r], rd.row[r] = next_row[r];
        side_put<F>(p, side, first, n_blocks, scales, nans);
    }
#undef GROUP_OF
}

template <enum kern_wfmt F, int NT, bool OWN>
static __global__ void __launch_bounds__(THREADS, shape<F, NT, OWN>::PER_SM)
    few_kernel(struct cuda_product p, int32_t tiles, int kw, int ks, int held)
{
    const struct share sh = {(int32_t)blockIdx.x / ks,
                             (int32_t)gridDim.x / ks,
                             tiles,
                             (int32_t)blockIdx.y,
                             (int32_t)blockIdx.z,
                             (int)blockIdx.x % ks,
                             kw,
                             ks,
                             held};
    few_tiles<F, NT, OWN, AS_THEY_ARE>(p, sh, change());
}

/* Warps that share k. Eight groups a warp or more; but many columns want many rows beside each
 * other, which share x in the first-level cache. Narrow products, whose 16 rows times kw are
 * tiles(kw): rather more blocks of threads, each with less of k a warp. */
template <typename TILES>
static int warps_of_k(const struct kern_stream *s, int nt, int32_t n_blocks, TILES tiles)
{
    int kw = nt > 1 ? 2 : n_blocks >= 32 ? 8 : n_blocks >= 16 ? 4 : n_blocks >= 8 ? 2 : 1;
    const int enough = nt > 1 ? s->n_sm * 3 / 4 : s->n_sm;
    while (kw < WARPS && 2 * kw <= n_blocks && tiles(kw) < enough) kw *= 2;
    return kw;
}

/* Block sums are kept until there is no room for those of the next D groups of each warp. */
template <enum kern_wfmt F, int NT, bool OWN>
static int held_of(int32_t n_blocks, int all_k, size_t one)
{
    const int turn = shape<F, NT, OWN>::D / 2 * all_k;
    const int held = (int)(SUM_BYTES * (NT > 2 ? 2 : 1) / one) / turn * turn;
    const int most = (int)cuda_ceil(n_blocks, turn) * turn;
    return held < turn ? turn : held > most ? most : held;
}
/* Shared memory of a block; one: bytes of its sums of one block of k. */
static size_t few_bytes(int32_t K, int32_t T, int rw, int held, size_t one, bool own, bool normed)
{
    const size_t x = own ? (size_t)T * ((size_t)cuda_row_width(K) + 8) * 2 : 0;
    return NAN_BYTES + ((size_t)cuda_ceil(K, BLOCK_K) * 2 + 3) / 4 * 16 + (size_t)held * one +
           (size_t)rw * (size_t)T * ROWS * sizeof(float) + x +
           (normed ? (size_t)T * OWN_SQUARES * sizeof(float) : 0);
}

template <typename... P, typename... A>
static void launch_few(struct kern_stream *s, void (*kernel)(P...), dim3 grid, int ks, size_t bytes,
                       bool early, A... args)
{
    cudaLaunchAttribute attrs[2] = {};
    cudaLaunchConfig_t c = {};
    if (ks > 1) {
        attrs[c.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attrs[c.numAttrs].val.clusterDim.x = (unsigned)ks;
        attrs[c.numAttrs].val.clusterDim.y = attrs[c.numAttrs].val.clusterDim.z = 1;
        c.numAttrs++;
    }
    if (early) {
        attrs[c.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attrs[c.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        c.numAttrs++;
    }
    c.gridDim = grid;
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = bytes;
    c.stream = s->cu;
    c.attrs = attrs;
    cudaLaunchKernelEx(&c, kernel, P(args)...);
}

template <enum kern_wfmt F, int NT, bool OWN>
static void launch(struct kern_stream *s, const struct cuda_product *p)
{
    const int32_t n_blocks = (int32_t)cuda_ceil(p->K, BLOCK_K);
    const int32_t T = p->T < 8 * NT ? p->T : 8 * NT;
    const int64_t columns = cuda_ceil(p->T, 8 * NT);
    const int kw = warps_of_k(s, NT, n_blocks, [&](int w) {
        return cuda_ceil(p->N, ROWS * WARPS / w) * p->groups * columns;
    });
    const int rw = WARPS / kw;
    const int64_t tiles = cuda_ceil(p->N, ROWS * rw);
    int ks = 1;
    while (s->arch == 90 && NT == 1 && ks < MOST_BLOCKS && 2 * ks * kw <= n_blocks &&
           tiles * p->groups * columns * ks * 2 <= s->n_sm)
        ks *= 2;
    const size_t one = (size_t)rw * (size_t)T * COL_LD * sizeof(float);
    const int held = held_of<F, NT, OWN>(n_blocks, kw * ks, one);
    CUDA_SHARED((few_kernel<F, NT, OWN>), 99 * 1024);
    /* Two blocks of threads a multiprocessor, if there are so many tiles. */
    const int64_t room = 2 * s->n_sm / (p->groups * columns);
    const int64_t across = NT > 1 || tiles < room || room < 1 ? tiles : room;
    launch_few(s, few_kernel<F, NT, OWN>,
               dim3((unsigned)(across * ks), (unsigned)p->groups, (unsigned)columns), ks,
               few_bytes(p->K, T, rw, held, one, OWN, false), cuda_early_products && p->after_quant,
               *p, (int32_t)tiles, kw, ks, held);
}

/* ------------------------------------------------------------------ several products at once */

/* A product and its blocks of threads: `across` clusters for each of its groups, from block `begin`
 * on. */
struct part {
    struct cuda_product p;
    enum kern_wfmt fmt;
    int32_t begin, across, tiles, held;
};
struct set {
    struct part part[CUDA_SET_MOST];
    int n, kw, ks;
    struct change change;
};

template <bool OWN, enum before HOW>
static __global__ void __launch_bounds__(THREADS, 2)
    set_kernel(const __grid_constant__ struct set a)
{
    int i = 0;
    while (i + 1 < a.n && (int32_t)blockIdx.x >= a.part[i + 1].begin) i++;
    const struct part &part = a.part[i];
    const int32_t cluster = ((int32_t)blockIdx.x - part.begin) / a.ks;
    const struct share sh = {cluster % part.across,
                             part.across,
                             part.tiles,
                             cluster / part.across,
                             0,
                             (int)blockIdx.x % a.ks,
                             a.kw,
                             a.ks,
                             part.held};
    cuda_hurry();
    if (HOW == NORMED) { /* its weights, long before they are needed */
        const int32_t bytes = part.p.K * (a.change.w.dtype == KERN_F32 ? 4 : 2);
        for (int32_t b = threadIdx.x * 128; b < bytes; b += THREADS * 128)
            asm volatile("prefetch.global.L2 [%0];" ::"l"((const uint8_t *)a.change.w.data + b));
    }
    switch (part.fmt) {
    case KERN_W_FP8: few_tiles<KERN_W_FP8, 1, OWN, HOW>(part.p, sh, a.change); break;
    case KERN_W_BF16: few_tiles<KERN_W_BF16, 1, OWN, HOW>(part.p, sh, a.change); break;
    default: few_tiles<KERN_W_F32, 1, OWN, HOW>(part.p, sh, a.change); break;
    }
}

bool cuda_set_takes(enum kern_wfmt fmt, const struct cuda_product *p)
{
    const bool known = fmt == KERN_W_FP8 || fmt == KERN_W_BF16 || fmt == KERN_W_F32;
    return known && p->aq != KERN_AQ_NVFP4 && p->T <= 8;
}
bool cuda_set_fits(const struct cuda_set *a)
{
    const struct cuda_product *p = &a->p[0];
    for (int i = 1; i < a->n; i++)
        if (a->p[i].K != p->K) return false;
    if (a->norm) return a->own && p->groups == 1;
    if (a->rope)
        return a->own && a->rope->d % 4 == 0 && a->rope->rd % 4 == 0 && p->K % a->rope->d == 0;
    return true;
}

template <enum kern_wfmt F> static int set_held(bool own, int32_t n_blocks, int all_k, size_t one)
{
    return own ? held_of<F, 1, true>(n_blocks, all_k, one)
               : held_of<F, 1, false>(n_blocks, all_k, one);
}
template <bool OWN, enum before HOW>
static void launch_set(struct kern_stream *s, const struct set &a, unsigned blocks, size_t bytes)
{
    CUDA_SHARED((set_kernel<OWN, HOW>), 99 * 1024);
    launch_few(s, set_kernel<OWN, HOW>, dim3(blocks), a.ks, bytes, cuda_early_launches, a);
}

void cuda_product_set(struct kern_stream *s, const struct cuda_set *from)
{
    if (cuda_stream_fits(s, from)) {
        cuda_product_stream(s, from);
        return;
    }
    const struct cuda_product *first = &from->p[0];
    const int32_t n_blocks = (int32_t)cuda_ceil(first->K, BLOCK_K), groups = first->groups;
    const auto tiles_at = [&](int w) {
        int64_t n = 0;
        for (int i = 0; i < from->n; i++) n += cuda_ceil(from->p[i].N, ROWS * WARPS / w) * groups;
        return n;
    };
    struct set a = {};
    a.n = from->n;
    a.kw = warps_of_k(s, 1, n_blocks, tiles_at);
    const int rw = WARPS / a.kw;
    const int64_t room = 2 * s->n_sm, all = tiles_at(a.kw);
    a.ks = 1;
    while (s->arch == 90 && a.ks < MOST_BLOCKS && 2 * a.ks * a.kw <= n_blocks &&
           all * a.ks * 2 <= room)
        a.ks *= 2;
    const size_t one = (size_t)rw * (size_t)first->T * COL_LD * sizeof(float);
    const int all_k = a.kw * a.ks;
    int64_t all_bytes = 0, blocks = 0;
    for (int i = 0; i < a.n; i++) all_bytes += from->p[i].N * from->p[i].row_bytes;
    int most_held = 0;
    for (int i = 0; i < a.n; i++) {
        struct part *q = &a.part[i];
        q->p = from->p[i];
        q->fmt = from->fmt[i];
        q->tiles = (int32_t)cuda_ceil(q->p.N, ROWS * rw);
        q->held = q->fmt == KERN_W_FP8    ? set_held<KERN_W_FP8>(from->own, n_blocks, all_k, one)
                  : q->fmt == KERN_W_BF16 ? set_held<KERN_W_BF16>(from->own, n_blocks, all_k, one)
                                          : set_held<KERN_W_F32>(from->own, n_blocks, all_k, one);
        if (q->held > most_held) most_held = q->held;
        /* All blocks of threads at once, each product with its part of the bytes. */
        const int64_t part = room * (q->p.N * q->p.row_bytes) / (all_bytes * groups * a.ks);
        q->across = all * a.ks <= room || part > q->tiles ? q->tiles : part < 1 ? 1 : (int32_t)part;
        q->begin = (int32_t)blocks;
        blocks += (int64_t)q->across * groups * a.ks;
    }
    a.change = change_of(from);
    const size_t bytes = few_bytes(first->K, first->T, rw, most_held, one, from->own, from->norm);
    if (!from->own)
        launch_set<false, AS_THEY_ARE>(s, a, (unsigned)blocks, bytes);
    else if (from->norm)
        launch_set<true, NORMED>(s, a, (unsigned)blocks, bytes);
    else if (from->rope)
        launch_set<true, TURNED>(s, a, (unsigned)blocks, bytes);
    else
        launch_set<true, AS_THEY_ARE>(s, a, (unsigned)blocks, bytes);
}

/* What the formats of a model's dense products are given. */
template <enum kern_wfmt F> static void choose(struct kern_stream *s, const struct cuda_product *p)
{
    if (p->own)
        launch<F, 1, true>(s, p);
    else if (p->T <= 8)
        launch<F, 1, false>(s, p);
    else if (p->T <= 16)
        launch<F, 2, false>(s, p);
    else
        launch<F, 4, false>(s, p);
}

bool cuda_few_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    const bool widely = fmt == KERN_W_FP8 || fmt == KERN_W_BF16;
    const int columns = !widely || p->T <= 8 ? 8 : p->T <= 16 ? 16 : 32;
    const int64_t tiles = cuda_ceil(p->N, 64) * p->groups; /* of the product of many */
    if (p->T <= 8 || (widely && p->T <= 16)) return true;
    /* Narrow: larger tiles are too few to keep the machine busy. */
    if (cuda_ceil(p->N, ROWS) * p->groups * cuda_ceil(p->T, columns) <= 2 * s->n_sm) return true;
    return widely && p->T <= 32 && tiles < s->n_sm;
}

void cuda_product_few(struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    const struct cuda_set one = {.p = {*p}, .fmt = {fmt}, .n = 1, .own = p->own};
    if (cuda_stream_fits(s, &one)) {
        cuda_product_stream(s, &one);
        return;
    }
    switch (fmt) {
    case KERN_W_BF16: choose<KERN_W_BF16>(s, p); break;
    case KERN_W_FP8: choose<KERN_W_FP8>(s, p); break;
    case KERN_W_F32:
        if (p->own)
            launch<KERN_W_F32, 1, true>(s, p);
        else
            launch<KERN_W_F32, 1, false>(s, p);
        break;
    case KERN_W_MXFP4: launch<KERN_W_MXFP4, 1, false>(s, p); break;
    case KERN_W_NVFP4: launch<KERN_W_NVFP4, 1, false>(s, p); break;
    }
}
