/* net/ctl.c - frames over nng byte streams, with nng's threads kept out of our objects.
 *
 * How      Every nng operation in flight is a `struct io`, which is its own queue node: nng's
 *          callback appends it to the owner's `done` list and wakes the loop, nothing else. There
 *          is one receive and one send per connection and one accept or dial per owner, so the list
 *          cannot overflow and needs no allocation. The loop's thread works it off, and then reaps
 *          what is closed and has no operation in flight: only then comes on_close, and only then
 *          is memory freed.
 *
 *   dial/accept --> OPEN --finish--> FINISHING --sent, or 1 s--+
 *                    |                                         v
 *                    +-- close, error, eof, bad frame,  --> CLOSING --no io in flight--> gone
 *                        slow frame, too much unsent
 *
 * Rejected nng's message sockets (pair, req/rep): they reconnect and drop behind our back, while
 *          here a lost connection has to end tickets. libuv's own TCP: two transports for tcp and
 *          ipc and the name resolution that nng brings along; also nng keeps the door open for tls
 *          and ws streams. tow_inbox for completions: bounded, so a full one would have to be
 *          handled where nothing can be (in nng's callback); the intrusive list cannot be full.
 */
#include "common/net/ctl.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/net/loop.h"
#include "proto/messages.h"
#include "proto/wire.h"

#include <arpa/inet.h>
#include <nng/nng.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { SWEEP_MS = 100, FINISH_MS = 1000, IOV_MAX_NNG = 8, CHUNK_BYTES = 65536, WHY_MAX = 600 };
enum { STABLE_MS = 5000 }; /* a connection that lived so long starts the pauses afresh */
enum { WAYS_MAX = 3 };     /* ways to one URL: nng's own choice of address, IPv4, IPv6 */

enum io_kind { IO_RECV, IO_SEND, IO_ACCEPT, IO_DIAL };

struct io {
    struct tow_list node; /* in owner->done when completed */
    enum io_kind kind;
    bool pending; /* loop thread: started and not taken off `done` yet */
    nng_aio *aio; /* owned */
    struct owner *owner;
    struct net_ctl *ctl; /* IO_RECV, IO_SEND */
};

struct out_frame {
    struct tow_list node;
    uint32_t bytes;
    uint8_t data[];
};

enum ctl_state { CTL_OPEN, CTL_FINISHING, CTL_CLOSING };

struct net_ctl {
    struct owner *owner;
    struct tow_list in_owner;
    enum ctl_state state;
    nng_stream *stream; /* owned */
    struct io recv, send;
    void *user;
    char remote[64];
    int code; /* why it closes */
    char why[WHY_MAX];
    uint64_t opened_ms, finish_by_ms;
    /* sending */
    struct tow_list queue; /* of out_frame */
    size_t unsent, sent_of_first;
    /* receiving: header, then body or skipped bytes */
    uint8_t head[WIRE_HEADER_BYTES];
    uint32_t head_have;
    struct wire_header h;
    uint8_t *body; /* owned; NULL for an empty or skipped body */
    uint32_t body_have;
    bool skip;
    uint64_t frame_since_ms; /* 0: between frames */
    uint8_t chunk[CHUNK_BYTES];
};

/* What a server and a dialer have in common; both begin with it. */
struct owner {
    struct net_loop *loop;
    struct net_ctl_config cfg;
    struct net_ctl_hooks hooks;
    void *arg;
    struct net_wake *wake;
    struct net_timer *sweep;
    pthread_mutex_t lock; /* guards done */
    struct tow_list done; /* of struct io */
    struct tow_list ctls;
    uint32_t n_ctls;
    struct io io; /* accept or dial */
    bool closed;
    char url[256];
};

struct net_ctl_server {
    struct owner o;
    nng_stream_listener *listener;
};

struct net_ctl_dialer {
    struct owner o;
    nng_stream_dialer *ways[WAYS_MAX]; /* tried in this order before a pause */
    uint32_t n_ways, way;
    int first_rv;         /* of the first way of this round */
    uint64_t retry_at_ms; /* 0: not waiting */
    uint32_t pause_ms;
};

/* --- completions ------------------------------------------------------------------------------ */

/* [nng's thread] */
static void on_aio(void *arg)
{
    struct io *io = arg;
    struct owner *o = io->owner;
    pthread_mutex_lock(&o->lock);
    tow_list_append(&o->done, &io->node);
    pthread_mutex_unlock(&o->lock);
    net_wake_up(o->wake); /* nng_aio_free() waits for this return, so the wake still lives */
}

