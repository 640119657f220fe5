/* ctl/sse.c - see sse.h. An event whose closing empty line never came is dropped,
 * as the format says. */
#include "deploy/ctl/sse.h"

#include "common/base/err.h"

#include <string.h>

void ctl_sse_init(struct ctl_sse *s, ctl_sse_on_event on_event, void *ctx)
{
    memset(s, 0, sizeof *s);
    tow_buf_init(&s->line, CTL_SSE_MAX_EVENT);
    tow_buf_init(&s->data, CTL_SSE_MAX_EVENT);
    s->on_event = on_event;
    s->ctx = ctx;
}

void ctl_sse_fini(struct ctl_sse *s)
{
    tow_buf_fini(&s->line);
    tow_buf_fini(&s->data);
}

static int end_event(struct ctl_sse *s, struct tow_err *err)
{
    int rc = 0;
    tow_buf_put(&s->data, "", 0);
    if (s->has_data) rc = s->on_event(s->ctx, s->data.data ? s->data.data : "", s->data.len, err);
    tow_buf_clear(&s->data);
    s->has_data = false;
    return rc;
}

static int end_line(struct ctl_sse *s, struct tow_err *err)
{
    const char *line = s->line.data ? s->line.data : "";
    size_t n = s->line.len;
    int rc = 0;
    if (n == 0) {
        rc = end_event(s, err);
    } else if (n >= 4 && !memcmp(line, "data", 4) && (n == 4 || line[4] == ':')) {
        size_t at = n == 4 ? 4 : 5;
        if (at < n && line[at] == ' ') at++;
        if (s->has_data) tow_buf_putc(&s->data, '\n');
        tow_buf_put(&s->data, line + at, n - at);
        s->has_data = true;
    }
    tow_buf_clear(&s->line);
    return rc;
}

int ctl_sse_feed(struct ctl_sse *s, const char *bytes, size_t n, struct tow_err *err)
{
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        char c = bytes[i];
        bool second_half = c == '\n' && s->after_cr; /* of a CRLF whose CR ended the line */
        s->after_cr = c == '\r';
        if (c != '\n' && c != '\r') continue;
        tow_buf_put(&s->line, bytes + from, i - from);
        from = i + 1;
        if (second_half) continue;
        if (tow_buf_failed(&s->line)) break;
        int rc = end_line(s, err);
        if (rc < 0) return rc;
    }
    if (from < n) tow_buf_put(&s->line, bytes + from, n - from);
    if (tow_buf_failed(&s->line) || tow_buf_failed(&s->data))
        return tow_fail(err, TOW_ETOOBIG, "an event of the stream is larger than %d bytes",
                        (int)CTL_SSE_MAX_EVENT);
    return 0;
}
