/* kernels/attn/attention_spread_cuda.cu - attention of rows so few that eight multiprocessors share
 * one (sm_90a).
 *
 * A cluster of eight CTAs takes a row and 64 heads. Tiles of keys go round: a CTA makes the scores
 * and weights of every eighth, over the whole width, and hands the weights to all eight. Each sums
 * 64 of the 512 columns of all tiles in their order, and reads and widens those once more for it.
 * So nobody waits for another's scores of the same tile, and a row of 640 keys is two rounds.
 *     tile producers    sixteen warps: every eighth tile; half of the columns eight each
 *     column producers  four warps: 64 columns of every tile; find keys far ahead
 *     scorers           a warpgroup: scores and weights of those tiles
 *     summers           a warpgroup: weights times the 64 columns; the output
 * Where all keys lie that a short row has is looked up at once in the beginning, one by a thread.
 * Weights go as the registers of a thread, for the same thread of the group there: to global
 * memory, and from there the copy engine brings them to all eight at once. (Stores from CTA to CTA,
 * eight times as many bytes as one holds, were most of a scorer's time.)
 *
 * Order    of all sums, and what is rounded where, are those of attention_wgmma_cuda.cu: same bits.
 */
#include "kernels/attn/attention_group.cuh"

enum {
    HEADS = 64,
    CTAS = 8,
    FIRST_SCORER = 128, /* threads */
    FIRST_COLUMN = 256,
    FIRST_TILE = 384,
    TILE_WARPS = 16,
    THREADS = FIRST_TILE + TILE_WARPS * 32,
    /* 896 threads begin with 72 registers each. */
    GROUP_REGISTERS = 96, /* of a scorer or summer */
    COLUMN_REGISTERS = 64,
    TILE_REGISTERS = 56,
    SLOTS = 2,    /* of 64 columns */
    KNOWN = 16,   /* tiles whose keys are known at a time; */
    AT_ONCE = 14, /* in the beginning; */
    AHEAD = 12,   /* later two at once, so far ahead of the one whose columns are widened */
    MADE = 4,     /* pieces of four words of a thread's weights */
};
static_assert(AT_ONCE * KEY_ROWS == THREADS, "a key a thread");

