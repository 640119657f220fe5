/* kernels/attn/attention_few_cuda.cu - attention where rows leave multiprocessors idle (sm_90a).
 *
 * A cluster of CTAs takes a row and 64 heads, and each CTA a part of the width: it reads and widens
 * only its columns of every key, and keeps only those of the queries and of the output. A score is
 * one chain over the width (so its bits are those of attention_wgmma_cuda.cu): the first CTA begins
 * it, hands the unfinished sums to the next through distributed shared memory, and so on; the last
 * makes the weights and hands them to all. Then each sums its own columns, tiles in their order.
 * So every CTA does its share of every tile, and nothing is read or widened twice.
 *     producers   eight warps: look keys up, widen this CTA's columns of a tile
 *     scorers     two warpgroups, every other tile each: continue the chain; in the last CTA also
 *                 weights
 *     summer      one warpgroup: weights times this CTA's columns; the output
 * What goes from CTA to CTA lies as the registers of a thread, for the same thread of the same
 * group there: stores of 16 bytes that a barrier counts.
 * Where pairs do not all find room at once, each takes up to three rows, one after the other, their
 * tiles in one sequence: producers go on with the next row's while the one before is finished. Its
 * queries come when all scores of that are made; the output goes through the row's last tile's
 * slot, or, turned back and in the order of slots (attend), to memory as threads have it.
 *
 * Order    of all sums, and what is rounded where, are those of attention_wgmma_cuda.cu: same bits.
 * Bound    Cycles on an H200, read in the kernel: with two CTAs 2,200 a tile, as producers take
 *          1,600 to 2,100 to widen one, and 8,600 before the first tile's weights (800 for how many
 *          keys there are, 1,800 for the first's places and code that begins, 1,000 to read and
 *          widen, 600 for scores on either side of 1,100 on the way, 900 for weights, 1,000 until
 *          they are there). With four 1,600 and 10,900: the last sends weights to three. A pair's
 *          second and third row take 17 to 20 us each, its first 20 with the launch.
 */
#include "kernels/attn/attention_group.cuh"
#include "kernels/attn/attention_slots.cuh"

#include <stddef.h>

enum {
    HEADS = 64,
    SCORERS = 2, /* warpgroups; every other tile each */
    PRODUCER_WARPS = 8,
    KEYS_A_WARP = KEY_ROWS / PRODUCER_WARPS,
    FIRST_PRODUCER = (1 + SCORERS) * 128, /* thread */
    THREADS = FIRST_PRODUCER + PRODUCER_WARPS * 32,
    /* 640 threads begin with 96 registers each. */
    SUMMER_REGISTERS = 176,
    SCORER_REGISTERS = 72,
    PRODUCER_REGISTERS = 80,
    CHUNK = 32 / KEYS_A_WARP, /* tiles whose keys a producer's warp looks up at once, one a lane */
    CHUNKS = 3,               /* that are known at a time; the first three are looked up by all */
    PARTIAL = 8,              /* pieces of four words that a thread sends: unfinished scores */
    MADE = 4,                 /* the same: weights, beside a reference for each head */
    MADE_BYTES = MADE * 128 * 16 + HEADS * 4,
    KEPT = 2, /* pieces of codes that wait in a lane's registers */
};

