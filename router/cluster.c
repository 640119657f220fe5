/* router/cluster.c - see cluster.h. One list of actions is performed at a time; what a client
 * callback starts in the middle of it (a cancel) is performed at once from a list of its own,
 * since it only sends and closes. */
#include "router/cluster.h"

#include "common/base/buf.h"
#include "common/base/list.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/net/ctl.h"
#include "common/net/loop.h"
#include "common/text/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    TICK_MS = 50,
    PAUSE_MS = 1000, /* no turn of the loop for so long: we were stopped */
    HELLO_MS = 5000, /* a connection that has said nothing by then is no worker */
};

/* One accepted request as the API holds it. */
struct rtr_accepted {
    struct rtr_job *job;
    struct rtr_sink sink;
    void *ctx;
    uint32_t remaining; /* choices not ended */
};

struct conn {
    uint64_t id, opened_ms;
    bool spoke;
    struct net_ctl *ctl;
    struct rtr_cluster *cluster;
    struct tow_list link;
};

struct rtr_cluster {
    struct net_loop *loop;         /* borrowed */
    struct net_ctl_server *server; /* owned */
    struct net_timer *tick;        /* owned */
    struct rtr_route *route;       /* owned */
    struct rtr_actions actions;
    struct tow_list conns;
    uint64_t next_conn;
    uint64_t seen_ms, lost_ms; /* newest time of the loop; what of it was pauses */
    int depth;                 /* lists being performed */
    bool drained, cut, closing;
    uint8_t *frame; /* packing space */
    text_id ids[WIRE_MAX_BATCH];
    float logprobs[WIRE_MAX_BATCH];
    struct rtr_logprob *top; /* owned [WIRE_MAX_BATCH * RTR_MAX_TOP] */
    struct tow_gauge *g[8];
    struct tow_counter *c[12];
};

/* Time without our own pauses (SIGSTOP, a suspended machine): what came meanwhile lies unread, and
 * nobody may be called silent or late for that. */
static uint64_t now_ms(struct rtr_cluster *c)
{
    uint64_t now = net_loop_now_ms(c->loop);
    if (c->seen_ms && now - c->seen_ms > PAUSE_MS) {
        tow_warn("the router stood still for %llu ms", (unsigned long long)(now - c->seen_ms));
        c->lost_ms += now - c->seen_ms;
    }
    c->seen_ms = now;
    return now - c->lost_ms;
}

/* ------------------------------------------------------------------ actions */

static struct conn *find_conn(struct rtr_cluster *c, uint64_t id)
{
    TOW_LIST_EACH (n, &c->conns) {
        struct conn *k = TOW_CONTAINER(n, struct conn, link);
        if (k->id == id) return k;
    }
    return NULL;
}

static void send_msg(struct rtr_cluster *c, uint64_t id, const struct wire_msg *m)
{
    struct conn *k = find_conn(c, id);
    if (!k || !k->ctl) return;
    int64_t n = wire_pack(m, c->frame, WIRE_MAX_BODY + WIRE_HEADER_BYTES);
    if (n < 0) {
        tow_error("control: cannot pack %s: %s", wire_type_name(m->type), tow_err_name((int)n));
        net_ctl_close(k->ctl, (int)n, "a message could not be packed");
        return;
    }
    net_ctl_send(k->ctl, (uint16_t)m->type, c->frame + WIRE_HEADER_BYTES,
                 (uint32_t)(n - WIRE_HEADER_BYTES));
}

