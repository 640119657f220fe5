/* tests/cluster/stub_router.c - the client-facing half of the router over a back end that makes
 * things up: for tests that drive HTTP without workers.
 *
 * It answers with the tokens it was asked with: those of the prompt, or in a chat those of the last
 * user message. So a test forces any output by asking for it. The seed says how:
 *   seed % 100   0 as asked, 1 never says anything, 2 fails before the first token, 3 fails after 3
 *                tokens, 4 is refused as queue full, 5 is refused for lack of capacity
 *   seed / 100   tokens per step, 0 meaning 1
 * A capture is answered for layers 2 and 4 with ranks that capture() makes up, that of the prompt
 * last of all.
 * Choice i leaves out the last i tokens. ignore_eos repeats the tokens up to max_tokens.
 * Counts of what it is doing are in /metrics: towpath_stub_running, towpath_stub_cancelled.
 *
 * spin=1: never sleeps between its ticks of 1 ms, so that a benchmark sees the front half alone.
 *
 * usage: stub_router TOKENIZER_JSON PORT_FILE [key=value...]
 */
#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "proto/capture.h"
#include "router/api.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

struct rtr_accepted {
    struct tow_list link;
    const struct rtr_request *req;
    const struct rtr_sink *sink;
    void *ctx;
    unsigned how, step;
    const text_id *ids;
    uint32_t n_ids;
    uint32_t sent[RTR_MAX_CHOICES];
    bool over[RTR_MAX_CHOICES];
    bool closing; /* all but the captured row of prefill has been said */
    uint32_t n_left;
};

struct stub {
    struct tow_list running;
    const struct text_tokenizer *tok;
    text_id user, assistant;
    uint32_t context, max_running, n_running;
    bool ready;
    struct tow_gauge *m_running;
    struct tow_counter *m_cancelled;
};

#define ROUNDS 4 /* steps of each choice in a millisecond */

static struct stub stub;

static int room(void *self, struct rtr_refusal *r)
{
    struct stub *s = self;
    if (s->n_running < s->max_running) return 0;
    r->reason = "queue_full";
    r->retry_after_s = 3;
    return tow_fail(&r->err, TOW_EFULL, "queue full: %u requests", s->n_running);
}

static void end(struct rtr_accepted *t)
{
    tow_list_remove(&t->link);
    tow_gauge_set(stub.m_running, --stub.n_running);
    free(t);
}

static int submit(void *self, const struct rtr_request *req, const struct rtr_sink *sink, void *ctx,
                  struct rtr_accepted **out, struct rtr_refusal *r)
{
    struct stub *s = self;
    /* Without a seed it is 64 random bits: as asked, one token per step. */
    uint64_t seed = req->choices[0].seed < 1000000 ? req->choices[0].seed : 0;
    unsigned how = (unsigned)(seed % 100);
    int rc = room(self, r);
    if (rc < 0) return rc;
    if (how == 4 || how == 5) {
        r->reason = how == 4 ? "queue_full" : "no_capacity";
        r->retry_after_s = 7;
        return tow_fail(&r->err, how == 4 ? TOW_EFULL : TOW_EBUSY, "refused as asked");
    }
    struct rtr_accepted *t = calloc(1, sizeof *t);
    if (!t) return tow_fail(&r->err, TOW_ENOMEM, "out of memory");
    t->req = req;
    t->sink = sink;
    t->ctx = ctx;
    t->how = how;
    t->step = (unsigned)(seed / 100);
    if (!t->step) t->step = 1;
    t->n_left = req->n_choices;
    const struct rtr_choice *c = &req->choices[0];
    uint32_t from = 0, to = c->n_prompt;
    for (uint32_t i = 0; i < c->n_prompt; i++) {
        if (c->prompt[i] == s->user) from = i + 1, to = c->n_prompt;
        if (c->prompt[i] == s->assistant && from) to = i;
    }
    t->ids = c->prompt + from;
    t->n_ids = to - from;
    tow_list_append(&s->running, &t->link);
    tow_gauge_set(s->m_running, ++s->n_running);
    *out = t;
    return 0;
}

