/* kernels/kv_layout.c - geometry of pages and tails, and the stored form of rows.
 *
 * Parts follow each other layer by layer, main entries before index keys, each at a multiple of 256
 * bytes, so a page is one contiguous transfer and any part can be checked alone. A scale plane
 * behind the rows of a part (instead of scales inside the row) keeps rows at one stride that vector
 * loads like.
 */
#include "kernels/kv_layout.h"

#include "common/base/err.h"
#include "kernels/numeric.h"

#include <string.h>

enum { PART_ALIGN = 256, PAGE_ALIGN = 4096, MAX_PAGE_TOKENS = 4096, PAGE_STEP = 128 };

static int64_t align_up(int64_t x, int64_t a)
{
    return (x + a - 1) / a * a;
}

/* Scales of one FP8 row. */
static int32_t scale_row_bytes(int32_t d, int32_t rd)
{
    return ((d - rd) / 64 + 7) / 8 * 8;
}

int64_t kern_kv_rows_bytes(enum kern_kv_fmt fmt, int32_t d, int32_t rd, int64_t n)
{
    switch (fmt) {
    case KERN_KV_FP8: return n * (d - rd + 2 * rd + scale_row_bytes(d, rd));
    case KERN_KV_BF16: return n * d * 2;
    case KERN_KV_F32: return n * d * 4;
    }
    return 0;
}

int64_t kern_ik_rows_bytes(enum kern_ik_fmt fmt, int32_t w, int64_t n)
{
    switch (fmt) {
    case KERN_IK_FP4: return n * (w / 2 + w / 32);
    case KERN_IK_FP8: return n * (w + 4);
    case KERN_IK_BF16: return n * w * 2;
    case KERN_IK_F32: return n * w * 4;
    }
    return 0;
}

int64_t kern_kv_state_floats(int32_t ratio, int32_t e)
{
    if (ratio == 0) return 0;
    if (!kern_kv_overlaps(ratio)) return 3 * (int64_t)e;
    return 2 * (int64_t)(ratio - 1) * 2 * e + 2 * (int64_t)ratio * e;
}

static bool ratios_divide(const struct kern_kv_spec *s, int32_t page_tokens)
{
    for (int32_t i = 0; i < s->n_layers; i++)
        if (s->ratios[i] && page_tokens % s->ratios[i]) return false;
    return true;
}

