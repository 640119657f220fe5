/* Tests of router/capture.h and router/capture_rows.h: what is asked, where it is found, what a
 * client is told. The tokenizer is the demo model's, the layers are those of a small model. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/json.h"
#include "common/text/tokenizer.h"
#include "router/api_response.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKENIZER "deploy/demo-model/tokenizer.json"

static struct text_tokenizer *tok;
static const int32_t ratios[6] = {0, 0, 4, 8, 4, 8};

static int load(void **state)
{
    (void)state;
    struct tow_err err;
    if (text_tokenizer_load(&tok, TOKENIZER, &err) == 0) return 0;
    fprintf(stderr, "%s\n", err.msg);
    return -1;
}

static int unload(void **state)
{
    (void)state;
    text_tokenizer_free(tok);
    return 0;
}

static int parse(enum rtr_route route, const char *body, bool allowed, struct rtr_ask **out,
                 struct rtr_api_error *e)
{
    struct rtr_ask_rules rules = {.tok = tok,
                                  .model_name = "m",
                                  .context_length = 10000,
                                  .max_body_bytes = 1 << 20,
                                  .index_capture = allowed,
                                  .ratios = ratios,
                                  .n_layers = 6};
    return rtr_ask_parse(out, route, body, strlen(body), &rules, e);
}

/* The completion of `prompt` (JSON) with that capture (JSON). */
static struct rtr_ask *ask(const char *prompt, const char *capture)
{
    struct rtr_api_error e;
    struct rtr_ask *a = NULL;
    struct tow_buf body;
    tow_buf_init(&body, 0);
    tow_buf_printf(&body, "{\"prompt\": %s, \"index_capture\": %s}", prompt, capture);
    if (parse(RTR_COMPLETIONS, body.data, true, &a, &e) < 0) fail_msg("%s", e.message);
    tow_buf_fini(&body);
    return a;
}

static void refused(const char *prompt, const char *capture, const char *param, const char *says)
{
    struct rtr_api_error e;
    struct rtr_ask *a = NULL;
    struct tow_buf body;
    tow_buf_init(&body, 0);
    tow_buf_printf(&body, "{\"prompt\": %s, \"index_capture\": %s}", prompt, capture);
    if (parse(RTR_COMPLETIONS, body.data, true, &a, &e) == 0) fail_msg("taken: %s", capture);
    assert_null(a);
    assert_int_equal(e.status, 400);
    assert_string_equal(e.code, "invalid_index_capture");
    assert_string_equal(e.param, param);
    if (strncmp(e.message, param, strlen(param)) || !strstr(e.message, says))
        fail_msg("'%s' says not '%s'", e.message, says);
    tow_buf_fini(&body);
}

static struct wire_capture unpacked(const struct rtr_ask *a)
{
    struct wire_capture c;
    assert_int_equal(wire_get_capture(&c, a->req.capture, a->req.capture_bytes), 0);
    return c;
}

/* The bytes of the tokens of span i. */
static void span_text(const struct rtr_ask *a, uint32_t i, struct tow_buf *out)
{
    struct rtr_capture_span s = a->capture->spans[i];
    tow_buf_init(out, 0);
    for (uint32_t k = s.start; k < s.end; k++) {
        size_t n;
        const uint8_t *p = text_tokenizer_peek(tok, a->req.choices[0].prompt[k], &n);
        tow_buf_put(out, p, n);
    }
}

static size_t token_bytes(const struct rtr_ask *a, uint32_t i)
{
    size_t n;
    text_tokenizer_peek(tok, a->req.choices[0].prompt[i], &n);
    return n;
}

/* Found, it is the smallest run of whole tokens that holds the text. */
static void found(const struct rtr_ask *a, const char *text)
{
    struct tow_buf all;
    struct rtr_capture_span s = a->capture->spans[0];
    assert_int_equal(a->capture->n_spans, 1);
    span_text(a, 0, &all);
    const char *at = memmem(all.data, all.len, text, strlen(text));
    assert_non_null(at);
    assert_true((size_t)(at - all.data) < token_bytes(a, s.start));
    size_t behind = all.len - (size_t)(at - all.data) - strlen(text);
    assert_true(behind < token_bytes(a, s.end - 1));
    tow_buf_fini(&all);
}

