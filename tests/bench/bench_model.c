/* tests/bench/bench_model.c - the whole model: decode against memory bandwidth, prefill against
 * multiply-add speed.
 *
 * The checkpoint must be too large for any cache (tests/support/make_checkpoint.py --preset bench).
 * Both ceilings are measured in the same run by the same threads: bytes read per second from a
 * large buffer, and independent fma chains in registers. Every op goes through a table that counts
 * its time, the bytes of its weights and the operations of its products. With one thread time is
 * that thread's processor time, so that other programs do not count; with more it is the clock's. A
 * figure is the best of its repetitions: the least disturbed one.
 *
 * usage: bench_model CHECKPOINT [threads [prefill tokens]]    default: all cores, 512
 */
#include "common/base/err.h"
#include "common/base/hash.h"
#include "kernels/cpu/team.h"
#include "kernels/dev.h"
#include "kernels/ops.h"
#include "tests/support/args.h"
#include "tests/support/engine.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    CHUNK = 512,
    DECODE_STEPS = 8,
    MAX_SLOTS = 64,
    PROBE_BYTES = 1 << 30,
    FMA_ROUNDS = 1 << 22,
    TILE_ROUNDS = 1 << 18
};

static int n_threads;

static double now(void)
{
    struct timespec t;
    clock_gettime(n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ------------------------------------------------------------------ the counting table */

/* One row of the breakdown: an op, products apart by their shape. */
struct slot {
    char name[48];
    double seconds, bytes, flops;
    double best; /* seconds of the quickest call */
    int64_t calls;
};
static struct slot slots[MAX_SLOTS];
static int n_slots;
static const struct kern_ops *real_ops;

static struct slot *slot_of(const char *name)
{
    for (int i = 0; i < n_slots; i++)
        if (!strcmp(slots[i].name, name)) return &slots[i];
    struct slot *s = &slots[n_slots < MAX_SLOTS - 1 ? n_slots++ : MAX_SLOTS - 1];
    snprintf(s->name, sizeof s->name, "%s", name);
    return s;
}

static double weight_bytes(const struct kern_weight *w)
{
    int64_t scale_rows = w->fmt == KERN_W_FP8 ? (w->n + 127) / 128 : w->n;
    return (double)w->n * (double)w->row_bytes +
           (w->scale ? (double)scale_rows * (double)w->scale_row_bytes : 0.0);
}

static const char *format_name(enum kern_wfmt f)
{
    static const char *const names[] = {"f32", "bf16", "fp8", "mxfp4", "nvfp4"};
    return names[f];
}

/* What an op reads of weights and computes in products; ops not named count their time only. */
struct work {
    char name[48];
    double bytes, flops;
};

static void work_of_linear(const struct kern_linear *p, struct work *w)
{
    snprintf(w->name, sizeof w->name, "linear %s %dx%dx%d", format_name(p->w.fmt), p->groups, p->N,
             p->K);
    w->bytes = weight_bytes(&p->w);
    w->flops = 2.0 * p->T * p->groups * p->N * p->K;
}

static void work_of_linears(const struct kern_linears *p, struct work *w)
{
    for (int32_t i = 0; i < p->n; i++) {
        struct work one = {0};
        work_of_linear(&p->each[i], &one);
        w->bytes += one.bytes;
        w->flops += one.flops;
    }
    snprintf(w->name, sizeof w->name, "linears %d of %d", p->n, p->n ? p->each[0].K : 0);
}

static void work_of_moe(const struct kern_moe *p, struct work *w)
{
    snprintf(w->name, sizeof w->name, "moe %s", format_name(p->w1[0].fmt));
    for (int32_t e = 0; e < p->E; e++) {
        int64_t n = 0;
        for (int64_t i = 0; i < (int64_t)p->T * p->k; i++) n += p->experts[i] == e;
        if (n == 0) continue;
        w->bytes += weight_bytes(&p->w1[e]) + weight_bytes(&p->w2[e]) + weight_bytes(&p->w3[e]);
        w->flops += 6.0 * (double)n * p->D * p->I;
    }
}

static void work_of_hc_collapse(const struct kern_hc_collapse *p, struct work *w)
{
    w->bytes = weight_bytes(&p->fn);
    w->flops = 2.0 * p->T * p->fn.n * p->fn.k;
}

static void work_of_hc_boundary(const struct kern_hc_boundary *p, struct work *w)
{
    w->bytes = weight_bytes(&p->fn);
    w->flops = 2.0 * p->T * p->fn.n * p->fn.k;
}

static void work_of_attention(const struct kern_attention *p, struct work *w)
{
    const int32_t ratio = p->layout->layer[p->layer].ratio, window = p->layout->spec.window;
    double keys = 0;
    snprintf(w->name, sizeof w->name, "attention ratio %d", ratio);
    for (int32_t i = 0; i < p->n_seqs; i++)
        for (int32_t r = 0; r < p->seqs[i].n_rows; r++) {
            int64_t pos = p->seqs[i].pos0 + r;
            keys += (double)(pos + 1 < window ? pos + 1 : window);
            if (p->selected)
                keys += p->n_selected[p->seqs[i].row0 + r];
            else if (ratio > 0)
                keys += (double)((pos + 1) / ratio);
        }
    w->flops = 4.0 * keys * p->H * p->layout->spec.head_dim;
}

static void work_of_index_select(const struct kern_index_select *p, struct work *w)
{
    const int32_t ratio = p->layout->layer[p->layer].ratio;
    for (int32_t i = 0; i < p->n_seqs; i++)
        for (int32_t r = 0; r < p->seqs[i].n_rows; r++)
            w->flops += 2.0 * (double)((p->seqs[i].pos0 + r + 1) / ratio) * p->H *
                        p->layout->spec.index_dim;
}

#define NO_WORK(op)                                                                                \
    static void work_of_##op(const struct kern_##op *p, struct work *w)                            \
    {                                                                                              \
        (void)p;                                                                                   \
        (void)w;                                                                                   \
    }
NO_WORK(embed)
NO_WORK(rmsnorm)
NO_WORK(hc_expand)
NO_WORK(rope_table)
NO_WORK(heads_rope)
NO_WORK(kv_prep)
NO_WORK(window_store)
NO_WORK(compress)
NO_WORK(index_query)
NO_WORK(prepare)
NO_WORK(index_rank)
NO_WORK(route)
NO_WORK(swiglu)
NO_WORK(attend)
NO_WORK(ffn)
NO_WORK(add)
NO_WORK(mtp_mix)
NO_WORK(sample)

#define X(op)                                                                                      \
    static int count_##op(struct kern_stream *s, const struct kern_##op *p)                        \
    {                                                                                              \
        struct work w = {.name = #op};                                                             \
        work_of_##op(p, &w);                                                                       \
        struct slot *slot = slot_of(w.name);                                                       \
        double begin = now();                                                                      \
        int rc = real_ops->op(s, p);                                                               \
        double took = now() - begin;                                                               \
        slot->seconds += took;                                                                     \
        if (slot->calls == 0 || took < slot->best) slot->best = took;                              \
        slot->bytes += w.bytes;                                                                    \
        slot->flops += w.flops;                                                                    \
        slot->calls++;                                                                             \
        return rc;                                                                                 \
    }
KERN_OPS(X)
#undef X

/* The CPU's attend and ffn are these ops, and they are what is of interest. */
static int parts_of_attend(struct kern_stream *s, const struct kern_attend *p)
{
    int rc = count_attention(s, &p->attention);
    if (rc == 0) rc = count_heads_rope(s, &p->back);
    if (rc == 0) rc = count_linear(s, &p->wo_a);
    return rc < 0 ? rc : count_linear(s, &p->wo_b);
}
static int parts_of_ffn(struct kern_stream *s, const struct kern_ffn *p)
{
    int rc = count_linear(s, &p->gate);
    if (rc == 0) rc = count_route(s, &p->route);
    if (rc == 0) rc = count_moe(s, &p->moe);
    if (rc == 0) rc = count_linear(s, &p->w1);
    if (rc == 0) rc = count_linear(s, &p->w3);
    if (rc == 0) rc = count_swiglu(s, &p->swiglu);
    return rc < 0 ? rc : count_linear(s, &p->w2);
}

static struct kern_ops counting = {.name = "counting",
#define X(op) .op = count_##op,
                                   KERN_OPS(X)
#undef X
};

/* The linker sends the model's calls of kern_dev_ops() here (Makefile, --wrap). */
const struct kern_ops *__real_kern_dev_ops(const struct kern_dev *dev);
const struct kern_ops *__wrap_kern_dev_ops(const struct kern_dev *dev);
const struct kern_ops *__wrap_kern_dev_ops(const struct kern_dev *dev)
{
    real_ops = __real_kern_dev_ops(dev);
    counting.attend = parts_of_attend;
    counting.ffn = parts_of_ffn;
    return &counting;
}

/* ------------------------------------------------------------------ ceilings */

static uint8_t *probe;
static float sinks[256];
static double read_bw, fma_peak, tile_peak; /* bytes/s, operations/s (two for each multiply-add) */

#if defined(__x86_64__)
/* Four streams side by side, since one alone does not fill the memory's queues. */
__attribute__((target("avx512f"))) static float read_512(const uint8_t *p, size_t n)
{
    __m512i a = _mm512_setzero_si512();
    const size_t q = n / 4;
    for (size_t i = 0; i < q; i += 64)
        for (size_t k = 0; k < 4; k++) {
            _mm_prefetch((const char *)p + k * q + i + 4096, _MM_HINT_T0);
            a = _mm512_xor_si512(a, _mm512_loadu_si512(p + k * q + i));
        }
    return (float)_mm512_reduce_or_epi32(a);
}

__attribute__((target("avx512f"))) static float fma_512(float x)
{
    __m512 acc[12], v = _mm512_set1_ps(x);
    float sum = 0;
#pragma GCC unroll 12
    for (int k = 0; k < 12; k++) acc[k] = _mm512_set1_ps((float)k);
    for (int i = 0; i < FMA_ROUNDS; i++)
#pragma GCC unroll 12
        for (int k = 0; k < 12; k++) acc[k] = _mm512_fmadd_ps(acc[k], v, v);
#pragma GCC unroll 12
    for (int k = 0; k < 12; k++) sum += _mm512_reduce_add_ps(acc[k]);
    return sum;
}

/* Four independent 16 x 16 x 32 bf16 products at a time. */
__attribute__((target("amx-tile,amx-bf16"))) static void tiles_512(void)
{
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) c = {.palette = 1};
    for (int i = 0; i < 8; i++) c.rows[i] = 16, c.bytes[i] = 64;
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&c);
    for (int i = 0; i < TILE_ROUNDS; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

__attribute__((target("avx2,fma"))) static float fma_256(float x)
{
    __m256 acc[12], v = _mm256_set1_ps(x);
    float sum = 0, lanes[8];
#pragma GCC unroll 12
    for (int k = 0; k < 12; k++) acc[k] = _mm256_set1_ps((float)k);
    for (int i = 0; i < FMA_ROUNDS; i++)
#pragma GCC unroll 12
        for (int k = 0; k < 12; k++) acc[k] = _mm256_fmadd_ps(acc[k], v, v);
#pragma GCC unroll 12
    for (int k = 0; k < 12; k++) {
        _mm256_storeu_ps(lanes, acc[k]);
        for (int j = 0; j < 8; j++) sum += lanes[j];
    }
    return sum;
}
#endif

static float read_any(const uint8_t *p, size_t n)
{
    uint64_t a = 0, v;
    for (size_t i = 0; i + 8 <= n; i += 8) {
        memcpy(&v, p + i, 8);
        a ^= v;
    }
    return (float)a;
}

static float fma_any(float x)
{
    float acc[16];
    for (int k = 0; k < 16; k++) acc[k] = (float)k;
    for (int i = 0; i < FMA_ROUNDS; i++)
        for (int k = 0; k < 16; k++) acc[k] = fmaf(acc[k], x, x);
    for (int k = 1; k < 16; k++) acc[0] += acc[k];
    return acc[0];
}

static int lanes; /* of one vector: 16, 8, or 0 without vectors */

static void read_part(void *arg, int64_t part, int thread)
{
    (void)arg;
    const size_t n = PROBE_BYTES / 64;
    const uint8_t *p = probe + (size_t)part * n;
#if defined(__x86_64__)
    if (lanes == 16) {
        sinks[thread] += read_512(p, n);
        return;
    }
#endif
    sinks[thread] += read_any(p, n);
}

static void fma_part(void *arg, int64_t part, int thread)
{
    (void)arg;
    (void)part;
#if defined(__x86_64__)
    if (lanes == 16) {
        sinks[thread] += fma_512(0.5f);
        return;
    }
    if (lanes == 8) {
        sinks[thread] += fma_256(0.5f);
        return;
    }
#endif
    sinks[thread] += fma_any(0.5f);
}

#if defined(__x86_64__)
static void tile_part(void *arg, int64_t part, int thread)
{
    (void)arg, (void)part, (void)thread;
    tiles_512();
}
#endif

/* Called before, between and after the runs; the best of all counts. */
static void measure_ceilings(struct kern_stream *s)
{
    for (int i = 0; i < 3; i++) {
        double t = now();
        kern_parallel(s, 64, read_part, NULL);
        t = now() - t;
        if (PROBE_BYTES / t > read_bw) read_bw = PROBE_BYTES / t;
        t = now();
        kern_parallel(s, n_threads, fma_part, NULL);
        t = now() - t;
        double ops = 2.0 * FMA_ROUNDS * (lanes ? lanes * 12 : 16) * n_threads;
        if (ops / t > fma_peak) fma_peak = ops / t;
#if defined(__x86_64__)
        if (kern_stream_isa(s) < KERN_CPU_AMX) continue;
        t = now();
        kern_parallel(s, n_threads, tile_part, NULL);
        t = now() - t;
        ops = 2.0 * TILE_ROUNDS * 4 * 16 * 16 * 32 * n_threads;
        if (ops / t > tile_peak) tile_peak = ops / t;
#endif
    }
}

/* ------------------------------------------------------------------ runs */

static struct test_engine engine;
static struct kv_table table;

static double pass(const int32_t *ids, int32_t n, int64_t pos0)
{
    struct tow_err err = {0};
    double begin = now();
    if (test_engine_pass(&engine, &table, ids, n, pos0, NULL, &err) < 0) {
        fprintf(stderr, "bench_model: %s\n", err.msg);
        exit(1);
    }
    return now() - begin;
}

static double sum_bytes(void)
{
    double v = 0;
    for (int i = 0; i < n_slots; i++) v += slots[i].bytes;
    return v;
}
static double sum_flops(void)
{
    double v = 0;
    for (int i = 0; i < n_slots; i++) v += slots[i].flops;
    return v;
}

static int by_time(const void *a, const void *b)
{
    double x = ((const struct slot *)a)->seconds, y = ((const struct slot *)b)->seconds;
    return (x < y) - (x > y);
}

static void print_breakdown(const char *what, double total)
{
    double rest = total;
    qsort(slots, (size_t)n_slots, sizeof *slots, by_time);
    printf("%s, where the time goes:\n  %-32s %7s %9s %6s %9s %9s\n", what, "op", "calls", "ms",
           "share", "of read", "of fma");
    for (int i = 0; i < n_slots; i++) {
        const struct slot *s = &slots[i];
        rest -= s->seconds;
        printf("  %-32s %7lld %9.2f %5.1f%%", s->name, (long long)s->calls, s->seconds * 1e3,
               100 * s->seconds / total);
        printf(" %8.1fus", s->best * 1e6);
        if (s->bytes > 0) printf(" %8.1f%%", 100 * s->bytes / (double)s->calls / s->best / read_bw);
        if (s->bytes > 0) printf(" %8.1f%%", 100 * s->bytes / s->seconds / read_bw);
        if (s->bytes <= 0) printf(" %9s", "");
        if (s->flops > 0) printf(" %8.1f%%", 100 * s->flops / s->seconds / fma_peak);
        putchar('\n');
    }
    printf("  %-32s %7s %9.2f %5.1f%%\n", "outside ops", "", rest * 1e3, 100 * rest / total);
}

static void clear_slots(void)
{
    memset(slots, 0, sizeof slots);
    n_slots = 0;
}

/* As the engine does when a pass is over: the pages that it completed, the last pass all and the
 * tail. */
static void digest_completed(int32_t from, int32_t to, bool last, double *seconds, double *bytes)
{
    const struct kern_kv_layout *lay = model_peek_layout(engine.m);
    const uint32_t end = last ? engine.n_seq_pages : (uint32_t)(to / lay->page_tokens);
    volatile uint64_t sum = 0;
    double begin = now();
    for (uint32_t i = (uint32_t)(from / lay->page_tokens); i < end; i++) {
        sum ^= tow_hash64(kv_pool_page(engine.pool, table.ids[i]), (size_t)lay->page_bytes);
        *bytes += (double)lay->page_bytes;
    }
    if (last) {
        sum ^= tow_hash64(kv_pool_tail(engine.pool, table.tail), (size_t)lay->tail_bytes);
        *bytes += (double)lay->tail_bytes;
    }
    *seconds += now() - begin;
}

static void bench_prefill(const int32_t *ids, int32_t n_tokens)
{
    double total = 0, best = 0, digesting = 0, digested = 0;
    struct kern_stream *s = kern_dev_stream(model_peek_dev(engine.m));
    clear_slots();
    for (int32_t at = 0; at < n_tokens; at += CHUNK) {
        double before = sum_flops();
        int32_t n = n_tokens - at < CHUNK ? n_tokens - at : CHUNK;
        double t = pass(ids + at, n, at), speed = (sum_flops() - before) / t;
        digest_completed(at, at + n, at + n == n_tokens, &digesting, &digested);
        total += t;
        if (speed > best) best = speed;
        measure_ceilings(s);
    }
    printf(
        "digests at completion: %.1f MB of pages and tail at %.1f GB/s, %.4f %% of the time of the "
        "passes that made them\n",
        digested / 1e6, digested / digesting / 1e9, 100 * digesting / total);
    printf("prefill: %d tokens in chunks of %d: %.1f tokens/s, %.2f GFLOP a token\n", n_tokens,
           CHUNK, n_tokens / total, sum_flops() / n_tokens / 1e9);
    printf("ratio: prefill %.1f Gop/s of %.1f (multiply-adds, %d threads) = %.0f %%; goal 50 %%\n",
           best / 1e9, fma_peak / 1e9, n_threads, 100 * best / fma_peak);
    if (tile_peak > 0)
        printf("ratio: prefill %.1f Gop/s of %.1f (matrix unit, bf16) = %.0f %%\n", best / 1e9,
               tile_peak / 1e9, 100 * best / tile_peak);
    print_breakdown("prefill", total);
}

static void bench_decode(const int32_t *ids, int64_t pos0)
{
    double total = 0, best = 0;
    struct kern_stream *s = kern_dev_stream(model_peek_dev(engine.m));
    pass(ids, 1, pos0); /* not counted: wakes what sleeps */
    clear_slots();
    for (int i = 1; i <= DECODE_STEPS; i++) {
        double before = sum_bytes(), t = pass(ids + i, 1, pos0 + i);
        double speed = (sum_bytes() - before) / t;
        total += t;
        if (speed > best) best = speed;
    }
    measure_ceilings(s);
    printf("decode: batch 1 at %lld tokens: %.2f tokens/s, %.3f GB of weights a token\n",
           (long long)pos0, DECODE_STEPS / total, sum_bytes() / DECODE_STEPS / 1e9);
    printf("ratio: decode %.2f GB/s of %.2f (memory reads, %d threads) = %.0f %%; goal 60 %%\n",
           best / 1e9, read_bw / 1e9, n_threads, 100 * best / read_bw);
    print_breakdown("decode", total);
}

/* The files leave the page cache and are read again, as after a start of the machine: what was
 * written or copied a moment ago lies there in small pages, which read slower. */
static void forget_files(const char *dir)
{
    char path[4096];
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        int n = snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        int fd =
            n < (int)sizeof path && strstr(e->d_name, ".safetensors") ? open(path, O_RDONLY) : -1;
        if (fd < 0) continue;
        fdatasync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    if (d) closedir(d);
}

static int open_model(const char *dir, int32_t n_tokens, struct tow_err *err)
{
    forget_files(dir);
    int rc =
        test_engine_open(&engine, dir, n_threads, CHUNK, n_tokens + DECODE_STEPS + 1, 1, 1, err);
    if (rc < 0) return rc;
    probe = aligned_alloc(4096, PROBE_BYTES + 8192);
    if (!probe) return tow_fail(err, TOW_ENOMEM, "out of memory");
    memset(probe, 1, PROBE_BYTES + 8192);
    kv_table_init(&table);
    rc = kv_table_grow(&table, engine.pool, engine.n_seq_pages);
    return rc < 0 ? tow_fail(err, rc, "no pages") : 0;
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    if (argc < 2) {
        fprintf(stderr, "usage: bench_model CHECKPOINT [threads [prefill tokens]]\n");
        return BENCH_WRONG;
    }
    n_threads = argc > 2 ? bench_whole("threads", argv[2], 0, 256) : 0;
    const int32_t n_tokens = argc > 3 ? bench_whole("prefill tokens", argv[3], 1, 65536) : CHUNK;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (open_model(argv[1], n_tokens, &err) < 0) {
        fprintf(stderr, "bench_model: %s\n", err.msg);
        return 1;
    }
    struct kern_dev *dev = model_peek_dev(engine.m);
    n_threads = kern_dev_threads(dev);
    enum kern_cpu_isa isa = kern_stream_isa(kern_dev_stream(dev));
    lanes = isa >= KERN_CPU_AVX512 ? 16 : isa == KERN_CPU_AVX2 ? 8 : 0;
    int32_t *ids = malloc((size_t)(n_tokens + DECODE_STEPS + 1) * sizeof *ids);
    if (!ids) return 1;
    const int32_t V = model_peek_weights(engine.m)->shape.V;
    uint32_t seed = 1;
    for (int32_t i = 0; i < n_tokens + DECODE_STEPS + 1; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)((seed >> 8) % (uint32_t)V);
    }
    measure_ceilings(kern_dev_stream(dev));
    /* Maps every page of the weights: a few rows reach all experts. Not counted. */
    pass(ids, n_tokens < 64 ? n_tokens : 64, 0);
    printf("model: %.2f GB in files; %d thread%s, %s; ceilings so far: read %.2f GB/s, fma %.1f "
           "Gop/s\n",
           (double)model_peek_weights(engine.m)->report.file_bytes / 1e9, n_threads,
           n_threads == 1 ? " (its processor time)" : "s (clock time)", kern_dev_isa(dev),
           read_bw / 1e9, fma_peak / 1e9);
    bench_prefill(ids, n_tokens);
    bench_decode(ids + n_tokens, n_tokens);
    free(ids);
    kv_table_fini(&table, engine.pool);
    test_engine_close(&engine);
    return 0;
}
