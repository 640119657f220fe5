/* kernels/cuda/place.cu - codes of placed weights brought into the form of dequant.cuh: one thread
 * a word, one a scale. Runs once per weight, at the speed of the copy before it. */
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

/* The same codes as nibbles for prmt, there and back. */
static __device__ uint32_t sort_nibbles(uint32_t v)
{
    uint32_t out = 0;
    for (int b = 0; b < 4; b++) {
        const int e = b == 1 ? 2 : b == 2 ? 1 : b;
        out |= (v >> (4 * e) & 7u) << (4 * b) | (v >> (4 * e + 3) & 1u) << (8 * b + 7);
        out |= (v >> (4 * e + 16) & 7u) << (4 * b + 16) | (v >> (4 * e + 19) & 1u) << (8 * b + 3);
    }
    return out;
}
static __device__ uint32_t unsort_nibbles(uint32_t v)
{
    uint32_t out = 0;
    for (int b = 0; b < 4; b++) {
        const int e = b == 1 ? 2 : b == 2 ? 1 : b;
        out |= (v >> (4 * b) & 7u) << (4 * e) | (v >> (8 * b + 7) & 1u) << (4 * e + 3);
        out |= (v >> (4 * b + 16) & 7u) << (4 * e + 16) | (v >> (8 * b + 3) & 1u) << (4 * e + 19);
    }
    return out;
}

static __global__ void words_kernel(bool fp8, int64_t n_words, int64_t row_words, uint32_t *data,
                                    uint8_t *nan_rows, enum cuda_form from, enum cuda_form to)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n_words;
         i += (int64_t)gridDim.x * THREADS) {
        const uint32_t v = from == CUDA_FORM_E4M3 ? unsort_nibbles(data[i]) : data[i];
        if (fp8 && dev_e4m3x4_nan(v)) nan_rows[i / row_words] = 1;
        data[i] = fp8 ? swap_middle(v) : to == CUDA_FORM_E4M3 ? sort_nibbles(v) : spread_nibbles(v);
    }
}

static __global__ void scales_kernel(bool mx, int64_t n_scales, int64_t row_scales, uint8_t *scale,
                                     uint8_t *nan_rows, struct cuda_place_says *says)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n_scales;
         i += (int64_t)gridDim.x * THREADS) {
        const uint8_t b = scale[i];
        if (mx ? b == 255 : (b & 127) == 127) nan_rows[i / row_scales] = 1;
        if (mx && b != 255) {
            if (b > 144) says->refused = 1;
            scale[i] = (uint8_t)(b + 110);
        }
    }
}

/* A warp a row: the largest of its placed MXFP4 scales, not counting NaN and those of zeros alone,
 * and whether the least of them is too far below. */
static __global__ void tops_kernel(int64_t n, int64_t row_scales, const uint8_t *data,
                                   int64_t row_bytes, const uint8_t *scale, uint8_t *tops,
                                   struct cuda_place_says *says)
{
    const int lane = threadIdx.x % 32;
    for (int64_t row = blockIdx.x * (int64_t)(THREADS / 32) + threadIdx.x / 32; row < n;
         row += (int64_t)gridDim.x * (THREADS / 32)) {
        int most = 0, least = 255;
        for (int64_t i = lane; i < row_scales; i += 32) {
            const uint4 v = *(const uint4 *)(data + row * row_bytes + i * 16);
            const int s = scale[row * row_scales + i];
            if (s == 255 || ((v.x | v.y | v.z | v.w) & 0x77777777u) == 0) continue;
            most = s > most ? s : most;
            least = s < least ? s : least;
        }
#pragma unroll
        for (int d = 16; d; d /= 2) {
            const int m = __shfl_xor_sync(0xffffffffu, most, d),
                      l = __shfl_xor_sync(0xffffffffu, least, d);
            most = m > most ? m : most;
            least = l < least ? l : least;
        }
        if (lane != 0) continue;
        tops[row] = (uint8_t)(least > most ? 110 + 127 : most); /* nothing but zeros: any will do */
        if (least < most - CUDA_E4M3_SPREAD) says->wide = 1;
    }
}

static int blocks_for(int64_t n)
{
    const int64_t b = (n + THREADS - 1) / THREADS;
    return (int)(b < BLOCKS ? b : BLOCKS);
}

void cuda_place_scales(cudaStream_t cu, enum kern_wfmt fmt, enum kern_sfmt sfmt, int32_t n,
                       int32_t k, const uint8_t *data, int64_t row_bytes, uint8_t *scale,
                       struct cuda_place_says *says)
{
    if (!cuda_has_nan_rows(fmt) || fmt == KERN_W_FP8 || sfmt == KERN_S_NONE) return;
    uint8_t *nan_rows = (uint8_t *)cuda_nan_rows(scale, fmt, sfmt, n, k);
    const bool mx = fmt == KERN_W_MXFP4;
    const int64_t row_scales = mx ? k / 32 : k / 16, n_scales = n * row_scales;
    scales_kernel<<<blocks_for(n_scales), THREADS, 0, cu>>>(mx, n_scales, row_scales, scale,
                                                            nan_rows, says);
    if (mx)
        tops_kernel<<<blocks_for(n * (int64_t)32), THREADS, 0, cu>>>(n, row_scales, data, row_bytes,
                                                                     scale, nan_rows + n, says);
}

void cuda_place_words(cudaStream_t cu, enum kern_wfmt fmt, enum kern_sfmt sfmt, int32_t n,
                      int32_t k, uint8_t *data, int64_t row_bytes, uint8_t *scale,
                      enum cuda_form from, enum cuda_form to)
{
    if (!cuda_has_nan_rows(fmt)) return;
    uint8_t *nan_rows = (uint8_t *)cuda_nan_rows(scale, fmt, sfmt, n, k);
    const int64_t row_words = row_bytes / 4, n_words = n * row_words;
    words_kernel<<<blocks_for(n_words), THREADS, 0, cu>>>(fmt == KERN_W_FP8, n_words, row_words,
                                                          (uint32_t *)data, nan_rows, from, to);
}
