/* kv/mover_impl.h - what the three files of the mover share; nobody else includes it.
 *
 * mover.c       the thread, its two queues, open and close
 * mover_peer.c  connections: greeting, proof of the link, heartbeats, loss and return
 * mover_ship.c  tickets: kv/xfer's machines, reads, digests
 * Everything below `link` in struct kv_mover belongs to the transfer thread.
 */
#ifndef TOW_KV_MOVER_IMPL_H
#define TOW_KV_MOVER_IMPL_H

#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/base/inbox.h"
#include "common/base/list.h"
#include "common/kv/mover.h"
#include "common/kv/xfer.h"
#include "common/net/link.h"
#include "common/net/peer.h"
#include "proto/messages.h"

#include <pthread.h>

enum {
    MOVER_FACTS_MAX = 32,
    MOVER_READS = 8, /* reads in flight per connection: enough to cover a round trip */
    /* Bytes of one read: those in flight fit into a core's cache, where the digest then finds
     * them. */
    MOVER_READ_BYTES = 128 << 10,
    /* Messages of a ticket that wait at a receiver or are on their way, as many as it takes at a
     * time. More only get between those whose bytes are moving: with 32, TCP moved 0.6 of it at
     * 64K. */
    MOVER_PUSHES = MOVER_READS,
    MOVER_OFFERS = 256,         /* told in one turn of the loop */
    MOVER_COPIES = 16,          /* parts copied, at most MOVER_COPY_BYTES, before they are told */
    MOVER_COPY_BYTES = 4 << 20, /* copied in one turn and connection, or one part if larger */
    /* Pages of a ticket in all from which copies go past the caches: they would not stay in the
     * second-level one, and to go through it costs a read of what is overwritten. */
    MOVER_PAST_CACHE = 4 << 20,
    MOVER_SPIN_US = 50,     /* the thread polls so long after a copy, if tickets are live */
    MOVER_TELL_MS = 8,      /* while bytes move, pages are told to be done so often */
    MOVER_ACK_MS = 4,       /* as long, acknowledgements wait, or until they fill their messages */
    MOVER_OUT_BYTES = 7000, /* of frames that leave as one message: one slot of shared memory */
    MOVER_OUTS = 8,         /* such messages: two milliseconds' acknowledgements of small pages */
    MOVER_PROBES = 16,      /* pages moved to prove a link; the first one only warms it up */
    MOVER_PROBE_WINDOW = 4,
    MOVER_TEXT = 160,
    MOVER_TOLD = 16,      /* refused peers whose line is remembered */
    MOVER_LABEL_BYTES = 8 /* before each frame: the random number that names the connection */
};

enum conn_state {
    CONN_GREETING, /* prefill: XHELLO sent */
    CONN_PROVING,  /* identities fit, pages go over it for proof */
    CONN_UP,
    CONN_REFUSED, /* decode: XREFUSE is on its way; closes by its hello deadline */
    CONN_CLOSING  /* the endpoint is being closed, reads may still report */
};

/* A part on its way: by reads, one piece after the other, or as a bulk message. */
struct read {
    struct part *p; /* NULL: free */
    size_t at;      /* reads: bytes that are here */
    struct tow_hash digest;
    struct tow_hash_copy bulk;
};

/* One connection: one attempt. A peer that comes back does so on a new one. */
struct conn {
    struct tow_list node; /* m->conns */
    struct kv_mover *m;
    struct target *target; /* prefill: whom we keep linked; NULL on decode */
    enum conn_state state;
    uint64_t label;
    struct net_peer peer;
    struct net_ep *ep;
    struct net_rkey *rkeys[KV_AREAS]; /* decode: the sender's areas */
    uint64_t remote_base[KV_AREAS], remote_bytes[KV_AREAS];
    const uint8_t *mapped[KV_AREAS]; /* decode: the same, in this process; NULL: cannot be */
    uint64_t ping_at_ms;
    bool ep_closed;
    /* proof */
    struct tow_list in_provers; /* decode: waits for the probe page */
    uint64_t probed_ms;         /* got it, or the last bytes */
    enum kv_move_method proving;
    uint64_t probe_digest, probe_from_us;
    unsigned probes_begun, probes_done, n_probe_bulks;
    struct net_bulk *probe_bulks[MOVER_PROBES]; /* arrived, to be taken in turn */
    uint64_t probe_offset;
    int probe_code;
    uint32_t mb[3]; /* by kv_move_method; 0: does not work */
    char transports[3][24];
    enum kv_move_method method;
    bool copies;      /* decode: reads are copies out of `mapped` */
    bool bulk_copies; /* decode: bulk messages come in pieces, which are copied */
    /* messages that wait for conn_flush(): frames behind the label */
    uint32_t n_outs, out_bytes[MOVER_OUTS];
    bool out_waits; /* nobody is held up by them for MOVER_ACK_MS: since out_ms */
    uint64_t out_ms;
    uint8_t out[MOVER_OUTS][MOVER_OUT_BYTES];
    /* shipping */
    struct tow_list ready; /* tickets with something to read, next in turn first */
    unsigned n_reads;
    struct read reads[MOVER_READS];
};

