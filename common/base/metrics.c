/* base/metrics.c - families in order of registration, each with its series; a series is its printed
 * label text and a few atomics.
 *
 * Labels are escaped once, at registration, so printing only copies. Doubles live in 64-bit atomics
 * as their bits. A histogram's buckets are counted separately and summed up while printing, so
 * `_count` is always the sum of the buckets printed with it. Failed registrations share one series
 * per type that is never printed: callers need no check of their own.
 */
#include "common/base/metrics.h"

#include "common/base/buf.h"
#include "common/base/err.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_SERIES = 4096,
    MAX_BOUNDS = 64,
    MAX_COLLECT = 16,
    MAX_LABELS = 8,
    MAX_LABEL_TEXT = 1024
};
enum kind { COUNTER, GAUGE, HISTOGRAM };
static const char *const kind_names[] = {"counter", "gauge", "histogram"};

struct tow_counter {
    _Atomic uint64_t value;
};
struct tow_gauge {
    _Atomic uint64_t bits;
};
struct tow_histogram {
    size_t n_bounds;
    double bounds[MAX_BOUNDS];
    _Atomic uint64_t buckets[MAX_BOUNDS + 1]; /* not cumulative; the last is +Inf */
    _Atomic uint64_t sum_bits;
};

struct series {
    struct series *next; /* owned */
    char *labels;        /* owned; `a="x",b="y"`, or "" */
    union {
        struct tow_counter counter;
        struct tow_gauge gauge;
        struct tow_histogram histogram; /* allocated only as far as the kind needs */
    } u;
};

struct family {
    struct family *next; /* owned */
    char *name;          /* owned; without the prefix */
    char *help;          /* owned; as given */
    enum kind kind;
    struct series *first, **last;
};

struct tow_metrics {
    pthread_mutex_t lock;
    struct family *first, **last;
    size_t n_series, n_collect;
    struct {
        tow_metrics_collect fn;
        void *arg;
    } collect[MAX_COLLECT];
    struct tow_err wrong; /* the first registration that failed */
    struct series nowhere[3];
};

int tow_metrics_new(struct tow_metrics **out, struct tow_err *err)
{
    struct tow_metrics *m = calloc(1, sizeof *m);
    if (!m) return tow_fail(err, TOW_ENOMEM, "metrics: out of memory");
    pthread_mutex_init(&m->lock, NULL);
    m->last = &m->first;
    m->nowhere[HISTOGRAM].u.histogram.n_bounds = 1;
    *out = m;
    return 0;
}

