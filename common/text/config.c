/* How: one strict JSON parse, then one table row per plain number (names in both forms, range,
 * default), then the fields that are more than a number, then the rules that tie fields together.
 * Numbers are never taken from strings, and a whole number must be written as one.
 *
 * Rejected: taking defaults for the sizes of the release when a field is missing. A config that
 * lost a line would then load as another model.
 */
#include "common/text/config.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A config of the largest release is 3 KiB; this leaves room for quantisation manifests. */
#define CONFIG_MAX_BYTES ((size_t)16 << 20)

struct reader {
    const struct json *root;
    char file[300]; /* "DIR/config.json" */
    struct tow_err *err;
};

/* ---- finding and naming values ---- */

static const struct json *find(const struct json *obj, const char *name)
{
    const struct json *v = name && obj ? json_find(obj, name) : NULL;
    return v && json_type(v) != JSON_NULL ? v : NULL;
}

/* The value as it stands in the file, cut so that it fits in a message. */
static const char *text_of(const struct json *v, char *buf, size_t n)
{
    struct tow_buf b;
    tow_buf_init(&b, 1 << 20);
    json_dump(&b, v);
    snprintf(buf, n, "%s", b.data && !tow_buf_failed(&b) ? b.data : json_type_name(v));
    if (b.len >= n && n > 4) memcpy(buf + n - 4, "...", 4);
    tow_buf_fini(&b);
    return buf;
}

static int bad(const struct reader *r, const char *name, const struct json *v, const char *right)
{
    char text[96];
    return tow_fail(r->err, TOW_ECONFIG, "%s: %s is %s; right: %s", r->file, name,
                    text_of(v, text, sizeof text), right);
}

/* ---- plain numbers ---- */

enum { REQUIRED = 1 };

struct int_row {
    const char *name, *alias; /* Hugging Face's, the released code's */
    size_t off;
    int64_t lo, hi, def;
    int flags;
};
#define AT(f) offsetof(struct text_config, f)
static const struct int_row INTS[] = {
    {"hidden_size", "dim", AT(hidden_size), 1, 65536, 0, REQUIRED},
    {"vocab_size", NULL, AT(vocab_size), 2, 1 << 24, 0, REQUIRED},
    {"num_hidden_layers", "n_layers", AT(n_layers), 1, TEXT_CONFIG_MAX_LAYERS, 0, REQUIRED},
    {"num_nextn_predict_layers", "n_mtp_layers", AT(n_mtp), 0, 16, 0, 0},
    {"num_attention_heads", "n_heads", AT(n_heads), 1, 4096, 0, REQUIRED},
    {"head_dim", NULL, AT(head_dim), 2, 4096, 0, REQUIRED},
    {"q_lora_rank", NULL, AT(q_lora_rank), 1, 65536, 0, REQUIRED},
    {"o_groups", NULL, AT(o_groups), 1, 4096, 0, REQUIRED},
    {"o_lora_rank", NULL, AT(o_lora_rank), 1, 65536, 0, REQUIRED},
    {"sliding_window", "window_size", AT(window), 1, 65536, 0, REQUIRED},
    {"index_n_heads", NULL, AT(index_heads), 1, 1024, 0, 0},
    {"index_head_dim", NULL, AT(index_dim), 32, 1024, 0, 0},
    {"index_topk", NULL, AT(index_topk), 1, TEXT_CONFIG_MAX_TOPK, 0, 0},
    {"n_routed_experts", "num_local_experts", AT(n_experts), 1, 4096, 0, REQUIRED},
    {"num_experts_per_tok", "n_activated_experts", AT(n_experts_per_tok), 1, 64, 0, REQUIRED},
    {"moe_intermediate_size", "moe_inter_dim", AT(moe_inter), 1, 65536, 0, REQUIRED},
    {"hc_mult", NULL, AT(hc_mult), 1, TEXT_CONFIG_MAX_HC, 4, 0},
    {"hc_sinkhorn_iters", NULL, AT(hc_iters), 1, 1000, 20, 0},
    {"max_position_embeddings", "max_seq_len", AT(max_positions), 1, 1 << 30, 1 << 20, 0},
};

struct real_row {
    const char *name, *alias;
    size_t off;
    double lo, hi, def; /* lo <= value <= hi */
    const char *right;
};
static const struct real_row REALS[] = {
    {"hc_eps", NULL, AT(hc_eps), 0, 1, 1e-6, "0..1"},
    {"rms_norm_eps", "norm_eps", AT(norm_eps), 1e-30, 1, 1e-6, "above 0, at most 1"},
    {"routed_scaling_factor", "route_scale", AT(routed_scaling), 1e-6, 1e6, 1, "1e-6..1e6"},
    {"swiglu_limit", NULL, AT(swiglu_limit), 0, 1e9, 0, "0 (no clamp)..1e9"},
    {"rope_theta", NULL, AT(rope_theta), 1.0000001, 1e15, 0, "above 1, at most 1e15"},
    {"compress_rope_theta", NULL, AT(compress_rope_theta), 1.0000001, 1e15, 0,
     "above 1, at most 1e15"},
};
#undef AT

