/* The whole cluster without a socket: the router's machine, several prefill and decode machines and
 * a model of the network between them, driven through random orders of messages, deaths, silences
 * and cancels.
 *
 * Every control message goes through wire_pack and wire_unpack. Page memory is real (16 bytes a
 * page): the prefill engine writes into it, the mover copies it, the decode engine reads it, and
 * each checks that what it finds belongs to its own prompt.
 * So a page that is reused too early is seen as a wrong token. Every second request of one choice
 * has a capture, half of them with shadow keys: their pages have companions, with bytes of their
 * own, and what the engines find must reach the client before the end.
 *
 * TOW_MODEL_SEED=n replays one seed, TOW_MODEL_SEEDS=n runs n of them. */
#include "tests/support/check.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/kv/pool.h"
#include "decode/sched.h"
#include "prefill/sched.h"
#include "router/route.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE_TOKENS  4u
#define PAGE_BYTES   64u
#define MAX_NODES    6
#define MAX_CONNS    512
#define MAX_REQS     160
#define MAX_MOVES    8192
#define EOS          1u
#define HEARTBEAT_MS 1000u
#define LEASE_MS     6000u
#define QUEUE_MS     20000u
#define STALL_MS     15000u

/* --- random numbers, time, events ------------------------------------------------------------- */

static uint64_t g_seed, g_rng, g_now, g_order;

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
static uint64_t rnd(void)
{
    return mix(g_rng += 0x9e3779b97f4a7c15u);
}
static uint32_t below(uint32_t n)
{
    return (uint32_t)(rnd() % n);
}
static uint32_t between(uint32_t lo, uint32_t hi)
{
    return lo + below(hi - lo + 1);
}
static bool percent(uint32_t p)
{
    return below(100) < p;
}
static uint64_t random_id(void *arg)
{
    (void)arg;
    return rnd() | 1;
}

#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            printf("seed %llu at %llu ms: ", (unsigned long long)g_seed,                           \
                   (unsigned long long)g_now);                                                     \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
            fail_msg("broken: %s", #cond);                                                         \
        }                                                                                          \
    } while (0)

enum what {
    E_ROUTER_TICK,
    E_NODE_TICK,
    E_DELIVER,
    E_CLOSED,
    E_ENGINE,
    E_READ,
    E_ACK,
    E_END_P,
    E_END_D,
    E_ARRIVE,
    E_CANCEL,
    E_FAULT,
    E_START
};

struct event {
    uint64_t t, order;
    enum what what;
    uint32_t node; /* whom it concerns; MAX_NODES: the router or the clients */
    uint64_t life; /* of that node; another life ignores it */
    uint32_t a, b;
    int code;
};

static struct event *g_heap;
static uint32_t g_n_heap, g_cap_heap;

static bool earlier(const struct event *x, const struct event *y)
{
    return x->t != y->t ? x->t < y->t : x->order < y->order;
}

static void push(struct event e)
{
    if (g_n_heap == g_cap_heap) {
        g_cap_heap = g_cap_heap ? 2 * g_cap_heap : 1024;
        g_heap = realloc(g_heap, g_cap_heap * sizeof *g_heap);
        assert_non_null(g_heap);
    }
    e.order = ++g_order;
    uint32_t i = g_n_heap++;
    for (; i && earlier(&e, &g_heap[(i - 1) / 2]); i = (i - 1) / 2) g_heap[i] = g_heap[(i - 1) / 2];
    g_heap[i] = e;
}

static struct event pop(void)
{
    struct event top = g_heap[0], last = g_heap[--g_n_heap];
    uint32_t i = 0, k;
    while ((k = 2 * i + 1) < g_n_heap) {
        if (k + 1 < g_n_heap && earlier(&g_heap[k + 1], &g_heap[k])) k++;
        if (!earlier(&g_heap[k], &last)) break;
        g_heap[i] = g_heap[k];
        i = k;
    }
    g_heap[i] = last;
    return top;
}

/* --- what the cluster consists of ------------------------------------------------------------- */

struct page { /* what a page's bytes say in this model */
    uint64_t prompt, index;
};

struct node {
    bool prefill, alive, draining, leaving;
    char name[16];
    uint64_t life, stopped_until;
    uint32_t conn; /* to the router; 0: none */
    uint32_t pages, max_batch, reserve, chunk, max_pending;
    void *memory, *tails;
    struct kv_pool *pool;
    struct pre_sched *pre;
    struct dec_sched *dec;
    uint64_t beat_ms;
    struct pre_job *chunk_job; /* engine busy with it */
    uint32_t chunk_from, chunk_n;
    bool chunk_last, stepping;
    struct dec_seq *const *batch;
    uint32_t n_batch;
};

struct frame {
    struct frame *next;
    size_t bytes;
    uint8_t data[];
};

/* dir 0: to the router, 1: to the worker */
struct conn {
    uint32_t node;
    uint64_t life;
    bool closing, closed[2];
    struct frame *head[2], **tail[2];
    uint64_t last_t[2];
};

/* One ticket's way through the movers of both sides. */
struct move {
    struct wire_ticket ticket;
    uint32_t d, p;
    uint64_t d_life, p_life;
    bool d_live, p_live;       /* that side has not had its ENDED yet */
    bool d_closing, p_closing; /* that ENDED is on its way */
    bool p_known;
    int d_code;
    uint32_t n_pages, n_read, reads_in_flight;
    bool tail_offered;
    kv_page_id *to, *from;
    uint64_t prompt; /* the sender's, as of its first offer */
    uint32_t first, position;
    uint64_t d_progress, p_progress;
    uint32_t lost_cancels;
};

struct client {
    struct rtr_request req;
    struct rtr_choice choices[4];
    uint32_t prompt[80];
    uint64_t prompt_hash;
    struct rtr_job *job;
    uint32_t n_out[4];
    uint64_t rows[2]; /* captured: bit per step, for each of the two layers */
    bool done[4], ended, cancelled, stopped;
    uint64_t started_ms, heard_ms;
};

static struct rtr_route *g_router;
static struct node g_nodes[MAX_NODES];
static uint32_t g_n_nodes;
static struct conn g_conns[MAX_CONNS];
static uint32_t g_n_conns;
static struct move g_moves[MAX_MOVES];
static uint32_t g_n_moves;
static struct client g_clients[MAX_REQS];
static uint32_t g_n_clients, g_to_come;
static uint64_t g_lives, g_end_faults_ms;
static uint64_t g_finished, g_failed, g_cancelled, g_refused, g_held, g_rows,
    g_complete;              /* over all seeds */
static uint64_t g_codes[32]; /* failures by code */
static bool g_calm;          /* no faults in this seed */
static struct rtr_route_config g_cfg;

