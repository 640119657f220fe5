/* Tests of decode/sched.c: admission, bad references, small answers, giving way. Random orders:
 * cluster_model_test.c. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/kv/pool.h"
#include "decode/sched.h"

#include <stdlib.h>
#include <string.h>

struct world {
    struct kv_pool *pool;
    struct dec_sched *sched;
    struct dec_actions acts;
    void *memory, *tails;
    uint64_t now;
};

static void setup(struct world *w, uint32_t pages, uint32_t reserve)
{
    struct tow_err err;
    memset(w, 0, sizeof *w);
    w->memory = aligned_alloc(64, 64 * (size_t)pages);
    w->tails = aligned_alloc(64, 64 * 16);
    assert_int_equal(kv_pool_new(&w->pool, w->memory, pages, 64, w->tails, 16, 64, &err), 0);
    struct dec_sched_config cfg = {.page_tokens = 4,
                                   .max_context = 100,
                                   .max_batch = 4,
                                   .max_tickets = 16,
                                   .reserve_tokens = reserve,
                                   .shadows = true};
    assert_int_equal(dec_sched_new(&w->sched, &cfg, w->pool, &err), 0);
    dec_actions_init(&w->acts);
}

static void teardown(struct world *w)
{
    dec_sched_free(w->sched);
    dec_actions_fini(&w->acts);
    kv_pool_free(w->pool);
    free(w->memory);
    free(w->tails);
}

static void step(struct world *w, struct dec_event ev)
{
    dec_actions_clear(&w->acts);
    ev.now_ms = ++w->now;
    dec_sched_step(w->sched, &ev, &w->acts);
}

static struct dec_action *find(struct world *w, enum dec_action_kind kind, unsigned type)
{
    for (uint32_t i = 0; i < w->acts.n; i++)
        if (w->acts.items[i].kind == kind &&
            (kind != DEC_DO_SEND || w->acts.items[i].msg.type == type))
            return &w->acts.items[i];
    return NULL;
}

static struct wire_bytes an_ask; /* of the next reserve() */

/* 0 when granted, else the code of the refusal. */
static int reserve(struct world *w, uint64_t id, uint32_t n_tokens, uint32_t max_tokens)
{
    static const uint32_t eos[1] = {1};
    struct wire_msg m = {.type = WIRE_RESERVE_MSG};
    m.reserve.ticket = (struct wire_ticket){id, id};
    m.reserve.n_tokens = n_tokens;
    m.reserve.max_tokens = max_tokens;
    m.reserve.eos = (struct wire_ids){eos, 1};
    m.reserve.capture = an_ask;
    an_ask = (struct wire_bytes){NULL, 0};
    step(w, (struct dec_event){.kind = DEC_ON_MESSAGE, .owner = 1, .msg = &m});
    struct dec_action *deny = find(w, DEC_DO_SEND, WIRE_DENY_MSG);
    assert_true(!deny == !!find(w, DEC_DO_SEND, WIRE_GRANT_MSG));
    return deny ? deny->msg.deny.code : 0;
}

static void loaded(struct world *w, uint64_t id, uint32_t position, uint32_t token, int code)
{
    step(w, (struct dec_event){.kind = DEC_ON_LOADED,
                               .ticket = {id, id},
                               .position = position,
                               .first = {.id = token},
                               .code = code});
}

static void cancel(struct world *w, struct wire_ticket t)
{
    struct wire_msg m = {.type = WIRE_CANCEL_MSG};
    m.cancel.ticket = t;
    step(w, (struct dec_event){.kind = DEC_ON_MESSAGE, .owner = 1, .msg = &m});
}

/* A cancel that found no memory or a full queue was lost: it is given again until the mover says
 * ENDED. */
