/* tests/gpu/attn_test.c - attention on the device at the shapes of V4-Flash: lengths around every
 * border there is, up to 262,144 entries, and a row alone against the same row in a batch, bit for
 * bit.
 *
 * Outputs are compared with the CPU's. Exit 77 where there is no device.
 */
#include "tests/support/check.h"
#include "tests/support/device.h"

#include "common/base/err.h"
#include "kernels/cuda/table.h"
#include "kernels/mirror.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { H = 64, W = 128, D = 512, RD = 64, C4 = 0, C128 = 1, POOL = 256, LONGEST = 1 << 20 };

static struct kern_dev *cpu, *gpu;
static const char *device; /* gpu's, without the mirror */
static uint64_t seed = 1;

static float rnd(void)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (float)(int32_t)(seed >> 32) * 0x1p-31f;
}
static void fill(uint16_t *x, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) x[i] = kern_bf16_encode(rnd() * scale);
}
static const struct kern_ops *ops_of(struct kern_dev *dev)
{
    return kern_dev_ops(dev);
}

/* A pool of POOL pages full of rows; tables of pages go round in it, so that contexts can be
 * long. */
struct world {
    struct kern_kv_layout l;
    uint8_t *pages, *tail;
    uint32_t *ids;
};
static void world_open(struct world *w, enum kern_kv_fmt kv, enum kern_ik_fmt ik)
{
    const struct kern_kv_spec sp = {.n_layers = 2,
                                    .ratios = {4, 128},
                                    .head_dim = D,
                                    .rope_dim = RD,
                                    .window = 128,
                                    .index_dim = W,
                                    .kv_fmt = kv,
                                    .ik_fmt = ik};
    float row[D];
    assert_int_equal(kern_kv_layout_init(&w->l, &sp, NULL), 0);
    w->pages = calloc(POOL, (size_t)w->l.page_bytes);
    w->tail = calloc(1, (size_t)w->l.tail_bytes);
    const int32_t n = LONGEST / w->l.page_tokens;
    w->ids = malloc((size_t)n * sizeof *w->ids);
    assert_true(w->pages && w->tail && w->ids);
    /* Neighbours in the table are far apart in the pool. */
    for (int32_t i = 0; i < n; i++) w->ids[i] = (uint32_t)(i * 97 + i / POOL) % POOL;
    for (int32_t i = 0; i < POOL; i++)
        for (int layer = 0; layer < 2; layer++) {
            const struct kern_kv_layer *y = &w->l.layer[layer];
            uint8_t *page = w->pages + i * w->l.page_bytes;
            for (int32_t e = 0; e < y->per_page; e++) {
                for (int c = 0; c < D; c++) row[c] = rnd() * 2;
                kern_kv_store(kv, page + y->main_off, y->per_page, e, row, D, RD);
                if (layer == C4) kern_ik_store(ik, page + y->index_off, y->per_page, e, row, W);
            }
        }
    for (int layer = 0; layer < 2; layer++)
        for (int slot = 0; slot < 128; slot++) {
            for (int c = 0; c < D; c++) row[c] = rnd() * 2;
            kern_kv_store(kv, w->tail + w->l.layer[layer].window_off, 128, slot, row, D, RD);
        }
    kern_mirror_know(gpu, w->pages, (size_t)(POOL * w->l.page_bytes));
}
static void world_close(struct world *w)
{
    kern_mirror_forget(gpu);
    free(w->pages), free(w->tail), free(w->ids);
}
static struct kern_seq seq_at(const struct world *w, int32_t row0, int32_t n_rows, int64_t pos0,
                              int32_t topk)
{
    return (struct kern_seq){.row0 = row0,
                             .n_rows = n_rows,
                             .pos0 = pos0,
                             .page_ids = w->ids,
                             .n_pages = (int32_t)kern_kv_pages_for(pos0 + n_rows, w->l.page_tokens),
                             .tail = w->tail,
                             .topk = topk};
}