static void do_router(struct rtr_actions *acts);
static void do_prefill(uint32_t i, struct pre_actions *acts);
static void do_decode(uint32_t i, struct dec_actions *acts);

/* --- the law: which token comes when ---------------------------------------------------------- */

static uint64_t hash_prompt(const uint32_t *ids, uint32_t n)
{
    uint64_t h = 7;
    for (uint32_t i = 0; i < n; i++) h = mix(h * 31 + ids[i] + 1);
    return h;
}

static uint32_t token_at(uint64_t prompt, uint64_t seed, uint32_t k)
{
    uint64_t h = mix(prompt ^ mix(seed + 77) ^ mix(k + 1));
    return h % 29 == 0 ? EOS : 2 + (uint32_t)(h >> 32) % 50000;
}

/* --- captures: the law of rows, and what the engines find ------------------------------------- */

static const int32_t layers[2] = {2, 4};
static const uint32_t asked[2] = {0, 1};
enum { CAPTURE_STEPS = 40 };

static float score_of(uint64_t prompt, uint32_t step, uint32_t layer)
{
    return (float)(mix(prompt ^ mix(step + 1) ^ layer) % 100000);
}

/* What the pass calls for each layer of a captured row. */
static void find_rows(struct work_capture *c, uint64_t prompt, uint32_t step)
{
    const struct model_capture *m = work_capture_begin(c, step);
    for (int i = 0; m && i < 2; i++) {
        const float x = score_of(prompt, step, (uint32_t)layers[i]);
        const struct kern_rank ranks[2] = {{1, 0, x}, {2, 0, x - 1}};
        struct model_capture_row row = {.layer = layers[i],
                                        .topk = 1,
                                        .n_entries = 2,
                                        .n_visible = 2,
                                        .entries = m->entries,
                                        .own = {ranks, x, x - 1},
                                        .shadow = m->shadow};
        for (int s = 0; s < KERN_SHADOWS; s++) row.shadows[s] = row.own;
        m->on_row(m->ctx, &row);
    }
}

static uint32_t per_slot(const struct work_capture *c)
{
    return work_capture_shadowed(c) ? 2 : 1;
}

/* --- network ---------------------------------------------------------------------------------- */

static void post(uint32_t c, int dir, const struct wire_msg *m)
{
    struct conn *k = &g_conns[c];
    if (k->closing || k->closed[!dir]) return;
    int64_t n = wire_frame_bytes(m);
    CHECK(n > 0, "%s cannot be packed", wire_type_name(m->type));
    struct frame *f = malloc(sizeof *f + (size_t)n);
    assert_non_null(f);
    f->next = NULL;
    f->bytes = (size_t)n;
    assert_int_equal(wire_pack(m, f->data, f->bytes), n);
    *k->tail[dir] = f;
    k->tail[dir] = &f->next;
    uint64_t t = g_now + (percent(90) ? below(5) : below(200));
    if (t < k->last_t[dir]) t = k->last_t[dir];
    k->last_t[dir] = t;
    push((struct event){.t = t,
                        .what = E_DELIVER,
                        .node = dir ? k->node : MAX_NODES,
                        .life = dir ? k->life : 0,
                        .a = c,
                        .b = (uint32_t)dir});
}

static void close_connection(uint32_t c)
{
    struct conn *k = &g_conns[c];
    if (c == 0 || k->closing) return;
    k->closing = true;
    for (int dir = 0; dir < 2; dir++)
        push((struct event){.t = g_now + below(100),
                            .what = E_CLOSED,
                            .node = dir ? k->node : MAX_NODES,
                            .life = dir ? k->life : 0,
                            .a = c,
                            .b = (uint32_t)dir});
}

static void route(const struct rtr_event *ev)
{
    struct rtr_actions acts;
    rtr_actions_init(&acts);
    rtr_route_step(g_router, ev, &acts);
    do_router(&acts);
    rtr_actions_fini(&acts);
    struct rtr_route_stats s;
    rtr_route_stats(g_router, &s);
    CHECK(s.waiting <= g_cfg.max_queued, "%u wait", s.waiting);
    CHECK(s.waiting_tokens <= g_cfg.max_queued_tokens, "%llu tokens wait",
          (unsigned long long)s.waiting_tokens);
    CHECK(s.started == s.finished + s.failed + s.cancelled + s.queued + s.reserving + s.prefilling +
                           s.streaming,
          "runs do not add up");
}

static void prefill(uint32_t i, const struct pre_event *ev)
{
    struct pre_actions acts;
    pre_actions_init(&acts);
    pre_sched_step(g_nodes[i].pre, ev, &acts);
    do_prefill(i, &acts);
    pre_actions_fini(&acts);
    struct pre_stats s;
    pre_sched_stats(g_nodes[i].pre, &s);
    CHECK(s.queued_tokens <= g_nodes[i].max_pending, "%s has %u tokens pending", g_nodes[i].name,
          s.queued_tokens);
    CHECK(s.accepted ==
              s.finished + s.failed + s.cancelled + s.queued + s.active + s.shipping + s.closing,
          "jobs of %s do not add up", g_nodes[i].name);
}

static void decode(uint32_t i, const struct dec_event *ev)
{
    struct dec_actions acts;
    dec_actions_init(&acts);
    dec_sched_step(g_nodes[i].dec, ev, &acts);
    do_decode(i, &acts);
    dec_actions_fini(&acts);
    struct dec_stats s;
    dec_sched_stats(g_nodes[i].dec, &s);
    CHECK(s.granted == s.finished + s.failed + s.cancelled + s.reserved + s.loading + s.ready +
                           s.running + s.closing,
          "sequences of %s do not add up", g_nodes[i].name);
}

static void deliver(const struct event *e)
{
    struct conn *k = &g_conns[e->a];
    int dir = (int)e->b;
    struct frame *f = k->head[dir];
    if (!f) return;
    k->head[dir] = f->next;
    if (!k->head[dir]) k->tail[dir] = &k->head[dir];
    struct wire_msg m;
    struct tow_err err;
    if (!k->closed[dir]) {
        CHECK(wire_unpack_frame(&m, f->data, f->bytes, &err) == 0, "%s", err.msg);
        struct node *n = &g_nodes[k->node];
        if (dir == 0)
            route(&(struct rtr_event){
                .kind = RTR_ON_MESSAGE, .now_ms = g_now, .conn = e->a, .msg = &m});
        else if (m.type == WIRE_PAIR_MSG) {
            struct wire_msg re = {.type = WIRE_PAIRED_MSG};
            re.paired.name = m.pair.name;
            re.paired.incarnation = m.pair.incarnation;
            re.paired.ok = percent(95);
            post(e->a, 0, &re);
        } else if (n->prefill) {
            prefill(k->node,
                    &(struct pre_event){
                        .kind = PRE_ON_MESSAGE, .now_ms = g_now, .owner = e->a, .msg = &m});
        } else {
            decode(k->node, &(struct dec_event){
                                .kind = DEC_ON_MESSAGE, .now_ms = g_now, .owner = e->a, .msg = &m});
        }
    }
    free(f);
}

