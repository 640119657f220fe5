/* ctl/numerics.c - see numerics.h. The model is opened once; a pass over the sample prompt captures
 * the activations that the sections need; each section then drives single ops, or whole passes, and
 * adds its rows. The layers audited are the first, the middle and the last of each kind (no
 * compressor, overlapping, dense): faults of a kernel or a format do not choose a layer, and a
 * large checkpoint stays a matter of minutes. */
#include "deploy/ctl/numerics_impl.h"
#include "deploy/ctl/sequence.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/text/tokenizer.h"
#include "kernels/numeric.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEFAULT_TOKENS = 1024, CHUNK = 256, SEED = 20240607 };

/* ------------------------------------------------------------------ memory, rows */

void *ctl_num_hold(struct ctl_num *c, int64_t n, size_t elem)
{
    void **more = realloc(c->held, (c->n_held + 1) * sizeof *more);
    void *p = kern_dev_alloc(c->dev, (n > 0 ? (size_t)n : 1) * elem);
    if (more) c->held = more;
    if (!more || !p) {
        kern_dev_free(c->dev, p);
        c->no_memory = true;
        return NULL;
    }
    c->held[c->n_held++] = p;
    return p;
}

size_t ctl_num_mark(const struct ctl_num *c)
{
    return c->n_held;
}

void ctl_num_release(struct ctl_num *c, size_t mark)
{
    while (c->n_held > mark) kern_dev_free(c->dev, c->held[--c->n_held]);
}

double ctl_num_random(struct ctl_num *c)
{
    c->rng ^= c->rng << 13, c->rng ^= c->rng >> 7, c->rng ^= c->rng << 17;
    return (double)(int32_t)(c->rng >> 32) * 0x1p-31;
}

static void add_row(struct ctl_num *c, const char *name, double value, double bound, bool at_least,
                    const char *what, const char *meaning, const char *fmt, va_list ap)
{
    struct ctl_numerics_report *r = c->out;
    if (r->n_rows == CTL_NUMERICS_MAX_ROWS) return;
    struct ctl_numerics_row *row = &r->rows[r->n_rows++];
    *row = (struct ctl_numerics_row){.value = value,
                                     .bound = bound,
                                     .at_least = at_least,
                                     .pass = at_least ? value >= bound : value <= bound,
                                     .what = what,
                                     .meaning = meaning};
    snprintf(row->name, sizeof row->name, "%s", name);
    vsnprintf(row->detail, sizeof row->detail, fmt, ap);
    if (!row->pass) r->n_failed++;
}

void ctl_num_row(struct ctl_num *c, const char *name, double value, double bound, const char *what,
                 const char *meaning, const char *detail_fmt, ...)
{
    va_list ap;
    va_start(ap, detail_fmt);
    add_row(c, name, value, bound, false, what, meaning, detail_fmt, ap);
    va_end(ap);
}

void ctl_num_row_at_least(struct ctl_num *c, const char *name, double value, double bound,
                          const char *what, const char *meaning, const char *detail_fmt, ...)
{
    va_list ap;
    va_start(ap, detail_fmt);
    add_row(c, name, value, bound, true, what, meaning, detail_fmt, ap);
    va_end(ap);
}

/* ------------------------------------------------------------------ the sample prompt */

/* Lines of settings, addresses and sentences from a few words: the kind of context in which facts
 * are looked up, and long enough for any length asked. */
static int text_of_sample(struct ctl_num *c, char **out, size_t *len)
{
    static const char *const words[] = {"harbor", "amber",  "signal", "ledger", "orchid", "granite",
                                        "copper", "meadow", "falcon", "violet", "anchor", "summit"};
    const size_t cap = (size_t)c->T * 16 + 256;
    char *text = malloc(cap + 128);
    size_t at = 0;
    if (!text) return TOW_ENOMEM;
    for (int line = 1; at < cap; line++) {
        unsigned r = (unsigned)((ctl_num_random(c) + 1) * 1e6);
        const char *a = words[r % 12], *b = words[r / 12 % 12];
        int n = line % 3 == 0 ? snprintf(text + at, 128, "%s_%s_timeout = %u\n", a, b, r % 9973)
                : line % 3 == 1
                    ? snprintf(text + at, 128, "The code of the %s %s is %u.\n", a, b, r % 99991)
                    : snprintf(text + at, 128, "%d. %s: { port: %u, zone: \"%s-%u\" }\n", line, a,
                               1024 + r % 60000, b, r % 17);
        at += (size_t)n;
    }
    *out = text;
    *len = at;
    return 0;
}

