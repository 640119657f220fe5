/* router/main.c - towpath-router: what clients talk to. Settings, start, drain. */
#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/opt.h"
#include "common/net/ctl.h"
#include "common/net/files.h"
#include "common/net/loop.h"
#include "common/net/sdnotify.h"
#include "common/text/config.h"
#include "common/text/identity.h"
#include "common/text/tokenizer.h"
#include "common/text/utf8.h"
#include "router/api.h"
#include "router/cluster.h"
#include "router/http_conn.h"
#include "router/record.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

enum { MAX_OPTIONS = 28, POLL_MS = 50, LEAVE_MS = 300, N_WARM_UP = 6 };

struct settings {
    const char *model_dir, *api_key_file, *join_token_file, *served_model_name;
    const char *record_dir, *record_mode;
    struct tow_addr http;
    struct tow_strings control;
    int64_t max_queued, max_queued_tokens, sse_keepalive_s, lease_ms, drain_s, max_connections;
    int64_t record_max_requests;
    uint64_t max_body_bytes, record_max_bytes;
    uint32_t record_file_mode; /* record_mode as a number */
    double queue_timeout_s;
    int log_level, log_format;
    bool thinking, index_capture;
};

struct router {
    struct settings set;
    struct tow_opts *opts; /* borrows spec and table */
    struct tow_opts_spec spec;
    struct tow_opt table[MAX_OPTIONS];
    struct text_config config;
    struct text_tokenizer *tok;
    char model_name[256]; /* the folder's */
    uint8_t facts[1024];  /* what the folder says, for rtr_route_config */
    uint32_t facts_bytes;
    struct tow_buf join_token;
    struct net_loop *loop;
    struct tow_metrics *metrics;
    struct rtr_cluster *cluster;
    struct rtr_recorder *recorder; /* NULL without --record-dir */
    struct rtr_api *api;
    struct net_timer *poll, *watchdog;
    int signals, last_signal;
    uint64_t drain_until_ms; /* 0: not draining */
    bool failed_rest, api_closed, was_ready;
    bool cut; /* requests still ran when the drain ended */
};

static const char *const url_schemes[] = {"tcp://", "ipc://", NULL};

/* It stands in answers, messages and records. */
static int check_model_name(const char *name, struct tow_err *err)
{
    const size_t n = strlen(name);
    if (n > RTR_MAX_MODEL_NAME)
        return tow_fail(err, TOW_ECONFIG, "--served-model-name: %zu bytes, at most %d", n,
                        RTR_MAX_MODEL_NAME);
    for (size_t at = 0; at < n;) {
        uint32_t c;
        const int k = text_utf8_next((const uint8_t *)name + at, n - at, &c);
        if (k <= 0 || c < 0x20 || (c >= 0x7f && c <= 0x9f))
            return tow_fail(err, TOW_ECONFIG,
                            "--served-model-name: byte %zu (0x%02x) is %s; right is UTF-8 without "
                            "control characters",
                            at, (unsigned char)name[at],
                            k <= 0 ? "no UTF-8" : "of a control character");
        at += (size_t)k;
    }
    return 0;
}

