/* kernels/attn/index_score_cuda.cu - scores of index entries, keys against the heads of a row on
 * the matrix unit.
 *
 * For devices and shapes that index_score_wgmma_cuda.cu is not for. Blocks are of four rows in
 * prefill, of one in decode, tiles of 128 entries. A tile: codes are widened to bf16 in shared
 * memory, keys stand on the M side and heads on the N side; so a thread has sixteen of 64 heads of
 * a key, adds up their weighted positive parts, and two shuffles finish the key. In prefill a warp
 * keeps 32 keys in registers while rows pass by; in decode it keeps half of the row's heads while
 * keys pass by, two warps' halves are added, and the next tile's codes are on their way meanwhile.
 * A key's scale (fp8) multiplies the finished sum.
 *
 * The order of a score's sum depends on the width and the number of heads alone: each half of the
 * heads by threads of a quad, ascending in a thread, then the quad, then the halves.
 * Bound: decode by reading keys (68 or 132 bytes an entry), prefill by the matrix unit.
 */
#include "kernels/attn/index_score.cuh"
#include "kernels/attn/widen.cuh"
#include "kernels/cuda/mma.cuh"

enum { TILE = 128, THREADS = 256, MAX_HEADS = 64, PLAIN_WARPS = 8 };

/* 16-byte pieces of a row of w bf16: as they lie in shared memory so that eight rows' pieces of one
 * column meet different banks. */
template <int KS> struct rows_of {
    static constexpr int CH = 2 * KS, LD = CH % 8 == 0 ? CH : CH | 1;
    static __device__ __forceinline__ int at(int row, int piece)
    {
        return CH % 8 == 0 ? row * LD + (piece ^ (row & 7)) : row * LD + piece;
    }
};

/* Codes of a tile on their way: pieces of 16 bytes, thread by thread. */
template <int KS, int FMT> struct codes {
    static constexpr int W = 16 * KS;
    static constexpr int ROW = FMT == KERN_IK_FP4 ? W / 2 : FMT == KERN_IK_FP8 ? W : 2 * W;
    static constexpr int PER = ROW / 16, N = (TILE * PER + THREADS - 1) / THREADS;
    uint4 raw[N];
    uint8_t exponent[FMT == KERN_IK_FP4 ? N : 1]; /* one scale for the 32 codes of a piece */
    float scale;                                  /* fp8: of key threadIdx.x */

    __device__ __forceinline__ void load(const struct index_score &p, const struct cuda_seq &q,
                                         int32_t e0, int32_t seen)
    {
        const int32_t per_page = p.kv.y.per_page;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int c = threadIdx.x + i * THREADS, key = c / PER, piece = c % PER;
            raw[i] = make_uint4(0, 0, 0, 0);
            if (FMT == KERN_IK_FP4) exponent[i] = 0;
            if ((TILE * PER) % THREADS != 0 && key >= TILE) continue;
            const int32_t e = e0 + key;
            if (e >= seen) continue;
            const uint8_t *part = part_of(p, q, e / per_page);
            const int32_t row = e % per_page;
            raw[i] = __ldg((const uint4 *)(part + (int64_t)row * ROW + piece * 16));
            if (FMT == KERN_IK_FP4) exponent[i] = part[per_page * ROW + row * PER + piece];
        }
        if (FMT == KERN_IK_FP8) {
            const int32_t e = e0 + (int32_t)threadIdx.x;
            scale = 0.0f;
            if (threadIdx.x < TILE && e < seen)
                scale = ((const float *)(part_of(p, q, e / per_page) +
                                         (int64_t)per_page * ROW))[e % per_page];
        }
    }
    static __device__ __forceinline__ const uint8_t *part_of(const struct index_score &p,
                                                             const struct cuda_seq &q, int32_t page)
    {
        const int64_t id = q.page_ids[(int64_t)page * q.page_step + p.companion];
        return p.kv.pages + id * p.kv.page_bytes + p.key_off;
    }
    __device__ __forceinline__ void store(uint4 *keys, float *scales) const
    {
        using at = rows_of<KS>;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int c = threadIdx.x + i * THREADS, key = c / PER, piece = c % PER;
            if ((TILE * PER) % THREADS != 0 && key >= TILE) continue;
            if (FMT == KERN_IK_FP4) {
                const uint32_t s = dev_ue8m0_bf16x2(exponent[i]);
                keys[at::at(key, piece * 4)] = dev_e2m1x8_bf16(raw[i].x, s);
                keys[at::at(key, piece * 4 + 1)] = dev_e2m1x8_bf16(raw[i].y, s);
                keys[at::at(key, piece * 4 + 2)] = dev_e2m1x8_bf16(raw[i].z, s);
                keys[at::at(key, piece * 4 + 3)] = dev_e2m1x8_bf16(raw[i].w, s);
            } else if (FMT == KERN_IK_FP8) {
                uint4 lo, hi;
                dev_e4m3x16_bf16(raw[i], &lo, &hi);
                keys[at::at(key, piece * 2)] = lo;
                keys[at::at(key, piece * 2 + 1)] = hi;
            } else {
                keys[at::at(key, piece)] = raw[i];
            }
        }
        if (FMT == KERN_IK_FP8 && threadIdx.x < TILE) scales[threadIdx.x] = kern_f32_scale(scale);
    }
};

