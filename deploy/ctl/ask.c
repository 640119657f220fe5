/* ctl/ask.c - see ask.h. */
#include "deploy/ctl/ask.h"

#include "common/base/err.h"
#include "common/text/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char chat_path[] = "/v1/chat/completions", tokenize_path[] = "/tokenize";
enum {
    MAX_TRIES = 5,      /* of a request that a full server puts off */
    MAX_PAUSE_S = 30,   /* between two of them */
    MAX_ROWS = 1 << 20, /* of a capture: layers times steps */
};

void ctl_put_user(struct tow_buf *out, const char *text, size_t n)
{
    tow_buf_puts(out, "[{\"role\": \"user\", \"content\": ");
    json_put_string(out, text, n);
    tow_buf_puts(out, "}]");
}

void ctl_copy_text(char *to, size_t cap, const char *text)
{
    size_t n = strlen(text);
    if (n >= cap)
        for (n = cap - 1; n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80;) n--;
    memcpy(to, text, n);
    to[n] = 0;
}

void ctl_answer_init(struct ctl_answer *a)
{
    memset(a, 0, sizeof *a);
    tow_buf_init(&a->content, 0);
    tow_buf_init(&a->calls, 0);
    a->prompt_tokens = a->tokens = -1;
}

void ctl_answer_fini(struct ctl_answer *a)
{
    tow_buf_fini(&a->content);
    tow_buf_fini(&a->calls);
}

void ctl_ask_put(const struct ctl_ask *q, struct tow_buf *b)
{
    tow_buf_puts(b, "{");
    if (q->model) {
        tow_buf_puts(b, "\"model\": ");
        json_put_string(b, q->model, strlen(q->model));
        tow_buf_puts(b, ", ");
    }
    tow_buf_printf(b, "\"messages\": %s, ", q->messages);
    if (q->tools) tow_buf_printf(b, "\"tools\": %s, ", q->tools);
    tow_buf_printf(b,
                   "\"temperature\": 0, \"max_tokens\": %lld, "
                   "\"chat_template_kwargs\": {\"thinking\": false}",
                   (long long)q->max_tokens);
    if (q->topk) tow_buf_printf(b, ", \"index_topk\": %lld", (long long)q->topk);
    if (q->expect) {
        tow_buf_puts(b, ", \"index_capture\": {\"spans\": {\"text\": ");
        json_put_string(b, q->expect, strlen(q->expect));
        /* every answer token looks for itself: the one that begins the value comes late */
        tow_buf_printf(b, "}, \"steps\": \"all\", \"max_steps\": %lld, \"expect\": ",
                       (long long)(q->max_tokens < 64 ? q->max_tokens : 64));
        json_put_string(b, q->expect, strlen(q->expect));
        tow_buf_puts(b, ", \"shadow\": [");
        const char *sep = "";
        for (int p = 0; p < TEXT_PRECISIONS; p++)
            if (q->shadow >> p & 1) {
                tow_buf_printf(b, "%s\"%s\"", sep, text_precision_name((enum text_precision)p));
                sep = ", ";
            }
        tow_buf_puts(b, "]}");
    }
    tow_buf_puts(b, "}");
}

/* ------------------------------------------------------------------ ranks */

static void take_best(uint32_t *best, uint32_t rank)
{
    if (rank && (!*best || rank < *best)) *best = rank;
}

void ctl_ranks_judge(struct ctl_ranks *out, const struct text_verdict_row *rows, size_t n,
                     bool found)
{
    memset(out, 0, sizeof *out);
    out->captured = true;
    text_verdict_judge(&out->verdict, rows, n, true, found);
    text_verdict_print(&out->verdict, out->text, sizeof out->text);
    for (size_t i = 0; i < n; i++) {
        uint32_t at = 0;
        while (at < out->n_layers && out->layers[at].layer < rows[i].layer) at++;
        if (at == out->n_layers || out->layers[at].layer != rows[i].layer) {
            if (out->n_layers == CTL_RANK_LAYERS) continue;
            memmove(&out->layers[at + 1], &out->layers[at],
                    (out->n_layers - at) * sizeof *out->layers);
            memset(&out->layers[at], 0, sizeof *out->layers);
            out->layers[at].layer = rows[i].layer;
            out->n_layers++;
        }
        take_best(&out->layers[at].rank, rows[i].rank);
        for (int p = 0; p < TEXT_PRECISIONS; p++) {
            take_best(&out->layers[at].shadow[p], rows[i].shadow[p]);
            take_best(&out->shadow[p], rows[i].shadow[p]);
        }
    }
}

