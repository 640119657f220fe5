/* kernels/moe/moe_wgmma.cuh - tiles of pairs times their expert's stored weights by whole
 * warpgroups (sm_90a), in both kinds of products: bf16 (codes widened, exactly) and e4m3 (codes as
 * they are; many pairs at once by moe_codes_cuda.cu, which has parts of this).
 *
 * Plan     A block stays and goes from tile to tile: up to N pairs and 128 weight rows, 64 each of
 *          w1 and w3 or 128 of w2. One thread keeps a ring of stages of 128 k filled by the copy
 *          engine: stored weights, and prepared rows of x as they lie (see below). A warp looks up
 *          what else a tile takes from memory (struct wg_tell). Two warpgroups of consumers have 64
 *          of the weight rows each: they make operand A in registers, once for all pairs of the
 *          tile, and multiply as many columns as the tile has, rounded up. Both are a tile or so
 *          ahead, so that a consumer never waits for memory itself.
 * Rows     Of w1 and w3, each consumer thread has the same ones, so that it has a pair's gate and
 *          up.
 * Images   x lies as stages want it: pieces of 128 bytes of each pair's row, [piece][place], in
 *          wgmma's swizzle by place % 8. An expert's first place is a multiple of 8
 *          (moe_plan.align).
 *          e4m3: of a piece's 128 k, number 32 t + 8 i + 4 h + e is byte 32 i + 16 h + 4 t + e',
 *          where e' exchanges 1 and 2: thread t's eight values of instruction i in its slots of k.
 *          A row has one scale, a second array's: see Scales.
 *          bf16: two pieces have 128 k; number 32 t + 4 q + 2 h + e is value 16 q + 8 h + 2 t + e.
 * Scales   e4m3: a row of x is quantized by one scale, that of its largest block of 128. Its codes
 *          stand for A128's values but where these are below e4m3's normal numbers; there they are
 *          off by 2^-10 of the scale, 2^-17.8 of the row's largest value, at most. So stages add up
 *          without scales of x: read for each of a stage's columns by each warp, they cost more of
 *          shared memory than wgmma's own reads leave.
 * Order    bf16: moe_product.cuh's, so its bits. e4m3: of each 256 k (mxfp4) or 128 k (fp8, whose
 *          blocks have scales) eight or four instructions of 32, from zero (wg_chain); total += sum,
 *          or of fp8 total = fmaf(sum, scale of the block, total), times the weight row's power of
 *          two. At any number of columns. The scale of the row of x, a power
 *          of two that changes no digit, is for who reads the result: consumers have no time.
 * Gates    e4m3: nor have they for the activation, which whoever makes images of it computes. Gate
 *          and up are two bf16 of a word; of eight places and eight columns the 64 words lie side by
 *          side, those of even places first, so that a warp stores 128 bytes at once.
 * Exact    e4m3 holds an mxfp4 code times 2^-5 to 2^6: scales count from the largest of their row,
 *          and arrays with wider rows are not placed for this kind (kernels/cuda/place.cu). nvfp4
 *          scales have three bits of their own, which e4m3 cannot hold: bf16 always.
 */
#ifndef KERN_MOE_WGMMA_CUH
#define KERN_MOE_WGMMA_CUH

#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/moe_product.cuh"

enum { WG = 128 /* threads */, WG_CONSUMERS = 2, WG_THREADS = WG * (WG_CONSUMERS + 1), WG_M = 128 };

/* Sums a thread has of N columns, rounded up to 32. */
#define WG_SUMS(N) (((N) + 31) / 32 * 16)

/* e4m3: stages of 128 k whose sum starts from zero; fp8's each have a scale. */
template <enum kern_wfmt F> struct wg_chain {
    enum { STAGES = F == KERN_W_MXFP4 ? 2 : 1 };
};

