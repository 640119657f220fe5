/* Two processes that ship pages: either is killed or stopped at random moments, and the path
 * between two network namespaces is cut and mended.
 *
 * Each round: decode expects a ticket, grants it through a pipe, prefill offers pages of a pattern
 * that belongs to the ticket. Then one of them is killed or stopped in mid-flight. The other one
 * must hear that its ticket has ended within its limits; decode then paints its pages and looks
 * again after the stopped one went on: paint that changed means that somebody wrote into pages that
 * were given back. TOW_ROUNDS sets the rounds per transport (default 8). */
#include "tests/support/check.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/kv/mover.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 256 * 1024, TAIL = 64 * 1024, PAGES = 64, QUIET_MS = 250, PAINT = 0xEE };
/* Through test_limit_ms(): a busy machine must not let links and tickets end by themselves. */
enum { HEARTBEAT_MS = 200, LEASE_MS = 3000, ENDS_WITHIN_MS = 15000, PATIENCE_MS = 60000 };
/* Exit codes of the children. */
enum { FINE = 0, NO_MOVER = 10, WRONG_BYTES, SCRIBBLED, TOO_LATE, LOST_PIPE, REFUSED };

static const char *const exits[] = {"no mover",
                                    "wrong bytes arrived",
                                    "pages given back were written",
                                    "no end within the limit",
                                    "pipe closed",
                                    "a command was not taken"};

/* --- a child: one mover and two pipes --------------------------------------------------------- */

struct child {
    struct kv_mover *m;
    int in, out; /* from and to the parent */
    int wake[2]; /* the mover's wake-up */
    uint8_t *pages, *tails;
};

static void on_wake(void *arg)
{
    struct child *c = arg;
    ssize_t n = write(c->wake[1], "w", 1);
    (void)n;
}

