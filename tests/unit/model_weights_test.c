/* Tests of common/model/weights.h and checkpoint.h on small checkpoints that are right in all
 * but one thing. */
#include "tests/support/check.h"
#include "tests/support/checkpoint.h"

#include "common/base/err.h"
#include "common/model/checkpoint.h"
#include "common/model/weights.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct model_weights *loads(const struct ckpt *c)
{
    struct tow_err err = {0};
    struct model_weights *w = NULL;
    if (model_weights_open(&w, c->dir, NULL, &err) != 0) fail_msg("%s", err.msg);
    return w;
}

/* Every part must be in the message. */
static void refused_with(const struct ckpt *c, const struct model_weights_options *options,
                         const char *const *parts)
{
    struct tow_err err = {0};
    struct model_weights *w = NULL;
    if (model_weights_open(&w, c->dir, options, &err) == 0) {
        model_weights_close(w);
        fail_msg("accepted; expected a message with: %s", parts[0]);
    }
    assert_null(w);
    for (int i = 0; parts[i]; i++)
        if (!strstr(err.msg, parts[i])) fail_msg("no \"%s\" in: %s", parts[i], err.msg);
    assert_null(strchr(err.msg, '\n'));
}
#define refused(c, ...) refused_with(c, NULL, (const char *const[]){__VA_ARGS__, NULL})

/* The whole row of a bytes view, against the test checkpoint's own memory. */
static void same_bytes(const void *view, struct ckpt *c, const char *name, size_t off, size_t n)
{
    assert_non_null(view);
    struct ckpt_tensor *t = ckpt_get(c, name);
    assert_true(off + n <= t->bytes);
    assert_memory_equal(view, t->data + off, n);
}

static void test_weights__every_form_loads_whole_and_without_copies(void **state)
{
    (void)state;
    static const enum kern_wfmt formats[] = {
        [CKPT_BF16] = KERN_W_BF16,  [CKPT_NATIVE] = KERN_W_MXFP4,  [CKPT_F32SCALE] = KERN_W_MXFP4,
        [CKPT_BASE] = KERN_W_FP8,   [CKPT_NVFP4] = KERN_W_NVFP4,   [CKPT_HF_BF16] = KERN_W_BF16,
        [CKPT_HF_FP8] = KERN_W_FP8, [CKPT_HF_NVFP4] = KERN_W_NVFP4};
    for (enum ckpt_form f = CKPT_BF16; f <= CKPT_HF_NVFP4; f++) {
        struct ckpt c;
        ckpt_init(&c, f);
        ckpt_write(&c, 1);
        struct model_weights *w = loads(&c);
        bool hf = f >= CKPT_HF_BF16;
        assert_int_equal(w->report.n_found, c.n);
        assert_int_equal(w->report.n_expected, c.n);
        assert_int_equal(w->report.n_unused, 0);
        assert_int_equal(w->report.experts, formats[f]);
        assert_int_equal(w->report.hf_names, hf);
        assert_int_equal(w->report.mtp_absent, hf);
        assert_int_equal(w->shape.n_mtp, hf ? 0 : 1);
        const struct model_layer *y = &w->layers[1];
        assert_int_equal(y->ratio, 4);
        assert_int_equal(y->wq_b.n, 4 * 64);
        assert_int_equal(y->wq_b.k, 64);
        assert_int_equal(y->comp.wkv.n, 128);
        assert_int_equal(y->index_comp.norm.n, 32);
        assert_null(w->layers[0].comp.ape);
        assert_null(w->layers[2].index_wq_b.data);
        assert_null(w->layers[0].gate_bias);
        assert_non_null(w->layers[0].tid2eid);
        assert_null(y->tid2eid);
        for (int e = 0; e < 4; e++) {
            assert_int_equal(y->w1[e].n, 128);
            assert_int_equal(y->w2[e].k, 128);
            assert_true(y->w3[e].scale2 > 0);
            if (y->w1[e].fmt != KERN_W_BF16) assert_non_null(y->w1[e].scale);
        }
        model_weights_close(w);
        ckpt_fini(&c);
    }
}

/* Value i as float bits; a misaligned vector was widened. */
static uint32_t vec_bits(const struct kern_vec *v, int i)
{
    uint32_t wide;
    uint16_t narrow;
    if (v->dtype == KERN_F32) {
        memcpy(&wide, (const char *)v->data + 4 * i, 4);
        return wide;
    }
    memcpy(&narrow, (const char *)v->data + 2 * i, 2);
    return (uint32_t)narrow << 16;
}

