/* ctl/sse.h - server-sent events out of bytes: the `data` of each event, whole.
 *
 * Holds    How the bytes were split never changes what comes out. Lines end with LF, CR or CRLF;
 *          the data lines of an event are joined with LF;
 *          comments and other fields mean nothing here.
 */
#ifndef CTL_SSE_H
#define CTL_SSE_H

#include "common/base/buf.h"

struct tow_err;

enum { CTL_SSE_MAX_EVENT = 4 << 20 }; /* bytes of one line, and of one event's data */

/* Called with an event's data, NUL-terminated; what it returns below 0 ends the feed. */
typedef int (*ctl_sse_on_event)(void *ctx, const char *data, size_t n, struct tow_err *err);

struct ctl_sse {
    struct tow_buf line, data;
    bool has_data, after_cr;
    ctl_sse_on_event on_event;
    void *ctx;
};

void ctl_sse_init(struct ctl_sse *s, ctl_sse_on_event on_event, void *ctx);
void ctl_sse_fini(struct ctl_sse *s);
/* 0, what on_event returned, or TOW_ETOOBIG. */
int ctl_sse_feed(struct ctl_sse *s, const char *bytes, size_t n, struct tow_err *err);

#endif
