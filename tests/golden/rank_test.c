/* Ranks of index entries against float64.
 *
 * Every entry of every recorded row is ranked in every layer with an indexer: by the keys that
 * select and, in deployed mode, by shadow keys of each type. A rank must be one more than the
 * number of larger scores in float64; scores nearer to each other than the tolerance may stand
 * either way. Twice: from the queries, weights and stored keys of the pass itself, where little is
 * allowed, and from the goldens' scores, where a deployed pass has all its own rounding behind it.
 * The prompt runs in chunks, in one go, and across a hand-over into other pages: the ranks must be
 * the same to the last bit. */
#include "tests/support/device.h"
#include "tests/support/golden.h"
#include "tests/support/golden_cases.h"

#include "common/base/err.h"
#include "common/model/forward.h"
#include "kernels/numeric.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How far a score may be from its golden: in exact mode as the goldens' README says; in deployed
 * mode by the rms of the row's scores. There a code of a quantizer that falls the other way moves a
 * score by several percent (e2m1 codes are up to a half apart), so the share of scores that moved
 * at all, and of ranks, is bounded, too. The CPU moves up to 13 % of the scores and 8 % of the
 * ranks, no score beyond the tolerance. A CUDA device's matrix unit keeps fewer bits of a sum on
 * the way, so more codes fall: on an H200 up to 20.004 % of the scores and 12.4 % of the ranks
 * move, and 2 scores of 1,352 (twice: NVFP4 experts, 300 tokens) by up to 2.2 tolerances. Its sums
 * from equal inputs, and exact mode, are held to what the CPU is. */
#define EXACT_TOL    2e-4
#define DEPLOYED_TOL 0.2
#define MOVED        1e-3                     /* of the row's rms */
#define MOVED_SCORES (on_cpu() ? 0.20 : 0.25) /* with fp8 products any may move */
#define MOVED_RANKS  (test_products_fp8() ? 0.85 : on_cpu() ? 0.12 : 0.15)
#define FAR_SCORES   (test_products_fp8() ? 0.35 : on_cpu() ? 0.0 : 0.005)
/* From the same inputs: float32 sums of 128 products, by the sum of their absolute values. */
#define SUM_TOL 2e-6

enum { MAX_LAYERS = 8, MAX_POSITIONS = 32, MAX_ENTRIES = 160, TYPES = 1 + KERN_SHADOWS };

/* What was captured of one layer at one recorded position; types: own keys, then shadows. */
struct seen {
    int n;
    struct kern_rank ranks[TYPES][MAX_ENTRIES];
    float kth[TYPES], next[TYPES];
};

struct tally {
    int ranks, moved_ranks, most, moved_scores;
    int far;      /* scores beyond the tolerance */
    double worst; /* score against reference, in tolerances */
};

struct run {
    const struct golden_case *c;
    struct model *m;
    struct golden *g, *others; /* scores by fp8 and bf16 keys; NULL: none for this length */
    const int32_t *prompt, *positions;
    int P, topk;
    bool shadowed;
    uint8_t *pages, *tail; /* device */
    uint8_t *seen_pages;   /* what check_sums() has read of them */
    uint32_t *ids;
    int n_ids;
    int32_t all[MAX_ENTRIES];
    int at;             /* index of the position that is being captured */
    float *q, *weights; /* of the row that is being captured; NULL until they were seen */
    int64_t n_q, n_weights;
    struct tally sums; /* ranks against float64 sums of the same inputs */
    struct seen seen[MAX_LAYERS][MAX_POSITIONS];
    int n_rows;
};

static double rms(const double *x, int n)
{
    double sq = 0;
    for (int i = 0; i < n; i++) sq += x[i] * x[i];
    return n ? sqrt(sq / n) : 0;
}

static bool on_cpu(void)
{
    return strcmp(test_device(), "cpu") == 0;
}

