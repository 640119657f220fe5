/* kernels/attn/index_query.cuh - heads of index queries by a warp: rotation, Hadamard transform and
 * the quantizer's round trip, in place; for index_query and for prepare.
 *
 * A lane has two pieces of eight neighbours of a head, half a head apart (of the widest four), and
 * a warp as many heads as fit: so each access is of whole sectors. Stages of the transform within a
 * lane are plain, those across lanes exchange by shuffle: the additions are the twin's, one for
 * one, so codes are equal. What is bf16 anyway is quantized by twos in bf16: scales are powers of
 * two, and a value is rounded to a code by adding and taking away again what leaves no finer bits.
 */
#ifndef KERN_ATTN_INDEX_QUERY_CUH
#define KERN_ATTN_INDEX_QUERY_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/numeric.cuh"

/* Pair i of a row's rotated part: in bf16 mode the caller rounds. */
static __device__ __forceinline__ void index_rotate(float &a, float &b, float c, float s)
{
    const float x = fmaf(a, c, -(b * s)), y = fmaf(a, s, b * c);
    a = x;
    b = y;
}
static __device__ __forceinline__ float index_low(uint32_t two)
{
    return kern_float(two << 16);
}
static __device__ __forceinline__ float index_high(uint32_t two)
{
    return kern_float(two & 0xffff0000u);
}
static __device__ __forceinline__ uint32_t index_two(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
/* The larger magnitudes, of some sign; passes over NaN. */
static __device__ __forceinline__ uint32_t index_max(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
/* a, less what are finer steps than those of numbers as large as `coarse`. */
static __device__ __forceinline__ uint32_t index_coarse(uint32_t a, uint32_t coarse)
{
    uint32_t r;
    asm("{ .reg .b32 t; add.rn.bf16x2 t, %1, %2; sub.rn.bf16x2 %0, t, %2; }"
        : "=r"(r)
        : "r"(a), "r"(coarse));
    return r;
}

/* Of an element type: the largest magnitude, the exponent of the smallest normal (as bf16 2^e),
 * and 1.5 times 2^that over 2^e of a value that adding leaves as many bits of as its code has. */
template <bool FP8> struct index_element {
    static constexpr uint32_t MOST = FP8 ? 0x43e0 : 0x40c0, NORMAL = FP8 ? 0x3c80 : 0x3f80;
    static constexpr uint32_t OVER = (FP8 ? 4 : 6) << 7 | 0x40;
};
/* Two values to codes of a block with this scale and back. */
template <bool FP8>
static __device__ __forceinline__ uint32_t index_round_trip(uint32_t x, uint32_t scale,
                                                            uint32_t inverse)
{
    using e = index_element<FP8>;
    const uint32_t t = dev_mul_bf16x2(x, inverse);
    uint32_t a;
    if (FP8) /* NaN stays; in e2m1 it is the largest */
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(t & 0x7fff7fffu), "r"(dev_twice(e::MOST)));
    else
        asm("min.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(t & 0x7fff7fffu), "r"(dev_twice(e::MOST)));
    const uint32_t coarse = __vmaxu2(a & 0x7f807f80u, dev_twice(e::NORMAL)) + dev_twice(e::OVER);
    return dev_mul_bf16x2(index_coarse(a, coarse) | (t & 0x80008000u), scale);
}
/* A scale and its inverse from codes, as bf16 (2^-127 is one). */
static __device__ __forceinline__ uint32_t index_scale(uint8_t code)
{
    return dev_twice(kern_bits(kern_ue8m0_decode(code)) >> 16);
}
static __device__ __forceinline__ uint32_t index_inverse(uint8_t code)
{
    return dev_twice(kern_bits(kern_ue8m0_inverse(code)) >> 16);
}

/* P pieces of eight values to a lane: numbers lane, lane + LANES, ... of the head's W / 8. */
template <int W> struct index_head {
    static constexpr int P = W <= 512 ? 2 : 4, LANES = W / 8 / P;
};
/* The heads of a warp: `thread` is this lane's number among those of all heads. */
template <int W>
static __device__ __forceinline__ void index_heads(const struct kern_index_query &p, int64_t thread,
                                                   float hadamard_scale)
{
    constexpr int P = index_head<W>::P, LANES = index_head<W>::LANES, E = 8 * P;
    const uint32_t row = (uint32_t)(thread / LANES), t = row / (uint32_t)p.H;
    const int lane = threadIdx.x % LANES;
    const bool wide = p.rd % 8 == 0 && ((uintptr_t)p.cos | (uintptr_t)p.sin) % 16 == 0;
    const bool is = t < (uint32_t)p.T; /* all take part in shuffles */
    uint4 *q = (uint4 *)((uint16_t *)p.q + (int64_t)row * W) + lane;
    uint32_t v[E / 2];
    float x[E];
#pragma unroll
    for (int i = 0; i < P; i++) {
        const uint4 u = is ? q[i * LANES] : make_uint4(0, 0, 0, 0);
        v[4 * i] = u.x, v[4 * i + 1] = u.y, v[4 * i + 2] = u.z, v[4 * i + 3] = u.w;
    }
#pragma unroll
    for (int j = 0; j < E / 2; j++) x[2 * j] = index_low(v[j]), x[2 * j + 1] = index_high(v[j]);
    const auto turn = [&](int j, float c, float s) {
        index_rotate(x[2 * j], x[2 * j + 1], c, s);
        const uint32_t u = index_two(x[2 * j], x[2 * j + 1]);
        x[2 * j] = index_low(u), x[2 * j + 1] = index_high(u);
    };
#pragma unroll
    for (int i = 0; i < P; i++) {
        const int32_t half = p.rd / 2, first = ((lane + i * LANES) * 8 - (W - p.rd)) / 2; /* pair */
        const float *cs = p.cos + (int64_t)t * half + first;
        const float *sn = p.sin + (int64_t)t * half + first;
        if (wide) { /* a piece's pairs all turn or none, and their angles are read by fours */
            if (!is || first < 0) continue;
            const float4 c = __ldg((const float4 *)cs), s = __ldg((const float4 *)sn);
            turn(4 * i, c.x, s.x);
            turn(4 * i + 1, c.y, s.y);
            turn(4 * i + 2, c.z, s.z);
            turn(4 * i + 3, c.w, s.w);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (is && first + j >= 0) turn(4 * i + j, __ldg(cs + j), __ldg(sn + j));
        }
    }
    const auto within = [&](int h) {
#pragma unroll
        for (int j = 0; j < E; j++)
            if (!(j & h)) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
    };
#pragma unroll
    for (int h = 1; h < 8; h *= 2) within(h);
#pragma unroll
    for (int s = 1; s < LANES; s *= 2) {
        const float sign = lane & s ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < E; j++) x[j] = fmaf(x[j], sign, __shfl_xor_sync(~0u, x[j], s));
    }
#pragma unroll
    for (int h = 8; h < E; h *= 2) within(h);
    uint32_t m[P] = {}; /* of a piece */
#pragma unroll
    for (int j = 0; j < E / 2; j++) {
        v[j] = index_two(x[2 * j] * hadamard_scale, x[2 * j + 1] * hadamard_scale);
        m[j / 4] = index_max(m[j / 4], v[j]);
    }
    if (p.fmt == KERN_IK_FP4) { /* blocks of 32: four pieces */
        if (LANES < 4) m[0] = m[1] = index_max(m[0], m[1]);
#pragma unroll
        for (int i = 0; i < P; i++) {
            m[i] = index_max(m[i], m[i] >> 16);
#pragma unroll
            for (int s = 1; s < LANES && s < 4; s *= 2)
                m[i] = index_max(m[i], __shfl_xor_sync(~0u, m[i], s));
            const uint8_t c = kern_e2m1_scale_code(index_low(m[i] & 0x7fffu));
            const uint32_t s = index_scale(c), inv = index_inverse(c);
#pragma unroll
            for (int j = 4 * i; j < 4 * i + 4; j++) v[j] = index_round_trip<false>(v[j], s, inv);
        }
    } else if (p.fmt == KERN_IK_FP8) { /* the row is one block */
#pragma unroll
        for (int i = 1; i < P; i++) m[0] = index_max(m[0], m[i]);
        m[0] = index_max(m[0], m[0] >> 16);
#pragma unroll
        for (int s = 1; s < LANES; s *= 2) m[0] = index_max(m[0], __shfl_xor_sync(~0u, m[0], s));
        const uint8_t c = kern_e4m3_scale_code(index_low(m[0] & 0x7fffu));
        const uint32_t s = index_scale(c), inv = index_inverse(c);
#pragma unroll
        for (int j = 0; j < E / 2; j++) v[j] = index_round_trip<true>(v[j], s, inv);
    }
    if (!is) return;
#pragma unroll
    for (int i = 0; i < P; i++)
        q[i * LANES] = make_uint4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
}

#endif
