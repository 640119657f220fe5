/* kernels/gemm/codes_narrow_cuda.cu - up to 128 rows of e4m3 codes times few fp8 weight rows as
 * they are stored: a decode product of the fp8 kind, on sm_90a.
 *
 * Here rows of x are on the M side of the matrix unit, 64 to a warpgroup whether they are there or
 * not, and weight rows are columns: so a tile may have as few weight rows as it takes to give every
 * multiprocessor one (wo_b: 128 tiles of 32). Two threads keep a ring of blocks of 128 k filled by
 * the copy engine and begin with weights, before there are rows of x. A warpgroup has the sums of
 * several blocks of k under way, each in registers of its own, and adds them to its totals in their
 * order.
 * A row or two of x: every block of threads quantizes them for itself, into shared memory and while
 * its first weights are on their way, which is faster than another launch. More: they come as codes
 * through the ring. Clusters of two that fetch rows of x together make little difference (wo_b at
 * 64 rows 18.3 us, not 18.5; at 128 rows 21.7, not 21.1), nor do twice the bytes under way and L2
 * lines in pairs; sums of half the depth that are added while the next are made are slower (19.1,
 * 22.7 us).
 */
#include "kernels/cuda/quant.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/gemm/product.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    MOST_SHARED = 227 * 1024,
    ALIGN = 1024,
    MOST_STAGES = 64,
    MOST_SCALES = 1024,    /* of weights, that a block of threads has */
    OWN_ELEMENTS = 16384,  /* of x, that it quantizes */
    UNDER_WAY = 64 * 1024, /* bytes, that keep memory busy */
    FILLERS = 2,           /* warps of which a thread fills: one alone would take too long */
};

/* T rows of x, R weight rows of a tile. OWN: x stays in shared memory. */
template <int T, int R, bool OWN> struct tile {
    enum {
        MATH = T > 64 ? 8 : 4,  /* warps that multiply */
        WARPS = T > 64 ? 8 : 6, /* that quantize */
        THREADS = 32 * (WARPS + FILLERS),
        X_BYTES = T * BLOCK_K, /* of a block of k */
        W_BYTES = R * BLOCK_K,
        STAGE = W_BYTES + (OWN ? 0 : X_BYTES), /* x first */
        /* Blocks of k under way, as many as registers allow. */
        DEPTH = R > 32 ? (T > 64 ? 3 : 4) : (T > 64 && R > 16 ? 6 : 8),
        /* The matrix unit reads 64 rows of x: so much behind the last one's must be ours. */
        BEHIND = T < 64 ? (64 - T) * BLOCK_K : 0,
    };
};

