/* kernels/attn/attention_wgmma_cuda.cu - attention of each row on Hopper's matrix unit (sm_90a).
 *
 * A CTA takes a row and 64 heads, then the next. Keys come in tiles of 64 in the row's order and
 * are read once. Two warpgroups of producers gather them and widen them to bf16 in shared memory,
 * where two tiles fit; as keys are values, a tile serves both products. The next tile's codes wait
 * in registers and in what is left of shared memory: each piece is read as the one before it is
 * widened. Two warpgroups of consumers: each makes the scores and weights of every other tile,
 * hands the weights to the other through shared memory, and sums 256 of the 512 output columns over
 * all tiles in their order:
 *     first    scores 0 | weights 0 |  V 0   V 1  | scores 2 ...
 *     second   scores 1 | weights 1 |  V 0 | V 1  | scores 3 ...
 * Queries come by the copy engine; the output goes through the half of the last tile that its group
 * alone still reads.
 * Weights (softmax.cuh) are made against the tile's own maximum and then scaled by a power of two
 * to the running maximum, and so is what has been summed when that rises: the result is that of the
 * final maximum, in one pass, for all but numbers below 2^-126. The denominator adds the rounded
 * weights: a row with one great weight is exact.
 *
 * Order    of a row's sums: a score in one chain over the width; a tile's weights by four threads,
 *          each its columns ascending, then a butterfly; tiles ascending. Depends on nothing but
 *          its own keys.
 * Bound    The matrix unit would need 2048 cycles a tile, and shared memory is read and written for
 *          about as many; an H200 takes 5400 (of 8,192 rows of 640 keys, 1.9 ms). Producers look
 *          keys up for 1500 of these, widen for 2200, publish for 300 and wait for a slot for 1300;
 *          consumers wait for a tile for half of the time.
 */
#include "kernels/attn/key_tile.cuh"
#include "kernels/attn/softmax.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    HEADS = 64,
    CONSUMERS = 2,      /* warpgroups; half of the columns each */
    PRODUCER_WARPS = 8, /* eight keys of a tile each, four lanes a key */
    KEYS_A_WARP = KEY_ROWS / PRODUCER_WARPS,
    THREADS = CONSUMERS * 128 + PRODUCER_WARPS * 32,
    /* 64 Ki registers: a consumer holds 128 sums, 32 scores; a producer 16 words of codes. */
    CONSUMER_REGISTERS = 192,
    PRODUCER_REGISTERS = 64,
    CHUNK = 32 / KEYS_A_WARP, /* tiles whose keys a producer's warp looks up at once, one a lane */
    LAST_GROUP = 6,           /* where the second group of copies begins */
    KEPT = 3,                 /* pieces of codes that wait in a lane's registers */
};

