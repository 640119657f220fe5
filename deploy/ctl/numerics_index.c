/* ctl/numerics_index.c - selection against an exact sort, and index scores against double.
 *
 * Selection is driven with scores of our choice: two heads, one along the first dimension of the
 * keys and one against it, with weights +1 and -1, give score = max(0, k) - max(0, -k) = k exactly.
 * Scores are judged twice: against double on the very keys and queries that are stored (a kernel's
 * fault), and by the entries that selection would keep against keys that were never quantized (a
 * format's cost, or a fault in rotation, Hadamard or scales). The second bound is measured, not
 * chosen: what the format's definition, followed in double, keeps of the same rows. */
#include "deploy/ctl/numerics_impl.h"

#include "common/base/err.h"
#include "kernels/numeric.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_ENTRIES = 1 << 20, TOPK = 512, KEY_WIDTH = 32, SAMPLE_ROWS = 32 };

/* ------------------------------------------------------------------ selection */

/* Entries in the order of selection: higher score first, then lower index; NaN after all. */
struct ranked {
    double score;
    int64_t at;
};
static int by_rank(const void *pa, const void *pb)
{
    const struct ranked *a = pa, *b = pb;
    bool na = isnan(a->score), nb = isnan(b->score);
    if (na != nb) return na ? 1 : -1;
    if (!na && a->score != b->score) return a->score > b->score ? -1 : 1;
    return (a->at > b->at) - (a->at < b->at);
}

enum kind { DISTINCT, TIES, NEGINF, LARGEST };

static float score_of_kind(struct ctl_num *c, enum kind kind, int64_t i)
{
    float x = (float)ctl_num_random(c);
    switch (kind) {
    case TIES: return (float)((int)(x * 4)) * 0.5f; /* 0 from both sides, and six other values */
    case NEGINF: /* fewer finite scores than are kept */ return i % 5000 == 17 ? x : -INFINITY;
    case LARGEST: return 1.0f + x * 0x1p-12f; /* a narrow range: few distinct values, many digits */
    default: return x;
    }
}

