/* ctl/needle_engine.c - see needle_engine.h. A question is one sequence in a page pool made for it;
 * the last prompt row and each decoded one are captured. */
#include "deploy/ctl/needle_engine.h"

#include "common/base/err.h"
#include "common/kv/table.h"
#include "common/model/forward.h"
#include "common/text/chat.h"
#include "common/text/config.h"
#include "common/text/detok.h"
#include "common/text/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 256, SPARE_PAGES = 2 };

struct ctl_engine {
    struct model *m;
    struct text_tokenizer *tok;
    struct text_config config;
};

static enum kern_ik_fmt format_of(enum ctl_keys keys)
{
    return keys == CTL_KEYS_FP8 ? KERN_IK_FP8 : keys == CTL_KEYS_BF16 ? KERN_IK_BF16 : KERN_IK_FP4;
}

int ctl_engine_open(struct ctl_engine **out, const char *dir, enum ctl_keys keys, bool kv_bf16,
                    int32_t n_threads, struct tow_err *err)
{
    struct ctl_engine *e = calloc(1, sizeof *e);
    if (!e) return tow_fail(err, TOW_ENOMEM, "needle: no memory");
    char path[4096];
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    struct model_options opt = {.device = "cpu",
                                .n_threads = n_threads,
                                .kv_fmt = kv_bf16 ? KERN_KV_BF16 : KERN_KV_FP8,
                                .ik_fmt = format_of(keys),
                                .expert_aq = KERN_AQ_A128,
                                .max_rows = CHUNK};
    int rc = text_config_load(&e->config, dir, err);
    if (rc == 0) rc = text_tokenizer_load(&e->tok, path, err);
    if (rc == 0) rc = model_open(&e->m, dir, &opt, err);
    if (rc < 0)
        ctl_engine_close(e);
    else
        *out = e;
    return rc;
}

void ctl_engine_close(struct ctl_engine *e)
{
    if (!e) return;
    model_close(e->m);
    text_tokenizer_free(e->tok);
    free(e);
}

/* ------------------------------------------------------------------ text to tokens */

/* Both are freed by the caller, also after a failure. */
static int encode(struct ctl_engine *e, const char *text, size_t n, struct text_chat_prompt *prompt,
                  struct text_ids *ids, struct tow_err *err)
{
    struct tow_buf messages;
    struct json *root = NULL;
    const struct text_chat_options plain = {0};
    tow_buf_init(&messages, 0);
    ctl_put_user(&messages, text, n);
    int rc = tow_buf_failed(&messages) ? tow_fail(err, TOW_ENOMEM, "needle: no memory for the text")
                                       : json_parse(&root, messages.data, messages.len, NULL, err);
    if (rc == 0) rc = text_chat_encode(prompt, root, &plain, err);
    if (rc == 0)
        rc = text_tokenizer_encode(e->tok, prompt->segs, prompt->n_segs, 0, ids, NULL, err);
    json_free(root);
    tow_buf_fini(&messages);
    return rc;
}

int ctl_engine_count(void *ctx, const char *text, size_t n, int64_t *tokens, struct tow_err *err)
{
    struct text_chat_prompt prompt = {0};
    struct text_ids ids = {0};
    int rc = encode(ctx, text, n, &prompt, &ids, err);
    if (rc == 0) *tokens = (int64_t)ids.n;
    text_ids_fini(&ids);
    text_chat_prompt_fini(&prompt);
    return rc;
}

/* Entries that cover the text, ascending: token t is in entries t/4 and t/4 + 1. */
static int find_entries(const struct ctl_engine *e, const struct text_chat_prompt *prompt,
                        const struct text_ids *ids, const char *expect, int32_t *entries,
                        int32_t *n_entries, struct tow_err *err)
{
    const char *at = strstr(prompt->text.data, expect);
    if (!at || strstr(at + 1, expect))
        return tow_fail(err, TOW_EINVAL, "needle: '%s' stands %s in the prompt", expect,
                        at ? "more than once" : "nowhere");
    size_t lo = (size_t)(at - prompt->text.data), hi = lo + strlen(expect), pos = 0;
    *n_entries = 0;
    for (size_t t = 0; t < ids->n; t++) {
        size_t len;
        text_tokenizer_peek(e->tok, ids->ids[t], &len);
        if (pos < hi && pos + len > lo)
            for (int32_t k = (int32_t)(t / 4); k <= (int32_t)(t / 4) + 1; k++)
                if ((*n_entries == 0 || entries[*n_entries - 1] < k) &&
                    *n_entries < MODEL_CAPTURE_ENTRIES)
                    entries[(*n_entries)++] = k;
        pos += len;
    }
    if (pos != prompt->text.len)
        return tow_fail(err, TOW_EFORMAT,
                        "needle: the tokens stand for %zu bytes, the prompt has %zu", pos,
                        prompt->text.len);
    return 0;
}

