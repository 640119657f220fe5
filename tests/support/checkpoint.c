/* See checkpoint.h. Names, shapes and formats follow docs/numerics.md's table of tensors, written
 * out once more so that the loader's own table is checked against something. */
#include "tests/support/checkpoint.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Fuzzers link this too, so cmocka's assertions are not used. */
#define must(cond) ((cond) ? (void)0 : must_failed(#cond))
static void must_failed(const char *what)
{
    fprintf(stderr, "test checkpoint: %s: failed\n", what);
    abort();
}

enum {
    D = 128,
    V = 32,
    H = 4,
    HD = 64,
    Q = 64,
    G = 2,
    OL = 64,
    IH = 2,
    ID = 32,
    E = 4,
    K = 2,
    I = 128,
    HC = 2
};

static const char CONFIG[] = "{\"model_type\": \"deepseek_v4\", \"hidden_size\": 128, "
                             "\"vocab_size\": 32, \"num_hidden_layers\": 3,\n"
                             "\"num_nextn_predict_layers\": 1, \"num_attention_heads\": 4, "
                             "\"num_key_value_heads\": 1, \"head_dim\": 64,\n"
                             "\"qk_rope_head_dim\": 16, \"q_lora_rank\": 64, \"o_groups\": 2, "
                             "\"o_lora_rank\": 64, \"sliding_window\": 8,\n"
                             "\"compress_ratios\": [0, 4, 6, 0], \"index_n_heads\": 2, "
                             "\"index_head_dim\": 32, \"index_topk\": 4,\n"
                             "\"n_routed_experts\": 4, \"num_experts_per_tok\": 2, "
                             "\"n_shared_experts\": 1, \"moe_intermediate_size\": 128,\n"
                             "\"num_hash_layers\": 1, \"scoring_func\": \"sqrtsoftplus\", "
                             "\"norm_topk_prob\": true, \"hc_mult\": 2,\n"
                             "\"hc_sinkhorn_iters\": 3, \"hc_eps\": 1e-6, \"rms_norm_eps\": 1e-6, "
                             "\"routed_scaling_factor\": 1.5,\n"
                             "\"swiglu_limit\": 10.0, \"rope_theta\": 10000, "
                             "\"compress_rope_theta\": 160000, \"bos_token_id\": 0,\n"
                             "\"eos_token_id\": 1, \"max_position_embeddings\": 4096%s}\n";

static bool is_hf(enum ckpt_form f)
{
    return f >= CKPT_HF_BF16;
}
static bool is_fp8(enum ckpt_form f)
{
    return f != CKPT_BF16 && f != CKPT_HF_BF16;
}
static bool is_nvfp4(enum ckpt_form f)
{
    return f == CKPT_NVFP4 || f == CKPT_HF_NVFP4;
}

void ckpt_add(struct ckpt *c, const char *name, const char *dtype, size_t value_bytes, int n_dims,
              const int64_t *dims, uint8_t fill)
{
    c->v = realloc(c->v, (c->n + 1) * sizeof *c->v);
    must(c->v != NULL);
    struct ckpt_tensor *t = &c->v[c->n++];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s", name);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
    t->n_dims = n_dims;
    t->bytes = value_bytes;
    for (int i = 0; i < n_dims; i++) {
        t->dims[i] = dims[i];
        t->bytes *= (size_t)dims[i];
    }
    t->data = malloc(t->bytes + 1);
    must(t->data != NULL);
    memset(t->data, fill, t->bytes);
    /* Not all alike, so that a view to the wrong place shows.
     * Codes stay legal: no NaN, scales positive. */
    static uint8_t tick;
    for (size_t i = 0; i < t->bytes; i += 7) t->data[i] = (uint8_t)(fill ^ (tick++ & 3));
}
#define DIMS(...)                                                                                  \
    (int)(sizeof(int64_t[]){__VA_ARGS__} / sizeof(int64_t)), (const int64_t[])                     \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