static int check_spec(const struct kern_kv_spec *s, bool *has_index, struct tow_err *err)
{
    if (s->n_layers < 1 || s->n_layers > KERN_KV_MAX_LAYERS)
        return tow_fail(err, TOW_EINVAL, "kv layout: %d layers; must be 1 to %d", s->n_layers,
                        KERN_KV_MAX_LAYERS);
    if (s->n_mtp < 0 || s->n_mtp > s->n_layers)
        return tow_fail(err, TOW_EINVAL, "kv layout: %d mtp layers; must be 0 to %d", s->n_mtp,
                        s->n_layers);
    *has_index = false;
    for (int32_t i = 0; i < s->n_layers; i++) {
        int32_t r = s->ratios[i];
        if (r != 0 && (r < 2 || r > KERN_KV_MAX_RATIO))
            return tow_fail(err, TOW_EINVAL,
                            "kv layout: compress ratio %d of layer %d; must be 0 or 2 to %d", r, i,
                            KERN_KV_MAX_RATIO);
        if (kern_kv_overlaps(r)) *has_index = true;
    }
    if (s->head_dim < 2 || s->head_dim > 8192 || s->head_dim % 2)
        return tow_fail(err, TOW_EINVAL, "kv layout: head_dim %d; must be even, 2 to 8192",
                        s->head_dim);
    if (s->rope_dim < 0 || s->rope_dim > s->head_dim || s->rope_dim % 2)
        return tow_fail(err, TOW_EINVAL, "kv layout: rope_dim %d; must be even, 0 to head_dim %d",
                        s->rope_dim, s->head_dim);
    if (s->window < 1 || s->window > 65536)
        return tow_fail(err, TOW_EINVAL, "kv layout: window %d; must be 1 to 65536", s->window);
    if ((int)s->kv_fmt < KERN_KV_FP8 || s->kv_fmt > KERN_KV_F32)
        return tow_fail(err, TOW_EINVAL, "kv layout: key format %d; must be fp8, bf16 or f32",
                        (int)s->kv_fmt);
    if (s->kv_fmt == KERN_KV_FP8 && (s->head_dim - s->rope_dim) % 64)
        return tow_fail(err, TOW_EINVAL,
                        "kv layout: head_dim - rope_dim is %d; must be a multiple of 64 for fp8",
                        s->head_dim - s->rope_dim);
    if (*has_index) {
        if ((int)s->ik_fmt < KERN_IK_FP4 || s->ik_fmt > KERN_IK_F32)
            return tow_fail(err, TOW_EINVAL,
                            "kv layout: index key format %d; must be fp4, fp8, bf16 or f32",
                            (int)s->ik_fmt);
        if (s->index_dim < 32 || s->index_dim > 1024 || s->index_dim % 32)
            return tow_fail(err, TOW_EINVAL,
                            "kv layout: index_dim %d; must be a multiple of 32, 32 to 1024",
                            s->index_dim);
        if (s->index_dim < s->rope_dim)
            return tow_fail(err, TOW_EINVAL,
                            "kv layout: index_dim %d; must be at least rope_dim %d", s->index_dim,
                            s->rope_dim);
    }
    if (s->n_mtp > 0 && (s->stream_width < 1 || s->stream_width > 1 << 24))
        return tow_fail(err, TOW_EINVAL, "kv layout: stream_width %d; must be 1 to %d",
                        s->stream_width, 1 << 24);
    return 0;
}

static int choose_page_tokens(const struct kern_kv_spec *s, int32_t *out, struct tow_err *err)
{
    int32_t pt = s->page_tokens;
    if (pt == 0) {
        for (pt = KERN_KV_DEFAULT_PAGE_TOKENS; pt <= MAX_PAGE_TOKENS; pt += PAGE_STEP)
            if (ratios_divide(s, pt)) break;
        if (pt > MAX_PAGE_TOKENS)
            return tow_fail(err, TOW_EINVAL,
                            "kv layout: no page of up to %d tokens is a multiple of all compress "
                            "ratios",
                            MAX_PAGE_TOKENS);
    } else if (pt < PAGE_STEP || pt > MAX_PAGE_TOKENS || pt % PAGE_STEP) {
        return tow_fail(err, TOW_EINVAL,
                        "kv layout: page_tokens %d; must be a multiple of %d, %d to %d", pt,
                        PAGE_STEP, PAGE_STEP, MAX_PAGE_TOKENS);
    } else if (!ratios_divide(s, pt)) {
        return tow_fail(err, TOW_EINVAL,
                        "kv layout: page_tokens %d; must be a multiple of every compress ratio",
                        pt);
    }
    *out = pt;
    return 0;
}

enum kern_ik_fmt kern_shadow_fmt(enum kern_shadow s)
{
    return s == KERN_SHADOW_BF16 ? KERN_IK_BF16 : s == KERN_SHADOW_FP8 ? KERN_IK_FP8 : KERN_IK_FP4;
}

static void lay_shadows(struct kern_kv_layout *l)
{
    int64_t at = 0;
    for (int32_t i = 0; i < l->spec.n_layers; i++) {
        struct kern_kv_layer *y = &l->layer[i];
        for (int s = 0; y->index_bytes && s < KERN_SHADOWS; s++) {
            if (kern_shadow_fmt((enum kern_shadow)s) == l->spec.ik_fmt) continue;
            y->shadow_off[s] = at;
            at += kern_ik_rows_bytes(kern_shadow_fmt((enum kern_shadow)s), l->spec.index_dim,
                                     y->per_page);
            at = align_up(at, PART_ALIGN);
        }
    }
    /* Keys of exact mode (F32) are neither turned nor rounded: nothing to compare with. */
    l->shadow_bytes = at <= l->page_bytes && l->spec.ik_fmt != KERN_IK_F32 ? at : 0;
}

