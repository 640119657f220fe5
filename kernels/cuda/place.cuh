/* kernels/cuda/place.cuh - codes of placed weights brought into the form of
 * kernels/cuda/dequant.cuh. */
#ifndef KERN_CUDA_PLACE_CUH
#define KERN_CUDA_PLACE_CUH

#include "kernels/types.h"

#include <cuda_runtime.h>

/* Forms of an MXFP4 word, see dequant.cuh. */
enum cuda_form { CUDA_FORM_STORED, CUDA_FORM_BF16, CUDA_FORM_E4M3 };
/* On the device; nothing is said there until the stream has been waited for. */
struct cuda_place_says {
    int32_t refused; /* 1: an MXFP4 scale is above 2^17 */
    int32_t wide;    /* 1: an MXFP4 row's scales are further apart than CUDA_E4M3_SPREAD */
};

/* Scales of the matrix [n, k] whose rows of row_bytes at data and tight scales at scale were just
 * copied; behind the scales there is zeroed room up to cuda_scale_room(). Before
 * cuda_place_words(). */
void cuda_place_scales(cudaStream_t cu, enum kern_wfmt fmt, enum kern_sfmt sfmt, int32_t n,
                       int32_t k, const uint8_t *data, int64_t row_bytes, uint8_t *scale,
                       struct cuda_place_says *says);
/* Its codes; MXFP4 from one form to another. */
void cuda_place_words(cudaStream_t cu, enum kern_wfmt fmt, enum kern_sfmt sfmt, int32_t n,
                      int32_t k, uint8_t *data, int64_t row_bytes, uint8_t *scale,
                      enum cuda_form from, enum cuda_form to);

#endif
