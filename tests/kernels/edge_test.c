/* tests/kernels/edge_test.c - what shapes alone do not show: ties and narrow ranges in the
 * selection and in ranks, pages beyond 4 GiB, long contexts in bounded scratch, the folded softmax
 * against the plain one, idle threads.
 */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "kernels/cpu/team.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static struct kern_dev *dev;
static struct kern_stream *s;
static const struct kern_ops *ops = &kern_cpu;
static uint64_t rng = 42;

static float rnd(void)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return (float)(int32_t)(rng >> 32) * 0x1p-31f;
}

static struct kern_kv_layout layout_of(int32_t r0, int32_t r1, enum kern_kv_fmt kv,
                                       enum kern_ik_fmt ik)
{
    struct kern_kv_layout l;
    struct kern_kv_spec sp = {.n_layers = 2,
                              .ratios = {r0, r1},
                              .head_dim = 128,
                              .rope_dim = 64,
                              .window = 8,
                              .index_dim = 64,
                              .kv_fmt = kv,
                              .ik_fmt = ik};
    assert_int_equal(kern_kv_layout_init(&l, &sp, NULL), 0);
    return l;
}

/* --- selection: key e is (score, 0, 0, ...), the query (1, 0, ...),
 * so the scores are what we say */

enum select_kind { NORMAL, NARROW, MANY_EQUAL, UP, DOWN, ALL_EQUAL, NEGATIVE, N_KINDS };

static float score_of(enum select_kind kind, int e, int n)
{
    switch (kind) {
    case NORMAL: return rnd();
    case NARROW:
        return kern_float(kern_bits(1.0f) + (uint32_t)((e * 7919) % 16384)); /* [1, 1+2^-9) */
    case MANY_EQUAL: return e % 10 ? 0.5f : rnd();
    case UP: return (float)e;
    case DOWN: return (float)(n - e);
    case ALL_EQUAL: return 0.25f;
    default: return -1.0f; /* ReLU makes all of them zero: a true tie */
    }
}

static int by_score(const void *a, const void *b)
{
    const float *x = a, *y = b;
    if (x[0] != y[0]) return x[0] < y[0] ? 1 : -1;
    return x[1] < y[1] ? -1 : 1;
}

