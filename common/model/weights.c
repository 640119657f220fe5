/* How: one walk over the model's tensors, layer by layer. Each is asked for by its native name;
 * want() finds it under that name or its Hugging Face one, counts it, and marks it used. A tensor
 * that is not there is noted and the walk goes on, so that the message can say how many are
 * missing; the first wrong type, shape or scale ends it.
 *
 * What a role may be stored as follows from config.json, not from what is found: a plain tensor
 * where fp8 belongs means that the file is not what the config says, and would decode to noise in
 * another loader too.
 *
 * Layers that repeat others (options.n_layers) share their views, so only the walk knows of them:
 * placing copies each layer's to the device, and the forward pass sees as many as the shape says.
 *
 * Rejected: reading all weights once to check them (NaN in data is left to the maths); scales are
 * read, because one bad scale spoils a whole block and only for some prompts.
 */
#include "common/model/weights.h"

#include "common/base/arena.h"
#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/model/checkpoint.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME = 256, NAMES_SHOWN = 10, BLOCK = 128 };

struct model_weights_own {
    struct model_checkpoint *files;
    struct tow_arena arena; /* layers, expert tables, copies */
};

struct loader {
    struct model_weights *w;
    struct model_checkpoint *ck;
    struct tow_arena *arena;
    struct tow_err *err;
    int rc;     /* first failure; later asks do nothing */
    bool *used; /* by place in the checkpoint */
    bool hf;    /* messages name tensors as this checkpoint would */
    size_t n_missing;
    struct tow_buf missing; /* first names */
};

/* ---- errors ---- */

__attribute__((format(printf, 3, 4))) static void
refuse(struct loader *l, const struct model_tensor *t, const char *fmt, ...)
{
    if (l->rc < 0) return;
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    l->rc = tow_fail(l->err, TOW_EFORMAT, "%s: tensor %s: %s", model_safetensors_path(t->file),
                     t->name, text);
}

static void *take(struct loader *l, size_t n)
{
    void *p = tow_arena_alloc(l->arena, n ? n : 1);
    if (!p && l->rc == 0)
        l->rc = tow_fail(l->err, TOW_ENOMEM, "%s: out of memory for %zu bytes of tensors",
                         model_checkpoint_dir(l->ck), n);
    return p;
}

static void *take_copy(struct loader *l, size_t n)
{
    void *p = take(l, n);
    if (p) l->w->report.copied_bytes += n;
    return p;
}

/* ---- names ---- */

/* What follows "layers.L." natively and in the transformers port. First match wins. */
static const struct {
    const char *native, *hf;
} HF[] = {
    {"attn_norm.", "input_layernorm."},
    {"ffn_norm.", "post_attention_layernorm."},
    {"hc_attn_", "attn_hc."},
    {"hc_ffn_", "ffn_hc."},
    {"attn.attn_sink", "self_attn.sinks"},
    {"attn.wq_a.", "self_attn.q_a_proj."},
    {"attn.wq_b.", "self_attn.q_b_proj."},
    {"attn.wkv.", "self_attn.kv_proj."},
    {"attn.wo_a.", "self_attn.o_a_proj."},
    {"attn.wo_b.", "self_attn.o_b_proj."},
    {"attn.q_norm.", "self_attn.q_a_norm."},
    {"attn.kv_norm.", "self_attn.kv_norm."},
    {"attn.compressor.ape", "self_attn.compressor.position_bias"},
    {"attn.compressor.wkv.", "self_attn.compressor.kv_proj."},
    {"attn.compressor.wgate.", "self_attn.compressor.gate_proj."},
    {"attn.compressor.norm.", "self_attn.compressor.kv_norm."},
    {"attn.indexer.wq_b.", "self_attn.compressor.indexer.q_b_proj."},
    {"attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."},
    {"attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"},
    {"attn.indexer.compressor.wkv.", "self_attn.compressor.indexer.kv_proj."},
    {"attn.indexer.compressor.wgate.", "self_attn.compressor.indexer.gate_proj."},
    {"attn.indexer.compressor.norm.", "self_attn.compressor.indexer.kv_norm."},
    {"ffn.gate.bias", "mlp.gate.e_score_correction_bias"},
    {"ffn.gate.", "mlp.gate."},
    {"ffn.shared_experts.w1.", "mlp.shared_experts.gate_proj."},
    {"ffn.shared_experts.w2.", "mlp.shared_experts.down_proj."},
    {"ffn.shared_experts.w3.", "mlp.shared_experts.up_proj."},
};

/* Native name -> the port's, or false when it has none (MTP blocks). */
static bool hf_name(const char *native, char out[NAME])
{
    static const struct {
        const char *native, *hf;
    } TOP[] = {{"embed.weight", "model.embed_tokens.weight"},
               {"head.weight", "lm_head.weight"},
               {"norm.weight", "model.norm.weight"}};
    for (size_t i = 0; i < sizeof TOP / sizeof TOP[0]; i++)
        if (strcmp(native, TOP[i].native) == 0) {
            snprintf(out, NAME, "%s", TOP[i].hf);
            return true;
        }
    if (strncmp(native, "hc_head_", 8) == 0) {
        return snprintf(out, NAME, "model.hc_head.hc_%s", native + 8) < NAME;
    }
    if (strncmp(native, "layers.", 7) != 0) return false;
    const char *rest = strchr(native + 7, '.');
    if (!rest) return false;
    rest++;
    int layer_len = (int)(rest - native);
    const char *old = rest, *new = "";
    char experts[48];
    int e, skip = 0;
    char m;
    if (sscanf(rest, "ffn.experts.%d.w%c.%n", &e, &m, &skip) == 2 && skip) {
        snprintf(experts, sizeof experts, "mlp.experts.%d.%s.", e,
                 m == '1'   ? "gate_proj"
                 : m == '2' ? "down_proj"
                            : "up_proj");
        new = experts;
        rest += skip;
    } else {
        for (size_t i = 0; i < sizeof HF / sizeof HF[0]; i++) {
            size_t n = strlen(HF[i].native);
            if (strncmp(rest, HF[i].native, n) != 0) continue;
            new = HF[i].hf;
            rest += n;
            break;
        }
    }
    if (rest == old) return false;
    /* ".scale" of an fp8 matrix is renamed, "hc_attn_scale" is not. */
    bool scale = rest[-1] == '.' && strcmp(rest, "scale") == 0;
    int n = snprintf(out, NAME, "model.%.*s%s%s", layer_len, native, new,
                     scale ? "weight_scale_inv" : rest);
    return n < NAME;
}

