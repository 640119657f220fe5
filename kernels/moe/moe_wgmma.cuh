/* kernels/moe/moe_wgmma.cuh - tiles of pairs times their expert's stored weights by whole warpgroups (sm_90a), in
 * both kinds of products: bf16 (codes widened, exactly) and e4m3 (codes as they are).
 *
 * Plan     A block stays and goes from tile to tile: up to N pairs and 128 weight rows, 64 each of w1 and w3
 *          or 128 of w2. One thread keeps a ring of stages of 128 k filled by the copy engine: stored weights,
 *          and prepared rows of x as they lie (see below). Two warpgroups of consumers have 64 of the weight
 *          rows each: they make operand A in registers, once for all pairs of the tile, and multiply as many
 *          columns as the tile has, rounded up. The producer is ahead, so that a tile's first stages come
 *          while the last one's results go out; the second group of consumers begins a stage late, so that
 *          one multiplies while the other rounds.
 * Shares   What binds many pairs by their codes is the way of x from L2 (24 KB a stage for 768 cycles of the
 *          matrix unit), then shared memory: so two blocks with neighbouring weight rows are a cluster, each
 *          fetching half of x for both.
 * Rows     Of w1 and w3, each consumer thread has the same ones, so that it has a pair's gate and up.
 * Images   x lies as stages want it: pieces of 128 bytes of each pair's row, [piece][place], in wgmma's
 *          swizzle by place % 8. An expert's first place is a multiple of 8 (moe_plan.align).
 *          e4m3: of a piece's 128 k, number 32 t + 8 i + 4 h + e is byte 32 i + 16 h + 4 t + e', where e'
 *          exchanges 1 and 2: thread t's eight values of instruction i in its slots of k. The scale of
 *          (piece, place) lies in a second array, in bf16. bf16: two pieces have 128 k; number
 *          32 t + 4 q + 2 h + e is value 16 q + 8 h + 2 t + e.
 * Order    bf16: moe_product.cuh's, so its bits. e4m3: of each 128 k four instructions of 32, from zero;
 *          total = fmaf(sum, scale, total), scale being the row of x's times the fp8 block's. At any number
 *          of columns.
 * Exact    e4m3 holds an mxfp4 code times 2^-5 to 2^6: scales count from the largest of their row, and
 *          arrays with wider rows are not placed for this kind (kernels/cuda/place.cu). nvfp4 scales have
 *          three bits of their own, which e4m3 cannot hold: bf16 always.
 */
#ifndef KERN_MOE_WGMMA_CUH
#define KERN_MOE_WGMMA_CUH

#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/moe_product.cuh"

enum { WG = 128 /* threads */, WG_CONSUMERS = 2, WG_THREADS = WG * (WG_CONSUMERS + 1), WG_M = 128 };
#ifndef MOE_CODES_CLUSTER
#define MOE_CODES_CLUSTER 2
#endif

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
        PER_SM = N > 32 ? 1 : 2,                       /* blocks meant to share a multiprocessor */
        PAIR = N > 32 && E4M3 ? MOE_CODES_CLUSTER : 1, /* blocks that share x, as a cluster */

        STEP = N > 32 ? 16 : 8, /* pairs whose results go out at a time */
        OUT_LD = 64 + 8,
        OTHER = 1024 + 1024 + WG_CONSUMERS * (STEP * OUT_LD * 2 + COLUMNS * 4) + 512,
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

