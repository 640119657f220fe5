/* kv/mover_peer.c - from a peer's address to a proven link, and back again after every loss.
 *
 *   prefill                                            decode
 *   GREETING  --XHELLO {who I am, who you are,     -->
 *               facts, memory keys}                    identity, facts, token checked
 *             <-- XREADY (or XREFUSE {field, both}) -- PROVING
 *   PROVING   --XPROBE get {where, digest}         -->  reads the page MOVER_PROBES times
 *             <-- XPROBED {MB/s}                    --
 *             --bulk messages headed by XPROBE      -->  takes them
 *             <-- XPROBED {MB/s}                    --  UP, by reads unless bulk is clearly
 *                                                        faster: see choose()
 *   UP
 *
 * How      UCX does not say who sent a message. So each one starts with the label, 64 random bits
 *          that the prefill side makes for each attempt: what was meant for an earlier connection,
 *          or for the process that had this address before, finds no label here and is only
 *          counted.
 *          A connection never comes back: it goes down once, its tickets end, its endpoint is
 *          closed by force; the prefill side then tries anew, with doubled pauses.
 *
 * Turns    A receiver has one page for the proofs of all its links, and clears it before each: so
 *          one method of one link is proven at a time, the others wait in m->provers. A page for
 *          each link would do without, but links are many, pages large, and what moves beside
 *          others cannot be timed. Whose bytes do not come loses its turn after STALL_MS if
 *          somebody waits, and everybody's whole proof has PROOF_MS.
 *
 * Proof    "token" in the facts is a keyed XXH3 of the label. It keeps strangers and misconfigured
 *          clusters out, but it is no cryptography, and the bytes that follow are not encrypted:
 *          the data plane belongs on a network of its own. UCX parses addresses and memory keys
 *          without bounds, so both are used only after this check.
 */
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/kv/mover_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HELLO_MS = 5000,
    PROOF_MS = 15000,
    STALL_MS = 3000,
    REFUSED_MS = 1000,
    PAUSE_MIN_MS = 100,
    PAUSE_MAX_MS = 5000,
    FRAME_MAX = 60000
};
#define TOKEN_FACT "link.token"

static void conn_free(struct conn *c)
{
    tow_assert(c->m->prover != c);
    tow_list_remove(&c->node);
    c->m->n_conns--;
    free(c);
}

static void maybe_free(struct conn *c)
{
    if (c->state == CONN_CLOSING && c->ep_closed && c->n_reads == 0) conn_free(c);
}

void conn_read_ended(struct conn *c)
{
    tow_assert(c->n_reads > 0);
    c->n_reads--;
    maybe_free(c);
}

static void on_ep_closed(void *arg, int code)
{
    struct conn *c = arg;
    (void)code;
    if (c->m->stopping) return; /* all is freed at once then */
    c->ep_closed = true;
    maybe_free(c);
}

static struct conn *conn_new(struct kv_mover *m, uint64_t label)
{
    struct conn *c = aligned_alloc(_Alignof(struct conn), sizeof *c);
    if (!c) return NULL;
    memset(c, 0, sizeof *c);
    c->m = m;
    c->label = label;
    tow_list_init(&c->ready);
    tow_list_init(&c->in_provers);
    net_peer_init(&c->peer, m->cfg.heartbeat_ms, HELLO_MS, m->now_ms);
    tow_list_append(&m->conns, &c->node);
    m->n_conns++;
    return c;
}

static struct conn *conn_by_label(struct kv_mover *m, uint64_t label)
{
    TOW_LIST_EACH (n, &m->conns) {
        struct conn *c = TOW_CONTAINER(n, struct conn, node);
        if (c->label == label && c->state != CONN_CLOSING) return c;
    }
    return NULL;
}

struct conn *mover_conn_of(struct kv_mover *m, const char *name, uint64_t incarnation)
{
    TOW_LIST_EACH (n, &m->conns) {
        struct conn *c = TOW_CONTAINER(n, struct conn, node);
        if (c->state == CONN_UP && c->peer.incarnation == incarnation &&
            strcmp(c->peer.name, name) == 0)
            return c;
    }
    return NULL;
}

void conn_flush(struct conn *c)
{
    for (uint32_t i = 0; i < c->n_outs && c->ep; i++) /* a peer that sleeps is woken by the first */
        net_ep_send(c->ep, c->out[i], c->out_bytes[i]);
    c->n_outs = 0;
}

static void begin_out(struct conn *c)
{
    if (c->n_outs == MOVER_OUTS) conn_flush(c);
    if (c->n_outs == 0) {
        c->out_ms = c->m->now_ms;
        c->out_waits = true;
    }
    memcpy(c->out[c->n_outs], &c->label, MOVER_LABEL_BYTES);
    c->out_bytes[c->n_outs++] = MOVER_LABEL_BYTES;
}

/* Into the last message; false: it does not fit behind what is there. */
static bool add_out(struct conn *c, const struct wire_msg *msg)
{
    if (c->n_outs == 0) return false;
    uint32_t *used = &c->out_bytes[c->n_outs - 1];
    int64_t n = wire_pack(msg, c->out[c->n_outs - 1] + *used, MOVER_OUT_BYTES - *used);
    if (n <= 0) return false;
    *used += (uint32_t)n;
    if (msg->type != WIRE_ACK_MSG) c->out_waits = false;
    return true;
}

