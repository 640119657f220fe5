/* net/listen.h - one TCP address that is listened on, and never goes deaf.
 *
 * Why      libuv stops listening while a connection that it has announced is not accepted. Who has
 *          no memory for one and simply returns would never hear of another: here each is accepted
 *          or turned away.
 * Owner    The loop's thread.
 */
#ifndef TOW_NET_LISTEN_H
#define TOW_NET_LISTEN_H

#include <stdint.h>

struct net_listen;
struct tow_err;
struct uv_loop_s;
struct uv_tcp_s;

/* A client is there: the callback calls net_listen_accept() or net_listen_turn_away(), at once. */
typedef void (*net_listen_fn)(void *arg);

/* addr is ADDR:PORT, as 127.0.0.1:8000 or [::1]:8000, port 0 for any free one; `what` names the
 * setting in messages ("--http"). What cannot be listened on is TOW_ECONFIG. */
int net_listen_open(struct net_listen **out, struct uv_loop_s *loop, const char *addr,
                    const char *what, net_listen_fn on_client, void *arg, struct tow_err *err);
uint16_t net_listen_port(const struct net_listen *l);
/* Into a handle fresh from uv_tcp_init(). 0 or a UV_ error: then close the handle. */
int net_listen_accept(struct net_listen *l, struct uv_tcp_s *into);
void net_listen_turn_away(struct net_listen *l); /* closes the connection; allocates nothing */
/* on_closed runs once nothing of it is left in the loop; NULL when nobody cares. NULL is fine. */
void net_listen_close(struct net_listen *l, void (*on_closed)(void *arg), void *arg);

#endif
