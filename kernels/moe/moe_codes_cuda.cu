/* kernels/moe/moe_codes_cuda.cu - many pairs times mxfp4 and fp8 experts by their codes: the
 * prefill product of the fp8 kind, on sm_90a. Bits, images and epilogue are moe_wgmma.cuh's.
 *
 * Plan     Two warpgroups of consumers make operands of 64 weight rows each in registers, multiply
 *          and add up. Of another warpgroup a thread asks the copy engine for x and weights, a warp
 *          looks things up, and of fp8 one finds scales.
 * Cluster  Two blocks with neighbouring weight rows of an expert are a cluster: each fetches half
 *          of x for both.
 * Turns    A stage's columns are two parts. While one warpgroup adds a part up, the other one's is
 *          multiplied; additions are in the matrix unit's way, each about a cycle, and so is what
 *          else f32's pipe executes. So mxfp4 has chains of two stages, with half the additions;
 *          then shared memory's pipe binds, if operands are made by other warps and go through it.
 *          Not so, slower at 8192 rows: four parts, two of them under way (twice the instructions
 *          that start them).
 * Ahead    Shared memory answers after more than 100 cycles while wgmma reads there: the next
 *          chain's codes are fetched before the last part is done, and its first stage's operands
 *          are made while the second stage is multiplied.
 */
#include "kernels/moe/moe_wgmma.cuh"

enum {
    PAIR = 2, /* blocks of a cluster */
    COLUMNS = MOE_CODES,
    CONSUMERS = WG_CONSUMERS * WG / 32, /* warps */
};

