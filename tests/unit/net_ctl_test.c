/* Control channel: frames over both URLs, once-only close, caps, overflow, reconnect. */
#include "tests/support/check.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/net/ctl.h"
#include "common/net/loop.h"
#include "proto/messages.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/socket.h>
#include <unistd.h>

struct side {
    struct net_ctl *c; /* the latest; NULL when closed */
    unsigned opens, frames, closes, retries;
    int code;
    char why[128];
    uint16_t type;
    uint32_t bytes;
    uint64_t sum;
    bool echo, close_in_frame;
};

static void on_open(void *arg, struct net_ctl *c)
{
    struct side *s = arg;
    s->c = c;
    s->opens++;
}

static void on_frame(void *arg, struct net_ctl *c, uint16_t type, const void *body, uint32_t bytes)
{
    struct side *s = arg;
    s->frames++;
    s->type = type;
    s->bytes = bytes;
    for (uint32_t i = 0; i < bytes; i++) s->sum += ((const uint8_t *)body)[i];
    if (s->echo) assert_int_equal(net_ctl_send(c, type, body, bytes), 0);
    if (s->close_in_frame) net_ctl_close(c, TOW_EWIRE, "had enough");
}

static void on_close(void *arg, struct net_ctl *c, int code, const char *why)
{
    struct side *s = arg;
    s->closes++;
    s->code = code;
    snprintf(s->why, sizeof s->why, "%s", why);
    if (s->c == c) s->c = NULL;
}

static void on_retry(void *arg, const char *url, const char *why, uint64_t retry_ms)
{
    struct side *s = arg;
    (void)url, (void)why;
    assert_true(retry_ms <= 5000);
    s->retries++;
}

static const struct net_ctl_hooks hooks = {on_open, on_frame, on_close, on_retry};

/* Turns the loop until *what reaches n; a watchdog ends a test that hangs. */
static void turn_until(struct net_loop *loop, const unsigned *what, unsigned n)
{
    uint64_t until = tow_now_ms() + test_limit_ms(60000);
    while (*what < n && tow_now_ms() < until) net_loop_turn(loop, 1);
    assert_true(*what >= n);
}

static const struct net_ctl_config quick = {.retry_min_ms = 10, .retry_max_ms = 50};

struct pair {
    struct net_loop *loop;
    struct net_ctl_server *server;
    struct net_ctl_dialer *dialer;
    struct side s, d;
};

static void pair_open(struct pair *p, const char *url, const struct net_ctl_config *cfg)
{
    struct tow_err err = {0};
    memset(p, 0, sizeof *p);
    assert_int_equal(net_loop_open(&p->loop, &err), 0);
    if (net_ctl_listen(&p->server, p->loop, url, cfg, &hooks, &p->s, &err) < 0)
        fail_msg("%s", err.msg);
    assert_int_equal(
        net_ctl_dial(&p->dialer, p->loop, net_ctl_server_url(p->server), cfg, &hooks, &p->d, &err),
        0);
    turn_until(p->loop, &p->s.opens, 1);
    turn_until(p->loop, &p->d.opens, 1);
}

static void pair_close(struct pair *p)
{
    net_ctl_dialer_close(p->dialer);
    net_ctl_server_close(p->server);
    net_loop_free(p->loop);
    assert_int_equal(p->s.opens, p->s.closes);
    assert_int_equal(p->d.opens, p->d.closes);
}

static void echo_over(const char *url)
{
    struct pair p;
    pair_open(&p, url, &quick);
    p.s.echo = true;
    enum { BIG = 1 << 20 };
    uint8_t *big = malloc(BIG);
    uint64_t sum = 0;
    for (int i = 0; i < BIG; i++) sum += big[i] = (uint8_t)(i * 7);
    assert_int_equal(net_ctl_send(p.d.c, WIRE_PING_MSG, "12345678", 8), 0);
    turn_until(p.loop, &p.d.frames, 1);
    assert_int_equal(p.d.type, WIRE_PING_MSG);
    assert_int_equal(p.d.bytes, 8);
    assert_int_equal(net_ctl_send(p.d.c, WIRE_BYE_MSG, NULL, 0), 0);
    turn_until(p.loop, &p.d.frames, 2);
    assert_int_equal(p.d.bytes, 0);
    p.d.sum = 0;
    for (int i = 0; i < 8; i++)
        assert_int_equal(net_ctl_send(p.d.c, WIRE_PREFILL_MSG, big, BIG), 0);
    turn_until(p.loop, &p.d.frames, 10);
    assert_int_equal(p.d.sum, sum * 8);
    assert_int_equal(net_ctl_unsent(p.d.c), 0);
    free(big);
    pair_close(&p);
}

