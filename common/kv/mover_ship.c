/* kv/mover_ship.c - tickets: events become kv/xfer's steps, and the steps' actions become messages,
 * reads and digests.
 *
 * How      One open hash table of tickets by id. A sender's parts come with their digests; a
 *          receiver's are checked here, on the transfer thread, next to the copy itself. Where the
 *          sender's memory is mapped into this process (one host), a part is copied and digested in
 *          one pass, MOVER_COPY_BYTES a turn. Else it is read in pieces, and each is digested as it
 *          comes, while the cache has it; the pieces of a message over TCP are digested on their
 *          way out of UCX's buffers. MOVER_READS are in flight at a time. Both are handed out in
 *          turn among the tickets of a connection, so a long prompt's pages never hold up a short
 *          one's and a cancelled ticket waits for little.
 *          A ticket is freed when its machine has ended, that is, when nothing of it is in flight;
 *          what comes for it afterwards finds no ticket and is answered with NACK.
 */
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/kv/mover_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct tow_list *bucket_of(struct kv_mover *m, uint64_t id)
{
    return &m->buckets[id & (m->n_buckets - 1)]; /* ids are random bits */
}

static struct ticket *find_id(struct kv_mover *m, uint64_t id)
{
    TOW_LIST_EACH (n, bucket_of(m, id)) {
        struct ticket *t = TOW_CONTAINER(n, struct ticket, node);
        if (t->id.id == id) return t;
    }
    return NULL;
}

static struct ticket *find(struct kv_mover *m, struct kv_ticket id)
{
    struct ticket *t = find_id(m, id.id);
    return t && t->id.nonce == id.nonce ? t : NULL;
}

static uint32_t index_of(const struct part *p)
{
    uint32_t slot = (uint32_t)(p - p->t->parts);
    return slot == p->t->x.n_pages ? KV_PART_TAIL : slot;
}

static struct part *part_at(struct ticket *t, uint32_t index)
{
    return &t->parts[index == KV_PART_TAIL ? t->x.n_pages : index];
}

static enum kv_area area_of(uint32_t index)
{
    return index == KV_PART_TAIL ? KV_AREA_TAILS : KV_AREA_PAGES;
}

static size_t bytes_of(const struct kv_mover *m, uint32_t index)
{
    return index == KV_PART_TAIL ? m->cfg.tail_bytes : m->cfg.page_bytes;
}

static uint8_t *local_of(const struct part *p)
{
    return (uint8_t *)p->t->m->areas[area_of(index_of(p))] + p->local;
}

/* --- beginning and end ------------------------------------------------------------------------ */

static void tell_ended(struct kv_mover *m, struct kv_ticket id, uint64_t cookie, int code,
                       const char *why, const void *note, uint32_t note_bytes)
{
    struct kv_mover_event ev = {.kind = KV_MOVER_ENDED,
                                .ticket = id,
                                .cookie = cookie,
                                .code = code,
                                .note_bytes = note_bytes};
    if (code < 0) snprintf(ev.text, sizeof ev.text, "%s", why[0] ? why : tow_err_text(code));
    mover_post(m, &ev, note);
}

static void drop_bulks(struct ticket *t)
{
    for (uint32_t i = 0; i <= t->x.n_pages; i++) {
        if (t->parts[i].bulk) net_bulk_refuse(t->parts[i].bulk);
        t->parts[i].bulk = NULL;
    }
}

static void ticket_free(struct ticket *t)
{
    tow_list_remove(&t->node);
    tow_list_remove(&t->in_ready);
    t->m->n_tickets--;
    free(t->states);
    free(t);
}

