/* kernels/attn/index_rank_cuda.cu - where entries stand among all that a row sees.
 *
 * Scores are those given, or the row's own by keys of any type, made by the kernels that select. A
 * CTA an entry counts what goes before it and what equals it; one more finds the border of the
 * selection. Counts are integers: their order of adding up does not matter. Made for captures, not
 * for speed.
 */
#include "kernels/attn/index_score.cuh"
#include "kernels/attn/topk.cuh"

enum { THREADS = 256 };

static __device__ int64_t block_sum(int64_t v, int64_t *warp)
{
#pragma unroll
    for (int m = 16; m; m /= 2) v += __shfl_xor_sync(~0u, v, m);
    if (threadIdx.x % 32 == 0) warp[threadIdx.x / 32] = v;
    __syncthreads();
    int64_t sum = 0;
    for (int w = 0; w < THREADS / 32; w++) sum += warp[w];
    __syncthreads();
    return sum;
}

static __global__ void __launch_bounds__(THREADS)
    count_kernel(const float *s, int32_t n, const int32_t *entries, struct kern_rank *ranks)
{
    __shared__ int64_t warp[THREADS / 32];
    const int32_t e = entries[blockIdx.x];
    const uint32_t own = dev_order_of(s[e]);
    int64_t counts = 0; /* before it in the low half, equal to it in the high one */
    for (int32_t i = threadIdx.x; i < n; i += THREADS) {
        const uint32_t u = dev_order_of(s[i]);
        counts +=
            (u > own || (u == own && i < e) ? 1 : 0) + (u == own ? INT64_C(1) << 32 : INT64_C(0));
    }
    counts = block_sum(counts, warp);
    if (threadIdx.x == 0) {
        ranks[blockIdx.x].rank = (int32_t)(counts & 0xffffffff) + 1;
        ranks[blockIdx.x].equal = (int32_t)(counts >> 32) - 1; /* itself */
        ranks[blockIdx.x].score = s[e];
    }
}

/* The last score that is kept and the first that is not. */
static __global__ void __launch_bounds__(TOPK_THREADS)
    border_kernel(const float *s, int32_t n, int32_t topk, float *kth, float *next)
{
    __shared__ struct topk_shared sh;
    __shared__ uint32_t below, n_equal;
    const int32_t k = n < topk ? n : topk;
    if (n == 0) {
        if (threadIdx.x == 0) *kth = *next = kern_float(0x7fc00000u);
        return;
    }
    if (threadIdx.x == 0) below = n_equal = 0;
    int32_t equal;
    const uint32_t u_kth = dev_kth_highest<TOPK_THREADS>(s, n, k, &sh, &equal);
    uint32_t mine = 0, ties = 0;
    for (int32_t i = threadIdx.x; i < n; i += TOPK_THREADS) {
        const uint32_t u = dev_order_of(s[i]);
        ties += u == u_kth;
        if (u < u_kth && u > mine) mine = u;
    }
    if (ties) atomicAdd(&n_equal, ties);
    if (mine) atomicMax(&below, mine);
    __syncthreads();
    if (threadIdx.x == 0) {
        *kth = dev_of_order(u_kth);
        *next = n <= topk ? kern_float(0x7fc00000u)
                          : dev_of_order(n_equal > (uint32_t)equal ? u_kth : below);
    }
}

/* The row's scores in scratch; NULL: no memory. */
static const float *score_one(struct kern_stream *s, const struct kern_index_rank *p, int64_t n)
{
    const struct kern_kv_layout *l = p->layout;
    const struct kern_kv_layer *y = &l->layer[p->layer];
    struct index_score sc = {};
    if (cuda_batch_of(s, p->seq, 1, &sc.b) < 0) return NULL;
    sc.q = p->q;
    sc.wt = p->wt;
    sc.factor = p->factor;
    sc.kv = cuda_kv_of(p->pages, l, p->layer);
    sc.fmt = l->spec.ik_fmt;
    sc.key_off = y->index_off;
    if (p->keys != KERN_KEYS_OWN) {
        const enum kern_ik_fmt fmt = kern_shadow_fmt((enum kern_shadow)p->keys);
        if (fmt != l->spec.ik_fmt) { /* else its keys have no second copy */
            sc.fmt = fmt;
            sc.key_off = y->shadow_off[p->keys];
            sc.companion = 1;
        }
    }
    sc.H = p->H;
    sc.act = p->act;
    sc.row0 = p->seq->row0;
    sc.n_rows = 1;
    sc.all = true;
    sc.ld = cuda_ceil(n, INDEX_PAD) * INDEX_PAD;
    sc.out = (float *)cuda_scratch(s, CUDA_SLOT_OP,
                                   (size_t)(sc.ld + INDEX_PAD) * sizeof(float)); /* n may be 0 */
    if (!sc.out) return NULL;
    index_score_launch(s, &sc);
    return sc.out;
}

extern "C" int kern_index_rank_cuda(struct kern_stream *s, const struct kern_index_rank *p)
{
    const int64_t n = (p->seq->pos0 + 1) / p->layout->layer[p->layer].ratio;
    const float *scores = p->scores ? p->scores : score_one(s, p, n);
    if (!scores) return cuda_done(s, "index_rank");
    if (p->n_entries) {
        const int32_t *entries =
            (const int32_t *)cuda_send(s, p->entries, (size_t)p->n_entries * sizeof *entries);
        if (!entries) return cuda_done(s, "index_rank");
        count_kernel<<<(unsigned)p->n_entries, THREADS, 0, s->cu>>>(scores, (int32_t)n, entries,
                                                                    p->ranks);
    }
    border_kernel<<<1, TOPK_THREADS, 0, s->cu>>>(scores, (int32_t)n, p->seq->topk, p->kth, p->next);
    return cuda_done(s, "index_rank");
}