/* Queries of n rows from t on, and their weights; heads past H are zeros. */
template <int KS>
static __device__ __forceinline__ void load_queries(const struct index_score &p, int32_t t,
                                                    int32_t n, int32_t heads, uint4 *q, float *wt)
{
    using at = rows_of<KS>;
    for (int i = threadIdx.x; i < n * heads * at::CH; i += THREADS) {
        const int piece = i % at::CH, h = i / at::CH % heads, r = i / at::CH / heads;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (h < p.H) x = __ldg((const uint4 *)p.q + ((int64_t)(t + r) * p.H + h) * at::CH + piece);
        q[at::at(r * heads + h, piece)] = x;
    }
    for (int i = threadIdx.x; i < n * heads; i += THREADS) {
        const int h = i % heads, r = i / heads;
        wt[i] = h < p.H ? dev_load(p.wt, (int64_t)(t + r) * p.H + h, p.act) * p.factor : 0.0f;
    }
}

/* Adds a thread's part of eight heads, for 16 keys: those of lane / 4 and 8 behind. */
static __device__ __forceinline__ void add_heads(float (&sum)[2], const float2 &w,
                                                 const float (&acc)[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] = fmaf(w.x, dev_positive(acc[2 * i]), sum[i]);
        sum[i] = fmaf(w.y, dev_positive(acc[2 * i + 1]), sum[i]);
    }
}
static __device__ __forceinline__ float quad_sum(float v)
{
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

/* A tile against one of the block's rows: a warp has 32 keys in registers, and all heads
 * in turn. */
template <int KS>
static __device__ __forceinline__ void score_row(const uint4 *q, const float *wt, int32_t heads,
                                                 const uint32_t (&a)[2][KS][4], float (&out)[2][2])
{
    using at = rows_of<KS>;
    const int lane = threadIdx.x % 32;
    float sum[2][2] = {}, lower[2][2] = {};
    for (int h = 0; h < heads; h += 16) {
        float acc[2][2][4] = {};
        const int row = h + lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < KS; k++) {
            uint32_t x[4];
            dev_ldmatrix4(x, &q[at::at(row, 2 * k + lane / 8 % 2)]);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                dev_mma(acc[m][0], a[m][k], x);
                dev_mma(acc[m][1], a[m][k], x + 2);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const bool middle = h + n * 8 == heads / 2;
            const float2 w = *(const float2 *)&wt[h + n * 8 + lane % 4 * 2];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (middle) {
                        lower[m][i] = sum[m][i];
                        sum[m][i] = 0.0f;
                    }
                add_heads(sum[m], w, acc[m][n]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) out[m][i] = quad_sum(lower[m][i]) + quad_sum(sum[m][i]);
}

/* The only row of a block: a warp has half of its heads in registers, and takes 32 keys. */
template <int KS> struct half_row {
    static constexpr int NT = MAX_HEADS / 16;
    uint32_t x[NT][KS][2];
    float2 w[NT];
    int32_t n; /* eights of heads */

    __device__ __forceinline__ void load(const uint4 *q, const float *wt, int32_t heads, int half)
    {
        using at = rows_of<KS>;
        const int lane = threadIdx.x % 32;
        n = heads / 16;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            if (i >= n) break;
            const int h = half * (heads / 2) + i * 8;
            w[i] = *(const float2 *)&wt[h + lane % 4 * 2];
#pragma unroll
            for (int k = 0; k < KS; k += 2) {
                uint32_t r[4];
                dev_ldmatrix4(r, &q[at::at(h + lane % 8, 2 * k + lane / 8)]);
                x[i][k][0] = r[0], x[i][k][1] = r[1];
                x[i][k + 1][0] = r[2], x[i][k + 1][1] = r[3];
            }
        }
    }
    __device__ __forceinline__ void score(const uint4 *keys, int key0, float (&out)[2][2]) const
    {
        using at = rows_of<KS>;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float acc[NT][4] = {}, sum[2] = {};
#pragma unroll
            for (int k = 0; k < KS; k++) {
                uint32_t a[4];
                dev_ldmatrix4(a, &keys[at::at(key0 + m * 16 + lane % 16, 2 * k + lane / 16)]);
#pragma unroll
                for (int i = 0; i < NT; i++)
                    if (i < n) dev_mma(acc[i], a, x[i][k]);
            }
#pragma unroll
            for (int i = 0; i < NT; i++)
                if (i < n) add_heads(sum, w[i], acc[i]);
            out[m][0] = quad_sum(sum[0]);
            out[m][1] = quad_sum(sum[1]);
        }
    }
};

