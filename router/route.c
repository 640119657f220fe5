/* router/route.c - see route.h for the chart and the rules.
 *
 * Two kinds of objects: runs, which belong to clients, and attempts, which belong to workers. An
 * attempt may outlive its run (cancelled, gone elsewhere) and then has run == NULL. Budgets are
 * held by attempts only, so no path through a run can leak one. Rejected: counters per worker that
 * requests add to and take from at several places; they drift with each forgotten path.
 */
#include "router/route.h"

#include "common/base/buf.h"
#include "common/base/list.h"
#include "kernels/kv_layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS        4096u /* of the ticket table; tickets are random */
#define PROVE_AGAIN_MS 5000u
#define WARM_AGAIN_MS  500u
#define WARM_LIMIT_MS  5000u /* for a warm-up to find room */
#define WARM_UP_TOKENS 3u
#define LANE_PART      8u /* long runs leave an eighth; prefill's rule is the same */

enum run_state { QUEUED, RESERVING, PREFILLING, STREAMING, CLOSING, OVER, RUN_STATES };
enum side_state { SIDE_NONE, SIDE_LIVE, SIDE_ENDING, SIDE_OVER };
enum { P = 0, D = 1 }; /* sides of an attempt */

struct run {
    struct tow_list line; /* in the queue while QUEUED */
    struct tow_list all;
    struct rtr_job *job;
    uint32_t choice;
    enum run_state state;
    bool waiting;   /* counts against max_queued */
    uint64_t order; /* of arrival */
    uint64_t queue_ends_ms, deadline_ms, not_before_ms;
    bool hurt;       /* worker_lost() has to send it elsewhere */
    bool progressed; /* this attempt: PROGRESS or TOKENS came */
    uint32_t failures, passed;
    int last_code;
    const char *last_why;
    uint32_t avoid[2];      /* where it failed last: elsewhere if there is an elsewhere */
    uint32_t pin[2];        /* warm-up: exactly this pair */
    const uint32_t *prompt; /* borrowed from the request */
    uint32_t n_prompt;
    uint64_t seed;
    uint32_t *all_tokens; /* owned: prompt + outputs, once there are outputs */
    uint32_t n_output, cap;
    bool by_length; /* CLOSING: how it ended */
    uint32_t owed;  /* attempts given up whose prefill may still send rows of this run */
    struct attempt *attempt;
};

struct rtr_job {
    struct tow_list node;
    const struct rtr_request *req; /* borrowed; NULL for a warm-up and when over */
    struct wire_sampling sampling;
    uint8_t *bias;             /* owned: packed logit_bias */
    struct wire_bytes capture; /* borrowed from the request; empty: none */
    uint32_t pages_per_page;   /* 2 with companions for shadow keys, else 1 */
    void *cookie;
    bool warm_up, over, deaf;
    uint32_t max_tokens, n_left;
    uint32_t n_runs;
    struct run runs[];
};

struct side {
    enum side_state state;
    uint32_t slot;
    uint64_t incarnation; /* of the worker: the slot may have another one by now */
    uint64_t since_ms;    /* LIVE without a run, or ENDING */
};

struct attempt {
    struct tow_list all, by_id;
    struct wire_ticket ticket;
    struct run *run;  /* NULL: wound up in the background */
    struct run *owes; /* run it was given up by, counted there; until P's last word */
    struct side side[2];
    uint32_t pages;                 /* held at D */
    uint32_t n_tokens, tokens_left; /* held at P */
    bool is_long;                   /* more than a chunk of P */
    uint32_t first_output;          /* outputs of earlier attempts */
};

struct rtr_route {
    struct rtr_route_config cfg;
    uint32_t *eos, *warm_up; /* owned */
    struct rtr_registry workers;
    struct tow_list jobs, dead, runs, queue, attempts;
    struct tow_list buckets[BUCKETS];
    uint32_t in_state[RUN_STATES];
    uint64_t orders;
    uint32_t waiting;
    uint64_t waiting_tokens;
    bool dirty;                  /* something changed that may let a run go */
    bool draining, drained, cut; /* cut: the drain's limit ended requests */
    uint64_t drain_ends_ms;
    uint64_t warm_again_ms[RTR_MAX_WORKERS];
    double finish_gap_s; /* between ends of runs, smoothed; 0: none yet */
    uint64_t finished_ms;
    struct rtr_route_stats stats;
    struct rtr_join join; /* scratch of on_hello; its texts are sent */
    struct tow_err err;
};

void rtr_actions_init(struct rtr_actions *a)
{
    memset(a, 0, sizeof *a);
}
void rtr_actions_clear(struct rtr_actions *a)
{
    a->n = 0;
}
void rtr_actions_fini(struct rtr_actions *a)
{
    free(a->items);
    memset(a, 0, sizeof *a);
}

static struct rtr_action *act(struct rtr_actions *out, enum rtr_action_kind kind)
{
    out->items = tow_grow(out->items, out->n, &out->cap, 64, sizeof *out->items);
    tow_assert(out->items); /* a promise already made could not be kept */
    struct rtr_action *a = &out->items[out->n++];
    memset(a, 0, sizeof *a);
    a->kind = kind;
    return a;
}

static struct wire_msg *send_to(struct rtr_actions *out, uint64_t conn, enum wire_type type)
{
    struct rtr_action *a = act(out, RTR_DO_SEND);
    a->conn = conn;
    a->msg.type = type;
    return &a->msg;
}

static void close_conn(struct rtr_actions *out, uint64_t conn, const char *why)
{
    struct rtr_action *a = act(out, RTR_DO_CLOSE);
    a->conn = conn;
    a->why = why;
}

static struct rtr_worker *worker(struct rtr_route *r, uint32_t slot)
{
    return &r->workers.workers[slot];
}

static bool live(const struct rtr_worker *w)
{
    return w->state != RTR_GONE;
}

/* --- runs: state and queue -------------------------------------------------------------------- */

static void count_waiting(struct rtr_route *r, struct run *run, bool waiting)
{
    if (run->waiting == waiting) return;
    run->waiting = waiting;
    r->waiting += waiting ? 1 : -1;
    r->waiting_tokens += waiting ? run->n_prompt : -(uint64_t)run->n_prompt;
}

static void enqueue(struct rtr_route *r, struct run *run)
{
    struct tow_list *at = r->queue.prev;
    while (at != &r->queue && TOW_CONTAINER(at, struct run, line)->order > run->order)
        at = at->prev;
    tow_list_prepend(at, &run->line);
}

static void set_state(struct rtr_route *r, struct run *run, enum run_state to)
{
    static const uint8_t legal[RUN_STATES] = {
        [QUEUED] = 1 << RESERVING | 1 << OVER,
        [RESERVING] = 1 << PREFILLING | 1 << QUEUED | 1 << OVER,
        [PREFILLING] = 1 << STREAMING | 1 << QUEUED | 1 << CLOSING | 1 << OVER,
        [STREAMING] = 1 << QUEUED | 1 << CLOSING | 1 << OVER,
        [CLOSING] = 1 << OVER,
    };
    tow_assert(legal[run->state] & 1 << to);
    if (!run->job->warm_up) {
        r->in_state[run->state]--;
        r->in_state[to]++;
    }
    run->state = to;
    run->deadline_ms = UINT64_MAX;
    tow_list_remove(&run->line);
    if (to == QUEUED) enqueue(r, run);
    if (to == PREFILLING || to == OVER) count_waiting(r, run, false);
    if (to == OVER) tow_list_remove(&run->all);
}

/* Until work on it has begun, waiting anywhere counts against the queue time. */
static uint64_t run_deadline(const struct run *run)
{
    if (run->state == STREAMING || run->state == CLOSING || run->progressed)
        return run->deadline_ms;
    return run->deadline_ms < run->queue_ends_ms ? run->deadline_ms : run->queue_ends_ms;
}

/* --- attempts: budgets and the winding up ----------------------------------------------------- */

static struct attempt *find_attempt(struct rtr_route *r, struct wire_ticket t)
{
    TOW_LIST_EACH (n, &r->buckets[t.id % BUCKETS]) {
        struct attempt *a = TOW_CONTAINER(n, struct attempt, by_id);
        if (wire_ticket_same(a->ticket, t)) return a;
    }
    return NULL;
}

/* NULL when it is gone, whoever has its slot now. */
static struct rtr_worker *side_worker(struct rtr_route *r, const struct attempt *a, int s)
{
    struct rtr_worker *w = worker(r, a->side[s].slot);
    return live(w) && w->incarnation == a->side[s].incarnation ? w : NULL;
}

static void attempt_try_free(struct rtr_route *r, struct attempt *a)
{
    if (a->run || a->side[P].state != SIDE_OVER || a->side[D].state != SIDE_OVER) return;
    tow_list_remove(&a->all);
    tow_list_remove(&a->by_id);
    r->stats.tickets--;
    free(a);
}

/* P has computed n more of its tokens, or never will. */
static void drop_tokens(struct rtr_worker *p, struct attempt *a, uint32_t n)
{
    p->held_tokens -= n;
    if (a->is_long) p->long_tokens -= n;
    a->tokens_left -= n;
}

static void forget_owed(struct attempt *a)
{
    if (a->owes) a->owes->owed--;
    a->owes = NULL;
}

/* The worker has said its last word about it, or will never hear of it, or is lost. */
static void side_over(struct rtr_route *r, struct attempt *a, int s)
{
    if (a->side[s].state == SIDE_OVER) return;
    struct rtr_worker *w = worker(r, a->side[s].slot);
    tow_assert(w->tickets > 0);
    a->side[s].state = SIDE_OVER;
    if (s == P) forget_owed(a);
    w->tickets--;
    if (a->is_long) w->long_tickets--;
    if (s == D) {
        w->held_pages -= a->pages;
        if (a->is_long) w->long_pages -= a->pages;
    } else {
        drop_tokens(w, a, a->tokens_left);
    }
    r->dirty = true;
}

