/* Tests of common/net/files.h, each in a child: a hard limit that was lowered stays so. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/net/files.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* The soft limit after a check for `needed`, 0 when it was refused with both numbers and the
 * why. */
static int checked(int soft, int hard, int needed)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit r = {(rlim_t)soft, (rlim_t)hard};
        struct tow_err err = {0};
        char both[2][16];
        if (setrlimit(RLIMIT_NOFILE, &r) < 0) _exit(255);
        snprintf(both[0], sizeof both[0], "%d needed", needed);
        snprintf(both[1], sizeof both[1], "is %d:", hard);
        if (net_files_check((uint64_t)needed, "as many as it takes", &err) < 0)
            _exit(err.code == TOW_ECONFIG && strstr(err.msg, both[0]) && strstr(err.msg, both[1]) &&
                          strstr(err.msg, "as many as it takes")
                      ? 0
                      : 254);
        if (getrlimit(RLIMIT_NOFILE, &r) < 0) _exit(255);
        _exit((int)r.rlim_cur);
    }
    int status = -1;
    assert_true(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_net_files__a_soft_limit_is_raised_only_when_too_low(void **state)
{
    (void)state;
    assert_int_equal(checked(40, 100, 40), 40);
    assert_int_equal(checked(40, 100, 41), 100);
    assert_int_equal(checked(40, 100, 100), 100);
}

static void test_net_files__a_hard_limit_that_is_too_low_is_told(void **state)
{
    (void)state;
    assert_int_equal(checked(40, 100, 101), 0);
    assert_int_equal(checked(100, 100, 250), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_net_files__a_soft_limit_is_raised_only_when_too_low),
        cmocka_unit_test(test_net_files__a_hard_limit_that_is_too_low_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
