/* text/split, text/unicode: pieces against the reference, character classes, refused patterns. */
#include "tests/support/check.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/text/split.h"
#include "common/text/unicode.h"

#define VECTORS "tests/golden/tokenizer/split.vectors"

static struct text_split *new_split(const char *pattern, enum text_split_behavior behavior,
                                    bool invert, bool jit)
{
    struct text_split *s = NULL;
    struct tow_err err;
    if (text_split_new(&s, jit, &err) < 0) fail_msg("%s", err.msg);
    if (text_split_add(s, pattern, strlen(pattern), false, behavior, invert, &err) < 0)
        fail_msg("%s: %s", pattern, err.msg);
    return s;
}

struct pieces {
    const char *text;
    struct tow_buf joined;
    size_t n;
    int stop_at; /* the piece that answers 7; -1 for none */
};

static int on_piece(void *ctx, size_t begin, size_t end, struct tow_err *err)
{
    struct pieces *p = ctx;
    (void)err;
    if ((int)p->n == p->stop_at) return 7;
    if (p->n++) tow_buf_putc(&p->joined, '|');
    tow_buf_put(&p->joined, p->text + begin, end - begin);
    return 0;
}

static int run(const struct text_split *s, const char *text, size_t len, struct pieces *p,
               struct tow_err *err)
{
    struct text_split_scratch *w = NULL;
    uint64_t n_matches = 0;
    assert_int_equal(text_split_scratch_new(&w, s, err), 0);
    tow_buf_init(&p->joined, 0);
    p->text = text;
    int rc = text_split_run(s, w, text, 0, len, on_piece, p, &n_matches, err);
    text_split_scratch_free(w);
    return rc;
}

static void unescape(char *s)
{
    char *out = s;
    for (; *s; s++) {
        if (*s == '\\' && s[1]) {
            s++;
            *out++ = *s == 'n' ? '\n' : *s == 't' ? '\t' : *s;
        } else {
            *out++ = *s;
        }
    }
    *out = 0;
}

static enum text_split_behavior behavior_named(const char *name)
{
    static const char *const names[] = {"isolated", "removed", "merged_with_previous",
                                        "merged_with_next", "contiguous"};
    for (int i = 0; i < 5; i++)
        if (!strcmp(name, names[i])) return (enum text_split_behavior)i;
    fail_msg("no behaviour %s", name);
    return TEXT_SPLIT_ISOLATED;
}

static void check_split(char *const field[], bool jit)
{
    struct text_split *s = new_split(field[1], behavior_named(field[2]), field[3][0] == '1', jit);
    struct pieces p = {.stop_at = -1};
    struct tow_err err;
    assert_int_equal(run(s, field[4], strlen(field[4]), &p, &err), 0);
    const char *have = p.joined.data ? p.joined.data : "";
    if (strcmp(have, field[5]) != 0)
        fail_msg("%s %s %s '%s': have %s, want %s", field[1], field[2], field[3], field[4], have,
                 field[5]);
    tow_buf_fini(&p.joined);
    text_split_free(s);
}

static int put_char(uint32_t cp, char out[4])
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    int n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, cp >>= 6) out[i] = (char)(0x80 | (cp & 0x3F));
    out[0] = (char)((n == 2 ? 0xC0 : n == 3 ? 0xE0 : 0xF0) | cp);
    return n;
}

static void check_class(char *const field[])
{
    struct text_split *s = new_split(field[1], TEXT_SPLIT_ISOLATED, false, true);
    struct text_split_scratch *w = NULL;
    struct tow_err err;
    uint64_t h = 0xCBF29CE484222325u;
    unsigned long n = 0;
    assert_int_equal(text_split_scratch_new(&w, s, &err), 0);
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        char text[4], shown_text[4];
        if (cp >= 0xD800 && cp <= 0xDFFF) continue;
        uint32_t shown = text_unicode_standin(cp);
        int len = put_char(cp, text);
        if (shown) assert_int_equal(put_char(shown, shown_text), len);
        if (!text_split_matches(s, w, shown ? shown_text : text, (size_t)len)) continue;
        n++;
        for (int k = 0; k < 4; k++) h = (h ^ (cp >> (8 * k) & 0xFF)) * 0x100000001B3u;
    }
    assert_int_equal(n, strtoul(field[2], NULL, 10));
    if (h != strtoull(field[3], NULL, 16)) fail_msg("%s: other characters", field[1]);
    text_split_scratch_free(w);
    text_split_free(s);
}