static uint32_t best_rank(const struct json *entries)
{
    uint32_t best = 0;
    JSON_EACH(e, entries)
    {
        int64_t rank;
        if (json_int(json_find(e, "rank"), &rank) && rank >= 1 && rank <= UINT32_MAX)
            take_best(&best, (uint32_t)rank);
    }
    return best;
}

static int parse_row(struct text_verdict_row *row, int64_t step, const struct json *layer,
                     struct tow_err *err)
{
    int64_t number, topk;
    if (!json_int(json_find(layer, "layer"), &number) || number < 0 || number > UINT32_MAX ||
        !json_int(json_find(layer, "topk"), &topk) || topk < 1 || topk > UINT32_MAX || step < 0 ||
        step > UINT32_MAX)
        return tow_fail(err, TOW_EWIRE,
                        "index_capture: a row lacks layer, topk or step, or they are out of range");
    *row = (struct text_verdict_row){.step = (uint32_t)step,
                                     .layer = (uint32_t)number,
                                     .topk = (uint32_t)topk,
                                     .rank = best_rank(json_find(layer, "entries"))};
    const struct json *shadow = json_find(layer, "shadow");
    for (int p = 0; p < TEXT_PRECISIONS; p++) {
        const struct json *of = json_find(shadow, text_precision_name((enum text_precision)p));
        row->shadow[p] = best_rank(json_find(of, "entries"));
    }
    return 0;
}

static int parse_capture(struct ctl_ranks *out, const struct json *capture, bool found,
                         struct tow_err *err)
{
    struct text_verdict_row *rows = NULL;
    uint32_t n = 0, cap = 0;
    int rc = 0;
    JSON_EACH(step, json_find(capture, "steps"))
    {
        int64_t number = -1;
        json_int(json_find(step, "step"), &number);
        JSON_EACH(layer, json_find(step, "layers"))
        {
            void *more = n < MAX_ROWS ? tow_grow(rows, n, &cap, 256, sizeof *rows) : NULL;
            if (!more) {
                rc = tow_fail(err, TOW_ENOMEM, "index_capture: no memory for %u rows", n + 1);
                goto done;
            }
            rows = more;
            rc = parse_row(&rows[n], number, layer, err);
            if (rc < 0) goto done;
            n++;
        }
    }
    ctl_ranks_judge(out, rows, n, found);
done:
    free(rows);
    return rc;
}

/* ------------------------------------------------------------------ the answer */

int ctl_answer_parse(struct ctl_answer *a, const struct json *root, const char *expect,
                     struct tow_err *err)
{
    const struct json *choice = json_item(json_find(root, "choices"), 0);
    const struct json *message = json_find(choice, "message"), *usage = json_find(root, "usage");
    const char *finish = json_string(json_find(choice, "finish_reason"), NULL);
    if (json_type(message) != JSON_OBJECT)
        return tow_fail(err, TOW_EWIRE, "the answer has no choices[0].message");
    size_t n = 0;
    const char *content = json_string(json_find(message, "content"), &n);
    if (content) tow_buf_put(&a->content, content, n);
    const struct json *calls = json_find(message, "tool_calls");
    if (json_type(calls) == JSON_ARRAY && json_first(calls)) json_dump(&a->calls, calls);
    ctl_copy_text(a->finish, sizeof a->finish, finish ? finish : "?");
    json_int(json_find(usage, "prompt_tokens"), &a->prompt_tokens);
    json_int(json_find(usage, "completion_tokens"), &a->tokens);
    if (tow_buf_failed(&a->content) || tow_buf_failed(&a->calls))
        return tow_fail(err, TOW_ENOMEM, "no memory for the answer");
    const struct json *capture = json_find(json_find(root, "towpath"), "index_capture");
    if (json_type(capture) != JSON_OBJECT) return 0;
    bool found = expect && a->content.data && strstr(a->content.data, expect);
    return parse_capture(&a->ranks, capture, found, err);
}