/* Threads of one consumer group. */
static __device__ __forceinline__ void wg_sync(int group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"((int)WG) : "memory");
}
/* A number that a warp's threads have in common, so that the compiler knows. */
static __device__ __forceinline__ int32_t wg_uniform(int32_t x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}
static __device__ __forceinline__ struct moe_tile wg_tile(const struct moe_plan &plan, int at)
{
    const struct moe_tile t = plan.tiles[at];
    return {wg_uniform(t.expert), wg_uniform(t.first), wg_uniform(t.n)};
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

/* What a block does: an item is a tile and PAIR neighbouring parts of the weight rows. */
template <int PAIR> static __device__ __forceinline__ int wg_first_item(void)
{
    return (int)blockIdx.x / PAIR;
}
template <int PAIR> static __device__ __forceinline__ int wg_item_step(void)
{
    return (int)gridDim.x / PAIR;
}
template <int PAIR> static __device__ __forceinline__ int wg_rank(void)
{
    return PAIR > 1 ? cluster_rank() : 0;
}

/* Rows g and g + 8 of a consumer thread among the 128 of a stage: a group has 32 of each matrix, or 64. */
static __device__ __forceinline__ int wg_place(bool up, int group, int m)
{
    const int warp = threadIdx.x % WG / 32, g = threadIdx.x % 32 / 4;
    return up ? m * 64 + group * 32 + warp * 8 + g : group * 64 + warp * 16 + m * 8 + g;
}

/* ------------------------------------------------------------------ the producer */

template <enum kern_wfmt F, bool E4M3, int N>
static __device__ __forceinline__ void
wg_produce(const struct moe_product &p, const struct wg_maps &maps, struct wg_ring r, int row_tiles)
{
    using S = wg_shape<F, E4M3, N>;
    const int items = p.plan.max_tiles * row_tiles, n_kb = p.kp / 128, rank = wg_rank<S::PAIR>();
    for (int at = wg_first_item<S::PAIR>(); at < items; at += wg_item_step<S::PAIR>()) {
        const struct moe_tile tile = p.plan.tiles[at / row_tiles];
        if (tile.n == 0) break;
        const int part = at % row_tiles * S::PAIR + rank, rows = (tile.n + 7) / 8 * 8;
        const int w_row[2] = {part * (p.up ? 64 : 128), part * (p.up ? 64 : 128) + (p.up ? 0 : 64)};
        const int half = (rows / 8 + 1) / 2 * 8, x_row = rank * half,
                  x_rows = S::PAIR == 1 ? rows
                           : rank       ? rows - half
                                        : half;
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
            const int64_t row = tile.first + x_row;
#pragma unroll
            for (int i = 0; i < S::PIECES; i++) {
                const uint8_t *from =
                    p.image + ((int64_t)(kb * S::PIECES + i) * p.plan.room + row) * 128;
                uint8_t *x = to + (i * N + x_row) * 128;
                if (S::PAIR == 1)
                    bulk_load(x, from, x_rows * 128, full);
                else if (x_rows > 0)
                    bulk_load_to(x, from, x_rows * 128, full, (1 << S::PAIR) - 1);
            }
            if (E4M3)
                bulk_load(to + S::X_SCALES_AT,
                          p.image_scale + (int64_t)kb * p.plan.room + tile.first, rows * 2, full);
        }
    }
}

/* ------------------------------------------------------------------ consumers */

