/* kernels/moe/moe_cuda.cu - the routed experts: pairs are sorted on the device, then five launches
 * whose shape depends on T alone.
 *
 *     plan      one block: counts, prefix sums, pairs by expert, tiles                  (moe_plan);
 *               the others: x quantized and prepared (rows of pairs need the plan: launches of
 *               their own)
 *     product   gate and up, the activation, times the routing weight                (moe_product)
 *     rows      that, quantized and prepared; of products of codes, the activation first
 *     product   down
 *     combine   each row's pairs in ascending expert id
 *
 * Results lie pair by pair between the products, so a pair's values never meet another's before
 * combine adds them in a fixed order. f32 activations or weights and odd mixes of formats go
 * through plain dot products, a warp each.
 *
 * There are two kinds of products, bf16 and e4m3 (moe_wgmma.cuh). Which one it is depends on what
 * an op's T does not change: the switch, the experts' formats and shapes, and how they were placed.
 * Products by wgmma read images of rows, which need the plan: their rows are a launch of their own.
 */
#include "kernels/moe/moe_cuda.cuh"

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/quant.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

int cuda_wide_experts = 5;
/* Pairs an expert has on average from which its tiles by wgmma are middle, and wide: below, few
 * experts have more than one, which would widen their weights again. */
enum { MIDDLE_FROM = 22, WIDE_FROM = 96 };

static const unsigned ALL = 0xffffffffu;
enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    PLAN_WARPS = 32, /* at most */
    SORT_AHEAD = 24,
    SORT_WARPS = 8,  /* whose counts of an expert are fetched at once */
    SORT_TILES = 128 /* pairs of a tile: where there are many, their order matters */
};

/* ------------------------------------------------------------------ plan */

/* Exclusive sums of (a, b) over the block's threads in *a, *b; totals in *sum_a, *sum_b. */
static __device__ __forceinline__ void block_scan(int32_t *a, int32_t *b, int32_t *sum_a,
                                                  int32_t *sum_b, int32_t (*room)[32])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = blockDim.x / 32;
    int32_t x = *a, y = *b;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int32_t u = __shfl_up_sync(ALL, x, d), v = __shfl_up_sync(ALL, y, d);
        if (lane >= d) x += u, y += v;
    }
    __syncthreads(); /* room may still be read from */
    if (lane == 31) room[0][warp] = x, room[1][warp] = y;
    __syncthreads();
    int32_t before_a = 0, before_b = 0, all_a = 0, all_b = 0;
    for (int i = 0; i < n; i++) {
        if (i < warp) before_a += room[0][i], before_b += room[1][i];
        all_a += room[0][i], all_b += room[1][i];
    }
    *a = before_a + x - *a, *b = before_b + y - *b;
    *sum_a = all_a, *sum_b = all_b;
}

/* The expert of pair i, -1: none. */
static __device__ __forceinline__ int32_t expert_of(const int32_t *experts, int32_t i, int32_t n,
                                                    int32_t E)
{
    const int32_t e = i < n ? experts[i] : -1;
    return e >= 0 && e < E ? e : -1;
}

/* Tiles by size, largest first, in steps of what a product of codes rounds widths up to: then blocks
 * that take them in turn are done at the same time. Which of one size comes first is left open. */
static __device__ __forceinline__ void sort_tiles(const struct moe_plan &plan, int32_t n)
{
    enum { STEP = 16, SIZES = 256 / STEP + 1 };
    __shared__ int32_t count[SIZES];
    if (plan.tokens < SORT_TILES || n > (int32_t)blockDim.x) return;
    if (threadIdx.x < SIZES) count[threadIdx.x] = 0;
    __syncthreads(); /* tiles are there, too */
    const bool mine = (int32_t)threadIdx.x < n;
    struct moe_tile tile = {0, 0, 0};
    if (mine) tile = plan.tiles[threadIdx.x];
    const int32_t size = (tile.n + STEP - 1) / STEP;
    const int32_t at = mine ? atomicAdd(count + size, 1) : 0;
    __syncthreads();
    int32_t before = at;
    for (int32_t i = size + 1; i < SIZES; i++) before += count[i];
    if (mine) plan.tiles[before] = tile;
}

/* A warp owns a stretch of pairs; hist[warp][expert] counts, then says where its next one goes.
 * Which of a warp's pairs of one expert comes first is left open: no bit of a result depends on it.
 * Pairs are read SORT_AHEAD at a time, for the memory's latency. Unless `listed`, plan.order gets
 * places without a pair only. */