static int io_init(struct io *io, enum io_kind kind, struct owner *o, struct net_ctl *c)
{
    *io = (struct io){.kind = kind, .owner = o, .ctl = c};
    tow_list_init(&io->node);
    return nng_aio_alloc(&io->aio, on_aio, io) == 0 ? 0 : TOW_ENOMEM;
}

static struct io *take_done(struct owner *o)
{
    struct io *io = NULL;
    pthread_mutex_lock(&o->lock);
    if (!tow_list_empty(&o->done)) {
        io = TOW_CONTAINER(o->done.next, struct io, node);
        tow_list_remove(&io->node);
    }
    pthread_mutex_unlock(&o->lock);
    return io;
}

/* --- a connection ----------------------------------------------------------------------------- */

static void close_why(struct net_ctl *c, int code, const char *why)
{
    if (c->state == CTL_CLOSING) return;
    c->state = CTL_CLOSING;
    c->code = code;
    snprintf(c->why, sizeof c->why, "%s", why ? why : "");
    nng_stream_close(c->stream); /* what is in flight ends with NNG_ECLOSED */
    net_wake_up(c->owner->wake); /* reaped there, never inside this call */
}

void net_ctl_close(struct net_ctl *c, int code, const char *why)
{
    close_why(c, code, why);
}

static void start_recv(struct net_ctl *c)
{
    nng_iov iov = {.iov_buf = c->chunk, .iov_len = sizeof c->chunk};
    nng_aio_set_iov(c->recv.aio, 1, &iov);
    c->recv.pending = true;
    nng_stream_recv(c->stream, c->recv.aio);
}

static void start_send(struct net_ctl *c)
{
    if (c->send.pending || tow_list_empty(&c->queue)) return;
    nng_iov iov[IOV_MAX_NNG];
    unsigned n = 0;
    size_t skip = c->sent_of_first;
    TOW_LIST_EACH (node, &c->queue) {
        struct out_frame *f = TOW_CONTAINER(node, struct out_frame, node);
        if (n == IOV_MAX_NNG) break;
        iov[n++] = (nng_iov){.iov_buf = f->data + skip, .iov_len = f->bytes - skip};
        skip = 0;
    }
    nng_aio_set_iov(c->send.aio, n, iov);
    c->send.pending = true;
    nng_stream_send(c->stream, c->send.aio);
}

static void drop_queue(struct net_ctl *c)
{
    TOW_LIST_EACH_SAFE (node, &c->queue) {
        tow_list_remove(node);
        free(TOW_CONTAINER(node, struct out_frame, node));
    }
    c->unsent = c->sent_of_first = 0;
}

static void on_sent(struct net_ctl *c, int rv, size_t n)
{
    if (c->state == CTL_CLOSING) return;
    if (rv != 0) {
        close_why(c, TOW_EPEER, nng_strerror(rv));
        return;
    }
    c->unsent -= n;
    n += c->sent_of_first;
    c->sent_of_first = 0;
    while (n > 0) {
        struct out_frame *f = TOW_CONTAINER(c->queue.next, struct out_frame, node);
        if (n < f->bytes) {
            c->sent_of_first = n;
            break;
        }
        n -= f->bytes;
        tow_list_remove(&f->node);
        free(f);
    }
    if (tow_list_empty(&c->queue) && c->state == CTL_FINISHING)
        close_why(c, 0, "finished");
    else
        start_send(c);
}

static int queue_frame(struct net_ctl *c, struct out_frame *f)
{
    if (c->unsent + f->bytes > c->owner->cfg.send_bytes) {
        free(f);
        close_why(c, TOW_EFULL, "the peer does not read: too much is unsent");
        return TOW_EFULL;
    }
    c->unsent += f->bytes;
    tow_list_append(&c->queue, &f->node);
    start_send(c);
    return 0;
}

/* A frame that is lost alone would be waited for: without memory the connection ends. */
static struct out_frame *frame_new(struct net_ctl *c, size_t bytes)
{
    struct out_frame *f = tow_fault("ctl.frame") ? NULL : malloc(sizeof *f + bytes);
    if (!f) close_why(c, TOW_ENOMEM, "no memory for a frame");
    return f;
}

