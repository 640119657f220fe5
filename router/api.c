/* router/api.c - see api.h. Who may call what, and the life of one request.
 *
 *   on_request --small body--> [check] --submit--> RUNNING --all choices ended--> answered, freed
 *        +--large body--> CHECKING (pool) --+         |
 *                            |                        +-- on_fail: 5xx, or an error event --> freed
 *                            +-- client gone: freed   +-- client gone: cancel --> freed
 *                                when the pool is done
 *
 * With a capture an answer that a stop string ended waits, RUNNING, for the rows under way.
 *
 * A stream's status line waits for the first token, so that a failure before it is a real 5xx; with
 * sse_keepalive_s the first comment sends it earlier, and a failure after that is an error event.
 */
#include "router/api.h"

#include "common/base/buf.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/text/detok.h"
#include "common/text/json.h"
#include "common/text/tokenizer.h"
#include "router/api_request.h"
#include "router/api_response.h"
#include "router/http_parse.h"
#include "router/sse.h"

#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <uv.h>

#define INLINE_BODY   4096      /* a body up to this size is checked on the loop */
#define LARGE_BODY    (1 << 20) /* what one above this size took is given back at once */
#define TICK_MS       250
#define MAX_KEYS      1024
#define MAX_KEY_BYTES 512
#define DRAIN_RETRY_S 5

/* R(name, method, path, needs a key) */
#define ROUTES(R)                                                                                  \
    R(chat, "POST", "/v1/chat/completions", true)                                                  \
    R(completions, "POST", "/v1/completions", true)                                                \
    R(models, "GET", "/v1/models", true)                                                           \
    R(tokenize, "POST", "/tokenize", true)                                                         \
    R(detokenize, "POST", "/detokenize", true)                                                     \
    R(health, "GET", "/health", false)                                                             \
    R(ready, "GET", "/ready", false)                                                               \
    R(metrics, "GET", "/metrics", false)                                                           \
    R(workers, "GET", "/admin/workers", true)                                                      \
    R(refused, "GET", "/admin/refused", true)                                                      \
    R(model, "GET", "/v1/models/{id}", true)                                                       \
    R(drain, "POST", "/admin/workers/{name}/drain", true)                                          \
    R(other, "", "", false)

enum route {
#define R(name, method, path, key) ROUTE_##name,
    ROUTES(R)
#undef R
        N_ROUTES
};
static const struct {
    const char *name, *method, *path;
    bool needs_key;
} routes[N_ROUTES] = {
#define R(name, method, path, key) {#name, method, path, key},
    ROUTES(R)
#undef R
};

struct key {
    size_t len;
    char bytes[MAX_KEY_BYTES];
};

struct rtr_api {
    uv_loop_t *loop;
    uv_timer_t tick;
    struct rtr_http *http;
    const struct text_tokenizer *tok; /* borrowed */
    struct rtr_backend backend;
    void *self; /* borrowed */
    char *served_model_name, *model_name;
    uint32_t context_length, n_vocab, sse_keepalive_ms, max_pool_jobs;
    bool default_thinking, index_capture;
    const int32_t *ratios; /* borrowed */
    uint32_t n_layers;
    size_t max_body_bytes;
    struct key *keys;
    size_t n_keys;
    bool draining, closing;
    struct tow_list running; /* jobs the back end works on */
    uint32_t n_jobs, n_pool; /* all of them; those at the pool */
    bool http_open, tick_open;
    uv_work_t trim; /* under way while trimming */
    bool trimming;
    void (*on_closed)(void *arg);
    void *on_closed_arg;

    struct tow_metrics *metrics;                 /* borrowed */
    struct tow_counter *m_requests[N_ROUTES][6]; /* by status / 100 */
    struct tow_gauge *m_in_flight, *m_connections, *m_buffered;
    struct tow_counter *m_accepted, *m_full, *m_bytes_in, *m_bytes_out, *m_cut, *m_timed_out;
    struct tow_counter *m_started, *m_finished, *m_failed, *m_cancelled, *m_by_client;
    struct tow_counter *m_prompt_tokens, *m_completion_tokens;
    struct tow_histogram *m_ttft, *m_seconds;
};

struct job {
    struct rtr_api *api;
    struct rtr_exchange *x; /* NULL once the client has gone */
    struct tow_list link;   /* in api->running */
    enum route route;
    uv_work_t work;
    struct rtr_ask_rules rules;
    char *body; /* owned while it is checked */
    size_t body_len;
    int rc; /* of the check */
    struct rtr_api_error error;
    struct rtr_ask *ask;
    struct rtr_output **outputs; /* [n_choices], owned */
    bool *first_sent;            /* [n_choices] */
    struct rtr_accepted *accepted;
    uint32_t n_left;              /* choices that go on */
    struct rtr_capture_rows rows; /* of an ask with a capture */
    bool stopped;                 /* the answer has ended, only rows are awaited */
    bool stream_open, first_token;
    uint64_t start_ms, wrote_ms;
    struct tow_buf out;
};

/* ---- answering ---- */

static void count(struct rtr_api *a, enum route route, int status)
{
    int class = status / 100;
    tow_counter_add(a->m_requests[route][class >= 1 && class <= 5 ? class : 5], 1);
}

