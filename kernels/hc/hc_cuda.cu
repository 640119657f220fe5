/* kernels/hc/hc_cuda.cu - hyper-connections: collapse the streams to one row, spread a result over
 * them.
 *
 * The mixes are a product of [T, K] streams (K = hc * D) with a few rows of fn, kept in f32. It
 * runs on the matrix unit, exact in its products: an f32 weight is the sum of three bf16. A warp
 * takes a chunk of 128 of K for a tile of rows, straight from memory to registers: within 32
 * consecutive k a thread holds eight neighbours, of h one 16-byte load, of fn two, which serve two
 * MMA steps (the order of k inside a chunk is that of no tensor, only the same on both sides).
 * Eight chunks are a slice.
 *
 *     mix      part[t][slot][n]: sums over a slice by a block (many rows; two warps with the same
 *              fn and 64 rows each, so that the second finds fn in the first-level cache), or over
 *              a chunk by a lone warp (few rows: then 128 warps stream fn at once)
 *     finish   a block a row: adds up the slots - chunks of a slice by one tree, then slices in
 *              order, so both kinds of mix give the same bits - and the squares of the streams,
 *              which it has loaded meanwhile; from these makes pre, post and comb, and x
 *
 * Holding the streams of a row in shared memory between the two was rejected: fn comes from L2 for
 * every block, and only a tile of many rows (32 KiB of streams each) makes that less than reading h
 * again. Other shapes and f32 streams take a plain kernel, a block a row. Four bf16 streams of the
 * deployed width are collapsed by boundary_cuda.cu where the device has clusters of sixteen.
 */
#include "kernels/cuda/mma.cuh"
#include "kernels/hc/boundary.cuh"

enum {
    CHUNK = 128,             /* of K: one sum of the matrix unit */
    STEPS = CHUNK / 32,      /* of 32 k each */
    SLICE = 8,               /* chunks */
    SLICE_K = CHUNK * SLICE, /* K must be a multiple */
    FEW_ROWS = 128,          /* up to here a chunk is a slot */
    MAX_TILES_N = 3,         /* of 8 columns: 24 mixes of four streams */
    FINISH_THREADS = 256
};

/* ------------------------------------------------------------------ mixes on the matrix unit */

struct mix {
    const uint16_t *h; /* [T, K] */
    const uint8_t *fn; /* rows fn_row bytes apart */
    float *part;       /* [T, slots, 8 * tiles of columns] */
    int32_t fn_row, T, K, N;
};

/* Adds the products of 32 consecutive k: a of the rows, w of fn, which it uses up. */
template <int MT, int NT, bool F32>
static __device__ __forceinline__ void step_sums(const uint4 a[MT][2], float w[NT][VEC],
                                                 float acc[MT][NT][4])
{
#pragma unroll
    for (int part = 0; part < (F32 ? 3 : 1); part++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t y[2] = {split2(&w[n][4 * i], &w[n][4 * i + 1]),
                                       split2(&w[n][4 * i + 2], &w[n][4 * i + 3])};
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const uint32_t x[4] = {i ? a[m][0].z : a[m][0].x, i ? a[m][1].z : a[m][1].x,
                                           i ? a[m][0].w : a[m][0].y, i ? a[m][1].w : a[m][1].y};
                    dev_mma(acc[m][n], x, y);
                }
            }
}

/* What a thread reads of a chunk. Offsets of 32 bits from two pointers: registers are scarce here.
 * Rows behind the last one are read as the last and never stored. */
