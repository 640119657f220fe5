/* The transfer thread: two movers in one process,
 * each with its own thread and its own UCX worker. */
#include "tests/support/check.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/hash.h"
#include "common/kv/mover.h"

#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGE = 200 * 1024, TAIL = 70 * 1024, PAGES = 24, TAILS = 4, HEARTBEAT_MS = 500 };
enum { LEASE_MS = 30000, SHORT_LEASE_MS = 2000, EVENT_MS = 60000 };

struct side {
    struct kv_mover *m;
    sem_t wakes;
    uint8_t *pages, *tails;
    /* what was told last */
    struct kv_mover_event ev;
    uint8_t note[KV_MOVER_NOTE_MAX];
    unsigned parts, ended;
    enum kv_move_method method;
    uint32_t lease_ms; /* of the next tickets; 0: the default */
};

static void on_wake(void *arg)
{
    sem_post(&((struct side *)arg)->wakes);
}

static const struct kv_fact facts[] = {{"layout.id", "v1"}, {"numerics.kv", "fp8"}};

static void side_open(struct side *s, const char *name, uint64_t incarnation, uint64_t secret,
                      const struct kv_fact *f)
{
    struct tow_err err = {0};
    memset(s, 0, sizeof *s);
    sem_init(&s->wakes, 0, 0);
    struct kv_mover_config c = {.name = name,
                                .incarnation = incarnation,
                                .secret = secret,
                                .facts = f,
                                .n_facts = 2,
                                .area_bytes = {(size_t)PAGES * PAGE, (size_t)TAILS * TAIL},
                                .page_bytes = PAGE,
                                .tail_bytes = TAIL,
                                .heartbeat_ms = test_limit_ms(HEARTBEAT_MS),
                                .lease_ms = test_limit_ms(LEASE_MS),
                                .max_tickets = 8,
                                .wake = on_wake,
                                .wake_arg = s};
    if (kv_mover_open(&s->m, &c, &err) < 0) fail_msg("%s", err.msg);
    s->pages = kv_mover_area(s->m, KV_AREA_PAGES);
    s->tails = kv_mover_area(s->m, KV_AREA_TAILS);
}

static void side_close(struct side *s)
{
    kv_mover_close(s->m);
    sem_destroy(&s->wakes);
}

/* The next event. */
static void next_event(struct side *s)
{
    uint64_t until = tow_wall_s() + test_limit_ms(EVENT_MS) / 1000;
    while (!kv_mover_event(s->m, &s->ev)) {
        struct timespec ts = {.tv_sec = (time_t)until};
        if (sem_timedwait(&s->wakes, &ts) < 0) fail_msg("no event came");
    }
    if (s->ev.note_bytes) memcpy(s->note, s->ev.note, s->ev.note_bytes);
    if (s->ev.kind == KV_MOVER_PART) s->parts += s->ev.n_parts;
    if (s->ev.kind == KV_MOVER_ENDED) s->ended++;
}

static void wait_for(struct side *s, enum kv_mover_event_kind kind)
{
    do next_event(s);
    while (s->ev.kind != kind);
}

static void join(struct side *p, struct side *d, const char *name, uint64_t incarnation)
{
    size_t n;
    const void *a = kv_mover_address(d->m, &n);
    assert_int_equal(kv_mover_connect(p->m, name, incarnation, a, n), 0);
}

static bool only_reads; /* as if the peer's memory could not be mapped */

static void pair_open(struct side *p, struct side *d)
{
    if (only_reads) assert_int_equal(tow_fault_arm("link.map", 1, true, TOW_FAULT_FAIL, NULL), 0);
    side_open(p, "p0", 11, 77, facts);
    side_open(d, "d0", 22, 77, facts);
    join(p, d, "d0", 22);
    wait_for(p, KV_MOVER_PEER_UP);
    wait_for(d, KV_MOVER_PEER_UP);
    assert_string_equal(d->ev.peer, "p0");
    assert_true(p->ev.mb_per_s > 0);
    assert_int_not_equal(p->ev.method, KV_MOVE_NONE);
    assert_int_equal(p->ev.method, d->ev.method);
    printf("    %s by %s, %.0f MB/s\n", p->ev.transport,
           p->ev.method == KV_MOVE_GET ? "get" : "bulk", p->ev.mb_per_s);
    d->method = d->ev.method;
    tow_fault_reset();
}

