/* Tests of common/text/identity.h. */
#include "tests/support/check.h"

#include "common/text/identity.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    assert_int_equal(fclose(f), 0);
}

static void test_identity__numbers_and_the_tokenizer_where_it_is(void **state)
{
    (void)state;
    static const struct text_config c = {.vocab_size = 1000, .n_layers = 7, .hidden_size = 256};
    char dir[] = "/tmp/towpath-identity-XXXXXX", path[64];
    struct text_identity a, b;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    text_identity_read(&a, dir, &c);
    assert_int_equal(a.n, 3);
    const char *const want[][2] = {
        {"model.vocab_size", "1000"}, {"model.n_layers", "7"}, {"model.dim", "256"}};
    for (uint32_t i = 0; i < 3; i++) {
        assert_string_equal(a.items[i].field, want[i][0]);
        assert_string_equal(a.items[i].value, want[i][1]);
    }
    assert_int_equal(mkfifo(path, 0600), 0); /* no file, and not waited for */
    text_identity_read(&a, dir, &c);
    assert_int_equal(a.n, 3);
    unlink(path);
    write_file(path, "one");
    text_identity_read(&a, dir, &c);
    assert_int_equal(a.n, 4);
    assert_string_equal(a.items[3].field, "model.tokenizer");
    assert_int_equal(strlen(a.items[3].value), 16);
    text_identity_read(&b, dir, &c);
    assert_string_equal(b.items[3].value, a.items[3].value);
    write_file(path, "two");
    text_identity_read(&b, dir, &c);
    assert_string_not_equal(b.items[3].value, a.items[3].value);
    unlink(path);
    rmdir(dir);
}

static void test_identity__name_is_the_last_part_of_the_path(void **state)
{
    (void)state;
    char out[8];
    assert_string_equal(text_folder_name("/a/b", out, sizeof out), "b");
    assert_string_equal(text_folder_name("/a/b//", out, sizeof out), "b");
    assert_string_equal(text_folder_name("b", out, sizeof out), "b");
    assert_string_equal(text_folder_name("", out, sizeof out), "");
    assert_string_equal(text_folder_name("/a/longer-than-that", out, sizeof out), "longer-");
    assert_string_equal(text_folder_name("/a/b\tc\n\x7f", out, sizeof out), "b?c??");
    assert_string_equal(text_folder_name("/a/b\xff", out, sizeof out), "b?");
    assert_string_equal(text_folder_name("/a/longe\xc3\xa9r", out, sizeof out), "longe\xc3\xa9");
    assert_string_equal(text_folder_name("/a/longer\xc3\xa9", out, sizeof out), "longer");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_identity__numbers_and_the_tokenizer_where_it_is),
        cmocka_unit_test(test_identity__name_is_the_last_part_of_the_path),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
