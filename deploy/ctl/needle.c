/* ctl/needle.c - see needle.h: the grid of cells, and the sweep over it. Served models are asked by
 * as many threads as --concurrency says, each with a call of its own; what they share is the list
 * of cells left and the results, behind one lock. */
#include "deploy/ctl/needle.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/model/forward.h"
#include "common/model/settings.h"
#include "common/model/weights.h"
#include "common/text/json.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/flags.h"
#include "deploy/ctl/needle_engine.h"
#include "deploy/ctl/needle_report.h"
#include "deploy/ctl/needle_results.h"
#include "deploy/ctl/verify.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CONCURRENCY = 64, MAX_LENGTH = 1 << 24, MAX_REPS = 1000 };

const char *const ctl_keys_names[] = {"own", "fp4", "fp8", "bf16", NULL};

/* ------------------------------------------------------------------ cells */

static int find(const char *const *names, const char *text, size_t n)
{
    for (int i = 0; names[i]; i++)
        if (strlen(names[i]) == n && !memcmp(names[i], text, n)) return i;
    return -1;
}

/* Digits without a 0 in front, with K for 1024, M for 1024 K; -1: not a number. */
static int64_t number(const char *p, size_t n)
{
    int64_t v = 0;
    const int unit = n > 1 ? p[n - 1] | 0x20 : 0, shift = unit == 'k' ? 10 : unit == 'm' ? 20 : 0;
    if (shift) n--;
    if (n == 0 || n > 9 || (n > 1 && *p == '0')) return -1;
    for (size_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9') return -1;
        v = v * 10 + (p[i] - '0');
    }
    return v << shift;
}

static const struct {
    const char *flag, *right;
    int64_t lo, hi;
} axes[] = {
    [CTL_AXIS_LENGTH] = {"--lengths", "tokens, 64 to 16777216 (K: times 1024, M: times 1048576)",
                         64, MAX_LENGTH},
    [CTL_AXIS_DEPTH] = {"--depths", "percent, 0 to 100", 0, 100},
    [CTL_AXIS_FILLER] = {"--fillers", "one of words, prose, config, code, logs, mixed", 0,
                         CTL_FILLERS - 1},
    [CTL_AXIS_KEYS] = {"--keys", "one of own, fp4, fp8, bf16", 0, CTL_KEYS - 1},
    [CTL_AXIS_TOPK] = {"--topk", "default, or entries, 1 to 4096", 1, MODEL_MAX_TOPK},
};

/* One value of an axis, or -1. */
static int64_t axis_value(enum ctl_axis axis, const char *p, size_t n)
{
    if (axis == CTL_AXIS_FILLER) return find(ctl_filler_names, p, n);
    if (axis == CTL_AXIS_KEYS) return find(ctl_keys_names, p, n);
    if (axis == CTL_AXIS_TOPK && n == 7 && !memcmp(p, "default", 7)) return 0;
    int64_t v = number(p, n);
    return v < axes[axis].lo || v > axes[axis].hi ? -1 : v;
}

int ctl_axis_parse(enum ctl_axis axis, const char *list, int64_t *out, int *n, struct tow_err *err)
{
    *n = 0;
    for (const char *p = list;; p++) {
        size_t len = strcspn(p, ",");
        int64_t v = axis_value(axis, p, len);
        if (v < 0)
            return tow_fail(err, TOW_ECONFIG, "%s: '%.*s' is not right; expected %s",
                            axes[axis].flag, (int)(len < 40 ? len : 40), p, axes[axis].right);
        for (int i = 0; i < *n; i++)
            if (out[i] == v)
                return tow_fail(err, TOW_ECONFIG, "%s: '%.*s' stands twice", axes[axis].flag,
                                (int)len, p);
        if (*n == CTL_AXIS_MAX)
            return tow_fail(err, TOW_ECONFIG, "%s: more than %d values", axes[axis].flag,
                            (int)CTL_AXIS_MAX);
        out[(*n)++] = v;
        p += len;
        if (!*p) return 0;
    }
}

