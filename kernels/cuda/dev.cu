/* kernels/cuda/dev.cu - the CUDA device: memory, streams, staging, placed weights, batch metadata.
 *
 * A pass announces its sequences once (kern_stream_batch): they, their tables of pages and the map
 * from rows to sequences go to one device buffer through pinned memory, and every op of the pass
 * finds them there. An op with another array (tests, audits, ranks of one row) sends it itself,
 * through a second buffer, and waits before it reuses that. Sending with every op was rejected: a
 * layer has five such ops, and a graph may not copy from memory that changes.
 *
 * Staging is a ring of pinned memory: a write copies there and enqueues the transfer; when the ring
 * is full it waits for the stream. So kern_stream_write() returns with its source free.
 *
 * A stream that has failed stays failed. One that found no memory, or was refused it, is whole:
 * what was asked for was not launched, and the next pass begins anew.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/place.cuh"

extern "C" {
#include "kernels/cuda/table.h"
#include "kernels/pages.h"
int kern_pages_cuda(struct kern_stream *s, const struct kern_pages *p);
}

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    STAGING_BYTES = 8 << 20, /* a pass writes kilobytes; what is longer fills it and waits */
    READ_BYTES = 1 << 20,    /* most that a read copies twice */
    ALIGN = 256,             /* what cudaMalloc gives, and kernels' widest vectors want */
    SMALL_BYTES = 64 << 10   /* most that cuda_send() carries in a served process: lists of rows */
};

/* Device memory with a host side of pinned memory, that grows. */
struct cuda_mirror {
    uint8_t *dev, *pinned;
    size_t room;
};

struct placed {
    const struct kern_weight *key; /* array placed; NULL: bytes */
    void *mem;                     /* owned */
    struct cuda_weight *table;     /* owned, in mem: device [n] */
    int32_t n;
    bool e4m3; /* MXFP4 codes are in that form */
};

/* What is launched again and again under one key. */
struct graph {
    uint64_t key, generation;
    cudaGraphExec_t exec; /* owned; NULL: seen once, or not possible */
    int kernels;
    bool seen, refused;
};
enum { MAX_GRAPHS = 256 }; /* twice the largest decode step: one for each number of rows */

struct cuda_own {
    struct {
        void *mem;
        size_t bytes;
    } slot[CUDA_N_SLOTS];
    struct cuda_mirror announced, foreign, small;
    struct cuda_batch batch;     /* of announced */
    const struct kern_seq *seqs; /* host array announced, or NULL */
    uint8_t *staging;            /* pinned, owned */
    size_t staged;
    uint8_t *reading;      /* pinned, owned [READ_BYTES] */
    struct placed *placed; /* owned [n_placed] */
    size_t n_placed, room_placed;
    struct graph graphs[MAX_GRAPHS];
    int n_graphs;
    uint64_t generation; /* rises when memory that graphs know of moves */
    bool capturing;
    bool sealed;       /* nothing more may be taken */
    cudaEvent_t other; /* where another stream was when this one was told to wait for it */
    int rc;            /* sticky; TOW_ENOMEM for the pass */
    char what[256];
};

struct kern_dev {
    struct kern_head head; /* first */
    struct kern_stream stream;
    struct cuda_own own;
    char isa[16];
};

static size_t align_up(size_t n)
{
    return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1);
}

/* Keeps the first failure of a stream. */
static int keep(struct kern_stream *s, int rc, const char *what, cudaError_t e)
{
    if (s->own->rc == 0) {
        s->own->rc = rc;
        snprintf(s->own->what, sizeof s->own->what, "%s: %s", what, cudaGetErrorString(e));
    }
    return s->own->rc;
}
static int checked(struct kern_stream *s, const char *what, cudaError_t e)
{
    return e == cudaSuccess
               ? s->own->rc
               : keep(s, e == cudaErrorMemoryAllocation ? TOW_ENOMEM : TOW_EDEVICE, what, e);
}

int cuda_done(struct kern_stream *s, const char *op)
{
    return checked(s, op, cudaGetLastError());
}

void cuda_raise_shared(const void *kernel, int bytes, bool *raised)
{
    cudaFuncAttributes a;
    int number = 0, most = 0;
    if (cudaGetDevice(&number) != cudaSuccess) return; /* the error stays for cuda_done() */
    if (number < CUDA_MAX_DEVICES && raised[number]) return;
    if (cudaFuncGetAttributes(&a, kernel) != cudaSuccess ||
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, number) !=
            cudaSuccess)
        return;
    if (bytes > most - (int)a.sharedSizeBytes) bytes = most - (int)a.sharedSizeBytes;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (number < CUDA_MAX_DEVICES) raised[number] = true;
}

