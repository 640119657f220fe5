/* kernels/gemm/tile_cpu.c - the loops behind kern_tile. */
#include "kernels/gemm/tile_cpu.h"

/* One tile over k elements. first: start from zero, else from *mem;
 * last: c gets the sums, else *mem. */
V_INLINE void kern_tile_fixed(const float *const *a, int64_t k0, const float *b, int64_t ld_b,
                              int64_t k, bool first, bool last, v16 *mem, float *c, int64_t ld_c,
                              const int na, const int nb)
{
    v16 acc[KERN_TILE_A][KERN_TILE_B];
#pragma GCC unroll 8
    for (int i = 0; i < na; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nb; j++) acc[i][j] = first ? v_zero() : mem[i * nb + j];
    for (int64_t x = 0; x < k; x += 16) {
        v16 bv[KERN_TILE_B];
#pragma GCC unroll 8
        for (int j = 0; j < nb; j++) bv[j] = v_load(b + j * ld_b + x);
#pragma GCC unroll 8
        for (int i = 0; i < na; i++) {
            v16 av = v_load(a[i] + k0 + x);
#pragma GCC unroll 8
            for (int j = 0; j < nb; j++) acc[i][j] = v_fma(av, bv[j], acc[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < na; i++) {
        if (!last) {
#pragma GCC unroll 8
            for (int j = 0; j < nb; j++) mem[i * nb + j] = acc[i][j];
        } else if (nb == 4) {
            /* cppcheck-suppress arrayIndexOutOfBounds ; acc is [na][nb], and nb is 4 here */
            v_sum4(c + i * ld_c, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < nb; j++) c[i * ld_c + j] = v_sum(acc[i][j]);
        }
    }
}

void KERN_ISA(kern_tile)(const float *const *a, int64_t na, const float *b, int64_t nb,
                         int64_t ld_b, int64_t k, float *c, int64_t ld_c)
{
    v16 mem[KERN_PASS_A * KERN_TILE_MAX_B];
    for (int64_t i0 = 0; i0 < na; i0 += KERN_PASS_A) {
        int64_t i1 = na - i0 < KERN_PASS_A ? na : i0 + KERN_PASS_A;
        for (int64_t k0 = 0; k0 < k; k0 += KERN_K_RUN) {
            int64_t run = k - k0 < KERN_K_RUN ? k - k0 : KERN_K_RUN;
            bool first = k0 == 0, last = k0 + run == k;
            v16 *m = mem;
            const float *bk = b + k0;
            for (int64_t j = 0; j < nb;) {
                int64_t i = i0;
                if (nb - j >= KERN_TILE_B) {
                    for (; i + KERN_TILE_A <= i1; i += KERN_TILE_A, m += KERN_TILE_A * KERN_TILE_B)
                        kern_tile_fixed(a + i, k0, bk + j * ld_b, ld_b, run, first, last, m,
                                        c + i * ld_c + j, ld_c, KERN_TILE_A, KERN_TILE_B);
                    for (; i < i1; i++, m += KERN_TILE_B)
                        kern_tile_fixed(a + i, k0, bk + j * ld_b, ld_b, run, first, last, m,
                                        c + i * ld_c + j, ld_c, 1, KERN_TILE_B);
                    j += KERN_TILE_B;
                    continue;
                }
                for (; i + KERN_TILE_A <= i1; i += KERN_TILE_A, m += KERN_TILE_A)
                    kern_tile_fixed(a + i, k0, bk + j * ld_b, ld_b, run, first, last, m,
                                    c + i * ld_c + j, ld_c, KERN_TILE_A, 1);
                for (; i < i1; i++, m++)
                    kern_tile_fixed(a + i, k0, bk + j * ld_b, ld_b, run, first, last, m,
                                    c + i * ld_c + j, ld_c, 1, 1);
                j++;
            }
        }
    }
}
