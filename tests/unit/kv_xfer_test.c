/* Both machines against each other over a network that delays, loses its peer, doubles and forges;
 * many thousand random orders. Whatever happens, both end once, and never while something is in
 * flight. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/kv/xfer.h"

#include <stdlib.h>
#include <string.h>

enum { PAGES_MAX = 12, LEASE_MS = 1000, WIRE_MAX = 256 };

static uint64_t rng;
static uint32_t roll(uint32_t n)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return (uint32_t)((rng >> 11) % n);
}

/* A message on its way; per direction they arrive in order, as on a link. */
struct wire {
    struct kv_xfer_event ev[WIRE_MAX];
    unsigned n;
};

struct world {
    struct kv_xfer p, d;
    uint8_t p_parts[PAGES_MAX + 1], d_parts[PAGES_MAX + 1];
    struct wire to_p, to_d;
    uint32_t reads[PAGES_MAX + 1], sends[PAGES_MAX + 1]; /* operations in flight, by part */
    unsigned n_reads, n_sends;
    uint32_t n_pages, offered;
    bool p_ended, d_ended, linked, pushing;
    int p_code, d_code;
    unsigned p_told, d_told; /* parts */
    uint64_t now;
};

static void put(struct wire *w, enum kv_xfer_event_kind kind, uint32_t index, uint32_t n_pages,
                int code)
{
    assert_true(w->n < WIRE_MAX);
    w->ev[w->n++] =
        (struct kv_xfer_event){.kind = kind, .index = index, .n_pages = n_pages, .code = code};
}

static void perform(struct world *w, bool sender, const struct kv_xfer_actions *a)
{
    struct wire *out = sender ? &w->to_d : &w->to_p;
    if (w->linked) {
        if (a->set & KV_DO_OFFER) put(out, KV_XFER_OFFERED, a->index, w->n_pages, 0);
        if (a->set & KV_DO_ACK) put(out, KV_XFER_ACKED, a->index, 0, 0);
        if (a->set & KV_DO_NACK) put(out, KV_XFER_NACKED, a->index, 0, a->code);
        if (a->set & KV_DO_CANCEL) put(out, KV_XFER_PEER_CANCEL, 0, 0, a->code);
        if (a->set & KV_DO_TOUCH) put(out, KV_XFER_TOUCH, 0, 0, 0);
    }
    if ((a->set & KV_DO_OFFER) && w->pushing) w->sends[w->n_sends++] = a->index;
    if (a->set & KV_DO_TELL_PART) (*(sender ? &w->p_told : &w->d_told))++;
    if (a->set & KV_DO_TELL_ENDED) {
        bool *ended = sender ? &w->p_ended : &w->d_ended;
        assert_false(*ended); /* once */
        *ended = true;
        *(sender ? &w->p_code : &w->d_code) = a->code;
        assert_int_equal(sender ? w->n_sends : w->n_reads, 0); /* nothing touches the pages */
        assert_int_equal((sender ? &w->p : &w->d)->state, KV_XFER_ENDED);
    }
}

static void step(struct world *w, bool sender, enum kv_xfer_event_kind kind, uint32_t index,
                 uint32_t n_pages, int code)
{
    struct kv_xfer_event ev = {kind, w->now, index, n_pages, code};
    struct kv_xfer_actions a;
    kv_xfer_step(sender ? &w->p : &w->d, &ev, &a);
    perform(w, sender, &a);
}

static void deliver(struct world *w, bool to_sender)
{
    struct wire *q = to_sender ? &w->to_p : &w->to_d;
    if (q->n == 0) return;
    struct kv_xfer_event ev = q->ev[0];
    memmove(q->ev, q->ev + 1, --q->n * sizeof *q->ev);
    step(w, to_sender, ev.kind, ev.index, ev.n_pages, ev.code);
}

static void take(uint32_t *ops, unsigned *n, uint32_t *index)
{
    unsigned i = roll(*n);
    *index = ops[i];
    ops[i] = ops[--*n];
}

static void world_init(struct world *w, uint32_t n_pages, bool pushing)
{
    memset(w, 0, sizeof *w);
    w->n_pages = n_pages;
    w->linked = true;
    w->pushing = pushing;
    w->now = 1;
    kv_xfer_init_sender(&w->p, n_pages, w->p_parts, pushing, LEASE_MS, w->now);
    kv_xfer_init_receiver(&w->d, n_pages, w->d_parts, LEASE_MS, w->now);
}

/* Loss is seen by each side at its own time; what is in flight then fails. */
static void cut(struct world *w, bool sender)
{
    step(w, sender, KV_XFER_PEER_LOST, 0, 0, 0);
}

