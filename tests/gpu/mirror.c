/* tests/gpu/mirror.c - see mirror.h. Device memory of a call comes from one arena that starts again
 * with the next call; each span is followed by a guard whose bytes must not change. Weights are
 * placed once per case and found again by their host address. */
#include "tests/gpu/mirror.h"

#include "tests/support/check.h"

#include <stdlib.h>
#include <string.h>

enum { ARENA_BYTES = 512 << 20, GUARD = 256, MAX_SPANS = 64, MAX_PLACED = 64 };

struct span {
    void *host;
    uint8_t *dev;
    size_t bytes;
    bool out;
};
static struct {
    struct kern_dev *dev;
    struct kern_stream *s;
    const struct kern_ops *ops;
    uint8_t *arena;
    size_t used;
    struct span spans[MAX_SPANS];
    int n_spans;
    struct {
        const void *host;      /* data of the first weight */
        struct kern_weight *w; /* owned [n] */
        int32_t n;
    } placed[MAX_PLACED];
    int n_placed;
    const void *pool;
    int64_t pool_bytes;
} m;

int mirror_open(struct kern_dev *dev)
{
    m.dev = dev;
    m.s = kern_dev_stream(dev);
    m.ops = kern_dev_ops(dev);
    m.arena = kern_dev_alloc(dev, ARENA_BYTES);
    return m.arena ? 0 : -1;
}

void mirror_reset(void)
{
    for (int i = 0; i < m.n_placed; i++) {
        kern_dev_unplace(m.dev, m.placed[i].w[0].data);
        free(m.placed[i].w);
    }
    m.n_placed = 0;
    m.pool = NULL;
}

void mirror_close(void)
{
    mirror_reset();
    kern_dev_free(m.dev, m.arena);
    memset(&m, 0, sizeof m);
}

void mirror_pool(void *ctx, const void *pages, int64_t bytes)
{
    (void)ctx;
    m.pool = pages;
    m.pool_bytes = bytes;
}

/* The device copy of [p, p + bytes); a span already there is the same memory. */
static void *span(const void *p, int64_t bytes, bool out)
{
    if (!p) return NULL;
    if (bytes < 0) bytes = 0;
    for (int i = 0; i < m.n_spans; i++)
        if (m.spans[i].host == p && m.spans[i].bytes == (size_t)bytes) {
            m.spans[i].out |= out;
            return m.spans[i].dev;
        }
    uint8_t guard[GUARD];
    const size_t room = ((size_t)bytes + 255) / 256 * 256 + GUARD;
    if (m.n_spans == MAX_SPANS || m.used + room > ARENA_BYTES) fail_msg("mirror: out of room");
    struct span *x = &m.spans[m.n_spans++];
    *x = (struct span){(void *)(uintptr_t)p, m.arena + m.used, (size_t)bytes, out};
    m.used += room;
    memset(guard, 0x5a, sizeof guard);
    assert_int_equal(kern_stream_write(m.s, x->dev, p, x->bytes), 0);
    assert_int_equal(kern_stream_write(m.s, x->dev + x->bytes, guard, GUARD), 0);
    return x->dev;
}
static const void *in(const void *p, int64_t bytes)
{
    return span(p, bytes, false);
}
static void *out(void *p, int64_t bytes)
{
    return span(p, bytes, true);
}

static void begin(void)
{
    m.n_spans = 0;
    m.used = 0;
}
static int end(int rc)
{
    for (int i = 0; i < m.n_spans; i++) {
        const struct span *x = &m.spans[i];
        uint8_t guard[GUARD];
        if (x->out) assert_int_equal(kern_stream_read(m.s, x->host, x->dev, x->bytes), 0);
        assert_int_equal(kern_stream_read(m.s, guard, x->dev + x->bytes, GUARD), 0);
        for (int k = 0; k < GUARD; k++)
            if (guard[k] != 0x5a) fail_msg("byte %d behind a span of %zu was written", k, x->bytes);
    }
    assert_int_equal(kern_stream_sync(m.s), 0);
    return rc;
}