static void side_cancel(struct rtr_route *r, struct attempt *a, int s,
                        enum wire_cancel_reason reason, uint64_t now_ms, struct rtr_actions *out)
{
    struct side *side = &a->side[s];
    if (side->state == SIDE_NONE) side_over(r, a, s);
    if (side->state != SIDE_LIVE) return;
    side->state = SIDE_ENDING;
    side->since_ms = now_ms;
    struct wire_cancel *m = &send_to(out, worker(r, side->slot)->conn, WIRE_CANCEL_MSG)->cancel;
    m->ticket = a->ticket;
    m->reason = (uint8_t)reason;
}

/* The run lets go of its attempt; a is gone afterwards when nothing is left to wait for. */
static void let_go(struct rtr_route *r, struct run *run, enum wire_cancel_reason reason,
                   uint64_t now_ms, struct rtr_actions *out)
{
    struct attempt *a = run->attempt;
    if (!a) return;
    run->attempt = NULL;
    a->run = NULL;
    for (int s = P; s <= D; s++) {
        struct rtr_worker *w = side_worker(r, a, s);
        if (w && w->circuit == RTR_HALF_OPEN) w->probes = 0; /* no verdict: probe again */
        side_cancel(r, a, s, reason, now_ms, out);
    }
    /* Prefill captured the row behind which the outputs since came. The next attempt goes on after
     * those, so nobody will compute that row again. */
    if (run->job->capture.len && run->n_output > a->first_output && a->side[P].state != SIDE_OVER) {
        a->owes = run;
        run->owed++;
    }
    attempt_try_free(r, a);
}

/* --- the ends of a run ------------------------------------------------------------------------ */

static void bury(struct rtr_route *r, struct rtr_job *job)
{
    job->over = true;
    job->req = NULL;
    tow_list_remove(&job->node);
    tow_list_append(&r->dead, &job->node);
}

static void end_run(struct rtr_route *r, struct run *run)
{
    tow_assert(!run->attempt);
    TOW_LIST_EACH (n, &r->attempts) {
        if (!run->owed) break;
        struct attempt *a = TOW_CONTAINER(n, struct attempt, all);
        if (a->owes == run) forget_owed(a);
    }
    set_state(r, run, OVER);
    if (--run->job->n_left == 0) bury(r, run->job);
}

static void cancel_run(struct rtr_route *r, struct run *run, enum wire_cancel_reason reason,
                       uint64_t now_ms, struct rtr_actions *out)
{
    if (run->state == OVER) return;
    let_go(r, run, reason, now_ms, out);
    if (!run->job->warm_up) r->stats.cancelled++;
    end_run(r, run);
}

/* One run that cannot be saved takes its whole request with it. */
static void fail_job(struct rtr_route *r, struct run *run, int code, int http, const char *reason,
                     const char *text, uint64_t now_ms, struct rtr_actions *out)
{
    struct rtr_job *job = run->job;
    if (job->warm_up) {
        for (int s = P; s <= D; s++) r->warm_again_ms[run->pin[s]] = now_ms + WARM_AGAIN_MS;
    } else {
        struct rtr_action *a = act(out, RTR_DO_FAIL);
        a->job = job;
        a->cookie = job->cookie;
        a->choice = run->choice;
        a->refusal.http = http;
        a->refusal.reason = reason;
        bool again = code == TOW_EFULL || code == TOW_EBUSY || code == TOW_ETIME ||
                     code == TOW_EDRAIN || code == TOW_EPEER;
        a->refusal.retry_after_s = again ? rtr_route_retry_after_s(r) : 0;
        tow_fail(&a->refusal.err, code, "%s", text);
    }
    for (uint32_t i = 0; i < job->n_runs; i++) {
        struct run *each = &job->runs[i];
        if (each->state == OVER) continue;
        let_go(r, each, WIRE_CANCEL_DEADLINE, now_ms, out);
        if (!job->warm_up) r->stats.failed++;
        end_run(r, each);
    }
}

/* The answer is whole. */
static void finish_run(struct rtr_route *r, struct run *run, bool length, uint64_t now_ms,
                       struct rtr_actions *out)
{
    if (!run->job->warm_up) {
        struct rtr_action *f = act(out, RTR_DO_FINISH);
        f->job = run->job;
        f->cookie = run->job->cookie;
        f->choice = run->choice;
        f->reason = length ? RTR_FINISH_LENGTH : RTR_FINISH_STOP;
        r->stats.finished++;
        double gap = r->finished_ms ? (double)(now_ms - r->finished_ms) / 1000.0 : 1.0;
        if (gap > 10.0) gap = 10.0; /* a pause without work says nothing about speed */
        r->finish_gap_s = r->finished_ms ? 0.9 * r->finish_gap_s + 0.1 * gap : gap;
        r->finished_ms = now_ms;
    }
    end_run(r, run);
}

/* The answer is whole, but rows that prefill captured may be under way: they come before its last
 * word. */
static bool must_wait_for_rows(const struct run *run)
{
    const struct attempt *a = run->attempt;
    return run->job->capture.len > 0 && (run->owed || (a && a->side[P].state != SIDE_OVER));
}

static void wait_for_rows(struct rtr_route *r, struct run *run, bool length, uint64_t now_ms)
{
    run->by_length = length;
    set_state(r, run, CLOSING);
    run->deadline_ms = now_ms + r->cfg.lease_ms;
}

static void close_run(struct rtr_route *r, struct run *run, uint64_t now_ms,
                      struct rtr_actions *out)
{
    let_go(r, run, WIRE_CANCEL_ELSEWHERE, now_ms, out);
    finish_run(r, run, run->by_length, now_ms, out);
}

/* Back into the queue, at its old place, to be tried elsewhere. */
static void requeue(struct rtr_route *r, struct run *run, uint32_t pause_ms, uint64_t now_ms,
                    struct rtr_actions *out)
{
    bool had_begun = run->progressed;
    if (run->attempt) {
        run->avoid[P] = run->attempt->side[P].slot;
        run->avoid[D] = run->attempt->side[D].slot;
    }
    let_go(r, run, WIRE_CANCEL_ELSEWHERE, now_ms, out);
    if (run->job->warm_up) {
        fail_job(r, run, TOW_EPEER, 0, NULL, "", now_ms, out);
        return;
    }
    if (run->n_output == run->job->max_tokens) { /* all tokens came, only the FINISH was lost */
        if (must_wait_for_rows(run))
            wait_for_rows(r, run, true, now_ms);
        else
            finish_run(r, run, true, now_ms, out);
        return;
    }
    set_state(r, run, QUEUED);
    if (had_begun) run->queue_ends_ms = now_ms + r->cfg.queue_timeout_ms;
    run->progressed = false;
    run->not_before_ms = now_ms + pause_ms;
    r->dirty = true;
}

/* Counts a failed try; the last one ends the request. */
static void try_again(struct rtr_route *r, struct run *run, int code, const char *why,
                      uint64_t now_ms, struct rtr_actions *out)
{
    char text[160];
    run->last_code = code;
    run->last_why = why;
    run->failures++;
    r->stats.retries++;
    bool whole = run->n_output == run->job->max_tokens;
    if (run->failures >= r->cfg.max_attempts && !run->job->warm_up && !whole) {
        snprintf(text, sizeof text, "gave up after %u attempts: %s", run->failures, why);
        fail_job(r, run, code, 0, "attempts_failed", text, now_ms, out);
    } else {
        requeue(r, run, run->failures > 1 ? 50 : 0, now_ms, out);
    }
}

/* --- placement -------------------------------------------------------------------------------- */

static uint32_t run_tokens(const struct run *run)
{
    return run->n_prompt + run->n_output;
}

/* per: a job's pages_per_page. */
static uint32_t pages_for(const struct rtr_worker *w, uint64_t n_tokens, uint32_t per)
{
    return (uint32_t)kern_kv_pages_for((int64_t)n_tokens, (int32_t)w->page_tokens) * per;
}

static uint64_t whole_tokens(const struct run *run)
{
    return (uint64_t)run->n_prompt + run->job->max_tokens;
}

/* What the decode worker will hold at first; the same rule as decode/sched.h. */
static uint32_t first_pages(const struct rtr_worker *d, const struct run *run)
{
    uint64_t ahead = d->reserve_tokens > run->n_output ? d->reserve_tokens : run->n_output;
    uint64_t want = run_tokens(run) + (ahead ? ahead : 1), whole = whole_tokens(run);
    return pages_for(d, want < whole ? want : whole, run->job->pages_per_page);
}

static bool decode_could(const struct rtr_worker *w, uint64_t n, uint32_t per)
{
    return n <= w->max_context && pages_for(w, n, per) <= w->pages;
}

static bool prefill_could(const struct rtr_worker *w, uint64_t n, uint32_t per)
{
    return n <= w->max_context && n <= w->max_pending_tokens && pages_for(w, n, per) <= w->pages;
}

/* Could the workers we know, those gone just now too, hold it if they had nothing else? True while
 * a role is missing. A prefill worker must be able to hold the whole answer too: a stream that
 * loses its decode worker, or is pushed back, comes to it again with all its tokens. */
static bool could_ever(struct rtr_route *r, uint64_t whole, uint32_t per)
{
    bool seen[2] = {false, false}, could[2] = {false, false};
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        struct rtr_worker *w = worker(r, i);
        if (w->pages == 0) continue; /* never used */
        seen[w->role] = true;
        could[w->role] |= w->role == WIRE_DECODE_ROLE ? decode_could(w, whole, per)
                                                      : prefill_could(w, whole, per);
    }
    return (could[P] || !seen[P]) && (could[D] || !seen[D]);
}

