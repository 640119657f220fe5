/* kernels/moe/ffn_cuda.cu - all experts of a layer: the ops one after the other, or for a few rows
 * of the deployed formats three kernels (ffn.cuh), of which the first is here.
 *
 * Gate     A cluster of sixteen blocks shares out the gate's rows, sixteen at a time; the sixteen
 *          warps of a block deal out blocks of 128 k and have their weights in registers when x
 *          arrives. Each block adds up its rows' sums, ascending (product.cuh), and leaves the
 *          scores with the first block, of which a warp a row chooses (route.cuh).
 */
#include "kernels/moe/ffn.cuh"
#include "kernels/moe/route.cuh"

extern "C" {
int kern_linear_cuda(struct kern_stream *s, const struct kern_linear *p);
int kern_linears_cuda(struct kern_stream *s, const struct kern_linears *p);
int kern_route_cuda(struct kern_stream *s, const struct kern_route *p);
int kern_moe_cuda(struct kern_stream *s, const struct kern_moe *p);
int kern_swiglu_cuda(struct kern_stream *s, const struct kern_swiglu *p);
}

enum {
    BLOCKS = 16, /* of the cluster: more than every machine must have */
    WARPS = 16,
    THREADS = 32 * WARPS,
    TILE = 16,  /* rows of the gate */
    TURN = 2,   /* blocks of k that a warp has at a time */
    SUM_LD = 20 /* floats from column to column of a block's sums: quads fall into other banks */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ uint32_t cluster_rank(void)
{
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
static __device__ __forceinline__ void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* The same place in the shared memory of the cluster's first block. */
static __device__ __forceinline__ float *leaders(float *p)
{
    uint64_t q;
    asm("mapa.u64 %0, %1, 0;" : "=l"(q) : "l"(p));
    return (float *)q;
}

/* Of blocks of k b and b + WARPS, those that there are: sixteen values each of rows g and g + 8,
 * twice. */
static __device__ __forceinline__ void load_weights(const struct ffn_few &p, int32_t tile,
                                                    int32_t b,
                                                    struct weights16<KERN_W_BF16> (&w)[2 * TURN])
{
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t n = tile * TILE + g + 8 * r;
        const uint8_t *row =
            p.gate.w + (int64_t)(n < p.route.E ? n : p.route.E - 1) * p.gate.row_bytes + c * 32;
#pragma unroll
        for (int i = 0; i < 2 * TURN; i++) {
            const int32_t q = 2 * (b + i / 2 * WARPS) + i % 2;
            if (q * GROUP_K >= p.D) break;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 v = dev_stream16(row + q * (2 * GROUP_K) + h * 16);
                w[i].v[r][4 * h] = v.x, w[i].v[r][4 * h + 1] = v.y;
                w[i].v[r][4 * h + 2] = v.z, w[i].v[r][4 * h + 3] = v.w;
            }
        }
    }
}
/* Sums of those blocks, of T columns. */
static __device__ __forceinline__ void
block_sums(const struct ffn_few &p, int32_t b, const struct weights16<KERN_W_BF16> (&w)[2 * TURN],
           float *sums)
{
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint16_t *x = p.x + (int64_t)(g < p.T ? g : 0) * p.D + c * 16;
    uint32_t v[2 * TURN][1][8];
#pragma unroll
    for (int i = 0; i < 2 * TURN; i++) {
        const int32_t q = 2 * (b + i / 2 * WARPS) + i % 2;
        if (q * GROUP_K >= p.D) break;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 u = *(const uint4 *)(x + q * GROUP_K + 8 * h);
            v[i][0][4 * h] = u.x, v[i][0][4 * h + 1] = u.y;
            v[i][0][4 * h + 2] = u.z, v[i][0][4 * h + 3] = u.w;
        }
    }
