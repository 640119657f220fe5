/* router/registry.c - see registry.h for the chart.
 *
 * Others' share of a worker is what its heartbeat reports as taken beyond what we hold ourselves.
 * Messages of one worker come in order, and it reports an end only after its pages are back, so
 * this never overestimates for long; where it underestimates the worker's own DENY decides.
 */
#include "router/registry.h"

#include "common/base/err.h"
#include "common/net/peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_OF(x)   #x
#define NUMBER(x)    TEXT_OF(x)
#define PAUSE_MIN_MS 1000u
#define PAUSE_MAX_MS 8000u
#define BUSY_MIN_MS  20u   /* a worker that names no time is not asked in a tight loop */
#define BUSY_MAX_MS  1000u /* and one that names a long time is asked before it may be idle */

void rtr_registry_init(struct rtr_registry *g, uint32_t heartbeat_ms, uint32_t stall_ms,
                       const char *join_token)
{
    memset(g, 0, sizeof *g);
    g->heartbeat_ms = heartbeat_ms;
    g->stall_ms = stall_ms;
    if (join_token) snprintf(g->join_token, sizeof g->join_token, "%s", join_token);
}

void rtr_registry_fini(struct rtr_registry *g)
{
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) free(g->workers[i].facts);
    free(g->facts);
    memset(g, 0, sizeof *g);
}

int rtr_registry_own_facts(struct rtr_registry *g, struct wire_bytes facts, struct tow_err *err)
{
    tow_assert(!g->facts);
    if (!facts.len) return 0;
    g->facts = malloc(facts.len);
    if (!g->facts) return tow_fail(err, TOW_ENOMEM, "no memory for the facts of the router");
    memcpy(g->facts, facts.data, facts.len);
    g->facts_bytes = facts.len;
    return 0;
}

static void set_state(struct rtr_worker *w, enum rtr_worker_state to)
{
    static const uint8_t legal[] = {
        [RTR_GONE] = 1 << RTR_STARTING,
        [RTR_STARTING] = 1 << RTR_SERVING | 1 << RTR_SUSPECT | 1 << RTR_GONE,
        [RTR_SERVING] = 1 << RTR_SUSPECT | 1 << RTR_GONE,
        [RTR_SUSPECT] = 1 << RTR_SERVING | 1 << RTR_STARTING | 1 << RTR_GONE,
    };
    if (w->state == to) return;
    tow_assert(legal[w->state] & 1 << to);
    w->state = to;
}

const char *rtr_worker_state_name(const struct rtr_worker *w)
{
    if (w->state == RTR_GONE) return "gone";
    if (w->state == RTR_SUSPECT) return "suspect";
    if (w->draining) return "draining";
    if (w->circuit != RTR_CLOSED) return "failing";
    return w->state == RTR_STARTING ? "starting" : "serving";
}

/* --- joining ---------------------------------------------------------------------------------- */

static bool find_fact(struct wire_bytes facts, struct wire_text field, struct wire_fact *out)
{
    size_t at = 0;
    while (wire_next_fact(facts, &at, out))
        if (out->field.len == field.len && memcmp(out->field.data, field.data, field.len) == 0)
            return true;
    return false;
}

static void say_diff(struct rtr_join *j, struct wire_text field, struct wire_text ours,
                     struct wire_text theirs)
{
    wire_text_copy(field, j->field, sizeof j->field);
    wire_text_copy(ours, j->ours, sizeof j->ours);
    wire_text_copy(theirs, j->theirs, sizeof j->theirs);
}

static bool same_value(const struct wire_fact *a, const struct wire_fact *b)
{
    return a->value.len == b->value.len && !memcmp(a->value.data, b->value.data, a->value.len);
}

/* Every fact of a class in `mask` must stand in both lists with one value. */
static bool facts_agree(struct wire_bytes ours, struct wire_bytes theirs, unsigned mask,
                        struct rtr_join *diff)
{
    struct wire_fact a, b;
    size_t at = 0;
    while (wire_next_fact(ours, &at, &a)) {
        if (a.class >= WIRE_FACT_FREE || !(mask & 1u << a.class)) continue;
        bool there = find_fact(theirs, a.field, &b);
        if (there && same_value(&a, &b)) continue;
        say_diff(diff, a.field, a.value, there ? b.value : wire_text("(absent)"));
        return false;
    }
    at = 0;
    while (wire_next_fact(theirs, &at, &b)) {
        if (b.class >= WIRE_FACT_FREE || !(mask & 1u << b.class)) continue;
        if (find_fact(ours, b.field, &a)) continue;
        say_diff(diff, b.field, wire_text("(absent)"), b.value);
        return false;
    }
    return true;
}

