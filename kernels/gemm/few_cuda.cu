/* kernels/gemm/few_cuda.cu - up to eight rows of activations times placed weights: the decode product.
 *
 * A warp streams 16 weight rows from memory straight into registers, several groups of 64 k ahead, so
 * that enough bytes are under way without a barrier; eight columns of activations, or fewer, are the
 * other operand. The warps of a block share out the rows and the blocks of 128 k; each block's sum goes
 * to shared memory, and at the end one thread per output adds them in ascending order. That order knows
 * nothing of how many warps there were.
 */
#include "kernels/gemm/product.cuh"

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    ROWS = 16,   /* of a warp */
    COL_LD = 20, /* floats from column to column of a block's sums: quads fall into other banks */
    SUMS = 64,   /* block sums of a tile of rows kept at once */
    SPAN_ROWS = WARPS * ROWS,
};
static_assert((int)SPAN_ROWS <= (int)BLOCK_N,
              "rows of a block of threads have at most two rows of scales");

/* Groups under way, an even number: 4 KiB of weights a warp or more, as registers allow. */
template <enum kern_wfmt F> struct depth {
    enum { D = F == KERN_W_F32 || F == KERN_W_BF16 ? 2 : 4 };
};

template <enum kern_wfmt F> struct stage {
    struct weights16<F> w;
    uint32_t x[8];
};

static __device__ __forceinline__ void put16(uint32_t *to, uint4 v)
{
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

/* What a thread reads: its place in two weight rows and one column of x. */
struct reader {
    const uint8_t *w[2];
    const uint16_t *x;
    int64_t row[2]; /* of groups * N */
    bool there[2], x_there;
    int c;
};

template <enum kern_wfmt F>
static __device__ __forceinline__ void load(const struct cuda_product &p, const struct reader &rd,
                                            int32_t q, struct stage<F> &s)
{
    enum { EACH = weights16<F>::EACH, ROW = weights16<F>::ROW };
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t at = q * (int64_t)ROW + rd.c * EACH;
        if (EACH == 8) {
            uint2 v = make_uint2(0, 0);
            if (rd.there[r] && at + 8 <= p.row_bytes) v = dev_stream8(rd.w[r] + at);
            s.w.v[r][0] = v.x, s.w.v[r][1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < EACH / 16; i++) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (rd.there[r] && at + 16 * i + 16 <= p.row_bytes)
                    v = dev_stream16(rd.w[r] + at + 16 * i);
                put16(&s.w.v[r][4 * i], v);
            }
        }
        s.w.factor[r] = rd.there[r] ? weight_factor<F>(p, rd.row[r], q, rd.c) : 0;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t k = q * GROUP_K + rd.c * 16 + 8 * i;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (rd.x_there && k < p.Kx) v = __ldg((const uint4 *)(rd.x + k));
        put16(&s.x[4 * i], v);
    }
}

