/* Tests of router/http_parse.h: every case in one piece, byte by byte and in every two pieces. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "router/http_parse.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEAD 1024
#define MAX_BODY 64

/* Feeds bytes [0, n) with the cuts given and writes what came out:
 * "METHOD path?query minor k|c" and " body" and "." per request, "!status" when refused, with
 * `reasons` the reason behind it. */
static bool reasons;
static void transcribe(struct tow_buf *out, const char *bytes, size_t n, const size_t *cuts,
                       size_t n_cuts, size_t step)
{
    struct rtr_http_parser p;
    rtr_http_parser_init(&p, MAX_HEAD, MAX_BODY);
    tow_buf_clear(out);
    size_t at = 0, have = 0, cut = 0;
    bool in_body = false;
    for (;;) {
        size_t used, body_len;
        const char *body;
        /* An own allocation of just these bytes, so that a sanitizer sees a read past them. */
        char *copy = malloc(have - at ? have - at : 1);
        memcpy(copy, bytes + at, have - at);
        enum rtr_http_event ev = rtr_http_next(&p, copy, have - at, &used, &body, &body_len);
        assert_true(used <= have - at);
        const struct rtr_http_head *h = &p.head;
        switch (ev) {
        case RTR_HTTP_HEAD:
            tow_buf_put(out, copy + h->method.at, h->method.len);
            tow_buf_putc(out, ' ');
            tow_buf_put(out, copy + h->path.at, h->path.len);
            tow_buf_putc(out, '?');
            tow_buf_put(out, copy + h->query.at, h->query.len);
            tow_buf_printf(out, " %d%c", h->minor, h->keep_alive ? 'k' : 'c');
            if (h->authorization.len) {
                tow_buf_putc(out, '[');
                tow_buf_put(out, copy + h->authorization.at, h->authorization.len);
                tow_buf_putc(out, ']');
            }
            if (h->expect_continue) tow_buf_puts(out, " expect");
            break;
        case RTR_HTTP_BODY:
            assert_true(body >= copy && body + body_len <= copy + used && body_len > 0);
            if (!in_body) tow_buf_putc(out, ' ');
            tow_buf_put(out, body, body_len);
            break;
        case RTR_HTTP_END: tow_buf_putc(out, '.'); break;
        case RTR_HTTP_BAD:
            tow_buf_printf(out, "!%d", p.status);
            if (reasons) tow_buf_printf(out, " %s", p.reason);
            break;
        case RTR_HTTP_MORE: break;
        }
        in_body = ev == RTR_HTTP_BODY || (in_body && ev == RTR_HTTP_MORE);
        free(copy);
        at += used;
        if (ev == RTR_HTTP_BAD) return;
        if (ev != RTR_HTTP_MORE) continue;
        if (have == n) return;
        have = step ? have + step : cut < n_cuts ? cuts[cut++] : n;
        if (have > n) have = n;
    }
}

static void check(const char *bytes, size_t n, const char *want)
{
    struct tow_buf out;
    tow_buf_init(&out, 0);
    transcribe(&out, bytes, n, NULL, 0, 0);
    if (strcmp(out.data ? out.data : "", want) != 0) {
        fail_msg("%.80s...\n gives %s\n  want %s", bytes, out.data ? out.data : "", want);
    }
    transcribe(&out, bytes, n, NULL, 0, 1);
    assert_string_equal(out.data ? out.data : "", want);
    for (size_t cut = 0; cut <= n; cut++) {
        transcribe(&out, bytes, n, &cut, 1, 0);
        assert_string_equal(out.data ? out.data : "", want);
    }
    tow_buf_fini(&out);
}
#define CHECK(bytes, want) check(bytes, sizeof(bytes) - 1, want)

#define H    "Host: x\r\n"
#define POST "POST /p HTTP/1.1\r\n" H

static void test_http_parse__plain_requests(void **state)
{
    (void)state;
    CHECK("GET / HTTP/1.1\r\n" H "\r\n", "GET /? 1k.");
    CHECK("\r\nGET /a?b=c HTTP/1.1\r\n" H "\r\n", "GET /a?b=c 1k.");
    CHECK("\r\n\r\nGET / HTTP/1.1\r\n" H "\r\n", "!400");
    CHECK("GET / HTTP/1.0\r\n\r\n", "GET /? 0c.");
    CHECK("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", "GET /? 0k.");
    CHECK("GET / HTTP/1.1\r\n" H "Connection: x, close\r\n\r\n", "GET /? 1c.");
    CHECK("GET http://h/a HTTP/1.1\r\n" H "\r\n", "GET /a? 1k.");
    CHECK("OPTIONS * HTTP/1.1\r\n" H "\r\n", "OPTIONS *? 1k.");
    CHECK("GET / HTTP/1.1\r\n" H "AUTHORIZATION:\t Bearer k \r\n\r\n", "GET /? 1k[Bearer k].");
    CHECK(POST "Content-Length: 3\r\n\r\nabc", "POST /p? 1k abc.");
    CHECK(POST "Content-Length: 0\r\n\r\n", "POST /p? 1k.");
    CHECK(POST "Expect: 100-continue\r\nContent-Length: 1\r\n\r\na", "POST /p? 1k expect a.");
}