int net_ctl_send(struct net_ctl *c, uint16_t type, const void *body, uint32_t bytes)
{
    if (c->state != CTL_OPEN) return TOW_EPEER;
    struct wire_header h = {.body_bytes = bytes, .type = type, .version = WIRE_VERSION};
    if (wire_check_header(&h, NULL) < 0) return TOW_ETOOBIG;
    struct out_frame *f = frame_new(c, WIRE_HEADER_BYTES + bytes);
    if (!f) return TOW_ENOMEM;
    f->bytes = WIRE_HEADER_BYTES + bytes;
    wire_header_pack(&h, f->data);
    if (bytes) memcpy(f->data + WIRE_HEADER_BYTES, body, bytes);
    return queue_frame(c, f);
}

int net_ctl_send_msg(struct net_ctl *c, const struct wire_msg *m)
{
    if (c->state != CTL_OPEN) return TOW_EPEER;
    int64_t bytes = wire_frame_bytes(m);
    if (bytes < 0) return (int)bytes;
    struct out_frame *f = frame_new(c, (size_t)bytes);
    if (!f) return TOW_ENOMEM;
    int64_t rc = wire_pack(m, f->data, (size_t)bytes);
    if (rc < 0) {
        free(f);
        return (int)rc;
    }
    f->bytes = (uint32_t)rc;
    return queue_frame(c, f);
}

void net_ctl_finish(struct net_ctl *c)
{
    if (c->state != CTL_OPEN) return;
    if (tow_list_empty(&c->queue)) {
        close_why(c, 0, "finished");
        return;
    }
    c->state = CTL_FINISHING;
    c->finish_by_ms = tow_now_ms() + FINISH_MS;
}

/* The header is complete: is the body acceptable, and where does it go? */
static int begin_body(struct net_ctl *c)
{
    struct tow_err err = {0};
    int rc = wire_header_unpack(&c->h, c->head, &err);
    if (rc == 0) rc = wire_check_header(&c->h, &err);
    c->skip = rc == TOW_ENOENT;
    if (rc < 0 && !c->skip) {
        close_why(c, TOW_EWIRE, err.msg);
        return rc;
    }
    c->body_have = 0;
    c->body = NULL;
    if (!c->skip && c->h.body_bytes > 0) {
        c->body = malloc(c->h.body_bytes);
        if (!c->body) {
            close_why(c, TOW_ENOMEM, "no memory for a frame");
            return TOW_ENOMEM;
        }
    }
    return 0;
}

static void end_frame(struct net_ctl *c)
{
    uint8_t *body = c->body;
    c->body = NULL;
    c->head_have = 0;
    if (c->skip) {
        struct wire_msg m = {.type = WIRE_UNKNOWN_MSG, .unknown = {.type = c->h.type}};
        net_ctl_send_msg(c, &m);
    } else if (c->state == CTL_OPEN) { /* what comes after finish is of no interest */
        c->owner->hooks.on_frame(c->owner->arg, c, c->h.type, body, c->h.body_bytes);
    }
    free(body);
}

static void feed(struct net_ctl *c, const uint8_t *p, size_t n)
{
    while (n > 0 && c->state != CTL_CLOSING) {
        if (c->head_have < WIRE_HEADER_BYTES) {
            if (c->head_have == 0) c->frame_since_ms = tow_now_ms();
            size_t k = WIRE_HEADER_BYTES - c->head_have;
            if (k > n) k = n;
            memcpy(c->head + c->head_have, p, k);
            c->head_have += (uint32_t)k;
            p += k, n -= k;
            if (c->head_have < WIRE_HEADER_BYTES) return;
            if (begin_body(c) < 0) return;
        }
        size_t k = c->h.body_bytes - c->body_have;
        if (k > n) k = n;
        if (k > 0 && !c->skip) memcpy(c->body + c->body_have, p, k);
        c->body_have += (uint32_t)k;
        p += k, n -= k;
        if (c->body_have == c->h.body_bytes) {
            c->frame_since_ms = 0;
            end_frame(c);
        }
    }
}

static void on_received(struct net_ctl *c, int rv, size_t n)
{
    if (c->state == CTL_CLOSING) return;
    if (rv != 0) {
        bool mid = c->head_have > 0;
        bool eof = rv == NNG_ECONNSHUT || rv == NNG_ECLOSED;
        close_why(c, TOW_EPEER,
                  eof ? (mid ? "closed by the peer inside a frame" : "closed by the peer")
                      : nng_strerror(rv));
        return;
    }
    feed(c, c->chunk, n);
    if (c->state != CTL_CLOSING) start_recv(c);
}

