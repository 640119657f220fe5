/* kernels/attn/index_query_cuda.cu - index queries: a warp takes as many heads as fit. Reads and
 * writes each value once, which takes five sixths of its time where rows are many.
 *
 * Where rows are many a block has the same heads of one row after the other, and the next row's
 * come to shared memory meanwhile: a warp that waited for memory, then for angles, then for its own
 * long chain of instructions would keep neither memory nor the schedulers busy.
 */
#include "kernels/attn/index_query.cuh"

#include <math.h>

enum {
    THREADS = 256,
    MOST_TURNED = 128, /* rd whose angles have room in shared memory */
    BLOCKS = 4,        /* of a multiprocessor, as registers allow */
};

static __global__ void rotate_kernel(struct kern_index_query p)
{
    const int32_t half = p.rd / 2;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)p.T * p.H * half) return;
    const int64_t row = i / half, n = i % half, t = row / p.H;
    float *q = (float *)p.q + row * p.w + (p.w - p.rd) + 2 * n;
    index_rotate(q[0], q[1], p.cos[t * half + n], p.sin[t * half + n]);
}

/* Of a lane where rows are few; a head has no more lanes than a warp. */
template <int W> static constexpr int PIECES = W < 1024 ? 2 : 4;

/* A block has heads of row blockIdx.x. */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    query_kernel(const __grid_constant__ struct kern_index_query p, float hadamard_scale)
{
    constexpr int P = PIECES<W>, LANES = index_head<W, P>::LANES;
    cuda_hurry();
    cuda_await();
    index_heads<W, P>(p, (int32_t)blockIdx.x, (int32_t)(blockIdx.y * THREADS + threadIdx.x) / LANES,
                      hadamard_scale);
}

static __device__ __forceinline__ void copy_async(void *shared, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
}

/* A block has heads of rows blockIdx.x, + gridDim.x, ... */
template <int W>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    query_rows_kernel(const __grid_constant__ struct kern_index_query p, float hadamard_scale)
{
    constexpr int P = 4, LANES = index_head<W, P>::LANES;
    __shared__ uint4 values[2][P][THREADS];
    __shared__ __align__(16) float angles[2][THREADS / 32][MOST_TURNED]; /* cosines, then sines */
    const int me = threadIdx.x, lane = me % 32, warp = me / 32, half = p.rd / 2;
    const int32_t head = (int32_t)(blockIdx.y * THREADS + threadIdx.x) / LANES;
    const bool is = head < p.H; /* all take part in shuffles */
    const auto at = [&](int32_t t) {
        return (uint4 *)((uint16_t *)p.q + ((int64_t)t * p.H + head) * W) + me % LANES;
    };
    const auto fetch = [&](int32_t t, int turn) {
        if (t < p.T) {
#pragma unroll
            for (int i = 0; i < P; i++)
                if (is) copy_async(&values[turn][i][me], at(t) + i * LANES);
            if (lane * 4 < p.rd) /* half is a multiple of four */
                copy_async(&angles[turn][warp][lane * 4],
                           (lane * 4 < half ? p.cos + lane * 4 : p.sin + lane * 4 - half) +
                               (int64_t)t * half);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    cuda_hurry();
    cuda_await();
    fetch((int32_t)blockIdx.x, 0);
    int turn = 0;
    for (int32_t t = (int32_t)blockIdx.x; t < p.T; t += (int32_t)gridDim.x, turn ^= 1) {
        fetch(t + (int32_t)gridDim.x, turn ^ 1);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp(); /* angles are the warp's */
        float x[8 * P];
        uint32_t v[4 * P];
#pragma unroll
        for (int i = 0; i < P; i++) {
            const uint4 u = values[turn][i][me];
            const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[8 * i + 2 * j] = index_low(w[j]);
                x[8 * i + 2 * j + 1] = index_high(w[j]);
            }
        }
        index_turn<W, P>(x, angles[turn][warp], angles[turn][warp] + half, p.rd, true);
        index_transform<W, P>(x, v, p.fmt, hadamard_scale);
        if (is) {
            uint4 *q = at(t);
#pragma unroll
            for (int i = 0; i < P; i++)
                q[i * LANES] = make_uint4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        }
        __syncwarp(); /* all have read the angles */
    }
}

/* Blocks of a row's heads, P pieces to a lane. */
template <int W, int P> static unsigned row_blocks(const struct kern_index_query *p)
{
    return (unsigned)cuda_ceil((int64_t)p->H * index_head<W, P>::LANES, THREADS);
}
template <int W> static void launch(struct kern_stream *s, const struct kern_index_query *p)
{
    const float scale = (float)(1.0 / sqrt((double)p->w));
    if constexpr (W >= 128) {
        const int32_t blocks = BLOCKS * s->n_sm;
        if (p->T >= 2 * blocks && p->rd <= MOST_TURNED && index_angles_wide(*p)) {
            cuda_launch_early(s, query_rows_kernel<W>, dim3((unsigned)blocks, row_blocks<W, 4>(p)),
                              THREADS, 0, *p, scale);
            return;
        }
    }
    cuda_launch_early(s, query_kernel<W>, dim3((unsigned)p->T, row_blocks<W, PIECES<W>>(p)),
                      THREADS, 0, *p, scale);
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
