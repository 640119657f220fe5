/* net/link: whatever is in flight ends soon after its endpoint was closed, also towards a peer that
 * stands still; and the peer's ends too, once it goes on and closes. Two links of one thread: one
 * that is not progressed stands still. */
#include "tests/support/check.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/net/link.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BULK = 256 * 1024, BULKS = 8, ENDS_WITHIN_MS = 5000 };

struct side {
    struct net_link *link;
    struct net_region *region; /* of BULKS messages */
    struct net_ep *ep;
    struct net_bulk *bulks[BULKS]; /* that came */
    unsigned n_heard, n_bulks;
    unsigned n_begun, n_ended, n_ok; /* sent or taken */
    bool closed;
};

static void on_message(void *arg, const void *frame, uint32_t bytes)
{
    struct side *s = arg;
    (void)frame, (void)bytes;
    s->n_heard++;
}

static void on_bulk(void *arg, struct net_bulk *bulk, const void *head, uint32_t head_bytes,
                    uint64_t bytes)
{
    struct side *s = arg;
    (void)head;
    assert_int_equal(head_bytes, 4);
    assert_int_equal(bytes, BULK);
    assert_true(s->n_bulks < BULKS);
    s->bulks[s->n_bulks++] = bulk;
}

static void on_ended(void *arg, int code)
{
    struct side *s = arg;
    s->n_ended++;
    if (code == 0) s->n_ok++;
}

static void on_closed(void *arg, int code)
{
    struct side *s = arg;
    (void)code;
    s->closed = true;
}

static void side_open(struct side *s)
{
    struct tow_err err = {0};
    struct net_link_hooks hooks = {.on_message = on_message, .on_bulk = on_bulk, .arg = s};
    if (net_link_open(&s->link, &hooks, &err) < 0) fail_msg("%s", err.msg);
    assert_int_equal(net_region_new(s->link, (size_t)BULKS * BULK, &s->region, &err), 0);
}

static uint8_t *place(const struct side *s, size_t i)
{
    return (uint8_t *)net_region_base(s->region) + i * BULK;
}

/* Both links run until *n is there, in a limit. */
static void run_until(const unsigned *n, unsigned wanted, struct side *a, struct side *b)
{
    uint64_t until = tow_now_ms() + test_limit_ms(ENDS_WITHIN_MS);
    while (*n < wanted && tow_now_ms() < until) {
        net_link_progress(a->link);
        net_link_progress(b->link);
    }
    assert_int_equal(*n, wanted);
}

static void say_hello(struct side *from, struct side *to)
{
    struct tow_err err = {0};
    size_t n;
    const void *address = net_link_address(to->link, &n);
    assert_int_equal(net_ep_open(from->link, address, n, NULL, &from->ep, &err), 0);
    assert_int_equal(net_ep_send(from->ep, "hello", 5), 0);
    run_until(&to->n_heard, 1, from, to);
}

/* s closes its endpoint; what it has begun ends before that does. */
static void close_ends_all(struct side *s, const char *what)
{
    net_ep_close(s->ep, on_closed, s);
    uint64_t until = tow_now_ms() + test_limit_ms(ENDS_WITHIN_MS);
    while ((!s->closed || s->n_ended < s->n_begun) && tow_now_ms() < until)
        net_link_progress(s->link);
    if (!s->closed || s->n_ended < s->n_begun)
        fail_msg("%s: %u of %u ended, endpoint %s", what, s->n_ended, s->n_begun,
                 s->closed ? "closed" : "still closing");
    struct net_link_stats stats;
    net_link_stats(s->link, &stats);
    assert_int_equal(stats.ops, 0);
    assert_int_equal(stats.eps, 0);
}

/* b takes the first n_taken of a's BULKS messages, and `turns` turns later it stands still while a
 * closes; then b goes on and closes too. */
static void close_with(const char *tls, unsigned n_taken, unsigned turns)
{
    struct side a = {0}, b = {0};
    char what[80];
    snprintf(what, sizeof what, "%s, %u taken, %u turns", tls ? tls : "any transport", n_taken,
             turns);
    net_link_setup();
    if (tls)
        setenv("UCX_TLS", tls, 1);
    else
        unsetenv("UCX_TLS");
    side_open(&a);
    side_open(&b);
    memset(place(&a, 0), 7, (size_t)BULKS * BULK);
    say_hello(&a, &b);
    say_hello(&b, &a);
    for (size_t i = 0; i < BULKS; i++, a.n_begun++)
        assert_int_equal(net_ep_send_bulk(a.ep, "head", 4, place(&a, i), BULK, on_ended, &a), 0);
    run_until(&b.n_bulks, BULKS, &a, &b);
    for (size_t i = 0; i < n_taken; i++, b.n_begun++)
        assert_int_equal(net_bulk_take(b.bulks[i], place(&b, i), on_ended, &b), 0);
    for (unsigned i = 0; i < turns; i++) {
        net_link_progress(a.link);
        net_link_progress(b.link);
    }
    close_ends_all(&a, what);
    assert_true(a.n_ok <= n_taken);
    for (size_t i = n_taken; i < BULKS; i++) net_bulk_refuse(b.bulks[i]);
    close_ends_all(&b, what);
    if (b.n_ok == n_taken)
        for (size_t i = 0; i < n_taken * (size_t)BULK; i++) assert_int_equal(place(&b, 0)[i], 7);
    net_link_free(a.link);
    net_link_free(b.link);
    unsetenv("UCX_TLS");
}

static void test_net_link__close_ends_bulks_nobody_takes(void **state)
{
    (void)state;
    close_with("tcp", 0, 0);
    close_with(NULL, 0, 0);
}

static void test_net_link__close_ends_bulks_on_their_way(void **state)
{
    (void)state;
    for (unsigned taken = 1; taken <= BULKS; taken += 3)
        for (unsigned turns = 0; turns <= 8; turns += 2) close_with("tcp", taken, turns);
    close_with(NULL, 3, 1);
}

int main(void)
{
    /* An operator may want it, and where it is (UCX 1.16 and later) it keeps what is not named. */
    setenv("UCX_RCACHE_ENABLE", "try", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_net_link__close_ends_bulks_nobody_takes),
        cmocka_unit_test(test_net_link__close_ends_bulks_on_their_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