/* What consumers are told of a row. */
struct row {
    int32_t t, h0, n; /* n keys; negative: no more rows */
};
/* The tiles of a CTA in chunks of a row's. */
struct walk {
    int32_t item, n, k0; /* the row's item; its keys; the chunk's first; n negative: no more rows */
    int32_t tiles;       /* of the chunk */
};
struct shared {
    uint8_t q[KEY_TILE];
    uint8_t tile[2][KEY_TILE];
    uint8_t p[KEY_BLOCK];                             /* weights of a tile: 64 heads x 64 keys */
    struct attn_chain chain[2][HEADS];                /* after that tile */
    struct walk walk[PRODUCER_WARPS];                 /* to the chunk that a producer looks up */
    struct attn_keys keys[PRODUCER_WARPS];            /* of its row */
    struct key_source sources[PRODUCER_WARPS][2][32]; /* of the chunk that it widens, of the next */
    struct walk pending;                              /* to the row whose queries are to be sent */
    uint4 waiting[PRODUCER_WARPS][KEY_CODES / 64 - KEPT][32];
    float sink[CONSUMERS][HEADS];
    struct row row;
    uint64_t full[2], empty[2]; /* tile: by its producers' warps; by all consumers' */
    uint64_t made[2];           /* weights and chain: by the warps of the one that made them */
    uint64_t q_full, q_empty;   /* queries and row */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int N> static __device__ __forceinline__ void set_registers_less(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void set_registers_more(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ------------------------------------------------------------------ producers */

/* A lane's key of a chunk, number lane % 8 of the warp's of tile lane / 8, where it is an entry of
 * a page. */
struct search {
    uint32_t word; /* on its way: the entry's number; then its page's */
    int32_t row;   /* of the page; negative: no entry */
};
/* The next chunk, perhaps of the next row that has keys: where this lane's key is to be looked
 * up. */
static __device__ __forceinline__ void search_begin(const struct attn_job &j, int32_t groups,
                                                    struct shared *sh, int warp, int lane,
                                                    struct key_source *source, struct search *s)
{
    const struct attn_keys &keys = sh->keys[warp];
    struct walk w = sh->walk[warp];
    w.k0 += w.tiles * KEY_ROWS;
    if (w.k0 >= w.n) {
        w.k0 = 0;
        w.n = -1;
        while ((w.item += gridDim.x) < j.T * groups) {
            struct attn_keys ks;
            if (!attn_keys_of(j, w.item / groups, &ks)) continue;
            __syncwarp();
            if (lane == 0) sh->keys[warp] = ks;
            w.n = ks.n;
            break;
        }
    }
    const int32_t left = (w.n - w.k0 + KEY_ROWS - 1) / KEY_ROWS,
                  chunks = (left + CHUNK - 1) / CHUNK;
    w.tiles = w.n < 0 ? 0 : (left + chunks - 1) / chunks; /* even: short ones leave no time */
    __syncwarp();
    if (lane == 0) sh->walk[warp] = w;
    __syncwarp();
    const int tile = lane / KEYS_A_WARP, key = warp * KEYS_A_WARP + lane % KEYS_A_WARP;
    const struct key_looked at = key_look(j, keys, w.k0 + tile * KEY_ROWS + key, w.n);
    s->row = -1;
    if (at.n < 0) {
        s->row = 0;
        s->word = (uint32_t)at.row;
        if (keys.selected) s->word = (uint32_t)__ldg(keys.selected + at.row);
    } else {
        source[lane] = key_source_of(j, {at.at, at.row, at.n}, 0);
    }
}
static __device__ __forceinline__ void search_page(const struct attn_job &j,
                                                   const struct attn_keys &keys, struct search *s)
{
    if (s->row < 0) return;
    const struct key_found f = key_find(j, {keys.q.page_ids, 0, -keys.q.page_step}, s->word);
    s->row = f.row;
    s->word = __ldg((const uint32_t *)f.at);
}
/* Its bytes to L2: what is read of it next comes from there. */
static __device__ __forceinline__ void search_end(const struct attn_job &j, const struct search &s,
                                                  int lane, struct key_source *source)
{
    if (s.row >= 0) {
        const struct key_source at = key_source_of(j, {NULL, s.row, -1}, s.word);
        source[lane] = at;
#pragma unroll
        for (int i = 0; i < KEY_BYTES; i += 128) key_prefetch(at.row + i);
        if (at.scales) key_prefetch(at.scales);
    }
    __syncwarp();
}

/* What a lane has read ahead of a tile: columns 16 (4 i + lane % 4) on, for every i, of a key in
 * e4m3; from i = KEPT on they wait in shared memory, the lane's own words there. */
struct fetched {
    uint4 codes[KEPT];
    uint2 scales;
};
static __device__ __forceinline__ void fetch(bool coded, const uint8_t *row, int i, int lane,
                                             uint4 (&waiting)[KEY_CODES / 64 - KEPT][32],
                                             struct fetched *r)
{
    if (coded) {
        const uint4 *from = (const uint4 *)row + lane % 4 + 4 * i;
        if (i < KEPT)
            r->codes[i] = dev_stream16(from);
        else
            dev_copy16(&waiting[i - KEPT][lane], from, true);
    }
    if (i == LAST_GROUP - 1 || i == KEY_CODES / 64 - 1) dev_copy_commit();
}

/* A row's queries, and what consumers are to know of it, where the row before is done with; the
 * queries of the row after it to L2. By one thread. */
static __device__ __forceinline__ void send_row(const CUtensorMap *queries,
                                                const struct attn_job &j, int32_t groups,
                                                int32_t item, int32_t n, int begun,
                                                struct shared *sh)
{
    const int32_t t = item / groups, h0 = item % groups * HEADS, next = item + (int32_t)gridDim.x;
    bar_wait(&sh->q_empty, begun % 2 ^ 1);
    sh->row = {t, h0, n};
    bar_expect(&sh->q_full, KEY_TILE);
#pragma unroll 1
    for (int i = 0; i < KEY_WIDTH / 64; i++)
        tile_load(sh->q + i * KEY_BLOCK, queries, &sh->q_full, i * TILE_BYTES, t * j.H + h0);
    if (next >= j.T * groups) return;
#pragma unroll 1
    for (int i = 0; i < KEY_WIDTH / 64; i++)
        tile_prefetch(queries, i * TILE_BYTES, next / groups * j.H + next % groups * HEADS);
}

/* A lane's part of a tile: as a piece of codes is widened, the next tile's takes its place. Groups
 * of copies: two of the tile's codes, then its values behind them, then two of the next tile's
 * codes. */
static __device__ __forceinline__ void
widen(const struct key_source *now, const struct key_source *next, const struct key_spot &at,
      int lane, uint4 (&waiting)[KEY_CODES / 64 - KEPT][32], struct fetched *bytes)
{
    const uint8_t *row = next->row;
    const bool coded = next->scales != NULL;
    const uint2 scales = bytes->scales;
    if (coded) bytes->scales = dev_stream8(next->scales);
    if (now->scales) {
        at.rest(now->row);
        dev_copy_commit();
        uint32_t odds = key_odd::add(scales);
#pragma unroll
        for (int i = 0; i < KEY_CODES / 64; i++) {
            if (i == KEPT || i == LAST_GROUP) dev_copy_wait<2>();
            const uint4 c = i < KEPT ? bytes->codes[i] : waiting[i - KEPT][lane];
            odds = key_odd::add(odds, c);
            at.codes(i, c, scales);
            fetch(coded, row, i, lane, waiting, bytes);
        }
        if (key_odd::any(odds)) at.odd_codes(*now);
    } else {
        at.plain(now->row);
        dev_copy_commit();
#pragma unroll
        for (int i = 0; i < KEY_CODES / 64; i++) fetch(coded, row, i, lane, waiting, bytes);
    }
    dev_copy_wait<2>();
}

static __device__ __forceinline__ int thread_in_group(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - CONSUMERS * 128;
}
static __device__ __forceinline__ void produce(const CUtensorMap *queries, const struct attn_job &j,
                                               int32_t groups, struct shared *sh, int thread)
{
    struct search next;
    struct fetched bytes;
    int begun = 0, tile = 0, tiles; /* rows sent; of a chunk */
    int warp = thread / 32, lane = thread % 32;
    if (lane == 0) sh->walk[warp] = {(int32_t)(blockIdx.x - gridDim.x), -1, 0, 0};
    __syncwarp();
    search_begin(j, groups, sh, warp, lane, sh->sources[warp][0], &next);
    tiles = sh->walk[warp].tiles;
    if (tiles && thread == 0) {
        sh->pending.item = -1;
        send_row(queries, j, groups, sh->walk[0].item, sh->walk[0].n, begun++, sh);
    }
    search_page(j, sh->keys[warp], &next);
    search_end(j, next, lane, sh->sources[warp][0]);
    {
        const struct key_source s = sh->sources[warp][0][lane / 4];
        if (s.scales) bytes.scales = dev_stream8(s.scales);
#pragma unroll
        for (int i = 0; i < KEY_CODES / 64; i++)
            fetch(s.scales, s.row, i, lane, sh->waiting[warp], &bytes);
    }
    int turn = 0; /* of the chunks */
#pragma unroll 1
    for (uint32_t made = 0; tiles; made++) {
        /* Read anew, or the compiler keeps what follows from it where it takes longer to come
         * back. */
        thread = thread_in_group();
        warp = thread / 32, lane = thread % 32;
        const int slot = made & 1;
        struct key_source *upcoming = sh->sources[warp][turn ^ 1];
        if (tile == 0) search_begin(j, groups, sh, warp, lane, upcoming, &next);
        if (tile == 1 || tiles == 1) search_page(j, sh->keys[warp], &next);
        if (tile == 2 || (tiles < 3 && tile == tiles - 1)) search_end(j, next, lane, upcoming);
        bar_wait(&sh->empty[slot], made / 2 % 2 ^ 1);
        if (tile == 0 && thread == 0 && sh->pending.item >= 0)
            send_row(queries, j, groups, sh->pending.item, sh->pending.n, begun++, sh);
        __syncwarp();
        const struct key_source *s = sh->sources[warp][turn] + tile * KEYS_A_WARP + lane / 4;
        widen(s, tile + 1 < tiles ? s + KEYS_A_WARP : upcoming + lane / 4,
              key_spot(sh->tile[slot], warp * KEYS_A_WARP + lane / 4, lane), lane,
              sh->waiting[warp], &bytes);
        wgmma_shared();
        __syncwarp();
        if (lane == 0) bar_arrive(&sh->full[slot]);
        if (++tile < tiles) continue;
        tile = 0;
        turn ^= 1;
        tiles = sh->walk[warp].tiles;
        if (thread == 0) {
            sh->pending = sh->walk[0];
            if (sh->pending.k0) sh->pending.item = -1;
        }
    }
    if (thread != 0) return;
    bar_wait(&sh->q_empty, begun % 2 ^ 1);
    sh->row.n = -1;
    bar_arrive(&sh->q_full);
}

/* ------------------------------------------------------------------ consumers */

/* The descriptor of what lies `bytes` further on: the address never carries into the upper word. */
static __device__ __forceinline__ uint64_t on(uint64_t descriptor, int bytes)
{
    return (descriptor & ~(uint64_t)0xffffffff) | (uint32_t)((uint32_t)descriptor + (bytes >> 4));
}
/* Sixteen keys' weights. */
static __device__ __forceinline__ const uint32_t *step(const uint32_t (&p)[16], int i)
{
    return p + 4 * i;
}
static __device__ __forceinline__ uint64_t step(uint64_t p, int i)
{
    return on(p, i * 32);
}
/* Scores of a tile: one chain over the width. */
static __device__ __forceinline__ void scores(const struct shared *sh, int slot, float (&s)[32])
{
    const uint64_t q = wgmma_rows(sh->q), k = wgmma_rows(sh->tile[slot]);
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEY_WIDTH / 16; i++)
        wgmma_bf16(s, on(q, i / 4 * KEY_BLOCK + i % 4 * 32), on(k, i / 4 * KEY_BLOCK + i % 4 * 32),
                   i > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
}
/* A thread's sums: of this group's columns 128 at a time, as ptxas refuses instructions of 256 in a
 * kernel of so many threads. */
typedef float sums[2][64];

/* o (+)= weights times this group's columns of a tile; begun, not waited for. P: words of weights,
 * or the descriptor of the other group's. */
template <typename P>
static __device__ __forceinline__ void add(const struct shared *sh, int slot, int group, const P &p,
                                           bool more, sums &o)
{
    const uint64_t v = wgmma_columns(sh->tile[slot] + group * (KEY_TILE / 2), KEY_BLOCK, 1024);
    wgmma_pin(o[0]);
    wgmma_pin(o[1]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEY_ROWS / 16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            wgmma_bf16_columns(o[half], step(p, i), on(v, half * 2 * KEY_BLOCK + i * 2048),
                               i > 0 || more);
    wgmma_commit();
}
static __device__ __forceinline__ void add_done(sums &o)
{
    wgmma_wait<0>();
    wgmma_pin(o[0]);
    wgmma_pin(o[1]);
}
/* The sums of this thread's two heads times powers of two. */
static __device__ __forceinline__ void rescale(float f0, float f1, sums &o)
{
    if (__all_sync(~0u, f0 == 1.0f && f1 == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
        float *four = &o[i / 64][i % 64];
        four[0] *= f0;
        four[1] *= f0;
        four[2] *= f1;
        four[3] *= f1;
    }
}
static __device__ __forceinline__ void arrive(uint64_t *bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(bar);
}

/* A tile's weights of this thread's two heads, against the tile's own references; their sums. */
struct weights {
    uint32_t p[16];
    float reference[2], sum[2];
};
static __device__ __forceinline__ void weigh(int32_t k0, int32_t n, float factor, float (&s)[32],
                                             struct weights *w)
{
    const int col = threadIdx.x % 4 * 2;
    const int32_t there = n - k0; /* keys of this tile */
    float top[2] = {-kern_float(0x7f800000u), -kern_float(0x7f800000u)};
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] *= factor;
    if (there < KEY_ROWS) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i / 4 * 8 + col + i % 2 >= there) s[i] = -kern_float(0x7f800000u);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]); /* passes over NaN */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        w->reference[r] = attn_reference(top[r]);
        w->sum[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const uint32_t two = attn_weights(s[2 * i], s[2 * i + 1], w->reference[i % 2]);
        w->sum[i % 2] += kern_float(two << 16);
        w->sum[i % 2] += kern_float(two & 0xffff0000u);
        w->p[i] = two;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        w->sum[r] += __shfl_xor_sync(~0u, w->sum[r], 1);
        w->sum[r] += __shfl_xor_sync(~0u, w->sum[r], 2);
    }
}
/* The chain after that tile, its weights against the chain's reference; f: what that changes sums
 * by. */
static __device__ __forceinline__ void join(struct weights *w, struct attn_chain (&c)[2],
                                            float (&f)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float m = fmaxf(c[r].m, w->reference[r]), power = attn_power(w->reference[r] - m);
        f[r] = attn_power(c[r].m - m);
        c[r].sum = fmaf(c[r].sum, f[r], w->sum[r] * power);
        c[r].m = m;
#pragma unroll
        for (int i = r; i < 16; i += 2) w->p[i] = attn_scaled(w->p[i], power);
    }
}
/* All warps of a group: they have read the other's weights, in whose place their own come next. */
static __device__ __forceinline__ void group_meet(int group)
{
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}
/* p lies as wgmma wants it from registers: word 2 i + r has row r's columns 8 i + 2 (lane % 4)
 * on. */