static void offer_next(struct world *w)
{
    if (w->offered > w->n_pages) return;
    uint32_t i = w->offered++;
    step(w, true, KV_XFER_OFFER, i == w->n_pages ? KV_PART_TAIL : i, 0, 0);
}

static void finish_op(struct world *w, bool read, int code)
{
    uint32_t index;
    if (read && w->n_reads) {
        take(w->reads, &w->n_reads, &index);
        step(w, false, KV_XFER_READ, index, 0, code);
    } else if (!read && w->n_sends) {
        take(w->sends, &w->n_sends, &index);
        step(w, true, KV_XFER_SENT, index, 0, code);
    }
}

static void random_move(struct world *w, unsigned trouble)
{
    w->now += roll(20);
    uint32_t index;
    switch (roll(10)) {
    case 0: offer_next(w); return;
    case 1:
    case 2: deliver(w, true); return;
    case 3:
    case 4: deliver(w, false); return;
    case 5:
        if (w->n_reads < PAGES_MAX && kv_xfer_next(&w->d, &index)) w->reads[w->n_reads++] = index;
        return;
    case 6: finish_op(w, true, 0); return;
    case 7: finish_op(w, false, 0); return;
    case 8: step(w, roll(2), KV_XFER_TOUCH, 0, 0, 0); return;
    default: break;
    }
    if (roll(100) >= trouble) {
        step(w, roll(2), KV_XFER_TICK, 0, 0, 0);
        return;
    }
    switch (roll(9)) {
    case 0: step(w, true, KV_XFER_CANCEL, 0, 0, TOW_ECANCEL); break;
    case 1: step(w, false, KV_XFER_CANCEL, 0, 0, TOW_ECANCEL); break;
    case 2:
        w->linked = false;
        cut(w, roll(2));
        break;
    case 3: finish_op(w, true, TOW_EDIGEST); break;
    case 4: finish_op(w, false, TOW_EPEER); break;
    case 5: /* doubled, forged or late offers */
        step(w, false, KV_XFER_OFFERED, roll(4) ? roll(w->n_pages + 3) : KV_PART_TAIL,
             roll(8) ? w->n_pages : w->n_pages + 1, 0);
        break;
    case 6: step(w, true, KV_XFER_ACKED, roll(PAGES_MAX + 4), 0, 0); break;
    case 7: step(w, true, KV_XFER_NACKED, 0, 0, roll(2) ? TOW_ENOENT : 0); break;
    default: step(w, true, KV_XFER_OFFER, roll(PAGES_MAX + 4), 0, 0); break;
    }
}

/* Time passes and every operation reports, as the link promises: now both must have ended. */
static void run_out(struct world *w)
{
    while (w->n_reads) finish_op(w, true, w->linked ? 0 : TOW_EPEER);
    while (w->n_sends) finish_op(w, false, w->linked ? 0 : TOW_EPEER);
    w->now += LEASE_MS + 1;
    step(w, true, KV_XFER_TICK, 0, 0, 0);
    step(w, false, KV_XFER_TICK, 0, 0, 0);
    assert_true(w->p_ended && w->d_ended);
    assert_true(kv_xfer_deadline_ms(&w->p) == UINT64_MAX);
    /* The sender may believe in success only if the receiver verified everything. */
    if (w->p_code == 0 && w->d_code != 0) assert_int_equal(w->d_told, w->n_pages + 1);
    if (w->d_code == 0) assert_int_equal(w->d_told, w->n_pages + 1);
    /* After the end nothing moves any more. */
    for (int kind = KV_XFER_CANCEL; kind <= KV_XFER_READ; kind++)
        for (int sender = 0; sender < 2; sender++)
            step(w, sender, (enum kv_xfer_event_kind)kind, 0, w->n_pages, TOW_ECANCEL);
    uint32_t index;
    assert_false(kv_xfer_next(&w->d, &index));
}

static void test_kv_xfer__every_random_order_ends_with_pages_back(void **state)
{
    (void)state;
    unsigned good = 0, outcomes[32] = {0};
    for (uint32_t seed = 1; seed <= 40000; seed++) {
        rng = seed * 0x9E3779B97F4A7C15ull;
        struct world w;
        world_init(&w, roll(PAGES_MAX + 1), roll(2));
        unsigned trouble = seed % 3 ? roll(30) : 0, moves = roll(400);
        for (unsigned i = 0; i < moves; i++) random_move(&w, trouble);
        run_out(&w);
        good += w.p_code == 0 && w.d_code == 0;
        outcomes[-w.d_code & 31]++;
    }
    assert_true(good > 1000); /* the test reaches success ... */
    static const int seen[] = {TOW_ECANCEL, TOW_EPEER, TOW_EDIGEST, TOW_ETIME, TOW_EWIRE};
    for (unsigned i = 0; i < sizeof seen / sizeof *seen; i++)
        assert_true(outcomes[-seen[i]] > 10); /* ... and each kind of failure */
}