struct rows {
    uint16_t *q, *kv, *o;
    int32_t *sel, *n_sel;
    float sink[H];
};
static void attend(struct kern_dev *dev, const struct world *w, int layer, const struct rows *r,
                   int32_t at, int32_t T, const struct kern_seq *seqs, int32_t n_seqs, uint16_t *o)
{
    const struct kern_attention p = {.q = r->q + (size_t)at * H * D,
                                     .kv = r->kv + (size_t)at * D,
                                     .sink = r->sink,
                                     .o = o,
                                     .pages = w->pages,
                                     .layout = &w->l,
                                     .layer = layer,
                                     .seqs = seqs,
                                     .n_seqs = n_seqs,
                                     .selected = layer == C4 ? r->sel + (size_t)at * 512 : NULL,
                                     .n_selected = r->n_sel + at,
                                     .sel_ld = 512,
                                     .T = T,
                                     .H = H,
                                     .scale = 0.0442f,
                                     .act = KERN_BF16};
    memset(o, 0xa5, (size_t)T * H * D * 2);
    assert_int_equal(ops_of(dev)->attention(kern_dev_stream(dev), &p), 0);
    assert_int_equal(kern_stream_sync(kern_dev_stream(dev)), 0);
}

static void attention_rows(enum kern_kv_fmt kv, int layer)
{
    /* Rows of their own, then a chunk whose window reaches back to the ring. So many rows take a
     * CTA for 64 heads each; of some the width is spread over two, which take one after the other,
     * or over four, of few over eight. */
    static const int32_t pos[] = {0,     1,      2,      3,      62,     63,         64,
                                  65,    126,    127,    128,    129,    191,        255,
                                  256,   511,    512,    639,    2047,   2048,       65535,
                                  65536, 114687, 114815, 131071, 262143, LONGEST - 1};
    enum { OWN = sizeof pos / sizeof *pos, CHUNK = 180, T = OWN + CHUNK, FROM = 3000 };
    struct world w;
    struct kern_seq seqs[OWN + 1];
    struct rows r = {.q = malloc((size_t)T * H * D * 2),
                     .kv = malloc((size_t)T * D * 2),
                     .o = malloc((size_t)T * H * D * 2),
                     .sel = malloc((size_t)T * 512 * 4),
                     .n_sel = malloc(T * 4)};
    uint16_t *want = malloc((size_t)T * H * D * 2), *alone = malloc((size_t)H * D * 2);
    static const int some[] = {9, 20, OWN, 64, 100, 160};
    world_open(&w, kv, KERN_IK_FP8);
    fill(r.q, (size_t)T * H * D, 1);
    fill(r.kv, (size_t)T * D, 2);
    for (int h = 0; h < H; h++) r.sink[h] = h == 5 ? -INFINITY : h == 6 ? 90 : rnd();
    for (int i = 0; i < OWN; i++) seqs[i] = seq_at(&w, i, 1, pos[i], 512);
    seqs[OWN] = seq_at(&w, OWN, CHUNK, FROM, 512);
    for (int t = 0; t < T; t++) {
        const int32_t n = ((t < OWN ? pos[t] : FROM + t - OWN) + 1) / 4, k = n < 512 ? n : 512;
        r.n_sel[t] = t % 7 == 6 ? k / 2 : k;
        for (int i = 0; i < 512; i++)
            r.sel[t * 512 + i] = i < r.n_sel[t] ? (int32_t)((int64_t)i * n / k) : -1;
    }
    attend(gpu, &w, layer, &r, 0, T, seqs, OWN + 1, r.o);
    attend(cpu, &w, layer, &r, 0, T, seqs, OWN + 1, want);
    double worst = 0;
    int64_t off = 0;
    for (int t = 0; t < T; t++) {
        double err = 0, mag = 0;
        for (int i = 0; i < H * D; i++) {
            const double x = (double)kern_bf16_decode(r.o[(size_t)t * H * D + i]);
            const double y = (double)kern_bf16_decode(want[(size_t)t * H * D + i]);
            err += (x - y) * (x - y), mag += y * y, off += x != y;
        }
        const double rms = sqrt(err / mag);
        /* Weights are rounded against other numbers than the CPU's (docs/numerics.md). */
        if (!(rms <= 4e-3)) fail_msg("layer %d, row %d: rms %g", layer, t, rms);
        worst = fmax(worst, rms);
    }
    print_message("attention, format %d, ratio %d: rms at most %.1e, %.4f of outputs differ\n",
                  (int)kv, layer == C4 ? 4 : 128, worst, (double)off / ((double)T * H * D));
    /* The chunk's first row too: it has the same rows in the ring before it. */
    for (int t = 0; t <= OWN; t++) {
        const struct kern_seq one = seq_at(&w, 0, 1, t < OWN ? pos[t] : FROM, 512);
        attend(gpu, &w, layer, &r, t, 1, &one, 1, alone);
        for (int i = 0; i < H * D; i++)
            if (alone[i] != r.o[(size_t)t * H * D + i])
                fail_msg("layer %d, row %d alone: element %d is %x, not %x", layer, t, i, alone[i],
                         r.o[(size_t)t * H * D + i]);
    }
    for (size_t k = 0; k < sizeof some / sizeof *some; k++) {
        const int own = some[k] < OWN ? some[k] : OWN;
        seqs[OWN].n_rows = some[k] - own;
        attend(gpu, &w, layer, &r, 0, some[k], seqs, own + (some[k] > own), want);
        for (size_t i = 0; i < (size_t)some[k] * H * D; i++)
            if (want[i] != r.o[i])
                fail_msg("layer %d, row %d of %d: element %d is %x, not %x", layer,
                         (int)(i / (H * D)), some[k], (int)(i % (H * D)), want[i], r.o[i]);
    }
    free(r.q), free(r.kv), free(r.o), free(r.sel), free(r.n_sel), free(want), free(alone);
    world_close(&w);
}
/* Outputs of a call are the CPU's within `bound` (rms of each row), NaN in the same places. */
static void check_near(const uint16_t *got, const uint16_t *want, int T, double bound)
{
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            double err = 0, mag = 0;
            for (int i = 0; i < D; i++) {
                const size_t at = ((size_t)t * H + h) * D + i;
                const double x = (double)kern_bf16_decode(got[at]);
                const double y = (double)kern_bf16_decode(want[at]);
                if (isnan(x) != isnan(y))
                    fail_msg("row %d, head %d, %d: %g, not %g", t, h, i, x, y);
                if (isfinite(y)) err += (x - y) * (x - y), mag += y * y;
            }
            if (!(err <= bound * bound * mag))
                fail_msg("row %d, head %d: rms %g", t, h, sqrt(err / mag));
        }
}
/* Codes of NaN, scales at both ends, lists with nothing behind them, rows of no sequence: few
 * rows and many, of each kernel. */
