/* Tests of router/output.h with api_request.h and api_response.h: what a client gets for given
 * tokens, the same for every number of tokens per step, streamed and not.
 * The tokenizer is the demo model's. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/text/json.h"
#include "common/text/tokenizer.h"
#include "router/api_response.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKENIZER "deploy/demo-model/tokenizer.json"
#define D         "｜DSML｜"

static struct text_tokenizer *tok;
static text_id byte_id[256];

static int load(void **state)
{
    (void)state;
    struct tow_err err;
    if (text_tokenizer_load(&tok, TOKENIZER, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return -1;
    }
    for (text_id id = 0; id < text_tokenizer_n_ids(tok); id++) {
        size_t n;
        const uint8_t *p = text_tokenizer_peek(tok, id, &n);
        if (p && n == 1 && !text_tokenizer_is_added(tok, id)) byte_id[*p] = id;
    }
    return 0;
}

static int unload(void **state)
{
    (void)state;
    text_tokenizer_free(tok);
    return 0;
}

static struct rtr_ask *ask(enum rtr_route route, const char *body)
{
    struct rtr_ask_rules rules = {
        .tok = tok, .model_name = "m", .context_length = 10000, .max_body_bytes = 1 << 20};
    struct rtr_api_error e;
    struct rtr_ask *a = NULL;
    if (rtr_ask_parse(&a, route, body, strlen(body), &rules, &e) < 0) fail_msg("%s", e.message);
    return a;
}

/* Ids of a text: as few tokens as the tokenizer makes, markers included, or one per byte. */
static void ids_of(const char *text, bool bytes, struct text_ids *out)
{
    if (!bytes) {
        struct text_segment seg = {text, strlen(text), true};
        assert_int_equal(text_tokenizer_encode(tok, &seg, 1, 0, out, NULL, NULL), 0);
        return;
    }
    out->n = strlen(text);
    out->ids = malloc((out->n + 1) * sizeof *out->ids);
    for (size_t i = 0; i < out->n; i++) out->ids[i] = byte_id[(uint8_t)text[i]];
}

/* What a client has at the end of one choice. */
struct seen {
    struct tow_buf content, reasoning, calls; /* calls: name(arguments) */
    uint32_t n_tokens, n_reasoning, n_scored;
    enum rtr_answer_end end;
};

static void take(struct rtr_output *o, struct seen *s)
{
    struct rtr_delta d;
    rtr_output_peek(o, &d);
    tow_buf_put(&s->content, d.content, d.content_len);
    tow_buf_put(&s->reasoning, d.reasoning, d.reasoning_len);
    for (uint32_t i = 0; i < d.n_calls; i++) {
        tow_buf_printf(&s->calls, "%s(%s)", d.calls[i].name, d.calls[i].arguments);
        struct json *args = NULL;
        assert_int_equal(
            json_parse(&args, d.calls[i].arguments, strlen(d.calls[i].arguments), NULL, NULL), 0);
        json_free(args);
    }
    s->n_scored += d.n_scored;
    rtr_output_taken(o);
}

static void run(const struct rtr_ask *a, const struct text_ids *ids, size_t step, bool each_time,
                enum rtr_finish why, struct seen *s)
{
    memset(s, 0, sizeof *s);
    tow_buf_init(&s->content, 0);
    tow_buf_init(&s->reasoning, 0);
    tow_buf_init(&s->calls, 0);
    struct rtr_output *o = rtr_output_new(tok, a, 0);
    assert_non_null(o);
    bool ended = false;
    for (size_t at = 0; at < ids->n && !ended; at += step) {
        struct rtr_tokens t = {.ids = ids->ids + at,
                               .n = (uint32_t)(ids->n - at < step ? ids->n - at : step)};
        ended = rtr_output_push(o, &t);
        if (each_time) take(o, s);
    }
    if (!ended) rtr_output_finish(o, why);
    take(o, s);
    assert_false(rtr_output_failed(o));
    s->n_tokens = rtr_output_n_tokens(o);
    s->n_reasoning = rtr_output_n_reasoning(o);
    s->end = rtr_output_end(o);
    rtr_output_free(o);
}

static void done(struct seen *s)
{
    tow_buf_fini(&s->content);
    tow_buf_fini(&s->reasoning);
    tow_buf_fini(&s->calls);
}

static const char *text_of(const struct tow_buf *b)
{
    return b->data ? b->data : "";
}

