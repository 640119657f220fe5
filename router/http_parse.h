/* router/http_parse.h - HTTP/1.x requests out of bytes: resumable, strict, no I/O, no allocation.
 *
 * Why      Where two programs disagree on where a request ends, bytes of a body run as a second
 *          request. So nothing ambiguous is ever guessed at: it is refused and the connection ends.
 * Use      Call rtr_http_next() with all bytes not yet used, drop *used of them, act on the event,
 *          call again; on MORE come back with more bytes behind the same ones. How the bytes were
 *          split never changes what comes out.
 * Rules    docs/http-api.md, "Framing", lists what is refused and with which status.
 */
#ifndef RTR_HTTP_PARSE_H
#define RTR_HTTP_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes inside the head, as offsets from its first byte. */
struct rtr_span {
    uint32_t at, len;
};

#define RTR_HTTP_MAX_HEADERS  100
#define RTR_HTTP_MAX_TARGET   8192 /* bytes of the request target */
#define RTR_HTTP_MAX_TRAILERS 8192 /* bytes of all trailer lines */
#define RTR_HTTP_MAX_EXT      256  /* bytes of one chunk's extensions */

#define RTR_HTTP_MAX_REASON 256

enum rtr_http_event {
    RTR_HTTP_MORE, /* nothing to do until more bytes are there */
    RTR_HTTP_HEAD, /* the head is complete: the *used bytes; see struct rtr_http_head */
    RTR_HTTP_BODY, /* *body lies inside the *used bytes */
    RTR_HTTP_END,  /* the request is complete; the next one may follow */
    RTR_HTTP_BAD   /* refused: status and reason; no byte after it may be believed */
};

struct rtr_http_head {
    struct rtr_span method;        /* as sent: methods are case-sensitive */
    struct rtr_span path, query;   /* of the target; path begins with '/'; query without '?' */
    struct rtr_span authorization; /* len 0: none */
    struct rtr_span content_type;
    uint64_t content_length; /* 0 with chunked, and when there is no body */
    uint32_t n_headers;
    uint8_t minor;   /* HTTP/1.minor, 0 or 1 */
    bool has_length; /* a Content-Length line, also one that says 0 */
    bool chunked;
    bool keep_alive;      /* what version and Connection say together */
    bool expect_continue; /* the client waits for 100 before it sends the body */
};

struct rtr_http_parser {
    struct rtr_http_head head;        /* valid from HEAD until the next request's first line */
    uint64_t max_body;                /* bytes */
    uint32_t max_head;                /* bytes, request line to empty line */
    int status;                       /* after BAD: 400, 413, 414, 417, 431, 501, 505 */
    char reason[RTR_HTTP_MAX_REASON]; /* after BAD: field, value and limit; printable ASCII */
    /* private */
    uint8_t state, empty_lines;
    bool has_host, has_te, has_close, has_keep, has_expect;
    uint32_t scanned;   /* bytes from the start known to hold no line end */
    uint32_t line_at;   /* start of the line being read */
    uint32_t skipped;   /* trailer bytes so far */
    uint64_t left;      /* of the chunk or of the body */
    uint64_t body_seen; /* bytes of body given out or announced by chunk sizes */
};

void rtr_http_parser_init(struct rtr_http_parser *p, uint32_t max_head, uint64_t max_body);

enum rtr_http_event rtr_http_next(struct rtr_http_parser *p, const char *bytes, size_t n,
                                  size_t *used, const char **body, size_t *body_len);

/* True while a request has begun and is not complete. */
bool rtr_http_in_request(const struct rtr_http_parser *p);

/* "Bad Request"; "" when unknown; static. */
const char *rtr_http_status_text(int status);

#endif
