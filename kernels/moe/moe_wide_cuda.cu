/* kernels/moe/moe_wide_cuda.cu - pairs times 4-bit experts in bf16 by wgmma, unless experts have but
 * a handful each: the product of prefill and of large batches of sm_90a. */
#include "kernels/moe/moe_wgmma.cuh"

template <enum kern_wfmt F> static int launch(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->plan.tokens) {
    case MOE_FEW: return wg_launch<F, false, MOE_FEW>(s, p);
    case MOE_MIDDLE: return wg_launch<F, false, MOE_MIDDLE>(s, p);
    case MOE_WIDE: return wg_launch<F, false, MOE_WIDE>(s, p);
    default: return TOW_EINVAL;
    }
}

int moe_product_wide(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->a.fmt) {
    case KERN_W_MXFP4: return launch<KERN_W_MXFP4>(s, p);
    case KERN_W_NVFP4: return launch<KERN_W_NVFP4>(s, p);
    default: return TOW_EINVAL;
    }
}
