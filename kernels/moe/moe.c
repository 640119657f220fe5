/* kernels/moe/moe.c - shape contracts of route, moe and ffn. */
#include "common/base/err.h"
#include "kernels/gemm/weight.h"
#include "kernels/ops.h"

int kern_route_check(const struct kern_route *p)
{
    if (p->T < 0 || p->E < 1 || p->k < 1 || p->k > p->E) return TOW_EINVAL;
    if (p->tid2eid && (p->V < 1 || (p->tid_bytes != 4 && p->tid_bytes != 8))) return TOW_EINVAL;
    if (p->T == 0) return 0;
    bool ok = p->logits && p->experts && p->weights && (!p->tid2eid || p->ids);
    return ok ? 0 : TOW_EINVAL;
}

int kern_moe_check(const struct kern_moe *p)
{
    if (p->T < 0 || p->D < 1 || p->I < 1 || p->E < 1 || p->k < 1) return TOW_EINVAL;
    if (!p->w1 || !p->w2 || !p->w3 || !(p->limit >= 0)) return TOW_EINVAL;
    for (int32_t e = 0; e < p->E; e++) {
        if (!kern_weight_ok(&p->w1[e], p->I, p->D) || !kern_weight_ok(&p->w3[e], p->I, p->D) ||
            !kern_weight_ok(&p->w2[e], p->D, p->I))
            return TOW_EINVAL;
        if (p->w1[e].fmt != p->w1[0].fmt || p->w3[e].fmt != p->w1[0].fmt) return TOW_EINVAL;
        if (!kern_aq_ok(&p->w1[e], p->aq, p->D) || !kern_aq_ok(&p->w3[e], p->aq, p->D) ||
            !kern_aq_ok(&p->w2[e], p->aq, p->I))
            return TOW_EINVAL;
    }
    return p->T == 0 || (p->x && p->experts && p->weights && p->out) ? 0 : TOW_EINVAL;
}

/* The parts must fit together; whatever else they are is theirs. */
int kern_ffn_check(const struct kern_ffn *p)
{
    const int32_t T = p->gate.T;
    const bool checked = kern_linear_check(&p->gate) == 0 && kern_route_check(&p->route) == 0 &&
                         kern_moe_check(&p->moe) == 0 && kern_linear_check(&p->w1) == 0 &&
                         kern_linear_check(&p->w3) == 0 && kern_swiglu_check(&p->swiglu) == 0 &&
                         kern_linear_check(&p->w2) == 0;
    if (!checked) return TOW_EINVAL;
    if (p->route.T != T || p->moe.T != T || p->w1.T != T || p->w3.T != T || p->swiglu.T != T ||
        p->w2.T != T)
        return TOW_EINVAL;
    if (p->gate.N != p->route.E || p->moe.E != p->route.E || p->moe.k != p->route.k ||
        p->w1.N != p->swiglu.I || p->w3.N != p->swiglu.I || p->w2.K != p->swiglu.I)
        return TOW_EINVAL;
    return p->gate.y == p->route.logits && p->moe.experts == p->route.experts &&
                   p->moe.weights == p->route.weights && p->w1.y == p->swiglu.g &&
                   p->w3.y == p->swiglu.u && p->w2.x == p->swiglu.y
               ? 0
               : TOW_EINVAL;
}
