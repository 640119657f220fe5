/* router/http_conn.c - see http_conn.h.
 *
 *   READING --complete request--> RUNNING --reply, end_stream--> READING   (kept alive)
 *      |                             |                    +----> LINGER    (to be closed)
 *      +--refused, too slow--> LINGER +--abort, client gone--> CLOSING
 *   LINGER --all sent, then the client's FIN or 2 s--> CLOSING --on_closed--> freed
 *
 * Gone or half closed? Both show as FIN. What differs is the client's kernel: data sent to a socket
 * that was closed is answered with a reset. So after a FIN in mid-exchange we send something that
 * means nothing, an SSE comment inside a stream, `100 Continue` before the final head (RFC 9110
 * allows any number of 1xx), first after 400 ms, then ever more rarely, and look at the state of
 * the socket ten times a second. Streams that flow find out by their own writes. An HTTP/1.0 client
 * takes no 1xx and is believed to be there until the first byte of its answer.
 *
 * Linger: closing a socket with unread bytes resets it, which may destroy the answer under way; so
 * after the last answer we send FIN and read on for a while, into nothing.
 *
 * Rejected: a thread per connection (10,000 idle streams), and a write request per event (allocates
 * on the token path): a direct write is tried, and what the kernel does not take waits in one
 * buffer.
 */
#include "router/http_conn.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/net/listen.h"
#include "common/text/json.h"
#include "router/http_parse.h"

#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <uv.h>

#define READ_BYTES     65536 /* of one read; shared by all connections */
#define PIPELINE_BYTES 65536 /* kept unread behind a running exchange; then reading pauses */
#define EARLY_BODY     16384 /* a longer body is shown to on_head before it is read */
#define SWEEP_MS       100
#define PROBE_FIRST_MS 400
#define PROBE_MAX_MS   20000
#define LINGER_MS      2000
#define LINGER_BYTES   ((size_t)4 << 20)
#define KEEP_BUFFER    16384 /* a larger buffer is given back when it runs empty */
#define CONTINUE_LINE  "HTTP/1.1 100 Continue\r\n\r\n"

const struct rtr_http_limits rtr_http_defaults = {
    .max_connections = 16384,
    .max_head_bytes = 32768,
    .max_body_bytes = (uint64_t)16 << 20,
    .max_buffered_bytes = (uint64_t)512 << 20,
    .request_ms = 60000,
    .idle_ms = 75000,
    .max_unsent_bytes = 4u << 20,
    .stall_ms = 60000,
};

enum conn_state { READING, RUNNING, LINGER, CLOSING };

struct rtr_exchange { /* a connection with the exchange that runs on it */
    uv_tcp_t tcp;
    struct rtr_http *server; /* borrowed */
    struct tow_list link;    /* in server->conns */
    struct tow_list ready;   /* in server->ready while bytes wait to be looked at */
    enum conn_state state;
    struct rtr_http_parser parser;

    struct tow_buf in; /* received; the parser has used in_at bytes of it */
    size_t in_at;
    struct tow_buf head; /* bytes of the current request's head */
    struct rtr_http_head h;
    struct tow_buf body;
    void *user;

    struct tow_buf out;     /* to be written next */
    struct tow_buf sending; /* with libuv */
    uv_write_t write;
    uv_shutdown_t shutdown;
    size_t left;      /* of `sending`, not yet taken by the kernel, at the last sweep */
    uint64_t took_ms; /* when some of it was last taken */

    uint64_t since_ms; /* READING: of the first byte, or of the last answer; LINGER: the end */
    uint64_t probe_ms; /* when to probe next */
    uint32_t probe_gap_ms;
    size_t lingered;
    const char *stream_type, *filler;
    char *stream_headers; /* owned */

    bool reading;            /* uv_read_start is on */
    bool busy;               /* a uv_write is under way */
    bool eof;                /* the client's FIN was seen */
    bool in_bytes;           /* READING: a request has begun */
    bool in_head;            /* on_head runs */
    bool in_parse;           /* process() runs */
    bool is_stream, started; /* stream: begun; its head was written */
    bool last;               /* close after this answer */
    bool fin_sent;
    bool cut; /* we ended it: the client read too slowly */
};