/* What came to d was copied out of p's memory, or none of it was. */
static void check_way(struct side *d)
{
    struct kv_mover_stats s;
    kv_mover_stats(d->m, &s);
    assert_true(s.bytes_in > 0);
    bool copies = d->method == KV_MOVE_GET && !only_reads;
    assert_true(s.bytes_copied == (copies ? s.bytes_in : 0));
}

static void pair_close(struct side *p, struct side *d)
{
    side_close(p);
    side_close(d);
}

static void fill(uint8_t *at, size_t n, uint64_t seed)
{
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t v = (seed + i) * 0x9E3779B97F4A7C15ull;
        memcpy(at + i, &v, 8);
    }
}

static void expect(struct side *d, struct kv_ticket t, uint32_t n, uint64_t cookie)
{
    uint64_t offsets[PAGES];
    for (uint32_t i = 0; i < n; i++)
        offsets[i] = (uint64_t)(PAGES - 1 - i) * PAGE; /* another numbering than the sender's */
    struct kv_expect e = {.ticket = t,
                          .peer = "p0",
                          .incarnation = 11,
                          .page_offsets = offsets,
                          .n_pages = n,
                          .tail_offset = TAIL,
                          .lease_ms = d->lease_ms,
                          .cookie = cookie};
    assert_int_equal(kv_mover_expect(d->m, &e), 0);
}

static void begin(struct side *p, struct kv_ticket t, uint32_t n, uint64_t cookie)
{
    struct kv_send s = {.ticket = t,
                        .peer = "d0",
                        .incarnation = 22,
                        .n_pages = n,
                        .lease_ms = p->lease_ms,
                        .cookie = cookie};
    assert_int_equal(kv_mover_send(p->m, &s), 0);
}

/* As whoever made the pages does it, when they are whole. */
static struct kv_offer page_of(const struct side *p, uint32_t i)
{
    const uint64_t offset = (uint64_t)i * PAGE;
    return (struct kv_offer){i, offset, tow_hash64(p->pages + offset, PAGE)};
}
static struct kv_offer tail_of(const struct side *p)
{
    return (struct kv_offer){KV_PART_TAIL, 0, tow_hash64(p->tails, TAIL)};
}

static void offer(struct side *p, struct kv_ticket t, uint32_t from, uint32_t to, bool tail)
{
    struct kv_offer o[PAGES + 1];
    uint32_t k = 0;
    for (uint32_t i = from; i < to; i++) o[k++] = page_of(p, i);
    if (tail) o[k++] = tail_of(p);
    assert_int_equal(kv_mover_offer(p->m, t, o, k, "first token", tail ? 11 : 0), 0);
}

static void test_kv_mover__sequence_arrives_whole_in_chunks(void **state)
{
    (void)state;
    struct side p, d;
    pair_open(&p, &d);
    fill(p.pages, (size_t)PAGES * PAGE, 1);
    fill(p.tails, TAIL, 2);
    for (uint32_t n = 0; n <= 20; n += 5) {
        struct kv_ticket t = {tow_random_u64(), tow_random_u64()};
        memset(d.pages, 0, (size_t)PAGES * PAGE);
        d.parts = p.parts = 0;
        expect(&d, t, n, 100 + n);
        begin(&p, t, n, 200 + n);
        for (uint32_t i = 0; i + 5 <= n; i += 5) offer(&p, t, i, i + 5, false);
        kv_mover_touch(p.m, t);
        offer(&p, t, n, n, true);
        wait_for(&d, KV_MOVER_ENDED);
        assert_int_equal(d.ev.code, 0);
        assert_true(d.ev.cookie == 100 + n);
        assert_int_equal(d.ev.note_bytes, 11);
        assert_memory_equal(d.note, "first token", 11);
        wait_for(&p, KV_MOVER_ENDED);
        assert_int_equal(p.ev.code, 0);
        assert_true(p.ev.cookie == 200 + n);
        assert_int_equal(d.parts, n + 1);
        assert_int_equal(p.parts, n + 1);
        for (uint32_t i = 0; i < n; i++)
            assert_memory_equal(d.pages + (size_t)(PAGES - 1 - i) * PAGE,
                                p.pages + (size_t)i * PAGE, PAGE);
        assert_memory_equal(d.tails + TAIL, p.tails, TAIL);
    }
    check_way(&d);
    pair_close(&p, &d);
}

