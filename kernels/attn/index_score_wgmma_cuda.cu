/* kernels/attn/index_score_wgmma_cuda.cu - scores of index entries on Hopper: 64 keys on the M side
 * of a warpgroup's products, the 64 heads of one query or two on the N side.
 *
 * The list of tiles is index_score.cuh's, of 64 entries; R rows are a block: one where each has a
 * sequence to itself, else four. A block's queries stand in shared memory, and so does a ring of
 * tiles, some ahead of use, that the copy engine fills.
 *
 * Four rows (`score_tiles`): tiles go to the CTA's warpgroups in turn: a group multiplies when it
 * is its turn, adds up the heads while the others multiply, and finishes and stores a product's
 * scores while its next product runs. Without turns all groups multiply at once and then all add up
 * (a tenth slower). A group's round, from turn to turn, takes longer than the products
 * of all groups, and any latency in it counts: so sums change hands in shared memory. (A group that
 * finished for all the others was what all waited for.) Products of codes are short: two groups
 * share a tile, and each has the weights of its two queries in registers. One row (`score_rows`):
 * no turns, see there.
 *
 * Keys that multiply as they lie (bf16; fp8 where products of codes are allowed, cuda_fp8_products)
 * are read by the matrix unit itself. Others are widened on the way to the registers of operand a,
 * once for all queries of the block: fp8 codes become f16 (one instruction for two), for which
 * queries are scaled, head by head, by a power of two that the head's weight takes back: exact for
 * queries of fp8, for others with what is 2^-30 of a head's largest. fp4 codes become bf16. So that
 * sixteen bytes are what one thread widens, k is dealt to slots in an order of the format (see
 * `load_keys`); queries are stored in the same order.
 *
 * A thread has sixteen of 64 heads of two keys: it adds their weighted positive parts in ascending
 * order, then its quad's four. A key's scale (fp8) multiplies the finished sum. Nothing in this
 * order knows R.
 * Bound: decode by reading keys (68, 132 or 256 bytes an entry), prefill by the matrix unit.
 */
#include "kernels/attn/index_score.cuh"
#include "kernels/attn/widen.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    TILE = 64,
    HEADS = 64,
    W = 128,
    ROWS = 4,           /* of a block, where sequences have several */
    WEIGHTS_LD = 20,    /* floats: a thread's sixteen weights, quads' threads in different banks */
    GROUP = 128,        /* threads */
    NOBODY = INT32_MIN, /* sees nothing and is told nothing: there is no such row */
};
enum product { MUL_BF16, MUL_F16, MUL_CODES };