/* Runs a chat in every way and checks that all give the same. */
static void check_chat(const char *body, const char *output, enum rtr_finish why,
                       const char *content, const char *reasoning, const char *calls,
                       enum rtr_answer_end end)
{
    struct rtr_ask *a = ask(RTR_CHAT, body);
    for (int bytes = 0; bytes < 2; bytes++) {
        struct text_ids ids = {0};
        struct seen first, s;
        ids_of(output, bytes, &ids);
        run(a, &ids, ids.n + 1, false, why, &first);
        assert_string_equal(text_of(&first.content), content);
        assert_string_equal(text_of(&first.reasoning), reasoning);
        assert_string_equal(text_of(&first.calls), calls);
        assert_int_equal(first.end, end);
        assert_null(strstr(text_of(&first.content), "DSML"));
        for (size_t step = 1; step <= 7; step += 2) {
            run(a, &ids, step, true, why, &s);
            assert_string_equal(text_of(&s.content), content);
            assert_string_equal(text_of(&s.reasoning), reasoning);
            assert_string_equal(text_of(&s.calls), calls);
            assert_int_equal(s.end, end);
            assert_int_equal(s.n_tokens, first.n_tokens);
            assert_int_equal(s.n_reasoning, first.n_reasoning);
            done(&s);
        }
        done(&first);
        text_ids_fini(&ids);
    }
    rtr_ask_free(a);
}

#define USER  "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]"
#define TALK  "{" USER "}"
#define THINK "{" USER ",\"chat_template_kwargs\":{\"thinking\":true}}"
#define TOOLS                                                                                      \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"run\",\"parameters\":"             \
    "{\"type\":\"object\",\"properties\":{\"cmd\":{\"type\":\"string\"}}}}}]"
#define CALL                                                                                       \
    "\n\n<" D "tool_calls>\n<" D "invoke name=\"run\">\n<" D                                       \
    "parameter name=\"cmd\" string=\"true\">ls 2>&1</" D "parameter>\n</" D "invoke>\n</" D        \
    "tool_calls>"

static void test_output__thinking_and_content(void **state)
{
    (void)state;
    check_chat(THINK, "R</think>A", RTR_FINISH_STOP, "A", "R", "", RTR_END_STOP);
    check_chat(THINK, "</think>A", RTR_FINISH_STOP, "A", "", "", RTR_END_STOP);
    check_chat(THINK, "Rest", RTR_FINISH_LENGTH, "", "Rest", "", RTR_END_LENGTH);
    check_chat(TALK, "A", RTR_FINISH_STOP, "A", "", "", RTR_END_STOP);
    check_chat(TALK, "", RTR_FINISH_STOP, "", "", "", RTR_END_STOP);
}

static void test_output__calls_come_whole_or_not_at_all(void **state)
{
    (void)state;
    check_chat("{" USER "," TOOLS "}", "I will look." CALL, RTR_FINISH_STOP, "I will look.", "",
               "run({\"cmd\": \"ls 2>&1\"})", RTR_END_TOOL_CALLS);
    check_chat("{" USER "," TOOLS ",\"chat_template_kwargs\":{\"thinking\":true}}",
               "R</think>" CALL, RTR_FINISH_STOP, "", "R", "run({\"cmd\": \"ls 2>&1\"})",
               RTR_END_TOOL_CALLS);
    /* cut by max_tokens at every place inside the block */
    size_t whole = strlen(CALL);
    for (size_t cut = strlen("\n\n<" D); cut < whole; cut++) {
        char output[1024];
        struct text_ids ids = {0};
        struct seen s;
        snprintf(output, sizeof output, "Look.%.*s", (int)cut, CALL);
        struct rtr_ask *a = ask(RTR_CHAT, "{" USER "," TOOLS "}");
        ids_of(output, true, &ids);
        run(a, &ids, 1, true, RTR_FINISH_LENGTH, &s);
        assert_string_equal(text_of(&s.content), "Look.");
        assert_string_equal(text_of(&s.calls), "");
        assert_int_equal(s.end, RTR_END_LENGTH);
        done(&s);
        text_ids_fini(&ids);
        rtr_ask_free(a);
    }
}

