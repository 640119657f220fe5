/* The demo model answers as its smoke.json says: messages to segments to ids, the prompt in chunks
 * of 512 and then greedy steps through the engine in deployed mode, fp4 index keys, top-k 64.
 *
 * A case whose smallest logit gap is at least SURE must give the recorded ids to the last one;
 * below that another correct implementation may choose differently, so a first difference is
 * accepted there if our own two best logits were that near.
 * The answer must hold every string of `expect` in any case. */
#include "tests/support/device.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/kv/table.h"
#include "common/model/forward.h"
#include "common/text/chat.h"
#include "common/text/detok.h"
#include "common/text/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 512, MAX_PROMPT = 16384, MAX_ANSWER = 512, SEED = 7 };
#define SURE 1.0

struct smoke {
    struct json *root;
    const struct json *cases;
    struct text_tokenizer *tok;
    struct model *m;
    uint8_t *pages, *tails;
    struct kv_pool *pool;
    float *logits;
    struct tow_err err;
};

static const char *dir(void)
{
    const char *d = getenv("TOWPATH_DEMO_MODEL");
    return d ? d : "deploy/demo-model";
}

static struct json *load_json(const char *path)
{
    struct tow_err err = {0};
    struct json *root = NULL;
    struct tow_buf text;
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s: cannot be opened", path);
    tow_buf_init(&text, 0);
    for (size_t n = 1; n > 0;) {
        char *room = tow_buf_room(&text, 65536);
        assert_non_null(room);
        text.len += n = fread(room, 1, 65536, f);
    }
    fclose(f);
    if (json_parse(&root, text.data, text.len, NULL, &err) < 0) fail_msg("%s: %s", path, err.msg);
    tow_buf_fini(&text);
    return root;
}

static int set_up(void **state)
{
    struct smoke *s = calloc(1, sizeof *s);
    char path[512];
    snprintf(path, sizeof path, "%s/smoke.json", dir());
    s->root = load_json(path);
    assert_non_null(s->cases = json_require(s->root, "cases", &s->err));
    snprintf(path, sizeof path, "%s/tokenizer.json", dir());
    if (text_tokenizer_load(&s->tok, path, &s->err) < 0) fail_msg("%s", s->err.msg);
    const struct model_options opt = {.device = test_device(),
                                      .kv_fmt = KERN_KV_FP8,
                                      .ik_fmt = KERN_IK_FP4,
                                      .expert_aq = KERN_AQ_A128,
                                      .fp8_products = test_products_fp8(),
                                      .index_topk = 64,
                                      .max_rows = CHUNK};
    if (model_open(&s->m, dir(), &opt, &s->err) < 0) fail_msg("%s", s->err.msg);
    const struct kern_kv_layout *lay = model_peek_layout(s->m);
    const uint32_t n = (uint32_t)kern_kv_pages_for(MAX_PROMPT + MAX_ANSWER, lay->page_tokens);
    s->pages = kern_dev_alloc(model_peek_dev(s->m), (size_t)n * (size_t)lay->page_bytes);
    s->tails = kern_dev_alloc(model_peek_dev(s->m), (size_t)lay->tail_bytes);
    s->logits = calloc((size_t)model_peek_weights(s->m)->shape.V, sizeof *s->logits);
    assert_true(s->pages && s->tails && s->logits);
    if (kv_pool_new(&s->pool, s->pages, n, (size_t)lay->page_bytes, s->tails, 1,
                    (size_t)lay->tail_bytes, &s->err) < 0)
        fail_msg("%s", s->err.msg);
    kv_pool_shuffle(s->pool, SEED);
    *state = s;
    return 0;
}

static int tear_down(void **state)
{
    struct smoke *s = *state;
    kv_pool_free(s->pool);
    kern_dev_free(model_peek_dev(s->m), s->pages);
    kern_dev_free(model_peek_dev(s->m), s->tails);
    model_close(s->m);
    text_tokenizer_free(s->tok);
    json_free(s->root);
    free(s->logits);
    free(s);
    return 0;
}

/* The prompt's ids, as a server would make them of the request. */
static void encode(struct smoke *s, const struct json *c, struct text_ids *ids)
{
    struct text_chat_options o = {.tools = json_find(c, "tools")};
    struct text_chat_prompt prompt = {0};
    assert_true(json_bool(json_find(c, "thinking"), &o.thinking));
    if (text_chat_encode(&prompt, json_find(c, "messages"), &o, &s->err) < 0 ||
        text_tokenizer_encode(s->tok, prompt.segs, prompt.n_segs, MAX_PROMPT, ids, NULL, &s->err) <
            0)
        fail_msg("%s", s->err.msg);
    text_chat_prompt_fini(&prompt);
}

/* Runs the rows ids[0..n) at pos0; the last row's logits are in s->logits. */
static void pass(struct smoke *s, const struct kv_table *t, const text_id *ids, int32_t n,
                 int64_t pos0, bool want_logits)
{
    const struct kern_seq q = {.n_rows = n,
                               .pos0 = pos0,
                               .page_ids = t->ids,
                               .n_pages = (int32_t)t->n_pages,
                               .tail = kv_pool_tail(s->pool, t->tail),
                               .topk = model_peek_options(s->m)->index_topk};
    const int32_t last = n - 1;
    const struct model_batch b = {.ids = ids,
                                  .T = n,
                                  .seqs = &q,
                                  .n_seqs = 1,
                                  .pages = s->pages,
                                  .n_pages = kv_pool_capacity(s->pool),
                                  .logit_rows = &last,
                                  .n_logit_rows = want_logits,
                                  .logits = s->logits};
    if (model_forward(s->m, &b, &s->err) < 0) fail_msg("%s", s->err.msg);
}

