/* kernels/mirror.c - see mirror.h.
 *
 * Device memory of a call comes from chunks that are used again by the next; each span is followed
 * by a guard. A checkpoint's weights are placed once and found again by their host addresses;
 * weights in memory that came from this device's alloc, which may hold others tomorrow, are placed
 * for the call.
 */
#include "kernels/mirror.h"

#include "common/base/err.h"
#include "kernels/dev_impl.h"
#include "kernels/ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256, MAX_SPANS = 64, MAX_CHUNKS = 64, CHUNK_BYTES = 64 << 20, MAX_SEQS = 256 };

struct span {
    void *host;
    uint8_t *dev;
    size_t bytes;
    bool out;
};
struct memory {
    uint8_t *p;
    size_t bytes;
    bool owned;
};
struct placed {
    struct kern_weight *host, *dev; /* owned [n]: as given, as placed */
    int32_t n;
    bool keep;
};

struct kern_stream {
    struct kern_head head; /* first */
    struct kern_dev *dev;
};
struct kern_dev {
    struct kern_head head; /* first */
    struct kern_stream stream;
    struct kern_dev *inner; /* owned */
    struct kern_stream *s;  /* inner's */
    const struct kern_ops *ops;
    struct memory chunk[MAX_CHUNKS]; /* device */
    int n_chunks, at_chunk;
    size_t used; /* of the chunk in use */
    struct span spans[MAX_SPANS];
    int n_spans;
    struct memory *known; /* host; owned [n_known] */
    size_t n_known, room_known;
    struct placed *placed; /* owned [n_placed] */
    size_t n_placed, room_placed;
    struct kern_seq seqs[MAX_SEQS];
    int rc; /* of the call */
    char why[80];
};

static const struct memory *memory_of(const struct kern_dev *m, const void *p)
{
    for (size_t i = 0; i < m->n_known; i++)
        if ((const uint8_t *)p >= m->known[i].p &&
            (const uint8_t *)p < m->known[i].p + m->known[i].bytes)
            return &m->known[i];
    return NULL;
}

/* Grows an array of elem bytes to hold one more; false: no memory. */
static bool one_more(void **array, size_t n, size_t *room, size_t elem)
{
    if (n < *room) return true;
    size_t more = *room ? 2 * *room : 64;
    void *p = realloc(*array, more * elem);
    if (!p) return false;
    *array = p;
    *room = more;
    return true;
}

/* ------------------------------------------------------------------ spans of one call */

static void begin(struct kern_dev *m)
{
    m->n_spans = m->at_chunk = 0;
    m->used = 0;
    m->rc = 0;
    m->why[0] = 0;
}

static uint8_t *take(struct kern_dev *m, size_t bytes)
{
    while (m->at_chunk < m->n_chunks && bytes > m->chunk[m->at_chunk].bytes - m->used) {
        m->at_chunk++;
        m->used = 0;
    }
    if (m->at_chunk == m->n_chunks) {
        struct memory c = {.bytes = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES};
        if (m->n_chunks == MAX_CHUNKS || !(c.p = kern_dev_alloc(m->inner, c.bytes))) return NULL;
        m->chunk[m->n_chunks++] = c;
        m->used = 0;
    }
    uint8_t *p = m->chunk[m->at_chunk].p + m->used;
    m->used += bytes;
    return p;
}

