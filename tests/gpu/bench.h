/* tests/gpu/bench.h - the frame of the GPU benchmarks: reads what they are told, opens the device,
 * measures its copy bandwidth, times enqueued calls, and prints one line per case beside its floor
 * and its goal.
 *
 * Time     Mean of calls enqueued between two syncs, median of five rounds, after a warm-up. A call
 *          is given a number that counts up: with it a case takes its buffers in turn, so that what
 *          it reads is not left in L2 by the call before (bench_turns says how many copies that
 *          needs).
 * Floor    The larger of bytes / copy bandwidth and FLOPs / ceiling. A copy of 4 GiB moves 8 GiB.
 * Use      An op with sequences: announce them by kern_stream_batch() first, or each call waits.
 *
 *     static int call(void *ctx, int i)
 *     {
 *         struct my *m = ctx;
 *         return ops->add(s, &m->p[i % m->turns]);
 *     }
 *     ...
 *     struct bench b;
 *     int rc = bench_open(&b, argc, argv, NULL);
 *     if (rc) return rc;
 *     bench_run(&b, &(struct bench_case){.name = "add", .shape = "8192 x 4096", .call = call,
 *                                        .ctx = &m, .bytes = 8192.0 * 4096 * 8,
 *                                        .goal = "<= 1.2 x"});
 *     return bench_close(&b);
 */
#ifndef TESTS_GPU_BENCH_H
#define TESTS_GPU_BENCH_H

#include "common/base/err.h"
#include "kernels/dev.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"
#include "tests/support/args.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BENCH_SKIPPED = 77, BENCH_ROUNDS = 5 };
/* More than the L2 of an H200 (50 MiB), the device that goals are for. */
#define BENCH_L2_BYTES (64.0 * (1 << 20))
/* What its matrix unit does in bf16 under load: the ceiling of floors by FLOPs. */
#define BENCH_BF16_FLOPS 780e12
#define BENCH_FP8_FLOPS  1500e12

struct bench {
    struct kern_dev *dev;
    struct kern_stream *s;
    const struct kern_ops *ops;
    const char *only;  /* argument: run only cases whose name contains it; NULL: all */
    double copy_bytes; /* per second */
    char others[600];  /* names that do not contain it */
    int n_timed, n_failed;
    void *mem[512]; /* device, freed by bench_close */
    int n_mem;
};

struct bench_case {
    const char *name, *shape;
    int (*call)(void *ctx, int i); /* enqueues call i; 0 or an error */
    void *ctx;
    double bytes;        /* each input read once, each output written once */
    double flops;        /* 0: bytes alone make the floor */
    double flops_second; /* ceiling of the unit that does them */
    const char *goal;    /* NULL: none */
    int ops;             /* that a call enqueues, each with these bytes and flops; 0: one */
};

/* ------------------------------------------------------------------ what it is told */

/* At most max of the numbers that a program knows; ends it otherwise. Returns how many. */
static inline int bench_some(const char *what, const char *text, const int32_t *known, int n_known,
                             int max, int32_t *out)
{
    char want[200] = "one of";
    const int n = bench_numbers(text, 0, 1L << 30, max, out);
    bool good = n > 0;
    for (int i = 0; i < n; i++) {
        bool is = false;
        for (int k = 0; k < n_known; k++) is |= out[i] == known[k];
        good &= is;
    }
    if (good) return n;
    for (int k = 0; k < n_known; k++)
        snprintf(want + strlen(want), sizeof want - strlen(want), " %d", known[k]);
    if (max > 1)
        snprintf(want + strlen(want), sizeof want - strlen(want),
                 ", or several with commas between");
    bench_wrong(what, text, want);
    return -1;
}
/* A decimal number above 0, or -1. */
static inline double bench_amount(const char *text)
{
    char *end;
    const double v = strtod(text, &end);
    const bool plain = *text && text[strspn(text, "0123456789.")] == 0;
    return plain && !*end && v > 0 && isfinite(v) ? v : -1;
}
/* Takes out the first argument that is `name`, or begins with it where that ends in '=', and returns
 * what follows; NULL: none. */
static inline const char *bench_take(int *argc, char **argv, const char *name)
{
    for (int i = 1; i < *argc; i++) {
        const char *arg = argv[i];
        const size_t n = strlen(name);
        if (strncmp(arg, name, n) != 0 || (name[n - 1] != '=' && arg[n])) continue;
        for ((*argc)--; i < *argc; i++) argv[i] = argv[i + 1];
        return arg + n;
    }
    return NULL;
}
/* A device that could not be opened: what the program ends with, after a line that says why; what:
 * the argument that named it. */