struct rtr_http {
    uv_loop_t *loop;           /* borrowed */
    struct net_listen *listen; /* owned */
    uv_timer_t sweep;
    uv_idle_t idle;
    struct rtr_http_limits limits;
    struct rtr_http_handler handler;
    void *ctx; /* borrowed */
    struct tow_list conns, ready;
    struct rtr_http_stats stats;
    bool draining, closing;
    uint32_t open_handles; /* listen, sweep, idle and connections */
    void (*on_closed)(void *arg);
    void *on_closed_arg;
    char date[64];
    uint64_t date_s;
    char scratch[READ_BYTES];
};

static void process(struct rtr_exchange *x);
static void flush(struct rtr_exchange *x);

static uint64_t now_ms(const struct rtr_http *s)
{
    return uv_now(s->loop);
}

/* ---- life of a connection ---- */

static void handle_closed(struct rtr_http *s)
{
    if (--s->open_handles || !s->closing) return;
    void (*on_closed)(void *) = s->on_closed;
    void *arg = s->on_closed_arg;
    free(s);
    if (on_closed) on_closed(arg);
}

static void drop_body(struct rtr_exchange *x)
{
    x->server->stats.buffered -= x->body.len;
    tow_buf_fini(&x->body);
}

static void on_conn_closed(uv_handle_t *handle)
{
    struct rtr_exchange *x = handle->data;
    struct rtr_http *s = x->server;
    drop_body(x);
    tow_list_remove(&x->link);
    tow_list_remove(&x->ready);
    tow_buf_fini(&x->in);
    tow_buf_fini(&x->head);
    tow_buf_fini(&x->out);
    tow_buf_fini(&x->sending);
    free(x->stream_headers);
    s->stats.connections--;
    free(x);
    handle_closed(s);
}

/* The exchange's owner hears of it here, never inside one of its own calls. */
static void on_running_closed(uv_handle_t *handle)
{
    struct rtr_exchange *x = handle->data;
    struct rtr_http *s = x->server;
    s->stats.exchanges--;
    if (!x->cut && !s->closing) s->stats.client_gone++;
    s->handler.on_gone(s->ctx, x);
    on_conn_closed(handle);
}

static void close_conn(struct rtr_exchange *x)
{
    if (x->state == CLOSING) return;
    bool running = x->state == RUNNING;
    x->state = CLOSING;
    x->reading = false;
    uv_close((uv_handle_t *)&x->tcp, running ? on_running_closed : on_conn_closed);
}

static void on_shutdown(uv_shutdown_t *req, int status)
{
    struct rtr_exchange *x = req->data;
    if (status < 0) close_conn(x);
}

static void linger(struct rtr_exchange *x)
{
    struct rtr_http *s = x->server;
    if (x->state == CLOSING) return;
    x->state = LINGER;
    x->since_ms = now_ms(s) + LINGER_MS;
    if (x->busy || x->out.len) {
        x->since_ms = UINT64_MAX; /* set when all is sent; the stall limit watches meanwhile */
        return;
    }
    if (x->eof) {
        close_conn(x);
        return;
    }
    if (!x->fin_sent) {
        x->fin_sent = true;
        x->shutdown.data = x;
        if (uv_shutdown(&x->shutdown, (uv_stream_t *)&x->tcp, on_shutdown) < 0) close_conn(x);
    }
}

/* ---- reading ---- */

static void on_alloc(uv_handle_t *handle, size_t hint, uv_buf_t *buf)
{
    (void)hint;
    struct rtr_exchange *x = handle->data;
    *buf = uv_buf_init(x->server->scratch, READ_BYTES);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct rtr_exchange *x = stream->data;
    struct rtr_http *s = x->server;
    if (n == 0 || x->state == CLOSING) return;
    if (n == UV_EOF) {
        x->eof = true;
        x->reading = false;
        if (x->state == RUNNING) {
            x->probe_gap_ms = PROBE_FIRST_MS;
            x->probe_ms = now_ms(s) + x->probe_gap_ms;
        } else if (x->busy || x->out.len) {
            linger(x); /* answers are still on their way out */
        } else {
            close_conn(x);
        }
        return;
    }
    if (n < 0) {
        close_conn(x);
        return;
    }
    s->stats.bytes_in += (uint64_t)n;
    if (x->state == LINGER) {
        x->lingered += (size_t)n;
        if (x->lingered > LINGER_BYTES) close_conn(x);
        return;
    }
    tow_buf_put(&x->in, buf->base, (size_t)n);
    if (tow_buf_failed(&x->in)) {
        close_conn(x);
        return;
    }
    if (x->state == READING) {
        process(x);
    } else if (x->in.len - x->in_at >= PIPELINE_BYTES) {
        x->reading = false;
        uv_read_stop(stream);
    }
}

