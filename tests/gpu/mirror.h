/* tests/gpu/mirror.h - the CUDA op table behind host pointers: each call copies what the op's contract
 * names to the device, runs the op, and copies what it may write back, gaps and guards included.
 *
 * Why      So the cases that drive the CPU drive the device unchanged.
 * Threads  One; one mirror at a time.
 */
#ifndef TESTS_GPU_MIRROR_H
#define TESTS_GPU_MIRROR_H

#include "kernels/dev.h"
#include "kernels/ops.h"

/* Opens the mirror over a device; the table is mirror_ops. */
int mirror_open(struct kern_dev *dev);
void mirror_close(void);
extern const struct kern_ops mirror_ops;

/* Told by a case: its page pool. */
void mirror_pool(void *ctx, const void *pages, int64_t bytes);
/* Forgets placed weights; after each case. */
void mirror_reset(void);

#endif
