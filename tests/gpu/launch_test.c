/* tests/gpu/launch_test.c - ops that are several ops (linears, prepare) at the deployed shapes: the
 * bits of the ops one by one, for one row and for several; and with one row one launch.
 *
 * Exit 77 where there is no device.
 */
#include "tests/support/check.h"
#include "tests/support/device.h"

#include "common/base/err.h"
#include "kernels/cuda/table.h"
#include "kernels/dev.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_MEM = 64,
    D = 4096,
    LATENT = 1024,
    H = 64,
    HEAD = 512,
    ROT = 64,
    KEY = 128,
    MOST_T = 128
};

static struct kern_dev *dev;
static struct kern_stream *s;
static const struct kern_ops *ops;
static void *mem[MAX_MEM]; /* freed by clear() */
static int n_mem;

static void *room(size_t bytes)
{
    void *p = kern_dev_alloc(dev, bytes);
    assert_non_null(p);
    assert_in_range(n_mem, 0, MAX_MEM - 1);
    return mem[n_mem++] = p;
}
static void *put(void *host, size_t bytes)
{
    void *p = room(bytes);
    assert_int_equal(kern_stream_write(s, p, host, bytes), 0);
    free(host);
    return p;
}
static int clear(void **state)
{
    (void)state;
    while (n_mem > 0) kern_dev_free(dev, mem[--n_mem]);
    return 0;
}

static uint64_t rng = 77;
static uint32_t next(void)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return (uint32_t)(rng >> 32);
}
static float rnd(void)
{
    return (float)(int32_t)next() * 0x1p-31f;
}
static void *halves(int64_t n)
{
    uint16_t *x = malloc((size_t)n * 2);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) x[i] = kern_bf16_encode((rnd() + rnd() + rnd()) * 2);
    return x;
}
static void *floats(int64_t n)
{
    float *x = malloc((size_t)n * 4);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) x[i] = rnd() + rnd();
    return x;
}

static void check_equal(const char *what, const void *a, const void *b, size_t n)
{
    uint8_t *x = malloc(n), *y = malloc(n);
    assert_true(x && y);
    assert_int_equal(kern_stream_read(s, x, a, n), 0);
    assert_int_equal(kern_stream_read(s, y, b, n), 0);
    for (size_t i = 0; i < n; i++)
        if (x[i] != y[i])
            fail_msg("%s: byte %zu of %zu is %d, one by one %d", what, i, n, x[i], y[i]);
    free(x), free(y);
}

/* Kernels of what enqueue does, when it is repeated. */
static int launches(int (*enqueue)(void *), void *arg)
{
    static uint64_t key = 1;
    cuda_graph_kernels = -1;
    key++;
    for (int i = 0; i < 3; i++) assert_int_equal(kern_stream_repeat(s, key, enqueue, arg), 0);
    assert_int_equal(kern_stream_sync(s), 0);
    kern_stream_forget(s);
    return cuda_graph_kernels;
}

/* ------------------------------------------------------------------ linears */

static struct kern_weight weight(enum kern_wfmt fmt, int32_t n, int32_t k)
{
    const int64_t each = fmt == KERN_W_F32 ? 4 : fmt == KERN_W_BF16 ? 2 : 1;
    const int32_t rows = (n + 127) / 128, cols = (k + 127) / 128;
    struct kern_weight w = {.fmt = fmt, .n = n, .k = k, .row_bytes = k * each, .scale2 = 1};
    uint8_t *data = malloc((size_t)n * (size_t)w.row_bytes), *scale = NULL;
    assert_non_null(data);
    for (int64_t i = 0; i < (int64_t)n * k; i++) {
        if (fmt == KERN_W_F32) ((float *)data)[i] = rnd();
        if (fmt == KERN_W_BF16) ((uint16_t *)data)[i] = kern_bf16_encode(rnd());
        if (fmt == KERN_W_FP8) data[i] = (next() & 127) == 127 ? 0 : (uint8_t)next();
    }
    for (int64_t i = 0; fmt == KERN_W_FP8 && i < (int64_t)n * k; i++)
        if ((data[i] & 127) == 127) data[i] ^= 1;
    if (fmt == KERN_W_FP8) {
        scale = malloc((size_t)(rows * cols));
        assert_non_null(scale);
        for (int32_t i = 0; i < rows * cols; i++) scale[i] = (uint8_t)(112 + next() % 12);
        w.sfmt = KERN_S_UE8M0, w.scale = scale, w.scale_row_bytes = cols;
    }
    w.data = data;
    assert_int_equal(kern_dev_place(dev, &w, 1, NULL), 0);
    free(data), free(scale);
    return w;
}

