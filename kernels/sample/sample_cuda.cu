/* kernels/sample/sample_cuda.cu - one block draws the token of one row, which stays in global
 * memory.
 *
 * Why      A row is read once or twice (greedy once, a temperature once more for its masses), from
 *          L2 as the head has just written it; 128 rows fill the device. Splitting few rows over
 *          more blocks was rejected: a step of one row takes a hundred times what its block does.
 * Masses   Whole numbers: each thread adds those of its own values and sums are put together in any
 *          order. They are computed anew in each pass; storing them would be read as slowly.
 * Order    A token is one number of 64 bits, its logit's order above its id's complement, so the
 *          larger number is the better token. Each thread remembers the best of its values: the
 *          best of all is the best of those, and once it is taken the owner's warp looks for its
 *          owner's next. So some dozens come off in falling order at half a microsecond each.
 * Cuts     To find the last token kept, a pass adds counts and masses by buckets, equal parts of
 *          the distance to the largest logit; the tokens of the bucket where the cut falls are then
 *          sorted. Where they are too many (rows of few values), the token is found from its
 *          highest three bits down instead: a pass adds what agrees with the bits known so far.
 */
#include "kernels/cuda/cuda.cuh"

extern "C" {
#include "kernels/sample/sample.h"
}

enum {
    THREADS = 1024,
    WARPS = THREADS / 32,
    POPS = 64,
    BUCKETS = 2 * THREADS,
    LIST = 2 * THREADS, /* most tokens that are sorted */
    DIGITS = 8,         /* values of three bits */
    EACH = 4,           /* neighbours that a thread reads at once */
    LOADS = 4,          /* such reads under way where nothing but their order matters */
};

/* Sums by bucket. A mass has two halves, as shared memory adds 32 bits at once. */
struct buckets {
    uint32_t low[BUCKETS], high[BUCKETS], count[BUCKETS];
};
struct shared {
    union {
        struct buckets buckets;
        uint64_t list[LIST];
    };
    uint64_t best[WARPS]; /* of each warp's values, less those popped */
    uint64_t sum[WARPS];
    uint64_t digit[WARPS][DIGITS];
    uint64_t popped[POPS], mass[POPS];
    uint64_t top[KERN_SAMPLE_TOP];
    uint64_t found, need;
    uint32_t n;
    int32_t id, bucket;
};

/* A row of the block. */
struct row {
    const float *x;
    int32_t V;
    bool aligned; /* to 16 bytes */
};

static __device__ __forceinline__ uint64_t token_of(float x, int32_t id)
{
    const uint32_t u = kern_bits(x + 0.0f); /* -0 is 0 */
    const uint32_t order = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)order << 32 | (uint32_t)~id;
}
static __device__ __forceinline__ int32_t id_of(uint64_t token)
{
    return (int32_t) ~(uint32_t)token;
}
static __device__ __forceinline__ float logit_of(uint64_t token)
{
    const uint32_t order = (uint32_t)(token >> 32);
    return kern_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

static __device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}
static __device__ __forceinline__ uint64_t warp_largest(uint64_t v)
{
#pragma unroll
    for (int m = 16; m; m >>= 1) v = larger(v, __shfl_xor_sync(~0u, v, m));
    return v;
}
static __device__ __forceinline__ uint64_t warp_sum(uint64_t v)
{
#pragma unroll
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
    return v;
}
/* Over the block; all threads get it. */
static __device__ uint64_t block_sum(uint64_t v, struct shared *sh)
{
    v = warp_sum(v);
    __syncthreads(); /* sum[] may still be read */
    if (threadIdx.x % 32 == 0) sh->sum[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(sh->sum[threadIdx.x % 32]);
}

static __device__ uint64_t block_largest(uint64_t v, struct shared *sh)
{
    v = warp_largest(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sh->sum[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_largest(sh->sum[threadIdx.x % 32]);
}
/* Sum over the threads before this one. */
static __device__ uint64_t block_before(uint64_t v, struct shared *sh)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t upto = v;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint64_t o = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += o;
    }
    __syncthreads();
    if (lane == 31) sh->sum[warp] = upto;
    __syncthreads();
    return upto - v + warp_sum(lane < warp ? sh->sum[lane] : 0);
}

/* Logits i .. i + 3, i a multiple of four; 0 behind the end. */
static __device__ __forceinline__ void load(struct row r, int32_t i, float x[EACH])
{
    if (r.aligned && i + EACH <= r.V) {
        const float4 v = *(const float4 *)(r.x + i);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        return;
    }
#pragma unroll
    for (int c = 0; c < EACH; c++) x[c] = i + c < r.V ? r.x[i + c] : 0.0f;
}

/* f(id, logit) for this thread's share of from .. to - 1; from a multiple of four; n threads, of
 * which this is number t. */
template <int N, typename F>
static __device__ __forceinline__ void each_of(struct row r, int32_t from, int32_t to, int t, int n,
                                               F f)
{
#pragma unroll 1
    for (int32_t i0 = from + t * EACH; i0 < to; i0 += n * EACH * N) {
        float x[N][EACH];
#pragma unroll
        for (int l = 0; l < N; l++) load(r, i0 + l * n * EACH, x[l]);
#pragma unroll
        for (int l = 0; l < N; l++)
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const int32_t i = i0 + l * n * EACH + c;
                if (i < to) f(i, x[l][c]);
            }
    }
}
/* For this thread's share of the row. A token's owner is thread (id / 4) % THREADS. */
template <int N, typename F> static __device__ __forceinline__ void each(struct row r, F f)
{
    each_of<N>(r, 0, r.V, threadIdx.x, THREADS, f);
}

