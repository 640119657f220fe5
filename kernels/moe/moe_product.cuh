/* kernels/moe/moe_product.cuh - tiles of pairs times their expert's stored weights on the matrix
 * unit.
 *
 * Plan     A block takes one tile of pairs and 2 x ROWS weight rows: the same ROWS of w1 and w3, or
 *          2 x ROWS of w2. Weights stand on the 16-row side of mma.m16n8k16, pairs on the 8-column
 *          side, so a warp decodes each of its 32 weight rows once, in registers, and multiplies
 *          all pairs with it. Codes, scales and x come through a ring of stages in shared memory,
 *          by cp.async.
 * Order    Of each 128 values of the inner width, thread t of four owns 32 t .. 32 t + 31: for
 *          4-bit codes that is one 16-byte load and one scale (mxfp4) or two (nvfp4). A step of 16
 *          takes four values of each of the four threads, of x as of weights, so x lies in its
 *          natural order. The chain of steps is the same for every tile size: a row has the same
 *          bits in any batch.
 * Exact    A value (code times its scale) is made in bf16 without rounding; fp8's block scale and
 *          all second scales multiply sums. See kernels/cuda/dequant.cuh.
 */
#ifndef KERN_MOE_PRODUCT_CUH
#define KERN_MOE_PRODUCT_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/moe/moe_cuda.cuh"

/* Of 128 values of a row: bytes of codes, bytes of scales staged with them. */
template <enum kern_wfmt F> struct moe_format {
    enum {
        CODES = F == KERN_W_BF16  ? 256
                : F == KERN_W_FP8 ? 128
                                  : 64,
        SCALES = F == KERN_W_MXFP4   ? 4
                 : F == KERN_W_NVFP4 ? 8
                                     : 0,
        FP4 = F == KERN_W_MXFP4 || F == KERN_W_NVFP4,
    };
};

template <enum kern_wfmt F, int NT, bool TWO> struct moe_shape {
    enum {
        WARPS = NT >= 8 ? 8 : 4,
        THREADS = 32 * WARPS,
        ROWS = 16 * WARPS,
        TOKENS = 8 * NT,
        BLOCKS = NT <= 4 && moe_format<F>::FP4 ? 2 : 1, /* of 128 values, in a stage */
        CODES = moe_format<F>::CODES * BLOCKS,          /* bytes of a row in a stage */
        SCALES = moe_format<F>::SCALES * BLOCKS,
        X = 256 * BLOCKS,
        SCALES_AT = 2 * ROWS * CODES,
        X_AT = SCALES_AT + 2 * ROWS * SCALES,
        X1_AT = X_AT + TOKENS * X,
        STAGE = X1_AT + (TWO ? TOKENS * X : 0),
        TOGETHER = NT >= 8   ? 4
                   : NT >= 4 ? 2
                             : 1, /* groups of eight pairs between two branches */
        PER_SM = NT >= 8          ? 1
                 : NT >= 4 || TWO ? 2
                                  : 3, /* blocks meant to share a multiprocessor */
    };
};

/* 16 bytes past the first-level cache, 4 or 8 through it: their neighbours come next. What follows
 * in a row is wanted soon, so L2 fetches it in wider pieces than it has to. */
template <int N> static __device__ __forceinline__ void moe_copy(void *to, const void *from)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    if (N == 16)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(at),
                     "l"(__cvta_generic_to_global(from))
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(at),
                     "l"(__cvta_generic_to_global(from)), "n"(N)
                     : "memory");
}
/* All but the newest n groups of this thread have landed. */
static __device__ __forceinline__ void moe_wait(int n)
{
    if (n <= 0)
        dev_copy_wait<0>();
    else if (n == 1)
        dev_copy_wait<1>();
    else
        dev_copy_wait<2>();
}

/* Where 16-byte piece c of pair n lies in a stage: pieces that eight neighbouring threads read at
 * once (two pairs, four quarters) lie in different banks. */
static __device__ __forceinline__ int moe_x_piece(int n, int c)
{
    return c ^ (c >> 3 & 1) ^ (n & 1) << 1;
}

/* What a block works on. */
struct moe_job {
    const uint8_t *data[2], *scale[2]; /* of the two groups of weight rows: their first row */
    int32_t left[2];                   /* rows there are from that on */
    int32_t n;                         /* pairs */
};

