/* What model_forward() refuses before a kernel sees it. What it computes: tests/golden. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/kv/table.h"
#include "common/model/forward.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 8, PAGES = 3 };

/* A model and a batch that fits: one sequence of two rows on page 2 of the pool. */
struct world {
    struct model *m;
    uint8_t *pages, *tail;
    uint32_t ids_of_pages[PAGES];
    int32_t ids[ROWS + 1], rows[2];
    float *logits;
    struct kern_seq seq;
    struct model_batch b;
    struct tow_err err;
};

static void setup(struct world *w)
{
    memset(w, 0, sizeof *w);
    const struct model_options o = {.device = "cpu",
                                    .n_threads = 1,
                                    .exact = true,
                                    .kv_fmt = KERN_KV_F32,
                                    .ik_fmt = KERN_IK_F32,
                                    .max_rows = ROWS};
    if (model_open(&w->m, "tests/golden/data/exact-bf16/checkpoint", &o, &w->err) < 0)
        fail_msg("%s", w->err.msg);
    const struct kern_kv_layout *l = model_peek_layout(w->m);
    w->pages = aligned_alloc(4096, ((size_t)l->page_bytes * PAGES + 4095) & ~(size_t)4095);
    w->tail = aligned_alloc(4096, ((size_t)l->tail_bytes + 4095) & ~(size_t)4095);
    w->logits = malloc(2 * (size_t)model_peek_weights(w->m)->shape.V * sizeof *w->logits);
    w->ids_of_pages[0] = 2;
    w->seq = (struct kern_seq){
        .n_rows = 2, .page_ids = w->ids_of_pages, .n_pages = 1, .tail = w->tail, .topk = 4};
    w->rows[0] = 1;
    w->b = (struct model_batch){.ids = w->ids,
                                .T = 2,
                                .seqs = &w->seq,
                                .n_seqs = 1,
                                .pages = w->pages,
                                .n_pages = PAGES,
                                .logit_rows = w->rows,
                                .n_logit_rows = 1,
                                .logits = w->logits};
    if (model_forward(w->m, &w->b, &w->err) < 0) fail_msg("%s", w->err.msg);
}

static void teardown(struct world *w)
{
    model_close(w->m);
    free(w->pages);
    free(w->tail);
    free(w->logits);
}

static void refused(struct world *w, const char *part)
{
    assert_int_equal(model_forward(w->m, &w->b, &w->err), TOW_EINVAL);
    if (!strstr(w->err.msg, part)) fail_msg("'%s' lacks '%s'", w->err.msg, part);
}

static void test_model_forward__page_ids_must_lie_in_the_pool(void **state)
{
    (void)state;
    struct world w;
    setup(&w);
    w.ids_of_pages[0] = PAGES;
    refused(&w, "sequence 0: page 0 has id 3; the pool has ids below 3");
    w.ids_of_pages[0] = KV_PAGE_GONE;
    refused(&w, "page 0 has id");
    /* Only pages the rows reach are looked at: later ones may be gone. */
    const int32_t page_tokens = model_peek_layout(w.m)->page_tokens;
    w.ids_of_pages[0] = 0;
    w.ids_of_pages[1] = KV_PAGE_GONE;
    w.seq.n_pages = 2;
    assert_int_equal(model_forward(w.m, &w.b, &w.err), 0);
    w.seq.pos0 = page_tokens - 1; /* the second row is the first of page 1 */
    refused(&w, "page 1 has id");
    w.seq.n_pages = 1;
    refused(&w, "1 pages hold less than");
    w.b.n_pages = 0;
    w.seq.pos0 = 0;
    refused(&w, "the pool has ids below 0");
    teardown(&w);
}

static void test_model_forward__layers_must_be_a_part_of_the_stack(void **state)
{
    (void)state;
    struct world w;
    setup(&w);
    const int32_t n = model_peek_weights(w.m)->shape.n_layers;
    const int32_t bad[][2] = {{-1, 1}, {0, -1}, {0, n + 1}, {n, n + 1}, {1, 1}, {2, 1}, {n, n}};
    const size_t width =
        (size_t)(model_peek_weights(w.m)->shape.hc * model_peek_weights(w.m)->shape.D);
    float *streams = calloc(2 * width, sizeof *streams);
    assert_non_null(streams);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        w.b.streams_in = streams;
        w.b.first_layer = bad[i][0];
        w.b.last_layer = bad[i][1];
        refused(&w, "layers");
    }
    w.b.first_layer = n - 1;
    w.b.last_layer = n;
    assert_int_equal(model_forward(w.m, &w.b, &w.err), 0);
    w.b.streams_in = NULL;
    refused(&w, "need streams_in");
    w.b.first_layer = 0;
    w.b.last_layer = 1;
    assert_int_equal(model_forward(w.m, &w.b, &w.err), 0);
    free(streams);
    teardown(&w);
}

static void test_model_forward__rows_must_be_in_order_and_within_the_scratch(void **state)
{
    (void)state;
    struct world w;
    setup(&w);
    w.b.T = ROWS + 1;
    refused(&w, "9 rows, at most 8");
    w.b.T = 3;
    refused(&w, "cover 2 of 3 rows");
    w.b.T = 2;
    w.seq.pos0 = -1;
    refused(&w, "not in order");
    w.seq.pos0 = INT64_MAX;
    refused(&w, "not in order");
    w.seq.pos0 = 0;
    w.seq.topk = 0;
    refused(&w, "index_topk 0");
    w.seq.topk = MODEL_MAX_TOPK + 1;
    refused(&w, "index_topk 4097");
    w.seq.topk = 4;
    w.rows[0] = 2;
    refused(&w, "logit row 2");
    w.rows[0] = w.rows[1] = 1;
    w.b.n_logit_rows = 2;
    refused(&w, "logit row 1");
    teardown(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_forward__page_ids_must_lie_in_the_pool),
        cmocka_unit_test(test_model_forward__layers_must_be_a_part_of_the_stack),
        cmocka_unit_test(test_model_forward__rows_must_be_in_order_and_within_the_scratch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