int ctl_cell_parse(const char *text, struct ctl_cell *out, struct tow_err *err)
{
    int64_t v[6];
    const char *p = text;
    static const enum ctl_axis order[] = {CTL_AXIS_LENGTH, CTL_AXIS_DEPTH, CTL_AXIS_FILLER,
                                          CTL_AXIS_FILLER, CTL_AXIS_KEYS,  CTL_AXIS_TOPK};
    static const char *const names[] = {"LENGTH", "DEPTH", "FILLER", "REP", "KEYS", "TOPK"};
    for (int i = 0; i < 6; i++) {
        size_t n = strcspn(p, ",");
        v[i] = i == 3 ? number(p, n) : axis_value(order[i], p, n);
        bool more = p[n] == ',';
        if (v[i] < 0 && n)
            return tow_fail(err, TOW_ECONFIG,
                            "--cell %s: of LENGTH,DEPTH,FILLER,REP,KEYS,TOPK, %s '%.*s' is not "
                            "right; expected %s",
                            text, names[i], (int)(n < 40 ? n : 40), p,
                            i == 3 ? "a whole number" : axes[order[i]].right);
        if (v[i] < 0 || more != (i < 5))
            return tow_fail(err, TOW_ECONFIG,
                            "--cell %s: expected LENGTH,DEPTH,FILLER,REP,KEYS,TOPK, as "
                            "4096,50,logs,0,own,default",
                            text);
        p += n + 1;
    }
    *out = (struct ctl_cell){.length = v[0],
                             .depth = (int)v[1],
                             .filler = (enum ctl_filler)v[2],
                             .rep = (int)v[3],
                             .keys = (enum ctl_keys)v[4],
                             .topk = v[5]};
    return 0;
}

void ctl_cell_put(struct tow_buf *out, const struct ctl_cell *c)
{
    tow_buf_printf(out, "%lld,%d,%s,%d,%s,", (long long)c->length, c->depth,
                   ctl_filler_names[c->filler], c->rep, ctl_keys_names[c->keys]);
    if (c->topk)
        tow_buf_printf(out, "%lld", (long long)c->topk);
    else
        tow_buf_puts(out, "default");
}

bool ctl_cell_same(const struct ctl_cell *a, const struct ctl_cell *b)
{
    return a->length == b->length && a->depth == b->depth && a->filler == b->filler &&
           a->rep == b->rep && a->keys == b->keys && a->topk == b->topk;
}

size_t ctl_grid_size(const struct ctl_grid *g)
{
    return (size_t)g->n_lengths * (size_t)g->n_depths * (size_t)g->n_fillers * (size_t)g->n_keys *
           (size_t)g->n_topks * (size_t)g->n_reps;
}

static int64_t digit(size_t *i, int n)
{
    int64_t d = (int64_t)(*i % (size_t)n);
    *i /= (size_t)n;
    return d;
}

struct ctl_cell ctl_grid_at(const struct ctl_grid *g, size_t i)
{
    struct ctl_cell c;
    c.depth = (int)g->depths[digit(&i, g->n_depths)];
    c.length = g->lengths[digit(&i, g->n_lengths)];
    c.filler = (enum ctl_filler)g->fillers[digit(&i, g->n_fillers)];
    c.topk = g->topks[digit(&i, g->n_topks)];
    c.rep = (int)digit(&i, g->n_reps);
    c.keys = (enum ctl_keys)g->keys[digit(&i, g->n_keys)];
    return c;
}

bool ctl_texts_same(const struct ctl_texts *a, const struct ctl_texts *b)
{
    return a->seed == b->seed && a->hard.decoys == b->hard.decoys &&
           a->hard.strange == b->hard.strange;
}

uint64_t ctl_cell_seed(uint64_t seed, const struct ctl_cell *c)
{
    char name[96];
    int n = snprintf(name, sizeof name, "%llu/%lld/%d/%s/%d", (unsigned long long)seed,
                     (long long)c->length, c->depth, ctl_filler_names[c->filler], c->rep);
    return tow_hash64(name, (size_t)n);
}

/* ------------------------------------------------------------------ settings */

enum { CAPTURE_AUTO, CAPTURE_ON, CAPTURE_OFF };
static const char *const capture_names[] = {"auto", "on", "off", NULL};
enum { KV_FP8, KV_BF16 };
static const char *const kv_names[] = {"fp8", "bf16", NULL};

