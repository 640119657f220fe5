/* tests/gpu/trace.h - which kernels ran between two calls, and when: through CUPTI, the library
 * that profilers read such records from, loaded when it is asked for.
 *
 * Why      A step is one graph of hundreds of kernels: whether time goes to kernels, to gaps
 *          between them, or to what the host does before and after, none of our own clocks can say.
 * Cost     Records take time of their own, so kernels follow each other less closely than untraced:
 *          the caller prints both times.
 * Absent   Built without CUPTI's header (of CUDA 13), or without the library at run time
 *          (libcupti.so.13 beside CUDA's own, or in LD_LIBRARY_PATH): trace_open() says so and is
 *          false.
 * Use      trace_open() once; then trace_begin(), each pass between trace_pass_begin() and
 *          trace_pass_end(), trace_end(), trace_free(). One thread; in one file of a program.
 */
#ifndef TESTS_GPU_TRACE_H
#define TESTS_GPU_TRACE_H

#include <stdbool.h>

/* All calls of one kernel; copies and fills count as kernels by those names. */
struct trace_kernel {
    char name[96];
    int calls;
    double seconds;
};

/* Sums over the passes that were traced, in seconds. */
struct trace {
    double before, after;         /* from a pass's begin to its first kernel; its last to its end */
    double busy;                  /* any kernel runs */
    double gaps, longest;         /* between a pass's kernels none runs: all, the longest one */
    double sum;                   /* of kernels, one by one: above busy, several run at once */
    int n, n_gaps;                /* kernels; gaps among them */
    struct trace_kernel *kernels; /* owned; freed by trace_free() */
    int n_kernels;
};

#if defined(TOW_CUPTI)
#include <cupti.h>
#endif
#if defined(CUPTI_API_VERSION) && CUPTI_API_VERSION >= 130000 /* the records of CUDA 13 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char *__cxa_demangle(const char *name, char *out, size_t *room, int *status);

enum { TRACE_MOST_PASSES = 16, TRACE_BUFFER = 8 << 20 };

struct trace_event {
    uint64_t start, end;
    int kernel; /* in names */
};

static struct {
    CUptiResult (*enable)(CUpti_ActivityKind);
    CUptiResult (*disable)(CUpti_ActivityKind);
    CUptiResult (*flush)(uint32_t);
    CUptiResult (*now)(uint64_t *);
    CUptiResult (*next)(uint8_t *, size_t, CUpti_Activity **);
    CUptiResult (*callbacks)(CUpti_BuffersCallbackRequestFunc, CUpti_BuffersCallbackCompleteFunc);
    pthread_mutex_t lock; /* buffers are completed on a thread of CUPTI's */
    struct trace_event *events;
    size_t n_events, room_events;
    struct trace_kernel *names;
    int n_names, room_names;
    struct {
        uint64_t begin, end;
    } passes[TRACE_MOST_PASSES];
    int n_passes;
    bool lost; /* records, for want of memory */
} tracer = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int trace_name(const char *mangled)
{
    char *full = __cxa_demangle(mangled, NULL, NULL, NULL), name[sizeof tracer.names->name];
    const char *shown = full ? full : mangled;
    if (!strncmp(shown, "void ", 5)) shown += 5;
    /* Without the list of parameters, which says nothing that the name does not. */
    const char *end = strrchr(shown, ')');
    for (int depth = 0; end && end > shown; end--) {
        depth += *end == ')' ? 1 : *end == '(' ? -1 : 0;
        if (depth == 0) break;
    }
    snprintf(name, sizeof name, "%.*s", end && end > shown ? (int)(end - shown) : 1 << 10, shown);
    free(full);
    for (int i = 0; i < tracer.n_names; i++)
        if (!strcmp(tracer.names[i].name, name)) return i;
    if (tracer.n_names == tracer.room_names) {
        const int room = tracer.room_names ? 2 * tracer.room_names : 64;
        struct trace_kernel *p = realloc(tracer.names, (size_t)room * sizeof *p);
        if (!p) return -1;
        tracer.names = p;
        tracer.room_names = room;
    }
    tracer.names[tracer.n_names] = (struct trace_kernel){.calls = 0};
    memcpy(tracer.names[tracer.n_names].name, name, sizeof name);
    return tracer.n_names++;
}

static void trace_record(const CUpti_Activity *r)
{
    struct trace_event e = {.kernel = -1};
    if (r->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const CUpti_ActivityKernel10 *k = (const void *)r;
        e = (struct trace_event){k->start, k->end, trace_name(k->name)};
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy6 *k = (const void *)r;
        e = (struct trace_event){k->start, k->end, trace_name("copy")};
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *k = (const void *)r;
        e = (struct trace_event){k->start, k->end, trace_name("fill")};
    } else {
        return;
    }
    if (tracer.n_events == tracer.room_events) {
        const size_t room = tracer.room_events ? 2 * tracer.room_events : 4096;
        struct trace_event *p = realloc(tracer.events, room * sizeof *p);
        if (p) {
            tracer.events = p;
            tracer.room_events = room;
        }
    }
    if (e.kernel < 0 || tracer.n_events == tracer.room_events)
        tracer.lost = true;
    else
        tracer.events[tracer.n_events++] = e;
}

static void CUPTIAPI trace_buffer(uint8_t **buffer, size_t *size, size_t *most)
{
    *buffer = aligned_alloc(64, TRACE_BUFFER);
    *size = *buffer ? TRACE_BUFFER : 0;
    *most = 0;
}
static void CUPTIAPI trace_filled(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size,
                                  size_t valid)
{
    CUpti_Activity *r = NULL;
    (void)context, (void)stream, (void)size;
    pthread_mutex_lock(&tracer.lock);
    while (valid && tracer.next(buffer, valid, &r) == CUPTI_SUCCESS) trace_record(r);
    pthread_mutex_unlock(&tracer.lock);
    free(buffer);
}

