/* kv/mover.c - the transfer thread's loop and the two queues that join it to the control thread.
 *
 * How      Commands and events are heap objects whose pointers pass through a tow_inbox each way. A
 *          command that finds its inbox full is refused to the caller. An event must not be lost,
 *          since pages hang on it: one that finds its inbox full waits in a backlog and goes first
 *          next time. While bytes move, parts wait there too and are told every MOVER_TELL_MS, runs
 *          of pages as one event: waking the control thread costs more than moving a small page.
 *          Offers are worked off a few at a time, so that a long list holds up nobody. What a turn
 *          has to say to a peer leaves together, at its end; acknowledgements alone wait
 *          MOVER_ACK_MS for others, while there is more to move.
 *          Commands are looked at before any message is: whatever the control thread did before it
 *          told the world (expect, then GRANT) is then known here before the world can answer.
 *
 *          The loop sleeps in net_link_wait(), in UCX's descriptor, the wake descriptor, or until
 *          the next tick. Ticks (heartbeats, leases, deadlines) exist only while there is a peer or
 *          a ticket.
 *
 * Rejected A uv loop on this thread: see net/link.c. Timers per ticket: a scan of at most
 *          max_tickets machines four times per heartbeat costs microseconds and has nothing to
 *          forget to disarm.
 */
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/kv/mover_impl.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { COMMANDS = 16384, EVENTS = 16384, TICKS_PER_HEARTBEAT = 4 };

static void on_command_wake(void *arg)
{
    struct kv_mover *m = arg;
    uint64_t one = 1;
    ssize_t n = write(m->wake_fd, &one, sizeof one);
    (void)n; /* full means: signalled already */
}

/* --- the transfer thread ---------------------------------------------------------------------- */

/* A page that is told next to the one told before it needs no event of its own. */
static bool joins_last(struct kv_mover *m, struct kv_ticket t, uint32_t index)
{
    if (tow_list_empty(&m->backlog)) return false;
    struct kv_mover_event *last = &TOW_CONTAINER(m->backlog.prev, struct mover_event, node)->pub;
    if (last->kind != KV_MOVER_PART || last->ticket.id != t.id || last->ticket.nonce != t.nonce ||
        last->index == KV_PART_TAIL || index != last->index + last->n_parts)
        return false;
    last->n_parts++;
    return true;
}

void mover_post(struct kv_mover *m, const struct kv_mover_event *ev, const void *note)
{
    if (m->stopping) return;
    struct mover_event *e = malloc(sizeof *e + ev->note_bytes);
    tow_assert(e); /* an event that cannot be told would leak pages for ever */
    e->pub = *ev;
    tow_list_init(&e->node);
    if (note) memcpy(e->note, note, ev->note_bytes);
    e->pub.note = e->note;
    tow_list_append(&m->backlog, &e->node);
    if (ev->kind != KV_MOVER_PART) m->urgent = true;
}

void mover_post_part(struct kv_mover *m, struct kv_ticket t, uint64_t cookie, uint32_t index)
{
    if (joins_last(m, t, index)) return;
    struct kv_mover_event ev = {
        .kind = KV_MOVER_PART, .ticket = t, .cookie = cookie, .index = index, .n_parts = 1};
    mover_post(m, &ev, NULL);
}

static void post_backlog(struct kv_mover *m)
{
    while (!tow_list_empty(&m->backlog)) {
        struct mover_event *e = TOW_CONTAINER(m->backlog.next, struct mover_event, node);
        tow_list_remove(&e->node);
        if (tow_inbox_post(m->events, &e) == 0) continue;
        tow_list_prepend(&m->backlog, &e->node);
        return;
    }
    m->urgent = false;
}

void mover_run_commands(struct kv_mover *m)
{
    struct command *c;
    while (tow_inbox_take(m->commands, &c)) {
        switch (c->kind) {
        case CMD_CONNECT: mover_connect(m, c); break;
        case CMD_DROP: mover_drop(m, c); break;
        case CMD_SEND: ship_send(m, c); break;
        case CMD_OFFER: tow_list_append(&m->offers, &c->node); continue;
        case CMD_TOUCH: ship_step(m, c->ticket, KV_XFER_TOUCH, 0); break;
        case CMD_EXPECT: ship_expect(m, c); break;
        case CMD_CANCEL: ship_step(m, c->ticket, KV_XFER_CANCEL, c->code); break;
        case CMD_RELINK: /* not inside a callback of the link */
            m->relink = true;
            m->cfg.incarnation = c->incarnation;
            break;
        case CMD_STOP: m->stopping = true; break;
        }
        free(c);
    }
}

