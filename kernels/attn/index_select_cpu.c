/* kernels/attn/index_select_cpu.c - scores the visible entries of each row and keeps the best.
 *
 * Rows are taken in blocks of one sequence, blocks in batches whose scores fit a fixed budget.
 * Round one, per block and run of 64 entries: the keys are dequantized once for all rows of the
 * block and turned into columns, so that sixteen entries are summed side by side over the key's
 * width (k ascending, one chain each). Round two, per row: the k-th highest score is found by
 * counting digits of the order-preserving integer form of the floats (exact, whatever the values),
 * then one ascending scan takes what is above it and the lowest-numbered of its equals.
 *
 * Ranks of single entries need no order at all: stretches of scores are compared with each entry's
 * and counted, stretches in parallel.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/kvpack/kvpack.h"
#include "kernels/kvpack/load_cpu.h"
#include "kernels/ops.h"

#include "common/base/err.h"

enum {
    ENTRIES = 64,            /* of a scoring part */
    ROWS = 16,               /* of a block */
    BATCH_FLOATS = 16 << 20, /* of scores at a time; a single block may need more */
    MAX_BLOCKS = 1024,
};

struct block {
    const struct kern_seq *q;
    int32_t row0, n_rows; /* rows of the batch tensors */
    int64_t n;            /* entries the last row sees */
    int64_t scores;       /* first of n_rows x n floats */
    int64_t parts;        /* scoring parts before this block */
    int32_t rows;         /* rows before this block */
};

struct job {
    const struct kern_index_select *p;
    int keys; /* KERN_KEYS_OWN, or an enum kern_shadow */
    struct block *blocks;
    float *scores;
    uint8_t *scratch;
    size_t stride;
    int32_t n_blocks, w;
    int64_t wp;
};

static int64_t visible(const struct kern_index_select *p, const struct kern_seq *q, int32_t t)
{
    return (q->pos0 + (t - q->row0) + 1) / p->layout->layer[p->layer].ratio;
}

/* A tile: heads x vectors of entries. */
#if KERN_ISA_AVX512
enum { SCORE_H = 4, SCORE_E = 4 };
#else
enum { SCORE_H = 2, SCORE_E = 2 };
#endif

/* s[e] += sum over nh heads, ascending, of wt[h] * max(0, q[h] . key e); keys stand in columns. */
V_INLINE void score_tile(const float *q, int64_t ld_q, const float *kt, int32_t w, const float *wt,
                         float *s, const int nh)
{
    v16 acc[SCORE_H][SCORE_E];
#pragma GCC unroll 8
    for (int h = 0; h < nh; h++)
#pragma GCC unroll 8
        for (int e = 0; e < SCORE_E; e++) acc[h][e] = v_zero();
    for (int32_t k = 0; k < w; k++) {
        v16 key[SCORE_E];
#pragma GCC unroll 8
        for (int e = 0; e < SCORE_E; e++) key[e] = v_load(kt + k * ENTRIES + 16 * e);
#pragma GCC unroll 8
        for (int h = 0; h < nh; h++) {
            v16 x = v_set1(q[h * ld_q + k]);
#pragma GCC unroll 8
            for (int e = 0; e < SCORE_E; e++) acc[h][e] = v_fma(x, key[e], acc[h][e]);
        }
    }
#pragma GCC unroll 8
    for (int e = 0; e < SCORE_E; e++) {
        v16 sum = v_load(s + 16 * e);
#pragma GCC unroll 8
        for (int h = 0; h < nh; h++) sum = v_fma(v_set1(wt[h]), v_max(v_zero(), acc[h][e]), sum);
        v_store(s + 16 * e, sum);
    }
}

