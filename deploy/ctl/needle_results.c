/* ctl/needle_results.c - see needle_results.h. */
#include "deploy/ctl/needle_results.h"

#include "common/base/err.h"
#include "common/text/json.h"
#include "deploy/ctl/verify.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE = 256 << 20 };

/* ------------------------------------------------------------------ one record */

static void put_text(struct tow_buf *b, const char *name, const char *text)
{
    tow_buf_printf(b, ", \"%s\": ", name);
    json_put_string(b, text, strlen(text));
}

void ctl_put_topk(struct tow_buf *b, int64_t topk)
{
    if (topk)
        tow_buf_printf(b, "%lld", (long long)topk);
    else
        tow_buf_puts(b, "null");
}

void ctl_record_put(struct tow_buf *b, const struct ctl_record *rec)
{
    const struct ctl_cell *c = &rec->cell;
    tow_buf_printf(b, "{\"length\": %lld, \"depth\": %d, \"filler\": \"%s\", \"rep\": %d, ",
                   (long long)c->length, c->depth, ctl_filler_names[c->filler], c->rep);
    tow_buf_printf(b, "\"keys\": \"%s\", \"topk\": ", ctl_keys_names[c->keys]);
    ctl_put_topk(b, c->topk);
    tow_buf_printf(b, ", \"seed\": %llu, \"found\": %s", (unsigned long long)rec->texts.seed,
                   rec->found ? "true" : "false");
    tow_buf_printf(b, ", \"prompt_tokens\": %lld, \"seconds\": %.3f", (long long)rec->prompt_tokens,
                   rec->seconds);
    tow_buf_printf(b, ", \"decoys\": %d, \"strange\": %s", rec->texts.hard.decoys,
                   rec->texts.hard.strange ? "true" : "false");
    put_text(b, "finish_reason", rec->finish);
    put_text(b, "expected", rec->expect);
    put_text(b, "answer", rec->answer);
    ctl_put_ranks(b, &rec->ranks);
    tow_buf_puts(b, "}");
}

static int get_u32(const struct json *o, const char *key, uint32_t *out, struct tow_err *err)
{
    int64_t v;
    int rc = json_get_int(o, key, 0, 0, UINT32_MAX, &v, err);
    if (rc == 0) *out = (uint32_t)v;
    return rc;
}

static int get_text(const struct json *o, const char *key, char *to, size_t cap,
                    struct tow_err *err)
{
    const char *s;
    int rc = json_get_string(o, key, "", &s, NULL, err);
    if (rc == 0) ctl_copy_text(to, cap, s);
    return rc;
}

static int parse_ranks(struct ctl_ranks *r, const struct json *o, struct tow_err *err)
{
    const char *name;
    int rc = json_get_string(o, "verdict", NULL, &name, NULL, err);
    if (rc < 0 || !name) return rc;
    r->captured = true;
    for (int k = TEXT_VERDICT_SELECTED; k <= TEXT_VERDICT_DOWNSTREAM; k++)
        if (!strcmp(name, text_verdict_name((enum text_verdict_kind)k)))
            r->verdict.kind = (enum text_verdict_kind)k;
    if (r->verdict.kind == TEXT_VERDICT_NONE && strcmp(name, "none") != 0)
        return tow_fail(err, TOW_EINVAL, "verdict: '%s' is unknown", name);
    const struct json *shadow = json_find(o, "shadow");
    rc = get_text(o, "verdict_text", r->text, sizeof r->text, err);
    if (rc == 0) rc = get_u32(o, "rank", &r->verdict.rank, err);
    if (rc == 0) rc = get_u32(o, "layer", &r->verdict.layer, err);
    if (rc == 0) rc = get_u32(o, "step", &r->verdict.step, err);
    if (rc == 0) rc = get_u32(o, "rank_topk", &r->verdict.topk, err);
    for (int p = 0; rc == 0 && p < TEXT_PRECISIONS; p++)
        rc = get_u32(shadow, text_precision_name((enum text_precision)p), &r->shadow[p], err);
    JSON_EACH(pair, json_find(o, "layers"))
    {
        int64_t layer, rank;
        if (!json_int(json_item(pair, 0), &layer) || !json_int(json_item(pair, 1), &rank) ||
            layer < 0 || rank < 0 || layer > UINT32_MAX || rank > UINT32_MAX ||
            r->n_layers == CTL_RANK_LAYERS)
            return tow_fail(err, TOW_EINVAL, "layers: expected at most %d pairs [layer, rank]",
                            (int)CTL_RANK_LAYERS);
        r->layers[r->n_layers].layer = (uint32_t)layer;
        r->layers[r->n_layers++].rank = (uint32_t)rank;
    }
    return rc;
}