template <int MT, int NT, bool F32> struct reader {
    const uint8_t *h, *fn;
    uint32_t row[MT][2], column[NT];
    bool there[NT]; /* the row of fn exists */
};
template <int MT, int NT, bool F32>
static __device__ __forceinline__ struct reader<MT, NT, F32> reader_of(const struct mix &p,
                                                                       int32_t t0, int32_t k0) {
    const int lane = threadIdx.x & 31, g = lane / 4, quad = lane % 4;
    struct reader<MT, NT, F32> r;
    r.h = (const uint8_t *)(p.h + (int64_t)t0 * p.K + k0 + VEC * quad);
    r.fn = p.fn + (int64_t)(k0 + VEC * quad) * (F32 ? 4 : 2);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            r.row[m][i] = (uint32_t)min(16 * m + 8 * i + g, p.T - 1 - t0) * 2 * (uint32_t)p.K;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        r.there[n] = 8 * n + g < p.N;
        r.column[n] = r.there[n] ? (uint32_t)(8 * n + g) * (uint32_t)p.fn_row : 0;
    }
    return r;
}
/* Step b's bytes of fn, row 8 n + lane / 4. */
template <int MT, int NT, bool F32>
static __device__ __forceinline__ const uint8_t *fn_at(const struct reader<MT, NT, F32> &r, int n,
                                                       int b)
{
    return r.fn + r.column[n] + 32 * b * (F32 ? 4 : 2);
}

/* 32 bytes of f32 or 16 of bf16. */
template <bool F32>
static __device__ __forceinline__ void widen_fn(const uint4 v[F32 ? 2 : 1], float f[VEC])
{
    if (F32) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            f[4 * i] = __uint_as_float(v[F32 ? i : 0].x);
            f[4 * i + 1] = __uint_as_float(v[F32 ? i : 0].y);
            f[4 * i + 2] = __uint_as_float(v[F32 ? i : 0].z);
            f[4 * i + 3] = __uint_as_float(v[F32 ? i : 0].w);
        }
    } else {
        dev_unpack8(v[0], f);
    }
}

/* The chunk that begins at k0 for MT tiles of 16 rows from row t0 on, added to acc, a step at a
 * time. */
template <int MT, int NT, bool F32>
static __device__ __forceinline__ void chunk_sums(const struct mix &p, int32_t t0, int32_t k0,
                                                  float acc[MT][NT][4])
{
    const struct reader<MT, NT, F32> r = reader_of<MT, NT, F32>(p, t0, k0);
#pragma unroll 1
    for (int b = 0; b < STEPS; b++) {
        uint4 a[MT][2], v[NT][F32 ? 2 : 1];
        float w[NT][VEC];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) a[m][i] = *(const uint4 *)(r.h + r.row[m][i] + 64 * b);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < (F32 ? 2 : 1); i++)
                v[n][i] = r.there[n] ? ((const uint4 *)fn_at(r, n, b))[i] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < NT; n++) widen_fn<F32>(v[n], w[n]);
        step_sums<MT, NT, F32>(a, w, acc);
    }
}

template <int MT, int NT> static __device__ __forceinline__ void clear(float acc[MT][NT][4])
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
}

template <int MT, int NT>
static __device__ __forceinline__ void store_sums(const struct mix &p, int32_t t0, int32_t slot,
                                                  int32_t slots, const float acc[MT][NT][4])
{
    const int lane = threadIdx.x & 31, g = lane / 4, quad = lane % 4;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int32_t t = t0 + 16 * m + 8 * r + g;
            if (t >= p.T) continue;
            float *out = p.part + ((int64_t)t * slots + slot) * (8 * NT) + 2 * quad;
#pragma unroll
            for (int n = 0; n < NT; n++)
                *(float2 *)(out + 8 * n) = make_float2(acc[m][n][2 * r], acc[m][n][2 * r + 1]);
        }
}

/* Few rows: a warp a chunk. All of it is under way to shared memory before the first product, each
 * thread fetching what it will use itself; the compiler would not keep that many loads in
 * registers. */
template <int MT, int NT, bool F32>
static __global__ void __launch_bounds__(32) mix_few(struct mix p)
{
    enum { PER_FN = F32 ? 2 : 1 };
    __shared__ uint4 a[STEPS][MT][2][32], v[STEPS][NT][PER_FN][32];
    const int lane = threadIdx.x & 31;
    const int32_t t0 = (int32_t)blockIdx.y * 16 * MT, chunk = (int32_t)blockIdx.x;
    const struct reader<MT, NT, F32> r = reader_of<MT, NT, F32>(p, t0, chunk * CHUNK);
#pragma unroll
    for (int b = 0; b < STEPS; b++) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < PER_FN; i++)
                dev_copy16(&v[b][n][i][lane], fn_at(r, n, b) + 16 * i, r.there[n]);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                dev_copy16(&a[b][m][i][lane], r.h + r.row[m][i] + 64 * b, true);
    }
    dev_copy_commit();
    float acc[MT][NT][4];
    clear<MT, NT>(acc);
    dev_copy_wait<0>();