/* What lies where, from the aligned start of shared memory. */
struct plan {
    int32_t stages, ring, x_scales, w_scales, bars, bytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct bars {
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
};

/* What one block of threads has: tiles tile, tile + step ..., n of them; some may be beyond the
 * last. */
struct share {
    uint8_t *x, *ring;
    float *x_scales, *w_scales; /* [n_blocks, T], [n, n_blocks] */
    struct bars *bars;
    int32_t tile, step, n, n_blocks, stages;
    int32_t group, t; /* first row of x */
};

enum part { WEIGHTS, ROWS, REST };
/* The ring: weights of the first round, before there is x; rows of the first round; then all
 * else. Fillers take turns. */
template <int T, int R, bool OWN>
static __device__ __forceinline__ void fill(const CUtensorMap &x, const CUtensorMap &w,
                                            const struct cuda_product &p, const struct share &m,
                                            enum part part)
{
    using C = struct tile<T, R, OWN>;
    const int32_t all = m.n * m.n_blocks, first = all < m.stages ? all : m.stages,
                  me = threadIdx.x / 32 - C::WARPS;
    const auto load_w = [&](int32_t slot, int32_t i, int32_t b) {
        bar_expect(&m.bars->full[slot], C::STAGE);
        tile_load(m.ring + slot * C::STAGE + (OWN ? 0 : C::X_BYTES), &w, &m.bars->full[slot],
                  b * BLOCK_K, m.group * p.N + (m.tile + i * m.step) * R);
    };
    const auto load_x = [&](int32_t slot, int32_t b) {
        if (!OWN)
            tile_load(m.ring + slot * C::STAGE, &x, &m.bars->full[slot],
                      (m.group * m.n_blocks + b) * BLOCK_K, m.t);
    };
    int32_t i = 0, b = me, k = me;
    const auto next = [&]() {
        for (k += FILLERS, b += FILLERS; b >= m.n_blocks; i++) b -= m.n_blocks;
    };
    for (; b >= m.n_blocks; i++) b -= m.n_blocks;
    for (; k < first; next()) {
        if (part == WEIGHTS) load_w(k, i, b);
        if (part == ROWS) load_x(k, b);
    }
    if (part != REST) return;
    int32_t slot = k - first, phase = 0;
    for (; k < all; next()) {
        while (slot >= m.stages) slot -= m.stages, phase ^= 1;
        bar_wait(&m.bars->empty[slot], phase);
        load_w(slot, i, b);
        load_x(slot, b);
        slot += FILLERS;
    }
}

/* Rows of x of this group, quantized; and all their scales. A warp takes four blocks of 128 at a
 * time. */
template <int T, int WARPS>
static __device__ __forceinline__ void own_rows(const struct cuda_product &p, const struct share &m)
{
    enum { BATCH = 4, EACH = 4 * WARPS };
    const int32_t lane = threadIdx.x % 32, e = lane % 8, rows = p.T - m.t < T ? p.T - m.t : T,
                  all = rows * m.n_blocks;
    const uint16_t *x = p.x + m.t * p.ld_x + (int64_t)m.group * p.x_group + e * 8;
    for (int32_t i0 = threadIdx.x / 32 * 4; i0 < all; i0 += EACH * BATCH) {
        uint4 v[BATCH][2];
        int32_t t[BATCH], b[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int32_t i = i0 + j * EACH + lane / 8;
            t[j] = i / m.n_blocks, b[j] = i - t[j] * m.n_blocks;
            v[j][0] = v[j][1] = make_uint4(0, 0, 0, 0);
            if (i < all) {
                const uint16_t *from = x + t[j] * p.ld_x + b[j] * BLOCK_K;
                v[j][0] = *(const uint4 *)from;
                v[j][1] = *(const uint4 *)(from + BLOCK_K / 2);
            }
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (i0 + j * EACH >= all) break;
            const float scale = dev_codes16_a128(v[j]);
            if (i0 + j * EACH + lane / 8 >= all) continue;
            uint8_t *to = m.x + (b[j] * T + t[j]) * BLOCK_K + e % 2 * 8;
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint2 *)(to + ((4 * h + e / 2) ^ (t[j] & 7)) * 16) =
                    make_uint2(v[j][h].x, v[j][h].y);
            if (e == 0) m.x_scales[b[j] * T + t[j]] = scale;
        }
    }
    wgmma_shared();
}

/* Starts the sums of a block of k. */
template <int R>
static __device__ __forceinline__ void start(float (&sum)[R / 2], const uint8_t *x,
                                             const uint8_t *w)
{
    const uint64_t a = wgmma_rows(x), b = wgmma_rows(w);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_e4m3(sum, a + 2 * k, b + 2 * k, k > 0);
    wgmma_commit();
}

template <int R>
static __device__ __forceinline__ void store(const struct cuda_product &p, const struct share &m,
                                             int32_t n, const float (&total)[R / 2])
{
    const int lane = threadIdx.x % 32, c = lane % 4;
    const int32_t t = m.t + threadIdx.x / 32 * 16 + lane / 4;
    const bool pairs =
        p.y_dtype == KERN_BF16 && p.ld_y % 2 == 0 && (uintptr_t)p.y % 4 == 0 && p.N % 2 == 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (t + 8 * r >= p.T) continue;
        const int64_t row = (t + 8 * r) * p.ld_y + (int64_t)m.group * p.N;
#pragma unroll
        for (int i = 0; i < R / 8; i++) {
            const int32_t to = n + 8 * i + 2 * c;
            const float *v = total + 4 * i + 2 * r;
            if (pairs && to < p.N) {
                *(__nv_bfloat162 *)((uint16_t *)p.y + row + to) = __floats2bfloat162_rn(v[0], v[1]);
            } else {
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (to + e < p.N) dev_store(p.y, row + to + e, p.y_dtype, v[e]);
            }
        }
    }
}

