/* Tests of common/text/config.h: both namings, defaults,
 * and a refusal for each field that can be wrong. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/text/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The smallest legal config in each naming; `extra` is put before the closing brace,
 * and its keys may repeat none. */
static const char HF[] = "\"hidden_size\": 256, \"vocab_size\": 512, \"num_hidden_layers\": 3, "
                         "\"num_attention_heads\": 2, \"head_dim\": 256, "
                         "\"q_lora_rank\": 256, \"o_groups\": 2, \"o_lora_rank\": 128, "
                         "\"sliding_window\": 128, \"moe_intermediate_size\": "
                         "128, \"n_routed_experts\": 8, \"num_experts_per_tok\": 2, "
                         "\"qk_rope_head_dim\": 64, \"index_n_heads\": 8, "
                         "\"index_head_dim\": 128, \"index_topk\": 16, \"compress_ratios\": [0, 4, "
                         "128], \"compress_rope_theta\": 160000, "
                         "\"rope_theta\": 10000";
static const char RELEASED[] =
    "\"dim\": 256, \"vocab_size\": 512, \"n_layers\": 3, \"n_mtp_layers\": 1, \"n_heads\": 2, "
    "\"head_dim\": 256, "
    "\"q_lora_rank\": 256, \"o_groups\": 2, \"o_lora_rank\": 128, \"window_size\": 64, "
    "\"moe_inter_dim\": 128, "
    "\"n_routed_experts\": 8, \"n_activated_experts\": 2, \"rope_head_dim\": 64, "
    "\"index_n_heads\": 8, "
    "\"index_head_dim\": 128, \"index_topk\": 16, \"compress_ratios\": [0, 4, 128, 0], "
    "\"n_hash_layers\": 2, "
    "\"score_func\": \"sigmoid\", \"route_scale\": 2.5, \"norm_eps\": 1e-5, \"swiglu_limit\": 7.0, "
    "\"dtype\": \"fp8\", "
    "\"scale_fmt\": \"ue8m0\", \"expert_dtype\": \"fp4\", \"rope_theta\": 10000.0, "
    "\"compress_rope_theta\": 40000.0, "
    "\"original_seq_len\": 65536, \"rope_factor\": 16, \"beta_fast\": 32, \"beta_slow\": 1, "
    "\"hc_mult\": 2, "
    "\"hc_sinkhorn_iters\": 5, \"max_batch_size\": 4, \"max_seq_len\": 4096";

/* base without the member `drop` (NULL: none), plus extra. */
static char *config_of(const char *base, const char *drop, const char *extra)
{
    char *out = malloc(strlen(base) + strlen(extra) + 16);
    assert_non_null(out);
    sprintf(out, "{%s", base);
    if (drop) {
        char key[80];
        snprintf(key, sizeof key, "\"%s\": ", drop);
        char *at = strstr(out, key);
        if (!at) fail_msg("no %s in the base config", drop);
        char *end = at + strlen(key);
        int depth = 0;
        while (*end && (depth || *end != ',')) {
            depth += *end == '[' ? 1 : *end == ']' ? -1 : 0;
            end++;
        }
        if (*end == ',') end += 2;
        memmove(at, end, strlen(end) + 1);
        size_t n = strlen(out);
        if (n > 2 && out[n - 2] == ',') out[n - 2] = 0;
    }
    if (*extra) sprintf(out + strlen(out), ", %s", extra);
    strcat(out, "}");
    return out;
}

static int parse(const char *base, const char *drop, const char *extra, struct text_config *c,
                 struct tow_err *err)
{
    char *text = config_of(base, drop, extra);
    int rc = text_config_parse(c, "M", text, strlen(text), NULL, 0, err);
    free(text);
    return rc;
}

static void reads(const char *base, const char *drop, const char *extra, struct text_config *c)
{
    struct tow_err err = {0};
    if (parse(base, drop, extra, c, &err) != 0) fail_msg("%s: %s", extra, err.msg);
}