static void tell_tokens(struct rtr_cluster *c, const struct rtr_action *a)
{
    const struct wire_tokens *m = &a->msg.tokens;
    struct rtr_accepted *t = a->cookie;
    uint32_t n = m->ids.n;
    for (uint32_t i = 0; i < n; i++) {
        c->ids[i] = (text_id)wire_ids_at(m->ids, i);
        if (!m->has_logprobs) continue;
        /* The wire carries finite numbers; the lowest stand for -inf. */
        float p = wire_logprob_at(m->logprobs, m->n_top, i);
        c->logprobs[i] = p < -1e38f ? -INFINITY : p;
        for (uint32_t k = 0; k < m->n_top; k++) {
            uint32_t token;
            wire_top_at(m->logprobs, m->n_top, i, k, &token, &p);
            c->top[i * m->n_top + k] =
                (struct rtr_logprob){(text_id)token, p < -1e38f ? -INFINITY : p};
        }
    }
    struct rtr_tokens out = {.choice = a->choice,
                             .n = n,
                             .ids = c->ids,
                             .logprobs = m->has_logprobs ? c->logprobs : NULL,
                             .top = m->has_logprobs && m->n_top ? c->top : NULL,
                             .n_top = m->n_top};
    t->sink.on_tokens(t->ctx, &out);
}

static void tell_captured(const struct rtr_action *a)
{
    const struct wire_captured *m = &a->msg.captured;
    struct rtr_accepted *t = a->cookie;
    struct rtr_captured c = {
        .step = m->step, .layer = m->layer, .row = m->row.data, .row_bytes = m->row.len};
    t->sink.on_captured(t->ctx, &c);
}

static struct rtr_placed_worker placed_worker(const struct rtr_worker *w)
{
    return (struct rtr_placed_worker){.name = w->name,
                                      .incarnation = w->incarnation,
                                      .chunk_tokens = w->chunk_tokens,
                                      .facts = w->facts,
                                      .facts_bytes = w->facts_bytes};
}

static void tell_placed(struct rtr_cluster *c, const struct rtr_action *a)
{
    const struct rtr_registry *g = rtr_route_registry(c->route);
    struct rtr_accepted *t = a->cookie;
    if (!t->sink.on_placed) return;
    struct rtr_placed p = {.choice = a->choice,
                           .n_output = a->n_output,
                           .prefill = placed_worker(&g->workers[a->prefill]),
                           .decode = placed_worker(&g->workers[a->decode])};
    t->sink.on_placed(t->ctx, &p);
}

static void tell_finish(const struct rtr_action *a)
{
    struct rtr_accepted *t = a->cookie;
    struct rtr_sink sink = t->sink;
    void *ctx = t->ctx;
    if (--t->remaining == 0) free(t);
    sink.on_finish(ctx, a->choice, a->reason);
}

static void tell_fail(const struct rtr_action *a)
{
    struct rtr_accepted *t = a->cookie;
    struct rtr_sink sink = t->sink;
    void *ctx = t->ctx;
    free(t);
    sink.on_fail(ctx, &a->refusal);
}

static void perform(struct rtr_cluster *c, struct rtr_actions *list)
{
    c->depth++;
    for (uint32_t i = 0; i < list->n; i++) {
        const struct rtr_action *a = &list->items[i];
        if (a->job && rtr_job_deaf(a->job)) continue; /* cancelled by a callback further up */
        switch (a->kind) {
        case RTR_DO_SEND: send_msg(c, a->conn, &a->msg); break;
        case RTR_DO_CLOSE: {
            struct conn *k = find_conn(c, a->conn);
            if (k && k->ctl) net_ctl_finish(k->ctl);
            break;
        }
        case RTR_DO_TOKENS: tell_tokens(c, a); break;
        case RTR_DO_CAPTURED: tell_captured(a); break;
        case RTR_DO_PLACED: tell_placed(c, a); break;
        case RTR_DO_FINISH: tell_finish(a); break;
        case RTR_DO_FAIL: tell_fail(a); break;
        case RTR_DO_DRAINED:
            c->drained = true;
            c->cut = a->cut;
            break;
        case RTR_DO_LOG: tow_warn("%s", a->refusal.err.msg); break;
        }
    }
    if (--c->depth == 0) rtr_route_reap(c->route);
}

static void feed(struct rtr_cluster *c, struct rtr_event *ev)
{
    ev->now_ms = now_ms(c);
    rtr_actions_clear(&c->actions);
    rtr_route_step(c->route, ev, &c->actions);
    perform(c, &c->actions);
}

/* ------------------------------------------------------------------ connections of workers */