template <int T, int R, bool OWN>
static __device__ __forceinline__ void multiply(const struct cuda_product &p, const struct share &m)
{
    using C = struct tile<T, R, OWN>;
    enum { D = C::DEPTH };
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    /* Rows that are not there have the last one's scales. */
    const float *x_scale[2] = {m.x_scales + (row < T ? row : T - 1),
                               m.x_scales + (row + 8 < T ? row + 8 : T - 1)};
    const int half = threadIdx.x / 128 * (64 * BLOCK_K);
    int32_t slot = 0, phase = 0, free_slot = 0;
    const float *w_scale = m.w_scales;
    for (int32_t i = 0, n = m.tile * R; i < m.n; i++, n += m.step * R, w_scale += m.n_blocks) {
        float total[R / 2];
#pragma unroll
        for (int e = 0; e < R / 2; e++) total[e] = 0;
        for (int32_t b0 = 0; b0 < m.n_blocks; b0 += D) {
            float sum[D][R / 2], scale[D][2];
            const int32_t n_blocks = m.n_blocks - b0 < D ? m.n_blocks - b0 : (int32_t)D;
            /* After the last block others are multiplied, for nothing: a condition there would make
             * the compiler wait for each instruction. So would sums that are under way from one
             * turn to the next. */
#pragma unroll
            for (int d = 0; d < D; d++) {
                const uint8_t *stage = m.ring + slot * C::STAGE;
                if (d < n_blocks) bar_wait(&m.bars->full[slot], phase);
                start<R>(sum[d], (OWN ? m.x + (b0 + d) * C::X_BYTES : stage) + half,
                         stage + (OWN ? 0 : C::X_BYTES));
                if (d < n_blocks && ++slot == m.stages) slot = 0, phase ^= 1;
            }
#pragma unroll
            for (int d = 0; d < D; d++) {
                const int32_t b = b0 + (d < n_blocks ? d : 0);
                const float w = w_scale[b];
                scale[d][0] = w * x_scale[0][b * T];
                scale[d][1] = w * x_scale[1][b * T];
            }
            wgmma_wait<0>();
#pragma unroll
            for (int d = 0; d < D; d++) wgmma_pin(sum[d]);
            __syncwarp();
            if (lane < n_blocks) {
                const int32_t to = free_slot + lane;
                bar_arrive(&m.bars->empty[to < m.stages ? to : to - m.stages]);
            }
            free_slot += n_blocks;
            if (free_slot >= m.stages) free_slot -= m.stages;
#pragma unroll
            for (int d = 0; d < D; d++) {
                if (d >= n_blocks) break;
#pragma unroll
                for (int e = 0; e < R / 2; e++)
                    total[e] = fmaf(sum[d][e], scale[d][e % 4 / 2], total[e]);
            }
        }
        store<R>(p, m, n, total);
    }
}

