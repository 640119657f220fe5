/* kernels/hc/hc.c - shape contracts of the hyper-connection ops and of the element-wise ones. */
#include "common/base/err.h"
#include "kernels/gemm/weight.h"
#include "kernels/hc/hc.h"
#include "kernels/ops.h"

int kern_hc_collapse_check(const struct kern_hc_collapse *p)
{
    int32_t hc = p->hc;
    if (p->T < 0 || p->D < 1 || hc < 1 || hc > KERN_HC_MAX || p->iters < 0) return TOW_EINVAL;
    int32_t n = p->comb ? (2 + hc) * hc : hc;
    if (p->fn.fmt != KERN_W_F32 && p->fn.fmt != KERN_W_BF16) return TOW_EINVAL;
    if (!kern_weight_ok(&p->fn, n, (int64_t)hc * p->D)) return TOW_EINVAL;
    if (!p->base || !p->scale || !p->comb != !p->post) return TOW_EINVAL;
    return p->T == 0 || (p->h && p->x) ? 0 : TOW_EINVAL;
}

int kern_hc_expand_check(const struct kern_hc_expand *p)
{
    if (p->T < 0 || p->D < 1 || p->hc < 1 || p->hc > KERN_HC_MAX) return TOW_EINVAL;
    return p->T == 0 || (p->y && p->h && p->post && p->comb && p->out) ? 0 : TOW_EINVAL;
}

int kern_hc_boundary_check(const struct kern_hc_boundary *p)
{
    const struct kern_hc_expand expand = kern_hc_boundary_expand(p);
    const struct kern_hc_collapse collapse = kern_hc_boundary_collapse(p);
    const struct kern_rmsnorm norm = kern_hc_boundary_norm(p);
    if (!p->y && p->routed) return TOW_EINVAL;
    if (!p->head && (!p->post || !p->comb)) return TOW_EINVAL;
    int rc = p->y ? kern_hc_expand_check(&expand) : 0;
    if (rc == 0) rc = kern_hc_collapse_check(&collapse);
    return rc < 0 ? rc : kern_rmsnorm_check(&norm);
}

int kern_mtp_mix_check(const struct kern_mtp_mix *p)
{
    if (p->T < 0 || p->D < 1 || p->hc < 1) return TOW_EINVAL;
    return p->T == 0 || (p->e && p->g && p->out) ? 0 : TOW_EINVAL;
}

int kern_add_check(const struct kern_add *p)
{
    if (p->n < 0) return TOW_EINVAL;
    return p->n == 0 || (p->a && p->b && p->y) ? 0 : TOW_EINVAL;
}

int kern_swiglu_check(const struct kern_swiglu *p)
{
    if (p->T < 0 || p->I < 1 || !(p->limit >= 0)) return TOW_EINVAL;
    return p->T == 0 || (p->g && p->u && p->y) ? 0 : TOW_EINVAL;
}
