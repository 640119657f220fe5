/* ctl/eval_main.c - the flags of `towpath-ctl eval`. */
#include "deploy/ctl/eval.h"

#include "common/base/err.h"
#include "deploy/ctl/flags.h"

#include <stdio.h>
#include <string.h>

static int parse_dump(const char *list, unsigned *out, struct tow_err *err)
{
    static const struct {
        const char *name;
        unsigned bit;
    } names[] = {{"logits", CTL_DUMP_LOGITS}, {"hidden", CTL_DUMP_HIDDEN},
                 {"index", CTL_DUMP_INDEX},   {"experts", CTL_DUMP_EXPERTS},
                 {"mtp", CTL_DUMP_MTP},       {"state", CTL_DUMP_STATE}};
    const size_t n_names = sizeof names / sizeof *names;
    *out = 0;
    for (const char *p = list; *p;) {
        size_t n = strcspn(p, ","), i = 0;
        while (i < n_names && (strlen(names[i].name) != n || memcmp(names[i].name, p, n) != 0)) i++;
        if (i == n_names)
            return tow_fail(err, TOW_ECONFIG,
                            "--dump: '%.*s' is none of logits, hidden, index, experts, mtp, state",
                            (int)n, p);
        *out |= names[i].bit;
        p += n;
        if (*p == ',') p++;
    }
    return 0;
}

/* Indices into the choices below are the enums' values plus this. */
static const char *const numerics_names[] = {"exact", "deployed", NULL};
static const char *const kv_names[] = {"fp8", "bf16", "f32", NULL};
static const char *const ik_names[] = {"fp4", "fp8", "bf16", "f32", NULL};
static const char *const aq_names[] = {"w4a8", "w4a16", "w4a4", NULL};

int ctl_eval_main(int argc, char **argv)
{
    struct ctl_eval e = {.greedy = -1};
    const char *dump = NULL, *device = "cpu";
    int numerics = 1, kv = KERN_KV_FP8, ik = KERN_IK_FP4, aq = 0;
    int64_t topk = 0, chunk = 0, threads = 0, greedy = -1;
    const struct tow_opt table[] = {
        {.name = "model",
         .type = TOW_OPT_STRING,
         .out = &e.model_dir,
         .required = true,
         .help = "checkpoint folder"},
        {.name = "tokens",
         .type = TOW_OPT_STRING,
         .out = &e.tokens_path,
         .required = true,
         .help = "safetensors with prompt, and if wanted positions and greedy"},
        {.name = "out",
         .type = TOW_OPT_STRING,
         .out = &e.out_path,
         .required = true,
         .help = "safetensors to write"},
        {.name = "numerics",
         .type = TOW_OPT_ENUM,
         .out = &numerics,
         .def = "deployed",
         .choices = numerics_names,
         .help = "exact rounds nothing; deployed rounds where the released model does"},
        {.name = "device",
         .type = TOW_OPT_STRING,
         .out = &device,
         .def = "cpu",
         .help = "compute back end"},
        {.name = "index-keys",
         .type = TOW_OPT_ENUM,
         .out = &ik,
         .def = "fp4",
         .choices = ik_names,
         .help = "stored type of index keys; f32 with --numerics exact"},
        {.name = "kv-dtype",
         .type = TOW_OPT_ENUM,
         .out = &kv,
         .def = "fp8",
         .choices = kv_names,
         .help = "stored type of keys and entries; f32 with --numerics exact"},
        {.name = "index-topk",
         .type = TOW_OPT_INT,
         .out = &topk,
         .min = 1,
         .max = MODEL_MAX_TOPK,
         .otherwise = "the checkpoint's",
         .unit = "entries",
         .help = "compressed entries a token keeps"},
        {.name = "expert-activations",
         .type = TOW_OPT_ENUM,
         .out = &aq,
         .def = "w4a8",
         .choices = aq_names,
         .help = "how NVFP4 experts take their activations"},
        {.name = "chunk-tokens",
         .type = TOW_OPT_INT,
         .out = &chunk,
         .min = 1,
         .max = MODEL_MAX_ROWS,
         .def = "256",
         .unit = "tokens",
         .help = "rows of one prefill pass"},
        {.name = "threads",
         .type = TOW_OPT_INT,
         .out = &threads,
         .min = 1,
         .max = 256,
         .otherwise = "all cores",
         .help = "CPU team"},
        {.name = "handover",
         .type = TOW_OPT_BOOL,
         .out = &e.handover,
         .def = "false",
         .help = "through the page and tail format before the first decoded token"},
        {.name = "greedy",
         .type = TOW_OPT_INT,
         .out = &greedy,
         .min = 0,
         .max = 1 << 20,
         .otherwise = "as many as the input's greedy holds",
         .unit = "tokens",
         .help = "steps of greedy continuation"},
        {.name = "force",
         .type = TOW_OPT_BOOL,
         .out = &e.force,
         .def = "false",
         .help = "continue with the input's greedy ids"},
        {.name = "dump",
         .type = TOW_OPT_STRING,
         .out = &dump,
         .otherwise = "all there is",
         .help = "list of logits,hidden,index,experts,mtp,state"},
    };
    const struct tow_opts_spec spec = {
        .program = "towpath-ctl eval",
        .about = "runs the engine in this process on token ids and writes what it computes",
        .table = table,
        .n = sizeof table / sizeof *table};
    struct tow_opts *opts = NULL;
    struct tow_err err = {0};
    int rc = ctl_flags_read(&opts, &spec, argc, argv, &err);
    const bool run = rc == CTL_FLAGS_RUN;
    if (rc <= 0) {
        if (rc < 0) fprintf(stderr, "towpath-ctl eval: %s\n", err.msg);
        tow_opts_free(opts);
        return rc < 0 ? 1 : 0;
    }
    rc = 0;
    if (rc == 0 && dump) rc = parse_dump(dump, &e.dump, &err);
    e.model.exact = numerics == 0;
    e.model.device = device;
    e.model.n_threads = (int32_t)threads;
    e.model.expert_aq = aq == 0 ? KERN_AQ_A128 : aq == 1 ? KERN_AQ_NONE : KERN_AQ_NVFP4;
    e.model.index_topk = (int32_t)topk;
    e.chunk_tokens = (int32_t)chunk;
    e.greedy = (int32_t)greedy;
    if (rc == 0 && e.model.exact) {
        /* exact implies f32 for both; another type asked for by name is a contradiction */
        if (tow_opts_source(opts, "kv-dtype") != TOW_FROM_DEFAULT && kv != KERN_KV_F32)
            rc = tow_fail(&err, TOW_ECONFIG, "--kv-dtype %s: --numerics exact keeps f32",
                          kv_names[kv]);
        if (rc == 0 && tow_opts_source(opts, "index-keys") != TOW_FROM_DEFAULT && ik != KERN_IK_F32)
            rc = tow_fail(&err, TOW_ECONFIG, "--index-keys %s: --numerics exact keeps f32",
                          ik_names[ik]);
        kv = KERN_KV_F32;
        ik = KERN_IK_F32;
    }
    e.model.kv_fmt = (enum kern_kv_fmt)kv;
    e.model.ik_fmt = (enum kern_ik_fmt)ik;
    if (rc == 0 && run) {
        rc = model_weights_guard(&err);
        if (rc == 0) rc = ctl_eval_run(&e, &err);
    }
    if (rc < 0) fprintf(stderr, "towpath-ctl eval: %s\n", err.msg);
    tow_opts_free(opts);
    return rc < 0 ? 1 : 0;
}
