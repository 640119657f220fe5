/* kernels/gemm/many_cuda.cu - many rows of activations times placed weights: the prefill product
 * where none goes by wgmma.
 *
 * A block of eight warps makes a tile of weight rows x rows of activations. Groups of 64 k of both
 * go through a ring in shared memory, the codes as they are stored; a warp turns its 16 weight rows
 * at a time into bf16 in registers, so fp8 costs half the shared memory traffic of bf16, and
 * multiplies them with all its columns. Block sums and their chain are both in registers. The
 * finished tile goes back through shared memory, transposed, so that rows of y are written in wide
 * pieces.
 * No split of k: the order of sums allows none across blocks of threads. Where that leaves most of
 * the machine idle, few_cuda.cu takes the product (cuda_few_fits).
 */
#include "kernels/gemm/product.cuh"

enum { WARPS = 8, THREADS = 32 * WARPS, X_LD = GROUP_K + 8 /* pad: rows fall into other banks */ };

/* A warp has MT x 16 weight rows and NT x 8 columns; WM x (WARPS / WM) warps; S groups in the
 * ring. */
template <enum kern_wfmt F, int MT, int NT, int WM, int S> struct tile {
    enum {
        M = MT * 16 * WM,
        N = NT * 8 * (WARPS / WM),
        ROW = weights16<F>::ROW,
        W_LD = ROW >= 128 ? ROW + 16 : ROW, /* narrower rows spread over the banks by themselves */
        W_BYTES = M * W_LD,
        STAGE = W_BYTES + N * X_LD * 2,
        RING = S * STAGE,
        OUT_LD = M + 8,
        OUT = N * OUT_LD * 4,
        BYTES = RING > OUT ? RING : OUT,
    };
    static_assert(BYTES <= 99 * 1024, "fits a block of threads of sm_120");
};

static __device__ __forceinline__ void put16(uint32_t *to, uint4 v)
{
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

template <enum kern_wfmt F, int MT, int NT, int WM, int S>
static __global__ void __launch_bounds__(THREADS, MT *NT >= 8 ? 1 : 2)
    many_kernel(struct cuda_product p)
{
    using C = struct tile<F, MT, NT, WM, S>;
    enum { EACH = weights16<F>::EACH, W_CHUNKS = C::ROW / 16, X_CHUNKS = GROUP_K * 2 / 16 };
    extern __shared__ __align__(128) uint8_t shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int wm = warp % WM, wn = warp / WM;
    const int32_t n_cta = blockIdx.x * C::M, t_cta = blockIdx.y * C::N;
    const int64_t row_cta = (int64_t)blockIdx.z * p.N + n_cta;
    const uint16_t *x_cta = p.x + (int64_t)t_cta * p.ld_x + blockIdx.z * p.x_group;
    const int32_t n_groups = (p.K + GROUP_K - 1) / GROUP_K;

    const int w_last = (p.N - n_cta < C::M ? p.N - n_cta : C::M) - 1;
    const int x_last = (p.T - t_cta < C::N ? p.T - t_cta : C::N) - 1;
    const uint8_t *w_cta = p.w + row_cta * p.row_bytes;
    const auto fetch = [&](int32_t q, int slot) {
        uint8_t *w = shared + slot * C::STAGE;
        const int32_t w_at = q * C::ROW + threadIdx.x % W_CHUNKS * 16;
        fetch_rows<C::M, W_CHUNKS, C::W_LD, THREADS, false>(
            w, w_cta + (int64_t)q * C::ROW, (uint32_t)p.row_bytes, w_last, w_at < p.row_bytes);
        const int32_t k = q * GROUP_K + threadIdx.x % X_CHUNKS * 8;
        fetch_rows<C::N, X_CHUNKS, X_LD * 2, THREADS, false>(
            w + C::W_BYTES, (const uint8_t *)(x_cta + q * GROUP_K), (uint32_t)p.ld_x * 2, x_last,
            k < p.Kx);
    };

    float sum[MT][NT][4], total[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) total[m][n][e] = 0;
#pragma unroll
    for (int q = 0; q < S - 1; q++) {
        if (q < n_groups) fetch(q, q);
        dev_copy_commit();
    }
    int slot = 0;
    for (int32_t q = 0; q < n_groups; q++) {
        dev_copy_wait<S - 2>();
        __syncthreads();
        if (q + S - 1 < n_groups) fetch(q + S - 1, slot == 0 ? S - 1 : slot - 1);
        dev_copy_commit();
        const uint8_t *w = shared + slot * C::STAGE;
        const uint16_t *x = (const uint16_t *)(w + C::W_BYTES);
        slot = slot == S - 1 ? 0 : slot + 1;
        uint32_t xs[NT][8];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint16_t *from = x + ((wn * NT + n) * 8 + g) * X_LD + c * 16;
            put16(xs[n], *(const uint4 *)from);
            put16(xs[n] + 4, *(const uint4 *)(from + 8));
        }
        if (q % 2 == 0) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[m][n][e] = 0;
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            struct weights16<F> ws;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int at = (wm * MT + m) * 16 + g + 8 * r;
                const uint8_t *from = w + at * C::W_LD + c * EACH;
                if (EACH == 8) {
                    const uint2 v = *(const uint2 *)from;
                    ws.v[r][0] = v.x, ws.v[r][1] = v.y;
                } else {
#pragma unroll
                    for (int i = 0; i < EACH / 16; i++)
                        put16(&ws.v[r][4 * i], *(const uint4 *)(from + 16 * i));
                }
                ws.factor[r] = n_cta + at < p.N ? weight_factor<F>(p, row_cta + at, q, c) : 0;
            }
            weights_times<F, NT>(sum[m], ws, xs);
        }
        if (q % 2 == 0 && q + 1 < n_groups) continue;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int at = (wm * MT + m) * 16 + g + 8 * r;
                float sc = 1.0f;
                if (F == KERN_W_FP8)
                    sc = n_cta + at < p.N ? block_scale(p, (row_cta + at) / BLOCK_N, q / 2) : 0.0f;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++)
                        total[m][n][e] = fmaf(sum[m][n][e], sc, total[m][n][e]);
            }
    }
    dev_copy_wait<0>();
    __syncthreads();

    float *out = (float *)shared;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = (wm * MT + m) * 16 + g + 8 * r;
            const bool there = n_cta + at < p.N;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    out[((wn * NT + n) * 8 + 2 * c + e) * C::OUT_LD + at] =
                        there ? finished<F>(p, row_cta + at, total[m][n][2 * r + e]) : 0.0f;
        }
    __syncthreads();
    store_tile<C::M, C::N, C::OUT_LD, THREADS>(p, out, n_cta, t_cta, row_cta);
}

