/* kernels/cpu/math.h - exp and friends on sixteen lanes; the same bits in every instruction set.
 *
 * Why      libm chooses its code by processor; two workers of one cluster must not differ by it.
 * Error    v_exp within 1 ulp (flushing nothing, overflowing to inf), v_softplus within 2 ulp.
 */
#ifndef KERN_CPU_MATH_H
#define KERN_CPU_MATH_H

#include "kernels/cpu/vec.h"

/* e^x: x = n ln 2 + r, a polynomial in r, then 2^n applied in two steps so that both ends are
 * right. */
V_INLINE v16 v_exp(v16 x)
{
    v16 c = v_min(v_max(x, v_set1(-104.0f)), v_set1(89.0f));
    /* Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. */
    v16 magic = v_set1(12582912.0f);
    v16 t = v_fma(c, v_set1(0x1.715476p+0f), magic);
    v16 n = v_sub(t, magic);
    v16 r = v_fma(n, v_set1(-0x1.62e400p-1f), c);
    r = v_fma(n, v_set1(-0x1.7f7d1cp-20f), r);
    v16 p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_fma(v_mul(r, r), p, r);
    p = v_add(p, v_set1(1.0f));
    v16i e = vi_sub(v_bits(t), v_bits(magic));
    v16i e1 = vi_sra(e, 1), e2 = vi_sub(e, e1);
    v16 s1 = v_float(vi_sll(vi_add(e1, vi_set1(127)), 23));
    v16 s2 = v_float(vi_sll(vi_add(e2, vi_set1(127)), 23));
    return v_sel_nan(x, x, v_mul(v_mul(p, s1), s2));
}

V_INLINE v16 v_sigmoid(v16 x)
{
    return v_div(v_set1(1.0f), v_add(v_set1(1.0f), v_exp(v_neg(x))));
}
V_INLINE v16 v_silu(v16 x)
{
    return v_div(x, v_add(v_set1(1.0f), v_exp(v_neg(x))));
}

/* An expert's gate: silu(min(g, limit)) * clamp(u, +-limit); limit 0 = none. NaN stays NaN. */
V_INLINE v16 kern_gate(v16 g, v16 u, float limit)
{
    if (limit > 0) {
        v16 l = v_set1(limit);
        g = v_min(l, g);
        u = v_max(v_neg(l), v_min(l, u));
    }
    return v_mul(v_silu(g), u);
}

/* ln(1 + e^x) = max(x, 0) + ln(1 + t), t = e^-|x| <= 1; ln(1 + t) = 2 atanh(t / (2 + t)), a series
 * in at most 1/9 that loses nothing for small t. */
V_INLINE v16 v_softplus(v16 x)
{
    v16 t = v_exp(v_neg(v_abs(x)));
    v16 s = v_div(t, v_add(v_set1(2.0f), t)), z = v_mul(s, s);
    v16 p = v_set1(1.0f / 17.0f);
    p = v_fma(p, z, v_set1(1.0f / 15.0f));
    p = v_fma(p, z, v_set1(1.0f / 13.0f));
    p = v_fma(p, z, v_set1(1.0f / 11.0f));
    p = v_fma(p, z, v_set1(1.0f / 9.0f));
    p = v_fma(p, z, v_set1(1.0f / 7.0f));
    p = v_fma(p, z, v_set1(1.0f / 5.0f));
    p = v_fma(p, z, v_set1(1.0f / 3.0f));
    p = v_fma(v_mul(p, z), s, s);
    p = v_add(p, p);
    return v_sel_nan(x, x, v_add(v_sel_lt(v_zero(), x, x, v_zero()), p));
}

V_INLINE float kern_lane0(v16 a)
{
    float f[16];
    v_store(f, a);
    return f[0];
}
V_INLINE float kern_exp1(float x)
{
    return kern_lane0(v_exp(v_set1(x)));
}
V_INLINE float kern_sigmoid1(float x)
{
    return kern_lane0(v_sigmoid(v_set1(x)));
}

/* Cosine and sine of an angle up to 2^31 in size: reduced by pi/2 in double, with the product kept
 * exact. */
V_INLINE void kern_cos_sin(float angle, float *c, float *s)
{
    double x = (double)angle, n = nearbyint(x * 0x1.45f306dc9c883p-1);
    double r = fma(-n, 0x1.921fb54442d18p+0, x);
    r = fma(-n, 0x1.1a62633145c07p-54, r);
    double z = r * r;
    double sn = -1.0 / 1307674368000.0;
    sn = sn * z + 1.0 / 6227020800.0;
    sn = sn * z - 1.0 / 39916800.0;
    sn = sn * z + 1.0 / 362880.0;
    sn = sn * z - 1.0 / 5040.0;
    sn = sn * z + 1.0 / 120.0;
    sn = sn * z - 1.0 / 6.0;
    sn = sn * z * r + r;
    double cs = -1.0 / 87178291200.0;
    cs = cs * z + 1.0 / 479001600.0;
    cs = cs * z - 1.0 / 3628800.0;
    cs = cs * z + 1.0 / 40320.0;
    cs = cs * z - 1.0 / 720.0;
    cs = cs * z + 1.0 / 24.0;
    cs = cs * z - 0.5;
    cs = cs * z + 1.0;
    switch ((int64_t)n & 3) {
    case 0: *c = (float)cs, *s = (float)sn; break;
    case 1: *c = (float)-sn, *s = (float)cs; break;
    case 2: *c = (float)-cs, *s = (float)-sn; break;
    default: *c = (float)sn, *s = (float)-cs; break;
    }
}

#endif
