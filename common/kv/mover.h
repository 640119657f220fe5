/* kv/mover.h - the transfer thread: ships pages and tails between this process and its peers.
 *
 * Why      Pages move while the engine computes and the control thread talks to the router. All of
 *          UCX, the endpoints and kv/xfer's machines live on one thread of their own; servers give
 *          commands and get events. A digest is made by whoever made the page, once, when it is
 *          whole; this thread passes it on, and where the page arrives it checks it.
 * Owner    Commands and kv_mover_event(): the control thread. They never block and never fail for
 *          reasons of the network; what becomes of them is told by events. One that finds no memory
 *          or a full queue has not been given: those that return a code say so, the two that do not
 *          are made to be repeated.
 * Holds    A ticket that was opened or expected ends in exactly one KV_MOVER_ENDED, its last event.
 *          From then on nothing in here reads or writes its pages or its tail: they may be reused.
 *
 * Prefill:  kv_mover_connect(D) on PAIR ........... KV_MOVER_PEER_UP (answer PAIRED) or PEER_DOWN
 *           kv_mover_send() on PREFILL, kv_mover_offer() per chunk and for the tail,
 *           kv_mover_touch() each second for every live job
 *           KV_MOVER_PART for acked pages (give them back), KV_MOVER_ENDED (0: all acked)
 * Decode:   kv_mover_expect() on RESERVE, then send GRANT
 *           KV_MOVER_PART for verified pages, KV_MOVER_ENDED (0: whole, with the sender's note)
 * Both:     kv_mover_cancel() at any time, again and again until ENDED; kv_mover_drop() on UNPAIR;
 *           kv_mover_relink() on RELINK, answered by KV_MOVER_RELINKED.
 */
#ifndef TOW_KV_MOVER_H
#define TOW_KV_MOVER_H

#include "common/kv/xfer.h"
#include "common/net/peer.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KV_MOVER_COMMAND int __attribute__((warn_unused_result))

#define KV_MOVER_NAME_MAX NET_PEER_NAME_MAX
#define KV_MOVER_NOTE_MAX 2048 /* bytes that travel with the tail */
#define KV_MOVER_TEXT_MAX 300

struct kv_mover;
struct tow_err;

enum kv_area { KV_AREA_PAGES, KV_AREA_TAILS, KV_AREAS };
enum kv_move_method { KV_MOVE_NONE, KV_MOVE_GET, KV_MOVE_BULK };

/* Something both sides must agree on; compared by field name, refused with both values. */
struct kv_fact {
    const char *field; /* "layout.page_tokens" */
    const char *value; /* "256" */
};

struct kv_mover_config {
    const char *name; /* of this process */
    uint64_t incarnation;
    uint64_t secret; /* from the join token; 0: none. Peers with another one are refused */
    const struct kv_fact *facts;
    uint32_t n_facts;              /* at most 32 */
    size_t area_bytes[KV_AREAS];   /* the pool's pages and tails; made here, by UCX */
    size_t page_bytes, tail_bytes; /* one part of each kind; peers must have the same */
    uint32_t heartbeat_ms;         /* default 1000; five missed ones are death */
    uint32_t lease_ms;    /* default 30000; without progress a ticket ends with TOW_ETIME */
    uint32_t max_tickets; /* default 1024; more are refused with TOW_EFULL */
    uint32_t max_peers;   /* default 64 */
    /* [transfer thread] an event waits: wake the control thread and return. See net_wake_up(). */
    void (*wake)(void *arg);
    void *wake_arg;
};

/* Starts the thread and UCX and makes the memory; waits for that. Strings and facts are copied. */
int kv_mover_open(struct kv_mover **out, const struct kv_mover_config *cfg, struct tow_err *err);
/* Ends everything, without further events; waits (at most about a second). NULL is fine. */
void kv_mover_close(struct kv_mover *m);
void *kv_mover_area(const struct kv_mover *m, enum kv_area area); /* base; valid until close */
/* This process's address for peers, to go into HELLO; borrowed until the next kv_mover_event(). */
const void *kv_mover_address(const struct kv_mover *m, size_t *bytes);

/* Prefill: keep a link to this decode process, coming back after failures, until dropped. The same
 * name with a new incarnation replaces the old link. Answered by PEER_UP or PEER_DOWN, again at
 * each change. */
KV_MOVER_COMMAND kv_mover_connect(struct kv_mover *m, const char *name, uint64_t incarnation,
                                  const void *address, size_t bytes);
/* Both: forget this peer, ending its tickets with TOW_EPEER. incarnation 0: any. */
KV_MOVER_COMMAND kv_mover_drop(struct kv_mover *m, const char *name, uint64_t incarnation);