/* The device's copy of [p, p + bytes); what is given twice has one copy. */
static void *span(struct kern_dev *m, const void *p, int64_t bytes, bool out)
{
    uint8_t guard[GUARD];
    if (!p || m->rc < 0) return NULL;
    if (bytes < 0) bytes = 0;
    for (int i = 0; i < m->n_spans; i++)
        if (m->spans[i].host == p && m->spans[i].bytes == (size_t)bytes) {
            m->spans[i].out |= out;
            return m->spans[i].dev;
        }
    uint8_t *dev =
        m->n_spans < MAX_SPANS ? take(m, ((size_t)bytes + 255) / 256 * 256 + GUARD) : NULL;
    if (!dev) {
        m->rc = TOW_ENOMEM;
        return NULL;
    }
    struct span *x = &m->spans[m->n_spans++];
    *x = (struct span){(void *)(uintptr_t)p, dev, (size_t)bytes, out};
    memset(guard, 0x5a, sizeof guard);
    m->rc = kern_stream_write(m->s, dev, p, x->bytes);
    if (m->rc == 0) m->rc = kern_stream_write(m->s, dev + bytes, guard, GUARD);
    return dev;
}
static const void *in(struct kern_dev *m, const void *p, int64_t bytes)
{
    return span(m, p, bytes, false);
}
static void *out(struct kern_dev *m, void *p, int64_t bytes)
{
    return span(m, p, bytes, true);
}

static void unplace(struct kern_dev *m, bool all)
{
    size_t kept = 0;
    for (size_t i = 0; i < m->n_placed; i++) {
        struct placed *x = &m->placed[i];
        if (x->keep && !all) {
            m->placed[kept++] = *x;
            continue;
        }
        kern_dev_unplace(m->inner, x->dev[0].data);
        free(x->host);
        free(x->dev);
    }
    m->n_placed = kept;
}

static int end(struct kern_dev *m)
{
    for (int i = 0; i < m->n_spans && m->rc == 0; i++) {
        const struct span *x = &m->spans[i];
        uint8_t guard[GUARD];
        if (x->out) m->rc = kern_stream_read(m->s, x->host, x->dev, x->bytes);
        if (m->rc == 0) m->rc = kern_stream_read(m->s, guard, x->dev + x->bytes, GUARD);
        for (int k = 0; k < GUARD && m->rc == 0; k++)
            if (guard[k] != 0x5a) {
                snprintf(m->why, sizeof m->why, "mirror: an op wrote byte %d behind a span of %zu",
                         k, x->bytes);
                m->rc = TOW_EDEVICE;
            }
    }
    if (m->rc == 0) m->rc = kern_stream_sync(m->s);
    unplace(m, false);
    return m->rc;
}

static const struct kern_weight *weights(struct kern_dev *m, const struct kern_weight *w, int32_t n)
{
    const size_t bytes = (size_t)n * sizeof *w;
    for (size_t i = 0; i < m->n_placed; i++)
        if (m->placed[i].n == n && memcmp(m->placed[i].host, w, bytes) == 0)
            return m->placed[i].dev;
    struct placed x = {malloc(bytes), malloc(bytes), n, true};
    if (m->rc == 0 && (!x.host || !x.dev ||
                       !one_more((void **)&m->placed, m->n_placed, &m->room_placed, sizeof x)))
        m->rc = TOW_ENOMEM;
    if (m->rc == 0) {
        memcpy(x.host, w, bytes);
        memcpy(x.dev, w, bytes);
        for (int32_t i = 0; i < n; i++)
            if (memory_of(m, w[i].data)) x.keep = false;
        m->rc = kern_dev_place(m->inner, x.dev, n, NULL);
    }
    if (m->rc < 0) {
        free(x.host);
        free(x.dev);
        return w;
    }
    m->placed[m->n_placed++] = x;
    return x.dev;
}
static struct kern_vec vec(struct kern_dev *m, struct kern_vec v)
{
    v.data = in(m, v.data, (int64_t)v.n * kern_dtype_bytes(v.dtype));
    return v;
}
static int64_t act(enum kern_dtype t)
{
    return kern_dtype_bytes(t);
}