static void reply(struct rtr_api *a, enum route route, struct rtr_exchange *x, int status,
                  const char *headers, struct tow_buf *body)
{
    if (tow_buf_failed(body)) {
        static const char text[] =
            "{\"error\": {\"message\": \"out of memory\", \"type\": "
            "\"server_error\", \"param\": null, \"code\": \"out_of_memory\"}}";
        count(a, route, 503);
        rtr_exchange_reply(x, 503, "application/json", "Retry-After: 1\r\n", text, sizeof text - 1);
    } else {
        count(a, route, status);
        rtr_exchange_reply(x, status, "application/json", headers, body->data ? body->data : "",
                           body->len);
    }
    tow_buf_fini(body);
}

static void reply_error(struct rtr_api *a, enum route route, struct rtr_exchange *x,
                        const struct rtr_api_error *e, const char *headers)
{
    struct tow_buf b;
    tow_buf_init(&b, 0);
    rtr_put_error(&b, e);
    reply(a, route, x, e->status, headers, &b);
}

static void refusal_headers(const struct rtr_refusal *r, int status, char *out, size_t cap)
{
    uint32_t after = r->retry_after_s;
    if (!after && (status == 429 || status == 503)) after = 1;
    if (after > 600) after = 600;
    int n = after ? snprintf(out, cap, "Retry-After: %u\r\n", after) : 0;
    if (r->reason) {
        snprintf(out + n, cap - (size_t)n, "X-Towpath-Reason: %s\r\n", r->reason);
    } else if (!n) {
        out[0] = 0;
    }
}

static void reply_refusal(struct rtr_api *a, enum route route, struct rtr_exchange *x,
                          const struct rtr_refusal *r)
{
    struct rtr_api_error e;
    char headers[160];
    rtr_error_of(&e, r);
    refusal_headers(r, e.status, headers, sizeof headers);
    reply_error(a, route, x, &e, headers);
}

/* ---- jobs ---- */

static void free_keys(struct rtr_api *a)
{
    if (a->keys) explicit_bzero(a->keys, a->n_keys * sizeof *a->keys);
    free(a->keys);
}

static void maybe_closed(struct rtr_api *a)
{
    if (!a->closing || a->http_open || a->tick_open || a->n_jobs || a->trimming) return;
    void (*on_closed)(void *) = a->on_closed;
    void *arg = a->on_closed_arg;
    free(a->served_model_name);
    free(a->model_name);
    free_keys(a);
    free(a);
    if (on_closed) on_closed(arg);
}

static void trim_work(uv_work_t *work);
static void trim_done(uv_work_t *work, int status);

static void free_job(struct job *j)
{
    struct rtr_api *a = j->api;
    const bool large = j->body_len > LARGE_BODY;
    tow_list_remove(&j->link);
    if (j->x) rtr_exchange_set_user(j->x, NULL);
    if (j->outputs) {
        for (uint32_t i = 0; i < j->ask->req.n_choices; i++) rtr_output_free(j->outputs[i]);
    }
    free(j->outputs);
    free(j->first_sent);
    rtr_capture_rows_fini(&j->rows);
    free(j->body);
    tow_buf_fini(&j->out);
    rtr_ask_free(j->ask);
    free(j);
    a->n_jobs--;
    tow_gauge_set(a->m_in_flight, a->n_jobs);
    if (large && !a->trimming && !a->closing) {
        a->trim.data = a;
        a->trimming = uv_queue_work(a->loop, &a->trim, trim_work, trim_done) == 0;
    }
    maybe_closed(a);
}

/* The exchange goes its own way: should the client turn out to have gone, that is no news for j. */
static struct rtr_exchange *let_go(struct job *j)
{
    struct rtr_exchange *x = j->x;
    rtr_exchange_set_user(x, NULL);
    j->x = NULL;
    return x;
}

static void send_out(struct job *j)
{
    if (!j->out.len) return;
    rtr_exchange_write(j->x, j->out.data, j->out.len);
    tow_buf_clear(&j->out);
    j->wrote_ms = uv_now(j->api->loop);
}

static void open_stream(struct job *j)
{
    if (j->stream_open) return;
    j->stream_open = true;
    count(j->api, j->route, 200);
    rtr_exchange_begin_stream(j->x, RTR_SSE_TYPE,
                              "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n",
                              RTR_SSE_COMMENT);
}

/* The request is over without an answer; what the client hears depends on what it heard before. The
 * back end has already forgotten it. */
static void fail_job(struct job *j, const struct rtr_refusal *r)
{
    struct rtr_api *a = j->api;
    tow_counter_add(a->m_failed, 1);
    struct rtr_api_error e;
    rtr_error_of(&e, r);
    tow_info("req %s: failed: %s: %s", j->ask->req.id, e.code, e.message);
    if (j->stream_open) {
        tow_buf_clear(&j->out);
        rtr_put_error_event(&j->out, &e);
        if (tow_buf_failed(&j->out)) {
            rtr_exchange_abort(let_go(j));
        } else {
            rtr_exchange_end_stream(let_go(j), j->out.data, j->out.len);
        }
    } else {
        reply_refusal(a, j->route, let_go(j), r);
    }
    free_job(j);
}

static void fail_memory(struct job *j)
{
    struct rtr_refusal r = {
        .err = {.code = TOW_ENOMEM}, .retry_after_s = 1, .reason = "out_of_memory"};
    fail_job(j, &r);
}

