/* kernels/kvpack/compress.cuh - how rows of a compressor become entries and states, and window keys
 * a ring: the device's half of compress and window_store, for the kernels of kvpack_cuda.cu and
 * prepare_cuda.cu.
 */
#ifndef KERN_KVPACK_COMPRESS_CUH
#define KERN_KVPACK_COMPRESS_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/kv_store.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/kvpack/entry.cuh"

enum { MAX_LOOK = 128 }; /* rows a block looks at */

struct compress {
    struct cuda_kv k;
    struct cuda_batch b;
    const float *kv, *gate; /* [T, c*e] */
    const float *ape;       /* [ratio, c*e] */
    struct kern_vec norm;
    const float *inv_freq;
    float *pending;    /* [n_seqs, 3e]: dense states that wait */
    float *pooled;     /* NULL, or [T, e]: rows that wait, each as the last token of its group */
    int64_t state_off; /* in the tail */
    int32_t e, look;
    int32_t row_floats; /* of a pooled row in shared memory and what finish() keeps behind it */
    bool index, fast;   /* fast: entry.cuh has the shape */
    float eps;
    enum kern_dtype act;
};

/* Rows of a block that begin a task. */
struct tasks {
    int32_t n, row[MAX_LOOK];
};

static __device__ __forceinline__ int64_t position(const struct cuda_seq &q, int32_t t)
{
    return q.pos0 + (t - q.row0);
}

/* A task of overlapping groups: the first row of a sequence, or the last row of a group from the
 * third on. Of dense groups: the first row of a sequence, or of a group. */
template <bool OVERLAP>
static __device__ __forceinline__ bool begins(const struct cuda_seq &q, int32_t t, int32_t ratio)
{
    if (t == q.row0) return true;
    const int64_t pos = position(q, t);
    return OVERLAP ? (pos & 3) == 3 && (pos >> 2) >= (q.pos0 >> 2) + 2 : pos % ratio == 0;
}
template <bool OVERLAP>
static __device__ __forceinline__ void find_tasks(const struct compress &a, int32_t block,
                                                  struct tasks *found)
{
    if (threadIdx.x == 0) found->n = 0;
    __syncthreads();
    const int64_t t = (int64_t)block * a.look + threadIdx.x;
    if ((int32_t)threadIdx.x < a.look && t < a.b.T && a.b.row_seq[t] >= 0 &&
        begins<OVERLAP>(a.b.seqs[a.b.row_seq[t]], (int32_t)t, a.k.y.ratio))
        found->row[atomicAdd(&found->n, 1)] = (int32_t)t;
    __syncthreads();
}

/* ------------------------------------------------------------------ a finished entry */

template <int N>
static __device__ __forceinline__ void index_round(float *row, int32_t w, enum kern_ik_fmt fmt,
                                                   int me)
{
    dev_row_hadamard<N>(row, w, me);
    dev_row_round<N>(row, w, KERN_BF16, me);
    if (fmt == KERN_IK_FP4) dev_row_e2m1<N>(row, w, 32, me);
    if (fmt == KERN_IK_FP8) dev_row_e4m3<N>(row, w, w, me);
}

static __device__ __forceinline__ enum kern_ik_fmt shadow_fmt(int s)
{
    return s == KERN_SHADOW_BF16 ? KERN_IK_BF16 : s == KERN_SHADOW_FP8 ? KERN_IK_FP8 : KERN_IK_FP4;
}

/* The key, not rounded for storage yet, to the companion page in each type but the selecting. */
template <int N>
static __device__ void store_shadows(const struct compress &a, const struct cuda_seq &q,
                                     int64_t entry, const float *row, float *copy, int me)
{
    const int64_t page = q.page_ids[entry / a.k.y.per_page * 2 + 1];
    for (int s = 0; s < KERN_SHADOWS; s++) {
        if (shadow_fmt(s) == a.k.ik_fmt) continue;
        uint8_t *part = (uint8_t *)a.k.pages + page * a.k.page_bytes + a.k.y.shadow_off[s];
        for (int32_t c = me; c < a.e; c += N) copy[c] = row[c];
        dev_team_sync<N>();
        index_round<N>(copy, a.e, shadow_fmt(s), me);
        dev_ik_store<N>(shadow_fmt(s), part, a.k.y.per_page, entry % a.k.y.per_page, copy, a.e, me);
        dev_team_sync<N>();
    }
}