/* False, and says so, when no more memory may be taken. */
static bool may_take(struct kern_stream *s, const char *what, size_t have, size_t bytes)
{
    struct cuda_own *o = s->own;
    if (!o->sealed) return true;
    if (o->rc == 0) {
        o->rc = TOW_ENOMEM;
        snprintf(o->what, sizeof o->what,
                 "%s: %zu KiB are needed and %zu KiB were planned at start; none is taken later",
                 what, bytes >> 10, have >> 10);
    }
    return false;
}

void *cuda_scratch(struct kern_stream *s, enum cuda_slot slot, size_t bytes)
{
    struct cuda_own *o = s->own;
    static const char *const names[CUDA_N_SLOTS] = {"scratch of rows", "scratch", "scratch 2",
                                                    "scratch 3", "scratch of split sums"};
    if (bytes <= o->slot[slot].bytes) return o->slot[slot].mem;
    if (!may_take(s, names[slot], o->slot[slot].bytes, bytes)) return NULL;
    if (o->capturing) {
        keep(s, TOW_EDEVICE, "scratch grows in a graph", cudaErrorStreamCaptureUnsupported);
        return NULL;
    }
    size_t room = align_up(bytes + bytes / 4);
    o->generation++;
    if (o->slot[slot].mem) {
        if (checked(s, "scratch", cudaStreamSynchronize(s->cu)) < 0) return NULL;
        cudaFree(o->slot[slot].mem);
    }
    o->slot[slot].bytes = 0;
    o->slot[slot].mem = NULL;
    if (checked(s, "scratch", cudaMalloc(&o->slot[slot].mem, room)) < 0) return NULL;
    o->slot[slot].bytes = room;
    return o->slot[slot].mem;
}

/* ------------------------------------------------------------------ batch metadata */

static int mirror_grow(struct kern_stream *s, struct cuda_mirror *m, size_t bytes)
{
    if (bytes <= m->room) return s->own->rc;
    if (!may_take(s, "metadata", m->room, bytes)) return s->own->rc;
    size_t room = align_up(bytes * 2);
    s->own->generation++;
    if (checked(s, "metadata", cudaStreamSynchronize(s->cu)) < 0) return s->own->rc;
    cudaFree(m->dev);
    cudaFreeHost(m->pinned);
    m->dev = m->pinned = NULL;
    m->room = 0;
    if (checked(s, "metadata", cudaMalloc((void **)&m->dev, room)) < 0 ||
        checked(s, "metadata", cudaMallocHost((void **)&m->pinned, room)) < 0)
        return s->own->rc;
    m->room = room;
    return 0;
}
static void mirror_free(struct cuda_mirror *m)
{
    cudaFree(m->dev);
    cudaFreeHost(m->pinned);
}

/* seqs to m; the stream must be past the last transfer from m. */
static int send_batch(struct kern_stream *s, struct cuda_mirror *m, const struct kern_seq *seqs,
                      int32_t n_seqs, struct cuda_batch *out)
{
    size_t n_ids = 0;
    int32_t T = 0;
    for (int32_t i = 0; i < n_seqs; i++) {
        n_ids += (size_t)(seqs[i].n_pages > 0 ? seqs[i].n_pages : 0);
        if (seqs[i].row0 + seqs[i].n_rows > T) T = seqs[i].row0 + seqs[i].n_rows;
    }
    const size_t rows_at = align_up((size_t)n_seqs * sizeof(struct cuda_seq));
    const size_t ids_at = rows_at + align_up((size_t)T * sizeof(int32_t));
    const size_t bytes = ids_at + n_ids * sizeof(uint32_t);
    if (mirror_grow(s, m, bytes ? bytes : 1) < 0) return s->own->rc;
    struct cuda_seq *q = (struct cuda_seq *)m->pinned;
    int32_t *row_seq = (int32_t *)(m->pinned + rows_at);
    uint32_t *ids = (uint32_t *)(m->pinned + ids_at);
    const uint32_t *dev_ids = (const uint32_t *)(m->dev + ids_at);
    for (int32_t t = 0; t < T; t++) row_seq[t] = -1;
    for (int32_t i = 0; i < n_seqs; i++) {
        const int32_t n = seqs[i].n_pages > 0 ? seqs[i].n_pages : 0;
        q[i].pos0 = seqs[i].pos0;
        q[i].page_ids = dev_ids;
        q[i].tail = seqs[i].tail;
        q[i].row0 = seqs[i].row0;
        q[i].n_rows = seqs[i].n_rows;
        q[i].topk = seqs[i].topk;
        q[i].page_step = seqs[i].shadowed ? 2 : 1;
        if (n) memcpy(ids, seqs[i].page_ids, (size_t)n * sizeof *ids);
        ids += n;
        dev_ids += n;
        for (int32_t r = 0; r < seqs[i].n_rows; r++) row_seq[seqs[i].row0 + r] = i;
    }
    out->seqs = (const struct cuda_seq *)m->dev;
    out->row_seq = (const int32_t *)(m->dev + rows_at);
    out->n_seqs = n_seqs;
    out->T = T;
    return checked(s, "metadata",
                   cudaMemcpyAsync(m->dev, m->pinned, bytes, cudaMemcpyHostToDevice, s->cu));
}

