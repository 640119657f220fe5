/* Tests of common/text/json.h. What Python's json prints was taken from CPython 3.11. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/text/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int parse_n(struct json **out, const char *text, size_t len, struct tow_err *err)
{
    *out = NULL;
    return json_parse(out, text, len, NULL, err);
}

static struct json *parsed(const char *text)
{
    struct tow_err err;
    struct json *v;
    if (parse_n(&v, text, strlen(text), &err) < 0) fail_msg("%s: %s", text, err.msg);
    return v;
}

static void dumps_as(const char *text, const char *want)
{
    struct tow_buf b;
    struct json *v = parsed(text);
    tow_buf_init(&b, 0);
    json_dump(&b, v);
    assert_false(tow_buf_failed(&b));
    assert_string_equal(b.data, want);
    tow_buf_fini(&b);
    json_free(v);
}

static void test_json__numbers_print_as_python_prints_them(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"0", "0"},
        {"-0", "0"}, /* an integer, so it has no sign */
        {"1", "1"},
        {"-17", "-17"},
        {"999999999999999", "999999999999999"},
        {"9007199254740993", "9007199254740993"},
        {"123456789012345678901234567890", "123456789012345678901234567890"},
        {"1.0", "1.0"},
        {"2.50", "2.5"},
        {"1e3", "1000.0"},
        {"1E+3", "1000.0"},
        {"1e-7", "1e-07"},
        {"0.0001", "0.0001"},
        {"0.00001", "1e-05"},
        {"0.000123", "0.000123"},
        {"1e15", "1000000000000000.0"},
        {"1e16", "1e+16"},
        {"1.5e16", "1.5e+16"},
        {"123456789012345680.0", "1.2345678901234568e+17"},
        {"-0.0", "-0.0"},
        {"0.1", "0.1"},
        {"0.30000000000000004", "0.30000000000000004"},
        {"3.141592653589793", "3.141592653589793"},
        {"5e-324", "5e-324"},
        {"2.2250738585072014e-308", "2.2250738585072014e-308"},
        {"1.7976931348623157e308", "1.7976931348623157e+308"},
        {"1e-999", "0.0"},
        {"100.25", "100.25"},
        {"1e22", "1e+22"},
        {"0.5", "0.5"},
        {"5.684341886080802e-14", "5.684341886080802e-14"},
        {"9007199254740992.0", "9007199254740992.0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) dumps_as(cases[i][0], cases[i][1]);
    dumps_as("[0.5,1,0.5,[2.0,{\"a\":1e2,\"b\":12345678901234567890}],7]",
             "[0.5, 1, 0.5, [2.0, {\"a\": 100.0, \"b\": 12345678901234567890}], 7]");
}

static void test_json__any_double_reads_back(void **state)
{
    (void)state;
    uint64_t x = 88172645463325252u;
    for (int i = 0; i < 20000; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        double d;
        memcpy(&d, &x, sizeof d);
        struct tow_buf b;
        tow_buf_init(&b, 0);
        json_put_double(&b, d);
        if (!isfinite(d)) {
            assert_string_equal(b.data, "null");
        } else {
            struct json *v = parsed(b.data);
            double back;
            assert_true(json_double(v, &back));
            assert_true(back == d);
            json_free(v);
        }
        tow_buf_fini(&b);
    }
}

static void test_json__text_prints_as_python_prints_it(void **state)
{
    (void)state;
    dumps_as("{\"b\":[],\"a\":{},\"\":null,\"t\":true,\"f\":false}",
             "{\"b\": [], \"a\": {}, \"\": null, \"t\": true, \"f\": false}");
    dumps_as("\"\\u0041\\u00e9\\ud83d\\ude00\\/\\b\\f\\n\\r\\t\\\"\\\\\\u0001\\u007f\"",
             "\"A\xc3\xa9\xf0\x9f\x98\x80/\\b\\f\\n\\r\\t\\\"\\\\\\u0001\x7f\"");
    dumps_as(" [ 1 ,\r\n\t2 ] ", "[1, 2]");
}

