/* ctl/chat.c - see chat.h. The answer goes to stdout as it comes; reasoning, figures and errors go
 * to stderr, so that what is piped on is the answer alone.
 * A turn that failed is taken out of the conversation again. */
#include "deploy/ctl/chat.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/text/json.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/flags.h"
#include "deploy/ctl/sse.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char path[] = "/v1/chat/completions";
enum { MAX_INPUT = 64 << 20 };

struct chat {
    struct ctl_client client;
    const char *system;
    bool thinking, stats, to_terminal;
    int64_t max_tokens;      /* 0 = the server's choice */
    double temperature;      /* < 0 = the server's choice */
    struct tow_buf messages; /* JSON objects, comma-separated */
};

/* One answer on its way. */
struct turn {
    const struct chat *chat;
    struct ctl_sse sse;
    struct tow_buf answer, piece;
    uint64_t sent_us, first_us, last_us; /* first: 0 = nothing came yet */
    int64_t prompt_tokens, tokens;       /* as the server counts; -1 = it did not say */
    int64_t n_events;                    /* with text */
    char finish[32];
    bool reasoning, done; /* reasoning: that line is open on stderr */
};

static void put_message(struct tow_buf *b, const char *role, const char *text, size_t n)
{
    if (b->len) tow_buf_puts(b, ", ");
    tow_buf_printf(b, "{\"role\": \"%s\", \"content\": ", role);
    json_put_string(b, text, n);
    tow_buf_putc(b, '}');
}

static void put_body(const struct chat *c, struct tow_buf *b)
{
    tow_buf_puts(b, "{\"messages\": [");
    tow_buf_put(b, c->messages.data, c->messages.len);
    tow_buf_puts(b, "], \"stream\": true, \"stream_options\": {\"include_usage\": true}");
    tow_buf_printf(b, ", \"chat_template_kwargs\": {\"thinking\": %s}",
                   c->thinking ? "true" : "false");
    if (c->max_tokens) tow_buf_printf(b, ", \"max_tokens\": %lld", (long long)c->max_tokens);
    if (c->temperature >= 0) {
        tow_buf_puts(b, ", \"temperature\": ");
        json_put_double(b, c->temperature);
    }
    tow_buf_putc(b, '}');
}

static void show(struct turn *t, FILE *to, bool terminal, const char *text, size_t n)
{
    tow_buf_clear(&t->piece);
    if (terminal)
        ctl_put_clean(&t->piece, text, n);
    else
        tow_buf_put(&t->piece, text, n);
    if (t->piece.len) fwrite(t->piece.data, 1, t->piece.len, to);
    fflush(to);
}

static void close_reasoning(struct turn *t)
{
    if (t->reasoning) fputs("\n[answer]\n", stderr);
    t->reasoning = false;
}

static void take_delta(struct turn *t, const struct json *delta)
{
    size_t n = 0, m = 0;
    const char *reasoning = json_string(json_find(delta, "reasoning_content"), &n);
    const char *content = json_string(json_find(delta, "content"), &m);
    if (!n && !m) return;
    t->last_us = tow_now_us();
    if (!t->first_us) t->first_us = t->last_us;
    t->n_events++;
    if (n) {
        if (!t->reasoning) fputs("[thinking]\n", stderr);
        t->reasoning = true;
        show(t, stderr, isatty(STDERR_FILENO), reasoning, n);
    }
    if (m) {
        close_reasoning(t);
        tow_buf_put(&t->answer, content, m);
        show(t, stdout, t->chat->to_terminal, content, m);
    }
}

static int on_event(void *ctx, const char *data, size_t n, struct tow_err *err)
{
    struct turn *t = ctx;
    struct json *root = NULL;
    if (!strcmp(data, "[DONE]")) {
        t->done = true;
        return 0;
    }
    int rc = json_parse(&root, data, n, NULL, err);
    if (rc < 0) {
        tow_note(err, "%s: an event of the stream", t->chat->client.url);
        return rc;
    }
    const struct json *problem = json_find(root, "error");
    if (json_type(problem) != JSON_NULL) {
        const char *text = json_string(json_find(problem, "message"), NULL);
        rc = tow_fail(err, TOW_EPEER, "%s: %s", t->chat->client.url,
                      text ? text : "an error without a message");
    } else {
        const struct json *choice = json_item(json_find(root, "choices"), 0);
        const struct json *usage = json_find(root, "usage");
        const char *finish = json_string(json_find(choice, "finish_reason"), NULL);
        take_delta(t, json_find(choice, "delta"));
        if (finish) snprintf(t->finish, sizeof t->finish, "%s", finish);
        json_int(json_find(usage, "prompt_tokens"), &t->prompt_tokens);
        json_int(json_find(usage, "completion_tokens"), &t->tokens);
    }
    json_free(root);
    return rc;
}

