/* kernels/hc/boundary_row.cuh - the boundary of four bf16 streams of the deployed width: what its
 * kernel of few rows and that of many do alike, so that a row has the same bits in both.
 *
 * Shares   The sixteen blocks of threads of a cluster divide a row's columns: each has 256 of every
 *          stream, and the weights of fn that belong to them. Eight neighbouring columns are a
 *          piece, four pieces a step, four steps a half.
 * Mixes    An f32 weight is read as the sum of two bf16, which is off by 2^-18 of it at most (a
 *          third would make it exact, and take room that there is not; tf32 is off by 2^-12). The
 *          products of a step - 32 columns of four streams, 128 k - are summed by the matrix unit,
 *          those with the larger parts and with the smaller ones apart, rows on the M side. Of
 *          stream j, instruction i of two has in thread c of a quad the columns 8 c + 4 i + {0, 1}
 *          of the step in slots 2 c, 2 c + 1, and + {2, 3} in slots 2 c + 8, 2 c + 9: so a thread
 *          reads a piece.
 * Sums     Mixes: the two parts; steps of a half, one after the other; halves; blocks. Squares: a
 *          piece, one after the other; then trees over steps, pieces of a step, halves
 *          (dev_pieces_sum), blocks. So rmsnorm does with x.
 */
#ifndef KERN_HC_BOUNDARY_ROW_CUH
#define KERN_HC_BOUNDARY_ROW_CUH

#include "kernels/cuda/tma.cuh"
#include "kernels/hc/boundary.cuh"

enum {
    D = 4096,
    MIXES = (2 + STREAMS) * STREAMS,
    GATED = MIXES - STREAMS, /* post and comb */
    COMB = STREAMS * STREAMS,
    BLOCKS = 16, /* of a cluster: more than every machine must have */
    COLUMNS = D / BLOCKS,
    HALVES = 2,
    STEPS = 4,
    STEP = COLUMNS / HALVES / STEPS, /* columns */
    PARTS = 2,                       /* bf16 of a weight */
    SENT = STREAMS + 1               /* sums that every block needs: mixes of pre, squares */
};
static_assert(STEP == 4 * VEC, "a thread of a quad has a piece");

/* The kernels; the arguments are as cuda_hc_boundary() wants them. False: not on this device. */
bool cuda_hc_boundary_few(struct kern_stream *s, const struct kern_hc_boundary *p);
bool cuda_hc_boundary_many(struct kern_stream *s, const struct kern_hc_boundary *p);

/* Lets a kernel have clusters of BLOCKS; how many the device holds at a time, 0 where it has none.
 * known, most: what was found, asked for once on each device. */
struct cuda_clusters {
    bool known;
    int most;
};
int cuda_hc_clusters(struct kern_stream *s, const void *kernel, unsigned threads, size_t shared,
                     struct cuda_clusters *found);
/* May begin before the kernel before it has ended, see cuda_launch_early(). */
template <typename... P, typename... A>
static inline void cuda_hc_launch(struct kern_stream *s, void (*kernel)(P...), unsigned clusters,
                                  unsigned threads, size_t shared, const A &...args)
{
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = BLOCKS;
    attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(BLOCKS * clusters);
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared;
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = cuda_early_launches ? 2 : 1;
    cudaLaunchKernelEx(&c, kernel, P(args)...);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Two columns of four streams, one word each. post [k], comb [j][k]: the row's gates. */
static __device__ __forceinline__ void expand2(const float4 &post, const float4 comb[STREAMS],
                                               uint32_t y, uint32_t v[STREAMS])
{
    const float y0 = __uint_as_float(y << 16), y1 = __uint_as_float(y & 0xffff0000u);
    const float p[STREAMS] = {post.x, post.y, post.z, post.w};
    float f[STREAMS][2];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        f[j][0] = __uint_as_float(v[j] << 16);
        f[j][1] = __uint_as_float(v[j] & 0xffff0000u);
    }
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        float s0 = p[k] * y0, s1 = p[k] * y1;
#pragma unroll
        for (int j = 0; j < STREAMS; j++) {
            const float c[STREAMS] = {comb[j].x, comb[j].y, comb[j].z, comb[j].w};
            s0 = fmaf(c[k], f[j][0], s0), s1 = fmaf(c[k], f[j][1], s1);
        }
        v[k] = dev_pack2(s0, s1);
    }
}
/* A piece of four streams. */
static __device__ __forceinline__ void expand8(const float4 &post, const float4 comb[STREAMS],
                                               const uint4 &y, uint4 h[STREAMS])
{
    uint32_t v[4][STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
        v[0][j] = h[j].x, v[1][j] = h[j].y, v[2][j] = h[j].z, v[3][j] = h[j].w;
    expand2(post, comb, y.x, v[0]);
    expand2(post, comb, y.y, v[1]);
    expand2(post, comb, y.z, v[2]);
    expand2(post, comb, y.w, v[3]);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) h[j] = make_uint4(v[0][j], v[1][j], v[2][j], v[3][j]);
}
/* A piece of y and the routed sum. */
static __device__ __forceinline__ uint4 add_routed(uint4 y, const float4 &a, const float4 &b)
{
    float f[VEC];
    dev_unpack8(y, f);
    f[0] = a.x + f[0], f[1] = a.y + f[1], f[2] = a.z + f[2], f[3] = a.w + f[3];
    f[4] = b.x + f[4], f[5] = b.y + f[5], f[6] = b.z + f[6], f[7] = b.w + f[7];
    return dev_pack8(f);
}
/* A piece of x with its weights of the norm. */
static __device__ __forceinline__ uint4 norm8(uint4 x, const float4 &a, const float4 &b, float rs)
{
    const float w[VEC] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    float f[VEC];
    dev_unpack8(x, f);
#pragma unroll
    for (int e = 0; e < VEC; e++) f[e] = w[e] * (f[e] * rs);
    return dev_pack8(f);
}