/* What the client is about to be shown is what a capture's `expect` is looked for in. */
static void note_answer(struct job *j)
{
    struct rtr_delta d;
    rtr_output_peek(j->outputs[0], &d);
    rtr_capture_rows_answer(&j->rows, d.content, d.content_len);
    for (uint32_t i = 0; i < d.n_calls; i++) {
        rtr_capture_rows_answer(&j->rows, "\n", 1);
        rtr_capture_rows_answer(&j->rows, d.calls[i].arguments, strlen(d.calls[i].arguments));
    }
}

static void complete(struct job *j)
{
    struct rtr_api *a = j->api;
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < j->ask->req.n_choices; i++)
        tokens += rtr_output_n_tokens(j->outputs[i]);
    if (j->ask->stream) {
        rtr_put_last_chunks(&j->out, a->tok, j->ask, j->outputs, &j->rows);
    } else {
        if (j->ask->capture) note_answer(j);
        rtr_put_answer(&j->out, a->tok, j->ask, j->outputs, &j->rows);
    }
    if (tow_buf_failed(&j->out)) {
        fail_memory(j);
        return;
    }
    tow_counter_add(a->m_finished, 1);
    tow_counter_add(a->m_prompt_tokens, j->ask->n_prompt_tokens);
    tow_counter_add(a->m_completion_tokens, tokens);
    tow_histogram_observe(a->m_seconds, (double)(uv_now(a->loop) - j->start_ms) / 1000.0);
    if (j->ask->stream) {
        rtr_exchange_end_stream(let_go(j), j->out.data, j->out.len);
    } else {
        reply(a, j->route, let_go(j), 200, NULL, &j->out);
    }
    free_job(j);
}

/* Something happened to a choice: stream what it has ready. */
static void emit(struct job *j, uint32_t choice)
{
    if (!j->ask->stream) return;
    open_stream(j);
    if (!j->first_sent[choice]) {
        j->first_sent[choice] = true;
        rtr_put_first_chunk(&j->out, j->ask, choice);
    }
    if (j->ask->capture) note_answer(j);
    rtr_put_chunk(&j->out, j->api->tok, j->ask, choice, j->outputs[choice]);
}

/* After a callback of the back end; `alive`: it still knows the request. */
static void settle(struct job *j, bool failed, bool alive)
{
    if (failed || j->rows.failed || tow_buf_failed(&j->out)) {
        if (alive) j->api->backend.cancel(j->api->self, j->accepted);
        tow_buf_clear(&j->out);
        fail_memory(j);
    } else if (!j->n_left) {
        complete(j);
    } else {
        send_out(j);
    }
}

static void on_tokens(void *ctx, const struct rtr_tokens *t)
{
    struct job *j = ctx;
    struct rtr_api *a = j->api;
    struct rtr_output *o = j->outputs[t->choice];
    if (!j->first_token) {
        j->first_token = true;
        tow_histogram_observe(a->m_ttft, (double)(uv_now(a->loop) - j->start_ms) / 1000.0);
    }
    if (j->ask->capture) rtr_capture_rows_tokens(&j->rows, t->ids, t->n);
    if (rtr_output_push(o, t)) {
        j->stopped = !a->backend.cancel_choice(a->self, j->accepted, t->choice);
        j->n_left -= !j->stopped;
    }
    emit(j, t->choice);
    settle(j, rtr_output_failed(o), j->n_left > 0);
}

static void on_finish(void *ctx, uint32_t choice, enum rtr_finish reason)
{
    struct job *j = ctx;
    j->n_left--;
    if (!j->stopped) {
        rtr_output_finish(j->outputs[choice], reason);
        emit(j, choice);
    }
    settle(j, rtr_output_failed(j->outputs[choice]), j->n_left > 0);
}

static void on_fail(void *ctx, const struct rtr_refusal *r)
{
    fail_job(ctx, r);
}

static void on_captured(void *ctx, const struct rtr_captured *c)
{
    struct job *j = ctx;
    rtr_capture_rows_take(&j->rows, c); /* out of memory: settle() sees it */
}

static const struct rtr_sink sink = {on_tokens, on_finish, on_fail, on_captured, NULL};

/* The body is checked and good. */
static void submit(struct job *j)
{
    struct rtr_api *a = j->api;
    uint32_t n = j->ask->req.n_choices;
    struct rtr_refusal r = {0};
    j->outputs = calloc(n, sizeof *j->outputs);
    j->first_sent = calloc(n, sizeof *j->first_sent);
    bool good = j->outputs && j->first_sent;
    if (j->ask->capture) rtr_capture_rows_init(&j->rows, j->ask->capture);
    for (uint32_t i = 0; good && i < n; i++) {
        j->outputs[i] = rtr_output_new(a->tok, j->ask, i);
        good = j->outputs[i] != NULL;
    }
    if (!good) {
        tow_fail(&r.err, TOW_ENOMEM, "out of memory for this request");
        r.retry_after_s = 1;
    }
    if (!good || a->backend.submit(a->self, &j->ask->req, &sink, j, &j->accepted, &r) < 0) {
        reply_refusal(a, j->route, let_go(j), &r);
        free_job(j);
        return;
    }
    j->n_left = n;
    tow_counter_add(a->m_started, 1);
    tow_list_append(&a->running, &j->link);
}