static void name_remote(struct net_ctl *c)
{
    nng_sockaddr sa;
    char ip[INET6_ADDRSTRLEN] = "?";
    snprintf(c->remote, sizeof c->remote, "ipc");
    if (nng_stream_get_addr(c->stream, NNG_OPT_REMADDR, &sa) != 0) return;
    if (sa.s_family == NNG_AF_INET) {
        inet_ntop(AF_INET, &sa.s_in.sa_addr, ip, sizeof ip);
        snprintf(c->remote, sizeof c->remote, "%s:%u", ip, ntohs(sa.s_in.sa_port));
    } else if (sa.s_family == NNG_AF_INET6) {
        inet_ntop(AF_INET6, sa.s_in6.sa_addr, ip, sizeof ip);
        snprintf(c->remote, sizeof c->remote, "[%s]:%u", ip, ntohs(sa.s_in6.sa_port));
    }
}

/* Takes the stream, also on failure. */
static struct net_ctl *ctl_new(struct owner *o, nng_stream *stream)
{
    struct net_ctl *c = calloc(1, sizeof *c);
    if (!c) goto free_stream;
    c->owner = o;
    c->stream = stream;
    tow_list_init(&c->queue);
    if (io_init(&c->recv, IO_RECV, o, c) < 0) goto free_ctl;
    if (io_init(&c->send, IO_SEND, o, c) < 0) goto free_recv;
    name_remote(c);
    c->opened_ms = tow_now_ms();
    tow_list_append(&o->ctls, &c->in_owner);
    o->n_ctls++;
    return c;

free_recv:
    nng_aio_free(c->recv.aio);
free_ctl:
    free(c);
free_stream:
    nng_stream_free(stream);
    return NULL;
}

static void ctl_free(struct net_ctl *c)
{
    drop_queue(c);
    nng_aio_free(c->recv.aio);
    nng_aio_free(c->send.aio);
    nng_stream_free(c->stream);
    free(c->body);
    free(c);
}

static void ctl_begin(struct owner *o, nng_stream *stream)
{
    struct net_ctl *c = ctl_new(o, stream);
    if (!c) return;
    if (o->hooks.on_open) o->hooks.on_open(o->arg, c);
    if (c->state != CTL_CLOSING) start_recv(c);
}

void net_ctl_set_user(struct net_ctl *c, void *user)
{
    c->user = user;
}
void *net_ctl_user(const struct net_ctl *c)
{
    return c->user;
}
const char *net_ctl_remote(const struct net_ctl *c)
{
    return c->remote;
}
size_t net_ctl_unsent(const struct net_ctl *c)
{
    return c->unsent;
}

/* --- owners ----------------------------------------------------------------------------------- */

static void server_accept(struct net_ctl_server *s);
static void dialer_dial(struct net_ctl_dialer *d);
static void dialer_retry(struct net_ctl_dialer *d, const char *why, bool fresh);
static void ways_free(struct net_ctl_dialer *d);
static void owner_free(struct owner *o);

static void on_accepted(struct net_ctl_server *s, int rv)
{
    struct owner *o = &s->o;
    if (rv == 0) {
        nng_stream *stream = nng_aio_get_output(o->io.aio, 0);
        if (o->closed || o->n_ctls >= o->cfg.max_connections) {
            if (!o->closed)
                tow_warn("control %s: %u connections already; one more is closed", o->url,
                         o->n_ctls);
            nng_stream_free(stream);
        } else {
            ctl_begin(o, stream);
        }
    } else if (!o->closed) {
        tow_warn("control %s: accept: %s", o->url, nng_strerror(rv));
    }
    /* Without descriptors accept fails at once, again and again: the sweep tries later. */
    if (!o->closed && rv == 0) server_accept(s);
}

static void on_dialed(struct net_ctl_dialer *d, int rv)
{
    struct owner *o = &d->o;
    if (rv != 0) {
        if (o->closed) return;
        if (d->way == 0) d->first_rv = rv; /* what the URL itself met is what is told */
        if (++d->way < d->n_ways)
            dialer_dial(d);
        else
            dialer_retry(d, nng_strerror(d->first_rv), false);
        return;
    }
    nng_stream *stream = nng_aio_get_output(o->io.aio, 0);
    if (o->closed)
        nng_stream_free(stream);
    else
        ctl_begin(o, stream);
}

