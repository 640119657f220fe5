/* decode/server.c - see server.h. Events of routers, mover and engine go into the machine; each
 * action it answers with is performed here, in order. An action that fails at once becomes an
 * event of its own, taken after the list is done. */
#include "decode/server.h"

#include "common/base/err.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/worker/cache.h"
#include "decode/sched.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_BATCH = 4096, RESERVE_TOKENS = 256, MAX_LATER = 64 };

/* What the engine needs of one sequence; dec_seq.user. */
struct engine_seq {
    struct model_sampling sampling;
    struct model_bias *bias; /* owned */
    int32_t *output;         /* owned; every output token so far */
    int32_t n_output, cap;
};

struct server {
    struct work *w;
    struct dec_sched *sched;
    struct dec_actions actions;
    struct dec_event later[MAX_LATER]; /* ends of moves that could not even start */
    int n_later;
    struct work_step step;
    bool await;               /* something was copied to the device since the last step was given */
    struct work_item *items;  /* owned [max_batch] */
    int32_t *ids;             /* owned [max_batch] */
    struct dec_token *tokens; /* owned [max_batch] */
    uint8_t *logprobs;        /* owned [max_batch][4 + 8 * WIRE_MAX_TOP] */
    uint64_t *offsets;        /* owned [n_pages] */
    struct tow_err step_err;
    struct tow_gauge *g[8];
    struct tow_counter *c[8];
};
enum { ROW = 4 + 8 * WIRE_MAX_TOP };

static int64_t max_batch = 32, reserve_tokens = RESERVE_TOKENS;
static const struct tow_opt options[] = {
    {.name = "max-batch",
     .type = TOW_OPT_INT,
     .out = &max_batch,
     .def = "32",
     .min = 1,
     .max = MAX_BATCH,
     .unit = "sequences",
     .help = "sequences in one step"},
    {.name = "reserve-tokens",
     .type = TOW_OPT_INT,
     .out = &reserve_tokens,
     .def = "256",
     .min = 1,
     .max = 1 << 20,
     .unit = "tokens",
     .help = "output tokens for which pages are held ahead"},
};

static int plan(struct work *w, struct tow_err *err)
{
    (void)err;
    w->max_rows = w->max_samples = (int32_t)max_batch;
    w->max_batch = (uint32_t)max_batch;
    w->reserve_tokens = (uint32_t)reserve_tokens;
    w->max_tickets = w->n_tails = (uint32_t)(4 * max_batch < 16 ? 16 : 4 * max_batch);
    w->tails_of_batch = true;
    return 0;
}

/* ------------------------------------------------------------------ engine state of a sequence */

static void engine_close(struct dec_seq *s)
{
    struct engine_seq *e = s->user;
    if (!e) return;
    free(e->bias);
    free(e->output);
    free(e);
    s->user = NULL;
}

static bool engine_open(struct dec_seq *s)
{
    struct engine_seq *e = calloc(1, sizeof *e);
    uint32_t n_bias = wire_n_bias(&s->sampling);
    if (!e) return false;
    s->user = e;
    e->bias = malloc((n_bias ? n_bias : 1) * sizeof *e->bias);
    if (!e->bias) return false;
    work_sampling(&s->sampling, e->bias, &e->sampling);
    e->output = malloc(((size_t)s->n_prior + s->max_output + 1) * sizeof *e->output);
    if (!e->output) return false;
    for (uint32_t i = 0; i < s->n_prior; i++) e->output[e->n_output++] = (int32_t)s->outputs[i];
    return true;
}

/* ------------------------------------------------------------------ actions */

static void later(struct server *d, const struct dec_event *ev)
{
    tow_assert(d->n_later < MAX_LATER);
    d->later[d->n_later++] = *ev;
}

