/* kernels/gemm/turns_cuda.cu - 9 to 128 rows of x times few placed fp8 or bf16 weight rows by
 * wgmma, several products of the same rows in one launch: the decode product of the bf16 kind on
 * sm_90a, where there are no more tiles of 64 weight rows than multiprocessors.
 *
 * A block of threads has some weight rows, some columns (rows of x), and all of k. Four threads
 * keep a ring of stages filled by the copy engine and begin with weights, before rows of x are
 * there. Four warpgroups take turns with the stages (of 64 columns three, two stages at a time):
 * each widens its stages' weights into registers and multiplies while the others do the same, and
 * then, when its turn comes, adds its sums to the totals in shared memory, which so have the order
 * that all products have. That it is done each thread says to the next warpgroup by a barrier in
 * shared memory: bar.arrive and bar.sync would order it as well (and cost a hundredth less at 16
 * rows), but compute-sanitizer does not see that they do. Two shapes:
 *   SMALL  32 weight rows. The matrix unit wants 64: of each 16, the upper eight are those of the
 *          next block of k, whose rows of x are columns of their own. Half of what it makes is not
 *          wanted, and what is lies with one thread. So all multiprocessors have a tile and none
 *          widens what another one does.
 *   TILE   64 weight rows.
 *          Neighbouring blocks of threads are a cluster and fetch what they share together: a third
 *          fewer bytes leave the second-level cache, though it takes as long without.
 * To share out k would mean to pass on the sums of all blocks: more bytes than it saves. Slower, as
 * timed (wo_b at 32 rows 16.5 us): SMALL in clusters, 17.4 us; with turns of single warps, taken
 * while the next stage is multiplied, 18.8; clusters of four, of which 132 multiprocessors hold 30;
 * 128 weight rows, each warpgroup with half of them and of the columns and no turns. Totals that
 * stay in the registers of who adds them (wo_b at 64 rows, 25 us): two warpgroups with half of the
 * columns each, 39 us; one with all, 32; tiles of 128 rows and 16 columns, 41: their widening is
 * hidden by nobody, and the matrix unit does not take fewer columns in less time.
 */
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/gemm/product.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

enum {
    FILLERS = 4, /* threads, of a warp each */
    ROWS = 64,   /* of a warpgroup */
    ALIGN = 1024,
    MOST_SHARED = 227 * 1024,
    MOST_STAGES = 24,
    MOST_GROUPS = 4,
    BAR_BYTES = 16 * MOST_STAGES + 8 * MOST_GROUPS,
    MOST_SCALES = 256, /* blocks of k */
    MOST_COLUMNS = 64,
};
enum mode { SMALL, TILE };

struct part {
    CUtensorMap w;
    struct cuda_product p;
    int32_t begin, tiles; /* its first tile, of all; tiles of a group */
    bool is_fp8;
    int x; /* which rows */
};
struct job {
    CUtensorMap x[2];
    struct part part[CUDA_SET_MOST];
    int32_t n, columns; /* products; blocks of threads with the same weight rows */
    int across, down;   /* a cluster: so many parts of the columns, so many tiles of weight rows */
};

/* N columns of the matrix unit. */
template <int N, mode M> struct tile {
    enum {
        BLOCKS = M == SMALL ? 2 : 1, /* of k, of a stage */
        /* Stages of a turn: totals of 64 columns are half of what shared memory has to move, and of
         * two stages they move once. */
        STEP = M == TILE && N == 64 ? 2 : 1,
        /* Warpgroups that multiply, and their registers; one more fills. */
        GROUPS = STEP == 2 ? 3 : 4,
        REGISTERS = STEP == 2 ? 160 : 112,
        THREADS = 128 * GROUPS + 128,
        C = N / BLOCKS,
        W_ROWS = ROWS / BLOCKS,
        VALUES = C * W_ROWS / 128,    /* of a thread */
        SECOND = M == SMALL ? 32 : 8, /* rows of a stage from a thread's first to its second */
        X_PIECE = N * TILE_BYTES,
        W_PIECE = ROWS * TILE_BYTES, /* one of fp8, two of bf16 */
        TOTALS = W_ROWS * C * 4,
        BEHIND = TOTALS + MOST_SCALES * 4 + BAR_BYTES,
        RING = (MOST_SHARED - BEHIND) / ALIGN * ALIGN,
        BYTES = RING + BEHIND,
    };
    static_assert((int)RING / (2 * W_PIECE + 2 * X_PIECE) >= GROUPS * STEP, "each has its stages");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct bars {
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], turn[MOST_GROUPS];
};
static_assert(sizeof(struct bars) <= BAR_BYTES, "the room for them");