/* ------------------------------------------------------------------ one question */

struct question {
    struct ctl_engine *e;
    const struct kern_kv_layout *lay;
    int32_t topk, n_prompt, max_tokens;
    unsigned shadow;
    bool looks; /* a capture */
    int32_t entries[MODEL_CAPTURE_ENTRIES], n_entries;
    /* the sequence */
    uint8_t *pages, *tail; /* owned */
    struct kv_pool *pool;
    struct kv_table table;
    float *logits; /* [V] owned */
    /* what came */
    uint32_t step;
    struct text_verdict_row *rows; /* owned */
    uint32_t n_rows, rows_cap;
    bool no_memory;
    int32_t *output; /* [max_tokens] owned */
    int32_t n_output;
};

static uint32_t best_of(const struct kern_rank *ranks, int32_t n)
{
    uint32_t best = 0;
    for (int32_t i = 0; i < n; i++)
        if (best == 0 || (uint32_t)ranks[i].rank < best) best = (uint32_t)ranks[i].rank;
    return best;
}

static void on_row(void *ctx, const struct model_capture_row *row)
{
    struct question *q = ctx;
    void *more = tow_grow(q->rows, q->n_rows, &q->rows_cap, 64, sizeof *q->rows);
    if (!more) {
        q->no_memory = true;
        return;
    }
    q->rows = more;
    struct text_verdict_row *to = &q->rows[q->n_rows++];
    *to = (struct text_verdict_row){.step = q->step,
                                    .layer = (uint32_t)row->layer,
                                    .topk = (uint32_t)row->topk,
                                    .rank = best_of(row->own.ranks, row->n_entries)};
    for (int p = 0; p < TEXT_PRECISIONS; p++)
        if (row->shadow >> p & 1) to->shadow[p] = best_of(row->shadows[p].ranks, row->n_entries);
}

static int make_sequence(struct question *q, struct tow_err *err)
{
    const int64_t n_tokens = (int64_t)q->n_prompt + q->max_tokens;
    const uint32_t each = q->shadow ? 2 : 1;
    const uint32_t n = (uint32_t)kern_kv_pages_for(n_tokens, q->lay->page_tokens) * each;
    const int32_t V = model_peek_weights(q->e->m)->shape.V;
    if (q->shadow && q->lay->shadow_bytes == 0)
        return tow_fail(err, TOW_EINVAL,
                        "--shadow: keys of all types do not fit a page of this model; with "
                        "--kv-dtype bf16 pages are larger");
    q->pages = aligned_alloc(4096, (size_t)(n + SPARE_PAGES) * (size_t)q->lay->page_bytes);
    q->tail = aligned_alloc(4096, (size_t)q->lay->tail_bytes);
    q->logits = malloc((size_t)V * sizeof *q->logits);
    q->output = malloc((size_t)q->max_tokens * sizeof *q->output);
    if (!q->pages || !q->tail || !q->logits || !q->output)
        return tow_fail(err, TOW_ENOMEM, "needle: no memory for %u pages", n);
    memset(q->tail, 0, (size_t)q->lay->tail_bytes);
    int rc = kv_pool_new(&q->pool, q->pages, n + SPARE_PAGES, (size_t)q->lay->page_bytes, q->tail,
                         1, (size_t)q->lay->tail_bytes, err);
    if (rc == 0 && (rc = kv_table_grow(&q->table, q->pool, n)) < 0)
        tow_fail(err, rc, "needle: no pages");
    return rc;
}

static void drop_sequence(struct question *q)
{
    if (q->pool) {
        kv_table_fini(&q->table, q->pool);
        kv_pool_free(q->pool);
    }
    free(q->pages);
    free(q->tail);
    free(q->logits);
    free(q->output);
    free(q->rows);
}

