/* Tests of base/log.c: a log that nobody reads. */
#include "tests/support/check.h"

#include "common/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whatever is in the pipe, as text. */
static size_t drain(int fd, char *to, size_t cap)
{
    size_t n = 0;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    for (ssize_t k; n < cap - 1 && (k = read(fd, to + n, cap - 1 - n)) > 0;) n += (size_t)k;
    to[n] = 0;
    return n;
}

/* The test hangs, and its alarm ends it, when a line waits for a reader. */
static void lines_lost(enum tow_log_format format, const char *says)
{
    int ends[2], real = dup(STDERR_FILENO);
    size_t cap = 2 << 20;
    char *text = malloc(cap);
    assert_non_null(text);
    assert_int_equal(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    alarm(test_limit_ms(60000) / 1000);
    tow_log_init("test", TOW_LOG_INFO, format);
    fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK);
    while (write(STDERR_FILENO, "x", 1) == 1 || errno == EINTR) {
    }
    fcntl(STDERR_FILENO, F_SETFL, 0);
    for (int i = 0; i < 3; i++) tow_info("nobody reads this");
    drain(ends[0], text, cap);
    char *found = strstr(text, "nobody");
    tow_info("heard");
    drain(ends[0], text, cap);
    dup2(real, STDERR_FILENO);
    alarm(0);
    close(real);
    close(ends[0]);
    assert_null(found);
    assert_non_null(strstr(text, says));
    free(text);
}

static void test_log__full_pipe_loses_lines_and_says_so(void **state)
{
    (void)state;
    lines_lost(TOW_LOG_TEXT, "info test: heard (3 lines lost)\n");
    lines_lost(TOW_LOG_JSON, "\"msg\":\"heard\",\"lost_lines\":3}\n");
}

static void test_log__longest_line_ends_as_every_line(void **state)
{
    (void)state;
    int ends[2], real = dup(STDERR_FILENO);
    char text[8192], in[3000];
    memset(in, '\\', sizeof in - 1);
    in[sizeof in - 1] = 0;
    assert_int_equal(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    tow_log_init("test", TOW_LOG_INFO, TOW_LOG_JSON);
    tow_info("%s", in);
    size_t n = drain(ends[0], text, sizeof text);
    dup2(real, STDERR_FILENO);
    close(real);
    close(ends[0]);
    assert_true(n > 1000 && n < 2048);
    assert_string_equal(text + n - 3, "\"}\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log__full_pipe_loses_lines_and_says_so),
        cmocka_unit_test(test_log__longest_line_ends_as_every_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
