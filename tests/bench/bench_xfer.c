/* Page moves against ucx_perftest over the same transport in the same run.
 *
 * Per transport and size: MB/s of our link (net_link reads, or rendezvous messages over TCP, four in
 * flight), of ucx_perftest (ucp_get, ucp_am_bw), their ratio, and what is left when reads walk through
 * the memory and the receiver checks XXH3 digests on the way, as the transfer thread does. The best of three runs each; the goal is a ratio
 * of 0.9. ucx_perftest comes with the package ucx-utils; without it the ratio is left out. */
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/net/link.h"

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WINDOW = 4, RUNS = 3, AREA = 32 << 20, MOVE_BYTES = 512 << 20, MOVES_MAX = 2000 };

struct end {
    struct net_link *link;
    struct net_region *region;
    struct net_ep *ep;
    struct net_rkey *key;
    uint64_t remote;
    int in, out;
    unsigned done, asked;
    bool digests, failed;
    size_t bytes;
    uint64_t sum;
    uint8_t *local;
};

static void die(const char *what)
{
    fprintf(stderr, "bench_xfer: %s\n", what);
    exit(1);
}

static void put(int fd, const void *p, size_t n)
{
    if (write(fd, p, n) != (ssize_t)n) die("pipe");
}

static void get(int fd, void *p, size_t n)
{
    for (size_t have = 0; have < n;) {
        ssize_t k = read(fd, (char *)p + have, n - have);
        if (k <= 0) exit(0);
        have += (size_t)k;
    }
}

static void on_done(void *arg, int code)
{
    struct end *e = arg;
    e->done++;
    if (code != 0) e->failed = true;
}

/* Receiver: one more is here. */
static void on_here(void *arg, int code)
{
    struct end *e = arg;
    if (e->digests) e->sum ^= tow_hash64(e->local, e->bytes);
    on_done(e, code);
}

static void on_message(void *arg, const void *frame, uint32_t bytes)
{
    struct end *e = arg;
    (void)frame;
    e->asked = bytes;
}

static void on_bulk(void *arg, struct net_bulk *bulk, const void *head, uint32_t head_bytes,
                    uint64_t bytes)
{
    struct end *e = arg;
    (void)head, (void)head_bytes, (void)bytes;
    net_bulk_take(bulk, e->local, on_here, e);
}

static void on_ep_error(void *arg, struct net_ep *ep, int code, const char *why)
{
    struct end *e = arg;
    (void)ep, (void)code, (void)why;
    e->failed = true;
}

static void turn(struct end *e)
{
    if (!net_link_progress(e->link)) net_link_wait(e->link, -1, 100);
}

static void open_end(struct end *e)
{
    struct tow_err err = {0};
    struct net_link_hooks hooks = {on_message, on_bulk, on_ep_error, e};
    size_t n, key_n;
    if (net_link_open(&e->link, &hooks, &err) < 0 ||
        net_region_new(e->link, AREA, &e->region, &err) < 0)
        die(err.msg);
    e->local = net_region_base(e->region);
    memset(e->local, 1, AREA);
    const void *a = net_link_address(e->link, &n), *key = net_region_key(e->region, &key_n);
    uint64_t head[3] = {n, key_n, (uintptr_t)e->local};
    put(e->out, head, sizeof head);
    put(e->out, a, n);
    put(e->out, key, key_n);
    get(e->in, head, sizeof head);
    void *address = malloc(head[0]), *remote_key = malloc(head[1]);
    get(e->in, address, head[0]);
    get(e->in, remote_key, head[1]);
    e->remote = head[2];
    if (net_ep_open(e->link, address, head[0], NULL, &e->ep, &err) < 0 ||
        net_rkey_open(e->ep, remote_key, head[1], &e->key, &err) < 0)
        die(err.msg);
    free(address);
    free(remote_key);
}

static unsigned moves_of(size_t bytes)
{
    size_t n = MOVE_BYTES / bytes;
    return n > MOVES_MAX ? MOVES_MAX : (unsigned)n;
}

/* The source: answers {bytes} on its pipe with that many rendezvous messages; 0 bytes: serves reads. */
static void serve(struct end *e)
{
    for (;;) {
        uint64_t bytes;
        get(e->in, &bytes, sizeof bytes);
        unsigned n = bytes ? moves_of(bytes) : 0, begun = 0;
        e->done = e->asked = 0;
        while (bytes ? e->done < n : !e->asked) { /* reads end with a message */
            while (begun < n && begun - e->done < WINDOW) {
                begun++;
                net_ep_send_bulk(e->ep, "h", 1, e->local, bytes, on_done, e);
            }
            if (e->failed) exit(0);
            turn(e);
        }
    }
}