/* Prefill: a decode process to stay linked to. */
struct target {
    struct tow_list node; /* m->targets */
    char name[KV_MOVER_NAME_MAX + 1];
    uint64_t incarnation;
    struct conn *conn;    /* NULL between attempts */
    uint64_t retry_at_ms; /* 0: none planned */
    uint32_t pause_ms;
    enum { TOLD_NOTHING, TOLD_UP, TOLD_DOWN, TOLD_REFUSED } told;
    size_t address_bytes;
    uint8_t address[];
};

struct part {
    struct ticket *t;
    struct conn *conn;     /* of the operation in flight */
    struct net_bulk *bulk; /* receiver, pushed: waits to be taken */
    uint64_t local;        /* offset in our area */
    uint64_t remote;       /* receiver: offset in the sender's */
    uint64_t digest;
};

struct ticket {
    struct tow_list node;     /* hash bucket */
    struct tow_list in_ready; /* conn->ready */
    struct kv_mover *m;
    struct kv_ticket id;
    uint64_t cookie;
    struct conn *conn; /* NULL: not linked (yet, or any more) */
    char peer[KV_MOVER_NAME_MAX + 1];
    uint64_t incarnation;
    struct kv_xfer x;
    char why[MOVER_TEXT];
    bool past_cache; /* receiver: more than a cache holds */
    uint32_t note_bytes;
    uint8_t note[KV_MOVER_NOTE_MAX];
    uint8_t *states;     /* owned, n_pages + 1 */
    struct part parts[]; /* n_pages + 1, the tail last */
};

struct mover_event {
    struct tow_list node;
    struct kv_mover_event pub;
    uint8_t note[];
};

enum command_kind {
    CMD_CONNECT,
    CMD_DROP,
    CMD_SEND,
    CMD_OFFER,
    CMD_TOUCH,
    CMD_EXPECT,
    CMD_CANCEL,
    CMD_RELINK,
    CMD_STOP
};

struct command {
    struct tow_list node; /* OFFER: in m->offers */
    enum command_kind kind;
    struct kv_ticket ticket;
    char peer[KV_MOVER_NAME_MAX + 1];
    uint64_t incarnation, cookie, tail_offset;
    uint32_t n, lease_ms, note_bytes;
    uint32_t at; /* OFFER: parts done */
    int code;
    /* CONNECT: address bytes; OFFER: n kv_offer, then the note; EXPECT: n offsets */
    size_t payload_bytes;
    _Alignas(8) uint8_t payload[];
};

struct mover_fact {
    char field[WIRE_MAX_NAME + 1], value[WIRE_MAX_VALUE + 1];
};

/* A refused peer whose line is in the log: it greets again and again. */
struct mover_told {
    char name[KV_MOVER_NAME_MAX + 1];
    uint64_t hash; /* of the line */
};

struct kv_mover {
    /* fixed after open */
    struct kv_mover_config cfg;
    char name[KV_MOVER_NAME_MAX + 1];
    struct mover_fact facts[MOVER_FACTS_MAX + 3];
    uint32_t n_facts;
    pthread_t thread;
    int wake_fd;
    void *areas[KV_AREAS];
    /* between the threads */
    struct tow_inbox *commands; /* of struct command *, owned by the taker */
    struct tow_inbox *events;   /* of struct mover_event *, owned by the taker */
    pthread_mutex_t lock;       /* guards stats and the four below */
    pthread_cond_t started_cond;
    struct kv_mover_stats stats;
    bool started;
    int start_code;
    struct tow_err start_err;
    /* control thread */
    struct mover_event *last; /* what the note of the last event points into */
    size_t address_bytes;     /* what peers may be told */
    uint8_t address[WIRE_MAX_ADDRESS];

