/* net/loop.h - one libuv loop: timers, signals and wake-ups from other threads.
 *
 * Why      Every process has one control thread; whatever it waits for arrives through this loop.
 * Owner    The thread that calls net_loop_run(); a call usable elsewhere is marked [any thread].
 * Holds    Handles belong to the loop that made them. `close` takes NULL, never blocks and ends the
 *          handle: no callback of it comes afterwards, and the pointer is dead.
 */
#ifndef TOW_NET_LOOP_H
#define TOW_NET_LOOP_H

#include <stdint.h>

struct net_loop;
struct net_timer;
struct net_wake;
struct tow_err;
struct uv_loop_s;

int net_loop_open(struct net_loop **out, struct tow_err *err);
/* Closes what is still open (its callbacks no longer come), lets libuv finish. NULL is fine. */
void net_loop_free(struct net_loop *loop);
void net_loop_run(struct net_loop *loop);  /* until net_loop_stop() */
void net_loop_stop(struct net_loop *loop); /* from a callback */
/* One pass: waits for the next event if `block`, else takes what is there. For tests. */
void net_loop_turn(struct net_loop *loop, int block);
uint64_t net_loop_now_ms(struct net_loop *loop); /* tow_now_ms() of this pass of the loop */
/* Borrowed until net_loop_free(); for handles of the programs themselves. */
struct uv_loop_s *net_loop_uv(struct net_loop *loop);

/* Starts the threads of uv_queue_work() now, which libuv does with the first work, and ends the
 * process where it gets none: at start that can be told. TOW_ESYS: too few can be had;
 * TOW_ENOMEM. */
int net_loop_start_pool(struct net_loop *loop, struct tow_err *err);

/* Counts what needs the loop to go on for a while to be torn down: +1 when opened, -1 when gone. */
void net_loop_hold(struct net_loop *loop, int delta);

/* One shot or periodic. Made stopped. */
typedef void (*net_timer_fn)(void *arg);
int net_timer_open(struct net_timer **out, struct net_loop *loop, net_timer_fn on_timer, void *arg,
                   struct tow_err *err);
void net_timer_start(struct net_timer *t, uint64_t delay_ms, uint64_t repeat_ms); /* 0: once */
void net_timer_stop(struct net_timer *t);
void net_timer_close(struct net_timer *t);

/* Runs on_wake on the loop's thread at least once after each net_wake_up(); calls coalesce. The
 * pair (net_wake_up, wake) is what a tow_inbox or the mover takes as its wake callback. */
typedef void (*net_wake_fn)(void *arg);
int net_wake_open(struct net_wake **out, struct net_loop *loop, net_wake_fn on_wake, void *arg,
                  struct tow_err *err);
void net_wake_up(void *wake); /* [any thread] until net_wake_close() */
void net_wake_close(struct net_wake *w);

/* on_signal runs on the loop's thread each time; stays until net_loop_free(). */
typedef void (*net_signal_fn)(void *arg, int signum);
int net_loop_on_signal(struct net_loop *loop, int signum, net_signal_fn on_signal, void *arg,
                       struct tow_err *err);

#endif