/* Four bf16. */
static __device__ __forceinline__ float4 widen4(uint2 v)
{
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                       __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
}

/* The sum over blocks by lanes 0..15 and 16..31, which hold the same, or by eight lanes that hold
 * the sum of blocks b and b + 8. */
template <int LANES> static __device__ __forceinline__ float sum_of_blocks(float v)
{
#pragma unroll
    for (int m = LANES / 2; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}
/* The same where a lane has every second block, and lane ^ 16 the others. */
static __device__ __forceinline__ float sum_of_every_second(const float v[BLOCKS / 2])
{
    const float s = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
    return s + __shfl_xor_sync(0xffffffffu, s, 16);
}

static __device__ __forceinline__ float inverse_rms(float squares, int n, float eps)
{
    return 1.0f / sqrtf(squares / (float)n + eps);
}
static __device__ __forceinline__ float pre_of(float mix, float rs, float scale, float base,
                                               float eps)
{
    return dev_sigmoid(fmaf(mix * rs, scale, base)) + eps;
}

template <int N> static __device__ __forceinline__ float tree(const float *v)
{
    if constexpr (N == 1)
        return v[0];
    else
        return tree<N / 2>(v) + tree<N / 2>(v + N / 2);
}
/* Of values by blocks, ld apart. */
static __device__ __forceinline__ float sum_by_one(const float *of, int ld)
{
    float v[BLOCKS];
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) v[k] = of[k * ld];
    return tree<BLOCKS>(v);
}
/* What the mixes of a row say about post and comb, as far as lanes can work side by side; by one
 * warp. Lane 4 j + k returns comb[j][k] after the softmax and the first division of columns, lane
 * 16 + k post[k]; mix: the sum of the lane's. */
static __device__ __forceinline__ int gated_of(int lane)
{
    return lane < COMB ? STREAMS + lane : lane % STREAMS;
}
static __device__ __forceinline__ float begin_gates(const struct kern_hc_boundary &p, float mix,
                                                    float rs, float scale, float base, int lane)
{
    const float x = fmaf(mix * rs, scale, base);
    float top = x;
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float e = dev_exp(lane < COMB ? x - top : -x);
    float sum = e + __shfl_xor_sync(0xffffffffu, e, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    float c = (lane < COMB ? e : 2.0f) / (lane < COMB ? sum : 1.0f + e);
    if (lane < COMB) c += p.hc_eps;
    sum = c + __shfl_xor_sync(0xffffffffu, c, 4);
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    if (lane < COMB && p.iters > 0) c *= __fdividef(1.0f, sum + p.hc_eps);
    return c;
}
/* The rest of it for row t, by one thread; kept: what the lanes had. */
static __device__ __forceinline__ void finish_gates(const struct kern_hc_boundary &p,
                                                    const float *kept, int64_t t)
{
    float c[COMB];
#pragma unroll
    for (int k = 0; k < COMB; k++) c[k] = kept[k];
    sinkhorn_rounds<STREAMS>(c, STREAMS, p.iters, p.hc_eps);
    float *const post = p.post + t * STREAMS, *const comb = p.comb + t * COMB;
#pragma unroll
    for (int k = 0; k < STREAMS; k++) post[k] = kept[COMB + k];
#pragma unroll
    for (int k = 0; k < COMB; k++) comb[k] = c[k];
}

#endif /* sm_90a */
#endif
