/* tests/kernels/op_cases.c - see op_cases.h. */
#include "tests/kernels/op_cases.h"

#include "tests/support/check.h"

#include "kernels/numeric.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t next(uint64_t *x)
{
    *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
    return *x * UINT64_C(0x2545f4914f6cdd1d);
}
static uint32_t below(struct op_run *r, uint32_t n)
{
    return (uint32_t)(next(&r->rng) >> 33) % n;
}
static float rnd(struct op_run *r)
{
    float x = 0;
    for (int i = 0; i < 4; i++) x += (float)(next(&r->rng) >> 40) * 0x1p-24f - 0.5f;
    return x * 1.7f;
}
static void *take(struct op_run *r, size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p || r->n_mem == (int)(sizeof r->mem / sizeof *r->mem)) abort();
    return r->mem[r->n_mem++] = p;
}
/* rows x width of act, rows ld apart; gaps are NaN. */
static void *input(struct op_run *r, int64_t rows, int64_t width, int64_t ld, enum kern_dtype t)
{
    int b = kern_dtype_bytes(t);
    int64_t n = rows ? (rows - 1) * ld + width : 0;
    uint8_t *p = take(r, (size_t)(n * b));
    memset(p, 0xff, (size_t)(n * b));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j++) {
            float x = rnd(r);
            uint16_t h = kern_bf16_encode(x);
            memcpy(p + (i * ld + j) * b, b == 4 ? (void *)&x : (void *)&h, (size_t)b);
        }
    return p;
}
static float *floats(struct op_run *r, int64_t n)
{
    return input(r, 1, n, n, KERN_F32);
}
enum { GUARD = 256 };
static void *output(struct op_run *r, int64_t bytes)
{
    uint8_t *p = take(r, (size_t)bytes + 2 * GUARD);
    memset(p, 0xa5, (size_t)bytes + 2 * GUARD);
    return p + GUARD;
}
/* Adds an output to what is compared; rows of width bytes lie ld bytes apart,
 * the gaps and guards untouched. */
static void done_as(struct op_run *r, enum op_view view, void *data, int64_t rows, int64_t width,
                    int64_t ld, int elem)
{
    uint8_t *p = data;
    for (int i = 0; i < GUARD; i++) assert_int_equal(p[-1 - i], 0xa5);
    for (int i = 0; i < GUARD; i++) assert_int_equal(p[rows * ld + i], 0xa5);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = width; j < ld; j++) assert_int_equal(p[i * ld + j], 0xa5);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j += elem) { /* one NaN is like another */
            uint32_t u = 0;
            memcpy(&u, p + i * ld + j, (size_t)elem);
            uint32_t bits = elem == 2 ? u << 16 : u;
            if (elem == 1 || (bits & 0x7fffffff) <= 0x7f800000) continue;
            if (!r->odd) fail_msg("NaN in row %d, byte %d", (int)i, (int)j);
            u = elem == 2 ? 0x7fc0 : 0x7fc00000;
            memcpy(p + i * ld + j, &u, (size_t)elem);
        }
    if (rows * width == 0) return;
    if (r->n_pieces == sizeof r->pieces / sizeof *r->pieces) abort();
    r->pieces[r->n_pieces++] = (struct op_piece){r->n, (size_t)(rows * width), elem, view};
    while (r->n + (size_t)(rows * width) > r->room) {
        r->room = r->room * 2 + 65536;
        r->out = realloc(r->out, r->room);
    }
    for (int64_t i = 0; i < rows; i++, r->n += (size_t)width)
        memcpy(r->out + r->n, p + i * ld, (size_t)width);
}
static void done(struct op_run *r, void *data, int64_t rows, int64_t width, int64_t ld, int elem)
{
    done_as(r, elem == 1 ? OP_VIEW_EXACT : OP_VIEW_FLOAT, data, rows, width, ld, elem);
}
static void done_flat(struct op_run *r, void *data, int64_t bytes, int elem)
{
    done(r, data, 1, bytes, bytes, elem);
}
/* Bytes that only runs of the same back end share. */
static void done_own(struct op_run *r, void *data, int64_t bytes, int elem)
{
    done_as(r, OP_VIEW_NONE, data, 1, bytes, bytes, elem);
}
/* Rows of the next call. */
static int32_t cut(struct op_run *r, int32_t left)
{
    int32_t n = r->piece == 0  ? left
                : r->piece > 0 ? r->piece
                               : 1 + (int32_t)(next(&r->cut) >> 40) % 40;
    return n < left ? n : left;
}
#define PIECES(t0, n, T) for (int32_t t0 = 0, n = cut(r, T); t0 < (T); t0 += n, n = cut(r, (T)-t0))
static void *at(const void *p, int64_t i, enum kern_dtype t)
{
    return (uint8_t *)(uintptr_t)p + i * kern_dtype_bytes(t);
}
static const int32_t t_list[] = {0, 1, 2, 3, 5, 17, 64, 129};
#define PICK(r, list) (list)[(r)->variant % (int)(sizeof(list) / sizeof *(list))]

static struct kern_vec vec(struct op_run *r, int32_t n, enum kern_dtype t)
{
    return (struct kern_vec){input(r, 1, n, n, t), t, n};
}
static void tables(struct op_run *r, int32_t T, int32_t rd, float **c, float **sn)
{
    *c = floats(r, (int64_t)T * rd / 2 + 1);
    *sn = floats(r, (int64_t)T * rd / 2 + 1);
}
/* A random weight; data deliberately at odd addresses, NaN codes left out. */
static struct kern_weight weight(struct op_run *r, enum kern_wfmt fmt, int32_t n, int32_t k)
{
    struct kern_weight w = {.fmt = fmt, .n = n, .k = k, .scale2 = 1};
    int64_t row = fmt == KERN_W_F32    ? 4 * k
                  : fmt == KERN_W_BF16 ? 2 * k
                  : fmt == KERN_W_FP8  ? k
                                       : k / 2;
    w.row_bytes = row + (r->variant % 3 == 0 ? 3 : 0);
    uint8_t *d = take(r, (size_t)(n * w.row_bytes + 1));
    d++;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < row; j++) {
            uint8_t b = (uint8_t)below(r, 256);
            float x = rnd(r);
            uint16_t h = kern_bf16_encode(x);
            if (fmt == KERN_W_FP8 && (b & 127) == 127) b ^= 1;
            if (fmt == KERN_W_F32) b = ((uint8_t *)&x)[j % 4];
            if (fmt == KERN_W_BF16) b = ((uint8_t *)&h)[j % 2];
            d[i * w.row_bytes + j] = b;
            if (fmt == KERN_W_F32 && j % 4 == 0) memcpy(d + i * w.row_bytes + j, &x, 4), j += 3;
            if (fmt == KERN_W_BF16 && j % 2 == 0) memcpy(d + i * w.row_bytes + j, &h, 2), j += 1;
        }
    w.data = d;
    if (fmt == KERN_W_F32 || fmt == KERN_W_BF16) return w;
    int64_t rows = fmt == KERN_W_FP8 ? (n + 127) / 128 : n;
    int64_t cols = fmt == KERN_W_FP8 ? (k + 127) / 128 : fmt == KERN_W_MXFP4 ? k / 32 : k / 16;
    bool f32 = fmt == KERN_W_FP8 && r->variant % 2;
    w.sfmt = fmt == KERN_W_NVFP4 ? KERN_S_E4M3 : f32 ? KERN_S_F32 : KERN_S_UE8M0;
    w.scale_row_bytes = cols * (f32 ? 4 : 1);
    uint8_t *sc = take(r, (size_t)(rows * w.scale_row_bytes));
    for (int64_t i = 0; i < rows * cols; i++) {
        float x = fabsf(rnd(r)) * 0.1f + 0.01f;
        if (f32)
            memcpy(sc + i * 4, &x, 4);
        else
            sc[i] = (uint8_t)(fmt == KERN_W_NVFP4 ? 20 + below(r, 60) : 118 + below(r, 8));
    }
    w.scale = sc;
    if (fmt == KERN_W_NVFP4) w.scale2 = 0.0371f, w.input_scale = 0.013f;
    return w;
}
static float weight_at(const struct kern_weight *w, int64_t n, int64_t k)
{
    const uint8_t *d = (const uint8_t *)w->data + n * w->row_bytes;
    const uint8_t *s = (const uint8_t *)w->scale;
    float f;
    uint16_t h;
    switch (w->fmt) {
    case KERN_W_F32: memcpy(&f, d + 4 * k, 4); return f;
    case KERN_W_BF16: memcpy(&h, d + 2 * k, 2); return kern_bf16_decode(h);
    case KERN_W_FP8:
        s += n / 128 * w->scale_row_bytes;
        if (w->sfmt == KERN_S_F32)
            memcpy(&f, s + k / 128 * 4, 4);
        else
            f = kern_ue8m0_decode(s[k / 128]);
        return kern_e4m3_decode(d[k]) * f;
    case KERN_W_MXFP4:
        return kern_e2m1_decode(kern_nibble(d, k)) *
               kern_ue8m0_decode(s[n * w->scale_row_bytes + k / 32]);
    case KERN_W_NVFP4:
        return kern_e2m1_decode(kern_nibble(d, k)) *
               kern_e4m3_decode(s[n * w->scale_row_bytes + k / 16]) * w->scale2;
    }
    return 0;
}

/* --- the cases */

static void case_embed(struct op_run *r)
{
    static const int32_t ds[] = {1, 16, 40, 130};
    int32_t T = PICK(r, t_list), D = PICK(r, ds), hc = 1 + r->variant % 4, V = 37;
    enum kern_dtype act = r->variant % 2;
    r->f32 = act == KERN_F32;
    struct kern_weight w = weight(r, r->variant % 3 ? KERN_W_BF16 : KERN_W_F32, V, D);
    int32_t *ids = take(r, (size_t)(T + 1) * 4);
    for (int i = 0; i < T; i++) ids[i] = (int32_t)below(r, (uint32_t)V + 4) - 2;
    if (T > 4) ids[4] = INT32_MAX;
    void *out = output(r, (int64_t)T * hc * D * kern_dtype_bytes(act));
    PIECES(t, n, T)
    {
        struct kern_embed p = {ids + t, w, at(out, (int64_t)t * hc * D, act), n, hc, act};
        assert_int_equal(r->ops->embed(r->s, &p), 0);
    }
    done_flat(r, out, (int64_t)T * hc * D * kern_dtype_bytes(act), kern_dtype_bytes(act));
}

