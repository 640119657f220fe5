/* kernels/cuda/kv.cuh - one layer's cache as kernels see it: where an entry lies, and one element
 * of a stored row. The device's copy of what kernels/kv_layout.h and kvpack/kvpack.h say; passed by
 * value. */
#ifndef KERN_CUDA_KV_CUH
#define KERN_CUDA_KV_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/numeric.cuh"

struct cuda_kv {
    const uint8_t *pages;
    int64_t page_bytes;
    struct kern_kv_layer y;
    int32_t d, rd, window, w; /* head and rotated width, window rows, index key width */
    enum kern_kv_fmt kv_fmt;
    enum kern_ik_fmt ik_fmt;
};

static inline struct cuda_kv cuda_kv_of(const uint8_t *pages, const struct kern_kv_layout *l,
                                        int32_t layer)
{
    struct cuda_kv k;
    k.pages = pages;
    k.page_bytes = l->page_bytes;
    k.y = l->layer[layer];
    k.d = l->spec.head_dim;
    k.rd = l->spec.rope_dim;
    k.window = l->spec.window;
    k.w = l->spec.index_dim;
    k.kv_fmt = l->spec.kv_fmt;
    k.ik_fmt = l->spec.ik_fmt;
    return k;
}

/* The part (main or index) that holds entry e of a sequence; *row is the entry's row in it. */
static __device__ __forceinline__ const uint8_t *dev_entry_part(const struct cuda_kv &k,
                                                                const struct cuda_seq &q,
                                                                bool index, int64_t e, int32_t *row)
{
    const int64_t page = q.page_ids[e / k.y.per_page * q.page_step];
    *row = (int32_t)(e % k.y.per_page);
    return k.pages + page * k.page_bytes + (index ? k.y.index_off : k.y.main_off);
}

/* Element c of stored row i of a part of n main (or window) rows. */
static __device__ __forceinline__ float dev_kv_at(const struct cuda_kv &k, const uint8_t *part,
                                                  int64_t n, int64_t i, int32_t c)
{
    const int32_t nope = k.d - k.rd;
    if (k.kv_fmt == KERN_KV_F32) return ((const float *)part)[i * k.d + c];
    if (k.kv_fmt == KERN_KV_BF16) return kern_bf16_decode(((const uint16_t *)part)[i * k.d + c]);
    const uint8_t *row = part + i * (k.d + k.rd);
    if (c >= nope) return kern_bf16_decode(((const uint16_t *)(row + nope))[c - nope]);
    const int32_t scales = (nope / 64 + 7) / 8 * 8;
    return dev_e4m3_decode(row[c]) *
           kern_ue8m0_decode(part[n * (k.d + k.rd) + i * scales + c / 64]);
}
/* Element c of stored key i of a part of n index keys of format fmt. */
static __device__ __forceinline__ float
dev_ik_at(enum kern_ik_fmt fmt, int32_t w, const uint8_t *part, int64_t n, int64_t i, int32_t c)
{
    switch (fmt) {
    case KERN_IK_FP4: {
        const uint8_t b = part[i * (w / 2) + c / 2];
        return dev_e2m1_decode(c & 1 ? b >> 4 : b & 15) *
               kern_ue8m0_decode(part[n * (w / 2) + i * (w / 32) + c / 32]);
    }
    case KERN_IK_FP8:
        return dev_e4m3_decode(part[i * w + c]) *
               kern_f32_scale(((const float *)(part + n * w))[i]);
    case KERN_IK_BF16: return kern_bf16_decode(((const uint16_t *)part)[i * w + c]);
    default: return ((const float *)part)[i * w + c];
    }
}

#endif
