/* kernels/kvpack/kvpack_cuda.cu - writes what attention will read: window rings and compressed
 * entries.
 *
 * compress: a block looks at a few consecutive rows of the batch and finds the tasks that begin
 * there; a task is a group that closes, or the first rows of a sequence, which go on from its
 * state. So the grid depends on the number of rows alone, positions are read here, and groups run
 * side by side. The threads of a block share the channels and fold tokens one after another, as the
 * CPU does; the pooled row is rounded, normed, rotated, quantized and stored in shared memory
 * (row.cuh: with the CPU's bits). Both compressors of a layer that has two are one kernel in a
 * decode step.
 *
 * Overlapping groups (four tokens): a group needs its own rows and the first halves of the four
 * before, each from the batch or from the state. Only the first two groups of a sequence can need
 * the state, so one task does these and then replaces the state; every channel of it belongs to one
 * thread. In a chunk pooled rows wait in shared memory until there is one for each warp of the
 * block.
 *
 * Dense groups: the state is the fold of the open group. The first task reads it, the task of the
 * last group writes it; where these are two, they run side by side, so the new state waits in
 * scratch for the second kernel. A chunk has few of these tasks: there a block takes 128 channels
 * of one, tokens come through shared memory, some steps ahead, and pooled rows go through scratch
 * to that kernel.
 */
#include "kernels/kvpack/compress.cuh"

template <int N, int V>
static __global__ void __launch_bounds__(N, 512 / N) overlap_kernel(struct compress a)
{
    extern __shared__ __align__(16) float row[];
    __shared__ struct tasks found;
    overlap_tasks<N, V>(a, (int32_t)blockIdx.x, row, found);
}
/* A chunk's, four channels a thread. */
enum { CHUNK_THREADS = 128, CHUNK_WARPS = CHUNK_THREADS / 32, CHUNK_BLOCKS = 4 /* of an SM */ };
/* Pooled rows that wait to become entries: a warp a row. */
struct waiting {
    struct cuda_seq q[CHUNK_WARPS];
    int64_t group[CHUNK_WARPS];
};
static __device__ __forceinline__ void finish_waiting(const struct compress &a,
                                                      const struct waiting &w, int n,
                                                      const struct entry &e, float *rows)
{
    const int me = (int)threadIdx.x;
    __syncthreads();
    if (me / 32 < n && by_a_warp(a, w.q[me / 32])) finish_fast(a, e, rows + me / 32 * a.row_floats);
    for (int i = 0; i < n; i++)
        if (!by_a_warp(a, w.q[i]))
            finish<CHUNK_THREADS>(a, w.q[i], w.group[i], rows + i * a.row_floats, me);
    __syncthreads(); /* rows are free again */
}

static __global__ void __launch_bounds__(CHUNK_THREADS, CHUNK_BLOCKS)
    chunk_kernel(struct compress a)
{
    extern __shared__ __align__(16) float rows[];
    __shared__ struct tasks found;
    __shared__ struct waiting w;
    const int me = (int)threadIdx.x;
    int n_waiting = 0;
    struct entry e; /* of the warp's row */
    find_tasks<true>(a, (int32_t)blockIdx.x, &found);
    cuda_hurry();
    cuda_await();
    for (int32_t i = 0; i < found.n; i++) {
        const struct overlap_task k = overlap_task_of(a, found.row[i]);
        for (int j = 0; j < k.n; j++) {
            if (me == 0) w.q[n_waiting] = k.q, w.group[n_waiting] = k.group + j;
            if (me / 32 == n_waiting && by_a_warp(a, k.q)) e = entry_of(a, k.q, k.group + j);
            pool_overlap<4>(a, k.q, k.group + j, 4 * me, rows + n_waiting * a.row_floats);
            if (++n_waiting < CHUNK_WARPS) continue;
            finish_waiting(a, w, n_waiting, e, rows);
            n_waiting = 0;
        }
        if (k.first) update_overlap<4>(a, k.q, 4 * me);
    }
    if (n_waiting > 0) finish_waiting(a, w, n_waiting, e, rows);
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
    overlap_tasks<128, 4>(p.a[blockIdx.y], (int32_t)blockIdx.x, row, found);
}

