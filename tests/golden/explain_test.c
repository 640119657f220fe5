/* `towpath-ctl explain` on a request made up for the native checkpoint: replayed as it is, all ways
 * are identical; and each planted fault fails exactly the rows that fit it, by name. A fault is one
 * op of the table replaced, a page changed after it has landed, or another token in the record. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/json.h"
#include "deploy/ctl/explain.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char native[] = "tests/golden/data/native/checkpoint";
enum { N_PROMPT = 530, N_OUTPUT = 6, CHUNK = 96, VOCAB = 512 };

static struct kern_ops good, faulty;
static int32_t prompt[N_PROMPT], output[N_OUTPUT];

/* ------------------------------------------------------------------ the record */

static const char *facts[][2] = {{"layout.kv_dtype", "fp8"},
                                 {"layout.index_keys", "fp4"},
                                 {"numerics.mode", "deployed"},
                                 {"numerics.index_topk", "16"},
                                 {"numerics.expert_activations", "w4a8"},
                                 {"free.products", "bf16"}};
static struct text_record_worker workers[2] = {
    {.name = "p", .role = "prefill", .chunk_tokens = CHUNK, .facts = facts, .n_facts = 6},
    {.name = "d", .role = "decode", .facts = facts, .n_facts = 6}};
static struct text_record_attempt attempts[2] = {{0, 0, 1}, {0, 0, 1}};
static struct text_record_ids prompts[1] = {{prompt, N_PROMPT}};
static struct text_record_choice choice = {.seed = 11,
                                           .finish = "length",
                                           .output = {output, N_OUTPUT},
                                           .attempts = attempts,
                                           .n_attempts = 1};
static struct text_record record = {.id = "cmpl-1",
                                    .model = "native",
                                    .n_vocab = VOCAB,
                                    .max_tokens = N_OUTPUT,
                                    .temperature = 0.8f,
                                    .top_p = 1,
                                    .repetition_penalty = 1,
                                    .prompts = prompts,
                                    .n_prompts = 1,
                                    .workers = workers,
                                    .n_workers = 2,
                                    .choices = &choice,
                                    .n_choices = 1};

static struct ctl_explain settings(void)
{
    return (struct ctl_explain){
        .model_dir = native, .device = "cpu", .n_threads = 2, .record = &record};
}

static void run(const struct ctl_explain *e, struct ctl_explain_report *r)
{
    struct tow_err err = {0};
    if (ctl_explain_run(e, r, &err) < 0) fail_msg("%s", err.msg);
}

/* The ids that the checkpoint draws, one more with each replay. */
static int make_record(void **state)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    (void)state;
    for (int32_t i = 0; i < N_PROMPT; i++) prompt[i] = (i * 37 + i / 7 * 11) % VOCAB;
    e.only = "again";
    for (int32_t i = 0; i < N_OUTPUT; i++) {
        choice.output.n = (uint32_t)i + 1;
        run(&e, &r);
        if (r.drawn_step >= 0) output[r.drawn_step] = r.drawn;
    }
    return 0;
}

static const struct ctl_explain_row *row_of(const struct ctl_explain_report *r, const char *name)
{
    for (int32_t i = 0; i < r->n_rows; i++)
        if (!strcmp(r->rows[i].name, name)) return &r->rows[i];
    fail_msg("no row %s", name);
    return NULL;
}

/* Names of the failed rows, in order, each followed by a space. */
static void explain(const struct ctl_explain *e, struct ctl_explain_report *r, char failed[512])
{
    int32_t n = 0;
    run(e, r);
    failed[0] = 0;
    for (int32_t i = 0; i < r->n_rows; i++) {
        const struct ctl_explain_row *row = &r->rows[i];
        if (!row->must || row->skipped || (row->n_differ == 0 && !row->note[0])) continue;
        n++;
        strncat(failed, row->name, 511 - strlen(failed));
        strncat(failed, " ", 511 - strlen(failed));
    }
    assert_int_equal(n, r->n_failed);
}

/* ------------------------------------------------------------------ faults in ops */

