/* tests/kernels/trace_golden_test.c - each op, of the CPU or of TOW_TEST_DEVICE, against the traced
 * inside of a deployed forward pass.
 *
 * Every step takes the golden input of that step and is compared with the golden output, with the
 * single-step bounds of the goldens' README: 99 % of elements equal and rel <= 5e-4, except where
 * it allows more.
 */
#include "tests/support/device.h"
#include "tests/support/golden.h"

#include "common/base/err.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    D = 256,
    H = 2,
    d = 256,
    RD = 64,
    W = 128,
    T = 132,
    P = 16,
    E = 8,
    K = 2,
    I = 128,
    IH = 8,
    HC = 4
};

static struct golden *trace, *shard[3];
static struct kern_dev *dev;
static struct kern_stream *s;
static const struct kern_ops *ops;
static int32_t *positions, *prompt;
static const char *layer_prefix;

static const struct golden_tensor *weight_tensor(const char *name)
{
    for (int i = 0; i < 3; i++) {
        const struct golden_tensor *t = golden_find(shard[i], name);
        if (t) return t;
    }
    fprintf(stderr, "no weight %s\n", name);
    abort();
}
static const char *in_layer(const char *name)
{
    static char full[8][200];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(full[turn], sizeof full[0], "%s%s", layer_prefix, name);
    return full[turn];
}
static struct kern_weight weight(const char *base)
{
    char name[200];
    snprintf(name, sizeof name, "%s%s.weight", layer_prefix, base);
    const struct golden_tensor *t = weight_tensor(name), *sc = NULL;
    struct kern_weight w = {
        .data = t->data, .n = (int32_t)t->shape[0], .k = (int32_t)t->shape[1], .scale2 = 1};
    w.row_bytes = t->bytes / t->shape[0];
    if (strcmp(t->dtype, "BF16") == 0) {
        w.fmt = KERN_W_BF16;
    } else if (strcmp(t->dtype, "F32") == 0) {
        w.fmt = KERN_W_F32;
    } else {
        snprintf(name, sizeof name, "%s%s.scale", layer_prefix, base);
        sc = weight_tensor(name);
        bool fp8 = strcmp(t->dtype, "F8_E4M3") == 0;
        w.fmt = fp8 ? KERN_W_FP8 : KERN_W_MXFP4;
        if (!fp8) w.k *= 2;
        w.sfmt = KERN_S_UE8M0;
        w.scale = sc->data;
        w.scale_row_bytes = sc->shape[1];
    }
    return w;
}
static struct kern_weight plain(const char *name)
{
    const struct golden_tensor *t = weight_tensor(in_layer(name));
    return (struct kern_weight){.data = t->data,
                                .fmt = KERN_W_F32,
                                .n = (int32_t)t->shape[0],
                                .k = (int32_t)t->shape[1],
                                .row_bytes = t->shape[1] * 4,
                                .scale2 = 1};
}
static struct kern_vec vec(const char *name)
{
    const struct golden_tensor *t = weight_tensor(in_layer(name));
    return (struct kern_vec){t->data, strcmp(t->dtype, "F32") ? KERN_BF16 : KERN_F32,
                             (int32_t)t->n};
}
static const float *floats(const char *name)
{
    return weight_tensor(in_layer(name))->data;
}

/* Golden activations: bf16 as stored. */
static const void *act(const char *name)
{
    return golden_get(trace, in_layer(name))->data;
}
/* Rows of a whole-sequence tensor at the recorded positions. */
static void *pick_rows(const void *x, int64_t row_elems)
{
    uint8_t *out = malloc((size_t)(P * row_elems * 2));
    for (int i = 0; i < P; i++)
        memcpy(out + i * row_elems * 2, (const uint8_t *)x + positions[i] * row_elems * 2,
               (size_t)row_elems * 2);
    return out;
}