/* n rows from pos0; with their last one captured and its logits wanted. */
static int pass(struct question *q, const int32_t *ids, int64_t pos0, int32_t n, bool last,
                struct tow_err *err)
{
    const struct kern_seq seq = {.n_rows = n,
                                 .pos0 = pos0,
                                 .page_ids = q->table.ids,
                                 .n_pages = (int32_t)q->table.n_pages,
                                 .tail = kv_pool_tail(q->pool, q->table.tail),
                                 .topk = q->topk,
                                 .shadowed = q->shadow != 0};
    const struct model_capture capture = {.entries = q->entries,
                                          .n_entries = q->n_entries,
                                          .shadow = q->shadow,
                                          .on_row = on_row,
                                          .ctx = q};
    const struct model_capture *captures[1] = {last && q->looks ? &capture : NULL};
    const int32_t row = n - 1;
    const struct model_batch b = {.ids = ids,
                                  .T = n,
                                  .seqs = &seq,
                                  .n_seqs = 1,
                                  .pages = q->pages,
                                  .n_pages = kv_pool_capacity(q->pool),
                                  .logit_rows = &row,
                                  .n_logit_rows = last ? 1 : 0,
                                  .logits = q->logits,
                                  .captures = captures};
    return model_forward(q->e->m, &b, err);
}

static int32_t best_token(const struct question *q)
{
    const int32_t V = model_peek_weights(q->e->m)->shape.V;
    int32_t best = 0;
    for (int32_t i = 1; i < V; i++)
        if (q->logits[i] > q->logits[best]) best = i;
    return best;
}

static bool is_end(const struct ctl_engine *e, int32_t id)
{
    for (int32_t i = 0; i < e->config.n_eos; i++)
        if (e->config.eos_ids[i] == id) return true;
    return false;
}

/* *stopped: the model ended its turn. */
static int answer(struct question *q, const int32_t *prompt, bool *stopped, struct tow_err *err)
{
    int rc = 0;
    *stopped = false;
    for (int64_t at = 0; rc == 0 && at < q->n_prompt; at += CHUNK) {
        int32_t n = q->n_prompt - at < CHUNK ? (int32_t)(q->n_prompt - at) : CHUNK;
        rc = pass(q, prompt + at, at, n, at + n == q->n_prompt, err);
    }
    while (rc == 0) {
        int32_t id = best_token(q);
        if ((*stopped = is_end(q->e, id))) break;
        q->output[q->n_output++] = id;
        if (q->n_output == q->max_tokens) break;
        q->step++;
        rc = pass(q, &id, (int64_t)q->n_prompt + q->n_output - 1, 1, true, err);
    }
    if (rc == 0 && q->no_memory) rc = tow_fail(err, TOW_ENOMEM, "needle: no memory for the ranks");
    return rc;
}

int ctl_engine_ask(struct ctl_engine *e, const char *text, size_t n, int32_t max_tokens,
                   int64_t topk, const char *expect, unsigned shadow, struct ctl_answer *a,
                   struct tow_err *err)
{
    struct text_chat_prompt prompt = {0};
    struct text_ids ids = {0};
    const struct model_shape *s = &model_peek_weights(e->m)->shape;
    struct question q = {.e = e,
                         .lay = model_peek_layout(e->m),
                         .topk = topk ? (int32_t)topk : model_peek_options(e->m)->index_topk,
                         .max_tokens = max_tokens,
                         .shadow = expect ? shadow : 0,
                         .looks = expect != NULL};
    kv_table_init(&q.table);
    int rc = encode(e, text, n, &prompt, &ids, err);
    if (rc == 0 && (int64_t)ids.n + max_tokens > s->max_positions)
        rc = tow_fail(err, TOW_EINVAL,
                      "needle: %zu tokens and an answer of %d exceed the model's %d", ids.n,
                      max_tokens, s->max_positions);
    q.n_prompt = (int32_t)ids.n;
    if (rc == 0 && expect)
        rc = find_entries(e, &prompt, &ids, expect, q.entries, &q.n_entries, err);
    if (rc == 0) rc = make_sequence(&q, err);
    bool stopped = false;
    if (rc == 0) rc = answer(&q, ids.ids, &stopped, err);
    if (rc == 0) {
        text_detok_all(e->tok, q.output, (size_t)q.n_output, true, &a->content);
        snprintf(a->finish, sizeof a->finish, "%s", stopped ? "stop" : "length");
        a->prompt_tokens = q.n_prompt;
        a->tokens = q.n_output + stopped;
        bool found = expect && a->content.data && strstr(a->content.data, expect);
        if (expect) ctl_ranks_judge(&a->ranks, q.rows, q.n_rows, found);
        if (tow_buf_failed(&a->content))
            rc = tow_fail(err, TOW_ENOMEM, "needle: no memory for the answer");
    }
    drop_sequence(&q);
    text_ids_fini(&ids);
    text_chat_prompt_fini(&prompt);
    return rc;
}
