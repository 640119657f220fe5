/* kernels/attn/attention_cuda.cu - attention of each row over its window and compressed entries.
 *
 * The model's width has kernels of its own on sm_90a, attention_wgmma_cuda.cu and, where rows are
 * few, attention_few_cuda.cu. Here are a tiled kernel for other widths and for sm_120, and a plain
 * one for any types.
 *
 * Tiled: a CTA takes a row and up to 64 heads, then the next. Keys come in tiles in their fixed
 * order (window ascending, then entries ascending): rows are gathered from the batch, the ring or
 * the pages and widened to bf16 in shared memory, exactly; as keys are values, one tile serves both
 * products. Weights are rounded against the final maximum, as the twin's are, so there are two
 * passes:
 *   first   scores on the matrix unit, the width in two halves that different warps sum; they go
 *           to scratch, which stays in L2, and the maxima to registers
 *   second  from the last tile, which is still there, to the first: weights exp(s - max), rounded
 *           to bf16, times the tile; the output in registers, each warp its own columns
 * Scores of more than KEPT keys are computed again. The next tile's codes are on their way
 * meanwhile.
 *
 * The order of a row's sums depends on its own keys and the width alone: how many heads share a CTA
 * (all of 64 in prefill; 16 where rows are few, so that more CTAs work) changes no bit.
 * Activations in f32, keys that are no bf16 numbers and arrays that are not aligned take the plain
 * kernel: the twin's orders but for the scores.
 */
#include "kernels/attn/attention.cuh"
#include "kernels/attn/widen.cuh"
#include "kernels/cuda/mma.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    MAX_WIDTH = 512, /* of the tiled kernel: 64 columns of output a warp */
    KEPT = 1024,     /* keys whose scores stay between the passes: 256 KiB a CTA of 64 heads */
    PLAIN_KEYS = 64, /* of a block of the plain kernel */
    PLAIN_EACH = 32, /* columns of a thread there: widths to 8192 */
};

/* ------------------------------------------------------------------ any types, in f32 */

static __device__ __forceinline__ float key_at(const struct attn_job &j,
                                               const struct attn_place &at, int32_t c)
{
    if (at.n == 0) return dev_load(at.part, at.row * j.k.d + c, j.act);
    return dev_kv_at(j.k, at.part, at.n, at.row, c);
}

/* The score of a key, the same in all lanes of the warp. */
static __device__ float score_of(const struct attn_job &j, const struct attn_place &at, int64_t q0,
                                 int lane)
{
    float dot = 0.0f;
    for (int32_t c = lane; c < j.k.d; c += 32)
        dot = fmaf(dev_load(j.q, q0 + c, j.act), key_at(j, at, c), dot);
    return dev_warp_sum(dot) * j.scale;
}

