/* kernels/hc/hc_cpu.c - hyper-connections: collapse the streams to one row, spread a result over
 * them.
 *
 * The mixes are a product of the flattened streams with fn and go through the linear op; what is
 * left is per row: a scale by the row's RMS, sigmoids, the Sinkhorn rounds on an hc x hc matrix, a
 * weighted sum.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/hc/hc.h"
#include "kernels/ops.h"

#include "common/base/err.h"

int KERN_ISA(kern_linear)(struct kern_stream *s, const struct kern_linear *p);
int KERN_ISA(kern_rmsnorm)(struct kern_stream *s, const struct kern_rmsnorm *p);
int KERN_ISA(kern_add)(struct kern_stream *s, const struct kern_add *p);

struct collapse_job {
    const struct kern_hc_collapse *p;
    const float *mixes; /* [T, fn.n] */
    uint8_t *scratch;
    size_t stride;
};

/* comb: softmax over rows, then columns and rows in turn divided by their sums. */
static void sinkhorn(float *c, int32_t hc, int32_t iters, float eps)
{
    for (int32_t j = 0; j < hc; j++) {
        float *row = c + j * hc, m = row[0], sum = 0.0f, e[16];
        for (int32_t k = 1; k < hc; k++) m = row[k] > m ? row[k] : m;
        v_store(e, v_exp(v_sub(v_loadn(row, hc), v_set1(m))));
        for (int32_t k = 0; k < hc; k++) sum += e[k];
        for (int32_t k = 0; k < hc; k++) row[k] = e[k] / sum + eps;
    }
    for (int32_t it = 0; it < iters; it++) {
        for (int32_t j = 0; it > 0 && j < hc; j++) {
            float sum = 0.0f;
            for (int32_t k = 0; k < hc; k++) sum += c[j * hc + k];
            for (int32_t k = 0; k < hc; k++) c[j * hc + k] /= sum + eps;
        }
        for (int32_t k = 0; k < hc; k++) {
            float sum = 0.0f;
            for (int32_t j = 0; j < hc; j++) sum += c[j * hc + k];
            for (int32_t j = 0; j < hc; j++) c[j * hc + k] /= sum + eps;
        }
    }
}

static void collapse_part(void *arg, int64_t t, int thread)
{
    const struct collapse_job *job = arg;
    const struct kern_hc_collapse *p = job->p;
    float *h = (float *)(job->scratch + job->stride * (size_t)thread), pre[KERN_HC_MAX];
    int32_t hc = p->hc, D = p->D;
    int64_t dp = kern_pad16(D), n = (int64_t)hc * D;
    float *x = h + kern_pad16(n); /* first the flat row, then the sum */
    const float *m = job->mixes + t * p->fn.n;

    kern_row_load(kern_at(p->h, t * n, p->act), p->act, n, h);
    float rs = 1.0f / sqrtf(kern_row_sumsq(h, n) / (float)n + p->norm_eps);
    for (int32_t j = 0; j < hc; j++)
        pre[j] = kern_sigmoid1(fmaf(m[j] * rs, kern_f32_at(p->scale, 0), kern_f32_at(p->base, j))) +
                 p->hc_eps;
    if (p->comb) {
        float *post = p->post + t * hc, *c = p->comb + t * hc * hc;
        for (int32_t j = 0; j < hc; j++)
            post[j] = 2.0f * kern_sigmoid1(fmaf(m[hc + j] * rs, kern_f32_at(p->scale, 1),
                                                kern_f32_at(p->base, hc + j)));
        for (int32_t j = 0; j < hc * hc; j++)
            c[j] = fmaf(m[2 * hc + j] * rs, kern_f32_at(p->scale, 2),
                        kern_f32_at(p->base, 2 * hc + j));
        sinkhorn(c, hc, p->iters, p->hc_eps);
    }
    for (int64_t i = 0; i < dp; i += 16) {
        int w = D - i < 16 ? (int)(D - i) : 16;
        v16 s = v_mul(v_set1(pre[0]), v_loadn(h + i, w));
        for (int32_t j = 1; j < hc; j++)
            s = v_fma(v_set1(pre[j]), v_loadn(h + (int64_t)j * D + i, w), s);
        v_store(x + i, s);
    }
    kern_row_store(kern_at_mut(p->x, t * D, p->act), p->act, D, x);
}

int KERN_ISA(kern_hc_collapse)(struct kern_stream *s, const struct kern_hc_collapse *p)
{
    struct collapse_job j = {.p = p};
    int64_t n = (int64_t)p->hc * p->D;
    if (p->T == 0) return 0;
    float *mixes = kern_scratch(s, KERN_SLOT_OP, (size_t)p->T * (size_t)p->fn.n * 4);
    j.scratch = kern_scratch_each(s, KERN_SLOT_OP2, (size_t)(kern_pad16(n) + kern_pad16(p->D)) * 4,
                                  &j.stride);
    if (!mixes || !j.scratch) return TOW_ENOMEM;
    struct kern_linear lin = {.x = p->h,
                              .w = p->fn,
                              .y = mixes,
                              .ld_x = n,
                              .ld_y = p->fn.n,
                              .T = p->T,
                              .N = p->fn.n,
                              .K = (int32_t)n,
                              .groups = 1,
                              .x_dtype = p->act,
                              .y_dtype = KERN_F32,
                              .aq = KERN_AQ_NONE};
    int rc = KERN_ISA(kern_linear)(s, &lin);
    if (rc < 0) return rc;
    j.mixes = mixes;
    kern_parallel(s, p->T, collapse_part, &j);
    return 0;
}

