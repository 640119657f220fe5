/* tests/gpu/index_test.c - index queries, selection and ranks where they are hard: rows of equals,
 * of NaN and of -inf, the best side by side, ragged batches, lists of every length, chunks against
 * rows alone, pages far apart.
 *
 * A selection is held against a plain one from its own scores, a rank against a plain count; scores
 * and queries against the CPU's. Exit 77 where there is no device.
 */
#include "tests/support/check.h"
#include "tests/support/device.h"

#include "common/base/err.h"
#include "kernels/cuda/table.h"
#include "kernels/mirror.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { H = 64, W = 128, D = 512, RD = 64, POOL = 64, LONGEST = 1 << 20, SPECIAL = 8 };

static struct kern_dev *cpu, *gpu;
static uint64_t seed = 1;

static float rnd(void)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (float)(int32_t)(seed >> 32) * 0x1p-31f;
}

/* A pool of POOL pages of random keys; the first SPECIAL ones are for a test to change. Tables go
 * round in the others, so that contexts can be long: scores repeat, and equals are many. */
struct world {
    struct kern_kv_layout l;
    uint8_t *pages, *tail;
    uint32_t *ids;
    int32_t per_page;
};
static void store_key(struct world *w, int page, int e, const float *row)
{
    const struct kern_kv_layer *y = &w->l.layer[0];
    kern_ik_store(w->l.spec.ik_fmt, w->pages + page * w->l.page_bytes + y->index_off, y->per_page,
                  e, row, W);
}
static void world_open(struct world *w, enum kern_ik_fmt ik)
{
    const struct kern_kv_spec sp = {.n_layers = 1,
                                    .ratios = {4},
                                    .head_dim = D,
                                    .rope_dim = RD,
                                    .window = 128,
                                    .index_dim = W,
                                    .kv_fmt = KERN_KV_FP8,
                                    .ik_fmt = ik};
    float row[W];
    assert_int_equal(kern_kv_layout_init(&w->l, &sp, NULL), 0);
    w->pages = calloc(POOL, (size_t)w->l.page_bytes);
    w->tail = calloc(1, (size_t)w->l.tail_bytes);
    w->per_page = w->l.layer[0].per_page;
    const int32_t n = LONGEST / w->l.page_tokens;
    w->ids = malloc((size_t)n * sizeof *w->ids);
    assert_true(w->pages && w->tail && w->ids);
    for (int32_t i = 0; i < n; i++)
        w->ids[i] = SPECIAL + (uint32_t)(i * 37 + i / 41) % (POOL - SPECIAL);
    for (int32_t i = 0; i < POOL; i++)
        for (int32_t e = 0; e < w->per_page; e++) {
            for (int c = 0; c < W; c++) row[c] = rnd() * 2;
            store_key(w, i, e, row);
        }
    kern_mirror_know(gpu, w->pages, (size_t)(POOL * w->l.page_bytes));
}
static void world_close(struct world *w)
{
    kern_mirror_forget(gpu);
    free(w->pages), free(w->tail), free(w->ids);
}
static struct kern_seq seq_at(const struct world *w, int32_t row0, int32_t n_rows, int64_t pos0,
                              int32_t topk)
{
    return (struct kern_seq){.row0 = row0,
                             .n_rows = n_rows,
                             .pos0 = pos0,
                             .page_ids = w->ids,
                             .n_pages = (int32_t)kern_kv_pages_for(pos0 + n_rows, w->l.page_tokens),
                             .tail = w->tail,
                             .topk = topk};
}

struct chosen {
    int32_t *sel, *n;
    float *scores, *margin;
    int64_t ld, topk;
};
static struct chosen choose(struct kern_dev *dev, const struct world *w, const uint16_t *q,
                            const uint16_t *wt, int32_t T, const struct kern_seq *seqs,
                            int32_t n_seqs, int64_t ld, int64_t topk, bool scores)
{
    struct chosen c = {.ld = ld, .topk = topk};
    c.sel = malloc((size_t)(T * topk) * 4), c.n = malloc((size_t)T * 4);
    memset(c.sel, 0xa5, (size_t)(T * topk) * 4);
    if (scores) {
        c.scores = malloc((size_t)(T * ld) * 4), c.margin = malloc((size_t)T * 4);
        memset(c.scores, 0xa5, (size_t)(T * ld) * 4);
    }
    const struct kern_index_select p = {.q = q,
                                        .wt = wt,
                                        .factor = 0.011f,
                                        .pages = w->pages,
                                        .layout = &w->l,
                                        .layer = 0,
                                        .seqs = seqs,
                                        .n_seqs = n_seqs,
                                        .T = T,
                                        .H = H,
                                        .selected = c.sel,
                                        .n_selected = c.n,
                                        .sel_ld = topk,
                                        .scores = c.scores,
                                        .score_ld = ld,
                                        .margin = c.margin,
                                        .act = KERN_BF16};
    assert_int_equal(kern_dev_ops(dev)->index_select(kern_dev_stream(dev), &p), 0);
    assert_int_equal(kern_stream_sync(kern_dev_stream(dev)), 0);
    return c;
}
static void chosen_free(struct chosen *c)
{
    free(c->sel), free(c->n), free(c->scores), free(c->margin);
}