/* One name of a whole number. 1: there, 0: absent, negative: refused. */
static int get_int(const struct reader *r, const struct json *obj, const char *name, int64_t lo,
                   int64_t hi, int64_t *out)
{
    const struct json *v = find(obj, name);
    if (!v) return 0;
    int64_t x;
    if (!json_int(v, &x) || x < lo || x > hi) {
        char right[64];
        if (lo == hi)
            snprintf(right, sizeof right, "%lld", (long long)lo);
        else
            snprintf(right, sizeof right, "a whole number %lld..%lld", (long long)lo,
                     (long long)hi);
        return bad(r, name, v, right);
    }
    *out = x;
    return 1;
}

static int get_real(const struct reader *r, const struct json *obj, const char *name, double lo,
                    double hi, const char *right, double *out)
{
    const struct json *v = find(obj, name);
    if (!v) return 0;
    double x;
    if (!json_double(v, &x) || !(x >= lo && x <= hi)) {
        char text[96];
        snprintf(text, sizeof text, "a number %s", right);
        return bad(r, name, v, text);
    }
    *out = x;
    return 1;
}

/* A string out of a list that ends with NULL; *which is its place. */
static int get_choice(const struct reader *r, const struct json *obj, const char *name,
                      const char *const *list, int *which)
{
    const struct json *v = find(obj, name);
    if (!v) return 0;
    const char *s = json_string(v, NULL);
    for (int i = 0; s && list[i]; i++)
        if (strcmp(s, list[i]) == 0) {
            *which = i;
            return 1;
        }
    char right[160] = "one of";
    for (int i = 0; list[i]; i++) {
        size_t n = strlen(right);
        snprintf(right + n, sizeof right - n, "%s \"%s\"", i ? "," : "", list[i]);
    }
    return bad(r, name, v, right);
}

static int missing(const struct reader *r, const char *name, const char *alias)
{
    return tow_fail(r->err, TOW_ECONFIG, "%s: %s%s%s%s is missing", r->file, name,
                    alias ? " (or " : "", alias ? alias : "", alias ? ")" : "");
}

static int differ(const struct reader *r, const char *a, double x, const char *b, double y)
{
    return tow_fail(r->err, TOW_ECONFIG,
                    "%s: %s is %.17g but %s is %.17g; they name the same thing", r->file, a, x, b,
                    y);
}

static int read_numbers(const struct reader *r, struct text_config *c)
{
    for (size_t i = 0; i < sizeof INTS / sizeof INTS[0]; i++) {
        const struct int_row *row = &INTS[i];
        int64_t x = row->def, y = 0;
        int a = get_int(r, r->root, row->name, row->lo, row->hi, &x);
        if (a < 0) return a;
        int b = get_int(r, r->root, row->alias, row->lo, row->hi, &y);
        if (b < 0) return b;
        if (a && b && x != y && row->off != offsetof(struct text_config, n_mtp) &&
            row->off != offsetof(struct text_config, max_positions))
            return differ(r, row->name, (double)x, row->alias, (double)y);
        if (!a && b) x = y;
        if (!a && !b && (row->flags & REQUIRED)) return missing(r, row->name, row->alias);
        *(int32_t *)((char *)c + row->off) = (int32_t)x;
    }
    for (size_t i = 0; i < sizeof REALS / sizeof REALS[0]; i++) {
        const struct real_row *row = &REALS[i];
        double x = row->def, y = 0;
        int a = get_real(r, r->root, row->name, row->lo, row->hi, row->right, &x);
        if (a < 0) return a;
        int b = get_real(r, r->root, row->alias, row->lo, row->hi, row->right, &y);
        if (b < 0) return b;
        if (a && b && x != y) return differ(r, row->name, x, row->alias, y);
        *(double *)((char *)c + row->off) = !a && b ? y : x;
    }
    return 0;
}

/* ---- layers ---- */

/* Element count of a list, or an error when it is none. */
static int list_of(const struct reader *r, const char *name, const struct json **out)
{
    *out = find(r->root, name);
    if (*out && json_type(*out) != JSON_ARRAY) return bad(r, name, *out, "a list");
    return 0;
}

