/* kernels/cuda/kv_store.cuh - rows of floats in shared memory to their stored form: the device's
 * kern_kv_store and kern_ik_store (kernels/kv_layout.h), byte for byte. A team as in row.cuh. */
#ifndef KERN_CUDA_KV_STORE_CUH
#define KERN_CUDA_KV_STORE_CUH

#include "kernels/cuda/kv.cuh"
#include "kernels/cuda/row.cuh"

/* Row i of a part of n window or main rows. */
template <int N>
static __device__ __forceinline__ void dev_kv_store(enum kern_kv_fmt fmt, uint8_t *part, int64_t n,
                                                    int64_t i, const float *row, int32_t d,
                                                    int32_t rd, int me)
{
    if (fmt == KERN_KV_F32) {
        for (int32_t c = me; c < d; c += N) ((float *)part)[i * d + c] = row[c];
        return;
    }
    if (fmt == KERN_KV_BF16) {
        for (int32_t c = me; c < d; c += N)
            ((uint16_t *)part)[i * d + c] = kern_bf16_encode(row[c]);
        return;
    }
    const int32_t nope = d - rd, n_scales = nope / 64, room = (n_scales + 7) / 8 * 8;
    const int lane = me & 31;
    uint8_t *out = part + i * (d + rd), *scales = part + n * (d + rd) + i * room;
    for (int32_t b = me / 32; b < n_scales; b += N / 32) { /* a warp a block, two values a thread */
        const float x = row[64 * b + 2 * lane], y = row[64 * b + 2 * lane + 1];
        const uint8_t c = kern_e4m3_scale_code(dev_row_amax(row + 64 * b, 64));
        const float inv = kern_ue8m0_inverse(c);
        const uint32_t lo = kern_e4m3_encode(x * inv), hi = kern_e4m3_encode(y * inv);
        *(uint16_t *)(out + 64 * b + 2 * lane) = (uint16_t)(lo | hi << 8);
        if (lane == 0) scales[b] = c;
    }
    for (int32_t c = n_scales + me; c < room; c += N) scales[c] = 0;
    for (int32_t c = me; c < rd; c += N)
        ((uint16_t *)(out + nope))[c] = kern_bf16_encode(row[nope + c]);
}

/* Row i of a part of n index keys. */
template <int N>
static __device__ __forceinline__ void dev_ik_store(enum kern_ik_fmt fmt, uint8_t *part, int64_t n,
                                                    int64_t i, const float *row, int32_t w, int me)
{
    switch (fmt) {
    case KERN_IK_FP4:
        for (int32_t b = me / 32; b < w / 32; b += N / 32) { /* a warp a block */
            const uint8_t c = kern_e2m1_scale_code(dev_row_amax(row + 32 * b, 32));
            const float inv = kern_ue8m0_inverse(c);
            const int lane = me & 31;
            if (lane < 16) {
                const uint32_t lo = kern_e2m1_encode(row[32 * b + 2 * lane] * inv);
                const uint32_t hi = kern_e2m1_encode(row[32 * b + 2 * lane + 1] * inv);
                part[i * (w / 2) + 16 * b + lane] = (uint8_t)(lo | hi << 4);
            }
            if (lane == 0) part[n * (w / 2) + i * (w / 32) + b] = c;
        }
        break;
    case KERN_IK_FP8: {
        const uint8_t c = kern_e4m3_scale_code(dev_row_amax(row, w)); /* each warp the whole row */
        const float inv = kern_ue8m0_inverse(c);
        for (int32_t k = me; k < w; k += N) part[i * w + k] = kern_e4m3_encode(row[k] * inv);
        if (me == 0) ((float *)(part + n * w))[i] = kern_ue8m0_decode(c);
        break;
    }
    case KERN_IK_BF16:
        for (int32_t k = me; k < w; k += N)
            ((uint16_t *)part)[i * w + k] = kern_bf16_encode(row[k]);
        break;
    case KERN_IK_F32:
        for (int32_t k = me; k < w; k += N) ((float *)part)[i * w + k] = row[k];
        break;
    }
}

#endif
