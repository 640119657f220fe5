/* net/status.c - the smallest HTTP server that a probe and a scraper can talk to.
 *
 * How      Read until the blank line, answer once, close. The request head lives in the connection
 *          (4 KiB); one timer per connection bounds the whole exchange, however it drips.
 * Rejected The router's HTTP code: it is made for bodies, streams and keep-alive, and lives in a
 *          program.
 */
#include "common/net/status.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/list.h"
#include "common/net/listen.h"
#include "common/net/loop.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

enum { HEAD_MAX = 4096, CONNECTIONS_MAX = 64, EXCHANGE_MS = 10000, ANSWER_MAX = 1 << 20 };

struct net_status {
    struct net_listen *listen; /* owned; NULL once closed */
    struct net_loop *loop;     /* borrowed */
    struct net_status_hooks hooks;
    struct tow_list connections;
    uint32_t n_connections;
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
    if (!s->closing || s->n_connections > 0 || s->listen) return;
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

/* Every field line is name ":" value; a folded line or a body is refused,
 * and so is a second Host. */
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

static void on_client(void *arg)
{
    struct net_status *s = arg;
    struct connection *c = calloc(1, sizeof *c);
    if (!c) {
        net_listen_turn_away(s->listen);
        return;
    }
    uv_loop_t *loop = net_loop_uv(s->loop);
    c->status = s;
    tow_buf_init(&c->answer, ANSWER_MAX);
    uv_tcp_init(loop, &c->tcp);
    uv_timer_init(loop, &c->timer);
    c->tcp.data = c->timer.data = c;
    c->n_handles = 2;
    tow_list_append(&s->connections, &c->node);
    s->n_connections++;
    if (net_listen_accept(s->listen, &c->tcp) < 0 || s->n_connections > CONNECTIONS_MAX) {
        drop(c);
        return;
    }
    uv_timer_start(&c->timer, on_late, EXCHANGE_MS, 0);
    if (uv_read_start((uv_stream_t *)&c->tcp, on_alloc, on_read) < 0) drop(c);
}

static void on_listen_closed(void *arg)
{
    struct net_status *s = arg;
    s->listen = NULL;
    maybe_free(s);
}

int net_status_open(struct net_status **out, struct net_loop *loop, const char *addr,
                    const struct net_status_hooks *hooks, struct tow_err *err)
{
    struct net_status *s = calloc(1, sizeof *s);
    if (!s) return tow_fail(err, TOW_ENOMEM, "--status %s: out of memory", addr);
    s->loop = loop;
    s->hooks = *hooks;
    tow_list_init(&s->connections);
    int rc = net_listen_open(&s->listen, net_loop_uv(loop), addr, "--status", on_client, s, err);
    if (rc < 0) {
        free(s);
        return rc;
    }
    net_loop_hold(loop, 1);
    *out = s;
    return 0;
}

uint16_t net_status_port(const struct net_status *s)
{
    return net_listen_port(s->listen);
}

void net_status_close(struct net_status *s)
{
    if (!s || s->closing) return;
    s->closing = true;
    net_listen_close(s->listen, on_listen_closed, s);
    TOW_LIST_EACH (n, &s->connections) drop(TOW_CONTAINER(n, struct connection, node));
}
