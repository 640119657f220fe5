/* kernels/moe/moe_wide_cuda.cu - many pairs times 4-bit experts in bf16 by wgmma: the prefill
 * product of sm_90a. */
#include "kernels/moe/moe_wgmma.cuh"

int moe_product_wide(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->a.fmt) {
    case KERN_W_MXFP4: return wg_launch<KERN_W_MXFP4, false, MOE_WIDE>(s, p);
    case KERN_W_NVFP4: return wg_launch<KERN_W_NVFP4, false, MOE_WIDE>(s, p);
    default: return TOW_EINVAL;
    }
}