#pragma unroll
    for (int b = 0; b < STEPS; b++) {
        uint4 x[MT][2];
        float w[NT][VEC];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) x[m][i] = a[b][m][i][lane];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint4 u[PER_FN];
#pragma unroll
            for (int i = 0; i < PER_FN; i++) u[i] = v[b][n][i][lane];
            widen_fn<F32>(u, w[n]);
        }
        step_sums<MT, NT, F32>(x, w, acc);
    }
    store_sums<MT, NT>(p, t0, chunk, p.K / CHUNK, acc);
}

/* Many rows: a block a slice. Warps 2c and 2c+1 make chunks c and c+4 for two tiles of rows; sums
 * meet in shared memory: of chunks 4 apart, then 2, 1. */
template <int MT, int NT, bool F32>
static __global__ void __launch_bounds__(32 * SLICE, 2) mix_many(struct mix p)
{
    enum { OWN = MT * NT * 4 }; /* a thread's sums */
    __shared__ float sums[SLICE][OWN][32];
    float acc[MT][NT][4];
    float *const own = &acc[0][0][0];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, c = warp / 2;
    /* Where the second tile has no row, it is the first once more, and not stored. */
    const int32_t t0 = ((int32_t)blockIdx.y * 2 + warp % 2) * 16 * MT, slice = (int32_t)blockIdx.x;
    const int32_t from = t0 < p.T ? t0 : t0 - 16 * MT;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        clear<MT, NT>(acc);
        chunk_sums<MT, NT, F32>(p, from, slice * SLICE_K + (c + 4 * half) * CHUNK, acc);
#pragma unroll
        for (int i = 0; i < OWN; i++) { /* the thread's own place: no barrier */
            if (half == 1) own[i] += sums[warp][i][lane];
            sums[warp][i][lane] = own[i];
        }
    }
#pragma unroll
    for (int half = 2; half; half /= 2) {
        __syncthreads();
        if (c >= half) continue;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            own[i] += sums[warp + 2 * half][i][lane];
            sums[warp][i][lane] = own[i];
        }
    }
    if (c == 0) store_sums<MT, NT>(p, t0, slice, p.K / SLICE_K, acc);
}

/* ------------------------------------------------------------------ what the mixes say */

/* Entry i of the mixes, scaled and shifted. */
static __device__ __forceinline__ float mixed(const struct kern_hc_collapse &p, const float *m,
                                              float rs, int32_t i)
{
    const int32_t kind = i < p.hc ? 0 : i < 2 * p.hc ? 1 : 2;
    return fmaf(m[i] * rs, p.scale[kind], p.base[i]);
}
/* Thread i < hc makes pre[i] and post[i]; the last thread of the block comb. */
static __device__ __forceinline__ void make_pre_post(const struct kern_hc_collapse &p, int64_t t,
                                                     const float *m, float rs, float *pre)
{
    const int32_t i = (int32_t)threadIdx.x;
    if (i >= p.hc) return;
    pre[i] = dev_sigmoid(mixed(p, m, rs, i)) + p.hc_eps;
    if (p.comb) p.post[t * p.hc + i] = 2.0f * dev_sigmoid(mixed(p, m, rs, p.hc + i));
}
template <int HC>
static __device__ __forceinline__ void make_comb(const struct kern_hc_collapse &p, int64_t t,
                                                 const float *m, float rs)
{
    const int n = HC ? HC * HC : KERN_HC_MAX * KERN_HC_MAX;
    float c[n];
#pragma unroll
    for (int i = 0; i < n; i++)
        if (HC || i < p.hc * p.hc) c[i] = mixed(p, m, rs, 2 * p.hc + i);
    sinkhorn<HC>(c, p.hc, p.iters, p.hc_eps);
    float *out = p.comb + t * p.hc * p.hc;
#pragma unroll
    for (int i = 0; i < n; i++)
        if (HC || i < p.hc * p.hc) out[i] = c[i];
}

