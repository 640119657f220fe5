/* Tests of common/base/metrics.h. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/metrics.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *print(struct tow_metrics *m)
{
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_metrics_print(m, &b);
    return tow_buf_take(&b);
}

static void test_tow_metrics__counter_follows_a_total_and_never_falls(void **state)
{
    (void)state;
    struct tow_metrics *m;
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    struct tow_counter *c = tow_counter(m, "chunks_total", "chunks", NULL);
    tow_counter_follow(c, 5);
    tow_counter_follow(c, 5);
    assert_int_equal(tow_counter_value(c), 5);
    tow_counter_follow(c, 3); /* the other side began anew */
    assert_int_equal(tow_counter_value(c), 5);
    tow_counter_follow(c, 9);
    assert_int_equal(tow_counter_value(c), 9);
    tow_metrics_free(m);
}

static void test_tow_metrics__print_groups_families_and_escapes(void **state)
{
    (void)state;
    struct tow_metrics *m;
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    const char *const full[] = {"reason", "queue \"full\"\\\n", NULL};
    const char *const late[] = {"reason", "late", NULL};
    const char *const get[] = {"method", "get", NULL};
    const double bounds[] = {0.1, 2};
    struct tow_counter *c = tow_counter(m, "refusals_total", "requests\nrefused \\ \"so\"", full);
    struct tow_gauge *g = tow_gauge(m, "pages_free", "free pages", NULL);
    tow_counter_add(tow_counter(m, "refusals_total", "requests\nrefused \\ \"so\"", late), 2);
    struct tow_histogram *h = tow_histogram(m, "wait_seconds", "wait", get, bounds, 2);
    tow_counter_add(c, 3);
    tow_gauge_set(g, 0.1);
    tow_gauge_add(g, 0.2);
    tow_histogram_observe(h, 0.1);
    tow_histogram_observe(h, 0.5);
    tow_histogram_observe(h, 7);
    tow_histogram_observe(h, NAN);
    char *s = print(m);
    assert_string_equal(s, "# HELP towpath_refusals_total requests\\nrefused \\\\ \"so\"\n"
                           "# TYPE towpath_refusals_total counter\n"
                           "towpath_refusals_total{reason=\"queue \\\"full\\\"\\\\\\n\"} 3\n"
                           "towpath_refusals_total{reason=\"late\"} 2\n"
                           "# HELP towpath_pages_free free pages\n"
                           "# TYPE towpath_pages_free gauge\n"
                           "towpath_pages_free 0.30000000000000004\n"
                           "# HELP towpath_wait_seconds wait\n"
                           "# TYPE towpath_wait_seconds histogram\n"
                           "towpath_wait_seconds_bucket{method=\"get\",le=\"0.1\"} 1\n"
                           "towpath_wait_seconds_bucket{method=\"get\",le=\"2\"} 2\n"
                           "towpath_wait_seconds_bucket{method=\"get\",le=\"+Inf\"} 3\n"
                           "towpath_wait_seconds_sum{method=\"get\"} 7.6\n"
                           "towpath_wait_seconds_count{method=\"get\"} 3\n");
    free(s);
    assert_int_equal(tow_metrics_check(m, NULL), 0);
    assert_int_equal(tow_histogram_count(h), 3);
    tow_metrics_free(m);
}

static void test_tow_metrics__same_name_and_labels_give_the_same_handle(void **state)
{
    (void)state;
    struct tow_metrics *m;
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    const char *const a[] = {"role", "prefill", NULL}, *const b[] = {"role", "decode", NULL};
    assert_ptr_equal(tow_gauge(m, "workers", "w", a), tow_gauge(m, "workers", "w", a));
    assert_ptr_not_equal(tow_gauge(m, "workers", "w", a), tow_gauge(m, "workers", "w", b));
    tow_metrics_free(m);
}

static void refused(const char *name, const char *help, const char *const *labels, int kind,
                    const char *part)
{
    struct tow_metrics *m;
    struct tow_err err = {0};
    const double bounds[] = {1, 1};
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    if (kind == 0) tow_counter_add(tow_counter(m, name, help, labels), 1);
    if (kind == 1) tow_gauge_set(tow_gauge(m, name, help, labels), 1);
    if (kind == 2) tow_histogram_observe(tow_histogram(m, name, help, labels, bounds, 1), 5);
    if (kind == 3) tow_histogram_observe(tow_histogram(m, name, help, labels, bounds, 2), 5);
    assert_int_equal(tow_metrics_check(m, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, part));
    char *s = print(m);
    assert_string_equal(s, "");
    free(s);
    tow_metrics_free(m);
}

