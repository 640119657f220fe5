/* kernels/cpu/dev.c - the CPU device: its team of threads, its scratch, and the op table.
 *
 * A job is published by raising `round`; workers see it while they spin or are woken through the
 * condition. Each thread begins with an equal share of neighbouring parts, so that what it fetches
 * ahead is its own next part, and then takes parts from the ends of the others' shares, so that a
 * slow core does fewer. The driver takes parts too and then waits for the workers in the same way:
 * a short spin, then the condition. One counter for all was slower: neighbours went to different
 * cores, which fetched them twice.
 */
#include "kernels/cpu/team.h"

#include "common/base/err.h"
#include "kernels/dev_impl.h"
#include "kernels/ops.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum {
    MAX_THREADS = 256,
    /* A tenth of a millisecond or two: longer than what a decode step does between two shared ops,
     * since on a virtual machine it takes as long to wake a thread that sleeps. */
    SPIN_ROUNDS = 4000
};

/* A thread's share of the parts: the next one in the lower half, the end in the upper. */
struct share {
    _Alignas(64) _Atomic uint64_t left;
};

struct kern_stream {
    struct kern_head head; /* first */
    enum kern_cpu_isa isa;
    int n_threads;
    pthread_t threads[MAX_THREADS];
    int n_started;

    kern_part_fn *fn;
    void *arg;
    int64_t base;         /* of the parts now shared out */
    struct share *shares; /* owned; [n_threads] */
    _Atomic int pending;  /* workers not yet back from this round */
    _Atomic unsigned round;
    _Atomic int sleepers; /* workers in, or about to enter, the wait for a round */
    _Atomic bool driver_sleeps;
    _Atomic bool stop;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;

    struct {
        void *mem;
        size_t bytes;
    } slot[KERN_N_SLOTS];
};

struct kern_dev {
    struct kern_head head; /* first */
    struct kern_stream stream;
};

struct worker_arg {
    struct kern_stream *s;
    int thread;
};

static void relax(void)
{
#if defined(__x86_64__)
    _mm_pause();
#endif
}

/* The owner takes from the front, others from the end. -1: nothing left. */
static int64_t take_part(struct share *h, bool owner)
{
    uint64_t v = atomic_load_explicit(&h->left, memory_order_relaxed), after;
    uint32_t next, end;
    do {
        next = (uint32_t)v;
        end = (uint32_t)(v >> 32);
        if (next >= end) return -1;
        after = owner ? v + 1 : v - ((uint64_t)1 << 32);
    } while (!atomic_compare_exchange_weak_explicit(&h->left, &v, after, memory_order_relaxed,
                                                    memory_order_relaxed));
    return owner ? next : end - 1;
}

static void run_parts(struct kern_stream *s, int thread)
{
    for (int i = 0; i < s->n_threads; i++) {
        struct share *h = &s->shares[(thread + i) % s->n_threads];
        for (int64_t part; (part = take_part(h, i == 0)) >= 0;)
            s->fn(s->arg, s->base + part, thread);
    }
}

/* Returns once round differs from seen, or stop is set. */
static void wait_round(struct kern_stream *s, unsigned seen)
{
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        if (atomic_load(&s->round) != seen) return;
        relax();
    }
    pthread_mutex_lock(&s->lock);
    atomic_fetch_add(&s->sleepers, 1);
    while (atomic_load(&s->round) == seen) pthread_cond_wait(&s->wake, &s->lock);
    atomic_fetch_sub(&s->sleepers, 1);
    pthread_mutex_unlock(&s->lock);
}

static void *worker_main(void *p)
{
    struct worker_arg a = *(struct worker_arg *)p;
    struct kern_stream *s = a.s;
    free(p);
    for (unsigned seen = 0;;) {
        wait_round(s, seen);
        seen = atomic_load(&s->round);
        if (atomic_load(&s->stop)) return NULL;
        run_parts(s, a.thread);
        if (atomic_fetch_sub(&s->pending, 1) == 1 && atomic_load(&s->driver_sleeps)) {
            pthread_mutex_lock(&s->lock);
            pthread_cond_signal(&s->done);
            pthread_mutex_unlock(&s->lock);
        }
    }
}

static void publish_round(struct kern_stream *s)
{
    atomic_fetch_add(&s->round, 1);
    if (atomic_load(&s->sleepers) > 0) {
        pthread_mutex_lock(&s->lock);
        pthread_cond_broadcast(&s->wake);
        pthread_mutex_unlock(&s->lock);
    }
}

