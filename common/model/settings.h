/* model/settings.h - the flags that say how a checkpoint is run, the same in every program with an
 * engine in it.
 *
 * Why      Workers, eval and whatever else runs the engine must agree on names, defaults, ranges
 *          and what contradicts what, or a replay would run another model than was served.
 * Use      MODEL_OPTS(&set) among the rows of a table of options; after reading it,
 *          model_settings_check() and model_settings_take().
 */
#ifndef MODEL_SETTINGS_H
#define MODEL_SETTINGS_H

#include "common/base/opt.h"
#include "common/model/forward.h"

struct tow_err;

struct model_settings {
    const char *device;          /* borrowed from the tow_opts */
    int64_t threads, index_topk; /* 0: all cores; the checkpoint's */
    /* Indices into the names below. */
    int kv_dtype, index_keys, expert_activations, numerics, products;
};

/* NULL-terminated. kv and index keys are in the order of enum kern_kv_fmt and kern_ik_fmt. */
extern const char *const model_kv_names[], *const model_ik_names[];
extern const char *const model_expert_activations_names[];
extern const char *const model_numerics_names[];
extern const char *const model_products_names[];

#define MODEL_OPT_DEVICE(to)                                                                       \
    {                                                                                              \
        .name = "device", .type = TOW_OPT_STRING, .out = (to), .def = "cpu",                       \
        .help = "compute back end: cpu or cuda:N; tests: apart:cpu"                                \
    }
#define MODEL_OPT_THREADS(to)                                                                      \
    {                                                                                              \
        .name = "threads", .type = TOW_OPT_INT, .out = (to), .min = 1, .max = 256,                 \
        .otherwise = "all cores", .help = "CPU team of the engine"                                 \
    }
#define MODEL_OPTS(s)                                                                              \
    MODEL_OPT_DEVICE(&(s)->device), MODEL_OPT_THREADS(&(s)->threads),                              \
        {.name = "kv-dtype",                                                                       \
         .type = TOW_OPT_ENUM,                                                                     \
         .out = &(s)->kv_dtype,                                                                    \
         .def = "fp8",                                                                             \
         .choices = model_kv_names,                                                                \
         .help = "stored type of keys and entries; --numerics exact takes f32 only"},              \
        {.name = "index-keys",                                                                     \
         .type = TOW_OPT_ENUM,                                                                     \
         .out = &(s)->index_keys,                                                                  \
         .def = "fp4",                                                                             \
         .choices = model_ik_names,                                                                \
         .help = "stored type of index keys; f32 with --numerics exact, and only there"},          \
        {.name = "index-topk",                                                                     \
         .type = TOW_OPT_INT,                                                                      \
         .out = &(s)->index_topk,                                                                  \
         .min = 1,                                                                                 \
         .max = MODEL_MAX_TOPK,                                                                    \
         .otherwise = "the checkpoint's",                                                          \
         .unit = "entries",                                                                        \
         .help = "compressed entries a token keeps"},                                              \
        {.name = "expert-activations",                                                             \
         .type = TOW_OPT_ENUM,                                                                     \
         .out = &(s)->expert_activations,                                                          \
         .def = "w4a8",                                                                            \
         .choices = model_expert_activations_names,                                                \
         .help = "how NVFP4 experts take their activations"},                                      \
        {.name = "products",                                                                       \
         .type = TOW_OPT_ENUM,                                                                     \
         .out = &(s)->products,                                                                    \
         .def = "bf16",                                                                            \
         .choices = model_products_names,                                                          \
         .help = "what fp8 activations are multiplied as; fp8, on CUDA sm_90: faster prefill, "    \
                 "sums of 13 bits"},                                                               \
    {                                                                                              \
        .name = "numerics", .type = TOW_OPT_ENUM, .out = &(s)->numerics, .def = "deployed",        \
        .choices = model_numerics_names,                                                           \
        .help = "exact rounds nothing; deployed rounds where the released model does"              \
    }

/* TOW_ECONFIG where a type was asked for by name that the numerics do not keep: exact has f32
 * alone; deployed scores no f32 index keys. */
int model_settings_check(const struct model_settings *s, const struct tow_opts *opts,
                         struct tow_err *err);
/* Sets these fields of *out and leaves the others; exact implies f32 for both types. */
void model_settings_take(const struct model_settings *s, struct model_options *out);

#endif