static struct wire_bytes facts_of(const struct rtr_worker *w)
{
    return (struct wire_bytes){w->facts, w->facts_bytes};
}

static int refuse(struct rtr_join *j, int code, const char *field, const char *ours,
                  const char *theirs, struct tow_err *err)
{
    snprintf(j->field, sizeof j->field, "%s", field);
    snprintf(j->ours, sizeof j->ours, "%s", ours);
    snprintf(j->theirs, sizeof j->theirs, "%s", theirs);
    return tow_fail(err, code, "%s is %s, must be %s", field, theirs, ours);
}

/* "another model", with both names where both are known and tell the two apart. */
static const char *name_models(struct wire_bytes ours, struct wire_bytes theirs, char *out,
                               size_t cap)
{
    struct wire_fact a, b;
    int n = snprintf(out, cap, "another model");
    if (find_fact(ours, wire_text(RTR_MODEL_NAME), &a) &&
        find_fact(theirs, wire_text(RTR_MODEL_NAME), &b) && !same_value(&a, &b))
        snprintf(out + n, cap - (size_t)n, ", '%.*s' and not '%.*s'", (int)a.value.len,
                 a.value.data, (int)b.value.len, b.value.data);
    return out;
}

/* With the router's own model folder. A field that one side does not have is no difference: older
 * workers have none, and a folder of weights needs no tokenizer. */
static int check_own(const struct rtr_registry *g, const struct wire_hello *m, struct rtr_join *j,
                     struct tow_err *err)
{
    const struct wire_bytes own = {g->facts, g->facts_bytes};
    struct wire_fact a, b;
    char models[2 * WIRE_MAX_VALUE + 40];
    for (size_t at = 0; wire_next_fact(own, &at, &a);) {
        if (a.class != WIRE_FACT_TEXT || !find_fact(m->facts, a.field, &b) || same_value(&a, &b))
            continue;
        say_diff(j, a.field, a.value, b.value);
        return tow_fail(err, TOW_EMISMATCH,
                        "%s is %s, must be %s as in this router's --model: it serves %s", j->field,
                        j->theirs, j->ours, name_models(own, m->facts, models, sizeof models));
    }
    return 0;
}

/* With a live worker. Another model is said first: its layout differs only because of it. */
static int check_other(const struct rtr_worker *w, const struct wire_hello *m, struct rtr_join *j,
                       struct tow_err *err)
{
    char a[64], b[64], models[2 * WIRE_MAX_VALUE + 40];
    if (!facts_agree(facts_of(w), m->facts, 1u << WIRE_FACT_MODEL, j))
        return tow_fail(err, TOW_EMISMATCH,
                        "%s is %s, must be %s as of worker %s: it serves %s, or another revision",
                        j->field, j->theirs, j->ours, w->name,
                        name_models(facts_of(w), m->facts, models, sizeof models));
    if (w->page_tokens != m->page_tokens) {
        snprintf(a, sizeof a, "%u", w->page_tokens);
        snprintf(b, sizeof b, "%u", m->page_tokens);
        say_diff(j, wire_text("page_tokens"), wire_text(a), wire_text(b));
    } else if (facts_agree(facts_of(w), m->facts, 1u << WIRE_FACT_WIRE | 1u << WIRE_FACT_LAYOUT,
                           j)) {
        return 0;
    }
    return tow_fail(err, TOW_EMISMATCH, "%s is %s, must be %s as of worker %s", j->field, j->theirs,
                    j->ours, w->name);
}

/* None on both sides, or the same. Without an early way out, so that the time says nothing about
 * the secret. */
static bool token_matches(const struct rtr_registry *g, struct wire_bytes theirs)
{
    size_t n = strlen(g->join_token);
    unsigned diff = n != theirs.len;
    for (size_t i = 0; i < n; i++)
        diff |= (unsigned)((uint8_t)g->join_token[i] ^
                           (theirs.len ? ((const uint8_t *)theirs.data)[i % theirs.len] : 0));
    return diff == 0;
}

static bool is_silent(const struct rtr_registry *g, const struct rtr_worker *w, uint64_t now_ms)
{
    return net_peer_missed(w->heard_ms, g->heartbeat_ms, NET_PEER_SUSPECT_AFTER, now_ms);
}