static int read_settings(struct router *r, int argc, char **argv, enum tow_opts_do *what,
                         struct tow_err *err)
{
    struct settings *s = &r->set;
    const struct tow_opt table[] = {
        {.name = "model",
         .type = TOW_OPT_STRING,
         .out = &s->model_dir,
         .required = true,
         .help = "checkpoint folder: config.json and tokenizer.json are read"},
        {.name = "http",
         .type = TOW_OPT_ADDR,
         .out = &s->http,
         .def = "127.0.0.1:8000",
         .help = "client endpoint"},
        {.name = "control",
         .type = TOW_OPT_URLS,
         .out = &s->control,
         .def = "tcp://127.0.0.1:7000",
         .choices = url_schemes,
         .help = "where workers join"},
        {.name = "join-token-file",
         .type = TOW_OPT_STRING,
         .out = &s->join_token_file,
         .otherwise = "no secret",
         .help = "file with the secret that routers and workers share"},
        {.name = "api-key-file",
         .type = TOW_OPT_STRING,
         .out = &s->api_key_file,
         .otherwise = "no keys needed",
         .help = "file with one client key a line"},
        {.name = "served-model-name",
         .type = TOW_OPT_STRING,
         .out = &s->served_model_name,
         .otherwise = "any name is accepted",
         .help = "what /v1/models says; another name is then 404"},
        {.name = "max-queued",
         .type = TOW_OPT_INT,
         .out = &s->max_queued,
         .def = "256",
         .min = 1,
         .max = 1 << 20,
         .unit = "requests",
         .help = "requests that may wait"},
        {.name = "max-queued-tokens",
         .type = TOW_OPT_INT,
         .out = &s->max_queued_tokens,
         .def = "2000000",
         .min = 1,
         .max = UINT32_MAX,
         .unit = "tokens",
         .help = "prompt tokens that may wait"},
        {.name = "queue-timeout",
         .type = TOW_OPT_FLOAT,
         .out = &s->queue_timeout_s,
         .def = "60",
         .fmin = 0.1,
         .fmax = 86400,
         .unit = "s",
         .help = "longest a request may wait for a worker"},
        {.name = "max-body-bytes",
         .type = TOW_OPT_BYTES,
         .out = &s->max_body_bytes,
         .def = "16M",
         .min = 1024,
         .max = (int64_t)1 << 30,
         .help = "largest request body"},
        {.name = "max-connections",
         .type = TOW_OPT_INT,
         .out = &s->max_connections,
         .def = "4096",
         .min = 1,
         .max = 1 << 20,
         .help = "client connections at once"},
        {.name = "sse-keepalive",
         .type = TOW_OPT_INT,
         .out = &s->sse_keepalive_s,
         .def = "0",
         .min = 0,
         .max = 3600,
         .unit = "s",
         .help = "comment lines on silent streams; 0: off"},
        {.name = "default-thinking",
         .type = TOW_OPT_BOOL,
         .out = &s->thinking,
         .def = "false",
         .help = "thinking mode when a request does not say"},
        {.name = "index-capture",
         .type = TOW_OPT_BOOL,
         .out = &s->index_capture,
         .def = "false",
         .help = "requests may ask what the indexer ranks (index_capture)"},
        {.name = "record-dir",
         .type = TOW_OPT_STRING,
         .out = &s->record_dir,
         .otherwise = "nothing is recorded",
         .help = "keep each request's token ids here, for towpath-ctl explain; they are the users' "
                 "text"},
        {.name = "record-max-bytes",
         .type = TOW_OPT_BYTES,
         .out = &s->record_max_bytes,
         .def = "1G",
         .min = 4096,
         .max = (int64_t)1 << 50,
         .help = "of all records; the oldest are removed"},
        {.name = "record-max-requests",
         .type = TOW_OPT_INT,
         .out = &s->record_max_requests,
         .def = "10000",
         .min = 1,
         .max = 1 << 20,
         .unit = "requests",
         .help = "records kept; the oldest are removed"},
        {.name = "record-mode",
         .type = TOW_OPT_STRING,
         .out = &s->record_mode,
         .def = "0600",
         .help = "octal file mode of records"},
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
        TOW_OPTS_LOG(&s->log_level, &s->log_format),
    };
    _Static_assert(sizeof table / sizeof *table <= MAX_OPTIONS, "room for every option");
    memcpy(r->table, table, sizeof table);
    r->spec = (struct tow_opts_spec){.program = "towpath-router",
                                     .about = "what clients talk to",
                                     .table = r->table,
                                     .n = sizeof table / sizeof *table};
    int rc = tow_opts_new(&r->opts, &r->spec, argc, (const char *const *)argv,
                          (const char *const *)environ, what, err);
    if (rc < 0) return rc;
    if (tow_opts_tell(&r->spec, *what)) return 0;
    tow_log_init("towpath-router", (enum tow_log_level)s->log_level,
                 (enum tow_log_format)s->log_format);
    if (s->control.n != 1)
        return tow_fail(err, TOW_ECONFIG, "--control: %zu URLs; exactly one is listened on",
                        s->control.n);
    if (s->served_model_name && (rc = check_model_name(s->served_model_name, err)) < 0) return rc;
    if ((rc = rtr_record_mode(s->record_mode, "--record-mode", &s->record_file_mode, err)) < 0)
        return rc;
    if (s->join_token_file && (rc = tow_secret_read(s->join_token_file, "--join-token-file", 256,
                                                    &r->join_token, err)) < 0)
        return rc;
    return 0;
}

/* ------------------------------------------------------------------ drain */

static void on_api_closed(void *arg)
{
    struct router *r = arg;
    r->api = NULL;
    net_loop_stop(r->loop);
}

