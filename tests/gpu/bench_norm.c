/* tests/gpu/bench_norm.c - norms, rotations, hyper-connections, compressors and window rows at
 * V4-Flash shapes: a prefill chunk of 8192 rows, and decode steps of 1, 32 and 128 sequences.
 *
 * In a decode step a call is a launch of a few microseconds, which the host cannot enqueue as fast:
 * there as many as thirty-two calls are a graph, as in a step.
 * usage: bench_norm [name part] [cuda:N] [late]; late: small kernels wait for the end of the one
 * before
 */
#include "kernels/cuda/table.h"
#include "tests/gpu/bench.h"

enum {
    CHUNK = 8192,
    D = 4096,
    HC = 4,
    H = 64,
    HEAD = 512,
    ROT = 64,
    KEY = 128,
    Q_LORA = 1024,
    WINDOW = 128,
    TURNS = 32, /* and calls of a graph */
    MAX_SEQS = 128,
    CONTEXT = 65536
};

/* One op and its arguments, a set for each turn. */
struct turns {
    const struct kern_ops *ops;
    struct kern_stream *s;
    int n;
    int (*call)(void *ctx, int i);
    uint64_t key; /* of the graph; 0: none */
    union {
        struct kern_rmsnorm rmsnorm;
        struct kern_rope_table rope_table;
        struct kern_heads_rope heads_rope;
        struct kern_kv_prep kv_prep;
        struct kern_hc_collapse hc_collapse;
        struct kern_hc_expand hc_expand;
        struct kern_hc_boundary hc_boundary;
        struct kern_compress compress;
        struct kern_window_store window_store;
    } p[TURNS];
};
#define CALL(op)                                                                                   \
    static int call_##op(void *ctx, int i)                                                         \
    {                                                                                              \
        struct turns *t = ctx;                                                                     \
        return t->ops->op(t->s, &t->p[i % t->n].op);                                               \
    }
CALL(rmsnorm)
CALL(rope_table)
CALL(heads_rope)
CALL(kv_prep)
CALL(hc_collapse)
CALL(hc_expand)
CALL(hc_boundary)
CALL(compress)
CALL(window_store)

static struct turns turns_of(struct bench *b, double bytes)
{
    struct turns t = {.ops = b->ops, .s = b->s, .n = bench_turns(bytes, TURNS)};
    return t;
}
static bool as_graphs;
static int enqueue(void *arg)
{
    struct turns *t = arg;
    int rc = 0;
    for (int i = 0; i < TURNS && rc == 0; i++) rc = t->call(t, i);
    return rc;
}
static int replay(void *ctx, int i)
{
    struct turns *t = ctx;
    (void)i;
    return kern_stream_repeat(t->s, t->key, enqueue, t);
}
static void time_turns(struct bench *b, struct turns *t, int (*call)(void *ctx, int i),
                       const char *name, const char *shape, double bytes, double flops,
                       const char *goal)
{
    static uint64_t key;
    if (!bench_wants(b, name)) return;
    t->call = call;
    t->key = ++key;
    bench_run(b, &(struct bench_case){.name = name,
                                      .shape = shape,
                                      .call = as_graphs ? replay : call,
                                      .ctx = t,
                                      .bytes = bytes,
                                      .flops = flops,
                                      .goal = goal,
                                      .ops = as_graphs ? TURNS : 1});
}
static void run(struct bench *b, struct turns *t, int (*call)(void *ctx, int i), const char *name,
                const char *shape, double bytes, double flops, const char *goal)
{
    time_turns(b, t, call, name, shape, bytes, flops, goal);
    bench_free_all(b);
}

static void bench_rmsnorm(struct bench *b, int32_t T, int32_t width, const char *goal)
{
    const double n = (double)T * width;
    struct turns t = turns_of(b, 4 * n);
    char shape[40];
    const void *w = bench_random(b, width, KERN_F32, 1);
    for (int i = 0; i < t.n; i++)
        t.p[i].rmsnorm = (struct kern_rmsnorm){.x = bench_random(b, n, KERN_BF16, 1),
                                               .w = {w, KERN_F32, width},
                                               .y = bench_alloc(b, n * 2),
                                               .ld_x = width,
                                               .ld_y = width,
                                               .T = T,
                                               .D = width,
                                               .eps = 1e-6f,
                                               .act = KERN_BF16};
    snprintf(shape, sizeof shape, "%d x %d bf16", T, width);
    run(b, &t, call_rmsnorm, "rmsnorm", shape, 4 * n, 0, goal);
}