template <enum kern_wfmt F, bool E4M3, int N> struct wg_shape {
    enum {
        PIECES = E4M3 ? 1 : 2, /* of x in 128 k */
        ROW = moe_format<F>::CODES,
        SCALES = moe_format<F>::SCALES,
        /* Scales come by 16 bytes, for this many stages. */
        AHEAD = SCALES > 0 ? 16 / (SCALES > 0 ? SCALES : 1) : 1,
        SCALE_BYTES = SCALES > 0 ? WG_M * 16 : 0,
        COLUMNS = (N + 31) / 32 * 32,
        X_BYTES = PIECES * N * 128,
        SCALES_AT = X_BYTES + WG_M * ROW,
        STAGE = (SCALES_AT + SCALE_BYTES + 1023) / 1024 * 1024,
        /* Blocks meant to share a multiprocessor: warps wait for each of their instructions, so there
         * are sixteen of consumers where sums leave registers for them. */
        PER_SM = N > 64 ? 1 : 2,
        /* Registers of a thread that multiplies, fetches: 504 of three, or 240. */
        MULTIPLIES = PER_SM == 1 ? 232 : 96,
        FETCHES = PER_SM == 1 ? 40 : 48,
        /* Beside the stages: what a block costs the machine, the ring's alignment, and the kernel's
         * tmp, told and barriers. */
        OTHER = 1024 + 1024 + WG_CONSUMERS * WG / 32 * 512 +
                2 * (16 + COLUMNS * (E4M3 ? 0 : 4) + 16 + 16 + WG_M * 8) + 256,
        ROOM = (228 * 1024 / PER_SM - OTHER) / STAGE,
        S = ROOM < 8 ? ROOM : 8, /* stages */
        BYTES = S * STAGE + 1024,
    };
    static_assert((int)S >= (E4M3 ? 2 * wg_chain<F>::STAGES : 3),
                  "a stage, or a chain of them, is multiplied while the next comes");
};

