/* tests/bench/bench_kernels.c - the CPU kernels as ratios to what this machine can do, measured in
 * the same run.
 *
 * Ceilings: bytes read per second from memory (large buffer, vectors added up) and float
 * multiply-adds per second (independent fma chains in registers). Shapes are those of a Flash-size
 * layer. Best of a few repetitions: on a shared machine the best is the least disturbed. Weights
 * are as large as the buffer (256 MiB), so that both come from memory and not from a cache.
 *
 * usage: bench_kernels [threads [parts [instruction set]]]
 *   threads            default 0: 1 and 2
 *   parts              default lmsS: linear, moe, a row at 64K tokens, 64 rows at 16K
 *   instruction set    default: the best here, of kern_cpu_isa by number
 */
#include "common/base/err.h"
#include "kernels/cpu/team.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"
#include "tests/support/args.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static int n_threads;

/* With one thread the time this process had the processor, so that other programs do not count. */
static double now(void)
{
    struct timespec t;
    clock_gettime(n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static uint64_t rng = 88172645463325252u;
static uint32_t rnd(void)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return (uint32_t)(rng >> 32);
}

static struct kern_dev *dev;
static struct kern_stream *s;
static double read_bw, fma_peak;

/* --- ceilings */

enum { PROBE_BYTES = 256 << 20 };
static uint8_t *probe;
static float sinks[64];

#if defined(__x86_64__)
/* Four streams side by side, each fetched 4 KiB ahead: one stream alone does not fill the memory's
 * queues. */
__attribute__((target("avx512f"))) static float read_512(const uint8_t *p, size_t n)
{
    __m512i a[4] = {_mm512_setzero_si512()};
    size_t q = n / 4;
    a[1] = a[2] = a[3] = a[0];
    for (size_t i = 0; i < q; i += 64)
        for (int k = 0; k < 4; k++) {
            _mm_prefetch((const char *)p + (size_t)k * q + i + 4096, _MM_HINT_T0);
            a[k] = _mm512_xor_si512(a[k], _mm512_loadu_si512(p + (size_t)k * q + i));
        }
    return (float)_mm512_reduce_or_epi32(
        _mm512_or_si512(_mm512_or_si512(a[0], a[1]), _mm512_or_si512(a[2], a[3])));
}
__attribute__((target("avx512f"))) static float fma_512(int64_t n)
{
    __m512 x[16], m = _mm512_set1_ps(0.999f), c = _mm512_set1_ps(0.001f);
    for (int i = 0; i < 16; i++) x[i] = _mm512_set1_ps((float)i);
    for (int64_t k = 0; k < n; k++)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) x[i] = _mm512_fmadd_ps(x[i], m, c);
    for (int i = 1; i < 16; i++) x[0] = _mm512_add_ps(x[0], x[i]);
    return _mm512_reduce_add_ps(x[0]);
}
__attribute__((target("avx2,fma"))) static float fma_256(int64_t n)
{
    __m256 x[12], m = _mm256_set1_ps(0.999f), c = _mm256_set1_ps(0.001f);
    for (int i = 0; i < 12; i++) x[i] = _mm256_set1_ps((float)i);
    for (int64_t k = 0; k < n; k++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) x[i] = _mm256_fmadd_ps(x[i], m, c);
    for (int i = 1; i < 12; i++) x[0] = _mm256_add_ps(x[0], x[i]);
    float f[8];
    _mm256_storeu_ps(f, x[0]);
    return f[0] + f[7];
}
#endif
static float read_c(const uint8_t *p, size_t n)
{
    uint64_t a = 0, b = 0, c = 0, d = 0, w[4];
    for (size_t i = 0; i < n; i += 32) {
        memcpy(w, p + i, 32);
        a += w[0], b += w[1], c += w[2], d += w[3];
    }
    return (float)(a ^ b ^ c ^ d);
}
static void read_part(void *arg, int64_t part, int thread)
{
    size_t n = PROBE_BYTES / 64;
    (void)arg;
#if defined(__x86_64__)
    if (kern_stream_isa(s) >= KERN_CPU_AVX512) {
        sinks[thread] += read_512(probe + (size_t)part * n, n);
        return;
    }
#endif
    sinks[thread] += read_c(probe + (size_t)part * n, n);
}
static const int64_t fma_rounds = 4000000;
static void fma_part(void *arg, int64_t part, int thread)
{
    (void)arg, (void)part;
#if defined(__x86_64__)
    if (kern_stream_isa(s) >= KERN_CPU_AVX512)
        sinks[thread] += fma_512(fma_rounds);
    else if (kern_stream_isa(s) == KERN_CPU_AVX2)
        sinks[thread] += fma_256(fma_rounds);
    else
#endif
    {
        float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        for (int64_t k = 0; k < fma_rounds; k++)
            for (int i = 0; i < 8; i++) x[i] = x[i] * 0.999f + 0.001f;
        for (int i = 0; i < 8; i++) sinks[thread] += x[i];
    }
}
static double fma_lanes(void)
{
    return kern_stream_isa(s) >= KERN_CPU_AVX512 ? 256
           : kern_stream_isa(s) == KERN_CPU_AVX2 ? 96
                                                 : 8;
}
static void measure_ceilings(void)
{
    double best = 1e9;
    for (int i = 0; i < 5; i++) {
        double t = now();
        kern_parallel(s, 64, read_part, NULL);
        t = now() - t;
        best = t < best ? t : best;
    }
    read_bw = PROBE_BYTES / best;
    best = 1e9;
    for (int i = 0; i < 3; i++) {
        double t = now();
        kern_parallel(s, n_threads, fma_part, NULL);
        t = now() - t;
        best = t < best ? t : best;
    }
    fma_peak = (double)fma_rounds * fma_lanes() * n_threads / best;
    printf("ceilings, %d thread%s, %s: read %.1f GB/s, float multiply-add %.1f G/s\n", n_threads,
           n_threads > 1 ? "s" : "", kern_dev_isa(dev), read_bw / 1e9, fma_peak / 1e9);
}

