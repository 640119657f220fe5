/* worker/worker.c - see worker.h. Start-up is one straight list of things opened,
 * closed in reverse order. */
#include "common/worker/worker.h"
#include "common/worker/cache.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/net/ctl.h"
#include "common/net/files.h"
#include "common/net/loop.h"
#include "common/net/peer.h"
#include "common/net/sdnotify.h"
#include "common/net/status.h"
#include "common/text/config.h"
#include "common/text/identity.h"
#include "common/worker/limits.h"
#include "kernels/dev.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

enum { N_COMMON = 23, MAX_OPTIONS = 40 };
enum {
    MAX_PEERS = 64,
    MAX_ROUTERS = 16,
    MAX_FACTS = 24,
    MAX_DROPS = 64,
    LEAVE_MS = 500,
    PROBE_MS = 2000,
    MAX_FAILED_STEPS = 3 /* then it is no request's fault */
};

/* One router this worker joins. */
struct router {
    struct work *w;
    const char *url;               /* borrowed from the settings */
    struct net_ctl_dialer *dialer; /* owned */
    struct net_ctl *link;          /* NULL while not connected */
    uint64_t owner;                /* number of this connection; 0 while not welcomed */
    uint32_t heartbeat_ms;
    uint64_t next_heartbeat_ms;
    uint64_t incarnation; /* of the router, while welcomed */
    bool told; /* how it is: reached, refused, lost or, once and not at each retry, not reached */
    char why[WIRE_MAX_NOTE + 1]; /* it is not joined: a refusal, or what the last try met */
    bool refused;
};

struct work_own {
    void *self;            /* the role's object */
    struct tow_opts *opts; /* borrows spec and table */
    struct tow_opts_spec spec;
    struct tow_opt table[MAX_OPTIONS];
    struct router routers[MAX_ROUTERS];
    int n_routers;
    uint64_t next_owner;
    struct net_wake *mover_wake, *engine_wake, *cache_wake;
    struct net_timer *tick, *leave, *watchdog;
    struct net_status *status;
    struct tow_buf token; /* join token */
    struct wire_fact facts[MAX_FACTS];
    char fact_values[MAX_FACTS][WIRE_MAX_VALUE];
    uint32_t n_facts;
    uint8_t *frame; /* packing space, WIRE_MAX_BODY + header */
    bool draining, drained;
    int signals, exit_status;
    char cut[120];      /* what cut the drain short, the last line of the log; empty: nothing did */
    uint64_t relinking; /* the incarnation to come; 0: the link is not being made anew */
    struct work_step probe; /* an empty step for an idle engine */
    bool probing;
    int n_failed_steps; /* in a row; MAX_FAILED_STEPS of them end the worker */
    uint64_t probe_ms;  /* when the last one went */
    double tokens_per_s;
    struct drop {
        char name[NET_PEER_NAME_MAX + 1];
        uint64_t incarnation;
    } drops[MAX_DROPS]; /* the mover could not take them yet */
    int n_drops;
    struct tow_gauge *g_pages_free, *g_pages, *g_joined, *g_running_ms;
    struct tow_counter *c_steps, *c_sent, *c_received, *c_relinks;
    struct tow_gauge *g_move[2];
    struct tow_counter *c_move[6];
};

/* ------------------------------------------------------------------ settings */

static const char *const url_schemes[] = {"tcp://", "ipc://", NULL};

static size_t common_options(struct work_settings *s, struct tow_opt *to)
{
    const struct tow_opt table[] = {
        {.name = "model",
         .type = TOW_OPT_STRING,
         .out = &s->model_dir,
         .required = true,
         .help = "checkpoint folder: config.json, *.safetensors"},
        {.name = "join",
         .type = TOW_OPT_URLS,
         .out = &s->join,
         .def = "tcp://127.0.0.1:7000",
         .choices = url_schemes,
         .help = "routers to join"},
        {.name = "join-token-file",
         .type = TOW_OPT_STRING,
         .out = &s->join_token_file,
         .otherwise = "no secret",
         .help = "file with the secret that routers and workers share"},
        {.name = "name",
         .type = TOW_OPT_STRING,
         .out = &s->name,
         .otherwise = "role and process id",
         .help = "instance name"},
        {.name = "status",
         .type = TOW_OPT_ADDR,
         .out = &s->status,
         .def = "127.0.0.1:0",
         .help = "own /health, /ready and /metrics; port 0: any free one"},
        MODEL_OPTS(&s->engine),
        {.name = "context-length",
         .type = TOW_OPT_INT,
         .out = &s->context_length,
         .min = 16,
         .max = WIRE_MAX_TOKENS,
         .otherwise = "the checkpoint's, as far as the pool holds it",
         .unit = "tokens",
         .help = "most prompt and output tokens of one sequence"},
        {.name = "memory-fraction",
         .type = TOW_OPT_FLOAT,
         .out = &s->memory_fraction,
         .def = "0.25",
         .fmin = 0.01,
         .fmax = 0.95,
         .help = "share of free memory the page pool may take"},
        {.name = "kv-pages",
         .type = TOW_OPT_INT,
         .out = &s->kv_pages,
         .min = 1,
         .max = INT32_MAX,
         .otherwise = "by --memory-fraction",
         .unit = "pages",
         .help = "pages in the pool"},
        {.name = "host-tier",
         .type = TOW_OPT_BYTES,
         .out = &s->host_tier,
         .def = "0",
         .min = 0,
         .max = 0,
         .help = "host memory behind device pages; no back end has such a second tier yet"},
        {.name = "lease",
         .type = TOW_OPT_INT,
         .out = &s->lease_ms,
         .def = "30000",
         .min = 100,
         .max = 600000,
         .unit = "ms",
         .help = "a ticket without progress for so long is dead"},
        {.name = "drain-timeout",
         .type = TOW_OPT_INT,
         .out = &s->drain_s,
         .def = "60",
         .min = 0,
         .max = 86400,
         .unit = "s",
         .help = "on SIGTERM: end what still runs after this"},
        {.name = "step-limit",
         .type = TOW_OPT_INT,
         .out = &s->step_limit_s,
         .def = "60",
         .min = 1,
         .max = 3600,
         .unit = "s",
         .help = "a forward pass that takes longer is taken for hung: /health fails"},
        TOW_OPTS_LOG(&s->log_level, &s->log_format),
        {.name = "fault",
         .type = TOW_OPT_STRING,
         .out = &s->fault,
         .otherwise = "none",
         .help = "make named places fail (tests): NAME=N[+][:fail|kill|stop|hang]"},
    };
    _Static_assert(sizeof table / sizeof *table == N_COMMON, "N_COMMON counts the table");
    memcpy(to, table, sizeof table);
    return N_COMMON;
}