static const float *ranked;
static int by_rank(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    const float u = ranked[x], v = ranked[y];
    if (isnan(u) != isnan(v)) return isnan(u) ? 1 : -1;
    if (u > v || u < v) return u < v ? 1 : -1;
    return x < y ? -1 : 1;
}
/* Row r is what a sort of its own n scores keeps of them: k, then -1. */
static void check_row(const struct chosen *c, int32_t r, int32_t n, int32_t topk)
{
    const int32_t k = n < topk ? n : topk, *sel = c->sel + r * c->topk;
    int32_t *order = malloc((size_t)(n + 1) * 4);
    uint8_t *kept = calloc((size_t)n + 1, 1);
    for (int32_t e = 0; e < n; e++) order[e] = e;
    ranked = c->scores + r * c->ld;
    qsort(order, (size_t)n, 4, by_rank);
    for (int32_t i = 0; i < k; i++) kept[order[i]] = 1;
    assert_int_equal(c->n[r], k);
    for (int32_t e = 0, i = 0; e < n; e++)
        if (kept[e] && sel[i++] != e)
            fail_msg("row %d of %d entries, top %d: place %d is %d, not %d", r, n, topk, i - 1,
                     sel[i - 1], e);
    for (int64_t i = k; i < c->topk; i++) assert_int_equal(sel[i], -1);
    for (int64_t e = n; e < c->ld; e++) assert_true(ranked[e] == -INFINITY);
    if (n <= k) assert_true(isinf(c->margin[r]));
    if (n > k) {
        const float a = ranked[order[k - 1]], b = ranked[order[k]];
        const float want = isnan(a - b) ? (a == b ? 0 : INFINITY) : a - b;
        assert_true(c->margin[r] == want);
    }
    free(order), free(kept);
}
/* Scores as the CPU has them; NaN in the same places. */
static void check_scores(const struct chosen *c, const struct chosen *twin, int32_t r, int32_t n)
{
    double top = 0, err = 0;
    for (int32_t e = 0; e < n; e++) {
        const double x = (double)c->scores[r * c->ld + e], y = (double)twin->scores[r * c->ld + e];
        if (isnan(x) != isnan(y) || isinf(x) != isinf(y))
            fail_msg("row %d, entry %d of %d: %g, not %g", r, e, n, x, y);
        if (isfinite(x)) top = fmax(top, fabs(y)), err = fmax(err, fabs(x - y));
    }
    if (err > 2e-5 * top) fail_msg("row %d of %d entries: scores off by %g of %g", r, n, err, top);
}
/* Without scores and margin another bound is sought; the list is the same. */
static void check_plain(const struct world *w, const uint16_t *q, const uint16_t *wt, int32_t T,
                        const struct kern_seq *seqs, int32_t n_seqs, const struct chosen *c)
{
    struct chosen plain = choose(gpu, w, q, wt, T, seqs, n_seqs, 0, c->topk, false);
    assert_memory_equal(plain.sel, c->sel, (size_t)(T * c->topk) * 4);
    assert_memory_equal(plain.n, c->n, (size_t)T * 4);
    chosen_free(&plain);
}