/* A tile's weights. */
struct made {
    uint4 p[MADE][128];
    float reference[HEADS];
};
struct shared {
    uint8_t q[KEY_TILE]; /* 64 heads; at the end the output goes through here */
    uint8_t tile[KEY_TILE];
    uint8_t columns[SLOTS][KEY_BLOCK];
    struct made made[CTAS]; /* by the CTA that made it */
    struct key_source source[KNOWN][KEY_ROWS];
    struct attn_keys keys;
    uint64_t q_full, tile_full[2], tile_empty; /* full: halves of the columns */
    uint64_t columns_full[SLOTS], columns_empty[SLOTS];
    uint64_t found[KNOWN / 2]; /* two tiles' keys, later than in the beginning */
    uint64_t made_full[CTAS];  /* bytes */
    uint64_t made_read;        /* what this CTA made last is in registers everywhere */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ------------------------------------------------------------------ keys */

/* A key while it is found. */
struct search {
    uint32_t word; /* on its way: the entry's number; then its page's */
    int32_t row;   /* of the page; negative: no entry */
};
/* The number of an entry does not wait for how many are selected: a list has room for sel_ld. */
static __device__ __forceinline__ void search_begin(const struct attn_job &j,
                                                    const struct attn_keys &ks, int32_t i,
                                                    struct key_source *source, struct search *s)
{
    const int32_t entry = i - ks.n_window;
    s->word = (uint32_t)entry;
    if (ks.selected && entry >= 0 && entry < j.sel_ld)
        s->word = (uint32_t)__ldg(ks.selected + entry);
    const struct key_looked at = key_look(j, ks, i, ks.n);
    s->row = at.n < 0 ? 0 : -1;
    if (at.n >= 0) *source = key_source_of(j, {at.at, at.row, at.n}, 0);
}
static __device__ __forceinline__ void search_page(const struct attn_job &j,
                                                   const struct attn_keys &ks, struct search *s)
{
    if (s->row < 0) return;
    const struct key_found f = key_find(j, {ks.q.page_ids, 0, -ks.q.page_step}, s->word);
    s->row = f.row;
    s->word = __ldg((const uint32_t *)f.at);
}
static __device__ __forceinline__ void search_end(const struct attn_job &j, const struct search &s,
                                                  struct key_source *source)
{
    if (s.row >= 0) *source = key_source_of(j, {NULL, s.row, -1}, s.word);
}

/* ------------------------------------------------------------------ producers */

/* Where to read ahead from: anywhere that can be read for a key that is not in e4m3, as what comes
 * is not looked at. */
static __device__ __forceinline__ const uint8_t *
or_any(const struct attn_job &j, const struct key_source &s, const uint8_t *from)
{
    return s.scales ? from : (const uint8_t *)j.kv;
}
/* Sixteen bytes to shared memory. */
static __device__ __forceinline__ void put(uint32_t at, const uint4 &v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
/* Sixteen codes to a block: the first piece to `at`, the second to where bit 4 is another; returns
 * odds. */
static __device__ __forceinline__ uint32_t widen(uint32_t at, const uint4 &c, uint32_t factor)
{
    uint4 lo, hi;
    dev_e4m3x16_times(c, factor, &lo, &hi);
    put(at, lo);
    put(at ^ 16, hi);
    return key_odd::add(0, c);
}
static __device__ __forceinline__ void copy_to(uint32_t at, const uint8_t *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
}
/* A lane's part of half a key that is not in e4m3: copies on their way when this returns, or
 * zeros. place: of the half's first block, where piece lane % 4 goes. */
static __device__ __forceinline__ void plain_half(const struct key_source &s, int half, int lane,
                                                  uint32_t place)
{
    const uint8_t *from = s.row + half * KEY_WIDTH + lane % 4 * 16;
#pragma unroll 1
    for (int b = 0; b < 4; b++, place += KEY_BLOCK, from += 128) {
        if (s.row) {
            copy_to(place, from);
            copy_to(place ^ 64, from + 64);
        } else {
            put(place, make_uint4(0, 0, 0, 0));
            put(place ^ 64, make_uint4(0, 0, 0, 0));
        }
    }
}
/* Half of the columns of eight keys of every eighth tile. */
static __device__ __forceinline__ void produce_tiles(const struct attn_job &j, int32_t tiles,
                                                     int rank, struct shared *sh)
{
    const int thread = (int)threadIdx.x - FIRST_TILE, warp = thread / 32, lane = thread % 32;
    const int half = warp / 8, key = warp % 8 * 8 + lane / 4, quarter = lane % 4;
    const uint32_t row = dev_shared(sh->tile) + (uint32_t)(half * 4 * KEY_BLOCK + key * 128),
                   place = row + (uint32_t)((2 * quarter ^ key % 8) << 4),
                   rest = row + (uint32_t)((quarter ^ key % 8) << 4);
#pragma unroll 1
    for (int32_t i = rank, turn = 0; i < tiles; i += CTAS, turn++) {
        uint4 c[4], last;
        if (i >= AT_ONCE) bar_wait(&sh->found[i / 2 % (KNOWN / 2)], (i - AT_ONCE) / KNOWN % 2);
        const struct key_source s = sh->source[i % KNOWN][key];
        const uint8_t *from = or_any(j, s, s.row) + half * 256 + quarter * 16;
        const uint32_t scales = __ldg((const uint32_t *)or_any(j, s, s.scales) + half);
#pragma unroll
        for (int b = 0; b < 4; b++) c[b] = dev_stream16(from + b * 64);
        if (half) last = dev_stream16(from + 256);
        if (turn) bar_wait(&sh->tile_empty, turn % 2 ^ 1);
        if (s.scales) {
            uint32_t odds = key_odd::scales(half ? scales & 0x00ffffffu : scales);
#pragma unroll
            for (int b = 0; b < 3; b++)
                odds |= widen(place + b * KEY_BLOCK, c[b], key_factor(scales, b));
            if (half) {
                put(rest + 3 * KEY_BLOCK, c[3]);
                put((rest ^ 64) + 3 * KEY_BLOCK, last);
            } else {
                odds |= widen(place + 3 * KEY_BLOCK, c[3], key_factor(scales, 3));
            }
            if (key_odd::any(odds))
                key_odd_codes(s.row + half * 256 + quarter * 16, s.scales + half * 4, 4 - half,
                              place);
        } else {
            plain_half(s, half, lane, rest);
        }
        dev_copy_commit();
        dev_copy_wait<0>();
        wgmma_shared();
        arrive(&sh->tile_full[half]);
    }
}
/* This CTA's columns of every tile; and keys for later tiles. */
static __device__ __forceinline__ void produce_columns(const struct attn_job &j, int32_t tiles,
                                                       int rank, struct shared *sh)
{
    const int thread = (int)threadIdx.x - FIRST_COLUMN, key = thread / 2, part = thread % 2;
    const uint32_t place =
        dev_shared(sh->columns) + (uint32_t)(key * 128 + ((4 * part ^ key % 8) << 4));
    struct search wanted;
    wanted.row = -1;
    uint4 c[4];
    uint32_t scales = 0;
    struct key_source s = {NULL, NULL};
#pragma unroll 1
    for (int32_t i = -1; i < tiles; i++) {
        const int slot = i & 1;
        if (i >= 0) {
            const uint32_t at = place + slot * KEY_BLOCK;
            if (i >= SLOTS) bar_wait(&sh->columns_empty[slot], i / SLOTS % 2 ^ 1);
            if (s.scales && rank < CTAS - 1) {
                const uint32_t factor = key_factor(scales, rank % 4);
                uint32_t odds = key_odd::scales(scales >> rank % 4 * 8 & 255);
                odds |= widen(at, c[0], factor);
                odds |= widen(at ^ 32, c[1], factor);
                if (key_odd::any(odds)) { /* once more, the slow way: rare */
                    const uint32_t scale = dev_ue8m0_bf16x2((uint8_t)(scales >> rank % 4 * 8));
#pragma unroll 1
                    for (int k = 0; k < 2; k++) {
                        uint4 lo, hi;
                        dev_e4m3x16_bf16(k ? c[1] : c[0], &lo, &hi);
                        put(at ^ 32 * k, dev_mul_bf16x8(lo, scale));
                        put(at ^ 32 * k ^ 16, dev_mul_bf16x8(hi, scale));
                    }
                }
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) put(at ^ k * 16, s.row ? c[k] : make_uint4(0, 0, 0, 0));
            }
            wgmma_shared();
            arrive(&sh->columns_full[slot]);
        }
        /* Keys of the tiles of a chunk that takes the place of one that is summed. */
        const int32_t chunk = (i + AHEAD) / 2;
        if (i >= 0 && chunk * 2 >= AT_ONCE && chunk * 2 < tiles) {
            struct key_source *to = &sh->source[chunk * 2 % KNOWN][thread];
            if (i % 2 == 0) {
                search_begin(j, sh->keys, chunk * 2 * KEY_ROWS + thread, to, &wanted);
                search_page(j, sh->keys, &wanted);
            } else {
                search_end(j, wanted, to);
                bar_arrive(&sh->found[chunk % (KNOWN / 2)]);
            }
        }
        if (i + 1 >= tiles) break;
        if (i + 1 >= AT_ONCE)
            bar_wait(&sh->found[(i + 1) / 2 % (KNOWN / 2)], (i + 1 - AT_ONCE) / KNOWN % 2);
        s = sh->source[(i + 1) % KNOWN][key];
        const bool coded = s.scales && rank < CTAS - 1;
        const uint8_t *from = s.row ? s.row + (coded      ? rank * 64 + part * 32
                                               : s.scales ? KEY_CODES + part * 64
                                                          : rank * 128 + part * 64)
                                    : (const uint8_t *)j.kv;
        scales = __ldg((const uint32_t *)or_any(j, s, s.scales) + rank / 4);
        c[0] = dev_stream16(from);
        c[1] = dev_stream16(from + 16);
        if (!coded) {
            c[2] = dev_stream16(from + 32);
            c[3] = dev_stream16(from + 48);
        }
    }
}

/* ------------------------------------------------------------------ scorers */

static __device__ __forceinline__ void score(const struct attn_job &j, int32_t n, int32_t tiles,
                                             int rank, struct made *made, struct shared *sh)
{
    const int thread = (int)threadIdx.x - FIRST_SCORER, head = thread / 32 * 16 + thread % 32 / 4;
    const float factor = attn_factor(j.scale);
    const uint64_t q = wgmma_rows(sh->q), k = wgmma_rows(sh->tile);
    cluster_wait(); /* all barriers are there */
    if (rank < tiles) bar_wait(&sh->q_full, 0);
#pragma unroll 1
    for (int32_t i = rank, turn = 0; i < tiles; i += CTAS, turn++) {
        float s[32];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bar_wait(&sh->tile_full[half], turn % 2);
            if (half == 0) wgmma_pin(s);
            wgmma_fence();
#pragma unroll
            for (int w = half * 16; w < half * 16 + 16; w++)
                wgmma_bf16(s, on(q, w / 4 * KEY_BLOCK + w % 4 * 32),
                           on(k, w / 4 * KEY_BLOCK + w % 4 * 32), w > 0);
            wgmma_commit();
        }
        wgmma_wait<0>();
        wgmma_pin(s);
        arrive(&sh->tile_empty);
        struct weights w;
        weigh(i * KEY_ROWS, n, factor, s, &w);
        if (turn) bar_wait(&sh->made_read, turn % 2 ^ 1);
#pragma unroll
        for (int m = 0; m < MADE; m++)
            made->p[m][thread] =
                make_uint4(w.p[4 * m], w.p[4 * m + 1], w.p[4 * m + 2], w.p[4 * m + 3]);
        if (thread % 4 == 0) {
            made->reference[head] = w.reference[0];
            made->reference[head + 8] = w.reference[1];
        }
        __threadfence();
        asm volatile("fence.proxy.async;" ::: "memory");
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (thread == 0)
            bulk_load_to(&sh->made[rank], made, sizeof *made, &sh->made_full[rank],
                         (1 << CTAS) - 1);
    }
}