static void expect(struct server *d, struct dec_seq *s, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        d->offsets[i] = (uint64_t)s->table.ids[i] * (uint64_t)d->w->layout->page_bytes;
    struct kv_expect e = {.ticket = {s->ticket.id, s->ticket.nonce},
                          .peer = s->prefill,
                          .incarnation = s->prefill_incarnation,
                          .page_offsets = d->offsets,
                          .n_pages = n,
                          .tail_offset =
                              (uint64_t)s->table.tail * (uint64_t)d->w->layout->tail_bytes,
                          .lease_ms = s->lease_ms};
    int rc = kv_mover_expect(d->w->mover, &e);
    if (rc < 0) {
        struct dec_event ev = {.kind = DEC_ON_LOADED, .ticket = s->ticket, .code = rc};
        later(d, &ev);
    }
}

static void start_step(struct server *d, struct dec_seq *const *batch, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct dec_seq *s = batch[i];
        struct engine_seq *e = s->user;
        /* The newest output is the next input; it joins the list that penalties look at. */
        if ((uint32_t)e->n_output < s->n_output) e->output[e->n_output++] = (int32_t)s->token;
        d->ids[i] = (int32_t)s->token;
        d->items[i] = (struct work_item){.seq = {.n_rows = 1,
                                                 .pos0 = s->n_cached,
                                                 .page_ids = s->table.ids,
                                                 .n_pages = (int32_t)s->table.n_pages,
                                                 .tail = kv_pool_tail(d->w->pool, s->table.tail),
                                                 .topk = work_topk(d->w, s->sampling.index_topk),
                                                 .shadowed = work_capture_shadowed(s->capture)},
                                         .ids = &d->ids[i],
                                         .sample = true,
                                         .sampling = e->sampling,
                                         .output = e->output,
                                         .n_output = e->n_output,
                                         .index = s->n_output,
                                         .capture = work_capture_begin(s->capture, s->n_output)};
    }
    d->step = (struct work_step){
        .items = d->items, .n = (int32_t)n, .await = d->await, .err = &d->step_err};
    d->await = false;
    int rc = work_engine_submit(d->w->engine, &d->step);
    tow_assert(rc == 0); /* one step at a time, and the queue holds more */
}

/* What has arrived goes to the device, beside the step that runs; a sequence that ended with its
 * first token has given it back already. */
static int copy_in(struct server *d, const struct dec_seq *s)
{
    const int64_t n = kern_kv_pages_for(s->n_tokens, d->w->layout->page_tokens);
    if (!s->table.has_tail) return 0;
    const struct work_cache_parts parts = {
        .ids = s->table.ids,
        .n = work_capture_pages(work_capture_shadowed(s->capture), (uint32_t)n),
        .tail = kv_pool_tail(d->w->pool, s->table.tail)};
    d->await = true;
    return work_cache_in(d->w->cache, &parts);
}

/* False: the process ends. */
static bool open_seq(struct server *d, struct dec_seq *s)
{
    struct tow_err err;
    const int rc = engine_open(s) ? copy_in(d, s) : TOW_ENOMEM;
    if (rc == 0) return true;
    tow_fail(&err, rc, "a sequence that arrived: %s", tow_err_text(rc));
    work_die(d->w, &err);
    return false;
}

static void perform(struct server *d)
{
    for (uint32_t i = 0; i < d->actions.n; i++) {
        struct dec_action *a = &d->actions.items[i];
        switch (a->kind) {
        case DEC_DO_SEND: work_send(d->w, a->owner, &a->msg); break;
        case DEC_DO_EXPECT: expect(d, a->seq, a->n); break;
        case DEC_DO_CANCEL_MOVE:
            kv_mover_cancel(d->w->mover, (struct kv_ticket){a->ticket.id, a->ticket.nonce},
                            a->code);
            break;
        case DEC_DO_OPEN:
            if (!open_seq(d, a->seq)) return;
            break;
        case DEC_DO_CLOSE: engine_close(a->seq); break;
        case DEC_DO_STEP: start_step(d, a->batch, a->n); break;
        case DEC_DO_DRAINED: work_drained(d->w, a->cut); break;
        }
    }
}

