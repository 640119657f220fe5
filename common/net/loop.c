/* net/loop.c - libuv, with handles that free themselves once libuv lets go of them.
 *
 * How      Every handle is a heap object with the uv handle first and a node in the loop's list, so
 *          that net_loop_free() can close what is left. A closed handle's callbacks are cut at
 *          once; its memory goes when libuv has confirmed.
 * Rejected Handles embedded in the callers' structs: each caller would then have to keep its own
 *          memory until uv_close() has called back, which is the classic mistake.
 */
#include "common/net/loop.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/list.h"
#include "common/net/files.h"

#include <poll.h>
#include <stdlib.h>
#include <uv.h>

enum { FREE_MS = 2000 };

struct handle {
    union {
        uv_handle_t any;
        uv_timer_t timer;
        uv_async_t async;
        uv_signal_t signal;
    } uv;
    struct tow_list in_loop;
    struct net_loop *loop; /* borrowed */
    void *arg;             /* borrowed */
    union {
        net_timer_fn on_timer;
        net_wake_fn on_wake;
        net_signal_fn on_signal;
    } fn;
};

struct net_timer {
    struct handle h;
};
struct net_wake {
    struct handle h;
};

struct net_loop {
    uv_loop_t uv;
    struct tow_list handles; /* of struct handle, not closed */
    int holds;
};

int net_loop_open(struct net_loop **out, struct tow_err *err)
{
    struct net_loop *loop = calloc(1, sizeof *loop);
    if (!loop) return tow_fail(err, TOW_ENOMEM, "no memory for an event loop");
    int rc = uv_loop_init(&loop->uv);
    if (rc < 0) {
        free(loop);
        return tow_fail(err, TOW_ESYS, "event loop: %s", uv_strerror(rc));
    }
    tow_list_init(&loop->handles);
    *out = loop;
    return 0;
}

static void on_closed(uv_handle_t *uv)
{
    free(uv->data);
}

static void handle_close(struct handle *h)
{
    tow_list_remove(&h->in_loop);
    uv_close(&h->uv.any, on_closed);
}

void net_loop_free(struct net_loop *loop)
{
    if (!loop) return;
    uint64_t until = tow_now_ms() + FREE_MS;
    while (loop->holds > 0 && tow_now_ms() < until) {
        uv_run(&loop->uv, UV_RUN_NOWAIT);
        if (loop->holds > 0) poll(NULL, 0, 1); /* another thread's completion is on its way */
    }
    TOW_LIST_EACH_SAFE (n, &loop->handles) handle_close(TOW_CONTAINER(n, struct handle, in_loop));
    uv_run(&loop->uv, UV_RUN_DEFAULT); /* nothing is left but close callbacks */
    int rc = uv_loop_close(&loop->uv);
    tow_assert(rc == 0); /* else a program left a handle of its own open */
    free(loop);
}

static void no_work(uv_work_t *work)
{
    (void)work;
}

static void on_no_work(uv_work_t *work, int status)
{
    (void)status;
    free(work);
}

int net_loop_start_pool(struct net_loop *loop, struct tow_err *err)
{
    const char *asked = getenv("UV_THREADPOOL_SIZE"); /* as libuv reads it: 1 to 1024 */
    const unsigned n = asked ? (unsigned)atoi(asked) : 4;
    int rc = net_threads_check(n == 0 ? 1 : n > 1024 ? 1024 : n, "encoding and records", err);
    uv_work_t *work = rc < 0 ? NULL : malloc(sizeof *work);
    if (rc == 0 && (!work || uv_queue_work(&loop->uv, work, no_work, on_no_work) < 0)) {
        free(work);
        rc = tow_fail(err, TOW_ENOMEM, "loop: no memory for the pool");
    }
    return rc;
}

void net_loop_hold(struct net_loop *loop, int delta)
{
    loop->holds += delta;
}

void net_loop_run(struct net_loop *loop)
{
    uv_run(&loop->uv, UV_RUN_DEFAULT);
}
void net_loop_stop(struct net_loop *loop)
{
    uv_stop(&loop->uv);
}
void net_loop_turn(struct net_loop *loop, int block)
{
    uv_run(&loop->uv, block ? UV_RUN_ONCE : UV_RUN_NOWAIT);
}