static inline int bench_no_device(const struct tow_err *err, const char *what)
{
    const char *why = test_without_flag(err->msg);
    const bool named = why != err->msg;
    printf("%s: %s%s%s\n", program_invocation_short_name, named ? what : "", named ? " " : "", why);
    return err->code == TOW_ENOENT ? BENCH_SKIPPED : err->code == TOW_EINVAL ? BENCH_WRONG : 1;
}

/* ------------------------------------------------------------------ memory */

static inline double bench_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Device memory of zeros; ends the program when there is none. */
static inline void *bench_alloc(struct bench *b, double bytes)
{
    void *p = kern_dev_alloc(b->dev, (size_t)bytes);
    if (!p || b->n_mem == (int)(sizeof b->mem / sizeof *b->mem)) {
        fprintf(stderr, "bench: no device memory for %.0f bytes (or too many buffers)\n", bytes);
        exit(1);
    }
    return b->mem[b->n_mem++] = p;
}
/* Gives back everything allocated, so that the next case has it. */
static inline void bench_free_all(struct bench *b)
{
    while (b->n_mem > 0) kern_dev_free(b->dev, b->mem[--b->n_mem]);
}

/* A block of up to 4 MiB from the host, then copies of what is there: random numbers repeat, which
 * no kernel here can see. */
static inline void bench_spread(struct bench *b, void *dst, const void *block, size_t block_bytes,
                                size_t bytes)
{
    size_t have = bytes < block_bytes ? bytes : block_bytes;
    kern_stream_write(b->s, dst, block, have);
    while (have < bytes) {
        size_t n = bytes - have < have ? bytes - have : have;
        kern_stream_copy(b->s, (uint8_t *)dst + have, dst, n);
        have += n;
    }
    kern_stream_sync(b->s);
}
static inline uint64_t bench_next(uint64_t *x)
{
    *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
    return *x * UINT64_C(0x2545f4914f6cdd1d);
}
/* About normal, mean 0, standard deviation 1. */
static inline float bench_normal(uint64_t *x)
{
    uint64_t u = bench_next(x);
    float s = (float)(u & 0xffff) + (float)(u >> 16 & 0xffff) + (float)(u >> 32 & 0xffff) +
              (float)(u >> 48);
    return (s * 0x1p-16f - 2.0f) * 1.7320508f;
}
enum { BENCH_BLOCK = 4 << 20 };
/* n elements of type t, normal times scale. */
static inline void *bench_random(struct bench *b, double n, enum kern_dtype t, float scale)
{
    const size_t e = (size_t)kern_dtype_bytes(t), bytes = (size_t)n * e;
    const size_t block = bytes < BENCH_BLOCK ? bytes : BENCH_BLOCK;
    static uint64_t seed = 0x9e3779b97f4a7c15u;
    uint8_t *h = malloc(block + 4), *p = bench_alloc(b, (double)bytes);
    if (!h) exit(1);
    for (size_t i = 0; i + e <= block; i += e) {
        float x = bench_normal(&seed) * scale;
        uint16_t u = kern_bf16_encode(x);
        memcpy(h + i, t == KERN_F32 ? (void *)&x : (void *)&u, e);
    }
    bench_spread(b, p, h, block, bytes);
    free(h);
    return p;
}
/* n random bytes, each lo .. hi. */
static inline void *bench_bytes(struct bench *b, double n, int lo, int hi)
{
    const size_t bytes = (size_t)n, block = bytes < BENCH_BLOCK ? bytes : BENCH_BLOCK;
    static uint64_t seed = 0x2545f4914f6cdd1du;
    uint8_t *h = malloc(block + 1), *p = bench_alloc(b, n);
    if (!h) exit(1);
    for (size_t i = 0; i < block; i++)
        h[i] = (uint8_t)(lo + (int)((bench_next(&seed) >> 33) % (uint64_t)(hi - lo + 1)));
    bench_spread(b, p, h, block, bytes);
    free(h);
    return p;
}
/* Host bytes, on the device. */
static inline void *bench_send(struct bench *b, const void *host, size_t bytes)
{
    void *p = bench_alloc(b, (double)bytes);
    kern_stream_write(b->s, p, host, bytes);
    return p;
}

/* Copies of a call's buffers that together pass the L2, 1 .. most. */
static inline int bench_turns(double bytes_of_a_call, int most)
{
    int n = bytes_of_a_call > 0 ? (int)(2 * BENCH_L2_BYTES / bytes_of_a_call) + 1 : 1;
    return n < 1 ? 1 : n > most ? most : n;
}