template <int KS, int FMT, int R>
static __global__ void __launch_bounds__(THREADS, 2)
    score_kernel(const __grid_constant__ struct index_score p, int32_t heads)
{
    using at = rows_of<KS>;
    constexpr bool AHEAD = R == 1 && FMT != KERN_IK_BF16; /* else no registers for the next tile */
    extern __shared__ uint4 shared[];
    uint4 *keys = shared, *q = keys + TILE * at::LD;
    float *wt = (float *)(q + R * heads * at::LD), *scales = wt + R * heads, *upper = scales + TILE;
    const int lane = threadIdx.x % 32, key0 = threadIdx.x / 32 % 4 * 32, half = threadIdx.x / 128;

    const struct share sh = find_share<TILE, THREADS>(p, R);
    int32_t left = sh.tiles, skip = sh.tile;
    for (int32_t b = sh.block; left > 0; b++) {
        const int32_t end = block_end(p, b, R);
        for (int32_t t = p.row0 + b * R; t < end && left > 0;) {
            const struct segment g = segment_at<TILE>(p, t, end);
            if (skip >= g.tiles) {
                skip -= g.tiles;
                t += g.n;
                continue;
            }
            const int32_t first = skip;
            const int32_t stop = g.tiles - first < left ? g.tiles : first + left;
            left -= stop - first;
            skip = 0;
            struct codes<KS, FMT> c;
            struct half_row<KS> own; /* R == 1 */
            if (AHEAD) c.load(p, g.q, first * TILE, g.seen);
            load_queries<KS>(p, t, g.n, heads, q, wt);
            for (int32_t tile = first; tile < stop; tile++) {
                if (!AHEAD) c.load(p, g.q, tile * TILE, g.seen);
                c.store(keys, scales);
                __syncthreads();
                if (AHEAD && tile + 1 < stop) c.load(p, g.q, (tile + 1) * TILE, g.seen);
                const int mine = key0 + lane / 4; /* and 8, 16, 24 behind */
                float v[2][2];
                if constexpr (R == 1) {
                    if (tile == first) own.load(q, wt, heads, half);
                    own.score(keys, key0, v);
                    if (half == 1 && lane % 4 == 0)
#pragma unroll
                        for (int i = 0; i < 4; i++) upper[mine + i * 8] = v[i / 2][i % 2];
                    float scale[4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        scale[i] = FMT == KERN_IK_FP8 ? scales[mine + i * 8] : 1.0f;
                    __syncthreads();
                    float *out = p.out + (int64_t)(t - p.row0) * p.ld + tile * TILE;
                    if (half == 0 && lane % 4 == 0)
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const int key = mine + i * 8;
                            const float sum = v[i / 2][i % 2] + upper[key];
                            if (tile * TILE + key < g.seen)
                                out[key] = FMT == KERN_IK_FP8 ? sum * scale[i] : sum;
                        }
                } else {
                    uint32_t a[2][KS][4];
#pragma unroll
                    for (int m = 0; m < 2; m++)
#pragma unroll
                        for (int k = 0; k < KS; k++)
                            dev_ldmatrix4(
                                a[m][k],
                                &keys[at::at(key0 + m * 16 + lane % 16, 2 * k + lane / 16)]);
                    for (int r = half * (R / 2); r < (half + 1) * (R / 2) && r < g.n; r++) {
                        score_row<KS>(q + r * heads * at::LD, wt + r * heads, heads, a, v);
                        const int32_t seen = dev_visible(p.kv, g.q, t + r);
                        float *out = p.out + (int64_t)(t + r - p.row0) * p.ld + tile * TILE;
                        if (lane % 4 == 0)
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                const int key = mine + i * 8;
                                const float sum = v[i / 2][i % 2];
                                if (tile * TILE + key < seen)
                                    out[key] = FMT == KERN_IK_FP8 ? sum * scales[key] : sum;
                            }
                    }
                    __syncthreads();
                }
            }
            t += g.n;
        }
    }
}

