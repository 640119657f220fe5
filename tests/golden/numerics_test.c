/* `towpath-ctl numerics` on the native checkpoint: all rows pass; and for each planted fault
 * exactly the rows that fit it fail, by name. A fault is one op of the table replaced, or a byte of
 * a page changed on its way. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "deploy/ctl/numerics.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char native[] = "tests/golden/data/native/checkpoint";

static struct kern_ops good, faulty;

/* ------------------------------------------------------------------ faults in ops */

static int select_one_less(struct kern_stream *s, const struct kern_index_select *p)
{
    int rc = good.index_select(s, p);
    for (int32_t t = 0; rc == 0 && t < p->T; t++)
        if (p->n_selected[t] > 1) p->selected[t * p->sel_ld + --p->n_selected[t]] = -1;
    return rc;
}

static int select_bf16_scores(struct kern_stream *s, const struct kern_index_select *p)
{
    int rc = good.index_select(s, p);
    for (int64_t i = 0; rc == 0 && p->scores && i < p->T * p->score_ld; i++)
        p->scores[i] = kern_bf16_round(p->scores[i]);
    return rc;
}

/* (a, b) of one pair turned by an angle. */
static void turn(uint16_t *a, uint16_t *b, float cs, float sn)
{
    float x = kern_bf16_decode(*a), y = kern_bf16_decode(*b);
    *a = kern_bf16_encode(x * cs - y * sn);
    *b = kern_bf16_encode(x * sn + y * cs);
}

/* Turns pairs (i, i + rd/2), and turns neighbours back, which the op will turn forward. */
static void halves_for_neighbours(uint16_t *x, const float *cs, const float *sn, int32_t rd)
{
    for (int32_t i = 0; i < rd / 2; i++) turn(&x[i], &x[i + rd / 2], cs[i], sn[i]);
    for (int32_t i = 0; i < rd / 2; i++) turn(&x[2 * i], &x[2 * i + 1], cs[i], -sn[i]);
}

static int query_in_halves(struct kern_stream *s, const struct kern_index_query *p)
{
    for (int64_t i = 0; i < (int64_t)p->T * p->H; i++)
        halves_for_neighbours((uint16_t *)p->q + i * p->w + p->w - p->rd,
                              p->cos + i / p->H * (p->rd / 2), p->sin + i / p->H * (p->rd / 2),
                              p->rd);
    return good.index_query(s, p);
}

static int heads_in_halves(struct kern_stream *s, const struct kern_heads_rope *p)
{
    for (int64_t i = 0; !p->norm && i < (int64_t)p->T * p->H; i++)
        halves_for_neighbours((uint16_t *)p->q + i * p->d + p->d - p->rd,
                              p->cos + i / p->H * (p->rd / 2), p->sin + i / p->H * (p->rd / 2),
                              p->rd);
    return good.heads_rope(s, p);
}

static int keys_in_halves(struct kern_stream *s, const struct kern_kv_prep *p)
{
    const int32_t half = p->rd / 2;
    int rc = good.kv_prep(s, p);
    for (int32_t t = 0; rc == 0 && t < p->T; t++) {
        uint16_t *x = (uint16_t *)p->y + (int64_t)t * p->d + p->d - p->rd;
        const float *cs = p->cos + t * half, *sn = p->sin + t * half;
        for (int32_t i = 0; i < half; i++) turn(&x[2 * i], &x[2 * i + 1], cs[i], -sn[i]);
        for (int32_t i = 0; i < half; i++) turn(&x[i], &x[i + half], cs[i], sn[i]);
    }
    return rc;
}

/* Cosines of an angle kept in bf16, as fast tables do. */
static int table_in_bf16(struct kern_stream *s, const struct kern_rope_table *p)
{
    int rc = good.rope_table(s, p);
    for (int64_t i = 0; rc == 0 && i < (int64_t)p->T * p->rd / 2; i++)
        p->cos[i] = kern_bf16_round(p->cos[i]);
    return rc;
}

/* Entries rotated as if frequencies were one in a hundred higher. */
static int compress_with(struct kern_stream *s, const struct kern_compress *p, bool wrong)
{
    struct kern_compress q = *p;
    float freq[512];
    for (int i = 0; i < p->layout->spec.rope_dim / 2; i++)
        freq[i] = p->inv_freq[i] * (wrong ? 1.01f : 1);
    q.inv_freq = freq;
    return good.compress(s, &q);
}
static int index_keys_misplaced(struct kern_stream *s, const struct kern_compress *p)
{
    return compress_with(s, p, p->index);
}
static int entries_misplaced(struct kern_stream *s, const struct kern_compress *p)
{
    return compress_with(s, p, !p->index);
}