static void test_dec_sched__cancel_of_a_move_is_repeated(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 10, 0);
    assert_int_equal(reserve(&w, 1, 36, 1), 0);
    w.now += 1000;
    step(&w, (struct dec_event){.kind = DEC_ON_TICK});
    assert_null(find(&w, DEC_DO_CANCEL_MOVE, 0));
    cancel(&w, (struct wire_ticket){1, 1});
    for (int i = 0; i < 3; i++) {
        w.now += 1000;
        step(&w, (struct dec_event){.kind = DEC_ON_TICK});
        struct dec_action *a = find(&w, DEC_DO_CANCEL_MOVE, 0);
        assert_non_null(a);
        assert_int_equal(a->ticket.id, 1);
        assert_int_equal(a->code, TOW_ECANCEL);
        step(&w, (struct dec_event){.kind = DEC_ON_TICK}); /* not at each tick */
        assert_null(find(&w, DEC_DO_CANCEL_MOVE, 0));
    }
    loaded(&w, 1, 0, 0, TOW_ECANCEL);
    w.now += 1000;
    step(&w, (struct dec_event){.kind = DEC_ON_TICK});
    assert_null(find(&w, DEC_DO_CANCEL_MOVE, 0));
    teardown(&w);
}

/* KV-01: the pages of a cancelled load are nobody's until the mover says that nothing can write
 * them. */
static void test_dec_sched__cancelled_load_keeps_its_pages_until_the_mover_ended(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 10, 0);
    assert_int_equal(reserve(&w, 1, 36, 1), 0);
    step(&w, (struct dec_event){.kind = DEC_ON_PART, .ticket = {1, 1}});
    cancel(&w, (struct wire_ticket){1, 1});
    assert_non_null(find(&w, DEC_DO_CANCEL_MOVE, 0));
    assert_null(find(&w, DEC_DO_SEND, WIRE_CANCELLED_MSG));
    assert_int_equal(reserve(&w, 2, 36, 1), TOW_EFULL);
    loaded(&w, 1, 0, 0, TOW_ECANCEL);
    assert_non_null(find(&w, DEC_DO_SEND, WIRE_CANCELLED_MSG));
    assert_int_equal(kv_pool_free_pages(w.pool), 10);
    assert_int_equal(reserve(&w, 3, 36, 1), 0);
    teardown(&w);
}

/* KV-04, KV-08: unknown, used, forged or doubled references do nothing, or are refused by name. */
static void test_dec_sched__bad_references_reach_nothing(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 10, 0);
    assert_int_equal(reserve(&w, 0, 4, 1), TOW_EINVAL);
    assert_int_equal(reserve(&w, 1, 4, 5), 0);
    assert_int_equal(reserve(&w, 1, 4, 5), TOW_ESTATE);
    step(&w, (struct dec_event){
                 .kind = DEC_ON_LOADED, .ticket = {1, 2}, .position = 4}); /* wrong nonce */
    step(&w, (struct dec_event){.kind = DEC_ON_LOADED, .ticket = {9, 9}, .position = 4});
    assert_int_equal(w.acts.n, 0);
    loaded(&w, 1, 5, 7, 0); /* a tail of another prompt */
    assert_int_equal(find(&w, DEC_DO_SEND, WIRE_FAILED_MSG)->msg.failed.code, TOW_EWIRE);
    loaded(&w, 1, 4, 7, 0); /* used already */
    assert_int_equal(w.acts.n, 0);
    assert_int_equal(kv_pool_free_pages(w.pool), 10);
    teardown(&w);
}

/* OP-09 with the numbers of the case. */
static void test_dec_sched__what_can_never_fit_is_refused_for_good(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 10, 0); /* 40 tokens, context 100 */
    assert_int_equal(reserve(&w, 1, 30, 11), TOW_ETOOBIG);
    assert_int_equal(reserve(&w, 2, 41, 1), TOW_ETOOBIG);
    assert_int_equal(reserve(&w, 3, 60, 41), TOW_EINVAL);
    assert_int_equal(reserve(&w, 4, 4, 0), TOW_EINVAL);
    assert_int_equal(reserve(&w, 5, 30, 10), 0);
    teardown(&w);
}