/* Lower is better: least used first, then the one picked longest ago. */
static bool better(const struct rtr_worker *a, double load_a, const struct rtr_worker *b,
                   double load_b)
{
    if (load_a != load_b) return load_a < load_b;
    return a->picked < b->picked;
}

static double decode_load(struct rtr_route *r, uint32_t slot)
{
    struct rtr_worker *w = worker(r, slot);
    double slots = (double)(w->tickets + w->foreign_tickets) / w->max_batch;
    double pages = 1.0 - (double)rtr_registry_free_pages(&r->workers, slot) / w->pages;
    return slots > pages ? slots : pages;
}

static double prefill_load(struct rtr_route *r, uint32_t slot)
{
    struct rtr_worker *w = worker(r, slot);
    double speed = w->beat.tokens_per_s ? w->beat.tokens_per_s : 1000.0;
    return (double)(w->held_tokens + w->foreign_tokens) / speed;
}

static bool is_long(const struct rtr_worker *p, const struct run *run)
{
    return run_tokens(run) > p->chunk_tokens;
}

/* What long ones leave free of total; 0 beside one that needs more than the rest. */
static uint64_t lane(uint64_t total, uint64_t least, uint64_t need)
{
    uint64_t n = total / LANE_PART > least ? total / LANE_PART : least;
    return need + n <= total ? n : 0;
}

static uint64_t page_lane(const struct rtr_worker *p, const struct rtr_worker *d,
                          const struct run *longest)
{
    return lane(d->pages, pages_for(d, (uint64_t)p->chunk_tokens + d->reserve_tokens, 1),
                first_pages(d, longest));
}

static uint64_t token_lane(const struct rtr_worker *p, const struct run *longest)
{
    return lane(p->max_pending_tokens, p->chunk_tokens, run_tokens(longest));
}

/* A long one leaves room for short ones. */
static bool leaves_lane(const struct rtr_worker *p, const struct rtr_worker *d,
                        const struct run *run)
{
    uint64_t pages = page_lane(p, d, run), tokens = token_lane(p, run);
    return (!pages || d->long_pages + first_pages(d, run) + pages <= d->pages) &&
           (!tokens || p->long_tokens + run_tokens(run) + tokens <= p->max_pending_tokens) &&
           p->long_tickets + 1 + lane(p->max_tickets, 1, 1) <= p->max_tickets &&
           d->long_tickets + 1 + lane(d->max_tickets, 1, 1) <= d->max_tickets;
}

/* A short one may pass `head` beyond the limit: what short ones hold then is never in head's
 * way. */
static bool keeps_lane(const struct rtr_worker *p, const struct rtr_worker *d,
                       const struct run *head, const struct run *run)
{
    uint32_t per = head->job->pages_per_page;
    if (!decode_could(d, whole_tokens(head), per) || !prefill_could(p, run_tokens(head), per))
        return true;
    return d->held_pages - d->long_pages + first_pages(d, run) <= page_lane(p, d, head) &&
           p->held_tokens - p->long_tokens + run_tokens(run) <= token_lane(p, head);
}

/* The best pair that has room now. `strict` leaves out where the run failed last; head, if not
 * NULL, may be passed only in the lane. */
static bool pick(struct rtr_route *r, const struct run *run, const struct run *head, bool strict,
                 uint64_t now_ms, uint32_t *out_p, uint32_t *out_d)
{
    bool warm = run->job->warm_up, found = false;
    uint32_t per = run->job->pages_per_page;
    for (uint32_t d = 0; d < RTR_MAX_WORKERS; d++) {
        struct rtr_worker *wd = worker(r, d);
        if (!live(wd) || wd->role != WIRE_DECODE_ROLE) continue;
        if (warm ? d != run->pin[D] : strict && d == run->avoid[D]) continue;
        if (!rtr_registry_open(&r->workers, d, warm, now_ms) ||
            !decode_could(wd, whole_tokens(run), per))
            continue;
        if (first_pages(wd, run) > rtr_registry_free_pages(&r->workers, d)) continue;
        for (uint32_t p = 0; p < RTR_MAX_WORKERS; p++) {
            struct rtr_worker *wp = worker(r, p);
            if (!live(wp) || wp->role != WIRE_PREFILL_ROLE) continue;
            if (r->workers.proof[p][d] != RTR_PROVED) continue;
            if (!rtr_registry_link_open(&r->workers, p, d, now_ms)) continue;
            if (warm ? p != run->pin[P] : strict && p == run->avoid[P]) continue;
            if (!rtr_registry_open(&r->workers, p, warm, now_ms) ||
                !prefill_could(wp, run_tokens(run), per))
                continue;
            if (run_tokens(run) > rtr_registry_free_tokens(&r->workers, p)) continue;
            if (is_long(wp, run) && (head || !leaves_lane(wp, wd, run))) continue;
            if (head && (!is_long(wp, head) || !keeps_lane(wp, wd, head, run))) continue;
            bool take = !found;
            if (found && d == *out_d)
                take = better(wp, prefill_load(r, p), worker(r, *out_p), prefill_load(r, *out_p));
            else if (found)
                take = better(wd, decode_load(r, d), worker(r, *out_d), decode_load(r, *out_d));
            if (!take) continue;
            found = true;
            *out_p = p;
            *out_d = d;
        }
    }
    return found;
}

static struct wire_ids outputs_of(const struct run *run)
{
    return (struct wire_ids){run->n_output ? run->all_tokens + run->n_prompt : NULL, run->n_output};
}

static struct wire_ids tokens_of(const struct run *run)
{
    if (run->n_output) return (struct wire_ids){run->all_tokens, run_tokens(run)};
    return (struct wire_ids){run->prompt, run->n_prompt};
}

static void fill_sampling(const struct run *run, struct wire_sampling *s)
{
    *s = run->job->sampling;
    s->seed = run->seed;
}

static bool reserve(struct rtr_route *r, struct run *run, uint32_t p, uint32_t d, uint64_t now_ms,
                    struct rtr_actions *out)
{
    struct rtr_worker *wp = worker(r, p), *wd = worker(r, d);
    struct attempt *a = calloc(1, sizeof *a);
    if (!a) return false;
    do { /* ids are new per attempt and never those of one still live here */
        a->ticket.id = r->cfg.random(r->cfg.random_arg);
        a->ticket.nonce = r->cfg.random(r->cfg.random_arg);
    } while (find_attempt(r, a->ticket));
    a->run = run;
    a->side[P] = (struct side){SIDE_NONE, p, wp->incarnation, now_ms};
    a->side[D] = (struct side){SIDE_LIVE, d, wd->incarnation, now_ms};
    a->pages = first_pages(wd, run);
    a->n_tokens = a->tokens_left = run_tokens(run);
    a->first_output = run->n_output;
    a->is_long = is_long(wp, run);
    if (a->is_long) {
        wd->long_pages += a->pages;
        wp->long_tokens += a->n_tokens;
        wd->long_tickets++;
        wp->long_tickets++;
    }
    wd->held_pages += a->pages;
    wp->held_tokens += a->n_tokens;
    wd->tickets++;
    wp->tickets++;
    wp->picked = wd->picked = ++r->workers.picks;
    rtr_registry_link_picked(&r->workers, p, d, now_ms);
    if (wp->circuit == RTR_HALF_OPEN) wp->probes++;
    if (wd->circuit == RTR_HALF_OPEN) wd->probes++;
    tow_list_append(&r->attempts, &a->all);
    tow_list_append(&r->buckets[a->ticket.id % BUCKETS], &a->by_id);
    r->stats.tickets++;
    r->stats.attempts++;
    run->attempt = a;
    run->progressed = false;
    set_state(r, run, RESERVING);
    run->deadline_ms = now_ms + r->cfg.reserve_ms;

    struct wire_reserve *m = &send_to(out, wd->conn, WIRE_RESERVE_MSG)->reserve;
    m->ticket = a->ticket;
    m->prefill_name = wire_text(wp->name);
    m->prefill_incarnation = wp->incarnation;
    m->n_tokens = a->n_tokens;
    m->max_tokens = run->job->max_tokens;
    m->lease_ms = r->cfg.lease_ms;
    fill_sampling(run, &m->sampling);
    m->eos = (struct wire_ids){r->eos, r->cfg.n_eos};
    m->outputs = outputs_of(run);
    m->capture = run->job->capture;
    return true;
}

static bool place(struct rtr_route *r, struct run *run, const struct run *head, uint64_t now_ms,
                  struct rtr_actions *out)
{
    uint32_t p = 0, d = 0;
    bool avoids = run->avoid[P] != RTR_NO_WORKER;
    if (!(avoids && pick(r, run, head, true, now_ms, &p, &d)) &&
        !pick(r, run, head, false, now_ms, &p, &d))
        return false;
    return reserve(r, run, p, d, now_ms, out);
}

static void say_too_big(char *text, size_t cap, uint32_t n_prompt, uint32_t max_tokens,
                        uint32_t context, bool shadow)
{
    snprintf(text, cap, "prompt of %u tokens and max_tokens %u exceed what the workers hold (%u%s)",
             n_prompt, max_tokens, context,
             shadow ? "; keys of other types, index_capture.shadow, take as many pages again" : "");
}

static void fail_too_big(struct rtr_route *r, struct run *run, uint64_t now_ms,
                         struct rtr_actions *out)
{
    char text[200];
    bool shadow = run->job->pages_per_page > 1;
    say_too_big(text, sizeof text, run->n_prompt, run->job->max_tokens,
                rtr_route_context(r, shadow), shadow);
    fail_job(r, run, run->n_output ? TOW_EBUSY : TOW_EINVAL, 0, "too_large", text, now_ms, out);
}

