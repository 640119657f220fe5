/* tests/gpu/bench_moe.c - routing, routed experts and the element-wise ops beside them, all experts
 * of a layer, V4-Flash shapes.
 *
 * usage: bench_moe [T=N] [name part] [cuda:N]
 *
 * "codes": products of codes (kern_dev_fp8_products), else of bf16, "wgmma" and without.
 * Experts of each call are drawn anew from eight lists, so that what the call before read does not
 * help. Bytes count each expert that a list names once.
 */
#include "kernels/cuda/table.h"
#include "tests/gpu/bench.h"

enum { E = 256, K = 6, D = 4096, I = 2048, TURNS = 8, MAX_T = 8192 };

static int32_t only_T;

/* Of all cases. */
static const int32_t rows[] = {1, 2, 4, 8, 32, 128, 256, 512, 1024, 2048, MAX_T};
static bool wanted_rows(int32_t T)
{
    return !only_T || T == only_T;
}

struct experts {
    struct kern_weight w1[E], w2[E], w3[E];
    double bytes_each;
    enum kern_act_quant aq;
    bool codes;
};
struct moe_run {
    struct bench *b;
    struct kern_moe p;
    int32_t *experts[TURNS];
};

/* Every expert's bytes are a stretch of one block of random ones. */
static void describe(struct kern_weight *w, enum kern_wfmt fmt, const uint8_t *block, int e, int n,
                     int k)
{
    const bool fp8 = fmt == KERN_W_FP8, nv = fmt == KERN_W_NVFP4;
    *w = (struct kern_weight){.data = block + 256 * e,
                              .scale = block + (16 << 20) + 64 * e,
                              .fmt = fmt,
                              .sfmt = nv ? KERN_S_E4M3 : KERN_S_UE8M0,
                              .n = n,
                              .k = k,
                              .row_bytes = fp8 ? k : k / 2,
                              .scale_row_bytes = fp8  ? k / 128
                                                 : nv ? k / 16
                                                      : k / 32,
                              .scale2 = 1,
                              .input_scale = nv ? 0.01f : 0};
}
static void place(struct bench *b, struct experts *x, enum kern_wfmt fmt, bool codes)
{
    struct tow_err err = {0};
    const size_t bytes = (size_t)20 << 20;
    uint8_t *block = malloc(bytes);
    uint64_t seed = 0x853c49e6748fea9bu;
    if (!block) exit(1);
    for (size_t i = 0; i < bytes; i++) {
        uint8_t r = (uint8_t)(bench_next(&seed) >> 40);
        if (fmt == KERN_W_FP8 && (r & 127) == 127) r = 0;
        if (i >= (size_t)16 << 20) r = (uint8_t)((fmt == KERN_W_NVFP4 ? 40 : 118) + r % 8);
        block[i] = r;
    }
    for (int e = 0; e < E; e++) {
        describe(&x->w1[e], fmt, block, e, I, D);
        describe(&x->w2[e], fmt, block, e + 1, D, I);
        describe(&x->w3[e], fmt, block, e + 2, I, D);
    }
    const struct kern_weight *w = &x->w1[0];
    x->bytes_each = 3.0 * ((double)w->row_bytes * I +
                           (double)w->scale_row_bytes * (fmt == KERN_W_FP8 ? I / 128 : I));
    x->aq = KERN_AQ_A128;
    x->codes = kern_dev_fp8_products(b->dev, codes) && codes;
    if (kern_dev_place(b->dev, x->w1, E, &err) < 0 || kern_dev_place(b->dev, x->w2, E, &err) < 0 ||
        kern_dev_place(b->dev, x->w3, E, &err) < 0) {
        fprintf(stderr, "bench_moe: %s\n", err.msg);
        exit(1);
    }
    free(block);
}
static void unplace(struct bench *b, struct experts *x)
{
    kern_dev_unplace(b->dev, x->w1[0].data);
    kern_dev_unplace(b->dev, x->w2[0].data);
    kern_dev_unplace(b->dev, x->w3[0].data);
}

