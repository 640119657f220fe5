/* kernels/hc/boundary_row.cuh - the boundary of four bf16 streams of the deployed width: what its
 * kernel of few rows and that of many do alike, so that a row has the same bits in both.
 *
 * Shares   The sixteen blocks of threads of a cluster divide a row's columns: each has 256 of every
 *          stream, and the weights of fn that belong to them. Eight neighbouring columns are a
 *          piece, four pieces a step, four steps a half.
 * Tile     Sixteen rows, one to each of sixteen warps, whose lanes have a piece each.
 * Mixes    An f32 weight is read as the sum of two bf16, which is off by 2^-18 of it at most (a
 *          third would make it exact, and take room that there is not; tf32 is off by 2^-12). The
 *          products of a step - 32 columns of four streams, 128 k - are summed by the matrix unit,
 *          those with the larger parts and with the smaller ones apart, by two warps, of which each
 *          keeps the weights of half of the mixes in registers; rows on the M side. Of each stream
 *          there are two instructions of sixteen columns in their order.
 * Squares  of the streams: each row times itself, in the same way, of which only the diagonal is
 *          of use: one of the two warps has the first eight rows, the other the rest.
 * Sums     Mixes and squares: the two parts; steps of a half, one after the other; halves; blocks,
 *          neighbours first. Squares of x: a piece, one after the other; then trees over steps,
 *          pieces of a step, halves (dev_pieces_sum), blocks, far ones first. So rmsnorm does.
 */
#ifndef KERN_HC_BOUNDARY_ROW_CUH
#define KERN_HC_BOUNDARY_ROW_CUH

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/hc/boundary.cuh"

enum {
    D = 4096,
    MIXES = (2 + STREAMS) * STREAMS,
    GATED = MIXES - STREAMS, /* post and comb */
    COMB = STREAMS * STREAMS,
    BLOCKS = 16, /* of a cluster: more than every machine must have */
    COLUMNS = D / BLOCKS,
    HALVES = 2,
    STEPS = 4,
    STEP = COLUMNS / HALVES / STEPS, /* columns */
    ALL_STEPS = HALVES * STEPS,
    SIDES = 2,        /* of the mixes */
    TILES = 3,        /* of eight sums: larger and smaller parts of a side's twelve mixes */
    SUMS = MIXES + 1, /* of a row: mixes, squares */
    ROWS = 16,        /* of a tile */
    WARPS = ROWS
};
static_assert(STEP == 4 * VEC && COLUMNS == 32 * VEC, "shares of threads and lanes");
static_assert(WARPS == SIDES * ALL_STEPS && WARPS == BLOCKS, "shares of warps");

/* The block's share of fn, as it is in memory, f32 or bf16: rows of streams. The gap: two columns
 * of four rows lie in all banks. */
struct weight_rows {
    uint8_t of[MIXES][STREAMS * COLUMNS * 4 + 32];
};
/* Of a step: products with the mixes' weights; squares. */
struct products {
    float mixes[ROWS][MIXES];
    float squares[ROWS];
};

/* The kernels; the arguments are as cuda_hc_boundary() wants them. False: not on this device. */
bool cuda_hc_boundary_few(struct kern_stream *s, const struct kern_hc_boundary *p);
bool cuda_hc_boundary_many(struct kern_stream *s, const struct kern_hc_boundary *p);

/* Lets a kernel have clusters of BLOCKS; how many the device holds at a time, 0 where it has none.
 * known, most: what was found, asked for once on each device. */
struct cuda_clusters {
    bool known;
    int most;
};
int cuda_hc_clusters(struct kern_stream *s, const void *kernel, unsigned threads, size_t shared,
                     struct cuda_clusters *found);