static int on_body(void *ctx, const char *bytes, size_t n, struct tow_err *err)
{
    struct turn *t = ctx;
    return ctl_sse_feed(&t->sse, bytes, n, err);
}

static void print_stats(const struct turn *t)
{
    if (t->prompt_tokens >= 0) fprintf(stderr, "prompt %lld tokens, ", (long long)t->prompt_tokens);
    int64_t tokens = t->tokens >= 0 ? t->tokens : t->n_events;
    fprintf(stderr, "answer %lld tokens", (long long)tokens);
    if (t->finish[0]) fprintf(stderr, " (%s)", t->finish);
    if (t->first_us) {
        double first_s = (double)(t->first_us - t->sent_us) / 1e6;
        double rest_s = (double)(t->last_us - t->first_us) / 1e6;
        fprintf(stderr, "; time to first token %.3f s", first_s);
        if (tokens > 1 && rest_s > 0)
            fprintf(stderr, ", then %.1f tokens/s", (double)(tokens - 1) / rest_s);
    }
    fputc('\n', stderr);
}

/* The conversation so far, sent; its answer shown and added to it. */
static int ask(struct chat *c, struct tow_err *err)
{
    struct turn t = {.chat = c, .prompt_tokens = -1, .tokens = -1};
    struct tow_buf body;
    struct ctl_reply reply;
    tow_buf_init(&body, 0);
    tow_buf_init(&t.answer, 0);
    tow_buf_init(&t.piece, 0);
    ctl_sse_init(&t.sse, on_event, &t);
    put_body(c, &body);
    t.sent_us = tow_now_us();
    int rc = tow_buf_failed(&body) ? tow_fail(err, TOW_ENOMEM, "no memory for the request") : 0;
    if (rc == 0) {
        rc = ctl_http_call(&c->client.server, "POST", path, &body, on_body, &t, &reply, err);
        if (rc == 0 && reply.status / 100 != 2)
            rc = ctl_client_refused(&c->client, "POST", path, &reply, err);
        else if (rc == 0 && !reply.event_stream)
            rc = tow_fail(err, TOW_EWIRE, "%s: POST %s: the answer is no event stream",
                          c->client.url, path);
        else if (rc == 0 && !t.done)
            rc = tow_fail(err, TOW_EWIRE, "%s: the stream ended before [DONE]", c->client.url);
        ctl_reply_fini(&reply);
    }
    if (t.reasoning) fputc('\n', stderr);
    if (t.answer.len && t.answer.data[t.answer.len - 1] != '\n') putchar('\n');
    fflush(stdout);
    if (rc == 0 && c->stats) print_stats(&t);
    if (rc == 0)
        put_message(&c->messages, "assistant", t.answer.data ? t.answer.data : "", t.answer.len);
    ctl_sse_fini(&t.sse);
    tow_buf_fini(&t.answer);
    tow_buf_fini(&t.piece);
    tow_buf_fini(&body);
    return rc;
}

static int ask_text(struct chat *c, const char *text, size_t n, struct tow_err *err)
{
    size_t before = c->messages.len;
    for (size_t i = 0; i < n;) {
        size_t k = (size_t)json_utf8_len(text + i, n - i);
        if (k == 0 || text[i] == 0)
            return tow_fail(err, TOW_EINVAL, "the prompt is not UTF-8 text at byte %zu", i);
        i += k;
    }
    put_message(&c->messages, "user", text, n);
    int rc = ask(c, err);
    if (rc < 0 && c->messages.data) {
        c->messages.len = before;
        c->messages.data[before] = 0;
    }
    return rc;
}