static int batch(struct kern_stream *s, const struct kern_seq *seqs, int32_t n_seqs)
{
    struct cuda_own *o = s->own;
    o->seqs = NULL;
    if (o->rc == TOW_ENOMEM) o->rc = 0; /* the words stay until the next pass */
    if (n_seqs == 0) return o->rc;
    if (o->rc == 0) o->what[0] = 0;
    /* The transfer of the pass before may still be read from. */
    if (checked(s, "batch", cudaStreamSynchronize(s->cu)) < 0) return o->rc;
    int rc = send_batch(s, &o->announced, seqs, n_seqs, &o->batch);
    if (rc == 0) o->seqs = seqs;
    return rc;
}

int cuda_batch_of(struct kern_stream *s, const struct kern_seq *seqs, int32_t n_seqs,
                  struct cuda_batch *out)
{
    struct cuda_own *o = s->own;
    if (o->seqs == seqs && o->batch.n_seqs == n_seqs) {
        *out = o->batch;
        return o->rc;
    }
    if (checked(s, "batch", cudaStreamSynchronize(s->cu)) < 0) return o->rc;
    return send_batch(s, &o->foreign, seqs, n_seqs, out);
}

const void *cuda_send(struct kern_stream *s, const void *host, size_t bytes)
{
    struct cuda_mirror *m = &s->own->small;
    if (checked(s, "send", cudaStreamSynchronize(s->cu)) < 0 ||
        mirror_grow(s, m, bytes ? bytes : 1) < 0)
        return NULL;
    memcpy(m->pinned, host, bytes);
    if (checked(s, "send",
                cudaMemcpyAsync(m->dev, m->pinned, bytes, cudaMemcpyHostToDevice, s->cu)) < 0)
        return NULL;
    return m->dev;
}

/* ------------------------------------------------------------------ graphs
 * The first time things run as they are, so that scratch has grown; the second time they are
 * captured. A graph knows addresses: when scratch or metadata has moved since, it is made anew. */

static struct graph *graph_of(struct cuda_own *o, uint64_t key)
{
    for (int i = 0; i < o->n_graphs; i++)
        if (o->graphs[i].key == key) return &o->graphs[i];
    if (o->n_graphs == MAX_GRAPHS) return NULL;
    o->graphs[o->n_graphs].key = key;
    return &o->graphs[o->n_graphs++];
}

int cuda_graph_kernels = 0, cuda_early_launches = 1;

static int kernels_of(cudaGraph_t graph)
{
    size_t n = 0;
    int kernels = 0;
    if (cudaGraphGetNodes(graph, NULL, &n) != cudaSuccess || n == 0) return 0;
    cudaGraphNode_t *nodes = (cudaGraphNode_t *)malloc(n * sizeof *nodes);
    if (nodes && cudaGraphGetNodes(graph, nodes, &n) == cudaSuccess)
        for (size_t i = 0; i < n; i++) {
            cudaGraphNodeType type;
            if (cudaGraphNodeGetType(nodes[i], &type) == cudaSuccess)
                kernels += type == cudaGraphNodeTypeKernel;
        }
    free(nodes);
    return kernels;
}

