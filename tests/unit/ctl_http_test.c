/* ctl/http_parse, ctl/sse, ctl/http: answers split at every byte, URLs,
 * and calls to a server in a thread. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "deploy/ctl/http.h"
#include "deploy/ctl/http_parse.h"
#include "deploy/ctl/sse.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ------------------------------------------------------------------ the parser */

/* What a run of the parser gave. */
struct outcome {
    enum ctl_http_event last; /* END, BAD, or MORE when the answer is not complete */
    int status;
    bool event_stream, had_head;
    uint32_t retry_after;
    char body[256];
    size_t body_len;
    char reason[64];
};

/* Feeds the bytes, the first `cut` of them first; then closes when asked to. */
static struct outcome parse(const char *text, size_t n, size_t cut, bool close_after)
{
    struct outcome o = {0};
    struct ctl_http_parser p;
    ctl_http_parser_init(&p);
    size_t at = 0, have = cut;
    for (;;) {
        size_t used, body_len;
        const char *body;
        /* a copy of just the bytes there are, so that a read past them is seen */
        char *copy = malloc(have - at + 1);
        memcpy(copy, text + at, have - at);
        enum ctl_http_event ev = ctl_http_next(&p, copy, have - at, &used, &body, &body_len);
        assert_true(used <= have - at);
        if (ev == CTL_HTTP_HEAD) {
            assert_false(o.had_head);
            o.had_head = true;
            o.status = p.status;
            o.event_stream = p.event_stream;
            o.retry_after = p.retry_after;
        }
        if (ev == CTL_HTTP_BODY) {
            assert_true(o.had_head && body_len > 0 && o.body_len + body_len < sizeof o.body);
            memcpy(o.body + o.body_len, body, body_len);
            o.body_len += body_len;
        }
        free(copy);
        at += used;
        if (ev == CTL_HTTP_MORE) {
            if (have < n) {
                have = n;
                continue;
            }
            if (close_after) ev = ctl_http_closed(&p);
        }
        if (ev == CTL_HTTP_HEAD || ev == CTL_HTTP_BODY) continue;
        o.last = ev;
        if (p.reason) snprintf(o.reason, sizeof o.reason, "%s", p.reason);
        return o;
    }
}

/* The same outcome however it is split; returns it. */
static struct outcome parse_all_ways(const char *text, size_t n, bool close_after)
{
    struct outcome whole = parse(text, n, n, close_after);
    for (size_t cut = 0; cut < n; cut++) {
        struct outcome o = parse(text, n, cut, close_after);
        assert_memory_equal(&o, &whole, sizeof o);
    }
    return whole;
}
#define ANSWER(text, close_after) parse_all_ways(text, sizeof text - 1, close_after)

static void reads_bodies_of_every_framing(void **state)
{
    (void)state;
    struct outcome o = ANSWER("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", false);
    assert_int_equal(o.last, CTL_HTTP_END);
    assert_int_equal(o.status, 200);
    assert_string_equal(o.body, "hello");

    o = ANSWER("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream; "
               "charset=utf-8\r\n\r\n5;x=1\r\nhello\r\n0006\r\n world\r\n0\r\nX: y\r\n\r\n",
               false);
    assert_int_equal(o.last, CTL_HTTP_END);
    assert_true(o.event_stream);
    assert_string_equal(o.body, "hello world");

    o = ANSWER("HTTP/1.0 200 OK\nServer: x\n\nuntil the end", true);
    assert_int_equal(o.last, CTL_HTTP_END);
    assert_string_equal(o.body, "until the end");

    o = ANSWER("HTTP/1.1 204 No Content\r\n\r\n", false);
    assert_int_equal(o.last, CTL_HTTP_END);
    o = ANSWER("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false);
    assert_int_equal(o.last, CTL_HTTP_END);
    assert_int_equal(o.body_len, 0);
}

static void skips_informational_answers(void **state)
{
    (void)state;
    struct outcome o = ANSWER("HTTP/1.1 100 Continue\r\nRetry-After: 9\r\n\r\nHTTP/1.1 503 Service "
                              "Unavailable\r\nretry-after:  7 \r\nContent-Length: 2\r\n\r\n{}",
                              false);
    assert_int_equal(o.last, CTL_HTTP_END);
    assert_int_equal(o.status, 503);
    assert_int_equal(o.retry_after, 7);
    assert_string_equal(o.body, "{}");
}

static void refuses_what_has_no_sure_end(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "SSH-2.0-OpenSSH_9.2\r\n",
        "HTTP/2 200\r\n\r\n",
        "HTTP/1.1 20\r\n\r\n",
        "HTTP/1.1 2000 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length : 1\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\n\r\n",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct outcome o = parse_all_ways(bad[i], strlen(bad[i]), false);
        if (o.last != CTL_HTTP_BAD) fail_msg("accepted: %s", bad[i]);
        assert_true(o.reason[0] != 0);
    }
    static const char nul[] = "HTTP/1.1 200 OK\r\nA: b\0c\r\n\r\n";
    assert_int_equal(ANSWER(nul, false).last, CTL_HTTP_BAD);
}