static void bf16(struct ckpt *c, const char *name, int n, const int64_t *dims)
{
    ckpt_add(c, name, "BF16", 2, n, dims, 0x3c);
}

static void f32(struct ckpt *c, const char *name, int n, const int64_t *dims)
{
    ckpt_add(c, name, "F32", 4, n, dims, 0x3d);
}

/* a then b; valid until the sixteenth call after this one. */
static const char *join(const char *a, const char *b)
{
    static char buf[16][200];
    static int at;
    size_t n = strlen(a), m = strlen(b);
    must(n + m < sizeof buf[0]);
    at = (at + 1) % 16;
    memcpy(buf[at], a, n);
    memcpy(buf[at] + n, b, m + 1);
    return buf[at];
}

static void dense(struct ckpt *c, enum ckpt_form f, const char *name, int64_t o, int64_t i)
{
    if (!is_fp8(f)) {
        bf16(c, join(name, ".weight"), DIMS(o, i));
        return;
    }
    ckpt_add(c, join(name, ".weight"), "F8_E4M3", 1, DIMS(o, i), 0x38);
    const char *scale = join(name, is_hf(f) ? ".weight_scale_inv" : ".scale");
    if (f == CKPT_F32SCALE || f == CKPT_BASE)
        f32(c, scale, DIMS((o + 127) / 128, (i + 127) / 128));
    else
        ckpt_add(c, scale, "F8_E8M0", 1, DIMS((o + 127) / 128, (i + 127) / 128), 0x78);
}

static void expert(struct ckpt *c, enum ckpt_form f, const char *name, int64_t o, int64_t i)
{
    if (!is_fp8(f) || f == CKPT_BASE) {
        dense(c, f, name, o, i);
        return;
    }
    ckpt_add(c, join(name, ".weight"), is_nvfp4(f) ? "U8" : "I8", 1, DIMS(o, i / 2), 0x21);
    if (!is_nvfp4(f)) {
        ckpt_add(c, join(name, ".scale"), "F8_E8M0", 1, DIMS(o, i / 32), 0x78);
        return;
    }
    ckpt_add(c, join(name, ".weight_scale"), "F8_E4M3", 1, DIMS(o, i / 16), 0x38);
    ckpt_add(c, join(name, ".weight_scale_2"), "F32", 4, 0, NULL, 0x3d);
    ckpt_add(c, join(name, ".input_scale"), "F32", 4, 0, NULL, 0x3b);
}

static void hyper(struct ckpt *c, const char *p, const char *kind, const char *sep, bool head)
{
    int64_t rows = head ? HC : (2 + HC) * HC;
    const char *name = join(p, kind);
    f32(c, join(join(name, sep), "fn"), DIMS(rows, HC * D));
    f32(c, join(join(name, sep), "base"), DIMS(rows));
    f32(c, join(join(name, sep), "scale"), DIMS(head ? 1 : 3));
}

static void compressor(struct ckpt *c, bool hf, const char *p, int64_t ratio, int64_t e)
{
    int64_t w = ratio == 4 ? 2 * e : e;
    f32(c, join(p, hf ? ".position_bias" : ".ape"), DIMS(ratio, w));
    bf16(c, join(p, hf ? ".kv_proj.weight" : ".wkv.weight"), DIMS(w, D));
    bf16(c, join(p, hf ? ".gate_proj.weight" : ".wgate.weight"), DIMS(w, D));
    bf16(c, join(p, hf ? ".kv_norm.weight" : ".norm.weight"), DIMS(e));
}