/* The pooled row becomes entry `entry` of the sequence; scratch follows it. All threads have
 * written their channels. */
template <int N>
static __device__ void finish(const struct compress &a, const struct cuda_seq &q, int64_t entry,
                              float *row, int me)
{
    const int32_t e = a.e, rd = a.k.rd;
    float *const cos = row + (e + 3) / 4 * 4, *const sin = cos + rd / 2, *const copy = cos + rd;
    for (int32_t i = me; i < rd / 2; i += N)
        dev_cos_sin((float)(entry * a.k.y.ratio) * a.inv_freq[i], &cos[i], &sin[i]);
    dev_team_sync<N>();
    dev_row_round<N>(row, e, a.act, me);
    dev_row_rmsnorm<N>(row, e, a.eps, a.norm, a.act, me);
    dev_row_rotate<N>(row + e - rd, cos, sin, rd, 1.0f, a.act, me);
    int32_t i;
    uint8_t *part = (uint8_t *)dev_entry_part(a.k, q, a.index, entry, &i);
    if (a.index) {
        if (q.page_step == 2) store_shadows<N>(a, q, entry, row, copy, me);
        if (a.act == KERN_BF16) index_round<N>(row, e, a.k.ik_fmt, me);
        dev_ik_store<N>(a.k.ik_fmt, part, a.k.y.per_page, i, row, e, me);
    } else {
        if (a.act == KERN_BF16) dev_row_e4m3<N>(row, e - rd, 64, me);
        dev_kv_store<N>(a.k.kv_fmt, part, a.k.y.per_page, i, row, e, rd, me);
    }
    dev_team_sync<N>(); /* the row is free again */
}

/* The same by one warp for the shapes of entry.cuh, in two parts, of which the first needs no row
 * yet. */
static __device__ __forceinline__ bool by_a_warp(const struct compress &a, const struct cuda_seq &q)
{
    return a.fast && !(a.index && q.page_step == 2); /* companion pages take other types */
}
static __device__ __forceinline__ struct entry entry_of(const struct compress &a,
                                                        const struct cuda_seq &q, int64_t group)
{
    struct entry e;
    int32_t i;
    e.part = (uint8_t *)dev_entry_part(a.k, q, a.index, group, &i);
    e.n = a.k.y.per_page;
    e.i = i;
    e.norm = a.norm;
    e.eps = a.eps;
    dev_cos_sin((float)(group * a.k.y.ratio) * a.inv_freq[threadIdx.x & 31], &e.cos, &e.sin);
    return e;
}
static __device__ __forceinline__ void finish_fast(const struct compress &a, const struct entry &e,
                                                   float *row)
{
    if (a.index)
        entry_key(e, row, threadIdx.x & 31);
    else
        entry_main(e, row, threadIdx.x & 31);
    __syncwarp();
}

/* ------------------------------------------------------------------ overlapping groups of four */

/* V channels side by side. */
template <int V> struct lanes {
    float f[V];
};
template <int V> static __device__ __forceinline__ lanes<V> load(const float *p)
{
    struct lanes<V> r;
    if (V == 4) {
        const float4 v = *(const float4 *)p;
        r.f[0] = v.x, r.f[V / 4] = v.y, r.f[V / 2] = v.z, r.f[V - 1] = v.w;
    } else {
        r.f[0] = *p;
    }
    return r;
}
template <int V> static __device__ __forceinline__ void store(float *p, const struct lanes<V> &v)
{
    if (V == 4)
        *(float4 *)p = make_float4(v.f[0], v.f[V / 4], v.f[V / 2], v.f[V - 1]);
    else
        *p = v.f[0];
}
template <int V> struct token {
    struct lanes<V> kv, g;
};

/* kv rows [3][2e], score rows [3][2e], the group before: kv [4][e], score [4][e] */
static __device__ __forceinline__ float *state_of(const struct compress &a,
                                                  const struct cuda_seq &q)
{
    return (float *)(q.tail + a.state_off);
}

