/* tests/gpu/bench_index.c - index queries and selection at the shapes of V4-Flash.
 *
 * Goals are those for one H200. usage: bench_index [PART OF A NAME AND SHAPE] [cuda:N]
 */
#include "tests/gpu/bench.h"

#include "kernels/kv_layout.h"

enum { H = 64, W = 128, D = 512, RD = 64, TOPK = 512, BLOCK = 64 };

struct world {
    struct bench *b;
    struct kern_kv_layout l;
    uint8_t *pages, *tail;
    int32_t n_pages;
    struct kern_seq *seqs; /* host */
    uint32_t *ids;
    int32_t n_seqs, T;
    struct kern_index_select sel;
    struct kern_index_query query;
};

/* B sequences of n_rows rows that end at position `context`. */
static void world_open(struct world *w, struct bench *b, enum kern_ik_fmt ik, int32_t B,
                       int32_t n_rows, int32_t context)
{
    const struct kern_kv_spec sp = {.n_layers = 1,
                                    .ratios = {4},
                                    .head_dim = D,
                                    .rope_dim = RD,
                                    .window = 128,
                                    .index_dim = W,
                                    .kv_fmt = KERN_KV_FP8,
                                    .ik_fmt = ik};
    struct tow_err err;
    float row[W];
    static uint64_t seed = 7;
    memset(w, 0, sizeof *w);
    w->b = b, w->n_seqs = B, w->T = B * n_rows;
    if (kern_kv_layout_init(&w->l, &sp, &err) < 0) exit(1);
    const int32_t per = (int32_t)kern_kv_pages_for(context, w->l.page_tokens);
    w->n_pages = B * per;
    w->pages = bench_alloc(b, (double)w->n_pages * (double)w->l.page_bytes);
    w->tail = bench_alloc(b, (double)w->l.tail_bytes);
    uint8_t *block = calloc(BLOCK, (size_t)w->l.page_bytes);
    w->ids = malloc((size_t)w->n_pages * sizeof *w->ids);
    w->seqs = calloc((size_t)B, sizeof *w->seqs);
    if (!block || !w->ids || !w->seqs) exit(1);
    const struct kern_kv_layer *y = &w->l.layer[0];
    for (int32_t i = 0; i < BLOCK; i++)
        for (int32_t e = 0; e < y->per_page; e++) {
            for (int c = 0; c < W; c++) row[c] = bench_normal(&seed);
            kern_ik_store(ik, block + i * w->l.page_bytes + y->index_off, y->per_page, e, row, W);
        }
    bench_spread(b, w->pages, block, (size_t)BLOCK * (size_t)w->l.page_bytes,
                 (size_t)w->n_pages * (size_t)w->l.page_bytes);
    free(block);
    for (int32_t i = 0; i < w->n_pages; i++) /* each its own, out of order */
        w->ids[i] = (uint32_t)(i % 2 ? w->n_pages - 1 - i / 2 : i / 2);
    for (int32_t i = 0; i < B; i++)
        w->seqs[i] = (struct kern_seq){.row0 = i * n_rows,
                                       .n_rows = n_rows,
                                       .pos0 = context - n_rows,
                                       .page_ids = w->ids + (int64_t)i * per,
                                       .n_pages = per,
                                       .tail = w->tail,
                                       .topk = TOPK};
    kern_stream_batch(b->s, w->seqs, B);
}
static void world_close(struct world *w)
{
    kern_stream_sync(w->b->s);
    kern_stream_batch(w->b->s, NULL, 0);
    free(w->ids), free(w->seqs);
    bench_free_all(w->b);
}

static int call_query(void *ctx, int i)
{
    struct world *w = ctx;
    (void)i;
    return w->b->ops->index_query(w->b->s, &w->query);
}
static int call_select(void *ctx, int i)
{
    struct world *w = ctx;
    (void)i;
    return w->b->ops->index_select(w->b->s, &w->sel);
}

static void bench_query(struct bench *b, int32_t T, const char *goal)
{
    struct world w = {.b = b};
    char shape[64];
    if (!bench_wants(b, "index_query")) return;
    snprintf(shape, sizeof shape, "%d x 64 x 128, fp4", T);
    w.query = (struct kern_index_query){.q = bench_random(b, (double)T * H * W, KERN_BF16, 1),
                                        .cos = bench_random(b, (double)T * RD / 2, KERN_F32, 0.5f),
                                        .sin = bench_random(b, (double)T * RD / 2, KERN_F32, 0.5f),
                                        .T = T,
                                        .H = H,
                                        .w = W,
                                        .rd = RD,
                                        .fmt = KERN_IK_FP4,
                                        .act = KERN_BF16};
    bench_run(b, &(struct bench_case){.name = "index_query",
                                      .shape = shape,
                                      .call = call_query,
                                      .ctx = &w,
                                      .bytes = (double)T * (H * W * 4 + RD * 4),
                                      .goal = goal});
    bench_free_all(b);
}