/* What one block of threads has. */
struct share {
    uint8_t *ring;
    struct bars *bars;
    float *scales, *totals;
    int32_t n_blocks, group, n, t;   /* n: first weight row of the group; t: first row of x */
    int32_t n_stages, stages, bytes; /* of all k, of the ring; bytes of one, weights first */
    int w_pieces;
    /* Blocks of the cluster with the same weight rows and with the same rows of x, as masks; which
     * this one is among them and how many there are. */
    uint32_t w_mates, x_mates;
    int w_rank, x_rank, w_share, x_share;
};

enum what { WEIGHTS, ROWS_OF_X, REST };
/* The ring: weights of the first round, before there is x; rows of the first round; then all else.
 * Each filler has every fourth place: one alone would take longer than the matrix unit. A place is
 * always the same filler's, for who waits for a phase must have seen the one before. */
template <int N, mode M>
static __device__ __forceinline__ void fill(const struct job &j, const struct part &a,
                                            const struct share &m, enum what what)
{
    using D = struct tile<N, M>;
    const int32_t first = m.n_stages < m.stages ? m.n_stages : m.stages;
    const int32_t row = m.group * a.p.N + m.n + m.w_rank * (D::W_ROWS / m.w_share);
    const int32_t t = m.t + m.x_rank * (D::C / m.x_share);
    const auto load = [&](uint8_t *to, const CUtensorMap &map, int slot, int32_t at, int32_t from,
                          uint32_t mates) {
        uint64_t *full = &m.bars->full[slot];
        if (mates & (mates - 1))
            tile_load_to(to, &map, full, at, from, (uint16_t)mates);
        else
            tile_load(to, &map, full, at, from);
    };
    const auto load_w = [&](int slot, int32_t i) {
        uint8_t *to = m.ring + slot * m.bytes + m.w_rank * (D::W_ROWS / m.w_share) * TILE_BYTES;
        bar_expect(&m.bars->full[slot], m.bytes);
#pragma unroll
        for (int b = 0; b < D::BLOCKS; b++)
            for (int q = 0; q < m.w_pieces; q++)
                load(to + q * D::W_PIECE + b * (D::W_ROWS * TILE_BYTES), a.w, slot,
                     ((i * D::BLOCKS + b) * m.w_pieces + q) * TILE_BYTES, row, m.w_mates);
    };
    const auto load_x = [&](int slot, int32_t i) {
        uint8_t *to = m.ring + slot * m.bytes + m.w_pieces * D::W_PIECE +
                      m.x_rank * (D::C / m.x_share) * TILE_BYTES;
#pragma unroll
        for (int b = 0; b < D::BLOCKS; b++)
#pragma unroll
            for (int q = 0; q < 2; q++)
                load(to + q * D::X_PIECE + b * (D::C * TILE_BYTES), j.x[a.x], slot,
                     ((m.group * m.n_blocks + i * D::BLOCKS + b) * 2 + q) * TILE_BYTES, t,
                     m.x_mates);
    };
    const int me = threadIdx.x % 128 / 32;
    for (int i = me; i < first; i += FILLERS) {
        if (what == WEIGHTS) load_w(i, i);
        if (what == ROWS_OF_X) load_x(i, i);
    }
    if (what != REST) return;
    for (int32_t lap = 1;; lap++)
        for (int slot = me; slot < m.stages; slot += FILLERS) {
            const int32_t i = lap * m.stages + slot;
            if (i >= m.n_stages) return;
            bar_wait(&m.bars->empty[slot], (lap - 1) & 1);
            load_w(slot, i);
            load_x(slot, i);
        }
}

