/* text/config.h - config.json and generation_config.json, checked.
 *
 * Why      Every size the engine allocates follows from these fields, so a value that cannot be
 *          right is refused here, by file, field, value and right range, before anything is mapped.
 * Forms    Two namings are read, also mixed as long as they agree: Hugging Face's (hidden_size,
 *          ...; also its newer layer_types, mlp_layer_types, compress_rates, rope_parameters) and
 *          the released inference code's (dim, n_layers, ...). Unknown fields are ignored; null
 *          counts as absent.
 * Limits   TEXT_CONFIG_* below and the table in config.c.
 */
#ifndef TEXT_CONFIG_H
#define TEXT_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_err;

enum {
    TEXT_CONFIG_MAX_LAYERS = 256, /* main + MTP */
    TEXT_CONFIG_MAX_EOS = 16,
    TEXT_CONFIG_MAX_RATIO = 1024, /* 0 window only; 4 overlapping, with indexer; else dense, 2.. */
    TEXT_CONFIG_MAX_TOPK = 4096,  /* index_topk */
    TEXT_CONFIG_MAX_HC = 8,
};

enum text_score { TEXT_SCORE_SQRTSOFTPLUS, TEXT_SCORE_SIGMOID, TEXT_SCORE_SOFTMAX };

/* What config.json says the routed experts are stored as. */
enum text_expert_form {
    TEXT_EXPERTS_PLAIN,  /* BF16, F16 or F32 */
    TEXT_EXPERTS_FP8,    /* e4m3 in 128 x 128 blocks */
    TEXT_EXPERTS_MXFP4,  /* e2m1 with a ue8m0 scale per 32 */
    TEXT_EXPERTS_NVFP4,  /* e2m1 with an e4m3 scale per 16 and a second scale per matrix */
    TEXT_EXPERTS_EITHER, /* expert_dtype fp4 but no quantization_config: MXFP4 or plain, as stored
                          */
};

/* Sampling defaults of generation_config.json; also where the file is absent. */
struct text_generation {
    bool from_file;                                       /* the file was there */
    bool do_sample;                                       /* default true */
    double temperature, top_p, min_p, repetition_penalty; /* 1, 1, 0, 1 */
    int32_t top_k;                                        /* 0 = off */
};

struct text_config {
    /* shape */
    int32_t hidden_size, vocab_size;
    int32_t n_layers; /* main ones */
    int32_t n_mtp;    /* MTP blocks after them; 0 also for drafters this engine does not run */
    int32_t n_heads, head_dim, rope_dim;
    int32_t q_lora_rank, o_groups, o_lora_rank;
    int32_t window;
    int32_t ratios[TEXT_CONFIG_MAX_LAYERS]; /* n_layers + n_mtp of them */
    int32_t index_heads, index_dim, index_topk;
    /* experts */
    int32_t n_experts, n_experts_per_tok, moe_inter;
    bool hashed[TEXT_CONFIG_MAX_LAYERS]; /* main layers that route by token id */
    enum text_score score;
    bool norm_topk_prob;
    double routed_scaling, swiglu_limit; /* limit 0 = no clamp */
    /* hyper-connections, norms */
    int32_t hc_mult, hc_iters;
    double hc_eps, norm_eps;
    /* positions */
    double rope_theta, compress_rope_theta;
    bool yarn;
    double yarn_factor, yarn_beta_fast, yarn_beta_slow;
    int32_t yarn_original; /* original_max_position_embeddings */
    int32_t max_positions;
    /* stored form */
    bool fp8;         /* dense products are e4m3 in 128 x 128 blocks */
    bool scale_ue8m0; /* scale_fmt says so; stored scales may be F32 all the same */
    enum text_expert_form experts;
    bool dspark; /* the MTP part is another kind of drafter, which is not run */
    bool tie_embeddings;
    /* ids */
    int32_t bos_id, pad_id; /* -1 = none */
    int32_t eos_ids[TEXT_CONFIG_MAX_EOS], n_eos;
    struct text_generation gen;
};

/* Reads dir/config.json, and dir/generation_config.json if it is there. On failure *out is
 * untouched: TOW_EIO (unreadable), TOW_EFORMAT (not JSON), TOW_ECONFIG (a value). */
int text_config_load(struct text_config *out, const char *dir, struct tow_err *err);

/* The same from text; gen may be NULL. where names the files in messages ("DIR"). */
int text_config_parse(struct text_config *out, const char *where, const char *json, size_t json_len,
                      const char *gen, size_t gen_len, struct tow_err *err);

#endif