/* NULL: refused, and the owner told. */
static struct ticket *ticket_new(struct kv_mover *m, const struct command *cmd)
{
    if (find_id(m, cmd->ticket.id)) {
        tell_ended(m, cmd->ticket, cmd->cookie, TOW_ESTATE, "this ticket is live here already",
                   NULL, 0);
        return NULL;
    }
    size_t n = (size_t)cmd->n + 1;
    struct ticket *t =
        m->n_tickets < m->cfg.max_tickets ? calloc(1, sizeof *t + n * sizeof *t->parts) : NULL;
    if (t) t->states = malloc(n);
    if (!t || !t->states) {
        free(t);
        tell_ended(m, cmd->ticket, cmd->cookie, TOW_EFULL, "", NULL, 0);
        return NULL;
    }
    t->m = m;
    t->id = cmd->ticket;
    t->cookie = cmd->cookie;
    t->incarnation = cmd->incarnation;
    snprintf(t->peer, sizeof t->peer, "%s", cmd->peer);
    tow_list_init(&t->in_ready);
    for (size_t i = 0; i < n; i++) t->parts[i].t = t;
    tow_list_append(bucket_of(m, t->id.id), &t->node);
    m->n_tickets++;
    return t;
}

static struct wire_ticket wire_id(const struct ticket *t)
{
    return (struct wire_ticket){t->id.id, t->id.nonce};
}

/* --- actions ---------------------------------------------------------------------------------- */

static void step(struct ticket *t, enum kv_xfer_event_kind kind, uint32_t index, uint32_t n_pages,
                 int code);

static void on_sent(void *arg, int code)
{
    struct part *p = arg;
    if (p->t->m->stopping) return;
    step(p->t, KV_XFER_SENT, index_of(p), 0, code);
}

static int do_offer(struct ticket *t, uint32_t index)
{
    struct kv_mover *m = t->m;
    struct part *p = part_at(t, index);
    struct wire_msg msg = {.type = WIRE_OFFER_MSG,
                           .offer = {.ticket = wire_id(t),
                                     .part = {.kind = index == KV_PART_TAIL ? WIRE_TAIL : WIRE_PAGE,
                                              .index = index == KV_PART_TAIL ? 0 : index,
                                              .offset = p->local,
                                              .bytes = (uint32_t)bytes_of(m, index),
                                              .digests = {&p->digest, 1}},
                                     .n_pages = t->x.n_pages}};
    if (index == KV_PART_TAIL) msg.offer.note = (struct wire_bytes){t->note, t->note_bytes};
    if (tow_fault("kv.offer")) return TOW_EPEER;
    if (!t->x.pushing) {
        conn_send(t->conn, &msg);
        return 0;
    }
    if (tow_fault(wire_step_name(msg.type, true))) return TOW_EPEER;
    uint8_t head[MOVER_LABEL_BYTES + KV_MOVER_NOTE_MAX + 256];
    memcpy(head, &t->conn->label, MOVER_LABEL_BYTES);
    int64_t n = wire_pack(&msg, head + MOVER_LABEL_BYTES, sizeof head - MOVER_LABEL_BYTES);
    tow_assert(n > 0);
    return net_ep_send_bulk(t->conn->ep, head, (uint32_t)n + MOVER_LABEL_BYTES, local_of(p),
                            bytes_of(m, index), on_sent, p);
}

static void nack(struct conn *c, struct wire_ticket id, bool tail, uint32_t index, int code,
                 const char *note)
{
    struct wire_msg msg = {.type = WIRE_NACK_MSG,
                           .nack = {.ticket = id,
                                    .kind = tail ? WIRE_TAIL : WIRE_PAGE,
                                    .index = tail ? 0 : index,
                                    .code = (int16_t)code,
                                    .note = wire_text(note)}};
    conn_send(c, &msg);
}

static void tell_peer(struct ticket *t, const struct kv_xfer_actions *a)
{
    bool tail = a->index == KV_PART_TAIL;
    struct wire_msg msg;
    if (a->set & KV_DO_ACK) {
        msg.type = WIRE_ACK_MSG;
        msg.ack = (struct wire_ack){wire_id(t), tail ? WIRE_TAIL : WIRE_PAGE, tail ? 0 : a->index};
        conn_send(t->conn, &msg);
    }
    if (a->set & KV_DO_NACK) nack(t->conn, wire_id(t), tail, a->index, a->code, t->why);
    if (a->set & KV_DO_CANCEL) {
        msg.type = WIRE_XCANCEL_MSG;
        msg.xcancel = (struct wire_xcancel){wire_id(t), (int16_t)a->code};
        conn_send(t->conn, &msg);
    }
    if (a->set & KV_DO_TOUCH) {
        msg.type = WIRE_XALIVE_MSG;
        msg.xalive.ticket = wire_id(t);
        conn_send(t->conn, &msg);
    }
}

