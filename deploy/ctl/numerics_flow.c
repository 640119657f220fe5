/* ctl/numerics_flow.c - whole passes: chunks, single tokens, companions, and the hand-over from
 * prefill to decode must not change one bit of a logit.
 *
 * The hand-over is done as the two programs do it: pages are copied part by part into a second pool
 * whose free list has another order, each page's digest is taken on both sides, a page whose digest
 * differs is copied again; then both sides go on. */
#include "deploy/ctl/numerics_impl.h"

#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/kv/table.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK = 256, OTHER_CHUNK = 96, STEPS = 8, RETRIES = 3 };

/* A pool with room for one sequence of T + STEPS tokens, and the sequence. */
struct side {
    struct kv_pool *pool;
    struct kv_table table;
    uint8_t *pages;
};

static int open_side(struct ctl_num *c, struct side *s, uint64_t seed, struct tow_err *err)
{
    const struct kern_kv_layout *l = model_peek_layout(c->m);
    const uint32_t n = (uint32_t)kern_kv_pages_for(c->T + STEPS, l->page_tokens), spare = 5;
    s->pages = ctl_num_hold(c, n + spare, (size_t)l->page_bytes);
    uint8_t *tails = ctl_num_hold(c, 3, (size_t)l->tail_bytes);
    kv_table_init(&s->table);
    if (c->no_memory)
        return tow_fail(err, TOW_ENOMEM, "numerics: no memory for %u pages", n + spare);
    /* Poison: bytes that were never written must not matter. */
    memset(s->pages, (int)(0xa0 + seed), (size_t)(n + spare) * (size_t)l->page_bytes);
    memset(tails, (int)(0xa0 + seed), 3 * (size_t)l->tail_bytes);
    int rc = kv_pool_new(&s->pool, s->pages, n + spare, (size_t)l->page_bytes, tails, 3,
                         (size_t)l->tail_bytes, err);
    if (rc < 0) return rc;
    kv_pool_shuffle(s->pool, seed);
    rc = kv_table_grow(&s->table, s->pool, n);
    return rc < 0 ? tow_fail(err, rc, "numerics: no pages") : 0;
}

static void close_side(struct side *s)
{
    if (!s->pool) return;
    kv_table_fini(&s->table, s->pool);
    kv_pool_free(s->pool);
    s->pool = NULL;
}

static struct kern_seq seq_of(const struct ctl_num *c, const struct side *s, int64_t pos0,
                              int32_t n)
{
    return (struct kern_seq){.n_rows = n,
                             .pos0 = pos0,
                             .page_ids = s->table.ids,
                             .n_pages = (int32_t)s->table.n_pages,
                             .tail = kv_pool_tail(s->pool, s->table.tail),
                             .topk = model_peek_options(c->m)->index_topk};
}

/* Runs ids at pos0 .. pos0+n in chunks; logits of the rows from position `from` on, if wanted. */
static int run_rows(struct ctl_num *c, const struct side *s, const int32_t *ids, int64_t pos0,
                    int32_t n, int32_t chunk, int64_t from, float *logits, struct tow_err *err)
{
    int32_t rows[CHUNK];
    int rc = 0;
    for (int32_t at = 0; rc == 0 && at < n; at += chunk) {
        const int32_t m = n - at < chunk ? n - at : chunk;
        const struct kern_seq q = seq_of(c, s, pos0 + at, m);
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
static int run_beside(struct ctl_num *c, const struct side *s, const struct side *other,
                      float *logits, struct tow_err *err)
{
    enum { BESIDE = 3 };
    int rc = 0;
    for (int32_t i = 0; rc == 0 && i < STEPS; i++) {
        int32_t ids[BESIDE + 1], row = BESIDE;
        struct kern_seq q[2] = {seq_of(c, other, (int64_t)i * BESIDE, BESIDE),
                                seq_of(c, s, c->T - STEPS + i, 1)};
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

/* Digest of all parts of a page. */
static uint64_t digest_of(const struct kern_kv_layout *l, const uint8_t *page)
{
    struct tow_hash h;
    tow_hash_begin(&h);
    for (int32_t i = 0; i < l->n_parts; i++) {
        int64_t off, bytes;
        kern_kv_part(l, i, &off, &bytes);
        tow_hash_add(&h, page + off, (size_t)bytes);
    }
    return tow_hash_end(&h);
}

struct hand_over {
    int64_t n_flipped; /* copies whose digest differed */
    int64_t n_stale;   /* pages that differ once everything has landed */
};

static int hand_over(struct ctl_num *c, const struct side *from, const struct side *to,
                     struct hand_over *h, struct tow_err *err)
{
    const struct kern_kv_layout *l = model_peek_layout(c->m);
    const struct ctl_numerics *n = c->n;
    const uint32_t n_pages = (uint32_t)kern_kv_pages_for(c->T, l->page_tokens);
    c->out->digests = calloc(n_pages, sizeof *c->out->digests);
    if (!c->out->digests) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for digests");
    c->out->n_pages = n_pages;
    for (uint32_t i = 0; i < n_pages; i++) {
        const uint8_t *src = kv_pool_page(from->pool, from->table.ids[i]);
        uint8_t *dst = kv_pool_page(to->pool, to->table.ids[i]);
        c->out->digests[i] = digest_of(l, src);
        for (int attempt = 0; attempt < RETRIES; attempt++) {
            memcpy(dst, src, (size_t)l->page_bytes);
            if (n->on_page_copied && attempt == 0)
                n->on_page_copied(n->ctx, i, dst, (size_t)l->page_bytes);
            if (digest_of(l, dst) == c->out->digests[i]) break;
            h->n_flipped++;
        }
    }
    memcpy(kv_pool_tail(to->pool, to->table.tail), kv_pool_tail(from->pool, from->table.tail),
           (size_t)l->tail_bytes);
    for (uint32_t i = 0; n->on_page_landed && i < n_pages; i++)
        n->on_page_landed(n->ctx, i, kv_pool_page(to->pool, to->table.ids[i]),
                          (size_t)l->page_bytes);
    for (uint32_t i = 0; i < n_pages; i++)
        h->n_stale += digest_of(l, kv_pool_page(to->pool, to->table.ids[i])) != c->out->digests[i];
    return 0;
}

/* STEPS tokens on each side: the first side chooses, the second is given the same ids. */
static int go_on(struct ctl_num *c, const struct side *a, const struct side *b, const float *last,
                 float *la, float *lb, struct tow_err *err)
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

static int measure(struct ctl_num *c, struct side side[4], struct tow_err *err)
{
    const int64_t n = (int64_t)STEPS * c->s->V;
    float *base = ctl_num_hold(c, n, 4), *other = ctl_num_hold(c, n, 4);
    struct hand_over h = {0};
    int rc = 0;
    if (c->no_memory) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for logits");
    for (int i = 0; rc == 0 && i < 4; i++) rc = open_side(c, &side[i], (uint64_t)i + 1, err);
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
    struct side beside = {.pool = side[2].pool, .pages = side[2].pages};
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
    kv_table_init(&beside.table);
    rc = kv_table_grow(&beside.table, beside.pool, 1);
    if (rc < 0) return tow_fail(err, rc, "numerics: no pages");
    rc = run_beside(c, &side[2], &beside, other, err);
    kv_table_fini(&beside.table, beside.pool);
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
    struct side side[4] = {{0}};
    int rc = measure(c, side, err);
    for (int i = 0; i < 4; i++) close_side(&side[i]);
    return rc;
}
