/* Tests of router/stop.h, also against a search in the whole text. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "router/stop.h"

#include <stdlib.h>
#include <string.h>

static void run(const char *text, const char *const *stops, size_t n, size_t step, bool want_found,
                const char *want)
{
    struct rtr_stop_string strings[RTR_MAX_STOPS];
    for (size_t i = 0; i < n; i++) {
        strings[i] = (struct rtr_stop_string){stops[i], strlen(stops[i])};
    }
    struct rtr_stop *s = rtr_stop_new(strings, n);
    struct tow_buf out;
    tow_buf_init(&out, 0);
    bool found = false;
    size_t len = strlen(text);
    for (size_t at = 0; at < len && !found; at += step) {
        size_t k = len - at < step ? len - at : step;
        found = rtr_stop_push(s, text + at, k, &out);
    }
    if (!found) found = rtr_stop_end(s, &out);
    assert_int_equal(found, want_found);
    assert_string_equal(out.data ? out.data : "", want);
    tow_buf_fini(&out);
    rtr_stop_free(s);
}

static void check(const char *text, const char *const *stops, size_t n, bool found,
                  const char *want)
{
    for (size_t step = 1; step <= strlen(text) + 1; step++) run(text, stops, n, step, found, want);
}
#define CHECK(text, found, want, ...)                                                              \
    check(text, (const char *const[]){__VA_ARGS__},                                                \
          sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *), found, want)

static void test_stop__earliest_start_wins(void **state)
{
    (void)state;
    CHECK("ABCDEFGHIJK", true, "ABC", "DEFGHIJ");
    CHECK("ABCDEFGHIJK", false, "ABCDEFGHIJK", "DEFX");
    CHECK("ABCDEFGHIJK", true, "ABC", "GH", "DEFGHIJ");
    CHECK("ABCDEFGHIJK", true, "ABC", "DEFGHIJ", "GH");
    CHECK("ABCDEFGHIJK", true, "ABCDEF", "GH", "DEFGHIX");
    CHECK("ABCDEFGHIJK", true, "ABCDEFGHIJ", "K");
    CHECK("ABCDEFGH", true, "ABCDEF", "GH", "DEFGHIJ"); /* the text ends first */
    CHECK("aaab", true, "a", "aab");
    CHECK("", false, "", "x");
    CHECK("x\xF0\x9F\x98\x80y", true, "x", "\xF0\x9F\x98\x80");
}

static void test_stop__agrees_with_a_search_in_the_whole_text(void **state)
{
    (void)state;
    unsigned seed = 7;
#define RANDOM(n) ((seed = seed * 1103515245u + 12345u) >> 16) % (n)
    for (int round = 0; round < 20000; round++) {
        char text[25], stop[4][6];
        const char *stops[4];
        size_t len = RANDOM(24), n = 1 + RANDOM(4);
        for (size_t i = 0; i < len; i++) text[i] = (char)('a' + RANDOM(2));
        text[len] = 0;
        const char *first = NULL;
        for (size_t k = 0; k < n; k++) {
            size_t m = 1 + RANDOM(5);
            for (size_t i = 0; i < m; i++) stop[k][i] = (char)('a' + RANDOM(2));
            stop[k][m] = 0;
            stops[k] = stop[k];
            const char *at = strstr(text, stop[k]);
            if (at && (!first || at < first)) first = at;
        }
        char want[25];
        strcpy(want, text);
        if (first) want[first - text] = 0;
        run(text, stops, n, 1 + RANDOM(4), first != NULL, want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stop__earliest_start_wins),
        cmocka_unit_test(test_stop__agrees_with_a_search_in_the_whole_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
