/* prefill/sched.c - see sched.h for the rules and job.h for the chart of one ticket.
 *
 * Rejected: giving a page back at its acknowledgement while the job still computes. Later chunks
 * attend to it. Rejected: plain round-robin over all jobs. With k long prompts a short one would
 * wait for k chunks.
 */
#include "prefill/sched.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "kernels/kv_layout.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS   1024u /* of the ticket table; tickets are random */
#define LANE_PART 8u    /* long jobs leave an eighth; the router's rule is the same */

struct pre_sched {
    struct pre_sched_config cfg;
    struct kv_pool *pool; /* borrowed */
    struct tow_list all, queue, shorts, longs;
    struct tow_list buckets[BUCKETS];
    struct tow_list dead; /* GONE, freed at the next step call */
    uint32_t n_live;
    struct pre_job *computing; /* whose chunk is in flight, or NULL */
    uint32_t computing_n;      /* its tokens */
    uint64_t computing_since_ms;
    uint32_t short_budget;   /* tokens short jobs may still have before a long one */
    uint64_t pending_tokens; /* of jobs not CLOSING */
    /* Started and not over, longer than a chunk (1) and not (0): pages taken at first, and jobs. */
    uint32_t held_pages[2], held_tails[2];
    uint32_t in_state[PRE_JOB_STATES];
    uint64_t touched_ms, cancelled_ms; /* all of them, last */
    bool draining, drained, cut;       /* cut: the drain's limit ended work */
    uint64_t drain_ends_ms;
    struct pre_stats stats;
};

void pre_actions_init(struct pre_actions *a)
{
    memset(a, 0, sizeof *a);
}
void pre_actions_clear(struct pre_actions *a)
{
    a->n = 0;
}
void pre_actions_fini(struct pre_actions *a)
{
    free(a->items);
    memset(a, 0, sizeof *a);
}

static struct pre_action *act(struct pre_actions *out, enum pre_action_kind kind)
{
    out->items = tow_grow(out->items, out->n, &out->cap, 64, sizeof *out->items);
    tow_assert(out->items); /* a promise already made could not be kept */
    struct pre_action *a = &out->items[out->n++];
    memset(a, 0, sizeof *a);
    a->kind = kind;
    return a;
}

static struct wire_msg *reply(struct pre_actions *out, uint64_t owner, enum wire_type type)
{
    struct pre_action *a = act(out, PRE_DO_SEND);
    a->owner = owner;
    a->msg.type = type;
    return &a->msg;
}

static uint32_t pages_for(const struct pre_sched *p, bool shadowed, uint64_t n_tokens)
{
    return work_capture_pages(
        shadowed, (uint32_t)kern_kv_pages_for((int64_t)n_tokens, (int32_t)p->cfg.page_tokens));
}

static uint32_t job_pages(const struct pre_sched *p, const struct pre_job *j)
{
    return pages_for(p, work_capture_shadowed(j->capture), j->n_tokens);
}

static struct pre_job *find(struct pre_sched *p, struct wire_ticket t)
{
    TOW_LIST_EACH (n, &p->buckets[t.id % BUCKETS]) {
        struct pre_job *j = TOW_CONTAINER(n, struct pre_job, by_id);
        if (j->ticket.id == t.id) return j;
    }
    return NULL;
}

static struct pre_job *find_exact(struct pre_sched *p, struct wire_ticket t)
{
    struct pre_job *j = find(p, t);
    return j && wire_ticket_same(j->ticket, t) ? j : NULL;
}

static void set_state(struct pre_sched *p, struct pre_job *j, enum pre_job_state to,
                      uint64_t now_ms)
{
    p->in_state[j->state]--;
    p->in_state[to]++;
    pre_job_set_state(j, to, now_ms);
    tow_list_remove(&j->line);
}

