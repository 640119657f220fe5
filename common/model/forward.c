/* model/forward.c - see forward.h. One layer reads as the specification's list of steps: collapse
 * and norm, attention (window keys, compressors, indexer), expand, collapse and norm, experts,
 * expand; each is one op of the table, or several. What lies between two sub-layers is one op
 * (hc_boundary), and so are a layer's experts (ffn); their steps are taken apart, with the same
 * bits, only where a tap looks at them.
 *
 * Activations are bf16 in deployed mode and f32 in exact mode; that type is the whole difference
 * between the modes besides the quantizers in front of products, which aq_for() chooses from the
 * stored form of the weight. */
#include "common/model/forward.h"

#include "common/base/err.h"
#include "common/model/place.h"
#include "common/model/sample.h"
#include "kernels/dev.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Scratch for max_rows rows; a pointer's type says act where it is void. */
struct scratch {
    void *h;                        /* streams [R, hc, D] */
    void *x, *y;                    /* [R, D] sub-layer input, output */
    float *post, *comb;             /* [R, hc], [R, hc, hc] */
    int32_t *ids, *pos;             /* [R] */
    float *cos[2], *sin[2];         /* [R, rd/2]; 0 plain, 1 layers with a compressor */
    void *qr;                       /* [R, q_lora] */
    void *q, *o;                    /* [R, H, d] */
    void *kv;                       /* [R, d] */
    float *ckv, *cgate;             /* [R, c*d] of the main compressor */
    float *ikv, *igate;             /* [R, 2w] of the indexer's */
    void *iq, *iwt;                 /* [R, Hi, w], [R, Hi] */
    int32_t *selected, *n_selected; /* [R, max_topk], [R] */
    void *capture_q;                /* [Hi * wi] act: one row's queries for a shadow type */
    struct kern_rank *ranks;        /* [1 + KERN_SHADOWS, MODEL_CAPTURE_ENTRIES] */
    float *border;                  /* [1 + KERN_SHADOWS, 2] */
    void *o_low;                    /* [R, G, o_lora] */
    float *gate;                    /* [R, E] */
    int32_t *experts;               /* [R, k] */
    float *weights;                 /* [R, k] */
    float *margin;                  /* [R] */
    float *routed;                  /* [R, D] */
    void *sg, *su;                  /* [R, inter] */
    void *shared;                   /* [R, D] */
    void *mtp_in;                   /* [R, hc, D]; MTP only */
    float *logits; /* [HEAD_ROWS, V]; only where the caller's are not device memory */
    struct kern_sample_row *sample_rows; /* [HEAD_ROWS] */
    struct kern_edit *edits;             /* [h.edits.room] */
    struct kern_choice *choices;         /* [HEAD_ROWS] */
};

/* Host memory: what goes to the device with a pass, and what comes back from one that the host
 * cannot read. */
struct staging {
    int32_t *pos;        /* [R] */
    int32_t *score_rows; /* [R]: rows whose scores a capture needs */
    void *tap;           /* grown */
    size_t tap_bytes;
    struct kern_rank *ranks; /* as scratch.ranks */
    float *border;
    int32_t *selected; /* [max_topk] */
    float *logits;     /* grown: of draws whose caller wants none */
    size_t logits_bytes;
    struct kern_sample_row *sample_rows; /* [HEAD_ROWS] */
    struct model_edits edits;
    struct kern_choice *choices; /* [HEAD_ROWS] */
};

enum {
    /* Rows of logits that a device holds at a time: the largest decode step (66 MB at 129,280
     * ids). */
    HEAD_ROWS = 128,
    /* Edits of logits that go to the device at a time: 2,048 different tokens in each row's
     * output. */
    EDITS = HEAD_ROWS * 2048
};

struct model {
    struct model_options opt;
    struct model_weights *w;    /* owned */
    struct kern_dev *dev;       /* owned */
    const struct kern_ops *ops; /* borrowed from dev */
    struct kern_stream *stream; /* borrowed from dev */
    struct kern_kv_layout layout;
    enum kern_dtype act;
    float *inv_freq[2]; /* owned, device memory; as scratch.cos */
    struct scratch s;   /* owned, device memory */
    struct staging h;   /* owned */
    float *scores;      /* [n_scores] owned, device memory: of captured rows; NULL: not warmed */
    int64_t n_scores;
    bool host; /* device memory is host memory */
};

/* ------------------------------------------------------------------ opening */

static void *rows(struct model *m, int64_t width, int64_t elem, bool *failed)
{
    int64_t n = (int64_t)m->opt.max_rows * (width > 0 ? width : 1);
    void *p = kern_dev_alloc(m->dev, (size_t)(n * elem));
    if (!p) *failed = true;
    return p;
}

/* Those of any one row must fit. */
static int32_t edits_room(const struct model_shape *s)
{
    return s->V > EDITS ? s->V : EDITS;
}

static int alloc_scratch(struct model *m, struct tow_err *err)
{
    const struct model_shape *s = &m->w->shape;
    struct scratch *k = &m->s;
    int64_t a = kern_dtype_bytes(m->act), f = 4, half = s->rd / 2;
    bool bad = false;

    k->h = rows(m, (int64_t)s->hc * s->D, a, &bad);
    k->x = rows(m, s->D, a, &bad);
    k->y = rows(m, s->D, a, &bad);
    k->post = rows(m, s->hc, f, &bad);
    k->comb = rows(m, (int64_t)s->hc * s->hc, f, &bad);
    k->ids = rows(m, 1, f, &bad);
    k->pos = rows(m, 1, f, &bad);
    for (int i = 0; i < 2; i++) {
        k->cos[i] = rows(m, half, f, &bad);
        k->sin[i] = rows(m, half, f, &bad);
        m->inv_freq[i] = kern_dev_alloc(m->dev, (size_t)(half > 0 ? half : 1) * sizeof(float));
        if (!m->inv_freq[i]) bad = true;
    }
    k->qr = rows(m, s->q_lora, a, &bad);
    k->q = rows(m, (int64_t)s->H * s->d, a, &bad);
    k->o = rows(m, (int64_t)s->H * s->d, a, &bad);
    k->kv = rows(m, s->d, a, &bad);
    k->ckv = rows(m, 2 * (int64_t)s->d, f, &bad);
    k->cgate = rows(m, 2 * (int64_t)s->d, f, &bad);
    k->ikv = rows(m, 2 * (int64_t)s->index_dim, f, &bad);
    k->igate = rows(m, 2 * (int64_t)s->index_dim, f, &bad);
    k->iq = rows(m, (int64_t)s->index_heads * s->index_dim, a, &bad);
    k->iwt = rows(m, s->index_heads, a, &bad);
    k->selected = rows(m, m->opt.max_topk, f, &bad);
    k->n_selected = rows(m, 1, f, &bad);
    k->capture_q = kern_dev_alloc(m->dev, (size_t)(s->index_heads * s->index_dim * a) + 1);
    k->ranks =
        kern_dev_alloc(m->dev, (1 + KERN_SHADOWS) * MODEL_CAPTURE_ENTRIES * sizeof *k->ranks);
    k->border = kern_dev_alloc(m->dev, (1 + KERN_SHADOWS) * 2 * sizeof *k->border);
    bad = bad || !k->capture_q || !k->ranks || !k->border;
    k->o_low = rows(m, (int64_t)s->o_groups * s->o_lora, a, &bad);
    k->gate = rows(m, s->E, f, &bad);
    k->experts = rows(m, s->k, f, &bad);
    k->weights = rows(m, s->k, f, &bad);
    k->margin = rows(m, 1, f, &bad);
    k->routed = rows(m, s->D, f, &bad);
    k->sg = rows(m, s->inter, a, &bad);
    k->su = rows(m, s->inter, a, &bad);
    k->shared = rows(m, s->D, a, &bad);
    if (m->opt.mtp) k->mtp_in = rows(m, (int64_t)s->hc * s->D, a, &bad);
    if (!m->host) {
        k->logits = kern_dev_alloc(m->dev, (size_t)HEAD_ROWS * (size_t)s->V * sizeof(float));
        bad = bad || !k->logits;
    }
    k->sample_rows = kern_dev_alloc(m->dev, HEAD_ROWS * sizeof *k->sample_rows);
    k->choices = kern_dev_alloc(m->dev, HEAD_ROWS * sizeof *k->choices);
    k->edits = kern_dev_alloc(m->dev, (size_t)edits_room(s) * sizeof *k->edits);
    bad = bad || !k->sample_rows || !k->choices || !k->edits;
    if (bad)
        return tow_fail(err, TOW_ENOMEM, "model: no memory for the scratch of %d rows",
                        m->opt.max_rows);
    return 0;
}

