/* Liveness: every state, and the same answer however late the ticks come. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/net/peer.h"

#include <string.h>

static const struct net_peer_hello ours = {"router", 7, 1, 3, 0x5};

static void hello(struct net_peer *p, uint64_t now)
{
    struct net_peer_hello h = {"p0", 42, 2, 9, 0x6};
    net_peer_init(p, 1000, 5000, now);
    assert_int_equal(net_peer_hello(p, &h, &ours, now, NULL), 0);
}

static void test_net_peer__hello_agrees_on_version_and_features(void **state)
{
    (void)state;
    struct net_peer p;
    hello(&p, 100);
    assert_int_equal(p.state, NET_PEER_LIVE);
    assert_int_equal(p.version, 3);
    assert_int_equal(p.features, 0x4);
    assert_string_equal(p.name, "p0");
    struct net_peer_hello h = {"p0", 42, 2, 9, 0};
    assert_int_equal(net_peer_hello(&p, &h, &ours, 100, NULL), TOW_EWIRE);
}

static void test_net_peer__hello_that_cannot_be_is_refused(void **state)
{
    (void)state;
    struct tow_err err = {0};
    struct net_peer p;
    net_peer_init(&p, 1000, 5000, 0);
    struct net_peer_hello h = {"p0", 42, 4, 9, 0};
    assert_int_equal(net_peer_hello(&p, &h, &ours, 1, &err), TOW_EMISMATCH);
    assert_non_null(strstr(err.msg, "1 to 3"));
    assert_non_null(strstr(err.msg, "4 to 9"));
    h = (struct net_peer_hello){"p 0", 42, 1, 1, 0};
    assert_int_equal(net_peer_hello(&p, &h, &ours, 1, &err), TOW_EINVAL);
    h = (struct net_peer_hello){"p0", 0, 1, 1, 0};
    assert_int_equal(net_peer_hello(&p, &h, &ours, 1, &err), TOW_EINVAL);
    assert_int_equal(p.state, NET_PEER_NEW);
    assert_int_equal(net_peer_tick(&p, 4999), NET_PEER_SAME);
    assert_int_equal(net_peer_tick(&p, 5000), NET_PEER_BECAME_DEAD);
}

/* One limit for names, here, on the wire and in the mover. */
static void test_net_peer__names_of_63_and_64_bytes_fit_65_do_not(void **state)
{
    (void)state;
    char name[66];
    memset(name, 'n', sizeof name);
    for (size_t n = 63; n <= 65; n++) {
        struct net_peer p;
        name[n] = '\0';
        net_peer_init(&p, 1000, 5000, 0);
        struct net_peer_hello h = {name, 42, 1, 1, 0};
        assert_int_equal(net_peer_hello(&p, &h, &ours, 1, NULL), n <= 64 ? 0 : TOW_EINVAL);
        assert_int_equal(net_peer_name_ok(name), n <= 64);
        if (n <= 64) assert_string_equal(p.name, name);
        name[n] = 'n';
    }
    _Static_assert(NET_PEER_NAME_MAX == WIRE_MAX_NAME, "what one takes the other can carry");
}

static void test_net_peer__missed_counts_whole_periods(void **state)
{
    (void)state;
    assert_false(net_peer_missed(1000, 100, 2, 1299));
    assert_true(net_peer_missed(1000, 100, 2, 1300));
    assert_true(net_peer_missed(1000, 100, NET_PEER_DEAD_AFTER, 1600));
}

static void test_net_peer__silence_is_suspect_then_dead_and_dead_is_final(void **state)
{
    (void)state;
    struct net_peer p;
    hello(&p, 1000);
    assert_int_equal(net_peer_next_ms(&p), 4000);
    assert_int_equal(net_peer_tick(&p, 3999), NET_PEER_SAME);
    assert_int_equal(net_peer_tick(&p, 4000), NET_PEER_BECAME_SUSPECT);
    assert_int_equal(net_peer_tick(&p, 4500), NET_PEER_SAME);
    assert_int_equal(net_peer_heard(&p, 4600), NET_PEER_BECAME_LIVE);
    assert_int_equal(net_peer_tick(&p, 7600), NET_PEER_BECAME_SUSPECT);
    assert_int_equal(net_peer_next_ms(&p), 10600);
    assert_int_equal(net_peer_tick(&p, 10600), NET_PEER_BECAME_DEAD);
    assert_int_equal(net_peer_heard(&p, 10601), NET_PEER_SAME);
    assert_int_equal(net_peer_closed(&p), NET_PEER_SAME);
    assert_int_equal(p.state, NET_PEER_DEAD);
    assert_true(net_peer_next_ms(&p) == UINT64_MAX);
}

static void test_net_peer__one_late_tick_says_what_many_would(void **state)
{
    (void)state;
    struct net_peer p;
    hello(&p, 0);
    assert_int_equal(net_peer_tick(&p, 60000), NET_PEER_BECAME_DEAD);
    hello(&p, 0);
    assert_int_equal(net_peer_closed(&p), NET_PEER_BECAME_DEAD);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_net_peer__names_of_63_and_64_bytes_fit_65_do_not),
        cmocka_unit_test(test_net_peer__missed_counts_whole_periods),
        cmocka_unit_test(test_net_peer__hello_agrees_on_version_and_features),
        cmocka_unit_test(test_net_peer__hello_that_cannot_be_is_refused),
        cmocka_unit_test(test_net_peer__silence_is_suspect_then_dead_and_dead_is_final),
        cmocka_unit_test(test_net_peer__one_late_tick_says_what_many_would),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