static const struct model_tensor *mark(struct loader *l, int64_t i)
{
    tow_assert(!l->used[i]); /* each name is asked for once */
    l->used[i] = true;
    l->w->report.n_found++;
    return model_checkpoint_at(l->ck, (size_t)i);
}

static void note_missing(struct loader *l, const char *name)
{
    if (l->n_missing++ < NAMES_SHOWN)
        tow_buf_printf(&l->missing, "%s%s", l->missing.len ? ", " : "", name);
}

/* The tensor of that native name, counted as expected;
 * NULL when it is missing or something failed before. */
static const struct model_tensor *want(struct loader *l, const char *native)
{
    if (l->rc < 0) return NULL;
    l->w->report.n_expected++;
    char other[NAME], old[NAME];
    bool has_other = hf_name(native, other);
    int64_t i = model_checkpoint_index(l->ck, native),
            k = has_other ? model_checkpoint_index(l->ck, other) : -1;
    char *scorer = has_other ? strstr(other, "scorer.") : NULL;
    if (k < 0 && scorer) { /* the port's first version had no scorer module */
        int n = snprintf(old, sizeof old, "%.*s%s", (int)(scorer - other), other, scorer + 7);
        if (n < NAME) k = model_checkpoint_index(l->ck, old);
    }
    if (i >= 0 && k >= 0) {
        refuse(l, model_checkpoint_at(l->ck, (size_t)i), "also present as %s", other);
        return NULL;
    }
    if (i < 0 && k < 0) {
        note_missing(l, l->hf && has_other ? other : native);
        return NULL;
    }
    l->w->report.hf_names |= i < 0;
    return mark(l, i >= 0 ? i : k);
}

__attribute__((format(printf, 2, 3))) static const struct model_tensor *wantf(struct loader *l,
                                                                              const char *fmt, ...)
{
    char name[NAME];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    return want(l, name);
}

/* ---- checks ---- */

static bool is_shape(const struct model_tensor *t, int n, const int64_t *dims)
{
    if (t->n_dims != n) return false;
    for (int i = 0; i < n; i++)
        if (t->dims[i] != dims[i]) return false;
    return true;
}

static bool check_shape(struct loader *l, const struct model_tensor *t, int n, const int64_t *dims)
{
    if (is_shape(t, n, dims)) return true;
    struct model_tensor right = {.n_dims = n};
    memcpy(right.dims, dims, (size_t)n * sizeof *dims);
    char a[120], b[120];
    refuse(l, t, "shape %s; expected %s", model_tensor_shape_text(t, a, sizeof a),
           model_tensor_shape_text(&right, b, sizeof b));
    return false;
}
#define SHAPE(...)                                                                                 \
    (int)(sizeof(int64_t[]){__VA_ARGS__} / sizeof(int64_t)), (const int64_t[])                     \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

static void refuse_dtype(struct loader *l, const struct model_tensor *t, const char *right)
{
    refuse(l, t, "dtype %s; expected %s", t->dtype_name, right);
}

static bool is_plain(enum model_dtype t)
{
    return t == MODEL_DT_BF16 || t == MODEL_DT_F32 || t == MODEL_DT_F16;
}
static bool is_nibbles(enum model_dtype t)
{
    return t == MODEL_DT_I8 || t == MODEL_DT_U8 || t == MODEL_DT_F4;
}
static bool is_ue8m0(enum model_dtype t)
{
    return t == MODEL_DT_F8_E8M0 || t == MODEL_DT_U8;
}

static void refuse_scale(struct loader *l, const struct model_tensor *t, size_t i,
                         const char *value)
{
    refuse(l, t, "scale %zu of %" PRIu64 " is %s; right: finite and above 0", i,
           t->bytes * 8 / (uint64_t)(t->dtype == MODEL_DT_F32 ? 32 : 8), value);
}

/* Every scale finite and above zero: code 255 of ue8m0 is NaN, and there is no zero. */
static void check_ue8m0(struct loader *l, const struct model_tensor *t)
{
    const uint8_t *p = t->data, *at = t->bytes ? memchr(p, 255, (size_t)t->bytes) : NULL;
    if (at) refuse_scale(l, t, (size_t)(at - p), "NaN (code 255)");
}

static void check_e4m3(struct loader *l, const struct model_tensor *t)
{
    const uint8_t *p = t->data;
    size_t n = (size_t)t->bytes;
    unsigned wrong = 0; /* legal are 1 .. 126 */
    for (size_t i = 0; i < n; i++) wrong |= (uint8_t)(p[i] - 1) >= 126;
    for (size_t i = 0; wrong && i < n; i++)
        if ((uint8_t)(p[i] - 1) >= 126) {
            refuse_scale(l, t, i, (p[i] & 127) == 127 ? "NaN" : p[i] & 127 ? "negative" : "0");
            return;
        }
}

static float f32_at(const void *p, size_t i)
{
    float x;
    memcpy(&x, (const char *)p + i * 4, 4);
    return x;
}

static void check_f32(struct loader *l, const struct model_tensor *t)
{
    size_t n = (size_t)t->bytes / 4;
    for (size_t i = 0; i < n; i++) {
        float x = f32_at(t->data, i);
        if (isfinite(x) && x > 0) continue;
        char value[32];
        snprintf(value, sizeof value, "%g", (double)x);
        refuse_scale(l, t, i, value);
        return;
    }
}

/* ---- plain tensors ---- */

static float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff, bits;
    float out;
    if (e == 0) {
        out = ldexpf((float)m, -24);
        return sign ? -out : out;
    }
    bits = sign | (e == 31 ? 0x7f800000 : (e + 112) << 23) | m << 13;
    memcpy(&out, &bits, 4);
    return out;
}

