/* kernels/moe/moe_fp8_cuda.cu - products of fp8 experts. */
#include "kernels/moe/moe_product.cuh"

int moe_product_fp8(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->plan.tokens) {
    case 8: return moe_launch<KERN_W_FP8, 1, false>(s, p);
    case 32: return moe_launch<KERN_W_FP8, 4, false>(s, p);
    default: return TOW_EINVAL;
    }
}