/* Each row of scales from the next block of rows. */
static int linear_next_scale(struct kern_stream *s, const struct kern_linear *p)
{
    struct kern_linear q = *p;
    const int64_t blocks = (p->w.n + 127) / 128, row = p->w.scale_row_bytes;
    if (p->w.fmt != KERN_W_FP8 || blocks < 2) return good.linear(s, p);
    uint8_t *scale = malloc((size_t)(blocks * row));
    for (int64_t b = 0; b < blocks; b++)
        memcpy(scale + b * row, (const uint8_t *)p->w.scale + (b + 1) % blocks * row, (size_t)row);
    q.w.scale = scale;
    int rc = good.linear(s, &q);
    free(scale);
    return rc;
}

static int linear_bf16_sums(struct kern_stream *s, const struct kern_linear *p)
{
    int rc = good.linear(s, p);
    for (int64_t t = 0; rc == 0 && p->y_dtype == KERN_F32 && p->w.fmt == KERN_W_BF16 && t < p->T;
         t++)
        for (int64_t n = 0; n < p->N; n++)
            ((float *)p->y)[t * p->ld_y + n] = kern_bf16_round(((float *)p->y)[t * p->ld_y + n]);
    return rc;
}

/* The scales of each stored fp8 entry of a sequence, `by` blocks on. */
static void turn_scales(const struct kern_attention *p, const struct kern_seq *q, int by)
{
    const struct kern_kv_spec *sp = &p->layout->spec;
    const struct kern_kv_layer *y = &p->layout->layer[p->layer];
    const int32_t plain = sp->head_dim - sp->rope_dim, n = plain / 64;
    if (sp->kv_fmt != KERN_KV_FP8 || y->ratio == 0) return;
    for (int32_t e = 0; e < (q->pos0 + q->n_rows) / y->ratio; e++) {
        uint8_t *part = (uint8_t *)(uintptr_t)p->pages +
                        q->page_ids[e / y->per_page] * p->layout->page_bytes + y->main_off;
        uint8_t *scale = part + (int64_t)y->per_page * (plain + 2 * sp->rope_dim) +
                         e % y->per_page * ((n + 7) / 8 * 8);
        uint8_t old[64];
        memcpy(old, scale, (size_t)n);
        for (int i = 0; i < n; i++) scale[i] = old[(i + by + n) % n];
    }
}

static int attention_next_scale(struct kern_stream *s, const struct kern_attention *p)
{
    for (int32_t i = 0; i < p->n_seqs; i++) turn_scales(p, &p->seqs[i], 1);
    int rc = good.attention(s, p);
    for (int32_t i = 0; i < p->n_seqs; i++) turn_scales(p, &p->seqs[i], -1);
    return rc;
}

static int attention_without_sink(struct kern_stream *s, const struct kern_attention *p)
{
    struct kern_attention q = *p;
    float *sink = malloc((size_t)p->H * sizeof *sink);
    for (int32_t h = 0; h < p->H; h++) sink[h] = -1e30f;
    q.sink = sink;
    int rc = good.attention(s, &q);
    free(sink);
    return rc;
}

/* One head of one row is off by a bf16 step whenever the call looks as `odd` says. */
static void step_output(const struct kern_attention *p, bool odd)
{
    for (int32_t i = 0; odd && i < p->layout->spec.head_dim; i++)
        ((uint16_t *)p->o)[((int64_t)p->T * p->H - 1) * p->layout->spec.head_dim + i] ^= 16;
}
static int attention_alone(struct kern_stream *s, const struct kern_attention *p)
{
    int rc = good.attention(s, p);
    step_output(p, p->T == 1);
    return rc;
}
static int attention_beside(struct kern_stream *s, const struct kern_attention *p)
{
    int rc = good.attention(s, p);
    step_output(p, p->n_seqs == 2);
    return rc;
}
static int attention_of_96(struct kern_stream *s, const struct kern_attention *p)
{
    int rc = good.attention(s, p);
    step_output(p, p->T == 96);
    return rc;
}