/* Makes the data link anew, as a restart of the process would: all peers are forgotten, all tickets
 * end with TOW_EPEER, the areas stay. KV_MOVER_RELINKED is told when the new address holds, after
 * the last event of the old link; with a code the link could not be made, and nobody is reached. */
KV_MOVER_COMMAND kv_mover_relink(struct kv_mover *m, uint64_t incarnation);

/* cookie comes back in each event of the ticket. A ticket id that is live here already ends the new
 * one (its own cookie) with TOW_ESTATE; the live one is not touched. lease_ms 0: the default. */
struct kv_send {
    struct kv_ticket ticket;
    const char *peer;
    uint64_t incarnation;
    uint32_t n_pages; /* besides the tail */
    uint32_t lease_ms;
    uint64_t cookie;
};
KV_MOVER_COMMAND kv_mover_send(struct kv_mover *m, const struct kv_send *s);

struct kv_offer {
    uint32_t index;  /* page of the sequence, or KV_PART_TAIL */
    uint64_t offset; /* in its area, of page_bytes or tail_bytes */
    uint64_t digest; /* tow_hash64() of the part, made after the last write to it */
};
/* note (tail only): first token and whatever else the decode side has to know; at most
 * KV_MOVER_NOTE_MAX bytes. An index may be offered once; the last offer is the tail. */
KV_MOVER_COMMAND kv_mover_offer(struct kv_mover *m, struct kv_ticket t,
                                const struct kv_offer *parts, uint32_t n, const void *note,
                                uint32_t note_bytes);
/* The job behind this ticket is alive, though it has nothing to ship yet. The next one makes up for
 * a lost one. */
void kv_mover_touch(struct kv_mover *m, struct kv_ticket t);

struct kv_expect {
    struct kv_ticket ticket;
    const char *peer; /* only this process may fill it */
    uint64_t incarnation;
    const uint64_t *page_offsets; /* [n_pages] where page i goes, in the pages area */
    uint32_t n_pages;
    uint64_t tail_offset; /* in the tails area */
    uint32_t lease_ms;
    uint64_t cookie;
};
KV_MOVER_COMMAND kv_mover_expect(struct kv_mover *m, const struct kv_expect *e);
/* Ends the ticket with `code` (TOW_ECANCEL for a plain cancel), telling the peer. Its
 * KV_MOVER_ENDED comes as soon as nothing of it is in flight; until then repeat it now and then, or
 * the lease has to end what a lost cancel did not. An unknown or ended ticket: nothing happens. */
void kv_mover_cancel(struct kv_mover *m, struct kv_ticket t, int code);

enum kv_mover_event_kind {
    KV_MOVER_PEER_UP,
    KV_MOVER_PEER_DOWN,
    KV_MOVER_PART,
    KV_MOVER_ENDED,
    KV_MOVER_RELINKED
};

struct kv_mover_event {
    enum kv_mover_event_kind kind;
    /* PART, ENDED */
    struct kv_ticket ticket;
    uint64_t cookie;
    uint32_t index, n_parts; /* PART: so many from this one on; the tail is told alone */
    /* ENDED, PEER_DOWN, RELINKED: 0 or TOW_E*. PEER_DOWN with TOW_ETIME: it did not answer the
     * greeting, or stopped answering before the link was proved. */
    int code;
    uint32_t note_bytes; /* ENDED with 0 on the receiver */
    const void *note;    /* borrowed until the next kv_mover_event() */
    /* PEER_UP, PEER_DOWN */
    char peer[KV_MOVER_NAME_MAX + 1];
    uint64_t incarnation;
    enum kv_move_method method;
    char transport[24];           /* "posix", "tcp" ... */
    double mb_per_s, us;          /* of one page, by the chosen method */
    char text[KV_MOVER_TEXT_MAX]; /* PEER_DOWN, ENDED, RELINKED: why */
    bool refused;                 /* PEER_DOWN: the peers do not fit; no retry */
};
/* The next event, or false. Call until false after each wake. */
bool kv_mover_event(struct kv_mover *m, struct kv_mover_event *out);

/* Counters since start. [control thread] */
struct kv_mover_stats {
    uint64_t bytes_in, bytes_out, parts_in, parts_out;
    uint64_t bytes_copied; /* out of a peer's memory that is mapped here */
    uint64_t tickets_ok, tickets_failed, tickets_cancelled, leases_expired;
    uint64_t bad_digests;    /* parts whose digest differed; proofs of a method too */
    uint64_t bad_offers;     /* unknown, forged, doubled, out of range */
    uint64_t stale_messages; /* from connections that are gone */
    uint64_t ep_errors, peers_refused, empty_wakes;
    uint32_t peers_up, tickets_live;
};
void kv_mover_stats(struct kv_mover *m, struct kv_mover_stats *out);

#endif