static void child_open(struct child *c, const char *name, uint64_t incarnation)
{
    struct tow_err err = {0};
    if (pipe2(c->wake, O_NONBLOCK) < 0) _exit(NO_MOVER);
    struct kv_mover_config cfg = {.name = name,
                                  .incarnation = incarnation,
                                  .area_bytes = {(size_t)PAGES * PAGE, TAIL},
                                  .page_bytes = PAGE,
                                  .tail_bytes = TAIL,
                                  .heartbeat_ms = test_limit_ms(HEARTBEAT_MS),
                                  .lease_ms = test_limit_ms(LEASE_MS),
                                  .wake = on_wake,
                                  .wake_arg = c};
    if (kv_mover_open(&c->m, &cfg, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        _exit(NO_MOVER);
    }
    c->pages = kv_mover_area(c->m, KV_AREA_PAGES);
    c->tails = kv_mover_area(c->m, KV_AREA_TAILS);
}

static bool is_child;

static void must(int rc)
{
    if (rc < 0) _exit(REFUSED);
}

static void put(int fd, const void *p, size_t n)
{
    if (write(fd, p, n) != (ssize_t)n && is_child) _exit(FINE); /* the parent is done with us */
}

static bool get(int fd, void *p, size_t n)
{
    for (size_t have = 0; have < n;) {
        ssize_t k = read(fd, (char *)p + have, n - have);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        have += (size_t)k;
    }
    return true;
}

/* Waits for an event, input on c->in (*input), or until; false when the time is over. */
static bool wait_child(struct child *c, struct kv_mover_event *ev, bool *input, uint64_t until)
{
    for (;;) {
        char drop[64];
        *input = false;
        while (read(c->wake[0], drop, sizeof drop) > 0) {
        }
        if (kv_mover_event(c->m, ev)) return true;
        uint64_t now = tow_now_ms();
        if (now >= until) return false;
        struct pollfd fds[2] = {{c->wake[0], POLLIN, 0}, {c->in, POLLIN, 0}};
        poll(fds, 2, (int)(until - now));
        if (fds[1].revents) {
            *input = true;
            return true;
        }
    }
}

/* Eight bytes of the pages of ticket k. No byte is that of the paint, which is even. */
static uint64_t pattern(uint64_t k, size_t word)
{
    return (k + word) * 0x9E3779B97F4A7C15ull | 0x0101010101010101ull;
}

static void fill(uint8_t *p, size_t n, uint64_t k)
{
    for (size_t i = 0; i < n / 8; i++) {
        uint64_t v = pattern(k, i);
        memcpy(p + i * 8, &v, 8);
    }
}

static bool holds(const uint8_t *p, size_t n, uint64_t k)
{
    for (size_t i = 0; i < n / 8; i++) {
        uint64_t v;
        memcpy(&v, p + i * 8, 8);
        if (v != pattern(k, i)) return false;
    }
    return true;
}

/* Prefill: an 8-byte number on the pipe is a GRANT; ships that ticket. Exits when one fails. */
static void run_prefill(struct child *c)
{
    uint8_t address[4096];
    uint32_t n;
    if (!get(c->in, &n, sizeof n) || !get(c->in, address, n)) _exit(LOST_PIPE);
    must(kv_mover_connect(c->m, "d", 2, address, n));
    struct kv_mover_event ev;
    bool input, up = false, busy = false;
    uint64_t until = UINT64_MAX / 2;
    for (;;) {
        if (!wait_child(c, &ev, &input, busy ? until : tow_now_ms() + test_limit_ms(PATIENCE_MS)))
            _exit(TOO_LATE);
        if (input) {
            uint64_t k;
            if (!get(c->in, &k, sizeof k)) _exit(FINE); /* the parent is done with us */
            /* While a ticket is live its pages are not ours to fill;
             * the grant's lease will end it. */
            if (!up || busy) continue;
            struct kv_ticket t = {k, ~k};
            struct kv_send s = {.ticket = t, .peer = "d", .incarnation = 2, .n_pages = PAGES};
            struct kv_offer o[PAGES + 1];
            fill(c->pages, (size_t)PAGES * PAGE, k);
            for (uint32_t i = 0; i < PAGES; i++) {
                const uint64_t offset = (uint64_t)i * PAGE;
                o[i] = (struct kv_offer){i, offset, tow_hash64(c->pages + offset, PAGE)};
            }
            o[PAGES] = (struct kv_offer){KV_PART_TAIL, 0, tow_hash64(c->tails, TAIL)};
            must(kv_mover_send(c->m, &s));
            must(kv_mover_offer(c->m, t, o, PAGES + 1, "n", 1));
            busy = true;
            until = tow_now_ms() + test_limit_ms(ENDS_WITHIN_MS);
            continue;
        }
        if (ev.kind == KV_MOVER_PEER_UP) {
            up = true;
            put(c->out, "u", 1);
        } else if (ev.kind == KV_MOVER_PEER_DOWN) {
            up = false;
            put(c->out, "d", 1);
        } else if (ev.kind == KV_MOVER_ENDED) {
            busy = false;
            put(c->out, ev.code ? "f" : "o", 1);
        }
    }
}

static void check_paint(struct child *c)
{
    for (size_t i = 0; i < (size_t)PAGES * PAGE; i++)
        if (c->pages[i] != PAINT) _exit(SCRIBBLED);
}

/* Decode: 'g' on the pipe: expect the next ticket and grant it. Tells each end;
 * paints after a failure. */
static void run_decode(struct child *c, int grant)
{
    size_t n;
    const void *a = kv_mover_address(c->m, &n);
    uint32_t n32 = (uint32_t)n;
    put(c->out, &n32, sizeof n32);
    put(c->out, a, n);
    struct kv_mover_event ev;
    bool input, busy = false, painted = false;
    uint64_t k = 0, until = UINT64_MAX / 2;
    uint64_t offsets[PAGES];
    for (uint32_t i = 0; i < PAGES; i++) offsets[i] = (uint64_t)i * PAGE;
    for (;;) {
        if (!wait_child(c, &ev, &input, busy ? until : tow_now_ms() + test_limit_ms(PATIENCE_MS)))
            _exit(TOO_LATE);
        if (input) {
            char what;
            if (!get(c->in, &what, 1)) _exit(FINE);
            if (what == 'c') { /* look at the paint, which has had time to be spoilt */
                if (painted) check_paint(c);
                put(c->out, "c", 1);
                continue;
            }
            k = tow_random_u64();
            painted = false;
            struct kv_expect e = {.ticket = {k, ~k},
                                  .peer = "p",
                                  .incarnation = 1,
                                  .page_offsets = offsets,
                                  .n_pages = PAGES};
            must(kv_mover_expect(c->m, &e));
            ssize_t granted = write(grant, &k, sizeof k);
            (void)granted; /* prefill may be dead already: the ticket has to end all the same */
            busy = true;
            until = tow_now_ms() + test_limit_ms(ENDS_WITHIN_MS);
        } else if (ev.kind == KV_MOVER_ENDED) {
            busy = false;
            if (ev.code == 0 && !holds(c->pages, (size_t)PAGES * PAGE, k)) _exit(WRONG_BYTES);
            if (ev.code != 0) {
                memset(c->pages, PAINT, (size_t)PAGES * PAGE);
                painted = true;
            }
            put(c->out, ev.code ? "f" : "o", 1);
        }
    }
}

/* --- the parent ------------------------------------------------------------------------------- */

struct pair {
    pid_t p, d;
    int to_p, from_p, to_d, from_d; /* the write end of to_p is with decode too: it grants */
};

static void enter_namespace(const char *ns)
{
    char path[64];
    if (!ns) return;
    snprintf(path, sizeof path, "/var/run/netns/%s", ns);
    int fd = open(path, O_RDONLY);
    if (fd < 0 || setns(fd, CLONE_NEWNET) < 0) _exit(NO_MOVER);
    /* UCX finds devices in /sys/class/net, which shows the namespace that mounted it. */
    if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("sysfs", "/sys", "sysfs", 0, NULL) < 0)
        _exit(NO_MOVER);
    /* A device counts when its carrier is there, a moment after it was set up. */
    char state[16] = "";
    for (int i = 0; i < 3000 && strncmp(state, "up", 2) != 0; i++) {
        int f = open("/sys/class/net/tv0/operstate", O_RDONLY);
        if (f < 0 || read(f, state, sizeof state) < 0) _exit(NO_MOVER);
        close(f);
        poll(NULL, 0, 10);
    }
}