static int tokens_of_text(struct ctl_num *c, const char *path, struct tow_err *err)
{
    struct text_tokenizer *tok = NULL;
    struct text_ids ids = {0};
    char *text = NULL;
    size_t len = 0;
    int rc = text_tokenizer_load(&tok, path, err);
    if (rc == 0 && (rc = text_of_sample(c, &text, &len)) < 0)
        tow_fail(err, rc, "numerics: no memory for the sample prompt");
    if (rc == 0) {
        const struct text_segment seg = {.bytes = text, .len = len};
        rc = text_tokenizer_encode(tok, &seg, 1, len + 1, &ids, NULL, err);
    }
    if (rc == 0 && ids.n < (size_t)c->T)
        rc = tow_fail(err, TOW_EFORMAT, "%s: %zu bytes of sample text gave %zu tokens, %d wanted",
                      path, len, ids.n, c->T);
    for (int32_t i = 0; rc == 0 && i < c->T; i++) {
        if ((int64_t)ids.ids[i] >= c->s->V)
            rc = tow_fail(err, TOW_EFORMAT, "%s: gave token %lld; the model has %d", path,
                          (long long)ids.ids[i], c->s->V);
        c->prompt[i] = (int32_t)ids.ids[i];
    }
    text_ids_fini(&ids);
    text_tokenizer_free(tok);
    free(text);
    return rc;
}

static int make_prompt(struct ctl_num *c, struct tow_err *err)
{
    char path[4096];
    c->prompt = ctl_num_hold(c, c->T, sizeof *c->prompt);
    if (!c->prompt) return tow_fail(err, TOW_ENOMEM, "numerics: no memory");
    snprintf(path, sizeof path, "%s/tokenizer.json", c->n->model_dir);
    if (access(path, R_OK) == 0) {
        c->out->sample_is_text = true;
        return tokens_of_text(c, path, err);
    }
    for (int32_t i = 0; i < c->T; i++)
        c->prompt[i] = (int32_t)((ctl_num_random(c) + 1) / 2 * c->s->V) % c->s->V;
    return 0;
}

/* ------------------------------------------------------------------ capture */

static void choose_layers(struct ctl_num *c)
{
    bool chosen[MODEL_MAX_LAYERS] = {false};
    for (int kind = 0; kind < 3; kind++) {
        int32_t of_kind[MODEL_MAX_LAYERS], n = 0;
        for (int32_t i = 0; i < c->s->n_layers; i++) {
            int32_t r = c->s->ratios[i];
            if (kind == (r == 0 ? 0 : kern_kv_overlaps(r) ? 1 : 2)) of_kind[n++] = i;
        }
        for (int j = 0; n > 0 && j < CTL_NUM_LAYERS; j++)
            chosen[of_kind[(n - 1) * j / (CTL_NUM_LAYERS - 1)]] = true;
    }
    for (int32_t i = 0; i < c->s->n_layers; i++)
        if (chosen[i]) c->layers[c->n_layers++] = i;
}

static int list_tensors(struct ctl_num *c, struct tow_err *err)
{
    static const struct {
        const char *name;
        bool all;
        int kind; /* 0 every layer, 1 with a compressor, 2 with an indexer */
    } wanted[] = {{"attn_x", false, 0},      {"qr", true, 2},
                  {"q", false, 1},           {"kv", false, 1},
                  {"qr", false, 0},          {"o_low", false, 0},
                  {"o", false, 0},           {"index_weights", true, 2},
                  {"index.kv", true, 2},     {"index.gate", true, 2},
                  {"main.kv", true, 1},      {"main.gate", true, 1},
                  {"streams_mid", false, 0}, {"ffn_x", false, 0},
                  {"experts", false, 0},     {"expert_weights", false, 0},
                  {"shared_act", false, 0},  {"shared_out", false, 0},
                  {"ffn_out", false, 0}};
    const int32_t n = sizeof wanted / sizeof *wanted;
    c->tensors = calloc((size_t)(n * c->n_layers), sizeof *c->tensors);
    if (!c->tensors) return tow_fail(err, TOW_ENOMEM, "numerics: no memory");
    for (int32_t i = 0; i < c->n_layers; i++)
        for (int32_t j = 0; j < n; j++) {
            int32_t r = c->s->ratios[c->layers[i]];
            if (wanted[j].kind == 1 && r == 0) continue;
            if (wanted[j].kind == 2 && !kern_kv_overlaps(r)) continue;
            c->tensors[c->n_tensors++] = (struct ctl_num_tensor){
                .layer = c->layers[i], .name = wanted[j].name, .all = wanted[j].all};
        }
    return 0;
}

static int64_t first_row(const struct ctl_num *c, const struct ctl_num_tensor *t)
{
    return t->all ? 0 : c->T - c->n_last;
}