void conn_send(struct conn *c, const struct wire_msg *msg)
{
    uint8_t frame[FRAME_MAX];
    if (!c->ep || c->state == CONN_CLOSING) return;
    if (tow_fault(wire_step_name(msg->type, true))) return; /* lost on the way */
    if (add_out(c, msg)) return;
    begin_out(c);
    if (add_out(c, msg)) return;
    c->n_outs--; /* a large one, in its turn */
    conn_flush(c);
    int64_t n = wire_pack(msg, frame + MOVER_LABEL_BYTES, sizeof frame - MOVER_LABEL_BYTES);
    if (n < 0) {
        tow_error("peer %s: %s cannot be packed: %s", c->peer.name, wire_type_name(msg->type),
                  tow_err_text((int)n));
        return;
    }
    memcpy(frame, &c->label, MOVER_LABEL_BYTES);
    net_ep_send(c->ep, frame, (uint32_t)n + MOVER_LABEL_BYTES);
}

/* --- what the control thread hears ------------------------------------------------------------ */

static void tell_up(struct conn *c)
{
    struct kv_mover_event ev = {.kind = KV_MOVER_PEER_UP,
                                .incarnation = c->peer.incarnation,
                                .method = c->method,
                                .mb_per_s = c->mb[c->method]};
    snprintf(ev.peer, sizeof ev.peer, "%s", c->peer.name);
    snprintf(ev.transport, sizeof ev.transport, "%s", c->transports[c->method]);
    ev.us = ev.mb_per_s > 0 ? (double)c->m->cfg.page_bytes / ev.mb_per_s : 0;
    mover_post(c->m, &ev, NULL);
}

static void tell_down(struct kv_mover *m, const char *name, uint64_t incarnation, int code,
                      const char *why, bool refused)
{
    struct kv_mover_event ev = {
        .kind = KV_MOVER_PEER_DOWN, .incarnation = incarnation, .code = code, .refused = refused};
    snprintf(ev.peer, sizeof ev.peer, "%s", name);
    snprintf(ev.text, sizeof ev.text, "%s", why);
    mover_post(m, &ev, NULL);
}

static void target_failed(struct kv_mover *m, struct target *t, int code, const char *why,
                          bool refused)
{
    t->conn = NULL;
    if (t->told != TOLD_DOWN && t->told != TOLD_REFUSED)
        tell_down(m, t->name, t->incarnation, code, why, refused);
    else if (refused && t->told == TOLD_DOWN)
        tell_down(m, t->name, t->incarnation, code, why, true);
    if (t->told == TOLD_UP) t->pause_ms = 0;
    t->told = refused ? TOLD_REFUSED : TOLD_DOWN;
    t->pause_ms = t->pause_ms == 0                 ? PAUSE_MIN_MS
                  : t->pause_ms > PAUSE_MAX_MS / 2 ? PAUSE_MAX_MS
                                                   : t->pause_ms * 2;
    t->retry_at_ms = refused ? 0 : m->now_ms + t->pause_ms - tow_random_u64() % (t->pause_ms / 2);
}

/* The page goes to the next in turn, but not while bytes of this one may still come into it. */
static void end_turn(struct conn *c)
{
    tow_list_remove(&c->in_provers);
    if (c->m->prover == c && c->probes_begun == c->probes_done) c->m->prover = NULL;
}

static void close_conn(struct conn *c, int code, const char *why, bool refused)
{
    if (c->state == CONN_CLOSING) return;
    struct kv_mover *m = c->m;
    bool was_up = c->state == CONN_UP;
    struct target *t = c->target;
    c->state = CONN_CLOSING;
    c->target = NULL;
    if (was_up) m->own.peers_up--;
    for (unsigned i = 0; i < MOVER_PROBES; i++) {
        if (c->probe_bulks[i]) net_bulk_refuse(c->probe_bulks[i]);
        c->probe_bulks[i] = NULL;
    }
    end_turn(c);
    conn_flush(c);
    ship_peer_lost(m, c->peer.name, c->peer.incarnation, c, why);
    if (t)
        target_failed(m, t, code, why, refused);
    else if (was_up)
        tell_down(m, c->peer.name, c->peer.incarnation, code, why, false);
    if (c->ep) {
        struct net_ep *ep = c->ep;
        c->ep = NULL;
        net_ep_close(ep, on_ep_closed, c); /* the remote keys go with it */
    } else {
        c->ep_closed = true;
        maybe_free(c);
    }
}

void conn_down(struct conn *c, int code, const char *why)
{
    close_conn(c, code, why, false);
}

/* --- greeting, prefill side ------------------------------------------------------------------- */

static uint32_t pack_facts(struct kv_mover *m, uint64_t label, uint8_t *out, size_t cap)
{
    char token[17] = "";
    struct wire_writer w = {.data = out, .cap = cap};
    for (uint32_t i = 0; i < m->n_facts; i++) {
        struct wire_fact f = {WIRE_FACT_WIRE, wire_text(m->facts[i].field),
                              wire_text(m->facts[i].value)};
        wire_put_fact(&w, &f);
    }
    if (m->cfg.secret)
        snprintf(token, sizeof token, "%016llx",
                 (unsigned long long)tow_hash64_seed(&label, sizeof label, m->cfg.secret));
    struct wire_fact f = {WIRE_FACT_WIRE, wire_text(TOKEN_FACT), wire_text(token)};
    wire_put_fact(&w, &f);
    return w.failed ? 0 : (uint32_t)w.len;
}

