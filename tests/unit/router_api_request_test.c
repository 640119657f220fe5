/* Tests of router/api_request.h: what a wrong body is told. Of every field: its name, the value
 * that was sent, and what would have been right. The tokenizer is the demo model's. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/json.h"
#include "common/text/tokenizer.h"
#include "router/api_request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct text_tokenizer *tok;

static int load(void **state)
{
    (void)state;
    struct tow_err err;
    if (text_tokenizer_load(&tok, "deploy/demo-model/tokenizer.json", &err) == 0) return 0;
    fprintf(stderr, "%s\n", err.msg);
    return -1;
}

static int unload(void **state)
{
    (void)state;
    text_tokenizer_free(tok);
    return 0;
}

static int parse(enum rtr_route route, const char *body, size_t n, struct rtr_ask **out,
                 struct rtr_api_error *e)
{
    const struct rtr_ask_rules rules = {.tok = tok,
                                        .served_model_name = "m",
                                        .model_name = "m",
                                        .context_length = 1000,
                                        .n_vocab = 2560,
                                        .max_body_bytes = 64 << 20};
    return rtr_ask_parse(out, route, body, n, &rules, e);
}

/* A body with these members besides the one a route needs; members may repeat that one. */
static void whole_body(struct tow_buf *b, enum rtr_route route, const char *members)
{
    static const char *const needed[] = {
        [RTR_CHAT] = "\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]",
        [RTR_COMPLETIONS] = "\"prompt\": \"x\"",
        [RTR_TOKENIZE] = "\"prompt\": \"x\"",
        [RTR_DETOKENIZE] = "\"tokens\": [5]"};
    const char *colon = strchr(needed[route], ':');
    bool repeats = strncmp(members, needed[route], (size_t)(colon - needed[route])) == 0;
    tow_buf_init(b, 0);
    tow_buf_printf(b, "{%s%s%s}", repeats ? "" : needed[route], repeats || !*members ? "" : ", ",
                   members);
}

struct wrong {
    enum rtr_route route;
    const char *members, *param, *value, *right;
};

static void check_wrong(const struct wrong *w)
{
    struct rtr_ask *a = NULL;
    struct rtr_api_error e;
    struct tow_buf b;
    whole_body(&b, w->route, w->members);
    if (parse(w->route, b.data, b.len, &a, &e) == 0) fail_msg("taken: %s", b.data);
    if (e.status < 400 || e.status >= 500 || strcmp(e.param, w->param) != 0)
        fail_msg("%s: status %d, param '%s', not '%s' (%s)", w->members, e.status, e.param,
                 w->param, e.message);
    /* The field is named by its last part at least, then the value and what is right. */
    const char *field = strrchr(w->param, '.') ? strrchr(w->param, '.') + 1 : w->param;
    if (!strstr(e.message, field) || !strstr(e.message, w->value) || !strstr(e.message, w->right))
        fail_msg("%s: '%s' lacks '%s', '%s' or '%s'", w->members, e.message, field, w->value,
                 w->right);
    for (const char *p = e.message; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f) fail_msg("%s: a raw control character", b.data);
    tow_buf_fini(&b);
}