/* Weights as the copy engine knows them: of w1 and w3, or w2 twice. */
struct wg_maps {
    CUtensorMap codes[2], scales[2];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* A number that a warp's threads have in common, so that the compiler knows. */
static __device__ __forceinline__ int32_t wg_uniform(int32_t x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

/* Tiles of pairs times parts of the weight rows, by turns of blocks or, `width` neighbouring parts
 * at a time, clusters. Turns go there and back: tiles come by size (moe_cuda.cu), and who has the
 * largest of a turn has the smallest of the next. */
struct wg_items {
    int at, step, two, n; /* the first, to the next, to the one after that, all */
    int parts, width, rank;
};
static __device__ __forceinline__ struct wg_items wg_turns(int who, int of, int n, int parts,
                                                           int width, int rank)
{
    return {who, 2 * (of - who) - 1, 2 * of, n, parts, width, rank};
}
static __device__ __forceinline__ int wg_part(const struct wg_items &i, int at)
{
    return at % i.parts * i.width + i.rank;
}

/* The ring, and where a group of threads is in it: slots in turn, the phase of their barriers. */
struct wg_ring {
    uint8_t *at;
    uint64_t *full, *empty; /* [S] */
    int slot;
    uint32_t phase;
};
template <int S> static __device__ __forceinline__ void wg_next(struct wg_ring *r)
{
    if (++r->slot == S) r->slot = 0, r->phase ^= 1;
}

/* Rows g and g + 8 of a thread of a consumer warp among the 128 of a stage: it has eight of each
 * matrix, or sixteen. Of codes, those of down are neighbours, for wg_store_codes(); which one is
 * first alternates, so that eight lanes that read 64 bytes or the like of each fall into all
 * banks. */
template <bool E4M3> static __device__ __forceinline__ int wg_place(bool up, int warp, int m)
{
    const int g = threadIdx.x % 32 / 4;
    return up ? m * 64 + warp * 8 + g : warp * 16 + (E4M3 ? g * 2 + (m ^ g % 2) : m * 8 + g);
}

/* What a warp looks up for the consumers, two tiles in turn. */
template <bool E4M3, int N> struct alignas(16) wg_tell {
    float weight[E4M3 ? 4 : N]; /* up: of the pairs */
    float post[WG_M];           /* what sums of a row are multiplied with at the end */
    int32_t top[WG_M];          /* mxfp4, e4m3 */
    struct moe_tile tile;
    int part;
};
struct wg_told {
    uint64_t *there, *read; /* [2] */
    int slot;
    uint32_t phase;
};

/* This warp is done with a slot: each of its threads says so. One of them for all, after
 * __syncwarp(), is no faster, and compute-sanitizer (racecheck) does not see that it is for all. */
static __device__ __forceinline__ void wg_release(uint64_t *empty)
{
    bar_arrive(empty);
}

/* ------------------------------------------------------------------ producers */

template <enum kern_wfmt F, bool E4M3, int N>
static __device__ __forceinline__ void wg_produce(const struct moe_product &p,
                                                  const struct wg_maps &maps, struct wg_ring r,
                                                  const struct wg_items &items)
{
    using S = wg_shape<F, E4M3, N>;
    const int n_kb = p.kp / 128;
    for (int at = items.at, step = items.step; at < items.n; at += step, step = items.two - step) {
        const struct moe_tile tile = p.plan.tiles[at / items.parts];
        if (tile.n == 0) break;
        const int part = wg_part(items, at), rows = (tile.n + 7) / 8 * 8;
        const int w_row[2] = {part * (p.up ? 64 : 128), part * (p.up ? 64 : 128) + (p.up ? 0 : 64)};
        for (int kb = 0; kb < n_kb; kb++, wg_next<S::S>(&r)) {
            uint8_t *to = r.at + r.slot * S::STAGE;
            uint64_t *full = r.full + r.slot;
            const bool scales = S::SCALES > 0 && kb % S::AHEAD == 0;
            bar_wait(r.empty + r.slot, r.phase ^ 1);
            bar_expect(full,
                       rows * 128 * S::PIECES + WG_M * S::ROW + (scales ? (int)S::SCALE_BYTES : 0));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const CUtensorMap *codes = &maps.codes[p.up ? i : 0],
                                  *scale = &maps.scales[p.up ? i : 0];
                stack_load(to + S::X_BYTES + i * 64 * S::ROW, codes, full, kb * S::ROW, w_row[i],
                           tile.expert);
                if (scales)
                    stack_load(to + S::SCALES_AT + i * 64 * 16, scale, full, kb * S::SCALES,
                               w_row[i], tile.expert);
            }
#pragma unroll
            for (int i = 0; i < S::PIECES; i++)
                bulk_load(to + i * N * 128,
                          p.image +
                              ((int64_t)(kb * S::PIECES + i) * p.plan.room + tile.first) * 128,
                          rows * 128, full);
        }
    }
}

/* By one warp, which has read a tile's rows before it waits for room. The last one is empty. */
template <enum kern_wfmt F, bool E4M3, int N>
static __device__ __forceinline__ void
wg_look_up(const struct moe_product &p, struct wg_told t,
           struct wg_tell<E4M3, wg_shape<F, E4M3, N>::COLUMNS> *to, const struct wg_items &items)
{
    enum { EACH = WG_M / 32, PAIRS = 4 };
    const int lane = threadIdx.x % 32;
    for (int at = items.at, step = items.step;; at += step, step = items.two - step) {
        const struct moe_tile none = {0, 0, 0},
                              tile = at < items.n ? p.plan.tiles[at / items.parts] : none;
        const int part = wg_part(items, at);
        auto *out = to + t.slot;
        const struct cuda_weight *w[2] = {&p.a.w[tile.expert], &p.b.w[tile.expert]};
        const uint8_t *nan_rows[2];
        float unit[2], post[EACH];
        int top[EACH];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            nan_rows[m] = moe_nan_rows(p.a, w[m], p.rows, p.k);
            unit[m] = E4M3 ? 1.0f : DEV_E2M1_POST;
            if (F == KERN_W_NVFP4) unit[m] *= w[m]->scale2;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) { /* all of it at once */
            const int m = i >= EACH / 2, in = i * 32 + lane,
                      row = p.up ? part * 64 + in % 64 : part * WG_M + in,
                      there = row < p.rows ? row : p.rows - 1;
            top[i] = E4M3 && F == KERN_W_MXFP4 ? cuda_row_tops(w[m]->scale, p.rows, p.k)[there] : 0;
            post[i] = nan_rows[m][there] ? NAN : unit[m];
        }
        bar_wait(t.read + t.slot, t.phase ^ 1);
        for (int i0 = 0; i0 < tile.n && p.up && !E4M3; i0 += 32 * PAIRS) {
            int32_t pair[PAIRS];
#pragma unroll
            for (int u = 0; u < PAIRS; u++) {
                const int i = i0 + u * 32 + lane;
                pair[u] = i < tile.n ? p.plan.order[tile.first + i] : 0;
            }
#pragma unroll
            for (int u = 0; u < PAIRS; u++) {
                const int i = i0 + u * 32 + lane;
                if (i < tile.n) out->weight[i] = p.weights[pair[u]];
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (E4M3 && F == KERN_W_MXFP4) {
                out->top[i * 32 + lane] = top[i];
                post[i] *= dev_mxfp4_unit(top[i]);
            }
            out->post[i * 32 + lane] = post[i];
        }
        if (lane == 0) out->tile = tile, out->part = part;
        wg_release(t.there + t.slot);
        if (tile.n == 0) break;
        t.slot ^= 1, t.phase ^= t.slot ^ 1;
    }
}

/* ------------------------------------------------------------------ consumers */

static __device__ __forceinline__ uint32_t wg_word(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
/* A thread's scales of its two rows for the next stages, from the 16 bytes that each row has in
 * this one: a byte (mxfp4) or two (nvfp4) a stage, the next ones lowest. */
template <class S>
static __device__ __forceinline__ void wg_scales(const uint8_t *stage, const int (&row)[2],
                                                 uint32_t (&out)[2])
{
    const uint32_t c = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const uint4 v = *(const uint4 *)(stage + S::SCALES_AT + row[m] * 16);
        const uint32_t at = S::SCALES == 4 ? c | (c + 4) << 4 : 2 * c | (2 * c + 1) << 4;
        out[m] = __byte_perm(__byte_perm(v.x, v.y, at), __byte_perm(v.z, v.w, at), 0x5410);
    }
}
/* What a consumer thread knows of its two rows in a tile. */
struct wg_rows {
    int place[2];            /* in a stage */
    const uint8_t *scale[2]; /* fp8: of its row of blocks */
    uint2 table[2];          /* mxfp4, e4m3: see dev_mxfp4_table() */
};

template <enum kern_wfmt F, bool E4M3, class T>
static __device__ __forceinline__ void wg_rows_of(const struct moe_product &p, const T &told,
                                                  int part, struct wg_rows *rows)
{
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int place = rows->place[m] = wg_place<E4M3>(p.up, threadIdx.x / 32, m);
        if (E4M3 && F == KERN_W_FP8) {
            const int row = p.up ? part * 64 + place % 64 : part * WG_M + place,
                      there = row < p.rows ? row : p.rows - 1;
            rows->scale[m] =
                (p.up && m ? p.b.w : p.a.w)[told.tile.expert].scale + there / 128 * p.a.scale_bytes;
        }
        if (E4M3 && F == KERN_W_MXFP4) rows->table[m] = dev_mxfp4_table(told.top[place]);
    }
}