static void compare(const char *what, const void *got, const void *want, bool bf16, int64_t n,
                    double share, double rel)
{
    float *a = malloc((size_t)n * 4), *b = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) {
        a[i] = bf16 ? kern_bf16_decode(((const uint16_t *)got)[i]) : ((const float *)got)[i];
        b[i] = bf16 ? kern_bf16_decode(((const uint16_t *)want)[i]) : ((const float *)want)[i];
    }
    double e = golden_equal_share(a, b, n), r = golden_rel(a, b, n);
    if (getenv("TOWPATH_TEST_VERBOSE"))
        printf("%s%-16s equal %.5f rel %.2e\n", layer_prefix, what, e, r);
    if (!(e >= share) || !(r <= rel))
        fail_msg("%s%s: equal %.4f (>= %.2f), rel %.2e (<= %.0e)", layer_prefix, what, e, share, r,
                 rel);
    free(a);
    free(b);
}
#define CHECK_BF16(name, got, n) compare(name, got, act(name), true, n, 0.99, 5e-4)
/* The bf16 golden rows of a tensor stored for all positions. */
#define CHECK_ROWS(name, got, row)                                                                 \
    do {                                                                                           \
        void *want_ = pick_rows(act(name), row);                                                   \
        compare(name, got, want_, true, (int64_t)P *(row), 0.99, 5e-4);                            \
        free(want_);                                                                               \
    } while (0)

static void linear(const char *w, const void *x, void *y, int rows, enum kern_dtype out,
                   enum kern_act_quant aq)
{
    struct kern_weight m = weight(w);
    struct kern_linear p = {.x = x,
                            .w = m,
                            .y = y,
                            .ld_x = m.k,
                            .ld_y = m.n,
                            .T = rows,
                            .N = m.n,
                            .K = m.k,
                            .groups = 1,
                            .x_dtype = KERN_BF16,
                            .y_dtype = out,
                            .aq = aq};
    assert_int_equal(ops->linear(s, &p), 0);
}
static void norm(const char *w, const void *x, void *y, int rows, int n)
{
    struct kern_rmsnorm p = {.x = x,
                             .w = vec(w),
                             .y = y,
                             .ld_x = n,
                             .ld_y = n,
                             .T = rows,
                             .D = n,
                             .eps = 1e-6f,
                             .act = KERN_BF16};
    assert_int_equal(ops->rmsnorm(s, &p), 0);
}
static void inv_freq_of(int32_t ratio, float *f)
{
    double theta = ratio ? 160000.0 : 10000.0;
    double lo = floor(RD * log(1024 / (32 * 2 * M_PI)) / (2 * log(theta)));
    double hi = ceil(RD * log(1024 / (1 * 2 * M_PI)) / (2 * log(theta)));
    if (lo < 0) lo = 0;
    for (int i = 0; i < RD / 2; i++) {
        double v = pow(theta, -2.0 * i / RD), ramp = (i - lo) / (hi - lo);
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        f[i] = (float)(ratio ? v / 4 * ramp + v * (1 - ramp) : v);
    }
}

static void collapse(const char *which, const void *h, void *x, float *post, float *comb)
{
    char fn[40], base[40], scale[40];
    snprintf(fn, sizeof fn, "%s_fn", which);
    snprintf(base, sizeof base, "%s_base", which);
    snprintf(scale, sizeof scale, "%s_scale", which);
    struct kern_hc_collapse p = {.h = h,
                                 .fn = plain(fn),
                                 .base = floats(base),
                                 .scale = floats(scale),
                                 .x = x,
                                 .post = post,
                                 .comb = comb,
                                 .T = P,
                                 .hc = HC,
                                 .D = D,
                                 .iters = 20,
                                 .hc_eps = 1e-6f,
                                 .norm_eps = 1e-6f,
                                 .act = KERN_BF16};
    assert_int_equal(ops->hc_collapse(s, &p), 0);
}

struct cache {
    struct kern_kv_layout l;
    uint8_t *pages, *tails; /* one tail per recorded position */
    uint32_t page_id;
    struct kern_seq whole, rows[P];
};

