/* kernels/attn/index_select_cuda.cu - scores what each row sees and keeps the best, ascending.
 *
 * Rows go in batches whose scores fit a budget: scored by index_score_launch, then one CTA a row
 * keeps the k highest; of equals the lower entry. A row that sees no more than it keeps needs no
 * scores.
 *
 * With the scores come the best of each run of sixteen. Runs are put together to some thousand
 * units; the k-th best of the units' bests is a bound that at least k scores reach, and on scores
 * in no order few more do (1.2 k where units are four k). Only runs that reach it are read, and
 * what reaches it is put in shared memory in order (`gather`), where the k-th highest is found
 * exactly (`pick`). Short rows go there whole. Should too much reach the bound (long runs of
 * equals, or best ones side by side) the row is read in several passes (`scan`); all ways give the
 * same list.
 *
 * Scratch has one size. As long as it holds all rows at their longest, each has an equal part of
 * it, so that the launches of a step of decode depend on T alone (a captured graph may be launched
 * again at any length); else rows go in batches, by the power of two that the longest fits in.
 */
#include "kernels/attn/index_score.cuh"
#include "kernels/attn/topk.cuh"

enum {
    BATCH_FLOATS = 64 << 20,
    MIN_LD = 4096,
    LD_STEP = 4 * INDEX_RUN, /* a row's bests are read by fours */
    MANY_THREADS = 512,      /* of a CTA where several share a multiprocessor, else TOPK_THREADS */
    CAP_MANY = 4096,         /* scores in shared memory: see struct room */
    CAP = 8192,
    CAP_MOST = 16384,
    MOST_RUNS = 32, /* of a thread: a bit each */
};

/* Dynamic shared memory for cap scores that reach the bound: their keys and entries; or for 2 cap
 * keys. And the runs that hold them. */
static constexpr int room_bytes(int cap)
{
    return cap * (int)(sizeof(uint32_t) + sizeof(int32_t) + sizeof(uint16_t));
}

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

/* What a CTA knows of its row. */
struct row {
    const float *s, *best;
    int32_t n, topk, t;
    int32_t *out;
    float *margin; /* NULL: not wanted */
};
struct select_shared {
    struct topk_shared top;
    struct topk_digits digits;
    uint32_t lowest_kept, highest_not; /* keys, for the margin */
};

/* Once all threads have told the lowest key they keep and the highest that they do not. */
static __device__ __forceinline__ void tell_margin(const struct row &r, struct select_shared *sh,
                                                   uint32_t kept, uint32_t not_kept)
{
    if (!r.margin) return;
    if (kept != ~0u) atomicMin(&sh->lowest_kept, kept);
    if (not_kept) atomicMax(&sh->highest_not, not_kept);
    __syncthreads();
    if (threadIdx.x == 0) {
        const float k = dev_of_order(sh->lowest_kept), next = dev_of_order(sh->highest_not);
        float margin = k - next;
        if (margin != margin) margin = k == next ? 0.0f : kern_float(0x7f800000u);
        r.margin[r.t] = margin;
    }
}

/* The best `topk` of m keys, of entries index[] (NULL: their own numbers), ascending. */
template <int THREADS>
static __device__ void pick(const struct row &r, const uint32_t *key, const int32_t *index,
                            int32_t m, struct select_shared *sh, int *turn)
{
    int32_t count, n_above;
    const uint32_t kth =
        dev_threshold<THREADS>(key, m, r.topk, 0, &sh->digits, turn, &count, &n_above);
    /* Of those that are the bound itself; all where it is not yet the k-th, but k reach it. */
    const uint32_t equal = count == r.topk ? ~0u : (uint32_t)(r.topk - n_above);
    /* Each thread a stretch, odd, so that a warp meets all banks. */
    const int32_t each = (m + THREADS - 1) / THREADS | 1, i0 = (int32_t)threadIdx.x * each;
    const int32_t i1 = i0 + each < m ? i0 + each : m;
    uint32_t mine = 0; /* above in the low half, ties in the high one */
    for (int32_t i = i0; i < i1; i++) mine += key[i] > kth ? 1u : key[i] == kth ? 1u << 16 : 0u;
    uint32_t total;
    const uint32_t before = dev_block_before<THREADS>(mine, sh->top.warp, &total);
    uint32_t above = before & 0xffffu, ties = before >> 16, kept = ~0u, not_kept = 0;
    for (int32_t i = i0; i < i1; i++) {
        const uint32_t u = key[i];
        if (u > kth || (u == kth && ties < equal)) {
            r.out[above + (ties < equal ? ties : equal)] = index ? index[i] : i;
            kept = u < kept ? u : kept;
        } else {
            not_kept = u > not_kept ? u : not_kept;
        }
        above += u > kth;
        ties += u == kth;
    }
    tell_margin(r, sh, kept, not_kept);
}

