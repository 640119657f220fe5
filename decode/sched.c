/* decode/sched.c - see sched.h for the rules and seq.h for the chart of one ticket.
 *
 * One step of the engine is in flight at a time. Everything that needs pages of a running sequence
 * to be quiet (growth, push-back of running ones, the next batch) happens between two steps, in
 * next_step().
 * Rejected: reserving prompt + max_tokens up front. Clients rarely give max_tokens, and then a
 * pool would hold only as many sequences as whole contexts fit into it.
 */
#include "decode/sched.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "kernels/kv_layout.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS         1024u /* of the ticket table; tickets are random */
#define CANCEL_AGAIN_MS 1000u

struct dec_sched {
    struct dec_sched_config cfg;
    struct kv_pool *pool; /* borrowed */
    struct tow_list age, turn;
    struct tow_list buckets[BUCKETS];
    struct tow_list dead; /* GONE, freed at the next step call */
    uint32_t n_live;
    struct dec_seq **batch; /* owned, [max_batch]; the step in flight */
    uint32_t n_batch;       /* 0: no step in flight */
    uint32_t in_state[DEC_SEQ_STATES];
    uint32_t growth;             /* pages that the sequences which produce may want next */
    bool draining, drained, cut; /* cut: the drain's limit ended work */
    uint64_t drain_ends_ms;      /* UINT64_MAX: no limit */
    uint64_t cancelled_ms;       /* all of them, last */
    struct dec_stats stats;
};

void dec_actions_init(struct dec_actions *a)
{
    memset(a, 0, sizeof *a);
}
void dec_actions_clear(struct dec_actions *a)
{
    a->n = 0;
}
void dec_actions_fini(struct dec_actions *a)
{
    free(a->items);
    memset(a, 0, sizeof *a);
}

static struct dec_action *act(struct dec_actions *out, enum dec_action_kind kind)
{
    out->items = tow_grow(out->items, out->n, &out->cap, 64, sizeof *out->items);
    tow_assert(out->items); /* a promise already made could not be kept */
    struct dec_action *a = &out->items[out->n++];
    memset(a, 0, sizeof *a);
    a->kind = kind;
    return a;
}

static struct wire_msg *reply(struct dec_actions *out, uint64_t owner, enum wire_type type)
{
    struct dec_action *a = act(out, DEC_DO_SEND);
    a->owner = owner;
    a->msg.type = type;
    return &a->msg;
}

static uint32_t pages_for(const struct dec_sched *d, bool shadowed, uint64_t n_tokens)
{
    return work_capture_pages(
        shadowed, (uint32_t)kern_kv_pages_for((int64_t)n_tokens, (int32_t)d->cfg.page_tokens));
}

/* With the row of its next input. */
static uint32_t next_pages(const struct dec_sched *d, const struct dec_seq *s)
{
    return pages_for(d, work_capture_shadowed(s->capture), (uint64_t)s->n_cached + 1);
}

static struct dec_seq *find(struct dec_sched *d, struct wire_ticket t)
{
    TOW_LIST_EACH (n, &d->buckets[t.id % BUCKETS]) {
        struct dec_seq *s = TOW_CONTAINER(n, struct dec_seq, by_id);
        if (s->ticket.id == t.id) return s;
    }
    return NULL;
}

/* The nonce keeps a forged or stale reference from reaching another's ticket. */
static struct dec_seq *find_exact(struct dec_sched *d, struct wire_ticket t)
{
    struct dec_seq *s = find(d, t);
    return s && wire_ticket_same(s->ticket, t) ? s : NULL;
}

/* Pages a sequence in this state may want at the end of a page. */
static uint32_t growth(const struct dec_seq *s, enum dec_seq_state state)
{
    if (state != DEC_SEQ_READY && state != DEC_SEQ_RUNNING) return 0;
    return work_capture_pages(work_capture_shadowed(s->capture), 1);
}

static void set_state(struct dec_sched *d, struct dec_seq *s, enum dec_seq_state to,
                      uint64_t now_ms)
{
    d->in_state[s->state]--;
    d->in_state[to]++;
    d->growth += growth(s, to) - growth(s, s->state);
    dec_seq_set_state(s, to, now_ms);
    tow_list_remove(&s->turn);
    if (to == DEC_SEQ_READY) tow_list_append(&d->turn, &s->turn);
}