static double move(struct end *e, bool read, size_t bytes)
{
    unsigned n = moves_of(bytes), begun = 0;
    uint64_t order = read ? 0 : bytes;
    e->done = 0;
    e->bytes = bytes;
    put(e->out, &order, sizeof order);
    uint64_t from = tow_now_us();
    while (e->done < n) {
        while (read && begun < n && begun - e->done < WINDOW) {
            size_t at = e->digests ? (begun * bytes) % AREA : 0; /* perftest stays in one place */
            begun++;
            net_ep_get(e->ep, e->key, e->remote + at, e->local + at, bytes, on_here, e);
        }
        if (e->failed) die("the link failed");
        turn(e);
    }
    uint64_t us = tow_now_us() - from;
    if (read) net_ep_send(e->ep, "e", 1);
    return (double)n * (double)bytes / (double)(us ? us : 1);
}

static double best(struct end *e, bool read, size_t bytes)
{
    double top = 0;
    for (int i = 0; i < RUNS; i++) {
        double mb = move(e, read, bytes);
        if (mb > top) top = mb;
    }
    return top;
}

/* ucx_perftest's overall bandwidth in MB/s (10^6), 0 when it cannot be had. */
static double perftest(const char *tls, const char *test, size_t bytes)
{
    char line[400];
    double top = 0;
    for (int i = 0; i < RUNS; i++) {
        int port = 20000 + (int)(tow_random_u64() % 20000);
        snprintf(line, sizeof line,
                 "export UCX_TLS=%s UCX_TCP_SNDBUF=4M UCX_TCP_RCVBUF=4M UCX_WARN_UNUSED_ENV_VARS=n;"
                 " ucx_perftest -p %d >/dev/null 2>&1 & s=$!; sleep 0.3;"
                 " ucx_perftest 127.0.0.1 -p %d -t %s -s %zu -n %u -w 10 -f -v 2>/dev/null"
                 " | tail -n 1; kill $s 2>/dev/null; wait",
                 tls, port, port, test, bytes, moves_of(bytes));
        FILE *f = popen(line, "r");
        double overall = 0;
        if (f && fgets(line, sizeof line, f))
            if (sscanf(line, "%*[^,],%*[^,],%*[^,],%*[^,],%*[^,],%lf", &overall) != 1) overall = 0;
        if (f) pclose(f);
        overall *= 1.048576; /* it prints MiB/s */
        if (overall > top) top = overall;
    }
    return top;
}

static void bench(const char *label, const char *tls, bool read)
{
    int to[2], from[2];
    if (pipe(to) < 0 || pipe(from) < 0) die("pipe");
    pid_t pid = fork();
    setenv("UCX_TLS", tls, 1);
    net_link_setup();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        struct end e = {.in = to[0], .out = from[1]};
        close(to[1]), close(from[0]);
        open_end(&e);
        serve(&e);
    }
    struct end e = {.in = from[0], .out = to[1]};
    close(to[0]), close(from[1]);
    open_end(&e);
    for (size_t bytes = 64 << 10; bytes <= 16 << 20; bytes *= 4) {
        move(&e, read, bytes); /* wire-up and first touch */
        e.digests = false;
        double link = best(&e, read, bytes);
        e.digests = true;
        double checked = best(&e, read, bytes);
        double theirs = perftest(tls, read ? "ucp_get" : "ucp_am_bw", bytes);
        printf("xfer %s %5zuK: link %8.0f MB/s", label, bytes >> 10, link);
        if (theirs > 0) printf(", ucx_perftest %8.0f MB/s, ratio %.2f", theirs, link / theirs);
        printf(", with digests %8.0f MB/s\n", checked);
        fflush(stdout);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    /* One process per transport: UCX reads its environment when a context is made. */
    static const struct {
        const char *label, *tls;
        bool read;
    } rows[] = {{"posix get", "posix,self", true}, {"tcp am", "tcp,self", false}};
    int rc = 0;
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            bench(rows[i].label, rows[i].tls, rows[i].read);
            _exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status)) rc = 1;
    }
    return rc;
}
