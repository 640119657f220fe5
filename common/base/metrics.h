/* base/metrics.h - counters, gauges and histograms, printed as Prometheus text.
 *
 * Why      Every queue, buffer and wait has a limit and a metric; updating one must cost nothing.
 * Rules    Names are given without the "towpath_" prefix, in base units ("queue_wait_seconds");
 *          a counter's name ends in _total. Label values are fixed at registration and never come
 *          from a client. Register at start, keep the handle, update through it.
 * Errors   Registration always returns a usable handle. What is wrong (bad name, one name with two
 *          types or help texts, too many series) is kept; main asks once with tow_metrics_check().
 * Threads  Updates are [any thread] and lock-free. Registration and printing take the registry's
 *          lock.
 */
#ifndef TOW_BASE_METRICS_H
#define TOW_BASE_METRICS_H

#include <stddef.h>
#include <stdint.h>

struct tow_buf;
struct tow_err;
struct tow_metrics;
struct tow_counter; /* borrowed from the registry, as long as it lives */
struct tow_gauge;
struct tow_histogram;

int tow_metrics_new(struct tow_metrics **out, struct tow_err *err);
void tow_metrics_free(struct tow_metrics *m); /* NULL is fine; no update may follow */

/* labels: NULL, or {"name", "value", ..., NULL}; copied. The same name and labels again give the
 * same handle. At most 4096 series in one registry. */
struct tow_counter *tow_counter(struct tow_metrics *m, const char *name, const char *help,
                                const char *const *labels);
struct tow_gauge *tow_gauge(struct tow_metrics *m, const char *name, const char *help,
                            const char *const *labels);
/* bounds: n_bounds (1 to 64) rising finite upper bounds; the +Inf bucket is added. */
struct tow_histogram *tow_histogram(struct tow_metrics *m, const char *name, const char *help,
                                    const char *const *labels, const double *bounds,
                                    size_t n_bounds);
/* 1 ms to about 2 minutes, by doubling: for waits and durations in seconds. */
#define TOW_SECONDS_BOUNDS                                                                         \
    ((const double[]){0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, \
                      2.048, 4.096, 8.192, 16.384, 32.768, 65.536, 131.072})
#define TOW_N_SECONDS_BOUNDS 18

/* 0, or the first registration that was wrong. */
int tow_metrics_check(struct tow_metrics *m, struct tow_err *err);

/* [any thread] */
void tow_counter_add(struct tow_counter *c, uint64_t n);
/* Brings it up to a total that is counted elsewhere, never down. By one thread only. */
void tow_counter_follow(struct tow_counter *c, uint64_t total);
uint64_t tow_counter_value(const struct tow_counter *c);
void tow_gauge_set(struct tow_gauge *g, double value);
void tow_gauge_add(struct tow_gauge *g, double delta);
double tow_gauge_value(const struct tow_gauge *g);
void tow_histogram_observe(struct tow_histogram *h, double value); /* NaN is not counted */
uint64_t tow_histogram_count(const struct tow_histogram *h);
double tow_histogram_sum(const struct tow_histogram *h);

/* Called at the start of each print, on the printing thread, to set gauges that are cheaper to
 * compute than to keep. At most 16. arg is borrowed as long as the registry lives. */
typedef void (*tow_metrics_collect)(void *arg);
void tow_metrics_on_print(struct tow_metrics *m, tow_metrics_collect collect, void *arg);

/* Appends the whole text (Content-Type: text/plain; version=0.0.4; charset=utf-8). */
void tow_metrics_print(struct tow_metrics *m, struct tow_buf *out);

#endif
