/* ctl/numerics_kv.c - attention over stored keys: each format against double on what is stored, fp8
 * against bf16, and what the format costs against keys that were never quantized. */
#include "deploy/ctl/numerics_impl.h"

#include "common/base/err.h"
#include "kernels/numeric.h"

#include <math.h>
#include <string.h>

struct kv_tally {
    double error[2]; /* of fp8 and bf16 pages */
    int64_t differ;  /* outputs of the two that are not the same bits */
    double cost;     /* of fp8, against unquantized keys */
    int32_t cost_layer;
    int64_t n_outputs;
};

/* One row and head in double: window keys, then entries; size, if wanted, gets what rounding is
 * relative to. */
static void attend(const struct ctl_num *c, const double *q, const double *window, int64_t n_window,
                   const double *entries, int64_t n_entries, double sink, double *o, double *size)
{
    const int32_t d = c->s->d;
    const double scale = (float)(1.0 / sqrt((double)d));
    double top = -INFINITY, sum = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1)
            for (int32_t i = 0; i < d; i++) o[i] = 0, size ? size[i] = 0 : 0;
        for (int64_t j = 0; j < n_window + n_entries; j++) {
            const double *k = j < n_window ? window + j * d : entries + (j - n_window) * d;
            double s = 0;
            for (int32_t i = 0; i < d; i++) s += q[i] * k[i];
            s *= scale;
            if (pass == 0) {
                top = fmax(top, s);
                continue;
            }
            sum += exp(s - top);
            for (int32_t i = 0; i < d; i++) {
                o[i] += exp(s - top) * k[i];
                if (size) size[i] += exp(s - top) * fabs(k[i]);
            }
        }
    }
    sum += exp(sink - top);
    for (int32_t i = 0; i < d; i++) {
        o[i] /= sum;
        if (size) size[i] /= sum;
    }
}

struct attention_run {
    struct kern_kv_layout l;
    uint8_t *pages;
    uint16_t *o; /* [n_last, H, d] */
};

/* Compressor and attention ops of one layer with one format of keys. */
static int run_attention(struct ctl_num *c, int32_t at, enum kern_kv_fmt fmt,
                         struct attention_run *r, struct tow_err *err)
{
    const struct model_shape *s = c->s;
    const struct model_layer *L = &c->w->layers[at];
    int rc = ctl_num_layout(c, &r->l, fmt, KERN_IK_FP4, err);
    if (rc < 0) return rc;
    const int32_t n_pages = (int32_t)kern_kv_pages_for(c->T, r->l.page_tokens), n = c->n_last;
    r->pages = ctl_num_hold(c, n_pages, (size_t)r->l.page_bytes);
    r->o = ctl_num_hold(c, (int64_t)n * s->H * s->d, 2);
    uint8_t *tail = ctl_num_hold(c, 1, (size_t)r->l.tail_bytes);
    uint32_t *ids = ctl_num_hold(c, n_pages, sizeof *ids);
    if (c->no_memory) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for attention");
    for (int32_t i = 0; i < n_pages; i++) ids[i] = (uint32_t)(n_pages - 1 - i);
    struct kern_seq whole = {
        .n_rows = c->T, .page_ids = ids, .n_pages = n_pages, .tail = tail, .topk = 1};
    struct kern_seq last = whole;
    last.n_rows = n;
    last.pos0 = c->T - n;
    CTL_NUM_OP(c, rc, compress, .kv = ctl_num_row_of(c, ctl_num_find(c, at, "main.kv", NULL), 0),
               .gate = ctl_num_row_of(c, ctl_num_find(c, at, "main.gate", NULL), 0),
               .ape = L->comp.ape, .norm = L->comp.norm, .inv_freq = c->inv_freq[1],
               .pages = r->pages, .layout = &r->l, .layer = at, .seqs = &whole, .n_seqs = 1,
               .eps = s->norm_eps, .act = KERN_BF16);
    CTL_NUM_OP(c, rc, attention, .q = ctl_num_row_of(c, ctl_num_find(c, at, "q", NULL), c->T - n),
               .kv = ctl_num_row_of(c, ctl_num_find(c, at, "kv", NULL), c->T - n), .sink = L->sink,
               .o = r->o, .pages = r->pages, .layout = &r->l, .layer = at, .seqs = &last,
               .n_seqs = 1, .T = n, .H = s->H, .scale = (float)(1.0 / sqrt((double)s->d)),
               .act = KERN_BF16);
    return rc;
}