static void test_attention__odd_keys_are_near_the_cpu(void **state)
{
    enum { T = 80, POS = 5000 };
    struct world w;
    struct rows r = {.q = malloc((size_t)T * H * D * 2),
                     .kv = malloc((size_t)T * D * 2),
                     .sel = malloc((size_t)T * 512 * 4),
                     .n_sel = malloc(T * 4)};
    uint16_t *got = malloc((size_t)T * H * D * 2), *want = malloc((size_t)T * H * D * 2);
    (void)state;
    world_open(&w, KERN_KV_FP8, KERN_IK_FP8);
    const struct kern_kv_layer *y = &w.l.layer[C4];
    /* Of page 0, which all sequences begin with: a NaN code, a NaN scale, the largest scale that is
     * finite, the smallest, and in the ring the same. */
    uint8_t *part = w.pages + (int64_t)w.ids[0] * w.l.page_bytes + y->main_off;
    uint8_t *ring = w.tail + y->window_off;
    const int64_t row = D + RD;
    part[3 * row + 70] = 0x7f, part[4 * row + 447] = 0xff;
    part[y->per_page * row + 5 * 8 + 2] = 255;
    for (int i = 0; i < 7; i++) {
        part[y->per_page * row + 6 * 8 + i] = 0;
        part[y->per_page * row + 7 * 8 + i] = 135; /* 2^8 */
    }
    memset(ring + 9 * row + 64, 0x7f, 16);
    fill(r.q, (size_t)T * H * D, 0.05f);
    fill(r.kv, (size_t)T * D, 2);
    for (int h = 0; h < H; h++) r.sink[h] = rnd();
    for (int t = 0; t < T; t++) { /* odd rows list one of the odd entries, some nothing */
        r.n_sel[t] = t % 5 == 4 ? 0 : 60 + t;
        for (int i = 0; i < 512; i++) r.sel[t * 512 + i] = i < r.n_sel[t] ? 8 + i : -1;
        if (t % 2 && r.n_sel[t]) r.sel[t * 512] = 3 + t / 2 % 5;
    }
    /* Ring slot 9 is position 4873, which only rows up to 5000 see. */
    const struct kern_seq all = seq_at(&w, 0, T, POS, 512);
    attend(cpu, &w, C4, &r, 0, T, &all, 1, want);
    for (int n = T; n; n -= T / 2) {
        const struct kern_seq some = seq_at(&w, 0, n, POS, 512);
        attend(gpu, &w, C4, &r, 0, n, &some, 1, got);
        check_near(got, want, n, 8e-3);
    }
    for (int t = 0; t < T; t += 7) {
        const struct kern_seq one = seq_at(&w, 0, 1, POS, 512);
        attend(gpu, &w, C4, &r, t, 1, &one, 1, got);
        attend(cpu, &w, C4, &r, t, 1, &one, 1, want);
        check_near(got, want, 1, 8e-3);
    }
    /* The middle row of three belongs to nobody. */
    const struct kern_seq apart[2] = {seq_at(&w, 0, 1, 77, 512), seq_at(&w, 2, 1, 200, 512)};
    r.n_sel[0] = r.n_sel[2] = 1, r.sel[0] = r.sel[2 * 512] = 8;
    attend(gpu, &w, C4, &r, 0, 3, apart, 2, got);
    attend(cpu, &w, C4, &r, 0, 3, apart, 2, want);
    check_near(got, want, 1, 8e-3);
    check_near(got + 2 * H * D, want + 2 * H * D, 1, 8e-3);
    free(r.q), free(r.kv), free(r.sel), free(r.n_sel), free(got), free(want);
    world_close(&w);
}
static void test_attention__any_length_is_near_the_cpu(void **state)
{
    (void)state;
    attention_rows(KERN_KV_FP8, C4);
    attention_rows(KERN_KV_FP8, C128);
    attention_rows(KERN_KV_BF16, C4);
    attention_rows(KERN_KV_BF16, C128);
}

