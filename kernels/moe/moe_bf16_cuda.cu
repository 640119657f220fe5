/* kernels/moe/moe_bf16_cuda.cu - products of bf16 experts. */
#include "kernels/moe/moe_product.cuh"

int moe_product_bf16(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->plan.tokens) {
    case 8: return moe_launch<KERN_W_BF16, 1, false>(s, p);
    case 32: return moe_launch<KERN_W_BF16, 4, false>(s, p);
    default: return TOW_EINVAL;
    }
}
