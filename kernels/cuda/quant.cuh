/* kernels/cuda/quant.cuh - rows of activations as products read them: quantized and back, in bf16,
 * aligned and padded with zeros.
 *
 * Numerics A128 as kern_roundtrip_e4m3(..., 128): e4m3 times a power of two is a bf16 number. NVFP4 as
 *          kern_roundtrip_nvfp4() without its last factor: the row comes divided by input_scale, which
 *          makes it a bf16 number; whoever sums multiplies the sum by input_scale. Wide rows (f32) have
 *          the factor in them and are equal to the CPU's.
 */
#ifndef KERN_CUDA_QUANT_CUH
#define KERN_CUDA_QUANT_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/numeric.cuh"

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
    bool slots; /* bf16: each 64 elements in the order of slots that mma.cuh speaks of, so
                                * that sixteen in a row are what one instruction has; Kp whole groups */
};
void cuda_quant_rows(struct kern_stream *s, const struct cuda_quant *q);

/* Kp that products of width K like: whole groups of 64. */
static inline __host__ __device__ int32_t cuda_row_width(int32_t K)
{
    return (K + 63) / 64 * 64;
}

/* The same inside a kernel. A warp takes 128 elements of a row, from a multiple of 128 on, four a lane. */

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

/* Every lane of the warp calls it. wide: NVFP4 with its last factor. */
static __device__ __forceinline__ void dev_quant4(float v[4], enum kern_act_quant aq,
                                                  float input_scale, bool wide)
{
    if (aq == KERN_AQ_NONE) return;
    float m = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) m = fmaxf(m, fabsf(v[i])); /* passes over NaN */
    const int reach = aq == KERN_AQ_A128 ? 16 : 2;
    for (int d = 1; d <= reach; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
    if (aq == KERN_AQ_A128) {
        const uint8_t c = kern_e4m3_scale_code(m);
        const float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = dev_round_e4m3(v[i] * inv) * s;
        return;
    }
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
    return make_uint2(kern_bf16_encode(v[0]) | (uint32_t)kern_bf16_encode(v[1]) << 16,
                      kern_bf16_encode(v[2]) | (uint32_t)kern_bf16_encode(v[3]) << 16);
}

#endif