/* Wrong entries of one selection among n scores; the op's own list of scores is checked too. */
static int selection(struct ctl_num *c, enum kind kind, int64_t n, int32_t topk, int64_t *wrong,
                     struct tow_err *err)
{
    const size_t mark = ctl_num_mark(c);
    struct kern_kv_layout l;
    struct kern_kv_spec spec = {.n_layers = 1,
                                .ratios = {4},
                                .head_dim = 2,
                                .window = 1,
                                .index_dim = KEY_WIDTH,
                                .kv_fmt = KERN_KV_BF16,
                                .ik_fmt = KERN_IK_F32};
    int rc = kern_kv_layout_init(&l, &spec, err);
    if (rc < 0) return rc;
    const int64_t n_pages = kern_kv_pages_for(n * 4, l.page_tokens), per = l.layer[0].per_page;
    uint8_t *pages = ctl_num_hold(c, n_pages, (size_t)l.page_bytes);
    uint8_t *tail = ctl_num_hold(c, 1, (size_t)l.tail_bytes);
    uint32_t *ids = ctl_num_hold(c, n_pages, sizeof *ids);
    float *q = ctl_num_hold(c, 2 * KEY_WIDTH, sizeof *q), *wt = ctl_num_hold(c, 2, sizeof *wt);
    int32_t *selected = ctl_num_hold(c, topk + 1, sizeof *selected),
            *n_selected = ctl_num_hold(c, 1, 4);
    float *scores = ctl_num_hold(c, n, sizeof *scores);
    struct ranked *order = malloc((size_t)n * sizeof *order);
    if (!order || c->no_memory) {
        free(order);
        return tow_fail(err, TOW_ENOMEM, "numerics: no memory for %lld scores", (long long)n);
    }
    for (int64_t i = 0; i < n_pages; i++) ids[i] = (uint32_t)(n_pages - 1 - i);
    for (int64_t i = 0; i < n; i++) {
        float key[KEY_WIDTH] = {score_of_kind(c, kind, i)};
        order[i] = (struct ranked){key[0], i};
        kern_ik_store(KERN_IK_F32, pages + ids[i / per] * l.page_bytes + l.layer[0].index_off, per,
                      i % per, key, KEY_WIDTH);
    }
    q[0] = 1, q[KEY_WIDTH] = -1;
    wt[0] = 1, wt[1] = -1;
    struct kern_seq seq = {.n_rows = 1,
                           .pos0 = n * 4 - 1,
                           .page_ids = ids,
                           .n_pages = (int32_t)n_pages,
                           .tail = tail,
                           .topk = topk};
    CTL_NUM_OP(c, rc, index_select, .q = q, .wt = wt, .factor = 1, .pages = pages, .layout = &l,
               .seqs = &seq, .n_seqs = 1, .T = 1, .H = 2, .selected = selected,
               .n_selected = n_selected, .sel_ld = topk + 1, .scores = scores, .score_ld = n,
               .act = KERN_F32);
    if (rc == 0) {
        uint8_t *want = calloc((size_t)n, 1);
        const int64_t k = n < topk ? n : topk;
        if (!want) rc = tow_fail(err, TOW_ENOMEM, "numerics: no memory");
        for (int64_t i = 0; rc == 0 && i < n; i++) *wrong += !(scores[i] == (float)order[i].score);
        qsort(order, (size_t)n, sizeof *order, by_rank);
        for (int64_t i = 0; rc == 0 && i < k; i++) want[order[i].at] = 1;
        for (int64_t i = 0; rc == 0 && i < topk + 1; i++) {
            int32_t at = selected[i];
            /* k wanted entries, ascending, then -1. */
            bool good = i >= k ? at == -1
                               : at >= 0 && at < n && want[at] && (i == 0 || at > selected[i - 1]);
            *wrong += !good;
        }
        if (rc == 0) *wrong += *n_selected != k;
        free(want);
    }
    free(order);
    ctl_num_release(c, mark);
    return rc;
}

int ctl_num_topk(struct ctl_num *c, struct tow_err *err)
{
    const int64_t most = c->n->n_entries ? c->n->n_entries : DEFAULT_ENTRIES;
    const int64_t few = most < 65536 ? most : 65536;
    static const struct {
        const char *name, *meaning;
        enum kind kind;
    } rows[] = {
        {"topk.exact", "selection keeps exactly the highest scores", DISTINCT},
        {"topk.ties", "equal scores: the lower entry wins, on every device alike", TIES},
        {"topk.neginf", "rows with fewer finite scores than are kept, and rows with none", NEGINF},
        {"topk.largest", "the longest context's selection is exact too", LARGEST},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int64_t n = rows[i].kind == LARGEST ? most : few;
        /* One past what is kept, as many as kept, fewer, and many more. */
        const int64_t sizes[] = {n, TOPK + 1, TOPK, 3};
        int64_t wrong = 0;
        int rc = 0;
        for (int j = 0; rc == 0 && j < (rows[i].kind == LARGEST ? 1 : 4); j++)
            rc = selection(c, rows[i].kind, sizes[j], TOPK, &wrong, err);
        if (rc == 0) rc = selection(c, rows[i].kind, few, 1, &wrong, err);
        if (rc < 0) return rc;
        ctl_num_row(c, rows[i].name, (double)wrong, 0, "entries that an exact sort does not keep",
                    rows[i].meaning, "%lld entries, top %d and top 1", (long long)n, TOPK);
    }
    return 0;
}

/* ------------------------------------------------------------------ scores */

/* One layer's sample rows, and what the three formats are compared with. */
struct layer_rows {
    int32_t layer, R; /* rows */
    int64_t n;        /* entries of the whole prompt */
    int64_t pos[SAMPLE_ROWS];
    uint16_t *q_raw; /* [R, H, w] before rotation; device memory */
    uint16_t *wt;    /* [R, H] */
    double *keys[2]; /* [n, w] rotated: as they are, and with bf16 where the model rounds */
    double *truth;   /* [R, n] scores of unquantized keys and queries */
};