static int read_compress_ratios(const struct reader *r, struct text_config *c, bool *given)
{
    const struct json *list;
    int rc = list_of(r, "compress_ratios", &list);
    if (rc < 0) return rc;
    *given = list != NULL;
    if (!list) return 0;
    int total = c->n_layers + c->n_mtp, i = 0;
    JSON_EACH(it, list)
    {
        int64_t x;
        char name[48];
        snprintf(name, sizeof name, "compress_ratios[%d]", i);
        if (!json_int(it, &x) || x < 0 || x == 1 || x > TEXT_CONFIG_MAX_RATIO)
            return bad(r, name, it,
                       "0 (window only), 4 (overlapping, with indexer) or 2..1024 (dense)");
        /* Entries of drafters that are not run follow; zeros there say nothing. */
        if (i < total)
            c->ratios[i] = (int32_t)x;
        else if (x != 0 && !c->dspark) {
            return tow_fail(
                r->err, TOW_ECONFIG,
                "%s: compress_ratios has an entry %d (%lld) beyond the %d layers and %d MTP blocks",
                r->file, i, (long long)x, c->n_layers, c->n_mtp);
        }
        i++;
    }
    if (i < c->n_layers)
        return tow_fail(r->err, TOW_ECONFIG,
                        "%s: compress_ratios has %d entries; right: %d, one per layer%s", r->file,
                        i, c->n_layers, c->n_mtp ? " (MTP entries may be missing and are 0)" : "");
    return 0;
}

/* The newer Hugging Face form: a kind per layer and a rate per kind. */
static int read_layer_types(const struct reader *r, struct text_config *c, bool ratios_given,
                            bool *given)
{
    static const char *const KINDS[] = {"sliding_attention", "compressed_sparse_attention",
                                        "heavily_compressed_attention", NULL};
    static const char *const SHORT[] = {NULL, "compress_rate_csa", "compress_rate_hca"};
    const struct json *list;
    int rc = list_of(r, "layer_types", &list);
    if (rc < 0) return rc;
    *given = list != NULL;
    if (!list) return 0;
    int64_t rate[3] = {0, 4, 128};
    const struct json *rates = find(r->root, "compress_rates");
    if (rates && json_type(rates) != JSON_OBJECT)
        return bad(r, "compress_rates", rates, "an object");
    for (int k = 1; k < 3; k++) {
        if ((rc = get_int(r, r->root, SHORT[k], 2, TEXT_CONFIG_MAX_RATIO, &rate[k])) < 0) return rc;
        if ((rc = get_int(r, rates, KINDS[k], 2, TEXT_CONFIG_MAX_RATIO, &rate[k])) < 0) return rc;
    }
    int i = 0;
    JSON_EACH(it, list)
    {
        const char *s = json_string(it, NULL);
        int k = 0;
        while (KINDS[k] && (!s || strcmp(s, KINDS[k]) != 0)) k++;
        char name[48];
        snprintf(name, sizeof name, "layer_types[%d]", i);
        if (!KINDS[k])
            return bad(r, name, it,
                       "\"sliding_attention\", \"compressed_sparse_attention\" or "
                       "\"heavily_compressed_attention\"");
        if (i < c->n_layers) {
            if (k == 1 && rate[1] != 4)
                return tow_fail(r->err, TOW_ECONFIG,
                                "%s: the rate of compressed_sparse_attention is %lld; right: 4",
                                r->file, (long long)rate[1]);
            if (k == 2 && rate[2] == 4)
                return tow_fail(
                    r->err, TOW_ECONFIG,
                    "%s: the rate of heavily_compressed_attention is 4; right: 2..1024 but not 4",
                    r->file);
            if (ratios_given && c->ratios[i] != rate[k])
                return differ(r, name, (double)rate[k], "the entry in compress_ratios",
                              c->ratios[i]);
            c->ratios[i] = (int32_t)rate[k];
        }
        i++;
    }
    if (i < c->n_layers)
        return tow_fail(r->err, TOW_ECONFIG,
                        "%s: layer_types has %d entries; right: %d, one per layer", r->file, i,
                        c->n_layers);
    return 0;
}

static int read_hashed(const struct reader *r, struct text_config *c)
{
    int64_t n = 0, m = 0;
    int a = get_int(r, r->root, "num_hash_layers", 0, 1 << 16, &n);
    if (a < 0) return a;
    int b = get_int(r, r->root, "n_hash_layers", 0, 1 << 16, &m);
    if (b < 0) return b;
    if (a && b && n != m)
        return differ(r, "num_hash_layers", (double)n, "n_hash_layers", (double)m);
    if (!a && b) n = m;
    /* More than there are layers means all of them, as in the released code. */
    for (int i = 0; i < c->n_layers; i++) c->hashed[i] = i < n;

    const struct json *list;
    int rc = list_of(r, "mlp_layer_types", &list);
    if (rc < 0 || !list) return rc;
    int i = 0;
    JSON_EACH(it, list)
    {
        const char *s = json_string(it, NULL);
        char name[48];
        snprintf(name, sizeof name, "mlp_layer_types[%d]", i);
        bool hash = s && strcmp(s, "hash_moe") == 0;
        if (!hash && (!s || strcmp(s, "moe") != 0))
            return bad(r, name, it, "\"hash_moe\" or \"moe\"");
        if (i < c->n_layers) {
            if ((a || b) && hash != c->hashed[i])
                return tow_fail(r->err, TOW_ECONFIG, "%s: %s is \"%s\" but num_hash_layers is %lld",
                                r->file, name, s, (long long)n);
            c->hashed[i] = hash;
        }
        i++;
    }
    if (i < c->n_layers)
        return tow_fail(r->err, TOW_ECONFIG,
                        "%s: mlp_layer_types has %d entries; right: %d, one per layer", r->file, i,
                        c->n_layers);
    return 0;
}