/* Behind the others of its kind, for its next turn. */
static void take_turn(struct pre_sched *p, struct pre_job *j)
{
    bool is_short = j->n_tokens - j->n_done <= p->cfg.chunk_tokens;
    tow_list_remove(&j->line);
    tow_list_append(is_short ? &p->shorts : &p->longs, &j->line);
}

/* --- the end of a ticket ---------------------------------------------------------------------- */

static bool is_long(const struct pre_sched *p, const struct pre_job *j)
{
    return j->n_tokens > p->cfg.chunk_tokens;
}

static void count_held(struct pre_sched *p, const struct pre_job *j, int sign)
{
    p->held_pages[is_long(p, j)] += (uint32_t)sign * j->table.n_pages;
    p->held_tails[is_long(p, j)] += (uint32_t)sign;
}

static void give_back(struct pre_sched *p, struct pre_job *j, uint64_t now_ms,
                      struct pre_actions *out)
{
    tow_assert(!j->mover_live && !j->computing);
    if (j->engine_open) {
        act(out, PRE_DO_CLOSE)->job = j;
        j->engine_open = false;
        count_held(p, j, -1);
    }
    kv_table_fini(&j->table, p->pool);
    set_state(p, j, PRE_JOB_GONE, now_ms);
    p->in_state[PRE_JOB_GONE]--;
    p->n_live--;
    tow_list_remove(&j->by_id);
    tow_list_remove(&j->all);
    tow_list_append(&p->dead, &j->all); /* PRE_DO_CLOSE may still name it */
}

static void sweep(struct pre_sched *p)
{
    TOW_LIST_EACH_SAFE (n, &p->dead) pre_job_free(TOW_CONTAINER(n, struct pre_job, all));
}

/* CLOSING, and neither mover nor engine can touch its pages any more. */
static void closed(struct pre_sched *p, struct pre_job *j, uint64_t now_ms, struct pre_actions *out)
{
    give_back(p, j, now_ms, out);
    if (j->outcome == 0)
        p->stats.cancelled++;
    else
        p->stats.failed++;
    if (j->outcome == TOW_ETIME) p->stats.orphaned++;
    if (!j->tell) return;
    if (j->outcome == 0) {
        reply(out, j->owner, WIRE_CANCELLED_MSG)->cancelled.ticket = j->ticket;
        return;
    }
    struct wire_failed *m = &reply(out, j->owner, WIRE_FAILED_MSG)->failed;
    m->ticket = j->ticket;
    m->code = (int16_t)j->outcome;
    m->note = wire_text(j->why);
}

static void cancel_move(struct pre_job *j, struct pre_actions *out)
{
    struct pre_action *a = act(out, PRE_DO_CANCEL_MOVE);
    a->ticket = j->ticket;
    a->code = j->outcome ? j->outcome : TOW_ECANCEL;
}

/* on_cancel, on_failed_move, on_failed_chunk, on_router_lost, on_drain_limit */
static void close_job(struct pre_sched *p, struct pre_job *j, int outcome, const char *why,
                      uint64_t now_ms, struct pre_actions *out)
{
    if (j->state == PRE_JOB_CLOSING) return;
    j->outcome = outcome;
    j->why = why;
    p->pending_tokens -= j->n_tokens - j->n_done;
    set_state(p, j, PRE_JOB_CLOSING, now_ms);
    if (j->mover_live) {
        cancel_move(j, out);
    } else if (!j->computing) {
        closed(p, j, now_ms, out);
    }
}

/* --- arrival ---------------------------------------------------------------------------------- */

static void deny(struct pre_sched *p, uint64_t owner, struct wire_ticket t, int code,
                 uint32_t retry_ms, const char *note, struct pre_actions *out)
{
    p->stats.denied++;
    struct wire_deny *m = &reply(out, owner, WIRE_DENY_MSG)->deny;
    m->ticket = t;
    m->code = (int16_t)code;
    m->retry_after_ms = retry_ms;
    m->note = wire_text(note);
}