/* Does not change v; but what is made of it the compiler keeps, where it would make it again. */
static __device__ __forceinline__ uint32_t kept(uint32_t v)
{
    return __shfl_sync(0xffffffffu, v, threadIdx.x % 32);
}

/* Where a thread's operands lie in 64 rows of a stage, from `row` on: pieces of 16 bytes. Of fp8 it
 * has one piece in each half of a block, of bf16 two in both. */
template <kern_wfmt F> static __device__ __forceinline__ uint32_t piece_at(int row, int i)
{
    const int c = threadIdx.x % 4, piece = F == KERN_W_FP8 ? 4 * i + c : 2 * c + i;
    return kept(row * TILE_BYTES + (piece ^ (row & 7)) * 16);
}

/* This thread's weights of a stage as operands. half_bytes: from one half of a block of bf16 to the
 * other; second: to its second row. */
template <kern_wfmt F>
static __device__ __forceinline__ void operands(uint32_t w, const uint32_t (&piece)[2],
                                                int half_bytes, int second, uint32_t a[8][4])
{
    struct weights16<F> ws[2];
#pragma unroll
    for (int q = 0; q < 2; q++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int i = 0; i < weights16<F>::EACH / 16; i++) {
                const uint32_t at = w + (F == KERN_W_BF16 ? q * half_bytes + piece[i] : piece[q]);
                uint32_t *v = ws[q].v[r] + 4 * i;
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                             : "r"(at + r * second)
                             : "memory");
            }
#pragma unroll
    for (int q = 0; q < 2; q++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t one[1][4];
            weights_operand<F>(ws[q], i, one);
#pragma unroll
            for (int e = 0; e < 4; e++) a[4 * q + i][e] = one[0][e];
        }
}

/* A warp has read a stage: said to all that fill it. */
static __device__ __forceinline__ void release(const struct share &m, uint64_t *empty)
{
    const uint32_t lane = threadIdx.x % 32, mates = m.w_mates | m.x_mates;
    __syncwarp();
    if (mates == 1) {
        if (lane == 0) bar_arrive(empty);
    } else if (mates >> lane & 1) {
        bar_arrive_at(empty, (int)lane);
    }
}

/* Sixteen bytes of threads of a warpgroup lie side by side. */
template <int VALUES>
static __device__ __forceinline__ void load_totals(float (&v)[VALUES], uint32_t at)
{
#pragma unroll
    for (int i = 0; i < VALUES; i += 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
                     : "r"(at + i / 4 * (16 * 128))
                     : "memory");
}
template <int VALUES>
static __device__ __forceinline__ void store_totals(const float (&v)[VALUES], uint32_t at)
{
#pragma unroll
    for (int i = 0; i < VALUES; i += 4)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + i / 4 * (16 * 128)),
                     "f"(v[i]), "f"(v[i + 1]), "f"(v[i + 2]), "f"(v[i + 3])
                     : "memory");
}

