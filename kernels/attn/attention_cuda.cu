/* kernels/attn/attention_cuda.cu - attention of each row over its window and its compressed entries.
 *
 * A CTA takes a row and up to 64 heads. Keys come in tiles in their fixed order (window ascending,
 * then entries ascending): rows are gathered from the batch, the ring or the pages and widened to bf16
 * in shared memory, exactly; as keys are values, one tile serves both products. On the matrix unit:
 *   scores    heads x keys, the width in two halves that different warps sum and one adds
 *   weights   exp(s - m) against the maximum m so far, rounded to bf16; their sum unrounded
 *   output    heads x width in registers, each warp its own columns, rescaled when m rises
 * The maximum is a running one: scores of 64 heads do not fit beside keys and output, and a second pass
 * over the keys would cost half as much again. So a weight is rounded against another power of two
 * than the twin's, which moves it by at most as much as the twin's own rounding does.
 *
 * The order of a row's sums depends on its own keys and the width alone: how many heads share a CTA
 * (all of 64 in prefill; 16 where rows are few, so that more CTAs work) changes no bit.
 * Activations in f32 and keys that are no bf16 numbers take the plain kernel: two passes, the twin's
 * orders but for the scores.
 * Bound: reading rows (584 bytes) and the matrix unit about equally.
 */
#include "kernels/attn/widen.cuh"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/kv.cuh"
#include "kernels/cuda/mma.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    MAX_WIDTH = 512, /* of the tiled kernel: 64 columns of output a warp */
    PLAIN_KEYS = 64, /* of a block of the plain kernel */
    PLAIN_EACH = 32, /* columns of a thread there: widths to 8192 */
};

struct job {
    const void *q, *kv;
    const float *sink;
    void *o;
    struct cuda_kv k;
    struct cuda_batch b;
    const int32_t *selected, *n_selected;
    int64_t sel_ld;
    int32_t T, H;
    float scale;
    enum kern_dtype act;
};

/* One row's keys. */
struct keys {
    struct cuda_seq q;
    int64_t from; /* window: positions from this on */
    int32_t n_window, n;
    const int32_t *selected; /* entries, or NULL: 0, 1, ... */
};
/* False: row t belongs to no sequence. */
static __device__ __forceinline__ bool keys_of(const struct job &j, int32_t t, struct keys *ks)
{
    const int32_t i = j.b.row_seq[t];
    if (i < 0) return false;
    ks->q = j.b.seqs[i];
    const int64_t pos = ks->q.pos0 + (t - ks->q.row0);
    ks->from = pos - j.k.window + 1 > 0 ? pos - j.k.window + 1 : 0;
    ks->n = ks->n_window = (int32_t)(pos - ks->from + 1);
    ks->selected = NULL;
    if (j.k.y.ratio && j.selected) {
        ks->selected = j.selected + t * j.sel_ld;
        ks->n += j.n_selected[t];
    } else if (j.k.y.ratio) {
        ks->n += (int32_t)((pos + 1) / j.k.y.ratio);
    }
    return true;
}

/* Where key i lies: row `row` of a stored part of `n` rows, or of the batch's kv (n = 0). */
struct place {
    const uint8_t *part;
    int64_t row;
    int32_t n;
};
static __device__ __forceinline__ struct place place_of(const struct job &j, const struct keys &ks,
                                                        int32_t i)
{
    if (i < ks.n_window) {
        const int64_t pos = ks.from + i;
        if (pos >= ks.q.pos0) return {(const uint8_t *)j.kv, ks.q.row0 + (pos - ks.q.pos0), 0};
        return {ks.q.tail + j.k.y.window_off, (uint32_t)pos % (uint32_t)j.k.window, j.k.window};
    }
    /* Positions and entries are below 2^31: short divisions. */
    const uint32_t e = (uint32_t)(ks.selected ? ks.selected[i - ks.n_window] : i - ks.n_window);
    const uint32_t per_page = (uint32_t)j.k.y.per_page;
    const int64_t page = ks.q.page_ids[(int64_t)(e / per_page) * ks.q.page_step];
    return {j.k.pages + page * j.k.page_bytes + j.k.y.main_off, e % per_page, j.k.y.per_page};
}

