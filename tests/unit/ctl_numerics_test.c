/* The three forms of the audit's report, and its exit status. What it finds: tests/golden. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/text/json.h"
#include "deploy/ctl/numerics.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static uint64_t digests[2] = {0x0123456789abcdef, 0xf};

static void make_report(struct ctl_numerics_report *r)
{
    *r = (struct ctl_numerics_report){.n_rows = 3,
                                      .n_failed = 2,
                                      .fingerprint = "00112233aabbccdd",
                                      .device = "cpu",
                                      .isa = "avx2",
                                      .n_threads = 2,
                                      .n_tokens = 300,
                                      .n_pages = 2,
                                      .digests = digests,
                                      .seconds = 1.5};
    r->rows[0] = (struct ctl_numerics_row){.name = "topk.exact",
                                           .bound = 0,
                                           .pass = true,
                                           .what = "wrong entries",
                                           .meaning = "selection is \"exact\"",
                                           .detail = "4096 entries"};
    r->rows[1] = (struct ctl_numerics_row){.name = "index.fp4.selection",
                                           .value = 0.5,
                                           .bound = 0.75,
                                           .at_least = true,
                                           .what = "Jaccard",
                                           .meaning = "keys find what they should",
                                           .detail = "worst row 0.1"};
    r->rows[2] = (struct ctl_numerics_row){.name = "kv.fp8",
                                           .value = NAN,
                                           .bound = 0.01,
                                           .what = "largest error",
                                           .meaning = "entries are read right",
                                           .detail = "2 layers"};
}

static void has(const struct tow_buf *text, const char *part)
{
    if (!strstr(text->data, part)) fail_msg("lacks '%s':\n%s", part, text->data);
}

static void test_ctl_numerics__the_table_names_what_failed_and_why(void **state)
{
    struct ctl_numerics_report r;
    struct tow_buf text;
    (void)state;
    make_report(&r);
    tow_buf_init(&text, 0);
    ctl_numerics_table(&r, &text);
    has(&text, "1 of 3 checks pass; failed: index.fp4.selection, kv.fp8\n");
    has(&text, ">= 0.75        FAIL  keys find what they should\n");
    has(&text, "Jaccard: worst row 0.1\n");
    has(&text, "<= 0           PASS  selection is \"exact\"\n");
    assert_null(strstr(text.data, "4096 entries")); /* details only of what failed */
    tow_buf_clear(&text);
    snprintf(r.broken_off, sizeof r.broken_off, "device \"lost\"");
    ctl_numerics_table(&r, &text);
    has(&text,
        "failed: index.fp4.selection, kv.fp8; broken off, the rest is not run: device \"lost\"\n");
    tow_buf_clear(&text);
    ctl_numerics_json(&r, &text);
    has(&text, "\"broken_off\":\"device \\\"lost\\\"\",");
    tow_buf_fini(&text);
}

static void test_ctl_numerics__json_holds_every_row(void **state)
{
    struct ctl_numerics_report r;
    struct tow_buf text;
    struct json *root = NULL;
    (void)state;
    make_report(&r);
    tow_buf_init(&text, 0);
    ctl_numerics_json(&r, &text);
    assert_int_equal(json_parse(&root, text.data, text.len, NULL, NULL), 0);
    json_free(root);
    has(&text, "\"failed\":2,");
    assert_null(strstr(text.data, "broken_off"));
    has(&text, "{\"name\":\"topk.exact\",\"value\":0.0,\"bound\":0.0,\"sense\":\"at_most\",");
    has(&text, "\"meaning\":\"selection is \\\"exact\\\"\",");
    has(&text, "{\"name\":\"kv.fp8\",\"value\":null,"); /* no number is not a number in JSON */
    has(&text, "\"sense\":\"at_least\"");
    has(&text, "\"page_digests\":[\"0123456789abcdef\",\"000000000000000f\"]");
    tow_buf_fini(&text);
}

static void test_ctl_numerics__the_page_has_rows_details_and_digests(void **state)
{
    struct ctl_numerics_report r;
    struct tow_buf text;
    (void)state;
    make_report(&r);
    tow_buf_init(&text, 0);
    ctl_numerics_markdown(&r, "some/model", &text);
    has(&text, "# Numerics audit of `some/model`\n");
    has(&text,
        "| `index.fp4.selection` | 0.5 | >= 0.75 | **FAIL** | keys find what they should |\n");
    has(&text, "| `topk.exact` | wrong entries | 4096 entries |\n");
    has(&text, "`0123456789abcdef` `000000000000000f`\n");
    tow_buf_fini(&text);
}

static int status_of(const char *a, const char *b)
{
    char *argv[] = {"numerics", "--model", (char *)(uintptr_t)a, (char *)(uintptr_t)b, NULL};
    return ctl_numerics_main(4, argv);
}

static void test_ctl_numerics__what_cannot_be_audited_exits_2(void **state)
{
    static const char native[] = "tests/golden/data/native/checkpoint";
    char *none[] = {"numerics", NULL};
    (void)state;
    assert_int_equal(ctl_numerics_main(1, none), 2);
    assert_int_equal(status_of("tests/no-such-folder", "--tokens=300"), 2);
    assert_int_equal(status_of(native, "--tokens=10"), 2);
    assert_int_equal(status_of(native, "--device=abacus"), 2);
    assert_int_equal(status_of(native, "--help"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ctl_numerics__the_table_names_what_failed_and_why),
        cmocka_unit_test(test_ctl_numerics__json_holds_every_row),
        cmocka_unit_test(test_ctl_numerics__the_page_has_rows_details_and_digests),
        cmocka_unit_test(test_ctl_numerics__what_cannot_be_audited_exits_2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
