/* kernels/attn/index_score_wgmma_cuda.cu - scores of index entries on Hopper: 64 keys on the M side of a
 * warpgroup's products, the 64 heads of one query or two on the N side.
 *
 * The list of tiles is index_score.cuh's, of 64 entries; R rows are a block: one where each has a sequence
 * to itself, else four. A block's queries stand in shared memory, and so does a ring of tiles, some ahead of
 * use. Tiles go to the CTA's warpgroups in turn. A group widens its tile's codes on the way to the registers
 * of operand a, once for all queries of the block, multiplies when it is its turn, fills the tile's place in
 * the ring again and adds up the heads while the others multiply. Without turns all groups multiply at once
 * and then all add up (a tenth slower); two sets of sums in a group, to multiply ahead, gained nothing.
 * fp8 codes become f16 (one instruction for two), for which queries are scaled, head by head, by a power of two
 * that the head's weight takes back: exact for queries of fp8, for others with what is 2^-30 of a head's
 * largest. fp4 codes become bf16, bf16 keys stay. Where products of fp8 codes are allowed
 * (cuda_fp8_products) fp8 keys multiply as they are. So that sixteen bytes are what one thread multiplies,
 * k is dealt to slots in an order of the format (see `widen`); queries are stored in the same order.
 * A thread has sixteen of 64 heads of two keys: it adds their weighted positive parts in ascending order,
 * then its quad's four. A key's scale (fp8) multiplies the finished sum. Nothing in this order knows R.
 * Bound: decode by reading keys (68, 132 or 256 bytes an entry), prefill by the matrix unit.
 */
#include "kernels/attn/index_score.cuh"
#include "kernels/attn/widen.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/wgmma.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    TILE = 64,
    HEADS = 64,
    W = 128,
    ROWS = 4,        /* of a block, where sequences have several */
    WEIGHTS_LD = 20, /* floats: a thread's sixteen weights, quads' threads in different banks */
    GROUP = 128,     /* threads */
};
enum product { MUL_BF16, MUL_F16, MUL_CODES };

template <int FMT, bool CODES> struct keys {
    static constexpr enum product MUL = FMT != KERN_IK_FP8 ? MUL_BF16 : CODES ? MUL_CODES : MUL_F16;
    static constexpr int KS = MUL == MUL_CODES ? W / 32 : W / 16; /* instructions along a key */
    static constexpr int QUERY = MUL == MUL_CODES ? W : 2 * W;    /* bytes of a head */
    static constexpr int ROW = FMT == KERN_IK_FP4 ? W / 2 : FMT == KERN_IK_FP8 ? W : 2 * W;
    static constexpr int SCALES = FMT == KERN_IK_BF16 ? 0 : TILE * 4;
    static constexpr int BYTES = TILE * ROW + SCALES; /* of a tile */
};
template <int FMT, bool CODES, int R> struct plan {
    using k = keys<FMT, CODES>;
    static constexpr int GROUPS = R == 1 ? 4 : 3; /* as many as have the registers */
    static constexpr int THREADS = GROUP * GROUPS;
    static constexpr int N = R == 1 ? HEADS : 2 * HEADS; /* columns of a product */
    static constexpr int HALF = N * 128;                 /* bytes: N heads' rows of 128 */
    /* Tiles under way, a power of two: about 100 KiB, several times what a multiprocessor's share of the
     * bandwidth needs. */
    static constexpr int STAGES = R == 1 && FMT != KERN_IK_BF16 ? 16 : 8;
    /* Shared memory. */
    static constexpr int RING = R * HEADS * k::QUERY;
    static constexpr int WEIGHTS = RING + STAGES * k::BYTES;
    static constexpr int BYTES = WEIGHTS + R * 4 * WEIGHTS_LD * 4;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ void ring_init(uint64_t *full)
{
    asm volatile(
        "mbarrier.init.shared.b64 [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(full)),
        "n"((int)GROUP)
        : "memory");
}
/* This thread's copies so far have arrived, once they have. */
static __device__ __forceinline__ void ring_copied(uint64_t *full)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(full))
                 : "memory");
}
static __device__ __forceinline__ void ring_wait(uint64_t *full, uint32_t parity)
{
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; "
                 "@!p bra again; }" ::"r"((uint32_t)__cvta_generic_to_shared(full)),
                 "r"(parity)
                 : "memory");
}
/* The turn to multiply goes round the warpgroups: barrier 1 + g is passed by group g and the one before. */
template <int GROUPS> static __device__ __forceinline__ void turn_wait(int group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(2 * (int)GROUP) : "memory");
}
template <int GROUPS> static __device__ __forceinline__ void turn_pass(int group)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(group + 1 == GROUPS ? 1 : 2 + group),
                 "n"(2 * (int)GROUP)
                 : "memory");
}