struct product {
    enum kern_wfmt fmt;
    int32_t N;
    enum kern_dtype y;
};
static const struct set {
    const char *name;
    int32_t K, groups;
    enum { ALONE, NORMED, TURNED } before;
    int n;
    struct product p[8];
} sets[] = {
    {"window rows",
     D,
     1,
     ALONE,
     2,
     {{KERN_W_FP8, LATENT, KERN_BF16}, {KERN_W_FP8, HEAD, KERN_BF16}}},
    {"ratio 4 rows",
     D,
     1,
     ALONE,
     7,
     {{KERN_W_FP8, LATENT, KERN_BF16},
      {KERN_W_FP8, HEAD, KERN_BF16},
      {KERN_W_BF16, 1024, KERN_F32},
      {KERN_W_BF16, 1024, KERN_F32},
      {KERN_W_BF16, 256, KERN_F32},
      {KERN_W_BF16, 256, KERN_F32},
      {KERN_W_BF16, H, KERN_BF16}}},
    {"f32 beside fp8",
     D,
     1,
     ALONE,
     3,
     {{KERN_W_F32, 256, KERN_F32}, {KERN_W_FP8, 2048, KERN_BF16}, {KERN_W_FP8, 2048, KERN_BF16}}},
    {"latent",
     LATENT,
     1,
     NORMED,
     2,
     {{KERN_W_FP8, H *HEAD, KERN_BF16}, {KERN_W_FP8, H *KEY, KERN_BF16}}},
    {"latent, bf16",
     LATENT,
     1,
     NORMED,
     2,
     {{KERN_W_BF16, 4096, KERN_BF16}, {KERN_W_BF16, 130, KERN_F32}}},
    {"ragged latent",
     1000,
     1,
     NORMED,
     2,
     {{KERN_W_FP8, 333, KERN_BF16}, {KERN_W_F32, 77, KERN_F32}}},
    {"wo_a", D, 8, TURNED, 1, {{KERN_W_FP8, LATENT, KERN_BF16}}},
    {"wo_b", 8192, 1, ALONE, 1, {{KERN_W_FP8, D, KERN_BF16}}},
};

struct job {
    struct kern_linears all;
    struct kern_linear each[8];
    struct kern_rmsnorm norm;
    struct kern_heads_rope rope;
};
static int enqueue_all(void *arg)
{
    const struct job *j = arg;
    return ops->linears(s, &j->all);
}

