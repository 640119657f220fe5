/* kernels/moe/moe_wgmma.cuh - tiles of pairs times their expert's stored weights by whole
 * warpgroups (sm_90a), in both kinds of products: bf16 (codes widened, exactly) and e4m3 (codes as
 * they are).
 *
 * Plan     A block stays and goes from tile to tile: up to N pairs and 128 weight rows, 64 each of
 *          w1 and w3 or 128 of w2. One thread keeps a ring of stages of 128 k filled by the copy
 *          engine: stored weights, and prepared rows of x as they lie (see below). A warp looks up
 *          what else a tile takes from memory (struct wg_tell). Two warpgroups of consumers have 64
 *          of the weight rows each: they make operand A in registers, once for all pairs of the
 *          tile, and multiply as many columns as the tile has, rounded up. Both are a tile or so
 *          ahead, so that a consumer never waits for memory itself.
 * Chain    With two warps to a scheduler it is a consumer's own chain that binds, not the matrix
 *          unit. So by codes 64 columns are added up while the next ones are under way, and the
 *          next stage's codes are fetched before the last ones are done.
 * Rows     Of w1 and w3, each consumer thread has the same ones, so that it has a pair's gate and
 *          up.
 * Images   x lies as stages want it: pieces of 128 bytes of each pair's row, [piece][place], in
 *          wgmma's swizzle by place % 8. An expert's first place is a multiple of 8
 *          (moe_plan.align).
 *          e4m3: of a piece's 128 k, number 32 t + 8 i + 4 h + e is byte 32 i + 16 h + 4 t + e',
 *          where e' exchanges 1 and 2: thread t's eight values of instruction i in its slots of k.
 *          The scale of (piece, place) lies in a second array, in bf16.
 *          bf16: two pieces have 128 k; number 32 t + 4 q + 2 h + e is value 16 q + 8 h + 2 t + e.
 * Order    bf16: moe_product.cuh's, so its bits. e4m3: of each 128 k four instructions of 32, from
 *          zero; total = fmaf(sum, scale, total), scale being the row of x's times the fp8 block's.
 *          At any number of columns.
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
        X_SCALES_AT = SCALES_AT + SCALE_BYTES,
        STAGE = (X_SCALES_AT + (E4M3 ? N * 2 : 0) + 1023) / 1024 * 1024,
        PER_SM = N > 32 ? 1 : 2, /* blocks meant to share a multiprocessor */
        /* Beside the stages: what a block costs the machine, the ring's alignment, and the kernel's
         * tmp, told and barriers. */
        OTHER =
            1024 + 1024 + WG_CONSUMERS * WG / 32 * 512 + 2 * (16 + COLUMNS * 4 + WG_M * 8) + 256,
        ROOM = (228 * 1024 / PER_SM - OTHER) / STAGE,
        S = ROOM < 8 ? ROOM : 8, /* stages */
        BYTES = S * STAGE + 1024,
    };
    static_assert((int)S >= 3, "a stage is multiplied while others come");
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

/* Rows g and g + 8 of a consumer thread among the 128 of a stage: a group has 32 of each matrix, or
 * 64. */
static __device__ __forceinline__ int wg_place(bool up, int group, int m)
{
    const int warp = threadIdx.x % WG / 32, g = threadIdx.x % 32 / 4;
    return up ? m * 64 + group * 32 + warp * 8 + g : group * 64 + warp * 16 + m * 8 + g;
}

/* What a warp looks up for the consumers, two tiles in turn. */
template <int N> struct alignas(16) wg_tell {
    float weight[N];   /* up: of the pairs */
    float post[WG_M];  /* what sums of a row are multiplied with at the end */
    int32_t top[WG_M]; /* mxfp4, e4m3 */
    struct moe_tile tile;
};
struct wg_told {
    uint64_t *there, *read; /* [2] */
    int slot;
    uint32_t phase;
};

/* ------------------------------------------------------------------ producers */

