/* What model_forward() refuses before a kernel sees it, that its draws are those of its logits, and
 * that layers which repeat others are those layers.
 * What it computes: tests/golden. TOW_TEST_DEVICE=cuda:0: on that device. */
#include "tests/support/check.h"
#include "tests/support/device.h"

#include "common/base/err.h"
#include "common/kv/table.h"
#include "common/model/checkpoint.h"
#include "common/model/forward.h"
#include "common/model/sample.h"
#include "kernels/dev.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    const struct model_options o = {.device = test_device(),
                                    .n_threads = 1,
                                    .exact = true,
                                    .kv_fmt = KERN_KV_F32,
                                    .ik_fmt = KERN_IK_F32,
                                    .max_rows = ROWS};
    if (model_open(&w->m, "tests/golden/data/exact-bf16/checkpoint", &o, &w->err) < 0)
        fail_msg("%s", w->err.msg);
    const struct kern_kv_layout *l = model_peek_layout(w->m);
    w->pages = kern_dev_alloc(model_peek_dev(w->m), (size_t)l->page_bytes * PAGES);
    w->tail = kern_dev_alloc(model_peek_dev(w->m), (size_t)l->tail_bytes);
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
    kern_dev_free(model_peek_dev(w->m), w->pages);
    kern_dev_free(model_peek_dev(w->m), w->tail);
    model_close(w->m);
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

/* ------------------------------------------------------------------ draws */

enum { SEQS = 5, TOKENS = 6 };

/* What differs between the rows of a batch; sequence 2 edits most of the vocabulary. */
static void ask(struct model_draw *d, const int32_t *output, int32_t n_output)
{
    static const struct model_bias bias[] = {{5, 3}, {9, -100}, {5, 1}};
    const struct model_sampling forms[SEQS] = {
        {.top_p = 1, .n_logprobs = -1},
        {.temperature = 0.8f, .top_p = 0.9f, .seed = 3, .n_logprobs = 20},
        {.temperature = 1, .top_p = 1, .frequency_penalty = 0.5f, .n_logprobs = 0},
        {.temperature = 2, .top_p = 1, .top_k = 30, .bias = bias, .n_bias = 3, .n_logprobs = -1},
        {.temperature = 1, .top_p = 0.99f, .min_p = 0.01f, .repetition_penalty = 1.3f}};
    for (int i = 0; i < SEQS; i++)
        d[i] = (struct model_draw){.sampling = forms[i],
                                   .output = output,
                                   .n_output = i == 2 ? n_output : 7,
                                   .index = (uint64_t)n_output};
}

static void check_draws(struct model_sampler *s, float *logits, int32_t V,
                        const struct model_draw *got, int n)
{
    for (int i = 0; i < n; i++) {
        struct model_draw d = got[i];
        memset(&d.choice, 0x5a, sizeof d.choice);
        assert_int_equal(model_sample(s, logits + (int64_t)i * V, &d), got[i].choice.rc);
        assert_memory_equal(&d.choice, &got[i].choice, sizeof d.choice);
    }
}

/* A prompt of two rows each, then steps, which a device launches as a graph from the third on. Each
 * pass twice: with logits beside the draws, and without. */
static void test_model_forward__draws_are_those_of_its_logits(void **state)
{
    (void)state;
    struct world w;
    struct model_sampler *s;
    struct model_draw draws[SEQS], alone[SEQS];
    struct kern_seq q[SEQS];
    int32_t ids[2 * SEQS], rows[SEQS];
    uint32_t pages[SEQS] = {0, 1, 2, 3, 4};
    setup(&w);
    struct kern_dev *dev = model_peek_dev(w.m);
    const struct kern_kv_layout *l = model_peek_layout(w.m);
    const int32_t V = model_peek_weights(w.m)->shape.V;
    uint8_t *pool = kern_dev_alloc(dev, (size_t)l->page_bytes * SEQS),
            *tails = kern_dev_alloc(dev, (size_t)l->tail_bytes * SEQS);
    float *logits = malloc((size_t)SEQS * (size_t)V * sizeof *logits);
    int32_t *output = malloc((size_t)V * sizeof *output);
    assert_true(pool && tails && logits && output);
    assert_int_equal(model_sampler_new(&s, V, NULL), 0);
    for (int32_t i = 0; i < V; i++) output[i] = i;
    for (int at = 0; at < TOKENS; at++) {
        const int32_t n_rows = at ? 1 : 2, n = at ? SEQS : 4; /* a pass has at most ROWS rows */
        for (int i = 0; i < n; i++) {
            q[i] = (struct kern_seq){.row0 = i * n_rows,
                                     .n_rows = n_rows,
                                     .pos0 = at ? at + 1 : 0,
                                     .page_ids = &pages[i],
                                     .n_pages = 1,
                                     .tail = tails + (int64_t)i * l->tail_bytes,
                                     .topk = 4};
            rows[i] = i * n_rows + n_rows - 1;
            for (int r = 0; r < n_rows; r++) ids[i * n_rows + r] = 3 + at * 7 + i + r;
        }
        struct model_batch b = {.ids = ids,
                                .T = n * n_rows,
                                .seqs = q,
                                .n_seqs = n,
                                .pages = pool,
                                .n_pages = SEQS,
                                .logit_rows = rows,
                                .n_logit_rows = n,
                                .logits = logits,
                                .draws = draws};
        ask(draws, output, V - at);
        if (model_forward(w.m, &b, &w.err) < 0) fail_msg("%s", w.err.msg);
        check_draws(s, logits, V, draws, n);
        ask(alone, output, V - at);
        b.logits = NULL;
        b.draws = alone;
        if (model_forward(w.m, &b, &w.err) < 0) fail_msg("%s", w.err.msg);
        for (int i = 0; i < n; i++)
            assert_memory_equal(&alone[i].choice, &draws[i].choice, sizeof draws[i].choice);
    }
    w.b.logits = NULL;
    refused(&w, "neither logits nor draws");
    kern_dev_free(dev, pool);
    kern_dev_free(dev, tails);
    free(logits);
    free(output);
    model_sampler_free(s);
    teardown(&w);
}