static void test_kv_mover__flipped_bit_is_found_and_both_sides_hear_of_it(void **state)
{
    (void)state;
    struct side p, d;
    pair_open(&p, &d);
    struct kv_ticket t = {tow_random_u64(), tow_random_u64()};
    expect(&d, t, 4, 1);
    begin(&p, t, 4, 2);
    assert_int_equal(tow_fault_arm("link.flip", 3, false, TOW_FAULT_FAIL, NULL), 0);
    offer(&p, t, 0, 4, true);
    wait_for(&d, KV_MOVER_ENDED);
    assert_int_equal(d.ev.code, TOW_EDIGEST);
    assert_non_null(strstr(d.ev.text, "digest"));
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, TOW_EDIGEST);
    tow_fault_reset();
    struct kv_mover_stats s;
    kv_mover_stats(d.m, &s);
    pair_close(&p, &d);
}

/* Nothing may write to a part once its digest was made: the receiver would use other bytes than the
 * maker meant. Each of the parts in turn, and then none. */
static void test_kv_mover__part_changed_after_its_digest_was_made_is_refused(void **state)
{
    (void)state;
    enum { N = 3 };
    struct side p, d;
    pair_open(&p, &d);
    fill(p.pages, (size_t)PAGES * PAGE, 5);
    fill(p.tails, TAIL, 6);
    for (uint32_t changed = 0; changed <= N + 1; changed++) {
        struct kv_ticket t = {tow_random_u64(), tow_random_u64()};
        struct kv_offer o[N + 1];
        uint8_t *byte = changed < N ? p.pages + (size_t)changed * PAGE + PAGE - 1 : p.tails;
        for (uint32_t i = 0; i < N; i++) o[i] = page_of(&p, i);
        o[N] = tail_of(&p);
        if (changed <= N) *byte ^= 0x80;
        expect(&d, t, N, 1);
        begin(&p, t, N, 2);
        assert_int_equal(kv_mover_offer(p.m, t, o, N + 1, NULL, 0), 0);
        wait_for(&d, KV_MOVER_ENDED);
        assert_int_equal(d.ev.code, changed <= N ? TOW_EDIGEST : 0);
        if (changed <= N) assert_non_null(strstr(d.ev.text, "digest differs"));
        wait_for(&p, KV_MOVER_ENDED);
        assert_int_equal(p.ev.code, changed <= N ? TOW_EDIGEST : 0);
        if (changed <= N) *byte ^= 0x80;
    }
    struct kv_mover_stats s;
    kv_mover_stats(d.m, &s);
    assert_int_equal(s.bad_digests, N + 1);
    pair_close(&p, &d);
}

/* What a prefill process does whose lease has run out while the peer still copies. */
static void test_kv_mover__page_that_is_reused_meanwhile_never_passes(void **state)
{
    (void)state;
    enum { ROUNDS = 60 };
    struct side p, d;
    unsigned refused = 0;
    pair_open(&p, &d);
    for (unsigned i = 0; i < ROUNDS; i++) {
        struct kv_ticket t = {tow_random_u64(), tow_random_u64()};
        struct kv_offer o[PAGES + 1];
        fill(p.pages, (size_t)PAGES * PAGE, i);
        for (uint32_t k = 0; k < PAGES; k++) o[k] = page_of(&p, k);
        o[PAGES] = tail_of(&p);
        expect(&d, t, PAGES, 1);
        begin(&p, t, PAGES, 2);
        if (i == 0) p.pages[PAGE / 2] ^= 1; /* once for certain, then in a race */
        assert_int_equal(kv_mover_offer(p.m, t, o, PAGES + 1, NULL, 0), 0);
        uint64_t until = tow_now_us() + tow_random_u64() % 300;
        while (tow_now_us() < until) {
        }
        ((volatile uint8_t *)p.pages)[tow_random_u64() % ((size_t)PAGES * PAGE)] ^= 1;
        wait_for(&d, KV_MOVER_ENDED);
        if (d.ev.code == 0) {
            for (uint32_t k = 0; k < PAGES; k++)
                assert_true(tow_hash64(d.pages + (size_t)(PAGES - 1 - k) * PAGE, PAGE) ==
                            o[k].digest);
        } else {
            assert_int_equal(d.ev.code, TOW_EDIGEST);
            refused++;
        }
        wait_for(&p, KV_MOVER_ENDED);
    }
    assert_true(refused > 0);
    printf("    %u of %d refused\n", refused, ROUNDS);
    pair_close(&p, &d);
}

