/* kernels/kvpack/kvpack_cuda.cu - writes what attention will read: window rings and compressed entries.
 *
 * compress: a block looks at a few consecutive rows of the batch and finds the tasks that begin there;
 * a task is a group that closes, or the first rows of a sequence, which go on from its state. So the
 * grid depends on the number of rows alone, positions are read here, and groups run side by side. The
 * threads of a block share the channels and fold tokens one after another, as the CPU does; the pooled
 * row is rounded, normed, rotated, quantized and stored in shared memory (row.cuh: with the CPU's bits).
 * A decode step does both in one kernel, for both compressors of a layer that has two. In a chunk pooling
 * is bound by memory and the rest by latency, so pooled rows go through scratch to a kernel of their own.
 *
 * Overlapping groups (four tokens): a group needs its own rows and the first halves of the four before,
 * each from the batch or from the state. Only the first two groups of a sequence can need the state,
 * so one task does these and then replaces the state; every channel of it belongs to one thread.
 *
 * Dense groups: the state is the fold of the open group. The first task reads it, the task of the last
 * group writes it; where these are two, they run side by side, so the new state waits in scratch for
 * the second kernel. A chunk has few of these tasks: there a block takes 128 channels of one, and
 * tokens come through shared memory, some steps ahead.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/kv_store.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/kvpack/entry.cuh"

enum { MAX_LOOK = 32 }; /* rows a block looks at */

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

/* A task of overlapping groups: the first row of a sequence, or the last row of a group from the third
 * on. Of dense groups: the first row of a sequence, or of a group. */
template <bool OVERLAP>
static __device__ __forceinline__ bool begins(const struct cuda_seq &q, int32_t t, int32_t ratio)
{
    if (t == q.row0) return true;
    const int64_t pos = position(q, t);
    return OVERLAP ? (pos & 3) == 3 && (pos >> 2) >= (q.pos0 >> 2) + 2 : pos % ratio == 0;
}
template <bool OVERLAP>
static __device__ __forceinline__ void find_tasks(const struct compress &a, struct tasks *found)
{
    if (threadIdx.x == 0) found->n = 0;
    __syncthreads();
    const int64_t t = (int64_t)blockIdx.x * a.look + threadIdx.x;
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

/* The key, not rounded for storage yet, to the companion page in each type but the selecting one. */
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

/* The pooled row becomes entry `entry` of the sequence; scratch follows it. All threads have written
 * their channels. */
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

/* The same by one warp for the shapes of entry.cuh, in two parts, of which the first needs no row yet. */
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

/* Group `group` to the row: softmax over its second halves and the first halves of the group before. */
template <int V>
static __device__ __forceinline__ void pool_overlap(const struct compress &a,
                                                    const struct cuda_seq &q, int64_t group,
                                                    int32_t c, float *row)
{
    struct token<V> x[8];
    struct lanes<V> out;
    const int64_t pos = group * 4;
    const bool before = group > 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (before) x[i] = token_at<V>(a, q, pos - 4 + i, 0, c);
        x[4 + i] = token_at<V>(a, q, pos + i, a.e, c);
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        float m = before ? x[0].g.f[v] : x[4].g.f[v], sum = 0.0f, acc = 0.0f;
#pragma unroll
        for (int i = 1; i < 8; i++)
            if (before || i > 4) m = x[i].g.f[v] > m ? x[i].g.f[v] : m;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (!before && i < 4) continue;
            const float w = dev_exp(x[i].g.f[v] - m);
            sum += w;
            acc = fmaf(w, x[i].kv.f[v], acc);
        }
        out.f[v] = acc / sum;
    }
    store<V>(row + c, out);
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

