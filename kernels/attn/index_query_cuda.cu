/* kernels/attn/index_query_cuda.cu - index queries: a warp takes a head. Reads and writes each value once; that
 * is all its time.
 */
#include "kernels/attn/index_query.cuh"

#include <math.h>

enum { WARPS = 8 };

static __global__ void rotate_kernel(struct kern_index_query p)
{
    const int32_t half = p.rd / 2;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)p.T * p.H * half) return;
    const int64_t row = i / half, n = i % half, t = row / p.H;
    float *q = (float *)p.q + row * p.w + (p.w - p.rd) + 2 * n;
    index_rotate(q[0], q[1], p.cos[t * half + n], p.sin[t * half + n]);
}

template <int E>
static __global__ void __launch_bounds__(32 * WARPS)
    query_kernel(struct kern_index_query p, float hadamard_scale)
{
    cuda_hurry();
    cuda_await();
    index_head<E>(p, (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, hadamard_scale);
}

template <int E> static void launch(struct kern_stream *s, const struct kern_index_query *p)
{
    const int64_t rows = (int64_t)p->T * p->H;
    cuda_launch_early(s, query_kernel<E>, dim3((unsigned)cuda_ceil(rows, WARPS)), 32 * WARPS, 0, *p,
                      (float)(1.0 / sqrt((double)p->w)));
}

extern "C" int kern_index_query_cuda(struct kern_stream *s, const struct kern_index_query *p)
{
    if (p->T == 0) return 0;
    if (p->act == KERN_F32) {
        const int64_t pairs = (int64_t)p->T * p->H * (p->rd / 2);
        if (pairs) rotate_kernel<<<(unsigned)cuda_ceil(pairs, 256), 256, 0, s->cu>>>(*p);
        return cuda_done(s, "index_query");
    }
    switch (p->w) { /* a power of two, at least 32 */
    case 32: launch<1>(s, p); break;
    case 64: launch<2>(s, p); break;
    case 128: launch<4>(s, p); break;
    case 256: launch<8>(s, p); break;
    case 512: launch<16>(s, p); break;
    case 1024: launch<32>(s, p); break;
    default: return TOW_EINVAL;
    }
    return cuda_done(s, "index_query");
}
