/* ctl/http_parse.c - see http_parse.h. A line is looked at only when its line end is there; CRLF
 * and a bare LF both end one, since a client has nothing to lose by that. */
#include "deploy/ctl/http_parse.h"

#include <string.h>
#include <strings.h>

enum state {
    STATUS,
    HEADERS,
    BODY_LENGTH,
    BODY_CLOSE,
    CHUNK_SIZE,
    CHUNK_DATA,
    CHUNK_END,
    TRAILERS,
    DONE,
    BROKEN
};

#define MAX_BODY ((uint64_t)1 << 53)

void ctl_http_parser_init(struct ctl_http_parser *p)
{
    memset(p, 0, sizeof *p);
}

static enum ctl_http_event refuse(struct ctl_http_parser *p, const char *reason)
{
    p->state = BROKEN;
    p->reason = reason;
    return CTL_HTTP_BAD;
}

/* A number of base 10 or 16 that is all of s; false when there is none or it passes MAX_BODY. */
static bool parse_number(const char *s, size_t n, unsigned base, uint64_t *out)
{
    uint64_t v = 0;
    if (n == 0) return false;
    for (size_t i = 0; i < n; i++) {
        unsigned c = (unsigned char)s[i], digit = 99;
        if (c >= '0' && c <= '9') digit = c - '0';
        if (c >= 'a' && c <= 'f') digit = c - 'a' + 10;
        if (c >= 'A' && c <= 'F') digit = c - 'A' + 10;
        if (digit >= base) return false;
        v = v * base + digit;
        if (v > MAX_BODY) return false;
    }
    *out = v;
    return true;
}

/* Optional space around a value. */
static void trim(const char **s, size_t *n)
{
    while (*n > 0 && (**s == ' ' || **s == '\t')) ++*s, --*n;
    while (*n > 0 && ((*s)[*n - 1] == ' ' || (*s)[*n - 1] == '\t')) --*n;
}

static bool is_word(const char *s, size_t n, const char *word)
{
    return n == strlen(word) && !strncasecmp(s, word, n);
}

/* "HTTP/1.1 200 OK" */
static enum ctl_http_event take_status(struct ctl_http_parser *p, const char *s, size_t n)
{
    uint64_t status;
    if (n < 12 || memcmp(s, "HTTP/1.", 7) != 0 || (s[7] != '0' && s[7] != '1') || s[8] != ' ' ||
        !parse_number(s + 9, 3, 10, &status) || status < 100 || (n > 12 && s[12] != ' '))
        return refuse(p, "the answer is not HTTP/1.x");
    p->status = (int)status;
    p->event_stream = p->has_length = p->chunked = false;
    p->retry_after = 0;
    p->left = 0;
    p->state = HEADERS;
    return CTL_HTTP_MORE;
}

static enum ctl_http_event take_header(struct ctl_http_parser *p, const char *s, size_t n)
{
    const char *colon = memchr(s, ':', n);
    if (!colon || colon == s || *s == ' ' || *s == '\t' || colon[-1] == ' ' || colon[-1] == '\t')
        return refuse(p, "a header line has no name");
    size_t name = (size_t)(colon - s), len = n - name - 1;
    const char *value = colon + 1;
    uint64_t number;
    trim(&value, &len);
    if (is_word(s, name, "content-length")) {
        if (!parse_number(value, len, 10, &number)) return refuse(p, "Content-Length is no number");
        if (p->has_length && number != p->left) return refuse(p, "two values of Content-Length");
        p->has_length = true;
        p->left = number;
    } else if (is_word(s, name, "transfer-encoding")) {
        if (!is_word(value, len, "chunked") || p->chunked)
            return refuse(p, "Transfer-Encoding is not chunked");
        p->chunked = true;
    } else if (is_word(s, name, "content-type")) {
        static const char sse[] = "text/event-stream";
        p->event_stream = len >= sizeof sse - 1 && !strncasecmp(value, sse, sizeof sse - 1);
    } else if (is_word(s, name, "retry-after")) {
        if (parse_number(value, len, 10, &number) && number <= UINT32_MAX)
            p->retry_after = (uint32_t)number;
    }
    return CTL_HTTP_MORE;
}

