/* tests/support/engine.c - see engine.h. */
#include "tests/support/engine.h"

#include "common/base/err.h"

#include <stdlib.h>
#include <string.h>

static void *zeros(size_t bytes)
{
    bytes = (bytes + 4095) & ~(size_t)4095;
    void *p = aligned_alloc(4096, bytes);
    if (p) memset(p, 0, bytes);
    return p;
}

int test_engine_open(struct test_engine *e, const char *dir, int32_t n_threads, int32_t max_rows,
                     int64_t n_tokens, uint32_t n_sets, uint32_t n_tails, struct tow_err *err)
{
    const struct model_options opt = {.device = "cpu",
                                      .n_threads = n_threads,
                                      .kv_fmt = KERN_KV_FP8,
                                      .ik_fmt = KERN_IK_FP4,
                                      .expert_aq = KERN_AQ_A128,
                                      .max_rows = max_rows};
    memset(e, 0, sizeof *e);
    int rc = model_open(&e->m, dir, &opt, err);
    if (rc < 0) return rc;
    const struct kern_kv_layout *lay = model_peek_layout(e->m);
    e->n_seq_pages = (uint32_t)kern_kv_pages_for(n_tokens, lay->page_tokens);
    const uint32_t n = n_sets * e->n_seq_pages;
    e->pages = zeros((size_t)n * (size_t)lay->page_bytes);
    e->tails = zeros((size_t)n_tails * (size_t)lay->tail_bytes);
    e->logits = malloc((size_t)model_peek_weights(e->m)->shape.V * sizeof *e->logits);
    if (!e->pages || !e->tails || !e->logits)
        return tow_fail(err, TOW_ENOMEM, "no memory for %u pages", n);
    return kv_pool_new(&e->pool, e->pages, n, (size_t)lay->page_bytes, e->tails, n_tails,
                       (size_t)lay->tail_bytes, err);
}

void test_engine_close(struct test_engine *e)
{
    if (e->pool) kv_pool_free(e->pool);
    free(e->pages);
    free(e->tails);
    free(e->logits);
    model_close(e->m);
}

int test_engine_pass(struct test_engine *e, const struct kv_table *t, const int32_t *ids, int32_t n,
                     int64_t pos0, const struct model_capture *const *captures, struct tow_err *err)
{
    const int32_t last = n - 1;
    const struct kern_seq q = {.n_rows = n,
                               .pos0 = pos0,
                               .page_ids = t->ids,
                               .n_pages = (int32_t)t->n_pages,
                               .tail = kv_pool_tail(e->pool, t->tail),
                               .topk = model_peek_options(e->m)->index_topk,
                               .shadowed = t->n_pages > e->n_seq_pages};
    const struct model_batch b = {.ids = ids,
                                  .T = n,
                                  .seqs = &q,
                                  .n_seqs = 1,
                                  .pages = e->pages,
                                  .n_pages = kv_pool_capacity(e->pool),
                                  .logit_rows = &last,
                                  .n_logit_rows = 1,
                                  .logits = e->logits,
                                  .captures = captures};
    return model_forward(e->m, &b, err);
}