int rtr_registry_check(const struct rtr_registry *g, const struct wire_hello *m, uint64_t now_ms,
                       struct rtr_join *j, struct tow_err *err)
{
    char a[64], b[64];
    memset(j, 0, sizeof *j);
    j->slot = j->replaced = RTR_NO_WORKER;
    if (!token_matches(g, m->join_token) && g->join_token[0])
        return refuse(j, TOW_EAUTH, "join_token", "the router's",
                      m->join_token.len ? "another" : "none", err);
    if (!token_matches(g, m->join_token)) { /* it would make no pair with a worker that has none */
        refuse(j, TOW_EAUTH, "join_token", "none", "one", err);
        return tow_fail(err, TOW_EAUTH,
                        "join_token is one, must be none: this router has no --join-token-file");
    }
    if (m->version_max < WIRE_PROTOCOL_MIN || m->version_min > WIRE_PROTOCOL_MAX ||
        m->version_min > m->version_max) {
        snprintf(a, sizeof a, "%d..%d", WIRE_PROTOCOL_MIN, WIRE_PROTOCOL_MAX);
        snprintf(b, sizeof b, "%u..%u", m->version_min, m->version_max);
        return refuse(j, TOW_EMISMATCH, "version", a, b, err);
    }
    char name[WIRE_MAX_NAME + 2];
    snprintf(name, sizeof name, "%.*s", (int)m->name.len, m->name.data ? m->name.data : "");
    if (strlen(name) != m->name.len || !net_peer_name_ok(name)) {
        snprintf(a, sizeof a, "1 to %d letters, digits, '.', '_' or '-'", NET_PEER_NAME_MAX);
        return refuse(j, TOW_EINVAL, "name", a, name, err);
    }
    if (m->pages == 0) return refuse(j, TOW_EINVAL, "pages", "at least 1", "0", err);
    if (m->page_tokens == 0) return refuse(j, TOW_EINVAL, "page_tokens", "at least 1", "0", err);
    if (m->max_context == 0) return refuse(j, TOW_EINVAL, "max_context", "at least 1", "0", err);
    if (m->max_tickets == 0) return refuse(j, TOW_EINVAL, "max_tickets", "at least 1", "0", err);
    if (m->role == WIRE_PREFILL_ROLE && m->max_pending_tokens == 0)
        return refuse(j, TOW_EINVAL, "max_pending_tokens", "at least 1", "0", err);

    int rc = check_own(g, m, j, err);
    if (rc < 0) return rc;
    uint32_t same = rtr_registry_by_name(g, m->name), unused = RTR_NO_WORKER;
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        const struct rtr_worker *w = &g->workers[i];
        if (w->state == RTR_GONE) {
            /* Never used first, then the one gone longest. */
            if (unused == RTR_NO_WORKER || w->heard_ms < g->workers[unused].heard_ms) unused = i;
            continue;
        }
        if (i == same) continue;
        if ((rc = check_other(w, m, j, err)) < 0) return rc;
    }
    if (same != RTR_NO_WORKER && g->workers[same].state != RTR_GONE) {
        const struct rtr_worker *w = &g->workers[same];
        if (w->incarnation != m->incarnation && !is_silent(g, w, now_ms)) {
            snprintf(a, sizeof a, "one that no live worker has");
            return refuse(j, TOW_EBUSY, "name", a, w->name, err);
        }
        j->replaced = same;
        j->old_conn = w->conn;
    }
    j->slot = same != RTR_NO_WORKER ? same : unused;
    if (j->slot == RTR_NO_WORKER) {
        snprintf(a, sizeof a, "at most %d", RTR_MAX_WORKERS);
        return refuse(j, TOW_EFULL, "workers", a, "one more", err);
    }
    return 0;
}

