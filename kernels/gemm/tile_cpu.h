/* kernels/gemm/tile_cpu.h - products of rows with rows: c[i][j] = a[i] . b[j].
 *
 * How      6 x 4 sums live in registers (AVX-512). The inner width is cut in runs of K_RUN so that
 *          the rows of a pass stay in the first-level cache;
 *          between runs the sums, still sixteen lanes wide, wait in memory.
 * Numerics Lane l of each sum adds k = l, l+16, ... with fma from zero, then v_sum's tree. Tiles
 *          and runs only decide what is in registers when.
 */
#ifndef KERN_GEMM_TILE_CPU_H
#define KERN_GEMM_TILE_CPU_H

#include "kernels/cpu/vec.h"

/* Sums at once: what the registers hold with room for one row of b. */
#if KERN_ISA_AVX512
enum { KERN_TILE_A = 6, KERN_TILE_B = 4 };
#elif KERN_ISA_AVX2
enum { KERN_TILE_A = 1, KERN_TILE_B = 4 };
#else
enum { KERN_TILE_A = 1, KERN_TILE_B = 1 };
#endif
enum {
    KERN_PASS_A = 2 * KERN_TILE_A, /* rows of a kept near while all of b goes by */
    KERN_K_RUN = 512,              /* 12 rows of a are 24 KiB, 4 of b 8 KiB */
    KERN_TILE_MAX_B = 64,          /* rows of b in one call */
};

/* a: na row pointers; b: nb <= KERN_TILE_MAX_B rows ld_b apart; k padded to 16.
 * c: rows ld_c apart. */
void KERN_ISA(kern_tile)(const float *const *a, int64_t na, const float *b, int64_t nb,
                         int64_t ld_b, int64_t k, float *c, int64_t ld_c);

#endif
