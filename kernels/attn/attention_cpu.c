/* kernels/attn/attention_cpu.c - attention of each row over its window and its compressed entries.
 *
 * A part is one row and a group of heads. Keys come in blocks of 64 in their fixed order (window ascending,
 * then entries ascending) and are dequantized to floats. Two passes: the first finds each head's maximum, the
 * second forms the weights against it and adds the weighted keys; weights are rounded, so the maximum must be final before.
 * The scores of the first pass are kept while they fit, else computed again: scratch does not grow with the context.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/gemm/tile_cpu.h"
#include "kernels/kvpack/kvpack.h"
#include "kernels/ops.h"

#include "common/base/err.h"

enum {
    KEYS = 64,        /* of a block: 128 KiB of floats at width 512 */
    HEADS = 16,       /* of a part */
    KEPT_KEYS = 4096, /* scores kept per head */
};

struct job {
    const struct kern_attention *p;
    const int32_t *seq_of; /* [T], -1 = row of no sequence */
    uint8_t *scratch;
    size_t stride;
    int64_t dp;
    int32_t head_groups;
};

/* One row's keys. */
struct keys {
    const struct kern_seq *q;
    int64_t pos, from; /* window: positions from .. pos */
    int64_t n_window, n;
    const int32_t *selected; /* entries, or NULL: 0, 1, ... */
};

static void load_keys(const struct job *j, const struct keys *ks, int64_t k0, int64_t n, float *out)
{
    const struct kern_attention *p = j->p;
    const struct kern_kv_layout *l = p->layout;
    const struct kern_kv_spec *sp = &l->spec;
    const struct kern_kv_layer *y = &l->layer[p->layer];
    for (int64_t i = k0; i < k0 + n; i++, out += j->dp) {
        if (i < ks->n_window) {
            int64_t pos = ks->from + i;
            if (pos >= ks->q->pos0)
                kern_row_load(
                    kern_at(p->kv, (ks->q->row0 + pos - ks->q->pos0) * sp->head_dim, p->act),
                    p->act, sp->head_dim, out);
            else
                kern_kv_load(sp->kv_fmt, ks->q->tail + y->window_off, sp->window, pos % sp->window,
                             out, sp->head_dim, sp->rope_dim);
        } else {
            int64_t e = i - ks->n_window, row;
            const uint8_t *part;
            if (ks->selected) e = ks->selected[e];
            part = kern_entry_part(p->pages, l, p->layer, false, ks->q, e, &row);
            kern_kv_load(sp->kv_fmt, part, y->per_page, row, out, sp->head_dim, sp->rope_dim);
        }
        for (int64_t c = sp->head_dim; c < j->dp; c++) out[c] = 0.0f;
    }
}

/* acc[c] += sum over keys, ascending, of w[k] * key[k][c]. */
static void add_keys(const float *w, const float *keys, int64_t n, int64_t dp, float *acc)
{
    int64_t c = 0;
    for (; c + 64 <= dp; c += 64) {
        v16 a0 = v_load(acc + c), a1 = v_load(acc + c + 16), a2 = v_load(acc + c + 32),
            a3 = v_load(acc + c + 48);
        for (int64_t k = 0; k < n; k++) {
            const float *key = keys + k * dp + c;
            v16 wk = v_set1(w[k]);
            a0 = v_fma(wk, v_load(key), a0);
            a1 = v_fma(wk, v_load(key + 16), a1);
            a2 = v_fma(wk, v_load(key + 32), a2);
            a3 = v_fma(wk, v_load(key + 48), a3);
        }
        v_store(acc + c, a0);
        v_store(acc + c + 16, a1);
        v_store(acc + c + 32, a2);
        v_store(acc + c + 48, a3);
    }
    for (; c < dp; c += 16) {
        v16 a = v_load(acc + c);
        for (int64_t k = 0; k < n; k++) a = v_fma(v_set1(w[k]), v_load(keys + k * dp + c), a);
        v_store(acc + c, a);
    }
}

