/* kernels/attn/softmax.cuh - weights against a power of two, and the chain of a row's tiles.
 *
 * A score enters as y = score * scale * log2(e); its weight is 2^(y - m) for an integer m that no y of the row
 * so far exceeds. 2^(y - rint(y)) is rounded to bf16 before it meets the power of two, so that the same
 * score has the same digits against any m.
 */
#ifndef KERN_ATTN_SOFTMAX_CUH
#define KERN_ATTN_SOFTMAX_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/numeric.cuh"

/* After some tiles: the reference of sums and weights, and the sum of weights. */
struct attn_chain {
    float m, sum;
};
/* Stands for scores below it, -inf too, and is the reference where all are: then the row is NaN. Its last
 * digit is 1/8, as rint() below needs it. */
#define ATTN_LEAST (-2097152.0f)

static __device__ __forceinline__ float attn_factor(float scale)
{
    return scale * 0x1.715476p+0f;
}
static __device__ __forceinline__ float attn_reference(float top)
{
    return fmaxf(ceilf(top), ATTN_LEAST);
}
/* 2^n for an integer n <= 0; 0 below -126, and for NaN. */
static __device__ __forceinline__ float attn_power(float n)
{
    /* The sum's low bits are n + 127. */
    return kern_float(kern_bits(fmaxf(n, -127.0f) + (12582912.0f + 127.0f)) << 23);
}
/* To bf16, nearest even; a in the lower half. */
static __device__ __forceinline__ uint32_t attn_bf16x2(float a, float b)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}
/* Of two scores, weights in bf16. NaN stays; ex2.approx errs by 2^-22, eight thousand times less than the
 * rounding that follows. */
static __device__ __forceinline__ uint32_t attn_weights(float y0, float y1, float m)
{
    float y[2] = {y0, y1}, e[2], power[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(y[i]) : "f"(y[i]), "f"(ATTN_LEAST));
        const float n = (y[i] + 12582912.0f) - 12582912.0f; /* rint */
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e[i]) : "f"(y[i] - n));
        power[i] = attn_power(n - m);
    }
    const uint32_t powers =
        __byte_perm(kern_bits(power[0]), kern_bits(power[1]), 0x7632); /* upper halves */
    return dev_mul_bf16x2(attn_bf16x2(e[0], e[1]), powers);
}
/* One over the denominator. */
static __device__ __forceinline__ float attn_inverse(const struct attn_chain &c, float sink)
{
    const float all = c.sum + exp2f(fmaf(sink, 0x1.715476p+0f, -c.m));
    return c.m == ATTN_LEAST ? kern_float(0x7fc00000u) : 1.0f / all;
}

#endif