static void case_rmsnorm(struct op_run *r)
{
    static const int32_t ds[] = {1, 15, 16, 100, 256, 513};
    int32_t T = PICK(r, t_list), D = PICK(r, ds);
    int64_t ld = D + 7;
    enum kern_dtype act = r->variant % 2;
    r->f32 = act == KERN_F32;
    int b = kern_dtype_bytes(act);
    void *x = input(r, T, D, ld, act), *y = output(r, T * ld * b);
    struct kern_vec w = vec(r, D, r->variant % 3 ? KERN_BF16 : KERN_F32);
    if (T > 3 && r->variant % 4 == 1) {
        float bad = INFINITY;
        memcpy(at(x, 2 * ld, act), act == KERN_F32 ? (uint8_t *)&bad : (uint8_t *)&bad + 2,
               (size_t)b);
        r->odd = true;
    }
    PIECES(t, n, T)
    {
        struct kern_rmsnorm p = {
            at(x, t * ld, act), w, at(y, t * ld, act), ld, ld, n, D, 1e-6f, act};
        assert_int_equal(r->ops->rmsnorm(r->s, &p), 0);
    }
    done(r, y, T, D * b, ld * b, b);
}

static void case_linear(struct op_run *r)
{
    static const int32_t ks[] = {1, 16, 100, 128, 200, 512, 1000}, k4[] = {32, 96, 128, 352, 1024};
    static const int32_t ns[] = {1, 15, 17, 64, 131};
    enum kern_wfmt fmt = (enum kern_wfmt)(r->variant % 5);
    bool four = fmt >= KERN_W_MXFP4;
    int32_t T = t_list[r->variant / 5 % 8], N = ns[r->variant / 3 % 5];
    int32_t K = four ? k4[r->variant / 2 % 5] : ks[r->variant / 2 % 7], G = 1 + r->variant % 7 / 5;
    enum kern_dtype xt = r->variant / 2 % 2, yt = r->variant / 3 % 2;
    enum kern_act_quant aq = (enum kern_act_quant)(r->variant % 3);
    if (aq == KERN_AQ_NVFP4 && fmt != KERN_W_NVFP4) aq = KERN_AQ_A128;
    r->f32 = yt == KERN_F32;
    int64_t ldx = G * K + 5, ldy = G * N + 3;
    int b = kern_dtype_bytes(yt);
    void *x = input(r, T, G * K, ldx, xt), *y = output(r, T * ldy * b);
    struct kern_weight w = weight(r, fmt, G * N, K);
    if (r->variant % 11 == 10 &&
        fmt == KERN_W_FP8) { /* a NaN code makes its column NaN, no other */
        ((uint8_t *)(uintptr_t)w.data)[K / 2] = 0x7f;
        r->odd = true;
    }
    PIECES(t, n, T)
    {
        struct kern_linear p = {.x = at(x, t * ldx, xt),
                                .w = w,
                                .y = at(y, t * ldy, yt),
                                .ld_x = ldx,
                                .ld_y = ldy,
                                .T = n,
                                .N = N,
                                .K = K,
                                .groups = G,
                                .x_dtype = xt,
                                .y_dtype = yt,
                                .aq = aq,
                                .round_w = r->variant % 4 == 0};
        assert_int_equal(r->ops->linear(r->s, &p), 0);
    }
    if (aq == KERN_AQ_NONE && r->variant % 4 && yt == KERN_F32) /* the definition, in double */
        for (int32_t i = 0; i < T * G * N; i++) {
            int32_t t = i / (G * N), o = i % (G * N), g = o / N;
            double sum = 0, mag = 0;
            for (int32_t k = 0; k < K; k++) {
                const void *e = at(x, t * ldx + g * K + k, xt);
                float xf =
                    xt == KERN_F32 ? *(const float *)e : kern_bf16_decode(*(const uint16_t *)e);
                double m = (double)xf * weight_at(&w, o, k);
                sum += m, mag += fabs(m);
            }
            float got = ((float *)y)[t * ldy + o];
            if (sum != sum)
                assert_true(got != got);
            else
                assert_true(fabs(got - sum) <= (r->twin ? 1e-6 : 4e-6) * mag + 1e-30);
        }
    done(r, y, T, G * N * b, ldy * b, b);
}

/* Several products of the same rows, after a norm or a rotation of these or after nothing. Widths
 * up to the deployed ones' order, so that all of them are made in one launch where a back end does
 * that. */
static void case_linears(struct op_run *r)
{
    enum { MOST = 5 };
    static const int32_t ks[] = {64, 128, 200, 1024}, ns[] = {1, 16, 70, 131, 256};
    static const int32_t ts[] = {0, 1, 2, 3, 5, 9, 17};
    const int way = r->variant % 3; /* nothing, norm, rope */
    const int32_t T = r->variant / 2 % 2 ? 1 : PICK(r, ts), n = 1 + r->variant / 3 % MOST;
    const int32_t G = n == 1 && r->variant % 2 ? 2 : 1, d = 64, K = way == 2 ? 512 : PICK(r, ks);
    const enum kern_dtype act = r->variant % 5 ? KERN_BF16 : KERN_F32;
    const int64_t width = (int64_t)G * K, ld_x = way == 2 ? width : width + 8;
    const int b = kern_dtype_bytes(act);
    r->f32 = act == KERN_F32;
    void *x = take(r, (size_t)(T * ld_x * b) + 1);
    memcpy(x, input(r, T, width, ld_x, act), T ? (size_t)(((T - 1) * ld_x + width) * b) : 0);
    float *c, *sn;
    tables(r, T, 32, &c, &sn);
    const struct kern_vec w = vec(r, (int32_t)width, r->variant % 2 ? KERN_BF16 : KERN_F32);
    struct kern_linear each[MOST];
    for (int32_t i = 0; i < n; i++) {
        const enum kern_wfmt fmt =
            (enum kern_wfmt)((r->variant / 2 + i) % (r->variant % 4 ? 3 : 5));
        const int32_t N = ns[(r->variant + i) % 5];
        const enum kern_dtype yt = r->f32 || i % 2 ? KERN_F32 : KERN_BF16;
        each[i] = (struct kern_linear){
            .w = weight(r, fmt == KERN_W_NVFP4 || K % 32 ? KERN_W_FP8 : fmt, G * N, K),
            .y = output(r, (int64_t)T * G * N * kern_dtype_bytes(yt)),
            .ld_x = ld_x,
            .ld_y = (int64_t)G * N,
            .N = N,
            .K = K,
            .groups = G,
            .x_dtype = act,
            .y_dtype = yt,
            .round_w = way == 2 && !r->f32};
        each[i].aq = each[i].w.fmt == KERN_W_FP8 && way != 2 ? KERN_AQ_A128 : KERN_AQ_NONE;
    }
    PIECES(t, m, T)
    {
        struct kern_linear now[MOST];
        for (int32_t i = 0; i < n; i++) {
            now[i] = each[i];
            now[i].T = m;
            now[i].x = at(x, t * ld_x, act);
            now[i].y = at(each[i].y, t * each[i].ld_y, each[i].y_dtype);
        }
        const struct kern_rmsnorm norm = {at(x, t * ld_x, act),
                                          w,
                                          at(x, t * ld_x, act),
                                          ld_x,
                                          ld_x,
                                          m,
                                          (int32_t)width,
                                          1e-6f,
                                          act};
        const struct kern_heads_rope rope = {.q = at(x, t * ld_x, act),
                                             .cos = c + t * 16,
                                             .sin = sn + t * 16,
                                             .T = m,
                                             .H = (int32_t)(width / d),
                                             .d = d,
                                             .rd = 32,
                                             .inverse = r->variant % 2,
                                             .act = act};
        const struct kern_linears p = {now, way == 1 ? &norm : NULL, way == 2 ? &rope : NULL, n};
        assert_int_equal(r->ops->linears(r->s, &p), 0);
    }
    for (int32_t i = 0; i < n; i++)
        done_flat(r, each[i].y, (int64_t)T * G * each[i].N * kern_dtype_bytes(each[i].y_dtype),
                  kern_dtype_bytes(each[i].y_dtype));
}

static void case_hc_collapse(struct op_run *r)
{
    static const int32_t ds[] = {16, 20, 64, 100};
    int32_t T = PICK(r, t_list), D = PICK(r, ds), hc = 1 + r->variant % 5;
    bool head = r->variant % 3 == 0;
    int32_t nf = head ? hc : (2 + hc) * hc;
    enum kern_dtype act = r->variant % 2;
    r->f32 = act == KERN_F32;
    int b = kern_dtype_bytes(act);
    void *h = input(r, T, hc * D, hc * D, act), *x = output(r, (int64_t)T * D * b);
    float *post = output(r, T * hc * 4), *comb = output(r, T * hc * hc * 4);
    struct kern_weight fn = weight(r, KERN_W_F32, nf, hc * D);
    float *base = floats(r, nf), *scale = floats(r, 3);
    PIECES(t, n, T)
    {
        struct kern_hc_collapse p = {.h = at(h, t * hc * D, act),
                                     .fn = fn,
                                     .base = base,
                                     .scale = scale,
                                     .x = at(x, t * D, act),
                                     .post = head ? NULL : post + t * hc,
                                     .comb = head ? NULL : comb + t * hc * hc,
                                     .T = n,
                                     .hc = hc,
                                     .D = D,
                                     .iters = 20,
                                     .hc_eps = 1e-6f,
                                     .norm_eps = 1e-6f,
                                     .act = act};
        assert_int_equal(r->ops->hc_collapse(r->s, &p), 0);
    }
    done_flat(r, x, (int64_t)T * D * b, b);
    if (head) return;
    done_flat(r, post, T * hc * 4, 4);
    done_flat(r, comb, T * hc * hc * 4, 4);
    for (int i = 0; i < T * hc; i++) { /* the last round leaves columns that sum to one */
        float sum = 0;
        for (int j = 0; j < hc; j++) sum += comb[i / hc * hc * hc + j * hc + i % hc];
        assert_true(fabsf(sum - 1) < 1e-4f);
    }
}