static void test_net_ctl__frames_cross_tcp_whole_and_in_order(void **state)
{
    (void)state;
    echo_over("tcp://127.0.0.1:0");
}

static void test_net_ctl__frames_cross_ipc_whole_and_in_order(void **state)
{
    (void)state;
    char url[64];
    snprintf(url, sizeof url, "ipc:///tmp/tow-ctl-%d.sock", (int)getpid());
    echo_over(url);
}

/* The library under it would delete the file to make room for its socket. */
static void test_net_ctl__a_file_in_the_place_of_the_socket_stays(void **state)
{
    (void)state;
    char path[] = "/tmp/tow-ctl-file-XXXXXX", url[64];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "mine", 4), 4);
    close(fd);
    snprintf(url, sizeof url, "ipc://%s", path);
    struct net_loop *loop;
    struct net_ctl_server *server = NULL;
    struct tow_err err = {0};
    assert_int_equal(net_loop_open(&loop, &err), 0);
    assert_int_equal(net_ctl_listen(&server, loop, url, NULL, &hooks, NULL, &err), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "is no socket"));
    assert_null(server);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 4);
    unlink(path);
    net_loop_free(loop);
}

static void test_net_ctl__close_in_a_callback_is_told_once_and_later(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p, "tcp://127.0.0.1:0", &quick);
    p.s.close_in_frame = true;
    net_ctl_send(p.d.c, WIRE_PING_MSG, "12345678", 8);
    net_ctl_send(p.d.c, WIRE_PING_MSG, "12345678", 8);
    turn_until(p.loop, &p.s.closes, 1);
    assert_int_equal(p.s.code, TOW_EWIRE);
    assert_string_equal(p.s.why, "had enough");
    turn_until(p.loop, &p.d.closes, 1);
    assert_int_equal(p.d.code, TOW_EPEER);
    /* The dialer comes back by itself. */
    turn_until(p.loop, &p.d.opens, 2);
    pair_close(&p);
    assert_int_equal(p.s.frames, 1);
}

static void test_net_ctl__finish_sends_what_is_queued(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p, "tcp://127.0.0.1:0", &quick);
    struct wire_msg m = {.type = WIRE_BYE_MSG, .bye = {.note = wire_text("going")}};
    for (int i = 0; i < 20; i++) assert_int_equal(net_ctl_send_msg(p.s.c, &m), 0);
    net_ctl_finish(p.s.c);
    assert_int_equal(net_ctl_send_msg(p.s.c, &m), TOW_EPEER);
    turn_until(p.loop, &p.d.closes, 1);
    assert_int_equal(p.d.frames, 20);
    assert_int_equal(p.s.code, 0);
    pair_close(&p);
}