/* The last of so many rows that each is one warp's choose as rows alone do. */
static void check_many(const struct world *w, const uint16_t *q, const uint16_t *wt, int32_t n,
                       const struct kern_seq *seqs, int64_t ld)
{
    enum { MANY = 400, TOPK = 512, MOST_SEQS = 32 };
    static uint16_t many_q[(MANY + MOST_SEQS) * H * W], many_wt[(MANY + MOST_SEQS) * H];
    struct kern_seq few_seqs[MOST_SEQS], many_seqs[MOST_SEQS];
    const int32_t each = MANY / n + 1, T = each * n;
    assert_in_range(n, 1, MOST_SEQS);
    for (int32_t i = 0; i < n; i++) {
        few_seqs[i] = seqs[i];
        if (few_seqs[i].topk > TOPK) few_seqs[i].topk = TOPK;
        many_seqs[i] = few_seqs[i];
        many_seqs[i].row0 = i * each;
        many_seqs[i].n_rows = each;
        if (many_seqs[i].pos0 < each) many_seqs[i].pos0 = each - 1, few_seqs[i].pos0 = each - 1;
        many_seqs[i].pos0 -= each - 1;
        for (int32_t t = i * each; t < (i + 1) * each; t++) {
            memcpy(many_q + t * H * W, q + i * H * W, H * W * 2);
            memcpy(many_wt + t * H, wt + i * H, H * 2);
        }
    }
    struct chosen few = choose(gpu, w, q, wt, n, few_seqs, n, ld, TOPK, ld > 0);
    struct chosen many = choose(gpu, w, many_q, many_wt, T, many_seqs, n, ld, TOPK, ld > 0);
    for (int32_t i = 0; i < n; i++) {
        const int32_t t = (i + 1) * each - 1;
        if (memcmp(many.sel + t * TOPK, few.sel + i * TOPK, TOPK * 4) != 0)
            fail_msg("of many rows the last of sequence %d chooses otherwise than alone", i);
        assert_int_equal(many.n[t], few.n[i]);
        if (ld > 0) assert_memory_equal(&many.margin[t], &few.margin[i], 4);
    }
    chosen_free(&few), chosen_free(&many);
}

static void queries(uint16_t *q, uint16_t *wt, int32_t T)
{
    static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int32_t i = 0; i < T * H * W; i++) {
        const float v = values[(int)(fabsf(rnd()) * 7.99f)];
        q[i] = kern_bf16_encode(rnd() < 0 ? -v : v);
    }
    for (int32_t i = 0; i < T * H; i++) wt[i] = kern_bf16_encode(rnd());
}

/* Rows of all lengths and lists of all lengths in one batch. */
static void test_index_select__ragged_rows_keep_what_a_sort_keeps(void **state)
{
    static const int32_t entries[] = {0,    1,     15,    16,    17,    63,    64,    65,    127,
                                      511,  512,   513,   1023,  1025,  2048,  4097,  8191,  8193,
                                      9000, 16384, 16400, 32768, 40000, 65536, 70001, 262144};
    static const int32_t topk[] = {512, 1, 64, 4096, 1024, 2048};
    enum { N = sizeof entries / sizeof *entries };
    static uint16_t q[N * H * W], wt[N * H];
    (void)state;
    queries(q, wt, N);
    for (int ik = KERN_IK_FP4; ik <= KERN_IK_BF16; ik++) {
        struct world w;
        world_open(&w, (enum kern_ik_fmt)ik);
        for (int shift = 0; shift < 6; shift += ik == KERN_IK_FP8 ? 1 : 3) {
            struct kern_seq seqs[N];
            for (int i = 0; i < N; i++)
                seqs[i] =
                    seq_at(&w, i, 1, entries[i] ? entries[i] * 4 - 1 : 0, topk[(i + shift) % 6]);
            struct chosen c = choose(gpu, &w, q, wt, N, seqs, N, LONGEST / 4, 4096, true);
            for (int i = 0; i < N; i++) check_row(&c, i, entries[i], seqs[i].topk);
            check_plain(&w, q, wt, N, seqs, N, &c);
            check_many(&w, q, wt, N, seqs, 0);
            if (shift == 0) {
                struct chosen twin = choose(cpu, &w, q, wt, N, seqs, N, LONGEST / 4, 4096, true);
                for (int i = 0; i < N; i++) check_scores(&c, &twin, i, entries[i]);
                chosen_free(&twin);
            }
            chosen_free(&c);
        }
        world_close(&w);
    }
}

