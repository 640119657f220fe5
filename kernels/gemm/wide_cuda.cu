/* kernels/gemm/wide_cuda.cu - many rows of activations times placed fp8 weights by wgmma: the prefill product
 * of sm_90a.
 *
 * As many_cuda.cu, but two warpgroups have 64 weight rows each and 128 columns of activations (64
 * where there would be too few tiles), and multiply by whole warpgroups: codes become bf16 in registers, where wgmma takes its first operand from,
 * while the instructions of the group of 64 k before are still under way. The other operand is read from
 * shared memory, so rows of x come with k in the order of slots (cuda_quant.slots): the sums then meet the
 * same factors in the same instructions of 16 k as everywhere.
 */
#include "kernels/gemm/product.cuh"

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    M = 128,
    S = 6,        /* groups in the ring */
    ALIGN = 1024, /* of what wgmma reads in its 128-byte swizzle */
    OUT_LD = M + 8,
};
template <int N> struct tile { /* N columns */
    enum {
        NT = N / 8,
        X_BYTES = N * GROUP_K * 2,
        STAGE = X_BYTES + M * GROUP_K,
        BYTES = S * STAGE + ALIGN,
        PER_SM = N <= 64 ? 2 : 1,
    };
    static_assert((int)STAGE % (int)ALIGN == 0 && N * OUT_LD * 4 <= (int)S * (int)STAGE,
                  "the finished tile fits the ring");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* d (+)= a b: m64n128k16. d, a as dev_mma's, a warp having 16 of the 64 rows; b: its descriptor. */
static __device__ __forceinline__ void wgmma(float (&d)[16][4], const uint32_t a[4], uint64_t b,
                                             int add)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]),
                   "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]),
                   "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]),
                   "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
                   "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]),
                   "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
                   "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]),
                   "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
                   "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]),
                   "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]),
                   "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]),
                   "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
                   "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
