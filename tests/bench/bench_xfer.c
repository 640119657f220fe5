/* Page moves against ucx_perftest over the same transport in the same run.
 *
 * What     Per transport and size, in MB/s and as medians of ROUNDS rounds in which the programs
 *          take turns:
 *            ucx_perftest  ucp_get, ucp_am_bw: from one place to one place, so that its
 *                          bytes stay in the caches
 *            link          the same through net_link: reads, or over TCP rendezvous messages
 *            pages         one sequence through two movers: offers with digests, each part
 *                          digested again where it arrives and compared, an ACK per part
 *          The link and the pages are measured in one place as well, another one each round,
 *          because how a megabyte fits the caches depends on its addresses; and walking through
 *          AREA bytes. Each is warmed up first, as ucx_perftest is by its -w: the ends have slept.
 *          Each mover's thread has a core of its own; ucx_perftest's processes, which never rest,
 *          are spread over the cores by the system.
 * Digests  The source's are made where its pages are, when they are filled, as a worker's engine
 *          does when a page is complete, and not again for each sequence that carries the page. So
 *          they are not in the time of a move. What they cost the maker has a row of its own.
 * Ratios   The link moves what ucx_perftest moves. The receiver of pages also runs an XXH3 digest
 *          over each byte on the thread that copied it, so one core can do no more than
 *          1 / (1 / copy + 1 / digest): their second ratio is to that, with the digest's speed on
 *          bytes in the cache from the same run.
 * Note     ucx_perftest comes with the package ucx-utils; without it its ratios are left out. */
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/kv/mover.h"
#include "common/net/link.h"

#include <sched.h>
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
    ROUNDS = 7,
    AREA = 32 << 20,
    TAIL = 4096,
    MOVE_BYTES = 1 << 30,
    WARM_PART = 16, /* of a move's parts, moved before it */
    MOVES_MAX = MOVE_BYTES / (64 << 10),
    AREA_PAGES_MAX = AREA / (64 << 10)
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
    size_t bytes, at, one; /* one: where moves in one place go */
    uint8_t *local;
    /* the movers */
    struct kv_mover *mover;
    sem_t wakes;
    uint64_t digests[AREA_PAGES_MAX], tail_digest; /* the source's */
};

/* What the source is asked for over its pipe. */
struct order {
    uint64_t kind; /* enum below */
    uint64_t walk, one, n;
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
    size_t at = e->walk ? e->at : e->one;
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

static unsigned warm_moves_of(size_t bytes)
{
    return (moves_of(bytes) + WARM_PART - 1) / WARM_PART;
}

/* --- the link --------------------------------------------------------------------------------- */

static void send_bulks(struct end *e, unsigned n)
{
    unsigned begun = 0;
    while (e->done < n) {
        while (begun < n && begun - e->done < WINDOW) {
            begun++;
            net_ep_send_bulk(e->ep, "h", 1, e->local + place(e), e->bytes, on_done, e);
        }
        if (e->failed) die("the link failed");
        turn(e);
    }
}

static double move_some(struct end *e, bool read, bool walk, unsigned n)
{
    unsigned begun = 0;
    struct order order = {
        .kind = read ? SERVE_READS : SEND_BULKS, .walk = walk, .one = e->one, .n = n};
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

static double move(struct end *e, bool read, bool walk)
{
    move_some(e, read, walk, warm_moves_of(e->bytes));
    return move_some(e, read, walk, moves_of(e->bytes));
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

/* The k-th of the cores that this process may use, for threads that are made from here on. */
static void use_core(int k)
{
    cpu_set_t all, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof all, &all) < 0 || CPU_COUNT(&all) < 2) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all) && k-- == 0) CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
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
    cpu_set_t cores;
    sem_init(&e->wakes, 0, 0);
    sched_getaffinity(0, sizeof cores, &cores);
    use_core(source ? 1 : 0);
    if (kv_mover_open(&e->mover, &c, &err) < 0) die(err.msg);
    sched_setaffinity(0, sizeof cores, &cores);
    uint64_t *pages = kv_mover_area(e->mover, KV_AREA_PAGES);
    uint8_t *tail = kv_mover_area(e->mover, KV_AREA_TAILS);
    for (size_t i = 0; i < AREA / sizeof *pages; i++) pages[i] = i * 0x9E3779B97F4A7C15ull;
    memset(tail, 1, TAIL);
    if (source) {
        for (size_t at = 0; at < AREA; at += e->bytes)
            e->digests[at / e->bytes] = tow_hash64((uint8_t *)pages + at, e->bytes);
        e->tail_digest = tow_hash64(tail, TAIL);
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
    uint32_t n = (uint32_t)o->n;
    struct kv_send s = {.ticket = o->ticket, .peer = "sink", .incarnation = 2, .n_pages = n};
    for (uint32_t i = 0; i < n; i++) {
        const size_t at = place(e);
        parts[i] = (struct kv_offer){i, at, e->digests[at / e->bytes]};
    }
    parts[n] = (struct kv_offer){.index = KV_PART_TAIL, .digest = e->tail_digest};
    if (kv_mover_send(e->mover, &s) < 0 ||
        kv_mover_offer(e->mover, o->ticket, parts, n + 1, NULL, 0) < 0)
        die("the source's mover takes no command");
    wait_event(e, KV_MOVER_ENDED, &ev);
}

static double ship_some(struct end *e, bool walk, uint32_t n)
{
    static uint64_t offsets[MOVES_MAX];
    struct kv_mover_event ev;
    struct order order = {.kind = SHIP_PAGES,
                          .walk = walk,
                          .one = e->one,
                          .n = n,
                          .ticket = {tow_random_u64(), tow_random_u64()}};
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

static double ship(struct end *e, bool walk)
{
    ship_some(e, walk, warm_moves_of(e->bytes));
    return ship_some(e, walk, moves_of(e->bytes));
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
        e->one = o.one;
        if (o.kind == SEND_BULKS)
            send_bulks(e, (unsigned)o.n);
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

/* What its maker pays for a page's digest: pages are written, each is digested while the core that
 * wrote it has its bytes. */
static void print_making(struct end *e, const char *label)
{
    uint8_t *page = malloc(e->bytes);
    double writing[ROUNDS], digesting[ROUNDS];
    volatile uint64_t sum = 0;
    if (!page) die("memory");
    memset(page, 3, e->bytes);
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t writing_ns = 0, digesting_ns = 0;
        for (size_t at = 0; at < AREA; at += e->bytes) {
            uint64_t from = tow_now_ns();
            memcpy(e->local + at, page, e->bytes);
            uint64_t written = tow_now_ns();
            sum ^= tow_hash64(e->local + at, e->bytes);
            writing_ns += written - from;
            digesting_ns += tow_now_ns() - written;
        }
        writing[i] = (double)writing_ns;
        digesting[i] = (double)digesting_ns;
    }
    double w = median(writing), d = median(digesting), n = (double)AREA / (double)e->bytes;
    printf("maker %s %zuK: digest at completion %.0f MB/s, %.1f us a page, which takes %.1f us to "
           "write even with nothing to compute\n",
           label, e->bytes >> 10, AREA / d * 1e3, d / n / 1e3, w / n / 1e3);
    free(page);
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
        static struct end e;
        e = (struct end){.in = to[0], .out = from[1], .bytes = bytes};
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
        e.one = (size_t)i * bytes % AREA;
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
    print_making(&e, label);
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
