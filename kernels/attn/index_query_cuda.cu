/* kernels/attn/index_query_cuda.cu - index queries: a warp takes as many heads as fit. Reads and
 * writes each value once; that is all its time. */
#include "kernels/attn/index_query.cuh"

#include <math.h>

enum { THREADS = 256 };

static __global__ void rotate_kernel(struct kern_index_query p)
{
    const int32_t half = p.rd / 2;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)p.T * p.H * half) return;
    const int64_t row = i / half, n = i % half, t = row / p.H;
    float *q = (float *)p.q + row * p.w + (p.w - p.rd) + 2 * n;
    index_rotate(q[0], q[1], p.cos[t * half + n], p.sin[t * half + n]);
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    query_kernel(const __grid_constant__ struct kern_index_query p, float hadamard_scale)
{
    cuda_hurry();
    cuda_await();
    index_heads<W>(p, (int64_t)blockIdx.x * THREADS + threadIdx.x, hadamard_scale);
}

template <int W> static void launch(struct kern_stream *s, const struct kern_index_query *p)
{
    const int64_t threads = (int64_t)p->T * p->H * index_head<W>::LANES;
    cuda_launch_early(s, query_kernel<W>, dim3((unsigned)cuda_ceil(threads, THREADS)), THREADS, 0,
                      *p, (float)(1.0 / sqrt((double)p->w)));
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
    case 32: launch<32>(s, p); break;
    case 64: launch<64>(s, p); break;
    case 128: launch<128>(s, p); break;
    case 256: launch<256>(s, p); break;
    case 512: launch<512>(s, p); break;
    case 1024: launch<1024>(s, p); break;
    default: return TOW_EINVAL;
    }
    return cuda_done(s, "index_query");
}
