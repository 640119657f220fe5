/* net/status.c - the smallest HTTP server that a probe and a scraper can talk to.
 *
 * How      Read until the blank line, answer once, close. The request head lives in the connection (4
 *          KiB); one timer per connection bounds the whole exchange, however it drips.
 * Rejected The router's HTTP code: it is made for bodies, streams and keep-alive, and lives in a program.
 */
#include "common/net/status.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/list.h"
#include "common/net/loop.h"

#include <arpa/inet.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

enum {
    HEAD_MAX = 4096,
    CONNECTIONS_MAX = 64,
    EXCHANGE_MS = 10000,
    ANSWER_MAX = 1 << 20,
    BACKLOG = 64
};

struct net_status {
    uv_tcp_t tcp;
    struct net_loop *loop; /* borrowed */
    struct net_status_hooks hooks;
    struct tow_list connections;
    uint32_t n_connections;
    uint16_t port;
    bool closing;
};

struct connection {
    uv_tcp_t tcp;
    uv_timer_t timer;
    uv_write_t write;
    struct net_status *status;
    struct tow_list node;
    struct tow_buf answer;
    unsigned n_handles; /* not closed yet */
    bool closing, answered;
    size_t have;
    char head[HEAD_MAX + 1];
};

static void maybe_free(struct net_status *s)
{
    if (!s->closing || s->n_connections > 0 || s->tcp.data) return;
    net_loop_hold(s->loop, -1);
    free(s);
}

static void on_handle_closed(uv_handle_t *uv)
{
    struct connection *c = uv->data;
    if (--c->n_handles > 0) return;
    struct net_status *s = c->status;
    tow_list_remove(&c->node);
    s->n_connections--;
    tow_buf_fini(&c->answer);
    free(c);
    maybe_free(s);
}

static void drop(struct connection *c)
{
    if (c->closing) return;
    c->closing = true;
    uv_close((uv_handle_t *)&c->tcp, on_handle_closed);
    uv_close((uv_handle_t *)&c->timer, on_handle_closed);
}

static void on_late(uv_timer_t *t)
{
    drop(t->data);
}

static void on_written(uv_write_t *w, int rc)
{
    (void)rc;
    drop(w->data);
}

static const char *reason_of(int status)
{
    switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 431: return "Request Header Fields Too Large";
    case 503: return "Service Unavailable";
    default: return "Internal Server Error";
    }
}

static void answer(struct connection *c, int status, const char *type, const struct tow_buf *body,
                   bool head_only)
{
    c->answered = true;
    uv_read_stop((uv_stream_t *)&c->tcp);
    tow_buf_printf(&c->answer,
                   "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n%s"
                   "Connection: close\r\n\r\n",
                   status, reason_of(status), type, body->len,
                   status == 405 ? "Allow: GET, HEAD\r\n" : "");
    if (!head_only) tow_buf_put(&c->answer, body->data, body->len);
    if (tow_buf_failed(&c->answer)) {
        drop(c);
        return;
    }
    uv_buf_t b = uv_buf_init(c->answer.data, (unsigned)c->answer.len);
    c->write.data = c;
    if (uv_write(&c->write, (uv_stream_t *)&c->tcp, &b, 1, on_written) < 0) drop(c);
}

static void answer_text(struct connection *c, int status, const char *text)
{
    struct tow_buf body;
    tow_buf_init(&body, 0);
    tow_buf_printf(&body, "%s\n", text);
    answer(c, status, "text/plain; charset=utf-8", &body, false);
    tow_buf_fini(&body);
}

static void serve(struct connection *c, const char *path, size_t n, bool head_only)
{
    const struct net_status_hooks *h = &c->status->hooks;
    struct tow_buf body;
    tow_buf_init(&body, ANSWER_MAX - HEAD_MAX);
    int status = 200;
    const char *type = "text/plain; charset=utf-8";
    if (n == 7 && memcmp(path, "/health", n) == 0) {
        status = h->health(h->arg, &body);
    } else if (n == 6 && memcmp(path, "/ready", n) == 0) {
        status = h->ready(h->arg, &body);
    } else if (n == 8 && memcmp(path, "/metrics", n) == 0) {
        h->metrics(h->arg, &body);
        type = "text/plain; version=0.0.4; charset=utf-8";
    } else {
        status = 404;
        tow_buf_puts(&body, "not found; there are /health, /ready and /metrics\n");
    }
    if (tow_buf_failed(&body)) {
        tow_buf_clear(&body);
        status = 500;
    }
    answer(c, status, type, &body, head_only);
    tow_buf_fini(&body);
}

