/* kv/table.c - see table.h. */
#include "common/kv/table.h"

#include "common/base/err.h"

#include <stdlib.h>
#include <string.h>

void kv_table_init(struct kv_table *t)
{
    memset(t, 0, sizeof *t);
}

int kv_table_grow(struct kv_table *t, struct kv_pool *pool, uint32_t n_pages)
{
    bool took_tail = false;
    if (!t->has_tail) {
        if (kv_pool_take_tail(pool, &t->tail) < 0) return TOW_EFULL;
        t->has_tail = took_tail = true;
    }
    int rc = 0;
    if (n_pages > t->cap) {
        kv_page_id *ids = realloc(t->ids, n_pages * sizeof *ids);
        if (ids) {
            t->ids = ids;
            t->cap = n_pages;
        } else {
            rc = TOW_ENOMEM;
        }
    }
    if (rc == 0 && n_pages > t->n_pages)
        rc = kv_pool_take(pool, n_pages - t->n_pages, t->ids + t->n_pages);
    if (rc < 0) {
        if (took_tail) {
            kv_pool_give_tail(pool, t->tail);
            t->has_tail = false;
        }
        return rc;
    }
    if (n_pages > t->n_pages) t->n_pages = n_pages;
    return 0;
}

void kv_table_drop(struct kv_table *t, struct kv_pool *pool, uint32_t index)
{
    tow_assert(index < t->n_pages && t->ids[index] != KV_PAGE_GONE);
    kv_pool_unref(pool, t->ids[index]);
    t->ids[index] = KV_PAGE_GONE;
}

void kv_table_fini(struct kv_table *t, struct kv_pool *pool)
{
    for (uint32_t i = 0; i < t->n_pages; i++)
        if (t->ids[i] != KV_PAGE_GONE) kv_pool_unref(pool, t->ids[i]);
    if (t->has_tail) kv_pool_give_tail(pool, t->tail);
    free(t->ids);
    kv_table_init(t);
}