/* ------------------------------------------------------------------ four streams of bf16 */

/* Sums of slots to m[0 .. columns): a slice per slot, or eight chunks per slice. */
static __device__ __forceinline__ void add_slots(const float *part, int32_t slices, bool chunks,
                                                 int32_t columns, float *slice_sums, float *m)
{
    for (int32_t i = (int32_t)threadIdx.x; i < slices * columns; i += FINISH_THREADS) {
        const float *v = part + (int64_t)(i / columns) * SLICE * columns + i % columns;
        if (!chunks) {
            slice_sums[i] = part[i];
            continue;
        }
        slice_sums[i] = ((v[0] + v[4 * columns]) + (v[2 * columns] + v[6 * columns])) +
                        ((v[columns] + v[5 * columns]) + (v[3 * columns] + v[7 * columns]));
    }
    __syncthreads();
    if ((int32_t)threadIdx.x < columns) {
        float s = slice_sums[threadIdx.x];
#pragma unroll 4
        for (int32_t i = 1; i < slices; i++) s += slice_sums[i * columns + threadIdx.x];
        m[threadIdx.x] = s;
    }
    __syncthreads();
}

static __device__ __forceinline__ void load_streams(const uint16_t *h, int32_t D, int32_t i,
                                                    uint4 v[STREAMS])
{
#pragma unroll
    for (int j = 0; j < STREAMS; j++) v[j] = *(const uint4 *)(h + (int64_t)j * D + i);
}
static __device__ __forceinline__ float squares_of(const uint4 v[STREAMS], float s)
{
#pragma unroll
    for (int j = 0; j < STREAMS; j++) s = add_squares(v[j], s);
    return s;
}

static __global__ void __launch_bounds__(FINISH_THREADS)
    finish_kernel(struct kern_hc_collapse p, const float *part, int32_t slots, int32_t columns)
{
    enum { KEPT = 2 }; /* vectors of a thread and stream that stay in registers: D to 4096 */
    extern __shared__ float slice_sums[]; /* [slices, columns] */
    __shared__ float m[8 * MAX_TILES_N], pre[STREAMS], warps[FINISH_THREADS / 32];
    const int64_t t = gridDim.x - 1 - blockIdx.x; /* the last rows are still in L2 */
    const int64_t K = (int64_t)STREAMS * p.D;
    const int32_t slices = (int32_t)(K / SLICE_K);
    const int32_t i0 = VEC * (int32_t)threadIdx.x, step = VEC * FINISH_THREADS;
    const uint16_t *h = (const uint16_t *)p.h + t * K;
    uint16_t *x = (uint16_t *)p.x + t * p.D;
    uint4 v[KEPT][STREAMS], more[STREAMS];
    float squares = 0.0f;
#pragma unroll
    for (int a = 0; a < KEPT; a++)
        if (i0 + a * step < p.D) load_streams(h, p.D, i0 + a * step, v[a]);
#pragma unroll
    for (int a = 0; a < KEPT; a++)
        if (i0 + a * step < p.D) squares = squares_of(v[a], squares);
    for (int32_t i = i0 + KEPT * step; i < p.D; i += step) {
        load_streams(h, p.D, i, more);
        squares = squares_of(more, squares);
    }
    squares = dev_warp_sum(squares);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = squares;
    add_slots(part + t * slots * columns, slices, slots != slices, columns, slice_sums, m);
    squares = 0.0f;
    for (int i = 0; i < FINISH_THREADS / 32; i++) squares += warps[i];
    const float rs = 1.0f / sqrtf(squares / (float)K + p.norm_eps);
    make_pre_post(p, t, m, rs, pre);
    __syncthreads();
    if (p.comb && threadIdx.x == FINISH_THREADS - 1) make_comb<STREAMS>(p, t, m, rs);
#pragma unroll
    for (int a = 0; a < KEPT; a++)
        if (i0 + a * step < p.D) *(uint4 *)(x + i0 + a * step) = collapse8(v[a], pre);
    for (int32_t i = i0 + KEPT * step; i < p.D; i += step) {
        load_streams(h, p.D, i, more);
        *(uint4 *)(x + i) = collapse8(more, pre);
    }
}