static __device__ __forceinline__ void sort_pairs(const int32_t *experts, int32_t n, int32_t E,
                                                  const struct moe_plan &plan, bool listed)
{
    extern __shared__ int32_t hist[];
    __shared__ int32_t room[2][32];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int32_t each = ((n + warps - 1) / warps + 31) / 32 * 32;
    const int32_t begin = threadIdx.x / 32 * each, end = begin + each < n ? begin + each : n;
    int32_t *mine = hist + (int64_t)(threadIdx.x / 32) * E;
    for (int32_t e = threadIdx.x; e < warps * E; e += blockDim.x) hist[e] = 0;
    __syncthreads();
    for (int32_t i0 = begin; i0 < end; i0 += 32 * SORT_AHEAD) {
        int32_t e[SORT_AHEAD];
#pragma unroll
        for (int u = 0; u < SORT_AHEAD; u++) e[u] = expert_of(experts, i0 + u * 32 + lane, end, E);
#pragma unroll
        for (int u = 0; u < SORT_AHEAD; u++)
            if (e[u] >= 0) atomicAdd(mine + e[u], 1);
    }
    __syncthreads();
    int32_t pairs = 0, tiles = 0;
    for (int32_t e0 = 0; e0 < E; e0 += (int32_t)blockDim.x) {
        const int32_t e = e0 + (int32_t)threadIdx.x;
        int32_t count = 0;
        for (int w0 = 0; w0 < warps && e < E; w0 += SORT_WARPS) {
            int32_t c[SORT_WARPS];
#pragma unroll
            for (int w = 0; w < SORT_WARPS; w++) c[w] = w0 + w < warps ? hist[(w0 + w) * E + e] : 0;
#pragma unroll
            for (int w = 0; w < SORT_WARPS; w++) {
                if (w0 + w < warps) hist[(w0 + w) * E + e] = count;
                count += c[w];
            }
        }
        const int32_t n_tiles = (count + plan.tokens - 1) / plan.tokens;
        const int32_t places = (count + plan.align - 1) / plan.align * plan.align;
        int32_t first = places, tile = n_tiles, sum_pairs, sum_tiles;
        block_scan(&first, &tile, &sum_pairs, &sum_tiles, room);
        first += pairs, tile += tiles;
        pairs += sum_pairs, tiles += sum_tiles;
        for (int w0 = 0; w0 < warps && e < E; w0 += SORT_WARPS) {
            int32_t c[SORT_WARPS];
#pragma unroll
            for (int w = 0; w < SORT_WARPS; w++) c[w] = w0 + w < warps ? hist[(w0 + w) * E + e] : 0;
#pragma unroll
            for (int w = 0; w < SORT_WARPS; w++)
                if (w0 + w < warps) hist[(w0 + w) * E + e] = c[w] + first;
        }
        for (int32_t i = 0; i < n_tiles; i++) {
            const int32_t at = i * plan.tokens;
            plan.tiles[tile + i] = {e, first + at,
                                    count - at < plan.tokens ? count - at : plan.tokens};
        }
        for (int32_t i = count; i < places; i++) plan.order[first + i] = -1;
    }
    if (threadIdx.x == 0) *plan.n_pairs = pairs;
    for (int32_t i = tiles + (int32_t)threadIdx.x; i < plan.max_tiles; i += (int32_t)blockDim.x)
        plan.tiles[i] = {0, 0, 0};
    sort_tiles(plan, tiles);
    __syncthreads();
    for (int32_t i0 = begin; i0 < end; i0 += 32 * SORT_AHEAD) {
        int32_t e[SORT_AHEAD];
#pragma unroll
        for (int u = 0; u < SORT_AHEAD; u++) e[u] = expert_of(experts, i0 + u * 32 + lane, end, E);
#pragma unroll
        for (int u = 0; u < SORT_AHEAD; u++) {
            const int32_t i = i0 + u * 32 + lane, at = e[u] >= 0 ? atomicAdd(mine + e[u], 1) : -1;
            if (i < end) plan.place[i] = at;
            if (at >= 0 && listed) plan.order[at] = i;
        }
    }
}

/* ------------------------------------------------------------------ rows for the matrix unit */

struct rows {
    const uint16_t *x; /* [n, k] bf16 */
    uint16_t *out;     /* [n, kp], prepared */
    struct moe_plan plan;
    const int32_t *experts;
    const struct cuda_weight *w; /* for input scales: rows are pairs'; else NULL */
    int32_t k, kp, slots;
    bool pairs;  /* there are as many rows as pairs */
    bool gather; /* row i is made of the row of x that pair i has */
    enum kern_act_quant aq;
};

/* e4m3 round trip of a block of 128, four values a lane. */
static __device__ __forceinline__ void round_a128(float (&v)[4])
{
    float m = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) m = fmaxf(m, fabsf(v[i]));
    const uint8_t c = kern_e4m3_scale_code(dev_warp_max(m));
    const float scale = kern_ue8m0_decode(c), inverse = kern_ue8m0_inverse(c);
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = dev_e4m3_decode(__nv_cvt_float_to_fp8(v[i] * inverse, __NV_SATFINITE, __NV_E4M3)) *
               scale;
}
/* e2m1 round trip of a block of 16 with scale g * e4m3, a quarter of it a lane; the result lacks g
 * if without. */
static __device__ __forceinline__ void round_nvfp4(float (&v)[4], float g, bool without)
{
    float m = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) m = fmaxf(m, fabsf(v[i]));
    m = fmaxf(m, __shfl_xor_sync(ALL, m, 1));
    m = fmaxf(m, __shfl_xor_sync(ALL, m, 2));
    /* In double as on the CPU, where a float quotient could land on a tie. */
    const float code = dev_e4m3_decode(kern_e4m3_encode((float)((double)m / 6.0 / (double)g)));
    const double scale = (double)code * (double)g;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float e =
            scale > 0 ? dev_e2m1_decode(kern_e2m1_encode((float)((double)v[i] / scale))) : 0.0f;
        v[i] = without ? e * code : (float)((double)e * scale);
    }
}

/* Elements k0 .. k0+3 of a row of k; zero beyond. */
static __device__ __forceinline__ void load_row4(const uint16_t *x, int32_t k0, int32_t k,
                                                 float (&v)[4])
{
    if (k0 + 4 <= k && ((uintptr_t)(x + k0) & 7) == 0) {
        const uint2 a = *(const uint2 *)(x + k0);
        v[0] = kern_float(a.x << 16), v[1] = kern_float(a.x & 0xffff0000u);
        v[2] = kern_float(a.y << 16), v[3] = kern_float(a.y & 0xffff0000u);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = k0 + i < k ? kern_bf16_decode(x[k0 + i]) : 0.0f;
    }
}
/* The same as they are. */
static __device__ __forceinline__ uint2 load_words4(const uint16_t *x, int32_t k0, int32_t k)
{
    if (k0 + 4 <= k && ((uintptr_t)(x + k0) & 7) == 0) return *(const uint2 *)(x + k0);
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = k0 + i < k ? x[k0 + i] : 0;
    return make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
}
/* The larger one of m and two magnitudes each; NaN is passed over. */
static __device__ __forceinline__ __nv_bfloat162 larger2(__nv_bfloat162 m, uint32_t two)
{
    const uint32_t magnitudes = two & 0x7fff7fffu;
    __nv_bfloat162 v;
    memcpy(&v, &magnitudes, 4);
    return __hmax2(m, v);
}
static __device__ __forceinline__ uint2 pack_row4(const float (&v)[4])
{
    return make_uint2(kern_bf16_encode(v[0]) | (uint32_t)kern_bf16_encode(v[1]) << 16,
                      kern_bf16_encode(v[2]) | (uint32_t)kern_bf16_encode(v[3]) << 16);
}

