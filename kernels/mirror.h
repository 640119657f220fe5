/* kernels/mirror.h - a device's ops over host memory: "mirror:cuda:0".
 *
 * Why      An audit, or a test, compares what an op wrote with what should be there, byte by byte,
 *          and was written against a CPU. Opened through this, the same code drives any device:
 *          each call copies what the op's contract names to the device, runs the op there, and
 *          copies back what it may write. Slow on purpose: nothing stays on the device but weights
 *          of a checkpoint.
 * Holds    The bytes behind each copy do not change; an op that writes there fails with
 *          TOW_EDEVICE.
 * Threads  One.
 */
#ifndef KERN_MIRROR_H
#define KERN_MIRROR_H

#include "kernels/dev.h"

/* Takes inner, which is closed with it. */
int kern_dev_open_mirror(struct kern_dev **out, struct kern_dev *inner, struct tow_err *err);

/* dev is a mirror. Page pools that it did not allocate must be made known to it. */
void kern_mirror_know(struct kern_dev *dev, const void *memory, size_t bytes);
/* Forgets what was made known, and weights it keeps on the device by their host address. */
void kern_mirror_forget(struct kern_dev *dev);

#endif