static void on_open(void *arg, struct net_ctl *ctl)
{
    struct rtr_cluster *c = arg;
    struct conn *k = calloc(1, sizeof *k);
    if (!k) {
        net_ctl_close(ctl, TOW_ENOMEM, "no memory for a connection");
        return;
    }
    k->id = ++c->next_conn;
    k->opened_ms = now_ms(c);
    k->ctl = ctl;
    k->cluster = c;
    tow_list_append(&c->conns, &k->link);
    net_ctl_set_user(ctl, k);
}

static void on_frame(void *arg, struct net_ctl *ctl, uint16_t type, const void *body,
                     uint32_t bytes)
{
    struct rtr_cluster *c = arg;
    struct conn *k = net_ctl_user(ctl);
    struct wire_header h = {.body_bytes = bytes, .type = type, .version = WIRE_VERSION};
    struct wire_msg m;
    struct tow_err err = {0};
    if (!k) return;
    k->spoke = true; /* what it must have said first is the machine's business */
    int rc = wire_check_header(&h, &err);
    if (rc == TOW_ENOENT) {
        struct wire_msg u = {.type = WIRE_UNKNOWN_MSG, .unknown = {.type = type}};
        send_msg(c, k->id, &u);
        return;
    }
    if (rc == 0) rc = wire_unpack(&m, &h, body, &err);
    if (rc < 0) {
        tow_warn("control %s: %s", net_ctl_remote(ctl), err.msg);
        net_ctl_close(ctl, rc, err.msg);
        return;
    }
    struct rtr_event ev = {.kind = RTR_ON_MESSAGE, .conn = k->id, .msg = &m};
    feed(c, &ev);
}

static void on_close(void *arg, struct net_ctl *ctl, int code, const char *why)
{
    struct rtr_cluster *c = arg;
    struct conn *k = net_ctl_user(ctl);
    if (!k) return;
    tow_debug("control %s closed: %s (%s)", net_ctl_remote(ctl), why, tow_err_name(code));
    uint64_t id = k->id;
    tow_list_remove(&k->link);
    free(k);
    if (c->closing) return;
    struct rtr_event ev = {.kind = RTR_ON_CLOSED, .conn = id};
    feed(c, &ev);
}

/* Silent connections would use up those that the workers need. */
static void close_mute(struct rtr_cluster *c)
{
    uint64_t now = now_ms(c);
    TOW_LIST_EACH (n, &c->conns) {
        struct conn *k = TOW_CONTAINER(n, struct conn, link);
        if (!k->spoke && now - k->opened_ms >= HELLO_MS)
            net_ctl_close(k->ctl, TOW_ETIME, "no HELLO came");
    }
}

static void on_tick(void *arg)
{
    struct rtr_event ev = {.kind = RTR_ON_TICK};
    close_mute(arg);
    feed(arg, &ev);
}

/* ------------------------------------------------------------------ the back end's calls */

static int room(void *self, struct rtr_refusal *refusal)
{
    struct rtr_cluster *c = self;
    return rtr_route_room(c->route, now_ms(c), refusal);
}

static int submit(void *self, const struct rtr_request *req, const struct rtr_sink *sink, void *ctx,
                  struct rtr_accepted **out, struct rtr_refusal *refusal)
{
    struct rtr_cluster *c = self;
    struct rtr_accepted *t = calloc(1, sizeof *t);
    struct rtr_actions acts;
    if (!t) {
        memset(refusal, 0, sizeof *refusal);
        return tow_fail(&refusal->err, TOW_ENOMEM, "no memory for a request");
    }
    t->sink = *sink;
    t->ctx = ctx;
    t->remaining = req->n_choices;
    rtr_actions_init(&acts);
    int rc = rtr_route_submit(c->route, now_ms(c), req, t, &t->job, refusal, &acts);
    if (rc < 0) {
        free(t);
    } else {
        *out = t;
        perform(c, &acts);
    }
    rtr_actions_fini(&acts);
    return rc;
}

static void cancel(void *self, struct rtr_accepted *t)
{
    struct rtr_cluster *c = self;
    struct rtr_actions acts;
    rtr_actions_init(&acts);
    rtr_route_cancel(c->route, t->job, now_ms(c), &acts);
    free(t);
    perform(c, &acts);
    rtr_actions_fini(&acts);
}

