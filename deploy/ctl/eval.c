/* ctl/eval.c - see eval.h. The prompt runs in chunks through one sequence of a small page pool of
 * its own; captures are collected by a tap; then MTP, hand-over and the greedy steps. */
#include "deploy/ctl/eval.h"

#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/kv/table.h"
#include "common/model/safetensors.h"
#include "kernels/dev.h"

#include <limits.h>
#include <stdarg.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_CHUNK = 256, MAX_GREEDY = 1 << 20 };

/* What is kept of one layer. */
struct layer_capture {
    void *hidden;                   /* [P, hc*D] act */
    int32_t *experts;               /* [T, k] ascending ids */
    float *weights, *expert_margin; /* [T, k], [T] */
    float *scores;                  /* [P, n] */
    int32_t *selected;              /* [T, K] */
    float *index_margin;            /* [T] */
    float *rows[2][2]; /* [main, index][kv, gate]: the last < ratio rows [ratio, c*e] */
};

struct run {
    const struct ctl_eval *e;
    struct model *m;
    const struct model_shape *s;
    const struct kern_kv_layout *lay;
    unsigned dump;
    int32_t *prompt; /* [T] owned */
    int32_t T;
    int32_t *positions; /* [P] ascending; owned */
    int32_t P;
    int32_t *forced; /* owned; NULL = none */
    int32_t n_forced, n_greedy;
    /* the sequence */
    uint8_t *pages, *tails; /* owned */
    struct kv_pool *pool;
    struct kv_table table;
    /* captures */
    struct layer_capture *layers; /* [n_layers] owned */
    int64_t chunk_pos0;
    float *logits; /* [P, V] */
    float *last;   /* [V] logits of the newest position */
    int32_t *greedy;
    float *greedy_gap, *greedy_logits;
    int32_t n_mtp; /* rows of mtp_logits */
    float *mtp_logits;
    void *last_streams; /* [hc*D] act, of the prompt's last position */
    struct model_safetensors_writer *out;
    void **owned; /* buffers that live until the file is written */
    size_t n_owned;
    bool no_memory, no_answer; /* sticky: of the host; of the device */
};

/* Zeroed memory that lives as long as the run; sticky on failure. */
static void *hold(struct run *r, int64_t n, size_t elem)
{
    void **more = realloc(r->owned, (r->n_owned + 1) * sizeof *more);
    void *p = calloc(n > 0 ? (size_t)n : 1, elem);
    if (more) r->owned = more;
    if (!more || !p) {
        free(p);
        r->no_memory = true;
        return NULL;
    }
    r->owned[r->n_owned++] = p;
    return p;
}

/* 0, or which of the two kept us from having `what`. */
static int held(const struct run *r, const char *what, struct tow_err *err)
{
    if (r->no_memory) return tow_fail(err, TOW_ENOMEM, "eval: no memory for the %s", what);
    if (r->no_answer) return tow_fail(err, TOW_EDEVICE, "eval: the device does not answer");
    return 0;
}

/* ------------------------------------------------------------------ input */

static int read_ids(struct run *r, const struct model_safetensors *f, const char *name, int32_t lo,
                    int32_t hi, int32_t **out, int32_t *n, struct tow_err *err)
{
    const struct model_tensor *t = model_safetensors_find(f, name);
    *n = 0;
    *out = NULL;
    if (!t) return 0;
    bool wide = t->dtype == MODEL_DT_I64;
    if ((t->dtype != MODEL_DT_I32 && !wide) || t->n_dims != 1)
        return tow_fail(err, TOW_EINVAL, "%s: %s: expected I32 [n], found %s with %d dimensions",
                        r->e->tokens_path, name, t->dtype_name, t->n_dims);
    if (t->dims[0] > INT32_MAX / 2)
        return tow_fail(err, TOW_EINVAL, "%s: %s: %lld values, at most %d", r->e->tokens_path, name,
                        (long long)t->dims[0], INT32_MAX / 2);
    int32_t *ids = hold(r, t->dims[0], sizeof *ids);
    if (!ids) return tow_fail(err, TOW_ENOMEM, "eval: out of memory");
    for (int64_t i = 0; i < t->dims[0]; i++) {
        int64_t v;
        int32_t v32;
        if (wide) {
            memcpy(&v, (const char *)t->data + i * 8, 8);
        } else {
            memcpy(&v32, (const char *)t->data + i * 4, 4);
            v = v32;
        }
        if (v < lo || v > hi)
            return tow_fail(err, TOW_EINVAL, "%s: %s[%lld]: %lld is not in %d..%d",
                            r->e->tokens_path, name, (long long)i, (long long)v, lo, hi);
        ids[i] = (int32_t)v;
    }
    *out = ids;
    *n = (int32_t)t->dims[0];
    return 0;
}