template <int FMT, bool CODES> struct keys {
    static constexpr enum product MUL = FMT != KERN_IK_FP8 ? MUL_BF16 : CODES ? MUL_CODES : MUL_F16;
    static constexpr bool WIDEN = FMT == KERN_IK_FP4 || MUL == MUL_F16;
    static constexpr int KS = MUL == MUL_CODES ? W / 32 : W / 16; /* instructions along a key */
    static constexpr int QUERY = MUL == MUL_CODES ? W : 2 * W;    /* bytes of a head */
    static constexpr int ROW = FMT == KERN_IK_FP4 ? W / 2 : FMT == KERN_IK_FP8 ? W : 2 * W;
    /* Of a tile: bf16 keys lie in two halves of 64 values, each as fp8's rows of 128 bytes; scales
     * apart. */
    static constexpr int KEYS = TILE * ROW, SCALES = FMT == KERN_IK_BF16 ? 0 : TILE * 4;
    static constexpr int BYTES = KEYS + SCALES;
};
template <int FMT, bool CODES, int R> struct plan {
    using k = keys<FMT, CODES>;
    static constexpr int GROUPS = R == 1 || CODES ? 4 : 3; /* as many as have the registers */
    /* Several rows: a group has two of them, whose weights its registers keep; else all. */
    static constexpr bool OWN = R > 1 && k::MUL == MUL_CODES;
    static constexpr int THREADS = GROUP * GROUPS;
    /* Several rows: a product's last instructions, during which the next one's turn begins. */
    static constexpr int TAIL = 2;
    static constexpr int N = R == 1 ? HEADS : 2 * HEADS; /* columns of a product */
    static constexpr int HALF = N * 128;                 /* bytes: N heads' rows of 128 */
    /* Tiles under way. For one row some 70 KB on each multiprocessor hide memory's latency, and
     * more make reading slower. For several rows a power of two: the ring is indexed by a count
     * that may wrap around. */
    static constexpr int STAGES =
        R == 1 ? (FMT == KERN_IK_FP4 ? 12 : 8) : (FMT == KERN_IK_BF16 ? 8 : 16);
    static constexpr int EACH = (STAGES + GROUPS - 1) / GROUPS; /* of a group */
    /* Shared memory; queries and keys from multiples of 1024 on. */
    static constexpr int RING = R * HEADS * k::QUERY;
    static constexpr int SCALES = RING + STAGES * k::KEYS;
    static constexpr int WEIGHTS = SCALES + STAGES * k::SCALES;
    static constexpr int SUMS = WEIGHTS + R * 4 * WEIGHTS_LD * 4;
    static constexpr int FULL = SUMS + THREADS * 16; /* four sums of each thread */
    static constexpr int READ = FULL + STAGES * 8;   /* one row only */
    static constexpr int BYTES = READ + STAGES * 8;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The turn to multiply goes round the warpgroups: barrier 1 + g is passed by group g and the one
 * before. */
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

/* Starts the copies of a tile, which lies in the part `from` of page `id`, to a slot of the ring.
 * One thread calls it. A page has 1 << shift tiles, and `scales` bytes into the part its scales. */
template <int FMT, bool CODES, int R>
static __device__ __forceinline__ void
fill_slot(uint8_t *shared, uint32_t stage, uint64_t *full, const CUtensorMap *map, uint32_t shift,
          int32_t tile, uint32_t id, const uint8_t *from, uint32_t scales)
{
    using k = keys<FMT, CODES>;
    using l = plan<FMT, CODES, R>;
    const uint32_t row = ((uint32_t)tile & ((1u << shift) - 1)) * TILE;
    uint8_t *to = shared + l::RING + stage * k::KEYS;
    bar_expect(full, k::BYTES);
    if constexpr (FMT == KERN_IK_FP4) {
        bulk_load(to, from + row * k::ROW, k::KEYS, full);
    } else {
#pragma unroll
        for (int half = 0; half < k::ROW / 128; half++)
            stack_load(to + half * (TILE * 128), map, full, half * 128, (int32_t)row, (int32_t)id);
    }
    if (k::SCALES)
        bulk_load(shared + l::SCALES + stage * k::SCALES, from + scales + row * 4, k::SCALES, full);
}
/* Where a sequence's tiles come from. */
template <int FMT, bool CODES, int R> struct key_source {
    const CUtensorMap *map;
    const uint8_t *part; /* in page 0 */
    int64_t page_bytes;
    const uint32_t *ids;
    uint32_t page_step, shift, scales;

    __device__ __forceinline__ uint32_t page_of(int32_t tile) const
    {
        return __ldg(ids + ((uint32_t)tile >> shift) * page_step);
    }
    __device__ __forceinline__ void fill(uint8_t *shared, uint32_t stage, uint64_t *full,
                                         int32_t tile, uint32_t id) const
    {
        fill_slot<FMT, CODES, R>(shared, stage, full, map, shift, tile, id, part + id * page_bytes,
                                 scales);
    }
};

/* Which of a warp's sixteen keys is row g (0 to 7, and 8 behind) of its products: two neighbouring
 * rows' first or last four pieces must lie in different banks where threads read them in the copy
 * engine's order. */
template <int FMT, bool CODES> static __device__ __forceinline__ int key_of_row(int g)
{
    return keys<FMT, CODES>::MUL == MUL_F16 ? g / 2 + g % 2 * 4 : g;
}
static __device__ __forceinline__ void e4m3x4_f16(uint32_t codes, uint32_t *lo, uint32_t *hi)
{
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; "
        "cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(*lo), "=r"(*hi)
        : "r"(codes));
}

/* Operand a of a warp's 16 keys: as they lie, or widened. Slots: of a thread c of a quad, the lower
 * ones are 2 c, 2 c + 1, the upper ones 8 behind.
 *   fp8    instruction 4 h + i: codes 64 h + 16 c + 4 i + {0, 1} in the lower slots, {2, 3} in the
 *          upper ones
 *   fp4    instruction 2 i + u: codes 32 c + 8 i + 2 u + {0, 4}, and {1, 5} */