/* ------------------------------------------------------------------ consumers: e4m3 */

/* What is fetched of a chain's stages before their operands are made: mxfp4's codes, and scales for
 * them and stages after. */
template <enum kern_wfmt F> struct wg_codes {
    uint4 v[wg_chain<F>::STAGES][2];
    uint32_t scales[2];
};
template <class S, enum kern_wfmt F>
static __device__ __forceinline__ void wg_fetch(const struct wg_ring &r, const struct wg_rows &rows,
                                                int kb, int c, struct wg_codes<F> *codes)
{
    const uint8_t *at = r.at + r.slot * S::STAGE;
    bar_wait(r.full + r.slot, r.phase);
    __syncwarp(); /* whole warps go on */
    if constexpr (F == KERN_W_MXFP4) {
#pragma unroll
        for (int m = 0; m < 2; m++)
            codes->v[c][m] =
                *(const uint4 *)(at + S::X_BYTES + rows.place[m] * S::ROW + threadIdx.x % 4 * 16);
        if (kb % S::AHEAD == 0) wg_scales<S>(at, rows.place, codes->scales);
    }
}

/* Operands of a stage's four instructions. */
template <class S, enum kern_wfmt F>
static __device__ __forceinline__ void wg_operands(const uint8_t *stage, const struct wg_rows &rows,
                                                   int c, struct wg_codes<F> *codes,
                                                   uint32_t (&a)[4][4])
{
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        if constexpr (F == KERN_W_FP8) { /* in the copy engine's swizzle */
            const int g = rows.place[m] % 8;
            const uint8_t *at = stage + S::X_BYTES + rows.place[m] * S::ROW;
            const uint4 v[2] = {*(const uint4 *)(at + ((2 * q) ^ g) * 16),
                                *(const uint4 *)(at + ((2 * q + 1) ^ g) * 16)};
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i][m] = wg_word(v[i / 2], i % 2 * 2),
                a[i][2 + m] = wg_word(v[i / 2], i % 2 * 2 + 1);
        } else {
            const uint2 table = dev_mxfp4_table_at(rows.table[m], codes->scales[m] & 255);
            codes->scales[m] >>= 8;
#pragma unroll
            for (int i = 0; i < 4; i++)
                dev_e2m1x8_e4m3(wg_word(codes->v[c][m], i), table, &a[i][m], &a[i][2 + m]);
        }
    }
}