/* ------------------------------------------------------------------ tokens in falling order */

/* Each thread finds the best of its own; whether there is NaN in the row. */
static __device__ bool begin(struct row r, uint64_t *mine, struct shared *sh)
{
    const int32_t first = threadIdx.x * EACH;
    float most = -INFINITY;
    int32_t id = first; /* ids rise: the first of equals stays */
    bool nan = false;
    each<LOADS>(r, [&](int32_t i, float x) {
        nan |= x != x;
        if (x > most) most = x, id = i;
    });
    uint64_t best = first < r.V ? token_of(most, id) : 0;
    *mine = best;
    best = warp_largest(best);
    if (threadIdx.x % 32 == 0) sh->best[threadIdx.x / 32] = best;
    return __syncthreads_or(nan);
}
static __device__ __forceinline__ uint64_t best_of(const struct shared *sh)
{
    return warp_largest(sh->best[threadIdx.x % 32]);
}
/* Takes the best one that is left. No more calls than tokens. */
static __device__ uint64_t pop(struct row r, uint64_t *mine, struct shared *sh)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint64_t top = best_of(sh);
    const int owner = id_of(top) / EACH % THREADS;
    __syncthreads(); /* all have read best[] */
    if (owner / 32 == warp) {
        uint64_t next = 0;
#pragma unroll 1
        for (int32_t i = (owner + THREADS * lane) * EACH; i < r.V; i += THREADS * 32 * EACH) {
            float x[EACH];
            load(r, i, x);
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const uint64_t token = token_of(x[c], i + c);
                if (i + c < r.V && token < top) next = larger(next, token);
            }
        }
        next = warp_largest(next);
        if ((int)threadIdx.x == owner) *mine = next;
        next = warp_largest(*mine);
        if (lane == 0) sh->best[warp] = next;
    }
    __syncthreads();
    return top;
}

/* ------------------------------------------------------------------ drawing */

/* What decides the mass of a token. */
struct scale {
    float max, none; /* below none there is no mass */
    double inv_t;
};
static __device__ __forceinline__ struct scale scale_of(float max, float temperature)
{
    /* e^-28.42 is half a unit; rounding of the difference is far below the rest. */
    const double none = (double)max - 28.6 * (double)temperature;
    return {max, __double2float_rd(none), 1.0 / (double)temperature};
}
static __device__ __forceinline__ uint64_t mass_of(struct scale s, float x)
{
    return x < s.none ? 0 : kern_mass(x, s.max, s.inv_t);
}

static __device__ uint64_t mass_of_all(struct row r, struct scale s, struct shared *sh)
{
    uint64_t sum = 0;
    each<1>(r, [&](int32_t i, float x) { sum += mass_of(s, x); });
    return block_sum(sum, sh);
}

/* reaches(), whatever the row. */
template <bool BY_MASS>
static __device__ uint64_t reaches_by_digits(struct row r, struct scale s, uint64_t need,
                                             struct shared *sh)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int id_bits = 32 - __clz((r.V - 1) | 1), id_digits = (id_bits + 2) / 3 * 3;
    uint64_t known = 0, mask = 0;
