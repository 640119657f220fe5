/* text/record.c - see record.h. Numbers that a reader of JSON may not hold (seed, incarnations) are
 * strings. */
#include "common/text/record.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/log.h"
#include "common/text/json.h"
#include "common/text/sampling.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_TEXT = 256, MAX_EOS = 64 };

bool text_record_id_ok(const char *id)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
    const size_t n = strspn(id, letters);
    return n > 0 && n <= TEXT_RECORD_MAX_ID && !id[n];
}

const char *text_record_fact(const struct text_record_worker *w, const char *field)
{
    for (uint32_t i = 0; i < w->n_facts; i++)
        if (!strcmp(w->facts[i][0], field)) return w->facts[i][1];
    return NULL;
}

void text_record_fini(struct text_record *r)
{
    tow_arena_fini(&r->arena);
    memset(r, 0, sizeof *r);
}

/* ------------------------------------------------------------------ writing */

static void put_text(struct tow_buf *b, const char *key, const char *s)
{
    tow_buf_printf(b, "\"%s\": ", key);
    json_put_string(b, s, strlen(s));
}

static void put_real(struct tow_buf *b, const char *key, float v)
{
    tow_buf_printf(b, ", \"%s\": ", key);
    json_put_double(b, (double)v);
}

static void put_ids(struct tow_buf *b, struct text_record_ids s)
{
    tow_buf_putc(b, '[');
    for (uint32_t i = 0; i < s.n; i++) tow_buf_printf(b, i ? ", %" PRId32 : "%" PRId32, s.ids[i]);
    tow_buf_putc(b, ']');
}

static void put_sampling(struct tow_buf *b, const struct text_record *r)
{
    tow_buf_printf(b, "\"sampling\": {\"top_k\": %" PRIu32 ", \"index_topk\": %" PRIu32, r->top_k,
                   r->index_topk);
    put_real(b, "temperature", r->temperature);
    put_real(b, "top_p", r->top_p);
    put_real(b, "min_p", r->min_p);
    put_real(b, "frequency_penalty", r->frequency_penalty);
    put_real(b, "presence_penalty", r->presence_penalty);
    put_real(b, "repetition_penalty", r->repetition_penalty);
    tow_buf_printf(b, ", \"ignore_eos\": %s, \"logit_bias\": [", r->ignore_eos ? "true" : "false");
    for (uint32_t i = 0; i < r->n_bias; i++) {
        tow_buf_printf(b, i ? ", [%" PRId32 ", " : "[%" PRId32 ", ", r->bias[i].id);
        json_put_double(b, (double)r->bias[i].bias);
        tow_buf_putc(b, ']');
    }
    tow_buf_puts(b, "]}");
}

static void put_worker(struct tow_buf *b, const struct text_record_worker *w)
{
    tow_buf_putc(b, '{');
    put_text(b, "name", w->name);
    tow_buf_puts(b, ", ");
    put_text(b, "role", w->role);
    tow_buf_printf(
        b, ", \"incarnation\": \"%016" PRIx64 "\", \"chunk_tokens\": %" PRIu32 ", \"facts\": {",
        w->incarnation, w->chunk_tokens);
    for (uint32_t i = 0; i < w->n_facts; i++) {
        if (i) tow_buf_puts(b, ", ");
        json_put_string(b, w->facts[i][0], strlen(w->facts[i][0]));
        tow_buf_puts(b, ": ");
        json_put_string(b, w->facts[i][1], strlen(w->facts[i][1]));
    }
    tow_buf_puts(b, "}}");
}

static void put_choice(struct tow_buf *b, const struct text_record_choice *c)
{
    tow_buf_printf(b, "{\"prompt\": %" PRIu32 ", \"seed\": \"%" PRIu64 "\", ", c->prompt, c->seed);
    put_text(b, "finish", c->finish);
    tow_buf_puts(b, ", \"attempts\": [");
    for (uint32_t i = 0; i < c->n_attempts; i++)
        tow_buf_printf(b,
                       "%s{\"first_output\": %" PRIu32 ", \"prefill\": %" PRIu32
                       ", \"decode\": %" PRIu32 "}",
                       i ? ", " : "", c->attempts[i].first_output, c->attempts[i].prefill,
                       c->attempts[i].decode);
    tow_buf_puts(b, "], \"output\": ");
    put_ids(b, c->output);
    tow_buf_putc(b, '}');
}

