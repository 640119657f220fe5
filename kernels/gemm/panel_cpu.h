/* kernels/gemm/panel_cpu.h - many rows times stored weights: a panel of weight rows as floats,
 * then tiles. */
#ifndef KERN_GEMM_PANEL_CPU_H
#define KERN_GEMM_PANEL_CPU_H

#include "kernels/gemm/tile_cpu.h"
#include "kernels/gemm/weight_cpu.h"

/* Rows n .. n+nb-1 of w, ld floats apart. */
static inline __attribute__((unused)) void kern_panel(const struct kern_weight *w, int64_t n,
                                                      int64_t nb, bool round_bf16, float *panel,
                                                      int64_t ld)
{
    for (int64_t i = 0; i < nb; i++) kern_weight_row(w, n + i, round_bf16, panel + i * ld);
}

/* c[i][r] = a[i] . weight row r of the panel made from w. */
static inline __attribute__((unused)) void
kern_panel_times(const struct kern_weight *w, bool round_bf16, const float *const *a, int64_t na,
                 const float *panel, int64_t nb, int64_t ld, int64_t kp, float *c, int64_t ld_c)
{
    float post = kern_weight_post(w, round_bf16);
    KERN_ISA(kern_tile)(a, na, panel, nb, ld, kp, c, ld_c);
    if (post == 1.0f) return;
    for (int64_t i = 0; i < na; i++)
        for (int64_t r = 0; r < nb; r++) c[i * ld_c + r] *= post;
}

#endif