static inline int bench_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
/* Seconds of a call; negative: it failed. max_s bounds what is spent on it. */
static inline double bench_seconds(struct bench *b, int (*call)(void *ctx, int i), void *ctx,
                                   double max_s)
{
    double round[BENCH_ROUNDS];
    int i = 0, n = 3;
    for (int r = -2; r < BENCH_ROUNDS; r++) { /* the first warms up, the second finds n */
        double begin = bench_now();
        for (int k = 0; k < n; k++)
            if (call(ctx, i++) < 0) return -1;
        if (kern_stream_sync(b->s) < 0) return -1;
        double each = (bench_now() - begin) / n;
        if (r >= 0) round[r] = each;
        if (r == -1) {
            double want = max_s / (BENCH_ROUNDS + 1) / each;
            n = want < 20 ? 20 : want > 500 ? 500 : (int)want;
        }
    }
    qsort(round, BENCH_ROUNDS, sizeof *round, bench_by_value);
    return round[BENCH_ROUNDS / 2];
}

static inline bool bench_wants(struct bench *b, const char *name)
{
    if (!b->only || strstr(name, b->only)) return true;
    const size_t at = strlen(b->others);
    if (!strstr(b->others, name) && at + strlen(name) + 8 < sizeof b->others)
        snprintf(b->others + at, sizeof b->others - at, "%s%s", at ? ", " : "", name);
    return false;
}

/* Times the case and prints its line; returns microseconds, or -1. */
static inline double bench_run(struct bench *b, const struct bench_case *c)
{
    if (!bench_wants(b, c->name)) return -1;
    double t = bench_seconds(b, c->call, c->ctx, 0.2) / (c->ops > 0 ? c->ops : 1);
    if (t < 0) {
        printf("%-18s %-30s FAILED\n", c->name, c->shape);
        b->n_failed++;
        return -1;
    }
    b->n_timed++;
    double bytes_s = c->bytes / b->copy_bytes;
    double flops_s = c->flops_second > 0 ? c->flops / c->flops_second : 0;
    double floor_s = bytes_s > flops_s ? bytes_s : flops_s;
    printf("%-18s %-30s %9.2f us %7.0f GB/s %7.1f TFLOP/s  floor %9.2f us (%s)  x %6.2f  %s%s\n",
           c->name, c->shape, t * 1e6, c->bytes / t * 1e-9, c->flops / t * 1e-12, floor_s * 1e6,
           bytes_s >= flops_s ? "bytes" : "flops", floor_s > 0 ? t / floor_s : 0,
           c->goal ? "goal " : "", c->goal ? c->goal : "");
    return t * 1e6;
}

static inline int bench_copy_call(void *ctx, int i)
{
    struct bench *b = (struct bench *)ctx;
    (void)i;
    return kern_stream_copy(b->s, b->mem[0], b->mem[1], (size_t)4 << 30);
}

/* argv: [PART OF A NAME] [cuda:N]; own: what the usage says of the program's own arguments, which it
 * has taken out (bench_take), and of its environment, or NULL. 0, or what main() returns: 77 where
 * there is no device. A wrong argument ends the program. */
static inline int bench_open(struct bench *b, int argc, char **argv, const char *own)
{
    struct tow_err err = {0};
    const char *spec = NULL;
    memset(b, 0, sizeof *b);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc; i++) {
        const char **at = strncmp(argv[i], "cuda", 4) ? &b->only : &spec;
        if (strcmp(argv[i], "--help") == 0) {
            printf("usage: %s [PART OF A NAME] [cuda:N]%s\n", program_invocation_short_name,
                   own ? own : "");
            exit(0);
        }
        if (*argv[i] == '-' || !*argv[i] || *at)
            bench_wrong("argument", argv[i], "[PART OF A NAME] [cuda:N]; --help lists all");
        *at = argv[i];
    }
    if (!spec) spec = "cuda:0";
    if (kern_dev_open(&b->dev, spec, 0, &err) < 0) return bench_no_device(&err, "argument");
    b->s = kern_dev_stream(b->dev);
    b->ops = kern_dev_ops(b->dev);
    bench_alloc(b, 0x1p32);
    bench_alloc(b, 0x1p32);
    double t = bench_seconds(b, bench_copy_call, b, 0.05);
    bench_free_all(b);
    if (t < 0) {
        printf("%s: the device cannot copy\n", argv[0]);
        kern_dev_close(b->dev);
        return 1;
    }
    b->copy_bytes = 0x1p33 / t;
    printf("%s: %s, %s; copy of 4 GiB: %.0f GB/s read and written together\n", argv[0], spec,
           kern_dev_isa(b->dev), b->copy_bytes * 1e-9);
    return 0;
}

/* What main() returns; nothing timed is a failure. */
static inline int bench_close(struct bench *b)
{
    char want[sizeof b->others + 64];
    bench_free_all(b);
    kern_dev_close(b->dev);
    snprintf(want, sizeof want, "part of a name that other settings leave: %s", b->others);
    if (b->n_failed)
        printf("%d cases FAILED\n", b->n_failed);
    else if (b->n_timed == 0)
        bench_wrong("PART OF A NAME", b->only ? b->only : "", want);
    return b->n_failed > 0;
}

#endif
