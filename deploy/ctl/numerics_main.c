/* ctl/numerics_main.c - the flags of `towpath-ctl numerics`. */
#include "deploy/ctl/numerics.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/model/settings.h"
#include "common/model/weights.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/flags.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int write_report(const char *path, const struct tow_buf *text, struct tow_err *err)
{
    FILE *f = fopen(path, "wb");
    if (!f) return tow_fail(err, TOW_EIO, "--report %s: %s", path, strerror(errno));
    bool good = fwrite(text->data, 1, text->len, f) == text->len;
    good = fclose(f) == 0 && good;
    return good ? 0 : tow_fail(err, TOW_EIO, "--report %s: %s", path, strerror(errno));
}

static int say(const struct ctl_numerics_report *r, const char *model_dir, bool json,
               const char *report, struct tow_err *err)
{
    struct tow_buf text, page;
    int rc = 0;
    tow_buf_init(&text, 0);
    tow_buf_init(&page, 0);
    (json ? ctl_numerics_json : ctl_numerics_table)(r, &text);
    ctl_numerics_markdown(r, model_dir, &page);
    if (tow_buf_failed(&text) || tow_buf_failed(&page))
        rc = tow_fail(err, TOW_ENOMEM, "numerics: no memory for the report");
    if (rc == 0 && (fwrite(text.data, 1, text.len, stdout) != text.len || fflush(stdout) != 0))
        rc = tow_fail(err, TOW_EIO, "stdout: %s", strerror(errno));
    if (rc == 0 && report) rc = write_report(report, &page, err);
    tow_buf_fini(&text);
    tow_buf_fini(&page);
    return rc;
}

static int run(const struct ctl_numerics *n, bool json, const char *report, int32_t *failed,
               struct tow_err *err)
{
    struct ctl_numerics_report *r = calloc(1, sizeof *r);
    if (!r) return tow_fail(err, TOW_ENOMEM, "numerics: no memory");
    int rc = model_weights_guard(err);
    if (rc == 0) rc = ctl_numerics_run(n, r, err);
    if (rc == 0 || r->n_rows > 0) {
        struct tow_err own = {0};
        int said = say(r, n->model_dir, json, report, rc == 0 ? err : &own);
        if (rc == 0) rc = said;
    }
    *failed = r->n_failed;
    ctl_numerics_fini(r);
    free(r);
    return rc;
}

int ctl_numerics_main(int argc, char **argv)
{
    struct ctl_numerics n = {0};
    const char *report = NULL;
    int64_t threads = 0, tokens = 1024;
    bool json = false;
    const struct tow_opt table[] = {
        {.name = "model",
         .type = TOW_OPT_STRING,
         .out = &n.model_dir,
         .required = true,
         .help = "checkpoint folder"},
        MODEL_OPT_DEVICE(&n.device),
        MODEL_OPT_THREADS(&threads),
        {.name = "tokens",
         .type = TOW_OPT_INT,
         .out = &tokens,
         .min = CTL_NUMERICS_MIN_TOKENS,
         .max = 65536,
         .def = "1024",
         .unit = "tokens",
         .help = "length of the sample prompt whose activations are used"},
        {.name = "json", .type = TOW_OPT_BOOL, .out = &json, .def = "false", .help = "print JSON"},
        {.name = "report",
         .type = TOW_OPT_STRING,
         .out = &report,
         .otherwise = "none",
         .help = "Markdown page to write"},
    };
    const struct tow_opts_spec spec = {
        .program = "towpath-ctl numerics",
        .about = "audits kernels, formats and the hand-over on this checkpoint and device; exits 0 "
                 "when all checks pass, 1 when one fails, 2 when it could not be made",
        .table = table,
        .n = sizeof table / sizeof *table};
    struct tow_opts *opts = NULL;
    struct tow_err err = {0};
    int32_t failed = 0;
    int rc = ctl_flags_read(&opts, &spec, argc, argv, &err);
    if (rc == CTL_FLAGS_RUN) {
        n.n_threads = (int32_t)threads;
        n.n_tokens = (int32_t)tokens;
        rc = ctl_out_check("--report", report, &err);
        if (rc == 0) rc = run(&n, json, report, &failed, &err);
    }
    if (rc < 0) ctl_complain("numerics", &err);
    tow_opts_free(opts);
    return rc < 0 ? CTL_EXIT_FAILED : failed > 0 ? CTL_EXIT_NO : CTL_EXIT_GOOD;
}
