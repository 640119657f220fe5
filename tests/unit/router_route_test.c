/* Tests of router/route.c and router/registry.c against scripted workers.
 * Random orders: cluster_model_test.c. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "router/route.h"

#include <stdio.h>
#include <string.h>

#define P1 1u /* connections */
#define D1 2u
#define D2 3u
#define D3 4u

struct world {
    struct rtr_route *route;
    struct rtr_actions acts;
    uint64_t now, ids;
    struct rtr_request req;
    struct rtr_choice choices[8];
};

static text_id prompt[600];

static uint64_t count_up(void *arg)
{
    return ++*(uint64_t *)arg;
}

static void setup(struct world *w)
{
    static const uint32_t eos[1] = {1};
    struct tow_err err;
    memset(w, 0, sizeof *w);
    w->now = 1000;
    struct rtr_route_config cfg = {.max_queued = 10,
                                   .max_queued_tokens = 500,
                                   .queue_timeout_ms = 5000,
                                   .eos = eos,
                                   .n_eos = 1,
                                   .incarnation = 1,
                                   .join_token = "secret",
                                   .random = count_up,
                                   .random_arg = &w->ids};
    assert_int_equal(rtr_route_new(&w->route, &cfg, &err), 0);
    rtr_actions_init(&w->acts);
}

static void teardown(struct world *w)
{
    rtr_route_free(w->route);
    rtr_actions_fini(&w->acts);
}

static void message(struct world *w, uint64_t conn, const struct wire_msg *m)
{
    rtr_actions_clear(&w->acts);
    rtr_route_reap(w->route);
    rtr_route_step(
        w->route,
        &(struct rtr_event){.kind = RTR_ON_MESSAGE, .now_ms = w->now, .conn = conn, .msg = m},
        &w->acts);
}

static void event(struct world *w, enum rtr_event_kind kind, uint64_t conn)
{
    rtr_actions_clear(&w->acts);
    rtr_route_reap(w->route);
    rtr_route_step(w->route, &(struct rtr_event){.kind = kind, .now_ms = w->now, .conn = conn},
                   &w->acts);
}

/* The i-th action of that kind (and message type); conn 0: any. */
static struct rtr_action *nth(struct world *w, enum rtr_action_kind kind, unsigned type,
                              uint64_t conn, int i)
{
    for (uint32_t k = 0; k < w->acts.n; k++) {
        struct rtr_action *a = &w->acts.items[k];
        if (a->kind != kind || (conn && a->conn != conn)) continue;
        if (kind == RTR_DO_SEND && a->msg.type != type) continue;
        if (i-- == 0) return a;
    }
    return NULL;
}
static struct rtr_action *sent(struct world *w, unsigned type)
{
    return nth(w, RTR_DO_SEND, type, 0, 0);
}

static const char *logged(struct world *w)
{
    const struct rtr_action *a = nth(w, RTR_DO_LOG, 0, 0, 0);
    return a ? a->refusal.err.msg : NULL;
}

struct facts {
    uint8_t bytes[300];
    struct wire_writer w;
};
static void fact(struct facts *f, uint8_t class, const char *field, const char *value)
{
    f->w.data = f->bytes;
    f->w.cap = sizeof f->bytes;
    wire_put_fact(&f->w, &(struct wire_fact){class, wire_text(field), wire_text(value)});
}

static struct wire_msg hello(const char *name, bool prefill, uint64_t incarnation, struct facts *f)
{
    struct wire_msg m = {.type = WIRE_HELLO_MSG};
    m.hello.version_min = m.hello.version_max = 1;
    m.hello.role = prefill ? WIRE_PREFILL_ROLE : WIRE_DECODE_ROLE;
    m.hello.name = wire_text(name);
    m.hello.incarnation = incarnation;
    m.hello.join_token = (struct wire_bytes){"secret", 6};
    m.hello.pages = 100;
    m.hello.page_tokens = 4;
    m.hello.max_context = 300;
    m.hello.max_batch = 4;
    m.hello.chunk_tokens = 16;
    m.hello.max_pending_tokens = 400;
    m.hello.max_tickets = 8;
    if (f) m.hello.facts = (struct wire_bytes){f->bytes, (uint32_t)f->w.len};
    return m;
}

static void beat(struct world *w, uint64_t conn)
{
    struct wire_msg m = {.type = WIRE_HEARTBEAT_MSG};
    m.heartbeat.state = WIRE_SERVING;
    m.heartbeat.pages_free = 100;
    message(w, conn, &m);
}

static void paired(struct world *w, const char *name, uint64_t incarnation)
{
    struct wire_msg m = {.type = WIRE_PAIRED_MSG};
    m.paired.name = wire_text(name);
    m.paired.incarnation = incarnation;
    m.paired.ok = 1;
    message(w, P1, &m);
}

/* What an honest decode or prefill worker says next about t. */
static void grant(struct world *w, uint64_t conn, struct wire_ticket t)
{
    struct wire_msg m = {.type = WIRE_GRANT_MSG};
    m.grant.ticket = t;
    message(w, conn, &m);
}
static void done(struct world *w, struct wire_ticket t)
{
    struct wire_msg m = {.type = WIRE_PREFILL_DONE_MSG};
    m.prefill_done.ticket = t;
    message(w, P1, &m);
}
static void tokens(struct world *w, uint64_t conn, struct wire_ticket t, uint32_t first, uint32_t n)
{
    static const uint32_t ids[16] = {9, 9, 9, 9, 9, 9, 9, 9};
    struct wire_msg m = {.type = WIRE_TOKENS_MSG};
    m.tokens.ticket = t;
    m.tokens.first = first;
    m.tokens.ids = (struct wire_ids){ids, n};
    message(w, conn, &m);
}
static void finish(struct world *w, uint64_t conn, struct wire_ticket t, uint32_t n, bool length)
{
    struct wire_msg m = {.type = WIRE_FINISH_MSG};
    m.finish.ticket = t;
    m.finish.n_output = n;
    m.finish.reason = length ? WIRE_FINISH_LENGTH : WIRE_FINISH_STOP;
    message(w, conn, &m);
}
static void failed(struct world *w, uint64_t conn, struct wire_ticket t, int code)
{
    struct wire_msg m = {.type = WIRE_FAILED_MSG};
    m.failed.ticket = t;
    m.failed.code = (int16_t)code;
    message(w, conn, &m);
}
static void deny(struct world *w, uint64_t conn, struct wire_ticket t, int code)
{
    struct wire_msg m = {.type = WIRE_DENY_MSG};
    m.deny.ticket = t;
    m.deny.code = (int16_t)code;
    m.deny.note = wire_text("because");
    message(w, conn, &m);
}
static void cancelled(struct world *w, uint64_t conn, struct wire_ticket t)
{
    struct wire_msg m = {.type = WIRE_CANCELLED_MSG};
    m.cancelled.ticket = t;
    message(w, conn, &m);
}

/* Runs the warm-up whose RESERVE is in the actions. */
static void warm_up(struct world *w)
{
    struct rtr_action *r = sent(w, WIRE_RESERVE_MSG);
    assert_non_null(r);
    uint64_t conn = r->conn;
    struct wire_ticket t = r->msg.reserve.ticket;
    grant(w, conn, t);
    assert_non_null(sent(w, WIRE_PREFILL_MSG));
    done(w, t);
    tokens(w, conn, t, 0, 3);
    finish(w, conn, t, 3, true);
}

static void join_decode(struct world *w, uint64_t conn, const char *name)
{
    struct wire_msg m = hello(name, false, conn, NULL);
    message(w, conn, &m);
    assert_non_null(sent(w, WIRE_WELCOME_MSG));
    assert_non_null(sent(w, WIRE_PAIR_MSG));
    paired(w, name, conn);
    warm_up(w);
}