/* --- what is measured */

static double best_of(int (*op)(struct kern_stream *, const void *), const void *p, int reps)
{
    double best = 1e9;
    for (int i = 0; i < reps; i++) {
        double t = now();
        if (op(s, p) < 0) abort();
        t = now() - t;
        best = t < best ? t : best;
    }
    return best;
}
static void report(const char *name, double t, double bytes, double fmas)
{
    double r = bytes / t / read_bw, f = fmas / t / fma_peak;
    printf("  %-34s %9.3f ms  %7.2f GB/s  %5.1f %% of read   %7.1f G/s  %5.1f %% of fma\n", name,
           1e3 * t, bytes / t / 1e9, 100 * r, fmas / t / 1e9, 100 * f);
    fflush(stdout);
}
#define OP(op)                                                                                     \
    static int run_##op(struct kern_stream *st, const void *p)                                     \
    {                                                                                              \
        return kern_cpu.op(st, p);                                                                 \
    }
OP(linear)
OP(moe)
OP(attention)
OP(index_select)

static void *random_bytes(size_t n, uint8_t keep)
{
    uint8_t *p = aligned_alloc(4096, (n + 4095) & ~(size_t)4095);
    size_t block =
        n < 1 << 20 ? n : 1 << 20; /* random once, then repeated: large buffers are quick to make */
    for (size_t i = 0; i + 4 <= block; i += 4) {
        uint32_t x = rnd() & (0x01010101u * keep);
        memcpy(p + i, &x, 4);
    }
    for (size_t i = block; i < n; i += block) memcpy(p + i, p, n - i < block ? n - i : block);
    return p;
}
static void *bf16_values(int64_t n)
{
    uint16_t *p = aligned_alloc(4096, ((size_t)n * 2 + 4095) & ~(size_t)4095);
    int64_t block = n < 1 << 19 ? n : 1 << 19;
    for (int64_t i = 0; i < block; i++) p[i] = kern_bf16_encode((float)(int32_t)rnd() * 0x1p-31f);
    for (int64_t i = block; i < n; i += block)
        memcpy(p + i, p, (size_t)(n - i < block ? n - i : block) * 2);
    return p;
}
static struct kern_weight weight(enum kern_wfmt fmt, int32_t n, int32_t k)
{
    struct kern_weight w = {.fmt = fmt, .n = n, .k = k, .scale2 = 1};
    w.row_bytes = fmt == KERN_W_BF16 ? 2 * k : fmt == KERN_W_FP8 ? k : k / 2;
    if (fmt == KERN_W_BF16) {
        w.data = bf16_values((int64_t)n * k);
        return w;
    }
    w.data = random_bytes((size_t)(n * w.row_bytes), fmt == KERN_W_FP8 ? 0xbf : 0xff);
    w.sfmt = fmt == KERN_W_NVFP4 ? KERN_S_E4M3 : KERN_S_UE8M0;
    w.scale_row_bytes = fmt == KERN_W_FP8 ? k / 128 : fmt == KERN_W_MXFP4 ? k / 32 : k / 16;
    int64_t rows = fmt == KERN_W_FP8 ? (n + 127) / 128 : n;
    uint8_t *sc = random_bytes((size_t)(rows * w.scale_row_bytes) + 4, 7);
    for (int64_t i = 0; i < rows * w.scale_row_bytes; i++)
        sc[i] = (uint8_t)(sc[i] + (fmt == KERN_W_NVFP4 ? 56 : 120));
    w.scale = sc;
    return w;
}
static double stored(const struct kern_weight *w)
{
    return (double)w->n * (double)w->row_bytes +
           (w->scale ? (double)(w->fmt == KERN_W_FP8 ? (w->n + 127) / 128 : w->n) *
                           (double)w->scale_row_bytes
                     : 0);
}
static void drop(struct kern_weight *w)
{
    free((void *)(uintptr_t)w->data);
    free((void *)(uintptr_t)w->scale);
}