/* ------------------------------------------------------------------ any types, in f32 */

static __device__ __forceinline__ float key_at(const struct job &j, const struct place &at,
                                               int32_t c)
{
    if (at.n == 0) return dev_load(at.part, at.row * j.k.d + c, j.act);
    return dev_kv_at(j.k, at.part, at.n, at.row, c);
}

/* The score of a key, the same in all lanes of the warp. */
static __device__ float score_of(const struct job &j, const struct place &at, int64_t q0, int lane)
{
    float dot = 0.0f;
    for (int32_t c = lane; c < j.k.d; c += 32)
        dot = fmaf(dev_load(j.q, q0 + c, j.act), key_at(j, at, c), dot);
    return dev_warp_sum(dot) * j.scale;
}

static __global__ void __launch_bounds__(THREADS) plain_kernel(const __grid_constant__ struct job j)
{
    __shared__ struct place at[PLAIN_KEYS];
    __shared__ float weight[PLAIN_KEYS], warp_max[WARPS];
    const int32_t t = blockIdx.x / j.H, h = blockIdx.x % j.H, d = j.k.d;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t q0 = ((int64_t)t * j.H + h) * d;
    struct keys ks;
    if (!keys_of(j, t, &ks)) return;
    float max = -kern_float(0x7f800000u), sum = 0.0f, o[PLAIN_EACH] = {};
    for (int32_t i = warp; i < ks.n; i += WARPS)
        max = fmaxf(score_of(j, place_of(j, ks, i), q0, lane), max); /* passes over NaN */
    if (lane == 0) warp_max[warp] = max;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) max = fmaxf(warp_max[w], max);
    for (int32_t k0 = 0; k0 < ks.n; k0 += PLAIN_KEYS) {
        const int n = ks.n - k0 < PLAIN_KEYS ? ks.n - k0 : PLAIN_KEYS;
        for (int i = warp; i < n; i += WARPS) {
            const struct place a = place_of(j, ks, k0 + i);
            const float w = expf(score_of(j, a, q0, lane) - max);
            if (lane == 0) {
                at[i] = a;
                weight[i] = w;
            }
        }
        __syncthreads();
        for (int i = 0; i < n; i++) {
            const float w = dev_round(weight[i], j.act);
            sum += weight[i];
#pragma unroll
            for (int c = 0; c < PLAIN_EACH; c++) {
                const int32_t col = (int32_t)threadIdx.x + c * THREADS;
                if (col < d) o[c] = fmaf(w, key_at(j, at[i], col), o[c]);
            }
        }
        __syncthreads();
    }
    sum += expf(j.sink[h] - max);
#pragma unroll
    for (int c = 0; c < PLAIN_EACH; c++) {
        const int32_t col = (int32_t)threadIdx.x + c * THREADS;
        if (col < d) dev_store(j.o, q0 + col, j.act, o[c] / sum);
    }
}

/* ------------------------------------------------------------------ bf16, on the matrix unit */

/* Pieces of 16 bytes in shared memory: rows of `pieces`, so placed that eight rows' pieces of one column
 * meet different banks. */
struct pitch {
    int pieces, ld;
    __device__ __forceinline__ int at(int row, int piece) const
    {
        return pieces % 8 == 0 ? row * ld + (piece ^ (row & 7)) : row * ld + piece;
    }
};
static __host__ __device__ constexpr int pitch_ld(int pieces)
{
    return pieces % 8 == 0 ? pieces : pieces | 1;
}