/* The first that may go on; one that waits for its receiver holds up no other ticket. */
static bool run_offers(struct kv_mover *m)
{
    TOW_LIST_EACH (n, &m->offers) {
        struct command *c = TOW_CONTAINER(n, struct command, node);
        if (ship_offer_waits(m, c)) continue;
        if (ship_offer_some(m, c)) {
            tow_list_remove(&c->node);
            free(c);
        }
        return true;
    }
    return false;
}

static void publish(struct kv_mover *m, const struct net_link_stats *ls)
{
    m->own.empty_wakes = ls->empty_wakes;
    m->own.ep_errors = ls->ep_errors;
    m->own.tickets_live = m->n_tickets;
    pthread_mutex_lock(&m->lock);
    m->stats = m->own;
    pthread_mutex_unlock(&m->lock);
}

/* Counters go first, so that who hears of something finds it counted. */
static void tell_all(struct kv_mover *m, bool happened)
{
    struct net_link_stats ls;
    net_link_stats(m->link, &ls);
    bool moving = happened || ls.ops > 0 || m->copying;
    if (moving && !m->urgent && m->now_ms < m->posted_ms + MOVER_TELL_MS) return;
    m->posted_ms = m->now_ms;
    publish(m, &ls);
    post_backlog(m);
}

/* The wake descriptor is emptied by what its readiness woke and by nothing else: a note of who
 * wrote to it would come late where the writer has been put aside by the thread that it woke, and
 * this one would turn on the spot until then (3 ms were seen). */
static void sleep_some(struct kv_mover *m, int timeout_ms)
{
    uint64_t n;
    if (!net_link_wait(m->link, m->wake_fd, timeout_ms)) return;
    ssize_t rc = read(m->wake_fd, &n, sizeof n);
    (void)rc;
}

/* The events of the old link's end come first. */
static void relink(struct kv_mover *m)
{
    struct tow_err err = {0};
    struct kv_mover_event ev = {.kind = KV_MOVER_RELINKED};
    size_t bytes;
    m->relink = false;
    m->relinking = true;
    mover_forget_peers(m, "the link is made anew");
    ev.code = net_link_reopen(m->link, &err);
    m->relinking = false;
    m->turned_ms = tow_now_ms();
    const void *address = net_link_address(m->link, &bytes);
    if (ev.code == 0 && bytes > WIRE_MAX_ADDRESS)
        ev.code = tow_fail(&err, TOW_ECONFIG, "data address has grown to %zu bytes", bytes);
    snprintf(ev.text, sizeof ev.text, "%s", err.msg);
    ev.note_bytes = ev.code == 0 ? (uint32_t)bytes : 0;
    mover_post(m, &ev, address);
}

