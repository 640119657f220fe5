/* kernels/gemm/stream_cuda.cu - up to 8 rows of x times placed fp8 or bf16 weights, several
 * products of the same rows in one launch: the decode product of one to eight rows, of whole blocks
 * of k.
 *
 * What binds is memory, and whatever leaves it idle: launches, and rows of x that are still being
 * made. So a block of threads asks for weights before all else, and takes no more than half of a
 * multiprocessor: while one product ends, the blocks of the next one are already there and fetch.
 * A block has tiles of 16 weight rows; each of its warps takes every WARPS-th block of 128 k of
 * them, of all its tiles in turn, through a ring of stages of its own in shared memory: no warp
 * waits for another. All block sums are kept in shared memory, and in the end one thread per output
 * adds them in ascending order.
 * Bound    Of products one after the other wo_b takes 11.3 us, its bytes 7.9. Slower were: 128
 *          blocks for 132 multiprocessors (13.7 us: soon some have two blocks of one product and
 *          others none); stages filled by the copy engine; the rest of the weights asked for ahead
 *          to the second-level cache (1 to 2 us more each).
 */
#include "kernels/gemm/own.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    WARPS = 12,
    THREADS = 32 * WARPS,
    ROWS = 16,   /* of a tile */
    PIECE = 128, /* bytes of a row in a stage */
    STAGE = ROWS * PIECE,
    STAGES = 3, /* of a warp */
};

/* A product and its blocks of threads, from block `begin` on, with tiles of all its groups. */
struct part {
    struct cuda_product p;
    enum kern_wfmt fmt;
    int32_t begin, blocks, tiles;
};
struct job {
    struct part part[CUDA_SET_MOST];
    int n;
    struct change change;
};

/* Floats from column to column of a block's sums: quads fall into other banks. */
static __host__ __device__ __forceinline__ int32_t column_ld(int32_t T)
{
    return T == 1 ? ROWS : ROWS + 4;
}

/* What a block of threads has: n tiles from tile `first` on, of one group or, from the turn-th on,
 * of the next one. */
struct share {
    int32_t first, n, group, turn;
};