static void a_close_in_the_middle_is_no_end(void **state)
{
    (void)state;
    struct outcome o = ANSWER("", true);
    assert_int_equal(o.last, CTL_HTTP_BAD);
    assert_non_null(strstr(o.reason, "without an answer"));
    static const char *const cut[] = {
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", "HTTP/1.1 200 OK\r\nContent-",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        o = parse_all_ways(cut[i], strlen(cut[i]), true);
        assert_int_equal(o.last, CTL_HTTP_BAD);
        assert_non_null(strstr(o.reason, "in the middle"));
    }
}

static void bounds_lines_and_heads(void **state)
{
    (void)state;
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_buf_puts(&b, "HTTP/1.1 200 OK\r\nA: ");
    for (int i = 0; i < CTL_HTTP_MAX_LINE; i++) tow_buf_putc(&b, 'x');
    assert_string_equal(parse(b.data, b.len, b.len, false).reason, "a line is too long");
    tow_buf_clear(&b);
    tow_buf_puts(&b, "HTTP/1.1 200 OK\r\n");
    for (int i = 0; i < CTL_HTTP_MAX_HEAD / 8; i++) tow_buf_puts(&b, "A: bcd\r\n");
    assert_string_equal(parse(b.data, b.len, b.len, false).reason, "the head is too long");
    tow_buf_fini(&b);
}

/* ------------------------------------------------------------------ events */

static int gather(void *ctx, const char *data, size_t n, struct tow_err *err)
{
    (void)err;
    assert_int_equal(strlen(data), n);
    tow_buf_printf(ctx, "<%s>", data);
    return strcmp(data, "stop") ? 0 : tow_fail(err, TOW_ECANCEL, "stop");
}

static void events_do_not_depend_on_the_split(void **state)
{
    (void)state;
    static const char text[] = ": hello\n\ndata: one\n\ndata:two\r\ndata: and\rdata\n\r\nevent: x\n"
                               "data:  three\n\nid: 7\n\ndata: cut";
    static const char want[] = "<one><two\nand\n>< three>";
    for (size_t cut = 0; cut <= sizeof text - 1; cut++) {
        struct tow_buf got;
        struct tow_err err = {0};
        struct ctl_sse s;
        tow_buf_init(&got, 0);
        ctl_sse_init(&s, gather, &got);
        assert_int_equal(ctl_sse_feed(&s, text, cut, &err), 0);
        assert_int_equal(ctl_sse_feed(&s, text + cut, sizeof text - 1 - cut, &err), 0);
        assert_string_equal(got.data, want);
        ctl_sse_fini(&s);
        tow_buf_fini(&got);
    }
}

static void an_event_can_end_the_feed(void **state)
{
    (void)state;
    static const char text[] = "data: a\n\ndata: stop\n\ndata: b\n\n";
    struct tow_buf got;
    struct tow_err err = {0};
    struct ctl_sse s;
    tow_buf_init(&got, 0);
    ctl_sse_init(&s, gather, &got);
    assert_int_equal(ctl_sse_feed(&s, text, sizeof text - 1, &err), TOW_ECANCEL);
    assert_string_equal(got.data, "<a><stop>");
    ctl_sse_fini(&s);
    tow_buf_fini(&got);
}