static void start_reading(struct rtr_exchange *x)
{
    if (x->reading || x->eof || x->state == CLOSING) return;
    if (uv_read_start((uv_stream_t *)&x->tcp, on_alloc, on_read) < 0) {
        close_conn(x);
        return;
    }
    x->reading = true;
}

static void on_idle(uv_idle_t *idle)
{
    struct rtr_http *s = idle->data;
    struct tow_list now;
    tow_list_init(&now);
    while (!tow_list_empty(&s->ready)) {
        struct tow_list *n = s->ready.next;
        tow_list_remove(n);
        tow_list_append(&now, n);
    }
    while (!tow_list_empty(&now)) {
        struct rtr_exchange *x = TOW_CONTAINER(now.next, struct rtr_exchange, ready);
        tow_list_remove(&x->ready);
        if (x->state == READING) process(x);
    }
    if (tow_list_empty(&s->ready)) uv_idle_stop(idle);
}

/* Answers a request that is refused below the handler, and closes. */
static void refuse(struct rtr_exchange *x, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void refuse(struct rtr_exchange *x, int status, const char *fmt, ...)
{
    struct rtr_http *s = x->server;
    char reason[RTR_HTTP_MAX_REASON];
    struct tow_buf body;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(reason, sizeof reason, fmt, ap);
    va_end(ap);
    tow_buf_init(&body, 0);
    tow_buf_puts(&body, "{\"error\": {\"message\": ");
    json_put_string(&body, reason, strlen(reason));
    tow_buf_printf(&body, ", \"type\": \"%s\", \"param\": null, \"code\": \"%s\"}}",
                   status < 500 ? "invalid_request_error" : "server_error",
                   status == 413   ? "body_too_large"
                   : status == 408 ? "request_timeout"
                   : status == 503 ? "overloaded"
                                   : "bad_http");
    if (s->handler.on_refused) s->handler.on_refused(s->ctx, status);
    x->last = true;
    s->stats.exchanges++; /* reply() ends one */
    x->state = RUNNING;
    x->h.method = (struct rtr_span){0, 0};
    rtr_exchange_reply(x, status, "application/json", status == 503 ? "Retry-After: 1\r\n" : NULL,
                       body.data ? body.data : "", body.len);
    tow_buf_fini(&body);
}

/* Bodies of all requests together have a limit. */
static void refuse_buffered(struct rtr_exchange *x, uint64_t more)
{
    struct rtr_http *s = x->server;
    refuse(x, 503,
           "request bodies: at most %" PRIu64 " bytes at once, %" PRIu64
           " are held and this one has %" PRIu64,
           s->limits.max_buffered_bytes, (uint64_t)s->stats.buffered, more);
}

static void on_head(struct rtr_exchange *x, size_t used)
{
    struct rtr_http *s = x->server;
    x->h = x->parser.head;
    tow_buf_clear(&x->head);
    tow_buf_put(&x->head, x->in.data + x->in_at, used);
    if (tow_buf_failed(&x->head)) {
        close_conn(x);
        return;
    }
    bool has_body = x->h.chunked || x->h.content_length > 0;
    if (s->stats.buffered + x->h.content_length > s->limits.max_buffered_bytes) {
        refuse_buffered(x, x->h.content_length);
        return;
    }
    if (!has_body || !(x->h.expect_continue || x->h.content_length > EARLY_BODY)) return;
    if (s->handler.on_head) {
        x->in_head = true;
        x->state = RUNNING;
        s->stats.exchanges++;
        bool replied = s->handler.on_head(s->ctx, x);
        x->in_head = false;
        if (replied) return;
        s->stats.exchanges--;
        x->state = READING;
    }
    if (x->h.expect_continue && x->in.len - x->in_at == used) {
        tow_buf_puts(&x->out, CONTINUE_LINE);
        flush(x);
    }
}

static void process(struct rtr_exchange *x)
{
    struct rtr_http *s = x->server;
    x->in_parse = true;
    while (x->state == READING) {
        size_t used, body_len;
        const char *body;
        size_t have = x->in.len - x->in_at;
        enum rtr_http_event ev = rtr_http_next(&x->parser, have ? x->in.data + x->in_at : "", have,
                                               &used, &body, &body_len);
        if (ev == RTR_HTTP_HEAD) on_head(x, used);
        if (ev == RTR_HTTP_BODY) {
            tow_buf_put(&x->body, body, body_len);
            if (tow_buf_failed(&x->body)) {
                close_conn(x);
            } else {
                s->stats.buffered += body_len;
                if (s->stats.buffered > s->limits.max_buffered_bytes) {
                    refuse_buffered(x, x->body.len);
                }
            }
        }
        x->in_at += used;
        if (ev == RTR_HTTP_BAD) refuse(x, x->parser.status, "%s", x->parser.reason);
        if (ev == RTR_HTTP_END) {
            x->state = RUNNING;
            s->stats.exchanges++;
            if (x->eof) { /* its FIN came with the requests before this one */
                x->probe_gap_ms = PROBE_FIRST_MS;
                x->probe_ms = now_ms(s) + x->probe_gap_ms;
            }
            s->handler.on_request(s->ctx, x);
        }
        if (ev == RTR_HTTP_MORE) break;
    }
    x->in_parse = false;
    if (x->in_at == x->in.len) {
        if (x->in.cap > KEEP_BUFFER) {
            tow_buf_fini(&x->in);
        } else {
            tow_buf_clear(&x->in);
        }
        x->in_at = 0;
    } else if (x->in_at >= x->in.len / 2) {
        tow_buf_shift(&x->in, x->in_at);
        x->in_at = 0;
    }
    if (x->state != READING) return;
    bool begun = rtr_http_in_request(&x->parser);
    if (begun && !x->in_bytes) x->since_ms = now_ms(s);
    x->in_bytes = begun;
    if (x->eof) {
        linger(x); /* nothing complete will come any more */
    } else {
        start_reading(x);
    }
}

/* ---- writing ---- */

static void on_written(uv_write_t *req, int status)
{
    struct rtr_exchange *x = req->data;
    x->busy = false;
    if (x->sending.cap > KEEP_BUFFER) {
        tow_buf_fini(&x->sending);
    } else {
        tow_buf_clear(&x->sending);
    }
    if (x->state == CLOSING) return;
    if (status < 0) {
        close_conn(x);
        return;
    }
    x->took_ms = now_ms(x->server);
    flush(x);
    if (x->state == LINGER && !x->busy && !x->out.len) linger(x);
}

static void flush(struct rtr_exchange *x)
{
    struct rtr_http *s = x->server;
    if (x->state == CLOSING) return;
    if (tow_buf_failed(&x->out)) {
        close_conn(x);
        return;
    }
    if (x->busy) {
        if (x->is_stream && x->out.len + x->sending.len > s->limits.max_unsent_bytes) {
            s->stats.cut_off++;
            x->cut = true;
            tow_info("http: client reads too slowly: %zu bytes unsent, at most %u; cut off",
                     x->out.len + x->sending.len, s->limits.max_unsent_bytes);
            close_conn(x);
        }
        return;
    }
    if (!x->out.len) return;
    uv_buf_t buf = uv_buf_init(x->out.data, (unsigned)x->out.len);
    int n = uv_try_write((uv_stream_t *)&x->tcp, &buf, 1);
    if (n < 0 && n != UV_EAGAIN && n != UV_ENOSYS) {
        close_conn(x);
        return;
    }
    s->stats.bytes_out += x->out.len;
    size_t done = n > 0 ? (size_t)n : 0;
    if (done == x->out.len) {
        if (x->out.cap > KEEP_BUFFER) {
            tow_buf_fini(&x->out);
        } else {
            tow_buf_clear(&x->out);
        }
        return;
    }
    struct tow_buf swap = x->sending;
    x->sending = x->out;
    x->out = swap;
    buf = uv_buf_init(x->sending.data + done, (unsigned)(x->sending.len - done));
    x->write.data = x;
    x->busy = true;
    x->took_ms = now_ms(s);
    if (uv_write(&x->write, (uv_stream_t *)&x->tcp, &buf, 1, on_written) < 0) {
        x->busy = false;
        close_conn(x);
    }
}

static const char *date_now(struct rtr_http *s)
{
    uint64_t t = tow_wall_s();
    if (t != s->date_s) {
        time_t tt = (time_t)t;
        struct tm tm;
        gmtime_r(&tt, &tm);
        strftime(s->date, sizeof s->date, "%a, %d %b %Y %H:%M:%S GMT", &tm);
        s->date_s = t;
    }
    return s->date;
}

static void put_head(struct rtr_exchange *x, int status, const char *type, const char *headers)
{
    struct rtr_http *s = x->server;
    if (s->draining || !x->h.keep_alive || x->in_head) x->last = true;
    if (x->eof && x->in.len == x->in_at) x->last = true;
    tow_buf_printf(&x->out, "HTTP/1.1 %d %s\r\nDate: %s\r\nContent-Type: %s\r\n%s%s", status,
                   rtr_http_status_text(status), date_now(s), type, headers ? headers : "",
                   x->last           ? "Connection: close\r\n"
                   : x->h.minor == 0 ? "Connection: keep-alive\r\n"
                                     : "");
}

static void end_exchange(struct rtr_exchange *x)
{
    struct rtr_http *s = x->server;
    s->stats.exchanges--;
    x->user = NULL;
    x->is_stream = x->started = false;
    free(x->stream_headers);
    x->stream_headers = NULL;
    drop_body(x);
    x->state = READING;
    x->since_ms = now_ms(s);
    x->in_bytes = false;
    flush(x);
    if (x->state == CLOSING) return;
    if (x->last) {
        linger(x);
        return;
    }
    if (x->in_parse) return; /* process() goes on by itself */
    if (x->in.len > x->in_at || x->eof) {
        if (tow_list_empty(&x->ready)) tow_list_append(&s->ready, &x->ready);
        uv_idle_start(&s->idle, on_idle);
    } else {
        start_reading(x);
    }
}

void rtr_exchange_reply(struct rtr_exchange *x, int status, const char *content_type,
                        const char *headers, const void *body, size_t n)
{
    if (x->state != RUNNING) return; /* it is closing: on_gone will come */
    size_t method_len;
    const char *method = rtr_exchange_method(x, &method_len);
    put_head(x, status, content_type, headers);
    tow_buf_printf(&x->out, "Content-Length: %zu\r\n\r\n", n);
    if (!(method_len == 4 && !memcmp(method, "HEAD", 4))) tow_buf_put(&x->out, body, n);
    end_exchange(x);
}

void rtr_exchange_begin_stream(struct rtr_exchange *x, const char *content_type,
                               const char *headers, const char *filler)
{
    if (x->state != RUNNING || x->is_stream) return;
    x->is_stream = true;
    x->stream_type = content_type;
    x->filler = filler;
    x->stream_headers = headers ? strdup(headers) : NULL;
}

static void put_chunk(struct rtr_exchange *x, const void *bytes, size_t n)
{
    if (!x->started) {
        x->started = true;
        if (x->h.minor == 0) x->last = true; /* its end is the end of the connection */
        put_head(x, 200, x->stream_type, x->stream_headers);
        tow_buf_puts(&x->out, x->h.minor == 0 ? "\r\n" : "Transfer-Encoding: chunked\r\n\r\n");
    }
    if (x->h.minor == 0) {
        tow_buf_put(&x->out, bytes, n);
    } else if (n) {
        tow_buf_printf(&x->out, "%zx\r\n", n);
        tow_buf_put(&x->out, bytes, n);
        tow_buf_puts(&x->out, "\r\n");
    }
}

void rtr_exchange_write(struct rtr_exchange *x, const void *bytes, size_t n)
{
    if (x->state != RUNNING || !x->is_stream) return;
    put_chunk(x, bytes, n);
    flush(x);
}

void rtr_exchange_end_stream(struct rtr_exchange *x, const void *bytes, size_t n)
{
    if (x->state != RUNNING || !x->is_stream) return;
    put_chunk(x, bytes, n);
    if (x->h.minor) tow_buf_puts(&x->out, "0\r\n\r\n");
    end_exchange(x);
}

void rtr_exchange_abort(struct rtr_exchange *x)
{
    if (x->state != RUNNING) return;
    x->server->stats.exchanges--;
    x->state = READING;
    close_conn(x);
}

/* ---- time ---- */

static bool peer_is_gone(struct rtr_exchange *x)
{
    uv_os_fd_t fd;
    struct tcp_info info;
    socklen_t len = sizeof info;
    if (uv_fileno((uv_handle_t *)&x->tcp, &fd) < 0) return true;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) < 0) return false;
    return info.tcpi_state == TCP_CLOSE;
}