struct sweep {
    struct ctl_client client;
    const char *model, *lengths, *depths, *fillers, *keys, *topks, *shadow_list, *out_path,
        *svg_path, *cell_text;
    bool in_process, resume, json, quiet, strange;
    int capture, kv;
    int64_t reps, seed, decoys, concurrency, max_tokens, threads;
    struct ctl_grid grid;
    struct ctl_texts texts;
    unsigned shadow;
    struct ctl_cell cell; /* with --cell */
    /* the run */
    struct ctl_engine *engine;
    enum ctl_keys engine_keys;
    pthread_mutex_t lock; /* over what follows */
    size_t next, done;
    struct ctl_results results;
    bool no_capture; /* the server allows none */
    struct tow_err err;
};

static int check_settings(struct sweep *s, const struct tow_opts *opts, struct tow_err *err)
{
    struct ctl_grid *g = &s->grid;
    const char *keys = s->keys ? s->keys : s->in_process ? "fp4" : "own";
    int rc = ctl_axis_parse(CTL_AXIS_LENGTH, s->lengths, g->lengths, &g->n_lengths, err);
    if (rc == 0) rc = ctl_axis_parse(CTL_AXIS_DEPTH, s->depths, g->depths, &g->n_depths, err);
    if (rc == 0) rc = ctl_axis_parse(CTL_AXIS_FILLER, s->fillers, g->fillers, &g->n_fillers, err);
    if (rc == 0) rc = ctl_axis_parse(CTL_AXIS_KEYS, keys, g->keys, &g->n_keys, err);
    if (rc == 0) rc = ctl_axis_parse(CTL_AXIS_TOPK, s->topks, g->topks, &g->n_topks, err);
    if (rc == 0) rc = ctl_shadow_parse(s->shadow_list, &s->shadow, err);
    if (rc == 0 && s->cell_text) rc = ctl_cell_parse(s->cell_text, &s->cell, err);
    if (rc < 0) return rc;
    g->n_reps = (int)s->reps;
    s->texts = (struct ctl_texts){.seed = (uint64_t)s->seed,
                                  .hard = {.decoys = (int)s->decoys, .strange = s->strange}};
    if (s->cell_text) {
        g->keys[0] = s->cell.keys;
        g->n_keys = 1;
    }
    if (s->in_process && !s->model)
        return tow_fail(err, TOW_ECONFIG, "--in-process needs --model DIR");
    if (!s->in_process && tow_opts_source(opts, "kv-dtype") != TOW_FROM_DEFAULT)
        return tow_fail(err, TOW_ECONFIG,
                        "--kv-dtype %s: a served model keeps its own; --in-process sets it",
                        kv_names[s->kv]);
    if (!s->in_process && s->threads)
        return tow_fail(err, TOW_ECONFIG,
                        "--threads %lld: a served model has its own; --in-process sets them",
                        (long long)s->threads);
    if (s->in_process && s->concurrency > 1)
        return tow_fail(err, TOW_ECONFIG,
                        "--concurrency %lld: with --in-process one cell at a time uses all cores",
                        (long long)s->concurrency);
    for (int i = 0; i < g->n_keys; i++)
        if (s->in_process != (g->keys[i] != CTL_KEYS_OWN))
            return tow_fail(err, TOW_ECONFIG,
                            s->in_process ? "--keys own: with --in-process they must be named"
                                          : "--keys %s: a served model keeps its own; --in-process "
                                            "sets them, --shadow ranks by others",
                            ctl_keys_names[g->keys[i]]);
    if (s->cell_text && (s->out_path || s->svg_path))
        return tow_fail(err, TOW_ECONFIG, "%s: --cell prints its one result and keeps nothing",
                        s->out_path ? "--out" : "--svg");
    if (s->resume && !s->out_path) return tow_fail(err, TOW_ECONFIG, "--resume needs --out FILE");
    if (s->shadow && s->capture == CAPTURE_OFF)
        return tow_fail(err, TOW_ECONFIG, "--shadow needs captures, and --capture is off");
    return 0;
}

/* ------------------------------------------------------------------ one cell */

static int count_served(void *ctx, const char *text, size_t n, int64_t *tokens, struct tow_err *err)
{
    const struct sweep *s = ctx;
    struct tow_buf m;
    tow_buf_init(&m, 0);
    ctl_put_user(&m, text, n);
    int rc = tow_buf_failed(&m) ? tow_fail(err, TOW_ENOMEM, "no memory for the text")
                                : ctl_ask_count(&s->client, s->model, m.data, tokens, NULL, err);
    tow_buf_fini(&m);
    return rc;
}

