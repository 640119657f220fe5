/* tests/gpu/bench_gemm.c - dense products at the shapes of V4-Flash, decode and prefill: time
 * against the bytes of weights and rows, or the FLOPs at what the matrix unit reaches (in bf16
 * TOW_BENCH_TFLOPS; else what bench.h says of an H200). fp8: products by codes; late: they do not
 * begin while rows are quantized; mma: not by wgmma; in a graph: one after the other, as a step of
 * decode has them. "before wq_b": the products that are one op; "codes given": products of many
 * rows by codes, without and with quantizing.
 * TOW_BENCH_ROWS: only so many rows, as 1,64,8192. */
#include "kernels/cuda/table.h"
#include "tests/gpu/bench.h"

struct shape {
    const char *name;
    enum kern_wfmt fmt;
    enum kern_act_quant aq;
    int32_t N, K, groups;
    enum kern_dtype y;
    bool round_w, thorough;
    const char *decode, *prefill;
};
static const struct shape shapes[] = {
    {"wq_b", KERN_W_FP8, KERN_AQ_A128, 32768, 1024, 1, KERN_BF16, false, true,
     "<= 1.3 x (cuBLASLt 15 us at 16 to 128)", "cuBLASLt 518 us at 8192 (fp8)"},
    {"wo_b", KERN_W_FP8, KERN_AQ_A128, 4096, 8192, 1, KERN_BF16, false, true,
     "<= 1.3 x (cuBLASLt 18 us at 16, 23 at 64)", "cuBLASLt 429 us at 8192 (fp8)"},
    {"wo_a", KERN_W_FP8, KERN_AQ_NONE, 1024, 4096, 8, KERN_BF16, true, false, "<= 1.3 x",
     "bf16 by definition: 0.7 ms"},
    {"wq_a", KERN_W_FP8, KERN_AQ_A128, 1024, 4096, 1, KERN_BF16, false, false,
     "<= 3 us (cuBLASLt 14 with wkv)", NULL},
    {"wkv", KERN_W_FP8, KERN_AQ_A128, 512, 4096, 1, KERN_BF16, false, false, "<= 2.5 us", NULL},
    {"shared_w1", KERN_W_FP8, KERN_AQ_A128, 2048, 4096, 1, KERN_BF16, false, false,
     "<= 3.5 us (cuBLASLt 14.5)", "cuBLASLt 112 us at 8192 (fp8)"},
    {"shared_w2", KERN_W_FP8, KERN_AQ_A128, 4096, 2048, 1, KERN_BF16, false, false,
     "<= 3.5 us (cuBLASLt 9.6)", "cuBLASLt 119 us at 8192 (fp8)"},
    {"index_wq_b", KERN_W_FP8, KERN_AQ_A128, 8192, 1024, 1, KERN_BF16, false, false,
     "<= 3.5 us (cuBLASLt 7.8)", "cuBLASLt 136 us at 8192 (fp8)"},
    {"compress_kv", KERN_W_BF16, KERN_AQ_NONE, 1024, 4096, 1, KERN_F32, false, false, "<= 3.5 us",
     NULL},
    {"index_weights", KERN_W_BF16, KERN_AQ_NONE, 64, 4096, 1, KERN_BF16, false, false, "<= 3 us",
     NULL},
    {"gate", KERN_W_F32, KERN_AQ_NONE, 256, 4096, 1, KERN_F32, false, false, "<= 3.5 us", NULL},
    {"head", KERN_W_BF16, KERN_AQ_NONE, 129280, 4096, 1, KERN_F32, false, false, "<= 1.15 x", NULL},
};

enum { MOST = 40 };
struct ctx {
    const struct kern_ops *ops;
    struct kern_stream *s;
    struct kern_linear p[MOST];
    int turns;
};
static int call(void *arg, int i)
{
    struct ctx *c = arg;
    return c->ops->linear(c->s, &c->p[i % c->turns]);
}

/* All turns as a step of decode has them: each an op of several products, though of one, and all
 * in a graph. */
