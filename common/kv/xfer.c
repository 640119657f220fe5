/* kv/xfer.c - bookkeeping of one shipment; the charts are in the header.
 *
 * How      One outcome is decided once, in settle(); whether it is told at once or after what is in
 *          flight has ended is the difference between ENDED and CLOSING, and nothing else.
 *          Operations in flight are counted (n_busy), so a part may be acknowledged before our own
 *          send of it has reported, as happens when the peer is quick.
 * Rejected The sender writing into the receiver (put): then the receiver could not know when a
 *          stopped or half-dead sender has ceased to write, and would have to hold pages for as
 *          long as that may take. See docs/decisions/receiver-driven-pages.md. Retrying single
 *          parts: a part fails when its link or its bytes are bad, and either way another attempt
 *          by the router, with a new ticket, is the retry.
 */
#include "common/kv/xfer.h"

#include "common/base/err.h"

#include <string.h>

static void init(struct kv_xfer *x, enum kv_xfer_state state, uint32_t n_pages, uint8_t *parts,
                 uint64_t lease_ms, uint64_t now_ms)
{
    tow_assert(n_pages <= KV_XFER_MAX_PAGES);
    memset(parts, KV_PART_NONE, (size_t)n_pages + 1);
    *x = (struct kv_xfer){.state = state,
                          .n_pages = n_pages,
                          .lease_ms = lease_ms,
                          .progress_ms = now_ms,
                          .parts = parts};
}

void kv_xfer_init_sender(struct kv_xfer *x, uint32_t n_pages, uint8_t *parts, bool pushing,
                         uint64_t lease_ms, uint64_t now_ms)
{
    init(x, KV_XFER_OPEN, n_pages, parts, lease_ms, now_ms);
    x->sender = true;
    x->pushing = pushing;
}

void kv_xfer_init_receiver(struct kv_xfer *x, uint32_t n_pages, uint8_t *parts, uint64_t lease_ms,
                           uint64_t now_ms)
{
    init(x, KV_XFER_WAITING, n_pages, parts, lease_ms, now_ms);
}

/* Place of a part in parts[]; n_pages + 1 when there is no such part. */
static uint32_t slot_of(const struct kv_xfer *x, uint32_t index)
{
    if (index == KV_PART_TAIL) return x->n_pages;
    return index < x->n_pages ? index : x->n_pages + 1;
}

static bool known(const struct kv_xfer *x, uint32_t slot)
{
    return slot <= x->n_pages;
}

static void set_state(struct kv_xfer *x, enum kv_xfer_state to)
{
    bool ok = false;
    switch (x->state) {
    case KV_XFER_OPEN: ok = to == KV_XFER_CLOSING || to == KV_XFER_ENDED; break;
    case KV_XFER_WAITING: ok = to != KV_XFER_WAITING && to != KV_XFER_OPEN; break;
    case KV_XFER_MOVING: ok = to == KV_XFER_CLOSING || to == KV_XFER_ENDED; break;
    case KV_XFER_CLOSING: ok = to == KV_XFER_ENDED; break;
    case KV_XFER_ENDED: break;
    }
    tow_assert(ok);
    x->state = to;
}

/* The outcome is decided. */
static void settle(struct kv_xfer *x, int code, struct kv_xfer_actions *out)
{
    x->code = code;
    set_state(x, x->n_busy ? KV_XFER_CLOSING : KV_XFER_ENDED);
    if (x->state == KV_XFER_ENDED) {
        out->set |= KV_DO_TELL_ENDED;
        out->code = code;
    }
}

static void fail(struct kv_xfer *x, int code, uint32_t tell_peer, struct kv_xfer_actions *out)
{
    if (code >= 0) code = TOW_EPEER; /* a peer that gives no reason */
    if (!x->peer_gone) out->set |= tell_peer;
    out->code = code;
    settle(x, code, out);
}

static bool live(const struct kv_xfer *x)
{
    return x->state != KV_XFER_CLOSING && x->state != KV_XFER_ENDED;
}

static void op_ended(struct kv_xfer *x, struct kv_xfer_actions *out)
{
    if (x->n_busy == 0) return; /* not one of ours */
    x->n_busy--;
    if (x->state == KV_XFER_CLOSING && x->n_busy == 0) {
        set_state(x, KV_XFER_ENDED);
        out->set |= KV_DO_TELL_ENDED;
        out->code = x->code;
    }
}

static void on_offer(struct kv_xfer *x, const struct kv_xfer_event *ev, struct kv_xfer_actions *out)
{
    uint32_t slot = slot_of(x, ev->index);
    if (!live(x)) return;
    if (!known(x, slot) || x->parts[slot] != KV_PART_NONE) {
        fail(x, TOW_ESTATE, KV_DO_CANCEL, out); /* our own side confuses its pages: ship nothing */
        return;
    }
    x->parts[slot] = KV_PART_OFFERED;
    if (x->n_offered == x->n_done) x->progress_ms = ev->now_ms;
    x->n_offered++;
    if (x->pushing) x->n_busy++;
    out->set |= KV_DO_OFFER;
}