/* All keys of a short row. */
template <int THREADS> static __device__ void load_all(const struct row &r, uint32_t *key)
{
    for (int32_t e = (int32_t)threadIdx.x * 4; e < r.n; e += THREADS * 4) {
        const float4 v = *(const float4 *)(r.s + e); /* rows end at a multiple of four */
        *(uint4 *)(key + e) =
            make_uint4(dev_order_of(v.x), dev_order_of(v.y), dev_order_of(v.z), dev_order_of(v.w));
    }
    __syncthreads();
}

/* Keys and entries, ascending, of all scores that reach a bound which at least `want` do; -1: too
 * many. */
template <int THREADS>
static __device__ int32_t gather(const struct row &r, int32_t want, int32_t cap, uint32_t *key,
                                 int32_t *index, uint16_t *runs, struct select_shared *sh,
                                 int *turn)
{
    const float none = kern_float(0x7fc00000u);
    const int32_t n_runs = (r.n + INDEX_RUN - 1) / INDEX_RUN;
    /* Runs of a unit; at least two units for each score wanted, if runs suffice. */
    int32_t width = 1;
    while (n_runs > 4 * want * width) width *= 2;
    const int32_t n_units = (n_runs + width - 1) / width;
    if (n_units > 2 * cap) return -1;
    for (int32_t u = threadIdx.x; u < n_units; u += THREADS) {
        float m = none;
        const int32_t end = (u + 1) * width < n_runs ? (u + 1) * width : n_runs;
        if (width >= 4) {
            for (int32_t i = u * width; i < end; i += 4) {
                const float4 v = *(const float4 *)(r.best + i);
                m = fmaxf(m, v.x); /* passes over NaN */
                if (i + 1 < end) m = fmaxf(m, v.y);
                if (i + 2 < end) m = fmaxf(m, v.z);
                if (i + 3 < end) m = fmaxf(m, v.w);
            }
        } else {
            for (int32_t i = u * width; i < end; i++) m = fmaxf(m, r.best[i]);
        }
        key[u] = dev_order_of(m);
    }
    __syncthreads();
    int32_t reach, beyond;
    const uint32_t bound =
        dev_threshold<THREADS>(key, n_units, want, want / 8, &sh->digits, turn, &reach, &beyond);

    const int32_t each = (n_runs + THREADS * 4 - 1) / (THREADS * 4) * 4;
    const int32_t first = (int32_t)threadIdx.x * each;
    uint32_t mask = 0, total;
    for (int32_t j = 0; j < each && first + j < n_runs; j += 4) {
        const float4 v = *(const float4 *)(r.best + first + j);
        const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + j + i < n_runs && dev_order_of(x[i]) >= bound) mask |= 1u << (j + i);
    }
    uint32_t at = dev_block_before<THREADS>((uint32_t)__popc(mask), sh->top.warp, &total);
    if (total > (uint32_t)cap) return -1;
    for (; mask; mask &= mask - 1) runs[at++] = (uint16_t)(first + __ffs((int)mask) - 1);
    __syncthreads(); /* also: the units' keys may go */

    int32_t m = 0;
    for (int32_t i0 = 0; i0 < (int32_t)total; i0 += THREADS) {
        const int32_t i = i0 + (int32_t)threadIdx.x;
        const int32_t e = i < (int32_t)total ? runs[i] * INDEX_RUN : r.n;
        uint32_t u[INDEX_RUN], found;
        float4 v[INDEX_RUN / 4];
#pragma unroll
        for (int l = 0; l < INDEX_RUN / 4; l++)
            v[l] =
                e < r.n ? *(const float4 *)(r.s + e + 4 * l) : make_float4(none, none, none, none);
        mask = 0;
#pragma unroll
        for (int l = 0; l < INDEX_RUN / 4; l++) {
            const float x[4] = {v[l].x, v[l].y, v[l].z, v[l].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u[4 * l + j] = dev_order_of(x[j]);
                if (e + 4 * l + j < r.n && u[4 * l + j] >= bound) mask |= 1u << (4 * l + j);
            }
        }
        int32_t to =
            m + (int32_t)dev_block_before<THREADS>((uint32_t)__popc(mask), sh->top.warp, &found);
        m += (int32_t)found;
        if (m > cap) return -1;
#pragma unroll
        for (int j = 0; j < INDEX_RUN; j++)
            if (mask >> j & 1) {
                key[to] = u[j];
                index[to++] = e + j;
            }
    }
    __syncthreads();
    return m;
}