static void cache_open(struct cache *c, int layer)
{
    struct kern_kv_spec sp = {.n_layers = 3,
                              .ratios = {0, 4, 128},
                              .head_dim = d,
                              .rope_dim = RD,
                              .window = W,
                              .index_dim = 128,
                              .kv_fmt = KERN_KV_FP8,
                              .ik_fmt = KERN_IK_FP4};
    assert_int_equal(kern_kv_layout_init(&c->l, &sp, NULL), 0);
    c->pages = calloc(2, (size_t)c->l.page_bytes);
    c->tails = calloc(P + 1, (size_t)c->l.tail_bytes);
    test_know(dev, c->pages, 2 * (size_t)c->l.page_bytes);
    c->page_id = 1;
    c->whole = (struct kern_seq){.n_rows = T,
                                 .page_ids = &c->page_id,
                                 .n_pages = 1,
                                 .tail = c->tails + P * c->l.tail_bytes,
                                 .topk = 16};
    for (int i = 0; i < P; i++) {
        c->rows[i] = (struct kern_seq){.row0 = i,
                                       .n_rows = 1,
                                       .pos0 = positions[i],
                                       .page_ids = &c->page_id,
                                       .n_pages = 1,
                                       .tail = c->tails + i * c->l.tail_bytes,
                                       .topk = 16};
        /* the ring as it is just before that position */
        struct kern_seq q = c->rows[i];
        struct kern_window_store w = {.kv = act("kv"),
                                      .layout = &c->l,
                                      .layer = layer,
                                      .seqs = &q,
                                      .n_seqs = 1,
                                      .act = KERN_BF16};
        q.row0 = 0, q.pos0 = 0, q.n_rows = positions[i];
        assert_int_equal(ops->window_store(s, &w), 0);
    }
}
static void cache_close(struct cache *c)
{
    test_forget(dev);
    free(c->pages);
    free(c->tails);
}
static void entries_of(const struct cache *c, int layer, bool index, int n, uint16_t *out)
{
    const struct kern_kv_layer *y = &c->l.layer[layer];
    const uint8_t *page = c->pages + c->l.page_bytes;
    float x[d];
    int w = index ? 128 : d;
    for (int e = 0; e < n; e++) {
        if (index)
            kern_ik_load(KERN_IK_FP4, page + y->index_off, y->per_page, e, x, 128);
        else
            kern_kv_load(KERN_KV_FP8, page + y->main_off, y->per_page, e, x, d, RD);
        for (int i = 0; i < w; i++) out[e * w + i] = kern_bf16_encode(x[i]);
    }
}

static void check_compressor(struct cache *c, int layer, bool index, const float *freq)
{
    const char *base = index ? "attn.indexer.compressor" : "attn.compressor";
    int ratio = c->l.layer[layer].ratio, e = index ? 128 : d, n = T / ratio;
    int N = e * (ratio == 4 ? 2 : 1);
    char a[80], b[80], ape[80], nw[80];
    float *kv = malloc((size_t)(T * N) * 4), *gate = malloc((size_t)(T * N) * 4);
    uint16_t *got = malloc((size_t)(n * e) * 2);
    snprintf(a, sizeof a, "%s.wkv", base);
    snprintf(b, sizeof b, "%s.wgate", base);
    snprintf(ape, sizeof ape, "%s.ape", base);
    snprintf(nw, sizeof nw, "%s.norm.weight", base);
    linear(a, act("attn_x"), kv, T, KERN_F32, KERN_AQ_NONE);
    linear(b, act("attn_x"), gate, T, KERN_F32, KERN_AQ_NONE);
    struct kern_compress p = {.kv = kv,
                              .gate = gate,
                              .ape = floats(ape),
                              .norm = vec(nw),
                              .inv_freq = freq,
                              .pages = c->pages,
                              .layout = &c->l,
                              .layer = layer,
                              .index = index,
                              .seqs = &c->whole,
                              .n_seqs = 1,
                              .eps = 1e-6f,
                              .act = KERN_BF16};
    assert_int_equal(ops->compress(s, &p), 0);
    entries_of(c, layer, index, n, got);
    CHECK_BF16(index ? "index_keys" : "entries", got, n * e);
    /* from here on: the golden entries */
    const uint16_t *want = act(index ? "index_keys" : "entries");
    for (int i = 0; i < n; i++) {
        const struct kern_kv_layer *y = &c->l.layer[layer];
        uint8_t *page = c->pages + c->l.page_bytes;
        float x[d];
        for (int k = 0; k < e; k++) x[k] = kern_bf16_decode(want[i * e + k]);
        if (index)
            kern_ik_store(KERN_IK_FP4, page + y->index_off, y->per_page, i, x, 128);
        else
            kern_kv_store(KERN_KV_FP8, page + y->main_off, y->per_page, i, x, d, RD);
    }
    entries_of(c, layer, index, n, got);
    assert_memory_equal(got, want, n * e * 2); /* storing quantized values loses nothing */
    free(kv);
    free(gate);
    free(got);
}