static __global__ void __launch_bounds__(THREADS)
    plain_kernel(const __grid_constant__ struct attn_job j)
{
    __shared__ struct attn_place at[PLAIN_KEYS];
    __shared__ float weight[PLAIN_KEYS], warp_max[WARPS];
    const int32_t t = blockIdx.x / j.H, h = blockIdx.x % j.H, d = j.k.d;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t q0 = ((int64_t)t * j.H + h) * d;
    struct attn_keys ks;
    if (!attn_keys_of(j, t, &ks)) return;
    float max = -kern_float(0x7f800000u), sum = 0.0f, o[PLAIN_EACH] = {};
    for (int32_t i = warp; i < ks.n; i += WARPS)
        max = fmaxf(score_of(j, attn_place_of(j, ks, i), q0, lane), max); /* passes over NaN */
    if (lane == 0) warp_max[warp] = max;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) max = fmaxf(warp_max[w], max);
    for (int32_t k0 = 0; k0 < ks.n; k0 += PLAIN_KEYS) {
        const int n = ks.n - k0 < PLAIN_KEYS ? ks.n - k0 : PLAIN_KEYS;
        for (int i = warp; i < n; i += WARPS) {
            const struct attn_place a = attn_place_of(j, ks, k0 + i);
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

/* Pieces of 16 bytes in shared memory: rows of `pieces`, so placed that eight rows' pieces of one
 * column meet different banks. */
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
static __device__ __forceinline__ struct source source_of(const struct attn_job &j,
                                                          const struct attn_keys &ks, int32_t i)
{
    if (i >= ks.n) return {NULL, NULL};
    const struct attn_place a = attn_place_of(j, ks, i);
    const int32_t d = j.k.d, rd = j.k.rd;
    if (a.n == 0 || j.k.kv_fmt == KERN_KV_BF16) return {a.part + a.row * d * 2, NULL};
    const int32_t scales = ((d - rd) / 64 + 7) / 8 * 8;
    return {a.part + a.row * (d + rd), a.part + (int64_t)a.n * (d + rd) + a.row * scales};
}

/* Keys key0 .. key0 + n_keys - 1 of a tile to shared memory, by one warp, EACH pieces of a lane on
 * their way at a time. */
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
/* The same of keys in e4m3, in two steps: what a lane has read, and then its values. */
template <int EACH> struct codes {
    uint4 raw[EACH];
    uint8_t scale[EACH];

    __device__ __forceinline__ void load(const struct source *src, int key0, int n_keys, int d,
                                         int rd, int first)
    {
        const int n_codes = (d - rd) / 16, per = n_codes + rd / 8; /* pieces read of a key */
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int u = first + 32 * i, c = u % per;
            raw[i] = make_uint4(0, 0, 0, 0);
            scale[i] = 0;
            if (u >= n_keys * per) continue;
            const struct source s = src[key0 + u / per];
            if (!s.row) continue;
            raw[i] = __ldg((const uint4 *)s.row + c);
            if (c < n_codes) scale[i] = s.scales[c / 4];
        }
    }
    __device__ __forceinline__ void store(int key0, int n_keys, int d, int rd, int first,
                                          const struct pitch &y, uint4 *tile) const
    {
        const int n_codes = (d - rd) / 16, per = n_codes + rd / 8;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int u = first + 32 * i, key = key0 + u / per, c = u % per;
            if (u >= n_keys * per) continue;
            if (c < n_codes) {
                uint4 lo, hi;
                const uint32_t s = dev_ue8m0_bf16x2(scale[i]);
                dev_e4m3x16_bf16(raw[i], &lo, &hi);
                tile[y.at(key, 2 * c)] = dev_mul_bf16x8(lo, s);
                tile[y.at(key, 2 * c + 1)] = dev_mul_bf16x8(hi, s);
            } else {
                tile[y.at(key, n_codes + c)] = raw[i]; /* 2 * n_codes + (c - n_codes) */
            }
        }
    }
};
/* A warp's keys of a tile: where all are e4m3 they are read ahead into registers. */
enum { AHEAD = 9 }; /* pieces of a lane: eight keys of 576 bytes */
struct fetch {
    struct codes<AHEAD> c;
    bool ahead;

    __device__ __forceinline__ void load(const struct source *src, int key0, int n_keys, int d,
                                         int rd)
    {
        const int lane = threadIdx.x % 32;
        const struct source mine = lane < n_keys ? src[key0 + lane] : source{NULL, NULL};
        ahead = !__any_sync(~0u, mine.row && !mine.scales) &&
                __any_sync(~0u, mine.scales != NULL) &&
                n_keys * ((d - rd) / 16 + rd / 8) <= 32 * AHEAD;
        if (ahead) c.load(src, key0, n_keys, d, rd, lane);
    }
    __device__ __forceinline__ void store(const struct source *src, int key0, int n_keys, int d,
                                          int rd, const struct pitch &y, uint4 *tile) const
    {
        const int lane = threadIdx.x % 32;
        if (ahead) {
            c.store(key0, n_keys, d, rd, lane, y, tile);
            return;
        }
        const bool stored = lane < n_keys && src[key0 + lane].scales;
        if (!__any_sync(~0u, stored)) { /* or none is there: zeros */
            load_bf16<8>(src, key0, n_keys, y, tile);
            return;
        }
        for (int i = key0; i < key0 + n_keys; i++) { /* where the ring ends and the batch begins */
            if (!src[i].scales) {
                load_bf16<2>(src, i, 1, y, tile);
                continue;
            }
            for (int first = lane; first < (d - rd) / 16 + rd / 8; first += 64) {
                struct codes<2> some;
                some.load(src, i, 1, d, rd, first);
                some.store(i, 1, d, rd, first, y, tile);
            }
        }
    }
};

