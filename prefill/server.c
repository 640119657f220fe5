/* prefill/server.c - see server.h. Events of routers, mover and engine go into the machine; each
 * action it answers with is performed here, in order. An action that fails at once becomes an
 * event of its own, taken after the list is done. */
#include "prefill/server.h"

#include "common/base/err.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/worker/cache.h"
#include "prefill/sched.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_LATER = 64, MAX_PAIRS = 256, MAX_JOBS = 1024, N_TAILS = 64, OFFER_PARTS = 64 };

/* A decode worker that a router asked us to prove a link to. */
struct pair {
    uint64_t owner, incarnation;
    char name[WIRE_MAX_NAME + 1];
};

/* What the engine needs of one job; pre_job.user. */
struct engine_job {
    struct model_sampling sampling;
    struct model_bias *bias; /* owned */
};

/* An offer whose pages are on their way from the device. It knows nothing of its job, which may end
 * before they are there: an offer for a ticket that has ended is nothing to the mover. */
struct leaving {
    struct tow_list node; /* server.leaving, oldest first */
    uint64_t number;      /* of work_cache_out() */
    struct kv_ticket ticket;
    uint32_t n, note_bytes;
    uint8_t note[KV_MOVER_NOTE_MAX];
    struct kv_offer parts[]; /* [n] the tail last, if it is among them */
};

struct server {
    struct work *w;
    struct pre_sched *sched;
    struct tow_list leaving;
    struct pre_actions actions;
    struct pre_event later[MAX_LATER];
    int n_later;
    struct pair pairs[MAX_PAIRS];
    int n_pairs;
    struct work_step step;
    struct work_item item;
    struct tow_err step_err;
    uint32_t step_tokens;
    struct tow_gauge *g[5];
    struct tow_counter *c[8];
};

/* A pass reads every expert that one of its tokens chose: on a GPU those of 8,192 tokens take three
 * to four times as long as those of 512 (docs/performance.md). On the CPU sums bind long before. */
enum { CHUNK_TOKENS_GPU = 8192, CHUNK_TOKENS_CPU = 512 }; /* as --help has them below */
static int64_t chunk_tokens, max_pending_tokens = 262144;
static const struct tow_opt options[] = {
    {.name = "chunk-tokens",
     .type = TOW_OPT_INT,
     .out = &chunk_tokens,
     .otherwise = "512, on a GPU 8192",
     .min = 1,
     .max = 65536,
     .unit = "tokens",
     .help = "prompt tokens of one pass"},
    {.name = "max-pending-tokens",
     .type = TOW_OPT_INT,
     .out = &max_pending_tokens,
     .def = "262144",
     .min = 16, /* the least context, and more than a warm-up has */
     .max = UINT32_MAX,
     .unit = "tokens",
     .help = "prompt tokens queued and not computed; more are refused"},
};

static int plan(struct work *w, struct tow_err *err)
{
    (void)err;
    if (chunk_tokens == 0)
        chunk_tokens =
            strncmp(w->set.engine.device, "cuda:", 5) == 0 ? CHUNK_TOKENS_GPU : CHUNK_TOKENS_CPU;
    w->max_rows = (int32_t)chunk_tokens;
    w->max_samples = 1;
    w->max_batch = MAX_JOBS;
    w->max_tickets = MAX_JOBS;
    w->n_tails = N_TAILS;
    w->chunk_tokens = (uint32_t)chunk_tokens;
    w->max_pending_tokens = (uint32_t)max_pending_tokens;
    return 0;
}

/* ------------------------------------------------------------------ actions */

static void later(struct server *p, const struct pre_event *ev)
{
    tow_assert(p->n_later < MAX_LATER);
    p->later[p->n_later++] = *ev;
}

static struct kv_ticket ticket_of(struct wire_ticket t)
{
    return (struct kv_ticket){t.id, t.nonce};
}

static void open_move(struct server *p, const struct pre_action *a)
{
    const struct pre_job *j = a->job;
    struct kv_send s = {.ticket = ticket_of(j->ticket),
                        .peer = j->decode,
                        .incarnation = j->decode_incarnation,
                        .n_pages = a->n,
                        .lease_ms = j->lease_ms};
    int rc = kv_mover_send(p->w->mover, &s);
    if (rc < 0) {
        struct pre_event ev = {.kind = PRE_ON_ENDED, .ticket = j->ticket, .code = rc};
        later(p, &ev);
    }
}