/* Embedding such an id would give zeros, and an answer to a question nobody asked. */
static bool ids_known(const struct pre_sched *p, struct wire_ids ids)
{
    for (uint32_t i = 0; p->cfg.n_vocab && i < ids.n; i++)
        if (wire_ids_at(ids, i) >= p->cfg.n_vocab) return false;
    return true;
}

static void on_prefill(struct pre_sched *p, uint64_t owner, const struct wire_prefill *m,
                       uint64_t now_ms, struct pre_actions *out)
{
    struct pre_job *j;
    struct wire_ticket t = m->ticket;
    uint32_t n = m->tokens.n;
    bool shadowed;
    const char *bad = work_capture_check(m->capture, p->cfg.shadows, &shadowed);
    uint32_t n_pages = pages_for(p, shadowed, n);
    if (p->draining) return deny(p, owner, t, TOW_EDRAIN, 0, "draining", out);
    if (t.id == 0 || t.nonce == 0)
        return deny(p, owner, t, TOW_EINVAL, 0, "ticket id or nonce is 0", out);
    if (find(p, t)) return deny(p, owner, t, TOW_ESTATE, 0, "ticket id is live here already", out);
    if (n == 0 || m->n_prompt == 0)
        return deny(p, owner, t, TOW_EINVAL, 0, "the prompt is empty", out);
    if (m->max_tokens <= n - m->n_prompt)
        return deny(p, owner, t, TOW_EINVAL, 0, "max_tokens leaves no token to produce", out);
    if (n > p->cfg.max_context)
        return deny(p, owner, t, TOW_EINVAL, 0, "the prompt exceeds the context length", out);
    if (!ids_known(p, m->tokens))
        return deny(p, owner, t, TOW_EINVAL, 0,
                    "a token id is beyond the vocabulary: has the router another model?", out);
    if (bad) return deny(p, owner, t, TOW_EINVAL, 0, bad, out);
    if (n_pages > kv_pool_capacity(p->pool))
        return deny(p, owner, t, TOW_ETOOBIG, 0,
                    shadowed ? "the prompt with shadow keys exceeds the page pool"
                             : "the prompt exceeds the page pool",
                    out);
    if (n > p->cfg.max_pending_tokens)
        return deny(p, owner, t, TOW_ETOOBIG, 0, "the prompt exceeds max-pending-tokens", out);
    if (p->pending_tokens + n > p->cfg.max_pending_tokens)
        return deny(p, owner, t, TOW_EBUSY, 100, "max-pending-tokens reached", out);
    if (p->n_live >= p->cfg.max_jobs)
        return deny(p, owner, t, TOW_EBUSY, 100, "all slots are taken", out);
    if (pre_job_new(&j, owner, m, n_pages, now_ms) < 0)
        return deny(p, owner, t, TOW_ENOMEM, 1000, "out of memory", out);
    p->pending_tokens += n;
    p->n_live++;
    p->in_state[PRE_JOB_QUEUED]++;
    p->stats.accepted++;
    tow_list_append(&p->all, &j->all);
    tow_list_append(&p->queue, &j->line);
    tow_list_append(&p->buckets[t.id % BUCKETS], &j->by_id);
    j->mover_live = true;
    struct pre_action *a = act(out, PRE_DO_OPEN_MOVE);
    a->job = j;
    a->n = n_pages;
}

static void on_cancel(struct pre_sched *p, uint64_t owner, struct wire_ticket t, uint64_t now_ms,
                      struct pre_actions *out)
{
    struct pre_job *j = find_exact(p, t);
    if (!j || j->owner != owner)
        reply(out, owner, WIRE_CANCELLED_MSG)->cancelled.ticket = t;
    else
        close_job(p, j, 0, "", now_ms, out);
}