static void run_round(struct kern_stream *s, int64_t base, uint32_t n)
{
    s->base = base;
    for (int i = 0; i < s->n_threads; i++) {
        uint64_t begin = (uint64_t)n * (unsigned)i / (unsigned)s->n_threads,
                 end = (uint64_t)n * (unsigned)(i + 1) / (unsigned)s->n_threads;
        atomic_store_explicit(&s->shares[i].left, end << 32 | begin, memory_order_relaxed);
    }
    atomic_store(&s->pending, s->n_threads - 1);
    publish_round(s);
    run_parts(s, 0);
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        if (atomic_load(&s->pending) == 0) return;
        relax();
    }
    pthread_mutex_lock(&s->lock);
    atomic_store(&s->driver_sleeps, true);
    while (atomic_load(&s->pending) > 0) pthread_cond_wait(&s->done, &s->lock);
    atomic_store(&s->driver_sleeps, false);
    pthread_mutex_unlock(&s->lock);
}

void kern_parallel(struct kern_stream *s, int64_t n_parts, kern_part_fn *fn, void *arg)
{
    if (s->n_threads == 1 || n_parts <= 1) {
        for (int64_t i = 0; i < n_parts; i++) fn(arg, i, 0);
        return;
    }
    s->fn = fn;
    s->arg = arg;
    for (int64_t base = 0; base < n_parts; base += INT32_MAX)
        run_round(s, base, n_parts - base < INT32_MAX ? (uint32_t)(n_parts - base) : INT32_MAX);
}

void *kern_scratch(struct kern_stream *s, enum kern_slot slot, size_t bytes)
{
    if (bytes > s->slot[slot].bytes) {
        size_t room = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
        free(s->slot[slot].mem);
        s->slot[slot].mem = aligned_alloc(4096, room);
        s->slot[slot].bytes = s->slot[slot].mem ? room : 0;
    }
    return s->slot[slot].mem;
}

void *kern_scratch_each(struct kern_stream *s, enum kern_slot slot, size_t bytes, size_t *stride)
{
    /* Rounded up to pages plus one line, so that threads share no line and do not alias in the
     * cache. */
    *stride = ((bytes + 4095) & ~(size_t)4095) + 64;
    return kern_scratch(s, slot, *stride * (size_t)s->n_threads);
}

enum kern_cpu_isa kern_stream_isa(const struct kern_stream *s)
{
    return s->isa;
}
int kern_stream_threads(const struct kern_stream *s)
{
    return s->n_threads;
}

/* --- instruction sets */

#if defined(__x86_64__)
/* The kernel keeps tile registers only for processes that asked for them; it may also refuse. */
static bool has_amx(void)
{
    enum { TILE_AND_BF16 = 1 << 24 | 1 << 22, GFNI_AND_VBMI = 1 << 8 | 1 << 1 };
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILE_AND_BF16) != TILE_AND_BF16 ||
        (c & GFNI_AND_VBMI) != GFNI_AND_VBMI)
        return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif

enum kern_cpu_isa kern_cpu_best_isa(void)
{
#if defined(__x86_64__)
    /* The compiler's check covers the operating system's saving of the wide registers. */
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return KERN_CPU_C;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 29))) return KERN_CPU_C; /* f16c */
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return KERN_CPU_AVX2;
    return has_amx() ? KERN_CPU_AMX : KERN_CPU_AVX512;
#else
    return KERN_CPU_C;
#endif
}

#define X(op) int kern_##op##_c(struct kern_stream *s, const struct kern_##op *p);
KERN_OPS(X)
#undef X
#if defined(__x86_64__)
#define X(op)                                                                                      \
    int kern_##op##_avx2(struct kern_stream *s, const struct kern_##op *p);                        \
    int kern_##op##_avx512(struct kern_stream *s, const struct kern_##op *p);                      \
    int kern_##op##_amx(struct kern_stream *s, const struct kern_##op *p);
KERN_OPS(X)
#undef X
#endif

#if defined(__x86_64__)
#define X(op)                                                                                      \
    static int op##_cpu(struct kern_stream *s, const struct kern_##op *p)                          \
    {                                                                                              \
        int rc = kern_##op##_check(p);                                                             \
        if (rc < 0) return rc;                                                                     \
        switch (s->isa) {                                                                          \
        case KERN_CPU_AMX: return kern_##op##_amx(s, p);                                           \
        case KERN_CPU_AVX512: return kern_##op##_avx512(s, p);                                     \
        case KERN_CPU_AVX2: return kern_##op##_avx2(s, p);                                         \
        default: return kern_##op##_c(s, p);                                                       \
        }                                                                                          \
    }