/* Where a sequence's tiles come from; places are this thread's of a warpgroup. */
template <int FMT, bool CODES> struct key_source {
    using k = keys<FMT, CODES>;
    static constexpr int PER = k::ROW / 16;
    const uint8_t *codes, *scales; /* in page 0 */
    const uint32_t *ids;
    uint32_t page_bytes, page_step, shift; /* a page has 1 << shift tiles */
    uint32_t place;                        /* in a stage of the ring */

    __device__ __forceinline__ void init(const struct index_score &p, uint32_t tiles_shift)
    {
        const int i = threadIdx.x % GROUP, swap = FMT == KERN_IK_FP4 ? 0 : (i / PER & 1) * 4;
        place = (uint32_t)(i / PER * k::ROW + (i % PER ^ swap) * 16); /* see read_piece */
        codes = p.kv.pages + p.key_off + i * 16;
        scales = codes + (int64_t)p.kv.y.per_page * k::ROW;
        page_bytes = (uint32_t)p.kv.page_bytes;
        shift = tiles_shift;
    }
    __device__ __forceinline__ uint32_t page_of(int32_t tile) const
    {
        return __ldg(ids + ((uint32_t)tile >> shift) * page_step);
    }
    /* Starts the copy of a tile, of page `id`. All threads of a warpgroup call it. */
    __device__ __forceinline__ void fill(uint8_t *stage, uint64_t *full, int32_t tile,
                                         uint32_t id) const
    {
        const uint64_t page = (uint64_t)id * page_bytes;
        const uint32_t row = ((uint32_t)tile & ((1u << shift) - 1)) * TILE;
        const uint8_t *from = codes + page + row * k::ROW;
#pragma unroll
        for (int i = 0; i < TILE * k::ROW; i += GROUP * 16)
            dev_copy16(stage + place + i, from + i, true);
        if (k::SCALES && threadIdx.x % GROUP < k::SCALES / 16)
            dev_copy16(stage + TILE * k::ROW + threadIdx.x % GROUP * 16, scales + page + row * 4,
                       true);
        ring_copied(full);
    }
};

/* Piece of sixteen bytes of a key: odd rows have theirs four further on, modulo eight, so that two rows'
 * pieces 0 to 3 lie in different banks. (Rows of 64 bytes do.) */
template <int FMT, bool CODES>
static __device__ __forceinline__ uint4 read_piece(const uint8_t *stage, int row, int piece)
{
    const int swap = FMT == KERN_IK_FP4 ? 0 : (row & 1) * 4;
    return *(const uint4 *)(stage + row * keys<FMT, CODES>::ROW + (piece ^ swap) * 16);
}
static __device__ __forceinline__ void e4m3x4_f16(uint32_t codes, uint32_t *lo, uint32_t *hi)
{
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; "
        "cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(*lo), "=r"(*hi)
        : "r"(codes));
}

/* Operand a of a warp's 16 keys. Slots: of a thread c of a quad, of 16-bit types the lower ones are 2 c, 2 c +
 * 1, the upper ones 8 behind; of codes the four from 4 c on, and 16 behind.
 *   fp8, f16    instruction 4 h + i: codes 64 h + 16 c + 4 i + {0, 1} in the lower slots, {2, 3} in the upper
 *   fp8, codes  instruction i: codes 16 c + 4 i + {0, 1, 2, 3}, and 64 further on
 *   fp4         instruction 2 i + u: codes 32 c + 8 i + 2 u + {0, 4}, and {1, 5}
 *   bf16        instruction 2 m + u: values 32 m + 8 c + 4 u + {0, 1}, and {2, 3} */