/* Keys all the same, keys that differ in one page, and pages of the best side by side. */
static void test_index_select__equals_and_neighbours_have_one_answer(void **state)
{
    static const int32_t entries[] = {700, 8192, 20000, 65536, 262144};
    enum { N = sizeof entries / sizeof *entries };
    static uint16_t q[N * H * W], wt[N * H];
    (void)state;
    queries(q, wt, 1);
    for (int i = 1; i < N; i++) {
        memcpy(q + i * H * W, q, H * W * 2);
        memcpy(wt + i * H, wt, H * 2);
    }
    for (int kind = 0; kind < 4; kind++) {
        struct world w;
        float key[W], best[W];
        world_open(&w, KERN_IK_FP8);
        for (int c = 0; c < W; c++) key[c] = rnd(), best[c] = kern_bf16_decode(q[c]);
        for (int e = 0; e < w.per_page; e++) { /* page 0: the same key; pages 1 to 7: near `best` */
            store_key(&w, 0, e, key);
            for (int page = 1; page < SPECIAL; page++) {
                for (int c = 0; c < W; c++) key[c] = best[c] + 0.2f * rnd();
                store_key(&w, page, e, key);
            }
        }
        for (int e = 1; e < w.per_page; e++) /* the very bytes of entry 0 */
            memcpy(w.pages + w.l.layer[0].index_off + e * W, w.pages + w.l.layer[0].index_off, W);
        float *scale = (float *)(w.pages + w.l.layer[0].index_off + w.per_page * W);
        for (int e = 1; e < w.per_page; e++) scale[e] = scale[0];
        for (int i = 0; i < LONGEST / w.l.page_tokens; i++) {
            if (kind == 0 || (kind == 1 && i % 50 != 3)) w.ids[i] = 0;
            if (kind == 2 && i >= 40 && i < 200) w.ids[i] = 1 + (uint32_t)i % 7;
            if (kind == 3) w.ids[i] = i < 2 ? 1 : 0;
        }
        for (int topk = 512; topk <= 2048; topk += 1536) {
            struct kern_seq seqs[N];
            for (int i = 0; i < N; i++) seqs[i] = seq_at(&w, i, 1, entries[i] * 4 - 1, topk);
            struct chosen c = choose(gpu, &w, q, wt, N, seqs, N, LONGEST / 4, topk, true);
            for (int i = 0; i < N; i++) check_row(&c, i, entries[i], topk);
            check_plain(&w, q, wt, N, seqs, N, &c);
            check_many(&w, q, wt, N, seqs, 0);
            chosen_free(&c);
        }
        world_close(&w);
    }
}

/* NaN in codes, in scales and in weights; infinite scales, which are NaN too; and rows of which all
 * scores are 0 or infinite. */
static void test_index_select__nan_ranks_last_and_stays_where_it_is(void **state)
{
    enum { N = 6 };
    static const int32_t entries[N] = {600, 600, 20000, 20000, 66000, 20000};
    static uint16_t q[N * H * W], wt[N * H];
    (void)state;
    queries(q, wt, N);
    for (int h = 0; h < H; h++) wt[3 * H + h] = kern_bf16_encode(-INFINITY);
    wt[4 * H + 7] = kern_bf16_encode(NAN);
    for (int h = 0; h < H; h++) wt[5 * H + h] = 0;
    for (int ik = KERN_IK_FP4; ik <= KERN_IK_BF16; ik++) {
        struct world w;
        world_open(&w, (enum kern_ik_fmt)ik);
        const struct kern_kv_layer *y = &w.l.layer[0];
        for (int page = SPECIAL; page < POOL; page += 2)
            for (int e = page % 5; e < w.per_page; e += 1 + page % 9) {
                uint8_t *part = w.pages + page * w.l.page_bytes + y->index_off;
                float *scales = (float *)(part + w.per_page * W);
                if (ik == KERN_IK_FP8 && page % 4 == 0) part[e * W + (e * 13) % W] ^= 0x7f;
                if (ik == KERN_IK_FP8 && page % 4 == 0)
                    part[e * W + (e * 7) % W] = e % 2 ? 0x7f : 0xff;
                if (ik == KERN_IK_FP8 && page % 4 == 2)
                    scales[e] = e % 3 == 0 ? NAN : e % 3 == 1 ? INFINITY : -INFINITY;
                if (ik == KERN_IK_FP4) part[w.per_page * (W / 2) + e * 4 + e % 4] = 0xff;
                if (ik == KERN_IK_BF16) ((uint16_t *)part)[e * W + (e * 13) % W] = 0x7fc1;
            }
        struct kern_seq seqs[N];
        for (int i = 0; i < N; i++) seqs[i] = seq_at(&w, i, 1, entries[i] * 4 - 1, 512);
        struct chosen c = choose(gpu, &w, q, wt, N, seqs, N, 66000, 512, true);
        struct chosen twin = choose(cpu, &w, q, wt, N, seqs, N, 66000, 512, true);
        for (int i = 0; i < N; i++) {
            if (ik != KERN_IK_FP8 || i < 3) check_scores(&c, &twin, i, entries[i]);
            check_row(&c, i, entries[i], 512);
        }
        check_plain(&w, q, wt, N, seqs, N, &c);
        check_many(&w, q, wt, N, seqs, 66000);
        chosen_free(&c), chosen_free(&twin);
        world_close(&w);
    }
}