static pid_t start_child(bool prefill, int in, int out, int grant, const char *tls, const char *ns,
                         const int *to_close, int n_close)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) return pid;
    is_child = true;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < n_close; i++) close(to_close[i]);
    if (tls) setenv("UCX_TLS", tls, 1);
    enter_namespace(ns);
    struct child c = {.in = in, .out = out};
    child_open(&c, prefill ? "p" : "d", prefill ? 1 : 2);
    if (prefill)
        run_prefill(&c);
    else
        run_decode(&c, grant);
    _exit(FINE);
}

/* Reads one answer; 0 when nothing came in time or the child is gone. */
static char answer(int fd, uint32_t limit_ms)
{
    struct pollfd f = {fd, POLLIN, 0};
    char c;
    return poll(&f, 1, (int)limit_ms) == 1 && read(fd, &c, 1) == 1 ? c : 0;
}

/* Reads answers until one of those wanted; 0 when none came in time. */
static char answer_of(int fd, const char *wanted, uint32_t limit_ms)
{
    uint64_t until = tow_now_ms() + limit_ms;
    for (;;) {
        uint64_t now = tow_now_ms();
        char c = now < until ? answer(fd, (uint32_t)(until - now)) : 0;
        if (c == 0 || strchr(wanted, c)) return c;
    }
}

