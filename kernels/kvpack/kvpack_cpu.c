/* kernels/kvpack/kvpack_cpu.c - writes what attention will read: window rings and compressed
 * entries.
 *
 * The compressor works in two rounds. First, per sequence and block of channels, tokens are folded
 * into the state strictly one after another, so that cutting a prompt into chunks cannot change a
 * bit; each group that closes leaves its pooled channels in scratch. Second, per finished entry:
 * round, norm, rotate, quantize, store. The overlapping kind keeps the raw rows of the open group
 * (three at most) and the group before; the dense kind keeps per channel the running maximum, the
 * sum of exponentials and the weighted sum.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/kvpack/kvpack.h"
#include "kernels/ops.h"

#include "common/base/err.h"

int KERN_ISA(kern_heads_rope)(struct kern_stream *s, const struct kern_heads_rope *p);
int KERN_ISA(kern_kv_prep)(struct kern_stream *s, const struct kern_kv_prep *p);

enum { CHANNELS = 64 }; /* of a part of the first round */

struct store_job {
    const struct kern_window_store *p;
    uint8_t *scratch;
    size_t stride;
};

static void window_part(void *arg, int64_t part, int thread)
{
    const struct store_job *j = arg;
    const struct kern_window_store *p = j->p;
    const struct kern_kv_spec *sp = &p->layout->spec;
    float *r = (float *)(j->scratch + j->stride * (size_t)thread);
    const struct kern_seq *q = &p->seqs[part / sp->window];
    int64_t back = part % sp->window; /* rows before the last one */
    if (back >= q->n_rows) return;
    int64_t t = q->n_rows - 1 - back, slot = (q->pos0 + t) % sp->window;
    kern_row_load(kern_at(p->kv, (q->row0 + t) * (int64_t)sp->head_dim, p->act), p->act,
                  sp->head_dim, r);
    kern_kv_store(sp->kv_fmt, q->tail + p->layout->layer[p->layer].window_off, sp->window, slot, r,
                  sp->head_dim, sp->rope_dim);
}

int KERN_ISA(kern_window_store)(struct kern_stream *s, const struct kern_window_store *p)
{
    struct store_job j = {.p = p};
    int32_t d = p->layout->spec.head_dim;
    j.scratch = kern_scratch_each(s, KERN_SLOT_OP, (size_t)kern_pad16(d) * 4, &j.stride);
    if (!j.scratch) return TOW_ENOMEM;
    kern_parallel(s, (int64_t)p->n_seqs * p->layout->spec.window, window_part, &j);
    return 0;
}

struct job {
    const struct kern_compress *p;
    float *pooled;  /* [entries, ep] */
    int64_t *first; /* [n_seqs + 1]: first entry of each sequence in pooled */
    uint8_t *scratch;
    size_t stride;
    int64_t ep, blocks;
    int32_t ratio, e;
};

static float *state_of(const struct kern_compress *p, const struct kern_seq *q)
{
    const struct kern_kv_layer *y = &p->layout->layer[p->layer];
    return (float *)(q->tail + (p->index ? y->istate_off : y->mstate_off));
}

/* Softmax-weighted sum of n rows, sixteen channels wide. */
static v16 pool_rows(const v16 *g, const v16 *kv, int n)
{
    v16 m = g[0], sum = v_zero(), acc = v_zero();
    for (int i = 1; i < n; i++) m = v_max(g[i], m);
    for (int i = 0; i < n; i++) {
        v16 w = v_exp(v_sub(g[i], m));
        sum = v_add(sum, w);
        acc = v_fma(w, kv[i], acc);
    }
    return v_div(acc, sum);
}

/* Overlapping groups of four: channels c .. c+w-1 of the first halves and of the second halves. */
static void fold_overlap(const struct job *j, const struct kern_seq *q, float *pooled, int32_t c,
                         int w)
{
    const struct kern_compress *p = j->p;
    int32_t e = j->e;
    float *kv_rows = state_of(p, q), *g_rows = kv_rows + 3 * 2 * e;
    float *kv_prev = g_rows + 3 * 2 * e, *g_prev = kv_prev + 4 * e;
    for (int32_t t = 0; t < q->n_rows; t++) {
        int64_t pos = q->pos0 + t, at = (q->row0 + t) * 2 * (int64_t)e + c;
        int r = (int)(pos & 3);
        const float *ape = p->ape + (int64_t)r * 2 * e + c;
        v16 kv1 = v_loadn(p->kv + at, w), kv2 = v_loadn(p->kv + at + e, w);
        v16 g1 = v_add(v_loadn(p->gate + at, w), v_loadn(ape, w));
        v16 g2 = v_add(v_loadn(p->gate + at + e, w), v_loadn(ape + e, w));
        if (r < 3) {
            v_storen(kv_rows + r * 2 * e + c, kv1, w);
            v_storen(kv_rows + r * 2 * e + e + c, kv2, w);
            v_storen(g_rows + r * 2 * e + c, g1, w);
            v_storen(g_rows + r * 2 * e + e + c, g2, w);
            continue;
        }
        v16 g[8], kv[8];
        int n = 0;
        if (pos >= 7) /* there is a group before */
            for (; n < 4; n++) {
                g[n] = v_loadn(g_prev + n * e + c, w);
                kv[n] = v_loadn(kv_prev + n * e + c, w);
            }
        for (int i = 0; i < 3; i++, n++) {
            g[n] = v_loadn(g_rows + i * 2 * e + e + c, w);
            kv[n] = v_loadn(kv_rows + i * 2 * e + e + c, w);
            v_storen(g_prev + i * e + c, v_loadn(g_rows + i * 2 * e + c, w), w);
            v_storen(kv_prev + i * e + c, v_loadn(kv_rows + i * 2 * e + c, w), w);
        }
        v_storen(g_prev + 3 * e + c, g1, w);
        v_storen(kv_prev + 3 * e + c, kv1, w);
        g[n] = g2;
        kv[n++] = kv2;
        v_storen(pooled + c, pool_rows(g, kv, n), w);
        pooled += j->ep;
    }
}

