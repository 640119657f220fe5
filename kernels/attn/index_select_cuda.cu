/* kernels/attn/index_select_cuda.cu - scores what each row sees and keeps the best, ascending.
 *
 * Rows go in batches whose scores fit a budget: scored by index_score_cuda.cu, then one CTA a row finds
 * the k-th highest (topk.cuh) and writes what is above it and the lowest-numbered of its equals; places
 * come from prefix sums over runs of 16384 scores, so the list is ascending by construction. A row that
 * sees no more than it keeps needs no scores.
 *
 * Scratch has one size. As long as it holds all rows at their longest, each has an equal part of it, so
 * that the launches of a step of decode depend on T alone (a captured graph may be launched again at any
 * length); else rows go in batches, by the power of two that the longest fits in.
 */
#include "kernels/attn/index_score.cuh"
#include "kernels/attn/topk.cuh"

enum { BATCH_FLOATS = 64 << 20, MIN_LD = 4096 };

/* The row of scores that belongs to row t; -1: none. */
static __device__ int64_t score_row(const struct kern_index_select &p, const int32_t *rows,
                                    int32_t t)
{
    if (!rows) return t;
    int32_t lo = 0, hi = p.n_score_rows;
    while (lo < hi) {
        const int32_t mid = lo + (hi - lo) / 2;
        if (rows[mid] < t)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < p.n_score_rows && rows[lo] == t ? lo : -1;
}

static __global__ void __launch_bounds__(TOPK_THREADS)
    select_kernel(const __grid_constant__ struct kern_index_select p,
                  const __grid_constant__ struct index_score sc, const int32_t *score_rows)
{
    __shared__ struct topk_shared sh;
    __shared__ uint32_t next_key; /* highest of those not kept */
    const int32_t t = sc.row0 + blockIdx.x, i = sc.b.row_seq[t];
    if (i < 0) return;
    const struct cuda_seq q = sc.b.seqs[i];
    const int32_t n = dev_visible(sc.kv, q, t), topk = q.topk;
    const float *s = sc.out + (int64_t)blockIdx.x * sc.ld;
    int32_t *out = p.selected + (int64_t)t * p.sel_ld;
    const int32_t kept = n < topk ? n : topk;

    if (n <= topk) {
        for (int32_t e = threadIdx.x; e < n; e += TOPK_THREADS) out[e] = e;
    } else {
        if (threadIdx.x == 0) next_key = 0;
        int32_t equal;
        const uint32_t kth = dev_kth_highest(s, n, topk, &sh, &equal);
        uint32_t above = 0, ties = 0, next = 0; /* of the runs before; of this thread */
        for (int32_t run = 0; run < n; run += TOPK_THREADS * TOPK_EACH) {
            const int32_t e = run + (int32_t)threadIdx.x * TOPK_EACH;
            uint32_t u[TOPK_EACH], total;
            uint32_t mine = 0; /* above in the low half, ties in the high one */
            float4 v[TOPK_LOADS];
#pragma unroll
            for (int l = 0; l < TOPK_LOADS; l++) v[l] = dev_scores(s, e + 4 * l, n, true);
#pragma unroll
            for (int l = 0; l < TOPK_LOADS; l++) {
                u[4 * l] = dev_order_of(v[l].x);
                u[4 * l + 1] = dev_order_of(v[l].y);
                u[4 * l + 2] = dev_order_of(v[l].z);
                u[4 * l + 3] = dev_order_of(v[l].w);
            }
#pragma unroll
            for (int j = 0; j < TOPK_EACH; j++)
                if (e + j < n) mine += u[j] > kth ? 1u : u[j] == kth ? 1u << 16 : 0u;
            const uint32_t before = dev_block_before(mine, sh.warp, &total);
            uint32_t a = above + (before & 0xffffu), b = ties + (before >> 16);
#pragma unroll
            for (int j = 0; j < TOPK_EACH; j++) {
                if (e + j >= n) break;
                const bool tie = u[j] == kth;
                if (u[j] > kth || (tie && b < (uint32_t)equal))
                    out[a + (b < (uint32_t)equal ? b : (uint32_t)equal)] = e + j;
                else
                    next = u[j] > next ? u[j] : next;
                a += u[j] > kth;
                b += tie;
            }
            above += total & 0xffffu;
            ties += total >> 16;
            if (!p.margin && above + equal == (uint32_t)topk && ties >= (uint32_t)equal) break;
        }
        if (p.margin) {
            if (next) atomicMax(&next_key, next);
            __syncthreads();
            if (threadIdx.x == 0) {
                const float k_score = dev_of_order(kth), n_score = dev_of_order(next_key);
                float margin = k_score - n_score;
                if (margin != margin) margin = k_score == n_score ? 0.0f : kern_float(0x7f800000u);
                p.margin[t] = margin;
            }
        }
    }
    if (threadIdx.x == 0) {
        p.n_selected[t] = kept;
        if (p.margin && n <= topk) p.margin[t] = kern_float(0x7f800000u);
    }
    for (int64_t e = kept + (int64_t)threadIdx.x; e < p.sel_ld; e += TOPK_THREADS) out[e] = -1;
    const int64_t to = p.scores ? score_row(p, score_rows, t) : -1;
    if (to < 0) return;
    for (int64_t e = threadIdx.x; e < p.score_ld; e += TOPK_THREADS)
        p.scores[to * p.score_ld + e] = e < n ? s[e] : -kern_float(0x7f800000u);
}

extern "C" int kern_index_select_cuda(struct kern_stream *s, const struct kern_index_select *p)
{
    struct index_score sc = {};
    if (p->T == 0 || p->n_seqs == 0) return 0;
    int rc = cuda_batch_of(s, p->seqs, p->n_seqs, &sc.b);
    if (rc < 0) return rc;
    const int32_t T = p->T < sc.b.T ? p->T : sc.b.T;
    if (T == 0) return 0;
    const struct kern_kv_layer *y = &p->layout->layer[p->layer];
    int64_t ld = MIN_LD;
    for (int32_t i = 0; i < p->n_seqs; i++)
        while (ld < (p->seqs[i].pos0 + p->seqs[i].n_rows) / y->ratio) ld *= 2;
    int32_t rows = T;
    if (ld * T <= BATCH_FLOATS)
        ld = BATCH_FLOATS / T / 4 * 4;
    else
        rows = BATCH_FLOATS / ld < 4 ? 4 : (int32_t)(BATCH_FLOATS / ld) / 4 * 4;
    const int64_t floats = ld * rows > BATCH_FLOATS ? ld * rows : BATCH_FLOATS;
    sc.q = p->q;
    sc.wt = p->wt;
    sc.factor = p->factor;
    sc.kv = cuda_kv_of(p->pages, p->layout, p->layer);
    sc.fmt = p->layout->spec.ik_fmt;
    sc.key_off = y->index_off;
    sc.H = p->H;
    sc.act = p->act;
    sc.all = p->scores != NULL;
    sc.ld = ld;
    sc.out = (float *)cuda_scratch(s, CUDA_SLOT_OP, (size_t)floats * sizeof(float));
    const int32_t *score_rows = NULL;
    if (p->scores && p->score_rows) {
        score_rows = (const int32_t *)cuda_send(s, p->score_rows,
                                                (size_t)p->n_score_rows * sizeof *score_rows);
        if (!score_rows) return cuda_done(s, "index_select");
    }
    if (!sc.out) return cuda_done(s, "index_select");
    for (int32_t t = 0; t < T; t += rows) {
        sc.row0 = t;
        sc.n_rows = T - t < rows ? T - t : rows;
        index_score_launch(s, &sc);
        select_kernel<<<(unsigned)sc.n_rows, TOPK_THREADS, 0, s->cu>>>(*p, sc, score_rows);
    }
    return cuda_done(s, "index_select");
}
