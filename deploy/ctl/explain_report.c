/* ctl/explain_report.c - a replay as a table, as JSON, and as one paragraph. */
#include "deploy/ctl/explain.h"

#include "common/base/buf.h"
#include "common/text/json.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void put_token(struct tow_buf *out, int32_t id, ctl_token_text text_of, void *ctx)
{
    if (id < 0) {
        tow_buf_puts(out, "nothing");
        return;
    }
    tow_buf_printf(out, "%" PRId32, id);
    if (!text_of) return;
    tow_buf_putc(out, ' ');
    text_of(ctx, id, out);
}

static const struct text_record_choice *choice_of(const struct ctl_explain *e)
{
    return &e->record->choices[e->choice];
}

static const char *result_of(const struct ctl_explain_row *row)
{
    if (row->skipped) return "not run";
    if (row->must && row->n_differ == 0 && row->note[0]) return "FAIL";
    if (row->n_differ == 0) return row->must ? "PASS" : "same";
    if (row->must) return "FAIL";
    return row->token_step < 0 ? "same tokens" : "other token";
}

static bool isa_differs(const struct ctl_explain_report *r)
{
    return r->recorded_isa[0] && strcmp(r->isa, r->recorded_isa) != 0;
}

/* ------------------------------------------------------------------ table */

static void put_head(const struct ctl_explain *e, const struct ctl_explain_report *r,
                     struct tow_buf *out)
{
    const struct text_record *rec = e->record;
    const struct text_record_choice *c = choice_of(e);
    tow_buf_printf(out,
                   "request    %s, choice %" PRIu32 ": %d prompt tokens, %d output tokens, %s\n",
                   rec->id, e->choice, r->n_prompt, r->n_output, c->finish);
    tow_buf_puts(out, "ran on     ");
    for (uint32_t i = 0; i < c->n_attempts; i++) {
        const struct text_record_attempt *a = &c->attempts[i];
        if (i) tow_buf_printf(out, "; from output %" PRIu32 " on ", a->first_output);
        tow_buf_printf(out, "%s and %s", rec->workers[a->prefill].name,
                       rec->workers[a->decode].name);
    }
    tow_buf_puts(out, c->n_attempts ? "\n" : "not known\n");
    tow_buf_printf(out,
                   "replayed   %s, %s, %d thread%s; chunk %d, kv %s, index keys %s, top-k %d, "
                   "numerics %s; temperature %g, seed %" PRIu64 "\n",
                   r->fingerprint, r->isa, r->n_threads, r->n_threads == 1 ? "" : "s", r->chunk,
                   r->kv, r->ik, r->topk, r->numerics, (double)rec->temperature, c->seed);
    if (r->note[0]) tow_buf_printf(out, "note       %s\n", r->note);
}

static void put_drawn(const struct ctl_explain_report *r, ctl_token_text text_of, void *ctx,
                      struct tow_buf *out)
{
    if (r->drawn_step < 0 && r->n_drawn < r->n_whole) {
        tow_buf_printf(out,
                       "tokens     PASS  the first %d of %d drawn again (--max-tokens-compared)\n",
                       r->n_drawn, r->n_whole);
        return;
    }
    if (r->drawn_step < 0) {
        tow_buf_printf(out, "tokens     PASS  all %d%s drawn again\n", r->n_drawn,
                       r->n_drawn > r->n_output ? ", the end among them," : "");
        return;
    }
    tow_buf_printf(out, "tokens     FAIL  step %d: recorded ", r->drawn_step);
    if (r->recorded < 0)
        tow_buf_puts(out, "an end token");
    else
        put_token(out, r->recorded, text_of, ctx);
    tow_buf_printf(out, " (logit %.6g), drawn here ", (double)r->recorded_logit);
    put_token(out, r->drawn, text_of, ctx);
    tow_buf_printf(out, " (logit %.6g, gap %.3g)\n", (double)r->drawn_logit,
                   (double)r->drawn_logit - (double)r->recorded_logit);
}