static const CUpti_ActivityKind trace_kinds[] = {
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};
enum { TRACE_KINDS = sizeof trace_kinds / sizeof *trace_kinds };

/* Finds the library. False: it says why on stdout. */
static inline bool trace_open(void)
{
    static const char *const files[] = {"libcupti.so.13", "libcupti.so"};
    void *lib = NULL;
    for (size_t i = 0; i < sizeof files / sizeof *files && !lib; i++)
        lib = dlopen(files[i], RTLD_NOW);
    if (!lib) {
        printf("trace: %s: none\n", dlerror());
        return false;
    }
    const struct {
        void *to;
        const char *name;
    } calls[] = {{&tracer.enable, "cuptiActivityEnable"},
                 {&tracer.disable, "cuptiActivityDisable"},
                 {&tracer.flush, "cuptiActivityFlushAll"},
                 {&tracer.now, "cuptiGetTimestamp"},
                 {&tracer.next, "cuptiActivityGetNextRecord"},
                 {&tracer.callbacks, "cuptiActivityRegisterCallbacks"}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *f = dlsym(lib, calls[i].name);
        if (!f) {
            printf("trace: %s: none\n", dlerror());
            return false;
        }
        memcpy(calls[i].to, &f, sizeof f);
    }
    const CUptiResult rc = tracer.callbacks(trace_buffer, trace_filled);
    if (rc != CUPTI_SUCCESS) printf("trace: CUPTI error %d: none\n", (int)rc);
    return rc == CUPTI_SUCCESS;
}

/* Records from now on. False: it says why on stdout, and trace_end() need not be called. */
static inline bool trace_begin(void)
{
    tracer.n_events = 0;
    tracer.n_names = tracer.n_passes = 0;
    tracer.lost = false;
    for (int i = 0; i < TRACE_KINDS; i++) {
        const CUptiResult rc = tracer.enable(trace_kinds[i]);
        if (rc == CUPTI_SUCCESS) continue;
        printf("trace: CUPTI error %d: none\n", (int)rc);
        return false;
    }
    return true;
}

/* Round each pass; those beyond the first TRACE_MOST_PASSES are not counted. */
static inline void trace_pass_begin(void)
{
    if (tracer.n_passes < TRACE_MOST_PASSES) tracer.now(&tracer.passes[tracer.n_passes].begin);
}
static inline void trace_pass_end(void)
{
    if (tracer.n_passes < TRACE_MOST_PASSES) tracer.now(&tracer.passes[tracer.n_passes++].end);
}

static int trace_by_start(const void *a, const void *b)
{
    const struct trace_event *x = a, *y = b;
    return (x->start > y->start) - (x->start < y->start);
}

/* The events of one pass, by start. */
static void trace_add(struct trace *t, uint64_t begin, uint64_t end)
{
    uint64_t reached = 0;
    for (size_t i = 0; i < tracer.n_events; i++) {
        const struct trace_event *e = &tracer.events[i];
        if (e->start < begin || e->start > end) continue;
        const double seconds = (double)(e->end - e->start) * 1e-9;
        t->n++;
        t->sum += seconds;
        tracer.names[e->kernel].calls++;
        tracer.names[e->kernel].seconds += seconds;
        if (reached == 0) {
            t->before += (double)(e->start - begin) * 1e-9;
            reached = e->start;
        }
        if (e->start > reached) {
            const double gap = (double)(e->start - reached) * 1e-9;
            t->gaps += gap;
            t->n_gaps++;
            if (gap > t->longest) t->longest = gap;
            reached = e->start;
        }
        if (e->end > reached) {
            t->busy += (double)(e->end - reached) * 1e-9;
            reached = e->end;
        }
    }
    if (reached && end > reached) t->after += (double)(end - reached) * 1e-9;
}

/* Ends recording. Caller frees *t with trace_free(). False: nothing ran in the passes, and there is
 * nothing to free. */
static inline bool trace_end(struct trace *t)
{
    memset(t, 0, sizeof *t);
    tracer.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    for (int i = 0; i < TRACE_KINDS; i++) tracer.disable(trace_kinds[i]);
    pthread_mutex_lock(&tracer.lock);
    qsort(tracer.events, tracer.n_events, sizeof *tracer.events, trace_by_start);
    for (int i = 0; i < tracer.n_passes; i++)
        trace_add(t, tracer.passes[i].begin, tracer.passes[i].end);
    t->kernels = tracer.names; /* the next begins with none */
    t->n_kernels = tracer.n_names;
    tracer.names = NULL;
    tracer.n_names = tracer.room_names = 0;
    pthread_mutex_unlock(&tracer.lock);
    if (tracer.lost) printf("trace: records were lost for want of memory\n");
    if (t->n == 0) free(t->kernels);
    return t->n > 0;
}

static inline void trace_free(struct trace *t)
{
    free(t->kernels);
}

#else
#include <stdio.h>

static inline bool trace_open(void)
{
    printf("trace: this build has no CUPTI\n");
    return false;
}
static inline bool trace_begin(void)
{
    return false;
}
static inline void trace_pass_begin(void) {}
static inline void trace_pass_end(void) {}
static inline bool trace_end(struct trace *t)
{
    (void)t;
    return false;
}
static inline void trace_free(struct trace *t)
{
    (void)t;
}
#endif

#endif
