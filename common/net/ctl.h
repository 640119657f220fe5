/* net/ctl.h - the control channel: whole frames of proto/wire.h over nng byte streams.
 *
 * Why      Router and workers speak in ordered messages per peer, and a closed connection is itself
 *          news. URLs are nng's: tcp://HOST:PORT, ipc://PATH.
 * Owner    The loop's thread: every call and every callback. nng's own threads only queue
 *          completions.
 * Holds    Per connection: frames arrive in order and whole; on_close comes exactly once, as the
 *          last callback, and never inside the call that caused it; *c is valid until on_close
 *          returns.
 * Limits   A frame is refused by its type's cap before memory is taken for it; a frame that stays
 *          incomplete for frame_ms, or unsent bytes above send_bytes, close the connection.
 */
#ifndef TOW_NET_CTL_H
#define TOW_NET_CTL_H

#include <stddef.h>
#include <stdint.h>

struct net_ctl;        /* one connection */
struct net_ctl_server; /* a listening URL */
struct net_ctl_dialer; /* keeps one connection to a URL */
struct net_loop;
struct tow_err;
struct wire_msg;

/* Callbacks of a connection; arg is the one given to listen or dial, per-connection data goes with
 * net_ctl_set_user(). The body is borrowed until on_frame returns. */
struct net_ctl_hooks {
    void (*on_open)(void *arg, struct net_ctl *c);
    void (*on_frame)(void *arg, struct net_ctl *c, uint16_t type, const void *body, uint32_t bytes);
    void (*on_close)(void *arg, struct net_ctl *c, int code, const char *why);
    /* Dialer only, may be NULL: one attempt failed, the next comes in retry_ms. */
    void (*on_retry)(void *arg, const char *url, const char *why, uint64_t retry_ms);
};

enum { NET_CTL_MAX = 1024 };

struct net_ctl_config {       /* 0 means the default */
    size_t send_bytes;        /* unsent bytes allowed per connection (default 16 MiB) */
    uint32_t frame_ms;        /* longest time for one frame to come in whole (default 30000) */
    uint32_t max_connections; /* of a server; more are closed at once (default NET_CTL_MAX) */
    uint32_t retry_min_ms;    /* first pause of a dialer (default 100), doubled up to ... */
    uint32_t retry_max_ms;    /* ... this (default 5000); each is cut by up to half at random */
    uint32_t dial_ms;         /* longest one attempt may take (default 5000) */
};

/* A URL that cannot be listened on is TOW_ECONFIG, naming it. cfg may be NULL. */
int net_ctl_listen(struct net_ctl_server **out, struct net_loop *loop, const char *url,
                   const struct net_ctl_config *cfg, const struct net_ctl_hooks *hooks, void *arg,
                   struct tow_err *err);
const char *net_ctl_server_url(const struct net_ctl_server *s); /* with the port really bound */
/* Stops accepting and closes its connections; on_close still comes for each. NULL is fine. */
void net_ctl_server_close(struct net_ctl_server *s);

/* Connects, and again after each close, until net_ctl_dialer_close(). */
int net_ctl_dial(struct net_ctl_dialer **out, struct net_loop *loop, const char *url,
                 const struct net_ctl_config *cfg, const struct net_ctl_hooks *hooks, void *arg,
                 struct tow_err *err);
void net_ctl_dialer_close(struct net_ctl_dialer *d); /* also its connection. NULL is fine */

/* Queues a copy of the frame. TOW_EPEER: closing already; TOW_EFULL: the peer does not read,
 * TOW_ENOMEM: no memory for it; the connection is being closed, so nobody waits for a lost frame.
 * TOW_ETOOBIG: above the type's cap, nothing sent. */
int net_ctl_send(struct net_ctl *c, uint16_t type, const void *body, uint32_t bytes);
/* The same for a message of proto/messages.h; TOW_EINVAL when a field is above its cap. */
int net_ctl_send_msg(struct net_ctl *c, const struct wire_msg *m);
/* Drops what is unsent. on_close comes later with this code and text. */
void net_ctl_close(struct net_ctl *c, int code, const char *why);
/* Sends what is queued first (at most 1 s), then closes: for REFUSE and BYE. */
void net_ctl_finish(struct net_ctl *c);

void net_ctl_set_user(struct net_ctl *c, void *user);
void *net_ctl_user(const struct net_ctl *c);
const char *net_ctl_remote(const struct net_ctl *c); /* "10.0.0.2:4711" or "ipc"; for logs */
size_t net_ctl_unsent(const struct net_ctl *c); /* bytes queued and not yet taken by the kernel */

#endif
