/* kernels/moe/moe_codes_cuda.cu - many pairs times mxfp4 and fp8 experts by their codes: the
 * prefill product of the fp8 kind, on sm_90a. Bits, images and epilogue are moe_wgmma.cuh's.
 *
 * Plan     Two warpgroups of consumers multiply and add up, nothing else. Four warps convert
 *          mxfp4 codes to operands, each at the place of the thread that will have them; of fp8,
 *          one finds scales. Another warpgroup's warps ask the copy engine for x and for what is to
 *          be converted, and look things up.
 * Cluster  Two blocks with neighbouring weight rows of an expert are a cluster: each fetches half
 *          of x for both.
 * Turns    A stage's columns are two parts. While one warpgroup adds a part up, the other one's is
 *          multiplied; additions are in the matrix unit's way, each about a cycle, and so is what
 *          else f32's pipe executes. Not so, slower at 8192 rows: four parts, two of them under way
 *          (twice the instructions that start them); consumers that convert codes themselves (less
 *          of shared memory's pipe, more instructions); the next stage's operands fetched to
 *          registers of their own while the last part is multiplied (copying them costs more than
 *          the wait).
 * Ahead    Shared memory answers after more than 100 cycles while wgmma reads there: the next
 *          stage's operands are fetched before the last part's additions.
 */
#include "kernels/moe/moe_wgmma.cuh"

enum {
    PAIR = 2, /* blocks of a cluster */
    COLUMNS = MOE_CODES,
    THREADS = WG * (WG_CONSUMERS + 2),
    CONSUMERS = WG_CONSUMERS * WG / 32, /* warps */
};

template <enum kern_wfmt F> struct codes_shape {
    enum {
        CONVERTED = F == KERN_W_MXFP4,
        CONVERTERS = CONVERTED ? WG / 32 : 1, /* warps */
        X_BYTES = COLUMNS * 128,
        A_BYTES = WG_M * 128,
        W_AT = X_BYTES + A_BYTES, /* fp8: scales of its rows' blocks */
        STAGE = (W_AT + (CONVERTED ? 0 : 16) + 1023) / 1024 * 1024,
        S = 4,
        /* The second ring: what is to be converted, R stages of RAW bytes. */
        CODES = moe_format<F>::CODES,
        AHEAD = 4, /* stages that 16 bytes of a row's scales are for */
        RAW = CONVERTED ? WG_M * (CODES + 16) : 0,
        R = CONVERTED ? 3 : 1,
        BYTES = S * STAGE + R * RAW + 1024,
        /* Registers of a thread that multiplies, converts, fetches: 512 of four. */
        MULTIPLIES = CONVERTED ? 208 : 224,
        CONVERTS = CONVERTED ? 56 : 32,
        FETCHES = 512 - 2 * MULTIPLIES - CONVERTS,
    };
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using tell = struct wg_tell<true, COLUMNS>;

/* ------------------------------------------------------------------ producers */

/* x, which both blocks of the cluster get, and what goes to consumers as it is. */
template <enum kern_wfmt F>
static __device__ __forceinline__ void fetch_x(const struct moe_product &p,
                                               const struct wg_maps &maps, struct wg_ring r,
                                               const struct wg_items &items)
{
    using S = codes_shape<F>;
    const int n_kb = p.kp / 128;
    for (int at = items.at, step = items.step; at < items.n; at += step, step = items.two - step) {
        const struct moe_tile tile = p.plan.tiles[at / items.parts];
        if (tile.n == 0) break;
        const int part = wg_part(items, at), eights = (tile.n + 7) / 8;
        const int half = (eights + 1) / 2, first = items.rank ? half * 8 : 0,
                  bytes = (items.rank ? eights - half : half) * 1024;
        for (int kb = 0; kb < n_kb; kb++, wg_next<S::S>(&r)) {
            uint8_t *to = r.at + r.slot * S::STAGE;
            uint64_t *full = r.full + r.slot;
            bar_wait(r.empty + r.slot, r.phase ^ 1);
            bar_expect(full, eights * 1024 + (S::CONVERTED ? 0 : (int)S::A_BYTES));
            if (bytes > 0)
                bulk_load_to(to + first * 128,
                             p.image + ((int64_t)kb * p.plan.room + tile.first + first) * 128,
                             bytes, full, (1 << PAIR) - 1);
            if constexpr (!S::CONVERTED) {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    stack_load(to + S::X_BYTES + i * 64 * S::CODES, &maps.codes[p.up ? i : 0], full,
                               kb * S::CODES, p.up ? part * 64 : part * WG_M + i * 64, tile.expert);
            }
        }
    }
}

/* What is to be converted: mxfp4. */
static __device__ __forceinline__ void fetch_codes(const struct moe_product &p,
                                                   const struct wg_maps &maps, struct wg_ring r,
                                                   const struct wg_items &items)
{
    using S = codes_shape<KERN_W_MXFP4>;
    const int n_kb = p.kp / 128;
    for (int at = items.at, step = items.step; at < items.n; at += step, step = items.two - step) {
        const struct moe_tile tile = p.plan.tiles[at / items.parts];
        if (tile.n == 0) break;
        const int part = wg_part(items, at);
        for (int kb = 0; kb < n_kb; kb++, wg_next<S::R>(&r)) {
            uint8_t *to = r.at + r.slot * S::RAW;
            uint64_t *full = r.full + r.slot;
            const bool scales = kb % S::AHEAD == 0;
            bar_wait(r.empty + r.slot, r.phase ^ 1);
            bar_expect(full, WG_M * (S::CODES + (scales ? 16 : 0)));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = p.up ? part * 64 : part * WG_M + i * 64;
                stack_load(to + i * 64 * S::CODES, &maps.codes[p.up ? i : 0], full, kb * S::CODES,
                           row, tile.expert);
                if (scales)
                    stack_load(to + WG_M * S::CODES + i * 64 * 16, &maps.scales[p.up ? i : 0], full,
                               kb * 4, row, tile.expert);
            }
        }
    }
}