void text_record_put(struct tow_buf *b, const struct text_record *r)
{
    tow_buf_printf(b, TEXT_RECORD_BEGINS " %d, ", TEXT_RECORD_VERSION);
    put_text(b, "id", r->id);
    tow_buf_printf(b, ", \"created\": %" PRIu64 ", ", r->created);
    put_text(b, "model", r->model);
    tow_buf_printf(b,
                   ", \"n_vocab\": %" PRIu32 ", \"max_tokens\": %" PRIu32 ", \"eos\": ", r->n_vocab,
                   r->max_tokens);
    put_ids(b, r->eos);
    tow_buf_puts(b, ",\n ");
    put_sampling(b, r);
    tow_buf_puts(b, ",\n \"workers\": [");
    for (uint32_t i = 0; i < r->n_workers; i++) {
        if (i) tow_buf_puts(b, ",\n  ");
        put_worker(b, &r->workers[i]);
    }
    tow_buf_puts(b, "],\n \"prompts\": [");
    for (uint32_t i = 0; i < r->n_prompts; i++) {
        if (i) tow_buf_puts(b, ",\n  ");
        put_ids(b, r->prompts[i]);
    }
    tow_buf_puts(b, "],\n \"choices\": [");
    for (uint32_t i = 0; i < r->n_choices; i++) {
        if (i) tow_buf_puts(b, ",\n  ");
        put_choice(b, &r->choices[i]);
    }
    tow_buf_puts(b, "]}\n");
}

/* ------------------------------------------------------------------ reading */

struct reader {
    struct text_record *r;
    struct tow_err *err;
    int rc; /* of the first thing that was wrong; later ones are not looked at */
};