static void reply_ids(struct job *j)
{
    struct rtr_api *a = j->api;
    const struct rtr_choice *c = &j->ask->req.choices[0];
    struct tow_buf b;
    tow_buf_init(&b, 0);
    if (j->ask->route == RTR_TOKENIZE) {
        tow_buf_printf(&b, "{\"count\": %u, \"max_model_len\": %u, \"tokens\": [", c->n_prompt,
                       j->rules.context_length);
        for (uint32_t i = 0; i < c->n_prompt; i++) {
            tow_buf_printf(&b, i ? ", %" PRId32 : "%" PRId32, c->prompt[i]);
        }
        tow_buf_puts(&b, "]}");
    } else {
        struct tow_buf text;
        tow_buf_init(&text, 0);
        text_detok_all(a->tok, c->prompt, c->n_prompt, false, &text);
        if (tow_buf_failed(&text)) b.failed = true;
        tow_buf_puts(&b, "{\"prompt\": ");
        json_put_string(&b, text.data ? text.data : "", text.len);
        tow_buf_putc(&b, '}');
        tow_buf_fini(&text);
    }
    reply(a, j->route, let_go(j), 200, NULL, &b);
    free_job(j);
}

static void on_checked(struct job *j)
{
    free(j->body);
    j->body = NULL;
    if (!j->x || j->api->closing) {
        free_job(j);
    } else if (j->rc < 0) {
        reply_error(j->api, j->route, let_go(j), &j->error,
                    j->error.status == 503 ? "Retry-After: 1\r\n" : NULL);
        free_job(j);
    } else if (j->ask->route == RTR_TOKENIZE || j->ask->route == RTR_DETOKENIZE) {
        reply_ids(j);
    } else {
        submit(j);
    }
}

static void check_body(struct job *j)
{
    static const enum rtr_route kinds[] = {[ROUTE_chat] = RTR_CHAT,
                                           [ROUTE_completions] = RTR_COMPLETIONS,
                                           [ROUTE_tokenize] = RTR_TOKENIZE,
                                           [ROUTE_detokenize] = RTR_DETOKENIZE};
    j->rc = rtr_ask_parse(&j->ask, kinds[j->route], j->body, j->body_len, &j->rules, &j->error);
}

/* malloc keeps what a thread freed for that thread's next need, and a body's tree is a hundred
 * times what a request needs afterwards. */
static void pool_work(uv_work_t *work)
{
    struct job *j = work->data;
    check_body(j);
    free(j->body);
    j->body = NULL;
    if (j->body_len > LARGE_BODY) malloc_trim(0);
}

static void trim_work(uv_work_t *work)
{
    (void)work;
    malloc_trim(0);
}

static void trim_done(uv_work_t *work, int status)
{
    struct rtr_api *a = work->data;
    (void)status;
    a->trimming = false;
    maybe_closed(a);
}

static void pool_done(uv_work_t *work, int status)
{
    struct job *j = work->data;
    j->api->n_pool--;
    if (status < 0) j->rc = rtr_api_fail(&j->error, 503, "cancelled", NULL, "cancelled");
    on_checked(j);
}

static bool refuse_early(struct rtr_api *a, enum route route, struct rtr_exchange *x)
{
    struct rtr_refusal r = {0};
    if (route != ROUTE_chat && route != ROUTE_completions) return false;
    if (a->draining) {
        tow_fail(&r.err, TOW_EDRAIN, "this router is shutting down");
        r.retry_after_s = DRAIN_RETRY_S;
        r.reason = "draining";
    } else if (a->backend.room(a->self, &r) == 0) {
        return false;
    }
    reply_refusal(a, route, x, &r);
    return true;
}

/* What the model and the workers allow. */
static uint32_t context_limit(struct rtr_api *a, bool shadow)
{
    uint32_t limit = a->backend.context_length(a->self, shadow);
    return !limit || (a->context_length && a->context_length < limit) ? a->context_length : limit;
}

static void start_job(struct rtr_api *a, enum route route, struct rtr_exchange *x)
{
    if (refuse_early(a, route, x)) return;
    size_t len;
    rtr_exchange_body(x, &len);
    struct rtr_refusal r = {.retry_after_s = 1};
    struct job *j = NULL;
    if (len > INLINE_BODY && a->n_pool >= a->max_pool_jobs) {
        tow_fail(&r.err, TOW_EBUSY, "%u large bodies are being read", a->n_pool);
        r.reason = "tokenizer_busy";
    } else if (!(j = calloc(1, sizeof *j))) {
        tow_fail(&r.err, TOW_ENOMEM, "out of memory for this request");
    }
    if (!j) {
        reply_refusal(a, route, x, &r);
        return;
    }
    *j = (struct job){.api = a,
                      .x = x,
                      .route = route,
                      .start_ms = uv_now(a->loop),
                      .wrote_ms = uv_now(a->loop),
                      .rules = {.tok = a->tok,
                                .served_model_name = a->served_model_name,
                                .model_name = a->model_name,
                                .context_length = context_limit(a, false),
                                .shadow_context = context_limit(a, true),
                                .n_vocab = a->n_vocab,
                                .default_thinking = a->default_thinking,
                                .index_capture = a->index_capture,
                                .ratios = a->ratios,
                                .n_layers = a->n_layers,
                                .max_body_bytes = a->max_body_bytes}};
    tow_list_init(&j->link);
    tow_buf_init(&j->out, 0);
    j->work.data = j;
    j->body = rtr_exchange_take_body(x, &j->body_len);
    a->n_jobs++;
    tow_gauge_set(a->m_in_flight, a->n_jobs);
    rtr_exchange_set_user(x, j);
    if (!j->body) {
        j->rc = rtr_api_fail(&j->error, 503, "out_of_memory", NULL, "out of memory");
        on_checked(j);
    } else if (len <= INLINE_BODY) {
        check_body(j);
        on_checked(j);
    } else {
        a->n_pool++;
        uv_queue_work(a->loop, &j->work, pool_work, pool_done);
    }
}