static void begin_drain(struct router *r)
{
    uint64_t limit = (uint64_t)r->set.drain_s * 1000;
    tow_info("draining, limit %lld s", (long long)r->set.drain_s);
    net_sd_stopping("draining");
    r->drain_until_ms = net_loop_now_ms(r->loop) + limit + 1;
    rtr_api_drain(r->api);
    rtr_cluster_drain(r->cluster, (uint32_t)limit);
}

static void on_signal(void *arg, int signum)
{
    struct router *r = arg;
    r->last_signal = signum;
    if (++r->signals == 1) {
        begin_drain(r);
    } else {
        tow_warn("second signal %d: leaving now", signum);
        r->drain_until_ms = net_loop_now_ms(r->loop);
    }
}

static void on_poll(void *arg)
{
    struct router *r = arg;
    const char *why = NULL;
    bool is_ready = rtr_cluster_backend.ready(r->cluster, &why);
    if (is_ready != r->was_ready) {
        tow_info("%s%s", is_ready ? "ready" : "not ready: ", is_ready ? "" : why);
        if (is_ready)
            net_sd_ready("serving");
        else
            net_sd_status(why);
        r->was_ready = is_ready;
    }
    if (r->drain_until_ms == 0 || r->api_closed) return;
    if (!r->failed_rest && net_loop_now_ms(r->loop) >= r->drain_until_ms) {
        struct rtr_refusal over = {.reason = "draining", .retry_after_s = 1};
        tow_fail(&over.err, TOW_EDRAIN, "the router is shutting down");
        if (rtr_api_in_flight(r->api) > 0) r->cut = true;
        rtr_api_fail_all(r->api, &over);
        r->failed_rest = true;
        r->drain_until_ms = net_loop_now_ms(r->loop) + LEAVE_MS; /* let the last bytes leave */
        return;
    }
    bool done =
        rtr_api_in_flight(r->api) == 0 && (rtr_cluster_drained(r->cluster) || r->failed_rest);
    if (done || (r->failed_rest && net_loop_now_ms(r->loop) >= r->drain_until_ms)) {
        r->api_closed = true;
        if (rtr_cluster_cut(r->cluster)) r->cut = true;
        rtr_api_close(r->api, on_api_closed, r);
    }
}

/* The last line of the log. */
static void tell_cut(const struct router *r)
{
    if (r->signals > 1)
        tow_error("the drain was cut short: signal %d came with requests still running",
                  r->last_signal);
    else
        tow_error("the drain was cut short: --drain-timeout (%lld s) passed with requests still "
                  "running",
                  (long long)r->set.drain_s);
}

static void on_watchdog(void *arg)
{
    (void)arg;
    net_sd_watchdog();
}

/* ------------------------------------------------------------------ start */

/* What workers must not contradict. */
static void collect_facts(struct router *r)
{
    struct text_identity id;
    struct wire_writer w = {.data = r->facts, .cap = sizeof r->facts};
    struct wire_fact f = {WIRE_FACT_FREE, wire_text(RTR_MODEL_NAME), wire_text(r->model_name)};
    wire_put_fact(&w, &f);
    text_identity_read(&id, r->set.model_dir, &r->config);
    for (uint32_t i = 0; i < id.n; i++) {
        f = (struct wire_fact){WIRE_FACT_TEXT, wire_text(id.items[i].field),
                               wire_text(id.items[i].value)};
        wire_put_fact(&w, &f);
    }
    tow_assert(!w.failed);
    r->facts_bytes = (uint32_t)w.len;
}

static int load_text(struct router *r, struct tow_err *err)
{
    char path[4096];
    int rc = text_config_load(&r->config, r->set.model_dir, err);
    if (rc < 0) return rc;
    snprintf(path, sizeof path, "%s/tokenizer.json", r->set.model_dir);
    rc = text_tokenizer_load(&r->tok, path, err);
    if (rc < 0) return rc;
    if (text_tokenizer_n_ids(r->tok) > r->config.vocab_size)
        return tow_fail(err, TOW_ECONFIG, "%s: ids up to %d, but config.json says vocab_size %d",
                        path, text_tokenizer_n_ids(r->tok) - 1, r->config.vocab_size);
    text_folder_name(r->set.model_dir, r->model_name, sizeof r->model_name);
    collect_facts(r);
    return 0;
}

