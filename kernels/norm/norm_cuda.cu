/* kernels/norm/norm_cuda.cu - row norms and rotations.
 *
 * rmsnorm      A block a row; a thread holds two vectors of eight from the first pass to the
 *              second. Which elements a thread adds depends on D alone, whatever the alignment of a
 *              row: squares of eight, then 32 of these by one tree and the sums of 256 by another,
 *              as hc_boundary does.
 * heads_rope   At the deployed width a warp takes four heads: it loads them whole (eight 16-byte
 *              loads in flight), leaves the rounded squares in shared memory and adds those up as
 *              the CPU does, eight threads a head; a head's values never leave registers. Without
 *              the norm only the rotated end is read and written. Other widths: a warp a head, in
 *              shared memory.
 * kv_prep      A warp a row, in shared memory: a sixteenth of what heads_rope moves.
 * All are bound by memory: each value is read once and written once.
 */
#include "kernels/norm/heads.cuh"

/* ------------------------------------------------------------------ rmsnorm */

enum { KEPT = 2, NORM_MAX_THREADS = 512 };

/* Elements i .. i+7 of a row of n; beyond it zeros. */
template <bool WIDE>
static __device__ __forceinline__ void load8(const void *x, int64_t i, int64_t n, enum kern_dtype t,
                                             float f[VEC])
{
    if (WIDE && t == KERN_BF16) {
        dev_unpack8(*(const uint4 *)((const uint16_t *)x + i), f);
    } else if (WIDE) {
        const float4 a = *(const float4 *)((const float *)x + i);
        const float4 b = *(const float4 *)((const float *)x + i + 4);
        f[0] = a.x, f[1] = a.y, f[2] = a.z, f[3] = a.w;
        f[4] = b.x, f[5] = b.y, f[6] = b.z, f[7] = b.w;
    } else {
#pragma unroll
        for (int k = 0; k < VEC; k++) f[k] = i + k < n ? dev_load(x, i + k, t) : 0.0f;
    }
}
template <bool WIDE>
static __device__ __forceinline__ void store8(void *y, int64_t i, int64_t n, enum kern_dtype t,
                                              const float f[VEC])
{
    if (WIDE && t == KERN_BF16) {
        *(uint4 *)((uint16_t *)y + i) = dev_pack8(f);
    } else if (WIDE) {
        *(float4 *)((float *)y + i) = make_float4(f[0], f[1], f[2], f[3]);
        *(float4 *)((float *)y + i + 4) = make_float4(f[4], f[5], f[6], f[7]);
    } else {
#pragma unroll
        for (int k = 0; k < VEC; k++)
            if (i + k < n) dev_store(y, i + k, t, f[k]);
    }
}

static __device__ __forceinline__ float add_squares(float s, const float f[VEC])
{
#pragma unroll
    for (int k = 0; k < VEC; k++) s = fmaf(f[k], f[k], s);
    return s;
}

template <bool WIDE>
static __device__ __forceinline__ void norm8(const struct kern_rmsnorm &p, void *y, int64_t i,
                                             const float f[VEC], const float w[VEC], float rs)
{
    float o[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) o[k] = w[k] * (f[k] * rs);
    store8<WIDE>(y, i, p.D, p.act, o);
}

