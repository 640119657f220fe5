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

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
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

#define SHOWN          32 /* bytes of a client that a reason quotes */
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

static enum rtr_http_event refuse(struct rtr_http_parser *p, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static enum rtr_http_event refuse(struct rtr_http_parser *p, int status, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p->reason, sizeof p->reason, fmt, ap);
    va_end(ap);
    p->state = REFUSED;
    p->status = status;
    return RTR_HTTP_BAD;
}

/* Bytes of a client as a reason quotes them: in quotes, at most SHOWN, escaped to printable
 * ASCII. */
struct shown {
    char text[4 * SHOWN + 6];
};
static struct shown show(const char *s, size_t n)
{
    struct shown out;
    size_t k = 0;
    out.text[k++] = '"';
    for (size_t i = 0; i < n && i < SHOWN; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c < 0x7f && c != '"' && c != '\\')
            out.text[k++] = (char)c;
        else
            k += (size_t)snprintf(out.text + k, 5, "\\x%02x", c);
    }
    snprintf(out.text + k, 5, n > SHOWN ? "\"..." : "\"");
    return out;
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

/* Headers that carry secrets, however they were spelt: nothing behind the name is ever quoted. The
 * bytes up to the end of such a name when the line begins with one, else 0. */
static size_t secret_name_len(const char *line, size_t n)
{
    static const char *const names[] = {"authorization", "proxy-authorization", "cookie",
                                        "set-cookie",    "x-api-key",           "api-key"};
    size_t at = 0;
    while (at < n && !is_token((unsigned char)line[at])) at++;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const size_t len = strlen(names[i]);
        if (n - at >= len && strncasecmp(line + at, names[i], len) == 0) return at + len;
    }
    return 0;
}

/* Bytes of a line that may be quoted: its name. A line that begins with a blank goes on with the
 * value of the one before. */
static size_t name_len(const char *line, size_t n)
{
    const size_t secret = secret_name_len(line, n);
    if (n > 0 && (line[0] == ' ' || line[0] == '\t')) return 0;
    if (secret) return secret;
    const char *colon = memchr(line, ':', n);
    return colon ? (size_t)(colon - line) : n;
}

/* The line that begins at p->line_at, when its end is within `limit` bytes of the start. 1: content
 * is [line_at, *end), the next line begins at *next. 0: not there yet. -1: refused; a line without
 * an end within the limit with `too_long`, and `what` says what the limit is of. */