static bool is_token(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (s[i] == '\0' || !strchr("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                    "abcdefghijklmnopqrstuvwxyz",
                                    s[i]))
            return false;
    return n > 0;
}

/* Every field line is name ":" value; a folded line or a body is refused, and so is a second Host. */
static bool fields_ok(const char *p, const char *end, bool needs_host)
{
    int hosts = 0;
    while (p < end) {
        const char *eol = memmem(p, (size_t)(end - p), "\r\n", 2);
        if (!eol) return false;
        const char *colon = memchr(p, ':', (size_t)(eol - p));
        if (!colon || !is_token(p, (size_t)(colon - p))) return false;
        for (const char *v = colon + 1; v < eol; v++)
            if (((unsigned char)*v < 0x20 && *v != '\t') || *v == 0x7f) return false;
        size_t n = (size_t)(colon - p);
        if (n == 4 && strncasecmp(p, "Host", n) == 0) hosts++;
        if (n == 17 && strncasecmp(p, "Transfer-Encoding", n) == 0) return false;
        if (n == 14 && strncasecmp(p, "Content-Length", n) == 0) {
            const char *v = colon + 1;
            while (v < eol && (*v == ' ' || *v == '\t' || *v == '0')) v++;
            if (v != eol) return false; /* a body */
        }
        p = eol + 2;
    }
    return hosts == 1 || (hosts == 0 && !needs_host);
}

/* head[0, n) ends with the blank line. */
static void on_request(struct connection *c, size_t n)
{
    const char *head = c->head, *eol = memmem(head, n, "\r\n", 2);
    const char *sp = memchr(head, ' ', (size_t)(eol - head));
    const char *sp2 = sp ? memchr(sp + 1, ' ', (size_t)(eol - sp - 1)) : NULL;
    if (!sp2 || !is_token(head, (size_t)(sp - head)) || sp[1] != '/' || eol - sp2 != 9 ||
        (memcmp(sp2 + 1, "HTTP/1.1", 8) != 0 && memcmp(sp2 + 1, "HTTP/1.0", 8) != 0) ||
        !fields_ok(eol + 2, head + n - 2, sp2[8] == '1')) {
        answer_text(c, 400, "malformed request");
        return;
    }
    size_t method = (size_t)(sp - head);
    bool get = method == 3 && memcmp(head, "GET", 3) == 0;
    bool head_only = method == 4 && memcmp(head, "HEAD", 4) == 0;
    if (!get && !head_only) {
        answer_text(c, 405, "only GET and HEAD");
        return;
    }
    const char *path = sp + 1;
    size_t path_bytes = (size_t)(sp2 - path);
    const char *query = memchr(path, '?', path_bytes);
    serve(c, path, query ? (size_t)(query - path) : path_bytes, head_only);
}

static void on_alloc(uv_handle_t *uv, size_t suggested, uv_buf_t *out)
{
    struct connection *c = uv->data;
    (void)suggested;
    *out = uv_buf_init(c->head + c->have, (unsigned)(HEAD_MAX - c->have));
}

static void on_read(uv_stream_t *uv, ssize_t n, const uv_buf_t *buf)
{
    struct connection *c = uv->data;
    (void)buf;
    if (n < 0 && n != UV_ENOBUFS) {
        drop(c);
        return;
    }
    if (n > 0) c->have += (size_t)n;
    const char *blank = memmem(c->head, c->have, "\r\n\r\n", 4);
    if (blank)
        on_request(c, (size_t)(blank - c->head) + 4);
    else if (c->have == HEAD_MAX)
        answer_text(c, 431, "request head above 4096 bytes");
}