/* KV-14: exactly max_tokens tokens, the first one counted; an eos first gives none. */
static void test_dec_sched__small_answers_are_exact(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {1, 2, 3, 7};
    for (uint32_t i = 0; i < 4; i++) {
        struct world w;
        uint32_t got = 1;
        setup(&w, 10, 0);
        assert_int_equal(reserve(&w, 1, 5, sizes[i]), 0);
        loaded(&w, 1, 5, 50, 0);
        assert_int_equal(find(&w, DEC_DO_SEND, WIRE_TOKENS_MSG)->msg.tokens.first, 0);
        while (!find(&w, DEC_DO_SEND, WIRE_FINISH_MSG)) {
            assert_non_null(find(&w, DEC_DO_STEP, 0));
            struct dec_token t = {.id = 50 + got};
            step(&w, (struct dec_event){.kind = DEC_ON_STEPPED, .tokens = &t});
            assert_int_equal(find(&w, DEC_DO_SEND, WIRE_TOKENS_MSG)->msg.tokens.first, got);
            got++;
        }
        assert_int_equal(got, sizes[i]);
        assert_int_equal(find(&w, DEC_DO_SEND, WIRE_FINISH_MSG)->msg.finish.reason,
                         WIRE_FINISH_LENGTH);
        assert_null(find(&w, DEC_DO_STEP, 0));
        assert_int_equal(kv_pool_free_pages(w.pool), 10);
        teardown(&w);
    }
    struct world w;
    setup(&w, 10, 0);
    assert_int_equal(reserve(&w, 1, 5, 9), 0);
    loaded(&w, 1, 5, 1, 0);
    assert_null(find(&w, DEC_DO_SEND, WIRE_TOKENS_MSG));
    assert_int_equal(find(&w, DEC_DO_SEND, WIRE_FINISH_MSG)->msg.finish.n_output, 0);
    assert_int_equal(find(&w, DEC_DO_SEND, WIRE_FINISH_MSG)->msg.finish.stop_id, 1);
    teardown(&w);
}

/* KV-16: seven pages, four and three taken, both want one more.
 * The younger gives way, the older ends. */
static void test_dec_sched__the_youngest_gives_way_and_the_oldest_ends(void **state)
{
    (void)state;
    struct world w;
    struct dec_stats s;
    setup(&w, 7, 1);
    assert_int_equal(reserve(&w, 1, 15, 10), 0);
    assert_int_equal(reserve(&w, 2, 11, 10), 0);
    assert_int_equal(kv_pool_free_pages(w.pool), 0);
    loaded(&w, 1, 15, 50, 0);
    bool pushed = false, finished = false;
    for (uint32_t i = 0; i < 40 && !finished; i++) {
        struct dec_token t[4] = {{.id = 60}, {.id = 60}, {.id = 60}, {.id = 60}};
        struct dec_action *move = find(&w, DEC_DO_CANCEL_MOVE, 0);
        if (move) {
            assert_int_equal(move->ticket.id, 2);
            loaded(&w, 2, 0, 0, TOW_EFULL);
            struct dec_action *f = find(&w, DEC_DO_SEND, WIRE_FAILED_MSG);
            assert_int_equal(f->msg.failed.code, TOW_EFULL);
            pushed = true;
        } else {
            step(&w, (struct dec_event){.kind = DEC_ON_STEPPED, .tokens = t});
        }
        finished = find(&w, DEC_DO_SEND, WIRE_FINISH_MSG) != NULL;
    }
    assert_true(pushed && finished);
    dec_sched_stats(w.sched, &s);
    assert_int_equal(s.pushed_back, 1);
    assert_int_equal(s.finished, 1);
    assert_int_equal(kv_pool_free_pages(w.pool), 7);
    teardown(&w);
}

