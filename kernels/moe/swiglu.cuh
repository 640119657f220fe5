/* kernels/moe/swiglu.cuh - swiglu whose rows become codes on the way: kern_swiglu_cuda() and
 * cuda_quant_codes() in one, with the same codes and scales. */
#ifndef KERN_MOE_SWIGLU_CUH
#define KERN_MOE_SWIGLU_CUH

#include "kernels/cuda/quant.cuh"

/* Can it be? For bf16 activations in whole blocks of 128 columns, g and u 16-byte aligned. Whether
 * codes are wanted, the product after it says (cuda_linear_reads_codes()). */
bool cuda_swiglu_gives_codes(const struct kern_swiglu *p);
/* g, u [T, I] bf16 to codes [T, I] e4m3 and a scale for each row and block, [I / 128, ld_scales]
 * f32; p's y is not written. Only q's codes, scales and ld_scales are looked at. Enqueues. */
void cuda_swiglu_codes(struct kern_stream *s, const struct kern_swiglu *p,
                       const struct cuda_codes *q);

#endif