/* Widens n values of BF16, F16 or F32 to float. */
static float *widen(struct loader *l, const struct model_tensor *t, size_t n)
{
    float *out = take_copy(l, n * 4);
    if (!out) return NULL;
    const char *p = t->data;
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        if (t->dtype == MODEL_DT_F32) {
            memcpy(&out[i], p + i * 4, 4);
            continue;
        }
        memcpy(&h, p + i * 2, 2);
        if (t->dtype == MODEL_DT_F16) {
            out[i] = f16_to_f32(h);
        } else {
            uint32_t bits = (uint32_t)h << 16;
            memcpy(&out[i], &bits, 4);
        }
    }
    return out;
}

/* A small float32 tensor: where it lies if it is aligned, else a copy. */
static const float *floats(struct loader *l, const struct model_tensor *t, int n_dims,
                           const int64_t *dims)
{
    if (!t || l->rc < 0 || !check_shape(l, t, n_dims, dims)) return NULL;
    if (!is_plain(t->dtype)) {
        refuse_dtype(l, t, "F32 (or BF16, F16)");
        return NULL;
    }
    size_t n = 1;
    for (int i = 0; i < n_dims; i++) n *= (size_t)dims[i];
    if (t->dtype == MODEL_DT_F32 && (uintptr_t)t->data % 4 == 0) return t->data;
    return widen(l, t, n);
}

static void vec(struct loader *l, struct kern_vec *v, int32_t n, const struct model_tensor *t)
{
    if (!t || l->rc < 0 || !check_shape(l, t, SHAPE(n))) return;
    if (!is_plain(t->dtype)) {
        refuse_dtype(l, t, "BF16, F16 or F32");
        return;
    }
    *v = (struct kern_vec){
        .data = t->data, .n = n, .dtype = t->dtype == MODEL_DT_BF16 ? KERN_BF16 : KERN_F32};
    if (t->dtype == MODEL_DT_F16 || (uintptr_t)t->data % (size_t)kern_dtype_bytes(v->dtype) != 0) {
        v->data = widen(l, t, (size_t)n);
        v->dtype = KERN_F32;
    }
}

/* A matrix that is never quantised. rows: of the whole tensor. */
static void plain(struct loader *l, struct kern_weight *w, int32_t n, int32_t k,
                  const struct model_tensor *t, const char *right)
{
    if (!t || l->rc < 0) return;
    if (!is_plain(t->dtype)) {
        refuse_dtype(l, t, right);
        return;
    }
    if (!check_shape(l, t, SHAPE(n, k))) return;
    bool f32 = t->dtype != MODEL_DT_BF16;
    *w = (struct kern_weight){.data = t->data,
                              .fmt = f32 ? KERN_W_F32 : KERN_W_BF16,
                              .sfmt = KERN_S_NONE,
                              .n = n,
                              .k = k,
                              .row_bytes = (int64_t)k * (f32 ? 4 : 2),
                              .scale2 = 1};
    if (t->dtype == MODEL_DT_F16) w->data = widen(l, t, (size_t)n * (size_t)k);
}

#define PLAIN_TYPES "BF16, F16 or F32"

/* ---- scales ---- */

/* Block scales of an fp8 matrix; n_dims, dims: of the scale tensor.
 * Sets scale, sfmt and scale_row_bytes of *w. */
static bool block_scales(struct loader *l, struct kern_weight *w, const struct model_tensor *t,
                         int n_dims, const int64_t *dims)
{
    if (!t || l->rc < 0 || !check_shape(l, t, n_dims, dims)) return false;
    bool f32 = t->dtype == MODEL_DT_F32;
    if (!f32 && !is_ue8m0(t->dtype)) {
        refuse_dtype(l, t, "F8_E8M0 or F32");
        return false;
    }
    if (f32)
        check_f32(l, t);
    else
        check_ue8m0(l, t);
    if (l->rc < 0) return false;
    w->scale = t->data;
    if (f32 && (uintptr_t)t->data % 4 != 0) w->scale = widen(l, t, (size_t)t->bytes / 4);
    w->sfmt = f32 ? KERN_S_F32 : KERN_S_UE8M0;
    w->scale_row_bytes = dims[n_dims - 1] * (f32 ? 4 : 1);
    return l->rc == 0;
}

/* Scales of an fp4 matrix, one per 32: F32 ones are turned into ue8m0,
 * which only powers of two survive. */
static bool group_scales(struct loader *l, struct kern_weight *w, const struct model_tensor *t,
                         int n_dims, const int64_t *dims)
{
    if (!block_scales(l, w, t, n_dims, dims)) return false;
    if (w->sfmt != KERN_S_F32) return true;
    size_t n = (size_t)t->bytes / 4;
    uint8_t *out = take_copy(l, n);
    if (!out) return false;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, (const char *)t->data + i * 4, 4);
        /* Code b stands for 2^(b-127), the biased exponent itself;
         * code 0 for the subnormal 2^-127. */
        if ((bits & 0x7fffff) == 0)
            out[i] = (uint8_t)(bits >> 23);
        else if (bits == 0x00400000)
            out[i] = 0;
        else {
            refuse(l, t, "scale %zu is %g; right for fp4: a power of two 2^-127..2^127", i,
                   (double)f32_at(t->data, i));
            return false;
        }
    }
    w->scale = out;
    w->sfmt = KERN_S_UE8M0;
    w->scale_row_bytes = dims[n_dims - 1];
    return true;
}

/* ---- dense matrices, fp8 when config.json says so ---- */

static int64_t blocks(int64_t n)
{
    return (n + BLOCK - 1) / BLOCK;
}

static void fp8(struct loader *l, struct kern_weight *w, int32_t n, int32_t k,
                const struct model_tensor *t, const struct model_tensor *scale)
{
    if (!t || l->rc < 0) return;
    if (t->dtype != MODEL_DT_F8_E4M3) {
        refuse_dtype(l, t, "F8_E4M3 (config.json says fp8)");
        return;
    }
    if (!check_shape(l, t, SHAPE(n, k))) return;
    *w = (struct kern_weight){
        .data = t->data, .fmt = KERN_W_FP8, .n = n, .k = k, .row_bytes = k, .scale2 = 1};
    block_scales(l, w, scale, SHAPE(blocks(n), blocks(k)));
}