static void probe(struct rtr_exchange *x, uint64_t now)
{
    x->probe_gap_ms = x->probe_gap_ms * 2 < PROBE_MAX_MS ? x->probe_gap_ms * 2 : PROBE_MAX_MS;
    x->probe_ms = now + x->probe_gap_ms;
    if (x->started && x->filler) {
        put_chunk(x, x->filler, strlen(x->filler));
    } else if (!x->started && x->h.minor) {
        tow_buf_puts(&x->out, CONTINUE_LINE);
    }
    flush(x);
}

static void sweep_one(struct rtr_exchange *x, uint64_t now)
{
    struct rtr_http *s = x->server;
    if (x->state == CLOSING) return;
    if (x->busy) {
        size_t left = uv_stream_get_write_queue_size((uv_stream_t *)&x->tcp);
        if (left != x->left) { /* a new buffer in flight, or some of it taken */
            x->left = left;
            x->took_ms = now;
        } else if (now - x->took_ms > s->limits.stall_ms) {
            s->stats.cut_off++;
            x->cut = true;
            tow_info("http: client took nothing for %u ms; cut off", s->limits.stall_ms);
            close_conn(x);
            return;
        }
    }
    switch (x->state) {
    case READING:
        if (x->in_bytes && now - x->since_ms > s->limits.request_ms) {
            s->stats.timed_out++;
            refuse(x, 408, "request: must be complete within %u ms of its first byte, is not",
                   s->limits.request_ms);
        } else if (!x->in_bytes && !x->busy && now - x->since_ms > s->limits.idle_ms) {
            close_conn(x);
        }
        break;
    case RUNNING:
        if ((x->eof || !x->reading) && peer_is_gone(x)) {
            close_conn(x);
        } else if (x->eof && now >= x->probe_ms) {
            probe(x, now);
        }
        break;
    case LINGER:
        if (now > x->since_ms) close_conn(x);
        break;
    case CLOSING: break;
    }
}