/* Without forged acks a sender's success implies the receiver's. */
static void test_kv_xfer__sender_succeeds_only_after_the_receiver(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= 5000; seed++) {
        rng = seed * 0xD1B54A32D192ED03ull;
        struct world w;
        world_init(&w, roll(PAGES_MAX + 1), roll(2));
        for (unsigned i = 0; i < 400; i++) {
            random_move(&w, 0);
            if (roll(300) == 0) step(&w, roll(2), KV_XFER_CANCEL, 0, 0, 0);
            if (w.p_ended && w.p_code == 0) assert_true(w.d_ended && w.d_code == 0);
        }
        run_out(&w);
    }
}

static void test_kv_xfer__straight_way_ships_every_part_once(void **state)
{
    (void)state;
    struct world w;
    for (uint32_t n = 0; n <= PAGES_MAX; n++) {
        world_init(&w, n, n & 1);
        uint32_t index;
        while (!w.p_ended) {
            offer_next(&w);
            deliver(&w, false);
            while (kv_xfer_next(&w.d, &index)) {
                w.reads[w.n_reads++] = index;
                finish_op(&w, true, 0);
            }
            deliver(&w, true);
            finish_op(&w, false, 0);
        }
        assert_true(w.d_ended && w.d_code == 0 && w.p_code == 0);
        assert_int_equal(w.p_told, n + 1);
        assert_int_equal(w.d_told, n + 1);
    }
}

static void test_kv_xfer__lease_of_a_sender_with_unacked_parts_ignores_touch(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 1, false);
    w.now = 900;
    step(&w, true, KV_XFER_TOUCH, 0, 0, 0);
    w.now = 1800;
    step(&w, true, KV_XFER_TICK, 0, 0, 0);
    assert_false(w.p_ended); /* nothing unacked: our job's life counts */
    offer_next(&w);
    w.now = 2700;
    step(&w, true, KV_XFER_TOUCH, 0, 0, 0);
    w.now = 2801;
    step(&w, true, KV_XFER_TICK, 0, 0, 0);
    assert_true(w.p_ended);
    assert_int_equal(w.p_code, TOW_ETIME);
    assert_true(w.p.lease_ended);
}

static void test_kv_xfer__cancel_waits_for_the_read_in_flight(void **state)
{
    (void)state;
    struct world w;
    uint32_t index;
    world_init(&w, 2, false);
    offer_next(&w);
    offer_next(&w);
    deliver(&w, false);
    deliver(&w, false);
    assert_true(kv_xfer_next(&w.d, &index));
    w.reads[w.n_reads++] = index;
    step(&w, false, KV_XFER_CANCEL, 0, 0, TOW_ECANCEL);
    assert_false(w.d_ended);
    assert_false(kv_xfer_next(&w.d, &index)); /* the second one is not begun */
    finish_op(&w, true, 0);
    assert_true(w.d_ended);
    assert_int_equal(w.d_code, TOW_ECANCEL);
    deliver(&w, true); /* the peer hears of it */
    assert_true(w.p_ended);
}

static void test_kv_xfer__doubled_offer_is_nacked_and_disturbs_nothing(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, false);
    step(&w, false, KV_XFER_OFFERED, 0, 2, 0);
    step(&w, false, KV_XFER_OFFERED, 0, 2, 0);
    step(&w, false, KV_XFER_OFFERED, 7, 2, 0);
    assert_int_equal(w.to_p.n, 2);
    assert_int_equal(w.to_p.ev[0].kind, KV_XFER_NACKED);
    assert_int_equal(w.to_p.ev[1].code, TOW_ESTATE);
    assert_int_equal(w.d.state, KV_XFER_MOVING);
    step(&w, false, KV_XFER_OFFERED, 1, 3, 0); /* another idea of the sequence's length */
    assert_true(w.d_ended);
    assert_int_equal(w.d_code, TOW_EWIRE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_xfer__every_random_order_ends_with_pages_back),
        cmocka_unit_test(test_kv_xfer__sender_succeeds_only_after_the_receiver),
        cmocka_unit_test(test_kv_xfer__straight_way_ships_every_part_once),
        cmocka_unit_test(test_kv_xfer__lease_of_a_sender_with_unacked_parts_ignores_touch),
        cmocka_unit_test(test_kv_xfer__cancel_waits_for_the_read_in_flight),
        cmocka_unit_test(test_kv_xfer__doubled_offer_is_nacked_and_disturbs_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