static void dense(struct loader *l, struct kern_weight *w, int32_t n, int32_t k, const char *prefix,
                  const char *name)
{
    const struct model_tensor *t = wantf(l, "%s.%s.weight", prefix, name);
    if (!l->w->config.fp8) {
        plain(l, w, n, k, t, PLAIN_TYPES " (config.json names no quantisation)");
        return;
    }
    fp8(l, w, n, k, t, wantf(l, "%s.%s.scale", prefix, name));
}

static void plain_named(struct loader *l, struct kern_weight *w, int32_t n, int32_t k,
                        const char *prefix, const char *name)
{
    plain(l, w, n, k, wantf(l, "%s%s%s", prefix, *prefix ? "." : "", name), PLAIN_TYPES);
}

static void norm(struct loader *l, struct kern_vec *v, int32_t n, const char *prefix,
                 const char *name)
{
    vec(l, v, n, wantf(l, "%s%s%s.weight", prefix, *prefix ? "." : "", name));
}

/* rows: (2+hc)*hc inside a block, hc for a head. */
static void hyper(struct loader *l, struct model_hc *hc, const char *prefix, const char *name,
                  bool head)
{
    const struct model_shape *s = &l->w->shape;
    int32_t rows = head ? s->hc : (2 + s->hc) * s->hc;
    const char *dot = *prefix ? "." : "";
    plain(l, &hc->fn, rows, s->hc * s->D, wantf(l, "%s%s%s_fn", prefix, dot, name),
          "F32 (or BF16, F16)");
    hc->base = floats(l, wantf(l, "%s%s%s_base", prefix, dot, name), SHAPE(rows));
    hc->scale = floats(l, wantf(l, "%s%s%s_scale", prefix, dot, name), SHAPE(head ? 1 : 3));
}

static void compressor(struct loader *l, struct model_compressor *c, int32_t ratio, int32_t e,
                       const char *prefix)
{
    int32_t width = e * (ratio == 4 ? 2 : 1);
    c->ape = floats(l, wantf(l, "%s.ape", prefix), SHAPE(ratio, width));
    plain_named(l, &c->wkv, width, l->w->shape.D, prefix, "wkv.weight");
    plain_named(l, &c->wgate, width, l->w->shape.D, prefix, "wgate.weight");
    norm(l, &c->norm, e, prefix, "norm");
}

/* ---- routed experts ---- */

/* One fp4 or fp8 or plain tensor that holds `count` matrices of n rows, one after the other. */
struct stack {
    const struct model_tensor *weight, *scale, *scale2, *input;
    int64_t count; /* 0: a matrix of its own, not a stack */
    int64_t rows;  /* of one member of the stack; gate and up together are one member */
};

static int dims_of(const struct stack *s, int64_t rows, int64_t cols, int64_t dims[3])
{
    int n = 0;
    if (s->count) dims[n++] = s->count;
    dims[n++] = rows;
    dims[n++] = cols;
    return n;
}

static enum text_expert_form form_of(const struct loader *l, const struct model_tensor *t)
{
    enum text_expert_form form = l->w->config.experts;
    if (form != TEXT_EXPERTS_EITHER) return form;
    return t && is_nibbles(t->dtype) ? TEXT_EXPERTS_MXFP4 : TEXT_EXPERTS_PLAIN;
}

/* The second scale of NVFP4, or the input scale: one number per matrix; in a stack one per member,
 * which then serves gate and up alike, or one for each half, or one for all. */
static float one_scale(struct loader *l, const struct model_tensor *t, const struct stack *s,
                       int64_t member, int half)
{
    if (!t || l->rc < 0) return 0;
    if (t->dtype != MODEL_DT_F32) {
        refuse_dtype(l, t, "F32");
        return 0;
    }
    int64_t n = (int64_t)(t->bytes / 4), at = 0;
    if (s->count && n == s->count)
        at = member;
    else if (s->count && n == 2 * s->count && t->n_dims == 2)
        at = 2 * member + half;
    else if (n != 1) {
        char text[100];
        refuse(l, t, "shape %s; expected one value%s",
               model_tensor_shape_text(t, text, sizeof text),
               s->count ? ", or one per expert" : "");
        return 0;
    }
    if (member == 0 && half == 0) check_f32(l, t);
    return f32_at(t->data, (size_t)at);
}

/* Checks the tensors of *s as a whole; base becomes the view of its first matrix. */
static bool expert_base(struct loader *l, struct kern_weight *base, const struct stack *s,
                        int32_t k)
{
    const struct model_tensor *t = s->weight;
    if (!t || l->rc < 0) return false;
    enum text_expert_form form = form_of(l, t);
    int64_t dims[3], scale_dims[3];
    int n;
    *base = (struct kern_weight){.data = t->data, .k = k, .scale2 = 1};
    if (form == TEXT_EXPERTS_PLAIN) {
        if (!is_plain(t->dtype)) {
            refuse_dtype(l, t, PLAIN_TYPES " (config.json names no quantisation of experts)");
            return false;
        }
        n = dims_of(s, s->rows, k, dims);
        if (!check_shape(l, t, n, dims)) return false;
        bool f32 = t->dtype != MODEL_DT_BF16;
        base->fmt = f32 ? KERN_W_F32 : KERN_W_BF16;
        base->row_bytes = (int64_t)k * (f32 ? 4 : 2);
        if (t->dtype == MODEL_DT_F16) base->data = widen(l, t, (size_t)t->bytes / 2);
        return l->rc == 0;
    }
    if (form == TEXT_EXPERTS_FP8) {
        if (t->dtype != MODEL_DT_F8_E4M3) {
            refuse_dtype(l, t, "F8_E4M3 (config.json says fp8 experts)");
            return false;
        }
        n = dims_of(s, s->rows, k, dims);
        base->fmt = KERN_W_FP8;
        base->row_bytes = k;
        dims_of(s, blocks(s->rows), blocks(k), scale_dims);
        return check_shape(l, t, n, dims) && block_scales(l, base, s->scale, n, scale_dims);
    }
    if (!is_nibbles(t->dtype)) {
        refuse_dtype(l, t,
                     form == TEXT_EXPERTS_MXFP4 ? "I8 or U8 (config.json says fp4 experts)"
                                                : "U8 (config.json says NVFP4 experts)");
        return false;
    }
    int group = form == TEXT_EXPERTS_MXFP4 ? 32 : 16;
    if (k % group) {
        refuse(l, t, "%d columns; right for fp4: a multiple of %d", k, group);
        return false;
    }
    n = dims_of(s, s->rows, t->dtype == MODEL_DT_F4 ? k : k / 2, dims);
    if (!check_shape(l, t, n, dims)) return false;
    base->row_bytes = k / 2;
    dims_of(s, s->rows, k / group, scale_dims);
    if (form == TEXT_EXPERTS_MXFP4) {
        base->fmt = KERN_W_MXFP4;
        return group_scales(l, base, s->scale, n, scale_dims);
    }
    base->fmt = KERN_W_NVFP4;
    if (!s->scale || !check_shape(l, s->scale, n, scale_dims)) return false;
    if (s->scale->dtype != MODEL_DT_F8_E4M3) {
        refuse_dtype(l, s->scale, "F8_E4M3");
        return false;
    }
    check_e4m3(l, s->scale);
    base->scale = s->scale->data;
    base->sfmt = KERN_S_E4M3;
    base->scale_row_bytes = k / group;
    return l->rc == 0;
}

