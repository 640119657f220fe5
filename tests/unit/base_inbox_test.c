/* Tests of common/base/inbox.h. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/base/inbox.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>

static void count_wake(void *arg)
{
    ++*(int *)arg;
}

static void test_tow_inbox__post_to_a_full_one_is_refused_and_counted(void **state)
{
    (void)state;
    struct tow_inbox *in;
    uint64_t v = 7;
    assert_int_equal(tow_inbox_new(&in, 4, sizeof v, NULL, NULL, NULL), 0);
    for (v = 0; v < 4; v++) assert_int_equal(tow_inbox_post(in, &v), 0);
    assert_int_equal(tow_inbox_post(in, &v), TOW_EFULL);
    assert_int_equal(tow_inbox_refused(in), 1);
    assert_int_equal(tow_inbox_count(in), 4);
    assert_int_equal(tow_inbox_take(in, &v), 1);
    assert_int_equal(v, 0);
    v = 4;
    assert_int_equal(tow_inbox_post(in, &v), 0);
    for (uint64_t want = 1; want <= 4; want++) {
        assert_int_equal(tow_inbox_take(in, &v), 1);
        assert_int_equal(v, want);
    }
    assert_int_equal(tow_inbox_take(in, &v), 0);
    tow_inbox_free(in);
}

static void test_tow_inbox__smallest_capacity_still_keeps_order_over_many_laps(void **state)
{
    (void)state;
    struct tow_inbox *in;
    uint32_t v;
    assert_int_equal(tow_inbox_new(&in, 1, sizeof v, NULL, NULL, NULL), 0);
    for (uint32_t i = 0; i < 1000; i++) {
        assert_int_equal(tow_inbox_post(in, &i), 0);
        assert_int_equal(tow_inbox_take(in, &v), 1);
        assert_int_equal(v, i);
    }
    tow_inbox_free(in);
}

static void test_tow_inbox__sizes_out_of_range_are_refused(void **state)
{
    (void)state;
    struct tow_inbox *in = NULL;
    struct tow_err err;
    assert_int_equal(tow_inbox_new(&in, 0, 8, NULL, NULL, &err), TOW_EINVAL);
    assert_int_equal(tow_inbox_new(&in, 1u << 25, 8, NULL, NULL, &err), TOW_EINVAL);
    assert_int_equal(tow_inbox_new(&in, 8, 0, NULL, NULL, &err), TOW_EINVAL);
    assert_int_equal(tow_inbox_new(&in, 8, 5000, NULL, NULL, &err), TOW_EINVAL);
    assert_null(in);
}

static void test_tow_inbox__a_burst_wakes_once_and_an_empty_one_wakes_again(void **state)
{
    (void)state;
    struct tow_inbox *in;
    int wakes = 0;
    char c = 'x';
    assert_int_equal(tow_inbox_new(&in, 8, 1, count_wake, &wakes, NULL), 0);
    tow_inbox_post(in, &c);
    tow_inbox_post(in, &c);
    assert_int_equal(wakes, 1);
    while (tow_inbox_take(in, &c)) {
    }
    tow_inbox_post(in, &c);
    assert_int_equal(wakes, 2);
    tow_inbox_free(in);
}

static void add_event(void *arg, const void *event)
{
    *(int *)arg += *(const int *)event;
}

static void test_tow_inbox__drain_that_stops_early_wakes_for_the_rest(void **state)
{
    (void)state;
    struct tow_inbox *in;
    int wakes = 0, sum = 0;
    assert_int_equal(tow_inbox_new(&in, 8, sizeof(int), count_wake, &wakes, NULL), 0);
    for (int i = 1; i <= 5; i++) tow_inbox_post(in, &i);
    assert_int_equal(tow_inbox_drain(in, 3, add_event, &sum), 3);
    assert_int_equal(sum, 6);
    assert_int_equal(wakes, 2);
    assert_int_equal(tow_inbox_drain(in, 2, add_event, &sum), 2);
    assert_int_equal(wakes, 2); /* nothing was left */
    int more = 1;
    tow_inbox_post(in, &more);
    assert_int_equal(wakes, 3); /* though the owner never saw it empty */
    assert_int_equal(tow_inbox_drain(in, 9, add_event, &sum), 1);
    assert_int_equal(sum, 16);
    tow_inbox_free(in);
}

enum { POSTERS = 4, EACH = 20000 };

struct event {
    uint32_t poster, seq;
    uint64_t check;
};
struct shared {
    struct tow_inbox *in;
    sem_t awake;
    uint32_t poster;
};

static void sem_wake(void *arg)
{
    sem_post(arg);
}

static void *post_many(void *arg)
{
    struct shared *s = arg;
    for (uint32_t i = 0; i < EACH; i++) {
        struct event e = {s->poster, i, ~(uint64_t)i};
        while (tow_inbox_post(s->in, &e) == TOW_EFULL) sched_yield();
    }
    return NULL;
}

/* The owner sleeps on the semaphore alone: one lost wake and this test never ends. */
static void test_tow_inbox__many_posters_lose_nothing_and_keep_their_order(void **state)
{
    (void)state;
    struct shared s[POSTERS];
    pthread_t threads[POSTERS];
    uint32_t next[POSTERS] = {0}, total = 0;
    struct tow_inbox *in;
    sem_t awake;
    sem_init(&awake, 0, 0);
    assert_int_equal(tow_inbox_new(&in, 64, sizeof(struct event), sem_wake, &awake, NULL), 0);
    for (uint32_t i = 0; i < POSTERS; i++) {
        s[i].in = in;
        s[i].poster = i;
        assert_int_equal(pthread_create(&threads[i], NULL, post_many, &s[i]), 0);
    }
    while (total < POSTERS * EACH) {
        struct event e;
        sem_wait(&awake);
        while (tow_inbox_take(in, &e)) {
            assert_true(e.poster < POSTERS);
            assert_int_equal(e.seq, next[e.poster]++);
            assert_int_equal(e.check, ~(uint64_t)e.seq);
            total++;
        }
    }
    for (int i = 0; i < POSTERS; i++) pthread_join(threads[i], NULL);
    assert_int_equal(tow_inbox_count(in), 0);
    tow_inbox_free(in);
    sem_destroy(&awake);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tow_inbox__post_to_a_full_one_is_refused_and_counted),
        cmocka_unit_test(test_tow_inbox__smallest_capacity_still_keeps_order_over_many_laps),
        cmocka_unit_test(test_tow_inbox__sizes_out_of_range_are_refused),
        cmocka_unit_test(test_tow_inbox__a_burst_wakes_once_and_an_empty_one_wakes_again),
        cmocka_unit_test(test_tow_inbox__drain_that_stops_early_wakes_for_the_rest),
        cmocka_unit_test(test_tow_inbox__many_posters_lose_nothing_and_keep_their_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