static void test_config__hugging_face_names_and_defaults(void **state)
{
    (void)state;
    struct text_config c;
    reads(HF, NULL, "", &c);
    assert_int_equal(c.hidden_size, 256);
    assert_int_equal(c.n_layers, 3);
    assert_int_equal(c.n_mtp, 0);
    assert_int_equal(c.window, 128);
    assert_int_equal(c.ratios[1], 4);
    assert_int_equal(c.hc_mult, 4);
    assert_int_equal(c.hc_iters, 20);
    assert_true(c.norm_eps == 1e-6 && c.hc_eps == 1e-6);
    assert_int_equal(c.score, TEXT_SCORE_SQRTSOFTPLUS);
    assert_true(c.norm_topk_prob);
    assert_false(c.yarn);
    assert_false(c.fp8);
    assert_int_equal(c.experts, TEXT_EXPERTS_PLAIN);
    assert_true(c.swiglu_limit == 0 && c.routed_scaling == 1);
    assert_false(c.hashed[0]);
    assert_int_equal(c.bos_id, 0);
    assert_int_equal(c.pad_id, -1);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos_ids[0], 1);
    assert_true(c.gen.temperature == 1 && c.gen.top_p == 1 && c.gen.do_sample && !c.gen.from_file);
}

static void test_config__released_names(void **state)
{
    (void)state;
    struct text_config c;
    reads(RELEASED, NULL, "", &c);
    assert_int_equal(c.hidden_size, 256);
    assert_int_equal(c.n_heads, 2);
    assert_int_equal(c.n_mtp, 1);
    assert_int_equal(c.window, 64);
    assert_int_equal(c.moe_inter, 128);
    assert_int_equal(c.n_experts_per_tok, 2);
    assert_int_equal(c.rope_dim, 64);
    assert_true(c.hashed[0] && c.hashed[1] && !c.hashed[2]);
    assert_int_equal(c.score, TEXT_SCORE_SIGMOID);
    assert_true(c.routed_scaling == 2.5 && c.norm_eps == 1e-5 && c.swiglu_limit == 7);
    assert_true(c.fp8 && c.scale_ue8m0);
    assert_int_equal(c.experts, TEXT_EXPERTS_MXFP4);
    assert_true(c.yarn && c.yarn_factor == 16 && c.yarn_original == 65536);
    assert_true(c.compress_rope_theta == 40000);
    assert_int_equal(c.max_positions, 4096);
    assert_int_equal(c.eos_ids[0], 1);
}

static void test_config__newer_hugging_face_lists(void **state)
{
    (void)state;
    struct text_config c;
    const char *types =
        "\"layer_types\": [\"sliding_attention\", \"compressed_sparse_attention\", "
        "\"heavily_compressed_attention\"], \"compress_rates\": {\"compressed_sparse_attention\": "
        "4, "
        "\"heavily_compressed_attention\": 32}, \"mlp_layer_types\": [\"hash_moe\", \"moe\", "
        "\"moe\"], "
        "\"rope_parameters\": {\"main\": {\"rope_type\": \"default\", \"rope_theta\": 10000, "
        "\"partial_rotary_factor\": 0.25}, \"compress\": {\"rope_type\": \"yarn\", \"factor\": 4, "
        "\"original_max_position_embeddings\": 1024, \"rope_theta\": 160000}}";
    reads(HF, "compress_ratios", types, &c);
    assert_int_equal(c.ratios[0], 0);
    assert_int_equal(c.ratios[1], 4);
    assert_int_equal(c.ratios[2], 32);
    assert_true(c.hashed[0] && !c.hashed[1]);
    assert_true(c.yarn && c.yarn_factor == 4 && c.yarn_original == 1024 && c.yarn_beta_fast == 32);
    char *base = config_of(HF, "compress_ratios", ""), *inner = base + 1;
    base[strlen(base) - 1] = 0;
    reads(inner, "qk_rope_head_dim", types, &c); /* a part of head_dim instead of a width */
    assert_int_equal(c.rope_dim, 64);
    free(base);
}