static void check_selection(int n, int topk, enum select_kind kind)
{
    struct kern_kv_layout l = layout_of(4, 0, KERN_KV_F32, KERN_IK_F32);
    int per = l.layer[0].per_page, n_pages = (n + per - 1) / per;
    uint8_t *pages = mmap(NULL, (size_t)n_pages * (size_t)l.page_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint8_t *tail = calloc(1, (size_t)l.tail_bytes);
    uint32_t *ids = malloc((size_t)n_pages * 4);
    float *scores = malloc((size_t)n * 4), *order = malloc((size_t)n * 8), q[64] = {1}, wt = 1;
    int32_t *sel = malloc((size_t)topk * 4), n_sel;
    assert_true(pages != MAP_FAILED);
    for (int p = 0; p < n_pages; p++) ids[p] = (uint32_t)(n_pages - 1 - p);
    for (int e = 0; e < n; e++) {
        float key[64] = {0};
        key[0] = score_of(kind, e, n);
        order[2 * e] = key[0] > 0 ? key[0] : 0;
        order[2 * e + 1] = (float)e; /* exact below 2^24 */
        kern_ik_store(KERN_IK_F32,
                      pages + (int64_t)ids[e / per] * l.page_bytes + l.layer[0].index_off, per,
                      e % per, key, 64);
    }
    struct kern_seq seq = {.n_rows = 1,
                           .pos0 = (int64_t)n * 4 - 1,
                           .page_ids = ids,
                           .n_pages = n_pages,
                           .tail = tail,
                           .topk = topk};
    struct kern_index_select p = {.q = q,
                                  .wt = &wt,
                                  .factor = 1,
                                  .pages = pages,
                                  .layout = &l,
                                  .seqs = &seq,
                                  .n_seqs = 1,
                                  .T = 1,
                                  .H = 1,
                                  .selected = sel,
                                  .n_selected = &n_sel,
                                  .sel_ld = topk,
                                  .scores = scores,
                                  .score_ld = n,
                                  .act = KERN_F32};
    assert_int_equal(ops->index_select(s, &p), 0);
    for (int e = 0; e < n; e++) assert_true(scores[e] == order[2 * e]);
    qsort(order, (size_t)n, 8, by_score);
    uint8_t *want = calloc((size_t)n, 1);
    int k = n < topk ? n : topk;
    for (int i = 0; i < k; i++) want[(int)order[2 * i + 1]] = 1;
    assert_int_equal(n_sel, k);
    for (int i = 0; i < k; i++) {
        assert_true(want[sel[i]]);
        if (i) assert_true(sel[i] > sel[i - 1]);
    }
    munmap(pages, (size_t)n_pages * (size_t)l.page_bytes);
    free(tail), free(ids), free(scores), free(order), free(sel), free(want);
}

static void test_index_select__any_distribution_is_exact(void **state)
{
    static const int sizes[] = {511, 512, 513, 30938, 65536};
    (void)state;
    for (int i = 0; i < 5; i++)
        for (int kind = 0; kind < N_KINDS; kind++) check_selection(sizes[i], 512, kind);
    check_selection(30938, 2048, NARROW);
    check_selection(262144, 1024, NARROW); /* a context of 1,048,576 */
}

/* --- ranks: of given scores, so that any float can be one */

enum { STRETCH = 4096, MOST_RANKED = 64 }; /* STRETCH: scores that index_rank counts at a time */

static bool is_nan(float x)
{
    return x != x;
}

/* Whether entry o goes before entry e. */
static bool goes_before(const float *score, int o, int e)
{
    const float a = score[o], b = score[e];
    if (is_nan(a)) return is_nan(b) && o < e;
    return is_nan(b) || a > b || (a == b && o < e);
}

static const float *sorted_scores;
static int by_rank(const void *a, const void *b)
{
    const int x = *(const int *)a, y = *(const int *)b;
    return x == y ? 0 : goes_before(sorted_scores, x, y) ? -1 : 1;
}

static bool same(float a, float b)
{
    return a == b || (is_nan(a) && is_nan(b));
}

/* Against a full sort: ranks, equals, scores, and the border at top-k. */
static void check_ranks(const float *score, int n, int topk, const int32_t *entries, int n_entries)
{
    struct kern_kv_layout l = layout_of(4, 0, KERN_KV_F32, KERN_IK_F32);
    const int n_pages = (n + 1) / l.layer[0].per_page + 1;
    uint32_t *ids = calloc((size_t)n_pages, 4);
    uint8_t tail;
    struct kern_seq seq = {.n_rows = 1,
                           .pos0 = (int64_t)n * 4 + 3 - 1,
                           .page_ids = ids,
                           .n_pages = n_pages,
                           .tail = &tail,
                           .topk = topk};
    struct kern_rank *got = malloc((size_t)(n_entries + 1) * sizeof *got);
    float kth = 7, next = 7;
    struct kern_index_rank p = {.scores = score,
                                .layout = &l,
                                .seq = &seq,
                                .T = 1,
                                .H = 1,
                                .keys = KERN_KEYS_OWN,
                                .entries = entries,
                                .n_entries = n_entries,
                                .ranks = got,
                                .kth = &kth,
                                .next = &next,
                                .act = KERN_F32};
    assert_int_equal(ops->index_rank(s, &p), 0);
    int *order = malloc((size_t)(n + 1) * sizeof *order), *rank = malloc((size_t)(n + 1) * 4);
    for (int e = 0; e < n; e++) order[e] = e;
    sorted_scores = score;
    qsort(order, (size_t)n, sizeof *order, by_rank);
    for (int i = 0; i < n; i++) rank[order[i]] = i + 1;
    for (int a = 0; a < n_entries; a++) {
        const int e = entries[a], at = rank[e] - 1;
        int equal = 0;
        for (int i = at - 1; i >= 0 && same(score[order[i]], score[e]); i--) equal++;
        for (int i = at + 1; i < n && same(score[order[i]], score[e]); i++) equal++;
        assert_int_equal(got[a].rank, rank[e]);
        assert_int_equal(got[a].equal, equal);
        assert_true(same(got[a].score, score[e]));
    }
    const int k = n < topk ? n : topk;
    assert_true(same(kth, n ? score[order[k - 1]] : NAN));
    assert_true(same(next, n > topk ? score[order[k]] : NAN));
    free(ids), free(got), free(order), free(rank);
}

/* First, last, and around every border of a stretch, as far as there is room; then any. */
static int pick_entries(int n, int32_t *out)
{
    int k = 0, tries = 0;
    for (int e = 0; e < n && k < MOST_RANKED / 2; e += STRETCH)
        for (int d = -2; d < 2 && k < MOST_RANKED / 2; d++)
            if (e + d >= 0 && e + d < n) out[k++] = e + d;
    if (n > 0 && (k == 0 || out[k - 1] != n - 1)) out[k++] = n - 1;
    while (n > 0 && k < MOST_RANKED && tries++ < MOST_RANKED)
        out[k++] = (int32_t)((uint64_t)(uint32_t)(int32_t)(rnd() * 0x1p31f) % (uint32_t)n);
    return k;
}

enum rank_kind { ANY, FEW_VALUES, EQUAL, ZEROS, ODD, ALL_NAN, ALL_MINUS_INF, RISING, N_RANK_KINDS };

static float rank_score(enum rank_kind kind, int e)
{
    static const float odd[] = {NAN, -INFINITY, INFINITY, 0.0f, -0.0f, 1e-45f, -1e-45f, 3e38f};
    switch (kind) {
    case ANY: return rnd();
    case FEW_VALUES: return (float)(e * 7919 % 5);
    case EQUAL: return 0.25f;
    case ZEROS: return e % 3 ? 0.0f : -0.0f;
    case ODD: return e % 11 ? odd[(e * 31 + e / 7) % 8] : rnd();
    case ALL_NAN: return NAN;
    case ALL_MINUS_INF: return -INFINITY;
    default: return (float)e;
    }
}

static void test_index_rank__any_scores_are_ranked_as_sorted(void **state)
{
    static const int sizes[] = {
        0, 1, 2, 15, 16, 17, 511, 512, 513, STRETCH - 1, STRETCH, STRETCH + 1, 3 * STRETCH + 5};
    static float score[3 * STRETCH + 5];
    int32_t entries[MOST_RANKED];
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < N_RANK_KINDS; kind++) {
            const int n = sizes[i];
            for (int e = 0; e < n; e++) score[e] = rank_score((enum rank_kind)kind, e);
            check_ranks(score, n, 512, entries, pick_entries(n, entries));
            check_ranks(score, n, 1, entries, pick_entries(n, entries));
            check_ranks(score, n, 512, entries, 0);
        }
}