static int call_moe(void *ctx, int i)
{
    struct moe_run *m = ctx;
    m->p.experts = m->experts[i % TURNS];
    return m->b->ops->moe(m->b->s, &m->p);
}
/* K distinct of the experts for each row; hot: half of the rows choose among eight. */
static double draw(struct bench *b, int T, bool hot, int32_t **out)
{
    static uint64_t seed = 0xda3e39cb94b95bdbu;
    bool seen[E] = {false};
    int32_t *h = malloc((size_t)T * K * 4);
    int n = 0;
    if (!h) exit(1);
    for (int t = 0; t < T; t++)
        for (int i = 0; i < K; i++) {
            int32_t e = (int32_t)((bench_next(&seed) >> 33) % (hot && t % 2 ? 8 : E));
            for (int j = 0; j < i; j++)
                if (h[t * K + j] == e) e = (e + 1) % E, j = -1;
            h[t * K + i] = e;
            n += !seen[e];
            seen[e] = true;
        }
    *out = bench_send(b, h, (size_t)T * K * 4);
    kern_stream_sync(b->s);
    free(h);
    return n;
}
static void run_moe(struct bench *b, struct experts *x, const char *name, int T, bool hot,
                    const char *goal)
{
    struct moe_run m = {.b = b};
    char shape[64], label[64];
    double distinct = 0;
    snprintf(label, sizeof label, "%s%s", name, x->codes ? " codes" : "");
    int wide_from = 0; /* pairs an expert */
#ifdef TOW_CUDA
    wide_from = cuda_wide_experts;
#endif
    const bool wide = wide_from && T * K >= wide_from * E && x->w1[0].fmt != KERN_W_FP8 &&
                      x->aq != KERN_AQ_NVFP4 && !x->codes;
    bool wanted = bench_wants(b, label);
    snprintf(label, sizeof label, "%s wgmma", name);
    if (wide) wanted |= bench_wants(b, label);
    if (!wanted || !wanted_rows(T)) return;
    for (int i = 0; i < TURNS; i++) distinct += draw(b, T, hot, &m.experts[i]) / TURNS;
    m.p = (struct kern_moe){.x = bench_random(b, (double)T * D, KERN_BF16, 1),
                            .weights = bench_random(b, (double)T * K, KERN_F32, 0.3f),
                            .w1 = x->w1,
                            .w2 = x->w2,
                            .w3 = x->w3,
                            .out = bench_alloc(b, (double)T * D * 4),
                            .T = T,
                            .D = D,
                            .I = I,
                            .E = E,
                            .k = K,
                            .limit = 10,
                            .aq = x->aq,
                            .act = KERN_BF16};
    snprintf(shape, sizeof shape, "T %d%s, %.0f experts", T, hot ? " hot" : "", distinct);
    for (int way = 0; way <= wide; way++) {
        snprintf(label, sizeof label, "%s%s", name, x->codes ? " codes" : way ? " wgmma" : "");
#ifdef TOW_CUDA
        cuda_wide_experts = way;
#endif
        bench_run(
            b, &(struct bench_case){.name = label,
                                    .shape = shape,
                                    .call = call_moe,
                                    .ctx = &m,
                                    .bytes = distinct * x->bytes_each + T * (double)D * 6,
                                    .flops = 6.0 * T * K * D * I,
                                    .flops_second = x->codes ? BENCH_FP8_FLOPS : BENCH_BF16_FLOPS,
                                    .goal = goal});
    }
#ifdef TOW_CUDA
    cuda_wide_experts = wide_from;
#endif
    bench_free_all(b);
}

