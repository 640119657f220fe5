/* router/capture_rows.c - see capture_rows.h. Rows stay packed until they are written: a row of
 * numbers as text is several times as large, and most of a capture's life is waiting. */
#include "router/capture_rows.h"

#include "common/text/detok.h"
#include "common/text/json.h"
#include "common/text/verdict.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct rtr_capture_row {
    uint32_t step, layer;
    uint32_t bytes;
    uint8_t *data; /* owned */
};

void rtr_capture_rows_init(struct rtr_capture_rows *r, const struct rtr_capture *capture)
{
    *r = (struct rtr_capture_rows){.capture = capture};
    tow_buf_init(&r->answer, 0);
}

void rtr_capture_rows_fini(struct rtr_capture_rows *r)
{
    for (uint32_t i = 0; i < r->n; i++) free(r->items[i].data);
    free(r->items);
    free(r->tokens);
    tow_buf_fini(&r->answer);
    memset(r, 0, sizeof *r);
}

/* ---- collecting ---- */

/* Where (step, layer) is or belongs. */
static uint32_t find(const struct rtr_capture_rows *r, uint32_t step, uint32_t layer)
{
    uint32_t lo = 0, hi = r->n;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        const struct rtr_capture_row *k = &r->items[mid];
        if (k->step < step || (k->step == step && k->layer < layer))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Is a row of that step here, beside where one of it would go? */
static bool has_step(const struct rtr_capture_rows *r, uint32_t at, uint32_t step)
{
    return (at < r->n && r->items[at].step == step) || (at > 0 && r->items[at - 1].step == step);
}

void rtr_capture_rows_take(struct rtr_capture_rows *r, const struct rtr_captured *c)
{
    uint32_t at = find(r, c->step, c->layer);
    bool again = at < r->n && r->items[at].step == c->step && r->items[at].layer == c->layer;
    size_t old_bytes = again ? r->items[at].bytes : 0;
    bool new_step = c->step > 0 && !has_step(r, at, c->step); /* step 0 is prefill's */
    if ((new_step && r->n_decode_steps == r->capture->ask.max_steps) ||
        r->bytes - old_bytes + c->row_bytes > RTR_CAPTURE_MAX_BYTES) {
        r->dropped = true;
        return;
    }
    bool good = true;
    uint8_t *data = tow_copy(c->row, c->row_bytes, &good);
    if (good && !again) {
        struct rtr_capture_row *items = tow_grow(r->items, r->n, &r->cap, 32, sizeof *items);
        if (items) r->items = items;
        good = items != NULL;
    }
    if (!good) {
        free(data);
        r->failed = true;
        return;
    }
    if (again)
        free(r->items[at].data);
    else
        memmove(&r->items[at + 1], &r->items[at], (r->n++ - at) * sizeof *r->items);
    r->items[at] = (struct rtr_capture_row){c->step, c->layer, c->row_bytes, data};
    r->bytes += c->row_bytes - old_bytes;
    r->n_decode_steps += new_step;
}

void rtr_capture_rows_tokens(struct rtr_capture_rows *r, const text_id *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        text_id *all = tow_grow(r->tokens, r->n_tokens, &r->cap_tokens, 64, sizeof *all);
        if (!all) {
            r->failed = true;
            return;
        }
        r->tokens = all;
        r->tokens[r->n_tokens++] = ids[i];
    }
}

void rtr_capture_rows_answer(struct rtr_capture_rows *r, const char *text, size_t n)
{
    if (!r->capture->expect) return;
    tow_buf_put(&r->answer, text, n);
    if (tow_buf_failed(&r->answer)) r->failed = true;
}

/* ---- writing ---- */

/* The fewest digits that read back; null when there is no number. */
static void put_float(struct tow_buf *b, float v)
{
    char text[32];
    if (!isfinite(v)) {
        tow_buf_puts(b, "null");
        return;
    }
    for (int digits = 7; digits <= 9; digits++) { /* %g leaves zeros at the end out */
        snprintf(text, sizeof text, "%.*g", digits, (double)v);
        if (strtof(text, NULL) == v) break;
    }
    tow_buf_puts(b, text);
}

static void put_named(struct tow_buf *b, const char *name, float v)
{
    tow_buf_printf(b, "\"%s\": ", name);
    put_float(b, v);
}

/* The first token that entry e covers; the last is 4e + 3. */
static uint32_t first_token(uint32_t e)
{
    return e ? RTR_CAPTURE_RATIO * (e - 1) : 0;
}