static void test_weights__views_point_at_the_right_bytes(void **state)
{
    (void)state;
    struct ckpt c;
    ckpt_init(&c, CKPT_NATIVE);
    ckpt_write(&c, 3);
    struct model_weights *w = loads(&c);
    assert_int_equal(w->report.n_files, 3);
    same_bytes(w->embed.data, &c, "embed.weight", 0, 32 * 128 * 2);
    same_bytes(w->layers[2].wo_a.data, &c, "layers.2.attn.wo_a.weight", 0, 128 * 128);
    same_bytes(w->layers[2].w2[3].data, &c, "layers.2.ffn.experts.3.w2.weight", 0, 128 * 64);
    same_bytes(w->layers[2].w2[3].scale, &c, "layers.2.ffn.experts.3.w2.scale", 0, 128 * 4);
    same_bytes(w->layers[3].sink, &c, "mtp.0.attn.attn_sink", 0, 16);
    struct ckpt_tensor *hnorm = ckpt_get(&c, "mtp.0.hnorm.weight");
    for (int i = 0; i < 128; i++) {
        uint16_t bits;
        memcpy(&bits, hnorm->data + 2 * i, 2);
        assert_int_equal(vec_bits(&w->mtp[0].hnorm, i), (uint32_t)bits << 16);
    }
    assert_int_equal(w->layers[2].w2[3].row_bytes, 64);
    assert_int_equal(w->layers[2].w2[3].scale_row_bytes, 4);
    assert_int_equal(w->layers[1].wq_b.scale_row_bytes, 1);
    model_weights_close(w);
    ckpt_fini(&c);
}

static void test_weights__stacked_experts_are_split_by_rows(void **state)
{
    (void)state;
    struct ckpt c;
    const char *up = "model.layers.1.mlp.experts.gate_up_proj",
               *down = "model.layers.1.mlp.experts.down_proj";
    ckpt_init(&c, CKPT_HF_BF16);
    ckpt_write(&c, 1);
    struct model_weights *w = loads(&c);
    const struct model_layer *y = &w->layers[1];
    for (size_t e = 0; e < 4; e++) {
        same_bytes(y->w1[e].data, &c, up, e * 256 * 256, 128 * 256);
        same_bytes(y->w3[e].data, &c, up, (e * 256 + 128) * 256, 128 * 256);
        same_bytes(y->w2[e].data, &c, down, e * 128 * 256, 128 * 256);
    }
    model_weights_close(w);
    ckpt_fini(&c);

    ckpt_init(&c, CKPT_HF_FP8);
    ckpt_write(&c, 1);
    w = loads(&c);
    y = &w->layers[1];
    for (size_t e = 0; e < 4; e++) {
        same_bytes(y->w3[e].data, &c, up, (e * 256 + 128) * 128, 128 * 128);
        same_bytes(y->w1[e].scale, &c, "model.layers.1.mlp.experts.gate_up_proj_scale_inv", e * 2,
                   1);
        same_bytes(y->w3[e].scale, &c, "model.layers.1.mlp.experts.gate_up_proj_scale_inv",
                   e * 2 + 1, 1);
    }
    model_weights_close(w);
    ckpt_fini(&c);

    /* One second scale for gate and up together serves both. */
    ckpt_init(&c, CKPT_HF_NVFP4);
    struct ckpt_tensor *s2 = ckpt_get(&c, "model.layers.1.mlp.experts.gate_up_proj_weight_scale_2");
    for (int e = 0; e < 4; e++) memcpy(s2->data + 4 * e, &(float){(float)(e + 1)}, 4);
    ckpt_write(&c, 1);
    w = loads(&c);
    y = &w->layers[1];
    for (size_t e = 0; e < 4; e++) {
        assert_true(y->w1[e].scale2 == (float)(e + 1));
        assert_true(y->w3[e].scale2 == (float)(e + 1));
        same_bytes(y->w3[e].scale, &c, "model.layers.1.mlp.experts.gate_up_proj_weight_scale",
                   (e * 256 + 128) * 8, 128 * 8);
    }
    model_weights_close(w);
    ckpt_fini(&c);
}