/* A key of a tile: its bytes, and its scales where it is stored in e4m3. */
struct source {
    const uint8_t *row; /* NULL: past the last key */
    const uint8_t *scales;
};
static __device__ __forceinline__ struct source source_of(const struct job &j,
                                                          const struct keys &ks, int32_t i)
{
    if (i >= ks.n) return {NULL, NULL};
    const struct place a = place_of(j, ks, i);
    const int32_t d = j.k.d, rd = j.k.rd;
    if (a.n == 0 || j.k.kv_fmt == KERN_KV_BF16) return {a.part + a.row * d * 2, NULL};
    const int32_t scales = ((d - rd) / 64 + 7) / 8 * 8;
    return {a.part + a.row * (d + rd), a.part + (int64_t)a.n * (d + rd) + a.row * scales};
}

/* Keys key0 .. key0 + n_keys - 1 of a tile to shared memory, by one warp, EACH pieces of a lane on
 * their way at a time. All of them are stored alike. */
template <int EACH>
static __device__ __forceinline__ void load_bf16(const struct source *src, int key0, int n_keys,
                                                 const struct pitch &y, uint4 *tile)
{
    const int total = n_keys * y.pieces, lane = threadIdx.x % 32;
    for (int u0 = lane; u0 < total; u0 += 32 * EACH) {
        uint4 raw[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int u = u0 + 32 * i, key = key0 + u / y.pieces;
            raw[i] = make_uint4(0, 0, 0, 0);
            if (u < total && src[key].row)
                raw[i] = __ldg((const uint4 *)src[key].row + u % y.pieces);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int u = u0 + 32 * i;
            if (u < total) tile[y.at(key0 + u / y.pieces, u % y.pieces)] = raw[i];
        }
    }
}
template <int EACH>
static __device__ __forceinline__ void load_fp8(const struct source *src, int key0, int n_keys,
                                                int d, int rd, const struct pitch &y, uint4 *tile)
{
    const int codes = (d - rd) / 16, per = codes + rd / 8; /* pieces read of a key */
    const int total = n_keys * per, lane = threadIdx.x % 32;
    for (int u0 = lane; u0 < total; u0 += 32 * EACH) {
        uint4 raw[EACH];
        uint8_t scale[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int u = u0 + 32 * i, c = u % per;
            raw[i] = make_uint4(0, 0, 0, 0);
            scale[i] = 0;
            if (u >= total) continue;
            const struct source s = src[key0 + u / per];
            if (!s.row) continue;
            raw[i] = __ldg((const uint4 *)s.row + c);
            if (c < codes) scale[i] = s.scales[c / 4];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int u = u0 + 32 * i, key = key0 + u / per, c = u % per;
            if (u >= total) continue;
            if (c < codes) {
                uint4 lo, hi;
                const uint32_t s = dev_ue8m0_bf16x2(scale[i]);
                dev_e4m3x16_bf16(raw[i], &lo, &hi);
                tile[y.at(key, 2 * c)] = dev_mul_bf16x8(lo, s);
                tile[y.at(key, 2 * c + 1)] = dev_mul_bf16x8(hi, s);
            } else {
                tile[y.at(key, codes + c)] = raw[i]; /* 2 * codes + (c - codes) */
            }
        }
    }
}
static __device__ __forceinline__ void load_keys(const struct source *src, int key0, int n_keys,
                                                 int d, int rd, const struct pitch &y, uint4 *tile)
{
    bool fp8 = true, bf16 = true;
    for (int i = 0; i < n_keys; i++) {
        const struct source s = src[key0 + i];
        fp8 = fp8 && (!s.row || s.scales);
        bf16 = bf16 && (!s.row || !s.scales);
    }
    if (fp8) {
        load_fp8<9>(src, key0, n_keys, d, rd, y, tile); /* eight keys of 576 bytes */
    } else if (bf16) {
        load_bf16<8>(src, key0, n_keys, y, tile);
    } else { /* where the ring ends and the batch begins */
        for (int i = key0; i < key0 + n_keys; i++)
            if (src[i].scales)
                load_fp8<2>(src, i, 1, d, rd, y, tile);
            else
                load_bf16<2>(src, i, 1, y, tile);
    }
}

