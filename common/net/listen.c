/* net/listen.c - see listen.h.
 *
 * How      A connection is turned away through a handle that is always there. While that one is
 *          still closing, the next client to be turned away waits inside libuv, which announces no
 *          other meanwhile; once the handle is free, that client is announced again, when there may
 *          be memory for it.
 */
#include "common/net/listen.h"

#include "common/base/err.h"
#include "common/base/log.h"
#include "common/base/opt.h"

#include <arpa/inet.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

enum { BACKLOG = 1024 };

struct net_listen {
    uv_tcp_t tcp, away;
    bool turning_away, waiting; /* `away` is in use; another client waits for it */
    bool closing;
    unsigned n_handles; /* not closed yet */
    uint16_t port;
    char what[64];
    net_listen_fn on_client;
    void *arg;
    void (*on_closed)(void *arg);
    void *closed_arg;
};

static void on_handle_closed(uv_handle_t *uv)
{
    struct net_listen *l = uv->data;
    if (--l->n_handles > 0) return;
    void (*on_closed)(void *) = l->on_closed;
    void *arg = l->closed_arg;
    free(l);
    if (on_closed) on_closed(arg);
}

static void on_connection(uv_stream_t *uv, int status)
{
    struct net_listen *l = uv->data;
    if (status < 0)
        tow_warn("%s: accept: %s", l->what, uv_strerror(status));
    else if (!l->closing)
        l->on_client(l->arg);
}

int net_listen_accept(struct net_listen *l, uv_tcp_t *into)
{
    return uv_accept((uv_stream_t *)&l->tcp, (uv_stream_t *)into);
}

static void on_turned_away(uv_handle_t *uv)
{
    struct net_listen *l = uv->data;
    l->turning_away = false;
    bool again = l->waiting && !l->closing;
    l->waiting = false;
    if (again) l->on_client(l->arg);
    on_handle_closed(uv);
}

void net_listen_turn_away(struct net_listen *l)
{
    if (l->turning_away) {
        l->waiting = true;
        return;
    }
    l->turning_away = true;
    l->n_handles++;
    uv_tcp_init(l->tcp.loop, &l->away);
    l->away.data = l;
    net_listen_accept(l, &l->away);
    uv_close((uv_handle_t *)&l->away, on_turned_away);
}

static int to_sockaddr(const char *addr, const char *what, struct sockaddr_storage *out,
                       struct tow_err *err)
{
    struct tow_addr a;
    int rc = tow_addr_parse(addr, what, &a, err);
    if (rc < 0) return rc;
    const char *host = strcmp(a.host, "localhost") ? a.host : "127.0.0.1";
    int uv = strchr(host, ':') ? uv_ip6_addr(host, a.port, (struct sockaddr_in6 *)out)
                               : uv_ip4_addr(host, a.port, (struct sockaddr_in *)out);
    if (uv == 0) return 0;
    return tow_fail(err, TOW_ECONFIG,
                    "%s: '%.100s' is not right; to listen on, a number is needed, like 127.0.0.1, "
                    "0.0.0.0 or [::1], or localhost",
                    what, addr);
}

int net_listen_open(struct net_listen **out, uv_loop_t *loop, const char *addr, const char *what,
                    net_listen_fn on_client, void *arg, struct tow_err *err)
{
    struct sockaddr_storage sa = {0};
    int rc = to_sockaddr(addr, what, &sa, err);
    if (rc < 0) return rc;
    struct net_listen *l = calloc(1, sizeof *l);
    if (!l) return tow_fail(err, TOW_ENOMEM, "%s %s: out of memory", what, addr);
    snprintf(l->what, sizeof l->what, "%s %s", what, addr);
    l->on_client = on_client;
    l->arg = arg;
    l->n_handles = 1;
    uv_tcp_init(loop, &l->tcp);
    l->tcp.data = l;
    rc = uv_tcp_bind(&l->tcp, (struct sockaddr *)&sa, 0);
    if (rc == 0) rc = uv_listen((uv_stream_t *)&l->tcp, BACKLOG, on_connection);
    if (rc == 0) {
        int n = sizeof sa;
        rc = uv_tcp_getsockname(&l->tcp, (struct sockaddr *)&sa, &n);
    }
    if (rc < 0) {
        net_listen_close(l, NULL, NULL);
        return tow_fail(err, TOW_ECONFIG, "%s %s: cannot listen there: %s", what, addr,
                        uv_strerror(rc));
    }
    l->port = ntohs(sa.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&sa)->sin6_port
                                             : ((struct sockaddr_in *)&sa)->sin_port);
    *out = l;
    return 0;
}

uint16_t net_listen_port(const struct net_listen *l)
{
    return l->port;
}

void net_listen_close(struct net_listen *l, void (*on_closed)(void *arg), void *arg)
{
    if (!l || l->closing) return;
    l->closing = true;
    l->on_closed = on_closed;
    l->closed_arg = arg;
    uv_close((uv_handle_t *)&l->tcp, on_handle_closed);
}