static const struct kern_weight *weights(const struct kern_weight *w, int32_t n)
{
    for (int i = 0; i < m.n_placed; i++)
        if (m.placed[i].host == w[0].data && m.placed[i].n == n) return m.placed[i].w;
    if (m.n_placed == MAX_PLACED) fail_msg("mirror: too many weights");
    struct kern_weight *copy = malloc((size_t)n * sizeof *copy);
    struct tow_err err;
    if (!copy) abort();
    memcpy(copy, w, (size_t)n * sizeof *copy);
    m.placed[m.n_placed].host = w[0].data;
    m.placed[m.n_placed].w = copy;
    m.placed[m.n_placed++].n = n;
    assert_int_equal(kern_dev_place(m.dev, copy, n, &err), 0);
    return copy;
}
static struct kern_vec vec(struct kern_vec v)
{
    v.data = in(v.data, (int64_t)v.n * kern_dtype_bytes(v.dtype));
    return v;
}
static int64_t act(enum kern_dtype t)
{
    return kern_dtype_bytes(t);
}

/* --- sequences: tails are written by some ops, page tables are host arrays */

enum { MAX_SEQS = 64 };
static struct kern_seq seqs[MAX_SEQS];
static const struct kern_seq *send_seqs(const struct kern_seq *q, int32_t n,
                                        const struct kern_kv_layout *l, bool tails)
{
    if (n > MAX_SEQS) fail_msg("mirror: %d sequences", n);
    for (int32_t i = 0; i < n; i++) {
        seqs[i] = q[i];
        seqs[i].tail = span(q[i].tail, l->tail_bytes, tails);
    }
    return seqs;
}
static void *pool(const void *pages, bool written)
{
    if (!pages) return NULL;
    if (pages != m.pool) fail_msg("mirror: this pool was not announced");
    return span(pages, m.pool_bytes, written);
}
/* Rows that the tensors of a batch of sequences have. */
static int32_t rows_of(const struct kern_seq *q, int32_t n)
{
    int32_t T = 0;
    for (int32_t i = 0; i < n; i++)
        if (q[i].n_rows && q[i].row0 + q[i].n_rows > T) T = q[i].row0 + q[i].n_rows;
    return T;
}

/* --- the ops. p is a copy whose pointers are the device's. */
#define MIRROR(op) static int mirror_##op(struct kern_stream *s, const struct kern_##op *given)
#define BEGIN(op)                                                                                  \
    struct kern_##op p = *given;                                                                   \
    (void)s;                                                                                       \
    begin()
#define RUN(op) return end(m.ops->op(m.s, &p))