static int read_layers(const struct reader *r, struct text_config *c)
{
    int64_t block = 0;
    int rc = get_int(r, r->root, "dspark_block_size", 0, 1 << 16, &block);
    if (rc < 0) return rc;
    c->dspark = block > 0;
    if (c->dspark) c->n_mtp = 0;
    if (c->n_layers + c->n_mtp > TEXT_CONFIG_MAX_LAYERS)
        return tow_fail(
            r->err, TOW_ECONFIG,
            "%s: num_hidden_layers %d + num_nextn_predict_layers %d is %d; right: at most %d",
            r->file, c->n_layers, c->n_mtp, c->n_layers + c->n_mtp, TEXT_CONFIG_MAX_LAYERS);
    bool ratios = false, types = false;
    if ((rc = read_compress_ratios(r, c, &ratios)) < 0) return rc;
    if ((rc = read_layer_types(r, c, ratios, &types)) < 0) return rc;
    if (!ratios && !types) return missing(r, "compress_ratios", "layer_types");
    return read_hashed(r, c);
}

/* ---- positions ---- */

/* theta from a rope_parameters object; must agree with one at the top. */
static int merge_theta(const struct reader *r, const struct json *obj, const char *label,
                       double *theta)
{
    double x = 0;
    int rc = get_real(r, obj, "rope_theta", 1.0000001, 1e15, "above 1, at most 1e15", &x);
    if (rc <= 0) return rc;
    if (*theta != 0 && *theta != x) return differ(r, label, x, "the same at the top", *theta);
    *theta = x;
    return 0;
}

static int read_yarn(const struct reader *r, struct text_config *c, const struct json *obj,
                     const char *label)
{
    static const char *const TYPES[] = {"yarn", "default", "none", NULL};
    int which = 1;
    int rc = get_choice(r, obj, "type", TYPES, &which);
    if (rc == 0) rc = get_choice(r, obj, "rope_type", TYPES, &which);
    if (rc < 0) return tow_note(r->err, "%s", label);
    if (which != 0) return 0;
    int64_t original = 0;
    c->yarn = true;
    c->yarn_beta_fast = 32;
    c->yarn_beta_slow = 1;
    if ((rc = get_real(r, obj, "factor", 1, 1e6, "1..1e6", &c->yarn_factor)) < 0) return rc;
    if (rc == 0) return missing(r, "rope_scaling.factor", NULL);
    rc = get_int(r, obj, "original_max_position_embeddings", 1, 1 << 30, &original);
    if (rc < 0) return rc;
    if (rc == 0) return missing(r, "rope_scaling.original_max_position_embeddings", NULL);
    c->yarn_original = (int32_t)original;
    if ((rc = get_real(r, obj, "beta_fast", 1e-6, 1e6, "1e-6..1e6", &c->yarn_beta_fast)) < 0)
        return rc;
    if ((rc = get_real(r, obj, "beta_slow", 1e-6, 1e6, "1e-6..1e6", &c->yarn_beta_slow)) < 0)
        return rc;
    return 0;
}

