/* kernels/pages.h - pages of a pool gathered into one piece, scattered back, and digested on the
 * way.
 *
 * Why      What leaves a device is some pages of a pool, and each travels with its digest. To make
 *          that where the pages lie costs a pass at the device's bandwidth; the host's cores would
 *          need milliseconds a chunk.
 *          Workers whose transport moves host memory have pages digested where they lie (packed
 *          NULL) and copied one by one; one piece is for a transport that takes device memory,
 *          where each piece costs a descriptor.
 * Digest   XXH3 of 64 bits, seed 0 (common/base/hash.h makes the same). Its sums over 1024 bytes do
 *          not depend on what came before, so they are made side by side; only the eight numbers
 *          that run from one such block to the next are a chain, 30 cycles a block.
 * Shapes   page_bytes a multiple of 1024 (kv_layout.h: of 4096), at least 1024; memory 16-byte
 *          aligned
 */
#ifndef KERN_PAGES_H
#define KERN_PAGES_H

#include <stdbool.h>
#include <stdint.h>

struct kern_stream;

struct kern_pages {
    uint8_t *pool;       /* device: base of the pool */
    const uint32_t *ids; /* host array [n]: pages of the pool, no one twice */
    int32_t n;
    int64_t page_bytes;
    uint8_t *packed; /* device [n, page_bytes]; NULL: nothing is moved, pages are only digested */
    bool unpack;     /* from packed to the pool; else from the pool to packed */
    /* NULL, or that of page id goes to digests[id]; device or pinned host memory. */
    uint64_t *digests;
};

/* Enqueues it; ids may be changed at once. 0, TOW_EINVAL (shape), TOW_ENOMEM, TOW_EDEVICE. */
int kern_stream_pages(struct kern_stream *s, const struct kern_pages *p);

int kern_pages_check(const struct kern_pages *p); /* for back ends */
int kern_pages_cpu(const struct kern_pages *p);   /* the twin, over host memory */

#endif
