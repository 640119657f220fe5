/* kernels/attn/attention_widen_cuda.cu - the stored keys of a chunk's sequences to bf16, once.
 *
 * Rows of a chunk read the same keys hundreds of times. Widened in each row's tile, a tile took
 * longer than both of its products; so they are widened ahead, a warp a key, into scratch that L2
 * holds at ordinary lengths. There they lie in the sequence's order, and no page is looked up
 * again. Keys stored in bf16 are copied for the sake of that.
 *
 * Room     for 64 keys a row of the batch: each is then read eight times and more where rows select
 *          512. From 2,048 rows on, for 131,072 keys: contexts of 524,288 tokens where an entry is
 *          of four, 128 MiB, of which the experts of such a chunk ask for more. What does not fit
 *          is left to the attention kernel.
 */
#include "kernels/attn/key_tile.cuh"

enum {
    THREADS = 256,
    BLOCKS = 3,       /* a multiprocessor */
    AT_ONCE = 4,      /* keys of a warp */
    LEAST = 256,      /* rows; fewer do not repay a launch */
    ROOM = 64,        /* keys a row, */
    MOST = 1 << 17,   /* and of all */
    CODED = 448 / 16, /* lanes with sixteen codes each; the other four have bf16 values */
};

/* Keys that a sequence's rows may see: slots of the ring, all of them, and entries. */
static __device__ __forceinline__ int64_t keys_of(const struct attn_job &j,
                                                  const struct cuda_seq &q)
{
    return j.k.window + (j.k.y.ratio ? (q.pos0 + q.n_rows) / j.k.y.ratio : 0);
}

/* A lane's sixteen values of a key, as stored. */
struct piece {
    uint4 a, b;
    uint32_t scale;
};
static __device__ __forceinline__ void read(const struct key_source &s, int lane, struct piece *p)
{
    const bool codes = s.scales && lane < CODED;
    const uint8_t *from = s.row;
    from += !s.scales ? 32 * lane : codes ? 16 * lane : KEY_CODES + 32 * (lane - CODED);
    p->a = dev_stream16(from);
    if (codes)
        p->scale = s.scales[lane / 4];
    else
        p->b = dev_stream16(from + 16);
}
static __device__ __forceinline__ void write(uint8_t *row, bool coded, int lane, struct piece *p)
{
    if (coded && lane < CODED) {
        const uint32_t scale = dev_ue8m0_bf16x2((uint8_t)p->scale);
        uint4 lo, hi;
        dev_e4m3x16_bf16(p->a, &lo, &hi);
        p->a = dev_mul_bf16x8(lo, scale);
        p->b = dev_mul_bf16x8(hi, scale);
    }
    ((uint4 *)row)[2 * lane] = p->a;
    ((uint4 *)row)[2 * lane + 1] = p->b;
}

/* A warp's keys of a sequence: k0, and every `warps`th after it. */
static __device__ __forceinline__ void widen(const struct attn_job &j, const struct cuda_seq &q,
                                             uint8_t *rows, int32_t k0, int32_t n, int32_t warps,
                                             int lane)
{
    const int32_t window = j.k.window;
    for (; k0 < n; k0 += warps * AT_ONCE) {
        struct key_source s[AT_ONCE];
        struct piece p[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int32_t k = k0 + u * warps;
            s[u] = {NULL, NULL};
            if (k >= n || (k < window && k >= q.pos0)) continue; /* a slot not written yet */
            struct key_found f = {q.tail + j.k.y.window_off, k, window};
            uint32_t page = 0;
            if (k >= window) {
                f = key_find(j, {q.page_ids, 0, -q.page_step}, (uint32_t)(k - window));
                page = __ldg((const uint32_t *)f.at);
            }
            s[u] = key_source_of(j, f, page);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (s[u].row) read(s[u], lane, &p[u]);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (s[u].row)
                write(rows + (int64_t)(k0 + u * warps) * KEY_WIDTH * 2, s[u].scales != NULL, lane,
                      &p[u]);
    }
}

static __global__ void __launch_bounds__(THREADS, BLOCKS)
    widen_kernel(const __grid_constant__ struct attn_job j, const struct attn_wide w)
{
    const int lane = threadIdx.x % 32;
    const int32_t warp = blockIdx.x * (THREADS / 32) + threadIdx.x / 32,
                  warps = gridDim.x * (THREADS / 32);
    int64_t all = 0;
    for (int i = lane; i < j.b.n_seqs; i += 32) all += keys_of(j, j.b.seqs[i]);
#pragma unroll
    for (int m = 16; m; m >>= 1) all += __shfl_xor_sync(~0u, all, m);
    if (warp == 0 && lane == 0) w.first[j.b.n_seqs] = (int32_t)(all > w.room ? w.room + 1 : all);
    if (all > w.room) return;

    int32_t before = 0; /* keys of the sequences so far */
    for (int i0 = 0; i0 < j.b.n_seqs; i0 += 32) {
        const int some = j.b.n_seqs - i0 < 32 ? j.b.n_seqs - i0 : 32;
        const int32_t mine = lane < some ? (int32_t)keys_of(j, j.b.seqs[i0 + lane]) : 0;
        int32_t up_to = mine;
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            const int32_t v = __shfl_up_sync(~0u, up_to, m);
            if (lane >= m) up_to += v;
        }
        const int32_t first = before + up_to - mine;
        if (warp == 0 && lane < some) w.first[i0 + lane] = first;
        for (int i = 0; i < some; i++) {
            const int32_t n = __shfl_sync(~0u, mine, i), at = __shfl_sync(~0u, first, i);
            int32_t k0 = (warp - at) % warps; /* so that each has as much to do */
            if (k0 < 0) k0 += warps;
            if (k0 < n)
                widen(j, j.b.seqs[i0 + i], w.rows + (int64_t)at * KEY_WIDTH * 2, k0, n, warps,
                      lane);
        }
        before += __shfl_sync(~0u, up_to, 31);
    }
}

bool attention_widen(struct kern_stream *s, const struct attn_job *j, struct attn_wide *w)
{
    w->rows = NULL;
    if (j->T < LEAST) return true;
    w->room = j->T < MOST / ROOM ? j->T * ROOM : MOST;
    const size_t bytes = (size_t)w->room * KEY_WIDTH * 2;
    w->rows = (uint8_t *)cuda_scratch(s, CUDA_SLOT_OP3, bytes + ((size_t)j->b.n_seqs + 1) * 4);
    if (!w->rows) return false;
    w->first = (int32_t *)(w->rows + bytes);
    widen_kernel<<<(unsigned)(s->n_sm * BLOCKS), THREADS, 0, s->cu>>>(*j, *w);
    return true;
}