static int open_recorder(struct router *r, const char *model, struct tow_err *err)
{
    const struct settings *s = &r->set;
    const struct rtr_record_config c = {.dir = s->record_dir,
                                        .mode = s->record_file_mode,
                                        .max_bytes = s->record_max_bytes,
                                        .max_requests = (uint32_t)s->record_max_requests,
                                        .model = model,
                                        .n_vocab = (uint32_t)r->config.vocab_size,
                                        .eos = r->config.eos_ids,
                                        .n_eos = (uint32_t)r->config.n_eos,
                                        .metrics = r->metrics,
                                        .inner = &rtr_cluster_backend,
                                        .inner_self = r->cluster};
    int rc = rtr_recorder_open(&r->recorder, net_loop_uv(r->loop), &c, err);
    if (rc == 0)
        tow_info("requests are recorded in %s (mode %04o): token ids, which are the users' text",
                 s->record_dir, s->record_file_mode);
    return rc;
}

/* nng starts two threads for each core, 16 at most, and some of its own; libuv has a pool. */
static unsigned count_threads(void)
{
    enum { N_FIXED = 16, MAX_TASKS = 16 }; /* counted: 13 on 2 cores, and 4 of libuv */
    const long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    return N_FIXED + (n_cores < 1               ? 2u
                      : n_cores * 2 < MAX_TASKS ? (unsigned)n_cores * 2
                                                : MAX_TASKS);
}

static int check_space(struct tow_err *err)
{
    enum { REST_MB = 64 };
    const uint64_t n = count_threads();
    pthread_attr_t attr;
    size_t stack = 8 << 20;
    char why[120];
    pthread_attr_init(&attr);
    pthread_attr_getstacksize(&attr, &stack);
    pthread_attr_destroy(&attr);
    snprintf(why, sizeof why, "%llu for stacks of %llu threads, %d for requests",
             (unsigned long long)(n * stack >> 20), (unsigned long long)n, REST_MB);
    return net_space_check(n * stack + ((uint64_t)REST_MB << 20), why, "", err);
}

static int check_limits(const struct settings *s, struct tow_err *err)
{
    char why[200];
    snprintf(why, sizeof why,
             "%d for itself, %lld clients (--max-connections), %d that are turned away, %d on the "
             "control port",
             NET_FILES_OWN, (long long)s->max_connections, RTR_HTTP_TURN_AWAY, NET_CTL_MAX);
    int rc = check_space(err);
    if (rc < 0) return rc;
    return net_files_check(
        NET_FILES_OWN + (uint64_t)s->max_connections + RTR_HTTP_TURN_AWAY + NET_CTL_MAX, why, err);
}

/* --check-config: what start() would refuse, as far as it shows without network; leaves nothing
 * behind. */
static int check_all(const struct settings *s, struct tow_err *err)
{
    int rc = check_limits(s, err);
    if (rc == 0 && s->api_key_file && *s->api_key_file)
        rc = rtr_api_check_keys(s->api_key_file, err);
    if (rc == 0 && s->record_dir) rc = rtr_record_check_dir(s->record_dir, err);
    return rc;
}