static void score_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_index_select *p = j->p;
    const struct kern_kv_layer *y = &p->layout->layer[p->layer];
    const struct block *b = j->blocks;
    while (b + 1 < j->blocks + j->n_blocks && b[1].parts <= part) b++;
    int64_t e0 = (part - b->parts) * ENTRIES, n = b->n - e0 < ENTRIES ? b->n - e0 : ENTRIES;
    float *keys = (float *)(j->scratch + j->stride * (size_t)thread), *kt = keys + ENTRIES * j->wp;
    float *q = kt + ENTRIES * j->wp, *wt = q + p->H * j->wp, sum[ENTRIES];
    const bool own = j->keys == KERN_KEYS_OWN;
    enum kern_ik_fmt fmt =
        own ? p->layout->spec.ik_fmt : kern_shadow_fmt((enum kern_shadow)j->keys);
    for (int64_t i = 0; i < n; i++) {
        int64_t row;
        const uint8_t *at =
            own ? kern_entry_part(p->pages, p->layout, p->layer, true, b->q, e0 + i, &row)
                : kern_shadow_part(p->pages, p->layout, p->layer, (enum kern_shadow)j->keys, b->q,
                                   e0 + i, &row);
        kern_ik_row(fmt, at, y->per_page, row, keys + i * j->wp, j->w);
    }
    memset(keys + n * j->wp, 0, (size_t)((ENTRIES - n) * j->wp) * 4);
    for (int64_t e = 0; e < ENTRIES; e += 16)
        for (int64_t k = 0; k < j->wp; k += 16)
            v_transpose(keys + e * j->wp + k, j->wp, kt + k * ENTRIES + e, ENTRIES);
    for (int32_t r = 0; r < b->n_rows; r++) {
        int64_t t = b->row0 + r, seen = visible(p, b->q, (int32_t)t) - e0;
        float *out = j->scores + b->scores + r * b->n + e0;
        if (seen > n) seen = n;
        for (int64_t i = seen < 0 ? 0 : seen; i < n; i++) out[i] = -INFINITY;
        if (seen <= 0) continue;
        kern_row_load(kern_at(p->wt, t * p->H, p->act), p->act, p->H, wt);
        for (int32_t h = 0; h < p->H; h++) {
            wt[h] *= p->factor;
            kern_row_load(kern_at(p->q, (t * p->H + h) * j->w, p->act), p->act, j->w,
                          q + h * j->wp);
        }
        memset(sum, 0, sizeof sum);
        for (int64_t e = 0; e < seen; e += 16 * SCORE_E) {
            int32_t h = 0;
            for (; h + SCORE_H <= p->H; h += SCORE_H)
                score_tile(q + h * j->wp, j->wp, kt + e, j->w, wt + h, sum + e, SCORE_H);
            for (; h < p->H; h++)
                score_tile(q + h * j->wp, j->wp, kt + e, j->w, wt + h, sum + e, 1);
        }
        memcpy(out, sum, (size_t)seen * 4);
    }
}

/* Integers in the order of the floats; NaN below everything, -0 with +0. */
V_INLINE uint32_t order_of(float x)
{
    if (x != x) return 0;
    uint32_t u = kern_bits(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The k-th highest key (1 <= k <= n); *equal: how many of its equals belong to the k. */
static uint32_t kth_highest(const float *s, int64_t n, int64_t k, int64_t *equal)
{
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t count[256] = {0};
        uint32_t mask = shift == 24 ? 0 : ~0u << (shift + 8);
        for (int64_t i = 0; i < n; i++) {
            uint32_t u = order_of(s[i]);
            if ((u & mask) == prefix) count[(u >> shift) & 255]++;
        }
        int digit = 255;
        for (; digit > 0 && count[digit] < k; digit--) k -= count[digit];
        prefix |= (uint32_t)digit << shift;
    }
    *equal = k;
    return prefix;
}

static void select_row(const struct kern_index_select *p, int64_t t, const float *s, int64_t n,
                       int32_t topk)
{
    int32_t *out = p->selected + t * p->sel_ld;
    int64_t at = 0;
    float margin = INFINITY;
    if (n <= topk) {
        for (; at < n; at++) out[at] = (int32_t)at;
    } else {
        int64_t equal, ties = 0;
        uint32_t kth = kth_highest(s, n, topk, &equal), below = 0;
        float k_score = NAN, next = NAN;
        for (int64_t i = 0; i < n; i++) {
            uint32_t u = order_of(s[i]);
            if (u > kth || (u == kth && ties < equal)) {
                out[at++] = (int32_t)i;
                if (u == kth) {
                    ties++;
                    k_score = s[i];
                }
            } else if (u >= below) {
                below = u;
                next = s[i];
            }
        }
        margin = k_score - next;
        if (margin != margin) margin = k_score == next ? 0.0f : INFINITY;
    }
    p->n_selected[t] = (int32_t)at;
    for (; at < p->sel_ld; at++) out[at] = -1;
    if (p->margin) p->margin[t] = margin;
}

/* The row of p->scores that belongs to row t; -1: none. */
static int64_t score_row(const struct kern_index_select *p, int32_t t)
{
    if (!p->score_rows) return t;
    int32_t lo = 0, hi = p->n_score_rows;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (p->score_rows[mid] < t)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < p->n_score_rows && p->score_rows[lo] == t ? lo : -1;
}

static void select_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_index_select *p = j->p;
    const struct block *b = j->blocks;
    (void)thread;
    while (b + 1 < j->blocks + j->n_blocks && b[1].rows <= part) b++;
    int32_t r = (int32_t)(part - b->rows), t = b->row0 + r;
    const float *s = j->scores + b->scores + r * b->n;
    select_row(p, t, s, visible(p, b->q, t), b->q->topk);
    int64_t to = p->scores ? score_row(p, t) : -1;
    if (to < 0) return;
    float *out = p->scores + to * p->score_ld;
    memcpy(out, s, (size_t)b->n * 4);
    for (int64_t i = b->n; i < p->score_ld; i++) out[i] = -INFINITY;
}