template <enum kern_wfmt F> struct codes_shape {
    enum {
        MXFP4 = F == KERN_W_MXFP4,
        CODES = moe_format<F>::CODES,
        X_BYTES = COLUMNS * 128,
        W_AT = X_BYTES + WG_M * CODES, /* fp8: scales of its rows' blocks */
        STAGE = (W_AT + (MXFP4 ? 0 : 16) + 1023) / 1024 * 1024,
        CHAIN = wg_chain<F>::STAGES,
        S = MXFP4 ? 6 : 4,
        /* mxfp4: scales come by 16 bytes, for this many stages, in room of the first one's chain. */
        AHEAD = 4,
        SCALE_BYTES = MXFP4 ? WG_M * 16 : 0,
        BYTES = S * STAGE + S / CHAIN * SCALE_BYTES + 1024,
        /* Registers of a thread that multiplies, fetches: 504 of three. */
        THREADS = WG * (WG_CONSUMERS + 1),
        MULTIPLIES = 232,
        FETCHES = 40,
    };
    static_assert((int)S % CHAIN == 0 && (int)AHEAD % CHAIN == 0,
                  "slots of a chain are neighbours");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using tell = struct wg_tell<true, COLUMNS>;

/* ------------------------------------------------------------------ producers */

/* x, which both blocks of the cluster get, and weights. */
template <enum kern_wfmt F>
static __device__ __forceinline__ void fetch(const struct moe_product &p,
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
            const bool scales = S::MXFP4 && kb % S::AHEAD == 0;
            bar_wait(r.empty + r.slot, r.phase ^ 1);
            bar_expect(full, eights * 1024 + WG_M * S::CODES + (scales ? (int)S::SCALE_BYTES : 0));
            if (bytes > 0)
                bulk_load_to(to + first * 128,
                             p.image + ((int64_t)kb * p.plan.room + tile.first + first) * 128,
                             bytes, full, (1 << PAIR) - 1);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = p.up ? part * 64 : part * WG_M + i * 64;
                stack_load(to + S::X_BYTES + i * 64 * S::CODES, &maps.codes[p.up ? i : 0], full,
                           kb * S::CODES, row, tile.expert);
                if (scales)
                    stack_load(r.at + S::S * S::STAGE + r.slot / S::CHAIN * S::SCALE_BYTES +
                                   i * 64 * 16,
                               &maps.scales[p.up ? i : 0], full, kb * 4, row, tile.expert);
            }
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

/* What a consumer thread knows of its two rows in a tile. */
template <enum kern_wfmt F> struct my_rows {
    int at[2];        /* in a stage */
    int scales_at[2]; /* mxfp4 */
    uint2 table[2];   /* mxfp4: see dev_mxfp4_table() */
};

/* A chain's weights as they are in shared memory, and what is known of their scales. */
template <enum kern_wfmt F> struct fetched {
    uint4 v[codes_shape<F>::CHAIN][2][128 / codes_shape<F>::CODES == 2 ? 1 : 2];
    uint32_t scales[2]; /* mxfp4: of the next stages, lowest byte first */
    float w[2];         /* fp8 */
};
template <enum kern_wfmt F>
static __device__ __forceinline__ void load(const struct wg_ring &r, const struct my_rows<F> &rows,
                                            int kb, struct fetched<F> *f)
{
    using S = codes_shape<F>;
    const uint8_t *stage = r.at + r.slot * S::STAGE;
    if constexpr (F == KERN_W_MXFP4) {
#pragma unroll
        for (int c = 0; c < S::CHAIN; c++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                f->v[c][m][0] = *(const uint4 *)(stage + c * S::STAGE + rows.at[m]);
        if (kb % S::AHEAD == 0) {
            const uint8_t *scales = r.at + S::S * S::STAGE + r.slot / S::CHAIN * S::SCALE_BYTES;
            const uint32_t c = threadIdx.x % 4, at = c | (c + 4) << 4;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint4 s = *(const uint4 *)(scales + rows.scales_at[m]);
                f->scales[m] =
                    __byte_perm(__byte_perm(s.x, s.y, at), __byte_perm(s.z, s.w, at), 0x5410);
            }
        }
    } else { /* in the copy engine's swizzle */
        const float2 two = *(const float2 *)(stage + S::W_AT);
        f->w[0] = two.x, f->w[1] = two.y;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            f->v[0][m][0] = *(const uint4 *)(stage + rows.at[m]);
            f->v[0][m][1] = *(const uint4 *)(stage + (rows.at[m] ^ 16));
        }
    }
}
/* Operands of stage c of them. */
template <enum kern_wfmt F>
static __device__ __forceinline__ void convert(const struct my_rows<F> &rows, int c,
                                               struct fetched<F> *f, uint32_t (&a)[4][4])
{
#pragma unroll
    for (int m = 0; m < 2; m++) {
        if constexpr (F == KERN_W_MXFP4) {
            const uint2 table = dev_mxfp4_table_at(rows.table[m], f->scales[m] & 255);
            f->scales[m] >>= 8;
#pragma unroll
            for (int i = 0; i < 4; i++)
                dev_e2m1x8_e4m3(wg_word(f->v[c][m][0], i), table, &a[i][m], &a[i][2 + m]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i][m] = wg_word(f->v[c][m][i / 2], i % 2 * 2),
                a[i][2 + m] = wg_word(f->v[c][m][i / 2], i % 2 * 2 + 1);
        }
    }
}
/* What is loaded is not touched before this. */
template <enum kern_wfmt F> static __device__ __forceinline__ void pin(int c, struct fetched<F> *f)
{
#pragma unroll
    for (int m = 0; m < 2; m++) {
        uint4 &v = f->v[c][m][0];
        asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
    }
}