/* Of a CTA of a cluster of C, which takes up to ROWS rows, one after the other. */
template <int CTAS, int MOST> struct part {
    static constexpr int C = CTAS, ROWS = MOST;
    static constexpr int BLOCKS = KEY_WIDTH / 64 / C, SLOT = BLOCKS * KEY_BLOCK;
    static constexpr int SLOTS = C == 2 ? 4 : 8;
    static constexpr int WAITING = BLOCKS > KEPT ? BLOCKS - KEPT : 0;
    /* The first CTA is ahead of all, and sent no unfinished scores: more tiles have their place. */
    static constexpr int MORE = SCORERS * PARTIAL * 128 * 16 / SLOT;
    static_assert(SLOTS >= CHUNK, "a chunk's slots");
};
/* Of a cluster's, those of no sequence left out. */
struct row {
    int32_t t, h0, n; /* keys */
    int32_t first;    /* tile, of all the cluster's; where there is no row, beyond all */
};
template <typename P> struct shared {
    uint8_t q[P::SLOT];              /* 64 heads; a single row's output goes through here */
    uint8_t tile[P::SLOTS][P::SLOT]; /* and on */
    float4 partial[SCORERS][PARTIAL][128];
    float4 made[SCORERS][MADE][128];
    float reference[SCORERS][HEADS];
    uint4 waiting[PRODUCER_WARPS][P::WAITING ? P::WAITING : 1][32]; /* a lane's codes */
    const uint8_t *key[CHUNKS][PRODUCER_WARPS][32]; /* its scales so far behind, or 0 */
    int32_t scales[CHUNKS][PRODUCER_WARPS][32];
    struct attn_keys keys[P::ROWS];
    struct row row[P::ROWS + 1];
    int32_t tiles; /* of all rows */
    /* Of a slot, by producers' warps; by the summer's threads. */
    uint64_t full[P::SLOTS + P::MORE], empty[P::SLOTS + P::MORE];
    uint64_t q_full, q_empty; /* empty: by scorers' warps */
    uint64_t found;           /* the second and third chunk, by the warps that did it */
    uint64_t partial_full[SCORERS], made_full[SCORERS]; /* bytes of pieces */
    uint64_t partial_read[SCORERS]; /* the next CTA's scorer: what this one sent is in registers */
    uint64_t made_read[SCORERS];    /* in the last CTA: all summers have it in registers */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* A walk through a CTA's slots. */
template <typename P> struct slot {
    int at, use, all; /* use: how often it was used before */
    __device__ __forceinline__ slot(int first, int rank)
        : at(first), use(0), all(P::SLOTS + (rank ? 0 : P::MORE))
    {
    }
    __device__ __forceinline__ void step(int n)
    {
        at += n;
        if (at < all) return;
        at -= all;
        use++;
    }
    __device__ __forceinline__ uint8_t *tile(struct shared<P> *sh) const
    {
        static_assert(offsetof(struct shared<P>, partial) ==
                          offsetof(struct shared<P>, tile) + sizeof sh->tile,
                      "slots go on");
        return sh->tile[0] + at * P::SLOT;
    }
};

/* ------------------------------------------------------------------ producers */

/* A lane's key of a chunk, number lane % 8 of the warp's of tile lane / 8, while it is found. */
struct search {
    uint32_t word; /* on its way: the entry's number; then its page's */
    int32_t row;   /* of the page; negative: no entry */
};
/* Its row of the cluster's, and its number there. */
struct sought {
    int row;
    int32_t i;
};
template <typename P>
static __device__ __forceinline__ struct sought key_of(const struct shared<P> *sh, int chunk,
                                                       int warp, int lane)
{
    const int32_t tile = chunk * CHUNK + lane / KEYS_A_WARP;
    int row = 0;
#pragma unroll
    for (int k = 1; k < P::ROWS; k++) row += tile >= sh->row[k].first;
    return {row, (tile - (P::ROWS > 1 ? sh->row[row].first : 0)) * KEY_ROWS + warp * KEYS_A_WARP +
                     lane % KEYS_A_WARP};
}
/* A key that is found, and where producers find it. */
template <typename P>
static __device__ __forceinline__ void keep_key(struct shared<P> *sh, int place, int warp, int lane,
                                                const struct key_source &s)
{
    sh->key[place][warp][lane] = s.row;
    sh->scales[place][warp][lane] = s.scales ? (int32_t)(s.scales - s.row) : 0;
}
template <typename P>
static __device__ __forceinline__ struct key_source kept_key(const struct shared<P> *sh, int place,
                                                             int warp, int key)
{
    const uint8_t *row = sh->key[place][warp][key];
    const int32_t behind = sh->scales[place][warp][key];
    return {row, behind ? row + behind : NULL};
}
/* The number of an entry does not wait for how many are selected: a list has room for sel_ld. */
template <typename P>
static __device__ __forceinline__ void search_begin(const struct attn_job &j, int chunk, int place,
                                                    int warp, int lane, struct shared<P> *sh,
                                                    struct search *s)
{
    const struct sought at_key = key_of(sh, chunk, warp, lane);
    const struct attn_keys &ks = sh->keys[at_key.row];
    const int32_t i = at_key.i, entry = i - ks.n_window;
    s->word = (uint32_t)entry;
    if (ks.selected && entry >= 0 && entry < j.sel_ld)
        s->word = (uint32_t)__ldg(ks.selected + entry);
    const struct key_looked at = key_look(j, ks, i, ks.n);
    s->row = at.n < 0 ? 0 : -1;
    if (at.n >= 0) keep_key(sh, place, warp, lane, key_source_of(j, {at.at, at.row, at.n}, 0));
}
template <typename P>
static __device__ __forceinline__ void search_page(const struct attn_job &j, int chunk, int warp,
                                                   int lane, const struct shared<P> *sh,
                                                   struct search *s)
{
    if (s->row < 0) return;
    const struct attn_keys &ks = sh->keys[key_of(sh, chunk, warp, lane).row];
    const struct key_found f = key_find(j, {ks.q.page_ids, 0, -ks.q.page_step}, s->word);
    s->row = f.row;
    s->word = __ldg((const uint32_t *)f.at);
}
template <typename P>
static __device__ __forceinline__ void search_end(const struct attn_job &j, const struct search &s,
                                                  int place, int warp, int lane,
                                                  struct shared<P> *sh)
{
    if (s.row >= 0) keep_key(sh, place, warp, lane, key_source_of(j, {NULL, s.row, -1}, s.word));
}

/* What a lane has read of a key in e4m3: of each block of this CTA the columns 16 (lane % 4) on;
 * from block KEPT on they wait in shared memory, copies of a block being a group. The values behind
 * the codes take two pieces. */
template <typename P> struct fetched {
    uint4 piece[KEPT], rest;
    uint2 scales;
};
template <typename P>
static __device__ __forceinline__ void fetch(const struct key_source &s, int rank, int b,
                                             uint4 (*waiting)[32], struct fetched<P> *r)
{
    constexpr int BLOCKS = P::BLOCKS;
    const uint8_t *from = s.row + (rank * BLOCKS + b) * 64 + threadIdx.x % 4 * 16;
    if (s.scales && b == 0) {
        r->scales = dev_stream8(s.scales);
        if (rank == P::C - 1) r->rest = dev_stream16(from + BLOCKS * 64);
    }
    if (s.scales && b < KEPT) r->piece[b] = dev_stream16(from);
    if (s.scales && b >= KEPT) dev_copy16(&waiting[b - KEPT][threadIdx.x % 32], from, true);
    if (b >= KEPT) dev_copy_commit();
}
template <typename P>
static __device__ __forceinline__ uint4 fetched_piece(int b, const uint4 (*waiting)[32],
                                                      const struct fetched<P> &r)
{
    if (b < KEPT) return r.piece[b];
    dev_copy_wait<P::WAITING ? P::WAITING - 1 : 0>();
    return waiting[b - KEPT][threadIdx.x % 32];
}
/* A scale's word of this CTA's blocks, the first in the lowest byte. */
template <typename P>
static __device__ __forceinline__ uint32_t scales_of(const uint2 &scales, int rank)
{
    constexpr int BLOCKS = P::BLOCKS;
    const uint32_t w = (rank * BLOCKS < 4 ? scales.x : scales.y) >> rank * BLOCKS % 4 * 8;
    return rank == P::C - 1 ? w & (1u << (BLOCKS - 1) * 8) - 1 : w;
}
/* A lane's part of a key in bf16, on its way when this returns. */
template <typename P>
static __device__ __forceinline__ void copy_plain(const struct key_source &s, int rank,
                                                  const struct key_spot &at)
{
    constexpr int BLOCKS = P::BLOCKS;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const uint8_t *from = s.row + (rank * BLOCKS + b) * 128 + 16 * at.quarter;
        dev_copy16(at.at(b, at.quarter), from, true);
        dev_copy16(at.at(b, at.quarter + 4), from + 64, true);
    }
}
/* A lane's part of a tile: as a piece is widened, the next tile's takes its place. begun: a key in
 * bf16 has been asked for. */