/* Four instructions of W columns of a stage, the first of their chain or not. */
template <int W>
static __device__ __forceinline__ void wg_times(const uint32_t (&a)[4][4], uint64_t x, bool first,
                                                float (&sum)[W / 2])
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_e4m3(sum, a[i], x + 2 * i, i > 0 || !first);
    wgmma_commit();
}

/* total += sum, of fp8 times the scales of its rows. */
template <enum kern_wfmt F, int W, int SUMS>
static __device__ __forceinline__ void wg_add(const float (&sum)[W / 2], const float (&w)[2],
                                              int first, float (&total)[SUMS])
{
#pragma unroll
    for (int i = 0; i < W / 2; i++) {
        float &t = total[first / 2 + i];
        t = F == KERN_W_FP8 ? fmaf(sum[i], w[i % 4 / 2], t) : t + sum[i];
    }
}

/* All stages of a tile of W columns, a chain at a time. The next one's codes are fetched while they
 * are multiplied. */
template <enum kern_wfmt F, int N, int W>
static __device__ __forceinline__ void wg_consume(const struct moe_product &p, struct wg_ring *r,
                                                  const struct wg_rows &rows,
                                                  float (&total)[WG_SUMS(N)])
{
    using S = wg_shape<F, true, N>;
    enum { CHAIN = wg_chain<F>::STAGES };
    const int n_kb = p.kp / 128;
    struct wg_codes<F> codes;
    struct wg_ring ahead = *r;
#pragma unroll
    for (int c = 0; c < CHAIN; c++, wg_next<S::S>(&ahead))
        wg_fetch<S, F>(ahead, rows, c, c, &codes);
    for (int kb = 0; kb < n_kb; kb += CHAIN) {
        uint64_t *empty[CHAIN];
        uint64_t x[CHAIN];
        float w[2] = {1.0f, 1.0f}, sum[W / 2];
        uint32_t a[CHAIN][4][4];
        if (F == KERN_W_FP8) {
            w[0] = moe_block_scale(p.a, rows.scale[0], 0, kb);
            w[1] = moe_block_scale(p.a, rows.scale[1], 0, kb);
        }
#pragma unroll
        for (int c = 0; c < CHAIN; c++, wg_next<S::S>(r)) {
            const uint8_t *at = r->at + r->slot * S::STAGE;
            empty[c] = r->empty + r->slot;
            x[c] = wgmma_rows(at);
            wg_operands<S, F>(at, rows, c, &codes, a[c]);
        }
#pragma unroll
        for (int c = 0; c < CHAIN; c++) wg_times<W>(a[c], x[c], c == 0, sum);
        if (kb + CHAIN < n_kb) {
#pragma unroll
            for (int c = 0; c < CHAIN; c++, wg_next<S::S>(&ahead))
                wg_fetch<S, F>(ahead, rows, kb + CHAIN + c, c, &codes);
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        wg_add<F, W>(sum, w, 0, total);
#pragma unroll
        for (int c = 0; c < CHAIN; c++) wg_release(empty[c]);
    }
}

template <enum kern_wfmt F, int N>
static __device__ __forceinline__ void
wg_consume_tile(const struct moe_product &p, struct wg_ring *r, const struct wg_rows &rows, int n,
                float (&total)[WG_SUMS(N)])
{
    static_assert(N == 32, "widths of below");
    if (n <= 8)
        wg_consume<F, N, 8>(p, r, rows, total);
    else if (n <= 16)
        wg_consume<F, N, 16>(p, r, rows, total);
    else
        wg_consume<F, N, 32>(p, r, rows, total);
}

/* ------------------------------------------------------------------ consumers: bf16 */

/* The same for W columns at once. The first half of a stage's k is under way while the second's
 * codes are widened. */
template <enum kern_wfmt F, int N, int W>
static __device__ __forceinline__ void wg_widen(const struct moe_product &p, struct wg_ring *r,
                                                const struct wg_rows &rows,
                                                float (&total)[WG_SUMS(N)])
{
    using S = wg_shape<F, false, N>;
    const int n_kb = p.kp / 128, c = threadIdx.x % 4;
    float(&sum)[W / 2] = *(float(*)[W / 2]) total;
    uint32_t scales[2];
    for (int kb = 0; kb < n_kb; kb++, wg_next<S::S>(r)) {
        const uint8_t *at = r->at + r->slot * S::STAGE;
        uint4 code[2];
        uint32_t factor[2][2], a[2][4][4];
        bar_wait(r->full + r->slot, r->phase);
        __syncwarp(); /* whole warps go on */
        if (kb % S::AHEAD == 0) wg_scales<S>(at, rows.place, scales);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            code[m] = *(const uint4 *)(at + S::X_BYTES + rows.place[m] * S::ROW + c * 16);
            factor[m][0] = factor[m][1] = dev_mxfp4_factor(scales[m] & 255);
            if (F == KERN_W_NVFP4) {
                factor[m][0] = dev_nvfp4_factor(scales[m] & 255);
                factor[m][1] = dev_nvfp4_factor(scales[m] >> 8 & 255);
            }
            scales[m] >>= 2 * S::SCALES;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    uint32_t v[4];
                    dev_e2m1x8(wg_word(code[m], h * 2 + j), factor[m][h], v);
                    a[h][2 * j][m] = v[0], a[h][2 * j][2 + m] = v[1];
                    a[h][2 * j + 1][m] = v[2], a[h][2 * j + 1][2 + m] = v[3];
                }
            const uint64_t x = wgmma_rows(at + h * N * 128);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) wgmma_bf16(sum, a[h][i], x + 2 * i, 1);
            wgmma_commit();
        }
        wgmma_wait<0>(); /* the other group multiplies meanwhile */
        wgmma_pin(total);
        wg_release(r->empty + r->slot);
    }
}