/* In order, with bounded passing: see route.h.
 * quiet: inside a client's call, where nobody may fail. */
static void dispatch(struct rtr_route *r, bool quiet, uint64_t now_ms, struct rtr_actions *out)
{
    struct run *blocked = NULL;
    r->dirty = false;
    struct tow_list *n = r->queue.next;
    while (n != &r->queue) {
        struct run *run = TOW_CONTAINER(n, struct run, line);
        n = n->next;
        struct run *head = blocked && blocked->passed >= r->cfg.max_passes ? blocked : NULL;
        if (now_ms < run->not_before_ms) continue;
        if (!could_ever(r, whole_tokens(run), run->job->pages_per_page)) {
            if (quiet) continue;
            fail_too_big(r, run, now_ms, out);
            n = r->queue.next; /* its siblings are gone as well */
            continue;
        }
        if (!place(r, run, head, now_ms, out)) {
            if (!blocked && !run->job->warm_up) blocked = run;
        } else if (blocked) {
            blocked->passed++;
        }
    }
}

/* --- pairs and warm-up ------------------------------------------------------------------------ */

static void prove(struct rtr_route *r, uint32_t p, uint32_t d, uint64_t now_ms,
                  struct rtr_actions *out)
{
    struct rtr_worker *wp = worker(r, p), *wd = worker(r, d);
    struct rtr_join diff;
    r->workers.retry_ms[p][d] = now_ms + PROVE_AGAIN_MS;
    if (!rtr_registry_fit(&r->workers, p, d, &diff)) {
        rtr_registry_unfit(&r->workers, p, d, &diff);
        r->workers.retry_ms[p][d] = UINT64_MAX; /* facts do not change in a life */
        tow_fail(&act(out, RTR_DO_LOG)->refusal.err, TOW_EMISMATCH,
                 "%s and %s are no pair: %s: '%s' and '%s'", wp->name, wd->name, diff.field,
                 diff.ours, diff.theirs);
        const struct wire_text why = wire_text(r->workers.links[p][d].why);
        send_to(out, wp->conn, WIRE_UNFIT_MSG)->unfit =
            (struct wire_unfit){.name = wire_text(wd->name), .note = why};
        send_to(out, wd->conn, WIRE_UNFIT_MSG)->unfit =
            (struct wire_unfit){.name = wire_text(wp->name), .note = why};
        return;
    }
    r->workers.proof[p][d] = RTR_PROVING;
    struct wire_pair *m = &send_to(out, wp->conn, WIRE_PAIR_MSG)->pair;
    m->name = wire_text(wd->name);
    m->incarnation = wd->incarnation;
    m->data_address = (struct wire_bytes){wd->address, wd->address_bytes};
}

static void prove_all(struct rtr_route *r, uint64_t now_ms, struct rtr_actions *out)
{
    for (uint32_t p = 0; p < RTR_MAX_WORKERS; p++) {
        if (!live(worker(r, p)) || worker(r, p)->role != WIRE_PREFILL_ROLE) continue;
        for (uint32_t d = 0; d < RTR_MAX_WORKERS; d++) {
            if (!live(worker(r, d)) || worker(r, d)->role != WIRE_DECODE_ROLE) continue;
            if (r->workers.proof[p][d] != RTR_PROVED && now_ms >= r->workers.retry_ms[p][d])
                prove(r, p, d, now_ms, out);
        }
    }
}

static bool warming(struct rtr_route *r, uint32_t slot)
{
    TOW_LIST_EACH (n, &r->jobs) {
        struct rtr_job *job = TOW_CONTAINER(n, struct rtr_job, node);
        if (job->warm_up && (job->runs[0].pin[P] == slot || job->runs[0].pin[D] == slot))
            return true;
    }
    return false;
}

static struct rtr_job *job_new(uint32_t n_runs)
{
    struct rtr_job *job = calloc(1, sizeof *job + n_runs * sizeof job->runs[0]);
    if (!job) return NULL;
    job->n_runs = job->n_left = n_runs;
    job->pages_per_page = 1;
    for (uint32_t i = 0; i < n_runs; i++) {
        struct run *run = &job->runs[i];
        tow_list_init(&run->line);
        tow_list_init(&run->all);
        run->job = job;
        run->choice = i;
        run->avoid[P] = run->avoid[D] = run->pin[P] = run->pin[D] = RTR_NO_WORKER;
    }
    return job;
}

static void start_run(struct rtr_route *r, struct run *run, uint64_t now_ms)
{
    run->state = QUEUED;
    run->order = ++r->orders;
    run->queue_ends_ms = now_ms + r->cfg.queue_timeout_ms;
    run->deadline_ms = UINT64_MAX;
    tow_list_append(&r->runs, &run->all);
    enqueue(r, run);
    if (run->job->warm_up) return;
    r->in_state[QUEUED]++;
    r->stats.started++;
    count_waiting(r, run, true);
}

static void warm_up_pair(struct rtr_route *r, uint32_t p, uint32_t d, uint64_t now_ms)
{
    struct rtr_job *job = job_new(1);
    if (!job) return;
    struct run *run = &job->runs[0];
    job->warm_up = true;
    job->max_tokens = WARM_UP_TOKENS;
    job->sampling.top_p = job->sampling.repetition_penalty = 1;
    job->sampling.ignore_eos = 1;
    run->prompt = r->warm_up;
    run->n_prompt = r->cfg.n_warm_up;
    run->pin[P] = p;
    run->pin[D] = d;
    tow_list_append(&r->jobs, &job->node);
    start_run(r, run, now_ms);
    run->queue_ends_ms = now_ms + WARM_LIMIT_MS;
    run->order = 0; /* before all others */
    tow_list_remove(&run->line);
    tow_list_prepend(&r->queue, &run->line);
    r->stats.warm_ups++;
    r->dirty = true;
}

/* A worker serves after a real request has gone through it and a partner. */
static void warm_up_all(struct rtr_route *r, uint64_t now_ms)
{
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        struct rtr_worker *w = worker(r, i);
        if (w->state != RTR_STARTING || w->draining || w->warm || now_ms < r->warm_again_ms[i])
            continue;
        if (warming(r, i) || !rtr_registry_open(&r->workers, i, true, now_ms)) continue;
        uint32_t best = RTR_NO_WORKER;
        for (uint32_t k = 0; k < RTR_MAX_WORKERS; k++) {
            struct rtr_worker *o = worker(r, k);
            uint32_t p = w->role == WIRE_PREFILL_ROLE ? i : k,
                     d = w->role == WIRE_PREFILL_ROLE ? k : i;
            if (!live(o) || o->role == w->role || r->workers.proof[p][d] != RTR_PROVED) continue;
            if (!rtr_registry_open(&r->workers, k, true, now_ms) || (!o->warm && warming(r, k)))
                continue;
            if (best == RTR_NO_WORKER || (o->warm && !worker(r, best)->warm)) best = k;
        }
        if (best == RTR_NO_WORKER) continue;
        if (w->role == WIRE_PREFILL_ROLE)
            warm_up_pair(r, i, best, now_ms);
        else
            warm_up_pair(r, best, i, now_ms);
    }
}

static void warmed(struct rtr_route *r, const struct run *run)
{
    for (int s = P; s <= D; s++) rtr_registry_warmed(&r->workers, run->pin[s]);
    r->dirty = true;
}

/* --- workers come and go ---------------------------------------------------------------------- */

/* Decode has all it needs once it streams: the link may have broken under the last ACK, say. And
 * once the answer is whole nothing is needed of decode. */
static bool needless(const struct run *run, int s)
{
    return run->state == (s == P ? STREAMING : CLOSING);
}

static struct run *next_hurt(struct rtr_route *r)
{
    TOW_LIST_EACH (n, &r->runs) {
        struct run *run = TOW_CONTAINER(n, struct run, all);
        if (run->hurt) return run;
    }
    return NULL;
}

static void worker_lost(struct rtr_route *r, uint32_t slot, const char *why, uint64_t now_ms,
                        struct rtr_actions *out)
{
    struct rtr_worker *w = worker(r, slot);
    if (!w->draining)
        tow_fail(&act(out, RTR_DO_LOG)->refusal.err, TOW_EPEER, "%s is lost: %s", w->name, why);
    int me = w->role == WIRE_PREFILL_ROLE ? P : D;
    bool in_use = false;
    TOW_LIST_EACH (n, &r->attempts) {
        struct attempt *a = TOW_CONTAINER(n, struct attempt, all);
        if (a->side[me].slot != slot || a->side[me].state == SIDE_OVER) continue;
        in_use |= a->side[me].state == SIDE_LIVE;
        side_over(r, a, me);
        if (a->run && !needless(a->run, me)) a->run->hurt = true;
    }
    TOW_LIST_EACH (n, &r->runs) {
        struct run *run = TOW_CONTAINER(n, struct run, all);
        if (run->pin[me] == slot) run->hurt = true; /* a warm-up that has not begun */
    }
    if (in_use && !w->draining) rtr_registry_failed(&r->workers, slot, now_ms);
    rtr_registry_lost(&r->workers, slot);
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        struct rtr_worker *o = worker(r, i);
        if (!live(o) || o->role == w->role) continue;
        struct wire_unpair *m = &send_to(out, o->conn, WIRE_UNPAIR_MSG)->unpair;
        m->name = wire_text(w->name);
        m->incarnation = w->incarnation;
    }
    struct run *run;
    while ((run = next_hurt(r))) {
        run->hurt = false;
        if (run->state != CLOSING) try_again(r, run, TOW_EPEER, "a worker was lost", now_ms, out);
    }
    TOW_LIST_EACH_SAFE (n, &r->attempts) attempt_try_free(r, TOW_CONTAINER(n, struct attempt, all));
}

