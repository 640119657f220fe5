/* kernels/gemm/weight.h - what ops ask of a stored weight before they read it. */
#ifndef KERN_GEMM_WEIGHT_H
#define KERN_GEMM_WEIGHT_H

#include "kernels/types.h"

/* Present, [n, k], with scales where its format has them. */
bool kern_weight_ok(const struct kern_weight *w, int64_t n, int64_t k);
/* Activations of width k can be quantized so for this weight. */
bool kern_aq_ok(const struct kern_weight *w, enum kern_act_quant aq, int64_t k);

#endif