static int check_join(const struct tow_strings *join, struct tow_err *err)
{
    if (join->n > MAX_ROUTERS)
        return tow_fail(err, TOW_ECONFIG, "--join: %zu routers, must be 1 to %d", join->n,
                        MAX_ROUTERS);
    for (size_t i = 0; i < join->n; i++) {
        const char *url = join->items[i], *colon = strrchr(url, ':');
        for (size_t k = 0; k < i; k++)
            if (!strcmp(url, join->items[k]))
                return tow_fail(err, TOW_ECONFIG, "--join: %s stands there twice", url);
        if (!strncmp(url, "tcp://", 6) && !strcmp(colon, ":0"))
            return tow_fail(err, TOW_ECONFIG, "--join: %s: nobody listens on port 0; 1 to 65535",
                            url);
    }
    return 0;
}

static int check_name(struct work *w, struct tow_err *err)
{
    if (w->set.name)
        snprintf(w->name, sizeof w->name, "%s", w->set.name);
    else
        snprintf(w->name, sizeof w->name, "%s-%d",
                 w->role->role == WIRE_PREFILL_ROLE ? "prefill" : "decode", (int)getpid());
    if ((w->set.name && strlen(w->set.name) >= sizeof w->name) || !net_peer_name_ok(w->name))
        return tow_fail(err, TOW_ECONFIG, "--name '%s': 1 to %d letters, digits, '.', '_' or '-'",
                        w->set.name, NET_PEER_NAME_MAX);
    return 0;
}

/* ------------------------------------------------------------------ capacity */

/* A line of /proc/meminfo in bytes: "MemAvailable", "MemTotal"; 0: not known. */
static uint64_t memory(const char *which)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[256];
    const size_t n = strlen(which);
    uint64_t kb = 0;
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, which, n) && sscanf(line + n, ": %lu kB", &kb) == 1) break;
    if (f) fclose(f);
    return kb * 1024;
}

/* Bytes that pages and tails may take: they lie in host memory, and on a device that has its own
 * there as well, of which passes will take so much later. 0: not known. */
static uint64_t room_for_pages(const struct work *w, uint64_t later)
{
    const struct kern_dev *dev = model_peek_dev(w->model);
    const uint64_t host = memory("MemAvailable");
    if (kern_dev_host_memory(dev)) return host;
    const uint64_t all = kern_dev_free_bytes(dev), device = all > later ? all - later : 1;
    return device < host ? device : host;
}

/* UCX does not say that the address space is full (ulimit -v): it aborts, or goes on without shared
 * memory. So the pool and what starts after it must fit into what is left. */
static int check_address_space(int64_t n_pages, double pool_bytes, struct tow_err *err)
{
    enum { REST_MB = 512 }; /* UCX, stacks and heaps of threads: measured 200 to 280 MiB */
    char why[160];
    snprintf(why, sizeof why, "%.0f for %lld pages, %d for the transport and threads",
             pool_bytes / (1 << 20), (long long)n_pages, REST_MB);
    return net_space_check((uint64_t)pool_bytes + ((uint64_t)REST_MB << 20), why,
                           " or lower --kv-pages", err);
}

/* Pages: as asked, else what the share of memory (0: not known; free, or of the machine) holds,
 * but no more than four full contexts can use. */
static int plan_pool(struct work *w, int64_t model_max, uint64_t memory_bytes, const char *of_what,
                     struct tow_err *err)
{
    const struct work_settings *s = &w->set;
    int rc;
    const int64_t page = w->layout->page_bytes, pt = w->layout->page_tokens;
    if (model_max > WIRE_MAX_TOKENS) model_max = WIRE_MAX_TOKENS;
    if (s->context_length > model_max)
        return tow_fail(err, TOW_ECONFIG,
                        "--context-length %lld: the checkpoint has %lld positions",
                        (long long)s->context_length, (long long)model_max);
    int64_t context = s->context_length ? s->context_length : model_max;
    int64_t n = s->kv_pages;
    char batch[40] = "";
    if (w->tails_of_batch) snprintf(batch, sizeof batch, " (--max-batch %u)", w->max_batch);
    if (n == 0) {
        int64_t room = (int64_t)(s->memory_fraction * (double)memory_bytes) -
                       (int64_t)w->n_tails * w->layout->tail_bytes;
        int64_t useful = 4 * kern_kv_pages_for(context, (int32_t)pt);
        n = room / page < useful ? room / page : useful;
        if (n < 1)
            return tow_fail(
                err, TOW_ECONFIG,
                "--memory-fraction %g of %llu MiB %s: not one page of %lld bytes besides %u "
                "tails of %lld bytes%s",
                s->memory_fraction, (unsigned long long)(memory_bytes >> 20), of_what,
                (long long)page, w->n_tails, (long long)w->layout->tail_bytes, batch);
    }
    /* The transport fills shared memory to test it: too much would take the machine down with
     * it. */
    double need = (double)n * (double)page + (double)w->n_tails * (double)w->layout->tail_bytes;
    if (memory_bytes && need > (double)memory_bytes)
        return tow_fail(err, TOW_ECONFIG,
                        "--kv-pages %lld: with %u tails%s that is %.0f MiB, of %llu MiB %s",
                        (long long)n, w->n_tails, batch, need / (1 << 20),
                        (unsigned long long)(memory_bytes >> 20), of_what);
    if ((rc = check_address_space(n, need, err)) < 0) return rc;
    if (n * pt < context) {
        if (s->context_length)
            return tow_fail(err, TOW_ECONFIG,
                            "--context-length %lld: %lld pages of %lld tokens hold %lld",
                            (long long)context, (long long)n, (long long)pt, (long long)(n * pt));
        context = n * pt;
    }
    w->n_pages = (uint32_t)n;
    w->max_context = (uint32_t)context;
    return 0;
}

/* ------------------------------------------------------------------ facts for HELLO and peers */

static void fact(struct work *w, enum wire_fact_class class, const char *field, const char *fmt,
                 ...) __attribute__((format(printf, 4, 5)));
static void fact(struct work *w, enum wire_fact_class class, const char *field, const char *fmt,
                 ...)
{
    struct work_own *o = w->own;
    tow_assert(o->n_facts < MAX_FACTS);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(o->fact_values[o->n_facts], sizeof o->fact_values[0], fmt, ap);
    va_end(ap);
    o->facts[o->n_facts] = (struct wire_fact){.class = (uint8_t) class,
                                              .field = wire_text(field),
                                              .value = wire_text(o->fact_values[o->n_facts])};
    o->n_facts++;
}

