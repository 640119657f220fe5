/* kernels/attn/index_select_cuda.cu - scores what each row sees and keeps the best, ascending.
 *
 * Rows go in batches whose scores fit a budget: scored by index_score_launch, then one CTA a row
 * keeps the k highest, or where rows are many one warp; of equals the lower entry. A row that sees
 * no more than it keeps needs no scores.
 *
 * With the scores come the best of each run of sixteen. Runs are put together to some thousand
 * units; the k-th best of the units' bests is a bound that at least k scores reach, and on scores
 * in no order few more do (1.2 k where units are four k). Only runs that reach it are read, and
 * what reaches it is put in shared memory in order (`gather`), where the k-th highest is found
 * exactly (`pick`). Short rows go there whole. Should too much reach the bound (long runs of
 * equals, or best ones side by side) the row is read in several passes (`scan`); all ways give the
 * same list.
 * A warp (`warp_select`) does the same with units in registers and half as many of them, and needs
 * neither barriers nor counts that all warps of a CTA add up again: a sixth of the instructions.
 * When what reaches the bound fills its room, it goes on with the best of it.
 *
 * Scratch has one size. As long as it holds all rows at their longest, each has an equal part of
 * it, so that the launches of a step of decode depend on T alone (a captured graph may be launched
 * again at any length); else rows go in batches, by the power of two that the longest fits in.
 */
#include "kernels/attn/index_score.cuh"
#include "kernels/attn/topk.cuh"

enum {
    BATCH_FLOATS = 64 << 20,
    MIN_LD = 4096,
    LD_STEP = 4 * INDEX_RUN, /* a row's bests are read by fours */
    CAP = 8192,              /* scores in shared memory: see room_bytes */
    CAP_MOST = 16384,
    MOST_FOURS = 4, /* of runs, of a thread: in registers, a byte each */
    /* Of a row that one warp selects from. */
    WARP_TOPK = 512,
    WARP_UNITS = 48, /* of a lane: in all three for each score wanted, or half of that */
    WARP_LIST = 128, /* runs looked at at a time, four by a lane */
    WARP_FOUND = WARP_TOPK + 1 + 32 * INDEX_RUN, /* the best so far, and of 32 runs */
    WARP_HELD = (WARP_FOUND + 31) / 32,
    WARP_CTAS = 20, /* of a multiprocessor */
};

/* Dynamic shared memory for cap scores that reach the bound: their keys and entries; or for 2 cap
 * keys. And the runs that hold them. */
static constexpr int room_bytes(int cap)
{
    return cap * (int)(sizeof(uint32_t) + sizeof(int32_t) + sizeof(uint16_t));
}