#else
#define X(op)                                                                                      \
    static int op##_cpu(struct kern_stream *s, const struct kern_##op *p)                          \
    {                                                                                              \
        int rc = kern_##op##_check(p);                                                             \
        return rc < 0 ? rc : kern_##op##_c(s, p);                                                  \
    }
#endif
KERN_OPS(X)
#undef X

const struct kern_ops kern_cpu = {.name = "cpu",
#define X(op) .op = op##_cpu,
                                  KERN_OPS(X)
#undef X
};

/* --- device */

static int allowed_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        int n = CPU_COUNT(&set);
        if (n > 0) return n;
    }
    return 1;
}

static void stop_team(struct kern_stream *s)
{
    atomic_store(&s->stop, true);
    publish_round(s);
    for (int i = 0; i < s->n_started; i++) pthread_join(s->threads[i], NULL);
    for (int i = 0; i < KERN_N_SLOTS; i++) free(s->slot[i].mem);
    free(s->shares);
    pthread_cond_destroy(&s->done);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
}

/* --- the back end */

static void close_cpu(struct kern_dev *dev)
{
    stop_team(&dev->stream);
    free(dev);
}
static struct kern_stream *stream_of(struct kern_dev *dev)
{
    return &dev->stream;
}
static int threads_of(const struct kern_dev *dev)
{
    return dev->stream.n_threads;
}
static const char *isa_of(const struct kern_dev *dev)
{
    static const char *const names[KERN_CPU_N_ISA] = {"c", "avx2", "avx512", "amx"};
    return names[dev->stream.isa];
}

static void *alloc_host(struct kern_dev *dev, size_t bytes)
{
    (void)dev;
    if (bytes > SIZE_MAX - 63) return NULL;
    size_t room = (bytes + 63) & ~(size_t)63;
    void *p = aligned_alloc(64, room ? room : 64);
    if (p) memset(p, 0, room ? room : 64);
    return p;
}
static void free_host(struct kern_dev *dev, void *p)
{
    (void)dev;
    free(p);
}

static const struct kern_backend cpu_backend = {.ops = &kern_cpu,
                                                .host_memory = true,
                                                .close = close_cpu,
                                                .stream = stream_of,
                                                .threads = threads_of,
                                                .isa = isa_of,
                                                .alloc = alloc_host,
                                                .free = free_host};

int kern_dev_open_cpu(struct kern_dev **out, int n_threads, enum kern_cpu_isa isa,
                      struct tow_err *err)
{
    if (n_threads < 0 || n_threads > MAX_THREADS)
        return tow_fail(err, TOW_EINVAL, "threads %d; must be 0 (all cores) to %d", n_threads,
                        MAX_THREADS);
    if (n_threads == 0) {
        n_threads = allowed_cores();
        if (n_threads > MAX_THREADS) n_threads = MAX_THREADS;
    }
    if ((int)isa < 0 || isa > kern_cpu_best_isa())
        return tow_fail(err, TOW_EINVAL, "this machine lacks instruction set %d", (int)isa);
    struct kern_dev *dev = calloc(1, sizeof *dev);
    if (!dev) return tow_fail(err, TOW_ENOMEM, "no memory for the cpu device");
    struct kern_stream *s = &dev->stream;
    dev->head.backend = s->head.backend = &cpu_backend;
    s->isa = isa;
    s->n_threads = n_threads;
    s->shares = aligned_alloc(_Alignof(struct share), (size_t)n_threads * sizeof *s->shares);
    if (!s->shares) {
        free(dev);
        return tow_fail(err, TOW_ENOMEM, "no memory for the cpu device");
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    pthread_cond_init(&s->done, NULL);
    for (int i = 1; i < n_threads; i++) {
        struct worker_arg *a = malloc(sizeof *a);
        int rc = TOW_ENOMEM;
        if (a) {
            *a = (struct worker_arg){s, i};
            rc = pthread_create(&s->threads[s->n_started], NULL, worker_main, a) ? TOW_ESYS : 0;
            if (rc < 0) free(a);
        }
        if (rc < 0) {
            stop_team(s);
            free(dev);
            return tow_fail(err, rc, "cannot start compute thread %d of %d", i + 1, n_threads);
        }
        s->n_started++;
    }
    *out = dev;
    return 0;
}