static void case_hc_expand(struct op_run *r)
{
    static const int32_t ds[] = {1, 16, 20, 100};
    int32_t T = PICK(r, t_list), D = PICK(r, ds), hc = 1 + r->variant % 5;
    enum kern_dtype act = r->variant % 2;
    r->f32 = act == KERN_F32;
    int64_t n_h = (int64_t)T * hc * D, b = kern_dtype_bytes(act);
    void *y = input(r, T, D, D, act), *h = input(r, T, hc * D, hc * D, act);
    float *post = floats(r, T * hc + 1), *comb = floats(r, T * hc * hc + 1);
    void *out = output(r, n_h * b);
    bool in_place = r->variant % 3 == 0;
    if (in_place) memcpy(out, h, (size_t)(n_h * b));
    PIECES(t, n, T)
    {
        void *o = at(out, (int64_t)t * hc * D, act);
        struct kern_hc_expand p = {at(y, t * D, act),
                                   in_place ? o : at(h, t * hc * D, act),
                                   post + t * hc,
                                   comb + t * hc * hc,
                                   o,
                                   n,
                                   hc,
                                   D,
                                   act};
        assert_int_equal(r->ops->hc_expand(r->s, &p), 0);
    }
    done_flat(r, out, n_h * b, (int)b);
}

static void case_hc_boundary(struct op_run *r)
{
    static const int32_t ds[] = {16, 20, 64, 100};
    int32_t T = PICK(r, t_list), D = PICK(r, ds), hc = 1 + r->variant % 5;
    const bool head = r->variant % 3 == 0, expands = r->variant % 4 != 1;
    const bool routed = expands && r->variant / 2 % 2;
    int32_t nf = head ? hc : (2 + hc) * hc;
    enum kern_dtype act = r->variant % 2;
    r->f32 = act == KERN_F32;
    const int b = kern_dtype_bytes(act);
    const int64_t n_h = (int64_t)T * hc * D;
    void *y = input(r, T, D, D, act), *h = output(r, n_h * b), *x = output(r, (int64_t)T * D * b);
    float *sum = floats(r, T * D + 1), *post = output(r, T * hc * 4),
          *comb = output(r, T * hc * hc * 4);
    memcpy(h, input(r, T, hc * D, hc * D, act), (size_t)(n_h * b));
    memcpy(post, floats(r, T * hc + 1), (size_t)(T * hc) * 4);
    memcpy(comb, floats(r, T * hc * hc + 1), (size_t)(T * hc * hc) * 4);
    struct kern_weight fn = weight(r, KERN_W_F32, nf, hc * D);
    float *base = floats(r, nf), *scale = floats(r, 3);
    struct kern_vec norm = vec(r, D, r->variant / 3 % 2);
    PIECES(t, n, T)
    {
        struct kern_hc_boundary p = {.routed = routed ? sum + t * D : NULL,
                                     .y = expands ? at(y, t * D, act) : NULL,
                                     .h = at(h, (int64_t)t * hc * D, act),
                                     .fn = fn,
                                     .base = base,
                                     .scale = scale,
                                     .norm = norm,
                                     .x = at(x, t * D, act),
                                     .post = post + t * hc,
                                     .comb = comb + t * hc * hc,
                                     .head = head,
                                     .T = n,
                                     .hc = hc,
                                     .D = D,
                                     .iters = 20,
                                     .hc_eps = 1e-6f,
                                     .norm_eps = 1e-6f,
                                     .act = act};
        assert_int_equal(r->ops->hc_boundary(r->s, &p), 0);
    }
    done_flat(r, h, n_h * b, b);
    done_flat(r, x, (int64_t)T * D * b, b);
    done_flat(r, post, T * hc * 4, 4);
    done_flat(r, comb, T * hc * hc * 4, 4);
}

static void case_rope_table(struct op_run *r)
{
    r->f32 = true;
    static const int32_t rds[] = {0, 2, 6, 64};
    int32_t T = PICK(r, t_list), rd = PICK(r, rds), *pos = take(r, (size_t)(T + 1) * 4);
    float *f = floats(r, rd / 2 + 1), *c = output(r, T * rd * 2), *sn = output(r, T * rd * 2);
    for (int i = 0; i < T; i++) pos[i] = (int32_t)below(r, i % 5 ? 2000000 : INT32_MAX);
    for (int i = 0; i < rd / 2; i++) f[i] = fabsf(f[i]);
    if (rd) f[0] = 1;
    PIECES(t, n, T)
    {
        struct kern_rope_table p = {pos + t, f, c + t * rd / 2, sn + t * rd / 2, n, rd};
        assert_int_equal(r->ops->rope_table(r->s, &p), 0);
    }
    for (int i = 0; i < T * rd / 2; i++) {
        float a = (float)pos[i / (rd / 2)] * f[i % (rd / 2)];
        const double most = r->twin ? 1e-7 : 2e-7;
        assert_true(fabs(c[i] - cos((double)a)) < most && fabs(sn[i] - sin((double)a)) < most);
    }
    done_flat(r, c, T * rd * 2, 4);
    done_flat(r, sn, T * rd * 2, 4);
}

static void case_heads_rope(struct op_run *r)
{
    static const int32_t ds[] = {2, 16, 40, 128}, rds[] = {2, 16, 6, 64};
    int32_t T = PICK(r, t_list), d = PICK(r, ds), rd = PICK(r, rds), H = 1 + r->variant % 3;
    enum kern_dtype act = r->variant / 2 % 2;
    r->f32 = act == KERN_F32;
    int64_t bytes = (int64_t)T * H * d * kern_dtype_bytes(act);
    float *c, *sn;
    tables(r, T, rd, &c, &sn);
    void *q = output(r, bytes), *x = input(r, T, H * d, H * d, act);
    memcpy(q, x, (size_t)bytes);
    PIECES(t, n, T)
    {
        struct kern_heads_rope p = {at(q, (int64_t)t * H * d, act),
                                    c + t * rd / 2,
                                    sn + t * rd / 2,
                                    n,
                                    H,
                                    d,
                                    rd,
                                    1e-6f,
                                    r->variant % 3 != 0,
                                    r->variant % 2,
                                    act};
        assert_int_equal(r->ops->heads_rope(r->s, &p), 0);
    }
    done_flat(r, q, bytes, kern_dtype_bytes(act));
}

static void case_kv_prep(struct op_run *r)
{
    static const int32_t ds[] = {64 + 6, 128, 192, 256 + 64}, rds[] = {6, 64, 64, 64};
    int32_t T = PICK(r, t_list), d = PICK(r, ds), rd = PICK(r, rds);
    enum kern_dtype act = r->variant / 2 % 2;
    r->f32 = act == KERN_F32;
    int64_t bytes = (int64_t)T * d * kern_dtype_bytes(act);
    float *c, *sn;
    tables(r, T, rd, &c, &sn);
    void *x = input(r, T, d, d, act), *y = output(r, bytes);
    struct kern_vec w = vec(r, d, KERN_BF16);
    PIECES(t, n, T)
    {
        struct kern_kv_prep p = {at(x, t * d, act),
                                 w,
                                 c + t * rd / 2,
                                 sn + t * rd / 2,
                                 at(y, t * d, act),
                                 n,
                                 d,
                                 rd,
                                 1e-6f,
                                 act};
        assert_int_equal(r->ops->kv_prep(r->s, &p), 0);
    }
    done_flat(r, y, bytes, kern_dtype_bytes(act));
}

static void case_index_query(struct op_run *r)
{
    static const int32_t ws[] = {32, 64, 128}, rds[] = {0, 6, 64};
    int32_t T = PICK(r, t_list), w = PICK(r, ws), rd = PICK(r, rds), H = 1 + r->variant % 4;
    enum kern_dtype act = r->variant % 5 ? KERN_BF16 : KERN_F32;
    r->f32 = act == KERN_F32;
    int64_t bytes = (int64_t)T * H * w * kern_dtype_bytes(act);
    float *c, *sn;
    tables(r, T, rd, &c, &sn);
    void *q = output(r, bytes), *x = input(r, T, H * w, H * w, act);
    memcpy(q, x, (size_t)bytes);
    PIECES(t, n, T)
    {
        struct kern_index_query p = {at(q, (int64_t)t * H * w, act),
                                     c + t * rd / 2,
                                     sn + t * rd / 2,
                                     n,
                                     H,
                                     w,
                                     rd,
                                     (enum kern_ik_fmt)(r->variant % 4),
                                     act};
        assert_int_equal(r->ops->index_query(r->s, &p), 0);
    }
    done_flat(r, q, bytes, kern_dtype_bytes(act));
}

static void case_route(struct op_run *r)
{
    r->f32 = true;
    static const int32_t es[] = {1, 8, 17, 256};
    int32_t T = PICK(r, t_list), E = PICK(r, es), k = E < 6 ? E : 1 + r->variant % 6, V = 50;
    bool hash = r->variant % 3 == 0;
    float *z = floats(r, (int64_t)T * E + 1), *bias = floats(r, E);
    int32_t *ids = take(r, (size_t)(T + 1) * 4), *e = output(r, T * k * 4);
    int64_t *table = take(r, (size_t)(V * k) * 8);
    float *w = output(r, T * k * 4), *margin = output(r, T * 4);
    for (int i = 0; i < V * k; i++) table[i] = below(r, (uint32_t)E);
    for (int i = 0; i < T; i++) ids[i] = (int32_t)below(r, (uint32_t)V);
    if (T > 16) { /* ids no table holds, logits no number */
        static const int32_t bad[] = {-1, 0, 49, 50, 51, INT32_MAX, INT32_MIN};
        memcpy(ids, bad, sizeof bad);
        for (int i = 0; i < E; i++) z[3 * E + i] = i % 2 ? NAN : 1.0f, z[4 * E + i] = NAN;
        for (int i = 0; i < E; i++) z[5 * E + i] = 0.25f, z[6 * E + i] = i ? -INFINITY : INFINITY;
        r->odd = true;
    }
    PIECES(t, n, T)
    {
        struct kern_route p = {.logits = z + t * E,
                               .bias = r->variant % 5 ? bias : NULL,
                               .tid2eid = hash ? table : NULL,
                               .tid_bytes = 8,
                               .ids = ids + t,
                               .T = n,
                               .E = E,
                               .k = k,
                               .V = V,
                               .scale = 1.5f,
                               .normalize = r->variant % 2,
                               .score_fn = (enum kern_score)(r->variant / 2 % 3),
                               .experts = e + t * k,
                               .weights = w + t * k,
                               .margin = margin + t};
        assert_int_equal(r->ops->route(r->s, &p), 0);
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < k; i++) {
            int32_t id = e[t * k + i];
            if (hash && (ids[t] < 0 || ids[t] >= V)) {
                assert_true(id == -1 && w[t * k + i] == 0);
                continue;
            }
            assert_true(id >= 0 && id < E);
            for (int j = 0; j < i && !hash; j++) assert_true(e[t * k + j] != id);
        }
    done_flat(r, e, T * k * 4, 1);
    done_flat(r, w, T * k * 4, 4);
    done_flat(r, margin, T * 4, 4);
}

