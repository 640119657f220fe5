/* Tests of prefill/sched.c: turns, limits, cancel, refusals.
 * Random orders: cluster_model_test.c. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/kv/pool.h"
#include "prefill/sched.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK 8u

struct world {
    struct kv_pool *pool;
    struct pre_sched *sched;
    struct pre_actions acts;
    void *memory, *tails;
    uint64_t now;
};

static void setup(struct world *w, uint32_t pages, uint32_t max_pending)
{
    struct tow_err err;
    memset(w, 0, sizeof *w);
    w->memory = aligned_alloc(64, 64 * (size_t)pages);
    w->tails = aligned_alloc(64, 64 * 8);
    assert_int_equal(kv_pool_new(&w->pool, w->memory, pages, 64, w->tails, 8, 64, &err), 0);
    struct pre_sched_config cfg = {.page_tokens = 4,
                                   .max_context = 1000,
                                   .chunk_tokens = CHUNK,
                                   .max_pending_tokens = max_pending,
                                   .max_jobs = 64,
                                   .n_vocab = 512,
                                   .shadows = true};
    assert_int_equal(pre_sched_new(&w->sched, &cfg, w->pool, &err), 0);
    pre_actions_init(&w->acts);
}

static void teardown(struct world *w)
{
    pre_sched_free(w->sched);
    pre_actions_fini(&w->acts);
    kv_pool_free(w->pool);
    free(w->memory);
    free(w->tails);
}

static void step(struct world *w, struct pre_event ev)
{
    pre_actions_clear(&w->acts);
    ev.now_ms = ++w->now;
    pre_sched_step(w->sched, &ev, &w->acts);
}

static struct pre_action *find(struct world *w, enum pre_action_kind kind, unsigned type)
{
    for (uint32_t i = 0; i < w->acts.n; i++)
        if (w->acts.items[i].kind == kind &&
            (kind != PRE_DO_SEND || w->acts.items[i].msg.type == type))
            return &w->acts.items[i];
    return NULL;
}

static struct wire_bytes an_ask; /* of the next submit() */

static void submit(struct world *w, uint64_t id, uint32_t n)
{
    static uint32_t tokens[1000];
    struct wire_msg m = {.type = WIRE_PREFILL_MSG};
    m.prefill.ticket = (struct wire_ticket){id, id};
    m.prefill.n_prompt = n;
    m.prefill.max_tokens = 5;
    m.prefill.tokens = (struct wire_ids){tokens, n};
    m.prefill.capture = an_ask;
    an_ask = (struct wire_bytes){NULL, 0};
    step(w, (struct pre_event){.kind = PRE_ON_MESSAGE, .owner = 1, .msg = &m});
}

/* Of two entries, in the layers named. */
static struct wire_bytes ask(uint8_t shadow, const uint32_t *layers, uint32_t n_layers)
{
    static const uint32_t entries[2] = {0, 1};
    static uint8_t bytes[WIRE_MAX_CAPTURE];
    struct wire_writer w = {.data = bytes, .cap = sizeof bytes};
    struct wire_capture a = {.steps = WIRE_CAPTURE_ALL,
                             .shadow = shadow,
                             .max_steps = 9,
                             .layers = {layers, n_layers},
                             .entries = {entries, 2}};
    wire_put_capture(&w, &a);
    assert_false(w.failed);
    return (struct wire_bytes){bytes, (uint32_t)w.len};
}

static void cancel(struct world *w, uint64_t id)
{
    struct wire_msg m = {.type = WIRE_CANCEL_MSG};
    m.cancel.ticket = (struct wire_ticket){id, id};
    step(w, (struct pre_event){.kind = PRE_ON_MESSAGE, .owner = 1, .msg = &m});
}

static void ended(struct world *w, uint64_t id, int code)
{
    step(w, (struct pre_event){.kind = PRE_ON_ENDED, .ticket = {id, id}, .code = code});
}

