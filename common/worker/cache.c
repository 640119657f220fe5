/* worker/cache.c - see cache.h. */
#include "common/worker/cache.h"

#include "common/base/err.h"
#include "kernels/dev.h"

#include <stdlib.h>

struct work_cache {
    struct kern_dev *dev;                /* borrowed */
    struct kern_stream *stream;          /* borrowed from dev */
    const struct kern_kv_layout *layout; /* borrowed */
    uint8_t *host_pages, *host_tails;    /* borrowed */
    uint8_t *pages, *tails;              /* device; owned unless they are the host's */
    uint32_t n_pages;
    bool same; /* the host's pages and tails are the device's */
};

int work_cache_open(struct work_cache **out, struct kern_dev *dev,
                    const struct kern_kv_layout *layout, void *host_pages, uint32_t n_pages,
                    void *host_tails, uint32_t n_tails, struct tow_err *err)
{
    struct work_cache *c = calloc(1, sizeof *c);
    if (!c) return tow_fail(err, TOW_ENOMEM, "cache: out of memory");
    *c = (struct work_cache){.dev = dev,
                             .stream = kern_dev_stream(dev),
                             .layout = layout,
                             .host_pages = host_pages,
                             .host_tails = host_tails,
                             .pages = host_pages,
                             .tails = host_tails,
                             .n_pages = n_pages,
                             .same = kern_dev_host_memory(dev)};
    if (!c->same) {
        const size_t bytes = (size_t)n_pages * (size_t)layout->page_bytes,
                     more = (size_t)n_tails * (size_t)layout->tail_bytes;
        c->pages = kern_dev_alloc(dev, bytes);
        c->tails = kern_dev_alloc(dev, more);
        if (!c->pages || !c->tails) {
            work_cache_close(c);
            return tow_fail(
                err, TOW_ENOMEM,
                "--kv-pages %u: the device has no room for %zu MiB of pages and %zu MiB of "
                "tails",
                n_pages, bytes >> 20, more >> 20);
        }
    }
    *out = c;
    return 0;
}

void work_cache_close(struct work_cache *c)
{
    if (!c) return;
    if (!c->same) {
        kern_dev_free(c->dev, c->pages);
        kern_dev_free(c->dev, c->tails);
    }
    free(c);
}

uint8_t *work_cache_pages(const struct work_cache *c)
{
    return c->pages;
}
uint32_t work_cache_capacity(const struct work_cache *c)
{
    return c->n_pages;
}
uint8_t *work_cache_tail(const struct work_cache *c, const uint8_t *host_tail)
{
    return c->tails + (host_tail - c->host_tails);
}

/* Pages first .. last-1 of the sequence, and its tail. */
static int move(struct work_cache *c, const struct kern_seq *q, int64_t first, int64_t last,
                bool tail, bool out)
{
    const int per = q->shadowed ? 2 : 1;
    const size_t bytes = (size_t)c->layout->page_bytes, tail_bytes = (size_t)c->layout->tail_bytes;
    int rc = 0;
    for (int64_t i = first * per; i < last * per && rc == 0; i++) {
        const size_t at = (size_t)q->page_ids[i] * bytes;
        rc = out ? kern_stream_read(c->stream, c->host_pages + at, c->pages + at, bytes)
                 : kern_stream_write(c->stream, c->pages + at, c->host_pages + at, bytes);
    }
    if (!tail || rc < 0) return rc;
    uint8_t *dev = work_cache_tail(c, q->tail);
    return out ? kern_stream_read(c->stream, q->tail, dev, tail_bytes)
               : kern_stream_write(c->stream, dev, q->tail, tail_bytes);
}

int work_cache_out(struct work_cache *c, const struct kern_seq *q, bool tail)
{
    if (c->same) return 0;
    const int32_t pt = c->layout->page_tokens;
    return move(c, q, q->pos0 / pt, kern_kv_pages_for(q->pos0 + q->n_rows, pt), tail, true);
}

int work_cache_in(struct work_cache *c, const struct kern_seq *q)
{
    if (c->same) return 0;
    return move(c, q, 0, kern_kv_pages_for(q->pos0, c->layout->page_tokens), true, false);
}