static void test_http_parse__chunked_bodies(void **state)
{
    (void)state;
#define TE POST "Transfer-Encoding: chunked\r\n\r\n"
    CHECK(TE "3\r\nabc\r\nA;x=\"y\"\r\n0123456789\r\n0\r\n\r\n", "POST /p? 1k abc0123456789.");
    CHECK(TE "0\r\nTrailer: t\r\n\r\n", "POST /p? 1k.");
    CHECK(TE "0000000000000001\r\na\r\n0\r\n\r\n", "POST /p? 1k a.");
    CHECK(TE "00000000000000001\r\na\r\n0\r\n\r\n", "POST /p? 1k!400"); /* 17 digits */
    CHECK(TE "0x1\r\na\r\n", "POST /p? 1k!400");
    CHECK(TE "-1\r\na\r\n", "POST /p? 1k!400");
    CHECK(TE " 1\r\na\r\n", "POST /p? 1k!400");
    CHECK(TE "1 \r\na\r\n", "POST /p? 1k!400");
    CHECK(TE "\r\n", "POST /p? 1k!400");
    CHECK(TE ";x\r\n", "POST /p? 1k!400");
    CHECK(TE "1\na\r\n0\r\n\r\n", "POST /p? 1k!400");
    CHECK(TE "1\r\na\n0\r\n\r\n", "POST /p? 1k a!400");
    CHECK(TE "1\r\nab\r\n0\r\n\r\n", "POST /p? 1k a!400");
    CHECK(TE "41\r\n", "POST /p? 1k!413"); /* 65 > 64 */
    CHECK(TE "FFFFFFFFFFFFFFFF\r\n", "POST /p? 1k!413");
    CHECK(TE "1\r\na\r\nFFFFFFFFFFFFFFFF\r\n", "POST /p? 1k a!413");
    CHECK(TE "1;\x01\r\na\r\n", "POST /p? 1k!400");
    CHECK(TE "0\r\n folded\r\n\r\n", "POST /p? 1k!400");
    CHECK(TE "0\r\nbad trailer: t\r\n\r\n", "POST /p? 1k!400");
}