template <enum kern_wfmt F, int N>
static __device__ __forceinline__ void wg_widen_tile(const struct moe_product &p, struct wg_ring *r,
                                                     const struct wg_rows &rows, int n,
                                                     float (&total)[WG_SUMS(N)])
{
    if constexpr (N == MOE_FEW) {
        switch ((n + 7) / 8) {
        case 1: wg_widen<F, N, 8>(p, r, rows, total); break;
        case 2: wg_widen<F, N, 16>(p, r, rows, total); break;
        case 3: wg_widen<F, N, 24>(p, r, rows, total); break;
        default: wg_widen<F, N, 32>(p, r, rows, total); break;
        }
    } else if constexpr (N == MOE_MIDDLE) {
        switch ((n + 15) / 16) {
        case 1: wg_widen<F, N, 16>(p, r, rows, total); break;
        case 2: wg_widen<F, N, 32>(p, r, rows, total); break;
        case 3: wg_widen<F, N, 48>(p, r, rows, total); break;
        default: wg_widen<F, N, 64>(p, r, rows, total); break;
        }
    } else {
        switch ((n + 31) / 32) {
        case 1: wg_widen<F, N, 32>(p, r, rows, total); break;
        case 2: wg_widen<F, N, 64>(p, r, rows, total); break;
        case 3: wg_widen<F, N, 96>(p, r, rows, total); break;
        case 4: wg_widen<F, N, 128>(p, r, rows, total); break;
        case 5: wg_widen<F, N, 160>(p, r, rows, total); break;
        case 6: wg_widen<F, N, 192>(p, r, rows, total); break;
        case 7: wg_widen<F, N, 224>(p, r, rows, total); break;
        default: wg_widen<F, N, 256>(p, r, rows, total); break;
        }
    }
}

/* ------------------------------------------------------------------ results */

/* Two rounded numbers, each as a float. */
static __device__ __forceinline__ float2 wg_round(float a, float b)
{
    return __bfloat1622float2(__floats2bfloat162_rn(a, b));
}
static __device__ __forceinline__ uint32_t wg_pack(float a, float b)
{
    const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
    uint32_t u;
    memcpy(&u, &two, 4);
    return u;
}

/* Sums to results, bf16: up, 32 pairs at a time of a warp's eight rows; down, 16 of its sixteen.
 * They are turned in `tmp` [32] so that a thread has eight of one pair. */
template <int N, bool UP>
static __device__ __forceinline__ void
wg_store(const struct moe_product &p, const struct wg_tell<false, (N + 31) / 32 * 32> &told,
         int part, int group, const int (&place)[2], uint4 *tmp, const float (&total)[WG_SUMS(N)])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WG / 32, c = lane % 4;
    const float post[2] = {told.post[place[0]], told.post[place[1]]};
    const int col = UP ? part * 64 + group * 32 + warp * 8
                       : part * WG_M + group * 64 + warp * 16 + lane / 8 % 2 * 8;
    const int pair = UP ? lane : lane / 16 * 8 + lane % 8;
    uint16_t *out = p.out + (int64_t)(told.tile.first + pair) * p.rows + col;