/* A thread's scales of its two rows for the next stages, from the 16 bytes that each row has in this one: a
 * byte (mxfp4) or two (nvfp4) a stage, the next ones lowest. */
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
static __device__ __forceinline__ uint32_t wg_word(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
static __device__ __forceinline__ void wg_release(struct wg_ring *r, int pair)
{
    const int lane = threadIdx.x % 32;
    __syncwarp();
    if (pair > 1 && lane < pair) bar_arrive_at(r->empty + r->slot, lane);
    if (pair == 1 && lane == 0) bar_arrive(r->empty + r->slot);
}

/* What a consumer thread knows of its two rows in a tile. */
struct wg_rows {
    int place[2];            /* in a stage */
    const uint8_t *scale[2]; /* fp8: of its row of blocks */
    uint2 table[2];          /* mxfp4, e4m3: see dev_mxfp4_table() */
};

/* ------------------------------------------------------------------ consumers: e4m3 */

/* Operands of a stage's four instructions. */
template <class S, enum kern_wfmt F>
static __device__ __forceinline__ void wg_operands(const uint8_t *stage, const struct wg_rows &rows,
                                                   uint32_t (&scales)[2], uint32_t (&a)[4][4])
{
    const int c = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const uint8_t *at = stage + S::X_BYTES + rows.place[m] * S::ROW;
        if (F == KERN_W_FP8) { /* in the copy engine's swizzle */
            const uint4 v[2] = {*(const uint4 *)(at + ((2 * c) ^ g) * 16),
                                *(const uint4 *)(at + ((2 * c + 1) ^ g) * 16)};
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i][m] = wg_word(v[i / 2], i % 2 * 2),
                a[i][2 + m] = wg_word(v[i / 2], i % 2 * 2 + 1);
        } else {
            const uint4 v = *(const uint4 *)(at + c * 16);
            const uint2 table = dev_mxfp4_table_at(rows.table[m], scales[m] & 255);
            scales[m] >>= 8;
#pragma unroll
            for (int i = 0; i < 4; i++)
                dev_e2m1x8_e4m3(wg_word(v, i), table, &a[i][m], &a[i][2 + m]);
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
/* total += sum, times the scales of its columns (scale: of this thread's first two) and rows. */
template <enum kern_wfmt F, int W, int N>
static __device__ __forceinline__ void wg_add(float (&sum)[W / 2], const uint32_t *scale,
                                              const float (&w)[2], int first,
                                              float (&total)[WG_SUMS(N)])
{
    wgmma_pin(sum);
#pragma unroll
    for (int i = 0; i < W / 8; i++) {
        const uint32_t two = scale[first / 2 + i * 4]; /* bf16 */
        const float x = kern_float(two << 16), y = kern_float(two & 0xffff0000u);
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

/* All stages of a tile: FULL times 64 columns and TAIL. One piece of the columns is under way while the one
 * before is added up. */
template <enum kern_wfmt F, int N, int FULL, int TAIL>
static __device__ __forceinline__ void wg_consume(const struct moe_product &p, struct wg_ring *r,
                                                  const struct wg_rows &rows,
                                                  float (&total)[WG_SUMS(N)])
{
    using S = wg_shape<F, true, N>;
    const int n_kb = p.kp / 128;
    uint32_t scales[2];
    for (int kb = 0; kb < n_kb; kb++, wg_next<S::S>(r)) {
        const uint8_t *at = r->at + r->slot * S::STAGE;
        const uint64_t x = wgmma_rows(at);
        const uint32_t *scale = (const uint32_t *)(at + S::X_SCALES_AT) + threadIdx.x % 4;
        float w[2] = {1.0f, 1.0f}, sum[2][32], tail[TAIL / 2];
        uint32_t a[4][4];
        if (F == KERN_W_FP8) {
            w[0] = moe_block_scale(p.a, rows.scale[0], 0, kb);
            w[1] = moe_block_scale(p.a, rows.scale[1], 0, kb);
        }
        bar_wait(r->full + r->slot, r->phase);
        __syncwarp(); /* whole warps go on */
        if (S::SCALES > 0 && kb % S::AHEAD == 0) wg_scales<S>(at, rows.place, scales);
        wg_operands<S, F>(at, rows, scales, a);
#pragma unroll
        for (int i = 0; i < FULL; i++) {
            wg_times<64>(a, x, i * 64, sum[i % 2]);
            if (i == 0) continue;
            wgmma_wait<1>();
            wg_add<F, 64, N>(sum[(i + 1) % 2], scale, w, (i - 1) * 64, total);
        }
        wg_times<TAIL>(a, x, FULL * 64, tail);
        if (FULL > 0) {
            wgmma_wait<1>();
            wg_add<F, 64, N>(sum[(FULL + 1) % 2], scale, w, (FULL - 1) * 64, total);
        }
        wgmma_wait<0>();
        wg_add<F, TAIL, N>(tail, scale, w, FULL * 64, total);
        wg_release(r, S::PAIR);
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

/* The same for W columns at once. The first half of a stage's k is under way while the second's codes are
 * widened. */
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
        wg_release(r, S::PAIR);
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

/* Sums to results, STEP pairs at a time through tmp [STEP][OUT_LD], so that stores are whole lines. */
template <enum kern_wfmt F, bool E4M3, int N, bool UP>
static __device__ __forceinline__ void
wg_store(const struct moe_product &p, const struct moe_tile &tile, int part, int group,
         __nv_bfloat16 *tmp, const float *weight, const float (&total)[WG_SUMS(N)])
{
    using S = wg_shape<F, E4M3, N>;
    const int tid = threadIdx.x % WG, warp = tid / 32, g = tid % 32 / 4, c = tid % 4;
    const int width = UP ? 32 : 64, col0 = (part * WG_CONSUMERS + group) * width;
    const int left = p.rows - col0;
    float post[2];
    int row[2]; /* of this thread's two, from col0 on */
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const struct moe_matrix &a = UP && m ? p.b : p.a;
        const struct cuda_weight *w = &a.w[tile.expert];
        const uint8_t *nan_rows = moe_nan_rows(a, w, p.rows, p.k);
        row[m] = UP ? warp * 8 + g : warp * 16 + m * 8 + g;
        const int at = row[m] < left ? col0 + row[m] : p.rows - 1;
        post[m] = E4M3 ? 1.0f : DEV_E2M1_POST;
        if (E4M3 && F == KERN_W_MXFP4)
            post[m] = dev_mxfp4_unit(cuda_row_tops(w->scale, p.rows, p.k)[at]);
        if (F == KERN_W_NVFP4) post[m] *= w->scale2;
        if (nan_rows[at]) post[m] = NAN;
    }
    uint16_t *out = p.out + (int64_t)tile.first * p.rows + col0;
#pragma unroll
    for (int n0 = 0; n0 < N; n0 += S::STEP) {
        if (n0 >= tile.n) break;
        wg_sync(group); /* tmp has been read, and weight written */
#pragma unroll
        for (int i = 0; i < S::STEP / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float *v = total + (n0 / 8 + i) * 4;
                const int n = i * 8 + c * 2 + e;
                if (UP) {
                    const float2 gu = wg_round(v[e] * post[0], v[2 + e] * post[1]);
                    tmp[n * S::OUT_LD + row[0]] =
                        __float2bfloat16_rn(dev_gate(gu.x, gu.y, p.limit) * weight[n0 + n]);
                } else {
                    tmp[n * S::OUT_LD + row[0]] = __float2bfloat16_rn(v[e] * post[0]);
                    tmp[n * S::OUT_LD + row[1]] = __float2bfloat16_rn(v[2 + e] * post[1]);
                }
            }
        wg_sync(group);
#pragma unroll 1
        for (int i = tid; i < S::STEP * (width / 8); i += WG) {
            const int n = i / (width / 8), col = i % (width / 8) * 8;
            if (n0 + n < tile.n && col < left)
                *(uint4 *)(out + (int64_t)(n0 + n) * p.rows + col) =
                    *(const uint4 *)(tmp + n * S::OUT_LD + col);
        }
    }
}

/* A group of consumers. */
template <enum kern_wfmt F, bool E4M3, int N>
static __device__ __forceinline__ void wg_consume_all(const struct moe_product &p, struct wg_ring r,
                                                      int row_tiles, int group, __nv_bfloat16 *tmp,
                                                      float *weight)
{
    using S = wg_shape<F, E4M3, N>;
    const int tid = threadIdx.x % WG, items = p.plan.max_tiles * row_tiles,
              rank = wg_rank<S::PAIR>();
    bool begun = false;
    for (int at = wg_first_item<S::PAIR>(); at < items; at += wg_item_step<S::PAIR>()) {
        const struct moe_tile tile = wg_tile(p.plan, at / row_tiles);
        const int part = at % row_tiles * S::PAIR + rank;
        if (tile.n == 0) break;
        wg_sync(group); /* weight has been read */
        for (int i = tid; i < tile.n && p.up; i += WG)
            weight[i] = p.weights[p.plan.order[tile.first + i]];
        struct wg_rows rows;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            rows.place[m] = wg_place(p.up, group, m);
            const struct cuda_weight *w = &(p.up && m ? p.b.w : p.a.w)[tile.expert];
            const int row = p.up ? part * 64 + rows.place[m] % 64 : part * WG_M + rows.place[m],
                      there = row < p.rows ? row : p.rows - 1;
            if (E4M3 && F == KERN_W_FP8) rows.scale[m] = w->scale + there / 128 * p.a.scale_bytes;
            if (E4M3 && F == KERN_W_MXFP4)
                rows.table[m] = dev_mxfp4_table(cuda_row_tops(w->scale, p.rows, p.k)[there]);
        }
        if (!begun && group == 1 && p.kp / 128 > 1) bar_wait(r.full + 1, 0);
        begun = true;
        float total[WG_SUMS(N)];
#pragma unroll
        for (int i = 0; i < WG_SUMS(N); i++) total[i] = 0.0f;
        if constexpr (E4M3)
            wg_consume_tile<F, N>(p, &r, rows, tile.n, total);
        else
            wg_widen_tile<F, N>(p, &r, rows, tile.n, total);
        if (p.up)
            wg_store<F, E4M3, N, true>(p, tile, part, group, tmp, weight, total);
        else
            wg_store<F, E4M3, N, false>(p, tile, part, group, tmp, weight, total);
    }
}

template <enum kern_wfmt F, bool E4M3, int N>
static __global__ void __launch_bounds__(WG_THREADS, (wg_shape<F, E4M3, N>::PER_SM))
    wg_kernel(const __grid_constant__ struct moe_product p,
              const __grid_constant__ struct wg_maps maps, int row_tiles)
{
    using S = wg_shape<F, E4M3, N>;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ uint64_t full[S::S], empty[S::S];
    __shared__ __align__(16) __nv_bfloat16 tmp[WG_CONSUMERS][S::STEP * S::OUT_LD];
    __shared__ float weight[WG_CONSUMERS][S::COLUMNS];
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::S; i++) {
            bar_init(full + i, 1);
            bar_init(empty + i, S::PAIR * WG_CONSUMERS * WG / 32);
        }
        bar_init_done();
    }
    if (S::PAIR > 1)
        cluster_meet();
    else
        __syncthreads();
    struct wg_ring r = {shared, full, empty, 0, 0};
    r.at += (1024 - dev_shared(shared) % 1024) % 1024;
    const int group = wg_uniform((int)threadIdx.x / WG);
    if (group == WG_CONSUMERS) {
        if (N > 32) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x % WG == 0) wg_produce<F, E4M3, N>(p, maps, r, row_tiles);
        __syncwarp();
    } else {
        if (N > 32) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wg_consume_all<F, E4M3, N>(p, r, row_tiles, group, tmp[group], weight[group]);
    }
    if (S::PAIR > 1) cluster_meet(); /* a block must be there while the other one writes to it */
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
            return TOW_EINVAL;
        if (S::SCALES > 0 && !cuda_stack_map(&maps.scales[i], m->scale, p->rows, m->scale_bytes,
                                             m->scale_bytes, p->n_experts, m->scale_step, 64, 16))
            return TOW_EINVAL;
    }
    const int row_tiles = (int)cuda_ceil(p->rows, (p->up ? 64 : WG_M) * S::PAIR);
    const int64_t items = (int64_t)p->plan.max_tiles * row_tiles,
                  most = s->n_sm * S::PER_SM / S::PAIR;
    if (items > INT32_MAX / 2) return TOW_EINVAL;
    CUDA_SHARED((wg_kernel<F, E4M3, N>), S::BYTES);
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeClusterDimension;
    attr.val.clusterDim.x = S::PAIR;
    attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)(items < most ? items : most) * S::PAIR);
    c.blockDim = dim3(WG_THREADS);
    c.dynamicSmemBytes = S::BYTES;
    c.stream = s->cu;
    c.attrs = &attr;
    c.numAttrs = S::PAIR > 1 ? 1 : 0;
    cudaLaunchKernelEx(&c, wg_kernel<F, E4M3, N>, *p, maps, row_tiles);
    return cuda_done(s, "moe");
}

#endif