/* One head of our newest row is off by a bf16 step whenever the call looks as `odd` says. */
static void step_output(const struct kern_attention *p, bool odd)
{
    const int64_t row = p->n_seqs == 1 ? p->T - 1 : p->T - 2; /* a companion's row is the last */
    for (int32_t i = 0; odd && i < p->layout->spec.head_dim; i++)
        ((uint16_t *)p->o)[((row + 1) * p->H - 1) * p->layout->spec.head_dim + i] ^= 16;
}
static int attention_beside(struct kern_stream *s, const struct kern_attention *p)
{
    int rc = good.attention(s, p);
    step_output(p, p->n_seqs > 1);
    return rc;
}
static int attention_of_64(struct kern_stream *s, const struct kern_attention *p)
{
    int rc = good.attention(s, p);
    step_output(p, p->n_seqs == 1 && p->T == 64);
    return rc;
}
/* Now and then a single row gets another answer. */
static int n_calls;
static int attention_by_chance(struct kern_stream *s, const struct kern_attention *p)
{
    int rc = good.attention(s, p);
    if (p->T == 1 && p->n_seqs == 1) step_output(p, n_calls++ % 7 == 6);
    return rc;
}

/* attend, by the ops it is made of (same bits), of which attention has the fault. */
static int attend_apart(struct kern_stream *s, const struct kern_attend *p)
{
    int rc = faulty.attention(s, &p->attention);
    if (rc == 0) rc = good.heads_rope(s, &p->back);
    if (rc == 0) rc = good.linear(s, &p->wo_a);
    return rc == 0 ? good.linear(s, &p->wo_b) : rc;
}

#define FAULT(fn, op, with)                                                                        \
    static const struct kern_ops *fn(const struct kern_ops *of_device)                             \
    {                                                                                              \
        good = faulty = *of_device;                                                                \
        faulty.op = with;                                                                          \
        faulty.attend = attend_apart;                                                              \
        return &faulty;                                                                            \
    }
FAULT(wrap_beside, attention, attention_beside)
FAULT(wrap_chunk, attention, attention_of_64)
FAULT(wrap_chance, attention, attention_by_chance)

/* ------------------------------------------------------------------ faults in pages */

static uint8_t *first_page;
static int n_moved;
/* After the hand-over, which has all three pages of the prompt, page 0 holds what page 2 held. */
static void stale_page(void *ctx, uint32_t page, uint8_t *bytes, size_t n)
{
    (void)ctx;
    if (page == 0) first_page = bytes;
    if (page == 2) memcpy(first_page, bytes, n);
    n_moved++;
}

/* ------------------------------------------------------------------ tests */

static void test_explain__without_a_fault_every_way_is_identical(void **state)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    struct tow_buf text;
    struct json *root = NULL;
    char failed[512];
    (void)state;
    explain(&e, &r, failed);
    assert_string_equal(failed, "");
    assert_int_equal(r.drawn_step, -1);
    assert_true(ctl_explain_good(&r));
    static const char *const names[] = {"again", "chunk.7",  "chunk.64", "chunk.256", "chunk.512",
                                        "batch", "handover", "prefix",   "resume.3",  "threads.1"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct ctl_explain_row *row = row_of(&r, names[i]);
        assert_true(row->must && !row->skipped && row->n_logits >= 3 * VOCAB);
    }
    /* Which keys select, of 134 entries 16, does matter; so does their number. */
    assert_true(row_of(&r, "index.bf16")->n_differ > 0);
    assert_true(row_of(&r, "topk.32")->n_differ > 0 && row_of(&r, "topk.64")->n_differ > 0);
    assert_true(row_of(&r, "topk.133")->n_differ > 0);
    assert_true(row_of(&r, "topk.133")->max_abs > 0);

    tow_buf_init(&text, 0);
    ctl_explain_json(&e, &r, &text);
    assert_int_equal(json_parse(&root, text.data, text.len, NULL, NULL), 0);
    json_free(root);
    assert_non_null(strstr(text.data, "\"good\": true"));
    assert_non_null(strstr(text.data,
                           "none of 10 other ways to compute them (the same again, chunks, "
                           "company, hand-over, reused prefix, resumption, threads) "
                           "changes one bit of "));
    assert_non_null(strstr(text.data, "Disaggregation is ruled out"));
    assert_null(strstr(text.data, "Not run"));
    assert_null(strstr(text.data, "not tried"));
    tow_buf_fini(&text);
}

