/* ctl/numerics_ops.c - hyper-connections, routed scaling, expert formats, dense products: ops on
 * the checkpoint's weights and the sample prompt's activations, against double. */
#include "deploy/ctl/numerics_impl.h"

#include "common/base/err.h"
#include "kernels/numeric.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double round_none(double x)
{
    return x;
}

static enum kern_act_quant aq_of(const struct kern_weight *w)
{
    return w->fmt == KERN_W_F32 || w->fmt == KERN_W_BF16 ? KERN_AQ_NONE : KERN_AQ_A128;
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* ------------------------------------------------------------------ hyper-connections */

/* What collapse gives for one row: x [D], post [hc], comb [hc, hc], one after the other. */
static int64_t mix_floats(const struct model_shape *s)
{
    return s->D + s->hc + (int64_t)s->hc * s->hc;
}

/* round: what the matrix unit would do to the product's two inputs. fn [n, hc*D] in double. */
static void mix(const struct model_shape *s, const struct model_hc *hc, const double *fn,
                const double *h, double (*round)(double), double *out)
{
    const int32_t H = s->hc, n = (2 + H) * H, D = s->D;
    double m[(2 + 16) * 16] = {0}, pre[16], *x = out, *post = out + D, *C = post + H, sq = 0;
    for (int64_t i = 0; i < (int64_t)H * D; i++) sq += h[i] * h[i];
    const double rs = 1 / sqrt(sq / (H * D) + s->norm_eps);
    for (int32_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < (int64_t)H * D; i++)
            m[j] += round(fn[(int64_t)j * H * D + i]) * round(h[i]);
        m[j] *= rs;
    }
    for (int32_t j = 0; j < H; j++) {
        pre[j] = sigmoid(m[j] * hc->scale[0] + hc->base[j]) + s->hc_eps;
        post[j] = 2 * sigmoid(m[H + j] * hc->scale[1] + hc->base[H + j]);
    }
    for (int32_t j = 0; j < H; j++) {
        double top = -INFINITY, sum = 0;
        for (int32_t k = 0; k < H; k++) {
            C[j * H + k] = m[2 * H + j * H + k] * hc->scale[2] + hc->base[2 * H + j * H + k];
            top = fmax(top, C[j * H + k]);
        }
        for (int32_t k = 0; k < H; k++) sum += C[j * H + k] = exp(C[j * H + k] - top);
        for (int32_t k = 0; k < H; k++) C[j * H + k] = C[j * H + k] / sum + s->hc_eps;
    }
    for (int32_t it = 0; it < 2 * s->hc_iters - 1; it++) /* columns, rows, columns, ... */
        for (int32_t a = 0; a < H; a++) {
            double sum = 0;
            for (int32_t b = 0; b < H; b++) sum += it % 2 ? C[a * H + b] : C[b * H + a];
            for (int32_t b = 0; b < H; b++)
                *(it % 2 ? &C[a * H + b] : &C[b * H + a]) /= sum + s->hc_eps;
        }
    for (int32_t i = 0; i < D; i++) {
        x[i] = 0;
        for (int32_t j = 0; j < H; j++) x[i] += pre[j] * h[(int64_t)j * D + i];
    }
}

/* The larger relative error of what is mixed: the collapsed row, and the weights of the expand. */
static double mix_error(const struct model_shape *s, const double *a, const double *b)
{
    return fmax(ctl_ref_rel(a, b, s->D), ctl_ref_rel(a + s->D, b + s->D, mix_floats(s) - s->D));
}

struct mhc_tally {
    double ours, tf32, bf16, cos_ours, cos_tf32, cos_bf16, expand;
};

