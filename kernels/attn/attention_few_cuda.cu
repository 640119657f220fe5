/* kernels/attn/attention_few_cuda.cu - attention where rows are too few to fill an sm_90a.
 *
 * A cluster of eight CTAs takes a row and 16 heads, and eight tiles of keys at a time, each CTA one
 * of them: it widens the tile, makes its scores over the whole width, and tells the others its
 * maxima. With those each knows the running maximum, makes its tile's weights and hands them to
 * all. Then a CTA sums 64 of the 512 columns over the eight tiles in their order, from its
 * neighbours' tiles, where its columns lie together. The next tiles' codes are on their way
 * meanwhile.
 *
 * Order    of all sums, and what is rounded where, are those of attention_wgmma_cuda.cu: same bits.
 *          A chain of mma.sync has the bits of wgmma's where keys and columns have the same slots.
 * Bound    Latency: three reads that wait for one another, chains of 32 mma for scores and for
 *          columns, two meetings of the cluster, per eight tiles.
 */
#include "kernels/attn/key_tile.cuh"
#include "kernels/attn/softmax.cuh"
#include "kernels/cuda/tma.cuh"

enum {
    HEADS = 16,
    CLUSTER = 8, /* KEY_WIDTH / 64: a block of columns each; the most that every device grants */
    WARPS = 8,   /* eight keys, then eight columns each */
    THREADS = WARPS * 32,
};