/* MT * 16 heads, tiles of TK keys; D: the width, 0 = whatever it is. */
template <int MT, int TK, int D, int RD> struct shape {
    static constexpr int HEADS = 16 * MT, S_LD = TK + 4;
    /* Score warps: two halves of the width x WM x WN, each MW x NW pieces of 16. */
    static constexpr int WN = TK == 64 && MT < 4 ? 4 : 2, WM = 4 / WN;
    static constexpr int MW = MT / WM, NW = TK / 16 / WN;
    static constexpr int PAIRS = D ? (D / 16 + WARPS - 1) / WARPS : MAX_WIDTH / 16 / WARPS;
    static constexpr int ROWS = HEADS / WARPS; /* heads of a warp in the weights' step */
    static constexpr int EACH = TK / 32;       /* keys of a lane there */
    static_assert(MW * WM == MT && NW * WN * 16 == TK, "score warps");
    static size_t bytes(int32_t d)
    {
        return (size_t)(HEADS + TK) * (size_t)pitch_ld(d / 8) * 16 +
               (size_t)HEADS * pitch_ld(TK / 8) * 16 + 2u * HEADS * S_LD * 4 + 1u * HEADS * 4 +
               2u * TK * sizeof(struct source);
    }
};

/* Scores of a tile: each half of the width to its place in s [2][HEADS][S_LD]. */
template <typename sh>
static __device__ __forceinline__ void score_tile(int d, const struct pitch &y, const uint4 *q,
                                                  const uint4 *tile, float *s)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp % 2;
    const int m0 = warp / 2 / sh::WN * sh::MW, n0 = warp / 2 % sh::WN * sh::NW;
    const int steps = d / 16, middle = (steps + 1) / 2;
    float acc[sh::MW][2 * sh::NW][4] = {};
#pragma unroll 4
    for (int k = half ? middle : 0; k < (half ? steps : middle); k++) {
        uint32_t a[sh::MW][4];
#pragma unroll
        for (int m = 0; m < sh::MW; m++)
            dev_ldmatrix4(a[m], &q[y.at((m0 + m) * 16 + lane % 16, 2 * k + lane / 16)]);
#pragma unroll
        for (int n = 0; n < sh::NW; n++) {
            uint32_t b[4];
            dev_ldmatrix4(
                b, &tile[y.at((n0 + n) * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2)]);
#pragma unroll
            for (int m = 0; m < sh::MW; m++) {
                dev_mma(acc[m][2 * n], a[m], b);
                dev_mma(acc[m][2 * n + 1], a[m], b + 2);
            }
        }
    }
    float *out = s + (half * sh::HEADS + m0 * 16 + lane / 4) * sh::S_LD + n0 * 16 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < sh::MW; m++)
#pragma unroll
        for (int n = 0; n < 2 * sh::NW; n++) {
            float *at = out + m * 16 * sh::S_LD + n * 8;
            *(float2 *)at = make_float2(acc[m][n][0], acc[m][n][1]);
            *(float2 *)(at + 8 * sh::S_LD) = make_float2(acc[m][n][2], acc[m][n][3]);
        }
}
/* The score of head h and key k of a tile whose first key is k0: -inf past the last key. */
template <typename sh>
static __device__ __forceinline__ float score_in(const float *s, int h, int k, int32_t k0,
                                                 int32_t n, float scale)
{
    const float x = (s[h * sh::S_LD + k] + s[(sh::HEADS + h) * sh::S_LD + k]) * scale;
    return k0 + k < n ? x : -kern_float(0x7f800000u);
}