template <typename P>
static __device__ __forceinline__ void
widen(const struct key_source &now, bool begun, const struct key_source &next, int rank,
      const struct key_spot &at, uint4 (*waiting)[32], struct fetched<P> *bytes)
{
    constexpr int BLOCKS = P::BLOCKS;
    const bool last = rank == P::C - 1;
    if (now.scales) {
        const uint32_t word = scales_of<P>(bytes->scales, rank);
        uint32_t odds = key_odd::scales(word);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const uint4 c = fetched_piece<P>(b, waiting, *bytes);
            if (b == 0 && last) *at.at(BLOCKS - 1, at.quarter + 4) = bytes->rest;
            if (b == BLOCKS - 1 && last) {
                *at.at(b, at.quarter) = c;
            } else {
                odds = key_odd::add(odds, c);
                at.codes(b, c, key_factor(word, b));
            }
            fetch<P>(next, rank, b, waiting, bytes);
        }
        if (key_odd::any(odds)) at.odd_codes(now, rank * BLOCKS, last ? BLOCKS - 1 : BLOCKS);
        return;
    }
    if (now.row) {
        if (!begun) copy_plain<P>(now, rank, at);
    } else {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            *at.at(b, at.quarter) = make_uint4(0, 0, 0, 0);
            *at.at(b, at.quarter + 4) = make_uint4(0, 0, 0, 0);
        }
    }
    dev_copy_commit();
    dev_copy_wait<0>();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) fetch<P>(next, rank, b, waiting, bytes);
}

