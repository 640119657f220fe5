/* kernels/gemm/embed_cuda.cu - rows of the embedding table, each hc times. One block a row and
 * piece of it; an element is read once and stored hc times. */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/numeric.cuh"

enum { THREADS = 256, PER_THREAD = 8 };

static __global__ void embed_kernel(struct kern_embed p)
{
    const int64_t t = blockIdx.x;
    const int32_t D = p.w.k, id = p.ids[t];
    const bool known = id >= 0 && id < p.w.n;
    const uint8_t *row = (const uint8_t *)p.w.data + (known ? id : 0) * p.w.row_bytes;
    const enum kern_dtype wt = p.w.fmt == KERN_W_F32 ? KERN_F32 : KERN_BF16;
    for (int i = 0; i < PER_THREAD; i++) {
        const int32_t k = (blockIdx.y * PER_THREAD + i) * THREADS + threadIdx.x;
        if (k >= D) return;
        const float v = known ? dev_load(row, k, wt) : 0.0f;
        for (int32_t j = 0; j < p.hc; j++) dev_store(p.out, (t * p.hc + j) * D + k, p.act, v);
    }
}

extern "C" int kern_embed_cuda(struct kern_stream *s, const struct kern_embed *p)
{
    if (p->T == 0) return 0;
    const dim3 grid((unsigned)p->T, (unsigned)cuda_ceil(p->w.k, THREADS * PER_THREAD));
    embed_kernel<<<grid, THREADS, 0, s->cu>>>(*p);
    return cuda_done(s, "embed");
}