template <int N> static __global__ void __launch_bounds__(N) dense_kernel(struct compress a)
{
    extern __shared__ __align__(16) float row[];
    __shared__ struct tasks found;
    dense_tasks<N>(a, (int32_t)blockIdx.x, row, found);
}

/* A chunk's: one channel a thread. */
enum { CHANNELS = 128, FOLD_ROWS = 16, FOLD_STAGES = 4 };
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

/* The rows of a stage from FIRST on: the maxima first, so that what is long runs side by side. */
template <int FIRST>
static __device__ __forceinline__ void fold_stage_in(struct fold *f, const struct fold_stage *from,
                                                     int c)
{
    float d[FOLD_ROWS], top = f->m;
    bool near = true;
#pragma unroll
    for (int j = FIRST; j < FOLD_ROWS; j++) {
        const float g = from->gate[j][c] + from->ape[j][c];
        d[j] = g - top;
        near = near && -fabsf(d[j]) >= DEV_EXP_NEAR; /* no NaN is */
        top = d[j] > 0 ? g : top;
    }
    if (near) {
#pragma unroll
        for (int j = FIRST; j < FOLD_ROWS; j++)
            fold_sums(f, from->kv[j][c], d[j], dev_exp_near(-fabsf(d[j])));
    } else {
#pragma unroll 1
        for (int j = FIRST; j < FOLD_ROWS; j++)
            fold_in(f, from->kv[j][c], from->gate[j][c] + from->ape[j][c]);
    }
    f->m = top;
}

