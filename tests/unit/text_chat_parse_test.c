/* Tests of the parsing half of common/text/chat.h: the strict parser against the goldens, the
 * stream parser against tables, each case at every split in two, byte by byte, and at random
 * splits. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/chat.h"
#include "common/text/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DATA "tests/golden/data/chat/"
#define B    "<｜DSML｜"  /* begin of a tag */
#define E    "</｜DSML｜" /* end of one */

#define BLOCK(calls)    "\n\n" B "tool_calls>\n" calls E "tool_calls>"
#define CALL(name, par) B "invoke name=\"" name "\">\n" par E "invoke>\n"
#define STR(key, value) B "parameter name=\"" key "\" string=\"true\">" value E "parameter>\n"
#define VAL(key, value) B "parameter name=\"" key "\" string=\"false\">" value E "parameter>\n"

static struct json *parsed_file(const char *path)
{
    struct tow_buf b;
    struct tow_err err;
    struct json *v = NULL;
    FILE *f = fopen(path, "rb");
    char part[4096];
    if (!f) fail_msg("cannot open %s", path);
    tow_buf_init(&b, 0);
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) tow_buf_put(&b, part, n);
    fclose(f);
    if (json_parse(&v, b.data, b.len, NULL, &err) < 0) fail_msg("%s", err.msg);
    tow_buf_fini(&b);
    return v;
}

static const char *str(const struct tow_buf *b)
{
    return b->data ? b->data : "";
}

/* ---- the strict form ---- */

static void test_chat_strict__every_golden_case_is_equal(void **state)
{
    (void)state;
    struct json *file = parsed_file(DATA "extra_cases.json");
    int n = 0;
    JSON_EACH(c, json_find(file, "parse"))
    {
        struct text_chat_message m;
        struct tow_err err;
        size_t len;
        const char *name = json_string(json_find(c, "name"), NULL);
        const char *text = json_string(json_find(c, "text"), &len);
        const char *mode = json_string(json_find(c, "thinking_mode"), NULL);
        const struct json *want = json_find(c, "expected");
        text_chat_message_init(&m);
        int rc = text_chat_parse_strict(&m, text, len, strcmp(mode, "thinking") == 0, &err);
        if (!want && rc != TOW_EFORMAT) fail_msg("%s: not refused", name);
        if (want) {
            if (rc < 0) fail_msg("%s: %s", name, err.msg);
            assert_string_equal(str(&m.content), json_string(json_find(want, "content"), NULL));
            assert_string_equal(str(&m.reasoning),
                                json_string(json_find(want, "reasoning_content"), NULL));
            uint32_t i = 0;
            JSON_EACH(call, json_find(want, "tool_calls"))
            {
                const struct json *f = json_find(call, "function");
                assert_true(i < m.n_calls);
                assert_string_equal(str(&m.calls[i].name), json_string(json_find(f, "name"), NULL));
                assert_string_equal(str(&m.calls[i].arguments),
                                    json_string(json_find(f, "arguments"), NULL));
                i++;
            }
            assert_int_equal(i, m.n_calls);
        }
        text_chat_message_fini(&m);
        n++;
    }
    assert_int_equal(n, 19);
    json_free(file);
}

/* The assistant turn after the nth "<｜Assistant｜><think>" of an official prompt (-1: the last). */
static void parse_turn(struct text_chat_message *m, const char *path, int nth)
{
    static const char open[] = "<｜Assistant｜><think>";
    struct tow_buf b;
    struct tow_err err;
    FILE *f = fopen(path, "rb");
    char part[4096];
    if (!f) fail_msg("cannot open %s", path);
    tow_buf_init(&b, 0);
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) tow_buf_put(&b, part, n);
    fclose(f);
    const char *at = strstr(b.data, open), *next;
    for (; nth != 0 && (next = strstr(at + 1, open)); nth--) at = next;
    at += strlen(open);
    const char *end = strstr(at, "<｜User｜>");
    text_chat_message_init(m);
    if (text_chat_parse_strict(m, at, end ? (size_t)(end - at) : strlen(at), true, &err) < 0)
        fail_msg("%s: %s", path, err.msg);
    tow_buf_fini(&b);
}

