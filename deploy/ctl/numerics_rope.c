/* ctl/numerics_rope.c - rotations at the largest position the model has, against double.
 *
 * Every op that rotates is asked for itself, because each has a place of its own where pairs could
 * be taken from the wrong layout: the table, attention heads, window keys, index queries,
 * compressed entries. Inputs are random bf16, outputs are those of the deployed mode, and the
 * bounds count its bf16 roundings. */
#include "deploy/ctl/numerics_impl.h"

#include "common/base/err.h"
#include "kernels/numeric.h"

#include <math.h>
#include <string.h>

enum { ROWS = 8 };

static void random_bf16(struct ctl_num *c, uint16_t *x, int64_t n)
{
    for (int64_t i = 0; x && i < n; i++) x[i] = kern_bf16_encode((float)ctl_num_random(c));
}

/* Positions to ask for: the last, and some before it. */
static int32_t position(const struct ctl_num *c, int32_t row)
{
    return row == 0 ? c->s->max_positions - 1
                    : (int32_t)(c->s->max_positions * (8.0 - row) / 8) - 3;
}

struct tables {
    int32_t *pos;
    float *cos[2], *sin[2];
};

static int table_row(struct ctl_num *c, struct tables *t)
{
    const int32_t half = c->s->rd / 2;
    double worst = 0, off = 0;
    int rc = 0;
    for (int f = 0; f < 2; f++) {
        CTL_NUM_OP(c, rc, rope_table, .pos = t->pos, .inv_freq = c->inv_freq[f], .cos = t->cos[f],
                   .sin = t->sin[f], .T = ROWS, .rd = c->s->rd);
        for (int32_t i = 0; rc == 0 && i < ROWS * half; i++) {
            const float p = (float)t->pos[i / half], fr = c->inv_freq[f][i % half];
            const double angle = (float)(p * fr);
            double e = fmax(fabs(t->cos[f][i] - cos(angle)), fabs(t->sin[f][i] - sin(angle)));
            if (!(e <= worst)) worst = e;
            off = fmax(off, fabs(angle - (double)p * fr));
        }
    }
    if (rc < 0) return rc;
    /* Two units in the last place of a value near 1, after a reduction in double. */
    ctl_num_row(
        c, "rope.table", worst, 2e-7, "largest error of a cosine or sine",
        "cosines and sines hold up to the last position",
        "position %d; the angle is a float32 product by definition, which is up to %.1e rad "
        "from the exact one",
        t->pos[0], off);
    return 0;
}

/* Relative distance of the last rd of each of n vectors of width d. */
static double rotated_error(const uint16_t *got, const double *want, int64_t n, int32_t d,
                            int32_t rd)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double g[1024];
        for (int32_t j = 0; j < rd; j++) g[j] = kern_bf16_decode(got[i * d + d - rd + j]);
        double e = ctl_ref_rel(g, want + i * d + d - rd, rd);
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

static int heads_row(struct ctl_num *c, const struct tables *t)
{
    const struct model_shape *s = c->s;
    const int64_t n = (int64_t)ROWS * s->H;
    uint16_t *q = ctl_num_hold(c, n * s->d, 2), *back = ctl_num_hold(c, n * s->d, 2);
    double *want = ctl_num_hold(c, n * s->d, 8), *again = ctl_num_hold(c, n * s->d, 8);
    double worst = 0;
    int rc = c->no_memory ? TOW_ENOMEM : 0;
    for (int f = 0; rc == 0 && f < 2; f++) {
        random_bf16(c, q, n * s->d);
        memcpy(back, q, (size_t)(n * s->d) * 2);
        for (int64_t i = 0; i < n * s->d; i++) again[i] = want[i] = kern_bf16_decode(q[i]);
        for (int64_t i = 0; i < n; i++) {
            ctl_ref_rotate(want + i * s->d, s->d, s->rd, t->pos[i / s->H], c->inv_freq[f], 1);
            ctl_ref_rotate(again + i * s->d, s->d, s->rd, t->pos[i / s->H], c->inv_freq[f], -1);
        }
        CTL_NUM_OP(c, rc, heads_rope, .q = q, .cos = t->cos[f], .sin = t->sin[f], .T = ROWS,
                   .H = s->H, .d = s->d, .rd = s->rd, .eps = s->norm_eps, .act = KERN_BF16);
        CTL_NUM_OP(c, rc, heads_rope, .q = back, .cos = t->cos[f], .sin = t->sin[f], .T = ROWS,
                   .H = s->H, .d = s->d, .rd = s->rd, .eps = s->norm_eps, .inverse = true,
                   .act = KERN_BF16);
        worst = fmax(worst, rotated_error(q, want, n, s->d, s->rd));
        worst = fmax(worst, rotated_error(back, again, n, s->d, s->rd));
    }
    /* One rounding of each value to bf16, which keeps eight significant bits. */
    if (rc == 0)
        ctl_num_row(c, "rope.heads", worst, 0x1p-8, "relative error of a rotated head",
                    "queries and outputs are rotated, and back, at the last position",
                    "position %d, both frequency tables", t->pos[0]);
    return rc;
}