static void feed(struct server *d, struct dec_event *ev)
{
    ev->now_ms = work_now_ms(d->w);
    dec_actions_clear(&d->actions);
    dec_sched_step(d->sched, ev, &d->actions);
    perform(d);
    while (d->n_later > 0) {
        struct dec_event next = d->later[0];
        memmove(d->later, d->later + 1, (size_t)--d->n_later * sizeof *d->later);
        next.now_ms = ev->now_ms;
        dec_actions_clear(&d->actions);
        dec_sched_step(d->sched, &next, &d->actions);
        perform(d);
    }
}

/* ------------------------------------------------------------------ hooks */

static void on_message(void *self, uint64_t owner, const struct wire_msg *m)
{
    struct server *d = self;
    if (m->type == WIRE_UNPAIR_MSG) {
        char name[WIRE_MAX_NAME + 1];
        work_drop_peer(d->w, wire_text_copy(m->unpair.name, name, sizeof name),
                       m->unpair.incarnation);
        return;
    }
    struct dec_event ev = {.kind = DEC_ON_MESSAGE, .owner = owner, .msg = m};
    feed(d, &ev);
}

static void on_router_lost(void *self, uint64_t owner)
{
    struct dec_event ev = {.kind = DEC_ON_ROUTER_LOST, .owner = owner};
    feed(self, &ev);
}

static void on_move(void *self, const struct kv_mover_event *m)
{
    struct server *d = self;
    struct dec_event ev = {.ticket = {m->ticket.id, m->ticket.nonce}};
    struct wire_first note;
    switch (m->kind) {
    case KV_MOVER_PEER_UP:
        tow_info("%s: prefill %s up, %s", d->w->name, m->peer, m->transport);
        return;
    case KV_MOVER_PEER_DOWN:
        tow_warn("%s: prefill %s down: %s", d->w->name, m->peer, m->text);
        return;
    case KV_MOVER_PART:
        if (m->index == KV_PART_TAIL) return;
        ev.kind = DEC_ON_PART;
        break;
    case KV_MOVER_ENDED:
        ev.kind = DEC_ON_LOADED;
        ev.code = m->code;
        if (m->code == 0) {
            ev.code = wire_get_first(&note, m->note, m->note_bytes);
            if (ev.code == 0) {
                ev.position = note.position;
                ev.first = (struct dec_token){.id = note.token,
                                              .has_logprobs = note.has_logprobs,
                                              .n_top = note.n_top,
                                              .logprobs = note.logprobs};
            }
        }
        break;
    case KV_MOVER_RELINKED: return; /* not for the roles */
    }
    feed(d, &ev);
}

static void on_stepped(void *self, struct work_step *step)
{
    struct server *d = self;
    if (step->rc < 0)
        tow_error("%s: step of %d: %s", d->w->name, step->n, d->step_err.msg);
    else
        work_measured(d->w, (uint32_t)step->n, step->busy_us);
    for (int32_t i = 0; i < step->n; i++) {
        const struct work_item *it = &step->items[i];
        struct dec_token *t = &d->tokens[i];
        work_capture_warn(d->w->name, it->capture);
        *t = (struct dec_token){.code = it->choice.rc};
        if (step->rc < 0 || it->choice.rc < 0) continue;
        t->id = (uint32_t)it->choice.id;
        if (it->sampling.n_logprobs >= 0) {
            t->has_logprobs = true;
            t->n_top = (uint8_t)it->sampling.n_logprobs;
            t->logprobs = (struct wire_bytes){
                d->logprobs + i * ROW,
                work_pack_logprobs(&it->choice, t->n_top, d->logprobs + i * ROW)};
        }
    }
    struct dec_event ev = {.kind = DEC_ON_STEPPED, .code = step->rc, .tokens = d->tokens};
    feed(d, &ev);
}

static void on_tick(void *self, uint64_t now_ms)
{
    struct dec_event ev = {.kind = DEC_ON_TICK, .now_ms = now_ms};
    feed(self, &ev);
}

static void on_drain(void *self, uint32_t limit_ms)
{
    struct dec_event ev = {.kind = DEC_ON_DRAIN, .limit_ms = limit_ms};
    feed(self, &ev);
}