static void an_endless_event_is_refused(void **state)
{
    (void)state;
    static char piece[65536];
    struct tow_buf got;
    struct tow_err err = {0};
    struct ctl_sse s;
    int rc = 0;
    memset(piece, 'x', sizeof piece);
    tow_buf_init(&got, 0);
    ctl_sse_init(&s, gather, &got);
    for (size_t fed = 0; rc == 0 && fed <= CTL_SSE_MAX_EVENT; fed += sizeof piece)
        rc = ctl_sse_feed(&s, piece, sizeof piece, &err);
    assert_int_equal(rc, TOW_ETOOBIG);
    ctl_sse_fini(&s);
    tow_buf_fini(&got);
}

/* ------------------------------------------------------------------ URLs and calls */

static void urls(void **state)
{
    (void)state;
    struct ctl_server s;
    struct tow_err err = {0};
    assert_int_equal(ctl_server_parse(&s, "http://127.0.0.1:8000", &err), 0);
    assert_string_equal(s.host, "127.0.0.1");
    assert_int_equal(s.port, 8000);
    assert_string_equal(s.prefix, "");
    assert_int_equal(ctl_server_parse(&s, "http://router.example/towpath//", &err), 0);
    assert_string_equal(s.host, "router.example");
    assert_int_equal(s.port, 80);
    assert_string_equal(s.prefix, "/towpath");
    assert_int_equal(ctl_server_parse(&s, "http://[::1]:65535/", &err), 0);
    assert_string_equal(s.host, "::1");
    assert_int_equal(s.port, 65535);
    static const char *const bad[] = {"",
                                      "127.0.0.1:8000",
                                      "https://x",
                                      "ftp://x",
                                      "http://",
                                      "http:///x",
                                      "http://:80",
                                      "http://x:",
                                      "http://x:0",
                                      "http://x:65536",
                                      "http://x:99999999999999999999",
                                      "http://x:8a",
                                      "http://u:p@x",
                                      "http://[::1",
                                      "http://[::1]x",
                                      "http://x/a?b",
                                      "http://x/a#b",
                                      "http://x y",
                                      "http://x\r\nA: b"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (ctl_server_parse(&s, bad[i], &err) != TOW_ECONFIG) fail_msg("accepted: %s", bad[i]);
        assert_non_null(strstr(err.msg, "--url"));
    }
}

/* A server for one connection: reads until the request is there, sends `answer`, closes. */
struct stub {
    int fd;
    uint16_t port;
    const char *answer; /* NULL: waits for the client to go */
    char request[4096];
    pthread_t thread;
};

static void *serve(void *arg)
{
    struct stub *s = arg;
    int fd = accept(s->fd, NULL, NULL);
    size_t have = 0;
    for (;;) {
        ssize_t n = recv(fd, s->request + have, sizeof s->request - 1 - have, 0);
        if (n <= 0) break;
        have += (size_t)n;
        s->request[have] = 0;
        const char *end = strstr(s->request, "\r\n\r\n");
        const char *length = strstr(s->request, "Content-Length: ");
        size_t body = length ? strtoul(length + 16, NULL, 10) : 0;
        if (s->answer && end && have >= (size_t)(end - s->request) + 4 + body) break;
    }
    if (s->answer) {
        size_t n = strlen(s->answer);
        assert_int_equal(send(fd, s->answer, n, MSG_NOSIGNAL), (ssize_t)n);
    }
    close(fd);
    return NULL;
}

/* A port of its own; until listen() it refuses. */
static void stub_bind(struct stub *s)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    memset(s, 0, sizeof *s);
    s->fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(s->fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(s->fd, (struct sockaddr *)&a, &len), 0);
    s->port = ntohs(a.sin_port);
}

static int call(struct stub *s, const char *answer, const struct tow_buf *body, const char *key,
                ctl_http_on_body on_body, void *ctx, struct ctl_reply *reply, struct tow_err *err)
{
    char url[64];
    struct ctl_server server;
    stub_bind(s);
    assert_int_equal(listen(s->fd, 1), 0);
    s->answer = answer;
    snprintf(url, sizeof url, "http://127.0.0.1:%u/p", s->port);
    assert_int_equal(ctl_server_parse(&server, url, err), 0);
    server.key = key;
    server.timeout_ms = answer ? test_limit_ms(60000) : 60;
    assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0);
    int rc = ctl_http_call(&server, body ? "POST" : "GET", "/x", body, on_body, ctx, reply, err);
    pthread_join(s->thread, NULL);
    close(s->fd);
    return rc;
}