static void test_api_request__an_error_names_field_value_and_range(void **state)
{
    (void)state;
    static const struct wrong both[] = {
        {0, "\"temperature\": 2.5", "temperature", "2.5", "0 to 2"},
        {0, "\"temperature\": \"1\"", "temperature", "\"1\"", "0 to 2"},
        {0, "\"top_p\": true", "top_p", "true", "0 to 1"},
        {0, "\"min_p\": -1e300", "min_p", "is -1e300", "0 to 1"},
        {0, "\"top_k\": -2", "top_k", "-2", "-1 to"},
        {0, "\"n\": 1.0", "n", "1.0", "1 to 128"},
        {0, "\"n\": 1e0", "n", "is 1e0", "an integer"},
        {0, "\"n\": \"1\"", "n", "\"1\"", "an integer"},
        {0, "\"n\": 129", "n", "129", "1 to 128"},
        {0, "\"max_tokens\": 0", "max_tokens", "0", "1 to 2147483647"},
        {0, "\"max_tokens\": 99999999999999999999", "max_tokens", "99999999999999999999", "1 to"},
        {0, "\"seed\": 18446744073709551616", "seed", "18446744073709551616", "integer"},
        {0, "\"presence_penalty\": 3", "presence_penalty", "3", "-2 to 2"},
        {0, "\"repetition_penalty\": 0", "repetition_penalty", "0", "0.01 to 10"},
        {0, "\"ignore_eos\": \"no\"", "ignore_eos", "\"no\"", "true or false"},
        {0, "\"index_topk\": 5000", "index_topk", "5000", "1 to 4096"},
        {0, "\"index_capture\": {}", "index_capture", "an object", "null"},
        {0, "\"stream\": 1", "stream", "1", "true or false"},
        {0, "\"stream_options\": {}", "stream_options", "an object", "null"},
        {0, "\"stream\": true, \"stream_options\": 5", "stream_options", "5", "an object"},
        {0, "\"stop\": 5", "stop", "5", "a string or a list"},
        {0, "\"stop\": \"\"", "stop", "\"\"", "1 to 1024"},
        {0, "\"stop\": [\"a\", null]", "stop[1]", "null", "1 to 1024"},
        {0, "\"user\": 5", "user", "5", "a string"},
        {0, "\"model\": 5", "model", "5", "a string"},
        {0, "\"model\": \"o\\nther\"", "model", "\"o\\nther\"", "\"m\""},
        {0, "\"logit_bias\": []", "logit_bias", "an array", "an object"},
        {0, "\"logit_bias\": {\"x\\u0007\": 1}", "logit_bias", "\"x\\u0007\"", "0 to 2559"},
        {0, "\"logit_bias\": {\"2560\": 1}", "logit_bias", "\"2560\"", "0 to 2559"},
        {0, "\"logit_bias\": {\"5\": 101}", "logit_bias",
         "[\"5\"]: must be a number from -100 to 100", "101"},
        {0, "\"logit_bias\": {\"5\": \"1\"}", "logit_bias", "is \"1\"", "-100 to 100"},
    };
    static const struct wrong one[] = {
        {RTR_CHAT, "\"messages\": []", "messages", "an empty list", "at least one"},
        {RTR_CHAT, "\"messages\": \"hi\"", "messages", "\"hi\"", "a list"},
        {RTR_CHAT, "\"messages\": [5]", "messages[0]", "5", "an object"},
        {RTR_CHAT, "\"messages\": [{\"role\": \"king\", \"content\": \"x\"}]", "messages[0].role",
         "\"king\"", "system, user"},
        {RTR_CHAT, "\"messages\": [{\"role\": \"user\", \"content\": 5}]", "messages[0].content",
         "5", "a string or a list"},
        {RTR_CHAT, "\"messages\": [{\"role\": \"user\"}]", "messages[0].content", "missing",
         "a string or a list"},
        {RTR_CHAT, "\"messages\": [{\"role\": \"user\", \"content\": null}]", "messages[0].content",
         "null", "a string or a list"},
        {RTR_CHAT, "\"top_logprobs\": 5", "top_logprobs", "5", "logprobs"},
        {RTR_CHAT, "\"logprobs\": true, \"top_logprobs\": 21", "top_logprobs", "21", "0 to 20"},
        {RTR_CHAT, "\"max_tokens\": 5, \"max_completion_tokens\": 6", "max_completion_tokens", "6",
         "5"},
        {RTR_CHAT, "\"tools\": {}", "tools", "an object", "an array"},
        {RTR_CHAT, "\"tools\": [7]", "tools[0]", "7", "an object"},
        {RTR_CHAT, "\"tools\": [{}]", "tools[0].type", "missing", "\"function\""},
        {RTR_CHAT, "\"tools\": [{\"type\": \"retrieval\"}]", "tools[0].type", "\"retrieval\"",
         "\"function\""},
        {RTR_CHAT, "\"tools\": [{\"type\": \"function\", \"function\": \"f\"}]",
         "tools[0].function", "\"f\"", "an object"},
        {RTR_CHAT, "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"a b\"}}]",
         "tools[0].function.name", "\"a b\"", "1 to 64 letters"},
        {RTR_CHAT, "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": 5}}]",
         "tools[0].function.name", "5", "1 to 64 letters"},
        {RTR_CHAT,
         "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": "
         "5}}]",
         "tools[0].function.description", "5", "a string"},
        {RTR_CHAT,
         "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": "
         "\"p\"}}]",
         "tools[0].function.parameters", "\"p\"", "an object"},
        {RTR_CHAT, "\"tool_choice\": \"sometimes\"", "tool_choice", "\"sometimes\"", "\"auto\""},
        {RTR_CHAT, "\"tool_choice\": {\"type\": \"function\"}", "tool_choice",
         "type \"function\" and function.name missing", "\"required\""},
        {RTR_CHAT, "\"tool_choice\": \"required\"", "tool_choice", "\"required\"", "\"auto\""},
        {RTR_CHAT, "\"reasoning_effort\": \"extreme\"", "reasoning_effort", "\"extreme\"",
         "\"high\""},
        {RTR_CHAT, "\"thinking\": {\"type\": \"maybe\"}", "thinking.type", "\"maybe\"",
         "\"enabled\""},
        {RTR_CHAT, "\"chat_template_kwargs\": {\"thinking\": 5}", "chat_template_kwargs.thinking",
         "5", "true or false"},
        {RTR_CHAT, "\"response_format\": {\"type\": \"xml\"}", "response_format.type", "\"xml\"",
         "\"json_object\""},
        {RTR_CHAT, "\"response_format\": {}", "response_format.type", "missing", "\"text\""},
        {RTR_CHAT, "\"response_format\": {\"type\": \"json_schema\"}",
         "response_format.json_schema.schema", "missing", "an object"},
        {RTR_COMPLETIONS, "\"prompt\": null", "prompt", "null", "a string"},
        {RTR_COMPLETIONS, "\"prompt\": 5", "prompt", "5", "a string"},
        {RTR_COMPLETIONS, "\"prompt\": []", "prompt", "an empty list", "a string"},
        {RTR_COMPLETIONS, "\"prompt\": \"\"", "prompt", "empty", "at least one token"},
        {RTR_COMPLETIONS, "\"prompt\": [\"a\", {}]", "prompt[1]", "an object", "a string"},
        {RTR_COMPLETIONS, "\"prompt\": [5, \"x\"]", "prompt", "\"x\"", "0 to 2559"},
        {RTR_COMPLETIONS, "\"prompt\": [5, 6.0]", "prompt", "6.0", "0 to 2559"},
        {RTR_COMPLETIONS, "\"prompt\": [[5], [-1]]", "prompt[1]", "-1", "0 to 2559"},
        {RTR_COMPLETIONS, "\"prompt\": [2560]", "prompt", "2560", "0 to 2559"},
        {RTR_COMPLETIONS, "\"logprobs\": 21", "logprobs", "21", "0 to 20"},
        {RTR_COMPLETIONS, "\"best_of\": 2", "best_of", "2", "1"},
        {RTR_COMPLETIONS, "\"suffix\": \"x\"", "suffix", "\"x\"", "null"},
        {RTR_COMPLETIONS, "\"max_tokens\": 1000", "max_tokens", "1001", "1000"},
        {RTR_TOKENIZE, "\"prompt\": 5", "prompt", "5", "a string"},
        {RTR_DETOKENIZE, "\"tokens\": \"5\"", "tokens", "\"5\"", "a list of token ids"},
        {RTR_DETOKENIZE, "\"tokens\": [1, 2560]", "tokens", "2560", "0 to 2559"},
    };
    for (size_t i = 0; i < sizeof both / sizeof *both; i++) {
        struct wrong w = both[i];
        w.route = RTR_CHAT;
        check_wrong(&w);
        w.route = RTR_COMPLETIONS;
        check_wrong(&w);
    }
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) check_wrong(&one[i]);
}