/* OP-03 on this side: what runs goes on, new work is refused, the limit ends the rest. */
static void test_dec_sched__drain_finishes_what_runs_until_its_limit(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 20, 0);
    assert_int_equal(reserve(&w, 1, 5, 3), 0);
    assert_int_equal(reserve(&w, 2, 5, 3), 0);
    loaded(&w, 1, 5, 50, 0);
    step(&w, (struct dec_event){.kind = DEC_ON_DRAIN, .limit_ms = 3});
    assert_int_equal(reserve(&w, 3, 5, 3), TOW_EDRAIN);
    struct dec_token t = {.id = 60};
    step(&w, (struct dec_event){.kind = DEC_ON_STEPPED, .tokens = &t});
    step(&w, (struct dec_event){.kind = DEC_ON_STEPPED, .tokens = &t});
    assert_non_null(find(&w, DEC_DO_SEND, WIRE_FINISH_MSG));
    assert_non_null(find(&w, DEC_DO_CANCEL_MOVE, 0)); /* 2 never loaded, the limit has passed */
    loaded(&w, 2, 0, 0, TOW_EDRAIN);
    assert_int_equal(find(&w, DEC_DO_SEND, WIRE_FAILED_MSG)->msg.failed.code, TOW_EDRAIN);
    assert_true(find(&w, DEC_DO_DRAINED, 0)->cut);
    assert_int_equal(kv_pool_free_pages(w.pool), 20);
    teardown(&w);
}

static struct wire_bytes ask(uint8_t shadow)
{
    static const uint32_t entries[2] = {0, 1};
    static uint8_t bytes[WIRE_MAX_CAPTURE];
    struct wire_writer w = {.data = bytes, .cap = sizeof bytes};
    struct wire_capture a = {
        .steps = WIRE_CAPTURE_ALL, .shadow = shadow, .max_steps = 2, .entries = {entries, 2}};
    wire_put_capture(&w, &a);
    assert_false(w.failed);
    return (struct wire_bytes){bytes, (uint32_t)w.len};
}

static void test_dec_sched__capture_that_cannot_be_kept_is_refused_by_name(void **state)
{
    (void)state;
    struct world w;
    struct tow_err err;
    setup(&w, 10, 0);
    dec_sched_free(w.sched);
    struct dec_sched_config cfg = {
        .page_tokens = 4, .max_context = 100, .max_batch = 4, .max_tickets = 16};
    assert_int_equal(dec_sched_new(&w.sched, &cfg, w.pool, &err), 0);
    an_ask = ask(1);
    assert_int_equal(reserve(&w, 1, 5, 1), TOW_EINVAL);
    struct wire_text note = find(&w, DEC_DO_SEND, WIRE_DENY_MSG)->msg.deny.note;
    assert_memory_equal(note.data, "capture.shadow", 14);
    an_ask = ask(0);
    an_ask.len--;
    assert_int_equal(reserve(&w, 2, 5, 1), TOW_EINVAL);
    note = find(&w, DEC_DO_SEND, WIRE_DENY_MSG)->msg.deny.note;
    assert_memory_equal(note.data, "capture:", 8);
    an_ask = ask(0); /* without other keys it needs nothing of the pages */
    assert_int_equal(reserve(&w, 3, 5, 1), 0);
    assert_int_equal(kv_pool_free_pages(w.pool), 8);
    loaded(&w, 3, 0, 0, TOW_ECANCEL);
    teardown(&w);
}

/* As without a capture, but each page with its companion. */
static void test_dec_sched__shadow_keys_double_every_page(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 10, 0);
    an_ask = ask(7);
    assert_int_equal(reserve(&w, 1, 11, 10), TOW_ETOOBIG); /* 6 pages, 12 with companions */
    an_ask = ask(7);
    assert_int_equal(reserve(&w, 2, 7, 10), 0); /* 8 tokens at first, 17 at most */
    assert_int_equal(find(&w, DEC_DO_EXPECT, 0)->n, 4);
    assert_int_equal(kv_pool_free_pages(w.pool), 6);
    loaded(&w, 2, 7, 50, 0);
    assert_int_equal(kv_pool_free_pages(w.pool), 6);
    /* Two pages stay free for its next ones, though it is one sequence. */
    assert_int_equal(reserve(&w, 3, 19, 1), TOW_EFULL);
    assert_int_equal(reserve(&w, 4, 15, 1), 0);
    assert_int_equal(kv_pool_free_pages(w.pool), 2);
    struct dec_token t = {.id = 60};
    step(&w, (struct dec_event){.kind = DEC_ON_STEPPED, .tokens = &t});
    assert_int_equal(kv_pool_free_pages(w.pool), 0); /* the ninth token begins a page */
    cancel(&w, (struct wire_ticket){4, 4});
    loaded(&w, 4, 0, 0, TOW_ECANCEL);
    for (int i = 0; i < 8; i++) {
        assert_null(find(&w, DEC_DO_SEND, WIRE_FINISH_MSG));
        step(&w, (struct dec_event){.kind = DEC_ON_STEPPED, .tokens = &t});
    }
    assert_non_null(find(&w, DEC_DO_SEND, WIRE_FINISH_MSG));
    assert_int_equal(kv_pool_free_pages(w.pool), 10);
    /* Its growth is counted no more. */
    assert_int_equal(reserve(&w, 5, 39, 1), 0);
    loaded(&w, 5, 0, 0, TOW_ECANCEL);
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