/* Rows of any length, and of no sequence, that the same CTAs take one after the other: their bits
 * in smaller calls. */
static void test_attention__rows_that_take_turns_have_the_same_bits(void **state)
{
    enum { T = 199, PIECE = 33 };
    static const int calls[] = {T, 198, 150, 133, 70};
    struct world w;
    struct rows r = {.q = malloc((size_t)T * H * D * 2),
                     .kv = malloc((size_t)T * D * 2),
                     .o = malloc((size_t)T * H * D * 2),
                     .sel = malloc((size_t)T * 512 * 4),
                     .n_sel = malloc(T * 4)};
    uint16_t *piece = malloc((size_t)T * H * D * 2);
    struct kern_seq seqs[T], some[T];
    int n_seqs = 0;
    (void)state;
    world_open(&w, KERN_KV_FP8, KERN_IK_FP8);
    fill(r.q, (size_t)T * H * D, 1);
    fill(r.kv, (size_t)T * D, 2);
    for (int h = 0; h < H; h++) r.sink[h] = rnd();
    for (int t = 0; t < T; t++) {
        const int32_t pos = t % 3 == 0 ? t % 64 : t % 3 == 1 ? 60 + t : 700 + 31 * t;
        const int32_t n = (pos + 1) / 4;
        r.n_sel[t] = n < 512 ? n : t % 2 ? 512 : 100;
        for (int i = 0; i < 512; i++)
            r.sel[t * 512 + i] = i < r.n_sel[t] ? (int32_t)((int64_t)i * n / r.n_sel[t]) : -1;
        if (t % 11 != 7 && t % 66 != 5) seqs[n_seqs++] = seq_at(&w, t, 1, pos, 512);
    }
    for (int layer = C4; layer <= C128; layer++)
        for (size_t k = 0; k < sizeof calls / sizeof *calls; k++) {
            int n = 0;
            while (n < n_seqs && seqs[n].row0 < calls[k]) n++;
            attend(gpu, &w, layer, &r, 0, calls[k], seqs, n, r.o);
            for (int at = 0, from = 0; at < calls[k]; at += PIECE) {
                const int rows = calls[k] - at < PIECE ? calls[k] - at : PIECE;
                n = 0;
                for (; from < n_seqs && seqs[from].row0 < at + rows; from++, n++) {
                    some[n] = seqs[from];
                    some[n].row0 -= at;
                }
                attend(gpu, &w, layer, &r, at, rows, some, n, piece);
                for (int s = 0; s < n; s++)
                    for (int i = 0; i < H * D; i++) {
                        const uint16_t got = r.o[(size_t)(at + some[s].row0) * H * D + (size_t)i],
                                       one = piece[(size_t)some[s].row0 * H * D + (size_t)i];
                        if (got != one)
                            fail_msg("layer %d, row %d of %d: element %d is %x, not %x", layer,
                                     at + some[s].row0, calls[k], i, got, one);
                    }
            }
        }
    free(r.q), free(r.kv), free(r.o), free(r.sel), free(r.n_sel), free(piece);
    world_close(&w);
}