/* Two keys that mean one token cannot both stand there: an id has one spelling. */
static void test_api_request__a_bias_key_has_one_spelling(void **state)
{
    (void)state;
    static const char *const wrong[] = {"01",  "+1", " 1", "1 ", "1.0",       "1e0",
                                        "0x1", "-1", "00", "",   "1234567890"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char members[80], value[40];
        snprintf(members, sizeof members, "\"logit_bias\": {\"1\": 2, \"%s\": 1}", wrong[i]);
        snprintf(value, sizeof value, "is \"%s\"", wrong[i]);
        struct wrong w = {RTR_COMPLETIONS, members, "logit_bias", value, "0 to 2559"};
        check_wrong(&w);
    }
    struct rtr_ask *a = NULL;
    struct rtr_api_error e;
    struct tow_buf b;
    whole_body(&b, RTR_COMPLETIONS, "\"logit_bias\": {\"1\": 2, \"0\": -100, \"2559\": 0.5}");
    assert_int_equal(parse(RTR_COMPLETIONS, b.data, b.len, &a, &e), 0);
    assert_int_equal(a->req.sampling.n_bias, 3);
    assert_int_equal(a->req.sampling.bias[0].id, 1);
    assert_int_equal(a->req.sampling.bias[1].id, 0);
    assert_int_equal(a->req.sampling.bias[2].id, 2559);
    rtr_ask_free(a);
    tow_buf_fini(&b);
}

static void test_api_request__a_long_value_is_cut_between_characters(void **state)
{
    (void)state;
    struct rtr_ask *a = NULL;
    struct rtr_api_error e;
    struct tow_buf b, members;
    tow_buf_init(&members, 0);
    tow_buf_puts(&members, "\"reasoning_effort\": \"");
    for (int i = 0; i < 5000; i++) tow_buf_puts(&members, "日本");
    tow_buf_putc(&members, '"');
    whole_body(&b, RTR_CHAT, members.data);
    assert_true(parse(RTR_CHAT, b.data, b.len, &a, &e) < 0);
    assert_non_null(strstr(e.message, "日本日本日本日本日本日本日\"..."));
    assert_true(strlen(e.message) < 300);
    tow_buf_fini(&b);
    tow_buf_fini(&members);
}