static void join_prefill(struct world *w)
{
    struct wire_msg m = hello("p1", true, P1, NULL);
    message(w, P1, &m);
    assert_non_null(sent(w, WIRE_WELCOME_MSG));
}

static int submit(struct world *w, uint32_t n, uint32_t n_prompt, uint32_t max_tokens,
                  struct rtr_job **job, struct rtr_refusal *f)
{
    for (uint32_t i = 0; i < n; i++) w->choices[i] = (struct rtr_choice){prompt, n_prompt, i};
    w->req.choices = w->choices;
    w->req.n_choices = n;
    w->req.max_tokens = max_tokens;
    rtr_actions_clear(&w->acts);
    return rtr_route_submit(w->route, w->now, &w->req, w, job, f, &w->acts);
}

static const struct rtr_worker *worker(struct world *w, const char *name)
{
    const struct rtr_registry *g = rtr_route_registry(w->route);
    return &g->workers[rtr_registry_by_name(g, wire_text(name))];
}

/* Readiness means a request went through; what came before waits and is served. */
static void test_route__first_request_waits_for_the_warm_up_and_is_served(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    const char *why;
    setup(&w);
    assert_int_equal(submit(&w, 1, 10, 2, &job, &f), 0);
    assert_int_equal(w.acts.n, 0);
    join_prefill(&w);
    assert_false(rtr_route_ready(w.route, w.now, &why));
    assert_string_equal(why, "no decode worker");
    struct wire_msg m = hello("d1", false, D1, NULL);
    message(&w, D1, &m);
    assert_null(sent(&w, WIRE_RESERVE_MSG));
    paired(&w, "d1", D1);
    assert_null(nth(&w, RTR_DO_SEND, WIRE_RESERVE_MSG, 0, 1)); /* the warm-up alone */
    assert_false(rtr_route_ready(w.route, w.now, &why));
    warm_up(&w);
    assert_true(rtr_route_ready(w.route, w.now, &why));
    struct rtr_action *r = sent(&w, WIRE_RESERVE_MSG); /* now the waiting request */
    assert_non_null(r);
    assert_int_equal(r->msg.reserve.n_tokens, 10);
    teardown(&w);
}

/* KV-07 and the join rules: the refusal names the field and both values. */
static void test_route__join_that_does_not_fit_is_refused_with_both_values(void **state)
{
    (void)state;
    struct world w;
    struct facts a = {0}, b = {0}, c = {0};
    setup(&w);
    fact(&a, WIRE_FACT_LAYOUT, "kv_dtype", "fp8");
    fact(&a, WIRE_FACT_NUMERICS, "index_topk", "512");
    fact(&a, WIRE_FACT_FREE, "build", "1");
    fact(&b, WIRE_FACT_LAYOUT, "kv_dtype", "bf16");
    fact(&c, WIRE_FACT_LAYOUT, "kv_dtype", "fp8");
    fact(&c, WIRE_FACT_NUMERICS, "index_topk", "1024");
    fact(&c, WIRE_FACT_FREE, "build", "2");
    struct wire_msg m = hello("p1", true, 7, &a);
    message(&w, P1, &m);
    assert_non_null(sent(&w, WIRE_WELCOME_MSG));
    m = hello("d1", false, 8, &b);
    message(&w, D1, &m);
    struct rtr_action *r = sent(&w, WIRE_REFUSE_MSG);
    assert_non_null(r);
    assert_true(wire_text_is(r->msg.refuse.field, "kv_dtype"));
    assert_true(wire_text_is(r->msg.refuse.ours, "fp8") &&
                wire_text_is(r->msg.refuse.theirs, "bf16"));
    assert_non_null(nth(&w, RTR_DO_CLOSE, 0, D1, 0));
    m = hello("d1", false, 8, &c); /* other numerics: joins, but makes no pair; other build: free */
    message(&w, D2, &m);
    assert_non_null(sent(&w, WIRE_WELCOME_MSG));
    assert_null(sent(&w, WIRE_PAIR_MSG));
    const struct wire_unfit *u = &nth(&w, RTR_DO_SEND, WIRE_UNFIT_MSG, P1, 0)->msg.unfit;
    assert_true(wire_text_is(u->name, "d1") &&
                wire_text_is(u->note, "index_topk: '512' and '1024'"));
    u = &nth(&w, RTR_DO_SEND, WIRE_UNFIT_MSG, D2, 0)->msg.unfit;
    assert_true(wire_text_is(u->name, "p1") &&
                wire_text_is(u->note, "index_topk: '512' and '1024'"));
    m = hello("d2", false, 9, &a);
    m.hello.join_token = (struct wire_bytes){"secreT", 6};
    message(&w, D3, &m);
    assert_int_equal(sent(&w, WIRE_REFUSE_MSG)->msg.refuse.code, TOW_EAUTH);
    assert_non_null(strstr(logged(&w), "decode worker d2 is refused: join_token is another"));
    message(&w, D3, &m); /* and again: once in the log, listed until it is let in */
    assert_null(logged(&w));
    uint32_t at = 0;
    const struct rtr_registry *g = rtr_route_registry(w.route);
    const struct rtr_refused *f = rtr_registry_next_refused(g, &at, w.now);
    assert_string_equal(f->name, "d2"); /* d1 was let in */
    assert_string_equal(f->field, "join_token");
    assert_int_equal(f->times, 2);
    assert_null(rtr_registry_next_refused(g, &at, w.now));
    at = 0; /* it has gone */
    assert_null(rtr_registry_next_refused(g, &at, w.now + RTR_REFUSED_MS));
    m = hello("d2", false, 9, &c);
    message(&w, D3, &m);
    at = 0;
    assert_null(rtr_registry_next_refused(g, &at, w.now));
    m = hello("p1", true, 70, &a); /* a live worker's name */
    message(&w, 9, &m);
    assert_true(wire_text_is(sent(&w, WIRE_REFUSE_MSG)->msg.refuse.field, "name"));
    m = hello("p1", true, 7, &a); /* the same process again: its old connection is dead */
    message(&w, 10, &m);
    assert_non_null(sent(&w, WIRE_WELCOME_MSG));
    assert_non_null(nth(&w, RTR_DO_CLOSE, 0, P1, 0));
    m = hello("p9", true, 11, &a);
    m.hello.version_min = m.hello.version_max = 9;
    message(&w, 11, &m);
    assert_true(wire_text_is(sent(&w, WIRE_REFUSE_MSG)->msg.refuse.theirs, "9..9"));
    teardown(&w);
}

static int check_join(const struct rtr_registry *g, const char *name, struct facts *f,
                      struct rtr_join *j, struct tow_err *err)
{
    const struct wire_msg m = hello(name, false, 7, f);
    return rtr_registry_check(g, &m.hello, 1, j, err);
}