/* MT * 16 heads, tiles of TK keys; D: the width, 0 = whatever it is. */
template <int MT, int TK, int D, int RD> struct shape {
    static constexpr int HEADS = 16 * MT, S_LD = TK + 4;
    /* Score warps: two halves of the width x WM x WN, each MW x NW pieces of 16. */
    static constexpr int WN = TK == 64 && MT < 4 ? 4 : 2, WM = 4 / WN;
    static constexpr int MW = MT / WM, NW = TK / 16 / WN;
    static constexpr int PAIRS = D ? (D / 16 + WARPS - 1) / WARPS : MAX_WIDTH / 16 / WARPS;
    static constexpr int ROWS = HEADS / WARPS; /* heads of a warp in the weights' step */
    static_assert(MW * WM == MT && NW * WN * 16 == TK, "score warps");
    static size_t bytes(int32_t d)
    {
        return (size_t)(HEADS + TK) * (size_t)pitch_ld(d / 8) * 16 +
               (size_t)HEADS * pitch_ld(TK / 8) * 16 + 2u * HEADS * S_LD * 4 + 2u * HEADS * 4 +
               (size_t)TK * sizeof(struct source);
    }
};

template <int MT, int TK, int D, int RD>
static __global__ void __launch_bounds__(THREADS, MT == 4 ? 1 : 2)
    tiled_kernel(const __grid_constant__ struct job j, int32_t groups)
{
    using sh = shape<MT, TK, D, RD>;
    constexpr int HEADS = sh::HEADS, S_LD = sh::S_LD, PAIRS = sh::PAIRS, ROWS = sh::ROWS;
    const int d = D ? D : j.k.d, rd = D ? RD : j.k.rd;
    const struct pitch y = {d / 8, pitch_ld(d / 8)}, yp = {TK / 8, pitch_ld(TK / 8)};
    extern __shared__ uint4 shared[];
    uint4 *q = shared, *tile = q + HEADS * y.ld, *p = tile + TK * y.ld;
    float *s = (float *)(p + HEADS * yp.ld); /* [2][HEADS][S_LD]: scores by half of the width */
    float *keep = s + 2 * HEADS * S_LD, *inverse = keep + HEADS;
    struct source *src = (struct source *)(inverse + HEADS);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t t = blockIdx.x / groups, h0 = (int32_t)(blockIdx.x % groups) * HEADS;
    struct keys ks;
    if (!keys_of(j, t, &ks)) return;

    for (int i = threadIdx.x; i < HEADS * y.pieces; i += THREADS) {
        const int h = i / y.pieces, piece = i % y.pieces;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (h0 + h < j.H)
            x = __ldg((const uint4 *)j.q + ((int64_t)t * j.H + h0 + h) * y.pieces + piece);
        q[y.at(h, piece)] = x;
    }
    float o[MT][2 * PAIRS][4] = {}, max[ROWS], sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        max[r] = -kern_float(0x7f800000u);
        sum[r] = 0.0f;
    }
    if (threadIdx.x < TK) src[threadIdx.x] = source_of(j, ks, threadIdx.x);
    __syncthreads();

    for (int32_t k0 = 0; k0 < ks.n; k0 += TK) {
        load_keys(src, warp * (TK / WARPS), TK / WARPS, d, rd, y, tile);
        __syncthreads();
        { /* scores of one half of the width */
            const int half = warp % 2, m0 = warp / 2 / sh::WN * sh::MW,
                      n0 = warp / 2 % sh::WN * sh::NW;
            const int steps = d / 16, k_first = half ? (steps + 1) / 2 : 0;
            const int k_last = half ? steps : (steps + 1) / 2;
            float acc[sh::MW][2 * sh::NW][4] = {};
#pragma unroll 4
            for (int k = k_first; k < k_last; k++) {
                uint32_t a[sh::MW][4];
#pragma unroll
                for (int m = 0; m < sh::MW; m++)
                    dev_ldmatrix4(a[m], &q[y.at((m0 + m) * 16 + lane % 16, 2 * k + lane / 16)]);
#pragma unroll
                for (int n = 0; n < sh::NW; n++) {
                    uint32_t b[4];
                    dev_ldmatrix4(b, &tile[y.at((n0 + n) * 16 + lane % 8 + lane / 16 * 8,
                                                2 * k + lane / 8 % 2)]);
#pragma unroll
                    for (int m = 0; m < sh::MW; m++) {
                        dev_mma(acc[m][2 * n], a[m], b);
                        dev_mma(acc[m][2 * n + 1], a[m], b + 2);
                    }
                }
            }
            float *out =
                s + half * HEADS * S_LD + (m0 * 16 + lane / 4) * S_LD + n0 * 16 + lane % 4 * 2;
#pragma unroll
            for (int m = 0; m < sh::MW; m++)
#pragma unroll
                for (int n = 0; n < 2 * sh::NW; n++) {
                    float *at = out + m * 16 * S_LD + n * 8;
                    *(float2 *)at = make_float2(acc[m][n][0], acc[m][n][1]);
                    *(float2 *)(at + 8 * S_LD) = make_float2(acc[m][n][2], acc[m][n][3]);
                }
        }
        __syncthreads();
        /* weights: a warp has ROWS heads, a lane TK / 32 neighbouring keys */
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            constexpr int E = TK / 32;
            const int h = warp * ROWS + r;
            float x[E], m = max[r];
#pragma unroll
            for (int e = 0; e < E; e++) {
                const int k = lane * E + e;
                x[e] = (s[h * S_LD + k] + s[(HEADS + h) * S_LD + k]) * j.scale;
                if (k0 + k >= ks.n) x[e] = -kern_float(0x7f800000u);
                m = fmaxf(m, x[e]); /* passes over NaN */
            }
            m = dev_warp_max(m);
            /* Nothing above -inf yet: weights are 0 against any number. */
            const float base = m == -kern_float(0x7f800000u) ? 0.0f : m;
            float w = 0.0f;
            uint16_t *to = (uint16_t *)&p[yp.at(h, lane * E / 8)] + lane * E % 8;
#pragma unroll
            for (int e = 0; e < E; e++) {
                x[e] = expf(x[e] - base);
                w += x[e];
                to[e] = kern_bf16_encode(x[e]);
            }
            const float k = expf(max[r] - base); /* 0 at first */
            sum[r] = fmaf(sum[r], k, dev_warp_sum(w));
            max[r] = m;
            if (lane == 0) keep[h] = k;
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < MT; m++) { /* output: columns of this warp */
            const float lo = keep[m * 16 + lane / 4], hi = keep[m * 16 + 8 + lane / 4];
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; n++) {
                o[m][n][0] *= lo;
                o[m][n][1] *= lo;
                o[m][n][2] *= hi;
                o[m][n][3] *= hi;
            }
        }
