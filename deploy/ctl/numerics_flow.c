/* ctl/numerics_flow.c - whole passes: chunks, single tokens, companions, and the hand-over from
 * prefill to decode must not change one bit of a logit.
 *
 * The hand-over is done as the two programs do it (sequence.h), then both sides go on. */
#include "deploy/ctl/numerics_impl.h"
#include "deploy/ctl/sequence.h"

#include "common/base/err.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK = 256, OTHER_CHUNK = 96, STEPS = 8, SPARE_PAGES = 5, SPARE_TAILS = 2 };

/* Runs ids at pos0 .. pos0+n in chunks; logits of the rows from position `from` on, if wanted. */
static int run_rows(struct ctl_num *c, const struct ctl_seq *s, const int32_t *ids, int64_t pos0,
                    int32_t n, int32_t chunk, int64_t from, float *logits, struct tow_err *err)
{
    int32_t rows[CHUNK];
    int rc = 0;
    for (int32_t at = 0; rc == 0 && at < n; at += chunk) {
        const int32_t m = n - at < chunk ? n - at : chunk;
        const struct kern_seq q = ctl_seq_rows(s, &s->table, pos0 + at, m, 0);
        int32_t n_rows = 0;
        for (int32_t i = 0; i < m; i++)
            if (pos0 + at + i >= from) rows[n_rows++] = i;
        struct model_batch b = {.ids = ids + at,
                                .T = m,
                                .seqs = &q,
                                .n_seqs = 1,
                                .pages = s->pages,
                                .n_pages = kv_pool_capacity(s->pool),
                                .logit_rows = rows,
                                .n_logit_rows = n_rows,
                                .logits = logits};
        rc = model_forward(c->m, &b, err);
        if (logits) logits += (int64_t)n_rows * c->s->V;
    }
    return rc;
}

/* The last STEPS tokens one at a time beside a second sequence of three rows. */
static int run_beside(struct ctl_num *c, const struct ctl_seq *s, const struct kv_table *other,
                      float *logits, struct tow_err *err)
{
    enum { BESIDE = 3 };
    int rc = 0;
    for (int32_t i = 0; rc == 0 && i < STEPS; i++) {
        int32_t ids[BESIDE + 1], row = BESIDE;
        struct kern_seq q[2] = {ctl_seq_rows(s, other, (int64_t)i * BESIDE, BESIDE, 0),
                                ctl_seq_rows(s, &s->table, c->T - STEPS + i, 1, 0)};
        memcpy(ids, c->prompt + i * BESIDE, BESIDE * sizeof *ids);
        ids[BESIDE] = c->prompt[c->T - STEPS + i];
        q[1].row0 = BESIDE;
        struct model_batch b = {.ids = ids,
                                .T = BESIDE + 1,
                                .seqs = q,
                                .n_seqs = 2,
                                .pages = s->pages,
                                .n_pages = kv_pool_capacity(s->pool),
                                .logit_rows = &row,
                                .n_logit_rows = 1,
                                .logits = logits + (int64_t)i * c->s->V};
        rc = model_forward(c->m, &b, err);
    }
    return rc;
}

static int64_t differing(const float *a, const float *b, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += memcmp(a + i, b + i, sizeof *a) != 0;
    return count;
}