static int mhc_layer(struct ctl_num *c, int32_t at, struct mhc_tally *t, struct tow_err *err)
{
    const size_t mark = ctl_num_mark(c);
    const struct model_shape *s = c->s;
    const struct model_hc *hc = &c->w->layers[at].hc_ffn;
    const struct ctl_num_tensor *h = ctl_num_find(c, at, "streams_mid", NULL);
    const int32_t R = CTL_NUM_ROWS, H = s->hc, D = s->D;
    const int64_t n = (int64_t)H * D, m = mix_floats(s);
    float *hf = ctl_num_hold(c, R * n, 4), *x = ctl_num_hold(c, (int64_t)R * D, 4);
    float *post = ctl_num_hold(c, R * H, 4), *comb = ctl_num_hold(c, R * H * H, 4);
    float *out = ctl_num_hold(c, R * n, 4);
    double *fn = ctl_num_hold(c, hc->fn.n * n, 8), *hd = ctl_num_hold(c, n, 8);
    double *want = ctl_num_hold(c, m, 8), *got = ctl_num_hold(c, m, 8),
           *other = ctl_num_hold(c, m, 8);
    int rc = 0;
    if (!h || H > 16) return tow_fail(err, TOW_EINVAL, "numerics: layer %d gave no streams", at);
    if (c->no_memory) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for streams");
    for (int32_t j = 0; j < hc->fn.n; j++) ctl_ref_weight_row(&hc->fn, j, fn + j * n);
    for (int32_t r = 0; r < R; r++)
        for (int64_t i = 0; i < n; i++) hf[r * n + i] = (float)ctl_num_at(c, h, c->T - R + r, i);
    CTL_NUM_OP(c, rc, hc_collapse, .h = hf, .fn = hc->fn, .base = hc->base, .scale = hc->scale,
               .x = x, .post = post, .comb = comb, .T = R, .hc = H, .D = D, .iters = s->hc_iters,
               .hc_eps = s->hc_eps, .norm_eps = s->norm_eps, .act = KERN_F32);
    CTL_NUM_OP(c, rc, hc_expand, .y = x, .h = hf, .post = post, .comb = comb, .out = out, .T = R,
               .hc = H, .D = D, .act = KERN_F32);
    for (int32_t r = 0; rc == 0 && r < R; r++) {
        for (int64_t i = 0; i < n; i++) hd[i] = hf[r * n + i];
        for (int32_t i = 0; i < D; i++) got[i] = x[(int64_t)r * D + i];
        for (int32_t i = 0; i < H; i++) got[D + i] = post[r * H + i];
        for (int32_t i = 0; i < H * H; i++) got[D + H + i] = comb[r * H * H + i];
        mix(s, hc, fn, hd, round_none, want);
        t->ours = fmax(t->ours, mix_error(s, got, want));
        t->cos_ours = fmin(t->cos_ours, ctl_ref_cos(got, want, m));
        mix(s, hc, fn, hd, ctl_ref_tf32, other);
        t->tf32 = fmax(t->tf32, mix_error(s, other, want));
        t->cos_tf32 = fmin(t->cos_tf32, ctl_ref_cos(other, want, m));
        mix(s, hc, fn, hd, ctl_ref_bf16, other);
        t->bf16 = fmax(t->bf16, mix_error(s, other, want));
        t->cos_bf16 = fmin(t->cos_bf16, ctl_ref_cos(other, want, m));
        for (int32_t k = 0; k < H; k++)
            for (int32_t i = 0; i < D; i++) {
                double sum = (double)post[r * H + k] * x[(int64_t)r * D + i], size = fabs(sum);
                for (int32_t j = 0; j < H; j++) {
                    double add = (double)comb[(r * H + j) * H + k] * hd[(int64_t)j * D + i];
                    sum += add;
                    size += fabs(add);
                }
                double error = size > 0 ? fabs(out[r * n + (int64_t)k * D + i] - sum) / size : 0;
                if (!(error <= t->expand)) t->expand = error;
            }
    }
    ctl_num_release(c, mark);
    return rc;
}

int ctl_num_mhc(struct ctl_num *c, struct tow_err *err)
{
    struct mhc_tally t = {.cos_ours = 1, .cos_tf32 = 1, .cos_bf16 = 1};
    for (int32_t i = 0; i < c->n_layers; i++) {
        int rc = mhc_layer(c, c->layers[i], &t, err);
        if (rc < 0) return rc;
    }
    /* tf32 is what other servers run here. Below 2^-18 both are the noise of sums in float32
     * (hc * D of 2^-24 each, as they add up at random), which happens where fn is stored in
     * bf16. */
    ctl_num_row(c, "mhc.collapse", t.ours, fmax(t.tf32, 0x1p-18),
                "relative error of the mix; the bound is what tf32 would give",
                "hyper-connections are mixed at least as exactly as in tf32",
                "in tf32 %.2e, in bf16 %.2e (%.0f times ours); 1 - cosine %.1e, %.1e, %.1e", t.tf32,
                t.bf16, t.ours > 0 ? t.bf16 / t.ours : 0, 1 - t.cos_ours, 1 - t.cos_tf32,
                1 - t.cos_bf16);
    /* hc + 1 products in one chain. */
    ctl_num_row(c, "mhc.expand", t.expand, (c->s->hc + 1) * 0x1p-24,
                "largest error, relative to the summands",
                "results are spread over the streams right", "%d rows of %d layers", CTL_NUM_ROWS,
                c->n_layers);
    return 0;
}