/* The same for 64 columns: m64n64k16. */
static __device__ __forceinline__ void wgmma(float (&d)[8][4], const uint32_t a[4], uint64_t b,
                                             int add)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]),
                   "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]),
                   "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]),
                   "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
                   "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]),
                   "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
                   "+f"(d[7][2]), "+f"(d[7][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
static __device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
/* What this thread has copied to shared memory is there for wgmma after the next barrier. */
template <int LEFT> static __device__ __forceinline__ void landed(void)
{
    dev_copy_wait<LEFT>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}
/* Operand b: rows of 128 bytes in the 128-byte swizzle, eight of them 1024 bytes. */
static __device__ __forceinline__ uint64_t descriptor(const uint8_t *x)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(x);
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

struct place {
    uint8_t *ring;
    const uint8_t *w, *x; /* first rows of this block of threads */
    uint32_t w_ld, x_ld;  /* bytes */
    int w_last, x_last;   /* last rows that are there */
    int at, c;            /* this thread's first row of the tile, its place in a quad */
};

template <int N>
static __device__ __forceinline__ void fetch(const struct place &l, int32_t q, int slot)
{
    uint8_t *x = l.ring + slot * tile<N>::STAGE, *w = x + tile<N>::X_BYTES;
    const int w_at = q * GROUP_K + threadIdx.x % 4 * 16;
    fetch_rows<N, 8, 128, THREADS, true>(x, l.x + q * 128, l.x_ld, l.x_last, true);
    fetch_rows<M, 4, GROUP_K, THREADS, false>(w, l.w + q * GROUP_K, l.w_ld, l.w_last,
                                              w_at < (int)l.w_ld);
}

/* This thread's 16 codes of two rows, as four first operands. */
template <int N>
static __device__ __forceinline__ void operands(const struct place &l, int slot, uint32_t a[4][4])
{
    const uint8_t *w = l.ring + slot * tile<N>::STAGE + tile<N>::X_BYTES;
    struct weights16<KERN_W_FP8> ws;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint4 v = *(const uint4 *)(w + (l.at + 8 * r) * GROUP_K + l.c * 16);
        ws.v[r][0] = v.x, ws.v[r][1] = v.y, ws.v[r][2] = v.z, ws.v[r][3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t one[1][4];
        weights_operand<KERN_W_FP8>(ws, i, one);
#pragma unroll
        for (int e = 0; e < 4; e++) a[i][e] = one[0][e];
    }
}

/* Group q: its products are started, the next group's operands made meanwhile. */
template <int N>
static __device__ __forceinline__ void step(const struct place &l, int32_t q, int32_t n_groups,
                                            float (&sum)[N / 8][4], const uint32_t a[4][4],
                                            uint32_t next[4][4])
{
    const int slot = q % S;
    const uint64_t b = descriptor(l.ring + slot * tile<N>::STAGE);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma(sum, a[i], b + 2 * i, q % 2 == 1 || i > 0);
    wgmma_commit();
    if (q + 1 < n_groups) {
        landed<S - 3>(); /* and all are done with the group before this one */
        if (q + S - 1 < n_groups) fetch<N>(l, q + S - 1, (q + S - 1) % S);
        dev_copy_commit();
        operands<N>(l, (q + 1) % S, next);
    }
    wgmma_wait();
}

template <int N>
static __global__ void __launch_bounds__(THREADS, tile<N>::PER_SM)
    wide_kernel(struct cuda_product p)
{
    enum { NT = tile<N>::NT };
    extern __shared__ __align__(16) uint8_t shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int32_t n_groups = (p.K + GROUP_K - 1) / GROUP_K;
    struct place l;
    l.ring = shared + (ALIGN - (uint32_t)__cvta_generic_to_shared(shared) % ALIGN) % ALIGN;
    const int32_t n_cta = blockIdx.x * M, t_cta = blockIdx.y * N;
    const int64_t row_cta = (int64_t)blockIdx.z * p.N + n_cta;
    l.w = p.w + row_cta * p.row_bytes, l.w_ld = (uint32_t)p.row_bytes;
    l.x = (const uint8_t *)(p.x + (int64_t)t_cta * p.ld_x + blockIdx.z * p.x_group);
    l.x_ld = (uint32_t)p.ld_x * 2;
    l.w_last = (p.N - n_cta < M ? p.N - n_cta : M) - 1;
    l.x_last = (p.T - t_cta < N ? p.T - t_cta : N) - 1;
    l.at = warp * 16 + g, l.c = c;

    float sum[NT][4], total[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[n][e] = total[n][e] = 0;
#pragma unroll
    for (int q = 0; q < S - 1; q++) {
        if (q < n_groups) fetch<N>(l, q, q);
        dev_copy_commit();
    }
    uint32_t a[2][4][4];
    landed<S - 2>();
    operands<N>(l, 0, a[0]);
    for (int32_t q = 0; q < n_groups; q += 2) {
        float sc[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            sc[r] = n_cta + l.at + 8 * r < p.N
                        ? block_scale(p, (row_cta + l.at + 8 * r) / BLOCK_N, q / 2)
                        : 0.0f;
        step<N>(l, q, n_groups, sum, a[0], a[1]);
        if (q + 1 < n_groups) step<N>(l, q + 1, n_groups, sum, a[1], a[0]);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) total[n][e] = fmaf(sum[n][e], sc[e / 2], total[n][e]);
    }
    dev_copy_wait<0>();
    __syncthreads();

    float *out = (float *)l.ring;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int at = l.at + 8 * r;
        const bool there = n_cta + at < p.N;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                out[(n * 8 + 2 * c + e) * OUT_LD + at] =
                    there ? finished<KERN_W_FP8>(p, row_cta + at, total[n][2 * r + e]) : 0.0f;
    }
    __syncthreads();
    store_tile<M, N, OUT_LD, THREADS>(p, out, n_cta, t_cta, row_cta);
}
#else
template <int N> static __global__ void wide_kernel(struct cuda_product p) {}
#endif

template <int N> static void launch(struct kern_stream *s, const struct cuda_product *p)
{
    const dim3 grid((unsigned)cuda_ceil(p->N, M), (unsigned)cuda_ceil(p->T, N),
                    (unsigned)p->groups);
    CUDA_SHARED(wide_kernel<N>, tile<N>::BYTES);
    wide_kernel<N><<<grid, THREADS, tile<N>::BYTES, s->cu>>>(*p);
}

static int64_t tiles(const struct cuda_product *p, int columns)
{
    return cuda_ceil(p->N, M) * cuda_ceil(p->T, columns) * p->groups;
}

bool cuda_wide_fits(const struct kern_stream *s, enum kern_wfmt fmt, const struct cuda_product *p)
{
    return s->arch == 90 && fmt == KERN_W_FP8 && p->T > 32 && !cuda_few_fits(s, fmt, p) &&
           tiles(p, 64) > s->n_sm / 4;
}

void cuda_product_wide(struct kern_stream *s, const struct cuda_product *p)
{
    /* A tile of 64 columns leaves room for a second one beside it. */
    if (p->T > 64 && tiles(p, 128) >= s->n_sm * 3 / 2)
        launch<128>(s, p);
    else
        launch<64>(s, p);
}