/* A chunk's keys of a producer's warp, all steps at once: before the first tile. */
template <typename P>
static __device__ __forceinline__ void search(const struct attn_job &j, int chunk, int warp,
                                              struct shared<P> *sh)
{
    const int lane = threadIdx.x % 32;
    struct search s;
    if (chunk * CHUNK >= sh->tiles) return;
    search_begin(j, chunk, chunk, warp, lane, sh, &s);
    search_page(j, chunk, warp, lane, sh, &s);
    search_end(j, s, chunk, warp, lane, sh);
}
template <typename P>
static __device__ __forceinline__ void produce(const struct attn_job &j, int32_t tiles, int rank,
                                               struct shared<P> *sh)
{
    const int warp = (int)(threadIdx.x - FIRST_PRODUCER) / 32, lane = threadIdx.x % 32;
    struct search wanted;
    struct fetched<P> bytes;
    uint4(*waiting)[32] = sh->waiting[warp];
    /* With a whole window two tiles need no look-ups: those of the next two are made meanwhile. */
    const bool window = sh->keys[0].n_window >= 2 * KEY_ROWS;
    const int known = window ? 2 : CHUNK; /* tiles whose keys are known now */
    search_begin(j, 0, 0, warp, lane, sh, &wanted);
    if (!window) {
        search_page(j, 0, warp, lane, sh, &wanted);
        search_end(j, wanted, 0, warp, lane, sh);
    }
    __syncwarp();
    {
        const struct key_source s = kept_key(sh, 0, warp, lane / 4);
#pragma unroll
        for (int b = 0; b < P::BLOCKS; b++) fetch<P>(s, rank, b, waiting, &bytes);
    }
    /* The first slots are free: the batch's own keys, the newest of the window, go there now. */
#pragma unroll 1
    for (int i = 0; i < known; i++) {
        const int key = warp * KEYS_A_WARP + lane / 4;
        const struct key_source s = kept_key(sh, 0, warp, i * KEYS_A_WARP + lane / 4);
        if (s.row && !s.scales) copy_plain<P>(s, rank, key_spot(sh->tile[i], key, lane));
    }
    dev_copy_commit();
    struct slot<P> to(0, rank);
    int turn = 0, following = 1, later = 2; /* places of this chunk, the next, the one after it */
#pragma unroll 1
    for (int32_t i = 0; i < tiles; i++) {
        const int tile = i % CHUNK;
        if (i >= CHUNK && (i / CHUNK + 2) * CHUNK < tiles) {
            const int chunk = i / CHUNK + 2;
            if (tile == 0) search_begin(j, chunk, later, warp, lane, sh, &wanted);
            if (tile == 1) search_page(j, chunk, warp, lane, sh, &wanted);
            if (tile == 2) search_end(j, wanted, later, warp, lane, sh);
        }
        if (window && i == 0) search_page(j, 0, warp, lane, sh, &wanted);
        if (window && i == 1) search_end(j, wanted, 0, warp, lane, sh);
        if (i == CHUNK - 1) bar_wait(&sh->found, 0);
        if (to.use) bar_wait(&sh->empty[to.at], to.use % 2 ^ 1);
        __syncwarp();
        const int key = tile * KEYS_A_WARP + lane / 4;
        struct key_source after = {NULL, NULL};
        if (i + 1 < tiles)
            after = tile + 1 < CHUNK ? kept_key(sh, turn, warp, key + KEYS_A_WARP)
                                     : kept_key(sh, following, warp, lane / 4);
        widen<P>(kept_key(sh, turn, warp, key), i < known, after, rank,
                 key_spot(to.tile(sh), warp * KEYS_A_WARP + lane / 4, lane), waiting, &bytes);
        wgmma_shared();
        arrive(&sh->full[to.at]);
        to.step(1);
        if (tile == CHUNK - 1) {
            const int before = turn;
            turn = following, following = later, later = before;
        }
    }
}

/* ------------------------------------------------------------------ scorers */

/* A row's queries, this CTA's columns. By one thread. */
template <typename P>
static __device__ __forceinline__ void load_queries(const struct attn_job &j,
                                                    const CUtensorMap *queries, int rank, int32_t t,
                                                    int32_t h0, struct shared<P> *sh)
{
    bar_expect(&sh->q_full, P::SLOT);
#pragma unroll 1
    for (int b = 0; b < P::BLOCKS; b++)
        tile_load(sh->q + b * KEY_BLOCK, queries, &sh->q_full, (rank * P::BLOCKS + b) * TILE_BYTES,
                  t * j.H + h0);
}
/* From row r to that of this group's tile i: gives queries back; the group of a row's last tile
 * brings the next row's. */