static void test_kv_mover__unknown_wrong_and_repeated_tickets_are_refused(void **state)
{
    (void)state;
    struct side p, d;
    pair_open(&p, &d);
    struct kv_ticket good = {tow_random_u64(), tow_random_u64()};
    struct kv_ticket forged = {good.id, good.nonce ^ 1};
    struct kv_ticket unknown = {tow_random_u64(), 5};
    expect(&d, good, 1, 1);
    begin(&p, unknown, 1, 2);
    offer(&p, unknown, 0, 1, false);
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, TOW_ENOENT);
    assert_true(p.ev.cookie == 2);
    begin(&p, forged, 1, 3);
    offer(&p, forged, 0, 1, false);
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, TOW_ENOENT);
    assert_non_null(strstr(p.ev.text, "nonce"));
    expect(&d, good, 1, 4); /* a live id */
    wait_for(&d, KV_MOVER_ENDED);
    assert_int_equal(d.ev.code, TOW_ESTATE);
    assert_true(d.ev.cookie == 4);
    /* None of this has touched the good one. */
    begin(&p, good, 1, 5);
    offer(&p, good, 0, 1, true);
    wait_for(&d, KV_MOVER_ENDED);
    assert_int_equal(d.ev.code, 0);
    assert_true(d.ev.cookie == 1);
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, 0);
    /* Consumed: the same reference again is unknown. */
    begin(&p, good, 1, 6);
    offer(&p, good, 0, 1, true);
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, TOW_ENOENT);
    /* Shorter than what is expected. */
    struct kv_ticket shorter = {tow_random_u64(), 7};
    expect(&d, shorter, 3, 8);
    begin(&p, shorter, 2, 9);
    offer(&p, shorter, 0, 1, false);
    wait_for(&d, KV_MOVER_ENDED);
    assert_int_equal(d.ev.code, TOW_EWIRE);
    wait_for(&p, KV_MOVER_ENDED);
    struct kv_mover_stats s;
    kv_mover_stats(d.m, &s);
    assert_true(s.bad_offers >= 4);
    pair_close(&p, &d);
}

static void test_kv_mover__cancel_on_either_side_ends_both_once(void **state)
{
    (void)state;
    struct side p, d;
    pair_open(&p, &d);
    for (int round = 0; round < 20; round++) {
        struct kv_ticket t = {tow_random_u64(), tow_random_u64()};
        p.ended = d.ended = 0;
        expect(&d, t, 10, 1);
        begin(&p, t, 10, 2);
        offer(&p, t, 0, 5, false);
        if (round % 4 > 1) wait_for(&d, KV_MOVER_PART);
        if (round & 1) {
            kv_mover_cancel(p.m, t, TOW_ECANCEL);
            offer(&p, t, 5, 10, true); /* late: ignored */
        } else {
            kv_mover_cancel(d.m, t, TOW_ECANCEL);
        }
        kv_mover_cancel(p.m, t, TOW_ECANCEL);
        kv_mover_cancel(d.m, t, TOW_ECANCEL);
        wait_for(&p, KV_MOVER_ENDED);
        wait_for(&d, KV_MOVER_ENDED);
        assert_int_not_equal(d.ev.code, 0);
        memset(d.pages, 0xaa, (size_t)PAGES * PAGE); /* they are ours again ... */
        struct kv_ticket next = {tow_random_u64(), tow_random_u64()};
        begin(&p, next, 0, 3);
        expect(&d, next, 0, 4);
        offer(&p, next, 0, 0, true);
        wait_for(&d, KV_MOVER_ENDED);
        assert_int_equal(d.ev.code, 0);
        wait_for(&p, KV_MOVER_ENDED);
        for (size_t i = 0; i < (size_t)PAGES * PAGE; i++)
            assert_int_equal(d.pages[i], 0xaa); /* ... and nobody wrote into them */
        assert_int_equal(p.ended, 2);
        assert_int_equal(d.ended, 2);
    }
    pair_close(&p, &d);
}