/* Also those of the step that drew the end of the answer; of a step that failed none. */
static void test_dec_sched__captured_rows_come_before_what_their_step_chose(void **state)
{
    (void)state;
    struct world w;
    setup(&w, 20, 0);
    an_ask = ask(0);
    assert_int_equal(reserve(&w, 1, 5, 9), 0);
    loaded(&w, 1, 5, 50, 0);
    for (uint32_t output = 1; output <= 3; output++) {
        struct dec_action *a = find(&w, DEC_DO_STEP, 0);
        struct work_capture *c = a->batch[0]->capture;
        assert_int_equal(a->batch[0]->n_output, output);
        if (work_capture_begin(c, output)) { /* two steps are asked for */
            find_row(c, 2);
            find_row(c, 4);
        }
        struct dec_token t = {.id = output == 3 ? 1 : 60};
        step(&w, (struct dec_event){.kind = DEC_ON_STEPPED, .tokens = &t});
        uint32_t n = 0;
        bool told = false;
        for (uint32_t i = 0; i < w.acts.n; i++) {
            const struct dec_action *x = &w.acts.items[i];
            if (x->kind != DEC_DO_SEND) continue;
            if (x->msg.type == WIRE_TOKENS_MSG || x->msg.type == WIRE_FINISH_MSG) told = true;
            if (x->msg.type != WIRE_CAPTURED_MSG) continue;
            assert_false(told);
            assert_int_equal(x->owner, 1);
            assert_int_equal(x->msg.captured.ticket.id, 1);
            assert_int_equal(x->msg.captured.step, output);
            assert_int_equal(x->msg.captured.layer, n++ ? 4 : 2);
        }
        assert_true(told);
        assert_int_equal(n, output <= 2 ? 2 : 0);
    }
    an_ask = ask(0);
    assert_int_equal(reserve(&w, 2, 5, 9), 0);
    loaded(&w, 2, 5, 50, 0);
    struct work_capture *c = find(&w, DEC_DO_STEP, 0)->batch[0]->capture;
    assert_non_null(work_capture_begin(c, 1));
    find_row(c, 2);
    step(&w, (struct dec_event){.kind = DEC_ON_STEPPED, .code = TOW_EDEVICE});
    assert_null(find(&w, DEC_DO_SEND, WIRE_CAPTURED_MSG));
    assert_non_null(find(&w, DEC_DO_SEND, WIRE_FAILED_MSG));
    assert_int_equal(kv_pool_free_pages(w.pool), 20);
    teardown(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dec_sched__cancel_of_a_move_is_repeated),
        cmocka_unit_test(test_dec_sched__cancelled_load_keeps_its_pages_until_the_mover_ended),
        cmocka_unit_test(test_dec_sched__bad_references_reach_nothing),
        cmocka_unit_test(test_dec_sched__what_can_never_fit_is_refused_for_good),
        cmocka_unit_test(test_dec_sched__small_answers_are_exact),
        cmocka_unit_test(test_dec_sched__the_youngest_gives_way_and_the_oldest_ends),
        cmocka_unit_test(test_dec_sched__drain_finishes_what_runs_until_its_limit),
        cmocka_unit_test(test_dec_sched__capture_that_cannot_be_kept_is_refused_by_name),
        cmocka_unit_test(test_dec_sched__shadow_keys_double_every_page),
        cmocka_unit_test(test_dec_sched__captured_rows_come_before_what_their_step_chose),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
