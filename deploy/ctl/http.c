/* ctl/http.c - see http.h. Sockets do not block; every wait is a poll with the timeout. One
 * connection per call: keeping it would save nothing that an operator could see. */
#include "deploy/ctl/http.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "deploy/ctl/http_parse.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { READ_BYTES = 65536 };

/* ------------------------------------------------------------------ the URL */

static bool is_plain(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s[i] <= ' ' || (unsigned char)s[i] >= 127 || s[i] == '#' || s[i] == '?')
            return false;
    return true;
}

int ctl_server_parse(struct ctl_server *s, const char *url, struct tow_err *err)
{
    static const char scheme[] = "http://";
    if (!strncmp(url, "https://", 8))
        return tow_fail(err, TOW_ECONFIG, "--url %s: https is not spoken here; use http://", url);
    if (strncmp(url, scheme, sizeof scheme - 1) != 0)
        return tow_fail(err, TOW_ECONFIG, "--url %s: must begin with http://", url);
    const char *host = url + sizeof scheme - 1;
    size_t authority = strcspn(host, "/");
    const char *path = host + authority;
    size_t path_len = strlen(path);
    while (path_len > 0 && path[path_len - 1] == '/') path_len--;
    if (!is_plain(url, strlen(url)) || memchr(host, '@', authority))
        return tow_fail(err, TOW_ECONFIG,
                        "--url %s: must be http://HOST[:PORT][/PREFIX] and nothing else", url);

    bool bracketed = *host == '[';
    size_t host_len = bracketed ? strcspn(host, "]") : strcspn(host, ":/");
    const char *rest = host + host_len;
    if (bracketed) {
        if (host_len >= authority)
            return tow_fail(err, TOW_ECONFIG, "--url %s: '[' without ']'", url);
        host++;
        host_len--;
        rest++;
    }
    unsigned long port = 80;
    if (*rest == ':') {
        size_t digits = strspn(rest + 1, "0123456789");
        port = 0;
        for (size_t i = 0; i < digits && port <= 65535; i++)
            port = port * 10 + (unsigned long)(rest[1 + i] - '0');
        if (digits == 0 || port < 1 || port > 65535)
            return tow_fail(err, TOW_ECONFIG, "--url %s: the port is not in 1..65535", url);
        rest += 1 + digits;
    }
    if (rest != path)
        return tow_fail(err, TOW_ECONFIG, "--url %s: unexpected '%c' after host and port", url,
                        *rest);
    if (host_len == 0 || host_len >= sizeof s->host || path_len >= sizeof s->prefix)
        return tow_fail(err, TOW_ECONFIG, "--url %s: host or path is empty or too long", url);
    memset(s, 0, sizeof *s);
    s->url = url;
    memcpy(s->host, host, host_len);
    memcpy(s->prefix, path, path_len);
    s->port = (uint16_t)port;
    return 0;
}

/* ------------------------------------------------------------------ the connection */

/* Waits until fd is ready; 0, or TOW_ETIME. */
static int wait_for(const struct ctl_server *s, int fd, short events, const char *what,
                    struct tow_err *err)
{
    struct pollfd p = {.fd = fd, .events = events};
    uint64_t deadline = tow_now_ms() + (uint64_t)s->timeout_ms;
    for (;;) {
        uint64_t now = tow_now_ms();
        int rc = poll(&p, 1, now < deadline ? (int)(deadline - now) : 0);
        if (rc > 0) return 0;
        if (rc == 0)
            return tow_fail(err, TOW_ETIME, "%s: %s for %.1f s (--timeout)", s->url, what,
                            s->timeout_ms / 1000.0);
        if (errno != EINTR) return tow_fail(err, TOW_ESYS, "%s: poll: %s", s->url, strerror(errno));
    }
}

static int connect_one(const struct ctl_server *s, const struct addrinfo *a, int *out,
                       struct tow_err *err)
{
    int fd = socket(a->ai_family, a->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, a->ai_protocol);
    if (fd < 0) return tow_fail(err, TOW_ESYS, "%s: socket: %s", s->url, strerror(errno));
    int rc = 0, problem = 0;
    socklen_t len = sizeof problem;
    if (connect(fd, a->ai_addr, a->ai_addrlen) < 0) problem = errno;
    if (problem == EINPROGRESS || problem == EINTR) {
        rc = wait_for(s, fd, POLLOUT, "no connection", err);
        if (rc == 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &len) < 0) problem = errno;
    }
    if (rc == 0 && problem)
        rc = tow_fail(err, TOW_EPEER, "%s: %s%s", s->url, strerror(problem),
                      problem == ECONNREFUSED ? "; does the router listen there?" : "");
    if (rc < 0) {
        close(fd);
        return rc;
    }
    *out = fd;
    return 0;
}

static int connect_any(const struct ctl_server *s, int *out, struct tow_err *err)
{
    char port[8];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    snprintf(port, sizeof port, "%u", s->port);
    int problem = getaddrinfo(s->host, port, &hints, &list);
    if (problem)
        return tow_fail(err, TOW_EPEER, "%s: %s: %s", s->url, s->host, gai_strerror(problem));
    int rc = TOW_EPEER;
    for (const struct addrinfo *a = list; a && rc < 0; a = a->ai_next)
        rc = connect_one(s, a, out, err);
    freeaddrinfo(list);
    return rc;
}