static int keys_row(struct ctl_num *c, const struct tables *t)
{
    const struct model_shape *s = c->s;
    const struct kern_vec *norm = &c->w->layers[0].kv_norm;
    uint16_t *kv = ctl_num_hold(c, (int64_t)ROWS * s->d, 2);
    double *want = ctl_num_hold(c, (int64_t)ROWS * s->d, 8);
    double worst = 0;
    int rc = c->no_memory ? TOW_ENOMEM : 0;
    for (int f = 0; rc == 0 && f < 2; f++) {
        random_bf16(c, kv, (int64_t)ROWS * s->d);
        for (int64_t i = 0; i < (int64_t)ROWS * s->d; i++) want[i] = kern_bf16_decode(kv[i]);
        for (int32_t r = 0; r < ROWS; r++) {
            ctl_ref_rmsnorm(want + (int64_t)r * s->d, s->d, norm, s->norm_eps);
            ctl_ref_rotate(want + (int64_t)r * s->d, s->d, s->rd, t->pos[r], c->inv_freq[f], 1);
        }
        CTL_NUM_OP(c, rc, kv_prep, .x = kv, .w = *norm, .cos = t->cos[f], .sin = t->sin[f], .y = kv,
                   .T = ROWS, .d = s->d, .rd = s->rd, .eps = s->norm_eps, .act = KERN_BF16);
        worst = fmax(worst, rotated_error(kv, want, ROWS, s->d, s->rd));
    }
    /* Rounded to bf16 after the norm and after the rotation: 2^-8 each at most. */
    if (rc == 0)
        ctl_num_row(c, "rope.keys", worst, 0x1p-7, "relative error of a key's rotated part",
                    "window keys are rotated right at the last position", "position %d", t->pos[0]);
    return rc;
}

static int index_query_row(struct ctl_num *c, const struct tables *t)
{
    const struct model_shape *s = c->s;
    const int32_t w = s->index_dim;
    const int64_t n = (int64_t)ROWS * s->index_heads;
    uint16_t *q = ctl_num_hold(c, n * w, 2);
    double *want = ctl_num_hold(c, n * w, 8), got[1024], worst = 0;
    int rc = c->no_memory ? TOW_ENOMEM : 0;
    if (rc < 0) return rc;
    random_bf16(c, q, n * w);
    for (int64_t i = 0; i < n * w; i++) want[i] = kern_bf16_decode(q[i]);
    CTL_NUM_OP(c, rc, index_query, .q = q, .cos = t->cos[1], .sin = t->sin[1], .T = ROWS,
               .H = s->index_heads, .w = w, .rd = s->rd, .fmt = KERN_IK_BF16, .act = KERN_BF16);
    for (int64_t i = 0; rc == 0 && i < n; i++) {
        ctl_ref_rotate(want + i * w, w, s->rd, t->pos[i / s->index_heads], c->inv_freq[1], 1);
        for (int32_t a = 0; a < w; a++) { /* Hadamard is its own inverse */
            got[a] = 0;
            for (int32_t b = 0; b < w; b++) {
                double x = kern_bf16_decode(q[i * w + b]) / sqrt(w);
                got[a] += __builtin_popcount((unsigned)(a & b)) & 1 ? -x : x;
            }
        }
        double e = ctl_ref_rel(got, want + i * w, w);
        if (!(e <= worst)) worst = e;
    }
    /* Rounded to bf16 after the rotation and after the Hadamard transform, which keeps lengths:
     * 2^-8 each at most. */
    if (rc == 0)
        ctl_num_row(c, "rope.index_query", worst, 0x1p-7, "relative error of an index query",
                    "index queries are rotated in the right layout at the last position",
                    "position %d", t->pos[0]);
    return rc;
}