static int read_positions(const struct reader *r, struct text_config *c)
{
    int rc;
    const struct json *params = find(r->root, "rope_parameters"),
                      *scaling = find(r->root, "rope_scaling");
    if (params && json_type(params) != JSON_OBJECT)
        return bad(r, "rope_parameters", params, "an object");
    if (scaling && json_type(scaling) != JSON_OBJECT)
        return bad(r, "rope_scaling", scaling, "an object");
    const struct json *main_rope = find(params, "main"), *comp = find(params, "compress");
    double partial = 0;
    if (main_rope || comp) {
        if (main_rope && json_type(main_rope) != JSON_OBJECT)
            return bad(r, "rope_parameters.main", main_rope, "an object");
        if (comp && json_type(comp) != JSON_OBJECT)
            return bad(r, "rope_parameters.compress", comp, "an object");
        if ((rc = merge_theta(r, main_rope, "rope_parameters.main.rope_theta", &c->rope_theta)) < 0)
            return rc;
        rc = merge_theta(r, comp, "rope_parameters.compress.rope_theta", &c->compress_rope_theta);
        if (rc < 0) return rc;
        if ((rc = read_yarn(r, c, comp, "rope_parameters.compress")) < 0) return rc;
        if ((rc = get_real(r, main_rope, "partial_rotary_factor", 1e-6, 1, "above 0, at most 1",
                           &partial)) < 0)
            return rc;
    } else if (params) {
        if ((rc = merge_theta(r, params, "rope_parameters.rope_theta", &c->rope_theta)) < 0)
            return rc;
        if ((rc = read_yarn(r, c, params, "rope_parameters")) < 0) return rc;
    }
    if (scaling && (rc = read_yarn(r, c, scaling, "rope_scaling")) < 0) return rc;

    /* The released code's flat form; 0 switches YaRN off. */
    int64_t original = 0;
    if ((rc = get_int(r, r->root, "original_seq_len", 0, 1 << 30, &original)) < 0) return rc;
    if (original > 0) {
        double factor, fast = 32, slow = 1;
        if ((rc = get_real(r, r->root, "rope_factor", 1, 1e6, "1..1e6", &factor)) < 0) return rc;
        if (rc == 0) return missing(r, "rope_factor", NULL);
        if ((rc = get_real(r, r->root, "beta_fast", 1e-6, 1e6, "1e-6..1e6", &fast)) < 0) return rc;
        if ((rc = get_real(r, r->root, "beta_slow", 1e-6, 1e6, "1e-6..1e6", &slow)) < 0) return rc;
        if (c->yarn && c->yarn_factor != factor)
            return differ(r, "rope_factor", factor, "rope_scaling.factor", c->yarn_factor);
        if (c->yarn && c->yarn_original != original)
            return differ(r, "original_seq_len", (double)original,
                          "rope_scaling.original_max_position_embeddings", c->yarn_original);
        c->yarn = true;
        c->yarn_factor = factor;
        c->yarn_original = (int32_t)original;
        c->yarn_beta_fast = fast;
        c->yarn_beta_slow = slow;
    }
    if (c->yarn && c->yarn_beta_fast < c->yarn_beta_slow)
        return tow_fail(r->err, TOW_ECONFIG, "%s: beta_fast is %g, below beta_slow %g", r->file,
                        c->yarn_beta_fast, c->yarn_beta_slow);

    /* The rotated width: given, or as a part of head_dim. */
    int64_t rd = 0, rd2 = 0;
    int a = get_int(r, r->root, "qk_rope_head_dim", 2, c->head_dim, &rd);
    if (a < 0) return a;
    int b = get_int(r, r->root, "rope_head_dim", 2, c->head_dim, &rd2);
    if (b < 0) return b;
    if (a && b && rd != rd2)
        return differ(r, "qk_rope_head_dim", (double)rd, "rope_head_dim", (double)rd2);
    if (!a && b) rd = rd2;
    rc = get_real(r, r->root, "partial_rotary_factor", 1e-6, 1, "above 0, at most 1", &partial);
    if (rc < 0) return rc;
    if (!a && !b) {
        if (partial == 0) return missing(r, "qk_rope_head_dim", "rope_head_dim");
        rd = (int64_t)(c->head_dim * partial);
    }
    if (rd < 2 || rd % 2 != 0)
        return tow_fail(r->err, TOW_ECONFIG,
                        "%s: qk_rope_head_dim is %lld; right: even, 2..head_dim (%d)", r->file,
                        (long long)rd, c->head_dim);
    c->rope_dim = (int32_t)rd;
    if (c->rope_theta == 0) c->rope_theta = 10000; /* every release and both public defaults */
    return 0;
}

/* ---- stored form ---- */