/* ------------------------------------------------------------------ converters */

/* Operands lie by warps of consumers and instructions: the 16 bytes of each of a warp's threads
 * side by side. A thread here has the rows and the 32 k of the thread that will multiply with them.
 */
static __device__ __forceinline__ void convert_codes(const struct moe_product &p, struct wg_ring r,
                                                     struct wg_ring raw, struct wg_told t,
                                                     const tell *told)
{
    using S = codes_shape<KERN_W_MXFP4>;
    enum { EACH = CONSUMERS / S::CONVERTERS };
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WG / 32 * EACH, n_kb = p.kp / 128;
    const uint32_t c = lane % 4, scales_at = c | (c + 4) << 4;
    int place[EACH][2];
#pragma unroll
    for (int i = 0; i < EACH * 2; i++)
        place[i / 2][i % 2] = wg_place<true>(p.up, warp + i / 2, i % 2);
    for (;;) {
        const tell &now = told[t.slot];
        bar_wait(t.there + t.slot, t.phase);
        __syncwarp();
        if (wg_uniform(now.tile.n) == 0) break;
        uint2 tables[EACH][2];
        uint32_t scales[EACH][2];
#pragma unroll
        for (int i = 0; i < EACH * 2; i++)
            tables[i / 2][i % 2] = dev_mxfp4_table(now.top[place[i / 2][i % 2]]);
        wg_release(t.read + t.slot);
        t.slot ^= 1, t.phase ^= t.slot ^ 1;
        for (int kb = 0; kb < n_kb; kb++) {
            const uint8_t *from = raw.at + raw.slot * S::RAW;
            uint4 v[EACH][2];
            bar_wait(raw.full + raw.slot, raw.phase);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < EACH * 2; i++)
                v[i / 2][i % 2] = *(const uint4 *)(from + place[i / 2][i % 2] * S::CODES + c * 16);
            if (kb % S::AHEAD == 0) {
#pragma unroll
                for (int i = 0; i < EACH * 2; i++) {
                    const uint4 s =
                        *(const uint4 *)(from + WG_M * S::CODES + place[i / 2][i % 2] * 16);
                    scales[i / 2][i % 2] = __byte_perm(__byte_perm(s.x, s.y, scales_at),
                                                       __byte_perm(s.z, s.w, scales_at), 0x5410);
                }
            }
            uint4 *to = (uint4 *)(r.at + r.slot * S::STAGE + S::X_BYTES) + warp * 128 + lane;
            bar_wait(r.empty + r.slot, r.phase ^ 1);
            __syncwarp();
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                uint2 table[2];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    table[m] = dev_mxfp4_table_at(tables[e][m], scales[e][m] & 255);
                    scales[e][m] >>= 8;
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint4 a;
                    dev_e2m1x8_e4m3(wg_word(v[e][0], i), table[0], &a.x, &a.z);
                    dev_e2m1x8_e4m3(wg_word(v[e][1], i), table[1], &a.y, &a.w);
                    to[e * 128 + i * 32] = a;
                }
            }
            wg_release(r.full + r.slot);
            wg_next<S::S>(&r);
            wg_release(raw.empty + raw.slot); /* what was loaded has been used */
            wg_next<S::R>(&raw);
        }
    }
}