static void test_chat_strict__official_conversations_parse(void **state)
{
    (void)state;
    struct text_chat_message m;
    struct json *in = parsed_file(DATA "test_input_1.json");
    const struct json *want = NULL, *last = NULL;
    JSON_EACH(msg, json_find(in, "messages"))
    {
        if (strcmp(json_string(json_find(msg, "role"), NULL), "assistant") != 0) continue;
        if (!want) want = msg;
        last = msg;
    }
    parse_turn(&m, DATA "test_output_1.txt", 0);
    assert_int_equal(m.n_calls, 1);
    assert_string_equal(str(&m.calls[0].name), "get_weather");
    assert_string_equal(str(&m.calls[0].arguments),
                        "{\"location\": \"Beijing\", \"unit\": \"celsius\"}");
    assert_int_equal(m.content.len, 0);
    assert_string_equal(str(&m.reasoning), json_string(json_find(want, "reasoning_content"), NULL));
    text_chat_message_fini(&m);
    parse_turn(&m, DATA "test_output_1.txt", -1);
    assert_int_equal(m.n_calls, 0);
    assert_string_equal(str(&m.content), json_string(json_find(last, "content"), NULL));
    assert_string_equal(str(&m.reasoning), json_string(json_find(last, "reasoning_content"), NULL));
    text_chat_message_fini(&m);
    json_free(in);
    parse_turn(&m, DATA "test_output_2.txt", -1);
    assert_string_equal(str(&m.content), "The capital of France is Paris.");
    assert_string_equal(str(&m.reasoning),
                        "The user asks about the capital of France. It is Paris.");
    text_chat_message_fini(&m);
}

/* ---- the stream form ---- */

struct stream_case {
    const char *name, *text;
    bool thinking, no_calls, cut;
    const char *reasoning, *content;
    const char *calls; /* "name {args}\n" for each */
    bool malformed;
    const char *dropped; /* by TEXT_EV_CUT */
};

struct got {
    struct text_chat_message m;
    struct tow_buf dropped;
    bool malformed;
    uint32_t next_index;
    bool in_call;
};

static void on_event(void *arg, const struct text_chat_event *ev)
{
    struct got *g = arg;
    assert_false(g->in_call && ev->kind != TEXT_EV_ARGUMENTS);
    g->in_call = ev->kind == TEXT_EV_CALL;
    if (ev->kind == TEXT_EV_CALL) assert_int_equal(ev->index, g->next_index);
    if (ev->kind == TEXT_EV_ARGUMENTS) {
        struct json *v = NULL;
        struct tow_err err;
        assert_int_equal(ev->index, g->next_index++);
        if (json_parse(&v, ev->text, ev->len, NULL, &err) < 0) fail_msg("arguments: %s", err.msg);
        assert_int_equal(json_type(v), JSON_OBJECT);
        json_free(v);
    }
    if (ev->kind == TEXT_EV_REASONING || ev->kind == TEXT_EV_CONTENT) assert_true(ev->len > 0);
    if (ev->kind == TEXT_EV_MALFORMED) g->malformed = true;
    if (ev->kind == TEXT_EV_CUT) tow_buf_put(&g->dropped, ev->text, ev->len);
    text_chat_message_add(&g->m, ev);
}

