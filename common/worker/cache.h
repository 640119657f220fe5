/* worker/cache.h - the pages and tails as the device has them, beside those that the transport moves.
 *
 * Why      The transport moves host memory unless it knows the device's. Where the device has memory of
 *          its own, each page and tail has a place in both: what a prefill pass has finished is copied
 *          out before it is offered, what has arrived is copied in before a decode pass reads it. Where
 *          device memory is host memory both are the same bytes and nothing is copied.
 * Owner    The engine thread, but for open and close.
 * Holds    Page i and tail i lie at the same index on both sides.
 */
#ifndef WORK_CACHE_H
#define WORK_CACHE_H

#include "kernels/kv_layout.h"
#include "kernels/types.h"

struct kern_dev;
struct tow_err;
struct work_cache;

/* dev, layout: borrowed, used until close. host_pages, host_tails: borrowed, with room for n_pages and
 * n_tails of the layout. TOW_ENOMEM: the device has no room for as many. */
int work_cache_open(struct work_cache **out, struct kern_dev *dev,
                    const struct kern_kv_layout *layout, void *host_pages, uint32_t n_pages,
                    void *host_tails, uint32_t n_tails, struct tow_err *err);
void work_cache_close(struct work_cache *c); /* before the device; NULL is fine */

uint8_t *work_cache_pages(const struct work_cache *c);    /* device: base of the pool */
uint32_t work_cache_capacity(const struct work_cache *c); /* pages */
/* The device's tail for one of the host's. */
uint8_t *work_cache_tail(const struct work_cache *c, const uint8_t *host_tail);

/* Copies what rows pos0 .. pos0+n_rows-1 have changed to the host: their pages, companions too, and the
 * tail if asked. seq names host tails. Waits. 0, TOW_EDEVICE. */
int work_cache_out(struct work_cache *c, const struct kern_seq *seq, bool tail);
/* Copies all pages that hold tokens before pos0, and the tail, to the device. 0, TOW_EDEVICE. */
int work_cache_in(struct work_cache *c, const struct kern_seq *seq);

#endif