static int enqueue_turns(void *arg)
{
    struct ctx *c = arg;
    int rc = 0;
    for (int i = 0; i < c->turns && rc == 0; i++)
        rc = c->ops->linears(c->s, &(struct kern_linears){.each = &c->p[i], .n = 1});
    return rc;
}
static int call_turns(void *arg, int i)
{
    struct ctx *c = arg;
    (void)i;
    return kern_stream_repeat(c->s, 1, enqueue_turns, arg);
}

static double weight_bytes(const struct shape *c)
{
    const double n = (double)c->N * c->groups * c->K;
    return n * (c->fmt == KERN_W_F32 ? 4 : c->fmt == KERN_W_BF16 ? 2 : 1);
}

/* Random codes without NaN, block scales around 2^-8. */
static struct kern_weight host_weight(const struct shape *c)
{
    struct kern_weight w = {.fmt = c->fmt, .n = c->N * c->groups, .k = c->K, .scale2 = 1};
    const size_t bytes = (size_t)weight_bytes(c);
    uint64_t seed = 88172645463325252u;
    uint8_t *d = malloc(bytes);
    if (!d) exit(1);
    for (size_t i = 0; i < bytes && i < BENCH_BLOCK; i += c->fmt == KERN_W_F32 ? 4 : 2) {
        const float x = bench_normal(&seed) * 0.02f;
        const uint16_t h = kern_bf16_encode(x);
        memcpy(d + i, c->fmt == KERN_W_F32 ? (const void *)&x : &h, c->fmt == KERN_W_F32 ? 4 : 2);
        if (c->fmt != KERN_W_FP8) continue;
        for (int j = 0; j < 2; j++) d[i + j] = kern_e4m3_encode(bench_normal(&seed) * 60);
    }
    for (size_t i = BENCH_BLOCK; i < bytes; i++) d[i] = d[i - BENCH_BLOCK];
    w.data = d;
    w.row_bytes = (int64_t)(bytes / (size_t)w.n);
    if (c->fmt != KERN_W_FP8) return w;
    const int64_t cols = (c->K + 127) / 128, n = (w.n + 127) / 128 * cols;
    uint8_t *s = malloc((size_t)n);
    if (!s) exit(1);
    for (int64_t i = 0; i < n; i++) s[i] = (uint8_t)(116 + bench_next(&seed) % 5);
    w.scale = s;
    w.sfmt = KERN_S_UE8M0;
    w.scale_row_bytes = cols;
    return w;
}

static const int32_t all_rows[] = {1, 2, 4, 8, 16, 32, 64, 128, 1024, 8192};
enum { N_ROWS = sizeof all_rows / sizeof *all_rows };
static int32_t only_rows[N_ROWS];
static int n_only_rows; /* 0: all */
static bool wanted_rows(int32_t T)
{
    for (int i = 0; i < n_only_rows; i++)
        if (only_rows[i] == T) return true;
    return n_only_rows == 0;
}