static void test_http_parse__ambiguous_framing_is_refused(void **state)
{
    (void)state;
#define SMUGGLED "GET /admin/workers HTTP/1.1\r\n" H "\r\n"
    CHECK(POST "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" SMUGGLED, "!400");
    CHECK(POST "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" SMUGGLED, "!400");
    CHECK(POST "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "!400");
    CHECK(POST "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", "!400");
    CHECK(POST "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", "!400");
    CHECK(POST "Content-Length: 0\r\nContent-Length: 4\r\n\r\nabcd", "!400");
    CHECK(POST "Content-Length: 3, 3\r\n\r\nabc", "!400");
    CHECK(POST "Content-Length: +3\r\n\r\nabc", "!400");
    CHECK(POST "Content-Length: 0x3\r\n\r\nabc", "!400");
    CHECK(POST "Content-Length: \r\n\r\nabc", "!400");
    CHECK(POST "Content-Length: 99999999999999999999\r\n\r\n", "!400");
    CHECK(POST "Content-Length: 65\r\n\r\n", "!413");
    CHECK(POST "Transfer-Encoding: chunked, gzip\r\n\r\n", "!501");
    CHECK(POST "Transfer-Encoding: gzip, chunked\r\n\r\n", "!501");
    CHECK(POST "Transfer-Encoding: xchunked\r\n\r\n", "!501");
    CHECK(POST "Transfer-Encoding: \r\n\r\n", "!501");
    CHECK(POST "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "!400");
    CHECK("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\n\r\n", "!400"); /* no Host */
    CHECK("GET / HTTP/1.1\r\n" H H "\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\n" H "A: b\r\n c\r\n\r\n", "!400"); /* obs-fold */
    CHECK("GET / HTTP/1.1\r\n Host: x\r\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\nHost : x\r\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\n" H "A: b\0c\r\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\n" H "A\0: b\r\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\n" H "A: b\rc\r\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\n" H "\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\n" H "\n", "!400");
    CHECK("GET / HTTP/1.1\r\n" H "A: b\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\n" H ": b\r\n\r\n", "!400");
    CHECK("GET / HTTP/1.1\r\n" H "nocolon\r\n\r\n", "!400");
    CHECK("GET  / HTTP/1.1\r\n" H "\r\n", "!400");
    CHECK("GET / HTTP/1.1 \r\n" H "\r\n", "!400");
    CHECK("GET /\r\n\r\n", "!400"); /* HTTP/0.9 */
    CHECK("GET / http/1.1\r\n" H "\r\n", "!400");
    CHECK("GET / HTTP/2.0\r\n" H "\r\n", "!505");
    CHECK("GET /\x80 HTTP/1.1\r\n" H "\r\n", "!400");
    CHECK("GET /a#b HTTP/1.1\r\n" H "\r\n", "!400");
    CHECK("GET a HTTP/1.1\r\n" H "\r\n", "!400");
    CHECK("GET http:///a HTTP/1.1\r\n" H "\r\n", "!400");
    CHECK("G@T / HTTP/1.1\r\n" H "\r\n", "!400");
    CHECK(POST "Expect: gold\r\n\r\n", "!417");
    CHECK(POST "Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na", "!415");
    CHECK("\x16\x03\x01\x02\n", "!400"); /* TLS */
}

static void test_http_parse__pipelined_requests_come_out_in_order(void **state)
{
    (void)state;
    CHECK("GET /1 HTTP/1.1\r\n" H "\r\n" POST "Content-Length: 2\r\n\r\nhi" TE "1\r\nx\r\n0\r\n\r\n"
          "GET /3 HTTP/1.1\r\n" H "\r\n",
          "GET /1? 1k.POST /p? 1k hi.POST /p? 1k x.GET /3? 1k.");
    /* A body that looks like a request is a body. */
    CHECK(POST "Content-Length: 40\r\n\r\n" SMUGGLED "GET / HTTP/1.1\r\n" H "\r\n",
          "POST /p? 1k " SMUGGLED ".GET /? 1k.");
}

static void test_http_parse__limits_hold_wherever_the_split_is(void **state)
{
    (void)state;
    char bytes[4 * MAX_HEAD];
    for (size_t extra = 0; extra < 3; extra++) { /* exactly the limit, and one and two more */
        size_t n = 0;
        n += (size_t)sprintf(bytes, "GET / HTTP/1.1\r\n" H "A: ");
        size_t pad = MAX_HEAD - n - 4 + extra;
        memset(bytes + n, 'a', pad);
        n += pad;
        memcpy(bytes + n, "\r\n\r\n", 4);
        n += 4;
        check(bytes, n, extra == 0 ? "GET /? 1k." : "!431");
    }
    memset(bytes, 'a', sizeof bytes);
    check(bytes, MAX_HEAD + 7, "!414");
    size_t n = (size_t)sprintf(bytes, "GET / HTTP/1.1\r\n" H);
    struct tow_buf many;
    tow_buf_init(&many, 0);
    tow_buf_put(&many, bytes, n);
    for (int i = 0; i < RTR_HTTP_MAX_HEADERS; i++) tow_buf_puts(&many, "a:\r\n");
    tow_buf_puts(&many, "\r\n");
    check(many.data, many.len, "!431");
    tow_buf_fini(&many);
}

/* Header, value and limit; the same however the bytes were split; a secret never. */
static void test_http_parse__a_refusal_names_header_value_and_limit(void **state)
{
    (void)state;
    reasons = true;
    CHECK("GET /\x01 HTTP/1.1\r\n",
          "!400 request target: must be printable ASCII without #, has \"\\x01\" at byte 1");
    CHECK("GET nowhere HTTP/1.1\r\n",
          "!400 request target: must be a path or an http URL, is \"nowhere\"");
    CHECK("GET\r\n", "!400 request line: must be METHOD TARGET HTTP/1.1, is \"GET\"");
    CHECK("GET / HTTP/2.0\r\n", "!505 version: must be HTTP/1.1 or HTTP/1.0, is \"HTTP/2.0\"");
    CHECK("\r\n\r\n", "!400 request: at most one empty line before it, has 2");
    CHECK("GET / HTTP/1.1\r\n\r\n", "!400 Host: must stand in a request of HTTP/1.1, is missing");
    CHECK("GET / HTTP/1.1\r\nHost: a b\r\n",
          "!400 Host: must be a name or number and a port, is \"a b\"");
    CHECK("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n",
          "!400 Host: must stand once, stands again with \"b\"");
    CHECK(POST "Content-Length: +3\r\n\r\n",
          "!400 Content-Length: must be 1 to 18 decimal digits, is \"+3\"");
    CHECK(POST "Content-Length: 3\r\nContent-Length: 4\r\n",
          "!400 Content-Length: must stand once, stands again with \"4\"");
    CHECK(POST "Content-Length: 65\r\n\r\n",
          "!413 body: must have at most 64 bytes, Content-Length is 65");
    CHECK(TE "41\r\n", "POST /p? 1k!413 body: must have at most 64 bytes, a chunk of 65 follows 0");
    CHECK(TE "1\r\na\r\nFFFF\r\n",
          "POST /p? 1k a!413 body: must have at most 64 bytes, a chunk of 65535 follows 1");
    CHECK(TE "0x1\r\n",
          "POST /p? 1k!400 chunk size: must be 1 to 16 hexadecimal digits, is \"0x1\"");
    CHECK(TE "1\r\nab\r\n",
          "POST /p? 1k a!400 chunk: must end with CR LF where its size says, has \"b\"");
    CHECK(POST "Transfer-Encoding: gzip\r\n",
          "!501 Transfer-Encoding: must be chunked, is \"gzip\"");
    CHECK(POST "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
          "!400 Content-Length: must not stand beside Transfer-Encoding, is 3");
    CHECK(POST "Expect: wonders\r\n", "!417 Expect: must be 100-continue, is \"wonders\"");
    CHECK(POST "Content-Encoding: br\r\n",
          "!415 Content-Encoding: must be absent or identity, is \"br\"");
    CHECK(POST "Name : secret\r\n",
          "!400 header: must begin with a name and a colon without blanks, is \"Name \"");
    CHECK(POST "A: sec\x02ret\r\n",
          "!400 header \"A\": must have no control characters, has \"\\x02\"");
    CHECK(POST "Authorization: Bearer secret\n",
          "!400 every line must end in CR LF, \"Authorization\" does not");
    CHECK(POST "Authorization: Bearer secret\r\nAuthorization: Bearer secret\r\n",
          "!400 Authorization: must stand once, stands twice");
    /* However a line with a secret is broken, nothing behind its name is quoted. */
    CHECK(POST "Authorization Bearer secret\r\n",
          "!400 header: must begin with a name and a colon without blanks, is \"Authorization\"");
    CHECK(POST "proxy-authorization Basic secret:x\r\n",
          "!400 header: must begin with a name and a colon without blanks, is "
          "\"proxy-authorization\"");
    CHECK(POST "COOKIE=secret\r\n",
          "!400 header: must begin with a name and a colon without blanks, is \"COOKIE\"");
    CHECK(POST "X-Api-Key=secret\r\n",
          "!400 header: must begin with a name and a colon without blanks, is \"X-Api-Key\"");
    CHECK(POST "X-Api-Key secret\n", "!400 every line must end in CR LF, \"X-Api-Key\" does not");
    CHECK(POST "Authorization:\r\n Bearer secret\r\n",
          "!400 header: must not begin with a blank (a folded line)");
    CHECK(POST "Authorization:\r\n\tsecret\n", "!400 every line must end in CR LF, \"\" does not");
    CHECK("Authorization: Bearer secret\r\n",
          "!400 request line: must be METHOD TARGET HTTP/1.1, is \"Authorization\"");
    CHECK("authorization secret HTTP/1.1\r\n",
          "!400 request line: must be METHOD TARGET HTTP/1.1, is \"authorization\"");
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_buf_puts(&b, POST "Authorization: Bearer ");
    while (b.len <= MAX_HEAD) tow_buf_puts(&b, "secret");
    check(b.data, b.len,
          "!431 head must end within 1024 bytes, is longer: line \"Authorization\" does not end "
          "there");
    tow_buf_clear(&b);
    tow_buf_puts(&b, "GET /");
    while (b.len <= MAX_HEAD) tow_buf_puts(&b, "0123456789");
    check(b.data, b.len,
          "!414 request line must end within 1024 bytes, is longer: line "
          "\"GET /012345678901234567890123456\"... does not end there");
    tow_buf_clear(&b);
    tow_buf_puts(&b, "GET / HTTP/1.1\r\n" H);
    for (int i = 0; i < RTR_HTTP_MAX_HEADERS; i++) tow_buf_puts(&b, "a:b\r\n");
    check(b.data, b.len, "!431 header: at most 100 lines, line 101 is \"a\"");
    tow_buf_fini(&b);
    reasons = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_http_parse__a_refusal_names_header_value_and_limit),
        cmocka_unit_test(test_http_parse__plain_requests),
        cmocka_unit_test(test_http_parse__chunked_bodies),
        cmocka_unit_test(test_http_parse__ambiguous_framing_is_refused),
        cmocka_unit_test(test_http_parse__pipelined_requests_come_out_in_order),
        cmocka_unit_test(test_http_parse__limits_hold_wherever_the_split_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
