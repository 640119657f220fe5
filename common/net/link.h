/* net/link.h - UCX: one worker, registered memory, endpoints, messages, and page reads.
 *
 * Why      Page bytes move by UCX over whatever joins two processes (shared memory, TCP, RDMA);
 *          only this file knows UCX.
 * Owner    One thread, the one that called net_link_open(); UCX is opened for a single thread.
 * Holds    Every operation that was started ends in exactly one callback, never inside the call
 *          that started it, also when its endpoint fails or is closed: only then is its memory free
 *          again. Hooks and callbacks run from net_link_progress(), outside of UCX, and may call
 *          anything here but net_link_free().
 */
#ifndef TOW_NET_LINK_H
#define TOW_NET_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NET_LINK_MESSAGE_MAX 65536 /* bytes of a small message, or of the head of a bulk one */

struct net_link;
struct net_region; /* registered memory of ours */
struct net_ep;     /* a way to one remote worker */
struct net_rkey;   /* a remote region, readable through one endpoint */
struct net_bulk;   /* a rendezvous message that waits for a place to go */
struct tow_err;
struct tow_hash_copy;

typedef void (*net_done_fn)(void *arg, int code); /* 0 or TOW_E* */

struct net_link_hooks {
    /* A small message, whole; borrowed until the hook returns. UCX does not say from whom. */
    void (*on_message)(void *arg, const void *frame, uint32_t bytes);
    /* Bulk bytes wait at the sender; take or refuse them, now or later. head: until return. */
    void (*on_bulk)(void *arg, struct net_bulk *bulk, const void *head, uint32_t head_bytes,
                    uint64_t bytes);
    /* The endpoint is broken; the only thing left to do with it is net_ep_close(). */
    void (*on_ep_error)(void *arg, struct net_ep *ep, int code, const char *why);
    void *arg;
};

struct net_link_stats {
    uint64_t empty_wakes; /* the event descriptor fired and there was nothing to do */
    uint64_t waits;       /* times the thread slept */
    uint64_t ep_errors;
    uint64_t get_bytes, bulk_in_bytes, bulk_out_bytes;
    uint32_t eps, ops; /* open endpoints (closing ones too), operations in flight */
};

/* Environment defaults that UCX has to find. Before other threads start, if that can be; the
 * operator's own UCX_ settings win. */
void net_link_setup(void);
/* How long the pieces are that bulk messages travel in over TCP, as the setting says it (static).
 * UCX trusts it to be the same at both ends. */
const char *net_link_segment(void);
int net_link_open(struct net_link **out, const struct net_link_hooks *hooks, struct tow_err *err);
/* Closes endpoints, waits for what is in flight (at most a second), frees. Callbacks still pending
 * are made with TOW_ECANCEL. NULL is fine. */
void net_link_free(struct net_link *link);
/* A new worker with a new address instead of the old one, which may have stopped hearing for ever.
 * Everything on the old one ends as with net_link_free(), regions stay; peers have to be given the
 * new address. Not from a callback. On failure the old one goes on. */
int net_link_reopen(struct net_link *link, struct tow_err *err);
/* Runs what can run now, then the callbacks; the number of things that happened. */
unsigned net_link_progress(struct net_link *link);
/* Sleeps until the link has work, wake_fd (-1: none) is readable or timeout_ms (-1: for ever) is
 * over. While operations are in flight it does not sleep but yields, because UCX's events are dear
 * there. True: wake_fd is readable. */
bool net_link_wait(struct net_link *link, int wake_fd, int timeout_ms);
void net_link_stats(const struct net_link *link, struct net_link_stats *out);
/* The worker's address, for peers; borrowed until net_link_reopen() or net_link_free(). */
const void *net_link_address(const struct net_link *link, size_t *bytes);

/* Memory made by UCX, so that peers on this host can map it. Never moves. */
int net_region_new(struct net_link *link, size_t bytes, struct net_region **out,
                   struct tow_err *err);
void net_region_free(struct net_link *link, struct net_region *r); /* NULL is fine */
void *net_region_base(const struct net_region *r);
size_t net_region_bytes(const struct net_region *r);
const void *net_region_key(const struct net_region *r,
                           size_t *bytes); /* for net_rkey_open() there */

/* Connecting does not wait: the first operation finds out. address is not kept. user: borrowed. */
int net_ep_open(struct net_link *link, const void *address, size_t bytes, void *user,
                struct net_ep **out, struct tow_err *err);
void *net_ep_user(const struct net_ep *ep);
/* Cancels what is in flight. on_closed comes once, after the callbacks of all its operations; ep
 * and its rkeys are gone then. A second call does nothing. */
void net_ep_close(struct net_ep *ep, net_done_fn on_closed, void *arg);
/* What the bytes travel over: "posix", "sysv", "tcp", "rc_mlx5" ...; for reads (get) or bulk
 * messages. */
void net_ep_transport(const struct net_ep *ep, bool get, char *out, size_t cap);

int net_rkey_open(struct net_ep *ep, const void *key, size_t key_bytes, struct net_rkey **out,
                  struct tow_err *err);
void net_rkey_free(struct net_rkey *k); /* NULL is fine; no read may be in flight */
/* Where the remote address lies in this process, if the transport maps the region (shared memory of
 * one host); NULL: net_ep_get() is the only way. Borrowed from k; the owner may be writing there,
 * or dead, in which case the bytes stay as they were. */
const void *net_rkey_peek(struct net_rkey *k, uint64_t remote);

/* Copies the frame, so that there is nothing to wait for; a lost one shows as an endpoint error. */
int net_ep_send(struct net_ep *ep, const void *frame, uint32_t bytes);
/* Remote bytes [remote, remote + bytes) of the region whose base is remote_base come to local,
 * which should lie in a net_region. The caller has checked the range. */
int net_ep_get(struct net_ep *ep, struct net_rkey *k, uint64_t remote, void *local, size_t bytes,
               net_done_fn on_done, void *arg);
/* The receiver decides where to; data must stay untouched until on_done. head is copied. */
int net_ep_send_bulk(struct net_ep *ep, const void *head, uint32_t head_bytes, const void *data,
                     size_t bytes, net_done_fn on_done, void *arg);
/* The announced number of bytes goes to local. Each call consumes the bulk, also when it fails. */
int net_bulk_take(struct net_bulk *bulk, void *local, net_done_fn on_done, void *arg);
/* The same to where `into`, begun with that number of bytes and borrowed until on_done, puts them:
 * digested as they pass. For a transport whose bytes come out of buffers of its own, as TCP's do;
 * one that would place them itself must not. */
int net_bulk_copy(struct net_bulk *bulk, struct tow_hash_copy *into, net_done_fn on_done,
                  void *arg);
void net_bulk_refuse(struct net_bulk *bulk);

#endif