static void test_weights__missing_shards_and_bad_indexes_are_refused(void **state)
{
    (void)state;
    struct ckpt c;
    ckpt_init(&c, CKPT_NATIVE);
    ckpt_write(&c, 3);
    const char *second = "model-00002-of-00003.safetensors",
               *index = "model.safetensors.index.json";
    char from[400], to[400];
    snprintf(from, sizeof from, "%s", ckpt_path(&c, second));
    snprintf(to, sizeof to, "%s", ckpt_path(&c, "other.bin"));
    assert_int_equal(rename(from, to), 0);
    refused(&c, "1 of 3 weight files missing", "incomplete download", second);
    assert_int_equal(symlink("/nonexistent/blob", from), 0);
    refused(&c, "1 of 3 weight files missing", "incomplete download", second);
    unlink(from);
    /* Without the index the numbering still says that one is missing. */
    assert_int_equal(unlink(ckpt_path(&c, index)), 0);
    refused(&c, "1 of 3 weight files missing", second);
    assert_int_equal(rename(to, from), 0);
    struct model_weights *w = loads(&c); /* several files, no index: fine */
    assert_int_equal(w->report.n_found, c.n);
    model_weights_close(w);

    static const struct {
        const char *text, *part;
    } bad[] = {
        {"{\"weight_map\": {\"a\": \"../x.safetensors\"}}", "in the same folder"},
        {"{\"weight_map\": {\"a\": \"/etc/x.safetensors\"}}", "in the same folder"},
        {"{\"weight_map\": {\"a\": \"..\"}}", "in the same folder"},
        {"{\"weight_map\": {\"a\": \"x.bin\"}}", "a .safetensors file"},
        {"{\"weight_map\": {\"a\": 3}}", "weight_map.a is a number"},
        {"{\"weight_map\": {}}", "weight_map is empty"},
        {"{\"weight_map\": []}", "weight_map is an array"},
        {"{\"metadata\": {}}", "weight_map is missing"},
        {"{\"weight_map\"", "json"},
        {"{\"weight_map\": {\"no.such\": \"model-00001-of-00003.safetensors\"}}",
         "1 of 1 tensors are not in the file the index names"},
        {"{\"weight_map\": {\"embed.weight\": \"model-00003-of-00003.safetensors\"}}",
         "embed.weight (in model-00003-of-00003.safetensors)"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ckpt_write_text(&c, index, bad[i].text, strlen(bad[i].text));
        refused(&c, index, bad[i].part);
    }
    ckpt_fini(&c);
}

static void test_weights__a_cut_shard_is_refused(void **state)
{
    (void)state;
    struct ckpt c;
    ckpt_init(&c, CKPT_NATIVE);
    ckpt_write(&c, 2);
    const char *name = "model-00002-of-00002.safetensors";
    struct tow_err err = {0};
    struct model_safetensors *st;
    assert_int_equal(model_safetensors_open(&st, ckpt_path(&c, name), &err), 0);
    off_t size = (off_t)model_safetensors_size(st);
    model_safetensors_close(st);
    const off_t cuts[] = {size - 1, size - 4096, 7, 0};
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        assert_int_equal(truncate(ckpt_path(&c, name), cuts[i]), 0);
        refused(&c, name, "incomplete download");
    }
    ckpt_fini(&c);
}

static void test_weights__the_same_tensor_in_two_files_is_refused(void **state)
{
    (void)state;
    struct ckpt c;
    ckpt_init(&c, CKPT_BF16);
    ckpt_write(&c, 1);
    static const char extra[] =
        "\x44\0\0\0\0\0\0\0{\"norm.weight\":{\"dtype\":\"U8\",\"shape\":[1],"
        "\"data_offsets\":[0,1]}}        ";
    ckpt_write_text(&c, "extra.safetensors", extra, 8 + 0x44 + 1);
    refused(&c, "tensor norm.weight is in two files", "extra.safetensors", "model.safetensors");
    ckpt_fini(&c);
}

static void test_weights__missing_tensors_are_counted_and_named(void **state)
{
    (void)state;
    struct ckpt c;
    char count[80];
    ckpt_init(&c, CKPT_NATIVE);
    size_t all = c.n;
    snprintf(ckpt_get(&c, "norm.weight")->name, 128, "nrom.weight");
    ckpt_write(&c, 1);
    snprintf(count, sizeof count, "found %zu of %zu tensors, 1 missing", all - 1, all);
    refused(&c, count, "incomplete download", "norm.weight");
    snprintf(ckpt_get(&c, "nrom.weight")->name, 128, "norm.weight");

    size_t gone = ckpt_remove_matching(&c, ".indexer.");
    assert_true(gone > 4);
    ckpt_write(&c, 1);
    snprintf(count, sizeof count, "found %zu of %zu tensors, %zu missing", all - gone, all, gone);
    refused(&c, count, "layers.1.attn.indexer.wq_b.weight");
    ckpt_fini(&c);

    ckpt_init(&c, CKPT_HF_BF16); /* named as the checkpoint would name it */
    ckpt_remove(&c, "model.layers.2.self_attn.kv_norm.weight");
    ckpt_write(&c, 1);
    refused(&c, "1 missing", "model.layers.2.self_attn.kv_norm.weight");
    ckpt_fini(&c);
}