template <typename P>
static __device__ __forceinline__ int next_row(const struct attn_job &j, const CUtensorMap *queries,
                                               int rank, int group, int r, int32_t i,
                                               struct shared<P> *sh)
{
    while (i >= sh->row[r + 1].first) {
        const int32_t last = sh->row[r + 1].first - 1;
        bar_wait(&sh->q_full, r % 2); /* perhaps it had no tile of that row */
        arrive(&sh->q_empty);
        if (threadIdx.x % 128 == 0 && last % SCORERS == group) {
            bar_wait(&sh->q_empty, r % 2);
            load_queries(j, queries, rank, sh->row[r + 1].t, sh->row[r + 1].h0, sh);
        }
        __syncwarp();
        r++;
    }
    return r;
}
template <typename P>
static __device__ __forceinline__ void score(const struct attn_job &j, const CUtensorMap *queries,
                                             int32_t n, int32_t tiles, int rank, int group,
                                             struct shared<P> *sh)
{
    constexpr int BLOCKS = P::BLOCKS;
    const int thread = threadIdx.x % 128;
    const bool last = rank == P::C - 1;
    const float factor = attn_factor(j.scale);
    const uint64_t q = wgmma_rows(sh->q);
    cluster_wait(); /* all barriers are there */
    int r = 0;
    if (P::ROWS == 1)
        bar_wait(&sh->q_full, 0);
    else
        r = next_row(j, queries, rank, group, 0, group, sh);
    struct slot<P> from(group, rank);
#pragma unroll 1
    for (int32_t i = group, turn = 0; i < tiles; i += SCORERS, turn++, from.step(SCORERS)) {
        float s[32];
        int32_t left = n - i * KEY_ROWS; /* keys from this tile on */
        if (P::ROWS > 1) {
            bar_wait(&sh->q_full, r % 2);
            left = sh->row[r].n - (i - sh->row[r].first) * KEY_ROWS;
        }
        if (rank > 0) {
            bar_wait(&sh->partial_full[group], turn % 2);
            if (thread == 0) bar_expect(&sh->partial_full[group], PARTIAL * 128 * 16);
#pragma unroll
            for (int k = 0; k < PARTIAL; k++) {
                const float4 v = sh->partial[group][k][thread];
                s[4 * k] = v.x, s[4 * k + 1] = v.y, s[4 * k + 2] = v.z, s[4 * k + 3] = v.w;
            }
        }
        bar_wait(&sh->full[from.at], from.use % 2);
        const uint64_t k = wgmma_rows(from.tile(sh));
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int w = 0; w < BLOCKS * 4; w++)
            wgmma_bf16(s, on(q, w / 4 * KEY_BLOCK + w % 4 * 32),
                       on(k, w / 4 * KEY_BLOCK + w % 4 * 32), w > 0 || rank > 0);
        wgmma_commit();
        /* Not before what was loaded has come to registers: the next to come may be quicker. */
        if (rank > 0 && i + SCORERS < tiles) arrive_at(&sh->partial_read[group], rank - 1);
        wgmma_wait<0>();
        wgmma_pin(s);
        if (P::ROWS > 1) r = next_row(j, queries, rank, group, r, i + SCORERS, sh);
        if (!last) {
            if (turn) bar_wait(&sh->partial_read[group], turn % 2 ^ 1);
            const uint32_t to = dev_shared_of(&sh->partial[group][0][thread], rank + 1),
                           bar = dev_shared_of(&sh->partial_full[group], rank + 1);
#pragma unroll
            for (int k = 0; k < PARTIAL; k++)
                put_at(to + k * 128 * 16, bar,
                       make_float4(s[4 * k], s[4 * k + 1], s[4 * k + 2], s[4 * k + 3]));
            continue;
        }
        struct weights w;
        weigh(0, left, factor, s, &w);
        if (turn) bar_wait(&sh->made_read[group], turn % 2 ^ 1);
        const int head = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
        for (int c = 0; c < P::C - 1; c++) {
            const uint32_t to = dev_shared_of(&sh->made[group][0][thread], c),
                           at = dev_shared_of(&sh->reference[group][head], c),
                           bar = dev_shared_of(&sh->made_full[group], c);
#pragma unroll
            for (int k = 0; k < MADE; k++)
                put_at(to + k * 128 * 16, bar,
                       make_float4(kern_float(w.p[4 * k]), kern_float(w.p[4 * k + 1]),
                                   kern_float(w.p[4 * k + 2]), kern_float(w.p[4 * k + 3])));
            if (thread % 4) continue;
            put_at(at, bar, w.reference[0]);
            put_at(at + 8 * 4, bar, w.reference[1]);
        }
#pragma unroll
        for (int k = 0; k < MADE; k++)
            *(uint4 *)&sh->made[group][k][thread] =
                make_uint4(w.p[4 * k], w.p[4 * k + 1], w.p[4 * k + 2], w.p[4 * k + 3]);
        if (thread % 4 == 0) {
            sh->reference[group][head] = w.reference[0];
            sh->reference[group][head + 8] = w.reference[1];
        }
        bar_arrive(&sh->made_full[group]);
    }
}

/* ------------------------------------------------------------------ summer */

/* A thread's sums: of this CTA's columns 128 at a time. */
template <typename P> struct sums {
    float o[P::BLOCKS / 2][64];
};
/* o (+)= weights times this CTA's columns of a tile; begun, not waited for. read: who is to know
 * that p has come to registers, or NULL. */