/* May begin before the kernel before it has ended, see cuda_launch_early(). */
template <typename... P, typename... A>
static inline void cuda_hc_launch(struct kern_stream *s, void (*kernel)(P...), unsigned clusters,
                                  unsigned threads, size_t shared, const A &...args)
{
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = BLOCKS;
    attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(BLOCKS * clusters);
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared;
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = cuda_early_launches ? 2 : 1;
    cudaLaunchKernelEx(&c, kernel, P(args)...);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Two columns of four streams, one word each. post [k], comb [j][k]: the row's gates. */
static __device__ __forceinline__ void expand2(const float4 &post, const float4 comb[STREAMS],
                                               uint32_t y, uint32_t v[STREAMS])
{
    const float y0 = __uint_as_float(y << 16), y1 = __uint_as_float(y & 0xffff0000u);
    const float p[STREAMS] = {post.x, post.y, post.z, post.w};
    float f[STREAMS][2];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        f[j][0] = __uint_as_float(v[j] << 16);
        f[j][1] = __uint_as_float(v[j] & 0xffff0000u);
    }
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        float s0 = p[k] * y0, s1 = p[k] * y1;
#pragma unroll
        for (int j = 0; j < STREAMS; j++) {
            const float c[STREAMS] = {comb[j].x, comb[j].y, comb[j].z, comb[j].w};
            s0 = fmaf(c[k], f[j][0], s0), s1 = fmaf(c[k], f[j][1], s1);
        }
        v[k] = word_of(s0, s1);
    }
}
/* A piece of four streams. */
static __device__ __forceinline__ void expand8(const float4 &post, const float4 comb[STREAMS],
                                               const uint4 &y, uint4 h[STREAMS])
{
    uint32_t v[4][STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
        v[0][j] = h[j].x, v[1][j] = h[j].y, v[2][j] = h[j].z, v[3][j] = h[j].w;
    expand2(post, comb, y.x, v[0]);
    expand2(post, comb, y.y, v[1]);
    expand2(post, comb, y.z, v[2]);
    expand2(post, comb, y.w, v[3]);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) h[j] = make_uint4(v[0][j], v[1][j], v[2][j], v[3][j]);
}
/* Four columns of y and the routed sum. */
static __device__ __forceinline__ uint2 add_routed(uint2 y, const float4 &sum)
{
    return make_uint2(
        word_of(sum.x + __uint_as_float(y.x << 16), sum.y + __uint_as_float(y.x & 0xffff0000u)),
        word_of(sum.z + __uint_as_float(y.y << 16), sum.w + __uint_as_float(y.y & 0xffff0000u)));
}
/* A piece of x with its weights of the norm. */
static __device__ __forceinline__ uint4 norm8(uint4 x, const float4 &a, const float4 &b, float rs)
{
    const float w[VEC] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    float f[VEC];
    dev_unpack8(x, f);
#pragma unroll
    for (int e = 0; e < VEC; e++) f[e] = w[e] * (f[e] * rs);
    return dev_pack8(f);
}

/* ------------------------------------------------------------------ mixes */

/* By the first threads, each a row's share of a stream; in[j] counts stream j. */
static __device__ __forceinline__ void fetch_weights(const struct kern_weight &fn, int rank,
                                                     struct weight_rows *to, uint64_t in[STREAMS])
{
    const int size = COLUMNS * (fn.fmt == KERN_W_F32 ? 4 : 2);
    const int n = threadIdx.x % MIXES, j = threadIdx.x / MIXES;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int k = 0; k < STREAMS; k++) bar_expect(&in[k], fn.n * size);
    }
    if (j < STREAMS && n < fn.n)
        bulk_load(to->of[n] + j * size,
                  (const uint8_t *)fn.data + n * fn.row_bytes + (int64_t)(j * BLOCKS + rank) * size,
                  size, &in[j]);
}

/* Weights of a step for one side of the mixes, as second operands: of stream j, instruction i.
 * Tiles: larger parts of eight mixes; their smaller parts; both of four mixes. */
