/* kernels/kvpack/prepare_cuda.cu - what lies between products and attention. A decode step does all
 * of it in one kernel, whose blocks have one job each: first those that take longest.
 *
 * compress     a block a row and compressor, as in kvpack_cuda.cu
 * window keys  a block a row, in shared memory; they go to the ring from there
 * queries      a warp four heads, of the indexer or of attention
 * Every job has the bits that its op has alone. All are chains of latencies, which now run side by
 * side.
 * Other shapes, and chunks, go op by op.
 */
#include "kernels/attn/index_query.cuh"
#include "kernels/kvpack/compress.cuh"
#include "kernels/norm/heads.cuh"

#include <math.h>

extern "C" int kern_heads_rope_cuda(struct kern_stream *s, const struct kern_heads_rope *p);
extern "C" int kern_kv_prep_cuda(struct kern_stream *s, const struct kern_kv_prep *p);
extern "C" int kern_window_store_cuda(struct kern_stream *s, const struct kern_window_store *p);
extern "C" int kern_compress_cuda(struct kern_stream *s, const struct kern_compress *p);
extern "C" int kern_index_query_cuda(struct kern_stream *s, const struct kern_index_query *p);

enum {
    OVERLAP_THREADS = 128, /* four channels each */
    DENSE_THREADS = 512,   /* one channel each: what a thread reads waits for nothing of its own */
    QUERY_WARPS = 4,       /* of a block that has queries */
    PER_SM = 512 / OVERLAP_THREADS,
    INDEX_WIDTH = 128,
    INDEX_PIECES = 2, /* of a lane */
    INDEX_LANES = index_head<INDEX_WIDTH, INDEX_PIECES>::LANES,
};

struct prepare {
    struct compress comp[2];
    struct kern_kv_prep kv;
    struct window_store store;
    struct kern_index_query index;
    struct kern_heads_rope heads;
    float hadamard_scale;
    bool stores;
    /* Blocks of each job, in this order. */
    int32_t comp_blocks, kv_blocks, index_blocks, head_blocks;
};

/* Row t, by a block. */
template <int N>
static __device__ __forceinline__ void window_key(const struct prepare &a, int32_t t, float *row)
{
    const struct kern_kv_prep &p = a.kv;
    const int me = threadIdx.x;
    const int64_t at = (int64_t)t * p.d * (p.act == KERN_F32 ? 4 : 2),
                  angles = (int64_t)t * (p.rd / 2);
    dev_row_load<N>((const uint8_t *)p.x + at, p.act, p.d, row, me);
    dev_row_rmsnorm<N>(row, p.d, p.eps, p.w, p.act, me);
    dev_row_rotate<N>(row + p.d - p.rd, p.cos + angles, p.sin + angles, p.rd, 1.0f, p.act, me);
    if (p.act == KERN_BF16) dev_row_e4m3<N>(row, p.d - p.rd, 64, me);
    dev_row_round<N>(row, p.d, p.act, me); /* the ring has what was stored */
    dev_row_store<N>((uint8_t *)p.y + at, p.act, p.d, row, me);
    if (a.stores && t < a.store.b.T) store_in_window<N>(a.store, t, row, me);
}

template <int N>
static __global__ void __launch_bounds__(N, N == DENSE_THREADS ? 1 : PER_SM)
    prepare_kernel(const __grid_constant__ struct prepare a)
{
    extern __shared__ __align__(16) float row[];
    __shared__ struct tasks found;
    int32_t b = (int32_t)blockIdx.x;
    if (b < a.comp_blocks) {
        const int32_t T = a.comp[0].b.T;
        if (N == DENSE_THREADS)
            dense_tasks<N>(a.comp[0], b, row, found);
        else
            overlap_tasks<N, 4>(a.comp[b / T], b % T, row, found);
        return;
    }
    b -= a.comp_blocks;
    cuda_hurry();
    cuda_await();
    if (b < a.kv_blocks) {
        window_key<N>(a, b, row);
        return;
    }
    b -= a.kv_blocks;
    const int warp = threadIdx.x / 32;
    if (warp >= QUERY_WARPS) return;
    if (b < a.index_blocks) {
        const int32_t head = (b * (32 * QUERY_WARPS) + (int32_t)threadIdx.x) / INDEX_LANES;
        index_heads<INDEX_WIDTH, INDEX_PIECES>(a.index, head / a.index.H, head % a.index.H,
                                               a.hadamard_scale);
        return;
    }
    heads_norm(a.heads, ((int64_t)(b - a.index_blocks) * QUERY_WARPS + warp) * HEADS,
               (uint32_t *)row + warp * HEADS * HEAD_WORDS);
}

