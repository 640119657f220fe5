/* kernels/gemm/linear.c - shape contracts of linear and embed, and of stored weights. */
#include "common/base/err.h"
#include "kernels/gemm/weight.h"
#include "kernels/ops.h"

bool kern_weight_ok(const struct kern_weight *w, int64_t n, int64_t k)
{
    if (!w->data || w->n != n || w->k != k || n < 1 || k < 1) return false;
    if (w->sfmt != KERN_S_NONE && !w->scale) return false;
    switch (w->fmt) {
    case KERN_W_F32: return w->row_bytes >= 4 * k;
    case KERN_W_BF16: return w->row_bytes >= 2 * k;
    case KERN_W_FP8: return w->row_bytes >= k;
    case KERN_W_MXFP4: return w->row_bytes >= k / 2 && k % 32 == 0;
    case KERN_W_NVFP4: return w->row_bytes >= k / 2 && k % 16 == 0;
    }
    return false;
}

bool kern_aq_ok(const struct kern_weight *w, enum kern_act_quant aq, int64_t k)
{
    if (aq == KERN_AQ_NVFP4) return k % 16 == 0 && w->input_scale > 0;
    return aq == KERN_AQ_NONE || aq == KERN_AQ_A128;
}

int kern_linear_check(const struct kern_linear *p)
{
    if (p->T < 0 || p->N < 1 || p->K < 1 || p->groups < 1) return TOW_EINVAL;
    if (!kern_weight_ok(&p->w, (int64_t)p->groups * p->N, p->K)) return TOW_EINVAL;
    if (!kern_aq_ok(&p->w, p->aq, p->K)) return TOW_EINVAL;
    if (p->T == 0) return 0;
    bool ok = p->x && p->y && p->ld_x >= (int64_t)p->groups * p->K &&
              p->ld_y >= (int64_t)p->groups * p->N;
    return ok ? 0 : TOW_EINVAL;
}

static bool same_rows(const struct kern_linear *a, const struct kern_linear *b)
{
    return a->x == b->x && a->x_dtype == b->x_dtype && a->ld_x == b->ld_x && a->T == b->T &&
           (int64_t)a->groups * a->K == (int64_t)b->groups * b->K;
}

int kern_linears_check(const struct kern_linears *p)
{
    if (p->n < 0 || (p->n > 0 && !p->each)) return TOW_EINVAL;
    int rc = 0;
    for (int32_t i = 0; i < p->n && rc == 0; i++)
        rc = same_rows(&p->each[i], p->each) ? kern_linear_check(&p->each[i]) : TOW_EINVAL;
    if (rc < 0 || (!p->norm && !p->rope)) return rc;
    if (p->n == 0 || (p->norm && p->rope)) return TOW_EINVAL;
    const struct kern_linear *l = p->each;
    const int64_t width = (int64_t)l->groups * l->K;
    if (p->norm) {
        const struct kern_rmsnorm *m = p->norm;
        const bool ok = m->x == l->x && m->y == l->x && m->ld_x == l->ld_x && m->ld_y == l->ld_x &&
                        m->T == l->T && m->D == width && m->act == l->x_dtype;
        return ok ? kern_rmsnorm_check(m) : TOW_EINVAL;
    }
    const struct kern_heads_rope *r = p->rope;
    const bool ok = r->q == l->x && l->ld_x == width && r->T == l->T &&
                    (int64_t)r->H * r->d == width && r->act == l->x_dtype && !r->norm;
    return ok ? kern_heads_rope_check(r) : TOW_EINVAL;
}

int kern_embed_check(const struct kern_embed *p)
{
    if (p->T < 0 || p->hc < 1 || !kern_weight_ok(&p->w, p->w.n, p->w.k)) return TOW_EINVAL;
    if (p->w.fmt != KERN_W_F32 && p->w.fmt != KERN_W_BF16) return TOW_EINVAL;
    return p->T == 0 || (p->ids && p->out) ? 0 : TOW_EINVAL;
}