static void for_each_vector(const char *kind, void (*check)(char *const field[]), int want)
{
    FILE *f = fopen(VECTORS, "r");
    char *line = NULL, *field[6];
    size_t cap = 0;
    int n = 0;
    assert_non_null(f);
    while (getline(&line, &cap, f) >= 0) {
        char *rest = line;
        line[strcspn(line, "\n")] = 0;
        for (int i = 0; i < 6; i++) field[i] = rest ? strsep(&rest, "\t") : NULL;
        if (strcmp(field[0], kind) != 0) continue;
        if (field[5]) {
            unescape(field[4]);
            unescape(field[5]);
        }
        check(field);
        n++;
    }
    free(line);
    fclose(f);
    assert_int_equal(n, want);
}

static void check_with_jit(char *const field[])
{
    check_split(field, true);
}
static void check_without_jit(char *const field[])
{
    check_split(field, false);
}

static void test_split__vectors_equal_reference(void **state)
{
    (void)state;
    for_each_vector("split", check_with_jit, 480);
}

static void test_split__interpreter_gives_the_same(void **state)
{
    (void)state;
    for_each_vector("split", check_without_jit, 480);
}

static void test_split__classes_of_all_characters_equal_reference(void **state)
{
    (void)state;
    for_each_vector("class", check_class, 13);
}

static void test_split__no_memory_for_jit_falls_back(void **state)
{
    (void)state;
    struct tow_err err;
    assert_int_equal(tow_fault_arm("text.jit", 1, true, TOW_FAULT_FAIL, &err), 0);
    struct text_split *s = new_split("b", TEXT_SPLIT_ISOLATED, false, true);
    tow_fault_reset();
    struct pieces p = {.stop_at = -1};
    assert_false(text_split_has_jit(s));
    assert_int_equal(run(s, "abba", 4, &p, &err), 0);
    assert_string_equal(p.joined.data, "a|b|b|a");
    tow_buf_fini(&p.joined);
    text_split_free(s);
}

static void test_split__stages_see_only_their_piece(void **state)
{
    (void)state;
    struct text_split *s = new_split("b", TEXT_SPLIT_ISOLATED, false, true);
    struct pieces p = {.stop_at = -1};
    struct tow_err err;
    /* behind the first stage no 'a' is followed by a 'b', and none is preceded by one */
    assert_int_equal(text_split_add(s, "a(?!b)", 6, false, TEXT_SPLIT_ISOLATED, false, &err), 0);
    assert_int_equal(text_split_add(s, "(?<=b)a", 7, false, TEXT_SPLIT_REMOVED, false, &err), 0);
    assert_int_equal(text_split_n_stages(s), 3);
    assert_int_equal(run(s, "xabab", 5, &p, &err), 0);
    assert_string_equal(p.joined.data, "x|a|b|a|b");
    tow_buf_fini(&p.joined);
    text_split_free(s);
}

static void test_split__literal_pattern_is_no_regex(void **state)
{
    (void)state;
    struct text_split *s = NULL;
    struct pieces p = {.stop_at = -1};
    struct tow_err err;
    assert_int_equal(text_split_new(&s, true, &err), 0);
    assert_int_equal(text_split_add(s, "[é", 3, true, TEXT_SPLIT_ISOLATED, false, &err), 0);
    assert_int_equal(run(s, "a[éb[", 6, &p, &err), 0);
    assert_string_equal(p.joined.data, "a|[é|b[");
    tow_buf_fini(&p.joined);
    text_split_free(s);
}