static int raw_connect(const struct net_ctl_server *s)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    a.sin_port = htons((uint16_t)atoi(strrchr(net_ctl_server_url(s), ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* Raw bytes in, the server's verdict out. */
static void refuses(const void *bytes, size_t n, const struct net_ctl_config *cfg, int code)
{
    struct pair p;
    pair_open(&p, "tcp://127.0.0.1:0", cfg);
    int fd = raw_connect(p.server);
    assert_int_equal(write(fd, bytes, n), (ssize_t)n);
    turn_until(p.loop, &p.s.closes, 1);
    assert_int_equal(p.s.code, code);
    assert_int_equal(p.s.frames, 0);
    assert_int_equal(p.d.closes, 0); /* others are not disturbed */
    close(fd);
    pair_close(&p);
}

static void test_net_ctl__foreign_bytes_close_the_connection(void **state)
{
    (void)state;
    refuses("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27, &quick, TOW_EWIRE);
}

static void test_net_ctl__body_above_its_cap_is_refused_from_the_header(void **state)
{
    (void)state;
    struct wire_header h = {.body_bytes = 1u << 20, .type = WIRE_PING_MSG, .version = WIRE_VERSION};
    uint8_t bytes[WIRE_HEADER_BYTES];
    wire_header_pack(&h, bytes);
    refuses(bytes, sizeof bytes, &quick, TOW_EWIRE);
}

static void test_net_ctl__frame_that_drips_is_given_up(void **state)
{
    (void)state;
    struct net_ctl_config cfg = quick;
    cfg.frame_ms = 100;
    struct wire_header h = {.body_bytes = 8, .type = WIRE_PING_MSG, .version = WIRE_VERSION};
    uint8_t bytes[WIRE_HEADER_BYTES];
    wire_header_pack(&h, bytes);
    refuses(bytes, sizeof bytes, &cfg, TOW_ETIME);
}

static void test_net_ctl__unknown_type_is_skipped_and_answered(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p, "tcp://127.0.0.1:0", &quick);
    int fd = raw_connect(p.server);
    struct wire_header h = {.body_bytes = 5, .type = 999, .version = WIRE_VERSION};
    uint8_t bytes[2 * WIRE_HEADER_BYTES + 5] = {0};
    wire_header_pack(&h, bytes);
    h = (struct wire_header){.body_bytes = 0, .type = WIRE_BYE_MSG, .version = WIRE_VERSION};
    wire_header_pack(&h, bytes + WIRE_HEADER_BYTES + 5);
    assert_int_equal(write(fd, bytes, sizeof bytes), (ssize_t)sizeof bytes);
    turn_until(p.loop, &p.s.frames, 1);
    assert_int_equal(p.s.type, WIRE_BYE_MSG);
    uint64_t until = tow_now_ms() + test_limit_ms(60000);
    ssize_t n = 0;
    while (n <= 0 && tow_now_ms() < until) {
        net_loop_turn(p.loop, 0);
        n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    }
    struct wire_msg m;
    assert_int_equal(wire_unpack_frame(&m, bytes, (size_t)n, NULL), 0);
    assert_int_equal(m.type, WIRE_UNKNOWN_MSG);
    assert_int_equal(m.unknown.type, 999);
    close(fd);
    pair_close(&p);
}

static void test_net_ctl__peer_that_does_not_read_is_closed(void **state)
{
    (void)state;
    struct net_ctl_config cfg = quick;
    cfg.send_bytes = 1 << 20;
    struct pair p;
    pair_open(&p, "tcp://127.0.0.1:0", &cfg);
    int fd = raw_connect(p.server);
    turn_until(p.loop, &p.s.opens, 2);
    struct net_ctl *c = p.s.c;
    uint8_t *body = calloc(1, 300000);
    int rc = 0;
    for (int i = 0; i < 1000 && rc == 0; i++) {
        rc = net_ctl_send(c, WIRE_PREFILL_MSG, body, 300000);
        net_loop_turn(p.loop, 0);
    }
    assert_int_equal(rc, TOW_EFULL);
    turn_until(p.loop, &p.s.closes, 1);
    assert_int_equal(p.s.code, TOW_EFULL);
    free(body);
    close(fd);
    pair_close(&p);
}

/* The other side would wait for a frame that was lost alone;
 * of a connection that ended it hears. */
static void test_net_ctl__frame_without_memory_ends_the_connection(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p, "tcp://127.0.0.1:0", &quick);
    turn_until(p.loop, &p.s.opens, 1);
    struct net_ctl *c = p.s.c;
    tow_fault_reset();
    assert_int_equal(tow_fault_arm("ctl.frame", 1, false, TOW_FAULT_FAIL, NULL), 0);
    assert_int_equal(net_ctl_send(c, WIRE_BYE_MSG, NULL, 0), TOW_ENOMEM);
    tow_fault_reset();
    assert_int_equal(net_ctl_send(c, WIRE_BYE_MSG, NULL, 0), TOW_EPEER);
    turn_until(p.loop, &p.s.closes, 1);
    assert_int_equal(p.s.code, TOW_ENOMEM);
    turn_until(p.loop, &p.d.closes, 1);
    pair_close(&p);
}

static void test_net_ctl__dialer_waits_for_the_server_and_survives_its_restart(void **state)
{
    (void)state;
    struct pair p;
    struct tow_err err = {0};
    pair_open(&p, "tcp://127.0.0.1:0", &quick);
    char url[128];
    snprintf(url, sizeof url, "%s", net_ctl_server_url(p.server));
    net_ctl_server_close(p.server);
    turn_until(p.loop, &p.d.closes, 1);
    turn_until(p.loop, &p.d.retries, 3);
    assert_int_equal(net_ctl_listen(&p.server, p.loop, url, &quick, &hooks, &p.s, &err), 0);
    turn_until(p.loop, &p.d.opens, 2);
    pair_close(&p);
}

/* The loopback address of one family under the name that both share. */
static void dials_localhost(const char *listen_url, int family)
{
    struct addrinfo *there = NULL, hints = {.ai_family = family, .ai_socktype = SOCK_STREAM};
    bool known = getaddrinfo("localhost", NULL, &hints, &there) == 0;
    if (known) freeaddrinfo(there);
    struct net_loop *loop;
    struct net_ctl_server *server;
    struct net_ctl_dialer *dialer;
    struct side s = {0}, d = {0};
    struct tow_err err = {0};
    assert_int_equal(net_loop_open(&loop, &err), 0);
    if (!known || net_ctl_listen(&server, loop, listen_url, &quick, &hooks, &s, &err) < 0) {
        print_message("no localhost of %s here: not tried\n", listen_url);
        net_loop_free(loop);
        return;
    }
    char url[128];
    snprintf(url, sizeof url, "tcp://localhost%s", strrchr(net_ctl_server_url(server), ':'));
    assert_int_equal(net_ctl_dial(&dialer, loop, url, &quick, &hooks, &d, &err), 0);
    turn_until(loop, &d.opens, 1);
    assert_int_equal(d.retries, 0); /* the other family is no failed attempt */
    net_ctl_server_close(server);
    turn_until(loop, &d.retries, 2); /* gone: told, and tried on */
    net_ctl_dialer_close(dialer);
    net_loop_free(loop);
    assert_int_equal(d.opens, d.closes);
}

static void test_net_ctl__name_is_dialled_in_both_families(void **state)
{
    (void)state;
    dials_localhost("tcp://127.0.0.1:0", AF_INET);
    dials_localhost("tcp://[::1]:0", AF_INET6);
}

static void test_net_ctl__port_in_use_names_the_url(void **state)
{
    (void)state;
    struct pair p;
    struct tow_err err = {0};
    pair_open(&p, "tcp://127.0.0.1:0", &quick);
    struct net_ctl_server *other = NULL;
    int rc =
        net_ctl_listen(&other, p.loop, net_ctl_server_url(p.server), &quick, &hooks, &p.s, &err);
    assert_int_equal(rc, TOW_ECONFIG);
    assert_non_null(strstr(err.msg, net_ctl_server_url(p.server)));
    assert_int_equal(net_ctl_listen(&other, p.loop, "udp://127.0.0.1:1", NULL, &hooks, &p.s, &err),
                     TOW_ECONFIG);
    pair_close(&p);
}

static void test_net_ctl__server_closes_what_is_above_its_limit(void **state)
{
    (void)state;
    struct net_ctl_config cfg = quick;
    cfg.max_connections = 1;
    struct pair p;
    pair_open(&p, "tcp://127.0.0.1:0", &cfg);
    int fd = raw_connect(p.server);
    uint64_t until = tow_now_ms() + test_limit_ms(60000);
    char byte;
    ssize_t n = -1;
    while (n != 0 && tow_now_ms() < until) {
        net_loop_turn(p.loop, 0);
        n = recv(fd, &byte, 1, MSG_DONTWAIT);
    }
    assert_int_equal(n, 0);
    assert_int_equal(p.s.opens, 1);
    close(fd);
    pair_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_net_ctl__frames_cross_tcp_whole_and_in_order),
        cmocka_unit_test(test_net_ctl__frames_cross_ipc_whole_and_in_order),
        cmocka_unit_test(test_net_ctl__a_file_in_the_place_of_the_socket_stays),
        cmocka_unit_test(test_net_ctl__close_in_a_callback_is_told_once_and_later),
        cmocka_unit_test(test_net_ctl__finish_sends_what_is_queued),
        cmocka_unit_test(test_net_ctl__foreign_bytes_close_the_connection),
        cmocka_unit_test(test_net_ctl__body_above_its_cap_is_refused_from_the_header),
        cmocka_unit_test(test_net_ctl__frame_that_drips_is_given_up),
        cmocka_unit_test(test_net_ctl__unknown_type_is_skipped_and_answered),
        cmocka_unit_test(test_net_ctl__peer_that_does_not_read_is_closed),
        cmocka_unit_test(test_net_ctl__frame_without_memory_ends_the_connection),
        cmocka_unit_test(test_net_ctl__dialer_waits_for_the_server_and_survives_its_restart),
        cmocka_unit_test(test_net_ctl__name_is_dialled_in_both_families),
        cmocka_unit_test(test_net_ctl__port_in_use_names_the_url),
        cmocka_unit_test(test_net_ctl__server_closes_what_is_above_its_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