/* ------------------------------------------------------------------ experts in double */

/* out [D] += round(expert(x)); x1 and x3 [D] are x, quantized already for w1 and w3; weight goes in
 * before w2. */
static int expert(const struct kern_weight *w1, const struct kern_weight *w2,
                  const struct kern_weight *w3, const double *x1, const double *x3, double weight,
                  double limit, enum kern_act_quant aq, double *out)
{
    const int32_t D = w1->k, I = w1->n;
    double *row = malloc((size_t)(D > I ? D : I) * sizeof *row), *y = malloc((size_t)I * sizeof *y);
    if (!row || !y) {
        free(row), free(y);
        return TOW_ENOMEM;
    }
    for (int32_t i = 0; i < I; i++) {
        double g = 0, u = 0;
        ctl_ref_weight_row(w1, i, row);
        for (int32_t k = 0; k < D; k++) g += row[k] * x1[k];
        ctl_ref_weight_row(w3, i, row);
        for (int32_t k = 0; k < D; k++) u += row[k] * x3[k];
        g = ctl_ref_bf16(g), u = ctl_ref_bf16(u);
        if (limit > 0) g = fmin(g, limit), u = fmax(-limit, fmin(u, limit));
        y[i] = ctl_ref_bf16(g * sigmoid(g) * u * weight);
    }
    ctl_ref_aq(y, I, aq, w2->input_scale);
    for (int32_t n = 0; n < D; n++) {
        double sum = 0;
        ctl_ref_weight_row(w2, n, row);
        for (int32_t k = 0; k < I; k++) sum += row[k] * y[k];
        out[n] += ctl_ref_bf16(sum);
    }
    free(row), free(y);
    return 0;
}

/* ------------------------------------------------------------------ routed scaling */

/* Weights of the chosen experts before the factor, from x in double. */
static void route_weights(const struct ctl_num *c, const struct model_layer *L, const double *x,
                          const int32_t *chosen, double *weight, double *row)
{
    const struct model_shape *s = c->s;
    double sum = 0, all = 0;
    double top = -INFINITY;
    double logit[64] = {0};
    if (s->score == KERN_SCORE_SOFTMAX) {
        for (int pass = 0; pass < 2; pass++)
            for (int32_t e = 0; e < s->E; e++) {
                double z = 0;
                ctl_ref_weight_row(&L->gate, e, row);
                for (int32_t i = 0; i < s->D; i++) z += row[i] * x[i];
                if (pass == 0)
                    top = fmax(top, z);
                else
                    all += exp(z - top);
            }
    }
    for (int32_t j = 0; j < s->k && j < 64; j++) {
        ctl_ref_weight_row(&L->gate, chosen[j], row);
        for (int32_t i = 0; i < s->D; i++) logit[j] += row[i] * x[i];
        double z = logit[j];
        weight[j] = s->score == KERN_SCORE_SOFTMAX   ? exp(z - top) / all
                    : s->score == KERN_SCORE_SIGMOID ? sigmoid(z)
                                                     : sqrt(fmax(z, 0) + log1p(exp(-fabs(z))));
        sum += weight[j];
    }
    if (s->norm_topk && s->score != KERN_SCORE_SOFTMAX)
        for (int32_t j = 0; j < s->k; j++) weight[j] /= sum;
}