static int greet(struct conn *c, struct target *t, struct tow_err *err)
{
    struct kv_mover *m = c->m;
    uint8_t facts[WIRE_MAX_FACTS];
    int rc = net_ep_open(m->link, t->address, t->address_bytes, c, &c->ep, err);
    if (rc < 0) return rc;
    size_t address_bytes;
    const void *address = net_link_address(m->link, &address_bytes);
    size_t key_bytes[KV_AREAS];
    const void *keys[KV_AREAS];
    for (int a = 0; a < KV_AREAS; a++) keys[a] = net_region_key(m->regions[a], &key_bytes[a]);
    struct wire_msg msg = {
        .type = WIRE_XHELLO_MSG,
        .xhello = {
            .version = WIRE_PROTOCOL_MAX,
            .name = wire_text(m->name),
            .incarnation = m->cfg.incarnation,
            .peer_name = wire_text(t->name),
            .peer_incarnation = t->incarnation,
            .data_address = {address, (uint32_t)address_bytes},
            .pool_base = (uintptr_t)m->areas[KV_AREA_PAGES],
            .pool_bytes = net_region_bytes(m->regions[KV_AREA_PAGES]),
            .pool_rkey = {keys[KV_AREA_PAGES], (uint32_t)key_bytes[KV_AREA_PAGES]},
            .tail_base = (uintptr_t)m->areas[KV_AREA_TAILS],
            .tail_bytes = net_region_bytes(m->regions[KV_AREA_TAILS]),
            .tail_rkey = {keys[KV_AREA_TAILS], (uint32_t)key_bytes[KV_AREA_TAILS]},
            .facts = {facts, pack_facts(m, c->label, facts, sizeof facts)},
        }};
    conn_send(c, &msg);
    return 0;
}

static void try_target(struct kv_mover *m, struct target *t)
{
    struct tow_err err = {0};
    t->retry_at_ms = 0;
    struct conn *c = conn_new(m, tow_random_u64());
    if (!c) {
        t->retry_at_ms = m->now_ms + PAUSE_MAX_MS;
        return;
    }
    c->target = t;
    t->conn = c;
    c->state = CONN_GREETING;
    snprintf(c->peer.name, sizeof c->peer.name, "%s", t->name);
    c->peer.incarnation = t->incarnation;
    if (greet(c, t, &err) < 0) conn_down(c, err.code, err.msg);
}

static void target_forget(struct kv_mover *m, struct target *t, const char *why)
{
    struct conn *c = t->conn;
    tow_list_remove(&t->node);
    if (c) {
        c->target = NULL;
        if (c->state == CONN_UP) m->own.peers_up--;
        c->state = CONN_REFUSED; /* nothing is told: the owner wants it gone */
        conn_down(c, TOW_EPEER, why);
    }
    free(t);
}

void mover_connect(struct kv_mover *m, const struct command *cmd)
{
    uint32_t n = 0;
    TOW_LIST_EACH_SAFE (node, &m->targets) {
        struct target *t = TOW_CONTAINER(node, struct target, node);
        n++;
        if (strcmp(t->name, cmd->peer) != 0) continue;
        if (t->incarnation == cmd->incarnation && t->told != TOLD_REFUSED) {
            /* Asked again, by another router perhaps: the same answer, or the coming one. */
            if (t->told == TOLD_UP)
                tell_up(t->conn);
            else
                t->told = TOLD_NOTHING;
            return;
        }
        target_forget(m, t, "replaced by a newer process");
        n--;
    }
    struct target *t = calloc(1, sizeof *t + cmd->payload_bytes);
    if (!t || n >= m->cfg.max_peers) {
        tell_down(m, cmd->peer, cmd->incarnation, TOW_EFULL, "too many peers", false);
        free(t);
        return;
    }
    snprintf(t->name, sizeof t->name, "%s", cmd->peer);
    t->incarnation = cmd->incarnation;
    t->address_bytes = cmd->payload_bytes;
    memcpy(t->address, cmd->payload, cmd->payload_bytes);
    tow_list_append(&m->targets, &t->node);
    try_target(m, t);
}

/* Nothing is told of them but the ends of their tickets. name NULL: all, whatever incarnation. */
static void forget(struct kv_mover *m, const char *name, uint64_t incarnation, const char *why)
{
    TOW_LIST_EACH_SAFE (n, &m->targets) {
        struct target *t = TOW_CONTAINER(n, struct target, node);
        if (name && strcmp(t->name, name) != 0) continue;
        if (!incarnation || t->incarnation == incarnation) target_forget(m, t, why);
    }
    TOW_LIST_EACH_SAFE (n, &m->conns) {
        struct conn *c = TOW_CONTAINER(n, struct conn, node);
        if (c->state == CONN_CLOSING || (name && strcmp(c->peer.name, name) != 0)) continue;
        if (incarnation && c->peer.incarnation != incarnation) continue;
        if (c->state == CONN_UP) m->own.peers_up--;
        c->state = CONN_REFUSED;
        conn_down(c, TOW_EPEER, why);
    }
    ship_peer_lost(m, name, incarnation, NULL, why);
}

void mover_drop(struct kv_mover *m, const struct command *cmd)
{
    forget(m, cmd->peer, cmd->incarnation, "dropped");
}

void mover_forget_peers(struct kv_mover *m, const char *why)
{
    forget(m, NULL, 0, why);
}

/* --- greeting, decode side -------------------------------------------------------------------- */

struct refusal {
    char field[WIRE_MAX_NAME + 1], ours[WIRE_MAX_VALUE + 1], theirs[WIRE_MAX_VALUE + 1];
};

static bool find_fact(struct wire_bytes facts, const char *field, char *value, size_t cap)
{
    struct wire_fact f;
    size_t at = 0;
    while (wire_next_fact(facts, &at, &f)) {
        if (!wire_text_is(f.field, field)) continue;
        wire_text_copy(f.value, value, cap);
        return true;
    }
    return false;
}

static bool refuse(struct refusal *r, const char *field, const char *ours, const char *theirs)
{
    snprintf(r->field, sizeof r->field, "%s", field);
    snprintf(r->ours, sizeof r->ours, "%s", ours);
    snprintf(r->theirs, sizeof r->theirs, "%s", theirs);
    return false;
}