int rtr_registry_admit(struct rtr_registry *g, const struct rtr_join *j, uint64_t conn,
                       const struct wire_hello *m, uint64_t now_ms, struct tow_err *err)
{
    struct rtr_worker *w = &g->workers[j->slot];
    tow_assert(w->state == RTR_GONE && w->tickets == 0);
    uint8_t *facts = malloc(m->facts.len ? m->facts.len : 1);
    if (!facts) return tow_fail(err, TOW_ENOMEM, "no memory for the facts of a worker");
    if (m->facts.len) memcpy(facts, m->facts.data, m->facts.len);
    free(w->facts);
    bool known = wire_text_is(m->name, w->name);
    struct rtr_worker old = *w;
    memset(w, 0, sizeof *w);
    if (known) { /* failures outlive a restart */
        w->circuit = old.circuit;
        w->failures = old.failures;
        w->pause_ms = old.pause_ms;
        w->reopen_ms = old.reopen_ms;
        w->total_failures = old.total_failures;
        w->relinks = old.relinks;
        w->relinked_ms = old.relinked_ms;
    }
    w->facts = facts;
    w->facts_bytes = m->facts.len;
    w->role = (enum wire_role)m->role;
    wire_text_copy(m->name, w->name, sizeof w->name);
    wire_text_copy(m->status_url, w->status_url, sizeof w->status_url);
    w->incarnation = m->incarnation;
    w->conn = conn;
    w->heard_ms = w->joined_ms = w->progress_ms = now_ms;
    w->pages = m->pages;
    w->page_tokens = m->page_tokens;
    w->max_context = m->max_context;
    w->max_batch = m->max_batch ? m->max_batch : 1;
    w->chunk_tokens = m->chunk_tokens;
    w->max_pending_tokens = m->max_pending_tokens;
    w->max_tickets = m->max_tickets;
    w->reserve_tokens = m->reserve_tokens;
    w->address_bytes = m->data_address.len;
    if (m->data_address.len) memcpy(w->address, m->data_address.data, m->data_address.len);
    w->beat.pages_free = m->pages;
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        g->proof[j->slot][i] = g->proof[i][j->slot] = RTR_UNPROVED;
        g->retry_ms[j->slot][i] = g->retry_ms[i][j->slot] = 0;
        g->links[j->slot][i] = g->links[i][j->slot] = (struct rtr_link){0};
    }
    set_state(w, RTR_STARTING);
    for (uint32_t i = 0; i < RTR_MAX_REFUSED; i++)
        if (!strcmp(g->refused[i].name, w->name) && g->refused[i].role == w->role)
            g->refused[i].times = 0;
    g->joins++;
    return 0;
}

static bool knocks(const struct rtr_refused *f, uint64_t now_ms)
{
    return f->times > 0 && now_ms < f->last_ms + RTR_REFUSED_MS;
}

bool rtr_registry_refused(struct rtr_registry *g, const struct wire_hello *m,
                          const struct rtr_join *join, const struct tow_err *err, uint64_t now_ms)
{
    struct rtr_refused *at = NULL, new = {.role = (enum wire_role)m->role, .last_ms = now_ms};
    g->refusals++;
    wire_text_copy(m->name, new.name, sizeof new.name);
    snprintf(new.field, sizeof new.field, "%s", join->field);
    snprintf(new.why, sizeof new.why, "%s", err->msg);
    for (uint32_t i = 0; i < RTR_MAX_REFUSED; i++) {
        struct rtr_refused *f = &g->refused[i];
        if (!knocks(f, now_ms)) {
            if (!at) at = f;
        } else if (f->role == new.role && !strcmp(f->name, new.name) && !strcmp(f->why, new.why)) {
            f->times++;
            f->last_ms = now_ms;
            return false;
        }
    }
    if (!at) return false;
    new.times = 1;
    *at = new;
    return true;
}

const struct rtr_refused *rtr_registry_next_refused(const struct rtr_registry *g, uint32_t *at,
                                                    uint64_t now_ms)
{
    while (*at < RTR_MAX_REFUSED) {
        const struct rtr_refused *f = &g->refused[(*at)++];
        if (knocks(f, now_ms)) return f;
    }
    return NULL;
}

void rtr_registry_lost(struct rtr_registry *g, uint32_t slot)
{
    struct rtr_worker *w = &g->workers[slot];
    tow_assert(w->tickets == 0 && w->held_pages == 0 && w->held_tokens == 0);
    set_state(w, RTR_GONE);
    w->conn = 0;
    w->warm = w->draining = false;
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++)
        g->proof[slot][i] = g->proof[i][slot] = RTR_UNPROVED;
    g->losses++;
}

uint32_t rtr_registry_by_conn(const struct rtr_registry *g, uint64_t conn)
{
    for (uint32_t i = 0; conn && i < RTR_MAX_WORKERS; i++)
        if (g->workers[i].conn == conn) return i;
    return RTR_NO_WORKER;
}

uint32_t rtr_registry_by_name(const struct rtr_registry *g, struct wire_text name)
{
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++)
        if (g->workers[i].name[0] && wire_text_is(name, g->workers[i].name)) return i;
    return RTR_NO_WORKER;
}