/* --- the end of a ticket ---------------------------------------------------------------------- */

/* Pages go back first, so that a router that hears of the end may count on them. */
static void give_back(struct dec_sched *d, struct dec_seq *s, uint64_t now_ms,
                      struct dec_actions *out)
{
    tow_assert(!s->mover_live);
    if (s->engine_open) {
        act(out, DEC_DO_CLOSE)->seq = s;
        s->engine_open = false;
    }
    kv_table_fini(&s->table, d->pool);
    set_state(d, s, DEC_SEQ_GONE, now_ms);
    d->in_state[DEC_SEQ_GONE]--;
    d->n_live--;
    tow_list_remove(&s->by_id);
    tow_list_remove(&s->age);
    tow_list_append(&d->dead, &s->age); /* DEC_DO_CLOSE may still name it */
}

static void sweep(struct dec_sched *d)
{
    TOW_LIST_EACH_SAFE (n, &d->dead) dec_seq_free(TOW_CONTAINER(n, struct dec_seq, age));
}

/* CLOSING, and neither mover nor engine can touch its pages any more. */
static void closed(struct dec_sched *d, struct dec_seq *s, uint64_t now_ms, struct dec_actions *out)
{
    give_back(d, s, now_ms, out);
    if (s->outcome == 0)
        d->stats.cancelled++;
    else
        d->stats.failed++;
    if (s->outcome == TOW_ETIME) d->stats.orphaned++;
    if (s->tell && s->outcome == 0) {
        reply(out, s->owner, WIRE_CANCELLED_MSG)->cancelled.ticket = s->ticket;
    } else if (s->tell) {
        struct wire_failed *m = &reply(out, s->owner, WIRE_FAILED_MSG)->failed;
        m->ticket = s->ticket;
        m->code = (int16_t)s->outcome;
        m->note = wire_text(s->why);
    }
}

static void cancel_move(struct dec_seq *s, struct dec_actions *out)
{
    struct dec_action *a = act(out, DEC_DO_CANCEL_MOVE);
    a->ticket = s->ticket;
    a->code = s->outcome ? s->outcome : TOW_ECANCEL;
}

/* on_cancel, on_failed_move, on_router_lost, on_pushed_back, on_drain_limit */
static void close_seq(struct dec_sched *d, struct dec_seq *s, int outcome, const char *why,
                      uint64_t now_ms, struct dec_actions *out)
{
    if (s->state == DEC_SEQ_CLOSING) return;
    s->outcome = outcome;
    s->why = why;
    bool stepping = s->state == DEC_SEQ_RUNNING;
    set_state(d, s, DEC_SEQ_CLOSING, now_ms);
    if (s->mover_live) {
        cancel_move(s, out);
    } else if (!stepping) {
        closed(d, s, now_ms, out);
    }
}

static void finish(struct dec_sched *d, struct dec_seq *s, enum wire_finish_reason reason,
                   uint32_t stop_id, uint64_t now_ms, struct dec_actions *out)
{
    give_back(d, s, now_ms, out);
    d->stats.finished++;
    struct wire_finish *m = &reply(out, s->owner, WIRE_FINISH_MSG)->finish;
    m->ticket = s->ticket;
    m->reason = (uint8_t)reason;
    m->n_output = s->n_output;
    m->stop_id = stop_id;
}

/* --- admission -------------------------------------------------------------------------------- */

static void deny(struct dec_sched *d, uint64_t owner, struct wire_ticket t, int code,
                 uint32_t retry_ms, const char *note, struct dec_actions *out)
{
    d->stats.denied++;
    struct wire_deny *m = &reply(out, owner, WIRE_DENY_MSG)->deny;
    m->ticket = t;
    m->code = (int16_t)code;
    m->retry_after_ms = retry_ms;
    m->note = wire_text(note);
}

/* Tokens the cache holds when the answer is as long as it may be: the last output is never an
 * input. */
static uint64_t whole_tokens(const struct wire_reserve *m)
{
    return (uint64_t)m->n_tokens - m->outputs.n + m->max_tokens;
}

