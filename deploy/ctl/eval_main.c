/* ctl/eval_main.c - the flags of `towpath-ctl eval`. */
#include "deploy/ctl/eval.h"

#include "common/base/err.h"
#include "common/model/settings.h"
#include "deploy/ctl/client.h"
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

int ctl_eval_main(int argc, char **argv)
{
    struct ctl_eval e = {.greedy = -1};
    struct model_settings set = {0};
    const char *dump = NULL;
    int64_t chunk = 0, greedy = -1;
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
         .help = "safetensors with prompt (I32 token ids), and if wanted positions and greedy"},
        {.name = "out",
         .type = TOW_OPT_STRING,
         .out = &e.out_path,
         .required = true,
         .help = "safetensors to write"},
        MODEL_OPTS(&set),
        {.name = "chunk-tokens",
         .type = TOW_OPT_INT,
         .out = &chunk,
         .min = 1,
         .max = MODEL_MAX_ROWS,
         .def = "256",
         .unit = "tokens",
         .help = "rows of one prefill pass"},
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
        if (rc < 0) ctl_complain("eval", &err);
        tow_opts_free(opts);
        return rc < 0 ? CTL_EXIT_FAILED : CTL_EXIT_GOOD;
    }
    rc = model_settings_check(&set, opts, &err);
    if (rc == 0 && dump) rc = parse_dump(dump, &e.dump, &err);
    model_settings_take(&set, &e.model);
    e.chunk_tokens = (int32_t)chunk;
    e.greedy = (int32_t)greedy;
    if (rc == 0 && run) {
        rc = ctl_out_check("--out", e.out_path, &err);
        if (rc == 0) rc = model_weights_guard(&err);
        if (rc == 0) rc = ctl_eval_run(&e, &err);
    }
    if (rc < 0) ctl_complain("eval", &err);
    tow_opts_free(opts);
    return rc < 0 ? CTL_EXIT_FAILED : CTL_EXIT_GOOD;
}
