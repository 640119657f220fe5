/* tests/support/check.h - cmocka with the headers it needs before it, and limits that stretch. */
#ifndef TESTS_SUPPORT_CHECK_H
#define TESTS_SUPPORT_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h needs the four above first. */
#include <cmocka.h>
#include <fnmatch.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Every limit that guards against hanging, and every lease or heartbeat that must not run out by
 * itself, goes through this: TOW_TEST_SLACK stretches them on a slow or busy machine, as in
 * tests/cluster/harness.py. */
static inline uint32_t test_limit_ms(uint32_t ms)
{
    const char *s = getenv("TOW_TEST_SLACK");
    if (!s || !*s) return ms;
    char *end;
    const double slack = strtod(s, &end);
    const bool plain = s[strspn(s, "0123456789.")] == 0;
    if (plain && !*end && slack >= 1 && slack <= 1000) return (uint32_t)(ms * slack);
    printf("TOW_TEST_SLACK \"%s\": must be a number, 1 to 1000\n", s);
    exit(2);
}

/* An argument of a test program: only tests of that name, which may have '*' and '?'. --list prints
 * the names and ends the program with 0, a name that no test has with 2. */
static inline void test_choose(int argc, char **argv, const struct CMUnitTest *tests, size_t n)
{
    const char *name = argc > 1 ? argv[1] : "*";
    const int list = strcmp(name, "--list") == 0;
    size_t n_of = 0;
    for (size_t i = 0; i < n; i++) {
        n_of += list || fnmatch(name, tests[i].name, FNM_NOESCAPE) == 0;
        if (list) puts(tests[i].name);
    }
    if (list) exit(0);
    if (n_of == 0) {
        printf("no test is named '%s'; --list prints the names\n", name);
        exit(2);
    }
    if (argc > 1) cmocka_set_test_filter(name);
}
#define TEST_CHOOSE(argc, argv, tests)                                                             \
    test_choose(argc, argv, tests, sizeof(tests) / sizeof *(tests))

/* The device that whole-model tests run on: TOW_TEST_DEVICE, else the CPU. */
static inline const char *test_device(void)
{
    const char *d = getenv("TOW_TEST_DEVICE");
    return d && *d ? d : "cpu";
}
/* The same for tests of a CUDA device. */
static inline const char *test_cuda_device(void)
{
    const char *d = getenv("TOW_TEST_DEVICE");
    return d && *d ? d : "cuda:0";
}

#endif