/* One kernel has all of these shapes; what its compressors need is known only with the batch. */
static bool fits(const struct kern_prepare *p)
{
    const struct kern_heads_rope *h = p->heads;
    const struct kern_index_query *q = p->index;
    return (!h || (h->norm && h->d == HEAD && heads_are_wide(h))) &&
           (!q || (q->act == KERN_BF16 && q->w == INDEX_WIDTH)) && p->kv && p->kv->d <= 8192;
}
static bool compress_fits(const struct kern_compress *c, const struct cuda_batch &b)
{
    if (b.T == 0 || is_chunk(b)) return false;
    if (kern_kv_overlaps(c->layout->layer[c->layer].ratio))
        return is_wide(compress_of(c, b)) && (!c->also || is_wide(compress_of(c->also, b)));
    for (int32_t i = 0; i < c->n_seqs;
         i++) /* two groups of a sequence would need a second kernel */
        if (c->seqs[i].n_rows > 1) return false;
    return !c->also;
}

/* The sequences of the op, if it has any. */
static int batch_of(struct kern_stream *s, const struct kern_prepare *p, struct cuda_batch *b)
{
    *b = {};
    if (p->compress) return cuda_batch_of(s, p->compress->seqs, p->compress->n_seqs, b);
    return p->store ? cuda_batch_of(s, p->store->seqs, p->store->n_seqs, b) : 0;
}

static int one_by_one(struct kern_stream *s, const struct kern_prepare *p)
{
    int rc = p->heads ? kern_heads_rope_cuda(s, p->heads) : 0;
    if (rc == 0 && p->kv) rc = kern_kv_prep_cuda(s, p->kv);
    if (rc == 0 && p->store) rc = kern_window_store_cuda(s, p->store);
    if (rc == 0 && p->compress) rc = kern_compress_cuda(s, p->compress);
    return rc == 0 && p->index ? kern_index_query_cuda(s, p->index) : rc;
}

extern "C" int kern_prepare_cuda(struct kern_stream *s, const struct kern_prepare *p)
{
    struct cuda_batch batch;
    int rc = batch_of(s, p, &batch);
    if (rc < 0) return rc;
    if (!fits(p) || (p->compress && !compress_fits(p->compress, batch))) return one_by_one(s, p);

    struct prepare a = {};
    size_t shared = (size_t)(p->kv->d + 3) / 4 * 16;
    const size_t squares = (size_t)QUERY_WARPS * HEADS * HEAD_WORDS * 4;
    bool dense = false;
    a.kv = *p->kv;
    a.kv_blocks = p->kv->T;
    a.stores = p->store;
    if (p->store) a.store = window_store_of(p->store, batch);
    if (p->compress) {
        const struct kern_compress *each[2] = {p->compress, p->compress->also};
        for (int i = 0; i < 2 && each[i]; i++) {
            a.comp[i] = compress_of(each[i], batch);
            a.comp_blocks += batch.T;
            if (rows_bytes(a.comp[i]) > shared) shared = rows_bytes(a.comp[i]);
        }
        dense = !kern_kv_overlaps(a.comp[0].k.y.ratio);
    }
    if (p->index) {
        a.index = *p->index;
        a.hadamard_scale = (float)(1.0 / sqrt((double)INDEX_WIDTH));
        a.index_blocks =
            (int32_t)cuda_ceil((int64_t)p->index->T * p->index->H * INDEX_LANES, 32 * QUERY_WARPS);
    }
    if (p->heads) {
        a.heads = *p->heads;
        a.head_blocks = (int32_t)cuda_ceil((int64_t)p->heads->T * p->heads->H, HEADS * QUERY_WARPS);
        if (squares > shared) shared = squares;
    }
    const dim3 grid((unsigned)(a.comp_blocks + a.kv_blocks + a.index_blocks + a.head_blocks));
    if (grid.x == 0) return 0;
    /* More rows fill the machine anyway, each op's kernel with more of its threads. */
    if (grid.x > (unsigned)(PER_SM * s->n_sm)) return one_by_one(s, p);
    CUDA_SHARED(prepare_kernel<DENSE_THREADS>, s->max_shared);
    CUDA_SHARED(prepare_kernel<OVERLAP_THREADS>, s->max_shared);
    if (dense)
        cuda_launch_early(s, prepare_kernel<DENSE_THREADS>, grid, DENSE_THREADS, shared, a);
    else
        cuda_launch_early(s, prepare_kernel<OVERLAP_THREADS>, grid, OVERLAP_THREADS, shared, a);
    return cuda_done(s, "prepare");
}