/* `bytes` from the host to memory of the device's, `past` bytes behind an aligned address. */
static void *sent(struct kern_dev *dev, const void *from, size_t bytes, size_t past)
{
    uint8_t *p = kern_dev_alloc(dev, bytes + past);
    assert_non_null(p);
    assert_int_equal(kern_stream_write(kern_dev_stream(dev), p + past, from, bytes), 0);
    return p + past;
}
/* Queries, keys, pages and output in turn begin at an odd element: what copies 16 bytes at a time
 * must not take them. */
static void test_attention__arrays_that_are_not_aligned_are_near_the_cpu(void **state)
{
    enum { T = 11, POS = 700, ARRAYS = 4 };
    struct world w;
    struct kern_dev *bare;
    struct tow_err err = {0};
    struct rows r = {.q = malloc((size_t)T * H * D * 2),
                     .kv = malloc((size_t)T * D * 2),
                     .sel = malloc((size_t)T * 512 * 4),
                     .n_sel = malloc(T * 4)};
    const size_t o_bytes = (size_t)T * H * D * 2;
    uint16_t *got = malloc(o_bytes), *want = malloc(o_bytes);
    (void)state;
    assert_int_equal(kern_dev_open(&bare, device, 1, &err), 0);
    world_open(&w, KERN_KV_FP8, KERN_IK_FP8);
    fill(r.q, (size_t)T * H * D, 1);
    fill(r.kv, (size_t)T * D, 2);
    for (int h = 0; h < H; h++) r.sink[h] = rnd();
    for (int t = 0; t < T; t++) {
        r.n_sel[t] = 40 + t;
        for (int i = 0; i < 512; i++) r.sel[t * 512 + i] = i < r.n_sel[t] ? 3 * i : -1;
    }
    const struct kern_seq seq = seq_at(&w, 0, T, POS, 512);
    attend(cpu, &w, C4, &r, 0, T, &seq, 1, want);
    for (int odd = -1; odd < ARRAYS; odd++) { /* at first none */
        size_t past[ARRAYS] = {0};
        if (odd >= 0) past[odd] = 2;
        struct kern_seq q = seq;
        q.tail = sent(bare, w.tail, (size_t)w.l.tail_bytes, 0);
        struct kern_attention p = {
            .q = sent(bare, r.q, (size_t)T * H * D * 2, past[0]),
            .kv = sent(bare, r.kv, (size_t)T * D * 2, past[1]),
            .sink = sent(bare, r.sink, sizeof r.sink, 0),
            .o = sent(bare, r.q, o_bytes, past[2]), /* something else than the result */
            .pages = sent(bare, w.pages, (size_t)(POOL * w.l.page_bytes), past[3]),
            .layout = &w.l,
            .layer = C4,
            .seqs = &q,
            .n_seqs = 1,
            .selected = sent(bare, r.sel, (size_t)T * 512 * 4, 0),
            .n_selected = sent(bare, r.n_sel, T * 4, 0),
            .sel_ld = 512,
            .T = T,
            .H = H,
            .scale = 0.0442f,
            .act = KERN_BF16};
        assert_int_equal(ops_of(bare)->attention(kern_dev_stream(bare), &p), 0);
        assert_int_equal(kern_stream_read(kern_dev_stream(bare), got, p.o, o_bytes), 0);
        check_near(got, want, T, 8e-3);
        void *all[] = {q.tail,
                       (uint8_t *)p.q - past[0],
                       (uint8_t *)p.kv - past[1],
                       (void *)p.sink,
                       (uint8_t *)p.o - past[2],
                       (uint8_t *)p.pages - past[3],
                       (void *)p.selected,
                       (void *)p.n_selected};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) kern_dev_free(bare, all[i]);
    }
    free(r.q), free(r.kv), free(r.sel), free(r.n_sel), free(got), free(want);
    world_close(&w);
    kern_dev_close(bare);
}