/* What a thread fetches for each stage. */
template <enum kern_wfmt F, int NT, bool TWO> struct moe_reader {
    using S = moe_shape<F, NT, TWO>;
    enum {
        PIECES = S::CODES / 16, /* of a weight row */
        ROWS_AT_ONCE = S::THREADS / PIECES,
        X_PIECES = S::X / 16,
        X_EACH = S::TOKENS * X_PIECES / S::THREADS,
    };
    const uint8_t *code[2], *scale; /* whole: of the next stage */
    uint32_t x[X_EACH];             /* its pieces in the first stage, counted in pieces from x0 */
    bool whole;                     /* all of the block's weights are there, in every stage */
};

template <enum kern_wfmt F, int NT, bool TWO>
static __device__ __forceinline__ void
moe_reader_init(struct moe_reader<F, NT, TWO> *r, const struct moe_product &p,
                const struct moe_job &j, const int32_t *x_row, int n_it)
{
    using S = moe_shape<F, NT, TWO>;
    using R = moe_reader<F, NT, TWO>;
    const int tid = threadIdx.x, row = tid % S::ROWS;
    r->whole = j.left[0] >= S::ROWS && j.left[1] >= S::ROWS &&
               p.a.row_bytes == (int64_t)n_it * S::CODES &&
               (S::SCALES == 0 || p.a.scale_bytes == (int64_t)n_it * S::SCALES);
#pragma unroll
    for (int m = 0; m < 2; m++)
        r->code[m] = j.data[m] + tid / R::PIECES * p.a.row_bytes + tid % R::PIECES * 16;
    r->scale = (tid < S::ROWS ? j.scale[0] : j.scale[1]) + row * p.a.scale_bytes;
#pragma unroll
    for (int i = 0; i < R::X_EACH; i++) {
        const int at = i * S::THREADS + tid;
        r->x[i] = (uint32_t)((int64_t)x_row[at / R::X_PIECES] * (p.kp / 8)) + at % R::X_PIECES;
    }
}

/* Codes and scales of stage `it` where some of them may be missing: those are zero. */
template <enum kern_wfmt F, int NT, bool TWO>
static __device__ __forceinline__ void moe_load_partly(const struct moe_product &p,
                                                       const struct moe_job &j, int it, uint8_t *to)
{
    using S = moe_shape<F, NT, TWO>;
    using R = moe_reader<F, NT, TWO>;
    const int tid = threadIdx.x, c = tid % R::PIECES;
    const int64_t code_at = (int64_t)it * S::CODES + c * 16, scale_at = (int64_t)it * S::SCALES;
    for (int i = tid / R::PIECES; i < 2 * S::ROWS; i += R::ROWS_AT_ONCE) {
        const int m = i / S::ROWS, row = i % S::ROWS;
        const uint8_t *data = m ? j.data[1] : j.data[0];
        const bool there = row < (m ? j.left[1] : j.left[0]) && code_at < p.a.row_bytes;
        const int swizzled = S::BLOCKS == 2 ? c ^ (row & 1) << 2 : c;
        dev_copy16(to + i * S::CODES + swizzled * 16,
                   there ? data + row * p.a.row_bytes + code_at : j.data[0], there);
    }
    const int m = tid / S::ROWS, row = tid % S::ROWS; /* a thread for each row of scales */
    const uint8_t *from = (m ? j.scale[1] : j.scale[0]) + row * p.a.scale_bytes + scale_at;
    const bool there = row < (m ? j.left[1] : j.left[0]);
    for (int i = 0; i < S::SCALES; i++)
        to[S::SCALES_AT + tid * S::SCALES + i] =
            there && scale_at + i < p.a.scale_bytes ? from[i] : 0;
}

/* Codes, scales and x of stage `it`, to shared memory at `to`; stages are asked for in order. */
template <enum kern_wfmt F, int NT, bool TWO>
static __device__ __forceinline__ void
moe_load(const struct moe_product &p, const struct moe_job &j, struct moe_reader<F, NT, TWO> *r,
         int it, uint8_t *to)
{
    using S = moe_shape<F, NT, TWO>;
    using R = moe_reader<F, NT, TWO>;
    const int tid = threadIdx.x;
    if (r->whole) {
        const int row = tid / R::PIECES, c = tid % R::PIECES;
        uint8_t *dst = to + row * S::CODES + (S::BLOCKS == 2 ? c ^ (row & 1) << 2 : c) * 16;
        static_assert(R::ROWS_AT_ONCE % 2 == 0, "a thread's rows are all odd or all even");
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint8_t *from = r->code[m];
#pragma unroll
            for (int i = 0; i < S::ROWS; i += R::ROWS_AT_ONCE) {
                moe_copy<16>(dst + (m * S::ROWS + i) * S::CODES, from);
                from += R::ROWS_AT_ONCE * p.a.row_bytes;
            }
            r->code[m] += S::CODES;
        }
        if (S::SCALES > 0) {
            moe_copy<S::SCALES ? S::SCALES : 4>(to + S::SCALES_AT + tid * S::SCALES, r->scale);
            r->scale += S::SCALES;
        }
    } else {
        moe_load_partly<F, NT, TWO>(p, j, it, to);
    }
    const uint16_t *x0 = p.x0 + (int64_t)it * (S::X / 2), *x1 = p.x1 + (int64_t)it * (S::X / 2);