/* kw warps share the blocks of k, WARPS / kw have rows of their own. */
template <enum kern_wfmt F>
static __global__ void __launch_bounds__(THREADS, 2) few_kernel(struct cuda_product p, int kw)
{
    enum { D = depth<F>::D };
    extern __shared__ float shared[]; /* scales [2][SUMS], sums [rw][SUMS at most][T][COL_LD] */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int rw = WARPS / kw, my_k = warp % kw, my_r = warp / kw;
    const int32_t t0 = blockIdx.z * CUDA_FEW_ROWS;
    const int32_t T = p.T - t0 < CUDA_FEW_ROWS ? p.T - t0 : CUDA_FEW_ROWS;
    const int32_t n_cta = blockIdx.x * ROWS * rw; /* first row of this block, in its group */
    const int64_t first = (int64_t)blockIdx.y * p.N + n_cta;
    const int32_t n_groups = (p.K + GROUP_K - 1) / GROUP_K, n_blocks = (n_groups + 1) / 2;
    const int32_t held = n_blocks < SUMS ? n_blocks : SUMS, sum_ld = T * COL_LD;
    float *scales = shared, *sums = shared + 2 * SUMS;
    struct reader rd;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t n = n_cta + my_r * ROWS + g + 8 * r;
        rd.there[r] = n < p.N;
        rd.row[r] = (int64_t)blockIdx.y * p.N + n;
        rd.w[r] = p.w + rd.row[r] * p.row_bytes;
    }
    rd.x_there = g < T;
    rd.x = p.x + (int64_t)(t0 + g) * p.ld_x + blockIdx.y * p.x_group;
    rd.c = c;

    /* The output that this thread finishes; there are at most THREADS / 2 a column half. */
    const int n_out = rw * ROWS * T;
    float total[4] = {0, 0, 0, 0}; /* outputs threadIdx.x + THREADS i */

    for (int32_t b0 = 0; b0 < n_blocks; b0 += SUMS) {
        const int32_t nb = n_blocks - b0 < SUMS ? n_blocks - b0 : SUMS;
        const int32_t mine = my_k < nb ? (nb - my_k + kw - 1) / kw : 0, m = 2 * mine;
        struct stage<F> st[D];
#define GROUP_OF(j) (2 * (b0 + my_k + kw * ((j) / 2)) + (j) % 2)
#pragma unroll
        for (int d = 0; d < D; d++)
            if (d < m) load<F>(p, rd, GROUP_OF(d), st[d]);
        if (F == KERN_W_FP8)
            for (int i = threadIdx.x; i < 2 * nb; i += THREADS) {
                const int64_t row = first / BLOCK_N + i / nb;
                const bool there = row * BLOCK_N < (int64_t)p.groups * p.N;
                scales[i / nb * SUMS + i % nb] = there ? block_scale(p, row, b0 + i % nb) : 0;
            }
        float sum[4] = {0, 0, 0, 0};
        for (int32_t j0 = 0; j0 < m; j0 += D) {
#pragma unroll
            for (int d = 0; d < D; d++) {
                const int32_t j = j0 + d;
                if (j >= m) break;
                if (GROUP_OF(j) < n_groups) weights_times<F>(sum, st[d].w, st[d].x);
                if (j + D < m) load<F>(p, rd, GROUP_OF(j + D), st[d]);
                if (d % 2 == 0) continue;
                float *to = sums + (my_r * held + my_k + kw * (j / 2)) * sum_ld + g;
                if (2 * c < T) to[2 * c * COL_LD] = sum[0], to[2 * c * COL_LD + 8] = sum[2];
                if (2 * c + 1 < T)
                    to[(2 * c + 1) * COL_LD] = sum[1], to[(2 * c + 1) * COL_LD + 8] = sum[3];
                sum[0] = sum[1] = sum[2] = sum[3] = 0;
            }
        }
#undef GROUP_OF
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int o = threadIdx.x + THREADS * i;
            if (o >= n_out) break;
            const int r = o % ROWS, t = o / ROWS % T, tile = o / (ROWS * T);
            const int64_t row = first + tile * ROWS + r;
            const float *from = sums + tile * held * sum_ld + t * COL_LD + r;
            const float *sc = scales + (row / BLOCK_N - first / BLOCK_N) * SUMS;
#pragma unroll 8
            for (int32_t b = 0; b < nb; b++)
                total[i] = fmaf(from[b * sum_ld], F == KERN_W_FP8 ? sc[b] : 1.0f, total[i]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int o = threadIdx.x + THREADS * i;
        if (o >= n_out) break;
        const int r = o % ROWS, t = o / ROWS % T, tile = o / (ROWS * T);
        const int32_t n = n_cta + tile * ROWS + r;
        if (n < p.N)
            dev_store(p.y, (t0 + t) * p.ld_y + (int64_t)blockIdx.y * p.N + n, p.y_dtype,
                      finished<F>(p, (int64_t)blockIdx.y * p.N + n, total[i]));
    }
}

template <enum kern_wfmt F> static void launch(struct kern_stream *s, const struct cuda_product *p)
{
    const int32_t n_blocks = (int32_t)cuda_ceil(p->K, BLOCK_K);
    const int32_t T = p->T < CUDA_FEW_ROWS ? p->T : CUDA_FEW_ROWS;
    int kw = n_blocks >= 32 ? 8 : n_blocks >= 16 ? 4 : n_blocks >= 8 ? 2 : 1;
    /* Narrow products: rather more blocks of threads, each with less of k a warp. */
    while (kw < WARPS && 2 * kw <= n_blocks &&
           cuda_ceil(p->N, ROWS * WARPS / kw) * p->groups < s->n_sm)
        kw *= 2;
    const int rw = WARPS / kw;
    const int32_t held = n_blocks < SUMS ? n_blocks : SUMS;
    const size_t bytes = (size_t)(2 * SUMS + rw * held * T * COL_LD) * sizeof(float);
    const dim3 grid((unsigned)cuda_ceil(p->N, ROWS * rw), (unsigned)p->groups,
                    (unsigned)cuda_ceil(p->T, CUDA_FEW_ROWS));
    few_kernel<F><<<grid, THREADS, bytes, s->cu>>>(*p, kw);
}

void cuda_product_few(struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    switch (fmt) {
    case KERN_W_F32: launch<KERN_W_F32>(s, p); break;
    case KERN_W_BF16: launch<KERN_W_BF16>(s, p); break;
    case KERN_W_FP8: launch<KERN_W_FP8>(s, p); break;
    case KERN_W_MXFP4: launch<KERN_W_MXFP4>(s, p); break;
    case KERN_W_NVFP4: launch<KERN_W_NVFP4>(s, p); break;
    }
}