/* OP-08: shorts wait for one long chunk at most, and three long ones still finish. */
static void test_pre_sched__short_prompt_waits_for_one_long_chunk(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 400, 2000);
    for (uint64_t id = 1; id <= 3; id++) submit(&w, id, 200);
    uint64_t next_short = 100;
    uint32_t long_done = 0, waited = 0;
    bool waiting = false;
    for (uint32_t chunk = 0; long_done < 3; chunk++) {
        assert_true(chunk < 400);
        if (!waiting && chunk % 2 == 0) {
            submit(&w, next_short, 3);
            waiting = true;
            waited = 0;
        }
        step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
        struct pre_action *offer = find(&w, PRE_DO_OFFER, 0);
        if (offer && offer->tail) {
            uint64_t id = offer->job->ticket.id;
            if (id <= 3) long_done++;
            if (id == next_short) {
                waiting = false;
                next_short++;
            }
            ended(&w, id, 0);
            assert_non_null(find(&w, PRE_DO_SEND, WIRE_PREFILL_DONE_MSG));
        }
        assert_true(!waiting || ++waited <= 3);
    }
    teardown(&w);
}

/* Ends the chunk in flight; the ticket whose last chunk it was, else 0. */
static uint64_t end_chunk(struct world *w)
{
    step(w, (struct pre_event){.kind = PRE_ON_CHUNK});
    struct pre_action *offer = find(w, PRE_DO_OFFER, 0);
    return offer && offer->tail ? offer->job->ticket.id : 0;
}

/* OP-08: a long prompt that waits for pages holds up no short one,
 * and gets its pages although they never cease. */
static void test_pre_sched__waiting_long_prompt_holds_up_no_short_one(void **state)
{
    (void)state;
    struct world w;
    struct pre_stats s;
    setup(&w, 50, 2000);
    for (uint64_t id = 1; id <= 5; id++)
        submit(&w, id, 40); /* 10 pages each; long ones have 44 of 50 */
    pre_sched_stats(w.sched, &s);
    assert_int_equal(s.active, 4);
    for (uint64_t id = 100; id < 300; id++) { /* far more than it may be passed */
        submit(&w, id, 3);
        for (uint32_t waited = 1; end_chunk(&w) != id; waited++) assert_in_range(waited, 1, 2);
        ended(&w, id, 0);
    }
    pre_sched_stats(w.sched, &s);
    assert_int_equal(s.shipping, 4); /* computed; decode has not fetched their pages yet */
    assert_int_equal(s.queued, 1);
    submit(&w, 300, 3);
    submit(&w, 301, 3);
    ended(&w, 1, 0);
    pre_sched_stats(w.sched, &s);
    assert_int_equal(s.queued, 0);
    uint64_t over = 0;
    while (over != 5) {
        if ((over = end_chunk(&w))) ended(&w, over, 0);
    }
    for (uint64_t id = 2; id <= 4; id++) ended(&w, id, 0);
    assert_int_equal(kv_pool_free_pages(w.pool), 50);
    teardown(&w);
}

/* A cancel that found no memory or a full queue was lost: it is given again until the mover says
 * ENDED. */
static void test_pre_sched__cancel_of_a_move_is_repeated(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 50, 1000);
    submit(&w, 1, 160);
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
    w.now += 1000;
    step(&w, (struct pre_event){.kind = PRE_ON_TICK});
    assert_null(find(&w, PRE_DO_CANCEL_MOVE, 0));
    cancel(&w, 1);
    for (int i = 0; i < 3; i++) {
        w.now += 1000;
        step(&w, (struct pre_event){.kind = PRE_ON_TICK});
        struct pre_action *a = find(&w, PRE_DO_CANCEL_MOVE, 0);
        assert_non_null(a);
        assert_int_equal(a->ticket.id, 1);
        assert_int_equal(a->code, TOW_ECANCEL);
        step(&w, (struct pre_event){.kind = PRE_ON_TICK}); /* not at each tick */
        assert_null(find(&w, PRE_DO_CANCEL_MOVE, 0));
    }
    ended(&w, 1, TOW_ECANCEL);
    w.now += 1000;
    step(&w, (struct pre_event){.kind = PRE_ON_TICK});
    assert_null(find(&w, PRE_DO_CANCEL_MOVE, 0));
    teardown(&w);
}

/* Pages that the mover did not take would never arrive: the job ends,
 * once the mover is done with it. */
