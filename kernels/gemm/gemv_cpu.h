/* kernels/gemm/gemv_cpu.h - a few rows times stored weights, converted in registers on the way.
 *
 * Why      Decoding reads every weight once for a handful of rows: the product must run at the
 *          speed of memory, so nothing is written between the checkpoint's bytes and the sums.
 * Numerics The same bits as kern_weight_row and kern_tile.
 */
#ifndef KERN_GEMM_GEMV_CPU_H
#define KERN_GEMM_GEMV_CPU_H

#include "kernels/gemm/weight_cpu.h"

enum { KERN_GEMV_ROWS = 8 }; /* more rows than this are faster through panels */

/* Lanes of 4-bit weights come in mixed order (see vec.h) and want x in the same. */
V_INLINE bool kern_gemv_mixed(const struct kern_weight *w)
{
    return w->fmt == KERN_W_MXFP4 || w->fmt == KERN_W_NVFP4;
}
V_INLINE bool kern_gemv_fits(const struct kern_weight *w, int64_t rows, bool round_bf16)
{
    return rows <= KERN_GEMV_ROWS && !(round_bf16 && kern_weight_rounds(w));
}
/* Puts a padded row of x into the lane order that w wants. */
static inline __attribute__((unused)) void kern_gemv_prepare(const struct kern_weight *w, float *x,
                                                             int64_t n)
{
    if (kern_gemv_mixed(w))
        for (int64_t i = 0; i < n; i += 16) v_store(x + i, v_mix(v_load(x + i)));
}

/* c[t * ld_c + r] = x[t] . row n+r of w, for nt prepared rows of x and nb weight rows. */
void KERN_ISA(kern_gemv)(const struct kern_weight *w, int64_t n, int64_t nb, const float *const *x,
                         int64_t nt, float *c, int64_t ld_c);

#endif