/* Any row, in passes over device memory. Places come from prefix sums over runs of scores, so the
 * list is ascending by construction. */
template <int THREADS> static __device__ void scan(const struct row &r, struct select_shared *sh)
{
    int32_t equal;
    const uint32_t kth = dev_kth_highest<THREADS>(r.s, r.n, r.topk, &sh->top, &equal);
    uint32_t above = 0, ties = 0, kept = ~0u, not_kept = 0; /* of the runs before; of this thread */
    for (int32_t run = 0; run < r.n; run += THREADS * TOPK_EACH) {
        const int32_t e = run + (int32_t)threadIdx.x * TOPK_EACH;
        uint32_t u[TOPK_EACH], total;
        uint32_t mine = 0; /* above in the low half, ties in the high one */
        float4 v[TOPK_LOADS];
#pragma unroll
        for (int l = 0; l < TOPK_LOADS; l++) v[l] = dev_scores(r.s, e + 4 * l, r.n, true);
#pragma unroll
        for (int l = 0; l < TOPK_LOADS; l++) {
            u[4 * l] = dev_order_of(v[l].x);
            u[4 * l + 1] = dev_order_of(v[l].y);
            u[4 * l + 2] = dev_order_of(v[l].z);
            u[4 * l + 3] = dev_order_of(v[l].w);
        }
#pragma unroll
        for (int j = 0; j < TOPK_EACH; j++)
            if (e + j < r.n) mine += u[j] > kth ? 1u : u[j] == kth ? 1u << 16 : 0u;
        const uint32_t before = dev_block_before<THREADS>(mine, sh->top.warp, &total);
        uint32_t a = above + (before & 0xffffu), b = ties + (before >> 16);
#pragma unroll
        for (int j = 0; j < TOPK_EACH; j++) {
            if (e + j >= r.n) break;
            const bool tie = u[j] == kth;
            if (u[j] > kth || (tie && b < (uint32_t)equal)) {
                r.out[a + (b < (uint32_t)equal ? b : (uint32_t)equal)] = e + j;
                kept = u[j] < kept ? u[j] : kept;
            } else {
                not_kept = u[j] > not_kept ? u[j] : not_kept;
            }
            a += u[j] > kth;
            b += tie;
        }
        above += total & 0xffffu;
        ties += total >> 16;
        if (!r.margin && above + equal == (uint32_t)r.topk && ties >= (uint32_t)equal) break;
    }
    tell_margin(r, sh, kept, not_kept);
}