static void collect_facts(struct work *w)
{
    const struct kern_kv_layout *l = w->layout;
    const struct model_options *o = model_peek_options(w->model);
    char print[MODEL_FINGERPRINT_CHARS], name[WIRE_MAX_VALUE];
    struct text_identity id;
    model_weights_fingerprint(model_peek_weights(w->model), print);
    fact(w, WIRE_FACT_WIRE, "wire.protocol", "%d", WIRE_PROTOCOL_MAX);
    fact(w, WIRE_FACT_LAYOUT, "layout.version", "%d", KERN_KV_LAYOUT_VERSION);
    fact(w, WIRE_FACT_LAYOUT, "layout.byte_order", "little");
    fact(w, WIRE_FACT_LAYOUT, "layout.page_tokens", "%d", l->page_tokens);
    fact(w, WIRE_FACT_LAYOUT, "layout.kv_dtype", "%s", model_kv_names[o->kv_fmt]);
    fact(w, WIRE_FACT_LAYOUT, "layout.index_keys", "%s", model_ik_names[o->ik_fmt]);
    fact(w, WIRE_FACT_LAYOUT, "layout.page_bytes", "%lld", (long long)l->page_bytes);
    fact(w, WIRE_FACT_LAYOUT, "layout.tail_bytes", "%lld", (long long)l->tail_bytes);
    fact(w, WIRE_FACT_LAYOUT, "layout.ratios", "%016llx",
         (unsigned long long)tow_hash64(l->spec.ratios,
                                        (size_t)l->spec.n_layers * sizeof l->spec.ratios[0]));
    fact(w, WIRE_FACT_MODEL, "model.fingerprint", "%s", print);
    fact(w, WIRE_FACT_NUMERICS, "numerics.mode", "%s", model_numerics_names[o->exact ? 0 : 1]);
    fact(w, WIRE_FACT_NUMERICS, "numerics.index_topk", "%d", o->index_topk);
    fact(w, WIRE_FACT_NUMERICS, "numerics.expert_activations", "%s",
         model_expert_activations_names[w->set.engine.expert_activations]);
    fact(w, WIRE_FACT_FREE, "free.products", "%s", model_products_names[w->set.engine.products]);
    fact(w, WIRE_FACT_FREE, "free.device", "%s", w->set.engine.device);
    fact(w, WIRE_FACT_FREE, "free.isa", "%s", kern_dev_isa(model_peek_dev(w->model)));
    fact(w, WIRE_FACT_FREE, "free.threads", "%d", kern_dev_threads(model_peek_dev(w->model)));
    fact(w, WIRE_FACT_FREE, "free.model", "%s",
         text_folder_name(w->set.model_dir, name, sizeof name));
    text_identity_read(&id, w->set.model_dir, &model_peek_weights(w->model)->config);
    for (uint32_t i = 0; i < id.n; i++)
        fact(w, WIRE_FACT_TEXT, id.items[i].field, "%s", id.items[i].value);
}

/* ------------------------------------------------------------------ routers */

static void send_frame(struct work *w, struct net_ctl *c, const struct wire_msg *m)
{
    if (tow_fault(wire_step_name(m->type, true))) {
        net_ctl_close(c, TOW_EPEER, "injected fault");
        return;
    }
    int64_t n = wire_pack(m, w->own->frame, WIRE_MAX_BODY + WIRE_HEADER_BYTES);
    if (n < 0) {
        tow_error("%s: cannot pack %s: %s", w->name, wire_type_name(m->type), tow_err_name((int)n));
        return;
    }
    net_ctl_send(c, (uint16_t)m->type, w->own->frame + WIRE_HEADER_BYTES,
                 (uint32_t)(n - WIRE_HEADER_BYTES));
    tow_counter_add(w->own->c_sent, 1);
}

void work_send(struct work *w, uint64_t owner, const struct wire_msg *m)
{
    for (int i = 0; i < w->own->n_routers; i++)
        if (w->own->routers[i].owner == owner && w->own->routers[i].link)
            send_frame(w, w->own->routers[i].link, m);
}

static void on_open(void *arg, struct net_ctl *c)
{
    struct router *r = arg;
    struct work *w = r->w;
    struct work_own *o = w->own;
    if (o->drained || !o->self) { /* it has said BYE, or not begun */
        net_ctl_finish(c);
        return;
    }
    uint8_t facts[WIRE_MAX_FACTS];
    struct wire_writer fw = {.data = facts, .cap = sizeof facts};
    for (uint32_t i = 0; i < o->n_facts; i++) wire_put_fact(&fw, &o->facts[i]);
    tow_assert(!fw.failed);
    size_t addr_bytes = 0;
    const void *addr = kv_mover_address(w->mover, &addr_bytes);
    char status[WIRE_MAX_VALUE];
    snprintf(status, sizeof status, strchr(w->set.status.host, ':') ? "[%s]:%u" : "%s:%u",
             w->set.status.host, net_status_port(o->status));
    struct wire_msg m = {.type = WIRE_HELLO_MSG};
    m.hello = (struct wire_hello){.version_min = WIRE_PROTOCOL_MIN,
                                  .version_max = WIRE_PROTOCOL_MAX,
                                  .role = (uint8_t)w->role->role,
                                  .name = wire_text(w->name),
                                  .incarnation = w->incarnation,
                                  .join_token = {o->token.data, (uint32_t)o->token.len},
                                  .pages = w->n_pages,
                                  .page_tokens = (uint32_t)w->layout->page_tokens,
                                  .max_context = w->max_context,
                                  .max_batch = w->max_batch,
                                  .chunk_tokens = w->chunk_tokens,
                                  .max_pending_tokens = w->max_pending_tokens,
                                  .max_tickets = w->max_tickets,
                                  .reserve_tokens = w->reserve_tokens,
                                  .data_address = {addr, (uint32_t)addr_bytes},
                                  .status_url = wire_text(status),
                                  .facts = {facts, (uint32_t)fw.len}};
    r->link = c;
    r->told = true;
    send_frame(w, c, &m);
}

static bool is_stuck(const struct work *w)
{
    return work_engine_running_ms(w->engine) > (uint64_t)w->set.step_limit_s * 1000;
}

static void heartbeat(struct work *w, struct router *r, uint64_t now)
{
    struct wire_msg m = {.type = WIRE_HEARTBEAT_MSG};
    w->role->load(w->own->self, &m.heartbeat);
    m.heartbeat.state = is_stuck(w) ? WIRE_STUCK : w->own->draining ? WIRE_DRAINING : WIRE_SERVING;
    m.heartbeat.tokens_per_s = (uint32_t)w->own->tokens_per_s;
    send_frame(w, r->link, &m);
    r->next_heartbeat_ms = now + r->heartbeat_ms;
}

/* Our own limit; 0 s means at once, while 0 ms on the wire and below means none. */
static uint32_t drain_limit_ms(const struct work *w)
{
    return w->set.drain_s ? (uint32_t)w->set.drain_s * 1000 : 1;
}

static void begin_drain(struct work *w, uint32_t limit_ms)
{
    if (w->own->draining) return;
    w->own->draining = true;
    tow_info("%s: draining, limit %u ms", w->name, limit_ms);
    net_sd_stopping("draining");
    uint64_t now = net_loop_now_ms(w->loop);
    for (int i = 0; i < w->own->n_routers; i++)
        if (w->own->routers[i].owner) heartbeat(w, &w->own->routers[i], now);
    w->role->on_drain(w->own->self, limit_ms);
}

/* A link that works hears its peers: what the router takes for a fault is then one elsewhere. */
static void relink(struct work *w, const struct router *r, const struct wire_relink *m)
{
    struct work_own *o = w->own;
    struct kv_mover_stats s;
    char note[WIRE_MAX_NOTE + 1];
    wire_text_copy(m->note, note, sizeof note);
    if (o->relinking || o->draining) return;
    kv_mover_stats(w->mover, &s);
    if (s.peers_up > 0) {
        tow_warn("%s: router %s asks for a new data link (%s): not made, %u peers are up", w->name,
                 r->url, note, s.peers_up);
        return;
    }
    o->relinking = tow_random_u64();
    int rc = kv_mover_relink(w->mover, o->relinking);
    if (rc == 0) {
        tow_warn("%s: router %s asks for a new data link: %s", w->name, r->url, note);
        return;
    }
    o->relinking = 0; /* it asks again */
    tow_error("%s: no new data link: %s", w->name, tow_err_text(rc));
}