/* Sixteen elements of a row that need not end on a vector. */
V_INLINE v16 load_at(const void *x, int64_t i, int w, enum kern_dtype t)
{
    float f[16];
    if (w == 16)
        return t == KERN_F32 ? v_load((const float *)x + i) : v_load_bf16((const uint16_t *)x + i);
    kern_row_load(kern_at(x, i, t), t, w, f);
    return v_load(f);
}
V_INLINE void store_at(void *x, int64_t i, int w, enum kern_dtype t, v16 v)
{
    float f[16];
    v_store(f, v);
    kern_row_store(kern_at_mut(x, i, t), t, w, f);
}

static void expand_part(void *arg, int64_t t, int thread)
{
    const struct kern_hc_expand *p = arg;
    int32_t hc = p->hc, D = p->D;
    const float *post = p->post + t * hc, *c = p->comb + t * hc * hc;
    (void)thread;
    for (int32_t i = 0; i < D; i += 16) {
        int w = D - i < 16 ? D - i : 16;
        v16 y = load_at(p->y, t * D + i, w, p->act), h[KERN_HC_MAX];
        for (int32_t j = 0; j < hc; j++) h[j] = load_at(p->h, (t * hc + j) * D + i, w, p->act);
        for (int32_t k = 0; k < hc; k++) {
            v16 s = v_mul(v_set1(post[k]), y);
            for (int32_t j = 0; j < hc; j++) s = v_fma(v_set1(c[j * hc + k]), h[j], s);
            store_at(p->out, (t * hc + k) * D + i, w, p->act, s);
        }
    }
}

int KERN_ISA(kern_hc_expand)(struct kern_stream *s, const struct kern_hc_expand *p)
{
    kern_parallel(s, p->T, expand_part, (void *)p);
    return 0;
}

int KERN_ISA(kern_hc_boundary)(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    const struct kern_add add = kern_hc_boundary_add(p);
    const struct kern_hc_expand expand = kern_hc_boundary_expand(p);
    const struct kern_hc_collapse collapse = kern_hc_boundary_collapse(p);
    const struct kern_rmsnorm norm = kern_hc_boundary_norm(p);
    int rc = p->routed ? KERN_ISA(kern_add)(s, &add) : 0;
    if (rc == 0 && p->y) rc = KERN_ISA(kern_hc_expand)(s, &expand);
    if (rc == 0) rc = KERN_ISA(kern_hc_collapse)(s, &collapse);
    return rc < 0 ? rc : KERN_ISA(kern_rmsnorm)(s, &norm);
}

static void mtp_mix_part(void *arg, int64_t t, int thread)
{
    const struct kern_mtp_mix *p = arg;
    int32_t D = p->D;
    (void)thread;
    for (int32_t i = 0; i < D; i += 16) {
        int w = D - i < 16 ? D - i : 16;
        v16 e = load_at(p->e, t * D + i, w, p->act);
        for (int32_t j = 0; j < p->hc; j++) {
            int64_t at = (t * p->hc + j) * D + i;
            store_at(p->out, at, w, p->act, v_add(e, load_at(p->g, at, w, p->act)));
        }
    }
}

int KERN_ISA(kern_mtp_mix)(struct kern_stream *s, const struct kern_mtp_mix *p)
{
    kern_parallel(s, p->T, mtp_mix_part, (void *)p);
    return 0;
}

enum { ELEMENTS = 16384 }; /* of a part of the element-wise ops */

static void add_part(void *arg, int64_t part, int thread)
{
    const struct kern_add *p = arg;
    int64_t end = (part + 1) * ELEMENTS < p->n ? (part + 1) * ELEMENTS : p->n;
    (void)thread;
    for (int64_t i = part * ELEMENTS; i < end; i += 16) {
        int w = end - i < 16 ? (int)(end - i) : 16;
        v16 a = w == 16 ? v_load(p->a + i) : v_loadn(p->a + i, w);
        store_at(p->y, i, w, p->act, v_add(a, load_at(p->b, i, w, p->act)));
    }
}

int KERN_ISA(kern_add)(struct kern_stream *s, const struct kern_add *p)
{
    kern_parallel(s, (p->n + ELEMENTS - 1) / ELEMENTS, add_part, (void *)p);
    return 0;
}

static void swiglu_part(void *arg, int64_t part, int thread)
{
    const struct kern_swiglu *p = arg;
    int64_t n = (int64_t)p->T * p->I, end = (part + 1) * ELEMENTS < n ? (part + 1) * ELEMENTS : n;
    (void)thread;
    for (int64_t i = part * ELEMENTS; i < end; i += 16) {
        int w = end - i < 16 ? (int)(end - i) : 16;
        v16 y = kern_gate(load_at(p->g, i, w, p->act), load_at(p->u, i, w, p->act), p->limit);
        store_at(p->y, i, w, p->act, y);
    }
}

int KERN_ISA(kern_swiglu)(struct kern_stream *s, const struct kern_swiglu *p)
{
    kern_parallel(s, ((int64_t)p->T * p->I + ELEMENTS - 1) / ELEMENTS, swiglu_part, (void *)p);
    return 0;
}