template <enum kern_wfmt F, bool E4M3, int N>
static __device__ __forceinline__ void
wg_produce(const struct moe_product &p, const struct wg_maps &maps, struct wg_ring r, int row_tiles)
{
    using S = wg_shape<F, E4M3, N>;
    const int items = p.plan.max_tiles * row_tiles, n_kb = p.kp / 128;
    for (int at = blockIdx.x; at < items; at += gridDim.x) {
        const struct moe_tile tile = p.plan.tiles[at / row_tiles];
        if (tile.n == 0) break;
        const int part = at % row_tiles, rows = (tile.n + 7) / 8 * 8;
        const int w_row[2] = {part * (p.up ? 64 : 128), part * (p.up ? 64 : 128) + (p.up ? 0 : 64)};
        for (int kb = 0; kb < n_kb; kb++, wg_next<S::S>(&r)) {
            uint8_t *to = r.at + r.slot * S::STAGE;
            uint64_t *full = r.full + r.slot;
            const bool scales = S::SCALES > 0 && kb % S::AHEAD == 0;
            bar_wait(r.empty + r.slot, r.phase ^ 1);
            bar_expect(full, rows * (128 * S::PIECES + (E4M3 ? 2 : 0)) + WG_M * S::ROW +
                                 (scales ? S::SCALE_BYTES : 0));
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
            if (E4M3)
                bulk_load(to + S::X_SCALES_AT,
                          p.image_scale + (int64_t)kb * p.plan.room + tile.first, rows * 2, full);
        }
    }
}

/* By one warp, which has read a tile's rows before it waits for room. */
template <enum kern_wfmt F, bool E4M3, int N>
static __device__ __forceinline__ void wg_look_up(const struct moe_product &p, struct wg_told t,
                                                  struct wg_tell<wg_shape<F, E4M3, N>::COLUMNS> *to,
                                                  int row_tiles)
{
    enum { EACH = WG_M / 32, PAIRS = 4 };
    const int lane = threadIdx.x % 32, items = p.plan.max_tiles * row_tiles;
    for (int at = blockIdx.x; at < items; at += gridDim.x) {
        const struct moe_tile tile = p.plan.tiles[at / row_tiles];
        const int part = at % row_tiles;
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
        for (int i0 = 0; i0 < tile.n && p.up; i0 += 32 * PAIRS) {
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
        if (lane == 0) out->tile = tile;
        __syncwarp();
        if (lane == 0) bar_arrive(t.there + t.slot);
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
/* This warp is done with a slot. */
static __device__ __forceinline__ void wg_release(uint64_t *empty)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(empty);
}

/* What a consumer thread knows of its two rows in a tile. */
struct wg_rows {
    int place[2];            /* in a stage */
    const uint8_t *scale[2]; /* fp8: of its row of blocks */
    uint2 table[2];          /* mxfp4, e4m3: see dev_mxfp4_table() */
};

/* ------------------------------------------------------------------ consumers: e4m3 */

/* What is fetched of a stage before its operands are made: mxfp4's codes, and scales for it and
 * stages after. */
struct wg_codes {
    uint4 v[2];
    uint32_t scales[2];
};
template <class S, enum kern_wfmt F>
static __device__ __forceinline__ void wg_fetch(const struct wg_ring &r, const struct wg_rows &rows,
                                                int kb, struct wg_codes *codes)
{
    const uint8_t *at = r.at + r.slot * S::STAGE;
    bar_wait(r.full + r.slot, r.phase);
    __syncwarp(); /* whole warps go on */
    if constexpr (F == KERN_W_MXFP4) {
#pragma unroll
        for (int m = 0; m < 2; m++)
            codes->v[m] =
                *(const uint4 *)(at + S::X_BYTES + rows.place[m] * S::ROW + threadIdx.x % 4 * 16);
        if (kb % S::AHEAD == 0) wg_scales<S>(at, rows.place, codes->scales);
    }
}

/* Operands of a stage's four instructions. */
template <class S, enum kern_wfmt F>
static __device__ __forceinline__ void wg_operands(const uint8_t *stage, const struct wg_rows &rows,
                                                   struct wg_codes *codes, uint32_t (&a)[4][4])
{
    const int c = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        if constexpr (F == KERN_W_FP8) { /* in the copy engine's swizzle */
            const uint8_t *at = stage + S::X_BYTES + rows.place[m] * S::ROW;
            const uint4 v[2] = {*(const uint4 *)(at + ((2 * c) ^ g) * 16),
                                *(const uint4 *)(at + ((2 * c + 1) ^ g) * 16)};
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i][m] = wg_word(v[i / 2], i % 2 * 2),
                a[i][2 + m] = wg_word(v[i / 2], i % 2 * 2 + 1);
        } else {
            const uint2 table = dev_mxfp4_table_at(rows.table[m], codes->scales[m] & 255);
            codes->scales[m] >>= 8;
#pragma unroll
            for (int i = 0; i < 4; i++)
                dev_e2m1x8_e4m3(wg_word(codes->v[m], i), table, &a[i][m], &a[i][2 + m]);
        }
    }
}