static void test_json__writer_replaces_bytes_that_are_no_utf8(void **state)
{
    (void)state;
    struct tow_buf b;
    tow_buf_init(&b, 0);
    json_put_string(&b, "a\xff\xc3(\0b\xe2\x82", 8);
    assert_string_equal(b.data, "\"a\xef\xbf\xbd\xef\xbf\xbd(\\u0000b\xef\xbf\xbd\xef\xbf\xbd\"");
    tow_buf_clear(&b);
    json_put_double(&b, NAN);
    json_put_double(&b, -INFINITY);
    json_put_int(&b, INT64_MIN);
    assert_string_equal(b.data, "nullnull-9223372036854775808");
    tow_buf_fini(&b);
}

struct bad {
    const char *text;
    size_t len;       /* 0: strlen */
    const char *says; /* part of the message */
};

static void all_refused(const struct bad *cases, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct tow_err err = {0};
        struct json *v;
        size_t len = cases[i].len ? cases[i].len : strlen(cases[i].text);
        char *exact = malloc(len + 1); /* so that a sanitizer sees a read past the end */
        memcpy(exact, cases[i].text, len);
        exact = realloc(exact, len ? len : 1);
        int rc = parse_n(&v, exact, len, &err);
        if (rc != TOW_EFORMAT || v) fail_msg("%s: accepted", cases[i].text);
        if (!strstr(err.msg, cases[i].says))
            fail_msg("%s: says '%s', not '%s'", cases[i].text, err.msg, cases[i].says);
        for (const char *p = err.msg; *p;) {
            int k = json_utf8_len(p, strlen(p));
            assert_true(k > 0);
            p += k;
        }
        free(exact);
    }
}

/* Field case RT-15. */
static void test_json__odd_text_is_refused_by_field(void **state)
{
    (void)state;
    static const struct bad cases[] = {
        {"{\"messages\":[{},{\"content\":\"\\uD800\"}]}", 0,
         "byte 28: messages[1].content: lone high surrogate"},
        {"{\"content\":\"\\uDC00\\uD800\"}", 0, "content: lone low surrogate"},
        {"{\"content\":\"\\uD83Dx\"}", 0, "content: lone high surrogate"},
        {"{\"content\":\"\\uD83D\\u0041\"}", 0, "content: lone high surrogate"},
        {"{\"content\":\"a\\u0000b\"}", 0, "content: the character U+0000"},
        {"{\"role\":\"\xff\"}", 0, "byte 9: role: invalid UTF-8"},
        {"{\"role\":\"\xc0\x80\"}", 0, "role: invalid UTF-8"},
        {"{\"role\":\"\xe0\x80\x80\"}", 0, "role: invalid UTF-8"},
        {"{\"stop\":[\"a\",\"\xed\xa0\x80\"]}", 0, "stop[1]: invalid UTF-8"},
        {"{\"stop\":[\"\xf5\x80\x80\x80\"]}", 0, "stop[0]: invalid UTF-8"},
        {"{\"stop\":[\"\xf4\x90\x80\x80\"]}", 0, "stop[0]: invalid UTF-8"},
        {"{\"stop\":[\"\xf0\x80\x80\x80\"]}", 0, "stop[0]: invalid UTF-8"},
        {"{\"a\":{\"\\ud800\":1}}", 0, "byte 7: a: lone high surrogate"},
        {"{\"a\":{\"k\xff\":1}}", 0, "a: invalid UTF-8"},
        {"{\"a\":\"\xe2\x82", 0, "a: invalid UTF-8"},
        {"\xef\xbb\xbf{}", 0, "byte order mark"},
        {"{\"a\":\xff}", 0, "byte 0xff where a value"},
        {"{\"a\":\"x\ny\"}", 0, "control character"},
        {"{\"a\":\"x\0y\"}", 11, "control character"},
        {"\"\\u12\"", 0, "four hex digits"},
        {"\"\\u12g4\"", 0, "four hex digits"},
        {"\"\\x41\"", 0, "unknown escape"},
        {"\"abc", 0, "string without an end"},
        {"\"abc\\", 0, "unknown escape"},
        {"\"abc\\\"", 0, "string without an end"},
    };
    all_refused(cases, sizeof cases / sizeof *cases);

    struct json *v = parsed("{\"content\":\"\\uD83D\\uDE00\",\"\\uD83D\\uDE00\":1}");
    size_t len;
    assert_string_equal(json_string(json_find(v, "content"), &len), "\xf0\x9f\x98\x80");
    assert_int_equal(len, 4);
    assert_non_null(json_find(v, "\xf0\x9f\x98\x80"));
    json_free(v);
}