static void on_hello(struct rtr_route *r, uint64_t conn, const struct wire_hello *m,
                     uint64_t now_ms, struct rtr_actions *out)
{
    struct rtr_join *j = &r->join;
    int rc = rtr_registry_check(&r->workers, m, now_ms, j, &r->err);
    if (rc == 0 && j->replaced != RTR_NO_WORKER) {
        worker_lost(r, j->replaced, "it joins anew", now_ms, out);
        close_conn(out, j->old_conn, "replaced by a new connection of the same name");
    }
    if (rc == 0) rc = rtr_registry_admit(&r->workers, j, conn, m, now_ms, &r->err);
    if (rc < 0) {
        if (rtr_registry_refused(&r->workers, m, j, &r->err, now_ms))
            tow_fail(&act(out, RTR_DO_LOG)->refusal.err, rc, "%s worker %.*s is refused: %s",
                     m->role == WIRE_PREFILL_ROLE ? "prefill" : "decode", (int)m->name.len,
                     m->name.data ? m->name.data : "", r->err.msg);
        struct wire_refuse *f = &send_to(out, conn, WIRE_REFUSE_MSG)->refuse;
        f->code = (int16_t)rc;
        f->field = wire_text(j->field);
        f->ours = wire_text(j->ours);
        f->theirs = wire_text(j->theirs);
        r->err.msg[WIRE_MAX_NOTE] = 0;
        f->note = wire_text(r->err.msg);
        close_conn(out, conn, "join refused");
        return;
    }
    r->warm_again_ms[j->slot] = 0;
    struct wire_welcome *w = &send_to(out, conn, WIRE_WELCOME_MSG)->welcome;
    w->version = m->version_max < WIRE_PROTOCOL_MAX ? m->version_max : WIRE_PROTOCOL_MAX;
    w->router_incarnation = r->cfg.incarnation;
    w->heartbeat_ms = r->cfg.heartbeat_ms;
    r->dirty = true;
}

/* The live decode worker that prefill worker p speaks of, or RTR_NO_WORKER. */
static uint32_t decode_of(struct rtr_route *r, uint32_t p, struct wire_text name,
                          uint64_t incarnation)
{
    uint32_t d = rtr_registry_by_name(&r->workers, name);
    if (worker(r, p)->role != WIRE_PREFILL_ROLE || d == RTR_NO_WORKER) return RTR_NO_WORKER;
    struct rtr_worker *wd = worker(r, d);
    bool same = live(wd) && wd->role == WIRE_DECODE_ROLE && wd->incarnation == incarnation;
    return same ? d : RTR_NO_WORKER;
}

static void on_paired(struct rtr_route *r, uint32_t p, const struct wire_paired *m, uint64_t now_ms)
{
    uint32_t d = decode_of(r, p, m->name, m->incarnation);
    if (d == RTR_NO_WORKER) return;
    rtr_registry_proved(&r->workers, p, d, m);
    r->workers.retry_ms[p][d] = now_ms + PROVE_AGAIN_MS;
    r->dirty = true;
}

static void on_unanswered(struct rtr_route *r, uint32_t p, const struct wire_unanswered *m,
                          uint64_t now_ms, struct rtr_actions *out)
{
    uint32_t d = decode_of(r, p, m->name, m->incarnation);
    if (d == RTR_NO_WORKER) return;
    uint32_t slot = rtr_registry_unanswered(&r->workers, p, d, now_ms);
    if (slot == RTR_NO_WORKER) return;
    r->stats.relinks++;
    tow_fail(&act(out, RTR_DO_LOG)->refusal.err, TOW_EPEER,
             "%s: told to make its data link anew: %s greets %s without answer, and %s has no "
             "proved link",
             worker(r, slot)->name, worker(r, p)->name, worker(r, d)->name, worker(r, slot)->name);
    send_to(out, worker(r, slot)->conn, WIRE_RELINK_MSG)->relink.note =
        wire_text(slot == d ? "prefill workers find no answer here, and no link is proved"
                            : "no decode worker's answer arrives here, and no link is proved");
}

static void check_workers(struct rtr_route *r, uint64_t now_ms, struct rtr_actions *out)
{
    const char *why;
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        struct rtr_worker *w = worker(r, i);
        if (!live(w) || rtr_registry_alive(&r->workers, i, now_ms, &why)) continue;
        uint64_t conn = w->conn;
        worker_lost(r, i, why, now_ms, out);
        close_conn(out, conn, why);
    }
}

/* --- messages about a ticket ------------------------------------------------------------------ */

static void on_grant(struct rtr_route *r, struct attempt *a, int s, struct rtr_actions *out)
{
    struct run *run = a->run;
    if (s != D || !run || run->state != RESERVING || a->side[D].state != SIDE_LIVE) return;
    struct rtr_worker *wp = worker(r, a->side[P].slot), *wd = worker(r, a->side[D].slot);
    a->side[P].state = SIDE_LIVE;
    set_state(r, run, PREFILLING);
    struct wire_prefill *m = &send_to(out, wp->conn, WIRE_PREFILL_MSG)->prefill;
    m->ticket = a->ticket;
    m->decode_name = wire_text(wd->name);
    m->decode_incarnation = wd->incarnation;
    m->decode_address = (struct wire_bytes){wd->address, wd->address_bytes};
    m->n_prompt = run->n_prompt;
    m->max_tokens = run->job->max_tokens;
    m->lease_ms = r->cfg.lease_ms;
    fill_sampling(run, &m->sampling);
    m->eos = (struct wire_ids){r->eos, r->cfg.n_eos};
    m->tokens = tokens_of(run);
    m->capture = run->job->capture;
    if (run->job->warm_up) return;
    struct rtr_action *t = act(out, RTR_DO_PLACED);
    t->job = run->job;
    t->cookie = run->job->cookie;
    t->choice = run->choice;
    t->prefill = a->side[P].slot;
    t->decode = a->side[D].slot;
    t->n_output = run->n_output;
}

/* Runs that only waited for rows and have no more to wait for. */
static void close_whole(struct rtr_route *r, uint64_t now_ms, struct rtr_actions *out)
{
    if (!r->in_state[CLOSING]) return;
    TOW_LIST_EACH_SAFE (n, &r->runs) {
        struct run *run = TOW_CONTAINER(n, struct run, all);
        if (run->state == CLOSING && !must_wait_for_rows(run)) close_run(r, run, now_ms, out);
    }
}

static void on_deny(struct rtr_route *r, struct attempt *a, int s, const struct wire_deny *m,
                    uint64_t now_ms, struct rtr_actions *out)
{
    struct run *run = a->run;
    uint32_t slot = a->side[s].slot;
    char text[WIRE_MAX_NOTE + 1];
    side_over(r, a, s);
    r->stats.denied++;
    if (!run) {
        attempt_try_free(r, a);
        return;
    }
    if (run->state == CLOSING) return;
    switch (m->code) {
    case TOW_EFULL:
    case TOW_EBUSY:
    case TOW_ENOMEM:
        rtr_registry_busy(&r->workers, slot, m->retry_after_ms, now_ms);
        requeue(r, run, 0, now_ms, out);
        break;
    case TOW_EDRAIN:
        worker(r, slot)->draining = true;
        requeue(r, run, 0, now_ms, out);
        break;
    case TOW_ESTATE: /* the id was live there: take another, but not for ever */
        try_again(r, run, TOW_ESTATE, "its ticket was live already", now_ms, out);
        break;
    default:
        fail_job(r, run, m->code < 0 ? m->code : TOW_EPEER, 0, "refused_by_worker",
                 wire_text_copy(m->note, text, sizeof text), now_ms, out);
    }
}

/* Whose fault is it? The one who reports, unless it reports that pages did not arrive: that may be
 * either one's, or of what lies between. */
static void blame(struct rtr_route *r, const struct attempt *a, int s, int code, uint64_t now_ms)
{
    switch (code) {
    case TOW_EPEER:
    case TOW_ETIME:
    case TOW_EDIGEST:
        if (side_worker(r, a, P) && side_worker(r, a, D))
            rtr_registry_link_failed(&r->workers, a->side[P].slot, a->side[D].slot, now_ms);
        break;
    case TOW_ECANCEL:
    case TOW_ESTATE: break;
    default:
        if (side_worker(r, a, s)) rtr_registry_failed(&r->workers, a->side[s].slot, now_ms);
    }
}

static void on_failed(struct rtr_route *r, struct attempt *a, int s, const struct wire_failed *m,
                      uint64_t now_ms, struct rtr_actions *out)
{
    struct run *run = a->run;
    int code = m->code < 0 ? m->code : TOW_EPEER;
    uint32_t slot = a->side[s].slot;
    char text[WIRE_MAX_NOTE + 1];
    side_over(r, a, s);
    if (!run) {
        attempt_try_free(r, a);
        return;
    }
    if (run->state == CLOSING || needless(run, s)) return;
    switch (code) {
    case TOW_EFULL:
    case TOW_EBUSY:
    case TOW_EDRAIN:
        r->stats.pushed_back++;
        rtr_registry_busy(&r->workers, slot, 100, now_ms);
        requeue(r, run, 0, now_ms, out);
        return;
    case TOW_EINVAL:
    case TOW_ETOOBIG:
    case TOW_ENUMERIC:
        fail_job(r, run, code, 0, "failed_on_worker", wire_text_copy(m->note, text, sizeof text),
                 now_ms, out);
        return;
    default: break;
    }
    blame(r, a, s, code, now_ms);
    try_again(r, run, code, tow_err_text(code), now_ms, out);
}