static void start_node(uint32_t i);
static void hello(uint32_t i);

static void saw_close(const struct event *e)
{
    struct conn *k = &g_conns[e->a];
    k->closed[e->b] = true;
    if (e->b == 0) {
        route(&(struct rtr_event){.kind = RTR_ON_CLOSED, .now_ms = g_now, .conn = e->a});
        return;
    }
    struct node *n = &g_nodes[k->node];
    n->conn = 0;
    if (n->prefill)
        prefill(k->node,
                &(struct pre_event){.kind = PRE_ON_ROUTER_LOST, .now_ms = g_now, .owner = e->a});
    else
        decode(k->node,
               &(struct dec_event){.kind = DEC_ON_ROUTER_LOST, .now_ms = g_now, .owner = e->a});
}

/* --- movers ----------------------------------------------------------------------------------- */

static struct move *find_move(struct wire_ticket t)
{
    for (uint32_t i = g_n_moves; i-- > 0;)
        if (wire_ticket_same(g_moves[i].ticket, t)) return &g_moves[i];
    return NULL;
}

/* No memory, a full queue: now and then, but not for ever. */
static bool loses_cancel(struct move *m)
{
    return below(4) == 0 && m->lost_cancels++ < 5;
}

static uint32_t move_id(const struct move *m)
{
    return (uint32_t)(m - g_moves);
}

static void end_d(struct move *m, int code, uint32_t delay)
{
    if (!m->d_live || m->d_closing) return;
    m->d_closing = true;
    m->d_code = code;
    if (m->reads_in_flight == 0)
        push((struct event){
            .t = g_now + delay, .what = E_END_D, .node = m->d, .life = m->d_life, .a = move_id(m)});
}

static void end_p(struct move *m, int code, uint32_t delay)
{
    if (!m->p_live || m->p_closing) return;
    m->p_closing = true;
    push((struct event){.t = g_now + delay,
                        .what = E_END_P,
                        .node = m->p,
                        .life = m->p_life,
                        .a = move_id(m),
                        .code = code});
}

static void start_read(struct move *m, uint32_t index)
{
    m->reads_in_flight++;
    push((struct event){.t = g_now + (percent(90) ? below(20) : below(2000)),
                        .what = E_READ,
                        .node = m->d,
                        .life = m->d_life,
                        .a = move_id(m),
                        .b = index});
}

static struct page *page_of(struct node *n, kv_page_id id)
{
    return (void *)kv_pool_page(n->pool, id);
}

/* A read landed: its bytes are written whatever has been decided meanwhile. */
static void read_landed(const struct event *e)
{
    struct move *m = &g_moves[e->a];
    struct node *d = &g_nodes[m->d], *p = &g_nodes[m->p];
    bool from_lives = p->alive && p->life == m->p_life && m->p_live;
    m->reads_in_flight--;
    if (e->b < m->n_pages) {
        struct page *to = page_of(d, m->to[e->b]);
        if (from_lives)
            *to = *page_of(p, m->from[e->b]);
        else
            *to = (struct page){0xdead, 0xdead};
        if (from_lives && !m->p_closing && !m->d_closing)
            CHECK(to->prompt == m->prompt && to->index == e->b,
                  "%s: a page changed while it travelled", p->name);
    }
    if (m->d_closing) {
        if (m->reads_in_flight == 0)
            push((struct event){.t = g_now + below(5),
                                .what = E_END_D,
                                .node = m->d,
                                .life = m->d_life,
                                .a = e->a});
        return;
    }
    if (!from_lives) {
        end_d(m, percent(50) ? TOW_EPEER : TOW_EDIGEST, below(5));
        return;
    }
    m->d_progress = g_now;
    push((struct event){.t = g_now + below(20),
                        .what = E_ACK,
                        .node = m->p,
                        .life = m->p_life,
                        .a = e->a,
                        .b = e->b});
    if (e->b == m->n_pages) {
        end_d(m, 0, below(5));
        return;
    }
    m->n_read++;
    decode(m->d, &(struct dec_event){.kind = DEC_ON_PART, .now_ms = g_now, .ticket = m->ticket});
    if (m->n_read == m->n_pages && m->tail_offered) start_read(m, m->n_pages);
}

static void acked(const struct event *e)
{
    struct move *m = &g_moves[e->a];
    if (!m->p_live || m->p_closing) return;
    m->p_progress = g_now;
    if (e->b == m->n_pages)
        end_p(m, 0, 0);
    else
        prefill(m->p,
                &(struct pre_event){
                    .kind = PRE_ON_PART, .now_ms = g_now, .ticket = m->ticket, .index = e->b});
}

static void ended_d(const struct event *e)
{
    struct move *m = &g_moves[e->a];
    m->d_live = false;
    if (m->d_code) end_p(m, m->d_code, below(50));
    decode(m->d, &(struct dec_event){.kind = DEC_ON_LOADED,
                                     .now_ms = g_now,
                                     .ticket = m->ticket,
                                     .code = m->d_code,
                                     .first = {.id = m->first},
                                     .position = m->position});
}

static void ended_p(const struct event *e)
{
    struct move *m = &g_moves[e->a];
    m->p_live = false;
    if (e->code) end_d(m, e->code, below(50));
    prefill(m->p, &(struct pre_event){
                      .kind = PRE_ON_ENDED, .now_ms = g_now, .ticket = m->ticket, .code = e->code});
}

/* Leases and dead or silent peers, as each side's mover sees them. */
static bool unheard(const struct node *n, uint64_t life)
{
    return !n->alive || n->life != life || n->stopped_until > g_now + 5000;
}

static void check_moves(uint32_t i)
{
    for (uint32_t k = 0; k < g_n_moves; k++) {
        struct move *m = &g_moves[k];
        if (m->d_live && m->d == i && m->d_life == g_nodes[i].life) {
            if (m->p_known && unheard(&g_nodes[m->p], m->p_life)) end_d(m, TOW_EPEER, below(10));
            if (g_now > m->d_progress + LEASE_MS) end_d(m, TOW_ETIME, below(10));
        }
        if (m->p_live && m->p == i && m->p_life == g_nodes[i].life) {
            if (unheard(&g_nodes[m->d], m->d_life)) end_p(m, TOW_EPEER, below(10));
            if (g_now > m->p_progress + LEASE_MS) end_p(m, TOW_ETIME, below(10));
        }
    }
}

/* --- prefill nodes ---------------------------------------------------------------------------- */