/* Channels c .. of the token at pos: of its first half (half 0) or second (half e). */
template <int V>
static __device__ __forceinline__ token<V>
token_at(const struct compress &a, const struct cuda_seq &q, int64_t pos, int32_t half, int32_t c)
{
    const int32_t e = a.e, r = (int32_t)(pos & 3);
    const float *state = state_of(a, q);
    struct token<V> x;
    if (pos >= q.pos0) {
        const int64_t at = (q.row0 + (pos - q.pos0)) * 2 * (int64_t)e + half + c;
        const struct lanes<V> ape = load<V>(a.ape + (int64_t)r * 2 * e + half + c);
        x.kv = load<V>(a.kv + at);
        x.g = load<V>(a.gate + at);
#pragma unroll
        for (int i = 0; i < V; i++) x.g.f[i] = x.g.f[i] + ape.f[i];
    } else if (pos >> 2 == q.pos0 >> 2) { /* of the open group */
        x.kv = load<V>(state + r * 2 * e + half + c);
        x.g = load<V>(state + (3 + r) * 2 * e + half + c);
    } else { /* of the group before: first halves */
        x.kv = load<V>(state + 12 * e + r * e + c);
        x.g = load<V>(state + 16 * e + r * e + c);
    }
    return x;
}

/* Softmax over eight tokens, or the last four. NEAR: all weights have dev_exp_near(). */
template <int V, bool NEAR>
static __device__ __forceinline__ lanes<V> weigh(const struct token<V> x[8], const float m[V],
                                                 bool before)
{
    struct lanes<V> out;
#pragma unroll
    for (int v = 0; v < V; v++) {
        float sum = 0.0f, acc = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (!before && i < 4) continue;
            const float d = x[i].g.f[v] - m[v], w = NEAR ? dev_exp_near(d) : dev_exp(d);
            sum += w;
            acc = fmaf(w, x[i].kv.f[v], acc);
        }
        out.f[v] = acc / sum;
    }
    return out;
}
template <int V>
static __device__ __forceinline__ lanes<V> pool_tokens(const struct token<V> x[8], bool before)
{
    float m[V];
    bool near = before; /* no NaN is */
#pragma unroll
    for (int v = 0; v < V; v++) {
        m[v] = before ? x[0].g.f[v] : x[4].g.f[v];
#pragma unroll
        for (int i = 1; i < 8; i++)
            if (before || i > 4) m[v] = x[i].g.f[v] > m[v] ? x[i].g.f[v] : m[v];
#pragma unroll
        for (int i = 0; i < 8; i++) near = near && x[i].g.f[v] - m[v] >= DEV_EXP_NEAR;
    }
    return near ? weigh<V, true>(x, m, true) : weigh<V, false>(x, m, before);
}
/* Group `group` to the row: softmax over its second halves and the first halves of the group
 * before. */
template <int V>
static __device__ __forceinline__ void pool_overlap(const struct compress &a,
                                                    const struct cuda_seq &q, int64_t group,
                                                    int32_t c, float *row)
{
    struct token<V> x[8];
    const int64_t pos = group * 4;
    const bool before = group > 0;
    if (pos - 4 >= q.pos0) { /* all are of the batch: addresses go in equal steps */
        const int64_t at = (q.row0 + (pos - 4 - q.pos0)) * 2 * a.e + c;
        const float *const kv = a.kv + at, *const gate = a.gate + at;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int32_t off = (2 * i + i / 4) * a.e;
            const struct lanes<V> ape = load<V>(a.ape + (i % 4 * 2 + i / 4) * a.e + c);
            x[i].kv = load<V>(kv + off);
            x[i].g = load<V>(gate + off);
#pragma unroll
            for (int v = 0; v < V; v++) x[i].g.f[v] = x[i].g.f[v] + ape.f[v];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (before) x[i] = token_at<V>(a, q, pos - 4 + i, 0, c);
            x[4 + i] = token_at<V>(a, q, pos + i, a.e, c);
        }
    }
    store<V>(row + c, pool_tokens<V>(x, before));
}

