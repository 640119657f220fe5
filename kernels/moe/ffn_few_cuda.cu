/* kernels/moe/ffn_few_cuda.cu - the products of a layer's experts, routed (mxfp4) and shared (fp8),
 * for up to FFN_ROWS rows: two kernels, both bound by how fast weights come.
 *
 * Plan     A warp works by itself on sixteen weight rows at a time, the 16-row side of
 *          mma.m16n8k16; up to eight pairs or rows of x are the other side. It keeps a ring of its
 *          own full, by cp.async: a stage has 128 bytes of each row, that is 256 k of mxfp4 or 128
 *          k of fp8.
 *          Up: eight rows of w1 and the same eight of w3, so that a thread has both of a gate's
 *          sums.
 *          A block's share of the shared expert comes first: it needs no routing, and is read while
 *          the router still works. Its blocks of k are dealt to all warps.
 *          Down: a block has 32 rows, of all experts, so that it can add up a row's pairs.
 * Order    As moe_product.cuh and product.cuh have it: the same instructions in the same order, and
 *          a row's pairs by ascending expert, then slot. So bits are those of the ops.
 */
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/quant.cuh"
#include "kernels/moe/ffn.cuh"
#include "kernels/moe/moe_product.cuh"

static const unsigned ALL = 0xffffffffu;

enum {
    UP_WARPS = 14,   /* of a block; one row of V4-Flash has 1,536 tasks, 13.2 a block */
    DOWN_WARPS = 16, /* 12 tasks a block, and 32 lines of the shared expert */
    HALF = 8,        /* rows of each of two groups of rows */
    TASK_ROWS = 2 * HALF,
    LINE = 128, /* bytes of a row in a stage */
    FP4_K = 256,
    FP8_K = 128, /* a line's */
    SCALES_AT = TASK_ROWS * LINE,
    STAGE = SCALES_AT + TASK_ROWS * (FP4_K / 32),
    MOST_STAGES = 4,
    SUM_LD = TASK_ROWS + 4, /* of fp8 sums, from column to column: quads fall into other banks */
    DOWN_TASKS = 2,         /* a block's rows in tasks */
    DOWN_ROWS = DOWN_TASKS * TASK_ROWS,
    /* More than half of a multiprocessor's shared memory: with two blocks of a kernel it would be
     * done long after the others. */
    ALONE = 116 * 1024,
    GATE_BLOCKS = 16 /* multiprocessors that the gate still has when `up` begins */
};

/* ------------------------------------------------------------------ pairs */

/* Pairs sorted by expert, then row, then slot, and tiles of them; in shared memory. */
struct pairs {
    int32_t n, n_tiles;
    int32_t expert[FFN_PAIRS], row[FFN_PAIRS];
    float weight[FFN_PAIRS];
    struct moe_tile tile[FFN_PAIRS];
};

/* By all threads of a block, of which the first warp works: a lane a pair. */
static __device__ __forceinline__ void sort_pairs(const struct ffn_few &p, struct pairs *m)
{
    const int i = threadIdx.x, n = p.T * p.route.k;
    if (i < FFN_PAIRS) {
        int32_t e = i < n ? __ldcg(p.route.experts + i) : -1;
        const float weight = i < n ? __ldcg(p.route.weights + i) : 0.0f;
        if (e < 0 || e >= p.route.E) e = -1;
        const int pairs = __popc(__ballot_sync(ALL, e >= 0));
        int at = 0;
        for (int j = 0; j < n; j++) {
            const int32_t o = __shfl_sync(ALL, e, j);
            at += o >= 0 && (o < e || (o == e && j < i));
        }
        if (e >= 0) m->expert[at] = e, m->row[at] = i / p.route.k, m->weight[at] = weight;
        __syncwarp();
        /* By place now. Of an expert's pairs each eighth begins a tile. */
        e = i < pairs ? m->expert[i] : -1;
        const unsigned same = __match_any_sync(ALL, e), before = (1u << i) - 1;
        const bool begins = i < pairs && __popc(same & before) % 8 == 0;
        const unsigned tiles = __ballot_sync(ALL, begins);
        const int left = __popc(same & ~before);
        if (begins) m->tile[__popc(tiles & before)] = {e, i, left < 8 ? left : 8};
        if (i == 0) m->n = pairs, m->n_tiles = __popc(tiles);
    }
    __syncthreads();
}

/* ------------------------------------------------------------------ stages */