/* The matrix of n rows at `row` of a member, from the base of its stack. */
static struct kern_weight expert_view(struct loader *l, const struct kern_weight *base,
                                      const struct stack *s, int64_t member, int half, int32_t n)
{
    struct kern_weight w = *base;
    int64_t row = half ? n : 0, unit = base->fmt == KERN_W_FP8 ? BLOCK : 1;
    int64_t scale_rows = base->fmt == KERN_W_FP8 ? blocks(s->rows) : s->rows;
    w.n = n;
    w.data = (const char *)base->data + (member * s->rows + row) * base->row_bytes;
    if (base->scale)
        w.scale =
            (const char *)base->scale + (member * scale_rows + row / unit) * base->scale_row_bytes;
    if (base->fmt == KERN_W_NVFP4) {
        w.scale2 = one_scale(l, s->scale2, s, member, half);
        w.input_scale = one_scale(l, s->input, s, member, half);
    }
    return w;
}

/* Asks for the scales that belong to a weight called `prefix`;
 * sep: what stands between it and the part's name. */
static void want_scales(struct loader *l, struct stack *s, const char *prefix)
{
    switch (form_of(l, s->weight)) {
    case TEXT_EXPERTS_FP8:
    case TEXT_EXPERTS_MXFP4: s->scale = wantf(l, "%s.scale", prefix); break;
    case TEXT_EXPERTS_NVFP4:
        s->scale = wantf(l, "%s.weight_scale", prefix);
        s->scale2 = wantf(l, "%s.weight_scale_2", prefix);
        if (l->w->report.input_scales) s->input = wantf(l, "%s.input_scale", prefix);
        break;
    default: break;
    }
}

static void single_expert(struct loader *l, struct kern_weight *w, int32_t n, int32_t k,
                          const char *prefix, int32_t e, int part)
{
    char name[NAME];
    snprintf(name, sizeof name, "%s.ffn.experts.%d.w%d", prefix, e, part);
    struct stack s = {.rows = n};
    s.weight = wantf(l, "%s.weight", name);
    want_scales(l, &s, name);
    struct kern_weight base;
    if (expert_base(l, &base, &s, k)) *w = expert_view(l, &base, &s, 0, 0, n);
}

/* One of several spellings in use; the first is the one a message names. */
static const struct model_tensor *want_spelled(struct loader *l, const char *prefix,
                                               const char *const *endings)
{
    if (l->rc < 0) return NULL;
    char name[NAME];
    l->w->report.n_expected++;
    for (int i = 0; endings[i]; i++) {
        snprintf(name, sizeof name, "%s%s", prefix, endings[i]);
        int64_t at = model_checkpoint_index(l->ck, name);
        if (at >= 0) return mark(l, at);
    }
    snprintf(name, sizeof name, "%s%s", prefix, endings[0]);
    note_missing(l, name);
    return NULL;
}

static const char *const STACK_WEIGHT[] = {"", ".weight", NULL};

static struct stack want_stack(struct loader *l, const char *prefix, int64_t rows)
{
    static const char *const SCALE[] =
        {"_scale_inv", ".weight_scale_inv", "_weight_scale_inv", "_scale", ".scale", "_scales",
         NULL},
                             *const BLOCKS[] = {".weight_scale", "_weight_scale", "_scale", NULL},
                             *const SECOND[] = {".weight_scale_2", "_weight_scale_2", "_scale_2",
                                                NULL},
                             *const INPUT[] = {".input_scale", "_input_scale", NULL};
    struct stack s = {.rows = rows, .count = l->w->shape.E};
    s.weight = want_spelled(l, prefix, STACK_WEIGHT);
    switch (form_of(l, s.weight)) {
    case TEXT_EXPERTS_FP8:
    case TEXT_EXPERTS_MXFP4: s.scale = want_spelled(l, prefix, SCALE); break;
    case TEXT_EXPERTS_NVFP4:
        s.scale = want_spelled(l, prefix, BLOCKS);
        s.scale2 = want_spelled(l, prefix, SECOND);
        if (l->w->report.input_scales) s.input = want_spelled(l, prefix, INPUT);
        break;
    default: break;
    }
    return s;
}