int kern_kv_layout_init(struct kern_kv_layout *l, const struct kern_kv_spec *spec,
                        struct tow_err *err)
{
    bool has_index;
    int32_t page_tokens = 0;
    int rc = check_spec(spec, &has_index, err);
    if (rc == 0) rc = choose_page_tokens(spec, &page_tokens, err);
    if (rc < 0) return rc;

    memset(l, 0, sizeof *l);
    l->spec = *spec;
    l->spec.page_tokens = page_tokens;
    l->page_tokens = page_tokens;
    int32_t d = spec->head_dim, rd = spec->rope_dim, w = spec->index_dim;
    int64_t page = 0, tail = align_up((int64_t)sizeof(struct kern_kv_tail_head), PART_ALIGN);
    for (int32_t i = 0; i < spec->n_layers; i++) {
        struct kern_kv_layer *y = &l->layer[i];
        int32_t r = spec->ratios[i];
        y->ratio = r;
        y->window_off = tail;
        y->window_bytes = kern_kv_rows_bytes(spec->kv_fmt, d, rd, spec->window);
        tail = align_up(tail + y->window_bytes, PART_ALIGN);
        if (r == 0) continue;
        y->per_page = page_tokens / r;
        y->main_off = page;
        y->main_bytes = kern_kv_rows_bytes(spec->kv_fmt, d, rd, y->per_page);
        page = align_up(page + y->main_bytes, PART_ALIGN);
        y->mstate_off = tail;
        y->mstate_bytes = kern_kv_state_floats(r, d) * 4;
        tail = align_up(tail + y->mstate_bytes, PART_ALIGN);
        l->n_parts++;
        if (!kern_kv_overlaps(r)) continue;
        y->index_off = page;
        y->index_bytes = kern_ik_rows_bytes(spec->ik_fmt, w, y->per_page);
        page = align_up(page + y->index_bytes, PART_ALIGN);
        y->istate_off = tail;
        y->istate_bytes = kern_kv_state_floats(r, w) * 4;
        tail = align_up(tail + y->istate_bytes, PART_ALIGN);
        l->n_parts++;
    }
    if (l->n_parts == 0) l->n_parts = 1; /* a model without compression: one part of padding */
    if (spec->n_mtp > 0) {
        l->stream_off = tail;
        tail += (int64_t)spec->stream_width * 4;
    }
    l->page_bytes = page > 0 ? align_up(page, PAGE_ALIGN) : PAGE_ALIGN;
    lay_shadows(l);
    l->tail_bytes = align_up(tail, PAGE_ALIGN);
    return 0;
}

void kern_kv_part(const struct kern_kv_layout *l, int32_t i, int64_t *off, int64_t *bytes)
{
    for (int32_t n = 0; n < l->spec.n_layers; n++) {
        const struct kern_kv_layer *y = &l->layer[n];
        if (y->main_bytes && i-- == 0) {
            *off = y->main_off;
            *bytes = y->main_bytes;
            return;
        }
        if (y->index_bytes && i-- == 0) {
            *off = y->index_off;
            *bytes = y->index_bytes;
            return;
        }
    }
    *off = 0;
    *bytes = i == 0 ? PART_ALIGN : 0;
}

