/* ctl/needle_report.c - see needle_report.h. */
#include "deploy/ctl/needle_report.h"

#include "common/text/json.h"
#include "deploy/ctl/verify.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_REPS_IN_FIELD = 1024 };

static int by_rank(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint32_t median(uint32_t *ranks, size_t n)
{
    if (n == 0) return 0;
    qsort(ranks, n, sizeof *ranks, by_rank);
    return ranks[(n - 1) / 2];
}

struct ctl_field ctl_report_field(const struct ctl_report *r, const struct ctl_cell *setting,
                                  int shadow)
{
    struct ctl_field f = {0};
    uint32_t ranks[MAX_REPS_IN_FIELD];
    size_t n_ranks = 0;
    for (int rep = 0; rep < r->grid->n_reps; rep++) {
        struct ctl_cell c = *setting;
        c.rep = rep;
        const struct ctl_record *rec = ctl_results_find(r->results, &c, &r->texts);
        if (!rec) continue;
        uint32_t rank = shadow < 0 ? rec->ranks.verdict.rank : rec->ranks.shadow[shadow];
        if (shadow >= 0 && !rank) continue; /* not looked at */
        f.n++;
        f.hits += shadow < 0 ? rec->found : rank <= rec->ranks.verdict.topk;
        if (rank && n_ranks < MAX_REPS_IN_FIELD) ranks[n_ranks++] = rank;
    }
    f.rank = median(ranks, n_ranks);
    return f;
}

/* ------------------------------------------------------------------ panels */

struct panel {
    struct ctl_cell setting; /* length and depth are filled in field by field */
    int shadow;              /* -1: none */
};

typedef void (*on_panel)(void *ctx, const struct ctl_report *r, const struct panel *p);

static void each_panel(const struct ctl_report *r, on_panel fn, void *ctx)
{
    const struct ctl_grid *g = r->grid;
    for (int f = 0; f < g->n_fillers; f++)
        for (int t = 0; t < g->n_topks; t++)
            for (int k = 0; k < g->n_keys; k++)
                for (int s = -1; s < TEXT_PRECISIONS; s++) {
                    struct panel p = {.setting = {.filler = (enum ctl_filler)g->fillers[f],
                                                  .keys = (enum ctl_keys)g->keys[k],
                                                  .topk = g->topks[t]},
                                      .shadow = s};
                    if (s < 0 || (r->shadow >> s & 1)) fn(ctx, r, &p);
                }
}

static struct ctl_field field_at(const struct ctl_report *r, const struct panel *p, int length,
                                 int depth)
{
    struct ctl_cell c = p->setting;
    c.length = r->grid->lengths[length];
    c.depth = (int)r->grid->depths[depth];
    return ctl_report_field(r, &c, p->shadow);
}

static void title_of(const struct panel *p, char *to, size_t cap)
{
    char topk[24] = "default";
    const bool shadow = p->shadow >= 0;
    if (p->setting.topk) snprintf(topk, sizeof topk, "%lld", (long long)p->setting.topk);
    snprintf(to, cap, "%s, keys %s%s%s, top-k %s", ctl_filler_names[p->setting.filler],
             ctl_keys_names[p->setting.keys], shadow ? ", shadow " : "",
             shadow ? text_precision_name((enum text_precision)p->shadow) : "", topk);
}

/* Whether the cell is part of this sweep: its file may hold more. */
static bool in_grid(const struct ctl_report *r, const struct ctl_record *rec)
{
    const struct ctl_grid *g = r->grid;
    bool length = false, depth = false, filler = false, keys = false, topk = false;
    for (int i = 0; i < g->n_lengths; i++) length |= g->lengths[i] == rec->cell.length;
    for (int i = 0; i < g->n_depths; i++) depth |= g->depths[i] == rec->cell.depth;
    for (int i = 0; i < g->n_fillers; i++) filler |= g->fillers[i] == (int64_t)rec->cell.filler;
    for (int i = 0; i < g->n_keys; i++) keys |= g->keys[i] == (int64_t)rec->cell.keys;
    for (int i = 0; i < g->n_topks; i++) topk |= g->topks[i] == rec->cell.topk;
    return ctl_texts_same(&rec->texts, &r->texts) && rec->cell.rep < g->n_reps && length && depth &&
           filler && keys && topk;
}

/* ------------------------------------------------------------------ the table */

/* Layers and the median over all records of their best rank. */
static void put_layers(const struct ctl_report *r, struct tow_buf *out)
{
    uint32_t *ranks = malloc((r->results->n + 1) * sizeof *ranks);
    if (!ranks) {
        out->failed = true;
        return;
    }
    int64_t last = -1;
    bool any = false;
    for (;;) {
        /* the next layer in ascending order */
        int64_t layer = INT64_MAX;
        for (uint32_t i = 0; i < r->results->n; i++)
            for (uint32_t k = 0; k < r->results->items[i].ranks.n_layers; k++) {
                int64_t at = r->results->items[i].ranks.layers[k].layer;
                if (in_grid(r, &r->results->items[i]) && at > last && at < layer) layer = at;
            }
        if (layer == INT64_MAX) break;
        size_t n = 0;
        for (uint32_t i = 0; i < r->results->n; i++) {
            const struct ctl_ranks *x = &r->results->items[i].ranks;
            for (uint32_t k = 0; k < x->n_layers; k++)
                if (x->layers[k].layer == layer && x->layers[k].rank &&
                    in_grid(r, &r->results->items[i]))
                    ranks[n++] = x->layers[k].rank;
        }
        uint32_t m = median(ranks, n);
        tow_buf_printf(out, "%s layer %lld: %u",
                       any ? "," : "median of the best rank by layer:", (long long)layer, m);
        any = true;
        last = layer;
    }
    if (any) tow_buf_puts(out, "\n");
    free(ranks);
}

static void put_misses(const struct ctl_report *r, struct tow_buf *out)
{
    int found = 0, n = 0;
    for (uint32_t i = 0; i < r->results->n; i++) {
        const struct ctl_record *rec = &r->results->items[i];
        if (!in_grid(r, rec)) continue;
        n++;
        found += rec->found;
        if (rec->found) continue;
        const char *verdict = text_verdict_name(rec->ranks.verdict.kind);
        tow_buf_puts(out, "missed ");
        ctl_cell_put(out, &rec->cell);
        tow_buf_printf(out, "  %s: %s; expected %s, answer: ", verdict ? verdict : "no verdict",
                       rec->ranks.captured ? rec->ranks.text : "no capture", rec->expect);
        size_t from = out->len;
        ctl_put_clean(out, rec->answer, strnlen(rec->answer, 120));
        for (size_t k = from; k < out->len; k++)
            if (out->data[k] == '\n') out->data[k] = ' ';
        tow_buf_puts(out, "\n");
    }
    tow_buf_printf(out, "found %d of %d\n", found, n);
}

static void table_panel(void *ctx, const struct ctl_report *r, const struct panel *p)
{
    struct tow_buf *out = ctx;
    char title[160];
    title_of(p, title, sizeof title);
    tow_buf_printf(out, "%s%s\n", title, p->shadow >= 0 ? ": would be selected" : "");
    tow_buf_printf(out, "%8s", "depth");
    for (int l = 0; l < r->grid->n_lengths; l++)
        tow_buf_printf(out, " %16lld", (long long)r->grid->lengths[l]);
    tow_buf_puts(out, "\n");
    for (int d = 0; d < r->grid->n_depths; d++) {
        tow_buf_printf(out, "%6lld %%", (long long)r->grid->depths[d]);
        for (int l = 0; l < r->grid->n_lengths; l++) {
            struct ctl_field f = field_at(r, p, l, d);
            char text[32] = "-";
            if (f.n && f.rank)
                snprintf(text, sizeof text, "%d/%d rank %u", f.hits, f.n, f.rank);
            else if (f.n)
                snprintf(text, sizeof text, "%d/%d", f.hits, f.n);
            tow_buf_printf(out, " %16s", text);
        }
        tow_buf_puts(out, "\n");
    }
    tow_buf_puts(out, "\n");
}

void ctl_report_table(const struct ctl_report *r, struct tow_buf *out)
{
    each_panel(r, table_panel, out);
    put_layers(r, out);
    put_misses(r, out);
}

/* ------------------------------------------------------------------ JSON */

struct json_out {
    struct tow_buf *out;
    const char *sep;
};

static void json_panel(void *ctx, const struct ctl_report *r, const struct panel *p)
{
    struct json_out *j = ctx;
    tow_buf_printf(j->out, "%s{\"filler\": \"%s\", \"keys\": \"%s\", \"topk\": ", j->sep,
                   ctl_filler_names[p->setting.filler], ctl_keys_names[p->setting.keys]);
    ctl_put_topk(j->out, p->setting.topk);
    tow_buf_puts(j->out, ", \"shadow\": ");
    j->sep = ", ";
    if (p->shadow >= 0)
        tow_buf_printf(j->out, "\"%s\"", text_precision_name((enum text_precision)p->shadow));
    else
        tow_buf_puts(j->out, "null");
    tow_buf_puts(j->out, ", \"fields\": [");
    const char *sep = "";
    for (int l = 0; l < r->grid->n_lengths; l++)
        for (int d = 0; d < r->grid->n_depths; d++) {
            struct ctl_field f = field_at(r, p, l, d);
            tow_buf_printf(j->out, "%s{\"length\": %lld, \"depth\": %lld, \"n\": %d, \"%s\": %d",
                           sep, (long long)r->grid->lengths[l], (long long)r->grid->depths[d], f.n,
                           p->shadow < 0 ? "found" : "selected", f.hits);
            if (f.rank)
                tow_buf_printf(j->out, ", \"median_rank\": %u}", f.rank);
            else
                tow_buf_puts(j->out, ", \"median_rank\": null}");
            sep = ", ";
        }
    tow_buf_puts(j->out, "]}");
}

void ctl_report_json(const struct ctl_report *r, struct tow_buf *out)
{
    struct json_out j = {.out = out, .sep = ""};
    tow_buf_puts(out, "{\"title\": ");
    json_put_string(out, r->title, strlen(r->title));
    tow_buf_printf(out, ", \"seed\": %llu, \"panels\": [", (unsigned long long)r->texts.seed);
    each_panel(r, json_panel, &j);
    tow_buf_puts(out, "], \"cells\": [");
    const char *sep = "";
    for (uint32_t i = 0; i < r->results->n; i++)
        if (in_grid(r, &r->results->items[i])) {
            tow_buf_puts(out, sep);
            ctl_record_put(out, &r->results->items[i]);
            sep = ",\n";
        }
    tow_buf_puts(out, "]}\n");
}

/* ------------------------------------------------------------------ SVG */

/* Pixels. A field is wide enough for "10/10" over "rank 16384" at FONT. */
enum {
    FONT = 12,
    FIELD_W = 76,
    FIELD_H = 36,
    LEFT = 56,      /* room for depths */
    TOP = 44,       /* title of a panel and lengths */
    GAP = 24,       /* between panels */
    HEAD = 40,      /* title of the page */
    FOOT = 56,      /* legend */
    LEAST_W = 860,  /* of the page: the legend's lines */
    MAX_ACROSS = 6, /* panels in a row */
    SHADES = 5,
};

/* From none found to all found; all light enough for black text, and told apart without red and
 * green alone. */
static const char *const shades[SHADES] = {"#f4a582", "#fbd0b9", "#f2f0e6", "#c3dff0", "#92c5de"};
static const char empty_shade[] = "#ffffff";

void ctl_put_xml(struct tow_buf *out, const char *text)
{
    for (const char *p = text; *p; p++) {
        unsigned char c = (unsigned char)*p;
        if (c == '&')
            tow_buf_puts(out, "&amp;");
        else if (c == '<')
            tow_buf_puts(out, "&lt;");
        else if (c == '>')
            tow_buf_puts(out, "&gt;");
        else if (c == '"')
            tow_buf_puts(out, "&quot;");
        else if (c == '\'')
            tow_buf_puts(out, "&#39;");
        else if (c < ' ' || c == 127)
            tow_buf_putc(out, '?');
        else
            tow_buf_putc(out, *p);
    }
}

static void put_label(struct tow_buf *out, int x, int y, const char *anchor, const char *class,
                      const char *text)
{
    tow_buf_printf(out, "<text x=\"%d\" y=\"%d\" text-anchor=\"%s\"%s%s%s>", x, y, anchor,
                   class ? " class=\"" : "", class ? class : "", class ? "\"" : "");
    ctl_put_xml(out, text);
    tow_buf_puts(out, "</text>\n");
}

static const char *shade_of(const struct ctl_field *f)
{
    if (!f->n) return empty_shade;
    if (f->hits == f->n) return shades[SHADES - 1];
    if (f->hits == 0) return shades[0];
    return shades[1 + (f->hits * (SHADES - 2) - 1) / f->n];
}

struct svg_out {
    struct tow_buf *out;
    int at;            /* number of the panel */
    int across;        /* panels in a row */
    int width, height; /* of a panel */
};

static void svg_field(struct tow_buf *out, int x, int y, const struct ctl_field *f, bool shadow)
{
    tow_buf_printf(out,
                   "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\" "
                   "stroke=\"#888888\"/>\n",
                   x, y, FIELD_W, FIELD_H, shade_of(f));
    if (!f->n) return;
    char text[32];
    /* one repetition: a mark; more: the count */
    if (f->n == 1)
        snprintf(text, sizeof text, "%s",
                 shadow ? (f->hits ? "selected" : "beyond") : (f->hits ? "found" : "missed"));
    else
        snprintf(text, sizeof text, "%d/%d", f->hits, f->n);
    put_label(out, x + FIELD_W / 2, y + (f->rank ? 15 : 22), "middle", NULL, text);
    if (!f->rank) return;
    snprintf(text, sizeof text, "rank %u", f->rank);
    put_label(out, x + FIELD_W / 2, y + 30, "middle", "small", text);
}

static void svg_panel(void *ctx, const struct ctl_report *r, const struct panel *p)
{
    struct svg_out *s = ctx;
    const int x0 = GAP + s->at % s->across * (s->width + GAP) + LEFT;
    const int y0 = HEAD + s->at / s->across * (s->height + GAP) + TOP;
    char title[160], text[32];
    s->at++;
    title_of(p, title, sizeof title);
    put_label(s->out, x0 - LEFT, y0 - 26, "start", "bold", title);
    for (int l = 0; l < r->grid->n_lengths; l++) {
        snprintf(text, sizeof text, "%lld", (long long)r->grid->lengths[l]);
        put_label(s->out, x0 + l * FIELD_W + FIELD_W / 2, y0 - 6, "middle", NULL, text);
    }
    for (int d = 0; d < r->grid->n_depths; d++) {
        snprintf(text, sizeof text, "%lld %%", (long long)r->grid->depths[d]);
        put_label(s->out, x0 - 6, y0 + d * FIELD_H + 22, "end", NULL, text);
        for (int l = 0; l < r->grid->n_lengths; l++) {
            struct ctl_field f = field_at(r, p, l, d);
            svg_field(s->out, x0 + l * FIELD_W, y0 + d * FIELD_H, &f, p->shadow >= 0);
        }
    }
}

static void count_panel(void *ctx, const struct ctl_report *r, const struct panel *p)
{
    (void)r;
    (void)p;
    ++*(int *)ctx;
}

static void svg_legend(struct tow_buf *out, int y)
{
    static const char *const names[SHADES] = {"none found", "", "", "some", "all found"};
    static const int steps[SHADES] = {104, 26, 26, 72, 0};
    int x = GAP;
    for (int i = 0; i < SHADES; i++) {
        tow_buf_printf(out,
                       "<rect x=\"%d\" y=\"%d\" width=\"18\" height=\"14\" fill=\"%s\" "
                       "stroke=\"#888888\"/>\n",
                       x, y, shades[i]);
        if (names[i][0]) put_label(out, x + 24, y + 12, "start", NULL, names[i]);
        x += steps[i];
    }
    put_label(
        out, GAP, y + 34, "start", "small",
        "columns: tokens of the prompt; rows: share of the text before the value; rank: median "
        "of its best rank (1 is best); "
        "shadow: selected, were keys of that type");
}

/* A row has the key types of one filler and top-k; where there is one type, the top-k of a
 * filler. */
static int panels_across(const struct ctl_report *r)
{
    int each = r->grid->n_keys;
    for (int p = 0; p < TEXT_PRECISIONS; p++) each += (r->shadow >> p & 1) ? r->grid->n_keys : 0;
    if (each == 1) each = r->grid->n_topks;
    return each < MAX_ACROSS ? each : MAX_ACROSS;
}

void ctl_report_svg(const struct ctl_report *r, struct tow_buf *out)
{
    int panels = 0;
    each_panel(r, count_panel, &panels);
    /* titles need room even where there are few columns */
    int inner = LEFT + r->grid->n_lengths * FIELD_W, least = 340;
    struct svg_out s = {.out = out,
                        .across = panels_across(r),
                        .width = inner > least ? inner : least,
                        .height = TOP + r->grid->n_depths * FIELD_H};
    int down = (panels + s.across - 1) / s.across;
    int width = GAP + s.across * (s.width + GAP), height = HEAD + down * (s.height + GAP) + FOOT;
    if (width < LEAST_W) width = LEAST_W;
    tow_buf_printf(out,
                   "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
                   "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
                   "viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"%d\">\n",
                   width, height, width, height, (int)FONT);
    tow_buf_puts(out, "<style>.bold{font-weight:bold}.small{font-size:11px}"
                      ".head{font-size:16px;font-weight:bold}</style>\n");
    tow_buf_printf(out, "<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n", width, height);
    put_label(out, GAP, 24, "start", "head", r->title);
    each_panel(r, svg_panel, &s);
    svg_legend(out, HEAD + down * (s.height + GAP) + 4);
    tow_buf_puts(out, "</svg>\n");
}
