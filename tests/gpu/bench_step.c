/* tests/gpu/bench_step.c - the whole model on one device: decode steps and prefill chunks against
 * the sum of the floors of their ops, and where their time goes.
 *
 * The checkpoint has random weights and as many layers of the released shape as its maker was told:
 *     python3 tests/support/make_checkpoint.py /tmp/flash --preset flash --layers 6
 * --layers N runs N layers of it: those it does not have repeat its own behind the hash-routed ones
 * in turn, each with its own memory on the device (struct model_weights_options). --layers most: as
 * many as the device holds besides what passes need and --pages-gb, which is measured with the
 * checkpoint's own layers first.
 *
 * Prefill   One sequence from position 0, chunk by chunk. What it leaves in its pages and its tail
 *           is then copied to those of all other sequences, so that decode at any context reads
 *           true entries, each sequence its own, without a prefill of its own. Where that many
 *           pages do not fit, sequences share them (but for their last, which they write), and the
 *           output says so.
 * Step      Median of whole calls of model_forward() with the logits of all rows; as a graph where
 *           the device has them. The same with a token drawn from each row in place of the logits,
 *           as workers do: greedy, and by temperature 0.6, top_p 0.95 with 5 log-probabilities. The
 *           reading of logits to the host is also timed alone and taken off in "rest".
 * Ops       A pass apart, op by op: every op is waited for, less what waiting for an op of no work
 *           costs. It runs without graphs. The quickest of OP_PASSES; gaps are rest less the sum of
 *           ops.
 * Trace     With --trace, after the tables: a chunk and a few steps once more under CUPTI. Time is
 *           split into kernels (where any runs), gaps between them, and what is before the first
 *           and after the last; with the kernels that take most.
 * Floors    Per op, bytes / copy bandwidth of the same run or FLOPs / ceiling, whichever is larger;
 *           bytes are weights, entries and keys seen, and activations in and out. Of experts those
 *           that the pass did hit count; their number stands beside what uniform routing would hit.
 * 43 layers What the released model would take: ops of the window, c4 and c128 layers times 2, 21
 *           and 20, head and embedding once, scaled by rest / sum of ops.
 *
 * Usage is below (--help).
 */
#include "common/model/forward.h"
#include "common/model/sample.h"
#include "kernels/cuda/table.h"
#include "tests/gpu/bench.h"
#include "tests/gpu/trace.h"

#include <math.h>

#define SPARE 1.5e9 /* bytes that stay free beside the pool: graphs, the driver's own */
enum {
    MOST_LAYERS = -1,
    MAX_LIST = 8,
    MAX_CASES = 2 + MAX_LIST * MAX_LIST,
    MAX_SLOTS = 64,
    MAX_STEPS = 100,
    MAX_TOKENS = 1 << 20,
    WARM_STEPS = 3, /* plain, captured, launched */
    OP_PASSES = 3,
    /* Sequences stand at context .. context + SPREAD - 1, so that few finish a group at once. */
    SPREAD = 128
};

/* ------------------------------------------------------------------ what is measured */

enum kind { WINDOW, C4, C128, ONCE, KINDS };

/* One row of the breakdown; [case]. */
struct slot {
    char name[40];
    int calls[MAX_CASES];
    double seconds[MAX_CASES], floor[MAX_CASES];
    double now, now_floor; /* of the running pass */
    int now_calls;
};

/* One column. */
struct one_case {
    char name[24];
    int32_t T, n_rows;
    int64_t pos;
    double step, read, ops, floor; /* seconds; read: logits to the host, 0: not taken off */
    double greedy, random;         /* steps that draw; NaN: not measured */
    double experts;                /* mean hit in a layer */
    double kinds[KINDS];
    int bad_logits;
};

static struct bench B;
static struct model *model;
static const struct kern_ops *real_ops;
static struct slot slots[MAX_SLOTS];
static int n_slots;
static struct one_case cases[MAX_CASES];
static int n_cases;
static double peak_bf16 = 780e12, peak_fp8 = 1500e12;

static struct {
    bool on;
    double wait;    /* of an op without work */
    int n_collapse; /* so far in the pass: two a layer */
    double kinds[KINDS];
    double experts; /* distinct ones, summed over layers */
    int n_moe;
    int32_t *choice; /* [max_rows, k] */
} timing;

static struct slot *slot_of(const char *name)
{
    for (int i = 0; i < n_slots; i++)
        if (!strcmp(slots[i].name, name)) return &slots[i];
    struct slot *s = &slots[n_slots < MAX_SLOTS - 1 ? n_slots++ : MAX_SLOTS - 1];
    snprintf(s->name, sizeof s->name, "%s", name);
    return s;
}

/* ------------------------------------------------------------------ the work of each op */

struct work {
    char name[40];
    double bytes, flops, peak;
};

static double weight_bytes(const struct kern_weight *w)
{
    const int64_t scale_rows = w->fmt == KERN_W_FP8 ? (w->n + 127) / 128 : w->n;
    return (double)w->n * (double)w->row_bytes +
           (w->scale ? (double)scale_rows * (double)w->scale_row_bytes : 0.0);
}

static int32_t layer_now(void)
{
    return (timing.n_collapse - 1) / 2;
}

/* The product's name, by its weight. */
static const char *role_of(const void *data)
{
    const struct model_weights *w = model_peek_weights(model);
    if (data == w->head.data) return "head";
    if (timing.n_collapse == 0) return "product";
    const struct model_layer *L = &w->layers[layer_now()];
    const struct {
        const struct kern_weight *w;
        const char *name;
    } roles[] = {{&L->wq_a, "wq_a"},
                 {&L->wq_b, "wq_b"},
                 {&L->wkv, "wkv"},
                 {&L->wo_a, "wo_a"},
                 {&L->wo_b, "wo_b"},
                 {&L->index_wq_b, "index wq_b"},
                 {&L->index_proj, "index weights"},
                 {&L->gate, "gate"},
                 {&L->shared_w1, "shared w1 w3"},
                 {&L->shared_w3, "shared w1 w3"},
                 {&L->shared_w2, "shared w2"},
                 {&L->comp.wkv, L->ratio == 4 ? "c4 kv gate" : "c128 kv gate"},
                 {&L->comp.wgate, L->ratio == 4 ? "c4 kv gate" : "c128 kv gate"},
                 {&L->index_comp.wkv, "index kv gate"},
                 {&L->index_comp.wgate, "index kv gate"}};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (roles[i].w->data == data) return roles[i].name;
    return "product";
}

static double elem(enum kern_dtype t)
{
    return kern_dtype_bytes(t);
}