static void check_indexer(struct cache *c, int layer, const float *cs, const float *sn)
{
    uint16_t q[P * IH * 128], wt[P * IH];
    void *x = pick_rows(act("attn_x"), D);
    linear("attn.indexer.wq_b", act("qr"), q, P, KERN_BF16, KERN_AQ_A128);
    struct kern_index_query iq = {.q = q,
                                  .cos = cs,
                                  .sin = sn,
                                  .T = P,
                                  .H = IH,
                                  .w = 128,
                                  .rd = RD,
                                  .fmt = KERN_IK_FP4,
                                  .act = KERN_BF16};
    assert_int_equal(ops->index_query(s, &iq), 0);
    CHECK_BF16("index_q", q, P * IH * 128);
    linear("attn.indexer.weights_proj", x, wt, P, KERN_BF16, KERN_AQ_NONE);
    CHECK_BF16("index_weights", wt, P * IH);

    float scores[P * 33], margin[P];
    int32_t sel[P * 16], n_sel[P];
    struct kern_index_select p = {.q = act("index_q"),
                                  .wt = act("index_weights"),
                                  .factor = (float)(1 / sqrt(128.0) / sqrt((double)IH)),
                                  .pages = c->pages,
                                  .layout = &c->l,
                                  .layer = layer,
                                  .seqs = c->rows,
                                  .n_seqs = P,
                                  .T = P,
                                  .H = IH,
                                  .selected = sel,
                                  .n_selected = n_sel,
                                  .sel_ld = 16,
                                  .scores = scores,
                                  .score_ld = 33,
                                  .margin = margin,
                                  .act = KERN_BF16};
    assert_int_equal(ops->index_select(s, &p), 0);
    const float *want = act("index_scores"), *want_margin = act("index_margin");
    for (int i = 0; i < P; i++) {
        int n = (positions[i] + 1) / 4;
        compare("index_scores", scores + i * 33, want + i * 33, false, n, 0, 1e-4);
        for (int e = n; e < 33; e++) assert_true(scores[i * 33 + e] == -INFINITY);
        if (isinf(want_margin[i]))
            assert_true(isinf(margin[i]));
        else
            assert_true(fabsf(margin[i] - want_margin[i]) <= 1e-4f);
    }
    assert_memory_equal(sel, act("index_selected"), sizeof sel);
    free(x);
}