static int read_quantization(const struct reader *r, struct text_config *c)
{
    static const char *const METHODS[] = {"fp8", NULL},
                             *const FMTS[] = {"e4m3", "float8_e4m3fn", NULL},
                             *const ALGOS[] = {"NVFP4", NULL}, *const ACTS[] = {"dynamic", NULL},
                             *const EXPERTS[] = {"fp4", "fp8", "bf16", "bfloat16", NULL},
                             *const SCALES[] = {"ue8m0", "float", "fp32", "float32", NULL};
    int which, rc;
    const struct json *q = find(r->root, "quantization_config");
    bool nvfp4 = false;
    if (q && json_type(q) != JSON_OBJECT) return bad(r, "quantization_config", q, "an object");
    if (q) {
        rc = get_choice(r, q, "quant_method", METHODS, &which);
        if (rc < 0) return rc;
        if (rc == 0) return missing(r, "quantization_config.quant_method", NULL);
        if ((rc = get_choice(r, q, "fmt", FMTS, &which)) < 0) return rc;
        if ((rc = get_choice(r, q, "activation_scheme", ACTS, &which)) < 0) return rc;
        if ((rc = get_choice(r, q, "scale_fmt", SCALES, &which)) < 0) return rc;
        c->scale_ue8m0 = rc > 0 && which == 0;
        const struct json *block = find(q, "weight_block_size");
        int64_t x = 0, y = 0;
        if (block && (json_size(block) != 2 || !json_int(json_item(block, 0), &x) ||
                      !json_int(json_item(block, 1), &y) || x != 128 || y != 128))
            return bad(r, "quantization_config.weight_block_size", block, "[128, 128]");
        if ((rc = get_choice(r, q, "moe_quant_algo", ALGOS, &which)) < 0) return rc;
        nvfp4 = rc > 0;
        c->fp8 = true;
    } else {
        /* The released code says "fp8" here, Hugging Face the type of plain tensors. */
        const char *dtype = json_string(find(r->root, "dtype"), NULL);
        c->fp8 = dtype && strcmp(dtype, "fp8") == 0;
        if (c->fp8) {
            if ((rc = get_choice(r, r->root, "scale_fmt", SCALES, &which)) < 0) return rc;
            c->scale_ue8m0 = rc > 0 && which == 0;
        }
    }
    rc = get_choice(r, r->root, "expert_dtype", EXPERTS, &which);
    if (rc < 0) return rc;
    if (nvfp4)
        c->experts = TEXT_EXPERTS_NVFP4;
    else if (rc > 0 && which == 0)
        c->experts = c->fp8 ? TEXT_EXPERTS_MXFP4 : TEXT_EXPERTS_EITHER;
    else if (rc > 0)
        c->experts = which == 1 ? TEXT_EXPERTS_FP8 : TEXT_EXPERTS_PLAIN;
    else
        c->experts = c->fp8 ? TEXT_EXPERTS_FP8 : TEXT_EXPERTS_PLAIN;
    return 0;
}

/* ---- fields that must have one value ---- */

static int read_fixed(const struct reader *r, struct text_config *c)
{
    static const char *const SCORES[] = {"sqrtsoftplus", "sigmoid", "softmax", NULL},
                             *const ACTS[] = {"silu", "swish", NULL},
                             *const METHODS[] = {"noaux_tc", NULL};
    int64_t one;
    int rc, which = 0, other = 0;
    if ((rc = get_int(r, r->root, "num_key_value_heads", 1, 1, &one)) < 0) return rc;
    if ((rc = get_int(r, r->root, "n_shared_experts", 1, 1, &one)) < 0) return rc;
    if ((rc = get_choice(r, r->root, "hidden_act", ACTS, &which)) < 0) return rc;
    if ((rc = get_choice(r, r->root, "topk_method", METHODS, &which)) < 0) return rc;
    which = 0;
    int a = get_choice(r, r->root, "scoring_func", SCORES, &which);
    if (a < 0) return a;
    int b = get_choice(r, r->root, "score_func", SCORES, &other);
    if (b < 0) return b;
    if (a && b && which != other)
        return tow_fail(r->err, TOW_ECONFIG, "%s: scoring_func is \"%s\" but score_func is \"%s\"",
                        r->file, SCORES[which], SCORES[other]);
    c->score = (enum text_score)(a ? which : other);

    static const char *const OFF[] = {"attention_bias", "mlp_bias"};
    for (int i = 0; i < 2; i++) {
        const struct json *v = find(r->root, OFF[i]);
        bool on = false;
        if (v && (!json_bool(v, &on) || on)) return bad(r, OFF[i], v, "false");
    }
    c->norm_topk_prob = true;
    const struct json *v = find(r->root, "norm_topk_prob");
    if (v && !json_bool(v, &c->norm_topk_prob)) return bad(r, "norm_topk_prob", v, "true or false");
    v = find(r->root, "tie_word_embeddings");
    if (v && !json_bool(v, &c->tie_embeddings))
        return bad(r, "tie_word_embeddings", v, "true or false");
    return 0;
}

/* ---- ids and sampling ---- */

static int add_eos(const struct reader *r, struct text_config *c, const struct json *v)
{
    int64_t id;
    if (!json_int(v, &id) || id < 0 || id >= c->vocab_size) {
        char right[64];
        snprintf(right, sizeof right, "token ids 0..%d", c->vocab_size - 1);
        return bad(r, "eos_token_id", v, right);
    }
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos_ids[i] == id) return 0;
    if (c->n_eos == TEXT_CONFIG_MAX_EOS)
        return tow_fail(r->err, TOW_ECONFIG, "%s: eos_token_id: more than %d different ids",
                        r->file, TEXT_CONFIG_MAX_EOS);
    c->eos_ids[c->n_eos++] = (int32_t)id;
    return 0;
}

/* An id, or a list of them. */
static int read_eos(const struct reader *r, struct text_config *c)
{
    const struct json *v = find(r->root, "eos_token_id");
    if (!v) return 0;
    if (json_type(v) != JSON_ARRAY) return add_eos(r, c, v);
    JSON_EACH(it, v)
    {
        int rc = add_eos(r, c, it);
        if (rc < 0) return rc;
    }
    return 0;
}