static int read_input(struct run *r, struct tow_err *err)
{
    struct model_safetensors *f = NULL;
    int rc = model_safetensors_open(&f, r->e->tokens_path, err);
    if (rc < 0) return rc;
    rc = read_ids(r, f, "prompt", 0, r->s->V - 1, &r->prompt, &r->T, err);
    if (rc == 0 && r->T == 0)
        rc = tow_fail(err, TOW_EINVAL, "%s: prompt: expected I32 [T] with T >= 1, found nothing",
                      r->e->tokens_path);
    if (rc == 0) rc = read_ids(r, f, "positions", 0, r->T - 1, &r->positions, &r->P, err);
    if (rc == 0 && !r->positions) {
        r->P = r->T;
        r->positions = hold(r, r->P, sizeof *r->positions);
        for (int32_t i = 0; r->positions && i < r->P; i++) r->positions[i] = i;
    }
    for (int32_t i = 1; rc == 0 && i < r->P; i++)
        if (r->positions[i] <= r->positions[i - 1])
            rc = tow_fail(err, TOW_EINVAL,
                          "%s: positions[%d]: %d does not come after %d; they must ascend",
                          r->e->tokens_path, i, r->positions[i], r->positions[i - 1]);
    if (rc == 0) rc = read_ids(r, f, "greedy", 0, r->s->V - 1, &r->forced, &r->n_forced, err);
    model_safetensors_close(f);
    if (rc < 0) return rc;
    r->n_greedy = r->e->greedy >= 0 ? r->e->greedy : r->n_forced;
    if (r->e->force && !r->forced)
        return tow_fail(err, TOW_EINVAL, "--force: %s holds no tensor greedy", r->e->tokens_path);
    if (r->e->force && r->n_greedy > r->n_forced)
        return tow_fail(err, TOW_EINVAL, "--greedy %d with --force: %s holds %d ids in greedy",
                        r->n_greedy, r->e->tokens_path, r->n_forced);
    if ((int64_t)r->T + r->n_greedy > r->s->max_positions)
        return tow_fail(
            err, TOW_EINVAL,
            "%s: prompt of %d tokens and %d greedy steps exceed the model's %d positions",
            r->e->tokens_path, r->T, r->n_greedy, r->s->max_positions);
    return 0;
}

/* ------------------------------------------------------------------ the sequence's pages */

/* Bytes that were never written must not matter. */
static int poison(struct run *r, uint8_t *dev, size_t bytes, uint8_t fill)
{
    uint8_t block[4096];
    int rc = 0;
    memset(block, fill, sizeof block);
    for (size_t at = 0; at < bytes && rc == 0; at += sizeof block)
        rc = kern_stream_write(kern_dev_stream(model_peek_dev(r->m)), dev + at, block,
                               bytes - at < sizeof block ? bytes - at : sizeof block);
    return rc;
}

/* Device memory as the host sees it, until the run ends; NULL: no memory, sticky. */
static const void *fetch(struct run *r, const void *dev, int64_t bytes)
{
    struct kern_dev *d = model_peek_dev(r->m);
    if (kern_dev_host_memory(d)) return dev;
    void *to = hold(r, bytes, 1);
    if (to && kern_stream_read(kern_dev_stream(d), to, dev, (size_t)bytes) < 0) r->no_answer = true;
    return to;
}

static int make_pool(struct run *r, uint8_t **pages, uint8_t **tails, struct kv_pool **pool,
                     uint32_t spare, uint8_t fill, struct tow_err *err)
{
    uint32_t n = (uint32_t)kern_kv_pages_for(r->T + r->n_greedy, r->lay->page_tokens) + spare;
    size_t bytes = (size_t)n * (size_t)r->lay->page_bytes,
           tail_bytes = 3 * (size_t)r->lay->tail_bytes;
    struct kern_dev *dev = model_peek_dev(r->m);
    *pages = kern_dev_alloc(dev, bytes);
    *tails = kern_dev_alloc(dev, tail_bytes);
    if (!*pages || !*tails) return tow_fail(err, TOW_ENOMEM, "eval: no memory for %u pages", n);
    int rc = poison(r, *pages, bytes, fill);
    if (rc == 0) rc = poison(r, *tails, tail_bytes, fill);
    if (rc < 0) return tow_fail(err, rc, "eval: the device does not answer");
    rc = kv_pool_new(pool, *pages, n, (size_t)r->lay->page_bytes, *tails, 3,
                     (size_t)r->lay->tail_bytes, err);
    if (rc == 0) kv_pool_shuffle(*pool, 42u + fill);
    return rc;
}