static void test_output__stop_strings_end_the_content_alone(void **state)
{
    (void)state;
    check_chat("{" USER ",\"stop\":[\"GH\",\"DEFGHIJ\"]}", "ABCDEFGHIJK", RTR_FINISH_STOP, "ABC",
               "", "", RTR_END_STOP);
    check_chat("{" USER ",\"stop\":\"DEFX\"}", "ABCDEF", RTR_FINISH_LENGTH, "ABCDEF", "", "",
               RTR_END_LENGTH);
    check_chat("{" USER ",\"stop\":\"😀\"}", "ab😀cd", RTR_FINISH_STOP, "ab", "", "", RTR_END_STOP);
    check_chat("{" USER ",\"stop\":\"R\",\"chat_template_kwargs\":{\"thinking\":true}}",
               "RR</think>ARB", RTR_FINISH_STOP, "A", "RR", "", RTR_END_STOP);
}

static void test_output__characters_are_whole(void **state)
{
    (void)state;
    check_chat(TALK, "a😀b👨‍👩‍👧 ภาษา 한국", RTR_FINISH_STOP,
               "a😀b👨‍👩‍👧 ภาษา 한국", "", "", RTR_END_STOP);
    struct rtr_ask *a = ask(RTR_COMPLETIONS, "{\"prompt\":\"x\"}");
    text_id list[] = {byte_id['a'], byte_id[0xC3], byte_id['('], byte_id[0xE2], byte_id[0x82]};
    struct text_ids ids = {list, 5, 5};
    for (size_t step = 1; step <= 6; step++) {
        struct seen s;
        run(a, &ids, step, true, RTR_FINISH_STOP, &s);
        assert_string_equal(text_of(&s.content), "a\uFFFD(\uFFFD");
        assert_int_equal(s.n_tokens, 5);
        done(&s);
    }
    rtr_ask_free(a);
}

static void test_output__special_tokens_are_counted_not_shown(void **state)
{
    (void)state;
    struct rtr_ask *a = ask(RTR_CHAT, "{" USER ",\"ignore_eos\":true,\"logprobs\":true}");
    text_id list[] = {byte_id['a'], 1, byte_id['b'], 3};
    struct text_ids ids = {list, 4, 4};
    struct seen s;
    run(a, &ids, 1, true, RTR_FINISH_LENGTH, &s);
    assert_string_equal(text_of(&s.content), "ab");
    assert_int_equal(s.n_tokens, 4);
    assert_int_equal(s.n_scored, 4);
    done(&s);
    rtr_ask_free(a);
}

static void test_response__numbers_are_finite_and_json_is_strict(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{" USER ",\"logprobs\":true,\"top_logprobs\":2}",
        "{\"prompt\":\"x\",\"logprobs\":2,\"echo\":true}",
    };
    for (int i = 0; i < 2; i++) {
        struct rtr_ask *a = ask(i ? RTR_COMPLETIONS : RTR_CHAT, bodies[i]);
        struct rtr_output *o = rtr_output_new(tok, a, 0);
        text_id ids[] = {byte_id['a'], byte_id[0xE2], byte_id['"']};
        float logprobs[] = {-INFINITY, NAN, -0.5f};
        struct rtr_logprob top[] = {{5, INFINITY},       {6, -INFINITY}, {byte_id[0xE2], NAN},
                                    {byte_id[0x82], -1}, {8, -1e30f},    {9, -2}};
        struct rtr_tokens t = {
            .n = 3, .ids = ids, .logprobs = logprobs, .top = top, .n_top = 2, .n_cached = 1};
        assert_false(rtr_output_push(o, &t));
        rtr_output_finish(o, RTR_FINISH_STOP);
        struct tow_buf b;
        tow_buf_init(&b, 0);
        rtr_put_answer(&b, tok, a, &o, NULL);
        struct json *j = NULL;
        struct tow_err err = {0};
        if (json_parse(&j, b.data, b.len, NULL, &err) < 0) fail_msg("%s in %s", err.msg, b.data);
        const struct json *usage = json_find(j, "usage");
        int64_t n = 0;
        assert_true(json_int(json_find(usage, "completion_tokens"), &n) && n == 3);
        assert_non_null(strstr(b.data, "-9999.0"));
        json_free(j);
        tow_buf_fini(&b);
        rtr_output_free(o);
        rtr_ask_free(a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_output__thinking_and_content),
        cmocka_unit_test(test_output__calls_come_whole_or_not_at_all),
        cmocka_unit_test(test_output__stop_strings_end_the_content_alone),
        cmocka_unit_test(test_output__characters_are_whole),
        cmocka_unit_test(test_output__special_tokens_are_counted_not_shown),
        cmocka_unit_test(test_response__numbers_are_finite_and_json_is_strict),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