static void bench_rope_table(struct bench *b, int32_t T)
{
    struct turns t = turns_of(b, 0);
    char shape[40];
    int32_t *pos = malloc((size_t)T * 4);
    float freq[ROT / 2];
    if (!pos) exit(1);
    for (int32_t i = 0; i < T; i++) pos[i] = CONTEXT + i;
    for (int i = 0; i < ROT / 2; i++) freq[i] = 1.0f / (float)(1 << (i / 2));
    t.p[0].rope_table = (struct kern_rope_table){bench_send(b, pos, (size_t)T * 4),
                                                 bench_send(b, freq, sizeof freq),
                                                 bench_alloc(b, T * ROT * 2.0),
                                                 bench_alloc(b, T * ROT * 2.0),
                                                 T,
                                                 ROT};
    free(pos);
    snprintf(shape, sizeof shape, "%d x %d", T, ROT / 2);
    run(b, &t, call_rope_table, "rope_table", shape, T * 4.0 * (1 + ROT), 0, "<= 5 us");
}

static void bench_heads_rope(struct bench *b, int32_t T, bool norm, const char *goal)
{
    const double n = (double)T * H * HEAD, bytes = norm ? 4 * n : 4.0 * T * H * ROT;
    struct turns t = turns_of(b, 2 * n); /* ends lie a kilobyte apart: whole rows keep L2 cold */
    char shape[40];
    const void *c = bench_random(b, T * ROT / 2, KERN_F32, 1);
    const void *s = bench_random(b, T * ROT / 2, KERN_F32, 1);
    for (int i = 0; i < t.n; i++)
        t.p[i].heads_rope = (struct kern_heads_rope){
            bench_random(b, n, KERN_BF16, 1), c, s, T, H, HEAD, ROT, 1e-6f, norm, !norm, KERN_BF16};
    snprintf(shape, sizeof shape, "%d x %d x %d %s", T, H, HEAD, norm ? "norm" : "inverse");
    run(b, &t, call_heads_rope, "heads_rope", shape, bytes, 0, goal);
}

static void bench_kv_prep(struct bench *b, int32_t T, const char *goal)
{
    const double n = (double)T * HEAD;
    struct turns t = turns_of(b, 4 * n);
    char shape[40];
    const void *w = bench_random(b, HEAD, KERN_BF16, 1);
    const void *c = bench_random(b, T * ROT / 2, KERN_F32, 1);
    const void *s = bench_random(b, T * ROT / 2, KERN_F32, 1);
    for (int i = 0; i < t.n; i++)
        t.p[i].kv_prep = (struct kern_kv_prep){bench_random(b, n, KERN_BF16, 1),
                                               {w, KERN_BF16, HEAD},
                                               c,
                                               s,
                                               bench_alloc(b, n * 2),
                                               T,
                                               HEAD,
                                               ROT,
                                               1e-6f,
                                               KERN_BF16};
    snprintf(shape, sizeof shape, "%d x %d", T, HEAD);
    run(b, &t, call_kv_prep, "kv_prep", shape, 4 * n, 0, goal);
}