static void check_attention(struct cache *c, int layer, const int32_t *sel)
{
    static uint16_t o[P * H * d], o_all[T * H * d], q_all[T * H * d], kv[P * d];
    int32_t n_sel[P], *sel_all = malloc(T * 16 * 4), *n_all = calloc(T, 4);
    const uint16_t *all_kv = act("kv");
    memset(q_all, 0, sizeof q_all);
    for (int i = 0; i < P; i++) {
        n_sel[i] = 0;
        while (sel && n_sel[i] < 16 && sel[i * 16 + n_sel[i]] >= 0) n_sel[i]++;
        memcpy(kv + i * d, all_kv + positions[i] * d, d * 2);
        memcpy(q_all + positions[i] * H * d, (const uint16_t *)act("q") + i * H * d, H * d * 2);
        if (!sel) continue;
        n_all[positions[i]] = n_sel[i];
        memcpy(sel_all + positions[i] * 16, sel + i * 16, 64);
    }
    struct kern_attention p = {.q = act("q"),
                               .kv = kv,
                               .sink = floats("attn.attn_sink"),
                               .o = o,
                               .pages = c->pages,
                               .layout = &c->l,
                               .layer = layer,
                               .seqs = c->rows,
                               .n_seqs = P,
                               .selected = sel,
                               .n_selected = n_sel,
                               .sel_ld = 16,
                               .T = P,
                               .H = H,
                               .scale = (float)(1 / sqrt((double)d)),
                               .act = KERN_BF16};
    assert_int_equal(ops->attention(s, &p), 0);
    compare("o_raw", o, act("o_raw"), true, P * H * d, 0.9, 3e-3);
    /* the same rows inside one long chunk, window keys from the batch and not from rings */
    p.q = q_all, p.kv = all_kv, p.o = o_all, p.seqs = &c->whole, p.n_seqs = 1, p.T = T;
    if (sel) p.selected = sel_all, p.n_selected = n_all;
    assert_int_equal(ops->attention(s, &p), 0);
    for (int i = 0; i < P; i++)
        assert_memory_equal(o + i * H * d, o_all + positions[i] * H * d, H * d * 2);
    free(sel_all);
    free(n_all);
}

static void check_ffn(int layer)
{
    static uint16_t g[P * I], u[P * I], y[P * D];
    static float logits[P * E], weights[P * K], routed[P * D];
    int32_t experts[P * K], ids[P];
    linear("ffn.gate", act("ffn_x"), logits, P, KERN_F32, KERN_AQ_NONE);
    for (int i = 0; i < P; i++) ids[i] = prompt[positions[i]];
    struct kern_route r = {.logits = logits,
                           .T = P,
                           .E = E,
                           .k = K,
                           .scale = 1.5f,
                           .normalize = true,
                           .score_fn = KERN_SCORE_SQRTSOFTPLUS,
                           .experts = experts,
                           .weights = weights};
    if (layer == 0) {
        r.tid2eid = weight_tensor(in_layer("ffn.gate.tid2eid"))->data;
        r.tid_bytes = 8;
        r.ids = ids;
        r.V = 512;
    } else {
        r.bias = floats("ffn.gate.bias");
    }
    assert_int_equal(ops->route(s, &r), 0);
    for (int i = 0; i < P; i++) /* the trace lists them by ascending id */
        if (experts[2 * i] > experts[2 * i + 1]) {
            int32_t e = experts[2 * i];
            float w = weights[2 * i];
            experts[2 * i] = experts[2 * i + 1], experts[2 * i + 1] = e;
            weights[2 * i] = weights[2 * i + 1], weights[2 * i + 1] = w;
        }
    assert_memory_equal(experts, act("experts"), sizeof experts);
    compare("expert_weights", weights, act("expert_weights"), false, P * K, 0, 1e-5);

    struct kern_weight w1[E], w2[E], w3[E];
    for (int e = 0; e < E; e++) {
        char name[64];
        snprintf(name, sizeof name, "ffn.experts.%d.w1", e);
        w1[e] = weight(name);
        name[strlen(name) - 1] = '2';
        w2[e] = weight(name);
        name[strlen(name) - 1] = '3';
        w3[e] = weight(name);
    }
    struct kern_moe m = {.x = act("ffn_x"),
                         .experts = experts,
                         .weights = act("expert_weights"),
                         .w1 = w1,
                         .w2 = w2,
                         .w3 = w3,
                         .out = routed,
                         .T = P,
                         .D = D,
                         .I = I,
                         .E = E,
                         .k = K,
                         .limit = 2.0f,
                         .aq = KERN_AQ_A128,
                         .act = KERN_BF16};
    assert_int_equal(ops->moe(s, &m), 0);
    compare("routed_out", routed, act("routed_out"), false, P * D, 0.98, 5e-4);

    linear("ffn.shared_experts.w1", act("ffn_x"), g, P, KERN_BF16, KERN_AQ_A128);
    linear("ffn.shared_experts.w3", act("ffn_x"), u, P, KERN_BF16, KERN_AQ_A128);
    struct kern_swiglu sw = {
        .g = g, .u = u, .y = g, .T = P, .I = I, .limit = 2.0f, .act = KERN_BF16};
    assert_int_equal(ops->swiglu(s, &sw), 0);
    CHECK_BF16("shared_act", g, P * I);
    linear("ffn.shared_experts.w2", act("shared_act"), y, P, KERN_BF16, KERN_AQ_A128);
    CHECK_BF16("shared_out", y, P * D);
    struct kern_add a = {
        .a = act("routed_out"), .b = act("shared_out"), .y = y, .n = P * D, .act = KERN_BF16};
    assert_int_equal(ops->add(s, &a), 0);
    CHECK_BF16("ffn_out", y, P * D);
}

