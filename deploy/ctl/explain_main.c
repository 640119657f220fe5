/* ctl/explain_main.c - the flags of `towpath-ctl explain`. */
#include "deploy/ctl/explain.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/model/settings.h"
#include "common/text/json.h"
#include "common/text/tokenizer.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/flags.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct settings {
    struct ctl_explain e;
    const char *record_dir;
    int64_t threads, chunk, steps, choice;
    bool json, text, verbose;
};

/* A request id within --record-dir, or a file: what holds a '/' or ends in .json. A name in .json
 * that is not here is looked for in --record-dir, whose listing gives such names. */
static int load(const struct settings *s, const char *what, struct text_record *rec,
                struct tow_err *err)
{
    char path[4096];
    const size_t n = strlen(what), m = strlen(TEXT_RECORD_SUFFIX);
    const bool suffix = n > m && !strcmp(what + n - m, TEXT_RECORD_SUFFIX);
    if (strchr(what, '/') || (suffix && (!s->record_dir || access(what, F_OK) == 0)))
        return text_record_load(rec, what, err);
    char id[TEXT_RECORD_MAX_ID + 2]; /* one byte too many is seen */
    snprintf(id, sizeof id, "%.*s", (int)(suffix ? n - m : n), what);
    if (!text_record_id_ok(id))
        return tow_fail(err, TOW_EINVAL,
                        "'%.80s' is neither a request id (at most %d letters, digits, '-', '_') "
                        "nor a file",
                        what, TEXT_RECORD_MAX_ID);
    if (!s->record_dir)
        return tow_fail(err, TOW_ECONFIG,
                        "%s: --record-dir names the folder that the router records to", what);
    if ((size_t)snprintf(path, sizeof path, "%s/%s" TEXT_RECORD_SUFFIX, s->record_dir, id) >=
        sizeof path)
        return tow_fail(err, TOW_ECONFIG, "--record-dir: longer than %zu bytes", sizeof path);
    int rc = text_record_load(rec, path, err);
    if (rc == TOW_ENOENT && access(s->record_dir, F_OK) < 0)
        tow_fail(err, rc, "--record-dir: %s: %m", s->record_dir);
    else if (rc == TOW_ENOENT)
        tow_fail(err, rc, "%s: no record of it in %s: never recorded, or removed to make room",
                 what, s->record_dir);
    return rc;
}

static void token_text(void *ctx, int32_t id, struct tow_buf *out)
{
    size_t n = 0;
    const uint8_t *s = text_tokenizer_peek(ctx, id, &n);
    json_put_string(out, s ? (const char *)s : "", n);
}

/* One line a row: its name when it begins, for a row may take minutes, and its time. */
static void show_progress(void *ctx, int32_t i, int32_t n, const char *name, double seconds)
{
    (void)ctx;
    if (seconds < 0)
        fprintf(stderr, "[%d/%d] %s:", i, n, name);
    else
        fprintf(stderr, " %.1f s\n", seconds);
    fflush(stderr);
}

static int explain(struct settings *s, const char *what, bool *good, struct tow_err *err)
{
    struct text_record rec = {0};
    struct ctl_explain_report *r = calloc(1, sizeof *r);
    struct text_tokenizer *tok = NULL;
    struct tow_buf out;
    char path[4096];
    tow_buf_init(&out, 0);
    int rc = r ? load(s, what, &rec, err) : tow_fail(err, TOW_ENOMEM, "out of memory");
    snprintf(path, sizeof path, "%s/tokenizer.json", s->e.model_dir);
    if (rc == 0 && s->text) rc = text_tokenizer_load(&tok, path, err);
    s->e.record = &rec;
    if (rc == 0) rc = model_weights_guard(err);
    if (rc == 0) rc = ctl_explain_run(&s->e, r, err);
    if (rc == 0) {
        *good = ctl_explain_good(r);
        if (s->json)
            ctl_explain_json(&s->e, r, &out);
        else
            ctl_explain_table(&s->e, r, tok ? token_text : NULL, tok, &out);
        if (tow_buf_failed(&out)) rc = tow_fail(err, TOW_ENOMEM, "no memory for the report");
    }
    if (rc == 0 && (fwrite(out.data, 1, out.len, stdout) != out.len || fflush(stdout) != 0))
        rc = tow_fail(err, TOW_EIO, "stdout: %s", strerror(errno));
    tow_buf_fini(&out);
    text_tokenizer_free(tok);
    text_record_fini(&rec);
    free(r);
    return rc;
}

