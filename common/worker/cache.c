/* worker/cache.c - see cache.h.
 *
 * The control thread drives the second stream; the engine thread only makes the first one wait for
 * it. Pages with neighbouring ids are one copy. Gathering the others on the device first was
 * rejected: a page of a real model is a megabyte, and copies of that size run at the link's speed
 * (docs/performance.md). A device with memory of its own makes digests on the way out, into pinned
 * host memory, or where there is none to be had into its own, from where they follow the pages. */
#include "common/worker/cache.h"

#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "kernels/dev.h"
#include "kernels/pages.h"

#include <stdatomic.h>
#include <stdlib.h>

struct work_cache {
    struct work_cache_config cfg;
    struct kern_stream *first, *second; /* borrowed from dev; owned */
    uint8_t *pages, *tails;             /* device; owned unless they are the host's */
    uint64_t *digests;                  /* owned; the host's: of pages, then of tails */
    uint64_t *made;  /* where the device writes them: there, or owned device memory */
    void *pinned[3]; /* host memory the device knows of; NULL: not so */
    uint64_t n_out;  /* number of the last copy out */
    _Atomic uint64_t landed;
    bool same; /* the host's pages and tails are the device's */
    bool warned;
};

/* Slower without, not wrong; said once. */
static void pin(struct work_cache *c, int which, void *p, size_t bytes)
{
    struct tow_err err = {0};
    const int rc = tow_fault("cache.pin") ? tow_fail(&err, TOW_ENOMEM, "injected fault")
                                          : kern_dev_pin(c->cfg.dev, p, bytes, &err);
    if (rc == 0) {
        c->pinned[which] = p;
        return;
    }
    if (!c->warned) tow_warn("%s: pages move slower: %s", c->cfg.name, err.msg);
    c->warned = true;
}

static size_t bytes_of_pages(const struct work_cache *c)
{
    return (size_t)c->cfg.n_pages * (size_t)c->cfg.layout->page_bytes;
}
static size_t bytes_of_tails(const struct work_cache *c)
{
    return (size_t)c->cfg.n_tails * (size_t)c->cfg.layout->tail_bytes;
}

static size_t bytes_of_digests(const struct work_cache *c)
{
    const size_t each = 4096,
                 n = (size_t)c->cfg.n_pages + c->cfg.n_tails; /* whole pages are pinned */
    return (n * sizeof *c->digests + each - 1) / each * each;
}

static uint32_t index_of_tail(const struct work_cache *c, const uint8_t *tail)
{
    return (uint32_t)((size_t)(tail - (const uint8_t *)c->cfg.host_tails) /
                      (size_t)c->cfg.layout->tail_bytes);
}

static int pin_all(struct work_cache *c, struct tow_err *err)
{
    pin(c, 0, c->cfg.host_pages, bytes_of_pages(c));
    pin(c, 1, c->cfg.host_tails, bytes_of_tails(c));
    pin(c, 2, c->digests, bytes_of_digests(c));
    c->made = c->pinned[2] ? c->digests : kern_dev_alloc(c->cfg.dev, bytes_of_digests(c));
    return c->made ? 0 : tow_fail(err, TOW_ENOMEM, "the device has no room for digests");
}

static int digest(struct work_cache *c, const struct work_cache_parts *p)
{
    const uint32_t tail = p->tail ? index_of_tail(c, p->tail) : 0;
    const struct kern_pages pages = {.pool = c->pages,
                                     .ids = p->ids,
                                     .n = (int32_t)p->n,
                                     .page_bytes = c->cfg.layout->page_bytes,
                                     .digests = c->made};
    const struct kern_pages tails = {.pool = c->tails,
                                     .ids = &tail,
                                     .n = p->tail ? 1 : 0,
                                     .page_bytes = c->cfg.layout->tail_bytes,
                                     .digests = c->made + c->cfg.n_pages};
    const int rc = kern_stream_pages(c->second, &pages);
    return rc < 0 ? rc : kern_stream_pages(c->second, &tails);
}

/* Takes the scratch that digests need, while memory may still be taken. */
static int warm(struct work_cache *c, struct tow_err *err)
{
    const uint32_t page = 0;
    const struct work_cache_parts p = {.ids = &page, .n = 1, .tail = c->cfg.host_tails};
    int rc = digest(c, &p);
    if (rc == 0) rc = kern_stream_sync(c->second);
    return rc < 0 ? tow_fail(err, rc, "the device makes no digests: %s", tow_err_text(rc)) : 0;
}

static int open_apart(struct work_cache *c, struct tow_err *err)
{
    const size_t bytes = bytes_of_pages(c), more = bytes_of_tails(c);
    int rc = kern_stream_open(&c->second, c->cfg.dev, err);
    if (rc < 0) return rc;
    c->pages = kern_dev_alloc(c->cfg.dev, bytes);
    c->tails = kern_dev_alloc(c->cfg.dev, more);
    if (!c->pages || !c->tails)
        return tow_fail(
            err, TOW_ENOMEM,
            "--kv-pages %u: the device has no room for %zu MiB of pages and %zu MiB of tails",
            c->cfg.n_pages, bytes >> 20, more >> 20);
    rc = pin_all(c, err);
    return rc < 0 ? rc : warm(c, err);
}