static void test_pre_sched__job_whose_offer_was_not_taken_fails(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 50, 1000);
    submit(&w, 1, 24);
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
    assert_non_null(find(&w, PRE_DO_OFFER, 0));
    step(&w, (struct pre_event){.kind = PRE_ON_UNOFFERED, .ticket = {1, 1}, .code = TOW_ENOMEM});
    assert_int_equal(find(&w, PRE_DO_CANCEL_MOVE, 0)->code, TOW_ENOMEM);
    ended(&w, 1, TOW_ENOMEM);
    assert_null(find(&w, PRE_DO_SEND, WIRE_FAILED_MSG)); /* a chunk runs */
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
    struct pre_action *a = find(&w, PRE_DO_SEND, WIRE_FAILED_MSG);
    assert_int_equal(a->msg.failed.code, TOW_ENOMEM);
    assert_int_equal(kv_pool_free_pages(w.pool), 50);
    step(&w, (struct pre_event){.kind = PRE_ON_UNOFFERED, .ticket = {1, 1}, .code = TOW_ENOMEM});
    assert_int_equal(w.acts.n, 0);
    teardown(&w);
}

/* KV-11: stops at the chunk boundary; pages are back only when mover and engine are both done. */
static void test_pre_sched__cancel_waits_for_the_chunk_and_the_mover(void **state)
{
    (void)state;
    struct world w;
    struct pre_stats s;
    setup(&w, 50, 1000);
    submit(&w, 1, 160);
    assert_non_null(find(&w, PRE_DO_CHUNK, 0));
    cancel(&w, 1);
    assert_non_null(find(&w, PRE_DO_CANCEL_MOVE, 0));
    ended(&w, 1, TOW_ECANCEL);
    assert_null(find(&w, PRE_DO_SEND, WIRE_CANCELLED_MSG));
    assert_int_equal(kv_pool_free_pages(w.pool), 10);
    submit(&w, 2, 3);
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
    assert_non_null(find(&w, PRE_DO_SEND, WIRE_CANCELLED_MSG));
    assert_int_equal(find(&w, PRE_DO_CHUNK, 0)->job->ticket.id, 2);
    pre_sched_stats(w.sched, &s);
    assert_int_equal(s.cancelled, 1);
    assert_int_equal(kv_pool_free_pages(w.pool), 49);
    cancel(&w, 77); /* unknown: answered all the same */
    assert_non_null(find(&w, PRE_DO_SEND, WIRE_CANCELLED_MSG));
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
    ended(&w, 2, 0);
    assert_int_equal(kv_pool_free_pages(w.pool), 50);
    teardown(&w);
}

static int denied(struct world *w)
{
    struct pre_action *a = find(w, PRE_DO_SEND, WIRE_DENY_MSG);
    return a ? a->msg.deny.code : 0;
}

/* KV-05, KV-08, OP-07, OP-09 on this side. */
static void test_pre_sched__limits_hold_exactly_and_name_themselves(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 10, 60);
    submit(&w, 1, 41); /* 11 pages of 10 */
    assert_int_equal(denied(&w), TOW_ETOOBIG);
    submit(&w, 2, 40);
    assert_int_equal(denied(&w), 0);
    submit(&w, 2, 1);
    assert_int_equal(denied(&w), TOW_ESTATE);
    submit(&w, 3, 21);
    assert_int_equal(denied(&w), TOW_EBUSY);
    submit(&w, 4, 20);
    assert_int_equal(denied(&w), 0);
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK}); /* 8 tokens less */
    submit(&w, 5, 9);
    assert_int_equal(denied(&w), TOW_EBUSY);
    submit(&w, 6, 8);
    assert_int_equal(denied(&w), 0);
    step(&w, (struct pre_event){.kind = PRE_ON_DRAIN, .limit_ms = 1});
    submit(&w, 7, 1);
    assert_int_equal(denied(&w), TOW_EDRAIN);
    step(&w, (struct pre_event){.kind = PRE_ON_TICK}); /* the limit has passed */
    for (uint64_t id = 2; id <= 6; id += 2) ended(&w, id, TOW_EDRAIN);
    assert_null(find(&w, PRE_DO_DRAINED, 0));
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
    assert_true(find(&w, PRE_DO_DRAINED, 0)->cut);
    assert_int_equal(kv_pool_free_pages(w.pool), 10);
    teardown(&w);
}