/* ------------------------------------------------------------------ summers */

/* This CTA's columns of the row, through `room` for them, which lies as a block. */
static __device__ __forceinline__ void store_row(const struct attn_job &j, int32_t t, int32_t h0,
                                                 int rank, const float (&inverse)[2],
                                                 const float (&o)[32], uint8_t *room)
{
    const int lane = threadIdx.x % 32, head0 = threadIdx.x / 32 * 16;
    uint8_t *to = room + (head0 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* sixteen columns */
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *two = &o[i * 8 + 2 * k];
            w[k] = attn_bf16x2(two[0] * inverse[k % 2], two[1] * inverse[k % 2]);
        }
        dev_store_matrix4(to + ((i * 2 + lane / 16 ^ lane % 8) << 4), w);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int head = head0 + i * 4 + lane / 8, piece = lane % 8;
        const uint4 v = *(const uint4 *)(room + head * 128 + ((piece ^ head % 8) << 4));
        if (h0 + head < j.H)
            *((uint4 *)((uint16_t *)j.o + ((int64_t)t * j.H + h0 + head) * KEY_WIDTH + rank * 64) +
              piece) = v;
    }
}
static __device__ __forceinline__ void sum(const struct attn_job &j, int32_t t, int32_t h0,
                                           int32_t tiles, int rank, struct shared *sh)
{
    const int thread = threadIdx.x, head = thread / 32 * 16 + thread % 32 / 4;
    struct attn_chain chain[2] = {{ATTN_LEAST, 0}, {ATTN_LEAST, 0}};
    float sink[2], o[32];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t h = h0 + head + 8 * r;
        sink[r] = h < j.H ? __ldg(j.sink + h) : 0.0f;
    }
    cluster_wait();