#pragma unroll 1
    for (int shift = 61; shift >= 0; shift -= 3) {
        uint64_t sum[DIGITS] = {};
        each<BY_MASS ? 1 : 2>(r, [&](int32_t i, float x) {
            const uint64_t token = token_of(x, i);
            if ((token & mask) != known) return;
            const uint64_t v = BY_MASS ? mass_of(s, x) : 1;
            const uint32_t d = (uint32_t)(token >> shift) & (DIGITS - 1);
#pragma unroll
            for (int k = 0; k < DIGITS; k++) sum[k] += d == (uint32_t)k ? v : 0;
        });
        __syncthreads(); /* digit[] may still be read */
#pragma unroll
        for (int k = 0; k < DIGITS; k++) {
            const uint64_t all = warp_sum(sum[k]);
            if (lane == 0) sh->digit[warp][k] = all;
        }
        __syncthreads();
        uint64_t d = 0;
#pragma unroll 1
        for (int k = DIGITS - 1; k >= 0; k--) {
            const uint64_t all = warp_sum(sh->digit[lane][k]);
            d = (uint64_t)k;
            if (all >= need) break;
            need -= all;
        }
        known |= d << shift;
        mask |= (uint64_t)(DIGITS - 1) << shift;
        if (shift ==
            31) { /* the logit is known, and of an id's complement all bits above id_digits */
            const uint64_t ones = (UINT64_C(1) << 31) - (UINT64_C(1) << id_digits);
            known |= ones;
            mask |= ones;
            shift = id_digits;
        }
    }
    return known;
}

static __device__ __forceinline__ void add_to(struct buckets *b, int k, uint64_t mass)
{
    const uint32_t low = (uint32_t)mass;
    uint32_t high = (uint32_t)(mass >> 32);
    if (low && atomicAdd(&b->low[k], low) > ~low) high++;
    if (high) atomicAdd(&b->high[k], high);
}

/* Falling. */
static __device__ void sort(struct shared *sh, int n)
{
    int padded = 2;
    while (padded < n) padded *= 2;
    for (int i = n + threadIdx.x; i < padded; i += THREADS) sh->list[i] = 0;
    __syncthreads();
    for (int k = 2; k <= padded; k *= 2)
        for (int j = k / 2; j > 0; j /= 2) {
            const int t = threadIdx.x, a = 2 * t - (t & (j - 1)), b = a + j;
            if (t < padded / 2) {
                const uint64_t x = sh->list[a], y = sh->list[b];
                if ((x < y) == ((a & k) == 0)) sh->list[a] = y, sh->list[b] = x;
            }
            __syncthreads();
        }
}

/* The token at which, in falling order from the largest, the count reaches need, which that of all
 * does; or the mass its share p of those from border on. */
template <bool BY_MASS>
static __device__ uint64_t reaches(struct row r, struct scale s, uint64_t border, uint64_t need,
                                   float p, uint64_t mine, struct shared *sh)
{
    const int t = threadIdx.x;
    /* Each thread has a token from `low` on, so most cuts fall within some times that distance. */
    const float low = logit_of(~block_largest(mine ? ~mine : 0, sh));
    const float range = fminf(BY_MASS ? s.max - s.none : INFINITY, 4.0f * (s.max - low));
    const float per = range > 0.0f && range <= 3e38f ? BUCKETS / range : 0.0f;
    /* Lower for no larger logit. */
    const auto bucket_of = [&](float x) {
        const float d = (s.max - x) * per;
        return d < (float)(BUCKETS - 1) ? (int)d : BUCKETS - 1;
    };

    for (int i = t; i < BUCKETS; i += THREADS)
        sh->buckets.low[i] = sh->buckets.high[i] = sh->buckets.count[i] = 0;
    if (t == 0) sh->n = 0;
    __syncthreads();
    each<BY_MASS ? 1 : LOADS>(r, [&](int32_t i, float x) {
        if (token_of(x, i) < border) return;
        const uint64_t mass = BY_MASS ? mass_of(s, x) : 0;
        if (BY_MASS && mass == 0) return;
        const int k = bucket_of(x);
        if (BY_MASS) add_to(&sh->buckets, k, mass);
        atomicAdd(&sh->buckets.count[k], 1u);
    });
    __syncthreads();
    const auto sum_of = [&](int k) -> uint64_t {
        return BY_MASS ? (uint64_t)sh->buckets.high[k] << 32 | sh->buckets.low[k]
                       : sh->buckets.count[k];
    };
    const uint64_t first = sum_of(2 * t), both = first + sum_of(2 * t + 1);
    if (BY_MASS) need = kern_share(p, block_sum(both, sh));
    const uint64_t before = block_before(both, sh);
    if (before < need && need <= before + both) {
        const bool second = need > before + first;
        sh->bucket = 2 * t + second;
        sh->need = need - before - (second ? first : 0);
    }
    __syncthreads();
    const int bucket = sh->bucket, n = (int)sh->buckets.count[bucket];
    if (n > LIST) return reaches_by_digits<BY_MASS>(r, s, need, sh);
    need = sh->need;
    __syncthreads(); /* the list takes the place of the buckets */
    each<LOADS>(r, [&](int32_t i, float x) {
        if (bucket_of(x) != bucket || token_of(x, i) < border) return;
        if (BY_MASS && mass_of(s, x) == 0) return;
        sh->list[atomicAdd(&sh->n, 1u)] = token_of(x, i);
    });
    __syncthreads();
    sort(sh, n);
    const auto worth = [&](int i) -> uint64_t {
        if (i >= n) return 0;
        return BY_MASS ? mass_of(s, logit_of(sh->list[i])) : 1;
    };
    const uint64_t one = worth(2 * t), two = one + worth(2 * t + 1);
    const uint64_t at = block_before(two, sh);
    if (at < need && need <= at + two) sh->found = sh->list[2 * t + (need > at + one)];
    __syncthreads();
    return sh->found;
}