template <typename P>
static __device__ __forceinline__ void add(const uint8_t *tile, const uint32_t (&p)[16], bool more,
                                           int rank, struct sums<P> *s, uint64_t *read)
{
    constexpr int PARTS = P::BLOCKS / 2;
    const uint64_t v = wgmma_columns(tile, KEY_BLOCK, 1024);
#pragma unroll
    for (int h = 0; h < PARTS; h++) wgmma_pin(s->o[h]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEY_ROWS / 16; i++)
#pragma unroll
        for (int h = 0; h < PARTS; h++)
            wgmma_bf16_columns(s->o[h], p + 4 * i, on(v, h * 2 * KEY_BLOCK + i * 2048),
                               i > 0 || more);
    wgmma_commit();
    if (read) arrive_at_own(read, rank, P::C - 1);
}
template <typename P> static __device__ __forceinline__ void add_done(struct sums<P> *s)
{
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < P::BLOCKS / 2; h++) wgmma_pin(s->o[h]);
}
/* The sums of this thread's two heads times powers of two. */
template <typename P>
static __device__ __forceinline__ void rescale(const float (&f)[2], struct sums<P> *s)
{
    if (__all_sync(~0u, f[0] == 1.0f && f[1] == 1.0f)) return;
#pragma unroll
    for (int h = 0; h < P::BLOCKS / 2; h++)
#pragma unroll
        for (int i = 0; i < 64; i++) s->o[h][i] *= f[i / 2 % 2];
}
/* This CTA's columns of the row, through `room` for them, which lies as a tile. */
template <typename P>
static __device__ __forceinline__ void store_row(const struct attn_job &j, int32_t t, int32_t h0,
                                                 int rank, const float (&inverse)[2],
                                                 const struct sums<P> &s, uint8_t *room)
{
    constexpr int BLOCKS = P::BLOCKS, LANES = BLOCKS * 8; /* of a head */
    const int lane = threadIdx.x % 32, head0 = threadIdx.x / 32 * 16;
    uint8_t *to = room + (head0 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < BLOCKS * 4; i++) { /* sixteen columns */
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *two = &s.o[i / 8][i % 8 * 8 + 2 * k];
            w[k] = attn_bf16x2(two[0] * inverse[k % 2], two[1] * inverse[k % 2]);
        }
        dev_store_matrix4(to + i / 4 * KEY_BLOCK + ((i % 4 * 2 + lane / 16 ^ lane % 8) << 4), w);
    }
    __syncwarp();
#pragma unroll 8
    for (int i = 0; i < LANES / 2; i++) {
        const int head = head0 + i * 32 / LANES + lane / LANES, piece = lane % LANES;
        const uint4 v =
            *(const uint4 *)(room + piece / 8 * KEY_BLOCK + head * 128 + ((piece ^ head) % 8 << 4));
        if (h0 + head < j.H)
            *((uint4 *)((uint16_t *)j.o + ((int64_t)t * j.H + h0 + head) * KEY_WIDTH +
                        rank * (KEY_WIDTH / P::C)) +
              piece) = v;
    }
}
/* A row's tiles from number i on, the first of which lies at *at; one is left to be given back. */
template <typename P>
static __device__ __forceinline__ void sum_row(const struct attn_job &j, int32_t t, int32_t h0,
                                               int32_t i, int32_t end, int32_t tiles, int rank,
                                               struct shared<P> *sh, struct slot<P> *at)
{
    const int thread = threadIdx.x, first = i;
    struct attn_chain chain[2] = {{ATTN_LEAST, 0}, {ATTN_LEAST, 0}};
    float sink[2], angle = 0;
    struct sums<P> o;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t h = h0 + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
        sink[r] = h < j.H ? __ldg(j.sink + h) : 0.0f;
    }
    if (P::ROWS > 1 && j.cos && thread < 64)
        angle = __ldg((thread < 32 ? j.cos : j.sin) + t * 32 + thread % 32);
    if (i == 0) cluster_wait();
