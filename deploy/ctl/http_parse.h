/* ctl/http_parse.h - HTTP/1.1 responses out of bytes: resumable, bounded, no I/O, no allocation.
 *
 * Use      Call ctl_http_next() with all bytes not yet used, drop *used of them, act on the event,
 *          call again; on MORE come back with more bytes behind the same ones. How the bytes were
 *          split never changes what comes out. When the server has closed, ctl_http_closed() says
 *          whether that was an end.
 * Rules    Content-Length, chunked, or until close. Two lengths, a length beside chunking, and
 *          other codings are refused: where the body ends must not be a guess.
 *          Informational responses (1xx) are skipped.
 */
#ifndef CTL_HTTP_PARSE_H
#define CTL_HTTP_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CTL_HTTP_MAX_LINE = 8192,
    CTL_HTTP_MAX_HEAD = 65536, /* bytes of status line, headers and trailers together */
};

enum ctl_http_event {
    CTL_HTTP_MORE,
    CTL_HTTP_HEAD, /* status and headers are known */
    CTL_HTTP_BODY, /* *body lies inside the *used bytes */
    CTL_HTTP_END,
    CTL_HTTP_BAD, /* reason says why; no byte after it may be believed */
};

struct ctl_http_parser {
    /* valid from HEAD on */
    int status;           /* 200 .. 999 */
    bool event_stream;    /* Content-Type: text/event-stream */
    uint32_t retry_after; /* seconds; 0 = not said */
    const char *reason;   /* after BAD: a literal */
    /* private */
    uint8_t state;
    bool has_length, chunked;
    uint32_t head_bytes;
    uint64_t left; /* of the body or of the chunk */
};

void ctl_http_parser_init(struct ctl_http_parser *p);
enum ctl_http_event ctl_http_next(struct ctl_http_parser *p, const char *bytes, size_t n,
                                  size_t *used, const char **body, size_t *body_len);
/* The server closed after all bytes were used: END where the body runs until close, else BAD. */
enum ctl_http_event ctl_http_closed(struct ctl_http_parser *p);

#endif