/* As prefill to decode: every page and the tail into another pool whose free lists differ,
 * digests checked. */
static int hand_over(struct run *r, struct tow_err *err)
{
    struct kern_dev *dev = model_peek_dev(r->m);
    struct kern_stream *s = kern_dev_stream(dev);
    uint8_t *pages = NULL, *tails = NULL;
    struct kv_pool *pool = NULL;
    struct kv_table to;
    kv_table_init(&to);
    /* On the way, as the wire has them, and back from where they arrived. */
    uint8_t *sent = hold(r, r->lay->page_bytes + r->lay->tail_bytes, 1);
    uint8_t *landed = hold(r, r->lay->page_bytes, 1);
    if (!sent || !landed) return tow_fail(err, TOW_ENOMEM, "eval: out of memory");
    int rc = make_pool(r, &pages, &tails, &pool, 7, 0xff, err);
    if (rc == 0 && (rc = kv_table_grow(&to, pool, r->table.n_pages)) < 0)
        tow_fail(err, rc, "eval: hand-over: no pages");
    for (uint32_t i = 0; rc == 0 && i < to.n_pages; i++) {
        const uint8_t *src = kv_pool_page(r->pool, r->table.ids[i]);
        uint8_t *dst = kv_pool_page(pool, to.ids[i]);
        for (int32_t k = 0; rc == 0 && k < r->lay->n_parts; k++) {
            int64_t off, bytes;
            kern_kv_part(r->lay, k, &off, &bytes);
            if (kern_stream_read(s, sent, src + off, (size_t)bytes) < 0 ||
                kern_stream_write(s, dst + off, sent, (size_t)bytes) < 0 ||
                kern_stream_read(s, landed, dst + off, (size_t)bytes) < 0)
                rc = tow_fail(err, TOW_EDEVICE, "eval: hand-over: the device does not answer");
            else if (tow_hash64(landed, (size_t)bytes) != tow_hash64(sent, (size_t)bytes))
                rc = tow_fail(err, TOW_EDIGEST, "eval: hand-over: page %u part %d differs", i, k);
        }
    }
    if (rc == 0 &&
        (kern_stream_read(s, sent, kv_pool_tail(r->pool, r->table.tail),
                          (size_t)r->lay->tail_bytes) < 0 ||
         kern_stream_write(s, kv_pool_tail(pool, to.tail), sent, (size_t)r->lay->tail_bytes) < 0))
        rc = tow_fail(err, TOW_EDEVICE, "eval: hand-over: the device does not answer");
    kv_table_fini(&r->table, r->pool);
    kv_pool_free(r->pool);
    kern_dev_free(dev, r->pages);
    kern_dev_free(dev, r->tails);
    r->pages = pages;
    r->tails = tails;
    r->pool = pool;
    r->table = to;
    return rc;
}

static struct kern_seq seq_at(const struct run *r, int64_t pos0, int32_t n)
{
    struct kern_seq q = {.row0 = 0,
                         .n_rows = n,
                         .pos0 = pos0,
                         .page_ids = r->table.ids,
                         .n_pages = (int32_t)r->table.n_pages,
                         .tail = kv_pool_tail(r->pool, r->table.tail),
                         .topk = model_peek_options(r->m)->index_topk};
    return q;
}

/* ------------------------------------------------------------------ captures */

