/* kernels/attn/topk.cuh - the k-th highest of many floats, exactly, by one block of threads.
 *
 * Floats become integers of the same order. Of a row in device memory three rounds count digits of
 * 11, 11 and 10 bits in shared memory, each among those that agree in the digits before. Of a few
 * thousand keys in shared memory the threshold is found by digits of 8 bits. Counts are exact and
 * so is the result, whatever the values and however many are equal.
 */
#ifndef KERN_ATTN_TOPK_CUH
#define KERN_ATTN_TOPK_CUH

#include "kernels/cuda/numeric.cuh"

enum {
    TOPK_THREADS = 1024,
    TOPK_BINS = 2048,
    TOPK_LOADS = 4,             /* of four scores, under way at a time: a row is read by one CTA */
    TOPK_EACH = 4 * TOPK_LOADS, /* scores of a thread in a run */
};

struct topk_shared {
    uint32_t count[TOPK_BINS];
    uint32_t warp[2][32];
    uint32_t digit;
    int32_t left;
};

/* Integers in the order of the floats; NaN below everything, -0 with +0. */
static __device__ __forceinline__ uint32_t dev_order_of(float x)
{
    if (x != x) return 0;
    const uint32_t u = kern_bits(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
static __device__ __forceinline__ float dev_of_order(uint32_t u)
{
    if (u == 0) return kern_float(0x7fc00000u);
    return kern_float(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}

/* Sum of v over the threads before this one; *total over all. All threads call it; warp[2][32],
 * of which calls one after the other take turns: *odd, 0 or 1. */
template <int THREADS>
static __device__ __forceinline__ uint32_t dev_block_before(uint32_t v, uint32_t (*warp)[32],
                                                            int *odd, uint32_t *total)
{
    const int lane = threadIdx.x % 32, w = threadIdx.x / 32;
    uint32_t sum = v;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t o = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += o;
    }
    if (lane == 31) warp[*odd][w] = sum;
    __syncthreads();
    const uint32_t all = lane < THREADS / 32 ? warp[*odd][lane] : 0;
    *odd ^= 1;
    *total = __reduce_add_sync(~0u, all);
    return sum - v + __reduce_add_sync(~0u, lane < w ? all : 0);
}

/* Four scores from i on, i a multiple of four, of n; those past the end are NaN. */
static __device__ __forceinline__ float4 dev_scores(const float *s, int32_t i, int32_t n,
                                                    bool aligned)
{
    const float none = kern_float(0x7fc00000u);
    if (aligned && i + 4 <= n) return *(const float4 *)(s + i);
    return make_float4(i < n ? s[i] : none, i + 1 < n ? s[i + 1] : none,
                       i + 2 < n ? s[i + 2] : none, i + 3 < n ? s[i + 3] : none);
}

/* The k-th highest (1 <= k <= n) as an integer; *equal: how many of its equals belong to the k. */
template <int THREADS>
static __device__ uint32_t dev_kth_highest(const float *s, int32_t n, int32_t k,
                                           struct topk_shared *sh, int32_t *equal)
{
    const bool aligned = (uintptr_t)s % 16 == 0;
    uint32_t prefix = 0, mask = 0;
    int odd = 0;
#pragma unroll 1
    for (int round = 0; round < 3; round++) {
        const int shift = round == 0 ? 21 : round == 1 ? 10 : 0;
        const int bins = round == 2 ? 1024 : 2048, each = bins / THREADS;
        for (int i = threadIdx.x; i < TOPK_BINS; i += THREADS) sh->count[i] = 0;
        __syncthreads();
        for (int32_t i0 = threadIdx.x * 4; i0 < n; i0 += THREADS * TOPK_EACH) {
            float4 v[TOPK_LOADS];
#pragma unroll
            for (int l = 0; l < TOPK_LOADS; l++)
                v[l] = dev_scores(s, i0 + l * THREADS * 4, n, aligned);
#pragma unroll
            for (int l = 0; l < TOPK_LOADS; l++) {
                const int32_t i = i0 + l * THREADS * 4;
                const float x[4] = {v[l].x, v[l].y, v[l].z, v[l].w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t u = dev_order_of(x[j]);
                    if (i + j < n && (u & mask) == prefix)
                        atomicAdd(&sh->count[(u >> shift) & (bins - 1)], 1u);
                }
            }
        }
        __syncthreads();
        /* Thread by thread from the highest digit down. */
        const int top = bins - 1 - (int)threadIdx.x * each;
        uint32_t sum = 0, total;
        for (int j = 0; j < each; j++) sum += sh->count[top - j];
        uint32_t before = dev_block_before<THREADS>(sum, sh->warp, &odd, &total);
        for (int j = 0; j < each; j++) {
            const uint32_t c = sh->count[top - j];
            if (before < (uint32_t)k && (uint32_t)k <= before + c) {
                sh->digit = (uint32_t)(top - j);
                sh->left = k - (int32_t)before;
            }
            before += c;
        }
        __syncthreads();
        prefix |= sh->digit << shift;
        mask |= (uint32_t)(bins - 1) << shift;
        k = sh->left;
    }
    *equal = k;
    __syncthreads();
    return prefix;
}

enum { TOPK_FEW = 32 }; /* keys that are ranked one by one */

/* For dev_threshold: counts of three rounds, so that two barriers a round are enough. */
struct topk_digits {
    __align__(16) uint32_t count[3][256];
    __align__(16) uint32_t few[TOPK_FEW];
    uint32_t differ, n_few;
    uint32_t at;          /* of the round: the digit, */
    int32_t above, reach; /* how many are beyond it, and are or have it */
};
/* A barrier before the first use. */
static __device__ __forceinline__ void dev_digits_open(struct topk_digits *d)
{
    if (threadIdx.x < 256) d->count[0][threadIdx.x] = 0;
    if (threadIdx.x < TOPK_FEW) d->few[threadIdx.x] = 0;
    if (threadIdx.x == 0) d->differ = d->n_few = 0;
}

struct topk_bound {
    uint32_t key;
    int32_t count, above; /* keys that reach it, and that are beyond it */
    int turn;
};
/* Of n keys in shared memory, which a barrier has shown to all: the highest bound that at least k
 * (1 <= k <= n) reach; or a lower one that at most k + slack reach. Digits of eight bits from the
 * highest on in which keys differ, until those that agree so far are few. turn: as the call before
 * left it, 0 first. (Not inlined: what runs a second time is there already, where it comes from
 * memory the first time.) */
template <int THREADS>
static __device__ __noinline__ struct topk_bound dev_threshold(const uint32_t *key, int32_t n,
                                                               int32_t k, int32_t slack,
                                                               struct topk_digits *d, int turn)
{
    const int lane = threadIdx.x % 32;
    const uint32_t some = key[0];
    uint32_t differ = 0;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < n; i += THREADS) differ |= key[i] ^ some;
    differ = __reduce_or_sync(~0u, differ);
    if (lane == 0 && differ) atomicOr(&d->differ, differ);
    __syncthreads();
    int bits = 32 - __clz((int)d->differ); /* that are not known yet */
    struct topk_bound b;
    b.key = bits == 32 ? 0 : some >> bits << bits;
    b.count = n;
    b.above = 0;
#pragma unroll 1
    while (bits > 0 && b.count > k + slack) {
        const uint32_t known = bits == 32 ? 0 : ~0u << bits;
        if (b.count - b.above <= TOPK_FEW) {
#pragma unroll 1
            for (int32_t i = threadIdx.x; i < n; i += THREADS)
                if ((key[i] & known) == b.key) d->few[atomicAdd(&d->n_few, 1u)] = key[i];
            __syncthreads();
            /* Where a lane's key stands among them; absent ones are 0. */
            if (threadIdx.x < 32) {
                const int32_t few = b.count - b.above;
                const uint32_t mine = d->few[lane];
                int32_t beyond = b.above, with = b.above;
#pragma unroll 1
                for (int32_t i = 0; i < few; i += 4) {
                    const uint4 v = *(const uint4 *)&d->few[i];
                    beyond += (v.x > mine) + (v.y > mine) + (v.z > mine) + (v.w > mine);
                    with += (v.x >= mine) + (v.y >= mine) + (v.z >= mine) + (v.w >= mine);
                }
                if (lane < few && beyond < k && k <= with) { /* equals say the same */
                    d->at = mine;
                    d->above = beyond;
                    d->reach = with;
                }
            }
            __syncthreads();
            b.key = d->at;
            b.above = d->above;
            b.count = d->reach;
            break;
        }
        const int shift = bits < 8 ? 0 : bits - 8;
        uint32_t *c = d->count[turn];
        turn = turn == 2 ? 0 : turn + 1;
        if (threadIdx.x < 256) d->count[turn][threadIdx.x] = 0; /* nobody reads it any more */
#pragma unroll 1
        for (int32_t i = threadIdx.x; i < n; i += THREADS) {
            const uint32_t u = key[i];
            if ((u & known) == b.key) atomicAdd(&c[(u & ~known) >> shift], 1u);
        }
        __syncthreads();
        if (threadIdx.x < 32) { /* eight digits a lane, from the highest down */
            const uint4 hi = *(const uint4 *)(c + 252 - 8 * lane),
                        lo = *(const uint4 *)(c + 248 - 8 * lane);
            const uint32_t v[8] = {hi.w, hi.z, hi.y, hi.x, lo.w, lo.z, lo.y, lo.x};
            uint32_t sum = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[j];
            uint32_t before = sum;
#pragma unroll
            for (int s = 1; s < 32; s *= 2) {
                const uint32_t o = __shfl_up_sync(~0u, before, s);
                if (lane >= s) before += o;
            }
            before += (uint32_t)b.above - sum;
            if (before < (uint32_t)k && (uint32_t)k <= before + sum) { /* one lane */
                uint32_t digit = 255 - 8 * lane, in = v[0];
#pragma unroll
                for (int j = 1; j < 8; j++)
                    if (before + in < (uint32_t)k) { /* this digit is passed */
                        before += in;
                        digit--;
                        in = v[j];
                    }
                d->at = digit << shift;
                d->above = (int32_t)before;
                d->reach = (int32_t)(before + in);
            }
        }
        __syncthreads();
        b.key |= d->at;
        b.above = d->above;
        b.count = d->reach;
        bits = shift;
    }
    b.turn = turn;
    __syncthreads();
    /* Seen by all; a barrier comes before the next call. */
    if (threadIdx.x < TOPK_FEW) d->few[threadIdx.x] = 0;
    if (threadIdx.x == 0) d->differ = d->n_few = 0;
    return b;
}

#endif