/* As on a device with memory of its own. */
static void test_explain__through_a_mirror_every_way_is_identical(void **state)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    char failed[512];
    (void)state;
    e.device = "mirror:cpu";
    e.only = "again,batch,handover,prefix,threads";
    explain(&e, &r, failed);
    assert_string_equal(failed, "");
    assert_true(row_of(&r, "threads")->skipped);
    assert_true(row_of(&r, "handover")->n_logits > 0);
    assert_true(ctl_explain_good(&r));
}

static void verdict_of(const char *only, struct tow_buf *text)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    e.only = only;
    run(&e, &r);
    tow_buf_init(text, 0);
    ctl_explain_verdict(&r, NULL, NULL, text);
}

static void test_explain__the_verdict_claims_only_what_was_run(void **state)
{
    struct tow_buf text;
    const uint32_t n_prompt = prompts[0].n;
    (void)state;
    verdict_of("chunk.64", &text);
    assert_string_equal(
        text.data,
        "The answer is the model's own: one process draws the same 6 tokens, and another way to "
        "compute them (chunks) changes not one bit of 3072 logits. Not run, so not ruled out: the "
        "same again, company, hand-over, reused prefix, resumption, threads. Settings not tried: "
        "types of index keys, types of keys and entries, top-k.\n");
    tow_buf_fini(&text);
    verdict_of("again,hand", &text);
    assert_non_null(strstr(text.data,
                           "none of 2 other ways to compute them (the same again, "
                           "hand-over) changes one bit of 6144 logits. Disaggregation is "
                           "ruled out. Not run, so not ruled out: chunks, company, "));
    tow_buf_fini(&text);
    /* No page is full and every entry is selected: two rows that cannot be run. */
    prompts[0].n = 20;
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    int32_t kept[N_OUTPUT];
    memcpy(kept, output, sizeof kept);
    e.only = "prefix,topk";
    for (int i = 0; i <= N_OUTPUT; i++) { /* what the checkpoint draws after that prompt */
        run(&e, &r);
        if (r.drawn_step >= 0) output[r.drawn_step] = r.drawn;
    }
    verdict_of("prefix,topk", &text);
    assert_non_null(strstr(text.data, "draws the same 6 tokens. Not run, so not ruled out: "));
    assert_non_null(strstr(text.data, "reused prefix (the prompt fills no page of "));
    assert_non_null(strstr(text.data, "top-k (all 6 entries are selected already)"));
    assert_null(strstr(text.data, "changes a token either"));
    assert_null(strstr(text.data, "ruled out."));
    tow_buf_fini(&text);
    memcpy(output, kept, sizeof kept);
    prompts[0].n = n_prompt;
}

static void test_explain__only_takes_beginnings_of_rows_there_are(void **state)
{
    static const struct {
        const char *only, *msg;
    } wrong[] = {
        {"bogus", "--only: no row begins with 'bogus'; rows are: again, chunk, batch, handover, "
                  "prefix, resume, threads, index, kv, topk"},
        {"chunk,handovr", "no row begins with 'handovr'"},
        {"chunks", "no row begins with 'chunks'"},
        {"", "no row begins with ''"},
        {"chunk,", "no row begins with ''"},
        {"chunk.9", "no row of this record begins with 'chunk.9'; rows are: again, chunk.7, "
                    "chunk.64, chunk.256, chunk.512, batch, handover, prefix, resume.3, threads.1, "
                    "index.fp8, "},
        {"index.fp4", "no row of this record begins with 'index.fp4'"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct ctl_explain e = settings();
        struct ctl_explain_report r;
        struct tow_err err = {0};
        e.only = wrong[i].only;
        assert_int_equal(ctl_explain_run(&e, &r, &err), TOW_ECONFIG);
        if (!strstr(err.msg, wrong[i].msg)) fail_msg("'%s' lacks '%s'", err.msg, wrong[i].msg);
    }
    static const char *const right[] = {"again", "c", "chunk.7", "topk.32,ha", "resume.3"};
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        struct tow_err err = {0};
        assert_int_equal(ctl_explain_check_only(right[i], &err), 0);
    }
}

