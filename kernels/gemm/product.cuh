/* kernels/gemm/product.cuh - what products of rows with placed weights share: the arguments, which
 * kernel takes which, and 16 weight rows x 64 k as operands of the matrix unit.
 *
 * Numerics One order for all of bf16 rows: k in blocks of 128; in a block eight instructions of 16
 *          k, ascending (slots as in mma.cuh, weights on the M side), start from zero; sum =
 *          fmaf(block, scale, sum), blocks ascending, scale being the fp8 block's, else 1; at last
 *          the sum times `post`. An f32 weight is the sum of three bf16 numbers, exactly: three
 *          instructions, the largest part first.
 *          So block sums may be made anywhere, and only their chain has a place.
 */
#ifndef KERN_GEMM_PRODUCT_CUH
#define KERN_GEMM_PRODUCT_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/mma.cuh"

struct cuda_product {
    /* [T, groups, K] bf16: row t at ld_x t, its groups x_group apart; unless own, all 16-byte
     * aligned and with Kx elements to be read. */
    const uint16_t *x;
    int64_t ld_x, x_group;
    const uint8_t *w; /* placed [groups * N, K] */
    const uint8_t *scale, *nan_rows;
    int64_t row_bytes, scale_row_bytes;
    void *y;
    int64_t ld_y;
    int32_t T, N, K, Kx, groups; /* Kx: K rounded up to 8; beyond K there are zeros */
    float post;
    enum kern_sfmt sfmt;
    enum kern_dtype y_dtype;
    /* own: x is not quantized yet, and small enough that blocks of threads do it for themselves. */
    bool own, by_fours;
    enum kern_act_quant aq; /* none or A128 */
    bool after_quant;       /* the launch before this one quantizes x */
    /* Products of codes: x instead, [T, groups, Kx] e4m3, and its scales [groups * Kx / 128,
     * ld_scales] (cuda_codes of quant.cuh); Kx whole blocks of 128, ld_scales of CUDA_CODES_T. */
    const uint8_t *codes;
    const float *x_scales;
    int64_t ld_scales;
};
enum { CUDA_CODES_T = 256, CUDA_FEW_T = 8 /* rows up to which few_cuda.cu is as fast as wgmma */ };

enum {
    /* Of an x that each block of threads quantizes: one warp has 4 spans. */
    CUDA_OWN_ELEMENTS = 4 << 10
};
/* Is this product faster as few, whose rows go by 8 to 32 at a time? */
bool cuda_few_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p);
void cuda_product_few(struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p);
void cuda_product_many(struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p);

/* Several products of the same few rows in one launch; each with the bits that it has alone. own:
 * their blocks of threads quantize the rows for themselves, and norm or rotate them on that way. */
enum {
    CUDA_SET_MOST = 8,
    CUDA_SET_ELEMENTS = 8 << 10 /* of x, if own */
};
struct cuda_set {
    struct cuda_product p[CUDA_SET_MOST]; /* [n] of one T, K and groups */
    enum kern_wfmt fmt[CUDA_SET_MOST];
    int n;
    bool own;
    const struct kern_rmsnorm *norm;    /* NULL, or as in kern_linears; only if own */
    const struct kern_heads_rope *rope; /* the same */
};
/* Can the product be one of a set; can these, each of which can. */
bool cuda_set_takes(enum kern_wfmt fmt, const struct cuda_product *p);
bool cuda_set_fits(const struct cuda_set *a);
void cuda_product_set(struct kern_stream *s, const struct cuda_set *a);

/* stream_cuda.cu: the same for up to 8 rows of fp8 and bf16 weights, K of whole blocks, where there
 * are weight rows for at least half of the multiprocessors and what they need fits in shared
 * memory. Call the second only where the first says true. */
bool cuda_stream_fits(const struct kern_stream *s, const struct cuda_set *a);
void cuda_product_stream(struct kern_stream *s, const struct cuda_set *a);

/* The same for 9 to 128 rows, by wgmma: x of each product as those below have it, at most two
 * different ones; own, norm and rope are not looked at. False: the driver refused to describe the
 * operands. */
bool cuda_turns_takes(const struct kern_stream *s, enum kern_wfmt fmt,
                      const struct cuda_product *p);
bool cuda_turns_fits(const struct kern_stream *s, const struct cuda_set *a);
bool cuda_product_turns(struct kern_stream *s, const struct cuda_set *a);