static bool keep_outputs(struct run *run, const struct wire_tokens *m)
{
    uint32_t need = run_tokens(run) + m->ids.n;
    if (need > run->cap) {
        uint32_t cap = need + need / 2 + 64;
        uint32_t *all = realloc(run->all_tokens, cap * sizeof *all);
        if (!all) return false;
        if (!run->all_tokens) memcpy(all, run->prompt, run->n_prompt * sizeof *all);
        run->all_tokens = all;
        run->cap = cap;
    }
    if (m->ids.n)
        memcpy(run->all_tokens + run_tokens(run), m->ids.data, m->ids.n * sizeof(uint32_t));
    run->n_output += m->ids.n;
    return true;
}

/* D broke the protocol about this ticket: nothing of it can be believed any more. */
static void distrust(struct rtr_route *r, struct run *run, const char *why, uint64_t now_ms,
                     struct rtr_actions *out)
{
    r->stats.distrusted++;
    rtr_registry_failed(&r->workers, run->attempt->side[D].slot, now_ms);
    try_again(r, run, TOW_EWIRE, why, now_ms, out);
}

static void on_tokens(struct rtr_route *r, struct attempt *a, int s, const struct wire_tokens *m,
                      uint64_t now_ms, struct rtr_actions *out)
{
    struct run *run = a->run;
    if (s != D || !run || a->side[D].state != SIDE_LIVE) return;
    if (run->state != PREFILLING && run->state != STREAMING) return;
    if (m->first != run->n_output || m->ids.n > run->job->max_tokens - run->n_output) {
        distrust(r, run, "tokens out of order", now_ms, out);
        return;
    }
    if (!keep_outputs(run, m)) {
        fail_job(r, run, TOW_ENOMEM, 0, NULL, "out of memory", now_ms, out);
        return;
    }
    if (run->state == PREFILLING) set_state(r, run, STREAMING);
    run->progressed = true;
    run->deadline_ms = now_ms + r->cfg.stall_ms;
    if (run->job->warm_up) return;
    r->stats.output_tokens += m->ids.n;
    struct rtr_action *t = act(out, RTR_DO_TOKENS);
    t->job = run->job;
    t->cookie = run->job->cookie;
    t->choice = run->choice;
    t->msg.type = WIRE_TOKENS_MSG;
    t->msg.tokens = *m;
}

static void on_finish(struct rtr_route *r, struct attempt *a, int s, const struct wire_finish *m,
                      uint64_t now_ms, struct rtr_actions *out)
{
    struct run *run = a->run;
    if (s != D) return;
    side_over(r, a, D);
    if (!run) {
        attempt_try_free(r, a);
        return;
    }
    if (run->state == CLOSING) return; /* it was under way when a stop string ended the answer */
    bool length = m->reason == WIRE_FINISH_LENGTH;
    bool running = run->state == PREFILLING || run->state == STREAMING;
    bool whole = !length || run->n_output == run->job->max_tokens;
    if (!running || m->n_output != run->n_output || !whole) {
        distrust(r, run, "finish does not fit the tokens", now_ms, out);
        return;
    }
    for (int k = P; k <= D; k++)
        if (side_worker(r, a, k)) rtr_registry_worked(&r->workers, a->side[k].slot);
    if (side_worker(r, a, P) && side_worker(r, a, D))
        rtr_registry_link_worked(&r->workers, a->side[P].slot, a->side[D].slot);
    if (run->job->warm_up) warmed(r, run);
    if (must_wait_for_rows(run)) {
        wait_for_rows(r, run, length, now_ms);
        return;
    }
    /* Prefill is done too, only its last word may be under way. */
    run->attempt = NULL;
    a->run = NULL;
    a->side[P].since_ms = now_ms;
    if (a->side[P].state == SIDE_NONE) side_over(r, a, P);
    attempt_try_free(r, a);
    finish_run(r, run, length, now_ms, out);
}

static void on_captured(struct attempt *a, int s, const struct wire_captured *m,
                        struct rtr_actions *out)
{
    struct run *run = a->run ? a->run : s == P ? a->owes : NULL;
    if (!run || run->job->capture.len == 0 || m->step > run->job->max_tokens) return;
    struct rtr_action *c = act(out, RTR_DO_CAPTURED);
    c->job = run->job;
    c->cookie = run->job->cookie;
    c->choice = run->choice;
    c->msg.type = WIRE_CAPTURED_MSG;
    c->msg.captured = *m;
}

static void on_progress(struct rtr_route *r, struct attempt *a, int s, uint32_t done,
                        uint64_t now_ms)
{
    if (s != P || a->side[P].state == SIDE_OVER || done > a->n_tokens) return;
    uint32_t left = a->n_tokens - done;
    if (left < a->tokens_left) {
        drop_tokens(worker(r, a->side[P].slot), a, a->tokens_left - left);
        r->dirty = true;
    }
    if (!a->run) return;
    a->run->progressed = true;
    if (a->run->state == PREFILLING) a->run->deadline_ms = now_ms + r->cfg.stall_ms;
}

/* The side's last word, which needs no decision about the run. */
static void on_last_word(struct rtr_route *r, struct attempt *a, int s, bool done, uint64_t now_ms,
                         struct rtr_actions *out)
{
    struct run *run = a->run;
    side_over(r, a, s);
    if (!run)
        attempt_try_free(r, a);
    else if (run->state != CLOSING && !done && !needless(run, s))
        try_again(r, run, TOW_ECANCEL, "a worker cancelled it by itself", now_ms, out);
}

static void on_ticket(struct rtr_route *r, uint32_t slot, const struct wire_msg *m,
                      struct wire_ticket t, uint64_t now_ms, struct rtr_actions *out)
{
    struct attempt *a = find_attempt(r, t);
    if (!a) return; /* its last word came before, or the ticket was never ours */
    int s = worker(r, slot)->role == WIRE_PREFILL_ROLE ? P : D;
    if (a->side[s].slot != slot) return;
    if (a->side[s].state != SIDE_LIVE && a->side[s].state != SIDE_ENDING) return;
    switch (m->type) {
    case WIRE_GRANT_MSG: on_grant(r, a, s, out); break;
    case WIRE_DENY_MSG: on_deny(r, a, s, &m->deny, now_ms, out); break;
    case WIRE_PROGRESS_MSG: on_progress(r, a, s, m->progress.tokens_done, now_ms); break;
    case WIRE_PREFILL_DONE_MSG: on_last_word(r, a, s, s == P, now_ms, out); break;
    case WIRE_FAILED_MSG: on_failed(r, a, s, &m->failed, now_ms, out); break;
    case WIRE_TOKENS_MSG: on_tokens(r, a, s, &m->tokens, now_ms, out); break;
    case WIRE_CAPTURED_MSG: on_captured(a, s, &m->captured, out); break;
    case WIRE_FINISH_MSG: on_finish(r, a, s, &m->finish, now_ms, out); break;
    case WIRE_CANCELLED_MSG: on_last_word(r, a, s, false, now_ms, out); break;
    default: break;
    }
}

static void on_message(struct rtr_route *r, const struct rtr_event *ev, struct rtr_actions *out)
{
    const struct wire_msg *m = ev->msg;
    uint32_t slot = rtr_registry_by_conn(&r->workers, ev->conn);
    if (slot == RTR_NO_WORKER) {
        if (m->type == WIRE_HELLO_MSG)
            on_hello(r, ev->conn, &m->hello, ev->now_ms, out);
        else
            close_conn(out, ev->conn, "first message was not HELLO");
        return;
    }
    rtr_registry_heard(&r->workers, slot, ev->now_ms);
    switch (m->type) {
    case WIRE_HEARTBEAT_MSG:
        rtr_registry_beat(&r->workers, slot, &m->heartbeat, ev->now_ms);
        r->dirty = true;
        break;
    case WIRE_PAIRED_MSG: on_paired(r, slot, &m->paired, ev->now_ms); break;
    case WIRE_UNANSWERED_MSG: on_unanswered(r, slot, &m->unanswered, ev->now_ms, out); break;
    case WIRE_PING_MSG: send_to(out, ev->conn, WIRE_PONG_MSG)->pong.seq = m->ping.seq; break;
    case WIRE_BYE_MSG: worker(r, slot)->draining = true; break;
    case WIRE_GRANT_MSG: on_ticket(r, slot, m, m->grant.ticket, ev->now_ms, out); break;
    case WIRE_DENY_MSG: on_ticket(r, slot, m, m->deny.ticket, ev->now_ms, out); break;
    case WIRE_PROGRESS_MSG: on_ticket(r, slot, m, m->progress.ticket, ev->now_ms, out); break;
    case WIRE_PREFILL_DONE_MSG:
        on_ticket(r, slot, m, m->prefill_done.ticket, ev->now_ms, out);
        break;
    case WIRE_FAILED_MSG: on_ticket(r, slot, m, m->failed.ticket, ev->now_ms, out); break;
    case WIRE_TOKENS_MSG: on_ticket(r, slot, m, m->tokens.ticket, ev->now_ms, out); break;
    case WIRE_CAPTURED_MSG: on_ticket(r, slot, m, m->captured.ticket, ev->now_ms, out); break;
    case WIRE_FINISH_MSG: on_ticket(r, slot, m, m->finish.ticket, ev->now_ms, out); break;
    case WIRE_CANCELLED_MSG: on_ticket(r, slot, m, m->cancelled.ticket, ev->now_ms, out); break;
    case WIRE_HELLO_MSG: close_conn(out, ev->conn, "a second HELLO"); break;
    default: break;
    }
}

/* --- time ------------------------------------------------------------------------------------- */