/* Dense groups: maximum m, sum l and weighted sum a of the open group. */
static void fold_dense(const struct job *j, const struct kern_seq *q, float *pooled, int32_t c,
                       int w)
{
    const struct kern_compress *p = j->p;
    float *ms = state_of(p, q) + c, *ls = ms + j->e, *as = ls + j->e;
    v16 m = v_zero(), l = v_zero(), a = v_zero();
    if (q->pos0 % j->ratio) {
        m = v_loadn(ms, w);
        l = v_loadn(ls, w);
        a = v_loadn(as, w);
    }
    for (int32_t t = 0; t < q->n_rows; t++) {
        int64_t at = (q->row0 + t) * (int64_t)j->e + c;
        int32_t r = (int32_t)((q->pos0 + t) % j->ratio);
        v16 kv = v_loadn(p->kv + at, w);
        v16 g = v_add(v_loadn(p->gate + at, w), v_loadn(p->ape + (int64_t)r * j->e + c, w));
        if (r == 0) {
            m = g;
            l = v_set1(1.0f);
            a = kv;
        } else {
            v16 top = v_max(g, m);
            v16 keep = v_exp(v_sub(m, top)), add = v_exp(v_sub(g, top));
            l = v_fma(l, keep, add);
            a = v_fma(a, keep, v_mul(add, kv));
            m = top;
        }
        if (r == j->ratio - 1) {
            v_storen(pooled + c, v_div(a, l), w);
            pooled += j->ep;
        }
    }
    v_storen(ms, m, w);
    v_storen(ls, l, w);
    v_storen(as, a, w);
}

static void fold_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_seq *q = &j->p->seqs[part / j->blocks];
    float *pooled = j->pooled + j->first[part / j->blocks] * j->ep;
    int32_t c0 = (int32_t)(part % j->blocks) * CHANNELS;
    (void)thread;
    if (q->n_rows == 0) return;
    for (int32_t c = c0; c < j->e && c < c0 + CHANNELS; c += 16) {
        int w = j->e - c < 16 ? j->e - c : 16;
        if (kern_kv_overlaps(j->ratio))
            fold_overlap(j, q, pooled, c, w);
        else
            fold_dense(j, q, pooled, c, w);
    }
}

static void index_round(float *r, int32_t w, enum kern_ik_fmt fmt)
{
    kern_hadamard(r, w);
    kern_row_round(r, w, KERN_BF16);
    if (fmt == KERN_IK_FP4) kern_row_e2m1(r, w, 32, r);
    if (fmt == KERN_IK_FP8) kern_row_e4m3(r, w, w, r);
}

/* The finished key r, not rounded for storage yet, to the companion page in each type but the
 * selecting one; tmp holds ep floats. */
static void shadow_rows(const struct job *j, const struct kern_seq *q, int64_t entry,
                        const float *r, float *tmp)
{
    const struct kern_compress *p = j->p;
    int64_t row;
    for (int s = 0; s < KERN_SHADOWS; s++) {
        enum kern_ik_fmt fmt = kern_shadow_fmt((enum kern_shadow)s);
        if (fmt == p->layout->spec.ik_fmt) continue;
        uint8_t *part = (uint8_t *)(uintptr_t)kern_shadow_part(p->pages, p->layout, p->layer,
                                                               (enum kern_shadow)s, q, entry, &row);
        memcpy(tmp, r, (size_t)j->ep * 4);
        index_round(tmp, j->e, fmt);
        kern_ik_store(fmt, part, p->layout->layer[p->layer].per_page, row, tmp, j->e);
    }
}