/* Channels c .. of the state after the sequence's rows. */
template <int V>
static __device__ __forceinline__ void update_overlap(const struct compress &a,
                                                      const struct cuda_seq &q, int32_t c)
{
    const int32_t e = a.e;
    const int64_t end = q.pos0 + q.n_rows;
    float *const state = state_of(a, q);
    if (end >> 2 > q.pos0 >> 2) { /* read the open group's rows before they change */
        struct token<V> x[4];
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = token_at<V>(a, q, ((end >> 2) - 1) * 4 + r, 0, c);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            store<V>(state + 12 * e + r * e + c, x[r].kv);
            store<V>(state + 16 * e + r * e + c, x[r].g);
        }
    }
#pragma unroll
    for (int r = 0; r < 3; r++) { /* the last token of each place that this batch holds */
        const int64_t pos = end - 1 - ((end - 1 - r) & 3);
        if (pos < q.pos0) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const struct token<V> x = token_at<V>(a, q, pos, half * e, c);
            store<V>(state + r * 2 * e + half * e + c, x.kv);
            store<V>(state + (3 + r) * 2 * e + half * e + c, x.g);
        }
    }
}

/* The task that begins at row t. */
struct overlap_task {
    struct cuda_seq q;
    int64_t group;
    int n; /* groups */
    bool first;
};
static __device__ __forceinline__ struct overlap_task overlap_task_of(const struct compress &a,
                                                                      int32_t t)
{
    struct overlap_task k;
    k.q = a.b.seqs[a.b.row_seq[t]];
    k.first = t == k.q.row0;
    k.group = k.first ? k.q.pos0 >> 2 : position(k.q, t) >> 2;
    const int64_t left = ((k.q.pos0 + k.q.n_rows) >> 2) - k.group;
    k.n = (int)(left < 0 ? 0 : left > k.first + 1 ? k.first + 1 : left);
    return k;
}

template <int N, int V>
static __device__ __forceinline__ void overlap_tasks(const struct compress &a, int32_t block,
                                                     float *row, struct tasks &found)
{
    const int me = (int)threadIdx.x;
    find_tasks<true>(a, block, &found);
    cuda_hurry();
    cuda_await();
    for (int32_t i = 0; i < found.n; i++) {
        const struct overlap_task k = overlap_task_of(a, found.row[i]);
        const bool fast = by_a_warp(a, k.q);
        struct entry e;
        if (fast && me / 32 < k.n) e = entry_of(a, k.q, k.group + me / 32);
        for (int j = 0; j < k.n; j++)
            for (int32_t c = me * V; c < a.e; c += N * V)
                pool_overlap<V>(a, k.q, k.group + j, c, row + j * a.row_floats);
        if (k.first)
            for (int32_t c = me * V; c < a.e; c += N * V) update_overlap<V>(a, k.q, c);
        dev_team_sync<N>();
        for (int j = 0; j < k.n; j++) {
            if (!fast) {
                finish<N>(a, k.q, k.group + j, row + j * a.row_floats, me);
            } else if (N == 32 || me / 32 == j) {
                if (j != me / 32) e = entry_of(a, k.q, k.group + j);
                finish_fast(a, e, row + j * a.row_floats);
            }
        }
        dev_team_sync<N>(); /* rows are free again */
    }
}

/* ------------------------------------------------------------------ dense groups */

/* The fold of an open group: maximum, sum of exponentials, weighted sum. */
struct fold {
    float m, l, a;
};
/* Another token, whose score is d above the maximum; x = exp(-|d|). One of keep = exp(m - top) and
 * add = exp(g - top) is exp(0) = 1. */
static __device__ __forceinline__ void fold_sums(struct fold *f, float kv, float d, float x)
{
    const float keep = d > 0 ? x : 1.0f, add = d > 0 ? 1.0f : x;
    f->l = fmaf(f->l, keep, add);
    f->a = fmaf(f->a, keep, add * kv);
}
static __device__ __forceinline__ void fold_in(struct fold *f, float kv, float g)
{
    const float d = g - f->m;
    fold_sums(f, kv, d, dev_exp(-fabsf(d)));
    f->m = d > 0 ? g : f->m;
}