/* Routed part of one layer: what the engine added, and what double gives with factor^0, ^1, ^2. */
static int scaling_layer(struct ctl_num *c, int32_t at, int32_t R, double *engine, double *ref[3])
{
    const struct model_shape *s = c->s;
    const struct model_layer *L = &c->w->layers[at];
    const struct ctl_num_tensor *x = ctl_num_find(c, at, "ffn_x", NULL);
    const struct ctl_num_tensor *chosen = ctl_num_find(c, at, "experts", NULL);
    const struct ctl_num_tensor *shared = ctl_num_find(c, at, "shared_out", NULL);
    const struct ctl_num_tensor *out = ctl_num_find(c, at, "ffn_out", NULL);
    double *xd = malloc((size_t)s->D * 8), *xq = malloc((size_t)s->D * 8),
           *row = malloc((size_t)s->D * 8);
    double weight[64];
    int rc = x && chosen && shared && out && xd && xq && row && s->k <= 64 ? 0 : TOW_ENOMEM;
    for (int32_t r = 0; rc == 0 && r < R; r++) {
        const int64_t pos = c->T - R + r;
        const int32_t *ids = ctl_num_row_of(c, chosen, pos);
        for (int32_t i = 0; i < s->D; i++) xq[i] = xd[i] = ctl_num_at(c, x, pos, i);
        route_weights(c, L, xd, ids, weight, row);
        ctl_ref_aq(xq, s->D, aq_of(&L->w1[0]), 0);
        for (int p = 0; p < 3; p++) {
            double *to = ref[p] + (int64_t)r * s->D;
            memset(to, 0, (size_t)s->D * sizeof *to);
            for (int32_t j = 0; rc == 0 && j < s->k; j++)
                rc = expert(&L->w1[ids[j]], &L->w2[ids[j]], &L->w3[ids[j]], xq, xq,
                            weight[j] * pow(s->route_scale, p), s->swiglu_limit, aq_of(&L->w1[0]),
                            to);
        }
        for (int32_t i = 0; i < s->D; i++)
            engine[(int64_t)r * s->D + i] =
                ctl_num_at(c, out, pos, i) - ctl_num_at(c, shared, pos, i);
    }
    free(xd), free(xq), free(row);
    return rc;
}

int ctl_num_scaling(struct ctl_num *c, struct tow_err *err)
{
    const size_t mark = ctl_num_mark(c);
    const int32_t R = 2;
    const int64_t n = (int64_t)R * c->s->D;
    const double f = c->s->route_scale;
    double *engine = ctl_num_hold(c, n, 8), *ref[3], err_of[3] = {0}, worst = -1, fitted = 0;
    for (int p = 0; p < 3; p++) ref[p] = ctl_num_hold(c, n, 8);
    if (c->no_memory) return tow_fail(err, TOW_ENOMEM, "numerics: no memory for experts");
    int32_t layer = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        double dot = 0, size = 0;
        int rc = scaling_layer(c, c->layers[i], R, engine, ref);
        if (rc < 0) return tow_fail(err, rc, "numerics: no memory for experts");
        for (int64_t j = 0; j < n; j++) dot += engine[j] * ref[1][j], size += ref[1][j] * ref[1][j];
        double times = dot > 0 && size > 0 && fabs(log(f)) > 1e-3 ? 1 + log(dot / size) / log(f)
                       : size > 0                                 ? dot / size
                                                                  : NAN;
        if (!(fabs(times - 1) <= worst)) {
            worst = fabs(times - 1);
            fitted = times;
            layer = c->layers[i];
            for (int p = 0; p < 3; p++) err_of[p] = ctl_ref_rel(engine, ref[p], n);
        }
    }
    /* Half way to the nearest wrong answers (0 and 2) is 0.5; bf16 of the sum, from which the
     * routed part is told by subtracting the shared one, keeps below half of that. */
    ctl_num_row(
        c, "experts.scaling", worst, 0.25, "distance from 1 of how often the factor is applied",
        "the routed scaling factor is applied exactly once",
        "worst layer %d: factor %g applied %.3f times; distance to double with factor^0, ^1, "
        "^2: %.3f, %.4f, %.3f",
        layer, f, fitted, err_of[0], err_of[1], err_of[2]);
    ctl_num_release(c, mark);
    return 0;
}

/* ------------------------------------------------------------------ expert formats */