static void test_index_rank__long_contexts(void **state)
{
    enum { N = 262144 }; /* a context of 1,048,576 */
    float *score = malloc(N * sizeof *score);
    int32_t entries[MOST_RANKED];
    (void)state;
    for (int kind = 0; kind < N_RANK_KINDS; kind++) {
        if (kind == EQUAL || kind == ALL_NAN || kind == ALL_MINUS_INF) continue;
        for (int e = 0; e < N; e++) score[e] = rank_score((enum rank_kind)kind, e);
        /* few equals of each entry: the check walks over them */
        check_ranks(score, N, 1024, entries,
                    kind == ANY || kind == RISING ? pick_entries(N, entries)
                                                  : (pick_entries(N, entries), 3));
    }
    free(score);
}

/* Selection and ranks go different ways to their answers: they must agree on every entry. */
static void test_index_rank__at_most_topk_exactly_when_selected(void **state)
{
    enum { N = 700, H = 2, W = 64, ROUNDS = 40 };
    struct kern_kv_layout l = layout_of(4, 0, KERN_KV_F32, KERN_IK_F32);
    const int per = l.layer[0].per_page, n_pages = (N + per - 1) / per;
    uint8_t *pages = calloc((size_t)n_pages, (size_t)l.page_bytes), tail;
    uint32_t ids[(N + 63) / 64];
    int32_t all[N], sel[N], n_sel;
    struct kern_rank ranks[N];
    float q[H * W], wt[H], scores[N];
    (void)state;
    assert_true(n_pages <= (int)(sizeof ids / sizeof *ids));
    for (int i = 0; i < n_pages; i++) ids[i] = (uint32_t)(n_pages - 1 - i);
    for (int round = 0; round < ROUNDS; round++) {
        for (int e = 0; e < N; e++) {
            float key[W];
            /* coarse values and many keys twice, so that there are ties */
            for (int i = 0; i < W; i++) key[i] = round % 4 ? rnd() : roundf(rnd());
            if (round % 3 == 0 && e % 2) key[0] = -100, key[1] = 0;
            if (round % 10 == 9 && e % 50 == 7) key[3] = e % 100 == 7 ? NAN : INFINITY;
            kern_ik_store(KERN_IK_F32,
                          pages + (int64_t)ids[e / per] * l.page_bytes + l.layer[0].index_off, per,
                          e % per, key, W);
            all[e] = e;
        }
        for (int i = 0; i < H * W; i++) q[i] = round % 4 ? rnd() : roundf(rnd());
        for (int h = 0; h < H; h++) wt[h] = rnd();
        const int n = round < 4 ? 1 + round : N - round;
        struct kern_seq seq = {.n_rows = 1,
                               .pos0 = (int64_t)n * 4 - 1,
                               .page_ids = ids,
                               .n_pages = n_pages,
                               .tail = &tail,
                               .topk = round % 5 ? 1 + 17 * round : n};
        struct kern_index_select select = {.q = q,
                                           .wt = wt,
                                           .factor = 1,
                                           .pages = pages,
                                           .layout = &l,
                                           .seqs = &seq,
                                           .n_seqs = 1,
                                           .T = 1,
                                           .H = H,
                                           .selected = sel,
                                           .n_selected = &n_sel,
                                           .sel_ld = N,
                                           .scores = scores,
                                           .score_ld = N,
                                           .act = KERN_F32};
        assert_int_equal(ops->index_select(s, &select), 0);
        for (int kept = 0; kept < 2; kept++) {
            float kth, next;
            struct kern_index_rank p = {.scores = kept ? scores : NULL,
                                        .q = q,
                                        .wt = wt,
                                        .factor = 1,
                                        .pages = pages,
                                        .layout = &l,
                                        .seq = &seq,
                                        .T = 1,
                                        .H = H,
                                        .keys = KERN_KEYS_OWN,
                                        .entries = all,
                                        .n_entries = n,
                                        .ranks = ranks,
                                        .kth = &kth,
                                        .next = &next,
                                        .act = KERN_F32};
            assert_int_equal(ops->index_rank(s, &p), 0);
            int at = 0;
            for (int e = 0; e < n; e++) {
                assert_true(same(ranks[e].score, scores[e]));
                if (ranks[e].rank > seq.topk) continue;
                assert_true(at < n_sel);
                assert_int_equal(sel[at++], e);
            }
            assert_int_equal(at, n_sel);
        }
    }
    free(pages);
}