template <int NT, bool F32> static void launch_mix(struct kern_stream *s, const struct mix &p)
{
    const unsigned chunks = (unsigned)(p.K / CHUNK);
    if (p.T <= 16)
        mix_few<1, NT, F32><<<dim3(chunks, 1), 32, 0, s->cu>>>(p);
    else if (p.T <= 32)
        mix_few<2, NT, F32><<<dim3(chunks, 1), 32, 0, s->cu>>>(p);
    else if (p.T <= FEW_ROWS)
        mix_few<4, NT, F32><<<dim3(chunks, (unsigned)cuda_ceil(p.T, 64)), 32, 0, s->cu>>>(p);
    else
        mix_many<4, NT, F32>
            <<<dim3(chunks / SLICE, (unsigned)cuda_ceil(p.T, 128)), 32 * SLICE, 0, s->cu>>>(p);
}

static int collapse_fast(struct kern_stream *s, const struct kern_hc_collapse *p)
{
    const int32_t K = STREAMS * p->D, tiles = p->comb ? 3 : 1, columns = 8 * tiles;
    const int32_t slots = K / (p->T <= FEW_ROWS ? CHUNK : SLICE_K);
    float *part = (float *)cuda_scratch(s, CUDA_SLOT_SPLIT, (size_t)p->T * slots * columns * 4);
    if (!part) return TOW_ENOMEM;
    const struct mix m = {(const uint16_t *)p->h,
                          (const uint8_t *)p->fn.data,
                          part,
                          (int32_t)p->fn.row_bytes,
                          p->T,
                          K,
                          p->fn.n};
    const bool f32 = p->fn.fmt == KERN_W_F32;
    if (tiles == 3 && f32) launch_mix<3, true>(s, m);
    if (tiles == 3 && !f32) launch_mix<3, false>(s, m);
    if (tiles == 1 && f32) launch_mix<1, true>(s, m);
    if (tiles == 1 && !f32) launch_mix<1, false>(s, m);
    finish_kernel<<<(unsigned)p->T, FINISH_THREADS, (size_t)(K / SLICE_K) * columns * 4, s->cu>>>(
        *p, part, slots, columns);
    return cuda_done(s, "hc_collapse");
}

/* ------------------------------------------------------------------ any shape */

enum { ANY_THREADS = 128 };

static __device__ __forceinline__ float block_sum(float v, float *warps)
{
    v = dev_warp_sum(v);
    __syncthreads(); /* the sums before this one are read */
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    float s = warps[0];
    for (int i = 1; i < ANY_THREADS / 32; i++) s += warps[i];
    return s;
}