static int start(struct router *r, struct tow_err *err)
{
    const struct settings *s = &r->set;
    uint32_t eos[TEXT_CONFIG_MAX_EOS], warm_up[N_WARM_UP];
    for (int32_t i = 0; i < r->config.n_eos; i++) eos[i] = (uint32_t)r->config.eos_ids[i];
    for (uint32_t i = 0; i < N_WARM_UP; i++) warm_up[i] = i % (uint32_t)r->config.vocab_size;
    struct rtr_route_config route = {.max_queued = (uint32_t)s->max_queued,
                                     .max_queued_tokens = (uint32_t)s->max_queued_tokens,
                                     .queue_timeout_ms = (uint32_t)(s->queue_timeout_s * 1000),
                                     .lease_ms = (uint32_t)s->lease_ms,
                                     .join_token = r->join_token.len ? r->join_token.data : NULL,
                                     .facts = {r->facts, r->facts_bytes},
                                     .eos = eos,
                                     .n_eos = (uint32_t)r->config.n_eos,
                                     .warm_up = warm_up,
                                     .n_warm_up = N_WARM_UP,
                                     .incarnation = tow_random_u64()};
    int rc = check_limits(s, err);
    if (rc == 0) rc = net_threads_check(count_threads(), "control and clients", err);
    if (rc == 0) rc = net_loop_open(&r->loop, err);
    if (rc == 0) rc = net_loop_start_pool(r->loop, err);
    if (rc == 0) rc = tow_metrics_new(&r->metrics, err);
    if (rc == 0)
        rc = rtr_cluster_open(&r->cluster, r->loop, s->control.items[0], &route, r->metrics, err);
    if (rc < 0) return rc;

    char addr[300];
    struct rtr_api_config api;
    rtr_api_config_init(&api);
    snprintf(addr, sizeof addr, strchr(s->http.host, ':') ? "[%s]:%u" : "%s:%u", s->http.host,
             s->http.port);
    api.http_addr = addr;
    api.served_model_name = s->served_model_name;
    api.model_name = r->model_name;
    api.api_key_file = s->api_key_file;
    api.context_length = (uint32_t)r->config.max_positions;
    api.n_vocab = (uint32_t)r->config.vocab_size;
    api.sse_keepalive_s = (uint32_t)s->sse_keepalive_s;
    api.default_thinking = s->thinking;
    api.index_capture = s->index_capture;
    api.ratios = r->config.ratios;
    api.n_layers = (uint32_t)r->config.n_layers;
    api.limits.max_body_bytes = s->max_body_bytes;
    api.limits.max_connections = (uint32_t)s->max_connections;
    api.metrics = r->metrics;
    const struct rtr_backend *backend = &rtr_cluster_backend;
    void *self = r->cluster;
    if (s->record_dir) {
        if ((rc = open_recorder(r, api.model_name, err)) < 0) return rc;
        backend = &rtr_recorder_backend;
        self = r->recorder;
    }
    rc = rtr_api_open(&r->api, net_loop_uv(r->loop), &api, r->tok, backend, self, err);
    if (rc == 0) rc = tow_metrics_check(r->metrics, err);
    if (rc == 0) rc = net_timer_open(&r->poll, r->loop, on_poll, r, err);
    if (rc == 0) rc = net_timer_open(&r->watchdog, r->loop, on_watchdog, r, err);
    if (rc == 0) rc = net_loop_on_signal(r->loop, SIGTERM, on_signal, r, err);
    if (rc == 0) rc = net_loop_on_signal(r->loop, SIGINT, on_signal, r, err);
    if (rc < 0) return rc;
    net_timer_start(r->poll, POLL_MS, POLL_MS);
    if (net_sd_watchdog_ms())
        net_timer_start(r->watchdog, net_sd_watchdog_ms(), net_sd_watchdog_ms());
    tow_info("clients on %s:%u, workers on %s", s->http.host, rtr_api_port(r->api),
             rtr_cluster_url(r->cluster));
    net_sd_status("waiting for workers");
    return 0;
}

static void stop(struct router *r)
{
    if (r->api) { /* start failed half-way: nothing runs yet */
        rtr_api_close(r->api, on_api_closed, r);
        net_loop_run(r->loop);
    }
    net_timer_close(r->poll);
    net_timer_close(r->watchdog);
    rtr_cluster_close(r->cluster);
    if (r->loop) net_loop_free(r->loop); /* writes the last records */
    rtr_recorder_free(r->recorder);
    tow_metrics_free(r->metrics);
}

int main(int argc, char **argv)
{
    static struct router r;
    struct tow_err err = {0};
    enum tow_opts_do what = TOW_OPTS_RUN;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a log at its limit is an error of write */
    tow_buf_init(&r.join_token, 0);
    tow_log_init("towpath-router", TOW_LOG_INFO, TOW_LOG_TEXT);

    int rc = net_stack_check(&err);
    if (rc == 0) rc = read_settings(&r, argc, argv, &what, &err);
    const bool go = what == TOW_OPTS_RUN || what == TOW_OPTS_CHECK;
    if (rc == 0 && go) rc = load_text(&r, &err);
    if (rc == 0 && what == TOW_OPTS_CHECK) rc = check_all(&r.set, &err);
    if (rc == 0 && what == TOW_OPTS_RUN) {
        rc = start(&r, &err);
        if (rc == 0) net_loop_run(r.loop);
    }
    if (rc < 0) tow_error("%s", err.msg);
    stop(&r);
    if (r.cut) tell_cut(&r);
    text_tokenizer_free(r.tok);
    tow_buf_fini(&r.join_token);
    tow_opts_free(r.opts);
    return rc < 0 || r.cut ? 1 : 0;
}