static void test_explain__a_planted_fault_fails_exactly_the_rows_that_fit_it(void **state)
{
    static const struct {
        const char *what, *only;
        const struct kern_ops *(*wrap)(const struct kern_ops *);
        const char *failed, *verdict;
    } faults[] = {
        {"a row in company differs", "again,chunk,batch,handover,prefix,resume,threads",
         wrap_beside, "batch ", "batching changes the answer (batch: "},
        {"a pass of 64 rows differs", "again,chunk,batch,handover,prefix,resume,threads",
         wrap_chunk, "chunk.64 ", "chunking changes the answer (chunk.64: "},
        {"the same again differs", "again", wrap_chance, "again ", "differs from itself"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct ctl_explain e = settings();
        struct ctl_explain_report r;
        struct tow_buf text;
        char failed[512];
        n_calls = 0;
        e.wrap_ops = faults[i].wrap;
        e.only = faults[i].only;
        explain(&e, &r, failed);
        if (strcmp(failed, faults[i].failed) != 0)
            fail_msg("%s: failed '%s', expected '%s'", faults[i].what, failed, faults[i].failed);
        assert_false(ctl_explain_good(&r));
        tow_buf_init(&text, 0);
        ctl_explain_table(&e, &r, NULL, NULL, &text);
        if (!strstr(text.data, faults[i].verdict))
            fail_msg("no '%s':\n%s", faults[i].verdict, text.data);
        tow_buf_fini(&text);
    }
}

static void test_explain__a_stale_page_after_the_hand_over_is_found(void **state)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    struct tow_buf text;
    char failed[512];
    (void)state;
    n_moved = 0;
    e.on_page_landed = stale_page;
    explain(&e, &r, failed);
    assert_int_equal(n_moved, 3 + 2); /* the hand-over's pages, and those of the prefix */
    assert_string_equal(failed, "handover ");
    const struct ctl_explain_row *row = row_of(&r, "handover");
    assert_true(row->n_differ > 0);
    assert_int_equal(row->first_step, 1); /* prefill draws the first token itself */
    assert_non_null(strstr(row->note, "page 0 of the sequence differs"));
    tow_buf_init(&text, 0);
    ctl_explain_verdict(&r, NULL, NULL, &text);
    assert_non_null(strstr(text.data, "FAIL: disaggregation changes the answer (handover: "));
    tow_buf_fini(&text);
}

/* The cluster gave another token: one process does not draw it, and says where. */
static void test_explain__a_token_that_is_not_the_models_is_found(void **state)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    const int32_t was = output[2];
    (void)state;
    e.only = "again";
    output[2] = (was + 1) % VOCAB;
    run(&e, &r);
    output[2] = was;
    assert_false(ctl_explain_good(&r));
    assert_int_equal(r.n_failed, 0);
    assert_int_equal(r.drawn_step, 2);
    assert_int_equal(r.recorded, (was + 1) % VOCAB);
    assert_int_equal(r.drawn, was);
    assert_true(isfinite(r.recorded_logit) && isfinite(r.drawn_logit));
    /* No audit finds a damaged file of weights: their bytes are to be compared. */
    struct tow_buf text;
    tow_buf_init(&text, 0);
    ctl_explain_verdict(&r, NULL, NULL, &text);
    assert_non_null(strstr(text.data, "their files of the checkpoint (sha256sum of each"));
    tow_buf_fini(&text);
}

/* An end that the model did not draw is one too. */
static void test_explain__an_end_is_a_token(void **state)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    const int32_t end[1] = {output[N_OUTPUT - 1]}, other[1] = {(output[N_OUTPUT - 1] + 1) % VOCAB};
    (void)state;
    e.only = "again";
    choice.output.n = N_OUTPUT - 1;
    choice.finish = "stop";
    record.eos = (struct text_record_ids){end, 1};
    run(&e, &r);
    assert_int_equal(r.n_steps, N_OUTPUT);
    assert_true(ctl_explain_good(&r));
    record.eos.ids = other;
    run(&e, &r);
    assert_int_equal(r.drawn_step, N_OUTPUT - 1);
    assert_int_equal(r.recorded, -1);
    choice.output.n = N_OUTPUT;
    choice.finish = "length";
    record.eos = (struct text_record_ids){0};
}

