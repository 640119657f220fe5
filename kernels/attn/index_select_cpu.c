/* kernels/attn/index_select_cpu.c - scores the visible entries of each row and keeps the best.
 *
 * Rows are taken in blocks of one sequence, blocks in batches whose scores fit a fixed budget.
 * Round one, per block and run of 64 entries: the keys are dequantized once for all rows of the
 * block and turned into columns, so that sixteen entries are summed side by side over the key's
 * width (k ascending, one chain each). Round two, per row: the k-th highest score is found by
 * counting digits of the order-preserving integer form of the floats (exact, whatever the values),
 * then one ascending scan takes what is above it and the lowest-numbered of its equals.
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
    if (!p->scores) return;
    float *out = p->scores + t * p->score_ld;
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
    int64_t *above, *equal; /* [parts][entries] */
};

enum { COUNT_PART = 4096 };

/* How many of one stretch of scores stand above each entry asked for, and beside it. */
static void count_part(void *arg, int64_t part, int thread)
{
    const struct count_job *j = arg;
    const struct kern_index_rank *p = j->p;
    int64_t i0 = part * COUNT_PART, i1 = j->n - i0 < COUNT_PART ? j->n : i0 + COUNT_PART;
    (void)thread;
    for (int32_t a = 0; a < p->n_entries; a++) {
        uint32_t own = order_of(j->scores[p->entries[a]]);
        int64_t above = 0, equal = 0;
        for (int64_t i = i0; i < i1; i++) {
            uint32_t u = order_of(j->scores[i]);
            above += u > own || (u == own && i < p->entries[a]);
            equal += u == own && i != p->entries[a];
        }
        j->above[part * p->n_entries + a] = above;
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

int KERN_ISA(kern_index_rank)(struct kern_stream *s, const struct kern_index_rank *p)
{
    const struct kern_index_select select = {.q = p->q,
                                             .wt = p->wt,
                                             .factor = p->factor,
                                             .pages = p->pages,
                                             .layout = p->layout,
                                             .layer = p->layer,
                                             .seqs = p->seq,
                                             .n_seqs = 1,
                                             .T = 1,
                                             .H = p->H,
                                             .act = p->act};
    struct job j = {.p = &select, .keys = p->keys, .w = p->layout->spec.index_dim, .n_blocks = 1};
    struct block b = {.q = p->seq, .row0 = p->seq->row0, .n_rows = 1};
    j.wp = kern_pad16(j.w);
    b.n = visible(&select, p->seq, b.row0);
    int64_t parts = (b.n + COUNT_PART - 1) / COUNT_PART, room = parts * p->n_entries;
    j.blocks = &b;
    j.scratch = kern_scratch_each(
        s, KERN_SLOT_OP, (size_t)((2 * ENTRIES + p->H) * j.wp + kern_pad16(p->H)) * 4, &j.stride);
    j.scores = kern_scratch(s, KERN_SLOT_OP3, (size_t)b.n * 4 + 64);
    struct count_job c = {.p = p, .scores = j.scores, .n = b.n};
    c.above = kern_scratch(s, KERN_SLOT_OP2, (size_t)room * 16 + 64);
    if (!j.scratch || !j.scores || !c.above) return TOW_ENOMEM;
    c.equal = c.above + room;
    kern_parallel(s, (b.n + ENTRIES - 1) / ENTRIES, score_part, &j);
    kern_parallel(s, parts, count_part, &c);
    for (int32_t a = 0; a < p->n_entries; a++) {
        int64_t above = 0, equal = 0;
        for (int64_t i = 0; i < parts; i++) {
            above += c.above[i * p->n_entries + a];
            equal += c.equal[i * p->n_entries + a];
        }
        p->ranks[a] = (struct kern_rank){
            .rank = (int32_t)above + 1, .equal = (int32_t)equal, .score = j.scores[p->entries[a]]};
    }
    border(j.scores, b.n, p->seq->topk, p->kth, p->next);
    return 0;
}