/* Four instructions of W columns of a stage, from column `first` on. */
template <int W>
static __device__ __forceinline__ void wg_times(const uint32_t (&a)[4][4], uint64_t x, int first,
                                                float (&sum)[W / 2])
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_e4m3(sum, a[i], x + first * 8 + 2 * i, i > 0);
    wgmma_commit();
}
/* total += sum, times the scales of its columns (of this thread's first two on) and rows, once at
 * most LEFT groups are under way. */
template <enum kern_wfmt F, int W, int N, int LEFT>
static __device__ __forceinline__ void wg_add(float (&sum)[W / 2], const uint32_t *scale,
                                              const float (&w)[2], int first,
                                              float (&total)[WG_SUMS(N)])
{
    uint32_t two[W / 8]; /* bf16 */
#pragma unroll
    for (int i = 0; i < W / 8; i++) two[i] = scale[first / 2 + i * 4];
    wgmma_wait<LEFT>();
    wgmma_pin(sum);
#pragma unroll
    for (int i = 0; i < W / 8; i++) {
        const float x = kern_float(two[i] << 16), y = kern_float(two[i] & 0xffff0000u);
        float *t = total + first / 2 + i * 4;
        const float *s = sum + i * 4;
        if (F == KERN_W_FP8) {
            t[0] = fmaf(s[0], x * w[0], t[0]), t[1] = fmaf(s[1], y * w[0], t[1]);
            t[2] = fmaf(s[2], x * w[1], t[2]), t[3] = fmaf(s[3], y * w[1], t[3]);
        } else {
            t[0] = fmaf(s[0], x, t[0]), t[1] = fmaf(s[1], y, t[1]);
            t[2] = fmaf(s[2], x, t[2]), t[3] = fmaf(s[3], y, t[3]);
        }
    }
}

/* All stages of a tile: FULL times 64 columns and TAIL. One piece of the columns is under way while
 * the one before is added up, and while the next stage's codes are fetched. */
