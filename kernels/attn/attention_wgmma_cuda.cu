/* kernels/attn/attention_wgmma_cuda.cu - attention of each row on Hopper's matrix unit (sm_90a).
 *
 * A CTA takes a row and 64 heads, then the next. Keys come in tiles of 64 in the row's order and
 * are read once; as keys are values, a tile serves both products. Two tiles fit in shared memory,
 * each in quarters of 128 columns that are filled and given back one by one. Two warpgroups of
 * producers bring them:
 *     a chunk's    rows read the same keys many times, so attention_widen_cuda.cu has stored keys
 *                  in bf16 by now, and copies bring them; producers wait for nothing but room
 *     few rows'    codes are widened in the tile; the next tile's wait in registers and in what is
 *                  left of shared memory: each piece is read as the one before it is widened
 * Two warpgroups of consumers: each makes the scores and weights of every other tile, hands the
 * weights to the other through shared memory, and sums 256 of the 512 output columns over all tiles
 * in their order:
 *     first    scores 0 | weights 0 |  V 0   V 1  | scores 2 ...
 *     second   scores 1 | weights 1 |  V 0 | V 1  | scores 3 ...
 * Where keys are widened in their tiles, tile 1 comes late, and the second sums V 0 before the
 * scores of 1, so that tile 2 has its room sooner.
 * Queries come by the copy engine; the output goes through the half of the last tile that its group
 * alone still reads, or, turned back and in the order of slots (attend), to memory as threads have
 * it.
 * Weights (softmax.cuh) are made against the tile's own maximum and then scaled by a power of two
 * to the row's reference, and so is what has been summed when that rises: the result is that of the
 * final maximum, in one pass, for all but numbers below 2^-118. The denominator adds the rounded
 * weights: a row with one great weight is exact.
 *
 * Order    of a row's sums: a score in one chain over the width; a tile's weights by four threads,
 *          each its columns ascending, then a butterfly; tiles ascending. Depends on nothing but
 *          its own keys.
 * Bound    The matrix unit would need 2048 cycles a tile; an H200 takes 3300 (of 8,192 rows of 640
 *          keys, 1.3 ms) and the unit is active 63 % of them. What a tile goes through before its
 *          slot is filled again binds, twice over for two slots: copies 1300 cycles, scores 1700
 *          (1024 alone), weights 900, from one group to the other 700, the other's sums 900.
 *          Widening in the tile it takes 5000.
 */
#include "kernels/attn/attention_slots.cuh"
#include "kernels/attn/attention_warp.cuh"
#include "kernels/attn/key_tile.cuh"
#include "kernels/attn/softmax.cuh"