static void loop(struct kv_mover *m)
{
    uint32_t tick_ms = m->cfg.heartbeat_ms / TICKS_PER_HEARTBEAT;
    if (tick_ms == 0) tick_ms = 1;
    m->turned_ms = tow_now_ms();
    while (!m->stopping) {
        m->now_ms = tow_now_ms();
        /* Whoever was stopped (SIGSTOP, a frozen host) may be dead to its peers already. */
        uint64_t gap = m->now_ms - m->turned_ms;
        if (gap >= (uint64_t)m->cfg.heartbeat_ms * NET_PEER_DEAD_AFTER) mover_stood_still(m, gap);
        m->turned_ms = m->now_ms;
        mover_run_commands(m);
        if (m->relink && !m->stopping) relink(m);
        bool happened = run_offers(m);
        if (net_link_progress(m->link) > 0) happened = true;
        /* More offers are near then: being woken costs more than the copy of a small page, and the
         * peer has to do the waking. */
        if (ship_copy_some(m)) {
            happened = m->copying = true;
            m->copied_us = tow_now_us();
        } else if (m->copying) {
            m->copying = m->n_tickets > 0 && tow_now_us() - m->copied_us < MOVER_SPIN_US;
        }
        bool idle = tow_list_empty(&m->conns) && tow_list_empty(&m->targets) && m->n_tickets == 0;
        m->now_ms = tow_now_ms();
        if (m->now_ms >= m->tick_at_ms) {
            m->tick_at_ms = m->now_ms + tick_ms;
            mover_tick_peers(m);
            ship_tick(m);
        }
        if (mover_prove_next(m)) happened = true;
        tell_all(m, happened);
        mover_flush_peers(m);
        if (happened || m->stopping) continue;
        uint64_t left = m->tick_at_ms > m->now_ms ? m->tick_at_ms - m->now_ms : 0;
        /* Also when idle it turns now and then, so that a long sleep is not taken for a stop. */
        if (idle) left = m->cfg.heartbeat_ms;
        if (!tow_list_empty(&m->backlog)) left = 1;
        if (m->copying)
            sched_yield();
        else
            sleep_some(m, (int)left);
    }
}

static int start(struct kv_mover *m, struct tow_err *err)
{
    static const char *const what[] = {"pages", "tails"};
    struct net_link_hooks hooks = {mover_on_message, mover_on_bulk, mover_on_ep_error, m};
    int rc = net_link_open(&m->link, &hooks, err);
    if (rc < 0) return rc;
    for (int a = 0; a < KV_AREAS && rc == 0; a++) {
        /* One page more than asked for: what goes over a link to prove it. */
        size_t extra = a == KV_AREA_PAGES ? m->cfg.page_bytes : 0;
        rc = net_region_new(m->link, m->cfg.area_bytes[a] + extra, &m->regions[a], err);
        if (rc < 0)
            tow_note(err, "memory for %s", what[a]);
        else
            m->areas[a] = net_region_base(m->regions[a]);
    }
    if (rc < 0) {
        net_link_free(m->link);
        m->link = NULL;
        return rc;
    }
    uint8_t *probe = (uint8_t *)m->areas[KV_AREA_PAGES] + m->cfg.area_bytes[KV_AREA_PAGES];
    for (size_t i = 0; i < m->cfg.page_bytes; i++) probe[i] = (uint8_t)(i * 131 + (i >> 8));
    const void *address = net_link_address(m->link, &m->address_bytes);
    if (m->address_bytes > WIRE_MAX_ADDRESS) {
        net_link_free(m->link);
        m->link = NULL;
        return tow_fail(err, TOW_ECONFIG,
                        "data address has %zu bytes, at most %u fit: limit UCX_NET_DEVICES",
                        m->address_bytes, WIRE_MAX_ADDRESS);
    }
    memcpy(m->address, address, m->address_bytes);
    return 0;
}

static void *thread_main(void *arg)
{
    struct kv_mover *m = arg;
    struct tow_err err = {0};
    int rc = start(m, &err);
    pthread_mutex_lock(&m->lock);
    m->started = true;
    m->start_code = rc;
    m->start_err = err;
    pthread_cond_signal(&m->started_cond);
    pthread_mutex_unlock(&m->lock);
    if (rc < 0) return NULL;
    loop(m);
    net_link_free(m->link);
    ship_free_all(m);
    mover_free_peers(m);
    TOW_LIST_EACH_SAFE (n, &m->offers) free(TOW_CONTAINER(n, struct command, node));
    TOW_LIST_EACH_SAFE (n, &m->backlog) free(TOW_CONTAINER(n, struct mover_event, node));
    return NULL;
}

/* --- open and close --------------------------------------------------------------------------- */

static int copy_fact(struct kv_mover *m, const char *field, const char *value, struct tow_err *err)
{
    struct mover_fact *f = &m->facts[m->n_facts];
    if (strlen(field) > WIRE_MAX_NAME || strlen(value) > WIRE_MAX_VALUE)
        return tow_fail(err, TOW_EINVAL, "fact %s: name or value too long", field);
    snprintf(f->field, sizeof f->field, "%s", field);
    snprintf(f->value, sizeof f->value, "%s", value);
    m->n_facts++;
    return 0;
}