/* Captures enqueue(); false when something in it cannot be, after which the stream is as before. */
static bool capture(struct kern_stream *s, struct graph *g, int (*enqueue)(void *), void *arg)
{
    struct cuda_own *o = s->own;
    cudaGraph_t graph = NULL;
    if (g->exec) cudaGraphExecDestroy(g->exec);
    g->exec = NULL;
    if (cudaStreamBeginCapture(s->cu, cudaStreamCaptureModeThreadLocal) != cudaSuccess)
        return false;
    o->capturing = true;
    const int rc = enqueue(arg);
    o->capturing = false;
    const cudaError_t e = cudaStreamEndCapture(s->cu, &graph);
    const bool ok =
        rc == 0 && e == cudaSuccess && cudaGraphInstantiate(&g->exec, graph, 0) == cudaSuccess;
    if (ok) g->kernels = kernels_of(graph);
    if (graph) cudaGraphDestroy(graph);
    if (!ok) {
        if (o->rc == 0)
            snprintf(o->what, sizeof o->what, "launches of key %#llx cannot be kept as a graph: %s",
                     (unsigned long long)g->key, cudaGetErrorString(e));
        cudaGetLastError();
        o->rc = 0;
        g->exec = NULL;
    }
    g->generation = o->generation;
    return ok;
}

static int repeat(struct kern_stream *s, uint64_t key, int (*enqueue)(void *arg), void *arg)
{
    struct cuda_own *o = s->own;
    struct graph *g = o->rc == 0 ? graph_of(o, key) : NULL;
    if (!g || g->refused) return enqueue(arg);
    if (!g->seen) {
        g->seen = true;
        return enqueue(arg);
    }
    if (!g->exec || g->generation != o->generation) {
        if (!capture(s, g, enqueue, arg)) {
            g->refused = true;
            return enqueue(arg);
        }
    }
    cuda_graph_kernels = g->kernels;
    return checked(s, "graph", cudaGraphLaunch(g->exec, s->cu));
}

static void forget(struct kern_stream *s)
{
    struct cuda_own *o = s->own;
    if (s->cu) cudaStreamSynchronize(s->cu);
    for (int i = 0; i < o->n_graphs; i++)
        if (o->graphs[i].exec) cudaGraphExecDestroy(o->graphs[i].exec);
    memset(o->graphs, 0, sizeof o->graphs);
    o->n_graphs = 0;
}

/* ------------------------------------------------------------------ copies */

static int sync_stream(struct kern_stream *s)
{
    int rc = checked(s, "stream", cudaStreamSynchronize(s->cu));
    s->own->staged = 0;
    return rc;
}

static int write_in(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    struct cuda_own *o = s->own;
    for (size_t at = 0; at < bytes && o->rc == 0;) {
        size_t n = bytes - at;
        if (o->staged == STAGING_BYTES) sync_stream(s);
        if (n > STAGING_BYTES - o->staged) n = STAGING_BYTES - o->staged;
        memcpy(o->staging + o->staged, (const uint8_t *)src + at, n);
        checked(s, "write",
                cudaMemcpyAsync((uint8_t *)dst + at, o->staging + o->staged, n,
                                cudaMemcpyHostToDevice, s->cu));
        o->staged += n;
        at += n;
    }
    return o->rc;
}

/* What a step reads back is little and comes through pinned memory. Much is left to the driver,
 * whose own staging of memory that is not pinned was quicker than two pieces in turn here. */
static int read_out(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    struct cuda_own *o = s->own;
    const bool little = bytes <= READ_BYTES;
    if (bytes && checked(s, "read",
                         cudaMemcpyAsync(little ? o->reading : dst, src, bytes,
                                         cudaMemcpyDeviceToHost, s->cu)) < 0)
        return o->rc;
    const int rc = sync_stream(s);
    if (rc == 0 && little) memcpy(dst, o->reading, bytes);
    return rc;
}

static int copy_within(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    if (bytes == 0) return s->own->rc;
    return checked(s, "copy", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, s->cu));
}

/* ------------------------------------------------------------------ memory and weights */