static void pair_start(struct pair *x, const char *tls, const char *ns_p, const char *ns_d)
{
    int to_p[2], from_p[2], to_d[2], from_d[2];
    assert_true(pipe(to_p) == 0 && pipe(from_p) == 0 && pipe(to_d) == 0 && pipe(from_d) == 0);
    int all_p[] = {to_p[1], from_p[0], to_d[0], to_d[1], from_d[0], from_d[1]};
    int all_d[] = {to_p[0], from_p[0], from_p[1], to_d[1], from_d[0]};
    x->p = start_child(true, to_p[0], from_p[1], -1, tls, ns_p, all_p, 6);
    x->d = start_child(false, to_d[0], from_d[1], to_p[1], tls, ns_d, all_d, 5);
    close(to_p[0]), close(from_p[1]), close(to_d[0]), close(from_d[1]);
    x->to_p = to_p[1], x->from_p = from_p[0], x->to_d = to_d[1], x->from_d = from_d[0];
    uint32_t n = 0;
    uint8_t address[4096];
    assert_true(get(x->from_d, &n, sizeof n) && n <= sizeof address && get(x->from_d, address, n));
    put(x->to_p, &n, sizeof n);
    put(x->to_p, address, n);
    assert_int_equal(answer_of(x->from_p, "u", test_limit_ms(PATIENCE_MS)), 'u');
}

static void check_exit(const char *who, int status)
{
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
        fail_msg("%s died of signal %d", who, WTERMSIG(status));
    if (WIFEXITED(status) && WEXITSTATUS(status) >= NO_MOVER && WEXITSTATUS(status) <= LOST_PIPE)
        fail_msg("%s: %s", who, exits[WEXITSTATUS(status) - NO_MOVER]);
    if (WIFEXITED(status)) assert_int_equal(WEXITSTATUS(status), 0);
}

/* Closing the pipes ends those that still live. */
static void pair_end(struct pair *x)
{
    int status;
    close(x->to_p), close(x->to_d);
    close(x->from_p), close(x->from_d);
    waitpid(x->d, &status, 0); /* decode holds the other writing end of to_p */
    check_exit("decode", status);
    waitpid(x->p, &status, 0);
    check_exit("prefill", status);
}

/* A machine that is busy enough can let one end by its lease: tried again until the patience is
 * over. */
static bool ship_one(struct pair *x)
{
    uint64_t until = tow_now_ms() + test_limit_ms(PATIENCE_MS);
    while (tow_now_ms() < until) {
        put(x->to_d, "g", 1);
        char c = answer_of(x->from_d, "of", test_limit_ms(PATIENCE_MS));
        if (c == 0) return false;
        if (c == 'o' && answer_of(x->from_p, "o", test_limit_ms(ENDS_WITHIN_MS)) == 'o')
            return true;
    }
    return false;
}

static void pause_us(unsigned us)
{
    struct pollfd none = {-1, 0, 0};
    struct timespec ts = {.tv_nsec = (long)us * 1000};
    ppoll(&none, 1, &ts, NULL);
}

static void round_of(const char *tls, unsigned seed)
{
    struct pair x;
    pair_start(&x, tls, NULL, NULL);
    assert_true(ship_one(&x));
    bool victim_p = seed & 1, stop = seed & 2;
    pid_t victim = victim_p ? x.p : x.d;
    put(x.to_d, "g", 1);
    pause_us((unsigned)(tow_random_u64() % 12000)); /* 16 MiB take a few ms */
    kill(victim, stop ? SIGSTOP : SIGKILL);
    /* The survivor's ticket ends: well, if all had arrived, else with an error. Prefill may not
     * have been given one yet; then it hears of the loss alone, which otherwise comes after the
     * end. */
    int survivor = victim_p ? x.from_d : x.from_p;
    const uint32_t ends_ms = test_limit_ms(ENDS_WITHIN_MS + 2000);
    char c = answer(survivor, ends_ms);
    if (c == 0) {
        pair_end(&x); /* tells if it died */
        fail_msg("seed %u: the survivor's ticket did not end", seed);
    }
    if (stop) {
        kill(victim, SIGCONT);
        pause_us(QUIET_MS * 1000); /* time for the late one to do harm */
    }
    if (victim_p) {
        put(x.to_d, "c", 1);
        answer_of(x.from_d, "c", ends_ms); /* spoilt paint shows in decode's exit code */
    }
    if (!stop) {
        pair_end(&x);
        return;
    }
    /* A stopped one comes back and works again without any restart. */
    if (!victim_p) {
        c = answer(x.from_d, ends_ms);
        if (c != 'o' && c != 'f') fail_msg("seed %u: the stopped one's ticket did not end", seed);
    }
    uint64_t until = tow_now_ms() + test_limit_ms(PATIENCE_MS);
    bool again = false;
    while (!again && tow_now_ms() < until) {
        put(x.to_d, "g", 1);
        c = answer_of(x.from_d, "of", ends_ms);
        again = c == 'o';
        if (c == 0) break;
    }
    pair_end(&x);
    if (!again) fail_msg("seed %u: no shipment after SIGCONT", seed);
}