    struct net_link *link;
    struct net_region *regions[KV_AREAS];
    struct tow_list conns, targets;
    struct conn *prover;     /* whose proof has the probe page; NULL: it is free */
    struct tow_list provers; /* who waits for it, the first one longest */
    struct tow_list offers;  /* commands in work, in their order */
    struct tow_list backlog; /* events not in the inbox yet */
    bool urgent;             /* one of them is more than a part */
    uint64_t posted_ms, copied_us;
    bool copying; /* until MOVER_SPIN_US after copied_us */
    struct tow_list *buckets;
    uint32_t n_buckets, n_tickets, n_conns;
    uint64_t now_ms, turned_ms, tick_at_ms;
    struct kv_mover_stats own;          /* published as stats */
    struct mover_told told[MOVER_TOLD]; /* the oldest is replaced */
    uint32_t n_told;
    bool stopping;
    bool relink, relinking; /* asked for; under way: what comes in is for the old link */
};

/* mover.c. note: NULL, or ev->note_bytes, copied. A part is joined to the event before it, where
 * that tells its neighbours and has not left yet. */
void mover_post(struct kv_mover *m, const struct kv_mover_event *ev, const void *note);
void mover_post_part(struct kv_mover *m, struct kv_ticket t, uint64_t cookie, uint32_t index);
void mover_run_commands(struct kv_mover *m);

/* mover_peer.c */
void mover_connect(struct kv_mover *m, const struct command *cmd);
void mover_drop(struct kv_mover *m, const struct command *cmd);
void mover_tick_peers(struct kv_mover *m);
bool mover_prove_next(struct kv_mover *m); /* false: there was none to begin with */
void mover_flush_peers(struct kv_mover *m);
void mover_forget_peers(struct kv_mover *m, const char *why);
void mover_stood_still(struct kv_mover *m, uint64_t gap_ms);
struct conn *mover_conn_of(struct kv_mover *m, const char *name, uint64_t incarnation);
void conn_send(struct conn *c, const struct wire_msg *msg); /* leaves at the turn's end or later */
void conn_flush(struct conn *c);
void conn_down(struct conn *c, int code, const char *why);
void conn_read_ended(struct conn *c); /* one of its reads is accounted for */
void mover_on_message(void *arg, const void *bytes, uint32_t n);
void mover_on_bulk(void *arg, struct net_bulk *bulk, const void *head, uint32_t head_bytes,
                   uint64_t bytes);
void mover_on_ep_error(void *arg, struct net_ep *ep, int code, const char *why);
void mover_free_peers(struct kv_mover *m);

/* mover_ship.c */
void ship_send(struct kv_mover *m, const struct command *cmd);
bool ship_offer_waits(struct kv_mover *m, const struct command *cmd);
bool ship_offer_some(struct kv_mover *m, struct command *cmd); /* true: all of it is done */
void ship_expect(struct kv_mover *m, const struct command *cmd);
void ship_step(struct kv_mover *m, struct kv_ticket id, enum kv_xfer_event_kind kind, int code);
void ship_offered(struct conn *c, const struct wire_offer *o, struct net_bulk *bulk);
void ship_acked(struct conn *c, const struct wire_ack *a);
void ship_nacked(struct conn *c, const struct wire_nack *n);
void ship_from_peer(struct conn *c, struct wire_ticket id, enum kv_xfer_event_kind kind, int code);
/* Ends the tickets of this peer (NULL: of all); c may be NULL. */
void ship_peer_lost(struct kv_mover *m, const char *name, uint64_t incarnation, struct conn *c,
                    const char *why);
void ship_pump(struct conn *c);
bool ship_copy_some(struct kv_mover *m); /* false: nothing to copy */
void ship_tick(struct kv_mover *m);
void ship_free_all(struct kv_mover *m);

#endif
