/* kernels/attn/attention_wgmma_cuda.cu - attention of each row on Hopper's matrix unit, keys read once.
 *
 * A CTA takes a row and 64 heads, then the next. Keys come in tiles of 64 in the row's order. A
 * warpgroup of producers gathers them, one tile ahead in registers, and widens them to bf16 in shared
 * memory, where two tiles fit; as keys are values, a tile serves both products. Two warpgroups of
 * consumers: each makes the scores and weights of every other tile, hands the weights to the other
 * through shared memory, and sums 256 of the 512 output columns over all tiles in their order:
 *     first    scores 0 | weights 0 |  V 0   V 1  | scores 2 ...
 *     second   scores 1 | V 0, weights 1 | V 1    | scores 3 ...
 * Weights are exp2(y - m), y = score * scale * log2(e), against the running maximum m of all tiles so far,
 * rounded up to an integer. Thus what has been summed changes by powers of two when m rises, exactly, and
 * so does a weight's rounding to bf16: the result is that of the final maximum, in one pass, for all but
 * numbers below 2^-126. The denominator adds the rounded weights: a row with one great weight is exact.
 *
 * Order    of a row's sums: a score in one chain over the width; a tile's weights by four threads, each
 *          its columns ascending, then a butterfly; tiles ascending. Depends on nothing but its own keys.
 * Bound    The matrix unit would need 2048 cycles a tile, and shared memory is read and written for about as
 *          many; an H200 takes 7700 (of 8,192 rows of 640 keys, 2.7 ms): the producers, one warp to a scheduler,
 *          widen a tile in 3700 and search, look over and publish in as many again.
 */
#include "kernels/attn/key_tile.cuh"
#include "kernels/attn/softmax.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    HEADS = 64,
    CONSUMERS = 2,      /* warpgroups; half of the columns each */
    PRODUCER_WARPS = 4, /* sixteen keys of a tile each, four lanes a key, two keys a lane */
    KEYS_A_WARP = KEYS / PRODUCER_WARPS,
    THREADS = CONSUMERS * 128 + PRODUCER_WARPS * 32,
    /* 64 Ki registers: a consumer holds 128 sums, 32 scores; a producer 32 words of codes. */
    CONSUMER_REGISTERS = 208,
    PRODUCER_REGISTERS = 88,
    AHEAD = 8, /* rows that the producers' stages can be in at once */
};

/* What consumers are told of a row. */
struct row {
    int32_t t, h0, n; /* n keys; negative: no more rows */
};
struct shared {
    uint8_t q[TILE];
    uint8_t tile[2][TILE];
    uint8_t p[2][BLOCK];                    /* weights of a tile: 64 heads x 64 keys */
    struct attn_chain chain[2][HEADS];      /* after that tile */
    struct attn_keys keys[PRODUCER_WARPS];  /* of the row that a producer's first stage is in */
    struct row rows[PRODUCER_WARPS][AHEAD]; /* from its first stage to its last */
    struct source sources[PRODUCER_WARPS][2][KEYS_A_WARP]; /* by the tile's slot */
    uint32_t entry[PRODUCER_WARPS][KEYS_A_WARP], page[PRODUCER_WARPS][KEYS_A_WARP];
    uint4 waiting[PRODUCER_WARPS][CODES / 64][32];
    struct row row;
    uint64_t full[2], empty[2]; /* tile: by its producers' warps; by all consumers' */
    uint64_t made[2], read[2];  /* weights and chain: by the warps of the one, of the other */
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

static __device__ __forceinline__ void copy_word(void *to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dev_shared(to)),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
}

/* The stream of tiles of a CTA as a warp of its producers walks it; a lane looks for one key of a tile. */
struct walk {
    int32_t item, n, i; /* the next row's item; the row's keys; the next tile's first key */
    int pushed;         /* rows so far */
};
/* To the next row that has keys, told to `rows`. */
static __device__ __forceinline__ void walk_row(const struct attn_job &j, int32_t groups,
                                                struct shared *sh, int warp, struct walk *w)
{
    w->i = 0;
    w->n = -1;
    for (; w->item < j.T * groups; w->item += gridDim.x) {
        struct attn_keys ks;
        const int32_t t = w->item / groups;
        if (!attn_keys_of(j, t, &ks)) continue;
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            sh->keys[warp] = ks;
            sh->rows[warp][w->pushed % AHEAD] = {t, w->item % groups * HEADS, ks.n};
        }
        __syncwarp();
        w->n = ks.n;
        w->item += gridDim.x;
        break;
    }
    w->pushed++;
}
/* What a lane has read ahead of a tile: columns 16 (4 i + lane % 4) on, for every i, of two keys in e4m3.
 * The second key's codes wait in shared memory, the lane's own words there; the bf16 values behind the codes
 * are only called to L2. */