/* Rows' outputs in a call of many rows, whose stored keys are widened ahead if they fit, and in
 * calls of `few` each, which widen tile by tile: the same bits. */
static void same_in_pieces(const struct world *w, int layer, const struct rows *r, int32_t T,
                           const struct kern_seq *seqs, int32_t n_seqs, int32_t few)
{
    uint16_t *piece = malloc((size_t)few * H * D * 2);
    assert_non_null(piece);
    attend(gpu, w, layer, r, 0, T, seqs, n_seqs, r->o);
    for (int32_t i = 0; i < n_seqs;) {
        struct kern_seq some[128];
        const int32_t at = seqs[i].row0;
        int32_t n = 0, rows = 0;
        do { /* whole sequences, or a long one's first rows */
            some[n] = seqs[i++];
            some[n].row0 -= at;
            if (some[n].n_rows > few) some[n].n_rows = few;
            rows += some[n++].n_rows;
        } while (i < n_seqs && n < 128 && rows + seqs[i].n_rows <= few);
        attend(gpu, w, layer, r, at, rows, some, n, piece);
        for (int64_t k = 0; k < (int64_t)rows * H * D; k++)
            if (piece[k] != r->o[(int64_t)at * H * D + k])
                fail_msg("layer %d, row %d: element %d is %x, not %x", layer,
                         at + (int)(k / (H * D)), (int)(k % (H * D)), r->o[(int64_t)at * H * D + k],
                         piece[k]);
    }
    free(piece);
}
static void test_attention__keys_widened_ahead_give_the_same_bits(void **state)
{
    enum { T = 700, FEW = 255 };
    struct rows r = {.q = malloc((size_t)T * H * D * 2),
                     .kv = malloc((size_t)T * D * 2),
                     .o = malloc((size_t)T * H * D * 2),
                     .sel = malloc((size_t)T * 512 * 4),
                     .n_sel = malloc(T * 4)};
    struct kern_seq *seqs = malloc(T * sizeof *seqs);
    (void)state;
    assert_true(r.q && r.kv && r.o && r.sel && r.n_sel && seqs);
    fill(r.q, (size_t)T * H * D, 1);
    fill(r.kv, (size_t)T * D, 2);
    for (int h = 0; h < H; h++) r.sink[h] = rnd();
    for (int kind = 0; kind < 4; kind++) {
        struct world w;
        const int layer = kind % 2 ? C128 : C4;
        world_open(&w, kind / 2 ? KERN_KV_BF16 : KERN_KV_FP8, KERN_IK_FP8);
        /* From the start, from where the ring is not yet full, with a full ring, from far on; then
         * rows of so many sequences that their keys do not fit. */
        const struct kern_seq chunks[] = {seq_at(&w, 0, 140, 0, 512), seq_at(&w, 140, 31, 77, 512),
                                          seq_at(&w, 171, 300, 3001, 512),
                                          seq_at(&w, 471, 229, 20000, 512)};
        for (int apart = 0; apart < 2; apart++) {
            const int32_t n_seqs = apart ? T / 4 : 4;
            for (int i = 0; i < n_seqs; i++)
                seqs[i] = apart ? seq_at(&w, 4 * i, 4, 31 * i, 512) : chunks[i];
            for (int i = 0; i < n_seqs; i++)
                for (int t = seqs[i].row0; t < seqs[i].row0 + seqs[i].n_rows; t++) {
                    const int32_t n = ((int32_t)seqs[i].pos0 + t - seqs[i].row0 + 1) / 4;
                    r.n_sel[t] = n < 512 ? n : t % 9 == 8 ? 100 : 512;
                    for (int k = 0; k < 512; k++)
                        r.sel[t * 512 + k] =
                            k < r.n_sel[t] ? (int32_t)((int64_t)k * n / r.n_sel[t]) : -1;
                }
            same_in_pieces(&w, layer, &r, T, seqs, n_seqs, FEW);
        }
        world_close(&w);
    }
    free(r.q), free(r.kv), free(r.o), free(r.sel), free(r.n_sel), free(seqs);
}