/* n ranks against the reference's scores, which are known to tol, but for those that are far. */
static void check_ranks(const char *what, const struct kern_rank *got, int n, const double *ref,
                        double tol, struct tally *t)
{
    const double moved = MOVED * rms(ref, n);
    int far = 0;
    for (int e = 0; e < n; e++) far += !(fabs((double)got[e].score - ref[e]) <= tol);
    t->far += far;
    for (int e = 0; e < n; e++) {
        int before = 0, near = 0, rank = 1;
        for (int o = 0; o < n; o++) {
            const double d = ref[o] - ref[e];
            if (o == e) continue;
            rank += d > 0 || (d == 0 && o < e);
            before += d > 2 * tol;
            near += fabs(d) <= 2 * tol;
        }
        const double off = fabs((double)got[e].score - ref[e]);
        if (!(off <= tol) && FAR_SCORES == 0)
            fail_msg("%s: entry %d: score %.9g, reference %.9g", what, e, (double)got[e].score,
                     ref[e]);
        if (off <= tol && (got[e].rank < 1 + before - far || got[e].rank > 1 + before + near + far))
            fail_msg("%s: entry %d: rank %d, reference %d (%d..%d)", what, e, got[e].rank, rank,
                     1 + before - far, 1 + before + near + far);
        t->ranks++;
        t->moved_scores += off > moved;
        t->moved_ranks += got[e].rank != rank;
        if (abs(got[e].rank - rank) > t->most) t->most = abs(got[e].rank - rank);
        if (tol > 0 && off / tol > t->worst) t->worst = off / tol;
    }
}

/* The border lies between the scores of the ranks on both sides of it. */
static void check_border(const struct run *r, const struct seen *k, int type)
{
    const int last = k->n < r->topk ? k->n : r->topk;
    for (int e = 0; e < k->n; e++) {
        const struct kern_rank *got = &k->ranks[type][e];
        if (got->rank == last) assert_true(k->kth[type] == got->score);
        if (got->rank == r->topk + 1) assert_true(k->next[type] == got->score);
    }
    assert_int_equal(isnan(k->kth[type]), k->n == 0);
    assert_int_equal(isnan(k->next[type]), k->n <= r->topk);
}

static const char *root(void)
{
    const char *r = getenv("TOWPATH_GOLDEN_DATA");
    return r ? r : "tests/golden/data";
}

static void keep(struct seen *k, int type, const struct model_ranks *r, int n)
{
    memcpy(k->ranks[type], r->ranks, (size_t)n * sizeof *r->ranks);
    k->kth[type] = r->kth;
    k->next[type] = r->next;
}

/* Keeps the last row of what the scores are made of. */
static void on_tensor(void *ctx, int32_t layer, const char *name, enum model_elem elem,
                      const void *data, int64_t rows, int64_t width)
{
    struct run *r = ctx;
    const bool q = !strcmp(name, "index_q");
    (void)layer;
    if (!q && strcmp(name, "index_weights") != 0) return;
    float *to = realloc(q ? r->q : r->weights, (size_t)width * sizeof *to);
    assert_non_null(to);
    for (int64_t i = 0; i < width; i++) {
        const int64_t at = (rows - 1) * width + i;
        to[i] = elem == MODEL_ELEM_BF16 ? kern_bf16_decode(((const uint16_t *)data)[at])
                                        : ((const float *)data)[at];
    }
    *(q ? &r->q : &r->weights) = to;
    *(q ? &r->n_q : &r->n_weights) = width;
}

