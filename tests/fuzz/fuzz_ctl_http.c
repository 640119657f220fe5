/* Fuzzes ctl/http_parse.h and ctl/sse.h: any bytes, in one piece and cut at places the input
 * chooses, must give the same answer and the same events, and bodies must lie inside what was
 * given. */
#include "common/base/err.h"
#include "deploy/ctl/http_parse.h"
#include "deploy/ctl/sse.h"

#include <stdlib.h>
#include <string.h>

static uint64_t fold(uint64_t h, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
    return h;
}

static int on_event(void *ctx, const char *data, size_t n, struct tow_err *err)
{
    (void)err;
    tow_assert(data[n] == 0);
    *(uint64_t *)ctx = fold(*(uint64_t *)ctx + n, data, n);
    return 0;
}

static uint64_t run(const uint8_t *bytes, size_t n, unsigned seed)
{
    struct ctl_http_parser p;
    struct ctl_sse sse;
    struct tow_err err;
    uint64_t h = 14695981039346656037u, events = h;
    size_t at = 0, have = seed ? 0 : n;
    ctl_http_parser_init(&p);
    ctl_sse_init(&sse, on_event, &events);
    for (;;) {
        size_t used, body_len;
        const char *body;
        char *copy = malloc(have - at + 1);
        memcpy(copy, bytes + at, have - at);
        enum ctl_http_event ev = ctl_http_next(&p, copy, have - at, &used, &body, &body_len);
        tow_assert(used <= have - at);
        if (ev == CTL_HTTP_HEAD)
            h = fold(h, (int[]){p.status, p.event_stream, (int)p.retry_after}, 3 * sizeof(int));
        if (ev == CTL_HTTP_BODY) {
            tow_assert(body_len > 0 && body >= copy && body + body_len <= copy + used);
            h = fold(h, body, body_len);
            tow_assert(ctl_sse_feed(&sse, body, body_len, &err) == 0 || body_len > 1 << 20);
        }
        free(copy);
        at += used;
        if (ev == CTL_HTTP_MORE && have < n) {
            seed = seed * 1103515245u + 12345u;
            have += 1 + (seed >> 16) % 9;
            if (have > n) have = n;
            continue;
        }
        if (ev == CTL_HTTP_MORE) ev = ctl_http_closed(&p);
        if (ev == CTL_HTTP_HEAD || ev == CTL_HTTP_BODY) continue;
        tow_assert(ev == CTL_HTTP_END || (ev == CTL_HTTP_BAD && p.reason));
        ctl_sse_fini(&sse);
        return fold(h ^ events, &ev, sizeof ev);
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