static void tell_part(struct ticket *t, uint32_t index)
{
    struct kv_mover *m = t->m;
    if (t->x.sender)
        m->own.parts_out++, m->own.bytes_out += bytes_of(m, index);
    else
        m->own.parts_in++, m->own.bytes_in += bytes_of(m, index);
    mover_post_part(m, t->id, t->cookie, index);
}

static void ended(struct ticket *t, int code)
{
    struct kv_mover *m = t->m;
    if (code == 0)
        m->own.tickets_ok++;
    else if (code == TOW_ECANCEL)
        m->own.tickets_cancelled++;
    else
        m->own.tickets_failed++;
    if (t->x.lease_ended) m->own.leases_expired++;
    bool note = code == 0 && !t->x.sender;
    tell_ended(m, t->id, t->cookie, code, t->why, t->note, note ? t->note_bytes : 0);
    ticket_free(t);
}

/* The ticket may be gone on return. */
static void step(struct ticket *t, enum kv_xfer_event_kind kind, uint32_t index, uint32_t n_pages,
                 int code)
{
    struct kv_xfer_event ev = {kind, t->m->now_ms, index, n_pages, code};
    struct kv_xfer_actions a;
    struct conn *c = t->conn;
    kv_xfer_step(&t->x, &ev, &a);
    if (c) tell_peer(t, &a);
    if (t->x.state == KV_XFER_CLOSING || t->x.state == KV_XFER_ENDED) {
        if (!t->x.sender) drop_bulks(t); /* their senders wait for an answer */
        tow_list_remove(&t->in_ready);
    }
    if (a.set & KV_DO_TELL_PART) tell_part(t, a.index);
    if (a.set & KV_DO_TELL_ENDED) {
        ended(t, a.code);
        return;
    }
    if (a.set & KV_DO_OFFER) {
        int rc = do_offer(t, a.index);
        if (rc == 0) return;
        if (t->x.pushing)
            step(t, KV_XFER_SENT, a.index, 0, rc);
        else
            step(t, KV_XFER_CANCEL, 0, 0, rc);
        return;
    }
    if ((a.set & KV_DO_READ_MORE) && c && tow_list_empty(&t->in_ready))
        tow_list_append(&c->ready, &t->in_ready);
}

/* --- receiving -------------------------------------------------------------------------------- */

static bool flip_if_told(uint8_t *bytes, size_t n)
{
    bool told = tow_fault("link.flip");
    if (told) bytes[n / 2] ^= 1;
    return told;
}

static int check_digest(struct part *p, uint64_t digest)
{
    uint32_t index = index_of(p);
    if (digest == p->digest) return 0;
    p->t->m->own.bad_digests++;
    snprintf(p->t->why, sizeof p->t->why, "%s %u from %s: digest differs",
             index == KV_PART_TAIL ? "tail" : "page", index == KV_PART_TAIL ? 0 : index,
             p->t->peer);
    return TOW_EDIGEST;
}

static void part_is_read(struct part *p, int code)
{
    struct conn *c = p->conn;
    p->conn = NULL;
    step(p->t, KV_XFER_READ, index_of(p), 0, code);
    ship_pump(c);
    conn_read_ended(c); /* last: the connection may go with it */
}

/* The digest of a cancelled ticket's page is nobody's concern. */
static bool wanted(const struct part *p)
{
    return p->t->x.state == KV_XFER_MOVING;
}