/* All stages of two times W columns, a chain of them at a time. */
template <enum kern_wfmt F, int W>
static __device__ __forceinline__ void multiply(int n_kb, struct wg_ring *r,
                                                const struct my_rows<F> &rows,
                                                float (&total)[WG_SUMS(COLUMNS)])
{
    using S = codes_shape<F>;
    enum { CHAIN = S::CHAIN };
    const uint32_t empty_there = dev_shared_of(r->empty, cluster_rank() ^ 1);
    uint32_t a[CHAIN][4][4];
    float sum[W / 2];
    struct fetched<F> f;
    f.w[0] = f.w[1] = 1.0f;
#pragma unroll
    for (int c = 0; c < CHAIN; c++) bar_wait(r->full + r->slot + c, r->phase);
    __syncwarp(); /* whole warps go on */
    load<F>(*r, rows, 0, &f);
#pragma unroll
    for (int c = 0; c < CHAIN; c++) convert<F>(rows, c, &f, a[c]);
    uint64_t b = wgmma_rows(r->at + r->slot * S::STAGE);
    for (int kb = 0; kb < n_kb; kb += CHAIN) {
        const bool more = kb + CHAIN < n_kb;
        uint64_t *empty = r->empty + r->slot;
        const uint32_t there = empty_there + r->slot * 8;
        const float w[2] = {f.w[0], f.w[1]};
        r->slot += CHAIN;
        if (r->slot == S::S) r->slot = 0, r->phase ^= 1;
#pragma unroll
        for (int c = 0; c < CHAIN; c++) wg_times<W>(a[c], b + c * (S::STAGE / 16), c == 0, sum);
        wgmma_wait<0>();
        wgmma_pin(sum);
        __syncwarp();
        wg_add<F, W>(sum, w, 0, total);
#pragma unroll
        for (int c = 0; c < CHAIN; c++)
            wg_times<W>(a[c], b + W * 8 + c * (S::STAGE / 16), c == 0, sum);
        b = wgmma_rows(r->at + r->slot * S::STAGE);
        if (more) {
#pragma unroll
            for (int c = 0; c < CHAIN; c++) bar_wait(r->full + r->slot + c, r->phase);
            __syncwarp();
            /* Shared memory answers late while wgmma reads there. */
            load<F>(*r, rows, kb + CHAIN, &f);
        }
        if (CHAIN == 2 && more) { /* while the second stage is multiplied */
            wgmma_wait<1>();
            pin<F>(0, &f);
            convert<F>(rows, 0, &f, a[0]);
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        __syncwarp();
#pragma unroll
        for (int c = 0; c < CHAIN; c++) release(empty + c, there + c * 8);
        if (more) {
            pin<F>(CHAIN - 1, &f);
            convert<F>(rows, CHAIN - 1, &f, a[CHAIN - 1]);
        }
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
        int place[2];
        struct my_rows<F> rows;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            place[m] = wg_place<true>(p.up, threadIdx.x / 32, m);
            const int piece = F == KERN_W_MXFP4 ? lane % 4 : lane % 4 * 2 ^ place[m] % 8;
            rows.at[m] = codes_shape<F>::X_BYTES + place[m] * codes_shape<F>::CODES + piece * 16;
            rows.scales_at[m] = place[m] * 16;
            if (F == KERN_W_MXFP4) rows.table[m] = dev_mxfp4_table(now.top[place[m]]);
        }
        float total[WG_SUMS(COLUMNS)];
#pragma unroll
        for (int s = 0; s < WG_SUMS(COLUMNS); s++) total[s] = 0.0f;
        switch ((n + 15) / 16) {
#define MULTIPLY(i)                                                                                \
    case i: multiply<F, (i)*8>(n_kb, &r, rows, total); break;
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
static __global__ void __launch_bounds__(codes_shape<F>::THREADS, 1)
    codes_kernel(const __grid_constant__ struct moe_product p,
                 const __grid_constant__ struct wg_maps maps, int row_pairs)
{
    using S = codes_shape<F>;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ uint64_t full[S::S], empty[S::S], there[2], read[2];
    __shared__ __align__(16) tell told[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::S; i++) {
            bar_init(full + i, 1 + (S::MXFP4 ? 0 : 32));
            bar_init(empty + i, CONSUMERS * (32 + 1));
        }
        for (int i = 0; i < 2; i++) {
            bar_init(there + i, 32);
            bar_init(read + i, CONSUMERS * 32);
        }
        bar_init_done();
    }
    cluster_meet();
    cuda_await();
    cuda_hurry();
    struct wg_ring r = {shared, full, empty, 0, 0};
    r.at += (1024 - dev_shared(shared) % 1024) % 1024;
    const struct wg_told t = {there, read, 0, 0};
    const struct wg_items items =
        wg_turns((int)blockIdx.x / PAIR, (int)gridDim.x / PAIR, p.plan.max_tiles * row_pairs,
                 row_pairs, PAIR, cluster_rank());
    const int group = wg_uniform((int)threadIdx.x / WG);
    if (group < WG_CONSUMERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)S::MULTIPLIES));
        consume<F>(p, r, t, told, group);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)S::FETCHES));
        const int warp = wg_uniform((int)threadIdx.x / 32) - CONSUMERS;
        if (warp == 0 && threadIdx.x % 32 == 0) fetch<F>(p, maps, r, items);
        if (warp == 1) wg_look_up<F, true, COLUMNS>(p, t, told, items);
        if constexpr (!S::MXFP4)
            if (warp == 2) find_scales(p, r, items);
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
    if (S::MXFP4 && p->kp % (128 * S::AHEAD)) return TOW_EINVAL; /* kern_dev_place's part */
    if (!wg_describe(&maps, p, S::CODES, S::MXFP4)) return TOW_EDEVICE;
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
    c.blockDim = dim3(S::THREADS);
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
