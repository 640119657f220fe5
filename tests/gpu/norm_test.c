/* tests/gpu/norm_test.c - norms, rotations, hyper-connections and what they feed into the cache, at
 * the deployed shapes: the device beside the CPU, both through kernels/dev.h.
 *
 * Where the device adds in the CPU's order the bytes must be equal: heads, window keys, compressed
 * entries, stored rows, states. Elsewhere (rmsnorm, the mixes) a result must be near, and rows must
 * have the same bits alone, in pieces and all at once, also where another kernel takes over.
 *
 * Exit 77 where there is no device.
 */
#include "tests/support/check.h"
#include "tests/support/device.h"

#include "common/base/err.h"
#include "kernels/dev.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- two devices, the same calls */

enum { CPU, GPU, SIDES, MAX_MEM = 64 };
static struct side {
    struct kern_dev *dev;
    struct kern_stream *s;
    const struct kern_ops *ops;
    void *mem[MAX_MEM]; /* freed by clear() */
    int n_mem;
} sides[SIDES];

static void *room(struct side *d, size_t bytes)
{
    void *p = kern_dev_alloc(d->dev, bytes);
    assert_non_null(p);
    assert_in_range(d->n_mem, 0, MAX_MEM - 1);
    return d->mem[d->n_mem++] = p;
}
static void *put(struct side *d, const void *host, size_t bytes)
{
    void *p = room(d, bytes);
    assert_int_equal(kern_stream_write(d->s, p, host, bytes), 0);
    return p;
}
/* malloc'ed */
static void *get(struct side *d, const void *p, size_t bytes)
{
    void *host = malloc(bytes);
    assert_non_null(host);
    assert_int_equal(kern_stream_read(d->s, host, p, bytes), 0);
    return host;
}
static int clear(void **state)
{
    (void)state;
    for (int i = 0; i < SIDES; i++)
        while (sides[i].n_mem > 0) kern_dev_free(sides[i].dev, sides[i].mem[--sides[i].n_mem]);
    return 0;
}

/* --- numbers */

static uint64_t rng = 42;
static float rnd(void)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return (float)(int32_t)(rng >> 32) * 0x1p-31f;
}
static float *floats(int64_t n, float scale)
{
    float *x = malloc((size_t)n * 4);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) x[i] = (rnd() + rnd() + rnd()) * scale;
    return x;
}
static uint16_t *halves(int64_t n, float scale)
{
    uint16_t *x = malloc((size_t)n * 2);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) x[i] = kern_bf16_encode((rnd() + rnd() + rnd()) * scale);
    return x;
}

static void check_bytes(const char *what, const void *got, const void *want, size_t n)
{
    const uint8_t *a = got, *b = want;
    size_t n_wrong = 0, first = 0;
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i] && n_wrong++ == 0) first = i;
    if (n_wrong)
        fail_msg("%s: %zu of %zu bytes differ, the first at %zu: %d, not %d", what, n_wrong, n,
                 first, a[first], b[first]);
}
/* bf16 within some steps of the last place, or within tol (or tols[i]), where sums differ in their
 * last bits; and rarely. */
static void check_steps(const char *what, const uint16_t *got, const uint16_t *want, size_t n,
                        float tol, const float *tols, float steps)
{
    size_t n_wrong = 0;
    for (size_t i = 0; i < n; i++) {
        if (got[i] == want[i]) continue;
        const float a = kern_bf16_decode(got[i]), b = kern_bf16_decode(want[i]);
        if (isnan(a) && isnan(b)) continue;
        if (!(fabsf(a - b) <= fabsf(b) * steps * 0x1p-7f + (tols ? tols[i] : tol)))
            fail_msg("%s: element %zu of %zu is %g, not %g", what, i, n, (double)a, (double)b);
        n_wrong++;
    }
    if (n_wrong > n / 100 + 1)
        fail_msg("%s: %zu of %zu elements differ by a step", what, n_wrong, n);
}
static void check_halves(const char *what, const uint16_t *got, const uint16_t *want, size_t n,
                         float tol)
{
    check_steps(what, got, want, n, tol, NULL, 1);
}
static void check_floats(const char *what, const float *got, const float *want, size_t n, float tol)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(got[i] - want[i]) <= tol))
            fail_msg("%s: element %zu of %zu is %g, not %g", what, i, n, (double)got[i],
                     (double)want[i]);
}

/* --- rmsnorm */

static void norm(struct side *d, const struct kern_rmsnorm *p, int32_t t, int32_t n)
{
    struct kern_rmsnorm q = *p;
    q.x = (const uint16_t *)p->x + t * p->ld_x;
    q.y = (uint16_t *)p->y + t * p->ld_y;
    q.T = n;
    assert_int_equal(d->ops->rmsnorm(d->s, &q), 0);
}