static void on_bulk_here(void *arg, int code)
{
    struct read *r = arg;
    struct part *p = r->p;
    if (p->t->m->stopping) return;
    if (code == 0 && wanted(p)) {
        size_t bytes = bytes_of(p->t->m, index_of(p));
        bool flipped = flip_if_told(local_of(p), bytes);
        bool copied = p->conn->bulk_copies && !flipped;
        code =
            check_digest(p, copied ? tow_hash_copy_end(&r->bulk) : tow_hash64(local_of(p), bytes));
    }
    r->p = NULL;
    part_is_read(p, code);
}

static int take_bulk(struct read *r)
{
    struct part *p = r->p;
    struct net_bulk *bulk = p->bulk;
    p->bulk = NULL;
    if (!p->conn->bulk_copies) return net_bulk_take(bulk, local_of(p), on_bulk_here, r);
    tow_hash_copy_begin(&r->bulk, local_of(p), bytes_of(p->t->m, index_of(p)), p->t->past_cache);
    return net_bulk_copy(bulk, &r->bulk, on_bulk_here, r);
}

static void on_piece(void *arg, int code);

static size_t piece_of(const struct read *r)
{
    size_t left = bytes_of(r->p->t->m, index_of(r->p)) - r->at;
    return left < MOVER_READ_BYTES ? left : MOVER_READ_BYTES;
}

static int read_piece(struct read *r)
{
    struct part *p = r->p;
    struct conn *c = p->conn;
    enum kv_area area = area_of(index_of(p));
    return net_ep_get(c->ep, c->rkeys[area], c->remote_base[area] + p->remote + r->at,
                      local_of(p) + r->at, piece_of(r), on_piece, r);
}

static void on_piece(void *arg, int code)
{
    struct read *r = arg;
    struct part *p = r->p;
    struct kv_mover *m = p->t->m;
    if (m->stopping) return;
    if (code == 0 && wanted(p)) {
        uint8_t *here = local_of(p) + r->at;
        size_t n = piece_of(r);
        bool last = r->at + n == bytes_of(m, index_of(p));
        if (last) flip_if_told(here, n);
        if (r->at == 0 && last) {
            code = check_digest(p, tow_hash64(here, n));
        } else {
            if (r->at == 0) tow_hash_begin(&r->digest);
            tow_hash_add(&r->digest, here, n);
            r->at += n;
            code = last ? check_digest(p, tow_hash_end(&r->digest)) : read_piece(r);
            if (!last && code == 0) return;
        }
    }
    r->p = NULL;
    part_is_read(p, code);
}

static struct read *read_slot(struct conn *c)
{
    struct read *r = c->reads;
    while (r->p) r++; /* n_reads says that one is free */
    return r;
}

static void start_read(struct conn *c, struct ticket *t, uint32_t index)
{
    struct part *p = part_at(t, index);
    int rc;
    p->conn = c;
    struct read *r = read_slot(c);
    c->n_reads++;
    r->p = p;
    r->at = 0;
    rc = tow_fault("kv.get") ? TOW_EPEER : p->bulk ? take_bulk(r) : read_piece(r);
    if (rc == 0) return;
    r->p = NULL;
    p->conn = NULL;
    c->n_reads--;
    step(t, KV_XFER_READ, index, 0, rc);
}

/* The part that is next in turn, now busy; NULL: none. */
static struct ticket *next_part(struct conn *c, uint32_t *index)
{
    while (!tow_list_empty(&c->ready)) {
        struct ticket *t = TOW_CONTAINER(c->ready.next, struct ticket, in_ready);
        tow_list_remove(&t->in_ready);
        if (!kv_xfer_next(&t->x, index)) continue;
        tow_list_append(&c->ready, &t->in_ready);
        return t;
    }
    return NULL;
}

void ship_pump(struct conn *c)
{
    struct ticket *t;
    uint32_t index;
    while (c->state == CONN_UP && !c->copies && c->n_reads < MOVER_READS &&
           (t = next_part(c, &index)) != NULL)
        start_read(c, t, index);
}

/* The whole part at once: the copy itself tells the digest of what arrived. If the sender reuses
 * the page meanwhile, its lease being over, that is another digest than the one offered. */
