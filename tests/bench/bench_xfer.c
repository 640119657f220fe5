/* Page moves against ucx_perftest over the same transport in the same run.
 *
 * What     Per transport and size, in MB/s and as medians of ROUNDS rounds in which the programs
 *          take turns:
 *            ucx_perftest  ucp_get, ucp_am_bw: from one place to one place, so that its
 *                          bytes stay in the caches
 *            link          the same through net_link: reads, or over TCP rendezvous messages
 *            pages         one sequence through two movers: offers, digests at both ends, an ACK
 *                          per part
 *          The link and the pages are measured in one place as well, and walking through AREA
 *          bytes.
 * Ratios   The link moves what ucx_perftest moves. Pages also run an XXH3 digest over each byte on
 *          the thread that copied it, so one core can do no more than 1 / (1 / copy + 1 / digest):
 *          their second ratio is to that, with the digest's speed on bytes in the cache from the
 *          same run.
 * Note     ucx_perftest comes with the package ucx-utils; without it its ratios are left out. */
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/kv/mover.h"
#include "common/net/link.h"

#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* WINDOW is the mover's: as many reads in flight. ucx_perftest sets itself no limit, which suits it
 * best. */
enum {
    WINDOW = 8,
    ROUNDS = 5,
    AREA = 32 << 20,
    TAIL = 4096,
    MOVE_BYTES = 1 << 30,
    MOVES_MAX = MOVE_BYTES / (64 << 10)
};

struct end {
    int in, out;
    /* the link */
    struct net_link *link;
    struct net_region *region;
    struct net_ep *ep;
    struct net_rkey *key;
    uint64_t remote;
    unsigned done, asked;
    bool failed, walk;
    size_t bytes, at;
    uint8_t *local;
    /* the movers */
    struct kv_mover *mover;
    sem_t wakes;
};

/* What the source is asked for over its pipe. */
struct order {
    uint64_t kind; /* enum below */
    uint64_t walk;
    struct kv_ticket ticket;
};
enum { SERVE_READS, SEND_BULKS, SHIP_PAGES };

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

static void on_message(void *arg, const void *frame, uint32_t bytes)
{
    struct end *e = arg;
    (void)frame;
    e->asked = bytes;
}

/* Where the next move goes. */
static size_t place(struct end *e)
{
    size_t at = e->walk ? e->at : 0;
    e->at = (e->at + e->bytes) % AREA;
    return at;
}