struct small {
    struct bench *b;
    struct kern_route route;
    struct kern_swiglu swiglu;
    struct kern_add add;
};
static int call_route(void *ctx, int i)
{
    struct small *m = ctx;
    (void)i;
    return m->b->ops->route(m->b->s, &m->route);
}
static int call_swiglu(void *ctx, int i)
{
    struct small *m = ctx;
    (void)i;
    return m->b->ops->swiglu(m->b->s, &m->swiglu);
}
static int call_add(void *ctx, int i)
{
    struct small *m = ctx;
    (void)i;
    return m->b->ops->add(m->b->s, &m->add);
}
static void run_small(struct bench *b, int T)
{
    struct small m = {.b = b};
    char shape[64];
    m.route = (struct kern_route){.logits = bench_random(b, (double)T * E, KERN_F32, 1),
                                  .bias = bench_random(b, E, KERN_F32, 0.01f),
                                  .T = T,
                                  .E = E,
                                  .k = K,
                                  .scale = 1.5f,
                                  .normalize = true,
                                  .experts = bench_alloc(b, (double)T * K * 4),
                                  .weights = bench_alloc(b, (double)T * K * 4)};
    snprintf(shape, sizeof shape, "T %d, E %d, k %d", T, E, K);
    bench_run(b, &(struct bench_case){"route", shape, call_route, &m, T * (E * 4.0 + K * 8), 0, 0,
                                      T <= 128 ? "<= 4 us" : NULL, 0});
    m.swiglu = (struct kern_swiglu){bench_random(b, (double)T * I, KERN_BF16, 1),
                                    bench_random(b, (double)T * I, KERN_BF16, 1),
                                    bench_alloc(b, (double)T * I * 2),
                                    T,
                                    I,
                                    10,
                                    KERN_BF16};
    snprintf(shape, sizeof shape, "T %d x %d", T, I);
    bench_run(b, &(struct bench_case){"swiglu", shape, call_swiglu, &m, T * I * 6.0, 0, 0,
                                      T <= 128 ? "<= 3 us" : "<= 1.3 x", 0});
    m.add = (struct kern_add){bench_random(b, (double)T * D, KERN_F32, 1),
                              bench_random(b, (double)T * D, KERN_BF16, 1),
                              bench_alloc(b, (double)T * D * 2), (int64_t)T * D, KERN_BF16};
    snprintf(shape, sizeof shape, "T %d x %d", T, D);
    bench_run(b, &(struct bench_case){"add", shape, call_add, &m, T * D * 8.0, 0, 0,
                                      T <= 128 ? "<= 3 us" : "<= 1.3 x", 0});
    bench_free_all(b);
}

