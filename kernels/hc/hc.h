/* kernels/hc/hc.h - limits of the hyper-connection ops, and the ops that a boundary is made of. */
#ifndef KERN_HC_HC_H
#define KERN_HC_HC_H

#include "kernels/ops.h"

enum { KERN_HC_MAX = 8 }; /* streams */

/* Only where the boundary has a routed sum. */
static inline struct kern_add kern_hc_boundary_add(const struct kern_hc_boundary *p)
{
    struct kern_add a = {p->routed, p->y, p->y, (int64_t)p->T * p->D, p->act};
    return a;
}
/* Only where it has a y. */
static inline struct kern_hc_expand kern_hc_boundary_expand(const struct kern_hc_boundary *p)
{
    struct kern_hc_expand e = {p->y, p->h, p->post, p->comb, p->h, p->T, p->hc, p->D, p->act};
    return e;
}
static inline struct kern_hc_collapse kern_hc_boundary_collapse(const struct kern_hc_boundary *p)
{
    struct kern_hc_collapse c = {p->h,
                                 p->fn,
                                 p->base,
                                 p->scale,
                                 p->x,
                                 p->head ? (float *)0 : p->post,
                                 p->head ? (float *)0 : p->comb,
                                 p->T,
                                 p->hc,
                                 p->D,
                                 p->iters,
                                 p->hc_eps,
                                 p->norm_eps,
                                 p->act};
    return c;
}
static inline struct kern_rmsnorm kern_hc_boundary_norm(const struct kern_hc_boundary *p)
{
    struct kern_rmsnorm n = {p->x, p->norm, p->x, p->D, p->D, p->T, p->D, p->norm_eps, p->act};
    return n;
}

#endif