/* What a refusal says of a capture: TOW_EAUTH, TOW_EINVAL, or 0 for neither. */
static int capture_refused(const struct ctl_reply *reply)
{
    struct json *root = NULL;
    int rc = 0;
    if (reply->status != 400 || !reply->body.len ||
        json_parse(&root, reply->body.data, reply->body.len, NULL, NULL) < 0)
        return 0;
    const char *code = json_string(json_find(json_find(root, "error"), "code"), NULL);
    if (code && !strcmp(code, "index_capture_disabled")) rc = TOW_EAUTH;
    if (code && !strcmp(code, "invalid_index_capture")) rc = TOW_EINVAL;
    json_free(root);
    return rc;
}

static int post(const struct ctl_client *c, const char *path, const struct tow_buf *body,
                struct json **out, struct tow_err *err)
{
    if (tow_buf_failed(body)) return tow_fail(err, TOW_ENOMEM, "no memory for the request");
    for (int try = 1;; try++) {
        struct ctl_reply reply;
        int rc = ctl_http_call(&c->server, "POST", path, body, NULL, NULL, &reply, err);
        bool later = rc == 0 && (reply.status == 429 || reply.status == 503) && reply.retry_after &&
                     try < MAX_TRIES;
        struct timespec pause = {.tv_sec = reply.retry_after < MAX_PAUSE_S ? reply.retry_after
                                                                           : MAX_PAUSE_S};
        if (rc == 0 && !later && reply.status / 100 != 2) {
            int kind = capture_refused(&reply);
            rc = ctl_client_refused(c, "POST", path, &reply, err);
            if (kind) rc = err ? (err->code = kind) : kind;
        } else if (rc == 0 && !later) {
            rc = json_parse(out, reply.body.data ? reply.body.data : "", reply.body.len, NULL, err);
            if (rc < 0) tow_note(err, "%s: POST %s", c->url, path);
        }
        if (later)
            fprintf(stderr, "%s: POST %s: %d; asking again in %lld s (try %d of %d)\n", c->url,
                    path, reply.status, (long long)pause.tv_sec, try + 1, MAX_TRIES);
        ctl_reply_fini(&reply);
        if (!later) return rc;
        nanosleep(&pause, NULL);
    }
}

int ctl_ask(const struct ctl_client *c, const struct ctl_ask *q, struct ctl_answer *a,
            struct tow_err *err)
{
    struct tow_buf body;
    struct json *root = NULL;
    tow_buf_init(&body, 0);
    ctl_ask_put(q, &body);
    int rc = post(c, chat_path, &body, &root, err);
    if (rc == 0) {
        rc = ctl_answer_parse(a, root, q->expect, err);
        if (rc < 0) tow_note(err, "%s: POST %s", c->url, chat_path);
    }
    json_free(root);
    tow_buf_fini(&body);
    return rc;
}

int ctl_ask_count(const struct ctl_client *c, const char *model, const char *messages,
                  int64_t *tokens, int64_t *max_len, struct tow_err *err)
{
    struct tow_buf body;
    struct json *root = NULL;
    tow_buf_init(&body, 0);
    tow_buf_puts(&body, "{");
    if (model) {
        tow_buf_puts(&body, "\"model\": ");
        json_put_string(&body, model, strlen(model));
        tow_buf_puts(&body, ", ");
    }
    tow_buf_printf(&body, "\"messages\": %s, \"chat_template_kwargs\": {\"thinking\": false}}",
                   messages);
    int rc = post(c, tokenize_path, &body, &root, err);
    if (rc == 0 && !json_int(json_find(root, "count"), tokens))
        rc =
            tow_fail(err, TOW_EWIRE, "%s: POST %s: the answer has no count", c->url, tokenize_path);
    if (rc == 0 && max_len && !json_int(json_find(root, "max_model_len"), max_len)) *max_len = 0;
    json_free(root);
    tow_buf_fini(&body);
    return rc;
}