static void load(void *self, struct wire_heartbeat *hb)
{
    struct server *d = self;
    struct dec_stats s;
    dec_sched_stats(d->sched, &s);
    hb->queued_requests = s.reserved + s.loading;
    hb->running = s.ready + s.running;
    hb->tickets = s.reserved + s.loading + s.ready + s.running + s.closing;
    hb->pages_free = s.pages_free;
    hb->progress = s.progress;
}

static void collect(void *self)
{
    struct server *d = self;
    struct dec_stats s;
    dec_sched_stats(d->sched, &s);
    const double g[] = {s.reserved, s.loading, s.ready, s.running, s.closing};
    const uint64_t c[] = {s.granted,   s.denied,      s.finished, s.failed,
                          s.cancelled, s.pushed_back, s.orphaned, s.output_tokens};
    for (int i = 0; i < 5; i++) tow_gauge_set(d->g[i], g[i]);
    for (int i = 0; i < 8; i++) tow_counter_follow(d->c[i], c[i]);
}

static void make_metrics(struct server *d)
{
    static const char *const states[] = {"reserved", "loading", "ready", "running", "closing"};
    static const char *const names[] = {"tickets_granted_total",   "tickets_denied_total",
                                        "tickets_finished_total",  "tickets_failed_total",
                                        "tickets_cancelled_total", "tickets_pushed_back_total",
                                        "tickets_orphaned_total",  "output_tokens_total"};
    for (int i = 0; i < 5; i++) {
        const char *labels[] = {"state", states[i], NULL};
        d->g[i] = tow_gauge(d->w->metrics, "tickets", "live tickets by state", labels);
    }
    for (int i = 0; i < 8; i++) d->c[i] = tow_counter(d->w->metrics, names[i], "since start", NULL);
}

static void stop(void *self)
{
    struct server *d = self;
    dec_actions_fini(&d->actions);
    if (d->sched) dec_sched_free(d->sched);
    free(d->items);
    free(d->ids);
    free(d->tokens);
    free(d->logprobs);
    free(d->offsets);
    free(d);
}

static int start(struct work *w, void **self, struct tow_err *err)
{
    struct server *d = calloc(1, sizeof *d);
    if (!d) return tow_fail(err, TOW_ENOMEM, "decode: out of memory");
    d->w = w;
    dec_actions_init(&d->actions);
    const struct dec_sched_config c = {.page_tokens = (uint32_t)w->layout->page_tokens,
                                       .max_context = w->max_context,
                                       .max_batch = w->max_batch,
                                       .max_tickets = w->max_tickets,
                                       .reserve_tokens = (uint32_t)reserve_tokens,
                                       .shadows = w->layout->shadow_bytes > 0};
    d->items = calloc(w->max_batch, sizeof *d->items);
    d->ids = calloc(w->max_batch, sizeof *d->ids);
    d->tokens = calloc(w->max_batch, sizeof *d->tokens);
    d->logprobs = calloc(w->max_batch, ROW);
    d->offsets = calloc(w->n_pages, sizeof *d->offsets);
    int rc = d->items && d->ids && d->tokens && d->logprobs && d->offsets
                 ? dec_sched_new(&d->sched, &c, w->pool, err)
                 : tow_fail(err, TOW_ENOMEM, "decode: out of memory");
    if (rc < 0) {
        stop(d);
        return rc;
    }
    make_metrics(d);
    *self = d;
    return 0;
}

const struct work_role dec_role = {.program = "towpath-decode",
                                   .about = "turns KV pages into tokens",
                                   .role = WIRE_DECODE_ROLE,
                                   .options = options,
                                   .n_options = sizeof options / sizeof *options,
                                   .plan = plan,
                                   .start = start,
                                   .stop = stop,
                                   .on_message = on_message,
                                   .on_router_lost = on_router_lost,
                                   .on_move = on_move,
                                   .on_stepped = on_stepped,
                                   .on_tick = on_tick,
                                   .on_drain = on_drain,
                                   .load = load,
                                   .collect = collect};
