/* kernels/moe/moe.c - shape contracts of route and moe. */
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
