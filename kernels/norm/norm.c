/* kernels/norm/norm.c - shape contracts of rmsnorm, rope_table, heads_rope and kv_prep. */
#include "common/base/err.h"
#include "kernels/ops.h"

static bool rope_ok(int32_t d, int32_t rd, const float *cos, const float *sin)
{
    return rd >= 0 && rd <= d && rd % 2 == 0 && (rd == 0 || (cos && sin));
}
static bool vec_ok(const struct kern_vec *w, int32_t n)
{
    return w->data && w->n == n;
}

int kern_rmsnorm_check(const struct kern_rmsnorm *p)
{
    if (p->T < 0 || p->D < 1) return TOW_EINVAL;
    if (p->T == 0) return 0;
    bool ok = p->x && p->y && vec_ok(&p->w, p->D) && p->ld_x >= p->D && p->ld_y >= p->D;
    return ok ? 0 : TOW_EINVAL;
}

int kern_rope_table_check(const struct kern_rope_table *p)
{
    if (p->T < 0 || p->rd < 0 || p->rd % 2) return TOW_EINVAL;
    if (p->T == 0 || p->rd == 0) return 0;
    return p->pos && p->inv_freq && p->cos && p->sin ? 0 : TOW_EINVAL;
}

int kern_heads_rope_check(const struct kern_heads_rope *p)
{
    if (p->T < 0 || p->H < 1 || p->d < 1) return TOW_EINVAL;
    if (p->T == 0) return 0;
    return p->q && rope_ok(p->d, p->rd, p->cos, p->sin) ? 0 : TOW_EINVAL;
}

int kern_kv_prep_check(const struct kern_kv_prep *p)
{
    if (p->T < 0 || p->d < 1) return TOW_EINVAL;
    if (p->T == 0) return 0;
    bool ok = p->x && p->y && vec_ok(&p->w, p->d) && rope_ok(p->d, p->rd, p->cos, p->sin);
    if (ok && p->act == KERN_BF16) ok = (p->d - p->rd) % 64 == 0;
    return ok ? 0 : TOW_EINVAL;
}