/* 0 also when the server stops reading: it may have answered already. */
static int send_all(const struct ctl_server *s, int fd, const char *bytes, size_t n,
                    struct tow_err *err)
{
    while (n > 0) {
        ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent >= 0) {
            bytes += sent;
            n -= (size_t)sent;
        } else if (errno == EPIPE || errno == ECONNRESET) {
            return 0;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int rc = wait_for(s, fd, POLLOUT, "the server takes nothing", err);
            if (rc < 0) return rc;
        } else if (errno != EINTR) {
            return tow_fail(err, TOW_EPEER, "%s: %s", s->url, strerror(errno));
        }
    }
    return 0;
}

/* > 0 bytes, 0 closed, or TOW_E*. */
static ssize_t receive(const struct ctl_server *s, int fd, char *to, size_t cap,
                       struct tow_err *err)
{
    for (;;) {
        ssize_t n = recv(fd, to, cap, 0);
        if (n >= 0) return n;
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int rc = wait_for(s, fd, POLLIN, "no answer", err);
            if (rc < 0) return rc;
        } else if (errno != EINTR) {
            return tow_fail(err, TOW_EPEER, "%s: %s", s->url, strerror(errno));
        }
    }
}

/* ------------------------------------------------------------------ the call */

static void put_request(const struct ctl_server *s, const char *method, const char *path,
                        const struct tow_buf *body, struct tow_buf *out)
{
    bool number6 = strchr(s->host, ':') != NULL;
    tow_buf_printf(out, "%s %s%s HTTP/1.1\r\nHost: %s%s%s:%u\r\nUser-Agent: towpath-ctl\r\n",
                   method, s->prefix, path, number6 ? "[" : "", s->host, number6 ? "]" : "",
                   s->port);
    tow_buf_puts(out, "Accept: application/json, text/event-stream\r\nConnection: close\r\n");
    if (s->key) tow_buf_printf(out, "Authorization: Bearer %s\r\n", s->key);
    if (body) tow_buf_puts(out, "Content-Type: application/json\r\n");
    if (body || !strcmp(method, "POST"))
        tow_buf_printf(out, "Content-Length: %zu\r\n", body ? body->len : 0);
    tow_buf_puts(out, "\r\n");
    if (body) tow_buf_put(out, body->data, body->len);
}

static int take_body(const struct ctl_server *s, struct ctl_reply *reply, ctl_http_on_body on_body,
                     void *ctx, const char *bytes, size_t n, struct tow_err *err)
{
    if (on_body && reply->event_stream && reply->status / 100 == 2)
        return on_body(ctx, bytes, n, err);
    tow_buf_put(&reply->body, bytes, n);
    if (tow_buf_failed(&reply->body))
        return tow_fail(err, TOW_ETOOBIG, "%s: the answer is larger than %d bytes", s->url,
                        (int)CTL_HTTP_MAX_REPLY);
    return 0;
}

/* Reads until the answer is complete. */
static int read_reply(const struct ctl_server *s, int fd, ctl_http_on_body on_body, void *ctx,
                      struct ctl_reply *reply, struct tow_err *err)
{
    struct ctl_http_parser p;
    struct tow_buf in;
    ctl_http_parser_init(&p);
    tow_buf_init(&in, 0);
    int rc = 0;
    for (bool done = false; rc == 0 && !done;) {
        size_t used, body_len;
        const char *body;
        enum ctl_http_event ev =
            ctl_http_next(&p, in.data ? in.data : "", in.len, &used, &body, &body_len);
        if (ev == CTL_HTTP_HEAD) {
            reply->status = p.status;
            reply->event_stream = p.event_stream;
            reply->retry_after = p.retry_after;
        } else if (ev == CTL_HTTP_BODY) {
            rc = take_body(s, reply, on_body, ctx, body, body_len, err);
        }
        tow_buf_shift(&in, used);
        if (rc == 0 && ev == CTL_HTTP_MORE) {
            char *room = tow_buf_room(&in, READ_BYTES);
            ssize_t n = room ? receive(s, fd, room, READ_BYTES, err)
                             : tow_fail(err, TOW_ENOMEM, "%s: out of memory", s->url);
            if (n > 0) in.len += (size_t)n;
            if (n < 0) rc = (int)n;
            if (n == 0) ev = ctl_http_closed(&p);
        }
        if (ev == CTL_HTTP_BAD) rc = tow_fail(err, TOW_EWIRE, "%s: %s", s->url, p.reason);
        done = ev == CTL_HTTP_END;
    }
    tow_buf_fini(&in);
    return rc;
}

int ctl_http_call(const struct ctl_server *s, const char *method, const char *path,
                  const struct tow_buf *body, ctl_http_on_body on_body, void *ctx,
                  struct ctl_reply *reply, struct tow_err *err)
{
    memset(reply, 0, sizeof *reply);
    tow_buf_init(&reply->body, CTL_HTTP_MAX_REPLY);
    struct tow_buf request;
    tow_buf_init(&request, 0);
    put_request(s, method, path, body, &request);
    int fd = -1;
    int rc = tow_buf_failed(&request) ? tow_fail(err, TOW_ENOMEM, "%s: out of memory", s->url)
                                      : connect_any(s, &fd, err);
    if (rc == 0) rc = send_all(s, fd, request.data, request.len, err);
    if (rc == 0) rc = read_reply(s, fd, on_body, ctx, reply, err);
    if (fd >= 0) close(fd);
    tow_buf_fini(&request);
    return rc;
}

void ctl_reply_fini(struct ctl_reply *reply)
{
    tow_buf_fini(&reply->body);
}