static void offer(uint32_t i, const struct pre_action *a)
{
    struct move *m = find_move(a->job->ticket);
    if (!m || !m->p_live || m->p_closing) return;
    m->prompt = hash_prompt(a->job->tokens, a->job->n_prompt);
    m->p_progress = m->d_progress = g_now;
    for (uint32_t k = a->from; k < a->from + a->n; k++) {
        CHECK(a->job->table.ids[k] != KV_PAGE_GONE, "page %u offered twice", k);
        m->from[k] = a->job->table.ids[k];
        struct page *pg = page_of(&g_nodes[i], m->from[k]);
        CHECK(pg->prompt == m->prompt && pg->index == k, "offered before it was computed");
        if (m->d_live && !m->d_closing) start_read(m, k);
    }
    if (!a->tail) return;
    m->tail_offered = true;
    m->first = a->job->first;
    m->position = a->job->n_tokens;
    if (m->n_read == m->n_pages && m->d_live && !m->d_closing) start_read(m, m->n_pages);
}

static void do_prefill(uint32_t i, struct pre_actions *acts)
{
    struct node *n = &g_nodes[i];
    for (uint32_t k = 0; k < acts->n; k++) {
        struct pre_action *a = &acts->items[k];
        struct move *m;
        switch (a->kind) {
        case PRE_DO_SEND: post((uint32_t)a->owner, 0, &a->msg); break;
        case PRE_DO_OPEN_MOVE:
            m = find_move(a->job->ticket);
            CHECK(m, "a prefill before its grant");
            CHECK(m->n_pages == a->n, "sides disagree about the pages");
            m->p = i;
            m->p_life = n->life;
            m->p_live = m->p_known = true;
            m->p_progress = g_now;
            if (!m->d_live || m->d_closing) end_p(m, TOW_EPEER, below(50));
            break;
        case PRE_DO_CANCEL_MOVE:
            m = find_move(a->ticket);
            if (loses_cancel(m)) break;
            end_p(m, a->code, below(50));
            break;
        case PRE_DO_TOUCH:
            m = find_move(a->ticket);
            m->d_progress = m->p_progress = g_now;
            break;
        case PRE_DO_CHUNK:
            CHECK(!n->chunk_job, "two chunks at once");
            n->chunk_job = a->job;
            n->chunk_from = a->from;
            n->chunk_n = a->n;
            n->chunk_last = a->last;
            push((struct event){
                .t = g_now + between(5, 40), .what = E_ENGINE, .node = i, .life = n->life});
            break;
        case PRE_DO_OFFER: offer(i, a); break;
        case PRE_DO_DRAINED: n->leaving = true; break;
        case PRE_DO_OPEN:
        case PRE_DO_CLOSE: break;
        }
    }
}

static void chunk_done(uint32_t i)
{
    struct node *n = &g_nodes[i];
    struct pre_job *j = n->chunk_job;
    struct pre_event ev = {.kind = PRE_ON_CHUNK, .now_ms = g_now};
    uint64_t h = hash_prompt(j->tokens, j->n_prompt);
    n->chunk_job = NULL;
    for (uint32_t t = n->chunk_from; t < n->chunk_from + n->chunk_n; t++) {
        const uint32_t per = per_slot(j->capture);
        for (uint32_t k = t / PAGE_TOKENS * per; k < (t / PAGE_TOKENS + 1) * per; k++) {
            CHECK(j->table.ids[k] != KV_PAGE_GONE, "computing on a page given back");
            *page_of(n, j->table.ids[k]) = (struct page){h, k};
        }
    }
    if (n->chunk_last) {
        for (uint32_t k = 0; k + 1 < j->table.n_pages; k++) {
            struct page *pg = page_of(n, j->table.ids[k]);
            CHECK(pg->prompt == h && pg->index == k,
                  "an earlier page is gone before the last chunk");
        }
        for (uint32_t k = j->n_prompt; k < j->n_tokens; k++)
            CHECK(j->tokens[k] == token_at(h, j->sampling.seed, k - j->n_prompt),
                  "wrong resumed token");
        ev.first = token_at(h, j->sampling.seed, j->n_tokens - j->n_prompt);
        find_rows(j->capture, h, j->n_tokens - j->n_prompt);
    }
    if (!g_calm && g_now < g_end_faults_ms && below(200) == 0) ev.code = TOW_EDEVICE;
    prefill(i, &ev);
}

/* --- decode nodes ----------------------------------------------------------------------------- */

static void do_decode(uint32_t i, struct dec_actions *acts)
{
    struct node *n = &g_nodes[i];
    for (uint32_t k = 0; k < acts->n; k++) {
        struct dec_action *a = &acts->items[k];
        struct move *m;
        switch (a->kind) {
        case DEC_DO_SEND: post((uint32_t)a->owner, 0, &a->msg); break;
        case DEC_DO_EXPECT:
            CHECK(g_n_moves < MAX_MOVES, "model too small");
            m = &g_moves[g_n_moves++];
            memset(m, 0, sizeof *m);
            m->ticket = a->seq->ticket;
            m->d = i;
            m->d_life = n->life;
            m->d_live = true;
            m->d_progress = g_now;
            m->n_pages = a->n;
            m->to = calloc(a->n, sizeof *m->to);
            m->from = calloc(a->n, sizeof *m->from);
            memcpy(m->to, a->seq->table.ids, a->n * sizeof *m->to);
            break;
        case DEC_DO_CANCEL_MOVE:
            m = find_move(a->ticket);
            if (!loses_cancel(m)) end_d(m, a->code, below(50));
            break;
        case DEC_DO_STEP:
            CHECK(!n->stepping, "two steps at once");
            CHECK(a->n <= n->max_batch, "batch of %u", a->n);
            n->stepping = true;
            n->batch = a->batch;
            n->n_batch = a->n;
            push((struct event){
                .t = g_now + between(2, 10), .what = E_ENGINE, .node = i, .life = n->life});
            break;
        case DEC_DO_DRAINED: n->leaving = true; break;
        case DEC_DO_OPEN:
        case DEC_DO_CLOSE: break;
        }
    }
}