static __device__ __forceinline__ void publish(struct shared *sh, int slot, const uint32_t (&p)[16],
                                               const struct attn_chain (&c)[2])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 16; i++)
        *(uint32_t *)(sh->p + (row + i % 2 * 8) * 128 + ((i / 2 ^ lane / 4) << 4) + lane % 4 * 4) =
            p[i];
    if (lane % 4 == 0) {
        sh->chain[slot][row] = c[0];
        sh->chain[slot][row + 8] = c[1];
    }
    wgmma_shared();
    arrive(&sh->made[slot]);
}
/* The chain after the other group's tile; f: what that changes this group's sums by. */
static __device__ __forceinline__ void follow(const struct shared *sh, int slot,
                                              struct attn_chain (&c)[2], float (&f)[2])
{
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const struct attn_chain now = sh->chain[slot][row + 8 * r];
        f[r] = attn_power(c[r].m - now.m);
        c[r] = now;
    }
}

/* A warp's 16 heads' sinks to where they wait for the row's end. */
static __device__ __forceinline__ void load_sinks(const struct attn_job &j, const struct row &row,
                                                  float (&sink)[HEADS])
{
    const int i = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    if (threadIdx.x % 32 >= 16) return;
    if (row.h0 + i < j.H)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dev_shared(&sink[i])),
                     "l"(__cvta_generic_to_global(j.sink + row.h0 + i))
                     : "memory");
    else
        sink[i] = 0.0f;
}
/* The row's columns of this group, through `room` for them, which lies as half of a tile. */
static __device__ __forceinline__ void store_row(const struct attn_job &j, const struct row &row,
                                                 int group, const struct attn_chain (&c)[2],
                                                 const float (&sink)[HEADS], const sums &o,
                                                 uint8_t *room)
{
    const int lane = threadIdx.x % 32, head0 = threadIdx.x / 32 % 4 * 16;
    float inverse[2];
    dev_copy_wait<0>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; r++) inverse[r] = attn_inverse(c[r], sink[head0 + lane / 4 + 8 * r]);
    uint8_t *to = room + (head0 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < 16; i++) { /* sixteen columns */
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *two = &o[i / 8][i % 8 * 8 + 2 * k];
            w[k] = attn_bf16x2(two[0] * inverse[k % 2], two[1] * inverse[k % 2]);
        }
        dev_store_matrix4(to + i / 4 * KEY_BLOCK + ((i % 4 * 2 + lane / 16 ^ lane % 8) << 4), w);
    }
    __syncwarp();