static void stacked(struct ckpt *c, enum ckpt_form f, const char *p)
{
    const char *up = join(p, ".mlp.experts.gate_up_proj"),
               *down = join(p, ".mlp.experts.down_proj");
    if (f == CKPT_HF_BF16) {
        bf16(c, up, DIMS(E, 2 * I, D));
        bf16(c, down, DIMS(E, D, I));
    } else if (f == CKPT_HF_FP8) {
        ckpt_add(c, up, "F8_E4M3", 1, DIMS(E, 2 * I, D), 0x38);
        ckpt_add(c, join(up, "_scale_inv"), "F8_E8M0", 1, DIMS(E, 2 * I / 128, D / 128), 0x78);
        ckpt_add(c, down, "F8_E4M3", 1, DIMS(E, D, I), 0x38);
        ckpt_add(c, join(down, "_scale_inv"), "F8_E8M0", 1, DIMS(E, D / 128, I / 128), 0x78);
    } else {
        ckpt_add(c, up, "U8", 1, DIMS(E, 2 * I, D / 2), 0x21);
        ckpt_add(c, join(up, "_weight_scale"), "F8_E4M3", 1, DIMS(E, 2 * I, D / 16), 0x38);
        f32(c, join(up, "_weight_scale_2"), DIMS(E));
        ckpt_add(c, down, "U8", 1, DIMS(E, D, I / 2), 0x21);
        ckpt_add(c, join(down, "_weight_scale"), "F8_E4M3", 1, DIMS(E, D, I / 16), 0x38);
        f32(c, join(down, "_weight_scale_2"), DIMS(E));
    }
}

static void block(struct ckpt *c, enum ckpt_form f, const char *p, int64_t ratio, bool hashed)
{
    bool hf = is_hf(f);
    const char *attn = join(p, hf ? ".self_attn" : ".attn"), *ffn = join(p, hf ? ".mlp" : ".ffn");
    char a[100], m[100], name[140];
    snprintf(a, sizeof a, "%s", attn);
    snprintf(m, sizeof m, "%s", ffn);
    bf16(c, join(p, hf ? ".input_layernorm.weight" : ".attn_norm.weight"), DIMS(D));
    bf16(c, join(p, hf ? ".post_attention_layernorm.weight" : ".ffn_norm.weight"), DIMS(D));
    hyper(c, p, hf ? ".attn_hc" : ".hc_attn", hf ? "." : "_", false);
    hyper(c, p, hf ? ".ffn_hc" : ".hc_ffn", hf ? "." : "_", false);
    f32(c, join(a, hf ? ".sinks" : ".attn_sink"), DIMS(H));
    dense(c, f, join(a, hf ? ".q_a_proj" : ".wq_a"), Q, D);
    bf16(c, join(a, hf ? ".q_a_norm.weight" : ".q_norm.weight"), DIMS(Q));
    dense(c, f, join(a, hf ? ".q_b_proj" : ".wq_b"), H * HD, Q);
    dense(c, f, join(a, hf ? ".kv_proj" : ".wkv"), HD, D);
    bf16(c, join(a, ".kv_norm.weight"), DIMS(HD));
    dense(c, f, join(a, hf ? ".o_a_proj" : ".wo_a"), G * OL, H * HD / G);
    dense(c, f, join(a, hf ? ".o_b_proj" : ".wo_b"), D, G * OL);
    if (ratio) compressor(c, hf, join(a, ".compressor"), ratio, HD);
    if (ratio == 4) {
        snprintf(name, sizeof name, "%s%s", a, hf ? ".compressor.indexer" : ".indexer");
        dense(c, f, join(name, hf ? ".q_b_proj" : ".wq_b"), IH * ID, Q);
        bf16(c, join(name, hf ? ".scorer.weights_proj.weight" : ".weights_proj.weight"),
             DIMS(IH, D));
        compressor(c, hf, hf ? name : join(name, ".compressor"), 4, ID);
    }
    bf16(c, join(m, ".gate.weight"), DIMS(E, D));
    if (hashed) {
        const char *tid = join(m, ".gate.tid2eid");
        ckpt_add(c, tid, "I64", 8, DIMS(V, K), 0);
        uint8_t *data = ckpt_get(c, tid)->data;
        memset(data, 0, V * K * 8);
        for (int i = 0; i < V * K; i++) data[i * 8] = (uint8_t)(i % E);
    } else {
        f32(c, join(m, hf ? ".gate.e_score_correction_bias" : ".gate.bias"), DIMS(E));
    }
    if (hf) stacked(c, f, p);
    for (int e = 0; e <= E; e++) {
        if (hf && e < E) continue;
        char base[120];
        if (e < E)
            snprintf(base, sizeof base, "%s.experts.%d", m, e);
        else
            snprintf(base, sizeof base, "%s.shared_experts", m);
        void (*one)(struct ckpt *, enum ckpt_form, const char *, int64_t, int64_t) =
            e < E ? expert : dense;
        one(c, f, join(base, hf ? ".gate_proj" : ".w1"), I, D);
        one(c, f, join(base, hf ? ".down_proj" : ".w2"), D, I);
        one(c, f, join(base, hf ? ".up_proj" : ".w3"), I, D);
    }
}