#pragma unroll
    for (int i = 0; i < TURN; i++) {
        const int32_t block = b + i * WARPS;
        if (block * BLOCK_K >= p.D) break;
        float sum[1][4] = {};
        weights_times<KERN_W_BF16, 1>(sum, w[2 * i], v[2 * i]);
        weights_times<KERN_W_BF16, 1>(sum, w[2 * i + 1], v[2 * i + 1]);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int t = 2 * c + e;
            float *to = sums + (block * p.T + t) * SUM_LD + g;
            if (t < p.T) to[0] = sum[0][e], to[8] = sum[0][2 + e];
        }
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    gate_kernel(const __grid_constant__ struct ffn_few p)
{
    extern __shared__ __align__(16) float shared[];
    const int warp = threadIdx.x / 32;
    const int32_t rank = (int32_t)cluster_rank(), n_blocks = p.D / BLOCK_K;
    const int32_t tiles = (p.route.E + TILE - 1) / TILE;
    const int lane = threadIdx.x % 32, E = p.route.E, k = p.route.k;
    /* Of the first block; by rows, but for bias. */
    float *bias = shared, *scores = bias + E;
    uint32_t *keys = (uint32_t *)(scores + p.T * E);
    int32_t *ids = (int32_t *)(keys + p.T * E);
    float *sums = (float *)(ids + p.T * k);    /* [n_blocks][T][SUM_LD] */
    const bool mine = rank == 0 && warp < p.T; /* the warp has a row to choose for */
    struct weights16<KERN_W_BF16> w[2 * TURN];

    cluster_arrive(); /* all must have begun before one writes to another */
    if (rank < tiles) load_weights(p, rank, warp, w);
    if (rank == 0 && p.route.bias)
        for (int32_t e = threadIdx.x; e < E; e += THREADS) bias[e] = p.route.bias[e];
    if (mine && p.route.tid2eid) route_from_table(p.route, warp, ids + warp * k, lane);
    cuda_await();
    cuda_hurry(); /* not before: see ffn.cuh */
    cluster_wait();
    for (int32_t tile = rank; tile < tiles; tile += BLOCKS) {
        for (int32_t b = warp; b < n_blocks; b += TURN * WARPS) {
            if (tile != rank || b != warp) load_weights(p, tile, b, w);
            block_sums(p, b, w, sums);
        }
        __syncthreads();
        for (int32_t i = threadIdx.x; i < TILE * p.T; i += THREADS) {
            const int32_t n = tile * TILE + i % TILE, t = i / TILE;
            const float *from = sums + t * SUM_LD + i % TILE;
            float total = 0.0f;
#pragma unroll 8
            for (int32_t b = 0; b < n_blocks; b++)
                total = fmaf(from[b * p.T * SUM_LD], 1.0f, total);
            if (n < E) leaders(scores)[t * E + n] = route_score(p.route.score_fn, total);
        }
        __syncthreads();
    }
    cluster_arrive();
    cluster_wait();
    if (!mine) return;
    float *score = scores + warp * E;
    int32_t *chosen = ids + warp * k;
    route_scores(p.route, score, score, lane);
    if (!p.route.tid2eid)
        route_choose(p.route, score, p.route.bias ? bias : NULL, keys + warp * E, chosen, lane);
    route_store(p.route, warp, score, chosen, INFINITY, lane);
}

#else

static __global__ void gate_kernel(const __grid_constant__ struct ffn_few p) {}

#endif

static size_t gate_bytes(const struct ffn_few *p)
{
    const size_t E = (size_t)p->route.E, sums = (size_t)(p->D / BLOCK_K) * SUM_LD;
    return (E + (size_t)p->T * (2 * E + (size_t)p->route.k + sums)) * 4;
}

/* Whether the device holds a cluster of this size; asked once on each. */
static bool has_cluster(struct kern_stream *s, const cudaLaunchConfig_t *c)
{
    static struct {
        bool known, has;
    } of[CUDA_MAX_DEVICES];
    if (s->arch != 90 || s->number >= CUDA_MAX_DEVICES) return false;
    CUDA_SHARED(gate_kernel, s->max_shared);
    if (of[s->number].known) return of[s->number].has;
    int most = 0;
    /* The kernels around it take all that there is as shared memory; what a multiprocessor has is
     * only divided anew when it is empty. */
    if (cudaFuncSetAttribute(gate_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared) != cudaSuccess ||
        cudaFuncSetAttribute(gate_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
            cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&most, gate_kernel, c) != cudaSuccess) {
        cudaGetLastError();
        most = 0;
    }
    of[s->number].known = true;
    return of[s->number].has = most > 0;
}

static bool launch_few(struct kern_stream *s, const struct ffn_few *p)
{
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = BLOCKS;
    attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(BLOCKS);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = gate_bytes(p);
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = 1;
    if (gate_bytes(p) > (size_t)s->max_shared || !ffn_products_fit(s, p) || !has_cluster(s, &c))
        return false;
    c.numAttrs = cuda_early_launches ? 2 : 1;
    cudaLaunchKernelEx(&c, gate_kernel, *p);
    ffn_products(s, p);
    return true;
}

/* ------------------------------------------------------------------ the op */