template <int FMT, bool CODES>
static __device__ __forceinline__ void widen(const uint8_t *stage,
                                             uint32_t (&a)[keys<FMT, CODES>::KS][4])
{
    using k = keys<FMT, CODES>;
    const int lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = threadIdx.x % GROUP / 32 * 16 + lane / 4 + 8 * r;
        if constexpr (FMT == KERN_IK_FP8) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 v = read_piece<FMT, CODES>(stage, row, c + 4 * h);
                const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if constexpr (k::MUL == MUL_CODES)
                        a[i][2 * h + r] = w[i];
                    else
                        e4m3x4_f16(w[i], &a[4 * h + i][r], &a[4 * h + i][2 + r]);
                }
            }
        } else if constexpr (FMT == KERN_IK_FP4) {
            const uint4 v = read_piece<FMT, CODES>(stage, row, c);
            const uint32_t s = dev_ue8m0_bf16x2(stage[TILE * k::ROW + row * 4 + c]);
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t p[4] = {
                    (w[i] << 12 & 0x80008000u) | (w[i] << 6 & 0x01c001c0u),
                    (w[i] << 8 & 0x80008000u) | (w[i] << 2 & 0x01c001c0u),
                    (w[i] << 4 & 0x80008000u) | (w[i] >> 2 & 0x01c001c0u),
                    (w[i] & 0x80008000u) | (w[i] >> 6 & 0x01c001c0u),
                };
#pragma unroll
                for (int j = 0; j < 4; j++) /* 2^126 first: together they may be too much */
                    a[2 * i + j / 2][j % 2 * 2 + r] =
                        dev_mul_bf16x2(dev_mul_bf16x2(p[j], dev_twice(0x7e80)), s);
            }
        } else {
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const uint4 v = read_piece<FMT, CODES>(stage, row, c + 4 * m);
                a[2 * m][r] = v.x;
                a[2 * m][2 + r] = v.y;
                a[2 * m + 1][r] = v.z;
                a[2 * m + 1][2 + r] = v.w;
            }
        }
    }
}

/* 2^e. */
static __device__ __forceinline__ float power(int e)
{
    return kern_float((uint32_t)(e + 127) << 23);
}
/* Two bf16 times a power of two. */
static __device__ __forceinline__ float2 scaled(uint32_t two, float s)
{
    return make_float2(kern_float(two << 16) * s, kern_float(two & 0xffff0000u) * s);
}
static __device__ __forceinline__ uint32_t to_f16x2(uint32_t two, float s)
{
    const float2 v = scaled(two, s);
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(v.y), "f"(v.x));
    return r;
}
static __device__ __forceinline__ uint32_t to_e4m3x4(uint32_t lo, uint32_t hi, float s)
{
    const float2 v = scaled(lo, s), u = scaled(hi, s);
    uint32_t r;
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %1, %2; "
        "cvt.rn.satfinite.e4m3x2.f32 h, %3, %4; mov.b32 %0, {l, h}; }"
        : "=r"(r)
        : "f"(v.y), "f"(v.x), "f"(u.y), "f"(u.x));
    return r;
}