static int ask_stdin(struct chat *c, struct tow_err *err)
{
    struct tow_buf text;
    tow_buf_init(&text, MAX_INPUT);
    for (size_t n = 1; n > 0;) {
        char *room = tow_buf_room(&text, 65536);
        n = room ? fread(room, 1, 65536, stdin) : 0;
        text.len += n;
    }
    int rc = 0;
    if (tow_buf_failed(&text))
        rc = tow_fail(err, TOW_ETOOBIG, "stdin: more than %d bytes", (int)MAX_INPUT);
    else if (ferror(stdin))
        rc = tow_fail(err, TOW_EIO, "stdin: cannot be read");
    while (text.len && text.data[text.len - 1] == '\n') text.len--;
    if (rc == 0 && text.len == 0) rc = tow_fail(err, TOW_EINVAL, "the prompt is empty");
    if (rc == 0) rc = ask_text(c, text.data, text.len, err);
    tow_buf_fini(&text);
    return rc;
}

/* Line by line until the end of input or /quit; a failed turn is told and forgotten. */
static int converse(struct chat *c)
{
    char *line = NULL;
    size_t cap = 0;
    fputs("One line a turn; /quit or end of input ends.\n", stderr);
    for (;;) {
        fputs("> ", stderr);
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0) break;
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) n--;
        if (n == 5 && !memcmp(line, "/quit", 5)) break;
        if (n == 0) continue;
        struct tow_err err = {0};
        if (ask_text(c, line, (size_t)n, &err) < 0) ctl_complain("chat", &err);
    }
    free(line);
    return 0;
}

static int run(struct chat *c, const char *prompt, struct tow_err *err)
{
    tow_buf_init(&c->messages, 0);
    c->to_terminal = isatty(STDOUT_FILENO);
    if (c->system) put_message(&c->messages, "system", c->system, strlen(c->system));
    int rc;
    if (prompt && strcmp(prompt, "-") != 0)
        rc = *prompt ? ask_text(c, prompt, strlen(prompt), err)
                     : tow_fail(err, TOW_EINVAL, "the prompt is empty");
    else if (prompt || !isatty(STDIN_FILENO))
        rc = ask_stdin(c, err);
    else
        rc = converse(c);
    tow_buf_fini(&c->messages);
    return rc;
}

int ctl_chat_main(int argc, char **argv)
{
    struct chat c = {.temperature = -1};
    const struct tow_opt table[] = {
        CTL_CLIENT_OPTS(&c.client, "600"),
        {.name = "system",
         .type = TOW_OPT_STRING,
         .out = &c.system,
         .otherwise = "none",
         .help = "system message"},
        {.name = "thinking",
         .type = TOW_OPT_BOOL,
         .out = &c.thinking,
         .def = "false",
         .help = "let the model think first; its thoughts go to stderr"},
        {.name = "max-tokens",
         .type = TOW_OPT_INT,
         .out = &c.max_tokens,
         .min = 1,
         .max = 1 << 24,
         .otherwise = "what the context leaves",
         .unit = "tokens",
         .help = "longest answer"},
        {.name = "temperature",
         .type = TOW_OPT_FLOAT,
         .out = &c.temperature,
         .fmin = 0,
         .fmax = 2,
         .otherwise = "the server's",
         .help = "0 always takes the likeliest token"},
        {.name = "stats",
         .type = TOW_OPT_BOOL,
         .out = &c.stats,
         .def = "false",
         .help = "counts, time to first token and tokens/s on stderr"},
    };
    const struct tow_opts_spec spec = {
        .program = "towpath-ctl chat",
        .about = "asks PROMPT (- or a pipe: stdin), or without one talks line by line",
        .operands = "PROMPT",
        .max_operands = 1,
        .table = table,
        .n = sizeof table / sizeof *table};
    struct tow_opts *opts;
    struct tow_err err = {0};
    int rc = ctl_flags_read(&opts, &spec, argc, argv, &err);
    const bool go = rc == CTL_FLAGS_RUN;
    if (rc > 0) {
        rc = ctl_client_open(&c.client, &err);
        if (rc == 0 && go)
            rc = run(&c, tow_opts_n_operands(opts) ? tow_opts_operand(opts, 0) : NULL, &err);
        ctl_client_close(&c.client);
    }
    tow_opts_free(opts);
    if (rc < 0) ctl_complain("chat", &err);
    return rc < 0 ? CTL_EXIT_FAILED : CTL_EXIT_GOOD;
}