/* Sixteen bytes of shared memory. */
static __device__ __forceinline__ void take16(uint32_t *to, uint32_t from)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void put16(uint32_t *to, uint4 v)
{
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
static __device__ __forceinline__ void fetch16(uint32_t to, const uint8_t *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
}
/* v. How it was made is hidden from the compiler, which so keeps it instead of making it anew. */
template <typename V> static __device__ __forceinline__ V kept(V v)
{
    if constexpr (sizeof v == 8)
        asm volatile("" : "+l"(v));
    else
        asm volatile("" : "+r"(v));
    return v;
}

/* Rows of 128 bytes, of which threads read pieces of 16: of two rows at a time the same ones, so
 * those of odd rows lie elsewhere. What is read second lies at the other side of this bit. */
template <kern_wfmt F> struct pieces {
    enum { OTHER = F == KERN_W_BF16 ? 16 : 64 };
    static __device__ __forceinline__ int at(int row, int piece)
    {
        return row * PIECE + (piece * 16 ^ row % 2 * OTHER);
    }
};

template <kern_wfmt F, bool OWN, enum before HOW>
static __device__ __forceinline__ void
stream_tiles(const struct cuda_product &p, const struct share &sh, const struct change &change)
{
    enum {
        PARTS = F == KERN_W_BF16 ? 2 : 1, /* stages of a block of k */
        GROUPS = 2 / PARTS,
        OTHER = pieces<F>::OTHER,
        RING = STAGES * STAGE,
    };
    /* ring [WARPS][STAGES]; nans [n][ROWS]; scales [n][n_blocks]; sums [n][n_blocks][T][ld]; x of
     * one or two groups [T][x_ld]; NORMED: squares [T][OWN_SQUARES] */
    extern __shared__ __align__(128) uint8_t shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int32_t n_blocks = p.K / BLOCK_K, T = p.T, ld = column_ld(T), items = sh.n * n_blocks,
                  x_ld = p.K + 8;
    uint8_t *nans = shared + WARPS * RING;
    float *scales = (float *)(nans + sh.n * ROWS), *sums = scales + (items + 3) / 4 * 4;
    uint16_t *xs = (uint16_t *)(sums + items * T * ld);
    const uint16_t *x = p.x + sh.group * p.x_group;
    const int64_t first_row = (int64_t)sh.first * ROWS; /* of all */

    /* The next stage to be fetched: block next_b of k, or its second part. */
    const int64_t to_next_tile = ROWS * p.row_bytes - n_blocks * (PARTS * PIECE),
                  four_rows = kept(4 * p.row_bytes);
    const uint8_t *next = p.w + (first_row + lane / 8) * p.row_bytes + lane % 8 * 16 +
                          (warp - WARPS) * (PARTS * PIECE);
    int32_t next_b = warp - WARPS, left = (items - warp + WARPS - 1) / WARPS * PARTS;
    const uint32_t ring = kept((uint32_t)__cvta_generic_to_shared(shared) + warp * RING),
                   to = kept(ring + pieces<F>::at(lane / 8, lane % 8));
    const auto fetch = [&](int slot, int part) {
        if (left > 0) {
            left--;
            if (part == 0) {
                next += WARPS * PARTS * PIECE;
                for (next_b += WARPS; next_b >= n_blocks; next_b -= n_blocks) next += to_next_tile;
            }
            const uint8_t *from = next + part * PIECE;
#pragma unroll
            for (int r = 0; r < ROWS; r += 4, from += four_rows)
                fetch16(to + slot + r * PIECE, from);
        }
        dev_copy_commit();
    };
#pragma unroll 1
    for (int k = 0; k < STAGES; k++) fetch(k * STAGE, k % PARTS);

    if (F == KERN_W_FP8) {
        for (int32_t i = threadIdx.x; i < items; i += THREADS) {
            const int32_t tile = i / n_blocks;
            scales[i] = block_scale(p, (first_row + tile * ROWS) / BLOCK_N, i - tile * n_blocks);
        }
        for (int32_t i = threadIdx.x; i < sh.n * ROWS; i += THREADS)
            nans[i] = __ldg(p.nan_rows + first_row + i);
    }
    cuda_await(); /* what makes x, or reads where y goes, may have been still at work */
    if (OWN) {
        float *squares = (float *)(xs + T * x_ld);
        if (HOW == NORMED) own_squares<WARPS>(p, x, T, squares);
#pragma unroll 1
        for (int q = 0; q < (HOW != NORMED && sh.n > sh.turn ? 2 : 1); q++)
            own_rows<WARPS, HOW>(p, x + q * p.x_group, T, 1, 1, 0, change, squares,
                                 xs + q * T * x_ld, x_ld);
        __syncthreads();
    }

    /* Columns that are not there are the last one again. */
    const int32_t column = g < T ? g : T - 1;
    const uint16_t *rows = x + column * p.ld_x + c * 16;
    uint32_t own_at = (uint32_t)__cvta_generic_to_shared(xs + column * x_ld + c * 16);
    const uint32_t w_at = kept(ring + pieces<F>::at(g, F == KERN_W_BF16 ? 2 * c : c));
    float *put = sums + warp * (T * ld) + 2 * c * ld + g;
    const bool stores[2] = {2 * c < T, 2 * c + 1 < T};
    int slot = 0;
    int32_t b = warp - WARPS, to_turn = sh.turn; /* tiles up to there */
#pragma unroll 1
    for (int32_t i = warp; i < items; i += WARPS) {
        float sum[1][4] = {{0, 0, 0, 0}};
        for (b += WARPS; b >= n_blocks; b -= n_blocks)
            if (--to_turn == 0) own_at += T * x_ld * 2, rows += p.x_group;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            struct weights16<F> ws[GROUPS];
            uint32_t xv[GROUPS][1][8];
            const uint32_t own_from = own_at + (b * BLOCK_K + part * GROUP_K) * 2;
            const uint16_t *from = rows + b * BLOCK_K + part * GROUP_K;
            if (!OWN)
#pragma unroll
                for (int h = 0; h < GROUPS; h++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        put16(xv[h][0] + 4 * e, *(const uint4 *)(from + h * GROUP_K + 8 * e));
            dev_copy_wait<STAGES - 1>();
            __syncwarp();
            const uint32_t w = w_at + slot;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                take16(ws[0].v[r], w + r * (8 * PIECE));
                take16(F == KERN_W_BF16 ? ws[0].v[r] + 4 : ws[GROUPS - 1].v[r],
                       (w ^ OTHER) + r * (8 * PIECE));
            }
#pragma unroll
            for (int h = 0; h < GROUPS; h++) {
                if (OWN)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        take16(xv[h][0] + 4 * e, own_from + h * (GROUP_K * 2) + 16 * e);
                weights_times<F, 1>(sum, ws[h], xv[h]);
            }
            __syncwarp();
            fetch(slot, (part + STAGES) % PARTS);
            slot = slot == (STAGES - 1) * STAGE ? 0 : slot + STAGE;
        }
        if (stores[0]) put[0] = sum[0][0], put[8] = sum[0][2];
        if (stores[1]) put[ld] = sum[0][1], put[ld + 8] = sum[0][3];
        put += WARPS * T * ld;
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t o = threadIdx.x; o < sh.n * ROWS * T; o += THREADS) {
        const int32_t r = o % ROWS, t = o / ROWS % T, i = o / (ROWS * T);
        const float *from = sums + (i * n_blocks * T + t) * ld + r, *scale = scales + i * n_blocks;
        float total = 0.0f;
#pragma unroll 8
        for (int32_t k = 0; k < n_blocks; k++)
            total = fmaf(from[k * (T * ld)], F == KERN_W_FP8 ? scale[k] : 1.0f, total);
        dev_store(p.y, t * p.ld_y + first_row + i * ROWS + r, p.y_dtype,
                  F == KERN_W_FP8 && nans[i * ROWS + r] ? kern_float(0x7fc00000u) : total * p.post);
    }
}