struct shared {
    uint8_t tile[KEY_TILE];
    uint8_t v[CLUSTER][KEY_BLOCK]; /* this CTA's columns of everybody's tile */
    uint8_t q[KEY_WIDTH / 64][HEADS * 128];
    uint8_t p[CLUSTER][HEADS * 128];    /* weights of everybody's tile: 16 heads x 64 keys */
    float reference[2][CLUSTER][HEADS]; /* maxima of everybody's tile, by the turn's parity */
    float sum[CLUSTER][HEADS];
    float top[WARPS][HEADS];
    struct key_source src[KEY_ROWS];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ void remote_word(uint32_t to, uint32_t v)
{
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
static __device__ __forceinline__ uint4 remote_piece(uint32_t from)
{
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

/* A lane's quarter of a key on its way, where it is stored in e4m3. */
struct fetched {
    uint4 codes[KEY_CODES / 64];
    uint2 scales;
};
static __device__ __forceinline__ void fetch(const struct key_source &s, struct fetched *r)
{
    if (!s.scales) return;
    const uint4 *from = (const uint4 *)s.row + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < KEY_CODES / 64; i++) r->codes[i] = __ldg(from + 4 * i);
    if (threadIdx.x % 4 == 0) key_prefetch(s.row + KEY_CODES);
    r->scales = __ldg((const uint2 *)s.scales);
}
static __device__ __forceinline__ void store_key(const struct key_source &s,
                                                 const struct fetched &r, uint8_t *tile, int key)
{
    const struct key_spot at(tile, key, threadIdx.x % 32);
    if (!s.scales) {
        at.plain(s.row);
        return;
    }
    at.rest(s.row);
    uint32_t odds = key_odd::add(r.scales);
#pragma unroll
    for (int i = 0; i < KEY_CODES / 64; i++) {
        odds = key_odd::add(odds, r.codes[i]);
        at.codes(i, r.codes[i], r.scales);
    }
    if (key_odd::any(odds)) at.odd_codes(s);
}

static __device__ __forceinline__ struct key_found look_up(const struct attn_job &j,
                                                           const struct attn_keys &ks, int32_t i)
{
    const struct key_looked a = key_look(j, ks, i, ks.n);
    uint32_t e = (uint32_t)a.row;
    if (a.n < 0 && ks.selected) e = (uint32_t)__ldg(ks.selected + a.row);
    return key_find(j, a, e);
}
static __device__ __forceinline__ uint32_t page_of(const struct key_found &f)
{
    return f.n < 0 ? __ldg((const uint32_t *)f.at) : 0;
}

/* Scores of eight keys: one chain over the width. */
static __device__ __forceinline__ void scores(const struct shared *sh, int warp, int lane,
                                              float (&s)[4])
{
    const int key = warp * 8 + lane % 8;
    s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll 8
    for (int k = 0; k < KEY_WIDTH / 16; k += 2) {
        uint32_t b[4];
        dev_ldmatrix4(b, sh->tile + k / 4 * KEY_BLOCK + key * 128 +
                             ((k % 4 * 2 + lane / 8 ^ key % 8) << 4));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t a[4];
            dev_ldmatrix4(a, sh->q[k / 4] + lane % 16 * 128 +
                                 ((k % 4 * 2 + 2 * i + lane / 16 ^ lane % 8) << 4));
            dev_mma(s, a, b + 2 * i);
        }
    }
}
/* o += the weights of a tile times eight of this CTA's columns. */
static __device__ __forceinline__ void add(const struct shared *sh, int i, int warp, int lane,
                                           float (&o)[4])
{
#pragma unroll
    for (int k = 0; k < KEY_ROWS / 16; k += 2) {
        uint32_t b[4];
        dev_ldmatrix4_trans(b, sh->v[i] + (k * 16 + lane) * 128 + ((warp ^ lane % 8) << 4));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t a[4];
            dev_ldmatrix4(a,
                          sh->p[i] + lane % 16 * 128 + (((k + n) * 2 + lane / 16 ^ lane % 8) << 4));
            dev_mma(o, a, b + 2 * n);
        }
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    few_kernel(const __grid_constant__ struct attn_job j, int32_t groups)
{
    extern __shared__ uint8_t raw[];
    struct shared *sh = (struct shared *)(raw + (-dev_shared(raw) & 127u));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = cluster_rank();
    const int32_t item = blockIdx.x / CLUSTER, t = item / groups, h0 = item % groups * HEADS;
    const int g = lane / 4, c = lane % 4, key = threadIdx.x / 4;
    const float factor = attn_factor(j.scale);
    struct attn_keys ks;
    if (!attn_keys_of(j, t, &ks)) return; /* the whole cluster */
    const int32_t tiles = (ks.n + KEY_ROWS - 1) / KEY_ROWS;

    for (int i = threadIdx.x; i < HEADS * (KEY_WIDTH / 8); i += THREADS) {
        const int h = i / (KEY_WIDTH / 8), piece = i % (KEY_WIDTH / 8);
        const bool there = h0 + h < j.H;
        dev_copy16(sh->q[piece / 8] + h * 128 + ((piece ^ h) % 8 << 4),
                   (const uint8_t *)j.q +
                       (((int64_t)t * j.H + h0 + (there ? h : 0)) * KEY_WIDTH + piece * 8) * 2,
                   there);
    }
    dev_copy_commit();
    if (threadIdx.x < KEY_ROWS) {
        const struct key_found f = look_up(j, ks, rank * KEY_ROWS + (int32_t)threadIdx.x);
        sh->src[threadIdx.x] = key_source_of(j, f, page_of(f));
    }
    __syncthreads();
    struct key_source src = sh->src[key];
    struct fetched bytes;
    fetch(src, &bytes);

    struct attn_chain chain[2] = {{ATTN_LEAST, 0}, {ATTN_LEAST, 0}}; /* heads g, g + 8 */
    float o[4] = {};
    for (int32_t i0 = 0; i0 < tiles; i0 += CLUSTER) {
        const int32_t mine = i0 + rank, next = (mine + CLUSTER) * KEY_ROWS;
        const int parity = i0 / CLUSTER % 2;
        const int some = tiles - i0 < CLUSTER ? tiles - i0 : CLUSTER; /* tiles of this turn */
        float s[4];
        if (mine < tiles) store_key(src, bytes, sh->tile, key);
        dev_copy_commit();
        dev_copy_wait<0>();
        struct key_found found = {};
        uint32_t page = 0;
        if (threadIdx.x < KEY_ROWS) {
            found = look_up(j, ks, next + (int32_t)threadIdx.x);
            page = page_of(found);
        }
        __syncthreads();
        if (mine < tiles) {
            scores(sh, warp, lane, s);
            float top[2];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[e] *= factor;
                if (mine * KEY_ROWS + warp * 8 + 2 * c + e % 2 >= ks.n)
                    s[e] = -kern_float(0x7f800000u);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                top[r] = fmaxf(fmaxf(-kern_float(0x7f800000u), s[2 * r]), s[2 * r + 1]);
                top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
                top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
                if (c == 0) sh->top[warp][g + 8 * r] = top[r];
            }
        }
        if (threadIdx.x < KEY_ROWS) sh->src[threadIdx.x] = key_source_of(j, found, page);
        __syncthreads();
        if (mine < tiles && threadIdx.x < HEADS * CLUSTER) { /* a head's maximum to a neighbour */
            const int h = threadIdx.x % HEADS, to = threadIdx.x / HEADS;
            float top = sh->top[0][h];
#pragma unroll
            for (int w = 1; w < WARPS; w++) top = fmaxf(top, sh->top[w][h]);
            remote_word(dev_shared_of(&sh->reference[parity][rank][h], to),
                        kern_bits(attn_reference(top)));
        }
        src = sh->src[key];
        if (mine + CLUSTER < tiles) fetch(src, &bytes);
        cluster_meet(); /* tiles and maxima are there */

        if (mine < tiles) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int h = g + 8 * r;
                float m = chain[r].m;
                for (int i = 0; i <= rank; i++) m = attn_raised(m, sh->reference[parity][i][h]);
                const float own = sh->reference[parity][rank][h];
                const uint32_t two =
                    attn_scaled(attn_weights(s[2 * r], s[2 * r + 1], own), attn_power(own - m));
                const uint32_t *to =
                    (const uint32_t *)(sh->p[rank] + h * 128 + ((warp ^ h % 8) << 4)) + c;
#pragma unroll
                for (int i = 0; i < CLUSTER; i++) remote_word(dev_shared_of(to, i), two);
            }
        }
        /* All on their way at once: a neighbour is half a thousand cycles away. */
        uint4 pieces[CLUSTER][KEY_BLOCK / 16 / THREADS];
#pragma unroll
        for (int i = 0; i < CLUSTER; i++)
#pragma unroll
            for (int k = 0; k < KEY_BLOCK / 16 / THREADS; k++)
                if (i < some)
                    pieces[i][k] = remote_piece(dev_shared_of(
                        sh->tile + rank * KEY_BLOCK + (k * THREADS + threadIdx.x) * 16, i));
#pragma unroll
        for (int i = 0; i < CLUSTER; i++)
#pragma unroll
            for (int k = 0; k < KEY_BLOCK / 16 / THREADS; k++)
                if (i < some)
                    *(uint4 *)(sh->v[i] + (k * THREADS + threadIdx.x) * 16) = pieces[i][k];
        cluster_meet(); /* weights are there, tiles have been read */

