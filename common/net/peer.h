/* net/peer.h - what is known about one remote process, and whether it is alive.
 *
 * Why      Router and workers judge silence, restarts and versions by the same rules.
 * Owner    Whoever embeds it. Pure: time comes in as an argument, nothing is sent or closed here.
 *
 *   NEW --hello--> LIVE --2 heartbeats missed--> SUSPECT --heard--> LIVE
 *    |              |                               |
 *    +-- no hello in hello_ms, close, 5 missed -----+--> DEAD
 *
 *   DEAD is final: a new connection is a new peer.
 */
#ifndef TOW_NET_PEER_H
#define TOW_NET_PEER_H

#include "proto/messages.h"

#include <stdbool.h>
#include <stdint.h>

#define NET_PEER_NAME_MAX      WIRE_MAX_NAME
#define NET_PEER_SUSPECT_AFTER 2 /* heartbeats missed */
#define NET_PEER_DEAD_AFTER    5

struct tow_err;

enum net_peer_state { NET_PEER_NEW, NET_PEER_LIVE, NET_PEER_SUSPECT, NET_PEER_DEAD };

struct net_peer {
    enum net_peer_state state;
    char name[NET_PEER_NAME_MAX + 1]; /* "" until hello */
    uint64_t incarnation;
    uint32_t version;  /* agreed */
    uint64_t features; /* both have them */
    uint32_t heartbeat_ms;
    uint64_t opened_ms, heard_ms;
    uint32_t hello_ms;
};

/* What the caller has to do about a change. */
enum net_peer_change {
    NET_PEER_SAME,
    NET_PEER_BECAME_LIVE,
    NET_PEER_BECAME_SUSPECT,
    NET_PEER_BECAME_DEAD
};

struct net_peer_hello {
    const char *name;
    uint64_t incarnation;
    uint32_t version_min, version_max;
    uint64_t features;
};

void net_peer_init(struct net_peer *p, uint32_t heartbeat_ms, uint32_t hello_ms, uint64_t now_ms);
/* TOW_EMISMATCH: no common version, naming both ranges; TOW_EINVAL: bad name or incarnation 0;
 * TOW_EWIRE: a second hello. */
int net_peer_hello(struct net_peer *p, const struct net_peer_hello *theirs,
                   const struct net_peer_hello *ours, uint64_t now_ms, struct tow_err *err);
/* Anything at all arrived. */
enum net_peer_change net_peer_heard(struct net_peer *p, uint64_t now_ms);
enum net_peer_change net_peer_tick(struct net_peer *p, uint64_t now_ms);
/* The rule behind SUSPECT and DEAD, for whoever keeps times of its own: `missed` heartbeats in a
 * row have not come. One counts as missed when it is late by a whole period: the n-th after n +
 * 1 periods. */
bool net_peer_missed(uint64_t heard_ms, uint32_t heartbeat_ms, unsigned missed, uint64_t now_ms);
enum net_peer_change net_peer_closed(struct net_peer *p); /* SAME if it was dead already */
/* When net_peer_tick() could change something next; UINT64_MAX when dead. */
uint64_t net_peer_next_ms(const struct net_peer *p);
/* Letters, digits and . _ - only, 1 to NET_PEER_NAME_MAX of them. */
bool net_peer_name_ok(const char *name);
const char *net_peer_state_name(enum net_peer_state s); /* "live"; static */

#endif