static int32_t best_of(const float *logits, int32_t V)
{
    int32_t best = 0;
    for (int32_t i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static int hand_over(struct ctl_num *c, const struct ctl_seq *from, const struct ctl_seq *to,
                     struct ctl_hand_over *h, struct tow_err *err)
{
    const uint32_t n = (uint32_t)kern_kv_pages_for(c->T, model_peek_layout(c->m)->page_tokens);
    c->out->digests = calloc(n, sizeof *c->out->digests);
    if (!c->out->digests) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for digests");
    c->out->n_pages = n;
    *h = (struct ctl_hand_over){.on_page_copied = c->n->on_page_copied,
                                .on_page_landed = c->n->on_page_landed,
                                .ctx = c->n->ctx,
                                .digests = c->out->digests};
    ctl_seq_hand_over(from, to, n, h);
    return 0;
}

/* STEPS tokens on each side: the first side chooses, the second is given the same ids. */
static int go_on(struct ctl_num *c, const struct ctl_seq *a, const struct ctl_seq *b,
                 const float *last, float *la, float *lb, struct tow_err *err)
{
    const float *at = last;
    int rc = 0;
    for (int32_t i = 0; rc == 0 && i < STEPS; i++) {
        const int32_t id = best_of(at, c->s->V);
        rc = run_rows(c, a, &id, c->T + i, 1, 1, 0, la + (int64_t)i * c->s->V, err);
        if (rc == 0) rc = run_rows(c, b, &id, c->T + i, 1, 1, 0, lb + (int64_t)i * c->s->V, err);
        at = la + (int64_t)i * c->s->V;
    }
    return rc;
}

static int measure(struct ctl_num *c, struct ctl_seq side[4], struct tow_err *err)
{
    const int64_t n = (int64_t)STEPS * c->s->V;
    float *base = ctl_num_hold(c, n, 4), *other = ctl_num_hold(c, n, 4);
    struct ctl_hand_over h = {0};
    int rc = 0;
    if (c->no_memory) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for logits");
    for (int i = 0; rc == 0 && i < 4; i++)
        rc = ctl_seq_open(&side[i], c->m, c->T + STEPS, SPARE_PAGES, SPARE_TAILS, (uint64_t)i + 1,
                          err);
    if (rc == 0) rc = run_rows(c, &side[0], c->prompt, 0, c->T, CHUNK, c->T - STEPS, base, err);

    if (rc == 0)
        rc = run_rows(c, &side[1], c->prompt, 0, c->T, OTHER_CHUNK, c->T - STEPS, other, err);
    if (rc < 0) return rc;
    ctl_num_row(c, "flow.chunks", (double)differing(base, other, n), 0,
                "logits that differ in any bit", "the chunk size of prefill changes nothing",
                "last %d tokens of chunks of %d and of %d", STEPS, CHUNK, OTHER_CHUNK);

    const int32_t before = c->T - STEPS;
    rc = run_rows(c, &side[2], c->prompt, 0, before, CHUNK, c->T, NULL, err);
    /* The second sequence of run_beside must lie in the same pool: its pages are taken there. */
    struct kv_table beside;
    const size_t mark = ctl_num_mark(c);
    uint8_t *tail = ctl_num_hold(c, 1, (size_t)model_peek_layout(c->m)->tail_bytes);
    if (rc == 0 && !tail) rc = tow_fail(err, TOW_ENOMEM, "numerics: no memory for a tail");
    if (rc < 0) return rc;
    memcpy(tail, kv_pool_tail(side[2].pool, side[2].table.tail),
           (size_t)model_peek_layout(c->m)->tail_bytes);
    rc = run_rows(c, &side[2], c->prompt + before, before, STEPS, 1, 0, other, err);
    if (rc < 0) return rc;
    ctl_num_row(c, "flow.decode", (double)differing(base, other, n), 0,
                "logits that differ in any bit",
                "a token alone (decode) is a token in a chunk (prefill)", "last %d tokens", STEPS);

    /* Back to before the last tokens; entries they wrote are written again with the same bits. */
    memcpy(kv_pool_tail(side[2].pool, side[2].table.tail), tail,
           (size_t)model_peek_layout(c->m)->tail_bytes);
    ctl_num_release(c, mark);
    kv_table_init(&beside);
    rc = kv_table_grow(&beside, side[2].pool, 1);
    if (rc < 0) return tow_fail(err, rc, "numerics: no pages");
    rc = run_beside(c, &side[2], &beside, other, err);
    kv_table_fini(&beside, side[2].pool);
    if (rc < 0) return rc;
    ctl_num_row(c, "flow.batch", (double)differing(base, other, n), 0,
                "logits that differ in any bit", "companions in a batch change nothing",
                "last %d tokens beside another sequence", STEPS);

    float *la = ctl_num_hold(c, n, 4), *lb = ctl_num_hold(c, n, 4);
    if (!la || !lb) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for logits");
    rc = hand_over(c, &side[0], &side[3], &h, err);
    if (rc == 0) rc = go_on(c, &side[0], &side[3], base + n - c->s->V, la, lb, err);
    if (rc < 0) return rc;
    ctl_num_row(c, "handover.digest", (double)h.n_flipped, 0, "copies whose XXH3 digest differs",
                "pages arrive as they were sent", "%u pages, a digest each (in --report)",
                c->out->n_pages);
    ctl_num_row(c, "handover.pages", (double)h.n_stale, 0,
                "pages that differ after all have landed", "no landed page is stale or written to",
                "%u pages", c->out->n_pages);
    ctl_num_row(c, "handover.logits", (double)differing(la, lb, n), 0,
                "logits that differ in any bit",
                "decode in a second pool goes on as one process would",
                "%d tokens after the hand-over", STEPS);
    return 0;
}

int ctl_num_flow(struct ctl_num *c, struct tow_err *err)
{
    struct ctl_seq side[4] = {{0}};
    int rc = measure(c, side, err);
    for (int i = 0; i < 4; i++) ctl_seq_close(&side[i]);
    return rc;
}