static unsigned rounds(void)
{
    const char *s = getenv("TOW_ROUNDS");
    return s ? (unsigned)atoi(s) : 8;
}

static void test_kv_mover__killed_or_stopped_peer_over_shared_memory(void **state)
{
    (void)state;
    for (unsigned i = 0; i < rounds(); i++) round_of(NULL, i);
}

static void test_kv_mover__killed_or_stopped_peer_over_tcp(void **state)
{
    (void)state;
    for (unsigned i = 0; i < rounds(); i++) round_of("tcp", i);
}

static bool sh(const char *line)
{
    return system(line) == 0;
}

static void test_kv_mover__cut_path_between_namespaces_mends(void **state)
{
    (void)state;
    char line[600], a[32], b[32];
    snprintf(a, sizeof a, "towa%d", (int)getpid() % 100000);
    snprintf(b, sizeof b, "towb%d", (int)getpid() % 100000);
    snprintf(
        line, sizeof line,
        "(ip netns add %s && ip netns add %s && ip link add tv0 netns %s type veth peer name tv0"
        " netns %s && ip -n %s addr add 10.97.0.1/24 dev tv0 && ip -n %s addr add 10.97.0.2/24"
        " dev tv0 && ip -n %s link set tv0 up && ip -n %s link set tv0 up) 2>/dev/null",
        a, b, a, b, a, b, a, b);
    bool made = geteuid() == 0 && sh(line);
    if (made) {
        struct pair x;
        pair_start(&x, "tcp", a, b);
        bool ok = ship_one(&x);
        snprintf(line, sizeof line, "ip -n %s link set tv0 down", a);
        sh(line);
        put(x.to_d, "g", 1);
        bool failed = answer_of(x.from_d, "f", test_limit_ms(ENDS_WITHIN_MS + 2000)) == 'f';
        bool down = answer_of(x.from_p, "d", test_limit_ms(PATIENCE_MS)) == 'd';
        snprintf(line, sizeof line, "ip -n %s link set tv0 up", a);
        sh(line);
        bool up = answer_of(x.from_p, "u", test_limit_ms(PATIENCE_MS)) == 'u';
        bool again = up && ship_one(&x);
        if (!up) kill(x.p, SIGKILL), kill(x.d, SIGKILL);
        pair_end(&x);
        snprintf(line, sizeof line, "ip netns del %s; ip netns del %s", a, b);
        sh(line);
        assert_true(ok && failed && down && up && again);
        return;
    }
    snprintf(line, sizeof line, "(ip netns del %s; ip netns del %s) 2>/dev/null", a, b);
    sh(line);
    printf("no network namespaces here (root and ip are needed); the cut path is not tested\n");
    skip();
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_mover__killed_or_stopped_peer_over_shared_memory),
        cmocka_unit_test(test_kv_mover__killed_or_stopped_peer_over_tcp),
        cmocka_unit_test(test_kv_mover__cut_path_between_namespaces_mends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