bool rtr_registry_fit(const struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                      struct rtr_join *diff)
{
    return facts_agree(facts_of(&g->workers[prefill]), facts_of(&g->workers[decode]),
                       1u << WIRE_FACT_NUMERICS, diff);
}

/* --- life signs ------------------------------------------------------------------------------- */

void rtr_registry_heard(struct rtr_registry *g, uint32_t slot, uint64_t now_ms)
{
    struct rtr_worker *w = &g->workers[slot];
    w->heard_ms = now_ms;
    if (w->state == RTR_SUSPECT) set_state(w, w->warm ? RTR_SERVING : RTR_STARTING);
}

void rtr_registry_beat(struct rtr_registry *g, uint32_t slot, const struct wire_heartbeat *m,
                       uint64_t now_ms)
{
    struct rtr_worker *w = &g->workers[slot];
    bool idle = m->running == 0; /* tickets that wait for another worker are no work of this one */
    if (idle || m->progress != w->beat.progress) w->progress_ms = now_ms;
    w->beat = *m;
    uint32_t taken = m->pages_free < w->pages ? w->pages - m->pages_free : 0;
    w->foreign_pages = taken > w->held_pages ? taken - w->held_pages : 0;
    w->foreign_tickets = m->tickets > w->tickets ? m->tickets - w->tickets : 0;
    w->foreign_tokens = m->queued_tokens > w->held_tokens ? m->queued_tokens - w->held_tokens : 0;
    if (m->state == WIRE_DRAINING) w->draining = true;
}

bool rtr_registry_alive(struct rtr_registry *g, uint32_t slot, uint64_t now_ms, const char **why)
{
    struct rtr_worker *w = &g->workers[slot];
    if (net_peer_missed(w->heard_ms, g->heartbeat_ms, NET_PEER_DEAD_AFTER, now_ms)) {
        *why = NUMBER(NET_PEER_DEAD_AFTER) " heartbeats missed";
        return false;
    }
    if (w->beat.state == WIRE_STUCK || now_ms > w->progress_ms + g->stall_ms) {
        *why = "it has work and makes no progress";
        return false;
    }
    if (w->state != RTR_SUSPECT && is_silent(g, w, now_ms)) set_state(w, RTR_SUSPECT);
    return true;
}

void rtr_registry_proved(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                         const struct wire_paired *m)
{
    struct rtr_link *l = &g->links[prefill][decode];
    g->proof[prefill][decode] = m->ok ? RTR_PROVED : RTR_REFUTED;
    l->transport[0] = l->why[0] = 0;
    if (!m->ok) wire_text_copy(m->note, l->why, sizeof l->why);
    if (!m->ok) return;
    l->unanswered = 0;
    wire_text_copy(m->transport, l->transport, sizeof l->transport);
    l->by_am = m->method == WIRE_METHOD_AM;
    l->mb_per_s = m->mb_per_s;
    l->latency_us = m->latency_us;
}

void rtr_registry_unfit(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                        const struct rtr_join *diff)
{
    struct rtr_link *l = &g->links[prefill][decode];
    g->proof[prefill][decode] = RTR_REFUTED;
    l->transport[0] = 0;
    snprintf(l->why, sizeof l->why, "%s: '%.40s' and '%.40s'", diff->field, diff->ours,
             diff->theirs);
}

static bool may_relink(const struct rtr_registry *g, uint32_t slot, uint32_t unanswered,
                       uint64_t now_ms)
{
    const struct rtr_worker *w = &g->workers[slot];
    if (w->state == RTR_GONE || w->state == RTR_SUSPECT || w->draining) return false;
    if (w->relinks && now_ms < w->relinked_ms + RTR_RELINK_MS) return false;
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++)
        if (g->proof[slot][i] == RTR_PROVED || g->proof[i][slot] == RTR_PROVED) return false;
    return w->beat.running == 0 || unanswered >= RTR_UNANSWERED_BUSY;
}

uint32_t rtr_registry_unanswered(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                                 uint64_t now_ms)
{
    struct rtr_link *l = &g->links[prefill][decode];
    if (++l->unanswered < RTR_UNANSWERED) return RTR_NO_WORKER;
    uint32_t pick = RTR_NO_WORKER;
    if (may_relink(g, decode, l->unanswered, now_ms)) pick = decode;
    if (may_relink(g, prefill, l->unanswered, now_ms) &&
        (pick == RTR_NO_WORKER ||
         (g->workers[decode].relinks &&
          g->workers[prefill].relinked_ms < g->workers[decode].relinked_ms)))
        pick = prefill;
    if (pick == RTR_NO_WORKER) return pick;
    g->workers[pick].relinks++;
    g->workers[pick].relinked_ms = now_ms;
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++)
        g->links[pick][i].unanswered = g->links[i][pick].unanswered = 0;
    return pick;
}