static int find_name(const struct json *o, const char *key, const char *const *names, int *out,
                     struct tow_err *err)
{
    const char *s = json_string(json_find(o, key), NULL);
    for (int i = 0; s && names[i]; i++)
        if (!strcmp(s, names[i])) {
            *out = i;
            return 0;
        }
    return tow_fail(err, TOW_EINVAL, "%s: '%s' is unknown", key, s ? s : "");
}

static int parse_object(struct ctl_record *rec, const struct json *o, struct tow_err *err)
{
    struct ctl_cell *c = &rec->cell;
    int64_t depth = 0, rep = 0, seed = 0, decoys = 0;
    int filler = 0, keys = 0;
    static const char *const needed[] = {"length", "depth", "rep", "seed", "found"};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!json_require(o, needed[i], err)) return TOW_EINVAL;
    if (!json_find(o, "topk")) return tow_fail(err, TOW_EINVAL, "topk: is required but missing");
    int rc = json_get_int(o, "length", 0, 1, INT64_MAX, &c->length, err);
    if (rc == 0) rc = json_get_int(o, "depth", 0, 0, 100, &depth, err);
    if (rc == 0) rc = find_name(o, "filler", ctl_filler_names, &filler, err);
    if (rc == 0) rc = json_get_int(o, "rep", 0, 0, INT32_MAX, &rep, err);
    if (rc == 0) rc = find_name(o, "keys", ctl_keys_names, &keys, err);
    if (rc == 0) rc = json_get_int(o, "topk", 0, 0, INT32_MAX, &c->topk, err);
    if (rc == 0) rc = json_get_int(o, "seed", 0, 0, INT64_MAX, &seed, err);
    if (rc == 0) rc = json_get_bool(o, "found", false, &rec->found, err);
    if (rc == 0) rc = json_get_int(o, "decoys", 0, 0, CTL_MAX_DECOYS, &decoys, err);
    if (rc == 0) rc = json_get_bool(o, "strange", false, &rec->texts.hard.strange, err);
    if (rc == 0) rc = json_get_int(o, "prompt_tokens", -1, -1, INT64_MAX, &rec->prompt_tokens, err);
    if (rc == 0) rc = json_get_double(o, "seconds", 0, 0, 1e12, &rec->seconds, err);
    if (rc == 0) rc = get_text(o, "finish_reason", rec->finish, sizeof rec->finish, err);
    if (rc == 0) rc = get_text(o, "expected", rec->expect, sizeof rec->expect, err);
    if (rc == 0) rc = get_text(o, "answer", rec->answer, sizeof rec->answer, err);
    if (rc == 0) rc = parse_ranks(&rec->ranks, o, err);
    c->depth = (int)depth;
    c->rep = (int)rep;
    c->filler = (enum ctl_filler)filler;
    c->keys = (enum ctl_keys)keys;
    rec->texts.seed = (uint64_t)seed;
    rec->texts.hard.decoys = (int)decoys;
    rec->ranks.verdict.expects = rec->ranks.captured;
    rec->ranks.verdict.found = rec->ranks.captured && rec->found;
    return rc;
}

int ctl_record_parse(struct ctl_record *out, const char *line, size_t n, struct tow_err *err)
{
    struct json *root = NULL;
    struct ctl_record rec = {0};
    int rc = json_parse(&root, line, n, NULL, err);
    if (rc == 0) rc = parse_object(&rec, root, err);
    json_free(root);
    if (rc == 0) *out = rec;
    return rc;
}

/* ------------------------------------------------------------------ the file */

static int keep(struct ctl_results *r, const struct ctl_record *rec, struct tow_err *err)
{
    void *more = tow_grow(r->items, r->n, &r->cap, 64, sizeof *r->items);
    if (!more) return tow_fail(err, TOW_ENOMEM, "no memory for %u results", r->n + 1);
    r->items = more;
    r->items[r->n++] = *rec;
    return 0;
}

