/* router/cluster.h - the real back end: router/route's decisions, carried out over connections to
 * workers.
 *
 * Why      route.c decides without I/O; here its actions become frames, closes and callbacks.
 * Owner    The loop thread.
 */
#ifndef RTR_CLUSTER_H
#define RTR_CLUSTER_H

#include "router/backend.h"
#include "router/route.h"

struct net_loop;
struct rtr_cluster;
struct tow_metrics;

extern const struct rtr_backend rtr_cluster_backend; /* self: the cluster */

/* Listens for workers on control_url. cfg: random may be NULL (then the kernel's).
 * metrics: borrowed, NULL is fine. */
int rtr_cluster_open(struct rtr_cluster **out, struct net_loop *loop, const char *control_url,
                     const struct rtr_route_config *cfg, struct tow_metrics *metrics,
                     struct tow_err *err);
const char *rtr_cluster_url(const struct rtr_cluster *c); /* with the port really bound */
void rtr_cluster_drain(struct rtr_cluster *c, uint32_t limit_ms);
bool rtr_cluster_drained(const struct rtr_cluster *c);
bool rtr_cluster_cut(const struct rtr_cluster *c); /* drained, and its limit ended requests */
/* Every request must be over. NULL is fine; before net_loop_free(). */
void rtr_cluster_close(struct rtr_cluster *c);

#endif
