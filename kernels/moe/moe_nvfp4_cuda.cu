/* kernels/moe/moe_nvfp4_cuda.cu - products of nvfp4 experts. */
#include "kernels/moe/moe_product.cuh"

int moe_product_nvfp4(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->plan.tokens) {
    case 8:
        return p->x1 ? moe_launch<KERN_W_NVFP4, 1, true>(s, p)
                     : moe_launch<KERN_W_NVFP4, 1, false>(s, p);
    case 32:
        return p->x1 ? moe_launch<KERN_W_NVFP4, 4, true>(s, p)
                     : moe_launch<KERN_W_NVFP4, 4, false>(s, p);
    case 128: return moe_launch<KERN_W_NVFP4, 16, false>(s, p);
    default: return TOW_EINVAL;
    }
}