/* To all others it is a process that went and came: their links, our tickets, all begins anew. */
static void relinked(struct work *w, const struct kv_mover_event *ev)
{
    struct work_own *o = w->own;
    if (ev->code < 0) {
        struct tow_err err;
        tow_fail(&err, ev->code, "the data link cannot be made anew: %s", ev->text);
        work_die(w, &err);
        return;
    }
    tow_info("%s: the data link is new; joining anew, incarnation %016llx", w->name,
             (unsigned long long)o->relinking);
    w->incarnation = o->relinking;
    o->relinking = 0;
    tow_counter_add(o->c_relinks, 1);
    for (int i = 0; i < o->n_routers; i++)
        if (o->routers[i].link)
            net_ctl_close(o->routers[i].link, TOW_EPEER, "to join anew with a new data link");
}

/* Once, not at each retry. The note has field and values, and says whose they are. */
static void refused(struct router *r, const struct wire_refuse *m)
{
    char note[WIRE_MAX_NOTE + 1];
    wire_text_copy(m->note, note, sizeof note);
    if (!r->refused || strcmp(r->why, note) != 0)
        tow_error("%s: router %s refuses: %s", r->w->name, r->url, note);
    r->refused = true;
    snprintf(r->why, sizeof r->why, "%s", note);
}

static void on_frame(void *arg, struct net_ctl *c, uint16_t type, const void *body, uint32_t bytes)
{
    struct router *r = arg;
    struct work *w = r->w;
    struct wire_header h = {.body_bytes = bytes, .type = type, .version = WIRE_VERSION};
    struct wire_msg m;
    struct tow_err err = {0};
    tow_counter_add(w->own->c_received, 1);
    if (tow_fault(wire_step_name(type, false))) {
        net_ctl_close(c, TOW_EPEER, "injected fault");
        return;
    }
    int rc = wire_check_header(&h, &err);
    if (rc == TOW_ENOENT) {
        struct wire_msg u = {.type = WIRE_UNKNOWN_MSG, .unknown = {.type = type}};
        send_frame(w, c, &u);
        return;
    }
    if (rc == 0) rc = wire_unpack(&m, &h, body, &err);
    if (rc < 0) {
        tow_warn("%s: router %s: %s", w->name, r->url, err.msg);
        net_ctl_close(c, rc, err.msg);
        return;
    }
    switch (m.type) {
    case WIRE_WELCOME_MSG:
        for (int i = 0; i < w->own->n_routers; i++) {
            struct router *o = &w->own->routers[i];
            if (o == r || o->incarnation != m.welcome.router_incarnation) continue;
            /* It takes us for one worker that came anew,
             * and the two connections would end each other for ever. */
            tow_error("%s: %s and %s are the same router; the second is left out", w->name, o->url,
                      r->url);
            snprintf(r->why, sizeof r->why, "is the same as %s; left out", o->url);
            net_ctl_dialer_close(r->dialer);
            r->dialer = NULL;
            return;
        }
        r->owner = ++w->own->next_owner;
        r->incarnation = m.welcome.router_incarnation;
        r->heartbeat_ms = m.welcome.heartbeat_ms ? m.welcome.heartbeat_ms : 1000;
        r->refused = false;
        r->why[0] = 0;
        tow_info("%s: joined router %s, heartbeat %u ms", w->name, r->url, r->heartbeat_ms);
        heartbeat(w, r, net_loop_now_ms(w->loop));
        net_sd_ready("serving");
        break;
    case WIRE_REFUSE_MSG: refused(r, &m.refuse); break;
    case WIRE_PING_MSG: {
        struct wire_msg p = {.type = WIRE_PONG_MSG, .pong = {.seq = m.ping.seq}};
        send_frame(w, c, &p);
        break;
    }
    case WIRE_PONG_MSG:
    case WIRE_UNKNOWN_MSG: break;
    case WIRE_DRAIN_MSG:
        begin_drain(w, m.drain.limit_ms ? m.drain.limit_ms : drain_limit_ms(w));
        break;
    case WIRE_RELINK_MSG: relink(w, r, &m.relink); break;
    case WIRE_UNFIT_MSG:
        tow_warn("%s: router %s: no pair with %.*s: %.*s (prefill's value and decode's)", w->name,
                 r->url, (int)m.unfit.name.len, m.unfit.name.data, (int)m.unfit.note.len,
                 m.unfit.note.data);
        break;
    default:
        if (r->owner) w->role->on_message(w->own->self, r->owner, &m);
        break;
    }
}

static void on_close(void *arg, struct net_ctl *c, int code, const char *why)
{
    struct router *r = arg;
    struct work *w = r->w;
    (void)c;
    uint64_t owner = r->owner;
    r->link = NULL;
    r->owner = 0;
    if (owner) {
        snprintf(r->why, sizeof r->why, "lost: %s", why);
        if (!w->own->drained)
            tow_warn("%s: router %s lost: %s (%s)", w->name, r->url, why, tow_err_name(code));
        if (w->own->self) w->role->on_router_lost(w->own->self, owner);
    }
}

static void on_retry(void *arg, const char *url, const char *why, uint64_t retry_ms)
{
    struct router *r = arg;
    if (!r->refused) snprintf(r->why, sizeof r->why, "not reached: %s", why);
    if (!r->told && !r->w->own->drained)
        tow_warn("%s: router %s not reached: %s; trying on", r->w->name, url, why);
    r->told = true;
    tow_debug("%s: router %s not reached: %s; next try in %llu ms", r->w->name, url, why,
              (unsigned long long)retry_ms);
}

/* ------------------------------------------------------------------ other threads, timers */

static void on_mover_wake(void *arg)
{
    struct work *w = arg;
    struct kv_mover_event ev;
    while (kv_mover_event(w->mover, &ev)) {
        if (ev.kind == KV_MOVER_RELINKED)
            relinked(w, &ev);
        else
            w->role->on_move(w->own->self, &ev);
    }
}

static void on_engine_wake(void *arg)
{
    struct work *w = arg;
    struct work_step *step;
    while ((step = work_engine_done(w->engine))) {
        if (step == &w->own->probe) {
            w->own->probing = false;
            continue;
        }
        w->own->n_failed_steps = step->rc < 0 ? w->own->n_failed_steps + 1 : 0;
        if (step->rc < 0 && (tow_err_scope(step->rc) == TOW_SCOPE_PROCESS ||
                             w->own->n_failed_steps == MAX_FAILED_STEPS))
            work_die(w, step->err);
        else
            w->role->on_stepped(w->own->self, step);
    }
}

static void on_cache_wake(void *arg)
{
    struct work *w = arg;
    if (w->own->self && w->role->on_landed) w->role->on_landed(w->own->self);
}