static void test_rmsnorm__wide_rows_are_near_and_independent(void **state)
{
    static const int32_t widths[] = {512, 1024, 4096, 7168, 20000};
    enum { T = 37, BAD = 5 };
    (void)state;
    for (int k = 0; k < 5; k++) {
        const int32_t D = widths[k];
        const size_t n = (size_t)T * (size_t)D;
        uint16_t *x = halves((int64_t)n, 1), *y[SIDES];
        float *w = floats(D, 1);
        x[BAD * D + 7] = 0x7fc0; /* NaN: its own row only */
        for (int i = 0; i < SIDES; i++) {
            struct side *d = &sides[i];
            struct kern_rmsnorm p = {.x = put(d, x, n * 2),
                                     .w = {put(d, w, (size_t)D * 4), KERN_F32, D},
                                     .y = room(d, n * 2),
                                     .ld_x = D,
                                     .ld_y = D,
                                     .T = T,
                                     .D = D,
                                     .eps = 1e-6f,
                                     .act = KERN_BF16};
            norm(d, &p, 0, T);
            y[i] = get(d, p.y, n * 2);
            if (i == CPU) continue;
            p.y = room(d, n * 2);
            for (int32_t t = 0; t < T; t++) norm(d, &p, t, 1);
            uint16_t *alone = get(d, p.y, n * 2);
            check_bytes("rmsnorm row by row", alone, y[i], n * 2);
            free(alone);
        }
        for (int32_t t = 0; t < T; t++)
            assert_int_equal(isnan(kern_bf16_decode(y[GPU][t * D])) != 0, t == BAD);
        check_halves("rmsnorm", y[GPU], y[CPU], n, 0);
        free(x), free(w), free(y[CPU]), free(y[GPU]);
        clear(NULL);
    }
}

/* --- rotations */

static void test_rope_table__has_the_cpus_bits(void **state)
{
    enum { T = 4096, RD = 64 };
    (void)state;
    int32_t *pos = malloc(T * 4);
    float freq[RD / 2], *c[SIDES], *sn[SIDES];
    for (int i = 0; i < T; i++) pos[i] = i < 2048 ? i * 512 + i % 7 : INT32_MAX - i * 1000;
    for (int i = 0; i < RD / 2; i++) freq[i] = powf(10000.0f, -(float)i / (RD / 2));
    for (int i = 0; i < SIDES; i++) {
        struct side *d = &sides[i];
        struct kern_rope_table p = {put(d, pos, T * 4),
                                    put(d, freq, sizeof freq),
                                    room(d, T * RD / 2 * 4),
                                    room(d, T * RD / 2 * 4),
                                    T,
                                    RD};
        assert_int_equal(d->ops->rope_table(d->s, &p), 0);
        c[i] = get(d, p.cos, T * RD / 2 * 4), sn[i] = get(d, p.sin, T * RD / 2 * 4);
    }
    check_bytes("cos", c[GPU], c[CPU], T * RD / 2 * 4);
    check_bytes("sin", sn[GPU], sn[CPU], T * RD / 2 * 4);
    for (int i = 0; i < SIDES; i++) free(c[i]), free(sn[i]);
    free(pos);
}

static void test_heads_rope__has_the_cpus_bits(void **state)
{
    enum { H = 64, D = 512, RD = 64, BAD = 3 };
    static const int32_t rows[] = {1, 2, 7, 40};
    (void)state;
    for (int k = 0; k < 16; k++) {
        const int32_t T = rows[k % 4],
                      h = k / 8 ? 3 : H; /* 3: no multiple of a warp's four heads */
        const bool with_norm = k & 4, inverse = !with_norm;
        const size_t n = (size_t)T * (size_t)h * D, n_angles = (size_t)T * RD / 2;
        uint16_t *q = halves((int64_t)n, 3), *got[SIDES];
        float *c = floats((int64_t)n_angles, 0.3f), *sn = floats((int64_t)n_angles, 0.3f);
        q[BAD % (T * h) * D + 9] = 0x7fc0;
        for (int i = 0; i < SIDES; i++) {
            struct side *d = &sides[i];
            struct kern_heads_rope p = {put(d, q, n * 2),
                                        put(d, c, n_angles * 4),
                                        put(d, sn, n_angles * 4),
                                        T,
                                        h,
                                        D,
                                        RD,
                                        1e-6f,
                                        with_norm,
                                        inverse,
                                        KERN_BF16};
            assert_int_equal(d->ops->heads_rope(d->s, &p), 0);
            got[i] = get(d, p.q, n * 2);
        }
        for (size_t i = 0; i < n; i++) { /* one NaN is like another */
            const bool bad = isnan(kern_bf16_decode(got[CPU][i]));
            assert_int_equal(bad, isnan(kern_bf16_decode(got[GPU][i])) != 0);
            assert_true(!bad || i / D == (size_t)(BAD % (T * h)));
            if (bad) got[CPU][i] = got[GPU][i] = 0x7fc0;
        }
        check_bytes("heads_rope", got[GPU], got[CPU], n * 2);
        free(q), free(c), free(sn), free(got[CPU]), free(got[GPU]);
        clear(NULL);
    }
}

static void test_kv_prep__has_the_cpus_bits(void **state)
{
    enum { D = 512, RD = 64 };
    static const int32_t rows[] = {1, 5, 700};
    (void)state;
    for (int k = 0; k < 3; k++) {
        const int32_t T = rows[k];
        const size_t n = (size_t)T * D, n_angles = (size_t)T * RD / 2;
        uint16_t *x = halves((int64_t)n, 2), *w = halves(D, 1), *got[SIDES];
        float *c = floats((int64_t)n_angles, 0.3f), *sn = floats((int64_t)n_angles, 0.3f);
        for (int i = 0; i < SIDES; i++) {
            struct side *d = &sides[i];
            struct kern_kv_prep p = {.x = put(d, x, n * 2),
                                     .w = {put(d, w, D * 2), KERN_BF16, D},
                                     .cos = put(d, c, n_angles * 4),
                                     .sin = put(d, sn, n_angles * 4),
                                     .y = room(d, n * 2),
                                     .T = T,
                                     .d = D,
                                     .rd = RD,
                                     .eps = 1e-6f,
                                     .act = KERN_BF16};
            assert_int_equal(d->ops->kv_prep(d->s, &p), 0);
            got[i] = get(d, p.y, n * 2);
        }
        check_bytes("kv_prep", got[GPU], got[CPU], n * 2);
        free(x), free(w), free(c), free(sn), free(got[CPU]), free(got[GPU]);
        clear(NULL);
    }
}

