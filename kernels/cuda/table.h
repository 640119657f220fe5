/* kernels/cuda/table.h - the op table of the CUDA back end. */
#ifndef KERN_CUDA_TABLE_H
#define KERN_CUDA_TABLE_H

#include "kernels/ops.h"

extern const struct kern_ops kern_cuda;

/* Products of many rows with fp8 weights by wgmma, where there is. tests/gpu/gemm_test compares the bits. */
extern int cuda_wide_products;
/* Products of many pairs with 4-bit experts, likewise. tests/gpu/moe_test compares the bits. */
extern int cuda_wide_experts;

#endif