static void bench_linear(void)
{
    static const struct {
        const char *name;
        enum kern_wfmt fmt;
        int32_t n;
    } f[] = {{"fp8", KERN_W_FP8, 65536},
             {"mxfp4", KERN_W_MXFP4, 131072},
             {"nvfp4", KERN_W_NVFP4, 131072},
             {"bf16", KERN_W_BF16, 32768}};
    const int32_t k = 4096;
    for (int i = 0; i < 4; i++) {
        struct kern_weight w = weight(f[i].fmt, f[i].n, k);
        void *x = bf16_values(512LL * k), *y = aligned_alloc(64, 512UL * 8192 * 2);
        memset(y, 0, 512UL * 8192 * 2);
        static const int32_t rows[] = {1, 2, 4, 8};
        for (int j = 0; j < 4; j++) {
            char name[64];
            struct kern_linear p = {.x = x,
                                    .w = w,
                                    .y = y,
                                    .ld_x = k,
                                    .ld_y = w.n,
                                    .T = rows[j],
                                    .N = w.n,
                                    .K = k,
                                    .groups = 1,
                                    .x_dtype = KERN_BF16,
                                    .y_dtype = KERN_BF16,
                                    .aq = f[i].fmt == KERN_W_BF16 ? KERN_AQ_NONE : KERN_AQ_A128};
            snprintf(name, sizeof name, "linear %s decode T=%d", f[i].name, rows[j]);
            report(name, best_of(run_linear, &p, 7), stored(&w), (double)rows[j] * w.n * k);
        }
        struct kern_linear p = {.x = x,
                                .w = w,
                                .y = y,
                                .ld_x = k,
                                .ld_y = 4096,
                                .T = 512,
                                .N = 4096,
                                .K = k,
                                .groups = 1,
                                .x_dtype = KERN_BF16,
                                .y_dtype = KERN_BF16,
                                .aq = f[i].fmt == KERN_W_BF16 ? KERN_AQ_NONE : KERN_AQ_A128};
        char name[64];
        p.w.n = 4096;
        snprintf(name, sizeof name, "linear %s prefill T=512 N=4096", f[i].name);
        report(name, best_of(run_linear, &p, 5), stored(&p.w), 512.0 * 4096 * k);
        drop(&w);
        free(x);
        free(y);
    }
}