static void *alloc_dev(struct kern_dev *dev, size_t bytes)
{
    void *p = NULL;
    if (bytes > SIZE_MAX - ALIGN || cudaMalloc(&p, align_up(bytes ? bytes : 1)) != cudaSuccess) {
        cudaGetLastError(); /* no memory is an answer here, not a broken stream */
        return NULL;
    }
    if (cudaMemsetAsync(p, 0, align_up(bytes ? bytes : 1), dev->stream.cu) != cudaSuccess ||
        cudaStreamSynchronize(dev->stream.cu) != cudaSuccess) {
        cudaFree(p);
        return NULL;
    }
    return p;
}
static void free_dev(struct kern_dev *dev, void *p)
{
    cudaStreamSynchronize(dev->stream.cu);
    cudaFree(p);
}

static int remember(struct kern_dev *dev, const struct kern_weight *key, void *mem,
                    struct cuda_weight *table, int32_t n)
{
    struct cuda_own *o = &dev->own;
    if (o->n_placed == o->room_placed) {
        size_t room = o->room_placed ? 2 * o->room_placed : 256;
        struct placed *p = (struct placed *)realloc(o->placed, room * sizeof *p);
        if (!p) return TOW_ENOMEM;
        o->placed = p;
        o->room_placed = room;
    }
    o->placed[o->n_placed++] = {key, mem, table, n, false};
    return 0;
}

/* Bytes of a row of data and of scale that carry something. */
static int64_t data_bytes(const struct kern_weight *w)
{
    switch (w->fmt) {
    case KERN_W_F32: return 4 * (int64_t)w->k;
    case KERN_W_BF16: return 2 * (int64_t)w->k;
    case KERN_W_FP8: return w->k;
    default: return w->k / 2;
    }
}
static void scale_shape(const struct kern_weight *w, int64_t *rows, int64_t *bytes)
{
    const int64_t elem = w->sfmt == KERN_S_F32 ? 4 : 1;
    *rows = *bytes = 0;
    if (w->sfmt == KERN_S_NONE) return;
    *rows = w->fmt == KERN_W_FP8 ? cuda_ceil(w->n, 128) : w->n;
    *bytes = elem * (w->fmt == KERN_W_FP8     ? cuda_ceil(w->k, 128)
                     : w->fmt == KERN_W_MXFP4 ? w->k / 32
                                              : w->k / 16);
}

static struct placed *placed_of(struct cuda_own *o, const struct kern_weight *w)
{
    for (size_t i = 0; i < o->n_placed; i++)
        if (o->placed[i].key == w) return &o->placed[i];
    return NULL;
}

/* Codes of a placed array from one form to another. */
static void place_words(struct kern_stream *s, const struct kern_weight *w, int32_t n,
                        enum cuda_form from, enum cuda_form to)
{
    for (int32_t i = 0; i < n; i++)
        cuda_place_words(s->cu, w[i].fmt, w[i].sfmt, w[i].n, w[i].k,
                         (uint8_t *)(uintptr_t)w[i].data, w[i].row_bytes,
                         (uint8_t *)(uintptr_t)w[i].scale, from, to);
}

/* Rows become 16-byte aligned and zero-padded, scales tight, codes as dequant.cuh wants them; the
 * array is one block with equal strides: all data, then all scales, then the table and room for
 * what place.cu says. An array of MXFP4 is one of experts: their products can be of codes, where
 * all scales allow it. */