static void set_e4m3_block(const double *w, int32_t n, int32_t k, struct kern_weight *out,
                           uint8_t *data, uint8_t *scale)
{
    const int32_t ld = (k + 127) / 128;
    for (int32_t bn = 0; bn < n; bn += 128)
        for (int32_t bk = 0; bk < k; bk += 128) {
            double amax = 0;
            for (int32_t i = bn; i < n && i < bn + 128; i++)
                for (int32_t j = bk; j < k && j < bk + 128; j++)
                    amax = fmax(amax, fabs(w[(int64_t)i * k + j]));
            uint8_t code = kern_e4m3_scale_code((float)amax);
            scale[bn / 128 * ld + bk / 128] = code;
            for (int32_t i = bn; i < n && i < bn + 128; i++)
                for (int32_t j = bk; j < k && j < bk + 128; j++)
                    data[(int64_t)i * k + j] =
                        kern_e4m3_encode((float)w[(int64_t)i * k + j] * kern_ue8m0_inverse(code));
        }
    *out = (struct kern_weight){.fmt = KERN_W_FP8,
                                .sfmt = KERN_S_UE8M0,
                                .row_bytes = k,
                                .scale_row_bytes = ld,
                                .scale2 = 1};
}

static void set_mxfp4(const double *w, int32_t n, int32_t k, struct kern_weight *out, uint8_t *data,
                      uint8_t *scale)
{
    float block[32];
    for (int64_t i = 0; i < (int64_t)n * k; i += 32) {
        for (int j = 0; j < 32; j++) block[j] = (float)w[i + j];
        kern_quant_e2m1(block, 32, 32, data + i / 2, scale + i / 32);
    }
    *out = (struct kern_weight){.fmt = KERN_W_MXFP4,
                                .sfmt = KERN_S_UE8M0,
                                .row_bytes = k / 2,
                                .scale_row_bytes = k / 32,
                                .scale2 = 1};
}

static void set_nvfp4(const double *w, int32_t n, int32_t k, struct kern_weight *out, uint8_t *data,
                      uint8_t *scale)
{
    double amax = 0;
    for (int64_t i = 0; i < (int64_t)n * k; i++) amax = fmax(amax, fabs(w[i]));
    const float scale2 = amax > 0 ? (float)(amax / (6 * 448)) : 1.0f;
    for (int64_t i = 0; i < (int64_t)n * k; i += 16) {
        double top = 0;
        for (int j = 0; j < 16; j++) top = fmax(top, fabs(w[i + j]));
        uint8_t code = kern_e4m3_encode((float)(top / 6 / scale2));
        double s = (double)kern_e4m3_decode(code) * scale2;
        scale[i / 16] = code;
        for (int j = 0; j < 16; j += 2) {
            uint8_t lo = s > 0 ? kern_e2m1_encode((float)(w[i + j] / s)) : 0;
            uint8_t hi = s > 0 ? kern_e2m1_encode((float)(w[i + j + 1] / s)) : 0;
            data[(i + j) / 2] = (uint8_t)(lo | hi << 4);
        }
    }
    *out = (struct kern_weight){.fmt = KERN_W_NVFP4,
                                .sfmt = KERN_S_E4M3,
                                .row_bytes = k / 2,
                                .scale_row_bytes = k / 16,
                                .scale2 = scale2};
}

static const char *fmt_name(enum kern_wfmt f)
{
    static const char *const names[] = {"f32", "bf16", "fp8", "fp4", "nvfp4"};
    return names[f];
}

/* The matrix w in another format; held memory. */
static int encode(struct ctl_num *c, const struct kern_weight *w, enum kern_wfmt fmt,
                  struct kern_weight *out)
{
    const int64_t n = (int64_t)w->n * w->k;
    double *d = malloc((size_t)n * sizeof *d);
    uint8_t *data = ctl_num_hold(c, n, 1), *scale = ctl_num_hold(c, n / 16 + 1, 1);
    if (!d || c->no_memory) {
        free(d);
        return TOW_ENOMEM;
    }
    for (int32_t i = 0; i < w->n; i++) ctl_ref_weight_row(w, i, d + (int64_t)i * w->k);
    if (fmt == KERN_W_FP8) set_e4m3_block(d, w->n, w->k, out, data, scale);
    if (fmt == KERN_W_MXFP4) set_mxfp4(d, w->n, w->k, out, data, scale);
    if (fmt == KERN_W_NVFP4) set_nvfp4(d, w->n, w->k, out, data, scale);
    out->n = w->n, out->k = w->k;
    out->data = data, out->scale = scale;
    free(d);
    return 0;
}

enum { EXPERTS = 2 };