template <int MT, int TK, int D, int RD>
static __global__ void __launch_bounds__(THREADS, MT == 4 ? 1 : 2)
    tiled_kernel(const __grid_constant__ struct attn_job j, int32_t groups, float *scratch)
{
    using sh = shape<MT, TK, D, RD>;
    constexpr int HEADS = sh::HEADS, PAIRS = sh::PAIRS, ROWS = sh::ROWS, E = sh::EACH;
    constexpr int MINE = TK / WARPS; /* keys that a warp brings */
    const int d = D ? D : j.k.d, rd = D ? RD : j.k.rd;
    const struct pitch y = {d / 8, pitch_ld(d / 8)}, yp = {TK / 8, pitch_ld(TK / 8)};
    extern __shared__ uint4 shared[];
    uint4 *q = shared, *tile = q + HEADS * y.ld, *p = tile + TK * y.ld;
    float *s = (float *)(p + HEADS * yp.ld), *inverse = s + 2 * HEADS * sh::S_LD;
    struct source *src = (struct source *)(inverse + HEADS); /* [2][TK], by the tile's parity */

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key0 = warp * MINE;
    /* This thread's scores: [tile][head of its warp][E]. */
    float *kept = scratch + (int64_t)blockIdx.x * HEADS * KEPT + warp * ROWS * TK + lane * E;

    for (int32_t item = blockIdx.x; item < j.T * groups; item += gridDim.x) {
        const int32_t t = item / groups, h0 = item % groups * HEADS;
        struct attn_keys ks;
        if (!attn_keys_of(j, t, &ks)) continue;
        const int32_t tiles = (ks.n + TK - 1) / TK;
        const bool keep = ks.n <= KEPT;

        for (int i = threadIdx.x; i < HEADS * y.pieces; i += THREADS) {
            const int h = i / y.pieces, piece = i % y.pieces;
            uint4 x = make_uint4(0, 0, 0, 0);
            if (h0 + h < j.H)
                x = __ldg((const uint4 *)j.q + ((int64_t)t * j.H + h0 + h) * y.pieces + piece);
            q[y.at(h, piece)] = x;
        }
        if (threadIdx.x < TK) src[threadIdx.x] = source_of(j, ks, threadIdx.x);
        __syncthreads();

        struct fetch next;
        float max[ROWS], sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            max[r] = -kern_float(0x7f800000u);
            sum[r] = 0.0f;
        }
        next.load(src, key0, MINE, d, rd);
        for (int32_t i = 0; i < tiles; i++) {
            struct source *after = src + (i + 1) % 2 * TK;
            next.store(src + i % 2 * TK, key0, MINE, d, rd, y, tile);
            if (threadIdx.x < TK)
                after[threadIdx.x] = source_of(j, ks, (i + 1) * TK + (int32_t)threadIdx.x);
            __syncthreads();
            if (i + 1 < tiles) next.load(after, key0, MINE, d, rd);
            score_tile<sh>(d, y, q, tile, s);
            __syncthreads();
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int e = 0; e < E; e++) {
                    const float x =
                        score_in<sh>(s, warp * ROWS + r, lane * E + e, i * TK, ks.n, j.scale);
                    max[r] = fmaxf(max[r], x); /* passes over NaN */
                    if (keep) kept[(i * HEADS + r) * TK + e] = x;
                }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) max[r] = dev_warp_max(max[r]);

        float o[MT][2 * PAIRS][4] = {};
        for (int32_t i = tiles - 1; i >= 0; i--) {
            struct source *after = src + (i + 1) % 2 * TK; /* of tile i - 1 */
            float x[ROWS][E];
            if (keep) {
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int e = 0; e < E; e++) x[r][e] = kept[(i * HEADS + r) * TK + e];
            }
            if (i < tiles - 1) next.store(src + i % 2 * TK, key0, MINE, d, rd, y, tile);
            if (!keep) {
                __syncthreads();
                score_tile<sh>(d, y, q, tile, s);
                __syncthreads();
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int e = 0; e < E; e++)
                        x[r][e] =
                            score_in<sh>(s, warp * ROWS + r, lane * E + e, i * TK, ks.n, j.scale);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                uint16_t *to = (uint16_t *)&p[yp.at(warp * ROWS + r, lane * E / 8)] + lane * E % 8;
#pragma unroll
                for (int e = 0; e < E; e++) {
                    const float w = expf(x[r][e] - max[r]);
                    sum[r] += w;
                    to[e] = kern_bf16_encode(w);
                }
            }
            if (i > 0 && threadIdx.x < TK)
                after[threadIdx.x] = source_of(j, ks, (i - 1) * TK + (int32_t)threadIdx.x);
            __syncthreads();
            if (i > 0) next.load(after, key0, MINE, d, rd);
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
            __syncthreads();
        }

#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int h = warp * ROWS + r;
            const float sink = h0 + h < j.H ? j.sink[h0 + h] : 0.0f;
            const float den = dev_warp_sum(sum[r]) + expf(sink - max[r]);
            if (lane == 0) inverse[h] = 1.0f / den;
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < MT;
             m++) { /* through the queries' place, so that rows are written whole */
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
        __syncthreads();
    }
}