template <int T, int R, bool OWN>
static __global__ void __launch_bounds__(tile<T, R, OWN>::THREADS, 1)
    codes_narrow_kernel(const __grid_constant__ CUtensorMap x,
                        const __grid_constant__ CUtensorMap w, const struct cuda_product p,
                        const struct plan at, int32_t tiles)
{
    using C = struct tile<T, R, OWN>;
    extern __shared__ __align__(ALIGN) uint8_t shared[];
    struct share m;
    m.x = shared;
    m.ring = shared + at.ring;
    m.x_scales = (float *)(shared + at.x_scales);
    m.w_scales = (float *)(shared + at.w_scales);
    m.bars = (struct bars *)(shared + at.bars);
    m.stages = at.stages;
    m.tile = blockIdx.x, m.step = gridDim.x, m.n = (tiles + gridDim.x - 1) / gridDim.x;
    m.n_blocks = p.Kx / BLOCK_K;
    m.group = blockIdx.y, m.t = blockIdx.z * T;
    const bool fills = threadIdx.x >= 32 * C::WARPS && threadIdx.x % 32 == 0;
    if (threadIdx.x == 32 * C::WARPS) {
        for (int i = 0; i < m.stages; i++)
            bar_init(&m.bars->full[i], 1), bar_init(&m.bars->empty[i], C::MATH);
        bar_init_done();
    }
    if (threadIdx.x >= 32 * C::WARPS) {
        asm volatile("bar.sync 1, %0;" ::"n"(32 * FILLERS) : "memory");
        if (fills) fill<T, R, OWN>(x, w, p, m, WEIGHTS);
        __syncwarp();
    }
    /* A weight's scale each, asked for before there are rows of x. */
    const int32_t n_scales = m.n * m.n_blocks;
    const auto scale_at = [&](int32_t i) {
        const int32_t last = (p.groups * p.N - 1) / BLOCK_N, k = i / m.n_blocks,
                      row = (m.group * p.N + (m.tile + k * m.step) * R) / BLOCK_N;
        return block_scale(p, row < last ? row : last, i - k * m.n_blocks);
    };
    float first = 0;
    if (threadIdx.x < n_scales) first = scale_at(threadIdx.x);
    cuda_await(); /* what makes x may have been still at work */
    if (fills && !OWN) fill<T, R, OWN>(x, w, p, m, ROWS);
    if (threadIdx.x < 32 * C::WARPS) {
        if (OWN)
            own_rows<T, C::WARPS>(p, m);
        else
            for (int32_t i = threadIdx.x; i < m.n_blocks * T; i += 32 * C::WARPS)
                m.x_scales[i] =
                    p.x_scales[(int64_t)(m.group * m.n_blocks + i / T) * p.ld_scales + m.t + i % T];
    }
    if (threadIdx.x < n_scales) m.w_scales[threadIdx.x] = first;
    for (int32_t i = threadIdx.x + C::THREADS; i < n_scales; i += C::THREADS)
        m.w_scales[i] = scale_at(i);
    __syncthreads();
    if (threadIdx.x < 32 * C::MATH) multiply<T, R, OWN>(p, m);
    if (fills) fill<T, R, OWN>(x, w, p, m, REST);
}
#else
template <int T, int R, bool OWN>
static __global__ void
codes_narrow_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                    const struct cuda_product p, const struct plan at, int32_t tiles)
{
}
#endif

/* False: it does not fit. */
template <int T, int R, bool OWN>
static bool make_plan(const struct cuda_product *p, int32_t n_scales, struct plan *out)
{
    using C = struct tile<T, R, OWN>;
    const int32_t n_blocks = p->Kx / BLOCK_K, x = OWN ? n_blocks * C::X_BYTES : 0,
                  behind = n_blocks * T * 4 + n_scales * 4 + MOST_STAGES * 16;
    const int32_t room = MOST_SHARED - x - (behind > (int)C::BEHIND ? behind : (int)C::BEHIND);
    const int32_t enough = UNDER_WAY / C::STAGE > (int)C::DEPTH + 4 ? UNDER_WAY / C::STAGE
                                                                    : C::DEPTH + 4,
                  most = enough < MOST_STAGES ? enough : (int32_t)MOST_STAGES;
    out->stages = room / C::STAGE < most ? room / C::STAGE : most;
    if (out->stages < (int)C::DEPTH) return false;
    out->ring = x;
    out->bars = x + out->stages * C::STAGE;
    out->x_scales = out->bars + MOST_STAGES * 16;
    out->w_scales = out->x_scales + n_blocks * T * 4;
    out->bytes = out->bars + (behind > (int)C::BEHIND ? behind : (int)C::BEHIND);
    return true;
}