static void put_row(const struct ctl_explain_row *row, ctl_token_text text_of, void *ctx,
                    struct tow_buf *out)
{
    tow_buf_printf(out, "%-14s %-12s ", row->name, result_of(row));
    if (row->skipped) {
        tow_buf_printf(out, "%s\n", row->note);
        return;
    }
    char differ[48], largest[24] = "-", step[16] = "-";
    snprintf(differ, sizeof differ, "%" PRId64 " of %" PRId64, row->n_differ, row->n_logits);
    if (row->n_differ > 0) {
        snprintf(largest, sizeof largest, "%.3g", row->max_abs);
        snprintf(step, sizeof step, "%d", row->first_step);
    }
    tow_buf_printf(out, "%-22s %-8s %-5s", differ, largest, step);
    tow_buf_printf(out, " %s", row->meaning);
    if (row->token_step >= 0) {
        tow_buf_printf(out, "; step %d: ", row->token_step);
        put_token(out, row->token_was, text_of, ctx);
        tow_buf_puts(out, " -> ");
        put_token(out, row->token_is, text_of, ctx);
    }
    if (row->note[0]) tow_buf_printf(out, "\n%-27s %s", "", row->note);
    tow_buf_putc(out, '\n');
}

void ctl_explain_table(const struct ctl_explain *e, const struct ctl_explain_report *r,
                       ctl_token_text text_of, void *ctx, struct tow_buf *out)
{
    put_head(e, r, out);
    put_drawn(r, text_of, ctx, out);
    for (int must = 1; must >= 0; must--) {
        bool first = true;
        for (int32_t i = 0; i < r->n_rows; i++) {
            if (r->rows[i].must != (must == 1)) continue;
            if (first)
                tow_buf_printf(out, "\n%-27s %-22s %-8s %-5s %s\n",
                               must ? "must change nothing" : "may change the answer",
                               "logits that differ", "largest", "step", "what");
            first = false;
            put_row(&r->rows[i], text_of, ctx, out);
        }
    }
    tow_buf_putc(out, '\n');
    ctl_explain_verdict(r, text_of, ctx, out);
    tow_buf_putc(out, '\n');
}

/* ------------------------------------------------------------------ verdict */

/* Were rows of the kind run? *note: why one was not, "" when --only left it out. */
static bool has_run(const struct ctl_explain_report *r, const struct ctl_explain_kind *k,
                    const char **note)
{
    bool run = false;
    *note = "";
    for (int32_t i = 0; i < r->n_rows; i++) {
        if (ctl_explain_kind_of(r->rows[i].name) != k) continue;
        run = run || !r->rows[i].skipped;
        if (r->rows[i].skipped) *note = r->rows[i].note;
    }
    if (run) *note = "";
    return run;
}

/* Kinds that were run, or those that were not with the reason, as a list between before and after;
 * nothing when there are none. */
static void put_kinds(const struct ctl_explain_report *r, bool must, bool run, const char *before,
                      const char *after, struct tow_buf *out)
{
    int n = 0;
    for (const struct ctl_explain_kind *k = ctl_explain_kinds; k->name; k++) {
        const char *note;
        if (must != (k->cause != NULL) || has_run(r, k, &note) != run) continue;
        tow_buf_printf(out, "%s%s", n++ ? ", " : before, k->what);
        if (*note) tow_buf_printf(out, " (%s)", note);
    }
    if (n) tow_buf_puts(out, after);
}

static void put_failures(const struct ctl_explain_report *r, struct tow_buf *out)
{
    bool first = true;
    for (int32_t i = 0; i < r->n_rows; i++) {
        const struct ctl_explain_row *row = &r->rows[i];
        if (!row->must || strcmp(result_of(row), "FAIL") != 0) continue;
        tow_buf_printf(out, "%s%s (%s: ", first ? "FAIL: " : "; ",
                       ctl_explain_kind_of(row->name)->cause, row->name);
        if (row->n_differ > 0)
            tow_buf_printf(out, "%" PRId64 " of %" PRId64 " logits differ, from step %d on%s",
                           row->n_differ, row->n_logits, row->first_step,
                           row->token_step >= 0 ? ", and another token is drawn" : "");
        if (row->note[0]) tow_buf_printf(out, "%s%s", row->n_differ > 0 ? "; " : "", row->note);
        tow_buf_puts(out, ")");
        first = false;
    }
    if (!first)
        tow_buf_puts(out, ". That is a fault of this build, machine or memory and no matter of the "
                          "model: run towpath-ctl numerics and report it.");
}

static bool same_change(const struct ctl_explain_row *a, const struct ctl_explain_row *b)
{
    return !a->must && !b->must && a->token_step == b->token_step && a->token_was == b->token_was &&
           a->token_is == b->token_is;
}