template <int N, int V>
static __device__ __forceinline__ void overlap_tasks(const struct compress &a, float *row,
                                                     struct tasks &found)
{
    const int me = (int)threadIdx.x;
    find_tasks<true>(a, &found);
    cuda_hurry();
    cuda_await();
    for (int32_t i = 0; i < found.n; i++) {
        const int32_t t = found.row[i];
        const struct cuda_seq q = a.b.seqs[a.b.row_seq[t]];
        const bool first = t == q.row0;
        const int64_t group = first ? q.pos0 >> 2 : position(q, t) >> 2;
        const int64_t closed = (q.pos0 + q.n_rows) >> 2; /* groups of the sequence */
        const int n = (int)(closed - group < 0           ? 0
                            : closed - group > first + 1 ? first + 1
                                                         : closed - group);
        const bool fast = by_a_warp(a, q);
        struct entry e;
        if (fast && !a.pooled && me / 32 < n) e = entry_of(a, q, group + me / 32);
        for (int k = 0; k < n; k++) {
            float *to = a.pooled ? a.pooled + (q.row0 + 4 * (group + k) + 3 - q.pos0) * a.e
                                 : row + k * a.row_floats;
            for (int32_t c = me * V; c < a.e; c += N * V) pool_overlap<V>(a, q, group + k, c, to);
        }
        if (first)
            for (int32_t c = me * V; c < a.e; c += N * V) update_overlap<V>(a, q, c);
        if (a.pooled) continue;
        dev_team_sync<N>();
        for (int k = 0; k < n; k++) {
            if (!fast) {
                finish<N>(a, q, group + k, row + k * a.row_floats, me);
            } else if (N == 32 || me / 32 == k) {
                if (k != me / 32) e = entry_of(a, q, group + k);
                finish_fast(a, e, row + k * a.row_floats);
            }
        }
        dev_team_sync<N>(); /* rows are free again */
    }
}

template <int N, int V>
static __global__ void __launch_bounds__(N, 512 / N) overlap_kernel(struct compress a)
{
    extern __shared__ __align__(16) float row[];
    __shared__ struct tasks found;
    overlap_tasks<N, V>(a, row, found);
}
/* A step of decode: both compressors of the layer, by blockIdx.y. */
struct compress_pair {
    struct compress a[2];
};
static __global__ void __launch_bounds__(128, 4)
    overlap_pair_kernel(const __grid_constant__ struct compress_pair p)
{
    extern __shared__ __align__(16) float row[];
    __shared__ struct tasks found;
    overlap_tasks<128, 4>(p.a[blockIdx.y], row, found);
}

/* ------------------------------------------------------------------ dense groups */

