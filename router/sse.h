/* router/sse.h - server-sent events as bytes: one `data:` line per event, LF line ends, UTF-8. */
#ifndef RTR_SSE_H
#define RTR_SSE_H

#include <stddef.h>

struct tow_buf;

#define RTR_SSE_TYPE    "text/event-stream; charset=utf-8"
#define RTR_SSE_COMMENT ": keep-alive\n\n" /* means nothing; legal only between events */

/* An event being written: begin, append JSON without raw line ends, end. */
void rtr_sse_begin(struct tow_buf *b);
void rtr_sse_end(struct tow_buf *b);
void rtr_sse_done(struct tow_buf *b); /* data: [DONE] */

#endif