static bool cancel_choice(void *self, struct rtr_accepted *t, uint32_t choice)
{
    struct rtr_cluster *c = self;
    struct rtr_actions acts;
    rtr_actions_init(&acts);
    bool over = rtr_route_cancel_choice(c->route, t->job, choice, now_ms(c), &acts);
    if (over && --t->remaining == 0) free(t);
    perform(c, &acts);
    rtr_actions_fini(&acts);
    return over;
}

static bool ready(void *self, const char **why)
{
    struct rtr_cluster *c = self;
    return rtr_route_ready(c->route, now_ms(c), why);
}

static uint32_t context_length(void *self, bool shadow)
{
    struct rtr_cluster *c = self;
    return rtr_route_context(c->route, shadow);
}

/* One end's view of its link to worker k: the proof, and what it found. */
static void pair_json(const struct rtr_registry *g, uint32_t i, uint32_t k, struct tow_buf *out)
{
    static const char *const proofs[] = {"unproved", "proving", "proved", "refuted"};
    bool prefill = g->workers[i].role == WIRE_PREFILL_ROLE;
    uint32_t p = prefill ? i : k, d = prefill ? k : i;
    const struct rtr_link *l = &g->links[p][d];
    tow_buf_puts(out, "{\"name\":");
    json_put_string(out, g->workers[k].name, strlen(g->workers[k].name));
    tow_buf_printf(out, ",\"proof\":\"%s\"", proofs[g->proof[p][d]]);
    if (g->proof[p][d] == RTR_PROVED) {
        tow_buf_puts(out, ",\"transport\":");
        json_put_string(out, l->transport, strlen(l->transport));
        tow_buf_printf(out, ",\"method\":\"%s\",\"mb_per_s\":%u,\"latency_us\":%u",
                       l->by_am ? "am" : "get", l->mb_per_s, l->latency_us);
    }
    if (g->proof[p][d] == RTR_REFUTED && l->why[0]) {
        tow_buf_puts(out, ",\"why\":");
        json_put_string(out, l->why, strlen(l->why));
    }
    tow_buf_putc(out, '}');
}

static void workers_json(void *self, struct tow_buf *out)
{
    struct rtr_cluster *c = self;
    const struct rtr_registry *g = rtr_route_registry(c->route);
    uint64_t now = now_ms(c);
    bool first = true;
    tow_buf_putc(out, '[');
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        const struct rtr_worker *w = &g->workers[i];
        if (w->state == RTR_GONE) continue;
        tow_buf_puts(out, first ? "{\"name\":" : ",{\"name\":");
        first = false;
        json_put_string(out, w->name, strlen(w->name));
        tow_buf_printf(
            out,
            ",\"role\":\"%s\",\"state\":\"%s\",\"incarnation\":\"%016llx\",\"silent_ms\":%llu,"
            "\"load\":{\"queued_requests\":%u,\"queued_tokens\":%u,\"running\":%u,\"tickets\":%u,"
            "\"pages_free\":%u,\"tokens_per_s\":%u,\"our_tickets\":%u,\"our_pages\":%u,"
            "\"failures\":%u},"
            "\"capacity\":{\"pages\":%u,\"page_tokens\":%u,\"max_context\":%u,\"max_batch\":%u,"
            "\"max_tickets\":%u,\"chunk_tokens\":%u,\"max_pending_tokens\":%u},\"status\":",
            w->role == WIRE_PREFILL_ROLE ? "prefill" : "decode", rtr_worker_state_name(w),
            (unsigned long long)w->incarnation, (unsigned long long)(now - w->heard_ms),
            w->beat.queued_requests, w->beat.queued_tokens, w->beat.running, w->beat.tickets,
            w->beat.pages_free, w->beat.tokens_per_s, w->tickets, w->held_pages, w->failures,
            w->pages, w->page_tokens, w->max_context, w->max_batch, w->max_tickets, w->chunk_tokens,
            w->max_pending_tokens);
        json_put_string(out, w->status_url, strlen(w->status_url));
        tow_buf_puts(out, ",\"pairs\":[");
        bool first_pair = true;
        for (uint32_t k = 0; k < RTR_MAX_WORKERS; k++) {
            if (g->workers[k].state == RTR_GONE || g->workers[k].role == w->role) continue;
            if (!first_pair) tow_buf_putc(out, ',');
            first_pair = false;
            pair_json(g, i, k, out);
        }
        tow_buf_puts(out, "]}");
    }
    tow_buf_putc(out, ']');
}