/* The fold of an open group: maximum, sum of exponentials, weighted sum. */
struct fold {
    float m, l, a;
};
/* One of keep = exp(m - top) and add = exp(g - top) is exp(0) = 1. */
static __device__ __forceinline__ void fold_in(struct fold *f, float kv, float g)
{
    const float d = g - f->m, x = dev_exp(-fabsf(d));
    const float keep = d > 0 ? x : 1.0f, add = d > 0 ? 1.0f : x;
    f->l = fmaf(f->l, keep, add);
    f->a = fmaf(f->a, keep, add * kv);
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

template <int N> static __global__ void __launch_bounds__(N) dense_kernel(struct compress a)
{
    extern __shared__ __align__(16) float row[];
    __shared__ struct tasks found;
    const int me = (int)threadIdx.x;
    find_tasks<false>(a, &found);
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

/* A chunk's: one channel a thread. */
enum { CHANNELS = 128, FOLD_ROWS = 16, FOLD_STAGES = 3 };
struct fold_stage {
    float kv[FOLD_ROWS][CHANNELS], gate[FOLD_ROWS][CHANNELS], ape[FOLD_ROWS][CHANNELS];
};

/* Rows t .. of the task, as far as it goes; a warp a row at a time. */
static __device__ __forceinline__ void fetch_rows(const struct compress &a,
                                                  const struct dense_task &k, int32_t t, int32_t c0,
                                                  struct fold_stage *to)
{
    const int32_t c = 4 * (threadIdx.x & 31);
#pragma unroll
    for (int32_t i = 0; i < FOLD_ROWS; i += CHANNELS / 32) {
        const int32_t row = i + threadIdx.x / 32;
        if (t + row >= k.end) break;
        const int64_t at = (int64_t)(k.q.row0 + t + row) * a.e + c0 + c;
        dev_copy16(&to->kv[row][c], a.kv + at, true);
        dev_copy16(&to->gate[row][c], a.gate + at, true);
        dev_copy16(&to->ape[row][c], a.ape + (int64_t)(k.r + t - k.t + row) * a.e + c0 + c, true);
    }
}

static __global__ void __launch_bounds__(CHANNELS) fold_kernel(struct compress a)
{
    extern __shared__ __align__(16) uint8_t memory[];
    struct fold_stage *const stages = (struct fold_stage *)memory;
    __shared__ struct tasks found;
    const int me = (int)threadIdx.x;
    const int32_t c0 = (int32_t)blockIdx.y * CHANNELS, c = c0 + me;
    find_tasks<false>(a, &found);
    cuda_hurry();
    cuda_await();
    for (int32_t i = 0; i < found.n; i++) {
        const struct dense_task k = dense_task_of(a, found.row[i]);
        const int32_t steps = (k.end - k.t + FOLD_ROWS - 1) / FOLD_ROWS;
        for (int s = 0; s < FOLD_STAGES - 1; s++) {
            fetch_rows(a, k, k.t + s * FOLD_ROWS, c0, &stages[s]);
            dev_copy_commit();
        }
        struct fold f = {0.0f, 0.0f, 0.0f};
        if (k.r > 0) {
            const float *state = state_of(a, k.q);
            f = {state[c], state[a.e + c], state[2 * a.e + c]};
        }
        for (int32_t s = 0; s < steps; s++) {
            dev_copy_wait<FOLD_STAGES - 2>();
            __syncthreads(); /* all copies are there, and the stage before this one is free */
            fetch_rows(a, k, k.t + (s + FOLD_STAGES - 1) * FOLD_ROWS, c0,
                       &stages[(s + FOLD_STAGES - 1) % FOLD_STAGES]);
            dev_copy_commit();
            const struct fold_stage *from = &stages[s % FOLD_STAGES];
            const int32_t n = k.end - k.t - s * FOLD_ROWS;
            const bool opens = s == 0 && k.r == 0;
            if (opens) f = {from->gate[0][me] + from->ape[0][me], 1.0f, from->kv[0][me]};
            if (n >= FOLD_ROWS && !opens) {
#pragma unroll
                for (int j = 0; j < FOLD_ROWS; j++)
                    fold_in(&f, from->kv[j][me], from->gate[j][me] + from->ape[j][me]);
            } else {
                for (int j = opens; j < FOLD_ROWS && j < n; j++)
                    fold_in(&f, from->kv[j][me], from->gate[j][me] + from->ape[j][me]);
            }
        }
        if (k.closes) a.pooled[(int64_t)(k.q.row0 + k.end - 1) * a.e + c] = f.a / f.l;
        keep_fold(a, k, c, f);
        __syncthreads(); /* stages are free again */
    }
}

/* ------------------------------------------------------------------ what waited */

/* A team: pooled rows of `look` tokens become entries; a dense state of a sequence whose first row is
 * there becomes its state. */
enum { CLOSE_THREADS = 128 };
template <int N>
static __global__ void __launch_bounds__(CLOSE_THREADS) close_kernel(struct compress a)
{
    extern __shared__ __align__(16) float rows[];
    const int me = (int)threadIdx.x % N, team = (int)threadIdx.x / N;
    float *const row = rows + team * a.row_floats;
    const int32_t ratio = a.k.y.ratio;
    const int32_t from = ((int32_t)blockIdx.x * (CLOSE_THREADS / N) + team) * a.look;
    cuda_hurry();
    cuda_await();
    for (int32_t t = from; t < from + a.look && t < a.b.T; t++) {
        const int32_t si = a.b.row_seq[t];
        if (si < 0) continue;
        const struct cuda_seq q = a.b.seqs[si];
        const int64_t pos = position(q, t);
        if (a.pending && t == q.row0 && !last_is_first(q, ratio))
            for (int32_t c = me; c < 3 * a.e; c += N)
                state_of(a, q)[c] = a.pending[(int64_t)si * 3 * a.e + c];
        if (!a.pooled || (pos + 1) % ratio != 0) continue;
        for (int32_t c = me; c < a.e; c += N) row[c] = a.pooled[(int64_t)t * a.e + c];
        if (N == 32 && by_a_warp(a, q)) {
            __syncwarp();
            finish_fast(a, entry_of(a, q, pos / ratio), row);
        } else {
            finish<N>(a, q, pos / ratio, row, me);
        }
    }
}

/* ------------------------------------------------------------------ compress */

template <int N, int V>
static void launch_overlap(struct kern_stream *s, const struct compress &a, unsigned blocks,
                           size_t shared)
{
    CUDA_SHARED((overlap_kernel<N, V>), s->max_shared);
    cuda_launch_early(s, overlap_kernel<N, V>, dim3(blocks), N, shared, a);
}
template <int N>
static void launch_dense(struct kern_stream *s, const struct compress &a, unsigned blocks,
                         size_t shared)
{
    CUDA_SHARED((dense_kernel<N>), s->max_shared);
    cuda_launch_early(s, dense_kernel<N>, dim3(blocks), N, shared, a);
}
static void launch_fold(struct kern_stream *s, const struct compress &a, unsigned blocks)
{
    CUDA_SHARED(fold_kernel, s->max_shared);
    cuda_launch_early(s, fold_kernel, dim3(blocks, (unsigned)(a.e / CHANNELS)), CHANNELS,
                      FOLD_STAGES * sizeof(struct fold_stage), a);
}
template <int N> static void launch_close_by(struct kern_stream *s, const struct compress &a)
{
    const int teams = CLOSE_THREADS / N;
    CUDA_SHARED((close_kernel<N>), s->max_shared);
    cuda_launch_early(s, close_kernel<N>, dim3((unsigned)cuda_ceil(a.b.T, (int64_t)a.look * teams)),
                      CLOSE_THREADS, (size_t)teams * a.row_floats * 4, a);
}
static void launch_close(struct kern_stream *s, struct compress a)
{
    if (!a.fast) {
        launch_close_by<CLOSE_THREADS>(s, a);
        return;
    }
    /* A warp a row: with few groups more warps look at fewer tokens. */
    if (a.look > 4) a.look = 4;
    launch_close_by<32>(s, a);
}

/* A chunk has a task in every group and sequence, a decode step one in every row. */
static bool is_chunk(const struct cuda_batch &b)
{
    return b.T > 4 * b.n_seqs;
}

static struct compress compress_of(const struct kern_compress *p, const struct cuda_batch &b)
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
    a.look = !is_chunk(b) ? 1 : a.k.y.ratio < MAX_LOOK ? a.k.y.ratio : MAX_LOOK;
    a.row_floats = (a.e + 3) / 4 * 4 + a.k.rd + (a.index ? (a.e + 3) / 4 * 4 : 0);
    a.row_floats = (a.row_floats + 3) / 4 * 4;
    a.fast = a.act == KERN_BF16 && a.k.rd == ENTRY_ROPE && cuda_aligned16(p->norm.data) &&
             (a.index ? a.e == ENTRY_KEY && a.k.ik_fmt == KERN_IK_FP8
                      : a.e == ENTRY_MAIN && a.k.kv_fmt == KERN_KV_FP8);
    return a;
}
static size_t rows_bytes(const struct compress &a)
{
    return (size_t)a.row_floats * 4 * (kern_kv_overlaps(a.k.y.ratio) ? 2 : 1);
}
/* Four channels can be read at a time. */
static bool is_wide(const struct compress &a)
{
    return a.e % 4 == 0 && cuda_aligned16(a.kv) && cuda_aligned16(a.gate) && cuda_aligned16(a.ape);
}

static int compress_one(struct kern_stream *s, const struct kern_compress *p,
                        const struct cuda_batch &batch)
{
    struct compress a = compress_of(p, batch);
    const bool chunk = is_chunk(batch), wide = is_wide(a);
    const unsigned blocks = (unsigned)cuda_ceil(batch.T, a.look);
    const size_t shared = rows_bytes(a);
    if (chunk) {
        a.pooled = (float *)cuda_scratch(s, CUDA_SLOT_OP2, (size_t)batch.T * (size_t)a.e * 4);
        if (!a.pooled) return TOW_ENOMEM;
    }
    if (kern_kv_overlaps(a.k.y.ratio)) {
        if (!wide)
            launch_overlap<128, 1>(s, a, blocks, shared);
        else if (a.e <= 128)
            launch_overlap<32, 4>(s, a, blocks, shared);
        else
            launch_overlap<128, 4>(s, a, blocks, shared);
        if (chunk) launch_close(s, a);
        return 0;
    }
    a.pending = (float *)cuda_scratch(s, CUDA_SLOT_OP, (size_t)batch.n_seqs * 3 * a.e * 4);
    if (!a.pending) return TOW_ENOMEM;
    if (chunk && wide && a.e % CHANNELS == 0)
        launch_fold(s, a, blocks);
    else if (a.e <= 128)
        launch_dense<128>(s, a, blocks, shared);
    else
        launch_dense<512>(s, a, blocks, shared);
    bool several = false; /* no sequence of one row has two groups */
    for (int32_t i = 0; i < p->n_seqs; i++) several |= p->seqs[i].n_rows > 1;
    if (chunk || several) launch_close(s, a);
    return 0;
}

extern "C" int kern_compress_cuda(struct kern_stream *s, const struct kern_compress *p)
{
    struct cuda_batch batch;
    int rc = cuda_batch_of(s, p->seqs, p->n_seqs, &batch);
    if (rc < 0 || batch.T == 0) return rc;
    if (p->also && !is_chunk(batch)) {
        const struct compress_pair both = {compress_of(p, batch), compress_of(p->also, batch)};
        const size_t x = rows_bytes(both.a[0]), y = rows_bytes(both.a[1]);
        if (is_wide(both.a[0]) && is_wide(both.a[1]) && kern_kv_overlaps(both.a[0].k.y.ratio)) {
            CUDA_SHARED(overlap_pair_kernel, s->max_shared);
            cuda_launch_early(s, overlap_pair_kernel, dim3((unsigned)batch.T, 2), 128,
                              x > y ? x : y, both);
            return cuda_done(s, "compress");
        }
    }
    rc = compress_one(s, p, batch);
    if (rc == 0 && p->also) rc = compress_one(s, p->also, batch);
    return rc < 0 ? rc : cuda_done(s, "compress");
}

/* ------------------------------------------------------------------ window_store */

struct window_store {
    struct cuda_kv k;
    struct cuda_batch b;
    const void *kv; /* [T, d] */
    int32_t row_floats;
    enum kern_dtype act;
};

/* A warp a row. */
static __global__ void window_kernel(struct window_store a)
{
    extern __shared__ __align__(16) float rows[];
    float *const row = rows + threadIdx.x / 32 * a.row_floats;
    const int me = threadIdx.x & 31;
    const int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    cuda_hurry();
    cuda_await();
    if (t >= a.b.T || a.b.row_seq[t] < 0) return;
    const struct cuda_seq q = a.b.seqs[a.b.row_seq[t]];
    if (q.row0 + q.n_rows - t > a.k.window) return; /* a later row takes its place */
    const int64_t d = a.k.d, slot = position(q, (int32_t)t) % a.k.window;
    dev_row_load<32>((const uint8_t *)a.kv + t * d * (a.act == KERN_F32 ? 4 : 2), a.act, a.k.d, row,
                     me);
    dev_kv_store<32>(a.k.kv_fmt, q.tail + a.k.y.window_off, a.k.window, slot, row, a.k.d, a.k.rd,
                     me);
}

extern "C" int kern_window_store_cuda(struct kern_stream *s, const struct kern_window_store *p)
{
    struct window_store a;
    int rc = cuda_batch_of(s, p->seqs, p->n_seqs, &a.b);
    if (rc < 0 || a.b.T == 0) return rc;
    a.k = cuda_kv_of(NULL, p->layout, p->layer);
    a.kv = p->kv;
    a.row_floats = (a.k.d + 3) / 4 * 4;
    a.act = p->act;
    const int warps = a.b.T < 4 * s->n_sm || a.row_floats > 2048 ? 1 : 4;
    const size_t shared = (size_t)warps * a.row_floats * 4;
    CUDA_SHARED(window_kernel, s->max_shared);
    cuda_launch_early(s, window_kernel, dim3((unsigned)cuda_ceil(a.b.T, warps)), 32u * warps,
                      shared, a);
    return cuda_done(s, "window_store");
}
