/* ctl/verify.c - see verify.h. Conversations are written so that any model that chats can pass
 * them, and the words are those that the demo model knows. The assistant's part of `secret` is
 * ours, so that the value stands once in the prompt; that of `tools` is the model's own. */
#include "deploy/ctl/verify.h"

#include "common/base/err.h"
#include "common/text/json.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/flags.h"
#include "deploy/ctl/haystack.h"

#include <stdio.h>
#include <string.h>

enum { ANSWER_TOKENS = 128 };

static const char *const names[CTL_CHECKS] = {"tools", "secret", "structured"};

struct verify {
    struct ctl_client client;
    const char *model, *shadow_list;
    bool capture, json;
    unsigned shadow;
    int64_t length, seed;
    double ready_wait_s;
    struct ctl_hay hay;
};

/* ------------------------------------------------------------------ asking */

/* One turn into c->answer. A capture that the server refuses is left out, with a note. */
static int ask(struct verify *v, struct ctl_check *c, const struct tow_buf *messages,
               const char *tools, const char *expect, struct tow_err *err)
{
    if (tow_buf_failed(messages)) return tow_fail(err, TOW_ENOMEM, "no memory for the messages");
    struct ctl_ask q = {.model = v->model,
                        .messages = messages->data,
                        .tools = tools,
                        .max_tokens = ANSWER_TOKENS,
                        .expect = v->capture ? expect : NULL,
                        .shadow = v->shadow};
    ctl_answer_fini(&c->answer);
    ctl_answer_init(&c->answer);
    c->turns++;
    int rc = ctl_ask(&v->client, &q, &c->answer, err);
    if (q.expect && (rc == TOW_EAUTH || rc == TOW_EINVAL)) {
        struct tow_err again = {0};
        q.expect = NULL;
        rc = ctl_ask(&v->client, &q, &c->answer, &again);
        if (rc == 0)
            snprintf(c->note, sizeof c->note, "no capture: %s", err->msg);
        else
            *err = again;
    }
    return rc;
}

static bool has(const struct ctl_answer *a, const char *text)
{
    return a->content.data && strstr(a->content.data, text);
}

/* The answer ends by itself and holds the text, which the caller keeps. */
static bool judge(struct ctl_check *c, const char *expect)
{
    c->expect = expect;
    if (!has(&c->answer, expect))
        snprintf(c->why, sizeof c->why, "the answer lacks \"%s\"", expect);
    else if (strcmp(c->answer.finish, "stop") != 0)
        snprintf(c->why, sizeof c->why, "finish reason %s, not stop", c->answer.finish);
    return !c->why[0];
}

static void set_state(struct ctl_check *c, bool good)
{
    c->state = good ? CTL_PASSED : CTL_FAILED;
}

static void add(struct tow_buf *b, const char *role, const char *text)
{
    if (b->len == 0) tow_buf_putc(b, '[');
    if (b->len > 1) tow_buf_puts(b, ", ");
    tow_buf_printf(b, "{\"role\": \"%s\", \"content\": ", role);
    json_put_string(b, text, strlen(text));
    tow_buf_puts(b, "}");
}

/* What add() began, closed for one request and opened again. */
static void close_list(struct tow_buf *b)
{
    tow_buf_putc(b, ']');
}

static void open_list(struct tow_buf *b)
{
    if (b->len) b->data[--b->len] = 0;
}

/* ------------------------------------------------------------------ tools */