static int place(struct kern_dev *dev, struct kern_weight *w, int32_t n, struct tow_err *err)
{
    struct kern_stream *s = &dev->stream;
    if (n < 1) return tow_fail(err, TOW_EINVAL, "place: %d weights", n);
    int64_t s_rows, s_bytes;
    scale_shape(&w[0], &s_rows, &s_bytes);
    const int64_t width = data_bytes(&w[0]), row = (width + 15) / 16 * 16;
    const int64_t data_each = (int64_t)align_up((size_t)(w[0].n * row));
    const int64_t scale_each =
        (int64_t)align_up((size_t)cuda_scale_room(w[0].fmt, w[0].sfmt, w[0].n, w[0].k));
    const int64_t table_at = (data_each + scale_each) * n;
    const int64_t says_at = table_at + n * (int64_t)sizeof(struct cuda_weight);
    struct cuda_place_says says = {};
    uint8_t *mem = (uint8_t *)alloc_dev(dev, (size_t)says_at + sizeof says);
    struct cuda_weight *t = (struct cuda_weight *)malloc((size_t)n * sizeof *t);
    struct cuda_weight *table = mem ? (struct cuda_weight *)(mem + table_at) : NULL;
    int rc = mem && t ? remember(dev, w, mem, table, n) : TOW_ENOMEM;
    if (rc < 0) {
        cudaFree(mem);
        free(t);
        return tow_fail(err, TOW_ENOMEM, "no device memory for %d weights [%d, %d]", n, w[0].n,
                        w[0].k);
    }
    for (int32_t i = 0; i < n && rc == 0; i++) {
        uint8_t *data = mem + data_each * i, *scale = mem + data_each * n + scale_each * i;
        rc = checked(s, "weights",
                     cudaMemcpy2DAsync(data, (size_t)row, w[i].data, (size_t)w[i].row_bytes,
                                       (size_t)width, (size_t)w[i].n, cudaMemcpyHostToDevice,
                                       s->cu));
        if (rc == 0 && s_rows)
            rc = checked(s, "weights",
                         cudaMemcpy2DAsync(scale, (size_t)s_bytes, w[i].scale,
                                           (size_t)w[i].scale_row_bytes, (size_t)s_bytes,
                                           (size_t)s_rows, cudaMemcpyHostToDevice, s->cu));
        cuda_place_scales(s->cu, w[i].fmt, w[i].sfmt, w[i].n, w[i].k, data, row, scale,
                          (struct cuda_place_says *)(mem + says_at));
        w[i].data = data;
        w[i].row_bytes = row;
        w[i].scale = scale_each ? scale : NULL;
        w[i].scale_row_bytes = s_bytes;
        t[i] = {data, scale_each ? scale : NULL, w[i].scale2, w[i].input_scale};
    }
    if (rc == 0) rc = write_in(s, table, t, (size_t)n * sizeof *t);
    if (rc == 0) rc = read_out(s, &says, mem + says_at, sizeof says);
    if (rc == 0) {
        const bool e4m3 = cuda_fp8_products && s->arch == 90 && n > 1 && !says.wide &&
                          w[0].fmt == KERN_W_MXFP4 && w[0].sfmt == KERN_S_UE8M0 &&
                          w[0].k % 512 == 0; /* 16 bytes of scales */
        placed_of(&dev->own, w)->e4m3 = e4m3;
        place_words(s, w, n, CUDA_FORM_STORED, e4m3 ? CUDA_FORM_E4M3 : CUDA_FORM_BF16);
        rc = cuda_done(s, "place");
    }
    free(t);
    if (says.refused)
        return tow_fail(err, TOW_EINVAL, "weights [%d, %d]: an MXFP4 scale is above 2^17", w[0].n,
                        w[0].k);
    return rc < 0 ? tow_fail(err, rc, "weights to the device: %s", dev->own.what) : 0;
}

static const void *place_bytes(struct kern_dev *dev, const void *host, size_t bytes)
{
    void *mem = alloc_dev(dev, bytes);
    if (!mem) return NULL;
    /* Remembered last: what is remembered is freed with the device. */
    if (write_in(&dev->stream, mem, host, bytes) < 0 || remember(dev, NULL, mem, NULL, 0) < 0) {
        free_dev(dev, mem);
        return NULL;
    }
    return mem;
}

static void unplace(struct kern_dev *dev, const void *placed)
{
    struct cuda_own *o = &dev->own;
    for (size_t i = 0; i < o->n_placed; i++) {
        if (o->placed[i].mem != placed) continue;
        free_dev(dev, o->placed[i].mem);
        o->placed[i] = o->placed[--o->n_placed];
        return;
    }
}

const struct cuda_weight *cuda_weights_of(struct kern_stream *s, const struct kern_weight *w)
{
    const struct placed *p = placed_of(s->own, w);
    return p ? p->table : NULL;
}

bool cuda_placed_e4m3(struct kern_stream *s, const struct kern_weight *w)
{
    const struct placed *p = placed_of(s->own, w);
    return p && p->e4m3;
}

int cuda_place_for_bf16(struct kern_stream *s, const struct kern_weight *w)
{
    struct placed *p = placed_of(s->own, w);
    if (!p || s->own->capturing) return TOW_EINVAL;
    if (p->e4m3) place_words(s, w, p->n, CUDA_FORM_E4M3, CUDA_FORM_BF16);
    p->e4m3 = false;
    return 0;
}

/* ------------------------------------------------------------------ a second stream */

struct second {
    struct kern_stream stream; /* first */
    struct cuda_own own;
};

/* Its thread may be on another device, or none yet. */
static void here(const struct kern_stream *s)
{
    cudaSetDevice(s->number);
}