static void refused_json(void *self, struct tow_buf *out)
{
    struct rtr_cluster *c = self;
    const struct rtr_registry *g = rtr_route_registry(c->route);
    const struct rtr_refused *f;
    uint64_t now = now_ms(c);
    bool first = true;
    tow_buf_putc(out, '[');
    for (uint32_t at = 0; (f = rtr_registry_next_refused(g, &at, now)); first = false) {
        tow_buf_puts(out, first ? "{\"name\":" : ",{\"name\":");
        json_put_string(out, f->name, strlen(f->name));
        tow_buf_printf(out, ",\"role\":\"%s\",\"field\":",
                       f->role == WIRE_PREFILL_ROLE ? "prefill" : "decode");
        json_put_string(out, f->field, strlen(f->field));
        tow_buf_puts(out, ",\"why\":");
        json_put_string(out, f->why, strlen(f->why));
        tow_buf_printf(out, ",\"times\":%llu,\"last_ms\":%llu}", (unsigned long long)f->times,
                       (unsigned long long)(now - f->last_ms));
    }
    tow_buf_putc(out, ']');
}

static int drain_worker(void *self, const char *name, struct tow_err *err)
{
    struct rtr_cluster *c = self;
    struct rtr_actions acts;
    rtr_actions_init(&acts);
    int rc = rtr_route_drain_worker(c->route, name, err, &acts);
    perform(c, &acts);
    rtr_actions_fini(&acts);
    return rc;
}

const struct rtr_backend rtr_cluster_backend = {.room = room,
                                                .submit = submit,
                                                .cancel = cancel,
                                                .cancel_choice = cancel_choice,
                                                .ready = ready,
                                                .context_length = context_length,
                                                .workers_json = workers_json,
                                                .refused_json = refused_json,
                                                .drain_worker = drain_worker};

/* ------------------------------------------------------------------ metrics */

static void collect(void *arg)
{
    struct rtr_cluster *c = arg;
    struct rtr_route_stats s;
    const struct rtr_registry *g = rtr_route_registry(c->route);
    rtr_route_stats(c->route, &s);
    uint32_t prefills = 0, decodes = 0;
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        if (g->workers[i].state == RTR_GONE) continue;
        if (g->workers[i].role == WIRE_PREFILL_ROLE)
            prefills++;
        else
            decodes++;
    }
    const double gauges[] = {
        s.queued,  s.reserving, s.prefilling, s.streaming, (double)s.waiting_tokens,
        s.tickets, prefills,    decodes};
    const uint64_t counts[] = {s.started, s.finished,      s.failed,  s.cancelled,
                               s.refused, s.attempts,      s.retries, s.pushed_back,
                               s.denied,  s.output_tokens, s.relinks, g->refusals};
    for (int i = 0; i < 8; i++) tow_gauge_set(c->g[i], gauges[i]);
    for (int i = 0; i < 12; i++) tow_counter_follow(c->c[i], counts[i]);
}