/* The router's ids mean nothing to another model, whether or not it is the first to come. */
static void test_route__worker_of_another_model_than_the_routers_is_refused(void **state)
{
    (void)state;
    struct rtr_registry *g = calloc(1, sizeof *g);
    struct rtr_join j;
    struct tow_err err;
    struct facts own = {0}, same = {0}, fewer = {0}, other = {0}, tok = {0};
    assert_non_null(g);
    fact(&own, WIRE_FACT_FREE, RTR_MODEL_NAME, "a");
    fact(&own, WIRE_FACT_TEXT, "model.vocab_size", "1000");
    fact(&own, WIRE_FACT_TEXT, "model.tokenizer", "11");
    rtr_registry_init(g, 1000, 1000, "secret");
    assert_int_equal(
        rtr_registry_own_facts(g, (struct wire_bytes){own.bytes, (uint32_t)own.w.len}, &err), 0);
    fact(&same, WIRE_FACT_TEXT, "model.vocab_size", "1000");
    fact(&same, WIRE_FACT_TEXT, "model.tokenizer", "11");
    fact(&same, WIRE_FACT_TEXT, "model.later", "the router does not know it");
    fact(&same, WIRE_FACT_FREE, RTR_MODEL_NAME, "a-quantised");
    assert_int_equal(check_join(g, "d1", &same, &j, &err), 0);
    assert_int_equal(check_join(g, "d1", NULL, &j, &err), 0); /* an older one says nothing */
    fact(&fewer, WIRE_FACT_TEXT, "model.vocab_size", "1000");
    assert_int_equal(check_join(g, "d1", &fewer, &j, &err), 0);

    fact(&other, WIRE_FACT_FREE, RTR_MODEL_NAME, "b");
    fact(&other, WIRE_FACT_TEXT, "model.vocab_size", "512");
    assert_int_equal(check_join(g, "d1", &other, &j, &err), TOW_EMISMATCH);
    assert_string_equal(err.msg, "model.vocab_size is 512, must be 1000 as in this router's "
                                 "--model: it serves another model, 'a' and not 'b'");
    assert_string_equal(j.field, "model.vocab_size");
    assert_string_equal(j.ours, "1000");
    assert_string_equal(j.theirs, "512");
    fact(&tok, WIRE_FACT_TEXT, "model.vocab_size", "1000");
    fact(&tok, WIRE_FACT_TEXT, "model.tokenizer", "1");
    assert_int_equal(check_join(g, "d1", &tok, &j, &err), TOW_EMISMATCH);
    assert_string_equal(err.msg, "model.tokenizer is 1, must be 11 as in this router's --model: "
                                 "it serves another model");
    rtr_registry_fini(g);
    free(g);
}

/* Two values alone do not say whose they are, and a layout that differs because the model does is
 * no layout to look into. */
static void test_route__refusal_because_of_another_worker_names_it_and_its_model(void **state)
{
    (void)state;
    struct world w;
    struct facts a = {0}, b = {0}, c = {0};
    setup(&w);
    fact(&a, WIRE_FACT_LAYOUT, "layout.page_bytes", "4096");
    fact(&a, WIRE_FACT_MODEL, "model.fingerprint", "aa");
    fact(&a, WIRE_FACT_FREE, RTR_MODEL_NAME, "flash");
    struct wire_msg m = hello("p1", true, 7, &a);
    message(&w, P1, &m);
    fact(&b, WIRE_FACT_LAYOUT, "layout.page_bytes", "8192");
    fact(&b, WIRE_FACT_MODEL, "model.fingerprint", "bb");
    fact(&b, WIRE_FACT_FREE, RTR_MODEL_NAME, "pro");
    m = hello("d1", false, 8, &b);
    m.hello.page_tokens = 8;
    message(&w, D1, &m);
    const char *said = "model.fingerprint is bb, must be aa as of worker p1: it serves another "
                       "model, 'flash' and not 'pro', or another revision";
    assert_non_null(strstr(logged(&w), said));
    assert_true(wire_text_is(sent(&w, WIRE_REFUSE_MSG)->msg.refuse.note, said));
    uint32_t at = 0;
    assert_string_equal(rtr_registry_next_refused(rtr_route_registry(w.route), &at, w.now)->why,
                        said);
    m = hello("d2", false, 9, &a);
    m.hello.page_tokens = 8;
    message(&w, D2, &m);
    assert_non_null(strstr(logged(&w), "page_tokens is 8, must be 4 as of worker p1"));
    fact(&c, WIRE_FACT_LAYOUT, "layout.page_bytes", "8192");
    fact(&c, WIRE_FACT_MODEL, "model.fingerprint", "aa");
    m = hello("d3", false, 10, &c);
    message(&w, D3, &m);
    assert_non_null(strstr(logged(&w), "layout.page_bytes is 8192, must be 4096 as of worker p1"));
    teardown(&w);
}

/* It would join, and make no pair with the others. */
static void test_route__a_join_token_is_refused_where_there_is_none(void **state)
{
    (void)state;
    struct rtr_registry *g = calloc(1, sizeof *g);
    struct rtr_join j;
    struct tow_err err;
    assert_non_null(g);
    struct wire_msg m = hello("d1", false, 7, NULL);
    for (int i = 0; i < 2; i++) {
        rtr_registry_init(g, 1000, 1000, i ? "" : NULL);
        m.hello.join_token = (struct wire_bytes){"secret", 6};
        assert_int_equal(rtr_registry_check(g, &m.hello, 1, &j, &err), TOW_EAUTH);
        assert_string_equal(j.field, "join_token");
        assert_non_null(strstr(err.msg, "must be none: this router has no --join-token-file"));
        m.hello.join_token = (struct wire_bytes){NULL, 0};
        assert_int_equal(rtr_registry_check(g, &m.hello, 1, &j, &err), 0);
    }
    free(g);
}

/* A flood of made-up names costs so many lines of the log in a minute, and no memory. */
static void test_route__refused_names_are_bounded(void **state)
{
    (void)state;
    struct world w;
    char name[16];
    int lines = 0;
    setup(&w);
    for (int i = 0; i < 5 * RTR_MAX_REFUSED; i++) {
        snprintf(name, sizeof name, "x%d", i);
        struct wire_msg m = hello(name, false, 7, NULL);
        m.hello.join_token.len = 0;
        message(&w, D1, &m);
        lines += logged(&w) != NULL;
    }
    assert_int_equal(lines, RTR_MAX_REFUSED);
    assert_int_equal(rtr_route_registry(w.route)->refusals, 5 * RTR_MAX_REFUSED);
    teardown(&w);
}

/* A name becomes a label, a path of the admin interface and a key: only what net/peer takes is
 * let in. */
static void test_route__names_are_checked_when_a_worker_joins(void **state)
{
    (void)state;
    struct world w;
    char long_name[66];
    memset(long_name, 'n', 65);
    long_name[65] = 0;
    const char *const bad[] = {"", "a b", "a/b", "\xc3\xa9", "a\n", long_name};
    setup(&w);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct wire_msg m = hello(bad[i], false, 7, NULL);
        message(&w, D1, &m);
        struct rtr_action *r = sent(&w, WIRE_REFUSE_MSG);
        assert_non_null(r);
        assert_true(wire_text_is(r->msg.refuse.field, "name"));
        assert_true(wire_text_is(r->msg.refuse.ours, "1 to 64 letters, digits, '.', '_' or '-'"));
    }
    struct wire_msg cut = hello("d1", false, 7, NULL); /* a zero byte inside */
    cut.hello.name = (struct wire_text){"d1\0x", 4};
    message(&w, D1, &cut);
    assert_non_null(sent(&w, WIRE_REFUSE_MSG));
    for (size_t n = 63; n <= 64; n++) {
        long_name[n] = 0;
        struct wire_msg m = hello(long_name, false, n, NULL);
        message(&w, n, &m);
        assert_non_null(sent(&w, WIRE_WELCOME_MSG));
        assert_non_null(worker(&w, long_name));
        long_name[n] = 'n';
    }
    teardown(&w);
}

