/* kernels/moe/moe_wide_cuda.cu - many pairs times 4-bit experts by wgmma: the prefill product of
 * sm_90a.
 *
 * Plan     A block goes from tile to tile: up to 256 pairs and 128 weight rows, 64 each of w1 and w3
 *          or 128 of w2. A warpgroup of producers makes stages of 64 k in shared memory: weights,
 *          decoded to bf16 once for all pairs of the tile, and rows of x. Two warpgroups of consumers
 *          multiply, 64 of the weight rows each, with just as many columns as the tile has pairs, in
 *          steps of 32. Producers are ahead, so that a tile's first stages are made while the last
 *          one's results go out.
 * Rows     Of w1 and w3, eight rows alternate, so that a consumer thread has a pair's gate and up.
 * Order    moe_product.cuh's: weights on the M side, the same instructions of 16 k in the same
 *          sequence with the same values in their slots. Stages hold k in the order of slots, to
 *          which x comes dealt.
 */
#include "kernels/moe/moe_product.cuh"

enum {
    GROUP = 128,   /* threads of a warpgroup */
    CONSUMERS = 2, /* groups */
    THREADS = GROUP * (CONSUMERS + 1),
    M = 128,   /* weight rows of a tile */
    N = 256,   /* pairs */
    STEP = 32, /* pairs: their number is rounded up to this */
    ROW = 128, /* bytes of a row in a stage: 64 values, in wgmma's 128-byte swizzle */
    X_BYTES = N * ROW,
    STAGE = X_BYTES + M * ROW,
    S = 4, /* stages in the ring */
    ALIGN = 1024,
    BYTES = S * STAGE + ALIGN,
    OUT_LD = 64 + 8, /* of results on their way out */
};
static_assert(STAGE % ALIGN == 0 && (int)N == (int)MOE_WIDE,
              "a stage begins where the swizzle does");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* acc += a b: m64nWk16 with W columns, both operands by descriptor. acc[4 i ..] is of columns 8 i
 * and on: [0], [1] row g, columns 2c, 2c+1; [2], [3] row g+8 (g = lane / 4, c = lane % 4, 16 rows a
 * warp). */
template <int W>
static __device__ __forceinline__ void multiply(float (&acc)[N / 2], uint64_t a, uint64_t b);

#define OUT8(i)                                                                                    \
    "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]),          \
        "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define OUT16(i) OUT8(i), OUT8(i + 8)
#define OUT32    OUT16(0), OUT16(16)
#define OUT64    OUT32, OUT16(32), OUT16(48)
#define OUT96    OUT64, OUT16(64), OUT16(80)
#define NAMES32  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES64                                                                                    \
    NAMES32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES96                                                                                    \
    NAMES64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES128                                                                                   \
    NAMES96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES160                                                                                   \
    NAMES128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES192                                                                                   \
    NAMES160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES224                                                                                   \
    NAMES192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "  \
             "%110, %111"
#define NAMES256                                                                                   \
    NAMES224 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "    \
             "%125, %126, %127"
#define MULTIPLY(W, A, B, ...)                                                                     \
    template <>                                                                                    \
    __device__ __forceinline__ void multiply<W>(float(&acc)[N / 2], uint64_t a, uint64_t b)        \
    {                                                                                              \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #W "k16.f32.bf16.bf16 {" NAMES##W         \
                     "}, " A ", " B ", 1, 1, 1, 0, 0;"                                             \
                     : __VA_ARGS__                                                                 \
                     : "l"(a), "l"(b));                                                            \
    }
MULTIPLY(32, "%16", "%17", OUT16(0))
MULTIPLY(64, "%32", "%33", OUT32)
MULTIPLY(96, "%48", "%49", OUT32, OUT16(32))
MULTIPLY(128, "%64", "%65", OUT64)
MULTIPLY(160, "%80", "%81", OUT64, OUT16(64))
MULTIPLY(192, "%96", "%97", OUT96)
MULTIPLY(224, "%112", "%113", OUT96, OUT16(96))
MULTIPLY(256, "%128", "%129", OUT96, OUT16(96), OUT16(112))

static __device__ __forceinline__ uint64_t descriptor(const uint8_t *rows)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(rows);
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}
static __device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> static __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