static void on_bulk(void *arg, struct net_bulk *bulk, const void *head, uint32_t head_bytes,
                    uint64_t bytes)
{
    struct end *e = arg;
    (void)head, (void)head_bytes, (void)bytes;
    net_bulk_take(bulk, e->local + place(e), on_done, e);
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

/* --- the link --------------------------------------------------------------------------------- */

static void send_bulks(struct end *e)
{
    unsigned n = moves_of(e->bytes), begun = 0;
    while (e->done < n) {
        while (begun < n && begun - e->done < WINDOW) {
            begun++;
            net_ep_send_bulk(e->ep, "h", 1, e->local + place(e), e->bytes, on_done, e);
        }
        if (e->failed) die("the link failed");
        turn(e);
    }
}

static double move(struct end *e, bool read, bool walk)
{
    unsigned n = moves_of(e->bytes), begun = 0;
    struct order order = {.kind = read ? SERVE_READS : SEND_BULKS, .walk = walk};
    e->done = 0;
    e->at = 0;
    e->walk = walk;
    put(e->out, &order, sizeof order);
    uint64_t from = tow_now_us();
    while (e->done < n) {
        while (read && begun < n && begun - e->done < WINDOW) {
            size_t at = place(e);
            begun++;
            net_ep_get(e->ep, e->key, e->remote + at, e->local + at, e->bytes, on_done, e);
        }
        if (e->failed) die("the link failed");
        turn(e);
    }
    uint64_t us = tow_now_us() - from;
    if (read) net_ep_send(e->ep, "e", 1);
    return (double)n * (double)e->bytes / (double)(us ? us : 1);
}

/* --- the movers ------------------------------------------------------------------------------- */

static void on_wake(void *arg)
{
    sem_post(&((struct end *)arg)->wakes);
}

static void wait_event(struct end *e, enum kv_mover_event_kind kind, struct kv_mover_event *ev)
{
    for (;;) {
        while (kv_mover_event(e->mover, ev)) {
            if (ev->kind != KV_MOVER_PEER_DOWN && ev->code == 0) {
                if (ev->kind == kind) return;
                continue;
            }
            die(ev->text);
        }
        sem_wait(&e->wakes);
    }
}

static void open_mover(struct end *e, bool source, struct kv_mover_event *up)
{
    struct tow_err err = {0};
    struct kv_mover_config c = {.name = source ? "source" : "sink",
                                .incarnation = source ? 1 : 2,
                                .area_bytes = {AREA, TAIL},
                                .page_bytes = e->bytes,
                                .tail_bytes = TAIL,
                                .wake = on_wake,
                                .wake_arg = e};
    uint8_t address[65536];
    size_t n;
    sem_init(&e->wakes, 0, 0);
    if (kv_mover_open(&e->mover, &c, &err) < 0) die(err.msg);
    uint64_t *pages = kv_mover_area(e->mover, KV_AREA_PAGES);
    for (size_t i = 0; i < AREA / sizeof *pages; i++) pages[i] = i * 0x9E3779B97F4A7C15ull;
    memset(kv_mover_area(e->mover, KV_AREA_TAILS), 1, TAIL);
    if (source) {
        get(e->in, &n, sizeof n);
        if (n > sizeof address) die("address");
        get(e->in, address, n);
        if (kv_mover_connect(e->mover, "sink", 2, address, n) < 0) die("no connect");
    } else {
        const void *a = kv_mover_address(e->mover, &n);
        put(e->out, &n, sizeof n);
        put(e->out, a, n);
    }
    wait_event(e, KV_MOVER_PEER_UP, up);
}

static void ship_pages(struct end *e, const struct order *o)
{
    static struct kv_offer parts[MOVES_MAX + 1];
    struct kv_mover_event ev;
    uint32_t n = moves_of(e->bytes);
    struct kv_send s = {.ticket = o->ticket, .peer = "sink", .incarnation = 2, .n_pages = n};
    for (uint32_t i = 0; i < n; i++) parts[i] = (struct kv_offer){.index = i, .offset = place(e)};
    parts[n] = (struct kv_offer){.index = KV_PART_TAIL};
    if (kv_mover_send(e->mover, &s) < 0 ||
        kv_mover_offer(e->mover, o->ticket, parts, n + 1, NULL, 0) < 0)
        die("the source's mover takes no command");
    wait_event(e, KV_MOVER_ENDED, &ev);
}

static double ship(struct end *e, bool walk)
{
    static uint64_t offsets[MOVES_MAX];
    struct kv_mover_event ev;
    uint32_t n = moves_of(e->bytes);
    struct order order = {
        .kind = SHIP_PAGES, .walk = walk, .ticket = {tow_random_u64(), tow_random_u64()}};
    e->at = 0;
    e->walk = walk;
    for (uint32_t i = 0; i < n; i++) offsets[i] = place(e);
    struct kv_expect x = {.ticket = order.ticket,
                          .peer = "source",
                          .incarnation = 1,
                          .page_offsets = offsets,
                          .n_pages = n};
    uint64_t from = tow_now_us();
    if (kv_mover_expect(e->mover, &x) < 0) die("the sink's mover takes no command");
    put(e->out, &order, sizeof order);
    wait_event(e, KV_MOVER_ENDED, &ev);
    uint64_t us = tow_now_us() - from;
    return (double)n * (double)e->bytes / (double)(us ? us : 1);
}

/* --- both ends -------------------------------------------------------------------------------- */

static void serve(struct end *e)
{
    for (;;) {
        struct order o;
        get(e->in, &o, sizeof o);
        e->done = e->asked = 0;
        e->at = 0;
        e->walk = o.walk != 0;
        if (o.kind == SEND_BULKS)
            send_bulks(e);
        else if (o.kind == SHIP_PAGES)
            ship_pages(e, &o);
        else
            while (!e->asked) turn(e); /* reads end with a message */
    }
}

/* ucx_perftest's overall bandwidth in MB/s (10^6), 0 when it cannot be had. */
static double perftest(const char *tls, const char *test, size_t bytes)
{
    char line[700];
    int port = 20000 + (int)(tow_random_u64() % 20000);
    snprintf(line, sizeof line,
             "unset UCX_TCP_RX_SEG_SIZE;" /* ours; it does best with its own */
             "export UCX_TLS=%s UCX_TCP_SNDBUF=4M UCX_TCP_RCVBUF=4M UCX_WARN_UNUSED_ENV_VARS=n;"
             " ucx_perftest -p %d >/dev/null 2>&1 & s=$!; i=0;" /* asked again until it listens */
             " until o=$(ucx_perftest 127.0.0.1 -p %d -t %s -s %zu -n %u -w 10 -f -v 2>/dev/null)"
             " || [ $i -ge 100 ] || ! kill -0 $s; do i=$((i+1)); sleep 0.1; done;"
             " echo \"$o\" | tail -n 1; kill $s 2>/dev/null; wait",
             tls, port, port, test, bytes, moves_of(bytes));
    FILE *f = popen(line, "r");
    double overall = 0;
    if (f && fgets(line, sizeof line, f))
        if (sscanf(line, "%*[^,],%*[^,],%*[^,],%*[^,],%*[^,],%lf", &overall) != 1) overall = 0;
    if (f) pclose(f);
    return overall * 1.048576; /* it prints MiB/s */
}

/* Of bytes that a copy has just brought into the cache. */
static double digest_rate(const uint8_t *p)
{
    enum { HOT = 64 << 10, TIMES = 1000 };
    volatile uint64_t sum = 0;
    uint64_t from = tow_now_us();
    for (int i = 0; i < TIMES; i++) sum ^= tow_hash64(p, HOT);
    uint64_t us = tow_now_us() - from;
    return (double)HOT * TIMES / (double)(us ? us : 1);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v)
{
    qsort(v, ROUNDS, sizeof *v, by_size);
    return v[ROUNDS / 2];
}

static double both(double copy, double digest)
{
    return 1 / (1 / copy + 1 / digest);
}

_Noreturn static void bench(const char *label, const char *tls, bool read, size_t bytes)
{
    int to[2], from[2];
    struct kv_mover_event up;
    if (pipe(to) < 0 || pipe(from) < 0) die("pipe");
    pid_t pid = fork();
    setenv("UCX_TLS", tls, 1);
    net_link_setup();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        struct end e = {.in = to[0], .out = from[1], .bytes = bytes};
        close(to[1]), close(from[0]);
        open_end(&e);
        open_mover(&e, true, &up);
        serve(&e);
    }
    struct end e = {.in = from[0], .out = to[1], .bytes = bytes};
    close(to[0]), close(from[1]);
    open_end(&e);
    open_mover(&e, false, &up);
    move(&e, read, true); /* wire-up and first touch */
    ship(&e, true);
    double theirs[ROUNDS], link[ROUNDS], pages[ROUNDS], link_walk[ROUNDS], pages_walk[ROUNDS],
        digest[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        link[i] = move(&e, read, false);
        theirs[i] = perftest(tls, read ? "ucp_get" : "ucp_am_bw", bytes);
        pages[i] = ship(&e, false);
        link_walk[i] = move(&e, read, true);
        pages_walk[i] = ship(&e, true);
        digest[i] = digest_rate(e.local);
    }
    double ceiling = median(theirs), copy = median(link), walk = median(link_walk),
           d = median(digest), p = median(pages), pw = median(pages_walk);
    printf("xfer %s %5zuK: ucx_perftest %6.0f MB/s, link %6.0f, pages %6.0f; walking %d MB: link "
           "%6.0f, pages %6.0f; digest %6.0f; pages by %s over %s\n",
           label, bytes >> 10, ceiling, copy, p, AREA >> 20, walk, pw, d,
           up.method == KV_MOVE_GET ? "reads" : "messages", up.transport);
    if (ceiling > 0)
        printf(
            "ratio: %s %zuK: link %.2f of ucx_perftest; pages %.2f of it, %.2f of it and a digest "
            "on one core; walking, pages %.2f of link and digest\n",
            label, bytes >> 10, copy / ceiling, p / ceiling, p / both(ceiling, d),
            pw / both(walk, d));
    fflush(stdout);
    _exit(0); /* the source dies with us, before our mover can miss it */
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    static const struct {
        const char *label, *tls;
        bool read;
    } rows[] = {{"posix get", "posix,self", true}, {"tcp am", "tcp,self", false}};
    int rc = 0;
    for (int i = 0; i < 2; i++) {
        if (argc > 1 && !strstr(rows[i].label, argv[1])) continue;
        /* A process each: UCX reads its environment when a context is made, a mover has one page
         * size. */
        for (size_t bytes = 64 << 10; bytes <= 16 << 20; bytes *= 4) {
            if (argc > 2 && bytes != (size_t)atol(argv[2]) << 10) continue;
            pid_t pid = fork();
            if (pid == 0) bench(rows[i].label, rows[i].tls, rows[i].read, bytes);
            int status;
            waitpid(pid, &status, 0);
            if (!WIFEXITED(status) || WEXITSTATUS(status)) rc = 1;
        }
    }
    return rc;
}