/* A chunk of more rows than share a wave, over two sequences, and drafts of two to four rows. */
static void test_index_select__chunks_and_drafts_give_the_bits_of_rows_alone(void **state)
{
    enum { CHUNK = 333, REST = 9, T = CHUNK + REST, LD = 16900 };
    static uint16_t q[T * H * W], wt[T * H];
    (void)state;
    queries(q, wt, T);
    for (int kind = KERN_IK_FP4; kind <= KERN_IK_BF16 + 1; kind++) { /* the last: fp8 by codes */
        const int ik = kind > KERN_IK_BF16 ? KERN_IK_FP8 : kind;
        struct world w;
        cuda_fp8_products = kind > KERN_IK_BF16;
        world_open(&w, (enum kern_ik_fmt)ik);
        const struct kern_seq seqs[] = {
            seq_at(&w, 0, CHUNK, 67001, 512), seq_at(&w, CHUNK, 2, 33001, 1024),
            seq_at(&w, CHUNK + 2, 3, 2050, 512), seq_at(&w, CHUNK + 5, 4, 9999, 512)};
        struct chosen all = choose(gpu, &w, q, wt, T, seqs, 4, LD, 1024, true);
        check_plain(&w, q, wt, T, seqs, 4, &all);
        struct kern_seq drafts[3];
        for (int i = 0; i < 3; i++) {
            drafts[i] = seqs[1 + i];
            drafts[i].row0 -= CHUNK;
        }
        struct chosen few =
            choose(gpu, &w, q + CHUNK * H * W, wt + CHUNK * H, REST, drafts, 3, LD, 1024, true);
        assert_memory_equal(few.scores, all.scores + CHUNK * LD, REST * LD * 4);
        assert_memory_equal(few.sel, all.sel + CHUNK * 1024, REST * 1024 * 4);
        for (int t = 0; t < T; t += t < CHUNK - 6 ? 5 : 1) {
            const struct kern_seq *from = seqs;
            while (t >= from->row0 + from->n_rows) from++;
            const int64_t pos = from->pos0 + t - from->row0;
            const struct kern_seq one = seq_at(&w, 0, 1, pos, from->topk);
            struct chosen alone =
                choose(gpu, &w, q + t * H * W, wt + t * H, 1, &one, 1, LD, 1024, true);
            if (memcmp(alone.scores, all.scores + (int64_t)t * LD, LD * 4) != 0)
                fail_msg("kind %d, row %d: other scores alone", kind, t);
            assert_memory_equal(alone.sel, all.sel + (int64_t)t * 1024, 1024 * 4);
            if (t % 15 == 0 || t >= CHUNK)
                check_row(&alone, 0, (int32_t)((pos + 1) / 4), from->topk);
            chosen_free(&alone);
        }
        chosen_free(&all), chosen_free(&few);
        world_close(&w);
    }
    cuda_fp8_products = 0;
}