/* The row's own ranks against float64 sums of its query, weights and stored keys. */
static void check_sums(struct run *r, int layer, const struct seen *k)
{
    const struct kern_kv_layout *l = model_peek_layout(r->m);
    const struct kern_kv_layer *y = &l->layer[layer];
    const int w = l->spec.index_dim, heads = (int)r->n_weights;
    double ref[MAX_ENTRIES], size[MAX_ENTRIES];
    float key[256];
    char what[128];
    assert_true(w <= 256 && r->n_q == (int64_t)heads * w);
    assert_int_equal(kern_stream_read(kern_dev_stream(model_peek_dev(r->m)), r->seen_pages,
                                      r->pages, (size_t)r->n_ids * (size_t)l->page_bytes),
                     0);
    for (int e = 0; e < k->n; e++) {
        const uint8_t *page =
            r->seen_pages + r->ids[e / y->per_page * (r->shadowed ? 2 : 1)] * l->page_bytes;
        kern_ik_load(l->spec.ik_fmt, page + y->index_off, y->per_page, e % y->per_page, key, w);
        ref[e] = size[e] = 0;
        for (int h = 0; h < heads; h++) {
            double dot = 0, sum = 0, weight = (double)r->weights[h] / sqrt((double)w * heads);
            for (int i = 0; i < w; i++) {
                const double x = (double)r->q[h * w + i] * (double)key[i];
                dot += x, sum += fabs(x);
            }
            ref[e] += weight * fmax(0, dot);
            size[e] += fabs(weight) * sum;
        }
    }
    snprintf(what, sizeof what, "%s %s-%d, own sums, keys %d, layer %d, position %d", r->c->ckpt,
             r->c->variant, r->c->length, (int)r->c->ik, layer, r->positions[r->at]);
    check_ranks(what, k->ranks[0], k->n, ref, SUM_TOL * rms(size, k->n), &r->sums);
}

static void on_row(void *ctx, const struct model_capture_row *row)
{
    struct run *r = ctx;
    struct seen *k = &r->seen[row->layer][r->at];
    assert_int_equal(row->n_visible, (r->positions[r->at] + 1) / 4);
    assert_int_equal(row->n_entries, row->n_visible);
    assert_int_equal(row->topk, r->topk);
    k->n = row->n_entries;
    keep(k, 0, &row->own, k->n);
    for (int s = 0; r->shadowed && s < KERN_SHADOWS; s++) keep(k, 1 + s, &row->shadows[s], k->n);
    /* Selected are exactly the entries of a rank up to top-k. */
    int at = 0;
    for (int e = 0; e < k->n; e++) {
        if (k->ranks[0][e].rank > r->topk) continue;
        assert_true(at < row->n_list);
        assert_int_equal(row->list[at++], e);
    }
    assert_int_equal(at, row->n_list);
    check_sums(r, row->layer, k);
    r->n_rows++;
}

/* Pages and a tail, full of poison, the pages in another order for another seed. */
static void take_pages(struct run *r, int seed)
{
    const struct kern_kv_layout *l = model_peek_layout(r->m);
    r->n_ids = (int)kern_kv_pages_for(r->c->length, l->page_tokens) * (r->shadowed ? 2 : 1);
    size_t bytes = (size_t)r->n_ids * (size_t)l->page_bytes;
    r->pages = test_poisoned(model_peek_dev(r->m), bytes);
    r->tail = test_poisoned(model_peek_dev(r->m), (size_t)l->tail_bytes);
    assert_non_null(r->seen_pages = malloc(bytes));
    assert_non_null(r->ids = malloc((size_t)r->n_ids * sizeof *r->ids));
    for (int i = 0; i < r->n_ids; i++)
        r->ids[i] = (uint32_t)(seed % 2 ? r->n_ids - 1 - i : (i + seed / 2) % r->n_ids);
}

static void give_pages(struct run *r)
{
    kern_dev_free(model_peek_dev(r->m), r->pages);
    kern_dev_free(model_peek_dev(r->m), r->tail);
    free(r->seen_pages);
    free(r->ids);
}

static void hand_over(struct run *r, int seed)
{
    const struct kern_kv_layout *l = model_peek_layout(r->m);
    struct kern_stream *s = kern_dev_stream(model_peek_dev(r->m));
    struct run from = *r;
    int rc = 0;
    take_pages(r, seed);
    for (int i = 0; i < r->n_ids && rc == 0; i++)
        rc = kern_stream_copy(s, r->pages + r->ids[i] * l->page_bytes,
                              from.pages + from.ids[i] * l->page_bytes, (size_t)l->page_bytes);
    if (rc == 0) rc = kern_stream_copy(s, r->tail, from.tail, (size_t)l->tail_bytes);
    if (rc == 0) rc = kern_stream_sync(s);
    assert_int_equal(rc, 0);
    give_pages(&from);
}