static void test_weights__without_mtp_drafts_are_off(void **state)
{
    (void)state;
    struct ckpt c;
    ckpt_init(&c, CKPT_NATIVE);
    ckpt_write(&c, 1);
    struct model_weights *w = NULL;
    struct tow_err err = {0};
    const struct model_weights_options no_mtp = {.no_mtp = true};
    assert_int_equal(model_weights_open(&w, c.dir, &no_mtp, &err), 0);
    assert_int_equal(w->shape.n_mtp, 0);
    assert_false(w->report.mtp_absent);
    assert_true(w->report.n_unused > 0);
    model_weights_close(w);

    ckpt_remove(&c, "mtp.0.enorm.weight"); /* a part of it is an error */
    ckpt_write(&c, 1);
    refused(&c, "1 missing", "mtp.0.enorm.weight");
    ckpt_remove_matching(&c, "mtp.0.");
    ckpt_write(&c, 1);
    w = loads(&c);
    assert_true(w->report.mtp_absent);
    assert_int_equal(w->shape.n_mtp, 0);
    assert_int_equal(w->report.n_found, c.n);
    model_weights_close(w);
    ckpt_fini(&c);
}

static void test_weights__a_missing_or_partial_scale_is_refused(void **state)
{
    (void)state;
    static const char *const parts[] = {
        "layers.2.ffn.experts.1.w1.input_scale", "layers.2.ffn.experts.1.w1.weight_scale_2",
        "layers.2.ffn.experts.1.w1.weight_scale", "layers.2.attn.wkv.scale"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        struct ckpt c;
        ckpt_init(&c, CKPT_NVFP4);
        ckpt_remove(&c, parts[i]);
        ckpt_write(&c, 1);
        refused(&c, "1 missing", parts[i]);
        ckpt_fini(&c);
    }
    /* All input scales gone: weight-only, and refused when 4-bit activations are asked for. */
    struct ckpt c;
    ckpt_init(&c, CKPT_NVFP4);
    ckpt_write(&c, 1);
    struct model_weights *w = NULL;
    struct tow_err err = {0};
    const struct model_weights_options w4a4 = {.need_input_scales = true};
    assert_int_equal(model_weights_open(&w, c.dir, &w4a4, &err), 0);
    assert_true(w->report.input_scales);
    assert_true(w->layers[0].w2[0].input_scale > 0);
    model_weights_close(w);
    assert_int_equal(ckpt_remove_matching(&c, ".input_scale"), 4 * 4 * 3);
    ckpt_write(&c, 1);
    w = loads(&c);
    assert_false(w->report.input_scales);
    assert_true(w->layers[0].w2[0].input_scale == 0);
    model_weights_close(w);
    refused_with(&c, &w4a4, (const char *const[]){"input_scale", NULL});
    ckpt_fini(&c);
}

static void test_weights__bad_scale_values_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        enum ckpt_form form;
        const char *name;
        size_t at;
        uint8_t bytes[4];
        size_t n;
        const char *part;
    } bad[] = {
        {CKPT_NATIVE, "layers.2.attn.wo_b.scale", 0, {255}, 1, "scale 0 of 1 is NaN (code 255)"},
        {CKPT_NATIVE,
         "layers.2.ffn.experts.3.w2.scale",
         100,
         {255},
         1,
         "scale 100 of 512 is NaN (code 255)"},
        {CKPT_F32SCALE, "layers.2.attn.wo_b.scale", 0, {0, 0, 0, 0}, 4, "scale 0 of 1 is 0"},
        {CKPT_F32SCALE, "layers.2.attn.wo_b.scale", 0, {0, 0, 0xc0, 0x7f}, 4, "is nan"},
        {CKPT_F32SCALE, "layers.2.attn.wo_b.scale", 0, {0, 0, 0x80, 0x7f}, 4, "is inf"},
        {CKPT_BASE, "layers.2.ffn.experts.3.w2.scale", 0, {0, 0, 0x80, 0xbf}, 4, "is -1"},
        {CKPT_NVFP4, "mtp.0.ffn.experts.3.w2.weight_scale", 9, {0x7f}, 1, "scale 9 of 1024 is NaN"},
        {CKPT_NVFP4, "mtp.0.ffn.experts.3.w2.weight_scale", 9, {0}, 1, "is 0"},
        {CKPT_NVFP4, "mtp.0.ffn.experts.3.w2.weight_scale", 9, {0x80}, 1, "is 0"},
        {CKPT_NVFP4, "mtp.0.ffn.experts.3.w2.weight_scale", 9, {0xb8}, 1, "is negative"},
        {CKPT_NVFP4, "mtp.0.ffn.experts.3.w2.weight_scale_2", 0, {0, 0, 0, 0}, 4, "is 0"},
        {CKPT_NVFP4, "mtp.0.ffn.experts.3.w2.input_scale", 0, {0, 0, 0xc0, 0x7f}, 4, "is nan"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct ckpt c;
        ckpt_init(&c, bad[i].form);
        memcpy(ckpt_get(&c, bad[i].name)->data + bad[i].at, bad[i].bytes, bad[i].n);
        ckpt_write(&c, 1);
        refused(&c, bad[i].name, bad[i].part, "model.safetensors", "right: finite and above 0");
        ckpt_fini(&c);
    }
}