static void cancel(void *self, struct rtr_accepted *t)
{
    (void)self;
    tow_counter_add(stub.m_cancelled, 1);
    end(t);
}

/* With a capture the row of prefill is still to come. */
static bool cancel_choice(void *self, struct rtr_accepted *t, uint32_t choice)
{
    (void)self;
    t->over[choice] = true;
    if (t->req->capture) {
        t->closing = true;
        return false;
    }
    if (!--t->n_left) end(t);
    return true;
}

/* Ranks made up: of n entries asked for the i-th has rank step + 1 + i * layer, of as many visible
 * ones as there are tokens; two are selected. By fp8 keys, if asked for, all rank one better. */
static void capture(struct rtr_accepted *t, uint32_t step, uint32_t layer)
{
    struct wire_capture ask;
    struct wire_capture_row row = {.topk = 2, .n_visible = 100000};
    static uint8_t own[WIRE_CAPTURE_MAX_ENTRIES * WIRE_RANK_BYTES], other[sizeof own];
    static uint8_t bytes[WIRE_MAX_CAPTURED];
    static const uint32_t list[2] = {0, 1};
    if (!t->req->capture || wire_get_capture(&ask, t->req->capture, t->req->capture_bytes) < 0)
        return;
    if (!(ask.steps & (step ? WIRE_CAPTURE_DECODE : WIRE_CAPTURE_PREFILL))) return;
    if (step > ask.max_steps) return;
    struct wire_writer a = {.data = own, .cap = sizeof own}, b = {.data = other, .cap = sizeof own},
                       w = {.data = bytes, .cap = sizeof bytes};
    for (uint32_t i = 0; i < ask.entries.n; i++) {
        uint32_t rank = step + 1 + i * layer;
        wire_put_u32(&a, rank);
        wire_put_u32(&a, 0);
        wire_put_f32(&a, 1.0f / (float)rank);
        wire_put_u32(&b, rank > 1 ? rank - 1 : 1);
        wire_put_u32(&b, 0);
        wire_put_f32(&b, 0.5f);
    }
    row.entries = ask.entries;
    row.own = (struct wire_ranks){0.5f, 0.25f, {own, (uint32_t)a.len}};
    row.shadow = ask.shadow & 1 << WIRE_SHADOW_FP8;
    row.shadows[WIRE_SHADOW_FP8] = (struct wire_ranks){0.5f, 0.25f, {other, (uint32_t)b.len}};
    if (ask.lists) row.list = (struct wire_ids){list, 2};
    wire_put_capture_row(&w, &row);
    struct rtr_captured c = {
        .step = step, .layer = layer, .row = bytes, .row_bytes = (uint32_t)w.len};
    t->sink->on_captured(t->ctx, &c);
}