/* The moe op on two experts in one format against double with the same, dequantized. */
static int experts_in(struct ctl_num *c, const struct kern_weight w[3][EXPERTS],
                      enum kern_act_quant aq, const double *x, const uint16_t *xb, double *got,
                      double *error)
{
    const struct model_shape *s = c->s;
    const int32_t R = CTL_NUM_ROWS, D = s->D;
    int32_t *ids = ctl_num_hold(c, R * EXPERTS, 4);
    float *weights = ctl_num_hold(c, R * EXPERTS, 4), *out = ctl_num_hold(c, (int64_t)R * D, 4);
    double *want = ctl_num_hold(c, (int64_t)R * D, 8), *xq[2];
    for (int i = 0; i < 2; i++) xq[i] = ctl_num_hold(c, D, 8);
    int rc = c->no_memory ? TOW_ENOMEM : 0;
    for (int32_t i = 0; rc == 0 && i < R * EXPERTS; i++) {
        ids[i] = i % EXPERTS;
        weights[i] = (float)s->route_scale * (i % EXPERTS ? 0.375f : 0.625f);
    }
    CTL_NUM_OP(c, rc, moe, .x = xb, .experts = ids, .weights = weights, .w1 = w[0], .w2 = w[1],
               .w3 = w[2], .out = out, .T = R, .D = D, .I = w[0][0].n, .E = EXPERTS, .k = EXPERTS,
               .limit = s->swiglu_limit, .aq = aq, .act = KERN_BF16);
    for (int32_t r = 0; rc == 0 && r < R; r++) {
        for (int32_t j = 0; rc == 0 && j < EXPERTS; j++) {
            for (int i = 0; i < 2; i++) {
                memcpy(xq[i], x + (int64_t)r * D, (size_t)D * sizeof **xq);
                ctl_ref_aq(xq[i], D, aq, w[2 * i][j].input_scale);
            }
            rc = expert(&w[0][j], &w[1][j], &w[2][j], xq[0], xq[1], weights[r * EXPERTS + j],
                        s->swiglu_limit, aq, want + (int64_t)r * D);
        }
        for (int32_t i = 0; i < D; i++) got[(int64_t)r * D + i] = out[(int64_t)r * D + i];
    }
    if (rc == 0) *error = ctl_ref_rel(got, want, (int64_t)R * D);
    return rc;
}

/* The two experts as they are, or in another format; 4-bit activations need an input scale. */
static int experts_as(struct ctl_num *c, const struct kern_weight w[3][EXPERTS], enum kern_wfmt fmt,
                      double x_amax, struct kern_weight v[3][EXPERTS])
{
    int rc = 0;
    for (int m = 0; m < 3; m++)
        for (int j = 0; rc == 0 && j < EXPERTS; j++) {
            v[m][j] = w[m][j];
            if (fmt != w[m][j].fmt) rc = encode(c, &w[m][j], fmt, &v[m][j]);
            if (!(v[m][j].input_scale > 0)) v[m][j].input_scale = (float)(x_amax / (6 * 448));
        }
    return rc;
}