static int copy_part(struct conn *c, struct part *p, size_t n)
{
    struct ticket *t = p->t;
    const enum kv_area area = area_of(index_of(p));
    if (p->bulk) net_bulk_refuse(p->bulk); /* on a link of reads nothing is pushed */
    p->bulk = NULL;
    if (tow_fault("kv.get")) return TOW_EPEER;
    uint64_t digest = tow_hash_copy(local_of(p), c->mapped[area] + p->remote, n, t->past_cache);
    if (flip_if_told(local_of(p), n)) digest = tow_hash64(local_of(p), n);
    t->m->own.bytes_copied += n;
    return check_digest(p, digest);
}

/* Several parts are copied before the first of them is told: a copy leaves nothing else in the
 * first cache, and what telling needs is then fetched once. Their tickets stay, for they are busy.
 * The bytes that were moved; 0: there was nothing. */
static size_t copy_parts(struct conn *c)
{
    struct part *parts[MOVER_COPIES];
    int codes[MOVER_COPIES];
    unsigned n = 0;
    size_t bytes = 0;
    struct ticket *t;
    uint32_t index;
    while (n < MOVER_COPIES && bytes < MOVER_COPY_BYTES && (t = next_part(c, &index)) != NULL) {
        const size_t part_bytes = bytes_of(c->m, index);
        parts[n] = part_at(t, index);
        codes[n] = copy_part(c, parts[n], part_bytes);
        bytes += part_bytes;
        n++;
    }
    for (unsigned i = 0; i < n; i++)
        step(parts[i]->t, KV_XFER_READ, index_of(parts[i]), 0, codes[i]);
    return bytes;
}

bool ship_copy_some(struct kv_mover *m)
{
    bool any = false;
    TOW_LIST_EACH (n, &m->conns) {
        struct conn *c = TOW_CONTAINER(n, struct conn, node);
        for (size_t bytes = 0, some = 1;
             some > 0 && c->copies && c->state == CONN_UP && bytes < MOVER_COPY_BYTES;
             bytes += some) {
            some = copy_parts(c);
            any = any || some > 0;
        }
    }
    return any;
}

/* The offer of a live receiver's ticket from the peer that it expects; else it is refused. */
static struct ticket *offer_target(struct conn *c, const struct wire_offer *o, const char **why)
{
    struct kv_mover *m = c->m;
    struct ticket *t = find_id(m, o->ticket.id);
    *why = "no such ticket";
    if (!t || t->x.sender) return NULL;
    *why = "nonce differs";
    if (t->id.nonce != o->ticket.nonce) return NULL;
    if (t->conn == c) return t;
    *why = "the ticket expects another peer";
    if (t->incarnation != c->peer.incarnation || strcmp(t->peer, c->peer.name) != 0) return NULL;
    return t;
}

void ship_offered(struct conn *c, const struct wire_offer *o, struct net_bulk *bulk)
{
    struct kv_mover *m = c->m;
    struct tow_err err; /* filled where a code is negative */
    const char *why;
    bool tail = o->part.kind == WIRE_TAIL;
    uint32_t index = tail ? KV_PART_TAIL : o->part.index;
    struct ticket *t = offer_target(c, o, &why);
    int code = TOW_ENOENT;
    if (t) {
        enum kv_area area = area_of(index);
        struct wire_part_shape shape = {.area_bytes = c->remote_bytes[area],
                                        .bytes = (uint32_t)bytes_of(m, index),
                                        .n_digests = 1,
                                        .n_parts = tail ? 1 : t->x.n_pages};
        code = wire_part_check(&o->part, &shape, &err);
        why = err.msg;
        if (code == 0 && o->note.len > KV_MOVER_NOTE_MAX) code = TOW_EWIRE, why = "note too long";
    }
    if (code < 0) {
        m->own.bad_offers++;
        /* An unknown ticket is ordinary: the offer crossed our cancel on its way. */
        tow_log(code == TOW_ENOENT ? TOW_LOG_DEBUG : TOW_LOG_WARN,
                "peer %s: offer for ticket %016llx refused: %s", c->peer.name,
                (unsigned long long)o->ticket.id, why);
        nack(c, o->ticket, tail, o->part.index, code, why);
        if (bulk) net_bulk_refuse(bulk);
        return;
    }
    struct part *p = part_at(t, index);
    bool fresh = t->states[p - t->parts] == KV_PART_NONE &&
                 (t->x.state == KV_XFER_WAITING || t->x.state == KV_XFER_MOVING) &&
                 o->n_pages == t->x.n_pages;
    t->conn = c;
    if (fresh) {
        p->remote = o->part.offset;
        p->digest = wire_u64s_at(o->part.digests, 0);
        p->bulk = bulk;
        if (tail) {
            t->note_bytes = o->note.len;
            if (o->note.len) memcpy(t->note, o->note.data, o->note.len);
        }
    } else {
        m->own.bad_offers++;
        if (bulk) net_bulk_refuse(bulk);
    }
    step(t, KV_XFER_OFFERED, index, o->n_pages, 0);
    ship_pump(c);
}