static void test_kv_mover__leases_end_on_time_alone(void **state)
{
    (void)state;
    struct side p, d;
    pair_open(&p, &d);
    struct kv_ticket t = {tow_random_u64(), 1}, u = {tow_random_u64(), 2};
    p.lease_ms = d.lease_ms = SHORT_LEASE_MS;
    begin(&p, t, 1, 1);
    expect(&d, u, 1, 2);
    uint64_t from = tow_now_ms();
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, TOW_ETIME);
    wait_for(&d, KV_MOVER_ENDED);
    assert_int_equal(d.ev.code, TOW_ETIME);
    assert_true(tow_now_ms() - from >= SHORT_LEASE_MS - 100);
    pair_close(&p, &d);
}

static void refused_by(struct side *d, uint64_t secret, const struct kv_fact *f, const char *name,
                       uint64_t incarnation, const char *text, bool refused)
{
    struct side p;
    side_open(&p, "p1", 33, secret, f);
    join(&p, d, name, incarnation);
    do wait_for(&p, KV_MOVER_PEER_DOWN); /* a greeting that came late is tried again */
    while (refused && !p.ev.refused);
    assert_int_equal(p.ev.refused, refused);
    if (!strstr(p.ev.text, text)) fail_msg("%s lacks %s", p.ev.text, text);
    side_close(&p);
}

static void test_kv_mover__peers_that_do_not_fit_hear_why(void **state)
{
    (void)state;
    struct side d;
    const struct kv_fact other[] = {{"layout.id", "v1"}, {"numerics.kv", "bf16"}};
    const struct kv_fact extra[] = {{"layout.id", "v1"}, {"layout.new", "x"}};
    side_open(&d, "d0", 22, 77, facts);
    refused_by(&d, 77, other, "d0", 22, "numerics.kv: theirs fp8, ours bf16", true);
    refused_by(&d, 77, extra, "d0", 22, "numerics.kv", true);
    refused_by(&d, 77, facts, "d0", 23, "identity", true);
    refused_by(&d, 77, facts, "d9", 22, "identity", true);
    refused_by(&d, 78, facts, "d0", 22, "no answer", false);
    setenv("UCX_TCP_RX_SEG_SIZE", "32K", 1);
    unsetenv("UCX_TCP_TX_SEG_SIZE"); /* is made to fit, where there is none */
    refused_by(&d, 77, facts, "d0", 22, "link.tcp_segment: theirs 130315, ours 32K", true);
    unsetenv("UCX_TCP_RX_SEG_SIZE");
    unsetenv("UCX_TCP_TX_SEG_SIZE");
    side_close(&d);
}

static void test_kv_mover__peer_that_restarts_is_linked_anew(void **state)
{
    (void)state;
    struct side p, d;
    pair_open(&p, &d);
    struct kv_ticket t = {tow_random_u64(), 1};
    begin(&p, t, 2, 1);
    side_close(&d);
    wait_for(&p, KV_MOVER_ENDED); /* its ticket ends, by the connection or by silence */
    assert_int_equal(p.ev.code, TOW_EPEER);
    side_open(&d, "d0", 23, 77, facts);
    join(&p, &d, "d0", 23);
    do wait_for(&p, KV_MOVER_PEER_UP);
    while (p.ev.incarnation != 23);
    struct kv_mover_stats s;
    kv_mover_stats(p.m, &s);
    assert_int_equal(s.peers_up, 1);
    assert_int_equal(kv_mover_drop(p.m, "d0", 0), 0);
    begin(&p, t, 2, 3);
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, TOW_EPEER);
    pair_close(&p, &d);
}

enum { SENDERS = 3 };

static void senders_open(struct side *p, struct side *d)
{
    char name[8];
    side_open(d, "d0", 22, 77, facts);
    for (unsigned i = 0; i < SENDERS; i++) {
        snprintf(name, sizeof name, "p%u", i);
        side_open(&p[i], name, 11 + i, 77, facts);
    }
}

static void senders_close(struct side *p, struct side *d)
{
    for (unsigned i = 0; i < SENDERS; i++) side_close(&p[i]);
    side_close(d);
}