template <enum kern_wfmt F, int MT, int NT, int WM, int S>
static void launch(struct kern_stream *s, const struct cuda_product *p)
{
    using C = struct tile<F, MT, NT, WM, S>;
    const dim3 grid((unsigned)cuda_ceil(p->N, C::M), (unsigned)cuda_ceil(p->T, C::N),
                    (unsigned)p->groups);
    CUDA_SHARED((many_kernel<F, MT, NT, WM, S>), C::BYTES);
    many_kernel<F, MT, NT, WM, S><<<grid, THREADS, C::BYTES, s->cu>>>(*p);
}

/* Large tiles where they fill the machine; else what has the most of them. */
static bool fills(const struct kern_stream *s, const struct cuda_product *p, int m, int n)
{
    return cuda_ceil(p->N, m) * cuda_ceil(p->T, n) * p->groups >= s->n_sm;
}

void cuda_product_many(struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    const bool big = p->T > 64 && fills(s, p, 128, 128), small = p->T <= 32;
    switch (fmt) {
    case KERN_W_F32: launch<KERN_W_F32, 1, 4, 4, 3>(s, p); break;
    case KERN_W_BF16:
        if (big)
            launch<KERN_W_BF16, 4, 2, 2, 3>(s, p);
        else if (small)
            launch<KERN_W_BF16, 1, 2, 4, 6>(s, p);
        else
            launch<KERN_W_BF16, 1, 4, 4, 4>(s, p);
        break;
    case KERN_W_FP8:
        if (big)
            launch<KERN_W_FP8, 4, 4, 2, 3>(s, p);
        else if (small)
            launch<KERN_W_FP8, 1, 2, 4, 8>(s, p);
        else
            launch<KERN_W_FP8, 1, 4, 4, 6>(s, p);
        break;
    case KERN_W_MXFP4: launch<KERN_W_MXFP4, 1, 4, 4, 6>(s, p); break;
    case KERN_W_NVFP4: launch<KERN_W_NVFP4, 1, 4, 4, 6>(s, p); break;
    }
}