template <int N, mode M, kern_wfmt F>
static __device__ __forceinline__ void multiply(const struct cuda_product &p, const struct share &m)
{
    using D = struct tile<N, M>;
    enum { VALUES = D::VALUES, BLOCKS = D::BLOCKS, STEP = D::STEP, GROUPS = D::GROUPS };
    const int lane = threadIdx.x % 32, me = threadIdx.x / 128;
    const int row = threadIdx.x / 32 % 4 * (M == SMALL ? 8 : 16) + lane / 4;
    const uint32_t piece[2] = {piece_at<F>(row, 0), piece_at<F>(row, 1)};
    const uint32_t ring = kept(dev_shared(m.ring)),
                   totals = kept(dev_shared(m.totals) + threadIdx.x % 128 * 16);
    const int64_t of_all = (int64_t)m.group * p.N + m.n + row;
    bool nan[2] = {false, false}, last = false;
    float total[VALUES], sum[STEP][N / 2];
    int32_t slot = me * STEP, phase = 0, turn = 0;
    for (int32_t q = me * STEP; q < m.n_stages && !last; q += GROUPS * STEP) {
        last = q + STEP >= m.n_stages;
        if (last && F == KERN_W_FP8)
#pragma unroll
            for (int r = 0; r < (M == SMALL ? 1 : 2); r++)
                if (m.n + row + 8 * r < p.N) nan[r] = __ldg(p.nan_rows + of_all + 8 * r);
#pragma unroll
        for (int j = 0; j < STEP; j++) {
            if (j > 0 && q + j >= m.n_stages) break;
            uint32_t a[8][4];
            bar_wait(&m.bars->full[slot], phase);
            operands<F>(ring + slot * m.bytes, piece, D::W_PIECE, D::SECOND * TILE_BYTES, a);
            const uint64_t rows = wgmma_rows(m.ring + slot * m.bytes + m.w_pieces * D::W_PIECE);
            /* One for all lanes: the compiler then counts on in uniform registers. */
            const uint32_t x = __shfl_sync(0xffffffffu, (uint32_t)rows, 0);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 8; k++)
                wgmma_bf16(sum[j], a[k],
                           (rows & 0xffffffff00000000u) |
                               (uint64_t)(x + k / 4 * (D::X_PIECE / 16) + k % 4 * 2),
                           k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin(sum[j]);
            release(m, &m.bars->empty[slot]);
            slot += j + 1 < STEP ? 1 : (GROUPS - 1) * STEP + 1;
            if (slot >= m.stages) slot -= m.stages, phase ^= 1;
        }
        if (q > 0) { /* those before have added theirs */
            bar_wait(&m.bars->turn[me], turn);
            turn ^= 1;
            load_totals(total, totals);
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; i++) total[i] = 0;
        }
#pragma unroll
        for (int j = 0; j < STEP; j++) {
            if (j > 0 && q + j >= m.n_stages) break;
            const int32_t b = (q + j) * BLOCKS;
            const float scale = m.scales[b], second_scale = m.scales[b + BLOCKS - 1];
            const bool both = BLOCKS == 2 && b + 1 < m.n_blocks;
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                const int first = M == SMALL ? i / 2 * 4 + i % 2 : i;
                total[i] = fmaf(sum[j][first], scale, total[i]);
                if (both)
                    total[i] =
                        fmaf(sum[j][first + (BLOCKS - 1) * (N / 4 + 2)], second_scale, total[i]);
            }
        }
        if (last) break;
        store_totals(total, totals);
        bar_arrive(&m.bars->turn[(me + 1) % GROUPS]);
    }
    if (!last) return;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const int r = M == SMALL ? 0 : i % 4 / 2, n = M == SMALL ? i / 2 : i / 4;
        const int32_t t = m.t + n * 8 + lane % 4 * 2 + i % 2;
        if (m.n + row + 8 * r < p.N && t < p.T)
            dev_store(p.y, t * p.ld_y + of_all + 8 * r, p.y_dtype,
                      nan[r] ? kern_float(0x7fc00000u) : total[i] * p.post);
    }
}