#pragma unroll
        for (int k = 0; k < TK / 16; k++) {
            uint32_t a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
                dev_ldmatrix4(a[m], &p[yp.at(m * 16 + lane % 16, 2 * k + lane / 16)]);
#pragma unroll
            for (int n = 0; n < PAIRS; n++) {
                const int col = warp * PAIRS + n; /* pieces 2 * col and the next */
                if (col * 16 >= d) break;
                uint32_t b[4];
                dev_ldmatrix4_trans(b, &tile[y.at(k * 16 + lane % 16, 2 * col + lane / 16)]);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    dev_mma(o[m][2 * n], a[m], b);
                    dev_mma(o[m][2 * n + 1], a[m], b + 2);
                }
            }
        }
        if (threadIdx.x < TK) src[threadIdx.x] = source_of(j, ks, k0 + TK + (int32_t)threadIdx.x);
        __syncthreads();
    }

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int h = warp * ROWS + r;
        const float sink = h0 + h < j.H ? j.sink[h0 + h] : 0.0f;
        float den = sum[r] + expf(sink - max[r]);
        if (max[r] == -kern_float(0x7f800000u)) den = kern_float(0x7fc00000u);
        if (lane == 0) inverse[h] = 1.0f / den;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++) { /* through the queries' place, so that rows are written whole */
        const int row = m * 16 + lane / 4;
        const float lo = inverse[row], hi = inverse[row + 8];
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; n++) {
            const int piece = warp * 2 * PAIRS + n;
            if (piece >= y.pieces) break;
            uint32_t *to = (uint32_t *)&q[y.at(row, piece)] + lane % 4;
            *to = (uint32_t)kern_bf16_encode(o[m][n][0] * lo) |
                  (uint32_t)kern_bf16_encode(o[m][n][1] * lo) << 16;
            to = (uint32_t *)&q[y.at(row + 8, piece)] + lane % 4;
            *to = (uint32_t)kern_bf16_encode(o[m][n][2] * hi) |
                  (uint32_t)kern_bf16_encode(o[m][n][3] * hi) << 16;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * y.pieces; i += THREADS) {
        const int h = i / y.pieces, piece = i % y.pieces;
        if (h0 + h < j.H)
            ((uint4 *)j.o)[((int64_t)t * j.H + h0 + h) * y.pieces + piece] = q[y.at(h, piece)];
    }
}