static void bench_shape(struct bench *b, const struct shape *c, double tflops)
{
    static const int32_t rows[] = {1, 8, 32, 128, 8192};
    const int32_t *Ts = c->thorough ? all_rows : rows;
    const int n = c->thorough ? N_ROWS : (int)(sizeof rows / sizeof *rows);
    const bool head = c->N > 100000;
    const double wb = weight_bytes(c);
    struct ctx ctx = {.ops = b->ops, .s = b->s, .turns = bench_turns(wb, MOST)};
    struct kern_weight w = host_weight(c), placed[MOST];
    for (int i = 0; i < ctx.turns; i++) {
        struct tow_err err = {0};
        placed[i] = w;
        if (kern_dev_place(b->dev, &placed[i], 1, &err) < 0) {
            printf("%s: %s\n", c->name, err.msg);
            b->n_failed++;
            return;
        }
    }
    for (int i = 0; i < n; i++) {
        const int32_t T = Ts[i];
        if ((head && T > 128) || !wanted_rows(T)) continue;
        const double k = (double)c->groups * c->K, width = (double)c->groups * c->N;
        void *x = bench_random(b, T * k, KERN_BF16, 1),
             *y = bench_alloc(b, T * width * kern_dtype_bytes(c->y));
        for (int j = 0; j < ctx.turns; j++)
            ctx.p[j] = (struct kern_linear){.x = x,
                                            .w = placed[j],
                                            .y = y,
                                            .ld_x = (int64_t)k,
                                            .ld_y = (int64_t)width,
                                            .T = T,
                                            .N = c->N,
                                            .K = c->K,
                                            .groups = c->groups,
                                            .x_dtype = KERN_BF16,
                                            .y_dtype = c->y,
                                            .aq = c->aq,
                                            .round_w = c->round_w};
        char shape[64], name[64];
        snprintf(shape, sizeof shape, "%d x [%d, %d]%s", T, c->N, c->K,
                 c->groups > 1 ? " x 8" : "");
        const bool fp8 = c->fmt == KERN_W_FP8, codes = fp8 && c->aq == KERN_AQ_A128;
        static const char *const ways[] = {"", " mma", " fp8 late", " fp8"};
        for (int way = 0; way < 4; way++) {
            snprintf(name, sizeof name, "%s%s", c->name, ways[way]);
            if (way == 1 && ((!fp8 && c->fmt != KERN_W_BF16) || T <= 8)) continue;
            if (way >= 2 && (!codes || !kern_dev_fp8_products(b->dev, true))) break;
            if (way == 2 && T > 128) continue;
#ifdef TOW_CUDA
            cuda_wide_products = way != 1;
            cuda_early_products = way != 2;
#endif
            bench_run(
                b, &(struct bench_case){.name = name,
                                        .shape = shape,
                                        .call = call,
                                        .ctx = &ctx,
                                        .bytes = wb + T * (k * 2 + width * kern_dtype_bytes(c->y)),
                                        .flops = 2.0 * T * width * c->K,
                                        .flops_second = way >= 2 ? BENCH_FP8_FLOPS : tflops * 1e12,
                                        .goal = T <= 128 ? c->decode : c->prefill});
        }
        kern_dev_fp8_products(b->dev, false);
#ifdef TOW_CUDA
        cuda_wide_products = 1;
        cuda_early_products = 1;
#endif
        snprintf(name, sizeof name, "%s in a graph", c->name);
        if (T <= 8)
            bench_run(
                b, &(struct bench_case){.name = name,
                                        .shape = shape,
                                        .call = call_turns,
                                        .ctx = &ctx,
                                        .bytes = wb + T * (k * 2 + width * kern_dtype_bytes(c->y)),
                                        .goal = c->decode,
                                        .ops = ctx.turns});
        kern_stream_forget(b->s);
        bench_free_all(b);
    }
    for (int i = 0; i < ctx.turns; i++) kern_dev_unplace(b->dev, placed[i].data);
    free((void *)(uintptr_t)w.data);
    free((void *)(uintptr_t)w.scale);
}