int ctl_explain_main(int argc, char **argv)
{
    struct settings s = {.choice = 0};
    const struct tow_opt table[] = {
        {.name = "model",
         .type = TOW_OPT_STRING,
         .out = &s.e.model_dir,
         .required = true,
         .help = "checkpoint folder that served the request"},
        {.name = "record-dir",
         .type = TOW_OPT_STRING,
         .out = &s.record_dir,
         .otherwise = "only files can be named",
         .help = "the router's --record-dir"},
        MODEL_OPT_DEVICE(&s.e.device),
        MODEL_OPT_THREADS(&s.threads),
        {.name = "chunk-tokens",
         .type = TOW_OPT_INT,
         .out = &s.chunk,
         .min = 1,
         .max = MODEL_MAX_ROWS,
         .otherwise = "as recorded",
         .unit = "tokens",
         .help = "rows of one prefill pass of the baseline"},
        {.name = "choice",
         .type = TOW_OPT_INT,
         .out = &s.choice,
         .def = "0",
         .min = 0,
         .max = TEXT_RECORD_MAX_CHOICES - 1,
         .help = "which answer of a request with n above 1"},
        {.name = "max-tokens-compared",
         .type = TOW_OPT_INT,
         .out = &s.steps,
         .otherwise = "4096 of them, and logits of 64, or up to a recorded loss",
         .min = 1,
         .max = 1 << 16,
         .unit = "tokens",
         .help = "output tokens that are replayed, from the first, with their logits"},
        {.name = "only",
         .type = TOW_OPT_STRING,
         .out = &s.e.only,
         .otherwise = "all rows",
         .help = "list of rows by name or its beginning: again, chunk, batch, handover, prefix, "
                 "resume, threads, index, kv, topk"},
        {.name = "verbose",
         .type = TOW_OPT_BOOL,
         .out = &s.verbose,
         .def = "false",
         .help = "a line on stderr for each row as it runs, also where that is no terminal"},
        {.name = "text",
         .type = TOW_OPT_BOOL,
         .out = &s.text,
         .def = "false",
         .help = "print the text of tokens beside their ids"},
        {.name = "json",
         .type = TOW_OPT_BOOL,
         .out = &s.json,
         .def = "false",
         .help = "print JSON"},
    };
    const struct tow_opts_spec spec = {
        .program = "towpath-ctl explain",
        .about = "replays a recorded request in this process and says whether chunks, batches, the "
                 "hand-over, prefix reuse or key types change its answer; exits 0 when the answer "
                 "is the model's own, 1 when not, 2 when it could not be replayed",
        .operands = "REQUEST_ID|FILE",
        .max_operands = 1,
        .table = table,
        .n = sizeof table / sizeof *table};
    struct tow_opts *opts = NULL;
    struct tow_err err = {0};
    bool good = true;
    int rc = ctl_flags_read(&opts, &spec, argc, argv, &err);
    const bool run = rc == CTL_FLAGS_RUN;
    if (rc > 0 && s.e.only) {
        const int bad = ctl_explain_check_only(s.e.only, &err);
        if (bad < 0) rc = bad;
    }
    if (rc > 0 && run) {
        if (s.verbose || isatty(STDERR_FILENO)) s.e.on_progress = show_progress;
        s.e.n_threads = (int32_t)s.threads;
        s.e.chunk_tokens = (int32_t)s.chunk;
        s.e.max_steps = (int32_t)s.steps;
        s.e.choice = (uint32_t)s.choice;
        rc = tow_opts_n_operands(opts) == 1
                 ? explain(&s, tow_opts_operand(opts, 0), &good, &err)
                 : tow_fail(&err, TOW_ECONFIG, "REQUEST_ID or FILE is missing");
    }
    if (rc < 0) ctl_complain("explain", &err);
    tow_opts_free(opts);
    return rc < 0 ? CTL_EXIT_FAILED : good ? CTL_EXIT_GOOD : CTL_EXIT_NO;
}