/* By wgmma, on sm_90a. Kx is whole blocks of 128 k, x is tight and aligned, and with k in the order
 * of slots. False: the driver refused to describe the operands.
 * Products of codes (x as codes, cuda_fp8_products): a block of 128 k is four instructions of 32 k,
 * ascending, from zero; then sum = fmaf(block, weight's scale * row's scale, sum), blocks
 * ascending. Which operand is on the M side makes no difference to the bits. NaN codes are NaN to
 * the matrix unit itself. */
bool cuda_codes_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p);
/* Up to 128 rows, and more where there are few weight rows. */
bool cuda_narrow_fits(const struct kern_stream *s, enum kern_wfmt fmt,
                      const struct cuda_product *p);
bool cuda_product_narrow(struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p);
/* fp8 weights with any number of rows. */
bool cuda_wide_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p);
bool cuda_product_wide(struct kern_stream *s, const struct cuda_product *p);
bool cuda_product_codes(struct kern_stream *s, const struct cuda_product *p);
/* Up to 128 rows of codes where there are few weight rows. Small x (cuda_codes_own) is left to it:
 * codes NULL, x as it came. */
bool cuda_codes_narrow_fits(const struct kern_stream *s, const struct cuda_product *p);
bool cuda_codes_own(const struct cuda_product *p);
bool cuda_product_codes_narrow(struct kern_stream *s, const struct cuda_product *p);

/* linear_cuda.cu: would this product have its rows, not quantized, put into the order of slots
 * first? Then the second multiplies rows that lie so in p->x. Returns 0 or TOW_E*. */
bool cuda_linear_reads_slots(const struct kern_stream *s, const struct kern_linear *p);
int cuda_linear_of_slots(struct kern_stream *s, const struct kern_linear *p);

enum { GROUP_K = 64, BLOCK_K = 128, BLOCK_N = 128 /* of an fp8 scale */ };

/* One thread's share of 16 rows x 64 k: rows g and g + 8, sixteen elements of each. */
template <enum kern_wfmt F> struct weights16 {
    enum {
        BITS = F == KERN_W_F32    ? 32
               : F == KERN_W_BF16 ? 16
               : F == KERN_W_FP8  ? 8
                                  : 4,
        EACH = 2 * BITS, /* bytes of a row that a thread has */
        ROW = 4 * EACH,  /* bytes of a row in 64 k */
        PARTS = F == KERN_W_F32 ? 3 : 1,
    };
    uint32_t v[2][EACH / 4];
    uint32_t factor[2]; /* 4-bit formats */
};

/* Part i (0..3) as operand A; PARTS of them. */
template <enum kern_wfmt F>
static __device__ __forceinline__ void weights_operand(const struct weights16<F> &w, int i,
                                                       uint32_t a[weights16<F>::PARTS][4])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (F == KERN_W_BF16) {
            a[0][r] = w.v[r][2 * i];
            a[0][2 + r] = w.v[r][2 * i + 1];
        } else if (F == KERN_W_FP8) {
            uint32_t p[2];
            dev_e4m3x4(w.v[r][i], p);
            a[0][r] = p[0];
            a[0][2 + r] = p[1];
        } else if (F == KERN_W_F32) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint32_t u[2];
#pragma unroll
                for (int e = 0; e < 2; e++) u[e] = w.v[r][4 * i + 2 * j + e];
#pragma unroll
                for (int part = 0; part < weights16<F>::PARTS; part++) {
                    a[part][2 * j + r] = __byte_perm(u[0], u[1], 0x7632);
                    /* What is cut off is a float, and has eight bits less. */
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        u[e] = kern_bits(kern_float(u[e]) - kern_float(u[e] & 0xffff0000u));
                }
            }
        } else {
            uint32_t p[4];
            dev_e2m1x8(w.v[r][i / 2], w.factor[r], p);
            a[0][r] = p[2 * (i % 2)];
            a[0][2 + r] = p[2 * (i % 2) + 1];
        }
    }
}

/* sum += the 64 k of w times x's, x being the 16 elements of each column that this thread has. */
template <enum kern_wfmt F, int NT>
static __device__ __forceinline__ void weights_times(float sum[NT][4], const struct weights16<F> &w,
                                                     const uint32_t x[NT][8])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t a[weights16<F>::PARTS][4];
        weights_operand<F>(w, i, a);
#pragma unroll
        for (int part = 0; part < weights16<F>::PARTS; part++)
#pragma unroll
            for (int n = 0; n < NT; n++) dev_mma(sum[n], a[part], x[n] + 2 * i);
    }
}

