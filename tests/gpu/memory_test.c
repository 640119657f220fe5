/* tests/gpu/memory_test.c - what a served model takes of the device is taken at start: after
 * warming up and the seal, passes of any shape up to the limits, with and without captures, take
 * nothing more and find no lack. TOW_TEST_DEVICE (cuda:0) is the device; exit 77 where there is
 * none.
 */
#include "tests/support/device.h"

#include "common/model/forward.h"
#include "common/model/sample.h"

enum { N_PASSES = 120, POOL = 400 };

struct served {
    const char *name;
    const char *checkpoint;
    enum kern_ik_fmt ik;
    struct model_warm limit;
};

struct world {
    struct model *m;
    struct kern_dev *dev;
    uint8_t *pages, *tails;
    float *logits;
};

static uint64_t rng;
static int64_t below(int64_t n)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return (int64_t)((rng >> 11) % (uint64_t)n);
}
/* 1 .. most; the ends as often as all between. */
static int64_t count(int64_t most)
{
    const int64_t how = below(4);
    return how == 0 ? 1 : how == 1 ? most : 1 + below(most);
}

static const char *spec(void)
{
    return strcmp(test_device(), "cpu") == 0 ? "cuda:0" : test_device();
}

static void open_world(struct world *w, const struct served *c)
{
    struct tow_err err = {0};
    char dir[256];
    uint64_t later;
    const char *root = getenv("TOWPATH_GOLDEN_DATA");
    snprintf(dir, sizeof dir, "%s/%s/checkpoint", root ? root : "tests/golden/data", c->checkpoint);
    const struct model_options opt = {.device = spec(),
                                      .n_threads = 2,
                                      .kv_fmt = KERN_KV_FP8,
                                      .ik_fmt = c->ik,
                                      .max_rows = c->limit.n_seqs * c->limit.n_rows};
    if (model_open(&w->m, dir, &opt, &err) < 0) fail_msg("%s", err.msg);
    w->dev = model_peek_dev(w->m);
    const struct kern_kv_layout *l = model_peek_layout(w->m);
    const uint64_t at_first = kern_dev_free_bytes(w->dev);
    if (model_warm(w->m, &c->limit, &later, &err) < 0) fail_msg("%s", err.msg);
    const uint64_t warm = kern_dev_free_bytes(w->dev);
    w->pages = kern_dev_alloc(w->dev, POOL * (size_t)l->page_bytes);
    w->tails = kern_dev_alloc(w->dev, (size_t)c->limit.n_seqs * (size_t)l->tail_bytes);
    w->logits = malloc((size_t)c->limit.n_seqs * (size_t)model_peek_weights(w->m)->shape.V *
                       sizeof *w->logits);
    assert_true(w->pages && w->tails && w->logits);
    const uint64_t before = kern_dev_free_bytes(w->dev);
    if (model_warm_steps(w->m, c->limit.n_seqs, w->pages, w->tails, &err) < 0)
        fail_msg("%s", err.msg);
    assert_string_equal(kern_dev_why(w->dev), ""); /* all steps are kept as graphs */
    const uint64_t steps = kern_dev_free_bytes(w->dev);
    assert_int_equal(kern_dev_seal(w->dev), 0);
    print_message("%s: passes took %.1f MiB, decode steps %.1f MiB of %.1f foretold\n", c->name,
                  ((double)at_first - (double)warm) / 0x1p20,
                  ((double)before - (double)steps) / 0x1p20, (double)later / 0x1p20);
    if (strncmp(spec(), "cuda:", 5) == 0) assert_true(before - steps <= later);
}

static void close_world(struct world *w)
{
    kern_dev_free(w->dev, w->pages);
    kern_dev_free(w->dev, w->tails);
    free(w->logits);
    model_close(w->m);
}

static void on_row(void *ctx, const struct model_capture_row *row)
{
    (void)row;
    ++*(int *)ctx;
}