void rtr_registry_warmed(struct rtr_registry *g, uint32_t slot)
{
    struct rtr_worker *w = &g->workers[slot];
    w->warm = true;
    if (w->state == RTR_STARTING) set_state(w, RTR_SERVING);
}

/* --- failures --------------------------------------------------------------------------------- */

static uint32_t next_pause_ms(uint32_t last_ms)
{
    uint32_t ms = last_ms ? 2 * last_ms : PAUSE_MIN_MS;
    return ms < PAUSE_MAX_MS ? ms : PAUSE_MAX_MS;
}

void rtr_registry_failed(struct rtr_registry *g, uint32_t slot, uint64_t now_ms)
{
    struct rtr_worker *w = &g->workers[slot];
    w->failures++;
    w->total_failures++;
    if (w->circuit == RTR_CLOSED && w->failures < RTR_TRIP) return;
    w->pause_ms = next_pause_ms(w->pause_ms);
    w->circuit = RTR_OPEN;
    w->probes = 0;
    w->reopen_ms = now_ms + w->pause_ms;
}

void rtr_registry_worked(struct rtr_registry *g, uint32_t slot)
{
    struct rtr_worker *w = &g->workers[slot];
    w->failures = 0;
    w->pause_ms = 0;
    w->probes = 0;
    w->circuit = RTR_CLOSED;
}

void rtr_registry_link_failed(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                              uint64_t now_ms)
{
    struct rtr_link *l = &g->links[prefill][decode];
    if (++l->failures < RTR_TRIP) return;
    l->pause_ms = next_pause_ms(l->pause_ms);
    l->reopen_ms = now_ms + l->pause_ms;
}

void rtr_registry_link_worked(struct rtr_registry *g, uint32_t prefill, uint32_t decode)
{
    struct rtr_link *l = &g->links[prefill][decode];
    l->failures = l->pause_ms = 0;
    l->reopen_ms = 0;
}

void rtr_registry_link_picked(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                              uint64_t now_ms)
{
    struct rtr_link *l = &g->links[prefill][decode];
    if (l->failures >= RTR_TRIP) l->reopen_ms = now_ms + l->pause_ms;
}

bool rtr_registry_link_open(const struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                            uint64_t now_ms)
{
    return now_ms >= g->links[prefill][decode].reopen_ms;
}

void rtr_registry_busy(struct rtr_registry *g, uint32_t slot, uint32_t retry_ms, uint64_t now_ms)
{
    if (retry_ms < BUSY_MIN_MS) retry_ms = BUSY_MIN_MS;
    if (retry_ms > BUSY_MAX_MS) retry_ms = BUSY_MAX_MS;
    g->workers[slot].busy_until_ms = now_ms + retry_ms;
}

bool rtr_registry_open(struct rtr_registry *g, uint32_t slot, bool warm_up, uint64_t now_ms)
{
    struct rtr_worker *w = &g->workers[slot];
    if (w->circuit == RTR_OPEN && now_ms >= w->reopen_ms) {
        w->circuit = RTR_HALF_OPEN;
        w->probes = 0;
    }
    if (w->draining || now_ms < w->busy_until_ms) return false;
    if (w->state != RTR_SERVING && !(warm_up && w->state == RTR_STARTING)) return false;
    if (w->tickets + w->foreign_tickets >= w->max_tickets) return false;
    return w->circuit == RTR_CLOSED || (w->circuit == RTR_HALF_OPEN && w->probes == 0);
}

uint32_t rtr_registry_free_pages(const struct rtr_registry *g, uint32_t slot)
{
    const struct rtr_worker *w = &g->workers[slot];
    uint64_t used = (uint64_t)w->held_pages + w->foreign_pages;
    return used < w->pages ? (uint32_t)(w->pages - used) : 0;
}

uint64_t rtr_registry_free_tokens(const struct rtr_registry *g, uint32_t slot)
{
    const struct rtr_worker *w = &g->workers[slot];
    uint64_t used = w->held_tokens + w->foreign_tokens;
    return used < w->max_pending_tokens ? w->max_pending_tokens - used : 0;
}