int ctl_num_experts(struct ctl_num *c, struct tow_err *err)
{
    const size_t mark = ctl_num_mark(c);
    const int32_t at = c->layers[c->n_layers - 1], R = CTL_NUM_ROWS, D = c->s->D;
    const struct model_layer *L = &c->w->layers[at];
    const struct ctl_num_tensor *tx = ctl_num_find(c, at, "ffn_x", NULL);
    const struct ctl_num_tensor *chosen = ctl_num_find(c, at, "experts", NULL);
    double *x = ctl_num_hold(c, (int64_t)R * D, 8), *own = ctl_num_hold(c, (int64_t)R * D, 8);
    double *got = ctl_num_hold(c, (int64_t)R * D, 8), x_amax = 1e-4;
    uint16_t *xb = ctl_num_hold(c, (int64_t)R * D, 2);
    if (!tx || !chosen || c->no_memory)
        return tow_fail(err, TOW_ENOMEM, "numerics: no memory for experts");
    const int32_t *ids = ctl_num_row_of(c, chosen, c->T - 1);
    struct kern_weight w[3][EXPERTS];
    for (int j = 0; j < EXPERTS; j++) {
        int32_t e = c->s->k > 1 ? ids[j] : (ids[0] + j) % c->s->E;
        w[0][j] = L->w1[e], w[1][j] = L->w2[e], w[2][j] = L->w3[e];
    }
    for (int32_t r = 0; r < R; r++) {
        memcpy(xb + (int64_t)r * D, ctl_num_row_of(c, tx, c->T - R + r), (size_t)D * 2);
        for (int32_t i = 0; i < D; i++) {
            x[(int64_t)r * D + i] = ctl_num_at(c, tx, c->T - R + r, i);
            x_amax = fmax(x_amax, fabs(x[(int64_t)r * D + i]));
        }
    }
    const enum kern_wfmt own_fmt = w[0][0].fmt;
    const struct {
        const char *suffix;
        enum kern_wfmt fmt;
        enum kern_act_quant aq;
    } ways[] = {{"", own_fmt, aq_of(&w[0][0])}, /* first: the others are compared with it */
                {"", KERN_W_MXFP4, KERN_AQ_A128},       {"", KERN_W_NVFP4, KERN_AQ_A128},
                {".w4a16", KERN_W_NVFP4, KERN_AQ_NONE}, {".w4a4", KERN_W_NVFP4, KERN_AQ_NVFP4},
                {"", KERN_W_FP8, KERN_AQ_A128}};
    /* Where a float32 sum and the exact one fall on two sides of a bf16 rounding (fewer than one in
     * a hundred of the inner values), that value moves by a bf16 step, and by up to 2^-4 of itself
     * if an e4m3 code turns with it: sqrt(0.01) * 2^-4 of the whole at the very worst. An e2m1 code
     * moves it by up to a third of its block's largest, but turns only once in 2^6 such steps. */
    const double bound = 6e-3;
    for (size_t f = 0; f < sizeof ways / sizeof *ways; f++) {
        struct kern_weight v[3][EXPERTS];
        const bool is_own = ways[f].fmt == own_fmt;
        const size_t inner = ctl_num_mark(c);
        double error = 0;
        char name[32];
        if (f > 0 && is_own && !ways[f].suffix[0]) continue;
        if (!is_own && (w[0][0].k % 32 || w[1][0].k % 32)) continue;
        int rc = experts_as(c, w, ways[f].fmt, x_amax, v);
        if (rc == 0) rc = experts_in(c, v, ways[f].aq, x, xb, f == 0 ? own : got, &error);
        if (rc < 0) return rc;
        snprintf(name, sizeof name, "experts.%s%s", fmt_name(ways[f].fmt), ways[f].suffix);
        ctl_num_row(c, name, error, bound, "relative error of the routed experts' output",
                    f == 0 ? "the checkpoint's expert format is read right"
                           : "experts in this format are read right too",
                    "layer %d, %s; moves the output by %.3f%s", at,
                    is_own ? "the checkpoint's own weights" : "re-encoded here",
                    f == 0 ? 0 : ctl_ref_rel(got, own, (int64_t)R * D),
                    ways[f].aq == KERN_AQ_NVFP4 && !(w[1][0].input_scale > 0)
                        ? " (the checkpoint has no input scales; these are made up)"
                        : "");
        ctl_num_release(c, inner);
    }
    ctl_num_release(c, mark);
    return 0;
}

/* ------------------------------------------------------------------ dense products */

struct product_tally {
    double value, bound;
    char what[48];
    int32_t n;
};

/* The linear op on one weight and rows of a captured tensor, against double. groups: 0, or those of
 * wo_a, whose input stays as it is while the weight is rounded to bf16 instead. */
