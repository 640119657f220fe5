/* kernels/dev.h - a compute device: its memory, its stream of work, and its table of ops.
 *
 * Why      The model is written once against struct kern_ops; this opens the back end that fills
 *          it.
 * Threads  A device and its stream are driven by one thread (the engine thread). On the CPU a
 *          stream owns a team of workers that run an op's parts and are back at its end: every op
 *          is finished when it returns. On CUDA an op is enqueued; kern_stream_sync() waits.
 * Memory   Ops read and write device memory, but for what ops.h calls host arrays: struct kern_seq
 *          and the tables of pages it points to, arrays of struct kern_weight, and layouts.
 */
#ifndef KERN_DEV_H
#define KERN_DEV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_err;
struct kern_dev;
struct kern_stream;
struct kern_ops;
struct kern_seq;
struct kern_weight;

/* spec "cpu" or "cuda:N", or "mirror:" and one of them (kernels/mirror.h), or "apart:cpu"
 * (kernels/apart.h); n_threads (CPU only) 0 = all cores allowed to the process (at most 256).
 * TOW_EINVAL: spec names no device; TOW_ENOENT: this machine has no CUDA device, or this build no
 * code for it; TOW_EDEVICE: it is there and cannot be used. */
int kern_dev_open(struct kern_dev **out, const char *spec, int n_threads, struct tow_err *err);
void kern_dev_close(struct kern_dev *dev); /* NULL is fine */

/* Makes the calling thread the one that drives the device from now on. */
void kern_dev_use(struct kern_dev *dev);

const struct kern_ops *kern_dev_ops(const struct kern_dev *dev);
struct kern_stream *kern_dev_stream(struct kern_dev *dev);
int kern_dev_threads(const struct kern_dev *dev);      /* CUDA: 1 */
const char *kern_dev_isa(const struct kern_dev *dev);  /* "amx" "avx512" "avx2" "c"; "sm_90" ... */
const char *kern_dev_why(const struct kern_dev *dev);  /* the last op's error in words, or "" */
bool kern_dev_host_memory(const struct kern_dev *dev); /* the CPU may read and write it directly */

/* Bytes of device memory that can still be taken; 0 where it is host memory. */
uint64_t kern_dev_free_bytes(const struct kern_dev *dev);

/* Ends the time in which the device's stream may take memory for scratch and batches: from now on
 * an op that needs more than any before fails with TOW_ENOMEM, and kern_dev_why() says what it
 * asked for. So memory that was planned is enough for good. Nothing where device memory is host
 * memory. 0, TOW_ENOMEM, TOW_EDEVICE. */
int kern_dev_seal(struct kern_dev *dev);

/* Device memory, 64-byte aligned (CUDA: 256), zeroed. NULL when there is none. */
void *kern_dev_alloc(struct kern_dev *dev, size_t bytes);
void kern_dev_free(struct kern_dev *dev, void *p);

/* Weights as this device's ops read them. w[0 .. n-1], all [w->n, w->k] of one format, are copied
 * to the device in a form of its own, and w points there afterwards; an op that takes several (moe)
 * finds them by the array placed. On the CPU they stay where they are, in any alignment. What was
 * placed is freed with the device, or by unplace(w[0].data). TOW_ENOMEM, TOW_EDEVICE. */
int kern_dev_place(struct kern_dev *dev, struct kern_weight *w, int32_t n, struct tow_err *err);
/* The same for plain bytes (norm vectors, biases, tables): where they are now; NULL: no memory. */
const void *kern_dev_place_bytes(struct kern_dev *dev, const void *host, size_t bytes);
void kern_dev_unplace(struct kern_dev *dev, const void *placed);

/* From now on products of fp8 weights and of MXFP4 experts with activations quantized to fp8, and
 * index scores of fp8 keys, multiply the codes as they are (on) or widened to 16 bits, exactly
 * (off, as at first). On is up to twice as fast where sums bind, and moves fewer bytes; but the
 * matrix unit keeps only some 13 bits of a block of 128 products: a sum has an error of 2^-14.3 of
 * the sum of magnitudes (rms; kernels/cuda/wgmma.cuh), below the 2^-9 of the bf16 number it
 * becomes. One kind for a process: rows computed by different kinds have other bits. Not while
 * kern_stream_repeat() keeps graphs: those keep their kind. MXFP4 experts are multiplied by their
 * codes if they were placed while it was on, and it still is. False: not on this device. */
bool kern_dev_fp8_products(struct kern_dev *dev, bool on);

/* Waits for everything enqueued; 0 or TOW_EDEVICE. */
int kern_stream_sync(struct kern_stream *s);

/* Copies in the order of the stream. write: host to device; src may be changed at once. read:
 * device to host; waits. copy: device to device. 0 or TOW_EDEVICE. */
int kern_stream_write(struct kern_stream *s, void *dst, const void *src, size_t bytes);
int kern_stream_read(struct kern_stream *s, void *dst, const void *src, size_t bytes);
int kern_stream_copy(struct kern_stream *s, void *dst, const void *src, size_t bytes);

/* A second stream of the device, for copies beside the work of the first; driven by one thread,
 * which may be another than the device's. Closed before the device. TOW_EINVAL where device memory
 * is host memory: nothing there has to be copied. */
int kern_stream_open(struct kern_stream **out, struct kern_dev *dev, struct tow_err *err);
void kern_stream_close(struct kern_stream *s); /* waits for what it was given; NULL is fine */

/* Makes host memory known to the device, so that copies to and from it go at the link's speed while
 * the caller goes on, and ops may write there. TOW_EDEVICE: the system does not lend it (err says
 * why); copies then still work, slower. Forgotten before the memory is freed. */
int kern_dev_pin(struct kern_dev *dev, void *p, size_t bytes, struct tow_err *err);
void kern_dev_unpin(struct kern_dev *dev, void *p); /* NULL is fine */

/* Copies that are enqueued: host memory must stay, and stay as it is, until they are done. put:
 * host to device. get: device to host. 0 or TOW_EDEVICE. */
int kern_stream_put(struct kern_stream *s, void *dst, const void *src, size_t bytes);
int kern_stream_get(struct kern_stream *s, void *dst, const void *src, size_t bytes);
/* Calls on_done(arg) when all that was enqueued is done, on a thread of the device's, or before
 * this returns; it must not call anything of kernels/. 0 or TOW_EDEVICE: it is not called. */
int kern_stream_tell(struct kern_stream *s, void (*on_done)(void *arg), void *arg);
/* What s is given from now on begins when all that other was given is done; does not wait. Called
 * by the thread that drives s. */
int kern_stream_await(struct kern_stream *s, struct kern_stream *other);

/* Runs enqueue(arg), which calls ops and nothing else, and whose launches are the same each time
 * for one key (not 0): the same ops on the same memory with the same numbers of rows and sequences;
 * what lies in that memory may differ. On CUDA they are kept as a graph and launched at once from
 * the second time on. What enqueue returns, or TOW_EDEVICE. */
int kern_stream_repeat(struct kern_stream *s, uint64_t key, int (*enqueue)(void *arg), void *arg);
void kern_stream_forget(struct kern_stream *s); /* whatever was kept so; waits */

/* Announces the sequences of the pass that begins, so that each op with this very array finds them
 * on the device already; n_seqs 0 ends it, and the array must not change before. Ops given another
 * array send it themselves and wait. */
int kern_stream_batch(struct kern_stream *s, const struct kern_seq *seqs, int32_t n_seqs);

#endif