/* --- hyper-connections */

enum { HC = 4, HC_T = 1000 }; /* of many rows an H200 takes 448 at a time */
struct collapsed {
    uint16_t *x;
    float *post, *comb;
};
/* Rows t .. t+n-1 into their places of x, post and comb. */
static void collapse(struct side *d, const struct kern_hc_collapse *p, int32_t t, int32_t n)
{
    struct kern_hc_collapse q = *p;
    q.h = (const uint16_t *)p->h + (int64_t)t * HC * p->D;
    q.x = (uint16_t *)p->x + (int64_t)t * p->D;
    if (p->post) q.post += t * HC, q.comb += t * HC * HC;
    q.T = n;
    assert_int_equal(d->ops->hc_collapse(d->s, &q), 0);
}
static struct collapsed collapse_in(struct side *d, struct kern_hc_collapse *p, int32_t piece)
{
    struct collapsed c = {0};
    const size_t n = (size_t)HC_T * (size_t)p->D;
    const bool head = !p->comb;
    p->x = room(d, n * 2);
    if (!head) p->post = room(d, HC_T * HC * 4), p->comb = room(d, HC_T * HC * HC * 4);
    for (int32_t t = 0; t < HC_T; t += piece)
        collapse(d, p, t, HC_T - t < piece ? HC_T - t : piece);
    c.x = get(d, p->x, n * 2);
    if (!head) c.post = get(d, p->post, HC_T * HC * 4);
    if (!head) c.comb = get(d, p->comb, HC_T * HC * HC * 4);
    return c;
}
static void collapsed_free(struct collapsed *c)
{
    free(c->x), free(c->post), free(c->comb);
}

static void collapse_case(int32_t D, enum kern_wfmt fmt, bool head)
{
    /* 1, 16, 17, 64 and 128 rows at a time cross every kernel of few rows; 1000, 225 are many. */
    static const int32_t pieces[] = {HC_T, 1, 16, 17, 64, 128, 225};
    const int64_t K = (int64_t)HC * D;
    const int32_t N = head ? HC : (2 + HC) * HC;
    uint16_t *h = halves(HC_T * K, 1);
    float *fn = floats(N * K, 0.02f), *base = floats(N, 1), *scale = floats(3, 1);
    uint16_t *fn16 = halves(N * K, 0.02f);
    struct collapsed want = {0}, whole = {0};
    for (int i = 0; i < SIDES; i++) {
        struct side *d = &sides[i];
        const int64_t row = K * (fmt == KERN_W_F32 ? 4 : 2);
        struct kern_weight w = {.data = fmt == KERN_W_F32 ? (void *)fn : (void *)fn16,
                                .fmt = fmt,
                                .n = N,
                                .k = (int32_t)K,
                                .row_bytes = row,
                                .scale2 = 1};
        assert_int_equal(kern_dev_place(d->dev, &w, 1, NULL), 0);
        float dummy;
        struct kern_hc_collapse p = {.h = put(d, h, (size_t)(HC_T * K) * 2),
                                     .fn = w,
                                     .base = put(d, base, (size_t)N * 4),
                                     .scale = put(d, scale, 12),
                                     .post = head ? NULL : &dummy,
                                     .comb = head ? NULL : &dummy,
                                     .hc = HC,
                                     .D = D,
                                     .iters = 20,
                                     .hc_eps = 1e-6f,
                                     .norm_eps = 1e-6f,
                                     .act = KERN_BF16};
        if (i == CPU) want = collapse_in(d, &p, HC_T);
        for (int k = 0; i == GPU && k < 7; k++) {
            struct collapsed got = collapse_in(d, &p, pieces[k]);
            if (k == 0) {
                whole = got;
                continue;
            }
            char what[64];
            snprintf(what, sizeof what, "hc_collapse, %d rows at a time", pieces[k]);
            check_bytes(what, got.x, whole.x, (size_t)HC_T * (size_t)D * 2);
            if (!head) check_bytes(what, got.post, whole.post, HC_T * HC * 4);
            if (!head) check_bytes(what, got.comb, whole.comb, HC_T * HC * HC * 4);
            collapsed_free(&got);
        }
        kern_dev_unplace(d->dev, w.data);
    }
    if (!head) check_floats("post", whole.post, want.post, HC_T * HC, 2e-5f);
    if (!head) check_floats("comb", whole.comb, want.comb, HC_T * HC * HC, 2e-5f);
    check_halves("x", whole.x, want.x, (size_t)HC_T * (size_t)D, 2e-5f);
    collapsed_free(&want), collapsed_free(&whole);
    free(h), free(fn), free(fn16), free(base), free(scale);
    clear(NULL);
}
static void test_hc_collapse__few_rows_and_many_have_the_same_bits(void **state)
{
    (void)state;
    collapse_case(4096, KERN_W_F32, false);
    collapse_case(4096, KERN_W_BF16, false);
    collapse_case(4096, KERN_W_F32, true);
    collapse_case(7168, KERN_W_F32, false);
    collapse_case(96, KERN_W_F32, false); /* the plain kernel */
}