static void stacked_experts(struct loader *l, struct kern_weight *w1, struct kern_weight *w2,
                            struct kern_weight *w3, const char *prefix)
{
    const struct model_shape *s = &l->w->shape;
    char name[NAME];
    l->w->report.hf_names = true;
    snprintf(name, sizeof name, "model.%s.mlp.experts.gate_up_proj", prefix);
    struct stack up = want_stack(l, name, 2 * (int64_t)s->inter);
    snprintf(name, sizeof name, "model.%s.mlp.experts.down_proj", prefix);
    struct stack down = want_stack(l, name, s->D);
    struct kern_weight up_base, down_base;
    if (expert_base(l, &up_base, &up, s->D)) {
        if (up_base.fmt == KERN_W_FP8 && s->inter % BLOCK)
            refuse(l, up.weight,
                   "moe_intermediate_size %d; right for stacked fp8 experts: a multiple of %d",
                   s->inter, BLOCK);
        for (int32_t e = 0; e < s->E && l->rc == 0; e++) {
            w1[e] = expert_view(l, &up_base, &up, e, 0, s->inter);
            w3[e] = expert_view(l, &up_base, &up, e, 1, s->inter);
        }
    }
    if (expert_base(l, &down_base, &down, s->inter))
        for (int32_t e = 0; e < s->E && l->rc == 0; e++)
            w2[e] = expert_view(l, &down_base, &down, e, 0, s->D);
}

static bool is_stacked(const struct loader *l, const char *prefix)
{
    char name[NAME];
    for (int i = 0; STACK_WEIGHT[i]; i++) {
        snprintf(name, sizeof name, "model.%s.mlp.experts.gate_up_proj%s", prefix, STACK_WEIGHT[i]);
        if (model_checkpoint_index(l->ck, name) >= 0) return true;
        snprintf(name, sizeof name, "model.%s.mlp.experts.down_proj%s", prefix, STACK_WEIGHT[i]);
        if (model_checkpoint_index(l->ck, name) >= 0) return true;
    }
    return false;
}

static void experts(struct loader *l, struct model_layer *layer, const char *prefix)
{
    const struct model_shape *s = &l->w->shape;
    struct kern_weight *w = take(l, 3 * (size_t)s->E * sizeof *w);
    if (!w) return;
    struct kern_weight *w1 = w, *w2 = w + s->E, *w3 = w + 2 * s->E;
    layer->w1 = w1;
    layer->w2 = w2;
    layer->w3 = w3;
    if (is_stacked(l, prefix)) {
        stacked_experts(l, w1, w2, w3, prefix);
    } else {
        for (int32_t e = 0; e < s->E && l->rc == 0; e++) {
            single_expert(l, &w1[e], s->inter, s->D, prefix, e, 1);
            single_expert(l, &w2[e], s->D, s->inter, prefix, e, 2);
            single_expert(l, &w3[e], s->inter, s->D, prefix, e, 3);
        }
    }
    l->w->report.experts = w1[0].fmt;
}

/* ---- the router's table ---- */

static void hash_table(struct loader *l, struct model_layer *layer, const struct model_tensor *t)
{
    const struct model_shape *s = &l->w->shape;
    if (!t || l->rc < 0) return;
    if (t->dtype != MODEL_DT_I64 && t->dtype != MODEL_DT_I32) {
        refuse_dtype(l, t, "I64 or I32");
        return;
    }
    if (!check_shape(l, t, SHAPE(s->V, s->k))) return;
    size_t n = (size_t)s->V * (size_t)s->k;
    const char *p = t->data;
    for (size_t i = 0; i < n; i++) {
        int64_t id;
        int32_t narrow;
        if (t->dtype == MODEL_DT_I64) {
            memcpy(&id, p + i * 8, 8);
        } else {
            memcpy(&narrow, p + i * 4, 4);
            id = narrow;
        }
        if (id >= 0 && id < s->E) continue;
        refuse(l, t, "token %zu, choice %zu: expert %" PRId64 "; right: 0..%d", i / (size_t)s->k,
               i % (size_t)s->k, id, s->E - 1);
        return;
    }
    layer->tid2eid = t->data;
    layer->tid_bytes = t->dtype == MODEL_DT_I64 ? 8 : 4;
}

/* ---- the walk ---- */

static void load_layer(struct loader *l, struct model_layer *y, int32_t ratio, bool hashed,
                       const char *p)
{
    const struct model_shape *s = &l->w->shape;
    char attn[NAME / 2], name[NAME];
    snprintf(attn, sizeof attn, "%s.attn", p);
    y->ratio = ratio;
    norm(l, &y->attn_norm, s->D, p, "attn_norm");
    norm(l, &y->ffn_norm, s->D, p, "ffn_norm");
    hyper(l, &y->hc_attn, p, "hc_attn", false);
    hyper(l, &y->hc_ffn, p, "hc_ffn", false);
    y->sink = floats(l, wantf(l, "%s.attn_sink", attn), SHAPE(s->H));
    dense(l, &y->wq_a, s->q_lora, s->D, attn, "wq_a");
    norm(l, &y->q_norm, s->q_lora, attn, "q_norm");
    dense(l, &y->wq_b, s->H * s->d, s->q_lora, attn, "wq_b");
    dense(l, &y->wkv, s->d, s->D, attn, "wkv");
    norm(l, &y->kv_norm, s->d, attn, "kv_norm");
    dense(l, &y->wo_a, s->o_groups * s->o_lora, s->H * s->d / s->o_groups, attn, "wo_a");
    dense(l, &y->wo_b, s->D, s->o_groups * s->o_lora, attn, "wo_b");
    if (ratio) {
        snprintf(name, sizeof name, "%s.compressor", attn);
        compressor(l, &y->comp, ratio, s->d, name);
    }
    if (ratio == 4) {
        snprintf(name, sizeof name, "%s.indexer", attn);
        dense(l, &y->index_wq_b, s->index_heads * s->index_dim, s->q_lora, name, "wq_b");
        plain_named(l, &y->index_proj, s->index_heads, s->D, name, "weights_proj.weight");
        snprintf(name, sizeof name, "%s.indexer.compressor", attn);
        compressor(l, &y->index_comp, 4, s->index_dim, name);
    }
    plain_named(l, &y->gate, s->E, s->D, p, "ffn.gate.weight");
    if (hashed)
        hash_table(l, y, wantf(l, "%s.ffn.gate.tid2eid", p));
    else
        y->gate_bias = floats(l, wantf(l, "%s.ffn.gate.bias", p), SHAPE(s->E));
    experts(l, y, p);
    dense(l, &y->shared_w1, s->inter, s->D, p, "ffn.shared_experts.w1");
    dense(l, &y->shared_w2, s->D, s->inter, p, "ffn.shared_experts.w2");
    dense(l, &y->shared_w3, s->inter, s->D, p, "ffn.shared_experts.w3");
}