static void check_layer(int layer)
{
    static uint16_t h[T * HC * D], x[T * D], q[P * H * d], out[P * HC * D];
    static float post[P * HC], comb[P * HC * HC], cs[T * RD / 2], sn[T * RD / 2];
    static char prefix[32], before[64];
    float freq[RD / 2];
    int32_t all[T];
    snprintf(prefix, sizeof prefix, "layers.%d.", layer);
    layer_prefix = prefix;
    inv_freq_of(layer == 0 ? 0 : 4, freq);
    for (int t = 0; t < T; t++) all[t] = t;

    if (layer == 0) {
        layer_prefix = "";
        struct kern_embed e = {
            .ids = prompt, .w = weight("embed"), .out = h, .T = T, .hc = HC, .act = KERN_BF16};
        layer_prefix = prefix;
        assert_int_equal(ops->embed(s, &e), 0);
    } else {
        snprintf(before, sizeof before, "layers.%d.streams", layer - 1);
        memcpy(h, golden_get(trace, before)->data, sizeof h);
    }
    void *hp = pick_rows(h, HC * D);

    collapse("hc_attn", hp, x, post, comb);
    CHECK_BF16("attn_collapsed", x, P * D);
    compare("attn_post", post, act("attn_post"), false, P * HC, 0, 1e-5);
    compare("attn_comb", comb, act("attn_comb"), false, P * HC * HC, 0, 1e-5);
    norm("attn_norm.weight", act("attn_collapsed"), x, P, D);
    CHECK_ROWS("attn_x", x, D);

    void *ax = pick_rows(act("attn_x"), D);
    linear("attn.wq_a", ax, x, P, KERN_BF16, KERN_AQ_A128);
    norm("attn.q_norm.weight", x, x, P, 256);
    CHECK_BF16("qr", x, P * 256);
    struct kern_rope_table rt = {
        .pos = positions, .inv_freq = freq, .cos = cs, .sin = sn, .T = P, .rd = RD};
    assert_int_equal(ops->rope_table(s, &rt), 0);
    linear("attn.wq_b", act("qr"), q, P, KERN_BF16, KERN_AQ_A128);
    struct kern_heads_rope hr = {.q = q,
                                 .cos = cs,
                                 .sin = sn,
                                 .T = P,
                                 .H = H,
                                 .d = d,
                                 .rd = RD,
                                 .eps = 1e-6f,
                                 .norm = true,
                                 .act = KERN_BF16};
    assert_int_equal(ops->heads_rope(s, &hr), 0);
    compare("q", q, act("q"), true, P * H * d, 0.9, 5e-3);

    struct cache c;
    cache_open(&c, layer);
    if (layer == 1) check_compressor(&c, layer, true, freq);
    if (layer > 0) check_compressor(&c, layer, false, freq);
    if (layer == 1) check_indexer(&c, layer, cs, sn);
    check_attention(&c, layer, layer == 1 ? act("index_selected") : NULL);
    cache_close(&c);

    memcpy(q, act("o_raw"), sizeof q);
    hr.norm = false;
    hr.inverse = true;
    assert_int_equal(ops->heads_rope(s, &hr), 0);
    CHECK_BF16("o", q, P * H * d);
    struct kern_linear lo = {.x = act("o"),
                             .w = weight("attn.wo_a"),
                             .y = x,
                             .ld_x = H * d,
                             .ld_y = 256,
                             .T = P,
                             .N = 128,
                             .K = 256,
                             .groups = 2,
                             .x_dtype = KERN_BF16,
                             .y_dtype = KERN_BF16,
                             .round_w = true};
    assert_int_equal(ops->linear(s, &lo), 0);
    CHECK_BF16("o_low", x, P * 256);
    linear("attn.wo_b", act("o_low"), x, P, KERN_BF16, KERN_AQ_A128);
    CHECK_BF16("attn_out", x, P * D);
    struct kern_hc_expand ex = {.y = act("attn_out"),
                                .h = hp,
                                .post = act("attn_post"),
                                .comb = act("attn_comb"),
                                .out = out,
                                .T = P,
                                .hc = HC,
                                .D = D,
                                .act = KERN_BF16};
    assert_int_equal(ops->hc_expand(s, &ex), 0);
    CHECK_BF16("streams_mid", out, P * HC * D);

    collapse("hc_ffn", act("streams_mid"), x, post, comb);
    norm("ffn_norm.weight", x, x, P, D);
    CHECK_BF16("ffn_x", x, P * D);
    ex.y = act("ffn_out");
    ex.h = act("streams_mid");
    ex.post = post;
    ex.comb = comb;
    assert_int_equal(ops->hc_expand(s, &ex), 0);
    CHECK_ROWS("streams", out, HC * D);
    check_ffn(layer);

    linear("attn.wkv", act("attn_x"), x, T, KERN_BF16, KERN_AQ_A128);
    rt.pos = all;
    rt.T = T;
    assert_int_equal(ops->rope_table(s, &rt), 0);
    struct kern_kv_prep kp = {.x = x,
                              .w = vec("attn.kv_norm.weight"),
                              .cos = cs,
                              .sin = sn,
                              .y = x,
                              .T = T,
                              .d = d,
                              .rd = RD,
                              .eps = 1e-6f,
                              .act = KERN_BF16};
    assert_int_equal(ops->kv_prep(s, &kp), 0);
    CHECK_BF16("kv", x, T * d);
    free(ax);
    free(hp);
}

static void test_layer_0(void **state)
{
    (void)state, check_layer(0);
}
static void test_layer_1(void **state)
{
    (void)state, check_layer(1);
}
static void test_layer_2(void **state)
{
    (void)state, check_layer(2);
}

int main(void)
{
    trace = golden_open("native/expected/trace-fp4-132.safetensors");
    for (int i = 0; i < 3; i++) {
        char path[80];
        snprintf(path, sizeof path, "native/checkpoint/model-0000%d-of-00003.safetensors", i + 1);
        shard[i] = golden_open(path);
    }
    positions = golden_i32(trace, "positions");
    prompt = golden_i32(trace, "prompt");
    struct tow_err err = {0};
    if (test_open_mirrored(&dev, 2, &err) < 0) return test_no_device(&err);
    ops = kern_dev_ops(dev);
    s = kern_dev_stream(dev);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_layer_0),
                                       cmocka_unit_test(test_layer_1),
                                       cmocka_unit_test(test_layer_2)};
    int failed = cmocka_run_group_tests_name("kernels/trace_golden", tests, NULL, NULL);
    kern_dev_close(dev);
    for (int i = 0; i < 3; i++) golden_close(shard[i]);
    golden_close(trace);
    return failed;
}