static int alloc_staging(struct model *m, struct tow_err *err)
{
    struct staging *h = &m->h;
    const size_t n = (size_t)m->opt.max_rows;
    h->pos = malloc(n * sizeof *h->pos);
    h->score_rows = malloc(n * sizeof *h->score_rows);
    h->ranks = malloc((1 + KERN_SHADOWS) * MODEL_CAPTURE_ENTRIES * sizeof *h->ranks);
    h->border = malloc((1 + KERN_SHADOWS) * 2 * sizeof *h->border);
    h->selected = malloc((size_t)m->opt.max_topk * sizeof *h->selected);
    h->sample_rows = malloc(HEAD_ROWS * sizeof *h->sample_rows);
    h->choices = malloc(HEAD_ROWS * sizeof *h->choices);
    const bool edits = model_edits_init(&h->edits, m->w->shape.V, edits_room(&m->w->shape));
    return h->pos && h->score_rows && h->ranks && h->border && h->selected && h->sample_rows &&
                   h->choices && edits
               ? 0
               : tow_fail(err, TOW_ENOMEM, "model: out of memory");
}

static void free_staging(struct staging *h)
{
    free(h->pos);
    free(h->score_rows);
    free(h->tap);
    free(h->ranks);
    free(h->border);
    free(h->selected);
    free(h->logits);
    free(h->sample_rows);
    free(h->choices);
    model_edits_fini(&h->edits);
}