static void load_mtp(struct loader *l, struct model_mtp *m, const char *p)
{
    const struct model_shape *s = &l->w->shape;
    dense(l, &m->e_proj, s->D, s->D, p, "e_proj");
    dense(l, &m->h_proj, s->D, s->D, p, "h_proj");
    norm(l, &m->enorm, s->D, p, "enorm");
    norm(l, &m->hnorm, s->D, p, "hnorm");
    norm(l, &m->norm, s->D, p, "norm");
    hyper(l, &m->hc_head, p, "hc_head", true);
}

/* Main layers from this on may be repeated: a table of token ids belongs to the first layers. */
static int32_t first_repeated(const bool *hashed, int32_t n_stored)
{
    int32_t first = n_stored;
    while (first > 0 && !hashed[first - 1]) first--;
    return first;
}

/* The config of the same model with n main layers. */
static int repeat_layers(struct text_config *c, const char *dir, int32_t n, struct tow_err *err)
{
    const int32_t n_stored = c->n_layers, first = first_repeated(c->hashed, n_stored);
    if (n < n_stored || n > TEXT_CONFIG_MAX_LAYERS - c->n_mtp)
        return tow_fail(err, TOW_ECONFIG, "%s: layers %d: not in %d..%d (config.json has %d)", dir,
                        n, n_stored, TEXT_CONFIG_MAX_LAYERS - c->n_mtp, n_stored);
    if (n > n_stored && first == n_stored)
        return tow_fail(
            err, TOW_ECONFIG,
            "%s: layers %d: the last of %d routes by token id; none behind it to repeat", dir, n,
            n_stored);
    memmove(&c->ratios[n], &c->ratios[n_stored], (size_t)c->n_mtp * sizeof *c->ratios);
    for (int32_t i = n_stored; i < n; i++) {
        c->ratios[i] = c->ratios[i - (n_stored - first)];
        c->hashed[i] = false;
    }
    c->n_layers = n;
    return 0;
}

/* The same views in an array of its own: experts are known by theirs once they are placed. */
static void repeat_layer(struct loader *l, struct model_layer *y, const struct model_layer *of)
{
    const size_t n = (size_t)l->w->shape.E;
    struct kern_weight *w = take(l, 3 * n * sizeof *w);
    if (!w) return;
    *y = *of;
    y->w1 = memcpy(w, of->w1, n * sizeof *w);
    y->w2 = memcpy(w + n, of->w2, n * sizeof *w);
    y->w3 = memcpy(w + 2 * n, of->w3, n * sizeof *w);
}

static void load_all(struct loader *l)
{
    struct model_weights *w = l->w;
    const struct model_shape *s = &w->shape;
    char name[32];
    const int32_t n_stored = w->report.n_stored;
    const int32_t period = n_stored - first_repeated(s->hashed, n_stored);
    plain_named(l, &w->embed, s->V, s->D, "", "embed.weight");
    for (int32_t i = 0; i < n_stored && l->rc == 0; i++) {
        snprintf(name, sizeof name, "layers.%d", i);
        load_layer(l, &w->layers[i], s->ratios[i], s->hashed[i], name);
    }
    for (int32_t i = n_stored; i < s->n_layers && l->rc == 0; i++)
        repeat_layer(l, &w->layers[i], &w->layers[i - period]);
    norm(l, &w->norm, s->D, "", "norm");
    hyper(l, &w->hc_head, "", "hc_head", true);
    bool has_head = model_checkpoint_index(l->ck, "head.weight") >= 0 ||
                    model_checkpoint_index(l->ck, "lm_head.weight") >= 0;
    if (w->config.tie_embeddings && !has_head)
        w->head = w->embed;
    else
        plain_named(l, &w->head, s->V, s->D, "", "head.weight");
    for (int32_t i = 0; i < s->n_mtp && l->rc == 0; i++) {
        snprintf(name, sizeof name, "mtp.%d", i);
        load_layer(l, &w->layers[s->n_layers + i], s->ratios[s->n_layers + i], false, name);
        load_mtp(l, &w->mtp[i], name);
    }
}

/* What is in the files at all, before the walk: MTP blocks, input scales, whose names. */
static void survey(struct loader *l, bool no_mtp)
{
    struct model_weights *w = l->w;
    bool mtp = false, input = false;
    size_t n = model_checkpoint_count(l->ck);
    for (size_t i = 0; i < n; i++)
        mtp |= strncmp(model_checkpoint_at(l->ck, i)->name, "mtp.", 4) == 0;
    if (w->shape.n_mtp && !mtp) w->report.mtp_absent = true;
    if (!mtp || no_mtp) w->shape.n_mtp = 0;
    for (size_t i = 0; i < n && w->config.experts == TEXT_EXPERTS_NVFP4; i++) {
        const char *name = model_checkpoint_at(l->ck, i)->name, *end = strstr(name, "input_scale");
        if (!strstr(name, ".experts.") || !end || end[11]) continue;
        input |= w->shape.n_mtp > 0 || strncmp(name, "mtp.", 4) != 0;
    }
    w->report.input_scales = input;
    l->hf = model_checkpoint_index(l->ck, "embed.weight") < 0 &&
            model_checkpoint_index(l->ck, "model.embed_tokens.weight") >= 0;
}

static int finish(struct loader *l, const struct model_weights_options *options)
{
    struct model_load_report *r = &l->w->report;
    if (l->rc < 0) return l->rc;
    const char *dir = model_checkpoint_dir(l->ck);
    if (l->n_missing)
        return tow_fail(l->err, TOW_ENOENT,
                        "%s: found %zu of %zu tensors, %zu missing (incomplete download, or not "
                        "the checkpoint that "
                        "config.json describes): %s%s",
                        dir, r->n_found, r->n_expected, l->n_missing, l->missing.data,
                        l->n_missing > NAMES_SHOWN ? ", ..." : "");
    if (options && options->need_input_scales && r->experts == KERN_W_NVFP4 && !r->input_scales)
        return tow_fail(
            l->err, TOW_ECONFIG,
            "%s: 4-bit expert activations were asked for, but no expert has an input_scale", dir);
    tow_assert(r->n_found == r->n_expected);
    for (size_t i = 0; i < model_checkpoint_count(l->ck); i++) r->n_unused += !l->used[i];
    return 0;
}