template <bool WIDE>
static __global__ void __launch_bounds__(NORM_MAX_THREADS) rmsnorm_kernel(struct kern_rmsnorm p)
{
    __shared__ float parts[KEPT * NORM_MAX_THREADS / 32];
    const int64_t t = blockIdx.x, step = (int64_t)blockDim.x * VEC, D = p.D;
    const int64_t b = p.act == KERN_F32 ? 4 : 2;
    const uint8_t *x = (const uint8_t *)p.x + t * p.ld_x * b;
    uint8_t *y = (uint8_t *)p.y + t * p.ld_y * b;
    const int64_t i0 = (int64_t)threadIdx.x * VEC;
    cuda_hurry();
    cuda_await();
    float kept[KEPT][VEC], w[KEPT][VEC], s[KEPT] = {};
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (i0 + k * step < D) {
            load8<WIDE>(x, i0 + k * step, D, p.act, kept[k]);
            load8<WIDE>(p.w.data, i0 + k * step, D, p.w.dtype, w[k]);
        }
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (i0 + k * step < D) s[k] = add_squares(0.0f, kept[k]);
    for (int64_t i = i0 + KEPT * step; i < D; i += step) { /* rows wider than 8192 */
        float f[VEC];
        load8<WIDE>(x, i, D, p.act, f);
        s[KEPT - 1] = add_squares(s[KEPT - 1], f);
    }
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        s[k] = dev_pieces_sum(s[k]);
        if (threadIdx.x % 32 == 0) parts[(k * blockDim.x + threadIdx.x) / 32] = s[k];
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const float sum = dev_warp_sum(lane < KEPT * (int)blockDim.x / 32 ? parts[lane] : 0.0f);
    const float rs = 1.0f / sqrtf(sum / (float)p.D + p.eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (i0 + k * step < D) norm8<WIDE>(p, y, i0 + k * step, kept[k], w[k], rs);
    for (int64_t i = i0 + KEPT * step; i < D; i += step) {
        float f[VEC], g[VEC];
        load8<WIDE>(x, i, D, p.act, f);
        load8<WIDE>(p.w.data, i, D, p.w.dtype, g);
        norm8<WIDE>(p, y, i, f, g, rs);
    }
}

extern "C" int kern_rmsnorm_cuda(struct kern_stream *s, const struct kern_rmsnorm *p)
{
    if (p->T == 0) return 0;
    int64_t threads = cuda_ceil(cuda_ceil(p->D, VEC * KEPT), 32) * 32;
    if (threads > NORM_MAX_THREADS) threads = NORM_MAX_THREADS;
    const bool wide = p->D % VEC == 0 && p->ld_x % VEC == 0 && p->ld_y % VEC == 0 &&
                      cuda_aligned16(p->x) && cuda_aligned16(p->y) && cuda_aligned16(p->w.data);
    if (wide)
        cuda_launch_early(s, rmsnorm_kernel<true>, dim3((unsigned)p->T), (unsigned)threads, 0, *p);
    else
        cuda_launch_early(s, rmsnorm_kernel<false>, dim3((unsigned)p->T), (unsigned)threads, 0, *p);
    return cuda_done(s, "rmsnorm");
}

/* ------------------------------------------------------------------ rope_table */

static __global__ void rope_table_kernel(struct kern_rope_table p)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int32_t h = p.rd / 2;
    if (i >= (int64_t)p.T * h) return;
    dev_cos_sin((float)p.pos[i / h] * p.inv_freq[i % h], &p.cos[i], &p.sin[i]);
}

extern "C" int kern_rope_table_cuda(struct kern_stream *s, const struct kern_rope_table *p)
{
    if (p->T == 0 || p->rd == 0) return 0;
    const int64_t blocks = cuda_ceil((int64_t)p->T * (p->rd / 2), 128);
    rope_table_kernel<<<(unsigned)blocks, 128, 0, s->cu>>>(*p);
    return cuda_done(s, "rope_table");
}

/* ------------------------------------------------------------------ heads_rope */

static __global__ void __launch_bounds__(128) heads_norm_kernel(struct kern_heads_rope p)
{
    __shared__ __align__(16) uint32_t shared[4][HEADS * HEAD_WORDS];
    cuda_hurry();
    cuda_await();
    heads_norm(p, ((int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * HEADS,
               shared[threadIdx.x / 32]);
}

/* Only the rotated ends: a thread takes eight values of a head. */
static __global__ void rotate_ends_kernel(struct kern_heads_rope p)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int32_t vecs = p.rd / VEC;
    cuda_hurry();
    cuda_await();
    if (i >= (int64_t)p.T * p.H * vecs) return;
    const int64_t head = i / vecs;
    const int32_t e = (int32_t)(i % vecs) * VEC;
    const int64_t a = head / p.H * (p.rd / 2) + e / 2;
    uint4 *const q = (uint4 *)((uint16_t *)p.q + head * p.d + p.d - p.rd + e);
    float f[VEC];
    dev_unpack8(*q, f);
    rotate8(f, p.cos + a, p.sin + a, p.inverse ? -1.0f : 1.0f);
    *q = dev_pack8(f);
}

/* Any width and type: a warp a head. */
static __global__ void heads_any_kernel(struct kern_heads_rope p, int32_t row_floats)
{
    extern __shared__ __align__(16) float rows[];
    float *const row = rows + threadIdx.x / 32 * row_floats;
    const int me = threadIdx.x & 31;
    const int64_t i = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= (int64_t)p.T * p.H) return;
    const int64_t angles = i / p.H * (p.rd / 2);
    void *const q =
        p.act == KERN_F32 ? (void *)((float *)p.q + i * p.d) : (void *)((uint16_t *)p.q + i * p.d);
    dev_row_load<32>(q, p.act, p.d, row, me);
    if (p.norm) {
        float f;
        if (p.act == KERN_BF16) {
            const float ms = kern_bf16_round(dev_row_sumsq_bf16(row, p.d) / (float)p.d);
            f = kern_bf16_round(1.0f / sqrtf(kern_bf16_round(ms + p.eps)));
        } else {
            f = 1.0f / sqrtf(dev_row_sumsq(row, p.d) / (float)p.d + p.eps);
        }
        __syncwarp();
        for (int32_t e = me; e < p.d; e += 32) row[e] = dev_round(row[e] * f, p.act);
        __syncwarp();
    }
    dev_row_rotate<32>(row + p.d - p.rd, p.cos + angles, p.sin + angles, p.rd,
                       p.inverse ? -1.0f : 1.0f, p.act, me);
    dev_row_store<32>(q, p.act, p.d, row, me);
}

