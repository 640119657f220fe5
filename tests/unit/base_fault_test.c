/* Tests of common/base/fault.h, and the torture idiom on a small example. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/fault.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int setup(void **state)
{
    (void)state;
    tow_fault_reset();
    return 0;
}

static void test_tow_fault__off_never_fails_and_counts_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < 10; i++) assert_false(tow_fault("test.a"));
    assert_int_equal(tow_fault_passes("test.a"), 0);
}

static void test_tow_fault__watch_counts_each_place(void **state)
{
    (void)state;
    tow_fault_watch();
    for (int i = 0; i < 3; i++) assert_false(tow_fault("test.a"));
    assert_false(tow_fault("test.b"));
    assert_int_equal(tow_fault_passes("test.a"), 3);
    assert_int_equal(tow_fault_passes("*"), 4);
    assert_int_equal(tow_fault_passes("test.c"), 0);
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_fault_print(&b);
    assert_string_equal(b.data, "test.a 3\ntest.b 1\n");
    tow_buf_fini(&b);
}

static void test_tow_fault__the_nth_pass_of_the_named_place_fails_once(void **state)
{
    (void)state;
    assert_int_equal(tow_fault_arm("test.a", 2, false, TOW_FAULT_FAIL, NULL), 0);
    assert_false(tow_fault("test.a"));
    assert_false(tow_fault("test.b"));
    assert_false(tow_fault("test.b"));
    assert_true(tow_fault("test.a"));
    assert_false(tow_fault("test.a"));
    assert_int_equal(tow_fault_fired(), 1);
}

static void test_tow_fault__text_arms_several_and_always(void **state)
{
    (void)state;
    assert_int_equal(tow_fault_arm_text("test.a=2+,test.b=1:fail", NULL), 0);
    assert_false(tow_fault("test.a"));
    assert_true(tow_fault("test.a"));
    assert_true(tow_fault("test.a"));
    assert_true(tow_fault("test.b"));
    assert_false(tow_fault("test.b"));
}

static void test_tow_fault__text_that_is_wrong_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"",
                                      "a",
                                      "a=",
                                      "a=0",
                                      "=1",
                                      "a=x",
                                      "a=1:burn",
                                      "a=1x",
                                      "a=1,",
                                      "a=-1",
                                      "a=+",
                                      "a=1:",
                                      "a=1+:kil",
                                      "a=1:fail+",
                                      ",a=1",
                                      "a=99999999999999999999999",
                                      "123456789012345678901234567890123456789012345678=1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct tow_err err = {0};
        if (tow_fault_arm_text(bad[i], &err) != TOW_EINVAL) fail_msg("accepted: '%s'", bad[i]);
        assert_non_null(strstr(err.msg, "fault"));
    }
    tow_fault_reset();
    for (int i = 0; i < 16; i++) assert_int_equal(tow_fault_arm_text("a=1", NULL), 0);
    assert_int_equal(tow_fault_arm_text("a=1", NULL), TOW_EFULL);
}

static void test_tow_fault__kill_ends_the_process_at_that_place(void **state)
{
    (void)state;
    assert_int_equal(tow_fault_arm_text("test.a=2:kill", NULL), 0);
    pid_t pid = fork();
    if (pid == 0) {
        if (tow_fault("test.a")) _exit(1);
        tow_fault("test.a");
        _exit(2);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* An example with three steps, each undone when a later one fails. */
static int held;

static int step(const char *name)
{
    if (tow_fault_hit(name)) return TOW_EIO;
    held++;
    return 0;
}

static int three_steps(void)
{
    int rc = step("test.one");
    if (rc < 0) return rc;
    rc = step("test.two");
    if (rc < 0) goto undo_one;
    rc = step("test.three");
    if (rc < 0) goto undo_two;
    held = 0;
    return 0;

undo_two:
    held--;
undo_one:
    held--;
    return rc;
}

static void test_tow_fault__torture_visits_every_place_once(void **state)
{
    (void)state;
    unsigned n = 1;
    for (;; n++) {
        tow_fault_reset();
        assert_int_equal(tow_fault_arm("*", n, false, TOW_FAULT_FAIL, NULL), 0);
        int rc = three_steps();
        assert_int_equal(held, 0);
        if (tow_fault_fired() == 0) {
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, TOW_EIO);
    }
    assert_int_equal(n, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_tow_fault__off_never_fails_and_counts_nothing, setup),
        cmocka_unit_test_setup(test_tow_fault__watch_counts_each_place, setup),
        cmocka_unit_test_setup(test_tow_fault__the_nth_pass_of_the_named_place_fails_once, setup),
        cmocka_unit_test_setup(test_tow_fault__text_arms_several_and_always, setup),
        cmocka_unit_test_setup(test_tow_fault__text_that_is_wrong_is_refused, setup),
        cmocka_unit_test_setup(test_tow_fault__kill_ends_the_process_at_that_place, setup),
        cmocka_unit_test_setup(test_tow_fault__torture_visits_every_place_once, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