static uint32_t first_pages(const struct dec_sched *d, const struct wire_reserve *m, bool shadowed)
{
    uint64_t ahead = d->cfg.reserve_tokens > m->outputs.n ? d->cfg.reserve_tokens : m->outputs.n;
    uint64_t want = m->n_tokens + (ahead ? ahead : 1);
    uint64_t whole = whole_tokens(m);
    return pages_for(d, shadowed, want < whole ? want : whole);
}

static void on_reserve(struct dec_sched *d, uint64_t owner, const struct wire_reserve *m,
                       uint64_t now_ms, struct dec_actions *out)
{
    struct dec_seq *s;
    struct wire_ticket t = m->ticket;
    bool shadowed;
    const char *bad = work_capture_check(m->capture, d->cfg.shadows, &shadowed);
    if (d->draining) return deny(d, owner, t, TOW_EDRAIN, 0, "draining", out);
    if (t.id == 0 || t.nonce == 0)
        return deny(d, owner, t, TOW_EINVAL, 0, "ticket id or nonce is 0", out);
    if (find(d, t)) return deny(d, owner, t, TOW_ESTATE, 0, "ticket id is live here already", out);
    if (m->n_tokens == 0) return deny(d, owner, t, TOW_EINVAL, 0, "n_tokens is 0", out);
    if (m->max_tokens <= m->outputs.n)
        return deny(d, owner, t, TOW_EINVAL, 0, "max_tokens leaves no token to produce", out);
    if (whole_tokens(m) > d->cfg.max_context)
        return deny(d, owner, t, TOW_EINVAL, 0, "prompt + max_tokens exceed the context length",
                    out);
    if (bad) return deny(d, owner, t, TOW_EINVAL, 0, bad, out);
    if (pages_for(d, shadowed, whole_tokens(m)) > kv_pool_capacity(d->pool))
        return deny(d, owner, t, TOW_ETOOBIG, 0,
                    shadowed ? "prompt + max_tokens with shadow keys exceed the page pool"
                             : "prompt + max_tokens exceed the page pool",
                    out);
    if (d->n_live >= d->cfg.max_tickets)
        return deny(d, owner, t, TOW_EFULL, 100, "all sequence slots are taken", out);
    /* One page of headroom per growing sequence (and its companion), else the newcomer would be
     * pushed back at once. */
    uint32_t need = first_pages(d, m, shadowed);
    uint32_t growing = d->growth;
    uint32_t free_pages = kv_pool_free_pages(d->pool);
    if (need > free_pages || (growing && need + growing > free_pages && d->n_live))
        return deny(d, owner, t, TOW_EFULL, 100, "no pages free", out);
    if (dec_seq_new(&s, owner, m, now_ms) < 0)
        return deny(d, owner, t, TOW_ENOMEM, 1000, "out of memory", out);
    int rc = kv_table_grow(&s->table, d->pool, need);
    if (rc < 0) {
        dec_seq_free(s);
        return deny(d, owner, t, rc, 100, "no pages or tails free", out);
    }
    tow_list_append(&d->age, &s->age);
    tow_list_append(&d->buckets[t.id % BUCKETS], &s->by_id);
    d->in_state[DEC_SEQ_RESERVED]++;
    d->n_live++;
    d->stats.granted++;
    s->mover_live = true;
    struct dec_action *expect = act(out, DEC_DO_EXPECT);
    expect->seq = s;
    expect->n = pages_for(d, shadowed, m->n_tokens);
    struct wire_grant *g = &reply(out, owner, WIRE_GRANT_MSG)->grant;
    g->ticket = t;
    g->pages = need;
}

static void on_cancel(struct dec_sched *d, uint64_t owner, struct wire_ticket t, uint64_t now_ms,
                      struct dec_actions *out)
{
    struct dec_seq *s = find_exact(d, t);
    if (!s || s->owner != owner)
        reply(out, owner, WIRE_CANCELLED_MSG)->cancelled.ticket = t;
    else
        close_seq(d, s, 0, "", now_ms, out);
}

