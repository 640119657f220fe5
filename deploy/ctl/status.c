/* ctl/status.c - see status.h. Columns of load are found by looking: a router that tells more
 * shows more. */
#include "deploy/ctl/status.h"

#include "common/base/err.h"
#include "common/text/json.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/flags.h"

#include <stdio.h>
#include <string.h>

enum { MAX_COLUMNS = 40, MAX_CELL = 48 };

struct column {
    const char *outer, *inner; /* keys, borrowed from the tree; inner NULL for a plain member */
    size_t width;              /* characters */
};

struct table {
    struct column columns[MAX_COLUMNS];
    size_t n;
    bool all; /* heads say which object a member is of */
};

static bool same(const char *a, const char *b)
{
    return a == b || (a && b && !strcmp(a, b));
}

static void add_column(struct table *t, const char *outer, const char *inner)
{
    for (size_t i = 0; i < t->n; i++)
        if (same(t->columns[i].outer, outer) && same(t->columns[i].inner, inner)) return;
    if (t->n < MAX_COLUMNS) t->columns[t->n++] = (struct column){.outer = outer, .inner = inner};
}

static const struct json *value_of(const struct json *worker, const struct column *c)
{
    const struct json *v = json_find(worker, c->outer);
    return c->inner ? json_find(v, c->inner) : v;
}

/* Characters, not bytes. */
static size_t width_of(const struct tow_buf *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->len; i++) n += ((unsigned char)b->data[i] & 0xc0) != 0x80;
    return n;
}

static void put_cell(const struct json *worker, const struct column *c, struct tow_buf *cell)
{
    const struct json *v = value_of(worker, c);
    tow_buf_clear(cell);
    if (json_type(v) == JSON_NULL) {
        tow_buf_putc(cell, '-');
        return;
    }
    struct tow_buf text;
    size_t n;
    tow_buf_init(&text, 0);
    const char *s = json_string(v, &n);
    if (s)
        tow_buf_put(&text, s, n);
    else
        json_dump(&text, v);
    /* a whole list or a long text would break the table; --json has it */
    size_t keep = text.len;
    if (keep > MAX_CELL) {
        keep = MAX_CELL - 3;
        while (keep > 0 && ((unsigned char)text.data[keep] & 0xc0) == 0x80) keep--;
    }
    ctl_put_clean(cell, text.data ? text.data : "", keep);
    for (size_t i = 0; i < cell->len; i++)
        if (cell->data[i] == '\n' || cell->data[i] == '\t') cell->data[i] = ' ';
    if (keep < text.len) tow_buf_puts(cell, "...");
    tow_buf_fini(&text);
}

static void put_head(const struct table *t, const struct column *c, struct tow_buf *cell)
{
    tow_buf_clear(cell);
    if (!c->inner || t->all) ctl_put_clean(cell, c->outer, strlen(c->outer));
    if (c->inner && t->all) tow_buf_putc(cell, '.');
    if (c->inner) ctl_put_clean(cell, c->inner, strlen(c->inner));
}

static void put_padded(const struct tow_buf *cell, size_t width, bool last, struct tow_buf *out)
{
    tow_buf_put(out, cell->data, cell->len);
    if (last)
        tow_buf_putc(out, '\n');
    else
        for (size_t i = width_of(cell); i < width + 2; i++) tow_buf_putc(out, ' ');
}

void ctl_status_table(const struct json *workers, bool all, struct tow_buf *out)
{
    struct table t = {.all = all};
    struct tow_buf cell;
    add_column(&t, "name", NULL);
    add_column(&t, "role", NULL);
    add_column(&t, "state", NULL);
    JSON_EACH(w, workers)
    {
        JSON_EACH(v, w)
        {
            const char *key = json_key(v);
            if (same(key, "pairs")) continue; /* told line by line */
            if (json_type(v) != JSON_OBJECT) {
                if (all) add_column(&t, key, NULL);
                continue;
            }
            if (!all && !same(key, "load")) continue;
            JSON_EACH(inner, v)
            {
                add_column(&t, key, json_key(inner));
            }
        }
    }
    tow_buf_init(&cell, 0);
    for (size_t i = 0; i < t.n; i++) {
        put_head(&t, &t.columns[i], &cell);
        t.columns[i].width = width_of(&cell);
        JSON_EACH(w, workers)
        {
            put_cell(w, &t.columns[i], &cell);
            if (width_of(&cell) > t.columns[i].width) t.columns[i].width = width_of(&cell);
        }
    }
    for (size_t i = 0; i < t.n; i++) {
        put_head(&t, &t.columns[i], &cell);
        put_padded(&cell, t.columns[i].width, i + 1 == t.n, out);
    }
    JSON_EACH(w, workers)
    {
        for (size_t i = 0; i < t.n; i++) {
            put_cell(w, &t.columns[i], &cell);
            put_padded(&cell, t.columns[i].width, i + 1 == t.n, out);
        }
    }
    tow_buf_fini(&cell);
}

static void put_text(const struct json *v, struct tow_buf *out)
{
    size_t n;
    const char *s = json_string(v, &n);
    if (s)
        ctl_put_clean(out, s, n);
    else if (json_type(v) == JSON_NULL)
        tow_buf_putc(out, '?');
    else
        json_dump(out, v);
}