/* The receiver has one page for the proofs of all its links. */
static void test_kv_mover__senders_that_prove_at_once_do_not_spoil_each_other(void **state)
{
    (void)state;
    enum { ROUNDS = 8 };
    struct side p[SENDERS], d;
    struct kv_mover_stats s;
    if (only_reads) assert_int_equal(tow_fault_arm("link.map", 1, true, TOW_FAULT_FAIL, NULL), 0);
    senders_open(p, &d);
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned i = 0; i < SENDERS; i++) join(&p[i], &d, "d0", 22);
        for (unsigned i = 0; i < SENDERS; i++) {
            do {
                next_event(&p[i]);
                if (p[i].ev.kind == KV_MOVER_PEER_DOWN && strstr(p[i].ev.text, "page"))
                    fail_msg("p%u, round %u: %s", i, round, p[i].ev.text);
            } while (p[i].ev.kind != KV_MOVER_PEER_UP);
        }
        for (unsigned i = 0; i < SENDERS; i++) assert_int_equal(kv_mover_drop(p[i].m, "d0", 0), 0);
        while (kv_mover_event(d.m, &d.ev)) {
        }
    }
    kv_mover_stats(d.m, &s);
    assert_int_equal(s.bad_digests, 0); /* not of one method either */
    senders_close(p, &d);
    tow_fault_reset();
}

/* It loses its turn, and only it goes down. */
static void test_kv_mover__proof_that_stands_still_holds_nobody_up_for_long(void **state)
{
    (void)state;
    struct side p[SENDERS], d;
    unsigned downs = 0;
    assert_int_equal(tow_fault_arm("link.prove", 1, false, TOW_FAULT_FAIL, NULL), 0);
    senders_open(p, &d);
    for (unsigned i = 0; i < SENDERS; i++) join(&p[i], &d, "d0", 22);
    for (unsigned i = 0; i < SENDERS; i++) {
        do {
            next_event(&p[i]);
            if (p[i].ev.kind == KV_MOVER_PEER_DOWN) downs++;
        } while (p[i].ev.kind != KV_MOVER_PEER_UP);
    }
    assert_int_equal(tow_fault_fired(), 1);
    assert_int_equal(downs, 1);
    senders_close(p, &d);
    tow_fault_reset();
}

/* One of the two stops hearing; a new worker at each end, and all is as before, pages included. */
static void test_kv_mover__relink_heals_a_jam(void **state)
{
    (void)state;
    struct side p, d;
    size_t before, after;
    uint8_t old[8192];
    pair_open(&p, &d);
    uint8_t *pages = d.pages;
    const void *address = kv_mover_address(d.m, &before);
    assert_true(before <= sizeof old);
    memcpy(old, address, before);
    struct kv_ticket t = {tow_random_u64(), 1}, u = {tow_random_u64(), 1};
    expect(&d, t, 3, 1);
    begin(&p, t, 3, 2);
    offer(&p, t, 0, 2, false);
    wait_for(&p, KV_MOVER_PART);
    assert_int_equal(tow_fault_arm("link.jam", 1, false, TOW_FAULT_FAIL, NULL), 0);
    wait_for(&p, KV_MOVER_ENDED); /* silent for five heartbeats */
    assert_int_equal(p.ev.code, TOW_EPEER);
    wait_for(&p, KV_MOVER_PEER_DOWN);
    do wait_for(&d, KV_MOVER_ENDED);
    while (d.ev.cookie != 1);
    expect(&d, u, 1, 3); /* of no connection yet */
    assert_int_equal(kv_mover_relink(d.m, 23), 0);
    wait_for(&d, KV_MOVER_ENDED);
    assert_int_equal(d.ev.code, TOW_EPEER);
    assert_true(d.ev.cookie == 3);
    wait_for(&d, KV_MOVER_RELINKED);
    assert_int_equal(d.ev.code, 0);
    assert_int_equal(kv_mover_relink(p.m, 11), 0);
    wait_for(&p, KV_MOVER_RELINKED);
    assert_int_equal(p.ev.code, 0);
    assert_int_equal(tow_fault_fired(), 1);
    tow_fault_reset();
    address = kv_mover_address(d.m, &after);
    assert_false(after == before && memcmp(address, old, after) == 0);
    struct kv_mover_stats s;
    kv_mover_stats(p.m, &s);
    assert_int_equal(s.peers_up, 0);
    assert_int_equal(s.tickets_live, 0);

    join(&p, &d, "d0", 23);
    do wait_for(&p, KV_MOVER_PEER_UP);
    while (p.ev.incarnation != 23);
    assert_ptr_equal(kv_mover_area(d.m, KV_AREA_PAGES), pages);
    fill(p.pages, (size_t)PAGES * PAGE, 5);
    struct kv_send send = {.ticket = t, .peer = "d0", .incarnation = 23, .n_pages = 4};
    expect(&d, t, 4, 4);
    assert_int_equal(kv_mover_send(p.m, &send), 0);
    offer(&p, t, 0, 4, true);
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, 0);
    wait_for(&d, KV_MOVER_ENDED);
    assert_int_equal(d.ev.code, 0);
    for (uint32_t i = 0; i < 4; i++)
        assert_memory_equal(d.pages + (size_t)(PAGES - 1 - i) * PAGE, p.pages + (size_t)i * PAGE,
                            PAGE);
    pair_close(&p, &d);
}