/* Pages beyond 4 GiB of a pool, and between 2 and 4, give what the same pages give side by side. */
static void test_index_select__pages_far_apart_are_found(void **state)
{
    enum { T = 5, N = 8, LD = N * 64, TOPK = 64 };
    static uint16_t q[T * H * W], wt[T * H];
    struct kern_dev *dev = NULL;
    struct tow_err err = {0};
    (void)state;
    assert_int_equal(kern_dev_open(&dev, test_cuda_device(), 1, &err), 0);
    struct kern_stream *s = kern_dev_stream(dev);
    queries(q, wt, T);
    void *dq = kern_dev_alloc(dev, sizeof q), *dwt = kern_dev_alloc(dev, sizeof wt);
    int32_t *sel = kern_dev_alloc(dev, T * TOPK * 4), *n = kern_dev_alloc(dev, T * 4);
    float *scores = kern_dev_alloc(dev, T * LD * 4);
    assert_true(dq && dwt && sel && n && scores);
    assert_int_equal(kern_stream_write(s, dq, q, sizeof q), 0);
    assert_int_equal(kern_stream_write(s, dwt, wt, sizeof wt), 0);
    for (int kind = KERN_IK_FP4; kind <= KERN_IK_BF16 + 1; kind++) { /* the last: fp8 by codes */
        struct world w;
        static float got[2][T * LD];
        static int32_t kept[2][T * TOPK];
        world_open(&w, (enum kern_ik_fmt)(kind > KERN_IK_BF16 ? KERN_IK_FP8 : kind));
        cuda_fp8_products = kind > KERN_IK_BF16;
        const int64_t last = (INT64_C(9) << 29) / w.l.page_bytes; /* 4.5 GiB */
        for (int far = 0; far < 2; far++) {
            const int64_t n_pages = far ? last + 1 : N;
            uint8_t *pages = kern_dev_alloc(dev, (size_t)(n_pages * w.l.page_bytes));
            assert_non_null(pages);
            for (int i = 0; i < N; i++) {
                w.ids[i] = (uint32_t)(far ? last * (N - 1 - i) / (N - 1) : i);
                assert_int_equal(kern_stream_write(s, pages + w.ids[i] * w.l.page_bytes,
                                                   w.pages + (SPECIAL + i) * w.l.page_bytes,
                                                   (size_t)w.l.page_bytes),
                                 0);
            }
            /* A row with its sequence to itself, and four that share one. */
            struct kern_seq seqs[] = {seq_at(&w, 0, 1, N * 256 - 1, TOPK),
                                      seq_at(&w, 1, T - 1, N * 256 - T, TOPK)};
            struct kern_index_select p = {.q = dq,
                                          .wt = dwt,
                                          .factor = 0.011f,
                                          .pages = pages,
                                          .layout = &w.l,
                                          .seqs = seqs,
                                          .n_seqs = 2,
                                          .T = T,
                                          .H = H,
                                          .selected = sel,
                                          .n_selected = n,
                                          .sel_ld = TOPK,
                                          .scores = scores,
                                          .score_ld = LD,
                                          .act = KERN_BF16};
            assert_int_equal(kern_dev_ops(dev)->index_select(s, &p), 0);
            assert_int_equal(kern_stream_read(s, got[far], scores, sizeof got[far]), 0);
            assert_int_equal(kern_stream_read(s, kept[far], sel, sizeof kept[far]), 0);
            p.n_seqs = 1, p.T = 1; /* one row: the other blocks */
            assert_int_equal(kern_dev_ops(dev)->index_select(s, &p), 0);
            float alone[LD];
            assert_int_equal(kern_stream_read(s, alone, scores, sizeof alone), 0);
            assert_memory_equal(alone, got[far], sizeof alone);
            kern_dev_free(dev, pages);
        }
        assert_memory_equal(got[0], got[1], sizeof got[0]);
        assert_memory_equal(kept[0], kept[1], sizeof kept[0]);
        assert_true(got[0][0] < 0 || got[0][0] > 0);
        world_close(&w);
    }
    cuda_fp8_products = 0;
    kern_dev_free(dev, dq), kern_dev_free(dev, dwt), kern_dev_free(dev, sel);
    kern_dev_free(dev, n), kern_dev_free(dev, scores);
    kern_dev_close(dev);
}

/* p of `got` on the device and of `want`, the same values, on the CPU. */
static void turn_queries(struct kern_index_query p, uint16_t *got, uint16_t *want)
{
    p.q = got;
    assert_int_equal(kern_dev_ops(gpu)->index_query(kern_dev_stream(gpu), &p), 0);
    assert_int_equal(kern_stream_sync(kern_dev_stream(gpu)), 0);
    p.q = want;
    assert_int_equal(kern_dev_ops(cpu)->index_query(kern_dev_stream(cpu), &p), 0);
}

