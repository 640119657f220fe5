/* kernels/apart.h - the CPU as a device whose memory is not the host's: "apart:cpu".
 *
 * Why      What a worker does for a device with memory of its own - pages that are copied out and
 *          in beside the passes, batches that wait for them - runs on any machine with this, and a
 *          thread that copies a little later than it was told to shows what did not wait.
 * Holds    Ops and numbers are the CPU's. A second stream is a thread.
 */
#ifndef KERN_APART_H
#define KERN_APART_H

struct kern_dev;
struct tow_err;

/* For kern_dev_open(): n_threads as there; closed by kern_dev_close(). TOW_ENOMEM, TOW_ESYS. */
int kern_dev_open_apart(struct kern_dev **out, int n_threads, struct tow_err *err);

#endif