/* All products of a normed row in a layer of ratio 4, which are one op. */
enum { SET = 7, SET_TURNS = 4 };
struct set_ctx {
    const struct kern_ops *ops;
    struct kern_stream *s;
    struct kern_linear each[SET_TURNS][SET];
};
static int call_set(void *arg, int i)
{
    struct set_ctx *c = arg;
    return c->ops->linears(c->s, &(struct kern_linears){.each = c->each[i % SET_TURNS], .n = SET});
}
static void bench_set(struct bench *b)
{
    enum { K = 4096 };
    static const struct shape of[SET] = {
        {.N = 1024, .K = K, .groups = 1, .fmt = KERN_W_FP8, .aq = KERN_AQ_A128, .y = KERN_BF16},
        {.N = 512, .K = K, .groups = 1, .fmt = KERN_W_FP8, .aq = KERN_AQ_A128, .y = KERN_BF16},
        {.N = 1024, .K = K, .groups = 1, .fmt = KERN_W_BF16, .y = KERN_F32},
        {.N = 1024, .K = K, .groups = 1, .fmt = KERN_W_BF16, .y = KERN_F32},
        {.N = 256, .K = K, .groups = 1, .fmt = KERN_W_BF16, .y = KERN_F32},
        {.N = 256, .K = K, .groups = 1, .fmt = KERN_W_BF16, .y = KERN_F32},
        {.N = 64, .K = K, .groups = 1, .fmt = KERN_W_BF16, .y = KERN_BF16}};
    static const int32_t rows[] = {1, 8, 16, 32, 64, 128, 8192};
    struct kern_weight placed[SET_TURNS][SET];
    double wb = 0, width = 0;
    for (int k = 0; k < SET; k++) {
        struct kern_weight w = host_weight(&of[k]);
        wb += weight_bytes(&of[k]), width += of[k].N * kern_dtype_bytes(of[k].y);
        for (int i = 0; i < SET_TURNS; i++) {
            struct tow_err err = {0};
            placed[i][k] = w;
            if (kern_dev_place(b->dev, &placed[i][k], 1, &err) == 0) continue;
            printf("before wq_b: %s\n", err.msg);
            b->n_failed++;
            return;
        }
        free((void *)(uintptr_t)w.data), free((void *)(uintptr_t)w.scale);
    }
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        const int32_t T = rows[n];
        if (!wanted_rows(T)) continue;
        struct set_ctx c = {.ops = b->ops, .s = b->s};
        void *x = bench_random(b, (double)T * K, KERN_BF16, 1), *y[SET];
        for (int k = 0; k < SET; k++) y[k] = bench_alloc(b, (double)T * of[k].N * 4);
        double flops = 0;
        for (int k = 0; k < SET; k++) {
            flops += 2.0 * T * of[k].N * K;
            for (int i = 0; i < SET_TURNS; i++)
                c.each[i][k] = (struct kern_linear){.x = x,
                                                    .w = placed[i][k],
                                                    .y = y[k],
                                                    .ld_x = K,
                                                    .ld_y = of[k].N,
                                                    .T = T,
                                                    .N = of[k].N,
                                                    .K = K,
                                                    .groups = 1,
                                                    .x_dtype = KERN_BF16,
                                                    .y_dtype = of[k].y,
                                                    .aq = of[k].aq};
        }
        char shape[64];
        snprintf(shape, sizeof shape, "%d x 7 of [.., %d]", T, K);
        bench_run(b, &(struct bench_case){.name = "before wq_b",
                                          .shape = shape,
                                          .call = call_set,
                                          .ctx = &c,
                                          .bytes = wb + T * (K * 2 + width),
                                          .flops = flops,
                                          .flops_second = BENCH_BF16_FLOPS,
                                          .goal = T <= 128 ? "<= 1.3 x" : NULL});
        bench_free_all(b);
    }
    for (int i = 0; i < SET_TURNS; i++)
        for (int k = 0; k < SET; k++) kern_dev_unplace(b->dev, placed[i][k].data);
}

#ifdef TOW_CUDA
/* Products of a chunk by codes, alone (rows' codes are given) and with quantizing: in turns, after
 * the clock has settled under that load, so that both have the same. */