/* OP-07: exact limits, n counts n, leaving clients free their place. OP-09: 400 at once. */
static void test_route__queue_has_exact_limits(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *jobs[3], *more;
    struct rtr_refusal f;
    struct rtr_route_stats s;
    setup(&w);
    assert_int_equal(submit(&w, 4, 10, 2, &jobs[0], &f), 0);
    assert_int_equal(submit(&w, 4, 10, 2, &jobs[1], &f), 0);
    assert_int_equal(submit(&w, 3, 10, 2, &more, &f), TOW_EFULL);
    assert_string_equal(f.reason, "queue_full");
    assert_in_range(f.retry_after_s, 1, 600);
    assert_int_equal(submit(&w, 2, 10, 2, &jobs[2], &f), 0);
    assert_int_equal(rtr_route_room(w.route, w.now, &f), TOW_EFULL);
    rtr_route_cancel(w.route, jobs[1], w.now, &w.acts);
    assert_int_equal(rtr_route_room(w.route, w.now, &f), 0);
    assert_int_equal(submit(&w, 1, 441, 2, &more, &f), TOW_EFULL);
    assert_string_equal(f.reason, "queue_tokens_full");
    assert_int_equal(submit(&w, 1, 440, 2, &more, &f), 0);
    assert_int_equal(submit(&w, 1, 501, 2, &more, &f), TOW_EINVAL);
    assert_int_equal(f.retry_after_s, 0);
    w.now += 5000;
    event(&w, RTR_ON_TICK, 0);
    assert_int_equal(nth(&w, RTR_DO_FAIL, 0, 0, 2)->refusal.http, 503);
    assert_string_equal(nth(&w, RTR_DO_FAIL, 0, 0, 0)->refusal.reason, "no_capacity");
    rtr_route_stats(w.route, &s);
    assert_int_equal(s.started, s.failed + s.cancelled);
    assert_int_equal(s.waiting + s.waiting_tokens, 0);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    assert_int_equal(submit(&w, 1, 290, 10, &more, &f), 0);
    assert_int_equal(submit(&w, 1, 290, 11, &more, &f), TOW_EINVAL);
    assert_non_null(strstr(f.err.msg, "300"));
    teardown(&w);
}

/* RT-03: busy is no failure. KV-02: a refusal for good ends the request and winds the other side
 * up. */
static void test_route__busy_worker_is_tried_again_and_never_left_out(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    assert_int_equal(submit(&w, 1, 10, 2, &job, &f), 0);
    for (int i = 0; i < 40; i++) {
        struct rtr_action *r = sent(&w, WIRE_RESERVE_MSG);
        assert_non_null(r);
        deny(&w, D1, r->msg.reserve.ticket, TOW_EFULL);
        assert_null(sent(&w, WIRE_RESERVE_MSG));
        w.now += 25;
        event(&w, RTR_ON_TICK, 0);
    }
    assert_int_equal(worker(&w, "d1")->total_failures, 0);
    struct rtr_action *r = sent(&w, WIRE_RESERVE_MSG);
    struct wire_ticket t = r->msg.reserve.ticket;
    grant(&w, D1, t);
    deny(&w, P1, t, TOW_ETOOBIG);
    struct rtr_action *fail = nth(&w, RTR_DO_FAIL, 0, 0, 0);
    assert_int_equal(fail->refusal.err.code, TOW_ETOOBIG);
    assert_string_equal(fail->refusal.err.msg, "because");
    assert_int_equal(sent(&w, WIRE_CANCEL_MSG)->conn, D1);
    assert_int_equal(worker(&w, "d1")->tickets, 1); /* held until it says so */
    cancelled(&w, D1, t);
    assert_int_equal(worker(&w, "d1")->tickets, 0);
    assert_int_equal(worker(&w, "d1")->held_pages, 0);
    teardown(&w);
}

/* A stream that gave way for pages waits for them as long as it takes; without workers, and for who
 * has not begun, the queue time counts. */
static void test_route__begun_stream_outlasts_the_queue_time(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    assert_int_equal(submit(&w, 1, 10, 9, &job, &f), 0);
    struct wire_ticket t = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
    grant(&w, D1, t);
    done(&w, t);
    tokens(&w, D1, t, 0, 3);
    failed(&w, D1, t, TOW_EFULL);
    assert_int_equal(submit(&w, 1, 10, 2, &job, &f), 0);
    int refused = 0;
    for (uint64_t end = w.now + 4 * 5000; w.now < end; w.now += 25) {
        beat(&w, P1);
        beat(&w, D1);
        event(&w, RTR_ON_TICK, 0);
        struct rtr_action *fail = nth(&w, RTR_DO_FAIL, 0, 0, 0);
        if (fail) {
            assert_ptr_equal(fail->job, job);
            assert_string_equal(fail->refusal.reason, "queue_timeout");
            refused++;
        }
        for (struct rtr_action *r; (r = sent(&w, WIRE_RESERVE_MSG)) != NULL;)
            deny(&w, D1, r->msg.reserve.ticket, TOW_EFULL);
    }
    assert_int_equal(refused, 1);
    struct rtr_action *r = NULL;
    for (int i = 0; i < 40 && !r; i++, w.now += 25) {
        event(&w, RTR_ON_TICK, 0);
        r = sent(&w, WIRE_RESERVE_MSG);
    }
    assert_non_null(r);
    assert_int_equal(r->msg.reserve.outputs.n, 3);
    failed(&w, D1, r->msg.reserve.ticket, TOW_EFULL);
    rtr_actions_clear(&w.acts);
    event(&w, RTR_ON_CLOSED, D1);
    for (uint64_t end = w.now + 2 * 5000; w.now < end && !nth(&w, RTR_DO_FAIL, 0, 0, 0);
         w.now += 25)
        event(&w, RTR_ON_TICK, 0);
    assert_string_equal(nth(&w, RTR_DO_FAIL, 0, 0, 0)->refusal.reason, "no_capacity");
    teardown(&w);
}

static void left_out_and_back(int code)
{
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    bool repaired = false;
    uint32_t failures = 0, healed = 0;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    join_decode(&w, D2, "d2");
    join_decode(&w, D3, "d3");
    for (int i = 0; i < 200; i++) {
        if (i == 100) repaired = true;
        for (uint64_t c = P1; c <= D3; c++) beat(&w, c);
        assert_int_equal(submit(&w, 1, 10, 2, &job, &f), 0);
        for (;;) {
            struct rtr_action *r = sent(&w, WIRE_RESERVE_MSG);
            assert_non_null(r); /* always another one to try */
            uint64_t conn = r->conn;
            struct wire_ticket t = r->msg.reserve.ticket;
            if (conn == D2 && !repaired) {
                failures++;
                failed(&w, D2, t, code);
                assert_int_equal(worker(&w, "p1")->circuit, RTR_CLOSED);
                assert_null(nth(&w, RTR_DO_FAIL, 0, 0, 0));
                continue;
            }
            healed += conn == D2;
            grant(&w, conn, t);
            done(&w, t);
            tokens(&w, conn, t, 0, 2);
            finish(&w, conn, t, 2, true);
            assert_non_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
            break;
        }
        w.now += 100;
    }
    assert_in_range(failures, 3, 3 + 5); /* to be left out, then probes at 1, 3, 7 s */
    assert_in_range(healed, 10, 100);
    teardown(&w);
}

/* RT-04: three failures leave it out, one probe at a time, one success brings it back; also when it
 * says that its peer is to blame, for which the peer does not suffer with others. */
static void test_route__failing_worker_is_left_out_probed_and_comes_back(void **state)
{
    (void)state;
    left_out_and_back(TOW_EDEVICE);
    left_out_and_back(TOW_EPEER);
    left_out_and_back(TOW_EDIGEST);
}

