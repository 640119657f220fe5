/* kernels/attn/attn.c - shape contracts of index_query, index_select, index_rank, attention
 * and attend. */
#include "common/base/err.h"
#include "kernels/kvpack/kvpack.h"
#include "kernels/ops.h"

static bool rows_ok(const struct kern_seq *seqs, int32_t n, int32_t T)
{
    for (int32_t i = 0; i < n; i++)
        if (seqs[i].row0 > T || seqs[i].n_rows > T - seqs[i].row0) return false;
    return true;
}

int kern_index_query_check(const struct kern_index_query *p)
{
    if (p->T < 0 || p->H < 1 || p->w < 1 || p->rd < 0 || p->rd > p->w || p->rd % 2)
        return TOW_EINVAL;
    if (p->act == KERN_BF16 && (p->w < 32 || (p->w & (p->w - 1)))) return TOW_EINVAL;
    return p->T == 0 || (p->q && (p->rd == 0 || (p->cos && p->sin))) ? 0 : TOW_EINVAL;
}

int kern_index_select_check(const struct kern_index_select *p)
{
    if (p->T < 0 || p->H < 1) return TOW_EINVAL;
    if (!kern_seqs_ok(p->seqs, p->n_seqs, p->layout, p->layer)) return TOW_EINVAL;
    if (!kern_kv_overlaps(p->layout->layer[p->layer].ratio)) return TOW_EINVAL;
    if (p->T == 0 || p->n_seqs == 0) return 0;
    if (!rows_ok(p->seqs, p->n_seqs, p->T)) return TOW_EINVAL;
    for (int32_t i = 0; i < p->n_seqs; i++) {
        const struct kern_seq *q = &p->seqs[i];
        int64_t n = (q->pos0 + q->n_rows) / p->layout->layer[p->layer].ratio;
        if (q->topk < 1 || q->topk > p->sel_ld) return TOW_EINVAL;
        if (p->scores && p->score_ld < n) return TOW_EINVAL;
    }
    for (int32_t i = 0; p->score_rows && i < p->n_score_rows; i++)
        if (p->score_rows[i] < 0 || p->score_rows[i] >= p->T ||
            (i && p->score_rows[i] <= p->score_rows[i - 1]))
            return TOW_EINVAL;
    return p->q && p->wt && p->pages && p->selected && p->n_selected ? 0 : TOW_EINVAL;
}

int kern_index_rank_check(const struct kern_index_rank *p)
{
    const struct kern_seq *q = p->seq;
    if (p->T < 1 || p->H < 1 || p->n_entries < 0 || !q || q->n_rows != 1) return TOW_EINVAL;
    if (!kern_seqs_ok(q, 1, p->layout, p->layer) || !rows_ok(q, 1, p->T)) return TOW_EINVAL;
    if (!kern_kv_overlaps(p->layout->layer[p->layer].ratio) || q->topk < 1) return TOW_EINVAL;
    if (p->keys != KERN_KEYS_OWN && (p->keys < 0 || p->keys >= KERN_SHADOWS)) return TOW_EINVAL;
    if (p->keys != KERN_KEYS_OWN && (!q->shadowed || p->layout->shadow_bytes == 0))
        return TOW_EINVAL;
    int64_t n = (q->pos0 + 1) / p->layout->layer[p->layer].ratio;
    for (int32_t i = 0; i < p->n_entries; i++)
        if (p->entries[i] < 0 || p->entries[i] >= n) return TOW_EINVAL;
    if (p->scores ? p->keys != KERN_KEYS_OWN : !p->q || !p->wt || !p->pages) return TOW_EINVAL;
    return (p->ranks || p->n_entries == 0) && p->kth && p->next ? 0 : TOW_EINVAL;
}

int kern_attention_check(const struct kern_attention *p)
{
    if (p->T < 0 || p->H < 1) return TOW_EINVAL;
    if (!kern_seqs_ok(p->seqs, p->n_seqs, p->layout, p->layer)) return TOW_EINVAL;
    if (p->T == 0 || p->n_seqs == 0) return 0;
    if (!rows_ok(p->seqs, p->n_seqs, p->T)) return TOW_EINVAL;
    if (p->selected && (!p->n_selected || p->sel_ld < 1)) return TOW_EINVAL;
    if (p->layout->layer[p->layer].ratio && !p->pages) return TOW_EINVAL;
    return p->q && p->kv && p->sink && p->o ? 0 : TOW_EINVAL;
}

/* The parts must fit together; whatever else they are is theirs. */
int kern_attend_check(const struct kern_attend *p)
{
    const struct kern_attention *a = &p->attention;
    const struct kern_heads_rope *back = &p->back;
    const bool checked = kern_attention_check(a) == 0 && kern_heads_rope_check(back) == 0 &&
                         kern_linear_check(&p->wo_a) == 0 && kern_linear_check(&p->wo_b) == 0;
    if (!checked) return TOW_EINVAL;
    const int64_t width = (int64_t)a->H * a->layout->spec.head_dim,
                  low = (int64_t)p->wo_a.groups * p->wo_a.N;
    if (back->T != a->T || p->wo_a.T != a->T || p->wo_b.T != a->T) return TOW_EINVAL;
    if (back->norm || back->H != a->H || back->d != a->layout->spec.head_dim) return TOW_EINVAL;
    if ((int64_t)p->wo_a.groups * p->wo_a.K != width || p->wo_a.ld_x != width ||
        (int64_t)p->wo_b.groups * p->wo_b.K != low || p->wo_b.ld_x != p->wo_a.ld_y)
        return TOW_EINVAL;
    if (back->act != a->act || p->wo_a.x_dtype != a->act || p->wo_b.x_dtype != p->wo_a.y_dtype)
        return TOW_EINVAL;
    return back->q == a->o && p->wo_a.x == a->o && p->wo_b.x == p->wo_a.y ? 0 : TOW_EINVAL;
}