static text_id largest(const float *x, int32_t V, double *gap)
{
    text_id best = 0;
    double second = -INFINITY;
    for (int32_t i = 1; i < V; i++) {
        if (x[i] > x[best]) {
            second = (double)x[best];
            best = i;
        } else if ((double)x[i] > second) {
            second = (double)x[i];
        }
    }
    *gap = (double)x[best] - second;
    return best;
}

/* Greedy steps until an end token; *n ids in out, and how near each choice was in gaps. */
static void answer(struct smoke *s, const struct text_ids *prompt, text_id *out, double *gaps,
                   size_t *n, uint64_t *prefill_us, uint64_t *decode_us)
{
    const struct text_config *cfg = &model_peek_weights(s->m)->config;
    const int32_t page_tokens = model_peek_layout(s->m)->page_tokens;
    struct kv_table t;
    kv_table_init(&t);
    assert_int_equal(
        kv_table_grow(&t, s->pool,
                      (uint32_t)kern_kv_pages_for((int64_t)prompt->n + MAX_ANSWER, page_tokens)),
        0);
    uint64_t begin = tow_now_us();
    for (size_t at = 0; at < prompt->n; at += CHUNK) {
        size_t rows = prompt->n - at < CHUNK ? prompt->n - at : CHUNK;
        pass(s, &t, prompt->ids + at, (int32_t)rows, (int64_t)at, at + rows == prompt->n);
    }
    uint64_t middle = tow_now_us();
    for (*n = 0; *n < MAX_ANSWER;) {
        text_id id = out[*n] = largest(s->logits, cfg->vocab_size, &gaps[*n]);
        ++*n;
        bool ends = false;
        for (int32_t i = 0; i < cfg->n_eos; i++) ends |= id == cfg->eos_ids[i];
        if (ends) break;
        pass(s, &t, &id, 1, (int64_t)(prompt->n + *n - 1), true);
    }
    *prefill_us = middle - begin;
    *decode_us = tow_now_us() - middle;
    kv_table_fini(&t, s->pool);
}

static void check_ids(const char *name, const struct json *c, const text_id *ids,
                      const double *gaps, size_t n, size_t *first_difference)
{
    const struct json *want = json_find(c, "greedy_ids");
    double recorded_gap;
    size_t i = 0;
    assert_int_equal(json_type(want), JSON_ARRAY);
    assert_true(json_double(json_find(c, "smallest_logit_gap"), &recorded_gap));
    *first_difference = SIZE_MAX;
    JSON_EACH(it, want)
    {
        int64_t id;
        assert_true(json_int(it, &id));
        if (i >= n || ids[i] != id) {
            *first_difference = i;
            if (recorded_gap >= SURE || i >= n || gaps[i] >= SURE)
                fail_msg("%s: step %zu: %lld was recorded, %d chosen (gap %.3f)", name, i,
                         (long long)id, i < n ? ids[i] : -1, i < n ? gaps[i] : 0.0);
            return; /* another way from here on, by a near tie */
        }
        i++;
    }
    if (i != n) fail_msg("%s: %zu ids, %zu were recorded", name, n, i);
}

static void run_case(struct smoke *s, const struct json *c)
{
    static text_id ids[MAX_ANSWER];
    static double gaps[MAX_ANSWER];
    const char *name = json_string(json_find(c, "name"), NULL);
    struct text_ids prompt = {0};
    size_t n, first;
    uint64_t prefill_us, decode_us;
    int64_t prompt_tokens;
    assert_non_null(name);
    encode(s, c, &prompt);
    assert_true(json_int(json_find(c, "prompt_tokens"), &prompt_tokens));
    if ((int64_t)prompt.n != prompt_tokens)
        fail_msg("%s: prompt of %zu ids, %lld were recorded", name, prompt.n,
                 (long long)prompt_tokens);

    answer(s, &prompt, ids, gaps, &n, &prefill_us, &decode_us);
    struct tow_buf text;
    tow_buf_init(&text, 0);
    text_detok_all(s->tok, ids, n, false, &text);
    size_t closest = 0;
    for (size_t i = 1; i < n; i++)
        if (gaps[i] < gaps[closest]) closest = i;
    check_ids(name, c, ids, gaps, n, &first);
    printf("%-42s prompt %5zu, answer %3zu, smallest gap %6.3f, %s; %.2f s + %.2f s\n", name,
           prompt.n, n, gaps[closest], first == SIZE_MAX ? "no difference" : "near tie",
           (double)prefill_us / 1e6, (double)decode_us / 1e6);
    if (first != SIZE_MAX) printf("    first difference at step %zu\n", first);

    const struct json *expect = json_find(c, "expect");
    assert_true(json_size(expect) > 0);
    JSON_EACH(it, expect)
    {
        const char *want = json_string(it, NULL);
        assert_non_null(want);
        if (!strstr(text.data, want))
            fail_msg("%s: the answer lacks \"%s\": %s", name, want, text.data);
    }
    tow_buf_fini(&text);
    text_ids_fini(&prompt);
}

static void answers_as_recorded(void **state)
{
    struct smoke *s = *state;
    size_t n = 0;
    JSON_EACH(c, s->cases)
    {
        run_case(s, c);
        n++;
    }
    assert_int_equal(n, 20);
}

int main(void)
{
    const int absent = test_device_there(test_device());
    if (absent) return absent;
    setvbuf(stdout, NULL, _IOLBF, 0);
    const struct CMUnitTest tests[] = {cmocka_unit_test(answers_as_recorded)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