static enum ctl_http_event end_head(struct ctl_http_parser *p)
{
    if (p->chunked && p->has_length) return refuse(p, "Content-Length beside chunked coding");
    if (p->status < 200) {
        if (p->status == 101) return refuse(p, "the server switches protocols");
        p->state = STATUS;
        return CTL_HTTP_MORE;
    }
    if (p->status == 204 || p->status == 304)
        p->state = DONE;
    else if (p->chunked)
        p->state = CHUNK_SIZE;
    else if (p->has_length)
        p->state = p->left ? BODY_LENGTH : DONE;
    else
        p->state = BODY_CLOSE;
    return CTL_HTTP_HEAD;
}

/* Size in hex, then maybe extensions, which mean nothing to us. */
static enum ctl_http_event take_chunk_size(struct ctl_http_parser *p, const char *s, size_t n)
{
    const char *semicolon = memchr(s, ';', n);
    size_t len = semicolon ? (size_t)(semicolon - s) : n;
    trim(&s, &len);
    if (!parse_number(s, len, 16, &p->left)) return refuse(p, "a chunk's size is no number");
    p->state = p->left ? CHUNK_DATA : TRAILERS;
    return CTL_HTTP_MORE;
}

static enum ctl_http_event take_line(struct ctl_http_parser *p, const char *s, size_t n)
{
    if (memchr(s, 0, n)) return refuse(p, "a line holds a NUL");
    switch (p->state) {
    case STATUS: return take_status(p, s, n);
    case HEADERS: return n ? take_header(p, s, n) : end_head(p);
    case CHUNK_SIZE: return take_chunk_size(p, s, n);
    case CHUNK_END:
        if (n) return refuse(p, "a chunk is longer than it says");
        p->state = CHUNK_SIZE;
        return CTL_HTTP_MORE;
    default: /* TRAILERS */
        if (n == 0) p->state = DONE;
        return CTL_HTTP_MORE;
    }
}

enum ctl_http_event ctl_http_next(struct ctl_http_parser *p, const char *bytes, size_t n,
                                  size_t *used, const char **body, size_t *body_len)
{
    *used = 0;
    *body = NULL;
    *body_len = 0;
    for (;;) {
        const char *s = bytes + *used;
        size_t have = n - *used;
        if (p->state == BROKEN) return CTL_HTTP_BAD;
        if (p->state == DONE) return CTL_HTTP_END;
        if (have == 0) return CTL_HTTP_MORE;
        if (p->state == BODY_LENGTH || p->state == BODY_CLOSE || p->state == CHUNK_DATA) {
            if (p->state != BODY_CLOSE) {
                if (have > p->left) have = (size_t)p->left;
                p->left -= have;
                if (p->left == 0) p->state = p->state == BODY_LENGTH ? DONE : CHUNK_END;
            }
            *body = s;
            *body_len = have;
            *used += have;
            return CTL_HTTP_BODY;
        }
        const char *lf = memchr(s, '\n', have < CTL_HTTP_MAX_LINE ? have : CTL_HTTP_MAX_LINE);
        if (!lf) return have < CTL_HTTP_MAX_LINE ? CTL_HTTP_MORE : refuse(p, "a line is too long");
        size_t line = (size_t)(lf - s), taken = line + 1;
        if (line > 0 && s[line - 1] == '\r') line--;
        /* Chunk sizes are bounded one by one; a long stream has many. */
        if (p->state != CHUNK_SIZE && p->state != CHUNK_END) {
            p->head_bytes += (uint32_t)taken;
            if (p->head_bytes > CTL_HTTP_MAX_HEAD) return refuse(p, "the head is too long");
        }
        *used += taken;
        enum ctl_http_event ev = take_line(p, s, line);
        if (ev != CTL_HTTP_MORE) return ev;
    }
}

enum ctl_http_event ctl_http_closed(struct ctl_http_parser *p)
{
    if (p->state == DONE || p->state == BODY_CLOSE) {
        p->state = DONE;
        return CTL_HTTP_END;
    }
    return refuse(p, p->state == STATUS && p->head_bytes == 0
                         ? "the server closed without an answer"
                         : "the server closed in the middle of its answer");
}