/* Feeds the text in the pieces that cuts[] marks (NULL: whole) and compares with the case. */
static void run_case(const struct stream_case *c, const bool *cuts, const struct json *tools)
{
    struct text_chat_parser *p = NULL;
    struct got g = {0};
    struct tow_err err;
    size_t len = strlen(c->text), from = 0;
    text_chat_message_init(&g.m);
    tow_buf_init(&g.dropped, 0);
    assert_int_equal(text_chat_parser_open(&p,
                                           c->thinking ? TEXT_START_REASONING : TEXT_START_CONTENT,
                                           !c->no_calls, tools, &err),
                     0);
    for (size_t i = 1; i <= len; i++) {
        if (i < len && !(cuts && cuts[i])) continue;
        char *piece = malloc(i - from); /* exact, so that a sanitizer sees a read past it */
        memcpy(piece, c->text + from, i - from);
        assert_int_equal(text_chat_parser_feed(p, piece, i - from, on_event, &g), 0);
        free(piece);
        from = i;
    }
    assert_int_equal(text_chat_parser_end(p, !c->cut, on_event, &g), 0);
    assert_false(g.m.failed);

    struct tow_buf calls;
    tow_buf_init(&calls, 0);
    for (uint32_t i = 0; i < g.m.n_calls; i++)
        tow_buf_printf(&calls, "%s %s\n", str(&g.m.calls[i].name), str(&g.m.calls[i].arguments));
    const char *want_r = c->reasoning ? c->reasoning : "", *want_c = c->content ? c->content : "";
    if (strcmp(str(&g.m.reasoning), want_r) != 0)
        fail_msg("%s: reasoning '%s', not '%s'", c->name, str(&g.m.reasoning), want_r);
    if (strcmp(str(&g.m.content), want_c) != 0)
        fail_msg("%s: content '%s', not '%s'", c->name, str(&g.m.content), want_c);
    if (strcmp(str(&calls), c->calls ? c->calls : "") != 0)
        fail_msg("%s: calls '%s', not '%s'", c->name, str(&calls), c->calls ? c->calls : "");
    if (strcmp(str(&g.dropped), c->dropped ? c->dropped : "") != 0)
        fail_msg("%s: dropped '%s'", c->name, str(&g.dropped));
    if (g.malformed != c->malformed) fail_msg("%s: malformed is %d", c->name, g.malformed);
    assert_int_equal(text_chat_parser_n_calls(p), g.m.n_calls);
    tow_buf_fini(&calls);
    tow_buf_fini(&g.dropped);
    text_chat_message_fini(&g.m);
    text_chat_parser_free(p);
}

static void run_splits(const struct stream_case *c, const struct json *tools)
{
    size_t len = strlen(c->text);
    bool *cuts = calloc(len + 1, sizeof *cuts);
    run_case(c, NULL, tools);
    for (size_t i = 1; i < len; i++) {
        cuts[i] = true;
        run_case(c, cuts, tools);
        cuts[i] = false;
    }
    memset(cuts, 1, len + 1);
    run_case(c, cuts, tools);
    uint32_t x = 2463534242u;
    for (int round = 0; round < 50; round++) {
        for (size_t i = 0; i < len; i++) {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            cuts[i] = x % 7 == 0;
        }
        run_case(c, cuts, tools);
    }
    free(cuts);
}

static void run_all(const struct stream_case *cases, size_t n, const struct json *tools)
{
    for (size_t i = 0; i < n; i++) run_splits(&cases[i], tools);
}