static struct wire_ticket reserved(struct world *w)
{
    struct rtr_action *r = sent(w, WIRE_RESERVE_MSG);
    assert_non_null(r);
    return r->msg.reserve.ticket;
}

static void run_through(struct world *w, struct wire_ticket t)
{
    grant(w, D1, t);
    done(w, t);
    tokens(w, D1, t, 0, 2);
    finish(w, D1, t, 2, true);
}

/* OP-08: while a long prompt waits for room, any number of short ones is placed at once; and it
 * gets its room all the same, though short ones never cease. */
static void test_route__short_prompts_never_wait_for_long_ones_and_starve_none(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    struct wire_ticket long_ones[3], shorts[8];
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    for (int i = 0; i < 3; i++) { /* 300 of the 350 tokens that long ones may hold of 400 */
        assert_int_equal(submit(&w, 1, 100, 2, &job, &f), 0);
        long_ones[i] = reserved(&w);
    }
    assert_int_equal(submit(&w, 1, 100, 2, &job, &f), 0);
    assert_null(sent(&w, WIRE_RESERVE_MSG));
    for (int i = 0; i < 300; i++) { /* far more than it may be passed */
        assert_int_equal(submit(&w, 1, 10, 2, &job, &f), 0);
        run_through(&w, reserved(&w));
        assert_non_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
    }
    /* At once: as many as their eighth holds (12 pages of 100), then they wait too. */
    uint32_t n = 0;
    for (;; n++) {
        assert_in_range(n, 0, 7);
        assert_int_equal(submit(&w, 1, 10, 2, &job, &f), 0);
        if (!sent(&w, WIRE_RESERVE_MSG)) break;
        shorts[n] = reserved(&w);
    }
    assert_int_equal(n, 4);
    /* One long one ends: its room is for the long one that waits,
     * however many short ones are there. */
    grant(&w, D1, long_ones[0]);
    done(&w, long_ones[0]);
    tokens(&w, D1, long_ones[0], 0, 2);
    finish(&w, D1, long_ones[0], 2, true);
    assert_non_null(nth(&w, RTR_DO_SEND, WIRE_RESERVE_MSG, D1, 0));
    bool started = false;
    for (int i = 0; nth(&w, RTR_DO_SEND, WIRE_RESERVE_MSG, D1, i); i++)
        started |= nth(&w, RTR_DO_SEND, WIRE_RESERVE_MSG, D1, i)->msg.reserve.n_tokens == 100;
    assert_true(started);
    for (uint32_t i = 0; i < n; i++) run_through(&w, shorts[i]);
    event(&w, RTR_ON_CLOSED, D1);
    assert_int_equal(worker(&w, "d1")->long_pages + worker(&w, "d1")->long_tickets, 0);
    event(&w, RTR_ON_CLOSED, P1);
    assert_int_equal(worker(&w, "p1")->long_tokens + worker(&w, "p1")->long_tickets, 0);
    teardown(&w);
}

/* Loss of D in mid-stream: the next attempt has prompt + outputs, and the client sees no seam.
 * RT-09: load is zero. */
static void test_route__stream_goes_on_elsewhere_after_loss_of_decode(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    join_decode(&w, D2, "d2");
    assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
    uint64_t first = sent(&w, WIRE_RESERVE_MSG)->conn, second = first == D1 ? D2 : D1;
    struct wire_ticket t = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
    grant(&w, first, t);
    done(&w, t);
    tokens(&w, first, t, 0, 4);
    event(&w, RTR_ON_CLOSED, first);
    assert_null(nth(&w, RTR_DO_FAIL, 0, 0, 0));
    assert_non_null(sent(&w, WIRE_UNPAIR_MSG));
    struct rtr_action *r = sent(&w, WIRE_RESERVE_MSG);
    assert_int_equal(r->conn, second);
    assert_int_equal(r->msg.reserve.n_tokens, 14);
    assert_int_equal(r->msg.reserve.outputs.n, 4);
    struct wire_ticket again = r->msg.reserve.ticket;
    assert_int_not_equal(again.id, t.id);
    assert_int_not_equal(again.nonce, t.nonce);
    grant(&w, second, again);
    const struct rtr_action *placed = nth(&w, RTR_DO_PLACED, 0, 0, 0);
    const struct rtr_worker *all = rtr_route_registry(w.route)->workers;
    assert_int_equal(placed->n_output, 4);
    assert_int_equal(all[placed->decode].conn, second);
    assert_int_equal(all[placed->prefill].role, WIRE_PREFILL_ROLE);
    struct rtr_action *p = sent(&w, WIRE_PREFILL_MSG);
    assert_int_equal(p->msg.prefill.tokens.n, 14);
    assert_int_equal(p->msg.prefill.n_prompt, 10);
    assert_int_equal(wire_ids_at(p->msg.prefill.tokens, 13), 9);
    tokens(&w, second, again, 4, 2);
    assert_int_equal(nth(&w, RTR_DO_TOKENS, 0, 0, 0)->msg.tokens.first, 4);
    finish(&w, second, again, 6, true);
    assert_int_equal(nth(&w, RTR_DO_FINISH, 0, 0, 0)->reason, RTR_FINISH_LENGTH);
    done(&w, again);
    struct rtr_route_stats s;
    rtr_route_stats(w.route, &s);
    assert_int_equal(s.tickets, 0);
    const char *names[] = {"p1", "d1", "d2"};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(worker(&w, names[i])->tickets, 0);
        assert_int_equal(worker(&w, names[i])->held_pages + worker(&w, names[i])->held_tokens, 0);
    }
    teardown(&w);
}

/* What streams needs its prefill worker no more: its failure after that costs nobody anything. */
static void test_route__prefill_that_fails_behind_a_stream_does_not_disturb_it(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
        struct wire_ticket t = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
        grant(&w, D1, t);
        tokens(&w, D1, t, 0, 2);
        if (i == 0)
            failed(&w, P1, t, TOW_EPEER); /* the last ACK did not reach it */
        else
            cancelled(&w, P1, t);
        assert_int_equal(w.acts.n, 0);
        assert_int_equal(worker(&w, "p1")->tickets, 0);
        tokens(&w, D1, t, 2, 4);
        assert_int_equal(nth(&w, RTR_DO_TOKENS, 0, 0, 0)->msg.tokens.first, 2);
        finish(&w, D1, t, 6, true);
        assert_non_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
    }
    assert_int_equal(worker(&w, "d1")->total_failures, 0);
    struct rtr_route_stats s;
    rtr_route_stats(w.route, &s);
    assert_int_equal(s.retries, 0);
    assert_int_equal(s.tickets, 0);
    teardown(&w);
}

/* --- captures --------------------------------------------------------------------------------- */

static void ask_capture(struct world *w, bool shadow)
{
    static uint8_t bytes[64];
    static const uint32_t entries[2] = {1, 2};
    struct wire_writer out = {.data = bytes, .cap = sizeof bytes};
    struct wire_capture c = {.steps = WIRE_CAPTURE_ALL,
                             .shadow = shadow ? 1 : 0,
                             .max_steps = 8,
                             .entries = {entries, 2}};
    wire_put_capture(&out, &c);
    w->req.capture = bytes;
    w->req.capture_bytes = (uint32_t)out.len;
    w->req.capture_shadow = shadow;
}

static void captured(struct world *w, uint64_t conn, struct wire_ticket t, uint32_t step)
{
    struct wire_msg m = {.type = WIRE_CAPTURED_MSG};
    m.captured.ticket = t;
    m.captured.step = step;
    m.captured.layer = 4;
    m.captured.row = (struct wire_bytes){"row", 3};
    message(w, conn, &m);
}

