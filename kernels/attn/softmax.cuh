/* kernels/attn/softmax.cuh - weights against a power of two, and the chain of a row's tiles.
 *
 * A score enters as y = score * scale * log2(e). Its weight is 2^(y - r), rounded to bf16, where
 * the integer r is the largest y of its tile, rounded up; and then times 2^(r - m): a power of two,
 * which changes no digit. m is the row's reference so far, an r that no later one is far above: as
 * it is seldom another, sums are seldom scaled.
 */
#ifndef KERN_ATTN_SOFTMAX_CUH
#define KERN_ATTN_SOFTMAX_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/numeric.cuh"

/* After some tiles: the reference of sums and weights, and the sum of weights. */
struct attn_chain {
    float m, sum;
};
/* The reference where all scores are below it, or -inf: then the row is NaN. */
#define ATTN_LEAST (-2097152.0f)

static __device__ __forceinline__ float attn_factor(float scale)
{
    return scale * 0x1.715476p+0f;
}
static __device__ __forceinline__ float attn_reference(float top)
{
    return fmaxf(ceilf(top), ATTN_LEAST);
}
/* The reference after a tile that has its own. */
static __device__ __forceinline__ float attn_raised(float m, float reference)
{
    return reference > m + 8.0f || m == ATTN_LEAST ? reference : m;
}
/* 2^n for an integer n <= 8; 0 below -126, and for NaN. */
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
/* Of two scores, weights in bf16 against a reference. ex2.approx errs by 2^-22, eight thousand
 * times less than the rounding that follows. */
static __device__ __forceinline__ uint32_t attn_weights(float y0, float y1, float reference)
{
    float e[2];
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e[0]) : "f"(y0 - reference));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e[1]) : "f"(y1 - reference));
    return attn_bf16x2(e[0], e[1]);
}
/* Two weights times a power of two. */
static __device__ __forceinline__ uint32_t attn_scaled(uint32_t two, float power)
{
    return dev_mul_bf16x2(two, __byte_perm(kern_bits(power), 0, 0x3232));
}
/* One over the denominator. */
static __device__ __forceinline__ float attn_inverse(const struct attn_chain &c, float sink)
{
    const float all = c.sum + exp2f(fmaf(sink, 0x1.715476p+0f, -c.m));
    return c.m == ATTN_LEAST ? kern_float(0x7fc00000u) : 1.0f / all;
}

#endif