/* One step of one choice; the ticket may be gone afterwards. */
static void step(struct rtr_accepted *t, uint32_t choice)
{
    const struct rtr_request *req = t->req;
    text_id ids[10000];
    float logprobs[10000];
    static struct rtr_logprob top[10000 * RTR_MAX_TOP];
    uint32_t have = t->n_ids > choice ? t->n_ids - choice : 0, n = 0;
    uint32_t limit = req->max_tokens;
    uint32_t n_top = req->sampling.n_top;
    bool endless = req->sampling.ignore_eos && have;
    while (!t->closing && n < t->step && t->sent[choice] + n < limit &&
           (endless || t->sent[choice] + n < have)) {
        uint32_t at = t->sent[choice] + n;
        ids[n] = t->ids[at % have];
        logprobs[n] = at % 3 == 2 ? -INFINITY : at % 3 == 1 ? NAN : -0.25f;
        for (uint32_t k = 0; k < n_top; k++) {
            top[n * n_top + k] = (struct rtr_logprob){(text_id)(20 + k), k ? -INFINITY : -0.25f};
        }
        n++;
    }
    if (n) {
        struct rtr_tokens m = {.choice = choice,
                               .n = n,
                               .ids = ids,
                               .logprobs = logprobs,
                               .top = top,
                               .n_top = n_top,
                               .n_cached = 2};
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t layer = 2; layer <= 4; layer += 2)
                if (t->sent[choice] + i) capture(t, t->sent[choice] + i, layer);
        t->sent[choice] += n;
        t->sink->on_tokens(t->ctx, &m);
        return;
    }
    if (t->req->capture && !t->closing) {
        t->closing = true; /* prefill's row comes a turn later than the end */
        return;
    }
    for (uint32_t layer = 2; layer <= 4; layer += 2) capture(t, 0, layer);
    enum rtr_finish why = t->sent[choice] == limit ? RTR_FINISH_LENGTH : RTR_FINISH_STOP;
    void *ctx = t->ctx;
    const struct rtr_sink *sink = t->sink;
    t->over[choice] = true;
    if (!--t->n_left) end(t);
    sink->on_finish(ctx, choice, why);
}

/* The nth running request, or NULL: callbacks change the list under our feet. */
static struct rtr_accepted *nth(uint32_t n)
{
    TOW_LIST_EACH (l, &stub.running) {
        if (!n--) return TOW_CONTAINER(l, struct rtr_accepted, link);
    }
    return NULL;
}

static void on_tick(uv_timer_t *timer)
{
    (void)timer;
    uint32_t n = stub.n_running;
    for (uint32_t i = n; i-- > 0;) {
        struct rtr_accepted *t = nth(i);
        if (!t || t->how == 1) continue;
        if (t->how == 2 || (t->how == 3 && t->sent[0] >= 3)) {
            struct rtr_refusal r = {0};
            void *ctx = t->ctx;
            const struct rtr_sink *sink = t->sink;
            tow_fail(&r.err, TOW_EPEER, "worker lost, as asked");
            r.reason = "worker_lost";
            end(t);
            sink->on_fail(ctx, &r);
            continue;
        }
        for (uint32_t k = 0; k < ROUNDS * RTR_MAX_CHOICES && nth(i) == t; k++) {
            uint32_t c = k % t->req->n_choices;
            if (k / t->req->n_choices == ROUNDS) break;
            if (!t->over[c] || t->closing) step(t, c);
        }
    }
}

static bool ready(void *self, const char **why)
{
    *why = "starting";
    return ((struct stub *)self)->ready;
}

static uint32_t context_length(void *self, bool shadow)
{
    return ((struct stub *)self)->context >> shadow;
}

static void workers_json(void *self, struct tow_buf *out)
{
    (void)self;
    tow_buf_puts(out, "[{\"name\": \"stub\", \"role\": \"decode\", \"state\": \"serving\"}]");
}

static void refused_json(void *self, struct tow_buf *out)
{
    (void)self;
    tow_buf_puts(out, "[]");
}

static int drain_worker(void *self, const char *name, struct tow_err *err)
{
    (void)self;
    if (strcmp(name, "stub") != 0) return tow_fail(err, TOW_ENOENT, "worker %s: not known", name);
    return 0;
}

static const struct rtr_backend backend = {
    .room = room,
    .submit = submit,
    .cancel = cancel,
    .cancel_choice = cancel_choice,
    .ready = ready,
    .context_length = context_length,
    .workers_json = workers_json,
    .refused_json = refused_json,
    .drain_worker = drain_worker,
};

static struct rtr_api *api;
static uv_timer_t tick;
static uv_signal_t term;
static uv_idle_t spin;

static void on_spin(uv_idle_t *idle)
{
    (void)idle;
    on_tick(&tick);
}