static void work_of_embed(const struct kern_embed *p, struct work *w)
{
    w->bytes = (double)p->T * p->w.k * elem(p->act) * (1 + p->hc);
    timing.n_collapse = 0;
}
static void work_of_rmsnorm(const struct kern_rmsnorm *p, struct work *w)
{
    w->bytes = 2.0 * p->T * p->D * elem(p->act);
}
static void work_of_linear(const struct kern_linear *p, struct work *w)
{
    snprintf(w->name, sizeof w->name, "%s %dx%dx%d", role_of(p->w.data), p->groups, p->N, p->K);
    w->bytes = weight_bytes(&p->w) + (double)p->T * p->groups * p->K * elem(p->x_dtype) +
               (double)p->T * p->groups * p->N * elem(p->y_dtype);
    w->flops = 2.0 * p->T * p->groups * p->N * p->K;
    w->peak = p->aq == KERN_AQ_NONE ? peak_bf16 : peak_fp8;
}
/* By the first one's name. */
static void work_of_linears(const struct kern_linears *p, struct work *w)
{
    double seconds = 0;
    w->peak = peak_bf16;
    for (int32_t i = 0; i < p->n; i++) {
        struct work one = {0};
        work_of_linear(&p->each[i], &one);
        w->bytes += one.bytes;
        w->flops += one.flops;
        seconds += one.flops / one.peak;
        if (i == 0) memcpy(w->name, one.name, sizeof w->name);
    }
    if (seconds > 0) w->peak = w->flops / seconds;
    if (p->n > 1)
        snprintf(w->name + strlen(w->name), sizeof w->name - strlen(w->name), " +%d", p->n - 1);
}
static void work_of_hc_collapse(const struct kern_hc_collapse *p, struct work *w)
{
    if (p->post)
        timing.n_collapse++;
    else
        snprintf(w->name, sizeof w->name, "hc_collapse head");
    w->bytes = weight_bytes(&p->fn) + (double)p->T * p->D * elem(p->act) * (p->hc + 1);
    w->flops = 2.0 * p->T * p->fn.n * p->fn.k;
}
static void work_of_hc_expand(const struct kern_hc_expand *p, struct work *w)
{
    w->bytes = (double)p->T * p->D * elem(p->act) * (2 * p->hc + 1);
}
static void work_of_hc_boundary(const struct kern_hc_boundary *p, struct work *w)
{
    const double n = (double)p->T * p->D, a = elem(p->act);
    if (p->head)
        snprintf(w->name, sizeof w->name, "hc_boundary head");
    else
        timing.n_collapse++;
    w->bytes = weight_bytes(&p->fn) + n * a * (p->hc + 1);
    if (p->y) w->bytes += n * a * (p->hc + 1) + (p->routed ? 4 * n : 0);
    w->flops = 2.0 * p->T * p->fn.n * p->fn.k;
}
static void work_of_rope_table(const struct kern_rope_table *p, struct work *w)
{
    w->bytes = (double)p->T * p->rd * 4;
}
static void work_of_heads_rope(const struct kern_heads_rope *p, struct work *w)
{
    snprintf(w->name, sizeof w->name, "heads_rope %s", p->norm ? "q" : "o");
    w->bytes = 2.0 * p->T * p->H * (p->norm ? p->d : p->rd) * elem(p->act);
}
static void work_of_kv_prep(const struct kern_kv_prep *p, struct work *w)
{
    w->bytes = 2.0 * p->T * p->d * elem(p->act);
}
static double entry_bytes(const struct kern_kv_layout *l)
{
    return (double)kern_kv_rows_bytes(l->spec.kv_fmt, l->spec.head_dim, l->spec.rope_dim, 1);
}
static void work_of_window_store(const struct kern_window_store *p, struct work *w)
{
    const int32_t window = p->layout->spec.window;
    double rows = 0;
    for (int32_t i = 0; i < p->n_seqs; i++)
        rows += p->seqs[i].n_rows < window ? p->seqs[i].n_rows : window;
    w->bytes = rows * (p->layout->spec.head_dim * elem(p->act) + entry_bytes(p->layout));
}
static void work_of_compress(const struct kern_compress *p, struct work *w)
{
    const struct kern_kv_layout *l = p->layout;
    const int32_t ratio = l->layer[p->layer].ratio;
    const int32_t e = p->index ? l->spec.index_dim : l->spec.head_dim;
    double rows = 0;
    snprintf(w->name, sizeof w->name, p->index ? "compress index" : "compress c%d", ratio);
    for (int32_t i = 0; i < p->n_seqs; i++) rows += p->seqs[i].n_rows;
    w->bytes = rows * 8 * e * (kern_kv_overlaps(ratio) ? 2 : 1) +
               rows / ratio *
                   (p->index ? (double)kern_ik_rows_bytes(l->spec.ik_fmt, e, 1) : entry_bytes(l));
}
static void work_of_index_query(const struct kern_index_query *p, struct work *w)
{
    w->bytes = 2.0 * p->T * p->H * p->w * elem(p->act);
}
static void work_of_prepare(const struct kern_prepare *p, struct work *w)
{
    struct work one[5] = {{.bytes = 0}};
    if (p->heads) work_of_heads_rope(p->heads, &one[0]);
    if (p->kv) work_of_kv_prep(p->kv, &one[1]);
    if (p->store) work_of_window_store(p->store, &one[2]);
    if (p->compress) work_of_compress(p->compress, &one[3]);
    if (p->index) work_of_index_query(p->index, &one[4]);
    for (int i = 0; i < 5; i++) w->bytes += one[i].bytes;
    if (p->compress) snprintf(w->name, sizeof w->name, "prepare, %s", one[3].name);
}
static void work_of_index_select(const struct kern_index_select *p, struct work *w)
{
    const struct kern_kv_layout *l = p->layout;
    const int32_t ratio = l->layer[p->layer].ratio, wi = l->spec.index_dim;
    for (int32_t i = 0; i < p->n_seqs; i++) {
        const struct kern_seq *q = &p->seqs[i];
        w->bytes += (double)kern_ik_rows_bytes(l->spec.ik_fmt, wi, (q->pos0 + q->n_rows) / ratio) +
                    (double)q->n_rows * (p->H * (wi + 1) * elem(p->act) + 4.0 * q->topk);
        for (int32_t r = 0; r < q->n_rows; r++)
            w->flops += 2.0 * (double)((q->pos0 + r + 1) / ratio) * p->H * wi;
    }
    w->peak = peak_fp8;
}
static void work_of_attention(const struct kern_attention *p, struct work *w)
{
    const struct kern_kv_layout *l = p->layout;
    const int32_t ratio = l->layer[p->layer].ratio, window = l->spec.window, d = l->spec.head_dim;
    double sets = 0, entries = 0;
    snprintf(w->name, sizeof w->name, ratio ? "attention c%d" : "attention window", ratio);
    for (int32_t i = 0; i < p->n_seqs; i++) {
        const struct kern_seq *q = &p->seqs[i];
        const int64_t end = q->pos0 + q->n_rows;
        double seen = 0, all = ratio ? (double)(end / ratio) : 0;
        for (int32_t r = 0; r < q->n_rows; r++) {
            const int64_t n = q->pos0 + r + 1;
            int64_t keys = ratio ? n / ratio : 0;
            if (p->selected && keys > q->topk) keys = q->topk;
            seen += (double)keys;
            sets += (double)keys + (double)(n < window ? n : window);
        }
        entries += seen < all ? seen : all; /* a chunk's rows share them */
        entries += (double)(q->pos0 < window ? q->pos0 : window) + q->n_rows;
    }
    w->bytes = entries * entry_bytes(l) + 2.0 * p->T * p->H * d * elem(p->act);
    w->flops = 4.0 * sets * p->H * d;
}
static void add_work(struct work *to, const struct work *w)
{
    to->bytes += w->bytes;
    /* As floors: operations at the peak that `to` has. */
    to->flops += w->flops * to->peak / w->peak;
}
static void work_of_attend(const struct kern_attend *p, struct work *w)
{
    const struct kern_linear *products[] = {&p->wo_a, &p->wo_b};
    struct work part = {.peak = peak_bf16};
    work_of_attention(&p->attention, &part);
    snprintf(w->name, sizeof w->name, "attend, %s", part.name);
    w->peak = peak_bf16;
    add_work(w, &part);
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        part = (struct work){.peak = peak_bf16};
        work_of_linear(products[i], &part);
        add_work(w, &part);
    }
}
static void work_of_route(const struct kern_route *p, struct work *w)
{
    w->bytes = (double)p->T * (4.0 * p->E + 8.0 * p->k);
}
/* Reads back who was chosen: the experts hit are what the op must read. */
static void work_of_moe(const struct kern_moe *p, struct work *w)
{
    const size_t n = (size_t)p->T * (size_t)p->k;
    bool hit[4096] = {false};
    int distinct = 0;
    if (kern_stream_read(B.s, timing.choice, p->experts, n * sizeof *timing.choice) < 0) return;
    for (size_t i = 0; i < n; i++) {
        const int32_t e = timing.choice[i];
        if (e < 0 || e >= p->E || e >= 4096 || hit[e]) continue;
        hit[e] = true;
        distinct++;
    }
    timing.experts += distinct;
    timing.n_moe++;
    w->bytes = distinct * (weight_bytes(p->w1) + weight_bytes(p->w2) + weight_bytes(p->w3)) +
               (double)p->T * p->D * (elem(p->act) + 4);
    w->flops = 6.0 * p->T * p->k * p->D * p->I;
    w->peak = p->aq == KERN_AQ_NONE ? peak_bf16 : peak_fp8;
}
static void work_of_swiglu(const struct kern_swiglu *p, struct work *w)
{
    w->bytes = 3.0 * p->T * p->I * elem(p->act);
}
static void work_of_add(const struct kern_add *p, struct work *w)
{
    w->bytes = (double)p->n * (4 + 2 * elem(p->act));
}
static void work_of_ffn(const struct kern_ffn *p, struct work *w)
{
    const struct kern_linear *products[] = {&p->gate, &p->w1, &p->w3, &p->w2};
    struct work part = {.peak = peak_bf16};
    w->peak = peak_fp8;
    work_of_moe(&p->moe, &part);
    add_work(w, &part);
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        part = (struct work){.peak = peak_bf16};
        work_of_linear(products[i], &part);
        add_work(w, &part);
    }
}
/* Not in these passes. */
static void work_of_index_rank(const struct kern_index_rank *p, struct work *w)
{
    (void)p, (void)w;
}
static void work_of_mtp_mix(const struct kern_mtp_mix *p, struct work *w)
{
    (void)p, (void)w;
}
static void work_of_sample(const struct kern_sample *p, struct work *w)
{
    w->bytes = (double)p->T * p->V * 4;
}