/* Until no more than n of the warp's stages are under way. */
static __device__ __forceinline__ void ring_wait(int n)
{
    if (n == 3)
        dev_copy_wait<3>();
    else
        moe_wait(n);
}

/* A thread's part of what a task reads. */
struct reader {
    const uint8_t *a,
        *b; /* its 16 bytes of the next stage's first row, of the first and second eight */
    const uint8_t *scales; /* of the next stage's row `lane`, mxfp4 */
    int64_t ld4;           /* from a row to the fourth after it */
};

static __device__ __forceinline__ void aim(struct reader *r, const uint8_t *a, const uint8_t *b,
                                           int64_t ld)
{
    const int lane = threadIdx.x % 32;
    const int64_t at = lane / 8 * ld + lane % 8 * 16;
    r->a = a + at, r->b = b + at, r->ld4 = 4 * ld;
}
/* Sixteen-byte pieces that eight neighbouring threads read at once, of two rows, lie in different
 * banks. */
static __device__ __forceinline__ int piece_at(int row, int piece)
{
    return row * LINE + (piece ^ (row & 1) << 2) * 16;
}
static __device__ __forceinline__ void fetch(struct reader *r, uint8_t *to, bool scales)
{
    const int lane = threadIdx.x % 32;
    uint8_t *const at = to + piece_at(lane / 8, lane % 8); /* four rows on it is the same */
    moe_copy<16>(at, r->a);
    moe_copy<16>(at + 4 * LINE, r->a + r->ld4);
    moe_copy<16>(at + HALF * LINE, r->b);
    moe_copy<16>(at + (HALF + 4) * LINE, r->b + r->ld4);
    r->a += LINE, r->b += LINE;
    if (!scales) return;
    if (lane < TASK_ROWS) moe_copy<8>(to + SCALES_AT + lane * 8, r->scales);
    r->scales += 8;
}

/* ------------------------------------------------------------------ rows of x */

/* A warp's 128 values of a row, from k on, quantized, to shared memory. */
static __device__ __forceinline__ void put_span(uint8_t *rows, int32_t row, int32_t width,
                                                int32_t k, uint2 u)
{
    float v[4] = {kern_float(u.x << 16), kern_float(u.x & 0xffff0000u), kern_float(u.y << 16),
                  kern_float(u.y & 0xffff0000u)};
    dev_quant4_a128(v);
    k += threadIdx.x % 32 * 4;
    *(uint2 *)(rows + row * (width * 2) + moe_x_piece(row, k / 8) * 16 + k % 8 * 2) = dev_pack4(v);
}
/* n rows of width values to shared memory, by all warps. */
static __device__ __forceinline__ void put_rows(uint8_t *rows, const uint16_t *x, int32_t n,
                                                int32_t width)
{
    enum { BATCH = 8 }; /* loads at a time: what one row of V4-Flash makes takes one round */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int32_t each = width / 128;
    for (int32_t i0 = warp; i0 < n * each; i0 += warps * BATCH) {
        uint2 u[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int32_t i = i0 + b * warps;
            if (i < n * each) u[b] = __ldcg((const uint2 *)(x + (int64_t)i * 128) + lane);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int32_t i = i0 + b * warps;
            if (i < n * each) put_span(rows, i / each, width, i % each * 128, u[b]);
        }
    }
}
/* Where a thread finds its four pieces of a row of x in each block of 128 k, for either format;
 * `row` is that of its column. */
struct x_place {
    const uint8_t *row;
    int at[4];
};
static __device__ __forceinline__ struct x_place place_of(const uint8_t *rows, int32_t row,
                                                          int32_t width, bool fp8)
{
    const int t = threadIdx.x % 4;
    struct x_place x = {rows + row * (width * 2)};
#pragma unroll
    for (int j = 0; j < 4; j++)
        x.at[j] = moe_x_piece(row, fp8 ? j / 2 * 8 + t * 2 + j % 2 : t * 4 + j) * 16;
    return x;
}

/* ------------------------------------------------------------------ products of a stage */

/* acc += the 256 k of mxfp4 of a stage; x: those of the row. */
static __device__ __forceinline__ void fp4_line(const uint8_t *stage, const uint8_t *x,
                                                const int (&at)[4], float acc[4])
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint8_t *codes[2] = {stage + piece_at(g, t), stage + piece_at(g, 4 + t)};
    const uint8_t *scales = stage + SCALES_AT + g * 8 + t;