/* Work shows by itself whether the engine lives; without any, an empty step does. */
static void probe_engine(struct work *w, uint64_t now)
{
    struct work_own *o = w->own;
    if (work_engine_running_ms(w->engine) > 0 || o->probing || now < o->probe_ms + PROBE_MS) return;
    o->probe = (struct work_step){0};
    o->probe_ms = now;
    o->probing = work_engine_submit(w->engine, &o->probe) == 0;
}

/* A peer that is not forgotten would be dialled for ever. */
static void drop_again(struct work *w)
{
    struct work_own *o = w->own;
    while (o->n_drops > 0) {
        struct drop *d = &o->drops[o->n_drops - 1];
        int rc = kv_mover_drop(w->mover, d->name, d->incarnation);
        if (rc == TOW_ENOMEM || rc == TOW_EFULL) return;
        o->n_drops--;
    }
}

void work_drop_peer(struct work *w, const char *name, uint64_t incarnation)
{
    struct work_own *o = w->own;
    if (!net_peer_name_ok(name)) return; /* so it was never linked */
    if (o->n_drops == MAX_DROPS) drop_again(w);
    if (o->n_drops == MAX_DROPS) {
        tow_error("%s: no memory to forget peer %s", w->name, name);
        return;
    }
    struct drop *d = &o->drops[o->n_drops++];
    snprintf(d->name, sizeof d->name, "%s", name);
    d->incarnation = incarnation;
    drop_again(w);
}

int work_connect_peer(struct work *w, const char *name, uint64_t incarnation, const void *address,
                      size_t bytes)
{
    struct work_own *o = w->own;
    for (int i = 0; i < o->n_drops; i++) /* its link is replaced, and must not be dropped later */
        if (!strcmp(o->drops[i].name, name)) o->drops[i--] = o->drops[--o->n_drops];
    return kv_mover_connect(w->mover, name, incarnation, address, bytes);
}

static void on_tick(void *arg)
{
    struct work *w = arg;
    uint64_t now = net_loop_now_ms(w->loop);
    drop_again(w);
    w->role->on_tick(w->own->self, now);
    probe_engine(w, now);
    for (int i = 0; i < w->own->n_routers; i++) {
        struct router *r = &w->own->routers[i];
        if (r->owner && now >= r->next_heartbeat_ms) heartbeat(w, r, now);
    }
}

static void on_watchdog(void *arg)
{
    struct work *w = arg;
    if (!is_stuck(w)) net_sd_watchdog();
}

static void on_leave(void *arg)
{
    struct work *w = arg;
    net_loop_stop(w->loop);
}

void work_drained(struct work *w, bool cut)
{
    if (w->own->drained) return;
    w->own->drained = true;
    tow_info("%s: drained", w->name);
    if (cut)
        snprintf(w->own->cut, sizeof w->own->cut,
                 "its limit (--drain-timeout, %lld s) passed with work still running",
                 (long long)w->set.drain_s);
    for (int i = 0; i < w->own->n_routers; i++) {
        struct router *r = &w->own->routers[i];
        if (!r->link) continue;
        struct wire_msg m = {.type = WIRE_BYE_MSG, .bye = {.note = wire_text("drained")}};
        send_frame(w, r->link, &m);
        net_ctl_finish(r->link);
    }
    net_timer_start(w->own->leave, LEAVE_MS, 0);
}

void work_die(struct work *w, const struct tow_err *err)
{
    tow_error("%s: %s", w->name, err->msg);
    w->own->exit_status = 1;
    net_loop_stop(w->loop);
}

static void on_signal(void *arg, int signum)
{
    struct work *w = arg;
    if (++w->own->signals == 1) {
        begin_drain(w, drain_limit_ms(w));
    } else {
        tow_warn("%s: second signal %d: leaving now", w->name, signum);
        if (!w->own->drained)
            snprintf(w->own->cut, sizeof w->own->cut, "signal %d came with work still running",
                     signum);
        net_loop_stop(w->loop);
    }
}

void work_measured(struct work *w, uint32_t tokens, uint64_t busy_us)
{
    if (busy_us == 0) return;
    double now = (double)tokens * 1e6 / (double)busy_us;
    w->own->tokens_per_s = w->own->tokens_per_s > 0 ? 0.8 * w->own->tokens_per_s + 0.2 * now : now;
}

uint64_t work_now_ms(struct work *w)
{
    return net_loop_now_ms(w->loop);
}

/* ------------------------------------------------------------------ status */

static int on_health(void *arg, struct tow_buf *out)
{
    struct work *w = arg;
    bool stuck = is_stuck(w);
    tow_buf_printf(out, "%s\n", stuck ? "stuck: one step runs too long" : "ok");
    return stuck ? 503 : 200;
}

static int on_ready(void *arg, struct tow_buf *out)
{
    struct work *w = arg;
    int joined = 0;
    for (int i = 0; i < w->own->n_routers; i++) joined += w->own->routers[i].owner != 0;
    const char *why = w->own->draining ? "draining"
                      : is_stuck(w)    ? "stuck"
                      : joined == 0    ? "not joined"
                                       : "ready";
    tow_buf_printf(out, "%s\n", why);
    for (int i = 0; i < w->own->n_routers; i++) {
        const struct router *r = &w->own->routers[i];
        if (!r->owner)
            tow_buf_printf(out, "router %s: %s%s\n", r->url, r->refused ? "refuses: " : "",
                           r->why[0] ? r->why : "not reached yet");
    }
    return strcmp(why, "ready") ? 503 : 200;
}

static void on_metrics(void *arg, struct tow_buf *out)
{
    struct work *w = arg;
    tow_metrics_print(w->metrics, out);
}

static void collect(void *arg)
{
    struct work *w = arg;
    struct work_own *o = w->own;
    struct kv_mover_stats s;
    int joined = 0;
    for (int i = 0; i < o->n_routers; i++) joined += o->routers[i].owner != 0;
    tow_gauge_set(o->g_pages, kv_pool_capacity(w->pool));
    tow_gauge_set(o->g_pages_free, kv_pool_free_pages(w->pool));
    tow_gauge_set(o->g_joined, joined);
    tow_gauge_set(o->g_running_ms, (double)work_engine_running_ms(w->engine) / 1000.0);
    tow_counter_follow(o->c_steps, work_engine_steps(w->engine));
    kv_mover_stats(w->mover, &s);
    tow_gauge_set(o->g_move[0], s.peers_up);
    tow_gauge_set(o->g_move[1], s.tickets_live);
    const uint64_t moved[] = {s.bytes_in,   s.bytes_out,      s.bad_digests,
                              s.bad_offers, s.leases_expired, s.ep_errors};
    for (int k = 0; k < 6; k++) tow_counter_follow(o->c_move[k], moved[k]);
    w->role->collect(o->self);
}

