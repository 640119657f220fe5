/* kernels/kvpack/kvpack.c - shape contracts of window_store, compress and
 * prepare, and of the sequences of a batch. */
#include "kernels/kvpack/kvpack.h"

#include "common/base/err.h"
#include "kernels/ops.h"

bool kern_seqs_ok(const struct kern_seq *seqs, int32_t n_seqs, const struct kern_kv_layout *l,
                  int32_t layer)
{
    if (n_seqs < 0 || (n_seqs > 0 && !seqs) || !l || layer < 0 || layer >= l->spec.n_layers)
        return false;
    for (int32_t i = 0; i < n_seqs; i++) {
        const struct kern_seq *q = &seqs[i];
        if (q->n_rows < 0 || q->row0 < 0 || q->pos0 < 0 || !q->tail) return false;
        if (l->layer[layer].ratio == 0) continue;
        int64_t n = kern_kv_pages_for(q->pos0 + q->n_rows, l->page_tokens);
        if (q->shadowed && l->shadow_bytes == 0) return false;
        if (q->n_pages < (q->shadowed ? 2 * n : n)) return false;
        if (q->n_pages > 0 && !q->page_ids) return false;
    }
    return true;
}

int kern_window_store_check(const struct kern_window_store *p)
{
    if (!kern_seqs_ok(p->seqs, p->n_seqs, p->layout, p->layer)) return TOW_EINVAL;
    return p->n_seqs == 0 || p->kv ? 0 : TOW_EINVAL;
}

int kern_compress_check(const struct kern_compress *p)
{
    if (!kern_seqs_ok(p->seqs, p->n_seqs, p->layout, p->layer)) return TOW_EINVAL;
    const struct kern_kv_layer *y = &p->layout->layer[p->layer];
    if (y->ratio == 0 || (p->index && !kern_kv_overlaps(y->ratio))) return TOW_EINVAL;
    int32_t e = p->index ? p->layout->spec.index_dim : p->layout->spec.head_dim;
    if (!p->norm.data || p->norm.n != e || !p->ape || (p->layout->spec.rope_dim && !p->inv_freq))
        return TOW_EINVAL;
    if (p->index && p->act == KERN_BF16 && (e & (e - 1))) return TOW_EINVAL;
    if (!p->index && p->act == KERN_BF16 && (e - p->layout->spec.rope_dim) % 64) return TOW_EINVAL;
    const struct kern_compress *o = p->also;
    if (o && (o->also || o->seqs != p->seqs || o->n_seqs != p->n_seqs || o->pages != p->pages ||
              o->layout != p->layout || o->layer != p->layer || o->index == p->index))
        return TOW_EINVAL;
    if (p->n_seqs > 0 && !(p->kv && p->gate && p->pages)) return TOW_EINVAL;
    return o ? kern_compress_check(o) : 0;
}

int kern_prepare_check(const struct kern_prepare *p)
{
    const struct kern_window_store *w = p->store;
    const struct kern_compress *c = p->compress;
    if (w && (!p->kv || w->kv != p->kv->y || w->act != p->kv->act)) return TOW_EINVAL;
    if (w && c && (w->seqs != c->seqs || w->n_seqs != c->n_seqs || w->layout != c->layout))
        return TOW_EINVAL;
    int rc = p->heads ? kern_heads_rope_check(p->heads) : 0;
    if (rc == 0 && p->kv) rc = kern_kv_prep_check(p->kv);
    if (rc == 0 && w) rc = kern_window_store_check(w);
    if (rc == 0 && c) rc = kern_compress_check(c);
    return rc == 0 && p->index ? kern_index_query_check(p->index) : rc;
}