static int put(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    here(s);
    if (bytes == 0) return s->own->rc;
    return checked(s, "put", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, s->cu));
}
static int get(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    here(s);
    if (bytes == 0) return s->own->rc;
    return checked(s, "get", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, s->cu));
}
static int tell(struct kern_stream *s, void (*on_done)(void *arg), void *arg)
{
    here(s);
    return checked(s, "tell", cudaLaunchHostFunc(s->cu, on_done, arg));
}
static int await_other(struct kern_stream *s, struct kern_stream *other)
{
    here(s);
    if (checked(s, "await", cudaEventRecord(s->own->other, other->cu)) < 0) return s->own->rc;
    return checked(s, "await", cudaStreamWaitEvent(s->cu, s->own->other, 0));
}
static int pages(struct kern_stream *s, const struct kern_pages *p)
{
    here(s);
    return kern_pages_cuda(s, p);
}

static int pin(struct kern_dev *dev, void *p, size_t bytes, struct tow_err *err)
{
    here(&dev->stream);
    const cudaError_t e = cudaHostRegister(p, bytes, cudaHostRegisterPortable);
    if (e == cudaSuccess) return 0;
    cudaGetLastError(); /* an answer, not a broken stream */
    return tow_fail(err, TOW_EDEVICE, "%zu MiB of host memory cannot be pinned: %s", bytes >> 20,
                    cudaGetErrorString(e));
}
static void unpin(struct kern_dev *dev, void *p)
{
    here(&dev->stream);
    if (cudaHostUnregister(p) != cudaSuccess) cudaGetLastError(); /* it was not pinned */
}

static int seal(struct kern_dev *dev)
{
    const int rc = mirror_grow(&dev->stream, &dev->own.small, SMALL_BYTES);
    dev->own.sealed = true;
    return rc;
}

