/* kv/pool.h - the fixed set of KV pages and tails a process owns.
 *
 * Why      Pages are registered with the transport once;
 *          handing them out must never allocate or register.
 * Owner    The control thread. Page bytes themselves are read and written by whoever holds the
 *          page.
 * Holds    free + held == capacity; a page is free exactly when its reference count is 0; pages
 *          never move. Tails are not shared: one owner each.
 */
#ifndef TOW_KV_POOL_H
#define TOW_KV_POOL_H

#include <stddef.h>
#include <stdint.h>

struct kv_pool;
struct tow_err;
typedef uint32_t kv_page_id;
typedef uint32_t kv_tail_id;

/* pages: n_pages * page_bytes, tails: n_tails * tail_bytes; both borrowed, 64-byte aligned,
 * outliving the pool. Caller frees with kv_pool_free().
 * On failure *out is untouched and *err says why. */
int kv_pool_new(struct kv_pool **out, void *pages, uint32_t n_pages, size_t page_bytes, void *tails,
                uint32_t n_tails, size_t tail_bytes, struct tow_err *err);
void kv_pool_free(struct kv_pool *pool); /* NULL is fine; everything must be back */

/* Takes n pages or none, each with one reference. TOW_EFULL is ordinary: queue and retry. */
int kv_pool_take(struct kv_pool *pool, uint32_t n, kv_page_id *out_ids);
void kv_pool_ref(struct kv_pool *pool, kv_page_id id);
void kv_pool_unref(struct kv_pool *pool, kv_page_id id);

int kv_pool_take_tail(struct kv_pool *pool, kv_tail_id *out); /* TOW_EFULL as above */
void kv_pool_give_tail(struct kv_pool *pool, kv_tail_id id);

void *kv_pool_pages(const struct kv_pool *pool); /* base; page i at i * page_bytes [any thread] */
uint8_t *kv_pool_page(const struct kv_pool *pool, kv_page_id id); /* [any thread] */
uint8_t *kv_pool_tail(const struct kv_pool *pool, kv_tail_id id); /* [any thread] */
uint32_t kv_pool_free_pages(const struct kv_pool *pool);
uint32_t kv_pool_free_tails(const struct kv_pool *pool);
uint32_t kv_pool_capacity(const struct kv_pool *pool); /* pages */
uint32_t kv_pool_tail_capacity(const struct kv_pool *pool);

/* Puts the free lists in an order drawn from seed: with every list in order, tests pass by luck. */
void kv_pool_shuffle(struct kv_pool *pool, uint64_t seed);

#endif
