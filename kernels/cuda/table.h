/* kernels/cuda/table.h - the op table of the CUDA back end. */
#ifndef KERN_CUDA_TABLE_H
#define KERN_CUDA_TABLE_H

#include "kernels/ops.h"

extern const struct kern_ops kern_cuda;

/* Products of many rows with fp8 weights by wgmma, where there is: on. Only gemm_test and bench_gemm turn
 * it off, to compare bits and times. */
extern int cuda_wide_products;
/* Products of many pairs with 4-bit experts, likewise. tests/gpu/moe_test compares the bits. */
extern int cuda_wide_experts;
/* Products of few rows begin to read weights while their rows are still being quantized; off until timed. */
extern int cuda_early_products;

#endif