static void on_router_lost(struct pre_sched *p, uint64_t owner, uint64_t now_ms,
                           struct pre_actions *out)
{
    TOW_LIST_EACH_SAFE (n, &p->all) {
        struct pre_job *j = TOW_CONTAINER(n, struct pre_job, all);
        if (j->owner != owner) continue;
        j->tell = false;
        if (j->state != PRE_JOB_CLOSING) p->stats.orphaned++;
        close_job(p, j, TOW_EPEER, "its router is gone", now_ms, out);
    }
}

/* --- turns ------------------------------------------------------------------------------------ */

/* What long jobs leave free of total; 0 beside one that needs more than the rest. */
static uint32_t lane(uint32_t total, uint32_t least, uint32_t need)
{
    uint32_t n = total / LANE_PART > least ? total / LANE_PART : least;
    return need + n <= total ? n : 0;
}

/* Whether j may take its pages now, if they are there;
 * head, if not NULL, is passed beyond the limit. */
static bool may_start(const struct pre_sched *p, const struct pre_job *j,
                      const struct pre_job *head)
{
    const struct pre_job *longest = head ? head : j;
    uint32_t n_pages = kv_pool_capacity(p->pool), n_tails = kv_pool_tail_capacity(p->pool);
    uint32_t need = job_pages(p, j);
    uint32_t pages = lane(n_pages, pages_for(p, false, p->cfg.chunk_tokens), job_pages(p, longest));
    uint32_t tails = lane(n_tails, 1, 1);
    if (head)
        return !is_long(p, j) && is_long(p, head) && p->held_pages[0] + need <= pages &&
               p->held_tails[0] + 1 <= tails;
    if (!is_long(p, j)) return true;
    return (!pages || p->held_pages[1] + need + pages <= n_pages) &&
           p->held_tails[1] + 1 + tails <= n_tails;
}

/* Gives pages to waiting jobs, in order, with bounded passing. */
static void start_jobs(struct pre_sched *p, uint64_t now_ms, struct pre_actions *out)
{
    struct pre_job *blocked = NULL;
    TOW_LIST_EACH_SAFE (n, &p->queue) {
        struct pre_job *j = TOW_CONTAINER(n, struct pre_job, line);
        const struct pre_job *head =
            blocked && blocked->passed >= p->cfg.max_passes ? blocked : NULL;
        if (!may_start(p, j, head) || kv_table_grow(&j->table, p->pool, job_pages(p, j)) < 0) {
            if (kv_pool_free_pages(p->pool) == 0 || kv_pool_free_tails(p->pool) == 0) return;
            if (!blocked) blocked = j;
            continue;
        }
        if (blocked) blocked->passed++;
        set_state(p, j, PRE_JOB_ACTIVE, now_ms);
        take_turn(p, j);
        act(out, PRE_DO_OPEN)->job = j;
        j->engine_open = true;
        count_held(p, j, 1);
    }
}

/* How many of its pages nothing changes any more once n tokens are computed. */
static uint32_t pages_whole(const struct pre_sched *p, const struct pre_job *j, uint32_t n)
{
    if (n == j->n_tokens) return j->table.n_pages;
    return work_capture_pages(work_capture_shadowed(j->capture), n / p->cfg.page_tokens);
}

static void next_chunk(struct pre_sched *p, uint64_t now_ms, struct pre_actions *out)
{
    if (p->computing) return;
    bool has_short = !tow_list_empty(&p->shorts), has_long = !tow_list_empty(&p->longs);
    if (!has_short && !has_long) return;
    bool take_short = has_short && (!has_long || p->short_budget > 0);
    struct tow_list *line = take_short ? &p->shorts : &p->longs;
    struct pre_job *j = TOW_CONTAINER(line->next, struct pre_job, line);
    uint32_t left = j->n_tokens - j->n_done;
    uint32_t n = left < p->cfg.chunk_tokens ? left : p->cfg.chunk_tokens;
    if (take_short)
        p->short_budget -= n < p->short_budget ? n : p->short_budget;
    else
        p->short_budget = p->cfg.chunk_tokens;
    tow_list_remove(&j->line);
    j->computing = true;
    p->computing = j;
    p->computing_n = n;
    p->computing_since_ms = now_ms;
    struct pre_action *a = act(out, PRE_DO_CHUNK);
    a->job = j;
    a->from = j->n_done;
    a->n = n;
    a->n_whole = pages_whole(p, j, j->n_done + n) - j->n_offered;
    a->last = n == left;
}

