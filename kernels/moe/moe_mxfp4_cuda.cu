/* kernels/moe/moe_mxfp4_cuda.cu - products of mxfp4 experts. */
#include "kernels/moe/moe_product.cuh"

int moe_product_mxfp4(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->plan.tokens) {
    case 8: return moe_launch<KERN_W_MXFP4, 1, false>(s, p);
    case 32: return moe_launch<KERN_W_MXFP4, 4, false>(s, p);
    case 128: return moe_launch<KERN_W_MXFP4, 16, false>(s, p);
    default: return TOW_EINVAL;
    }
}