static void on_acked(struct kv_xfer *x, const struct kv_xfer_event *ev, struct kv_xfer_actions *out)
{
    uint32_t slot = slot_of(x, ev->index);
    if (!live(x) || !known(x, slot) || x->parts[slot] != KV_PART_OFFERED) return;
    x->parts[slot] = KV_PART_DONE;
    x->n_done++;
    x->progress_ms = ev->now_ms;
    out->set |= KV_DO_TELL_PART;
    if (x->n_done == x->n_pages + 1) settle(x, 0, out);
}

static void on_offered(struct kv_xfer *x, const struct kv_xfer_event *ev,
                       struct kv_xfer_actions *out)
{
    uint32_t slot = slot_of(x, ev->index);
    if (!live(x)) {
        out->set |= KV_DO_NACK;
        out->code = x->code < 0 ? x->code : TOW_ESTATE;
    } else if (ev->n_pages != x->n_pages) {
        fail(x, TOW_EWIRE, KV_DO_NACK, out);
    } else if (!known(x, slot) || x->parts[slot] != KV_PART_NONE) {
        out->set |= KV_DO_NACK; /* doubled or forged: refused, the rest goes on */
        out->code = TOW_ESTATE;
    } else {
        if (x->state == KV_XFER_WAITING) set_state(x, KV_XFER_MOVING);
        x->parts[slot] = KV_PART_OFFERED;
        x->n_offered++;
        x->progress_ms = ev->now_ms;
        if (slot < x->next) x->next = slot;
        out->set |= KV_DO_READ_MORE;
    }
}

static void on_read(struct kv_xfer *x, const struct kv_xfer_event *ev, struct kv_xfer_actions *out)
{
    uint32_t slot = slot_of(x, ev->index);
    if (!known(x, slot) || x->parts[slot] != KV_PART_BUSY) return;
    x->parts[slot] = ev->code == 0 ? KV_PART_DONE : KV_PART_OFFERED;
    if (!live(x)) {
        op_ended(x, out);
        return;
    }
    x->n_busy--;
    x->progress_ms = ev->now_ms;
    if (ev->code != 0) {
        fail(x, ev->code, KV_DO_NACK, out);
        return;
    }
    x->n_done++;
    out->set |= KV_DO_ACK | KV_DO_TELL_PART;
    if (x->n_done == x->n_pages + 1) settle(x, 0, out);
}

static void on_touch(struct kv_xfer *x, const struct kv_xfer_event *ev, struct kv_xfer_actions *out)
{
    if (!live(x)) return;
    /* A sender with something unacknowledged waits for its peer: our own life does not count. */
    if (!x->sender || x->n_offered == x->n_done) x->progress_ms = ev->now_ms;
    if (x->sender) out->set |= KV_DO_TOUCH;
}

void kv_xfer_step(struct kv_xfer *x, const struct kv_xfer_event *ev, struct kv_xfer_actions *out)
{
    *out = (struct kv_xfer_actions){.index = ev->index};
    switch (ev->kind) {
    case KV_XFER_CANCEL:
        if (live(x)) fail(x, ev->code < 0 ? ev->code : TOW_ECANCEL, KV_DO_CANCEL, out);
        break;
    case KV_XFER_PEER_CANCEL:
        if (live(x)) fail(x, ev->code, 0, out);
        break;
    case KV_XFER_PEER_LOST:
        x->peer_gone = true;
        if (live(x)) fail(x, TOW_EPEER, 0, out);
        break;
    case KV_XFER_TOUCH: on_touch(x, ev, out); break;
    case KV_XFER_TICK:
        if (live(x) && ev->now_ms >= kv_xfer_deadline_ms(x)) {
            x->lease_ended = true;
            fail(x, TOW_ETIME, KV_DO_CANCEL, out);
        }
        break;
    case KV_XFER_OFFER:
        if (x->sender) on_offer(x, ev, out);
        break;
    case KV_XFER_SENT:
        if (!x->sender) break;
        op_ended(x, out);
        if (ev->code != 0 && live(x)) fail(x, ev->code, KV_DO_CANCEL, out);
        break;
    case KV_XFER_ACKED:
        if (x->sender) on_acked(x, ev, out);
        break;
    case KV_XFER_NACKED:
        if (x->sender && live(x)) fail(x, ev->code, 0, out);
        break;
    case KV_XFER_OFFERED:
        if (!x->sender) on_offered(x, ev, out);
        break;
    case KV_XFER_READ:
        if (!x->sender) on_read(x, ev, out);
        break;
    }
}

bool kv_xfer_next(struct kv_xfer *x, uint32_t *index)
{
    if (x->sender || x->state != KV_XFER_MOVING) return false;
    /* Asked once more for each part that came: no search through those that did not. */
    if (x->n_offered == x->n_busy + x->n_done) return false;
    for (uint32_t s = x->next; s <= x->n_pages; s++) {
        if (x->parts[s] != KV_PART_OFFERED) continue;
        x->parts[s] = KV_PART_BUSY;
        x->n_busy++;
        x->next = s + 1;
        *index = s == x->n_pages ? KV_PART_TAIL : s;
        return true;
    }
    x->next = x->n_pages + 1;
    return false;
}

uint64_t kv_xfer_deadline_ms(const struct kv_xfer *x)
{
    return live(x) ? x->progress_ms + x->lease_ms : UINT64_MAX;
}

const char *kv_xfer_state_name(enum kv_xfer_state s)
{
    static const char *const names[] = {"open", "waiting", "moving", "closing", "ended"};
    return (unsigned)s < 5 ? names[s] : "?";
}