/* An fp8 weight of random codes without NaN. */
static struct kern_weight random_weight(int32_t n, int32_t k)
{
    const int64_t cols = (k + 127) / 128, n_scales = (n + 127) / 128 * cols;
    uint8_t *d = malloc((size_t)n * (size_t)k), *sc = malloc((size_t)n_scales);
    assert_true(d && sc);
    for (int64_t i = 0; i < (int64_t)n * k; i++) d[i] = kern_e4m3_encode(rnd() * 100);
    for (int64_t i = 0; i < n_scales; i++) sc[i] = (uint8_t)(116 + i % 5);
    return (struct kern_weight){.data = d,
                                .scale = sc,
                                .fmt = KERN_W_FP8,
                                .sfmt = KERN_S_UE8M0,
                                .n = n,
                                .k = k,
                                .row_bytes = k,
                                .scale_row_bytes = cols,
                                .scale2 = 1};
}
static void free_weight(struct kern_weight w)
{
    free((void *)(uintptr_t)w.data), free((void *)(uintptr_t)w.scale);
}
#ifdef TOW_CUDA
enum { KINDS = 2 }; /* of products */
#else
enum { KINDS = 1 };
#endif
/* Attention and what its output goes through, at once and one by one: by each kind of kernels that
 * there is for attention and for wo_a. */
