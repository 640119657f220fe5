/* Tests of common/base/buf.h and err.h. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"

#include <stdlib.h>
#include <string.h>

static void test_tow_buf__append_past_the_cap_fails_and_stays_failed(void **state)
{
    (void)state;
    struct tow_buf b;
    tow_buf_init(&b, 8);
    tow_buf_puts(&b, "12345678");
    assert_false(tow_buf_failed(&b));
    tow_buf_putc(&b, '9');
    assert_true(tow_buf_failed(&b));
    assert_string_equal(b.data, "12345678");
    tow_buf_puts(&b, "");
    assert_true(tow_buf_failed(&b));
    assert_null(tow_buf_take(&b));
    tow_buf_clear(&b);
    tow_buf_printf(&b, "%d-%s", 42, "ab");
    assert_string_equal(b.data, "42-ab");
    tow_buf_shift(&b, 3);
    assert_string_equal(b.data, "ab");
    tow_buf_fini(&b);
}

static void test_tow_copy__nothing_is_no_failure(void **state)
{
    (void)state;
    bool ok = true;
    assert_null(tow_copy("abc", 0, &ok));
    char *p = tow_copy("abc", 4, &ok);
    assert_string_equal(p, "abc");
    free(p);
    assert_true(ok);
}

static void test_tow_grow__keeps_the_items_and_doubles(void **state)
{
    (void)state;
    uint32_t cap = 0, full = UINT32_MAX / 2 + 1;
    uint64_t *items = NULL;
    for (uint32_t n = 0; n < 100; n++) {
        items = tow_grow(items, n, &cap, 3, sizeof *items);
        assert_non_null(items);
        items[n] = n;
        assert_int_equal(cap, n < 3    ? 3
                              : n < 6  ? 6
                              : n < 12 ? 12
                              : n < 24 ? 24
                              : n < 48 ? 48
                              : n < 96 ? 96
                                       : 192);
    }
    for (uint32_t n = 0; n < 100; n++) assert_int_equal(items[n], n);
    assert_null(tow_grow(items, full, &full, 3, sizeof *items)); /* would not be counted any more */
    free(items);
}

static void test_tow_err__note_goes_before_the_message(void **state)
{
    (void)state;
    struct tow_err e;
    assert_int_equal(tow_fail(&e, TOW_EFULL, "pool: %d pages", 3), TOW_EFULL);
    tow_note(&e, "seq %d", 9);
    assert_string_equal(e.msg, "seq 9: pool: 3 pages");
    assert_int_equal(e.code, TOW_EFULL);
    assert_int_equal(tow_err_http(TOW_EFULL), 429);
    assert_string_equal(tow_err_name(TOW_EFULL), "EFULL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tow_buf__append_past_the_cap_fails_and_stays_failed),
        cmocka_unit_test(test_tow_copy__nothing_is_no_failure),
        cmocka_unit_test(test_tow_grow__keeps_the_items_and_doubles),
        cmocka_unit_test(test_tow_err__note_goes_before_the_message),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