/* A warp's 128 values of a row, from begin on. */
static __device__ __forceinline__ void prepare(const struct rows &p, int64_t row, int32_t begin)
{
    const int lane = threadIdx.x % 32;
    const int32_t k0 = begin + lane * 4;
    float v[4];
    load_row4(p.x + (p.gather ? p.plan.order[row] / p.slots : row) * (int64_t)p.k, k0, p.k, v);
    if (p.aq == KERN_AQ_A128) round_a128(v);
    if (p.aq == KERN_AQ_NVFP4) round_nvfp4(v, p.w[p.experts[p.plan.order[row]]].input_scale, true);
    *(uint2 *)(p.out + row * p.kp + k0) = pack_row4(v);
}

static __global__ void __launch_bounds__(THREADS) rows_kernel(const __grid_constant__ struct rows p)
{
    const int32_t begin = ((int32_t)blockIdx.y * WARPS + threadIdx.x / 32) * 128;
    if (begin < p.kp && (!p.pairs || (int64_t)blockIdx.x < *p.plan.n_pairs))
        prepare(p, blockIdx.x, begin);
}

static void launch_rows(struct kern_stream *s, const struct rows *p, int64_t n)
{
    const dim3 grid((unsigned)n, (unsigned)cuda_ceil(p->kp / 128, WARPS));
    rows_kernel<<<grid, THREADS, 0, s->cu>>>(*p);
}

/* Images of rows for products by wgmma, laid out as moe_wgmma.cuh says. */
struct image {
    const uint16_t *x; /* bf16: [n, k] rows of the batch, or [room, k] of places */
    uint8_t *out;      /* [pieces][room][128 bytes] */
    float *scale;      /* e4m3: [room] */
    struct moe_plan plan;
    int32_t k, kp;
    int32_t slots; /* of a row of the batch, each with an image of it; 0: rows are places' */
    enum kern_act_quant aq; /* e4m3: A128 */
};

/* The row of an item and its places. Of a row of the batch the warp that is `first` writes which
 * pairs lie there: the one block that sorts would take half its time to write to so many places. */
static __device__ __forceinline__ int64_t image_row(const struct image &p, int64_t item, bool first,
                                                    const int32_t **places)
{
    *places = p.plan.place + item * (p.slots ? p.slots : 1);
    for (int32_t i = threadIdx.x % 32; first && i < p.slots; i += 32)
        if ((*places)[i] >= 0) p.plan.order[(*places)[i]] = (int32_t)(item * p.slots + i);
    return p.slots ? item : **places;
}

enum { IMAGE_BLOCKS = 4 }; /* times 128 values of a row that a warp has, read at once */

static __global__ void __launch_bounds__(THREADS)
    image_bf16_kernel(const __grid_constant__ struct image p, int64_t items)
{
    const int lane = threadIdx.x % 32, q = lane % 8;
    const int32_t n_kb = p.kp / 128, each = (n_kb + IMAGE_BLOCKS - 1) / IMAGE_BLOCKS;
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (at / each >= items) return;
    const int32_t kb0 = (int32_t)(at % each) * IMAGE_BLOCKS, n = p.slots ? p.slots : 1;
    const int32_t *places;
    const int64_t row = image_row(p, at / each, at % each == 0, &places);
    if (row < 0) return;
    float v[IMAGE_BLOCKS][4];
#pragma unroll
    for (int b = 0; b < IMAGE_BLOCKS; b++)
        load_row4(p.x + row * p.k, (kb0 + b) * 128 + lane * 4, p.k, v[b]);
#pragma unroll
    for (int b = 0; b < IMAGE_BLOCKS; b++) {
        if (kb0 + b >= n_kb) break;
        if (p.aq == KERN_AQ_A128) round_a128(v[b]);
        const uint2 two = pack_row4(v[b]);
        for (int32_t i = 0; i < n; i++) {
            const int64_t place = places[i];
            if (place < 0) continue;
            const int piece = q % 4 * 2 ^ (int)(place % 8);
            uint8_t *out = p.out + (((kb0 + b) * 2 + q / 4) * (int64_t)p.plan.room + place) * 128 +
                           lane / 8 * 4;
            *(uint32_t *)(out + piece * 16) = two.x;
            *(uint32_t *)(out + (piece ^ 1) * 16) = two.y;
        }
    }
}

/* A block has a row of the batch, a half of a warp 128 values of it at a time, a lane the two words
 * that lie side by side in an image. Values wait for the row's largest as they came, for registers.
 * The row is read and quantized while pairs are sorted: the plan, which lets this kernel begin, has
 * itself waited for what made x. */