/* Of fp8, by one warp: the scales of the rows that consumer threads have. */
static __device__ __forceinline__ void find_scales(const struct moe_product &p, struct wg_ring r,
                                                   const struct wg_items &items)
{
    using S = codes_shape<KERN_W_FP8>;
    const int m = threadIdx.x % 2, n_kb = p.kp / 128;
    for (int at = items.at, step = items.step; at < items.n; at += step, step = items.two - step) {
        const struct moe_tile tile = p.plan.tiles[at / items.parts];
        if (tile.n == 0) break;
        const int row = wg_part(items, at) * (p.up ? 64 : WG_M),
                  there = row < p.rows ? row : p.rows - 1;
        const uint8_t *scale =
            (p.up && m ? p.b.w : p.a.w)[tile.expert].scale + there / 128 * p.a.scale_bytes;
        float w = moe_block_scale(p.a, scale, 0, 0);
        for (int kb = 0; kb < n_kb; kb++, wg_next<S::S>(&r)) {
            bar_wait(r.empty + r.slot, r.phase ^ 1);
            __syncwarp();
            if (threadIdx.x % 32 < 2) ((float *)(r.at + r.slot * S::STAGE + S::W_AT))[m] = w;
            wg_release(r.full + r.slot);
            w = moe_block_scale(p.a, scale, 0, kb + 1 < n_kb ? kb + 1 : kb);
        }
    }
}

/* ------------------------------------------------------------------ consumers */

/* This warp is done with a slot of the ring, in which both blocks put x. */
static __device__ __forceinline__ void release(uint64_t *here, uint32_t there)
{
    bar_arrive(here);
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

static __device__ __forceinline__ uint4 load16(uint32_t shared)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared)
                 : "memory");
    return v;
}

/* A stage's operands: of mxfp4 from `from` on; of fp8 at `at`, with scales of this thread's rows. */
template <enum kern_wfmt F>
static __device__ __forceinline__ void load(const uint8_t *stage, uint32_t from, const int (&at)[2],
                                            uint32_t (&a)[4][4], float (&w)[2])
{
    using S = codes_shape<F>;
    if constexpr (F == KERN_W_MXFP4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 v = load16(from + i * 512);
            a[i][0] = v.x, a[i][1] = v.y, a[i][2] = v.z, a[i][3] = v.w;
        }
    } else { /* in the copy engine's swizzle */
        const float2 two = *(const float2 *)(stage + S::W_AT);
        w[0] = two.x, w[1] = two.y;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint8_t *row = stage + S::X_BYTES;
            const uint4 v[2] = {*(const uint4 *)(row + at[m]),
                                *(const uint4 *)(row + (at[m] ^ 16))};
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i][m] = wg_word(v[i / 2], i % 2 * 2),
                a[i][2 + m] = wg_word(v[i / 2], i % 2 * 2 + 1);
        }
    }
}