static void test_model_forward__fp8_products_are_refused_where_there_are_none(void **state)
{
    (void)state;
    struct model *m = NULL;
    struct tow_err err;
    const struct model_options o = {.device = "cpu",
                                    .n_threads = 1,
                                    .kv_fmt = KERN_KV_FP8,
                                    .ik_fmt = KERN_IK_FP4,
                                    .max_rows = ROWS,
                                    .fp8_products = true};
    assert_int_equal(model_open(&m, "tests/golden/data/exact-bf16/checkpoint", &o, &err),
                     TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "--products fp8: --device cpu ("));
    assert_null(m);
}

/* ------------------------------------------------------------------ repeated layers */

/* dir/config.json to out_dir, with edits: the first place that has one's first text gets its
 * second. */
static void copy_config(const char *dir, const char *out_dir, const char *const (*edits)[2],
                        int n_edits)
{
    char path[300], text[8192], *at;
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    snprintf(path, sizeof path, "%s/config.json", out_dir);
    f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < n_edits; i++) {
        const size_t was = strlen(edits[i][0]), is = strlen(edits[i][1]);
        if (!(at = strstr(text, edits[i][0]))) fail_msg("no %s in config.json", edits[i][0]);
        assert_true(n + is - was < sizeof text);
        memmove(at + is, at + was, n - (size_t)(at - text) - was + 1);
        memcpy(at, edits[i][1], is);
        n += is - was;
    }
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
}

/* The tensors of dir, and those of layers from .. n-1 once more as the layers that follow. */
static void copy_tensors(const char *dir, const char *out_dir, int from, int n, int n_all)
{
    struct model_checkpoint *ck;
    struct model_safetensors_writer *w;
    struct tow_err err = {0};
    static char names[4096][128];
    char path[300];
    int n_names = 0;
    if (model_checkpoint_open(&ck, dir, &err) < 0) fail_msg("%s", err.msg);
    assert_int_equal(model_safetensors_writer_new(&w, &err), 0);
    for (size_t i = 0; i < model_checkpoint_count(ck); i++) {
        const struct model_tensor *t = model_checkpoint_at(ck, i);
        int layer, rest = 0;
        if (model_safetensors_writer_add(w, t->name, t->dtype, t->n_dims, t->dims, t->data, &err) <
            0)
            fail_msg("%s", err.msg);
        if (sscanf(t->name, "layers.%d.%n", &layer, &rest) != 1 || layer < from) continue;
        for (int to = layer + n - from; to < n_all; to += n - from) {
            assert_true(n_names < 4096);
            snprintf(names[n_names], sizeof names[0], "layers.%d.%s", to, t->name + rest);
            if (model_safetensors_writer_add(w, names[n_names++], t->dtype, t->n_dims, t->dims,
                                             t->data, &err) < 0)
                fail_msg("%s", err.msg);
        }
    }
    snprintf(path, sizeof path, "%s/model.safetensors", out_dir);
    if (model_safetensors_writer_write(w, path, &err) < 0) fail_msg("%s", err.msg);
    model_safetensors_writer_free(w);
    model_checkpoint_close(ck);
}