enum {
    IMAGE_PASSES = 4,
    IMAGE_WARP = IMAGE_PASSES * 256, /* values of a warp */
    IMAGE_WARPS = 32,
    IMAGE_WIDTH = IMAGE_WARPS * IMAGE_WARP /* at most */
};
static __global__ void __launch_bounds__(32 * IMAGE_WARPS)
    image_e4m3_kernel(const __grid_constant__ struct image p)
{
    __shared__ uint32_t most[IMAGE_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, piece = lane % 8,
              t = lane % 16 / 8 * 2;
    const int32_t n_kb = p.kp / 128, kb0 = warp * (IMAGE_PASSES * 2) + lane / 16;
    const uint16_t *x = p.x + (int64_t)blockIdx.x * p.k;
    uint2 v[IMAGE_PASSES][2];
#pragma unroll
    for (int b = 0; b < IMAGE_PASSES; b++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            v[b][h] = load_words4(x, (kb0 + b * 2) * 128 + (t + h) * 32 + piece * 4, p.k);
    __nv_bfloat162 m = __float2bfloat162_rn(0.0f);
#pragma unroll
    for (int i = 0; i < IMAGE_PASSES * 2; i++)
        m = larger2(larger2(m, v[i / 2][i % 2].x), v[i / 2][i % 2].y);
    /* Numbers that are not negative are in the order of their bits. */
    const uint32_t here = __reduce_max_sync(ALL, kern_bits(fmaxf(__low2float(m), __high2float(m))));
    if (lane == 0) most[warp] = here;
    __syncthreads();
    const uint32_t of_row = __reduce_max_sync(ALL, lane < (int)blockDim.x / 32 ? most[lane] : 0);
    const uint8_t c = kern_e4m3_scale_code(kern_float(of_row));
    const float inverse = kern_ue8m0_inverse(c);
#pragma unroll
    for (int i = 0; i < IMAGE_PASSES * 2; i++) {
        uint2 &w = v[i / 2][i % 2];
        const float u[4] = {
            kern_float(w.x << 16) * inverse, kern_float(w.x & 0xffff0000u) * inverse,
            kern_float(w.y << 16) * inverse, kern_float(w.y & 0xffff0000u) * inverse};
        w.x = dev_codes4(u);
    }
    const int32_t *places;
    cuda_await();
    cuda_hurry();
    image_row(p, blockIdx.x, warp == 0, &places);
    for (int32_t i = 0; i < p.slots; i++) {
        const int32_t place = places[i];
        if (place < 0) continue;
        uint8_t *out =
            p.out + ((int64_t)kb0 * p.plan.room + place) * 128 + (piece ^ place % 8) * 16 + t * 4;
#pragma unroll
        for (int b = 0; b < IMAGE_PASSES; b++)
            if (kb0 + b * 2 < n_kb)
                *(uint2 *)(out + b * 2 * (int64_t)p.plan.room * 128) =
                    make_uint2(v[b][0].x, v[b][1].x);
        if (threadIdx.x == 0) p.scale[place] = kern_ue8m0_decode(c);
    }
}

/* The same of activations that gates have yet to make (moe_wgmma.cuh, Gates): a block has eight
 * places, a thread sixteen values of one of them at a time, which lie side by side in an image. */
struct gated {
    const uint32_t *gates; /* [room / 8][k / 8][64] */
    const float *x_scale;  /* [room]: of the rows of x that they are products with */
    const float *weights;  /* of pairs */
    float limit;
};
enum {
    GATED_PASSES = 4,
    GATED_THREADS = 1024,
    GATED_WIDTH = GATED_THREADS * GATED_PASSES * 2 /* at most */
};
static __device__ __forceinline__ uint32_t gate2(uint32_t a, uint32_t b, float scale, float limit,
                                                 float weight)
{
    const float y[2] = {
        dev_gate_near(kern_float(a << 16) * scale, kern_float(a & 0xffff0000u) * scale, limit) *
            weight,
        dev_gate_near(kern_float(b << 16) * scale, kern_float(b & 0xffff0000u) * scale, limit) *
            weight};
    const __nv_bfloat162 two = __floats2bfloat162_rn(y[0], y[1]);
    uint32_t u;
    memcpy(&u, &two, 4);
    return u;
}
static __global__ void __launch_bounds__(GATED_THREADS)
    image_gated_kernel(const __grid_constant__ struct image p,
                       const __grid_constant__ struct gated q)
{
    __shared__ uint32_t most[GATED_THREADS / 32][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = lane % 2, i = lane / 2 % 8,
              quad = lane / 16;
    /* Last tiles first: these the first product has just made, and the second reads them last. */
    const int32_t block = (int32_t)(gridDim.x - 1 - blockIdx.x), each = p.plan.tokens / 8;
    cuda_await();
    const struct moe_tile tile = p.plan.tiles[block / each];
    const int32_t first = tile.first + block % each * 8, place = first + i;
    if (block % each * 8 >= tile.n) return;
    const int32_t pair = p.plan.order[place];
    const float weight = pair < 0 ? 0.0f : q.weights[pair], x = pair < 0 ? 0.0f : q.x_scale[place];
    const uint32_t *from = q.gates + (int64_t)first * p.k + i % 2 * 32 + i / 2 * 8 + half * 4;
    uint32_t v[GATED_PASSES][8];
    __nv_bfloat162 m = __float2bfloat162_rn(0.0f);
    /* A pass of a warp: half of 128 values, pieces quad * 2 + half + (0 or 4) of 16 values. */
#pragma unroll
    for (int b = 0; b < GATED_PASSES; b++) {
        const int32_t at = warp * GATED_PASSES + b, kb = at / 2, eight = at % 2 * 2 + quad;
        if (kb * 128 >= p.k) break;
        uint4 a[4];
#pragma unroll
        for (int t = 0; t < 4; t++)
            a[t] = __ldcs((const uint4 *)(from + (int64_t)(kb * 16 + t * 4 + eight) * 64));
#pragma unroll
        for (int t = 0; t < 4; t++) {
            v[b][t * 2] = gate2(a[t].x, a[t].y, x, q.limit, weight);
            v[b][t * 2 + 1] = gate2(a[t].z, a[t].w, x, q.limit, weight);
            m = larger2(larger2(m, v[b][t * 2]), v[b][t * 2 + 1]);
        }
    }
    uint32_t here = kern_bits(fmaxf(__low2float(m), __high2float(m)));
    here = max(here, __shfl_xor_sync(ALL, here, 1));
    here = max(here, __shfl_xor_sync(ALL, here, 16));
    if (lane % 2 == 0 && lane < 16) most[warp][i] = here;
    __syncthreads();
    cuda_hurry();
    for (int w = 0; w < (int)blockDim.x / 32; w++) here = max(here, most[w][i]);
    const uint8_t c = kern_e4m3_scale_code(kern_float(here));
    const float inverse = kern_ue8m0_inverse(c);
#pragma unroll
    for (int b = 0; b < GATED_PASSES; b++) {
        const int32_t at = warp * GATED_PASSES + b, kb = at / 2,
                      piece = at % 2 * 4 + quad * 2 + half;
        if (kb * 128 >= p.k) break;
        uint32_t w[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const float u[4] = {kern_float(v[b][t * 2] << 16) * inverse,
                                kern_float(v[b][t * 2] & 0xffff0000u) * inverse,
                                kern_float(v[b][t * 2 + 1] << 16) * inverse,
                                kern_float(v[b][t * 2 + 1] & 0xffff0000u) * inverse};
            w[t] = dev_codes4(u);
        }
        *(uint4 *)(p.out + ((int64_t)kb * p.plan.room + place) * 128 + (piece ^ i) * 16) =
            make_uint4(w[0], w[1], w[2], w[3]);
    }
    if (threadIdx.x < 16 && half == 0) p.scale[place] = kern_ue8m0_decode(c);
}

static void launch_gated(struct kern_stream *s, const struct image *p, const struct gated *q)
{
    const unsigned threads = (unsigned)cuda_ceil(p->kp, 64 * GATED_PASSES) * 32;
    cuda_launch_early(s, image_gated_kernel,
                      dim3((unsigned)(p->plan.max_tiles * (p->plan.tokens / 8))), threads, 0, *p,
                      *q);
}

static void launch_image(struct kern_stream *s, const struct image *p, bool e4m3, int64_t n)
{
    const int64_t warps = n * cuda_ceil(p->kp / 128, IMAGE_BLOCKS);
    if (e4m3)
        cuda_launch_early(s, image_e4m3_kernel, dim3((unsigned)n),
                          (unsigned)cuda_ceil(p->kp, IMAGE_WARP) * 32, 0, *p);
    else
        image_bf16_kernel<<<(unsigned)cuda_ceil(warps, WARPS), THREADS, 0, s->cu>>>(*p, n);
}

/* The first block sorts; the others prepare the n_rows rows of x, which do not wait for that. */
static __global__ void __launch_bounds__(32 * PLAN_WARPS)
    plan_kernel(const int32_t *experts, int32_t n, int32_t E, const __grid_constant__ struct rows x,
                int64_t n_rows, bool listed)
{
    cuda_await();
    cuda_hurry();
    if (blockIdx.x == 0) {
        sort_pairs(experts, n, E, x.plan, listed);
        return;
    }
    const int64_t at = (int64_t)(blockIdx.x - 1) * (blockDim.x / 32) + threadIdx.x / 32;
    const int32_t each = x.kp / 128;
    if (at < n_rows * each) prepare(x, at / each, (int32_t)(at % each) * 128);
}

/* Memory for the plan. */
static int make_plan(struct kern_stream *s, const struct kern_moe *p, int32_t tokens, int32_t align,
                     struct moe_plan *plan)
{
    const int64_t n = (int64_t)p->T * p->k;
    /* An expert has at most one tile that is not full. */
    const int64_t used = n < p->E ? n : p->E, tiles = n / tokens + used;
    const int64_t room = cuda_ceil(n + used * (align - 1), align) * align;
    if (room > INT32_MAX / 2 || tiles > INT32_MAX / 4) return TOW_EINVAL;
    int32_t *m = (int32_t *)cuda_scratch(s, CUDA_SLOT_OP, (size_t)(room + n + 1 + 3 * tiles) * 4);
    if (!m) return TOW_ENOMEM;
    if ((s->max_shared - 1024) / 4 < p->E) return TOW_EINVAL;
    struct moe_tile *at = (struct moe_tile *)(m + 1 + room + n);
    *plan = {m, m + 1, m + 1 + room, at, (int32_t)tiles, tokens, align, (int32_t)room};
    return 0;
}

/* Enqueues the plan, and n_rows rows of x (of the batch, not of pairs). Pairs are listed there or
 * where x becomes images. */
static void launch_plan(struct kern_stream *s, const struct kern_moe *p, const struct rows *x,
                        int64_t n_rows, bool listed)
{
    const int64_t n = (int64_t)p->T * p->k;
    int warps = (int)((s->max_shared - 1024) / 4 / p->E);
    warps = warps > PLAN_WARPS ? PLAN_WARPS : warps;
    if (warps > 4 && warps > cuda_ceil(n, 32)) warps = n > 128 ? (int)cuda_ceil(n, 32) : 4;
    const unsigned blocks = 1 + (unsigned)cuda_ceil(n_rows * (x->kp / 128), warps);
    CUDA_SHARED(plan_kernel, s->max_shared - 1024);
    cuda_launch_early(s, plan_kernel, dim3(blocks), (unsigned)warps * 32,
                      (size_t)warps * (size_t)p->E * 4, p->experts, (int32_t)n, p->E, *x, n_rows,
                      listed);
}

/* ------------------------------------------------------------------ combine */

struct combine {
    const void *z;      /* [n_pairs, D] act */
    const float *scale; /* NULL, or [n_pairs]: powers of two, of rows of z, which is bf16 */
    struct moe_plan plan;
    const int32_t *experts;
    float *out; /* [T, D] */
    int32_t D, k, E;
    enum kern_dtype act;
};

static __global__ void __launch_bounds__(THREADS)
    combine_kernel(const __grid_constant__ struct combine p)
{
    /* [k] places of the row's pairs, ascending expert, then slot; [k] their scales */
    extern __shared__ int32_t list[];
    float *scale = (float *)(list + p.k);
    __shared__ int32_t n;
    const int64_t t = blockIdx.x;
    const int32_t *experts = p.experts + t * p.k, *place = p.plan.place + t * p.k;
    if (threadIdx.x == 0) n = 0;
    cuda_await();
    __syncthreads();
    for (int32_t i = threadIdx.x; i < p.k; i += THREADS) {
        if (place[i] < 0) continue;
        int32_t rank = 0;
        for (int32_t j = 0; j < p.k; j++)
            rank +=
                place[j] >= 0 && (experts[j] < experts[i] || (experts[j] == experts[i] && j < i));
        list[rank] = place[i];
        scale[rank] = p.scale ? p.scale[place[i]] : 1.0f;
        atomicAdd(&n, 1);
    }
    __syncthreads();
    const int32_t c = ((int32_t)blockIdx.y * THREADS + threadIdx.x) * 8;
    if (c >= p.D) return;
    float sum[8] = {};
    if (p.D % 8 == 0 && p.act == KERN_BF16) {
        for (int32_t i = 0; i < n; i++) {
            const uint4 a = *(const uint4 *)((const uint16_t *)p.z + (int64_t)list[i] * p.D + c);
            const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
            for (int q = 0; q < 8; q++)
                sum[q] = fmaf(kern_float(q % 2 ? w[q / 2] & 0xffff0000u : w[q / 2] << 16), scale[i],
                              sum[q]);
        }
    } else {
        for (int32_t i = 0; i < n; i++)
            for (int q = 0; q < 8 && c + q < p.D; q++)
                sum[q] += dev_load(p.z, (int64_t)list[i] * p.D + c + q, p.act);
    }
    float *out = p.out + t * p.D + c;
    if (p.D % 8 == 0 && ((uintptr_t)p.out & 15) == 0) {
        *(float4 *)out = make_float4(sum[0], sum[1], sum[2], sum[3]);
        *(float4 *)(out + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
        for (int q = 0; q < 8 && c + q < p.D; q++) out[q] = sum[q];
    }
}

static void launch_combine(struct kern_stream *s, const struct kern_moe *p,
                           const struct moe_plan *plan, const void *z, const float *scale)
{
    const struct combine c = {z, scale, *plan, p->experts, p->out, p->D, p->k, p->E, p->act};
    const dim3 grid((unsigned)p->T, (unsigned)cuda_ceil(p->D, 8 * THREADS));
    cuda_launch_early(s, combine_kernel, grid, THREADS, (size_t)p->k * 8, c);
}

/* ------------------------------------------------------------------ plain dot products */

static __device__ __forceinline__ float stored_at(const struct moe_matrix &m,
                                                  const struct cuda_weight &w, int64_t n, int64_t k)
{
    const uint8_t *d = w.data + n * m.row_bytes;
    const int64_t row = m.fmt == KERN_W_FP8 ? n / 128 : n;
    const int64_t col = k / (m.fmt == KERN_W_FP8 ? 128 : m.fmt == KERN_W_MXFP4 ? 32 : 16);
    const uint8_t *at = w.scale + row * m.scale_bytes;
    float scale = 1.0f;
    if (m.sfmt == KERN_S_UE8M0)
        scale = kern_ue8m0_decode((uint8_t)(at[col] - (m.fmt == KERN_W_MXFP4 ? 110 : 0)));
    if (m.sfmt == KERN_S_E4M3) scale = dev_e4m3_decode(at[col]);
    if (m.sfmt == KERN_S_F32) scale = ((const float *)at)[col];
    switch (m.fmt) {
    case KERN_W_F32: return ((const float *)d)[k];
    case KERN_W_BF16: return kern_bf16_decode(((const uint16_t *)d)[k]);
    case KERN_W_FP8: return dev_e4m3_in(((const uint32_t *)d)[k / 4], (int)(k % 4)) * scale;
    default: return dev_e2m1_in(((const uint32_t *)d)[k / 8], (int)(k % 8)) * scale;
    }
}
/* x . row n; all lanes get it. */
static __device__ __forceinline__ float plain_dot(const struct moe_matrix &m,
                                                  const struct cuda_weight &w, const float *x,
                                                  int64_t n, int32_t k)
{
    float sum = 0.0f;
    for (int32_t i = threadIdx.x % 32; i < k; i += 32) sum = fmaf(x[i], stored_at(m, w, n, i), sum);
    sum = dev_warp_sum(sum);
    return m.fmt == KERN_W_NVFP4 ? sum * w.scale2 : sum;
}

struct plain {
    struct moe_plan plan;
    struct moe_matrix a, b;
    const float *x0, *x1; /* [., k] by pair or by row of the batch */
    const int32_t *experts;
    const float *weights;
    float *out; /* [n_pairs, rows] */
    int32_t rows, k, slots;
    float limit;
    bool by_pair, up;
    enum kern_dtype act;
};
/* A warp for each result. */
static __global__ void __launch_bounds__(THREADS)
    plain_kernel(const __grid_constant__ struct plain p)
{
    const int64_t pair = blockIdx.x, n = (int64_t)blockIdx.y * WARPS + threadIdx.x / 32;
    if (pair >= *p.plan.n_pairs || n >= p.rows) return;
    const int32_t from = p.plan.order[pair], e = p.experts[from];
    const int64_t at = (p.by_pair ? pair : from / p.slots) * (int64_t)p.k;
    float v = dev_round(plain_dot(p.a, p.a.w[e], p.x0 + at, n, p.k), p.act);
    if (p.up) {
        const float u = dev_round(plain_dot(p.b, p.b.w[e], p.x1 + at, n, p.k), p.act);
        v = dev_round(dev_gate(v, u, p.limit) * p.weights[from], p.act);
    }
    if (threadIdx.x % 32 == 0) p.out[pair * p.rows + n] = v;
}

struct plain_rows {
    const void *x; /* [n, k] type */
    float *out;    /* [n, k]; may be x where rows are not gathered */
    struct moe_plan plan;
    const int32_t *experts;
    const struct cuda_weight *w;
    int32_t k, slots;
    bool pairs, gather;
    enum kern_dtype type;
    enum kern_act_quant aq;
};
static __global__ void __launch_bounds__(32)
    plain_rows_kernel(const __grid_constant__ struct plain_rows p)
{
    const int64_t row = blockIdx.x;
    const int lane = threadIdx.x;
    if (p.pairs && row >= *p.plan.n_pairs) return;
    const int64_t from = (p.gather ? p.plan.order[row] / p.slots : row) * (int64_t)p.k;
    for (int32_t b = 0; b < p.k; b += 128) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t c = b + lane * 4 + i;
            v[i] = c < p.k ? dev_load(p.x, from + c, p.type) : 0.0f;
        }
        if (p.aq == KERN_AQ_A128) round_a128(v);
        if (p.aq == KERN_AQ_NVFP4)
            round_nvfp4(v, p.w[p.experts[p.plan.order[row]]].input_scale, false);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t c = b + lane * 4 + i;
            if (c < p.k) p.out[row * p.k + c] = v[i];
        }
    }
}

/* ------------------------------------------------------------------ the op */

/* Of a placed array, which is one block with equal steps. */
static struct moe_matrix matrix_of(const struct kern_weight *w, const struct cuda_weight *table,
                                   int32_t n)
{
    const uint8_t *data = (const uint8_t *)w->data, *scale = (const uint8_t *)w->scale;
    return {table,
            w->row_bytes,
            w->scale_row_bytes,
            w->fmt,
            w->sfmt,
            data,
            scale,
            n > 1 ? (const uint8_t *)w[1].data - data : w->n * w->row_bytes,
            n > 1 && scale ? (const uint8_t *)w[1].scale - scale : w->n * w->scale_row_bytes};
}

static int plain_experts(struct kern_stream *s, const struct kern_moe *p,
                         const struct moe_matrix *w1, const struct moe_matrix *w2,
                         const struct moe_matrix *w3, const struct moe_plan *plan)
{
    const int64_t n = (int64_t)p->T * p->k;
    const bool by_pair = p->aq == KERN_AQ_NVFP4;
    const int64_t x_rows = by_pair ? 2 * n : p->T;
    float *x = (float *)cuda_scratch(s, CUDA_SLOT_ROWS, (size_t)(x_rows * p->D) * 4);
    float *y = (float *)cuda_scratch(s, CUDA_SLOT_OP2, (size_t)(n * p->I) * 4);
    float *z = (float *)cuda_scratch(s, CUDA_SLOT_OP3, (size_t)(n * p->D) * 4);
    if (!x || !y || !z) return TOW_ENOMEM;
    float *x1 = by_pair ? x + n * p->D : x;
    struct rows none = {};
    none.plan = *plan;
    launch_plan(s, p, &none, 0, true);
    struct plain_rows r = {p->x, x,       *plan,   p->experts, w1->w, p->D,
                           p->k, by_pair, by_pair, p->act,     p->aq};
    plain_rows_kernel<<<(unsigned)(by_pair ? n : p->T), 32, 0, s->cu>>>(r);
    if (by_pair) {
        r.w = w3->w, r.out = x1;
        plain_rows_kernel<<<(unsigned)n, 32, 0, s->cu>>>(r);
    }
    struct plain q = {*plan, *w1,  *w3,  x,        x1,      p->experts, p->weights, y,
                      p->I,  p->D, p->k, p->limit, by_pair, true,       p->act};
    plain_kernel<<<dim3((unsigned)n, (unsigned)cuda_ceil(p->I, WARPS)), THREADS, 0, s->cu>>>(q);
    r = {y, y, *plan, p->experts, w2->w, p->I, p->k, true, false, KERN_F32, p->aq};
    plain_rows_kernel<<<(unsigned)n, 32, 0, s->cu>>>(r);
    q.a = *w2, q.x0 = y, q.out = z;
    q.rows = p->D, q.k = p->I, q.by_pair = true, q.up = false;
    plain_kernel<<<dim3((unsigned)n, (unsigned)cuda_ceil(p->D, WARPS)), THREADS, 0, s->cu>>>(q);
    struct kern_moe f = *p;
    f.act = KERN_F32; /* z is: rounded where it must be, but not packed */
    launch_combine(s, &f, plan, z, NULL);
    return cuda_done(s, "moe");
}

static int product(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->a.fmt) {
    case KERN_W_MXFP4: return moe_product_mxfp4(s, p);
    case KERN_W_NVFP4: return moe_product_nvfp4(s, p);
    case KERN_W_FP8: return moe_product_fp8(s, p);
    case KERN_W_BF16: return moe_product_bf16(s, p);
    default: return TOW_EINVAL;
    }
}