/* Queries of n rows from t on in the order of `widen`, and their weights thread by thread of a quad. */
template <int FMT, bool CODES, int R>
static __device__ __forceinline__ void load_queries(const struct index_score &p, int32_t t,
                                                    int32_t n, uint8_t *q, float *weights)
{
    using k = keys<FMT, CODES>;
    using l = plan<FMT, CODES, R>;
    constexpr int PER = W / 8; /* pieces of a head; its threads are half a warp */
    for (int x = threadIdx.x; x < n * HEADS * PER; x += l::THREADS) {
        const int piece = x % PER, r = x / PER / HEADS, h = x / PER % HEADS;
        const uint4 v = __ldg((const uint4 *)p.q + (int64_t)t * HEADS * PER + x);
        /* A column of a product; where four bytes of instruction j for thread c of a quad belong. */
        const int row = r % 2 * HEADS + h;
        uint8_t *at = q + r / 2 * (2 * HEADS * k::QUERY) + row * 128;
        const auto put = [&](int j, int upper, int c, uint32_t word) {
            const int half = j / 4, pair = k::MUL == MUL_CODES ? j : j % 4;
            *(uint32_t *)(at + half * l::HALF + ((pair * 2 + upper) ^ (row & 7)) * 16 + c * 4) =
                word;
        };
        float weight = 1.0f;
        if constexpr (k::MUL == MUL_BF16) {
            if (FMT == KERN_IK_FP4) {
                const int j = piece % 4 * 2, c = piece / 4;
                put(j, 0, c, __byte_perm(v.x, v.z, 0x5410));
                put(j, 1, c, __byte_perm(v.x, v.z, 0x7632));
                put(j + 1, 0, c, __byte_perm(v.y, v.w, 0x5410));
                put(j + 1, 1, c, __byte_perm(v.y, v.w, 0x7632));
            } else {
                const int j = piece / 4 * 2, c = piece % 4;
                put(j, 0, c, v.x);
                put(j, 1, c, v.y);
                put(j + 1, 0, c, v.z);
                put(j + 1, 1, c, v.w);
            }
        } else {
            /* The head's largest comes to [2^14, 2^15), or [2^7, 2^8): what it may at most without
             * overflow. Exponents are bounded so that the weight takes them; beyond lies nothing real. */
            uint32_t top = __vmaxu2(__vmaxu2(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu),
                                    __vmaxu2(v.z & 0x7fff7fffu, v.w & 0x7fff7fffu));
#pragma unroll
            for (int m = 1; m < PER; m *= 2) top = __vmaxu2(top, __shfl_xor_sync(~0u, top, m));
            int e = (int)(__vmaxu2(top, top >> 16) >> 7 & 0xff) - 127;
            e = (e < -100 ? -100 : e > 100 ? 100 : e) - (k::MUL == MUL_CODES ? 7 : 14);
            const float s = power(-e);
            weight = power(e);
            const int j = piece % 2 * 2, c = piece / 2 % 4, half = piece / 8;
            if constexpr (k::MUL == MUL_CODES) {
                put(j, half, c, to_e4m3x4(v.x, v.y, s));
                put(j + 1, half, c, to_e4m3x4(v.z, v.w, s));
            } else {
                put(half * 4 + j, 0, c, to_f16x2(v.x, s));
                put(half * 4 + j, 1, c, to_f16x2(v.y, s));
                put(half * 4 + j + 1, 0, c, to_f16x2(v.z, s));
                put(half * 4 + j + 1, 1, c, to_f16x2(v.w, s));
            }
        }
        if (piece == 0)
            weights[(r * 4 + h % 8 / 2) * WEIGHTS_LD + h / 8 * 2 + h % 2] =
                kern_bf16_decode(((const uint16_t *)p.wt)[(int64_t)t * HEADS + x / PER]) *
                p.factor * weight;
    }
}