/* Any types and widths, in f32: a warp has a key in registers and takes the heads in turn. */
static __global__ void __launch_bounds__(32 * PLAIN_WARPS)
    plain_kernel(const __grid_constant__ struct index_score p)
{
    constexpr int PER_LANE = 32; /* widths to 1024 */
    const int32_t t = p.row0 + blockIdx.x, i = p.b.row_seq[t];
    if (i < 0) return;
    const struct cuda_seq q = p.b.seqs[i];
    const int32_t seen = dev_visible(p.kv, q, t), w = p.kv.w;
    if (!p.all && seen <= q.topk) return;
    const int lane = threadIdx.x % 32;
    for (int32_t e = blockIdx.y * PLAIN_WARPS + threadIdx.x / 32; e < seen;
         e += gridDim.y * PLAIN_WARPS) {
        const int64_t page = q.page_ids[(int64_t)(e / p.kv.y.per_page) * q.page_step + p.companion];
        const uint8_t *part = p.kv.pages + page * p.kv.page_bytes + p.key_off;
        float key[PER_LANE], sum = 0.0f;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            key[k] = lane + 32 * k < w ? dev_ik_at(p.fmt, w, part, p.kv.y.per_page,
                                                   e % p.kv.y.per_page, lane + 32 * k)
                                       : 0.0f;
        for (int32_t h = 0; h < p.H; h++) {
            const int64_t at = ((int64_t)t * p.H + h) * w + lane;
            float dot = 0.0f;
#pragma unroll
            for (int k = 0; k < PER_LANE; k++)
                if (lane + 32 * k < w) dot = fmaf(dev_load(p.q, at + 32 * k, p.act), key[k], dot);
            sum = fmaf(dev_load(p.wt, (int64_t)t * p.H + h, p.act) * p.factor,
                       dev_positive(dev_warp_sum(dot)), sum);
        }
        if (lane == 0) p.out[(int64_t)(t - p.row0) * p.ld + e] = sum;
    }
}

/* The best of each run, from scores that were made by a kernel that does not tell, and what stands
 * behind a row's last. */
