/* kernels/apart.c - see apart.h. It is the CPU device with another back end's name at its head. */
#include "kernels/apart.h"

#include "common/base/err.h"
#include "kernels/cpu/team.h"
#include "kernels/dev_impl.h"
#include "kernels/ops.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LATE_US = 300 }; /* a task begins so long after it was given */

struct task {
    struct task *next;
    enum { COPY, PAGES, TELL } kind;
    void *dst;
    const void *src;
    size_t bytes;
    struct kern_pages pages; /* ids follow the task */
    void (*on_done)(void *arg);
    void *arg;
    uint32_t ids[];
};

struct second {
    struct kern_head head; /* first */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more, idle;
    struct task *first, **last; /* under lock; a task stays the first while it runs */
    bool quit;
};

static struct kern_backend backend;
static const struct kern_backend *cpu;

static void perform(struct task *t)
{
    const struct timespec late = {.tv_nsec = LATE_US * 1000};
    nanosleep(&late, NULL);
    switch (t->kind) {
    case COPY: memcpy(t->dst, t->src, t->bytes); break;
    case PAGES:
        t->pages.ids = t->ids;
        (void)kern_pages_cpu(&t->pages);
        break;
    case TELL: t->on_done(t->arg); break;
    }
}

static void *second_main(void *arg)
{
    struct second *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        struct task *t = s->first;
        if (!t) {
            pthread_cond_broadcast(&s->idle);
            if (s->quit) break;
            pthread_cond_wait(&s->more, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        perform(t);
        pthread_mutex_lock(&s->lock);
        s->first = t->next;
        if (!s->first) s->last = &s->first;
        free(t);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* The first stream has no tasks: what it is given is done at once. */
static bool is_second(const struct kern_stream *s)
{
    return ((const struct kern_head *)s)->backend != &backend;
}
static struct kern_backend second_backend;

static int give(struct kern_stream *to, const struct task *what, int32_t n_ids)
{
    struct second *s = (struct second *)to;
    struct task *t = malloc(sizeof *t + (size_t)n_ids * sizeof *t->ids);
    if (!t) return TOW_ENOMEM;
    *t = *what;
    t->next = NULL;
    if (n_ids) memcpy(t->ids, what->pages.ids, (size_t)n_ids * sizeof *t->ids);
    pthread_mutex_lock(&s->lock);
    *s->last = t;
    s->last = &t->next;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static int wait_idle(struct kern_stream *of)
{
    struct second *s = (struct second *)of;
    pthread_mutex_lock(&s->lock);
    while (s->first) pthread_cond_wait(&s->idle, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static int sync_apart(struct kern_stream *s)
{
    return is_second(s) ? wait_idle(s) : 0;
}
static int copy_apart(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    const struct task t = {.kind = COPY, .dst = dst, .src = src, .bytes = bytes};
    if (is_second(s)) return give(s, &t, 0);
    if (bytes) memcpy(dst, src, bytes);
    return 0;
}
/* Returns with src free, or dst there. */
static int copy_now(struct kern_stream *s, void *dst, const void *src, size_t bytes)
{
    const int rc = copy_apart(s, dst, src, bytes);
    return rc < 0 ? rc : sync_apart(s);
}
static int tell(struct kern_stream *s, void (*on_done)(void *arg), void *arg)
{
    const struct task t = {.kind = TELL, .on_done = on_done, .arg = arg};
    if (is_second(s)) return give(s, &t, 0);
    on_done(arg);
    return 0;
}
static int await_other(struct kern_stream *s, struct kern_stream *other)
{
    (void)s;
    return sync_apart(other);
}
static int pages(struct kern_stream *s, const struct kern_pages *p)
{
    const struct task t = {.kind = PAGES, .pages = *p};
    return is_second(s) ? give(s, &t, p->n) : kern_pages_cpu(p);
}

static int repeat(struct kern_stream *s, uint64_t key, int (*enqueue)(void *arg), void *arg)
{
    (void)s, (void)key;
    return enqueue(arg);
}
static void forget(struct kern_stream *s)
{
    (void)s;
}
static int batch(struct kern_stream *s, const struct kern_seq *seqs, int32_t n_seqs)
{
    (void)s, (void)seqs, (void)n_seqs;
    return 0;
}
/* Weights are only read: they stay where they are. */
static int place(struct kern_dev *dev, struct kern_weight *w, int32_t n, struct tow_err *err)
{
    (void)dev, (void)w, (void)n, (void)err;
    return 0;
}
static const void *place_bytes(struct kern_dev *dev, const void *host, size_t bytes)
{
    (void)dev, (void)bytes;
    return host;
}
static void unplace(struct kern_dev *dev, const void *placed)
{
    (void)dev, (void)placed;
}
static int seal(struct kern_dev *dev)
{
    (void)dev;
    return 0;
}
static int pin(struct kern_dev *dev, void *p, size_t bytes, struct tow_err *err)
{
    (void)dev, (void)p, (void)bytes, (void)err;
    return 0;
}
static void unpin(struct kern_dev *dev, void *p)
{
    (void)dev, (void)p;
}
static uint64_t free_bytes(const struct kern_dev *dev)
{
    (void)dev;
    return (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
}

static int open_second(struct kern_stream **out, struct kern_dev *dev, struct tow_err *err)
{
    struct second *s = calloc(1, sizeof *s);
    (void)dev;
    if (!s) return tow_fail(err, TOW_ENOMEM, "no memory for a stream");
    s->head.backend = &second_backend;
    s->last = &s->first;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->more, NULL);
    pthread_cond_init(&s->idle, NULL);
    if (pthread_create(&s->thread, NULL, second_main, s) != 0) {
        free(s);
        return tow_fail(err, TOW_ESYS, "no thread for a stream");
    }
    *out = (struct kern_stream *)s;
    return 0;
}
static void close_second(struct kern_stream *of)
{
    struct second *s = (struct second *)of;
    pthread_mutex_lock(&s->lock);
    s->quit = true;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->idle);
    pthread_cond_destroy(&s->more);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static void make_backends(void)
{
    backend = *cpu;
    backend.host_memory = false;
    backend.free_bytes = free_bytes;
    backend.sync = sync_apart;
    backend.write = backend.read = copy_now;
    backend.put = backend.get = backend.copy = copy_apart;
    backend.repeat = repeat;
    backend.forget = forget;
    backend.batch = batch;
    backend.place = place;
    backend.place_bytes = place_bytes;
    backend.unplace = unplace;
    backend.seal = seal;
    backend.open_stream = open_second;
    backend.close_stream = close_second;
    backend.pin = pin;
    backend.unpin = unpin;
    backend.tell = tell;
    backend.await = await_other;
    backend.pages = pages;
    second_backend = backend;
}

int kern_dev_open_apart(struct kern_dev **out, int n_threads, struct tow_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct kern_dev *dev;
    const int rc = kern_dev_open_cpu(&dev, n_threads, kern_cpu_best_isa(), err);
    if (rc < 0) return rc;
    struct kern_head *head = (struct kern_head *)dev;
    struct kern_head *stream = (struct kern_head *)kern_dev_stream(dev);
    cpu = head->backend;
    pthread_once(&once, make_backends);
    head->backend = stream->backend = &backend;
    *out = dev;
    return 0;
}
