/* Plain copying, and the rotation frequencies, which are computed in double and rounded once. */
#include "common/model/shape.h"

#include "common/text/config.h"
#include "kernels/hc/hc.h"

#include <math.h>
#include <string.h>

_Static_assert((int)TEXT_CONFIG_MAX_HC == (int)KERN_HC_MAX, "one limit on streams");
_Static_assert((int)MODEL_MAX_LAYERS == (int)TEXT_CONFIG_MAX_LAYERS, "one limit on layers");

void model_shape_from_config(struct model_shape *s, const struct text_config *c)
{
    memset(s, 0, sizeof *s);
    s->D = c->hidden_size;
    s->V = c->vocab_size;
    s->n_layers = c->n_layers;
    s->n_mtp = c->n_mtp;
    memcpy(s->ratios, c->ratios, sizeof s->ratios);
    memcpy(s->hashed, c->hashed, sizeof s->hashed);
    s->H = c->n_heads;
    s->d = c->head_dim;
    s->rd = c->rope_dim;
    s->q_lora = c->q_lora_rank;
    s->o_groups = c->o_groups;
    s->o_lora = c->o_lora_rank;
    s->window = c->window;
    s->index_heads = c->index_heads;
    s->index_dim = c->index_dim;
    s->index_topk = c->index_topk;
    s->E = c->n_experts;
    s->k = c->n_experts_per_tok;
    s->inter = c->moe_inter;
    static const enum kern_score SCORES[] = {[TEXT_SCORE_SQRTSOFTPLUS] = KERN_SCORE_SQRTSOFTPLUS,
                                             [TEXT_SCORE_SIGMOID] = KERN_SCORE_SIGMOID,
                                             [TEXT_SCORE_SOFTMAX] = KERN_SCORE_SOFTMAX};
    s->score = SCORES[c->score];
    s->norm_topk = c->norm_topk_prob;
    s->route_scale = (float)c->routed_scaling;
    s->swiglu_limit = (float)c->swiglu_limit;
    s->hc = c->hc_mult;
    s->hc_iters = c->hc_iters;
    s->hc_eps = (float)c->hc_eps;
    s->norm_eps = (float)c->norm_eps;
    s->rope_theta = c->rope_theta;
    s->compress_rope_theta = c->compress_rope_theta;
    s->yarn = c->yarn;
    s->yarn_factor = c->yarn_factor;
    s->yarn_beta_fast = c->yarn_beta_fast;
    s->yarn_beta_slow = c->yarn_beta_slow;
    s->yarn_original = c->yarn_original;
    s->max_positions = c->max_positions;
}

/* The pair that turns n times within the original length. */
static double pair_of(const struct model_shape *s, double n, double theta)
{
    const double pi = 3.14159265358979323846;
    return s->rd * log(s->yarn_original / (2 * pi * n)) / (2 * log(theta));
}

void model_shape_inv_freq(const struct model_shape *s, int32_t ratio, float *inv_freq)
{
    double theta = ratio ? s->compress_rope_theta : s->rope_theta;
    bool yarn = ratio && s->yarn;
    double lo = 0, hi = 0;
    if (yarn) {
        lo = fmax(floor(pair_of(s, s->yarn_beta_fast, theta)), 0);
        hi = fmin(ceil(pair_of(s, s->yarn_beta_slow, theta)), s->rd - 1);
        if (hi == lo) hi += 0.001;
    }
    for (int i = 0; i < s->rd / 2; i++) {
        double f = pow(theta, -2.0 * i / s->rd);
        if (yarn) {
            double ramp = fmin(fmax((i - lo) / (hi - lo), 0), 1);
            f = f / s->yarn_factor * ramp + f * (1 - ramp);
        }
        inv_freq[i] = (float)f;
    }
}