static void step_done(uint32_t i)
{
    struct node *n = &g_nodes[i];
    struct dec_token out[64];
    memset(out, 0, sizeof out);
    n->stepping = false;
    for (uint32_t k = 0; k < n->n_batch; k++) {
        struct dec_seq *s = n->batch[k];
        uint64_t h = page_of(n, s->table.ids[0])->prompt;
        const uint32_t per = per_slot(s->capture), next = s->n_cached / PAGE_TOKENS * per;
        for (uint32_t p = 0; p < ((s->n_cached - 1) / PAGE_TOKENS + 1) * per; p++) {
            struct page *pg = page_of(n, s->table.ids[p]);
            CHECK(pg->prompt == h && pg->index == p, "%s: page %u holds another's bytes", n->name,
                  p);
        }
        CHECK(next + per <= s->table.n_pages, "no page for the next row");
        for (uint32_t p = next; p < next + per; p++)
            *page_of(n, s->table.ids[p]) = (struct page){h, p};
        find_rows(s->capture, h, s->n_output);
        CHECK(s->token == token_at(h, s->sampling.seed, s->n_output - 1), "wrong input token");
        out[k].id = token_at(h, s->sampling.seed, s->n_output);
    }
    int code = !g_calm && g_now < g_end_faults_ms && below(1000) == 0 ? TOW_EDEVICE : 0;
    decode(i, &(struct dec_event){
                  .kind = DEC_ON_STEPPED, .now_ms = g_now, .tokens = out, .code = code});
}

/* --- life of a node --------------------------------------------------------------------------- */

static void hello(uint32_t i)
{
    struct node *n = &g_nodes[i];
    CHECK(g_n_conns + 1 < MAX_CONNS, "model too small");
    uint32_t c = ++g_n_conns;
    struct conn *k = &g_conns[c];
    memset(k, 0, sizeof *k);
    k->node = i;
    k->life = n->life;
    k->tail[0] = &k->head[0];
    k->tail[1] = &k->head[1];
    n->conn = c;
    uint8_t facts[200];
    struct wire_writer w = {.data = facts, .cap = sizeof facts};
    wire_put_fact(&w, &(struct wire_fact){WIRE_FACT_LAYOUT, wire_text("layout"), wire_text("v1")});
    wire_put_fact(&w, &(struct wire_fact){WIRE_FACT_FREE, wire_text("build"), wire_text(n->name)});
    struct wire_msg m = {.type = WIRE_HELLO_MSG};
    m.hello.version_min = m.hello.version_max = 1;
    m.hello.role = n->prefill ? WIRE_PREFILL_ROLE : WIRE_DECODE_ROLE;
    m.hello.name = wire_text(n->name);
    m.hello.incarnation = n->life;
    m.hello.pages = n->pages;
    m.hello.page_tokens = PAGE_TOKENS;
    m.hello.max_context = 200;
    m.hello.max_batch = n->max_batch;
    m.hello.chunk_tokens = n->prefill ? n->chunk : 0;
    m.hello.max_pending_tokens = n->prefill ? n->max_pending : 0;
    m.hello.max_tickets = n->prefill ? 16 : 2 * n->max_batch;
    m.hello.reserve_tokens = n->reserve;
    m.hello.facts = (struct wire_bytes){facts, (uint32_t)w.len};
    post(c, 0, &m);
}

static void start_node(uint32_t i)
{
    struct node *n = &g_nodes[i];
    struct tow_err err;
    uint32_t tails = n->prefill ? 16 : 2 * n->max_batch;
    n->alive = true;
    n->draining = n->leaving = false;
    n->stopped_until = 0;
    n->life = ++g_lives;
    n->chunk_job = NULL;
    n->stepping = false;
    n->memory = aligned_alloc(64, n->pages * PAGE_BYTES);
    n->tails = aligned_alloc(64, tails * 64);
    assert_non_null(n->memory);
    memset(n->memory, 0xee, n->pages * PAGE_BYTES);
    CHECK(kv_pool_new(&n->pool, n->memory, n->pages, PAGE_BYTES, n->tails, tails, 64, &err) == 0,
          "%s", err.msg);
    kv_pool_shuffle(n->pool, rnd());
    if (n->prefill) {
        struct pre_sched_config cfg = {.page_tokens = PAGE_TOKENS,
                                       .max_context = 200,
                                       .chunk_tokens = n->chunk,
                                       .max_pending_tokens = n->max_pending,
                                       .max_jobs = 16,
                                       .max_passes = 8,
                                       .shadows = true};
        CHECK(pre_sched_new(&n->pre, &cfg, n->pool, &err) == 0, "%s", err.msg);
    } else {
        struct dec_sched_config cfg = {.page_tokens = PAGE_TOKENS,
                                       .max_context = 200,
                                       .max_batch = n->max_batch,
                                       .max_tickets = 2 * n->max_batch,
                                       .reserve_tokens = n->reserve,
                                       .shadows = true};
        CHECK(dec_sched_new(&n->dec, &cfg, n->pool, &err) == 0, "%s", err.msg);
    }
    push((struct event){.t = g_now + below(50), .what = E_NODE_TICK, .node = i, .life = n->life});
    hello(i);
}

static void kill_node(uint32_t i)
{
    struct node *n = &g_nodes[i];
    if (!n->alive) return;
    n->alive = false;
    n->life = 0;
    close_connection(n->conn);
    n->conn = 0;
    pre_sched_free(n->pre);
    dec_sched_free(n->dec);
    n->pre = NULL;
    n->dec = NULL;
    kv_pool_free(n->pool);
    n->pool = NULL;
    free(n->memory);
    free(n->tails);
    push((struct event){.t = g_now + between(1, 8000), .what = E_START, .node = i});
}

static void beat(uint32_t i)
{
    struct node *n = &g_nodes[i];
    struct wire_msg m = {.type = WIRE_HEARTBEAT_MSG};
    struct wire_heartbeat *h = &m.heartbeat;
    n->beat_ms = g_now;
    if (n->prefill) {
        struct pre_stats s;
        pre_sched_stats(n->pre, &s);
        *h = (struct wire_heartbeat){s.draining ? WIRE_DRAINING : WIRE_SERVING,
                                     s.queued,
                                     s.queued_tokens,
                                     s.active,
                                     s.queued + s.active + s.shipping + s.closing,
                                     s.pages_free,
                                     1000,
                                     s.progress};
    } else {
        struct dec_stats s;
        dec_sched_stats(n->dec, &s);
        *h = (struct wire_heartbeat){s.draining ? WIRE_DRAINING : WIRE_SERVING,
                                     s.reserved + s.loading,
                                     0,
                                     s.ready + s.running,
                                     s.reserved + s.loading + s.ready + s.running + s.closing,
                                     s.pages_free,
                                     100,
                                     s.progress};
    }
    post(n->conn, 0, &m);
}

static void node_tick(uint32_t i)
{
    struct node *n = &g_nodes[i];
    push((struct event){.t = g_now + 250, .what = E_NODE_TICK, .node = i, .life = n->life});
    if (n->leaving) {
        kill_node(i);
        return;
    }
    check_moves(i);
    if (n->prefill)
        prefill(i, &(struct pre_event){.kind = PRE_ON_TICK, .now_ms = g_now});
    else
        decode(i, &(struct dec_event){.kind = DEC_ON_TICK, .now_ms = g_now});
    if (n->conn && g_now >= n->beat_ms + HEARTBEAT_MS) beat(i);
    if (!n->conn) hello(i);
}

