/* net/peer.c - silence is counted in heartbeats since anything was heard last.
 *
 * How      The state follows from the times, so that a late tick (a stopped or busy process) gives
 *          the same answer as many punctual ones. DEAD is final: whoever comes back does so on a
 *          new connection with a hello of its own, so nothing meant for the old one can reach it.
 */
#include "common/net/peer.h"

#include "common/base/err.h"

#include <stdio.h>
#include <string.h>

bool net_peer_name_ok(const char *name)
{
    size_t n = strlen(name);
    return n >= 1 && n <= NET_PEER_NAME_MAX &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == n;
}

void net_peer_init(struct net_peer *p, uint32_t heartbeat_ms, uint32_t hello_ms, uint64_t now_ms)
{
    *p = (struct net_peer){.state = NET_PEER_NEW,
                           .heartbeat_ms = heartbeat_ms,
                           .hello_ms = hello_ms,
                           .opened_ms = now_ms,
                           .heard_ms = now_ms};
}

int net_peer_hello(struct net_peer *p, const struct net_peer_hello *theirs,
                   const struct net_peer_hello *ours, uint64_t now_ms, struct tow_err *err)
{
    if (p->state != NET_PEER_NEW)
        return tow_fail(err, TOW_EWIRE, "peer %s: a second hello", p->name[0] ? p->name : "?");
    if (!net_peer_name_ok(theirs->name))
        return tow_fail(err, TOW_EINVAL,
                        "peer name: 1 to %d letters, digits, '.', '_' or '-' are needed",
                        NET_PEER_NAME_MAX);
    if (theirs->incarnation == 0)
        return tow_fail(err, TOW_EINVAL, "peer %s: incarnation is 0", theirs->name);
    uint32_t low =
        theirs->version_min > ours->version_min ? theirs->version_min : ours->version_min;
    uint32_t high =
        theirs->version_max < ours->version_max ? theirs->version_max : ours->version_max;
    if (low > high)
        return tow_fail(err, TOW_EMISMATCH, "peer %s: version: ours %u to %u, theirs %u to %u",
                        theirs->name, ours->version_min, ours->version_max, theirs->version_min,
                        theirs->version_max);
    snprintf(p->name, sizeof p->name, "%s", theirs->name);
    p->incarnation = theirs->incarnation;
    p->version = high;
    p->features = theirs->features & ours->features;
    p->state = NET_PEER_LIVE;
    p->heard_ms = now_ms;
    return 0;
}

enum net_peer_change net_peer_heard(struct net_peer *p, uint64_t now_ms)
{
    if (p->state == NET_PEER_DEAD) return NET_PEER_SAME;
    p->heard_ms = now_ms;
    if (p->state != NET_PEER_SUSPECT) return NET_PEER_SAME;
    p->state = NET_PEER_LIVE;
    return NET_PEER_BECAME_LIVE;
}

static uint64_t missed_at(uint64_t heard_ms, uint32_t heartbeat_ms, unsigned missed)
{
    return heard_ms + (uint64_t)heartbeat_ms * (missed + 1);
}

bool net_peer_missed(uint64_t heard_ms, uint32_t heartbeat_ms, unsigned missed, uint64_t now_ms)
{
    return now_ms >= missed_at(heard_ms, heartbeat_ms, missed);
}

static uint64_t late_ms(const struct net_peer *p, unsigned missed)
{
    return missed_at(p->heard_ms, p->heartbeat_ms, missed);
}

enum net_peer_change net_peer_tick(struct net_peer *p, uint64_t now_ms)
{
    switch (p->state) {
    case NET_PEER_NEW:
        if (now_ms < p->opened_ms + p->hello_ms) return NET_PEER_SAME;
        break;
    case NET_PEER_LIVE:
    case NET_PEER_SUSPECT:
        if (now_ms >= late_ms(p, NET_PEER_DEAD_AFTER)) break;
        if (p->state == NET_PEER_LIVE && now_ms >= late_ms(p, NET_PEER_SUSPECT_AFTER)) {
            p->state = NET_PEER_SUSPECT;
            return NET_PEER_BECAME_SUSPECT;
        }
        return NET_PEER_SAME;
    case NET_PEER_DEAD: return NET_PEER_SAME;
    }
    p->state = NET_PEER_DEAD;
    return NET_PEER_BECAME_DEAD;
}

enum net_peer_change net_peer_closed(struct net_peer *p)
{
    if (p->state == NET_PEER_DEAD) return NET_PEER_SAME;
    p->state = NET_PEER_DEAD;
    return NET_PEER_BECAME_DEAD;
}

uint64_t net_peer_next_ms(const struct net_peer *p)
{
    switch (p->state) {
    case NET_PEER_NEW: return p->opened_ms + p->hello_ms;
    case NET_PEER_LIVE: return late_ms(p, NET_PEER_SUSPECT_AFTER);
    case NET_PEER_SUSPECT: return late_ms(p, NET_PEER_DEAD_AFTER);
    case NET_PEER_DEAD: break;
    }
    return UINT64_MAX;
}

const char *net_peer_state_name(enum net_peer_state s)
{
    static const char *const names[] = {"new", "live", "suspect", "dead"};
    return (unsigned)s < 4 ? names[s] : "?";
}
