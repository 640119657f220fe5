/* kernels/attn/index_query.cuh - heads of index queries by a warp: rotation, Hadamard transform and
 * the quantizer's round trip, in place; for index_query and for prepare.
 *
 * A lane has two or four pieces of eight neighbours of a head, evenly spread over it, and a warp as
 * many heads as fit: so each access is of whole sectors. With two pieces more lanes are at work,
 * with four a head takes fewer instructions (stages across lanes cost two a value, others one).
 * Stages of the transform within a lane are plain, those across lanes exchange by shuffle: the
 * additions are the twin's, one for one, so codes are equal. What is bf16 anyway is quantized by
 * twos in bf16: scales are powers of two, and a value is rounded to a code by adding and taking
 * away again what leaves no finer bits.
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
/* Of a block's largest magnitude: its scale as bf16, and above that the scale's inverse.
 * 2^(code - 127), the code being 1 to 254 (2^-127 is one that is not normal). */
template <bool FP8> static __device__ __forceinline__ uint32_t index_scales(uint32_t largest)
{
    const float most = index_low(largest & 0x7fffu);
    const uint32_t code = FP8 ? kern_e4m3_scale_code(most) : kern_e2m1_scale_code(most);
    return code << 7 | (code < 254 ? (254 - code) << 23 : 0x400000u);
}

/* A piece's values to codes of a block with these scales and back. */
template <bool FP8>
static __device__ __forceinline__ void index_quantize(uint32_t *piece, uint32_t scales)
{
    using e = index_element<FP8>;
    const uint32_t scale = __byte_perm(scales, 0, 0x1010);
    const uint32_t inverse = __byte_perm(scales, 0, 0x3232);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t t = dev_mul_bf16x2(piece[j], inverse);
        uint32_t a;
        if (FP8) /* NaN stays; in e2m1 it is the largest */
            asm("min.NaN.bf16x2 %0, %1, %2;"
                : "=r"(a)
                : "r"(t & 0x7fff7fffu), "r"(dev_twice(e::MOST)));
        else
            asm("min.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(t & 0x7fff7fffu), "r"(dev_twice(e::MOST)));
        const uint32_t coarse =
            __vmaxu2(a & 0x7f807f80u, dev_twice(e::NORMAL)) + dev_twice(e::OVER);
        piece[j] = dev_mul_bf16x2(index_coarse(a, coarse) | (t & 0x80008000u), scale);
    }
}

/* Lanes of a head, with P pieces of eight values each: numbers lane, lane + LANES, ... of W / 8. */
template <int W, int P> struct index_head {
    static constexpr int LANES = W / 8 / P;
    static_assert(LANES <= 32, "of one warp");
};
/* Turns a lane's part of a head, x, whose eight values of piece i are x[8 i] on. The angles of its
 * row: rd / 2 pairs. `wide`: a piece's pairs all turn or none, and angles are read by fours. */
template <int W, int P>
static __device__ __forceinline__ void index_turn(float (&x)[8 * P], const float *cos,
                                                  const float *sin, int32_t rd, bool wide)
{
    constexpr int LANES = index_head<W, P>::LANES;
    const auto turn = [&](int j, float c, float s) {
        index_rotate(x[2 * j], x[2 * j + 1], c, s);
        const uint32_t u = index_two(x[2 * j], x[2 * j + 1]);
        x[2 * j] = index_low(u), x[2 * j + 1] = index_high(u);
    };
#pragma unroll
    for (int i = 0; i < P; i++) {
        const int32_t first =
            rd / 2 - W / 2 + ((int)threadIdx.x % LANES + i * LANES) * 4; /* pair */
        if (wide) {
            if (first < 0) continue;
            const float4 c = *(const float4 *)(cos + first), s = *(const float4 *)(sin + first);
            turn(4 * i, c.x, s.x);
            turn(4 * i + 1, c.y, s.y);
            turn(4 * i + 2, c.z, s.z);
            turn(4 * i + 3, c.w, s.w);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (first + j >= 0) turn(4 * i + j, cos[first + j], sin[first + j]);
        }
    }
}
/* The transform of x, and what the type of the keys makes of it; pairs to v. All lanes of a warp
 * call it. */