/* First recorded position >= pos, as an index into positions. */
static int32_t first_recorded(const struct run *r, int64_t pos)
{
    int32_t lo = 0, hi = r->P;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (r->positions[mid] < pos)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static void keep_recorded(const struct run *r, void *to, const void *from, int64_t n_rows,
                          int64_t row_bytes, int64_t to_row_bytes)
{
    for (int32_t i = first_recorded(r, r->chunk_pos0);
         i < r->P && r->positions[i] < r->chunk_pos0 + n_rows; i++)
        memcpy((char *)to + i * to_row_bytes,
               (const char *)from + (r->positions[i] - r->chunk_pos0) * row_bytes,
               (size_t)row_bytes);
}

/* The rows of the prompt's unfinished group, for the state dump. */
static void keep_pending(const struct run *r, float *to, int32_t ratio, const float *from,
                         int64_t n_rows, int64_t width)
{
    int64_t first = r->T - r->T % ratio;
    for (int64_t pos = first > r->chunk_pos0 ? first : r->chunk_pos0; pos < r->chunk_pos0 + n_rows;
         pos++)
        memcpy(to + (pos - first) * width, from + (pos - r->chunk_pos0) * width,
               (size_t)width * sizeof *to);
}

static void keep_experts(int32_t *to, const int32_t *from, int64_t n_rows, int64_t k)
{
    memcpy(to, from, (size_t)(n_rows * k) * sizeof *to);
}

static void on_tensor(void *ctx, int32_t at, const char *name, enum model_elem elem,
                      const void *data, int64_t rows, int64_t width)
{
    struct run *r = ctx;
    if (at >= r->s->n_layers) return;
    struct layer_capture *c = &r->layers[at];
    const int64_t p0 = r->chunk_pos0;
    if (!strcmp(name, "hidden") && c->hidden) {
        int64_t bytes = width * (elem == MODEL_ELEM_BF16 ? 2 : 4);
        keep_recorded(r, c->hidden, data, rows, bytes, bytes);
    } else if (!strcmp(name, "experts") && c->experts) {
        keep_experts(c->experts + p0 * width, data, rows, width);
    } else if (!strcmp(name, "expert_weights") && c->weights) {
        memcpy(c->weights + p0 * width, data, (size_t)(rows * width) * sizeof(float));
    } else if (!strcmp(name, "expert_margin") && c->expert_margin) {
        memcpy(c->expert_margin + p0, data, (size_t)rows * sizeof(float));
    } else if (!strcmp(name, "index_margin") && c->index_margin) {
        memcpy(c->index_margin + p0, data, (size_t)rows * sizeof(float));
    } else if (!strcmp(name, "index_scores") && c->scores) {
        keep_recorded(r, c->scores, data, rows, width * (int64_t)sizeof(float),
                      (int64_t)(r->T / 4) * (int64_t)sizeof(float));
    } else if (!strcmp(name, "index_selected") && c->selected) {
        int64_t K = model_peek_options(r->m)->index_topk;
        for (int64_t i = 0; i < rows; i++)
            memcpy(c->selected + (p0 + i) * K, (const int32_t *)data + i * width,
                   (size_t)K * sizeof(int32_t));
    } else {
        static const char *const names[2][2] = {{"main.kv", "main.gate"},
                                                {"index.kv", "index.gate"}};
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++)
                if (c->rows[i][j] && !strcmp(name, names[i][j]))
                    keep_pending(r, c->rows[i][j], r->s->ratios[at], data, rows, width);
    }
}

static int alloc_captures(struct run *r, struct tow_err *err)
{
    const struct model_shape *s = r->s;
    const int64_t T = r->T, P = r->P, n = T / 4, K = model_peek_options(r->m)->index_topk;
    const size_t a = r->e->model.exact ? 4 : 2;
    r->layers = hold(r, s->n_layers, sizeof *r->layers);
    if (!r->layers) return tow_fail(err, TOW_ENOMEM, "eval: out of memory");
    for (int32_t i = 0; i < s->n_layers; i++) {
        struct layer_capture *c = &r->layers[i];
        bool indexed = kern_kv_overlaps(s->ratios[i]);
        if (r->dump & CTL_DUMP_HIDDEN) c->hidden = hold(r, P * s->hc * s->D, a);
        if (r->dump & CTL_DUMP_EXPERTS) {
            c->experts = hold(r, T * s->k, sizeof(int32_t));
            c->weights = hold(r, T * s->k, sizeof(float));
            if (!s->hashed[i]) c->expert_margin = hold(r, T, sizeof(float));
        }
        if ((r->dump & CTL_DUMP_INDEX) && indexed) {
            c->scores = hold(r, P * n, sizeof(float));
            for (int64_t j = 0; c->scores && j < P * n; j++) c->scores[j] = -INFINITY;
            c->selected = hold(r, T * K, sizeof(int32_t));
            c->index_margin = hold(r, T, sizeof(float));
        }
        for (int k = 0; (r->dump & CTL_DUMP_STATE) && s->ratios[i] > 0 && k < (indexed ? 2 : 1);
             k++)
            for (int j = 0; j < 2; j++)
                c->rows[k][j] =
                    hold(r, (int64_t)s->ratios[i] * 2 * (k ? s->index_dim : s->d), sizeof(float));
    }
    r->logits = hold(r, P * s->V, sizeof(float));
    r->last = hold(r, s->V, sizeof(float));
    r->greedy = hold(r, r->n_greedy, sizeof(int32_t));
    r->greedy_gap = hold(r, r->n_greedy, sizeof(float));
    r->greedy_logits = hold(r, (int64_t)r->n_greedy * s->V, sizeof(float));
    r->n_mtp = r->dump & CTL_DUMP_MTP ? (P < 4 ? (int32_t)P : 4) : 0;
    r->mtp_logits = hold(r, (int64_t)r->n_mtp * s->V, sizeof(float));
    r->last_streams = hold(r, (int64_t)s->hc * s->D, a);
    return held(r, "captures", err);
}