#pragma unroll
    for (int n0 = 0; n0 < N; n0 += UP ? 32 : 16) {
        if (n0 >= told.tile.n) break;
        uint32_t v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (UP) {
                const float *s = total + (n0 / 8 + j) * 4;
                const float2 weight = *(const float2 *)(told.weight + n0 + j * 8 + c * 2);
                float y[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float2 gu = wg_round(s[e] * post[0], s[2 + e] * post[1]);
                    y[e] = dev_gate(gu.x, gu.y, p.limit);
                }
                v[j] = wg_pack(y[0] * weight.x, y[1] * weight.y);
            } else {
                const float *s = total + (n0 / 8 + j / 2) * 4 + j % 2 * 2;
                v[j] = wg_pack(s[0] * post[j % 2], s[1] * post[j % 2]);
            }
        }
        dev_store_matrix4_trans(tmp + lane, v);
        __syncwarp();
        if (n0 + pair < told.tile.n && col < p.rows)
            *(uint4 *)(out + (int64_t)n0 * p.rows) = tmp[lane];
        __syncwarp();
    }
}

/* The same of codes, of n pairs, without the scale of a row of x. Nothing passes through shared
 * memory, which answers late. Of up, a pair's gate and up lie as Gates above says; of
 * down, a thread has two neighbouring rows. */
template <int N, bool UP>
static __device__ __forceinline__ void
wg_store_codes(const struct moe_product &p, const struct wg_tell<true, (N + 31) / 32 * 32> &told,
               int n, int part, int group, const int (&place)[2], const float (&total)[WG_SUMS(N)])
{
    enum { AT_ONCE = 4 /* times eight pairs */ };
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WG / 32, g = lane / 4, c = lane % 4;
    const float post[2] = {told.post[place[0]], told.post[place[1]]};
    const int col =
        UP ? part * 64 + group * 32 + warp * 8 : part * WG_M + group * 64 + warp * 16 + g * 2;
    const uint32_t order = g % 2 ? 0x1032 : 0x3210;
    const int64_t ld = p.rows, first_place = told.tile.first;
    uint16_t *out = p.out + (first_place + c * 2) * ld + col;
    uint32_t *gates = (uint32_t *)p.out + first_place * ld + col * 8 + c * 8 + g;
    if (part * (UP ? 64 : WG_M) >= p.rows) return; /* rows are a multiple of 128 */
#pragma unroll
    for (int first = 0; first < N; first += AT_ONCE * 8) {
        if (first >= n) break;
#pragma unroll
        for (int n0 = first; n0 < first + AT_ONCE * 8; n0 += 8, out += 8 * ld, gates += 8 * ld) {
            const float *s = total + n0 / 2;
            const uint32_t one = wg_pack(s[0] * post[0], s[2] * post[1]),
                           two = wg_pack(s[1] * post[0], s[3] * post[1]);
            if constexpr (UP) {
                if (n0 < n) gates[0] = one, gates[32] = two;
            } else {
                if (n0 + c * 2 < n) *(uint32_t *)out = __byte_perm(one, 0, order);
                if (n0 + c * 2 + 1 < n) *(uint32_t *)(out + ld) = __byte_perm(two, 0, order);
            }
        }
    }
}

/* A group of consumers. */
template <enum kern_wfmt F, bool E4M3, int N>
static __device__ __forceinline__ void
wg_consume_all(const struct moe_product &p, struct wg_ring r, struct wg_told t,
               const struct wg_tell<E4M3, wg_shape<F, E4M3, N>::COLUMNS> *told, int group,
               uint4 *tmp)
{
    for (;;) {
        const auto &now = told[t.slot];
        bar_wait(t.there + t.slot, t.phase);
        __syncwarp();
        const int n = wg_uniform(now.tile.n), part = now.part;
        if (n == 0) break;
        struct wg_rows rows;
        wg_rows_of<F, E4M3>(p, now, part, &rows);
        float total[WG_SUMS(N)];
#pragma unroll
        for (int i = 0; i < WG_SUMS(N); i++) total[i] = 0.0f;
        if constexpr (E4M3) {
            wg_consume_tile<F, N>(p, &r, rows, n, total);
            if (p.up)
                wg_store_codes<N, true>(p, now, n, part, group, rows.place, total);
            else
                wg_store_codes<N, false>(p, now, n, part, group, rows.place, total);
        } else {
            wg_widen_tile<F, N>(p, &r, rows, n, total);
            if (p.up)
                wg_store<N, true>(p, now, part, group, rows.place, tmp, total);
            else
                wg_store<N, false>(p, now, part, group, rows.place, tmp, total);
        }
        wg_release(t.read + t.slot);
        t.slot ^= 1, t.phase ^= t.slot ^ 1;
    }
}