static void test_hc_expand__has_the_cpus_bits(void **state)
{
    enum { D = 4096, T = 11 };
    (void)state;
    uint16_t *y = halves(T * D, 1), *h = halves(T * HC * D, 1), *got[SIDES], *mixed[SIDES];
    float *post = floats(T * HC, 1), *comb = floats(T * HC * HC, 1);
    for (int i = 0; i < SIDES; i++) {
        struct side *d = &sides[i];
        struct kern_hc_expand p = {.y = put(d, y, T * D * 2),
                                   .h = put(d, h, T * HC * D * 2),
                                   .post = put(d, post, T * HC * 4),
                                   .comb = put(d, comb, T * HC * HC * 4),
                                   .T = T,
                                   .hc = HC,
                                   .D = D,
                                   .act = KERN_BF16};
        struct kern_mtp_mix m = {p.y, p.h, room(d, T * HC * D * 2), T, HC, D, KERN_BF16};
        assert_int_equal(d->ops->mtp_mix(d->s, &m), 0);
        mixed[i] = get(d, m.out, T * HC * D * 2);
        p.out = (void *)(uintptr_t)p.h; /* in place */
        assert_int_equal(d->ops->hc_expand(d->s, &p), 0);
        got[i] = get(d, p.out, T * HC * D * 2);
    }
    check_bytes("hc_expand", got[GPU], got[CPU], T * HC * D * 2);
    check_bytes("mtp_mix", mixed[GPU], mixed[CPU], T * HC * D * 2);
    for (int i = 0; i < SIDES; i++) free(got[i]), free(mixed[i]);
    free(y), free(h), free(post), free(comb);
}

/* --- the boundary: all four ops at once */

struct crossed {
    uint16_t *h, *x;
    float *post, *comb;
};
static struct crossed cross(struct side *d, const struct kern_hc_boundary *p, const uint16_t *y,
                            const struct crossed *from, int32_t piece, bool apart)
{
    const int32_t D = p->D;
    const size_t n = (size_t)HC_T * (size_t)D, room_h = n * HC * 2;
    struct kern_hc_boundary q = *p;
    uint16_t *h = put(d, from->h, room_h), *x = room(d, n * 2), *in = y ? put(d, y, n * 2) : NULL;
    float *post = put(d, from->post, HC_T * HC * 4), *comb = put(d, from->comb, HC_T * HC * HC * 4);
    for (int32_t t = 0; t < HC_T; t += piece) {
        q.T = HC_T - t < piece ? HC_T - t : piece;
        q.routed = p->routed ? p->routed + (int64_t)t * D : NULL;
        q.y = in ? in + (int64_t)t * D : NULL;
        q.h = h + (int64_t)t * HC * D;
        q.x = x + (int64_t)t * D;
        q.post = post + t * HC, q.comb = comb + t * HC * HC;
        if (!apart) {
            assert_int_equal(d->ops->hc_boundary(d->s, &q), 0);
            continue;
        }
        const struct kern_add add = {q.routed, q.y, q.y, (int64_t)q.T * D, q.act};
        const struct kern_hc_expand expand = {q.y, q.h, q.post, q.comb, q.h, q.T, HC, D, q.act};
        const struct kern_hc_collapse collapse = {.h = q.h,
                                                  .fn = q.fn,
                                                  .base = q.base,
                                                  .scale = q.scale,
                                                  .x = q.x,
                                                  .post = q.head ? NULL : q.post,
                                                  .comb = q.head ? NULL : q.comb,
                                                  .T = q.T,
                                                  .hc = HC,
                                                  .D = D,
                                                  .iters = q.iters,
                                                  .hc_eps = q.hc_eps,
                                                  .norm_eps = q.norm_eps,
                                                  .act = q.act};
        const struct kern_rmsnorm norm = {q.x, q.norm, q.x, D, D, q.T, D, q.norm_eps, q.act};
        if (q.routed) assert_int_equal(d->ops->add(d->s, &add), 0);
        if (q.y) assert_int_equal(d->ops->hc_expand(d->s, &expand), 0);
        assert_int_equal(d->ops->hc_collapse(d->s, &collapse), 0);
        assert_int_equal(d->ops->rmsnorm(d->s, &norm), 0);
    }
    return (struct crossed){get(d, h, room_h), get(d, x, n * 2), get(d, post, HC_T * HC * 4),
                            get(d, comb, HC_T * HC * HC * 4)};
}
static void crossed_free(struct crossed *c)
{
    free(c->h), free(c->x), free(c->post), free(c->comb);
}

/* 2e-5, and what an error of 2e-6 in each of a row's four factors does to an element, by the norm's
 * gain: where streams cancel it is a good part of what is left, and a gain of thirty was seen. (The
 * mixes read f32 weights to 2^-18.) */