struct fetched {
    uint4 codes[CODES / 64];
    uint2 scales[2];
};
static __device__ __forceinline__ void fetch(const struct source (&src)[KEYS_A_WARP],
                                             uint4 (&waiting)[CODES / 64][32], struct fetched *r)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < 2; g++) {
        const struct source s = src[8 * g + lane / 4];
        if (!s.scales) continue;
        const uint4 *from = (const uint4 *)s.row + lane % 4;
#pragma unroll
        for (int i = 0; i < CODES / 64; i++) {
            if (g == 0)
                r->codes[i] = __ldg(from + 4 * i);
            else
                dev_copy16(&waiting[i][lane], from + 4 * i, true);
        }
        if (lane % 4 == 0) prefetch(s.row + CODES);
        r->scales[g] = __ldg((const uint2 *)s.scales);
    }
}
/* To be asked while there is time. */
static __device__ __forceinline__ bool odd_key(const uint4 (&waiting)[CODES / 64][32], int g,
                                               const struct fetched &r)
{
    uint32_t sum = odd::add(r.scales[g]);
#pragma unroll
    for (int i = 0; i < CODES / 64; i++)
        sum |= odd::add(g == 0 ? r.codes[i] : waiting[i][threadIdx.x % 32]);
    return odd::any(sum);
}
/* A lane's part of key `key` to its place: what is bf16 already, on its way when this returns; codes. */
static __device__ __forceinline__ void begin_key(const struct source &s, uint8_t *tile, int key)
{
    const struct spot at(tile, key, threadIdx.x % 32);
    if (s.scales)
        at.rest(s.row);
    else
        at.plain(s.row);
}
/* The first of a lane's two keys, or the second, from where the first has its place. */
template <int G>
static __device__ __forceinline__ void store_codes(const struct spot &at, const struct fetched &r,
                                                   const uint4 (&waiting)[CODES / 64][32])
{
#pragma unroll
    for (int i = 0; i < CODES / 64; i++)
        at.codes(i, G == 0 ? r.codes[i] : waiting[i][threadIdx.x % 32], scale_at(r.scales[G], i),
                 G * 8 * 128);
}

/* A row's queries; the rows after it to L2. */
static __device__ __forceinline__ void load_queries(const struct attn_job &j, int32_t groups,
                                                    const struct row &r, int thread, uint8_t *q)
{
    const int piece = thread % 64;
#pragma unroll 2
    for (int h = thread / 64; h < HEADS; h += PRODUCER_WARPS / 2) {
        const bool there = r.h0 + h < j.H;
        dev_copy16(q + piece / 8 * BLOCK + h * 128 + ((piece ^ h) % 8 << 4),
                   (const uint8_t *)j.q +
                       (((int64_t)r.t * j.H + r.h0 + (there ? h : 0)) * WIDTH + piece * 8) * 2,
                   there);
    }
    const int32_t next = r.t * groups + r.h0 / HEADS + (int32_t)gridDim.x;
    if (next >= j.T * groups) return;
    const int32_t h0 = next % groups * HEADS, lines = WIDTH * 2 / 128;
    const uint8_t *to = (const uint8_t *)j.q + (int64_t)(next / groups) * j.H * WIDTH * 2;
    for (int i = thread; i < HEADS * lines; i += PRODUCER_WARPS * 32)
        if (h0 + i / lines < j.H) prefetch(to + (int64_t)h0 * WIDTH * 2 + i * 128);
}