static void case_moe(struct op_run *r)
{
    static const int32_t ds[] = {32, 128, 160}, is[] = {32, 64, 160}, es[] = {1, 5, 9};
    static const int32_t ts[] = {0, 1, 2, 3, 5, 17, 40, 131};
    int32_t T = PICK(r, ts), D = PICK(r, ds), I = is[r->variant / 2 % 3],
            E = es[r->variant / 3 % 3];
    int32_t k = E < 3 ? 1 : 3;
    enum kern_wfmt fmt = (enum kern_wfmt)(r->variant % 5);
    enum kern_dtype act = r->variant / 2 % 2;
    r->f32 = act == KERN_F32;
    enum kern_act_quant aq = (enum kern_act_quant)(r->variant / 3 % 3);
    if (aq == KERN_AQ_NVFP4 && fmt != KERN_W_NVFP4) aq = KERN_AQ_A128;
    struct kern_weight w1[9], w2[9], w3[9];
    void *x = input(r, T, D, D, act);
    int32_t *e = take(r, (size_t)(T * k + 1) * 4);
    float *w = floats(r, T * k + 1), *out = output(r, (int64_t)T * D * 4);
    for (int i = 0; i < E; i++) {
        w1[i] = weight(r, fmt, I, D), w2[i] = weight(r, fmt, D, I), w3[i] = weight(r, fmt, I, D);
        w1[i].input_scale *= 1 + 0.1f * (float)i, w3[i].input_scale = w1[i].input_scale * 1.5f;
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < k; i++) {
            e[t * k + i] = (int32_t)below(r, (uint32_t)E); /* the same expert twice is legal */
            if (below(r, 9) == 0) e[t * k + i] = -1;
        }
    if (r->variant % 7 == 6)
        for (int i = 0; i < T * k; i++) e[i] = 0; /* all rows to one expert */
    PIECES(t, n, T)
    {
        struct kern_moe p = {
            at(x, t * D, act),         e + t * k, w + t * k, w1, w2, w3, out + t * D, n, D, I, E, k,
            r->variant % 2 ? 0.7f : 0, aq,        act};
        assert_int_equal(r->ops->moe(r->s, &p), 0);
    }
    if (!r->twin) { /* its products need not have moe's order */
        done_flat(r, out, (int64_t)T * D * 4, 4);
        return;
    }
    /* The definition: one expert after another through the plain ops. */
    float *sum = calloc((size_t)(T * D + 1), 4);
    int b = kern_dtype_bytes(act);
    for (int id = 0; id < E; id++)
        for (int i = 0; i < T * k; i++) {
            if (e[i] != id) continue;
            uint8_t g[160 * 4], u[160 * 4], y[160 * 4];
            struct kern_linear l = {.x = at(x, i / k * D, act),
                                    .w = w1[id],
                                    .y = g,
                                    .ld_x = D,
                                    .ld_y = I,
                                    .T = 1,
                                    .N = I,
                                    .K = D,
                                    .groups = 1,
                                    .x_dtype = act,
                                    .y_dtype = act,
                                    .aq = aq};
            assert_int_equal(r->ops->linear(r->s, &l), 0);
            l.w = w3[id], l.y = u;
            assert_int_equal(r->ops->linear(r->s, &l), 0);
            struct kern_swiglu sw = {g, u, g, 1, I, r->variant % 2 ? 0.7f : 0, KERN_F32};
            for (int j = I - 1; j >= 0 && b == 2; j--) {
                float gf = kern_bf16_decode(((uint16_t *)g)[j]),
                      uf = kern_bf16_decode(((uint16_t *)u)[j]);
                memcpy(g + 4 * j, &gf, 4), memcpy(u + 4 * j, &uf, 4);
            }
            assert_int_equal(r->ops->swiglu(r->s, &sw), 0);
            for (int j = 0; j < I; j++) {
                float f;
                memcpy(&f, g + 4 * j, 4);
                f *= w[i];
                uint16_t h = kern_bf16_encode(f);
                memcpy(y + b * j, b == 2 ? (void *)&h : (void *)&f, (size_t)b);
            }
            l = (struct kern_linear){.x = y,
                                     .w = w2[id],
                                     .y = g,
                                     .ld_x = I,
                                     .ld_y = D,
                                     .T = 1,
                                     .N = D,
                                     .K = I,
                                     .groups = 1,
                                     .x_dtype = act,
                                     .y_dtype = KERN_F32,
                                     .aq = aq};
            assert_int_equal(r->ops->linear(r->s, &l), 0);
            for (int j = 0; j < D; j++) {
                float f;
                memcpy(&f, g + 4 * j, 4);
                sum[i / k * D + j] += b == 2 ? kern_bf16_round(f) : f;
            }
        }
    for (int i = 0; i < T * D; i++)
        if (out[i] != sum[i])
            fail_msg("moe[%d]: %a, one by one %a", i, (double)out[i], (double)sum[i]);
    free(sum);
    done_flat(r, out, (int64_t)T * D * 4, 4);
}

static void case_swiglu(struct op_run *r)
{
    static const int32_t is[] = {1, 16, 40, 300};
    int32_t T = PICK(r, t_list), I = PICK(r, is);
    enum kern_dtype act = r->variant % 2;
    r->f32 = act == KERN_F32;
    int64_t b = kern_dtype_bytes(act), bytes = (int64_t)T * I * b;
    void *g = input(r, T, I, I, act), *u = input(r, T, I, I, act), *y = output(r, bytes);
    PIECES(t, n, T)
    {
        struct kern_swiglu p = {at(g, t * I, act),
                                at(u, t * I, act),
                                at(y, t * I, act),
                                n,
                                I,
                                r->variant % 3 ? 0.5f : 0,
                                act};
        assert_int_equal(r->ops->swiglu(r->s, &p), 0);
    }
    done_flat(r, y, bytes, (int)b);
}

/* Three in four: the deployed formats, which few rows take by kernels of their own. */
static void case_ffn(struct op_run *r)
{
    static const int32_t ts[] = {1, 0, 2, 3, 4, 5, 17}, wide[] = {256, 512}, odd[] = {96, 160};
    enum { MOST_E = 20 };
    const bool deployed = r->variant % 4 != 3, hash = r->variant % 5 == 1;
    const int32_t T = PICK(r, ts), D = (deployed ? wide : odd)[r->variant / 2 % 2],
                  I = (deployed ? wide : odd)[r->variant / 3 % 2];
    const int32_t E = r->variant % 3 ? 7 : MOST_E, k = 1 + r->variant % 6, V = 30;
    const enum kern_dtype act = deployed ? KERN_BF16 : (enum kern_dtype)(r->variant / 4 % 2);
    const enum kern_wfmt dense = deployed ? KERN_W_FP8 : KERN_W_BF16;
    const enum kern_wfmt of_experts = deployed             ? KERN_W_MXFP4
                                      : r->variant / 8 % 2 ? KERN_W_NVFP4
                                                           : KERN_W_FP8;
    const enum kern_act_quant aq = act == KERN_F32 ? KERN_AQ_NONE : KERN_AQ_A128;
    const enum kern_act_quant dense_aq = deployed ? aq : KERN_AQ_NONE;
    const int64_t b = kern_dtype_bytes(act), wide_bytes = (int64_t)T * D * b;
    struct kern_weight w1[MOST_E], w2[MOST_E], w3[MOST_E];
    r->f32 = act == KERN_F32;
    void *x = input(r, T, D, D, act);
    float *bias = floats(r, E), *logits = take(r, (size_t)(T * E + 1) * 4);
    int32_t *ids = take(r, (size_t)(T + 1) * 4), *table = take(r, (size_t)(V * k) * 4);
    void *g = take(r, (size_t)(T * I * b + 1)), *u = take(r, (size_t)(T * I * b + 1));
    for (int i = 0; i < V * k; i++) table[i] = (int32_t)below(r, (uint32_t)E); /* repeats, too */
    for (int i = 0; i < T; i++) ids[i] = (int32_t)below(r, (uint32_t)(V + 3)) - 1;
    for (int i = 0; i < E; i++)
        w1[i] = weight(r, of_experts, I, D), w2[i] = weight(r, of_experts, D, I),
        w3[i] = weight(r, of_experts, I, D);
    const struct kern_weight gate = weight(r, KERN_W_BF16, E, D), s1 = weight(r, dense, I, D),
                             s3 = weight(r, dense, I, D), s2 = weight(r, dense, D, I);
    if (r->variant % 7 == 4 && deployed) { /* a NaN code and a NaN scale: their columns alone */
        ((uint8_t *)(uintptr_t)s2.data)[I / 2] = 0x7f;
        ((uint8_t *)(uintptr_t)w2[0].scale)[w2[0].scale_row_bytes] = 0xff;
        r->odd = true;
    }
    struct {
        int32_t *experts;
        float *weights, *routed;
        void *shared;
    } o[2]; /* of the op, of the ops it is made of */
    for (int i = 0; i < 2; i++) {
        o[i].experts = output(r, T * k * 4), o[i].weights = output(r, T * k * 4);
        o[i].routed = output(r, (int64_t)T * D * 4), o[i].shared = output(r, wide_bytes);
    }
    for (int i = 0; i < 2; i++) {
        PIECES(t, n, T)
        {
            const void *row = at(x, t * D, act);
            const struct kern_linear in = {.x = row,
                                           .ld_x = D,
                                           .T = n,
                                           .K = D,
                                           .groups = 1,
                                           .x_dtype = act,
                                           .y_dtype = act,
                                           .aq = dense_aq};
            struct kern_ffn p = {.gate = in,
                                 .route = {.logits = logits,
                                           .bias = r->variant % 2 ? bias : NULL,
                                           .tid2eid = hash ? table : NULL,
                                           .tid_bytes = 4,
                                           .ids = ids + t,
                                           .T = n,
                                           .E = E,
                                           .k = k,
                                           .V = V,
                                           .scale = 1.5f,
                                           .normalize = r->variant % 3 == 0,
                                           .score_fn = (enum kern_score)(r->variant / 2 % 3),
                                           .experts = o[i].experts + t * k,
                                           .weights = o[i].weights + t * k},
                                 .moe = {row, o[i].experts + t * k, o[i].weights + t * k, w1, w2,
                                         w3, o[i].routed + t * D, n, D, I, E, k,
                                         r->variant % 2 ? 0.7f : 0, aq, act},
                                 .w1 = in,
                                 .w3 = in,
                                 .swiglu = {g, u, g, n, I, r->variant % 2 ? 0.7f : 0, act},
                                 .w2 = {.x = g,
                                        .w = s2,
                                        .y = at(o[i].shared, t * D, act),
                                        .ld_x = I,
                                        .ld_y = D,
                                        .T = n,
                                        .N = D,
                                        .K = I,
                                        .groups = 1,
                                        .x_dtype = act,
                                        .y_dtype = act,
                                        .aq = dense_aq}};
            p.gate.w = gate, p.gate.y = logits, p.gate.N = E, p.gate.ld_y = E;
            p.gate.y_dtype = KERN_F32, p.gate.aq = KERN_AQ_NONE;
            p.w1.w = s1, p.w1.y = g, p.w1.N = I, p.w1.ld_y = I;
            p.w3.w = s3, p.w3.y = u, p.w3.N = I, p.w3.ld_y = I;
            if (i == 0) {
                assert_int_equal(r->ops->ffn(r->s, &p), 0);
                continue;
            }
            assert_int_equal(r->ops->linear(r->s, &p.gate), 0);
            assert_int_equal(r->ops->route(r->s, &p.route), 0);
            assert_int_equal(r->ops->moe(r->s, &p.moe), 0);
            assert_int_equal(r->ops->linear(r->s, &p.w1), 0);
            assert_int_equal(r->ops->linear(r->s, &p.w3), 0);
            assert_int_equal(r->ops->swiglu(r->s, &p.swiglu), 0);
            assert_int_equal(r->ops->linear(r->s, &p.w2), 0);
        }
    }
    for (int i = 0; i < 2; i++) {
        done_flat(r, o[i].experts, T * k * 4, 1);
        done_flat(r, o[i].weights, T * k * 4, 4);
        done_flat(r, o[i].routed, (int64_t)T * D * 4, 4);
        done_flat(r, o[i].shared, wide_bytes, (int)b);
    }
    assert_memory_equal(o[0].experts, o[1].experts, (size_t)(T * k) * 4);
    assert_memory_equal(o[0].weights, o[1].weights, (size_t)(T * k) * 4);
    assert_memory_equal(o[0].routed, o[1].routed, (size_t)(T * D) * 4);
    assert_memory_equal(o[0].shared, o[1].shared, (size_t)wide_bytes);
}