enum { STEP = 8 }; /* tokens loaded ahead */

/* Rows t .. of a sequence, of which t is the r-th of its group. */
static __device__ __forceinline__ void load_step(const struct compress &a, const struct cuda_seq &q,
                                                 int32_t t, int32_t end, int32_t r, int32_t c,
                                                 float kv[STEP], float g[STEP])
{
    const int32_t e = a.e;
    const int64_t at = (q.row0 + t) * (int64_t)e + c;
#pragma unroll
    for (int i = 0; i < STEP; i++)
        if (t + i < end) {
            kv[i] = a.kv[at + (int64_t)i * e];
            g[i] = a.gate[at + (int64_t)i * e] + a.ape[(int64_t)(r + i) * e + c];
        }
}

/* Rows t .. end-1 (of the sequence) of one group, whose r-th is t, for channel c. */
static __device__ __forceinline__ struct fold fold_rows(const struct compress &a,
                                                        const struct cuda_seq &q, int32_t t,
                                                        int32_t end, int32_t r, int32_t c)
{
    float kv[STEP], g[STEP], next_kv[STEP], next_g[STEP];
    struct fold f;
    load_step(a, q, t, end, r, c, kv, g);
    if (r > 0) { /* only the first task is not at a group's begin */
        const float *state = state_of(a, q);
        f = {state[c], state[a.e + c], state[2 * a.e + c]};
        fold_in(&f, kv[0], g[0]);
    } else {
        f = {g[0], 1.0f, kv[0]};
    }
    for (bool begin = true; t < end; t += STEP, r += STEP, begin = false) {
        load_step(a, q, t + STEP, end, r + STEP, c, next_kv, next_g);
#pragma unroll
        for (int i = 0; i < STEP; i++)
            if ((i > 0 || !begin) && t + i < end) fold_in(&f, kv[i], g[i]);
#pragma unroll
        for (int i = 0; i < STEP; i++) kv[i] = next_kv[i], g[i] = next_g[i];
    }
    return f;
}

/* A task: rows t .. end-1 of sequence q, of which t is the r-th of its group. */
struct dense_task {
    struct cuda_seq q;
    int32_t seq, t, end, r;
    bool closes;
};
static __device__ __forceinline__ struct dense_task dense_task_of(const struct compress &a,
                                                                  int32_t row)
{
    struct dense_task k;
    k.seq = a.b.row_seq[row];
    k.q = a.b.seqs[k.seq];
    k.t = row - k.q.row0;
    k.r = (int32_t)((k.q.pos0 + k.t) % a.k.y.ratio);
    const int32_t left = a.k.y.ratio - k.r;
    k.end = k.q.n_rows - k.t < left ? k.q.n_rows : k.t + left;
    k.closes = k.end == k.t + left;
    return k;
}
/* The fold of a sequence's last task becomes its state, or waits. */
static __device__ __forceinline__ void
keep_fold(const struct compress &a, const struct dense_task &k, int32_t c, const struct fold &f)
{
    if (k.end < k.q.n_rows) return;
    float *to = k.t == 0 ? state_of(a, k.q) : a.pending + (int64_t)k.seq * 3 * a.e;
    to[c] = f.m;
    to[a.e + c] = f.l;
    to[2 * a.e + c] = f.a;
}

static __device__ __forceinline__ bool last_is_first(const struct cuda_seq &q, int32_t ratio)
{
    return (q.pos0 + q.n_rows - 1) / ratio == q.pos0 / ratio;
}

