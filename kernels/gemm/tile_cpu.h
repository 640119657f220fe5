/* kernels/gemm/tile_cpu.h - products of rows with rows: c[i][j] = a[i] . b[j].
 *
 * Numerics Lane l of each sum adds k = l, l+16, ... with fma from zero, then v_sum's tree. A tile only decides
 *          how many sums run at once.
 */
#ifndef KERN_GEMM_TILE_CPU_H
#define KERN_GEMM_TILE_CPU_H

#include "kernels/cpu/vec.h"

/* Sums at once: what the registers hold with room for one row of b. */
#if KERN_ISA_AVX512
enum { KERN_TILE_A = 6, KERN_TILE_B = 4 };
#elif KERN_ISA_AVX2
enum { KERN_TILE_A = 3, KERN_TILE_B = 2 };
#else
enum { KERN_TILE_A = 1, KERN_TILE_B = 1 };
#endif

V_INLINE void kern_tile_fixed(const float *const *a, const float *b, int64_t ld_b, int64_t k,
                              float *c, int64_t ld_c, const int na, const int nb)
{
    v16 acc[KERN_TILE_A][KERN_TILE_B];
#pragma GCC unroll 8
    for (int i = 0; i < na; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nb; j++) acc[i][j] = v_zero();
    for (int64_t x = 0; x < k; x += 16) {
        v16 bv[KERN_TILE_B];
#pragma GCC unroll 8
        for (int j = 0; j < nb; j++) bv[j] = v_load(b + j * ld_b + x);
#pragma GCC unroll 8
        for (int i = 0; i < na; i++) {
            v16 av = v_load(a[i] + x);
#pragma GCC unroll 8
            for (int j = 0; j < nb; j++) acc[i][j] = v_fma(av, bv[j], acc[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < na; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nb; j++) c[i * ld_c + j] = v_sum(acc[i][j]);
}

/* a: na row pointers; b: nb rows ld_b apart; k padded to 16. c: rows ld_c apart. */
static inline __attribute__((unused)) void kern_tile(const float *const *a, int64_t na,
                                                     const float *b, int64_t nb, int64_t ld_b,
                                                     int64_t k, float *c, int64_t ld_c)
{
    for (int64_t j = 0; j < nb; j += KERN_TILE_B) {
        const float *bj = b + j * ld_b;
        bool whole = nb - j >= KERN_TILE_B;
        int64_t i = 0;
        if (whole) {
            for (; i + KERN_TILE_A <= na; i += KERN_TILE_A)
                kern_tile_fixed(a + i, bj, ld_b, k, c + i * ld_c + j, ld_c, KERN_TILE_A,
                                KERN_TILE_B);
            for (; i < na; i++)
                kern_tile_fixed(a + i, bj, ld_b, k, c + i * ld_c + j, ld_c, 1, KERN_TILE_B);
            continue;
        }
        for (int64_t m = j; m < nb; m++) {
            const float *bm = b + m * ld_b;
            for (i = 0; i + KERN_TILE_A <= na; i += KERN_TILE_A)
                kern_tile_fixed(a + i, bm, ld_b, k, c + i * ld_c + m, ld_c, KERN_TILE_A, 1);
            for (; i < na; i++) kern_tile_fixed(a + i, bm, ld_b, k, c + i * ld_c + m, ld_c, 1, 1);
        }
    }
}

#endif