/* Field case DS-10. */
static void test_chat_parser__markers_never_show(void **state)
{
    (void)state;
#define NESTED "{\"a\": [1, {\"b\": [[], {}, \"x<y\"]}], \"c\": null}"
#define TWO                                                                                        \
    BLOCK(CALL("run", STR("cmd", "make 2>&1") STR("close", "a</") VAL("deep", NESTED))             \
              CALL("stop", STR("why", "")))
#define TWO_CALLS                                                                                  \
    "run {\"cmd\": \"make 2>&1\", \"close\": \"a</\", \"deep\": " NESTED "}\nstop {\"why\": "      \
    "\"\"}\n"
    static const struct stream_case cases[] = {
        {.name = "plain", .text = "Hello, world.", .content = "Hello, world."},
        {.name = "empty", .text = ""},
        {.name = "two calls",
         .text = "I will look." TWO,
         .content = "I will look.",
         .calls = TWO_CALLS},
        {.name = "two calls, thinking",
         .text = "Hm.\n</think>I will look." TWO,
         .thinking = true,
         .reasoning = "Hm.\n",
         .content = "I will look.",
         .calls = TWO_CALLS},
        {.name = "calls only", .text = TWO, .calls = TWO_CALLS},
        {.name = "final blanks", .text = "x" TWO "\n\n", .content = "x", .calls = TWO_CALLS},
        {.name = "no blank line",
         .text = "x\n" B "tool_calls>" B "invoke name=\"f\">" E "invoke>" E "tool_calls>",
         .content = "x",
         .calls = "f {}\n"},
        {.name = "encoder's empty call", .text = BLOCK(CALL("f", "\n")), .calls = "f {}\n"},
        {.name = "text after",
         .text = "x" BLOCK(CALL("f", "")) "\n\nmore",
         .content = "x\n\nmore",
         .calls = "f {}\n"},
        {.name = "two blocks",
         .text = BLOCK(CALL("f", "")) BLOCK(CALL("g", "")),
         .calls = "f {}\ng {}\n"},
        {.name = "blanks inside text", .text = " a \n\n b\n\n", .content = " a \n\n b\n\n"},
        {.name = "angles", .text = "a < b << c <", .content = "a < b << c <"},
        {.name = "no calls expected",
         .text = "x" BLOCK(CALL("f", "")),
         .no_calls = true,
         .content = "x" BLOCK(CALL("f", ""))},
        {.name = "unicode",
         .text = "日本語 🙂" BLOCK(CALL("搜索", STR("q", "你好 🙂"))),
         .content = "日本語 🙂",
         .calls = "搜索 {\"q\": \"你好 🙂\"}\n"},
        {.name = "think tag in a value",
         .text = BLOCK(CALL("f", STR("a", "</think>"))),
         .calls = "f {\"a\": \"</think>\"}\n"},
    };
    run_all(cases, sizeof cases / sizeof *cases, NULL);
}