static int product(struct ctl_num *c, int32_t at, const char *name, const struct kern_weight *w,
                   const char *input, int32_t groups, struct product_tally *tally)
{
    const size_t mark = ctl_num_mark(c);
    const struct ctl_num_tensor *x = w->data ? ctl_num_find(c, at, input, NULL) : NULL;
    const bool is_wo_a = groups > 0;
    const int32_t R = CTL_NUM_ROWS, K = w->k, G = is_wo_a ? groups : 1, N = w->n / G;
    const int32_t step = w->n > CTL_NUM_COLUMNS ? w->n / CTL_NUM_COLUMNS : 1;
    const int64_t ld = (int64_t)G * K;
    const enum kern_act_quant aq = is_wo_a ? KERN_AQ_NONE : aq_of(w);
    if (!x || x->width != ld || x->elem != MODEL_ELEM_BF16) return 0;
    uint16_t *xb = ctl_num_hold(c, R * ld, 2);
    float *y = ctl_num_hold(c, (int64_t)R * w->n, 4);
    double *xq = ctl_num_hold(c, R * ld, 8), *row = ctl_num_hold(c, K, 8);
    int rc = c->no_memory ? TOW_ENOMEM : 0;
    for (int32_t r = 0; rc == 0 && r < R; r++) {
        memcpy(xb + r * ld, ctl_num_row_of(c, x, c->T - R + r), (size_t)ld * 2);
        for (int64_t i = 0; i < ld; i++) xq[r * ld + i] = ctl_num_at(c, x, c->T - R + r, i);
        ctl_ref_aq(xq + r * ld, ld, aq, 0);
    }
    CTL_NUM_OP(c, rc, linear, .x = xb, .w = *w, .y = y, .ld_x = ld, .ld_y = w->n, .T = R, .N = N,
               .K = K, .groups = G, .x_dtype = KERN_BF16, .y_dtype = KERN_F32, .aq = aq,
               .round_w = is_wo_a);
    /* K products are added in some order: each addition rounds by at most 2^-24 of the summands so
     * far. */
    const double bound = K * 0x1p-24;
    struct product_tally *t = &tally[w->fmt];
    for (int32_t n = 0; rc == 0 && n < w->n; n += step) {
        ctl_ref_weight_row(w, n, row);
        for (int32_t i = 0; is_wo_a && i < K; i++) row[i] = ctl_ref_bf16(row[i]);
        for (int32_t r = 0; r < R; r++) {
            const double *xr = xq + r * ld + (int64_t)(n / N) * K;
            double sum = 0, size = 0;
            for (int32_t i = 0; i < K; i++) {
                double p = xr[i] * row[i];
                sum += p, size += fabs(p);
            }
            double error = size > 0 ? fabs(y[(int64_t)r * w->n + n] - sum) / size : 0;
            if (!(error / bound <= t->value / t->bound)) {
                t->value = error, t->bound = bound;
                snprintf(t->what, sizeof t->what, "layer %d %s", at, name);
            }
        }
    }
    t->n++;
    ctl_num_release(c, mark);
    return rc;
}

int ctl_num_products(struct ctl_num *c, struct tow_err *err)
{
    struct product_tally t[KERN_W_NVFP4 + 1];
    int rc = 0;
    for (int f = 0; f <= KERN_W_NVFP4; f++) t[f] = (struct product_tally){.bound = 1};
    for (int32_t i = 0; rc == 0 && i < c->n_layers; i++) {
        const int32_t at = c->layers[i];
        const struct model_layer *L = &c->w->layers[at];
        const struct {
            const char *name;
            const struct kern_weight *w;
            const char *input;
            int32_t groups;
        } list[] = {{"wq_a", &L->wq_a, "attn_x", 0},
                    {"wq_b", &L->wq_b, "qr", 0},
                    {"wkv", &L->wkv, "attn_x", 0},
                    {"wo_a", &L->wo_a, "o", c->s->o_groups},
                    {"wo_b", &L->wo_b, "o_low", 0},
                    {"indexer.wq_b", &L->index_wq_b, "qr", 0},
                    {"indexer.weights_proj", &L->index_proj, "attn_x", 0},
                    {"compressor.wkv", &L->comp.wkv, "attn_x", 0},
                    {"compressor.wgate", &L->comp.wgate, "attn_x", 0},
                    {"gate", &L->gate, "ffn_x", 0},
                    {"shared.w1", &L->shared_w1, "ffn_x", 0},
                    {"shared.w3", &L->shared_w3, "ffn_x", 0},
                    {"shared.w2", &L->shared_w2, "shared_act", 0}};
        for (size_t j = 0; rc == 0 && j < sizeof list / sizeof *list; j++)
            rc = product(c, at, list[j].name, list[j].w, list[j].input, list[j].groups, t);
    }
    if (rc < 0) return tow_fail(err, rc, "numerics: products: %s", tow_err_text(rc));
    for (int f = 0; f <= KERN_W_NVFP4; f++) {
        char name[32];
        if (t[f].n == 0) continue;
        snprintf(name, sizeof name, "weights.%s", fmt_name((enum kern_wfmt)f));
        ctl_num_row(c, name, t[f].value, t[f].bound, "largest error, relative to the summands",
                    "dense weights of this format and their scales are read right",
                    "%d weights; nearest to its bound: %s", t[f].n, t[f].what);
    }
    return 0;
}