/* ---- reading ---- */

static void test_capture__defaults_are_those_of_the_contract(void **state)
{
    (void)state;
    struct rtr_ask *a = ask("[5, 6, 7, 8, 9, 10]", "{\"spans\": [[1, 3]]}");
    struct wire_capture c = unpacked(a);
    assert_int_equal(c.steps, WIRE_CAPTURE_PREFILL);
    assert_int_equal(c.max_steps, 64);
    assert_int_equal(c.layers.n, 0);
    assert_int_equal(c.shadow, 0);
    assert_int_equal(c.lists, 0);
    assert_null(a->capture->expect);
    assert_false(a->req.capture_shadow);
    rtr_ask_free(a);
    a = ask("[5, 6, 7, 8]",
            "{\"spans\": [[0, 4]], \"steps\": \"all\", \"max_steps\": 4096, \"layers\": [4, 2, 4], "
            "\"shadow\": [\"fp4\", \"bf16\"], \"lists\": true, \"expect\": \"é\"}");
    c = unpacked(a);
    assert_int_equal(c.steps, WIRE_CAPTURE_ALL);
    assert_int_equal(c.max_steps, 4096);
    assert_int_equal(c.layers.n, 2);
    assert_int_equal(wire_ids_at(c.layers, 0), 2);
    assert_int_equal(wire_ids_at(c.layers, 1), 4);
    assert_int_equal(c.shadow, 1 << WIRE_SHADOW_BF16 | 1 << WIRE_SHADOW_FP4);
    assert_int_equal(c.lists, 1);
    assert_int_equal(a->capture->expect_len, 2);
    assert_true(a->req.capture_shadow);
    rtr_ask_free(a);
    a = ask("[5]", "{\"spans\": [[0, 1]], \"steps\": null, \"layers\": \"all\", \"shadow\": [], "
                   "\"lists\": null, \"max_steps\": null, \"expect\": null}");
    assert_int_equal(unpacked(a).max_steps, 64);
    rtr_ask_free(a);
    struct rtr_api_error e;
    assert_int_equal(
        parse(RTR_COMPLETIONS, "{\"prompt\": \"x\", \"index_capture\": null}", true, &a, &e), 0);
    assert_null(a->capture);
    assert_null(a->req.capture);
    rtr_ask_free(a);
}