template <int MT, int TK, int D, int RD>
static void launch(struct kern_stream *s, const struct attn_job *j)
{
    using sh = shape<MT, TK, D, RD>;
    const int32_t groups = (int32_t)cuda_ceil(j->H, sh::HEADS);
    const size_t most = sh::bytes(D ? D : MAX_WIDTH);
    const int32_t room = s->n_sm * (MT == 4 ? 1 : 2), items = j->T * groups;
    float *scratch =
        (float *)cuda_scratch(s, CUDA_SLOT_OP, (size_t)room * sh::HEADS * KEPT * sizeof *scratch);
    if (!scratch) return;
    CUDA_SHARED((tiled_kernel<MT, TK, D, RD>), most);
    tiled_kernel<MT, TK, D, RD>
        <<<(unsigned)(items < room ? items : room), THREADS, sh::bytes(j->k.d), s->cu>>>(*j, groups,
                                                                                         scratch);
}
static void launch_tiled(struct kern_stream *s, const struct attn_job *j)
{
    if (s->arch == 120 && j->k.d == 512 && j->k.rd == 64)
        launch<2, 32, 512, 64>(s, j); /* 99 KiB of shared memory */
    else if (s->arch == 120)
        launch<2, 32, 0, 0>(s, j);
    else if (j->H <= 16 || (int64_t)j->T * cuda_ceil(j->H, 64) * 2 <= s->n_sm)
        launch<1, 64, 0, 0>(s, j);
    else
        launch<4, 64, 0, 0>(s, j);
}

static bool aligned(const struct attn_job *j)
{
    return (((uintptr_t)j->q | (uintptr_t)j->kv | (uintptr_t)j->o | (uintptr_t)j->k.pages) & 15) ==
           0;
}
/* Clusters of n CTAs, one for each 64 heads of a row, find room at once. */
static bool clusters_fit(const struct kern_stream *s, const struct attn_job *j, int n)
{
    return j->T * cuda_ceil(j->H, 64) * n <= s->n_sm;
}
/* Pairs of CTAs that take row after row are done sooner than CTAs with a row each, from where each
 * pair has more than one (two thirds of the multiprocessors: 89 rows on 132) to three. */
static bool pairs_suit(const struct kern_stream *s, const struct attn_job *j)
{
    const int64_t items = j->T * cuda_ceil(j->H, 64);
    return items * 3 > s->n_sm * 2 && items <= s->n_sm / 2 * ATTN_PAIR_ROWS;
}
/* The model's width on sm_90a. Clusters of eight count as nine: some multiprocessors have too few
 * neighbours to be part of one. */
static bool attention_model(struct kern_stream *s, const struct attn_job *j)
{
    /* Taken however many rows there are: when they are few, later, memory may be used up. */
    void *room = cuda_scratch(s, CUDA_SLOT_OP, (size_t)s->n_sm * ATTN_SPREAD_ROOM);
    if (!room) return true; /* cuda_done() knows */
    if (clusters_fit(s, j, 9)) return attention_spread(s, j, room);
    return clusters_fit(s, j, 2) || pairs_suit(s, j) ? attention_few(s, j) : attention_wgmma(s, j);
}
static bool tiles_fit(const struct attn_job *j)
{
    const int32_t d = j->k.d, rd = j->k.rd;
    if (j->act != KERN_BF16 || j->k.kv_fmt == KERN_KV_F32 || d % 16 || d > MAX_WIDTH) return false;
    return j->k.kv_fmt == KERN_KV_BF16 || ((d + rd) % 16 == 0 && rd % 8 == 0);
}

static bool by_wgmma(const struct kern_stream *s, const struct attn_job *j)
{
    return s->arch == 90 && j->k.d == 512 && j->k.rd == 64;
}

int attention_run(struct kern_stream *s, const struct kern_attention *p,
                  const struct kern_heads_rope *back, bool *slots)
{
    struct attn_job j = {};
    *slots = false;
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
    if (!tiles_fit(&j) || !aligned(&j)) {
        plain_kernel<<<(unsigned)(j.T * j.H), THREADS, 0, s->cu>>>(j);
    } else if (!by_wgmma(s, &j)) {
        launch_tiled(s, &j);
    } else {
        /* Kernels that take row after row store so; attention_wgmma() reads angles by 16 bytes. */
        *slots = back && back->inverse && back->rd == j.k.rd && !clusters_fit(s, &j, 2) &&
                 (((uintptr_t)back->cos | (uintptr_t)back->sin) & 15) == 0;
        if (*slots) j.cos = back->cos, j.sin = back->sin;
        if (!attention_model(s, &j)) return TOW_EDEVICE;
    }
    return cuda_done(s, "attention");
}

extern "C" int kern_attention_cuda(struct kern_stream *s, const struct kern_attention *p)
{
    bool slots;
    return attention_run(s, p, NULL, &slots);
}