/* The device gives up in the last section. */
static int attention_breaks(struct kern_stream *s, const struct kern_attention *p)
{
    return p->n_seqs == 2 ? TOW_EDEVICE : good.attention(s, p);
}

static int route_scaled_twice(struct kern_stream *s, const struct kern_route *p)
{
    struct kern_route q = *p;
    q.scale *= p->scale;
    return good.route(s, &q);
}
static int route_unscaled(struct kern_stream *s, const struct kern_route *p)
{
    struct kern_route q = *p;
    q.scale = 1;
    return good.route(s, &q);
}

/* The second matrix's scales from the next row. */
static int moe_next_scale(struct kern_stream *s, const struct kern_moe *p)
{
    struct kern_moe q = *p;
    struct kern_weight *w2 = malloc((size_t)p->E * sizeof *w2);
    memcpy(w2, p->w2, (size_t)p->E * sizeof *w2);
    for (int32_t e = 0; e < p->E; e++) {
        if (w2[e].fmt != KERN_W_MXFP4) continue;
        const size_t row = (size_t)w2[e].scale_row_bytes, n = (size_t)w2[e].n;
        uint8_t *scale = malloc(n * row);
        memcpy(scale, (const uint8_t *)w2[e].scale + row, (n - 1) * row);
        memcpy(scale + (n - 1) * row, w2[e].scale, row);
        w2[e].scale = scale;
    }
    q.w2 = w2;
    int rc = good.moe(s, &q);
    for (int32_t e = 0; e < p->E; e++)
        if (w2[e].fmt == KERN_W_MXFP4) free((void *)(uintptr_t)w2[e].scale);
    free(w2);
    return rc;
}

static int moe_without_clamp(struct kern_stream *s, const struct kern_moe *p)
{
    struct kern_moe q = *p;
    q.limit = 0;
    return good.moe(s, &q);
}

static int collapse_in_bf16(struct kern_stream *s, const struct kern_hc_collapse *p)
{
    struct kern_hc_collapse q = *p;
    const int64_t n = (int64_t)p->fn.n * p->fn.k;
    float *fn = malloc((size_t)n * sizeof *fn);
    memcpy(fn, p->fn.data, (size_t)n * sizeof *fn);
    for (int64_t i = 0; i < n; i++) fn[i] = kern_bf16_round(fn[i]);
    q.fn.data = fn;
    int rc = p->fn.fmt == KERN_W_F32 ? good.hc_collapse(s, &q) : TOW_EINVAL;
    free(fn);
    return rc;
}

/* comb read by its other index. */
static int expand_transposed(struct kern_stream *s, const struct kern_hc_expand *p)
{
    struct kern_hc_expand q = *p;
    const int32_t hc = p->hc;
    float *comb = malloc((size_t)p->T * (size_t)(hc * hc) * sizeof *comb);
    for (int32_t t = 0; t < p->T; t++)
        for (int32_t j = 0; j < hc; j++)
            for (int32_t k = 0; k < hc; k++)
                comb[(t * hc + j) * hc + k] = p->comb[(t * hc + k) * hc + j];
    q.comb = comb;
    int rc = good.hc_expand(s, &q);
    free(comb);
    return rc;
}

/* ------------------------------------------------------------------ faults in transit */

static void flip_page(void *ctx, uint32_t page, uint8_t *bytes, size_t n)
{
    (void)ctx, (void)n;
    if (page == 1) bytes[100] ^= 4;
}

/* Page 0 still holds what another page held. */
static uint8_t *first_page;
static void stale_page(void *ctx, uint32_t page, uint8_t *bytes, size_t n)
{
    (void)ctx;
    if (page == 0) first_page = bytes;
    if (page == 1) memcpy(first_page, bytes, n);
}

/* ------------------------------------------------------------------ the audit */

/* Names of the failed rows, in order, each followed by a space. */
static void audit(const struct ctl_numerics *n, char failed[1024])
{
    struct ctl_numerics_report r;
    struct tow_err err = {0};
    if (ctl_numerics_run(n, &r, &err) < 0) fail_msg("%s", err.msg);
    failed[0] = 0;
    for (int32_t i = 0; i < r.n_rows; i++)
        if (!r.rows[i].pass) {
            strncat(failed, r.rows[i].name, 1023 - strlen(failed));
            strncat(failed, " ", 1023 - strlen(failed));
        }
    assert_true(r.n_rows >= 30);
    ctl_numerics_fini(&r);
}