/* Pages that are whole now travel while the next chunk is computed. */
static void offer(struct pre_sched *p, struct pre_job *j, bool last, struct pre_actions *out)
{
    uint32_t whole = pages_whole(p, j, j->n_done);
    if (whole == j->n_offered && !last) return;
    struct pre_action *a = act(out, PRE_DO_OFFER);
    a->job = j;
    a->from = j->n_offered;
    a->n = whole - j->n_offered;
    a->tail = last;
    j->n_offered = whole;
}

static void keep_first(struct pre_job *j, const struct pre_event *ev)
{
    j->first = ev->first;
    j->has_logprobs = ev->has_logprobs && ev->logprobs.len <= sizeof j->logprobs;
    j->n_top = j->has_logprobs ? ev->n_top : 0;
    j->logprob_bytes = j->has_logprobs ? ev->logprobs.len : 0;
    if (j->logprob_bytes) memcpy(j->logprobs, ev->logprobs.data, j->logprob_bytes);
}

static void tell_captured(struct pre_job *j, struct pre_actions *out)
{
    struct wire_captured row;
    while (work_capture_take(j->capture, &row)) {
        row.ticket = j->ticket;
        reply(out, j->owner, WIRE_CAPTURED_MSG)->captured = row;
    }
}

static void on_chunk(struct pre_sched *p, const struct pre_event *ev, struct pre_actions *out)
{
    struct pre_job *j = p->computing;
    tow_assert(j);
    p->computing = NULL;
    j->computing = false;
    p->stats.chunks++;
    p->stats.progress++;
    if (j->state == PRE_JOB_CLOSING) {
        if (!j->mover_live) closed(p, j, ev->now_ms, out);
        return;
    }
    if (ev->code < 0) {
        close_job(p, j, ev->code, "the chunk failed", ev->now_ms, out);
        return;
    }
    j->n_done += p->computing_n;
    p->pending_tokens -= p->computing_n;
    p->stats.prompt_tokens += p->computing_n;
    struct wire_progress *m = &reply(out, j->owner, WIRE_PROGRESS_MSG)->progress;
    m->ticket = j->ticket;
    m->tokens_done = j->n_done;
    if (j->n_done < j->n_tokens) {
        offer(p, j, false, out);
        take_turn(p, j);
        return;
    }
    keep_first(j, ev);
    tell_captured(j, out);
    set_state(p, j, PRE_JOB_SHIPPING, ev->now_ms);
    offer(p, j, true, out);
    for (uint32_t i = 0; i < j->table.n_pages; i++)
        if (j->acked[i]) kv_table_drop(&j->table, p->pool, i);
}

static void on_part(struct pre_sched *p, const struct pre_event *ev)
{
    struct pre_job *j = find_exact(p, ev->ticket);
    if (!j || ev->index >= j->table.n_pages || j->acked[ev->index]) return;
    if (j->state != PRE_JOB_ACTIVE && j->state != PRE_JOB_SHIPPING) return;
    p->stats.progress++;
    j->acked[ev->index] = 1;
    if (j->state == PRE_JOB_SHIPPING) kv_table_drop(&j->table, p->pool, ev->index);
}

/* A failure of the other side must not look like one of ours: the router judges us by it. */
static int as_seen_here(int code)
{
    bool as_it_is = code == TOW_ETIME || code == TOW_ECANCEL || code == TOW_EFULL ||
                    code == TOW_EDRAIN || code == TOW_ESTATE;
    return as_it_is ? code : TOW_EPEER;
}