static void on_done(struct owner *o, struct io *io)
{
    int rv = (int)nng_aio_result(io->aio);
    size_t n = rv == 0 ? nng_aio_count(io->aio) : 0;
    io->pending = false;
    switch (io->kind) {
    case IO_RECV: on_received(io->ctl, rv, n); break;
    case IO_SEND: on_sent(io->ctl, rv, n); break;
    case IO_ACCEPT: on_accepted((struct net_ctl_server *)o, rv); break;
    case IO_DIAL: on_dialed((struct net_ctl_dialer *)o, rv); break;
    }
}

static void reap(struct owner *o)
{
    TOW_LIST_EACH_SAFE (node, &o->ctls) {
        struct net_ctl *c = TOW_CONTAINER(node, struct net_ctl, in_owner);
        if (c->state != CTL_CLOSING || c->recv.pending || c->send.pending) continue;
        tow_list_remove(node);
        o->n_ctls--;
        o->hooks.on_close(o->arg, c, c->code, c->why);
        if (o->io.kind == IO_DIAL && !o->closed)
            dialer_retry((struct net_ctl_dialer *)o, c->why,
                         tow_now_ms() - c->opened_ms >= STABLE_MS);
        ctl_free(c);
    }
}

static void on_owner_wake(void *arg)
{
    struct owner *o = arg;
    struct io *io;
    while ((io = take_done(o)) != NULL) on_done(o, io);
    reap(o);
    if (o->closed && !o->io.pending && tow_list_empty(&o->ctls)) owner_free(o);
}

static void on_sweep(void *arg)
{
    struct owner *o = arg;
    uint64_t now = tow_now_ms();
    TOW_LIST_EACH (node, &o->ctls) {
        struct net_ctl *c = TOW_CONTAINER(node, struct net_ctl, in_owner);
        if (c->state == CTL_FINISHING && now >= c->finish_by_ms)
            close_why(c, 0, "finished, with bytes unsent");
        else if (c->state == CTL_OPEN && c->frame_since_ms &&
                 now - c->frame_since_ms >= o->cfg.frame_ms)
            close_why(c, TOW_ETIME, "a frame stayed incomplete for too long");
    }
    if (o->io.kind == IO_DIAL) {
        struct net_ctl_dialer *d = (struct net_ctl_dialer *)o;
        if (d->retry_at_ms && now >= d->retry_at_ms) dialer_dial(d);
    } else if (!o->io.pending) {
        server_accept((struct net_ctl_server *)o);
    }
}

static int owner_init(struct owner *o, struct net_loop *loop, const char *url,
                      const struct net_ctl_config *cfg, const struct net_ctl_hooks *hooks,
                      void *arg, enum io_kind kind, struct tow_err *err)
{
    o->loop = loop;
    if (cfg) o->cfg = *cfg;
    if (!o->cfg.send_bytes) o->cfg.send_bytes = 16u << 20;
    if (!o->cfg.frame_ms) o->cfg.frame_ms = 30000;
    if (!o->cfg.max_connections) o->cfg.max_connections = NET_CTL_MAX;
    if (!o->cfg.retry_min_ms) o->cfg.retry_min_ms = 100;
    if (!o->cfg.retry_max_ms) o->cfg.retry_max_ms = 5000;
    if (!o->cfg.dial_ms) o->cfg.dial_ms = 5000;
    o->hooks = *hooks;
    o->arg = arg;
    tow_list_init(&o->done);
    tow_list_init(&o->ctls);
    if (strlen(url) >= sizeof o->url)
        return tow_fail(err, TOW_ECONFIG, "control URL: longer than %zu bytes", sizeof o->url - 1);
    snprintf(o->url, sizeof o->url, "%s", url);
    if (strncmp(url, "tcp://", 6) != 0 && strncmp(url, "ipc://", 6) != 0)
        return tow_fail(err, TOW_ECONFIG, "control URL %s: tcp://HOST:PORT or ipc://PATH is needed",
                        url);
    pthread_mutex_init(&o->lock, NULL);
    int rc = net_wake_open(&o->wake, loop, on_owner_wake, o, err);
    if (rc < 0) goto destroy_lock;
    rc = net_timer_open(&o->sweep, loop, on_sweep, o, err);
    if (rc < 0) goto close_wake;
    rc = io_init(&o->io, kind, o, NULL);
    if (rc < 0) {
        tow_fail(err, rc, "control URL %s: out of memory or threads (ulimit -u)", url);
        goto close_timer;
    }
    net_timer_start(o->sweep, SWEEP_MS, SWEEP_MS);
    net_loop_hold(loop, 1);
    return 0;

close_timer:
    net_timer_close(o->sweep);
close_wake:
    net_wake_close(o->wake);
destroy_lock:
    pthread_mutex_destroy(&o->lock);
    return rc;
}

