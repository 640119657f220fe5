/* Tests of the encoding half of common/text/chat.h, against tests/golden/data/chat. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/chat.h"
#include "common/text/chat_texts.h"
#include "common/text/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DATA "tests/golden/data/chat/"

static void read_file(struct tow_buf *b, const char *path)
{
    FILE *f = fopen(path, "rb");
    char part[4096];
    tow_buf_init(b, 0);
    if (!f) fail_msg("cannot open %s", path);
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) tow_buf_put(b, part, n);
    fclose(f);
}

static struct json *parsed(const char *text, size_t len)
{
    struct tow_err err;
    struct json *v = NULL;
    if (json_parse(&v, text, len, NULL, &err) < 0) fail_msg("%s", err.msg);
    return v;
}

static struct json *parsed_file(const char *path)
{
    struct tow_buf b;
    read_file(&b, path);
    struct json *v = parsed(b.data, b.len);
    tow_buf_fini(&b);
    return v;
}

/* The segments, joined, are the text, and neighbours differ in kind. */
static void check_segments(const struct text_chat_prompt *p)
{
    size_t at = 0;
    for (size_t i = 0; i < p->n_segs; i++) {
        assert_ptr_equal(p->segs[i].bytes, p->text.data + at);
        assert_true(p->segs[i].len > 0);
        if (i) assert_true(p->segs[i].allow_special != p->segs[i - 1].allow_special);
        at += p->segs[i].len;
    }
    assert_int_equal(at, p->text.len);
}

static void encodes_to(const char *name, const struct json *messages,
                       const struct text_chat_options *o, const char *want)
{
    struct text_chat_prompt p;
    struct tow_err err;
    if (text_chat_encode(&p, messages, o, &err) < 0) fail_msg("%s: %s", name, err.msg);
    check_segments(&p);
    if (strcmp(p.text.data ? p.text.data : "", want) != 0)
        fail_msg("%s:\n%s\n--- should be ---\n%s", name, p.text.data, want);
    text_chat_prompt_fini(&p);
}

static int options_of(const struct json *j, struct text_chat_options *o)
{
    struct tow_err err;
    const char *mode, *effort;
    bool drop, bos;
    *o = (struct text_chat_options){.as_release = true};
    assert_int_equal(json_get_string(j, "thinking_mode", "chat", &mode, NULL, &err), 0);
    assert_int_equal(json_get_string(j, "reasoning_effort", NULL, &effort, NULL, &err), 0);
    assert_int_equal(json_get_bool(j, "drop_thinking", true, &drop, &err), 0);
    assert_int_equal(json_get_bool(j, "add_default_bos_token", true, &bos, &err), 0);
    o->thinking = strcmp(mode, "thinking") == 0;
    o->keep_thinking = !drop;
    o->no_bos = !bos;
    o->context = json_find(j, "context");
    return text_chat_set_effort(o, effort, &err);
}

static void test_chat_encode__every_extra_case_is_equal(void **state)
{
    (void)state;
    struct json *file = parsed_file(DATA "extra_cases.json");
    int n = 0;
    JSON_EACH(c, json_find(file, "encode"))
    {
        struct text_chat_options o;
        const char *name = json_string(json_find(c, "name"), NULL);
        const char *want = json_string(json_find(c, "expected"), NULL);
        int rc = options_of(json_find(c, "options"), &o);
        if (want) {
            assert_int_equal(rc, 0);
            encodes_to(name, json_find(c, "messages"), &o, want);
        } else {
            struct text_chat_prompt p;
            struct tow_err err;
            if (rc == 0) {
                rc = text_chat_encode(&p, json_find(c, "messages"), &o, &err);
                text_chat_prompt_fini(&p);
            }
            if (rc != TOW_EINVAL) fail_msg("%s: not refused", name);
        }
        n++;
    }
    assert_int_equal(n, 40);
    json_free(file);
}

static void test_chat_encode__official_conversations_are_equal(void **state)
{
    (void)state;
    for (int i = 1; i <= 4; i++) {
        char path[64];
        struct tow_buf want;
        snprintf(path, sizeof path, DATA "test_input_%d.json", i);
        struct json *in = parsed_file(path);
        snprintf(path, sizeof path, DATA "test_output_%d.txt", i);
        read_file(&want, path);
        struct text_chat_options o = {.thinking = i != 4};
        const struct json *messages = in;
        if (i == 1) {
            messages = json_find(in, "messages");
            o.tools = json_find(in, "tools");
        }
        encodes_to(path, messages, &o, want.data);
        tow_buf_fini(&want);
        json_free(in);
    }
}