void ckpt_init(struct ckpt *c, enum ckpt_form f)
{
    memset(c, 0, sizeof *c);
    snprintf(c->dir, sizeof c->dir, "/tmp/towpath-ckpt-XXXXXX");
    must(mkdtemp(c->dir) != NULL);
    char extra[400] = "";
    if (is_fp8(f))
        snprintf(extra, sizeof extra,
                 ",\n%s\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", "
                 "\"activation_scheme\": "
                 "\"dynamic\", \"weight_block_size\": [128, 128], \"scale_fmt\": \"ue8m0\"%s}",
                 f == CKPT_BASE || f == CKPT_HF_FP8 ? "" : "\"expert_dtype\": \"fp4\", ",
                 is_nvfp4(f) ? ", \"moe_quant_algo\": \"NVFP4\"" : "");
    c->config = malloc(sizeof CONFIG + sizeof extra);
    must(c->config != NULL);
    sprintf(c->config, CONFIG, extra);

    static const int64_t ratios[] = {0, 4, 6};
    bool hf = is_hf(f);
    bf16(c, hf ? "model.embed_tokens.weight" : "embed.weight", DIMS(V, D));
    bf16(c, hf ? "lm_head.weight" : "head.weight", DIMS(V, D));
    bf16(c, hf ? "model.norm.weight" : "norm.weight", DIMS(D));
    hyper(c, "", hf ? "model.hc_head.hc" : "hc_head", "_", true);
    for (int i = 0; i < 3; i++) {
        char p[32];
        snprintf(p, sizeof p, "%slayers.%d", hf ? "model." : "", i);
        block(c, f, p, ratios[i], i == 0);
    }
    if (hf) return; /* the port does not hold the MTP block */
    block(c, f, "mtp.0", 0, false);
    dense(c, f, "mtp.0.e_proj", D, D);
    dense(c, f, "mtp.0.h_proj", D, D);
    bf16(c, "mtp.0.enorm.weight", DIMS(D));
    bf16(c, "mtp.0.hnorm.weight", DIMS(D));
    bf16(c, "mtp.0.norm.weight", DIMS(D));
    hyper(c, "mtp.0.", "hc_head", "_", true);
}

void ckpt_fini(struct ckpt *c)
{
    DIR *d = opendir(c->dir);
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.') unlink(ckpt_path(c, e->d_name));
    if (d) closedir(d);
    rmdir(c->dir);
    for (size_t i = 0; i < c->n; i++) free(c->v[i].data);
    free(c->v);
    free(c->config);
}

struct ckpt_tensor *ckpt_get(struct ckpt *c, const char *name)
{
    for (size_t i = 0; i < c->n; i++)
        if (strcmp(c->v[i].name, name) == 0) return &c->v[i];
    fprintf(stderr, "no tensor %s in the test checkpoint\n", name);
    abort();
}