template <int MT, int TK, int D, int RD>
static void launch(struct kern_stream *s, const struct job *j)
{
    using sh = shape<MT, TK, D, RD>;
    const int32_t groups = (int32_t)cuda_ceil(j->H, sh::HEADS);
    const size_t most = sh::bytes(D ? D : MAX_WIDTH);
    CUDA_SHARED((tiled_kernel<MT, TK, D, RD>), most);
    tiled_kernel<MT, TK, D, RD>
        <<<(unsigned)(j->T * groups), THREADS, sh::bytes(j->k.d), s->cu>>>(*j, groups);
}
template <int D, int RD> static void launch_width(struct kern_stream *s, const struct job *j)
{
    if (s->arch == 120) /* 99 KiB of shared memory */
        launch<2, 32, D, RD>(s, j);
    else if (j->H <= 16 || (int64_t)j->T * cuda_ceil(j->H, 64) * 2 <= s->n_sm)
        launch<1, 64, D, RD>(s, j);
    else
        launch<4, 64, D, RD>(s, j);
}

static bool tiles_fit(const struct job *j)
{
    const int32_t d = j->k.d, rd = j->k.rd;
    if (j->act != KERN_BF16 || j->k.kv_fmt == KERN_KV_F32 || d % 16 || d > MAX_WIDTH) return false;
    return j->k.kv_fmt == KERN_KV_BF16 || ((d + rd) % 16 == 0 && rd % 8 == 0);
}

extern "C" int kern_attention_cuda(struct kern_stream *s, const struct kern_attention *p)
{
    struct job j = {};
    if (p->T == 0 || p->n_seqs == 0) return 0;
    int rc = cuda_batch_of(s, p->seqs, p->n_seqs, &j.b);
    if (rc < 0) return rc;
    j.q = p->q;
    j.kv = p->kv;
    j.sink = p->sink;
    j.o = p->o;
    j.k = cuda_kv_of(p->pages, p->layout, p->layer);
    j.selected = p->selected;
    j.n_selected = p->n_selected;
    j.sel_ld = p->sel_ld;
    j.T = p->T < j.b.T ? p->T : j.b.T;
    j.H = p->H;
    j.scale = p->scale;
    j.act = p->act;
    if (j.T == 0) return cuda_done(s, "attention");
    if (!tiles_fit(&j))
        plain_kernel<<<(unsigned)(j.T * j.H), THREADS, 0, s->cu>>>(j);
    else if (j.k.d == 512 && j.k.rd == 64)
        launch_width<512, 64>(s, &j);
    else
        launch_width<0, 0>(s, &j);
    return cuda_done(s, "attention");
}