static void on_connection(uv_stream_t *uv, int rc)
{
    struct net_status *s = uv->data;
    if (rc < 0) return;
    struct connection *c = calloc(1, sizeof *c);
    if (!c) return;
    c->status = s;
    tow_buf_init(&c->answer, ANSWER_MAX);
    uv_tcp_init(uv->loop, &c->tcp);
    uv_timer_init(uv->loop, &c->timer);
    c->tcp.data = c->timer.data = c;
    c->n_handles = 2;
    tow_list_append(&s->connections, &c->node);
    s->n_connections++;
    if (uv_accept(uv, (uv_stream_t *)&c->tcp) < 0 || s->n_connections > CONNECTIONS_MAX) {
        drop(c);
        return;
    }
    uv_timer_start(&c->timer, on_late, EXCHANGE_MS, 0);
    if (uv_read_start((uv_stream_t *)&c->tcp, on_alloc, on_read) < 0) drop(c);
}

static int parse_addr(const char *addr, struct sockaddr_storage *out, struct tow_err *err)
{
    char host[64];
    const char *colon = strrchr(addr, ':');
    char *end = NULL;
    unsigned long port = colon && colon[1] ? strtoul(colon + 1, &end, 10) : 70000;
    size_t n = colon ? (size_t)(colon - addr) : 0;
    if (!end || *end || port > 65535 || n >= sizeof host || strspn(colon + 1, "0123456789") > 5)
        goto bad;
    memcpy(host, addr, n);
    host[n] = '\0';
    int rc;
    if (n >= 2 && host[0] == '[' && host[n - 1] == ']') {
        host[n - 1] = '\0';
        rc = uv_ip6_addr(host + 1, (int)port, (struct sockaddr_in6 *)out);
    } else {
        if (strcmp(host, "localhost") == 0) snprintf(host, sizeof host, "127.0.0.1");
        rc = uv_ip4_addr(n ? host : "127.0.0.1", (int)port, (struct sockaddr_in *)out);
    }
    if (rc == 0) return 0;
bad:
    return tow_fail(err, TOW_ECONFIG,
                    "--status %s: an address and port are needed, as 127.0.0.1:8001 or [::1]:8001",
                    addr);
}

static void on_listener_closed(uv_handle_t *uv)
{
    struct net_status *s = uv->data;
    uv->data = NULL;
    maybe_free(s);
}

int net_status_open(struct net_status **out, struct net_loop *loop, const char *addr,
                    const struct net_status_hooks *hooks, struct tow_err *err)
{
    struct sockaddr_storage sa = {0};
    int rc = parse_addr(addr, &sa, err);
    if (rc < 0) return rc;
    struct net_status *s = calloc(1, sizeof *s);
    if (!s) return tow_fail(err, TOW_ENOMEM, "--status %s: no memory", addr);
    s->loop = loop;
    s->hooks = *hooks;
    tow_list_init(&s->connections);
    uv_tcp_init(net_loop_uv(loop), &s->tcp);
    s->tcp.data = s;
    net_loop_hold(loop, 1);
    rc = uv_tcp_bind(&s->tcp, (struct sockaddr *)&sa, 0);
    if (rc == 0) rc = uv_listen((uv_stream_t *)&s->tcp, BACKLOG, on_connection);
    if (rc == 0) {
        int n = sizeof sa;
        rc = uv_tcp_getsockname(&s->tcp, (struct sockaddr *)&sa, &n);
    }
    if (rc < 0) {
        net_status_close(s);
        return tow_fail(err, TOW_ECONFIG, "--status %s: cannot listen: %s", addr, uv_strerror(rc));
    }
    s->port = ntohs(sa.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&sa)->sin6_port
                                             : ((struct sockaddr_in *)&sa)->sin_port);
    *out = s;
    return 0;
}

uint16_t net_status_port(const struct net_status *s)
{
    return s->port;
}

void net_status_close(struct net_status *s)
{
    if (!s || s->closing) return;
    s->closing = true;
    uv_close((uv_handle_t *)&s->tcp, on_listener_closed);
    TOW_LIST_EACH (n, &s->connections) drop(TOW_CONTAINER(n, struct connection, node));
}