static const char tools_json[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", "
    "\"description\": \"Get the current weather of a city\", \"parameters\": {\"type\": "
    "\"object\", \"properties\": {\"location\": {\"type\": \"string\", \"description\": "
    "\"City name\"}}, \"required\": [\"location\"]}}}, "
    "{\"type\": \"function\", \"function\": {\"name\": \"get_time\", "
    "\"description\": \"Get the local time of a city\", \"parameters\": {\"type\": \"object\", "
    "\"properties\": {\"city\": {\"type\": \"string\", \"description\": \"City name\"}}, "
    "\"required\": [\"city\"]}}}]";

static const struct tool_turn {
    const char *question, *tool, *argument, *result, *expect;
} tool_turns[] = {
    {"What is the weather in Lisbon?", "get_weather", "Lisbon",
     "{\"temperature\": 27, \"condition\": \"windy\"}", "27"},
    {"What time is it in Oslo?", "get_time", "Oslo", "{\"time\": \"14:35\"}", "14:35"},
};

/* Is this a call of the tool that was meant, with the argument that was meant? */
static bool is_call(const struct json *call, const struct tool_turn *t)
{
    const struct json *f = json_find(call, "function");
    const char *name = json_string(json_find(f, "name"), NULL);
    const char *arguments = json_string(json_find(f, "arguments"), NULL);
    return name && arguments && !strcmp(name, t->tool) && strstr(arguments, t->argument);
}

/* The model's turn with its calls, and the tool's result for each, behind the messages. */
static bool add_results(struct ctl_check *c, const struct tool_turn *t, struct tow_buf *messages)
{
    struct json *calls = NULL;
    bool meant = false;
    if (c->answer.calls.len)
        json_parse(&calls, c->answer.calls.data, c->answer.calls.len, NULL, NULL);
    JSON_EACH(call, calls) meant = meant || is_call(call, t);
    if (!meant)
        snprintf(c->why, sizeof c->why, "no call of %s with \"%s\" (calls: %.80s)", t->tool,
                 t->argument, c->answer.calls.len ? c->answer.calls.data : "none");
    if (meant) {
        tow_buf_puts(messages, ", {\"role\": \"assistant\", \"content\": ");
        json_put_string(messages, c->answer.content.data ? c->answer.content.data : "",
                        c->answer.content.len);
        tow_buf_printf(messages, ", \"tool_calls\": %s}", c->answer.calls.data);
    }
    JSON_EACH(call, meant ? calls : NULL)
    {
        const char *id = json_string(json_find(call, "id"), NULL);
        tow_buf_puts(messages, ", {\"role\": \"tool\", \"tool_call_id\": ");
        json_put_string(messages, id ? id : "", id ? strlen(id) : 0);
        tow_buf_puts(messages, ", \"content\": ");
        const char *result = is_call(call, t) ? t->result : "{\"error\": \"not asked for\"}";
        json_put_string(messages, result, strlen(result));
        tow_buf_puts(messages, "}");
    }
    json_free(calls);
    return meant;
}

static int check_tools(struct verify *v, struct ctl_check *c, struct tow_err *err)
{
    const size_t n = sizeof tool_turns / sizeof *tool_turns;
    struct tow_buf m;
    tow_buf_init(&m, 0);
    add(&m, "system", "You are a helpful assistant.");
    bool good = true;
    int rc = 0;
    for (size_t i = 0; rc == 0 && good && i < n; i++) {
        const struct tool_turn *t = &tool_turns[i];
        c->expect = t->expect;
        add(&m, "user", t->question);
        close_list(&m);
        rc = ask(v, c, &m, tools_json, NULL, err);
        open_list(&m);
        if (rc < 0 || !(good = add_results(c, t, &m))) break;
        close_list(&m);
        /* The result of the first tool is not unique in the prompt; the last one's is. */
        rc = ask(v, c, &m, tools_json, i + 1 == n ? t->expect : NULL, err);
        open_list(&m);
        if (rc < 0) break;
        good = judge(c, t->expect);
        add(&m, "assistant", c->answer.content.data ? c->answer.content.data : "");
    }
    if (rc == 0) set_state(c, good);
    tow_buf_fini(&m);
    return rc;
}

/* ------------------------------------------------------------------ secret, structured */

static int check_secret(struct verify *v, struct ctl_check *c, struct tow_err *err)
{
    static const char value[] = "tk-4h7q2xw9";
    static const char *const turns[][2] = {
        {"Please remember: my access token is tk-4h7q2xw9.", "Understood."},
        {"Sort these words: river, amber, maple", "amber, maple, river"},
        {"What is a token?", "A token is a small piece of text, often a word or a part of one. "
                             "Models read and write tokens."},
        {"Thank you!", "You are welcome."},
    };
    struct tow_buf m;
    tow_buf_init(&m, 0);
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        add(&m, "user", turns[i][0]);
        add(&m, "assistant", turns[i][1]);
    }
    add(&m, "user", "What is my access token?");
    close_list(&m);
    int rc = ask(v, c, &m, NULL, value, err);
    if (rc == 0) set_state(c, judge(c, value));
    tow_buf_fini(&m);
    return rc;
}

static int count(void *ctx, const char *text, size_t n, int64_t *tokens, struct tow_err *err)
{
    struct verify *v = ctx;
    struct tow_buf m;
    tow_buf_init(&m, 0);
    ctl_put_user(&m, text, n);
    int rc = tow_buf_failed(&m) ? tow_fail(err, TOW_ENOMEM, "no memory for the text")
                                : ctl_ask_count(&v->client, v->model, m.data, tokens, NULL, err);
    tow_buf_fini(&m);
    return rc;
}