static int configure(struct kv_mover *m, const struct kv_mover_config *cfg, struct tow_err *err)
{
    m->cfg = *cfg;
    if (!m->cfg.heartbeat_ms) m->cfg.heartbeat_ms = 1000;
    if (!m->cfg.lease_ms) m->cfg.lease_ms = 30000;
    if (!m->cfg.max_tickets) m->cfg.max_tickets = 1024;
    if (!m->cfg.max_peers) m->cfg.max_peers = 64;
    if (!net_peer_name_ok(cfg->name))
        return tow_fail(err, TOW_EINVAL, "name %s: not usable", cfg->name);
    if (!cfg->page_bytes || !cfg->tail_bytes || cfg->page_bytes > UINT32_MAX ||
        cfg->tail_bytes > UINT32_MAX)
        return tow_fail(err, TOW_EINVAL,
                        "page of %zu and tail of %zu bytes: 1 to 4294967295 are possible",
                        cfg->page_bytes, cfg->tail_bytes);
    if (cfg->n_facts > MOVER_FACTS_MAX)
        return tow_fail(err, TOW_EINVAL, "%u facts, at most %d are possible", cfg->n_facts,
                        MOVER_FACTS_MAX);
    snprintf(m->name, sizeof m->name, "%s", cfg->name);
    m->cfg.name = m->name;
    char number[32];
    int rc = 0;
    for (uint32_t i = 0; i < cfg->n_facts && rc == 0; i++)
        rc = copy_fact(m, cfg->facts[i].field, cfg->facts[i].value, err);
    snprintf(number, sizeof number, "%zu", cfg->page_bytes);
    if (rc == 0) rc = copy_fact(m, "link.page_bytes", number, err);
    snprintf(number, sizeof number, "%zu", cfg->tail_bytes);
    if (rc == 0) rc = copy_fact(m, "link.tail_bytes", number, err);
    if (rc == 0) rc = copy_fact(m, "link.tcp_segment", net_link_segment(), err);
    return rc;
}

int kv_mover_open(struct kv_mover **out, const struct kv_mover_config *cfg, struct tow_err *err)
{
    struct kv_mover *m = calloc(1, sizeof *m);
    if (!m) return tow_fail(err, TOW_ENOMEM, "no memory for the mover");
    net_link_setup();
    int rc = configure(m, cfg, err);
    if (rc < 0) goto free_mover;
    tow_list_init(&m->conns);
    tow_list_init(&m->targets);
    tow_list_init(&m->provers);
    tow_list_init(&m->offers);
    tow_list_init(&m->backlog);
    for (m->n_buckets = 64; m->n_buckets < m->cfg.max_tickets; m->n_buckets *= 2) {
    }
    m->buckets = malloc(m->n_buckets * sizeof *m->buckets);
    if (!m->buckets) {
        rc = tow_fail(err, TOW_ENOMEM, "no memory for %u tickets", m->cfg.max_tickets);
        goto free_mover;
    }
    for (uint32_t i = 0; i < m->n_buckets; i++) tow_list_init(&m->buckets[i]);
    m->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (m->wake_fd < 0) {
        rc = tow_fail(err, TOW_ESYS, "no descriptor to wake the transfer thread");
        goto free_buckets;
    }
    rc = tow_inbox_new(&m->commands, COMMANDS, sizeof(struct command *), on_command_wake, m, err);
    if (rc < 0) goto close_fd;
    rc = tow_inbox_new(&m->events, EVENTS, sizeof(struct mover_event *), cfg->wake, cfg->wake_arg,
                       err);
    if (rc < 0) goto free_commands;
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->started_cond, NULL);
    if (pthread_create(&m->thread, NULL, thread_main, m) != 0) {
        rc = tow_fail(err, TOW_ESYS, "no transfer thread");
        goto free_events;
    }
    pthread_mutex_lock(&m->lock);
    while (!m->started) pthread_cond_wait(&m->started_cond, &m->lock);
    pthread_mutex_unlock(&m->lock);
    if (m->start_code < 0) {
        pthread_join(m->thread, NULL);
        rc = tow_fail(err, m->start_code, "%s", m->start_err.msg);
        goto free_events;
    }
    *out = m;
    return 0;