/* KV-18: every length around chunk and page borders is offered whole, once, the tail last. */
static void test_pre_sched__every_length_is_offered_whole(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 3 * CHUNK + 1; n++) {
        struct world w;
        setup(&w, 50, 1000);
        uint32_t computed = 0, offered = 0;
        bool tail = false;
        submit(&w, 1, n);
        while (!tail) {
            struct pre_action *c = find(&w, PRE_DO_CHUNK, 0);
            assert_non_null(c);
            assert_int_equal(c->from, computed);
            assert_true(c->n > 0);
            computed += c->n;
            assert_int_equal(c->last, computed == n);
            const uint32_t whole = c->n_whole; /* what is digested is what is offered */
            step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
            struct pre_action *o = find(&w, PRE_DO_OFFER, 0);
            assert_int_equal(whole, o ? o->n : 0);
            if (!o) continue;
            assert_int_equal(o->from, offered);
            offered += o->n;
            tail = o->tail;
        }
        assert_int_equal(offered, (n + 3) / 4);
        for (uint32_t i = 0; i < offered; i++)
            step(&w, (struct pre_event){.kind = PRE_ON_PART, .ticket = {1, 1}, .index = i});
        assert_int_equal(kv_pool_free_pages(w.pool), 50); /* each is free once acknowledged */
        ended(&w, 1, 0);
        teardown(&w);
    }
}

/* A router with another model: refused by name, not answered from rows of zeros. */
static void test_pre_sched__token_beyond_the_vocabulary_is_refused(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 50, 1000);
    for (uint32_t last = 511; last <= 513; last++) {
        const uint32_t tokens[3] = {0, 1, last == 513 ? UINT32_MAX : last};
        struct wire_msg m = {.type = WIRE_PREFILL_MSG};
        m.prefill.ticket = (struct wire_ticket){last, last};
        m.prefill.n_prompt = 3;
        m.prefill.max_tokens = 5;
        m.prefill.tokens = (struct wire_ids){tokens, 3};
        step(&w, (struct pre_event){.kind = PRE_ON_MESSAGE, .owner = 1, .msg = &m});
        struct pre_action *deny = find(&w, PRE_DO_SEND, WIRE_DENY_MSG);
        assert_true(!deny == (last == 511));
        if (deny) assert_int_equal(deny->msg.deny.code, TOW_EINVAL);
    }
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK, .code = TOW_ENUMERIC}); /* so that it ends */
    ended(&w, 511, TOW_ECANCEL);
    assert_int_equal(kv_pool_free_pages(w.pool), 50);
    teardown(&w);
}

static void test_pre_sched__capture_that_cannot_be_kept_is_refused_by_name(void **state)
{
    (void)state;
    struct world w;
    struct tow_err err;
    static const uint32_t down[2] = {4, 2};
    setup(&w, 50, 1000);
    pre_sched_free(w.sched);
    struct pre_sched_config cfg = {.page_tokens = 4,
                                   .max_context = 1000,
                                   .chunk_tokens = CHUNK,
                                   .max_pending_tokens = 1000,
                                   .max_jobs = 64};
    assert_int_equal(pre_sched_new(&w.sched, &cfg, w.pool, &err), 0);
    for (uint64_t id = 1; id <= 2; id++) {
        an_ask = id == 1 ? ask(1, NULL, 0) : ask(0, down, 2);
        submit(&w, id, 3);
        struct pre_action *deny = find(&w, PRE_DO_SEND, WIRE_DENY_MSG);
        assert_non_null(deny);
        assert_int_equal(deny->msg.deny.code, TOW_EINVAL);
        assert_memory_equal(deny->msg.deny.note.data, id == 1 ? "capture.shadow" : "capture:", 8);
    }
    an_ask = ask(0, NULL, 0); /* without other keys it needs nothing of the pages */
    submit(&w, 3, 3);
    assert_int_equal(denied(&w), 0);
    assert_int_equal(kv_pool_free_pages(w.pool), 49);
    step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
    ended(&w, 3, 0);
    teardown(&w);
}

