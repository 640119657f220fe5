/* ctl/numerics_report.c - the audit as a table, as JSON, as a Markdown page. */
#include "deploy/ctl/numerics.h"

#include "common/base/buf.h"
#include "common/text/json.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *verdict(const struct ctl_numerics_row *r)
{
    return r->pass ? "PASS" : "FAIL";
}

static void bound_text(const struct ctl_numerics_row *r, char out[32])
{
    snprintf(out, 32, "%s %.4g", r->at_least ? ">=" : "<=", r->bound);
}

static void put_summary(const struct ctl_numerics_report *r, struct tow_buf *out)
{
    tow_buf_printf(out, "%d of %d checks pass", r->n_rows - r->n_failed, r->n_rows);
    const char *before = "; failed: ";
    for (int32_t i = 0; i < r->n_rows; i++) {
        if (r->rows[i].pass) continue;
        tow_buf_printf(out, "%s%s", before, r->rows[i].name);
        before = ", ";
    }
    if (r->broken_off[0])
        tow_buf_printf(out, "; broken off, the rest is not run: %s", r->broken_off);
}

static void put_setting(const struct ctl_numerics_report *r, struct tow_buf *out)
{
    tow_buf_printf(out, "checkpoint %s, device %s (%s), %d threads, %d tokens %s, %.1f s",
                   r->fingerprint, r->device, r->isa, r->n_threads, r->n_tokens,
                   r->sample_is_text ? "of sample text" : "drawn from a seed (no tokenizer.json)",
                   r->seconds);
}

void ctl_numerics_table(const struct ctl_numerics_report *r, struct tow_buf *out)
{
    tow_buf_printf(out, "%-20s %11s %-14s %s  %s\n", "check", "measured", "bound", "    ",
                   "meaning");
    for (int32_t i = 0; i < r->n_rows; i++) {
        const struct ctl_numerics_row *row = &r->rows[i];
        char bound[32];
        bound_text(row, bound);
        tow_buf_printf(out, "%-20s %11.4g %-14s %s  %s\n", row->name, row->value, bound,
                       verdict(row), row->meaning);
        if (!row->pass) tow_buf_printf(out, "%-20s %s: %s\n", "", row->what, row->detail);
    }
    put_setting(r, out);
    tow_buf_puts(out, "\n");
    put_summary(r, out);
    tow_buf_puts(out, "\n");
}

static void put_text(struct tow_buf *out, const char *key, const char *text)
{
    tow_buf_printf(out, "\"%s\":", key);
    json_put_string(out, text, strlen(text));
    tow_buf_puts(out, ",");
}

static void put_number(struct tow_buf *out, const char *key, double v)
{
    tow_buf_printf(out, "\"%s\":", key);
    json_put_double(out, v);
    tow_buf_puts(out, ",");
}

void ctl_numerics_json(const struct ctl_numerics_report *r, struct tow_buf *out)
{
    tow_buf_puts(out, "{");
    put_text(out, "checkpoint", r->fingerprint);
    put_text(out, "device", r->device);
    put_text(out, "isa", r->isa);
    tow_buf_printf(out, "\"threads\":%d,\"tokens\":%d,\"sample_is_text\":%s,", r->n_threads,
                   r->n_tokens, r->sample_is_text ? "true" : "false");
    put_number(out, "seconds", r->seconds);
    if (r->broken_off[0]) put_text(out, "broken_off", r->broken_off);
    tow_buf_printf(out, "\"failed\":%d,\"rows\":[", r->n_failed);
    for (int32_t i = 0; i < r->n_rows; i++) {
        const struct ctl_numerics_row *row = &r->rows[i];
        tow_buf_puts(out, i ? ",\n{" : "\n{");
        put_text(out, "name", row->name);
        put_number(out, "value", row->value);
        put_number(out, "bound", row->bound);
        put_text(out, "sense", row->at_least ? "at_least" : "at_most");
        put_text(out, "what", row->what);
        put_text(out, "meaning", row->meaning);
        put_text(out, "detail", row->detail);
        tow_buf_printf(out, "\"pass\":%s}", row->pass ? "true" : "false");
    }
    tow_buf_puts(out, "],\n\"page_digests\":[");
    for (uint32_t i = 0; i < r->n_pages; i++)
        tow_buf_printf(out, "%s\"%016" PRIx64 "\"", i ? "," : "", r->digests[i]);
    tow_buf_puts(out, "]}\n");
}

void ctl_numerics_markdown(const struct ctl_numerics_report *r, const char *model_dir,
                           struct tow_buf *out)
{
    tow_buf_printf(out, "# Numerics audit of `%s`\n\n**", model_dir);
    put_summary(r, out);
    tow_buf_puts(out, ".** ");
    put_setting(r, out);
    tow_buf_puts(
        out, ".\n\n| check | measured | bound | | meaning |\n| --- | --- | --- | --- | --- |\n");
    for (int32_t i = 0; i < r->n_rows; i++) {
        const struct ctl_numerics_row *row = &r->rows[i];
        char bound[32];
        bound_text(row, bound);
        tow_buf_printf(out, "| `%s` | %.4g | %s | %s | %s |\n", row->name, row->value, bound,
                       row->pass ? "PASS" : "**FAIL**", row->meaning);
    }
    tow_buf_puts(out,
                 "\n## What was measured\n\n| check | value | details |\n| --- | --- | --- |\n");
    for (int32_t i = 0; i < r->n_rows; i++)
        tow_buf_printf(out, "| `%s` | %s | %s |\n", r->rows[i].name, r->rows[i].what,
                       r->rows[i].detail);
    tow_buf_puts(out, "\n## Pages handed over\n\nXXH3-64 of each page's parts, as sent; "
                      "`handover.digest` counts the copies that did not match.\n\n");
    for (uint32_t i = 0; i < r->n_pages; i++)
        tow_buf_printf(out, "%s`%016" PRIx64 "`", i % 4 ? " " : i ? "\n" : "", r->digests[i]);
    tow_buf_puts(out, "\n");
}