enum {
    HEADS = 64,
    CONSUMERS = 2,      /* warpgroups; half of the columns each */
    PRODUCER_WARPS = 8, /* eight keys of a tile each */
    KEYS_A_WARP = KEY_ROWS / PRODUCER_WARPS,
    THREADS = CONSUMERS * 128 + PRODUCER_WARPS * 32,
    /* 64 Ki registers: a consumer holds 128 sums, 32 scores; a producer 12 words of codes. */
    CONSUMER_REGISTERS = 192,
    PRODUCER_REGISTERS = 64,
    CHUNK = 32 / KEYS_A_WARP, /* tiles whose keys a producer's warp looks up at once, one a lane */
    LAST_GROUP = 6,           /* where the second group of copies begins */
    QUARTERS = 4,             /* of a tile: what is awaited and given back at once */
    QUARTER = KEY_TILE / QUARTERS,
    KEPT = 3, /* pieces of codes that wait in a lane's registers */
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
    /* Weights of a tile, 64 heads x 64 keys: of the first group's tiles, and, where keys are bf16
     * already, of the second's. */
    uint8_t p[KEY_BLOCK];
    union {
        uint8_t p1[KEY_BLOCK];
        /* Of the chunk that a producer widens, of the next. */
        struct key_source sources[PRODUCER_WARPS][2][32];
    };
    struct attn_chain chain[2][HEADS];     /* after that tile */
    struct walk walk[PRODUCER_WARPS];      /* to the chunk that a producer looks up */
    struct attn_keys keys[PRODUCER_WARPS]; /* of its row */
    struct walk pending;                   /* to the row whose queries are to be sent */
    uint4 waiting[PRODUCER_WARPS][KEY_CODES / 64 - KEPT][32];
    float sink[CONSUMERS][HEADS];
    float angles[2][2][32]; /* of the row and of the one before: cos and sin, where o is turned */
    struct row row;
    /* Quarters of a tile, 128 columns: by its producers, warps or threads; by the threads of the
     * group that sums the columns. */
    uint64_t full[2][QUARTERS], empty[2][QUARTERS];
    uint64_t made[2];         /* weights and chain: by the warps of the one that made them */
    uint64_t q_full, q_empty; /* queries and row */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* What L2 should do with queries, which are read once: they pushed keys out, which many rows
 * read. */
static __device__ __forceinline__ uint64_t read_once(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
/* tile_load() and tile_prefetch() of them. */
static __device__ __forceinline__ void load_once(void *to, const CUtensorMap *map, uint64_t *bar,
                                                 int32_t at, int32_t row)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dev_shared(to)),
                 "l"(map), "r"(at), "r"(row), "r"(dev_shared(bar)), "l"(read_once())
                 : "memory");
}
static __device__ __forceinline__ void prefetch_once(const CUtensorMap *map, int32_t at,
                                                     int32_t row)
{
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint "
                 "[%0, {%1, %2}], %3;" ::"l"(map),
                 "r"(at), "r"(row), "l"(read_once())
                 : "memory");
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
    bar_expect(&sh->q_full, KEY_TILE + (j.cos ? (int)sizeof sh->angles[0] : 0));
    if (j.cos) {
        float(&to)[2][32] = sh->angles[begun % 2];
        bulk_load(to[0], j.cos + t * 32, sizeof to[0], &sh->q_full);
        bulk_load(to[1], j.sin + t * 32, sizeof to[1], &sh->q_full);
    }
#pragma unroll 1
    for (int i = 0; i < KEY_WIDTH / 64; i++)
        load_once(sh->q + i * KEY_BLOCK, queries, &sh->q_full, i * TILE_BYTES, t * j.H + h0);
    if (next >= j.T * groups) return;
#pragma unroll 1
    for (int i = 0; i < KEY_WIDTH / 64; i++)
        prefetch_once(queries, i * TILE_BYTES, next / groups * j.H + next % groups * HEADS);
}

static __device__ __forceinline__ void end_rows(int begun, struct shared *sh)
{
    bar_wait(&sh->q_empty, begun % 2 ^ 1);
    sh->row.n = -1;
    bar_arrive(&sh->q_full);
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
        uint32_t odds = key_odd::scales(scales.x) | key_odd::scales(scales.y & 0x00ffffffu);
#pragma unroll
        for (int i = 0; i < KEY_CODES / 64; i++) {
            if (i == KEPT || i == LAST_GROUP) dev_copy_wait<2>();
            const uint4 c = i < KEPT ? bytes->codes[i] : waiting[i - KEPT][lane];
            odds = key_odd::add(odds, c);
            at.codes(i, c, key_factor(i < 4 ? scales.x : scales.y, i % 4));
            fetch(coded, row, i, lane, waiting, bytes);
        }
        if (key_odd::any(odds)) at.odd_codes(*now, 0, KEY_CODES / 64);
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
#pragma unroll 1
        for (int i = 0; i < QUARTERS; i++) bar_wait(&sh->empty[slot][i], made / 2 % 2 ^ 1);
        if (tile == 0 && thread == 0 && sh->pending.item >= 0)
            send_row(queries, j, groups, sh->pending.item, sh->pending.n, begun++, sh);
        __syncwarp();
        const struct key_source *s = sh->sources[warp][turn] + tile * KEYS_A_WARP + lane / 4;
        widen(s, tile + 1 < tiles ? s + KEYS_A_WARP : upcoming + lane / 4,
              key_spot(sh->tile[slot], warp * KEYS_A_WARP + lane / 4, lane), lane,
              sh->waiting[warp], &bytes);
        wgmma_shared();
        __syncwarp();
        if (lane < QUARTERS) bar_arrive(&sh->full[slot][lane]);
        if (++tile < tiles) continue;
        tile = 0;
        turn ^= 1;
        tiles = sh->walk[warp].tiles;
        if (thread == 0) {
            sh->pending = sh->walk[0];
            if (sh->pending.k0) sh->pending.item = -1;
        }
    }
    if (thread == 0) end_rows(begun, sh);
}