static void on_sweep(uv_timer_t *timer)
{
    struct rtr_http *s = timer->data;
    uint64_t now = now_ms(s);
    TOW_LIST_EACH_SAFE (n, &s->conns) {
        sweep_one(TOW_CONTAINER(n, struct rtr_exchange, link), now);
    }
}

/* ---- server ---- */

static void on_client(void *arg)
{
    struct rtr_http *s = arg;
    /* Some more than the limit are let in, to be told;
     * what comes beyond those is closed at once. */
    bool full = s->stats.connections >= s->limits.max_connections;
    struct rtr_exchange *x = calloc(1, sizeof *x);
    if (!x) {
        net_listen_turn_away(s->listen);
        return;
    }
    x->server = s;
    uv_tcp_init(s->loop, &x->tcp);
    x->tcp.data = x;
    s->open_handles++;
    s->stats.connections++;
    s->stats.accepted++;
    tow_list_append(&s->conns, &x->link);
    tow_list_init(&x->ready);
    tow_buf_init(&x->in, 0);
    tow_buf_init(&x->head, 0);
    tow_buf_init(&x->body, (size_t)s->limits.max_body_bytes + 1);
    tow_buf_init(&x->out, 0);
    tow_buf_init(&x->sending, 0);
    rtr_http_parser_init(&x->parser, s->limits.max_head_bytes, s->limits.max_body_bytes);
    x->since_ms = now_ms(s);
    if (net_listen_accept(s->listen, &x->tcp) < 0) {
        close_conn(x);
        return;
    }
    uv_tcp_nodelay(&x->tcp, 1);
    uv_tcp_keepalive(&x->tcp, 1, 60);
    start_reading(x);
    if (full && x->state == READING) {
        s->stats.refused_full++;
        if (s->stats.connections > s->limits.max_connections + RTR_HTTP_TURN_AWAY) {
            close_conn(x);
        } else {
            refuse(x, 503, "connections: at most %u at once, all are taken",
                   s->limits.max_connections);
        }
    }
}

