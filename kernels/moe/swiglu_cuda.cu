/* kernels/moe/swiglu_cuda.cu - the element-wise ops beside the experts: swiglu and add.
 *
 * A thread takes eight neighbouring elements, 16 bytes of bf16 at a time; tensors that are not
 * aligned for that, and the end of one, go element by element.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/math.cuh"

enum { THREADS = 256, EACH = 8 };

struct eight {
    float v[EACH];
};

static __device__ __forceinline__ struct eight load_eight(const void *x, int64_t i,
                                                          enum kern_dtype t)
{
    struct eight r;
    if (t == KERN_F32) {
        const float4 a = *(const float4 *)((const float *)x + i);
        const float4 b = *(const float4 *)((const float *)x + i + 4);
        r.v[0] = a.x, r.v[1] = a.y, r.v[2] = a.z, r.v[3] = a.w;
        r.v[4] = b.x, r.v[5] = b.y, r.v[6] = b.z, r.v[7] = b.w;
        return r;
    }
    const uint4 a = *(const uint4 *)((const uint16_t *)x + i);
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < EACH; j++)
        r.v[j] = kern_float(j % 2 ? w[j / 2] & 0xffff0000u : w[j / 2] << 16);
    return r;
}
static __device__ __forceinline__ void store_eight(void *y, int64_t i, enum kern_dtype t,
                                                   const struct eight &r)
{
    if (t == KERN_F32) {
        *(float4 *)((float *)y + i) = make_float4(r.v[0], r.v[1], r.v[2], r.v[3]);
        *(float4 *)((float *)y + i + 4) = make_float4(r.v[4], r.v[5], r.v[6], r.v[7]);
        return;
    }
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        w[j] = kern_bf16_encode(r.v[2 * j]) | (uint32_t)kern_bf16_encode(r.v[2 * j + 1]) << 16;
    *(uint4 *)((uint16_t *)y + i) = make_uint4(w[0], w[1], w[2], w[3]);
}

static __device__ __forceinline__ float element(const struct kern_swiglu &p, float g, float u)
{
    return dev_gate(g, u, p.limit);
}
static __device__ __forceinline__ float element(const struct kern_add &, float a, float b)
{
    return a + b;
}

/* y[i] = element(a[i], b[i]). */
template <typename P>
static __global__ void __launch_bounds__(THREADS)
    each_kernel(P p, const void *a, enum kern_dtype a_type, const void *b, enum kern_dtype b_type,
                void *y, enum kern_dtype y_type, int64_t n, bool aligned)
{
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EACH;
    if (aligned && i + EACH <= n) {
        const struct eight l = load_eight(a, i, a_type), r = load_eight(b, i, b_type);
        struct eight o;
#pragma unroll
        for (int j = 0; j < EACH; j++) o.v[j] = element(p, l.v[j], r.v[j]);
        store_eight(y, i, y_type, o);
        return;
    }
    for (int64_t j = i; j < i + EACH && j < n; j++)
        dev_store(y, j, y_type, element(p, dev_load(a, j, a_type), dev_load(b, j, b_type)));
}

template <typename P>
static int launch(struct kern_stream *s, const P *p, const void *a, enum kern_dtype a_type,
                  const void *b, enum kern_dtype b_type, void *y, enum kern_dtype y_type, int64_t n,
                  const char *op)
{
    const bool aligned = (((uintptr_t)a | (uintptr_t)b | (uintptr_t)y) & 15) == 0;
    if (n == 0) return 0;
    each_kernel<P><<<(unsigned)cuda_ceil(n, THREADS * EACH), THREADS, 0, s->cu>>>(
        *p, a, a_type, b, b_type, y, y_type, n, aligned);
    return cuda_done(s, op);
}

extern "C" int kern_swiglu_cuda(struct kern_stream *s, const struct kern_swiglu *p)
{
    return launch(s, p, p->g, p->act, p->u, p->act, p->y, p->act, (int64_t)p->T * p->I, "swiglu");
}
extern "C" int kern_add_cuda(struct kern_stream *s, const struct kern_add *p)
{
    return launch(s, p, p->a, KERN_F32, p->b, p->act, p->y, p->act, p->n, "add");
}