template <int N, mode M>
static __global__ void __launch_bounds__(tile<N, M>::THREADS, 1)
    turns_kernel(const __grid_constant__ struct job j)
{
    using D = struct tile<N, M>;
    enum { MATH = 128 * D::GROUPS };
    extern __shared__ __align__(ALIGN) uint8_t shared[];
    const int size = j.across * j.down, rank = size > 1 ? cluster_rank() : 0,
              my_row = rank / j.across, my_column = rank % j.across;
    const int32_t cluster = blockIdx.x / size, wide = j.columns / j.across;
    const int32_t tile = cluster / wide * j.down + my_row;
    int i = 0;
    while (i + 1 < j.n && tile >= j.part[i + 1].begin) i++;
    const struct part &part = j.part[i];
    struct share m;
    m.ring = shared;
    m.totals = (float *)(shared + D::RING);
    m.scales = (float *)(shared + D::RING + D::TOTALS);
    m.bars = (struct bars *)(m.scales + MOST_SCALES);
    m.n_blocks = part.p.Kx / BLOCK_K;
    m.n_stages = (m.n_blocks + D::BLOCKS - 1) / D::BLOCKS;
    m.group = (tile - part.begin) / part.tiles;
    m.n = (tile - part.begin) % part.tiles * D::W_ROWS;
    m.t = (cluster % wide * j.across + my_column) * D::C;
    m.w_pieces = part.is_fp8 ? 1 : 2;
    m.bytes = m.w_pieces * D::W_PIECE + 2 * D::X_PIECE;
    m.stages = D::RING / m.bytes < (int)MOST_STAGES ? D::RING / m.bytes : (int)MOST_STAGES;
    m.w_mates = ((1u << j.across) - 1) << (my_row * j.across);
    m.x_mates = 0;
    for (int k = 0; k < j.down; k++) m.x_mates |= 1u << (k * j.across + my_column);
    m.w_rank = my_column, m.x_rank = my_row, m.w_share = j.across, m.x_share = j.down;
    cuda_hurry();
    if (threadIdx.x == 0) {
        for (int k = 0; k < m.stages; k++)
            bar_init(&m.bars->full[k], 1), bar_init(&m.bars->empty[k], 4 * (j.across + j.down - 1));
        for (int k = 0; k < D::GROUPS; k++) bar_init(&m.bars->turn[k], 128);
        bar_init_done();
    }
    __syncthreads();
    if (size > 1) cluster_meet_relaxed();
    const bool fills = threadIdx.x >= MATH && threadIdx.x % 32 == 0;
    if (fills) fill<N, M>(j, part, m, WEIGHTS);
    const int32_t scale_row = (m.group * part.p.N + m.n) / BLOCK_N,
                  last_row = (part.p.groups * part.p.N - 1) / BLOCK_N;
    for (int32_t b = threadIdx.x; b < m.n_blocks; b += D::THREADS)
        m.scales[b] = part.is_fp8
                          ? block_scale(part.p, scale_row < last_row ? scale_row : last_row, b)
                          : 1.0f;
    cuda_await(); /* what makes x, or reads where y goes, may have been still at work */
    if (fills) fill<N, M>(j, part, m, ROWS_OF_X);
    __syncthreads();
    if (threadIdx.x >= MATH) {
        /* All together have what they began with. */
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (fills) fill<N, M>(j, part, m, REST);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)D::REGISTERS));
        if (part.is_fp8)
            multiply<N, M, KERN_W_FP8>(part.p, m);
        else
            multiply<N, M, KERN_W_BF16>(part.p, m);
    }
    __syncwarp();
    if (size > 1) cluster_meet_relaxed(); /* a block must be there while others write to it */
}
#else
template <int N, mode M> static __global__ void turns_kernel(const __grid_constant__ struct job j)
{
}
#endif

/* Tiles of so many weight rows. */
static int64_t tiles_of(const struct cuda_set *a, int rows)
{
    int64_t n = 0;
    for (int i = 0; i < a->n; i++) n += cuda_ceil(a->p[i].N, rows) * a->p[i].groups;
    return n;
}