static void set_f32(struct ckpt *c, const char *name, float x)
{
    struct ckpt_tensor *t = ckpt_get(c, name);
    for (size_t i = 0; i < t->bytes / 4; i++) memcpy(t->data + 4 * i, &x, 4);
}

/* Float scales on fp4: powers of two become ue8m0, others would be cut and are refused. */
static void test_weights__float_scales_of_fp4_must_be_powers_of_two(void **state)
{
    (void)state;
    struct ckpt c;
    const char *name = "layers.2.ffn.experts.3.w2.scale";
    const struct {
        float x;
        int code; /* -1: refused */
    } cases[] = {{0.25f, 125},
                 {ldexpf(1, 127), 254},
                 {ldexpf(1, -126), 1},
                 {ldexpf(1, -127), 0},
                 {0.3f, -1},
                 {ldexpf(1, -128), -1},
                 {0, -1},
                 {-1, -1}};
    ckpt_init(&c, CKPT_NATIVE);
    ckpt_set_dtype(&c, name, "F32", 4);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        set_f32(&c, name, cases[i].x);
        ckpt_write(&c, 1);
        if (cases[i].code < 0) {
            refused(&c, name, "right");
            continue;
        }
        struct model_weights *w = loads(&c);
        const struct kern_weight *w2 = &w->layers[2].w2[3];
        assert_int_equal(w2->sfmt, KERN_S_UE8M0);
        assert_int_equal(w2->scale_row_bytes, 4);
        assert_int_equal(((const uint8_t *)w2->scale)[511], cases[i].code);
        assert_true(w->report.copied_bytes >= 512);
        model_weights_close(w);
    }
    ckpt_fini(&c);
}

/* Block scales of fp8 in float: any finite positive value is taken as it is. */
static void test_weights__float_block_scales_are_taken_as_they_are(void **state)
{
    (void)state;
    const float ok[] = {1, 0.3f, 1e-40f, 1.7e38f};
    struct ckpt c;
    ckpt_init(&c, CKPT_F32SCALE);
    for (size_t i = 0; i < sizeof ok / sizeof ok[0]; i++) {
        set_f32(&c, "layers.1.attn.wq_b.scale", ok[i]);
        ckpt_write(&c, 1);
        struct model_weights *w = loads(&c);
        float got[2];
        assert_int_equal(w->layers[1].wq_b.sfmt, KERN_S_F32);
        memcpy(got, w->layers[1].wq_b.scale, sizeof got);
        assert_true(got[0] == ok[i] && got[1] == ok[i]);
        model_weights_close(w);
    }
    ckpt_fini(&c);
}

