/* kernels/dev.h - a compute device: its memory, its stream of work, and its table of ops.
 *
 * Why      The model is written once against struct kern_ops;
 *          this opens the back end that fills it.
 * Threads  A stream is driven by one thread (the engine thread). On the CPU it owns a team of
 *          workers that run an op's parts and are back at its end;
 *          every op is finished when it returns.
 */
#ifndef KERN_DEV_H
#define KERN_DEV_H

#include <stddef.h>
#include <stdint.h>

struct tow_err;
struct kern_dev;
struct kern_stream;
struct kern_ops;

/* spec "cpu"; n_threads 0 = all cores allowed to the process (at most 256). */
int kern_dev_open(struct kern_dev **out, const char *spec, int n_threads, struct tow_err *err);
void kern_dev_close(struct kern_dev *dev);

const struct kern_ops *kern_dev_ops(const struct kern_dev *dev);
struct kern_stream *kern_dev_stream(struct kern_dev *dev);
int kern_dev_threads(const struct kern_dev *dev);
const char *kern_dev_isa(const struct kern_dev *dev); /* "amx", "avx512", "avx2", "c" */

/* 64-byte aligned device memory, zeroed. NULL when there is none. */
void *kern_dev_alloc(struct kern_dev *dev, size_t bytes);
void kern_dev_free(struct kern_dev *dev, void *p);

/* Waits for everything enqueued; 0 or TOW_EDEVICE. */
int kern_stream_sync(struct kern_stream *s);

#endif