static int take_line(struct rtr_http_parser *p, const char *bytes, size_t n, size_t limit,
                     int too_long, const char *what, size_t *end, size_t *next)
{
    size_t to = n < limit ? n : limit;
    const char *lf = p->scanned < to ? memchr(bytes + p->scanned, '\n', to - p->scanned) : NULL;
    if (!lf) {
        p->scanned = (uint32_t)to;
        if (n < limit) return 0;
        const char *line = bytes + p->line_at;
        refuse(p, too_long, "%s must end within %zu bytes, is longer: line %s does not end there",
               what, limit, show(line, name_len(line, to - p->line_at)).text);
        return -1;
    }
    size_t at = (size_t)(lf - bytes);
    if (at == p->line_at || bytes[at - 1] != '\r') {
        refuse(p, 400, "every line must end in CR LF, %s does not",
               show(bytes + p->line_at, name_len(bytes + p->line_at, at - p->line_at)).text);
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
        refuse(p, 414, "request target: must have at most %d bytes, has %zu, %s",
               RTR_HTTP_MAX_TARGET, end - at, show(bytes + at, end - at).text);
        return false;
    }
    for (size_t i = at; i < end; i++) {
        unsigned char c = (unsigned char)bytes[i];
        if (c <= 0x20 || c >= 0x7f || c == '#') {
            refuse(p, 400, "request target: must be printable ASCII without #, has %s at byte %zu",
                   show(bytes + i, 1).text, i - at);
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
            refuse(p, 400, "request target: must be a path or an http URL, is %s",
                   show(bytes + at, end - at).text);
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

static bool refuse_request_line(struct rtr_http_parser *p, const char *line, size_t n)
{
    const size_t secret = secret_name_len(line, n);
    refuse(p, 400, "request line: must be METHOD TARGET HTTP/1.1, is %s",
           show(line, secret ? secret : n).text);
    return false;
}

static bool parse_request_line(struct rtr_http_parser *p, const char *bytes, size_t at, size_t end)
{
    size_t i = at;
    if (secret_name_len(bytes + at, end - at)) return refuse_request_line(p, bytes + at, end - at);
    while (i < end && is_token((unsigned char)bytes[i])) i++;
    if (i == at || i == end || bytes[i] != ' ') {
        return refuse_request_line(p, bytes + at, end - at);
    }
    p->head.method = (struct rtr_span){(uint32_t)at, (uint32_t)(i - at)};
    size_t target = ++i;
    while (i < end && bytes[i] != ' ') i++;
    if (i == target || i == end) {
        return refuse_request_line(p, bytes + at, end - at);
    }
    if (!parse_target(p, bytes, target, i)) return false;
    i++;
    bool is_http = end - i == 8 && !memcmp(bytes + i, "HTTP/", 5) && bytes[i + 5] >= '0' &&
                   bytes[i + 5] <= '9' && bytes[i + 6] == '.' && bytes[i + 7] >= '0' &&
                   bytes[i + 7] <= '9';
    if (!is_http) {
        return refuse_request_line(p, bytes + at, end - at);
    }
    if (bytes[i + 5] != '1' || bytes[i + 7] > '1') {
        refuse(p, 505, "version: must be HTTP/1.1 or HTTP/1.0, is %s", show(bytes + i, 8).text);
        return false;
    }
    p->head.minor = (uint8_t)(bytes[i + 7] - '0');
    return true;
}

static bool parse_length(struct rtr_http_parser *p, const char *s, size_t n)
{
    if (p->head.has_length) {
        refuse(p, 400, "Content-Length: must stand once, stands again with %s", show(s, n).text);
        return false;
    }
    uint64_t v = 0;
    bool good = n >= 1 && n <= 18; /* 18 digits cannot overflow, and are 888 PiB */
    for (size_t i = 0; good && i < n; i++) {
        good = s[i] >= '0' && s[i] <= '9';
        v = v * 10 + (uint64_t)(s[i] - '0');
    }
    if (!good) {
        refuse(p, 400, "Content-Length: must be 1 to 18 decimal digits, is %s", show(s, n).text);
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
        refuse(p, 400, "header: must not begin with a blank (a folded line)");
        return false;
    }
    size_t i = at;
    while (i < end && is_token((unsigned char)bytes[i])) i++;
    if (i == at || i == end || bytes[i] != ':') {
        refuse(p, 400, "header: must begin with a name and a colon without blanks, is %s",
               show(bytes + at, name_len(bytes + at, end - at)).text);
        return false;
    }
    *name = (struct rtr_span){(uint32_t)at, (uint32_t)(i - at)};
    size_t a = i + 1, b = end;
    for (size_t k = a; k < b; k++) {
        unsigned char c = (unsigned char)bytes[k];
        if ((c < 0x20 && c != '\t') || c == 0x7f) {
            refuse(p, 400, "header %s: must have no control characters, has %s",
                   show(bytes + at, i - at).text, show(bytes + k, 1).text);
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
        refuse(p, 431, "header: at most %d lines, line %u is %s", RTR_HTTP_MAX_HEADERS,
               p->head.n_headers, show(bytes + name.at, name.len).text);
        return false;
    }
    const char *k = bytes + name.at, *v = bytes + value.at;
    if (same(k, name.len, "content-length")) return parse_length(p, v, value.len);
    if (same(k, name.len, "connection")) return parse_connection(p, v, value.len);
    if (same(k, name.len, "host")) {
        bool good = !p->has_host;
        for (size_t i = 0; good && i < value.len; i++) good = is_host_char((unsigned char)v[i]);
        if (!good)
            refuse(p, 400,
                   p->has_host ? "Host: must stand once, stands again with %s"
                               : "Host: must be a name or number and a port, is %s",
                   show(v, value.len).text);
        p->has_host = true;
        return good;
    }
    if (same(k, name.len, "transfer-encoding")) {
        if (p->has_te) {
            refuse(p, 400, "Transfer-Encoding: must stand once, stands again with %s",
                   show(v, value.len).text);
            return false;
        }
        p->has_te = true;
        p->head.chunked = same(v, value.len, "chunked");
        if (!p->head.chunked)
            refuse(p, 501, "Transfer-Encoding: must be chunked, is %s", show(v, value.len).text);
        return p->head.chunked;
    }
    if (same(k, name.len, "expect")) {
        p->has_expect = same(v, value.len, "100-continue");
        if (!p->has_expect)
            refuse(p, 417, "Expect: must be 100-continue, is %s", show(v, value.len).text);
        return p->has_expect;
    }
    if (same(k, name.len, "authorization")) {
        if (p->head.authorization.len) {
            refuse(p, 400, "Authorization: must stand once, stands twice");
            return false;
        }
        p->head.authorization = value;
    } else if (same(k, name.len, "content-type")) {
        p->head.content_type = value;
    } else if (same(k, name.len, "content-encoding") && !same(v, value.len, "identity")) {
        refuse(p, 415, "Content-Encoding: must be absent or identity, is %s",
               show(v, value.len).text);
        return false;
    }
    return true;
}

static enum rtr_http_event end_head(struct rtr_http_parser *p)
{
    struct rtr_http_head *h = &p->head;
    if (h->minor == 1 && !p->has_host)
        return refuse(p, 400, "Host: must stand in a request of HTTP/1.1, is missing");
    if (h->minor == 0 && p->has_te)
        return refuse(p, 400,
                      "Transfer-Encoding: must not stand in a request of HTTP/1.0, is chunked");
    if (p->has_te && h->has_length) {
        return refuse(p, 400,
                      "Content-Length: must not stand beside Transfer-Encoding, is %" PRIu64,
                      h->content_length);
    }
    if (h->content_length > p->max_body)
        return refuse(p, 413,
                      "body: must have at most %" PRIu64 " bytes, Content-Length is %" PRIu64,
                      p->max_body, h->content_length);
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
        int rc = take_line(p, bytes, n, p->max_head, p->state == START ? 414 : 431,
                           p->state == START ? "request line" : "head", &end, &next);
        if (rc < 0) return RTR_HTTP_BAD;
        if (rc == 0) return RTR_HTTP_MORE;
        size_t at = p->line_at;
        p->line_at = (uint32_t)next;
        if (p->state == START) {
            if (at == end) { /* RFC 9112 2.2: one empty line before a request is overlooked */
                if (p->empty_lines++)
                    return refuse(p, 400, "request: at most one empty line before it, has 2");
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
    int rc = take_line(p, bytes, n, MAX_CHUNK_LINE, 400, "chunk size", &end, next);
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
        refuse(p, 400, "chunk size: must be 1 to %d hexadecimal digits, is %s", CHUNK_DIGITS,
               show(bytes, end).text);
        return -1;
    }
    if (size > p->max_body - p->body_seen) {
        refuse(p, 413,
               "body: must have at most %" PRIu64 " bytes, a chunk of %" PRIu64 " follows %" PRIu64,
               p->max_body, size, p->body_seen);
        return -1;
    }
    p->body_seen += size;
    p->left = size;
    return 1;
}

static enum rtr_http_event refuse_chunk_end(struct rtr_http_parser *p, const char *at)
{
    return refuse(p, 400, "chunk: must end with CR LF where its size says, has %s",
                  show(at, 1).text);
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
            if (have >= 1 && from[0] != '\r') return refuse_chunk_end(p, from);
            if (have >= 2 && from[1] != '\n') return refuse_chunk_end(p, from + 1);
            if (have < 2) return RTR_HTTP_MORE;
            at += 2;
            p->state = CHUNK_SIZE;
            break;
        case TRAILERS: {
            int rc = take_line(p, from, have, RTR_HTTP_MAX_TRAILERS - p->skipped, 431,
                               "the rest of the trailers", &end, &next);
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