static int tiled_experts(struct kern_stream *s, const struct kern_moe *p,
                         const struct moe_matrix *w1, const struct moe_matrix *w2,
                         const struct moe_matrix *w3, const struct moe_plan *plan)
{
    const int64_t n = (int64_t)p->T * p->k;
    const bool by_pair = p->aq == KERN_AQ_NVFP4; /* x is quantized by the expert's scales */
    const int32_t dp = (int32_t)(cuda_ceil(p->D, MOE_PAD) * MOE_PAD);
    const int32_t ip = (int32_t)(cuda_ceil(p->I, MOE_PAD) * MOE_PAD);
    const int64_t wide = p->D > p->I ? p->D : p->I;
    uint16_t *x =
        (uint16_t *)cuda_scratch(s, CUDA_SLOT_ROWS, (size_t)((by_pair ? 2 * n : p->T) * dp) * 2);
    uint16_t *y = (uint16_t *)cuda_scratch(s, CUDA_SLOT_OP2, (size_t)(n * ip) * 2);
    /* First the activations, which are done with once they are quantized; then the results. */
    uint16_t *z = (uint16_t *)cuda_scratch(s, CUDA_SLOT_OP3, (size_t)(n * wide) * 2);
    if (!x || !y || !z) return TOW_ENOMEM;

    struct rows r = {(const uint16_t *)p->x,
                     x,
                     *plan,
                     p->experts,
                     w1->w,
                     p->D,
                     dp,
                     p->k,
                     by_pair,
                     by_pair,
                     p->aq};
    launch_plan(s, p, &r, by_pair ? 0 : p->T, true);
    if (by_pair) launch_rows(s, &r, n);
    uint16_t *x1 = x + n * dp;
    if (by_pair) {
        r.w = w3->w, r.out = x1;
        launch_rows(s, &r, n);
    }
    struct moe_product q = {*plan, *w1,  *w3, x,    by_pair ? x1 : NULL, by_pair,  by_pair, true,
                            p->I,  p->D, dp,  p->k, p->weights,          p->limit, z,       NULL};
    int rc = product(s, &q);
    if (rc < 0) return rc;
    r = {z, y, *plan, p->experts, w2->w, p->I, ip, p->k, true, false, p->aq};
    launch_rows(s, &r, n);
    q.a = q.b = *w2;
    q.x0 = y, q.x1 = NULL, q.by_pair = true, q.up = false;
    q.rows = p->D, q.k = p->I, q.kp = ip, q.out = z;
    rc = product(s, &q);
    if (rc < 0) return rc;
    launch_combine(s, p, plan, z, NULL);
    return cuda_done(s, "moe");
}