static void finish_part(void *arg, int64_t i, int thread)
{
    const struct job *j = arg;
    const struct kern_compress *p = j->p;
    const struct kern_kv_spec *sp = &p->layout->spec;
    const struct kern_kv_layer *y = &p->layout->layer[p->layer];
    float *r = j->pooled + i * j->ep;
    float *cs = (float *)(j->scratch + j->stride * (size_t)thread), *sn = cs + sp->rope_dim;
    int32_t e = j->e, rd = sp->rope_dim, si = 0;
    while (j->first[si + 1] <= i) si++;
    const struct kern_seq *q = &p->seqs[si];
    int64_t entry = q->pos0 / j->ratio + (i - j->first[si]), row;

    for (int64_t n = e; n < j->ep; n++) r[n] = 0.0f;
    kern_row_round(r, e, p->act);
    kern_row_rmsnorm(r, e, p->eps, &p->norm);
    kern_row_round(r, e, p->act);
    for (int32_t n = 0; n < rd / 2; n++)
        kern_cos_sin((float)(entry * j->ratio) * p->inv_freq[n], &cs[n], &sn[n]);
    kern_rotate(r + e - rd, cs, sn, rd, 1.0f);
    kern_row_round(r, e, p->act);
    uint8_t *part = (uint8_t *)(uintptr_t)kern_entry_part(p->pages, p->layout, p->layer, p->index,
                                                          q, entry, &row);
    if (p->index) {
        if (q->shadowed) shadow_rows(j, q, entry, r, cs);
        if (p->act == KERN_BF16) index_round(r, e, sp->ik_fmt);
        kern_ik_store(sp->ik_fmt, part, y->per_page, row, r, e);
    } else {
        if (p->act == KERN_BF16) kern_row_e4m3(r, e - rd, 64, r);
        kern_kv_store(sp->kv_fmt, part, y->per_page, row, r, e, rd);
    }
}

int KERN_ISA(kern_compress)(struct kern_stream *s, const struct kern_compress *p)
{
    const struct kern_kv_spec *sp = &p->layout->spec;
    struct job j = {.p = p, .ratio = p->layout->layer[p->layer].ratio};
    int64_t n = 0;
    j.e = p->index ? sp->index_dim : sp->head_dim;
    j.ep = kern_pad16(j.e);
    j.blocks = (j.e + CHANNELS - 1) / CHANNELS;
    j.first = kern_scratch(s, KERN_SLOT_OP3, ((size_t)p->n_seqs + 1) * sizeof *j.first);
    if (!j.first) return TOW_ENOMEM;
    for (int32_t i = 0; i < p->n_seqs; i++) {
        const struct kern_seq *q = &p->seqs[i];
        j.first[i] = n;
        n += (q->pos0 + q->n_rows) / j.ratio - q->pos0 / j.ratio;
    }
    j.first[p->n_seqs] = n;
    j.pooled = kern_scratch(s, KERN_SLOT_OP, (size_t)(n * j.ep) * 4 + 64);
    /* cos and sin of one angle set; then the copy of a key for the shadows. */
    size_t floats = (size_t)(sp->rope_dim > j.ep ? sp->rope_dim : j.ep) * 2;
    j.scratch = kern_scratch_each(s, KERN_SLOT_OP2, floats * 4 + 64, &j.stride);
    if (!j.pooled || !j.scratch) return TOW_ENOMEM;
    kern_parallel(s, p->n_seqs * j.blocks, fold_part, &j);
    kern_parallel(s, n, finish_part, &j);
    return p->also ? KERN_ISA(kern_compress)(s, p->also) : 0;
}

struct query_job {
    const struct kern_index_query *p;
    uint8_t *scratch;
    size_t stride;
};

static void query_part(void *arg, int64_t t, int thread)
{
    const struct query_job *j = arg;
    const struct kern_index_query *p = j->p;
    float *r = (float *)(j->scratch + j->stride * (size_t)thread);
    int32_t h2 = p->rd / 2;
    for (int64_t h = 0; h < p->H; h++) {
        void *q = kern_at_mut(p->q, (t * p->H + h) * p->w, p->act);
        kern_row_load(q, p->act, p->w, r);
        kern_rotate(r + p->w - p->rd, p->cos + t * h2, p->sin + t * h2, p->rd, 1.0f);
        kern_row_round(r, p->w, p->act);
        if (p->act == KERN_BF16) index_round(r, p->w, p->fmt);
        kern_row_store(q, p->act, p->w, r);
    }
}

int KERN_ISA(kern_index_query)(struct kern_stream *s, const struct kern_index_query *p)
{
    struct query_job j = {.p = p};
    if (p->T == 0) return 0;
    j.scratch = kern_scratch_each(s, KERN_SLOT_OP, (size_t)kern_pad16(p->w) * 4, &j.stride);
    if (!j.scratch) return TOW_ENOMEM;
    kern_parallel(s, p->T, query_part, &j);
    return 0;
}

int KERN_ISA(kern_prepare)(struct kern_stream *s, const struct kern_prepare *p)
{
    int rc = p->heads ? KERN_ISA(kern_heads_rope)(s, p->heads) : 0;
    if (rc == 0 && p->kv) rc = KERN_ISA(kern_kv_prep)(s, p->kv);
    if (rc == 0 && p->store) rc = KERN_ISA(kern_window_store)(s, p->store);
    if (rc == 0 && p->compress) rc = KERN_ISA(kern_compress)(s, p->compress);
    return rc == 0 && p->index ? KERN_ISA(kern_index_query)(s, p->index) : rc;
}