static bool captures_allowed(struct sweep *s)
{
    pthread_mutex_lock(&s->lock);
    bool no = s->no_capture;
    pthread_mutex_unlock(&s->lock);
    return s->capture != CAPTURE_OFF && !no;
}

static int ask_served(struct sweep *s, const struct ctl_cell *c, const struct tow_buf *text,
                      const char *expect, struct ctl_answer *a, struct tow_err *err)
{
    struct tow_buf m;
    tow_buf_init(&m, 0);
    ctl_put_user(&m, text->data, text->len);
    struct ctl_ask q = {.model = s->model,
                        .messages = m.data,
                        .max_tokens = s->max_tokens,
                        .topk = c->topk,
                        .expect = captures_allowed(s) ? expect : NULL,
                        .shadow = s->shadow};
    int rc = tow_buf_failed(&m) ? tow_fail(err, TOW_ENOMEM, "no memory for the request")
                                : ctl_ask(&s->client, &q, a, err);
    if (rc == TOW_EAUTH && q.expect && s->capture == CAPTURE_AUTO) {
        pthread_mutex_lock(&s->lock);
        if (!s->no_capture) fprintf(stderr, "no ranks: %s\n", err->msg);
        s->no_capture = true;
        pthread_mutex_unlock(&s->lock);
        q.expect = NULL;
        rc = ctl_ask(&s->client, &q, a, err);
    }
    tow_buf_fini(&m);
    return rc;
}

static int open_engine(struct sweep *s, enum ctl_keys keys, struct tow_err *err)
{
    if (s->engine && s->engine_keys == keys) return 0;
    ctl_engine_close(s->engine);
    s->engine = NULL;
    s->engine_keys = keys;
    return ctl_engine_open(&s->engine, s->model, keys, s->kv == KV_BF16, (int32_t)s->threads, err);
}

/* The cell's text of its exact length into *text, which the caller frees. */
static int make_text(struct sweep *s, const struct ctl_cell *c, struct ctl_hay *hay,
                     struct tow_buf *text, struct tow_err *err)
{
    ctl_hay_init(hay, c->filler, ctl_cell_seed(s->texts.seed, c), s->texts.hard);
    int rc = s->in_process ? open_engine(s, c->keys, err) : 0;
    if (rc == 0)
        rc = ctl_hay_fit(hay, c->depth, c->length, s->in_process ? ctl_engine_count : count_served,
                         s->in_process ? (void *)s->engine : s, text, err);
    return rc;
}

static int run_cell(struct sweep *s, const struct ctl_cell *c, struct ctl_record *rec,
                    struct tow_buf *text, struct tow_err *err)
{
    struct ctl_hay hay;
    struct ctl_answer a;
    ctl_answer_init(&a);
    uint64_t from = 0;
    int rc = make_text(s, c, &hay, text, err);
    if (rc == 0) {
        from = tow_now_us();
        rc = s->in_process
                 ? ctl_engine_ask(s->engine, text->data, text->len, (int32_t)s->max_tokens, c->topk,
                                  s->capture == CAPTURE_OFF ? NULL : hay.value, s->shadow, &a, err)
                 : ask_served(s, c, text, hay.value, &a, err);
    }
    if (rc == 0) {
        *rec = (struct ctl_record){.cell = *c,
                                   .texts = s->texts,
                                   .found = a.content.data && strstr(a.content.data, hay.value),
                                   .prompt_tokens = a.prompt_tokens,
                                   .seconds = (double)(tow_now_us() - from) / 1e6,
                                   .ranks = a.ranks};
        ctl_copy_text(rec->finish, sizeof rec->finish, a.finish);
        ctl_copy_text(rec->expect, sizeof rec->expect, hay.value);
        ctl_copy_text(rec->answer, sizeof rec->answer, a.content.data ? a.content.data : "");
    } else {
        struct tow_buf name;
        tow_buf_init(&name, 0);
        ctl_cell_put(&name, c);
        tow_note(err, "cell %s", name.data ? name.data : "");
        tow_buf_fini(&name);
    }
    ctl_answer_fini(&a);
    ctl_hay_fini(&hay);
    return rc;
}

