/* kernels/kvpack/entry.cuh - a pooled row to a stored entry by one warp, in registers: for the
 * deployed widths and fp8. With the bits of row.cuh and kv_store.cuh, which serve every other
 * shape; only sums of squares go through shared memory, for their order.
 */
#ifndef KERN_KVPACK_ENTRY_CUH
#define KERN_KVPACK_ENTRY_CUH

#include "kernels/cuda/kv_store.cuh"
#include "kernels/cuda/quant.cuh"

enum { ENTRY_ROPE = 64, ENTRY_MAIN = 512, ENTRY_KEY = 128 };

/* What a warp needs besides the pooled row. */
struct entry {
    struct kern_vec norm; /* 16-byte aligned */
    float eps;
    float cos, sin; /* of the pair that has the lane's number */
    uint8_t *part;  /* of n rows, of which this becomes the i-th */
    int64_t n, i;
};

template <int E>
static __device__ __forceinline__ void entry_norm4(const struct kern_vec &w, int at, float rs,
                                                   float v[4])
{
    float f[4];
    dev_load4(w.data, w.dtype, at, at, E, true, f);
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = kern_bf16_round(f[k] * (v[k] * rs));
}
/* Rotates two pairs that begin with pair `i` of the rotated end; lane l has the angle of pair l.
 * Every lane calls it. */
static __device__ __forceinline__ void entry_rotate4(float cos, float sin, int i, bool rotated,
                                                     float v[4])
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const float c = __shfl_sync(0xffffffffu, cos, (i + k) & 31);
        const float s = __shfl_sync(0xffffffffu, sin, (i + k) & 31);
        if (!rotated) continue;
        dev_rotate2(&v[2 * k], &v[2 * k + 1], c, s);
        v[2 * k] = kern_bf16_round(v[2 * k]);
        v[2 * k + 1] = kern_bf16_round(v[2 * k + 1]);
    }
}
/* Codes of n values, the scale's too; LANES lanes share it. */
template <int N, int LANES>
static __device__ __forceinline__ uint8_t entry_codes(const float v[N], uint8_t code[N])
{
    float m = 0.0f;
#pragma unroll
    for (int k = 0; k < N; k++) m = fmaxf(m, fabsf(v[k]));
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
    const uint8_t c = kern_e4m3_scale_code(m);
    const float inv = kern_ue8m0_inverse(c);
#pragma unroll
    for (int k = 0; k < N; k++)
        code[k] = (uint8_t)__nv_cvt_float_to_fp8(v[k] * inv, __NV_SATFINITE, __NV_E4M3);
    return c;
}
/* Quantized as activations are, and then as they are stored: the scale of the second may be
 * smaller. */
template <int N, int LANES>
static __device__ __forceinline__ uint8_t entry_stored(float v[N], uint8_t code[N])
{
    const float s = kern_ue8m0_decode(entry_codes<N, LANES>(v, code));
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = dev_e4m3_decode(code[k]) * s;
    return entry_codes<N, LANES>(v, code);
}
static __device__ __forceinline__ uint32_t entry_word(const uint8_t c[4])
{
    return c[0] | (uint32_t)c[1] << 8 | (uint32_t)c[2] << 16 | (uint32_t)c[3] << 24;
}

/* 512 channels; a lane has eight from 8 lane on and eight from 256 + 8 lane on. */
static __device__ __forceinline__ void entry_main(const struct entry &e, float *row, int lane)
{
    enum { NOPE = ENTRY_MAIN - ENTRY_ROPE, STEP = ENTRY_MAIN / 2, SCALES = 8 };
    float v[2][8];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int k = 0; k < 8; k += 4) {
            float4 *const at = (float4 *)(row + STEP * h + 8 * lane + k);
            const float4 u = *at;
            v[h][k] = kern_bf16_round(u.x), v[h][k + 1] = kern_bf16_round(u.y);
            v[h][k + 2] = kern_bf16_round(u.z), v[h][k + 3] = kern_bf16_round(u.w);
            *at = make_float4(v[h][k], v[h][k + 1], v[h][k + 2], v[h][k + 3]);
        }
    __syncwarp();
    const float rs = 1.0f / sqrtf(dev_row_sumsq(row, ENTRY_MAIN) / (float)ENTRY_MAIN + e.eps);
    uint8_t *const out = e.part + e.i * (ENTRY_MAIN + ENTRY_ROPE);
    uint8_t *const scales = e.part + e.n * (ENTRY_MAIN + ENTRY_ROPE) + e.i * SCALES;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = STEP * h + 8 * lane;
        const bool rotated = at >= NOPE;
        uint8_t code[8];
        entry_norm4<ENTRY_MAIN>(e.norm, at, rs, v[h]);
        entry_norm4<ENTRY_MAIN>(e.norm, at + 4, rs, v[h] + 4);
        if (h == 1) {
            entry_rotate4(e.cos, e.sin, (at - NOPE) / 2, rotated, v[h]);
            entry_rotate4(e.cos, e.sin, (at - NOPE) / 2 + 2, rotated, v[h] + 4);
        }
        if (rotated) *(uint4 *)(out + NOPE + 2 * (at - NOPE)) = dev_pack8(v[h]);
        const uint8_t c = entry_stored<8, 8>(v[h], code);
        if (!rotated) *(uint2 *)(out + at) = make_uint2(entry_word(code), entry_word(code + 4));
        if (lane % 8 == 0) scales[at / 64] = rotated ? 0 : c;
    }
}

/* 128 channels, four a lane. */
static __device__ __forceinline__ void entry_key(const struct entry &e, float *row, int lane)
{
    const float last = (float)(1.0 / sqrt((double)ENTRY_KEY));
    float4 *const own = (float4 *)row + lane;
    uint8_t code[4];
    const float4 u = *own;
    float v[4] = {kern_bf16_round(u.x), kern_bf16_round(u.y), kern_bf16_round(u.z),
                  kern_bf16_round(u.w)};
    *own = make_float4(v[0], v[1], v[2], v[3]);
    __syncwarp();
    const float rs = 1.0f / sqrtf(dev_row_sumsq(row, ENTRY_KEY) / (float)ENTRY_KEY + e.eps);
    entry_norm4<ENTRY_KEY>(e.norm, 4 * lane, rs, v);
    entry_rotate4(e.cos, e.sin, 2 * (lane - 16), lane >= 16, v);
    /* Walsh-Hadamard: pairs one apart, two apart, then of lanes. */
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int m = 1; m < 32; m *= 2)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float x = __shfl_xor_sync(0xffffffffu, v[k], m);
            v[k] = lane & m ? x - v[k] : v[k] + x;
        }
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = kern_bf16_round(v[k] * last);
    const uint8_t scale = entry_stored<4, 32>(v, code);
    *(uint32_t *)(e.part + e.i * ENTRY_KEY + 4 * lane) = entry_word(code);
    if (lane == 0) ((float *)(e.part + e.n * ENTRY_KEY))[e.i] = kern_ue8m0_decode(scale);
}

#endif