int work_cache_open(struct work_cache **out, const struct work_cache_config *cfg,
                    struct tow_err *err)
{
    struct work_cache *c = calloc(1, sizeof *c);
    if (!c) return tow_fail(err, TOW_ENOMEM, "cache: out of memory");
    c->cfg = *cfg;
    c->digests = aligned_alloc(4096, bytes_of_digests(c));
    if (!c->digests) {
        free(c);
        return tow_fail(err, TOW_ENOMEM, "cache: out of memory");
    }
    c->first = kern_dev_stream(cfg->dev);
    c->same = kern_dev_host_memory(cfg->dev);
    if (c->same) {
        c->pages = cfg->host_pages;
        c->tails = cfg->host_tails;
    } else {
        const int rc = open_apart(c, err);
        if (rc < 0) {
            work_cache_close(c);
            return rc;
        }
    }
    *out = c;
    return 0;
}

void work_cache_close(struct work_cache *c)
{
    if (!c) return;
    kern_stream_close(c->second);
    for (int i = 0; i < 3; i++) kern_dev_unpin(c->cfg.dev, c->pinned[i]);
    if (c->made != c->digests) kern_dev_free(c->cfg.dev, c->made);
    free(c->digests);
    if (!c->same) {
        kern_dev_free(c->cfg.dev, c->pages);
        kern_dev_free(c->cfg.dev, c->tails);
    }
    free(c);
}

uint8_t *work_cache_pages(const struct work_cache *c)
{
    return c->pages;
}
uint8_t *work_cache_tails(const struct work_cache *c)
{
    return c->tails;
}
uint32_t work_cache_capacity(const struct work_cache *c)
{
    return c->cfg.n_pages;
}
uint8_t *work_cache_tail(const struct work_cache *c, const uint8_t *host_tail)
{
    return c->tails + (host_tail - (const uint8_t *)c->cfg.host_tails);
}

/* How many pages from the i-th on lie side by side. */
static uint32_t run_of(const struct work_cache_parts *p, uint32_t i)
{
    uint32_t run = 1;
    while (i + run < p->n && p->ids[i + run] == p->ids[i] + run) run++;
    return run;
}

static int fetch_digests(struct work_cache *c, const struct work_cache_parts *p)
{
    int rc = 0;
    for (uint32_t i = 0, run; i < p->n && rc == 0; i += run) {
        run = run_of(p, i);
        rc = kern_stream_get(c->second, c->digests + p->ids[i], c->made + p->ids[i],
                             run * sizeof *c->made);
    }
    if (!p->tail || rc < 0) return rc;
    const size_t at = c->cfg.n_pages + index_of_tail(c, p->tail);
    return kern_stream_get(c->second, c->digests + at, c->made + at, sizeof *c->made);
}

static int move(struct work_cache *c, const struct work_cache_parts *p, bool out)
{
    const size_t bytes = (size_t)c->cfg.layout->page_bytes;
    int rc = 0;
    for (uint32_t i = 0, run; i < p->n && rc == 0; i += run) {
        run = run_of(p, i);
        const size_t at = p->ids[i] * bytes;
        uint8_t *host = (uint8_t *)c->cfg.host_pages + at, *dev = c->pages + at;
        rc = out ? kern_stream_get(c->second, host, dev, run * bytes)
                 : kern_stream_put(c->second, dev, host, run * bytes);
    }
    if (!p->tail || rc < 0) return rc;
    const size_t at = (size_t)(p->tail - (const uint8_t *)c->cfg.host_tails);
    const size_t tail_bytes = (size_t)c->cfg.layout->tail_bytes;
    uint8_t *host = (uint8_t *)c->cfg.host_tails + at, *dev = c->tails + at;
    return out ? kern_stream_get(c->second, host, dev, tail_bytes)
               : kern_stream_put(c->second, dev, host, tail_bytes);
}

static void on_landed(void *arg)
{
    struct work_cache *c = arg;
    atomic_fetch_add(&c->landed, 1);
    c->cfg.wake(c->cfg.wake_arg);
}

void work_cache_finish(struct work_cache *c, const struct work_cache_parts *p)
{
    const size_t bytes = (size_t)c->cfg.layout->page_bytes;
    if (!c->same) return;
    for (uint32_t i = 0; i < p->n; i++)
        c->digests[p->ids[i]] = tow_hash64(c->pages + p->ids[i] * bytes, bytes);
    if (p->tail)
        c->digests[c->cfg.n_pages + index_of_tail(c, p->tail)] =
            tow_hash64(p->tail, (size_t)c->cfg.layout->tail_bytes);
}

int work_cache_out(struct work_cache *c, const struct work_cache_parts *p, uint64_t *number)
{
    *number = 0;
    if (c->same) return 0;
    int rc = digest(c, p);
    if (rc == 0 && c->made != c->digests) rc = fetch_digests(c, p);
    if (rc == 0) rc = move(c, p, true);
    if (rc == 0) rc = kern_stream_tell(c->second, on_landed, c);
    if (rc == 0) *number = ++c->n_out;
    return rc;
}

uint64_t work_cache_landed(const struct work_cache *c)
{
    return atomic_load(&((struct work_cache *)(uintptr_t)c)->landed);
}

uint64_t work_cache_page_digest(const struct work_cache *c, uint32_t id)
{
    return c->digests[id];
}
uint64_t work_cache_tail_digest(const struct work_cache *c, const uint8_t *tail)
{
    return c->digests[c->cfg.n_pages + index_of_tail(c, tail)];
}

int work_cache_in(struct work_cache *c, const struct work_cache_parts *p)
{
    return c->same ? 0 : move(c, p, false);
}
int work_cache_await(struct work_cache *c)
{
    return c->same ? 0 : kern_stream_await(c->first, c->second);
}