static void case_add(struct op_run *r)
{
    static const int32_t ns[] = {0, 1, 16, 100, 5000};
    int32_t N = PICK(r, ns);
    enum kern_dtype act = r->variant % 2;
    r->f32 = act == KERN_F32;
    int64_t b = kern_dtype_bytes(act);
    float *a = floats(r, N + 1);
    void *x = input(r, 1, N, N, act), *y = output(r, N * b);
    PIECES(t, n, N)
    {
        struct kern_add p = {a + t, at(x, t, act), at(y, t, act), n, act};
        assert_int_equal(r->ops->add(r->s, &p), 0);
    }
    done_flat(r, y, N * b, (int)b);
}

static void case_mtp_mix(struct op_run *r)
{
    static const int32_t ds[] = {1, 16, 40, 300};
    int32_t T = PICK(r, t_list), D = PICK(r, ds), hc = 1 + r->variant % 4;
    enum kern_dtype act = r->variant % 2;
    r->f32 = act == KERN_F32;
    int64_t b = kern_dtype_bytes(act), bytes = (int64_t)T * hc * D * b;
    void *e = input(r, T, D, D, act), *g = input(r, T, hc * D, hc * D, act), *o = output(r, bytes);
    PIECES(t, n, T)
    {
        struct kern_mtp_mix p = {
            at(e, t * D, act), at(g, t * hc * D, act), at(o, t * hc * D, act), n, hc, D, act};
        assert_int_equal(r->ops->mtp_mix(r->s, &p), 0);
    }
    done_flat(r, o, bytes, (int)b);
}

/* --- ops on sequences: three of different length grow together, in pieces of their own */

enum { SEQS = 3, INDEX_W = 64, INDEX_H = 3, HEADS = 3 };

struct world {
    struct kern_kv_layout l;
    struct kern_seq q[SEQS];
    int32_t len[SEQS], T;
    uint8_t *pages, *tails;
    int64_t pool_bytes;
    enum kern_dtype act;
    int32_t d, rd, ratio;
    float *kv, *gate, *ikv, *igate, *ape, *iape, *freq;
    void *win, *query, *iq, *iwt;
    struct kern_vec norm, inorm;
    bool shadowed;
};

static void world_open(struct op_run *r, struct world *w, int32_t ratio)
{
    static const int32_t windows[] = {1, 5, 16, 128}, widths[] = {64 + 32, 128 + 64};
    static const int32_t lens[][SEQS] = {{1, 0, 3}, {37, 300, 8}, {129, 1, 260}, {5, 17, 64}};
    memset(w, 0, sizeof *w);
    w->act = r->variant % 3 ? KERN_BF16 : KERN_F32;
    r->f32 = w->act == KERN_F32;
    w->rd = r->variant % 2 ? 64 : 32, w->d = widths[r->variant % 2], w->ratio = ratio;
    struct kern_kv_spec sp = {.n_layers = 2,
                              .ratios = {0, ratio},
                              .head_dim = w->d,
                              .rope_dim = w->rd,
                              .window = PICK(r, windows),
                              .index_dim = INDEX_W,
                              .kv_fmt = (enum kern_kv_fmt)(w->act ? r->variant % 3 : 2),
                              .ik_fmt = (enum kern_ik_fmt)(w->act ? r->variant % 4 : 3)};
    assert_int_equal(kern_kv_layout_init(&w->l, &sp, NULL), 0);
    /* Half of those that can keep shadow keys do. */
    w->shadowed = ratio == 4 && w->l.shadow_bytes > 0 && r->variant / 4 % 2;
    int32_t n_pages = 1, c = ratio == 4 ? 2 : 1, per = w->shadowed ? 2 : 1;
    for (int i = 0; i < SEQS; i++) {
        w->len[i] = lens[r->variant / 2 % 4][i];
        w->T += w->len[i];
        n_pages += per * (int32_t)kern_kv_pages_for(w->len[i], w->l.page_tokens);
    }
    w->pool_bytes = n_pages * w->l.page_bytes;
    w->pages = output(r, w->pool_bytes);
    w->tails = output(r, SEQS * w->l.tail_bytes);
    if (r->on_pool) r->on_pool(r->ctx, w->pages, w->pool_bytes);
    uint32_t page = (uint32_t)n_pages; /* handed out backwards, page 0 to nobody */
    for (int i = 0, row = 0; i < SEQS; row += w->len[i++]) {
        int32_t n = per * (int32_t)kern_kv_pages_for(w->len[i], w->l.page_tokens);
        uint32_t *ids = take(r, (size_t)(n + 1) * 4);
        for (int k = 0; k < n; k++) ids[k] = --page;
        w->q[i] = (struct kern_seq){.row0 = row,
                                    .page_ids = ids,
                                    .n_pages = n,
                                    .topk = 5 + 4 * i,
                                    .tail = w->tails + i * w->l.tail_bytes,
                                    .shadowed = w->shadowed};
    }
    w->kv = floats(r, (int64_t)w->T * c * w->d + 1),
    w->gate = floats(r, (int64_t)w->T * c * w->d + 1);
    w->ikv = floats(r, (int64_t)w->T * c * INDEX_W + 1);
    w->igate = floats(r, (int64_t)w->T * c * INDEX_W + 1);
    w->ape = floats(r, (int64_t)(ratio + 1) * c * w->d),
    w->iape = floats(r, (ratio + 1) * c * INDEX_W);
    w->freq = floats(r, w->rd / 2);
    w->norm = vec(r, w->d, KERN_BF16), w->inorm = vec(r, INDEX_W, KERN_F32);
    w->win = input(r, w->T, w->d, w->d, w->act);
    w->query = input(r, w->T, HEADS * w->d, HEADS * w->d, w->act);
    w->iq = input(r, w->T, INDEX_H * INDEX_W, INDEX_H * INDEX_W, w->act);
    w->iwt = input(r, w->T, INDEX_H, INDEX_H, w->act);
}

/* The next batch: every unfinished sequence gives a piece.
 * Row numbers stay those of the whole tensors. */