static void on_gone(void *ctx, struct rtr_exchange *x)
{
    struct rtr_api *a = ctx;
    struct job *j = rtr_exchange_user(x);
    if (!j) return;
    tow_counter_add(a->m_by_client, 1);
    j->x = NULL;
    if (!j->accepted) return; /* at the pool: freed when that is done */
    tow_counter_add(a->m_cancelled, 1);
    tow_debug("req %s: cancelled by client", j->ask->req.id);
    a->backend.cancel(a->self, j->accepted);
    free_job(j);
}

/* ---- everything that is no generation ---- */

static bool key_matches(const struct key *k, const char *given, size_t n)
{
    unsigned char diff = k->len != n;
    for (size_t i = 0; i < MAX_KEY_BYTES; i++) {
        unsigned char g = i < n ? (unsigned char)given[i] : 0;
        diff |= (unsigned char)(g ^ (unsigned char)k->bytes[i]);
    }
    return diff == 0;
}

/* Every key is looked at in full, so that time says nothing about them. */
static bool authorized(const struct rtr_api *a, const struct rtr_exchange *x)
{
    if (!a->n_keys) return true;
    size_t n;
    const char *s = rtr_exchange_authorization(x, &n);
    if (!s || n < 8 || strncasecmp(s, "bearer ", 7) != 0) return false;
    s += 7;
    n -= 7;
    while (n && *s == ' ') s++, n--;
    bool good = false;
    for (size_t i = 0; i < a->n_keys; i++) good |= key_matches(&a->keys[i], s, n);
    return good && n <= MAX_KEY_BYTES;
}

static bool is_path(const char *path, size_t n, const char *want)
{
    return n == strlen(want) && !memcmp(path, want, n);
}

/* The part of the path that stands for {..}; decoded into out, a C string. False: not decodable. */
static bool decode_part(const char *s, size_t n, char *out, size_t cap)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned c = (unsigned char)s[i];
        if (c == '%') {
            char hex[3] = {0}, *end;
            if (n - i < 3) return false;
            memcpy(hex, s + i + 1, 2);
            c = (unsigned)strtoul(hex, &end, 16);
            if (end != hex + 2 || hex[0] == '+' || hex[0] == '-' || hex[0] == ' ') return false;
            i += 2;
        }
        if (!c || k + 1 >= cap) return false;
        out[k++] = (char)c;
    }
    out[k] = 0;
    return k > 0;
}

static enum route find_route(const char *path, size_t n, const char **part, size_t *part_len)
{
    static const char models[] = "/v1/models/", workers[] = "/admin/workers/", drain[] = "/drain";
    for (int r = 0; r < ROUTE_model; r++) {
        if (is_path(path, n, routes[r].path)) return (enum route)r;
    }
    if (n > sizeof models - 1 && !memcmp(path, models, sizeof models - 1)) {
        *part = path + sizeof models - 1;
        *part_len = n - (sizeof models - 1);
        return ROUTE_model;
    }
    size_t ends = sizeof workers - 1 + sizeof drain - 1;
    if (n > ends && !memcmp(path, workers, sizeof workers - 1) &&
        !memcmp(path + n - (sizeof drain - 1), drain, sizeof drain - 1)) {
        *part = path + sizeof workers - 1;
        *part_len = n - ends;
        return memchr(*part, '/', *part_len) ? ROUTE_other : ROUTE_drain;
    }
    return ROUTE_other;
}

/* Route of the request, or a refusal that was sent. */
static bool admit(struct rtr_api *a, struct rtr_exchange *x, enum route *route, const char **part,
                  size_t *part_len)
{
    struct rtr_api_error e;
    size_t path_len, method_len;
    const char *path = rtr_exchange_path(x, &path_len);
    const char *method = rtr_exchange_method(x, &method_len);
    *route = find_route(path, path_len, part, part_len);
    bool keyed = routes[*route].needs_key || *route == ROUTE_other;
    char is[JSON_SHOW_BYTES];
    if (keyed && !authorized(a, x)) {
        size_t n; /* what was sent is not repeated: it may be nearly a key */
        const char *sent = rtr_exchange_authorization(x, &n);
        rtr_api_fail(&e, 401, "invalid_api_key", NULL,
                     "Authorization: must be Bearer and a key of this server, is %s",
                     sent ? "something else" : "missing");
        reply_error(a, *route, x, &e, "WWW-Authenticate: Bearer\r\n");
        return false;
    }
    if (*route == ROUTE_other) {
        rtr_api_fail(&e, 404, "not_found", NULL, "path: %s is not one of this server",
                     json_show_text(path, path_len, is));
        reply_error(a, *route, x, &e, NULL);
        return false;
    }
    bool get = routes[*route].method[0] == 'G';
    if (!is_path(method, method_len, routes[*route].method) &&
        !(get && is_path(method, method_len, "HEAD"))) {
        rtr_api_fail(&e, 405, "method_not_allowed", NULL, "method: must be %s for this path, is %s",
                     routes[*route].method, json_show_text(method, method_len, is));
        reply_error(a, *route, x, &e, get ? "Allow: GET, HEAD\r\n" : "Allow: POST\r\n");
        return false;
    }
    return true;
}