/* Where a row's keys lie that are bf16 already; item beyond the last: no row. */
struct wide_row {
    int32_t item, n, n_window, old; /* keys; of the window; of these, from the ring */
    uint32_t from;                  /* position of the first */
    const int32_t *selected;
    const uint8_t *batch, *stored; /* the window's first in the batch; the ring, then entries */
};
/* The row after it, on its way: what its keys follow from, and the sequence of the one after. */
struct wide_next {
    int32_t item, row0, first, n_selected;
    int64_t pos0;
    int32_t after, after_seq;
};
static __device__ __forceinline__ void after_next(const struct attn_job &j, int32_t groups,
                                                  int32_t item, struct wide_next *x)
{
    x->after = item;
    if (item < j.T * groups) x->after_seq = __ldg(j.b.row_seq + item / groups);
}
static __device__ __forceinline__ void
next_begin(const struct attn_job &j, const struct attn_wide &w, int32_t groups, struct wide_next *x)
{
    while (x->after < j.T * groups && x->after_seq < 0)
        after_next(j, groups, x->after + (int32_t)gridDim.x, x);
    x->item = x->after;
    if (x->item >= j.T * groups) return;
    const struct cuda_seq *q = j.b.seqs + x->after_seq;
    x->pos0 = q->pos0;
    x->row0 = q->row0;
    x->first = w.first[x->after_seq];
    if (j.k.y.ratio && j.selected) x->n_selected = __ldg(j.n_selected + x->item / groups);
    after_next(j, groups, x->after + (int32_t)gridDim.x, x);
}
static __device__ __forceinline__ void row_begin(const struct attn_job &j,
                                                 const struct attn_wide &w, int32_t groups,
                                                 const struct wide_next &x, struct wide_row *r)
{
    r->item = x.item;
    if (r->item >= j.T * groups) return;
    const int32_t t = x.item / groups;
    const struct attn_keys ks = attn_keys_at(j, t, x.pos0, x.row0, x.n_selected);
    r->n = ks.n;
    r->n_window = ks.n_window;
    r->from = (uint32_t)ks.from;
    r->old = x.pos0 > ks.from ? (int32_t)(x.pos0 - ks.from) : 0;
    r->selected = ks.selected;
    r->batch = (const uint8_t *)j.kv + (x.row0 + ks.from - x.pos0) * (KEY_WIDTH * 2);
    r->stored = w.rows + (int64_t)x.first * (KEY_WIDTH * 2);
}
/* Number of key i of a row in its sequence where it is an entry. */
static __device__ __forceinline__ uint32_t entry_of(const struct wide_row &r, int32_t i)
{
    if (!r.selected) return (uint32_t)(i - r.n_window);
    return i >= r.n_window && i < r.n ? (uint32_t)__ldg(r.selected + (i - r.n_window)) : 0;
}
static __device__ __forceinline__ const uint8_t *
wide_key(const struct attn_job &j, const struct wide_row &r, int32_t i, uint32_t entry)
{
    const uint32_t window = (uint32_t)j.k.window;
    if (i >= r.n_window) return r.stored + (int64_t)(window + entry) * (KEY_WIDTH * 2);
    if (i >= r.old) return r.batch + (int64_t)i * (KEY_WIDTH * 2);
    return r.stored + (int64_t)((r.from + (uint32_t)i) % window) * (KEY_WIDTH * 2);
}
/* When this thread's copies so far have come. */
static __device__ __forceinline__ void arrive_with_copies(uint64_t *bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(dev_shared(bar))
                 : "memory");
}

/* Keys in bf16: copies, a quarter of a tile at a time, eight lanes a key. Nothing is waited for but
 * room: a row is looked up one row ahead, keys one chunk of tiles ahead, a key a lane. */
