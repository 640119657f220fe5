/* kernels/cuda/table.h - the op table of the CUDA back end. */
#ifndef KERN_CUDA_TABLE_H
#define KERN_CUDA_TABLE_H

#include "kernels/ops.h"

extern const struct kern_ops kern_cuda;

#endif