/* A product of the rows of x with a weight whose rows lie close, as one of few rows reads them. */
static bool is_dense(const struct kern_linear *p, enum kern_wfmt fmt, enum kern_act_quant aq,
                     enum kern_dtype y)
{
    return p->w.fmt == fmt && p->aq == aq && p->x_dtype == KERN_BF16 && p->y_dtype == y &&
           p->groups == 1 && !p->round_w && p->w.row_bytes % 16 == 0 && p->ld_x == p->K &&
           p->ld_y == p->N;
}
/* All matrices mxfp4, rows of k without gaps. */
static bool is_mxfp4(const struct kern_weight *w, int32_t k)
{
    return w->fmt == KERN_W_MXFP4 && w->sfmt == KERN_S_UE8M0 && w->row_bytes == k / 2 &&
           w->scale_row_bytes == k / 32;
}
static bool is_few(const struct kern_stream *s, const struct kern_ffn *p)
{
    const struct kern_moe *m = &p->moe;
    const bool aligned = (((uintptr_t)m->x | (uintptr_t)p->w2.y | (uintptr_t)m->out) & 15) == 0;
    return s->arch == 90 && m->T <= FFN_ROWS && m->T * m->k <= FFN_PAIRS && m->act == KERN_BF16 &&
           m->aq == KERN_AQ_A128 && m->D % 256 == 0 && m->I % 256 == 0 && aligned &&
           p->swiglu.act == KERN_BF16 && p->swiglu.I == m->I && p->swiglu.limit == m->limit &&
           !p->route.margin && !cuda_fp8_products && p->gate.x == m->x && p->w1.x == m->x &&
           p->w3.x == m->x && p->gate.K == m->D && p->w1.K == m->D && p->w3.K == m->D &&
           p->w2.N == m->D && is_dense(&p->gate, KERN_W_BF16, KERN_AQ_NONE, KERN_F32) &&
           is_dense(&p->w1, KERN_W_FP8, KERN_AQ_A128, KERN_BF16) &&
           is_dense(&p->w3, KERN_W_FP8, KERN_AQ_A128, KERN_BF16) &&
           is_dense(&p->w2, KERN_W_FP8, KERN_AQ_A128, KERN_BF16) &&
           p->w1.w.row_bytes == p->w3.w.row_bytes && is_mxfp4(m->w1, m->D) &&
           is_mxfp4(m->w3, m->D) && is_mxfp4(m->w2, m->I);
}

static struct cuda_product weight_of(const struct kern_linear *p)
{
    const struct kern_weight *w = &p->w;
    struct cuda_product c = {};
    c.w = (const uint8_t *)w->data;
    c.scale = (const uint8_t *)w->scale;
    c.nan_rows =
        cuda_has_nan_rows(w->fmt) ? cuda_nan_rows(w->scale, w->fmt, w->sfmt, w->n, w->k) : NULL;
    c.row_bytes = w->row_bytes;
    c.scale_row_bytes = w->scale_row_bytes;
    c.N = p->N, c.K = p->K, c.groups = 1;
    c.post = 1.0f;
    c.sfmt = w->sfmt;
    return c;
}
static struct moe_matrix matrix_of(struct kern_stream *s, const struct kern_weight *w)
{
    return {cuda_weights_of(s, w), w->row_bytes, w->scale_row_bytes, w->fmt, w->sfmt};
}

/* 1: done; 0: not for these; or an error. */
static int run_few(struct kern_stream *s, const struct kern_ffn *p)
{
    const struct kern_moe *m = &p->moe;
    struct ffn_few f;
    f.x = (const uint16_t *)m->x;
    f.route = p->route;
    f.gate = weight_of(&p->gate);
    f.s1 = weight_of(&p->w1), f.s3 = weight_of(&p->w3), f.s2 = weight_of(&p->w2);
    f.w1 = matrix_of(s, m->w1), f.w3 = matrix_of(s, m->w3), f.w2 = matrix_of(s, m->w2);
    if (!f.w1.w || !f.w3.w || !f.w2.w) return TOW_EINVAL;
    /* moe makes them what they must be, once. */
    if (cuda_placed_e4m3(s, m->w1) || cuda_placed_e4m3(s, m->w3) || cuda_placed_e4m3(s, m->w2))
        return 0;
    f.limit = m->limit;
    const int64_t pairs = (int64_t)m->T * m->k;
    f.act = (uint16_t *)cuda_scratch(s, CUDA_SLOT_OP2, (size_t)((pairs + m->T) * m->I) * 2);
    if (!f.act) return cuda_done(s, "ffn");
    f.z = f.act + (int64_t)m->T * m->I;
    f.routed = m->out;
    f.shared = p->w2.y;
    f.T = m->T, f.D = m->D, f.I = m->I;
    if (!launch_few(s, &f)) return 0;
    const int rc = cuda_done(s, "ffn");
    return rc < 0 ? rc : 1;
}

extern "C" int kern_ffn_cuda(struct kern_stream *s, const struct kern_ffn *p)
{
    if (p->moe.T == 0) return 0;
    int rc = is_few(s, p) ? run_few(s, p) : 0;
    if (rc != 0) return rc < 0 ? rc : 0;
    rc = kern_linear_cuda(s, &p->gate);
    if (rc == 0) rc = kern_route_cuda(s, &p->route);
    if (rc == 0) rc = kern_moe_cuda(s, &p->moe);
    const struct kern_linear shared[2] = {p->w1, p->w3};
    const struct kern_linears of_x = {.each = shared, .n = 2};
    if (rc == 0 && kern_linears_check(&of_x) == 0) {
        rc = kern_linears_cuda(s, &of_x);
    } else { /* not of the same rows */
        if (rc == 0) rc = kern_linear_cuda(s, &p->w1);
        if (rc == 0) rc = kern_linear_cuda(s, &p->w3);
    }
    if (rc == 0) rc = kern_swiglu_cuda(s, &p->swiglu);
    return rc < 0 ? rc : kern_linear_cuda(s, &p->w2);
}