/* Whole lines of what the file holds; *whole: bytes up to the end of the last one. */
static int take_lines(struct ctl_results *r, const struct tow_buf *text, size_t *whole,
                      struct tow_err *err)
{
    size_t at = 0;
    for (int line = 1; at < text->len; line++) {
        const char *end = memchr(text->data + at, '\n', text->len - at);
        if (!end) break;
        size_t n = (size_t)(end - text->data) - at;
        struct ctl_record rec;
        int rc = n ? ctl_record_parse(&rec, text->data + at, n, err) : 0;
        if (rc < 0) return tow_note(err, "%s line %d", r->path, line);
        if (n && (rc = keep(r, &rec, err)) < 0) return rc;
        at += n + 1;
    }
    *whole = at;
    return 0;
}

static int read_file(struct ctl_results *r, struct tow_buf *text, struct tow_err *err)
{
    for (;;) {
        char *room = tow_buf_room(text, 65536);
        if (!room)
            return tow_fail(err, TOW_ETOOBIG, "--out %s: larger than %d bytes", r->path,
                            (int)MAX_FILE);
        ssize_t n = read(r->fd, room, 65536);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return tow_fail(err, TOW_EIO, "--out %s: %s", r->path, strerror(errno));
        if (n == 0) return 0;
        text->len += (size_t)n;
    }
}

int ctl_results_open(struct ctl_results *r, const char *path, bool resume, struct tow_err *err)
{
    *r = (struct ctl_results){.fd = -1, .path = path};
    if (!path) return 0;
    r->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    if (r->fd < 0) return tow_fail(err, TOW_EIO, "--out %s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(r->fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        ctl_results_close(r);
        return tow_fail(err, TOW_EIO,
                        "--out %s: not a regular file, and only such can be read back", path);
    }
    struct tow_buf text;
    tow_buf_init(&text, MAX_FILE);
    size_t whole = 0;
    int rc = read_file(r, &text, err);
    if (rc == 0 && text.len && !resume)
        rc = tow_fail(err, TOW_ECONFIG, "--out %s: holds results already; --resume goes on with it",
                      path);
    if (rc == 0) rc = take_lines(r, &text, &whole, err);
    if (rc == 0 && (ftruncate(r->fd, (off_t)whole) < 0 || lseek(r->fd, 0, SEEK_END) < 0))
        rc = tow_fail(err, TOW_EIO, "--out %s: %s", path, strerror(errno));
    tow_buf_fini(&text);
    return rc;
}

void ctl_results_close(struct ctl_results *r)
{
    if (r->fd >= 0) close(r->fd);
    r->fd = -1;
    free(r->items);
    r->items = NULL;
    r->n = r->cap = 0;
}

static int write_line(struct ctl_results *r, const struct ctl_record *rec, struct tow_err *err)
{
    struct tow_buf line;
    tow_buf_init(&line, 0);
    ctl_record_put(&line, rec);
    tow_buf_putc(&line, '\n');
    int rc = tow_buf_failed(&line) ? tow_fail(err, TOW_ENOMEM, "no memory for a result") : 0;
    for (size_t at = 0; rc == 0 && at < line.len;) {
        ssize_t n = write(r->fd, line.data + at, line.len - at);
        if (n >= 0)
            at += (size_t)n;
        else if (errno != EINTR)
            rc = tow_fail(err, TOW_EIO, "--out %s: %s", r->path, strerror(errno));
    }
    tow_buf_fini(&line);
    return rc;
}

int ctl_results_add(struct ctl_results *r, const struct ctl_record *rec, struct tow_err *err)
{
    int rc = keep(r, rec, err);
    return rc == 0 && r->fd >= 0 ? write_line(r, rec, err) : rc;
}

const struct ctl_record *ctl_results_find(const struct ctl_results *r, const struct ctl_cell *c,
                                          const struct ctl_texts *texts)
{
    for (uint32_t i = 0; i < r->n; i++)
        if (ctl_cell_same(&r->items[i].cell, c) && ctl_texts_same(&r->items[i].texts, texts))
            return &r->items[i];
    return NULL;
}