static bool open_engine(struct pre_job *j)
{
    struct engine_job *e = calloc(1, sizeof *e);
    uint32_t n_bias = wire_n_bias(&j->sampling);
    if (!e) return false;
    j->user = e;
    e->bias = malloc((n_bias ? n_bias : 1) * sizeof *e->bias);
    if (!e->bias) return false;
    work_sampling(&j->sampling, e->bias, &e->sampling);
    return true;
}

static void close_engine(struct pre_job *j)
{
    struct engine_job *e = j->user;
    if (!e) return;
    free(e->bias);
    free(e);
    j->user = NULL;
}

static void start_chunk(struct server *p, const struct pre_action *a)
{
    struct pre_job *j = a->job;
    struct engine_job *e = j->user;
    p->item = (struct work_item){.seq = {.n_rows = (int32_t)a->n,
                                         .pos0 = a->from,
                                         .page_ids = j->table.ids,
                                         .n_pages = (int32_t)j->table.n_pages,
                                         .tail = kv_pool_tail(p->w->pool, j->table.tail),
                                         .topk = work_topk(p->w, j->sampling.index_topk),
                                         .shadowed = work_capture_shadowed(j->capture)},
                                 .ids = (const int32_t *)j->tokens + a->from,
                                 .sample = a->last,
                                 .sampling = e->sampling,
                                 .output = (const int32_t *)j->tokens + j->n_prompt,
                                 .n_output = (int32_t)(j->n_tokens - j->n_prompt),
                                 .index = j->n_tokens - j->n_prompt,
                                 .whole = {.ids = j->table.ids + j->n_offered, .n = a->n_whole}};
    if (a->last) p->item.whole.tail = p->item.seq.tail;
    if (a->last) p->item.capture = work_capture_begin(j->capture, j->n_tokens - j->n_prompt);
    p->step = (struct work_step){.items = &p->item, .n = 1, .err = &p->step_err};
    p->step_tokens = a->n;
    int rc = work_engine_submit(p->w->engine, &p->step);
    tow_assert(rc == 0); /* one chunk at a time, and the queue holds more */
}

static bool is_tail(const struct kv_offer *o)
{
    return o->index == KV_PART_TAIL;
}

static void add_digests(const struct server *p, struct leaving *l)
{
    const struct work_cache *c = p->w->cache;
    for (uint32_t i = 0; i < l->n; i++) {
        struct kv_offer *o = &l->parts[i];
        if (is_tail(o)) {
            const kv_tail_id id = (kv_tail_id)(o->offset / (uint64_t)p->w->layout->tail_bytes);
            o->digest = work_cache_tail_digest(c, kv_pool_tail(p->w->pool, id));
        } else {
            const uint32_t id = (uint32_t)(o->offset / (uint64_t)p->w->layout->page_bytes);
            o->digest = work_cache_page_digest(c, id);
        }
    }
}

/* What is there goes to the mover; the tail in an offer of its own. Frees l. */
static int ship(struct server *p, struct leaving *l)
{
    int rc = 0;
    add_digests(p, l);
    for (uint32_t i = 0, n; i < l->n && rc == 0; i += n) {
        const bool tail = is_tail(&l->parts[i]);
        for (n = 1; !tail && n < OFFER_PARTS && i + n < l->n && !is_tail(&l->parts[i + n]);) n++;
        rc = kv_mover_offer(p->w->mover, l->ticket, &l->parts[i], n, tail ? l->note : NULL,
                            tail ? l->note_bytes : 0);
    }
    free(l);
    return rc;
}

static uint32_t write_note(const struct pre_job *j, uint8_t *bytes)
{
    struct wire_writer note = {.data = bytes, .cap = KV_MOVER_NOTE_MAX};
    const struct wire_first first = {.position = j->n_tokens,
                                     .token = j->first,
                                     .has_logprobs = j->has_logprobs,
                                     .n_top = j->n_top,
                                     .logprobs = {j->logprobs, j->logprob_bytes}};
    wire_put_first(&note, &first);
    tow_assert(!note.failed);
    return (uint32_t)note.len;
}

/* Takes the pages from the device, and offers them when they are there. */
static int begin_offer(struct server *p, const struct pre_action *a)
{
    const struct pre_job *j = a->job;
    struct work_cache_parts parts = {.ids = j->table.ids + a->from, .n = a->n};
    struct leaving *l = calloc(1, sizeof *l + ((size_t)a->n + 1) * sizeof l->parts[0]);
    if (!l) return TOW_ENOMEM;
    l->ticket = ticket_of(j->ticket);
    for (uint32_t i = 0; i < a->n; i++)
        l->parts[l->n++] = (struct kv_offer){
            .index = a->from + i, .offset = parts.ids[i] * (uint64_t)p->w->layout->page_bytes};
    if (a->tail) {
        parts.tail = kv_pool_tail(p->w->pool, j->table.tail);
        l->note_bytes = write_note(j, l->note);
        l->parts[l->n++] = (struct kv_offer){
            .index = KV_PART_TAIL, .offset = j->table.tail * (uint64_t)p->w->layout->tail_bytes};
    }
    const int rc = work_cache_out(p->w->cache, &parts, &l->number);
    if (rc < 0) {
        free(l);
        return rc;
    }
    if (l->number == 0) return ship(p, l);
    tow_list_append(&p->leaving, &l->node);
    return 0;
}