static void test_json__grammar_errors_are_refused(void **state)
{
    (void)state;
    static const struct bad cases[] = {
        {"", 0, "byte 0: the text ends where a value"},
        {"  ", 0, "byte 2: the text ends"},
        {"{", 0, "a key in quotes"},
        {"[", 0, "a value"},
        {"[1", 0, "',' or ']'"},
        {"[1,]", 0, "']' where a value"},
        {"{\"a\":1,}", 0, "'}' where a key"},
        {"{\"a\" 1}", 0, "':' after the key"},
        {"{\"a\":}", 0, "a: '}' where a value"},
        {"{a:1}", 0, "'a' where a key"},
        {"[1}", 0, "',' or ']'"},
        {"{\"a\":1]", 0, "',' or '}'"},
        {"1 2", 0, "'2' where the end"},
        {"{}}", 0, "'}' where the end"},
        {"tru", 0, "a value"},
        {"nul", 0, "a value"},
        {"True", 0, "a value"},
        {"NaN", 0, "a value"},
        {"Infinity", 0, "a value"},
        {"-", 0, "a digit"},
        {"-a", 0, "a digit"},
        {"+1", 0, "a value"},
        {"01", 0, "begin with 0"},
        {"-01", 0, "begin with 0"},
        {"1.", 0, "a digit after the point"},
        {".5", 0, "a value"},
        {"1e", 0, "digit of the exponent"},
        {"1e+", 0, "digit of the exponent"},
        {"1.5.2", 0, "'.' where the end"},
        {"0x10", 0, "'x' where the end"},
        {"'a'", 0, "a value"},
        {"[1]//c", 0, "'/' where the end"},
        {"{\"t\":{\"x\":[0,1e999]}}", 0, "byte 13: t.x[1]: number out of range"},
        {"-1E400", 0, "number out of range"},
        {"1\0", 2, "byte 0x00 where the end"},
        {"\v1", 0, "byte 0x0b"},
    };
    all_refused(cases, sizeof cases / sizeof *cases);
    struct tow_err err;
    struct json *v;
    assert_int_equal(parse_n(&v, "", 0, &err), TOW_EFORMAT);
}

static void test_json__a_key_twice_is_refused(void **state)
{
    (void)state;
    static const struct bad cases[] = {
        {"{\"model\":1,\"model\":2}", 0, "byte 11: model: this key stands twice"},
        {"{\"a\":{\"model\":1,\"mod\\u0065l\":2}}", 0, "this key stands twice"},
        {"{\"\\u0061b\":1,\"a\\u0062\":2}", 0, "this key stands twice"},
        {"{\"\":1,\"\":2}", 0, "this key stands twice"},
        {"{\"\\ud83d\\ude00\":1,\"\xf0\x9f\x98\x80\":2}", 0, "this key stands twice"},
    };
    all_refused(cases, sizeof cases / sizeof *cases);
    json_free(parsed("[{\"a\":{\"a\":1}},{\"a\":1,\"A\":2,\"a \":3}]"));
}

static char *repeat(const char *head, const char *unit, size_t n, const char *tail, size_t *len)
{
    size_t h = strlen(head), u = strlen(unit), t = strlen(tail);
    char *s = malloc(h + n * u + t + 1);
    memcpy(s, head, h);
    for (size_t i = 0; i < n; i++) memcpy(s + h + i * u, unit, u);
    memcpy(s + h + n * u, tail, t + 1);
    *len = h + n * u + t;
    return s;
}

/* Field case RT-16: depth. The limit is 64 in every place, and a million brackets cost nothing. */
static void test_json__deep_nesting_is_refused_at_once(void **state)
{
    (void)state;
    static const char *const heads[] = {
        "", "{\"x\":", "{\"tools\":[{\"function\":{\"parameters\":", "{\"messages\":"};
    static const char *const units[] = {"[", "{\"a\":"};
    static const size_t depths[] = {100, 1000, 10000, 1000000};
    for (size_t h = 0; h < 4; h++)
        for (size_t u = 0; u < 2; u++)
            for (size_t d = 0; d < 4; d++) {
                size_t len;
                struct tow_err err = {0};
                struct json *v;
                char *s = repeat(heads[h], units[u], depths[d], "", &len);
                assert_int_equal(parse_n(&v, s, len, &err), TOW_EFORMAT);
                assert_non_null(strstr(err.msg, "nested more than 64 deep"));
                free(s);
            }
    char open[65 * 2 + 1];
    memset(open, '[', 64);
    memset(open + 64, ']', 64);
    open[128] = 0;
    json_free(parsed(open));
    memset(open, '[', 65);
    memset(open + 65, ']', 65);
    struct tow_err err;
    struct json *v;
    assert_int_equal(parse_n(&v, open, 130, &err), TOW_EFORMAT);
}

