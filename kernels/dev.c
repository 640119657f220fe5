/* kernels/dev.c - opens a device by its name and hands each call to its back end. */
#include "kernels/dev.h"

#include "common/base/err.h"
#include "kernels/apart.h"
#include "kernels/cpu/team.h"
#include "kernels/dev_impl.h"
#include "kernels/mirror.h"

#include <stdlib.h>
#include <string.h>

static const struct kern_backend *of(const void *dev_or_stream)
{
    return ((const struct kern_head *)dev_or_stream)->backend;
}

/* The number behind "cuda:", which has one spelling, or -1. */
static int cuda_number(const char *spec)
{
    if (strncmp(spec, "cuda:", 5) != 0 || spec[5] < '0' || spec[5] > '9') return -1;
    if (spec[5] == '0' && spec[6]) return -1;
    char *end;
    long n = strtol(spec + 5, &end, 10);
    return *end == 0 && n <= 255 ? (int)n : -1;
}

int kern_dev_open(struct kern_dev **out, const char *spec, int n_threads, struct tow_err *err)
{
    if (strncmp(spec, "mirror:", 7) == 0) {
        struct kern_dev *inner;
        if (strncmp(spec + 7, "mirror:", 7) == 0)
            return tow_fail(err, TOW_EINVAL,
                            "--device \"%s\": a mirror is of \"cpu\" or \"cuda:N\"", spec);
        int rc = kern_dev_open(&inner, spec + 7, n_threads, err);
        if (rc < 0) return rc;
        rc = kern_dev_open_mirror(out, inner, err);
        if (rc < 0) kern_dev_close(inner);
        return rc;
    }
    if (strcmp(spec, "apart:cpu") == 0) return kern_dev_open_apart(out, n_threads, err);
    if (strcmp(spec, "cpu") == 0)
        return kern_dev_open_cpu(out, n_threads, kern_cpu_best_isa(), err);
    const int n = cuda_number(spec);
    if (n < 0)
        return tow_fail(
            err, TOW_EINVAL,
            "--device \"%s\": must be \"cpu\" or \"cuda:N\", N from 0 to 255; tests also "
            "have \"apart:cpu\"",
            spec);
#ifdef TOW_CUDA
    return kern_dev_open_cuda(out, n, err);
#else
    return tow_fail(err, TOW_ENOENT,
                    "--device \"%s\": this build has no CUDA; it knows \"cpu\" (build with nvcc)",
                    spec);
#endif
}

void kern_dev_close(struct kern_dev *dev)
{
    if (dev) of(dev)->close(dev);
}
void kern_dev_use(struct kern_dev *dev)
{
    if (of(dev)->use) of(dev)->use(dev);
}
const struct kern_ops *kern_dev_ops(const struct kern_dev *dev)
{
    return of(dev)->ops;
}
struct kern_stream *kern_dev_stream(struct kern_dev *dev)
{
    return of(dev)->stream(dev);
}
int kern_dev_threads(const struct kern_dev *dev)
{
    return of(dev)->threads(dev);
}
const char *kern_dev_isa(const struct kern_dev *dev)
{
    return of(dev)->isa(dev);
}
const char *kern_dev_why(const struct kern_dev *dev)
{
    return of(dev)->why ? of(dev)->why(dev) : "";
}
bool kern_dev_host_memory(const struct kern_dev *dev)
{
    return of(dev)->host_memory;
}
bool kern_dev_fp8_products(struct kern_dev *dev, bool on)
{
    return of(dev)->fp8_products && of(dev)->fp8_products(dev, on);
}
uint64_t kern_dev_free_bytes(const struct kern_dev *dev)
{
    return of(dev)->free_bytes ? of(dev)->free_bytes(dev) : 0;
}
void *kern_dev_alloc(struct kern_dev *dev, size_t bytes)
{
    return of(dev)->alloc(dev, bytes);
}
void kern_dev_free(struct kern_dev *dev, void *p)
{
    if (p) of(dev)->free(dev, p);
}
/* One shape and one form: a back end takes its strides from the first. */
static bool alike(const struct kern_weight *a, const struct kern_weight *b)
{
    return a->fmt == b->fmt && a->sfmt == b->sfmt && a->n == b->n && a->k == b->k;
}