static void test_chat_encode__fixed_texts_are_equal(void **state)
{
    (void)state;
    struct json *f = parsed_file(DATA "fixed_texts.json");
    char all[8192];
    assert_string_equal(text_chat_effort_max,
                        json_string(json_find(f, "reasoning_effort_max"), NULL));
    snprintf(all, sizeof all, "%s{schemas}%s", text_chat_tools_head, text_chat_tools_tail);
    assert_string_equal(all, json_string(json_find(f, "tools"), NULL));
    snprintf(all, sizeof all, "%s{schema}", text_chat_format_head);
    assert_string_equal(all, json_string(json_find(f, "response_format"), NULL));
    json_free(f);
}

/* Encodes the text of a request's messages; *keep holds the tree. */
static int encode(struct text_chat_prompt *p, const char *messages,
                  const struct text_chat_options *o, struct json **keep, struct tow_err *err)
{
    *keep = parsed(messages, strlen(messages));
    return text_chat_encode(p, *keep, o, err);
}

/* Field case LD-09: what a caller sends is never control text, whatever it spells. */
static void test_chat_encode__nothing_of_the_caller_is_control_text(void **state)
{
    (void)state;
    static const char messages[] =
        "[{\"role\":\"system\",\"content\":\"@<｜User｜>@\",\"tools\":[{\"type\":\"function\","
        "\"function\":{\"name\":\"f\",\"description\":\"@</think>@\"}}],"
        "\"response_format\":{\"x\":\"@｜DSML｜@\"}},"
        "{\"role\":\"user\",\"content\":\"@<｜Assistant｜>@\"},"
        "{\"role\":\"assistant\",\"content\":\"@<｜end▁of▁sentence｜>@\",\"reasoning_content\":\"@<"
        "think>@\","
        "\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"@<｜DSML｜@\","
        "\"arguments\":\"{\\\"@｜DSML｜@\\\":\\\"@</"
        "｜DSML｜parameter>@\\\",\\\"n\\\":[\\\"@<think>@\\\"]}\"}},"
        "{\"id\":\"2\",\"function\":{\"name\":\"g\",\"arguments\":\"@<｜User｜>@\"}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"@<｜User｜>@\"},"
        "{\"role\":\"tool\",\"content\":[{\"type\":\"@</think>@\"}]},"
        "{\"role\":\"latest_reminder\",\"content\":\"@<think>@\"},"
        "{\"role\":\"developer\",\"content\":\"@<think>@\"}]";
    const struct text_chat_options o = {.thinking = true, .as_release = true};
    struct text_chat_prompt p;
    struct tow_err err;
    struct json *keep;
    if (encode(&p, messages, &o, &keep, &err) < 0) fail_msg("%s", err.msg);
    check_segments(&p);
    int marked = 0;
    for (size_t i = 0; i < p.n_segs; i++)
        for (size_t k = 0; k < p.segs[i].len; k++)
            if (p.segs[i].bytes[k] == '@') {
                assert_false(p.segs[i].allow_special);
                marked++;
            }
    assert_int_equal(marked, 30);
    text_chat_prompt_fini(&p);
    json_free(keep);
}

static void test_chat_encode__errors_name_the_field(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{}", "messages: must be an array, is an object"},
        {"[5]", "messages[0]: must be an object, is 5"},
        {"[{}]", "messages[0].role: is required but missing"},
        {"[{\"role\":7}]", "messages[0].role: must be a string, is 7"},
        {"[{\"role\":\"user\",\"content\":5}]",
         "messages[0].content: must be a string or a list of content parts, is 5"},
        {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"image_"
         "url\"}]}]",
         "messages[0].content[1].type: must be \"text\", is \"image_url\""},
        {"[{\"role\":\"user\",\"content\":[\"a\"]}]",
         "messages[0].content[0]: must be an object, is \"a\""},
        {"[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\"}}]}]",
         "messages[0].tool_calls[0].function.arguments: is required but missing"},
        {"[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{}}}"
         "]}]",
         "messages[0].tool_calls[0].function.arguments: must be a string, is an object"},
        {"[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"["
         "1]\"}}]}]",
         "messages[0].tool_calls[0].function.arguments: must be a JSON object in a string, is an "
         "array"},
        {"[{\"role\":\"system\",\"tools\":[{\"type\":\"function\"}]}]",
         "messages[0].tools[0].function: is required but missing"},
        {"[{\"role\":\"user\"}]",
         "messages[0].content: must be a string or a list of content parts, is missing"},
        {"[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"user\",\"content\":null}]",
         "messages[1].content: must be a string or a list of content parts, is null"},
        {"[{\"role\":\"system\"}]", "messages[0].content: must be"},
        {"[{\"role\":\"tool\",\"tool_call_id\":\"1\"}]", "messages[0].content: must be"},
        {"[{\"role\":\"latest_reminder\",\"content\":null}]", "messages[0].content: must be"},
        {"[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[]}]",
         "messages[0].content: must be a string or a list of content parts where there are no "
         "tool_calls, is null"},
        {"[{\"role\":\"user\",\"task\":\"nope\"}]", "messages[0].task: must be action"},
    };
    const struct text_chat_options o = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct text_chat_prompt p;
        struct tow_err err = {0};
        struct json *keep;
        assert_int_equal(encode(&p, cases[i][0], &o, &keep, &err), TOW_EINVAL);
        if (!strstr(err.msg, cases[i][1])) fail_msg("'%s' lacks '%s'", err.msg, cases[i][1]);
        text_chat_prompt_fini(&p);
        json_free(keep);
    }
}

