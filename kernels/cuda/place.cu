/* kernels/cuda/place.cu - codes of placed weights brought into the form of dequant.cuh: one thread a
 * word, one a scale. Runs once per weight, at the speed of the copy before it. */
#include "kernels/cuda/place.cuh"

#include "kernels/cuda/dequant.cuh"

enum { THREADS = 256, BLOCKS = 4096 };

static __device__ uint32_t swap_middle(uint32_t v)
{
    return __byte_perm(v, 0, 0x3120);
}

static __device__ uint32_t spread_nibbles(uint32_t v)
{
    uint32_t out = 0;
    for (int i = 0; i < 8; i++) {
        const uint32_t s = v >> (4 * i + 3) & 1u, m = v >> (4 * i) & 7u, half = i % 2 * 16;
        const uint32_t h = i < 2   ? s << 15 | m << 6
                           : i < 4 ? s << 12 | m << 3
                           : i < 6 ? s << 9 | m
                                   : s << 13 | m >> 1 << 10 | (m & 1u) << 14;
        out |= h << half;
    }
    return out;
}

static __global__ void words_kernel(bool fp8, int64_t n_words, int64_t row_words, uint32_t *data,
                                    uint8_t *nan_rows)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n_words;
         i += (int64_t)gridDim.x * THREADS) {
        const uint32_t v = data[i];
        if (fp8 && dev_e4m3x4_nan(v)) nan_rows[i / row_words] = 1;
        data[i] = fp8 ? swap_middle(v) : spread_nibbles(v);
    }
}

static __global__ void scales_kernel(bool mx, int64_t n_scales, int64_t row_scales, uint8_t *scale,
                                     uint8_t *nan_rows, int32_t *refused)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n_scales;
         i += (int64_t)gridDim.x * THREADS) {
        const uint8_t b = scale[i];
        if (mx ? b == 255 : (b & 127) == 127) nan_rows[i / row_scales] = 1;
        if (mx && b != 255) {
            if (b > 144) *refused = 1;
            scale[i] = (uint8_t)(b + 110);
        }
    }
}

static int blocks_for(int64_t n)
{
    const int64_t b = (n + THREADS - 1) / THREADS;
    return (int)(b < BLOCKS ? b : BLOCKS);
}

void cuda_place_codes(cudaStream_t cu, enum kern_wfmt fmt, enum kern_sfmt sfmt, int32_t n,
                      int32_t k, uint8_t *data, int64_t row_bytes, uint8_t *scale, int32_t *refused)
{
    if (!cuda_has_nan_rows(fmt)) return;
    uint8_t *nan_rows = (uint8_t *)cuda_nan_rows(scale, fmt, sfmt, n, k);
    const int64_t row_words = row_bytes / 4, n_words = n * row_words;
    words_kernel<<<blocks_for(n_words), THREADS, 0, cu>>>(fmt == KERN_W_FP8, n_words, row_words,
                                                          (uint32_t *)data, nan_rows);
    if (fmt == KERN_W_FP8 || sfmt == KERN_S_NONE) return;
    const int64_t row_scales = fmt == KERN_W_MXFP4 ? k / 32 : k / 16, n_scales = n * row_scales;
    scales_kernel<<<blocks_for(n_scales), THREADS, 0, cu>>>(fmt == KERN_W_MXFP4, n_scales,
                                                            row_scales, scale, nan_rows, refused);
}
