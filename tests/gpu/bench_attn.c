/* tests/gpu/bench_attn.c - attention at the shapes of V4-Flash, alone and with what its output goes
 * through (attend; apart: op by op; fp8: products by codes).
 *
 * Goals are those for one H200. usage: bench_attn [PART OF A NAME, or of an attention's shape]
 * [cuda:N]
 */
#include "tests/gpu/bench.h"

#include "kernels/kv_layout.h"

#include <math.h>

enum { H = 64, W = 128, D = 512, RD = 64, TOPK = 512, C4 = 0, C128 = 1, WINDOW = 2, BLOCK = 64 };
static const double ENTRY =
    584; /* bytes of a stored row: fp8 values, their scales, bf16 rotated part */

struct world {
    struct bench *b;
    struct kern_kv_layout l;
    uint8_t *pages;
    int32_t n_pages;
    uint8_t *tails;
    struct kern_seq *seqs; /* host */
    uint32_t *ids;
    int32_t n_seqs, T, layer;
    struct kern_attention att;
    struct kern_attend attend;
    bool apart;
};

/* B sequences of n_rows rows that end at position `context`. */
static void world_open(struct world *w, struct bench *b, int32_t B, int32_t n_rows, int32_t context)
{
    const struct kern_kv_spec sp = {.n_layers = 3,
                                    .ratios = {4, 128, 0},
                                    .head_dim = D,
                                    .rope_dim = RD,
                                    .window = 128,
                                    .index_dim = W,
                                    .kv_fmt = KERN_KV_FP8,
                                    .ik_fmt = KERN_IK_FP8};
    struct tow_err err;
    float row[D];
    static uint64_t seed = 7;
    memset(w, 0, sizeof *w);
    w->b = b, w->n_seqs = B, w->T = B * n_rows;
    if (kern_kv_layout_init(&w->l, &sp, &err) < 0) exit(1);
    const int32_t per = (int32_t)kern_kv_pages_for(context, w->l.page_tokens);
    w->n_pages = B * per;
    w->pages = bench_alloc(b, (double)w->n_pages * (double)w->l.page_bytes);
    uint8_t *block = calloc(BLOCK, (size_t)w->l.page_bytes),
            *tail = calloc(1, (size_t)w->l.tail_bytes);
    w->ids = malloc((size_t)w->n_pages * sizeof *w->ids);
    w->seqs = calloc((size_t)B, sizeof *w->seqs);
    if (!block || !tail || !w->ids || !w->seqs) exit(1);
    for (int32_t i = 0; i < BLOCK; i++)
        for (int layer = 0; layer < 2; layer++) {
            const struct kern_kv_layer *y = &w->l.layer[layer];
            uint8_t *page = block + i * w->l.page_bytes;
            for (int32_t e = 0; e < y->per_page; e++) {
                for (int c = 0; c < D; c++) row[c] = bench_normal(&seed);
                kern_kv_store(KERN_KV_FP8, page + y->main_off, y->per_page, e, row, D, RD);
                if (layer == C4)
                    kern_ik_store(KERN_IK_FP8, page + y->index_off, y->per_page, e, row, W);
            }
        }
    for (int layer = 0; layer < 3; layer++)
        for (int slot = 0; slot < 128; slot++) {
            for (int c = 0; c < D; c++) row[c] = bench_normal(&seed);
            kern_kv_store(KERN_KV_FP8, tail + w->l.layer[layer].window_off, 128, slot, row, D, RD);
        }
    bench_spread(b, w->pages, block, (size_t)BLOCK * (size_t)w->l.page_bytes,
                 (size_t)w->n_pages * (size_t)w->l.page_bytes);
    w->tails = bench_alloc(b, (double)B * (double)w->l.tail_bytes);
    bench_spread(b, w->tails, tail, (size_t)w->l.tail_bytes, (size_t)B * (size_t)w->l.tail_bytes);
    free(block), free(tail);
    for (int32_t i = 0; i < w->n_pages; i++) /* each its own, out of order */
        w->ids[i] = (uint32_t)(i % 2 ? w->n_pages - 1 - i / 2 : i / 2);
    for (int32_t i = 0; i < B; i++)
        w->seqs[i] = (struct kern_seq){.row0 = i * n_rows,
                                       .n_rows = n_rows,
                                       .pos0 = context - n_rows,
                                       .page_ids = w->ids + (int64_t)i * per,
                                       .n_pages = per,
                                       .tail = w->tails + i * w->l.tail_bytes,
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

static int call_attention(void *ctx, int i)
{
    struct world *w = ctx;
    (void)i;
    return w->b->ops->attention(w->b->s, &w->att);
}

static int call_attend(void *ctx, int i)
{
    struct world *w = ctx;
    const struct kern_attend *p = &w->attend;
    const struct kern_ops *ops = w->b->ops;
    struct kern_stream *s = w->b->s;
    (void)i;
    if (!w->apart) return ops->attend(s, p);
    const struct kern_linears a = {.each = &p->wo_a, .rope = &p->back, .n = 1};
    int rc = ops->attention(s, &p->attention);
    if (rc == 0) rc = ops->linears(s, &a);
    return rc < 0 ? rc : ops->linear(s, &p->wo_b);
}
/* Random codes without NaN, placed. */
static struct kern_weight placed_weight(struct bench *b, int32_t n, int32_t k)
{
    const int64_t cols = k / 128, n_scales = n / 128 * cols;
    struct kern_weight w = {.fmt = KERN_W_FP8,
                            .sfmt = KERN_S_UE8M0,
                            .n = n,
                            .k = k,
                            .row_bytes = k,
                            .scale_row_bytes = cols,
                            .scale2 = 1};
    uint8_t *d = malloc((size_t)n * (size_t)k), *s = malloc((size_t)n_scales);
    static uint64_t seed = 5;
    if (!d || !s) exit(1);
    for (int64_t i = 0; i < (int64_t)n * k; i++)
        d[i] = i < BENCH_BLOCK ? kern_e4m3_encode(bench_normal(&seed) * 60) : d[i - BENCH_BLOCK];
    for (int64_t i = 0; i < n_scales; i++) s[i] = (uint8_t)(116 + i % 5);
    w.data = d, w.scale = s;
    if (kern_dev_place(b->dev, &w, 1, NULL) < 0) exit(1);
    free(d), free(s);
    return w;
}
/* keys: of all rows; entries: bytes of them that are read once. By codes wo_b alone is multiplied;
 * attention and wo_a stay bf16. */
static void bench_attend(struct bench *b, struct world *w, const char *shape, double keys,
                         double entries)
{
    enum { G = 8, LOW = 1024, OUT = 4096 };
    const double T = w->T, wide = 4.0 * H * D * keys + 2.0 * T * H * D * LOW,
                 out = 2.0 * T * G * LOW * OUT;
    const struct kern_weight wo_a = placed_weight(b, G * LOW, H * D / G),
                             wo_b = placed_weight(b, OUT, G * LOW);
    const float *angles = bench_random(b, T * RD / 2, KERN_F32, 1);
    void *low = bench_alloc(b, T * G * LOW * 2), *y = bench_alloc(b, T * OUT * 2);
    w->attend = (struct kern_attend){.attention = w->att,
                                     .back = {.q = w->att.o,
                                              .cos = angles,
                                              .sin = angles,
                                              .T = w->T,
                                              .H = H,
                                              .d = D,
                                              .rd = RD,
                                              .inverse = true,
                                              .act = KERN_BF16},
                                     .wo_a = {.x = w->att.o,
                                              .w = wo_a,
                                              .y = low,
                                              .ld_x = H * D,
                                              .ld_y = G * LOW,
                                              .T = w->T,
                                              .N = LOW,
                                              .K = H * D / G,
                                              .groups = G,
                                              .x_dtype = KERN_BF16,
                                              .y_dtype = KERN_BF16,
                                              .round_w = true},
                                     .wo_b = {.x = low,
                                              .w = wo_b,
                                              .y = y,
                                              .ld_x = G * LOW,
                                              .ld_y = OUT,
                                              .T = w->T,
                                              .N = OUT,
                                              .K = G * LOW,
                                              .groups = 1,
                                              .x_dtype = KERN_BF16,
                                              .y_dtype = KERN_BF16,
                                              .aq = KERN_AQ_A128}};
    static const char *const names[] = {"attend", "attend apart", "attend fp8", "attend fp8 apart"};
    for (int way = 0; way < 4; way++) {
        if (way == 2 && !kern_dev_fp8_products(b->dev, true)) break;
        w->apart = way % 2;
        const double seconds =
            wide / BENCH_BF16_FLOPS + out / (way < 2 ? BENCH_BF16_FLOPS : BENCH_FP8_FLOPS);
        bench_run(b, &(struct bench_case){.name = names[way],
                                          .shape = shape,
                                          .call = call_attend,
                                          .ctx = w,
                                          .bytes = entries + T * H * D * 2 + T * OUT * 2 +
                                                   1.0 * LOW * H * D + 1.0 * OUT * G * LOW,
                                          .flops = wide + out,
                                          .flops_second = (wide + out) / seconds});
    }
    kern_dev_fp8_products(b->dev, false);
    kern_dev_unplace(b->dev, wo_a.data), kern_dev_unplace(b->dev, wo_b.data);
}

static void bench_attention(struct bench *b, int layer, int32_t B, int32_t n_rows, int32_t context,
                            const char *goal)
{
    static const char *const names[] = {"c4", "c128", "window"};
    struct world w;
    char shape[64];
    snprintf(shape, sizeof shape, "%s, %d x %d at %d", names[layer], B, n_rows, context);
    char with[80];
    snprintf(with, sizeof with, "attend %s", shape);
    const bool alone = bench_wants(b, "attention") || bench_wants(b, shape),
               attend = bench_wants(b, with) && B * n_rows >= 128;
    if (!alone && !attend) return;
    world_open(&w, b, B, n_rows, context);
    const double T = w.T;
    double keys = 0;
    int32_t *sel = malloc((size_t)w.T * TOPK * 4), *n_sel = malloc((size_t)w.T * 4);
    static uint64_t seed = 11;
    if (!sel || !n_sel) exit(1);
    for (int32_t t = 0; t < w.T; t++) {
        const int64_t pos = context - n_rows + t % n_rows;
        const int64_t n = layer == WINDOW ? 0 : (pos + 1) / (layer == C4 ? 4 : 128);
        n_sel[t] = (int32_t)(n < TOPK ? n : TOPK);
        for (int64_t i = 0; i < n_sel[t]; i++) /* one in each of as many equal parts */
            sel[t * (int64_t)TOPK + i] =
                (int32_t)(i * n / n_sel[t] +
                          (int64_t)(bench_next(&seed) % (uint64_t)(n / n_sel[t])));
        keys += (double)(pos < 127 ? pos + 1 : 128) + (double)(layer == C4 ? n_sel[t] : n);
    }
    w.att = (struct kern_attention){.q = bench_random(b, T * H * D, KERN_BF16, 1),
                                    .kv = bench_random(b, T * D, KERN_BF16, 1),
                                    .sink = bench_random(b, H, KERN_F32, 1),
                                    .o = bench_alloc(b, T * H * D * 2),
                                    .pages = w.pages,
                                    .layout = &w.l,
                                    .layer = layer,
                                    .seqs = w.seqs,
                                    .n_seqs = B,
                                    .sel_ld = TOPK,
                                    .T = w.T,
                                    .H = H,
                                    .scale = 0.0442f,
                                    .act = KERN_BF16};
    if (layer == C4) {
        w.att.selected = bench_send(b, sel, (size_t)w.T * TOPK * 4);
        w.att.n_selected = bench_send(b, n_sel, (size_t)w.T * 4);
    }
    free(sel), free(n_sel);
    /* Keys that rows share are read once: where a chunk's rows choose, all of them are. */
    const double entries = layer == WINDOW ? 0 : context / (layer == C4 ? 4.0 : 128.0);
    const double read = n_rows == 1 ? keys : B * (entries + 128 + n_rows);
    const char *only = b->only;
    b->only = NULL;
    if (alone)
        bench_run(b, &(struct bench_case){.name = "attention",
                                          .shape = shape,
                                          .call = call_attention,
                                          .ctx = &w,
                                          .bytes = read * ENTRY + T * H * D * 4,
                                          .flops = 4.0 * H * D * keys,
                                          .flops_second = BENCH_BF16_FLOPS,
                                          .goal = goal});
    if (attend) bench_attend(b, &w, shape, keys, read * ENTRY);
    b->only = only;
    world_close(&w);
}

int main(int argc, char **argv)
{
    enum { K = 1024 };
    struct bench b;
    int rc = bench_open(&b, argc, argv, NULL);
    if (rc) return rc;
    bench_attention(&b, C4, 1, 1, 64 * K, NULL);
    bench_attention(&b, C4, 8, 1, 64 * K, NULL);
    bench_attention(&b, C4, 16, 1, 64 * K, NULL);
    bench_attention(&b, C4, 32, 1, 64 * K, NULL);
    bench_attention(&b, C4, 64, 1, 64 * K, NULL);
    bench_attention(&b, C4, 128, 1, 64 * K, "<= 25 us");
    bench_attention(&b, C4, 198, 1, 64 * K, NULL);
    bench_attention(&b, C128, 1, 1, 64 * K, NULL);
    bench_attention(&b, C128, 32, 1, 64 * K, NULL);
    bench_attention(&b, C128, 32, 1, 1024 * K, NULL);
    bench_attention(&b, WINDOW, 128, 1, 8 * K, NULL);
    bench_attention(&b, C4, 1, 8192, 64 * K, "<= 1.4 ms");
    bench_attention(&b, C128, 1, 8192, 64 * K, ">= 550 TFLOP/s");
    bench_attention(&b, WINDOW, 1, 8192, 8 * K, ">= 550 TFLOP/s");
    return bench_close(&b);
}