/* Reads under way when the link is made anew end before their ticket does, and only once. */
static void test_kv_mover__relink_under_load_ends_each_ticket_once(void **state)
{
    (void)state;
    struct side p, d;
    pair_open(&p, &d);
    for (uint64_t round = 0; round < 4; round++) {
        struct kv_ticket t[4];
        p.ended = d.ended = 0;
        for (uint64_t i = 0; i < 4; i++) {
            t[i] = (struct kv_ticket){tow_random_u64(), 1};
            expect(&d, t[i], 20, i);
            struct kv_send s = {
                .ticket = t[i], .peer = "d0", .incarnation = 22 + round, .n_pages = 20};
            assert_int_equal(kv_mover_send(p.m, &s), 0);
            offer(&p, t[i], 0, 20, false);
        }
        do next_event(&d);
        while (d.ev.kind != KV_MOVER_PART);
        assert_int_equal(kv_mover_relink(d.m, 23 + round), 0);
        wait_for(&d, KV_MOVER_RELINKED);
        assert_int_equal(d.ev.code, 0);
        assert_int_equal(d.ended, 4);
        join(&p, &d, "d0", 23 + round);
        do wait_for(&p, KV_MOVER_PEER_UP);
        while (p.ev.incarnation != 23 + round);
        while (p.ended < 4) next_event(&p); /* what the old link still held ends when it lets go */
        assert_int_equal(p.ended, 4);
        do wait_for(&d, KV_MOVER_PEER_UP);
        while (d.ev.incarnation != 11);
    }
    pair_close(&p, &d);
}

static void test_kv_mover__failing_places_end_the_ticket_and_nothing_else(void **state)
{
    (void)state;
    static const char *const places[] = {"kv.offer", "kv.get"};
    struct side p, d;
    pair_open(&p, &d);
    for (unsigned i = 0; i < 2; i++) {
        struct kv_ticket t = {tow_random_u64(), 1};
        expect(&d, t, 10, 1);
        begin(&p, t, 10, 2);
        assert_int_equal(tow_fault_arm(places[i], 3, false, TOW_FAULT_FAIL, NULL), 0);
        uint64_t from = tow_now_ms();
        offer(&p, t, 0, 10, true);
        wait_for(&p, KV_MOVER_ENDED);
        assert_int_equal(p.ev.code, TOW_EPEER);
        wait_for(&d, KV_MOVER_ENDED);
        assert_int_equal(d.ev.code, TOW_EPEER);
        assert_true(tow_now_ms() - from < test_limit_ms(LEASE_MS) / 2); /* not by its lease */
        tow_fault_reset();
        struct kv_ticket u = {tow_random_u64(), 1};
        expect(&d, u, 0, 1);
        begin(&p, u, 0, 2);
        offer(&p, u, 0, 0, true);
        wait_for(&p, KV_MOVER_ENDED);
        assert_int_equal(p.ev.code, 0);
        wait_for(&d, KV_MOVER_ENDED);
    }
    pair_close(&p, &d);
}