/* Tails become the device's; tables of pages stay the host's. */
static const struct kern_seq *send_seqs(struct kern_dev *m, const struct kern_seq *q, int32_t n,
                                        const struct kern_kv_layout *l, bool tails)
{
    if (n > MAX_SEQS) {
        m->rc = TOW_ENOMEM;
        return q;
    }
    for (int32_t i = 0; i < n; i++) {
        m->seqs[i] = q[i];
        m->seqs[i].tail = span(m, q[i].tail, l->tail_bytes, tails);
    }
    return m->seqs;
}
static void *pool(struct kern_dev *m, const void *pages, bool written)
{
    if (!pages) return NULL;
    const struct memory *x = memory_of(m, pages);
    if (!x) {
        snprintf(m->why, sizeof m->why, "mirror: a page pool of unknown size");
        m->rc = TOW_EINVAL;
        return NULL;
    }
    return span(m, pages, (int64_t)x->bytes - ((const uint8_t *)pages - x->p), written);
}
/* Rows that the tensors of a batch of sequences have. */
static int32_t rows_of(const struct kern_seq *q, int32_t n)
{
    int32_t T = 0;
    for (int32_t i = 0; i < n; i++)
        if (q[i].n_rows && q[i].row0 + q[i].n_rows > T) T = q[i].row0 + q[i].n_rows;
    return T;
}

/* ------------------------------------------------------------------ the ops
 * p is a copy whose pointers become the device's. */

#define MIRROR(op) static int mirror_##op(struct kern_stream *s, const struct kern_##op *given)
#define BEGIN(op)                                                                                  \
    struct kern_##op p = *given;                                                                   \
    struct kern_dev *m = s->dev;                                                                   \
    int rc = kern_##op##_check(&p);                                                                \
    if (rc < 0) return rc;                                                                         \
    begin(m)
#define RUN(op)                                                                                    \
    if (m->rc == 0) m->rc = m->ops->op(m->s, &p);                                                  \
    return end(m)