static __device__ __forceinline__ void produce_wide(const CUtensorMap *queries,
                                                    const struct attn_job &j,
                                                    const struct attn_wide &w, int32_t groups,
                                                    struct shared *sh, int thread)
{
    enum { KEYS = KEYS_A_WARP / 4 }; /* that a lane copies of */
    const int lane = thread % 32, piece = lane % 8;
    const int sought =
        lane / KEYS_A_WARP * KEY_ROWS + thread / 32 * KEYS_A_WARP + lane % KEYS_A_WARP;
    uint32_t to[KEYS];
    struct wide_next next;
    struct wide_row row;
    int begun = 0;
#pragma unroll
    for (int u = 0; u < KEYS; u++) {
        const int r = thread / 32 * KEYS_A_WARP + lane / 8 + 4 * u;
        to[u] = (uint32_t)(r * 128 + ((piece ^ r % 8) << 4));
    }
    after_next(j, groups, (int32_t)blockIdx.x, &next);
    next_begin(j, w, groups, &next);
    row_begin(j, w, groups, next, &row);
    next_begin(j, w, groups, &next);
    uint32_t entry = row.item < j.T * groups ? entry_of(row, sought) : 0, made = 0;
    int32_t k0 = 0;
#pragma unroll 1
    while (row.item < j.T * groups) {
        const int32_t item = k0 ? -1 : row.item, n = row.n, left = n - k0;
        const uint8_t *const key =
            k0 + sought < n ? wide_key(j, row, k0 + sought, entry) : (const uint8_t *)NULL;
        k0 += CHUNK * KEY_ROWS;
        if (k0 >= n) {
            k0 = 0;
            row_begin(j, w, groups, next, &row);
            next_begin(j, w, groups, &next);
        }
        if (row.item < j.T * groups) entry = entry_of(row, k0 + sought);
#pragma unroll 1
        for (int tile = 0; tile < CHUNK && tile * KEY_ROWS < left; tile++, made++) {
            const int slot = made & 1, parity = (int)(made / 2 % 2 ^ 1);
            const uint8_t *from[KEYS];
            bool there[KEYS];
#pragma unroll
            for (int u = 0; u < KEYS; u++) {
                const uint64_t at = __shfl_sync(~0u, (unsigned long long)(uintptr_t)key,
                                                tile * KEYS_A_WARP + lane / 8 + 4 * u);
                there[u] = at != 0;
                from[u] = (at ? (const uint8_t *)(uintptr_t)at : w.rows) + piece * 16;
            }
#pragma unroll
            for (int i = 0; i < QUARTERS; i++) {
                bar_wait(&sh->empty[slot][i], parity);
#pragma unroll
                for (int u = 0; u < KEYS; u++)
#pragma unroll
                    for (int block = 0; block < 2; block++)
                        dev_copy16(sh->tile[slot] + i * QUARTER + block * KEY_BLOCK + to[u],
                                   from[u] + (2 * i + block) * 128, there[u]);
                arrive_with_copies(&sh->full[slot][i]);
                if (i == 1 && tile == 0 && item >= 0 && thread == 0)
                    send_row(queries, j, groups, item, n, begun++, sh);
            }
            __syncwarp();
        }
    }
    if (thread == 0) end_rows(begun, sh);
    dev_copy_wait<0>();
}

/* ------------------------------------------------------------------ consumers */

/* Sixteen keys' weights. */
static __device__ __forceinline__ const uint32_t *step(const uint32_t (&p)[16], int i)
{
    return p + 4 * i;
}
static __device__ __forceinline__ uint64_t step(uint64_t p, int i)
{
    return on(p, i * 32);
}
/* This group's columns of the other's tile. */
static __device__ __forceinline__ void others_wait(struct shared *sh, int slot, int group,
                                                   int parity)
{
    bar_wait(&sh->full[slot][2 * group], parity);
    bar_wait(&sh->full[slot][2 * group + 1], parity);
}
/* Scores of a tile: one chain over the width. */
static __device__ __forceinline__ void scores(struct shared *sh, int slot, int parity,
                                              float (&s)[32])
{
    const uint64_t q = wgmma_rows(sh->q), k = wgmma_rows(sh->tile[slot]);
#pragma unroll
    for (int n = 0; n < QUARTERS; n++) {
        bar_wait(&sh->full[slot][n], parity);
        if (n == 0) wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEY_WIDTH / 16 / QUARTERS; i++) {
            const int at = n * QUARTER + i / 4 * KEY_BLOCK + i % 4 * 32;
            wgmma_bf16(s, on(q, at), on(k, at), n + i > 0);
        }
        wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_pin(s);
}
/* A thread's sums: of this group's columns 128 at a time, as ptxas refuses instructions of 256 in a
 * kernel of so many threads. */
typedef float sums[2][64];

/* o (+)= weights times this group's columns of a tile, a quarter's and then the other's; begun, not
 * waited for. P: words of weights, or the descriptor of the other group's. */