/* n_seqs sequences of n_rows rows that end at context, over pages of the pool taken in turn. */
static int pass(struct world *w, int32_t n_seqs, int32_t n_rows, int64_t context, bool captured,
                struct tow_err *err)
{
    const struct kern_kv_layout *l = model_peek_layout(w->m);
    const bool shadowed = captured && l->shadow_bytes > 0 && below(2);
    const int64_t n_pages = kern_kv_pages_for(context, l->page_tokens) * (shadowed ? 2 : 1);
    const int32_t T = n_seqs * n_rows;
    struct kern_seq *seqs = calloc((size_t)n_seqs, sizeof *seqs);
    const struct model_capture **captures = calloc((size_t)n_seqs, sizeof *captures);
    int32_t *ids = calloc((size_t)T, sizeof *ids), *rows = calloc((size_t)n_seqs, sizeof *rows);
    uint32_t *table = malloc((size_t)n_pages * sizeof *table);
    struct model_draw *draws = calloc((size_t)n_seqs, sizeof *draws);
    int32_t entries[MODEL_CAPTURE_ENTRIES];
    int n_told = 0;
    const struct model_capture c = {.entries = entries,
                                    .n_entries = MODEL_CAPTURE_ENTRIES,
                                    .shadow = shadowed ? (1u << KERN_SHADOWS) - 1 : 0,
                                    .lists = true,
                                    .on_row = on_row,
                                    .ctx = &n_told};
    for (int i = 0; i < MODEL_CAPTURE_ENTRIES; i++) entries[i] = i;
    for (int64_t i = 0; i < n_pages; i++) table[i] = (uint32_t)(i % POOL);
    for (int32_t i = 0; i < n_seqs; i++) {
        rows[i] = (i + 1) * n_rows - 1;
        captures[i] = captured ? &c : NULL;
        seqs[i] = (struct kern_seq){.row0 = i * n_rows,
                                    .n_rows = n_rows,
                                    .pos0 = context - n_rows,
                                    .page_ids = table,
                                    .n_pages = (int32_t)n_pages,
                                    .tail = w->tails + i * l->tail_bytes,
                                    .topk = (int32_t)count(model_peek_options(w->m)->max_topk),
                                    .shadowed = shadowed};
    }
    for (int32_t i = 0; i < T; i++) ids[i] = (int32_t)below(model_peek_weights(w->m)->shape.V);
    const struct model_batch b = {.ids = ids,
                                  .T = T,
                                  .seqs = seqs,
                                  .n_seqs = n_seqs,
                                  .pages = w->pages,
                                  .n_pages = POOL,
                                  .logit_rows = rows,
                                  .n_logit_rows = n_seqs,
                                  .logits = w->logits,
                                  .draws = draws,
                                  .captures = captured ? captures : NULL};
    const int rc = model_forward(w->m, &b, err);
    if (rc == 0 && captured) assert_true(n_told > 0);
    free(seqs), free(captures), free(ids), free(rows), free(table), free(draws);
    return rc;
}

static void test_passes__take_no_memory_after_the_seal(void **state)
{
    const struct served *c = *state;
    struct world w = {0};
    struct tow_err err = {0};
    rng = 0x9e3779b97f4a7c15u;
    open_world(&w, c);
    const uint64_t before = kern_dev_free_bytes(w.dev);
    for (int i = 0; i < N_PASSES; i++) {
        const int32_t n_seqs = (int32_t)count(c->limit.n_seqs);
        const int32_t n_rows = (int32_t)count(c->limit.n_rows);
        const int64_t context = n_rows + below(c->limit.context - n_rows + 1);
        /* Captures are computed row by row: few of them, or this takes minutes. */
        const bool captured = i % 8 == 0 && n_seqs <= 4;
        if (pass(&w, n_seqs, n_rows, i % 5 ? context : c->limit.context, captured, &err) < 0)
            fail_msg("pass %d, %d sequences of %d rows at %lld: %s", i, n_seqs, n_rows,
                     (long long)context, err.msg);
    }
    if (strncmp(spec(), "cuda:", 5) == 0) assert_int_equal(kern_dev_free_bytes(w.dev), before);
    close_world(&w);
}

/* A pass beyond the limits is refused, in words, and the next within them runs. */
static void test_passes__beyond_what_was_planned_fail_alone(void **state)
{
    static const struct served little = {
        "little", "native", KERN_IK_BF16, {.n_seqs = 1, .n_rows = 512, .context = 4096}};
    struct world w = {0};
    struct tow_err err = {0};
    (void)state;
    if (strncmp(spec(), "cuda:", 5) != 0) skip();
    open_world(&w, &little);
    const uint64_t before = kern_dev_free_bytes(w.dev);
    if (pass(&w, 1, 512, 4096, false, &err) < 0) fail_msg("%s", err.msg);
    /* A page table far longer than any that was planned for. */
    assert_int_equal(pass(&w, 1, 16, 1 << 20, false, &err), TOW_ENOMEM);
    print_message("%s\n", err.msg);
    assert_true(strstr(err.msg, "planned at start") != NULL);
    if (pass(&w, 1, 512, 4096, true, &err) < 0) fail_msg("%s", err.msg);
    assert_int_equal(kern_dev_free_bytes(w.dev), before);
    close_world(&w);
}

int main(int argc, char **argv)
{
    const int absent = test_device_there(spec());
    if (absent) return absent;
    /* Lengths at which bf16 index keys once died in the field are among them. */
    static const struct served served[] = {
        {"prefill, fp4 keys", "native", KERN_IK_FP4, {1, 2048, 32768}},
        {"prefill, bf16 keys", "native", KERN_IK_BF16, {1, 2048, 65536}},
        {"decode, fp4 keys", "native", KERN_IK_FP4, {160, 1, 32768}},
        {"decode, bf16 keys", "native", KERN_IK_BF16, {128, 1, 32768}},
        {"decode, nvfp4 experts", "nvfp4", KERN_IK_FP8, {32, 1, 8192}}};
    enum { N = sizeof served / sizeof *served };
    struct CMUnitTest tests[N + 1] = {
        cmocka_unit_test(test_passes__beyond_what_was_planned_fail_alone)};
    for (int i = 0; i < N; i++)
        tests[1 + i] =
            (struct CMUnitTest){served[i].name, test_passes__take_no_memory_after_the_seal, NULL,
                                NULL, (void *)(uintptr_t)&served[i]};
    TEST_CHOOSE(argc, argv, tests);
    return cmocka_run_group_tests_name("gpu/memory", tests, NULL, NULL);
}
