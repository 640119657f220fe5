/* kernels/moe/ffn.cuh - all experts of a layer for a few rows: what its three kernels tell each
 * other.
 *
 * Why      With one row a launch costs as much as its work: eleven of them are three here.
 *              gate   logits, choice and weights                         (ffn_cuda.cu)
 *              up     gate, up and activation, of routed and shared experts    (ffn_few_cuda.cu)
 *              down   down, of both, and the routed sum                        (ffn_few_cuda.cu)
 * Early    Each begins while the one before ends (cuda_launch_early) and lets the next begin only
 *          when it has itself waited: so in the next one all is there that the one before the last
 *          has made, and may be read before cuda_await(), past the first-level cache.
 */
#ifndef KERN_MOE_FFN_CUH
#define KERN_MOE_FFN_CUH

#include "kernels/gemm/product.cuh"
#include "kernels/moe/moe_cuda.cuh"

enum { FFN_ROWS = 4, FFN_PAIRS = 32 /* at most */ };

struct ffn_few {
    const uint16_t *x; /* [T, D] bf16 */
    struct kern_route route;
    struct cuda_product gate, s1, s3, s2; /* the weights of them; s: shared */
    struct moe_matrix w1, w3, w2;
    float limit;
    uint16_t *act; /* [T, I] activations of the shared expert */
    uint16_t *z;   /* [pairs, I] of pairs, times their weight; right behind act */
    float *routed; /* [T, D] */
    void *shared;  /* [T, D] bf16 */
    int32_t T, D, I;
};

/* Is there room for both in shared memory? */
bool ffn_products_fit(const struct kern_stream *s, const struct ffn_few *p);
/* Enqueues them. */
void ffn_products(struct kern_stream *s, const struct ffn_few *p);

#endif