/* Field case DS-11. */
static void test_chat_parser__parameters_keep_their_types(void **state)
{
    (void)state;
    static const struct stream_case cases[] = {
        {.name = "strings",
         .text = BLOCK(CALL("f", STR("a", "007") STR("b", "true") STR("c", "null")
                                     STR("d", "{\"a\":1}") STR("e", "q\" n\n b\\ < &lt; 🙂"))),
         .calls = "f {\"a\": \"007\", \"b\": \"true\", \"c\": \"null\", \"d\": \"{\\\"a\\\":1}\", "
                  "\"e\": \"q\\\" n\\n b\\\\ < &lt; 🙂\"}\n"},
        {.name = "values",
         .text = BLOCK(CALL("f", VAL("a", "1") VAL("b", "-0.5") VAL("c", "1e3") VAL("d", "true")
                                     VAL("e", "null") VAL("f", "[1,{\"b\":[]}]")
                                         VAL("g", "123456789012345678901234567890"))),
         .calls = "f {\"a\": 1, \"b\": -0.5, \"c\": 1e3, \"d\": true, \"e\": null, \"f\": "
                  "[1,{\"b\":[]}], \"g\": 123456789012345678901234567890}\n"},
        {.name = "no JSON",
         .text = BLOCK(
             CALL("f", VAL("a", "{a:1}") VAL("b", "") VAL("c", "NaN") VAL("d", "1, \"x\": 2"))),
         .calls =
             "f {\"a\": \"{a:1}\", \"b\": \"\", \"c\": \"NaN\", \"d\": \"1, \\\"x\\\": 2\"}\n"},
    };
    run_all(cases, sizeof cases / sizeof *cases, NULL);

    static const char schema[] =
        "[{\"type\":\"function\",\"function\":{\"name\":\"plain\",\"parameters\":{\"properties\":"
        "{\"a\":{}}}}},{\"type\":\"function\",\"function\":{\"name\":\"real\",\"parameters\":"
        "{\"properties\":{\"arguments\":{}}}}},{\"type\":\"function\",\"function\":{\"name\":"
        "\"bare\"}}]";
    static const struct stream_case wrapped[] = {
        {.name = "wrapper",
         .text = BLOCK(CALL("plain", VAL("arguments", "{\"a\": 1.50}"))),
         .calls = "plain {\"a\": 1.50}\n"},
        {.name = "wrapper as string",
         .text = BLOCK(CALL("plain", STR("input", "{\"a\":\"x\"}"))),
         .calls = "plain {\"a\":\"x\"}\n"},
        {.name = "a real parameter",
         .text = BLOCK(CALL("real", VAL("arguments", "{\"a\":1}"))),
         .calls = "real {\"arguments\": {\"a\":1}}\n"},
        {.name = "no schema",
         .text = BLOCK(CALL("bare", VAL("arguments", "{\"a\":1}"))),
         .calls = "bare {\"arguments\": {\"a\":1}}\n"},
        {.name = "unknown tool",
         .text = BLOCK(CALL("other", VAL("arguments", "{\"a\":1}"))),
         .calls = "other {\"arguments\": {\"a\":1}}\n"},
        {.name = "not an object",
         .text = BLOCK(CALL("plain", STR("arguments", "text"))),
         .calls = "plain {\"arguments\": \"text\"}\n"},
        {.name = "not alone",
         .text = BLOCK(CALL("plain", VAL("input", "{}") VAL("a", "1"))),
         .calls = "plain {\"input\": {}, \"a\": 1}\n"},
    };
    struct json *tools = NULL;
    struct tow_err err;
    assert_int_equal(json_parse(&tools, schema, strlen(schema), NULL, &err), 0);
    run_all(wrapped, sizeof wrapped / sizeof *wrapped, tools);
    json_free(tools);
}

/* Field case DS-12: the table of docs/chat.md. */
#define BROKEN(what, raw)                                                                          \
    {                                                                                              \
        .name = what, .text = "x" raw, .content = "x" raw, .malformed = true                       \
    }
static void test_chat_parser__malformed_calls_become_text(void **state)
{
    (void)state;
    static const struct stream_case cases[] = {
        BROKEN("no marker in the parameter",
               BLOCK(CALL("f", "<parameter name=\"a\">1</parameter>\n"))),
        BROKEN("no marker in the call", "\n\n" B "tool_calls>\n<invoke name=\"f\">\n</invoke>"),
        BROKEN("no string attribute",
               BLOCK(CALL("f", B "parameter name=\"a\">1" E "parameter>\n"))),
        BROKEN("bad string attribute",
               BLOCK(CALL("f", B "parameter name=\"a\" string=\"maybe\">1" E "parameter>\n"))),
        BROKEN("parameter not closed",
               BLOCK(CALL("f", B "parameter name=\"a\" string=\"true\">1\n" STR("b", "2")))),
        BROKEN("call not closed",
               "\n\n" B "tool_calls>\n" B "invoke name=\"f\">\n" STR("a", "1") E "tool_calls>"),
        BROKEN("value not closed at the end", "\n\n" B "tool_calls>\n" B "invoke name=\"f\">\n" B
                                              "parameter name=\"a\" string=\"true\">v"),
        BROKEN("second call broken", BLOCK(CALL("f", STR("a", "1")) CALL("g", "oops"))),
        BROKEN("first call broken", BLOCK(CALL("f", "oops") CALL("g", STR("a", "1")))),
        BROKEN("same parameter twice", BLOCK(CALL("f", STR("a", "1") STR("b", "1") VAL("a", "2")))),
        BROKEN("no name", BLOCK(CALL("", STR("a", "1")))),
        BROKEN("name over a line", BLOCK(CALL("a\nb", ""))),
        BROKEN("empty block", BLOCK("")),
        BROKEN("junk in the block", BLOCK(CALL("f", "") "hello\n")),
        {.name = "only the end of the block missing",
         .text = "x\n\n" B "tool_calls>\n" CALL("f", STR("a", "1")),
         .content = "x",
         .calls = "f {\"a\": \"1\"}\n"},
        {.name = "older block name",
         .text = "x\n\n" B "function_calls>\n" CALL("f", STR("a", "1")) E "function_calls>",
         .content = "x",
         .calls = "f {\"a\": \"1\"}\n"},
        {.name = "without a block",
         .text = "x\n\n" CALL("f", STR("a", "1")) CALL("g", ""),
         .content = "x",
         .calls = "f {\"a\": \"1\"}\ng {}\n"},
        {.name = "without a block's begin",
         .text = "x\n\n" CALL("f", "") E "tool_calls>",
         .content = "x",
         .calls = "f {}\n"},
        {.name = "unknown function, blanks in the name",
         .text = BLOCK(CALL("get the weather", "")),
         .calls = "get the weather {}\n"},
        {.name = "no marker in the block",
         .text = "x\n\n<tool_calls>\n<invoke name=\"f\">",
         .content = "x\n\n<tool_calls>\n<invoke name=\"f\">"},
        {.name = "broken in thinking",
         .text = "r" BLOCK("no") " s</think>A",
         .thinking = true,
         .reasoning = "r" BLOCK("no") " s",
         .content = "A",
         .malformed = true},
    };
    run_all(cases, sizeof cases / sizeof *cases, NULL);
}

