/* base/opt.h - the settings of a program: one table gives parsing, checking and --help.
 *
 * Sources  A flag (`--name value`, `--name=value`) wins over the environment (TOWPATH_NAME, dashes
 *          as underscores), that over `--config FILE` (`name = value` lines, # starts a comment
 *          line), that over the default. Of a flag given twice the last one counts; a key
 *          twice in a file is an error.
 * Errors   An unknown flag, key or TOWPATH_ variable is an error (a variable that only another
 *          Towpath program has is passed over); so is any value out of range. The
 *          message names where the value came from, the value, and the right range.
 * Secrets  Never a value: a setting names a file, and tow_secret_read() checks who else can read
 *          it.
 * Owner    main.c, before threads start.
 */
#ifndef TOW_BASE_OPT_H
#define TOW_BASE_OPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TOW_VERSION "0.1.0" /* of all four programs */

struct tow_buf;
struct tow_err;

struct tow_addr {
    char host[256]; /* name or number, without the brackets of [::1] */
    uint16_t port;  /* 0: any free one */
};

struct tow_strings {
    const char **items; /* owned by the tow_opts */
    size_t n;
};

enum tow_opt_type {                 /* *out is */
                    TOW_OPT_STRING, /* const char *, owned by the tow_opts */
                    TOW_OPT_INT,    /* int64_t, min to max */
                    TOW_OPT_BYTES, /* uint64_t, min to max; 512, 64K, 8M, 2G, 1T (powers of 1024) */
                    TOW_OPT_FLOAT, /* double, fmin to fmax, finite */
                    TOW_OPT_ENUM,  /* int, index in choices */
                    TOW_OPT_BOOL,  /* bool; --name alone means true, else --name=true|false */
                    TOW_OPT_ADDR,  /* struct tow_addr; ADDR:PORT or [ADDR]:PORT */
                    TOW_OPT_URLS,  /* struct tow_strings; comma-separated; choices: the schemes */
};

struct tow_opt {
    const char *name; /* lower case, dashes: "max-queued" */
    enum tow_opt_type type;
    void *out;
    const char *def;       /* default, as a user would write it; NULL: *out is left as it was */
    bool required;         /* must be given when def is NULL */
    const char *otherwise; /* shown in --help when def is NULL: "all cores" */
    int64_t min, max;
    double fmin, fmax;
    const char *const *choices; /* NULL-terminated: values of an ENUM, schemes of URLS */
    const char *unit;           /* "ms", "tokens"; NULL when it has none */
    const char *help;           /* one line */
};

/* Entries of every server's table: --log-level and --log-format into two ints. Needs base/log.h. */
#define TOW_OPTS_LOG(level, format)                                                                \
    {.name = "log-level",                                                                          \
     .type = TOW_OPT_ENUM,                                                                         \
     .out = (level),                                                                               \
     .def = "info",                                                                                \
     .choices = tow_log_levels,                                                                    \
     .help = "how much to log"},                                                                   \
    {                                                                                              \
        .name = "log-format", .type = TOW_OPT_ENUM, .out = (format), .def = "text",                \
        .choices = tow_log_formats, .help = "text or JSON lines"                                   \
    }

enum tow_opt_source { TOW_FROM_DEFAULT, TOW_FROM_FILE, TOW_FROM_ENV, TOW_FROM_FLAG };

struct tow_opts;

/* All borrowed as long as the tow_opts lives. */
struct tow_opts_spec {
    const char *program;  /* "towpath-router" */
    const char *about;    /* one line for --help */
    const char *operands; /* "FILE" for the usage line; NULL when there are none */
    size_t max_operands;
    const struct tow_opt *table;
    size_t n;
};

enum tow_opts_do { TOW_OPTS_RUN, TOW_OPTS_CHECK, TOW_OPTS_HELP, TOW_OPTS_VERSION };

/* Reads all sources and fills every *out. argv[0] is skipped; env is environ or NULL for none.
 * On 0, *what says how to go on: RUN; CHECK (--check-config: make the checks that need other files,
 * then exit 0 without starting); HELP, VERSION (tow_opts_tell(), exit 0). Errors are TOW_ECONFIG.
 * The caller frees with tow_opts_free() when the settings are no longer used. */
int tow_opts_new(struct tow_opts **out, const struct tow_opts_spec *spec, int argc,
                 const char *const *argv, const char *const *env, enum tow_opts_do *what,
                 struct tow_err *err);
void tow_opts_free(struct tow_opts *o); /* NULL is fine; strings in *out become invalid */

enum tow_opt_source tow_opts_source(const struct tow_opts *o, const char *name);
size_t tow_opts_n_operands(const struct tow_opts *o);
const char *tow_opts_operand(const struct tow_opts *o, size_t i); /* borrowed from argv */

void tow_opts_help(const struct tow_opts_spec *spec, struct tow_buf *out);
/* Prints what HELP or VERSION asks for to stdout; false for the others. */
bool tow_opts_tell(const struct tow_opts_spec *spec, enum tow_opts_do what);
void tow_print_version(const char *program); /* one line to stdout */
/* Appends "name=value name=value": the settings that are not at their default,
 * for the start line. */
void tow_opts_print(const struct tow_opts *o, struct tow_buf *out);

/* Also used on their own. `what` names the value in the message ("--http"). */
int tow_addr_parse(const char *text, const char *what, struct tow_addr *out, struct tow_err *err);
int tow_bytes_parse(const char *text, const char *what, uint64_t *out, struct tow_err *err);

/* Appends a secret file's bytes to *out, without the line end that closes it. Refused: what is not
 * a regular file, is empty, is larger than max_bytes, belongs to another user than root or us, or
 * can be read by others or written by the group (0640 is the widest). `what` names the setting. */
int tow_secret_read(const char *path, const char *what, size_t max_bytes, struct tow_buf *out,
                    struct tow_err *err);

#endif