enum { GIVEN, QUANTIZED, COLUMNS, GIVEN_ROUNDS = 5 };
static double seconds_of(struct bench *b, struct ctx *ctx, int column, int n)
{
    cuda_given_codes = column == GIVEN;
    const double begin = bench_now();
    for (int i = 0; i < n; i++)
        if (call(ctx, i) < 0) return -1;
    if (kern_stream_sync(b->s) < 0) return -1;
    return (bench_now() - begin) / n;
}
static void bench_given(struct bench *b)
{
    enum { T = 8192, CALLS = 150 };
    double mean[COLUMNS] = {0};
    int n_shapes = 0;
    if (!kern_dev_fp8_products(b->dev, true)) return;
    printf("codes given: %d rows by codes, TFLOP/s alone and with quantizing\n", T);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const struct shape *c = &shapes[i];
        if (c->fmt != KERN_W_FP8 || c->aq != KERN_AQ_A128 || c->N < 1024) continue;
        struct ctx ctx = {.ops = b->ops, .s = b->s, .turns = 1};
        struct kern_weight w = host_weight(c), placed = w;
        if (kern_dev_place(b->dev, &placed, 1, NULL) < 0) continue;
        ctx.p[0] = (struct kern_linear){.x = bench_random(b, (double)T * c->K, KERN_BF16, 1),
                                        .w = placed,
                                        .y = bench_alloc(b, (double)T * c->N * 2),
                                        .ld_x = c->K,
                                        .ld_y = c->N,
                                        .T = T,
                                        .N = c->N,
                                        .K = c->K,
                                        .groups = 1,
                                        .x_dtype = KERN_BF16,
                                        .y_dtype = KERN_BF16,
                                        .aq = KERN_AQ_A128};
        double took[COLUMNS][GIVEN_ROUNDS];
        bool failed = false;
        for (int r = -2; r < GIVEN_ROUNDS; r++)
            for (int column = QUANTIZED; column >= GIVEN; column--) {
                const double t = seconds_of(b, &ctx, column, CALLS);
                failed |= t < 0;
                if (r >= 0) took[column][r] = t;
            }
        if (failed) {
            printf("%s: FAILED\n", c->name);
            b->n_failed++;
        } else {
            const double flops = 2.0 * T * c->N * c->K;
            for (int column = 0; column < COLUMNS; column++) {
                qsort(took[column], GIVEN_ROUNDS, sizeof took[column][0], bench_by_value);
                mean[column] += flops / took[column][GIVEN_ROUNDS / 2] * 1e-12;
            }
            const double alone = took[GIVEN][GIVEN_ROUNDS / 2],
                         all = took[QUANTIZED][GIVEN_ROUNDS / 2];
            printf("%-12s x [%d, %d]  alone %7.1f us %7.1f TFLOP/s  with quantizing %7.1f us "
                   "%7.1f TFLOP/s\n",
                   c->name, c->N, c->K, alone * 1e6, flops / alone * 1e-12, all * 1e6,
                   flops / all * 1e-12);
            n_shapes++;
        }
        kern_dev_unplace(b->dev, placed.data);
        free((void *)(uintptr_t)w.data), free((void *)(uintptr_t)w.scale);
        bench_free_all(b);
    }
    b->n_timed += n_shapes;
    if (n_shapes)
        printf("mean of %d  alone %7.1f TFLOP/s  with quantizing %7.1f TFLOP/s\n", n_shapes,
               mean[GIVEN] / n_shapes, mean[QUANTIZED] / n_shapes);
    cuda_given_codes = 0;
    kern_dev_fp8_products(b->dev, false);
}
#endif

int main(int argc, char **argv)
{
    struct bench b;
    const char *t = getenv("TOW_BENCH_TFLOPS"), *rows = getenv("TOW_BENCH_ROWS");
    const double tflops = t && *t ? bench_amount(t) : BENCH_BF16_FLOPS * 1e-12;
    if (tflops < 0) bench_wrong("TOW_BENCH_TFLOPS", t, "a number above 0");
    if (rows && *rows)
        n_only_rows = bench_some("TOW_BENCH_ROWS", rows, all_rows, N_ROWS, N_ROWS, only_rows);
    int rc = bench_open(&b, argc, argv,
                        "\nTOW_BENCH_ROWS: only so many rows, as 1,64,8192; TOW_BENCH_TFLOPS: of "
                        "bf16 (780)");
    if (rc) return rc;
    printf("FLOPs by bf16 at %.0f TFLOP/s\n", tflops);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (bench_wants(&b, shapes[i].name) || strstr(b.only, shapes[i].name))
            bench_shape(&b, &shapes[i], tflops);
    if (bench_wants(&b, "before wq_b")) bench_set(&b);
#ifdef TOW_CUDA
    if (wanted_rows(8192) && bench_wants(&b, "codes given")) bench_given(&b);
#endif
    return bench_close(&b);
}
