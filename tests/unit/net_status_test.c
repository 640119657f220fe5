/* The status server against raw sockets. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/net/loop.h"
#include "common/net/status.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int ready_status;

static int health(void *arg, struct tow_buf *out)
{
    (void)arg;
    tow_buf_puts(out, "alive\n");
    return 200;
}

static int ready(void *arg, struct tow_buf *out)
{
    (void)arg;
    tow_buf_puts(out, ready_status == 200 ? "serving\n" : "starting\n");
    return ready_status;
}

static void metrics(void *arg, struct tow_buf *out)
{
    (void)arg;
    tow_buf_puts(out, "towpath_up 1\n");
}

static const struct net_status_hooks hooks = {health, ready, metrics, NULL};

struct world {
    struct net_loop *loop;
    struct net_status *status;
};

static void open_world(struct world *w)
{
    struct tow_err err = {0};
    assert_int_equal(net_loop_open(&w->loop, &err), 0);
    assert_int_equal(net_status_open(&w->status, w->loop, "127.0.0.1:0", &hooks, &err), 0);
    ready_status = 200;
}

static void close_world(struct world *w)
{
    net_status_close(w->status);
    net_loop_free(w->loop);
}

static int connect_to(const struct world *w)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons(net_status_port(w->status)),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* Sends a request in pieces of `step` bytes and gives the whole answer. */
static const char *ask(struct world *w, const char *request, size_t step)
{
    static char answer[16384];
    size_t have = 0, n = strlen(request);
    int fd = connect_to(w);
    for (size_t at = 0; at < n; at += step) {
        send(fd, request + at, n - at < step ? n - at : step, MSG_NOSIGNAL);
        net_loop_turn(w->loop, 0);
    }
    uint64_t until = tow_now_ms() + test_limit_ms(60000);
    for (;;) {
        assert_true(tow_now_ms() < until);
        net_loop_turn(w->loop, 0);
        ssize_t k = recv(fd, answer + have, sizeof answer - 1 - have, MSG_DONTWAIT);
        if (k == 0) break;
        if (k > 0) have += (size_t)k;
    }
    close(fd);
    answer[have] = '\0';
    return answer;
}

static void expect_answer(struct world *w, const char *request, const char *status,
                          const char *part)
{
    const char *a = ask(w, request, 1000);
    if (strncmp(a + 9, status, 3) != 0) fail_msg("%s answered with %s", request, a);
    if (!strstr(a, part)) fail_msg("%s lacks %s", a, part);
}

static void test_net_status__three_paths_answer(void **state)
{
    (void)state;
    struct world w;
    open_world(&w);
    expect_answer(&w, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n", "200", "\r\n\r\nalive\n");
    expect_answer(&w, "GET /ready?full=1 HTTP/1.0\r\n\r\n", "200", "serving");
    ready_status = 503;
    expect_answer(&w, "GET /ready HTTP/1.1\r\nHost: x\r\n\r\n", "503", "starting");
    expect_answer(&w, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "200", "towpath_up 1");
    expect_answer(&w, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "200", "version=0.0.4");
    const char *a = ask(&w, "HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n", 1);
    assert_non_null(strstr(a, "Content-Length: 6\r\n"));
    assert_null(strstr(a, "alive"));
    close_world(&w);
}

static void test_net_status__other_requests_are_refused(void **state)
{
    (void)state;
    struct world w;
    char big[5000];
    open_world(&w);
    expect_answer(&w, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "404", "/metrics");
    expect_answer(&w, "POST /health HTTP/1.1\r\nHost: x\r\n\r\n", "405", "Allow: GET, HEAD\r\n");
    expect_answer(&w, "GET /health\r\n\r\n", "400", "malformed");
    expect_answer(&w, "GET /health HTTP/2.0\r\n\r\n", "400", "malformed");
    expect_answer(&w, "GET /health HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", "400", "malformed");
    expect_answer(&w, "GET /health HTTP/1.1\r\nContent-Length: 5\r\n\r\n", "400", "malformed");
    expect_answer(&w, "GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "400",
                  "malformed");
    memset(big, 'a', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    memcpy(big, "GET /", 5);
    expect_answer(&w, big, "431", "4096");
    close_world(&w);
}

static void test_net_status__half_open_connections_do_not_hold_the_loop(void **state)
{
    (void)state;
    struct world w;
    int fds[70];
    open_world(&w);
    for (int i = 0; i < 70; i++) {
        fds[i] = connect_to(&w);
        net_loop_turn(w.loop, 0);
    }
    /* 64 are let in, the others are closed at once. */
    unsigned closed = 0;
    uint64_t until = tow_now_ms() + test_limit_ms(60000);
    while (closed < 6 && tow_now_ms() < until) {
        net_loop_turn(w.loop, 0);
        closed = 0;
        for (int i = 0; i < 70; i++) {
            char c;
            closed += recv(fds[i], &c, 1, MSG_DONTWAIT | MSG_PEEK) == 0;
        }
    }
    assert_int_equal(closed, 6);
    close_world(&w);
    for (int i = 0; i < 70; i++) close(fds[i]);
}

static void test_net_status__bad_or_taken_address_names_the_setting(void **state)
{
    (void)state;
    static const char *const bad[] = {"127.0.0.1", "x:1",      "127.0.0.1:70000", "127.0.0.1:1x",
                                      "::1:80",    "1.2.3:80", "127.0.0.1:",      ""};
    struct world w;
    struct tow_err err = {0};
    struct net_status *s = NULL;
    char taken[32];
    open_world(&w);
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(net_status_open(&s, w.loop, bad[i], &hooks, &err), TOW_ECONFIG);
        assert_non_null(strstr(err.msg, "--status"));
    }
    snprintf(taken, sizeof taken, "127.0.0.1:%u", net_status_port(w.status));
    assert_int_equal(net_status_open(&s, w.loop, taken, &hooks, &err), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, taken));
    assert_int_equal(net_status_open(&s, w.loop, "[::1]:0", &hooks, &err), 0);
    net_status_close(s);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_net_status__three_paths_answer),
        cmocka_unit_test(test_net_status__other_requests_are_refused),
        cmocka_unit_test(test_net_status__half_open_connections_do_not_hold_the_loop),
        cmocka_unit_test(test_net_status__bad_or_taken_address_names_the_setting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
