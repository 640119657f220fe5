/* Tests of deploy/ctl/flags.h: whether a file can be written is known before the work, and asking
 * leaves nothing behind. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "deploy/ctl/flags.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "/tmp/ctl_flags_XXXXXX";

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return rmdir(dir);
}

static const char *in_dir(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void test_ctl_flags__a_file_that_can_be_written_is_left_as_it_was(void **state)
{
    struct tow_err err = {0};
    struct stat st;
    char text[8] = "";
    (void)state;
    assert_int_equal(ctl_out_check("--out", NULL, &err), 0);
    const char *path = in_dir("new");
    assert_int_equal(ctl_out_check("--out", path, &err), 0);
    assert_int_equal(stat(path, &st), -1);
    assert_int_equal(errno, ENOENT);

    path = in_dir("old");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs("kept", f) >= 0 && fclose(f) == 0);
    assert_int_equal(ctl_out_check("--out", path, &err), 0);
    f = fopen(path, "r");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof text, f));
    fclose(f);
    assert_string_equal(text, "kept");
    unlink(path);

    path = in_dir("pipe"); /* nobody reads it; opening would wait */
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(ctl_out_check("--out", path, &err), 0);
    unlink(path);
}

static void test_ctl_flags__one_that_cannot_is_named_with_its_flag(void **state)
{
    static const char *const names[] = {"no/such", "."};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct tow_err err = {0};
        char want[160];
        const char *path = in_dir(names[i]);
        snprintf(want, sizeof want, "--report %s: %s", path, strerror(i ? EISDIR : ENOENT));
        assert_int_equal(ctl_out_check("--report", path, &err), TOW_EIO);
        assert_string_equal(err.msg, want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ctl_flags__a_file_that_can_be_written_is_left_as_it_was),
        cmocka_unit_test(test_ctl_flags__one_that_cannot_is_named_with_its_flag),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