/* ------------------------------------------------------------------ the timing table */

static void count(const struct work *w, double took)
{
    const struct model_shape *s = &model_peek_weights(model)->shape;
    struct slot *slot = slot_of(w->name);
    const double bytes_s = w->bytes / B.copy_bytes, flops_s = w->flops / w->peak;
    took = took > timing.wait ? took - timing.wait : 0;
    slot->now += took;
    slot->now_floor += bytes_s > flops_s ? bytes_s : flops_s;
    slot->now_calls++;
    enum kind k = ONCE;
    if (timing.n_collapse > 0 && strncmp(w->name, "head ", 5) &&
        strcmp(w->name, "hc_boundary head")) {
        const int32_t ratio = s->ratios[layer_now()];
        k = ratio == 0 ? WINDOW : kern_kv_overlaps(ratio) ? C4 : C128;
    }
    timing.kinds[k] += took;
}

#define X(op)                                                                                      \
    static int time_##op(struct kern_stream *s, const struct kern_##op *p)                         \
    {                                                                                              \
        if (!timing.on) return real_ops->op(s, p);                                                 \
        struct work w = {.name = #op, .peak = peak_bf16};                                          \
        kern_stream_sync(s);                                                                       \
        const double begin = bench_now();                                                          \
        int rc = real_ops->op(s, p);                                                               \
        if (rc == 0) rc = kern_stream_sync(s);                                                     \
        const double took = bench_now() - begin;                                                   \
        work_of_##op(p, &w); /* who was chosen is known now */                                     \
        count(&w, took);                                                                           \
        return rc;                                                                                 \
    }
KERN_OPS(X)
#undef X

static const struct kern_ops timed = {.name = "timed",
#define X(op) .op = time_##op,
                                      KERN_OPS(X)
#undef X
};

static const struct kern_ops *wrap(const struct kern_ops *of_device)
{
    real_ops = of_device;
    return &timed;
}

/* Launch, wait, and an addition of eight numbers. */
static double cost_of_waiting(void)
{
    double t[51];
    float *a = bench_alloc(&B, 256);
    void *y = bench_alloc(&B, 256);
    const struct kern_add p = {.a = a, .b = y, .y = y, .n = 8, .act = KERN_BF16};
    for (int i = 0; i < 51; i++) {
        const double begin = bench_now();
        real_ops->add(B.s, &p);
        kern_stream_sync(B.s);
        t[i] = bench_now() - begin;
    }
    qsort(t, 51, sizeof *t, bench_by_value);
    bench_free_all(&B);
    return t[25];
}

/* ------------------------------------------------------------------ sequences */

static struct {
    const char *device;
    int32_t chunk, prefill, steps;
    int32_t batches[MAX_LIST], contexts[MAX_LIST];
    int n_batches, n_contexts;
    int32_t layers; /* 0: the checkpoint's */
    double pages_bytes;
    bool fp8, trace;
} opt = {.device = "cuda:0",
         .chunk = 8192,
         .prefill = 65536,
         .steps = 15,
         .batches = {1, 32, 128},
         .n_batches = 3,
         .contexts = {8192, 65536},
         .n_contexts = 2,
         .pages_bytes = 40e9};

static struct {
    uint8_t *pages, *tails;
    uint32_t n_pages;
    int32_t n_seqs;           /* most of any case */
    int32_t seq_pages;        /* table of one sequence */
    uint32_t *tables;         /* [n_seqs, seq_pages] */
    int32_t *ids;             /* [chunk or batch], random */
    int32_t *rows;            /* 0, 1, 2 ... */
    float *logits;            /* [n_seqs, V] */
    struct kern_seq *q;       /* [n_seqs] */
    void *dev_logits;         /* to read them alone; as many */
    struct model_draw *draws; /* [n_seqs] */
    bool drawing;             /* tokens, no logits */
    bool shared;
    int64_t tokens; /* most of a sequence */
} seqs;

static void fail(const char *what, const struct tow_err *err)
{
    fprintf(stderr, "bench_step: %s%s%s\n", what, err ? ": " : "", err ? err->msg : "");
    exit(err && err->code == TOW_ECONFIG ? BENCH_WRONG : 1);
}

static void *host(double bytes)
{
    void *p = calloc(1, (size_t)bytes + 1);
    if (!p) fail("no memory", NULL);
    return p;
}

static int32_t most(const int32_t *v, int n, int32_t least)
{
    for (int i = 0; i < n; i++)
        if (v[i] > least) least = v[i];
    return least;
}

/* All but the pool; every page of every sequence is the first. */
static void make_sequences(void)
{
    const struct kern_kv_layout *l = model_peek_layout(model);
    const int32_t V = model_peek_weights(model)->shape.V;
    const int32_t n = most(opt.batches, opt.n_batches, 1);
    const int32_t rows = most(opt.batches, opt.n_batches, opt.chunk);
    uint64_t seed = 0x9e3779b97f4a7c15u;

    memset(&seqs, 0, sizeof seqs);
    seqs.n_seqs = n;
    seqs.tokens = most(opt.contexts, opt.n_batches ? opt.n_contexts : 0,
                       opt.prefill ? opt.prefill : opt.chunk);
    seqs.seq_pages = (int32_t)kern_kv_pages_for(
        seqs.tokens + SPREAD + 3 * MAX_STEPS + 4 * WARM_STEPS, l->page_tokens);
    seqs.tails = kern_dev_alloc(B.dev, (size_t)n * (size_t)l->tail_bytes);
    seqs.dev_logits = kern_dev_alloc(B.dev, (size_t)n * (size_t)V * sizeof(float));
    if (!seqs.tails || !seqs.dev_logits) fail("no device memory for tails", NULL);
    seqs.tables = host((double)n * seqs.seq_pages * sizeof *seqs.tables);
    seqs.ids = host((double)rows * sizeof *seqs.ids);
    seqs.rows = host((double)rows * sizeof *seqs.rows);
    seqs.logits = host((double)n * V * sizeof *seqs.logits);
    seqs.q = host((double)n * sizeof *seqs.q);
    seqs.draws = host((double)n * sizeof *seqs.draws);
    timing.choice = host((double)rows * model_peek_weights(model)->shape.k * sizeof *timing.choice);
    for (int32_t i = 0; i < rows; i++) {
        seqs.rows[i] = i;
        seqs.ids[i] = (int32_t)((bench_next(&seed) >> 33) % (uint64_t)V);
    }
}

static void free_sequences(void)
{
    kern_dev_free(B.dev, seqs.pages);
    kern_dev_free(B.dev, seqs.tails);
    kern_dev_free(B.dev, seqs.dev_logits);
    free(seqs.tables);
    free(seqs.ids);
    free(seqs.rows);
    free(seqs.logits);
    free(seqs.q);
    free(seqs.draws);
    free(timing.choice);
}

/* The pool, of what memory is left. */
static void make_pool(void)
{
    const struct kern_kv_layout *l = model_peek_layout(model);
    const int32_t n = seqs.n_seqs;
    const bool on_host = kern_dev_host_memory(B.dev);
    const double left = on_host ? 2e9 : (double)kern_dev_free_bytes(B.dev) - SPARE;
    double room = opt.pages_bytes - (double)n * (double)l->tail_bytes;
    double pages = (double)n * seqs.seq_pages;
    const double own = seqs.seq_pages + 2.0 * n;
    if (room > left) room = left;
    if (pages * (double)l->page_bytes > room) {
        pages = floor(room / (double)l->page_bytes);
        if (pages < own) pages = own;
        seqs.shared = true;
    }
    seqs.n_pages = (uint32_t)pages;
    seqs.pages = kern_dev_alloc(B.dev, (size_t)seqs.n_pages * (size_t)l->page_bytes);
    if (!seqs.pages) fail("no device memory for pages", NULL);
    for (int64_t i = 0; i < (int64_t)n * seqs.seq_pages; i++)
        seqs.tables[i] = (uint32_t)(i % seqs.n_pages);
}

/* Where sequences share pages, those that this context's steps write are a sequence's own: the last
 * 2n of the pool. */
static void own_last_pages(int64_t context)
{
    const int64_t first = context / model_peek_layout(model)->page_tokens;
    if (!seqs.shared) return;
    const uint32_t n_common = seqs.n_pages - 2 * (uint32_t)seqs.n_seqs;
    for (int32_t s = 0; s < seqs.n_seqs; s++) {
        uint32_t *t = seqs.tables + (int64_t)s * seqs.seq_pages;
        for (int32_t p = 0; p < seqs.seq_pages; p++)
            t[p] = (uint32_t)(((int64_t)s * seqs.seq_pages + p) % n_common);
        for (int32_t p = 0; p < 2 && first + p < seqs.seq_pages; p++)
            t[first + p] = n_common + 2 * (uint32_t)s + (uint32_t)p;
    }
}

/* The first n units of memory, over and over to its end. */
static void repeat_units(uint8_t *at, int64_t unit, int64_t n, int64_t all)
{
    for (int64_t have = n; have < all;) {
        const int64_t k = all - have < have ? all - have : have;
        kern_stream_copy(B.s, at + have * unit, at, (size_t)(k * unit));
        have += k;
    }
    if (kern_stream_sync(B.s) < 0) fail("copies of pages", NULL);
}

/* ------------------------------------------------------------------ passes */

/* n_rows rows of each of n sequences, of which the first stands at pos; logits of each one's
 * last. */
static double pass(int32_t n, int32_t n_rows, int64_t pos, bool plain)
{
    const struct kern_kv_layout *l = model_peek_layout(model);
    struct tow_err err = {0};
    int32_t last = n_rows - 1;
    for (int32_t i = 0; i < n; i++) {
        const int64_t pos0 = pos + (n > 1 ? i % SPREAD : 0);
        seqs.q[i] =
            (struct kern_seq){.row0 = i * n_rows,
                              .n_rows = n_rows,
                              .pos0 = pos0,
                              .page_ids = seqs.tables + (int64_t)i * seqs.seq_pages,
                              .n_pages = (int32_t)kern_kv_pages_for(pos0 + n_rows, l->page_tokens),
                              .tail = seqs.tails + (int64_t)i * l->tail_bytes,
                              .topk = model_peek_options(model)->index_topk};
    }
    const struct model_batch b = {.ids = seqs.ids,
                                  .T = n * n_rows,
                                  .seqs = seqs.q,
                                  .n_seqs = n,
                                  .pages = seqs.pages,
                                  .n_pages = seqs.n_pages,
                                  .logit_rows = n_rows == 1 ? seqs.rows : &last,
                                  .n_logit_rows = n,
                                  .logits = seqs.drawing ? NULL : seqs.logits,
                                  .draws = seqs.drawing ? seqs.draws : NULL,
                                  /* All layers, by name: a pass that no graph is made of. */
                                  .last_layer =
                                      plain ? model_peek_weights(model)->shape.n_layers : 0};
    const double begin = bench_now();
    if (model_forward(model, &b, &err) < 0) fail("pass", &err);
    return bench_now() - begin;
}

/* The largest passes once, over a pool of one page, so that they have what memory they take. */
static void rehearse(void)
{
    const struct kern_kv_layout *l = model_peek_layout(model);
    if (kern_dev_host_memory(B.dev)) return;
    seqs.pages = kern_dev_alloc(B.dev, (size_t)l->page_bytes);
    seqs.n_pages = 1;
    if (!seqs.pages) fail("no device memory for a page", NULL);
    pass(1, opt.chunk, seqs.tokens - opt.chunk, false);
    for (int k = 0; k < opt.n_batches; k++) pass(opt.batches[k], 1, seqs.tokens, true);
    kern_dev_free(B.dev, seqs.pages);
    seqs.pages = NULL;
}

static int bad_logits(int32_t n)
{
    const int64_t V = model_peek_weights(model)->shape.V;
    int bad = 0;
    for (int64_t i = 0; i < n * V; i++) bad += !isfinite(seqs.logits[i]);
    return bad;
}

/* Logits of n rows to the host, alone. */
static double read_seconds(int32_t n)
{
    double t[5];
    const size_t bytes =
        (size_t)n * (size_t)model_peek_weights(model)->shape.V * sizeof *seqs.logits;
    if (kern_dev_host_memory(B.dev)) return 0;
    float *to = host((double)bytes);
    for (int i = 0; i < 5; i++) {
        const double begin = bench_now();
        kern_stream_read(B.s, to, seqs.dev_logits, bytes);
        t[i] = bench_now() - begin;
    }
    free(to);
    qsort(t, 5, sizeof *t, bench_by_value);
    return t[2];
}

/* Op by op; fills column c of the table. */
static void time_ops(int c, int32_t n, int32_t n_rows, int64_t pos)
{
    struct one_case *k = &cases[c];
    for (int pass_no = 0; pass_no < OP_PASSES; pass_no++) {
        double ops = 0, floor_s = 0;
        for (int i = 0; i < n_slots; i++)
            slots[i].now = slots[i].now_floor = 0, slots[i].now_calls = 0;
        memset(timing.kinds, 0, sizeof timing.kinds);
        timing.experts = timing.n_moe = 0;
        timing.n_collapse = 0;
        timing.on = true;
        pass(n, n_rows, pos + (n_rows == 1 ? pass_no : 0), true);
        timing.on = false;
        for (int i = 0; i < n_slots; i++) ops += slots[i].now, floor_s += slots[i].now_floor;
        if (pass_no > 0 && ops >= k->ops) continue;
        k->ops = ops;
        k->floor = floor_s;
        k->experts = timing.n_moe ? timing.experts / timing.n_moe : 0;
        memcpy(k->kinds, timing.kinds, sizeof k->kinds);
        for (int i = 0; i < n_slots; i++) {
            slots[i].seconds[c] = slots[i].now;
            slots[i].floor[c] = slots[i].now_floor;
            slots[i].calls[c] = slots[i].now_calls;
        }
    }
}

/* One line that grows, so that a run cut short has said what it knew. */
static void say(const struct one_case *c)
{
    printf("%s %.0f us, ops %.0f; ", c->name, c->step * 1e6, c->ops * 1e6);
    fflush(stdout);
}

static int new_case(int32_t n, int32_t n_rows, int64_t pos)
{
    if (n_cases == MAX_CASES) fail("too many cases", NULL);
    cases[n_cases].T = n * n_rows;
    cases[n_cases].n_rows = n_rows;
    cases[n_cases].pos = pos;
    return n_cases++;
}

static void name_of(char *out, size_t room, const char *what, int32_t n, int64_t tokens)
{
    if (tokens >= 1024 && tokens % 1024 == 0)
        snprintf(out, room, "%s%d@%lldK", what, n, (long long)tokens / 1024);
    else
        snprintf(out, room, "%s%d@%lld", what, n, (long long)tokens);
}

/* The first chunk and the last are columns; what the whole took is a line. */
static void bench_prefill(void)
{
    const int32_t n_chunks = opt.prefill / opt.chunk;
    double whole = 0;
    for (int i = 0; i < 2; i++) pass(1, opt.chunk, 0, false); /* takes memory */
    for (int32_t i = 0; i < n_chunks; i++) {
        const double t = pass(1, opt.chunk, (int64_t)i * opt.chunk, false);
        whole += t;
        if (i != 0 && i != n_chunks - 1) continue;
        const int c = new_case(1, opt.chunk, (int64_t)i * opt.chunk);
        name_of(cases[c].name, sizeof cases[c].name, "P", opt.chunk, (int64_t)(i + 1) * opt.chunk);
        cases[c].step = t;
        cases[c].greedy = cases[c].random = NAN;
        cases[c].bad_logits = bad_logits(1);
        if (i == 0) { /* once more: the least disturbed counts */
            const double again = pass(1, opt.chunk, 0, false);
            if (again < t) cases[c].step = again;
        }
        time_ops(c, 1, opt.chunk, (int64_t)i * opt.chunk);
        say(&cases[c]);
    }
    const int32_t tokens = n_chunks * opt.chunk;
    printf("\nprefill of %d tokens in chunks of %d: %.1f ms, %.0f tokens/s through these layers\n",
           tokens, opt.chunk, whole * 1e3, tokens / whole);
}

static double median_step(int32_t n, int64_t *pos)
{
    double t[MAX_STEPS];
    for (int i = 0; i < WARM_STEPS; i++) pass(n, 1, (*pos)++, false);
    for (int i = 0; i < opt.steps; i++) t[i] = pass(n, 1, (*pos)++, false);
    qsort(t, (size_t)opt.steps, sizeof *t, bench_by_value);
    return t[opt.steps / 2];
}

static double drawn_step(int32_t n, int64_t *pos, const struct model_sampling *p)
{
    for (int32_t i = 0; i < n; i++) {
        seqs.draws[i] = (struct model_draw){.sampling = *p, .index = (uint64_t)*pos};
        seqs.draws[i].sampling.seed = (uint64_t)i;
    }
    seqs.drawing = true;
    const double t = median_step(n, pos);
    seqs.drawing = false;
    return t;
}

static void bench_decode(int32_t n, int64_t context)
{
    static const struct model_sampling greedy = {.top_p = 1, .n_logprobs = -1},
                                       random = {
                                           .temperature = 0.6f, .top_p = 0.95f, .n_logprobs = 5};
    const int c = new_case(n, 1, context);
    int64_t pos = context;
    name_of(cases[c].name, sizeof cases[c].name, "B", n, context);
    cases[c].step = median_step(n, &pos);
    cases[c].bad_logits = bad_logits(n);
    cases[c].greedy = drawn_step(n, &pos, &greedy);
    cases[c].random = drawn_step(n, &pos, &random);
    cases[c].read = read_seconds(n);
    const int kernels = cuda_graph_kernels; /* of this step: the passes below are no graph */
    time_ops(c, n, 1, pos);
    say(&cases[c]);
    printf("%d kernels, %.1f a layer; ", kernels,
           (double)kernels / model_peek_weights(model)->shape.n_layers);
}

/* ------------------------------------------------------------------ output */

static void line(const char *name, const char *unit, double (*value)(const struct one_case *c),
                 int digits)
{
    printf("%-28s %-6s", name, unit);
    for (int c = 0; c < n_cases; c++) {
        const double v = value(&cases[c]);
        if (isnan(v))
            printf(" %13s", "-");
        else
            printf(" %13.*f", digits, v);
    }
    putchar('\n');
}

static double rest_of(const struct one_case *c)
{
    return c->step - c->read;
}
static double step_us(const struct one_case *c)
{
    return c->step * 1e6;
}
static double read_us(const struct one_case *c)
{
    return c->read * 1e6;
}
static double greedy_us(const struct one_case *c)
{
    return c->greedy * 1e6;
}
static double random_us(const struct one_case *c)
{
    return c->random * 1e6;
}
static double rest_us(const struct one_case *c)
{
    return rest_of(c) * 1e6;
}
static double floor_us(const struct one_case *c)
{
    return c->floor * 1e6;
}
static double rest_ratio(const struct one_case *c)
{
    return rest_of(c) / c->floor;
}
static double step_ratio(const struct one_case *c)
{
    return c->step / c->floor;
}
static double tokens_s(const struct one_case *c)
{
    return c->T / (isnan(c->greedy) ? c->step : c->greedy);
}
static double ops_us(const struct one_case *c)
{
    return c->ops * 1e6;
}
static double gaps_us(const struct one_case *c)
{
    return (rest_of(c) - c->ops) * 1e6;
}
static double hit_experts(const struct one_case *c)
{
    return c->experts;
}
static double uniform_experts(const struct one_case *c)
{
    const struct model_shape *s = &model_peek_weights(model)->shape;
    return s->E * (1 - pow(1 - (double)s->k / s->E, c->T));
}
/* Milliseconds of the released model's layers, without reading logits; NaN where a kind is not
 * here. */
static double released_ms(const struct one_case *c)
{
    static const int of[KINDS] = {2, 21, 20, 1};
    const struct model_shape *s = &model_peek_weights(model)->shape;
    int here[KINDS] = {[ONCE] = 1};
    double sum = 0;
    for (int32_t i = 0; i < s->n_layers; i++)
        here[s->ratios[i] == 0 ? WINDOW : kern_kv_overlaps(s->ratios[i]) ? C4 : C128]++;
    for (int k = 0; k < KINDS; k++) {
        if (!here[k]) return NAN;
        sum += c->kinds[k] / here[k] * of[k];
    }
    return sum * rest_of(c) / c->ops * 1e3;
}
static double bad_of(const struct one_case *c)
{
    return c->bad_logits;
}

static int by_share(const void *a, const void *b)
{
    double v[2] = {0, 0};
    const struct slot *s[2] = {a, b};
    for (int i = 0; i < 2; i++)
        for (int c = 0; c < n_cases; c++) v[i] += s[i]->seconds[c] / cases[c].ops;
    return (v[0] < v[1]) - (v[0] > v[1]);
}

static void print_cases(void)
{
    printf("%-28s %-6s", "P rows@end, B batch@context", "");
    for (int c = 0; c < n_cases; c++) printf(" %13s", cases[c].name);
    putchar('\n');
    line("step, whole", "us", step_us, 1);
    line("  reading logits, alone", "us", read_us, 1);
    line("  rest", "us", rest_us, 1);
    line("step, tokens drawn: greedy", "us", greedy_us, 1);
    line("  temperature 0.6, top_p .95", "us", random_us, 1);
    line("sum of floors", "us", floor_us, 1);
    line("rest / floor", "x", rest_ratio, 2);
    line("step / floor", "x", step_ratio, 2);
    line("tokens/s, these layers", "", tokens_s, 0);
    line("sum of ops", "us", ops_us, 1);
    line("gaps: rest - sum of ops", "us", gaps_us, 1);
    line("experts hit in a layer", "", hit_experts, 1);
    line("  by uniform routing", "", uniform_experts, 1);
    line("43 layers, without reading", "ms", released_ms, 2);
    line("logits that are no numbers", "", bad_of, 0);
}

/* Each cell: us in all its calls, share of the ops' sum, times its floor. */
static void print_ops(void)
{
    qsort(slots, (size_t)n_slots, sizeof *slots, by_share);
    printf("op (each waited for): us in all calls, share, x floor\n");
    for (int i = 0; i < n_slots; i++) {
        const struct slot *s = &slots[i];
        int calls = 0;
        for (int c = 0; c < n_cases; c++)
            if (s->calls[c] > calls) calls = s->calls[c];
        printf("%-28s %4d  ", s->name, calls);
        for (int c = 0; c < n_cases; c++)
            printf(" %6.0f %2.0f%% %3.*f", s->seconds[c] * 1e6, 100 * s->seconds[c] / cases[c].ops,
                   s->floor[c] > 0 && s->seconds[c] < 10 * s->floor[c] ? 1 : 0,
                   s->floor[c] > 0 ? fmin(s->seconds[c] / s->floor[c], 999) : 0);
        putchar('\n');
    }
}

/* ------------------------------------------------------------------ trace */

static int by_time(const void *a, const void *b)
{
    const struct trace_kernel *x = a, *y = b;
    return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

/* Steps as they are timed above: graphs where there are any, tokens drawn greedily. */
static void trace_case(const struct one_case *c)
{
    enum { STEPS = 4, SHOWN = 14 };
    const bool decode = c->n_rows == 1;
    const int n = decode ? STEPS : 1, n_seqs = c->T / c->n_rows;
    int64_t pos = c->pos;
    struct trace t;
    double wall = 0;
    if (decode) own_last_pages(c->pos);
    seqs.drawing = decode;
    for (int i = 0; i < WARM_STEPS; i++) pass(n_seqs, c->n_rows, decode ? pos++ : pos, false);
    const bool began = trace_begin();
    if (began) pass(n_seqs, c->n_rows, decode ? pos++ : pos, false); /* the tracer takes memory */
    for (int i = 0; i < n && began; i++) {
        trace_pass_begin();
        wall += pass(n_seqs, c->n_rows, decode ? pos++ : pos, false);
        trace_pass_end();
    }
    seqs.drawing = false;
    if (!began || !trace_end(&t)) {
        printf("trace of %s: none\n", c->name);
        return;
    }
    printf(
        "trace of %s, a pass: %.0f us traced, %.0f not; %.0f before the first kernel, %.0f after "
        "the last; %d kernels take %.0f one by one, %.0f with those at once; %d gaps take %.0f, "
        "the longest %.1f\n",
        c->name, wall / n * 1e6, (decode ? c->greedy : c->step) * 1e6, t.before / n * 1e6,
        t.after / n * 1e6, t.n / n, t.sum / n * 1e6, t.busy / n * 1e6, t.n_gaps / n,
        t.gaps / n * 1e6, t.longest * 1e6);
    qsort(t.kernels, (size_t)t.n_kernels, sizeof *t.kernels, by_time);
    for (int i = 0; i < t.n_kernels && i < SHOWN && t.kernels[i].calls; i++)
        printf("  %9.1f us in %4d calls of %8.2f us: %s\n", t.kernels[i].seconds / n * 1e6,
               t.kernels[i].calls / n, t.kernels[i].seconds / t.kernels[i].calls * 1e6,
               t.kernels[i].name);
    trace_free(&t);
}

static void trace_cases(void)
{
    if (!trace_open()) return;
    for (int c = 0; c < n_cases; c++) trace_case(&cases[c]);
}

/* ------------------------------------------------------------------ opening */

static const char USAGE[] =
    "usage: bench_step CHECKPOINT [--device cuda:0] [--prefill 65536] [--chunk 8192]\n"
    "                  [--batches 1,32,128] [--contexts 8192,65536] [--steps 15]\n"
    "                  [--layers N|most] [--pages-gb 40] [--products bf16|fp8] [--trace 0|1]\n"
    "                  [--bf16 780] [--fp8 1500]\n"
    "--prefill 0 or --batches 0 leave a section out; --layers: those that the checkpoint does not\n"
    "have repeat its own, and none is left out; --pages-gb: most for pages and tails, which\n"
    "sequences share where they need more; --bf16, --fp8: ceilings in TFLOP/s. The checkpoint:\n"
    "    python3 tests/support/make_checkpoint.py /tmp/flash --preset flash --layers 6\n";

/* At most MAX_LIST numbers with commas between, zeros left out; -1: something else. */
static int numbers(const char *text, long least, long highest, int32_t *out)
{
    int32_t all[MAX_LIST];
    const int n_all = bench_numbers(text, least, highest, MAX_LIST, all);
    int n = 0;
    for (int i = 0; i < n_all; i++)
        if (all[i] > 0) out[n++] = all[i];
    return n_all < 0 ? -1 : n;
}

static int32_t number(const char *text, int32_t least, int32_t highest)
{
    int32_t v;
    return bench_numbers(text, least, highest, 1, &v) == 1 ? v : -1;
}

/* 0, or -1 with a message. */
static int read_options(int argc, char **argv)
{
    for (int i = 2; i < argc; i += 2) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        char want[80] = "";
        bool good = false;
        if (!strcmp(name, "--device")) {
            good = *(opt.device = value) != 0;
            snprintf(want, sizeof want, "cpu or cuda:N, N from 0 to 255");
        } else if (!strcmp(name, "--prefill")) {
            good = (opt.prefill = number(value, 0, MAX_TOKENS)) >= 0;
            snprintf(want, sizeof want, "0 to %d", MAX_TOKENS);
        } else if (!strcmp(name, "--chunk")) {
            good = (opt.chunk = number(value, 1, MODEL_MAX_ROWS)) > 0;
            snprintf(want, sizeof want, "1 to %d", MODEL_MAX_ROWS);
        } else if (!strcmp(name, "--steps")) {
            good = (opt.steps = number(value, 1, MAX_STEPS)) > 0;
            snprintf(want, sizeof want, "1 to %d", MAX_STEPS);
        } else if (!strcmp(name, "--batches")) {
            good = (opt.n_batches = numbers(value, 0, MODEL_MAX_ROWS, opt.batches)) >= 0;
            snprintf(want, sizeof want, "0, or 1 to %d numbers with commas between, 1 to %d each",
                     MAX_LIST, MODEL_MAX_ROWS);
        } else if (!strcmp(name, "--contexts")) {
            good = (opt.n_contexts = numbers(value, 1, MAX_TOKENS, opt.contexts)) > 0;
            snprintf(want, sizeof want, "1 to %d numbers with commas between, 1 to %d each",
                     MAX_LIST, MAX_TOKENS);
        } else if (!strcmp(name, "--layers")) {
            good = !strcmp(value, "most") ? (opt.layers = MOST_LAYERS) < 0
                                          : (opt.layers = number(value, 1, MODEL_MAX_LAYERS)) > 0;
            snprintf(want, sizeof want, "most, or as many as config.json has to %d with MTP blocks",
                     MODEL_MAX_LAYERS);
        } else if (!strcmp(name, "--pages-gb")) {
            good = (opt.pages_bytes = bench_amount(value) * 1e9) > 0;
            snprintf(want, sizeof want, "a number above 0");
        } else if (!strcmp(name, "--products")) {
            good = (opt.fp8 = !strcmp(value, "fp8")) || !strcmp(value, "bf16");
            snprintf(want, sizeof want, "bf16 or fp8");
        } else if (!strcmp(name, "--trace")) {
            good = (opt.trace = !strcmp(value, "1")) || !strcmp(value, "0");
            snprintf(want, sizeof want, "0 or 1");
        } else if (!strcmp(name, "--bf16")) {
            good = (peak_bf16 = bench_amount(value) * 1e12) > 0;
            snprintf(want, sizeof want, "a number above 0");
        } else if (!strcmp(name, "--fp8")) {
            good = (peak_fp8 = bench_amount(value) * 1e12) > 0;
            snprintf(want, sizeof want, "a number above 0");
        }
        if (good) continue;
        if (*want)
            fprintf(stderr, "bench_step: %s '%s': must be %s\n", name, value, want);
        else
            fprintf(stderr, "bench_step: '%s': unknown; --help lists all\n", name);
        return -1;
    }
    if (opt.prefill % opt.chunk == 0) return 0;
    fprintf(stderr, "bench_step: --prefill %d: must be a multiple of --chunk %d\n", opt.prefill,
            opt.chunk);
    return -1;
}

static int copy_call(void *ctx, int i)
{
    (void)i;
    return kern_stream_copy(B.s, B.mem[0], B.mem[1], *(const size_t *)ctx);
}

static void measure_copy(void)
{
    size_t bytes = kern_dev_host_memory(B.dev) ? (size_t)256 << 20 : (size_t)4 << 30;
    const uint64_t left = kern_dev_free_bytes(B.dev);
    if (left && bytes > left / 4) bytes = (size_t)(left / 4) & ~(size_t)0xfffff;
    bench_alloc(&B, (double)bytes);
    bench_alloc(&B, (double)bytes);
    const double t = bench_seconds(&B, copy_call, &bytes, 0.05);
    bench_free_all(&B);
    if (t < 0) fail("the device cannot copy", NULL);
    B.copy_bytes = 2 * (double)bytes / t;
}

/* The model, and sequences without a pool, after passes have taken their memory. */
static void open_model(const char *dir, int32_t n_layers)
{
    struct tow_err err = {0};
    const struct model_options o = {.device = opt.device,
                                    .kv_fmt = KERN_KV_FP8,
                                    .ik_fmt = KERN_IK_FP4,
                                    .expert_aq = KERN_AQ_A128,
                                    .fp8_products = opt.fp8,
                                    .n_layers = n_layers,
                                    .max_rows = most(opt.batches, opt.n_batches, opt.chunk),
                                    .wrap_ops = wrap};
    if (model_open(&model, dir, &o, &err) < 0)
        fail(n_layers && err.code == TOW_ECONFIG ? "--layers" : "open", &err);
    B.dev = model_peek_dev(model);
    B.s = kern_dev_stream(B.dev);
    B.ops = real_ops;
    make_sequences();
    rehearse();
}

static void close_model(void)
{
    free_sequences();
    model_close(model);
}

/* Bytes that layers n .. take of the device, each: those that repeat, on average. */
static double layer_bytes(void)
{
    const struct model_weights *w = model_peek_weights(model);
    double sum = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < w->shape.n_layers; i++) {
        const struct model_layer *L = &w->layers[i];
        const struct kern_weight *const each[] = {
            &L->wq_a,       &L->wq_b,           &L->wkv,
            &L->wo_a,       &L->wo_b,           &L->index_wq_b,
            &L->index_proj, &L->gate,           &L->shared_w1,
            &L->shared_w2,  &L->shared_w3,      &L->comp.wkv,
            &L->comp.wgate, &L->index_comp.wkv, &L->index_comp.wgate,
            &L->hc_attn.fn, &L->hc_ffn.fn};
        if (w->shape.hashed[i]) continue;
        n++;
        for (size_t k = 0; k < sizeof each / sizeof *each; k++)
            if (each[k]->data) sum += weight_bytes(each[k]);
        for (int32_t e = 0; e < w->shape.E; e++)
            sum += weight_bytes(&L->w1[e]) + weight_bytes(&L->w2[e]) + weight_bytes(&L->w3[e]);
    }
    return n ? sum / n : 0;
}