static void on_router_lost(struct dec_sched *d, uint64_t owner, uint64_t now_ms,
                           struct dec_actions *out)
{
    TOW_LIST_EACH_SAFE (n, &d->age) {
        struct dec_seq *s = TOW_CONTAINER(n, struct dec_seq, age);
        if (s->owner != owner) continue;
        s->tell = false;
        if (s->state != DEC_SEQ_CLOSING) d->stats.orphaned++;
        close_seq(d, s, TOW_EPEER, "its router is gone", now_ms, out);
    }
}

/* --- tokens ----------------------------------------------------------------------------------- */

/* What the step found of the row that chose the token to come. */
static void tell_captured(struct dec_seq *s, struct dec_actions *out)
{
    struct wire_captured row;
    while (work_capture_take(s->capture, &row)) {
        row.ticket = s->ticket;
        reply(out, s->owner, WIRE_CAPTURED_MSG)->captured = row;
    }
}

/* A token came out for s, which is in no step now. It ends s or becomes its next input. */
static void put_token(struct dec_sched *d, struct dec_seq *s, const struct dec_token *t,
                      uint64_t now_ms, struct dec_actions *out)
{
    if (dec_seq_ends_with(s, t->id)) {
        finish(d, s, WIRE_FINISH_STOP, t->id, now_ms, out);
        return;
    }
    s->token = t->id;
    struct wire_tokens *m = &reply(out, s->owner, WIRE_TOKENS_MSG)->tokens;
    m->ticket = s->ticket;
    m->first = s->n_output++;
    m->ids = (struct wire_ids){&s->token, 1};
    m->has_logprobs = t->has_logprobs;
    m->n_top = t->has_logprobs ? t->n_top : 0;
    m->logprobs = t->has_logprobs ? t->logprobs : (struct wire_bytes){NULL, 0};
    d->stats.output_tokens++;
    if (s->n_output == s->max_output) finish(d, s, WIRE_FINISH_LENGTH, 0, now_ms, out);
}

/* A failure of the other side must not look like one of ours: the router judges us by it. */
static int as_seen_here(int code)
{
    bool as_it_is = code == TOW_ETIME || code == TOW_EDIGEST || code == TOW_ECANCEL ||
                    code == TOW_EDRAIN || code == TOW_ESTATE;
    return as_it_is ? code : TOW_EPEER;
}

static void on_loaded(struct dec_sched *d, const struct dec_event *ev, struct dec_actions *out)
{
    struct dec_seq *s = find_exact(d, ev->ticket);
    if (!s || !s->mover_live) return;
    s->mover_live = false;
    d->stats.progress++;
    if (s->state == DEC_SEQ_CLOSING) {
        closed(d, s, ev->now_ms, out);
    } else if (ev->code < 0) {
        close_seq(d, s, as_seen_here(ev->code), "the pages did not arrive", ev->now_ms, out);
    } else if (ev->position != s->n_tokens) {
        close_seq(d, s, TOW_EWIRE, "the tail covers another number of tokens", ev->now_ms, out);
    } else {
        set_state(d, s, DEC_SEQ_READY, ev->now_ms);
        act(out, DEC_DO_OPEN)->seq = s;
        s->engine_open = true;
        put_token(d, s, &ev->first, ev->now_ms, out);
    }
}

static void on_part(struct dec_sched *d, const struct dec_event *ev)
{
    struct dec_seq *s = find_exact(d, ev->ticket);
    if (!s) return;
    d->stats.progress++;
    if (s->state == DEC_SEQ_RESERVED) set_state(d, s, DEC_SEQ_LOADING, ev->now_ms);
}

static void on_stepped(struct dec_sched *d, const struct dec_event *ev, struct dec_actions *out)
{
    uint32_t n = d->n_batch;
    tow_assert(n > 0);
    d->n_batch = 0; /* from here on no page is in use by the engine */
    d->stats.steps++;
    d->stats.progress++;
    for (uint32_t i = 0; i < n; i++) {
        struct dec_seq *s = d->batch[i];
        int code = ev->code < 0 ? ev->code : ev->tokens[i].code;
        if (s->state == DEC_SEQ_CLOSING) {
            closed(d, s, ev->now_ms, out);
            continue;
        }
        set_state(d, s, DEC_SEQ_READY, ev->now_ms);
        s->n_cached++;
        if (code < 0) {
            close_seq(d, s, code, "the step failed", ev->now_ms, out);
            continue;
        }
        tell_captured(s, out);
        put_token(d, s, &ev->tokens[i], ev->now_ms, out);
    }
}