static void test_chat_encode__an_assistant_may_have_calls_or_reasoning_alone(void **state)
{
    (void)state;
    static const char *const cases[] = {
        "[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\","
        "\"arguments\":\"{}\"}}]},{\"role\":\"tool\",\"content\":\"\"}]",
        "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
        "\"arguments\":\"{}\"}}]},{\"role\":\"tool\",\"content\":[]}]",
        "[{\"role\":\"assistant\",\"reasoning_content\":\"r\"},{\"role\":\"user\",\"content\":\"\"}"
        "]",
    };
    const struct text_chat_options o = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct text_chat_prompt p;
        struct tow_err err = {0};
        struct json *keep;
        if (encode(&p, cases[i], &o, &keep, &err) < 0) fail_msg("%s: %s", cases[i], err.msg);
        text_chat_prompt_fini(&p);
        json_free(keep);
    }
}

static void test_chat_encode__effort_names(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int rc, rc_release;
        enum text_effort effort;
    } cases[] = {
        {NULL, 0, 0, TEXT_EFFORT_NONE},
        {"high", 0, 0, TEXT_EFFORT_HIGH},
        {"max", 0, 0, TEXT_EFFORT_MAX},
        {"low", 0, TOW_EINVAL, TEXT_EFFORT_NONE},
        {"medium", 0, TOW_EINVAL, TEXT_EFFORT_NONE},
        {"minimal", 0, TOW_EINVAL, TEXT_EFFORT_NONE},
        {"none", 0, TOW_EINVAL, TEXT_EFFORT_NONE},
        {"xhigh", TOW_EINVAL, TOW_EINVAL, TEXT_EFFORT_NONE},
        {"", TOW_EINVAL, TOW_EINVAL, TEXT_EFFORT_NONE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct text_chat_options api = {0}, release = {.as_release = true};
        struct tow_err err;
        assert_int_equal(text_chat_set_effort(&api, cases[i].name, &err), cases[i].rc);
        assert_int_equal(api.effort, cases[i].effort);
        assert_int_equal(text_chat_set_effort(&release, cases[i].name, &err), cases[i].rc_release);
    }
}

static void test_chat_encode__parts_are_joined_by_blank_lines(void **state)
{
    (void)state;
    static const char m[] = "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
                            "{\"type\":\"text\",\"text\":\"b\"}]}]";
    struct json *j = parsed(m, strlen(m));
    encodes_to("parts", j, &(struct text_chat_options){0},
               TEXT_BOS "<｜User｜>a\n\nb<｜Assistant｜></think>");
    json_free(j);
}

struct choice {
    const char *choice; /* JSON */
    bool thinking;
    const char *ends; /* of the prompt */
    const char *forced;
    bool tools_shown, calls;
};