static void sends_what_it_should(void **state)
{
    (void)state;
    struct stub s;
    struct ctl_reply reply;
    struct tow_err err = {0};
    struct tow_buf body;
    tow_buf_init(&body, 0);
    tow_buf_puts(&body, "{\"a\": 1}");
    assert_int_equal(call(&s, "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}", &body,
                          "key-1", NULL, NULL, &reply, &err),
                     0);
    assert_int_equal(reply.status, 401);
    assert_string_equal(reply.body.data, "{}");
    ctl_reply_fini(&reply);
    assert_int_equal(strncmp(s.request, "POST /p/x HTTP/1.1\r\nHost: 127.0.0.1:", 36), 0);
    assert_non_null(strstr(s.request, "\r\nAuthorization: Bearer key-1\r\n"));
    assert_non_null(strstr(s.request, "\r\nContent-Length: 8\r\n"));
    assert_non_null(strstr(s.request, "\r\n\r\n{\"a\": 1}"));
    tow_buf_fini(&body);
}

static int keep(void *ctx, const char *bytes, size_t n, struct tow_err *err)
{
    (void)err;
    tow_buf_put(ctx, bytes, n);
    return 0;
}

static void only_a_good_stream_goes_to_the_callback(void **state)
{
    (void)state;
    struct stub s;
    struct ctl_reply reply;
    struct tow_err err = {0};
    struct tow_buf got;
    tow_buf_init(&got, 0);
    assert_int_equal(call(&s,
                          "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                          "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
                          NULL, NULL, keep, &got, &reply, &err),
                     0);
    assert_string_equal(got.data, "abc");
    assert_int_equal(reply.body.len, 0);
    assert_null(strstr(s.request, "Authorization"));
    ctl_reply_fini(&reply);
    tow_buf_clear(&got);
    assert_int_equal(call(&s, "HTTP/1.1 429 No\r\nContent-Type: text/event-stream\r\n\r\nbusy",
                          NULL, NULL, keep, &got, &reply, &err),
                     0);
    assert_int_equal(got.len, 0);
    assert_string_equal(reply.body.data, "busy");
    ctl_reply_fini(&reply);
    tow_buf_fini(&got);
}

static void failures_name_the_server(void **state)
{
    (void)state;
    struct stub s;
    struct ctl_reply reply;
    struct tow_err err = {0};
    char url[64];
    struct ctl_server server;

    stub_bind(&s);
    snprintf(url, sizeof url, "http://127.0.0.1:%u", s.port);
    assert_int_equal(ctl_server_parse(&server, url, &err), 0);
    server.timeout_ms = test_limit_ms(60000);
    assert_int_equal(ctl_http_call(&server, "GET", "/", NULL, NULL, NULL, &reply, &err), TOW_EPEER);
    assert_non_null(strstr(err.msg, "refused"));
    assert_int_equal(strncmp(err.msg, url, strlen(url)), 0);
    ctl_reply_fini(&reply);
    close(s.fd);

    assert_int_equal(call(&s, NULL, NULL, NULL, NULL, NULL, &reply, &err), TOW_ETIME);
    assert_non_null(strstr(err.msg, "--timeout"));
    ctl_reply_fini(&reply);

    assert_int_equal(call(&s, "", NULL, NULL, NULL, NULL, &reply, &err), TOW_EWIRE);
    assert_non_null(strstr(err.msg, "without an answer"));
    ctl_reply_fini(&reply);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_bodies_of_every_framing),
        cmocka_unit_test(skips_informational_answers),
        cmocka_unit_test(refuses_what_has_no_sure_end),
        cmocka_unit_test(a_close_in_the_middle_is_no_end),
        cmocka_unit_test(bounds_lines_and_heads),
        cmocka_unit_test(events_do_not_depend_on_the_split),
        cmocka_unit_test(an_event_can_end_the_feed),
        cmocka_unit_test(an_endless_event_is_refused),
        cmocka_unit_test(urls),
        cmocka_unit_test(sends_what_it_should),
        cmocka_unit_test(only_a_good_stream_goes_to_the_callback),
        cmocka_unit_test(failures_name_the_server),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