/* Runs the prompt up to the recorded position `at`, rows from `pos` on. */
static void pass(struct run *r, int pos, int n)
{
    struct tow_err err = {0};
    for (r->at = 0; r->at < r->P && r->positions[r->at] < pos + n - 1;) r->at++;
    const struct model_capture capture = {.entries = r->all,
                                          .n_entries = MAX_ENTRIES,
                                          .shadow = r->shadowed ? (1u << KERN_SHADOWS) - 1 : 0,
                                          .lists = true,
                                          .on_row = on_row,
                                          .ctx = r};
    const struct model_capture *captures =
        r->at < r->P && r->positions[r->at] == pos + n - 1 ? &capture : NULL;
    struct model_tap tap = {.on_tensor = on_tensor, .ctx = r};
    const struct kern_seq q = {.n_rows = n,
                               .pos0 = pos,
                               .page_ids = r->ids,
                               .n_pages = r->n_ids,
                               .tail = r->tail,
                               .topk = r->topk,
                               .shadowed = r->shadowed};
    const struct model_batch b = {.ids = r->prompt + pos,
                                  .T = n,
                                  .seqs = &q,
                                  .n_seqs = 1,
                                  .pages = r->pages,
                                  .n_pages = (uint32_t)r->n_ids,
                                  .tap = captures ? &tap : NULL,
                                  .captures = &captures};
    if (model_forward(r->m, &b, &err) < 0) fail_msg("%s", err.msg);
}

/* Chunks end at recorded positions, too, so that each gives ranks; 0: one go, which gives the
 * last. Every plan but the first hands over after half of the prompt if asked. */
static void prefill(struct run *r, int chunk, bool handed_over)
{
    const int T = r->c->length;
    memset(r->seen, 0, sizeof r->seen);
    r->n_rows = 0;
    take_pages(r, chunk);
    for (int pos = 0, next = 0, n; pos < T; pos += n) {
        while (next < r->P && r->positions[next] < pos) next++;
        n = T - pos;
        if (chunk > 0 && n > chunk) n = chunk;
        if (chunk > 0 && next < r->P && n > r->positions[next] - pos + 1)
            n = r->positions[next] - pos + 1;
        pass(r, pos, n);
        if (handed_over && pos <= T / 2 && pos + n > T / 2) {
            hand_over(r, chunk + 1);
            chunk = 1; /* as decode does */
        }
    }
    give_pages(r);
}

/* The golden's scores of one layer by keys of one type; NULL: it has none. */
static const float *golden_scores(struct run *r, int layer, enum kern_ik_fmt ik)
{
    char name[64];
    static const char *const suffix[] = {[KERN_IK_FP8] = ".fp8", [KERN_IK_BF16] = ".bf16"};
    const bool other = ik == KERN_IK_FP8 || ik == KERN_IK_BF16;
    struct golden *g = other ? r->others : r->g;
    snprintf(name, sizeof name, "layers.%d.index_scores%s", layer, other ? suffix[ik] : "");
    return g && golden_find(g, name) ? golden_f32(g, name) : NULL;
}