/* How many layers the device holds. */
static int32_t most_layers(const char *dir)
{
    open_model(dir, 0);
    if (kern_dev_host_memory(B.dev))
        fail("--layers most: the device has no memory of its own to fill", NULL);
    const int32_t n = model_peek_weights(model)->shape.n_layers;
    const double each = layer_bytes() * 1.002; /* alignment, vectors, tables */
    const double left = (double)kern_dev_free_bytes(B.dev) - SPARE - opt.pages_bytes;
    int32_t more = each > 0 && left > 0 ? (int32_t)(left / each) : 0;
    if (n + more > MODEL_MAX_LAYERS) more = MODEL_MAX_LAYERS - n;
    printf("a layer takes %.2f GB, %.1f GB are free beside %d of them: %d fit with %.1f GB of "
           "pages\n",
           each / 1e9, (double)kern_dev_free_bytes(B.dev) / 1e9, n, n + more,
           opt.pages_bytes / 1e9);
    close_model();
    return n + more;
}

static void open_all(const char *dir)
{
    const int32_t n_layers = opt.layers == MOST_LAYERS ? most_layers(dir) : opt.layers;
    const double begin = bench_now();
    open_model(dir, n_layers);
    const double opened = bench_now() - begin;
    measure_copy();
    timing.wait = cost_of_waiting();
    make_pool();
    const struct model_weights *w = model_peek_weights(model);
    const struct kern_kv_layout *l = model_peek_layout(model);
    printf("%s: %d layers, %d of them repeat others, %.2f GB in files, opened in %.1f s; copy %.0f "
           "GB/s read and written; ceilings bf16 %.0f, fp8 %.0f TFLOP/s; products %s; waiting for "
           "an op %.1f us (taken off)\n",
           kern_dev_isa(B.dev), w->shape.n_layers, w->shape.n_layers - w->report.n_stored,
           (double)w->report.file_bytes / 1e9, opened, B.copy_bytes / 1e9, peak_bf16 / 1e12,
           peak_fp8 / 1e12, opt.fp8 ? "fp8" : "bf16", timing.wait * 1e6);
    printf("%u pages of %d tokens, %.2f MB each, %.2f GB in all: %s; tails of %.2f MB; %.1f GB of "
           "the device stay free\n",
           seqs.n_pages, l->page_tokens, (double)l->page_bytes / 1e6,
           (double)seqs.n_pages * (double)l->page_bytes / 1e9,
           seqs.shared ? "shared by sequences, but for those being written"
                       : "each sequence has its own",
           (double)l->tail_bytes / 1e6, (double)kern_dev_free_bytes(B.dev) / 1e9);
}

