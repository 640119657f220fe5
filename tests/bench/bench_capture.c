/* tests/bench/bench_capture.c - what captures of index ranks cost: nothing when off, little when
 * on.
 *
 * Decode steps and prefill chunks far into a context, the same one over and over: without captures,
 * with an array of captures that asks nothing, with 16 entries (four spans of text) ranked in every
 * layer, and with shadow keys of all types besides. The ways take turns, and each counts by its
 * fastest round. A chunk is short, since one row of it is captured: a longer one costs less. One
 * thread and its processor time, so that other programs do not count. Pages hold zeros: what is
 * computed does not change how long it takes.
 * usage: bench_capture CHECKPOINT [context tokens]     default: 65536
 */
#include "common/base/err.h"
#include "tests/support/args.h"
#include "tests/support/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ENTRIES = 16, DECODE_ROUNDS = 15, PREFILL_ROUNDS = 2, PREFILL_ROWS = 64, PAGE_ROWS = 4096 };
enum way { PLAIN, OFF, RANKS, SHADOWS, WAYS };

static struct test_engine engine;
static struct kv_table plain, shadowed;
static int32_t ids[PREFILL_ROWS], entries[ENTRIES];
static int64_t n_ranked;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void on_row(void *ctx, const struct model_capture_row *row)
{
    (void)ctx;
    n_ranked += row->n_entries;
}

static double pass(int32_t n, int64_t pos0, enum way way)
{
    struct tow_err err = {0};
    const struct model_capture c = {.entries = entries,
                                    .n_entries = ENTRIES,
                                    .shadow = way == SHADOWS ? (1u << KERN_SHADOWS) - 1 : 0,
                                    .on_row = on_row};
    const struct model_capture *const captures[] = {way == OFF ? NULL : &c};
    double begin = now();
    if (test_engine_pass(&engine, way == SHADOWS ? &shadowed : &plain, ids, n, pos0,
                         way == PLAIN ? NULL : captures, &err) < 0) {
        fprintf(stderr, "bench_capture: %s\n", err.msg);
        exit(1);
    }
    return now() - begin;
}

static void bench(const char *what, int32_t n, int64_t pos0, int rounds)
{
    static const char *const names[] = {"", "captures off", "16 entries ranked",
                                        "16 entries ranked, shadow keys of all types"};
    static const char *const goals[] = {"", "; goal 0.99", "; goal 0.90", ""};
    double best[WAYS];
    pass(n, pos0, PLAIN); /* not counted: maps weights and scratch */
    for (int r = 0; r < rounds; r++)
        for (int w = 0; w < WAYS; w++) {
            double t = pass(n, pos0, (enum way)w);
            if (r == 0 || t < best[w]) best[w] = t;
        }
    printf("%s: %d row%s at %lld tokens: %.2f ms\n", what, n, n == 1 ? "" : "s", (long long)pos0,
           best[PLAIN] * 1e3);
    for (int w = OFF; w < WAYS; w++)
        printf("ratio: %s speed, %s = %.3f of that without%s\n", what, names[w],
               best[PLAIN] / best[w], goals[w]);
}

static int open_model(const char *dir, int32_t n_tokens, struct tow_err *err)
{
    int rc = test_engine_open(&engine, dir, 1, PREFILL_ROWS, n_tokens + PREFILL_ROWS, 3, 2, err);
    if (rc < 0) return rc;
    kv_table_init(&plain);
    kv_table_init(&shadowed);
    if ((rc = kv_table_grow(&plain, engine.pool, engine.n_seq_pages)) < 0 ||
        (rc = kv_table_grow(&shadowed, engine.pool, 2 * engine.n_seq_pages)) < 0)
        return tow_fail(err, rc, "no pages");
    return 0;
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    if (argc < 2) {
        fprintf(stderr, "usage: bench_capture CHECKPOINT [context tokens]\n");
        return BENCH_WRONG;
    }
    int32_t context = 65536;
    if (argc > 2) context = bench_whole("context tokens", argv[2], PAGE_ROWS, 1 << 20);
    context = context / PAGE_ROWS * PAGE_ROWS;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (open_model(argv[1], context, &err) < 0) {
        fprintf(stderr, "bench_capture: %s\n", err.msg);
        return 1;
    }
    for (int32_t i = 0; i < PREFILL_ROWS; i++)
        ids[i] = (i * 7919 + 1) % model_peek_weights(engine.m)->shape.V;
    for (int32_t i = 0; i < ENTRIES; i++) /* four spans, four entries each */
        entries[i] = (1 + i / 4) * (context / 4 / 5) + i % 4;
    bench("decode", 1, context, DECODE_ROUNDS);
    bench("prefill", PREFILL_ROWS, context, PREFILL_ROUNDS);
    kv_table_fini(&plain, engine.pool);
    kv_table_fini(&shadowed, engine.pool);
    test_engine_close(&engine);
    return n_ranked > 0 ? 0 : 1;
}