/* A call cut off by max_tokens is never one, and shows nowhere: cut at every byte. */
static void test_chat_parser__a_cut_call_is_dropped(void **state)
{
    (void)state;
    static const char whole[] = "x" BLOCK(CALL("f", STR("a", "1") VAL("b", "[2]")) CALL("g", ""));
    size_t len = strlen(whole);
    for (size_t n = 1; n < len; n++) {
        if (((unsigned char)whole[n] & 0xc0) == 0x80) continue; /* whole characters are fed */
        char text[sizeof whole];
        memcpy(text, whole, n);
        text[n] = 0;
        bool marker = n > 4; /* "x\n\n<" is still text */
        const struct stream_case c = {.name = text,
                                      .text = text,
                                      .cut = true,
                                      .content = marker ? "x" : text,
                                      .dropped = marker ? text + 1 : ""};
        run_splits(&c, NULL);
    }
}

/* Field case DS-13: the table of docs/chat.md. */
static void test_chat_parser__end_of_thinking(void **state)
{
    (void)state;
    static const struct stream_case cases[] = {
        {.name = "normal",
         .text = "R</think>A",
         .thinking = true,
         .reasoning = "R",
         .content = "A"},
        {.name = "empty", .text = "</think>A", .thinking = true, .content = "A"},
        {.name = "never", .text = "A", .thinking = true, .reasoning = "A"},
        {.name = "never, end token as text",
         .text = "A" TEXT_EOS,
         .thinking = true,
         .reasoning = "A"},
        {.name = "cut", .text = "R and", .thinking = true, .cut = true, .reasoning = "R and"},
        {.name = "cut in the marker",
         .text = "R</thi",
         .thinking = true,
         .cut = true,
         .reasoning = "R</thi"},
        {.name = "call",
         .text = "R</think>" BLOCK(CALL("f", "")),
         .thinking = true,
         .reasoning = "R",
         .calls = "f {}\n"},
        {.name = "call without the end",
         .text = "R" BLOCK(CALL("f", "")),
         .thinking = true,
         .reasoning = "R",
         .calls = "f {}\n"},
        {.name = "two ends",
         .text = "R</think>A</think>B",
         .thinking = true,
         .reasoning = "R",
         .content = "AB"},
        {.name = "begin again",
         .text = "<think>R</think>A",
         .thinking = true,
         .reasoning = "R",
         .content = "A"},
        {.name = "off: answer", .text = "A", .content = "A"},
        {.name = "off: end marker", .text = "R</think>A", .content = "RA"},
        {.name = "off: both markers", .text = "<think>R</think>A" TEXT_EOS, .content = "RA"},
        {.name = "blanks kept",
         .text = "R\n</think>\n\nA\n",
         .thinking = true,
         .reasoning = "R\n",
         .content = "\n\nA\n"},
        {.name = "almost a marker",
         .text = "a</thin>b</think >c",
         .content = "a</thin>b</think >c"},
        {.name = "turn markers", .text = "a<｜User｜>b<｜Assistant｜>c" TEXT_BOS, .content = "abc"},
    };
    run_all(cases, sizeof cases / sizeof *cases, NULL);
}