/* By wgmma. */
static int image_experts(struct kern_stream *s, const struct kern_moe *p,
                         const struct moe_matrix *w1, const struct moe_matrix *w2,
                         const struct moe_matrix *w3, const struct moe_plan *plan, bool e4m3)
{
    const int64_t n = (int64_t)p->T * p->k, room = plan->room, bytes = e4m3 ? 1 : 2,
                  scale = e4m3 ? 4 : 0;
    const int32_t dp = (int32_t)cuda_ceil(p->D, 128) * 128,
                  ip = (int32_t)cuda_ceil(p->I, 128) * 128;
    const int64_t made = e4m3 ? 2 * p->I : p->I, wide = p->D > made ? p->D : made;
    uint8_t *x = (uint8_t *)cuda_scratch(s, CUDA_SLOT_ROWS, (size_t)(room * (dp * bytes + scale)));
    uint8_t *y = (uint8_t *)cuda_scratch(s, CUDA_SLOT_OP2, (size_t)(room * (ip * bytes + scale)));
    /* First the activations, which are done with once they are quantized; then the results. */
    uint16_t *z = (uint16_t *)cuda_scratch(s, CUDA_SLOT_OP3, (size_t)(room * wide) * 2);
    if (!x || !y || !z) return TOW_ENOMEM;

    struct rows none = {};
    none.plan = *plan;
    launch_plan(s, p, &none, 0, false);
    float *x_scale = (float *)(x + room * dp * bytes), *y_scale = (float *)(y + room * ip * bytes);
    struct image r = {(const uint16_t *)p->x, x, x_scale, *plan, p->D, dp, p->k, p->aq};
    launch_image(s, &r, e4m3, p->T);
    struct moe_product q = {*plan, *w1, *w3,  NULL,       NULL,     false, false, true, p->I,
                            p->D,  dp,  p->k, p->weights, p->limit, z,     x,     p->E};
    const auto product = !e4m3                       ? moe_product_wide
                         : plan->tokens == MOE_CODES ? moe_product_codes
                                                     : moe_product_e4m3;
    int rc = product(s, &q);
    if (rc < 0) return rc;
    r = {z, y, y_scale, *plan, p->I, ip, 0, p->aq};
    if (e4m3) {
        const struct gated g = {(const uint32_t *)z, x_scale, p->weights, p->limit};
        launch_gated(s, &r, &g);
    } else {
        launch_image(s, &r, false, n);
    }
    q.a = q.b = *w2;
    q.up = false, q.rows = p->D, q.k = p->I, q.kp = ip;
    q.image = y;
    rc = product(s, &q);
    if (rc < 0) return rc;
    launch_combine(s, p, plan, z, e4m3 ? y_scale : NULL);
    return cuda_done(s, "moe");
}