#pragma unroll
    for (int kb = 0; kb < FP4_K / 128; kb++) {
        uint32_t code[2][4], factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint4 v = *(const uint4 *)(codes[kb] + r * (HALF * LINE));
            code[r][0] = v.x, code[r][1] = v.y, code[r][2] = v.z, code[r][3] = v.w;
            factor[r] = dev_mxfp4_factor(scales[r * (HALF * 8) + kb * 4]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t v[2][4];
#pragma unroll
            for (int r = 0; r < 2; r++) dev_e2m1x8(code[r][j], factor[r], v[r]);
            const uint4 u = *(const uint4 *)(x + kb * 256 + at[j]);
#pragma unroll
            for (int step = 0; step < 2; step++) {
                const uint32_t a[4] = {v[0][2 * step], v[1][2 * step], v[0][2 * step + 1],
                                       v[1][2 * step + 1]};
                const uint32_t b[2] = {step ? u.z : u.x, step ? u.w : u.y};
                dev_mma(acc, a, b);
            }
        }
    }
}
/* The sums of a stage's 128 k of fp8, x being those of the row: to `sums`, for each of T columns
 * sixteen. */
static __device__ __forceinline__ void fp8_line(const uint8_t *stage, const uint8_t *x,
                                                const int (&at)[4], int32_t T, float *sums)
{
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float sum[1][4] = {};
#pragma unroll
    for (int q = 0; q < 2; q++) {
        struct weights16<KERN_W_FP8> w;
        uint32_t b[1][8];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint4 v = *(const uint4 *)(stage + piece_at(g, q * 4 + c) + r * (HALF * LINE));
            w.v[r][0] = v.x, w.v[r][1] = v.y, w.v[r][2] = v.z, w.v[r][3] = v.w;
            const uint4 u = *(const uint4 *)(x + at[2 * q + r]);
            b[0][4 * r] = u.x, b[0][4 * r + 1] = u.y, b[0][4 * r + 2] = u.z, b[0][4 * r + 3] = u.w;
        }
        weights_times<KERN_W_FP8, 1>(sum, w, b);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int t = 2 * c + e;
        if (t < T) sums[t * SUM_LD + g] = sum[0][e], sums[t * SUM_LD + HALF + g] = sum[0][2 + e];
    }
}
/* The sum of all blocks of k for row `row` of the weight: `from` is that of the first. */
static __device__ __forceinline__ float fp8_total(const struct cuda_product &w, int32_t row,
                                                  const float *from, int32_t step,
                                                  const float *scales, int32_t n_blocks)
{
    float total = 0.0f;
#pragma unroll 8
    for (int32_t b = 0; b < n_blocks; b++) total = fmaf(from[b * step], scales[b], total);
    return finished<KERN_W_FP8>(w, row, total);
}
static __device__ __forceinline__ float fp4_total(float acc, bool nan)
{
    return kern_bf16_round(nan ? NAN : acc * DEV_E2M1_POST);
}
static __device__ __forceinline__ bool nan_row(const struct moe_matrix &m, int32_t expert,
                                               int32_t n, int32_t k, int32_t row)
{
    return __ldg(moe_nan_rows(m, &m.w[expert], n, k) + row) != 0;
}

/* ------------------------------------------------------------------ up */

/* Eight rows of the shared expert's up product each, of a block. */
static inline __host__ __device__ int32_t shared_tasks(int32_t I, int32_t blocks)
{
    return (I / HALF + blocks - 1) / blocks;
}