static int check_structured(struct verify *v, struct ctl_check *c, struct tow_err *err)
{
    enum { DEPTH = 40 }; /* percent: neither the beginning nor the window's end */
    struct tow_buf text, m;
    tow_buf_init(&text, 0);
    tow_buf_init(&m, 0);
    int rc = ctl_hay_fit(&v->hay, DEPTH, v->length, count, v, &text, err);
    if (rc == 0) {
        ctl_put_user(&m, text.data, text.len);
        rc = ask(v, c, &m, NULL, v->hay.value, err);
    }
    if (rc == 0) set_state(c, judge(c, v->hay.value));
    tow_buf_fini(&text);
    tow_buf_fini(&m);
    return rc;
}

/* ------------------------------------------------------------------ the report */

static void put_ranks_line(struct tow_buf *out, const struct ctl_ranks *r)
{
    const char *name = text_verdict_name(r->verdict.kind);
    const bool named = name && !strncmp(r->text, name, strlen(name)); /* the line begins with it */
    tow_buf_printf(out, "      verdict%s%s: %s\n", named ? "" : " ",
                   named  ? ""
                   : name ? name
                          : "none",
                   r->text);
    bool any = false;
    for (int p = 0; p < TEXT_PRECISIONS; p++)
        if (r->shadow[p]) {
            tow_buf_printf(out, "%s %s %u", any ? "," : "      best rank by other keys:",
                           text_precision_name((enum text_precision)p), r->shadow[p]);
            any = true;
        }
    if (any) tow_buf_putc(out, '\n');
}

static void put_line(struct tow_buf *out, const char *text)
{
    tow_buf_puts(out, "      ");
    ctl_put_clean(out, text, strlen(text));
    tow_buf_putc(out, '\n');
}

void ctl_verify_print(const struct ctl_check *checks, size_t n, struct tow_buf *out)
{
    size_t count_of[CTL_PASSED + 1] = {0}, no_capture = 0;
    for (size_t i = 0; i < n; i++) {
        const struct ctl_check *c = &checks[i];
        const struct ctl_answer *a = &c->answer;
        count_of[c->state]++;
        if (c->state <= CTL_NOT_MADE) {
            tow_buf_printf(out, "----  %-10s not %s", names[c->id],
                           c->state == CTL_NOT_MADE ? "made: " : "run");
            ctl_put_clean(out, c->why, strlen(c->why));
            tow_buf_putc(out, '\n');
            continue;
        }
        const bool pass = c->state == CTL_PASSED;
        no_capture += c->note[0] != 0;
        tow_buf_printf(out, "%s  %-10s %6lld prompt tokens, ", pass ? "PASS" : "FAIL", names[c->id],
                       (long long)a->prompt_tokens);
        ctl_put_clean(out, a->finish, strlen(a->finish));
        tow_buf_printf(out, ", %d request%s: ", c->turns, c->turns == 1 ? "" : "s");
        size_t from = out->len;
        ctl_put_clean(out, a->content.data ? a->content.data : "", a->content.len);
        /* one line an answer */
        for (size_t k = from; k < out->len; k++)
            if (out->data[k] == '\n') out->data[k] = ' ';
        tow_buf_putc(out, '\n');
        if (!pass) put_line(out, c->why);
        if (c->note[0]) put_line(out, c->note);
        if (a->ranks.captured) put_ranks_line(out, &a->ranks);
    }
    tow_buf_printf(out, "%zu of %zu checks passed", count_of[CTL_PASSED], n);
    if (count_of[CTL_NOT_MADE])
        tow_buf_printf(out, ", %zu could not be made, %zu not run", count_of[CTL_NOT_MADE],
                       count_of[CTL_NOT_RUN]);
    if (no_capture) tow_buf_printf(out, "; of %zu no capture could be made", no_capture);
    tow_buf_putc(out, '\n');
}

