/* ctl/sequence.c - see sequence.h. */
#include "deploy/ctl/sequence.h"

#include "common/base/err.h"
#include "common/base/hash.h"
#include "kernels/dev.h"

#include <stdio.h>
#include <string.h>

enum { RETRIES = 3 };

const char *ctl_host_device(char out[CTL_DEVICE_CHARS], const char *device)
{
    const bool host = !strcmp(device, "cpu") || !strncmp(device, "mirror:", 7);
    snprintf(out, CTL_DEVICE_CHARS, "%s%s", host ? "" : "mirror:", device);
    return out;
}

int ctl_seq_open(struct ctl_seq *s, struct model *m, int64_t n_tokens, uint32_t spare_pages,
                 uint32_t spare_tails, uint64_t seed, struct tow_err *err)
{
    const struct kern_kv_layout *l = model_peek_layout(m);
    const uint32_t n = (uint32_t)kern_kv_pages_for(n_tokens, l->page_tokens);
    const size_t bytes = (size_t)(n + spare_pages) * (size_t)l->page_bytes;
    const size_t tail_bytes = (size_t)(1 + spare_tails) * (size_t)l->tail_bytes;
    *s = (struct ctl_seq){.m = m};
    kv_table_init(&s->table);
    tow_assert(kern_dev_host_memory(model_peek_dev(m)));
    s->pages = kern_dev_alloc(model_peek_dev(m), bytes);
    s->tails = kern_dev_alloc(model_peek_dev(m), tail_bytes);
    if (!s->pages || !s->tails)
        return tow_fail(err, TOW_ENOMEM, "no memory for %u pages", n + spare_pages);
    memset(s->pages, (int)((0xa0 + seed) & 0xff), bytes);
    memset(s->tails, (int)((0xa0 + seed) & 0xff), tail_bytes);
    int rc = kv_pool_new(&s->pool, s->pages, n + spare_pages, (size_t)l->page_bytes, s->tails,
                         1 + spare_tails, (size_t)l->tail_bytes, err);
    if (rc < 0) return rc;
    kv_pool_shuffle(s->pool, seed);
    rc = kv_table_grow(&s->table, s->pool, n);
    return rc < 0 ? tow_fail(err, rc, "no pages for a sequence of %lld tokens", (long long)n_tokens)
                  : 0;
}

void ctl_seq_close(struct ctl_seq *s)
{
    if (s->pool) {
        kv_table_fini(&s->table, s->pool);
        kv_pool_free(s->pool);
    }
    if (s->m) {
        kern_dev_free(model_peek_dev(s->m), s->pages);
        kern_dev_free(model_peek_dev(s->m), s->tails);
    }
    memset(s, 0, sizeof *s);
}

struct kern_seq ctl_seq_rows(const struct ctl_seq *s, const struct kv_table *table, int64_t pos0,
                             int32_t n, int32_t topk)
{
    return (struct kern_seq){.n_rows = n,
                             .pos0 = pos0,
                             .page_ids = table->ids,
                             .n_pages = (int32_t)table->n_pages,
                             .tail = kv_pool_tail(s->pool, table->tail),
                             .topk = topk ? topk : model_peek_options(s->m)->index_topk};
}

uint64_t ctl_page_digest(const struct kern_kv_layout *l, const uint8_t *page)
{
    struct tow_hash h;
    tow_hash_begin(&h);
    for (int32_t i = 0; i < l->n_parts; i++) {
        int64_t off, bytes;
        kern_kv_part(l, i, &off, &bytes);
        tow_hash_add(&h, page + off, (size_t)bytes);
    }
    return tow_hash_end(&h);
}

void ctl_seq_hand_over(const struct ctl_seq *from, const struct ctl_seq *to, uint32_t n_pages,
                       struct ctl_hand_over *h)
{
    const struct kern_kv_layout *l = model_peek_layout(from->m);
    const size_t page_bytes = (size_t)l->page_bytes;
    for (uint32_t i = 0; i < n_pages; i++) {
        const uint8_t *src = kv_pool_page(from->pool, from->table.ids[i]);
        uint8_t *dst = kv_pool_page(to->pool, to->table.ids[i]);
        const uint64_t digest = ctl_page_digest(l, src);
        if (h->digests) h->digests[i] = digest;
        for (int attempt = 0; attempt < RETRIES; attempt++) {
            memcpy(dst, src, page_bytes);
            if (h->on_page_copied && attempt == 0) h->on_page_copied(h->ctx, i, dst, page_bytes);
            if (ctl_page_digest(l, dst) == digest) break;
            h->n_flipped++;
        }
    }
    memcpy(kv_pool_tail(to->pool, to->table.tail), kv_pool_tail(from->pool, from->table.tail),
           (size_t)l->tail_bytes);
    for (uint32_t i = 0; h->on_page_landed && i < n_pages; i++)
        h->on_page_landed(h->ctx, i, kv_pool_page(to->pool, to->table.ids[i]), page_bytes);
    for (uint32_t i = 0; i < n_pages; i++) {
        const uint8_t *src = kv_pool_page(from->pool, from->table.ids[i]);
        const uint8_t *dst = kv_pool_page(to->pool, to->table.ids[i]);
        if (ctl_page_digest(l, dst) == ctl_page_digest(l, src)) continue;
        if (h->n_stale++ == 0) h->first_stale = i;
    }
}