static __global__ void __launch_bounds__(32 * UP_WARPS, 1)
    up_kernel(const __grid_constant__ struct ffn_few p, int stages)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ struct pairs m;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int32_t n_blocks = p.D / FP8_K, most = shared_tasks(p.I, (int32_t)gridDim.x);
    const int32_t n_shared = (p.I / HALF - (int32_t)blockIdx.x + (int32_t)gridDim.x - 1) /
                             (int32_t)gridDim.x; /* this block's, at most `most` */
    const int32_t units = n_shared * n_blocks;
    uint8_t *ring = shared + warp * stages * STAGE;
    uint8_t *x = shared + UP_WARPS * stages * STAGE;
    float *sums = (float *)(x + p.T * p.D * 2);            /* [most * n_blocks][T][SUM_LD] */
    float *scales = sums + most * n_blocks * p.T * SUM_LD; /* [most][2][n_blocks] */
    const struct x_place of_shared = place_of(x, g < p.T ? g : 0, p.D, true);
    struct reader rd;

    /* The shared expert. What lies in x was made before the gate began. */
    const auto shared_row = [&](int32_t j) {
        return ((int32_t)blockIdx.x + j * (int32_t)gridDim.x) * HALF;
    };
    const auto load_unit = [&](int32_t u, uint8_t *to) {
        if (u < units) {
            const int64_t at = (int64_t)shared_row(u / n_blocks), k = u % n_blocks * FP8_K;
            aim(&rd, p.s1.w + at * p.s1.row_bytes + k, p.s3.w + at * p.s3.row_bytes + k,
                p.s1.row_bytes);
            fetch(&rd, to, false);
        }
        dev_copy_commit();
    };
    for (int i = 0; i < stages; i++) load_unit(warp + i * UP_WARPS, ring + i * STAGE);
    for (int32_t i = threadIdx.x; i < n_shared * 2 * n_blocks; i += 32 * UP_WARPS)
        scales[i] = block_scale(i / n_blocks % 2 ? p.s3 : p.s1,
                                shared_row(i / n_blocks / 2) / BLOCK_N, i % n_blocks);
    put_rows(x, p.x, p.T, p.D);
    __syncthreads();
    int slot = 0;
    for (int32_t u = warp; u < units; u += UP_WARPS) {
        ring_wait(stages - 1);
        __syncwarp();
        fp8_line(ring + slot * STAGE, of_shared.row + u % n_blocks * 256, of_shared.at, p.T,
                 sums + u * p.T * SUM_LD);
        __syncwarp();
        load_unit(u + stages * UP_WARPS, ring + slot * STAGE);
        if (++slot == stages) slot = 0;
    }
    dev_copy_wait<0>();
    __syncwarp();
    cuda_await();
    cuda_hurry();
    sort_pairs(p, &m); /* and all sums are there */

    const int32_t row_tasks = p.I / HALF, tasks = m.n_tiles * row_tasks, steps = p.D / FP4_K;
    const int32_t first = (int32_t)blockIdx.x + (int32_t)gridDim.x * warp,
                  stride = (int32_t)gridDim.x * UP_WARPS;
    int32_t ahead = first, left = 0; /* task that is read, its stages yet to be */
    const auto load = [&](uint8_t *to) {
        if (ahead < tasks) {
            if (left == 0) {
                const int32_t e = m.tile[ahead / row_tasks].expert;
                const int64_t row = (int64_t)(ahead % row_tasks) * HALF;
                const struct cuda_weight *w1 = &p.w1.w[e], *w3 = &p.w3.w[e];
                aim(&rd, w1->data + row * p.w1.row_bytes, w3->data + row * p.w1.row_bytes,
                    p.w1.row_bytes);
                rd.scales = (lane < HALF ? w1 : w3)->scale + (row + lane % HALF) * p.w1.scale_bytes;
                left = steps;
            }
            fetch(&rd, to, true);
            if (--left == 0) ahead += stride;
        }
        dev_copy_commit();
    };
    for (int i = 0; i < stages; i++) load(ring + i * STAGE);
    for (int32_t i = threadIdx.x; i < n_shared * HALF * p.T; i += 32 * UP_WARPS) {
        const int32_t r = i % HALF, t = i / HALF % p.T, j = i / HALF / p.T;
        const int32_t row = shared_row(j) + r, step = p.T * SUM_LD;
        const float *from = sums + j * n_blocks * step + t * SUM_LD + r;
        const float *sc = scales + j * 2 * n_blocks;
        const float a = kern_bf16_round(fp8_total(p.s1, row, from, step, sc, n_blocks));
        const float b =
            kern_bf16_round(fp8_total(p.s3, row, from + HALF, step, sc + n_blocks, n_blocks));
        p.act[(int64_t)t * p.I + row] = kern_bf16_encode(dev_gate(a, b, p.limit));
    }
    slot = 0;
    for (int32_t task = first; task < tasks; task += stride) {
        const struct moe_tile tile = m.tile[task / row_tasks];
        const int32_t row = task % row_tasks * HALF + g;
        const struct x_place mine =
            place_of(x, m.row[tile.first + (g < tile.n ? g : 0)], p.D, false);
        const bool nan1 = nan_row(p.w1, tile.expert, p.I, p.D, row),
                   nan3 = nan_row(p.w3, tile.expert, p.I, p.D, row);
        float acc[4] = {};
        for (int32_t it = 0; it < steps; it++) {
            ring_wait(stages - 1);
            __syncwarp();
            fp4_line(ring + slot * STAGE, mine.row + it * 512, mine.at, acc);
            __syncwarp();
            load(ring + slot * STAGE);
            if (++slot == stages) slot = 0;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int n = 2 * c + e;
            if (n >= tile.n) continue;
            const float a = fp4_total(acc[e], nan1), b = fp4_total(acc[2 + e], nan3);
            p.z[(int64_t)(tile.first + n) * p.I + row] =
                kern_bf16_encode(dev_gate(a, b, p.limit) * m.weight[tile.first + n]);
        }
    }
}

