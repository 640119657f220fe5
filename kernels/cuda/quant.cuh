/* kernels/cuda/quant.cuh - rows of activations as products read them: quantized and back, in bf16,
 * or as codes and scales; aligned and padded with zeros.
 *
 * Numerics A128 as kern_roundtrip_e4m3(..., 128): e4m3 times a power of two is a bf16 number. NVFP4
 *          as kern_roundtrip_nvfp4() without its last factor: the row comes divided by input_scale,
 *          which makes it a bf16 number; whoever sums multiplies the sum by input_scale. Wide rows
 *          (f32) have the factor in them and are equal to the CPU's.
 */
#ifndef KERN_CUDA_QUANT_CUH
#define KERN_CUDA_QUANT_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/numeric.cuh"

/* Rows are heads of d whose last rd values are rotated first. */
struct cuda_rotation {
    const float *cos, *sin; /* device [T, rd / 2]; cos NULL: nothing is rotated */
    int32_t d, rd;
    float sign; /* of sin: -1 rotates back */
};

struct cuda_quant {
    const void *x; /* row r at x + ld_x * r, its groups K apart */
    enum kern_dtype x_dtype;
    int64_t ld_x;
    int32_t T, groups, K; /* T rows of out */
    enum kern_act_quant aq;
    float input_scale;         /* NVFP4 */
    const float *input_scales; /* NULL, or device [T]: instead */
    const int32_t *rows;       /* NULL, or device [T]: the row of x that row t of out comes from; a
                                * negative one leaves the row of out alone */
    void *out;                 /* device [T, groups, Kp] */
    int32_t Kp;                /* a multiple of 8, at least K; elements from K on become zero */
    bool wide;                 /* out is f32, else bf16 */
    /* bf16: each 64 elements in the order of slots that mma.cuh speaks of, so that sixteen in a row
     * are what one instruction has; Kp whole groups. */
    bool slots;
    void *plain; /* NULL, or with slots: gets the same rows as out, not quantized */
    struct cuda_rotation rotation; /* only where cuda_rotates_on_the_way() */
};
void cuda_quant_rows(struct kern_stream *s, const struct cuda_quant *q);
/* Can r be applied on the way, as q.rotation? Only to bf16 rows in slots, not quantized. */
bool cuda_rotates_on_the_way(const struct cuda_quant *q, const struct kern_heads_rope *r);

/* A128 as it is, for products of codes: the same codes and scales as above. */
struct cuda_codes {
    const void *x; /* as in cuda_quant */
    enum kern_dtype x_dtype;
    int64_t ld_x;
    int32_t T, groups, K;
    const int32_t *rows;
    /* device [T, groups, Kp] e4m3, each four in the order of placed weights (k, k + 2,
     * k + 1, k + 3); Kp: cuda_code_width(K); from K on zeros */
    uint8_t *codes;
    float *scales; /* device [groups * Kp / 128, ld_scales]: of each row's block, as a number */
    int64_t ld_scales;
};
void cuda_quant_codes(struct kern_stream *s, const struct cuda_codes *q);

static inline __host__ __device__ int32_t cuda_code_width(int32_t K)
{
    return (K + 127) / 128 * 128;
}

/* Kp that products of width K like: whole groups of 64. */
static inline __host__ __device__ int32_t cuda_row_width(int32_t K)
{
    return (K + 63) / 64 * 64;
}

/* The same inside a kernel. A warp takes 128 elements of a row, from a multiple of 128 on, four a
 * lane. */

/* Rows x, ld apart, let their elements be read four at a time. */
static inline bool cuda_by_fours(const void *x, enum kern_dtype t, int64_t ld, int32_t K,
                                 int32_t groups)
{
    return (uintptr_t)x % (4 * (size_t)kern_dtype_bytes(t)) == 0 && ld % 4 == 0 &&
           (groups == 1 || K % 4 == 0);
}

/* Elements k .. k+3 of a row of K whose element k is element `at` of x; zero beyond K. */
static __device__ __forceinline__ void dev_load4(const void *x, enum kern_dtype t, int64_t at,
                                                 int32_t k, int32_t K, bool by_fours, float v[4])
{
    if (by_fours && k + 4 <= K) {
        if (t == KERN_F32) {
            const float4 f = *(const float4 *)((const float *)x + at);
            v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
        } else {
            const uint2 u = *(const uint2 *)((const uint16_t *)x + at);
            v[0] = kern_float(u.x << 16), v[1] = kern_float(u.x & 0xffff0000u);
            v[2] = kern_float(u.y << 16), v[3] = kern_float(u.y & 0xffff0000u);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = k + i < K ? dev_load(x, at + i, t) : 0.0f;
}

/* e4m3 and back, by the machine's conversions: to nearest even, clamped to 448. */
static __device__ __forceinline__ float dev_round_e4m3(float v)
{
    return dev_e4m3_decode((uint8_t)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3));
}

/* Largest magnitude over `lanes` neighbouring lanes' four values, a power of two; NaN is passed
 * over. */
template <int LANES> static __device__ __forceinline__ float dev_amax4(const float v[4])
{
    float m = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    m = fmaxf(m, 0.0f);
    if constexpr (LANES == 32) { /* numbers that are not negative are in the order of their bits */
        return kern_float(__reduce_max_sync(0xffffffffu, kern_bits(m)));
    } else {
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
        return m;
    }
}

/* A word of four codes, in the order of placed weights. */
static __device__ __forceinline__ uint32_t dev_codes4(const float v[4])
{
    const uint32_t a = __nv_cvt_float2_to_fp8x2(make_float2(v[0], v[2]), __NV_SATFINITE, __NV_E4M3),
                   b = __nv_cvt_float2_to_fp8x2(make_float2(v[1], v[3]), __NV_SATFINITE, __NV_E4M3);
    return a | b << 16;
}

/* A128 of a warp's 128 elements as codes; every lane calls it and gets the block's scale. */
static __device__ __forceinline__ uint32_t dev_codes4_a128(const float v[4], float *scale)
{
    const uint8_t c = kern_e4m3_scale_code(dev_amax4<32>(v));
    const float inv = kern_ue8m0_inverse(c);
    *scale = kern_ue8m0_decode(c);
    const float u[4] = {v[0] * inv, v[1] * inv, v[2] * inv, v[3] * inv};
    return dev_codes4(u);
}

/* The code of the scale of a block of 128 bf16 elements that eight neighbouring lanes have, sixteen
 * each; every lane calls it. */
static __device__ __forceinline__ uint8_t dev_scale16_a128(const uint32_t (&w)[8])
{
    __nv_bfloat162 m = __float2bfloat162_rn(0.0f);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t magnitudes = w[i] & 0x7fff7fffu;
        __nv_bfloat162 two;
        memcpy(&two, &magnitudes, 4);
        m = __hmax2(m, two); /* NaN is passed over */
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) m = __hmax2(m, __shfl_xor_sync(0xffffffffu, m, d));
    return kern_e4m3_scale_code(fmaxf(__low2float(m), __high2float(m)));
}
/* A128 of such a block, a lane's elements being two times eight; every lane calls it and gets its
 * block's scale, and in x and y of v[j] the codes of v[j]'s eight elements. */