static __device__ __forceinline__ void produce(const struct attn_job &j, int32_t groups,
                                               struct shared *sh, int thread)
{
    const int warp = thread / 32, lane = thread % 32;
    uint4(&waiting)[CODES / 64][32] = sh->waiting[warp];
    struct walk w = {(int32_t)blockIdx.x, -1, 0, 0};
    struct fetched bytes;
    /* A lane searches for one key of a tile; what it reads for that comes to shared memory, so that it does
     * not wait. */
    struct found found = {};
    struct looked looked = {};
    /* Of tile `made`, whose bytes are under way, and of the three that follow. */
    enum tile_kind { NO_TILE, FIRST_TILE, LATER_TILE };
    uint32_t kinds = 0;       /* two bits each, the lowest of `made` */
    int begun = 0, made = -3; /* rows; tiles: three turns fill the stages */
    walk_row(j, groups, sh, warp, &w);
    for (;; made++) {
        const int slot = made & 1, key = warp * KEYS_A_WARP + lane / 4;
        const bool first = kinds % 4 == FIRST_TILE;
        if (made >= 0 && kinds % 4 == NO_TILE) break;
        if (first) {
            const struct row row = sh->rows[warp][begun % AHEAD];
            bar_wait(&sh->q_empty, begun % 2 ^ 1);
            if (thread == 0) sh->row = row;
            load_queries(j, groups, row, thread, sh->q);
            dev_copy_commit();
            begun++;
            dev_copy_wait<1>();
        } else {
            dev_copy_wait<0>();
        }
        /* Words and second keys' codes have come: the next tiles' keys each take a step. */
        if (lane < KEYS_A_WARP) {
            const struct attn_keys &ks = sh->keys[warp];
            uint32_t *entry = &sh->entry[warp][lane], *page = &sh->page[warp][lane];
            sh->sources[warp][slot ^ 1][lane] = source_of(j, found, *page);
            found = find(j, looked, *entry);
            if (found.n < 0) copy_word(page, found.at);
            looked = look(j, ks, w.i + warp * KEYS_A_WARP + lane, w.n);
            if (looked.n < 0 && ks.selected)
                copy_word(entry, ks.selected + looked.row);
            else
                *entry = (uint32_t)looked.row;
        }
        kinds = kinds >> 2 | (w.n < 0 ? NO_TILE : w.i ? LATER_TILE : FIRST_TILE) << 4;
        w.i += KEYS;
        if (w.i >= w.n) walk_row(j, groups, sh, warp, &w);
        if (made >= 0) {
            const struct source(&src)[KEYS_A_WARP] = sh->sources[warp][slot];
            const bool coded0 = src[lane / 4].scales, coded1 = src[8 + lane / 4].scales;
            const bool odd0 = coded0 && odd_key(waiting, 0, bytes);
            const bool odd1 = coded1 && odd_key(waiting, 1, bytes);
            bar_wait(&sh->empty[slot], made / 2 % 2 ^ 1);
            begin_key(src[lane / 4], sh->tile[slot], key);
            begin_key(src[8 + lane / 4], sh->tile[slot], key + 8);
            const struct spot at(sh->tile[slot], key, lane);
            if (coded0) store_codes<0>(at, bytes, waiting);
            if (coded1) store_codes<1>(at, bytes, waiting);
            if (odd0) at.odd_codes(src[lane / 4]);
            if (odd1) spot(sh->tile[slot], key + 8, lane).odd_codes(src[8 + lane / 4]);
        }
        dev_copy_commit();
        dev_copy_wait<0>();
        if (made >= 0) {
            wgmma_shared();
            __syncwarp();
            if (lane == 0) {
                if (first) bar_arrive(&sh->q_full);
                bar_arrive(&sh->full[slot]);
            }
        }
        __syncwarp();
        fetch(sh->sources[warp][slot ^ 1], waiting, &bytes);
        dev_copy_commit();
    }
    bar_wait(&sh->q_empty, begun % 2 ^ 1);
    if (thread == 0) sh->row.n = -1;
    __syncwarp();
    if (lane == 0) bar_arrive(&sh->q_full);
}

/* ------------------------------------------------------------------ consumers */