static int read_ids(const struct reader *r, struct text_config *c)
{
    int64_t id = 0;
    int rc = get_int(r, r->root, "bos_token_id", -1, c->vocab_size - 1, &id);
    if (rc < 0) return rc;
    c->bos_id = (int32_t)id; /* 0 where absent, as in the release */
    id = -1;
    if ((rc = get_int(r, r->root, "pad_token_id", -1, c->vocab_size - 1, &id)) < 0) return rc;
    c->pad_id = (int32_t)id;
    return read_eos(r, c);
}

static int read_generation(const struct reader *r, struct text_config *c)
{
    struct text_generation *g = &c->gen;
    int64_t k = 0;
    int rc;
    const struct json *v = find(r->root, "do_sample");
    if (v && !json_bool(v, &g->do_sample)) return bad(r, "do_sample", v, "true or false");
    if ((rc = get_real(r, r->root, "temperature", 0, 100, "0..100", &g->temperature)) < 0)
        return rc;
    if ((rc = get_real(r, r->root, "top_p", 1e-9, 1, "above 0, at most 1", &g->top_p)) < 0)
        return rc;
    if ((rc = get_real(r, r->root, "min_p", 0, 1, "0..1", &g->min_p)) < 0) return rc;
    rc = get_real(r, r->root, "repetition_penalty", 1e-3, 1e3, "0.001..1000",
                  &g->repetition_penalty);
    if (rc < 0) return rc;
    if ((rc = get_int(r, r->root, "top_k", -1, 1 << 24, &k)) < 0) return rc;
    g->top_k = k > 0 ? (int32_t)k : 0;
    g->from_file = true;
    return read_eos(r, c);
}

/* ---- rules that tie fields together ---- */

static int check_together(const struct reader *r, struct text_config *c)
{
    bool indexer = false, compressor = false;
    for (int i = 0; i < c->n_layers + c->n_mtp; i++) {
        indexer |= c->ratios[i] == 4;
        compressor |= c->ratios[i] != 0;
    }
    if (compressor && c->compress_rope_theta == 0) return missing(r, "compress_rope_theta", NULL);
    if (c->compress_rope_theta == 0) c->compress_rope_theta = c->rope_theta;
    if (indexer) {
        if (!c->index_heads) return missing(r, "index_n_heads", NULL);
        if (!c->index_dim) return missing(r, "index_head_dim", NULL);
        if (!c->index_topk) return missing(r, "index_topk", NULL);
    } else {
        /* Nothing uses them; values that are legal everywhere keep the layers below simple. */
        if (!c->index_heads) c->index_heads = 1;
        if (!c->index_dim) c->index_dim = 128;
        if (!c->index_topk) c->index_topk = 1;
    }
    if ((c->index_dim & (c->index_dim - 1)) != 0)
        return tow_fail(r->err, TOW_ECONFIG,
                        "%s: index_head_dim is %d; right: a power of two 32..1024", r->file,
                        c->index_dim);
    if (indexer && c->rope_dim > c->index_dim)
        return tow_fail(r->err, TOW_ECONFIG,
                        "%s: qk_rope_head_dim is %d; right: at most index_head_dim (%d)", r->file,
                        c->rope_dim, c->index_dim);
    if ((int64_t)c->n_heads * c->head_dim % c->o_groups != 0)
        return tow_fail(
            r->err, TOW_ECONFIG,
            "%s: o_groups is %d; right: a divisor of num_attention_heads * head_dim (%lld)",
            r->file, c->o_groups, (long long)c->n_heads * c->head_dim);
    if (c->n_experts_per_tok > c->n_experts)
        return tow_fail(r->err, TOW_ECONFIG,
                        "%s: num_experts_per_tok is %d; right: 1..n_routed_experts (%d)", r->file,
                        c->n_experts_per_tok, c->n_experts);
    const struct {
        const char *name;
        int64_t n;
    } rows[] = {{"num_attention_heads * head_dim", (int64_t)c->n_heads * c->head_dim},
                {"o_groups * o_lora_rank", (int64_t)c->o_groups * c->o_lora_rank},
                {"index_n_heads * index_head_dim", (int64_t)c->index_heads * c->index_dim},
                {"hc_mult * hidden_size", (int64_t)c->hc_mult * c->hidden_size}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].n > 1 << 20)
            return tow_fail(r->err, TOW_ECONFIG, "%s: %s is %lld; right: at most 1048576", r->file,
                            rows[i].name, (long long)rows[i].n);
    if (c->experts == TEXT_EXPERTS_MXFP4 || c->experts == TEXT_EXPERTS_NVFP4) {
        int group = c->experts == TEXT_EXPERTS_MXFP4 ? 32 : 16;
        if (c->hidden_size % group || c->moe_inter % group)
            return tow_fail(r->err, TOW_ECONFIG,
                            "%s: hidden_size %d and moe_intermediate_size %d; right for fp4 "
                            "experts: multiples of %d",
                            r->file, c->hidden_size, c->moe_inter, group);
    }
    return 0;
}