/* A captured request whose tokens have all come, and whose prefill has not had its last word. */
static struct wire_ticket stream_captured(struct world *w, struct rtr_job **job)
{
    struct rtr_refusal f;
    setup(w);
    join_prefill(w);
    join_decode(w, D1, "d1");
    ask_capture(w, false);
    assert_int_equal(submit(w, 1, 10, 6, job, &f), 0);
    const struct wire_reserve *r = &sent(w, WIRE_RESERVE_MSG)->msg.reserve;
    struct wire_ticket t = r->ticket;
    assert_int_equal(r->capture.len, w->req.capture_bytes);
    assert_memory_equal(r->capture.data, w->req.capture, r->capture.len);
    grant(w, D1, t);
    assert_int_equal(sent(w, WIRE_PREFILL_MSG)->msg.prefill.capture.len, w->req.capture_bytes);
    tokens(w, D1, t, 0, 6);
    return t;
}

static void ends_with_nothing_left(struct world *w)
{
    struct rtr_route_stats s;
    rtr_route_stats(w->route, &s);
    assert_int_equal(s.tickets, 0);
    assert_int_equal(s.finished, 1);
    assert_int_equal(s.failed + s.cancelled + s.retries, 0);
    assert_int_equal(s.streaming, 0);
    assert_int_equal(worker(w, "d1")->total_failures + worker(w, "p1")->total_failures, 0);
    assert_int_equal(worker(w, "d1")->tickets + worker(w, "p1")->tickets, 0);
    teardown(w);
}

static void test_route__captured_answer_waits_for_the_rows_of_prefill(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct wire_ticket t = stream_captured(&w, &job);
    captured(&w, D1, t, 1);
    assert_non_null(nth(&w, RTR_DO_CAPTURED, 0, 0, 0));
    finish(&w, D1, t, 6, true);
    assert_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
    captured(&w, P1, t, 0);
    struct rtr_action *c = nth(&w, RTR_DO_CAPTURED, 0, 0, 0);
    assert_true(c->job == job && c->cookie == &w);
    assert_int_equal(c->msg.captured.step, 0);
    done(&w, t);
    assert_int_equal(nth(&w, RTR_DO_FINISH, 0, 0, 0)->reason, RTR_FINISH_LENGTH);
    captured(&w, P1, t, 0); /* its last word was said */
    assert_int_equal(w.acts.n, 0);
    ends_with_nothing_left(&w);
}

/* Whatever ends the waiting, the answer is whole and comes out as it is. */
static void test_route__captured_answer_ends_without_rows_that_never_come(void **state)
{
    (void)state;
    enum { FAILED, CANCELLED, DENIED, LOST, LATE, WAYS };
    for (int way = 0; way < WAYS; way++) {
        struct world w;
        struct rtr_job *job;
        struct wire_ticket t = stream_captured(&w, &job);
        finish(&w, D1, t, 6, true);
        assert_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
        switch (way) {
        case FAILED: failed(&w, P1, t, TOW_EPEER); break;
        case CANCELLED: cancelled(&w, P1, t); break;
        case DENIED: deny(&w, P1, t, TOW_EINVAL); break;
        case LOST: event(&w, RTR_ON_CLOSED, P1); break;
        case LATE:
            for (int i = 0; i < 31 && !nth(&w, RTR_DO_FINISH, 0, 0, 0); i++) {
                w.now += 1000;
                beat(&w, P1);
                beat(&w, D1);
                event(&w, RTR_ON_TICK, 0);
            }
            break;
        }
        assert_non_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
        assert_null(nth(&w, RTR_DO_FAIL, 0, 0, 0));
        if (way == LATE) {
            assert_non_null(nth(&w, RTR_DO_SEND, WIRE_CANCEL_MSG, P1, 0));
            cancelled(&w, P1, t);
        }
        if (way == LOST) {
            struct rtr_route_stats s;
            rtr_route_stats(w.route, &s);
            assert_int_equal(s.tickets, 0);
            assert_int_equal(s.finished, 1);
            teardown(&w);
        } else {
            ends_with_nothing_left(&w);
        }
    }
}

static void test_route__stop_string_of_a_captured_answer_waits_too(void **state)
{
    (void)state;
    for (int finished = 0; finished < 2; finished++) {
        struct world w;
        struct rtr_job *job;
        struct wire_ticket t = stream_captured(&w, &job);
        rtr_actions_clear(&w.acts);
        assert_false(rtr_route_cancel_choice(w.route, job, 0, w.now, &w.acts));
        assert_non_null(nth(&w, RTR_DO_SEND, WIRE_CANCEL_MSG, D1, 0));
        assert_null(nth(&w, RTR_DO_SEND, WIRE_CANCEL_MSG, P1, 0));
        assert_false(rtr_job_deaf(job));
        if (finished)
            finish(&w, D1, t, 6, true); /* it was under way */
        else
            cancelled(&w, D1, t);
        assert_int_equal(w.acts.n, 0);
        captured(&w, P1, t, 0);
        assert_non_null(nth(&w, RTR_DO_CAPTURED, 0, 0, 0));
        done(&w, t);
        assert_non_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
        ends_with_nothing_left(&w);
    }
    /* Prefill has said its last word: nothing to wait for. */
    struct world w;
    struct rtr_job *job;
    struct wire_ticket t = stream_captured(&w, &job);
    done(&w, t);
    rtr_actions_clear(&w.acts);
    assert_true(rtr_route_cancel_choice(w.route, job, 0, w.now, &w.acts));
    assert_true(rtr_job_deaf(job));
    cancelled(&w, D1, t);
    ends_with_nothing_left(&w);
}

static void test_route__client_that_goes_while_rows_are_awaited_leaves_nothing(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_route_stats s;
    struct wire_ticket t = stream_captured(&w, &job);
    finish(&w, D1, t, 6, true);
    rtr_actions_clear(&w.acts);
    rtr_route_cancel(w.route, job, w.now, &w.acts);
    assert_non_null(nth(&w, RTR_DO_SEND, WIRE_CANCEL_MSG, P1, 0));
    cancelled(&w, P1, t);
    rtr_route_stats(w.route, &s);
    assert_int_equal(s.tickets, 0);
    assert_int_equal(s.cancelled, 1);
    assert_int_equal(s.finished, 0);
    teardown(&w);
}

/* The ask goes along when a stream goes on elsewhere; its entries are of the prompt, which
 * leads. */
static void test_route__capture_goes_along_to_another_worker(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    join_decode(&w, D2, "d2");
    ask_capture(&w, false);
    assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
    uint64_t first = sent(&w, WIRE_RESERVE_MSG)->conn, second = first == D1 ? D2 : D1;
    struct wire_ticket t = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
    grant(&w, first, t);
    tokens(&w, first, t, 0, 4);
    event(&w, RTR_ON_CLOSED, first);
    struct rtr_action *r = sent(&w, WIRE_RESERVE_MSG);
    assert_int_equal(r->msg.reserve.capture.len, w.req.capture_bytes);
    struct wire_ticket again = r->msg.reserve.ticket;
    grant(&w, second, again);
    assert_int_equal(sent(&w, WIRE_PREFILL_MSG)->msg.prefill.capture.len, w.req.capture_bytes);
    captured(&w, P1, t, 0); /* of the attempt given up; nobody computes it again */
    assert_int_equal(nth(&w, RTR_DO_CAPTURED, 0, 0, 0)->msg.captured.step, 0);
    captured(&w, second, t, 1); /* it has no part in that one */
    assert_null(nth(&w, RTR_DO_CAPTURED, 0, 0, 0));
    captured(&w, second, again, 5);
    assert_non_null(nth(&w, RTR_DO_CAPTURED, 0, 0, 0));
    captured(&w, second, again, 7); /* there is no such output */
    assert_null(nth(&w, RTR_DO_CAPTURED, 0, 0, 0));
    teardown(&w);
}