template <int T, int R, bool OWN>
static bool launch(struct kern_stream *s, const struct cuda_product *p)
{
    using C = struct tile<T, R, OWN>;
    CUtensorMap x = {}, w;
    const int64_t width = (int64_t)p->groups * p->Kx, n_blocks = p->Kx / BLOCK_K;
    const int64_t tiles = cuda_ceil(p->N, R), columns = cuda_ceil(p->T, T),
                  room = s->n_sm / (p->groups * columns),
                  least = cuda_ceil(tiles * n_blocks, MOST_SCALES);
    int64_t blocks = tiles < room ? tiles : room > 1 ? room : 1;
    if (blocks < least) blocks = least;
    struct plan plan;
    if (!make_plan<T, R, OWN>(p, (int32_t)(cuda_ceil(tiles, blocks) * n_blocks), &plan))
        return false;
    if ((!OWN && !cuda_tile_map(&x, p->codes, p->T, width, width, T)) ||
        !cuda_tile_map(&w, p->w, (int64_t)p->groups * p->N, p->row_bytes, p->row_bytes, R))
        return false;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)blocks, (unsigned)p->groups, (unsigned)columns);
    c.blockDim = dim3(C::THREADS);
    c.dynamicSmemBytes = (size_t)plan.bytes;
    c.stream = s->cu;
    c.attrs = &early;
    c.numAttrs = cuda_early_products ? 1 : 0;
    CUDA_SHARED((codes_narrow_kernel<T, R, OWN>), MOST_SHARED);
    cudaLaunchKernelEx(&c, codes_narrow_kernel<T, R, OWN>, x, w, *p, plan, (int32_t)tiles);
    return true;
}

/* Of the multiprocessors, most. */
static int64_t least_blocks(const struct kern_stream *s)
{
    return s->n_sm * 7 / 8;
}

/* Tiles as broad as still give most multiprocessors one. */
template <int T, bool OWN>
static bool launch_tiles(struct kern_stream *s, const struct cuda_product *p)
{
    const int64_t beside = p->groups * cuda_ceil(p->T, T), least = least_blocks(s);
    /* The broadest read rows of x less often; of few there is little to read. */
    if (T >= 64 && cuda_ceil(p->N, 64) * beside >= least) return launch<T, 64, OWN>(s, p);
    if (cuda_ceil(p->N, 32) * beside >= least) return launch<T, 32, OWN>(s, p);
    if (cuda_ceil(p->N, 16) * beside >= least) return launch<T, 16, OWN>(s, p);
    return launch<T, 8, OWN>(s, p);
}

bool cuda_product_codes_narrow(struct kern_stream *s, const struct cuda_product *p)
{
    if (!p->codes) {
        if (p->T <= 8) return launch_tiles<8, true>(s, p);
        if (p->T <= 16) return launch_tiles<16, true>(s, p);
        return p->T <= 32 ? launch_tiles<32, true>(s, p) : launch_tiles<64, true>(s, p);
    }
    if (p->T <= 16) return launch_tiles<16, false>(s, p);
    if (p->T <= 32) return launch_tiles<32, false>(s, p);
    /* 128 rows at a time where tiles are broad even so; else 64, with tiles twice as broad: shared
     * memory has less to move (wo_b 20.8 us, not 23.7). */
    return p->T <= 64 || cuda_ceil(p->N, 64) * p->groups < least_blocks(s)
               ? launch_tiles<64, false>(s, p)
               : launch_tiles<128, false>(s, p);
}

bool cuda_codes_narrow_fits(const struct kern_stream *s, const struct cuda_product *p)
{
    /* Of many weight rows narrow_cuda.cu gives every multiprocessor broader tiles; to 8 rows it is
     * as fast. */
    return p->T <= 128 && (p->T > 8 || cuda_codes_own(p)) &&
           p->K <= 160 * BLOCK_K /* scales of 128 rows, beside a ring */ &&
           cuda_ceil(p->N, BLOCK_N) * p->groups < s->n_sm;
}

bool cuda_codes_own(const struct cuda_product *p)
{
    return p->T <= 64 && (int64_t)p->T * p->K <= OWN_ELEMENTS && p->K % BLOCK_K == 0 &&
           (uintptr_t)p->x % 16 == 0 && p->ld_x % 8 == 0;
}