MIRROR(embed)
{
    BEGIN(embed);
    p.ids = in(p.ids, 4 * (int64_t)p.T);
    p.w = *weights(&p.w, 1);
    p.out = out(p.out, (int64_t)p.T * p.hc * p.w.k * act(p.act));
    RUN(embed);
}
MIRROR(rmsnorm)
{
    BEGIN(rmsnorm);
    const int64_t a = act(p.act);
    p.x = in(p.x, p.T ? ((p.T - 1) * p.ld_x + p.D) * a : 0);
    p.w = vec(p.w);
    p.y = out(p.y, p.T ? ((p.T - 1) * p.ld_y + p.D) * a : 0);
    RUN(rmsnorm);
}
MIRROR(linear)
{
    BEGIN(linear);
    p.x = in(p.x, p.T ? ((p.T - 1) * p.ld_x + (int64_t)p.groups * p.K) * act(p.x_dtype) : 0);
    p.w = *weights(&p.w, 1);
    p.y = out(p.y, p.T ? ((p.T - 1) * p.ld_y + (int64_t)p.groups * p.N) * act(p.y_dtype) : 0);
    RUN(linear);
}
MIRROR(hc_collapse)
{
    BEGIN(hc_collapse);
    const int64_t T = p.T, a = act(p.act);
    p.h = in(p.h, T * p.hc * p.D * a);
    p.base = in(p.base, 4 * (int64_t)p.fn.n);
    p.scale = in(p.scale, p.post ? 12 : 4);
    p.fn = *weights(&p.fn, 1);
    p.x = out(p.x, T * p.D * a);
    p.post = out(p.post, T * p.hc * 4);
    p.comb = out(p.comb, T * p.hc * p.hc * 4);
    RUN(hc_collapse);
}
MIRROR(hc_expand)
{
    BEGIN(hc_expand);
    const int64_t T = p.T, a = act(p.act);
    p.y = in(p.y, T * p.D * a);
    p.h = in(p.h, T * p.hc * p.D * a);
    p.post = in(p.post, T * p.hc * 4);
    p.comb = in(p.comb, T * p.hc * p.hc * 4);
    p.out = out(p.out, T * p.hc * p.D * a);
    RUN(hc_expand);
}
MIRROR(rope_table)
{
    BEGIN(rope_table);
    const int64_t n = (int64_t)p.T * (p.rd / 2) * 4;
    p.pos = in(p.pos, 4 * (int64_t)p.T);
    p.inv_freq = in(p.inv_freq, p.rd / 2 * 4);
    p.cos = out(p.cos, n);
    p.sin = out(p.sin, n);
    RUN(rope_table);
}
MIRROR(heads_rope)
{
    BEGIN(heads_rope);
    const int64_t n = (int64_t)p.T * (p.rd / 2) * 4;
    p.q = out(p.q, (int64_t)p.T * p.H * p.d * act(p.act));
    p.cos = in(p.cos, n);
    p.sin = in(p.sin, n);
    RUN(heads_rope);
}
MIRROR(kv_prep)
{
    BEGIN(kv_prep);
    const int64_t n = (int64_t)p.T * (p.rd / 2) * 4;
    p.x = in(p.x, (int64_t)p.T * p.d * act(p.act));
    p.w = vec(p.w);
    p.cos = in(p.cos, n);
    p.sin = in(p.sin, n);
    p.y = out(p.y, (int64_t)p.T * p.d * act(p.act));
    RUN(kv_prep);
}
MIRROR(window_store)
{
    BEGIN(window_store);
    p.kv = in(p.kv, (int64_t)rows_of(p.seqs, p.n_seqs) * p.layout->spec.head_dim * act(p.act));
    p.seqs = send_seqs(p.seqs, p.n_seqs, p.layout, true);
    RUN(window_store);
}
MIRROR(compress)
{
    BEGIN(compress);
    const struct kern_kv_layer *y = &p.layout->layer[p.layer];
    const int64_t e = p.norm.n, c = kern_kv_overlaps(y->ratio) ? 2 : 1;
    const int64_t n = (int64_t)rows_of(p.seqs, p.n_seqs) * c * e * 4;
    p.kv = in(p.kv, n);
    p.gate = in(p.gate, n);
    p.ape = in(p.ape, y->ratio * c * e * 4);
    p.norm = vec(p.norm);
    p.inv_freq = in(p.inv_freq, p.layout->spec.rope_dim / 2 * 4);
    p.pages = pool(p.pages, true);
    p.seqs = send_seqs(p.seqs, p.n_seqs, p.layout, true);
    RUN(compress);
}
MIRROR(index_query)
{
    BEGIN(index_query);
    const int64_t n = (int64_t)p.T * (p.rd / 2) * 4;
    p.q = out(p.q, (int64_t)p.T * p.H * p.w * act(p.act));
    p.cos = in(p.cos, n);
    p.sin = in(p.sin, n);
    RUN(index_query);
}
MIRROR(index_select)
{
    BEGIN(index_select);
    const int64_t T = p.T, rows = p.score_rows ? p.n_score_rows : T;
    p.q = in(p.q, T * p.H * p.layout->spec.index_dim * act(p.act));
    p.wt = in(p.wt, T * p.H * act(p.act));
    p.pages = pool(p.pages, false);
    p.seqs = send_seqs(p.seqs, p.n_seqs, p.layout, false);
    p.selected = out(p.selected, T * p.sel_ld * 4);
    p.n_selected = out(p.n_selected, T * 4);
    p.scores = out(p.scores, rows * p.score_ld * 4);
    p.margin = out(p.margin, T * 4);
    RUN(index_select);
}
MIRROR(index_rank)
{
    BEGIN(index_rank);
    struct kern_seq row = *p.seq;
    row.tail = span(row.tail, p.layout->tail_bytes, false);
    p.scores = in(p.scores, (row.pos0 + 1) / p.layout->layer[p.layer].ratio * 4);
    p.q = in(p.q, (int64_t)p.T * p.H * p.layout->spec.index_dim * act(p.act));
    p.wt = in(p.wt, (int64_t)p.T * p.H * act(p.act));
    p.pages = pool(p.pages, false);
    p.seq = &row;
    p.ranks = out(p.ranks, p.n_entries * (int64_t)sizeof *p.ranks);
    p.kth = out(p.kth, 4);
    p.next = out(p.next, 4);
    RUN(index_rank);
}
MIRROR(attention)
{
    BEGIN(attention);
    const int64_t T = p.T, d = p.layout->spec.head_dim, a = act(p.act);
    p.q = in(p.q, T * p.H * d * a);
    p.kv = in(p.kv, T * d * a);
    p.sink = in(p.sink, p.H * 4);
    p.o = out(p.o, T * p.H * d * a);
    p.pages = pool(p.pages, false);
    p.seqs = send_seqs(p.seqs, p.n_seqs, p.layout, false);
    p.n_selected = p.selected ? in(p.n_selected, T * 4) : NULL;
    p.selected = in(p.selected, T * p.sel_ld * 4);
    RUN(attention);
}
MIRROR(route)
{
    BEGIN(route);
    const int64_t T = p.T;
    p.logits = in(p.logits, T * p.E * 4);
    p.bias = in(p.bias, p.E * 4);
    p.tid2eid = in(p.tid2eid, (int64_t)p.V * p.k * p.tid_bytes);
    p.ids = p.tid2eid ? in(p.ids, T * 4) : NULL;
    p.experts = out(p.experts, T * p.k * 4);
    p.weights = out(p.weights, T * p.k * 4);
    p.margin = out(p.margin, T * 4);
    RUN(route);
}
MIRROR(moe)
{
    BEGIN(moe);
    const int64_t T = p.T;
    p.x = in(p.x, T * p.D * act(p.act));
    p.experts = in(p.experts, T * p.k * 4);
    p.weights = in(p.weights, T * p.k * 4);
    p.w1 = weights(p.w1, p.E);
    p.w2 = weights(p.w2, p.E);
    p.w3 = weights(p.w3, p.E);
    p.out = out(p.out, T * p.D * 4);
    RUN(moe);
}
MIRROR(swiglu)
{
    BEGIN(swiglu);
    const int64_t n = (int64_t)p.T * p.I * act(p.act);
    p.g = in(p.g, n);
    p.u = in(p.u, n);
    p.y = out(p.y, n);
    RUN(swiglu);
}
MIRROR(add)
{
    BEGIN(add);
    p.a = in(p.a, p.n * 4);
    p.b = in(p.b, p.n * act(p.act));
    p.y = out(p.y, p.n * act(p.act));
    RUN(add);
}
MIRROR(mtp_mix)
{
    BEGIN(mtp_mix);
    const int64_t n = (int64_t)p.T * p.hc * p.D * act(p.act);
    p.e = in(p.e, (int64_t)p.T * p.D * act(p.act));
    p.g = in(p.g, n);
    p.out = out(p.out, n);
    RUN(mtp_mix);
}

const struct kern_ops mirror_ops = {.name = "cuda, mirrored",
#define X(op) .op = mirror_##op,
                                    KERN_OPS(X)
#undef X
};