static __global__ void __launch_bounds__(ANY_THREADS) collapse_any(struct kern_hc_collapse p)
{
    __shared__ float warps[ANY_THREADS / 32], m[(2 + KERN_HC_MAX) * KERN_HC_MAX], pre[KERN_HC_MAX];
    const int64_t t = blockIdx.x, K = (int64_t)p.hc * p.D, b = p.act == KERN_F32 ? 4 : 2;
    const void *h = (const uint8_t *)p.h + t * K * b;
    void *x = (uint8_t *)p.x + t * p.D * b;
    const enum kern_dtype ft = p.fn.fmt == KERN_W_F32 ? KERN_F32 : KERN_BF16;
    float squares = 0.0f;
    for (int64_t k = threadIdx.x; k < K; k += ANY_THREADS) {
        const float v = dev_load(h, k, p.act);
        squares = fmaf(v, v, squares);
    }
    squares = block_sum(squares, warps);
    for (int32_t n = 0; n < p.fn.n; n++) {
        const uint8_t *w = (const uint8_t *)p.fn.data + n * p.fn.row_bytes;
        float s = 0.0f;
        for (int64_t k = threadIdx.x; k < K; k += ANY_THREADS)
            s = fmaf(dev_load(h, k, p.act), dev_load(w, k, ft), s);
        s = block_sum(s, warps);
        if (threadIdx.x == 0) m[n] = s;
    }
    __syncthreads();
    const float rs = 1.0f / sqrtf(squares / (float)K + p.norm_eps);
    make_pre_post(p, t, m, rs, pre);
    if (p.comb && threadIdx.x == ANY_THREADS - 1) make_comb<0>(p, t, m, rs);
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < p.D; i += ANY_THREADS) {
        float s = pre[0] * dev_load(h, i, p.act);
        for (int32_t j = 1; j < p.hc; j++)
            s = fmaf(pre[j], dev_load(h, (int64_t)j * p.D + i, p.act), s);
        dev_store(x, i, p.act, s);
    }
}

extern "C" int kern_hc_collapse_cuda(struct kern_stream *s, const struct kern_hc_collapse *p)
{
    if (p->T == 0) return 0;
    const int64_t K = (int64_t)p->hc * p->D;
    const struct kern_hc_boundary alone = {NULL,      NULL,        (void *)(uintptr_t)p->h,
                                           p->fn,     p->base,     p->scale,
                                           {},        p->x,        p->post,
                                           p->comb,   !p->comb,    p->T,
                                           p->hc,     p->D,        p->iters,
                                           p->hc_eps, p->norm_eps, p->act};
    if (cuda_hc_boundary(s, &alone)) return cuda_done(s, "hc_collapse");
    /* The finish kernel's sums of slices fit where shared memory always is. */
    const bool fast = p->act == KERN_BF16 && p->hc == STREAMS && p->D % VEC == 0 &&
                      K % SLICE_K == 0 && K / SLICE_K <= 256 && cuda_aligned16(p->h) &&
                      cuda_aligned16(p->x) && cuda_aligned16(p->fn.data) &&
                      p->fn.row_bytes % 16 == 0;
    if (fast) return collapse_fast(s, p);
    collapse_any<<<(unsigned)p->T, ANY_THREADS, 0, s->cu>>>(*p);
    return cuda_done(s, "hc_collapse");
}

/* ------------------------------------------------------------------ expand */

/* A thread: eight values of y and of four streams, thirty-two results. */
static __global__ void __launch_bounds__(256) expand_kernel(struct kern_hc_expand p)
{
    const int64_t t = blockIdx.x, D = p.D;
    const int64_t i = VEC * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= D) return;
    const uint16_t *h = (const uint16_t *)p.h + t * STREAMS * D + i;
    uint16_t *out = (uint16_t *)p.out + t * STREAMS * D + i;
    const uint4 vy = *(const uint4 *)((const uint16_t *)p.y + t * D + i);
    uint4 vh[STREAMS];
    float4 c[STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) vh[j] = *(const uint4 *)(h + j * D);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) c[j] = ((const float4 *)p.comb)[t * STREAMS + j];
    const float4 post = ((const float4 *)p.post)[t];
    float y[VEC], s[STREAMS][VEC];
    dev_unpack8(vy, y);
#pragma unroll
    for (int e = 0; e < VEC; e++) {
        s[0][e] = post.x * y[e], s[1][e] = post.y * y[e];
        s[2][e] = post.z * y[e], s[3][e] = post.w * y[e];
    }
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        float f[VEC];
        dev_unpack8(vh[j], f);
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            s[0][e] = fmaf(c[j].x, f[e], s[0][e]), s[1][e] = fmaf(c[j].y, f[e], s[1][e]);
            s[2][e] = fmaf(c[j].z, f[e], s[2][e]), s[3][e] = fmaf(c[j].w, f[e], s[3][e]);
        }
    }