static void run_late(struct rtr_route *r, struct run *run, uint64_t now_ms, struct rtr_actions *out)
{
    const char *why;
    if (run->state == CLOSING) {
        close_run(r, run, now_ms, out);
        return;
    }
    if (!run->progressed && now_ms >= run->queue_ends_ms) {
        bool ready = rtr_route_ready(r, now_ms, &why);
        /* A stream that gave way for pages gets them when older answers end, however long those
         * are: what its client has is not thrown away for that. */
        if (ready && run->n_output > 0) {
            run->queue_ends_ms = now_ms + r->cfg.queue_timeout_ms;
            return;
        }
        char late[64];
        snprintf(late, sizeof late, "waited longer than %g s (--queue-timeout)",
                 r->cfg.queue_timeout_ms / 1000.0);
        fail_job(r, run, TOW_EBUSY, 503, ready ? "queue_timeout" : "no_capacity",
                 ready ? late : "no workers are ready", now_ms, out);
        return;
    }
    int s = run->state == PREFILLING && run->attempt->tokens_left ? P : D;
    if (side_worker(r, run->attempt, s))
        rtr_registry_failed(&r->workers, run->attempt->side[s].slot, now_ms);
    try_again(r, run, TOW_ETIME, "a worker did not answer in time", now_ms, out);
}

static void check_runs(struct rtr_route *r, uint64_t now_ms, struct rtr_actions *out)
{
    struct tow_list *n = r->runs.next;
    while (n != &r->runs) {
        struct run *run = TOW_CONTAINER(n, struct run, all);
        n = n->next;
        if (now_ms < run_deadline(run)) continue;
        bool single = run->job->n_runs == 1;
        run_late(r, run, now_ms, out);
        if (!single) n = r->runs.next; /* siblings may be gone; the late ones are no longer late */
    }
}

/* Wound-up tickets must end; a worker that will not say so is broken. */
static void check_attempts(struct rtr_route *r, uint64_t now_ms, struct rtr_actions *out)
{
    uint32_t broken = RTR_NO_WORKER;
    TOW_LIST_EACH_SAFE (n, &r->attempts) {
        struct attempt *a = TOW_CONTAINER(n, struct attempt, all);
        if (a->run) continue;
        for (int s = P; s <= D; s++) {
            struct side *side = &a->side[s];
            if (side->state == SIDE_LIVE && now_ms >= side->since_ms + r->cfg.lease_ms)
                side_cancel(r, a, s, WIRE_CANCEL_ELSEWHERE, now_ms, out);
            else if (side->state == SIDE_ENDING && now_ms >= side->since_ms + r->cfg.cancel_ms)
                broken = side->slot;
        }
    }
    if (broken == RTR_NO_WORKER) return;
    uint64_t conn = worker(r, broken)->conn;
    const char *why = "it does not answer CANCEL";
    worker_lost(r, broken, why, now_ms, out);
    close_conn(out, conn, why);
}

static void check_drain(struct rtr_route *r, uint64_t now_ms, struct rtr_actions *out)
{
    if (!r->draining || r->drained) return;
    while (now_ms >= r->drain_ends_ms && !tow_list_empty(&r->runs)) {
        struct run *run = TOW_CONTAINER(r->runs.next, struct run, all);
        if (run->state == CLOSING) {
            close_run(r, run, now_ms, out);
        } else {
            r->cut |= !run->job->warm_up;
            fail_job(r, run, TOW_EDRAIN, 0, "draining", "drain limit passed", now_ms, out);
        }
    }
    uint32_t clients = r->in_state[QUEUED] + r->in_state[RESERVING] + r->in_state[PREFILLING] +
                       r->in_state[STREAMING] + r->in_state[CLOSING];
    if (clients == 0) {
        r->drained = true;
        act(out, RTR_DO_DRAINED)->cut = r->cut;
    }
}

/* --- the machine ------------------------------------------------------------------------------ */

static void settle(struct rtr_route *r, uint64_t now_ms, struct rtr_actions *out)
{
    close_whole(r, now_ms, out);
    if (!r->dirty) return;
    prove_all(r, now_ms, out);
    if (!r->draining) warm_up_all(r, now_ms);
    dispatch(r, false, now_ms, out);
}

void rtr_route_step(struct rtr_route *r, const struct rtr_event *ev, struct rtr_actions *out)
{
    uint32_t slot;
    switch (ev->kind) {
    case RTR_ON_MESSAGE: on_message(r, ev, out); break;
    case RTR_ON_CLOSED:
        slot = rtr_registry_by_conn(&r->workers, ev->conn);
        if (slot != RTR_NO_WORKER) worker_lost(r, slot, "its connection ended", ev->now_ms, out);
        break;
    case RTR_ON_TICK:
        check_workers(r, ev->now_ms, out);
        check_attempts(r, ev->now_ms, out);
        check_runs(r, ev->now_ms, out);
        r->dirty = true;
        break;
    case RTR_ON_DRAIN: {
        uint64_t ends = ev->limit_ms ? ev->now_ms + ev->limit_ms : UINT64_MAX;
        if (!r->draining || ends < r->drain_ends_ms) r->drain_ends_ms = ends;
        r->draining = true;
        break;
    }
    }
    settle(r, ev->now_ms, out);
    check_drain(r, ev->now_ms, out);
}

/* --- clients ---------------------------------------------------------------------------------- */

static int refuse(struct rtr_route *r, struct rtr_refusal *f, int code, uint32_t n,
                  const char *reason, bool again, const char *text)
{
    memset(f, 0, sizeof *f);
    r->stats.refused += n;
    f->reason = reason;
    f->retry_after_s = again ? rtr_route_retry_after_s(r) : 0;
    return tow_fail(&f->err, code, "%s", text);
}

/* May n requests more wait, with that many prompt tokens? */
static int check_queue(struct rtr_route *r, struct rtr_refusal *f, uint32_t n, uint64_t tokens)
{
    char text[160];
    if (r->waiting + n > r->cfg.max_queued) {
        snprintf(text, sizeof text, "%u requests wait already, at most %u may (--max-queued)",
                 r->waiting, r->cfg.max_queued);
        return refuse(r, f, TOW_EFULL, n, "queue_full", true, text);
    }
    if (r->waiting_tokens + tokens > r->cfg.max_queued_tokens) {
        snprintf(text, sizeof text,
                 "%llu prompt tokens wait already, at most %u may (--max-queued-tokens)",
                 (unsigned long long)r->waiting_tokens, r->cfg.max_queued_tokens);
        return refuse(r, f, TOW_EFULL, n, "queue_tokens_full", true, text);
    }
    return 0;
}

int rtr_route_room(struct rtr_route *r, uint64_t now_ms, struct rtr_refusal *f)
{
    (void)now_ms;
    if (r->draining) return refuse(r, f, TOW_EDRAIN, 1, "draining", true, "the router is draining");
    return check_queue(r, f, 1, 1);
}

static int copy_sampling(struct rtr_job *job, const struct rtr_sampling *s)
{
    struct wire_sampling *w = &job->sampling;
    w->temperature = s->temperature;
    w->top_p = s->top_p;
    w->min_p = s->min_p;
    w->top_k = s->top_k;
    w->frequency_penalty = s->frequency_penalty;
    w->presence_penalty = s->presence_penalty;
    w->repetition_penalty = s->repetition_penalty;
    w->ignore_eos = s->ignore_eos;
    w->want_logprobs = s->want_logprobs;
    w->n_top = s->n_top;
    w->index_topk = s->index_topk;
    if (s->n_bias == 0) return 0;
    job->bias = malloc(8 * (size_t)s->n_bias);
    if (!job->bias) return TOW_ENOMEM;
    struct wire_writer out = {.data = job->bias, .cap = 8 * (size_t)s->n_bias};
    for (uint32_t i = 0; i < s->n_bias; i++) {
        wire_put_u32(&out, (uint32_t)s->bias[i].id);
        wire_put_f32(&out, s->bias[i].bias);
    }
    w->logit_bias = (struct wire_bytes){job->bias, (uint32_t)out.len};
    return 0;
}

static void job_free(struct rtr_job *job)
{
    tow_list_remove(&job->node);
    for (uint32_t i = 0; i < job->n_runs; i++) free(job->runs[i].all_tokens);
    free(job->bias);
    free(job);
}

int rtr_route_submit(struct rtr_route *r, uint64_t now_ms, const struct rtr_request *req,
                     void *cookie, struct rtr_job **out, struct rtr_refusal *f,
                     struct rtr_actions *acts)
{
    uint32_t n = req->n_choices;
    uint64_t tokens = 0;
    char text[200];
    for (uint32_t i = 0; i < n; i++) tokens += req->choices[i].n_prompt;
    if (n == 0)
        return refuse(r, f, TOW_EINVAL, 0, "empty", false, "the request asks for no choice");
    for (uint32_t i = 0; i < n; i++) {
        uint32_t n_prompt = req->choices[i].n_prompt;
        uint64_t whole = (uint64_t)n_prompt + req->max_tokens;
        if (n_prompt && req->max_tokens && could_ever(r, whole, req->capture_shadow ? 2 : 1))
            continue;
        say_too_big(text, sizeof text, n_prompt, req->max_tokens,
                    rtr_route_context(r, req->capture_shadow), req->capture_shadow);
        return refuse(r, f, TOW_EINVAL, n, "too_large", false, text);
    }
    if (n > r->cfg.max_queued) {
        snprintf(text, sizeof text, "n: %u answers in all, must be at most %u (--max-queued)", n,
                 r->cfg.max_queued);
        refuse(r, f, TOW_EINVAL, n, "too_large", false, text);
        f->param = "n";
        return TOW_EINVAL;
    }
    if (tokens > r->cfg.max_queued_tokens) {
        snprintf(text, sizeof text, "prompts have %llu tokens, at most %u (--max-queued-tokens)",
                 (unsigned long long)tokens, r->cfg.max_queued_tokens);
        return refuse(r, f, TOW_EINVAL, n, "too_large", false, text);
    }
    if (r->draining) return refuse(r, f, TOW_EDRAIN, n, "draining", true, "the router is draining");
    int full = check_queue(r, f, n, tokens);
    if (full < 0) return full;
    struct rtr_job *job = job_new(n);
    if (!job || copy_sampling(job, &req->sampling) < 0) {
        free(job);
        return refuse(r, f, TOW_ENOMEM, n, "memory", true, "out of memory");
    }
    job->req = req;
    job->cookie = cookie;
    job->max_tokens = req->max_tokens;
    job->capture = (struct wire_bytes){req->capture, req->capture_bytes};
    job->pages_per_page = req->capture_shadow ? 2 : 1;
    for (uint32_t i = 0; i < n; i++) {
        job->runs[i].prompt = (const uint32_t *)req->choices[i].prompt;
        job->runs[i].n_prompt = req->choices[i].n_prompt;
        job->runs[i].seed = req->choices[i].seed;
    }
    tow_list_append(&r->jobs, &job->node);
    for (uint32_t i = 0; i < n; i++) start_run(r, &job->runs[i], now_ms);
    *out = job;
    dispatch(r, true, now_ms, acts);
    return 0;
}