static __device__ __forceinline__ float dev_codes16_a128(uint4 (&v)[2])
{
    const uint32_t(&w)[8] = reinterpret_cast<const uint32_t(&)[8]>(v);
    const uint8_t c = dev_scale16_a128(w);
    const float inv = kern_ue8m0_inverse(c);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint32_t out[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t a = w[4 * j + 2 * h], b = w[4 * j + 2 * h + 1];
            const float u[4] = {kern_float(a << 16) * inv, kern_float(a & 0xffff0000u) * inv,
                                kern_float(b << 16) * inv, kern_float(b & 0xffff0000u) * inv};
            out[h] = dev_codes4(u);
        }
        v[j].x = out[0], v[j].y = out[1];
    }
    return kern_ue8m0_decode(c);
}
/* The same, and back to bf16. */
static __device__ __forceinline__ void dev_quant16_a128(uint4 (&v)[2])
{
    uint32_t(&w)[8] = reinterpret_cast<uint32_t(&)[8]>(v);
    const uint8_t c = dev_scale16_a128(w);
    const float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const __nv_fp8x2_storage_t q = __nv_cvt_float2_to_fp8x2(
            make_float2(kern_float(w[i] << 16) * inv, kern_float(w[i] & 0xffff0000u) * inv),
            __NV_SATFINITE, __NV_E4M3);
        const float2 f = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(q, __NV_E4M3)));
        const __nv_bfloat162 two = __floats2bfloat162_rn(f.x * s, f.y * s);
        memcpy(&w[i], &two, 4);
    }
}

/* Eight lanes have 64 elements, eight each in v; afterwards each has a piece of eight of their
 * order of slots, and returns which. Lane n's word c is word n / 2 of piece n % 2 * 4 + c: lanes
 * with the same n % 2 change words with each other. Every lane of the warp calls it. */
static __device__ __forceinline__ uint32_t dev_to_slots(uint4 *v)
{
    const uint32_t lane = threadIdx.x % 8;
    uint32_t w[4] = {v->x, v->y, v->z, v->w};
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
        const bool upper = lane / 2 & d;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int lo = d == 1 ? 2 * i : i, hi = lo + d;
            const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? w[lo] : w[hi], 2 * d);
            w[lo] = upper ? got : w[lo];
            w[hi] = upper ? w[hi] : got;
        }
    }
    *v = make_uint4(w[0], w[1], w[2], w[3]);
    return lane % 2 * 4 + lane / 2;
}

/* A128 of a warp's 128 elements; every lane calls it. */
static __device__ __forceinline__ void dev_quant4_a128(float v[4])
{
    const uint8_t c = kern_e4m3_scale_code(dev_amax4<32>(v));
    const float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const __nv_fp8x2_storage_t q = __nv_cvt_float2_to_fp8x2(
            make_float2(v[i] * inv, v[i + 1] * inv), __NV_SATFINITE, __NV_E4M3);
        const float2 f = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(q, __NV_E4M3)));
        v[i] = f.x * s, v[i + 1] = f.y * s;
    }
}

/* NVFP4 of its blocks of 16. wide: with the last factor. */
static __device__ __forceinline__ void dev_quant4_nvfp4(float v[4], float input_scale, bool wide)
{
    const float m = dev_amax4<4>(v);
    const float sf = dev_round_e4m3((float)((double)m / 6.0 / (double)input_scale));
    const double s = (double)sf * (double)input_scale;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint8_t code = s > 0 ? kern_e2m1_encode((float)((double)v[i] / s)) : 0;
        const float e = dev_e2m1_decode(code);
        v[i] = wide ? (float)((double)e * s) : e * sf;
    }
}

static __device__ __forceinline__ uint2 dev_pack4(const float v[4])
{
    const __nv_bfloat162 a = __floats2bfloat162_rn(v[0], v[1]),
                         b = __floats2bfloat162_rn(v[2], v[3]);
    uint2 u;
    memcpy(&u.x, &a, 4);
    memcpy(&u.y, &b, 4);
    return u;
}

#endif