free_events:
    pthread_cond_destroy(&m->started_cond);
    pthread_mutex_destroy(&m->lock);
    tow_inbox_free(m->events);
free_commands:
    tow_inbox_free(m->commands);
close_fd:
    close(m->wake_fd);
free_buckets:
    free(m->buckets);
free_mover:
    free(m);
    return rc;
}

static int command_post(struct kv_mover *m, struct command *c)
{
    int rc = tow_inbox_post(m->commands, &c);
    if (rc < 0) free(c);
    return rc;
}

static struct command *command_new(enum command_kind kind, size_t payload)
{
    static const char *const places[] = {
        [CMD_CONNECT] = "mover.connect", [CMD_DROP] = "mover.drop",
        [CMD_SEND] = "mover.send",       [CMD_OFFER] = "mover.offer",
        [CMD_TOUCH] = "mover.touch",     [CMD_EXPECT] = "mover.expect",
        [CMD_CANCEL] = "mover.cancel",   [CMD_RELINK] = "mover.relink",
        [CMD_STOP] = "mover.stop"};
    if (tow_fault(places[kind])) return NULL;
    struct command *c = calloc(1, sizeof *c + payload);
    if (!c) return NULL;
    tow_list_init(&c->node);
    c->kind = kind;
    c->payload_bytes = payload;
    return c;
}

void kv_mover_close(struct kv_mover *m)
{
    if (!m) return;
    struct command *stop = command_new(CMD_STOP, 0);
    while (!stop || tow_inbox_post(m->commands, &stop) < 0) {
        /* The thread empties its inbox all the time, so there is room in a moment. */
        usleep(1000);
        if (!stop) stop = command_new(CMD_STOP, 0);
    }
    pthread_join(m->thread, NULL);
    struct command *c;
    while (tow_inbox_take(m->commands, &c)) free(c);
    struct mover_event *e;
    while (tow_inbox_take(m->events, &e)) free(e);
    free(m->last);
    tow_inbox_free(m->events);
    tow_inbox_free(m->commands);
    pthread_cond_destroy(&m->started_cond);
    pthread_mutex_destroy(&m->lock);
    close(m->wake_fd);
    free(m->buckets);
    free(m);
}

void *kv_mover_area(const struct kv_mover *m, enum kv_area area)
{
    return m->areas[area];
}
const void *kv_mover_address(const struct kv_mover *m, size_t *bytes)
{
    *bytes = m->address_bytes;
    return m->address;
}

void kv_mover_stats(struct kv_mover *m, struct kv_mover_stats *out)
{
    pthread_mutex_lock(&m->lock);
    *out = m->stats;
    pthread_mutex_unlock(&m->lock);
}

bool kv_mover_event(struct kv_mover *m, struct kv_mover_event *out)
{
    free(m->last);
    m->last = NULL;
    struct mover_event *e;
    if (!tow_inbox_take(m->events, &e)) return false;
    m->last = e;
    *out = e->pub;
    if (out->kind == KV_MOVER_RELINKED && out->code == 0) {
        m->address_bytes = out->note_bytes;
        memcpy(m->address, out->note, out->note_bytes);
    }
    return true;
}

/* --- commands --------------------------------------------------------------------------------- */

static int name_peer(struct command *c, const char *peer, uint64_t incarnation)
{
    if (!net_peer_name_ok(peer)) {
        free(c);
        return TOW_EINVAL;
    }
    snprintf(c->peer, sizeof c->peer, "%s", peer);
    c->incarnation = incarnation;
    return 0;
}

int kv_mover_connect(struct kv_mover *m, const char *name, uint64_t incarnation,
                     const void *address, size_t bytes)
{
    if (bytes == 0 || bytes > WIRE_MAX_ADDRESS) return TOW_EINVAL;
    struct command *c = command_new(CMD_CONNECT, bytes);
    if (!c) return TOW_ENOMEM;
    int rc = name_peer(c, name, incarnation);
    if (rc < 0) return rc;
    memcpy(c->payload, address, bytes);
    return command_post(m, c);
}