/* Queries of all widths and formats have the CPU's bits; NaN in the same places. */
static void test_index_query__bits_are_the_twins(void **state)
{
    static const int32_t shapes[][2] = {{32, 8},   {64, 64},   {64, 6},    {128, 64}, {128, 2},
                                        {256, 64}, {512, 128}, {1024, 64}, {1024, 34}};
    enum { T = 3, HEADS = 5, N = T * HEADS * 1024 };
    static uint16_t q[N], got[N], want[N];
    static float c[T * 64], s[T * 64];
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int fmt = KERN_IK_FP4; fmt <= KERN_IK_BF16; fmt++) {
            const int32_t w = shapes[i][0], rd = shapes[i][1], n = T * HEADS * w;
            for (int k = 0; k < T * rd / 2; k++) {
                const double angle = (double)rnd() * 3;
                c[k] = (float)cos(angle), s[k] = (float)sin(angle);
            }
            for (int k = 0; k < n; k++) { /* heads of many sizes, and one of zeros */
                const int head = k / w;
                q[k] = kern_bf16_encode(head == 4 ? 0 : ldexpf(rnd(), head * 9 - 60));
            }
            q[6 * w + 3] = 0x7f80, q[7 * w + 1] = 0x7fc1, q[8 * w + w - 1] = 0x7f00;
            memcpy(got, q, sizeof q), memcpy(want, q, sizeof q);
            turn_queries((struct kern_index_query){.cos = c,
                                                   .sin = s,
                                                   .T = T,
                                                   .H = HEADS,
                                                   .w = w,
                                                   .rd = rd,
                                                   .fmt = (enum kern_ik_fmt)fmt,
                                                   .act = KERN_BF16},
                         got, want);
            for (int k = 0; k < n; k++) {
                const int head = k / w;
                /* Of NaN, e2m1 makes its largest, of a sign that nothing defines. */
                if (fmt == KERN_IK_FP4 && (head == 6 || head == 7)) continue;
                const bool nan = (want[k] & 0x7fff) > 0x7f80;
                if (nan ? (got[k] & 0x7fff) <= 0x7f80 : got[k] != want[k])
                    fail_msg("width %d, %d turned, format %d: head %d has %04x at %d, not %04x", w,
                             rd, fmt, head, got[k], k % w, want[k]);
            }
        }
}

/* Rows so many that each block has several, one after the other. */
static void test_index_query__bits_of_chunks_are_the_twins(void **state)
{
    static const int32_t shapes[][3] = {{128, 64, 70}, {128, 128, 3}, {256, 64, 33}, {128, 6, 2}};
    enum { T = 1300, MOST = 128 * 70 };
    uint16_t *got = malloc(sizeof *got * T * MOST), *want = malloc(sizeof *want * T * MOST);
    float *c = malloc(sizeof *c * T * 64), *s = malloc(sizeof *s * T * 64);
    (void)state;
    assert_true(got && want && c && s);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int fmt = KERN_IK_FP4; fmt <= KERN_IK_BF16; fmt++) {
            const int32_t w = shapes[i][0], rd = shapes[i][1], heads = shapes[i][2],
                          n = T * heads * w;
            for (int k = 0; k < T * rd / 2; k++) {
                const double angle = (double)rnd() * 3;
                c[k] = (float)cos(angle), s[k] = (float)sin(angle);
            }
            for (int k = 0; k < n; k++)
                got[k] = want[k] = kern_bf16_encode(ldexpf(rnd(), k / w % 11 * 3 - 15));
            turn_queries((struct kern_index_query){.cos = c,
                                                   .sin = s,
                                                   .T = T,
                                                   .H = heads,
                                                   .w = w,
                                                   .rd = rd,
                                                   .fmt = (enum kern_ik_fmt)fmt,
                                                   .act = KERN_BF16},
                         got, want);
            for (int k = 0; k < n; k++)
                if (got[k] != want[k])
                    fail_msg("%d heads of %d, %d turned, format %d: row %d has %04x at %d, not "
                             "%04x",
                             heads, w, rd, fmt, k / w / heads, got[k], k % (w * heads), want[k]);
        }
    free(got), free(want), free(c), free(s);
}

/* Products of the codes: an error of the matrix unit's, and the exact best of the scores
 * it makes. */
static void test_index_select__products_of_codes_are_near_exact_ones(void **state)
{
    enum { N = 3 };
    static const int32_t entries[N] = {700, 5000, 40000};
    static uint16_t q[N * H * W], wt[N * H];
    struct world w;
    struct kern_seq seqs[N];
    (void)state;
    queries(q, wt, N);
    world_open(&w, KERN_IK_FP8);
    for (int i = 0; i < N; i++) seqs[i] = seq_at(&w, i, 1, entries[i] * 4 - 1, 512);
    struct chosen exact = choose(gpu, &w, q, wt, N, seqs, N, 40000, 512, true);
    cuda_fp8_products = 1;
    struct chosen codes = choose(gpu, &w, q, wt, N, seqs, N, 40000, 512, true);
    cuda_fp8_products = 0;
    for (int i = 0; i < N; i++) {
        double err = 0, mag = 0;
        check_row(&codes, i, entries[i], 512);
        for (int32_t e = 0; e < entries[i]; e++) {
            const double x = (double)codes.scores[i * 40000 + e];
            const double y = (double)exact.scores[i * 40000 + e];
            err += (x - y) * (x - y), mag += y * y;
        }
        print_message("scores of codes, %d entries: rms %.1e\n", entries[i], sqrt(err / mag));
        if (!(err <= 1e-3 * 1e-3 * mag)) fail_msg("rms %g", sqrt(err / mag));
    }
    chosen_free(&exact), chosen_free(&codes);
    world_close(&w);
}