/* All experts of a layer; the gate chooses, from a row of its own in each call. */
struct layer_run {
    struct bench *b;
    struct kern_ffn p;
    void *x[TURNS];
    bool apart;
};
static int call_ffn(void *ctx, int i)
{
    struct layer_run *m = ctx;
    const struct kern_ops *ops = m->b->ops;
    struct kern_stream *s = m->b->s;
    m->p.gate.x = m->p.moe.x = m->p.w1.x = m->p.w3.x = m->x[i % TURNS];
    if (!m->apart) return ops->ffn(s, &m->p);
    int rc = ops->linear(s, &m->p.gate);
    if (rc == 0) rc = ops->route(s, &m->p.route);
    if (rc == 0) rc = ops->moe(s, &m->p.moe);
    if (rc == 0) rc = ops->linear(s, &m->p.w1);
    if (rc == 0) rc = ops->linear(s, &m->p.w3);
    if (rc == 0) rc = ops->swiglu(s, &m->p.swiglu);
    return rc < 0 ? rc : ops->linear(s, &m->p.w2);
}
static struct kern_linear dense(struct bench *b, enum kern_wfmt fmt, int n, int k, int T)
{
    struct tow_err err = {0};
    const bool fp8 = fmt == KERN_W_FP8;
    const size_t codes = (size_t)n * (size_t)k * (fp8 ? 1 : 2),
                 scales = fp8 ? (size_t)n * k / 16384 : 0;
    uint8_t *p = malloc(codes + scales);
    uint64_t seed = 0x9e3779b97f4a7c15u + (uint64_t)n;
    if (!p) exit(1);
    for (size_t i = 0; i < codes; i += 2) {
        const uint16_t h = kern_bf16_encode(bench_normal(&seed) * 0.02f);
        memcpy(p + i, &h, 2);
        if (fp8) p[i] = (uint8_t)(bench_next(&seed) >> 40) & 0xbf, p[i + 1] = p[i] ^ 0x81;
    }
    memset(p + codes, 116, scales);
    struct kern_weight w = {.data = p,
                            .scale = fp8 ? p + codes : NULL,
                            .fmt = fmt,
                            .sfmt = fp8 ? KERN_S_UE8M0 : KERN_S_NONE,
                            .n = n,
                            .k = k,
                            .row_bytes = fp8 ? k : 2 * k,
                            .scale_row_bytes = fp8 ? k / 128 : 0,
                            .scale2 = 1};
    if (kern_dev_place(b->dev, &w, 1, &err) < 0) {
        fprintf(stderr, "bench_moe: %s\n", err.msg);
        exit(1);
    }
    free(p);
    return (struct kern_linear){.w = w,
                                .ld_x = k,
                                .ld_y = n,
                                .T = T,
                                .N = n,
                                .K = k,
                                .groups = 1,
                                .x_dtype = KERN_BF16,
                                .y_dtype = fp8 ? KERN_BF16 : KERN_F32,
                                .aq = fp8 ? KERN_AQ_A128 : KERN_AQ_NONE};
}
static void run_ffn(struct bench *b, struct experts *x, int T)
{
    struct layer_run m = {.b = b,
                          .p = {.gate = dense(b, KERN_W_BF16, E, D, T),
                                .w1 = dense(b, KERN_W_FP8, I, D, T),
                                .w3 = dense(b, KERN_W_FP8, I, D, T),
                                .w2 = dense(b, KERN_W_FP8, D, I, T)}};
    struct kern_ffn *p = &m.p;
    char shape[64];
    static int32_t chosen[8 * K];
    double distinct = 0;
    for (int i = 0; i < TURNS; i++) m.x[i] = bench_random(b, (double)T * D, KERN_BF16, 1);
    p->gate.y = bench_alloc(b, (double)T * E * 4);
    p->route = (struct kern_route){.logits = p->gate.y,
                                   .bias = bench_random(b, E, KERN_F32, 0.01f),
                                   .T = T,
                                   .E = E,
                                   .k = K,
                                   .scale = 1.5f,
                                   .normalize = true,
                                   .experts = bench_alloc(b, (double)T * K * 4),
                                   .weights = bench_alloc(b, (double)T * K * 4)};
    p->moe = (struct kern_moe){.experts = p->route.experts,
                               .weights = p->route.weights,
                               .w1 = x->w1,
                               .w2 = x->w2,
                               .w3 = x->w3,
                               .out = bench_alloc(b, (double)T * D * 4),
                               .T = T,
                               .D = D,
                               .I = I,
                               .E = E,
                               .k = K,
                               .limit = 10,
                               .aq = x->aq,
                               .act = KERN_BF16};
    p->w1.y = bench_alloc(b, (double)T * I * 2), p->w3.y = bench_alloc(b, (double)T * I * 2);
    p->swiglu = (struct kern_swiglu){p->w1.y, p->w3.y, p->w1.y, T, I, 10, KERN_BF16};
    p->w2.x = p->w1.y, p->w2.y = bench_alloc(b, (double)T * D * 2);
    for (int i = 0; i < TURNS; i++) {
        bool seen[E] = {false};
        if (call_ffn(&m, i) < 0 ||
            kern_stream_read(b->s, chosen, p->route.experts, (size_t)(T * K) * 4) < 0)
            exit(1);
        for (int j = 0; j < T * K; j++) {
            distinct += !seen[chosen[j]] / (double)TURNS;
            seen[chosen[j]] = true;
        }
    }
    snprintf(shape, sizeof shape, "T %d, %.0f experts", T, distinct);
    for (int way = 0; way < 2; way++) {
        m.apart = way;
        bench_run(b, &(struct bench_case){.name = way ? "ffn_mxfp4 apart" : "ffn_mxfp4",
                                          .shape = shape,
                                          .call = call_ffn,
                                          .ctx = &m,
                                          .bytes = distinct * x->bytes_each + 3.0 * I * D +
                                                   2.0 * E * D + T * (double)D * 8,
                                          .flops = 6.0 * T * (K + 1) * D * I,
                                          .flops_second = BENCH_BF16_FLOPS});
    }
    kern_dev_unplace(b->dev, p->gate.w.data);
    kern_dev_unplace(b->dev, p->w1.w.data);
    kern_dev_unplace(b->dev, p->w3.w.data);
    kern_dev_unplace(b->dev, p->w2.w.data);
    bench_free_all(b);
}