static void test_json__hostile_sizes_are_refused(void **state)
{
    (void)state;
    size_t len;
    struct tow_err err;
    struct json *v;
    char *digits = repeat("{\"max_tokens\":", "7", 1 << 20, "}", &len);
    assert_int_equal(parse_n(&v, digits, len, &err), TOW_EFORMAT);
    assert_non_null(strstr(err.msg, "max_tokens: number of 1048576 characters; at most 4300"));
    free(digits);

    digits = repeat("", "7", JSON_NUMBER_MAX, "", &len); /* kept whole, though no double holds it */
    struct tow_buf b;
    tow_buf_init(&b, 0);
    assert_int_equal(parse_n(&v, digits, len, &err), 0);
    json_dump(&b, v);
    assert_string_equal(b.data, digits);
    double d;
    int64_t i;
    assert_false(json_double(v, &d));
    assert_false(json_int(v, &i));
    json_free(v);
    tow_buf_clear(&b);
    free(digits);

    tow_buf_putc(&b, '{');
    for (int k = 0; k < 1000000; k++) tow_buf_printf(&b, "%s\"k%d\":%d", k ? "," : "", k, k);
    tow_buf_putc(&b, '}');
    assert_int_equal(parse_n(&v, b.data, b.len, &err), TOW_EFORMAT);
    assert_non_null(strstr(err.msg, "more than 65536 keys"));
    const struct json_limits wide = {.max_keys = 2000000};
    v = NULL;
    assert_int_equal(json_parse(&v, b.data, b.len, &wide, &err), 0);
    assert_int_equal(json_size(v), 1000000);
    json_free(v);

    const struct json_limits small = {.max_bytes = 10, .max_values = 4};
    assert_int_equal(json_parse(&v, "[1,2,3,4,5]", 11, &small, &err), TOW_ETOOBIG);
    assert_int_equal(json_parse(&v, "[1,2,3,4]", 9, &small, &err), TOW_EFORMAT);
    v = NULL;
    assert_int_equal(json_parse(&v, "[1,2,3]", 7, &small, &err), 0);
    json_free(v);
    tow_buf_fini(&b);
}