static void owner_free(struct owner *o)
{
    nng_aio_free(o->io.aio);
    if (o->io.kind == IO_DIAL)
        ways_free((struct net_ctl_dialer *)o);
    else
        nng_stream_listener_free(((struct net_ctl_server *)o)->listener);
    net_timer_close(o->sweep);
    net_wake_close(o->wake);
    pthread_mutex_destroy(&o->lock);
    net_loop_hold(o->loop, -1);
    free(o);
}

/* Undoes owner_init() when the URL turned out to be useless. */
static void owner_abandon(struct owner *o)
{
    nng_aio_free(o->io.aio);
    net_timer_close(o->sweep);
    net_wake_close(o->wake);
    pthread_mutex_destroy(&o->lock);
    net_loop_hold(o->loop, -1);
    free(o);
}

static void owner_close(struct owner *o)
{
    if (o->closed) return;
    o->closed = true;
    net_timer_stop(o->sweep);
    TOW_LIST_EACH (node, &o->ctls)
        close_why(TOW_CONTAINER(node, struct net_ctl, in_owner), TOW_ECANCEL, "closed by us");
    net_wake_up(o->wake);
}

/* --- server ----------------------------------------------------------------------------------- */

static void server_accept(struct net_ctl_server *s)
{
    s->o.io.pending = true;
    nng_stream_listener_accept(s->listener, s->o.io.aio);
}

/* With port 0 the kernel chose one; the URL then names it. */
static void name_bound(struct net_ctl_server *s)
{
    int port = 0;
    if (strncmp(s->o.url, "tcp://", 6) != 0) return;
    if (nng_stream_listener_get_int(s->listener, NNG_OPT_TCP_BOUND_PORT, &port) != 0) {
        nng_sockaddr sa;
        if (nng_stream_listener_get_addr(s->listener, NNG_OPT_LOCADDR, &sa) != 0) return;
        port = ntohs(sa.s_family == NNG_AF_INET6 ? sa.s_in6.sa_port : sa.s_in.sa_port);
    }
    char *colon = strrchr(s->o.url, ':');
    size_t at = (size_t)(colon - s->o.url);
    if (port > 0 && at > 5) snprintf(colon, sizeof s->o.url - at, ":%d", port);
}

int net_ctl_listen(struct net_ctl_server **out, struct net_loop *loop, const char *url,
                   const struct net_ctl_config *cfg, const struct net_ctl_hooks *hooks, void *arg,
                   struct tow_err *err)
{
    struct net_ctl_server *s = calloc(1, sizeof *s);
    if (!s) return tow_fail(err, TOW_ENOMEM, "control URL %s: out of memory", url);
    int rc = owner_init(&s->o, loop, url, cfg, hooks, arg, IO_ACCEPT, err);
    if (rc < 0) {
        free(s);
        return rc;
    }
    /* nng clears the way for its socket by deleting what is there. */
    struct stat there;
    if (!strncmp(url, "ipc://", 6) && lstat(url + 6, &there) == 0 && !S_ISSOCK(there.st_mode)) {
        owner_abandon(&s->o);
        return tow_fail(err, TOW_ECONFIG, "control URL %s: the path exists and is no socket", url);
    }
    int rv = nng_stream_listener_alloc(&s->listener, url);
    if (rv == 0) {
        nng_stream_listener_set_bool(s->listener, NNG_OPT_TCP_NODELAY, true);
        nng_stream_listener_set_bool(s->listener, NNG_OPT_TCP_KEEPALIVE, true);
        rv = nng_stream_listener_listen(s->listener);
    }
    if (rv != 0) {
        if (s->listener) nng_stream_listener_free(s->listener);
        owner_abandon(&s->o);
        return tow_fail(err, TOW_ECONFIG, "control URL %s: cannot listen: %s", url,
                        nng_strerror(rv));
    }
    name_bound(s);
    server_accept(s);
    *out = s;
    return 0;
}

