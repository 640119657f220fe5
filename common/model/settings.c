/* model/settings.c - see settings.h. */
#include "common/model/settings.h"

#include "common/base/err.h"

enum { EXACT = 0, FP8_PRODUCTS = 1 };
const char *const model_numerics_names[] = {"exact", "deployed", NULL};
const char *const model_products_names[] = {"bf16", "fp8", NULL};
const char *const model_kv_names[] = {
    [KERN_KV_FP8] = "fp8", [KERN_KV_BF16] = "bf16", [KERN_KV_F32] = "f32", NULL};
const char *const model_ik_names[] = {[KERN_IK_FP4] = "fp4",
                                      [KERN_IK_FP8] = "fp8",
                                      [KERN_IK_BF16] = "bf16",
                                      [KERN_IK_F32] = "f32",
                                      NULL};
const char *const model_expert_activations_names[] = {"w4a8", "w4a16", "w4a4", NULL};
static const enum kern_act_quant expert_aq[] = {KERN_AQ_A128, KERN_AQ_NONE, KERN_AQ_NVFP4};

int model_settings_check(const struct model_settings *s, const struct tow_opts *opts,
                         struct tow_err *err)
{
    if (s->numerics != EXACT && s->index_keys == KERN_IK_F32)
        return tow_fail(
            err, TOW_ECONFIG,
            "--index-keys f32: only with --numerics exact; deployed takes fp4, fp8 or bf16");
    if (s->numerics == EXACT && s->products == FP8_PRODUCTS)
        return tow_fail(err, TOW_ECONFIG,
                        "--products fp8: only with --numerics deployed; exact "
                        "quantizes no activations");
    if (s->numerics != EXACT) return 0;
    if (tow_opts_source(opts, "kv-dtype") != TOW_FROM_DEFAULT && s->kv_dtype != KERN_KV_F32)
        return tow_fail(err, TOW_ECONFIG, "--kv-dtype %s: --numerics exact keeps f32",
                        model_kv_names[s->kv_dtype]);
    if (tow_opts_source(opts, "index-keys") != TOW_FROM_DEFAULT && s->index_keys != KERN_IK_F32)
        return tow_fail(err, TOW_ECONFIG, "--index-keys %s: --numerics exact keeps f32",
                        model_ik_names[s->index_keys]);
    return 0;
}

void model_settings_take(const struct model_settings *s, struct model_options *out)
{
    out->device = s->device;
    out->n_threads = (int32_t)s->threads;
    out->exact = s->numerics == EXACT;
    out->kv_fmt = out->exact ? KERN_KV_F32 : (enum kern_kv_fmt)s->kv_dtype;
    out->ik_fmt = out->exact ? KERN_IK_F32 : (enum kern_ik_fmt)s->index_keys;
    out->fp8_products = s->products == FP8_PRODUCTS;
    out->expert_aq = expert_aq[s->expert_activations];
    out->index_topk = (int32_t)s->index_topk;
}
