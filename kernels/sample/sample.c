/* kernels/sample/sample.c - shape contract of sample. */
#include "common/base/err.h"
#include "kernels/ops.h"

int kern_sample_check(const struct kern_sample *p)
{
    if (p->T < 0 || p->V < 1 || p->V > KERN_SAMPLE_MAX_V || p->n_edits < 0) return TOW_EINVAL;
    if (p->n_edits > 0 && !p->edits) return TOW_EINVAL;
    return p->T == 0 || (p->logits && p->rows && p->choices) ? 0 : TOW_EINVAL;
}