#pragma unroll 1
    for (; i < end; i++) {
        const int from = i % SCORERS;
        uint32_t p[16];
        float f[2], power[2], own[2];
        bar_wait(&sh->made_full[from], i / SCORERS % 2);
        if (thread == 0 && rank < P::C - 1) bar_expect(&sh->made_full[from], MADE_BYTES);
        const int head = thread / 32 * 16 + thread % 32 / 4;
        const float reference[2] = {sh->reference[from][head], sh->reference[from][head + 8]};
#pragma unroll
        for (int k = 0; k < MADE; k++) {
            const uint4 v = *(const uint4 *)&sh->made[from][k][thread];
            p[4 * k] = v.x, p[4 * k + 1] = v.y, p[4 * k + 2] = v.z, p[4 * k + 3] = v.w;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float m = attn_raised(chain[r].m, reference[r]);
            power[r] = attn_power(reference[r] - m);
            f[r] = attn_power(chain[r].m - m);
            chain[r].m = m;
        }
#pragma unroll
        for (int k = 0; k < 16; k++) p[k] = attn_scaled(p[k], power[k % 2]);
        if (i > first) rescale<P>(f, &o);
        bar_wait(&sh->full[at->at], at->use % 2);
        add<P>(at->tile(sh), p, i > first, rank, &o,
               i + SCORERS < tiles ? &sh->made_read[from] : NULL);
        add_done<P>(&o);
        if (i + 1 < end) arrive_all(&sh->empty[at->at]);
        sum_weights(p, own);
#pragma unroll
        for (int r = 0; r < 2; r++) chain[r].sum = fmaf(chain[r].sum, f[r], own[r]);
        if (i + 1 < end) at->step(1);
    }
    const float inverse[2] = {attn_inverse(chain[0], sink[0]), attn_inverse(chain[1], sink[1])};
    if (P::ROWS == 1) { /* scorers are done with queries */
        store_row<P>(j, t, h0, rank, inverse, o, sh->q);
        return;
    }
    uint8_t *room = at->tile(sh);
    asm volatile("bar.sync 1, 128;" ::: "memory"); /* all four warps are done with the tile */
    if (j.cos) {
        if (thread < 64) ((float *)room)[thread] = angle;
        asm volatile("bar.sync 1, 128;" ::: "memory");
        store_slots(j, t, h0, rank * (KEY_WIDTH / P::C), inverse, *(const float(*)[2][32])room,
                    o.o);
    } else {
        store_row<P>(j, t, h0, rank, inverse, o, room);
    }
}
template <typename P>
static __device__ __forceinline__ void sum(const struct attn_job &j, int32_t t, int32_t h0,
                                           int32_t tiles, int rank, struct shared<P> *sh)
{
    struct slot<P> at(0, rank);
    if (P::ROWS == 1) {
        sum_row<P>(j, t, h0, 0, tiles, tiles, rank, sh, &at);
        return;
    }
    int r = 0;
#pragma unroll 1
    for (int32_t i = 0; i < tiles; r++) {
        const int32_t end = min(sh->row[r + 1].first, tiles);
        sum_row<P>(j, sh->row[r].t, sh->row[r].h0, i, end, tiles, rank, sh, &at);
        bar_arrive(&sh->empty[at.at]);
        at.step(1);
        i = end;
    }
}

/* The rows of this cluster, by one warp: a row a lane. */
template <typename P>
static __device__ __forceinline__ void find_rows(const struct attn_job &j, int32_t groups,
                                                 struct shared<P> *sh)
{
    const int lane = threadIdx.x % 32;
    const int32_t clusters = gridDim.x / P::C, item = blockIdx.x / P::C + lane * clusters;
    const bool there = lane < P::ROWS && item < j.T * groups;
    const int32_t t = there ? item / groups : 0, seq = there ? j.b.row_seq[t] : -1;
    const struct cuda_seq q = j.b.seqs[seq < 0 ? 0 : seq];
    cuda_await();
    struct attn_keys ks =
        attn_keys_at(j, t, q.pos0, q.row0, j.k.y.ratio && j.selected ? j.n_selected[t] : 0);
    ks.q = q;
    const uint32_t mask = __ballot_sync(~0u, seq >= 0);
    const int place = __popc(mask & ((1u << lane) - 1)), rows = __popc(mask);
    const int32_t own = seq < 0 ? 0 : (ks.n + KEY_ROWS - 1) / KEY_ROWS;
    int32_t first = 0, tiles = 0;
#pragma unroll
    for (int k = 0; k < P::ROWS; k++) {
        const int32_t n = __shfl_sync(~0u, own, k);
        if (k < lane) first += n;
        tiles += n;
    }
    if (seq >= 0) {
        sh->keys[place] = ks;
        sh->row[place] = {t, item % groups * HEADS, ks.n, first};
    }
    if (lane >= rows && lane <= P::ROWS) sh->row[lane].first = 0x7fffffff;
    if (lane == 0) sh->tiles = tiles;
}