static void bench_select(struct bench *b, enum kern_ik_fmt ik, int32_t B, int32_t n_rows,
                         int32_t context, const char *goal)
{
    static const char *const names[][2] = {{"index fp4", "index chunk fp4"},
                                           {"index fp8", "index chunk fp8"},
                                           {"index bf16", "index chunk bf16"}};
    const char *name = names[ik][n_rows > 4], *only = b->only;
    struct world w;
    char shape[64], what[96];
    snprintf(shape, sizeof shape, "%d x %d at %d", B, n_rows, context);
    snprintf(what, sizeof what, "%s %s", name, shape);
    if (!bench_wants(b, what)) return;
    b->only = NULL; /* the frame looks at the name alone */
    world_open(&w, b, ik, B, n_rows, context);
    const double key = ik == KERN_IK_FP4 ? 68 : ik == KERN_IK_FP8 ? 132 : 256, T = w.T;
    const double seen = (context - n_rows / 2.0) / 4; /* entries of a row, on average */
    w.sel = (struct kern_index_select){.q = bench_random(b, T * H * W, KERN_BF16, 1),
                                       .wt = bench_random(b, T * H, KERN_BF16, 1),
                                       .factor = 0.011f,
                                       .pages = w.pages,
                                       .layout = &w.l,
                                       .layer = 0,
                                       .seqs = w.seqs,
                                       .n_seqs = B,
                                       .T = w.T,
                                       .H = H,
                                       .selected = bench_alloc(b, T * TOPK * 4),
                                       .n_selected = bench_alloc(b, T * 4),
                                       .sel_ld = TOPK,
                                       .act = KERN_BF16};
    bench_run(b, &(struct bench_case){.name = name,
                                      .shape = shape,
                                      .call = call_select,
                                      .ctx = &w,
                                      .bytes = B * key * context / 4 + T * (H * W * 2 + TOPK * 4),
                                      .flops = 2.0 * H * W * seen * T,
                                      .flops_second = BENCH_BF16_FLOPS,
                                      .goal = goal});
    b->only = only;
    world_close(&w);
}

int main(int argc, char **argv)
{
    enum { K = 1024 };
    struct bench b;
    int rc = bench_open(&b, argc, argv, NULL);
    if (rc) return rc;
    bench_query(&b, 128, "<= 5 us");
    bench_query(&b, 8192, "<= 1.2 x");
    bench_select(&b, KERN_IK_FP8, 1, 1, 8 * K, NULL);
    bench_select(&b, KERN_IK_FP8, 1, 1, 64 * K, NULL);
    bench_select(&b, KERN_IK_FP8, 1, 1, 1024 * K, "<= 14 + 15 us");
    bench_select(&b, KERN_IK_FP8, 32, 1, 64 * K, NULL);
    bench_select(&b, KERN_IK_FP8, 32, 1, 512 * K, "<= 1.25 x + 15 us");
    bench_select(&b, KERN_IK_FP8, 32, 4, 512 * K, NULL);
    bench_select(&b, KERN_IK_FP8, 128, 1, 64 * K, NULL);
    bench_select(&b, KERN_IK_FP8, 128, 1, 1024 * K, "<= 1.25 x + 60 us");
    bench_select(&b, KERN_IK_FP4, 1, 1, 1024 * K, NULL);
    bench_select(&b, KERN_IK_FP4, 32, 1, 64 * K, NULL);
    bench_select(&b, KERN_IK_FP4, 32, 1, 512 * K, NULL);
    bench_select(&b, KERN_IK_FP4, 128, 1, 64 * K, NULL);
    bench_select(&b, KERN_IK_BF16, 32, 1, 64 * K, NULL);
    bench_select(&b, KERN_IK_BF16, 32, 1, 512 * K, NULL);
    bench_select(&b, KERN_IK_FP8, 1, 8192, 8 * K, NULL);
    bench_select(&b, KERN_IK_FP8, 1, 8192, 64 * K, "<= 2.2 ms of scores");
    bench_select(&b, KERN_IK_FP4, 1, 8192, 64 * K, NULL);
    bench_select(&b, KERN_IK_BF16, 1, 8192, 64 * K, NULL);
    if (kern_dev_fp8_products(b.dev, true)) {
        printf("products of fp8 codes:\n");
        bench_select(&b, KERN_IK_FP8, 1, 1, 1024 * K, "<= 14 + 15 us");
        bench_select(&b, KERN_IK_FP8, 32, 1, 512 * K, "<= 1.25 x + 15 us");
        bench_select(&b, KERN_IK_FP8, 1, 8192, 64 * K, "<= 2.2 ms of scores");
        kern_dev_fp8_products(b.dev, false);
    }
    return bench_close(&b);
}