static void bench_moe(void)
{
    enum { E = 32, D = 4096, I = 2048, K = 6 };
    static struct kern_weight w1[E], w2[E], w3[E];
    for (int e = 0; e < E; e++) {
        w1[e] = weight(KERN_W_MXFP4, I, D), w3[e] = weight(KERN_W_MXFP4, I, D);
        w2[e] = weight(KERN_W_MXFP4, D, I);
    }
    static const int32_t rows[] = {1, 4, 256};
    for (int j = 0; j < 3; j++) {
        int32_t T = rows[j], *e = malloc((size_t)(T * K) * 4);
        float *w = malloc((size_t)(T * K) * 4), *out = malloc((size_t)(T * D) * 4);
        void *x = bf16_values((int64_t)T * D);
        uint8_t used[E] = {0};
        int n_used = 0;
        for (int t = 0; t < T; t++)
            for (int i = 0; i < K; i++) {
                e[t * K + i] = (t * 7 + i * 5) % E;
                w[t * K + i] = 0.3f;
                if (!used[e[t * K + i]]) used[e[t * K + i]] = 1, n_used++;
            }
        struct kern_moe p = {x, e, w, w1, w2, w3, out, T, D, I, E, K, 10, KERN_AQ_A128, KERN_BF16};
        char name[64];
        snprintf(name, sizeof name, "moe mxfp4 T=%d (%d experts)", T, n_used);
        double best = 1e9; /* other experts each time, or they would come from the cache */
        for (int r = 0; r < (T > 8 ? 2 : 7); r++) {
            for (int i = 0; i < T * K; i++) e[i] = (e[i] + 6) % E;
            double t = best_of(run_moe, &p, 1);
            best = t < best ? t : best;
        }
        report(name, best, n_used * 3 * stored(&w1[0]), 3.0 * T * K * D * I);
        free(e), free(w), free(out), free(x);
    }
    for (int e = 0; e < E; e++) drop(&w1[e]), drop(&w2[e]), drop(&w3[e]);
}