static void make_metrics(struct rtr_cluster *c, struct tow_metrics *m)
{
    static const char *const states[] = {"queued", "reserving", "prefilling", "streaming"};
    static const char *const counters[][2] = {
        {"runs_started_total", "choices accepted"},
        {"runs_finished_total", "choices that ended with an answer"},
        {"runs_failed_total", "choices that ended with an error"},
        {"runs_cancelled_total", "choices cancelled by client, stop string or deadline"},
        {"runs_refused_total", "choices refused at admission"},
        {"attempts_total", "tickets made"},
        {"retries_total", "attempts after a failure"},
        {"pushed_back_total", "attempts that gave way for pages"},
        {"denied_total", "reservations or prefills denied by a worker"},
        {"output_tokens_total", "tokens sent on to clients"},
        {"relinks_asked_total", "workers told to make their data link anew"},
        {"joins_refused_total", "workers turned away, each time they knock"}};
    for (int i = 0; i < 4; i++) {
        const char *labels[] = {"state", states[i], NULL};
        c->g[i] = tow_gauge(m, "runs", "choices under way, by state", labels);
    }
    c->g[4] = tow_gauge(m, "queued_tokens", "prompt tokens that wait", NULL);
    c->g[5] = tow_gauge(m, "tickets", "live tickets, those being wound up included", NULL);
    static const char *const prefill[] = {"role", "prefill", NULL}, *const decode[] = {
                                                                        "role", "decode", NULL};
    c->g[6] = tow_gauge(m, "workers", "workers joined", prefill);
    c->g[7] = tow_gauge(m, "workers", "workers joined", decode);
    for (int i = 0; i < 12; i++) c->c[i] = tow_counter(m, counters[i][0], counters[i][1], NULL);
    tow_metrics_on_print(m, collect, c);
}

/* ------------------------------------------------------------------ life */

static uint64_t kernel_random(void *arg)
{
    (void)arg;
    return tow_random_u64();
}

int rtr_cluster_open(struct rtr_cluster **out, struct net_loop *loop, const char *control_url,
                     const struct rtr_route_config *cfg, struct tow_metrics *metrics,
                     struct tow_err *err)
{
    static const struct net_ctl_hooks hooks = {on_open, on_frame, on_close, NULL};
    struct rtr_cluster *c = calloc(1, sizeof *c);
    struct rtr_route_config rc_cfg = *cfg;
    int rc;
    if (!c) return tow_fail(err, TOW_ENOMEM, "cluster: out of memory");
    c->loop = loop;
    tow_list_init(&c->conns);
    rtr_actions_init(&c->actions);
    c->frame = malloc(WIRE_MAX_BODY + WIRE_HEADER_BYTES);
    c->top = malloc((size_t)WIRE_MAX_BATCH * RTR_MAX_TOP * sizeof *c->top);
    if (!rc_cfg.random) rc_cfg.random = kernel_random;
    rc = c->frame && c->top ? rtr_route_new(&c->route, &rc_cfg, err)
                            : tow_fail(err, TOW_ENOMEM, "cluster: out of memory");
    if (rc == 0) {
        rc = net_ctl_listen(&c->server, loop, control_url, NULL, &hooks, c, err);
        if (rc < 0) tow_note(err, "--control");
    }
    if (rc == 0) rc = net_timer_open(&c->tick, loop, on_tick, c, err);
    if (rc < 0) {
        rtr_cluster_close(c);
        return rc;
    }
    if (metrics) make_metrics(c, metrics);
    net_timer_start(c->tick, TICK_MS, TICK_MS);
    *out = c;
    return 0;
}

const char *rtr_cluster_url(const struct rtr_cluster *c)
{
    return net_ctl_server_url(c->server);
}

void rtr_cluster_drain(struct rtr_cluster *c, uint32_t limit_ms)
{
    struct rtr_event ev = {.kind = RTR_ON_DRAIN, .limit_ms = limit_ms};
    feed(c, &ev);
}

bool rtr_cluster_drained(const struct rtr_cluster *c)
{
    return c->drained;
}

bool rtr_cluster_cut(const struct rtr_cluster *c)
{
    return c->cut;
}

void rtr_cluster_close(struct rtr_cluster *c)
{
    if (!c) return;
    c->closing = true;
    net_timer_close(c->tick);
    net_ctl_server_close(c->server);
    /* The connections' last callbacks come in these turns; they find closing set. */
    for (int i = 0; i < 1000 && !tow_list_empty(&c->conns); i++) net_loop_turn(c->loop, 1);
    if (c->route) rtr_route_free(c->route);
    rtr_actions_fini(&c->actions);
    free(c->frame);
    free(c->top);
    free(c);
}