static void on_api_closed(void *arg)
{
    (void)arg;
    uv_close((uv_handle_t *)&tick, NULL);
    uv_close((uv_handle_t *)&spin, NULL);
    uv_close((uv_handle_t *)&term, NULL);
}

static void on_term(uv_signal_t *signal, int signum)
{
    (void)signum;
    uv_signal_stop(signal);
    rtr_api_close(api, on_api_closed, NULL);
}

static void fail(const struct tow_err *err)
{
    fprintf(stderr, "stub_router: %s\n", err->msg);
    exit(1);
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    struct rtr_api_config c;
    struct text_tokenizer *tok;
    uv_loop_t loop;
    bool spins = false;
    if (argc < 3) return 2;
    tow_log_init("stub_router", TOW_LOG_INFO, TOW_LOG_TEXT);
    signal(SIGPIPE, SIG_IGN);
    rtr_api_config_init(&c);
    c.http_addr = "127.0.0.1:0";
    c.context_length = 16384;
    c.ratios = (const int32_t[]){0, 0, 4, 8, 4, 8};
    c.n_layers = 6;
    stub.max_running = 1000;
    stub.ready = true;
    for (int i = 3; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value) return 2;
        *value++ = 0;
        uint32_t number = (uint32_t)strtoul(value, NULL, 10);
        if (!strcmp(argv[i], "keys")) c.api_key_file = value;
        if (!strcmp(argv[i], "served")) c.served_model_name = value;
        if (!strcmp(argv[i], "context")) c.context_length = number;
        if (!strcmp(argv[i], "capture")) c.index_capture = number;
        if (!strcmp(argv[i], "keepalive")) c.sse_keepalive_s = number;
        if (!strcmp(argv[i], "max_body")) c.limits.max_body_bytes = number;
        if (!strcmp(argv[i], "max_connections")) c.limits.max_connections = number;
        if (!strcmp(argv[i], "request_ms")) c.limits.request_ms = number;
        if (!strcmp(argv[i], "max_unsent")) c.limits.max_unsent_bytes = number;
        if (!strcmp(argv[i], "ready")) stub.ready = number;
        if (!strcmp(argv[i], "spin")) spins = number;
    }
    stub.context = c.context_length;
    tow_list_init(&stub.running);
    if (tow_metrics_new(&c.metrics, &err) < 0) fail(&err);
    stub.m_running = tow_gauge(c.metrics, "stub_running", "Requests the stub works on", NULL);
    stub.m_cancelled = tow_counter(c.metrics, "stub_cancelled_total", "Cancels heard", NULL);
    if (text_tokenizer_load(&tok, argv[1], &err) < 0) fail(&err);
    stub.tok = tok;
    if (text_tokenizer_find(tok, "<｜User｜>", &stub.user, &err) < 0) fail(&err);
    if (text_tokenizer_find(tok, "<｜Assistant｜>", &stub.assistant, &err) < 0) fail(&err);
    uv_loop_init(&loop);
    uv_timer_init(&loop, &tick);
    uv_timer_start(&tick, on_tick, 1, 1);
    uv_idle_init(&loop, &spin);
    if (spins) uv_idle_start(&spin, on_spin);
    uv_signal_init(&loop, &term);
    uv_signal_start(&term, on_term, SIGTERM);
    if (rtr_api_open(&api, &loop, &c, tok, &backend, &stub, &err) < 0) fail(&err);
    if (tow_metrics_check(c.metrics, &err) < 0) fail(&err);
    FILE *f = fopen(argv[2], "w");
    if (!f) return 1;
    fprintf(f, "%u\n", rtr_api_port(api));
    fclose(f);
    uv_run(&loop, UV_RUN_DEFAULT);
    int rc = uv_loop_close(&loop);
    text_tokenizer_free(tok);
    tow_metrics_free(c.metrics);
    return rc == 0 && tow_list_empty(&stub.running) ? 0 : 1;
}
