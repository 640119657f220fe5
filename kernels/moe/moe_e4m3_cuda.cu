/* kernels/moe/moe_e4m3_cuda.cu - few pairs times mxfp4 and fp8 experts by their codes, see
 * moe_wgmma.cuh. */
#include "kernels/moe/moe_wgmma.cuh"

int moe_product_e4m3(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->a.fmt) {
    case KERN_W_MXFP4: return wg_launch<KERN_W_MXFP4, true, MOE_NARROW>(s, p);
    case KERN_W_FP8: return wg_launch<KERN_W_FP8, true, MOE_NARROW>(s, p);
    default: return TOW_EINVAL;
    }
}