static float *boundary_slack(struct side *d, const struct kern_hc_boundary *p, const uint16_t *h,
                             const float *w)
{
    const int32_t D = p->D;
    const size_t n = (size_t)HC_T * (size_t)D;
    struct kern_hc_collapse plain = {.h = put(d, h, n * HC * 2),
                                     .fn = p->fn,
                                     .base = p->base,
                                     .scale = p->scale,
                                     .post = p->head ? NULL : &(float){0},
                                     .comb = p->head ? NULL : &(float){0},
                                     .hc = HC,
                                     .D = D,
                                     .iters = p->iters,
                                     .hc_eps = p->hc_eps,
                                     .norm_eps = p->norm_eps,
                                     .act = p->act};
    struct collapsed c = collapse_in(d, &plain, HC_T);
    float *slack = malloc(n * sizeof *slack);
    assert_non_null(slack);
    for (size_t t = 0; t < HC_T; t++) {
        double sq = 0;
        for (int32_t i = 0; i < D; i++)
            sq += pow((double)kern_bf16_decode(c.x[t * (size_t)D + (size_t)i]), 2);
        const double gain = 1 / sqrt(sq / D + (double)p->norm_eps);
        for (int32_t i = 0; i < D; i++) {
            double terms = 0;
            for (size_t j = 0; j < HC; j++)
                terms += fabs((double)kern_bf16_decode(h[(t * HC + j) * (size_t)D + (size_t)i]));
            slack[t * (size_t)D + (size_t)i] =
                (float)(2e-5 + 2e-6 * terms * gain * fabs((double)w[i]));
        }
    }
    collapsed_free(&c);
    return slack;
}

static void boundary_case(int32_t D, bool expands, bool routed, bool head, enum kern_wfmt fmt)
{
    static const int32_t pieces[] = {1, 15, 16, 17, 128, 226};
    const int64_t K = (int64_t)HC * D, n = (int64_t)HC_T * D;
    const int32_t N = head ? HC : (2 + HC) * HC;
    const bool f32 = fmt == KERN_W_F32;
    uint16_t *y = halves(n, 1), *fn16 = halves(N * K, 0.02f), *w16 = halves(D, 1);
    float *fn = floats(N * K, 0.02f), *base = floats(N, 1), *scale = floats(3, 1);
    float *sum = floats(n, 1), *w = floats(D, 1);
    struct crossed from = {halves(n * HC, 1), NULL, floats(HC_T * HC, 0.5f),
                           floats(HC_T * HC * HC, 0.3f)},
                   got[SIDES];
    float *slack = NULL;
    if (!f32)
        for (int32_t i = 0; i < D; i++) w[i] = kern_bf16_decode(w16[i]);
    y[7 * D + 9] = 0x7fc0; /* NaN: row 7 only */
    for (int i = 0; i < SIDES; i++) {
        struct side *d = &sides[i];
        struct kern_weight weight = {.data = f32 ? (void *)fn : (void *)fn16,
                                     .fmt = fmt,
                                     .n = N,
                                     .k = (int32_t)K,
                                     .row_bytes = K * (f32 ? 4 : 2),
                                     .scale2 = 1};
        assert_int_equal(kern_dev_place(d->dev, &weight, 1, NULL), 0);
        struct kern_hc_boundary p = {
            .routed = routed ? put(d, sum, (size_t)n * 4) : NULL,
            .fn = weight,
            .base = put(d, base, (size_t)N * 4),
            .scale = put(d, scale, 12),
            .norm = {put(d, f32 ? (void *)w : (void *)w16, (size_t)D * (f32 ? 4 : 2)),
                     f32 ? KERN_F32 : KERN_BF16, D},
            .head = head,
            .hc = HC,
            .D = D,
            .iters = 20,
            .hc_eps = 1e-6f,
            .norm_eps = 1e-6f,
            .act = KERN_BF16};
        const uint16_t *in = expands ? y : NULL;
        got[i] = cross(d, &p, in, &from, HC_T, false);
        if (i == CPU) slack = boundary_slack(d, &p, got[i].h, w);
        for (int k = 0; i == GPU && k < 8; k++) {
            struct crossed c = cross(d, &p, in, &from, k < 6 ? pieces[k] : HC_T, k >= 6);
            char what[64];
            snprintf(what, sizeof what, "hc_boundary, %d %s", k < 6 ? pieces[k] : HC_T,
                     k < 6 ? "rows at a time" : "rows, op by op");
            check_bytes(what, c.h, got[GPU].h, (size_t)n * HC * 2);
            check_bytes(what, c.post, got[GPU].post, HC_T * HC * 4);
            check_bytes(what, c.comb, got[GPU].comb, HC_T * HC * HC * 4);
            check_bytes(what, c.x, got[GPU].x, (size_t)n * 2);
            crossed_free(&c);
            /* Buffers of a try, up to what all share. */
            while (d->n_mem > 4) kern_dev_free(d->dev, d->mem[--d->n_mem]);
        }
        kern_dev_unplace(d->dev, weight.data);
    }
    for (int64_t i = 0; i < n * HC; i++) /* one NaN is like another */
        if (isnan(kern_bf16_decode(got[CPU].h[i])) && isnan(kern_bf16_decode(got[GPU].h[i])))
            got[CPU].h[i] = got[GPU].h[i];
    check_bytes("streams", got[GPU].h, got[CPU].h, (size_t)n * HC * 2);
    for (int64_t t = 0; t < HC_T; t++) { /* a row of NaN has nothing to compare */
        const bool bad = expands && t == 7;
        assert_int_equal(isnan(kern_bf16_decode(got[GPU].x[t * D])) != 0, bad);
        if (bad) continue;
        check_floats("post", got[GPU].post + t * HC, got[CPU].post + t * HC, HC, 2e-5f);
        check_floats("comb", got[GPU].comb + t * HC * HC, got[CPU].comb + t * HC * HC, HC * HC,
                     2e-5f);
    }
    /* Rounded twice: by the collapse, and by the norm what that made of it. */
    check_steps("x", got[GPU].x, got[CPU].x, (size_t)n, 0, slack, 2);
    free(slack);
    crossed_free(&got[CPU]), crossed_free(&got[GPU]), crossed_free(&from);
    free(y), free(fn16), free(w16), free(fn), free(base), free(scale), free(sum), free(w);
    clear(NULL);
}
static void test_hc_boundary__has_the_bits_of_its_ops(void **state)
{
    (void)state;
    boundary_case(4096, true, true, false, KERN_W_F32);
    boundary_case(4096, true, false, false, KERN_W_BF16);
    boundary_case(4096, false, false, false, KERN_W_F32);
    boundary_case(4096, true, true, true, KERN_W_F32);
    boundary_case(512, true, true, false, KERN_W_F32); /* op by op */
}