#pragma unroll
    for (int i = 0; i < R::X_EACH; i++) {
        const int n = (i * S::THREADS + tid) / R::X_PIECES, c = tid % R::X_PIECES;
        if (NT > 1 && n >= (j.n + 7) / 8 * 8) break;
        uint8_t *dst = to + S::X_AT + n * S::X + moe_x_piece(n, c) * 16;
        dev_copy16(dst, x0 + (size_t)r->x[i] * 8, n < j.n);
        if (TWO) dev_copy16(dst + S::X1_AT - S::X_AT, x1 + (size_t)r->x[i] * 8, n < j.n);
    }
}

/* The two warp-wide groups of 16 weight rows times n_groups of eight pairs, over a stage. scale:
 * fp8's block scales of the groups of rows. */
template <enum kern_wfmt F, int NT, bool TWO>
static __device__ __forceinline__ void moe_compute(const uint8_t *stage, int n_groups,
                                                   const float (&scale)[2], float (&acc)[2][NT][4])
{
    using S = moe_shape<F, NT, TWO>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row0 = warp * 16 + g; /* of group 0; the others: + 8, + ROWS, + ROWS + 8 */
#pragma unroll
    for (int kb = 0; kb < S::BLOCKS; kb++) {
        uint4 code[4];
        uint32_t factor[4][2]; /* 4-bit: of both halves of a thread's 32 */
        float part[2][NT][4];  /* fp8: sums of this block */
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int row = row0 + (r & 1) * 8 + (r >> 1) * S::ROWS;
            const uint8_t *sc = stage + S::SCALES_AT + row * S::SCALES;
            if (moe_format<F>::FP4) {
                const int c = S::BLOCKS == 2 ? (kb * 4 + t) ^ (g & 1) << 2 : t;
                code[r] = *(const uint4 *)(stage + row * S::CODES + c * 16);
            }
            if (F == KERN_W_MXFP4) factor[r][0] = factor[r][1] = dev_mxfp4_factor(sc[kb * 4 + t]);
            if (F == KERN_W_NVFP4) {
                const uint32_t two = *(const uint16_t *)(sc + kb * 8 + t * 2);
                factor[r][0] = dev_nvfp4_factor(two & 255);
                factor[r][1] = dev_nvfp4_factor(two >> 8);
            }
        }
        if (F == KERN_W_FP8) {
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int c = 0; c < 4; c++) part[0][i][c] = part[1][i][c] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t a[2][2][4]; /* group, step */
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int row = row0 + (r & 1) * 8 + (r >> 1) * S::ROWS;
                const uint8_t *at = stage + row * S::CODES + kb * moe_format<F>::CODES;
                uint32_t v[4];
                if (moe_format<F>::FP4) {
                    const uint32_t w = j == 0   ? code[r].x
                                       : j == 1 ? code[r].y
                                       : j == 2 ? code[r].z
                                                : code[r].w;
                    dev_e2m1x8(w, factor[r][j / 2], v);
                }
                if (F == KERN_W_FP8) {
                    const uint2 w = *(const uint2 *)(at + t * 32 + j * 8);
                    dev_e4m3x4(w.x, v);
                    dev_e4m3x4(w.y, v + 2);
                }
                if (F == KERN_W_BF16) {
                    const uint4 w = *(const uint4 *)(at + t * 64 + j * 16);
                    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
                }
                a[r >> 1][0][r & 1] = v[0], a[r >> 1][0][2 + (r & 1)] = v[1];
                a[r >> 1][1][r & 1] = v[2], a[r >> 1][1][2 + (r & 1)] = v[3];
            }