/* Token t is in the entries t / 4 and t / 4 + 1. */
static void test_capture__entries_are_those_that_cover_a_token(void **state)
{
    (void)state;
    static const struct {
        const char *spans;
        uint32_t n, entries[8];
    } cases[] = {{"[[0, 1]]", 2, {0, 1}},
                 {"[[3, 4]]", 2, {0, 1}},
                 {"[[3, 5]]", 3, {0, 1, 2}},
                 {"[[4, 8]]", 2, {1, 2}},
                 {"[[4, 9]]", 3, {1, 2, 3}},
                 {"[[12, 13], [0, 1]]", 4, {0, 1, 3, 4}},
                 {"[[0, 9], [4, 5], [8, 13]]", 5, {0, 1, 2, 3, 4}},
                 {"[[0, 1], [0, 1]]", 2, {0, 1}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char capture[128];
        snprintf(capture, sizeof capture, "{\"spans\": %s}", cases[i].spans);
        struct rtr_ask *a = ask("[5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]", capture);
        struct wire_capture c = unpacked(a);
        assert_int_equal(c.entries.n, cases[i].n);
        for (uint32_t k = 0; k < c.entries.n; k++)
            assert_int_equal(wire_ids_at(c.entries, k), cases[i].entries[k]);
        rtr_ask_free(a);
    }
}

static void test_capture__wrong_fields_are_named(void **state)
{
    (void)state;
    static const char five[] = "[5, 6, 7, 8, 9]";
    static const char spans[] = "index_capture.spans", layers[] = "index_capture.layers";
    refused(five, "true", "index_capture", "an object, is true");
    refused(five, "[]", "index_capture", "an object, is an array");
    refused(five, "{}", spans, "missing");
    refused(five, "{\"spans\": []}", spans, "0 spans, must be 1 to 16");
    refused(five, "{\"spans\": 5}", spans, "is 5");
    refused(five, "{\"spans\": [5]}", spans,
            "[0]: must be [start, end] or {\"text\": \"...\"}, is 5");
    refused(five, "{\"spans\": [[0, 1], [1]]}", spans, "[1]: must be [start, end], is a list of 1");
    refused(five, "{\"spans\": [[0, 1, 2]]}", spans, "[0]: must be [start, end], is a list of 3");
    refused(five, "{\"spans\": [[0.0, 1]]}", spans, "two integers, is [0.0, 1]");
    refused(five, "{\"spans\": [[\"0\", 1]]}", spans, "two integers, is [\"0\", 1]");
    refused(five, "{\"spans\": [[0, 6]]}", spans, "[0, 6] is no span of the prompt, which has 5");
    refused(five, "{\"spans\": [[5, 6]]}", spans, "[5, 6]");
    refused(five, "{\"spans\": [[-1, 2]]}", spans, "[-1, 2]");
    refused(five, "{\"spans\": [[2, 2]]}", spans, "[2, 2]");
    refused(five, "{\"spans\": [[3, 2]]}", spans, "[3, 2]");
    refused(five, "{\"spans\": [[0, 9223372036854775807]]}", spans, "9223372036854775807");
    refused(five,
            "{\"spans\": [[0,1],[0,1],[0,1],[0,1],[0,1],[0,1],[0,1],[0,1],[0,1],[0,1],[0,1],"
            "[0,1],[0,1],[0,1],[0,1],[0,1],[0,1]]}",
            spans, "17 spans");
    refused(five, "{\"spans\": {\"text\": 5}}", spans, "not empty, is 5");
    refused(five, "{\"spans\": {\"text\": \"\"}}", spans, "not empty, is \"\"");
    refused(five, "{\"spans\": {}}", spans, "not empty, is missing");
    refused(five, "{\"spans\": [[0, 1]], \"steps\": \"some\"}", "index_capture.steps",
            "\"prefill_last\", \"decode\" or \"all\"");
    refused(
        five, "{\"spans\": [[0, 1]], \"stpes\": \"all\"}", "index_capture",
        "has no field \"stpes\"; its fields are spans, steps, max_steps, layers, shadow, lists, "
        "expect");
    refused(five, "{\"span\": [[0, 1]]}", "index_capture", "has no field \"span\"");
    refused(five, "{\"spans\": {\"text\": \"x\", \"nth\": 2}}", spans,
            "has no field \"nth\"; its fields are text");
    refused(five, "{\"spans\": [[0, 1]], \"steps\": 1}", "index_capture.steps", "\"all\", is 1");
    refused(five, "{\"spans\": [[0, 1]], \"max_steps\": 0}", "index_capture.max_steps",
            "1 to 4096, is 0");
    refused(five, "{\"spans\": [[0, 1]], \"max_steps\": 4097}", "index_capture.max_steps",
            "1 to 4096, is 4097");
    refused(five, "{\"spans\": [[0, 1]], \"max_steps\": \"8\"}", "index_capture.max_steps",
            "1 to 4096, is \"8\"");
    refused(five, "{\"spans\": [[0, 1]], \"layers\": [3]}", layers,
            "layer 3 has no indexer; layers with an indexer: 2, 4");
    refused(five, "{\"spans\": [[0, 1]], \"layers\": [2, 6]}", layers, "layer 6");
    refused(five, "{\"spans\": [[0, 1]], \"layers\": [-1]}", layers, "layer -1");
    refused(five, "{\"spans\": [[0, 1]], \"layers\": [\"2\"]}", layers,
            "is \"2\"; layers with an indexer: 2, 4");
    refused(five, "{\"spans\": [[0, 1]], \"layers\": []}", layers,
            "is an empty list; layers with an indexer: 2, 4");
    refused(five, "{\"spans\": [[0, 1]], \"layers\": \"some\"}", layers,
            "is \"some\"; layers with an indexer: 2, 4");
    refused(five, "{\"spans\": [[0, 1]], \"layers\": 2}", layers,
            "is 2; layers with an indexer: 2, 4");
    refused(five, "{\"spans\": [[0, 1]], \"shadow\": \"fp8\"}", "index_capture.shadow",
            "is \"fp8\"");
    refused(five, "{\"spans\": [[0, 1]], \"shadow\": [\"fp16\"]}", "index_capture.shadow",
            "\"fp4\", is \"fp16\"");
    refused(five, "{\"spans\": [[0, 1]], \"shadow\": [8]}", "index_capture.shadow",
            "\"fp4\", is 8");
    refused(five, "{\"spans\": [[0, 1]], \"lists\": 1}", "index_capture.lists", "is 1");
    refused(five, "{\"spans\": [[0, 1]], \"expect\": \"\"}", "index_capture.expect",
            "1 to 4096 bytes, is \"\"");
    refused(five, "{\"spans\": [[0, 1]], \"expect\": [\"x\"]}", "index_capture.expect",
            "1 to 4096 bytes, is an array");
}

static void test_capture__one_answer_only_and_only_where_allowed(void **state)
{
    (void)state;
    struct rtr_ask *a = NULL;
    struct rtr_api_error e;
    static const char *const many[] = {
        "{\"prompt\": \"x\", \"n\": 2, \"index_capture\": {\"spans\": [[0, 1]]}}",
        "{\"prompt\": [\"x\", \"y\"], \"index_capture\": {\"spans\": [[0, 1]]}}"};
    for (int i = 0; i < 2; i++) {
        assert_true(parse(RTR_COMPLETIONS, many[i], true, &a, &e) < 0);
        assert_string_equal(e.code, "invalid_index_capture");
        assert_string_equal(e.param, "index_capture");
        assert_non_null(strstr(e.message, "make 2"));
    }
    assert_true(parse(RTR_COMPLETIONS, many[0], false, &a, &e) < 0);
    assert_int_equal(e.status, 400);
    assert_string_equal(e.code, "index_capture_disabled");
    assert_string_equal(e.param, "index_capture");
}

static void test_capture__entries_have_a_limit(void **state)
{
    (void)state;
    struct tow_buf prompt;
    tow_buf_init(&prompt, 0);
    for (int i = 0; i < 2100; i++) tow_buf_puts(&prompt, i ? ", 5" : "[5");
    tow_buf_putc(&prompt, ']');
    struct rtr_ask *a = ask(prompt.data, "{\"spans\": [[0, 2044]]}");
    assert_int_equal(unpacked(a).entries.n, 512);
    rtr_ask_free(a);
    refused(prompt.data, "{\"spans\": [[0, 2045]]}", "index_capture.spans",
            "cover 513 compressed entries, at most 512");
    tow_buf_fini(&prompt);
}

/* ---- finding text ---- */

#define BEFORE "The harbour log of Tuesday says nothing unusual. "
#define AFTER  " Then the wind turned and everybody went home."

static void test_capture__text_is_found_in_whole_tokens(void **state)
{
    (void)state;
    static const char *const needles[] = {
        "The code of the vault is 7391.", /* words */
        "e vaul",                         /* begins and ends inside tokens */
        "739",                            /* inside a number, perhaps inside one token */
        "ü",                              /* a character of two bytes, */
        "日本語",                         /* of three, */
        "\U0001f600",                     /* of four, maybe over several tokens */
        "naïve café – \U0001f468\U0001f469",
    };
    for (size_t i = 0; i < sizeof needles / sizeof *needles; i++) {
        struct tow_buf prompt, capture;
        tow_buf_init(&prompt, 0);
        tow_buf_init(&capture, 0);
        tow_buf_printf(&prompt, "\"" BEFORE "%s" AFTER "\"",
                       i == 1 || i == 2 ? "The code of the vault is 173915." : needles[i]);
        tow_buf_printf(&capture, "{\"spans\": {\"text\": \"%s\"}}", needles[i]);
        struct rtr_ask *a = ask(prompt.data, capture.data);
        found(a, needles[i]);
        assert_true(a->capture->spans[0].start > 0);
        assert_true(a->capture->spans[0].end < a->req.choices[0].n_prompt);
        rtr_ask_free(a);
        tow_buf_fini(&prompt);
        tow_buf_fini(&capture);
    }
}

static void test_capture__text_at_both_ends_and_the_whole(void **state)
{
    (void)state;
    struct rtr_ask *a = ask("\"one two three\"", "{\"spans\": {\"text\": \"one\"}}");
    assert_int_equal(a->capture->spans[0].start, 0);
    rtr_ask_free(a);
    a = ask("\"one two three\"", "{\"spans\": {\"text\": \"three\"}}");
    assert_int_equal(a->capture->spans[0].end, a->req.choices[0].n_prompt);
    rtr_ask_free(a);
    a = ask("\"one two three\"", "{\"spans\": {\"text\": \"one two three\"}}");
    assert_int_equal(a->capture->spans[0].start, 0);
    assert_int_equal(a->capture->spans[0].end, a->req.choices[0].n_prompt);
    rtr_ask_free(a);
    a = ask("\"one two three\"", "{\"spans\": [{\"text\": \"two\"}, [0, 1], {\"text\": \"one\"}]}");
    assert_int_equal(a->capture->n_spans, 3);
    assert_int_equal(a->capture->spans[2].start, 0);
    rtr_ask_free(a);
}

static void test_capture__text_must_be_there_exactly_once(void **state)
{
    (void)state;
    static const char spans[] = "index_capture.spans";
    refused("\"one two one\"", "{\"spans\": {\"text\": \"one\"}}", spans,
            "\"one\" is 2 times in the encoded prompt, must be once");
    refused("\"one two one\"", "{\"spans\": {\"text\": \"three\"}}", spans,
            "\"three\" is not in the encoded prompt");
    refused("\"one two one\"", "{\"spans\": {\"text\": \"One\"}}", spans, "not in");
    refused("\"aaa\"", "{\"spans\": {\"text\": \"aa\"}}", spans, "2 times"); /* overlapping */
    refused("\"one\"", "{\"spans\": {\"text\": \"one and much more\"}}", spans, "not in");
    struct tow_buf prompt;
    tow_buf_init(&prompt, 0);
    tow_buf_putc(&prompt, '"');
    for (int i = 0; i < 500; i++) tow_buf_puts(&prompt, "ab ");
    tow_buf_putc(&prompt, '"');
    refused(prompt.data, "{\"spans\": {\"text\": \"ab\"}}", spans, "at least 100 times");
    tow_buf_fini(&prompt);
    /* What a message quotes of a long text is cut between characters, and goes on after it. */
    refused("\"one\"",
            "{\"spans\": {\"text\": \"日本語日本語日本語日本語日本語日本語日本語日本語x\"}}", spans,
            "\"... is not in the encoded prompt");
}

/* The encoded prompt of a chat holds what the format adds, and what users wrote, once encoded. */
static void test_capture__text_of_the_chat_format_is_found(void **state)
{
    (void)state;
    static const char *const texts[] = {"<｜Assistant｜>", "<｜User｜>What is", "the vault? Say"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char body[512];
        struct rtr_ask *a = NULL;
        struct rtr_api_error e;
        snprintf(body, sizeof body,
                 "{\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"}, {\"role\": "
                 "\"user\", \"content\": \"What is the code of the vault? Say it.\"}], "
                 "\"index_capture\": {\"spans\": {\"text\": \"%s\"}}}",
                 texts[i]);
        if (parse(RTR_CHAT, body, true, &a, &e) < 0) fail_msg("%s", e.message);
        found(a, texts[i]);
        rtr_ask_free(a);
    }
}

/* ---- rows ---- */

struct row {
    uint32_t step, layer, topk, rank[2], shadow_rank;
};

static void take(struct rtr_capture_rows *rows, const struct row *v)
{
    static uint8_t bytes[512], own[2 * WIRE_RANK_BYTES], other[2 * WIRE_RANK_BYTES];
    static const uint32_t entries[2] = {1, 2}, list[2] = {0, 7};
    struct wire_writer a = {.data = own, .cap = sizeof own},
                       b = {.data = other, .cap = sizeof other},
                       w = {.data = bytes, .cap = sizeof bytes};
    for (int i = 0; i < 2; i++) {
        wire_put_u32(&a, v->rank[i]);
        wire_put_u32(&a, (uint32_t)i);
        wire_put_f32(&a, 1.0f / (float)v->rank[i]);
        wire_put_u32(&b, v->shadow_rank);
        wire_put_u32(&b, 0);
        wire_put_f32(&b, 0.1f);
    }
    struct wire_capture_row r = {.topk = v->topk,
                                 .n_visible = 1000,
                                 .entries = {entries, 2},
                                 .own = {0.5f, NAN, {own, sizeof own}},
                                 .shadow = v->shadow_rank ? 1 << WIRE_SHADOW_FP8 : 0,
                                 .list = {list, v->topk < 2 ? v->topk : 2}};
    r.shadows[WIRE_SHADOW_FP8] = (struct wire_ranks){0.5f, 0.25f, {other, sizeof other}};
    wire_put_capture_row(&w, &r);
    struct rtr_captured c = {v->step, v->layer, bytes, (uint32_t)w.len};
    rtr_capture_rows_take(rows, &c);
}

/* What a client reads, as a tree whose root is index_capture. */
static const struct json *printed(const struct rtr_capture_rows *rows, struct json **root)
{
    struct tow_buf b;
    struct tow_err err;
    tow_buf_init(&b, 0);
    tow_buf_putc(&b, '{');
    rtr_capture_rows_print(rows, tok, &b);
    tow_buf_putc(&b, '}');
    assert_false(tow_buf_failed(&b));
    if (json_parse(root, b.data, b.len, NULL, &err) < 0) fail_msg("%s: %s", err.msg, b.data);
    tow_buf_fini(&b);
    return json_find(json_find(*root, "towpath"), "index_capture");
}

static void says(const struct json *v, const char *key, const char *want)
{
    struct tow_buf b;
    tow_buf_init(&b, 0);
    json_dump(&b, json_find(v, key));
    assert_string_equal(b.data, want);
    tow_buf_fini(&b);
}

static void test_rows__every_field_of_the_contract_is_there(void **state)
{
    (void)state;
    struct rtr_ask *a = ask("\"one two three four five six\"",
                            "{\"spans\": {\"text\": \"two\"}, \"steps\": \"all\", \"lists\": true, "
                            "\"shadow\": [\"fp8\"], \"expect\": \"42\"}");
    struct rtr_capture_rows rows;
    struct json *root;
    const text_id ids[2] = {30, 31};
    rtr_capture_rows_init(&rows, a->capture);
    rtr_capture_rows_tokens(&rows, ids, 2);
    take(&rows, &(struct row){.step = 1, .layer = 4, .topk = 2, .rank = {3, 9}, .shadow_rank = 2});
    take(&rows, &(struct row){.step = 2, .layer = 2, .topk = 2, .rank = {8, 9}, .shadow_rank = 8});
    take(&rows, &(struct row){.layer = 4, .topk = 2, .rank = {5, 3}});
    take(&rows, &(struct row){.layer = 2, .topk = 8, .rank = {9, 12}});
    rtr_capture_rows_answer(&rows, "It is 4", 7);
    rtr_capture_rows_answer(&rows, "2.", 2);
    const struct json *c = printed(&rows, &root);
    char n[16];
    snprintf(n, sizeof n, "%u", a->req.choices[0].n_prompt);
    says(c, "prompt_tokens", n);
    const struct json *span = json_first(json_find(c, "spans"));
    assert_true(strstr(json_string(json_find(span, "text"), NULL), "two") != NULL);
    assert_int_equal(json_size(json_find(span, "entries")), unpacked(a).entries.n);
    const struct json *steps = json_find(c, "steps");
    assert_int_equal(json_size(steps), 3);
    says(json_item(steps, 0), "step", "0");
    says(json_item(steps, 0), "phase", "\"prefill\"");
    says(json_item(steps, 0), "token", "30");
    says(json_item(steps, 1), "phase", "\"decode\"");
    says(json_item(steps, 1), "token", "31");
    says(json_item(steps, 2), "token", "null"); /* of the end token, which is no output */
    const struct json *layers = json_find(json_item(steps, 0), "layers");
    says(json_item(layers, 0), "layer", "2");
    says(json_item(layers, 1), "layer", "4");
    says(json_item(layers, 1), "topk", "2");
    says(json_item(layers, 1), "visible", "1000");
    says(json_item(layers, 1), "kth_score", "0.5");
    says(json_item(layers, 1), "next_score", "null");
    says(json_item(layers, 1), "margin", "-0.16666666"); /* 1/3 - kth, in as few digits as do */
    says(json_item(layers, 1), "list", "[0, 7]");
    assert_null(json_find(json_item(layers, 1), "shadow"));
    says(json_item(layers, 1), "entries",
         "[{\"entry\": 1, \"tokens\": [0, 8], \"rank\": 5, \"equal\": 0, \"score\": 0.2, "
         "\"selected\": false}, {\"entry\": 2, \"tokens\": [4, 12], \"rank\": 3, \"equal\": 1, "
         "\"score\": 0.33333334, \"selected\": false}]");
    const struct json *layer = json_first(json_find(json_item(steps, 1), "layers"));
    const struct json *fp8 = json_find(json_find(layer, "shadow"), "fp8");
    says(fp8, "next_score", "0.25");
    says(fp8, "margin", "-0.15"); /* selected: against the best that is not */
    says(fp8, "entries",
         "[{\"entry\": 1, \"rank\": 2, \"equal\": 0, \"score\": 0.1, \"selected\": true}, "
         "{\"entry\": 2, \"rank\": 2, \"equal\": 0, \"score\": 0.1, \"selected\": true}]");
    says(c, "truncated", "false");
    const struct json *v = json_find(c, "verdict");
    says(v, "name", "\"key_precision\"");
    says(v, "best_rank", "3");
    says(v, "layer", "4");
    says(v, "step", "0");
    says(v, "topk", "2");
    says(v, "sufficient_topk", "3");
    says(v, "precision", "\"fp8\"");
    says(v, "precision_rank", "2");
    says(v, "found", "true"); /* over the border of two pieces */
    assert_non_null(json_string(json_find(v, "text"), NULL));
    json_free(root);
    rtr_capture_rows_fini(&rows);
    rtr_ask_free(a);
}

static void test_rows__later_one_of_a_step_and_layer_replaces_the_earlier(void **state)
{
    (void)state;
    struct rtr_ask *a = ask("[5, 6, 7, 8, 9]", "{\"spans\": [[4, 5]], \"steps\": \"all\"}");
    struct rtr_capture_rows rows;
    struct json *root;
    rtr_capture_rows_init(&rows, a->capture);
    for (uint32_t k = 0; k < 2; k++)
        for (uint32_t i = 0; i < 40; i++) /* in no order */
            take(&rows,
                 &(struct row){.step = i * 7 % 40, .layer = 2, .topk = 8, .rank = {20 - k, 30}});
    const struct json *c = printed(&rows, &root), *steps = json_find(c, "steps");
    assert_int_equal(json_size(steps), 40);
    int64_t i = 0;
    JSON_EACH(step, steps)
    {
        int64_t at;
        assert_true(json_int(json_find(step, "step"), &at) && at == i++);
        assert_int_equal(json_size(json_find(step, "layers")), 1);
        says(json_first(json_find(json_first(json_find(step, "layers")), "entries")), "rank", "19");
    }
    says(json_find(c, "verdict"), "name", "\"coverage\"");
    assert_null(json_find(json_find(c, "verdict"), "found")); /* nothing was expected */
    json_free(root);
    rtr_capture_rows_fini(&rows);
    rtr_ask_free(a);
}

static void test_rows__steps_beyond_the_limit_are_dropped_and_said(void **state)
{
    (void)state;
    struct rtr_ask *a =
        ask("[5, 6, 7, 8, 9]", "{\"spans\": [[4, 5]], \"steps\": \"all\", \"max_steps\": 3}");
    struct rtr_capture_rows rows;
    struct json *root;
    const text_id ids[5] = {9, 9, 9, 9, 9};
    rtr_capture_rows_init(&rows, a->capture);
    for (uint32_t step = 1; step <= 3; step++)
        for (uint32_t layer = 2; layer <= 4; layer += 2)
            take(&rows, &(struct row){.step = step, .layer = layer, .topk = 8, .rank = {1, 2}});
    take(&rows, &(struct row){.layer = 2, .topk = 8, .rank = {1, 2}});
    rtr_capture_rows_tokens(&rows, ids, 4); /* three of decode */
    says(printed(&rows, &root), "truncated", "false");
    json_free(root);
    rtr_capture_rows_tokens(&rows, ids, 1); /* a fourth that no worker ranked */
    says(printed(&rows, &root), "truncated", "true");
    json_free(root);
    rows.n_tokens = 4;
    take(&rows, &(struct row){.step = 4, .layer = 2, .topk = 8, .rank = {1, 2}});
    const struct json *c = printed(&rows, &root);
    says(c, "truncated", "true");
    assert_int_equal(json_size(json_find(c, "steps")), 4);
    json_free(root);
    rtr_capture_rows_fini(&rows);
    rtr_ask_free(a);
}

static void test_rows__bytes_have_a_limit_and_nothing_seen_is_no_verdict(void **state)
{
    (void)state;
    struct rtr_ask *a =
        ask("[5, 6, 7, 8, 9]", "{\"spans\": [[4, 5]], \"steps\": \"decode\", \"max_steps\": 4096}");
    struct rtr_capture_rows rows;
    struct json *root;
    rtr_capture_rows_init(&rows, a->capture);
    const struct json *c = printed(&rows, &root);
    says(c, "steps", "[]");
    says(c, "verdict", "null");
    json_free(root);
    for (uint32_t step = 1; step <= 4096; step++)
        for (uint32_t layer = 0; layer < 40; layer++)
            take(&rows, &(struct row){.step = step, .layer = layer, .topk = 8, .rank = {1, 2}});
    assert_true(rows.bytes <= RTR_CAPTURE_MAX_BYTES);
    assert_true(rows.bytes > RTR_CAPTURE_MAX_BYTES - 200);
    assert_true(rows.dropped);
    take(&rows, &(struct row){.step = 1, .layer = 0, .topk = 8, .rank = {4, 2}}); /* replaces */
    assert_true(rows.bytes <= RTR_CAPTURE_MAX_BYTES);
    rtr_capture_rows_fini(&rows);
    rtr_capture_rows_fini(&rows); /* once more is fine */
    rtr_ask_free(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_capture__defaults_are_those_of_the_contract),
        cmocka_unit_test(test_capture__entries_are_those_that_cover_a_token),
        cmocka_unit_test(test_capture__wrong_fields_are_named),
        cmocka_unit_test(test_capture__one_answer_only_and_only_where_allowed),
        cmocka_unit_test(test_capture__entries_have_a_limit),
        cmocka_unit_test(test_capture__text_is_found_in_whole_tokens),
        cmocka_unit_test(test_capture__text_at_both_ends_and_the_whole),
        cmocka_unit_test(test_capture__text_must_be_there_exactly_once),
        cmocka_unit_test(test_capture__text_of_the_chat_format_is_found),
        cmocka_unit_test(test_rows__every_field_of_the_contract_is_there),
        cmocka_unit_test(test_rows__later_one_of_a_step_and_layer_replaces_the_earlier),
        cmocka_unit_test(test_rows__steps_beyond_the_limit_are_dropped_and_said),
        cmocka_unit_test(test_rows__bytes_have_a_limit_and_nothing_seen_is_no_verdict),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