static cudaError_t begin_stream(struct kern_stream *s)
{
    cudaError_t e = cudaStreamCreateWithFlags(&s->cu, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&s->own->other, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaMallocHost((void **)&s->own->staging, STAGING_BYTES);
    if (e == cudaSuccess) e = cudaMallocHost((void **)&s->own->reading, READ_BYTES);
    return e;
}
static void end_stream(struct kern_stream *s)
{
    struct cuda_own *o = s->own;
    forget(s);
    for (int i = 0; i < CUDA_N_SLOTS; i++) cudaFree(o->slot[i].mem);
    mirror_free(&o->announced);
    mirror_free(&o->foreign);
    mirror_free(&o->small);
    cudaFreeHost(o->staging);
    cudaFreeHost(o->reading);
    if (o->other) cudaEventDestroy(o->other);
    if (s->cu) cudaStreamDestroy(s->cu);
}

static int open_second(struct kern_stream **out, struct kern_dev *dev, struct tow_err *err)
{
    struct second *x = (struct second *)calloc(1, sizeof *x);
    if (!x) return tow_fail(err, TOW_ENOMEM, "no memory for a stream");
    here(&dev->stream);
    x->stream = dev->stream;
    x->stream.cu = NULL;
    x->stream.own = &x->own;
    const cudaError_t e = begin_stream(&x->stream);
    if (e != cudaSuccess) {
        end_stream(&x->stream);
        free(x);
        return tow_fail(err, TOW_EDEVICE, "a second stream: %s", cudaGetErrorString(e));
    }
    *out = &x->stream;
    return 0;
}
static void close_second(struct kern_stream *s)
{
    here(s);
    end_stream(s);
    free(s);
}

/* ------------------------------------------------------------------ opening */

static void close_dev(struct kern_dev *dev)
{
    struct cuda_own *o = &dev->own;
    cudaSetDevice(dev->stream.number);
    end_stream(&dev->stream);
    for (size_t i = 0; i < o->n_placed; i++) cudaFree(o->placed[i].mem);
    free(o->placed);
    free(dev);
}
/* The current device is a thread's own. */
static void use_dev(struct kern_dev *dev)
{
    cudaSetDevice(dev->stream.number);
}
static struct kern_stream *stream_of(struct kern_dev *dev)
{
    return &dev->stream;
}
static int one_thread(const struct kern_dev *dev)
{
    (void)dev;
    return 1;
}
static const char *isa_of(const struct kern_dev *dev)
{
    return dev->isa;
}
static const char *why_of(const struct kern_dev *dev)
{
    return dev->own.what;
}

static uint64_t free_bytes(const struct kern_dev *dev)
{
    size_t n = 0, total;
    (void)dev;
    return cudaMemGetInfo(&n, &total) == cudaSuccess ? n : 0;
}

static bool fp8_products(struct kern_dev *dev, bool on)
{
    if (dev->stream.arch != 90) return false;
    cuda_fp8_products = on;
    return true;
}

static const struct kern_backend *backend(void)
{
    static struct kern_backend b;
    b.ops = &kern_cuda;
    b.host_memory = false;
    b.use = use_dev;
    b.close = close_dev;
    b.stream = stream_of;
    b.threads = one_thread;
    b.isa = isa_of;
    b.why = why_of;
    b.free_bytes = free_bytes;
    b.fp8_products = fp8_products;
    b.alloc = alloc_dev;
    b.free = free_dev;
    b.sync = sync_stream;
    b.write = write_in;
    b.read = read_out;
    b.copy = copy_within;
    b.repeat = repeat;
    b.forget = forget;
    b.batch = batch;
    b.place = place;
    b.place_bytes = place_bytes;
    b.unplace = unplace;
    b.seal = seal;
    b.open_stream = open_second;
    b.close_stream = close_second;
    b.pin = pin;
    b.unpin = unpin;
    b.put = put;
    b.get = get;
    b.tell = tell;
    b.await = await_other;
    b.pages = pages;
    return &b;
}

static int open_on(struct kern_dev *dev, struct tow_err *err)
{
    struct kern_stream *s = &dev->stream;
    cudaDeviceProp prop;
    cudaError_t e = cudaSetDevice(s->number);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&prop, s->number);
    if (e != cudaSuccess)
        return tow_fail(err, TOW_EDEVICE, "device cuda:%d: %s", s->number, cudaGetErrorString(e));
    if (prop.major != 9 && prop.major != 12)
        return tow_fail(
            err, TOW_ENOENT,
            "device cuda:%d is %s, compute capability %d.%d; this build has code for 9.0 "
            "and 12.0",
            s->number, prop.name, prop.major, prop.minor);
    s->n_sm = prop.multiProcessorCount;
    s->arch = prop.major * 10;
    s->max_shared = (int)prop.sharedMemPerBlockOptin;
    snprintf(dev->isa, sizeof dev->isa, "sm_%d%d", prop.major, prop.minor);
    e = begin_stream(s);
    if (e != cudaSuccess)
        return tow_fail(err, TOW_EDEVICE, "device cuda:%d: %s", s->number, cudaGetErrorString(e));
    return 0;
}

/* No device is a fact about the machine; one that cannot be used is a fault. "Insufficient" is also
 * what CUDA says of no driver at all, whose version is 0. */
static int no_devices(int number, cudaError_t e, struct tow_err *err)
{
    int driver = 0, mine = 0;
    cudaGetLastError();
    if (e == cudaErrorInsufficientDriver) {
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&mine);
    }
    if (driver > 0)
        return tow_fail(
            err, TOW_EDEVICE,
            "device cuda:%d: the driver is too old for CUDA %d.%d, which this build has: "
            "it knows %d.%d",
            number, mine / 1000, mine % 1000 / 10, driver / 1000, driver % 1000 / 10);
    const bool none =
        e == cudaSuccess || e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver;
    return tow_fail(err, none ? TOW_ENOENT : TOW_EDEVICE, "device cuda:%d: %s (%s)", number,
                    none ? "this machine has no CUDA device" : "CUDA does not start",
                    cudaGetErrorString(e));
}

extern "C" int kern_dev_open_cuda(struct kern_dev **out, int number, struct tow_err *err)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) return no_devices(number, e, err);
    if (number >= n)
        return tow_fail(err, TOW_EINVAL, "device cuda:%d: must be cuda:0 to cuda:%d", number,
                        n - 1);
    struct kern_dev *dev = (struct kern_dev *)calloc(1, sizeof *dev);
    if (!dev) return tow_fail(err, TOW_ENOMEM, "no memory for the device");
    dev->stream.number = number;
    dev->head.backend = dev->stream.head.backend = backend();
    dev->stream.own = &dev->own;
    int rc = open_on(dev, err);
    if (rc < 0) {
        close_dev(dev);
        return rc;
    }
    *out = dev;
    return 0;
}