/* A prompt of several rows and a row after it, in a model of n_layers; what the logits are. */
static float *logits_of(const char *dir, const struct model_options *form, int32_t n_layers,
                        size_t *n)
{
    enum { PROMPT = 7 };
    struct model *m;
    struct tow_err err = {0};
    struct model_options o = *form;
    int32_t ids[PROMPT] = {3, 17, 29, 5, 3, 80, 41};
    uint32_t pages[] = {0};
    o.device = test_device();
    o.n_threads = 1;
    o.max_rows = PROMPT;
    o.n_layers = n_layers;
    if (model_open(&m, dir, &o, &err) < 0) fail_msg("%s", err.msg);
    struct kern_dev *dev = model_peek_dev(m);
    const struct kern_kv_layout *l = model_peek_layout(m);
    const int32_t V = model_peek_weights(m)->shape.V;
    uint8_t *pool = kern_dev_alloc(dev, (size_t)l->page_bytes),
            *tail = kern_dev_alloc(dev, (size_t)l->tail_bytes);
    float *logits = malloc((PROMPT + 1) * (size_t)V * sizeof *logits);
    const int32_t rows[PROMPT] = {0, 1, 2, 3, 4, 5, 6};
    assert_true(pool && tail && logits);
    for (int i = 0; i < 2; i++) {
        const struct kern_seq q = {.n_rows = i ? 1 : PROMPT,
                                   .pos0 = i ? PROMPT : 0,
                                   .page_ids = pages,
                                   .n_pages = 1,
                                   .tail = tail,
                                   .topk = 4};
        const struct model_batch b = {.ids = ids,
                                      .T = q.n_rows,
                                      .seqs = &q,
                                      .n_seqs = 1,
                                      .pages = pool,
                                      .n_pages = 1,
                                      .logit_rows = rows,
                                      .n_logit_rows = q.n_rows,
                                      .logits = logits + i * PROMPT * (size_t)V};
        if (model_forward(m, &b, &err) < 0) fail_msg("%s", err.msg);
    }
    kern_dev_free(dev, pool);
    kern_dev_free(dev, tail);
    model_close(m);
    *n = (PROMPT + 1) * (size_t)V;
    return logits;
}

/* 7 and 8 layers of 3 and 4: the second round of repeats is a whole one, and one cut short. */
static void test_model_forward__repeated_layers_are_those_written_again(void **state)
{
    (void)state;
    static const struct {
        const char *dir, *edits[2][2];
        int from, n, n_all;
        struct model_options o;
    } forms[] = {{"tests/golden/data/exact-bf16/checkpoint",
                  {{"\"num_hidden_layers\": 4", "\"num_hidden_layers\": 8"},
                   {"4,\n    128,\n    4,\n", "4, 128, 4, 4, 128, 4, 4,"}},
                  1,
                  4,
                  8,
                  {.exact = true, .kv_fmt = KERN_KV_F32, .ik_fmt = KERN_IK_F32}},
                 {"tests/golden/data/native/checkpoint",
                  {{"\"num_hidden_layers\": 3", "\"num_hidden_layers\": 7"},
                   {"4,\n    128,\n", "4, 128, 4, 128, 4, 128,"}},
                  1,
                  3,
                  7,
                  {.kv_fmt = KERN_KV_FP8, .ik_fmt = KERN_IK_FP4, .expert_aq = KERN_AQ_A128}}};
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        char dir[] = "/tmp/towpath-layers-XXXXXX", path[64];
        size_t n, n_written, n_short;
        assert_non_null(mkdtemp(dir));
        copy_config(forms[f].dir, dir, forms[f].edits, 2);
        copy_tensors(forms[f].dir, dir, forms[f].from, forms[f].n, forms[f].n_all);
        float *repeated = logits_of(forms[f].dir, &forms[f].o, forms[f].n_all, &n),
              *written = logits_of(dir, &forms[f].o, 0, &n_written),
              *few = logits_of(forms[f].dir, &forms[f].o, 0, &n_short);
        assert_int_equal(n, n_written);
        assert_memory_equal(repeated, written, n * sizeof *written);
        assert_int_equal(n, n_short);
        assert_memory_not_equal(few, written, n * sizeof *written);
        free(repeated);
        free(written);
        free(few);
        snprintf(path, sizeof path, "%s/config.json", dir);
        unlink(path);
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        unlink(path);
        rmdir(dir);
    }
}

int main(void)
{
    const int absent = test_device_there(test_device());
    if (absent) return absent;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_forward__page_ids_must_lie_in_the_pool),
        cmocka_unit_test(test_model_forward__layers_must_be_a_part_of_the_stack),
        cmocka_unit_test(test_model_forward__rows_must_be_in_order_and_within_the_scratch),
        cmocka_unit_test(test_model_forward__fp8_products_are_refused_where_there_are_none),
        cmocka_unit_test(test_model_forward__draws_are_those_of_its_logits),
        cmocka_unit_test(test_model_forward__repeated_layers_are_those_written_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