static int32_t world_batch(struct op_run *r, struct world *w, struct kern_seq *batch)
{
    int32_t n = 0;
    for (int i = 0; i < SEQS; i++) {
        struct kern_seq *q = &w->q[i];
        q->row0 += q->n_rows;
        q->pos0 += q->n_rows;
        q->n_rows = 0;
        if (q->pos0 >= w->len[i]) continue;
        q->n_rows = cut(r, w->len[i] - (int32_t)q->pos0);
        batch[n++] = *q;
    }
    return n;
}
static struct kern_compress compress_of(struct world *w, bool index, const struct kern_seq *b,
                                        int32_t n)
{
    return (struct kern_compress){.kv = index ? w->ikv : w->kv,
                                  .gate = index ? w->igate : w->gate,
                                  .ape = index ? w->iape : w->ape,
                                  .norm = index ? w->inorm : w->norm,
                                  .inv_freq = w->freq,
                                  .pages = w->pages,
                                  .layout = &w->l,
                                  .layer = 1,
                                  .index = index,
                                  .seqs = b,
                                  .n_seqs = n,
                                  .eps = 1e-6f,
                                  .act = w->act};
}
static void world_compress(struct op_run *r, struct world *w, bool index, const struct kern_seq *b,
                           int32_t n)
{
    const struct kern_compress p = compress_of(w, index, b, n);
    assert_int_equal(r->ops->compress(r->s, &p), 0);
}
static void world_store(struct op_run *r, struct world *w, const struct kern_seq *b, int32_t n)
{
    struct kern_window_store p = {w->win, &w->l, 1, b, n, w->act};
    assert_int_equal(r->ops->window_store(r->s, &p), 0);
}
/* What is stored, as numbers. */
static void view_tails(struct op_run *r, struct world *w)
{
    const struct kern_kv_layer *y = &w->l.layer[1];
    const int64_t m = y->mstate_bytes / 4, n = y->istate_bytes / 4, ring = w->l.spec.window * w->d;
    float *all = take(r, (size_t)(SEQS * (m + n + ring)) * 4 + 2 * GUARD), *v = all + GUARD / 4;
    memset(all, 0xa5, (size_t)(SEQS * (m + n + ring)) * 4 + 2 * GUARD);
    for (int i = 0; i < SEQS; i++) {
        const uint8_t *tail = w->tails + i * w->l.tail_bytes;
        memcpy(v, tail + y->mstate_off, (size_t)m * 4), v += m;
        memcpy(v, tail + y->istate_off, (size_t)n * 4), v += n;
        for (int32_t k = 0; k < w->l.spec.window; k++, v += w->d)
            kern_kv_load(w->l.spec.kv_fmt, tail + y->window_off, w->l.spec.window, k, v, w->d,
                         w->rd);
    }
    done_flat(r, all + GUARD / 4, SEQS * (m + n + ring) * 4, 4);
}
static void view_entries(struct op_run *r, struct world *w)
{
    const struct kern_kv_layer *y = &w->l.layer[1];
    int64_t n = 0;
    for (int i = 0; i < SEQS; i++) n += w->len[i] / w->ratio;
    const int64_t each = w->d + (w->ratio == 4 ? INDEX_W : 0);
    float *all = take(r, (size_t)(n * each) * 4 + 2 * GUARD), *v = all + GUARD / 4;
    memset(all, 0xa5, (size_t)(n * each) * 4 + 2 * GUARD);
    for (int i = 0; i < SEQS; i++)
        for (int32_t e = 0; e < w->len[i] / w->ratio; e++) {
            const uint8_t *page =
                w->pages +
                w->q[i].page_ids[e / y->per_page * (w->shadowed ? 2 : 1)] * w->l.page_bytes;
            kern_kv_load(w->l.spec.kv_fmt, page + y->main_off, y->per_page, e % y->per_page, v,
                         w->d, w->rd);
            v += w->d;
            if (w->ratio != 4) continue;
            kern_ik_load(w->l.spec.ik_fmt, page + y->index_off, y->per_page, e % y->per_page, v,
                         INDEX_W);
            v += INDEX_W;
        }
    done_flat(r, all + GUARD / 4, n * each * 4, 4);
}
static int32_t ratio_of(const struct op_run *r)
{
    static const int32_t ratios[] = {4, 128, 8, 2};
    return ratios[r->variant % 4];
}

static void case_window_store(struct op_run *r)
{
    struct world w;
    struct kern_seq b[SEQS];
    world_open(r, &w, ratio_of(r));
    for (int32_t n; (n = world_batch(r, &w, b)) > 0;) world_store(r, &w, b, n);
    done_own(r, w.tails, SEQS * w.l.tail_bytes, 1);
    view_tails(r, &w);
}

/* The key of entry e by keys of one type: in the page, or in its companion. */
static void load_key(const struct world *w, const struct kern_seq *q, int32_t e,
                     enum kern_shadow type, float *key)
{
    const struct kern_kv_layer *y = &w->l.layer[1];
    const enum kern_ik_fmt fmt = kern_shadow_fmt(type);
    const bool own = fmt == w->l.spec.ik_fmt;
    const uint8_t *page =
        w->pages + q->page_ids[e / y->per_page * 2 + (own ? 0 : 1)] * w->l.page_bytes;
    kern_ik_load(fmt, page + (own ? y->index_off : y->shadow_off[type]), y->per_page,
                 e % y->per_page, key, INDEX_W);
}

/* Keys of every type are those of 16 bits, rounded to it. */
static void check_shadows(const struct world *w)
{
    for (int i = 0; i < SEQS; i++)
        for (int32_t e = 0; e < w->len[i] / 4; e++) {
            float wide[INDEX_W], want[INDEX_W], got[INDEX_W];
            uint8_t part[INDEX_W * 4];
            load_key(w, &w->q[i], e, KERN_SHADOW_BF16, wide);
            for (int s = KERN_SHADOW_FP8; s < KERN_SHADOWS; s++) {
                const enum kern_ik_fmt fmt = kern_shadow_fmt((enum kern_shadow)s);
                kern_ik_store(fmt, part, 1, 0, wide, INDEX_W);
                kern_ik_load(fmt, part, 1, 0, want, INDEX_W);
                load_key(w, &w->q[i], e, (enum kern_shadow)s, got);
                assert_memory_equal(got, want, sizeof got);
            }
        }
}

static void case_compress(struct op_run *r)
{
    struct world w;
    struct kern_seq b[SEQS];
    /* A third overlaps whatever the format of the keys, so that each is seen beside its shadows. */
    world_open(r, &w, r->variant / 8 == 1 ? 4 : ratio_of(r));
    for (int32_t n; (n = world_batch(r, &w, b)) > 0;) {
        struct kern_compress both = compress_of(&w, false, b, n),
                             index = compress_of(&w, true, b, n);
        if (w.ratio == 4) both.also = &index;
        assert_int_equal(r->ops->compress(r->s, &both), 0);
    }
    for (int64_t i = 0; i < w.l.page_bytes; i++)
        assert_int_equal(w.pages[i], 0xa5); /* nobody's page */
    if (w.shadowed) check_shadows(&w);
    done_own(r, w.pages, w.pool_bytes, 1);
    done_own(r, w.tails, SEQS * w.l.tail_bytes, 1);
    view_entries(r, &w);
    view_tails(r, &w);
}

/* All of it where every sequence has one row, what is legal elsewhere. */
static void case_prepare(struct op_run *r)
{
    struct world w;
    struct kern_seq b[SEQS];
    world_open(r, &w, r->variant / 8 == 1 ? 4 : ratio_of(r));
    const int64_t a = kern_dtype_bytes(w.act), heads = HEADS * w.d, index = INDEX_H * INDEX_W;
    float *c, *sn;
    tables(r, w.T, w.rd, &c, &sn);
    void *q = output(r, w.T * heads * a), *kv = output(r, (int64_t)w.T * w.d * a),
         *iq = output(r, w.T * index * a);
    memcpy(q, w.query, (size_t)(w.T * heads * a));
    memcpy(iq, w.iq, (size_t)(w.T * index * a));
    for (int32_t n; (n = world_batch(r, &w, b)) > 0;) {
        bool one = true;
        for (int32_t i = 0; i < n; i++) one &= b[i].n_rows == 1;
        /* Rows of a batch do not lie together here, so the dense tensors go sequence by
         * sequence. */
        for (int32_t i = 0; i < n; i++) {
            struct kern_seq s = b[i];
            const int64_t t = s.row0, h = w.rd / 2;
            s.row0 = 0;
            struct kern_compress both = compress_of(&w, false, &s, 1),
                                 other = compress_of(&w, true, &s, 1);
            const int64_t cw = w.ratio == 4 ? 2 : 1;
            both.kv += t * cw * w.d, both.gate += t * cw * w.d;
            other.kv += t * cw * INDEX_W, other.gate += t * cw * INDEX_W;
            if (w.ratio == 4) both.also = &other;
            const struct kern_heads_rope heads_rope = {.q = at(q, t * heads, w.act),
                                                       .cos = c + t * h,
                                                       .sin = sn + t * h,
                                                       .T = s.n_rows,
                                                       .H = HEADS,
                                                       .d = w.d,
                                                       .rd = w.rd,
                                                       .eps = 1e-6f,
                                                       .norm = true,
                                                       .act = w.act};
            const struct kern_kv_prep kv_prep = {at(w.win, t * w.d, w.act),
                                                 w.norm,
                                                 c + t * h,
                                                 sn + t * h,
                                                 at(kv, t * w.d, w.act),
                                                 s.n_rows,
                                                 w.d,
                                                 w.rd,
                                                 1e-6f,
                                                 w.act};
            const struct kern_window_store store = {kv_prep.y, &w.l, 1, &s, 1, w.act};
            const struct kern_index_query query = {
                at(iq, t * index, w.act), c + t * h, sn + t * h, s.n_rows, INDEX_H, INDEX_W, w.rd,
                w.l.spec.ik_fmt,          w.act};
            const struct kern_prepare p = {r->variant % 5 == 4 ? NULL : &heads_rope, &kv_prep,
                                           one ? &store : NULL, &both,
                                           w.ratio == 4 ? &query : NULL};
            assert_int_equal(r->ops->prepare(r->s, &p), 0);
            if (!one) assert_int_equal(r->ops->window_store(r->s, &store), 0);
        }
    }
    done_own(r, w.pages, w.pool_bytes, 1);
    done_own(r, w.tails, SEQS * w.l.tail_bytes, 1);
    done_flat(r, q, w.T * heads * a, (int)a);
    done_flat(r, kv, (int64_t)w.T * w.d * a, (int)a);
    done_flat(r, iq, w.T * index * a, (int)a);
    view_entries(r, &w);
    view_tails(r, &w);
}

