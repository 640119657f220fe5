/* kvpack/pages_cuda.cu - pages packed, unpacked and digested on the device (kernels/pages.h).
 *
 * A warp takes four blocks of 1024 bytes: two 16-byte loads a lane and block, all eight before the
 * first store. The sums of a block are over its 16 stripes, and a lane holds two words of stripes s
 * and s + 8: it adds what both give to its two numbers, and three shuffles add those of the lanes
 * with the same numbers. 64 bytes a block go to scratch. A second kernel runs the chain of blocks,
 * eight lanes a page, loads sixteen blocks ahead of it, and folds the end.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/kvpack/digest.h"
extern "C" {
#include "kernels/pages.h"
}

enum {
    MAX_IDS = 128, /* pages of a launch: their ids travel as its argument */
    WARPS = 8,
    EACH = 4, /* blocks of a warp */
    AHEAD = 16
};

struct batch {
    uint8_t *pool, *packed;
    uint64_t *sums, *digests;
    int64_t page_bytes;
    int32_t n, n_blocks;
    bool unpack;
    uint32_t ids[MAX_IDS];
};

static __device__ __forceinline__ uint64_t word_of(uint32_t lo, uint32_t hi)
{
    return (uint64_t)hi << 32 | lo;
}

/* What the words of a lane, numbers i and i + 1, give to these. */
static __device__ __forceinline__ void add_words(const uint4 &v, uint64_t key0, uint64_t key1,
                                                 uint64_t *n0, uint64_t *n1)
{
    const uint64_t a = word_of(v.x, v.y), b = word_of(v.z, v.w);
    *n0 += digest_product(a, key0) + b;
    *n1 += digest_product(b, key1) + a;
}

template <bool MOVE, bool DIGEST>
static __global__ void __launch_bounds__(32 * WARPS) move_kernel(const __grid_constant__ batch b)
{
    const int lane = threadIdx.x % 32, stripe = lane / 4, i = lane % 4 * 2;
    const int32_t first = (int32_t)(blockIdx.x * WARPS + threadIdx.x / 32) * EACH;
    const int32_t page = (int32_t)blockIdx.y;
    uint8_t *in_pool = b.pool + b.ids[page] * b.page_bytes;
    uint8_t *in_pack = MOVE ? b.packed + page * b.page_bytes : NULL;
    const uint8_t *from = MOVE && b.unpack ? in_pack : in_pool;
    uint8_t *to = MOVE && b.unpack ? in_pool : in_pack;
    uint4 v[EACH][2];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (first + k >= b.n_blocks) break;
        const uint4 *at = (const uint4 *)(from + (int64_t)(first + k) * DIGEST_BLOCK) + lane;
        v[k][0] = __ldcs(at);
        v[k][1] = __ldcs(at + 32);
    }
    if (MOVE) {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            if (first + k >= b.n_blocks) break;
            uint4 *at = (uint4 *)(to + (int64_t)(first + k) * DIGEST_BLOCK) + lane;
            __stcs(at, v[k][0]);
            __stcs(at + 32, v[k][1]);
        }
    }
    if (!DIGEST) return;
    const uint64_t lo0 = digest_secret[stripe + i], lo1 = digest_secret[stripe + i + 1];
    const uint64_t hi0 = digest_secret[stripe + 8 + i], hi1 = digest_secret[stripe + 8 + i + 1];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (first + k >= b.n_blocks) break; /* the same for the whole warp */
        const bool own_keys = first + k == b.n_blocks - 1 && stripe == 7;
        uint64_t n0 = 0, n1 = 0;
        add_words(v[k][0], lo0, lo1, &n0, &n1);
        add_words(v[k][1], own_keys ? digest_last_keys[i] : hi0,
                  own_keys ? digest_last_keys[i + 1] : hi1, &n0, &n1);
        for (int over = 4; over < 32; over *= 2) {
            n0 += __shfl_xor_sync(~0u, n0, over);
            n1 += __shfl_xor_sync(~0u, n1, over);
        }
        if (lane < 4) {
            const int64_t block = (int64_t)page * b.n_blocks + first + k;
            ((ulonglong2 *)b.sums)[block * 4 + lane] = make_ulonglong2(n0, n1);
        }
    }
}

/* Eight lanes a page, one number each; four pages a warp. */
static __global__ void __launch_bounds__(32) chain_kernel(const __grid_constant__ batch b)
{
    const int i = threadIdx.x % DIGEST_NUMBERS;
    const int32_t asked = (int32_t)(blockIdx.x * 4 + threadIdx.x / DIGEST_NUMBERS);
    const int32_t page = asked < b.n ? asked : b.n - 1; /* twice, so that all lanes shuffle */
    const uint64_t *sums = b.sums + (int64_t)page * b.n_blocks * DIGEST_NUMBERS + i;
    const uint64_t key = digest_secret[16 + i];
    uint64_t number = digest_start[i], next[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
        next[k] = k < b.n_blocks ? sums[(int64_t)k * DIGEST_NUMBERS] : 0;
    for (int32_t at = 0; at < b.n_blocks; at += AHEAD) {
        uint64_t now[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            now[k] = next[k];
            const int32_t ahead = at + AHEAD + k;
            next[k] = ahead < b.n_blocks ? sums[(int64_t)ahead * DIGEST_NUMBERS] : 0;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (at + k >= b.n_blocks) break;
            if (at + k > 0) number = digest_scramble(number, key);
            number += now[k];
        }
    }
    const uint64_t mine = number ^ digest_merge_keys[i];
    uint64_t sum = digest_fold(mine, __shfl_xor_sync(~0u, mine, 1));
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 4);
    if (i == 0) b.digests[b.ids[page]] = digest_end(sum, b.page_bytes);
}

static void launch(struct kern_stream *s, const batch &b)
{
    const dim3 grid((unsigned)cuda_ceil(b.n_blocks, WARPS * EACH), (unsigned)b.n);
    if (!b.digests)
        move_kernel<true, false><<<grid, 32 * WARPS, 0, s->cu>>>(b);
    else if (b.packed)
        move_kernel<true, true><<<grid, 32 * WARPS, 0, s->cu>>>(b);
    else
        move_kernel<false, true><<<grid, 32 * WARPS, 0, s->cu>>>(b);
    if (b.digests) chain_kernel<<<(unsigned)cuda_ceil(b.n, 4), 32, 0, s->cu>>>(b);
}

extern "C" int kern_pages_cuda(struct kern_stream *s, const struct kern_pages *p)
{
    batch b = {};
    if (p->page_bytes / DIGEST_BLOCK > INT32_MAX) return TOW_EINVAL;
    b.pool = p->pool;
    b.page_bytes = p->page_bytes;
    b.n_blocks = (int32_t)(p->page_bytes / DIGEST_BLOCK);
    b.unpack = p->unpack;
    b.digests = p->digests;
    if (p->digests) {
        /* Always for the most pages: after the first call it never grows. */
        b.sums =
            (uint64_t *)cuda_scratch(s, CUDA_SLOT_OP, (size_t)MAX_IDS * b.n_blocks * DIGEST_STRIPE);
        if (!b.sums) return cuda_done(s, "pages");
    }
    for (int32_t at = 0; at < p->n; at += MAX_IDS) {
        b.n = p->n - at < MAX_IDS ? p->n - at : MAX_IDS;
        b.packed = p->packed ? p->packed + at * p->page_bytes : NULL;
        for (int32_t i = 0; i < b.n; i++) b.ids[i] = p->ids[at + i];
        launch(s, b);
    }
    return cuda_done(s, "pages");
}