static void check_goldens(struct run *r, struct tally *t)
{
    const struct model_shape *s = &model_peek_weights(r->m)->shape;
    for (int layer = 0; layer < s->n_layers; layer++) {
        if (s->ratios[layer] != 4) continue;
        for (int type = 0; type < (r->shadowed ? TYPES : 1); type++) {
            const enum kern_ik_fmt ik =
                type ? kern_shadow_fmt((enum kern_shadow)(type - 1)) : r->c->ik;
            const float *g = golden_scores(r, layer, ik);
            if (!g) continue;
            for (int i = 0; i < r->P; i++) {
                char what[128];
                double ref[MAX_ENTRIES];
                const struct seen *k = &r->seen[layer][i];
                for (int e = 0; e < k->n; e++)
                    ref[e] = (double)g[(int64_t)i * (r->c->length / 4) + e];
                snprintf(what, sizeof what, "%s %s-%d, keys %d%s, layer %d, position %d",
                         r->c->ckpt, r->c->variant, r->c->length, (int)ik, type ? " (shadow)" : "",
                         layer, r->positions[i]);
                check_ranks(what, k->ranks[type], k->n, ref,
                            r->c->exact ? EXACT_TOL : DEPLOYED_TOL * rms(ref, k->n), t);
                check_border(r, k, type);
            }
        }
    }
}

/* Shadow keys of the selecting type are those keys. */
static void check_own_shadow(const struct run *r)
{
    for (int layer = 0; layer < MAX_LAYERS; layer++)
        for (int i = 0; i < r->P; i++)
            for (int s = 0; r->shadowed && s < KERN_SHADOWS; s++) {
                const struct seen *k = &r->seen[layer][i];
                if (kern_shadow_fmt((enum kern_shadow)s) != r->c->ik) continue;
                assert_memory_equal(k->ranks[1 + s], k->ranks[0], sizeof k->ranks[0]);
            }
}

static void same_as_before(const struct run *r, const struct seen (*first)[MAX_POSITIONS], int from,
                           const char *what)
{
    for (int layer = 0; layer < MAX_LAYERS; layer++)
        for (int i = from; i < r->P; i++)
            if (memcmp(&r->seen[layer][i], &first[layer][i], sizeof first[layer][i]) != 0)
                fail_msg("%s %s-%d: %s changes ranks of layer %d at position %d", r->c->ckpt,
                         r->c->variant, r->c->length, what, layer, r->positions[i]);
}

/* What ranks by type in one run as own keys must do in another as shadows: nothing below the first
 * indexer depends on what keys select. (There is one layer with an indexer in these models.) */
static void check_across_types(const struct run *r, const struct seen (*fp4)[MAX_POSITIONS])
{
    for (int layer = 0; layer < MAX_LAYERS; layer++)
        for (int i = 0; i < r->P; i++)
            for (int s = 0; s < KERN_SHADOWS; s++)
                assert_memory_equal(r->seen[layer][i].ranks[1 + s], fp4[layer][i].ranks[1 + s],
                                    sizeof fp4[layer][i].ranks[0]);
}

static void open_run(struct run *r, const struct golden_case *c)
{
    char path[256];
    struct tow_err err = {0};
    memset(r, 0, sizeof *r);
    r->c = c;
    for (int i = 0; i < MAX_ENTRIES; i++) r->all[i] = i;
    snprintf(path, sizeof path, "%s/%s/checkpoint", root(), c->ckpt);
    const struct model_options opt = {.device = test_device(),
                                      .n_threads = 2,
                                      .exact = c->exact,
                                      .kv_fmt = c->exact ? KERN_KV_F32 : KERN_KV_FP8,
                                      .ik_fmt = c->ik,
                                      .expert_aq = c->aq,
                                      .fp8_products = !c->exact && test_products_fp8(),
                                      .max_rows = c->length};
    if (model_open(&r->m, path, &opt, &err) < 0) fail_msg("%s", err.msg);
    r->topk = model_peek_options(r->m)->index_topk;
    r->shadowed = !c->exact;
    assert_true(!r->shadowed || model_peek_layout(r->m)->shadow_bytes > 0);
    snprintf(path, sizeof path, "%s/expected/%s-%d.safetensors", c->ckpt, c->variant, c->length);
    r->g = golden_open(path);
    r->prompt = golden_i32(r->g, "prompt");
    r->positions = golden_i32(r->g, "positions");
    r->P = (int)golden_get(r->g, "positions")->n;
    assert_true(r->P <= MAX_POSITIONS && c->length / 4 <= MAX_ENTRIES);
    if (strcmp(c->ckpt, "native") != 0 || c->length < 300 || c->exact) return;
    snprintf(path, sizeof path, "native/expected/ranks-%d.safetensors", c->length);
    r->others = golden_open(path);
    assert_memory_equal(golden_get(r->others, "prompt")->data, r->prompt,
                        (size_t)c->length * sizeof *r->prompt);
    assert_memory_equal(golden_get(r->others, "positions")->data, r->positions,
                        (size_t)r->P * sizeof *r->positions);
}