/* The row of the prompt may be under way when decode dies. */
static void test_route__answer_waits_for_rows_of_an_attempt_given_up(void **state)
{
    (void)state;
    enum { CANCELLED, LOST, LATE, WHOLE, WAYS };
    for (int way = 0; way < WAYS; way++) {
        struct world w;
        struct rtr_job *job;
        struct rtr_refusal f;
        struct rtr_route_stats s;
        setup(&w);
        join_prefill(&w);
        join_decode(&w, D1, "d1");
        join_decode(&w, D2, "d2");
        ask_capture(&w, false);
        assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
        uint64_t first = sent(&w, WIRE_RESERVE_MSG)->conn, second = first == D1 ? D2 : D1;
        struct wire_ticket t = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
        grant(&w, first, t);
        tokens(&w, first, t, 0, way == WHOLE ? 6 : 1);
        event(&w, RTR_ON_CLOSED, first);
        if (way != WHOLE) {
            struct wire_ticket again = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
            grant(&w, second, again);
            tokens(&w, second, again, 1, 5);
            done(&w, again);
            finish(&w, second, again, 6, true);
        } else {
            assert_null(sent(&w, WIRE_RESERVE_MSG));
        }
        assert_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
        if (way != LOST) {
            captured(&w, P1, t, 0);
            assert_int_equal(nth(&w, RTR_DO_CAPTURED, 0, 0, 0)->msg.captured.step, 0);
        }
        switch (way) {
        case LOST: event(&w, RTR_ON_CLOSED, P1); break;
        case LATE:
            for (int i = 0; i < 31 && !nth(&w, RTR_DO_FINISH, 0, 0, 0); i++) {
                w.now += 1000;
                beat(&w, P1);
                beat(&w, second);
                event(&w, RTR_ON_TICK, 0);
            }
            break;
        default: cancelled(&w, P1, t);
        }
        assert_int_equal(nth(&w, RTR_DO_FINISH, 0, 0, 0)->reason, RTR_FINISH_LENGTH);
        if (way == LATE) cancelled(&w, P1, t);
        rtr_route_stats(w.route, &s);
        assert_int_equal(s.tickets, 0);
        assert_int_equal(s.finished, 1);
        assert_int_equal(s.failed + s.cancelled + s.streaming, 0);
        teardown(&w);
    }
}

/* With no output of it taken, the next attempt captures the same row. */
static void test_route__rows_of_an_attempt_without_outputs_are_not_waited_for(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    join_decode(&w, D2, "d2");
    ask_capture(&w, false);
    assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
    uint64_t first = sent(&w, WIRE_RESERVE_MSG)->conn, second = first == D1 ? D2 : D1;
    struct wire_ticket t = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
    grant(&w, first, t);
    event(&w, RTR_ON_CLOSED, first);
    struct wire_ticket again = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
    captured(&w, P1, t, 0);
    assert_null(nth(&w, RTR_DO_CAPTURED, 0, 0, 0));
    grant(&w, second, again);
    captured(&w, P1, again, 0);
    assert_non_null(nth(&w, RTR_DO_CAPTURED, 0, 0, 0));
    done(&w, again);
    tokens(&w, second, again, 0, 6);
    finish(&w, second, again, 6, true);
    assert_non_null(nth(&w, RTR_DO_FINISH, 0, 0, 0));
    teardown(&w);
}

/* A request without a capture is told nothing, whatever a worker sends. */
static void test_route__rows_nobody_asked_for_are_dropped(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
    struct wire_ticket t = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
    assert_int_equal(sent(&w, WIRE_RESERVE_MSG)->msg.reserve.capture.len, 0);
    grant(&w, D1, t);
    tokens(&w, D1, t, 0, 6);
    captured(&w, D1, t, 1);
    assert_int_equal(w.acts.n, 0);
    finish(&w, D1, t, 6, true);
    assert_non_null(nth(&w, RTR_DO_FINISH, 0, 0, 0)); /* and it does not wait */
    teardown(&w);
}

/* Pages are 4 tokens and each worker has 100: a companion for each halves what fits. */
static void test_route__shadow_keys_take_twice_the_pages(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    uint32_t before = worker(&w, "d1")->held_pages;
    assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
    uint32_t plain = worker(&w, "d1")->held_pages - before;
    ask_capture(&w, true);
    assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
    assert_int_equal(worker(&w, "d1")->held_pages - before, 3 * plain);
    assert_int_equal(submit(&w, 1, 220, 6, &job, &f), TOW_EINVAL); /* 57 pages, twice */
    assert_non_null(strstr(f.err.msg, "index_capture.shadow"));
    assert_int_equal(rtr_route_context(w.route, false), 300); /* max_context */
    assert_int_equal(rtr_route_context(w.route, true), 200);  /* 50 pages and their companions */
    ask_capture(&w, false);
    assert_int_equal(submit(&w, 1, 220, 6, &job, &f), 0);
    teardown(&w);
}

/* RT-06, KV-04: tokens that do not follow on are not passed on. */
static void test_route__gap_in_the_tokens_goes_elsewhere(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    struct rtr_route_stats s;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    assert_int_equal(submit(&w, 1, 10, 6, &job, &f), 0);
    struct wire_ticket t = sent(&w, WIRE_RESERVE_MSG)->msg.reserve.ticket;
    grant(&w, D1, t);
    tokens(&w, D1, t, 1, 1);
    assert_null(nth(&w, RTR_DO_TOKENS, 0, 0, 0));
    assert_non_null(nth(&w, RTR_DO_SEND, WIRE_CANCEL_MSG, D1, 0));
    assert_non_null(nth(&w, RTR_DO_SEND, WIRE_CANCEL_MSG, P1, 0));
    rtr_route_stats(w.route, &s);
    assert_int_equal(s.distrusted, 1);
    tokens(&w, D1, t, 0, 1); /* of the old ticket: nobody's */
    assert_null(nth(&w, RTR_DO_TOKENS, 0, 0, 0));
    teardown(&w);
}

/* Silence: two heartbeats missed, no new work; five, dead.
 * Draining router: refuses, finishes, says so. */
static void test_route__silence_makes_suspect_then_dead_and_drain_ends(void **state)
{
    (void)state;
    struct world w;
    struct rtr_job *job;
    struct rtr_refusal f;
    const char *why;
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    assert_true(rtr_route_ready(w.route, w.now, &why));
    w.now += 2999; /* the second is not late by a whole period yet */
    beat(&w, P1);
    event(&w, RTR_ON_TICK, 0);
    assert_true(rtr_route_ready(w.route, w.now, &why));
    w.now += 1;
    beat(&w, P1);
    event(&w, RTR_ON_TICK, 0);
    assert_false(rtr_route_ready(w.route, w.now, &why));
    assert_int_equal(worker(&w, "d1")->state, RTR_SUSPECT);
    beat(&w, D1);
    assert_true(rtr_route_ready(w.route, w.now, &why));
    assert_int_equal(submit(&w, 1, 10, 2, &job, &f), 0);
    assert_non_null(sent(&w, WIRE_RESERVE_MSG));
    w.now += 5999;
    beat(&w, P1);
    event(&w, RTR_ON_TICK, 0);
    assert_int_equal(worker(&w, "d1")->state, RTR_SUSPECT);
    assert_string_equal(nth(&w, RTR_DO_FAIL, 0, 0, 0)->refusal.reason,
                        "no_capacity"); /* 5 s are over */
    w.now += 1;
    beat(&w, P1);
    event(&w, RTR_ON_TICK, 0);
    assert_int_equal(worker(&w, "d1")->state, RTR_GONE);
    assert_string_equal(nth(&w, RTR_DO_CLOSE, 0, D1, 0)->why, "5 heartbeats missed");
    assert_int_equal(submit(&w, 1, 10, 2, &job, &f), 0);
    event(&w, RTR_ON_DRAIN, 0);
    assert_null(nth(&w, RTR_DO_DRAINED, 0, 0, 0));
    struct rtr_job *late;
    assert_int_equal(submit(&w, 1, 10, 2, &late, &f), TOW_EDRAIN);
    assert_in_range(f.retry_after_s, 1, 600);
    rtr_route_cancel(w.route, job, w.now, &w.acts);
    event(&w, RTR_ON_TICK, 0);
    assert_false(nth(&w, RTR_DO_DRAINED, 0, 0, 0)->cut); /* its client went */
    teardown(&w);
}