/* --- between two steps ------------------------------------------------------------------------ */

/* The youngest ticket gives way to `needy`. True: pages may be free now. */
static bool push_back_youngest(struct dec_sched *d, const struct dec_seq *needy, uint64_t now_ms,
                               struct dec_actions *out)
{
    for (struct tow_list *n = d->age.prev; n != &d->age; n = n->prev) {
        struct dec_seq *s = TOW_CONTAINER(n, struct dec_seq, age);
        if (s == needy) return false;
        if (s->state == DEC_SEQ_CLOSING) return false; /* its pages are on their way already */
        bool at_once = !s->mover_live;
        d->stats.pushed_back++;
        close_seq(d, s, TOW_EFULL, "pushed back: an older sequence needs its pages", now_ms, out);
        return at_once;
    }
    return false;
}

/* Room for one more row? Else s sits this step out, or gives way itself when it is the youngest. */
static bool grow(struct dec_sched *d, struct dec_seq *s, uint64_t now_ms, struct dec_actions *out)
{
    uint32_t need = next_pages(d, s);
    while (s->table.n_pages < need) {
        if (kv_table_grow(&s->table, d->pool, need) == 0) break;
        if (push_back_youngest(d, s, now_ms, out)) continue;
        if (d->age.prev == &s->age) {
            d->stats.pushed_back++;
            close_seq(d, s, TOW_EFULL, "pushed back: no pages free", now_ms, out);
        }
        return false;
    }
    return true;
}

static void next_step(struct dec_sched *d, uint64_t now_ms, struct dec_actions *out)
{
    if (d->n_batch || tow_list_empty(&d->turn)) return;
    /* Older ones grow first, so that nobody is robbed of a page it took in the same round. */
    TOW_LIST_EACH (n, &d->age) {
        struct dec_seq *s = TOW_CONTAINER(n, struct dec_seq, age);
        struct tow_list *next_older = n->prev;
        if (s->state != DEC_SEQ_READY) continue;
        if (!grow(d, s, now_ms, out) && s->state == DEC_SEQ_GONE) n = next_older;
    }
    TOW_LIST_EACH_SAFE (n, &d->turn) {
        struct dec_seq *s = TOW_CONTAINER(n, struct dec_seq, turn);
        if (d->n_batch == d->cfg.max_batch) break;
        if (s->table.n_pages < next_pages(d, s)) continue;
        set_state(d, s, DEC_SEQ_RUNNING, now_ms);
        d->batch[d->n_batch++] = s;
    }
    if (d->n_batch == 0) return;
    struct dec_action *a = act(out, DEC_DO_STEP);
    a->batch = d->batch;
    a->n = d->n_batch;
}

/* A cancel may be lost (no memory, a full queue), and then only the lease would end the move. */
static void cancel_again(struct dec_sched *d, uint64_t now_ms, struct dec_actions *out)
{
    if (now_ms < d->cancelled_ms + CANCEL_AGAIN_MS) return;
    d->cancelled_ms = now_ms;
    TOW_LIST_EACH (n, &d->age) {
        struct dec_seq *s = TOW_CONTAINER(n, struct dec_seq, age);
        if (s->state == DEC_SEQ_CLOSING && s->mover_live) cancel_move(s, out);
    }
}

/* --- drain ------------------------------------------------------------------------------------ */

static void on_drain(struct dec_sched *d, uint32_t limit_ms, uint64_t now_ms)
{
    uint64_t ends = limit_ms ? now_ms + limit_ms : UINT64_MAX;
    if (!d->draining || ends < d->drain_ends_ms) d->drain_ends_ms = ends;
    d->draining = true;
}

static void check_drain(struct dec_sched *d, uint64_t now_ms, struct dec_actions *out)
{
    if (!d->draining || d->drained) return;
    if (now_ms >= d->drain_ends_ms) {
        TOW_LIST_EACH_SAFE (n, &d->age) {
            struct dec_seq *s = TOW_CONTAINER(n, struct dec_seq, age);
            d->cut |= s->state != DEC_SEQ_CLOSING;
            close_seq(d, s, TOW_EDRAIN, "drain limit passed", now_ms, out);
        }
    }
    if (d->n_live == 0) {
        d->drained = true;
        act(out, DEC_DO_DRAINED)->cut = d->cut;
    }
}