/* The descriptor of what lies `bytes` further on: the address never carries into the upper word. */
static __device__ __forceinline__ uint64_t on(uint64_t descriptor, int bytes)
{
    return (descriptor & ~(uint64_t)0xffffffff) | (uint32_t)((uint32_t)descriptor + (bytes >> 4));
}
/* Scores of a tile: one chain over the width. */
static __device__ __forceinline__ void scores(const struct shared *sh, int slot, float (&s)[32])
{
    const uint64_t q = wgmma_rows(sh->q), k = wgmma_rows(sh->tile[slot]);
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
        wgmma_bf16(s, on(q, i / 4 * BLOCK + i % 4 * 32), on(k, i / 4 * BLOCK + i % 4 * 32), i > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
}
/* o (+)= weights times this group's columns of a tile; begun, not waited for. */
static __device__ __forceinline__ void add_own(const struct shared *sh, int slot, int group,
                                               const uint32_t (&p)[16], bool add, float (&o)[128])
{
    const uint64_t v = wgmma_columns(sh->tile[slot] + group * (TILE / 2), BLOCK, 1024);
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma_bf16_columns(o, p + 4 * i, on(v, i * 2048), i > 0 || add);
    wgmma_commit();
}
static __device__ __forceinline__ void add_other(const struct shared *sh, int slot, int group,
                                                 bool add, float (&o)[128])
{
    const uint64_t v = wgmma_columns(sh->tile[slot] + group * (TILE / 2), BLOCK, 1024);
    const uint64_t p = wgmma_rows(sh->p[slot]);
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma_bf16_columns(o, on(p, i * 32), on(v, i * 2048), i > 0 || add);
    wgmma_commit();
}
static __device__ __forceinline__ void add_done(float (&o)[128])
{
    wgmma_wait<0>();
    wgmma_pin(o);
}
/* The sums of this thread's two heads times powers of two. */
static __device__ __forceinline__ void rescale(float f0, float f1, float (&o)[128])
{
    if (__all_sync(~0u, f0 == 1.0f && f1 == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
        o[i] *= f0;
        o[i + 1] *= f0;
        o[i + 2] *= f1;
        o[i + 3] *= f1;
    }
}
static __device__ __forceinline__ void arrive(uint64_t *bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(bar);
}

/* Weights of a tile from its scores, and the chain after it. */
static __device__ __forceinline__ void weigh(const struct shared *sh, int32_t k0, int32_t n,
                                             float factor, float (&s)[32],
                                             struct attn_chain (&c)[2], uint32_t (&p)[16])
{
    const int col = threadIdx.x % 4 * 2;
    const int32_t there = n - k0; /* keys of this tile */
    float top[2] = {-kern_float(0x7f800000u), -kern_float(0x7f800000u)};
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] *= factor;
    if (there < KEYS) {
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
        const float m = fmaxf(c[r].m, attn_reference(top[r]));
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t two = attn_weights(s[4 * i + 2 * r], s[4 * i + 2 * r + 1], m);
            sum += kern_float(two << 16);
            sum += kern_float(two & 0xffff0000u);
            p[2 * i + r] = two;
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        c[r].sum = fmaf(c[r].sum, attn_power(c[r].m - m), sum);
        c[r].m = m;
    }
}
/* p lies as wgmma wants it from registers: word 2 i + r has row r's columns 8 i + 2 (lane % 4) on. */
static __device__ __forceinline__ void publish(struct shared *sh, int slot, const uint32_t (&p)[16],
                                               const struct attn_chain (&c)[2])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 16; i++)
        *(uint32_t *)(sh->p[slot] + (row + i % 2 * 8) * 128 + ((i / 2 ^ lane / 4) << 4) +
                      lane % 4 * 4) = p[i];
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

/* Four lanes' words of four pieces: lane c gets the whole of piece c. */
static __device__ __forceinline__ uint4 gather_piece(uint32_t w0, uint32_t w1, uint32_t w2,
                                                     uint32_t w3)
{
    uint32_t w[4] = {w0, w1, w2, w3};
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        w[i] = odd ? got : w[i];
        w[i + 1] = odd ? w[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
        w[i] = high ? got : w[i];
        w[i + 2] = high ? w[i + 2] : got;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}
static __device__ __forceinline__ void store_row(const struct attn_job &j, const struct row &row,
                                                 int group, const struct attn_chain (&c)[2],
                                                 const float (&o)[128])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t h = row.h0 + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * r;
        const float inverse = attn_inverse(c[r], h < j.H ? j.sink[h] : 0.0f);
        uint16_t *to = (uint16_t *)j.o + ((int64_t)row.t * j.H + h) * WIDTH + group * (WIDTH / 2) +
                       lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < 8; i++) { /* 32 columns */
            uint32_t w[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int at = (4 * i + n) * 4 + 2 * r;
                w[n] = attn_bf16x2(o[at] * inverse, o[at + 1] * inverse);
            }
            const uint4 piece = gather_piece(w[0], w[1], w[2], w[3]);
            if (h < j.H) *(uint4 *)(to + 32 * i) = piece;
        }
    }
}