template <int FMT, bool CODES>
static __device__ __forceinline__ void load_keys(const uint8_t *codes, const uint8_t *scales,
                                                 uint32_t (&a)[keys<FMT, CODES>::KS][4])
{
    using k = keys<FMT, CODES>;
    const int lane = threadIdx.x % 32, c = lane % 4;
    if constexpr (!k::WIDEN) {
        const int row = threadIdx.x % GROUP / 32 * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < k::KS; j++)
            dev_ldmatrix4(a[j], codes + j / 4 * (TILE * 128) + row * 128 +
                                    ((j % 4 * 2 + lane / 16) ^ (row & 7)) * 16);
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row =
                threadIdx.x % GROUP / 32 * 16 + key_of_row<FMT, CODES>(lane / 4) + 8 * r;
            if constexpr (FMT == KERN_IK_FP8) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint4 v =
                        *(const uint4 *)(codes + row * k::ROW + ((c + 4 * h) ^ (row & 7)) * 16);
                    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        e4m3x4_f16(w[i], &a[4 * h + i][r], &a[4 * h + i][2 + r]);
                }
            } else {
                const uint4 v = *(const uint4 *)(codes + row * k::ROW + c * 16);
                const uint32_t s = dev_ue8m0_bf16x2(scales[row * 4 + c]);
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

/* Queries of n rows from t on in the order of operand a, and their weights thread by thread of a
 * quad. */
template <int FMT, bool CODES, int R>
static __device__ __forceinline__ void load_queries(const struct index_score &p, int32_t t,
                                                    int32_t n, uint8_t *q, float *weights)
{
    using k = keys<FMT, CODES>;
    using l = plan<FMT, CODES, R>;
    constexpr int PER = W / 8; /* pieces of a head; its threads are half a warp */
#pragma unroll 4
    for (int x = threadIdx.x; x < n * HEADS * PER; x += l::THREADS) {
        const int piece = x % PER, r = x / PER / HEADS, h = x / PER % HEADS;
        const uint4 v = __ldg((const uint4 *)p.q + (int64_t)t * HEADS * PER + x);
        /* A column of a product; in it piece i of sixteen bytes of row `half`. */
        const int row = r % 2 * HEADS + h;
        uint8_t *at = q + r / 2 * (2 * HEADS * k::QUERY) + row * 128;
        const auto place = [&](int half, int i) {
            return at + half * l::HALF + (i ^ (row & 7)) * 16;
        };
        /* Where widened: the four bytes of instruction j for thread c of a quad. */
        const auto put = [&](int j, int upper, int c, uint32_t word) {
            *(uint32_t *)(place(j / 4, j % 4 * 2 + upper) + c * 4) = word;
        };
        float weight = 1.0f;
        if constexpr (FMT == KERN_IK_BF16) {
            *(uint4 *)place(piece / 8, piece % 8) = v;
        } else if constexpr (FMT == KERN_IK_FP4) {
            const int j = piece % 4 * 2, c = piece / 4;
            put(j, 0, c, __byte_perm(v.x, v.z, 0x5410));
            put(j, 1, c, __byte_perm(v.x, v.z, 0x7632));
            put(j + 1, 0, c, __byte_perm(v.y, v.w, 0x5410));
            put(j + 1, 1, c, __byte_perm(v.y, v.w, 0x7632));
        } else {
            /* The head's largest comes to [2^14, 2^15), or [2^7, 2^8): what it may at most without
             * overflow. Exponents are bounded so that the weight takes them; beyond lies nothing
             * real. */
            uint32_t top = __vmaxu2(__vmaxu2(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu),
                                    __vmaxu2(v.z & 0x7fff7fffu, v.w & 0x7fff7fffu));
#pragma unroll
            for (int m = 1; m < PER; m *= 2) top = __vmaxu2(top, __shfl_xor_sync(~0u, top, m));
            int e = (int)(__vmaxu2(top, top >> 16) >> 7 & 0xff) - 127;
            e = (e < -100 ? -100 : e > 100 ? 100 : e) - (k::MUL == MUL_CODES ? 7 : 14);
            const float s = power(-e);
            weight = power(e);
            if constexpr (k::MUL == MUL_CODES) {
                *(uint2 *)(place(0, piece / 2) + piece % 2 * 8) =
                    make_uint2(to_e4m3x4(v.x, v.y, s), to_e4m3x4(v.z, v.w, s));
            } else {
                const int j = piece / 8 * 4 + piece % 2 * 2, c = piece / 2 % 4;
                put(j, 0, c, to_f16x2(v.x, s));
                put(j, 1, c, to_f16x2(v.y, s));
                put(j + 1, 0, c, to_f16x2(v.z, s));
                put(j + 1, 1, c, to_f16x2(v.w, s));
            }
        }
        if (piece == 0)
            weights[(r * 4 + h % 8 / 2) * WEIGHTS_LD + h / 8 * 2 + h % 2] =
                kern_bf16_decode(((const uint16_t *)p.wt)[(int64_t)t * HEADS + x / PER]) *
                p.factor * weight;
    }
}

/* A thread's sixteen heads of two keys: weighted positive parts, heads ascending. */
static __device__ __forceinline__ void add_heads(const float *acc, const float *w, float *sum)
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
/* A warp's sums of 16 keys of two queries or tiles (s[0], s[1] and s[2], s[3]: keys `row` and 8
 * behind), each by a quad: they change hands in shared memory, where one trip takes as long as one
 * of the shuffles that would take three, and lane l gets the four of key l % 16 of the first or
 * second. */
static __device__ __forceinline__ void put_sums(float *room, int row, const float (&s)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) room[row * 4 + threadIdx.x % 4 + i * 32] = s[i];
    __syncwarp();
}
static __device__ __forceinline__ float4 take_sums(const float *room)
{
    return *(const float4 *)(room + threadIdx.x % 32 * 4);
}
static __device__ __forceinline__ float quad_sum(const float4 &v)
{
    return (v.x + v.y) + (v.z + v.w);
}
/* The highest of each half warp; passes over NaN. */
static __device__ __forceinline__ float half_best(float v)
{
#pragma unroll
    for (int m = 8; m; m /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    return v;
}

/* What all lanes of a warp have alike, in a register of the warp. */
static __device__ __forceinline__ int32_t of_warp(int32_t v)
{
    return __reduce_max_sync(~0u, v);
}

template <int FMT, bool CODES, int R>
static __device__ __forceinline__ void
score_tiles(const struct index_score &p, const CUtensorMap *map, uint32_t shift, uint8_t *shared)
{
    using k = keys<FMT, CODES>;
    using l = plan<FMT, CODES, R>;
    constexpr int STEPS = l::OWN ? 1 : R / 2; /* products of a group with a tile */
    uint64_t *full = (uint64_t *)(shared + l::FULL);
    float *weights = (float *)(shared + l::WEIGHTS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int group = of_warp(threadIdx.x / GROUP);
    float *sums = (float *)(shared + l::SUMS) + threadIdx.x / 32 * 128;
    /* Of a quad of columns this thread's, and its keys' row. Of what it finishes: the key of a
     * tile, and of a product's queries the one. */
    const int c = lane % 4, row = key_of_row<FMT, CODES>(lane / 4);
    const int query = lane / 16, mine = warp * 16 + lane % 16;
    const uint64_t b = wgmma_rows(shared);
    /* b, n sixteens of bytes further on: the upper half is the same. */
    const auto further = [&](uint32_t n) { return b >> 32 << 32 | (uint32_t)b + n; };
    struct key_source<FMT, CODES, R> src;
    src.map = map;
    src.part = p.kv.pages + p.key_off;
    src.page_bytes = p.kv.page_bytes;
    src.shift = shift;
    src.scales = (uint32_t)p.kv.y.per_page * k::ROW;
    if (threadIdx.x == 0) {
        for (int i = 0; i < l::STAGES; i++) bar_init(&full[i], 1);
        bar_init_done();
    }
    const struct share sh = find_share<TILE, l::THREADS>(p, R);
    int32_t left = sh.tiles, skip = sh.tile;
    uint32_t before = 0; /* tiles of earlier segments */
    cuda_await();
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
            const int32_t first = skip,
                          n = of_warp(g.tiles - first < left ? g.tiles - first : left);
            left -= n;
            skip = 0;
            src.ids = g.q.page_ids + p.companion;
            src.page_step = (uint32_t)g.q.page_step;
            if (warp == group && lane < l::EACH) {
                const int32_t x = group + lane * l::GROUPS;
                const uint32_t stage = (before + (uint32_t)x) % l::STAGES;
                if (x < l::STAGES && x < n)
                    src.fill(shared, stage, &full[stage], first + x, src.page_of(first + x));
            }
            load_queries<FMT, CODES, R>(p, t, g.n, shared, weights);
            wgmma_shared();
            __syncthreads();
            /* A tile is a group's, with all pairs of queries, or is shared by as many groups as
             * there are pairs. */
            const int pairs = of_warp((g.n + 1) / 2), sharing = l::OWN ? pairs : 1;
            const int steps = l::OWN ? 1 : pairs, pair = sharing == 2 ? group % 2 : 0;
            const int32_t x0 = sharing == 2 ? group / 2 : group;
            const int32_t stride = sharing == 2 ? l::GROUPS / 2 : l::GROUPS;
            /* Of those that share a tile the last's thread that has the next one copied: each on
             * another of the four schedulers. */
            const bool copies = warp == group && lane == 0 && pair == sharing - 1;
            /* Of each product: its first score's place, and how many of this segment's entries its
             * query sees from this thread's key on. */
            const uint32_t ld = (uint32_t)p.ld;
            const uint32_t out =
                (uint32_t)(t - p.row0 + 2 * pair + query) * ld + (uint32_t)(first * TILE + mine);
            /* Of a run's first key. (Else worked out again each time.) */
            int32_t tells = p.best && lane % 16 == 0;
            asm("" : "+r"(tells));
            const int last = 2 * (steps - 1); /* query */
            int32_t sees[STEPS];
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                const int32_t r = 2 * (pair + i) + query;
                sees[i] = r < g.n ? dev_visible(p.kv, g.q, t + r) - first * TILE - mine : NOBODY;
            }
            const int32_t last_sees = steps == STEPS ? sees[STEPS - 1] : sees[0];
            /* A score of a product of tile x, queries from `from` on; and the best of its run. */
            const auto place = [&](int32_t x, int from) {
                return out + (uint32_t)from * ld + (uint32_t)(x * TILE);
            };
            const auto finish = [&](const float4 &four, float scale, int32_t x, int from,
                                    int32_t see) {
                float v = quad_sum(four);
                if (FMT == KERN_IK_FP8) v *= scale;
                v = x * TILE < see ? v : kern_float(0x7fc00000u);
                if (see != NOBODY) p.out[place(x, from)] = v;
                return v;
            };
            const auto tell = [&](float v, int32_t x, int from, int32_t see) {
                const float best = half_best(v);
                if (see != NOBODY && tells) p.best[place(x, from) / INDEX_RUN] = best;
            };
            uint32_t id = 0; /* page of the tile that takes the next one's place */
            if (copies && x0 + l::STAGES < n) id = src.page_of(first + x0 + l::STAGES);
            /* All have read tile x: the one that follows in its place may come. */
            const auto refill = [&](int32_t x, uint32_t stage) {
                if (!copies || x + l::STAGES >= n) return;
                src.fill(shared, stage, &full[stage], first + x + l::STAGES, id);
                if (x + stride + l::STAGES < n) id = src.page_of(first + x + stride + l::STAGES);
            };
            const float *of = weights + (pair * 8 + c) * WEIGHTS_LD;
            float own[2][16];
            if (l::OWN) {
                read_weights(of, own[0]);
                read_weights(of + 4 * WEIGHTS_LD, own[1]);
            }
            float4 four = {}; /* sums of the product before */
            float scale = 1.0f;
            int32_t x = x0;
            for (; x < n; x += stride) {
                const uint32_t at = before + (uint32_t)x, stage = at % l::STAGES;
                const uint8_t *scales = shared + l::SCALES + stage * k::SCALES;
                const float scale_before = scale;
                uint32_t a[k::WIDEN ? k::KS : 1][4];
                bar_wait(&full[stage], (int)(at / l::STAGES & 1));
                if constexpr (k::WIDEN)
                    load_keys<FMT, CODES>(shared + l::RING + stage * k::KEYS, scales, a);
                if (FMT == KERN_IK_FP8) scale = kern_f32_scale(((const float *)scales)[mine]);
                const uint32_t keys_at = (l::RING >> 4) + stage * (k::KEYS >> 4);
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    if (step >= steps) break;
                    float acc[l::N / 2], sum[4];
                    const uint32_t q_at = (uint32_t)(pair + step) * (2 * HEADS * k::QUERY >> 4);
                    turn_wait<l::GROUPS>(group);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < k::KS; j++) {
                        const uint64_t bj =
                            further(q_at + (uint32_t)(j / 4 * (l::HALF >> 4) + j % 4 * 2));
                        const uint64_t aj =
                            further(keys_at + (uint32_t)(j / 4 * (TILE * 128 >> 4) + j % 4 * 2));
                        if constexpr (k::MUL == MUL_CODES)
                            wgmma_e4m3(acc, aj, bj, j > 0);
                        else if constexpr (k::MUL == MUL_F16)
                            wgmma_f16(acc, a[j], bj, j > 0);
                        else if constexpr (k::WIDEN)
                            wgmma_bf16(acc, a[j], bj, j > 0);
                        else
                            wgmma_bf16(acc, aj, bj, j > 0);
                        if (j + 1 == k::KS - l::TAIL) wgmma_commit();
                    }
                    wgmma_commit();
                    if (!l::OWN) read_weights(of + step * (8 * WEIGHTS_LD), own[0]);
                    /* Meanwhile. What is behind a branch stays there. */
                    float v = 0.0f;
                    if (step == 0 && x != x0)
                        v = finish(four, scale_before, x - stride, last, last_sees);
                    else if (step > 0 && p.n_rows > 0) /* always */
                        v = finish(four, scale, x, 2 * (step - 1), sees[step - 1]);
                    wgmma_wait<1>();
                    turn_pass<l::GROUPS>(group);
                    if (step == 0 && x != x0)
                        tell(v, x - stride, last, last_sees);
                    else if (step > 0 && p.n_rows > 0)
                        tell(v, x, 2 * (step - 1), sees[step - 1]);
                    if (step == 0) {
                        /* The turn's barrier: the group has read this tile, or multiplied
                         * the last, and so has the one that shares it. */
                        if (k::WIDEN)
                            refill(x, stage);
                        else if (x != x0)
                            refill(x - stride, (stage - (uint32_t)stride) % l::STAGES);
                    }
                    wgmma_wait<0>();
                    wgmma_pin(acc);
                    add_heads(acc, own[0], sum);
                    if (!l::OWN)
                        read_weights(of + step * (8 * WEIGHTS_LD) + 4 * WEIGHTS_LD, own[0]);
                    add_heads(acc + HEADS / 2, own[l::OWN], sum + 2);
                    put_sums(sums, row, sum);
                    four = take_sums(sums);
                }
            }
            if (x < n + x0) /* all take as many turns */
                for (int step = 0; step < steps; step++) {
                    turn_wait<l::GROUPS>(group);
                    turn_pass<l::GROUPS>(group);
                }
            if (x != x0)
                tell(finish(four, scale, x - stride, last, last_sees), x - stride, last, last_sees);
            before += (uint32_t)n;
            __syncthreads(); /* the queries may go */
            t += g.n;
        }
    }
    if (group == 0) turn_wait<l::GROUPS>(group); /* of nobody: barriers end as they began */
}