/* Window keys of the last rows before K64: product, norm, rotation. */
static int plain_window(struct ctl_num *c, int32_t at, double *keys)
{
    const struct model_shape *s = c->s;
    const struct model_layer *L = &c->w->layers[at];
    const struct ctl_num_tensor *x = ctl_num_find(c, at, "attn_x", NULL);
    const int32_t n = c->n_last;
    uint16_t *kv = ctl_num_hold(c, (int64_t)n * s->d, 2);
    const bool plain = L->wkv.fmt == KERN_W_F32 || L->wkv.fmt == KERN_W_BF16;
    int rc = x && kv ? 0 : TOW_ENOMEM;
    if (rc < 0) return rc;
    CTL_NUM_OP(c, rc, linear, .x = ctl_num_row_of(c, x, c->T - n), .w = L->wkv, .y = kv,
               .ld_x = s->D, .ld_y = s->d, .T = n, .N = s->d, .K = s->D, .groups = 1,
               .x_dtype = KERN_BF16, .y_dtype = KERN_BF16,
               .aq = plain ? KERN_AQ_NONE : KERN_AQ_A128);
    for (int32_t r = 0; rc == 0 && r < n; r++) {
        double *k = keys + (int64_t)r * s->d;
        for (int32_t i = 0; i < s->d; i++) k[i] = kern_bf16_decode(kv[(int64_t)r * s->d + i]);
        ctl_ref_rmsnorm(k, s->d, &L->kv_norm, s->norm_eps);
        ctl_ref_rotate(k, s->d, s->rd, c->T - n + r, c->inv_freq[1], 1);
    }
    return rc;
}