/* Each link is told by both of its ends; the prefill worker's word is printed. */
void ctl_status_pairs(const struct json *workers, struct tow_buf *out)
{
    JSON_EACH(w, workers)
    {
        size_t n;
        const char *role = json_string(json_find(w, "role"), &n);
        if (!same(role, "prefill")) continue;
        JSON_EACH(p, json_find(w, "pairs"))
        {
            tow_buf_puts(out, "pair ");
            put_text(json_find(w, "name"), out);
            tow_buf_puts(out, " -> ");
            put_text(json_find(p, "name"), out);
            tow_buf_puts(out, ": ");
            put_text(json_find(p, "proof"), out);
            if (json_type(json_find(p, "transport")) != JSON_NULL) {
                tow_buf_puts(out, ", ");
                put_text(json_find(p, "transport"), out);
                tow_buf_puts(out, " by ");
                put_text(json_find(p, "method"), out);
                tow_buf_puts(out, ", ");
                put_text(json_find(p, "mb_per_s"), out);
                tow_buf_puts(out, " MB/s, ");
                put_text(json_find(p, "latency_us"), out);
                tow_buf_puts(out, " us");
            }
            if (json_type(json_find(p, "why")) != JSON_NULL) {
                tow_buf_puts(out, ", ");
                put_text(json_find(p, "why"), out);
            }
            tow_buf_putc(out, '\n');
        }
    }
}

void ctl_status_refused(const struct json *refused, struct tow_buf *out)
{
    JSON_EACH(w, refused)
    {
        tow_buf_puts(out, "refused ");
        put_text(json_find(w, "role"), out);
        tow_buf_puts(out, " worker ");
        put_text(json_find(w, "name"), out);
        tow_buf_puts(out, ": ");
        put_text(json_find(w, "why"), out);
        tow_buf_puts(out, " (times: ");
        put_text(json_find(w, "times"), out);
        tow_buf_puts(out, ")\n");
    }
}

/* "ready", "starting", ...: what /ready says, for which no key is needed. */
static void put_ready(const struct json *ready, struct tow_buf *out)
{
    size_t n;
    const char *word = json_string(json_find(ready, "status"), &n);
    if (word)
        ctl_put_clean(out, word, n);
    else
        tow_buf_puts(out, "?");
}

static int show(const struct ctl_client *c, bool as_json, bool all, bool *serving,
                struct tow_err *err)
{
    struct json *ready = NULL, *workers = NULL, *refused = NULL;
    struct tow_buf out;
    int status = 0, tells = 0;
    tow_buf_init(&out, 0);
    int rc = ctl_client_json(c, "GET", "/ready", 503, &ready, &status, err);
    if (rc == 0) rc = ctl_client_json(c, "GET", "/admin/workers", 0, &workers, NULL, err);
    if (rc == 0 && json_type(workers) != JSON_ARRAY)
        rc = tow_fail(err, TOW_EFORMAT, "%s: GET /admin/workers: %s, not an array", c->url,
                      json_type_name(workers));
    /* An older router has no such path. */
    if (rc == 0) rc = ctl_client_json(c, "GET", "/admin/refused", 404, &refused, &tells, err);
    const struct json *turned_away = tells == 200 ? refused : NULL;
    if (rc == 0 && as_json) {
        tow_buf_printf(&out, "{\"ready\": %s, \"status\": ", status == 200 ? "true" : "false");
        json_dump(&out, json_find(ready, "status"));
        tow_buf_puts(&out, ", \"workers\": ");
        json_dump(&out, workers);
        if (turned_away) {
            tow_buf_puts(&out, ", \"refused\": ");
            json_dump(&out, turned_away);
        }
        tow_buf_puts(&out, "}\n");
    } else if (rc == 0) {
        tow_buf_printf(&out, "%s: ", c->url);
        put_ready(ready, &out);
        tow_buf_printf(&out, ", %zu workers\n", json_size(workers));
        if (json_size(workers)) ctl_status_table(workers, all, &out);
        ctl_status_pairs(workers, &out);
        ctl_status_refused(turned_away, &out);
    }
    if (rc == 0 && tow_buf_failed(&out)) rc = tow_fail(err, TOW_ENOMEM, "no memory");
    if (rc == 0) fputs(out.data, stdout);
    *serving = status == 200;
    tow_buf_fini(&out);
    json_free(ready);
    json_free(workers);
    json_free(refused);
    return rc;
}

int ctl_status_main(int argc, char **argv)
{
    struct ctl_client c = {0};
    bool as_json = false, all = false, serving = false;
    const struct tow_opt table[] = {
        CTL_CLIENT_OPTS(&c, "30"),
        {.name = "json",
         .type = TOW_OPT_BOOL,
         .out = &as_json,
         .def = "false",
         .help = "print one JSON object instead of a table"},
        {.name = "all",
         .type = TOW_OPT_BOOL,
         .out = &all,
         .def = "false",
         .help = "every column, capacity included"},
    };
    const struct tow_opts_spec spec = {.program = "towpath-ctl status",
                                       .about =
                                           "shows whether the router serves, and its workers; "
                                           "exits 1 while it does not, 2 when it cannot be asked",
                                       .table = table,
                                       .n = sizeof table / sizeof *table};
    struct tow_opts *opts;
    struct tow_err err = {0};
    int rc = ctl_flags_read(&opts, &spec, argc, argv, &err);
    const bool go = rc == CTL_FLAGS_RUN;
    if (rc > 0) {
        rc = ctl_client_open(&c, &err);
        if (rc == 0 && go) rc = show(&c, as_json, all, &serving, &err);
        if (rc == 0 && go && !serving) rc = 1;
        ctl_client_close(&c);
    }
    tow_opts_free(opts);
    if (rc < 0) ctl_complain("status", &err);
    return rc < 0 ? CTL_EXIT_FAILED : rc > 0 ? CTL_EXIT_NO : CTL_EXIT_GOOD;
}