template <enum kern_wfmt F, int N, int FULL, int TAIL>
static __device__ __forceinline__ void wg_consume(const struct moe_product &p, struct wg_ring *r,
                                                  const struct wg_rows &rows,
                                                  float (&total)[WG_SUMS(N)])
{
    using S = wg_shape<F, true, N>;
    const int n_kb = p.kp / 128;
    struct wg_codes codes;
    wg_fetch<S, F>(*r, rows, 0, &codes);
    for (int kb = 0; kb < n_kb; kb++) {
        const uint8_t *at = r->at + r->slot * S::STAGE;
        uint64_t *empty = r->empty + r->slot;
        const uint64_t x = wgmma_rows(at);
        const uint32_t *scale = (const uint32_t *)(at + S::X_SCALES_AT) + threadIdx.x % 4;
        float w[2] = {1.0f, 1.0f}, sum[2][32], tail[TAIL / 2];
        uint32_t a[4][4];
        if (F == KERN_W_FP8) {
            w[0] = moe_block_scale(p.a, rows.scale[0], 0, kb);
            w[1] = moe_block_scale(p.a, rows.scale[1], 0, kb);
        }
        wg_operands<S, F>(at, rows, &codes, a);
#pragma unroll
        for (int i = 0; i < FULL; i++) {
            wg_times<64>(a, x, i * 64, sum[i % 2]);
            if (i > 0) wg_add<F, 64, N, 1>(sum[(i + 1) % 2], scale, w, (i - 1) * 64, total);
        }
        wg_times<TAIL>(a, x, FULL * 64, tail);
        if (FULL > 0) wg_add<F, 64, N, 1>(sum[(FULL + 1) % 2], scale, w, (FULL - 1) * 64, total);
        wg_next<S::S>(r);
        if (kb + 1 < n_kb) wg_fetch<S, F>(*r, rows, kb + 1, &codes);
        wg_add<F, TAIL, N, 0>(tail, scale, w, FULL * 64, total);
        wg_release(empty);
    }
}

template <enum kern_wfmt F, int N>
static __device__ __forceinline__ void
wg_consume_tile(const struct moe_product &p, struct wg_ring *r, const struct wg_rows &rows, int n,
                float (&total)[WG_SUMS(N)])
{
#define CONSUME(FULL, TAIL) wg_consume<F, N, FULL, TAIL>(p, r, rows, total)
    if constexpr (N == 32) {
        if (n <= 8)
            CONSUME(0, 8);
        else if (n <= 16)
            CONSUME(0, 16);
        else
            CONSUME(0, 32);
    } else {
        switch ((n + 15) / 16) {
        case 1: CONSUME(0, 16); break;
        case 2: CONSUME(0, 32); break;
        case 3: CONSUME(0, 48); break;
        case 4: CONSUME(0, 64); break;
        case 5: CONSUME(1, 16); break;
        case 6: CONSUME(1, 32); break;
        case 7: CONSUME(1, 48); break;
        case 8: CONSUME(1, 64); break;
        case 9: CONSUME(2, 16); break;
        case 10: CONSUME(2, 32); break;
        case 11: CONSUME(2, 48); break;
        case 12: CONSUME(2, 64); break;
        case 13: CONSUME(3, 16); break;
        default: CONSUME(3, 32); break;
        }
    }
    static_assert(N == 32 || N == 224, "widths of above");
#undef CONSUME
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

/* A warp's sums to results: up, 32 pairs at a time of its eight rows; down, 16 of its sixteen. They
 * are turned in `tmp` [32] so that a thread has eight of one pair. */
template <bool E4M3, int N, bool UP>
static __device__ __forceinline__ void
wg_store(const struct moe_product &p, const struct wg_tell<(N + 31) / 32 * 32> &told, int part,
         int group, const int (&place)[2], uint4 *tmp, const float (&total)[WG_SUMS(N)])
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
                    y[e] =
                        E4M3 ? dev_gate_near(gu.x, gu.y, p.limit) : dev_gate(gu.x, gu.y, p.limit);
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

/* A group of consumers. */
template <enum kern_wfmt F, bool E4M3, int N>
static __device__ __forceinline__ void
wg_consume_all(const struct moe_product &p, struct wg_ring r, struct wg_told t,
               const struct wg_tell<wg_shape<F, E4M3, N>::COLUMNS> *told, int row_tiles, int group,
               uint4 *tmp)
{
    const int items = p.plan.max_tiles * row_tiles;
    for (int at = blockIdx.x; at < items; at += gridDim.x) {
        const auto &now = told[t.slot];
        const int part = at % row_tiles;
        bar_wait(t.there + t.slot, t.phase);
        __syncwarp();
        const int n = wg_uniform(now.tile.n);
        if (n == 0) break;
        struct wg_rows rows;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            rows.place[m] = wg_place(p.up, group, m);
            if (E4M3 && F == KERN_W_FP8) {
                const int row = p.up ? part * 64 + rows.place[m] % 64 : part * WG_M + rows.place[m],
                          there = row < p.rows ? row : p.rows - 1;
                rows.scale[m] = (p.up && m ? p.b.w : p.a.w)[now.tile.expert].scale +
                                there / 128 * p.a.scale_bytes;
            }
            if (E4M3 && F == KERN_W_MXFP4) rows.table[m] = dev_mxfp4_table(now.top[rows.place[m]]);
        }
        float total[WG_SUMS(N)];
#pragma unroll
        for (int i = 0; i < WG_SUMS(N); i++) total[i] = 0.0f;
        if constexpr (E4M3)
            wg_consume_tile<F, N>(p, &r, rows, n, total);
        else
            wg_widen_tile<F, N>(p, &r, rows, n, total);
        if (p.up)
            wg_store<E4M3, N, true>(p, now, part, group, rows.place, tmp, total);
        else
            wg_store<E4M3, N, false>(p, now, part, group, rows.place, tmp, total);
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
    __shared__ __align__(16) uint4 tmp[WG_CONSUMERS * WG];
    __shared__ __align__(16) struct wg_tell<S::COLUMNS> told[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::S; i++) {
            bar_init(full + i, 1);
            bar_init(empty + i, WG_CONSUMERS * WG / 32);
        }
        for (int i = 0; i < 2; i++)
            bar_init(there + i, 1), bar_init(read + i, WG_CONSUMERS * WG / 32);
        bar_init_done();
    }
    __syncthreads();
    struct wg_ring r = {shared, full, empty, 0, 0};
    const struct wg_told t = {there, read, 0, 0};
    r.at += (1024 - dev_shared(shared) % 1024) % 1024;
    const int group = wg_uniform((int)threadIdx.x / WG);
    if (group == WG_CONSUMERS) {
        if (N > 32) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = wg_uniform((int)threadIdx.x % WG / 32);
        if (warp == 0 && threadIdx.x % 32 == 0) wg_produce<F, E4M3, N>(p, maps, r, row_tiles);
        if (warp == 1) wg_look_up<F, E4M3, N>(p, t, told, row_tiles);
    } else {
        if (N > 32) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wg_consume_all<F, E4M3, N>(p, r, t, told, row_tiles, group, tmp + threadIdx.x / 32 * 32);
    }
}
#else
template <enum kern_wfmt F, bool E4M3, int N>
static __global__ void wg_kernel(const __grid_constant__ struct moe_product p,
                                 const __grid_constant__ struct wg_maps maps, int row_tiles)
{
}
#endif