static bool facts_fit(struct kv_mover *m, struct wire_bytes theirs, struct refusal *r)
{
    char value[WIRE_MAX_VALUE + 1], field[WIRE_MAX_NAME + 1];
    for (uint32_t i = 0; i < m->n_facts; i++) {
        if (!find_fact(theirs, m->facts[i].field, value, sizeof value))
            return refuse(r, m->facts[i].field, m->facts[i].value, "(missing)");
        if (strcmp(value, m->facts[i].value) != 0)
            return refuse(r, m->facts[i].field, m->facts[i].value, value);
    }
    struct wire_fact f;
    size_t at = 0;
    while (wire_next_fact(theirs, &at, &f)) {
        bool known = wire_text_is(f.field, TOKEN_FACT);
        for (uint32_t i = 0; i < m->n_facts && !known; i++)
            known = wire_text_is(f.field, m->facts[i].field);
        if (!known)
            return refuse(r, wire_text_copy(f.field, field, sizeof field), "(missing)",
                          wire_text_copy(f.value, value, sizeof value));
    }
    return true;
}

static bool token_fits(struct kv_mover *m, uint64_t label, struct wire_bytes facts)
{
    char theirs[WIRE_MAX_VALUE + 1] = "", ours[17] = "";
    find_fact(facts, TOKEN_FACT, theirs, sizeof theirs);
    if (m->cfg.secret)
        snprintf(ours, sizeof ours, "%016llx",
                 (unsigned long long)tow_hash64_seed(&label, sizeof label, m->cfg.secret));
    return strcmp(ours, theirs) == 0;
}

static bool hello_fits(struct kv_mover *m, const struct wire_xhello *h, struct refusal *r)
{
    char ours[100], theirs[100], name[WIRE_MAX_NAME + 1];
    if (h->version < WIRE_PROTOCOL_MIN || h->version > WIRE_PROTOCOL_MAX) {
        snprintf(ours, sizeof ours, "%d to %d", WIRE_PROTOCOL_MIN, WIRE_PROTOCOL_MAX);
        snprintf(theirs, sizeof theirs, "%u", h->version);
        return refuse(r, "version", ours, theirs);
    }
    if (!wire_text_is(h->peer_name, m->name) || h->peer_incarnation != m->cfg.incarnation) {
        snprintf(ours, sizeof ours, "%s %016llx", m->name, (unsigned long long)m->cfg.incarnation);
        snprintf(theirs, sizeof theirs, "%s %016llx",
                 wire_text_copy(h->peer_name, name, sizeof name),
                 (unsigned long long)h->peer_incarnation);
        return refuse(r, "identity", ours, theirs);
    }
    if (m->n_conns >= 2 * m->cfg.max_peers)
        return refuse(r, "peers", "too many already", "one more");
    return facts_fit(m, h->facts, r);
}

static int open_keys(struct conn *c, const struct wire_xhello *h, struct tow_err *err)
{
    c->remote_base[KV_AREA_PAGES] = h->pool_base;
    c->remote_bytes[KV_AREA_PAGES] = h->pool_bytes;
    c->remote_base[KV_AREA_TAILS] = h->tail_base;
    c->remote_bytes[KV_AREA_TAILS] = h->tail_bytes;
    int rc =
        net_rkey_open(c->ep, h->pool_rkey.data, h->pool_rkey.len, &c->rkeys[KV_AREA_PAGES], err);
    if (rc < 0) return rc;
    rc = net_rkey_open(c->ep, h->tail_rkey.data, h->tail_rkey.len, &c->rkeys[KV_AREA_TAILS], err);
    if (rc < 0) return rc;
    for (int a = 0; a < KV_AREAS; a++) c->mapped[a] = net_rkey_peek(c->rkeys[a], c->remote_base[a]);
    if (!c->mapped[KV_AREA_TAILS]) c->mapped[KV_AREA_PAGES] = NULL;
    return 0;
}

static void replace_older(struct kv_mover *m, const struct conn *newer)
{
    TOW_LIST_EACH_SAFE (n, &m->conns) {
        struct conn *c = TOW_CONTAINER(n, struct conn, node);
        if (c != newer && !c->target && strcmp(c->peer.name, newer->peer.name) == 0)
            conn_down(c, TOW_EPEER, "the peer came anew");
    }
}

