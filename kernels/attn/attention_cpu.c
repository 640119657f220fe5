/* kernels/attn/attention_cpu.c - attention of each row over its window and its compressed entries.
 *
 * A part is one row and a group of heads. Keys come in blocks of 64 in their fixed order (window
 * ascending, then entries ascending) and are dequantized to floats. Two passes: the first finds
 * each head's maximum, the second forms the weights against it and adds the weighted keys; weights
 * are rounded, so the maximum must be final before. The scores of the first pass are kept while
 * they fit, else computed again: scratch does not grow with the context.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/gemm/tile_cpu.h"
#include "kernels/kvpack/kvpack.h"
#include "kernels/kvpack/load_cpu.h"
#include "kernels/ops.h"

#include "common/base/err.h"

int KERN_ISA(kern_heads_rope)(struct kern_stream *s, const struct kern_heads_rope *p);
int KERN_ISA(kern_linear)(struct kern_stream *s, const struct kern_linear *p);

enum {
    KEYS = 64,          /* of a block: 132 KiB of floats at width 512 */
    HEADS = 32,         /* of a part at most; all of them read a dequantized key */
    KEPT_SCORES = 4096, /* keys whose scores stay between the passes, per head */
    KEPT_KEYS =
        704, /* keys that stay as floats: window 128 and 512 selected, 1.5 MiB at width 512 */
};

/* A tile of the weighted sum: heads x vectors of columns. */
#if KERN_ISA_AVX512
enum { ADD_H = 4, ADD_C = 4 };
#else
enum { ADD_H = 2, ADD_C = 2 };
#endif

struct job {
    const struct kern_attention *p;
    const int32_t *seq_of; /* [T], -1 = row of no sequence */
    uint8_t *scratch;
    size_t stride;
    int64_t dp, ld;             /* padded width; floats from key to key */
    int32_t head_groups, heads; /* parts per row, heads of each */
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
    for (int64_t i = k0; i < k0 + n; i++, out += j->ld) {
        if (i < ks->n_window) {
            int64_t pos = ks->from + i;
            if (pos >= ks->q->pos0)
                kern_row_load(
                    kern_at(p->kv, (ks->q->row0 + pos - ks->q->pos0) * sp->head_dim, p->act),
                    p->act, sp->head_dim, out);
            else
                kern_kv_row(sp->kv_fmt, ks->q->tail + y->window_off, sp->window, pos % sp->window,
                            out, sp->head_dim, sp->rope_dim);
        } else {
            int64_t e = i - ks->n_window, row;
            const uint8_t *part;
            if (ks->selected) e = ks->selected[e];
            part = kern_entry_part(p->pages, l, p->layer, false, ks->q, e, &row);
            kern_kv_row(sp->kv_fmt, part, y->per_page, row, out, sp->head_dim, sp->rope_dim);
        }
    }
}

/* o[h][c] += sum over keys, ascending, of w[h][k] * key[k][c],
 * for nh heads and nc vectors of columns. */