/* Rows with one and the same change are named together. */
static void put_settings(const struct ctl_explain_report *r, ctl_token_text text_of, void *ctx,
                         struct tow_buf *out)
{
    int n_run = 0, n_other = 0;
    for (int32_t i = 0; i < r->n_rows; i++) {
        const struct ctl_explain_row *row = &r->rows[i];
        bool told = false;
        if (row->must || row->skipped) continue;
        n_run++;
        for (int32_t k = 0; k < i; k++) told |= same_change(&r->rows[k], row);
        if (row->token_step < 0 || told) continue;
        tow_buf_puts(out, n_other++ ? "; " : " Settings: ");
        int n = 0;
        for (int32_t k = i; k < r->n_rows; k++)
            if (same_change(&r->rows[k], row))
                tow_buf_printf(out, n++ ? ", %s" : "%s", r->rows[k].name);
        tow_buf_printf(out, " change%s the token at step %d from ", n == 1 ? "s" : "",
                       row->token_step);
        put_token(out, row->token_was, text_of, ctx);
        tow_buf_puts(out, " to ");
        put_token(out, row->token_is, text_of, ctx);
    }
    if (n_other)
        tow_buf_puts(out, ".");
    else if (n_run)
        put_kinds(r, false, true, " No other setting tried here (", ") changes a token either.",
                  out);
    put_kinds(r, false, false, " Settings not tried: ", ".", out);
}

void ctl_explain_verdict(const struct ctl_explain_report *r, ctl_token_text text_of, void *ctx,
                         struct tow_buf *out)
{
    int n_must = 0;
    int64_t n_logits = 0;
    for (int32_t i = 0; i < r->n_rows; i++) {
        n_must += r->rows[i].must && !r->rows[i].skipped;
        n_logits += r->rows[i].must ? r->rows[i].n_logits : 0;
    }
    put_failures(r, out);
    if (r->drawn_step >= 0) {
        tow_buf_printf(
            out,
            "%sthe cluster's answer is not what one process computes: at step %d it gave "
            "another token than the recorded sampler draws here.",
            r->n_failed ? " And " : "FAIL: ", r->drawn_step);
        if (isa_differs(r))
            tow_buf_printf(
                out,
                " It ran on %s and was replayed on %s, whose products may differ in the "
                "last bits (numerics.md): replay it on a machine of the first kind before "
                "anything else.",
                r->recorded_isa, r->isa);
        else if (!r->n_failed)
            tow_buf_printf(out,
                           "%s so look at the workers it ran on: their files of the checkpoint "
                           "(sha256sum of each, beside those here: a fingerprint samples 64 bytes "
                           "of a tensor), towpath-ctl numerics, memory errors, their build.",
                           n_must ? " No way of computing it that was tried here gives that,"
                                  : " No other way of computing it was tried;");
    }
    if (ctl_explain_good(r)) {
        if (r->n_drawn < r->n_whole)
            tow_buf_printf(
                out,
                "Of the first %d of %d tokens the answer is the model's own: one process "
                "draws the same; the others were not compared (--max-tokens-compared)",
                r->n_drawn, r->n_whole);
        else
            tow_buf_printf(out,
                           "The answer is the model's own: one process draws the same %d token%s",
                           r->n_drawn, r->n_drawn == 1 ? "" : "s");
        if (n_must) {
            char before[80] = ", and another way to compute them (";
            if (n_must > 1)
                snprintf(before, sizeof before, ", and none of %d other ways to compute them (",
                         n_must);
            put_kinds(r, true, true, before, ")", out);
            tow_buf_printf(out, " changes %s bit of %" PRId64 " logits",
                           n_must > 1 ? "one" : "not one", n_logits);
            if (r->n_steps < r->n_whole) tow_buf_printf(out, " of the first %d steps", r->n_steps);
        }
        tow_buf_puts(out, ".");
        const char *note;
        if (has_run(r, ctl_explain_kind_of("handover"), &note))
            tow_buf_puts(out, r->n_steps < r->n_whole
                                  ? " Disaggregation is ruled out for those steps."
                                  : " Disaggregation is ruled out.");
    }
    put_kinds(r, true, false, " Not run, so not ruled out: ", ".", out);
    put_settings(r, text_of, ctx, out);
    tow_buf_putc(out, '\n');
}