template <int THREADS>
static __global__ void __launch_bounds__(THREADS)
    select_kernel(const __grid_constant__ struct kern_index_select p,
                  const __grid_constant__ struct index_score sc, const int32_t *score_rows,
                  int32_t cap)
{
    extern __shared__ __align__(16) uint32_t room[];
    __shared__ struct select_shared sh;
    const int32_t t = sc.row0 + blockIdx.x, i = sc.b.row_seq[t];
    cuda_hurry();
    if (i < 0) return;
    const struct cuda_seq q = sc.b.seqs[i];
    struct row r;
    r.s = sc.out + (int64_t)blockIdx.x * sc.ld;
    r.best = sc.best + (int64_t)blockIdx.x * (sc.ld / INDEX_RUN);
    r.n = dev_visible(sc.kv, q, t);
    r.topk = q.topk;
    r.t = t;
    r.out = p.selected + (int64_t)t * p.sel_ld;
    r.margin = p.margin;
    const int32_t kept = r.n < r.topk ? r.n : r.topk;
    cuda_await();

    if (r.n <= r.topk) {
        for (int32_t e = threadIdx.x; e < r.n; e += THREADS) r.out[e] = e;
    } else if (r.topk > 0) {
        if (threadIdx.x == 0) {
            sh.lowest_kept = ~0u;
            sh.highest_not = 0;
        }
        dev_digits_open(&sh.digits);
        __syncthreads();
        int turn = 0;
        uint32_t *key = room;
        int32_t *index = (int32_t *)(room + cap);
        /* For the margin the first that is not kept must be there too. */
        const int32_t want = r.topk + (p.margin ? 1 : 0);
        const int32_t n_runs = (r.n + INDEX_RUN - 1) / INDEX_RUN;
        if (n_runs < 2 * want && r.n <= 2 * cap) {
            load_all<THREADS>(r, key);
            pick<THREADS>(r, key, NULL, r.n, &sh, &turn);
        } else {
            int32_t m = -1;
            if (n_runs > want && n_runs <= MOST_RUNS * THREADS)
                m = gather<THREADS>(r, want, cap, key, index, (uint16_t *)(index + cap), &sh,
                                    &turn);
            if (m >= 0)
                pick<THREADS>(r, key, index, m, &sh, &turn);
            else
                scan<THREADS>(r, &sh);
        }
    }
    if (threadIdx.x == 0) {
        p.n_selected[t] = kept;
        if (p.margin && r.n <= r.topk) p.margin[t] = kern_float(0x7f800000u);
    }
    for (int64_t e = kept + (int64_t)threadIdx.x; e < p.sel_ld; e += THREADS) r.out[e] = -1;
    const int64_t to = p.scores ? score_row(p, score_rows, t) : -1;
    if (to < 0) return;
    for (int64_t e = threadIdx.x; e < p.score_ld; e += THREADS)
        p.scores[to * p.score_ld + e] = e < r.n ? r.s[e] : -kern_float(0x7f800000u);
}

template <int THREADS>
static void launch(struct kern_stream *s, const struct kern_index_select *p,
                   const struct index_score *sc, const int32_t *score_rows, int32_t cap)
{
    CUDA_SHARED(select_kernel<THREADS>, room_bytes(CAP_MOST));
    cuda_launch_early(s, select_kernel<THREADS>, dim3((unsigned)sc->n_rows), THREADS,
                      room_bytes(cap), *p, *sc, score_rows, cap);
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
        ld = BATCH_FLOATS / T / LD_STEP * LD_STEP;
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
    sc.best = (float *)cuda_scratch(s, CUDA_SLOT_OP2, (size_t)(floats / INDEX_RUN) * sizeof(float));
    const int32_t *score_rows = NULL;
    if (p->scores && p->score_rows) {
        score_rows = (const int32_t *)cuda_send(s, p->score_rows,
                                                (size_t)p->n_score_rows * sizeof *score_rows);
        if (!score_rows) return cuda_done(s, "index_select");
    }
    if (!sc.out || !sc.best) return cuda_done(s, "index_select");
    const bool few = T <= 2 * s->n_sm;
    const int32_t most = room_bytes(CAP_MOST) + 16384 <= s->max_shared ? CAP_MOST : CAP;
    for (int32_t t = 0; t < T; t += rows) {
        sc.row0 = t;
        sc.n_rows = T - t < rows ? T - t : rows;
        index_score_launch(s, &sc);
        if (few)
            launch<TOPK_THREADS>(s, p, &sc, score_rows, most);
        else
            launch<MANY_THREADS>(s, p, &sc, score_rows,
                                 p->sel_ld <= CAP_MANY / 2 ? CAP_MANY : most);
    }
    return cuda_done(s, "index_select");
}