static bool tiles_fit(const struct kern_moe *p, const struct kern_weight *w)
{
    if (p->aq == KERN_AQ_NVFP4 && w->fmt != KERN_W_NVFP4) return false;
    switch (w->fmt) {
    case KERN_W_MXFP4: return w->sfmt == KERN_S_UE8M0;
    case KERN_W_NVFP4: return w->sfmt == KERN_S_E4M3;
    case KERN_W_FP8: return w->sfmt == KERN_S_UE8M0 || w->sfmt == KERN_S_F32;
    case KERN_W_BF16: return w->sfmt == KERN_S_NONE;
    default: return false;
    }
}
static bool is_fp4(const struct kern_weight *w)
{
    return w->fmt == KERN_W_MXFP4 || w->fmt == KERN_W_NVFP4;
}

/* As the copy engine wants them: in pieces of 16 bytes; then widths are multiples of 256. */
static bool whole_scales(const struct kern_weight *w)
{
    return w->scale_row_bytes % 16 == 0;
}

/* Are products with these experts of the e4m3 kind? No row of the batch has a say. */
static bool codes_fit(struct kern_stream *s, const struct kern_moe *p, const struct kern_weight *w)
{
    return p->aq == KERN_AQ_A128 && p->D % 128 == 0 && p->I % 128 == 0 && p->D <= IMAGE_WIDTH &&
           p->I <= GATED_WIDTH &&
           (w->fmt == KERN_W_FP8 || (w->fmt == KERN_W_MXFP4 && cuda_placed_e4m3(s, w)));
}