static void put_model(struct rtr_api *a, struct tow_buf *b)
{
    const char *name = a->served_model_name ? a->served_model_name : a->model_name;
    tow_buf_puts(b, "{\"id\": ");
    json_put_string(b, name, strlen(name));
    tow_buf_printf(b,
                   ", \"object\": \"model\", \"created\": 0, \"owned_by\": \"towpath\", "
                   "\"max_model_len\": %u}",
                   context_limit(a, false));
}

static void reply_model(struct rtr_api *a, struct rtr_exchange *x, const char *part, size_t n)
{
    char id[512];
    const char *name = a->served_model_name ? a->served_model_name : a->model_name;
    struct rtr_api_error e;
    if (!decode_part(part, n, id, sizeof id) || strcmp(id, name) != 0) {
        char is[JSON_SHOW_BYTES];
        rtr_api_fail(&e, 404, "model_not_found", "model",
                     "model: %s is not served here; \"%.200s\" is", json_show_text(part, n, is),
                     name);
        reply_error(a, ROUTE_model, x, &e, NULL);
        return;
    }
    struct tow_buf b;
    tow_buf_init(&b, 0);
    put_model(a, &b);
    reply(a, ROUTE_model, x, 200, NULL, &b);
}

static void reply_drain(struct rtr_api *a, struct rtr_exchange *x, const char *part, size_t n)
{
    char name[512], is[JSON_SHOW_BYTES];
    struct rtr_api_error e;
    struct tow_err err = {0};
    int rc = decode_part(part, n, name, sizeof name)
                 ? a->backend.drain_worker(a->self, name, &err)
                 : tow_fail(&err, TOW_ENOENT, "not a name in percent-encoding");
    if (rc < 0) {
        rtr_api_fail(&e, tow_err_http(rc), rc == TOW_ENOENT ? "worker_not_found" : tow_err_name(rc),
                     NULL, "worker %s: %s", json_show_text(part, n, is), err.msg);
        reply_error(a, ROUTE_drain, x, &e, NULL);
        return;
    }
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_buf_puts(&b, "{\"name\": ");
    json_put_string(&b, name, strlen(name));
    tow_buf_puts(&b, ", \"state\": \"draining\"}");
    reply(a, ROUTE_drain, x, 202, NULL, &b);
}

static void reply_metrics(struct rtr_api *a, struct rtr_exchange *x)
{
    const struct rtr_http_stats *s = rtr_http_peek_stats(a->http);
    tow_counter_follow(a->m_accepted, s->accepted);
    tow_counter_follow(a->m_full, s->refused_full);
    tow_counter_follow(a->m_bytes_in, s->bytes_in);
    tow_counter_follow(a->m_bytes_out, s->bytes_out);
    tow_counter_follow(a->m_cut, s->cut_off);
    tow_counter_follow(a->m_timed_out, s->timed_out);
    tow_gauge_set(a->m_connections, s->connections);
    tow_gauge_set(a->m_buffered, (double)s->buffered);
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_metrics_print(a->metrics, &b);
    if (a->backend.metrics) a->backend.metrics(a->self, &b);
    if (tow_buf_failed(&b)) {
        reply(a, ROUTE_metrics, x, 503, NULL, &b);
        return;
    }
    count(a, ROUTE_metrics, 200);
    rtr_exchange_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", NULL,
                       b.data ? b.data : "", b.len);
    tow_buf_fini(&b);
}

static void reply_ready(struct rtr_api *a, struct rtr_exchange *x)
{
    const char *why = "draining";
    bool ready = !a->draining && a->backend.ready(a->self, &why);
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_buf_printf(&b, "{\"status\": \"%s\"}", ready ? "ready" : why);
    reply(a, ROUTE_ready, x, ready ? 200 : 503, ready ? NULL : "Retry-After: 1\r\n", &b);
}

static bool on_head(void *ctx, struct rtr_exchange *x)
{
    const char *part;
    size_t part_len;
    enum route route;
    return !admit(ctx, x, &route, &part, &part_len) || refuse_early(ctx, route, x);
}

static void on_request(void *ctx, struct rtr_exchange *x)
{
    struct rtr_api *a = ctx;
    const char *part = NULL;
    size_t part_len = 0;
    enum route route;
    struct tow_buf b;
    if (!admit(a, x, &route, &part, &part_len)) return;
    tow_buf_init(&b, 0);
    switch (route) {
    case ROUTE_chat:
    case ROUTE_completions:
    case ROUTE_tokenize:
    case ROUTE_detokenize: start_job(a, route, x); break;
    case ROUTE_models:
        tow_buf_puts(&b, "{\"object\": \"list\", \"data\": [");
        put_model(a, &b);
        tow_buf_puts(&b, "]}");
        reply(a, route, x, 200, NULL, &b);
        break;
    case ROUTE_health:
        tow_buf_puts(&b, "{\"status\": \"ok\"}");
        reply(a, route, x, 200, NULL, &b);
        break;
    case ROUTE_ready: reply_ready(a, x); break;
    case ROUTE_metrics: reply_metrics(a, x); break;
    case ROUTE_workers:
        a->backend.workers_json(a->self, &b);
        reply(a, route, x, 200, NULL, &b);
        break;
    case ROUTE_refused:
        a->backend.refused_json(a->self, &b);
        reply(a, route, x, 200, NULL, &b);
        break;
    case ROUTE_model: reply_model(a, x, part, part_len); break;
    case ROUTE_drain: reply_drain(a, x, part, part_len); break;
    case ROUTE_other:
    case N_ROUTES: break; /* admit() has answered */
    }
}