/* Of the best-ranked entry asked for: how far its score is from the other side of the border. Above
 * 0 it is selected with so much to spare; below, so much is missing. NaN: nothing to measure. */
static float margin_of(const struct wire_capture_row *row, const struct wire_ranks *k)
{
    struct wire_rank best = {.rank = UINT32_MAX, .score = NAN};
    for (uint32_t i = 0; i < row->entries.n; i++) {
        struct wire_rank at = wire_rank_at(k, i);
        if (at.rank < best.rank) best = at;
    }
    return best.score - (best.rank <= row->topk ? k->next : k->kth);
}

static void put_ranks(struct tow_buf *b, const struct wire_capture_row *row,
                      const struct wire_ranks *k, bool with_tokens)
{
    put_named(b, "kth_score", k->kth);
    tow_buf_puts(b, ", ");
    put_named(b, "next_score", k->next);
    tow_buf_puts(b, ", ");
    put_named(b, "margin", margin_of(row, k));
    tow_buf_puts(b, ", \"entries\": [");
    for (uint32_t i = 0; i < row->entries.n; i++) {
        uint32_t e = wire_ids_at(row->entries, i);
        struct wire_rank at = wire_rank_at(k, i);
        tow_buf_printf(b, i ? ", {\"entry\": %u" : "{\"entry\": %u", e);
        if (with_tokens)
            tow_buf_printf(b, ", \"tokens\": [%u, %u]", first_token(e),
                           RTR_CAPTURE_RATIO * (e + 1));
        tow_buf_printf(b, ", \"rank\": %u, \"equal\": %u, ", at.rank, at.equal);
        put_named(b, "score", at.score);
        tow_buf_printf(b, ", \"selected\": %s}", at.rank <= row->topk ? "true" : "false");
    }
    tow_buf_putc(b, ']');
}

static void put_layer(struct tow_buf *b, const struct rtr_capture_row *item, bool lists)
{
    struct wire_capture_row row;
    const char *comma = "";
    if (wire_get_capture_row(&row, item->data, item->bytes) < 0) {
        b->failed = true; /* it was checked when it came */
        return;
    }
    tow_buf_printf(b, "{\"layer\": %u, \"topk\": %u, \"visible\": %u, ", item->layer, row.topk,
                   row.n_visible);
    put_ranks(b, &row, &row.own, true);
    if (row.shadow) {
        tow_buf_puts(b, ", \"shadow\": {");
        for (int p = 0; p < WIRE_SHADOWS; p++) {
            if (!(row.shadow >> p & 1)) continue;
            tow_buf_printf(b, "%s\"%s\": {", comma, text_precision_name((enum text_precision)p));
            put_ranks(b, &row, &row.shadows[p], false);
            tow_buf_putc(b, '}');
            comma = ", ";
        }
        tow_buf_putc(b, '}');
    }
    if (lists) {
        tow_buf_puts(b, ", \"list\": [");
        for (uint32_t i = 0; i < row.list.n; i++)
            tow_buf_printf(b, i ? ", %u" : "%u", wire_ids_at(row.list, i));
        tow_buf_putc(b, ']');
    }
    tow_buf_putc(b, '}');
}

static void put_steps(struct tow_buf *b, const struct rtr_capture_rows *r)
{
    tow_buf_puts(b, "\"steps\": [");
    for (uint32_t i = 0; i < r->n; i++) {
        const struct rtr_capture_row *k = &r->items[i];
        bool first = i == 0 || r->items[i - 1].step != k->step;
        bool last = i + 1 == r->n || r->items[i + 1].step != k->step;
        if (first) {
            tow_buf_printf(b, "%s{\"step\": %u, \"phase\": \"%s\", \"token\": ", i ? ", " : "",
                           k->step, k->step ? "decode" : "prefill");
            if (k->step < r->n_tokens)
                json_put_int(b, r->tokens[k->step]);
            else
                tow_buf_puts(b, "null"); /* the end token is none of the outputs */
            tow_buf_puts(b, ", \"layers\": [");
        }
        put_layer(b, k, r->capture->ask.lists);
        tow_buf_puts(b, last ? "]}" : ", ");
    }
    tow_buf_putc(b, ']');
}