#pragma unroll 1
    for (int32_t i = 0; i < tiles; i++) {
        const int by = i % CTAS, slot = i % SLOTS;
        uint32_t p[16];
        float f[2], power[2], own[2];
        bar_wait(&sh->made_full[by], i / CTAS % 2);
        if (thread == 0 && i + CTAS < tiles)
            bar_expect(&sh->made_full[by], (int)sizeof(struct made));
        const struct made *made = &sh->made[by];
        const float reference[2] = {made->reference[head], made->reference[head + 8]};
#pragma unroll
        for (int m = 0; m < MADE; m++) {
            const uint4 v = made->p[m][thread];
            p[4 * m] = v.x, p[4 * m + 1] = v.y, p[4 * m + 2] = v.z, p[4 * m + 3] = v.w;
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
        if (i && !__all_sync(~0u, f[0] == 1.0f && f[1] == 1.0f)) {
#pragma unroll
            for (int k = 0; k < 32; k++) o[k] *= f[k / 2 % 2];
        }
        bar_wait(&sh->columns_full[slot], i / SLOTS % 2);
        const uint64_t v = wgmma_columns(sh->columns[slot], KEY_BLOCK, 1024);
        wgmma_pin(o);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEY_ROWS / 16; k++)
            wgmma_bf16_columns(o, p + 4 * k, on(v, k * 2048), k > 0 || i > 0);
        wgmma_commit();
        if (i + CTAS < tiles) arrive_at(&sh->made_read, by); /* p is in registers */
        wgmma_wait<0>();
        wgmma_pin(o);
        arrive(&sh->columns_empty[slot]);
        sum_weights(p, own);
#pragma unroll
        for (int r = 0; r < 2; r++) chain[r].sum = fmaf(chain[r].sum, f[r], own[r]);
    }
    const float inverse[2] = {attn_inverse(chain[0], sink[0]), attn_inverse(chain[1], sink[1])};
    store_row(j, t, h0, rank, inverse, o, sh->q); /* all scores are made */
}