/* ------------------------------------------------------------------ the sweep */

static void show_progress(const struct sweep *s, const struct ctl_record *rec, size_t all)
{
    struct tow_buf line;
    tow_buf_init(&line, 0);
    tow_buf_printf(&line, "[%zu/%zu] ", s->done, all);
    ctl_cell_put(&line, &rec->cell);
    tow_buf_printf(&line, ": %s", rec->found ? "found" : "missed");
    if (rec->ranks.captured && rec->ranks.verdict.kind != TEXT_VERDICT_NONE)
        tow_buf_printf(&line, ", %s, rank %u", text_verdict_name(rec->ranks.verdict.kind),
                       rec->ranks.verdict.rank);
    tow_buf_printf(&line, ", %.1f s\n", rec->seconds);
    if (line.data) fputs(line.data, stderr);
    tow_buf_fini(&line);
}

/* The next cell that has no record; false: none is left, or another one failed. */
static bool take_cell(struct sweep *s, struct ctl_cell *c)
{
    const size_t all = ctl_grid_size(&s->grid);
    bool got = false;
    pthread_mutex_lock(&s->lock);
    while (!got && !s->err.code && s->next < all) {
        *c = ctl_grid_at(&s->grid, s->next++);
        got = !ctl_results_find(&s->results, c, &s->texts);
        if (!got) s->done++;
    }
    pthread_mutex_unlock(&s->lock);
    return got;
}

