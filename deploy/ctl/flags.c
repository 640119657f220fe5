/* ctl/flags.c - see flags.h. */
#include "deploy/ctl/flags.h"

#include "common/base/buf.h"
#include "common/base/err.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

/* The names of all subcommands' settings that not every one has. A command that gets a new one adds it here;
 * tests/cluster/test_ctl.py compares this list with each --help. */
static const char *const names[] = {"model",
                                    "tokens",
                                    "out",
                                    "numerics",
                                    "device",
                                    "index-keys",
                                    "kv-dtype",
                                    "index-topk",
                                    "dump",
                                    "chunk-tokens",
                                    "expert-activations",
                                    "threads",
                                    "handover",
                                    "greedy",
                                    "force",
                                    "url",
                                    "api-key-file",
                                    "timeout",
                                    "system",
                                    "thinking",
                                    "max-tokens",
                                    "stats",
                                    "max-wait",
                                    "json",
                                    "temperature",
                                    "all",
                                    NULL};

/* variable is "TOWPATH_MAX_TOKENS=..."; name "max-tokens". */
static bool is_variable_of(const char *variable, const char *name)
{
    const char *v = variable + strlen("TOWPATH_");
    for (; *name; v++, name++)
        if (*v != (*name == '-' ? '_' : (char)toupper((unsigned char)*name))) return false;
    return *v == '=';
}

static bool belongs_elsewhere(const char *variable, const struct tow_opts_spec *spec)
{
    if (strncmp(variable, "TOWPATH_", 8) != 0) return false;
    for (size_t i = 0; i < spec->n; i++)
        if (is_variable_of(variable, spec->table[i].name)) return false;
    for (size_t i = 0; names[i]; i++)
        if (is_variable_of(variable, names[i])) return true;
    return false;
}

int ctl_flags_read(struct tow_opts **out, const struct tow_opts_spec *spec, int argc, char **argv,
                   struct tow_err *err)
{
    size_t n = 0, kept = 0;
    *out = NULL;
    while (environ[n]) n++;
    const char **env = calloc(n + 1, sizeof *env);
    if (!env) return tow_fail(err, TOW_ENOMEM, "no memory for the environment");
    for (size_t i = 0; i < n; i++)
        if (!belongs_elsewhere(environ[i], spec)) env[kept++] = environ[i];
    enum tow_opts_do what = TOW_OPTS_RUN;
    int rc = tow_opts_new(out, spec, argc, (const char *const *)argv, env, &what, err);
    free(env);
    if (rc < 0) return rc;
    if (what == TOW_OPTS_HELP) {
        struct tow_buf help;
        tow_buf_init(&help, 0);
        tow_opts_help(spec, &help);
        fputs(help.data ? help.data : "", stdout);
        tow_buf_fini(&help);
    }
    return what == TOW_OPTS_HELP    ? CTL_FLAGS_DONE
           : what == TOW_OPTS_CHECK ? CTL_FLAGS_CHECK
                                    : CTL_FLAGS_RUN;
}