static void fault(void)
{
    uint32_t i = below(g_n_nodes);
    struct node *n = &g_nodes[i];
    if (g_now >= g_end_faults_ms) return;
    push((struct event){.t = g_now + between(100, 6000), .what = E_FAULT, .node = MAX_NODES});
    if (!n->alive) return;
    switch (below(8)) {
    case 0:
    case 1: kill_node(i); break;
    case 2: /* one that stands already is not woken early: what waits has its time already */
        if (n->stopped_until <= g_now) n->stopped_until = g_now + between(100, 15000);
        break;
    case 3: close_connection(n->conn); break;
    case 4:
        if (n->prefill)
            prefill(i, &(struct pre_event){
                           .kind = PRE_ON_DRAIN, .now_ms = g_now, .limit_ms = between(1, 5000)});
        else
            decode(i, &(struct dec_event){
                          .kind = DEC_ON_DRAIN, .now_ms = g_now, .limit_ms = between(1, 5000)});
        break;
    default: break;
    }
}

/* --- clients ---------------------------------------------------------------------------------- */

static bool expects_end(const struct client *c, uint32_t k)
{
    return c->n_out[k] == c->req.max_tokens ||
           (!c->req.sampling.ignore_eos &&
            token_at(c->prompt_hash, c->choices[k].seed, c->n_out[k]) == EOS);
}

static void cancel(struct client *c)
{
    struct rtr_actions acts;
    if (c->ended) return;
    c->ended = c->cancelled = true;
    g_cancelled++;
    rtr_actions_init(&acts);
    rtr_route_cancel(g_router, c->job, g_now, &acts);
    for (uint32_t i = 0; i < acts.n; i++)
        CHECK(acts.items[i].kind == RTR_DO_SEND || acts.items[i].kind == RTR_DO_CLOSE,
              "callback in cancel");
    do_router(&acts);
    rtr_actions_fini(&acts);
}

/* With a capture the end may wait for the rows of prefill; no token comes meanwhile. */
static void find_stop_string(struct client *c)
{
    struct rtr_actions acts;
    rtr_actions_init(&acts);
    bool over = rtr_route_cancel_choice(g_router, c->job, 0, g_now, &acts);
    for (uint32_t i = 0; i < acts.n; i++)
        CHECK(acts.items[i].kind == RTR_DO_SEND || acts.items[i].kind == RTR_DO_CLOSE,
              "callback in cancel_choice");
    do_router(&acts);
    rtr_actions_fini(&acts);
    c->stopped = true;
    c->ended = over;
    g_finished += over;
    g_held += !over;
}

static void client_tokens(struct client *c, const struct rtr_action *a)
{
    const struct wire_tokens *t = &a->msg.tokens;
    uint32_t k = a->choice;
    CHECK(!c->ended && !c->stopped && !c->done[k], "tokens after the end");
    CHECK(t->first == c->n_out[k], "token %u comes as number %u", c->n_out[k], t->first);
    for (uint32_t i = 0; i < t->ids.n; i++) {
        uint32_t want = token_at(c->prompt_hash, c->choices[k].seed, c->n_out[k]);
        CHECK(wire_ids_at(t->ids, i) == want, "token %u of a stream is wrong", c->n_out[k]);
        c->n_out[k]++;
    }
    CHECK(c->n_out[k] <= c->req.max_tokens, "more than max_tokens");
    c->heard_ms = g_now;
    if (below(400) == 0)
        cancel(c); /* from inside the callback */
    else if (c->req.capture && mix(c->prompt_hash ^ 77 ^ c->n_out[k]) % 64 == 0)
        find_stop_string(c);
}

static void client_captured(struct client *c, const struct wire_captured *m)
{
    struct wire_capture ask;
    struct wire_capture_row row;
    CHECK(!c->ended && c->req.capture, "a row nobody asked for");
    CHECK(wire_get_capture(&ask, c->req.capture, c->req.capture_bytes) == 0, "a broken ask");
    CHECK(m->step ? ask.steps & WIRE_CAPTURE_DECODE && m->step <= CAPTURE_STEPS
                  : ask.steps & WIRE_CAPTURE_PREFILL,
          "a row of step %u", m->step);
    CHECK(m->layer == 2 || m->layer == 4, "a row of layer %u", m->layer);
    CHECK(wire_get_capture_row(&row, m->row.data, m->row.len) == 0, "a broken row");
    const float x = score_of(c->prompt_hash, m->step, m->layer);
    CHECK(wire_rank_at(&row.own, 0).score == x && row.own.next == x - 1,
          "step %u, layer %u: another row's numbers", m->step, m->layer);
    CHECK(row.shadow == ask.shadow, "other keys than asked for");
    c->rows[m->layer == 4] |= UINT64_C(1) << m->step;
    g_rows++;
}

/* All rows of what came before it are here at the end, also those of attempts that were given
 * up. */
static void check_rows(const struct client *c)
{
    struct wire_capture ask;
    if (!c->req.capture || !g_calm) return;
    g_complete++;
    CHECK(wire_get_capture(&ask, c->req.capture, c->req.capture_bytes) == 0, "a broken ask");
    uint64_t want = ask.steps & WIRE_CAPTURE_PREFILL ? 1 : 0;
    for (uint32_t i = 1; i < c->n_out[0] && i <= CAPTURE_STEPS; i++)
        if (ask.steps & WIRE_CAPTURE_DECODE) want |= UINT64_C(1) << i;
    for (int k = 0; k < 2; k++)
        CHECK((c->rows[k] & want) == want, "layer %d: steps %llx of %llx came", layers[k],
              (unsigned long long)c->rows[k], (unsigned long long)want);
}

static void client_finish(struct client *c, const struct rtr_action *a)
{
    CHECK(!c->ended && !c->done[a->choice], "two ends");
    CHECK(c->stopped || expects_end(c, a->choice), "finished after %u tokens", c->n_out[a->choice]);
    bool length = c->n_out[a->choice] == c->req.max_tokens;
    CHECK(c->stopped || length == (a->reason == RTR_FINISH_LENGTH), "wrong finish reason");
    c->done[a->choice] = true;
    c->heard_ms = g_now;
    check_rows(c);
    bool all = true;
    for (uint32_t k = 0; k < c->req.n_choices; k++) all &= c->done[k];
    if (!all) return;
    c->ended = true;
    g_finished++;
}