/* As without a capture, but each page with its companion. */
static void test_pre_sched__shadow_keys_double_every_page(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 3 * CHUNK + 1; n++) {
        struct world w;
        setup(&w, 50, 1000);
        uint32_t offered = 0, done = 0;
        an_ask = ask(7, NULL, 0);
        submit(&w, 1, n);
        assert_int_equal(find(&w, PRE_DO_OPEN_MOVE, 0)->n, (n + 3) / 4 * 2);
        assert_int_equal(kv_pool_free_pages(w.pool), 50 - (n + 3) / 4 * 2);
        for (bool tail = false; !tail;) {
            const uint32_t whole = find(&w, PRE_DO_CHUNK, 0)->n_whole;
            done += find(&w, PRE_DO_CHUNK, 0)->n;
            step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
            struct pre_action *o = find(&w, PRE_DO_OFFER, 0);
            assert_int_equal(whole, o ? o->n : 0);
            if (!o) continue;
            assert_int_equal(o->from, offered);
            offered += o->n;
            tail = o->tail;
            assert_int_equal(offered, tail ? (n + 3) / 4 * 2 : done / 4 * 2);
        }
        for (uint32_t i = 0; i < offered; i++)
            step(&w, (struct pre_event){.kind = PRE_ON_PART, .ticket = {1, 1}, .index = i});
        assert_int_equal(kv_pool_free_pages(w.pool), 50);
        ended(&w, 1, 0);
        teardown(&w);
    }
    struct world w;
    setup(&w, 11, 1000);
    an_ask = ask(1, NULL, 0);
    submit(&w, 1, 21); /* 6 pages with their companions, of 11 */
    assert_int_equal(denied(&w), TOW_ETOOBIG);
    an_ask = ask(1, NULL, 0);
    submit(&w, 2, 20);
    assert_int_equal(denied(&w), 0);
    teardown(&w);
}

static void find_row(const struct work_capture *c, int32_t layer)
{
    static const struct kern_rank ranks[2] = {{1, 0, 2}, {2, 0, 1}};
    struct model_capture_row row = {.layer = layer,
                                    .topk = 2,
                                    .n_entries = 2,
                                    .n_visible = 2,
                                    .entries = c->ask.entries,
                                    .own = {ranks, 1, 0}};
    c->ask.on_row(c->ask.ctx, &row);
}

/* Rows go out before the tail is offered, and only once;
 * those of a job that is being cancelled do not. */
static void test_pre_sched__captured_rows_are_sent_before_the_tail_is_offered(void **state)
{
    (void)state;
    for (int cancelled = 0; cancelled < 2; cancelled++) {
        struct world w;
        setup(&w, 50, 1000);
        an_ask = ask(0, NULL, 0);
        submit(&w, 1, CHUNK);
        struct pre_action *chunk = find(&w, PRE_DO_CHUNK, 0);
        assert_true(chunk->last);
        struct work_capture *c = chunk->job->capture;
        assert_non_null(work_capture_begin(c, 0));
        find_row(c, 2);
        find_row(c, 4);
        if (cancelled) cancel(&w, 1);
        step(&w, (struct pre_event){.kind = PRE_ON_CHUNK});
        uint32_t n = 0, offered = UINT32_MAX;
        for (uint32_t i = 0; i < w.acts.n; i++) {
            const struct pre_action *a = &w.acts.items[i];
            if (a->kind == PRE_DO_OFFER) offered = i;
            if (a->kind != PRE_DO_SEND || a->msg.type != WIRE_CAPTURED_MSG) continue;
            assert_true(i < offered);
            assert_int_equal(a->owner, 1);
            assert_int_equal(a->msg.captured.ticket.id, 1);
            assert_int_equal(a->msg.captured.step, 0);
            assert_int_equal(a->msg.captured.layer, n++ ? 4 : 2);
        }
        assert_int_equal(n, cancelled ? 0 : 2);
        ended(&w, 1, cancelled ? TOW_ECANCEL : 0);
        assert_null(find(&w, PRE_DO_SEND, WIRE_CAPTURED_MSG));
        assert_int_equal(kv_pool_free_pages(w.pool), 50);
        teardown(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pre_sched__cancel_of_a_move_is_repeated),
        cmocka_unit_test(test_pre_sched__job_whose_offer_was_not_taken_fails),
        cmocka_unit_test(test_pre_sched__token_beyond_the_vocabulary_is_refused),
        cmocka_unit_test(test_pre_sched__short_prompt_waits_for_one_long_chunk),
        cmocka_unit_test(test_pre_sched__waiting_long_prompt_holds_up_no_short_one),
        cmocka_unit_test(test_pre_sched__cancel_waits_for_the_chunk_and_the_mover),
        cmocka_unit_test(test_pre_sched__limits_hold_exactly_and_name_themselves),
        cmocka_unit_test(test_pre_sched__every_length_is_offered_whole),
        cmocka_unit_test(test_pre_sched__capture_that_cannot_be_kept_is_refused_by_name),
        cmocka_unit_test(test_pre_sched__shadow_keys_double_every_page),
        cmocka_unit_test(test_pre_sched__captured_rows_are_sent_before_the_tail_is_offered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