static void make_metrics(struct work *w)
{
    struct work_own *o = w->own;
    o->g_pages = tow_gauge(w->metrics, "kv_pages", "pages in the pool", NULL);
    o->g_pages_free =
        tow_gauge(w->metrics, "kv_pages_free", "pages neither held nor reserved", NULL);
    o->g_joined =
        tow_gauge(w->metrics, "routers_joined", "routers this worker is welcome at", NULL);
    o->g_running_ms = tow_gauge(w->metrics, "engine_step_age_seconds",
                                "age of the step that runs now; 0 idle", NULL);
    o->c_steps = tow_counter(w->metrics, "engine_steps_total", "forward passes ended", NULL);
    o->c_sent = tow_counter(w->metrics, "control_messages_sent_total", "frames to routers", NULL);
    o->c_received =
        tow_counter(w->metrics, "control_messages_received_total", "frames from routers", NULL);
    o->c_relinks = tow_counter(w->metrics, "worker_relinks_total",
                               "data links made anew because peers found no answer", NULL);
    o->g_move[0] =
        tow_gauge(w->metrics, "move_peers_up", "links to the other role that work", NULL);
    o->g_move[1] = tow_gauge(w->metrics, "move_tickets_live", "shipments under way", NULL);
    static const char *const names[][2] = {
        {"move_in_bytes_total", "pages and tails fetched"},
        {"move_out_bytes_total", "pages and tails acknowledged by others"},
        {"move_bad_digests_total", "parts whose digest differed"},
        {"move_bad_offers_total",
         "offers unknown (they can cross a cancel), forged, doubled or out of range"},
        {"move_leases_expired_total", "tickets ended for want of progress"},
        {"move_endpoint_errors_total", "links that broke"}};
    for (int i = 0; i < 6; i++)
        o->c_move[i] = tow_counter(w->metrics, names[i][0], names[i][1], NULL);
    tow_metrics_on_print(w->metrics, collect, w);
}

/* ------------------------------------------------------------------ start */

static int open_mover(struct work *w, struct tow_err *err)
{
    struct work_own *o = w->own;
    struct kv_fact facts[MAX_FACTS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < o->n_facts; i++)
        if (o->facts[i].class < WIRE_FACT_FREE)
            facts[n++] = (struct kv_fact){o->facts[i].field.data, o->facts[i].value.data};
    struct kv_mover_config c = {.name = w->name,
                                .incarnation = w->incarnation,
                                .secret =
                                    o->token.len ? tow_hash64(o->token.data, o->token.len) : 0,
                                .facts = facts,
                                .n_facts = n,
                                .page_bytes = (size_t)w->layout->page_bytes,
                                .tail_bytes = (size_t)w->layout->tail_bytes,
                                .heartbeat_ms = 1000,
                                .lease_ms = (uint32_t)w->set.lease_ms,
                                .max_tickets = w->max_tickets + 8,
                                .max_peers = MAX_PEERS,
                                .wake = net_wake_up,
                                .wake_arg = o->mover_wake};
    c.area_bytes[KV_AREA_PAGES] = (size_t)w->n_pages * c.page_bytes;
    c.area_bytes[KV_AREA_TAILS] = (size_t)w->n_tails * c.tail_bytes;
    int rc = kv_mover_open(&w->mover, &c, err);
    if (rc < 0) return rc;
    return kv_pool_new(&w->pool, kv_mover_area(w->mover, KV_AREA_PAGES), w->n_pages, c.page_bytes,
                       kv_mover_area(w->mover, KV_AREA_TAILS), w->n_tails, c.tail_bytes, err);
}

static int join_routers(struct work *w, struct tow_err *err)
{
    static const struct net_ctl_hooks hooks = {on_open, on_frame, on_close, on_retry};
    struct work_own *o = w->own;
    for (size_t i = 0; i < w->set.join.n; i++) {
        struct router *r = &o->routers[o->n_routers];
        r->w = w;
        r->url = w->set.join.items[i];
        int rc = net_ctl_dial(&r->dialer, w->loop, r->url, NULL, &hooks, r, err);
        if (rc < 0) {
            tow_note(err, "--join");
            return rc;
        }
        o->n_routers++;
    }
    return 0;
}

static int check_files(struct work *w, struct tow_err *err)
{
    char why[160];
    snprintf(why, sizeof why,
             "%d for itself, %d for each of %d peers, %d for --status, %zu routers", NET_FILES_OWN,
             NET_FILES_PEER, MAX_PEERS, NET_FILES_STATUS, w->set.join.n);
    return net_files_check(
        NET_FILES_OWN + NET_FILES_PEER * MAX_PEERS + NET_FILES_STATUS + w->set.join.n, why, err);
}

/* Memory that is not there may be what passes need: names the flag that says how large they are. */
static void note_passes(const struct work *w, struct tow_err *err)
{
    tow_note(err, "with passes of %d %s", w->max_rows,
             w->chunk_tokens ? "tokens (--chunk-tokens)" : "sequences (--max-batch)");
}

/* What passes need of the device is taken before pages share the rest; *later: of that, so much is
 * still to be taken. */
static int warm_device(struct work *w, uint64_t *later, struct tow_err *err)
{
    int64_t context = model_peek_weights(w->model)->shape.max_positions;
    if (w->set.context_length && w->set.context_length < context) context = w->set.context_length;
    if (context > WIRE_MAX_TOKENS) context = WIRE_MAX_TOKENS;
    const bool one = w->max_samples == 1; /* prefill: one sequence's chunk; decode: a row of each */
    const int32_t rows = one && context < w->max_rows ? (int32_t)context : w->max_rows;
    const struct model_warm warm = {
        .n_seqs = one ? 1 : rows, .n_rows = one ? rows : 1, .context = context};
    const int rc = model_warm(w->model, &warm, later, err);
    if (rc < 0) note_passes(w, err);
    return rc;
}

/* The last that takes memory of the device. */
static int seal_device(struct work *w, struct tow_err *err)
{
    struct kern_dev *dev = model_peek_dev(w->model);
    int rc = model_warm_steps(w->model, w->max_samples, work_cache_pages(w->cache),
                              work_cache_tails(w->cache), err);
    if (rc < 0) return rc;
    if (*kern_dev_why(dev)) tow_warn("%s: decode steps are slower: %s", w->name, kern_dev_why(dev));
    rc = kern_dev_seal(dev);
    if (rc < 0) return tow_fail(err, rc, "device: %s", tow_err_text(rc));
    if (!kern_dev_host_memory(dev))
        tow_info("%s: %llu MiB of the device stay free; passes take no more than they have now",
                 w->name, (unsigned long long)(kern_dev_free_bytes(dev) >> 20));
    return 0;
}

static int open_cache(struct work *w, struct tow_err *err)
{
    const struct work_cache_config c = {.name = w->name,
                                        .dev = model_peek_dev(w->model),
                                        .layout = w->layout,
                                        .host_pages = kv_mover_area(w->mover, KV_AREA_PAGES),
                                        .host_tails = kv_mover_area(w->mover, KV_AREA_TAILS),
                                        .n_pages = w->n_pages,
                                        .n_tails = w->n_tails,
                                        .wake = net_wake_up,
                                        .wake_arg = w->own->cache_wake};
    return work_cache_open(&w->cache, &c, err);
}