static void wrong(struct reader *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void wrong(struct reader *p, const char *fmt, ...)
{
    char text[400];
    va_list ap;
    if (p->rc < 0) return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    p->rc = tow_fail(p->err, TOW_EINVAL, "record: %s", text);
}

/* n items of the arena, at least one byte. */
static void *room(struct reader *p, size_t n, size_t size)
{
    void *m = p->rc < 0 ? NULL : tow_arena_alloc(&p->r->arena, n ? n * size : 1);
    if (!m && p->rc == 0) p->rc = tow_fail(p->err, TOW_ENOMEM, "record: out of memory");
    return m;
}

/* A number that must be there; on failure lo, with p->rc set. where: "choices[0]", or "". */
static int64_t number(struct reader *p, const struct json *o, const char *where, const char *key,
                      int64_t lo, int64_t hi)
{
    int64_t v = lo;
    if (p->rc < 0) return lo;
    if (json_require(o, key, p->err) == NULL)
        p->rc = TOW_EINVAL;
    else
        p->rc = json_get_int(o, key, lo, lo, hi, &v, p->err);
    if (p->rc < 0) tow_note(p->err, where[0] ? "record: %s" : "record%s", where);
    return p->rc < 0 ? lo : v;
}

static float real(struct reader *p, const struct json *o, const char *key, double lo, double hi)
{
    double v = lo;
    if (p->rc < 0) return (float)lo;
    if (json_require(o, key, p->err) == NULL)
        p->rc = TOW_EINVAL;
    else
        p->rc = json_get_double(o, key, lo, lo, hi, &v, p->err);
    if (p->rc < 0) tow_note(p->err, "record: sampling");
    return (float)v;
}

static const char *const roles[] = {"prefill", "decode", NULL};
static const char *const finishes[] = {"stop",      "length", "stop_string",
                                       "cancelled", "failed", NULL};

/* Whoever shows it need not look. */
static void plain(struct reader *p, const char *where, const char *key, const char *s, size_t n)
{
    for (size_t i = 0, k; p->rc == 0 && i < n; i += k ? k : 1) {
        k = tow_char_len(s + i, n - i);
        if (k == 0 || tow_char_commands(s + i, k))
            wrong(p, "%s%s%s: byte %zu is a control character or none of UTF-8", where,
                  where[0] ? "." : "", key, i);
    }
}

static const char *text(struct reader *p, const struct json *o, const char *where, const char *key)
{
    const char *s = "";
    size_t n = 0;
    if (p->rc < 0) return "";
    if (json_require(o, key, p->err) == NULL)
        p->rc = TOW_EINVAL;
    else
        p->rc = json_get_string(o, key, "", &s, &n, p->err);
    if (p->rc < 0) {
        tow_note(p->err, where[0] ? "record: %s" : "record%s", where);
        return "";
    }
    if (n > MAX_TEXT) wrong(p, "%s.%s: %zu bytes, at most %d", where, key, n, MAX_TEXT);
    plain(p, where, key, s, n);
    char *copy = p->rc < 0 ? NULL : tow_arena_strndup(&p->r->arena, s, n);
    if (!copy && p->rc == 0) p->rc = tow_fail(p->err, TOW_ENOMEM, "record: out of memory");
    return copy ? copy : "";
}

/* One of these words. */
static const char *word(struct reader *p, const struct json *o, const char *where, const char *key,
                        const char *const *words)
{
    const char *s = text(p, o, where, key);
    char right[80] = "";
    for (size_t i = 0; words[i] && p->rc == 0; i++) {
        if (!strcmp(words[i], s)) return s;
        snprintf(right + strlen(right), sizeof right - strlen(right), i ? ", %s" : "%s", words[i]);
    }
    wrong(p, "%s.%s: '%.40s' is none of %s", where, key, s, right);
    return "";
}

static uint64_t big_number(struct reader *p, const struct json *o, const char *where,
                           const char *key, int base)
{
    const char *s = text(p, o, where, key);
    char *end = NULL;
    if (p->rc < 0) return 0;
    errno = 0;
    uint64_t v = strtoull(s, &end, base);
    const char *digits = base == 16 ? "0123456789abcdef" : "0123456789";
    if (errno || !*s || *end || s[strspn(s, digits)])
        wrong(p, "%s.%s: '%.40s' is no string of %s digits below 2^64", where, key, s,
              base == 16 ? "hexadecimal" : "decimal");
    return v;
}

/* The member must be an array of lo..hi elements; NULL with p->rc set. */
static const struct json *array(struct reader *p, const struct json *o, const char *where,
                                const char *key, size_t lo, size_t hi, uint32_t *n)
{
    const struct json *a = json_find(o, key);
    *n = 0;
    if (p->rc < 0) return NULL;
    if (json_type(a) != JSON_ARRAY) {
        wrong(p, "%s%s%s: expected an array of %zu to %zu, found %s", where, where[0] ? "." : "",
              key, lo, hi, a ? json_type_name(a) : "nothing");
        return NULL;
    }
    const size_t size = json_size(a);
    if (size < lo || size > hi) {
        wrong(p, "%s%s%s: %zu elements, right are %zu to %zu", where, where[0] ? "." : "", key,
              size, lo, hi);
        return NULL;
    }
    *n = (uint32_t)size;
    return a;
}

static void read_ids(struct reader *p, const struct json *a, const char *where, uint32_t n,
                     struct text_record_ids *out)
{
    int32_t *ids = room(p, n, sizeof *ids);
    uint32_t i = 0;
    if (!ids) return;
    JSON_EACH(it, a)
    {
        int64_t v;
        if (!json_int(it, &v) || v < 0 || v >= p->r->n_vocab) {
            if (json_int(it, &v))
                wrong(p, "%s[%" PRIu32 "]: %" PRId64 " is not in 0..%" PRIu32 " (n_vocab - 1)",
                      where, i, v, p->r->n_vocab - 1);
            else
                wrong(p, "%s[%" PRIu32 "]: expected an id from 0 to %" PRIu32 ", found %s", where,
                      i, p->r->n_vocab - 1, json_type_name(it));
            return;
        }
        ids[i++] = (int32_t)v;
    }
    *out = (struct text_record_ids){ids, n};
}

static void read_bias(struct reader *p, const struct json *o)
{
    uint32_t n, i = 0;
    const struct json *a = array(p, o, "sampling", "logit_bias", 0, TEXT_MAX_BIASES, &n);
    struct text_record_bias *bias = room(p, n, sizeof *bias);
    if (!a || !bias) return;
    JSON_EACH(it, a)
    {
        int64_t id;
        double v;
        if (json_type(it) != JSON_ARRAY || json_size(it) != 2 || !json_int(json_item(it, 0), &id) ||
            id < 0 || id >= p->r->n_vocab || !json_double(json_item(it, 1), &v) ||
            v < -TEXT_MAX_BIAS || v > TEXT_MAX_BIAS) {
            wrong(p,
                  "sampling.logit_bias[%" PRIu32 "]: expected [id below n_vocab, number from %g "
                  "to %g]",
                  i, -TEXT_MAX_BIAS, TEXT_MAX_BIAS);
            return;
        }
        for (uint32_t k = 0; k < i; k++)
            if (bias[k].id == id) {
                wrong(p,
                      "sampling.logit_bias[%" PRIu32 "]: id %" PRId64 " stands in entry %" PRIu32
                      ", too",
                      i, id, k);
                return;
            }
        bias[i++] = (struct text_record_bias){(int32_t)id, (float)v};
    }
    p->r->bias = bias;
    p->r->n_bias = n;
}

static void read_sampling(struct reader *p, const struct json *root)
{
    struct text_record *r = p->r;
    const struct json *o = json_find(root, "sampling");
    if (p->rc == 0 && json_type(o) != JSON_OBJECT)
        wrong(p, "sampling: expected an object, found %s", o ? json_type_name(o) : "nothing");
    if (p->rc < 0) return;
    r->temperature = real(p, o, "temperature", 0, TEXT_MAX_TEMPERATURE);
    r->top_p = real(p, o, "top_p", 0, 1); /* a request's 0 stands here as the least float */
    r->min_p = real(p, o, "min_p", 0, 1);
    r->frequency_penalty = real(p, o, "frequency_penalty", -TEXT_MAX_PENALTY, TEXT_MAX_PENALTY);
    r->presence_penalty = real(p, o, "presence_penalty", -TEXT_MAX_PENALTY, TEXT_MAX_PENALTY);
    r->repetition_penalty = /* a float, which may be less than the decimal number */
        real(p, o, "repetition_penalty", (double)(float)TEXT_MIN_REPETITION, TEXT_MAX_REPETITION);
    r->top_k = (uint32_t)number(p, o, "sampling", "top_k", 0, INT32_MAX);
    r->index_topk = (uint32_t)number(p, o, "sampling", "index_topk", 0, TEXT_MAX_INDEX_TOPK);
    if (p->rc == 0) {
        p->rc = json_get_bool(o, "ignore_eos", false, &r->ignore_eos, p->err);
        if (p->rc < 0) tow_note(p->err, "record: sampling");
    }
    read_bias(p, o);
}

static void read_facts(struct reader *p, const struct json *o, const char *where,
                       struct text_record_worker *w)
{
    const struct json *facts = json_find(o, "facts");
    const size_t n = json_size(facts);
    if (p->rc < 0) return;
    if (json_type(facts) != JSON_OBJECT || n > TEXT_RECORD_MAX_FACTS) {
        wrong(p, "%s.facts: expected an object of at most %d strings", where,
              TEXT_RECORD_MAX_FACTS);
        return;
    }
    w->facts = room(p, n, sizeof *w->facts);
    if (!w->facts) return;
    JSON_EACH(it, facts)
    {
        size_t len, k = strlen(json_key(it));
        const char *s = json_string(it, &len);
        if (!s || len > MAX_TEXT || k > MAX_TEXT) {
            wrong(p, "%s.facts: '%.60s' is no string of at most %d bytes", where, json_key(it),
                  MAX_TEXT);
            return;
        }
        plain(p, where, "facts", json_key(it), k);
        plain(p, where, "facts", s, len);
        if (p->rc < 0) return;
        w->facts[w->n_facts][0] = tow_arena_strndup(&p->r->arena, json_key(it), k);
        w->facts[w->n_facts][1] = tow_arena_strndup(&p->r->arena, s, len);
        if (!w->facts[w->n_facts][0] || !w->facts[w->n_facts][1]) {
            p->rc = tow_fail(p->err, TOW_ENOMEM, "record: out of memory");
            return;
        }
        w->n_facts++;
    }
}

static void read_workers(struct reader *p, const struct json *root)
{
    uint32_t n, i = 0;
    const struct json *a = array(p, root, "", "workers", 0, TEXT_RECORD_MAX_WORKERS, &n);
    struct text_record_worker *w = room(p, n, sizeof *w);
    if (!a || !w) return;
    JSON_EACH(it, a)
    {
        char where[40];
        snprintf(where, sizeof where, "workers[%" PRIu32 "]", i);
        w[i].name = text(p, it, where, "name");
        w[i].role = word(p, it, where, "role", roles);
        w[i].incarnation = big_number(p, it, where, "incarnation", 16);
        w[i].chunk_tokens =
            (uint32_t)number(p, it, where, "chunk_tokens", 0, TEXT_RECORD_MAX_TOKENS);
        read_facts(p, it, where, &w[i]);
        if (p->rc < 0) return;
        i++;
    }
    p->r->workers = w;
    p->r->n_workers = n;
}

static void read_prompts(struct reader *p, const struct json *root)
{
    uint32_t n, i = 0;
    const struct json *a = array(p, root, "", "prompts", 1, TEXT_RECORD_MAX_CHOICES, &n);
    struct text_record_ids *prompts = room(p, n, sizeof *prompts);
    if (!a || !prompts) return;
    JSON_EACH(it, a)
    {
        char where[40];
        const size_t size = json_size(it);
        snprintf(where, sizeof where, "prompts[%" PRIu32 "]", i);
        if (json_type(it) != JSON_ARRAY || size < 1 || size > TEXT_RECORD_MAX_TOKENS)
            wrong(p, "%s: expected an array of 1 to %u ids, found %s of %zu", where,
                  TEXT_RECORD_MAX_TOKENS, json_type_name(it), size);
        else
            read_ids(p, it, where, (uint32_t)size, &prompts[i]);
        if (p->rc < 0) return;
        i++;
    }
    p->r->prompts = prompts;
    p->r->n_prompts = n;
}

static void read_attempts(struct reader *p, const struct json *o, const char *where,
                          struct text_record_choice *c)
{
    uint32_t n, i = 0;
    char at[80];
    const struct json *a = array(p, o, where, "attempts", 0, TEXT_RECORD_MAX_ATTEMPTS, &n);
    struct text_record_attempt *to = room(p, n, sizeof *to);
    if (!a || !to) return;
    const int64_t last = (int64_t)p->r->n_workers - 1;
    JSON_EACH(it, a)
    {
        snprintf(at, sizeof at, "%s.attempts[%" PRIu32 "]", where, i);
        if (p->r->n_workers == 0) wrong(p, "%s: there are no workers", at);
        to[i].first_output = (uint32_t)number(p, it, at, "first_output", 0, c->output.n);
        to[i].prefill = (uint32_t)number(p, it, at, "prefill", 0, last);
        to[i].decode = (uint32_t)number(p, it, at, "decode", 0, last);
        if (p->rc < 0) return;
        i++;
    }
    c->attempts = to;
    c->n_attempts = n;
}

static void read_choices(struct reader *p, const struct json *root)
{
    uint32_t n, m, i = 0;
    const struct json *a = array(p, root, "", "choices", 1, TEXT_RECORD_MAX_CHOICES, &n);
    struct text_record_choice *c = room(p, n, sizeof *c);
    if (!a || !c) return;
    JSON_EACH(it, a)
    {
        char where[40];
        snprintf(where, sizeof where, "choices[%" PRIu32 "]", i);
        c[i].prompt = (uint32_t)number(p, it, where, "prompt", 0, (int64_t)p->r->n_prompts - 1);
        c[i].seed = big_number(p, it, where, "seed", 10);
        c[i].finish = word(p, it, where, "finish", finishes);
        const struct json *ids = array(p, it, where, "output", 0, TEXT_RECORD_MAX_TOKENS, &m);
        snprintf(where, sizeof where, "choices[%" PRIu32 "].output", i);
        if (ids) read_ids(p, ids, where, m, &c[i].output);
        snprintf(where, sizeof where, "choices[%" PRIu32 "]", i);
        read_attempts(p, it, where, &c[i]);
        if (p->rc < 0) return;
        i++;
    }
    p->r->choices = c;
    p->r->n_choices = n;
}

static void read_root(struct reader *p, const struct json *root)
{
    struct text_record *r = p->r;
    uint32_t n;
    int64_t version = 0;
    if (json_type(root) != JSON_OBJECT) {
        wrong(p, "expected an object, found %s", json_type_name(root));
        return;
    }
    version = number(p, root, "", "towpath_record", 1, INT32_MAX);
    if (version != TEXT_RECORD_VERSION)
        wrong(p, "towpath_record: version %" PRId64 ", this program reads %d", version,
              TEXT_RECORD_VERSION);
    r->id = text(p, root, "", "id");
    if (p->rc == 0 && !text_record_id_ok(r->id))
        wrong(p, "id: '%.80s' is not 1 to %d letters, digits, '-' and '_'", r->id,
              TEXT_RECORD_MAX_ID);
    r->model = text(p, root, "", "model");
    r->created = (uint64_t)number(p, root, "", "created", 0, INT64_MAX);
    r->n_vocab = (uint32_t)number(p, root, "", "n_vocab", 1, TEXT_RECORD_MAX_VOCAB);
    r->max_tokens = (uint32_t)number(p, root, "", "max_tokens", 1, TEXT_RECORD_MAX_TOKENS);
    const struct json *eos = array(p, root, "", "eos", 0, MAX_EOS, &n);
    if (eos) read_ids(p, eos, "eos", n, &r->eos);
    read_sampling(p, root);
    read_workers(p, root);
    read_prompts(p, root);
    read_choices(p, root);
}

int text_record_parse(struct text_record *out, const char *bytes, size_t n, struct tow_err *err)
{
    const struct json_limits limits = {.max_bytes = TEXT_RECORD_MAX_BYTES, .max_depth = 8};
    struct text_record r = {0};
    struct reader p = {.r = &r, .err = err};
    struct json *root = NULL;
    int rc = json_parse(&root, bytes, n, &limits, err);
    if (rc < 0) return tow_note(err, "record"), rc;
    read_root(&p, root);
    json_free(root);
    if (p.rc < 0) {
        text_record_fini(&r);
        return p.rc;
    }
    *out = r;
    return 0;
}

int text_record_load(struct text_record *out, const char *path, struct tow_err *err)
{
    struct tow_buf b;
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe has no end */
    FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    if (!f) {
        const int rc = tow_fail(err, errno == ENOENT ? TOW_ENOENT : TOW_EIO, "%s: %m", path);
        if (fd >= 0) close(fd);
        return rc;
    }
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        fclose(f);
        return tow_fail(err, TOW_EIO, "%s: not a regular file", path);
    }
    tow_buf_init(&b, TEXT_RECORD_MAX_BYTES + 1);
    int rc = 0;
    for (size_t got = 1; rc == 0 && got > 0;) {
        char *to = tow_buf_room(&b, 65536);
        got = to ? fread(to, 1, 65536, f) : 0;
        b.len += got;
        if (ferror(f)) rc = tow_fail(err, TOW_EIO, "%s: %m", path);
        if (!to)
            rc = tow_fail(err, TOW_ETOOBIG, "%s: more than %zu bytes, or out of memory", path,
                          TEXT_RECORD_MAX_BYTES);
    }
    fclose(f);
    if (rc == 0 && (rc = text_record_parse(out, b.data ? b.data : "", b.len, err)) < 0)
        tow_note(err, "%s", path);
    tow_buf_fini(&b);
    return rc;
}