/* --- the cache: three sequences grow in pieces, compressed and stored */

enum { SEQS = 3, HEAD = 512, ROT = 64, KEY = 128, WINDOW = 128, MAX_IDS = 16 };
static const int32_t lens[SEQS] = {700, 5, 389};
enum { ROWS = 700 + 5 + 389 };

struct inputs {
    float *kv, *gate, *ape, *ikv, *igate, *iape, *norm, freq[ROT / 2];
    uint16_t *win, *inorm;
};
struct cache {
    struct kern_kv_layout l;
    uint8_t *pages, *tails; /* of the device */
    uint32_t ids[SEQS][MAX_IDS];
    int32_t n_ids[SEQS];
};

static void inputs_make(struct inputs *in, int32_t ratio)
{
    const int32_t c = ratio == 4 ? 2 : 1;
    in->kv = floats((int64_t)ROWS * c * HEAD, 1), in->gate = floats((int64_t)ROWS * c * HEAD, 2);
    in->ikv = floats((int64_t)ROWS * c * KEY, 1), in->igate = floats((int64_t)ROWS * c * KEY, 2);
    in->ape = floats((int64_t)ratio * c * HEAD, 1), in->iape = floats((int64_t)ratio * c * KEY, 1);
    in->norm = floats(HEAD, 1), in->inorm = halves(KEY, 1), in->win = halves(ROWS * HEAD, 1);
    for (int i = 0; i < ROT / 2; i++) in->freq[i] = powf(160000.0f, -(float)i / (ROT / 2));
}
static void inputs_free(struct inputs *in)
{
    free(in->kv), free(in->gate), free(in->ape), free(in->ikv), free(in->igate), free(in->iape);
    free(in->norm), free(in->inorm), free(in->win);
}