static void offer(struct server *p, const struct pre_action *a)
{
    const int rc = begin_offer(p, a);
    if (rc < 0) {
        struct pre_event ev = {.kind = PRE_ON_UNOFFERED, .ticket = a->job->ticket, .code = rc};
        later(p, &ev);
    }
}

static void perform(struct server *p)
{
    for (uint32_t i = 0; i < p->actions.n; i++) {
        struct pre_action *a = &p->actions.items[i];
        switch (a->kind) {
        case PRE_DO_SEND: work_send(p->w, a->owner, &a->msg); break;
        case PRE_DO_OPEN_MOVE: open_move(p, a); break;
        case PRE_DO_CANCEL_MOVE: kv_mover_cancel(p->w->mover, ticket_of(a->ticket), a->code); break;
        case PRE_DO_TOUCH: kv_mover_touch(p->w->mover, ticket_of(a->ticket)); break;
        case PRE_DO_OPEN:
            if (!open_engine(a->job)) {
                struct tow_err err;
                tow_fail(&err, TOW_ENOMEM, "no memory for a job");
                work_die(p->w, &err);
                return;
            }
            break;
        case PRE_DO_CLOSE: close_engine(a->job); break;
        case PRE_DO_CHUNK: start_chunk(p, a); break;
        case PRE_DO_OFFER: offer(p, a); break;
        case PRE_DO_DRAINED: work_drained(p->w, a->cut); break;
        }
    }
}

static void feed(struct server *p, struct pre_event *ev)
{
    ev->now_ms = work_now_ms(p->w);
    pre_actions_clear(&p->actions);
    pre_sched_step(p->sched, ev, &p->actions);
    perform(p);
    while (p->n_later > 0) {
        struct pre_event next = p->later[0];
        memmove(p->later, p->later + 1, (size_t)--p->n_later * sizeof *p->later);
        next.now_ms = ev->now_ms;
        pre_actions_clear(&p->actions);
        pre_sched_step(p->sched, &next, &p->actions);
        perform(p);
    }
}

/* ------------------------------------------------------------------ pairs */

static void pair_add(struct server *p, uint64_t owner, const struct wire_pair *m)
{
    char name[WIRE_MAX_NAME + 1];
    wire_text_copy(m->name, name, sizeof name);
    struct pair *slot = NULL;
    for (int i = 0; i < p->n_pairs; i++)
        if (p->pairs[i].owner == owner && !strcmp(p->pairs[i].name, name)) slot = &p->pairs[i];
    if (!slot) {
        if (p->n_pairs == MAX_PAIRS) {
            struct wire_msg no = {
                .type = WIRE_PAIRED_MSG,
                .paired = {.name = m->name,
                           .incarnation = m->incarnation,
                           .note = wire_text("this worker keeps at most 256 links")}};
            work_send(p->w, owner, &no);
            return;
        }
        slot = &p->pairs[p->n_pairs++];
    }
    slot->owner = owner;
    slot->incarnation = m->incarnation;
    memcpy(slot->name, name, sizeof name);
    int rc =
        work_connect_peer(p->w, name, m->incarnation, m->data_address.data, m->data_address.len);
    if (rc < 0) {
        struct wire_msg no = {.type = WIRE_PAIRED_MSG,
                              .paired = {.name = m->name,
                                         .incarnation = m->incarnation,
                                         .note = wire_text(tow_err_text(rc))}};
        work_send(p->w, owner, &no);
    }
}

static void pair_drop(struct server *p, uint64_t owner, const struct wire_unpair *m)
{
    char name[WIRE_MAX_NAME + 1];
    wire_text_copy(m->name, name, sizeof name);
    for (int i = 0; i < p->n_pairs; i++)
        if (p->pairs[i].owner == owner && !strcmp(p->pairs[i].name, name) &&
            p->pairs[i].incarnation == m->incarnation)
            p->pairs[i--] = p->pairs[--p->n_pairs];
    work_drop_peer(p->w, name, m->incarnation);
}