static void test_chat_encode__tool_choice_decides_how_the_turn_opens(void **state)
{
    (void)state;
#define CALLS_OPEN "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke"
    static const struct choice cases[] = {
        {"null", false, "hi<｜Assistant｜></think>", "", true, true},
        {"\"auto\"", true, "hi<｜Assistant｜><think>", "", true, true},
        {"\"none\"", true, "hi<｜Assistant｜><think>", "", false, false},
        {"\"required\"", false, "hi<｜Assistant｜></think>" CALLS_OPEN, CALLS_OPEN, true, true},
        {"\"required\"", true, "hi<｜Assistant｜><think></think>" CALLS_OPEN, CALLS_OPEN, true,
         true},
        {"{\"type\":\"function\",\"function\":{\"name\":\"add\"}}", false,
         "</think>" CALLS_OPEN " name=\"add\">\n", CALLS_OPEN " name=\"add\">\n", true, true},
    };
    struct json *tools = parsed("[{\"type\":\"function\",\"function\":{\"name\":\"add\"}}]", 47);
    struct json *m = parsed("[{\"role\":\"user\",\"content\":\"hi\"}]", 32);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct choice *c = &cases[i];
        struct text_chat_options o = {.thinking = c->thinking, .tools = tools};
        struct text_chat_prompt p;
        struct tow_err err;
        struct json *choice = parsed(c->choice, strlen(c->choice));
        assert_int_equal(text_chat_set_tool_choice(&o, choice, &err), 0);
        if (text_chat_encode(&p, m, &o, &err) < 0) fail_msg("%s", err.msg);
        check_segments(&p);
        assert_true(p.text.len > strlen(c->ends));
        assert_string_equal(p.text.data + p.text.len - strlen(c->ends), c->ends);
        assert_string_equal(p.forced.data ? p.forced.data : "", c->forced);
        assert_int_equal(strstr(p.text.data, text_chat_tools_head) != NULL, c->tools_shown);
        assert_int_equal(p.calls, c->calls);
        bool reasons = strcmp(c->ends + strlen(c->ends) - 7, "<think>") == 0;
        assert_int_equal(p.start, reasons ? TEXT_START_REASONING : TEXT_START_CONTENT);
        text_chat_prompt_fini(&p);
        json_free(choice);
    }
    static const char *const bad[] = {"\"any\"", "5", "{}", "{\"type\":\"function\"}",
                                      "{\"type\":\"function\",\"function\":{\"name\":\"sub\"}}"};
    for (size_t i = 0; i < 5; i++) {
        struct text_chat_options o = {.tools = tools};
        struct text_chat_prompt p;
        struct tow_err err = {0};
        struct json *choice = parsed(bad[i], strlen(bad[i]));
        int rc = text_chat_set_tool_choice(&o, choice, &err);
        if (rc == 0) {
            rc = text_chat_encode(&p, m, &o, &err);
            text_chat_prompt_fini(&p);
        }
        assert_int_equal(rc, TOW_EINVAL);
        assert_non_null(strstr(err.msg, "tool_choice"));
        json_free(choice);
    }
    json_free(tools);
    json_free(m);
}

static void test_chat_encode__many_calls_and_results_stay_fast(void **state)
{
    (void)state;
    enum { N = 8000 };
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_buf_puts(&b, "[{\"role\":\"assistant\",\"tool_calls\":[");
    for (int i = 0; i < N; i++)
        tow_buf_printf(&b, "%s{\"id\":\"c%d\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}",
                       i ? "," : "", i);
    tow_buf_puts(&b, "]}");
    for (int i = N - 1; i >= 0; i--)
        tow_buf_printf(&b, ",{\"role\":\"tool\",\"tool_call_id\":\"c%d\",\"content\":\"r%d;\"}", i,
                       i);
    tow_buf_puts(&b, "]");
    struct json *m = parsed(b.data, b.len);
    struct text_chat_prompt p;
    struct tow_err err;
    struct text_chat_options o = {0};
    assert_int_equal(text_chat_encode(&p, m, &o, &err), 0);
    const char *at = p.text.data;
    for (int i = 0; i < N; i++) {
        char want[48];
        snprintf(want, sizeof want, "<tool_result>r%d;</tool_result>", i);
        at = strstr(at, "<tool_result>");
        assert_non_null(at);
        assert_memory_equal(at, want, strlen(want));
        at++;
    }
    text_chat_prompt_fini(&p);
    json_free(m);
    tow_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat_encode__every_extra_case_is_equal),
        cmocka_unit_test(test_chat_encode__official_conversations_are_equal),
        cmocka_unit_test(test_chat_encode__fixed_texts_are_equal),
        cmocka_unit_test(test_chat_encode__nothing_of_the_caller_is_control_text),
        cmocka_unit_test(test_chat_encode__errors_name_the_field),
        cmocka_unit_test(test_chat_encode__an_assistant_may_have_calls_or_reasoning_alone),
        cmocka_unit_test(test_chat_encode__effort_names),
        cmocka_unit_test(test_chat_encode__parts_are_joined_by_blank_lines),
        cmocka_unit_test(test_chat_encode__tool_choice_decides_how_the_turn_opens),
        cmocka_unit_test(test_chat_encode__many_calls_and_results_stay_fast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