static int64_t row_bytes(const struct ctl_num_tensor *t)
{
    return t->width * (t->elem == MODEL_ELEM_BF16 ? 2 : 4);
}

static void on_tensor(void *ctx, int32_t layer, const char *name, enum model_elem elem,
                      const void *data, int64_t rows, int64_t width)
{
    struct ctl_num *c = ctx;
    for (int32_t i = 0; i < c->n_tensors; i++) {
        struct ctl_num_tensor *t = &c->tensors[i];
        if (t->layer != layer || strcmp(t->name, name) != 0) continue;
        if (!t->data) {
            t->elem = elem;
            t->width = width;
            t->data = kern_dev_alloc(c->dev, (size_t)((c->T - first_row(c, t)) * row_bytes(t)));
            if (!t->data) c->no_memory = true;
        }
        int64_t from = first_row(c, t) - c->chunk_pos0, at = c->chunk_pos0 - first_row(c, t);
        if (from < 0) from = 0;
        if (t->data && from < rows)
            memcpy(t->data + (at + from) * row_bytes(t),
                   (const uint8_t *)data + from * row_bytes(t),
                   (size_t)((rows - from) * row_bytes(t)));
    }
}

const struct ctl_num_tensor *ctl_num_find(const struct ctl_num *c, int32_t layer, const char *name,
                                          int64_t *first)
{
    const struct ctl_num_tensor *found = NULL;
    for (int32_t i = 0; i < c->n_tensors; i++) {
        const struct ctl_num_tensor *t = &c->tensors[i];
        if (t->layer != layer || strcmp(t->name, name) != 0 || !t->data) continue;
        if (!found || t->all) found = t; /* the whole one, if it was kept twice */
    }
    if (found && first) *first = first_row(c, found);
    return found;
}

const void *ctl_num_row_of(const struct ctl_num *c, const struct ctl_num_tensor *t, int64_t pos)
{
    return t->data + (pos - first_row(c, t)) * row_bytes(t);
}

double ctl_num_at(const struct ctl_num *c, const struct ctl_num_tensor *t, int64_t pos, int64_t i)
{
    const uint8_t *row = ctl_num_row_of(c, t, pos);
    if (t->elem == MODEL_ELEM_BF16)
        return kern_bf16_decode(((const uint16_t *)(const void *)row)[i]);
    if (t->elem == MODEL_ELEM_I32) return ((const int32_t *)(const void *)row)[i];
    return ((const float *)(const void *)row)[i];
}

/* One pass over the prompt in chunks, for the taps alone. */
static int capture(struct ctl_num *c, struct tow_err *err)
{
    const struct kern_kv_layout *l = model_peek_layout(c->m);
    const int32_t n_pages = (int32_t)kern_kv_pages_for(c->T, l->page_tokens);
    const size_t mark = ctl_num_mark(c);
    uint8_t *pages = ctl_num_hold(c, n_pages, (size_t)l->page_bytes);
    uint8_t *tail = ctl_num_hold(c, 1, (size_t)l->tail_bytes);
    uint32_t *ids = ctl_num_hold(c, n_pages, sizeof *ids);
    struct model_tap tap = {.on_tensor = on_tensor, .ctx = c};
    int rc =
        c->no_memory ? tow_fail(err, TOW_ENOMEM, "numerics: no memory for %d pages", n_pages) : 0;
    for (int32_t i = 0; rc == 0 && i < n_pages; i++) ids[i] = (uint32_t)i;
    for (int64_t at = 0; rc == 0 && at < c->T; at += CHUNK) {
        int32_t n = c->T - at < CHUNK ? (int32_t)(c->T - at) : CHUNK;
        struct kern_seq q = {.n_rows = n,
                             .pos0 = at,
                             .page_ids = ids,
                             .n_pages = n_pages,
                             .tail = tail,
                             .topk = model_peek_options(c->m)->index_topk};
        struct model_batch b = {.ids = c->prompt + at,
                                .T = n,
                                .seqs = &q,
                                .n_seqs = 1,
                                .pages = pages,
                                .n_pages = (uint32_t)n_pages,
                                .tap = &tap};
        c->chunk_pos0 = at;
        rc = model_forward(c->m, &b, err);
    }
    if (rc == 0 && c->no_memory)
        rc = tow_fail(err, TOW_ENOMEM, "numerics: no memory for a capture");
    ctl_num_release(c, mark);
    return rc;
}