/* Once for each peer and reason, until it is taken. */
static void tell_refused(struct kv_mover *m, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void tell_refused(struct kv_mover *m, const char *name, const char *fmt, ...)
{
    char text[sizeof((struct tow_err *)0)->msg];
    va_list ap;
    va_start(ap, fmt);
    const int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    const uint64_t hash = tow_hash64(text, n < (int)sizeof text ? (size_t)n : sizeof text - 1);
    for (int i = 0; i < MOVER_TOLD; i++)
        if (m->told[i].hash == hash && !strcmp(m->told[i].name, name)) return;
    struct mover_told *t = &m->told[m->n_told++ % MOVER_TOLD];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->hash = hash;
    tow_warn("peer %s%s", name, text);
}

static void forget_refused(struct kv_mover *m, const char *name)
{
    for (int i = 0; i < MOVER_TOLD; i++)
        if (!strcmp(m->told[i].name, name)) m->told[i] = (struct mover_told){0};
}

static void on_xhello(struct kv_mover *m, uint64_t label, const struct wire_xhello *h)
{
    struct tow_err err = {0};
    struct refusal r = {0};
    char name[WIRE_MAX_NAME + 1];
    wire_text_copy(h->name, name, sizeof name);
    if (!token_fits(m, label, h->facts)) {
        /* Not even answered: that would mean to parse its address. */
        m->own.peers_refused++;
        tell_refused(m, name, ": join token differs; not answered");
        return;
    }
    struct conn *c = conn_new(m, label);
    if (!c) return;
    struct net_peer_hello theirs = {name, h->incarnation, h->version, h->version, h->features};
    struct net_peer_hello ours = {m->name, m->cfg.incarnation, 0, UINT32_MAX, 0};
    int rc = net_peer_hello(&c->peer, &theirs, &ours, m->now_ms, &err);
    if (rc == 0)
        rc = net_ep_open(m->link, h->data_address.data, h->data_address.len, c, &c->ep, &err);
    bool fits = rc == 0 && hello_fits(m, h, &r);
    if (fits) rc = open_keys(c, h, &err);
    if (rc < 0) {
        tell_refused(m, name, ": %s", err.msg);
        c->state = CONN_REFUSED;
        conn_down(c, rc, err.msg);
        return;
    }
    if (!fits) {
        m->own.peers_refused++;
        tell_refused(m, name, " refused: %s: ours %s, theirs %s", r.field, r.ours, r.theirs);
        struct wire_msg no = {.type = WIRE_XREFUSE_MSG,
                              .xrefuse = {.code = TOW_EMISMATCH,
                                          .field = wire_text(r.field),
                                          .ours = wire_text(r.ours),
                                          .theirs = wire_text(r.theirs)}};
        conn_send(c, &no);
        c->state = CONN_REFUSED;
        c->ping_at_ms = m->now_ms + REFUSED_MS; /* time for the message to leave */
        return;
    }
    forget_refused(m, name);
    replace_older(m, c);
    c->state = CONN_PROVING;
    struct wire_msg yes = {.type = WIRE_XREADY_MSG,
                           .xready = {.name = wire_text(m->name),
                                      .incarnation = m->cfg.incarnation,
                                      .peer_incarnation = h->incarnation}};
    conn_send(c, &yes);
}

/* --- proof ------------------------------------------------------------------------------------ */

static uint8_t *probe_page(struct kv_mover *m)
{
    return (uint8_t *)m->areas[KV_AREA_PAGES] + m->cfg.area_bytes[KV_AREA_PAGES];
}

static void probe_message(struct conn *c, enum kv_move_method method, const uint64_t *digest,
                          struct wire_msg *out)
{
    struct kv_mover *m = c->m;
    *out = (struct wire_msg){
        .type = WIRE_XPROBE_MSG,
        .xprobe = {.seq = method,
                   .method = method == KV_MOVE_GET ? WIRE_METHOD_GET : WIRE_METHOD_AM,
                   .times = MOVER_PROBES,
                   .part = {.kind = WIRE_PAGE,
                            .offset = m->cfg.area_bytes[KV_AREA_PAGES],
                            .bytes = (uint32_t)m->cfg.page_bytes,
                            .digests = {digest, 1}}}};
}

static void on_probe_sent(void *arg, int code)
{
    (void)arg, (void)code; /* the receiver judges; a lost link is told by the endpoint */
}

/* Prefill: asks for a proof; for bulk it also sends the pages. */
static void begin_proof(struct conn *c, enum kv_move_method method)
{
    struct kv_mover *m = c->m;
    uint64_t digest = tow_hash64(probe_page(m), m->cfg.page_bytes);
    struct wire_msg msg;
    c->proving = method;
    probe_message(c, method, &digest, &msg);
    if (method == KV_MOVE_GET) {
        conn_send(c, &msg);
        return;
    }
    uint8_t head[256];
    memcpy(head, &c->label, MOVER_LABEL_BYTES);
    int64_t n = wire_pack(&msg, head + MOVER_LABEL_BYTES, sizeof head - MOVER_LABEL_BYTES);
    tow_assert(n > 0);
    for (int i = 0; i < MOVER_PROBES && c->state != CONN_CLOSING; i++)
        net_ep_send_bulk(c->ep, head, (uint32_t)n + MOVER_LABEL_BYTES, probe_page(m),
                         m->cfg.page_bytes, on_probe_sent, NULL);
}

static void choose(struct conn *c)
{
    /* About equal: reads, which need no work of the sender and come in pieces that a cache holds. A
     * few pages on a busy machine say no more than that. */
    uint64_t get = c->mb[KV_MOVE_GET], bulk = c->mb[KV_MOVE_BULK];
    c->method = bulk > get + get / 4 ? KV_MOVE_BULK : get > 0 ? KV_MOVE_GET : KV_MOVE_NONE;
}

static void proof_over(struct conn *c, const char *why)
{
    struct kv_mover *m = c->m;
    choose(c);
    if (c->method == KV_MOVE_NONE) {
        conn_down(c, TOW_EPEER, why);
        return;
    }
    c->state = CONN_UP;
    c->copies = c->method == KV_MOVE_GET && c->mapped[KV_AREA_PAGES];
    c->bulk_copies = strcmp(c->transports[KV_MOVE_BULK], "tcp") == 0;
    m->own.peers_up++;
    if (c->target) {
        c->target->told = TOLD_UP;
        c->target->pause_ms = 0;
    }
    tell_up(c);
}

/* Decode: tells the outcome of one method; after the second one the link is proven. */
static void answer_proof(struct conn *c)
{
    enum kv_move_method method = c->proving;
    uint64_t us = tow_now_us() - c->probe_from_us;
    uint64_t bytes = (uint64_t)c->m->cfg.page_bytes * (MOVER_PROBES - 1);
    uint64_t mb = bytes / (us ? us : 1);
    if (c->probe_code == TOW_EDIGEST) c->m->own.bad_digests++;
    c->mb[method] = c->probe_code != 0 ? 0 : mb > UINT32_MAX ? UINT32_MAX : mb ? (uint32_t)mb : 1;
    net_ep_transport(c->ep, method == KV_MOVE_GET, c->transports[method], sizeof c->transports[0]);
    c->proving = KV_MOVE_NONE;
    end_turn(c);
    struct wire_msg msg = {
        .type = WIRE_XPROBED_MSG,
        .xprobed = {.seq = method,
                    .method = method == KV_MOVE_GET ? WIRE_METHOD_GET : WIRE_METHOD_AM,
                    .code = (int16_t)c->probe_code,
                    .mb_per_s = c->mb[method],
                    .transport = wire_text(c->transports[method])}};
    conn_send(c, &msg);
    if (method == KV_MOVE_BULK) proof_over(c, "no method moves a page whole");
}

static void start_probes(struct conn *c);

static void on_probe_read(void *arg, int code)
{
    struct conn *c = arg;
    if (c->m->stopping) return;
    /* Part of the price, as in a copy. */
    if (code == 0 && c->state == CONN_PROVING &&
        tow_hash64(probe_page(c->m), c->m->cfg.page_bytes) != c->probe_digest)
        code = TOW_EDIGEST;
    if (code != 0) c->probe_code = code;
    c->probes_done++;
    c->probed_ms = c->m->now_ms;
    if (c->state != CONN_PROVING) {
        end_turn(c);
    } else {
        if (c->probes_done == 1) c->probe_from_us = tow_now_us();
        if (c->probes_done == MOVER_PROBES)
            answer_proof(c);
        else
            start_probes(c);
    }
    conn_read_ended(c);
}

/* As ship_copy_some() does it. */
static void copy_probes(struct conn *c)
{
    const uint8_t *from = c->mapped[KV_AREA_PAGES] + c->probe_offset;
    for (int i = 0; i < MOVER_PROBES; i++) {
        if (tow_hash_copy(probe_page(c->m), from, c->m->cfg.page_bytes, false) != c->probe_digest)
            c->probe_code = TOW_EDIGEST;
        if (i == 0) c->probe_from_us = tow_now_us();
    }
    answer_proof(c);
}

/* Few at a time: what completes in one go cannot be timed. */
static void start_probes(struct conn *c)
{
    struct kv_mover *m = c->m;
    bool get = c->proving == KV_MOVE_GET;
    unsigned window = c->probes_done == 0 ? 1 : MOVER_PROBE_WINDOW;
    unsigned ready = get ? MOVER_PROBES : c->n_probe_bulks;
    while (c->probes_begun < ready && c->probes_begun - c->probes_done < window) {
        unsigned i = c->probes_begun++;
        struct net_bulk *bulk = c->probe_bulks[i];
        c->probe_bulks[i] = NULL;
        c->n_reads++;
        int rc = get ? net_ep_get(c->ep, c->rkeys[KV_AREA_PAGES],
                                  c->remote_base[KV_AREA_PAGES] + c->probe_offset, probe_page(m),
                                  m->cfg.page_bytes, on_probe_read, c)
                     : net_bulk_take(bulk, probe_page(m), on_probe_read, c);
        if (rc == 0) continue;
        c->n_reads--;
        c->probes_begun--;
        conn_down(c, rc, "proof cannot be started");
        return;
    }
}

/* Gets in line for the page, unless none will be moved. */
static void begin_probe(struct conn *c, const struct wire_xprobe *p, bool moves)
{
    c->proving = p->method == WIRE_METHOD_GET ? KV_MOVE_GET : KV_MOVE_BULK;
    c->probe_digest = wire_u64s_at(p->part.digests, 0);
    c->probe_offset = p->part.offset;
    c->probe_code = 0;
    c->probes_begun = c->probes_done = c->n_probe_bulks = 0;
    if (moves) tow_list_append(&c->m->provers, &c->in_provers);
}

bool mover_prove_next(struct kv_mover *m)
{
    if (m->prover || tow_list_empty(&m->provers)) return false;
    struct conn *c = TOW_CONTAINER(m->provers.next, struct conn, in_provers);
    tow_list_remove(&c->in_provers);
    m->prover = c;
    c->probed_ms = m->now_ms;
    memset(probe_page(m), 0, m->cfg.page_bytes);
    if (tow_fault("link.prove")) return true; /* as if nothing came */
    if (c->proving == KV_MOVE_GET && c->mapped[KV_AREA_PAGES])
        copy_probes(c);
    else
        start_probes(c);
    return true;
}

static void check_turn(struct kv_mover *m)
{
    struct conn *c = m->prover;
    if (!c || tow_list_empty(&m->provers) || m->now_ms < c->probed_ms + STALL_MS) return;
    conn_down(c, TOW_ETIME, "the link's proof stood still and others wait");
    /* What may still come of it are bytes of a probe page too: nothing is overwritten. */
    m->prover = NULL;
}

static void on_xprobe(struct conn *c, const struct wire_xprobe *p)
{
    struct kv_mover *m = c->m;
    struct tow_err err = {0};
    char transport[24];
    struct wire_part_shape shape = {.area_bytes = c->remote_bytes[KV_AREA_PAGES],
                                    .bytes = (uint32_t)m->cfg.page_bytes,
                                    .n_digests = 1,
                                    .n_parts = 1};
    if (c->target || c->state != CONN_PROVING || c->proving != KV_MOVE_NONE ||
        p->method != WIRE_METHOD_GET || p->times != MOVER_PROBES ||
        wire_part_check(&p->part, &shape, &err) < 0) {
        conn_down(c, TOW_EWIRE, err.msg[0] ? err.msg : "probe out of place");
        return;
    }
    /* TCP has no reads: UCX makes them of messages that the other side has to answer, and a process
     * whose peer dies before its answer is out is aborted by UCX (1.13, ucp_get_req_handler). */
    net_ep_transport(c->ep, true, transport, sizeof transport);
    bool reads = strcmp(transport, "tcp") != 0;
    begin_probe(c, p, reads);
    if (!reads) {
        c->probe_code = TOW_ESTATE;
        answer_proof(c);
    }
}

static void on_probe_bulk(struct conn *c, const struct wire_xprobe *p, struct net_bulk *bulk,
                          uint64_t bytes)
{
    if (c->proving == KV_MOVE_NONE) begin_probe(c, p, true);
    if (c->proving != KV_MOVE_BULK || c->n_probe_bulks == MOVER_PROBES ||
        bytes != c->m->cfg.page_bytes) {
        c->m->own.stale_messages++;
        net_bulk_refuse(bulk);
        return;
    }
    c->probe_bulks[c->n_probe_bulks++] = bulk;
    if (c->m->prover == c) start_probes(c);
}

static void on_xprobed(struct conn *c, const struct wire_xprobed *p)
{
    enum kv_move_method method = p->method == WIRE_METHOD_GET ? KV_MOVE_GET : KV_MOVE_BULK;
    if (!c->target || c->state != CONN_PROVING || c->proving != method) return;
    c->mb[method] = p->code == 0 ? p->mb_per_s : 0;
    wire_text_copy(p->transport, c->transports[method], sizeof c->transports[0]);
    if (method == KV_MOVE_GET) {
        begin_proof(c, KV_MOVE_BULK);
        return;
    }
    proof_over(c, p->code == TOW_EDIGEST ? "digest of the probe page differs"
                                         : "no method moves a page whole");
}

/* --- messages --------------------------------------------------------------------------------- */

static void on_xready(struct conn *c, const struct wire_xready *r)
{
    struct kv_mover *m = c->m;
    struct target *t = c->target;
    if (!t || c->state != CONN_GREETING) return;
    if (!wire_text_is(r->name, t->name) || r->incarnation != t->incarnation ||
        r->peer_incarnation != m->cfg.incarnation) {
        conn_down(c, TOW_EMISMATCH, "another process answered at this address");
        return;
    }
    struct net_peer_hello both = {t->name, t->incarnation, WIRE_PROTOCOL_MAX, WIRE_PROTOCOL_MAX, 0};
    net_peer_hello(&c->peer, &both, &both, m->now_ms, NULL);
    c->state = CONN_PROVING;
    begin_proof(c, KV_MOVE_GET);
}

static void on_xrefuse(struct conn *c, const struct wire_xrefuse *r)
{
    char field[WIRE_MAX_NAME + 1], ours[100], theirs[100], why[KV_MOVER_TEXT_MAX];
    if (!c->target) return;
    snprintf(why, sizeof why, "refused: %s: theirs %s, ours %s",
             wire_text_copy(r->field, field, sizeof field),
             wire_text_copy(r->ours, ours, sizeof ours),
             wire_text_copy(r->theirs, theirs, sizeof theirs));
    c->m->own.peers_refused++;
    close_conn(c, TOW_EMISMATCH, why, true);
}

static void answer_ping(struct conn *c, uint64_t seq)
{
    struct wire_msg pong = {.type = WIRE_XPONG_MSG, .xpong = {.seq = seq}};
    conn_send(c, &pong);
}

static void on_conn_message(struct conn *c, const struct wire_msg *msg)
{
    bool decode = !c->target;
    net_peer_heard(&c->peer, c->m->now_ms);
    switch (msg->type) {
    case WIRE_XREADY_MSG: on_xready(c, &msg->xready); return;
    case WIRE_XREFUSE_MSG: on_xrefuse(c, &msg->xrefuse); return;
    case WIRE_XPROBE_MSG: on_xprobe(c, &msg->xprobe); return;
    case WIRE_XPROBED_MSG: on_xprobed(c, &msg->xprobed); return;
    case WIRE_XPING_MSG: answer_ping(c, msg->xping.seq); return;
    case WIRE_XPONG_MSG: return;
    default: break;
    }
    if (c->state != CONN_UP) return;
    switch (msg->type) {
    case WIRE_OFFER_MSG:
        if (decode) ship_offered(c, &msg->offer, NULL);
        return;
    case WIRE_XALIVE_MSG:
        if (decode) ship_from_peer(c, msg->xalive.ticket, KV_XFER_TOUCH, 0);
        return;
    case WIRE_ACK_MSG:
        if (!decode) ship_acked(c, &msg->ack);
        return;
    case WIRE_NACK_MSG:
        if (!decode) ship_nacked(c, &msg->nack);
        return;
    case WIRE_XCANCEL_MSG:
        ship_from_peer(c, msg->xcancel.ticket, KV_XFER_PEER_CANCEL, msg->xcancel.code);
        return;
    default: c->m->own.stale_messages++; return;
    }
}

/* Bytes of the frame that came first; 0: there is none. */
static size_t on_frame(struct kv_mover *m, uint64_t label, const uint8_t *frame, size_t bytes)
{
    struct wire_msg msg;
    struct wire_header h;
    if (bytes < WIRE_HEADER_BYTES || wire_header_unpack(&h, frame, NULL) < 0 ||
        wire_check_header(&h, NULL) < 0 || h.body_bytes > bytes - WIRE_HEADER_BYTES ||
        wire_unpack(&msg, &h, frame + WIRE_HEADER_BYTES, NULL) < 0)
        return 0;
    size_t n = WIRE_HEADER_BYTES + (size_t)h.body_bytes;
    if (tow_fault(wire_step_name(msg.type, false))) return n; /* as if it had not come */
    struct conn *c = conn_by_label(m, label);
    if (c)
        on_conn_message(c, &msg);
    else if (msg.type == WIRE_XHELLO_MSG)
        on_xhello(m, label, &msg.xhello);
    else
        m->own.stale_messages++;
    return n;
}

void mover_on_message(void *arg, const void *bytes, uint32_t n)
{
    struct kv_mover *m = arg;
    uint64_t label = 0;
    size_t at = MOVER_LABEL_BYTES;
    if (m->stopping || m->relinking) return;
    mover_run_commands(m);
    if (n > MOVER_LABEL_BYTES) memcpy(&label, bytes, sizeof label);
    do {
        size_t one = at < n ? on_frame(m, label, (const uint8_t *)bytes + at, n - at) : 0;
        if (one == 0) {
            m->own.stale_messages++;
            return;
        }
        at += one;
    } while (at < n && !m->stopping);
}

void mover_on_bulk(void *arg, struct net_bulk *bulk, const void *head, uint32_t head_bytes,
                   uint64_t bytes)
{
    struct kv_mover *m = arg;
    struct wire_msg msg;
    uint64_t label;
    struct conn *c = NULL;
    bool hearing = !m->stopping && !m->relinking;
    if (hearing) mover_run_commands(m);
    if (hearing && !m->stopping && head_bytes > MOVER_LABEL_BYTES &&
        wire_unpack_frame(&msg, (const uint8_t *)head + MOVER_LABEL_BYTES,
                          head_bytes - MOVER_LABEL_BYTES, NULL) == 0) {
        memcpy(&label, head, sizeof label);
        /* A lost one is as if it had not come. */
        c = tow_fault(wire_step_name(msg.type, false)) ? NULL : conn_by_label(m, label);
    }
    if (!c || c->target) {
        m->own.stale_messages++;
        net_bulk_refuse(bulk);
        return;
    }
    net_peer_heard(&c->peer, m->now_ms);
    if (msg.type == WIRE_XPROBE_MSG && c->state == CONN_PROVING &&
        msg.xprobe.method == WIRE_METHOD_AM && msg.xprobe.part.digests.n == 1) {
        on_probe_bulk(c, &msg.xprobe, bulk, bytes);
    } else if (msg.type == WIRE_OFFER_MSG && c->state == CONN_UP && bytes == msg.offer.part.bytes) {
        ship_offered(c, &msg.offer, bulk);
    } else {
        m->own.stale_messages++;
        net_bulk_refuse(bulk);
    }
}

void mover_on_ep_error(void *arg, struct net_ep *ep, int code, const char *why)
{
    struct kv_mover *m = arg;
    char text[MOVER_TEXT];
    if (m->stopping) return;
    struct conn *c = net_ep_user(ep);
    snprintf(text, sizeof text, "connection lost: %s", why);
    tow_warn("peer %s: %s", c->peer.name, text);
    c->n_outs = 0;
    conn_down(c, code, text);
}

/* --- time ------------------------------------------------------------------------------------- */

static void ping(struct conn *c)
{
    struct wire_msg msg = {.type = WIRE_XPING_MSG, .xping = {.seq = c->m->now_ms}};
    if (tow_fault("link.ping")) return;
    conn_send(c, &msg);
}

void mover_tick_peers(struct kv_mover *m)
{
    check_turn(m);
    TOW_LIST_EACH_SAFE (n, &m->conns) {
        struct conn *c = TOW_CONTAINER(n, struct conn, node);
        if (c->state == CONN_CLOSING) continue;
        if (c->state == CONN_REFUSED) {
            if (m->now_ms >= c->ping_at_ms) conn_down(c, TOW_EMISMATCH, "refused");
            continue;
        }
        if (c->state == CONN_PROVING && m->now_ms >= c->peer.opened_ms + PROOF_MS) {
            conn_down(c, TOW_ETIME, "the link's proof did not come to an end");
            continue;
        }
        if (net_peer_tick(&c->peer, m->now_ms) == NET_PEER_BECAME_DEAD) {
            bool met = c->state != CONN_GREETING;
            conn_down(c, met ? TOW_EPEER : TOW_ETIME,
                      met ? "silent for five heartbeats" : "no answer to the greeting");
            continue;
        }
        if (m->now_ms < c->ping_at_ms || c->state == CONN_GREETING) continue;
        c->ping_at_ms = m->now_ms + m->cfg.heartbeat_ms;
        ping(c);
    }
    TOW_LIST_EACH_SAFE (n, &m->targets) {
        struct target *t = TOW_CONTAINER(n, struct target, node);
        if (!t->conn && t->retry_at_ms && m->now_ms >= t->retry_at_ms) try_target(m, t);
    }
}

void mover_flush_peers(struct kv_mover *m)
{
    TOW_LIST_EACH (n, &m->conns) {
        struct conn *c = TOW_CONTAINER(n, struct conn, node);
        /* Acknowledgements alone wait while there is more to move: each message may wake the peer,
         * or costs it as much as a small page, and all it can do is to give pages back. */
        bool more = c->copies ? !tow_list_empty(&c->ready) : c->n_reads > 0;
        if (!more || !c->out_waits || m->now_ms >= c->out_ms + MOVER_ACK_MS) conn_flush(c);
    }
}

void mover_stood_still(struct kv_mover *m, uint64_t gap_ms)
{
    char why[MOVER_TEXT];
    bool any = false;
    snprintf(why, sizeof why, "this process stood still for %llu ms", (unsigned long long)gap_ms);
    TOW_LIST_EACH_SAFE (n, &m->conns) {
        struct conn *c = TOW_CONTAINER(n, struct conn, node);
        any = any || c->state == CONN_UP;
        conn_down(c, TOW_EPEER, why);
    }
    if (any) tow_warn("%s; its links begin anew", why);
}

void mover_free_peers(struct kv_mover *m)
{
    TOW_LIST_EACH_SAFE (n, &m->conns) free(TOW_CONTAINER(n, struct conn, node));
    TOW_LIST_EACH_SAFE (n, &m->targets) free(TOW_CONTAINER(n, struct target, node));
}
