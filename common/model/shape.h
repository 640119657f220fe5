/* model/shape.h - the model's sizes as plain numbers, the only form the forward pass sees.
 *
 * Why      config.json has two namings and many defaults; below this line there is one.
 * Letters  As in kernels/types.h.
 */
#ifndef MODEL_SHAPE_H
#define MODEL_SHAPE_H

#include "kernels/types.h"

#include <stdbool.h>
#include <stdint.h>

struct text_config;

enum { MODEL_MAX_LAYERS = 256 }; /* main + MTP */

struct model_shape {
    int32_t D, V;
    int32_t n_layers, n_mtp;          /* n_mtp 0: drafts off */
    int32_t ratios[MODEL_MAX_LAYERS]; /* main layers, then MTP blocks */
    bool hashed[MODEL_MAX_LAYERS];
    int32_t H, d, rd;
    int32_t q_lora, o_groups, o_lora;
    int32_t window;
    int32_t index_heads, index_dim, index_topk;
    int32_t E, k, inter;
    enum kern_score score;
    bool norm_topk;
    float route_scale, swiglu_limit; /* limit 0 = no clamp */
    int32_t hc, hc_iters;
    float hc_eps, norm_eps;
    double rope_theta, compress_rope_theta;
    bool yarn; /* for layers with a compressor only */
    double yarn_factor, yarn_beta_fast, yarn_beta_slow;
    int32_t yarn_original;
    int32_t max_positions;
};

void model_shape_from_config(struct model_shape *s, const struct text_config *c);

/* inv_freq [rd/2] of a layer of that ratio: ratio 0 plain rope_theta, else compress_rope_theta with
 * YaRN. */
void model_shape_inv_freq(const struct model_shape *s, int32_t ratio, float *inv_freq);

#endif
