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
};
void cuda_quant_rows(struct kern_stream *s, const struct cuda_quant *q);

/* Kp that products of width K like: whole groups of 64. */
static inline __host__ __device__ int32_t cuda_row_width(int32_t K)
{
    return (K + 63) / 64 * 64;
}

#endif