/* ------------------------------------------------------------------ passes */

static int argmax2(const float *x, int32_t V, float *gap)
{
    int32_t best = 0;
    float second = -INFINITY;
    for (int32_t i = 1; i < V; i++) {
        if (x[i] > x[best]) {
            second = x[best];
            best = i;
        } else if (x[i] > second) {
            second = x[i];
        }
    }
    *gap = x[best] - second;
    return best;
}

/* MTP over rows pos0 .. pos0+n-1 of the prompt; next[i] is the token after row i. */
static int mtp_rows(struct run *r, int64_t pos0, int32_t n, const int32_t *next,
                    const void *streams, struct tow_err *err)
{
    struct kern_seq q = seq_at(r, pos0, n);
    int32_t rows[4], n_rows = 0, first = 0;
    for (int32_t i = r->P - r->n_mtp; i < r->P; i++)
        if (r->positions[i] >= pos0 && r->positions[i] < pos0 + n) {
            if (n_rows == 0) first = i - (r->P - r->n_mtp);
            rows[n_rows++] = (int32_t)(r->positions[i] - pos0);
        }
    struct model_batch b = {.ids = next,
                            .T = n,
                            .seqs = &q,
                            .n_seqs = 1,
                            .pages = r->pages,
                            .n_pages = kv_pool_capacity(r->pool),
                            .logit_rows = rows,
                            .n_logit_rows = n_rows,
                            .logits = r->mtp_logits + (int64_t)first * r->s->V,
                            .streams_in = streams};
    return model_mtp(r->m, &b, err);
}

static int prefill(struct run *r, int32_t chunk, struct tow_err *err)
{
    const struct model_shape *s = r->s;
    struct model_tap tap = {.on_tensor = on_tensor,
                            .ctx = r,
                            .scores = (r->dump & (CTL_DUMP_INDEX | CTL_DUMP_EXPERTS)) != 0};
    int32_t *rows = malloc((size_t)chunk * sizeof *rows);
    float *logits = malloc((size_t)chunk * (size_t)s->V * sizeof *logits);
    int rc = rows && logits
                 ? 0
                 : tow_fail(err, TOW_ENOMEM, "eval: no memory for logits of %d rows", chunk);
    for (int64_t at = 0; rc == 0 && at < r->T; at += chunk) {
        int32_t n = r->T - at < chunk ? (int32_t)(r->T - at) : chunk, n_rows = 0;
        bool is_last = at + n == r->T;
        struct kern_seq q = seq_at(r, at, n);
        int32_t from = first_recorded(r, at), i = from;
        for (; i < r->P && r->positions[i] < at + n; i++)
            rows[n_rows++] = (int32_t)(r->positions[i] - at);
        int32_t n_recorded = n_rows;
        if (is_last && (n_rows == 0 || rows[n_rows - 1] != n - 1)) rows[n_rows++] = n - 1;
        struct model_batch b = {.ids = r->prompt + at,
                                .T = n,
                                .seqs = &q,
                                .n_seqs = 1,
                                .pages = r->pages,
                                .n_pages = kv_pool_capacity(r->pool),
                                .logit_rows = rows,
                                .n_logit_rows = n_rows,
                                .logits = logits,
                                .tap = &tap};
        r->chunk_pos0 = at;
        rc = model_forward(r->m, &b, err);
        if (rc < 0) break;
        memcpy(r->logits + (int64_t)from * s->V, logits,
               (size_t)n_recorded * (size_t)s->V * sizeof *logits);
        if (is_last) {
            memcpy(r->last, logits + (int64_t)(n_rows - 1) * s->V, (size_t)s->V * sizeof *logits);
            rc = model_read_streams(r->m, n - 1, 1, r->last_streams);
        }
        /* The last row waits for the first greedy token, which is its next one. */
        if ((r->dump & CTL_DUMP_MTP) && n - is_last > 0)
            rc = mtp_rows(r, at, n - is_last, r->prompt + at + 1, NULL, err);
    }
    free(rows);
    free(logits);
    return rc;
}