/* ------------------------------------------------------------------ down */

static __global__ void __launch_bounds__(32 * DOWN_WARPS, 1)
    down_kernel(const __grid_constant__ struct ffn_few p, int stages)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ struct pairs m;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int32_t n_blocks = p.I / FP8_K, steps = p.I / FP4_K, most = p.T * p.route.k;
    const int32_t row0 = (int32_t)blockIdx.x * DOWN_ROWS, sum_step = p.T * SUM_LD;
    const int32_t units = DOWN_TASKS * n_blocks; /* lines of the shared expert */
    uint8_t *ring = shared + warp * stages * STAGE;
    uint8_t *y =
        shared + DOWN_WARPS * stages * STAGE; /* activations: T of the shared expert, pairs */
    float *sums = (float *)(y + (p.T + most) * p.I * 2); /* [units][T][SUM_LD] */
    float *scales = sums + units * sum_step;             /* [n_blocks] */
    float *results = scales + n_blocks;                  /* [pairs][DOWN_ROWS] */
    struct reader rd;

    /* A warp's lines in order: the shared expert's, which need no choice; then those of its
     * tasks. */
    int32_t unit = warp, ahead = warp, left = 0, tasks = 0, asked = 0;
    const auto load = [&](uint8_t *to) {
        if (unit < units) {
            const uint8_t *from = p.s2.w + (row0 + unit / n_blocks * TASK_ROWS) * p.s2.row_bytes +
                                  unit % n_blocks * FP8_K;
            aim(&rd, from, from + HALF * p.s2.row_bytes, p.s2.row_bytes);
            fetch(&rd, to, false);
            unit += DOWN_WARPS;
        } else if (ahead < tasks) {
            if (left == 0) {
                const int64_t row = row0 + ahead % DOWN_TASKS * TASK_ROWS;
                const struct cuda_weight *w = &p.w2.w[m.tile[ahead / DOWN_TASKS].expert];
                const uint8_t *from = w->data + row * p.w2.row_bytes;
                aim(&rd, from, from + HALF * p.w2.row_bytes, p.w2.row_bytes);
                rd.scales = w->scale + (row + lane % TASK_ROWS) * p.w2.scale_bytes;
                left = steps;
            }
            fetch(&rd, to, true);
            if (--left == 0) ahead += DOWN_WARPS;
        }
        dev_copy_commit();
    };
    for (; asked < stages && unit < units; asked++) load(ring + asked * STAGE);
    for (int32_t i = threadIdx.x; i < n_blocks; i += 32 * DOWN_WARPS)
        scales[i] = block_scale(p.s2, row0 / BLOCK_N, i);
    sort_pairs(p, &m); /* the choice was made before the kernel before this one began */
    tasks = m.n_tiles * DOWN_TASKS;
    for (; asked < stages; asked++) load(ring + asked * STAGE);
    cuda_hurry();
    cuda_await();
    put_rows(y, p.act, p.T + m.n, p.I); /* and what lies behind: those of pairs */
    __syncthreads();
    int slot = 0;
    const struct x_place of_shared = place_of(y, g < p.T ? g : 0, p.I, true);
    for (int32_t u = warp; u < units; u += DOWN_WARPS) {
        ring_wait(stages - 1);
        __syncwarp();
        fp8_line(ring + slot * STAGE, of_shared.row + u % n_blocks * 256, of_shared.at, p.T,
                 sums + u * sum_step);
        __syncwarp();
        load(ring + slot * STAGE);
        if (++slot == stages) slot = 0;
    }
    for (int32_t task = warp; task < tasks; task += DOWN_WARPS) {
        const struct moe_tile tile = m.tile[task / DOWN_TASKS];
        const int32_t row = task % DOWN_TASKS * TASK_ROWS + g;
        const struct x_place mine =
            place_of(y, p.T + tile.first + (g < tile.n ? g : 0), p.I, false);
        bool nan[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            nan[r] = nan_row(p.w2, tile.expert, p.D, p.I, row0 + row + r * HALF);
        float acc[4] = {};
        for (int32_t it = 0; it < steps; it++) {
            ring_wait(stages - 1);
            __syncwarp();
            fp4_line(ring + slot * STAGE, mine.row + it * 512, mine.at, acc);
            __syncwarp();
            load(ring + slot * STAGE);
            if (++slot == stages) slot = 0;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int n = 2 * c + e % 2;
            if (n < tile.n)
                results[(tile.first + n) * DOWN_ROWS + row + e / 2 * HALF] =
                    fp4_total(acc[e], nan[e / 2]);
        }
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < DOWN_ROWS * p.T; i += 32 * DOWN_WARPS) {
        const int32_t r = i % DOWN_ROWS, t = i / DOWN_ROWS;
        const int64_t to = (int64_t)t * p.D + row0 + r;
        float sum = 0.0f;
        for (int32_t at = 0; at < m.n; at++)
            if (m.row[at] == t) sum += results[at * DOWN_ROWS + r];
        p.routed[to] = sum;
        const float *from = sums + r / TASK_ROWS * n_blocks * sum_step + t * SUM_LD + r % TASK_ROWS;
        dev_store(p.shared, to, KERN_BF16,
                  fp8_total(p.s2, row0 + r, from, sum_step, scales, n_blocks));
    }
}