MIRROR(embed)
{
    BEGIN(embed);
    p.ids = in(m, p.ids, 4 * (int64_t)p.T);
    p.w = *weights(m, &p.w, 1);
    p.out = out(m, p.out, (int64_t)p.T * p.hc * p.w.k * act(p.act));
    RUN(embed);
}
MIRROR(rmsnorm)
{
    BEGIN(rmsnorm);
    const int64_t a = act(p.act);
    p.x = in(m, p.x, p.T ? ((p.T - 1) * p.ld_x + p.D) * a : 0);
    p.w = vec(m, p.w);
    p.y = out(m, p.y, p.T ? ((p.T - 1) * p.ld_y + p.D) * a : 0);
    RUN(rmsnorm);
}
/* x_out: the rows are made by the op. */
static void send_linear(struct kern_dev *m, struct kern_linear *p, bool x_out)
{
    const int64_t rows = p->T ? p->T - 1 : 0, any = p->T > 0;
    p->x = span(m, p->x, (rows * p->ld_x + any * p->groups * p->K) * act(p->x_dtype), x_out);
    p->w = *weights(m, &p->w, 1);
    p->y = out(m, p->y, (rows * p->ld_y + any * p->groups * p->N) * act(p->y_dtype));
}
MIRROR(linear)
{
    BEGIN(linear);
    send_linear(m, &p, false);
    RUN(linear);
}
static void send_angles(struct kern_dev *m, const float **cos, const float **sin, int32_t T,
                        int32_t rd)
{
    *cos = in(m, *cos, (int64_t)T * (rd / 2) * 4);
    *sin = in(m, *sin, (int64_t)T * (rd / 2) * 4);
}
MIRROR(linears)
{
    enum { MOST = 16 };
    BEGIN(linears);
    struct kern_linear each[MOST];
    struct kern_rmsnorm norm;
    struct kern_heads_rope rope;
    if (p.n > MOST) return TOW_ENOMEM;
    for (int32_t i = 0; i < p.n; i++) {
        each[i] = p.each[i];
        send_linear(m, &each[i], p.norm || p.rope);
    }
    p.each = each;
    if (p.norm) {
        norm = *p.norm;
        norm.x = norm.y = (void *)(uintptr_t)each[0].x;
        norm.w = vec(m, norm.w);
        p.norm = &norm;
    }
    if (p.rope) {
        rope = *p.rope;
        rope.q = (void *)(uintptr_t)each[0].x;
        send_angles(m, &rope.cos, &rope.sin, rope.T, rope.rd);
        p.rope = &rope;
    }
    RUN(linears);
}
MIRROR(hc_collapse)
{
    BEGIN(hc_collapse);
    const int64_t T = p.T, a = act(p.act);
    p.h = in(m, p.h, T * p.hc * p.D * a);
    p.base = in(m, p.base, 4 * (int64_t)p.fn.n);
    p.scale = in(m, p.scale, p.post ? 12 : 4);
    p.fn = *weights(m, &p.fn, 1);
    p.x = out(m, p.x, T * p.D * a);
    p.post = out(m, p.post, T * p.hc * 4);
    p.comb = out(m, p.comb, T * p.hc * p.hc * 4);
    RUN(hc_collapse);
}
MIRROR(hc_expand)
{
    BEGIN(hc_expand);
    const int64_t T = p.T, a = act(p.act);
    p.y = in(m, p.y, T * p.D * a);
    p.h = in(m, p.h, T * p.hc * p.D * a);
    p.post = in(m, p.post, T * p.hc * 4);
    p.comb = in(m, p.comb, T * p.hc * p.hc * 4);
    p.out = out(m, p.out, T * p.hc * p.D * a);
    RUN(hc_expand);
}
MIRROR(hc_boundary)
{
    BEGIN(hc_boundary);
    const int64_t T = p.T, a = act(p.act);
    p.routed = in(m, p.routed, T * p.D * 4);
    p.y = out(m, p.y, T * p.D * a);
    p.h = out(m, p.h, T * p.hc * p.D * a);
    p.base = in(m, p.base, 4 * (int64_t)p.fn.n);
    p.scale = in(m, p.scale, p.head ? 4 : 12);
    p.fn = *weights(m, &p.fn, 1);
    p.norm = vec(m, p.norm);
    p.x = out(m, p.x, T * p.D * a);
    p.post = out(m, p.post, T * p.hc * 4);
    p.comb = out(m, p.comb, T * p.hc * p.hc * 4);
    RUN(hc_boundary);
}
MIRROR(rope_table)
{
    BEGIN(rope_table);
    const int64_t n = (int64_t)p.T * (p.rd / 2) * 4;
    p.pos = in(m, p.pos, 4 * (int64_t)p.T);
    p.inv_freq = in(m, p.inv_freq, p.rd / 2 * 4);
    p.cos = out(m, p.cos, n);
    p.sin = out(m, p.sin, n);
    RUN(rope_table);
}
static void send_heads_rope(struct kern_dev *m, struct kern_heads_rope *p)
{
    p->q = out(m, p->q, (int64_t)p->T * p->H * p->d * act(p->act));
    send_angles(m, &p->cos, &p->sin, p->T, p->rd);
}
MIRROR(heads_rope)
{
    BEGIN(heads_rope);
    send_heads_rope(m, &p);
    RUN(heads_rope);
}
static void send_kv_prep(struct kern_dev *m, struct kern_kv_prep *p)
{
    p->x = in(m, p->x, (int64_t)p->T * p->d * act(p->act));
    p->w = vec(m, p->w);
    send_angles(m, &p->cos, &p->sin, p->T, p->rd);
    p->y = out(m, p->y, (int64_t)p->T * p->d * act(p->act));
}
MIRROR(kv_prep)
{
    BEGIN(kv_prep);
    send_kv_prep(m, &p);
    RUN(kv_prep);
}
MIRROR(window_store)
{
    BEGIN(window_store);
    p.kv = in(m, p.kv, (int64_t)rows_of(p.seqs, p.n_seqs) * p.layout->spec.head_dim * act(p.act));
    p.seqs = send_seqs(m, p.seqs, p.n_seqs, p.layout, true);
    RUN(window_store);
}
/* One of a layer's compressors. */
static void send_compress(struct kern_dev *m, struct kern_compress *p)
{
    const struct kern_kv_layer *y = &p->layout->layer[p->layer];
    const int64_t e = p->norm.n, c = kern_kv_overlaps(y->ratio) ? 2 : 1;
    const int64_t n = (int64_t)rows_of(p->seqs, p->n_seqs) * c * e * 4;
    p->kv = in(m, p->kv, n);
    p->gate = in(m, p->gate, n);
    p->ape = in(m, p->ape, y->ratio * c * e * 4);
    p->norm = vec(m, p->norm);
    p->inv_freq = in(m, p->inv_freq, p->layout->spec.rope_dim / 2 * 4);
    p->pages = pool(m, p->pages, true);
}
MIRROR(compress)
{
    BEGIN(compress);
    struct kern_compress other;
    send_compress(m, &p);
    if (p.also) {
        other = *p.also;
        send_compress(m, &other);
        p.also = &other;
    }
    p.seqs = send_seqs(m, p.seqs, p.n_seqs, p.layout, true);
    if (p.also) other.seqs = p.seqs;
    RUN(compress);
}
static void send_index_query(struct kern_dev *m, struct kern_index_query *p)
{
    p->q = out(m, p->q, (int64_t)p->T * p->H * p->w * act(p->act));
    send_angles(m, &p->cos, &p->sin, p->T, p->rd);
}
MIRROR(index_query)
{
    BEGIN(index_query);
    send_index_query(m, &p);
    RUN(index_query);
}
MIRROR(prepare)
{
    BEGIN(prepare);
    struct kern_heads_rope heads;
    struct kern_kv_prep kv = {0};
    struct kern_window_store store;
    struct kern_compress comp, other;
    struct kern_index_query index;
    const struct kern_seq *seqs = NULL;
    if (p.heads) {
        heads = *p.heads;
        send_heads_rope(m, &heads);
        p.heads = &heads;
    }
    if (p.kv) {
        kv = *p.kv;
        send_kv_prep(m, &kv);
        p.kv = &kv;
    }
    if (p.store) {
        store = *p.store;
        store.kv = kv.y;
        seqs = store.seqs = send_seqs(m, store.seqs, store.n_seqs, store.layout, true);
        p.store = &store;
    }
    if (p.compress) {
        comp = *p.compress;
        send_compress(m, &comp);
        if (comp.also) {
            other = *comp.also;
            send_compress(m, &other);
            comp.also = &other;
        }
        if (!seqs) seqs = send_seqs(m, comp.seqs, comp.n_seqs, comp.layout, true);
        comp.seqs = other.seqs = seqs;
        p.compress = &comp;
    }
    if (p.index) {
        index = *p.index;
        send_index_query(m, &index);
        p.index = &index;
    }
    RUN(prepare);
}
MIRROR(index_select)
{
    BEGIN(index_select);
    const int64_t T = p.T, rows = p.score_rows ? p.n_score_rows : T;
    p.q = in(m, p.q, T * p.H * p.layout->spec.index_dim * act(p.act));
    p.wt = in(m, p.wt, T * p.H * act(p.act));
    p.pages = pool(m, p.pages, false);
    p.seqs = send_seqs(m, p.seqs, p.n_seqs, p.layout, false);
    p.selected = out(m, p.selected, T * p.sel_ld * 4);
    p.n_selected = out(m, p.n_selected, T * 4);
    p.scores = out(m, p.scores, rows * p.score_ld * 4);
    p.margin = out(m, p.margin, T * 4);
    RUN(index_select);
}
MIRROR(index_rank)
{
    BEGIN(index_rank);
    struct kern_seq row = *p.seq;
    row.tail = span(m, row.tail, p.layout->tail_bytes, false);
    p.scores = in(m, p.scores, (row.pos0 + 1) / p.layout->layer[p.layer].ratio * 4);
    p.q = in(m, p.q, (int64_t)p.T * p.H * p.layout->spec.index_dim * act(p.act));
    p.wt = in(m, p.wt, (int64_t)p.T * p.H * act(p.act));
    p.pages = pool(m, p.pages, false);
    p.seq = &row;
    p.ranks = out(m, p.ranks, p.n_entries * (int64_t)sizeof *p.ranks);
    p.kth = out(m, p.kth, 4);
    p.next = out(m, p.next, 4);
    RUN(index_rank);
}
static void send_attention(struct kern_dev *m, struct kern_attention *p)
{
    const int64_t T = p->T, d = p->layout->spec.head_dim, a = act(p->act);
    p->q = in(m, p->q, T * p->H * d * a);
    p->kv = in(m, p->kv, T * d * a);
    p->sink = in(m, p->sink, p->H * 4);
    p->o = out(m, p->o, T * p->H * d * a);
    p->pages = pool(m, p->pages, false);
    p->seqs = send_seqs(m, p->seqs, p->n_seqs, p->layout, false);
    p->n_selected = p->selected ? in(m, p->n_selected, T * 4) : NULL;
    p->selected = in(m, p->selected, T * p->sel_ld * 4);
}
MIRROR(attention)
{
    BEGIN(attention);
    send_attention(m, &p);
    RUN(attention);
}
MIRROR(attend)
{
    BEGIN(attend);
    send_attention(m, &p.attention);
    send_heads_rope(m, &p.back);
    send_linear(m, &p.wo_a, true);
    send_linear(m, &p.wo_b, true);
    RUN(attend);
}
static void send_route(struct kern_dev *m, struct kern_route *p)
{
    const int64_t T = p->T;
    p->logits = in(m, p->logits, T * p->E * 4);
    p->bias = in(m, p->bias, p->E * 4);
    p->tid2eid = in(m, p->tid2eid, (int64_t)p->V * p->k * p->tid_bytes);
    p->ids = p->tid2eid ? in(m, p->ids, T * 4) : NULL;
    p->experts = out(m, p->experts, T * p->k * 4);
    p->weights = out(m, p->weights, T * p->k * 4);
    p->margin = out(m, p->margin, T * 4);
}
MIRROR(route)
{
    BEGIN(route);
    send_route(m, &p);
    RUN(route);
}
static void send_moe(struct kern_dev *m, struct kern_moe *p)
{
    const int64_t T = p->T;
    p->x = in(m, p->x, T * p->D * act(p->act));
    p->experts = in(m, p->experts, T * p->k * 4);
    p->weights = in(m, p->weights, T * p->k * 4);
    p->w1 = weights(m, p->w1, p->E);
    p->w2 = weights(m, p->w2, p->E);
    p->w3 = weights(m, p->w3, p->E);
    p->out = out(m, p->out, T * p->D * 4);
}
MIRROR(moe)
{
    BEGIN(moe);
    send_moe(m, &p);
    RUN(moe);
}
MIRROR(swiglu)
{
    BEGIN(swiglu);
    const int64_t n = (int64_t)p.T * p.I * act(p.act);
    p.g = in(m, p.g, n);
    p.u = in(m, p.u, n);
    p.y = out(m, p.y, n);
    RUN(swiglu);
}
MIRROR(ffn)
{
    BEGIN(ffn);
    const int64_t n = (int64_t)p.swiglu.T * p.swiglu.I * act(p.swiglu.act);
    send_linear(m, &p.gate, false);
    send_route(m, &p.route);
    send_moe(m, &p.moe);
    send_linear(m, &p.w1, false);
    send_linear(m, &p.w3, false);
    p.swiglu.g = in(m, p.swiglu.g, n);
    p.swiglu.u = in(m, p.swiglu.u, n);
    p.swiglu.y = out(m, p.swiglu.y, n);
    send_linear(m, &p.w2, false);
    RUN(ffn);
}
MIRROR(add)
{
    BEGIN(add);
    p.a = in(m, p.a, p.n * 4);
    p.b = in(m, p.b, p.n * act(p.act));
    p.y = out(m, p.y, p.n * act(p.act));
    RUN(add);
}
MIRROR(mtp_mix)
{
    BEGIN(mtp_mix);
    const int64_t n = (int64_t)p.T * p.hc * p.D * act(p.act);
    p.e = in(m, p.e, (int64_t)p.T * p.D * act(p.act));
    p.g = in(m, p.g, n);
    p.out = out(m, p.out, n);
    RUN(mtp_mix);
}
MIRROR(sample)
{
    BEGIN(sample);
    p.logits = out(m, p.logits, (int64_t)p.T * p.V * 4);
    p.rows = in(m, p.rows, p.T * (int64_t)sizeof *p.rows);
    p.edits = out(m, p.edits, p.n_edits * (int64_t)sizeof *p.edits);
    p.choices = out(m, p.choices, p.T * (int64_t)sizeof *p.choices);
    RUN(sample);
}