static void test_config__quantised_forms(void **state)
{
    (void)state;
    static const struct {
        const char *extra;
        bool fp8;
        enum text_expert_form experts;
    } forms[] = {
        {"\"quantization_config\": {\"quant_method\": \"fp8\"}", true, TEXT_EXPERTS_FP8},
        {"\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}, "
         "\"expert_dtype\": "
         "\"fp4\"",
         true, TEXT_EXPERTS_MXFP4},
        {"\"quantization_config\": {\"quant_method\": \"fp8\", \"moe_quant_algo\": \"NVFP4\"}, "
         "\"expert_dtype\": \"fp4\"",
         true, TEXT_EXPERTS_NVFP4},
        {"\"quantization_config\": {\"quant_method\": \"fp8\", \"moe_quant_algo\": null}", true,
         TEXT_EXPERTS_FP8},
        {"\"expert_dtype\": \"fp4\"", false, TEXT_EXPERTS_EITHER},
        {"\"dtype\": \"bfloat16\", \"expert_dtype\": null", false, TEXT_EXPERTS_PLAIN},
    };
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        struct text_config c;
        reads(HF, NULL, forms[i].extra, &c);
        assert_int_equal(c.fp8, forms[i].fp8);
        assert_int_equal(c.experts, forms[i].experts);
    }
}

static void test_config__legal_shapes(void **state)
{
    (void)state;
    static const struct {
        const char *drop, *extra;
    } ok[] = {
        {"sliding_window", "\"sliding_window\": 1"},
        {"num_attention_heads", "\"num_attention_heads\": 3"}, /* 3 x 256 in 2 groups */
        {"compress_ratios", "\"compress_ratios\": [2, 1024, 3]"},
        {"compress_ratios", "\"compress_ratios\": [0, 4, 128, 0, 0]"},
        {"index_head_dim", "\"index_head_dim\": 64"},
        {"index_topk", "\"index_topk\": 4096"},
        {"n_routed_experts", "\"n_routed_experts\": 2"},
        {NULL, "\"hc_mult\": 1"},
        {NULL, "\"num_hash_layers\": 99"},
        {NULL, "\"num_nextn_predict_layers\": 2"},
        {NULL, "\"eos_token_id\": [1, 2, 1]"},
        {NULL, "\"rope_scaling\": null, \"num_hash_layers\": null, \"scoring_func\": \"softmax\""},
        {NULL, "\"dspark_block_size\": 5, \"num_nextn_predict_layers\": 1"},
        {NULL, "\"dim\": 256, \"an_unknown_field\": {\"x\": [1]}"},
    };
    for (size_t i = 0; i < sizeof ok / sizeof ok[0]; i++) {
        struct text_config c;
        reads(HF, ok[i].drop, ok[i].extra, &c);
    }
    struct text_config c;
    reads(HF, NULL, "\"num_nextn_predict_layers\": 1, \"eos_token_id\": [1, 2, 1]", &c);
    assert_int_equal(c.n_mtp, 1); /* its ratio was not listed */
    assert_int_equal(c.ratios[3], 0);
    assert_int_equal(c.n_eos, 2);
    reads(HF, NULL, "\"dspark_block_size\": 5, \"num_nextn_predict_layers\": 1", &c);
    assert_true(c.dspark && c.n_mtp == 0);
}