/* All stages of two times W columns. */
template <enum kern_wfmt F, int W>
static __device__ __forceinline__ void multiply(int n_kb, struct wg_ring *r, const int (&at)[2],
                                                float (&total)[WG_SUMS(COLUMNS)])
{
    using S = codes_shape<F>;
    const uint32_t operands = dev_shared(r->at) + S::X_BYTES + at[0],
                   empty_there = dev_shared_of(r->empty, cluster_rank() ^ 1);
    uint32_t a[4][4], from = operands + r->slot * S::STAGE;
    float sum[W / 2], next[2] = {1.0f, 1.0f};
    bar_wait(r->full + r->slot, r->phase);
    __syncwarp(); /* whole warps go on */
    load<F>(r->at + r->slot * S::STAGE, from, at, a, next);
    uint64_t b = wgmma_rows(r->at + r->slot * S::STAGE);
    for (int kb = 0; kb < n_kb; kb++) {
        const bool more = kb + 1 < n_kb;
        uint64_t *empty = r->empty + r->slot;
        const uint32_t there = empty_there + r->slot * 8;
        const float w[2] = {next[0], next[1]};
        wg_next<S::S>(r);
        wg_times<W>(a, b, sum);
        wgmma_wait<0>();
        wgmma_pin(sum);
        __syncwarp();
        wg_add<F, W>(sum, w, 0, total);
        wg_times<W>(a, b + W * 8, sum);
        from = operands + r->slot * S::STAGE;
        asm volatile("" : "+r"(from)); /* known before the sums are */
        b = wgmma_rows(r->at + r->slot * S::STAGE);
        if (more) bar_wait(r->full + r->slot, r->phase);
        wgmma_wait<0>();
        wgmma_pin(sum);
        __syncwarp();
        /* Shared memory answers late while wgmma reads there: ahead of the additions. */
        if (more) load<F>(r->at + r->slot * S::STAGE, from, at, a, next);
        release(empty, there);
        wg_add<F, W>(sum, w, W, total);
    }
}

template <enum kern_wfmt F>
static __device__ __forceinline__ void consume(const struct moe_product &p, struct wg_ring r,
                                               struct wg_told t, const tell *told, int group)
{
    const int lane = threadIdx.x % 32, n_kb = p.kp / 128;
    for (;;) {
        const tell &now = told[t.slot];
        bar_wait(t.there + t.slot, t.phase);
        __syncwarp();
        const int n = wg_uniform(now.tile.n);
        if (n == 0) break;
        int place[2], at[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            place[m] = wg_place<true>(p.up, threadIdx.x / 32, m);
            at[m] = F == KERN_W_MXFP4 ? threadIdx.x / 32 * 2048 + lane * 16
                                      : place[m] * 128 + (lane % 4 * 2 ^ place[m] % 8) * 16;
        }
        float total[WG_SUMS(COLUMNS)];
#pragma unroll
        for (int s = 0; s < WG_SUMS(COLUMNS); s++) total[s] = 0.0f;
        switch ((n + 15) / 16) {
#define MULTIPLY(i)                                                                                \
    case i: multiply<F, (i)*8>(n_kb, &r, at, total); break;
            MULTIPLY(1)
            MULTIPLY(2)
            MULTIPLY(3)
            MULTIPLY(4)
            MULTIPLY(5)
            MULTIPLY(6)
            MULTIPLY(7)
            MULTIPLY(8)
            MULTIPLY(9)
            MULTIPLY(10)
            MULTIPLY(11)
            MULTIPLY(12)
            MULTIPLY(13)
            MULTIPLY(14)
#undef MULTIPLY
        }
        static_assert((int)COLUMNS == 14 * 16, "the widest of above");
        const int part = now.part;
        if (p.up)
            wg_store_codes<COLUMNS, true>(p, now, n, part, group, place, total);
        else
            wg_store_codes<COLUMNS, false>(p, now, n, part, group, place, total);
        wg_release(t.read + t.slot);
        t.slot ^= 1, t.phase ^= t.slot ^ 1;
    }
}