static const struct kern_ops mirror_ops = {.name = "mirror",
#define X(op) .op = mirror_##op,
                                           KERN_OPS(X)
#undef X
};

/* ------------------------------------------------------------------ the device */

void kern_mirror_know(struct kern_dev *m, const void *memory, size_t bytes)
{
    if (one_more((void **)&m->known, m->n_known, &m->room_known, sizeof *m->known))
        m->known[m->n_known++] = (struct memory){(uint8_t *)(uintptr_t)memory, bytes, false};
}

void kern_mirror_forget(struct kern_dev *m)
{
    size_t kept = 0;
    for (size_t i = 0; i < m->n_known; i++)
        if (m->known[i].owned) m->known[kept++] = m->known[i];
    m->n_known = kept;
    unplace(m, true);
}

static void *alloc_host(struct kern_dev *m, size_t bytes)
{
    if (bytes > SIZE_MAX - 63 ||
        !one_more((void **)&m->known, m->n_known, &m->room_known, sizeof *m->known))
        return NULL;
    size_t room = (bytes + 63) & ~(size_t)63;
    uint8_t *p = aligned_alloc(64, room ? room : 64);
    if (!p) return NULL;
    memset(p, 0, room ? room : 64);
    m->known[m->n_known++] = (struct memory){p, room ? room : 64, true};
    return p;
}
static void free_host(struct kern_dev *m, void *p)
{
    for (size_t i = 0; i < m->n_known; i++)
        if (m->known[i].p == p && m->known[i].owned) {
            m->known[i] = m->known[--m->n_known];
            break;
        }
    free(p);
}