/* The group as a constant: descriptors are then uniform. */
template <int group>
static __device__ __forceinline__ void consume(const struct attn_job &j, struct shared *sh)
{
    constexpr int own = group, other = group ^ 1; /* slots: a group weighs the tiles of its own */
    const float factor = attn_factor(j.scale);
    float o[128];
    uint32_t g0 = 0; /* tiles before this row */
    for (int begun = 0;; begun++) {
        bar_wait(&sh->q_full, begun % 2);
        const struct row row = sh->row;
        if (row.n < 0) break;
        const int32_t tiles = (row.n + KEYS - 1) / KEYS;
        const bool first = g0 % 2 == (uint32_t)group;
        struct attn_chain c[2] = {{ATTN_LEAST, 0}, {ATTN_LEAST, 0}};
        if (!first && tiles < 2) arrive(&sh->q_empty);
        for (int32_t i = 0; i < tiles; i += 2) {
            /* Both tiles' slots, and how often those were used before. */
            const uint32_t use0 = (g0 + i) / 2, use1 = (g0 + i + 1) / 2;
            float s[32], f[2];
            uint32_t p[16];
            if (first) {
                bar_wait(&sh->full[own], use0 % 2);
                scores(sh, own, s);
                if (i + 2 >= tiles) arrive(&sh->q_empty);
                const float m[2] = {c[0].m, c[1].m};
                weigh(sh, i * KEYS, row.n, factor, s, c, p);
                bar_wait(&sh->read[own], use0 % 2 ^ 1);
                publish(sh, own, p, c);
                if (i) rescale(attn_power(m[0] - c[0].m), attn_power(m[1] - c[1].m), o);
                add_own(sh, own, group, p, i > 0, o);
                if (i + 1 < tiles) {
                    bar_wait(&sh->full[other], use1 % 2);
                    bar_wait(&sh->made[other], use1 % 2);
                    follow(sh, other, c, f);
                    add_done(o);
                    arrive(&sh->empty[own]);
                    rescale(f[0], f[1], o);
                    add_other(sh, other, group, true, o);
                    add_done(o);
                    arrive(&sh->empty[other]);
                    arrive(&sh->read[other]);
                } else {
                    add_done(o);
                    arrive(&sh->empty[own]);
                }
            } else {
                const bool two = i + 1 < tiles;
                if (two) {
                    bar_wait(&sh->full[own], use1 % 2);
                    scores(sh, own, s);
                    if (i + 3 >= tiles) arrive(&sh->q_empty);
                }
                bar_wait(&sh->full[other], use0 % 2);
                bar_wait(&sh->made[other], use0 % 2);
                follow(sh, other, c, f);
                if (i) rescale(f[0], f[1], o);
                add_other(sh, other, group, i > 0, o);
                if (two) {
                    const float m[2] = {c[0].m, c[1].m};
                    weigh(sh, (i + 1) * KEYS, row.n, factor, s, c, p);
                    bar_wait(&sh->read[own], use1 % 2 ^ 1);
                    publish(sh, own, p, c);
                    add_done(o);
                    arrive(&sh->empty[other]);
                    arrive(&sh->read[other]);
                    rescale(attn_power(m[0] - c[0].m), attn_power(m[1] - c[1].m), o);
                    add_own(sh, own, group, p, true, o);
                    add_done(o);
                    arrive(&sh->empty[own]);
                } else {
                    add_done(o);
                    arrive(&sh->empty[other]);
                    arrive(&sh->read[other]);
                }
            }
        }
        g0 += (uint32_t)tiles;
        store_row(j, row, group, c, o);
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    wgmma_kernel(const __grid_constant__ struct attn_job j, int32_t groups)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct shared *sh = (struct shared *)raw;
    if (threadIdx.x == 0) {
        if (dev_shared(raw) % 1024) __trap(); /* swizzles count from there; no room to move */
        for (int i = 0; i < 2; i++) {
            bar_init(&sh->full[i], PRODUCER_WARPS);
            bar_init(&sh->empty[i], CONSUMERS * 4);
            bar_init(&sh->made[i], 4);
            bar_init(&sh->read[i], 4);
        }
        bar_init(&sh->q_full, PRODUCER_WARPS);
        bar_init(&sh->q_empty, CONSUMERS * 4);
        bar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
    if (group >= CONSUMERS) {
        set_registers_less<PRODUCER_REGISTERS>();
        produce(j, groups, sh, (int)threadIdx.x - CONSUMERS * 128);
    } else {
        set_registers_more<CONSUMER_REGISTERS>();
        if (group == 0)
            consume<0>(j, sh);
        else
            consume<1>(j, sh);
    }
}

#else
static __global__ void wgmma_kernel(const __grid_constant__ struct attn_job, int32_t) {}
#endif

void attention_wgmma(struct kern_stream *s, const struct attn_job *j)
{
    const int bytes = (int)sizeof(struct shared);
    static_assert(sizeof(struct shared) <= 227 * 1024, "shared memory of a block");
    const int64_t groups = cuda_ceil(j->H, HEADS), items = j->T * groups;
    CUDA_SHARED(wgmma_kernel, bytes);
    wgmma_kernel<<<(unsigned)(items < s->n_sm ? items : s->n_sm), THREADS, bytes, s->cu>>>(
        *j, (int32_t)groups);
}
