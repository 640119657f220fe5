/* ctl/flags.c - see flags.h. */
#include "deploy/ctl/flags.h"

#include "common/base/err.h"

extern char **environ;

int ctl_flags_read(struct tow_opts **out, const struct tow_opts_spec *spec, int argc, char **argv,
                   struct tow_err *err)
{
    *out = NULL;
    enum tow_opts_do what = TOW_OPTS_RUN;
    int rc = tow_opts_new(out, spec, argc, (const char *const *)argv, (const char *const *)environ,
                          &what, err);
    if (rc < 0) return rc;
    if (tow_opts_tell(spec, what)) return CTL_FLAGS_DONE;
    return what == TOW_OPTS_CHECK ? CTL_FLAGS_CHECK : CTL_FLAGS_RUN;
}