static void run_set(const struct set *c, const struct kern_weight *w, int32_t T)
{
    const int64_t width = (int64_t)c->groups * c->K;
    const size_t x_bytes = (size_t)(T * width) * 2;
    void *host = halves(T * width), *x = room(x_bytes), *one = room(x_bytes);
    assert_int_equal(kern_stream_write(s, x, host, x_bytes), 0);
    assert_int_equal(kern_stream_write(s, one, host, x_bytes), 0);
    struct job j = {.norm = {.x = x,
                             .w = {put(floats(width), (size_t)width * 4), KERN_F32, (int32_t)width},
                             .y = x,
                             .ld_x = width,
                             .ld_y = width,
                             .T = T,
                             .D = (int32_t)width,
                             .eps = 1e-6f,
                             .act = KERN_BF16},
                    .rope = {.q = x,
                             .cos = put(floats(T * ROT / 2), (size_t)T * ROT * 2),
                             .sin = put(floats(T * ROT / 2), (size_t)T * ROT * 2),
                             .T = T,
                             .H = (int32_t)(width / HEAD),
                             .d = HEAD,
                             .rd = ROT,
                             .inverse = true,
                             .act = KERN_BF16}};
    for (int i = 0; i < c->n; i++)
        j.each[i] = (struct kern_linear){
            .x = x,
            .w = w[i],
            .y = room((size_t)(T * c->groups * c->p[i].N) * 4),
            .ld_x = width,
            .ld_y = (int64_t)c->groups * c->p[i].N,
            .T = T,
            .N = c->p[i].N,
            .K = c->K,
            .groups = c->groups,
            .x_dtype = KERN_BF16,
            .y_dtype = c->p[i].y,
            .aq = c->p[i].fmt == KERN_W_FP8 && c->before != TURNED ? KERN_AQ_A128 : KERN_AQ_NONE,
            .round_w = c->before == TURNED};
    j.all = (struct kern_linears){j.each, c->before == NORMED ? &j.norm : NULL,
                                  c->before == TURNED ? &j.rope : NULL, c->n};
    assert_int_equal(ops->linears(s, &j.all), 0);

    struct kern_rmsnorm norm = j.norm;
    struct kern_heads_rope rope = j.rope;
    norm.x = norm.y = rope.q = one;
    if (c->before == NORMED) assert_int_equal(ops->rmsnorm(s, &norm), 0);
    if (c->before == TURNED) assert_int_equal(ops->heads_rope(s, &rope), 0);
    for (int i = 0; i < c->n; i++) {
        char what[96];
        struct kern_linear l = j.each[i];
        const size_t bytes = (size_t)(T * l.ld_y * kern_dtype_bytes(l.y_dtype));
        l.x = one;
        l.y = room(bytes);
        assert_int_equal(ops->linear(s, &l), 0);
        snprintf(what, sizeof what, "%s, product %d, %d rows", c->name, i, T);
        check_equal(what, j.each[i].y, l.y, bytes);
    }
    /* In place it would norm the rows again and again, where it does: only one row never does. */
    if (T == 1 && launches(enqueue_all, &j) != 1)
        fail_msg("%s: one row takes %d launches", c->name, cuda_graph_kernels);
    free(host);
    clear(NULL);
}

static void test_linears__has_the_bits_of_its_products(void **state)
{
    static const int32_t ts[] = {1, 2, 3, 8, 9, 40, MOST_T};
    (void)state;
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        struct kern_weight w[8];
        for (int k = 0; k < sets[i].n; k++)
            w[k] = weight(sets[i].p[k].fmt, sets[i].groups * sets[i].p[k].N, sets[i].K);
        for (size_t k = 0; k < sizeof ts / sizeof *ts; k++) run_set(&sets[i], w, ts[k]);
        for (int k = 0; k < sets[i].n; k++) kern_dev_unplace(dev, w[k].data);
    }
}

/* ------------------------------------------------------------------ prepare */

enum { SEQS = 5, PAGES = 8 };

/* What it writes, twice: by the op and by its ops. */
struct world {
    void *q, *kv, *iq;
    uint8_t *pages, *tails;
    struct kern_seq seqs[SEQS];
};
struct steps {
    struct kern_prepare p;
    struct kern_heads_rope heads;
    struct kern_kv_prep kv;
    struct kern_window_store store;
    struct kern_compress comp, index_comp;
    struct kern_index_query index;
};

static int enqueue_prepare(void *arg)
{
    const struct steps *st = arg;
    return ops->prepare(s, &st->p);
}
static int one_by_one(const struct steps *st)
{
    int rc = ops->heads_rope(s, &st->heads);
    if (rc == 0) rc = ops->kv_prep(s, &st->kv);
    if (rc == 0) rc = ops->window_store(s, &st->store);
    if (rc == 0 && st->p.compress) rc = ops->compress(s, &st->comp);
    return rc == 0 && st->p.index ? ops->index_query(s, &st->index) : rc;
}