void kern_kv_store(enum kern_kv_fmt fmt, void *part, int64_t n, int64_t i, const float *x,
                   int32_t d, int32_t rd)
{
    uint8_t *p = part;
    switch (fmt) {
    case KERN_KV_FP8: {
        int64_t row_bytes = d + rd;
        int32_t sb = scale_row_bytes(d, rd);
        uint8_t *row = p + i * row_bytes, *scales = p + n * row_bytes + i * sb;
        kern_quant_e4m3(x, d - rd, 64, row, scales);
        memset(scales + (d - rd) / 64, 0, (size_t)(sb - (d - rd) / 64));
        for (int32_t j = 0; j < rd; j++) {
            uint16_t b = kern_bf16_encode(x[d - rd + j]);
            memcpy(row + (d - rd) + 2 * j, &b, 2);
        }
        break;
    }
    case KERN_KV_BF16:
        for (int32_t j = 0; j < d; j++) {
            uint16_t b = kern_bf16_encode(x[j]);
            memcpy(p + (i * d + j) * 2, &b, 2);
        }
        break;
    case KERN_KV_F32: memcpy(p + i * d * 4, x, (size_t)d * 4); break;
    }
}

void kern_kv_load(enum kern_kv_fmt fmt, const void *part, int64_t n, int64_t i, float *x, int32_t d,
                  int32_t rd)
{
    const uint8_t *p = part;
    switch (fmt) {
    case KERN_KV_FP8: {
        int64_t row_bytes = d + rd;
        const uint8_t *row = p + i * row_bytes;
        const uint8_t *scales = p + n * row_bytes + i * scale_row_bytes(d, rd);
        for (int32_t j = 0; j < d - rd; j++)
            x[j] = kern_e4m3_decode(row[j]) * kern_ue8m0_decode(scales[j / 64]);
        for (int32_t j = 0; j < rd; j++) {
            uint16_t b;
            memcpy(&b, row + (d - rd) + 2 * j, 2);
            x[d - rd + j] = kern_bf16_decode(b);
        }
        break;
    }
    case KERN_KV_BF16:
        for (int32_t j = 0; j < d; j++) {
            uint16_t b;
            memcpy(&b, p + (i * d + j) * 2, 2);
            x[j] = kern_bf16_decode(b);
        }
        break;
    case KERN_KV_F32: memcpy(x, p + i * d * 4, (size_t)d * 4); break;
    }
}

void kern_ik_store(enum kern_ik_fmt fmt, void *part, int64_t n, int64_t i, const float *x,
                   int32_t w)
{
    uint8_t *p = part;
    switch (fmt) {
    case KERN_IK_FP4:
        kern_quant_e2m1(x, w, 32, p + i * (w / 2), p + n * (w / 2) + i * (w / 32));
        break;
    case KERN_IK_FP8: {
        uint8_t code;
        kern_quant_e4m3(x, w, w, p + i * w, &code);
        float s = kern_ue8m0_decode(code);
        memcpy(p + n * w + i * 4, &s, 4);
        break;
    }
    case KERN_IK_BF16:
        for (int32_t j = 0; j < w; j++) {
            uint16_t b = kern_bf16_encode(x[j]);
            memcpy(p + (i * w + j) * 2, &b, 2);
        }
        break;
    case KERN_IK_F32: memcpy(p + i * w * 4, x, (size_t)w * 4); break;
    }
}

void kern_ik_load(enum kern_ik_fmt fmt, const void *part, int64_t n, int64_t i, float *x, int32_t w)
{
    const uint8_t *p = part;
    switch (fmt) {
    case KERN_IK_FP4: {
        const uint8_t *row = p + i * (w / 2), *scales = p + n * (w / 2) + i * (w / 32);
        for (int32_t j = 0; j < w; j++)
            x[j] = kern_e2m1_decode(kern_nibble(row, j)) * kern_ue8m0_decode(scales[j / 32]);
        break;
    }
    case KERN_IK_FP8: {
        float s;
        memcpy(&s, p + n * w + i * 4, 4);
        s = kern_f32_scale(s);
        for (int32_t j = 0; j < w; j++) x[j] = kern_e4m3_decode(p[i * w + j]) * s;
        break;
    }
    case KERN_IK_BF16:
        for (int32_t j = 0; j < w; j++) {
            uint16_t b;
            memcpy(&b, p + (i * w + j) * 2, 2);
            x[j] = kern_bf16_decode(b);
        }
        break;
    case KERN_IK_F32: memcpy(x, p + i * w * 4, (size_t)w * 4); break;
    }
}