template <bool OWN, enum before HOW>
static __global__ void __launch_bounds__(THREADS, 2)
    stream_kernel(const __grid_constant__ struct job j)
{
    int k = 0;
    while (k + 1 < j.n && (int32_t)blockIdx.x >= j.part[k + 1].begin) k++;
    const struct part &part = j.part[k];
    const int64_t i = (int32_t)blockIdx.x - part.begin;
    const int32_t first = (int32_t)(i * part.tiles / part.blocks), of_group = part.p.N / ROWS;
    struct share sh;
    sh.first = first;
    sh.n = (int32_t)((i + 1) * part.tiles / part.blocks) - first;
    sh.group = first / of_group;
    sh.turn = (sh.group + 1) * of_group - first;
    cuda_hurry();
    if (part.fmt == KERN_W_FP8)
        stream_tiles<KERN_W_FP8, OWN, HOW>(part.p, sh, j.change);
    else
        stream_tiles<KERN_W_BF16, OWN, HOW>(part.p, sh, j.change);
}

/* Shared memory of a block with n tiles. */
static size_t bytes_of(const struct cuda_product *p, int64_t n, bool own, bool normed)
{
    const int64_t items = n * (p->K / BLOCK_K), T = p->T, groups = p->groups > 1 ? 2 : 1;
    return (size_t)(WARPS * STAGES * STAGE + n * ROWS + (items + 3) / 4 * 16 +
                    items * T * column_ld(p->T) * 4 + (own ? groups * T * (p->K + 8) * 2 : 0) +
                    (normed ? T * OWN_SQUARES * 4 : 0));
}

/* Tiles to blocks of threads, one for each multiprocessor, each product with its part of the bytes.
 * If some had none, or two, so would the next product's, and the one after that. But what has
 * groups reads attention's heads, and attention of a row keeps four multiprocessors to itself until
 * it ends: if these can be done without, they are (wo_a 2.7 us sooner). *blocks: how many in all;
 * *bytes: shared memory of the largest. False: it does not fit. */
static bool plan(const struct kern_stream *s, const struct cuda_set *a, struct job *j,
                 int32_t *blocks, size_t *bytes)
{
    int64_t all = 0, done = 0, begin = 0;
    for (int i = 0; i < a->n; i++) all += a->p[i].N * a->p[i].row_bytes;
    *bytes = 0;
    *j = {};
    j->n = a->n;
    for (int i = 0; i < a->n; i++) {
        const struct cuda_product *p = &a->p[i];
        struct part *q = &j->part[i];
        const int64_t tiles = p->N / ROWS * p->groups;
        done += p->N * p->row_bytes;
        int64_t mine = (done * s->n_sm + all / 2) / all - begin;
        if (mine < 1) mine = 1;
        if (mine > tiles) mine = tiles;
        const int64_t each = cuda_ceil(tiles, mine);
        if (p->groups > 1) mine = cuda_ceil(tiles, each);
        if (p->groups > 1 && each > p->N / ROWS) return false; /* of two groups at most */
        q->p = *p;
        q->fmt = a->fmt[i];
        q->begin = (int32_t)begin;
        q->blocks = (int32_t)mine;
        q->tiles = (int32_t)tiles;
        begin += mine;
        const size_t one = bytes_of(p, each, a->own, a->norm != NULL);
        if (one > *bytes) *bytes = one;
    }
    *blocks = (int32_t)begin;
    /* Few tiles would leave multiprocessors idle: few_cuda.cu shares out k. */
    return *bytes <= (size_t)s->max_shared && 2 * begin >= s->n_sm;
}

bool cuda_stream_fits(const struct kern_stream *s, const struct cuda_set *a)
{
    struct job j;
    int32_t blocks;
    size_t bytes;
    for (int i = 0; i < a->n; i++) {
        const struct cuda_product *p = &a->p[i];
        if ((a->fmt[i] != KERN_W_FP8 && a->fmt[i] != KERN_W_BF16) || p->K % BLOCK_K ||
            p->N % ROWS || p->aq == KERN_AQ_NVFP4 || p->T > 8)
            return false;
    }
    return cuda_set_fits(a) && plan(s, a, &j, &blocks, &bytes);
}

template <bool OWN, enum before HOW>
static void launch(struct kern_stream *s, const struct job &j, int32_t blocks, size_t bytes)
{
    CUDA_SHARED((stream_kernel<OWN, HOW>), s->max_shared);
    cuda_launch_early(s, stream_kernel<OWN, HOW>, dim3((unsigned)blocks), THREADS, bytes, j);
}

void cuda_product_stream(struct kern_stream *s, const struct cuda_set *a)
{
    struct job j;
    int32_t blocks;
    size_t bytes;
    plan(s, a, &j, &blocks, &bytes);
    j.change = change_of(a);
    if (!a->own)
        launch<false, AS_THEY_ARE>(s, j, blocks, bytes);
    else if (a->norm)
        launch<true, NORMED>(s, j, blocks, bytes);
    else if (a->rope)
        launch<true, TURNED>(s, j, blocks, bytes);
    else
        launch<true, AS_THEY_ARE>(s, j, blocks, bytes);
}
