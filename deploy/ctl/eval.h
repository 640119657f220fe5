/* ctl/eval.h - `towpath-ctl eval`: the engine in this process, on token ids, with everything it
 * computes dumped.
 *
 * Why      It is how anyone outside checks the engine: input and output are safetensors with the
 *          names, shapes and types of the golden files (tests/golden/data/README.md), so a golden
 *          file is itself a valid input.
 */
#ifndef CTL_EVAL_H
#define CTL_EVAL_H

#include "common/model/forward.h"

struct tow_err;

enum ctl_dump {
    CTL_DUMP_LOGITS = 1,
    CTL_DUMP_HIDDEN = 2,
    CTL_DUMP_INDEX = 4,
    CTL_DUMP_EXPERTS = 8,
    CTL_DUMP_MTP = 16,
    CTL_DUMP_STATE = 32,
};

struct ctl_eval {
    const char *model_dir, *tokens_path, *out_path;
    struct model_options model; /* max_rows is chosen here */
    int32_t chunk_tokens;       /* 0 = 256 */
    int32_t greedy;             /* steps; -1 = as many as the input's `greedy` holds, else none */
    bool handover;              /* through pages and tail before the first decoded token */
    bool force;                 /* continue with the input's `greedy` */
    unsigned dump;              /* CTL_DUMP_*; 0 = everything the checkpoint has */
};

/* 0, or TOW_E* with one line that names the file, field or flag. */
int ctl_eval_run(const struct ctl_eval *e, struct tow_err *err);

/* The subcommand with its flags; returns the exit status. */
int ctl_eval_main(int argc, char **argv);

#endif