static void *work(void *ctx)
{
    struct sweep *s = ctx;
    struct ctl_cell c;
    while (take_cell(s, &c)) {
        struct ctl_record rec;
        struct tow_err err = {0};
        struct tow_buf text;
        tow_buf_init(&text, 0);
        int rc = run_cell(s, &c, &rec, &text, &err);
        tow_buf_fini(&text);
        pthread_mutex_lock(&s->lock);
        if (rc == 0) rc = ctl_results_add(&s->results, &rec, &err);
        if (rc == 0) {
            s->done++;
            if (!s->quiet) show_progress(s, &rec, ctl_grid_size(&s->grid));
        } else if (!s->err.code) {
            s->err = err;
        }
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

static int run_all(struct sweep *s, struct tow_err *err)
{
    pthread_t threads[MAX_CONCURRENCY];
    int64_t n = 0;
    int problem = 0;
    while (n < s->concurrency - 1 && !problem) {
        problem = pthread_create(&threads[n], NULL, work, s);
        if (!problem) n++;
    }
    work(s);
    for (int64_t i = 0; i < n; i++) pthread_join(threads[i], NULL);
    if (!s->err.code) return 0;
    *err = s->err;
    return err->code;
}

/* ------------------------------------------------------------------ output */

static int write_svg(const struct sweep *s, const struct tow_buf *svg, struct tow_err *err)
{
    if (tow_buf_failed(svg)) return tow_fail(err, TOW_ENOMEM, "no memory for the picture");
    FILE *f = fopen(s->svg_path, "w");
    bool good = f && fwrite(svg->data, 1, svg->len, f) == svg->len;
    if (f && fclose(f) != 0) good = false;
    return good ? 0 : tow_fail(err, TOW_EIO, "--svg %s: %s", s->svg_path, strerror(errno));
}

static int report(const struct sweep *s, struct tow_err *err)
{
    struct tow_buf out, svg;
    char title[160], hard[64] = "";
    tow_buf_init(&out, 0);
    tow_buf_init(&svg, 0);
    if (s->decoys || s->strange)
        snprintf(hard, sizeof hard, ", %lld decoys%s", (long long)s->decoys,
                 s->strange ? ", strange words" : "");
    snprintf(title, sizeof title, "Needle sweep: %d repetition%s, seed %lld, %s%s", s->grid.n_reps,
             s->grid.n_reps == 1 ? "" : "s", (long long)s->seed,
             s->in_process ? "in-process" : "served", hard);
    const struct ctl_report r = {.grid = &s->grid,
                                 .results = &s->results,
                                 .texts = s->texts,
                                 .shadow = s->shadow,
                                 .title = title};
    (s->json ? ctl_report_json : ctl_report_table)(&r, &out);
    int rc = tow_buf_failed(&out) ? tow_fail(err, TOW_ENOMEM, "no memory for the report") : 0;
    if (rc == 0 && (fwrite(out.data, 1, out.len, stdout) != out.len || fflush(stdout)))
        rc = tow_fail(err, TOW_EIO, "stdout cannot be written");
    if (rc == 0 && s->svg_path) {
        ctl_report_svg(&r, &svg);
        rc = write_svg(s, &svg, err);
    }
    tow_buf_fini(&out);
    tow_buf_fini(&svg);
    return rc;
}

/* --cell: the prompt and what came of it, nothing kept. */
static int show_cell(struct sweep *s, bool *all_found, struct tow_err *err)
{
    struct ctl_record rec;
    struct tow_buf text, out;
    tow_buf_init(&text, 0);
    tow_buf_init(&out, 0);
    int rc = run_cell(s, &s->cell, &rec, &text, err);
    if (rc == 0) {
        if (s->json) {
            tow_buf_puts(&out, "{\"prompt\": ");
            json_put_string(&out, text.data, text.len);
            tow_buf_puts(&out, ", \"result\": ");
            ctl_record_put(&out, &rec);
            tow_buf_puts(&out, "}\n");
        } else {
            tow_buf_printf(&out, "%s\n----\n", text.data);
            ctl_record_put(&out, &rec);
            tow_buf_putc(&out, '\n');
        }
        *all_found = rec.found;
        if (tow_buf_failed(&out))
            rc = tow_fail(err, TOW_ENOMEM, "no memory for the cell");
        else if (fwrite(out.data, 1, out.len, stdout) != out.len || fflush(stdout))
            rc = tow_fail(err, TOW_EIO, "stdout cannot be written");
    }
    tow_buf_fini(&text);
    tow_buf_fini(&out);
    return rc;
}

static int run(struct sweep *s, bool *all_found, struct tow_err *err)
{
    int rc = ctl_out_check("--svg", s->svg_path, err);
    if (rc == 0 && s->in_process) rc = model_weights_guard(err);
    if (rc < 0) return rc;
    if (s->cell_text) return show_cell(s, all_found, err);
    rc = ctl_results_open(&s->results, s->out_path, s->resume, err);
    if (rc == 0) rc = run_all(s, err);
    if (rc == 0) rc = report(s, err);
    const size_t n = ctl_grid_size(&s->grid);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        struct ctl_cell c = ctl_grid_at(&s->grid, i);
        const struct ctl_record *rec = ctl_results_find(&s->results, &c, &s->texts);
        *all_found = *all_found && rec && rec->found;
    }
    ctl_results_close(&s->results);
    return rc;
}

int ctl_needle_main(int argc, char **argv)
{
    struct sweep s = {.lock = PTHREAD_MUTEX_INITIALIZER, .results = {.fd = -1}};
    const struct tow_opt table[] = {
        CTL_CLIENT_OPTS(&s.client, "600"),
        {.name = "in-process",
         .type = TOW_OPT_BOOL,
         .out = &s.in_process,
         .def = "false",
         .help = "run the engine here instead of asking a router; --model is then a folder"},
        {.name = "model",
         .type = TOW_OPT_STRING,
         .out = &s.model,
         .otherwise = "the one served",
         .help = "name to send; with --in-process the checkpoint folder"},
        {.name = "lengths",
         .type = TOW_OPT_STRING,
         .out = &s.lengths,
         .def = "1K,4K,8K",
         .unit = "tokens",
         .help = "list of prompt lengths, each met exactly"},
        {.name = "depths",
         .type = TOW_OPT_STRING,
         .out = &s.depths,
         .def = "0,25,50,75,100",
         .unit = "%",
         .help = "list of places: share of the text before the value"},
        {.name = "fillers",
         .type = TOW_OPT_STRING,
         .out = &s.fillers,
         .def = "config",
         .help = "list of words, prose, config, code, logs, mixed"},
        {.name = "reps",
         .type = TOW_OPT_INT,
         .out = &s.reps,
         .def = "1",
         .min = 1,
         .max = MAX_REPS,
         .help = "texts for each place"},
        {.name = "keys",
         .type = TOW_OPT_STRING,
         .out = &s.keys,
         .otherwise = "own; fp4 with --in-process",
         .help = "list of index-key types; with --in-process fp4, fp8, bf16"},
        {.name = "kv-dtype",
         .type = TOW_OPT_ENUM,
         .out = &s.kv,
         .def = "fp8",
         .choices = kv_names,
         .help = "with --in-process: stored type of keys and entries"},
        {.name = "topk",
         .type = TOW_OPT_STRING,
         .out = &s.topks,
         .def = "default",
         .unit = "entries",
         .help = "list of index_topk values to ask for; default is the server's"},
        {.name = "shadow",
         .type = TOW_OPT_STRING,
         .out = &s.shadow_list,
         .otherwise = "none",
         .help = "also rank by keys of these types: list of bf16,fp8,fp4"},
        {.name = "capture",
         .type = TOW_OPT_ENUM,
         .out = &s.capture,
         .def = "auto",
         .choices = capture_names,
         .help = "ask how the value ranks; auto goes on without where it is not allowed"},
        {.name = "seed",
         .type = TOW_OPT_INT,
         .out = &s.seed,
         .def = "1",
         .min = 0,
         .max = INT64_MAX,
         .help = "of all texts"},
        {.name = "decoys",
         .type = TOW_OPT_INT,
         .out = &s.decoys,
         .def = "0",
         .min = 0,
         .max = CTL_MAX_DECOYS,
         .help = "other values of the same service, in other environments"},
        {.name = "strange",
         .type = TOW_OPT_BOOL,
         .out = &s.strange,
         .def = "false",
         .help = "service and value are letters in no known order"},
        {.name = "max-tokens",
         .type = TOW_OPT_INT,
         .out = &s.max_tokens,
         .def = "48",
         .min = 1,
         .max = 4096,
         .unit = "tokens",
         .help = "longest answer"},
        {.name = "concurrency",
         .type = TOW_OPT_INT,
         .out = &s.concurrency,
         .def = "1",
         .min = 1,
         .max = MAX_CONCURRENCY,
         .help = "requests at a time"},
        MODEL_OPT_THREADS(&s.threads),
        {.name = "out",
         .type = TOW_OPT_STRING,
         .out = &s.out_path,
         .otherwise = "none",
         .help = "file of results, one JSON object a line, written as they come"},
        {.name = "resume",
         .type = TOW_OPT_BOOL,
         .out = &s.resume,
         .def = "false",
         .help = "go on with --out: cells that are in it are not run again"},
        {.name = "cell",
         .type = TOW_OPT_STRING,
         .out = &s.cell_text,
         .otherwise = "the whole sweep",
         .help = "only LENGTH,DEPTH,FILLER,REP,KEYS,TOPK: its prompt and its result"},
        {.name = "json",
         .type = TOW_OPT_BOOL,
         .out = &s.json,
         .def = "false",
         .help = "JSON instead of tables"},
        {.name = "svg",
         .type = TOW_OPT_STRING,
         .out = &s.svg_path,
         .otherwise = "none",
         .help = "file for a heat map, length by depth, a panel for each setting"},
        {.name = "quiet",
         .type = TOW_OPT_BOOL,
         .out = &s.quiet,
         .def = "false",
         .help = "no progress on stderr"},
    };
    const struct tow_opts_spec spec = {
        .program = "towpath-ctl needle",
        .about = "asks for one value in much text, over a grid; exit 0 all found, 1 some missed, "
                 "2 not completed",
        .table = table,
        .n = sizeof table / sizeof *table};
    struct tow_opts *opts;
    struct tow_err err = {0};
    bool all_found = true;
    int rc = ctl_flags_read(&opts, &spec, argc, argv, &err);
    const bool go = rc == CTL_FLAGS_RUN;
    if (rc > 0) {
        rc = check_settings(&s, opts, &err);
        if (rc == 0) rc = ctl_client_open(&s.client, &err);
        if (rc == 0 && go) rc = run(&s, &all_found, &err);
        ctl_client_close(&s.client);
        ctl_engine_close(s.engine);
    }
    tow_opts_free(opts);
    if (rc < 0) ctl_complain("needle", &err);
    return rc < 0 ? CTL_EXIT_FAILED : all_found ? CTL_EXIT_GOOD : CTL_EXIT_NO;
}