#pragma unroll
            for (int i0 = 0; i0 < NT; i0 += S::TOGETHER) {
                if (i0 > 0 && i0 >= n_groups) break;
                uint4 x0[S::TOGETHER], x1[S::TOGETHER];
#pragma unroll
                for (int i = 0; i < S::TOGETHER; i++) {
                    const int n = (i0 + i) * 8 + g, c = moe_x_piece(n, kb * 16 + t * 4 + j);
                    x0[i] = *(const uint4 *)(stage + S::X_AT + n * S::X + c * 16);
                    if (TWO) x1[i] = *(const uint4 *)(stage + S::X1_AT + n * S::X + c * 16);
                }
#pragma unroll
                for (int step = 0; step < 2; step++)
#pragma unroll
                    for (int i = 0; i < S::TOGETHER; i++) {
                        const uint4 x = TWO ? x1[i] : x0[i];
                        const uint32_t b0[2] = {step ? x0[i].z : x0[i].x, step ? x0[i].w : x0[i].y};
                        const uint32_t b1[2] = {step ? x.z : x.x, step ? x.w : x.y};
                        dev_mma(F == KERN_W_FP8 ? part[0][i0 + i] : acc[0][i0 + i], a[0][step], b0);
                        dev_mma(F == KERN_W_FP8 ? part[1][i0 + i] : acc[1][i0 + i], a[1][step], b1);
                    }
            }
        }
        if (F == KERN_W_FP8) {
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < NT; i++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        acc[m][i][c] = fmaf(part[m][i][c], scale[m], acc[m][i][c]);
        }
    }
}

/* fp8: scale of the 128 x 128 block. */
static __device__ __forceinline__ float
moe_block_scale(const struct moe_matrix &m, const uint8_t *scale, int64_t row, int64_t block)
{
    const uint8_t *at = scale + row / 128 * m.scale_bytes;
    return m.sfmt == KERN_S_F32 ? ((const float *)at)[block] : kern_ue8m0_decode(at[block]);
}

/* [rows]: is a code or a scale of the row NaN? NULL: codes of this format show it themselves. */
static __device__ __forceinline__ const uint8_t *
moe_nan_rows(const struct moe_matrix &m, const struct cuda_weight *w, int32_t rows, int32_t k)
{
    return cuda_has_nan_rows(m.fmt) ? cuda_nan_rows(w->scale, m.fmt, m.sfmt, rows, k) : NULL;
}

template <enum kern_wfmt F, int NT, bool TWO>
static __global__ void __launch_bounds__(moe_shape<F, NT, TWO>::THREADS,
                                         moe_shape<F, NT, TWO>::PER_SM)
    moe_kernel(const __grid_constant__ struct moe_product p, int row_tiles, int stages)
{
    using S = moe_shape<F, NT, TWO>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int32_t x_row[S::TOKENS];
    __shared__ float weight[S::TOKENS];
    const int tid = threadIdx.x, at = blockIdx.x / row_tiles, part = blockIdx.x % row_tiles;
    const struct moe_tile tile = p.plan.tiles[at];
    if (tile.n == 0) return;
    const struct cuda_weight *wa = &p.a.w[tile.expert], *wb = &p.b.w[tile.expert];
    const int64_t first[2] = {(int64_t)part * S::ROWS * (p.up ? 1 : 2),
                              (int64_t)part * S::ROWS * (p.up ? 1 : 2) + (p.up ? 0 : S::ROWS)};
    struct moe_job j;
    j.n = tile.n;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const struct cuda_weight *w = m ? wb : wa;
        j.data[m] = w->data + first[m] * p.a.row_bytes;
        j.scale[m] = S::SCALES > 0 ? w->scale + first[m] * p.a.scale_bytes : w->scale;
        j.left[m] = (int32_t)(p.rows - first[m] < 0 ? 0 : p.rows - first[m]);
    }
    if (j.left[1] == 0) j.data[1] = j.data[0];
    for (int i = tid; i < S::TOKENS; i += S::THREADS) {
        const int pair = tile.first + (i < tile.n ? i : 0);
        x_row[i] = p.by_pair ? pair : p.plan.order[pair] / p.slots;
        weight[i] = p.up ? p.weights[p.plan.order[pair]] : 1.0f;
    }
    __syncthreads();

    const int n_it = p.kp / (128 * S::BLOCKS), n_groups = (tile.n + 7) / 8;
    struct moe_reader<F, NT, TWO> reader;
    moe_reader_init(&reader, p, j, x_row, n_it);
    float acc[2][NT][4] = {}, scale[2] = {1.0f, 1.0f};
    int load_at = 0, at_stage = 0;
    for (int it = 0; it < stages - 1; it++, load_at++) {
        if (it < n_it) moe_load<F, NT, TWO>(p, j, &reader, it, shared + load_at * S::STAGE);
        dev_copy_commit();
    }
    for (int it = 0; it < n_it; it++) {
        moe_wait(stages - 2);
        __syncthreads(); /* stage `it` is there for all, and none still reads the one before */
        if (it + stages - 1 < n_it)
            moe_load<F, NT, TWO>(p, j, &reader, it + stages - 1, shared + load_at * S::STAGE);
        dev_copy_commit();
        if (F == KERN_W_FP8 && (int64_t)it * 128 < p.k) {
            scale[0] = moe_block_scale(p.a, j.scale[0], first[0], it);
            scale[1] = j.left[1] > 0 ? moe_block_scale(p.b, j.scale[1], first[1], it) : 0.0f;
        }
        moe_compute<F, NT, TWO>(shared + at_stage * S::STAGE, n_groups, scale, acc);
        if (++load_at == stages) load_at = 0;
        if (++at_stage == stages) at_stage = 0;
    }
    __syncthreads();

    /* Results go out through shared memory, pair by pair, so that stores are whole lines. */
    const int width = p.up ? S::ROWS : 2 * S::ROWS, ld = width + 8;
    uint16_t *tmp = (uint16_t *)shared;
    const int lane = tid % 32, row0 = tid / 32 * 16 + lane / 4;
    float post[2], in[2];
    bool nan[2][2]; /* rows row0, row0 + 8 of each group have a NaN code */
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const struct cuda_weight *w = m ? wb : wa;
        const uint8_t *rows = moe_nan_rows(m ? p.b : p.a, w, p.rows, p.k);
        post[m] = moe_format<F>::FP4 ? DEV_E2M1_POST : 1.0f;
        if (F == KERN_W_NVFP4) post[m] *= w->scale2;
        in[m] = p.input_scaled ? w->input_scale : 1.0f;
        for (int c = 0; c < 2; c++)
            nan[m][c] = rows && row0 + c * 8 < j.left[m] && rows[first[m] + row0 + c * 8];
    }
