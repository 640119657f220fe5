/* kernels/cuda/math.cuh - exp and friends on the device: the very steps of kernels/cpu/math.h, so
 * the very bits of the CPU. */
#ifndef KERN_CUDA_MATH_CUH
#define KERN_CUDA_MATH_CUH

#include "kernels/cuda/numeric.cuh"

/* b where a or b is NaN, as vectors have it on the CPU. */
static __device__ __forceinline__ float dev_max(float a, float b)
{
    return a > b ? a : b;
}
static __device__ __forceinline__ float dev_min(float a, float b)
{
    return a < b ? a : b;
}

static __device__ __forceinline__ float dev_exp(float x)
{
    const float c = dev_min(dev_max(x, -104.0f), 89.0f), magic = 12582912.0f;
    const float t = fmaf(c, 0x1.715476p+0f, magic), n = t - magic;
    float r = fmaf(n, -0x1.62e400p-1f, c);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(r * r, p, r);
    p = p + 1.0f;
    const int32_t e = (int32_t)(kern_bits(t) - kern_bits(magic)), e1 = e >> 1, e2 = e - e1;
    const float y =
        p * kern_float((uint32_t)(e1 + 127) << 23) * kern_float((uint32_t)(e2 + 127) << 23);
    return x != x ? x : y;
}
/* The same bits in half as many instructions where DEV_EXP_NEAR <= x <= 0: no scale is too small
 * for one step. The magic number has zeros where the shifted n ends. */
#define DEV_EXP_NEAR (-86.0f)
static __device__ __forceinline__ float dev_exp_near(float x)
{
    const float magic = 12582912.0f, t = fmaf(x, 0x1.715476p+0f, magic), n = t - magic;
    float r = fmaf(n, -0x1.62e400p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(r * r, p, r);
    return kern_float(kern_bits(p + 1.0f) + (kern_bits(t) << 23));
}
static __device__ __forceinline__ float dev_sigmoid(float x)
{
    return 1.0f / (1.0f + dev_exp(-x));
}
static __device__ __forceinline__ float dev_silu(float x)
{
    return x / (1.0f + dev_exp(-x));
}

/* An expert's gate: silu(min(g, limit)) * clamp(u, +-limit); limit 0 = none. NaN stays NaN. */
static __device__ __forceinline__ float dev_gate(float g, float u, float limit)
{
    if (limit > 0) {
        g = dev_min(limit, g);
        u = dev_max(-limit, dev_min(limit, u));
    }
    return dev_silu(g) * u;
}

/* The same by the machine's own 2^x and 1/x, a quarter of the instructions: within 2^-18 for gates
 * between -60 and 60, where whoever rounds it to bf16 keeps 2^-9; beyond, x or next to 0. */
static __device__ __forceinline__ float dev_gate_near(float g, float u, float limit)
{
    const float most = limit > 0 ? limit : __int_as_float(0x7f800000);
    float e, r;
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(g) : "f"(most));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(u) : "f"(most));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(u) : "f"(-most));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(g * -0x1.715476p+0f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return g * r * u;
}

/* ln(1 + e^x). */
static __device__ __forceinline__ float dev_softplus(float x)
{
    const float t = dev_exp(-fabsf(x)), s = t / (2.0f + t), z = s * s;
    float p = 1.0f / 17.0f;
    p = fmaf(p, z, 1.0f / 15.0f);
    p = fmaf(p, z, 1.0f / 13.0f);
    p = fmaf(p, z, 1.0f / 11.0f);
    p = fmaf(p, z, 1.0f / 9.0f);
    p = fmaf(p, z, 1.0f / 7.0f);
    p = fmaf(p, z, 1.0f / 5.0f);
    p = fmaf(p, z, 1.0f / 3.0f);
    p = fmaf(p * z, s, s);
    p = p + p;
    return x != x ? x : (0.0f < x ? x : 0.0f) + p;
}

/* Cosine and sine of an angle up to 2^31 in size: reduced by pi/2 in double, with the product kept
 * exact. */
static __device__ __forceinline__ void dev_cos_sin(float angle, float *c, float *s)
{
    const double x = (double)angle, n = rint(x * 0x1.45f306dc9c883p-1);
    double r = fma(-n, 0x1.921fb54442d18p+0, x);
    r = fma(-n, 0x1.1a62633145c07p-54, r);
    const double z = r * r;
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
    switch ((long long)n & 3) {
    case 0: *c = (float)cs, *s = (float)sn; break;
    case 1: *c = (float)-sn, *s = (float)cs; break;
    case 2: *c = (float)-cs, *s = (float)-sn; break;
    default: *c = (float)sn, *s = (float)-cs; break;
    }
}

#endif