/* Tokens are compared to the end, logits of the first steps, or as far as a recorded loss. */
static void test_explain__what_lies_behind_the_steps_compared_is_told(void **state)
{
    enum { LONG = 70, WRONG = 67, LOSS = 66 };
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    struct tow_buf text;
    static int32_t answer[LONG];
    (void)state;
    prompts[0].n = 5;
    choice.output.ids = answer;
    e.only = "prefix"; /* which such a prompt has none of: the baseline alone is run */
    for (uint32_t n = 1; n <= LONG; n++) {
        choice.output.n = n;
        run(&e, &r);
        if (r.drawn_step >= 0) answer[r.drawn_step] = r.drawn;
    }
    run(&e, &r);
    assert_true(ctl_explain_good(&r) && r.n_drawn == LONG && r.n_steps == CTL_EXPLAIN_STEPS);
    answer[WRONG] ^= 1;
    run(&e, &r);
    assert_int_equal(r.drawn_step, WRONG);
    assert_false(ctl_explain_good(&r));
    answer[WRONG] ^= 1;

    e.only = "resume";
    choice.n_attempts = 2;
    attempts[1].first_output = LOSS;
    run(&e, &r);
    assert_int_equal(r.n_steps, LONG);
    assert_int_equal(row_of(&r, "resume.66")->n_logits, (LONG - LOSS) * VOCAB);
    e.max_steps = 64;
    run(&e, &r);
    assert_string_equal(row_of(&r, "resume")->note,
                        "the loss at output 66 lies behind the 64 compared");
    tow_buf_init(&text, 0);
    ctl_explain_table(&e, &r, NULL, NULL, &text);
    assert_non_null(strstr(text.data, "PASS  the first 64 of 70 drawn again"));
    assert_non_null(
        strstr(text.data, "Of the first 64 of 70 tokens the answer is the model's own"));
    assert_non_null(strstr(text.data, "resumption (the loss at output 66 lies behind"));
    tow_buf_fini(&text);
    attempts[1].first_output = 0;
    choice.n_attempts = 1;
    choice.output = (struct text_record_ids){output, N_OUTPUT};
    prompts[0].n = N_PROMPT;
}

static void test_explain__other_products_are_told(void **state)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    (void)state;
    e.only = "again";
    run(&e, &r);
    assert_string_equal(r.note, "");
    facts[5][1] = "fp8";
    run(&e, &r);
    assert_string_equal(r.note,
                        "d ran with --products fp8: the replay has bf16's sums, which are closer");
    facts[5][1] = "bf16";
}

static void test_explain__what_cannot_be_replayed_is_refused(void **state)
{
    struct ctl_explain e = settings();
    struct ctl_explain_report r;
    struct tow_err err = {0};
    (void)state;
    e.choice = 1;
    assert_int_equal(ctl_explain_run(&e, &r, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "the record has one choice, 0"));
    e.choice = 0;
    choice.output.n = 0;
    assert_int_equal(ctl_explain_run(&e, &r, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "no output"));
    choice.output.n = N_OUTPUT;
    output[0] += 1 << 20;
    assert_int_equal(ctl_explain_run(&e, &r, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "the model has 0.."));
    output[0] -= 1 << 20;
    facts[0][1] = "fp16";
    assert_int_equal(ctl_explain_run(&e, &r, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "layout.kv_dtype of d: 'fp16' is none of fp8, bf16, f32"));
    facts[0][1] = "fp8";
    facts[2][1] = "exact";
    assert_int_equal(ctl_explain_run(&e, &r, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "exact goes with f32"));
    facts[2][1] = "deployed";
    facts[3][1] = "0";
    assert_int_equal(ctl_explain_run(&e, &r, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "is not in 1..4096"));
    facts[3][1] = "16";
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_explain__without_a_fault_every_way_is_identical),
        cmocka_unit_test(test_explain__through_a_mirror_every_way_is_identical),
        cmocka_unit_test(test_explain__the_verdict_claims_only_what_was_run),
        cmocka_unit_test(test_explain__only_takes_beginnings_of_rows_there_are),
        cmocka_unit_test(test_explain__a_planted_fault_fails_exactly_the_rows_that_fit_it),
        cmocka_unit_test(test_explain__a_stale_page_after_the_hand_over_is_found),
        cmocka_unit_test(test_explain__a_token_that_is_not_the_models_is_found),
        cmocka_unit_test(test_explain__an_end_is_a_token),
        cmocka_unit_test(test_explain__what_lies_behind_the_steps_compared_is_told),
        cmocka_unit_test(test_explain__other_products_are_told),
        cmocka_unit_test(test_explain__what_cannot_be_replayed_is_refused),
    };
    return cmocka_run_group_tests(tests, make_record, NULL);
}