static void row_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_attention *p = j->p;
    const struct kern_kv_spec *sp = &p->layout->spec;
    int32_t ratio = p->layout->layer[p->layer].ratio, d = sp->head_dim;
    int64_t t = part / j->head_groups, dp = j->dp;
    int32_t h0 = (int32_t)(part % j->head_groups) * HEADS;
    int32_t nh = p->H - h0 < HEADS ? p->H - h0 : HEADS;
    if (j->seq_of[t] < 0) return;
    struct keys ks = {.q = &p->seqs[j->seq_of[t]]};
    ks.pos = ks.q->pos0 + (t - ks.q->row0);
    ks.from = ks.pos - sp->window + 1 > 0 ? ks.pos - sp->window + 1 : 0;
    ks.n_window = ks.pos - ks.from + 1;
    ks.n = ks.n_window;
    if (ratio && p->selected) {
        ks.selected = p->selected + t * p->sel_ld;
        ks.n += p->n_selected[t];
    } else if (ratio) {
        ks.n += (ks.pos + 1) / ratio;
    }

    float *q = (float *)(j->scratch + j->stride * (size_t)thread), *o = q + HEADS * dp;
    float *keys = o + HEADS * dp, *kept = keys + KEYS * dp;
    const float *rows[HEADS];
    v16 max[HEADS], sum[HEADS];
    bool keep = ks.n <= KEPT_KEYS;
    int64_t ld = keep ? (ks.n + KEYS - 1) / KEYS * KEYS : KEYS;
    for (int32_t h = 0; h < nh; h++) {
        rows[h] = q + h * dp;
        kern_row_load(kern_at(p->q, (t * p->H + h0 + h) * d, p->act), p->act, d, q + h * dp);
        max[h] = v_set1(-INFINITY);
        sum[h] = v_zero();
    }
    memset(o, 0, (size_t)(nh * dp) * 4);
    for (int pass = 0; pass < 2; pass++)
        for (int64_t k0 = 0; k0 < ks.n; k0 += KEYS) {
            int64_t n = ks.n - k0 < KEYS ? ks.n - k0 : KEYS;
            float *s = keep ? kept + k0 : kept;
            load_keys(j, &ks, k0, n, keys);
            if (pass == 0 || !keep) kern_tile(rows, nh, keys, n, dp, dp, s, ld);
            for (int32_t h = 0; h < nh; h++)
                for (int64_t k = 0; k < n; k += 16) {
                    int w = n - k < 16 ? (int)(n - k) : 16;
                    v16 x = v_mul(v_loadn(s + h * ld + k, w), v_set1(p->scale));
                    float f[16];
                    if (w < 16) { /* lanes past the end weigh nothing */
                        v_store(f, x);
                        for (int i = w; i < 16; i++) f[i] = -INFINITY;
                        x = v_load(f);
                    }
                    if (pass == 0) {
                        max[h] = v_max(x, max[h]);
                        continue;
                    }
                    x = v_exp(v_sub(x, max[h]));
                    sum[h] = v_add(sum[h], x);
                    v_storen(s + h * ld + k, v_round_act(x, p->act), w);
                }
            for (int32_t h = 0; h < nh && pass == 1; h++)
                add_keys(s + h * ld, keys, n, dp, o + h * dp);
            if (pass == 0 && k0 + n == ks.n)
                for (int32_t h = 0; h < nh; h++) max[h] = v_set1(v_hmax(max[h]));
        }
    for (int32_t h = 0; h < nh; h++) {
        float den = v_sum(sum[h]) + kern_exp1(p->sink[h0 + h] - kern_lane0(max[h]));
        for (int64_t c = 0; c < dp; c += 16)
            v_store(o + h * dp + c, v_div(v_load(o + h * dp + c), v_set1(den)));
        kern_row_store(kern_at_mut(p->o, (t * p->H + h0 + h) * d, p->act), p->act, d, o + h * dp);
    }
}

int KERN_ISA(kern_attention)(struct kern_stream *s, const struct kern_attention *p)
{
    struct job j = {.p = p, .dp = kern_pad16(p->layout->spec.head_dim)};
    if (p->T == 0 || p->n_seqs == 0) return 0;
    int32_t *seq_of = kern_scratch(s, KERN_SLOT_OP2, (size_t)p->T * sizeof *seq_of);
    j.scratch = kern_scratch_each(
        s, KERN_SLOT_OP, (size_t)((2 * HEADS + KEYS) * j.dp + HEADS * (KEPT_KEYS + KEYS)) * 4,
        &j.stride);
    if (!seq_of || !j.scratch) return TOW_ENOMEM;
    for (int32_t t = 0; t < p->T; t++) seq_of[t] = -1;
    for (int32_t i = 0; i < p->n_seqs; i++)
        for (int32_t r = 0; r < p->seqs[i].n_rows; r++) seq_of[p->seqs[i].row0 + r] = i;
    j.seq_of = seq_of;
    j.head_groups = (p->H + HEADS - 1) / HEADS;
    kern_parallel(s, (int64_t)p->T * j.head_groups, row_part, &j);
    return 0;
}