static void tell_pair(struct server *p, const struct kv_mover_event *ev, bool up)
{
    if (up)
        tow_info("%s: decode %s up: %s by %s, %.0f MB/s, %.0f us a page", p->w->name, ev->peer,
                 ev->transport, ev->method == KV_MOVE_GET ? "get" : "am", ev->mb_per_s, ev->us);
    else
        tow_warn("%s: decode %s down: %s", p->w->name, ev->peer, ev->text);
    struct wire_msg m = {
        .type = WIRE_PAIRED_MSG,
        .paired = {.name = wire_text(ev->peer),
                   .incarnation = ev->incarnation,
                   .ok = up,
                   .transport = wire_text(ev->transport),
                   .method = ev->method == KV_MOVE_GET ? WIRE_METHOD_GET : WIRE_METHOD_AM,
                   .mb_per_s = (uint32_t)ev->mb_per_s,
                   .latency_us = (uint32_t)ev->us,
                   .note = wire_text(up ? "" : ev->text)}};
    struct wire_msg silent = {
        .type = WIRE_UNANSWERED_MSG,
        .unanswered = {.name = wire_text(ev->peer), .incarnation = ev->incarnation}};
    for (int i = 0; i < p->n_pairs; i++) {
        if (strcmp(p->pairs[i].name, ev->peer) || p->pairs[i].incarnation != ev->incarnation)
            continue;
        work_send(p->w, p->pairs[i].owner, &m);
        if (!up && ev->code == TOW_ETIME) work_send(p->w, p->pairs[i].owner, &silent);
    }
}

/* ------------------------------------------------------------------ hooks */

static void on_message(void *self, uint64_t owner, const struct wire_msg *m)
{
    struct server *p = self;
    if (m->type == WIRE_PAIR_MSG) {
        pair_add(p, owner, &m->pair);
    } else if (m->type == WIRE_UNPAIR_MSG) {
        pair_drop(p, owner, &m->unpair);
    } else {
        struct pre_event ev = {.kind = PRE_ON_MESSAGE, .owner = owner, .msg = m};
        feed(p, &ev);
    }
}

static void on_router_lost(void *self, uint64_t owner)
{
    struct server *p = self;
    for (int i = 0; i < p->n_pairs; i++)
        if (p->pairs[i].owner == owner) p->pairs[i--] = p->pairs[--p->n_pairs];
    struct pre_event ev = {.kind = PRE_ON_ROUTER_LOST, .owner = owner};
    feed(p, &ev);
}

static void on_move(void *self, const struct kv_mover_event *m)
{
    struct server *p = self;
    struct pre_event ev = {
        .ticket = {m->ticket.id, m->ticket.nonce}, .index = m->index, .code = m->code};
    switch (m->kind) {
    case KV_MOVER_PEER_UP: tell_pair(p, m, true); return;
    case KV_MOVER_PEER_DOWN: tell_pair(p, m, false); return;
    case KV_MOVER_PART:
        ev.kind = PRE_ON_PART;
        for (uint32_t i = 1; i < m->n_parts; i++, ev.index++) feed(p, &ev);
        break;
    case KV_MOVER_ENDED: ev.kind = PRE_ON_ENDED; break;
    case KV_MOVER_RELINKED: return; /* not for the roles */
    }
    feed(p, &ev);
}

static void on_stepped(void *self, struct work_step *step)
{
    struct server *p = self;
    uint8_t row[4 + 8 * WIRE_MAX_TOP];
    struct pre_event ev = {.kind = PRE_ON_CHUNK,
                           .code = step->rc < 0 ? step->rc : p->item.choice.rc};
    work_capture_warn(p->w->name, p->item.capture);
    if (step->rc < 0)
        tow_error("%s: chunk: %s", p->w->name, p->step_err.msg);
    else
        work_measured(p->w, p->step_tokens, step->busy_us);
    if (ev.code == 0 && p->item.sample) {
        ev.first = (uint32_t)p->item.choice.id;
        if (p->item.sampling.n_logprobs >= 0) {
            ev.has_logprobs = true;
            ev.n_top = (uint8_t)p->item.sampling.n_logprobs;
            ev.logprobs =
                (struct wire_bytes){row, work_pack_logprobs(&p->item.choice, ev.n_top, row)};
        }
    }
    feed(p, &ev);
}