int main(int argc, char **argv)
{
    static struct experts x;
    struct bench b;
    const char *T_is = bench_take(&argc, argv, "T=");
    if (T_is) bench_some("T=", T_is, rows, sizeof rows / sizeof *rows, 1, &only_T);
    int rc = bench_open(&b, argc, argv, " [T=N]\nT=N: only cases of N rows, like 1, 32 or 8192");
    if (rc) return rc;
    if (wanted_rows(32)) run_small(&b, 32);
    if (wanted_rows(MAX_T)) run_small(&b, MAX_T);
    if ((!only_T || only_T <= 8) && bench_wants(&b, "ffn_mxfp4")) {
        place(&b, &x, KERN_W_MXFP4, 0);
        for (int T = 1; T <= 8; T *= 2)
            if (wanted_rows(T)) run_ffn(&b, &x, T);
        unplace(&b, &x);
    }
    for (int codes = 0; codes < 2; codes++) {
        if (!bench_wants(&b, codes ? "moe_mxfp4 codes" : "moe_mxfp4 wgmma")) continue;
        place(&b, &x, KERN_W_MXFP4, codes);
        run_moe(&b, &x, "moe_mxfp4", 1, false, NULL);
        run_moe(&b, &x, "moe_mxfp4", 8, false, "<= 1.35 x");
        run_moe(&b, &x, "moe_mxfp4", 32, false, "<= 1.35 x (570 us)");
        run_moe(&b, &x, "moe_mxfp4", 128, false, "<= 1.35 x (1020 us)");
        run_moe(&b, &x, "moe_mxfp4", 128, true, NULL);
        run_moe(&b, &x, "moe_mxfp4", 256, false, NULL);
        run_moe(&b, &x, "moe_mxfp4", 512, false, NULL);
        run_moe(&b, &x, "moe_mxfp4", 512, true, NULL);
        run_moe(&b, &x, "moe_mxfp4", 1024, false, NULL);
        run_moe(&b, &x, "moe_mxfp4", 2048, false, NULL);
        run_moe(&b, &x, "moe_mxfp4", MAX_T, false, codes ? ">= 850 TFLOP/s" : ">= 480 TFLOP/s");
        run_moe(&b, &x, "moe_mxfp4", MAX_T, true, NULL);
        unplace(&b, &x);
    }
    if (bench_wants(&b, "moe_nvfp4 wgmma") || bench_wants(&b, "moe_nvfp4 w4a4")) {
        place(&b, &x, KERN_W_NVFP4, false);
        run_moe(&b, &x, "moe_nvfp4", 32, false, "<= 1.35 x");
        run_moe(&b, &x, "moe_nvfp4", 512, false, NULL);
        run_moe(&b, &x, "moe_nvfp4", MAX_T, false, ">= 480 TFLOP/s");
        x.aq = KERN_AQ_NVFP4;
        run_moe(&b, &x, "moe_nvfp4 w4a4", 32, false, "<= 1.35 x");
        unplace(&b, &x);
    }
    for (int codes = 0; codes < 2; codes++) {
        if (!bench_wants(&b, codes ? "moe_fp8 codes" : "moe_fp8")) continue;
        place(&b, &x, KERN_W_FP8, codes);
        run_moe(&b, &x, "moe_fp8", 32, false, "<= 1.35 x");
        run_moe(&b, &x, "moe_fp8", MAX_T, false, codes ? ">= 850 TFLOP/s" : NULL);
        unplace(&b, &x);
    }
    return bench_close(&b);
}
