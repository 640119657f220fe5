/* text/verdict.c - see verdict.h. Ranks alone decide: scores of different key types cannot be
 * compared with each other. */
#include "common/text/verdict.h"

#include <stdio.h>
#include <string.h>

static const char *const precisions[TEXT_PRECISIONS] = {
    [TEXT_BF16] = "bf16", [TEXT_FP8] = "fp8", [TEXT_FP4] = "fp4"};

/* Does a come before b? Selected ones first, then by rank; of equals the earlier step and layer, so
 * that the order of the rows does not matter. rank 0 is none. */
static bool better(const struct text_verdict_row *a, uint32_t rank_a,
                   const struct text_verdict_row *b, uint32_t rank_b)
{
    bool in_a = rank_a <= a->topk, in_b = rank_b <= b->topk;
    if (in_a != in_b) return in_a;
    if (rank_a != rank_b) return rank_a < rank_b;
    if (a->step != b->step) return a->step < b->step;
    return a->layer < b->layer;
}

static const struct text_verdict_row *best_row(const struct text_verdict_row *rows, size_t n)
{
    const struct text_verdict_row *best = NULL;
    for (size_t i = 0; i < n; i++)
        if (rows[i].rank && (!best || better(&rows[i], rows[i].rank, best, best->rank)))
            best = &rows[i];
    return best;
}

static const struct text_verdict_row *best_by(const struct text_verdict_row *rows, size_t n, int p)
{
    const struct text_verdict_row *best = NULL;
    for (size_t i = 0; i < n; i++)
        if (rows[i].shadow[p] &&
            (!best || better(&rows[i], rows[i].shadow[p], best, best->shadow[p])))
            best = &rows[i];
    return best;
}

static void take_row(struct text_verdict *v, const struct text_verdict_row *row)
{
    v->layer = row->layer;
    v->step = row->step;
    v->rank = row->rank;
    v->topk = row->topk;
}

static void take_precision(struct text_verdict *v, const struct text_verdict_row *row, int p)
{
    v->has_precision = true;
    v->precision = (enum text_precision)p;
    v->precision_rank = row->shadow[p];
    v->precision_layer = row->layer;
    v->precision_step = row->step;
}

/* The coarsest type by whose keys a row selects. */
static bool judge_precision(struct text_verdict *v, const struct text_verdict_row *rows, size_t n)
{
    for (int p = TEXT_PRECISIONS - 1; p >= 0; p--) {
        const struct text_verdict_row *row = best_by(rows, n, p);
        if (!row || row->shadow[p] > row->topk) continue;
        v->kind = TEXT_VERDICT_KEY_PRECISION;
        take_precision(v, row, p);
        return true;
    }
    return false;
}

void text_verdict_judge(struct text_verdict *v, const struct text_verdict_row *rows, size_t n,
                        bool expects, bool found)
{
    const struct text_verdict_row *best = best_row(rows, n);
    *v = (struct text_verdict){.expects = expects, .found = expects && found};
    if (!best) return;
    take_row(v, best);
    if (best->rank <= best->topk) {
        v->kind = expects && !found ? TEXT_VERDICT_DOWNSTREAM : TEXT_VERDICT_SELECTED;
        return;
    }
    if (judge_precision(v, rows, n)) return;
    if (best->rank <= (uint64_t)TEXT_VERDICT_NEAR * best->topk) {
        v->kind = TEXT_VERDICT_COVERAGE;
        return;
    }
    v->kind = TEXT_VERDICT_DISCRIMINATION;
    for (int p = 0; p < TEXT_PRECISIONS; p++) {
        const struct text_verdict_row *row = best_by(rows, n, p);
        if (row && (!v->has_precision || row->shadow[p] < v->precision_rank))
            take_precision(v, row, p);
    }
}

const char *text_verdict_name(enum text_verdict_kind kind)
{
    switch (kind) {
    case TEXT_VERDICT_SELECTED: return "selected";
    case TEXT_VERDICT_COVERAGE: return "coverage";
    case TEXT_VERDICT_KEY_PRECISION: return "key_precision";
    case TEXT_VERDICT_DISCRIMINATION: return "discrimination";
    case TEXT_VERDICT_DOWNSTREAM: return "downstream";
    case TEXT_VERDICT_NONE: break;
    }
    return NULL;
}

const char *text_precision_name(enum text_precision p)
{
    return precisions[p];
}

int text_precision_find(const char *name)
{
    for (int p = 0; p < TEXT_PRECISIONS; p++)
        if (!strcmp(name, precisions[p])) return p;
    return -1;
}

void text_verdict_print(const struct text_verdict *v, char *out, size_t cap)
{
    char where[64];
    snprintf(where, sizeof where, "layer %u, step %u", v->layer, v->step);
    switch (v->kind) {
    case TEXT_VERDICT_NONE: snprintf(out, cap, "no captured row sees the span"); break;
    case TEXT_VERDICT_SELECTED:
        snprintf(out, cap, "selected: rank %u of top-k %u (%s)", v->rank, v->topk, where);
        break;
    case TEXT_VERDICT_DOWNSTREAM:
        snprintf(out, cap,
                 "selected with rank %u of top-k %u (%s), yet the answer lacks what was expected: "
                 "the model errs after selection",
                 v->rank, v->topk, where);
        break;
    case TEXT_VERDICT_COVERAGE:
        snprintf(out, cap,
                 "ranks just beyond top-k %u: rank %u (%s); a top-k of %u would have sufficed",
                 v->topk, v->rank, where, v->rank);
        break;
    case TEXT_VERDICT_KEY_PRECISION:
        snprintf(out, cap,
                 "rank %u misses top-k %u (%s); by %s keys it would be selected with rank %u "
                 "(layer %u, step %u)",
                 v->rank, v->topk, where, precisions[v->precision], v->precision_rank,
                 v->precision_layer, v->precision_step);
        break;
    case TEXT_VERDICT_DISCRIMINATION:
        if (v->has_precision)
            snprintf(out, cap,
                     "the indexer ranks it low: best rank %u against top-k %u (%s), and by other "
                     "keys %u at best (%s)",
                     v->rank, v->topk, where, v->precision_rank, precisions[v->precision]);
        else
            snprintf(out, cap,
                     "the indexer ranks it low: best rank %u against top-k %u (%s); other key "
                     "types were not looked at",
                     v->rank, v->topk, where);
        break;
    }
}