static void bench_sequence(int32_t T, int64_t ctx)
{
    enum { H = 64, D = 512, IH = 64, IW = 128 };
    struct kern_kv_layout l;
    struct kern_kv_spec sp = {.n_layers = 2,
                              .ratios = {4, 128},
                              .head_dim = D,
                              .rope_dim = 64,
                              .window = 128,
                              .index_dim = IW,
                              .kv_fmt = KERN_KV_FP8,
                              .ik_fmt = KERN_IK_FP4};
    kern_kv_layout_init(&l, &sp, NULL);
    int64_t n_pages = kern_kv_pages_for(ctx + T, l.page_tokens);
    uint8_t *pages = calloc((size_t)n_pages, (size_t)l.page_bytes),
            *tail = calloc(1, (size_t)l.tail_bytes);
    uint32_t *ids = malloc((size_t)n_pages * 4);
    float x[D];
    for (int64_t p = 0; p < n_pages; p++) {
        ids[p] = (uint32_t)p;
        for (int y = 0; y < 2; y++)
            for (int64_t i = 0; i < l.layer[y].per_page; i++) {
                for (int c = 0; c < D; c++) x[c] = (float)(int32_t)rnd() * 0x1p-31f;
                kern_kv_store(sp.kv_fmt, pages + p * l.page_bytes + l.layer[y].main_off,
                              l.layer[y].per_page, i, x, D, 64);
                if (y == 0)
                    kern_ik_store(sp.ik_fmt, pages + p * l.page_bytes + l.layer[y].index_off,
                                  l.layer[y].per_page, i, x, IW);
            }
    }
    struct kern_seq q = {.n_rows = T,
                         .pos0 = ctx,
                         .page_ids = ids,
                         .n_pages = (int32_t)n_pages,
                         .tail = tail,
                         .topk = 512};
    void *iq = bf16_values((int64_t)T * IH * IW), *wt = bf16_values((int64_t)T * IH);
    void *qq = bf16_values((int64_t)T * H * D), *kv = bf16_values((int64_t)T * D);
    void *o = malloc((size_t)T * H * D * 2);
    int32_t *sel = malloc((size_t)T * 512 * 4), *n_sel = malloc((size_t)T * 4);
    float sink[H] = {0};
    char name[64];
    double n4 = (double)ctx / 4, n128 = (double)ctx / 128;
    struct kern_index_select is = {.q = iq,
                                   .wt = wt,
                                   .factor = 0.01f,
                                   .pages = pages,
                                   .layout = &l,
                                   .layer = 0,
                                   .seqs = &q,
                                   .n_seqs = 1,
                                   .T = T,
                                   .H = IH,
                                   .selected = sel,
                                   .n_selected = n_sel,
                                   .sel_ld = 512,
                                   .act = KERN_BF16};
    snprintf(name, sizeof name, "index_select T=%d at %lld", T, (long long)ctx);
    report(name, best_of(run_index_select, &is, T > 8 ? 2 : 5), n4 * 68, (double)T * n4 * IH * IW);
    struct kern_attention a = {.q = qq,
                               .kv = kv,
                               .sink = sink,
                               .o = o,
                               .pages = pages,
                               .layout = &l,
                               .layer = 0,
                               .seqs = &q,
                               .n_seqs = 1,
                               .selected = sel,
                               .n_selected = n_sel,
                               .sel_ld = 512,
                               .T = T,
                               .H = H,
                               .scale = 0.044f,
                               .act = KERN_BF16};
    snprintf(name, sizeof name, "attention 4 T=%d at %lld", T, (long long)ctx);
    report(name, best_of(run_attention, &a, T > 8 ? 2 : 5), (double)T * 640 * 584,
           2.0 * T * 640 * H * D);
    a.layer = 1, a.selected = NULL;
    snprintf(name, sizeof name, "attention 128 T=%d at %lld", T, (long long)ctx);
    report(name, best_of(run_attention, &a, T > 8 ? 2 : 5), (128 + n128) * 584,
           2.0 * T * (128 + n128) * H * D);
    free(pages), free(tail), free(ids), free(iq), free(wt), free(qq), free(kv), free(o), free(sel),
        free(n_sel);
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    const int only = argc > 1 ? bench_whole("threads", argv[1], 0, 256) : 0;
    const char *what = argc > 2 ? argv[2] : "lmsS";
    const int isa = argc > 3 ? bench_whole("instruction set", argv[3], 0, KERN_CPU_N_ISA - 1)
                             : (int)kern_cpu_best_isa();
    if (!*what || what[strspn(what, "lmsS")]) bench_wrong("parts", what, "some of l, m, s and S");
    probe = malloc(PROBE_BYTES + 8192);
    memset(probe, 1, PROBE_BYTES + 8192);
    for (n_threads = only ? only : 1; n_threads <= (only ? only : 2); n_threads++) {
        if (kern_dev_open_cpu(&dev, n_threads, (enum kern_cpu_isa)isa, &err) < 0) {
            fprintf(stderr, "bench_kernels: %s\n", err.msg);
            return 1;
        }
        s = kern_dev_stream(dev);
        measure_ceilings();
        if (strchr(what, 'l')) bench_linear();
        if (strchr(what, 'm')) bench_moe();
        if (strchr(what, 's')) bench_sequence(1, 65536);
        if (strchr(what, 'S')) bench_sequence(64, 16384);
        kern_dev_close(dev);
    }
    free(probe);
    return 0;
}
