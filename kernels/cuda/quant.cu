/* kernels/cuda/quant.cu - rows of activations quantized and back.
 *
 * One warp takes 128 elements of a row, four a lane: a block of A128, or eight of NVFP4, whose sixteen
 * elements lie in a quad. Scale and codes are the CPU's, so are NVFP4's divisions in double.
 */
#include "kernels/cuda/quant.cuh"

#include "kernels/cuda/numeric.cuh"

enum { WARPS = 8, SPAN = 128 };

/* e4m3 and back, by the machine's conversions: to nearest even, clamped to 448. */
static __device__ __forceinline__ float round_e4m3(float v)
{
    return dev_e4m3_decode((uint8_t)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3));
}

static __device__ __forceinline__ void load4(const struct cuda_quant &q, int64_t at, int32_t k,
                                             bool aligned, float v[4])
{
    if (aligned && k + 4 <= q.K) {
        if (q.x_dtype == KERN_F32) {
            const float4 f = *(const float4 *)((const float *)q.x + at);
            v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
        } else {
            const uint2 u = *(const uint2 *)((const uint16_t *)q.x + at);
            v[0] = kern_float(u.x << 16), v[1] = kern_float(u.x & 0xffff0000u);
            v[2] = kern_float(u.y << 16), v[3] = kern_float(u.y & 0xffff0000u);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = k + i < q.K ? dev_load(q.x, at + i, q.x_dtype) : 0.0f;
}

/* One value of a block with scale s (a double), as kern_roundtrip_nvfp4. */
static __device__ __forceinline__ float e2m1_of(float x, double s)
{
    const uint8_t c = s > 0 ? kern_e2m1_encode((float)((double)x / s)) : 0;
    return dev_e2m1_decode(c);
}

static __global__ void quant_kernel(struct cuda_quant q, bool aligned, int32_t spans)
{
    const int lane = threadIdx.x % 32;
    const int64_t part = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32; /* (t, group, span) */
    if (part >= (int64_t)q.T * q.groups * spans) return;
    const int64_t tg = part / spans, t = tg / q.groups, g = tg % q.groups;
    const int32_t k = (int32_t)(part % spans) * SPAN + 4 * lane;
    const int64_t row = q.rows ? q.rows[t] : t;
    if (row < 0) return;
    float v[4];
    load4(q, row * q.ld_x + g * q.K + k, k, aligned, v);
    if (q.aq != KERN_AQ_NONE) {
        float m = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) m = fmaxf(m, fabsf(v[i])); /* passes over NaN */
        const int reach = q.aq == KERN_AQ_A128 ? 16 : 2;
        for (int d = 1; d <= reach; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
        if (q.aq == KERN_AQ_A128) {
            const uint8_t c = kern_e4m3_scale_code(m);
            const float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = round_e4m3(v[i] * inv) * s;
        } else {
            const float f = q.input_scales ? q.input_scales[t] : q.input_scale;
            const float sf = round_e4m3((float)((double)m / 6.0 / (double)f));
            const double s = (double)sf * (double)f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float e = e2m1_of(v[i], s);
                v[i] = q.wide ? (float)((double)e * s) : e * sf;
            }
        }
    }
    if (k >= q.Kp) return;
    const int64_t to = tg * q.Kp + k; /* Kp is a multiple of 8, k of 4 */
    if (q.wide) {
        *(float4 *)((float *)q.out + to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
        uint2 u;
        u.x = kern_bf16_encode(v[0]) | (uint32_t)kern_bf16_encode(v[1]) << 16;
        u.y = kern_bf16_encode(v[2]) | (uint32_t)kern_bf16_encode(v[3]) << 16;
        *(uint2 *)((uint16_t *)q.out + to) = u;
    }
}

void cuda_quant_rows(struct kern_stream *s, const struct cuda_quant *q)
{
    if (q->T == 0) return;
    const int b = kern_dtype_bytes(q->x_dtype);
    const bool aligned =
        (uintptr_t)q->x % (4 * b) == 0 && q->ld_x % 4 == 0 && (q->groups == 1 || q->K % 4 == 0);
    const int32_t spans = (int32_t)cuda_ceil(q->Kp, SPAN);
    const int64_t warps = (int64_t)q->T * q->groups * spans;
    quant_kernel<<<(unsigned)cuda_ceil(warps, WARPS), 32 * WARPS, 0, s->cu>>>(*q, aligned, spans);
}