/* The row of scores that belongs to row t; -1: none. */
static __device__ int64_t score_row(const struct kern_index_select &p, const int32_t *rows,
                                    int32_t t)
{
    if (!rows) return t;
    int32_t lo = 0, hi = p.n_score_rows;
    while (lo < hi) {
        const int32_t mid = lo + (hi - lo) / 2;
        if (rows[mid] < t)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < p.n_score_rows && rows[lo] == t ? lo : -1;
}

/* What a CTA knows of its row. */
struct row {
    const float *s, *best;
    int32_t n, topk, t;
    int32_t *out;
    float *margin; /* NULL: not wanted */
};
struct select_shared {
    struct topk_shared top;
    struct topk_digits digits;
};

/* Once all threads have told the lowest key they keep and the highest that they do not. */
static __device__ __forceinline__ void tell_margin(const struct row &r, uint32_t kept,
                                                   uint32_t not_kept)
{
    __shared__ uint32_t lowest_kept, highest_not;
    if (!r.margin) return;
    if (threadIdx.x == 0) {
        lowest_kept = ~0u;
        highest_not = 0;
    }
    __syncthreads();
    if (kept != ~0u) atomicMin(&lowest_kept, kept);
    if (not_kept) atomicMax(&highest_not, not_kept);
    __syncthreads();
    if (threadIdx.x == 0) {
        const float k = dev_of_order(lowest_kept), next = dev_of_order(highest_not);
        float margin = k - next;
        if (margin != margin) margin = k == next ? 0.0f : kern_float(0x7f800000u);
        r.margin[r.t] = margin;
    }
}

/* The best `topk` of m keys, of entries index[] (NULL: their own numbers), ascending. */
template <int THREADS>
static __device__ void pick(const struct row &r, const uint32_t *key, const int32_t *index,
                            int32_t m, struct select_shared *sh, int turn, int odd)
{
    const struct topk_bound b = dev_threshold<THREADS>(key, m, r.topk, 0, &sh->digits, turn);
    const uint32_t kth = b.key;
    /* Of those that are the bound itself; all where it is not yet the k-th, but k reach it. */
    const uint32_t equal = b.count == r.topk ? ~0u : (uint32_t)(r.topk - b.above);
    /* Each thread a stretch, odd, so that a warp meets all banks. */
    const int32_t each = (m + THREADS - 1) / THREADS | 1, i0 = (int32_t)threadIdx.x * each;
    const int32_t i1 = i0 + each < m ? i0 + each : m;
    uint32_t mine = 0; /* above in the low half, ties in the high one */
#pragma unroll 1
    for (int32_t i = i0; i < i1; i++) mine += key[i] > kth ? 1u : key[i] == kth ? 1u << 16 : 0u;
    uint32_t total;
    const uint32_t before = dev_block_before<THREADS>(mine, sh->top.warp, &odd, &total);
    uint32_t above = before & 0xffffu, ties = before >> 16, kept = ~0u, not_kept = 0;
#pragma unroll 1
    for (int32_t i = i0; i < i1; i++) {
        const uint32_t u = key[i];
        if (u > kth || (u == kth && ties < equal)) {
            r.out[above + (ties < equal ? ties : equal)] = index ? index[i] : i;
            kept = u < kept ? u : kept;
        } else {
            not_kept = u > not_kept ? u : not_kept;
        }
        above += u > kth;
        ties += u == kth;
    }
    tell_margin(r, kept, not_kept);
}

/* All keys of a short row. */
template <int THREADS> static __device__ void load_all(const struct row &r, uint32_t *key)
{
    for (int32_t e = (int32_t)threadIdx.x * 4; e < r.n; e += THREADS * 4) {
        const float4 v = *(const float4 *)(r.s + e); /* rows end at a multiple of four */
        *(uint4 *)(key + e) =
            make_uint4(dev_order_of(v.x), dev_order_of(v.y), dev_order_of(v.z), dev_order_of(v.w));
    }
    __syncthreads();
}

/* The best of `width` from u * width on, of n; width a power of two. */
static __device__ __forceinline__ uint32_t unit_key(const float *from, int32_t n, int32_t width,
                                                    int32_t u)
{
    float m = kern_float(0x7fc00000u);
    const int32_t end = (u + 1) * width < n ? (u + 1) * width : n;
    if (width >= 4) {
        for (int32_t i = u * width; i < end; i += 4) {
            const float4 v = *(const float4 *)(from + i);
            m = fmaxf(m, v.x); /* passes over NaN */
            if (i + 1 < end) m = fmaxf(m, v.y);
            if (i + 2 < end) m = fmaxf(m, v.z);
            if (i + 3 < end) m = fmaxf(m, v.w);
        }
    } else {
        for (int32_t i = u * width; i < end; i++) m = fmaxf(m, from[i]);
    }
    return dev_order_of(m);
}

/* A bound to compare scores with: all but NaN reach -inf, none NaN. */
static __device__ __forceinline__ float least_of(uint32_t bound)
{
    const float lowest = -kern_float(0x7f800000u);
    return bound <= dev_order_of(lowest) ? lowest : dev_of_order(bound);
}
/* The scores of the run from entry e on. */
static __device__ __forceinline__ void run_load(const struct row &r, int32_t e,
                                                float4 (&v)[INDEX_RUN / 4])
{
    const float none = kern_float(0x7fc00000u);
#pragma unroll
    for (int l = 0; l < INDEX_RUN / 4; l++) /* behind the last score stands NaN */
        v[l] = e < r.n ? *(const float4 *)(r.s + e + 4 * l) : make_float4(none, none, none, none);
}
/* Which of them the row has and reach a bound, a bit each. */
static __device__ __forceinline__ uint32_t run_reaching(const struct row &r, int32_t e,
                                                        const float4 (&v)[INDEX_RUN / 4],
                                                        uint32_t bound)
{
    const float least = least_of(bound);
    const int32_t left = r.n - e;
    uint32_t mask = bound == 0 ? (1u << INDEX_RUN) - 1 : 0; /* NaN too */
#pragma unroll
    for (int l = 0; l < INDEX_RUN / 4; l++) {
        const float x[4] = {v[l].x, v[l].y, v[l].z, v[l].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (x[j] >= least) mask |= 1u << (4 * l + j);
    }
    if (left < INDEX_RUN) mask &= left > 0 ? (1u << left) - 1 : 0;
    return mask;
}

/* Highest of two, four by four; passes over NaN. */
static __device__ __forceinline__ float4 four_best(const float4 &a, const float4 &b)
{
    return make_float4(fmaxf(a.x, b.x), fmaxf(a.y, b.y), fmaxf(a.z, b.z), fmaxf(a.w, b.w));
}
/* Keys and entries, ascending, of all scores that reach a bound which at least `want` do; -1: too
 * many, or one that all reach. */
template <int THREADS>
static __device__ __forceinline__ int32_t gather(const struct row &r, int32_t want, int32_t cap,
                                                 uint32_t *key, int32_t *index, uint16_t *runs,
                                                 struct select_shared *sh, int *turn, int *odd)
{
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    /* Fours of runs' bests; a warp has `each` times 32 side by side. */
    const int32_t n = (r.n + 4 * INDEX_RUN - 1) / (4 * INDEX_RUN);
    const int32_t each = (n + THREADS - 1) / THREADS, first = warp * 32 * each + lane;
    const float none = kern_float(0x7fc00000u);
    float4 v[MOST_FOURS], best = make_float4(none, none, none, none);
#pragma unroll
    for (int i = 0; i < MOST_FOURS; i++) {
        v[i] = make_float4(none, none, none, none);
        if (i < each && first + i * 32 < n) v[i] = *((const float4 *)r.best + first + i * 32);
    }
#pragma unroll
    for (int i = 0; i < MOST_FOURS; i++) best = four_best(best, v[i]);
    /* A thread's are two units, or four, or as many as there are: at least two for each score
     * wanted, better three, if runs suffice. */
    const int32_t some = each == 1 ? n : THREADS;
    int32_t n_units = 2 * some;
    if (2 * some >= 3 * want) {
        if (t < some)
            *(uint2 *)(key + 2 * t) = make_uint2(dev_order_of(fmaxf(best.x, best.y)),
                                                 dev_order_of(fmaxf(best.z, best.w)));
    } else if (2 * some >= want || each == 1) {
        n_units = 4 * some;
        if (t < some)
            *(uint4 *)(key + 4 * t) = make_uint4(dev_order_of(best.x), dev_order_of(best.y),
                                                 dev_order_of(best.z), dev_order_of(best.w));
    } else {
        n_units = 4 * n;
#pragma unroll
        for (int i = 0; i < MOST_FOURS; i++)
            if (i < each && first + i * 32 < n)
                *((uint4 *)key + first + i * 32) =
                    make_uint4(dev_order_of(v[i].x), dev_order_of(v[i].y), dev_order_of(v[i].z),
                               dev_order_of(v[i].w));
    }
    __syncthreads();
    const struct topk_bound b =
        dev_threshold<THREADS>(key, n_units, want, want / 8, &sh->digits, *turn);
    *turn = b.turn;
    if (b.key == 0) return -1;

    /* How many of each four, a byte each, summed over the warp's lanes before. */
    const float least = least_of(b.key);
    uint32_t mask = 0, count = 0;
#pragma unroll
    for (int i = 0; i < MOST_FOURS; i++) {
        const float x[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (x[j] >= least) {
                mask |= 1u << (4 * i + j);
                count += 1u << (8 * i);
            }
    }
    uint32_t sum = count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t o = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += o;
    }
    const uint32_t all = __shfl_sync(~0u, sum, 31);
    sum -= count;
    if (lane == 0) sh->top.warp[*odd][warp] = __dp4a(all, 0x01010101u, 0u);
    __syncthreads();
    const uint32_t warps = sh->top.warp[*odd][lane];
    *odd ^= 1;
    const int32_t total = (int32_t)__reduce_add_sync(~0u, warps);
    uint32_t before = __reduce_add_sync(~0u, lane < warp ? warps : 0);
    if (total > cap) return -1;
#pragma unroll
    for (int i = 0; i < MOST_FOURS; i++) {
        uint32_t at = before + (sum >> (8 * i) & 0xff);
        before += all >> (8 * i) & 0xff;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (mask >> (4 * i + j) & 1) runs[at++] = (uint16_t)(4 * (first + i * 32) + j);
    }
    __syncthreads(); /* also: the units' keys may go */

    int32_t m = 0;
#pragma unroll 1
    for (int32_t i0 = 0; i0 < total; i0 += THREADS) {
        const int32_t i = i0 + t;
        const int32_t e = i < total ? runs[i] * INDEX_RUN : r.n;
        uint32_t found;
        float4 s[INDEX_RUN / 4];
        run_load(r, e, s);
        mask = 0;
#pragma unroll
        for (int l = 0; l < INDEX_RUN / 4; l++) {
            const float x[4] = {s[l].x, s[l].y, s[l].z, s[l].w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (x[j] >= least) mask |= 1u << (4 * l + j);
        }
        int32_t to = m + (int32_t)dev_block_before<THREADS>((uint32_t)__popc(mask), sh->top.warp,
                                                            odd, &found);
        m += (int32_t)found;
        if (m > cap) return -1;
#pragma unroll 1
        for (; mask; mask &= mask - 1) { /* few: they are read again */
            const int32_t l = e + __ffs((int)mask) - 1;
            key[to] = dev_order_of(r.s[l]);
            index[to++] = l;
        }
    }
    __syncthreads();
    return m;
}

/* Any row, in passes over device memory. Places come from prefix sums over runs of scores, so the
 * list is ascending by construction. */
template <int THREADS> static __device__ void scan(const struct row &r, struct topk_shared *sh)
{
    int32_t equal;
    const uint32_t kth = dev_kth_highest<THREADS>(r.s, r.n, r.topk, sh, &equal);
    uint32_t above = 0, ties = 0, kept = ~0u, not_kept = 0; /* of the runs before; of this thread */
    int odd = 0;
    for (int32_t run = 0; run < r.n; run += THREADS * TOPK_EACH) {
        const int32_t e = run + (int32_t)threadIdx.x * TOPK_EACH;
        uint32_t u[TOPK_EACH], total;
        uint32_t mine = 0; /* above in the low half, ties in the high one */
        float4 v[TOPK_LOADS];
#pragma unroll
        for (int l = 0; l < TOPK_LOADS; l++) v[l] = dev_scores(r.s, e + 4 * l, r.n, true);
#pragma unroll
        for (int l = 0; l < TOPK_LOADS; l++) {
            u[4 * l] = dev_order_of(v[l].x);
            u[4 * l + 1] = dev_order_of(v[l].y);
            u[4 * l + 2] = dev_order_of(v[l].z);
            u[4 * l + 3] = dev_order_of(v[l].w);
        }
#pragma unroll
        for (int j = 0; j < TOPK_EACH; j++)
            if (e + j < r.n) mine += u[j] > kth ? 1u : u[j] == kth ? 1u << 16 : 0u;
        const uint32_t before = dev_block_before<THREADS>(mine, sh->warp, &odd, &total);
        uint32_t a = above + (before & 0xffffu), b = ties + (before >> 16);
#pragma unroll
        for (int j = 0; j < TOPK_EACH; j++) {
            if (e + j >= r.n) break;
            const bool tie = u[j] == kth;
            if (u[j] > kth || (tie && b < (uint32_t)equal)) {
                r.out[a + (b < (uint32_t)equal ? b : (uint32_t)equal)] = e + j;
                kept = u[j] < kept ? u[j] : kept;
            } else {
                not_kept = u[j] > not_kept ? u[j] : not_kept;
            }
            a += u[j] > kth;
            b += tie;
        }
        above += total & 0xffffu;
        ties += total >> 16;
        if (!r.margin && above + equal == (uint32_t)r.topk && ties >= (uint32_t)equal) break;
    }
    tell_margin(r, kept, not_kept);
}

/* Where a warp that has a row to itself keeps things. */
union warp_room {
    uint32_t unit[32 * WARP_UNITS];
    struct {
        uint2 found[WARP_FOUND];     /* scores that reach the bound, and their entries */
        int32_t run[31 + WARP_LIST]; /* to be read */
    };
};

/* How many keys reach a bound: two instructions each, in four chains. */
template <int N>
static __device__ __forceinline__ int32_t count_reaching(const uint32_t (&key)[N], uint32_t bound)
{
    int32_t n[4] = {N, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < N; i++)
        asm("{ .reg .u32 t; sub.cc.u32 t, %1, %2; subc.u32 %0, %0, 0; }"
            : "+r"(n[i % 4])
            : "r"(key[i]), "r"(bound));
    return n[0] + n[1] + (n[2] + n[3]);
}

/* Of the keys in a warp's registers the highest bound that at least k reach, or a lower one that at
 * most k + slack reach; `known`: a bound that `reach` of them do, of which those beyond it differ
 * in the lowest `bits` only. */
template <int N>
static __device__ __forceinline__ uint32_t warp_threshold(const uint32_t (&key)[N], int32_t k,
                                                          int32_t slack, uint32_t known, int bits,
                                                          int32_t reach)
{
    while (bits-- > 0 && reach > k + slack) {
        const uint32_t next = known | 1u << bits;
        const int32_t n = __reduce_add_sync(~0u, count_reaching(key, next));
        if (n < k) continue;
        known = next;
        reach = n;
    }
    return known;
}

/* Of m scores in the room, all of which reach a bound, the k best, of equals the first. All lanes
 * call `store` with a number, its key, whether there is one, whether it is of the best, and how
 * many of these come before it. Returns the k-th's key. */
template <typename F>
static __device__ __forceinline__ uint32_t warp_best(const union warp_room *room, int32_t m,
                                                     int32_t k, uint32_t bound, F store)
{
    const int lane = threadIdx.x;
    const uint32_t below = (1u << lane) - 1;
    uint32_t key[WARP_HELD], top = 0;
#pragma unroll
    for (int i = 0; i < WARP_HELD; i++) {
        const bool is = i * 32 + lane < m;
        key[i] = is ? dev_order_of(kern_float(room->found[i * 32 + lane].x)) : 0;
        top = key[i] > top ? key[i] : top;
    }
    top = __reduce_max_sync(~0u, top);
    const int bits = 32 - __clz((int)(top ^ bound)); /* in which they differ */
    const uint32_t kth = warp_threshold(key, k, 0, bits == 32 ? 0 : bound >> bits << bits, bits, m);
    const int32_t equal = k - __reduce_add_sync(~0u, count_reaching(key, kth + 1));
    int32_t at = 0, ties = 0;
#pragma unroll
    for (int i = 0; i < WARP_HELD; i++) {
        if (i * 32 >= m) break;
        const bool is = i * 32 + lane < m, tie = is && key[i] == kth;
        const uint32_t tied = __ballot_sync(~0u, tie);
        const bool keep = is && (key[i] > kth || (tie && ties + __popc(tied & below) < equal));
        const uint32_t who = __ballot_sync(~0u, keep);
        store(i * 32 + lane, key[i], is, keep, at + __popc(who & below));
        at += __popc(who);
        ties += __popc(tied);
    }
    return kth;
}

/* Leaves the k best alone. (Not inlined: seldom needed, and its registers are many.) */
static __device__ __noinline__ uint32_t warp_compact(union warp_room *room, int32_t m, int32_t k,
                                                     uint32_t bound)
{
    const uint32_t kth =
        warp_best(room, m, k, bound, [&](int i, uint32_t, bool, bool keep, int32_t at) {
            uint2 one;
            if (keep) one = room->found[i];
            __syncwarp();
            if (keep) room->found[at] = one;
        });
    __syncwarp();
    return kth;
}

/* What a warp has found. */
struct warp_found {
    int32_t m;
    uint32_t floor, bound; /* all of it reaches the one; what is added must reach the other */
};
/* Adds what reaches the bound of the lanes' runs, v from entry e on (>= r.n: none). Should that be
 * too much, the best of what there is stay, and what follows must be better than they: equals
 * that come later are not wanted. */
static __device__ __forceinline__ void warp_take(const struct row &r, int32_t e,
                                                 const float4 (&v)[INDEX_RUN / 4], int32_t want,
                                                 union warp_room *room, struct warp_found *f)
{
    const int lane = threadIdx.x;
    uint32_t mask = run_reaching(r, e, v, f->bound);
    __syncwarp();
    if (f->m + (int32_t)__reduce_add_sync(~0u, __popc(mask)) > WARP_FOUND) {
        f->floor = warp_compact(room, f->m, want, f->floor);
        f->m = want;
        f->bound = f->floor + 1;
        mask = run_reaching(r, e, v, f->bound);
    }
    const int32_t mine = __popc(mask);
    int32_t to = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int32_t o = __shfl_up_sync(~0u, to, d);
        if (lane >= d) to += o;
    }
    const int32_t total = __shfl_sync(~0u, to, 31);
    to += f->m - mine;
#pragma unroll
    for (int l = 0; l < INDEX_RUN / 4; l++) {
        const float x[4] = {v[l].x, v[l].y, v[l].z, v[l].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (mask >> (4 * l + j) & 1)
                room->found[to++] = make_uint2(kern_bits(x[j]), (uint32_t)(e + 4 * l + j));
    }
    f->m += total;
}

/* The row's best, by one warp: a bound from units as in gather, then what reaches it. */
static __device__ __forceinline__ void warp_select(const struct row &r, int32_t want,
                                                   union warp_room *room)
{
    const int lane = threadIdx.x;
    const int32_t n_runs = (r.n + INDEX_RUN - 1) / INDEX_RUN;
    int32_t width = 1; /* scores of a unit */
    while (r.n > 32 * WARP_UNITS * width) width *= 2;
    const bool by_runs = width >= INDEX_RUN;
    const float *from = by_runs ? r.best : r.s;
    const int32_t n = by_runs ? n_runs : r.n;
    if (by_runs) width /= INDEX_RUN;
    struct warp_found f;
    f.m = 0;
    {
        uint32_t key[WARP_UNITS];
        if (width == 1) { /* in any order */
            float4 v[WARP_UNITS / 4];
#pragma unroll
            for (int i = 0; i < WARP_UNITS / 4; i++) {
                const int32_t u = (i * 32 + lane) * 4;
                if (u < n) v[i] = *(const float4 *)(from + u);
            }
#pragma unroll
            for (int i = 0; i < WARP_UNITS / 4; i++) {
                const int32_t u = (i * 32 + lane) * 4;
                const float x[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
                for (int j = 0; j < 4; j++) key[4 * i + j] = u + j < n ? dev_order_of(x[j]) : 0;
            }
        } else {
#pragma unroll 4
            for (int32_t u = lane; u < 32 * WARP_UNITS; u += 32)
                room->unit[u] = unit_key(from, n, width, u);
#pragma unroll
            for (int i = 0; i < WARP_UNITS; i++) key[i] = room->unit[i * 32 + lane];
            __syncwarp();
        }
        f.floor = f.bound = warp_threshold(key, want, want / 8, 0, 32, 32 * WARP_UNITS);
    }
    /* Of four neighbours. */
    const auto bests = [&](int32_t i) {
        const float all = kern_float(0x7f800000u);
        return by_runs && i < n_runs ? *(const float4 *)(r.best + i)
                                     : make_float4(all, all, all, all);
    };
    int32_t listed = 0;
    float4 ahead = bests(lane * 4);
    for (int32_t i0 = 0; i0 < n_runs; i0 += WARP_LIST) {
        const int32_t i = i0 + lane * 4;
        const float best[4] = {ahead.x, ahead.y, ahead.z, ahead.w};
        ahead = bests(i + WARP_LIST);
        uint32_t mask = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j < n_runs && (best[j] >= least_of(f.bound) || f.bound == 0)) mask |= 1u << j;
        int32_t to = __popc(mask);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int32_t o = __shfl_up_sync(~0u, to, d);
            if (lane >= d) to += o;
        }
        const int32_t total = listed + __shfl_sync(~0u, to, 31);
        to += listed - __popc(mask);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (mask >> j & 1) {
                room->run[to++] = i + j;
                asm volatile("prefetch.global.L2 [%0];" ::"l"(
                    __cvta_generic_to_global(r.s + (int64_t)(i + j) * INDEX_RUN)));
            }
        __syncwarp();
        /* By 32, of which the next are on their way meanwhile; what is left waits for more. */
        const int32_t stop = i0 + WARP_LIST >= n_runs ? total : total / 32 * 32;
        const auto entry = [&](int32_t x) { return x < total ? room->run[x] * INDEX_RUN : r.n; };
        int32_t taken = 0, e = entry(lane);
        float4 v[INDEX_RUN / 4], next[INDEX_RUN / 4];
        if (taken < stop) run_load(r, e, next);
        while (taken < stop) {
            const int32_t now = e;
#pragma unroll
            for (int l = 0; l < INDEX_RUN / 4; l++) v[l] = next[l];
            taken += 32;
            if (taken < stop) {
                e = entry(taken + lane);
                run_load(r, e, next);
            }
            warp_take(r, now, v, want, room, &f);
        }
        listed = taken < total ? total - taken : 0;
        const int32_t later = lane < listed ? room->run[taken + lane] : 0;
        __syncwarp();
        if (lane < listed) room->run[lane] = later;
    }
    __syncwarp();
    uint32_t kept = ~0u, not_kept = 0;
    warp_best(room, f.m, r.topk, f.floor, [&](int i, uint32_t key, bool is, bool keep, int32_t at) {
        if (keep) {
            r.out[at] = (int32_t)room->found[i].y;
            kept = key < kept ? key : kept;
        } else if (is) {
            not_kept = key > not_kept ? key : not_kept;
        }
    });
    tell_margin(r, kept, not_kept);
}

/* What there is to do for a row besides choosing; false: it chooses nothing. */
static __device__ __forceinline__ bool open_row(const struct kern_index_select &p,
                                                const struct index_score &sc, struct row *r)
{
    const int32_t t = sc.row0 + blockIdx.x, i = sc.b.row_seq[t];
    cuda_hurry();
    if (i < 0) return false;
    const struct cuda_seq q = sc.b.seqs[i];
    r->s = sc.out + (int64_t)blockIdx.x * sc.ld;
    r->best = sc.best + (int64_t)blockIdx.x * (sc.ld / INDEX_RUN);
    r->n = dev_visible(sc.kv, q, t);
    r->topk = q.topk;
    r->t = t;
    r->out = p.selected + (int64_t)t * p.sel_ld;
    r->margin = p.margin;
    cuda_await();
    return true;
}
template <int THREADS>
static __device__ __forceinline__ void close_row(const struct kern_index_select &p,
                                                 const struct row &r, const int32_t *score_rows)
{
    const int32_t kept = r.n < r.topk ? r.n : r.topk;
    if (r.n <= r.topk)
        for (int32_t e = threadIdx.x; e < r.n; e += THREADS) r.out[e] = e;
    if (threadIdx.x == 0) {
        p.n_selected[r.t] = kept;
        if (p.margin && r.n <= r.topk) p.margin[r.t] = kern_float(0x7f800000u);
    }
    for (int64_t e = kept + (int64_t)threadIdx.x; e < p.sel_ld; e += THREADS) r.out[e] = -1;
    const int64_t to = p.scores ? score_row(p, score_rows, r.t) : -1;
    if (to < 0) return;
    for (int64_t e = threadIdx.x; e < p.score_ld; e += THREADS)
        p.scores[to * p.score_ld + e] = e < r.n ? r.s[e] : -kern_float(0x7f800000u);
}

static __global__ void __launch_bounds__(TOPK_THREADS)
    select_kernel(const __grid_constant__ struct kern_index_select p,
                  const __grid_constant__ struct index_score sc, const int32_t *score_rows,
                  int32_t cap)
{
    constexpr int THREADS = TOPK_THREADS;
    extern __shared__ __align__(16) uint32_t room[];
    __shared__ struct select_shared sh;
    struct row r;
    dev_digits_open(&sh.digits);
    __syncthreads();
    if (!open_row(p, sc, &r)) return;
    if (r.n > r.topk && r.topk > 0) {
        int turn = 0, odd = 0;
        uint32_t *key = room;
        int32_t *index = (int32_t *)(room + cap);
        /* For the margin the first that is not kept must be there too. */
        const int32_t want = r.topk + (p.margin ? 1 : 0);
        const int32_t n_runs = (r.n + INDEX_RUN - 1) / INDEX_RUN;
        int32_t m = -1;
        if (n_runs < 2 * want && r.n <= 2 * cap) {
            load_all<THREADS>(r, key);
            index = NULL;
            m = r.n;
        } else if (n_runs > want && n_runs <= 4 * MOST_FOURS * THREADS) {
            m = gather<THREADS>(r, want, cap, key, index, (uint16_t *)(index + cap), &sh, &turn,
                                &odd);
        }
        if (m >= 0)
            pick<THREADS>(r, key, index, m, &sh, turn, odd);
        else
            scan<THREADS>(r, &sh.top);
    }
    close_row<THREADS>(p, r, score_rows);
}

/* The same by a warp: where rows are many, theirs is the least work. */
static __global__ void __launch_bounds__(32, WARP_CTAS)
    warp_kernel(const __grid_constant__ struct kern_index_select p,
                const __grid_constant__ struct index_score sc, const int32_t *score_rows)
{
    __shared__ union warp_room room;
    struct row r;
    if (!open_row(p, sc, &r)) return;
    if (r.n > r.topk && r.topk > 0) warp_select(r, r.topk + (p.margin ? 1 : 0), &room);
    close_row<32>(p, r, score_rows);
}

extern "C" int kern_index_select_cuda(struct kern_stream *s, const struct kern_index_select *p)
{
    struct index_score sc = {};
    if (p->T == 0 || p->n_seqs == 0) return 0;
    int rc = cuda_batch_of(s, p->seqs, p->n_seqs, &sc.b);
    if (rc < 0) return rc;
    const int32_t T = p->T < sc.b.T ? p->T : sc.b.T;
    if (T == 0) return 0;
    const struct kern_kv_layer *y = &p->layout->layer[p->layer];
    int64_t ld = MIN_LD;
    for (int32_t i = 0; i < p->n_seqs; i++)
        while (ld < (p->seqs[i].pos0 + p->seqs[i].n_rows) / y->ratio) ld *= 2;
    int32_t rows = T;
    if (ld * T <= BATCH_FLOATS)
        ld = BATCH_FLOATS / T / LD_STEP * LD_STEP;
    else
        rows = BATCH_FLOATS / ld < 4 ? 4 : (int32_t)(BATCH_FLOATS / ld) / 4 * 4;
    const int64_t floats = ld * rows > BATCH_FLOATS ? ld * rows : BATCH_FLOATS;
    sc.q = p->q;
    sc.wt = p->wt;
    sc.factor = p->factor;
    sc.kv = cuda_kv_of(p->pages, p->layout, p->layer);
    sc.fmt = p->layout->spec.ik_fmt;
    sc.key_off = y->index_off;
    sc.H = p->H;
    sc.act = p->act;
    sc.all = p->scores != NULL;
    sc.ld = ld;
    sc.out = (float *)cuda_scratch(s, CUDA_SLOT_OP, (size_t)floats * sizeof(float));
    sc.best = (float *)cuda_scratch(s, CUDA_SLOT_OP2, (size_t)(floats / INDEX_RUN) * sizeof(float));
    const int32_t *score_rows = NULL;
    if (p->scores && p->score_rows) {
        score_rows = (const int32_t *)cuda_send(s, p->score_rows,
                                                (size_t)p->n_score_rows * sizeof *score_rows);
        if (!score_rows) return cuda_done(s, "index_select");
    }
    if (!sc.out || !sc.best) return cuda_done(s, "index_select");
    const int32_t cap = room_bytes(CAP_MOST) + 16384 <= s->max_shared ? CAP_MOST : CAP;
    CUDA_SHARED(select_kernel, room_bytes(CAP_MOST));
    for (int32_t t = 0; t < T; t += rows) {
        sc.row0 = t;
        sc.n_rows = T - t < rows ? T - t : rows;
        index_score_launch(s, &sc);
        if (T > 2 * s->n_sm && p->sel_ld <= WARP_TOPK)
            cuda_launch_early(s, warp_kernel, dim3((unsigned)sc.n_rows), 32, 0, *p, sc, score_rows);
        else
            cuda_launch_early(s, select_kernel, dim3((unsigned)sc.n_rows), TOPK_THREADS,
                              room_bytes(cap), *p, sc, score_rows, cap);
    }
    return cuda_done(s, "index_select");
}