template <enum kern_wfmt F, bool E4M3, int N>
static __global__ void __launch_bounds__(WG_THREADS, (wg_shape<F, E4M3, N>::PER_SM))
    wg_kernel(const __grid_constant__ struct moe_product p,
              const __grid_constant__ struct wg_maps maps, int row_tiles)
{
    using S = wg_shape<F, E4M3, N>;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ uint64_t full[S::S], empty[S::S], there[2], read[2];
    __shared__ __align__(16) uint4 tmp[E4M3 ? 1 : WG_CONSUMERS * WG];
    __shared__ __align__(16) struct wg_tell<E4M3, S::COLUMNS> told[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::S; i++) {
            bar_init(full + i, 1);
            bar_init(empty + i, WG_CONSUMERS * WG);
        }
        for (int i = 0; i < 2; i++) bar_init(there + i, 32), bar_init(read + i, WG_CONSUMERS * WG);
        bar_init_done();
    }
    __syncthreads();
    cuda_await();
    cuda_hurry();
    struct wg_ring r = {shared, full, empty, 0, 0};
    const struct wg_told t = {there, read, 0, 0};
    const struct wg_items items =
        wg_turns((int)blockIdx.x, (int)gridDim.x, p.plan.max_tiles * row_tiles, row_tiles, 1, 0);
    r.at += (1024 - dev_shared(shared) % 1024) % 1024;
    const int group = wg_uniform((int)threadIdx.x / WG);
    if (group == WG_CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)S::FETCHES));
        const int warp = wg_uniform((int)threadIdx.x % WG / 32);
        if (warp == 0 && threadIdx.x % 32 == 0) wg_produce<F, E4M3, N>(p, maps, r, items);
        if (warp == 1) wg_look_up<F, E4M3, N>(p, t, told, items);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)S::MULTIPLIES));
        wg_consume_all<F, E4M3, N>(p, r, t, told, group, tmp + (E4M3 ? 0 : threadIdx.x / 32 * 32));
    }
}
#else
template <enum kern_wfmt F, bool E4M3, int N>
static __global__ void wg_kernel(const __grid_constant__ struct moe_product p,
                                 const __grid_constant__ struct wg_maps maps, int row_tiles)
{
}
#endif

/* Weights are read in tiles of 64 rows and `bytes` of codes, 16 of scales if there are any. */
static inline bool wg_describe(struct wg_maps *maps, const struct moe_product *p, int bytes,
                               bool scales)
{
    for (int i = 0; i < 2; i++) {
        const struct moe_matrix *m = i ? &p->b : &p->a;
        if (!cuda_stack_map(&maps->codes[i], m->data, p->rows, m->row_bytes, m->row_bytes,
                            p->n_experts, m->data_step, 64, bytes))
            return false;
        if (scales && !cuda_stack_map(&maps->scales[i], m->scale, p->rows, m->scale_bytes,
                                      m->scale_bytes, p->n_experts, m->scale_step, 64, 16))
            return false;
    }
    return true;
}

template <enum kern_wfmt F, bool E4M3, int N>
static int wg_launch(struct kern_stream *s, const struct moe_product *p)
{
    using S = wg_shape<F, E4M3, N>;
    struct wg_maps maps;
    if (E4M3 && p->kp % (128 * wg_chain<F>::STAGES)) return TOW_EINVAL; /* kern_dev_place's part */
    if (!wg_describe(&maps, p, S::ROW, S::SCALES > 0)) return TOW_EDEVICE;
    const int row_tiles = (int)cuda_ceil(p->rows, p->up ? 64 : WG_M);
    const int64_t items = (int64_t)p->plan.max_tiles * row_tiles, most = s->n_sm * S::PER_SM;
    if (items > INT32_MAX / 2) return TOW_EINVAL;
    CUDA_SHARED((wg_kernel<F, E4M3, N>), S::BYTES);
    cuda_launch_early(s, wg_kernel<F, E4M3, N>, dim3((unsigned)(items < most ? items : most)),
                      WG_THREADS, S::BYTES, *p, maps, row_tiles);
    return cuda_done(s, "moe");
}

#endif