/* Scores of some rows only, each where its place in the list says. */
static void test_index_select__keeps_scores_of_the_rows_asked_for(void **state)
{
    enum { T = 40, W = 64, N = T / 4 };
    struct kern_kv_layout l = layout_of(4, 0, KERN_KV_F32, KERN_IK_F32);
    uint8_t *page = calloc(1, (size_t)l.page_bytes), tail;
    uint32_t id = 0;
    static float q[T * W], wt[T], all[T * N], some[4 * N];
    int32_t sel[T * 4], n_sel[T];
    static const int32_t rows[] = {0, 7, 8, T - 1};
    (void)state;
    for (int e = 0; e < N; e++) {
        float key[W];
        for (int i = 0; i < W; i++) key[i] = rnd();
        kern_ik_store(KERN_IK_F32, page + l.layer[0].index_off, l.layer[0].per_page, e, key, W);
    }
    for (int i = 0; i < T * W; i++) q[i] = rnd();
    for (int i = 0; i < T; i++) wt[i] = rnd();
    struct kern_seq seq = {.n_rows = T, .page_ids = &id, .n_pages = 1, .tail = &tail, .topk = 4};
    struct kern_index_select p = {.q = q,
                                  .wt = wt,
                                  .factor = 1,
                                  .pages = page,
                                  .layout = &l,
                                  .seqs = &seq,
                                  .n_seqs = 1,
                                  .T = T,
                                  .H = 1,
                                  .selected = sel,
                                  .n_selected = n_sel,
                                  .sel_ld = 4,
                                  .scores = all,
                                  .score_ld = N,
                                  .act = KERN_F32};
    assert_int_equal(ops->index_select(s, &p), 0);
    p.scores = some, p.score_rows = rows, p.n_score_rows = 4;
    assert_int_equal(ops->index_select(s, &p), 0);
    for (int i = 0; i < 4; i++)
        assert_memory_equal(some + i * N, all + rows[i] * N, N * sizeof *all);
    p.score_rows = (const int32_t[]){3, 3}, p.n_score_rows = 2;
    assert_int_equal(ops->index_select(s, &p), TOW_EINVAL);
    p.score_rows = (const int32_t[]){T}, p.n_score_rows = 1;
    assert_int_equal(ops->index_select(s, &p), TOW_EINVAL);
    free(page);
}