static void test_config__illegal_values_are_refused_with_field_value_and_range(void **state)
{
    (void)state;
    static const struct {
        const char *drop, *extra, *part[3];
    } bad[] = {
        {"hidden_size", "", {"hidden_size (or dim) is missing"}},
        {"hidden_size", "\"hidden_size\": 0", {"hidden_size is 0", "1..65536"}},
        {"hidden_size", "\"hidden_size\": \"256\"", {"hidden_size is \"256\"", "1..65536"}},
        {"hidden_size", "\"hidden_size\": 256.0", {"hidden_size is 256.0", "whole number"}},
        {"hidden_size", "\"hidden_size\": 1e400", {"json"}},
        {"hidden_size", "\"hidden_size\": 99999999999999999999", {"hidden_size"}},
        {NULL, "\"dim\": 128", {"hidden_size is 256 but dim is 128"}},
        {NULL, "\"window_size\": 64", {"sliding_window is 128 but window_size is 64"}},
        {"sliding_window", "\"sliding_window\": 0", {"sliding_window is 0", "1.."}},
        {"compress_ratios", "", {"compress_ratios (or layer_types) is missing"}},
        {"compress_ratios", "\"compress_ratios\": 4", {"compress_ratios is 4", "a list"}},
        {"compress_ratios",
         "\"compress_ratios\": [0, 4]",
         {"compress_ratios has 2 entries", "right: 3"}},
        {"compress_ratios",
         "\"compress_ratios\": [0, 4, 1]",
         {"compress_ratios[2] is 1", "2..1024"}},
        {"compress_ratios", "\"compress_ratios\": [0, 4, -4]", {"compress_ratios[2] is -4"}},
        {"compress_ratios", "\"compress_ratios\": [0, 4, 1025]", {"compress_ratios[2] is 1025"}},
        {"compress_ratios", "\"compress_ratios\": [0, 4, \"8\"]", {"compress_ratios[2] is \"8\""}},
        {"compress_ratios", "\"compress_ratios\": [0, 4, 128, 4]", {"beyond the 3 layers"}},
        {"compress_ratios",
         "\"layer_types\": [\"full_attention\", 1, 2]",
         {"layer_types[0] is \"full_attention\""}},
        {NULL,
         "\"layer_types\": [\"sliding_attention\", \"sliding_attention\", \"sliding_attention\"]",
         {"layer_types[1] is 0 but the entry in compress_ratios is 4"}},
        {"index_head_dim", "\"index_head_dim\": 96", {"index_head_dim is 96", "power of two"}},
        {"index_head_dim", "\"index_head_dim\": 16", {"index_head_dim is 16", "32..1024"}},
        {"index_head_dim",
         "\"index_head_dim\": 32",
         {"qk_rope_head_dim is 64", "index_head_dim (32)"}},
        {"index_head_dim", "", {"index_head_dim is missing"}},
        {"index_topk", "\"index_topk\": 4097", {"index_topk is 4097", "1..4096"}},
        {"qk_rope_head_dim", "\"qk_rope_head_dim\": 63", {"qk_rope_head_dim is 63", "even"}},
        {"qk_rope_head_dim", "\"qk_rope_head_dim\": 512", {"qk_rope_head_dim is 512", "2..256"}},
        {"qk_rope_head_dim", "", {"qk_rope_head_dim (or rope_head_dim) is missing"}},
        {"num_experts_per_tok",
         "\"num_experts_per_tok\": 9",
         {"num_experts_per_tok is 9", "n_routed_experts (8)"}},
        {"o_groups", "\"o_groups\": 3", {"o_groups is 3", "divisor"}},
        {"compress_rope_theta", "", {"compress_rope_theta is missing"}},
        {"rope_theta", "\"rope_theta\": 0", {"rope_theta is 0", "above 1"}},
        {"rope_theta", "\"rope_theta\": \"x\"", {"rope_theta is \"x\""}},
        {"num_hidden_layers", "\"num_hidden_layers\": 257", {"num_hidden_layers is 257", "1..256"}},
        {NULL, "\"hc_mult\": 9", {"hc_mult is 9", "1..8"}},
        {NULL, "\"num_key_value_heads\": 2", {"num_key_value_heads is 2", "right: 1"}},
        {NULL, "\"n_shared_experts\": 2", {"n_shared_experts is 2", "right: 1"}},
        {NULL, "\"attention_bias\": true", {"attention_bias is true", "false"}},
        {NULL, "\"hidden_act\": \"gelu\"", {"hidden_act is \"gelu\"", "silu"}},
        {NULL, "\"scoring_func\": \"tanh\"", {"scoring_func is \"tanh\"", "sqrtsoftplus"}},
        {NULL,
         "\"scoring_func\": \"softmax\", \"score_func\": \"sigmoid\"",
         {"scoring_func", "score_func"}},
        {NULL, "\"topk_method\": \"greedy\"", {"topk_method is \"greedy\""}},
        {NULL, "\"rope_scaling\": {\"type\": \"linear\"}", {"type is \"linear\"", "yarn"}},
        {NULL,
         "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}",
         {"original_max_position_embeddings is missing"}},
        {NULL,
         "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 0.5, "
         "\"original_max_position_embeddings\": 1024}",
         {"factor is 0.5"}},
        {NULL,
         "\"quantization_config\": {\"quant_method\": \"awq\"}",
         {"quant_method is \"awq\"", "fp8"}},
        {NULL,
         "\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [64, 128]}",
         {"weight_block_size is [64, 128]", "[128, 128]"}},
        {NULL,
         "\"quantization_config\": {\"quant_method\": \"fp8\", \"moe_quant_algo\": \"INT4\"}",
         {"moe_quant_algo is \"INT4\"", "NVFP4"}},
        {NULL, "\"expert_dtype\": \"int4\"", {"expert_dtype is \"int4\""}},
        {NULL, "\"eos_token_id\": 512", {"eos_token_id is 512", "0..511"}},
        {NULL, "\"eos_token_id\": [1, \"2\"]", {"eos_token_id is \"2\""}},
        {NULL, "\"swiglu_limit\": -1", {"swiglu_limit is -1"}},
        {NULL,
         "\"mlp_layer_types\": [\"moe\", \"dense\", \"moe\"]",
         {"mlp_layer_types[1] is \"dense\""}},
        {NULL, "\"hidden_size\": 256", {"duplicate key hidden_size"}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct text_config c = {.hidden_size = -5};
        struct tow_err err = {0};
        int rc = parse(HF, bad[i].drop, bad[i].extra, &c, &err);
        if (rc == 0) fail_msg("accepted: %s", bad[i].extra);
        assert_int_equal(c.hidden_size, -5); /* untouched */
        if (!strstr(err.msg, "M/config.json")) fail_msg("no file in: %s", err.msg);
        for (int k = 0; k < 3 && bad[i].part[k]; k++)
            if (!strstr(err.msg, bad[i].part[k]))
                fail_msg("no \"%s\" in: %s", bad[i].part[k], err.msg);
    }
}

static void test_config__generation_defaults(void **state)
{
    (void)state;
    struct tow_err err = {0};
    struct text_config c;
    char *text = config_of(HF, NULL, "\"eos_token_id\": 1");
    const char *gen = "{\"do_sample\": false, \"temperature\": 0.6, \"top_p\": 0.95, \"top_k\": "
                      "20, \"eos_token_id\": "
                      "[2, 1], \"min_p\": null}";
    assert_int_equal(text_config_parse(&c, "M", text, strlen(text), gen, strlen(gen), &err), 0);
    assert_true(c.gen.from_file && !c.gen.do_sample && c.gen.temperature == 0.6 &&
                c.gen.top_p == 0.95);
    assert_int_equal(c.gen.top_k, 20);
    assert_int_equal(c.n_eos, 2);
    gen = "{\"top_p\": 0}";
    assert_int_equal(text_config_parse(&c, "M", text, strlen(text), gen, strlen(gen), &err),
                     TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "M/generation_config.json: top_p is 0"));
    gen = "[]";
    assert_int_equal(text_config_parse(&c, "M", text, strlen(text), gen, strlen(gen), &err),
                     TOW_EFORMAT);
    free(text);
}

