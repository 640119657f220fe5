/* kernels/cuda/table.h - the op table of the CUDA back end. */
#ifndef KERN_CUDA_TABLE_H
#define KERN_CUDA_TABLE_H

#include "kernels/ops.h"

extern const struct kern_ops kern_cuda;

/* Products of bf16 rows with fp8 or bf16 weights by wgmma, where there is and where it is faster:
 * on. Only gemm_test and bench_gemm turn it off, to compare bits and times. */
extern int cuda_wide_products;
/* Products of fp8 weights and of MXFP4 experts with rows quantized to fp8, and of fp8 index keys:
 * 0, all widened; 1, by the codes themselves (sm_90; kern_dev_fp8_products() says at what price).
 * Read at launch; MXFP4 experts must also have been placed while it was 1. */
extern int cuda_fp8_products;
/* Pairs an expert has on average from which widened products with 4-bit experts go by wgmma; 0:
 * never. Fewer are faster by mma.sync (docs/performance.md); moe_test compares the bits, bench_moe
 * the times. */
extern int cuda_wide_experts;
/* Products of few rows begin to read weights while their rows are still being quantized: on. Only
 * gemm_test and bench_gemm turn it off, to compare. */
extern int cuda_early_products;
/* Rows' codes are taken to be in scratch from the call before: off. Only bench_gemm turns it on, to
 * time products alone. */
extern int cuda_given_codes;
/* Kernels begin while the one before still ends: on. Only bench_norm and gemm_test turn it off, to
 * compare times and bits. */
extern int cuda_early_launches;
/* Kernels of the graph that was launched last; bench_step prints it, launch_test checks it. */
extern int cuda_graph_kernels;

#endif