static void on_refused(void *ctx, int status)
{
    count(ctx, ROUTE_other, status);
}

/* A silent stream says something now and then,
 * so that nothing between us and the client drops it. */
static void on_tick(uv_timer_t *timer)
{
    struct rtr_api *a = timer->data;
    if (!a->sse_keepalive_ms) return;
    uint64_t now = uv_now(a->loop);
    TOW_LIST_EACH_SAFE (n, &a->running) {
        struct job *j = TOW_CONTAINER(n, struct job, link);
        if (!j->ask->stream || now - j->wrote_ms < a->sse_keepalive_ms) continue;
        open_stream(j);
        tow_buf_puts(&j->out, RTR_SSE_COMMENT);
        send_out(j);
    }
}

/* ---- opening and closing ---- */

void rtr_api_config_init(struct rtr_api_config *c)
{
    *c = (struct rtr_api_config){.http_addr = "127.0.0.1:8000",
                                 .model_name = "towpath",
                                 .max_pool_jobs = 64,
                                 .limits = rtr_http_defaults};
}

static int load_keys(struct rtr_api *a, const char *path, struct tow_err *err)
{
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return tow_fail(err, TOW_ECONFIG, "--api-key-file %s: not a regular file", path);
    FILE *f = fopen(path, "re");
    if (!f) return tow_fail(err, TOW_ECONFIG, "--api-key-file %s: cannot be read: %m", path);
    if (fstat(fileno(f), &st) == 0 && (st.st_mode & 037)) {
        tow_warn("--api-key-file %s has mode %04o; 0640 or tighter is meant", path,
                 (unsigned)(st.st_mode & 07777));
    }
    char *line = NULL;
    size_t cap = 0, number = 0;
    ssize_t got;
    int rc = 0;
    a->keys = calloc(MAX_KEYS, sizeof *a->keys);
    if (!a->keys) rc = tow_fail(err, TOW_ENOMEM, "--api-key-file: out of memory");
    while (rc == 0 && (got = getline(&line, &cap, f)) > 0) {
        size_t n = (size_t)got, at = 0;
        number++;
        while (n && (line[n - 1] == '\n' || line[n - 1] == '\r' || line[n - 1] == ' ' ||
                     line[n - 1] == '\t'))
            n--;
        if (!n) continue;
        while (at < n && (unsigned char)line[at] > ' ' && line[at] != 0x7f) at++;
        if (n > MAX_KEY_BYTES) {
            rc = tow_fail(err, TOW_ECONFIG, "--api-key-file %s:%zu: a key of %zu bytes, at most %d",
                          path, number, n, MAX_KEY_BYTES);
        } else if (at < n) { /* no client could send it */
            rc = tow_fail(err, TOW_ECONFIG,
                          "--api-key-file %s:%zu: byte %zu of the key is a blank or a control "
                          "character",
                          path, number, at);
        } else if (a->n_keys == MAX_KEYS) {
            rc = tow_fail(err, TOW_ECONFIG, "--api-key-file %s: more than %d keys", path, MAX_KEYS);
        } else {
            memcpy(a->keys[a->n_keys].bytes, line, n);
            a->keys[a->n_keys++].len = n;
        }
    }
    if (rc == 0 && !a->n_keys) {
        rc = tow_fail(err, TOW_ECONFIG, "--api-key-file %s: holds no key", path);
    }
    if (line) explicit_bzero(line, cap);
    free(line);
    fclose(f);
    return rc;
}

int rtr_api_check_keys(const char *path, struct tow_err *err)
{
    struct rtr_api *a = calloc(1, sizeof *a);
    if (!a) return tow_fail(err, TOW_ENOMEM, "--api-key-file: out of memory");
    int rc = load_keys(a, path, err);
    free_keys(a);
    free(a);
    return rc;
}

