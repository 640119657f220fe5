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
                                   .reserve_tokens = reserve};
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

/* 0 when granted, else the code of the refusal. */
static int reserve(struct world *w, uint64_t id, uint32_t n_tokens, uint32_t max_tokens)
{
    static const uint32_t eos[1] = {1};
    struct wire_msg m = {.type = WIRE_RESERVE_MSG};
    m.reserve.ticket = (struct wire_ticket){id, id};
    m.reserve.n_tokens = n_tokens;
    m.reserve.max_tokens = max_tokens;
    m.reserve.eos = (struct wire_ids){eos, 1};
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
    assert_non_null(find(&w, DEC_DO_DRAINED, 0));
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
