/* kv/pool.c - see pool.h. Free ids are kept on stacks (the page given back last is the warmest in
 * cache); a bitmap scan was rejected: it costs more the fuller the pool is. */
#include "common/kv/pool.h"

#include "common/base/err.h"

#include <stdlib.h>

struct id_stack {
    uint32_t *ids; /* owned; [cap] */
    uint32_t n, cap;
};

struct kv_pool {
    uint8_t *pages, *tails; /* borrowed */
    size_t page_bytes, tail_bytes;
    struct id_stack free_pages, free_tails;
    uint32_t *refs;     /* owned; per page */
    uint8_t *tail_held; /* owned; per tail */
};

static int stack_init(struct id_stack *s, uint32_t n)
{
    s->ids = malloc((n ? n : 1) * sizeof *s->ids);
    if (!s->ids) return TOW_ENOMEM;
    s->n = s->cap = n;
    for (uint32_t i = 0; i < n; i++) s->ids[i] = n - 1 - i;
    return 0;
}

static uint64_t next_random(uint64_t *s)
{
    *s += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = *s;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static void stack_shuffle(struct id_stack *s, uint64_t *seed)
{
    for (uint32_t i = s->n; i > 1; i--) {
        uint32_t j = (uint32_t)(next_random(seed) % i), t = s->ids[i - 1];
        s->ids[i - 1] = s->ids[j];
        s->ids[j] = t;
    }
}

int kv_pool_new(struct kv_pool **out, void *pages, uint32_t n_pages, size_t page_bytes, void *tails,
                uint32_t n_tails, size_t tail_bytes, struct tow_err *err)
{
    struct kv_pool *p = calloc(1, sizeof *p);
    if (!p) return tow_fail(err, TOW_ENOMEM, "pool: out of memory");
    p->pages = pages;
    p->tails = tails;
    p->page_bytes = page_bytes;
    p->tail_bytes = tail_bytes;
    p->refs = calloc(n_pages ? n_pages : 1, sizeof *p->refs);
    p->tail_held = calloc(n_tails ? n_tails : 1, 1);
    if (!p->refs || !p->tail_held || stack_init(&p->free_pages, n_pages) < 0 ||
        stack_init(&p->free_tails, n_tails) < 0) {
        free(p->free_pages.ids);
        free(p->refs);
        free(p->tail_held);
        free(p);
        return tow_fail(err, TOW_ENOMEM, "pool: no memory for %u pages and %u tails", n_pages,
                        n_tails);
    }
    *out = p;
    return 0;
}

void kv_pool_free(struct kv_pool *p)
{
    if (!p) return;
    tow_assert(p->free_pages.n == p->free_pages.cap);
    tow_assert(p->free_tails.n == p->free_tails.cap);
    free(p->free_pages.ids);
    free(p->free_tails.ids);
    free(p->refs);
    free(p->tail_held);
    free(p);
}

int kv_pool_take(struct kv_pool *p, uint32_t n, kv_page_id *out_ids)
{
    if (n > p->free_pages.n) return TOW_EFULL;
    for (uint32_t i = 0; i < n; i++) {
        kv_page_id id = p->free_pages.ids[--p->free_pages.n];
        p->refs[id] = 1;
        out_ids[i] = id;
    }
    return 0;
}

void kv_pool_ref(struct kv_pool *p, kv_page_id id)
{
    tow_assert(id < p->free_pages.cap && p->refs[id] > 0);
    p->refs[id]++;
}

void kv_pool_unref(struct kv_pool *p, kv_page_id id)
{
    tow_assert(id < p->free_pages.cap && p->refs[id] > 0);
    if (--p->refs[id] == 0) p->free_pages.ids[p->free_pages.n++] = id;
}

int kv_pool_take_tail(struct kv_pool *p, kv_tail_id *out)
{
    if (p->free_tails.n == 0) return TOW_EFULL;
    *out = p->free_tails.ids[--p->free_tails.n];
    p->tail_held[*out] = 1;
    return 0;
}

void kv_pool_give_tail(struct kv_pool *p, kv_tail_id id)
{
    tow_assert(id < p->free_tails.cap && p->tail_held[id]);
    p->tail_held[id] = 0;
    p->free_tails.ids[p->free_tails.n++] = id;
}

void *kv_pool_pages(const struct kv_pool *p)
{
    return p->pages;
}

uint8_t *kv_pool_page(const struct kv_pool *p, kv_page_id id)
{
    tow_assert(id < p->free_pages.cap);
    return p->pages + (size_t)id * p->page_bytes;
}

uint8_t *kv_pool_tail(const struct kv_pool *p, kv_tail_id id)
{
    tow_assert(id < p->free_tails.cap);
    return p->tails + (size_t)id * p->tail_bytes;
}

uint32_t kv_pool_free_pages(const struct kv_pool *p)
{
    return p->free_pages.n;
}

uint32_t kv_pool_free_tails(const struct kv_pool *p)
{
    return p->free_tails.n;
}

uint32_t kv_pool_capacity(const struct kv_pool *p)
{
    return p->free_pages.cap;
}

uint32_t kv_pool_tail_capacity(const struct kv_pool *p)
{
    return p->free_tails.cap;
}

void kv_pool_shuffle(struct kv_pool *p, uint64_t seed)
{
    stack_shuffle(&p->free_pages, &seed);
    stack_shuffle(&p->free_tails, &seed);
}