#pragma unroll
    for (int k = 0; k < STREAMS; k++) *(uint4 *)(out + k * D) = dev_pack8(s[k]);
}

/* Any number of streams and any type: a thread an element. */
static __global__ void expand_any(struct kern_hc_expand p)
{
    const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, D = p.D;
    if (at >= p.T * D) return;
    const int64_t t = at / D, i = at % D;
    const float *post = p.post + t * p.hc, *c = p.comb + t * p.hc * p.hc;
    const float y = dev_load(p.y, at, p.act);
    float h[KERN_HC_MAX];
#pragma unroll
    for (int j = 0; j < KERN_HC_MAX; j++)
        if (j < p.hc) h[j] = dev_load(p.h, (t * p.hc + j) * D + i, p.act);
    for (int32_t k = 0; k < p.hc; k++) {
        float s = post[k] * y;
#pragma unroll
        for (int j = 0; j < KERN_HC_MAX; j++)
            if (j < p.hc) s = fmaf(c[j * p.hc + k], h[j], s);
        dev_store(p.out, (t * p.hc + k) * D + i, p.act, s);
    }
}

extern "C" int kern_hc_expand_cuda(struct kern_stream *s, const struct kern_hc_expand *p)
{
    if (p->T == 0) return 0;
    const bool fast = p->act == KERN_BF16 && p->hc == STREAMS && p->D % VEC == 0 &&
                      cuda_aligned16(p->y) && cuda_aligned16(p->h) && cuda_aligned16(p->out) &&
                      cuda_aligned16(p->post) && cuda_aligned16(p->comb);
    if (fast)
        expand_kernel<<<dim3((unsigned)p->T, (unsigned)cuda_ceil(p->D, VEC * 256)), 256, 0,
                        s->cu>>>(*p);
    else
        expand_any<<<(unsigned)cuda_ceil((int64_t)p->T * p->D, 256), 256, 0, s->cu>>>(*p);
    return cuda_done(s, "hc_expand");
}

/* ------------------------------------------------------------------ mtp_mix */

static __global__ void __launch_bounds__(256) mtp_mix_kernel(struct kern_mtp_mix p)
{
    const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, vecs = p.D / VEC;
    if (at >= p.T * vecs) return;
    const int64_t t = at / vecs, i = at % vecs * VEC;
    float e[VEC], g[VEC];
    dev_unpack8(*(const uint4 *)((const uint16_t *)p.e + t * p.D + i), e);
    for (int32_t j = 0; j < p.hc; j++) {
        const int64_t o = (t * p.hc + j) * p.D + i;
        dev_unpack8(*(const uint4 *)((const uint16_t *)p.g + o), g);
#pragma unroll
        for (int k = 0; k < VEC; k++) g[k] = e[k] + g[k];
        *(uint4 *)((uint16_t *)p.out + o) = dev_pack8(g);
    }
}
static __global__ void mtp_mix_any(struct kern_mtp_mix p)
{
    const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t hd = (int64_t)p.hc * p.D;
    if (at >= p.T * hd) return;
    const float e = dev_load(p.e, at / hd * p.D + at % p.D, p.act);
    dev_store(p.out, at, p.act, e + dev_load(p.g, at, p.act));
}

extern "C" int kern_mtp_mix_cuda(struct kern_stream *s, const struct kern_mtp_mix *p)
{
    if (p->T == 0) return 0;
    const bool fast = p->act == KERN_BF16 && p->D % VEC == 0 && cuda_aligned16(p->e) &&
                      cuda_aligned16(p->g) && cuda_aligned16(p->out);
    const int64_t n = fast ? (int64_t)p->T * (p->D / VEC) : (int64_t)p->T * p->hc * p->D;
    if (fast)
        mtp_mix_kernel<<<(unsigned)cuda_ceil(n, 256), 256, 0, s->cu>>>(*p);
    else
        mtp_mix_any<<<(unsigned)cuda_ceil(n, 256), 256, 0, s->cu>>>(*p);
    return cuda_done(s, "mtp_mix");
}