struct weights {
    uint32_t w[STREAMS][2][TILES][2];
};
static __device__ __forceinline__ int eight_of(int side) /* the first of eight mixes */
{
    return side ? 16 : 0;
}
static __device__ __forceinline__ int four_of(int side)
{
    return 8 + 4 * side;
}
template <bool F32>
static __device__ __forceinline__ float2 weights_at(const struct weight_rows *from, int32_t rows,
                                                    int row, int at)
{
    const uint8_t *const of = from->of[row];
    const uint32_t pair = F32 ? 0 : *(const uint32_t *)(of + 2 * at);
    const float2 u =
        F32 ? *(const float2 *)(of + 4 * at)
            : make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    return row < rows ? u : make_float2(0.0f, 0.0f);
}
template <bool F32>
static __device__ __forceinline__ void split_weights(const struct weight_rows *from, int32_t rows,
                                                     int step, int side, int lane,
                                                     uint64_t in[STREAMS], struct weights *to)
{
    const int g = lane / 4, column = step * STEP + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        bar_wait(&in[j], 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = j * COLUMNS + column + 8 * i;
            float2 u = weights_at<F32>(from, rows, eight_of(side) + g, at);
            to->w[j][i / 2][0][i % 2] = split2(&u.x, &u.y);
            to->w[j][i / 2][1][i % 2] = split2(&u.x, &u.y);
            u = weights_at<F32>(from, rows, four_of(side) + g % 4, at);
            const uint32_t larger = split2(&u.x, &u.y);
            to->w[j][i / 2][2][i % 2] = g < 4 ? larger : split2(&u.x, &u.y);
        }
    }
}
/* The warp's. */
static __device__ __forceinline__ void split_weights(const struct kern_weight &fn,
                                                     const struct weight_rows *from, int warp,
                                                     int lane, uint64_t in[STREAMS],
                                                     struct weights *to)
{
    if (fn.fmt == KERN_W_F32)
        split_weights<true>(from, fn.n, warp / SIDES, warp % SIDES, lane, in, to);
    else
        split_weights<false>(from, fn.n, warp / SIDES, warp % SIDES, lane, in, to);
}

/* The products of a warp, to those of its step. row(j, piece): where the lane's row, lane % 16, has
 * its `piece`-th eight columns of the step in stream j. */