#pragma unroll
    for (int i = 0; i < NT; i++) {
        if (i >= n_groups) break;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int n = i * 8 + lane % 4 * 2 + (c & 1), row = row0 + (c >> 1) * 8;
            const float a = kern_bf16_round(nan[0][c >> 1] ? NAN : acc[0][i][c] * in[0] * post[0]);
            const float b = kern_bf16_round(nan[1][c >> 1] ? NAN : acc[1][i][c] * in[1] * post[1]);
            if (p.up) {
                tmp[n * ld + row] = kern_bf16_encode(dev_gate(a, b, p.limit) * weight[n]);
            } else {
                tmp[n * ld + row] = kern_bf16_encode(a);
                tmp[n * ld + S::ROWS + row] = kern_bf16_encode(b);
            }
        }
    }
    __syncthreads();
    const int64_t col0 = first[0];
    uint16_t *out = p.out + (int64_t)tile.first * p.rows + col0;
    const int there = (int)(p.rows - col0 < width ? p.rows - col0 : width);
    if (p.rows % 8 == 0) {
        for (int i = tid; i < tile.n * (width / 8); i += S::THREADS) {
            const int n = i / (width / 8), c = i % (width / 8) * 8;
            if (c < there)
                *(uint4 *)(out + (int64_t)n * p.rows + c) = *(const uint4 *)(tmp + n * ld + c);
        }
    } else {
        for (int i = tid; i < tile.n * width; i += S::THREADS) {
            const int n = i / width, c = i % width;
            if (c < there) out[(int64_t)n * p.rows + c] = tmp[n * ld + c];
        }
    }
}

template <enum kern_wfmt F, int NT, bool TWO>
static int moe_launch(struct kern_stream *s, const struct moe_product *p)
{
    using S = moe_shape<F, NT, TWO>;
    static_assert((size_t)S::TOKENS * (2 * S::ROWS + 8) * 2 <= 2 * (size_t)S::STAGE,
                  "results fit where two stages were");
    const int reserved = 1024 + S::TOKENS * 8; /* by the system and for the lists */
    int stages = ((s->max_shared + 1024) / S::PER_SM - reserved) / S::STAGE;
    stages = stages > 4 ? 4 : stages < 2 ? 2 : stages;
    const size_t bytes = (size_t)stages * S::STAGE;
    if ((int)bytes + S::TOKENS * 8 > s->max_shared) return TOW_EINVAL;
    const int row_tiles = (int)cuda_ceil(p->rows, p->up ? S::ROWS : 2 * S::ROWS);
    CUDA_SHARED((moe_kernel<F, NT, TWO>), s->max_shared - S::TOKENS * 8);
    moe_kernel<F, NT, TWO>
        <<<(unsigned)p->plan.max_tiles *(unsigned)row_tiles, S::THREADS, bytes, s->cu>>>(
            *p, row_tiles, stages);
    return cuda_done(s, "moe");
}

#endif