void tow_metrics_free(struct tow_metrics *m)
{
    if (!m) return;
    for (struct family *f = m->first, *next_f; f; f = next_f) {
        next_f = f->next;
        for (struct series *s = f->first, *next_s; s; s = next_s) {
            next_s = s->next;
            free(s->labels);
            free(s);
        }
        free(f->name);
        free(f->help);
        free(f);
    }
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* [a-z_][a-z0-9_]*: narrower than Prometheus allows, and all that we use. */
static bool name_ok(const char *s)
{
    if (!s || !((*s >= 'a' && *s <= 'z') || *s == '_')) return false;
    for (; *s; s++)
        if (!((*s >= 'a' && *s <= 'z') || (*s >= '0' && *s <= '9') || *s == '_')) return false;
    return true;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && !strcmp(s + n - k, end);
}

/* Prometheus escapes \ and line ends everywhere, quotes in label values only. */
static void put_escaped(struct tow_buf *b, const char *s, bool quotes)
{
    for (; *s; s++) {
        if (*s == '\n') {
            tow_buf_puts(b, "\\n");
        } else {
            if (*s == '\\' || (quotes && *s == '"')) tow_buf_putc(b, '\\');
            tow_buf_putc(b, *s);
        }
    }
}

static int labels_text(const char *const *labels, enum kind kind, struct tow_buf *b)
{
    for (size_t i = 0; labels && labels[i]; i += 2) {
        if (i / 2 == MAX_LABELS || !name_ok(labels[i]) || !labels[i + 1]) return TOW_EINVAL;
        if (kind == HISTOGRAM && !strcmp(labels[i], "le")) return TOW_EINVAL;
        for (size_t k = 0; k < i; k += 2)
            if (!strcmp(labels[k], labels[i])) return TOW_EINVAL;
        if (i) tow_buf_putc(b, ',');
        tow_buf_printf(b, "%s=\"", labels[i]);
        put_escaped(b, labels[i + 1], true);
        tow_buf_putc(b, '"');
    }
    return tow_buf_failed(b) ? TOW_ETOOBIG : 0;
}

static int name_check(const char *name, const char *help, enum kind kind, struct tow_err *err)
{
    if (!name_ok(name) || !help || !*help)
        return tow_fail(err, TOW_EINVAL, "metric '%s': needs a name of a-z, 0-9, _ and a help text",
                        name ? name : "");
    if ((kind == COUNTER) != ends_with(name, "_total"))
        return tow_fail(err, TOW_EINVAL, "metric '%s': counters, and only they, end in _total",
                        name);
    if (ends_with(name, "_bucket") || ends_with(name, "_sum") || ends_with(name, "_count"))
        return tow_fail(err, TOW_EINVAL, "metric '%s': _bucket, _sum, _count belong to histograms",
                        name);
    return 0;
}

static struct family *find_family(struct tow_metrics *m, const char *name)
{
    for (struct family *f = m->first; f; f = f->next)
        if (!strcmp(f->name, name)) return f;
    return NULL;
}

static struct family *add_family(struct tow_metrics *m, const char *name, const char *help,
                                 enum kind kind)
{
    struct family *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->name = strdup(name);
    f->help = strdup(help);
    if (!f->name || !f->help) {
        free(f->name);
        free(f->help);
        free(f);
        return NULL;
    }
    f->kind = kind;
    f->last = &f->first;
    *m->last = f;
    m->last = &f->next;
    return f;
}

static struct series *add_series(struct tow_metrics *m, struct family *f, const char *labels)
{
    static const size_t bytes[] = {
        offsetof(struct series, u) + sizeof(struct tow_counter),
        offsetof(struct series, u) + sizeof(struct tow_gauge),
        sizeof(struct series),
    };
    struct series *s = calloc(1, bytes[f->kind]);
    if (!s) return NULL;
    s->labels = strdup(labels);
    if (!s->labels) {
        free(s);
        return NULL;
    }
    *f->last = s;
    f->last = &s->next;
    m->n_series++;
    return s;
}

/* Finds or adds the series; the lock is held. bounds NULL unless a histogram. */
static int place_series(struct tow_metrics *m, enum kind kind, const char *name, const char *help,
                        const char *labels, const double *bounds, size_t n_bounds,
                        struct series **out, struct tow_err *err)
{
    struct family *f = find_family(m, name);
    if (f && (f->kind != kind || strcmp(f->help, help) != 0))
        return tow_fail(err, TOW_EINVAL, "metric '%s': registered before as another %s", name,
                        f->kind != kind ? "type" : "help text");
    for (struct series *s = f ? f->first : NULL; s; s = s->next) {
        if (kind == HISTOGRAM &&
            (s->u.histogram.n_bounds != n_bounds ||
             memcmp(s->u.histogram.bounds, bounds, n_bounds * sizeof *bounds) != 0))
            return tow_fail(err, TOW_EINVAL, "metric '%s': registered before with other bounds",
                            name);
        if (!strcmp(s->labels, labels)) {
            *out = s;
            return 0;
        }
    }
    if (m->n_series == MAX_SERIES)
        return tow_fail(err, TOW_EFULL, "metric '%s': %d series are registered already", name,
                        MAX_SERIES);
    if (!f) f = add_family(m, name, help, kind);
    struct series *s = f ? add_series(m, f, labels) : NULL;
    if (!s) return tow_fail(err, TOW_ENOMEM, "metric '%s': out of memory", name);
    if (kind == HISTOGRAM) {
        s->u.histogram.n_bounds = n_bounds;
        memcpy(s->u.histogram.bounds, bounds, n_bounds * sizeof *bounds);
    }
    *out = s;
    return 0;
}

static struct series *get_series(struct tow_metrics *m, enum kind kind, const char *name,
                                 const char *help, const char *const *labels, const double *bounds,
                                 size_t n_bounds)
{
    struct series *s = &m->nowhere[kind];
    struct tow_err err = {0};
    struct tow_buf text;
    tow_buf_init(&text, MAX_LABEL_TEXT);
    tow_buf_puts(&text, "");
    int rc = name_check(name, help, kind, &err);
    if (rc == 0 && labels_text(labels, kind, &text) < 0)
        rc = tow_fail(&err, TOW_EINVAL,
                      "metric '%s': labels must be at most %d different names with values, in %d "
                      "bytes",
                      name, MAX_LABELS, MAX_LABEL_TEXT);
    pthread_mutex_lock(&m->lock);
    if (rc == 0)
        rc = place_series(m, kind, name, help, text.data ? text.data : "", bounds, n_bounds, &s,
                          &err);
    if (rc < 0 && m->wrong.code == 0) m->wrong = err;
    pthread_mutex_unlock(&m->lock);
    tow_buf_fini(&text);
    return s;
}

struct tow_counter *tow_counter(struct tow_metrics *m, const char *name, const char *help,
                                const char *const *labels)
{
    return &get_series(m, COUNTER, name, help, labels, NULL, 0)->u.counter;
}

struct tow_gauge *tow_gauge(struct tow_metrics *m, const char *name, const char *help,
                            const char *const *labels)
{
    return &get_series(m, GAUGE, name, help, labels, NULL, 0)->u.gauge;
}

struct tow_histogram *tow_histogram(struct tow_metrics *m, const char *name, const char *help,
                                    const char *const *labels, const double *bounds,
                                    size_t n_bounds)
{
    bool ok = n_bounds >= 1 && n_bounds <= MAX_BOUNDS;
    for (size_t i = 0; ok && i < n_bounds; i++)
        ok = isfinite(bounds[i]) && (i == 0 || bounds[i] > bounds[i - 1]);
    if (!ok) {
        pthread_mutex_lock(&m->lock);
        if (m->wrong.code == 0)
            tow_fail(&m->wrong, TOW_EINVAL, "metric '%s': needs 1 to %d rising finite bounds",
                     name ? name : "", MAX_BOUNDS);
        pthread_mutex_unlock(&m->lock);
        return &m->nowhere[HISTOGRAM].u.histogram;
    }
    return &get_series(m, HISTOGRAM, name, help, labels, bounds, n_bounds)->u.histogram;
}

int tow_metrics_check(struct tow_metrics *m, struct tow_err *err)
{
    pthread_mutex_lock(&m->lock);
    int rc = m->wrong.code;
    if (rc < 0 && err) *err = m->wrong;
    pthread_mutex_unlock(&m->lock);
    return rc;
}

static double from_bits(uint64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static uint64_t to_bits(double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static void add_double(_Atomic uint64_t *at, double delta)
{
    uint64_t was = atomic_load_explicit(at, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(at, &was, to_bits(from_bits(was) + delta),
                                                  memory_order_relaxed, memory_order_relaxed)) {
    }
}

void tow_counter_add(struct tow_counter *c, uint64_t n)
{
    atomic_fetch_add_explicit(&c->value, n, memory_order_relaxed);
}

void tow_counter_follow(struct tow_counter *c, uint64_t total)
{
    uint64_t had = tow_counter_value(c);
    if (total > had) tow_counter_add(c, total - had);
}

uint64_t tow_counter_value(const struct tow_counter *c)
{
    return atomic_load_explicit(&c->value, memory_order_relaxed);
}

void tow_gauge_set(struct tow_gauge *g, double value)
{
    atomic_store_explicit(&g->bits, to_bits(value), memory_order_relaxed);
}

void tow_gauge_add(struct tow_gauge *g, double delta)
{
    add_double(&g->bits, delta);
}

double tow_gauge_value(const struct tow_gauge *g)
{
    return from_bits(atomic_load_explicit(&g->bits, memory_order_relaxed));
}

void tow_histogram_observe(struct tow_histogram *h, double value)
{
    if (isnan(value)) return;
    size_t i = 0;
    while (i < h->n_bounds && value > h->bounds[i]) i++;
    atomic_fetch_add_explicit(&h->buckets[i], 1, memory_order_relaxed);
    add_double(&h->sum_bits, value);
}

uint64_t tow_histogram_count(const struct tow_histogram *h)
{
    uint64_t n = 0;
    for (size_t i = 0; i <= h->n_bounds; i++)
        n += atomic_load_explicit(&h->buckets[i], memory_order_relaxed);
    return n;
}

double tow_histogram_sum(const struct tow_histogram *h)
{
    return from_bits(atomic_load_explicit(&h->sum_bits, memory_order_relaxed));
}

void tow_metrics_on_print(struct tow_metrics *m, tow_metrics_collect collect, void *arg)
{
    pthread_mutex_lock(&m->lock);
    tow_assert(m->n_collect < MAX_COLLECT);
    m->collect[m->n_collect].fn = collect;
    m->collect[m->n_collect++].arg = arg;
    pthread_mutex_unlock(&m->lock);
}

/* The shortest text that reads back as the same double. */
static void put_double(struct tow_buf *out, double v)
{
    if (isnan(v)) {
        tow_buf_puts(out, "NaN");
    } else if (isinf(v)) {
        tow_buf_puts(out, v > 0 ? "+Inf" : "-Inf");
    } else {
        char s[32];
        for (int digits = 15; digits <= 17; digits++) {
            snprintf(s, sizeof s, "%.*g", digits, v);
            if (strtod(s, NULL) == v) break;
        }
        tow_buf_puts(out, s);
    }
}

/* towpath_NAME[SUFFIX]{labels[,le="..."]} and a space */
static void put_head(struct tow_buf *out, const struct family *f, const struct series *s,
                     const char *suffix, const double *le)
{
    tow_buf_printf(out, "towpath_%s%s", f->name, suffix);
    if (*s->labels || le) {
        tow_buf_putc(out, '{');
        tow_buf_puts(out, s->labels);
        if (le) {
            tow_buf_puts(out, *s->labels ? ",le=\"" : "le=\"");
            put_double(out, *le);
            tow_buf_putc(out, '"');
        }
        tow_buf_putc(out, '}');
    }
    tow_buf_putc(out, ' ');
}

static void put_histogram(struct tow_buf *out, const struct family *f, const struct series *s)
{
    const struct tow_histogram *h = &s->u.histogram;
    uint64_t below = 0;
    for (size_t i = 0; i <= h->n_bounds; i++) {
        double le = i < h->n_bounds ? h->bounds[i] : INFINITY;
        below += atomic_load_explicit(&h->buckets[i], memory_order_relaxed);
        put_head(out, f, s, "_bucket", &le);
        tow_buf_printf(out, "%llu\n", (unsigned long long)below);
    }
    put_head(out, f, s, "_sum", NULL);
    put_double(out, tow_histogram_sum(h));
    tow_buf_putc(out, '\n');
    put_head(out, f, s, "_count", NULL);
    tow_buf_printf(out, "%llu\n", (unsigned long long)below);
}

void tow_metrics_print(struct tow_metrics *m, struct tow_buf *out)
{
    /* Collectors may register, so the lock is not held around them; they are only ever added. */
    pthread_mutex_lock(&m->lock);
    size_t n = m->n_collect;
    pthread_mutex_unlock(&m->lock);
    for (size_t i = 0; i < n; i++) m->collect[i].fn(m->collect[i].arg);

    pthread_mutex_lock(&m->lock);
    for (const struct family *f = m->first; f; f = f->next) {
        tow_buf_printf(out, "# HELP towpath_%s ", f->name);
        put_escaped(out, f->help, false);
        tow_buf_printf(out, "\n# TYPE towpath_%s %s\n", f->name, kind_names[f->kind]);
        for (const struct series *s = f->first; s; s = s->next) {
            if (f->kind == HISTOGRAM) {
                put_histogram(out, f, s);
                continue;
            }
            put_head(out, f, s, "", NULL);
            if (f->kind == COUNTER)
                tow_buf_printf(out, "%llu", (unsigned long long)tow_counter_value(&s->u.counter));
            else
                put_double(out, tow_gauge_value(&s->u.gauge));
            tow_buf_putc(out, '\n');
        }
    }
    pthread_mutex_unlock(&m->lock);
}