static int decode(struct run *r, struct tow_err *err)
{
    const struct model_shape *s = r->s;
    for (int32_t i = 0; i < r->n_greedy; i++) {
        float gap;
        int32_t best = argmax2(r->last, s->V, &gap);
        r->greedy[i] = best;
        r->greedy_gap[i] = gap;
        memcpy(r->greedy_logits + (int64_t)i * s->V, r->last, (size_t)s->V * sizeof(float));
        if (i + 1 == r->n_greedy) break;
        int32_t id = r->e->force ? r->forced[i] : best, row = 0;
        struct kern_seq q = seq_at(r, (int64_t)r->T + i, 1);
        struct model_batch b = {.ids = &id,
                                .T = 1,
                                .seqs = &q,
                                .n_seqs = 1,
                                .pages = r->pages,
                                .n_pages = kv_pool_capacity(r->pool),
                                .logit_rows = &row,
                                .n_logit_rows = 1,
                                .logits = r->last};
        int rc = model_forward(r->m, &b, err);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ------------------------------------------------------------------ output */

static void put(struct run *r, int *rc, struct tow_err *err, enum model_dtype t, const void *data,
                int32_t n_dims, const int64_t *dims, const char *fmt, ...)
    __attribute__((format(printf, 8, 9)));
static void put(struct run *r, int *rc, struct tow_err *err, enum model_dtype t, const void *data,
                int32_t n_dims, const int64_t *dims, const char *fmt, ...)
{
    char name[96];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    if (*rc == 0) *rc = model_safetensors_writer_add(r->out, name, t, n_dims, dims, data, err);
}
#define DIMS(...)                                                                                  \
    (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[])                     \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

/* The goldens list a token's experts in ascending id. */
static void sort_experts(struct layer_capture *c, int64_t T, int32_t k)
{
    for (int64_t t = 0; t < T; t++) {
        int32_t *id = c->experts + t * k;
        float *w = c->weights + t * k;
        for (int32_t i = 1; i < k; i++)
            for (int32_t j = i; j > 0 && id[j] < id[j - 1]; j--) {
                int32_t ti = id[j];
                float tw = w[j];
                id[j] = id[j - 1], w[j] = w[j - 1];
                id[j - 1] = ti, w[j - 1] = tw;
            }
    }
}

static int put_layers(struct run *r, struct tow_err *err)
{
    const struct model_shape *s = r->s;
    const int64_t T = r->T, P = r->P, K = model_peek_options(r->m)->index_topk;
    int rc = 0;
    for (int32_t i = 0; i < s->n_layers; i++) {
        struct layer_capture *c = &r->layers[i];
        if (c->hidden)
            put(r, &rc, err, r->e->model.exact ? MODEL_DT_F32 : MODEL_DT_BF16, c->hidden,
                DIMS(P, s->hc, s->D), "layers.%d.hidden", i);
        if (c->experts) {
            sort_experts(c, T, s->k);
            put(r, &rc, err, MODEL_DT_I32, c->experts, DIMS(T, s->k), "layers.%d.experts", i);
            put(r, &rc, err, MODEL_DT_F32, c->weights, DIMS(T, s->k), "layers.%d.expert_weights",
                i);
        }
        if (c->expert_margin)
            put(r, &rc, err, MODEL_DT_F32, c->expert_margin, DIMS(T), "layers.%d.expert_margin", i);
        if (c->scores) {
            put(r, &rc, err, MODEL_DT_F32, c->scores, DIMS(P, T / 4), "layers.%d.index_scores", i);
            put(r, &rc, err, MODEL_DT_I32, c->selected, DIMS(T, K), "layers.%d.index_selected", i);
            put(r, &rc, err, MODEL_DT_F32, c->index_margin, DIMS(T), "layers.%d.index_margin", i);
        }
    }
    return rc;
}

/* Stored compressed entries of one layer, widened to [n, width]. */
static float *entries(struct run *r, const struct kern_kv_layer *l, bool index, int64_t n,
                      int32_t width)
{
    float *to = hold(r, n * width, sizeof(float));
    const uint8_t *page = NULL;
    for (int64_t i = 0; to && i < n; i++) {
        if (i % l->per_page == 0)
            page =
                fetch(r, kv_pool_page(r->pool, r->table.ids[i / l->per_page]), r->lay->page_bytes);
        if (!page) return NULL;
        if (index)
            kern_ik_load(r->lay->spec.ik_fmt, page + l->index_off, l->per_page, i % l->per_page,
                         to + i * width, width);
        else
            kern_kv_load(r->lay->spec.kv_fmt, page + l->main_off, l->per_page, i % l->per_page,
                         to + i * width, width, r->s->rd);
    }
    return to;
}

static void put_compressor(struct run *r, int *rc, struct tow_err *err, int32_t at, bool index)
{
    const struct kern_kv_layer *l = &r->lay->layer[at];
    const struct model_layer *w = &model_peek_weights(r->m)->layers[at];
    const struct model_compressor *comp = index ? &w->index_comp : &w->comp;
    const char *nm = index ? "index" : "main";
    const int32_t e = index ? r->s->index_dim : r->s->d, ratio = l->ratio, width = comp->wkv.n;
    const int64_t n = r->T / ratio, pending = r->T % ratio;
    float *kv = r->layers[at].rows[index][0], *gate = r->layers[at].rows[index][1];
    const float *ape = fetch(r, comp->ape, (int64_t)ratio * width * (int64_t)sizeof(float));
    for (int64_t i = 0; ape && i < pending; i++)
        for (int32_t j = 0; j < width; j++) gate[i * width + j] += ape[i * width + j];
    put(r, rc, err, MODEL_DT_F32, entries(r, l, index, n, e), DIMS(n, e), "state.%d.%s.entries", at,
        nm);
    put(r, rc, err, MODEL_DT_F32, kv, DIMS(pending, width), "state.%d.%s.pending_kv", at, nm);
    put(r, rc, err, MODEL_DT_F32, gate, DIMS(pending, width), "state.%d.%s.pending_score", at, nm);
    if (!kern_kv_overlaps(ratio) || n == 0) return;
    /* State order: kv rows, score rows [ratio-1][2e] each,
     * then the previous group's halves (kv_layout.h). */
    const float *st =
        fetch(r, kv_pool_tail(r->pool, r->table.tail) + (index ? l->istate_off : l->mstate_off),
              index ? l->istate_bytes : l->mstate_bytes);
    float *copy = hold(r, 2 * (int64_t)ratio * e, sizeof(float));
    if (!copy || !st) return;
    memcpy(copy, st + 2 * (int64_t)(ratio - 1) * 2 * e,
           2 * (size_t)ratio * (size_t)e * sizeof(float));
    put(r, rc, err, MODEL_DT_F32, copy, DIMS(ratio, e), "state.%d.%s.prev_kv", at, nm);
    put(r, rc, err, MODEL_DT_F32, copy + (int64_t)ratio * e, DIMS(ratio, e),
        "state.%d.%s.prev_score", at, nm);
}

/* Before the first decoded token, which would move the state on. */
static int put_state(struct run *r, struct tow_err *err)
{
    const struct model_shape *s = r->s;
    const uint8_t *tail = fetch(r, kv_pool_tail(r->pool, r->table.tail), r->lay->tail_bytes);
    int rc = 0;
    if (!tail) return tow_fail(err, TOW_ENOMEM, "eval: no memory for the state");
    for (int32_t i = 0; i < s->n_layers; i++) {
        const struct kern_kv_layer *l = &r->lay->layer[i];
        float *ring = hold(r, (int64_t)s->window * s->d, sizeof(float));
        /* The last window-1 positions: what later tokens can still see. */
        int64_t first = r->T > s->window - 1 ? r->T - (s->window - 1) : 0;
        for (int64_t pos = first; ring && pos < r->T; pos++)
            kern_kv_load(r->lay->spec.kv_fmt, tail + l->window_off, s->window, pos % s->window,
                         ring + pos % s->window * s->d, s->d, s->rd);
        put(r, &rc, err, MODEL_DT_F32, ring, DIMS(s->window, s->d), "state.%d.window", i);
        if (l->ratio > 0) put_compressor(r, &rc, err, i, false);
        if (kern_kv_overlaps(l->ratio)) put_compressor(r, &rc, err, i, true);
    }
    const int lost = held(r, "state", err);
    return lost < 0 ? lost : rc;
}

static int put_rest(struct run *r, struct tow_err *err)
{
    const int64_t V = r->s->V;
    int rc = 0;
    put(r, &rc, err, MODEL_DT_I32, r->prompt, DIMS(r->T), "prompt");
    put(r, &rc, err, MODEL_DT_I32, r->positions, DIMS(r->P), "positions");
    if (r->dump & CTL_DUMP_LOGITS)
        put(r, &rc, err, MODEL_DT_F32, r->logits, DIMS(r->P, V), "logits");
    if (r->n_greedy > 0) {
        put(r, &rc, err, MODEL_DT_I32, r->greedy, DIMS(r->n_greedy), "greedy");
        put(r, &rc, err, MODEL_DT_F32, r->greedy_gap, DIMS(r->n_greedy), "greedy_gap");
        put(r, &rc, err, MODEL_DT_F32, r->greedy_logits, DIMS(r->n_greedy, V), "greedy_logits");
    }
    if (r->dump & CTL_DUMP_MTP) {
        put(r, &rc, err, MODEL_DT_I32, r->positions + r->P - r->n_mtp, DIMS(r->n_mtp),
            "mtp_positions");
        put(r, &rc, err, MODEL_DT_F32, r->mtp_logits, DIMS(r->n_mtp, V), "mtp_logits");
    }
    return rc;
}

/* ------------------------------------------------------------------ the run */

static int run_all(struct run *r, int32_t chunk, struct tow_err *err)
{
    int rc = read_input(r, err);
    if (rc == 0) rc = make_pool(r, &r->pages, &r->tails, &r->pool, 3, 0xa5, err);
    if (rc == 0 && (rc = kv_table_grow(
                        &r->table, r->pool,
                        (uint32_t)kern_kv_pages_for(r->T + r->n_greedy, r->lay->page_tokens))) < 0)
        tow_fail(err, rc, "eval: no pages");
    if (rc == 0) rc = alloc_captures(r, err);
    if (rc == 0) rc = model_safetensors_writer_new(&r->out, err);
    if (rc == 0) rc = prefill(r, chunk, err);
    if (rc == 0 && (r->dump & CTL_DUMP_STATE)) rc = put_state(r, err);
    if (rc == 0 && r->e->handover) rc = hand_over(r, err);
    if (rc == 0 && (r->dump & CTL_DUMP_MTP)) {
        float gap;
        int32_t next = argmax2(r->last, r->s->V, &gap);
        rc = mtp_rows(r, r->T - 1, 1, &next, r->last_streams, err);
    }
    if (rc == 0) rc = decode(r, err);
    if (rc == 0) rc = put_layers(r, err);
    if (rc == 0) rc = put_rest(r, err);
    if (rc == 0) rc = model_safetensors_writer_write(r->out, r->e->out_path, err);
    return rc;
}

int ctl_eval_run(const struct ctl_eval *e, struct tow_err *err)
{
    struct run r = {.e = e};
    kv_table_init(&r.table);
    /* Whether there is an MTP block is known only once the checkpoint is read: try with,
     * fall back without. */
    struct text_config *cfg = malloc(sizeof *cfg);
    if (!cfg) return tow_fail(err, TOW_ENOMEM, "eval: out of memory");
    int rc = text_config_load(cfg, e->model_dir, err);
    bool has_mtp = rc == 0 && cfg->n_mtp > 0;
    free(cfg);
    if (rc < 0) return rc;

    struct model_options opt = e->model;
    unsigned all = CTL_DUMP_LOGITS | CTL_DUMP_HIDDEN | CTL_DUMP_INDEX | CTL_DUMP_EXPERTS |
                   CTL_DUMP_MTP | CTL_DUMP_STATE;
    r.dump = e->dump ? e->dump : all;
    opt.mtp = (r.dump & CTL_DUMP_MTP) && has_mtp;
    opt.max_rows = e->chunk_tokens > 0 ? e->chunk_tokens : DEFAULT_CHUNK;
    rc = model_open(&r.m, e->model_dir, &opt, err);
    if (rc < 0 && opt.mtp && e->dump == 0) { /* promised by config.json, absent from the files */
        opt.mtp = false;
        rc = model_open(&r.m, e->model_dir, &opt, err);
    }
    if (rc < 0) return rc;
    if (!opt.mtp && (e->dump & CTL_DUMP_MTP)) {
        model_close(r.m);
        return tow_fail(err, TOW_EINVAL, "--dump mtp: %s has no MTP block", e->model_dir);
    }
    if (!opt.mtp) r.dump &= ~(unsigned)CTL_DUMP_MTP;
    r.s = &model_peek_weights(r.m)->shape;
    r.lay = model_peek_layout(r.m);

    rc = run_all(&r, opt.max_rows, err);

    model_safetensors_writer_free(r.out);
    if (r.pool) {
        kv_table_fini(&r.table, r.pool);
        kv_pool_free(r.pool);
    }
    kern_dev_free(model_peek_dev(r.m), r.pages);
    kern_dev_free(model_peek_dev(r.m), r.tails);
    for (size_t i = 0; i < r.n_owned; i++) free(r.owned[i]);
    free(r.owned);
    model_close(r.m);
    return rc;
}