static void close_mirror(struct kern_dev *m)
{
    unplace(m, true);
    for (int i = 0; i < m->n_chunks; i++) kern_dev_free(m->inner, m->chunk[i].p);
    kern_dev_close(m->inner);
    free(m->known);
    free(m->placed);
    free(m);
}
static struct kern_stream *stream_of(struct kern_dev *m)
{
    return &m->stream;
}
static int threads_of(const struct kern_dev *m)
{
    return kern_dev_threads(m->inner);
}
static const char *isa_of(const struct kern_dev *m)
{
    return kern_dev_isa(m->inner);
}
static const char *why_of(const struct kern_dev *m)
{
    return m->why;
}
static void use_inner(struct kern_dev *m)
{
    kern_dev_use(m->inner);
}
static const struct kern_backend mirror_backend = {.ops = &mirror_ops,
                                                   .host_memory = true,
                                                   .use = use_inner,
                                                   .close = close_mirror,
                                                   .stream = stream_of,
                                                   .threads = threads_of,
                                                   .isa = isa_of,
                                                   .why = why_of,
                                                   .alloc = alloc_host,
                                                   .free = free_host};

int kern_dev_open_mirror(struct kern_dev **out_dev, struct kern_dev *inner, struct tow_err *err)
{
    struct kern_dev *m = calloc(1, sizeof *m);
    if (!m) return tow_fail(err, TOW_ENOMEM, "no memory for a mirror");
    m->head.backend = m->stream.head.backend = &mirror_backend;
    m->stream.dev = m;
    m->inner = inner;
    m->s = kern_dev_stream(inner);
    m->ops = kern_dev_ops(inner);
    *out_dev = m;
    return 0;
}