static void do_router(struct rtr_actions *acts)
{
    for (uint32_t i = 0; i < acts->n; i++) {
        struct rtr_action *a = &acts->items[i];
        switch (a->kind) {
        case RTR_DO_SEND: post((uint32_t)a->conn, 1, &a->msg); break;
        case RTR_DO_CLOSE:
            CHECK(strcmp(a->why, "it does not answer CANCEL") != 0, "a cancel was never answered");
            close_connection((uint32_t)a->conn);
            break;
        case RTR_DO_TOKENS:
            if (!rtr_job_deaf(a->job)) client_tokens(a->cookie, a);
            break;
        case RTR_DO_CAPTURED:
            if (!rtr_job_deaf(a->job)) client_captured(a->cookie, &a->msg.captured);
            break;
        case RTR_DO_PLACED:
            if (!rtr_job_deaf(a->job))
                CHECK(((struct client *)a->cookie)->n_out[a->choice] == a->n_output,
                      "placed with %u outputs", a->n_output);
            break;
        case RTR_DO_FINISH:
            if (!rtr_job_deaf(a->job)) client_finish(a->cookie, a);
            break;
        case RTR_DO_FAIL:
            if (rtr_job_deaf(a->job)) break;
            CHECK(!g_calm || a->refusal.err.code == TOW_EINVAL, "failed without a fault: %s",
                  a->refusal.err.msg);
            CHECK(!((struct client *)a->cookie)->ended, "two ends");
            ((struct client *)a->cookie)->ended = true;
            g_failed++;
            CHECK(a->refusal.err.code != TOW_EINVAL || !strcmp(a->refusal.reason, "too_large"),
                  "a worker refused what was admitted: %s", a->refusal.err.msg);
            g_codes[-a->refusal.err.code]++;
            break;
        case RTR_DO_DRAINED: break;
        case RTR_DO_LOG: break;
        }
    }
}

/* By steps asked for (enum wire_capture_steps) and whether other keys are. */
static uint8_t g_asks[WIRE_CAPTURE_ALL + 1][2][64];

static uint32_t pack_ask(uint8_t steps, bool shadow, uint8_t **out)
{
    struct wire_writer w = {.data = g_asks[steps][shadow], .cap = sizeof g_asks[0][0]};
    struct wire_capture ask = {.steps = steps,
                               .shadow = shadow ? 5 : 0,
                               .max_steps = CAPTURE_STEPS,
                               .entries = {asked, 2}};
    wire_put_capture(&w, &ask);
    *out = g_asks[steps][shadow];
    return (uint32_t)w.len;
}

static void arrive(void)
{
    if (g_to_come == 0) return;
    g_to_come--;
    push((struct event){.t = g_now + (percent(70) ? below(100) : below(2500)),
                        .what = E_ARRIVE,
                        .node = MAX_NODES});
    struct client *c = &g_clients[g_n_clients++];
    struct rtr_refusal refusal;
    struct rtr_actions acts;
    memset(c, 0, sizeof *c);
    uint32_t n = percent(80) ? between(1, 20) : between(1, 70);
    for (uint32_t i = 0; i < n; i++) c->prompt[i] = below(1000);
    c->prompt_hash = hash_prompt(c->prompt, n);
    c->req.n_choices = percent(85) ? 1 : between(2, 4);
    c->req.choices = c->choices;
    c->req.max_tokens = percent(20) ? 1 : between(1, 60);
    c->req.sampling.ignore_eos = percent(50);
    c->req.sampling.top_p = c->req.sampling.repetition_penalty = 1;
    if (c->req.n_choices == 1 && mix(c->prompt_hash ^ 77) % 2) {
        const uint64_t kind = mix(c->prompt_hash ^ 78);
        uint8_t *ask;
        c->req.capture_shadow = kind / 16 % 2;
        c->req.capture_bytes =
            pack_ask((uint8_t)(1 + kind % WIRE_CAPTURE_ALL), c->req.capture_shadow, &ask);
        c->req.capture = ask;
    }
    for (uint32_t k = 0; k < c->req.n_choices; k++)
        c->choices[k] = (struct rtr_choice){(const text_id *)c->prompt, n, 100 + k};
    c->started_ms = c->heard_ms = g_now;
    rtr_actions_init(&acts);
    int rc = rtr_route_submit(g_router, g_now, &c->req, c, &c->job, &refusal, &acts);
    if (rc < 0) {
        g_refused++;
        c->ended = true;
        bool again = rc == TOW_EFULL || rc == TOW_EDRAIN;
        CHECK(rc == TOW_EINVAL || again, "refused with %s", refusal.err.msg);
        CHECK(again == (refusal.retry_after_s >= 1 && refusal.retry_after_s <= 600), "retry after");
        CHECK(acts.n == 0, "a refused request left something");
    }
    for (uint32_t i = 0; i < acts.n; i++)
        CHECK(acts.items[i].kind == RTR_DO_SEND || acts.items[i].kind == RTR_DO_CLOSE,
              "callback in submit");
    do_router(&acts);
    rtr_actions_fini(&acts);
    if (rc == 0 && percent(25))
        push((struct event){.t = g_now + (percent(50) ? below(300) : below(5000)),
                            .what = E_CANCEL,
                            .node = MAX_NODES,
                            .a = g_n_clients - 1});
}

/* --- one world -------------------------------------------------------------------------------- */

static void handle(const struct event *e)
{
    if (e->node < MAX_NODES && e->what != E_START) {
        struct node *n = &g_nodes[e->node];
        if (!n->alive || n->life != e->life) {
            if (e->what == E_DELIVER) {
                struct conn *k = &g_conns[e->a];
                struct frame *f = k->head[1];
                if (f) k->head[1] = f->next;
                free(f);
            }
            return;
        }
        if (n->stopped_until > g_now) { /* SIGSTOP: everything waits */
            struct event later = *e;
            later.t = n->stopped_until;
            push(later);
            return;
        }
    }
    switch (e->what) {
    case E_ROUTER_TICK:
        push((struct event){.t = g_now + 100, .what = E_ROUTER_TICK, .node = MAX_NODES});
        route(&(struct rtr_event){.kind = RTR_ON_TICK, .now_ms = g_now});
        break;
    case E_NODE_TICK: node_tick(e->node); break;
    case E_DELIVER: deliver(e); break;
    case E_CLOSED: saw_close(e); break;
    case E_ENGINE:
        if (g_nodes[e->node].prefill)
            chunk_done(e->node);
        else
            step_done(e->node);
        break;
    case E_READ: read_landed(e); break;
    case E_ACK: acked(e); break;
    case E_END_P: ended_p(e); break;
    case E_END_D: ended_d(e); break;
    case E_ARRIVE: arrive(); break;
    case E_CANCEL: cancel(&g_clients[e->a]); break;
    case E_FAULT: fault(); break;
    case E_START: start_node(e->node); break;
    }
    rtr_route_reap(g_router);
}