/* A thread's sixteen heads of two keys: weighted positive parts, heads ascending. */
static __device__ __forceinline__ void add_heads(const float *acc, const float *w, float (&sum)[2])
{
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < HEADS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[e / 2] = fmaf(w[2 * n + e % 2], dev_positive(acc[4 * n + e]), sum[e / 2]);
}
static __device__ __forceinline__ void read_weights(const float *at, float (&w)[16])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 v = *(const float4 *)(at + 4 * i);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
}
/* Sums over the quad; thread c has key c % 2. Of two pairs of keys, threads 2 and 3 have the second. */
static __device__ __forceinline__ float quad_sum(const float (&s)[2])
{
    const bool odd = threadIdx.x & 1;
    const float v = (odd ? s[1] : s[0]) + __shfl_xor_sync(~0u, odd ? s[0] : s[1], 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
static __device__ __forceinline__ float quad_sum(const float (&s)[2], const float (&o)[2])
{
    const bool odd = threadIdx.x & 1, second = threadIdx.x & 2;
    const float v = (odd ? s[1] : s[0]) + __shfl_xor_sync(~0u, odd ? s[0] : s[1], 1);
    const float u = (odd ? o[1] : o[0]) + __shfl_xor_sync(~0u, odd ? o[0] : o[1], 1);
    return (second ? u : v) + __shfl_xor_sync(~0u, second ? v : u, 2);
}

template <int FMT, bool CODES, int R>
static __device__ __forceinline__ void score_tiles(const struct index_score &p, uint32_t shift,
                                                   uint8_t *shared)
{
    using k = keys<FMT, CODES>;
    using l = plan<FMT, CODES, R>;
    __shared__ uint64_t full[l::STAGES];
    __shared__ int32_t sees[R];
    uint8_t *queries = shared, *ring = shared + l::RING;
    float *weights = (float *)(shared + l::WEIGHTS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / GROUP;
    const int c = lane % 4, mine = warp * 16 + lane / 4 + c % 2 * 8; /* key of the tile */
    const uint64_t b = wgmma_rows(queries);
    struct key_source<FMT, CODES> src;
    src.init(p, shift);
    if ((int)threadIdx.x < l::STAGES) ring_init(&full[threadIdx.x]);

    const struct share sh = find_share<TILE, l::THREADS>(p, R);
    int32_t left = sh.tiles, skip = sh.tile;
    uint32_t before = 0; /* tiles of earlier segments */
    if (group == l::GROUPS - 1) turn_pass<l::GROUPS>(group);
    for (int32_t block = sh.block; left > 0; block++) {
        const int32_t end = block_end(p, block, R);
        for (int32_t t = p.row0 + block * R; t < end && left > 0;) {
            const struct segment g = segment_at<TILE>(p, t, end);
            if (skip >= g.tiles) {
                skip -= g.tiles;
                t += g.n;
                continue;
            }
            const int32_t first = skip, n = g.tiles - first < left ? g.tiles - first : left;
            left -= n;
            skip = 0;
            src.ids = g.q.page_ids + p.companion;
            src.page_step = (uint32_t)g.q.page_step;
            constexpr int EACH = (l::STAGES + l::GROUPS - 1) / l::GROUPS;
            uint32_t ids[EACH], id = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (group + i * l::GROUPS < n) ids[i] = src.page_of(first + group + i * l::GROUPS);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int32_t x = group + i * l::GROUPS;
                const uint32_t stage = (before + (uint32_t)x) % l::STAGES;
                if (x < l::STAGES && x < n)
                    src.fill(ring + stage * k::BYTES, &full[stage], first + x, ids[i]);
            }
            load_queries<FMT, CODES, R>(p, t, g.n, queries, weights);
            if (threadIdx.x < R && (int)threadIdx.x < g.n)
                sees[threadIdx.x] = dev_visible(p.kv, g.q, t + (int)threadIdx.x);
            wgmma_shared();
            __syncthreads();
            float own[16]; /* R == 1 */
            if (R == 1) read_weights(weights + c * WEIGHTS_LD, own);
            float *out = p.out + (int64_t)(t - p.row0 + c / 2) * p.ld + first * TILE + mine;
            float *best = p.best + (int64_t)(t - p.row0 + c / 2) * (p.ld / INDEX_RUN) +
                          first * (TILE / INDEX_RUN) + warp;
            const int steps = R == 1 ? 1 : (g.n + 1) / 2;
            if (group + l::STAGES < n) id = src.page_of(first + group + l::STAGES);
            /* All take as many turns; who has no tile left takes the last once more and stores nothing. */
            for (int32_t x = group; x < n + group; x += l::GROUPS) {
                const uint32_t at = before + (uint32_t)(x < n ? x : n - 1), stage = at % l::STAGES;
                uint8_t *tile = ring + stage * k::BYTES;
                uint32_t a[k::KS][4];
                ring_wait(&full[stage], at / l::STAGES & 1);
                widen<FMT, CODES>(tile, a);
                const float scale =
                    FMT == KERN_IK_FP8 ? *(const float *)(tile + TILE * k::ROW + mine * 4) : 1.0f;
#pragma unroll 1
                for (int step = 0; step < steps; step++) {
                    const int r = 2 * step;
                    float acc[l::N / 2], v, sum[2];
                    const uint64_t q = b + (uint64_t)(r * HEADS * k::QUERY >> 4);
                    turn_wait<l::GROUPS>(group);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < k::KS; j++) {
                        const uint64_t bj = q + (uint64_t)(j / 4 * (l::HALF >> 4) + j % 4 * 2);
                        if constexpr (k::MUL == MUL_CODES)
                            wgmma_e4m3(acc, a[j], bj, j > 0);
                        else if constexpr (k::MUL == MUL_F16)
                            wgmma_f16(acc, a[j], bj, j > 0);
                        else
                            wgmma_bf16(acc, a[j], bj, j > 0);
                    }
                    wgmma_commit();
                    turn_pass<l::GROUPS>(group);
                    if (step == 0 && x + l::STAGES < n) { /* the turn's barrier: all have read it */
                        src.fill(tile, &full[stage], first + x + l::STAGES, id);
                        if (x + l::GROUPS + l::STAGES < n)
                            id = src.page_of(first + x + l::GROUPS + l::STAGES);
                    }
                    wgmma_wait<0>();
                    wgmma_pin(acc);
                    if constexpr (R == 1) {
                        add_heads(acc, own, sum);
                        v = quad_sum(sum);
                    } else {
                        float w[16], second[2];
                        read_weights(weights + (r * 4 + c) * WEIGHTS_LD, w);
                        add_heads(acc, w, sum);
                        read_weights(weights + ((r + 1) * 4 + c) * WEIGHTS_LD, w);
                        add_heads(acc + HEADS / 2, w, second);
                        v = quad_sum(sum, second);
                    }
                    if (FMT == KERN_IK_FP8) v *= scale;
                    const int row = r + c / 2; /* R == 1: threads 2 and 3 have nothing new */
                    /* Entries that it sees, from this segment's first on. */
                    const int32_t seen =
                        row < g.n && x < n ? sees[row < R ? row : 0] - first * TILE : 0;
                    const bool is = x * TILE + mine < seen;
                    if (is) out[(int64_t)r * p.ld + x * TILE] = v;
                    if (p.best) {
                        float m = is ? v : kern_float(0x7fc00000u);
                        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1)); /* passes over NaN */
                        m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
                        m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
                        m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
                        if (lane < 4 && c % 2 == 0 && x * TILE + warp * INDEX_RUN < seen)
                            best[(int64_t)r * (p.ld / INDEX_RUN) + x * (TILE / INDEX_RUN)] = m;
                    }
                }
            }
            before += (uint32_t)n;
            __syncthreads(); /* the queries may go */
            t += g.n;
        }
    }
    if (group == 0) turn_wait<l::GROUPS>(group); /* of nobody: barriers end as they began */
}