/* across, down: of a cluster. */
template <int N, mode M>
static bool launch(struct kern_stream *s, const struct cuda_set *a, int64_t columns, int across,
                   int down)
{
    using D = struct tile<N, M>;
    struct job j = {};
    const struct cuda_product *first = &a->p[0];
    const int64_t width = (int64_t)first->groups * first->Kx * 2;
    int n_x = 0;
    int64_t begin = 0;
    j.n = a->n;
    j.across = across, j.down = down;
    j.columns = (int32_t)(cuda_ceil(columns, across) * across);
    for (int i = 0; i < a->n; i++) {
        struct part *q = &j.part[i];
        q->p = a->p[i];
        q->is_fp8 = a->fmt[i] == KERN_W_FP8;
        q->begin = (int32_t)begin;
        q->tiles = (int32_t)(cuda_ceil(cuda_ceil(q->p.N, D::W_ROWS), down) * down);
        begin += (int64_t)q->tiles * q->p.groups;
        q->x = i > 0 && q->p.x != first->x;
        if (q->x >= n_x) {
            if (!cuda_tile_map(&j.x[q->x], q->p.x, q->p.T, width, width, D::C / down)) return false;
            n_x = q->x + 1;
        }
        if (!cuda_tile_map(&q->w, q->p.w, (int64_t)q->p.groups * q->p.N, q->p.row_bytes,
                           q->p.row_bytes, D::W_ROWS / across))
            return false;
    }
    cudaLaunchAttribute attrs[2] = {};
    cudaLaunchConfig_t c = {};
    if (across * down > 1) {
        attrs[c.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attrs[c.numAttrs].val.clusterDim.x = (unsigned)(across * down);
        attrs[c.numAttrs].val.clusterDim.y = attrs[c.numAttrs].val.clusterDim.z = 1;
        c.numAttrs++;
    }
    if (cuda_early_launches) {
        attrs[c.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attrs[c.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        c.numAttrs++;
    }
    c.gridDim = dim3((unsigned)(begin * j.columns));
    c.blockDim = dim3(D::THREADS);
    c.dynamicSmemBytes = D::BYTES;
    c.stream = s->cu;
    c.attrs = attrs;
    CUDA_SHARED((turns_kernel<N, M>), D::BYTES);
    cudaLaunchKernelEx(&c, turns_kernel<N, M>, j);
    return true;
}

/* So many blocks of threads with the same weight rows, each with as many columns, fill the machine
 * best. */
static int columns_of(const struct kern_stream *s, const struct cuda_set *a)
{
    const int64_t tiles = tiles_of(a, ROWS);
    int columns = 1;
    while (columns < 4 && tiles * 2 * columns <= s->n_sm && a->p[0].T > 16 * columns) columns *= 2;
    return columns;
}

bool cuda_product_turns(struct kern_stream *s, const struct cuda_set *a)
{
    const int32_t T = a->p[0].T;
    const int64_t small = tiles_of(a, ROWS / 2);
    if (T <= 32 && small <= s->n_sm) {
        if (T <= 16) return launch<32, SMALL>(s, a, 1, 1, 1);
        return small * 2 <= s->n_sm ? launch<32, SMALL>(s, a, 2, 1, 1)
                                    : launch<64, SMALL>(s, a, 1, 1, 1);
    }
    const int64_t each = cuda_ceil(T, columns_of(s, a));
    if (each > 32) return launch<64, TILE>(s, a, cuda_ceil(T, 64), 1, 2);
    if (T <= each)
        return each > 16 ? launch<32, TILE>(s, a, 1, 1, 2) : launch<16, TILE>(s, a, 1, 1, 2);
    return each > 16 ? launch<32, TILE>(s, a, cuda_ceil(T, 32), 2, 1)
                     : launch<16, TILE>(s, a, cuda_ceil(T, 16), 2, 1);
}

bool cuda_turns_takes(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    /* A tile of fp8 weight rows has one scale a block. */
    const bool one_scale = fmt != KERN_W_FP8 || p->groups == 1 || p->N % BLOCK_N == 0;
    return s->arch == 90 && (fmt == KERN_W_FP8 || fmt == KERN_W_BF16) && one_scale &&
           p->aq != KERN_AQ_NVFP4 && p->T > CUDA_FEW_T && p->T <= 128 &&
           cuda_ceil(p->K, BLOCK_K) <= MOST_SCALES;
}
bool cuda_turns_fits(const struct kern_stream *s, const struct cuda_set *a)
{
    enum { LEAST_TILES = 8 /* of fewer, k must be shared out */ };
    const int64_t tiles = tiles_of(a, ROWS);
    for (int i = 1; i < a->n; i++)
        if (a->p[i].K != a->p[0].K || a->p[i].groups != a->p[0].groups) return false;
    return a->n > 0 && tiles >= LEAST_TILES && tiles <= s->n_sm &&
           a->p[0].T <= MOST_COLUMNS * columns_of(s, a);
}