static void put_spans(struct tow_buf *b, const struct rtr_capture *c,
                      const struct text_tokenizer *tok)
{
    tow_buf_puts(b, "\"spans\": [");
    for (uint32_t i = 0; i < c->n_spans; i++) {
        struct rtr_capture_span s = c->spans[i];
        struct tow_buf text;
        tow_buf_init(&text, 0);
        text_detok_all(tok, c->prompt + s.start, s.end - s.start, false, &text);
        if (tow_buf_failed(&text)) b->failed = true;
        tow_buf_printf(b, "%s{\"start\": %u, \"end\": %u, \"text\": ", i ? ", " : "", s.start,
                       s.end);
        json_put_string(b, text.data ? text.data : "", text.len);
        tow_buf_puts(b, ", \"entries\": [");
        uint32_t first = rtr_capture_first_entry(s);
        for (uint32_t e = first; e <= rtr_capture_last_entry(s); e++)
            tow_buf_printf(b, e > first ? ", %u" : "%u", e);
        tow_buf_puts(b, "]}");
        tow_buf_fini(&text);
    }
    tow_buf_putc(b, ']');
}

static uint32_t best_rank(const struct wire_capture_row *row, const struct wire_ranks *k)
{
    uint32_t best = 0;
    for (uint32_t i = 0; i < row->entries.n; i++) {
        uint32_t rank = wire_rank_at(k, i).rank;
        if (!best || rank < best) best = rank;
    }
    return best;
}

static bool judge(const struct rtr_capture_rows *r, struct text_verdict *out)
{
    struct text_verdict_row *rows = calloc(r->n ? r->n : 1, sizeof *rows);
    if (!rows) return false;
    for (uint32_t i = 0; i < r->n; i++) {
        const struct rtr_capture_row *k = &r->items[i];
        struct wire_capture_row row;
        rows[i].step = k->step;
        rows[i].layer = k->layer;
        if (wire_get_capture_row(&row, k->data, k->bytes) < 0) continue;
        rows[i].topk = row.topk;
        rows[i].rank = best_rank(&row, &row.own);
        for (int p = 0; p < WIRE_SHADOWS; p++)
            if (row.shadow >> p & 1) rows[i].shadow[p] = best_rank(&row, &row.shadows[p]);
    }
    const struct rtr_capture *c = r->capture;
    bool found = c->expect && r->answer.len &&
                 memmem(r->answer.data, r->answer.len, c->expect, c->expect_len);
    text_verdict_judge(out, rows, r->n, c->expect != NULL, found);
    free(rows);
    return true;
}

static void put_verdict(struct tow_buf *b, const struct rtr_capture_rows *r)
{
    struct text_verdict v;
    char line[400];
    if (!judge(r, &v)) {
        b->failed = true;
        return;
    }
    tow_buf_puts(b, "\"verdict\": ");
    if (v.kind == TEXT_VERDICT_NONE) {
        tow_buf_puts(b, "null");
        return;
    }
    tow_buf_printf(b,
                   "{\"name\": \"%s\", \"layer\": %u, \"step\": %u, \"best_rank\": %u, "
                   "\"topk\": %u, \"sufficient_topk\": %u",
                   text_verdict_name(v.kind), v.layer, v.step, v.rank, v.topk, v.rank);
    if (v.has_precision)
        tow_buf_printf(b, ", \"precision\": \"%s\", \"precision_rank\": %u",
                       text_precision_name(v.precision), v.precision_rank);
    if (v.expects) tow_buf_printf(b, ", \"found\": %s", v.found ? "true" : "false");
    text_verdict_print(&v, line, sizeof line);
    tow_buf_puts(b, ", \"text\": ");
    json_put_string(b, line, strlen(line));
    tow_buf_putc(b, '}');
}

/* Decode steps that went by without being ranked: the workers stop at max_steps by themselves. */
static bool is_truncated(const struct rtr_capture_rows *r)
{
    const struct wire_capture *ask = &r->capture->ask;
    return r->dropped || ((ask->steps & WIRE_CAPTURE_DECODE) && r->n_tokens > 1 &&
                          r->n_tokens - 1 > ask->max_steps);
}

void rtr_capture_rows_print(const struct rtr_capture_rows *r, const struct text_tokenizer *tok,
                            struct tow_buf *b)
{
    tow_buf_printf(b, "\"towpath\": {\"index_capture\": {\"prompt_tokens\": %u, ",
                   r->capture->n_prompt);
    put_spans(b, r->capture, tok);
    tow_buf_puts(b, ", ");
    put_steps(b, r);
    tow_buf_printf(b, ", \"truncated\": %s, ", is_truncated(r) ? "true" : "false");
    put_verdict(b, r);
    tow_buf_puts(b, "}}");
}