template <typename R>
static __device__ __forceinline__ void multiply(const struct weights &w, int side, int lane,
                                                const R &row, struct products *to)
{
    const int g = lane / 4, c = lane % 4;
    float acc[TILES][4], own[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
#pragma unroll
    for (int from = 0; from < STREAMS; from += 2) { /* so many wait for memory together */
        uint32_t a[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) dev_ldmatrix4(a[k], row(from + k / 2, k % 2 * 2 + lane / 16));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t b[2] = {side ? a[k][1] : a[k][0], side ? a[k][3] : a[k][2]};
#pragma unroll
            for (int n = 0; n < TILES; n++) dev_mma(acc[n], a[k], w.w[from + k / 2][k % 2][n]);
            dev_mma(own, a[k], b);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        *(float2 *)&to->mixes[g + 8 * r][eight_of(side) + 2 * c] =
            make_float2(acc[0][2 * r] + acc[1][2 * r], acc[0][2 * r + 1] + acc[1][2 * r + 1]);
    /* Of the four mixes two lanes have one part each: one adds up row g, the other g + 8. */
    const int r = c / 2;
    const float *const four = acc[2];
    float2 sum = make_float2(r ? four[2] : four[0], r ? four[3] : four[1]);
    sum.x += __shfl_xor_sync(0xffffffffu, r ? four[0] : four[2], 2);
    sum.y += __shfl_xor_sync(0xffffffffu, r ? four[1] : four[3], 2);
    *(float2 *)&to->mixes[g + 8 * r][four_of(side) + c % 2 * 2] = sum;
    const float even = side ? own[2] : own[0], odd = side ? own[3] : own[1];
    if (c == g / 2) to->squares[g + 8 * side] = g % 2 ? odd : even;
}
/* The sum over blocks of what they sent, 16-byte aligned: neighbours first, or far ones. */
static __device__ __forceinline__ float sum_of_blocks(const float v[BLOCKS])
{
    float sum[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float4 q = ((const float4 *)v)[k];
        sum[k] = (q.x + q.y) + (q.z + q.w);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
static __device__ __forceinline__ float sum_of_far_blocks(const float v[BLOCKS])
{
    const float4 *const q = (const float4 *)v, a = q[0], b = q[1], c = q[2], d = q[3];
    return (((a.x + c.x) + (b.x + d.x)) + ((a.z + c.z) + (b.z + d.z))) +
           (((a.y + c.y) + (b.y + d.y)) + ((a.w + c.w) + (b.w + d.w)));
}

static __device__ __forceinline__ float inverse_rms(float squares, int n, float eps)
{
    return 1.0f / sqrtf(squares / (float)n + eps);
}
static __device__ __forceinline__ float pre_of(float mix, float rs, float scale, float base,
                                               float eps)
{
    return dev_sigmoid(fmaf(mix * rs, scale, base)) + eps;
}

/* What the mixes of a row say about post and comb, as far as lanes can work side by side; by one
 * warp. Lane 4 j + k returns comb[j][k] after the softmax and the first division of columns, lane
 * 16 + k post[k]; mix: the sum of the lane's. */
static __device__ __forceinline__ int gated_of(int lane)
{
    return lane < COMB ? STREAMS + lane : lane % STREAMS;
}
static __device__ __forceinline__ float begin_gates(const struct kern_hc_boundary &p, float mix,
                                                    float rs, float scale, float base, int lane)
{
    const float x = fmaf(mix * rs, scale, base);
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
    return c;
}
/* 1 / x by the machine's own instruction, within an ulp: sums of comb are neither huge nor tiny. */
static __device__ __forceinline__ float inverse(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
/* What sinkhorn_rounds() does, as what rows and columns have been divided by so far: a round is a
 * chain of latencies, and so it has fewer links, for (s / d + eps) d is s + eps d. */
struct balance {
    float row[STREAMS], column[STREAMS], factor[STREAMS]; /* of columns: 1 / column */
};
static __device__ __forceinline__ void factors_of(struct balance *b)
{
#pragma unroll
    for (int k = 0; k < STREAMS; k++) b->factor[k] = inverse(b->column[k]);
}
static __device__ __forceinline__ void begin_balance(struct balance *b)
{
#pragma unroll
    for (int k = 0; k < STREAMS; k++) b->row[k] = b->column[k] = b->factor[k] = 1.0f;
}
/* False: this was the last, for by it the columns' sums changed by no more than 2^-20 together, and
 * by those after it would change less. C: an array, or a pointer to volatile where registers are
 * too few for it. */
template <typename C>
static __device__ __forceinline__ bool balance_round(const C &c, struct balance *b, float eps)
{
    float f[STREAMS], change[STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        const int k = STREAMS * j;
        b->row[j] = fmaf(c[k + 1], b->factor[1], fmaf(c[k], b->factor[0], eps * b->row[j])) +
                    fmaf(c[k + 3], b->factor[3], c[k + 2] * b->factor[2]);
    }
#pragma unroll
    for (int j = 0; j < STREAMS; j++) f[j] = inverse(b->row[j]);
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        b->column[k] = fmaf(c[4 + k], f[1], fmaf(c[k], f[0], eps * b->column[k])) +
                       fmaf(c[12 + k], f[3], c[8 + k] * f[2]);
        change[k] = fabsf(fmaf(b->factor[k], b->column[k], -1.0f));
    }
    factors_of(b);
    return !((change[0] + change[1]) + (change[2] + change[3]) <= 0x1p-20f); /* no NaN is */
}
/* comb and post of row t; kept: what the lanes had, of which c is comb. */
template <typename C>
static __device__ __forceinline__ void store_gates(const struct kern_hc_boundary &p,
                                                   const float *kept, const C &c,
                                                   const struct balance &b, int64_t t)
{
    const float *const f = b.factor;
    *(float4 *)(p.post + t * STREAMS) =
        make_float4(kept[COMB], kept[COMB + 1], kept[COMB + 2], kept[COMB + 3]);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        const int k = STREAMS * j;
        const float g = inverse(b.row[j]);
        *(float4 *)(p.comb + t * COMB + k) = make_float4(
            c[k] * (g * f[0]), c[k + 1] * (g * f[1]), c[k + 2] * (g * f[2]), c[k + 3] * (g * f[3]));
    }
}
/* The rest of it for row t, by one thread. */
static __device__ __forceinline__ void finish_gates(const struct kern_hc_boundary &p,
                                                    const float *kept, int64_t t)
{
    float c[COMB];
    struct balance b;
#pragma unroll
    for (int k = 0; k < COMB; k++) c[k] = kept[k];
    begin_balance(&b);
#pragma unroll 1
    for (int32_t it = 1; it < p.iters && balance_round(c, &b, p.hc_eps); it++)
        ;
    store_gates(p, kept, c, b, t);
}

#endif /* sm_90a */
#endif