static void test_index_rank__broken_contracts_are_refused(void **state)
{
    struct kern_kv_layout l = layout_of(4, 0, KERN_KV_FP8, KERN_IK_FP4);
    uint32_t ids[2] = {0, 1};
    uint8_t tail;
    float score[4] = {0}, kth, next;
    struct kern_rank rank;
    (void)state;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        int32_t entry = 3;                                                                         \
        struct kern_seq seq = {                                                                    \
            .n_rows = 1, .pos0 = 15, .page_ids = ids, .n_pages = 1, .tail = &tail, .topk = 2};     \
        struct kern_index_rank p = {.scores = score,                                               \
                                    .layout = &l,                                                  \
                                    .seq = &seq,                                                   \
                                    .T = 1,                                                        \
                                    .H = 1,                                                        \
                                    .keys = KERN_KEYS_OWN,                                         \
                                    .entries = &entry,                                             \
                                    .n_entries = 1,                                                \
                                    .ranks = &rank,                                                \
                                    .kth = &kth,                                                   \
                                    .next = &next,                                                 \
                                    .act = KERN_BF16};                                             \
        assert_int_equal(ops->index_rank(s, &p), 0);                                               \
        change;                                                                                    \
        assert_int_equal(ops->index_rank(s, &p), TOW_EINVAL);                                      \
    } while (0)
    REFUSED(entry = 4); /* not visible */
    REFUSED(entry = -1);
    REFUSED(seq.n_rows = 2);
    REFUSED(seq.topk = 0);
    REFUSED(seq.row0 = 1);
    REFUSED(p.layer = 1); /* no indexer there */
    REFUSED(p.scores = NULL);
    REFUSED(p.keys = KERN_SHADOW_FP8); /* scores given are those of own keys */
    REFUSED((p.scores = NULL, p.q = score, p.wt = score, p.pages = &tail, p.keys = KERN_SHADOWS));
    REFUSED((p.scores = NULL, p.q = score, p.wt = score, p.pages = &tail, p.keys = 0));
    REFUSED(seq.shadowed = true); /* its one page would have no companion */
#undef REFUSED
}

/* --- pages anywhere in a large pool give the same bits (no 32-bit offsets) */