static void test_json__getters_take_no_other_type(void **state)
{
    (void)state;
    struct json *v =
        parsed("{\"s\":\"x\",\"i\":5,\"f\":1.5,\"b\":true,\"n\":null,\"a\":[1],\"o\":{},"
               "\"big\":9223372036854775807,\"bigger\":9223372036854775808,"
               "\"min\":-9223372036854775808,\"whole\":5.0,\"q\":\"5\"}");
    struct tow_err err;
    int64_t i = -1;
    double d = -1;
    bool b = false;
    const char *s = NULL;
    size_t len;
    const struct json *c = v;

    assert_int_equal(json_get_int(v, "i", 1, 0, 10, &i, &err), 0);
    assert_int_equal(i, 5);
    assert_int_equal(json_get_int(v, "n", 7, 0, 10, &i, &err), 0);
    assert_int_equal(i, 7);
    assert_int_equal(json_get_int(v, "none", 8, 0, 10, &i, &err), 0);
    assert_int_equal(i, 8);
    assert_int_equal(json_get_int(v, "i", 1, 6, 10, &i, &err), TOW_EINVAL);
    assert_string_equal(err.msg, "i: must be an integer from 6 to 10, is 5");
    assert_int_equal(i, 8);
    assert_int_equal(json_get_int(v, "f", 1, 0, 10, &i, &err), TOW_EINVAL);
    assert_string_equal(err.msg, "f: must be an integer from 0 to 10, is 1.5");
    assert_int_equal(json_get_int(v, "whole", 1, 0, 10, &i, &err), TOW_EINVAL);
    assert_int_equal(json_get_int(v, "q", 1, 0, 10, &i, &err), TOW_EINVAL);
    assert_string_equal(err.msg, "q: must be an integer from 0 to 10, is \"5\"");
    assert_int_equal(json_get_int(v, "b", 1, 0, 10, &i, &err), TOW_EINVAL);
    assert_int_equal(json_get_int(v, "big", 1, INT64_MIN, INT64_MAX, &i, &err), 0);
    assert_true(i == INT64_MAX);
    assert_int_equal(json_get_int(v, "min", 1, INT64_MIN, INT64_MAX, &i, &err), 0);
    assert_true(i == INT64_MIN);
    assert_int_equal(json_get_int(v, "bigger", 1, INT64_MIN, INT64_MAX, &i, &err), TOW_EINVAL);

    assert_int_equal(json_get_double(v, "f", 1, 0, 2, &d, &err), 0);
    assert_true(d == 1.5);
    assert_int_equal(json_get_double(v, "i", 1, 0, 9, &d, &err), 0);
    assert_true(d == 5);
    assert_int_equal(json_get_double(v, "f", 1, 0, 1, &d, &err), TOW_EINVAL);
    assert_string_equal(err.msg, "f: must be a number from 0 to 1, is 1.5");
    assert_int_equal(json_get_double(v, "q", 1, 0, 9, &d, &err), TOW_EINVAL);

    assert_int_equal(json_get_bool(v, "b", false, &b, &err), 0);
    assert_true(b);
    assert_int_equal(json_get_bool(v, "i", false, &b, &err), TOW_EINVAL);
    assert_string_equal(err.msg, "i: must be true or false, is 5");

    assert_int_equal(json_get_string(v, "s", "d", &s, &len, &err), 0);
    assert_string_equal(s, "x");
    assert_int_equal(len, 1);
    assert_int_equal(json_get_string(v, "n", "def", &s, &len, &err), 0);
    assert_string_equal(s, "def");
    assert_int_equal(json_get_string(v, "o", "d", &s, NULL, &err), TOW_EINVAL);
    assert_string_equal(err.msg, "o: must be a string, is an object");

    assert_int_equal(json_get_array(v, "n", &c, &err), 0);
    assert_null(c);
    assert_int_equal(json_get_array(v, "a", &c, &err), 0);
    assert_int_equal(json_size(c), 1);
    assert_int_equal(json_get_object(v, "a", &c, &err), TOW_EINVAL);
    assert_int_equal(json_get_object(v, "o", &c, &err), 0);
    assert_null(json_first(c));

    assert_null(json_require(v, "none", &err));
    assert_string_equal(err.msg, "none: is required but missing");
    assert_null(json_require(v, "n", &err));
    assert_string_equal(err.msg, "n: is required but null");
    assert_non_null(json_require(v, "s", &err));
    assert_null(json_find(json_find(v, "s"), "x"));
    assert_int_equal(json_type(NULL), JSON_NULL);
    json_free(v);
}

static void test_json__walk_keeps_the_order(void **state)
{
    (void)state;
    struct json *v = parsed("{\"z\":1,\"a\":[10,20,30],\"m\":\"x\"}");
    char keys[8] = "";
    JSON_EACH(it, v) strcat(keys, json_key(it));
    assert_string_equal(keys, "zam");
    int64_t sum = 0, x = 0;
    JSON_EACH(it, json_find(v, "a"))
    {
        assert_null(json_key(it));
        assert_true(json_int(it, &x));
        sum = sum * 100 + x;
    }
    assert_int_equal(sum, 102030);
    assert_true(json_int(json_item(json_find(v, "a"), 2), &x));
    assert_int_equal(x, 30);
    assert_null(json_item(json_find(v, "a"), 3));
    json_free(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json__numbers_print_as_python_prints_them),
        cmocka_unit_test(test_json__any_double_reads_back),
        cmocka_unit_test(test_json__text_prints_as_python_prints_it),
        cmocka_unit_test(test_json__writer_replaces_bytes_that_are_no_utf8),
        cmocka_unit_test(test_json__odd_text_is_refused_by_field),
        cmocka_unit_test(test_json__grammar_errors_are_refused),
        cmocka_unit_test(test_json__a_key_twice_is_refused),
        cmocka_unit_test(test_json__deep_nesting_is_refused_at_once),
        cmocka_unit_test(test_json__hostile_sizes_are_refused),
        cmocka_unit_test(test_json__getters_take_no_other_type),
        cmocka_unit_test(test_json__walk_keeps_the_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