static void test_kv_mover__idle_links_cost_next_to_nothing(void **state)
{
    (void)state;
    struct side p, d;
    struct timespec from, to;
    pair_open(&p, &d);
    struct kv_ticket t = {tow_random_u64(), 1};
    p.lease_ms = SHORT_LEASE_MS;
    uint64_t from_ms = tow_now_ms();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    begin(&p, t, 1, 1); /* nothing happens until its lease ends, in two seconds */
    wait_for(&p, KV_MOVER_ENDED);
    assert_int_equal(p.ev.code, TOW_ETIME);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    double s = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9;
    double passed = (double)(tow_now_ms() - from_ms) / 1000;
    /* One that polls takes all of it. */
    if (s > passed / 4)
        fail_msg("two idle movers took %.3f s of processor time in %.3f s", s, passed);
    pair_close(&p, &d);
}

static void test_kv_mover__reads_do_where_memory_cannot_be_mapped(void **state)
{
    only_reads = true;
    test_kv_mover__sequence_arrives_whole_in_chunks(state);
    test_kv_mover__flipped_bit_is_found_and_both_sides_hear_of_it(state);
    test_kv_mover__part_changed_after_its_digest_was_made_is_refused(state);
    test_kv_mover__page_that_is_reused_meanwhile_never_passes(state);
    test_kv_mover__cancel_on_either_side_ends_both_once(state);
    test_kv_mover__failing_places_end_the_ticket_and_nothing_else(state);
    test_kv_mover__senders_that_prove_at_once_do_not_spoil_each_other(state);
    only_reads = false;
}

/* In pieces that are digested as they come; a page has two, the tail one. */
static void test_kv_mover__messages_do_over_tcp(void **state)
{
    const char *was = getenv("UCX_TLS");
    char tls[200];
    snprintf(tls, sizeof tls, "%s", was ? was : "");
    setenv("UCX_TLS", "tcp,self", 1);
    test_kv_mover__sequence_arrives_whole_in_chunks(state);
    test_kv_mover__flipped_bit_is_found_and_both_sides_hear_of_it(state);
    test_kv_mover__part_changed_after_its_digest_was_made_is_refused(state);
#if !defined(__SANITIZE_THREAD__) /* it sees what sockets read: the race that is asked for here */
    test_kv_mover__page_that_is_reused_meanwhile_never_passes(state);
#endif
    test_kv_mover__cancel_on_either_side_ends_both_once(state);
    test_kv_mover__failing_places_end_the_ticket_and_nothing_else(state);
    test_kv_mover__senders_that_prove_at_once_do_not_spoil_each_other(state);
    if (was)
        setenv("UCX_TLS", tls, 1);
    else
        unsetenv("UCX_TLS");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_mover__sequence_arrives_whole_in_chunks),
        cmocka_unit_test(test_kv_mover__flipped_bit_is_found_and_both_sides_hear_of_it),
        cmocka_unit_test(test_kv_mover__part_changed_after_its_digest_was_made_is_refused),
        cmocka_unit_test(test_kv_mover__page_that_is_reused_meanwhile_never_passes),
        cmocka_unit_test(test_kv_mover__unknown_wrong_and_repeated_tickets_are_refused),
        cmocka_unit_test(test_kv_mover__cancel_on_either_side_ends_both_once),
        cmocka_unit_test(test_kv_mover__leases_end_on_time_alone),
        cmocka_unit_test(test_kv_mover__idle_links_cost_next_to_nothing),
        cmocka_unit_test(test_kv_mover__peers_that_do_not_fit_hear_why),
        cmocka_unit_test(test_kv_mover__peer_that_restarts_is_linked_anew),
        cmocka_unit_test(test_kv_mover__senders_that_prove_at_once_do_not_spoil_each_other),
        cmocka_unit_test(test_kv_mover__proof_that_stands_still_holds_nobody_up_for_long),
        cmocka_unit_test(test_kv_mover__relink_heals_a_jam),
        cmocka_unit_test(test_kv_mover__relink_under_load_ends_each_ticket_once),
        cmocka_unit_test(test_kv_mover__failing_places_end_the_ticket_and_nothing_else),
        cmocka_unit_test(test_kv_mover__reads_do_where_memory_cannot_be_mapped),
        cmocka_unit_test(test_kv_mover__messages_do_over_tcp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