static void test_split__answer_of_the_callback_ends_the_run(void **state)
{
    (void)state;
    struct text_split *s = new_split(" ", TEXT_SPLIT_REMOVED, false, true);
    struct pieces p = {.stop_at = 2};
    struct tow_err err;
    assert_int_equal(run(s, "a b c d", 7, &p, &err), 7);
    assert_string_equal(p.joined.data, "a|b");
    tow_buf_fini(&p.joined);
    text_split_free(s);
}

static void test_split__exponential_pattern_is_cut_off(void **state)
{
    (void)state;
    for (int jit = 0; jit < 2; jit++) {
        struct text_split *s = new_split("(a|a)*[bc]", TEXT_SPLIT_ISOLATED, false, jit);
        struct pieces p = {.stop_at = -1};
        struct tow_err err;
        char text[64];
        memset(text, 'a', sizeof text);
        assert_int_equal(run(s, text, sizeof text, &p, &err), TOW_ETOOBIG);
        assert_non_null(strstr(err.msg, "stage 0"));
        tow_buf_fini(&p.joined);
        text_split_free(s);
    }
}

static void test_split__patterns_that_engines_read_differently_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *says;
    } bad[] = {
        {"^a", "anchor"},
        {"a$", "anchor"},
        {"\\w+", "\\w"},
        {"\\h", "\\h"},
        {"\\R", "\\R"},
        {"\\pL", "general category"},
        {"\\p{Han}", "Han"},
        {"\\p{L", "category"},
        {"[[:alpha:]]", "inside a class"},
        {"[a&&b]", "&&"},
        {"[]a]", "empty class"},
        {"[a", "not closed"},
        {"(*FAIL)", "(*"},
        {"(?P<n>a)", "group"},
        {"(?m:a)", "group"},
        {"(?#c)", "group"},
        {"a{,3}", "{n}"},
        {"a{", "{n}"},
        {"a{2}+", "different"},
        {"a{2}?", "different"},
        {"\\x{110000}", "regex byte"},
        {"\\xe9", "\\x"},
        {"\\", "ends the pattern"},
        {"a)", "regex byte"},
        {"(a", "regex byte"},
        {"*a", "regex byte"},
        {"\\\xC3\xA9", "escape"},
        {"\xFF", "regex byte"},
        {"\\K", "\\K"},
        {"", "empty"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct text_split *s = NULL;
        struct tow_err err;
        const char *p = bad[i].pattern;
        assert_int_equal(text_split_new(&s, true, &err), 0);
        int rc = text_split_add(s, p, strlen(p), false, TEXT_SPLIT_ISOLATED, false, &err);
        if (rc != TOW_EFORMAT) fail_msg("%s: %d", p, rc);
        if (!strstr(err.msg, bad[i].says)) fail_msg("%s: %s", p, err.msg);
        assert_int_equal(text_split_n_stages(s), 0);
        text_split_free(s);
    }
}

static void test_split__too_many_stages_are_refused(void **state)
{
    (void)state;
    struct text_split *s = new_split("a", TEXT_SPLIT_ISOLATED, false, true);
    struct tow_err err;
    for (int i = 1; i < TEXT_SPLIT_MAX_STAGES; i++)
        assert_int_equal(text_split_add(s, "a", 1, false, TEXT_SPLIT_ISOLATED, false, &err), 0);
    assert_int_equal(text_split_add(s, "a", 1, false, TEXT_SPLIT_ISOLATED, false, &err),
                     TOW_EFORMAT);
    text_split_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split__vectors_equal_reference),
        cmocka_unit_test(test_split__interpreter_gives_the_same),
        cmocka_unit_test(test_split__classes_of_all_characters_equal_reference),
        cmocka_unit_test(test_split__no_memory_for_jit_falls_back),
        cmocka_unit_test(test_split__stages_see_only_their_piece),
        cmocka_unit_test(test_split__literal_pattern_is_no_regex),
        cmocka_unit_test(test_split__answer_of_the_callback_ends_the_run),
        cmocka_unit_test(test_split__exponential_pattern_is_cut_off),
        cmocka_unit_test(test_split__patterns_that_engines_read_differently_are_refused),
        cmocka_unit_test(test_split__too_many_stages_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