int KERN_ISA(kern_index_select)(struct kern_stream *s, const struct kern_index_select *p)
{
    struct job j = {.p = p, .keys = KERN_KEYS_OWN, .w = p->layout->spec.index_dim};
    if (p->T == 0 || p->n_seqs == 0) return 0;
    j.wp = kern_pad16(j.w);
    j.blocks = kern_scratch(s, KERN_SLOT_OP2, MAX_BLOCKS * sizeof *j.blocks);
    j.scratch = kern_scratch_each(
        s, KERN_SLOT_OP, (size_t)((2 * ENTRIES + p->H) * j.wp + kern_pad16(p->H)) * 4, &j.stride);
    if (!j.blocks || !j.scratch) return TOW_ENOMEM;
    int32_t seq = 0, row = 0; /* next row to place: row of sequence seq */
    while (seq < p->n_seqs) {
        int64_t floats = 0, parts = 0;
        int32_t rows = 0;
        for (j.n_blocks = 0; seq < p->n_seqs && j.n_blocks < MAX_BLOCKS;) {
            const struct kern_seq *q = &p->seqs[seq];
            if (row >= q->n_rows) {
                seq++;
                row = 0;
                continue;
            }
            struct block b = {.q = q, .row0 = q->row0 + row, .scores = floats, .parts = parts};
            b.rows = rows;
            b.n_rows = q->n_rows - row < ROWS ? q->n_rows - row : ROWS;
            b.n = visible(p, q, b.row0 + b.n_rows - 1);
            if (floats > 0 && floats + b.n_rows * b.n > BATCH_FLOATS) break;
            j.blocks[j.n_blocks++] = b;
            floats += b.n_rows * b.n;
            parts += (b.n + ENTRIES - 1) / ENTRIES;
            rows += b.n_rows;
            row += b.n_rows;
        }
        j.scores = kern_scratch(s, KERN_SLOT_OP3, (size_t)floats * 4 + 64);
        if (!j.scores) return TOW_ENOMEM;
        kern_parallel(s, parts, score_part, &j);
        kern_parallel(s, rows, select_part, &j);
    }
    return 0;
}

struct count_job {
    const struct kern_index_rank *p;
    const float *scores;
    int64_t n;
    int64_t *before, *equal; /* [parts, n_entries] */
};

enum { COUNT_PART = 4096 }; /* scores of a stretch: 16 KiB stay in the first-level cache */

static int64_t count_nan(const float *s, int64_t n)
{
    int64_t nan = 0;
    for (int64_t i = 0; i < n; i++) nan += s[i] != s[i];
    return nan;
}

/* Of n scores, those above x and those below it; NaN is neither. Exact, as n <= COUNT_PART. */
static void count(const float *s, int64_t n, float x, int64_t *above, int64_t *below)
{
    const v16 own = v_set1(x), one = v_set1(1.0f), none = v_zero();
    v16 up = none, down = none;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 v = v_load(s + i);
        up = v_add(up, v_sel_lt(own, v, one, none));
        down = v_add(down, v_sel_lt(v, own, one, none));
    }
    *above = (int64_t)v_sum(up), *below = (int64_t)v_sum(down);
    for (; i < n; i++) {
        *above += s[i] > x;
        *below += s[i] < x;
    }
}

/* For each entry asked for: how many scores of one stretch go before it, and how many equal it. The
 * stretch is read from memory once, the entries take turns on it. */
