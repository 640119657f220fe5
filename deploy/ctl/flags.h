/* ctl/flags.h - how every subcommand reads its settings.
 *
 * Why      This program has a table for each subcommand, and all of them answer --help and
 *          --check-config alike. Files that they write are tried before the work, not after it.
 */
#ifndef CTL_FLAGS_H
#define CTL_FLAGS_H

#include "common/base/opt.h"

struct tow_err;

/* Exit status of every subcommand. */
enum {
    CTL_EXIT_GOOD = 0,
    CTL_EXIT_NO = 1,     /* what was asked for is not so: not serving, not found, a check failed */
    CTL_EXIT_FAILED = 2, /* it could not be done or asked; one line on stderr says why */
};

/* What to do after a good read. */
enum {
    CTL_FLAGS_DONE = 0, /* --help or --version was printed */
    CTL_FLAGS_RUN,
    /* --check-config: make the checks that need no server and no model, then exit 0 */
    CTL_FLAGS_CHECK,
};

/* Fills the table's values from flags, environment and --config. CTL_FLAGS_* or TOW_E*. The caller
 * frees *out with tow_opts_free() after every outcome. */
int ctl_flags_read(struct tow_opts **out, const struct tow_opts_spec *spec, int argc, char **argv,
                   struct tow_err *err);

/* Can a file be written there? Asked before the work whose result goes there. Nothing that is there
 * changes, and nothing is left behind. path NULL is fine. TOW_EIO names flag and path. */
int ctl_out_check(const char *flag, const char *path, struct tow_err *err);

#endif
