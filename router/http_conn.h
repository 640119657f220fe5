/* router/http_conn.h - the HTTP server: connections, limits, time, and the way back to the client.
 *
 * Why      Everything about sockets is here, so that api.c sees whole requests and writes answers.
 * Owner    The router's loop thread.
 * Holds    One exchange at a time per connection; pipelined requests wait and are answered in
 *          order. An exchange ends exactly once: by reply(), end_stream() or abort() of the
 *          handler, or by on_gone. After that its pointer is dead. No callback comes inside a call
 *          of this header.
 * Client   A client that closed is told apart from one that only closed its writing side as
 *          http_conn.c describes; only the former is on_gone.
 */
#ifndef RTR_HTTP_CONN_H
#define RTR_HTTP_CONN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct rtr_http;
struct rtr_exchange;
struct tow_err;
struct uv_loop_s;

struct rtr_http_limits {
    uint32_t max_connections;    /* more are answered 503 and closed */
    uint32_t max_head_bytes;     /* request line and header lines */
    uint64_t max_body_bytes;     /* of one request */
    uint64_t max_buffered_bytes; /* bodies of all connections together; beyond: 503 */
    uint32_t request_ms;         /* first byte to last byte of a request */
    uint32_t idle_ms;            /* kept alive without a request */
    uint32_t max_unsent_bytes;   /* of a stream, per connection; beyond: cut off */
    uint32_t stall_ms;           /* unsent bytes and none taken by the client; then: cut off */
};
extern const struct rtr_http_limits rtr_http_defaults;
enum { RTR_HTTP_TURN_AWAY = 64 }; /* connections above the limit that are told so */

struct rtr_http_handler {
    /* The head of a request whose body is large or waits for 100-continue. May reply() at once and
     * return true: the body is then not read. */
    bool (*on_head)(void *ctx, struct rtr_exchange *x);
    /* The request is complete. Reply now or later. */
    void (*on_request)(void *ctx, struct rtr_exchange *x);
    /* The client has gone, or was cut off, before the exchange ended. */
    void (*on_gone)(void *ctx, struct rtr_exchange *x);
    /* A request that was refused below the handler has been answered; for counting. */
    void (*on_refused)(void *ctx, int status);
};

/* addr is "127.0.0.1:8000", "[::1]:8000" or with port 0 for any free one. handler and limits are
 * copied. A port in use is TOW_ECONFIG and names address and setting. */
int rtr_http_open(struct rtr_http **out, struct uv_loop_s *loop, const char *addr,
                  const struct rtr_http_limits *limits, const struct rtr_http_handler *handler,
                  void *ctx, struct tow_err *err);
uint16_t rtr_http_port(const struct rtr_http *s); /* the port really bound */
/* Drain: answers what is running, closes each connection after its answer and idle ones at once.
 * Still accepts, so that probes see 503 on /ready rather than a refused connection. */
void rtr_http_drain(struct rtr_http *s);
/* Closes everything; running exchanges get on_gone. on_closed comes once nothing is left; the
 * server is freed right after it. NULL on_closed is fine. */
void rtr_http_close(struct rtr_http *s, void (*on_closed)(void *arg), void *arg);

struct rtr_http_stats {
    uint64_t accepted, refused_full; /* connections */
    uint64_t bytes_in, bytes_out;
    uint64_t cut_off;     /* slow readers */
    uint64_t timed_out;   /* requests not complete in time */
    uint64_t client_gone; /* exchanges that ended by the client's close or reset */
    uint64_t buffered;    /* bytes of bodies now held */
    uint32_t connections; /* now */
    uint32_t exchanges;   /* now running */
};
const struct rtr_http_stats *rtr_http_peek_stats(const struct rtr_http *s);

/* ---- the request; all borrowed until the exchange ends ---- */
const char *rtr_exchange_method(const struct rtr_exchange *x, size_t *len);
const char *rtr_exchange_path(const struct rtr_exchange *x, size_t *len);          /* not decoded */
const char *rtr_exchange_authorization(const struct rtr_exchange *x, size_t *len); /* NULL: none */
const char *rtr_exchange_body(const struct rtr_exchange *x, size_t *len);
/* The body's memory moves to the caller, for free(). It no longer counts as buffered. */
char *rtr_exchange_take_body(struct rtr_exchange *x, size_t *len);
void rtr_exchange_set_user(struct rtr_exchange *x, void *user);
void *rtr_exchange_user(const struct rtr_exchange *x);

/* ---- the answer ---- */
/* A whole one; ends the exchange. headers: more header lines, each ending in CRLF, or NULL. Status,
 * length, date and connection are written here. HEAD gets the headers alone. */
void rtr_exchange_reply(struct rtr_exchange *x, int status, const char *content_type,
                        const char *headers, const void *body, size_t n);
/* A stream: 200 and the headers go out with the first write. filler is a literal that means nothing
 * to the reader (an SSE comment), sent to find out whether it is still there. */
void rtr_exchange_begin_stream(struct rtr_exchange *x, const char *content_type,
                               const char *headers, const char *filler);
void rtr_exchange_write(struct rtr_exchange *x, const void *bytes, size_t n);
/* The last bytes, and the end of the exchange. They may be many: nothing follows them, so they
 * count against no limit, and a client that takes none of them is cut off in time. */
void rtr_exchange_end_stream(struct rtr_exchange *x, const void *bytes, size_t n);
/* Ends the exchange by closing the connection: a stream that broke must not look complete. */
void rtr_exchange_abort(struct rtr_exchange *x);

#endif
