/* kernels/moe/swiglu.cuh - swiglu whose rows become codes on the way: kern_swiglu_cuda() and
 * cuda_quant_codes() in one, with the same codes and scales. */
#ifndef KERN_MOE_SWIGLU_CUH
#define KERN_MOE_SWIGLU_CUH

#include "kernels/cuda/quant.cuh"

/* Can it be? */
bool cuda_swiglu_gives_codes(const struct kern_swiglu *p);
/* Only q's codes, scales and ld_scales are looked at. */
void cuda_swiglu_codes(struct kern_stream *s, const struct kern_swiglu *p,
                       const struct cuda_codes *q);

#endif