static void steps_of(struct steps *st, const struct world *w, const struct kern_kv_layout *l,
                     const struct steps *given, int32_t T)
{
    const int32_t ratio = l->layer[0].ratio;
    *st = *given;
    st->heads.q = w->q, st->heads.T = T;
    st->kv.x = st->kv.y = w->kv, st->kv.T = T;
    st->store = (struct kern_window_store){w->kv, l, 0, w->seqs, T, KERN_BF16};
    st->comp.pages = st->index_comp.pages = w->pages;
    st->comp.seqs = st->index_comp.seqs = w->seqs;
    st->comp.n_seqs = st->index_comp.n_seqs = T;
    st->comp.layout = st->index_comp.layout = l;
    st->comp.also = ratio == 4 ? &st->index_comp : NULL;
    st->index.q = w->iq, st->index.T = T;
    st->p = (struct kern_prepare){&st->heads, &st->kv, &st->store, ratio ? &st->comp : NULL,
                                  ratio == 4 ? &st->index : NULL};
}

static void run_prepare(int32_t ratio, enum kern_kv_fmt kv_fmt, enum kern_ik_fmt ik_fmt, int32_t T)
{
    static const int64_t starts[SEQS] = {0, 125, 3, 1022, 510};
    const int32_t c = ratio == 4 ? 2 : 1;
    const struct kern_kv_spec sp = {.n_layers = 1,
                                    .ratios = {ratio},
                                    .head_dim = HEAD,
                                    .rope_dim = ROT,
                                    .window = 128,
                                    .index_dim = KEY,
                                    .kv_fmt = kv_fmt,
                                    .ik_fmt = ik_fmt};
    struct kern_kv_layout l;
    assert_int_equal(kern_kv_layout_init(&l, &sp, NULL), 0);
    static uint32_t ids[SEQS * PAGES];
    const size_t pool = SEQS * PAGES * (size_t)l.page_bytes, tails = SEQS * (size_t)l.tail_bytes;
    const size_t q_bytes = (size_t)T * H * HEAD * 2, kv_bytes = (size_t)T * HEAD * 2,
                 iq_bytes = (size_t)T * H * KEY * 2;
    struct steps given = {
        .heads = {.cos = put(floats(T * ROT / 2), (size_t)T * ROT * 2),
                  .sin = put(floats(T * ROT / 2), (size_t)T * ROT * 2),
                  .H = H,
                  .d = HEAD,
                  .rd = ROT,
                  .eps = 1e-6f,
                  .norm = true,
                  .act = KERN_BF16},
        .comp = {.kv = put(floats((int64_t)T * c * HEAD), (size_t)(T * c) * HEAD * 4),
                 .gate = put(floats((int64_t)T * c * HEAD), (size_t)(T * c) * HEAD * 4),
                 .ape = put(floats((int64_t)(ratio + 1) * c * HEAD),
                            (size_t)((ratio + 1) * c) * HEAD * 4),
                 .norm = {put(halves(HEAD), HEAD * 2), KERN_BF16, HEAD},
                 .inv_freq = put(floats(ROT / 2), ROT * 2),
                 .eps = 1e-6f,
                 .act = KERN_BF16}};
    given.index_comp = given.comp;
    given.index_comp.kv = put(floats((int64_t)T * c * KEY), (size_t)(T * c) * KEY * 4);
    given.index_comp.gate = put(floats((int64_t)T * c * KEY), (size_t)(T * c) * KEY * 4);
    given.index_comp.ape =
        put(floats((int64_t)(ratio + 1) * c * KEY), (size_t)((ratio + 1) * c) * KEY * 4);
    given.index_comp.norm = (struct kern_vec){put(floats(KEY), KEY * 4), KERN_F32, KEY};
    given.index_comp.index = true;
    given.kv = (struct kern_kv_prep){.w = {put(halves(HEAD), HEAD * 2), KERN_BF16, HEAD},
                                     .cos = given.heads.cos,
                                     .sin = given.heads.sin,
                                     .d = HEAD,
                                     .rd = ROT,
                                     .eps = 1e-6f,
                                     .act = KERN_BF16};
    given.index = (struct kern_index_query){.cos = given.heads.cos,
                                            .sin = given.heads.sin,
                                            .H = H,
                                            .w = KEY,
                                            .rd = ROT,
                                            .fmt = ik_fmt,
                                            .act = KERN_BF16};
    struct world w[2];
    struct steps st[2];
    for (int i = 0; i < 2; i++) {
        w[i] = (struct world){room(q_bytes), room(kv_bytes), room(iq_bytes),
                              room(pool),    room(tails),    {{0}}};
        for (int32_t k = 0; k < SEQS * PAGES; k++) ids[k] = (uint32_t)k;
        for (int32_t k = 0; k < T; k++)
            w[i].seqs[k] = (struct kern_seq){.row0 = k,
                                             .n_rows = 1,
                                             .page_ids = ids + k * PAGES,
                                             .n_pages = PAGES,
                                             .tail = w[i].tails + k * l.tail_bytes,
                                             .topk = 1};
        steps_of(&st[i], &w[i], &l, &given, T);
    }
    /* Six tokens: groups of four close, so do groups of 128 where a sequence begins before their
     * end. */
    for (int32_t step = 0; step < 6; step++) {
        void *q = halves(T * H * HEAD), *kv = halves(T * HEAD), *iq = halves(T * H * KEY);
        for (int i = 0; i < 2; i++) {
            for (int32_t k = 0; k < T; k++) w[i].seqs[k].pos0 = starts[k] + step;
            assert_int_equal(kern_stream_write(s, w[i].q, q, q_bytes), 0);
            assert_int_equal(kern_stream_write(s, w[i].kv, kv, kv_bytes), 0);
            assert_int_equal(kern_stream_write(s, w[i].iq, iq, iq_bytes), 0);
            assert_int_equal(kern_stream_batch(s, w[i].seqs, T), 0);
            assert_int_equal(i == 0 ? ops->prepare(s, &st[i].p) : one_by_one(&st[i]), 0);
            assert_int_equal(kern_stream_sync(s), 0);
        }
        free(q), free(kv), free(iq);
        char what[96];
        snprintf(what, sizeof what, "ratio %d, formats %d %d, %d rows, step %d", ratio, (int)kv_fmt,
                 (int)ik_fmt, T, step);
        check_equal(what, w[0].q, w[1].q, q_bytes);
        check_equal(what, w[0].kv, w[1].kv, kv_bytes);
        check_equal(what, w[0].iq, w[1].iq, iq_bytes);
        check_equal(what, w[0].pages, w[1].pages, pool);
        check_equal(what, w[0].tails, w[1].tails, tails);
    }
    assert_int_equal(kern_stream_batch(s, w[0].seqs, T), 0);
    if (launches(enqueue_prepare, &st[0]) != 1)
        fail_msg("ratio %d, %d rows: %d launches", ratio, T, cuda_graph_kernels);
    assert_int_equal(kern_stream_batch(s, NULL, 0), 0);
    clear(NULL);
}

static void test_prepare__has_the_bits_of_its_ops(void **state)
{
    static const int32_t ratios[] = {0, 4, 128}, ts[] = {1, SEQS};
    (void)state;
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 2; k++) {
            run_prepare(ratios[i], KERN_KV_FP8, KERN_IK_FP8, ts[k]);
            run_prepare(ratios[i], KERN_KV_BF16, KERN_IK_FP4, ts[k]);
        }
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    if (kern_dev_open(&dev, test_cuda_device(), 0, &err) < 0) return test_no_device(&err);
    s = kern_dev_stream(dev);
    ops = kern_dev_ops(dev);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_linears__has_the_bits_of_its_products, clear),
        cmocka_unit_test_teardown(test_prepare__has_the_bits_of_its_ops, clear),
    };
    TEST_CHOOSE(argc, argv, tests);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    kern_dev_close(dev);
    return rc;
}