static void on_landed(void *self)
{
    struct server *p = self;
    const uint64_t landed = work_cache_landed(p->w->cache);
    while (!tow_list_empty(&p->leaving)) {
        struct leaving *l = TOW_CONTAINER(p->leaving.next, struct leaving, node);
        struct pre_event ev = {.kind = PRE_ON_UNOFFERED, .ticket = {l->ticket.id, l->ticket.nonce}};
        if (l->number > landed) return;
        tow_list_remove(&l->node);
        ev.code = ship(p, l);
        if (ev.code < 0) feed(p, &ev);
    }
}

static void on_tick(void *self, uint64_t now_ms)
{
    struct pre_event ev = {.kind = PRE_ON_TICK, .now_ms = now_ms};
    feed(self, &ev);
}

static void on_drain(void *self, uint32_t limit_ms)
{
    struct pre_event ev = {.kind = PRE_ON_DRAIN, .limit_ms = limit_ms};
    feed(self, &ev);
}

static void load(void *self, struct wire_heartbeat *hb)
{
    struct server *p = self;
    struct pre_stats s;
    pre_sched_stats(p->sched, &s);
    hb->queued_requests = s.queued;
    hb->queued_tokens = s.queued_tokens;
    hb->running = s.active; /* shipping waits for the other side, not for this engine */
    hb->tickets = s.queued + s.active + s.shipping + s.closing;
    hb->pages_free = s.pages_free;
    hb->progress = s.progress;
}

static void collect(void *self)
{
    struct server *p = self;
    struct pre_stats s;
    pre_sched_stats(p->sched, &s);
    const double g[] = {s.queued, s.active, s.shipping, s.closing, s.queued_tokens};
    const uint64_t c[] = {s.accepted,  s.denied,   s.finished,      s.failed,
                          s.cancelled, s.orphaned, s.prompt_tokens, s.chunks};
    for (int i = 0; i < 5; i++) tow_gauge_set(p->g[i], g[i]);
    for (int i = 0; i < 8; i++) tow_counter_follow(p->c[i], c[i]);
}

static void make_metrics(struct server *p)
{
    static const char *const states[] = {"queued", "active", "shipping", "closing"};
    static const char *const names[] = {"tickets_accepted_total",  "tickets_denied_total",
                                        "tickets_finished_total",  "tickets_failed_total",
                                        "tickets_cancelled_total", "tickets_orphaned_total",
                                        "prompt_tokens_total",     "chunks_total"};
    for (int i = 0; i < 4; i++) {
        const char *labels[] = {"state", states[i], NULL};
        p->g[i] = tow_gauge(p->w->metrics, "tickets", "live tickets by state", labels);
    }
    p->g[4] = tow_gauge(p->w->metrics, "queued_tokens", "prompt tokens not computed yet", NULL);
    for (int i = 0; i < 8; i++) p->c[i] = tow_counter(p->w->metrics, names[i], "since start", NULL);
}

static void stop(void *self)
{
    struct server *p = self;
    TOW_LIST_EACH_SAFE (n, &p->leaving) free(TOW_CONTAINER(n, struct leaving, node));
    pre_actions_fini(&p->actions);
    if (p->sched) pre_sched_free(p->sched);
    free(p);
}

static int start(struct work *w, void **self, struct tow_err *err)
{
    struct server *p = calloc(1, sizeof *p);
    if (!p) return tow_fail(err, TOW_ENOMEM, "prefill: out of memory");
    p->w = w;
    tow_list_init(&p->leaving);
    pre_actions_init(&p->actions);
    const struct pre_sched_config c = {.page_tokens = (uint32_t)w->layout->page_tokens,
                                       .max_context = w->max_context,
                                       .chunk_tokens = w->chunk_tokens,
                                       .max_pending_tokens = w->max_pending_tokens,
                                       .max_jobs = MAX_JOBS,
                                       .shadows = w->layout->shadow_bytes > 0,
                                       .n_vocab = (uint32_t)model_peek_weights(w->model)->shape.V};
    int rc = pre_sched_new(&p->sched, &c, w->pool, err);
    if (rc < 0) {
        stop(p);
        return rc;
    }
    make_metrics(p);
    *self = p;
    return 0;
}

const struct work_role pre_role = {.program = "towpath-prefill",
                                   .about = "turns prompts into KV pages",
                                   .role = WIRE_PREFILL_ROLE,
                                   .options = options,
                                   .n_options = sizeof options / sizeof *options,
                                   .plan = plan,
                                   .start = start,
                                   .stop = stop,
                                   .on_message = on_message,
                                   .on_router_lost = on_router_lost,
                                   .on_move = on_move,
                                   .on_landed = on_landed,
                                   .on_stepped = on_stepped,
                                   .on_tick = on_tick,
                                   .on_drain = on_drain,
                                   .load = load,
                                   .collect = collect};