static __global__ void __launch_bounds__(CHANNELS) fold_kernel(struct compress a)
{
    extern __shared__ __align__(16) uint8_t memory[];
    struct fold_stage *const stages = (struct fold_stage *)memory;
    __shared__ struct tasks found;
    const int me = (int)threadIdx.x;
    const int32_t c0 = (int32_t)blockIdx.y * CHANNELS, c = c0 + me;
    find_tasks<false>(a, (int32_t)blockIdx.x, &found);
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
            if (n >= FOLD_ROWS && opens) {
                fold_stage_in<1>(&f, from, me);
            } else if (n >= FOLD_ROWS) {
                fold_stage_in<0>(&f, from, me);
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

/* A team: pooled rows of `look` tokens become entries; a dense state of a sequence whose first row
 * is there becomes its state. Each lane looks at a token; all that needs no pooled row is done
 * while the kernel before still makes these. */
enum { CLOSE_THREADS = 128 };
template <int N>
static __global__ void __launch_bounds__(CLOSE_THREADS) close_kernel(struct compress a)
{
    extern __shared__ __align__(16) float rows[];
    const int me = (int)threadIdx.x % N, team = (int)threadIdx.x / N;
    float *const row = rows + team * a.row_floats;
    const int32_t ratio = a.k.y.ratio;
    const int32_t from = ((int32_t)blockIdx.x * (CLOSE_THREADS / N) + team) * a.look;
    const int32_t end = from + a.look < a.b.T ? from + a.look : a.b.T;
    bool awaited = false;
    cuda_hurry();
    for (int32_t base = from; base < end; base += 32) {
        const int32_t own = base + (int32_t)(threadIdx.x & 31);
        const int32_t own_seq = own < end ? a.b.row_seq[own] : -1;
        bool moves = false, closes = false; /* the state; a group */
        if (own_seq >= 0) {
            const struct cuda_seq q = a.b.seqs[own_seq];
            moves = own == q.row0 && !last_is_first(q, ratio);
            closes = a.pooled && (position(q, own) + 1) % ratio == 0;
        }
        for (uint32_t left = __ballot_sync(0xffffffffu, moves || closes); left; left &= left - 1) {
            const int lane = __ffs((int)left) - 1;
            const int32_t t = base + lane, si = __shfl_sync(0xffffffffu, own_seq, lane);
            const struct cuda_seq q = a.b.seqs[si];
            const int64_t group = position(q, t) / ratio;
            const bool fast = N == 32 && by_a_warp(a, q);
            const bool makes = __shfl_sync(0xffffffffu, (int)closes, lane);
            struct entry e;
            if (fast && makes) e = entry_of(a, q, group);
            if (!awaited) cuda_await();
            awaited = true;
            if (__shfl_sync(0xffffffffu, (int)moves, lane))
                for (int32_t c = me; c < 3 * a.e; c += N)
                    state_of(a, q)[c] = a.pending[(int64_t)si * 3 * a.e + c];
            if (!makes) continue;
            for (int32_t c = me; c < a.e; c += N) row[c] = a.pooled[(int64_t)t * a.e + c];
            if (fast) {
                __syncwarp();
                finish_fast(a, e, row);
            } else {
                finish<N>(a, q, group, row, me);
            }
        }
    }
    if (!awaited) cuda_await();
}

/* ------------------------------------------------------------------ compress */

template <int N, int V>
static void launch_overlap(struct kern_stream *s, const struct compress &a, unsigned blocks,
                           size_t shared)
{
    CUDA_SHARED((overlap_kernel<N, V>), s->max_shared);
    cuda_launch_early(s, overlap_kernel<N, V>, dim3(blocks), N, shared, a);
}
static void launch_chunk(struct kern_stream *s, struct compress a)
{
    /* A row for each warp of a block, where that leaves blocks for all multiprocessors. */
    if (a.b.T >= 2 * s->n_sm * 4 * CHUNK_WARPS) a.look = 4 * CHUNK_WARPS;
    CUDA_SHARED(chunk_kernel, s->max_shared);
    cuda_launch_early(s, chunk_kernel, dim3((unsigned)cuda_ceil(a.b.T, a.look)), CHUNK_THREADS,
                      (size_t)CHUNK_WARPS * a.row_floats * 4, a);
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

static int compress_one(struct kern_stream *s, const struct kern_compress *p,
                        const struct cuda_batch &batch)
{
    struct compress a = compress_of(p, batch);
    const bool chunk = is_chunk(batch), wide = is_wide(a);
    const unsigned blocks = (unsigned)cuda_ceil(batch.T, a.look);
    const size_t shared = rows_bytes(a);
    if (kern_kv_overlaps(a.k.y.ratio)) {
        if (!wide)
            launch_overlap<128, 1>(s, a, blocks, shared);
        else if (chunk && a.e == 4 * CHUNK_THREADS)
            launch_chunk(s, a);
        else if (a.e <= 128)
            launch_overlap<32, 4>(s, a, blocks, shared);
        else
            launch_overlap<128, 4>(s, a, blocks, shared);
        return 0;
    }
    a.pending = (float *)cuda_scratch(s, CUDA_SLOT_OP, (size_t)batch.n_seqs * 3 * a.e * 4);
    if (!a.pending) return TOW_ENOMEM;
    if (chunk) {
        a.pooled = (float *)cuda_scratch(s, CUDA_SLOT_OP2, (size_t)batch.T * (size_t)a.e * 4);
        if (!a.pooled) return TOW_ENOMEM;
    }
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

/* A warp a row. */
static __global__ void window_kernel(struct window_store a)
{
    extern __shared__ __align__(16) float rows[];
    float *const row = rows + threadIdx.x / 32 * a.row_floats;
    const int me = threadIdx.x & 31;
    const int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    cuda_hurry();
    cuda_await();
    if (t >= a.b.T) return;
    dev_row_load<32>((const uint8_t *)a.kv + t * a.k.d * (a.act == KERN_F32 ? 4 : 2), a.act, a.k.d,
                     row, me);
    store_in_window<32>(a, (int32_t)t, row, me);
}

extern "C" int kern_window_store_cuda(struct kern_stream *s, const struct kern_window_store *p)
{
    struct cuda_batch batch;
    int rc = cuda_batch_of(s, p->seqs, p->n_seqs, &batch);
    if (rc < 0 || batch.T == 0) return rc;
    const struct window_store a = window_store_of(p, batch);
    const int warps = a.b.T < 4 * s->n_sm || a.row_floats > 2048 ? 1 : 4;
    const size_t shared = (size_t)warps * a.row_floats * 4;
    CUDA_SHARED(window_kernel, s->max_shared);
    cuda_launch_early(s, window_kernel, dim3((unsigned)cuda_ceil(a.b.T, warps)), 32u * warps,
                      shared, a);
    return cuda_done(s, "window_store");
}