int kern_dev_place(struct kern_dev *dev, struct kern_weight *w, int32_t n, struct tow_err *err)
{
    for (int32_t i = 1; i < n; i++)
        if (!alike(&w[0], &w[i]))
            return tow_fail(err, TOW_EINVAL,
                            "weight %d of %d is [%d, %d] of another form than the first, [%d, %d]",
                            i, n, w[i].n, w[i].k, w[0].n, w[0].k);
    return of(dev)->host_memory ? 0 : of(dev)->place(dev, w, n, err);
}
const void *kern_dev_place_bytes(struct kern_dev *dev, const void *host, size_t bytes)
{
    return of(dev)->host_memory ? host : of(dev)->place_bytes(dev, host, bytes);
}
void kern_dev_unplace(struct kern_dev *dev, const void *placed)
{
    if (placed && !of(dev)->host_memory) of(dev)->unplace(dev, placed);
}

static int copy_host(void *dst, const void *src, size_t bytes)
{
    if (bytes) memcpy(dst, src, bytes);
    return 0;
}
int kern_stream_sync(struct kern_stream *s)
{
    return of(s)->host_memory ? 0 : of(s)->sync(s);
}
int kern_stream_write(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    return of(s)->host_memory ? copy_host(dst, src, bytes) : of(s)->write(s, dst, src, bytes);
}
int kern_stream_read(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    return of(s)->host_memory ? copy_host(dst, src, bytes) : of(s)->read(s, dst, src, bytes);
}
int kern_stream_copy(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    return of(s)->host_memory ? copy_host(dst, src, bytes) : of(s)->copy(s, dst, src, bytes);
}
static int no_second(struct tow_err *err)
{
    return tow_fail(err, TOW_EINVAL, "device memory is host memory: there is nothing to copy");
}
int kern_dev_seal(struct kern_dev *dev)
{
    return of(dev)->host_memory ? 0 : of(dev)->seal(dev);
}
int kern_stream_open(struct kern_stream **out, struct kern_dev *dev, struct tow_err *err)
{
    return of(dev)->host_memory ? no_second(err) : of(dev)->open_stream(out, dev, err);
}
void kern_stream_close(struct kern_stream *s)
{
    if (s) of(s)->close_stream(s);
}
int kern_dev_pin(struct kern_dev *dev, void *p, size_t bytes, struct tow_err *err)
{
    return of(dev)->host_memory ? 0 : of(dev)->pin(dev, p, bytes, err);
}
void kern_dev_unpin(struct kern_dev *dev, void *p)
{
    if (p && !of(dev)->host_memory) of(dev)->unpin(dev, p);
}
int kern_stream_put(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    return of(s)->host_memory ? copy_host(dst, src, bytes) : of(s)->put(s, dst, src, bytes);
}
int kern_stream_get(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    return of(s)->host_memory ? copy_host(dst, src, bytes) : of(s)->get(s, dst, src, bytes);
}
int kern_stream_tell(struct kern_stream *s, void (*on_done)(void *arg), void *arg)
{
    if (!of(s)->host_memory) return of(s)->tell(s, on_done, arg);
    on_done(arg);
    return 0;
}
int kern_stream_await(struct kern_stream *s, struct kern_stream *other)
{
    return of(s)->host_memory ? 0 : of(s)->await(s, other);
}
int kern_stream_repeat(struct kern_stream *s, uint64_t key, int (*enqueue)(void *arg), void *arg)
{
    return of(s)->host_memory ? enqueue(arg) : of(s)->repeat(s, key, enqueue, arg);
}
void kern_stream_forget(struct kern_stream *s)
{
    if (!of(s)->host_memory) of(s)->forget(s);
}
int kern_stream_batch(struct kern_stream *s, const struct kern_seq *seqs, int32_t n_seqs)
{
    return of(s)->host_memory ? 0 : of(s)->batch(s, seqs, n_seqs);
}
int kern_stream_pages(struct kern_stream *s, const struct kern_pages *p)
{
    const int rc = kern_pages_check(p);
    if (rc < 0 || p->n == 0) return rc;
    return of(s)->host_memory ? kern_pages_cpu(p) : of(s)->pages(s, p);
}