/* fp4[]: what the case of fp4 keys and this length has seen, which comes first. */
static void check_case(const struct golden_case *c, struct seen fp4[2][MAX_LAYERS][MAX_POSITIONS])
{
    static struct run r;
    static struct seen first[MAX_LAYERS][MAX_POSITIONS];
    struct tally t = {0};
    open_run(&r, c);
    prefill(&r, 64, false);
    check_goldens(&r, &t);
    check_own_shadow(&r);
    assert_true(r.n_rows > 0 && (t.ranks > 0 || c->length < 8));
    memcpy(first, r.seen, sizeof first);
    if (r.others) {
        const int which = c->length == 300 ? 0 : 1;
        if (c->ik == KERN_IK_FP4) memcpy(fp4[which], r.seen, sizeof r.seen);
        check_across_types(&r, (const struct seen(*)[MAX_POSITIONS])fp4[which]);
    }
    prefill(&r, 7, false);
    same_as_before(&r, (const struct seen(*)[MAX_POSITIONS])first, 0, "chunk 7");
    prefill(&r, 64, true);
    same_as_before(&r, (const struct seen(*)[MAX_POSITIONS])first, 0, "a hand-over");
    prefill(&r, 0, false);
    same_as_before(&r, (const struct seen(*)[MAX_POSITIONS])first, r.P - 1, "one go");
    print_message("%s %s-%d keys %d: own sums: %d ranks, %d other than in float64; golden: %d "
                  "ranks, %d other, by %d at most; %d scores moved, the worst by %.3f of the "
                  "tolerance, %d beyond it\n",
                  c->ckpt, c->variant, c->length, (int)c->ik, r.sums.ranks, r.sums.moved_ranks,
                  t.ranks, t.moved_ranks, t.most, t.moved_scores, t.worst, t.far);
    assert_int_equal(r.sums.far, 0);
    assert_true(t.far <= (c->exact ? 0 : FAR_SCORES) * t.ranks);
    assert_true(t.moved_ranks <= (c->exact ? 0 : MOVED_RANKS) * t.ranks);
    if (c->exact || !test_products_fp8())
        assert_true(t.moved_scores <= (c->exact ? 0 : MOVED_SCORES) * t.ranks);
    free(r.q);
    free(r.weights);
    if (r.others) golden_close(r.others);
    golden_close(r.g);
    model_close(r.m);
}

static void test_rank__equals_the_reference(void **state)
{
    static struct seen fp4[2][MAX_LAYERS][MAX_POSITIONS];
    static const enum kern_ik_fmt others[] = {KERN_IK_FP8, KERN_IK_BF16};
    (void)state;
    for (int i = 0; i < N_GOLDEN_CASES; i++) {
        const struct golden_case *c = &golden_cases[i];
        /* Scores by fp8 and bf16 keys stand beside those by fp4 keys, for two lengths; of w4a4
         * there are none. */
        if (c->ik == KERN_IK_FP8 || c->ik == KERN_IK_BF16 || c->aq == KERN_AQ_NVFP4) continue;
        check_case(c, fp4);
        if (strcmp(c->variant, "fp4") != 0 || c->length < 300) continue;
        for (int k = 0; k < 2; k++) {
            struct golden_case by = *c;
            by.ik = others[k];
            check_case(&by, fp4);
        }
    }
}

int main(void)
{
    const int absent = test_device_there(test_device());
    if (absent) return absent;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rank__equals_the_reference)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