V_INLINE void add_tile(const float *w, int64_t ld_w, const float *keys, int64_t n, int64_t ld,
                       float *o, int64_t ld_o, const int nh, const int nc)
{
    v16 acc[ADD_H][ADD_C];
#pragma GCC unroll 8
    for (int h = 0; h < nh; h++)
#pragma GCC unroll 8
        for (int c = 0; c < nc; c++) acc[h][c] = v_load(o + h * ld_o + 16 * c);
    for (int64_t k = 0; k < n; k++) {
        v16 key[ADD_C];
#pragma GCC unroll 8
        for (int c = 0; c < nc; c++) key[c] = v_load(keys + k * ld + 16 * c);
#pragma GCC unroll 8
        for (int h = 0; h < nh; h++) {
            v16 wk = v_set1(w[h * ld_w + k]);
#pragma GCC unroll 8
            for (int c = 0; c < nc; c++) acc[h][c] = v_fma(wk, key[c], acc[h][c]);
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < nh; h++)
#pragma GCC unroll 8
        for (int c = 0; c < nc; c++) v_store(o + h * ld_o + 16 * c, acc[h][c]);
}

static void add_keys(const float *w, int64_t ld_w, int32_t nh, const float *keys, int64_t n,
                     int64_t ld, int64_t dp, float *o)
{
    for (int64_t c = 0; c < dp;) {
        bool wide = dp - c >= 16 * ADD_C;
        int32_t h = 0;
        for (; wide && h + ADD_H <= nh; h += ADD_H)
            add_tile(w + h * ld_w, ld_w, keys + c, n, ld, o + h * dp + c, dp, ADD_H, ADD_C);
        for (; wide && h < nh; h++)
            add_tile(w + h * ld_w, ld_w, keys + c, n, ld, o + h * dp + c, dp, 1, ADD_C);
        for (; !wide && h < nh; h++)
            add_tile(w + h * ld_w, ld_w, keys + c, n, ld, o + h * dp + c, dp, 1, 1);
        c += wide ? 16 * ADD_C : 16;
    }
}

static void row_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_attention *p = j->p;
    const struct kern_kv_spec *sp = &p->layout->spec;
    int32_t ratio = p->layout->layer[p->layer].ratio, d = sp->head_dim;
    int64_t t = part / j->head_groups, dp = j->dp;
    int32_t h0 = (int32_t)(part % j->head_groups) * j->heads;
    int32_t nh = p->H - h0 < j->heads ? p->H - h0 : j->heads;
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

    bool keep = ks.n <= KEPT_SCORES, keep_keys = ks.n <= KEPT_KEYS;
    int64_t ld = keep ? (ks.n + KEYS - 1) / KEYS * KEYS : KEYS;
    float *q = (float *)(j->scratch + j->stride * (size_t)thread), *o = q + HEADS * j->ld;
    float *keys0 = o + HEADS * dp, *kept = keys0 + KEPT_KEYS * j->ld;
    const float *rows[HEADS];
    v16 max[HEADS], sum[HEADS];
    for (int32_t h = 0; h < nh; h++) {
        rows[h] = q + h * j->ld;
        kern_row_load(kern_at(p->q, (t * p->H + h0 + h) * d, p->act), p->act, d, q + h * j->ld);
        max[h] = v_set1(-INFINITY);
        sum[h] = v_zero();
    }
    memset(o, 0, (size_t)(nh * dp) * 4);
    for (int pass = 0; pass < 2; pass++)
        for (int64_t k0 = 0; k0 < ks.n; k0 += KEYS) {
            int64_t n = ks.n - k0 < KEYS ? ks.n - k0 : KEYS;
            float *s = keep ? kept + k0 : kept;
            float *keys = keep_keys ? keys0 + k0 * j->ld : keys0;
            if (pass == 0 || !keep_keys) load_keys(j, &ks, k0, n, keys);
            if (pass == 0 || !keep) KERN_ISA(kern_tile)(rows, nh, keys, n, j->ld, dp, s, ld);
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
            if (pass == 1) add_keys(s, ld, nh, keys, n, j->ld, dp, o);
            if (pass == 0 && k0 + n == ks.n)
                for (int32_t h = 0; h < nh; h++) max[h] = v_set1(v_hmax(max[h]));
        }
    for (int32_t h = 0; h < nh; h++) {
        float den = v_sum(sum[h]) + kern_exp1(kern_f32_at(p->sink, h0 + h) - kern_lane0(max[h]));
        for (int64_t c = 0; c < dp; c += 16)
            v_store(o + h * dp + c, v_div(v_load(o + h * dp + c), v_set1(den)));
        kern_row_store(kern_at_mut(p->o, (t * p->H + h0 + h) * d, p->act), p->act, d, o + h * dp);
    }
}

int KERN_ISA(kern_attention)(struct kern_stream *s, const struct kern_attention *p)
{
    struct job j = {.p = p, .dp = kern_pad16(p->layout->spec.head_dim)};
    if (p->T == 0 || p->n_seqs == 0) return 0;
    j.ld = kern_row_ld(j.dp);
    int32_t *seq_of = kern_scratch(s, KERN_SLOT_OP2, (size_t)p->T * sizeof *seq_of);
    j.scratch = kern_scratch_each(
        s, KERN_SLOT_OP, (size_t)((HEADS + KEPT_KEYS) * j.ld + HEADS * (j.dp + KEPT_SCORES)) * 4,
        &j.stride);
    if (!seq_of || !j.scratch) return TOW_ENOMEM;
    for (int32_t t = 0; t < p->T; t++) seq_of[t] = -1;
    for (int32_t i = 0; i < p->n_seqs; i++)
        for (int32_t r = 0; r < p->seqs[i].n_rows; r++) seq_of[p->seqs[i].row0 + r] = i;
    j.seq_of = seq_of;
    /* Fewer heads in a part when there are too few rows to go round. */
    j.heads = HEADS;
    while (j.heads > 4 && (int64_t)p->T * ((p->H + j.heads - 1) / j.heads) < kern_stream_threads(s))
        j.heads /= 2;
    j.head_groups = (p->H + j.heads - 1) / j.heads;
    kern_parallel(s, (int64_t)p->T * j.head_groups, row_part, &j);
    return 0;
}

int KERN_ISA(kern_attend)(struct kern_stream *s, const struct kern_attend *p)
{
    int rc = KERN_ISA(kern_attention)(s, &p->attention);
    if (rc == 0) rc = KERN_ISA(kern_heads_rope)(s, &p->back);
    if (rc == 0) rc = KERN_ISA(kern_linear)(s, &p->wo_a);
    return rc < 0 ? rc : KERN_ISA(kern_linear)(s, &p->wo_b);
}