static void run_far(const uint32_t *ids, int n_ids, uint8_t *pool, const struct kern_kv_layout *l,
                    float *out, int32_t *sel, float *stored, struct kern_rank (*ranks)[3])
{
    enum { N = 700, H = 2, D = 128 };
    uint8_t *tail = calloc(1, (size_t)l->tail_bytes);
    float *x = malloc(N * 2 * D * 4), ape[4 * 2 * D], w[D], freq[32], kv[D], q[H * D],
          sink[H] = {0};
    struct kern_seq seq = {.n_rows = N,
                           .page_ids = ids,
                           .n_pages = n_ids,
                           .tail = tail,
                           .topk = 64,
                           .shadowed = n_ids == 6};
    rng = 7;
    for (int i = 0; i < N * 2 * D; i++) x[i] = rnd();
    for (int i = 0; i < 8 * D; i++) ape[i] = rnd();
    for (int i = 0; i < D; i++) w[i] = 1 + 0.1f * rnd(), kv[i] = rnd();
    for (int i = 0; i < H * D; i++) q[i] = rnd();
    for (int i = 0; i < 32; i++) freq[i] = 1.0f / (float)(1 + i);
    for (int index = 0; index < 2; index++) {
        struct kern_compress c = {.kv = x,
                                  .gate = x,
                                  .ape = ape,
                                  .norm = {w, KERN_F32, index ? 64 : D},
                                  .inv_freq = freq,
                                  .pages = pool,
                                  .layout = l,
                                  .index = index,
                                  .seqs = &seq,
                                  .n_seqs = 1,
                                  .eps = 1e-6f,
                                  .act = KERN_F32};
        assert_int_equal(ops->compress(s, &c), 0);
    }
    int32_t n_sel;
    float wt[H] = {0.3f, 0.7f};
    seq.pos0 = N, seq.n_rows = 1;
    struct kern_index_select is = {.q = q,
                                   .wt = wt,
                                   .factor = 1,
                                   .pages = pool,
                                   .layout = l,
                                   .seqs = &seq,
                                   .n_seqs = 1,
                                   .T = 1,
                                   .H = H,
                                   .selected = sel,
                                   .n_selected = &n_sel,
                                   .sel_ld = 64,
                                   .act = KERN_F32};
    assert_int_equal(ops->index_select(s, &is), 0);
    struct kern_attention a = {.q = q,
                               .kv = kv,
                               .sink = sink,
                               .o = out,
                               .pages = pool,
                               .layout = l,
                               .seqs = &seq,
                               .n_seqs = 1,
                               .selected = sel,
                               .n_selected = &n_sel,
                               .sel_ld = 64,
                               .T = 1,
                               .H = H,
                               .scale = 0.1f,
                               .act = KERN_F32};
    assert_int_equal(ops->attention(s, &a), 0);
    for (int keys = KERN_KEYS_OWN; ranks && keys < KERN_SHADOWS; keys++) {
        float kth, next;
        struct kern_index_rank ir = {.q = q,
                                     .wt = wt,
                                     .factor = 1,
                                     .pages = pool,
                                     .layout = l,
                                     .seq = &seq,
                                     .T = 1,
                                     .H = H,
                                     .keys = keys,
                                     .entries = (const int32_t[]){0, 90, 174},
                                     .n_entries = 3,
                                     .ranks = ranks[keys + 1],
                                     .kth = &kth,
                                     .next = &next,
                                     .act = KERN_F32};
        assert_int_equal(ops->index_rank(s, &ir), 0);
    }
    const int64_t third = ids[seq.shadowed ? 4 : 2];
    kern_kv_load(l->spec.kv_fmt, pool + third * l->page_bytes + l->layer[0].main_off,
                 l->layer[0].per_page, 10, stored, D, 64);
    free(tail), free(x);
}