static void test_attend__has_the_bits_of_its_ops(void **state)
{
    enum { LOW = 8192, OUT = 384, MOST = 600, POS = 3001 };
    static const int32_t Ts[] = {1, 20, 40, 100, 150, 210, 300, MOST}, groups[] = {8, 64};
    struct world w;
    struct rows r = {.q = malloc((size_t)MOST * H * D * 2),
                     .kv = malloc((size_t)MOST * D * 2),
                     .o = malloc((size_t)MOST * H * D * 2),
                     .sel = malloc((size_t)MOST * 512 * 4),
                     .n_sel = malloc(MOST * 4)};
    float *cos = malloc((size_t)MOST * (RD / 2) * 4), *sin = malloc((size_t)MOST * (RD / 2) * 4);
    uint16_t *low = malloc((size_t)MOST * LOW * 2), *got = malloc((size_t)MOST * OUT * 2),
             *want = malloc((size_t)MOST * OUT * 2);
    const struct kern_weight wo_a[] = {random_weight(LOW / 2, H * D / groups[0]),
                                       random_weight(LOW, H * D / groups[1])},
                             wo_b[] = {random_weight(OUT, LOW / 2), random_weight(OUT, LOW)};
    struct kern_stream *s = kern_dev_stream(gpu);
    const struct kern_ops *ops = ops_of(gpu);
    (void)state;
    assert_true(r.q && r.kv && r.o && r.sel && r.n_sel && cos && sin && low && got && want);
    world_open(&w, KERN_KV_FP8, KERN_IK_FP8);
    fill(r.q, (size_t)MOST * H * D, 1);
    fill(r.kv, (size_t)MOST * D, 2);
    for (int i = 0; i < MOST * (RD / 2); i++) cos[i] = rnd(), sin[i] = rnd();
    for (int h = 0; h < H; h++) r.sink[h] = rnd();
    for (int t = 0; t < MOST; t++) {
        r.n_sel[t] = t % 9 == 8 ? 100 : 512;
        for (int k = 0; k < 512; k++) r.sel[t * 512 + k] = k < r.n_sel[t] ? k + t % 200 : -1;
    }
    for (int kind = 0; kind < KINDS; kind++) {
#ifdef TOW_CUDA
        cuda_fp8_products = kind; /* a mirror has no switch */
#endif
        for (size_t i = 0; i < 2 * sizeof Ts / sizeof *Ts; i++) {
            const int32_t T = Ts[i / 2], G = groups[i % 2], low_width = wo_a[i % 2].n;
            const int layer = i % 2 ? C128 : C4;
            const struct kern_seq seq = seq_at(&w, 0, T, POS, 512);
            const struct kern_attend p = {.attention = {.q = r.q,
                                                        .kv = r.kv,
                                                        .sink = r.sink,
                                                        .o = r.o,
                                                        .pages = w.pages,
                                                        .layout = &w.l,
                                                        .layer = layer,
                                                        .seqs = &seq,
                                                        .n_seqs = 1,
                                                        .selected = layer == C4 ? r.sel : NULL,
                                                        .n_selected = r.n_sel,
                                                        .sel_ld = 512,
                                                        .T = T,
                                                        .H = H,
                                                        .scale = 0.0442f,
                                                        .act = KERN_BF16},
                                          .back = {.q = r.o,
                                                   .cos = cos,
                                                   .sin = sin,
                                                   .T = T,
                                                   .H = H,
                                                   .d = D,
                                                   .rd = RD,
                                                   .inverse = true,
                                                   .act = KERN_BF16},
                                          .wo_a = {.x = r.o,
                                                   .w = wo_a[i % 2],
                                                   .y = low,
                                                   .ld_x = H * D,
                                                   .ld_y = low_width,
                                                   .T = T,
                                                   .N = low_width / G,
                                                   .K = H * D / G,
                                                   .groups = G,
                                                   .x_dtype = KERN_BF16,
                                                   .y_dtype = KERN_BF16,
                                                   .round_w = true},
                                          .wo_b = {.x = low,
                                                   .w = wo_b[i % 2],
                                                   .y = got,
                                                   .ld_x = low_width,
                                                   .ld_y = OUT,
                                                   .T = T,
                                                   .N = OUT,
                                                   .K = low_width,
                                                   .groups = 1,
                                                   .x_dtype = KERN_BF16,
                                                   .y_dtype = KERN_BF16,
                                                   .aq = KERN_AQ_A128}};
            struct kern_linear last = p.wo_b;
            last.y = want;
            memset(r.o, 0xa5, (size_t)T * H * D * 2);
            assert_int_equal(ops->attend(s, &p), 0);
            memset(r.o, 0xa5, (size_t)T * H * D * 2);
            assert_int_equal(ops->attention(s, &p.attention), 0);
            assert_int_equal(ops->heads_rope(s, &p.back), 0);
            assert_int_equal(ops->linear(s, &p.wo_a), 0);
            assert_int_equal(ops->linear(s, &last), 0);
            int64_t differ = 0, zeros = 0;
            for (int64_t k = 0; k < (int64_t)T * OUT; k++)
                differ += got[k] != want[k], zeros += !(want[k] & 0x7fff);
            if (differ || zeros > (int64_t)T * OUT / 50)
                fail_msg("kind %d, layer %d, %d rows: %lld of %lld outputs differ, %lld are zero",
                         kind, layer, T, (long long)differ, (long long)T * OUT, (long long)zeros);
        }
    }
#ifdef TOW_CUDA
    cuda_fp8_products = 0;
#endif
    world_close(&w);
    for (int i = 0; i < 2; i++) free_weight(wo_a[i]), free_weight(wo_b[i]);
    free(r.q), free(r.kv), free(r.o), free(r.sel), free(r.n_sel);
    free(cos), free(sin), free(low), free(got), free(want);
}

int main(int argc, char **argv)
{
    char mirror[64];
    device = test_cuda_device();
    snprintf(mirror, sizeof mirror, "mirror:%s", device);
    struct tow_err err = {0};
    if (kern_dev_open(&gpu, mirror, 1, &err) < 0) return test_no_device(&err);
    if (kern_dev_open(&cpu, "cpu", 0, &err) < 0) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention__rows_that_take_turns_have_the_same_bits),
        cmocka_unit_test(test_attention__any_length_is_near_the_cpu),
        cmocka_unit_test(test_attention__odd_keys_are_near_the_cpu),
        cmocka_unit_test(test_attention__keys_widened_ahead_give_the_same_bits),
        cmocka_unit_test(test_attention__arrays_that_are_not_aligned_are_near_the_cpu),
        cmocka_unit_test(test_attend__has_the_bits_of_its_ops),
    };
    TEST_CHOOSE(argc, argv, tests);
    int failed = cmocka_run_group_tests_name("gpu/attn", tests, NULL, NULL);
    kern_dev_close(gpu);
    kern_dev_close(cpu);
    return failed;
}