/* The last entry of the last page of one compressor. */
static int entry_row(struct ctl_num *c, int32_t at, bool index)
{
    const struct model_shape *s = c->s;
    const struct model_layer *L = &c->w->layers[at];
    const struct model_compressor *comp = index ? &L->index_comp : &L->comp;
    const int32_t e = index ? s->index_dim : s->d, ratio = L->ratio, width = comp->wkv.n;
    const int32_t n_rows = 2 * ratio;
    struct kern_kv_layout l;
    int rc = ctl_num_layout(c, &l, KERN_KV_BF16, KERN_IK_BF16, NULL);
    if (rc < 0) return rc;
    const int64_t entry = s->max_positions / ratio - 1, pos0 = (entry - 1) * ratio;
    const int32_t n_pages = (int32_t)kern_kv_pages_for(pos0 + n_rows, l.page_tokens);
    const struct kern_kv_layer *y = &l.layer[at];
    float *kv = ctl_num_hold(c, (int64_t)2 * n_rows * width, 4),
          *gate = ctl_num_hold(c, (int64_t)2 * n_rows * width, 4);
    uint8_t *pages = ctl_num_hold(c, 1, (size_t)l.page_bytes),
            *tail = ctl_num_hold(c, 1, (size_t)l.tail_bytes);
    uint32_t *ids = ctl_num_hold(c, n_pages, sizeof *ids); /* all of them page 0 */
    double *want = ctl_num_hold(c, e, 8), *got = ctl_num_hold(c, e, 8);
    float *stored = ctl_num_hold(c, e, 4);
    if (c->no_memory) return TOW_ENOMEM;
    for (int64_t i = 0; i < (int64_t)n_rows * width; i++) {
        kv[i] = (float)ctl_num_random(c);
        gate[i] = (float)ctl_num_random(c) * 4;
    }
    struct kern_seq seq = {.n_rows = n_rows,
                           .pos0 = pos0,
                           .page_ids = ids,
                           .n_pages = n_pages,
                           .tail = tail,
                           .topk = 1};
    CTL_NUM_OP(c, rc, compress, .kv = kv, .gate = gate, .ape = comp->ape, .norm = comp->norm,
               .inv_freq = c->inv_freq[1], .pages = pages, .layout = &l, .layer = at,
               .index = index, .seqs = &seq, .n_seqs = 1, .eps = s->norm_eps, .act = KERN_BF16);
    if (rc < 0) return rc;
    /* In double: entry 1 of these rows, unrotated (frequency 0), then rotated where it lies. */
    float *still = ctl_num_hold(c, s->rd / 2, 4);
    if (!still) return TOW_ENOMEM;
    ctl_ref_entry(comp, ratio, kv, gate, 1, e, s->rd, still, s->norm_eps, false, want);
    ctl_ref_rotate(want, e, s->rd, entry * ratio, c->inv_freq[1], 1);
    if (index) {
        kern_ik_load(KERN_IK_BF16, pages + y->index_off, y->per_page, entry % y->per_page, stored,
                     e);
        for (int32_t a = 0; a < e; a++)
            for (int32_t b = 0; b < e; b++)
                got[a] +=
                    (__builtin_popcount((unsigned)(a & b)) & 1 ? -stored[b] : stored[b]) / sqrt(e);
    } else {
        kern_kv_load(KERN_KV_BF16, pages + y->main_off, y->per_page, entry % y->per_page, stored, e,
                     s->rd);
        for (int32_t a = 0; a < e; a++) got[a] = stored[a];
    }
    /* Rounded to bf16 four times at most (pooled, normed, rotated, transformed): 4 * 2^-8. */
    ctl_num_row(c,
                index        ? "rope.index_keys"
                : ratio == 4 ? "rope.entries"
                             : "rope.dense_entries",
                ctl_ref_rel(got + e - s->rd, want + e - s->rd, s->rd), 0x1p-6,
                "relative error of an entry's rotated part",
                index ? "index keys are rotated right at the last position"
                      : "compressed entries are rotated right at the last position",
                "layer %d, entry %lld at position %lld", at, (long long)entry,
                (long long)(entry * ratio));
    return 0;
}

int ctl_num_rope(struct ctl_num *c, struct tow_err *err)
{
    const int64_t half = c->s->rd / 2;
    struct tables t = {.pos = ctl_num_hold(c, ROWS, 4)};
    int32_t overlapping = -1, dense = -1;
    for (int f = 0; f < 2; f++) {
        t.cos[f] = ctl_num_hold(c, ROWS * half, 4);
        t.sin[f] = ctl_num_hold(c, ROWS * half, 4);
    }
    if (c->no_memory || c->s->rd > 1024)
        return tow_fail(err, TOW_ENOMEM, "numerics: no memory for rotations");
    for (int32_t r = 0; r < ROWS; r++) t.pos[r] = position(c, r);
    for (int32_t i = 0; i < c->n_layers; i++) {
        const int32_t ratio = c->s->ratios[c->layers[i]];
        if (kern_kv_overlaps(ratio)) overlapping = c->layers[i];
        if (ratio && !kern_kv_overlaps(ratio)) dense = c->layers[i];
    }
    int rc = table_row(c, &t);
    if (rc == 0) rc = heads_row(c, &t);
    if (rc == 0) rc = keys_row(c, &t);
    if (rc == 0 && overlapping >= 0) rc = index_query_row(c, &t);
    if (rc == 0 && overlapping >= 0) rc = entry_row(c, overlapping, true);
    if (rc == 0 && overlapping >= 0) rc = entry_row(c, overlapping, false);
    if (rc == 0 && dense >= 0) rc = entry_row(c, dense, false);
    return rc;
}