template <typename P>
static __device__ __forceinline__ void add(const struct shared *sh, int slot, int group, const P &p,
                                           bool more, sums &o)
{
    const uint64_t v = wgmma_columns(sh->tile[slot] + group * (KEY_TILE / 2), KEY_BLOCK, 1024);
    wgmma_pin(o[0]);
    wgmma_pin(o[1]);
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < KEY_ROWS / 16; i++)
            wgmma_bf16_columns(o[half], step(p, i), on(v, half * QUARTER + i * 2048),
                               i > 0 || more);
        wgmma_commit();
    }
}
/* Waits for that; gives the quarters back, but those of a row's last tile. */
static __device__ __forceinline__ void add_done(struct shared *sh, int slot, int group, bool last,
                                                sums &o)
{
    wgmma_wait<1>();
    wgmma_pin(o[0]);
    if (!last) arrive_all(&sh->empty[slot][2 * group]);
    wgmma_wait<0>();
    wgmma_pin(o[1]);
    if (!last) arrive_all(&sh->empty[slot][2 * group + 1]);
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
        const float m = attn_raised(c[r].m, w->reference[r]),
                    power = attn_power(w->reference[r] - m);
        f[r] = attn_power(c[r].m - m);
        c[r].sum = fmaf(c[r].sum, f[r], w->sum[r] * power);
        c[r].m = m;
#pragma unroll
        for (int i = r; i < 16; i += 2) w->p[i] = attn_scaled(w->p[i], power);
    }
}
/* All warps of a group: what wgmma reads for each of them may be written anew, weights by the next
 * tile's, a tile by the row's output. */
static __device__ __forceinline__ void group_meet(int group)
{
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}
/* p lies as wgmma wants it from registers: word 2 i + r has row r's columns 8 i + 2 (lane % 4)
 * on. */
static __device__ __forceinline__ void publish(struct shared *sh, int slot, uint8_t *to,
                                               const uint32_t (&p)[16],
                                               const struct attn_chain (&c)[2])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 16; i++)
        *(uint32_t *)(to + (row + i % 2 * 8) * 128 + ((i / 2 ^ lane / 4) << 4) + lane % 4 * 4) =
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
/* One over this thread's two heads' denominators. */
static __device__ __forceinline__ void invert(const struct attn_chain (&c)[2],
                                              const float (&sink)[HEADS], float (&inverse)[2])
{
    const int head = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    dev_copy_wait<0>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; r++) inverse[r] = attn_inverse(c[r], sink[head + 8 * r]);
}
/* The row's columns of this group, through `room` for them, which lies as half of a tile. */
static __device__ __forceinline__ void store_row(const struct attn_job &j, const struct row &row,
                                                 int group, const float (&inverse)[2],
                                                 const sums &o, uint8_t *room)
{
    const int lane = threadIdx.x % 32, head0 = threadIdx.x / 32 % 4 * 16;
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
            __stcs((uint4 *)((uint16_t *)j.o + ((int64_t)row.t * j.H + row.h0 + head) * KEY_WIDTH +
                             group * (KEY_WIDTH / 2)) +
                       lane,
                   piece);
    }
}