        if (threadIdx.x < HEADS * 4) { /* sums of weights: by four threads each, then a butterfly */
            const int h = threadIdx.x / 4;
            for (int i = 0; i < some; i++) {
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const uint32_t two =
                        ((const uint32_t *)(sh->p[i] + h * 128 + ((n ^ h % 8) << 4)))[c];
                    sum += kern_float(two << 16);
                    sum += kern_float(two & 0xffff0000u);
                }
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (c == 0) sh->sum[i][h] = sum;
            }
        }
        __syncthreads();
        for (int i = 0; i < some; i++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float m = attn_raised(chain[r].m, sh->reference[parity][i][g + 8 * r]);
                const float f = attn_power(chain[r].m - m);
                chain[r].sum = fmaf(chain[r].sum, f, sh->sum[i][g + 8 * r]);
                chain[r].m = m;
                o[2 * r] *= f;
                o[2 * r + 1] *= f;
            }
            add(sh, i, warp, lane, o);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t h = h0 + g + 8 * r;
        if (h >= j.H) continue;
        const float inverse = attn_inverse(chain[r], j.sink[h]);
        *(uint32_t *)((uint16_t *)j.o + ((int64_t)t * j.H + h) * KEY_WIDTH + rank * 64 + warp * 8 +
                      c * 2) = attn_bf16x2(o[2 * r] * inverse, o[2 * r + 1] * inverse);
    }
}

#else
static __global__ void few_kernel(const __grid_constant__ struct attn_job, int32_t) {}
#endif

void attention_few(struct kern_stream *s, const struct attn_job *j)
{
    const int bytes = (int)sizeof(struct shared) + 128;
    const int32_t groups = (int32_t)cuda_ceil(j->H, HEADS);
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = CLUSTER;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)(j->T * groups * CLUSTER));
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = (size_t)bytes;
    c.stream = s->cu;
    c.attrs = &cluster;
    c.numAttrs = 1;
    CUDA_SHARED(few_kernel, bytes);
    cudaLaunchKernelEx(&c, few_kernel, *j, groups);
}