void ckpt_remove(struct ckpt *c, const char *name)
{
    struct ckpt_tensor *t = ckpt_get(c, name);
    free(t->data);
    *t = c->v[--c->n];
}

size_t ckpt_remove_matching(struct ckpt *c, const char *part)
{
    size_t n = 0;
    for (size_t i = 0; i < c->n;) {
        if (!strstr(c->v[i].name, part)) {
            i++;
            continue;
        }
        free(c->v[i].data);
        c->v[i] = c->v[--c->n];
        n++;
    }
    return n;
}

void ckpt_set_dtype(struct ckpt *c, const char *name, const char *dtype, size_t value_bytes)
{
    struct ckpt_tensor *t = ckpt_get(c, name);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
    t->bytes = value_bytes;
    for (int i = 0; i < t->n_dims; i++) t->bytes *= (size_t)t->dims[i];
    free(t->data);
    t->data = calloc(1, t->bytes + 1);
    must(t->data != NULL);
}

const char *ckpt_path(const struct ckpt *c, const char *name)
{
    static char buf[4][400];
    static int at;
    at = (at + 1) % 4;
    snprintf(buf[at], sizeof buf[at], "%s/%s", c->dir, name);
    return buf[at];
}

void ckpt_write_text(const struct ckpt *c, const char *name, const void *text, size_t len)
{
    FILE *f = fopen(ckpt_path(c, name), "wb");
    must(f != NULL);
    must(fwrite(text, 1, len, f) == len);
    must(fclose(f) == 0);
}

static void write_part(const struct ckpt *c, const char *name, size_t from, size_t to)
{
    size_t cap = 64 + (to - from) * 320, n = 0, at = 0;
    char *head = malloc(cap);
    must(head != NULL);
    n += (size_t)sprintf(head + n, "{");
    for (size_t i = from; i < to; i++) {
        const struct ckpt_tensor *t = &c->v[i];
        n += (size_t)sprintf(head + n, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[",
                             i > from ? "," : "", t->name, t->dtype);
        for (int d = 0; d < t->n_dims; d++)
            n += (size_t)sprintf(head + n, "%s%lld", d ? "," : "", (long long)t->dims[d]);
        n += (size_t)sprintf(head + n, "],\"data_offsets\":[%zu,%zu]}", at, at + t->bytes);
        at += t->bytes;
    }
    n += (size_t)sprintf(head + n, "}");
    FILE *f = fopen(ckpt_path(c, name), "wb");
    must(f != NULL);
    uint8_t len[8];
    for (int i = 0; i < 8; i++) len[i] = (uint8_t)(n >> (8 * i));
    must(fwrite(len, 1, 8, f) == 8);
    must(fwrite(head, 1, n, f) == n);
    for (size_t i = from; i < to; i++)
        must(fwrite(c->v[i].data, 1, c->v[i].bytes, f) == c->v[i].bytes);
    must(fclose(f) == 0);
    free(head);
}

void ckpt_write(const struct ckpt *c, int shards)
{
    ckpt_write_text(c, "config.json", c->config, strlen(c->config));
    if (shards == 1) {
        write_part(c, "model.safetensors", 0, c->n);
        return;
    }
    FILE *f = fopen(ckpt_path(c, "model.safetensors.index.json"), "wb");
    must(f != NULL);
    fprintf(f, "{\"metadata\": {}, \"weight_map\": {");
    for (int k = 0; k < shards; k++) {
        size_t from = c->n * (size_t)k / (size_t)shards,
               to = c->n * (size_t)(k + 1) / (size_t)shards;
        char name[64];
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", k + 1, shards);
        write_part(c, name, from, to);
        for (size_t i = from; i < to; i++)
            fprintf(f, "%s\"%s\": \"%s\"", i ? ", " : "", c->v[i].name, name);
    }
    fprintf(f, "}}");
    must(fclose(f) == 0);
}
