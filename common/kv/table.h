/* kv/table.h - the pages and the tail of one sequence.
 *
 * Owner    The control thread takes and gives; the engine thread reads ids while it holds the
 *          sequence.
 * Holds    ids[p] is the page of tokens p*page_tokens ..; every id holds one reference on the pool.
 */
#ifndef TOW_KV_TABLE_H
#define TOW_KV_TABLE_H

#include "common/kv/pool.h"

#include <stdbool.h>

struct kv_table {
    kv_page_id *ids; /* owned; refs held */
    uint32_t n_pages, cap;
    kv_tail_id tail; /* held while has_tail */
    bool has_tail;
};

void kv_table_init(struct kv_table *t);
/* Grows to n_pages pages (and takes a tail if there is none); all or nothing.
 * TOW_EFULL, TOW_ENOMEM. */
int kv_table_grow(struct kv_table *t, struct kv_pool *pool, uint32_t n_pages);
/* Gives back one page (prefill, after its transfer); the slot stays and must not be read again. */
void kv_table_drop(struct kv_table *t, struct kv_pool *pool, uint32_t index);
/* Gives everything back; t is as after init. */
void kv_table_fini(struct kv_table *t, struct kv_pool *pool);

#define KV_PAGE_GONE UINT32_MAX /* ids[] of a dropped page */

#endif