static __global__ void __launch_bounds__(THREADS, 1)
    spread_kernel(const __grid_constant__ struct attn_job j, int32_t groups, struct made *made,
                  const __grid_constant__ CUtensorMap queries)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct shared *sh = (struct shared *)raw;
    const int rank = cluster_rank();
    const int32_t item = blockIdx.x / CTAS, t = item / groups, h0 = item % groups * HEADS;
    if (threadIdx.x == 0) {
        if (dev_shared(raw) % 1024) __trap(); /* swizzles count from there */
        bar_init(&sh->q_full, 1);
        bar_init(&sh->tile_empty, 4);
        for (int i = 0; i < 2; i++) bar_init(&sh->tile_full[i], TILE_WARPS / 2);
        for (int i = 0; i < SLOTS; i++) {
            bar_init(&sh->columns_full[i], 4);
            bar_init(&sh->columns_empty[i], 4);
        }
        for (int i = 0; i < KNOWN / 2; i++) bar_init(&sh->found[i], 128);
        for (int i = 0; i < CTAS; i++) {
            bar_init(&sh->made_full[i], 1);
            bar_expect(&sh->made_full[i], (int)sizeof(struct made));
        }
        bar_init(&sh->made_read, 4 * CTAS);
        bar_init_done();
    }
    const int32_t seq = j.b.row_seq[t];
    const struct cuda_seq seq_q = j.b.seqs[seq < 0 ? 0 : seq];
    cuda_await();
    if (seq < 0) return; /* the whole cluster */
    struct attn_keys ks =
        attn_keys_at(j, t, seq_q.pos0, seq_q.row0, j.k.y.ratio && j.selected ? j.n_selected[t] : 0);
    ks.q = seq_q;
    {
        struct key_source *to = &sh->source[threadIdx.x / KEY_ROWS][threadIdx.x % KEY_ROWS];
        struct search s;
        search_begin(j, ks, (int32_t)threadIdx.x, to, &s);
        search_page(j, ks, &s);
        search_end(j, s, to);
    }
    const int32_t tiles = (ks.n + KEY_ROWS - 1) / KEY_ROWS;
    if (threadIdx.x == FIRST_COLUMN) sh->keys = ks;
    __syncthreads();
    cluster_arrive_relaxed();
    cuda_hurry();
    if (threadIdx.x == FIRST_SCORER && rank < tiles) {
        bar_expect(&sh->q_full, KEY_TILE);
#pragma unroll 1
        for (int b = 0; b < KEY_WIDTH / 64; b++)
            tile_load(sh->q + b * KEY_BLOCK, &queries, &sh->q_full, b * TILE_BYTES, t * j.H + h0);
    }
    __syncwarp();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
    if (group >= FIRST_TILE / 128) {
        set_registers_less<TILE_REGISTERS>();
        produce_tiles(j, tiles, rank, sh);
        cluster_wait();
    } else if (group == FIRST_COLUMN / 128) {
        set_registers_less<COLUMN_REGISTERS>();
        produce_columns(j, tiles, rank, sh);
        cluster_wait();
    } else if (group == FIRST_SCORER / 128) {
        set_registers_more<GROUP_REGISTERS>();
        score(j, ks.n, tiles, rank, made + blockIdx.x, sh);
    } else {
        set_registers_more<GROUP_REGISTERS>();
        sum(j, t, h0, tiles, rank, sh);
    }
    /* Whatever is sent to a CTA is waited for there: none has left before. */
}

#else
static __global__ void spread_kernel(const __grid_constant__ struct attn_job, int32_t,
                                     struct made *, const __grid_constant__ CUtensorMap)
{
}
#endif

bool attention_spread(struct kern_stream *s, const struct attn_job *j, void *room)
{
    const int bytes = (int)sizeof(struct shared);
    static_assert(sizeof(struct shared) <= 227 * 1024, "shared memory of a block");
    static_assert(sizeof(struct made) == ATTN_SPREAD_ROOM, "room of a block");
    const int32_t groups = (int32_t)cuda_ceil(j->H, HEADS);
    CUtensorMap queries;
    if (!cuda_tile_map(&queries, j->q, (int64_t)j->T * j->H, KEY_WIDTH * 2, KEY_WIDTH * 2, HEADS))
        return false;
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = CTAS;
    attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)(j->T * groups * CTAS));
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = (size_t)bytes;
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = cuda_early_launches ? 2 : 1;
    CUDA_SHARED(spread_kernel, bytes);
    cudaLaunchKernelEx(&c, spread_kernel, *j, groups, (struct made *)room, queries);
    return true;
}