template <enum kern_wfmt F>
static __global__ void __launch_bounds__(THREADS, 1)
    codes_kernel(const __grid_constant__ struct moe_product p,
                 const __grid_constant__ struct wg_maps maps, int row_pairs)
{
    using S = codes_shape<F>;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ uint64_t full[S::S], empty[S::S], raw_full[S::R], raw_empty[S::R], there[2], read[2];
    __shared__ __align__(16) tell told[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::S; i++) {
            bar_init(full + i, 1 + S::CONVERTERS * 32);
            bar_init(empty + i, CONSUMERS * (32 + 1));
        }
        for (int i = 0; i < S::R; i++) {
            bar_init(raw_full + i, 1);
            bar_init(raw_empty + i, S::CONVERTERS * 32);
        }
        for (int i = 0; i < 2; i++) {
            bar_init(there + i, 32);
            bar_init(read + i, (CONSUMERS + (S::CONVERTED ? (int)S::CONVERTERS : 0)) * 32);
        }
        bar_init_done();
    }
    cluster_meet();
    cuda_await();
    cuda_hurry();
    struct wg_ring r = {shared, full, empty, 0, 0};
    r.at += (1024 - dev_shared(shared) % 1024) % 1024;
    const struct wg_ring raw = {r.at + S::S * S::STAGE, raw_full, raw_empty, 0, 0};
    const struct wg_told t = {there, read, 0, 0};
    const struct wg_items items =
        wg_turns((int)blockIdx.x / PAIR, (int)gridDim.x / PAIR, p.plan.max_tiles * row_pairs,
                 row_pairs, PAIR, cluster_rank());
    const int group = wg_uniform((int)threadIdx.x / WG);
    if (group < WG_CONSUMERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)S::MULTIPLIES));
        consume<F>(p, r, t, told, group);
    } else if (group == WG_CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)S::CONVERTS));
        if constexpr (S::CONVERTED)
            convert_codes(p, r, raw, t, told);
        else if (wg_uniform((int)threadIdx.x / 32) == CONSUMERS)
            find_scales(p, r, items);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)S::FETCHES));
        const int warp = wg_uniform((int)threadIdx.x % WG / 32);
        if (warp == 0 && threadIdx.x % 32 == 0) fetch_x<F>(p, maps, r, items);
        if (S::CONVERTED && warp == 1 && threadIdx.x % 32 == 0) fetch_codes(p, maps, raw, items);
        if (warp == 2) wg_look_up<F, true, COLUMNS>(p, t, told, items);
        __syncwarp();
    }
    cluster_meet(); /* a block must be there while the other one writes to it */
}
#else
template <enum kern_wfmt F>
static __global__ void codes_kernel(const __grid_constant__ struct moe_product p,
                                    const __grid_constant__ struct wg_maps maps, int row_pairs)
{
}
#endif

template <enum kern_wfmt F> static int launch(struct kern_stream *s, const struct moe_product *p)
{
    using S = codes_shape<F>;
    struct wg_maps maps;
    if (!wg_describe(&maps, p, S::CODES, S::CONVERTED)) return TOW_EDEVICE;
    const int row_pairs = (int)cuda_ceil(p->rows, PAIR * (p->up ? 64 : WG_M));
    const int64_t items = (int64_t)p->plan.max_tiles * row_pairs, most = s->n_sm / PAIR;
    if (items > INT32_MAX / 2) return TOW_EINVAL;
    CUDA_SHARED(codes_kernel<F>, S::BYTES);
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = PAIR;
    attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)(items < most ? items : most) * PAIR);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = S::BYTES;
    c.stream = s->cu;
    c.attrs = attrs;
    c.numAttrs = cuda_early_launches ? 2 : 1;
    cudaLaunchKernelEx(&c, codes_kernel<F>, *p, maps, row_pairs);
    return cuda_done(s, "moe");
}

int moe_product_codes(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->a.fmt) {
    case KERN_W_MXFP4: return launch<KERN_W_MXFP4>(s, p);
    case KERN_W_FP8: return launch<KERN_W_FP8>(s, p);
    default: return TOW_EINVAL;
    }
}