/* A refuted proof because of silence, as the prefill worker on conn p tells it. */
static void unanswered(struct world *w, uint64_t p, const char *name, uint64_t incarnation)
{
    struct wire_msg m = {.type = WIRE_PAIRED_MSG};
    m.paired.name = wire_text(name);
    m.paired.incarnation = incarnation;
    message(w, p, &m);
    m = (struct wire_msg){.type = WIRE_UNANSWERED_MSG};
    m.unanswered.name = wire_text(name);
    m.unanswered.incarnation = incarnation;
    w->now += 1000;
    message(w, p, &m);
}

static uint64_t told_to_relink(struct world *w)
{
    struct rtr_action *a = sent(w, WIRE_RELINK_MSG);
    assert_true(!a || nth(w, RTR_DO_LOG, 0, 0, 0));
    assert_null(nth(w, RTR_DO_SEND, WIRE_RELINK_MSG, 0, 1));
    return a ? a->conn : 0;
}

static void test_route__worker_that_hears_no_greeting_has_to_relink(void **state)
{
    (void)state;
    struct world w;
    enum { P2 = 20, D1_NEW = 21 };
    setup(&w);
    join_prefill(&w);
    struct wire_msg m = hello("d1", false, D1, NULL);
    message(&w, D1, &m);
    unanswered(&w, P1, "d1", D1);
    assert_int_equal(told_to_relink(&w), 0);
    unanswered(&w, P1, "d1", 99); /* another process: nobody's */
    assert_int_equal(told_to_relink(&w), 0);
    unanswered(&w, P1, "d1", D1);
    assert_int_equal(told_to_relink(&w), D1);
    /* It comes anew and is as deaf: now it is the other one's turn, then nobody's for a while. */
    event(&w, RTR_ON_CLOSED, D1);
    m = hello("d1", false, D1_NEW, NULL);
    message(&w, D1_NEW, &m);
    assert_non_null(sent(&w, WIRE_PAIR_MSG));
    unanswered(&w, P1, "d1", D1_NEW);
    assert_int_equal(told_to_relink(&w), 0);
    unanswered(&w, P1, "d1", D1_NEW);
    assert_int_equal(told_to_relink(&w), P1);
    for (int i = 0; i < 4; i++) {
        unanswered(&w, P1, "d1", D1_NEW);
        assert_int_equal(told_to_relink(&w), 0);
    }
    w.now += RTR_RELINK_MS;
    unanswered(&w, P1, "d1", D1_NEW);
    assert_int_equal(told_to_relink(&w), D1_NEW);
    struct rtr_route_stats s;
    rtr_route_stats(w.route, &s);
    assert_int_equal(s.relinks, 3);
    teardown(&w);

    /* Who has a proved link hears; who works on something is given more time. */
    setup(&w);
    join_prefill(&w);
    join_decode(&w, D1, "d1");
    m = hello("d2", false, D2, NULL);
    message(&w, D2, &m);
    m = (struct wire_msg){.type = WIRE_HEARTBEAT_MSG};
    m.heartbeat.state = WIRE_SERVING;
    m.heartbeat.running = 1;
    message(&w, D2, &m);
    for (int i = 1; i < RTR_UNANSWERED_BUSY; i++) {
        unanswered(&w, P1, "d2", D2);
        assert_int_equal(told_to_relink(&w), 0);
    }
    unanswered(&w, P1, "d2", D2);
    assert_int_equal(told_to_relink(&w), D2);
    m = hello("p2", true, P2, NULL);
    message(&w, P2, &m);
    unanswered(&w, P2, "d1", D1);
    unanswered(&w, P2, "d1", D1);
    assert_int_equal(told_to_relink(&w), P2);
    w.now += RTR_RELINK_MS;
    paired(&w, "d2", D2);
    m = (struct wire_msg){.type = WIRE_PAIRED_MSG};
    m.paired.name = wire_text("d2");
    m.paired.incarnation = D2;
    m.paired.ok = 1;
    message(&w, P2, &m);
    for (int i = 0; i < 9; i++) { /* both hear others: the way between them is the fault */
        unanswered(&w, P2, "d1", D1);
        assert_int_equal(told_to_relink(&w), 0);
    }
    teardown(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_route__worker_of_another_model_than_the_routers_is_refused),
        cmocka_unit_test(test_route__refusal_because_of_another_worker_names_it_and_its_model),
        cmocka_unit_test(test_route__a_join_token_is_refused_where_there_is_none),
        cmocka_unit_test(test_route__refused_names_are_bounded),
        cmocka_unit_test(test_route__names_are_checked_when_a_worker_joins),
        cmocka_unit_test(test_route__first_request_waits_for_the_warm_up_and_is_served),
        cmocka_unit_test(test_route__join_that_does_not_fit_is_refused_with_both_values),
        cmocka_unit_test(test_route__queue_has_exact_limits),
        cmocka_unit_test(test_route__busy_worker_is_tried_again_and_never_left_out),
        cmocka_unit_test(test_route__begun_stream_outlasts_the_queue_time),
        cmocka_unit_test(test_route__failing_worker_is_left_out_probed_and_comes_back),
        cmocka_unit_test(test_route__short_prompts_never_wait_for_long_ones_and_starve_none),
        cmocka_unit_test(test_route__stream_goes_on_elsewhere_after_loss_of_decode),
        cmocka_unit_test(test_route__prefill_that_fails_behind_a_stream_does_not_disturb_it),
        cmocka_unit_test(test_route__captured_answer_waits_for_the_rows_of_prefill),
        cmocka_unit_test(test_route__captured_answer_ends_without_rows_that_never_come),
        cmocka_unit_test(test_route__stop_string_of_a_captured_answer_waits_too),
        cmocka_unit_test(test_route__client_that_goes_while_rows_are_awaited_leaves_nothing),
        cmocka_unit_test(test_route__capture_goes_along_to_another_worker),
        cmocka_unit_test(test_route__answer_waits_for_rows_of_an_attempt_given_up),
        cmocka_unit_test(test_route__rows_of_an_attempt_without_outputs_are_not_waited_for),
        cmocka_unit_test(test_route__rows_nobody_asked_for_are_dropped),
        cmocka_unit_test(test_route__shadow_keys_take_twice_the_pages),
        cmocka_unit_test(test_route__gap_in_the_tokens_goes_elsewhere),
        cmocka_unit_test(test_route__worker_that_hears_no_greeting_has_to_relink),
        cmocka_unit_test(test_route__silence_makes_suspect_then_dead_and_drain_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