static int kv_layer(struct ctl_num *c, int32_t at, struct kv_tally *t, struct tow_err *err)
{
    const size_t mark = ctl_num_mark(c);
    const struct model_shape *s = c->s;
    const struct model_layer *L = &c->w->layers[at];
    const struct ctl_num_tensor *kv = ctl_num_find(c, at, "kv", NULL);
    const struct ctl_num_tensor *q = ctl_num_find(c, at, "q", NULL);
    const int64_t n = c->n_last, d = s->d, n_entries = c->T / L->ratio;
    const int32_t n_pages = (int32_t)kern_kv_pages_for(c->T, model_peek_layout(c->m)->page_tokens);
    if (!kv || !q || !ctl_num_find(c, at, "main.kv", NULL) ||
        !ctl_num_find(c, at, "main.gate", NULL))
        return tow_fail(err, TOW_EINVAL, "numerics: layer %d gave no keys", at);
    struct attention_run run[2];
    double *window[2], *entries[3];
    for (int i = 0; i < 2; i++) window[i] = ctl_num_hold(c, n * d, 8);
    for (int i = 0; i < 3; i++) entries[i] = ctl_num_hold(c, n_entries * d, 8);
    double *qd = ctl_num_hold(c, d, 8), *o = ctl_num_hold(c, d, 8), *size = ctl_num_hold(c, d, 8);
    const int64_t n_out = (int64_t)CTL_NUM_ROWS * s->H * d;
    double *got = ctl_num_hold(c, n_out, 8), *truth = ctl_num_hold(c, n_out, 8);
    float *row = ctl_num_hold(c, d, 4);
    if (c->no_memory) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for attention");
    int rc = run_attention(c, at, KERN_KV_FP8, &run[0], err);
    if (rc == 0) rc = run_attention(c, at, KERN_KV_BF16, &run[1], err);
    if (rc == 0) rc = plain_window(c, at, window[1]);
    if (rc < 0) return rc;
    for (int64_t i = 0; i < n * d; i++) window[0][i] = ctl_num_at(c, kv, c->T - n + i / d, i % d);
    for (int64_t e = 0; e < n_entries; e++) {
        for (int f = 0; f < 2; f++) {
            const struct kern_kv_layer *y = &run[f].l.layer[at];
            kern_kv_load(run[f].l.spec.kv_fmt,
                         run[f].pages + (n_pages - 1 - e / y->per_page) * run[f].l.page_bytes +
                             y->main_off,
                         y->per_page, e % y->per_page, row, s->d, s->rd);
            for (int64_t i = 0; i < d; i++) entries[f][e * d + i] = row[i];
        }
        ctl_ref_entry(&L->comp, L->ratio,
                      ctl_num_row_of(c, ctl_num_find(c, at, "main.kv", NULL), 0),
                      ctl_num_row_of(c, ctl_num_find(c, at, "main.gate", NULL), 0), e, s->d, s->rd,
                      c->inv_freq[1], s->norm_eps, false, entries[2] + e * d);
    }
    for (int64_t r = 0; r < CTL_NUM_ROWS; r++) {
        const int64_t at_row = n - CTL_NUM_ROWS + r, pos = c->T - n + at_row;
        const int64_t from = at_row + 1 - s->window, n_window = s->window,
                      seen = (pos + 1) / L->ratio;
        for (int32_t h = 0; h < s->H; h++) {
            float sink;
            memcpy(&sink, (const char *)L->sink + h * 4, 4);
            for (int64_t i = 0; i < d; i++) qd[i] = ctl_num_at(c, q, pos, h * d + i);
            for (int f = 0; f < 2; f++) {
                const uint16_t *out = run[f].o + (at_row * s->H + h) * d;
                attend(c, qd, window[0] + from * d, n_window, entries[f], seen, sink, o, size);
                for (int64_t i = 0; i < d; i++) {
                    double e = size[i] > 0 ? fabs(kern_bf16_decode(out[i]) - o[i]) / size[i] : 0;
                    if (!(e <= t->error[f])) t->error[f] = e;
                    t->differ += f == 1 && out[i] != run[0].o[(at_row * s->H + h) * d + i];
                    if (f == 0) got[(r * s->H + h) * d + i] = kern_bf16_decode(out[i]);
                }
            }
            attend(c, qd, window[1] + from * d, n_window, entries[2], seen, sink,
                   truth + (r * s->H + h) * d, NULL);
        }
    }
    t->n_outputs += n_out;
    double cost = ctl_ref_rel(got, truth, n_out);
    if (!(cost <= t->cost)) t->cost = cost, t->cost_layer = at;
    ctl_num_release(c, mark);
    return 0;
}

int ctl_num_kv(struct ctl_num *c, struct tow_err *err)
{
    struct kv_tally t = {.cost_layer = -1};
    int32_t n = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        if (c->s->ratios[c->layers[i]] == 0) continue;
        int rc = kv_layer(c, c->layers[i], &t, err);
        if (rc < 0) return rc;
        n++;
    }
    if (n == 0) return 0;
    /* The weight of a key is rounded to bf16 before it meets the key, and the output once more:
     * 2^-8 each (eight significant bits), relative to the weighted magnitudes; the rest is
     * float32. */
    const double bound = 0x1p-7 + 0x1p-12;
    ctl_num_row(c, "kv.fp8", t.error[0], bound, "largest error, relative to the weighted keys",
                "attention reads fp8 entries and their scales right", "%d layers", n);
    ctl_num_row(c, "kv.bf16", t.error[1], bound, "largest error, relative to the weighted keys",
                "attention reads bf16 entries right", "%d layers", n);
    /* Entries are quantized to e4m3 before they are stored, as the model was trained. */
    ctl_num_row(c, "kv.fp8_bf16", (double)t.differ, 0, "outputs that differ in any bit",
                "--kv-dtype fp8 loses nothing against bf16", "of %lld outputs",
                (long long)t.n_outputs);
    /* e4m3 keeps four significant bits: no value moves by more than 2^-4 of itself, and an average
     * of keys by less. */
    ctl_num_row(c, "kv.cost", t.cost, 0x1p-4, "relative distance of the attention output",
                "what quantized keys cost against unquantized ones is what the format explains",
                "worst layer %d", t.cost_layer);
    return 0;
}