static void register_metrics(struct rtr_api *a)
{
    struct tow_metrics *m = a->metrics;
    for (int r = 0; r < N_ROUTES; r++) {
        for (int class = 2; class <= 5; class ++) {
            char status[4] = {(char)('0' + class), 'x', 'x', 0};
            const char *labels[] = {"route", routes[r].name, "status", status, NULL};
            a->m_requests[r][class] = tow_counter(
                m, "http_requests_total", "HTTP requests answered, by route and status", labels);
        }
        a->m_requests[r][0] = a->m_requests[r][1] = a->m_requests[r][5];
    }
    a->m_in_flight = tow_gauge(m, "http_requests_in_flight", "Requests being worked on", NULL);
    a->m_connections = tow_gauge(m, "http_connections", "Client connections open", NULL);
    a->m_buffered = tow_gauge(m, "http_buffered_bytes", "Request bodies held in memory", NULL);
    a->m_accepted = tow_counter(m, "http_connections_total", "Client connections accepted", NULL);
    a->m_full = tow_counter(m, "http_connections_refused_total",
                            "Client connections turned away at the limit", NULL);
    a->m_bytes_in = tow_counter(m, "http_received_bytes_total", "Bytes from clients", NULL);
    a->m_bytes_out = tow_counter(m, "http_sent_bytes_total", "Bytes to clients", NULL);
    a->m_cut =
        tow_counter(m, "http_slow_readers_total", "Clients cut off for reading too slowly", NULL);
    a->m_timed_out = tow_counter(m, "http_request_timeouts_total",
                                 "Requests that were not complete in time", NULL);
    a->m_started = tow_counter(m, "requests_started_total", "Generation requests accepted", NULL);
    a->m_finished = tow_counter(m, "requests_finished_total", "Generation requests answered", NULL);
    a->m_failed = tow_counter(m, "requests_failed_total",
                              "Generation requests that failed after they were accepted", NULL);
    a->m_cancelled = tow_counter(m, "requests_cancelled_total",
                                 "Generation requests ended because the client had gone", NULL);
    a->m_by_client = tow_counter(m, "requests_cancelled_by_client_total",
                                 "Requests whose client went before the answer was complete", NULL);
    a->m_prompt_tokens =
        tow_counter(m, "prompt_tokens_total", "Prompt tokens of answered requests", NULL);
    a->m_completion_tokens =
        tow_counter(m, "completion_tokens_total", "Generated tokens of answered requests", NULL);
    a->m_ttft = tow_histogram(m, "time_to_first_token_seconds",
                              "From the complete request to its first token", NULL,
                              TOW_SECONDS_BOUNDS, TOW_N_SECONDS_BOUNDS);
    a->m_seconds =
        tow_histogram(m, "request_seconds", "From the complete request to its last token", NULL,
                      TOW_SECONDS_BOUNDS, TOW_N_SECONDS_BOUNDS);
}

static void on_part_closed(void *arg)
{
    struct rtr_api *a = arg;
    a->http_open = false;
    maybe_closed(a);
}

static void on_tick_closed(uv_handle_t *handle)
{
    struct rtr_api *a = handle->data;
    a->tick_open = false;
    maybe_closed(a);
}

int rtr_api_open(struct rtr_api **out, struct uv_loop_s *loop, const struct rtr_api_config *config,
                 const struct text_tokenizer *tok, const struct rtr_backend *backend, void *self,
                 struct tow_err *err)
{
    static const struct rtr_http_handler handler = {on_head, on_request, on_gone, on_refused};
    struct rtr_api *a = calloc(1, sizeof *a);
    if (!a) return tow_fail(err, TOW_ENOMEM, "api: out of memory");
    const char *served = config->served_model_name;
    a->loop = loop;
    a->tok = tok;
    a->backend = *backend;
    a->self = self;
    a->metrics = config->metrics;
    a->context_length = config->context_length;
    a->n_vocab = config->n_vocab;
    a->sse_keepalive_ms = config->sse_keepalive_s * 1000;
    a->max_pool_jobs = config->max_pool_jobs ? config->max_pool_jobs : 64;
    a->default_thinking = config->default_thinking;
    a->index_capture = config->index_capture;
    a->ratios = config->ratios;
    a->n_layers = config->n_layers;
    a->max_body_bytes = (size_t)config->limits.max_body_bytes;
    tow_list_init(&a->running);
    int rc = 0;
    if (served && *served && !(a->served_model_name = strdup(served))) rc = TOW_ENOMEM;
    if (!(a->model_name = strdup(config->model_name))) rc = TOW_ENOMEM;
    if (rc < 0) tow_fail(err, rc, "api: out of memory");
    if (rc == 0 && config->api_key_file && *config->api_key_file) {
        rc = load_keys(a, config->api_key_file, err);
    }
    if (rc == 0) {
        register_metrics(a);
        rc = rtr_http_open(&a->http, loop, config->http_addr, &config->limits, &handler, a, err);
    }
    if (rc < 0) {
        a->closing = true;
        maybe_closed(a);
        return rc;
    }
    a->http_open = a->tick_open = true;
    uv_timer_init(loop, &a->tick);
    a->tick.data = a;
    uv_timer_start(&a->tick, on_tick, TICK_MS, TICK_MS);
    *out = a;
    return 0;
}

uint16_t rtr_api_port(const struct rtr_api *a)
{
    return rtr_http_port(a->http);
}

void rtr_api_drain(struct rtr_api *a)
{
    a->draining = true;
    rtr_http_drain(a->http);
}

uint32_t rtr_api_in_flight(const struct rtr_api *a)
{
    return a->n_jobs;
}

void rtr_api_fail_all(struct rtr_api *a, const struct rtr_refusal *why)
{
    while (!tow_list_empty(&a->running)) {
        struct job *j = TOW_CONTAINER(a->running.next, struct job, link);
        a->backend.cancel(a->self, j->accepted);
        fail_job(j, why);
    }
}

void rtr_api_close(struct rtr_api *a, void (*on_closed)(void *arg), void *arg)
{
    if (a->closing) return;
    while (!tow_list_empty(&a->running)) {
        struct job *j = TOW_CONTAINER(a->running.next, struct job, link);
        a->backend.cancel(a->self, j->accepted);
        tow_counter_add(a->m_cancelled, 1);
        free_job(j);
    }
    a->closing = true;
    a->on_closed = on_closed;
    a->on_closed_arg = arg;
    uv_close((uv_handle_t *)&a->tick, on_tick_closed);
    rtr_http_close(a->http, on_part_closed, a);
}