static __global__ void best_kernel(const __grid_constant__ struct index_score p)
{
    const int32_t t = p.row0 + blockIdx.x, i = p.b.row_seq[t];
    if (i < 0) return;
    const struct cuda_seq q = p.b.seqs[i];
    const int32_t seen = dev_visible(p.kv, q, t);
    if (!p.all && seen <= q.topk) return;
    float *s = p.out + (int64_t)blockIdx.x * p.ld;
    float *best = p.best + (int64_t)blockIdx.x * (p.ld / INDEX_RUN);
    const int32_t n_runs = (seen + INDEX_PAD - 1) / INDEX_PAD * (INDEX_PAD / INDEX_RUN);
    const float none = kern_float(0x7fc00000u);
    for (int32_t run = blockIdx.y * blockDim.x + threadIdx.x; run < n_runs;
         run += gridDim.y * blockDim.x) {
        float m = none;
        for (int32_t e = run * INDEX_RUN; e < (run + 1) * INDEX_RUN; e++)
            if (e < seen)
                m = fmaxf(m, s[e]); /* passes over NaN */
            else
                s[e] = none;
        best[run] = m;
    }
}

template <int KS, int R> static constexpr size_t shared_bytes(int32_t heads)
{
    return (size_t)(TILE + R * heads) * rows_of<KS>::LD * 16 +
           (size_t)(R * heads + (R == 1 ? 2 : 1) * TILE) * sizeof(float);
}
template <int KS, int FMT, int R>
static void launch(struct kern_stream *s, const struct index_score *p)
{
    const int32_t heads = (int32_t)cuda_ceil(p->H, 16) * 16;
    const size_t bytes = shared_bytes<KS, R>(heads);
    static_assert(shared_bytes<KS, R>(MAX_HEADS) <= 99 * 1024 - 512, "shared memory of sm_120");
    CUDA_SHARED((score_kernel<KS, FMT, R>), (shared_bytes<KS, R>(MAX_HEADS)));
    score_kernel<KS, FMT, R><<<(unsigned)(2 * s->n_sm), THREADS, bytes, s->cu>>>(*p, heads);
}
template <int KS, int FMT>
static void launch_rows(struct kern_stream *s, const struct index_score *p)
{
    /* Rows of one sequence share its keys; where most have a sequence to themselves, one at
     * a time. */
    if (p->n_rows > 2 * p->b.n_seqs)
        launch<KS, FMT, 4>(s, p);
    else
        launch<KS, FMT, 1>(s, p);
}
template <int KS> static void launch_fmt(struct kern_stream *s, const struct index_score *p)
{
    if (p->fmt == KERN_IK_FP4) launch_rows<KS, KERN_IK_FP4>(s, p);
    if (p->fmt == KERN_IK_FP8) launch_rows<KS, KERN_IK_FP8>(s, p);
    if (p->fmt == KERN_IK_BF16) launch_rows<KS, KERN_IK_BF16>(s, p);
}

static void launch_plain(struct kern_stream *s, const struct index_score *p)
{
    const int64_t each = cuda_ceil(16 * s->n_sm, p->n_rows);
    plain_kernel<<<dim3((unsigned)p->n_rows, (unsigned)(each < 256 ? each : 256)), 32 * PLAIN_WARPS,
                   0, s->cu>>>(*p);
}

void index_score_launch(struct kern_stream *s, const struct index_score *p)
{
    const bool matrix = p->act == KERN_BF16 && p->fmt != KERN_IK_F32 && p->H <= MAX_HEADS;
    if (p->n_rows == 0 || index_score_wgmma(s, p)) return;
    switch (matrix ? p->kv.w : 0) {
    case 32: launch_fmt<2>(s, p); break;
    case 64: launch_fmt<4>(s, p); break;
    case 96: launch_fmt<6>(s, p); break;
    case 128: launch_fmt<8>(s, p); break;
    default: launch_plain(s, p); break;
    }
    if (p->best) best_kernel<<<dim3((unsigned)p->n_rows, 16), 256, 0, s->cu>>>(*p);
}