static __device__ __forceinline__ void barrier_init(uint64_t *b, int n)
{
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(b)),
        "r"(n)
        : "memory");
}
static __device__ __forceinline__ void barrier_arrive(uint64_t *b)
{
    asm volatile(
        "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"((uint32_t)__cvta_generic_to_shared(b))
        : "memory");
}
/* Until the phase of this parity is over; a new barrier's phase is 0, the one before it is over. */
static __device__ __forceinline__ void barrier_wait(uint64_t *b, uint32_t parity)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(b);
    uint32_t over;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(over)
                     : "r"(at), "r"(parity)
                     : "memory");
    } while (!over);
}
/* Threads of one consumer group. */
static __device__ __forceinline__ void group_sync(int group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"((int)GROUP) : "memory");
}

/* The ring. A stage's number, counted through all tiles, says slot and phase. */
struct ring {
    uint8_t *at;            /* stage: [N] rows of x, [M] of weights */
    uint64_t *full, *empty; /* [S] */
};
static __device__ __forceinline__ void stage_done(const struct ring &r, uint32_t stage)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* wgmma shall see it */
    barrier_arrive(r.full + stage % S);
}

/* ------------------------------------------------------------------ producers */

/* A producer's share of 128 k of weights: a quarter of each of four rows. */
struct stored {
    uint4 code[4];
    uint32_t scale[4]; /* nvfp4: two of them */
};

template <enum kern_wfmt F>
static __device__ __forceinline__ void
load_stored(const struct moe_matrix &m, const uint8_t *const (&data)[4],
            const uint8_t *const (&scale)[4], int kb, struct stored *out)
{
    const int t = threadIdx.x % 4;
    const int64_t code_at = (int64_t)kb * 64 + t * 16;
    const int64_t scale_at = F == KERN_W_MXFP4 ? (int64_t)kb * 4 + t : (int64_t)kb * 8 + t * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out->code[i] = make_uint4(0, 0, 0, 0);
        out->scale[i] = 0;
        if (code_at < m.row_bytes) out->code[i] = dev_stream16(data[i] + code_at);
        if (scale_at < m.scale_bytes) out->scale[i] = scale[i][scale_at];
        if (F == KERN_W_NVFP4 && scale_at + 1 < m.scale_bytes)
            out->scale[i] |= (uint32_t)scale[i][scale_at + 1] << 8;
    }
}

/* Half h of it to a stage's weights at `to`, this thread's first row and place in the quad. */
template <enum kern_wfmt F>
static __device__ __forceinline__ void decode(const struct stored &w, int h, uint8_t *to)
{
    const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t factor = F == KERN_W_MXFP4
                                    ? dev_mxfp4_factor(w.scale[i])
                                    : dev_nvfp4_factor(h ? w.scale[i] >> 8 : w.scale[i] & 255);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t word = h ? j ? w.code[i].w : w.code[i].z : j ? w.code[i].y : w.code[i].x;
            uint32_t v[4];
            dev_e2m1x8(word, factor, v);
#pragma unroll
            for (int e = 0; e < 4; e++)
                *(uint32_t *)(to + i * 8 * ROW + ((j * 4 + e) ^ g) * 16 + t * 4) = v[e];
        }
    }
}

