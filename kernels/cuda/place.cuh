/* kernels/cuda/place.cuh - codes of placed weights brought into the form of kernels/cuda/dequant.cuh. */
#ifndef KERN_CUDA_PLACE_CUH
#define KERN_CUDA_PLACE_CUH

#include "kernels/types.h"

#include <cuda_runtime.h>

/* The matrix [n, k] whose rows of row_bytes at data and tight scales at scale were just copied; behind
 * the scales there are n zeroed bytes (cuda_nan_rows). *refused, on the device, becomes 1 when an
 * MXFP4 scale is above 2^17. */
void cuda_place_codes(cudaStream_t cu, enum kern_wfmt fmt, enum kern_sfmt sfmt, int32_t n,
                      int32_t k, uint8_t *data, int64_t row_bytes, uint8_t *scale,
                      int32_t *refused);

#endif