/* By u among the first n popped. */
static __device__ int32_t draw_popped(double u, int n, uint64_t least, struct shared *sh)
{
    const int t = threadIdx.x;
    uint64_t sum = 0, below = 0, mass = 0;
    __syncthreads(); /* what was popped is there */
    for (int k = 0; k < n; k++) {
        const uint64_t m = sh->mass[k] < least ? 0 : sh->mass[k];
        sum += m;
        if (t < n && id_of(sh->popped[k]) < id_of(sh->popped[t])) below += m;
        if (t == k) mass = m;
    }
    const uint64_t place = kern_place(u, sum);
    if (t < n && place >= below && place - below < mass) sh->id = id_of(sh->popped[t]);
    __syncthreads();
    return sh->id;
}

/* By u among tokens from border on. The row lies in one part a warp; the warp whose part holds the
 * place is found by their sums, then the block divides that part once more. */
static __device__ int32_t draw_from(struct row r, struct scale s, double u, uint64_t border,
                                    uint64_t least, struct shared *sh)
{
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int32_t part = (r.V - 1) / (WARPS * 32 * EACH) * 32 * EACH + 32 * EACH;
    const auto mass = [&](int32_t i, float x) -> uint64_t {
        if (token_of(x, i) < border) return 0;
        const uint64_t m = mass_of(s, x);
        return m < least ? 0 : m;
    };
    const auto end_of = [&](int32_t to) { return to < r.V ? to : r.V; };

    uint64_t sum = 0;
    each_of<1>(r, warp * part, end_of((warp + 1) * part), lane, 32,
               [&](int32_t i, float x) { sum += mass(i, x); });
    sum = block_sum(sum, sh); /* sum[] keeps each warp's */
    uint64_t place = kern_place(u, sum);
    int w = 0;
    for (; w < WARPS - 1 && place >= sh->sum[w]; w++) place -= sh->sum[w];
    const int32_t own = (part - 1) / THREADS + 1, from = w * part + t * own,
                  to = end_of(from + own < (w + 1) * part ? from + own : (w + 1) * part);
    uint64_t here = 0;
    for (int32_t i = from; i < to; i++) here += mass(i, r.x[i]);
    uint64_t at = block_before(here, sh);
    if (place >= at && place - at < here) {
        for (int32_t i = from; i < to; i++) {
            const uint64_t m = mass(i, r.x[i]);
            if (place - at < m) {
                sh->id = i;
                break;
            }
            at += m;
        }
    }
    __syncthreads();
    return sh->id;
}