void ctl_put_ranks(struct tow_buf *out, const struct ctl_ranks *r)
{
    if (!r->captured) return;
    const struct text_verdict *v = &r->verdict;
    const char *name = text_verdict_name(v->kind);
    tow_buf_puts(out, ", \"verdict\": ");
    json_put_string(out, name ? name : "none", strlen(name ? name : "none"));
    tow_buf_puts(out, ", \"verdict_text\": ");
    json_put_string(out, r->text, strlen(r->text));
    if (v->kind != TEXT_VERDICT_NONE)
        tow_buf_printf(out, ", \"rank\": %u, \"layer\": %u, \"step\": %u, \"rank_topk\": %u",
                       v->rank, v->layer, v->step, v->topk);
    tow_buf_puts(out, ", \"shadow\": {");
    const char *sep = "";
    for (int p = 0; p < TEXT_PRECISIONS; p++)
        if (r->shadow[p]) {
            tow_buf_printf(out, "%s\"%s\": %u", sep, text_precision_name((enum text_precision)p),
                           r->shadow[p]);
            sep = ", ";
        }
    tow_buf_puts(out, "}, \"layers\": [");
    for (uint32_t i = 0; i < r->n_layers; i++)
        tow_buf_printf(out, "%s[%u, %u]", i ? ", " : "", r->layers[i].layer, r->layers[i].rank);
    tow_buf_puts(out, "]");
}

void ctl_verify_json(const struct ctl_check *checks, size_t n, struct tow_buf *out)
{
    static const char *const states[] = {[CTL_NOT_RUN] = "not_run",
                                         [CTL_NOT_MADE] = "not_made",
                                         [CTL_FAILED] = "failed",
                                         [CTL_PASSED] = "passed"};
    bool all = true;
    for (size_t i = 0; i < n; i++) all = all && checks[i].state == CTL_PASSED;
    tow_buf_printf(out, "{\"pass\": %s, \"checks\": [", all ? "true" : "false");
    for (size_t i = 0; i < n; i++) {
        const struct ctl_check *c = &checks[i];
        const struct ctl_answer *a = &c->answer;
        tow_buf_printf(out,
                       "%s{\"check\": \"%s\", \"pass\": %s, \"state\": \"%s\", \"requests\": %d",
                       i ? ", " : "", names[c->id],
                       c->state == CTL_PASSED   ? "true"
                       : c->state == CTL_FAILED ? "false"
                                                : "null",
                       states[c->state], c->turns);
        if (c->state <= CTL_NOT_MADE) { /* what came of its earlier turns is no answer */
            if (c->why[0]) {
                tow_buf_puts(out, ", \"why\": ");
                json_put_string(out, c->why, strlen(c->why));
            }
            tow_buf_puts(out, "}");
            continue;
        }
        tow_buf_printf(
            out, ", \"prompt_tokens\": %lld, \"finish_reason\": ", (long long)a->prompt_tokens);
        json_put_string(out, a->finish, strlen(a->finish));
        tow_buf_puts(out, ", \"expected\": ");
        json_put_string(out, c->expect ? c->expect : "", c->expect ? strlen(c->expect) : 0);
        tow_buf_puts(out, ", \"answer\": ");
        json_put_string(out, a->content.data ? a->content.data : "", a->content.len);
        if (c->why[0]) {
            tow_buf_puts(out, ", \"why\": ");
            json_put_string(out, c->why, strlen(c->why));
        }
        if (c->note[0]) {
            tow_buf_puts(out, ", \"note\": ");
            json_put_string(out, c->note, strlen(c->note));
        }
        ctl_put_ranks(out, &a->ranks);
        tow_buf_puts(out, "}");
    }
    tow_buf_puts(out, "]}\n");
}

/* ------------------------------------------------------------------ the subcommand */

int ctl_shadow_parse(const char *list, unsigned *out, struct tow_err *err)
{
    *out = 0;
    for (const char *p = list ? list : ""; *p;) {
        char name[8];
        size_t n = strcspn(p, ",");
        snprintf(name, sizeof name, "%.*s", (int)(n < sizeof name ? n : sizeof name), p);
        int found = text_precision_find(name);
        if (found < 0)
            return tow_fail(err, TOW_ECONFIG, "--shadow: '%.*s' is none of bf16, fp8, fp4", (int)n,
                            p);
        *out |= 1u << found;
        p += n;
        if (*p == ',') p++;
    }
    return 0;
}

static int run(struct verify *v, struct ctl_check *checks, struct tow_err *err)
{
    static int (*const make[CTL_CHECKS])(struct verify *, struct ctl_check *, struct tow_err *) = {
        check_tools, check_secret, check_structured};
    for (int i = 0; i < CTL_CHECKS; i++) {
        int rc = make[i](v, &checks[i], err);
        if (rc < 0) {
            checks[i].state = CTL_NOT_MADE;
            snprintf(checks[i].why, sizeof checks[i].why, "%s", err->msg);
            return tow_note(err, "check %s", names[i]);
        }
    }
    return 0;
}