template <enum kern_wfmt F, bool E4M3, int N>
static int wg_launch(struct kern_stream *s, const struct moe_product *p)
{
    using S = wg_shape<F, E4M3, N>;
    struct wg_maps maps;
    for (int i = 0; i < 2; i++) {
        const struct moe_matrix *m = i ? &p->b : &p->a;
        if (!cuda_stack_map(&maps.codes[i], m->data, p->rows, m->row_bytes, m->row_bytes,
                            p->n_experts, m->data_step, 64, S::ROW))
            return TOW_EDEVICE;
        if (S::SCALES > 0 && !cuda_stack_map(&maps.scales[i], m->scale, p->rows, m->scale_bytes,
                                             m->scale_bytes, p->n_experts, m->scale_step, 64, 16))
            return TOW_EDEVICE;
    }
    const int row_tiles = (int)cuda_ceil(p->rows, p->up ? 64 : WG_M);
    const int64_t items = (int64_t)p->plan.max_tiles * row_tiles, most = s->n_sm * S::PER_SM;
    if (items > INT32_MAX / 2) return TOW_EINVAL;
    CUDA_SHARED((wg_kernel<F, E4M3, N>), S::BYTES);
    wg_kernel<F, E4M3, N><<<(unsigned)(items < most ? items : most), WG_THREADS, S::BYTES, s->cu>>>(
        *p, maps, row_tiles);
    return cuda_done(s, "moe");
}

#endif
