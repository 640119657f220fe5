/* kernels/dev_impl.h - what a back end is to kernels/dev.c: the functions behind kernels/dev.h.
 *
 * Holds    struct kern_dev and struct kern_stream are each back end's own; both begin with struct
 *          kern_head.
 */
#ifndef KERN_DEV_IMPL_H
#define KERN_DEV_IMPL_H

#include "kernels/dev.h"
#include "kernels/pages.h"
#include "kernels/types.h"

struct kern_backend {
    const struct kern_ops *ops;
    bool host_memory;                  /* the processor reads and writes device memory itself */
    void (*use)(struct kern_dev *dev); /* NULL: any thread may */
    void (*close)(struct kern_dev *dev);
    struct kern_stream *(*stream)(struct kern_dev *dev);
    int (*threads)(const struct kern_dev *dev);
    const char *(*isa)(const struct kern_dev *dev);
    const char *(*why)(const struct kern_dev *dev);      /* NULL: codes say enough */
    uint64_t (*free_bytes)(const struct kern_dev *dev);  /* NULL: host memory */
    bool (*fp8_products)(struct kern_dev *dev, bool on); /* NULL: does not have them */
    void *(*alloc)(struct kern_dev *dev, size_t bytes);
    void (*free)(struct kern_dev *dev, void *p);
    /* Those below are not asked where device memory is host memory: nothing is enqueued there,
     * copies are memcpy, weights stay where they are (kernels/dev.c). */
    int (*sync)(struct kern_stream *s);
    int (*write)(struct kern_stream *s, void *dst, const void *src, size_t bytes);
    int (*read)(struct kern_stream *s, void *dst, const void *src, size_t bytes);
    int (*copy)(struct kern_stream *s, void *dst, const void *src, size_t bytes);
    int (*repeat)(struct kern_stream *s, uint64_t key, int (*enqueue)(void *arg), void *arg);
    void (*forget)(struct kern_stream *s);
    int (*batch)(struct kern_stream *s, const struct kern_seq *seqs, int32_t n_seqs);
    int (*place)(struct kern_dev *dev, struct kern_weight *w, int32_t n, struct tow_err *err);
    const void *(*place_bytes)(struct kern_dev *dev, const void *host, size_t bytes);
    void (*unplace)(struct kern_dev *dev, const void *placed);
    int (*seal)(struct kern_dev *dev);
    int (*open_stream)(struct kern_stream **out, struct kern_dev *dev, struct tow_err *err);
    void (*close_stream)(struct kern_stream *s);
    int (*pin)(struct kern_dev *dev, void *p, size_t bytes, struct tow_err *err);
    void (*unpin)(struct kern_dev *dev, void *p);
    int (*put)(struct kern_stream *s, void *dst, const void *src, size_t bytes);
    int (*get)(struct kern_stream *s, void *dst, const void *src, size_t bytes);
    int (*tell)(struct kern_stream *s, void (*on_done)(void *arg), void *arg);
    int (*await)(struct kern_stream *s, struct kern_stream *other);
    int (*pages)(struct kern_stream *s, const struct kern_pages *p);
};

struct kern_head {
    const struct kern_backend *backend;
};

/* Device number of the machine; defined where CUDA is built in. */
int kern_dev_open_cuda(struct kern_dev **out, int device, struct tow_err *err);

#endif