template <typename P>
static __global__ void __launch_bounds__(THREADS, 1)
    few_kernel(const __grid_constant__ struct attn_job j, int32_t groups,
               const __grid_constant__ CUtensorMap queries)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct shared<P> *sh = (struct shared<P> *)raw;
    const int rank = cluster_rank();
    const int32_t item = blockIdx.x / P::C, t = item / groups, h0 = item % groups * HEADS;
    if (threadIdx.x == 0) {
        if (dev_shared(raw) % 1024) __trap(); /* swizzles count from there */
        for (int i = 0; i < P::SLOTS + P::MORE; i++) {
            bar_init(&sh->full[i], PRODUCER_WARPS);
            bar_init(&sh->empty[i], 128);
        }
        bar_init(&sh->q_full, 1);
        bar_init(&sh->q_empty, SCORERS * 4);
        bar_init(&sh->found, (1 + SCORERS) * 4);
        for (int i = 0; i < SCORERS; i++) {
            bar_init(&sh->partial_full[i], 1);
            bar_init(&sh->made_full[i], rank < P::C - 1 ? 1 : 128);
            bar_init(&sh->partial_read[i], 4);
            bar_init(&sh->made_read[i], 128 + 4 * (P::C - 1));
            bar_expect(&sh->partial_full[i], PARTIAL * 128 * 16);
            if (rank < P::C - 1) bar_expect(&sh->made_full[i], MADE_BYTES);
        }
        bar_init_done();
    }
    struct attn_keys ks;
    if (P::ROWS == 1) {
        const int32_t seq = j.b.row_seq[t];
        const struct cuda_seq q = j.b.seqs[seq < 0 ? 0 : seq];
        cuda_await();
        if (seq < 0) return; /* the whole cluster */
        ks = attn_keys_at(j, t, q.pos0, q.row0, j.k.y.ratio && j.selected ? j.n_selected[t] : 0);
        ks.q = q;
        if (threadIdx.x == FIRST_PRODUCER) {
            sh->keys[0] = ks;
            sh->tiles = (ks.n + KEY_ROWS - 1) / KEY_ROWS;
        }
    } else if (threadIdx.x / 32 == FIRST_PRODUCER / 32) {
        find_rows(j, groups, sh);
    } else {
        cuda_await();
    }
    __syncthreads();
    const int32_t tiles = P::ROWS == 1 ? (ks.n + KEY_ROWS - 1) / KEY_ROWS : sh->tiles;
    if (tiles == 0) return; /* rows of no sequence: the whole cluster */
    cluster_arrive_relaxed();
    cuda_hurry();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
    if (threadIdx.x == 128) {
        if (P::ROWS == 1)
            load_queries(j, &queries, rank, t, h0, sh);
        else
            load_queries(j, &queries, rank, sh->row[0].t, sh->row[0].h0, sh);
    }
    __syncwarp();
    if (group <= SCORERS) { /* the second chunk's keys by scorers, the third's by the summer */
        const int chunk = group > 0 ? 1 : 2, warp = (int)threadIdx.x / 32 - (chunk == 1 ? 4 : 0);
#pragma unroll 1
        for (int w = warp; w < PRODUCER_WARPS; w += chunk == 1 ? 8 : 4) search<P>(j, chunk, w, sh);
        arrive(&sh->found);
    }
    if (group > SCORERS) {
        set_registers_less<PRODUCER_REGISTERS>();
        produce<P>(j, tiles, rank, sh);
        cluster_wait();
    } else if (group > 0) {
        set_registers_less<SCORER_REGISTERS>();
        score<P>(j, &queries, ks.n, tiles, rank, group - 1, sh);
    } else {
        set_registers_more<SUMMER_REGISTERS>();
        sum<P>(j, t, h0, tiles, rank, sh);
    }
    /* Whatever is sent to a CTA is waited for there: none has left before. */
}

#else
template <typename P>
static __global__ void few_kernel(const __grid_constant__ struct attn_job, int32_t,
                                  const __grid_constant__ CUtensorMap)
{
}
#endif

template <typename P>
static void launch(struct kern_stream *s, const struct attn_job *j, int32_t groups,
                   const CUtensorMap &queries)
{
    const int bytes = (int)sizeof(struct shared<P>);
    static_assert(sizeof(struct shared<P>) <= 227 * 1024, "shared memory of a block");
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = P::C;
    attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    const int32_t items = j->T * groups, most = s->n_sm / P::C;
    c.gridDim = dim3((unsigned)((items < most ? items : most) * P::C));
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = (size_t)bytes;
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = cuda_early_launches ? 2 : 1;
    CUDA_SHARED(few_kernel<P>, bytes);
    cudaLaunchKernelEx(&c, few_kernel<P>, *j, groups, queries);
}
bool attention_few(struct kern_stream *s, const struct attn_job *j)
{
    const int32_t groups = (int32_t)cuda_ceil(j->H, HEADS);
    CUtensorMap queries;
    if (!cuda_tile_map(&queries, j->q, (int64_t)j->T * j->H, KEY_WIDTH * 2, KEY_WIDTH * 2, HEADS))
        return false;
    /* Clusters of four find their places in parts of the device, a few of which are left over. */
    if (j->T * groups <= s->n_sm / 5)
        launch<part<4, 1>>(s, j, groups, queries);
    else if (j->T * groups <= s->n_sm / 2)
        launch<part<2, 1>>(s, j, groups, queries);
    else
        launch<part<2, ATTN_PAIR_ROWS>>(s, j, groups, queries);
    return true;
}