/* Where a block is one row, whose tiles come one after the other: groups take them without turns,
 * which would hold them up. Keys are operand a from registers, so that their slot is free at once;
 * scores of two tiles of a group are finished together, as those of two queries are above. */
template <int FMT, bool CODES>
static __device__ __forceinline__ void
score_rows(const struct index_score &p, const CUtensorMap *map, uint32_t shift, uint8_t *shared)
{
    using k = keys<FMT, CODES>;
    using l = plan<FMT, CODES, 1>;
    /* A group has read a slot: its other warps say so, the one that has the next tile copied there
     * waits for it. */
    uint64_t *full = (uint64_t *)(shared + l::FULL), *read = (uint64_t *)(shared + l::READ);
    float *weights = (float *)(shared + l::WEIGHTS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / GROUP;
    float *sums = (float *)(shared + l::SUMS) + threadIdx.x / 32 * 128;
    /* As above; what a thread finishes is of the first or second of two tiles. */
    const int c = lane % 4, row = key_of_row<FMT, CODES>(lane / 4);
    const int later = lane / 16 * l::GROUPS, mine = warp * 16 + lane % 16;
    /* Of a group, the warp that has tiles copied: each on another of the four schedulers. */
    const bool copies = warp == group;
    const uint64_t b = wgmma_rows(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < l::STAGES; i++) {
            bar_init(&full[i], 1);
            bar_init(&read[i], GROUP / 32 - 1);
        }
        bar_init_done();
    }
    const struct share sh = find_share<TILE, l::THREADS>(p, 1);
    int32_t left = sh.tiles, skip = sh.tile;
    /* Of the group's part of the ring, the slot of its next tile. */
    int slot = 0, phase = 0;
    cuda_await();
    for (int32_t block = sh.block; left > 0; block++) {
        const int32_t end = block_end(p, block, 1);
        for (int32_t t = p.row0 + block; t < end && left > 0;) {
            const struct segment g = segment_at<TILE>(p, t, end);
            if (skip >= g.tiles) {
                skip -= g.tiles;
                t += g.n;
                continue;
            }
            const int32_t first = skip, n = g.tiles - first < left ? g.tiles - first : left;
            left -= n;
            skip = 0;
            const auto page_of = [&](int32_t tile) {
                return __ldg(g.q.page_ids + p.companion +
                             ((uint32_t)tile >> shift) * (uint32_t)g.q.page_step);
            };
            /* Starts the copies of a tile, of page `id`. One thread calls it. */
            const auto fill = [&](int at, int32_t tile, uint32_t id) {
                fill_slot<FMT, CODES, 1>(shared, (uint32_t)at, &full[at], map, shift, tile, id,
                                         p.kv.pages + p.key_off + id * p.kv.page_bytes,
                                         (uint32_t)(p.kv.y.per_page * k::ROW));
            };
            if (copies && lane < l::EACH) {
                const int32_t x = group + lane * l::GROUPS;
                const int s = group * l::EACH + (slot + lane) % l::EACH;
                if (x < n) fill(s, first + x, page_of(first + x));
            }
            load_queries<FMT, CODES, 1>(p, t, g.n, shared, weights);
            wgmma_shared();
            __syncthreads();
            /* Of two tiles: the first score's place, and how many entries the row sees and this
             * share has from this thread's key on. The thread of a run's first key tells its
             * best. */
            const int32_t key = later * TILE + mine;
            const uint32_t out =
                (uint32_t)(t - p.row0) * (uint32_t)p.ld + (uint32_t)(first * TILE + key);
            const bool tells = p.best && lane % 16 == 0;
            const int32_t seen = dev_visible(p.kv, g.q, t) - first * TILE;
            const uint32_t sees = (uint32_t)(seen > key ? seen - key : 0);
            const uint32_t tiles = (uint32_t)(n > later ? (n - later) * TILE : 0);
            /* Scores of this group's tiles x and next; x < 0: there are none. */
            const auto finish = [&](const float4 &four, float scale, int32_t x) {
                float v = quad_sum(four);
                if (FMT == KERN_IK_FP8) v *= scale;
                v = (uint32_t)(x * TILE) < sees ? v : kern_float(0x7fc00000u);
                const bool is = (uint32_t)(x * TILE) < tiles;
                const uint32_t at = out + (uint32_t)(x * TILE);
                if (is) p.out[at] = v;
                const float best = half_best(v);
                if (is && tells) p.best[at / INDEX_RUN] = best;
            };
            uint32_t id = 0; /* page of the tile that takes the next one's place */
            if (copies && group + l::STAGES < n) id = page_of(first + group + l::STAGES);
            uint32_t a[k::KS][4];
            float scale = 1.0f;
            int s = group * l::EACH + slot;
            const auto wait = [&](void) { bar_wait(&full[s], phase); };
            /* The group's next tile, which has come, as operand a. */
            const auto take = [&](void) {
                const uint8_t *scales = shared + l::SCALES + s * k::SCALES;
                load_keys<FMT, CODES>(shared + l::RING + s * k::KEYS, scales, a);
                if (FMT == KERN_IK_FP8) scale = kern_f32_scale(((const float *)scales)[mine]);
                if (!copies) {
                    __syncwarp();
                    if (lane == 0) bar_arrive(&read[s]);
                }
            };
            /* Some time after that: the tile that follows in its place may come. */
            const auto refill = [&](int32_t x) {
                if (copies) {
                    bar_wait(&read[s], phase);
                    __syncwarp();
                    if (lane == 0 && x + l::STAGES < n) {
                        fill(s, first + x + l::STAGES, id);
                        if (x + l::GROUPS + l::STAGES < n)
                            id = page_of(first + x + l::GROUPS + l::STAGES);
                    }
                }
                if (++slot == l::EACH) {
                    slot = 0;
                    phase ^= 1;
                }
                s = group * l::EACH + slot;
            };
            /* A product is finished while another is under way. */
            float sum[4] = {}, scale_before = 1.0f, acc[l::N / 2];
            float4 four = {};
            int32_t x = group;
            float own[16];
            read_weights(weights + c * WEIGHTS_LD, own);
            const auto score = [&](float *of, auto meanwhile) {
                wait();
                take();
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < k::KS; j++) {
                    const uint64_t bj = b + (uint64_t)(j / 4 * (l::N * 128 >> 4) + j % 4 * 2);
                    if constexpr (k::MUL == MUL_CODES)
                        wgmma_e4m3(acc, a[j], bj, j > 0);
                    else if constexpr (k::MUL == MUL_F16)
                        wgmma_f16(acc, a[j], bj, j > 0);
                    else
                        wgmma_bf16(acc, a[j], bj, j > 0);
                }
                wgmma_commit();
                meanwhile();
                refill(x);
                wgmma_wait<0>();
                wgmma_pin(acc);
                add_heads(acc, own, of);
            };
            int32_t two = -1; /* the first of two tiles that wait */
            for (; x < n; x += l::GROUPS) {
                score(sum, [&] { finish(four, scale_before, two); });
                two = x;
                scale_before = scale;
                x += l::GROUPS;
                if (x < n) {
                    score(sum + 2, [] {});
                    if (later) scale_before = scale;
                }
                put_sums(sums, row, sum);
                four = take_sums(sums);
            }
            finish(four, scale_before, two);
            __syncthreads(); /* the queries may go */
            t += g.n;
        }
    }
}