/* --- the machine ------------------------------------------------------------------------------ */

static void on_message(struct dec_sched *d, const struct dec_event *ev, struct dec_actions *out)
{
    switch (ev->msg->type) {
    case WIRE_RESERVE_MSG: on_reserve(d, ev->owner, &ev->msg->reserve, ev->now_ms, out); break;
    case WIRE_CANCEL_MSG: on_cancel(d, ev->owner, ev->msg->cancel.ticket, ev->now_ms, out); break;
    case WIRE_DRAIN_MSG: on_drain(d, ev->msg->drain.limit_ms, ev->now_ms); break;
    default: break;
    }
}

void dec_sched_step(struct dec_sched *d, const struct dec_event *ev, struct dec_actions *out)
{
    sweep(d);
    switch (ev->kind) {
    case DEC_ON_MESSAGE: on_message(d, ev, out); break;
    case DEC_ON_ROUTER_LOST: on_router_lost(d, ev->owner, ev->now_ms, out); break;
    case DEC_ON_PART: on_part(d, ev); break;
    case DEC_ON_LOADED: on_loaded(d, ev, out); break;
    case DEC_ON_STEPPED: on_stepped(d, ev, out); break;
    case DEC_ON_DRAIN: on_drain(d, ev->limit_ms, ev->now_ms); break;
    case DEC_ON_TICK: cancel_again(d, ev->now_ms, out); break;
    }
    check_drain(d, ev->now_ms, out);
    next_step(d, ev->now_ms, out);
    check_drain(d, ev->now_ms, out); /* a push-back may have been the last ticket */
}

int dec_sched_new(struct dec_sched **out, const struct dec_sched_config *cfg, struct kv_pool *pool,
                  struct tow_err *err)
{
    if (cfg->page_tokens == 0)
        return tow_fail(err, TOW_EINVAL, "page_tokens is 0, must be at least 1");
    if (cfg->max_batch == 0) return tow_fail(err, TOW_EINVAL, "max-batch is 0, must be at least 1");
    if (cfg->max_tickets == 0 || cfg->max_tickets > 65536)
        return tow_fail(err, TOW_EINVAL, "max_tickets is %u, must be 1..65536", cfg->max_tickets);
    struct dec_sched *d = calloc(1, sizeof *d);
    if (!d) return tow_fail(err, TOW_ENOMEM, "out of memory");
    d->batch = calloc(cfg->max_batch, sizeof *d->batch);
    if (!d->batch) {
        free(d);
        return tow_fail(err, TOW_ENOMEM, "out of memory for a batch of %u", cfg->max_batch);
    }
    d->cfg = *cfg;
    d->pool = pool;
    d->drain_ends_ms = UINT64_MAX;
    tow_list_init(&d->age);
    tow_list_init(&d->turn);
    tow_list_init(&d->dead);
    for (uint32_t i = 0; i < BUCKETS; i++) tow_list_init(&d->buckets[i]);
    *out = d;
    return 0;
}

void dec_sched_free(struct dec_sched *d)
{
    if (!d) return;
    sweep(d);
    TOW_LIST_EACH_SAFE (n, &d->age) {
        struct dec_seq *s = TOW_CONTAINER(n, struct dec_seq, age);
        kv_table_fini(&s->table, d->pool);
        dec_seq_free(s);
    }
    free(d->batch);
    free(d);
}

void dec_sched_stats(const struct dec_sched *d, struct dec_stats *out)
{
    *out = d->stats;
    out->reserved = d->in_state[DEC_SEQ_RESERVED];
    out->loading = d->in_state[DEC_SEQ_LOADING];
    out->ready = d->in_state[DEC_SEQ_READY];
    out->running = d->in_state[DEC_SEQ_RUNNING];
    out->closing = d->in_state[DEC_SEQ_CLOSING];
    out->pages_free = kv_pool_free_pages(d->pool);
    out->draining = d->draining;
}