/* ------------------------------------------------------------------ launching */

static int up_blocks(const struct kern_stream *s)
{
    return s->n_sm > 2 * GATE_BLOCKS ? s->n_sm - GATE_BLOCKS : s->n_sm;
}
static size_t up_bytes(const struct kern_stream *s, const struct ffn_few *p, int stages)
{
    const size_t sums = (size_t)shared_tasks(p->I, up_blocks(s)) * (size_t)(p->D / FP8_K) *
                        (size_t)(p->T * SUM_LD + 2) * 4;
    return (size_t)UP_WARPS * (size_t)stages * STAGE + (size_t)p->T * (size_t)p->D * 2 + sums;
}
static size_t down_bytes(const struct kern_stream *, const struct ffn_few *p, int stages)
{
    const size_t pairs = (size_t)p->T * (size_t)p->route.k, blocks = (size_t)(p->I / FP8_K);
    return (size_t)DOWN_WARPS * (size_t)stages * STAGE + (pairs + (size_t)p->T) * (size_t)p->I * 2 +
           blocks * (size_t)(DOWN_TASKS * p->T * SUM_LD + 1) * 4 + pairs * DOWN_ROWS * 4;
}

/* The most that fit. */
static int stages_of(const struct kern_stream *s, const struct ffn_few *p,
                     size_t (*bytes)(const struct kern_stream *, const struct ffn_few *, int))
{
    const size_t room = (size_t)s->max_shared - sizeof(struct pairs);
    int n = MOST_STAGES;
    while (n > 0 && bytes(s, p, n) > room) n--;
    return n;
}
static size_t alone(size_t bytes)
{
    return bytes < ALONE ? ALONE : bytes;
}

/* What a multiprocessor has is divided anew only when it is empty. */
static void prefer_shared(const struct kern_stream *s)
{
    static bool said[CUDA_MAX_DEVICES];
    if (s->number < CUDA_MAX_DEVICES && said[s->number]) return;
    cudaFuncSetAttribute(up_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                         cudaSharedmemCarveoutMaxShared);
    cudaFuncSetAttribute(down_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                         cudaSharedmemCarveoutMaxShared);
    if (s->number < CUDA_MAX_DEVICES) said[s->number] = true;
}

bool ffn_products_fit(const struct kern_stream *s, const struct ffn_few *p)
{
    return stages_of(s, p, up_bytes) >= 2 && stages_of(s, p, down_bytes) >= 2;
}

void ffn_products(struct kern_stream *s, const struct ffn_few *p)
{
    const int up = stages_of(s, p, up_bytes), down = stages_of(s, p, down_bytes);
    CUDA_SHARED(up_kernel, s->max_shared);
    CUDA_SHARED(down_kernel, s->max_shared);
    prefer_shared(s);
    cuda_launch_early(s, up_kernel, dim3((unsigned)up_blocks(s)), 32 * UP_WARPS,
                      alone(up_bytes(s, p, up)), *p, up);
    cuda_launch_early(s, down_kernel, dim3((unsigned)(p->D / DOWN_ROWS)), 32 * DOWN_WARPS,
                      alone(down_bytes(s, p, down)), *p, down);
}