/* Warps of a block that works on rows of shared memory, up to four. */
static int row_warps(int32_t row_floats)
{
    int w = 4;
    while (w > 1 && w * row_floats * 4 > 48 << 10) w /= 2;
    return w;
}
static int32_t row_floats_of(int32_t n)
{
    return (int32_t)cuda_ceil(n, 4) * 4;
}

extern "C" int kern_heads_rope_cuda(struct kern_stream *s, const struct kern_heads_rope *p)
{
    if (p->T == 0) return 0;
    const int64_t n = (int64_t)p->T * p->H;
    const bool wide = heads_are_wide(p);
    if (wide && !p->norm) {
        if (p->rd == 0) return 0;
        const int64_t blocks = cuda_ceil(n * (p->rd / VEC), 256);
        cuda_launch_early(s, rotate_ends_kernel, dim3((unsigned)blocks), 256, 0, *p);
    } else if (wide && p->d == HEAD) {
        /* Few heads: a warp a block, so that they lie on as many multiprocessors as there are. */
        const int warps = n >= (int64_t)HEADS * 4 * s->n_sm ? 4 : 1;
        cuda_launch_early(s, heads_norm_kernel, dim3((unsigned)cuda_ceil(n, HEADS * warps)),
                          32u * warps, 0, *p);
    } else {
        const int32_t floats = row_floats_of(p->d);
        const int warps = row_warps(floats);
        CUDA_SHARED(heads_any_kernel, s->max_shared);
        heads_any_kernel<<<(unsigned)cuda_ceil(n, warps), 32 * warps, (size_t)warps * floats * 4,
                           s->cu>>>(*p, floats);
    }
    return cuda_done(s, "heads_rope");
}

/* ------------------------------------------------------------------ kv_prep */

static __global__ void kv_prep_kernel(struct kern_kv_prep p, int32_t row_floats)
{
    extern __shared__ __align__(16) float rows[];
    float *const row = rows + threadIdx.x / 32 * row_floats;
    const int me = threadIdx.x & 31;
    const int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    cuda_hurry();
    cuda_await();
    if (t >= p.T) return;
    const int64_t at = t * p.d * (p.act == KERN_F32 ? 4 : 2), angles = t * (p.rd / 2);
    dev_row_load<32>((const uint8_t *)p.x + at, p.act, p.d, row, me);
    dev_row_rmsnorm<32>(row, p.d, p.eps, p.w, p.act, me);
    /* The rotated end is rounded where the CPU rounds it: on store, once. */
    dev_row_rotate<32>(row + p.d - p.rd, p.cos + angles, p.sin + angles, p.rd, 1.0f, p.act, me);
    if (p.act == KERN_BF16) dev_row_e4m3<32>(row, p.d - p.rd, 64, me);
    dev_row_store<32>((uint8_t *)p.y + at, p.act, p.d, row, me);
}

extern "C" int kern_kv_prep_cuda(struct kern_stream *s, const struct kern_kv_prep *p)
{
    if (p->T == 0) return 0;
    const int32_t floats = row_floats_of(p->d);
    const int warps = p->T >= 4 * s->n_sm ? row_warps(floats) : 1;
    CUDA_SHARED(kv_prep_kernel, s->max_shared);
    cuda_launch_early(s, kv_prep_kernel, dim3((unsigned)cuda_ceil(p->T, warps)), 32u * warps,
                      (size_t)warps * floats * 4, *p, floats);
    return cuda_done(s, "kv_prep");
}
