/* worker/cache.h - the pages and tails as the device has them, beside those that the transport
 * moves.
 *
 * Why      The transport moves host memory unless it knows the device's. Where the device has
 *          memory of its own, each page and tail has a place in both: what a prefill pass has
 *          finished is copied out before it is offered, what has arrived is copied in before a
 *          decode pass reads it. The copies go beside the passes, on a stream of their own: those
 *          of one chunk while the next is computed. Where device memory is host memory both are the
 *          same bytes and nothing is copied.
 * Digests  A page is digested where it was made, once, when no pass will change it any more: by the
 *          engine's thread, or by the device on the way out. The digest stays beside the page until
 *          the page's next owner makes another: to send it again takes no new one, and whatever
 *          happens to the bytes from then on is found where they arrive.
 * Owner    The control thread, but for what is marked [engine thread].
 * Holds    Page i and tail i lie at the same index on both sides. Copies are done in the order in
 *          which they were asked for: a page that has a new owner is never overwritten by an older
 *          copy that comes after one of the new owner's.
 */
#ifndef WORK_CACHE_H
#define WORK_CACHE_H

#include "kernels/kv_layout.h"
#include "kernels/types.h"

struct kern_dev;
struct tow_err;
struct work_cache;

struct work_cache_config {
    const char *name; /* of the worker, for its log */
    struct kern_dev *dev;
    const struct kern_kv_layout *layout;
    void *host_pages, *host_tails; /* with room for so many of the layout */
    uint32_t n_pages, n_tails;
    void (*wake)(void *arg); /* [another thread] something has landed */
    void *wake_arg;
};

/* What cfg points to is borrowed, used until close. TOW_ENOMEM: the device has no room for as
 * many. */
int work_cache_open(struct work_cache **out, const struct work_cache_config *cfg,
                    struct tow_err *err);
/* Waits for its copies. Before the host's memory and the device are given up; NULL is fine. */
void work_cache_close(struct work_cache *c);

uint8_t *work_cache_pages(const struct work_cache *c);    /* device: base of the pool */
uint8_t *work_cache_tails(const struct work_cache *c);    /* device: tail 0 */
uint32_t work_cache_capacity(const struct work_cache *c); /* pages */
/* The device's tail for one of the host's. [any thread] */
uint8_t *work_cache_tail(const struct work_cache *c, const uint8_t *host_tail);

/* Pages of the pool, and a tail (the host's; NULL: none). */
struct work_cache_parts {
    const uint32_t *ids; /* [n] */
    uint32_t n;
    const uint8_t *tail;
};
/* No pass will change these any more: their digests are made now, in the pages' one place. Where
 * the device has memory of its own work_cache_out() makes them, and this does nothing. [engine
 * thread] */
void work_cache_finish(struct work_cache *c, const struct work_cache_parts *p);
/* Begins to copy to the host what was finished, after the pass that did so has come back.
 * *number: work_cache_landed() reaches it when all is there; 0: it is there already. 0,
 * TOW_EDEVICE. */
int work_cache_out(struct work_cache *c, const struct work_cache_parts *p, uint64_t *number);
uint64_t work_cache_landed(const struct work_cache *c);
/* The digest (tow_hash64) of a page, or of a tail, that was finished and has landed. */
uint64_t work_cache_page_digest(const struct work_cache *c, uint32_t id);
uint64_t work_cache_tail_digest(const struct work_cache *c, const uint8_t *tail);

/* Begins to copy to the device what has arrived. The next step must await it, whether it reads
 * these pages or not: they may have gone to another sequence that it lets grow. 0, TOW_EDEVICE. */
int work_cache_in(struct work_cache *c, const struct work_cache_parts *p);
/* Passes from here on begin when all that was copied in is there; does not wait. [engine thread] */
int work_cache_await(struct work_cache *c);

#endif