/* ------------------------------------------------------------------ JSON */

static void put_text(struct tow_buf *out, const char *key, const char *text)
{
    tow_buf_printf(out, "\"%s\": ", key);
    json_put_string(out, text, strlen(text));
    tow_buf_puts(out, ", ");
}

static void put_number(struct tow_buf *out, const char *key, double v)
{
    tow_buf_printf(out, "\"%s\": ", key);
    json_put_double(out, v);
    tow_buf_puts(out, ", ");
}

/* null for -1. */
static void put_step(struct tow_buf *out, const char *key, int32_t v)
{
    if (v < 0)
        tow_buf_printf(out, "\"%s\": null, ", key);
    else
        tow_buf_printf(out, "\"%s\": %" PRId32 ", ", key, v);
}

static void put_json_row(const struct ctl_explain_row *row, struct tow_buf *out)
{
    tow_buf_putc(out, '{');
    put_text(out, "name", row->name);
    tow_buf_printf(out, "\"must_be_identical\": %s, ", row->must ? "true" : "false");
    put_text(out, "result", result_of(row));
    put_text(out, "meaning", row->meaning);
    put_text(out, "note", row->note);
    put_step(out, "first_step", row->first_step);
    put_step(out, "token_step", row->token_step);
    if (row->token_step >= 0) {
        put_step(out, "token_was", row->token_was);
        put_step(out, "token_is", row->token_is);
    }
    put_number(out, "largest", row->max_abs);
    tow_buf_printf(out, "\"differ\": %" PRId64 ", \"logits\": %" PRId64 "}", row->n_differ,
                   row->n_logits);
}

void ctl_explain_json(const struct ctl_explain *e, const struct ctl_explain_report *r,
                      struct tow_buf *out)
{
    struct tow_buf verdict;
    tow_buf_putc(out, '{');
    put_text(out, "id", e->record->id);
    put_text(out, "fingerprint", r->fingerprint);
    put_text(out, "isa", r->isa);
    put_text(out, "recorded_isa", r->recorded_isa);
    put_text(out, "numerics", r->numerics);
    put_text(out, "kv_dtype", r->kv);
    put_text(out, "index_keys", r->ik);
    put_text(out, "finish", choice_of(e)->finish);
    put_text(out, "note", r->note);
    tow_buf_printf(out,
                   "\"choice\": %" PRIu32 ", \"threads\": %d, \"chunk_tokens\": %d, "
                   "\"index_topk\": %d, \"prompt_tokens\": %d, \"output_tokens\": %d, "
                   "\"steps\": %d, \"attempts\": %" PRIu32 ", ",
                   e->choice, r->n_threads, r->chunk, r->topk, r->n_prompt, r->n_output, r->n_steps,
                   choice_of(e)->n_attempts);
    tow_buf_printf(out,
                   "\"good\": %s, \"failed\": %d, \"tokens\": {\"drawn_again\": %s, "
                   "\"compared\": %d, \"of\": %d, ",
                   ctl_explain_good(r) ? "true" : "false", r->n_failed,
                   r->drawn_step < 0 ? "true" : "false", r->n_drawn, r->n_whole);
    if (r->drawn_step >= 0) {
        put_step(out, "recorded", r->recorded);
        put_step(out, "drawn", r->drawn);
        put_number(out, "recorded_logit", (double)r->recorded_logit);
        put_number(out, "drawn_logit", (double)r->drawn_logit);
    }
    put_step(out, "first_other_step", r->drawn_step);
    out->len -= tow_buf_failed(out) ? 0 : 2; /* the last comma */
    tow_buf_puts(out, "}, ");
    put_number(out, "seconds", r->seconds);
    tow_buf_init(&verdict, 0);
    ctl_explain_verdict(r, NULL, NULL, &verdict);
    if (verdict.len) verdict.data[verdict.len - 1] = 0; /* its line end */
    put_text(out, "verdict", verdict.data ? verdict.data : "");
    tow_buf_fini(&verdict);
    tow_buf_puts(out, "\"rows\": [");
    for (int32_t i = 0; i < r->n_rows; i++) {
        if (i) tow_buf_puts(out, ", ");
        put_json_row(&r->rows[i], out);
    }
    tow_buf_puts(out, "]}\n");
}