static void test_chat_parser__starts_inside_a_forced_call(void **state)
{
    (void)state;
    static const char prefix[] = "\n\n" B "tool_calls>\n" B "invoke";
    struct text_chat_prompt prompt = {.start = TEXT_START_CONTENT, .calls = true};
    struct text_chat_parser *p = NULL;
    struct got g = {0};
    struct tow_err err;
    text_chat_message_init(&g.m);
    tow_buf_init(&prompt.text, 0);
    tow_buf_init(&prompt.forced, 0);
    tow_buf_puts(&prompt.forced, prefix);
    assert_int_equal(text_chat_parser_new(&p, &prompt, NULL, &err), 0);
    static const char rest[] = " name=\"f\">\n" STR("a", "1") E "invoke>\n" E "tool_calls>";
    for (size_t i = 0; rest[i]; i++) {
        assert_int_equal(text_chat_parser_feed(p, rest + i, 1, on_event, &g), 0);
        if (rest[i + 1]) assert_int_equal(g.m.n_calls, 0); /* told only when the block is closed */
    }
    assert_int_equal(g.m.n_calls, 1);
    assert_string_equal(str(&g.m.calls[0].arguments), "{\"a\": \"1\"}");
    assert_int_equal(g.m.content.len, 0);
    text_chat_parser_free(p);
    text_chat_message_fini(&g.m);
    text_chat_prompt_fini(&prompt);
}

static void test_chat_parser__long_runs_stay_linear(void **state)
{
    (void)state;
    static const char *const units[] = {"\n",       "<",       " <",
                                        "｜DSML｜", "</think", "<｜DSML｜tool_calls>"};
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
        struct text_chat_parser *p = NULL;
        struct got g = {0};
        struct tow_err err;
        size_t n = strlen(units[u]), total = 0;
        text_chat_message_init(&g.m);
        assert_int_equal(text_chat_parser_open(&p, TEXT_START_CONTENT, true, NULL, &err), 0);
        for (; total < 400000; total += n)
            for (size_t i = 0; i < n; i++)
                assert_int_equal(text_chat_parser_feed(p, units[u] + i, 1, on_event, &g), 0);
        assert_int_equal(text_chat_parser_end(p, true, on_event, &g), 0);
        assert_int_equal(g.m.content.len, total);
        text_chat_parser_free(p);
        text_chat_message_fini(&g.m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat_strict__every_golden_case_is_equal),
        cmocka_unit_test(test_chat_strict__official_conversations_parse),
        cmocka_unit_test(test_chat_parser__markers_never_show),
        cmocka_unit_test(test_chat_parser__parameters_keep_their_types),
        cmocka_unit_test(test_chat_parser__malformed_calls_become_text),
        cmocka_unit_test(test_chat_parser__a_cut_call_is_dropped),
        cmocka_unit_test(test_chat_parser__end_of_thinking),
        cmocka_unit_test(test_chat_parser__starts_inside_a_forced_call),
        cmocka_unit_test(test_chat_parser__long_runs_stay_linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