static void test_weights__wrong_types_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        enum ckpt_form form;
        const char *name, *dtype;
        size_t bytes;
        const char *expected;
    } bad[] = {
        {CKPT_NATIVE, "layers.0.attn.wq_a.weight", "F32", 4, "expected F8_E4M3"},
        {CKPT_NATIVE, "layers.0.attn.wq_a.weight", "F8_E5M2", 1, "expected F8_E4M3"},
        {CKPT_NATIVE, "layers.0.attn.wq_a.weight", "E2M1", 1, "dtype E2M1"},
        {CKPT_NATIVE, "layers.0.attn.wq_a.scale", "BF16", 2, "expected F8_E8M0 or F32"},
        {CKPT_NATIVE, "layers.0.ffn.experts.0.w1.weight", "F8_E4M3", 1, "expected I8 or U8"},
        {CKPT_NATIVE, "layers.0.ffn.gate.weight", "F8_E4M3", 1, "expected BF16, F16 or F32"},
        {CKPT_NATIVE, "layers.0.ffn.gate.tid2eid", "F32", 4, "expected I64 or I32"},
        {CKPT_NATIVE, "layers.0.attn_norm.weight", "f32", 4, "expected BF16, F16 or F32"},
        {CKPT_NATIVE, "layers.0.attn.attn_sink", "I32", 4, "expected F32"},
        {CKPT_BF16, "layers.0.attn.wq_a.weight", "F8_E4M3", 1, "names no quantisation"},
        {CKPT_BF16, "layers.0.ffn.experts.0.w1.weight", "U8", 1, "names no quantisation"},
        {CKPT_BASE, "layers.0.ffn.experts.0.w1.weight", "BF16", 2, "expected F8_E4M3"},
        {CKPT_NVFP4, "layers.0.ffn.experts.0.w1.weight_scale", "F8_E8M0", 1, "expected F8_E4M3"},
        {CKPT_NVFP4, "layers.0.ffn.experts.0.w1.weight_scale_2", "BF16", 2, "expected F32"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct ckpt c;
        ckpt_init(&c, bad[i].form);
        ckpt_set_dtype(&c, bad[i].name, bad[i].dtype, bad[i].bytes);
        ckpt_write(&c, 1);
        refused(&c, "model.safetensors", bad[i].name, bad[i].expected);
        ckpt_fini(&c);
    }
}

static void test_weights__wrong_shapes_are_refused_with_both(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t dims[3];
        int n_dims;
        const char *found, *expected;
    } bad[] = {
        {"embed.weight", {16, 256}, 2, "[16, 256]", "expected [32, 128]"},
        {"layers.1.attn.compressor.ape", {128, 4}, 2, "[128, 4]", "expected [4, 128]"},
        {"layers.1.attn.attn_sink", {4, 1}, 2, "[4, 1]", "expected [4]"},
        {"layers.1.ffn.experts.2.w2.weight", {64, 128}, 2, "[64, 128]", "expected [128, 64]"},
        {"layers.1.ffn.experts.2.w2.scale", {512}, 1, "[512]", "expected [128, 4]"},
        {"layers.0.ffn.gate.tid2eid", {2, 32}, 2, "[2, 32]", "expected [32, 2]"},
        {"hc_head_scale", {1, 1}, 2, "[1, 1]", "expected [1]"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct ckpt c;
        ckpt_init(&c, CKPT_NATIVE);
        struct ckpt_tensor *t = ckpt_get(&c, bad[i].name);
        memcpy(t->dims, bad[i].dims, sizeof bad[i].dims);
        t->n_dims = bad[i].n_dims;
        ckpt_write(&c, 1);
        refused(&c, bad[i].name, bad[i].found, bad[i].expected);
        ckpt_fini(&c);
    }
}

static void test_weights__expert_ids_of_the_hash_table_are_checked(void **state)
{
    (void)state;
    const int64_t bad[] = {-1, 4, INT64_C(1) << 32, INT64_MIN};
    const char *name = "layers.0.ffn.gate.tid2eid";
    struct ckpt c;
    ckpt_init(&c, CKPT_NATIVE);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memcpy(ckpt_get(&c, name)->data + 63 * 8, &bad[i], 8);
        ckpt_write(&c, 1);
        refused(&c, name, "token 31, choice 1", "right: 0..3");
    }
    ckpt_set_dtype(&c, name, "I32", 4);
    ckpt_write(&c, 1);
    struct model_weights *w = loads(&c);
    assert_int_equal(w->layers[0].tid_bytes, 4);
    model_weights_close(w);
    memcpy(ckpt_get(&c, name)->data, &(int32_t){4}, 4);
    ckpt_write(&c, 1);
    refused(&c, name, "token 0, choice 0", "expert 4");
    ckpt_fini(&c);
}

