/* Fuzzes router/http_parse.h: any bytes, in one piece and cut at places the input chooses, must
 * give the same events, and all spans must lie inside what was given. */
#include "common/base/err.h"
#include "router/http_parse.h"

#include <stdlib.h>
#include <string.h>

/* Folds the events of one run into a number. Body bytes are folded one by one, so that how a body
 * is cut does not show. */
static uint64_t run(const uint8_t *bytes, size_t n, unsigned seed)
{
    struct rtr_http_parser p;
    rtr_http_parser_init(&p, 512, 4096);
    uint64_t h = 14695981039346656037u;
    size_t at = 0, have = seed ? 0 : n;
    for (;;) {
        size_t used, body_len;
        const char *body;
        char *copy = malloc(have - at + 1);
        memcpy(copy, bytes + at, have - at);
        enum rtr_http_event ev = rtr_http_next(&p, copy, have - at, &used, &body, &body_len);
        tow_assert(used <= have - at);
        if (ev == RTR_HTTP_HEAD) {
            const struct rtr_http_head *d = &p.head;
            const struct rtr_span spans[] = {d->method, d->path, d->query, d->authorization};
            for (size_t i = 0; i < sizeof spans / sizeof *spans; i++) {
                tow_assert(spans[i].at + spans[i].len <= used);
                h = (h ^ (spans[i].at * 65536u + spans[i].len)) * 1099511628211u;
            }
            tow_assert(!(d->chunked && d->has_length));
            h = (h ^ d->content_length ^ (unsigned)d->keep_alive) * 1099511628211u;
        }
        for (size_t i = 0; i < body_len; i++) h = (h ^ (uint8_t)body[i]) * 1099511628211u;
        if (ev == RTR_HTTP_END || ev == RTR_HTTP_HEAD) h = (h ^ ev) * 1099511628211u;
        free(copy);
        at += used;
        if (ev == RTR_HTTP_BAD) return (h ^ (unsigned)p.status) * 1099511628211u;
        if (ev != RTR_HTTP_MORE) continue;
        if (have == n) return h;
        seed = seed * 1103515245u + 12345u;
        have += 1 + (seed >> 16) % 9;
        if (have > n) have = n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 1) return 0;
    uint64_t whole = run(data + 1, n - 1, 0);
    tow_assert(run(data + 1, n - 1, 1u + data[0]) == whole);
    return 0;
}