static int start_all(struct work *w, struct tow_err *err)
{
    struct work_own *o = w->own;
    struct model_options mo = {.max_rows = w->max_rows};
    model_settings_take(&w->set.engine, &mo);
    int rc = check_files(w, err);
    if (rc == 0) rc = model_weights_guard(err);
    if (rc == 0) {
        rc = model_open(&w->model, w->set.model_dir, &mo, err);
        if (rc == TOW_ENOMEM) note_passes(w, err);
    }
    if (rc < 0) return rc;
    w->layout = model_peek_layout(w->model);
    const struct model_load_report *rep = &model_peek_weights(w->model)->report;
    tow_info("%s: %s: %zu tensors in %zu files, %llu MiB%s; %s, %d threads", w->name,
             w->set.model_dir, rep->n_found, rep->n_files,
             (unsigned long long)(rep->file_bytes >> 20),
             rep->mtp_absent ? ", MTP absent: drafts off" : "",
             kern_dev_isa(model_peek_dev(w->model)), kern_dev_threads(model_peek_dev(w->model)));
    uint64_t later = 0;
    rc = warm_device(w, &later, err);
    if (rc == 0)
        rc = plan_pool(w, model_peek_weights(w->model)->shape.max_positions,
                       room_for_pages(w, later), "free", err);
    if (rc < 0) return rc;
    collect_facts(w);
    if ((rc = net_loop_open(&w->loop, err)) < 0) return rc;
    if ((rc = net_wake_open(&o->mover_wake, w->loop, on_mover_wake, w, err)) < 0) return rc;
    if ((rc = net_wake_open(&o->engine_wake, w->loop, on_engine_wake, w, err)) < 0) return rc;
    if ((rc = net_wake_open(&o->cache_wake, w->loop, on_cache_wake, w, err)) < 0) return rc;
    if ((rc = work_limits_threads(err)) < 0) return rc;
    if ((rc = open_mover(w, err)) < 0) return rc;
    /* UCX takes SIGBUS for itself when it starts. */
    if ((rc = model_weights_guard(err)) < 0) return rc;
    if ((rc = open_cache(w, err)) < 0) return rc;
    if ((rc = seal_device(w, err)) < 0) return rc;
    if ((rc = work_engine_open(&w->engine, w->model, w->cache, w->max_samples, net_wake_up,
                               o->engine_wake, err)) < 0)
        return rc;
    if ((rc = tow_metrics_new(&w->metrics, err)) < 0) return rc;
    make_metrics(w);
    if ((rc = w->role->start(w, &o->self, err)) < 0) return rc;
    if ((rc = tow_metrics_check(w->metrics, err)) < 0) return rc;
    char addr[300];
    snprintf(addr, sizeof addr, strchr(w->set.status.host, ':') ? "[%s]:%u" : "%s:%u",
             w->set.status.host, w->set.status.port);
    const struct net_status_hooks hooks = {on_health, on_ready, on_metrics, w};
    if ((rc = net_status_open(&o->status, w->loop, addr, &hooks, err)) < 0) return rc;
    if ((rc = net_timer_open(&o->tick, w->loop, on_tick, w, err)) < 0) return rc;
    if ((rc = net_timer_open(&o->leave, w->loop, on_leave, w, err)) < 0) return rc;
    if ((rc = net_timer_open(&o->watchdog, w->loop, on_watchdog, w, err)) < 0) return rc;
    if ((rc = net_loop_on_signal(w->loop, SIGTERM, on_signal, w, err)) < 0) return rc;
    if ((rc = net_loop_on_signal(w->loop, SIGINT, on_signal, w, err)) < 0) return rc;
    if ((rc = join_routers(w, err)) < 0) return rc;
    net_timer_start(o->tick, WORK_TICK_MS, WORK_TICK_MS);
    if (net_sd_watchdog_ms())
        net_timer_start(o->watchdog, net_sd_watchdog_ms(), net_sd_watchdog_ms());
    tow_info("%s: status on %s:%u, %u pages of %d tokens, context %u", w->name, w->set.status.host,
             net_status_port(o->status), w->n_pages, w->layout->page_tokens, w->max_context);
    net_sd_status("waiting for a router");
    return 0;
}

/* Stop first what can still call back, then what it would call. */
static void stop_all(struct work *w)
{
    struct work_own *o = w->own;
    for (int i = 0; i < o->n_routers; i++) net_ctl_dialer_close(o->routers[i].dialer);
    net_status_close(o->status);
    work_engine_close(w->engine);
    work_cache_close(w->cache); /* the device knows the mover's memory */
    kv_mover_close(w->mover);
    /* Closed connections report in the loop's last turns: they find no role then. */
    void *self = o->self;
    o->self = NULL;
    if (self) w->role->stop(self);
    kv_pool_free(w->pool); /* the role has given all pages back */
    net_timer_close(o->tick);
    net_timer_close(o->leave);
    net_timer_close(o->watchdog);
    net_wake_close(o->mover_wake);
    net_wake_close(o->engine_wake);
    net_wake_close(o->cache_wake);
    net_loop_free(w->loop);
    tow_metrics_free(w->metrics);
    model_close(w->model);
}

/* Where tow_fault() stands in a worker, besides the steps of messages. */
static const char *const fault_places[] = {
    "*",           "cache.pin",    "ctl.frame",    "engine.memory", "engine.probe", "engine.step",
    "kv.get",      "kv.offer",     "kv.put",       "link.flip",     "link.jam",     "link.map",
    "link.ping",   "link.prove",   "mover.cancel", "mover.connect", "mover.drop",   "mover.expect",
    "mover.offer", "mover.relink", "mover.send",   "mover.stop",    "mover.touch",  "net.thread",
    "text.jit"};

static bool is_fault_place(const char *name)
{
    for (size_t i = 0; i < sizeof fault_places / sizeof *fault_places; i++)
        if (!strcmp(fault_places[i], name)) return true;
    for (unsigned type = 0; type <= UINT8_MAX; type++)
        if (strcmp(wire_type_name(type), "?") != 0 && (!strcmp(wire_step_name(type, true), name) ||
                                                       !strcmp(wire_step_name(type, false), name)))
            return true;
    return false;
}

/* A misspelt place would be armed, and never passed. */
static int arm_faults(const char *text, struct tow_err *err)
{
    for (const char *p = text; *p; p += *p == ',') {
        char name[64];
        const size_t n = strcspn(p, "=,");
        snprintf(name, sizeof name, "%.*s", n < sizeof name ? (int)n : (int)sizeof name - 1, p);
        if (n > 0 && !is_fault_place(name))
            return tow_fail(
                err, TOW_ECONFIG,
                "--fault: no place is called '%s'; there are engine.step, engine.memory, "
                "kv.get, kv.put, link.ping ..., and send.MESSAGE and take.MESSAGE",
                name);
        p += strcspn(p, ",");
    }
    const int rc = tow_fault_arm_text(text, err);
    return rc < 0 ? (tow_note(err, "--fault"), rc) : 0;
}