/* What the rows of all layers say of one format. */
struct tally {
    double worst_error;            /* of a score, over its rounding bound */
    double jaccard, by_definition; /* sums over rows */
    double worst, shift;           /* least Jaccard of a row; sum of rank shifts */
    int64_t worst_pos, most_shift, n_shifts, n_rows;
    int32_t worst_layer;
};

static double dot(const double *a, const double *b, int32_t n)
{
    double s = 0;
    for (int32_t i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

static double factor_of(const struct ctl_num *c)
{
    return (float)(1.0 / sqrt((double)c->s->index_dim) / sqrt((double)c->s->index_heads));
}

/* Scores of one row; sizes, if wanted, gets the sum of magnitudes that rounding is relative to. */
static void score_row(const struct ctl_num *c, const double *q, const uint16_t *wt,
                      const double *keys, int64_t n, double *scores, double *sizes)
{
    const int32_t H = c->s->index_heads, w = c->s->index_dim;
    for (int64_t e = 0; e < n; e++) {
        double s = 0, size = 0;
        for (int32_t h = 0; h < H; h++) {
            const double f = kern_bf16_decode(wt[h]) * factor_of(c);
            s += f * fmax(0, dot(q + h * w, keys + e * w, w));
            for (int32_t i = 0; sizes && i < w; i++)
                size += fabs(f * q[h * w + i] * keys[e * w + i]);
        }
        scores[e] = s;
        if (sizes) sizes[e] = size;
    }
}

/* The row's queries in double: rotated, and rounded as the format does when fmt >= 0. */
static void query_row(const struct ctl_num *c, const struct layer_rows *r, int32_t i, int fmt,
                      double *q)
{
    const int32_t H = c->s->index_heads, w = c->s->index_dim;
    for (int32_t h = 0; h < H; h++) {
        double *x = q + h * w;
        for (int32_t j = 0; j < w; j++)
            x[j] = kern_bf16_decode(r->q_raw[((int64_t)i * H + h) * w + j]);
        ctl_ref_rotate(x, w, c->s->rd, r->pos[i], c->inv_freq[1], 1);
        if (fmt < 0) continue;
        for (int32_t j = 0; j < w; j++) x[j] = ctl_ref_bf16(x[j]);
        ctl_ref_index_round(x, w, (enum kern_ik_fmt)fmt);
    }
}

static struct ranked *rank_all(const double *scores, int64_t n)
{
    struct ranked *o = malloc((size_t)n * sizeof *o);
    for (int64_t e = 0; o && e < n; e++) o[e] = (struct ranked){scores[e], e};
    if (o) qsort(o, (size_t)n, sizeof *o, by_rank);
    return o;
}

/* Jaccard of the k best of two score rows; with t, also how far the k best of b move in a. */
static double compare_sets(const double *a, const double *b, int64_t n, int64_t k, struct tally *t)
{
    struct ranked *ra = rank_all(a, n), *rb = rank_all(b, n);
    int64_t *rank = malloc((size_t)n * sizeof *rank), common = 0;
    if (ra && rb && rank) {
        for (int64_t i = 0; i < n; i++) rank[ra[i].at] = i;
        for (int64_t i = 0; i < k; i++) {
            int64_t to = rank[rb[i].at], shift = to > i ? to - i : i - to;
            common += to < k;
            if (!t) continue;
            t->shift += (double)shift;
            t->n_shifts++;
            if (shift > t->most_shift) t->most_shift = shift;
        }
    }
    bool ok = ra && rb && rank;
    free(ra), free(rb), free(rank);
    return ok ? (double)common / (double)(2 * k - common) : NAN;
}

static int prepare_layer(struct ctl_num *c, struct layer_rows *r, struct tow_err *err)
{
    const struct model_layer *L = &c->w->layers[r->layer];
    const int32_t H = c->s->index_heads, w = c->s->index_dim;
    const struct ctl_num_tensor *qr = ctl_num_find(c, r->layer, "qr", NULL);
    const struct ctl_num_tensor *iw = ctl_num_find(c, r->layer, "index_weights", NULL);
    const struct ctl_num_tensor *kv = ctl_num_find(c, r->layer, "index.kv", NULL);
    const struct ctl_num_tensor *gate = ctl_num_find(c, r->layer, "index.gate", NULL);
    if (!qr || !iw || !kv || !gate || qr->elem != MODEL_ELEM_BF16)
        return tow_fail(err, TOW_EINVAL, "numerics: layer %d gave no index tensors", r->layer);
    r->n = c->T / 4;
    r->R = c->T / 2 < SAMPLE_ROWS ? c->T / 2 : SAMPLE_ROWS;
    uint16_t *x = ctl_num_hold(c, (int64_t)r->R * qr->width, 2);
    r->q_raw = ctl_num_hold(c, (int64_t)r->R * H * w, 2);
    r->wt = ctl_num_hold(c, (int64_t)r->R * H, 2);
    for (int j = 0; j < 2; j++) r->keys[j] = ctl_num_hold(c, r->n * w, sizeof(double));
    r->truth = ctl_num_hold(c, (int64_t)r->R * r->n, sizeof(double));
    double *q = ctl_num_hold(c, (int64_t)H * w, sizeof *q);
    if (c->no_memory) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for index scores");
    for (int32_t i = 0; i < r->R; i++) { /* spread over the second half of the prompt */
        r->pos[i] = c->T - 1 - (int64_t)(r->R - 1 - i) * (c->T / 2) / r->R;
        memcpy(x + (int64_t)i * qr->width, ctl_num_row_of(c, qr, r->pos[i]), (size_t)qr->width * 2);
        memcpy(r->wt + (int64_t)i * H, ctl_num_row_of(c, iw, r->pos[i]), (size_t)H * 2);
    }
    int rc = 0;
    const struct kern_weight *W = &L->index_wq_b;
    CTL_NUM_OP(c, rc, linear, .x = x, .w = *W, .y = r->q_raw, .ld_x = W->k, .ld_y = W->n, .T = r->R,
               .N = W->n, .K = W->k, .groups = 1, .x_dtype = KERN_BF16, .y_dtype = KERN_BF16,
               .aq = W->fmt == KERN_W_FP8 || W->fmt == KERN_W_MXFP4 ? KERN_AQ_A128 : KERN_AQ_NONE);
    if (rc < 0) return rc;
    for (int64_t e = 0; e < r->n; e++)
        for (int j = 0; j < 2; j++)
            ctl_ref_entry(&L->index_comp, 4, ctl_num_row_of(c, kv, 0), ctl_num_row_of(c, gate, 0),
                          e, w, c->s->rd, c->inv_freq[1], c->s->norm_eps, j == 1,
                          r->keys[j] + e * w);
    for (int32_t i = 0; i < r->R; i++) {
        query_row(c, r, i, -1, q);
        score_row(c, q, r->wt + (int64_t)i * H, r->keys[0], r->n, r->truth + i * r->n, NULL);
    }
    return 0;
}

/* The layer's keys, queries and scores through the ops with one format. */
static int score_layer(struct ctl_num *c, const struct layer_rows *r, enum kern_ik_fmt fmt,
                       struct tally *t, struct tow_err *err)
{
    const size_t mark = ctl_num_mark(c);
    const struct model_layer *L = &c->w->layers[r->layer];
    const int32_t H = c->s->index_heads, w = c->s->index_dim, R = r->R;
    struct kern_kv_layout l;
    int rc = ctl_num_layout(c, &l, KERN_KV_FP8, fmt, err);
    if (rc < 0) return rc;
    const int32_t per = l.layer[r->layer].per_page;
    const int32_t n_pages = (int32_t)kern_kv_pages_for(c->T, l.page_tokens);
    uint8_t *pages = ctl_num_hold(c, n_pages, (size_t)l.page_bytes);
    uint8_t *tail = ctl_num_hold(c, 1, (size_t)l.tail_bytes);
    uint32_t *ids = ctl_num_hold(c, n_pages, sizeof *ids);
    uint16_t *q = ctl_num_hold(c, (int64_t)R * H * w, 2);
    int32_t *pos = ctl_num_hold(c, R, sizeof *pos), *n_selected = ctl_num_hold(c, R, 4);
    float *cs = ctl_num_hold(c, (int64_t)R * c->s->rd / 2, 4);
    float *sn = ctl_num_hold(c, (int64_t)R * c->s->rd / 2, 4);
    float *scores = ctl_num_hold(c, (int64_t)R * r->n, 4);
    int32_t *selected = ctl_num_hold(c, R, 4);
    struct kern_seq *seqs = ctl_num_hold(c, R, sizeof *seqs);
    double *keys = ctl_num_hold(c, r->n * w, sizeof *keys), *defined = ctl_num_hold(c, r->n * w, 8);
    double *qd = ctl_num_hold(c, (int64_t)H * w, sizeof *qd),
           *qs = ctl_num_hold(c, (int64_t)H * w, 8);
    double *exact = ctl_num_hold(c, r->n, 8), *size = ctl_num_hold(c, r->n, 8);
    double *got = ctl_num_hold(c, r->n, 8), *by_def = ctl_num_hold(c, r->n, 8);
    if (c->no_memory) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for index scores");
    for (int32_t i = 0; i < n_pages; i++) ids[i] = (uint32_t)(n_pages - 1 - i);
    memcpy(q, r->q_raw, (size_t)R * (size_t)H * (size_t)w * 2);
    for (int32_t i = 0; i < R; i++) {
        pos[i] = (int32_t)r->pos[i];
        seqs[i] = (struct kern_seq){.row0 = i,
                                    .n_rows = 1,
                                    .pos0 = r->pos[i],
                                    .page_ids = ids,
                                    .n_pages = n_pages,
                                    .tail = tail,
                                    .topk = 1};
    }
    struct kern_seq whole = {
        .n_rows = c->T, .page_ids = ids, .n_pages = n_pages, .tail = tail, .topk = 1};
    CTL_NUM_OP(c, rc, compress,
               .kv = ctl_num_row_of(c, ctl_num_find(c, r->layer, "index.kv", NULL), 0),
               .gate = ctl_num_row_of(c, ctl_num_find(c, r->layer, "index.gate", NULL), 0),
               .ape = L->index_comp.ape, .norm = L->index_comp.norm, .inv_freq = c->inv_freq[1],
               .pages = pages, .layout = &l, .layer = r->layer, .index = true, .seqs = &whole,
               .n_seqs = 1, .eps = c->s->norm_eps, .act = KERN_BF16);
    CTL_NUM_OP(c, rc, rope_table, .pos = pos, .inv_freq = c->inv_freq[1], .cos = cs, .sin = sn,
               .T = R, .rd = c->s->rd);
    CTL_NUM_OP(c, rc, index_query, .q = q, .cos = cs, .sin = sn, .T = R, .H = H, .w = w,
               .rd = c->s->rd, .fmt = fmt, .act = KERN_BF16);
    CTL_NUM_OP(c, rc, index_select, .q = q, .wt = r->wt, .factor = (float)factor_of(c),
               .pages = pages, .layout = &l, .layer = r->layer, .seqs = seqs, .n_seqs = R, .T = R,
               .H = H, .selected = selected, .n_selected = n_selected, .sel_ld = 1,
               .scores = scores, .score_ld = r->n, .act = KERN_BF16);
    if (rc < 0) return rc;
    float row[1024];
    for (int64_t e = 0; e < r->n; e++) {
        kern_ik_load(fmt, pages + ids[e / per] * l.page_bytes + l.layer[r->layer].index_off, per,
                     e % per, row, w);
        for (int32_t j = 0; j < w; j++) keys[e * w + j] = row[j];
        memcpy(defined + e * w, r->keys[1] + e * w, (size_t)w * sizeof *defined);
        ctl_ref_index_round(defined + e * w, w, fmt);
    }
    for (int32_t i = 0; i < R; i++) {
        const int64_t seen = (r->pos[i] + 1) / 4;
        int64_t k = c->s->index_topk < seen / 4 ? c->s->index_topk : seen / 4;
        if (k < 1) k = 1;
        for (int32_t j = 0; j < H * w; j++) qd[j] = kern_bf16_decode(q[(int64_t)i * H * w + j]);
        score_row(c, qd, r->wt + (int64_t)i * H, keys, seen, exact, size);
        query_row(c, r, i, (int)fmt, qs);
        score_row(c, qs, r->wt + (int64_t)i * H, defined, seen, by_def, NULL);
        for (int64_t e = 0; e < seen; e++) {
            got[e] = scores[i * r->n + e];
            double error = size[e] > 0 ? fabs(got[e] - exact[e]) / size[e] : fabs(got[e]);
            if (!(error <= t->worst_error)) t->worst_error = error;
        }
        double jaccard = compare_sets(got, r->truth + i * r->n, seen, k, t);
        t->jaccard += jaccard;
        t->by_definition += compare_sets(by_def, r->truth + i * r->n, seen, k, NULL);
        if (t->n_rows++ == 0 || jaccard < t->worst) {
            t->worst = jaccard;
            t->worst_layer = r->layer;
            t->worst_pos = r->pos[i];
        }
    }
    ctl_num_release(c, mark);
    return 0;
}

int ctl_num_index(struct ctl_num *c, struct tow_err *err)
{
    static const struct {
        enum kern_ik_fmt fmt;
        const char *scores, *selection;
    } formats[] = {{KERN_IK_FP4, "index.fp4.scores", "index.fp4.selection"},
                   {KERN_IK_FP8, "index.fp8.scores", "index.fp8.selection"},
                   {KERN_IK_BF16, "index.bf16.scores", "index.bf16.selection"}};
    struct tally t[3] = {{0}};
    int64_t n_layers = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        if (!kern_kv_overlaps(c->s->ratios[c->layers[i]])) continue;
        const size_t mark = ctl_num_mark(c);
        struct layer_rows r = {.layer = c->layers[i]};
        int rc = prepare_layer(c, &r, err);
        for (int f = 0; rc == 0 && f < 3; f++) rc = score_layer(c, &r, formats[f].fmt, &t[f], err);
        if (rc < 0) return rc;
        ctl_num_release(c, mark);
        n_layers++;
    }
    /* A score is a chain of w products per head, then one of H: each rounds by at most 2^-24 of
     * what it has summed, in whatever order. */
    const double bound = (c->s->index_dim + c->s->index_heads + 2) * 0x1p-24;
    for (int f = 0; n_layers > 0 && f < 3; f++) {
        const double n = (double)t[f].n_rows;
        ctl_num_row(c, formats[f].scores, t[f].worst_error, bound,
                    "largest error of a score, relative to its summands",
                    "the scoring kernel reads these keys right", "%lld rows in %lld layers",
                    (long long)t[f].n_rows, (long long)n_layers);
        /* Three in a hundred: equal to the definition but for bf16 steps that fall the other
         * way. */
        ctl_num_row_at_least(
            c, formats[f].selection, t[f].jaccard / n, t[f].by_definition / n - 0.03,
            "Jaccard of the kept set with that of unquantized keys",
            "keys and queries in this format find what unquantized ones find, as far as the format "
            "can",
            "by definition %.4f; worst row %.3f (layer %d, position %lld); ranks move by %.2f on "
            "average, at most %lld",
            t[f].by_definition / n, t[f].worst, t[f].worst_layer, (long long)t[f].worst_pos,
            t[f].shift / (double)t[f].n_shifts, (long long)t[f].most_shift);
    }
    return 0;
}
