/* kernels/sample/sample.h - the formulas of drawing a token that host and device follow step by
 * step.
 *
 * Why      A worker of either back end must draw the same token from the same row. Probabilities
 *          are therefore whole numbers: sums of them have no order. What is left of floating point
 *          are a few operations per token, each exactly rounded, fused only where fma() is written.
 * Error    A mass is within 2^-41 of the exact one, relative to the largest; tokens below that are
 *          never drawn. A log-probability is off by less than V * 2^-41 and one rounding.
 */
#ifndef KERN_SAMPLE_H
#define KERN_SAMPLE_H

#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>

/* Mass of the largest; sums of KERN_SAMPLE_MAX_V of them stay below 2^63. */
#define KERN_MASS_BITS 40
#define KERN_MASS_ONE  (UINT64_C(1) << KERN_MASS_BITS)

KERN_FN uint64_t kern_double_bits(double x)
{
    uint64_t u;
    memcpy(&u, &x, 8);
    return u;
}
KERN_FN double kern_double_of(uint64_t u)
{
    double x;
    memcpy(&x, &u, 8);
    return x;
}

/* exp((x - max) * inv_t) in units of 2^-40; x <= max. All of it where x is max, though that be
 * +inf. */
KERN_FN uint64_t kern_mass(float x, float max, double inv_t)
{
    /* Added, it rounds to an integer and leaves it in the low bits. */
    const double magic = 0x1.8p52;
    double a = x == max ? 0.0 : ((double)x - (double)max) * inv_t;
    /* Also -inf * 0, of an infinite temperature; e^-40 counts as nothing. */
    a = a > -40.0 ? a : -40.0;
    const double t = fma(a, 0x1.71547652b82fep+0, magic), n = t - magic;
    double r = fma(n, -0x1.62e42fefa39efp-1, a);
    r = fma(n, -0x1.abc9e3b39803fp-56, r);
    double p = 1.0 / 39916800.0;
    p = fma(p, r, 1.0 / 3628800.0);
    p = fma(p, r, 1.0 / 362880.0);
    p = fma(p, r, 1.0 / 40320.0);
    p = fma(p, r, 1.0 / 5040.0);
    p = fma(p, r, 1.0 / 720.0);
    p = fma(p, r, 1.0 / 120.0);
    p = fma(p, r, 1.0 / 24.0);
    p = fma(p, r, 1.0 / 6.0);
    p = fma(p, r, 0.5);
    p = fma(p, r, 1.0);
    p = fma(p, r, 1.0);
    const double e = kern_double_of(kern_double_bits(p) + (kern_double_bits(t) << 52));
    return kern_double_bits(fma(e, (double)KERN_MASS_ONE, magic)) - kern_double_bits(magic);
}

/* ln of a sum of masses, >= 1; 0 for KERN_MASS_ONE. */
KERN_FN double kern_ln_mass(uint64_t mass)
{
    const uint64_t u = kern_double_bits((double)mass);
    int32_t e = (int32_t)(u >> 52) - 1023 - KERN_MASS_BITS;
    double f = kern_double_of((u & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000));
    if (f > 0x1.6a09e667f3bcdp+0) f *= 0.5, e++;
    const double s = (f - 1.0) / (f + 1.0), z = s * s; /* ln f = 2 atanh s, |s| < 0.172 */
    double p = 1.0 / 21.0;
    p = fma(p, z, 1.0 / 19.0);
    p = fma(p, z, 1.0 / 17.0);
    p = fma(p, z, 1.0 / 15.0);
    p = fma(p, z, 1.0 / 13.0);
    p = fma(p, z, 1.0 / 11.0);
    p = fma(p, z, 1.0 / 9.0);
    p = fma(p, z, 1.0 / 7.0);
    p = fma(p, z, 1.0 / 5.0);
    p = fma(p, z, 1.0 / 3.0);
    p = fma(p, z, 1.0);
    return fma((double)e, 0x1.62e42fefa39efp-1, 2.0 * s * p);
}

/* Of a token with logit x in a row with this largest and ln of the sum of masses. */
KERN_FN float kern_logprob(float x, float max, double ln_mass)
{
    if (max > 3.402823466e38f) return x == max ? (float)(0.0 - ln_mass) : kern_float(0xff800000u);
    return (float)((double)x - ((double)max + ln_mass)) + 0.0f; /* -0 is 0 */
}

/* The least mass that is at least p of total >= 1, itself 1 to total. */
KERN_FN uint64_t kern_share(float p, uint64_t total)
{
    if (!(p > 0.0f)) return 1;
    if (p >= 1.0f) return total;
    const double d = (double)p * (double)total;
    uint64_t n = (uint64_t)d;
    if ((double)n < d || n == 0) n++;
    return n < total ? n : total;
}
/* The place of a draw in [0, mass). */
KERN_FN uint64_t kern_place(double u, uint64_t mass)
{
    const uint64_t n = (uint64_t)(u * (double)mass);
    return n < mass ? n : mass - 1;
}

/* A logit with one edit; NaN stays NaN. */
KERN_FN float kern_edited(float x, const struct kern_sample_row *r, int32_t count, float bias)
{
    const float none = kern_float(0xff800000u);
    if (x != x) return x;
    if (count > 0) {
        if (r->repetition > 0.0f && r->repetition != 1.0f)
            x = x > 0.0f ? x / r->repetition : x * r->repetition;
        x -= r->presence;
        x -= r->frequency * (float)count;
    }
    x = bias > none ? x + bias : none;
    return x == x ? x : none;
}

#endif