/* The group as a constant: descriptors are then uniform. */
template <int group>
static __device__ __forceinline__ void consume(const struct attn_job &j, bool wide,
                                               struct shared *sh)
{
    constexpr int own = group, other = group ^ 1; /* slots: a group weighs the tiles of its own */
    const float factor = attn_factor(j.scale);
    sums o;
    /* Where there is room for both groups' weights, those of a tile are read when its quarters are
     * given back, and written anew when those are full again: nobody need meet. */
    uint8_t *const ours = wide && group ? sh->p1 : sh->p;
    const uint64_t theirs = wgmma_rows(wide && !group ? sh->p1 : sh->p);
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
                scores(sh, own, use0 % 2, s);
                if (!more) arrive(&sh->q_empty);
                weigh(i * KEY_ROWS, row.n, factor, s, &w);
                join(&w, c, f);
                if (!wide) group_meet(group);
                publish(sh, own, ours, w.p, c);
                if (i) rescale(f[0], f[1], o);
                add(sh, own, group, w.p, i > 0, o);
                add_done(sh, own, group, !two, o);
                if (two) {
                    others_wait(sh, other, group, use1 % 2);
                    bar_wait(&sh->made[other], use1 % 2);
                    follow(sh, other, c, f);
                    rescale(f[0], f[1], o);
                    add(sh, other, group, theirs, true, o);
                    add_done(sh, other, group, !more, o);
                }
            } else if (!wide) {
                others_wait(sh, other, group, use0 % 2);
                bar_wait(&sh->made[other], use0 % 2);
                follow(sh, other, c, f);
                if (i) rescale(f[0], f[1], o);
                add(sh, other, group, theirs, i > 0, o);
                add_done(sh, other, group, !two, o);
                if (two) {
                    scores(sh, own, use1 % 2, s);
                    if (i + 3 >= tiles) arrive(&sh->q_empty);
                    weigh((i + 1) * KEY_ROWS, row.n, factor, s, &w);
                    join(&w, c, f);
                    group_meet(group);
                    publish(sh, own, ours, w.p, c);
                    rescale(f[0], f[1], o);
                    add(sh, own, group, w.p, true, o);
                    add_done(sh, own, group, !more, o);
                }
            } else {
                if (two) {
                    scores(sh, own, use1 % 2, s);
                    if (i + 3 >= tiles) arrive(&sh->q_empty);
                    weigh((i + 1) * KEY_ROWS, row.n, factor, s, &w);
                }
                others_wait(sh, other, group, use0 % 2);
                bar_wait(&sh->made[other], use0 % 2);
                follow(sh, other, c, f);
                if (i) rescale(f[0], f[1], o);
                if (two) {
                    join(&w, c, f);
                    publish(sh, own, ours, w.p, c); /* the other group waits for it */
                }
                add(sh, other, group, theirs, i > 0, o);
                add_done(sh, other, group, !two, o);
                if (two) {
                    rescale(f[0], f[1], o);
                    add(sh, own, group, w.p, true, o);
                    add_done(sh, own, group, !more, o);
                }
            }
        }
        g0 += (uint32_t)tiles;
        const uint32_t last = (g0 - 1) % 2;
        float inverse[2];
        invert(c, sh->sink[group], inverse);
        if (j.cos) {
            store_slots(j, row.t, row.h0, group * (KEY_WIDTH / 2), inverse, sh->angles[begun % 2],
                        o);
        } else {
            group_meet(group); /* others' products may still read the tile */
            store_row(j, row, group, inverse, o, sh->tile[last] + group * (KEY_TILE / 2));
        }
        /* Each lane, for it has read what others of the warp wrote. */
        bar_arrive(&sh->empty[last][2 * group]);
        bar_arrive(&sh->empty[last][2 * group + 1]);
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    wgmma_kernel(const __grid_constant__ struct attn_job j,
                 const __grid_constant__ struct attn_wide w, int32_t groups,
                 const __grid_constant__ CUtensorMap queries)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct shared *sh = (struct shared *)raw;
    const bool wide = w.rows && w.first[j.b.n_seqs] <= w.room;
    if (threadIdx.x == 0) {
        if (dev_shared(raw) % 1024) __trap(); /* swizzles count from there; no room to move */
        for (int i = 0; i < 2; i++) {
            for (int n = 0; n < QUARTERS; n++) {
                bar_init(&sh->full[i][n], PRODUCER_WARPS * (wide ? 32 : 1));
                bar_init(&sh->empty[i][n], 128);
            }
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
        const int thread = (int)threadIdx.x - CONSUMERS * 128;
        if (wide)
            produce_wide(&queries, j, w, groups, sh, thread);
        else
            produce(&queries, j, groups, sh, thread);
    } else {
        set_registers_more<CONSUMER_REGISTERS>();
        if (group == 0)
            consume<0>(j, wide, sh);
        else
            consume<1>(j, wide, sh);
    }
}

#else
static __global__ void wgmma_kernel(const __grid_constant__ struct attn_job,
                                    const __grid_constant__ struct attn_wide, int32_t,
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
    struct attn_wide wide;
    if (!attention_widen(s, j, &wide)) return true; /* cuda_done() knows */
    CUDA_SHARED(wgmma_kernel, bytes);
    wgmma_kernel<<<(unsigned)(items < s->n_sm ? items : s->n_sm), THREADS, bytes, s->cu>>>(
        *j, wide, (int32_t)groups, queries);
    return true;
}