enum { SEL_LD = 20, SCORE_LD = 80 };
static void world_select(struct op_run *r, struct world *w, const struct kern_seq *b, int32_t n,
                         int32_t *sel, int32_t *n_sel, float *scores, float *margin)
{
    struct kern_index_select p = {.q = w->iq,
                                  .wt = w->iwt,
                                  .factor = 0.07f,
                                  .pages = w->pages,
                                  .layout = &w->l,
                                  .layer = 1,
                                  .seqs = b,
                                  .n_seqs = n,
                                  .T = w->T,
                                  .H = INDEX_H,
                                  .selected = sel,
                                  .n_selected = n_sel,
                                  .sel_ld = SEL_LD,
                                  .scores = scores,
                                  .score_ld = SCORE_LD,
                                  .margin = margin,
                                  .act = w->act};
    assert_int_equal(r->ops->index_select(r->s, &p), 0);
}

static void case_index_select(struct op_run *r)
{
    struct world w;
    struct kern_seq b[SEQS];
    world_open(r, &w, 4);
    int32_t *sel = output(r, w.T * SEL_LD * 4), *n_sel = output(r, w.T * 4);
    float *scores = output(r, w.T * SCORE_LD * 4), *margin = output(r, w.T * 4);
    if (w.T > 40) {
        if (w.act == KERN_F32) ((float *)w.iwt)[40] = NAN;
        if (w.act == KERN_BF16) ((uint16_t *)w.iwt)[40] = 0x7fc0;
        r->odd = true;
    }
    for (int32_t n; (n = world_batch(r, &w, b)) > 0;) {
        world_compress(r, &w, true, b, n);
        world_select(r, &w, b, n, sel, n_sel, scores, margin);
    }
    for (int i = 0, row = 0; i < SEQS; i++)
        for (int p = 0; p < w.len[i]; p++, row++) { /* against a plain selection */
            int n = (p + 1) / 4, k = n < w.q[i].topk ? n : w.q[i].topk;
            const float *sc = scores + row * SCORE_LD;
            assert_int_equal(n_sel[row], k);
            for (int e = 0, m = 0; e < n; e++) {
                int better = 0; /* entries that go before e */
                float s = sc[e] == sc[e] ? sc[e] : -INFINITY;
                for (int o = 0; o < n; o++) {
                    float v = sc[o] == sc[o] ? sc[o] : -INFINITY;
                    better += v > s || (v == s && o < e);
                }
                if (better < k) assert_int_equal(sel[row * SEL_LD + m++], e);
            }
            for (int e = k; e < SEL_LD; e++) assert_int_equal(sel[row * SEL_LD + e], -1);
            for (int e = n; e < SCORE_LD; e++) assert_true(sc[e] == -INFINITY);
        }
    done_own(r, sel, w.T * SEL_LD * 4, 1);
    done_flat(r, n_sel, w.T * 4, 1);
    done_flat(r, scores, w.T * SCORE_LD * 4, 4);
    done_flat(r, margin, w.T * 4, 4);
}

/* Ranks of up to RANKED entries of each sequence's last row of a batch, by its own keys and by all
 * shadows; against index_select's scores and list, and a plain count. */
enum { RANKED = 12, KEYS = 1 + KERN_SHADOWS };
struct ranking {
    struct kern_rank rank[RANKED];
    float border[2];
};
static void world_rank(struct op_run *r, struct world *w, const struct kern_seq *row, int keys,
                       const int32_t *entries, int32_t n, const float *scores, struct ranking *out)
{
    struct kern_index_rank p = {.scores = scores,
                                .q = scores ? NULL : w->iq,
                                .wt = scores ? NULL : w->iwt,
                                .factor = 0.07f,
                                .pages = w->pages,
                                .layout = &w->l,
                                .layer = 1,
                                .seq = row,
                                .T = w->T,
                                .H = INDEX_H,
                                .keys = keys,
                                .entries = entries,
                                .n_entries = n,
                                .ranks = out->rank,
                                .kth = &out->border[0],
                                .next = &out->border[1],
                                .act = w->act};
    assert_int_equal(r->ops->index_rank(r->s, &p), 0);
}

static void check_ranking(const struct kern_seq *row, const float *sc, const int32_t *sel,
                          const int32_t *entries, int32_t n, const struct ranking *got)
{
    const int32_t visible = (int32_t)(row->pos0 + 1) / 4;
    for (int32_t a = 0; a < n; a++) {
        const int32_t e = entries[a];
        int32_t rank = 1, equal = 0;
        for (int32_t o = 0; o < visible; o++) {
            const bool both = sc[o] == sc[e] || (sc[o] != sc[o] && sc[e] != sc[e]);
            rank += sc[o] > sc[e] || (sc[o] == sc[o] && sc[e] != sc[e]) || (both && o < e);
            equal += both && o != e;
        }
        assert_int_equal(got->rank[a].rank, rank);
        assert_int_equal(got->rank[a].equal, equal);
        assert_true(got->rank[a].score == sc[e] || sc[e] != sc[e]);
        bool selected = false;
        for (int32_t i = 0; i < SEL_LD; i++) selected |= sel[row->row0 * SEL_LD + i] == e;
        assert_int_equal(selected, rank <= row->topk);
    }
    if (visible == 0) assert_true(got->border[0] != got->border[0]);
    if (visible <= row->topk) assert_true(got->border[1] != got->border[1]);
}

static void case_index_rank(struct op_run *r)
{
    struct world w;
    struct kern_seq b[SEQS];
    world_open(r, &w, 4);
    int32_t *sel = output(r, w.T * SEL_LD * 4), *n_sel = output(r, w.T * 4);
    float *scores = output(r, w.T * SCORE_LD * 4), *margin = output(r, w.T * 4);
    /* Whatever the pieces were, the last row of each sequence is ranked. */
    struct ranking *all = output(r, SEQS * KEYS * (int64_t)sizeof *all);
    r->odd = true; /* a border that is not there is NaN */
    if (w.T > 40) {
        if (w.act == KERN_F32) ((float *)w.iwt)[40] = NAN;
        if (w.act == KERN_BF16) ((uint16_t *)w.iwt)[40] = 0x7fc0;
    }
    memset(all, 0, SEQS * KEYS * sizeof *all);
    for (int32_t n; (n = world_batch(r, &w, b)) > 0;) {
        world_compress(r, &w, true, b, n);
        world_select(r, &w, b, n, sel, n_sel, scores, margin);
        for (int32_t i = 0; i < n; i++) {
            struct kern_seq row = b[i];
            row.row0 += row.n_rows - 1, row.pos0 += row.n_rows - 1, row.n_rows = 1;
            const int32_t visible = (int32_t)(row.pos0 + 1) / 4;
            int32_t entries[RANKED], k = 0;
            for (int32_t e = 0; e < visible && k < RANKED; e += 1 + visible / RANKED)
                entries[k++] = e;
            struct ranking got[KEYS] = {0}, kept = {0};
            const float *sc = scores + row.row0 * SCORE_LD;
            world_rank(r, &w, &row, KERN_KEYS_OWN, entries, k, NULL, &got[0]);
            world_rank(r, &w, &row, KERN_KEYS_OWN, entries, k, sc, &kept);
            check_ranking(&row, sc, sel, entries, k, &got[0]);
            check_ranking(&row, sc, sel, entries, k, &kept);
            for (int s = 0; w.shadowed && s < KERN_SHADOWS; s++) {
                world_rank(r, &w, &row, s, entries, k, NULL, &got[1 + s]);
                if (kern_shadow_fmt((enum kern_shadow)s) == w.l.spec.ik_fmt)
                    for (int32_t a = 0; a < k; a++) { /* own keys by another way */
                        assert_int_equal(got[1 + s].rank[a].rank, got[0].rank[a].rank);
                        assert_int_equal(got[1 + s].rank[a].equal, got[0].rank[a].equal);
                    }
            }
            if (row.pos0 + 1 == w.len[row.topk / 4 - 1])
                memcpy(all + (row.topk / 4 - 1) * KEYS, got, sizeof got);
        }
    }
    done_own(r, all, SEQS * KEYS * (int64_t)sizeof *all, 4);
}

static void case_attention(struct op_run *r)
{
    struct world w;
    struct kern_seq b[SEQS];
    world_open(r, &w, ratio_of(r));
    int64_t bytes = (int64_t)w.T * HEADS * w.d * kern_dtype_bytes(w.act);
    int32_t *sel = output(r, w.T * SEL_LD * 4), *n_sel = output(r, w.T * 4);
    float *sink = floats(r, HEADS);
    void *o = output(r, bytes);
    sink[HEADS - 1] = -INFINITY;
    for (int32_t n; (n = world_batch(r, &w, b)) > 0;) {
        world_compress(r, &w, false, b, n);
        if (w.ratio == 4) {
            world_compress(r, &w, true, b, n);
            world_select(r, &w, b, n, sel, n_sel, NULL, NULL);
        }
        struct kern_attention p = {.q = w.query,
                                   .kv = w.win,
                                   .sink = sink,
                                   .o = o,
                                   .pages = w.pages,
                                   .layout = &w.l,
                                   .layer = 1,
                                   .seqs = b,
                                   .n_seqs = n,
                                   .selected = w.ratio == 4 ? sel : NULL,
                                   .n_selected = n_sel,
                                   .sel_ld = SEL_LD,
                                   .T = w.T,
                                   .H = HEADS,
                                   .scale = 0.11f,
                                   .act = w.act};
        assert_int_equal(r->ops->attention(r->s, &p), 0);
        world_store(r, &w, b, n);
    }
    done_flat(r, o, bytes, kern_dtype_bytes(w.act));
}