static void free_scratch(struct model *m)
{
    struct scratch *k = &m->s;
    void *all[] = {k->h,     k->x,       k->y,         k->post,     k->comb,        k->pos,
                   k->ids,   k->cos[0],  k->cos[1],    k->sin[0],   k->sin[1],      k->qr,
                   k->q,     k->o,       k->kv,        k->ckv,      k->cgate,       k->ikv,
                   k->igate, k->iq,      k->iwt,       k->selected, k->n_selected,  k->sample_rows,
                   k->edits, k->choices, k->capture_q, k->ranks,    k->border,      k->logits,
                   k->o_low, k->gate,    k->experts,   k->weights,  k->margin,      k->routed,
                   k->sg,    k->su,      k->shared,    k->mtp_in,   m->inv_freq[0], m->inv_freq[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) kern_dev_free(m->dev, all[i]);
}

/* Quantizers work on fixed groups; say so by field before a kernel would. */
static int check_deployed(const struct model_shape *s, const struct model_options *o,
                          struct tow_err *err)
{
    if ((s->d - s->rd) % 64 != 0)
        return tow_fail(
            err, TOW_ECONFIG,
            "head_dim %d less qk_rope_head_dim %d: deployed numerics quantize keys per 64, "
            "so the difference must be a multiple of 64 (or use --numerics exact)",
            s->d, s->rd);
    if (o->ik_fmt == KERN_IK_F32)
        return tow_fail(
            err, TOW_ECONFIG,
            "--index-keys f32: only with --numerics exact; deployed takes fp4, fp8 or bf16");
    return 0;
}

static int check_options(struct model_options *o, const struct model_shape *s, struct tow_err *err)
{
    if (o->max_rows < 1 || o->max_rows > MODEL_MAX_ROWS)
        return tow_fail(err, TOW_ECONFIG, "rows of one pass: %d is not in 1..%d", o->max_rows,
                        MODEL_MAX_ROWS);
    if (o->max_topk == 0) o->max_topk = MODEL_MAX_TOPK;
    if (o->index_topk == 0) o->index_topk = s->index_topk;
    if (o->index_topk < 1 || o->index_topk > o->max_topk)
        return tow_fail(err, TOW_ECONFIG, "--index-topk: %d is not in 1..%d", o->index_topk,
                        o->max_topk);
    if (o->exact && (o->kv_fmt != KERN_KV_F32 || o->ik_fmt != KERN_IK_F32))
        return tow_fail(err, TOW_ECONFIG,
                        "--numerics exact: --kv-dtype and --index-keys must be f32");
    if (!o->exact) {
        int rc = check_deployed(s, o, err);
        if (rc < 0) return rc;
    }
    if (o->mtp && s->n_mtp == 0)
        return tow_fail(err, TOW_ECONFIG, "mtp: the checkpoint has no MTP block");
    return 0;
}

static void layout_spec(const struct model_options *o, const struct model_shape *s,
                        struct kern_kv_spec *spec)
{
    memset(spec, 0, sizeof *spec);
    spec->n_mtp = o->mtp ? 1 : 0;
    spec->n_layers = s->n_layers + spec->n_mtp;
    for (int32_t i = 0; i < spec->n_layers; i++) spec->ratios[i] = s->ratios[i];
    spec->head_dim = s->d;
    spec->rope_dim = s->rd;
    spec->window = s->window;
    spec->index_dim = s->index_dim;
    spec->stream_width = s->hc * s->D;
    spec->page_tokens = o->page_tokens;
    spec->kv_fmt = o->kv_fmt;
    spec->ik_fmt = o->ik_fmt;
}

int model_plan(struct kern_kv_layout *out, struct model_options *opt,
               const struct model_shape *shape, struct tow_err *err)
{
    struct kern_kv_spec spec;
    int rc = check_options(opt, shape, err);
    if (rc < 0) return rc;
    layout_spec(opt, shape, &spec);
    return kern_kv_layout_init(out, &spec, err);
}

static int fill_frequencies(struct model *m, struct tow_err *err)
{
    const int32_t half = m->w->shape.rd / 2;
    float *f = malloc((size_t)(half > 0 ? half : 1) * sizeof *f);
    if (!f) return tow_fail(err, TOW_ENOMEM, "model: out of memory");
    int rc = 0;
    for (int i = 0; i < 2 && rc == 0; i++) {
        model_shape_inv_freq(&m->w->shape, i ? 4 : 0, f);
        rc = kern_stream_write(m->stream, m->inv_freq[i], f, (size_t)half * sizeof *f);
    }
    free(f);
    return rc < 0 ? tow_fail(err, rc, "model: the device does not answer") : 0;
}

int model_open(struct model **out, const char *dir, const struct model_options *opt,
               struct tow_err *err)
{
    struct model *m = calloc(1, sizeof *m);
    if (!m) return tow_fail(err, TOW_ENOMEM, "model: out of memory");
    m->opt = *opt;
    m->act = opt->exact ? KERN_F32 : KERN_BF16;

    struct model_weights_options wo = {.need_input_scales =
                                           !opt->exact && opt->expert_aq == KERN_AQ_NVFP4,
                                       .no_mtp = !opt->mtp,
                                       .n_layers = opt->n_layers};
    int rc = model_weights_open(&m->w, dir, &wo, err);
    if (rc < 0) goto fail;
    rc = model_plan(&m->layout, &m->opt, &m->w->shape, err);
    if (rc < 0) goto fail;
    rc = kern_dev_open(&m->dev, opt->device, opt->n_threads, err);
    if (rc < 0) goto fail;
    if (!kern_dev_fp8_products(m->dev, opt->fp8_products) && opt->fp8_products) {
        rc = tow_fail(err, TOW_ECONFIG,
                      "--products fp8: --device %s (%s) has none; bf16 is everywhere", opt->device,
                      kern_dev_isa(m->dev));
        goto fail;
    }
    m->ops = kern_dev_ops(m->dev);
    if (opt->wrap_ops) m->ops = opt->wrap_ops(m->ops);
    m->stream = kern_dev_stream(m->dev);
    m->host = kern_dev_host_memory(m->dev);
    rc = model_weights_place(m->w, m->dev, err);
    if (rc < 0) goto fail;
    rc = alloc_scratch(m, err);
    if (rc == 0) rc = alloc_staging(m, err);
    if (rc == 0) rc = fill_frequencies(m, err);
    if (rc < 0) goto fail;
    *out = m;
    return 0;

fail:
    model_close(m);
    return rc;
}

void model_close(struct model *m)
{
    if (!m) return;
    if (m->dev) {
        free_scratch(m);
        kern_dev_free(m->dev, m->scores);
        kern_dev_close(m->dev);
    }
    free_staging(&m->h);
    model_weights_close(m->w);
    free(m);
}

const struct model_weights *model_peek_weights(const struct model *m)
{
    return m->w;
}

const struct kern_kv_layout *model_peek_layout(const struct model *m)
{
    return &m->layout;
}

const struct model_options *model_peek_options(const struct model *m)
{
    return &m->opt;
}

struct kern_dev *model_peek_dev(struct model *m)
{
    return m->dev;
}

/* Of T rows of s.h. */
static size_t streams_bytes(const struct model *m, int32_t T)
{
    return (size_t)T * (size_t)(m->w->shape.hc * m->w->shape.D) * (size_t)kern_dtype_bytes(m->act);
}

int model_read_streams(struct model *m, int32_t row0, int32_t n, void *out)
{
    return kern_stream_read(m->stream, out, (const uint8_t *)m->s.h + streams_bytes(m, row0),
                            streams_bytes(m, n));
}

void model_tail_set(uint8_t *tail, int64_t pos, int64_t mtp_pos)
{
    struct kern_kv_tail_head head = {KERN_KV_TAIL_MAGIC, pos, mtp_pos, 0};
    memcpy(tail, &head, sizeof head);
}

int64_t model_tail_pos(const uint8_t *tail)
{
    struct kern_kv_tail_head head;
    memcpy(&head, tail, sizeof head);
    return head.magic == KERN_KV_TAIL_MAGIC ? head.pos : -1;
}

int64_t model_tail_mtp_pos(const uint8_t *tail)
{
    struct kern_kv_tail_head head;
    memcpy(&head, tail, sizeof head);
    return head.magic == KERN_KV_TAIL_MAGIC ? head.mtp_pos : -1;
}

/* ------------------------------------------------------------------ one pass */

/* What a sub-layer made and the streams have not taken in yet: y, with routed the sum of both. */
struct made {
    const float *routed;
    void *y;
};
/* What every step of one pass needs. rc is sticky: after a failure the remaining ops are
 * skipped. */
struct pass {
    struct model *m;
    const struct model_batch *b;
    int32_t T;
    int rc;
    struct made made;
};

#define OP(p, op, ...)                                                                             \
    do {                                                                                           \
        struct kern_##op op_args = {__VA_ARGS__};                                                  \
        if ((p)->rc == 0) (p)->rc = (p)->m->ops->op((p)->m->stream, &op_args);                     \
    } while (0)

static void tap(struct pass *p, int32_t layer, const char *name, enum model_elem elem,
                const void *data, int64_t width)
{
    struct model_tap *t = p->b->tap;
    struct staging *h = &p->m->h;
    const size_t bytes = (size_t)p->T * (size_t)width * (elem == MODEL_ELEM_BF16 ? 2 : 4);
    if (!t || p->rc != 0) return;
    if (!p->m->host) {
        if (bytes > h->tap_bytes) {
            free(h->tap);
            h->tap = malloc(bytes);
            h->tap_bytes = h->tap ? bytes : 0;
            if (!h->tap) p->rc = TOW_ENOMEM;
        }
        if (p->rc == 0) p->rc = kern_stream_read(p->m->stream, h->tap, data, bytes);
        data = h->tap;
    } else {
        p->rc = kern_stream_sync(p->m->stream);
    }
    if (p->rc == 0) t->on_tensor(t->ctx, layer, name, elem, data, p->T, width);
}

static enum model_elem act_elem(const struct model *m)
{
    return m->act == KERN_F32 ? MODEL_ELEM_F32 : MODEL_ELEM_BF16;
}

/* Exact mode quantizes nothing; deployed mode quantizes in front of every weight that is stored
 * quantized. */
static enum kern_act_quant aq_for(const struct model *m, const struct kern_weight *w)
{
    if (m->opt.exact) return KERN_AQ_NONE;
    switch (w->fmt) {
    case KERN_W_FP8:
    case KERN_W_MXFP4: return KERN_AQ_A128;
    case KERN_W_NVFP4: return m->opt.expert_aq;
    default: return KERN_AQ_NONE;
    }
}

/* y = w x, T rows. */
static struct kern_linear product(struct pass *p, const void *x, enum kern_dtype x_dtype,
                                  const struct kern_weight *w, void *y, enum kern_dtype y_dtype,
                                  int32_t T)
{
    return (struct kern_linear){.x = x,
                                .w = *w,
                                .y = y,
                                .ld_x = w->k,
                                .ld_y = w->n,
                                .T = T,
                                .N = w->n,
                                .K = w->k,
                                .groups = 1,
                                .x_dtype = x_dtype,
                                .y_dtype = y_dtype,
                                .aq = aq_for(p->m, w)};
}

static void linear_rows(struct pass *p, const void *x, enum kern_dtype x_dtype,
                        const struct kern_weight *w, void *y, enum kern_dtype y_dtype, int32_t T)
{
    const struct kern_linear l = product(p, x, x_dtype, w, y, y_dtype, T);
    if (p->rc == 0) p->rc = p->m->ops->linear(p->m->stream, &l);
}

static void linear(struct pass *p, const void *x, const struct kern_weight *w, void *y)
{
    linear_rows(p, x, p->m->act, w, y, p->m->act, p->T);
}

/* Products of the same rows, made together. */
struct products {
    struct kern_linear each[8];
    int32_t n;
};
static void add_product(struct pass *p, struct products *of, const void *x,
                        const struct kern_weight *w, void *y, enum kern_dtype y_dtype)
{
    of->each[of->n++] = product(p, x, p->m->act, w, y, y_dtype, p->T);
}

static struct kern_rmsnorm norm_of(struct pass *p, const void *x, const struct kern_vec *w, void *y,
                                   int32_t T)
{
    return (struct kern_rmsnorm){.x = x,
                                 .w = *w,
                                 .y = y,
                                 .ld_x = w->n,
                                 .ld_y = w->n,
                                 .T = T,
                                 .D = w->n,
                                 .eps = p->m->w->shape.norm_eps,
                                 .act = p->m->act};
}

static void rmsnorm(struct pass *p, const void *x, const struct kern_vec *w, void *y, int32_t T)
{
    const struct kern_rmsnorm norm = norm_of(p, x, w, y, T);
    if (p->rc == 0) p->rc = p->m->ops->rmsnorm(p->m->stream, &norm);
}

static void collapse(struct pass *p, const struct model_hc *hc)
{
    const struct model_shape *s = &p->m->w->shape;
    OP(p, hc_collapse, .h = p->m->s.h, .fn = hc->fn, .base = hc->base, .scale = hc->scale,
       .x = p->m->s.x, .post = p->m->s.post, .comb = p->m->s.comb, .T = p->T, .hc = s->hc,
       .D = s->D, .iters = s->hc_iters, .hc_eps = s->hc_eps, .norm_eps = s->norm_eps,
       .act = p->m->act);
}

static void add_routed(struct pass *p)
{
    const struct made r = p->made;
    OP(p, add, .a = r.routed, .b = r.y, .y = p->m->s.y, .n = (int64_t)p->T * p->m->w->shape.D,
       .act = p->m->act);
    p->made = (struct made){NULL, p->m->s.y};
}

/* The streams take in what the last sub-layer made. */
static void settle(struct pass *p)
{
    const struct model_shape *s = &p->m->w->shape;
    if (p->made.routed) add_routed(p);
    if (p->made.y)
        OP(p, hc_expand, .y = p->made.y, .h = p->m->s.h, .post = p->m->s.post, .comb = p->m->s.comb,
           .out = p->m->s.h, .T = p->T, .hc = s->hc, .D = s->D, .act = p->m->act);
    p->made = (struct made){NULL, NULL};
}

/* The same, and what comes next reads s.x: T rows of h. */
static void boundary(struct pass *p, const struct model_hc *hc, const struct kern_vec *norm,
                     bool head, void *h, int32_t T)
{
    const struct model_shape *s = &p->m->w->shape;
    OP(p, hc_boundary, .routed = p->made.routed, .y = p->made.y, .h = h, .fn = hc->fn,
       .base = hc->base, .scale = hc->scale, .norm = *norm, .x = p->m->s.x, .post = p->m->s.post,
       .comb = p->m->s.comb, .head = head, .T = T, .hc = s->hc, .D = s->D, .iters = s->hc_iters,
       .hc_eps = s->hc_eps, .norm_eps = s->norm_eps, .act = p->m->act);
    p->made = (struct made){NULL, NULL};
}

/* A sub-layer begins. Who taps sees each step, with the same bits. */
static void enter(struct pass *p, int32_t at, const struct model_hc *hc,
                  const struct kern_vec *norm, const char *collapsed)
{
    struct model *m = p->m;
    if (!p->b->tap) {
        boundary(p, hc, norm, false, m->s.h, p->T);
        return;
    }
    collapse(p, hc);
    if (collapsed) tap(p, at, collapsed, act_elem(m), m->s.x, m->w->shape.D);
    rmsnorm(p, m->s.x, norm, m->s.x, p->T);
}
/* A sub-layer ends; the streams wait for the next one, unless they are looked at. */
static void leave(struct pass *p, int32_t at, const char *streams)
{
    struct model *m = p->m;
    if (!p->b->tap) return;
    settle(p);
    tap(p, at, streams, act_elem(m), m->s.h, (int64_t)m->w->shape.hc * m->w->shape.D);
}

/* What a compressor has to do with what it is fed. */
static struct kern_compress compressor(struct pass *p, int32_t at, const struct model_compressor *c,
                                       bool index)
{
    struct model *m = p->m;
    return (struct kern_compress){.kv = index ? m->s.ikv : m->s.ckv,
                                  .gate = index ? m->s.igate : m->s.cgate,
                                  .ape = c->ape,
                                  .norm = c->norm,
                                  .inv_freq = m->inv_freq[1],
                                  .pages = p->b->pages,
                                  .layout = &m->layout,
                                  .layer = at,
                                  .index = index,
                                  .seqs = p->b->seqs,
                                  .n_seqs = p->b->n_seqs,
                                  .eps = m->w->shape.norm_eps,
                                  .act = m->act};
}

/* Room for the scores of n_rows rows, of every visible entry: [n_rows, n]; for taps and captures.
 * Until give_scores(). */
static float *score_rows(struct pass *p, int32_t n_rows, int64_t *n)
{
    int64_t most = 0;
    for (int32_t i = 0; i < p->b->n_seqs; i++) {
        int64_t e = (p->b->seqs[i].pos0 + p->b->seqs[i].n_rows) / 4;
        if (e > most) most = e;
    }
    *n = most;
    if (most == 0 || n_rows == 0) return NULL;
    if (most * n_rows <= p->m->n_scores) return p->m->scores;
    float *scores = kern_dev_alloc(p->m->dev, (size_t)(most * n_rows) * sizeof(float));
    if (!scores && p->rc == 0) p->rc = TOW_ENOMEM;
    return scores;
}

static void give_scores(struct model *m, float *scores)
{
    if (scores != m->scores) kern_dev_free(m->dev, scores);
}

/* Whether sequence i is captured in this layer; MTP layers never are. */
static bool captured(const struct pass *p, int32_t i, int32_t layer)
{
    const struct model_capture *c = p->b->captures ? p->b->captures[i] : NULL;
    if (!c || layer >= p->m->w->shape.n_layers) return false;
    if (c->n_layers == 0) return true;
    for (int32_t k = 0; k < c->n_layers; k++)
        if (c->layers[k] == layer) return true;
    return false;
}

static float index_factor(const struct model_shape *s)
{
    return (float)(1.0 / sqrt((double)s->index_dim) / sqrt((double)s->index_heads));
}

/* The last rows of the captured sequences, to h.score_rows; how many. */
static int32_t captured_rows(struct pass *p, int32_t layer)
{
    int32_t n = 0;
    for (int32_t i = 0; p->b->captures && i < p->b->n_seqs; i++)
        if (captured(p, i, layer))
            p->m->h.score_rows[n++] = p->b->seqs[i].row0 + p->b->seqs[i].n_rows - 1;
    return n;
}

static void write_to(struct pass *p, void *to, const void *from, size_t bytes)
{
    if (p->rc == 0) p->rc = kern_stream_write(p->m->stream, to, from, bytes);
}

static void read_back(struct pass *p, void *to, const void *from, size_t bytes)
{
    if (p->rc == 0) p->rc = kern_stream_read(p->m->stream, to, from, bytes);
}

/* Ranks by keys of one type, own ones by the scores where there are any. Queries for a shadow type
 * are made anew from the row's latent: the same bits as the row's own had before they were
 * rounded. */
static void rank(struct pass *p, int32_t at, const struct model_layer *L,
                 const struct kern_seq *row, const float *scores, const int32_t *entries, int32_t n,
                 int keys, struct model_ranks *out)
{
    struct model *m = p->m;
    const struct model_shape *s = &m->w->shape;
    const int64_t a = kern_dtype_bytes(m->act), half = s->rd / 2, r = row->row0;
    struct kern_seq q = *row;
    const void *iq = m->s.iq, *wt = m->s.iwt;
    int32_t T = p->T;
    struct kern_rank *ranks = m->s.ranks + (int64_t)(keys + 1) * MODEL_CAPTURE_ENTRIES;
    float *border = m->s.border + (int64_t)(keys + 1) * 2;
    if (keys != KERN_KEYS_OWN) {
        linear_rows(p, (const uint8_t *)m->s.qr + r * s->q_lora * a, m->act, &L->index_wq_b,
                    m->s.capture_q, m->act, 1);
        OP(p, index_query, .q = m->s.capture_q, .cos = m->s.cos[1] + r * half,
           .sin = m->s.sin[1] + r * half, .T = 1, .H = s->index_heads, .w = s->index_dim,
           .rd = s->rd, .fmt = kern_shadow_fmt((enum kern_shadow)keys), .act = m->act);
        iq = m->s.capture_q;
        wt = (const uint8_t *)m->s.iwt + r * s->index_heads * a;
        q.row0 = 0;
        T = 1;
    }
    OP(p, index_rank, .scores = scores, .q = iq, .wt = wt, .factor = index_factor(s),
       .pages = p->b->pages, .layout = &m->layout, .layer = at, .seq = &q, .T = T,
       .H = s->index_heads, .keys = keys, .entries = entries, .n_entries = n, .ranks = ranks,
       .kth = border, .next = border + 1, .act = m->act);
    struct kern_rank *seen = m->h.ranks + (int64_t)(keys + 1) * MODEL_CAPTURE_ENTRIES;
    float *edge = m->h.border + (int64_t)(keys + 1) * 2;
    read_back(p, seen, ranks, (size_t)n * sizeof *seen);
    read_back(p, edge, border, 2 * sizeof *edge);
    *out = (struct model_ranks){seen, edge[0], edge[1]};
}

static void rank_shadows(struct pass *p, int32_t at, const struct model_layer *L,
                         const struct kern_seq *row, struct model_capture_row *out)
{
    for (int s = 0; s < KERN_SHADOWS; s++) {
        if (!(out->shadow >> s & 1)) continue;
        if (kern_shadow_fmt((enum kern_shadow)s) == p->m->opt.ik_fmt)
            out->shadows[s] = out->own;
        else
            rank(p, at, L, row, NULL, out->entries, out->n_entries, s, &out->shadows[s]);
    }
}

/* scores: NULL (nothing is visible), or rows ld apart: all if every, else those of the captured. */
static void capture(struct pass *p, int32_t at, const struct model_layer *L, const float *scores,
                    int64_t ld, bool every)
{
    struct model *m = p->m;
    int32_t n = 0;
    for (int32_t i = 0; i < p->b->n_seqs && p->rc == 0; i++) {
        if (!captured(p, i, at)) continue;
        const struct model_capture *c = p->b->captures[i];
        struct kern_seq row = p->b->seqs[i];
        row.pos0 += row.n_rows - 1;
        row.row0 += row.n_rows - 1;
        row.n_rows = 1;
        struct model_capture_row out = {.layer = at,
                                        .topk = row.topk,
                                        .n_visible = (row.pos0 + 1) / L->ratio,
                                        .entries = c->entries,
                                        .shadow = c->shadow};
        while (out.n_entries < c->n_entries && c->entries[out.n_entries] < out.n_visible)
            out.n_entries++;
        const float *own = scores ? scores + (every ? row.row0 : n) * ld : NULL;
        n++;
        rank(p, at, L, &row, own, c->entries, out.n_entries, KERN_KEYS_OWN, &out.own);
        rank_shadows(p, at, L, &row, &out);
        if (c->lists) {
            read_back(p, &out.n_list, m->s.n_selected + row.row0, sizeof out.n_list);
            read_back(p, m->h.selected, m->s.selected + (int64_t)row.row0 * m->opt.max_topk,
                      (size_t)m->opt.max_topk * sizeof *m->h.selected);
            out.list = m->h.selected;
        }
        if (p->rc == 0) c->on_row(c->ctx, &out);
    }
}

/* Entries for the queries in s.iq. */
static void indexer(struct pass *p, int32_t at, const struct model_layer *L)
{
    struct model *m = p->m;
    const struct model_shape *s = &m->w->shape;
    struct model_tap *t = p->b->tap;
    bool scored = t && t->scores;
    int64_t n_scores = 0;

    const int32_t n_captured = captured_rows(p, at);
    float *scores = score_rows(p, scored ? p->T : n_captured, &n_scores);
    OP(p, index_select, .q = m->s.iq, .wt = m->s.iwt, .factor = index_factor(s),
       .pages = p->b->pages, .layout = &m->layout, .layer = at, .seqs = p->b->seqs,
       .n_seqs = p->b->n_seqs, .T = p->T, .H = s->index_heads, .selected = m->s.selected,
       .n_selected = m->s.n_selected, .sel_ld = m->opt.max_topk, .scores = scores,
       .score_ld = n_scores, .score_rows = scored ? NULL : m->h.score_rows,
       .n_score_rows = n_captured, .margin = scored ? m->s.margin : NULL, .act = m->act);
    if (scored) {
        if (scores) tap(p, at, "index_scores", MODEL_ELEM_F32, scores, n_scores);
        tap(p, at, "index_margin", MODEL_ELEM_F32, m->s.margin, 1);
    }
    tap(p, at, "index_selected", MODEL_ELEM_I32, m->s.selected, m->opt.max_topk);
    if (n_captured) capture(p, at, L, scores, n_scores, scored);
    give_scores(m, scores);
}

/* All products of the normed rows s.x, and then those of the latent behind wq_a, which is normed on
 * the way; s.qr has it only for who looks at it. */
static void attention_products(struct pass *p, int32_t at, const struct model_layer *L)
{
    struct model *m = p->m;
    struct products of_x = {.n = 0}, of_qr = {.n = 0};

    add_product(p, &of_x, m->s.x, &L->wq_a, m->s.qr, m->act);
    add_product(p, &of_x, m->s.x, &L->wkv, m->s.kv, m->act);
    add_product(p, &of_qr, m->s.qr, &L->wq_b, m->s.q, m->act);
    if (L->ratio > 0) { /* the specification keeps these in float32 */
        add_product(p, &of_x, m->s.x, &L->comp.wkv, m->s.ckv, KERN_F32);
        add_product(p, &of_x, m->s.x, &L->comp.wgate, m->s.cgate, KERN_F32);
    }
    if (kern_kv_overlaps(L->ratio)) {
        add_product(p, &of_x, m->s.x, &L->index_comp.wkv, m->s.ikv, KERN_F32);
        add_product(p, &of_x, m->s.x, &L->index_comp.wgate, m->s.igate, KERN_F32);
        add_product(p, &of_x, m->s.x, &L->index_proj, m->s.iwt, m->act);
        add_product(p, &of_qr, m->s.qr, &L->index_wq_b, m->s.iq, m->act);
    }
    OP(p, linears, .each = of_x.each, .n = of_x.n);
    const struct kern_rmsnorm norm = norm_of(p, m->s.qr, &L->q_norm, m->s.qr, p->T);
    const bool seen = p->b->tap || p->b->captures;
    if (seen) rmsnorm(p, m->s.qr, &L->q_norm, m->s.qr, p->T);
    tap(p, at, "qr", act_elem(m), m->s.qr, m->w->shape.q_lora);
    OP(p, linears, .each = of_qr.each, .n = of_qr.n, .norm = seen ? NULL : &norm);
}

/* No sequence has a row that would see what another row of this batch puts in its window. */
static bool rows_are_alone(const struct model_batch *b)
{
    for (int32_t i = 0; i < b->n_seqs; i++)
        if (b->seqs[i].n_rows > 1) return false;
    return true;
}

/* Queries, window keys, entries, index queries. */
static void prepare(struct pass *p, int32_t at, const struct model_layer *L,
                    const struct kern_window_store *store)
{
    struct model *m = p->m;
    const struct model_shape *s = &m->w->shape;
    const int f = L->ratio > 0; /* which rotation table */
    const bool overlaps = kern_kv_overlaps(L->ratio);
    const struct kern_heads_rope heads = {.q = m->s.q,
                                          .cos = m->s.cos[f],
                                          .sin = m->s.sin[f],
                                          .T = p->T,
                                          .H = s->H,
                                          .d = s->d,
                                          .rd = s->rd,
                                          .eps = s->norm_eps,
                                          .norm = true,
                                          .act = m->act};
    const struct kern_kv_prep kv = {.x = m->s.kv,
                                    .w = L->kv_norm,
                                    .cos = m->s.cos[f],
                                    .sin = m->s.sin[f],
                                    .y = m->s.kv,
                                    .T = p->T,
                                    .d = s->d,
                                    .rd = s->rd,
                                    .eps = s->norm_eps,
                                    .act = m->act};
    const struct kern_compress index_comp = compressor(p, at, &L->index_comp, true);
    struct kern_compress comp = compressor(p, at, &L->comp, false);
    const struct kern_index_query index = {.q = m->s.iq,
                                           .cos = m->s.cos[1],
                                           .sin = m->s.sin[1],
                                           .T = p->T,
                                           .H = s->index_heads,
                                           .w = s->index_dim,
                                           .rd = s->rd,
                                           .fmt = m->opt.ik_fmt,
                                           .act = m->act};
    if (overlaps) comp.also = &index_comp;
    OP(p, prepare, .heads = &heads, .kv = &kv, .store = store,
       .compress = L->ratio > 0 ? &comp : NULL, .index = overlaps ? &index : NULL);

    tap(p, at, "q", act_elem(m), m->s.q, (int64_t)s->H * s->d);
    tap(p, at, "kv", act_elem(m), m->s.kv, s->d);
    if (L->ratio > 0) {
        tap(p, at, "main.kv", MODEL_ELEM_F32, m->s.ckv, L->comp.wkv.n);
        tap(p, at, "main.gate", MODEL_ELEM_F32, m->s.cgate, L->comp.wgate.n);
    }
    if (!overlaps) return;
    tap(p, at, "index.kv", MODEL_ELEM_F32, m->s.ikv, L->index_comp.wkv.n);
    tap(p, at, "index.gate", MODEL_ELEM_F32, m->s.igate, L->index_comp.wgate.n);
    tap(p, at, "index_q", act_elem(m), m->s.iq, (int64_t)s->index_heads * s->index_dim);
    tap(p, at, "index_weights", act_elem(m), m->s.iwt, s->index_heads);
}

/* s.q -> s.y: attention, its output turned back, both output products. */
static struct kern_attend attend_of(struct pass *p, int32_t at, const struct model_layer *L)
{
    struct model *m = p->m;
    const struct model_shape *s = &m->w->shape;
    const bool select = kern_kv_overlaps(L->ratio);
    const int f = L->ratio > 0;
    const int64_t hd = (int64_t)s->H * s->d, low = (int64_t)s->o_groups * s->o_lora;
    return (struct kern_attend){
        .attention = {.q = m->s.q,
                      .kv = m->s.kv,
                      .sink = L->sink,
                      .o = m->s.o,
                      .pages = p->b->pages,
                      .layout = &m->layout,
                      .layer = at,
                      .seqs = p->b->seqs,
                      .n_seqs = p->b->n_seqs,
                      .selected = select ? m->s.selected : NULL,
                      .n_selected = select ? m->s.n_selected : NULL,
                      .sel_ld = m->opt.max_topk,
                      .T = p->T,
                      .H = s->H,
                      .scale = (float)(1.0 / sqrt((double)s->d)),
                      .act = m->act},
        .back = {.q = m->s.o,
                 .cos = m->s.cos[f],
                 .sin = m->s.sin[f],
                 .T = p->T,
                 .H = s->H,
                 .d = s->d,
                 .rd = s->rd,
                 .inverse = true,
                 .act = m->act},
        /* The one quantized weight whose input is not: the released model runs it as bf16. */
        .wo_a = {.x = m->s.o,
                 .w = L->wo_a,
                 .y = m->s.o_low,
                 .ld_x = hd,
                 .ld_y = low,
                 .T = p->T,
                 .N = s->o_lora,
                 .K = (int32_t)(hd / s->o_groups),
                 .groups = s->o_groups,
                 .x_dtype = m->act,
                 .y_dtype = m->act,
                 .aq = KERN_AQ_NONE,
                 .round_w = !m->opt.exact},
        .wo_b = product(p, m->s.o_low, m->act, &L->wo_b, m->s.y, m->act, p->T)};
}

/* The same, seen step by step. */
static void attend_apart(struct pass *p, int32_t at, const struct kern_attend *of)
{
    struct model *m = p->m;
    const struct kern_ops *ops = m->ops;
    const int64_t hd = of->wo_a.ld_x;
    if (p->rc == 0) p->rc = ops->attention(m->stream, &of->attention);
    tap(p, at, "o_raw", act_elem(m), m->s.o, hd);
    if (p->rc == 0) p->rc = ops->heads_rope(m->stream, &of->back);
    tap(p, at, "o", act_elem(m), m->s.o, hd);
    if (p->rc == 0) p->rc = ops->linear(m->stream, &of->wo_a);
    tap(p, at, "o_low", act_elem(m), m->s.o_low, of->wo_a.ld_y);
    if (p->rc == 0) p->rc = ops->linear(m->stream, &of->wo_b);
    tap(p, at, "attn_out", act_elem(m), m->s.y, m->w->shape.D);
}

/* s.x -> s.y; at = place in the layout. */
static void attention(struct pass *p, int32_t at, const struct model_layer *L)
{
    struct model *m = p->m;
    const bool alone = rows_are_alone(p->b);
    const struct kern_window_store store = {.kv = m->s.kv,
                                            .layout = &m->layout,
                                            .layer = at,
                                            .seqs = p->b->seqs,
                                            .n_seqs = p->b->n_seqs,
                                            .act = m->act};

    tap(p, at, "attn_x", act_elem(m), m->s.x, m->w->shape.D);
    attention_products(p, at, L);
    prepare(p, at, L, alone ? &store : NULL);
    if (kern_kv_overlaps(L->ratio)) indexer(p, at, L);
    const struct kern_attend of = attend_of(p, at, L);
    if (p->b->tap)
        attend_apart(p, at, &of);
    else if (p->rc == 0)
        p->rc = m->ops->attend(m->stream, &of);
    if (!alone && p->rc == 0) p->rc = m->ops->window_store(m->stream, &store);
    p->made = (struct made){NULL, m->s.y};
}

/* s.x -> s.routed and s.shared. */
static struct kern_ffn experts_of(struct pass *p, const struct model_layer *L)
{
    struct model *m = p->m;
    const struct model_shape *s = &m->w->shape;
    return (struct kern_ffn){
        .gate = product(p, m->s.x, m->act, &L->gate, m->s.gate, KERN_F32, p->T),
        .route = {.logits = m->s.gate,
                  .bias = L->gate_bias,
                  .tid2eid = L->tid2eid,
                  .tid_bytes = L->tid_bytes,
                  .ids = m->s.ids,
                  .T = p->T,
                  .E = s->E,
                  .k = s->k,
                  .V = s->V,
                  .scale = s->route_scale,
                  .normalize = s->norm_topk && s->score != KERN_SCORE_SOFTMAX,
                  .score_fn = s->score,
                  .experts = m->s.experts,
                  .weights = m->s.weights},
        .moe = {.x = m->s.x,
                .experts = m->s.experts,
                .weights = m->s.weights,
                .w1 = L->w1,
                .w2 = L->w2,
                .w3 = L->w3,
                .out = m->s.routed,
                .T = p->T,
                .D = s->D,
                .I = s->inter,
                .E = s->E,
                .k = s->k,
                .limit = s->swiglu_limit,
                .aq = aq_for(m, &L->w1[0]),
                .act = m->act},
        .w1 = product(p, m->s.x, m->act, &L->shared_w1, m->s.sg, m->act, p->T),
        .w3 = product(p, m->s.x, m->act, &L->shared_w3, m->s.su, m->act, p->T),
        .swiglu = {.g = m->s.sg,
                   .u = m->s.su,
                   .y = m->s.sg,
                   .T = p->T,
                   .I = s->inter,
                   .limit = s->swiglu_limit,
                   .act = m->act},
        .w2 = product(p, m->s.sg, m->act, &L->shared_w2, m->s.shared, m->act, p->T)};
}

/* Its ops one by one, with what a tap wants to see between. */
static void tapped_experts(struct pass *p, int32_t at, const struct model_layer *L)
{
    struct model *m = p->m;
    const struct model_shape *s = &m->w->shape;
    const struct kern_ops *ops = m->ops;
    const bool margin = p->b->tap->scores && !L->tid2eid;
    struct kern_ffn f = experts_of(p, L);
    f.route.margin = margin ? m->s.margin : NULL;

    tap(p, at, "ffn_x", act_elem(m), m->s.x, s->D);
    if (p->rc == 0) p->rc = ops->linear(m->stream, &f.gate);
    if (p->rc == 0) p->rc = ops->route(m->stream, &f.route);
    tap(p, at, "experts", MODEL_ELEM_I32, m->s.experts, s->k);
    tap(p, at, "expert_weights", MODEL_ELEM_F32, m->s.weights, s->k);
    if (margin) tap(p, at, "expert_margin", MODEL_ELEM_F32, m->s.margin, 1);
    if (p->rc == 0) p->rc = ops->moe(m->stream, &f.moe);
    tap(p, at, "routed_out", MODEL_ELEM_F32, m->s.routed, s->D);
    if (p->rc == 0) p->rc = ops->linear(m->stream, &f.w1);
    if (p->rc == 0) p->rc = ops->linear(m->stream, &f.w3);
    if (p->rc == 0) p->rc = ops->swiglu(m->stream, &f.swiglu);
    tap(p, at, "shared_act", act_elem(m), m->s.sg, s->inter);
    if (p->rc == 0) p->rc = ops->linear(m->stream, &f.w2);
    tap(p, at, "shared_out", act_elem(m), m->s.shared, s->D);
}

/* s.x -> s.routed + s.shared, with a tap s.y */
static void experts(struct pass *p, int32_t at, const struct model_layer *L)
{
    struct model *m = p->m;
    p->made = (struct made){m->s.routed, m->s.shared};
    if (!p->b->tap) {
        const struct kern_ffn f = experts_of(p, L);
        if (p->rc == 0) p->rc = m->ops->ffn(m->stream, &f);
        return;
    }
    tapped_experts(p, at, L);
    add_routed(p);
    tap(p, at, "ffn_out", act_elem(m), m->s.y, m->w->shape.D);
}

static void run_layer(struct pass *p, int32_t at, const struct model_layer *L)
{
    enter(p, at, &L->hc_attn, &L->attn_norm, "attn_collapsed");
    attention(p, at, L);
    leave(p, at, "streams_mid");
    enter(p, at, &L->hc_ffn, &L->ffn_norm, NULL);
    experts(p, at, L);
    leave(p, at, "hidden");
}

/* Logits of n neighbouring rows; of all, if the streams have something to take in. */
static void head_of(struct pass *p, const struct model_hc *hc, const struct kern_vec *norm,
                    int32_t row, int32_t n, float *logits)
{
    struct model *m = p->m;
    boundary(p, hc, norm, true, (uint8_t *)m->s.h + streams_bytes(m, row), n);
    linear_rows(p, m->s.x, m->act, &m->w->head, logits, KERN_F32, n);
}

/* Tokens from n neighbouring rows of logits, the batch's from i on; as many rows a call as have
 * room for their edits, which are put together while the device is still busy with the rows. */
static void draw_rows(struct pass *p, float *logits, int32_t i, int32_t n)
{
    struct model *m = p->m;
    struct staging *h = &m->h;
    const int32_t V = m->w->shape.V;
    struct model_draw *draws = p->b->draws ? p->b->draws + i : NULL;
    for (int32_t from = 0, k = 0; draws && from < n && p->rc == 0; from += k) {
        h->edits.n = 0;
        for (k = 0; k < HEAD_ROWS && from + k < n; k++)
            if (!model_edits_add(&h->edits, &draws[from + k], &h->sample_rows[k])) break;
        write_to(p, m->s.sample_rows, h->sample_rows, (size_t)k * sizeof *h->sample_rows);
        write_to(p, m->s.edits, h->edits.items, (size_t)h->edits.n * sizeof *h->edits.items);
        OP(p, sample, .logits = logits + (int64_t)from * V, .rows = m->s.sample_rows,
           .edits = m->s.edits, .choices = m->s.choices, .T = k, .V = V, .n_edits = h->edits.n);
        read_back(p, h->choices, m->s.choices, (size_t)k * sizeof *h->choices);
        for (int32_t r = 0; r < k && p->rc == 0; r++) draws[from + r].choice = h->choices[r];
    }
}

/* Where logits of the batch's rows i .. i + n - 1 are made. */
static float *logits_of(struct pass *p, int32_t i, int32_t n)
{
    struct model *m = p->m;
    const size_t row = (size_t)m->w->shape.V * sizeof(float), bytes = (size_t)n * row;
    if (!m->host) return m->s.logits;
    if (p->b->logits) return p->b->logits + (int64_t)i * m->w->shape.V;
    if (bytes > m->h.logits_bytes) {
        free(m->h.logits);
        m->h.logits = malloc(bytes);
        m->h.logits_bytes = m->h.logits ? bytes : 0;
        if (!m->h.logits && p->rc == 0) p->rc = TOW_ENOMEM;
    }
    return m->h.logits;
}

/* What the caller wants of them. */
static void use_logits(struct pass *p, float *logits, int32_t i, int32_t n)
{
    struct model *m = p->m;
    const int64_t V = m->w->shape.V;
    draw_rows(p, logits, i, n);
    if (!m->host && p->b->logits)
        read_back(p, p->b->logits + i * V, logits, (size_t)n * (size_t)V * sizeof *logits);
}

/* Logits of the rows asked for, run by run of neighbouring rows, so that no gather is needed. */
static void head(struct pass *p, const struct model_hc *hc, const struct kern_vec *norm)
{
    struct model *m = p->m;
    const struct model_batch *b = p->b;
    const int32_t most = m->host ? b->n_logit_rows : HEAD_ROWS;
    settle(p);
    for (int32_t i = 0; i < b->n_logit_rows;) {
        int32_t n = 1, row = b->logit_rows[i];
        while (n < most && i + n < b->n_logit_rows && b->logit_rows[i + n] == row + n) n++;
        float *logits = logits_of(p, i, n);
        head_of(p, hc, norm, row, n, logits);
        use_logits(p, logits, i, n);
        i += n;
    }
}

/* The table must reach the last row, and name pages of the pool as far. */
static int check_pages(const struct model *m, const struct model_batch *b, int32_t i,
                       struct tow_err *err)
{
    const struct kern_seq *q = &b->seqs[i];
    int64_t n = kern_kv_pages_for(q->pos0 + q->n_rows, m->layout.page_tokens);
    if (q->shadowed && m->layout.shadow_bytes == 0)
        return tow_fail(err, TOW_EINVAL, "batch: sequence %d: this layout has no companion pages",
                        i);
    if (q->shadowed) n *= 2;
    if (n > q->n_pages)
        return tow_fail(err, TOW_EINVAL, "batch: sequence %d: %d pages hold less than %lld tokens",
                        i, q->n_pages, (long long)(q->pos0 + q->n_rows));
    for (int64_t p = 0; p < n; p++)
        if (q->page_ids[p] >= b->n_pages)
            return tow_fail(err, TOW_EINVAL,
                            "batch: sequence %d: page %lld has id %u; the pool has ids below %u", i,
                            (long long)p, q->page_ids[p], b->n_pages);
    return 0;
}

static int check_capture(const struct model_batch *b, int32_t i, struct tow_err *err)
{
    const struct model_capture *c = b->captures[i];
    if (!c) return 0;
    if (c->n_entries < 1 || c->n_entries > MODEL_CAPTURE_ENTRIES)
        return tow_fail(err, TOW_EINVAL,
                        "batch: sequence %d: %d entries to rank; 1 to %d are possible", i,
                        c->n_entries, MODEL_CAPTURE_ENTRIES);
    for (int32_t e = 0; e < c->n_entries; e++)
        if (c->entries[e] < 0 || (e && c->entries[e] <= c->entries[e - 1]))
            return tow_fail(err, TOW_EINVAL,
                            "batch: sequence %d: entries to rank are not ascending", i);
    if (c->shadow >> KERN_SHADOWS || (c->shadow && !b->seqs[i].shadowed))
        return tow_fail(err, TOW_EINVAL,
                        "batch: sequence %d: shadow keys asked for, but it keeps none", i);
    return 0;
}

static int check_layers(const struct model *m, const struct model_batch *b, struct tow_err *err)
{
    const int32_t first = b->first_layer, last = b->last_layer, n = m->w->shape.n_layers;
    if (first == 0 && last == 0) return 0;
    if (first < 0 || first >= last || last > n)
        return tow_fail(err, TOW_EINVAL,
                        "batch: layers %d up to %d: must be a part of 0 up to %d, or both 0", first,
                        last, n);
    if (first > 0 && !b->streams_in)
        return tow_fail(err, TOW_EINVAL, "batch: layers from %d on need streams_in", first);
    return 0;
}

static int check_batch(const struct model *m, const struct model_batch *b, struct tow_err *err)
{
    int32_t row = 0;
    int rc = check_layers(m, b, err);
    if (rc < 0) return rc;
    if (b->T < 0 || b->T > m->opt.max_rows)
        return tow_fail(err, TOW_EINVAL, "batch: %d rows, at most %d", b->T, m->opt.max_rows);
    for (int32_t i = 0; i < b->n_seqs; i++) {
        const struct kern_seq *q = &b->seqs[i];
        if (q->row0 != row || q->n_rows < 1 || q->pos0 < 0 || q->pos0 > INT32_MAX - q->n_rows)
            return tow_fail(err, TOW_EINVAL,
                            "batch: sequence %d: rows %d+%d at position %lld are not in order", i,
                            q->row0, q->n_rows, (long long)q->pos0);
        if (q->topk < 1 || q->topk > m->opt.max_topk)
            return tow_fail(err, TOW_EINVAL, "batch: sequence %d: index_topk %d is not in 1..%d", i,
                            q->topk, m->opt.max_topk);
        if ((rc = check_pages(m, b, i, err)) < 0) return rc;
        if (b->captures && (rc = check_capture(b, i, err)) < 0) return rc;
        row += q->n_rows;
    }
    if (row != b->T)
        return tow_fail(err, TOW_EINVAL, "batch: sequences cover %d of %d rows", row, b->T);
    if (b->n_logit_rows > 0 && !b->logits && !b->draws)
        return tow_fail(err, TOW_EINVAL, "batch: %d logit rows, but neither logits nor draws",
                        b->n_logit_rows);
    for (int32_t i = 0; i < b->n_logit_rows; i++)
        if (b->logit_rows[i] < 0 || b->logit_rows[i] >= b->T ||
            (i && b->logit_rows[i] <= b->logit_rows[i - 1]))
            return tow_fail(err, TOW_EINVAL, "batch: logit row %d is not in order",
                            b->logit_rows[i]);
    return 0;
}

/* Tells the device what the pass is about. */
static void begin(struct pass *p)
{
    struct model *m = p->m;
    const size_t bytes = (size_t)p->T * sizeof(int32_t);
    for (int32_t i = 0; i < p->b->n_seqs; i++)
        for (int32_t r = 0; r < p->b->seqs[i].n_rows; r++)
            m->h.pos[p->b->seqs[i].row0 + r] = (int32_t)(p->b->seqs[i].pos0 + r);
    p->rc = kern_stream_batch(m->stream, p->b->seqs, p->b->n_seqs);
    if (p->rc == 0) p->rc = kern_stream_write(m->stream, m->s.pos, m->h.pos, bytes);
    if (p->rc == 0 && p->b->ids) p->rc = kern_stream_write(m->stream, m->s.ids, p->b->ids, bytes);
}

static void rotation_tables(struct pass *p)
{
    struct model *m = p->m;
    for (int f = 0; f < 2; f++)
        OP(p, rope_table, .pos = m->s.pos, .inv_freq = m->inv_freq[f], .cos = m->s.cos[f],
           .sin = m->s.sin[f], .T = p->T, .rd = m->w->shape.rd);
}

static int finish(struct pass *p, struct tow_err *err)
{
    if (p->rc == 0) p->rc = kern_stream_sync(p->m->stream);
    (void)kern_stream_batch(p->m->stream, NULL, 0);
    const char *why = kern_dev_why(p->m->dev);
    if (p->rc < 0)
        return tow_fail(err, p->rc, "forward pass: %s%s%s", tow_err_text(p->rc), *why ? ": " : "",
                        why);
    return 0;
}

/* A step of decode: one row of each sequence, all sampled, nothing looked at on the way. Its
 * launches depend on the number of rows alone. */
static bool is_step(const struct model *m, const struct model_batch *b)
{
    if (m->host || b->tap || b->captures || b->streams_in || b->first_layer != b->last_layer)
        return false;
    return b->T <= HEAD_ROWS && b->n_seqs == b->T && b->n_logit_rows == b->T;
}

static int run_step(void *arg)
{
    struct pass *p = arg;
    struct model *m = p->m;
    const struct model_shape *s = &m->w->shape;
    rotation_tables(p);
    OP(p, embed, .ids = m->s.ids, .w = m->w->embed, .out = m->s.h, .T = p->T, .hc = s->hc,
       .act = m->act);
    for (int32_t i = 0; i < s->n_layers; i++) run_layer(p, i, &m->w->layers[i]);
    head_of(p, &m->w->hc_head, &m->w->norm, 0, p->T, m->s.logits);
    return p->rc;
}

static void step(struct pass *p)
{
    struct model *m = p->m;
    /* What the launches depend on: T, which is at most HEAD_ROWS and so fits eight bits, and the
     * pool. */
    const uint64_t key = (uint64_t)p->T | (uint64_t)(uintptr_t)p->b->pages << 8;
    if (p->rc == 0) p->rc = kern_stream_repeat(m->stream, key, run_step, p);
    use_logits(p, m->s.logits, 0, p->T);
}

/* The position reached, to each sequence's tail; the MTP block's goes on from what is there. */
static int set_tails(struct model *m, const struct model_batch *b)
{
    int rc = 0;
    for (int32_t i = 0; i < b->n_seqs && rc == 0; i++) {
        const struct kern_seq *q = &b->seqs[i];
        struct kern_kv_tail_head head = {KERN_KV_TAIL_MAGIC, q->pos0 + q->n_rows, 0, 0};
        if (q->pos0 > 0 && m->opt.mtp) {
            struct kern_kv_tail_head old;
            rc = kern_stream_read(m->stream, &old, q->tail, sizeof old);
            if (rc == 0 && old.magic == KERN_KV_TAIL_MAGIC) head.mtp_pos = old.mtp_pos;
        }
        if (rc == 0) rc = kern_stream_write(m->stream, q->tail, &head, sizeof head);
    }
    return rc;
}

/* The streams that the caller gives, instead of what the last pass left. */
static void take_streams(struct pass *p)
{
    struct model *m = p->m;
    if (p->rc == 0)
        p->rc = kern_stream_write(m->stream, m->s.h, p->b->streams_in, streams_bytes(m, p->T));
}

int model_forward(struct model *m, const struct model_batch *b, struct tow_err *err)
{
    const struct model_shape *s = &m->w->shape;
    struct pass p = {.m = m, .b = b, .T = b->T};
    int rc = check_batch(m, b, err);
    if (rc < 0 || b->T == 0) return rc;
    bool part = b->first_layer != b->last_layer;
    int32_t first = part ? b->first_layer : 0, last = part ? b->last_layer : s->n_layers;

    begin(&p);
    if (is_step(m, b)) {
        step(&p);
        if (p.rc == 0) p.rc = set_tails(m, b);
        return finish(&p, err);
    }
    rotation_tables(&p);
    if (b->streams_in)
        take_streams(&p);
    else
        OP(&p, embed, .ids = m->s.ids, .w = m->w->embed, .out = m->s.h, .T = b->T, .hc = s->hc,
           .act = m->act);
    for (int32_t i = first; i < last; i++) run_layer(&p, i, &m->w->layers[i]);
    head(&p, &m->w->hc_head, &m->w->norm);
    if (p.rc == 0) p.rc = set_tails(m, b);
    return finish(&p, err);
}

int model_mtp(struct model *m, const struct model_batch *b, struct tow_err *err)
{
    const struct model_shape *s = &m->w->shape;
    struct pass p = {.m = m, .b = b, .T = b->T};
    if (!m->opt.mtp) return tow_fail(err, TOW_EINVAL, "mtp: the model was opened without it");
    int rc = check_batch(m, b, err);
    if (rc < 0 || b->T == 0) return rc;
    const struct model_mtp *w = &m->w->mtp[0];

    begin(&p);
    rotation_tables(&p);
    if (b->streams_in) take_streams(&p);
    OP(&p, embed, .ids = m->s.ids, .w = m->w->embed, .out = m->s.x, .T = b->T, .hc = 1,
       .act = m->act);
    rmsnorm(&p, m->s.x, &w->enorm, m->s.x, b->T);
    linear(&p, m->s.x, &w->e_proj, m->s.y);
    rmsnorm(&p, m->s.h, &w->hnorm, m->s.mtp_in, b->T * s->hc);
    linear_rows(&p, m->s.mtp_in, m->act, &w->h_proj, m->s.h, m->act, b->T * s->hc);
    OP(&p, mtp_mix, .e = m->s.y, .g = m->s.h, .out = m->s.h, .T = b->T, .hc = s->hc, .D = s->D,
       .act = m->act);
    run_layer(&p, s->n_layers, &m->w->layers[s->n_layers]);
    head(&p, &w->hc_head, &w->norm);
    for (int32_t i = 0; i < b->n_seqs && p.rc == 0; i++) {
        struct kern_kv_tail_head at;
        p.rc = kern_stream_read(m->stream, &at, b->seqs[i].tail, sizeof at);
        at = (struct kern_kv_tail_head){KERN_KV_TAIL_MAGIC, at.pos,
                                        b->seqs[i].pos0 + b->seqs[i].n_rows, 0};
        if (p.rc == 0) p.rc = kern_stream_write(m->stream, b->seqs[i].tail, &at, sizeof at);
    }
    return finish(&p, err);
}

/* ------------------------------------------------------------------ warming up */

/* A pass over pages that hold nothing: every page of every sequence is the first of the pool. */
struct rehearsal {
    struct model *m;
    uint8_t *pages, *tails; /* device, borrowed */
    int32_t *ids, *rows;    /* owned, as the rest */
    uint32_t *table;
    struct kern_seq *seqs;
    struct model_draw *draws;
    const struct model_capture **captures;
};

static void on_rehearsed(void *ctx, const struct model_capture_row *row)
{
    (void)ctx, (void)row;
}

static int rehearsal_open(struct rehearsal *r, struct model *m, int32_t n_seqs, int32_t T,
                          int64_t context, struct tow_err *err)
{
    /* Twice: a shadowed sequence has companions. */
    const size_t n_pages = 2 * (size_t)kern_kv_pages_for(context, m->layout.page_tokens);
    *r = (struct rehearsal){.m = m,
                            .ids = calloc((size_t)T, sizeof *r->ids),
                            .rows = calloc((size_t)n_seqs, sizeof *r->rows),
                            .table = calloc(n_pages, sizeof *r->table),
                            .seqs = calloc((size_t)n_seqs, sizeof *r->seqs),
                            .draws = calloc((size_t)n_seqs, sizeof *r->draws),
                            .captures = calloc((size_t)n_seqs, sizeof *r->captures)};
    return r->ids && r->rows && r->table && r->seqs && r->draws && r->captures
               ? 0
               : tow_fail(err, TOW_ENOMEM, "model: no memory for a pass of %d rows", T);
}
static void rehearsal_close(struct rehearsal *r)
{
    free(r->ids);
    free(r->rows);
    free(r->table);
    free(r->seqs);
    free(r->draws);
    free(r->captures);
}

/* n_seqs sequences of n_rows rows that end at context. A pass that is no step is never kept as a
 * graph. */
static int rehearse(struct rehearsal *r, int32_t n_seqs, int32_t n_rows, int64_t context,
                    const struct model_capture *capture, bool step, struct tow_err *err)
{
    const struct model *m = r->m;
    const bool shadowed = capture && capture->shadow;
    const int64_t n_pages = kern_kv_pages_for(context, m->layout.page_tokens);
    for (int32_t i = 0; i < n_seqs; i++) {
        r->rows[i] = (i + 1) * n_rows - 1;
        r->captures[i] = capture;
        r->seqs[i] = (struct kern_seq){.row0 = i * n_rows,
                                       .n_rows = n_rows,
                                       .pos0 = context - n_rows,
                                       .page_ids = r->table,
                                       .n_pages = (int32_t)(shadowed ? 2 * n_pages : n_pages),
                                       .tail = r->tails + i * m->layout.tail_bytes,
                                       .topk = m->opt.max_topk,
                                       .shadowed = shadowed};
    }
    const struct model_batch b = {.ids = r->ids,
                                  .T = n_seqs * n_rows,
                                  .seqs = r->seqs,
                                  .n_seqs = n_seqs,
                                  .pages = r->pages,
                                  .n_pages = 1,
                                  .logit_rows = r->rows,
                                  .n_logit_rows = n_seqs,
                                  .draws = r->draws,
                                  .captures = capture ? r->captures : NULL,
                                  .last_layer = step ? 0 : m->w->shape.n_layers};
    return model_forward(r->m, &b, err);
}

/* Scratch of an op is bounded by its rows, in proportion or less, with other bounds for other
 * ranges of rows (few, many). It has a quarter more than was asked for, so that steps of a quarter
 * meet all. */
static int32_t next_count(int32_t n, int32_t most)
{
    const int32_t next = n < 4 ? n + 1 : n + n / 4;
    return n < most && next > most ? most : next;
}

static int warm_counts(struct rehearsal *r, const struct model_warm *w, struct tow_err *err)
{
    const bool chunks = w->n_rows > 1;
    const int32_t most = chunks ? w->n_rows : w->n_seqs;
    int rc = 0;
    for (int32_t n = 1; n <= most && rc == 0; n = next_count(n, most))
        rc = rehearse(r, chunks ? 1 : n, chunks ? n : 1, n, NULL, false, err);
    return rc;
}

/* The largest pass at the last position, and one row there. */
static int warm_context(struct rehearsal *r, const struct model_warm *w, struct tow_err *err)
{
    const int rc = rehearse(r, w->n_seqs, w->n_rows, w->context, NULL, false, err);
    return rc < 0 ? rc : rehearse(r, 1, 1, w->context, NULL, false, err);
}

/* Ranks are computed row by row: a few captured rows take what many take. */
static int warm_captures(struct rehearsal *r, const struct model_warm *w, struct tow_err *err)
{
    enum { ROWS = 2 };
    struct model *m = r->m;
    int32_t entries[MODEL_CAPTURE_ENTRIES];
    struct model_capture c = {.entries = entries,
                              .n_entries = MODEL_CAPTURE_ENTRIES,
                              .lists = true,
                              .on_row = on_rehearsed};
    for (int32_t i = 0; i < MODEL_CAPTURE_ENTRIES; i++) entries[i] = i;
    const int32_t n = w->n_seqs < ROWS ? w->n_seqs : ROWS;
    m->n_scores = w->context / 4 * w->n_seqs;
    m->scores = kern_dev_alloc(m->dev, (size_t)(m->n_scores + 1) * sizeof *m->scores);
    if (!m->scores) {
        m->n_scores = 0;
        return tow_fail(err, TOW_ENOMEM, "model: no device memory for scores of %d captures",
                        w->n_seqs);
    }
    int rc = rehearse(r, n, w->n_rows, w->context, &c, false, err);
    if (rc < 0 || m->layout.shadow_bytes == 0) return rc;
    c.shadow = (1u << KERN_SHADOWS) - 1;
    return rehearse(r, n, w->n_rows, w->context, &c, false, err);
}

static int32_t largest_step(int32_t n_seqs)
{
    return n_seqs < HEAD_ROWS ? n_seqs : HEAD_ROWS;
}

/* What the graphs of all steps will take: several are made and forgotten, since the driver takes
 * memory in pieces of megabytes. */
static int measure_graphs(struct rehearsal *r, int32_t n_seqs, uint64_t *bytes, struct tow_err *err)
{
    enum { TRIED = 16, PIECE = 8 << 20 };
    struct kern_dev *dev = r->m->dev;
    const int32_t most = largest_step(n_seqs), tried = most < TRIED ? most : TRIED;
    int rc = 0;
    for (int32_t n = most - tried + 1; n <= most && rc == 0; n++)
        rc = rehearse(r, n, 1, 1, NULL, true, err);
    const uint64_t before = kern_dev_free_bytes(dev);
    for (int32_t n = most - tried + 1; n <= most && rc == 0; n++)
        rc = rehearse(r, n, 1, 1, NULL, true, err);
    const uint64_t after = kern_dev_free_bytes(dev);
    kern_stream_forget(r->m->stream);
    *bytes = ((before > after ? before - after : 0) + PIECE) * (uint64_t)most / (uint64_t)tried;
    return rc;
}

int model_warm(struct model *m, const struct model_warm *w, uint64_t *later, struct tow_err *err)
{
    struct rehearsal r = {0};
    *later = 0;
    if (m->host) return 0;
    int rc = rehearsal_open(&r, m, w->n_seqs, w->n_seqs * w->n_rows, w->context, err);
    r.pages = kern_dev_alloc(m->dev, (size_t)m->layout.page_bytes);
    r.tails = kern_dev_alloc(m->dev, (size_t)w->n_seqs * (size_t)m->layout.tail_bytes);
    if (rc == 0 && (!r.pages || !r.tails))
        rc = tow_fail(err, TOW_ENOMEM, "model: no device memory for %d tails", w->n_seqs);
    /* The most first: what lists of sequences take has twice the room that was asked for first,
     * which is what shadowed ones need. */
    if (rc == 0) rc = warm_context(&r, w, err);
    if (rc == 0) rc = warm_counts(&r, w, err);
    if (rc == 0) rc = warm_captures(&r, w, err);
    if (rc == 0) rc = measure_graphs(&r, w->n_seqs, later, err);
    kern_dev_free(m->dev, r.pages);
    kern_dev_free(m->dev, r.tails);
    rehearsal_close(&r);
    return rc;
}

int model_warm_steps(struct model *m, int32_t n_seqs, uint8_t *pages, uint8_t *tails,
                     struct tow_err *err)
{
    struct rehearsal r = {0};
    const int32_t most = largest_step(n_seqs);
    if (m->host) return 0;
    int rc = rehearsal_open(&r, m, most, most, 1, err);
    r.pages = pages;
    r.tails = tails;
    /* The second time it becomes a graph, and runs as one. */
    for (int32_t n = 1; n <= most; n++)
        for (int i = 0; i < 2 && rc == 0; i++) rc = rehearse(&r, n, 1, 1, NULL, true, err);
    rehearsal_close(&r);
    return rc;
}
