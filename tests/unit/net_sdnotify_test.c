/* Tests of common/net/sdnotify.h: what arrives on the socket that systemd would give us. */
#include "tests/support/check.h"

#include "common/net/sdnotify.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void test_net_sd__without_a_socket_nothing_happens(void **state)
{
    (void)state;
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    net_sd_ready("up");
    net_sd_watchdog();
    assert_int_equal(net_sd_watchdog_ms(), 0);
}

#ifdef TOW_HAVE_SYSTEMD

static int fd;
static char path[108];

static void expect(const char *want)
{
    char got[1000];
    ssize_t n = recv(fd, got, sizeof got - 1, 0); /* sent before, by this thread */
    assert_true(n >= 0);
    got[n] = 0;
    assert_string_equal(got, want);
}

static void test_net_sd__messages_have_systemds_form(void **state)
{
    (void)state;
    net_sd_ready("serving, 1 prefill");
    expect("READY=1\nSTATUS=serving, 1 prefill");
    net_sd_status("busy\nMAINPID=1");
    expect("STATUS=busy");
    net_sd_stopping("draining 3");
    expect("STOPPING=1\nSTATUS=draining 3");
    net_sd_watchdog();
    expect("WATCHDOG=1");
}

static void test_net_sd__watchdog_is_fed_twice_per_interval(void **state)
{
    (void)state;
    char pid[20];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    setenv("WATCHDOG_PID", pid, 1);
    setenv("WATCHDOG_USEC", "30000000", 1);
    assert_int_equal(net_sd_watchdog_ms(), 15000);
    setenv("WATCHDOG_PID", "1", 1); /* meant for another process */
    assert_int_equal(net_sd_watchdog_ms(), 0);
}

static int open_socket(void **state)
{
    (void)state;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(path, sizeof path, "/tmp/towpath-notify-%d", (int)getpid());
    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    fd = socket(AF_UNIX, SOCK_DGRAM, 0);
    setenv("NOTIFY_SOCKET", path, 1);
    return fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) < 0;
}

static int close_socket(void **state)
{
    (void)state;
    close(fd);
    return unlink(path);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_net_sd__without_a_socket_nothing_happens),
#ifdef TOW_HAVE_SYSTEMD
        cmocka_unit_test_setup_teardown(test_net_sd__messages_have_systemds_form, open_socket,
                                        close_socket),
        cmocka_unit_test(test_net_sd__watchdog_is_fed_twice_per_interval),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
