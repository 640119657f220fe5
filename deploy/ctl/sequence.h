/* ctl/sequence.h - one sequence in a page pool of its own, and its way into another one.
 *
 * Why      What the audit and explain compare are ways that a sequence can take through pages: in
 *          chunks, alone, in company, handed over as prefill does to decode.
 * Holds    Pages and tails are poisoned when made, and free lists are in an order drawn from the
 *          seed: bytes that were never written, and pages that lie in order, must not matter.
 * Owner    One thread.
 */
#ifndef CTL_SEQUENCE_H
#define CTL_SEQUENCE_H

#include "common/kv/table.h"
#include "common/model/forward.h"

/* The device to open a model on whose pages the processor reads and writes here: "cpu" and
 * "mirror:..." stay, others get "mirror:" in front. Returns out. Longer names than fit are no
 * device's. */
enum { CTL_DEVICE_CHARS = 64 };
const char *ctl_host_device(char out[CTL_DEVICE_CHARS], const char *device);

struct ctl_seq {
    struct model *m; /* borrowed; its device memory is host memory (ctl_host_device) */
    struct kv_pool *pool;
    struct kv_table table;
    uint8_t *pages, *tails; /* owned; of m's device */
};

/* Room for n_tokens, with spare pages and tails for others in the same pool. ctl_seq_close() after
 * every outcome and before model_close(); a zeroed one is fine. */
int ctl_seq_open(struct ctl_seq *s, struct model *m, int64_t n_tokens, uint32_t spare_pages,
                 uint32_t spare_tails, uint64_t seed, struct tow_err *err);
void ctl_seq_close(struct ctl_seq *s);

/* Rows pos0 .. pos0+n of the sequence, for a batch. topk 0: the model's. */
struct kern_seq ctl_seq_rows(const struct ctl_seq *s, const struct kv_table *table, int64_t pos0,
                             int32_t n, int32_t topk);

/* XXH3 of all parts of a page. */
uint64_t ctl_page_digest(const struct kern_kv_layout *l, const uint8_t *page);

struct ctl_hand_over {
    /* For tests; NULL when it is used. The bytes of each page of the second pool, before its digest
     * is looked at, and after all digests were good. */
    void (*on_page_copied)(void *ctx, uint32_t page, uint8_t *bytes, size_t n);
    void (*on_page_landed)(void *ctx, uint32_t page, uint8_t *bytes, size_t n);
    void *ctx;
    uint64_t *digests; /* [n_pages] filled; NULL: not wanted */
    /* result */
    int64_t n_flipped; /* copies whose digest differed; such a page is copied again */
    int64_t n_stale;   /* pages that differ once all have landed */
    uint32_t first_stale;
};

/* As the two programs do it: each page's digest on both sides, then the tail. */
void ctl_seq_hand_over(const struct ctl_seq *from, const struct ctl_seq *to, uint32_t n_pages,
                       struct ctl_hand_over *h);

#endif