/* After the check only what an ask points into is left of the body. */
static void test_api_request__the_tree_keeps_what_is_pointed_into(void **state)
{
    (void)state;
    struct rtr_ask *a = NULL;
    struct rtr_api_error e;
    struct tow_buf b;
    whole_body(
        &b, RTR_CHAT,
        "\"junk\": [1, 2], \"model\": \"m\", \"stop\": [\"one\", \"two\"], \"seed\": 5, \"tools\": "
        "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]");
    assert_int_equal(parse(RTR_CHAT, b.data, b.len, &a, &e), 0);
    assert_int_equal(json_size(a->tree), 3);
    assert_null(json_find(a->tree, "messages"));
    assert_int_equal(a->n_stops, 2);
    assert_string_equal(a->stops[1].bytes, "two");
    assert_int_equal(json_size(a->tools), 1);
    assert_memory_equal(a->model, "m", 1);
    rtr_ask_free(a);
    tow_buf_fini(&b);
}

static void test_api_request__a_body_of_too_many_values_is_refused_before_it_costs(void **state)
{
    (void)state;
    const size_t n = 4500000;
    struct rtr_ask *a = NULL;
    struct rtr_api_error e;
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_buf_puts(&b, "{\"prompt\": [");
    for (size_t i = 0; i < n; i++) tow_buf_puts(&b, i ? ",1" : "1");
    tow_buf_puts(&b, "]}");
    assert_true(parse(RTR_COMPLETIONS, b.data, b.len, &a, &e) < 0);
    assert_int_equal(e.status, 400);
    assert_string_equal(e.code, "invalid_json");
    assert_non_null(strstr(e.message, "more than 1114112 values"));
    tow_buf_fini(&b);
}

/* Keys of one body: what a chat of 32,768 messages with calls needs, and no more. */
static void test_api_request__keys_are_bounded(void **state)
{
    (void)state;
    for (size_t extra = 0; extra < 2; extra++) {
        const size_t n = 262144 - 2 + extra; /* besides prompt and x */
        struct rtr_ask *a = NULL;
        struct rtr_api_error e;
        struct tow_buf b;
        tow_buf_init(&b, 0);
        tow_buf_puts(&b, "{\"prompt\": [1], \"x\": [");
        for (size_t i = 0; i < n; i++) tow_buf_puts(&b, i ? ",{\"a\":1}" : "{\"a\":1}");
        tow_buf_puts(&b, "]}");
        int rc = parse(RTR_COMPLETIONS, b.data, b.len, &a, &e);
        tow_buf_fini(&b);
        if (!extra) {
            if (rc < 0) fail_msg("%s", e.message);
            rtr_ask_free(a);
            continue;
        }
        assert_true(rc < 0 && e.status == 400);
        assert_non_null(strstr(e.message, "more than 262144 keys"));
    }
}

static void test_api_request__messages_show_what_is_hidden(void **state)
{
    (void)state;
    struct rtr_api_error e = {0};
    struct rtr_ask *a = NULL;
    char body[600] = "{\"prompt\": [1], \"max_tokens\": \"a\x7f\u202eb\u2066c\xc2\x85\u00e4\"}";
    assert_true(parse(RTR_COMPLETIONS, body, strlen(body), &a, &e) < 0);
    assert_non_null(strstr(e.message, "is \"a\\u007f\\u202eb\\u2066c\\u0085\u00e4\""));

    /* A number of 400 digits is cut as a string is. */
    size_t n = (size_t)snprintf(body, sizeof body, "{\"prompt\": [1], \"max_tokens\": ");
    memset(body + n, '7', 400);
    strcpy(body + n + 400, "}");
    assert_true(parse(RTR_COMPLETIONS, body, strlen(body), &a, &e) < 0);
    const char *at = strstr(e.message, "is 7");
    assert_non_null(at);
    assert_int_equal(strspn(at + 3, "7"), 40);

    /* However long: within the room, and no half character. */
    char many[640];
    for (size_t i = 0; i + 3 < sizeof many; i += 3) memcpy(many + i, "\u202e", 4);
    rtr_api_fail(&e, 400, "x", NULL, "%s", many);
    assert_int_equal(strlen(e.message), 636);
    assert_string_equal(e.message + 630, "\\u202e");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_api_request__an_error_names_field_value_and_range),
        cmocka_unit_test(test_api_request__a_bias_key_has_one_spelling),
        cmocka_unit_test(test_api_request__a_long_value_is_cut_between_characters),
        cmocka_unit_test(test_api_request__the_tree_keeps_what_is_pointed_into),
        cmocka_unit_test(test_api_request__keys_are_bounded),
        cmocka_unit_test(test_api_request__messages_show_what_is_hidden),
        cmocka_unit_test(test_api_request__a_body_of_too_many_values_is_refused_before_it_costs),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