/* Not uv_now(): it counts from another origin than tow_now_ms(), and the two would be compared. */
uint64_t net_loop_now_ms(struct net_loop *loop)
{
    (void)loop;
    return tow_now_ms();
}

struct uv_loop_s *net_loop_uv(struct net_loop *loop)
{
    return &loop->uv;
}

static struct handle *handle_new(struct net_loop *loop, void *arg)
{
    struct handle *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->loop = loop;
    h->arg = arg;
    return h;
}

static void handle_join(struct handle *h)
{
    h->uv.any.data = h;
    tow_list_append(&h->loop->handles, &h->in_loop);
}

static void on_uv_timer(uv_timer_t *uv)
{
    struct handle *h = uv->data;
    h->fn.on_timer(h->arg);
}

int net_timer_open(struct net_timer **out, struct net_loop *loop, net_timer_fn on_timer, void *arg,
                   struct tow_err *err)
{
    struct handle *h = handle_new(loop, arg);
    if (!h) return tow_fail(err, TOW_ENOMEM, "no memory for a timer");
    h->fn.on_timer = on_timer;
    uv_timer_init(&loop->uv, &h->uv.timer);
    handle_join(h);
    *out = (struct net_timer *)h;
    return 0;
}

void net_timer_start(struct net_timer *t, uint64_t delay_ms, uint64_t repeat_ms)
{
    uv_update_time(&t->h.loop->uv); /* a long callback must not shorten the delay */
    uv_timer_start(&t->h.uv.timer, on_uv_timer, delay_ms, repeat_ms);
}

void net_timer_stop(struct net_timer *t)
{
    uv_timer_stop(&t->h.uv.timer);
}

void net_timer_close(struct net_timer *t)
{
    if (t) handle_close(&t->h);
}

static void on_uv_async(uv_async_t *uv)
{
    struct handle *h = uv->data;
    if (!uv_is_closing(&h->uv.any)) h->fn.on_wake(h->arg);
}

int net_wake_open(struct net_wake **out, struct net_loop *loop, net_wake_fn on_wake, void *arg,
                  struct tow_err *err)
{
    struct handle *h = handle_new(loop, arg);
    if (!h) return tow_fail(err, TOW_ENOMEM, "no memory for a wake-up");
    h->fn.on_wake = on_wake;
    int rc = uv_async_init(&loop->uv, &h->uv.async, on_uv_async);
    if (rc < 0) {
        free(h);
        return tow_fail(err, TOW_ESYS, "wake-up: %s", uv_strerror(rc));
    }
    handle_join(h);
    *out = (struct net_wake *)h;
    return 0;
}

void net_wake_up(void *wake)
{
    struct net_wake *w = wake;
    uv_async_send(&w->h.uv.async);
}

void net_wake_close(struct net_wake *w)
{
    if (w) handle_close(&w->h);
}

static void on_uv_signal(uv_signal_t *uv, int signum)
{
    struct handle *h = uv->data;
    h->fn.on_signal(h->arg, signum);
}

int net_loop_on_signal(struct net_loop *loop, int signum, net_signal_fn on_signal, void *arg,
                       struct tow_err *err)
{
    struct handle *h = handle_new(loop, arg);
    if (!h) return tow_fail(err, TOW_ENOMEM, "no memory for a signal watch");
    h->fn.on_signal = on_signal;
    int rc = uv_signal_init(&loop->uv, &h->uv.signal);
    if (rc < 0) {
        free(h);
        return tow_fail(err, TOW_ESYS, "signal %d: %s", signum, uv_strerror(rc));
    }
    handle_join(h);
    rc = uv_signal_start(&h->uv.signal, on_uv_signal, signum);
    if (rc < 0) {
        handle_close(h);
        return tow_fail(err, TOW_ESYS, "signal %d: %s", signum, uv_strerror(rc));
    }
    return 0;
}