void rtr_route_cancel(struct rtr_route *r, struct rtr_job *job, uint64_t now_ms,
                      struct rtr_actions *acts)
{
    job->deaf = true;
    for (uint32_t i = 0; i < job->n_runs; i++)
        cancel_run(r, &job->runs[i], WIRE_CANCEL_CLIENT, now_ms, acts);
}

bool rtr_route_cancel_choice(struct rtr_route *r, struct rtr_job *job, uint32_t choice,
                             uint64_t now_ms, struct rtr_actions *acts)
{
    if (choice >= job->n_runs || job->runs[choice].state == OVER) return true;
    struct run *run = &job->runs[choice];
    if (run->state == STREAMING && must_wait_for_rows(run)) {
        side_cancel(r, run->attempt, D, WIRE_CANCEL_STOP_STRING, now_ms, acts);
        wait_for_rows(r, run, false, now_ms);
        return false;
    }
    let_go(r, run, WIRE_CANCEL_STOP_STRING, now_ms, acts);
    r->stats.finished++; /* a stop string is a good end */
    if (job->n_left == 1) job->deaf = true;
    end_run(r, run);
    return true;
}

bool rtr_job_deaf(const struct rtr_job *job)
{
    return job->deaf;
}

void rtr_route_reap(struct rtr_route *r)
{
    TOW_LIST_EACH_SAFE (n, &r->dead) job_free(TOW_CONTAINER(n, struct rtr_job, node));
}

/* --- what others ask -------------------------------------------------------------------------- */

bool rtr_route_ready(struct rtr_route *r, uint64_t now_ms, const char **why)
{
    bool joined[2] = {false, false}, proved = false;
    if (r->draining) {
        *why = "draining";
        return false;
    }
    for (uint32_t p = 0; p < RTR_MAX_WORKERS; p++) {
        struct rtr_worker *wp = worker(r, p);
        if (!live(wp)) continue;
        joined[wp->role] = true;
        if (wp->role != WIRE_PREFILL_ROLE) continue;
        for (uint32_t d = 0; d < RTR_MAX_WORKERS; d++) {
            struct rtr_worker *wd = worker(r, d);
            if (r->workers.proof[p][d] != RTR_PROVED) continue;
            proved = true;
            if (!rtr_registry_link_open(&r->workers, p, d, now_ms)) continue;
            if (wp->state == RTR_SERVING && wd->state == RTR_SERVING && !wp->draining &&
                !wd->draining && wp->circuit != RTR_OPEN && wd->circuit != RTR_OPEN)
                return true;
        }
    }
    *why = !joined[P]   ? "no prefill worker"
           : !joined[D] ? "no decode worker"
           : !proved    ? "no pair proved"
                        : "no pair is warm and well";
    return false;
}

uint32_t rtr_route_context(const struct rtr_route *r, bool shadow)
{
    uint32_t most[2] = {0, 0};
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        const struct rtr_worker *w = &r->workers.workers[i];
        if (!live(w)) continue;
        uint64_t n = (uint64_t)(w->pages >> shadow) * w->page_tokens;
        if (n > w->max_context) n = w->max_context;
        if (w->role == WIRE_PREFILL_ROLE && n > w->max_pending_tokens) n = w->max_pending_tokens;
        if (n > most[w->role]) most[w->role] = (uint32_t)n;
    }
    if (!most[D]) return most[P];
    return most[P] && most[P] < most[D] ? most[P] : most[D];
}

int rtr_route_drain_worker(struct rtr_route *r, const char *name, struct tow_err *err,
                           struct rtr_actions *acts)
{
    uint32_t slot = rtr_registry_by_name(&r->workers, wire_text(name));
    if (slot == RTR_NO_WORKER || !live(worker(r, slot)))
        return tow_fail(err, TOW_ENOENT, "no worker of that name is here");
    worker(r, slot)->draining = true;
    send_to(acts, worker(r, slot)->conn, WIRE_DRAIN_MSG)->drain.limit_ms = 0;
    return 0;
}

/* When the queue of now will have gone, by what prefill computes and what decode finishes. */
uint32_t rtr_route_retry_after_s(const struct rtr_route *r)
{
    double rate = 0, tokens = (double)r->waiting_tokens, s = 1;
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        const struct rtr_worker *w = &r->workers.workers[i];
        if (!live(w) || w->role != WIRE_PREFILL_ROLE) continue;
        rate += w->beat.tokens_per_s;
        tokens += (double)w->held_tokens;
    }
    if (rate > 0 && tokens / rate > s) s = tokens / rate;
    if (r->waiting * r->finish_gap_s > s) s = r->waiting * r->finish_gap_s;
    return s > 600 ? 600 : (uint32_t)(s + 0.999);
}

const struct rtr_registry *rtr_route_registry(const struct rtr_route *r)
{
    return &r->workers;
}

void rtr_route_stats(const struct rtr_route *r, struct rtr_route_stats *out)
{
    *out = r->stats;
    out->queued = r->in_state[QUEUED];
    out->reserving = r->in_state[RESERVING];
    out->prefilling = r->in_state[PREFILLING];
    out->streaming = r->in_state[STREAMING] + r->in_state[CLOSING];
    out->waiting = r->waiting;
    out->waiting_tokens = r->waiting_tokens;
    out->draining = r->draining;
}

static uint32_t *copy_ids(const uint32_t *ids, uint32_t n)
{
    uint32_t *p = calloc(n ? n : 1, sizeof *p);
    if (p && n) memcpy(p, ids, n * sizeof *p);
    return p;
}

int rtr_route_new(struct rtr_route **out, const struct rtr_route_config *cfg, struct tow_err *err)
{
    if (cfg->max_queued == 0)
        return tow_fail(err, TOW_EINVAL, "max-queued is 0, must be at least 1");
    if (cfg->max_queued_tokens == 0)
        return tow_fail(err, TOW_EINVAL, "max-queued-tokens is 0, must be at least 1");
    if (cfg->queue_timeout_ms == 0)
        return tow_fail(err, TOW_EINVAL, "queue-timeout is 0, must be above 0");
    if (cfg->n_eos > WIRE_MAX_EOS)
        return tow_fail(err, TOW_EINVAL, "%u eos ids, at most %u", cfg->n_eos, WIRE_MAX_EOS);
    struct rtr_route *r = calloc(1, sizeof *r);
    if (!r) return tow_fail(err, TOW_ENOMEM, "out of memory");
    r->cfg = *cfg;
    if (!r->cfg.lease_ms) r->cfg.lease_ms = 30000;
    if (!r->cfg.reserve_ms) r->cfg.reserve_ms = 10000;
    if (!r->cfg.stall_ms) r->cfg.stall_ms = 120000;
    if (!r->cfg.cancel_ms) r->cfg.cancel_ms = 30000;
    if (!r->cfg.heartbeat_ms) r->cfg.heartbeat_ms = 1000;
    if (!r->cfg.max_attempts) r->cfg.max_attempts = 4;
    if (!r->cfg.max_passes) r->cfg.max_passes = 64;
    if (!r->cfg.warm_up || !r->cfg.n_warm_up) r->cfg.n_warm_up = 1;
    r->eos = copy_ids(cfg->eos, cfg->n_eos);
    r->warm_up = copy_ids(cfg->warm_up, cfg->warm_up ? r->cfg.n_warm_up : 0);
    if (!r->eos || !r->warm_up) {
        free(r->eos);
        free(r->warm_up);
        free(r);
        return tow_fail(err, TOW_ENOMEM, "out of memory");
    }
    rtr_registry_init(&r->workers, r->cfg.heartbeat_ms, r->cfg.stall_ms, cfg->join_token);
    int rc = rtr_registry_own_facts(&r->workers, cfg->facts, err);
    if (rc < 0) {
        free(r->eos);
        free(r->warm_up);
        free(r);
        return rc;
    }
    tow_list_init(&r->jobs);
    tow_list_init(&r->dead);
    tow_list_init(&r->runs);
    tow_list_init(&r->queue);
    tow_list_init(&r->attempts);
    for (uint32_t i = 0; i < BUCKETS; i++) tow_list_init(&r->buckets[i]);
    r->drain_ends_ms = UINT64_MAX;
    *out = r;
    return 0;
}

void rtr_route_free(struct rtr_route *r)
{
    if (!r) return;
    TOW_LIST_EACH_SAFE (n, &r->attempts) free(TOW_CONTAINER(n, struct attempt, all));
    TOW_LIST_EACH_SAFE (m, &r->jobs) job_free(TOW_CONTAINER(m, struct rtr_job, node));
    rtr_route_reap(r);
    rtr_registry_fini(&r->workers);
    free(r->eos);
    free(r->warm_up);
    free(r);
}