static struct ctl_numerics settings(void)
{
    return (struct ctl_numerics){
        .model_dir = native, .device = "cpu", .n_threads = 2, .n_tokens = 300, .n_entries = 4096};
}

/* Ops that are several, from the faulty table, so that a fault in one of these reaches them. */
static int linears_one_by_one(struct kern_stream *s, const struct kern_linears *p)
{
    int rc = p->norm ? faulty.rmsnorm(s, p->norm) : 0;
    if (rc == 0 && p->rope) rc = faulty.heads_rope(s, p->rope);
    for (int32_t i = 0; i < p->n && rc == 0; i++) rc = faulty.linear(s, &p->each[i]);
    return rc;
}
static int prepare_one_by_one(struct kern_stream *s, const struct kern_prepare *p)
{
    int rc = p->heads ? faulty.heads_rope(s, p->heads) : 0;
    if (rc == 0 && p->kv) rc = faulty.kv_prep(s, p->kv);
    if (rc == 0 && p->store) rc = faulty.window_store(s, p->store);
    if (rc == 0 && p->compress) rc = faulty.compress(s, p->compress);
    return rc == 0 && p->index ? faulty.index_query(s, p->index) : rc;
}
static int attend_one_by_one(struct kern_stream *s, const struct kern_attend *p)
{
    int rc = faulty.attention(s, &p->attention);
    if (rc == 0) rc = faulty.heads_rope(s, &p->back);
    if (rc == 0) rc = faulty.linear(s, &p->wo_a);
    return rc < 0 ? rc : faulty.linear(s, &p->wo_b);
}
static int ffn_one_by_one(struct kern_stream *s, const struct kern_ffn *p)
{
    int rc = faulty.linear(s, &p->gate);
    if (rc == 0) rc = faulty.route(s, &p->route);
    if (rc == 0) rc = faulty.moe(s, &p->moe);
    if (rc == 0) rc = faulty.linear(s, &p->w1);
    if (rc == 0) rc = faulty.linear(s, &p->w3);
    if (rc == 0) rc = faulty.swiglu(s, &p->swiglu);
    return rc < 0 ? rc : faulty.linear(s, &p->w2);
}

#define FAULT(fn, op, with)                                                                        \
    static const struct kern_ops *fn(const struct kern_ops *of_device)                             \
    {                                                                                              \
        good = faulty = *of_device;                                                                \
        faulty.linears = linears_one_by_one;                                                       \
        faulty.prepare = prepare_one_by_one;                                                       \
        faulty.attend = attend_one_by_one;                                                         \
        faulty.ffn = ffn_one_by_one;                                                               \
        faulty.op = with;                                                                          \
        return &faulty;                                                                            \
    }
FAULT(wrap_select, index_select, select_one_less)
FAULT(wrap_scores, index_select, select_bf16_scores)
FAULT(wrap_query, index_query, query_in_halves)
FAULT(wrap_heads, heads_rope, heads_in_halves)
FAULT(wrap_table, rope_table, table_in_bf16)
FAULT(wrap_keys, kv_prep, keys_in_halves)
FAULT(wrap_index_keys, compress, index_keys_misplaced)
FAULT(wrap_entries, compress, entries_misplaced)
FAULT(wrap_linear, linear, linear_next_scale)
FAULT(wrap_sums, linear, linear_bf16_sums)
FAULT(wrap_scale, attention, attention_next_scale)
FAULT(wrap_sink, attention, attention_without_sink)
FAULT(wrap_alone, attention, attention_alone)
FAULT(wrap_beside, attention, attention_beside)
FAULT(wrap_chunk, attention, attention_of_96)
FAULT(wrap_breaks, attention, attention_breaks)
FAULT(wrap_twice, route, route_scaled_twice)
FAULT(wrap_never, route, route_unscaled)
FAULT(wrap_moe, moe, moe_next_scale)
FAULT(wrap_clamp, moe, moe_without_clamp)
FAULT(wrap_collapse, hc_collapse, collapse_in_bf16)
FAULT(wrap_expand, hc_expand, expand_transposed)