template <enum kern_wfmt F>
static __device__ __forceinline__ void produce(const struct moe_product &p, const struct ring &r,
                                               int row_tiles)
{
    const int tid = threadIdx.x % GROUP, warp = tid / 32, g = tid % 32 / 4;
    const int row8 = tid / 8, c = tid % 8; /* of x: every sixteenth row from row8 on, piece c */
    const int work = p.plan.max_tiles * row_tiles;
    uint32_t stage = 0;
    for (int at = blockIdx.x; at < work; at += gridDim.x) {
        const struct moe_tile tile = p.plan.tiles[at / row_tiles];
        const int part = at % row_tiles;
        if (tile.n == 0) break;
        uint32_t x[N / 16]; /* in pieces */
        int32_t pair[N / 16], from[N / 16];
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const int n = i * 16 + row8;
            pair[i] = tile.first + (n < tile.n ? n : 0);
            from[i] = p.plan.order[pair[i]]; /* all at once */
        }
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const int64_t row = p.by_pair ? pair[i] : from[i] / p.slots;
            x[i] = (uint32_t)(row * (p.kp / 8)) + c;
        }
        const uint8_t *data[4], *scale[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const struct cuda_weight *w = &(p.up && i % 2 ? p.b : p.a).w[tile.expert];
            int64_t row = part * M + warp * 32 + i * 8 + g;
            if (p.up) row = part * (M / 2) + warp * 16 + i / 2 * 8 + g;
            if (row >= p.rows) row = p.rows - 1; /* not stored */
            data[i] = w->data + row * p.a.row_bytes;
            scale[i] = w->scale + row * p.a.scale_bytes;
        }
        struct stored now, next;
        load_stored<F>(p.a, data, scale, 0, &now);
        for (int kb = 0; kb < p.kp / 128; kb++) {
            if (kb + 1 < p.kp / 128) load_stored<F>(p.a, data, scale, kb + 1, &next);
#pragma unroll
            for (int h = 0; h < 2; h++, stage++) {
                uint8_t *to = r.at + stage % S * STAGE;
                barrier_wait(r.empty + stage % S, (stage / S & 1) ^ 1);
#pragma unroll
                for (int i = 0; i < N / 16; i++) {
                    const int n = i * 16 + row8;
                    if (i % (STEP / 16) == 0 && i * 16 >= tile.n) break;
                    dev_copy16(to + n * ROW + (c ^ n % 8) * 16,
                               p.x0 + (size_t)(x[i] + (kb * 2 + h) * 8) * 8, n < tile.n);
                }
                dev_copy_commit();
                decode<F>(now, h, to + X_BYTES + (warp * 32 + g) * ROW);
                if (stage > 0) {
                    dev_copy_wait<1>();
                    stage_done(r, stage - 1);
                }
            }
            now = next;
        }
    }
    dev_copy_wait<0>();
    if (stage > 0) stage_done(r, stage - 1);
}

/* ------------------------------------------------------------------ consumers */

/* All stages of a tile, for W of its columns; returns the next tile's first. */
template <int W>
static __device__ __forceinline__ uint32_t consume(const struct ring &r, uint32_t stage, int n,
                                                   int group, float (&acc)[N / 2])
{
    const uint32_t end = stage + (uint32_t)n;
    for (uint32_t at = stage; at < end; at++) {
        const uint8_t *from = r.at + at % S * STAGE;
        const uint64_t a = descriptor(from + X_BYTES + group * 64 * ROW), b = descriptor(from);
        barrier_wait(r.full + at % S, at / S & 1);
        __syncwarp(); /* whole warps go on */
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) multiply<W>(acc, a + 2 * i, b + 2 * i);
        wgmma_commit();
        wgmma_wait<1>();
        if (at > stage && threadIdx.x % 32 == 0) barrier_arrive(r.empty + (at - 1) % S);
    }
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(r.empty + (end - 1) % S);
    return end;
}

static __device__ __forceinline__ uint32_t consume_tile(const struct ring &r, uint32_t stage, int n,
                                                        int group, int pairs, float (&acc)[N / 2])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
    switch ((pairs + STEP - 1) / STEP) {
    case 1: stage = consume<32>(r, stage, n, group, acc); break;
    case 2: stage = consume<64>(r, stage, n, group, acc); break;
    case 3: stage = consume<96>(r, stage, n, group, acc); break;
    case 4: stage = consume<128>(r, stage, n, group, acc); break;
    case 5: stage = consume<160>(r, stage, n, group, acc); break;
    case 6: stage = consume<192>(r, stage, n, group, acc); break;
    case 7: stage = consume<224>(r, stage, n, group, acc); break;
    default: stage = consume<256>(r, stage, n, group, acc); break;
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        asm volatile("" : "+f"(acc[i])::"memory"); /* read after the wait */
    return stage;
}

/* Sums to results, 32 pairs at a time through tmp [STEP][OUT_LD], so that stores are whole lines. */
template <bool UP>
static __device__ __forceinline__ void
store(const struct moe_product &p, const struct moe_tile &tile, int part, int group, uint16_t *tmp,
      const float *weight, const float (&acc)[N / 2])
{
    const int tid = threadIdx.x % GROUP, warp = tid / 32, g = tid % 32 / 4, c = tid % 4;
    const int width = UP ? 32 : 64, col0 = (part * CONSUMERS + group) * width;
    const int left = p.rows - col0;
    float post[2];
    bool nan[2];
    int row[2]; /* of this thread's two, from col0 on */
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const struct moe_matrix &a = UP && m ? p.b : p.a;
        const struct cuda_weight *w = &a.w[tile.expert];
        const uint8_t *rows = moe_nan_rows(a, w, p.rows, p.k);
        row[m] = UP ? warp * 8 + g : warp * 16 + m * 8 + g;
        nan[m] = rows && row[m] < left && rows[col0 + row[m]];
        post[m] = DEV_E2M1_POST;
        if (a.fmt == KERN_W_NVFP4) post[m] *= w->scale2;
    }
    uint16_t *out = p.out + (int64_t)tile.first * p.rows + col0;