int main(int argc, char **argv)
{
    struct kern_dev *dev = NULL;
    struct tow_err err = {0};
    int bad = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (bench_take(&argc, argv, "--help")) {
        fputs(USAGE, stdout);
        return 0;
    }
    if (argc < 2) {
        printf("bench_step: no checkpoint given: skipped (--help says how)\n");
        return BENCH_SKIPPED;
    }
    if (argv[1][0] == '-') {
        fprintf(stderr, "bench_step: '%s': the checkpoint comes first; --help lists all\n",
                argv[1]);
        return BENCH_WRONG;
    }
    if (read_options(argc, argv) < 0) return BENCH_WRONG;
    if (kern_dev_open(&dev, opt.device, 0, &err) < 0) return bench_no_device(&err, "--device");
    kern_dev_close(dev);
    open_all(argv[1]);
    const struct kern_kv_layout *l = model_peek_layout(model);
    const int64_t filled = opt.prefill ? opt.prefill : opt.chunk;
    if (opt.prefill)
        bench_prefill();
    else
        pass(1, opt.chunk, 0, false); /* something to copy */
    if (opt.n_batches) {
        const int64_t n = filled / l->page_tokens;
        repeat_units(seqs.pages, l->page_bytes, n > 0 ? n : 1, seqs.n_pages);
        repeat_units(seqs.tails, l->tail_bytes, 1, seqs.n_seqs);
    }
    for (int i = 0; i < (opt.n_batches ? opt.n_contexts : 0); i++) {
        own_last_pages(opt.contexts[i]);
        for (int k = 0; k < opt.n_batches; k++) bench_decode(opt.batches[k], opt.contexts[i]);
    }
    putchar('\n');
    print_cases();
    print_ops();
    if (opt.trace) trace_cases();
    for (int c = 0; c < n_cases; c++) bad += cases[c].bad_logits;
    close_model();
    return bad > 0;
}