static void on_part_closed(uv_handle_t *handle)
{
    handle_closed(handle->data);
}

static void on_listen_closed(void *arg)
{
    handle_closed(arg);
}

int rtr_http_open(struct rtr_http **out, struct uv_loop_s *loop, const char *addr,
                  const struct rtr_http_limits *limits, const struct rtr_http_handler *handler,
                  void *ctx, struct tow_err *err)
{
    struct rtr_http *s = calloc(1, sizeof *s);
    if (!s) return tow_fail(err, TOW_ENOMEM, "--http %s: out of memory", addr);
    s->loop = loop;
    s->limits = *limits;
    s->handler = *handler;
    s->ctx = ctx;
    tow_list_init(&s->conns);
    tow_list_init(&s->ready);
    int rc = net_listen_open(&s->listen, loop, addr, "--http", on_client, s, err);
    if (rc < 0) {
        free(s);
        return rc;
    }
    s->open_handles = 3;
    uv_timer_init(loop, &s->sweep);
    uv_idle_init(loop, &s->idle);
    s->sweep.data = s->idle.data = s;
    uv_timer_start(&s->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
    *out = s;
    return 0;
}

uint16_t rtr_http_port(const struct rtr_http *s)
{
    return net_listen_port(s->listen);
}

void rtr_http_drain(struct rtr_http *s)
{
    s->draining = true;
}

void rtr_http_close(struct rtr_http *s, void (*on_closed)(void *arg), void *arg)
{
    if (s->closing) return;
    s->closing = true;
    s->on_closed = on_closed;
    s->on_closed_arg = arg;
    TOW_LIST_EACH_SAFE (n, &s->conns) {
        close_conn(TOW_CONTAINER(n, struct rtr_exchange, link));
    }
    net_listen_close(s->listen, on_listen_closed, s);
    uv_close((uv_handle_t *)&s->sweep, on_part_closed);
    uv_close((uv_handle_t *)&s->idle, on_part_closed);
}

const struct rtr_http_stats *rtr_http_peek_stats(const struct rtr_http *s)
{
    return &s->stats;
}

/* ---- the request ---- */

const char *rtr_exchange_method(const struct rtr_exchange *x, size_t *len)
{
    *len = x->h.method.len;
    return x->head.data + x->h.method.at;
}

const char *rtr_exchange_path(const struct rtr_exchange *x, size_t *len)
{
    *len = x->h.path.len;
    return x->head.data + x->h.path.at;
}

const char *rtr_exchange_authorization(const struct rtr_exchange *x, size_t *len)
{
    *len = x->h.authorization.len;
    return *len ? x->head.data + x->h.authorization.at : NULL;
}

const char *rtr_exchange_body(const struct rtr_exchange *x, size_t *len)
{
    *len = x->body.len;
    return x->body.data ? x->body.data : "";
}

char *rtr_exchange_take_body(struct rtr_exchange *x, size_t *len)
{
    *len = x->body.len;
    x->server->stats.buffered -= x->body.len;
    return tow_buf_take(&x->body);
}

void rtr_exchange_set_user(struct rtr_exchange *x, void *user)
{
    x->user = user;
}

void *rtr_exchange_user(const struct rtr_exchange *x)
{
    return x->user;
}