static void test_numerics__a_planted_fault_fails_exactly_the_rows_that_fit_it(void **state)
{
    static const struct {
        const char *what;
        const struct kern_ops *(*wrap)(const struct kern_ops *);
        const char *failed;
    } faults[] = {
        {"none", NULL, ""},
        {"top-k off by one", wrap_select, "topk.exact topk.ties topk.neginf topk.largest "},
        {"index scores rounded to bf16", wrap_scores,
         "topk.exact topk.neginf topk.largest index.fp4.scores index.fp8.scores "
         "index.bf16.scores "},
        {"wrong RoPE layout in the indexer", wrap_query,
         "index.fp4.selection index.fp8.selection index.bf16.selection rope.index_query "},
        {"wrong RoPE layout of heads", wrap_heads, "rope.heads "},
        {"RoPE table in bf16", wrap_table, "rope.table "},
        {"wrong RoPE layout of window keys", wrap_keys, "kv.cost rope.keys "},
        {"index keys rotated by a wrong angle", wrap_index_keys,
         "index.fp4.selection index.fp8.selection index.bf16.selection rope.index_keys "},
        {"entries rotated by a wrong angle", wrap_entries,
         "kv.cost rope.entries rope.dense_entries "},
        {"fp8 scale of a weight from the wrong block", wrap_linear, "weights.fp8 "},
        {"sums of bf16 products rounded to bf16", wrap_sums, "weights.bf16 "},
        {"fp8 scale of an entry from the wrong block", wrap_scale, "kv.fp8 kv.fp8_bf16 kv.cost "},
        {"attention without its sink", wrap_sink, "kv.fp8 kv.bf16 "},
        {"a token alone differs", wrap_alone, "flow.decode "},
        {"a token in company differs", wrap_beside, "flow.batch "},
        {"a chunk size differs", wrap_chunk, "flow.chunks "},
        {"routed scaling twice", wrap_twice, "experts.scaling "},
        {"routed scaling never", wrap_never, "experts.scaling "},
        {"expert scale from the wrong row", wrap_moe, "experts.fp4 "},
        {"experts without their clamp", wrap_clamp,
         "experts.scaling experts.fp4 experts.nvfp4 experts.nvfp4.w4a16 experts.nvfp4.w4a4 "
         "experts.fp8 "},
        {"mixing in bf16", wrap_collapse, "mhc.collapse "},
        {"mixing transposed", wrap_expand, "mhc.expand "},
    };
    int n_wrong = 0;
    (void)state;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct ctl_numerics n = settings();
        char failed[1024];
        n.wrap_ops = faults[i].wrap;
        audit(&n, failed);
        if (strcmp(failed, faults[i].failed) == 0) continue;
        print_message("%s: failed '%s', expected '%s'\n", faults[i].what, failed, faults[i].failed);
        n_wrong++;
    }
    assert_int_equal(n_wrong, 0);
}

static void test_numerics__pages_changed_on_their_way_are_found(void **state)
{
    char failed[1024];
    struct ctl_numerics n = settings();
    (void)state;
    n.on_page_copied = flip_page;
    audit(&n, failed);
    assert_string_equal(failed, "handover.digest ");
    n.on_page_copied = NULL;
    n.on_page_landed = stale_page;
    audit(&n, failed);
    assert_string_equal(failed, "handover.pages handover.logits ");
}

/* As a device with memory of its own is audited. */
static void test_numerics__through_a_mirror_all_rows_pass(void **state)
{
    static const char *const devices[] = {"mirror:cpu", "apart:cpu"};
    char failed[1024];
    struct ctl_numerics n = settings();
    (void)state;
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        n.device = devices[i];
        audit(&n, failed);
        assert_string_equal(failed, "");
    }
}

static void test_numerics__rows_made_before_an_error_are_kept(void **state)
{
    struct ctl_numerics_report r;
    struct ctl_numerics n = settings();
    struct tow_err err = {0};
    (void)state;
    n.wrap_ops = wrap_breaks;
    assert_int_equal(ctl_numerics_run(&n, &r, &err), TOW_EDEVICE);
    assert_true(r.n_rows >= 25);
    assert_int_equal(r.n_failed, 0);
    assert_true(err.msg[0]);
    assert_string_equal(r.broken_off, err.msg);
    ctl_numerics_fini(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numerics__a_planted_fault_fails_exactly_the_rows_that_fit_it),
        cmocka_unit_test(test_numerics__through_a_mirror_all_rows_pass),
        cmocka_unit_test(test_numerics__rows_made_before_an_error_are_kept),
        cmocka_unit_test(test_numerics__pages_changed_on_their_way_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