int model_weights_open(struct model_weights **out, const char *dir,
                       const struct model_weights_options *options, struct tow_err *err)
{
    struct loader l = {.err = err};
    struct model_weights *w = calloc(1, sizeof *w);
    if (!w || !(w->own = calloc(1, sizeof *w->own))) {
        free(w);
        return tow_fail(err, TOW_ENOMEM, "%s: out of memory", dir);
    }
    tow_arena_init(&w->own->arena, 0);
    tow_buf_init(&l.missing, 4096);
    int rc = text_config_load(&w->config, dir, err);
    if (rc < 0) goto close_weights;
    w->report.n_stored = w->config.n_layers;
    if (options && options->n_layers) rc = repeat_layers(&w->config, dir, options->n_layers, err);
    if (rc < 0) goto close_weights;
    if ((rc = model_checkpoint_open(&w->own->files, dir, err)) < 0) goto close_weights;
    l.w = w;
    l.ck = w->own->files;
    l.arena = &w->own->arena;
    model_shape_from_config(&w->shape, &w->config);
    w->report.n_files = model_checkpoint_files(l.ck);
    w->report.file_bytes = model_checkpoint_bytes(l.ck);
    survey(&l, options && options->no_mtp);
    size_t n_layers = (size_t)(w->shape.n_layers + w->shape.n_mtp);
    l.used = calloc(model_checkpoint_count(l.ck) + 1, sizeof *l.used);
    w->layers = take(&l, n_layers * sizeof *w->layers);
    if (w->shape.n_mtp) w->mtp = take(&l, (size_t)w->shape.n_mtp * sizeof *w->mtp);
    if (!l.used || !w->layers || l.rc < 0) {
        rc = tow_fail(err, TOW_ENOMEM, "%s: out of memory", dir);
        goto close_weights;
    }
    load_all(&l);
    if ((rc = finish(&l, options)) < 0) goto close_weights;
    *out = w;
    w = NULL;
close_weights:
    free(l.used);
    tow_buf_fini(&l.missing);
    model_weights_close(w);
    return rc;
}

void model_weights_close(struct model_weights *w)
{
    if (!w) return;
    model_checkpoint_close(w->own->files);
    tow_arena_fini(&w->own->arena);
    free(w->own);
    free(w);
}

/* ---- fingerprint ---- */

static void print_config(struct tow_buf *b, const struct text_config *c)
{
    tow_buf_printf(b, "towpath-model-2 %d %d %d %d %d %d %d %d %d %d %d %d %d %d", c->hidden_size,
                   c->vocab_size, c->n_layers, c->n_heads, c->head_dim, c->rope_dim, c->q_lora_rank,
                   c->o_groups, c->o_lora_rank, c->window, c->index_heads, c->index_dim,
                   c->index_topk, c->n_mtp);
    for (int i = 0; i < c->n_layers + c->n_mtp; i++)
        tow_buf_printf(b, " %d%s", c->ratios[i], c->hashed[i] ? "h" : "");
    tow_buf_printf(b, " %d %d %d %d %d %a %a %d %d %a %a %a %a", c->n_experts, c->n_experts_per_tok,
                   c->moe_inter, (int)c->score, c->norm_topk_prob, c->routed_scaling,
                   c->swiglu_limit, c->hc_mult, c->hc_iters, c->hc_eps, c->norm_eps, c->rope_theta,
                   c->compress_rope_theta);
    if (c->yarn)
        tow_buf_printf(b, " yarn %a %a %a %d", c->yarn_factor, c->yarn_beta_fast, c->yarn_beta_slow,
                       c->yarn_original);
    tow_buf_printf(b, " %d %d %d\n", c->fp8, (int)c->experts, c->tie_embeddings);
}

/* Revisions of one model have the same shapes; what training moved, it moved everywhere. */
static uint64_t hash_sample(const struct model_tensor *t, uint64_t h)
{
    enum { SAMPLE_BYTES = 64 };
    size_t n = t->bytes < SAMPLE_BYTES ? (size_t)t->bytes : SAMPLE_BYTES;
    return n ? tow_hash64_seed((const char *)t->data + (t->bytes - n) / 2, n, h) : h;
}

static void fingerprint(const struct text_config *c, const struct model_checkpoint *ck,
                        char out[MODEL_FINGERPRINT_CHARS])
{
    struct tow_buf b;
    tow_buf_init(&b, 0);
    print_config(&b, c);
    uint64_t h = tow_hash64(b.data, b.len);
    for (size_t i = 0; i < model_checkpoint_count(ck); i++) {
        const struct model_tensor *t = model_checkpoint_at(ck, i);
        char shape[200];
        tow_buf_clear(&b);
        tow_buf_printf(&b, "%s %s %s %" PRIu64 "\n", t->name, t->dtype_name,
                       model_tensor_shape_text(t, shape, sizeof shape), t->bytes);
        h = hash_sample(t, tow_hash64_seed(b.data, b.len, h));
    }
    tow_buf_fini(&b);
    snprintf(out, MODEL_FINGERPRINT_CHARS, "%016" PRIx64, h);
}

void model_weights_fingerprint(const struct model_weights *w, char out[MODEL_FINGERPRINT_CHARS])
{
    fingerprint(&w->config, w->own->files, out);
}

int model_fingerprint(const char *dir, char out[MODEL_FINGERPRINT_CHARS], struct tow_err *err)
{
    struct text_config *c = malloc(sizeof *c);
    if (!c) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", dir);
    struct model_checkpoint *ck = NULL;
    int rc = text_config_load(c, dir, err);
    if (rc == 0) rc = model_checkpoint_open(&ck, dir, err);
    if (rc == 0) fingerprint(c, ck, out);
    model_checkpoint_close(ck);
    free(c);
    return rc;
}