#pragma unroll
    for (int n0 = 0; n0 < N; n0 += STEP) {
        if (n0 >= tile.n) break;
        group_sync(group); /* tmp has been read, and weight written */
#pragma unroll
        for (int i = 0; i < STEP / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float *v = acc + (n0 / 8 + i) * 4;
                const float a = kern_bf16_round(nan[0] ? NAN : v[e] * post[0]);
                const float b = kern_bf16_round(nan[1] ? NAN : v[2 + e] * post[1]);
                const int n = i * 8 + c * 2 + e;
                if (UP) {
                    tmp[n * OUT_LD + row[0]] =
                        kern_bf16_encode(dev_gate(a, b, p.limit) * weight[n0 + n]);
                } else {
                    tmp[n * OUT_LD + row[0]] = kern_bf16_encode(a);
                    tmp[n * OUT_LD + row[1]] = kern_bf16_encode(b);
                }
            }
        group_sync(group);
#pragma unroll 1
        for (int i = tid; i < STEP * (width / 8); i += GROUP) {
            const int n = i / (width / 8), col = i % (width / 8) * 8;
            if (n0 + n < tile.n && col < left)
                *(uint4 *)(out + (int64_t)(n0 + n) * p.rows + col) =
                    *(const uint4 *)(tmp + n * OUT_LD + col);
        }
    }
}

template <enum kern_wfmt F>
static __global__ void __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ struct moe_product p, int row_tiles)
{
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ uint64_t full[S], empty[S];
    __shared__ __align__(16) uint16_t tmp[CONSUMERS][STEP * OUT_LD];
    __shared__ float weight[CONSUMERS][N];
    if (threadIdx.x == 0) {
        for (int i = 0; i < S; i++) {
            barrier_init(full + i, GROUP);
            barrier_init(empty + i, CONSUMERS * GROUP / 32);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    struct ring r = {shared, full, empty};
    r.at += (ALIGN - (uint32_t)__cvta_generic_to_shared(shared) % ALIGN) % ALIGN;
    const int group = threadIdx.x / GROUP, tid = threadIdx.x % GROUP;
    if (group == CONSUMERS) {
        produce<F>(p, r, row_tiles);
        return;
    }
    const int work = p.plan.max_tiles * row_tiles;
    uint32_t stage = 0;
    for (int at = blockIdx.x; at < work; at += gridDim.x) {
        const struct moe_tile tile = p.plan.tiles[at / row_tiles];
        if (tile.n == 0) break;
        float acc[N / 2];
        group_sync(group); /* weight has been read */
        for (int i = tid; i < tile.n && p.up; i += GROUP)
            weight[group][i] = p.weights[p.plan.order[tile.first + i]];
        stage = consume_tile(r, stage, p.kp / 64, group, tile.n, acc);
        if (p.up)
            store<true>(p, tile, at % row_tiles, group, tmp[group], weight[group], acc);
        else
            store<false>(p, tile, at % row_tiles, group, tmp[group], weight[group], acc);
    }
}
#else
template <enum kern_wfmt F>
static __global__ void wide_kernel(const __grid_constant__ struct moe_product p, int row_tiles)
{
}
#endif

template <enum kern_wfmt F> static int launch(struct kern_stream *s, const struct moe_product *p)
{
    const int row_tiles = (int)cuda_ceil(p->rows, p->up ? M / 2 : M);
    const int64_t work = (int64_t)p->plan.max_tiles * row_tiles;
    if (work > INT32_MAX / 2) return TOW_EINVAL;
    CUDA_SHARED(wide_kernel<F>, BYTES);
    wide_kernel<F>
        <<<(unsigned)(work < s->n_sm ? work : s->n_sm), THREADS, BYTES, s->cu>>>(*p, row_tiles);
    return cuda_done(s, "moe");
}

int moe_product_wide(struct kern_stream *s, const struct moe_product *p)
{
    switch (p->a.fmt) {
    case KERN_W_MXFP4: return launch<KERN_W_MXFP4>(s, p);
    case KERN_W_NVFP4: return launch<KERN_W_NVFP4>(s, p);
    default: return TOW_EINVAL;
    }
}