const char *net_ctl_server_url(const struct net_ctl_server *s)
{
    return s->o.url;
}

void net_ctl_server_close(struct net_ctl_server *s)
{
    if (!s || s->o.closed) return;
    nng_stream_listener_close(s->listener);
    owner_close(&s->o);
}

/* --- dialer ----------------------------------------------------------------------------------- */

static void ways_free(struct net_ctl_dialer *d)
{
    while (d->n_ways) nng_stream_dialer_free(d->ways[--d->n_ways]);
}

static int way_add(struct net_ctl_dialer *d, const char *url)
{
    nng_stream_dialer **way = &d->ways[d->n_ways];
    int rv = nng_stream_dialer_alloc(way, url);
    if (rv != 0) return rv;
    d->n_ways++;
    nng_stream_dialer_set_bool(*way, NNG_OPT_TCP_NODELAY, true);
    nng_stream_dialer_set_bool(*way, NNG_OPT_TCP_KEEPALIVE, true);
    return 0;
}

/* nng dials only the first address that a name resolves to. "localhost" is ::1 first on newer
 * systems and may be served on 127.0.0.1 alone, so a name is dialled in both families too. */
static int ways_open(struct net_ctl_dialer *d, const char *url)
{
    int rv = way_add(d, url);
    if (rv != 0 || strncmp(url, "tcp://", 6) != 0) return rv;
    const char *host = url + 6;
    if (host[0] == '[' || strspn(host, "0123456789.") == strcspn(host, ":/")) return 0;
    for (const char *family = "46"; *family; family++) {
        char one[sizeof d->o.url + 1];
        snprintf(one, sizeof one, "tcp%c://%s", *family, host);
        rv = way_add(d, one);
        if (rv == NNG_ENOMEM) return rv;
    }
    return 0;
}

static void dialer_dial(struct net_ctl_dialer *d)
{
    d->retry_at_ms = 0;
    d->o.io.pending = true;
    nng_aio_set_timeout(d->o.io.aio, (nng_duration)d->o.cfg.dial_ms);
    nng_stream_dialer_dial(d->ways[d->way], d->o.io.aio);
}

static void dialer_retry(struct net_ctl_dialer *d, const char *why, bool fresh)
{
    const struct net_ctl_config *cfg = &d->o.cfg;
    if (fresh || d->pause_ms == 0)
        d->pause_ms = cfg->retry_min_ms;
    else
        d->pause_ms = d->pause_ms > cfg->retry_max_ms / 2 ? cfg->retry_max_ms : d->pause_ms * 2;
    /* Jitter, so that the workers of a restarted router do not come back in step. */
    uint64_t pause = d->pause_ms - tow_random_u64() % (d->pause_ms / 2 + 1);
    d->way = 0;
    d->retry_at_ms = tow_now_ms() + pause;
    if (d->o.hooks.on_retry) d->o.hooks.on_retry(d->o.arg, d->o.url, why, pause);
}

int net_ctl_dial(struct net_ctl_dialer **out, struct net_loop *loop, const char *url,
                 const struct net_ctl_config *cfg, const struct net_ctl_hooks *hooks, void *arg,
                 struct tow_err *err)
{
    struct net_ctl_dialer *d = calloc(1, sizeof *d);
    if (!d) return tow_fail(err, TOW_ENOMEM, "control URL %s: out of memory", url);
    int rc = owner_init(&d->o, loop, url, cfg, hooks, arg, IO_DIAL, err);
    if (rc < 0) {
        free(d);
        return rc;
    }
    int rv = ways_open(d, url);
    if (rv != 0) {
        ways_free(d);
        owner_abandon(&d->o);
        return tow_fail(err, TOW_ECONFIG, "control URL %s: %s%s", url, nng_strerror(rv),
                        rv == NNG_ENOMEM ? ", or out of threads (ulimit -u)" : "");
    }
    dialer_dial(d);
    *out = d;
    return 0;
}

void net_ctl_dialer_close(struct net_ctl_dialer *d)
{
    if (!d || d->o.closed) return;
    for (uint32_t i = 0; i < d->n_ways; i++) nng_stream_dialer_close(d->ways[i]);
    owner_close(&d->o);
}