static int report(const struct verify *v, const struct ctl_check *checks, struct tow_err *err)
{
    struct tow_buf out;
    tow_buf_init(&out, 0);
    (v->json ? ctl_verify_json : ctl_verify_print)(checks, CTL_CHECKS, &out);
    int rc = tow_buf_failed(&out) ? tow_fail(err, TOW_ENOMEM, "no memory for the report") : 0;
    if (rc == 0 && (fwrite(out.data, 1, out.len, stdout) != out.len || fflush(stdout)))
        rc = tow_fail(err, TOW_EIO, "stdout cannot be written");
    tow_buf_fini(&out);
    return rc;
}

int ctl_verify_main(int argc, char **argv)
{
    struct verify v = {0};
    const struct tow_opt table[] = {
        CTL_CLIENT_OPTS(&v.client, "600"),
        {.name = "model",
         .type = TOW_OPT_STRING,
         .out = &v.model,
         .otherwise = "the one served",
         .help = "name to send"},
        {.name = "length",
         .type = TOW_OPT_INT,
         .out = &v.length,
         .def = "8192",
         .min = 64,
         .max = 1 << 20,
         .unit = "tokens",
         .help = "prompt of the check with files, tables and logs"},
        {.name = "seed",
         .type = TOW_OPT_INT,
         .out = &v.seed,
         .def = "1",
         .min = 0,
         .max = INT64_MAX,
         .help = "of that prompt's text"},
        {.name = "capture",
         .type = TOW_OPT_BOOL,
         .out = &v.capture,
         .def = "false",
         .help = "also say where the index ranked the value (router: --index-capture)"},
        {.name = "shadow",
         .type = TOW_OPT_STRING,
         .out = &v.shadow_list,
         .otherwise = "none",
         .help = "with --capture, also rank by keys of these types: list of bf16,fp8,fp4"},
        {.name = "ready-wait",
         .type = TOW_OPT_FLOAT,
         .out = &v.ready_wait_s,
         .def = "60",
         .fmin = 0,
         .fmax = 86400,
         .unit = "s",
         .help = "wait for a router that is not ready, as when a role has no worker"},
        {.name = "json",
         .type = TOW_OPT_BOOL,
         .out = &v.json,
         .def = "false",
         .help = "one JSON object instead of lines"},
    };
    const struct tow_opts_spec spec = {
        .program = "towpath-ctl verify",
        .about =
            "makes the three standing checks of a deployment; exit 0 passed, 1 failed, 2 not made",
        .table = table,
        .n = sizeof table / sizeof *table};
    struct ctl_check checks[CTL_CHECKS];
    memset(checks, 0, sizeof checks);
    for (int i = 0; i < CTL_CHECKS; i++) {
        checks[i].id = (enum ctl_check_id)i;
        ctl_answer_init(&checks[i].answer);
    }
    struct tow_opts *opts;
    struct tow_err err = {0};
    int rc = ctl_flags_read(&opts, &spec, argc, argv, &err);
    const bool go = rc == CTL_FLAGS_RUN;
    bool passed = true;
    if (rc > 0) {
        rc = ctl_shadow_parse(v.shadow_list, &v.shadow, &err);
        if (rc == 0 && v.shadow && !v.capture)
            rc = tow_fail(&err, TOW_ECONFIG,
                          "--shadow %s: ranks are those of a capture; give "
                          "--capture too",
                          v.shadow_list);
        if (rc == 0) rc = ctl_client_open(&v.client, &err);
        if (rc == 0 && go) {
            ctl_hay_init(&v.hay, CTL_FILL_MIXED, (uint64_t)v.seed, (struct ctl_hard){0});
            struct tow_err unsaid = {0};
            rc = ctl_client_wait_ready(&v.client, "verify", v.ready_wait_s, &err);
            if (rc == 0) rc = run(&v, checks, &err);
            int said = report(&v, checks, rc < 0 ? &unsaid : &err);
            if (rc == 0) rc = said;
            for (int i = 0; i < CTL_CHECKS; i++) {
                passed = passed && checks[i].state == CTL_PASSED;
                if (said == 0 && checks[i].state == CTL_NOT_MADE) /* the report has the reason */
                    tow_fail(&err, rc, "check %s could not be made", names[i]);
            }
            ctl_hay_fini(&v.hay);
        }
        ctl_client_close(&v.client);
    }
    for (int i = 0; i < CTL_CHECKS; i++) ctl_answer_fini(&checks[i].answer);
    tow_opts_free(opts);
    if (rc < 0) ctl_complain("verify", &err);
    return rc < 0 ? CTL_EXIT_FAILED : passed ? CTL_EXIT_GOOD : CTL_EXIT_NO;
}