static int read_settings(struct work *w, int argc, char **argv, enum tow_opts_do *what,
                         struct tow_err *err)
{
    struct work_own *o = w->own;
    struct tow_opt *table = o->table;
    size_t n = common_options(&w->set, table);
    tow_assert(n + w->role->n_options <= MAX_OPTIONS);
    if (w->role->n_options) memcpy(table + n, w->role->options, w->role->n_options * sizeof *table);
    n += w->role->n_options;
    o->spec = (struct tow_opts_spec){
        .program = w->role->program, .about = w->role->about, .table = table, .n = n};
    int rc = tow_opts_new(&o->opts, &o->spec, argc, (const char *const *)argv,
                          (const char *const *)environ, what, err);
    if (rc < 0) return rc;
    if (tow_opts_tell(&o->spec, *what)) return 0;
    tow_log_init(w->role->program, (enum tow_log_level)w->set.log_level,
                 (enum tow_log_format)w->set.log_format);
    if ((rc = model_settings_check(&w->set.engine, w->own->opts, err)) < 0 ||
        (rc = check_name(w, err)) < 0 || (rc = check_join(&w->set.join, err)) < 0)
        return rc;
    if (w->set.fault && (rc = arm_faults(w->set.fault, err)) < 0) return rc;
    if (w->set.join_token_file && (rc = tow_secret_read(w->set.join_token_file, "--join-token-file",
                                                        256, &o->token, err)) < 0)
        return rc;
    if (!strncmp(w->set.engine.device, "mirror:", 7)) /* it knows no pages of a transport */
        return tow_fail(
            err, TOW_ECONFIG,
            "--device %s: a worker runs on \"cpu\" or \"cuda:N\"; mirror: is for towpath-ctl",
            w->set.engine.device);
    struct kern_dev *dev = NULL; /* a device that cannot be is told before a checkpoint is read */
    if ((rc = kern_dev_open(&dev, w->set.engine.device, 1, err)) < 0) return rc;
    struct model_options mo = {0};
    model_settings_take(&w->set.engine, &mo);
    if (mo.fp8_products && !kern_dev_fp8_products(dev, true))
        rc = tow_fail(err, TOW_ECONFIG,
                      "--products fp8: --device %s (%s) has none; bf16 is everywhere",
                      w->set.engine.device, kern_dev_isa(dev));
    kern_dev_close(dev);
    return rc < 0 ? rc : w->role->plan(w, err);
}

/* --check-config: what start_all() would refuse, as far as it shows without weights, transport and
 * network. Memory in use now may be that of the worker which this one is to replace: all that the
 * machine has counts as free. */
static int check_all(struct work *w, struct tow_err *err)
{
    struct model_options mo = {.max_rows = w->max_rows};
    struct kern_kv_layout layout;
    struct model_shape shape;
    struct text_config cfg;
    model_settings_take(&w->set.engine, &mo);
    int rc = check_files(w, err);
    if (rc == 0) rc = text_config_load(&cfg, w->set.model_dir, err);
    if (rc < 0) return rc;
    model_shape_from_config(&shape, &cfg);
    if ((rc = model_plan(&layout, &mo, &shape, err)) < 0) return rc;
    w->layout = &layout;
    rc = plan_pool(w, shape.max_positions, memory("MemTotal"), "in all", err);
    w->layout = NULL;
    return rc;
}

static void tell_cut(const struct work *w)
{
    if (w->own->cut[0]) tow_error("%s: the drain was cut short: %s", w->name, w->own->cut);
}

int work_run(const struct work_role *role, int argc, char **argv)
{
    struct work *w = calloc(1, sizeof *w);
    struct work_own *o = calloc(1, sizeof *o);
    struct tow_err err = {0};
    enum tow_opts_do what = TOW_OPTS_RUN;
    int status = 1;
    if (!w || !o || !(o->frame = malloc(WIRE_MAX_BODY + WIRE_HEADER_BYTES))) {
        fprintf(stderr, "%s: no memory\n", role->program);
        free(o);
        free(w);
        return 1;
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file at its limit is an error of write or ftruncate */
    w->role = role;
    w->own = o;
    w->incarnation = tow_random_u64();
    tow_buf_init(&o->token, 0);
    tow_log_init(role->program, TOW_LOG_INFO, TOW_LOG_TEXT);

    int rc = net_stack_check(&err);
    if (rc == 0) rc = read_settings(w, argc, argv, &what, &err);
    if (rc == 0 && what == TOW_OPTS_RUN) {
        rc = start_all(w, &err);
        if (rc == 0) {
            net_loop_run(w->loop);
            status = o->exit_status;
            /* After a loss of the engine its thread may never come back: leave without waiting
             * for it. */
            if (status != 0 || o->signals > 1) {
                tell_cut(w);
                _exit(o->cut[0] ? 1 : status);
            }
        }
        if (rc < 0) tow_error("%s", err.msg);
        stop_all(w);
        tell_cut(w);
        if (o->cut[0]) status = 1;
    } else if (rc == 0) {
        if (what == TOW_OPTS_CHECK) {
            rc = check_all(w, &err);
        }
        status = rc == 0 ? 0 : 1;
        if (rc < 0) tow_error("%s", err.msg);
    } else {
        tow_error("%s", err.msg);
    }
    tow_opts_free(o->opts);
    tow_buf_fini(&o->token);
    free(o->frame);
    free(o);
    free(w);
    return status;
}

/* ------------------------------------------------------------------ small conversions */

void work_sampling(const struct wire_sampling *s, struct model_bias *bias,
                   struct model_sampling *out)
{
    uint32_t n = wire_n_bias(s);
    for (uint32_t i = 0; i < n; i++) {
        struct wire_bias b = wire_bias_at(s, i);
        bias[i] = (struct model_bias){(int32_t)b.token, b.bias};
    }
    *out = (struct model_sampling){.temperature = s->temperature,
                                   .top_p = s->top_p > 0 ? s->top_p : 1,
                                   .min_p = s->min_p,
                                   .top_k = (int32_t)s->top_k,
                                   .presence_penalty = s->presence_penalty,
                                   .frequency_penalty = s->frequency_penalty,
                                   .repetition_penalty =
                                       s->repetition_penalty > 0 ? s->repetition_penalty : 1,
                                   .seed = s->seed,
                                   .n_logprobs = s->want_logprobs ? s->n_top : -1,
                                   .bias = bias,
                                   .n_bias = (int32_t)n};
}

int32_t work_topk(const struct work *w, uint32_t asked)
{
    const struct model_options *o = model_peek_options(w->model);
    if (asked == 0) return o->index_topk;
    return asked > (uint32_t)o->max_topk ? o->max_topk : (int32_t)asked;
}

uint32_t work_pack_logprobs(const struct kern_choice *c, uint8_t n_top, void *out)
{
    struct wire_writer w = {.data = out, .cap = 4 + 8u * n_top};
    /* The wire carries finite numbers only; -inf becomes the lowest one. */
    wire_put_f32(&w, c->logprob < -3e38f ? -3e38f : c->logprob);
    for (uint8_t i = 0; i < n_top; i++) {
        bool there = i < c->n_top;
        wire_put_u32(&w, there ? (uint32_t)c->top_ids[i] : 0);
        wire_put_f32(&w, there && c->top_logprobs[i] > -3e38f ? c->top_logprobs[i] : -3e38f);
    }
    return (uint32_t)w.len;
}