static void bench_hc(struct bench *b, int32_t T, const char *goal)
{
    enum { N = (2 + HC) * HC, K = HC * D };
    const double n = (double)T * D, in_out = 2 * n * (HC + 1), weights = (double)N * K * 4;
    struct turns t = turns_of(b, in_out), e = turns_of(b, 2 * n * (2 * HC + 1)), both;
    struct kern_weight fn[TURNS];
    float *host = malloc((size_t)N * K * 4);
    char shape[40];
    uint64_t seed = 7;
    if (!host) exit(1);
    for (int i = 0; i < N * K; i++) host[i] = bench_normal(&seed) * 0.01f;
    const float *base = bench_random(b, N, KERN_F32, 1), *scale = bench_random(b, 3, KERN_F32, 1);
    for (int i = 0; i < t.n; i++) {
        struct kern_hc_collapse *p = &t.p[i].hc_collapse;
        fn[i] = (struct kern_weight){
            .data = host, .fmt = KERN_W_F32, .n = N, .k = K, .row_bytes = K * 4, .scale2 = 1};
        if (kern_dev_place(b->dev, &fn[i], 1, NULL) < 0) exit(1);
        *p = (struct kern_hc_collapse){.h = bench_random(b, n * HC, KERN_BF16, 1),
                                       .fn = fn[i],
                                       .base = base,
                                       .scale = scale,
                                       .x = bench_alloc(b, n * 2),
                                       .post = bench_alloc(b, T * HC * 4.0),
                                       .comb = bench_alloc(b, T * HC * HC * 4.0),
                                       .T = T,
                                       .hc = HC,
                                       .D = D,
                                       .iters = 20,
                                       .hc_eps = 1e-6f,
                                       .norm_eps = 1e-6f,
                                       .act = KERN_BF16};
    }
    for (int i = 0; i < e.n; i++)
        e.p[i].hc_expand =
            (struct kern_hc_expand){.y = bench_random(b, n, KERN_BF16, 1),
                                    .h = bench_random(b, n * HC, KERN_BF16, 1),
                                    .post = bench_random(b, T * HC, KERN_F32, 0.3f),
                                    .comb = bench_random(b, T * HC * HC, KERN_F32, 0.3f),
                                    .out = bench_alloc(b, n * HC * 2),
                                    .T = T,
                                    .hc = HC,
                                    .D = D,
                                    .act = KERN_BF16};
    snprintf(shape, sizeof shape, "%d x %d x %d", T, HC, D);
    time_turns(b, &t, call_hc_collapse, "hc_collapse", shape, in_out + weights, 2.0 * T * N * K,
               NULL);
    time_turns(b, &e, call_hc_expand, "hc_expand", shape, 2 * n * (2 * HC + 1), 0, NULL);
    const void *norm = bench_random(b, D, KERN_F32, 1);
    for (int routed = 0; routed < 2; routed++) {
        both = t;
        for (int i = 0; i < both.n; i++) {
            const struct kern_hc_collapse c = t.p[i].hc_collapse;
            const struct kern_hc_expand *x = &e.p[i % e.n].hc_expand;
            both.p[i].hc_boundary =
                (struct kern_hc_boundary){.routed = routed ? bench_random(b, n, KERN_F32, 1) : NULL,
                                          .y = (void *)(uintptr_t)x->y,
                                          .h = (void *)(uintptr_t)c.h,
                                          .fn = c.fn,
                                          .base = base,
                                          .scale = scale,
                                          .norm = {norm, KERN_F32, D},
                                          .x = c.x,
                                          .post = c.post,
                                          .comb = c.comb,
                                          .T = T,
                                          .hc = HC,
                                          .D = D,
                                          .iters = 20,
                                          .hc_eps = 1e-6f,
                                          .norm_eps = 1e-6f,
                                          .act = KERN_BF16};
        }
        time_turns(b, &both, call_hc_boundary, routed ? "hc_boundary routed" : "hc_boundary", shape,
                   4 * n * (HC + 1) + weights + (routed ? 4 * n : 0), 2.0 * T * N * K, goal);
    }
    for (int i = 0; i < t.n; i++) kern_dev_unplace(b->dev, fn[i].data);
    free(host);
    bench_free_all(b);
}

/* n sequences of rows rows each, at the end of a context. All layers are alike, so a turn takes
 * another layer: other states and parts of pages. */
