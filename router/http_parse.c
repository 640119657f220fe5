/* router/http_parse.c - see http_parse.h.
 *
 *   START --request line--> HEADERS --empty line--> HEAD given
 *     ^                                                |
 *     |              +--------------+------------------+
 *     |           no body      LENGTH body           CHUNK_SIZE <--> CHUNK_DATA --> CHUNK_END
 *     |              |              |                     |0
 *     +---- END <----+--------------+------ TRAILERS <----+          any --refuse()--> BAD
 *
 * Heads, chunk sizes and trailers are looked at one whole line at a time: a line is judged when its
 * end is there, and only then, so that the way bytes were split cannot matter. A line that does not
 * end within its limit is refused at the limit.
 *
 * Rejected: http_parser and llhttp (docs/decisions/http-parser.md).
 */
#include "router/http_parse.h"

#include <string.h>
#include <strings.h>

enum {
    START,
    HEADERS,
    LENGTH,
    CHUNK_SIZE,
    CHUNK_DATA,
    CHUNK_END,
    TRAILERS,
    COMPLETE,
    REFUSED,
};

#define CHUNK_DIGITS   16
#define MAX_CHUNK_LINE (CHUNK_DIGITS + 1 + RTR_HTTP_MAX_EXT + 2)

static void start_request(struct rtr_http_parser *p)
{
    memset(&p->head, 0, sizeof p->head);
    p->state = START;
    p->empty_lines = 0;
    p->has_host = p->has_te = p->has_close = p->has_keep = p->has_expect = false;
    p->scanned = p->line_at = p->skipped = 0;
    p->left = p->body_seen = 0;
}

void rtr_http_parser_init(struct rtr_http_parser *p, uint32_t max_head, uint64_t max_body)
{
    memset(p, 0, sizeof *p);
    p->max_head = max_head;
    p->max_body = max_body;
    start_request(p);
}

bool rtr_http_in_request(const struct rtr_http_parser *p)
{
    return p->state != START || p->scanned > 0;
}

static enum rtr_http_event refuse(struct rtr_http_parser *p, int status, const char *reason)
{
    p->state = REFUSED;
    p->status = status;
    p->reason = reason;
    return RTR_HTTP_BAD;
}