int ctl_num_layout(const struct ctl_num *c, struct kern_kv_layout *l, enum kern_kv_fmt kv,
                   enum kern_ik_fmt ik, struct tow_err *err)
{
    struct kern_kv_spec spec = model_peek_layout(c->m)->spec;
    spec.kv_fmt = kv;
    spec.ik_fmt = ik;
    return kern_kv_layout_init(l, &spec, err);
}

/* ------------------------------------------------------------------ the run */

static int open_all(struct ctl_num *c, struct tow_err *err)
{
    const struct ctl_numerics *n = c->n;
    char device[CTL_DEVICE_CHARS];
    const struct model_options opt = {.device = ctl_host_device(device, n->device),
                                      .n_threads = n->n_threads,
                                      .kv_fmt = KERN_KV_FP8,
                                      .ik_fmt = KERN_IK_FP4,
                                      .expert_aq = KERN_AQ_A128,
                                      .max_rows = CHUNK,
                                      .wrap_ops = n->wrap_ops};
    int rc = model_open(&c->m, n->model_dir, &opt, err);
    if (rc < 0) return rc;
    c->w = model_peek_weights(c->m);
    c->s = &c->w->shape;
    c->dev = model_peek_dev(c->m);
    c->ops = n->wrap_ops ? n->wrap_ops(kern_dev_ops(c->dev)) : kern_dev_ops(c->dev);
    c->stream = kern_dev_stream(c->dev);
    c->T = n->n_tokens ? n->n_tokens : DEFAULT_TOKENS;
    /* A few rows whose whole window is kept too. */
    c->n_last = c->s->window + CTL_NUM_ROWS;
    if (c->T < c->n_last)
        return tow_fail(err, TOW_EINVAL, "--tokens %d: must be at least %d, the window and %d more",
                        c->T, c->n_last, CTL_NUM_ROWS);
    if (c->T > c->s->max_positions - CHUNK)
        return tow_fail(err, TOW_EINVAL, "--tokens %d: at most %d, the model's positions less %d",
                        c->T, c->s->max_positions - CHUNK, CHUNK);
    for (int f = 0; f < 2; f++) {
        c->inv_freq[f] = ctl_num_hold(c, c->s->rd / 2, sizeof(float));
        if (!c->inv_freq[f]) return tow_fail(err, TOW_ENOMEM, "numerics: no memory");
        model_shape_inv_freq(c->s, f ? 4 : 0, c->inv_freq[f]);
    }
    model_weights_fingerprint(c->w, c->out->fingerprint);
    snprintf(c->out->device, sizeof c->out->device, "%s", n->device);
    snprintf(c->out->isa, sizeof c->out->isa, "%s", kern_dev_isa(c->dev));
    c->out->n_threads = kern_dev_threads(c->dev);
    c->out->n_tokens = c->T;
    return 0;
}

static int run_sections(struct ctl_num *c, struct tow_err *err)
{
    static int (*const sections[])(struct ctl_num *, struct tow_err *) = {
        ctl_num_topk,     ctl_num_index, ctl_num_mhc,  ctl_num_scaling, ctl_num_experts,
        ctl_num_products, ctl_num_kv,    ctl_num_rope, ctl_num_flow};
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        const size_t mark = ctl_num_mark(c);
        int rc = sections[i](c, err);
        ctl_num_release(c, mark);
        if (rc == 0 && c->no_memory) rc = TOW_ENOMEM;
        if (rc < 0) return err->msg[0] ? rc : tow_fail(err, rc, "numerics: %s", tow_err_text(rc));
    }
    return 0;
}

int ctl_numerics_run(const struct ctl_numerics *n, struct ctl_numerics_report *out,
                     struct tow_err *err)
{
    struct ctl_num c = {.n = n, .out = out, .rng = SEED};
    const int64_t began = tow_now_ms();
    struct tow_err own = {0};
    if (!err) err = &own;
    memset(out, 0, sizeof *out);
    int rc = open_all(&c, err);
    if (rc == 0) rc = make_prompt(&c, err);
    if (rc == 0) choose_layers(&c);
    if (rc == 0) rc = list_tensors(&c, err);
    if (rc == 0) rc = capture(&c, err);
    if (rc == 0) rc = run_sections(&c, err);
    if (rc < 0) snprintf(out->broken_off, sizeof out->broken_off, "%s", err->msg);
    out->seconds = (double)(tow_now_ms() - began) / 1000;

    for (int32_t i = 0; i < c.n_tensors; i++) kern_dev_free(c.dev, c.tensors[i].data);
    free(c.tensors);
    if (c.dev) ctl_num_release(&c, 0);
    free(c.held);
    model_close(c.m);
    return rc;
}

void ctl_numerics_fini(struct ctl_numerics_report *r)
{
    free(r->digests);
    r->digests = NULL;
    r->n_pages = 0;
}