#pragma unroll 8
    for (int i = 0; i < 16; i++) {
        const int head = head0 + i;
        const uint4 piece =
            *(const uint4 *)(room + lane / 8 * KEY_BLOCK + head * 128 + ((lane ^ head) % 8 << 4));
        if (row.h0 + head < j.H)
            *((uint4 *)((uint16_t *)j.o + ((int64_t)row.t * j.H + row.h0 + head) * KEY_WIDTH +
                        group * (KEY_WIDTH / 2)) +
              lane) = piece;
    }
}

/* The group as a constant: descriptors are then uniform. */
template <int group>
static __device__ __forceinline__ void consume(const struct attn_job &j, struct shared *sh)
{
    constexpr int own = group, other = group ^ 1; /* slots: a group weighs the tiles of its own */
    const float factor = attn_factor(j.scale);
    sums o;
    const uint64_t theirs = wgmma_rows(sh->p);
    uint32_t g0 = 0; /* tiles before this row */
    for (int begun = 0;; begun++) {
        bar_wait(&sh->q_full, begun % 2);
        const struct row row = sh->row;
        if (row.n < 0) break;
        const int32_t tiles = (row.n + KEY_ROWS - 1) / KEY_ROWS;
        const bool first = g0 % 2 == (uint32_t)group;
        struct attn_chain c[2] = {{ATTN_LEAST, 0}, {ATTN_LEAST, 0}};
        load_sinks(j, row, sh->sink[group]);
        if (!first && tiles < 2) arrive(&sh->q_empty);
        for (int32_t i = 0; i < tiles; i += 2) {
            /* Both tiles' slots, and how often those were used before. The row's last tile's
             * becomes empty when the output has gone through it. */
            const uint32_t use0 = (g0 + i) / 2, use1 = (g0 + i + 1) / 2;
            const bool two = i + 1 < tiles, more = i + 2 < tiles;
            float s[32], f[2];
            struct weights w;
            if (first) {
                bar_wait(&sh->full[own], use0 % 2);
                scores(sh, own, s);
                if (!more) arrive(&sh->q_empty);
                weigh(i * KEY_ROWS, row.n, factor, s, &w);
                join(&w, c, f);
                group_meet(group);
                publish(sh, own, w.p, c);
                if (i) rescale(f[0], f[1], o);
                add(sh, own, group, w.p, i > 0, o);
                if (two) {
                    bar_wait(&sh->full[other], use1 % 2);
                    bar_wait(&sh->made[other], use1 % 2);
                    follow(sh, other, c, f);
                    add_done(o);
                    arrive(&sh->empty[own]);
                    rescale(f[0], f[1], o);
                    add(sh, other, group, theirs, true, o);
                    add_done(o);
                    if (more) arrive(&sh->empty[other]);
                } else {
                    add_done(o);
                }
            } else {
                if (two) {
                    bar_wait(&sh->full[own], use1 % 2);
                    scores(sh, own, s);
                    if (i + 3 >= tiles) arrive(&sh->q_empty);
                    weigh((i + 1) * KEY_ROWS, row.n, factor, s, &w);
                }
                bar_wait(&sh->full[other], use0 % 2);
                bar_wait(&sh->made[other], use0 % 2);
                follow(sh, other, c, f);
                if (i) rescale(f[0], f[1], o);
                add(sh, other, group, theirs, i > 0, o);
                if (two) join(&w, c, f);
                add_done(o);
                if (two) {
                    arrive(&sh->empty[other]);
                    group_meet(group);
                    publish(sh, own, w.p, c);
                    rescale(f[0], f[1], o);
                    add(sh, own, group, w.p, true, o);
                    add_done(o);
                    if (more) arrive(&sh->empty[own]);
                }
            }
        }
        g0 += (uint32_t)tiles;
        const uint32_t last = (g0 - 1) % 2;
        store_row(j, row, group, c, sh->sink[group], o, sh->tile[last] + group * (KEY_TILE / 2));
        arrive(&sh->empty[last]);
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    wgmma_kernel(const __grid_constant__ struct attn_job j, int32_t groups,
                 const __grid_constant__ CUtensorMap queries)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct shared *sh = (struct shared *)raw;
    if (threadIdx.x == 0) {
        if (dev_shared(raw) % 1024) __trap(); /* swizzles count from there; no room to move */
        for (int i = 0; i < 2; i++) {
            bar_init(&sh->full[i], PRODUCER_WARPS);
            bar_init(&sh->empty[i], CONSUMERS * 4);
            bar_init(&sh->made[i], 4);
        }
        bar_init(&sh->q_full, 1);
        bar_init(&sh->q_empty, CONSUMERS * 4);
        bar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
    if (group >= CONSUMERS) {
        set_registers_less<PRODUCER_REGISTERS>();
        produce(&queries, j, groups, sh, (int)threadIdx.x - CONSUMERS * 128);
    } else {
        set_registers_more<CONSUMER_REGISTERS>();
        if (group == 0)
            consume<0>(j, sh);
        else
            consume<1>(j, sh);
    }
}

#else
static __global__ void wgmma_kernel(const __grid_constant__ struct attn_job, int32_t,
                                    const __grid_constant__ CUtensorMap)
{
}
#endif

bool attention_wgmma(struct kern_stream *s, const struct attn_job *j)
{
    const int bytes = (int)sizeof(struct shared);
    static_assert(sizeof(struct shared) <= 227 * 1024, "shared memory of a block");
    const int64_t groups = cuda_ceil(j->H, HEADS), items = j->T * groups;
    CUtensorMap queries;
    if (!cuda_tile_map(&queries, j->q, (int64_t)j->T * j->H, KEY_WIDTH * 2, KEY_WIDTH * 2, HEADS))
        return false;
    CUDA_SHARED(wgmma_kernel, bytes);
    wgmma_kernel<<<(unsigned)(items < s->n_sm ? items : s->n_sm), THREADS, bytes, s->cu>>>(
        *j, (int32_t)groups, queries);
    return true;
}