static void test_tow_metrics__bad_registrations_are_named_and_harmless(void **state)
{
    (void)state;
    const char *const bad_name[] = {"a-b", "x", NULL}, *const twice[] = {"a", "x", "a", "y", NULL};
    const char *const le[] = {"le", "1", NULL};
    refused("tokens", "h", NULL, 0, "_total");
    refused("tokens_total", "h", NULL, 1, "_total");
    refused("1x", "h", NULL, 1, "name");
    refused("Xx", "h", NULL, 1, "name");
    refused("x", "", NULL, 1, "help");
    refused("x_count", "h", NULL, 1, "histograms");
    refused("x", "h", bad_name, 1, "labels");
    refused("x", "h", twice, 1, "labels");
    refused("x", "h", le, 2, "labels");
    refused("x", "h", NULL, 3, "rising");
}

static void test_tow_metrics__one_name_with_two_types_is_refused(void **state)
{
    (void)state;
    struct tow_metrics *m;
    struct tow_err err;
    const double one[] = {1}, two[] = {2};
    const char *const a[] = {"k", "a", NULL}, *const b[] = {"k", "b", NULL};
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    tow_gauge(m, "x", "h", NULL);
    tow_histogram(m, "x", "h", NULL, one, 1);
    assert_int_equal(tow_metrics_check(m, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "another type"));
    tow_metrics_free(m);
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    tow_histogram(m, "x", "h", a, one, 1);
    tow_histogram(m, "x", "h", b, two, 1);
    assert_int_equal(tow_metrics_check(m, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "bounds"));
    tow_metrics_free(m);
}

static void test_tow_metrics__series_are_bounded(void **state)
{
    (void)state;
    struct tow_metrics *m;
    struct tow_err err;
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    for (int i = 0; i <= 4096; i++) {
        char v[16];
        const char *labels[] = {"i", v, NULL};
        assert_int_equal(tow_metrics_check(m, NULL), 0);
        snprintf(v, sizeof v, "%d", i);
        tow_gauge_set(tow_gauge(m, "g", "h", labels), i);
    }
    assert_int_equal(tow_metrics_check(m, &err), TOW_EFULL);
    tow_metrics_free(m);
}

static void set_seven(void *arg)
{
    tow_gauge_set(arg, 7);
}

static void test_tow_metrics__collectors_run_before_printing(void **state)
{
    (void)state;
    struct tow_metrics *m;
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    struct tow_gauge *g = tow_gauge(m, "g", "h", NULL);
    tow_metrics_on_print(m, set_seven, g);
    char *s = print(m);
    assert_non_null(strstr(s, "towpath_g 7\n"));
    free(s);
    tow_metrics_free(m);
}

struct all {
    struct tow_counter *c;
    struct tow_gauge *g;
    struct tow_histogram *h;
};

static void *update(void *arg)
{
    struct all *a = arg;
    for (int i = 0; i < 10000; i++) {
        tow_counter_add(a->c, 1);
        tow_gauge_add(a->g, i % 2 ? -1 : 1);
        tow_histogram_observe(a->h, 0.5);
    }
    return NULL;
}

static void test_tow_metrics__updates_from_many_threads_all_count(void **state)
{
    (void)state;
    struct tow_metrics *m;
    assert_int_equal(tow_metrics_new(&m, NULL), 0);
    struct all a = {
        tow_counter(m, "c_total", "h", NULL), tow_gauge(m, "g", "h", NULL),
        tow_histogram(m, "h_seconds", "h", NULL, TOW_SECONDS_BOUNDS, TOW_N_SECONDS_BOUNDS)};
    pthread_t t[4];
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&t[i], NULL, update, &a), 0);
    free(print(m)); /* while they run */
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    assert_int_equal(tow_counter_value(a.c), 40000);
    assert_true(tow_gauge_value(a.g) == 0);
    assert_int_equal(tow_histogram_count(a.h), 40000);
    assert_true(tow_histogram_sum(a.h) == 20000);
    tow_metrics_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tow_metrics__counter_follows_a_total_and_never_falls),
        cmocka_unit_test(test_tow_metrics__print_groups_families_and_escapes),
        cmocka_unit_test(test_tow_metrics__same_name_and_labels_give_the_same_handle),
        cmocka_unit_test(test_tow_metrics__bad_registrations_are_named_and_harmless),
        cmocka_unit_test(test_tow_metrics__one_name_with_two_types_is_refused),
        cmocka_unit_test(test_tow_metrics__series_are_bounded),
        cmocka_unit_test(test_tow_metrics__collectors_run_before_printing),
        cmocka_unit_test(test_tow_metrics__updates_from_many_threads_all_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