template <int N>
static __device__ __forceinline__ void dense_tasks(const struct compress &a, int32_t block,
                                                   float *row, struct tasks &found)
{
    const int me = (int)threadIdx.x;
    find_tasks<false>(a, block, &found);
    cuda_hurry();
    cuda_await();
    for (int32_t i = 0; i < found.n; i++) {
        const struct dense_task k = dense_task_of(a, found.row[i]);
        const int64_t group = (k.q.pos0 + k.t) / a.k.y.ratio;
        const bool fast = by_a_warp(a, k.q);
        struct entry e;
        if (fast && me < 32 && k.closes && !a.pooled) e = entry_of(a, k.q, group);
        for (int32_t c = me; c < a.e; c += N) {
            const struct fold f = fold_rows(a, k.q, k.t, k.end, k.r, c);
            float *to = a.pooled ? a.pooled + (int64_t)(k.q.row0 + k.end - 1) * a.e : row;
            if (k.closes) to[c] = f.a / f.l;
            keep_fold(a, k, c, f);
        }
        if (!k.closes || a.pooled) continue;
        if (!fast) {
            finish<N>(a, k.q, group, row, me);
            continue;
        }
        dev_team_sync<N>();
        if (me < 32) finish_fast(a, e, row);
        dev_team_sync<N>();
    }
}

/* A chunk has a task in every group and sequence, a decode step one in every row. */
static inline bool is_chunk(const struct cuda_batch &b)
{
    return b.T > 4 * b.n_seqs;
}

static inline struct compress compress_of(const struct kern_compress *p, const struct cuda_batch &b)
{
    struct compress a;
    a.b = b;
    a.k = cuda_kv_of(p->pages, p->layout, p->layer);
    a.kv = p->kv;
    a.gate = p->gate;
    a.ape = p->ape;
    a.norm = p->norm;
    a.inv_freq = p->inv_freq;
    a.pending = a.pooled = NULL;
    a.state_off = p->index ? a.k.y.istate_off : a.k.y.mstate_off;
    a.e = p->index ? a.k.w : a.k.d;
    a.index = p->index;
    a.eps = p->eps;
    a.act = p->act;
    /* Long sequences: a block has one group; short ones begin tasks of their own. */
    const int32_t most = b.T >= 64 * b.n_seqs ? MAX_LOOK : MAX_LOOK / 4;
    a.look = !is_chunk(b) ? 1 : a.k.y.ratio < most ? a.k.y.ratio : most;
    a.row_floats = (a.e + 3) / 4 * 4 + a.k.rd + (a.index ? (a.e + 3) / 4 * 4 : 0);
    a.row_floats = (a.row_floats + 3) / 4 * 4;
    a.fast = a.act == KERN_BF16 && a.k.rd == ENTRY_ROPE && cuda_aligned16(p->norm.data) &&
             (a.index ? a.e == ENTRY_KEY && a.k.ik_fmt == KERN_IK_FP8
                      : a.e == ENTRY_MAIN && a.k.kv_fmt == KERN_KV_FP8);
    return a;
}
static inline size_t rows_bytes(const struct compress &a)
{
    return (size_t)a.row_floats * 4 * (kern_kv_overlaps(a.k.y.ratio) ? 2 : 1);
}
/* Four channels can be read at a time. */
static inline bool is_wide(const struct compress &a)
{
    return a.e % 4 == 0 && cuda_aligned16(a.kv) && cuda_aligned16(a.gate) && cuda_aligned16(a.ape);
}

/* ------------------------------------------------------------------ window_store */

struct window_store {
    struct cuda_kv k;
    struct cuda_batch b;
    const void *kv; /* [T, d] */
    int32_t row_floats;
    enum kern_dtype act;
};

/* Row t of the batch, in shared memory as numbers, to its place; unless a later row takes that. */
template <int N>
static __device__ __forceinline__ void store_in_window(const struct window_store &a, int32_t t,
                                                       const float *row, int me)
{
    if (a.b.row_seq[t] < 0) return;
    const struct cuda_seq q = a.b.seqs[a.b.row_seq[t]];
    if (q.row0 + q.n_rows - t > a.k.window) return;
    dev_kv_store<N>(a.k.kv_fmt, q.tail + a.k.y.window_off, a.k.window, position(q, t) % a.k.window,
                    row, a.k.d, a.k.rd, me);
}
static inline struct window_store window_store_of(const struct kern_window_store *p,
                                                  const struct cuda_batch &b)
{
    struct window_store a;
    a.b = b;
    a.k = cuda_kv_of(NULL, p->layout, p->layer);
    a.kv = p->kv;
    a.row_floats = (a.k.d + 3) / 4 * 4;
    a.act = p->act;
    return a;
}

#endif