#endif /* sm_90a */

template <int FMT, bool CODES, int R>
static __global__ void __launch_bounds__(plan<FMT, CODES, R>::THREADS, 1)
    score_kernel(const __grid_constant__ struct index_score p,
                 const __grid_constant__ CUtensorMap map, uint32_t shift)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t shared[];
    cuda_hurry();
    if constexpr (R == 1)
        score_rows<FMT, CODES>(p, &map, shift, shared);
    else
        score_tiles<FMT, CODES, R>(p, &map, shift, shared);
#endif
}

template <int FMT, bool CODES, int R>
static void launch(struct kern_stream *s, const struct index_score *p, const CUtensorMap &map,
                   uint32_t shift)
{
    using l = plan<FMT, CODES, R>;
    static_assert(l::BYTES <= 226 * 1024, "shared memory of sm_90, less what is static");
    static_assert(!l::OWN || (R == 4 && l::GROUPS % 2 == 0), "two pairs of queries");
    CUDA_SHARED((score_kernel<FMT, CODES, R>), l::BYTES);
    cuda_launch_early(s, score_kernel<FMT, CODES, R>, dim3((unsigned)s->n_sm), l::THREADS, l::BYTES,
                      *p, map, shift);
}
template <int FMT, bool CODES>
static bool launch_rows(struct kern_stream *s, const struct index_score *p, uint32_t shift)
{
    using k = keys<FMT, CODES>;
    CUtensorMap map = {};
    if (FMT != KERN_IK_FP4 &&
        !cuda_stack_map(&map, p->kv.pages + p->key_off, p->kv.y.per_page, k::ROW, k::ROW, INT32_MAX,
                        p->kv.page_bytes, TILE, TILE_BYTES)) /* as many pages as may be */
        return false;
    /* Rows of one sequence share its keys. */
    if (p->n_rows >= 2 * p->b.n_seqs)
        launch<FMT, CODES, ROWS>(s, p, map, shift);
    else
        launch<FMT, CODES, 1>(s, p, map, shift);
    return true;
}

bool index_score_wgmma(struct kern_stream *s, const struct index_score *p)
{
    uint32_t shift = 0; /* of tiles in a page: a power of two, so that none straddles two */
    while (TILE << shift < p->kv.y.per_page) shift++;
    if (s->arch != 90 || p->act != KERN_BF16 || p->H != HEADS || p->kv.w != W ||
        TILE << shift != p->kv.y.per_page)
        return false;
    switch (p->fmt) {
    case KERN_IK_FP4: return launch_rows<KERN_IK_FP4, false>(s, p, shift);
    case KERN_IK_BF16: return launch_rows<KERN_IK_BF16, false>(s, p, shift);
    case KERN_IK_FP8:
        return cuda_fp8_products ? launch_rows<KERN_IK_FP8, true>(s, p, shift)
                                 : launch_rows<KERN_IK_FP8, false>(s, p, shift);
    default: return false;
    }
}