/* ---- entry points ---- */

static int parse_object(struct json **out, struct reader *r, const char *where, const char *name,
                        const char *text, size_t len, struct tow_err *err)
{
    snprintf(r->file, sizeof r->file, "%s/%s", where, name);
    r->err = err;
    const struct json_limits limits = {.max_bytes = CONFIG_MAX_BYTES};
    int rc = json_parse(out, text, len, &limits, err);
    if (rc < 0) {
        tow_note(err, "%s", r->file);
        return rc;
    }
    r->root = *out;
    if (json_type(*out) != JSON_OBJECT) {
        rc = tow_fail(err, TOW_EFORMAT, "%s: is %s; right: an object", r->file,
                      json_type_name(*out));
        json_free(*out);
        *out = NULL;
    }
    return rc;
}

int text_config_parse(struct text_config *out, const char *where, const char *text, size_t len,
                      const char *gen, size_t gen_len, struct tow_err *err)
{
    struct text_config *c = calloc(1, sizeof *c);
    if (!c) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", where);
    c->gen = (struct text_generation){
        .do_sample = true, .temperature = 1, .top_p = 1, .repetition_penalty = 1};
    struct reader r;
    struct json *root = NULL, *gen_root = NULL;
    int rc = parse_object(&root, &r, where, "config.json", text, len, err);
    if (rc < 0) goto free_config;
    if ((rc = read_numbers(&r, c)) < 0) goto free_root;
    if ((rc = read_fixed(&r, c)) < 0) goto free_root;
    if ((rc = read_layers(&r, c)) < 0) goto free_root;
    if ((rc = read_positions(&r, c)) < 0) goto free_root;
    if ((rc = read_quantization(&r, c)) < 0) goto free_root;
    if ((rc = check_together(&r, c)) < 0) goto free_root;
    if ((rc = read_ids(&r, c)) < 0) goto free_root;
    if (gen) {
        struct reader g;
        if ((rc = parse_object(&gen_root, &g, where, "generation_config.json", gen, gen_len, err)) <
            0)
            goto free_root;
        rc = read_generation(&g, c);
        json_free(gen_root);
        if (rc < 0) goto free_root;
    }
    /* The released code's form has no ids; its tokenizer ends a text with 1. */
    if (c->n_eos == 0) c->eos_ids[c->n_eos++] = 1;
    *out = *c;
free_root:
    json_free(root);
free_config:
    free(c);
    return rc;
}

/* The whole file; *out owned by the caller, NULL and 0 when it is not there and need not be. */
static int read_file(const char *dir, const char *name, bool needed, char **out, size_t *len,
                     struct tow_err *err)
{
    char path[4200];
    *out = NULL;
    *len = 0;
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return tow_fail(err, TOW_EIO, "%s: path too long", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe has no end */
    if (fd < 0 && errno == ENOENT && !needed) return 0;
    if (fd < 0) return tow_fail(err, TOW_EIO, "--model: %s: %s", path, strerror(errno));
    struct stat st;
    int rc = 0;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        rc = tow_fail(err, TOW_EIO, "%s: not a regular file", path);
        goto shut;
    }
    if ((uint64_t)st.st_size > CONFIG_MAX_BYTES) {
        rc = tow_fail(err, TOW_ETOOBIG, "%s: %lld bytes; right: at most %zu", path,
                      (long long)st.st_size, CONFIG_MAX_BYTES);
        goto shut;
    }
    char *p = malloc((size_t)st.st_size + 1);
    if (!p) {
        rc = tow_fail(err, TOW_ENOMEM, "%s: out of memory", path);
        goto shut;
    }
    size_t n = 0;
    while (n < (size_t)st.st_size) {
        ssize_t k = read(fd, p + n, (size_t)st.st_size - n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            rc = tow_fail(err, TOW_EIO, "%s: %s", path, strerror(errno));
            free(p);
            goto shut;
        }
        if (k == 0) break;
        n += (size_t)k;
    }
    p[n] = 0;
    *out = p;
    *len = n;
shut:
    close(fd);
    return rc;
}

int text_config_load(struct text_config *out, const char *dir, struct tow_err *err)
{
    char *text, *gen = NULL;
    size_t len, gen_len;
    int rc = read_file(dir, "config.json", true, &text, &len, err);
    if (rc < 0) return rc;
    rc = read_file(dir, "generation_config.json", false, &gen, &gen_len, err);
    if (rc == 0) rc = text_config_parse(out, dir, text, len, gen, gen_len, err);
    free(gen);
    free(text);
    return rc;
}
