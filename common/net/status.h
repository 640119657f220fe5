/* net/status.h - a worker's own GET /health, /ready and /metrics.
 *
 * Why      Operators and probes look at a worker without going through the router.
 * Owner    The loop's thread.
 * Limits   4 KiB of request, 64 connections (more are closed at once), 10 s for the whole exchange,
 *          1 MiB of answer, no body, one request per connection. Other paths 404, other methods 405
 *          with Allow, anything malformed 400.
 */
#ifndef TOW_NET_STATUS_H
#define TOW_NET_STATUS_H

#include <stdint.h>

struct net_loop;
struct net_status;
struct tow_buf;
struct tow_err;

/* Each writes the body. health and ready return the HTTP status, 200 or 503. */
struct net_status_hooks {
    int (*health)(void *arg, struct tow_buf *out);
    int (*ready)(void *arg, struct tow_buf *out);
    void (*metrics)(void *arg, struct tow_buf *out); /* Prometheus text */
    void *arg;
};

/* addr is "127.0.0.1:8001", "[::1]:8001" or ":0"-like with port 0 for any free one. Hooks are
 * copied. A port in use is TOW_ECONFIG, naming address and setting. */
int net_status_open(struct net_status **out, struct net_loop *loop, const char *addr,
                    const struct net_status_hooks *hooks, struct tow_err *err);
uint16_t net_status_port(const struct net_status *s); /* the port really bound */
void net_status_close(struct net_status *s);          /* NULL is fine; before net_loop_free() */

#endif