static void on_unoffered(struct pre_sched *p, const struct pre_event *ev, struct pre_actions *out)
{
    struct pre_job *j = find_exact(p, ev->ticket);
    if (j) close_job(p, j, ev->code, "the pages could not be offered", ev->now_ms, out);
}

static void on_ended(struct pre_sched *p, const struct pre_event *ev, struct pre_actions *out)
{
    struct pre_job *j = find_exact(p, ev->ticket);
    if (!j || !j->mover_live) return;
    j->mover_live = false;
    if (j->state == PRE_JOB_CLOSING) {
        if (!j->computing) closed(p, j, ev->now_ms, out);
    } else if (ev->code < 0) {
        close_job(p, j, as_seen_here(ev->code), "the pages did not arrive", ev->now_ms, out);
    } else if (j->state != PRE_JOB_SHIPPING) {
        close_job(p, j, TOW_EWIRE, "the move ended before its tail", ev->now_ms, out);
    } else {
        uint32_t n = j->n_tokens;
        give_back(p, j, ev->now_ms, out);
        p->stats.finished++;
        struct wire_prefill_done *m = &reply(out, j->owner, WIRE_PREFILL_DONE_MSG)->prefill_done;
        m->ticket = j->ticket;
        m->n_tokens = n;
    }
}

/* --- time ------------------------------------------------------------------------------------- */

/* A hung engine must not keep tickets alive; a mere queue must. */
static void touch(struct pre_sched *p, uint64_t now_ms, struct pre_actions *out)
{
    if (now_ms < p->touched_ms + p->cfg.touch_ms) return;
    if (p->computing && now_ms > p->computing_since_ms + p->cfg.stall_ms) return;
    p->touched_ms = now_ms;
    TOW_LIST_EACH (n, &p->all) {
        struct pre_job *j = TOW_CONTAINER(n, struct pre_job, all);
        if (j->state == PRE_JOB_QUEUED || j->state == PRE_JOB_ACTIVE)
            act(out, PRE_DO_TOUCH)->ticket = j->ticket;
    }
}

/* A cancel may be lost (no memory, a full queue), and then only the lease would end the move. */
static void cancel_again(struct pre_sched *p, uint64_t now_ms, struct pre_actions *out)
{
    if (now_ms < p->cancelled_ms + p->cfg.touch_ms) return;
    p->cancelled_ms = now_ms;
    TOW_LIST_EACH (n, &p->all) {
        struct pre_job *j = TOW_CONTAINER(n, struct pre_job, all);
        if (j->state == PRE_JOB_CLOSING && j->mover_live) cancel_move(j, out);
    }
}

static void on_drain(struct pre_sched *p, uint32_t limit_ms, uint64_t now_ms)
{
    uint64_t ends = limit_ms ? now_ms + limit_ms : UINT64_MAX;
    if (!p->draining || ends < p->drain_ends_ms) p->drain_ends_ms = ends;
    p->draining = true;
}

static void check_drain(struct pre_sched *p, uint64_t now_ms, struct pre_actions *out)
{
    if (!p->draining || p->drained) return;
    if (now_ms >= p->drain_ends_ms) {
        TOW_LIST_EACH_SAFE (n, &p->all) {
            struct pre_job *j = TOW_CONTAINER(n, struct pre_job, all);
            p->cut |= j->state != PRE_JOB_CLOSING;
            close_job(p, j, TOW_EDRAIN, "drain limit passed", now_ms, out);
        }
    }
    if (p->n_live == 0) {
        p->drained = true;
        act(out, PRE_DO_DRAINED)->cut = p->cut;
    }
}

/* --- the machine ------------------------------------------------------------------------------ */

