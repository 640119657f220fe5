/* router/sse.c - see sse.h. JSON as we write it has no raw line end, so one line holds an event. */
#include "router/sse.h"

#include "common/base/buf.h"

void rtr_sse_begin(struct tow_buf *b)
{
    tow_buf_puts(b, "data: ");
}

void rtr_sse_end(struct tow_buf *b)
{
    tow_buf_puts(b, "\n\n");
}

void rtr_sse_done(struct tow_buf *b)
{
    tow_buf_puts(b, "data: [DONE]\n\n");
}
