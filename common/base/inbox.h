/* base/inbox.h - a bounded queue of fixed-size events: many threads post, one owner takes.
 *
 * Why      Threads talk through inboxes only; a foreign callback does one thing, it posts.
 * Owner    The thread that takes. tow_inbox_post() and the counts are [any thread], never block,
 *          never allocate, and may be called from a library's callback.
 * Wake     wake(arg) runs on the posting thread when the owner may be asleep: once for a burst, and
 *          again only after the owner has found the inbox empty. It must be safe on any thread
 *          (uv_async_send, eventfd write). A wake without an event is possible, an event without
 *          a wake is not.
 * Holds    Events of one poster arrive in the order posted. Size it for every operation that can be
 *          in flight at once, so that a completion is never the one that finds it full.
 */
#ifndef TOW_BASE_INBOX_H
#define TOW_BASE_INBOX_H

#include <stddef.h>
#include <stdint.h>

struct tow_err;
struct tow_inbox;
typedef void (*tow_inbox_wake)(void *arg);
typedef void (*tow_inbox_on_event)(void *arg, const void *event);

/* capacity: 1 to 2^24 events, rounded up to a power of two (2 at least). event_bytes: 1 to 4096;
 * copied in and out (a pointer is an event of sizeof(void *)). wake: NULL when the owner polls. */
int tow_inbox_new(struct tow_inbox **out, uint32_t capacity, size_t event_bytes,
                  tow_inbox_wake wake, void *wake_arg, struct tow_err *err);
/* No thread may post any more. Events still inside are dropped: drain first when they own
 * things. */
void tow_inbox_free(struct tow_inbox *in);

/* [any thread] 0, or TOW_EFULL with nothing changed but the count of refusals. */
int tow_inbox_post(struct tow_inbox *in, const void *event);

/* Owner: copies the oldest event out and returns 1, or returns 0 when there is none. Call it until
 * it returns 0 (only then does the next post wake again), or use tow_inbox_drain(). */
int tow_inbox_take(struct tow_inbox *in, void *event);
/* Owner: calls on_event for at most max events; returns how many. When it stops at max with more
 * inside, it wakes the owner again, so that nothing is left lying. */
uint32_t tow_inbox_drain(struct tow_inbox *in, uint32_t max, tow_inbox_on_event on_event,
                         void *arg);

uint32_t tow_inbox_capacity(const struct tow_inbox *in);
uint32_t tow_inbox_count(const struct tow_inbox *in);   /* [any thread] a moment's value */
uint64_t tow_inbox_refused(const struct tow_inbox *in); /* [any thread] posts that found it full */

#endif