/* Factor of the 16 elements that thread c of a quad has, of row r (of groups * N), group q of k. */
template <enum kern_wfmt F>
static __device__ __forceinline__ uint32_t weight_factor(const struct cuda_product &p, int64_t r,
                                                         int32_t q, int c)
{
    if (F == KERN_W_MXFP4) {
        const int32_t at = 2 * q + c / 2;
        return at < p.K / 32 ? dev_mxfp4_factor(__ldg(p.scale + r * p.scale_row_bytes + at)) : 0;
    }
    if (F == KERN_W_NVFP4) {
        const int32_t at = 4 * q + c;
        return at < p.K / 16 ? dev_nvfp4_factor(__ldg(p.scale + r * p.scale_row_bytes + at)) : 0;
    }
    return 0;
}

/* Scale of block b of k, in row i of an fp8 weight's scales: as stored, and what that means. */
static __device__ __forceinline__ uint32_t scale_bits(const struct cuda_product &p, int64_t i,
                                                      int32_t b)
{
    const uint8_t *row = p.scale + i * p.scale_row_bytes;
    switch (p.sfmt) {
    case KERN_S_F32: return __ldg((const uint32_t *)row + b);
    case KERN_S_UE8M0:
    case KERN_S_E4M3: return __ldg(row + b);
    default: return 0;
    }
}
static __device__ __forceinline__ float scale_of(const struct cuda_product &p, uint32_t bits)
{
    switch (p.sfmt) {
    case KERN_S_UE8M0: return kern_ue8m0_decode((uint8_t)bits);
    case KERN_S_F32: return kern_float(bits);
    case KERN_S_E4M3: return dev_e4m3_decode((uint8_t)bits);
    default: return 1.0f;
    }
}
static __device__ __forceinline__ float block_scale(const struct cuda_product &p, int64_t i,
                                                    int32_t b)
{
    return scale_of(p, scale_bits(p, i, b));
}

/* What is stored of the finished sum of row r (of groups * N). */
template <enum kern_wfmt F>
static __device__ __forceinline__ float finished(const struct cuda_product &p, int64_t r, float sum)
{
    if (F != KERN_W_F32 && F != KERN_W_BF16 && __ldg(p.nan_rows + r))
        return kern_float(0x7fc00000u);
    return sum * p.post;
}

/* Piece i % PIECES of 16 bytes of each of ROWS rows, ld bytes apart, to shared memory, rows LD
 * bytes apart there; i is this thread's number. Rows after `last` are `last` again: their sums go
 * nowhere. swizzled: in rows of 128 bytes, a piece's place is exchanged with the row's number, as
 * wgmma wants it. */
template <int ROWS, int PIECES, int LD, int THREADS, bool SWIZZLED>
static __device__ __forceinline__ void fetch_rows(uint8_t *to, const uint8_t *from, uint32_t ld,
                                                  int last, bool there)
{
    const int piece = threadIdx.x % PIECES, row = threadIdx.x / PIECES;
    from += piece * 16;
    to += row * LD + (SWIZZLED ? piece ^ (row & 7) : piece) * 16;
#pragma unroll
    for (int r = 0; r < ROWS; r += THREADS / PIECES) {
        if (ROWS < THREADS / PIECES && row >= ROWS) break;
        const uint32_t at = (uint32_t)(row + r < last ? row + r : last);
        dev_copy16(to + r * LD, from + (uint64_t)at * ld, there);
    }
}

/* A finished tile, M weight rows x N rows of y, in shared memory as [N][LD], goes to y. n, t: its
 * first row and column in its group; row: the former of all. */
template <int M, int N, int LD, int THREADS>
static __device__ __forceinline__ void store_tile(const struct cuda_product &p, const float *tile,
                                                  int32_t n, int32_t t, int64_t row)
{
    const int64_t first = (int64_t)t * p.ld_y + row;
    const bool wide =
        p.y_dtype == KERN_BF16 && p.ld_y % 8 == 0 && first % 8 == 0 && (uintptr_t)p.y % 16 == 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < N * M / 8; i += THREADS) {
        const int ti = i / (M / 8), ni = i % (M / 8) * 8;
        if (t + ti >= p.T || n + ni >= p.N) continue;
        const float *from = tile + ti * LD + ni;
        const int64_t to = first + ti * p.ld_y + ni;
        if (wide && n + ni + 8 <= p.N) {
            uint32_t u[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                u[e] = kern_bf16_encode(from[2 * e]) | (uint32_t)kern_bf16_encode(from[2 * e + 1])
                                                           << 16;
            *(uint4 *)((uint16_t *)p.y + to) = make_uint4(u[0], u[1], u[2], u[3]);
        } else {
            for (int e = 0; e < 8 && n + ni + e < p.N; e++)
                dev_store(p.y, to + e, p.y_dtype, from[e]);
        }
    }
}

#endif
