/* kernels/gemm/amx_cpu.h - products on the matrix unit (AMX): c[t][r] = x[t] . weight row r.
 *
 * How      A tile holds sixteen weight rows, 32 values wide, as bf16; a second one holds the same
 *          32 values of up to sixteen rows of x, two to a word; one instruction adds their 16 x 16
 *          products. Weights stand first because they lie in rows already: nothing of them is
 *          turned, and a decode step is the same code with one column.
 * Numerics Only for products whose factors are bf16 numbers already: x in bf16, whole or quantized
 *          to e4m3 with a power-of-two scale, and bf16, fp8 or mxfp4 weights with such scales. Per
 *          32 values the even and the odd ones form one chain each, ascending; their sum is added
 *          to the result (mxfp4: see kern_amx_pack). Subnormal products vanish. Whether a product
 *          goes this way is said by its formats alone, never by its number of rows, so a row's bits
 *          do not depend on its companions; see docs/numerics.md.
 * Source   Intel 64 and IA-32 Software Developer's Manual, TDPBF16PS.
 */
#ifndef KERN_GEMM_AMX_CPU_H
#define KERN_GEMM_AMX_CPU_H

#include "kernels/gemm/weight_cpu.h"

enum {
    KERN_AMX_ROWS = 32,   /* weight rows of a panel: two tiles */
    KERN_AMX_COLS = 16,   /* rows of x of a tile: its columns */
    KERN_AMX_PART = 512,  /* weight rows of one call */
    KERN_AMX_STREAM = 32, /* up to so many rows of x the panel is never written out */
    KERN_AMX_WORDS = 16,  /* words of a tile row: 32 values */
    KERN_AMX_RUN = 128,   /* values converted at a time: what has one fp8 scale */
    KERN_AMX_RUN_WORDS = 64,
};

#if KERN_ISA_AMX
V_INLINE bool kern_amx_fits(const struct kern_weight *w, enum kern_dtype x, enum kern_act_quant aq)
{
    bool stored = w->fmt == KERN_W_BF16 ||
                  ((w->fmt == KERN_W_FP8 || w->fmt == KERN_W_MXFP4) && w->sfmt == KERN_S_UE8M0);
    return stored && x == KERN_BF16 && (aq == KERN_AQ_NONE || aq == KERN_AQ_A128);
}
#else
V_INLINE bool kern_amx_fits(const struct kern_weight *w, enum kern_dtype x, enum kern_act_quant aq)
{
    (void)w, (void)x, (void)aq;
    return false;
}
#endif

/* Columns of the tiles that T rows of x lie in: few rows do not pay for sixteen. */
V_INLINE int64_t kern_amx_cols(int64_t T)
{
    return T > 8 ? KERN_AMX_COLS : T > 4 ? 8 : T > 2 ? 4 : T;
}
V_INLINE int64_t kern_amx_runs(int64_t k)
{
    return (k + KERN_AMX_RUN - 1) / KERN_AMX_RUN;
}
/* Words of T packed rows of width k. */
V_INLINE int64_t kern_amx_x_words(int64_t T, int64_t k)
{
    return (T + KERN_AMX_COLS - 1) / KERN_AMX_COLS * kern_amx_cols(T) * kern_amx_runs(k) *
           KERN_AMX_RUN_WORDS;
}
/* Weight rows for one call, so that each of n_threads gets several calls: few rows of x want long
 * ones, fetched ahead without a gap. */
V_INLINE int64_t kern_amx_part(int64_t n, int64_t T, int n_threads)
{
    int64_t each = (n / (n_threads * 8) + KERN_AMX_ROWS - 1) / KERN_AMX_ROWS * KERN_AMX_ROWS;
    int64_t most = T > KERN_AMX_STREAM ? 2 * KERN_AMX_ROWS : KERN_AMX_PART;
    return each < KERN_AMX_ROWS ? KERN_AMX_ROWS : each > most ? most : each;
}
/* Where sixteen rows from row t (a multiple of 16) on begin. */
V_INLINE int64_t kern_amx_x_at(int64_t t, int64_t k)
{
    return t * kern_amx_runs(k) * KERN_AMX_RUN_WORDS;
}
/* Scratch of one thread for products with weights of width k;
 * stream: never more than KERN_AMX_STREAM rows. */
V_INLINE size_t kern_amx_scratch_bytes(int64_t k, bool stream)
{
    size_t runs = (size_t)kern_amx_runs(k),
           scales = 2 * ((4 * runs + 63) & ~(size_t)63); /* two panels' */
    return scales + (stream ? 0 : runs * KERN_AMX_RUN * KERN_AMX_ROWS * 2);
}

#if KERN_ISA_AMX
/* Row t of a block of T rows (x: k bf16 numbers as floats, zero up to the next multiple of 16)
 * goes to its column of packed, kern_amx_x_words() long; the last row also clears what is beside
 * it. */
void KERN_ISA(kern_amx_pack)(const struct kern_weight *w, const float *x, uint32_t *packed,
                             int64_t t, int64_t T);
/* c[t * ld_c + r] for the rows n .. n+nb-1 of w, 0 < nb <= KERN_AMX_PART, and all T packed rows, in
 * f32. scratch: kern_amx_scratch_bytes(), 64-byte aligned. */
void KERN_ISA(kern_amx_times)(const struct kern_weight *w, int64_t n, int64_t nb,
                              const uint32_t *packed, int64_t T, float *c, int64_t ld_c,
                              void *scratch);
#endif

#endif