/* RFC 9110 token characters. */
static bool is_token(unsigned char c)
{
    if ((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')) return true;
    return c != 0 && strchr("!#$%&'*+-.^_`|~", c) != NULL;
}

static bool is_host_char(unsigned char c)
{
    if ((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')) return true;
    return c != 0 && strchr("-._~!$&'()*+,;=:[]%", c) != NULL;
}

static bool same(const char *s, size_t n, const char *lower)
{
    return n == strlen(lower) && strncasecmp(s, lower, n) == 0;
}

/* The line that begins at p->line_at, when its end is within `limit` bytes of the start. 1: content
 * is [line_at, *end), the next line begins at *next. 0: not there yet. -1: refused. */
static int take_line(struct rtr_http_parser *p, const char *bytes, size_t n, size_t limit,
                     int too_long, size_t *end, size_t *next)
{
    size_t to = n < limit ? n : limit;
    const char *lf = p->scanned < to ? memchr(bytes + p->scanned, '\n', to - p->scanned) : NULL;
    if (!lf) {
        p->scanned = (uint32_t)to;
        if (n < limit) return 0;
        refuse(p, too_long,
               too_long == 414 ? "request target too long" : "header or line too long");
        return -1;
    }
    size_t at = (size_t)(lf - bytes);
    if (at == p->line_at || bytes[at - 1] != '\r') {
        refuse(p, 400, "line does not end in CR LF");
        return -1;
    }
    *end = at - 1;
    *next = at + 1;
    p->scanned = (uint32_t)*next;
    return 1;
}

static bool parse_target(struct rtr_http_parser *p, const char *bytes, size_t at, size_t end)
{
    if (end - at > RTR_HTTP_MAX_TARGET) {
        refuse(p, 414, "request target too long");
        return false;
    }
    for (size_t i = at; i < end; i++) {
        unsigned char c = (unsigned char)bytes[i];
        if (c <= 0x20 || c >= 0x7f || c == '#') {
            refuse(p, 400, "illegal character in the request target");
            return false;
        }
    }
    size_t path = at;
    if (bytes[at] != '/' && !(end - at == 1 && bytes[at] == '*')) {
        size_t skip = end - at > 7 && !strncasecmp(bytes + at, "http://", 7)    ? 7
                      : end - at > 8 && !strncasecmp(bytes + at, "https://", 8) ? 8
                                                                                : 0;
        path = at + skip;
        while (path < end && bytes[path] != '/' && bytes[path] != '?') path++;
        if (!skip || path == at + skip) {
            refuse(p, 400, "request target is neither a path nor an http URL");
            return false;
        }
    }
    const char *mark = memchr(bytes + path, '?', end - path);
    size_t path_end = mark ? (size_t)(mark - bytes) : end;
    p->head.path = (struct rtr_span){(uint32_t)path, (uint32_t)(path_end - path)};
    if (mark) {
        p->head.query = (struct rtr_span){(uint32_t)path_end + 1, (uint32_t)(end - path_end - 1)};
    }
    return true;
}

static bool parse_request_line(struct rtr_http_parser *p, const char *bytes, size_t at, size_t end)
{
    size_t i = at;
    while (i < end && is_token((unsigned char)bytes[i])) i++;
    if (i == at || i == end || bytes[i] != ' ') {
        refuse(p, 400, "malformed request line");
        return false;
    }
    p->head.method = (struct rtr_span){(uint32_t)at, (uint32_t)(i - at)};
    size_t target = ++i;
    while (i < end && bytes[i] != ' ') i++;
    if (i == target || i == end) {
        refuse(p, 400, "malformed request line");
        return false;
    }
    if (!parse_target(p, bytes, target, i)) return false;
    i++;
    bool is_http = end - i == 8 && !memcmp(bytes + i, "HTTP/", 5) && bytes[i + 5] >= '0' &&
                   bytes[i + 5] <= '9' && bytes[i + 6] == '.' && bytes[i + 7] >= '0' &&
                   bytes[i + 7] <= '9';
    if (!is_http) {
        refuse(p, 400, "malformed request line");
        return false;
    }
    if (bytes[i + 5] != '1' || bytes[i + 7] > '1') {
        refuse(p, 505, "only HTTP/1.1 and HTTP/1.0 are spoken here");
        return false;
    }
    p->head.minor = (uint8_t)(bytes[i + 7] - '0');
    return true;
}

static bool parse_length(struct rtr_http_parser *p, const char *s, size_t n)
{
    if (p->head.has_length) {
        refuse(p, 400, "more than one Content-Length");
        return false;
    }
    uint64_t v = 0;
    bool good = n >= 1 && n <= 18; /* 18 digits cannot overflow, and are 888 PiB */
    for (size_t i = 0; good && i < n; i++) {
        good = s[i] >= '0' && s[i] <= '9';
        v = v * 10 + (uint64_t)(s[i] - '0');
    }
    if (!good) {
        refuse(p, 400, "Content-Length is not a number");
        return false;
    }
    p->head.has_length = true;
    p->head.content_length = v;
    return true;
}

static bool parse_connection(struct rtr_http_parser *p, const char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t e = i;
        while (e < n && s[e] != ',') e++;
        size_t a = i, b = e;
        while (a < b && (s[a] == ' ' || s[a] == '\t')) a++;
        while (b > a && (s[b - 1] == ' ' || s[b - 1] == '\t')) b--;
        if (same(s + a, b - a, "close")) p->has_close = true;
        if (same(s + a, b - a, "keep-alive")) p->has_keep = true;
        i = e + 1;
    }
    return true;
}

/* Splits a field line; false and refused when it is not one. */
static bool split_field(struct rtr_http_parser *p, const char *bytes, size_t at, size_t end,
                        struct rtr_span *name, struct rtr_span *value)
{
    if (bytes[at] == ' ' || bytes[at] == '\t') {
        refuse(p, 400, "folded header line");
        return false;
    }
    size_t i = at;
    while (i < end && is_token((unsigned char)bytes[i])) i++;
    if (i == at || i == end || bytes[i] != ':') {
        refuse(p, 400, "malformed header name");
        return false;
    }
    *name = (struct rtr_span){(uint32_t)at, (uint32_t)(i - at)};
    size_t a = i + 1, b = end;
    for (size_t k = a; k < b; k++) {
        unsigned char c = (unsigned char)bytes[k];
        if ((c < 0x20 && c != '\t') || c == 0x7f) {
            refuse(p, 400, "control character in a header");
            return false;
        }
    }
    while (a < b && (bytes[a] == ' ' || bytes[a] == '\t')) a++;
    while (b > a && (bytes[b - 1] == ' ' || bytes[b - 1] == '\t')) b--;
    *value = (struct rtr_span){(uint32_t)a, (uint32_t)(b - a)};
    return true;
}

static bool parse_field(struct rtr_http_parser *p, const char *bytes, size_t at, size_t end)
{
    struct rtr_span name, value;
    if (!split_field(p, bytes, at, end, &name, &value)) return false;
    if (++p->head.n_headers > RTR_HTTP_MAX_HEADERS) {
        refuse(p, 431, "too many header lines");
        return false;
    }
    const char *k = bytes + name.at, *v = bytes + value.at;
    if (same(k, name.len, "content-length")) return parse_length(p, v, value.len);
    if (same(k, name.len, "connection")) return parse_connection(p, v, value.len);
    if (same(k, name.len, "host")) {
        bool good = !p->has_host;
        for (size_t i = 0; good && i < value.len; i++) good = is_host_char((unsigned char)v[i]);
        if (!good) refuse(p, 400, p->has_host ? "more than one Host" : "malformed Host");
        p->has_host = true;
        return good;
    }
    if (same(k, name.len, "transfer-encoding")) {
        if (p->has_te) {
            refuse(p, 400, "more than one Transfer-Encoding");
            return false;
        }
        p->has_te = true;
        p->head.chunked = same(v, value.len, "chunked");
        if (!p->head.chunked) refuse(p, 501, "the only transfer coding spoken here is chunked");
        return p->head.chunked;
    }
    if (same(k, name.len, "expect")) {
        p->has_expect = same(v, value.len, "100-continue");
        if (!p->has_expect) refuse(p, 417, "the only expectation known here is 100-continue");
        return p->has_expect;
    }
    if (same(k, name.len, "authorization")) {
        if (p->head.authorization.len) {
            refuse(p, 400, "more than one Authorization");
            return false;
        }
        p->head.authorization = value;
    } else if (same(k, name.len, "content-type")) {
        p->head.content_type = value;
    } else if (same(k, name.len, "content-encoding") && !same(v, value.len, "identity")) {
        refuse(p, 415, "compressed bodies are not taken");
        return false;
    }
    return true;
}

static enum rtr_http_event end_head(struct rtr_http_parser *p)
{
    struct rtr_http_head *h = &p->head;
    if (h->minor == 1 && !p->has_host) return refuse(p, 400, "missing Host");
    if (h->minor == 0 && p->has_te) return refuse(p, 400, "Transfer-Encoding in HTTP/1.0");
    if (p->has_te && h->has_length) {
        return refuse(p, 400, "both Content-Length and Transfer-Encoding");
    }
    if (h->content_length > p->max_body) return refuse(p, 413, "body larger than its limit");
    h->keep_alive = !p->has_close && (h->minor == 1 || p->has_keep);
    h->expect_continue = p->has_expect && h->minor == 1;
    p->state = h->chunked ? CHUNK_SIZE : h->content_length ? LENGTH : COMPLETE;
    p->left = h->content_length;
    p->scanned = p->line_at = 0;
    return RTR_HTTP_HEAD;
}

static enum rtr_http_event next_in_head(struct rtr_http_parser *p, const char *bytes, size_t n,
                                        size_t *used)
{
    for (;;) {
        size_t end, next;
        int rc = take_line(p, bytes, n, p->max_head, p->state == START ? 414 : 431, &end, &next);
        if (rc < 0) return RTR_HTTP_BAD;
        if (rc == 0) return RTR_HTTP_MORE;
        size_t at = p->line_at;
        p->line_at = (uint32_t)next;
        if (p->state == START) {
            if (at == end) { /* RFC 9112 2.2: one empty line before a request is overlooked */
                if (p->empty_lines++) return refuse(p, 400, "empty lines before the request");
                continue;
            }
            if (!parse_request_line(p, bytes, at, end)) return RTR_HTTP_BAD;
            p->state = HEADERS;
        } else if (at == end) {
            *used = next;
            return end_head(p);
        } else if (!parse_field(p, bytes, at, end)) {
            return RTR_HTTP_BAD;
        }
    }
}

static int hex(unsigned char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* The line with a chunk's size. 1 done, 0 more bytes, -1 refused. */
static int parse_chunk_size(struct rtr_http_parser *p, const char *bytes, size_t n, size_t *next)
{
    size_t end;
    int rc = take_line(p, bytes, n, MAX_CHUNK_LINE, 400, &end, next);
    if (rc <= 0) return rc;
    uint64_t size = 0;
    size_t i = 0;
    for (; i < end && hex((unsigned char)bytes[i]) >= 0; i++) {
        if (i == CHUNK_DIGITS) break;
        size = size << 4 | (uint64_t)hex((unsigned char)bytes[i]);
    }
    bool good = i > 0 && (i == end || bytes[i] == ';');
    for (size_t k = i; good && k < end; k++) {
        unsigned char c = (unsigned char)bytes[k];
        good = c >= 0x20 ? c != 0x7f : c == '\t';
    }
    if (!good) {
        refuse(p, 400, "malformed chunk size");
        return -1;
    }
    if (size > p->max_body - p->body_seen) {
        refuse(p, 413, "body larger than its limit");
        return -1;
    }
    p->body_seen += size;
    p->left = size;
    return 1;
}

enum rtr_http_event rtr_http_next(struct rtr_http_parser *p, const char *bytes, size_t n,
                                  size_t *used, const char **body, size_t *body_len)
{
    *used = *body_len = 0;
    *body = NULL;
    size_t at = 0; /* framing bytes of this call that are done with */
    for (;;) {
        const char *from = bytes + at;
        size_t have = n - at, next, end;
        switch (p->state) {
        case START:
            if (p->line_at == 0 && p->scanned == 0) start_request(p);
            /* fall through */
        case HEADERS: return next_in_head(p, bytes, n, used);
        case LENGTH:
        case CHUNK_DATA:
            if (!have) {
                *used = at;
                return RTR_HTTP_MORE;
            }
            *body = from;
            *body_len = p->left < have ? (size_t)p->left : have;
            *used = at + *body_len;
            p->left -= *body_len;
            if (!p->left) p->state = p->state == LENGTH ? COMPLETE : CHUNK_END;
            return RTR_HTTP_BODY;
        case CHUNK_SIZE: {
            int rc = parse_chunk_size(p, from, have, &next);
            *used = at;
            if (rc < 0) return RTR_HTTP_BAD;
            if (rc == 0) return RTR_HTTP_MORE;
            at += next;
            p->scanned = 0;
            p->state = p->left ? CHUNK_DATA : TRAILERS;
            break;
        }
        case CHUNK_END:
            *used = at;
            if (have >= 1 && from[0] != '\r') return refuse(p, 400, "chunk longer than its size");
            if (have >= 2 && from[1] != '\n') return refuse(p, 400, "chunk longer than its size");
            if (have < 2) return RTR_HTTP_MORE;
            at += 2;
            p->state = CHUNK_SIZE;
            break;
        case TRAILERS: {
            int rc = take_line(p, from, have, RTR_HTTP_MAX_TRAILERS - p->skipped, 431, &end, &next);
            *used = at;
            if (rc < 0) return RTR_HTTP_BAD;
            if (rc == 0) return RTR_HTTP_MORE;
            struct rtr_span name, value;
            if (end > 0 && !split_field(p, from, 0, end, &name, &value)) return RTR_HTTP_BAD;
            at += next;
            p->skipped += (uint32_t)next;
            p->scanned = 0;
            if (end == 0) p->state = COMPLETE;
            break;
        }
        case COMPLETE:
            *used = at;
            p->state = START; /* the head stays to be read until bytes of the next one come */
            p->scanned = p->line_at = 0;
            return RTR_HTTP_END;
        default: return RTR_HTTP_BAD;
        }
    }
}

const char *rtr_http_status_text(int status)
{
    switch (status) {
    case 200: return "OK";
    case 202: return "Accepted";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 409: return "Conflict";
    case 413: return "Content Too Large";
    case 414: return "URI Too Long";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 499: return "Client Closed Request";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 502: return "Bad Gateway";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    case 505: return "HTTP Version Not Supported";
    default: return "";
    }
}