static __device__ int32_t draw(struct row r, const struct kern_sample_row *p, float max,
                               uint64_t *mine, struct shared *sh)
{
    const struct scale s = scale_of(max, p->temperature);
    const int32_t limit = p->top_k > 0 && p->top_k < r.V ? p->top_k : r.V;
    const uint64_t least = kern_share(p->min_p, KERN_MASS_ONE);
    const bool by_share = p->top_p < 1.0f;
    if (limit > POPS || limit == r.V) {
        uint64_t border = 0;
        if (limit < r.V) border = reaches<false>(r, s, 0, (uint64_t)limit, 0, *mine, sh);
        if (by_share) border = reaches<true>(r, s, border, 0, p->top_p, *mine, sh);
        return draw_from(r, s, p->u, border, least, sh);
    }
    uint64_t sum = 0;
    int n = 0;
    for (; n < limit; n++) {
        const uint64_t token = pop(r, mine, sh), mass = mass_of(s, logit_of(token));
        if (threadIdx.x == 0) sh->popped[n] = token, sh->mass[n] = mass;
        sum += mass;
    }
    if (by_share) {
        __syncthreads(); /* what was popped is there */
        const uint64_t need = kern_share(p->top_p, sum);
        for (sum = 0, n = 0; sum < need; n++) sum += sh->mass[n];
    }
    return draw_popped(p->u, n, least, sh);
}

/* ------------------------------------------------------------------ one row */

static __device__ void edit(float *x, int32_t V, const struct kern_sample_row *r,
                            struct kern_edit *e)
{
    __syncthreads(); /* the row was read as it is */
    for (int32_t i = threadIdx.x; i < r->n_edits; i += THREADS) {
        if ((uint32_t)e[i].id >= (uint32_t)V) continue;
        e[i].was = x[e[i].id];
        x[e[i].id] = kern_edited(e[i].was, r, e[i].count, e[i].bias);
    }
    __syncthreads();
}
static __device__ void put_back(float *x, int32_t V, const struct kern_sample_row *r,
                                const struct kern_edit *e)
{
    __syncthreads(); /* the row was read with its edits */
    for (int32_t i = threadIdx.x; i < r->n_edits; i += THREADS)
        if ((uint32_t)e[i].id < (uint32_t)V) x[e[i].id] = e[i].was;
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS) sample_kernel(struct kern_sample p)
{
    __shared__ struct shared sh;
    __shared__ struct kern_sample_row row;
    const int t = threadIdx.x;
    float *x = p.logits + (int64_t)blockIdx.x * p.V;
    const struct row r = {x, p.V, (uintptr_t)x % 16 == 0};
    struct kern_choice *out = &p.choices[blockIdx.x];
    if (t == 0) row = p.rows[blockIdx.x];
    for (int i = t; i < (int)(sizeof *out / sizeof(int32_t)); i += THREADS) ((int32_t *)out)[i] = 0;

    uint64_t mine;
    const bool nan = begin(r, &mine, &sh);
    const float raw_max = logit_of(best_of(&sh)); /* NaN if there is none better */
    int32_t id = -1;
    int n_top = 0;
    double ln = 0;
    if (!nan && raw_max > -INFINITY) {
        if (row.n_logprobs >= 0) {
            ln = kern_ln_mass(mass_of_all(r, scale_of(raw_max, 1.0f), &sh));
            n_top = min(min(row.n_logprobs, (int)KERN_SAMPLE_TOP), p.V);
            for (int k = 0; k < n_top; k++) {
                const uint64_t token = pop(r, &mine, &sh);
                if (t == 0) sh.top[k] = token;
            }
        }
        struct kern_edit *e = p.edits + row.edit0;
        if (row.n_edits > 0) edit(x, p.V, &row, e);
        if (row.n_edits > 0 || n_top > 0) begin(r, &mine, &sh);
        const uint64_t best = best_of(&sh);
        const float max = logit_of(best);
        if (max > -INFINITY)
            id = row.temperature > 0.0f && !isinf(max) ? draw(r, &row, max, &mine, &sh)
                                                       : id_of(best);
        if (row.n_edits > 0) put_back(x, p.V, &row, e);
    }
    __syncthreads(); /* out is zero, top[] is there */
    if (t == 0) {
        out->rc = id < 0 ? TOW_ENUMERIC : 0;
        out->id = id;
        if (id >= 0 && row.n_logprobs >= 0) out->logprob = kern_logprob(x[id], raw_max, ln);
        if (id >= 0) out->n_top = n_top;
    }
    if (id >= 0 && t < n_top) {
        out->top_ids[t] = id_of(sh.top[t]);
        out->top_logprobs[t] = kern_logprob(logit_of(sh.top[t]), raw_max, ln);
    }
}

extern "C" int kern_sample_cuda(struct kern_stream *s, const struct kern_sample *p)
{
    if (p->T == 0) return 0;
    sample_kernel<<<p->T, THREADS, 0, s->cu>>>(*p);
    return cuda_done(s, "sample");
}