/* A batch of one row a sequence, side by side, as a decode step has it. */
struct packed {
    void *kv, *gate, *ikv, *igate, *win; /* [SEQS, ...] of the device */
};
static void pack_row(struct side *d, struct packed *b, const struct inputs *in, int32_t c,
                     int32_t from, int32_t to)
{
    const size_t wide = (size_t)c * HEAD, slim = (size_t)c * KEY;
    const struct {
        void *to;
        const void *from;
        size_t bytes;
    } rows[] = {{b->kv, in->kv + (size_t)from * wide, wide * 4},
                {b->gate, in->gate + (size_t)from * wide, wide * 4},
                {b->ikv, in->ikv + (size_t)from * slim, slim * 4},
                {b->igate, in->igate + (size_t)from * slim, slim * 4},
                {b->win, in->win + (size_t)from * HEAD, HEAD * 2}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_int_equal(kern_stream_write(d->s, (uint8_t *)rows[i].to + (size_t)to * rows[i].bytes,
                                           rows[i].from, rows[i].bytes),
                         0);
}

/* Feeds all rows, at most piece of a sequence at a time (0: all at once; -1: 1 to 40; 1: in steps
 * of decode). */
static void cache_fill(struct side *d, struct cache *k, const struct inputs *in, bool shadowed,
                       int32_t piece)
{
    const struct kern_kv_layout *l = &k->l;
    const int32_t ratio = l->layer[1].ratio, c = ratio == 4 ? 2 : 1;
    const size_t wide = (size_t)ROWS * (size_t)c * HEAD * 4,
                 slim = (size_t)ROWS * (size_t)c * KEY * 4;
    struct kern_compress m = {.kv = put(d, in->kv, wide),
                              .gate = put(d, in->gate, wide),
                              .ape = put(d, in->ape, (size_t)(ratio * c) * HEAD * 4),
                              .norm = {put(d, in->norm, HEAD * 4), KERN_F32, HEAD},
                              .inv_freq = put(d, in->freq, sizeof in->freq),
                              .pages = k->pages,
                              .layout = l,
                              .layer = 1,
                              .eps = 1e-6f,
                              .act = KERN_BF16};
    struct kern_compress x = m;
    x.kv = put(d, in->ikv, slim), x.gate = put(d, in->igate, slim);
    x.ape = put(d, in->iape, (size_t)(ratio * c) * KEY * 4), x.index = true;
    x.norm = (struct kern_vec){put(d, in->inorm, KEY * 2), KERN_BF16, KEY};
    struct kern_window_store w = {
        .kv = put(d, in->win, ROWS * HEAD * 2), .layout = l, .layer = 1, .act = KERN_BF16};
    const bool steps = piece == 1;
    struct packed b;
    if (steps) {
        m.kv = b.kv = room(d, SEQS * (size_t)c * HEAD * 4);
        m.gate = b.gate = room(d, SEQS * (size_t)c * HEAD * 4);
        x.kv = b.ikv = room(d, SEQS * (size_t)c * KEY * 4);
        x.gate = b.igate = room(d, SEQS * (size_t)c * KEY * 4);
        w.kv = b.win = room(d, SEQS * HEAD * 2);
    }
    int32_t done[SEQS] = {0};
    uint32_t cut = 12345;
    for (bool left = true; left;) {
        struct kern_seq q[SEQS];
        int32_t n = 0, row = 0;
        left = false;
        for (int i = 0; i < SEQS; row += lens[i++]) {
            int32_t rows = lens[i] - done[i];
            cut = cut * 1664525u + 1013904223u;
            const int32_t most = piece == 0  ? rows
                                 : piece > 0 ? piece
                                             : 1 + (int32_t)(cut >> 8) % 40;
            if (rows > most) rows = most;
            if (rows == 0) continue;
            if (steps) pack_row(d, &b, in, c, row + done[i], n);
            q[n] = (struct kern_seq){.row0 = steps ? n : row + done[i],
                                     .n_rows = rows,
                                     .pos0 = done[i],
                                     .page_ids = k->ids[i],
                                     .n_pages = k->n_ids[i],
                                     .tail = k->tails + i * l->tail_bytes,
                                     .topk = 1,
                                     .shadowed = shadowed};
            n++;
            done[i] += rows;
            left |= done[i] < lens[i];
        }
        m.seqs = x.seqs = w.seqs = q;
        m.n_seqs = x.n_seqs = w.n_seqs = n;
        m.also = ratio == 4 ? &x : NULL;
        assert_int_equal(d->ops->compress(d->s, &m), 0);
        assert_int_equal(d->ops->window_store(d->s, &w), 0);
        assert_int_equal(kern_stream_sync(d->s), 0);
    }
}

static void cache_open(struct side *d, struct cache *k, int32_t ratio, enum kern_kv_fmt kv,
                       enum kern_ik_fmt ik, bool shadowed, int64_t first_page)
{
    struct kern_kv_spec sp = {.n_layers = 2,
                              .ratios = {0, ratio},
                              .head_dim = HEAD,
                              .rope_dim = ROT,
                              .window = WINDOW,
                              .index_dim = KEY,
                              .kv_fmt = kv,
                              .ik_fmt = ik};
    assert_int_equal(kern_kv_layout_init(&k->l, &sp, NULL), 0);
    uint32_t page = (uint32_t)first_page;
    for (int i = 0; i < SEQS; i++) {
        k->n_ids[i] = (int32_t)kern_kv_pages_for(lens[i], k->l.page_tokens) * (shadowed ? 2 : 1);
        assert_in_range(k->n_ids[i], 0, MAX_IDS);
        for (int32_t p = 0; p < k->n_ids[i]; p++) k->ids[i][p] = page++;
    }
    k->pages = room(d, (size_t)page * (size_t)k->l.page_bytes);
    k->tails = room(d, SEQS * (size_t)k->l.tail_bytes);
}
/* The pages of all sequences, in order; malloc'ed. */
static uint8_t *cache_pages(struct side *d, const struct cache *k, size_t *bytes)
{
    const size_t b = (size_t)k->l.page_bytes;
    const uint32_t first = k->ids[0][0], n = k->ids[SEQS - 1][k->n_ids[SEQS - 1] - 1] + 1 - first;
    *bytes = n * b;
    return get(d, k->pages + first * b, n * b);
}

static void cache_case(int32_t ratio, enum kern_kv_fmt kv, enum kern_ik_fmt ik, bool shadowed,
                       int64_t first_page)
{
    static const int32_t pieces[] = {0, -1, 1, 129};
    struct inputs in;
    struct cache want, got;
    size_t n;
    inputs_make(&in, ratio);
    cache_open(&sides[CPU], &want, ratio, kv, ik, shadowed, 0);
    cache_fill(&sides[CPU], &want, &in, shadowed, 0);
    uint8_t *pages = cache_pages(&sides[CPU], &want, &n);
    const size_t tail_bytes = SEQS * (size_t)want.l.tail_bytes;
    uint8_t *tails = get(&sides[CPU], want.tails, tail_bytes);
    for (int i = 0; i < (first_page ? 1 : 4); i++) {
        struct side *d = &sides[GPU];
        char what[96];
        cache_open(d, &got, ratio, kv, ik, shadowed, first_page);
        cache_fill(d, &got, &in, shadowed, pieces[i]);
        uint8_t *p = cache_pages(d, &got, &n), *t = get(d, got.tails, tail_bytes);
        snprintf(what, sizeof what, "ratio %d, formats %d %d, pieces %d: pages", ratio, (int)kv,
                 (int)ik, pieces[i]);
        check_bytes(what, p, pages, n);
        snprintf(what, sizeof what, "ratio %d, formats %d %d, pieces %d: tails", ratio, (int)kv,
                 (int)ik, pieces[i]);
        check_bytes(what, t, tails, tail_bytes);
        free(p), free(t);
        while (d->n_mem > 0) kern_dev_free(d->dev, d->mem[--d->n_mem]);
    }
    free(pages), free(tails);
    inputs_free(&in);
    clear(NULL);
}

static void test_cache__has_the_cpus_bytes_in_any_pieces(void **state)
{
    (void)state;
    cache_case(4, KERN_KV_FP8, KERN_IK_FP8, false, 0);
    cache_case(4, KERN_KV_FP8, KERN_IK_FP4, true, 0);
    cache_case(4, KERN_KV_BF16, KERN_IK_BF16, true, 0);
    cache_case(128, KERN_KV_FP8, KERN_IK_FP8, false, 0);
    cache_case(128, KERN_KV_BF16, KERN_IK_FP8, false, 0);
    cache_case(8, KERN_KV_F32, KERN_IK_FP8, false, 0);
}

static void test_cache__pages_lie_beyond_four_gib(void **state)
{
    struct kern_kv_spec sp = {.n_layers = 2,
                              .ratios = {0, 4},
                              .head_dim = HEAD,
                              .rope_dim = ROT,
                              .window = WINDOW,
                              .index_dim = KEY,
                              .kv_fmt = KERN_KV_FP8,
                              .ik_fmt = KERN_IK_FP8};
    struct kern_kv_layout l;
    (void)state;
    assert_int_equal(kern_kv_layout_init(&l, &sp, NULL), 0);
    cache_case(4, KERN_KV_FP8, KERN_IK_FP8, false, (INT64_C(9) << 29) / l.page_bytes); /* 4.5 GiB */
}

/* A NaN in one row of the gate: the entries that row is in are NaN on both sides, no other. */
static void nan_case(int32_t ratio)
{
    enum { ROW = 130 };
    struct inputs in;
    struct cache k[SIDES];
    uint8_t *pages[SIDES];
    size_t n = 0;
    inputs_make(&in, ratio);
    in.gate[(int64_t)ROW * (ratio == 4 ? 2 : 1) * HEAD + 17] = NAN;
    for (int i = 0; i < SIDES; i++) {
        cache_open(&sides[i], &k[i], ratio, KERN_KV_FP8, KERN_IK_FP8, false, 0);
        cache_fill(&sides[i], &k[i], &in, false, i == CPU ? 0 : -1);
        pages[i] = cache_pages(&sides[i], &k[i], &n);
    }
    const struct kern_kv_layer *y = &k[CPU].l.layer[1];
    int32_t n_bad = 0;
    for (int s = 0; s < SEQS; s++)
        for (int32_t e = 0; e < lens[s] / ratio; e++) {
            float row[SIDES][HEAD];
            for (int i = 0; i < SIDES; i++)
                kern_kv_load(KERN_KV_FP8,
                             pages[i] + k[i].ids[s][e / y->per_page] * k[i].l.page_bytes +
                                 y->main_off,
                             y->per_page, e % y->per_page, row[i], HEAD, ROT);
            n_bad += isnan(row[CPU][0]);
            for (int c = 0; c < HEAD; c++)
                assert_true(row[GPU][c] == row[CPU][c] ||
                            (isnan(row[GPU][c]) && isnan(row[CPU][c])));
        }
    /* The first half of a row of four is in the group after its own. */
    assert_int_equal(n_bad, 1);
    free(pages[CPU]), free(pages[GPU]);
    inputs_free(&in);
    clear(NULL);
}
static void test_cache__nan_stays_in_its_entry(void **state)
{
    (void)state;
    nan_case(4);
    nan_case(128);
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    if (kern_dev_open(&sides[GPU].dev, test_cuda_device(), 0, &err) < 0)
        return test_no_device(&err);
    if (kern_dev_open(&sides[CPU].dev, "cpu", 0, &err) < 0) {
        printf("norm_test: %s\n", err.msg);
        return 1;
    }
    for (int i = 0; i < SIDES; i++) {
        sides[i].s = kern_dev_stream(sides[i].dev);
        sides[i].ops = kern_dev_ops(sides[i].dev);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_rmsnorm__wide_rows_are_near_and_independent, clear),
        cmocka_unit_test_teardown(test_rope_table__has_the_cpus_bits, clear),
        cmocka_unit_test_teardown(test_heads_rope__has_the_cpus_bits, clear),
        cmocka_unit_test_teardown(test_kv_prep__has_the_cpus_bits, clear),
        cmocka_unit_test_teardown(test_hc_collapse__few_rows_and_many_have_the_same_bits, clear),
        cmocka_unit_test_teardown(test_hc_boundary__has_the_bits_of_its_ops, clear),
        cmocka_unit_test_teardown(test_hc_expand__has_the_cpus_bits, clear),
        cmocka_unit_test_teardown(test_cache__has_the_cpus_bytes_in_any_pieces, clear),
        cmocka_unit_test_teardown(test_cache__pages_lie_beyond_four_gib, clear),
        cmocka_unit_test_teardown(test_cache__nan_stays_in_its_entry, clear),
    };
    TEST_CHOOSE(argc, argv, tests);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 0; i < SIDES; i++) kern_dev_close(sides[i].dev);
    return rc;
}