static void test_config__a_file_that_is_no_config_is_refused(void **state)
{
    (void)state;
    struct text_config c;
    struct tow_err err = {0};
    assert_int_equal(text_config_load(&c, "/nonexistent", &err), TOW_EIO);
    assert_non_null(strstr(err.msg, "/nonexistent/config.json"));
    static const char *const texts[] = {"", "[]", "{", "{\"a\": 1}}", "\xef\xbb\xbf{}", "null"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        assert_int_equal(text_config_parse(&c, "M", texts[i], strlen(texts[i]), NULL, 0, &err),
                         TOW_EFORMAT);
        assert_non_null(strstr(err.msg, "M/config.json"));
    }
    /* A pipe that nobody writes to: refused, not waited for. */
    char dir[] = "/tmp/towpath-config-XXXXXX", path[64];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(text_config_load(&c, dir, &err), TOW_EIO);
    assert_non_null(strstr(err.msg, "not a regular file"));
    unlink(path);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config__hugging_face_names_and_defaults),
        cmocka_unit_test(test_config__released_names),
        cmocka_unit_test(test_config__newer_hugging_face_lists),
        cmocka_unit_test(test_config__quantised_forms),
        cmocka_unit_test(test_config__legal_shapes),
        cmocka_unit_test(test_config__illegal_values_are_refused_with_field_value_and_range),
        cmocka_unit_test(test_config__generation_defaults),
        cmocka_unit_test(test_config__a_file_that_is_no_config_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