static void test_weights__f16_and_misaligned_vectors_are_widened(void **state)
{
    (void)state;
    struct ckpt c;
    ckpt_init(&c, CKPT_BF16);
    const char *name = "layers.2.attn.wq_a.weight";
    ckpt_set_dtype(&c, name, "F16", 2);
    static const uint16_t half[] = {0x3c00, 0xc000, 0x0001, 0x7bff, 0x8000, 0x03ff, 0x0400};
    static const float value[] = {
        1, -2, 5.9604644775390625e-8f, 65504, -0.0f, 6.097555160522461e-5f, 6.103515625e-5f};
    memcpy(ckpt_get(&c, name)->data, half, sizeof half);
    /* One odd byte in front shifts every tensor that follows. */
    ckpt_add(&c, "aaa", "U8", 1, 1, (int64_t[]){1}, 0);
    struct ckpt_tensor last = c.v[c.n - 1];
    memmove(c.v + 1, c.v, (c.n - 1) * sizeof *c.v);
    c.v[0] = last;
    ckpt_write(&c, 1);
    struct model_weights *w = loads(&c);
    assert_int_equal(w->report.n_unused, 1);
    assert_int_equal(w->layers[2].wq_a.fmt, KERN_W_F32);
    assert_memory_equal(w->layers[2].wq_a.data, value, sizeof value);
    assert_int_equal((uintptr_t)w->layers[1].sink % 4, 0);
    same_bytes(w->layers[1].sink, &c, "layers.1.attn.attn_sink", 0, 16);
    assert_int_equal((uintptr_t)w->norm.data % (w->norm.dtype == KERN_F32 ? 4 : 2), 0);
    model_weights_close(w);
    ckpt_fini(&c);
}

static void test_weights__a_tensor_under_both_names_is_refused(void **state)
{
    (void)state;
    struct ckpt c;
    ckpt_init(&c, CKPT_BF16);
    ckpt_add(&c, "model.norm.weight", "BF16", 2, 1, (int64_t[]){128}, 0x3c);
    ckpt_write(&c, 1);
    refused(&c, "norm.weight", "also present as model.norm.weight");
    ckpt_fini(&c);
}

static void test_fingerprint__says_form_shape_and_revision_not_sharding(void **state)
{
    (void)state;
    struct ckpt a, b, d;
    char fa[MODEL_FINGERPRINT_CHARS], fb[MODEL_FINGERPRINT_CHARS], fd[MODEL_FINGERPRINT_CHARS];
    struct tow_err err = {0};
    ckpt_init(&a, CKPT_NATIVE);
    ckpt_init(&b, CKPT_NATIVE);
    ckpt_init(&d, CKPT_NVFP4);
    for (size_t i = 0; i < a.n; i++) memcpy(b.v[i].data, a.v[i].data, a.v[i].bytes);
    ckpt_write(&a, 1);
    ckpt_write(&b, 4);
    ckpt_write(&d, 1);
    struct model_weights *w = loads(&a);
    model_weights_fingerprint(w, fa);
    model_weights_close(w);
    assert_int_equal(strlen(fa), 16);
    assert_int_equal(model_fingerprint(b.dir, fb, &err), 0);
    assert_string_equal(fa, fb);
    assert_int_equal(model_fingerprint(d.dir, fd, &err), 0);
    assert_string_not_equal(fa, fd);
    struct ckpt_tensor *norm =
        ckpt_get(&b, "norm.weight"); /* trained on: other values, same shapes */
    for (size_t i = 0; i < norm->bytes; i++) norm->data[i] ^= 1;
    ckpt_write(&b, 4);
    assert_int_equal(model_fingerprint(b.dir, fb, &err), 0);
    assert_string_not_equal(fa, fb);
    char *theta = strstr(a.config, "160000");
    assert_non_null(theta);
    theta[0] = '2';
    ckpt_write(&a, 1);
    assert_int_equal(model_fingerprint(a.dir, fd, &err), 0);
    assert_string_not_equal(fa, fd);
    ckpt_fini(&d);
    ckpt_fini(&b);
    ckpt_fini(&a);
}