static void count_part(void *arg, int64_t part, int thread)
{
    const struct count_job *j = arg;
    const struct kern_index_rank *p = j->p;
    const int64_t i0 = part * COUNT_PART, n = j->n - i0 < COUNT_PART ? j->n - i0 : COUNT_PART;
    const float *s = j->scores + i0;
    const int64_t nan = count_nan(s, n);
    (void)thread;
    for (int32_t a = 0; a < p->n_entries; a++) {
        const int64_t e = p->entries[a] - i0, lower = e < 0 ? 0 : e < n ? e : n;
        const float x = j->scores[p->entries[a]];
        int64_t lower_nan = lower == n ? nan : nan ? count_nan(s, lower) : 0;
        int64_t above[2], below[2]; /* among the lower entries, among the rest */
        count(s, lower, x, &above[0], &below[0]);
        count(s + lower, n - lower, x, &above[1], &below[1]);
        int64_t lower_equal, equal;
        if (x != x) {
            above[0] = lower - lower_nan;
            above[1] = n - nan - above[0];
            lower_equal = lower_nan;
            equal = nan;
        } else {
            lower_equal = lower - lower_nan - above[0] - below[0];
            equal = n - nan - above[0] - above[1] - below[0] - below[1];
        }
        j->before[part * p->n_entries + a] = above[0] + above[1] + lower_equal;
        j->equal[part * p->n_entries + a] = equal;
    }
}

/* The last score that is kept and the first that is not. */
static void border(const float *s, int64_t n, int32_t topk, float *kth, float *next)
{
    *kth = *next = NAN;
    if (n == 0) return;
    int64_t k = n < topk ? n : topk, equal, ties = 0;
    uint32_t u_kth = kth_highest(s, n, k, &equal), below = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = order_of(s[i]);
        if (u == u_kth && ties < equal) {
            ties++;
            *kth = s[i];
        } else if (u <= u_kth && u >= below) {
            below = u;
            *next = s[i];
        }
    }
}

/* The row's scores into scratch. */
static const float *score_one(struct kern_stream *s, const struct kern_index_rank *p, int64_t n)
{
    const struct kern_index_select select = {.q = p->q,
                                             .wt = p->wt,
                                             .factor = p->factor,
                                             .pages = p->pages,
                                             .layout = p->layout,
                                             .layer = p->layer,
                                             .seqs = p->seq,
                                             .n_seqs = 1,
                                             .T = p->T,
                                             .H = p->H,
                                             .act = p->act};
    struct block b = {.q = p->seq, .row0 = p->seq->row0, .n_rows = 1, .n = n};
    struct job j = {
        .p = &select, .keys = p->keys, .blocks = &b, .w = p->layout->spec.index_dim, .n_blocks = 1};
    j.wp = kern_pad16(j.w);
    j.scratch = kern_scratch_each(
        s, KERN_SLOT_OP, (size_t)((2 * ENTRIES + p->H) * j.wp + kern_pad16(p->H)) * 4, &j.stride);
    j.scores = kern_scratch(s, KERN_SLOT_OP3, (size_t)n * 4 + 64);
    if (!j.scratch || !j.scores) return NULL;
    kern_parallel(s, (n + ENTRIES - 1) / ENTRIES, score_part, &j);
    return j.scores;
}

int KERN_ISA(kern_index_rank)(struct kern_stream *s, const struct kern_index_rank *p)
{
    struct count_job c = {.p = p, .scores = p->scores};
    c.n = (p->seq->pos0 + 1) / p->layout->layer[p->layer].ratio;
    if (!c.scores) c.scores = score_one(s, p, c.n);
    int64_t parts = (c.n + COUNT_PART - 1) / COUNT_PART, room = parts * p->n_entries;
    c.before = kern_scratch(s, KERN_SLOT_OP2, (size_t)room * 2 * sizeof *c.before + 64);
    if (!c.scores || !c.before) return TOW_ENOMEM;
    c.equal = c.before + room;
    kern_parallel(s, p->n_entries ? parts : 0, count_part, &c);
    for (int32_t a = 0; a < p->n_entries; a++) {
        int64_t before = 0, equal = 0;
        for (int64_t i = 0; i < parts; i++) {
            before += c.before[i * p->n_entries + a];
            equal += c.equal[i * p->n_entries + a];
        }
        p->ranks[a] = (struct kern_rank){.rank = (int32_t)before + 1,
                                         .equal = (int32_t)equal - 1, /* itself */
                                         .score = c.scores[p->entries[a]]};
    }
    border(c.scores, c.n, p->seq->topk, p->kth, p->next);
    return 0;
}