#endif /* sm_90a */

template <int FMT, bool CODES, int R>
static __global__ void __launch_bounds__(plan<FMT, CODES, R>::THREADS, 1)
    score_kernel(const __grid_constant__ struct index_score p, uint32_t shift)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t shared[];
    score_tiles<FMT, CODES, R>(p, shift, shared);
#endif
}

template <int FMT, bool CODES, int R>
static void launch(struct kern_stream *s, const struct index_score *p, uint32_t shift)
{
    using l = plan<FMT, CODES, R>;
    static_assert(l::BYTES <= 226 * 1024, "shared memory of sm_90, less what is static");
    CUDA_SHARED((score_kernel<FMT, CODES, R>), l::BYTES);
    score_kernel<FMT, CODES, R><<<(unsigned)s->n_sm, l::THREADS, l::BYTES, s->cu>>>(*p, shift);
}
template <int FMT, bool CODES>
static void launch_rows(struct kern_stream *s, const struct index_score *p, uint32_t shift)
{
    /* Rows of one sequence share its keys. */
    if (p->n_rows >= 2 * p->b.n_seqs)
        launch<FMT, CODES, ROWS>(s, p, shift);
    else
        launch<FMT, CODES, 1>(s, p, shift);
}

bool index_score_wgmma(struct kern_stream *s, const struct index_score *p)
{
    uint32_t shift = 0; /* of tiles in a page: a power of two, so that none straddles two */
    while (TILE << shift < p->kv.y.per_page) shift++;
    if (s->arch != 90 || p->act != KERN_BF16 || p->fmt == KERN_IK_F32 || p->H != HEADS ||
        p->kv.w != W || TILE << shift != p->kv.y.per_page || p->kv.page_bytes > UINT32_MAX)
        return false;
    if (p->fmt == KERN_IK_FP4) launch_rows<KERN_IK_FP4, false>(s, p, shift);
    if (p->fmt == KERN_IK_BF16) launch_rows<KERN_IK_BF16, false>(s, p, shift);
    if (p->fmt == KERN_IK_FP8) {
        if (cuda_fp8_products)
            launch_rows<KERN_IK_FP8, true>(s, p, shift);
        else
            launch_rows<KERN_IK_FP8, false>(s, p, shift);
    }
    return true;
}