static void test_weights__repeated_layers_are_views_of_others(void **state)
{
    (void)state;
    struct ckpt c;
    struct tow_err err = {0};
    struct model_weights *w = NULL, *as_stored;
    char once[MODEL_FINGERPRINT_CHARS], again[MODEL_FINGERPRINT_CHARS];
    struct model_weights_options o = {.n_layers = 6};
    ckpt_init(&c, CKPT_NATIVE); /* layers 0 (by token id), 4, 6 and an MTP block */
    ckpt_write(&c, 1);
    as_stored = loads(&c);
    if (model_weights_open(&w, c.dir, &o, &err) < 0) fail_msg("%s", err.msg);
    static const int32_t ratios[] = {0, 4, 6, 4, 6, 4, 0};
    assert_int_equal(w->shape.n_layers, 6);
    assert_int_equal(w->shape.n_mtp, 1);
    assert_int_equal(w->report.n_stored, 3);
    assert_int_equal(w->report.n_found, c.n);
    assert_int_equal(w->report.n_unused, 0);
    for (int i = 0; i < 7; i++) {
        assert_int_equal(w->shape.ratios[i], ratios[i]);
        assert_int_equal(w->layers[i].ratio, ratios[i]);
        assert_int_equal(w->shape.hashed[i], i == 0);
    }
    for (int i = 3; i < 6; i++) {
        const struct model_layer *y = &w->layers[i], *of = &w->layers[i - 2];
        assert_ptr_equal(y->wq_b.data, of->wq_b.data);
        assert_ptr_equal(y->w2[3].data, of->w2[3].data);
        /* Placing is by these arrays, and changes them. */
        assert_ptr_not_equal(y->w1, of->w1);
        assert_ptr_not_equal(y->w2, of->w2);
        assert_ptr_not_equal(y->w3, of->w3);
    }
    same_bytes(w->layers[6].sink, &c, "mtp.0.attn.attn_sink", 0, 16);
    model_weights_fingerprint(as_stored, once);
    model_weights_fingerprint(w, again);
    assert_string_not_equal(once, again);
    model_weights_close(w);
    model_weights_close(as_stored);

    o.n_layers = 3; /* as many as there are */
    if (model_weights_open(&w, c.dir, &o, &err) < 0) fail_msg("%s", err.msg);
    assert_int_equal(w->shape.n_layers, 3);
    model_weights_close(w);
    o.n_layers = 2;
    refused_with(&c, &o, (const char *const[]){"layers 2: not in 3..255", NULL});
    o.n_layers = 256;
    refused_with(&c, &o, (const char *const[]){"layers 256: not in 3..255", NULL});
    o.n_layers = -1;
    refused_with(&c, &o, (const char *const[]){"layers -1: not in 3..255", NULL});
    ckpt_fini(&c);

    ckpt_init(&c, CKPT_NATIVE);
    const char field[] = "\"num_hash_layers\": ";
    char *at = strstr(c.config, field);
    assert_non_null(at);
    at[strlen(field)] = '3';
    ckpt_write(&c, 1);
    o.n_layers = 4;
    refused_with(&c, &o, (const char *const[]){"layers 4: the last of 3 routes by token id", NULL});
    ckpt_fini(&c);
}

static void test_weights__an_empty_or_absent_folder_is_refused(void **state)
{
    (void)state;
    struct tow_err err = {0};
    struct model_weights *w = NULL;
    assert_int_equal(model_weights_open(&w, "/nonexistent", NULL, &err), TOW_EIO);
    assert_non_null(strstr(err.msg, "/nonexistent/config.json"));
    struct ckpt c;
    ckpt_init(&c, CKPT_BF16);
    ckpt_write_text(&c, "config.json", c.config, strlen(c.config));
    refused(&c, "no .safetensors file");
    ckpt_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights__every_form_loads_whole_and_without_copies),
        cmocka_unit_test(test_weights__views_point_at_the_right_bytes),
        cmocka_unit_test(test_weights__stacked_experts_are_split_by_rows),
        cmocka_unit_test(test_weights__missing_shards_and_bad_indexes_are_refused),
        cmocka_unit_test(test_weights__a_cut_shard_is_refused),
        cmocka_unit_test(test_weights__the_same_tensor_in_two_files_is_refused),
        cmocka_unit_test(test_weights__missing_tensors_are_counted_and_named),
        cmocka_unit_test(test_weights__without_mtp_drafts_are_off),
        cmocka_unit_test(test_weights__a_missing_or_partial_scale_is_refused),
        cmocka_unit_test(test_weights__bad_scale_values_are_refused_by_name),
        cmocka_unit_test(test_weights__float_scales_of_fp4_must_be_powers_of_two),
        cmocka_unit_test(test_weights__float_block_scales_are_taken_as_they_are),
        cmocka_unit_test(test_weights__wrong_types_are_refused_by_name),
        cmocka_unit_test(test_weights__wrong_shapes_are_refused_with_both),
        cmocka_unit_test(test_weights__expert_ids_of_the_hash_table_are_checked),
        cmocka_unit_test(test_weights__f16_and_misaligned_vectors_are_widened),
        cmocka_unit_test(test_weights__a_tensor_under_both_names_is_refused),
        cmocka_unit_test(test_fingerprint__says_form_shape_and_revision_not_sharding),
        cmocka_unit_test(test_weights__repeated_layers_are_views_of_others),
        cmocka_unit_test(test_weights__an_empty_or_absent_folder_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