static void test_pages__beyond_4gib_give_the_same_bits(void **state)
{
    struct kern_kv_layout l = layout_of(4, 0, KERN_KV_FP8, KERN_IK_FP4);
    int64_t n_pages = (INT64_C(9) << 30) / l.page_bytes;
    uint8_t *pool = mmap(NULL, (size_t)(n_pages * l.page_bytes), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint32_t b31 = (uint32_t)((INT64_C(1) << 31) / l.page_bytes),
             b32 = (uint32_t)((INT64_C(1) << 32) / l.page_bytes), end = (uint32_t)n_pages;
    uint32_t ids[4][3] = {
        {0, 1, 2}, {b31 - 1, b31, b31 + 1}, {b32 + 1, b32, b32 - 1}, {end - 1, end - 2, end - 3}};
    float out[4][256], stored[4][128];
    int32_t sel[4][64];
    (void)state;
    if (pool == MAP_FAILED) skip(); /* an address space limit */
    memset(sel, 0, sizeof sel);
    for (int i = 0; i < 4; i++) run_far(ids[i], 3, pool, &l, out[i], sel[i], stored[i], NULL);
    for (int i = 1; i < 4; i++) {
        assert_memory_equal(out[i], out[0], sizeof out[0]);
        assert_memory_equal(sel[i], sel[0], sizeof sel[0]);
        assert_memory_equal(stored[i], stored[0], sizeof stored[0]);
    }
    munmap(pool, (size_t)(n_pages * l.page_bytes));
}

static void test_pages__companions_beyond_4gib_give_the_same_ranks(void **state)
{
    struct kern_kv_layout l = layout_of(4, 0, KERN_KV_F32, KERN_IK_FP4);
    const int64_t n_pages = (INT64_C(9) << 30) / l.page_bytes;
    uint8_t *pool = mmap(NULL, (size_t)(n_pages * l.page_bytes), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const uint32_t b31 = (uint32_t)((INT64_C(1) << 31) / l.page_bytes),
                   b32 = (uint32_t)((INT64_C(1) << 32) / l.page_bytes), end = (uint32_t)n_pages;
    const uint32_t ids[3][6] = {{0, 1, 2, 3, 4, 5},
                                {b31 - 1, b32, b31, b32 + 1, b31 + 1, b32 + 2},
                                {end - 1, 0, end - 2, b32 - 1, 1, end - 3}};
    struct kern_rank ranks[3][1 + KERN_SHADOWS][3];
    float out[256], stored[128];
    int32_t sel[64];
    (void)state;
    if (pool == MAP_FAILED) skip(); /* an address space limit */
    assert_true(l.shadow_bytes > 0);
    memset(ranks, 0, sizeof ranks);
    for (int i = 0; i < 3; i++) {
        run_far(ids[i], 6, pool, &l, out, sel, stored, ranks[i]);
        assert_memory_equal(ranks[i], ranks[0], sizeof ranks[0]);
        for (int t = 0; t <= KERN_SHADOWS; t++)
            for (int e = 0; e < 3; e++) assert_in_range(ranks[i][t][e].rank, 1, 175);
    }
    munmap(pool, (size_t)(n_pages * l.page_bytes));
}

/* --- the folded softmax of ratio 128 against two passes in double;
 * docs/numerics.md quotes the bound */

static void test_compress__folded_state_is_close_to_two_passes(void **state)
{
    enum { N = 128, E = 128 };
    struct kern_kv_layout l = layout_of(128, 0, KERN_KV_F32, KERN_IK_F32);
    static float kv[N * E], gate[N * E], ape[N * E], w[E];
    double worst = 0;
    (void)state;
    for (int spread = 1; spread <= 64; spread *= 4) {
        uint8_t *page = calloc(1, (size_t)l.page_bytes), *tail = calloc(1, (size_t)l.tail_bytes);
        uint32_t id = 0;
        float freq[32] = {0}, got[E];
        for (int i = 0; i < N * E; i++) kv[i] = rnd(), gate[i] = rnd() * (float)spread;
        for (int i = 0; i < E; i++) w[i] = 1;
        struct kern_seq q = {.n_rows = N, .page_ids = &id, .n_pages = 1, .tail = tail};
        struct kern_compress p = {.kv = kv,
                                  .gate = gate,
                                  .ape = ape,
                                  .norm = {w, KERN_F32, E},
                                  .inv_freq = freq,
                                  .pages = page,
                                  .layout = &l,
                                  .seqs = &q,
                                  .n_seqs = 1,
                                  .eps = 0,
                                  .act = KERN_F32};
        assert_int_equal(ops->compress(s, &p), 0);
        kern_kv_load(KERN_KV_F32, page + l.layer[0].main_off, l.layer[0].per_page, 0, got, E, 64);
        double want[E], sq = 0, err = 0;
        for (int c = 0; c < E; c++) {
            double m = -1e30, sum = 0, acc = 0;
            for (int t = 0; t < N; t++) m = fmax(m, gate[t * E + c]);
            for (int t = 0; t < N; t++) {
                double e = exp(gate[t * E + c] - m);
                sum += e, acc += e * kv[t * E + c];
            }
            want[c] = acc / sum, sq += want[c] * want[c];
        }
        for (int c = 0; c < E; c++) {
            double d = got[c] - want[c] / sqrt(sq / E);
            err += d * d;
        }
        worst = fmax(worst, sqrt(err / E));
        free(page), free(tail);
    }
    print_message("folded softmax: rel %.1e\n", worst);
    assert_true(worst <= 5e-7);
}

/* --- threads */

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void count_part(void *arg, int64_t part, int thread)
{
    (void)thread;
    ((uint8_t *)arg)[part]++;
}

static void test_team__runs_each_part_once_and_rests_when_idle(void **state)
{
    struct kern_dev *d;
    uint8_t seen[1000];
    (void)state;
    for (int threads = 1; threads <= 9; threads += 4) {
        assert_int_equal(kern_dev_open(&d, "cpu", threads, NULL), 0);
        assert_int_equal(kern_dev_threads(d), threads);
        for (int n = 0; n <= 1000; n = n * 3 + 1) {
            memset(seen, 0, sizeof seen);
            for (int round = 0; round < 20; round++)
                kern_parallel(kern_dev_stream(d), n, count_part, seen);
            for (int i = 0; i < n; i++) assert_int_equal(seen[i], 20);
        }
        double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID), wall = seconds(CLOCK_MONOTONIC);
        poll(NULL, 0, 100); /* nothing to wait for: idleness is what is measured */
        /* One thread that spins takes all of it. */
        assert_true(seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu <
                    (seconds(CLOCK_MONOTONIC) - wall) / 2);
        kern_dev_close(d);
    }
}

/* Weights placed as one array share strides: one of another form would be read past its end. */
static void test_dev__an_array_of_weights_is_of_one_form(void **state)
{
    struct tow_err err;
    struct kern_weight w[3];
    (void)state;
    for (int i = 0; i < 3; i++)
        w[i] = (struct kern_weight){.fmt = KERN_W_FP8, .sfmt = KERN_S_UE8M0, .n = 8, .k = 16};
    assert_int_equal(kern_dev_place(dev, w, 3, &err), 0);
    w[2].sfmt = KERN_S_F32;
    assert_int_equal(kern_dev_place(dev, w, 3, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "weight 2 of 3"));
    w[2] = w[0];
    w[1].k = 32;
    assert_int_equal(kern_dev_place(dev, w, 3, &err), TOW_EINVAL);
}

static void test_dev__bad_values_are_named(void **state)
{
    struct kern_dev *d = NULL;
    struct tow_err err = {0};
    (void)state;
    assert_int_equal(kern_dev_open(&d, "tpu", 1, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "tpu"));
    assert_int_equal(kern_dev_open(&d, "mirror:mirror:cpu", 1, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "mirror:mirror:cpu"));
    assert_int_equal(kern_dev_open(&d, "mirror:", 1, &err), TOW_EINVAL);
    assert_int_equal(kern_dev_open(&d, "cpu", 257, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "256"));
    assert_int_equal(kern_dev_open(&d, "cpu", -1, &err), TOW_EINVAL);
    assert_null(d);
    /* A machine that has no such device, or one that cannot be used, is not a wrong name. */
    const int rc = kern_dev_open(&d, "cuda:0", 1, &err);
    assert_true(rc == 0 || rc == TOW_ENOENT || rc == TOW_EDEVICE);
    kern_dev_close(d);
}

int main(int argc, char **argv)
{
    if (kern_dev_open(&dev, "cpu", 2, NULL) < 0) return 1;
    s = kern_dev_stream(dev);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_index_select__any_distribution_is_exact),
        cmocka_unit_test(test_index_rank__any_scores_are_ranked_as_sorted),
        cmocka_unit_test(test_index_rank__long_contexts),
        cmocka_unit_test(test_index_rank__at_most_topk_exactly_when_selected),
        cmocka_unit_test(test_index_select__keeps_scores_of_the_rows_asked_for),
        cmocka_unit_test(test_index_rank__broken_contracts_are_refused),
        cmocka_unit_test(test_pages__beyond_4gib_give_the_same_bits),
        cmocka_unit_test(test_pages__companions_beyond_4gib_give_the_same_ranks),
        cmocka_unit_test(test_compress__folded_state_is_close_to_two_passes),
        cmocka_unit_test(test_team__runs_each_part_once_and_rests_when_idle),
        cmocka_unit_test(test_dev__bad_values_are_named),
        cmocka_unit_test(test_dev__an_array_of_weights_is_of_one_form)};
    TEST_CHOOSE(argc, argv, tests);
    int failed = cmocka_run_group_tests_name("kernels/edge", tests, NULL, NULL);
    kern_dev_close(dev);
    return failed;
}