template <int W, int P>
static __device__ __forceinline__ void index_transform(float (&x)[8 * P], uint32_t (&v)[4 * P],
                                                       enum kern_ik_fmt fmt, float hadamard_scale)
{
    constexpr int LANES = index_head<W, P>::LANES, E = 8 * P;
    const int lane = threadIdx.x % LANES;
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
    if (fmt == KERN_IK_FP4) {   /* blocks of 32: four pieces */
        if constexpr (P == 4) { /* of four lanes, each of which makes one block's scale */
            static_assert(LANES >= 4, "a block has the same piece of four lanes");
            uint32_t two[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                two[i] = index_max(__byte_perm(m[2 * i], m[2 * i + 1], 0x5410),
                                   __byte_perm(m[2 * i], m[2 * i + 1], 0x7632));
            const bool later = lane & 2;
            uint32_t of = index_max(later ? two[1] : two[0],
                                    __shfl_xor_sync(~0u, later ? two[0] : two[1], 2));
            of = index_max(of, __shfl_xor_sync(~0u, of, 1));
            const uint32_t scales = index_scales<false>(lane & 1 ? of >> 16 : of);
#pragma unroll
            for (int i = 0; i < P; i++)
                index_quantize<false>(v + 4 * i, __shfl_sync(~0u, scales, i, 4));
        } else {
            if (LANES < 4) m[0] = m[1] = index_max(m[0], m[1]);
#pragma unroll
            for (int i = 0; i < P; i++) {
                m[i] = index_max(m[i], m[i] >> 16);
#pragma unroll
                for (int s = 1; s < LANES && s < 4; s *= 2)
                    m[i] = index_max(m[i], __shfl_xor_sync(~0u, m[i], s));
                index_quantize<false>(v + 4 * i, index_scales<false>(m[i]));
            }
        }
    } else if (fmt == KERN_IK_FP8) { /* the row is one block */
#pragma unroll
        for (int i = 1; i < P; i++) m[0] = index_max(m[0], m[i]);
        m[0] = index_max(m[0], m[0] >> 16);
#pragma unroll
        for (int s = 1; s < LANES; s *= 2) m[0] = index_max(m[0], __shfl_xor_sync(~0u, m[0], s));
        const uint32_t scales = index_scales<true>(m[0]);
#pragma unroll
        for (int i = 0; i < P; i++) index_quantize<true>(v + 4 * i, scales);
    }
}

/* Whether index_turn may read angles by fours. */
static __host__ __device__ __forceinline__ bool index_angles_wide(const struct kern_index_query &p)
{
    return p.rd % 8 == 0 && ((uintptr_t)p.cos | (uintptr_t)p.sin) % 16 == 0;
}
/* Head `head` of row t, by the lanes of it that follow each other. Nobody's past the ends. */
template <int W, int P>
static __device__ __forceinline__ void index_heads(const struct kern_index_query &p, int32_t t,
                                                   int32_t head, float hadamard_scale)
{
    constexpr int LANES = index_head<W, P>::LANES;
    const bool is = t < p.T && head < p.H; /* all take part in shuffles */
    uint4 *q = (uint4 *)((uint16_t *)p.q + ((int64_t)t * p.H + head) * W) + threadIdx.x % LANES;
    uint32_t v[4 * P];
    float x[8 * P];
#pragma unroll
    for (int i = 0; i < P; i++) {
        const uint4 u = is ? q[i * LANES] : make_uint4(0, 0, 0, 0);
        v[4 * i] = u.x, v[4 * i + 1] = u.y, v[4 * i + 2] = u.z, v[4 * i + 3] = u.w;
    }
#pragma unroll
    for (int j = 0; j < 4 * P; j++) x[2 * j] = index_low(v[j]), x[2 * j + 1] = index_high(v[j]);
    const int64_t angles = (int64_t)t * (p.rd / 2);
    if (is) index_turn<W, P>(x, p.cos + angles, p.sin + angles, p.rd, index_angles_wide(p));
    index_transform<W, P>(x, v, p.fmt, hadamard_scale);
    if (!is) return;
#pragma unroll
    for (int i = 0; i < P; i++)
        q[i * LANES] = make_uint4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
}

#endif