/* Of every kind of score, against a plain count. */
static void test_index_rank__odd_scores_have_the_ranks_of_a_count(void **state)
{
    enum { N = 5000, E = 40 };
    static float s[N];
    struct world w;
    int32_t entries[E];
    struct kern_rank got[E];
    float kth = 7, next = 7;
    static const float odd[] = {NAN, -INFINITY, INFINITY, 0.0f, -0.0f, 1e-45f, 3e38f};
    (void)state;
    world_open(&w, KERN_IK_FP8);
    for (int kind = 0; kind < 4; kind++) {
        for (int i = 0; i < N; i++)
            s[i] = kind == 0 ? rnd() : kind == 1 ? (float)(i % 5) : kind == 2 ? odd[i % 7] : NAN;
        for (int i = 0; i < E; i++) entries[i] = i * (N / E) + i % 3;
        const struct kern_seq row = seq_at(&w, 0, 1, N * 4 - 1, 512);
        const struct kern_index_rank p = {.scores = s,
                                          .pages = w.pages,
                                          .layout = &w.l,
                                          .layer = 0,
                                          .seq = &row,
                                          .T = 1,
                                          .H = H,
                                          .keys = KERN_KEYS_OWN,
                                          .entries = entries,
                                          .n_entries = E,
                                          .ranks = got,
                                          .kth = &kth,
                                          .next = &next,
                                          .act = KERN_BF16};
        assert_int_equal(kern_dev_ops(gpu)->index_rank(kern_dev_stream(gpu), &p), 0);
        for (int a = 0; a < E; a++) {
            const float x = s[entries[a]];
            int32_t rank = 1, equal = -1;
            for (int i = 0; i < N; i++) {
                const bool same = s[i] == x || (isnan(s[i]) && isnan(x));
                const bool above = s[i] > x || (!isnan(s[i]) && isnan(x));
                rank += above || (same && i < entries[a]);
                equal += same;
            }
            assert_int_equal(got[a].rank, rank);
            assert_int_equal(got[a].equal, equal);
        }
        float want[2];
        const struct kern_index_rank twin = {.scores = s,
                                             .pages = w.pages,
                                             .layout = &w.l,
                                             .layer = 0,
                                             .seq = &row,
                                             .T = 1,
                                             .H = H,
                                             .keys = KERN_KEYS_OWN,
                                             .entries = entries,
                                             .n_entries = 0,
                                             .kth = &want[0],
                                             .next = &want[1],
                                             .act = KERN_BF16};
        assert_int_equal(kern_dev_ops(cpu)->index_rank(kern_dev_stream(cpu), &twin), 0);
        assert_true(kth == want[0] || (isnan(kth) && isnan(want[0])));
        assert_true(next == want[1] || (isnan(next) && isnan(want[1])));
    }
    world_close(&w);
}

int main(int argc, char **argv)
{
    char device[64];
    snprintf(device, sizeof device, "mirror:%s", test_cuda_device());
    struct tow_err err = {0};
    if (kern_dev_open(&gpu, device, 1, &err) < 0) return test_no_device(&err);
    if (kern_dev_open(&cpu, "cpu", 0, &err) < 0) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_index_select__ragged_rows_keep_what_a_sort_keeps),
        cmocka_unit_test(test_index_select__equals_and_neighbours_have_one_answer),
        cmocka_unit_test(test_index_select__nan_ranks_last_and_stays_where_it_is),
        cmocka_unit_test(test_index_select__chunks_and_drafts_give_the_bits_of_rows_alone),
        cmocka_unit_test(test_index_select__products_of_codes_are_near_exact_ones),
        cmocka_unit_test(test_index_select__pages_far_apart_are_found),
        cmocka_unit_test(test_index_query__bits_are_the_twins),
        cmocka_unit_test(test_index_query__bits_of_chunks_are_the_twins),
        cmocka_unit_test(test_index_rank__odd_scores_have_the_ranks_of_a_count),
    };
    TEST_CHOOSE(argc, argv, tests);
    int failed = cmocka_run_group_tests_name("gpu/index", tests, NULL, NULL);
    kern_dev_close(gpu);
    kern_dev_close(cpu);
    return failed;
}