static void bench_cache(struct bench *b, int32_t n, int32_t rows, int32_t ratio, bool index,
                        const char *goal)
{
    enum { LAYERS = 20 };
    const int32_t e = index ? KEY : HEAD, c = ratio == 4 ? 2 : 1;
    /* A decode step closes a group only in some sequences; here in the first and each ratio-th. */
    const double T = (double)n * rows, entry = index ? KEY + 4 : HEAD + ROT + 8;
    const double wide = T * c * e, bytes = 8 * wide + T / ratio * entry;
    struct kern_kv_spec sp = {.n_layers = LAYERS,
                              .head_dim = HEAD,
                              .rope_dim = ROT,
                              .window = WINDOW,
                              .index_dim = KEY,
                              .kv_fmt = KERN_KV_FP8,
                              .ik_fmt = KERN_IK_FP8};
    for (int i = 0; i < LAYERS; i++) sp.ratios[i] = ratio;
    static struct kern_kv_layout l;
    static struct kern_seq q[MAX_SEQS];
    if (kern_kv_layout_init(&l, &sp, NULL) < 0) exit(1);
    const int32_t total = (rows > 1 ? CONTEXT + rows : CONTEXT + n + ratio);
    const int32_t n_pages = (int32_t)kern_kv_pages_for(total, l.page_tokens);
    /* Only the last pages are written, which each sequence has for itself. */
    const uint32_t own = (uint32_t)(rows / l.page_tokens + 2);
    static uint32_t *lists[MAX_SEQS];
    uint8_t *pages = bench_alloc(b, (double)(own * (uint32_t)n) * (double)l.page_bytes);
    uint8_t *tails = bench_alloc(b, (double)n * (double)l.tail_bytes);
    for (int32_t i = 0; i < n; i++) {
        lists[i] = calloc((size_t)n_pages, 4);
        if (!lists[i]) exit(1);
        for (uint32_t k = 0; k < own && (int32_t)k < n_pages; k++)
            lists[i][n_pages - 1 - (int32_t)k] = (uint32_t)i * own + k;
        q[i] = (struct kern_seq){.row0 = i * rows,
                                 .n_rows = rows,
                                 .pos0 = CONTEXT + (rows > 1 ? 0 : i + ratio - 1),
                                 .page_ids = lists[i],
                                 .n_pages = n_pages,
                                 .tail = tails + (int64_t)i * l.tail_bytes,
                                 .topk = 512};
    }
    struct turns t = turns_of(b, bytes), w = turns_of(b, T * HEAD * 2);
    if (t.n > LAYERS) t.n = LAYERS;
    if (w.n > LAYERS) w.n = LAYERS;
    const float *ape = bench_random(b, ratio * c * e, KERN_F32, 1);
    const void *norm = bench_random(b, e, KERN_F32, 1);
    const float *freq = bench_random(b, ROT / 2, KERN_F32, 0.01f);
    for (int i = 0; i < t.n; i++)
        t.p[i].compress = (struct kern_compress){.kv = bench_random(b, wide, KERN_F32, 1),
                                                 .gate = bench_random(b, wide, KERN_F32, 1),
                                                 .ape = ape,
                                                 .norm = {norm, KERN_F32, e},
                                                 .inv_freq = freq,
                                                 .pages = pages,
                                                 .layout = &l,
                                                 .layer = i,
                                                 .index = index,
                                                 .seqs = q,
                                                 .n_seqs = n,
                                                 .eps = 1e-6f,
                                                 .act = KERN_BF16};
    for (int i = 0; i < w.n; i++)
        w.p[i].window_store = (struct kern_window_store){
            bench_random(b, T * HEAD, KERN_BF16, 1), &l, i, q, n, KERN_BF16};
    char shape[60];
    kern_stream_batch(b->s, q, n);
    snprintf(shape, sizeof shape, "%d x %d rows, ratio %d%s", n, rows, ratio,
             index ? " index" : "");
    time_turns(b, &t, call_compress, "compress", shape, bytes, 0, goal);
    const double stored = n * (double)(rows < WINDOW ? rows : WINDOW);
    if (ratio == 128)
        time_turns(b, &w, call_window_store, "window_store", shape,
                   stored * (HEAD * 2 + HEAD + ROT + 8), 0, "<= 3 us");
    kern_stream_batch(b->s, NULL, 0);
    for (int32_t i = 0; i < n; i++) free(lists[i]);
    bench_free_all(b);
}

int main(int argc, char **argv)
{
    static const int32_t batches[] = {1, 32, 128};
    struct bench b;
    const bool late = bench_take(&argc, argv, "late");
    int rc = bench_open(&b, argc, argv,
                        " [late]\nlate: small kernels wait for the end of the one before");
    if (rc) return rc;
    if (late) cuda_early_launches = 0;
    puts("-- a prefill chunk");
    bench_hc(&b, CHUNK, "<= 200 us");
    bench_rmsnorm(&b, CHUNK, D, "<= 1.2 x");
    bench_rmsnorm(&b, CHUNK, Q_LORA, "<= 1.2 x");
    bench_rope_table(&b, CHUNK);
    bench_heads_rope(&b, CHUNK, true, "<= 1.2 x");
    bench_heads_rope(&b, CHUNK, false, "<= 1.2 x");
    bench_kv_prep(&b, CHUNK, "<= 1.2 x");
    bench_cache(&b, 1, CHUNK, 4, false, "<= 1.35 x");
    bench_cache(&b, 1, CHUNK, 4, true, "<= 1.35 x");
    bench_cache(&b, 1, CHUNK, 128, false, "<= 1.35 x");
    puts("-- decode steps");
    as_graphs = true;
    for (int i = 0; i < 3; i++) {
        const int32_t n = batches[i];
        bench_hc(&b, n, "<= 5 us");
        bench_rmsnorm(&b, n, D, "<= 3 us");
        bench_rope_table(&b, n);
        bench_heads_rope(&b, n, true, "<= 5 us");
        bench_heads_rope(&b, n, false, "<= 5 us");
        bench_kv_prep(&b, n, "<= 5 us");
        bench_cache(&b, n, 1, 4, false, "<= 8 us with its product");
        bench_cache(&b, n, 1, 4, true, "<= 8 us with its product");
        bench_cache(&b, n, 1, 128, false, "<= 8 us with its product");
    }
    return bench_close(&b);
}