/* --- what the peer says of our tickets -------------------------------------------------------- */

static struct ticket *of_peer(struct conn *c, struct wire_ticket id)
{
    struct ticket *t = find(c->m, (struct kv_ticket){id.id, id.nonce});
    bool ours = t && t->incarnation == c->peer.incarnation && strcmp(t->peer, c->peer.name) == 0;
    if (ours) return t;
    c->m->own.stale_messages++; /* ordinary: it crossed our own end of the ticket */
    return NULL;
}

void ship_from_peer(struct conn *c, struct wire_ticket id, enum kv_xfer_event_kind kind, int code)
{
    struct ticket *t = of_peer(c, id);
    if (!t || (kind == KV_XFER_TOUCH && t->x.sender)) return;
    if (kind == KV_XFER_PEER_CANCEL && !t->why[0])
        snprintf(t->why, sizeof t->why, "%s gave it up: %s", t->peer, tow_err_text(code));
    step(t, kind, 0, 0, code);
}

void ship_acked(struct conn *c, const struct wire_ack *a)
{
    struct ticket *t = of_peer(c, a->ticket);
    if (t) step(t, KV_XFER_ACKED, a->kind == WIRE_TAIL ? KV_PART_TAIL : a->index, 0, 0);
}

void ship_nacked(struct conn *c, const struct wire_nack *n)
{
    struct ticket *t = of_peer(c, n->ticket);
    char note[100];
    if (!t) return;
    snprintf(t->why, sizeof t->why, "%s refused it: %s", t->peer,
             n->note.len ? wire_text_copy(n->note, note, sizeof note) : tow_err_text(n->code));
    step(t, KV_XFER_NACKED, 0, 0, n->code);
}

/* --- commands --------------------------------------------------------------------------------- */

void ship_send(struct kv_mover *m, const struct command *cmd)
{
    struct conn *c = mover_conn_of(m, cmd->peer, cmd->incarnation);
    if (!c) {
        tell_ended(m, cmd->ticket, cmd->cookie, TOW_EPEER, "no link to the decode process", NULL,
                   0);
        return;
    }
    struct ticket *t = ticket_new(m, cmd);
    if (!t) return;
    t->conn = c;
    kv_xfer_init_sender(&t->x, cmd->n, t->states, c->method == KV_MOVE_BULK,
                        cmd->lease_ms ? cmd->lease_ms : m->cfg.lease_ms, m->now_ms);
}

static bool pushes_enough(const struct ticket *t)
{
    return t->x.pushing && t->x.n_busy >= MOVER_PUSHES;
}

bool ship_offer_waits(struct kv_mover *m, const struct command *cmd)
{
    struct ticket *t = find(m, cmd->ticket);
    return t && t->x.state == KV_XFER_OPEN && pushes_enough(t);
}