static bool all_ended(void)
{
    if (g_to_come) return false;
    for (uint32_t i = 0; i < g_n_clients; i++)
        if (!g_clients[i].ended) return false;
    return true;
}

static void run_until(uint64_t t)
{
    while (g_n_heap && g_heap[0].t <= t) {
        struct event e = pop();
        g_now = e.t;
        handle(&e);
    }
    g_now = t;
}

static void build_world(uint64_t seed)
{
    struct tow_err err;
    static const uint32_t eos[1] = {EOS};
    g_seed = seed;
    g_rng = mix(seed + 1);
    g_now = 1000;
    g_order = g_n_heap = g_n_conns = g_n_moves = g_n_clients = 0;
    g_calm = percent(15);
    memset(g_nodes, 0, sizeof g_nodes);
    g_cfg = (struct rtr_route_config){.max_queued = between(4, 60),
                                      .max_queued_tokens = between(100, 2000),
                                      .queue_timeout_ms = g_calm ? 10 * QUEUE_MS : QUEUE_MS,
                                      .lease_ms = LEASE_MS,
                                      .reserve_ms = 3000,
                                      .stall_ms = STALL_MS,
                                      .cancel_ms = 10000,
                                      .heartbeat_ms = HEARTBEAT_MS,
                                      .max_passes = 8,
                                      .eos = eos,
                                      .n_eos = 1,
                                      .incarnation = 1,
                                      .random = random_id};
    CHECK(rtr_route_new(&g_router, &g_cfg, &err) == 0, "%s", err.msg);
    uint32_t n_p = between(1, 3), n_d = between(1, 3);
    g_n_nodes = n_p + n_d;
    for (uint32_t i = 0; i < g_n_nodes; i++) {
        struct node *n = &g_nodes[i];
        n->prefill = i < n_p;
        snprintf(n->name, sizeof n->name, "%s%u", n->prefill ? "p" : "d", i);
        n->pages = percent(50) ? between(8, 20) : between(20, 60);
        n->max_batch = between(1, 6);
        n->reserve = below(12);
        n->chunk = between(1, 16);
        n->max_pending = between(30, 300);
        push((struct event){.t = g_now + below(3000), .what = E_START, .node = i});
    }
    g_to_come = between(5, 80);
    g_end_faults_ms = g_now + 60000;
    push((struct event){.t = g_now, .what = E_ROUTER_TICK, .node = MAX_NODES});
    push((struct event){.t = g_now + below(1000), .what = E_ARRIVE, .node = MAX_NODES});
    if (!g_calm) push((struct event){.t = g_now + below(4000), .what = E_FAULT, .node = MAX_NODES});
}

static void check_idle(void)
{
    struct rtr_route_stats s;
    const char *why = "";
    rtr_route_stats(g_router, &s);
    CHECK(s.started == s.finished + s.failed + s.cancelled, "runs do not add up at the end");
    CHECK(s.queued + s.reserving + s.prefilling + s.streaming + s.waiting == 0,
          "gauges are not zero");
    CHECK(s.waiting_tokens == 0, "waiting tokens are not zero");
    CHECK(s.tickets == 0, "%u tickets are left", s.tickets);
    CHECK(s.distrusted == 0, "a worker broke the protocol");
    CHECK(rtr_route_ready(g_router, g_now, &why), "not ready at the end: %s", why);
    const struct rtr_registry *g = rtr_route_registry(g_router);
    for (uint32_t i = 0; i < RTR_MAX_WORKERS; i++) {
        const struct rtr_worker *w = &g->workers[i];
        CHECK(w->tickets == 0 && w->held_pages == 0 && w->held_tokens == 0, "%s: load is not zero",
              w->name);
        CHECK(w->state == RTR_GONE || w->foreign_pages + w->foreign_tickets == 0, "%s: ghosts",
              w->name);
    }
    for (uint32_t i = 0; i < g_n_nodes; i++) {
        struct node *n = &g_nodes[i];
        if (!n->alive) continue;
        CHECK(kv_pool_free_pages(n->pool) == n->pages, "%s: pages are not back", n->name);
    }
}

static void tear_down(void)
{
    for (uint32_t i = 0; i < g_n_nodes; i++) kill_node(i);
    for (uint32_t c = 1; c <= g_n_conns; c++)
        for (int dir = 0; dir < 2; dir++)
            while (g_conns[c].head[dir]) {
                struct frame *f = g_conns[c].head[dir];
                g_conns[c].head[dir] = f->next;
                free(f);
            }
    for (uint32_t i = 0; i < g_n_moves; i++) {
        free(g_moves[i].to);
        free(g_moves[i].from);
    }
    rtr_route_free(g_router);
}

static void run_seed(uint64_t seed)
{
    build_world(seed);
    uint64_t limit = g_now + 600000;
    while (!all_ended() && g_now < limit) {
        run_until(g_now + 500);
        for (uint32_t i = 0; i < g_n_clients; i++) {
            struct client *c = &g_clients[i];
            uint64_t most = 4 * (QUEUE_MS + STALL_MS) + 10 * QUEUE_MS;
            CHECK(c->ended || g_now < c->heard_ms + most, "request %u waits without limit", i);
        }
    }
    CHECK(all_ended(), "requests are left after ten minutes");
    run_until((g_now > g_end_faults_ms ? g_now : g_end_faults_ms) + 60000);
    check_idle();
    tear_down();
}

static void
test_cluster__every_order_of_events_ends_with_right_tokens_and_nothing_held(void **state)
{
    (void)state;
    const char *one = getenv("TOW_MODEL_SEED"), *many = getenv("TOW_MODEL_SEEDS");
    uint64_t n = many ? strtoull(many, NULL, 0) : 2000, start = tow_now_ms(), done = 0;
    if (one) {
        run_seed(strtoull(one, NULL, 0));
        return;
    }
    for (; done < n; done++) {
        run_seed(done);
        /* A slow machine or a sanitizer gets fewer, but never none. */
        if (!many && done >= 20 && tow_now_ms() - start > 15000) break;
    }
    printf("%llu worlds: %llu requests finished, %llu failed, %llu cancelled, %llu refused\n",
           (unsigned long long)done, (unsigned long long)g_finished, (unsigned long long)g_failed,
           (unsigned long long)g_cancelled, (unsigned long long)g_refused);
    for (int i = 0; i < 32; i++)
        if (g_codes[i])
            printf("  failed with %s: %llu\n", tow_err_name(-i), (unsigned long long)g_codes[i]);
    assert_true(g_finished > 100);
    assert_true(g_held > 0);
    assert_true(g_rows > 100 && g_complete > 0);
    free(g_heap);
    g_heap = NULL;
    g_cap_heap = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            test_cluster__every_order_of_events_ends_with_right_tokens_and_nothing_held),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