int kv_mover_drop(struct kv_mover *m, const char *name, uint64_t incarnation)
{
    struct command *c = command_new(CMD_DROP, 0);
    if (!c) return TOW_ENOMEM;
    int rc = name_peer(c, name, incarnation);
    return rc < 0 ? rc : command_post(m, c);
}

int kv_mover_relink(struct kv_mover *m, uint64_t incarnation)
{
    struct command *c = command_new(CMD_RELINK, 0);
    if (!c) return TOW_ENOMEM;
    c->incarnation = incarnation;
    return command_post(m, c);
}

int kv_mover_send(struct kv_mover *m, const struct kv_send *s)
{
    if (s->n_pages > KV_XFER_MAX_PAGES) return TOW_ETOOBIG;
    struct command *c = command_new(CMD_SEND, 0);
    if (!c) return TOW_ENOMEM;
    int rc = name_peer(c, s->peer, s->incarnation);
    if (rc < 0) return rc;
    c->ticket = s->ticket;
    c->n = s->n_pages;
    c->lease_ms = s->lease_ms;
    c->cookie = s->cookie;
    return command_post(m, c);
}

int kv_mover_offer(struct kv_mover *m, struct kv_ticket t, const struct kv_offer *parts, uint32_t n,
                   const void *note, uint32_t note_bytes)
{
    if (note_bytes > KV_MOVER_NOTE_MAX || n > KV_XFER_MAX_PAGES + 1) return TOW_ETOOBIG;
    for (uint32_t i = 0; i < n; i++) {
        bool tail = parts[i].index == KV_PART_TAIL;
        size_t area = m->cfg.area_bytes[tail ? KV_AREA_TAILS : KV_AREA_PAGES];
        size_t bytes = tail ? m->cfg.tail_bytes : m->cfg.page_bytes;
        if (parts[i].offset > area || bytes > area - parts[i].offset) return TOW_EINVAL;
    }
    size_t list = n * sizeof *parts;
    struct command *c = command_new(CMD_OFFER, list + note_bytes);
    if (!c) return TOW_ENOMEM;
    c->ticket = t;
    c->n = n;
    c->note_bytes = note_bytes;
    memcpy(c->payload, parts, list);
    if (note_bytes) memcpy(c->payload + list, note, note_bytes);
    return command_post(m, c);
}

int kv_mover_expect(struct kv_mover *m, const struct kv_expect *e)
{
    if (e->n_pages > KV_XFER_MAX_PAGES) return TOW_ETOOBIG;
    size_t pages = m->cfg.area_bytes[KV_AREA_PAGES], tails = m->cfg.area_bytes[KV_AREA_TAILS];
    for (uint32_t i = 0; i < e->n_pages; i++)
        if (e->page_offsets[i] > pages || m->cfg.page_bytes > pages - e->page_offsets[i])
            return TOW_EINVAL;
    if (e->tail_offset > tails || m->cfg.tail_bytes > tails - e->tail_offset) return TOW_EINVAL;
    struct command *c = command_new(CMD_EXPECT, e->n_pages * sizeof *e->page_offsets);
    if (!c) return TOW_ENOMEM;
    int rc = name_peer(c, e->peer, e->incarnation);
    if (rc < 0) return rc;
    c->ticket = e->ticket;
    c->n = e->n_pages;
    c->tail_offset = e->tail_offset;
    c->lease_ms = e->lease_ms;
    c->cookie = e->cookie;
    if (e->n_pages) memcpy(c->payload, e->page_offsets, c->payload_bytes);
    return command_post(m, c);
}

/* Lost when there is no memory or no room: callers repeat it. */
static void ticket_command(struct kv_mover *m, enum command_kind kind, struct kv_ticket t, int code)
{
    struct command *c = command_new(kind, 0);
    if (!c) return;
    c->ticket = t;
    c->code = code;
    command_post(m, c);
}

void kv_mover_touch(struct kv_mover *m, struct kv_ticket t)
{
    ticket_command(m, CMD_TOUCH, t, 0);
}

void kv_mover_cancel(struct kv_mover *m, struct kv_ticket t, int code)
{
    ticket_command(m, CMD_CANCEL, t, code);
}