bool ship_offer_some(struct kv_mover *m, struct command *cmd)
{
    const struct kv_offer *parts = (const struct kv_offer *)(const void *)cmd->payload;
    for (unsigned told = 0; cmd->at < cmd->n && told < MOVER_OFFERS; cmd->at++, told++) {
        struct ticket *t = find(m, cmd->ticket); /* each step may end it */
        if (!t || !t->x.sender || t->x.state != KV_XFER_OPEN) return true;
        if (pushes_enough(t)) break;
        const struct kv_offer *o = &parts[cmd->at];
        bool tail = o->index == KV_PART_TAIL;
        if (tail || o->index < t->x.n_pages) {
            struct part *p = part_at(t, o->index);
            if (t->states[p - t->parts] == KV_PART_NONE) {
                p->local = o->offset;
                p->digest = o->digest;
            }
        }
        if (tail) {
            t->note_bytes = cmd->note_bytes;
            memcpy(t->note, cmd->payload + cmd->n * sizeof *parts, cmd->note_bytes);
        }
        step(t, KV_XFER_OFFER, o->index, 0, 0);
    }
    return cmd->at >= cmd->n;
}

/* From the first to the last of the places where the n pages go. */
static uint64_t spread(const struct ticket *t, uint32_t n)
{
    uint64_t first = UINT64_MAX, last = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (t->parts[i].local < first) first = t->parts[i].local;
        if (t->parts[i].local > last) last = t->parts[i].local;
    }
    return last > first ? last - first : 0;
}

void ship_expect(struct kv_mover *m, const struct command *cmd)
{
    struct ticket *t = ticket_new(m, cmd);
    if (!t) return;
    for (uint32_t i = 0; i < cmd->n; i++)
        memcpy(&t->parts[i].local, cmd->payload + i * sizeof(uint64_t), sizeof(uint64_t));
    t->parts[cmd->n].local = cmd->tail_offset;
    t->past_cache = spread(t, cmd->n) + m->cfg.page_bytes >= MOVER_PAST_CACHE;
    kv_xfer_init_receiver(&t->x, cmd->n, t->states, cmd->lease_ms ? cmd->lease_ms : m->cfg.lease_ms,
                          m->now_ms);
}

void ship_step(struct kv_mover *m, struct kv_ticket id, enum kv_xfer_event_kind kind, int code)
{
    struct ticket *t = find(m, id);
    if (!t) return;
    if (!t->conn && !t->x.sender) t->conn = mover_conn_of(m, t->peer, t->incarnation);
    step(t, kind, 0, 0, code);
}

/* --- loss and time ---------------------------------------------------------------------------- */

void ship_peer_lost(struct kv_mover *m, const char *name, uint64_t incarnation, struct conn *c,
                    const char *why)
{
    for (uint32_t b = 0; b < m->n_buckets; b++) {
        TOW_LIST_EACH_SAFE (n, &m->buckets[b]) {
            struct ticket *t = TOW_CONTAINER(n, struct ticket, node);
            bool theirs = (!name || strcmp(t->peer, name) == 0) &&
                          (incarnation == 0 || t->incarnation == incarnation);
            if (c ? t->conn != c && !(theirs && !t->conn) : !theirs) continue;
            if (!t->why[0]) snprintf(t->why, sizeof t->why, "peer %s: %s", t->peer, why);
            t->conn = NULL;
            step(t, KV_XFER_PEER_LOST, 0, 0, 0);
        }
    }
}

void ship_tick(struct kv_mover *m)
{
    for (uint32_t b = 0; b < m->n_buckets; b++) {
        TOW_LIST_EACH_SAFE (n, &m->buckets[b]) {
            struct ticket *t = TOW_CONTAINER(n, struct ticket, node);
            if (m->now_ms < kv_xfer_deadline_ms(&t->x)) continue;
            snprintf(t->why, sizeof t->why, "no progress for %llu ms",
                     (unsigned long long)t->x.lease_ms);
            if (!t->conn && !t->x.sender) t->conn = mover_conn_of(m, t->peer, t->incarnation);
            step(t, KV_XFER_TICK, 0, 0, 0);
        }
    }
}

void ship_free_all(struct kv_mover *m)
{
    for (uint32_t b = 0; b < m->n_buckets; b++)
        TOW_LIST_EACH_SAFE (n, &m->buckets[b]) ticket_free(TOW_CONTAINER(n, struct ticket, node));
}