static void on_message(struct pre_sched *p, const struct pre_event *ev, struct pre_actions *out)
{
    switch (ev->msg->type) {
    case WIRE_PREFILL_MSG: on_prefill(p, ev->owner, &ev->msg->prefill, ev->now_ms, out); break;
    case WIRE_CANCEL_MSG: on_cancel(p, ev->owner, ev->msg->cancel.ticket, ev->now_ms, out); break;
    case WIRE_DRAIN_MSG: on_drain(p, ev->msg->drain.limit_ms, ev->now_ms); break;
    default: break;
    }
}

void pre_sched_step(struct pre_sched *p, const struct pre_event *ev, struct pre_actions *out)
{
    sweep(p);
    switch (ev->kind) {
    case PRE_ON_MESSAGE: on_message(p, ev, out); break;
    case PRE_ON_ROUTER_LOST: on_router_lost(p, ev->owner, ev->now_ms, out); break;
    case PRE_ON_CHUNK: on_chunk(p, ev, out); break;
    case PRE_ON_PART: on_part(p, ev); break;
    case PRE_ON_ENDED: on_ended(p, ev, out); break;
    case PRE_ON_UNOFFERED: on_unoffered(p, ev, out); break;
    case PRE_ON_DRAIN: on_drain(p, ev->limit_ms, ev->now_ms); break;
    case PRE_ON_TICK:
        touch(p, ev->now_ms, out);
        cancel_again(p, ev->now_ms, out);
        break;
    }
    check_drain(p, ev->now_ms, out);
    start_jobs(p, ev->now_ms, out);
    next_chunk(p, ev->now_ms, out);
}

int pre_sched_new(struct pre_sched **out, const struct pre_sched_config *cfg, struct kv_pool *pool,
                  struct tow_err *err)
{
    if (cfg->page_tokens == 0)
        return tow_fail(err, TOW_EINVAL, "page_tokens is 0, must be at least 1");
    if (cfg->chunk_tokens == 0)
        return tow_fail(err, TOW_EINVAL, "chunk-tokens is 0, must be at least 1");
    if (cfg->max_jobs == 0 || cfg->max_jobs > 65536)
        return tow_fail(err, TOW_EINVAL, "max_jobs is %u, must be 1..65536", cfg->max_jobs);
    struct pre_sched *p = calloc(1, sizeof *p);
    if (!p) return tow_fail(err, TOW_ENOMEM, "out of memory");
    p->cfg = *cfg;
    if (p->cfg.max_passes == 0) p->cfg.max_passes = 64;
    if (p->cfg.touch_ms == 0) p->cfg.touch_ms = 1000;
    if (p->cfg.stall_ms == 0) p->cfg.stall_ms = 60000;
    p->pool = pool;
    p->drain_ends_ms = UINT64_MAX;
    tow_list_init(&p->all);
    tow_list_init(&p->queue);
    tow_list_init(&p->shorts);
    tow_list_init(&p->longs);
    tow_list_init(&p->dead);
    for (uint32_t i = 0; i < BUCKETS; i++) tow_list_init(&p->buckets[i]);
    *out = p;
    return 0;
}

void pre_sched_free(struct pre_sched *p)
{
    if (!p) return;
    sweep(p);
    TOW_LIST_EACH_SAFE (n, &p->all) {
        struct pre_job *j = TOW_CONTAINER(n, struct pre_job, all);
        kv_table_fini(&j->table, p->pool);
        pre_job_free(j);
    }
    free(p);
}

void pre_sched_stats(const struct pre_sched *p, struct pre_stats *out)
{
    *out = p->stats;
    out->queued = p->in_state[PRE_JOB_QUEUED];
    out->active = p->in_state[PRE_JOB_ACTIVE];
    out->shipping = p->in_state[PRE_JOB_SHIPPING];
    out->closing = p->in_state[PRE_JOB_CLOSING];
    out->queued_tokens = (uint32_t)p->pending_tokens;
    out->pages_free = kv_pool_free_pages(p->pool);
    out->draining = p->draining;
}