extern "C" int kern_moe_cuda(struct kern_stream *s, const struct kern_moe *p)
{
    if (p->T == 0) return 0;
    const struct kern_weight *const all[] = {p->w1, p->w2, p->w3};
    const struct cuda_weight *t1 = cuda_weights_of(s, p->w1), *t2 = cuda_weights_of(s, p->w2),
                             *t3 = cuda_weights_of(s, p->w3);
    if (!t1 || !t2 || !t3) return TOW_EINVAL;
    const struct moe_matrix w1 = matrix_of(p->w1, t1, p->E), w2 = matrix_of(p->w2, t2, p->E),
                            w3 = matrix_of(p->w3, t3, p->E);
    const bool tiled = p->act == KERN_BF16 && tiles_fit(p, p->w1) && tiles_fit(p, p->w2) &&
                       tiles_fit(p, p->w3) && p->w1->sfmt == p->w3->sfmt;
    bool e4m3 = tiled && cuda_fp8_products && s->arch == 90;
    for (int i = 0; i < 3; i++) e4m3 = e4m3 && codes_fit(s, p, all[i]);
    for (int i = 0; i < 3 && !e4m3; i++)
        if (cuda_placed_e4m3(s, all[i])) {
            const int rc = cuda_place_for_bf16(s, all[i]);
            if (rc < 0) return rc;
        }

    /* Pairs of a tile: all of an expert's, mostly; a choice that changes no bit. */
    const int64_t mean = (int64_t)p->T * p->k / p->E;
    const bool two = p->aq == KERN_AQ_NVFP4; /* x by the scales of w1 and of w3, side by side */
    int32_t tokens = mean <= 4 || (two && s->arch != 90) ? 8 : 32; /* 99 KiB there */
    if (mean > 24 && is_fp4(p->w1) && is_fp4(p->w2) && !two && s->arch == 90) tokens = 128;
    const bool wide = cuda_wide_experts && mean >= cuda_wide_experts && s->arch == 90 && tiled &&
                      !two && is_fp4(p->w1) && is_fp4(p->w2) && whole_scales(p->w1) &&
                      whole_scales(p->w2) && whole_scales(p->w3);
    if (wide) tokens = mean < MIDDLE_FROM ? MOE_FEW : mean < WIDE_FROM ? MOE_MIDDLE : MOE_WIDE;
    if (e4m3) tokens = mean <= 24 ? MOE_NARROW : MOE_CODES;
    const bool images = e4m3 || wide;
    struct moe_plan plan;
    int rc = make_plan(s, p, tokens, images ? 8 : 1, &plan);
    if (rc < 0) return rc;
    return images  ? image_experts(s, p, &w1, &w2, &w3, &plan, e4m3)
           : tiled ? tiled_experts(s, p, &w1, &w2, &w3, &plan)
                   : plain_experts(s, p, &w1, &w2, &w3, &plan);
}