/* Rows of a batch do not lie together here, so it goes sequence by sequence. */
static void case_attend(struct op_run *r)
{
    enum { G = 2, LOW = 32, OUT = 48 };
    struct world w;
    struct kern_seq b[SEQS];
    world_open(r, &w, ratio_of(r));
    const int64_t a = kern_dtype_bytes(w.act), heads = HEADS * w.d;
    int32_t *sel = output(r, w.T * SEL_LD * 4), *n_sel = output(r, w.T * 4);
    float *sink = floats(r, HEADS), *c, *sn;
    void *o = output(r, w.T * heads * a), *low = output(r, (int64_t)w.T * G * LOW * a),
         *y = output(r, (int64_t)w.T * OUT * a);
    tables(r, w.T, w.rd, &c, &sn);
    const struct kern_weight wo_a = weight(r, KERN_W_FP8, G * LOW, (int32_t)(heads / G)),
                             wo_b = weight(r, KERN_W_FP8, OUT, G * LOW);
    for (int32_t n; (n = world_batch(r, &w, b)) > 0;) {
        world_compress(r, &w, false, b, n);
        if (w.ratio == 4) {
            world_compress(r, &w, true, b, n);
            world_select(r, &w, b, n, sel, n_sel, NULL, NULL);
        }
        for (int32_t i = 0; i < n; i++) {
            struct kern_seq s = b[i];
            const int64_t t = s.row0;
            const int32_t T = s.n_rows;
            s.row0 = 0;
            const struct kern_attend p = {
                .attention = {.q = at(w.query, t * heads, w.act),
                              .kv = at(w.win, t * w.d, w.act),
                              .sink = sink,
                              .o = at(o, t * heads, w.act),
                              .pages = w.pages,
                              .layout = &w.l,
                              .layer = 1,
                              .seqs = &s,
                              .n_seqs = 1,
                              .selected = w.ratio == 4 ? sel + t * SEL_LD : NULL,
                              .n_selected = n_sel + t,
                              .sel_ld = SEL_LD,
                              .T = T,
                              .H = HEADS,
                              .scale = 0.11f,
                              .act = w.act},
                .back = {.q = at(o, t * heads, w.act),
                         .cos = c + t * (w.rd / 2),
                         .sin = sn + t * (w.rd / 2),
                         .T = T,
                         .H = HEADS,
                         .d = w.d,
                         .rd = w.rd,
                         .inverse = true,
                         .act = w.act},
                .wo_a = {.x = at(o, t * heads, w.act),
                         .w = wo_a,
                         .y = at(low, t * G * LOW, w.act),
                         .ld_x = heads,
                         .ld_y = G * LOW,
                         .T = T,
                         .N = LOW,
                         .K = (int32_t)(heads / G),
                         .groups = G,
                         .x_dtype = w.act,
                         .y_dtype = w.act,
                         .round_w = w.act == KERN_BF16},
                .wo_b = {.x = at(low, t * G * LOW, w.act),
                         .w = wo_b,
                         .y = at(y, t * OUT, w.act),
                         .ld_x = G * LOW,
                         .ld_y = OUT,
                         .T = T,
                         .N = OUT,
                         .K = G * LOW,
                         .groups = 1,
                         .x_dtype = w.act,
                         .y_dtype = w.act,
                         .aq = w.act == KERN_BF16 ? KERN_AQ_A128 : KERN_AQ_NONE}};
            assert_int_equal(r->ops->attend(r->s, &p), 0);
        }
        world_store(r, &w, b, n);
    }
    done_flat(r, y, (int64_t)w.T * OUT * a, (int)a);
}

/* --- sampling */

/* A row of logits: near each other, spread, of few values, or with what is no number. */
static void logit_row(struct op_run *r, float *x, int32_t V)
{
    const int form = (int)below(r, 9);
    for (int32_t i = 0; i < V; i++) {
        x[i] = rnd(r) * (form == 1 ? 0.01f : form == 2 ? 30.0f : 3.0f);
        if (form == 3) x[i] = (float)(int)x[i];
        if (form == 4 && below(r, 3)) x[i] = -INFINITY;
        if (form == 8) x[i] = below(r, 2) ? 0.0f : -0.0f;
    }
    if (form == 5) x[below(r, (uint32_t)V)] = x[below(r, (uint32_t)V)] = INFINITY;
    if (form == 6 && below(r, 2)) x[below(r, (uint32_t)V)] = NAN;
    if (form == 7) x[below(r, (uint32_t)V)] = below(r, 2) ? 3e38f : 40.0f;
}

static int by_chance(struct op_run *r, int percent)
{
    return below(r, 100) < (uint32_t)percent;
}

static void sample_row(struct op_run *r, int32_t V, struct kern_sample_row *p, struct kern_edit *e)
{
    static const float temperatures[] = {0, 1e-30f, 0.1f, 0.7f, 1, 1, 1.5f, 100, 3e38f, -1};
    static const float top_ps[] = {1, 1, 0.999999f, 0.95f, 0.9f, 0.5f, 1e-9f, 0, -1, 2};
    static const float min_ps[] = {0, 0, 0, 0.02f, 0.5f, 1, 7, -1};
    static const double us[] = {0, 0.5, 0x1.fffffffffffffp-1};
    const int32_t top_ks[] = {0, 0, 0, 1, 2, 40, 64, 65, V - 1, V, V / 2 + 1, INT32_MAX, -1};
    *p = (struct kern_sample_row){
        .u = by_chance(r, 20) ? us[below(r, 3)] : (double)(next(&r->rng) >> 11) * 0x1p-53,
        .temperature = temperatures[below(r, 10)],
        .top_p = top_ps[below(r, 10)],
        .min_p = min_ps[below(r, 8)],
        .top_k = top_ks[below(r, 13)],
        .n_logprobs = by_chance(r, 50) ? -1 : (int32_t)below(r, 23),
        .presence = by_chance(r, 50) ? 0 : rnd(r),
        .frequency = by_chance(r, 50) ? 0 : rnd(r),
        .repetition = by_chance(r, 50) ? 1 : 0.5f + (float)below(r, 8) * 0.25f};
    p->n_edits = by_chance(r, 50) ? 0 : (int32_t)below(r, V < 40 ? (uint32_t)V + 1 : 40);
    const int32_t first = (int32_t)below(r, (uint32_t)V);
    for (int32_t i = 0; i < p->n_edits; i++) {
        static const float biases[] = {0, 0, 1, -3.5f, 100, -INFINITY};
        e[i] = (struct kern_edit){.id = (first + i * (V > 40 ? V / 40 : 1)) % V,
                                  .count = (int32_t)below(r, 4),
                                  .bias = biases[below(r, 6)]};
    }
    if (p->n_edits && by_chance(r, 10)) e[0].id = by_chance(r, 50) ? -1 : V;
}

/* What can be said of a choice without drawing it again. */
static void check_choice(const float *x, int32_t V, const struct kern_sample_row *p,
                         const struct kern_choice *c)
{
    bool nan = false, any = false;
    double sum = 0;
    float max = -INFINITY;
    for (int32_t i = 0; i < V; i++) {
        nan |= isnan(x[i]);
        any |= x[i] > -INFINITY;
        if (x[i] > max) max = x[i];
    }
    if (c->rc != 0) {
        assert_true(c->id == -1 && c->n_top == 0 && c->logprob == 0);
        assert_true(nan || !any || p->n_edits > 0);
        return;
    }
    assert_true(!nan && any);
    assert_in_range(c->id, 0, V - 1);
    const int32_t want = p->n_logprobs > KERN_SAMPLE_TOP ? KERN_SAMPLE_TOP : p->n_logprobs;
    assert_int_equal(c->n_top, want < 0 ? 0 : want < V ? want : V);
    if (p->n_edits == 0 && (!(p->temperature > 0) || isinf(max) || p->top_k == 1)) {
        assert_true(x[c->id] == max);
        for (int32_t i = 0; i < c->id; i++) assert_true(x[i] < max);
    }
    for (int32_t k = 1; k < c->n_top; k++)
        assert_true(
            x[c->top_ids[k - 1]] > x[c->top_ids[k]] ||
            (x[c->top_ids[k - 1]] == x[c->top_ids[k]] && c->top_ids[k - 1] < c->top_ids[k]));
    if (p->n_logprobs < 0 || isinf(max)) return;
    for (int32_t i = 0; i < V; i++) sum += exp((double)x[i] - (double)max);
    const double lp = (double)x[c->id] - (double)max - log(sum);
    assert_true(isinf(x[c->id]) ? isinf(c->logprob)
                                : fabs((double)c->logprob - lp) <= 2e-6 + fabs(lp) * 1e-6);
}

static void case_sample(struct op_run *r)
{
    static const int32_t vs[] = {1, 31, 5, 64, 65, 300, 4096, 4097, 131, 9001};
    const int32_t T = PICK(r, t_list) % 50, V = vs[(r->variant * 7 + r->variant / 10) % 10];
    const int64_t n = (int64_t)T * V;
    struct kern_sample_row *rows = take(r, (size_t)T * sizeof *rows);
    struct kern_edit *edits = take(r, (size_t)T * 40 * sizeof *edits);
    float *x = take(r, (size_t)n * sizeof *x), *given = output(r, n * (int64_t)sizeof *x);
    struct kern_choice *c = output(r, T * (int64_t)sizeof *c);
    int32_t n_edits = 0;
    for (int32_t t = 0; t < T; t++) {
        logit_row(r, x + (int64_t)t * V, V);
        sample_row(r, V, &rows[t], edits + n_edits);
        rows[t].edit0 = n_edits;
        n_edits += rows[t].n_edits;
    }
    if (n) memcpy(given, x, (size_t)n * sizeof *x);
    r->odd = true;
    PIECES(t, k, T)
    {
        const struct kern_sample p = {.logits = given + (int64_t)t * V,
                                      .rows = rows + t,
                                      .edits = edits,
                                      .choices = c + t,
                                      .T = k,
                                      .V = V,
                                      .n_edits = n_edits};
        assert_int_equal(r->ops->sample(r->s, &p), 0);
    }
    if (n) assert_memory_equal(given, x, (size_t)n * sizeof *x);
    for (int32_t t = 0; t < T; t++) check_choice(x + (int64_t)t * V, V, &rows[t], &c[t]);
    done_flat(r, c, T * (int64_t)sizeof *c, 1);
}

/* --- the table */

const struct op_case op_cases[N_OP_CASES] = {
#define X(op) {#op, case_##op},
    KERN_OPS(X)
#undef X
};

int op_case_variants(const struct op_case *c)
{
    return c == &op_cases[OP_CASE_linear] ? 3 * OP_VARIANTS : OP_VARIANTS;
}

void op_case_run(const struct op_case *c, struct op_run *r)
{
    r->rng = (uint64_t)(r->variant + 1) * UINT64_C(0x9e3779b97f4a7c15);
    r->out = NULL;
    r->n = r->room = 0;
    r->n_mem = r->n_pieces = 0;
    r->odd = r->f32 = false;
    c->run(r);
    for (int i = 0; i < r->n_mem; i++) free(r->mem[i]);
}
