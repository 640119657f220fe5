/* router/capture.c - see capture.h. Text is looked for in the bytes of the tokens, not in what the
 * client sent: so text of the chat format is found too, and what is found has token borders. */
#include "router/capture.h"

#include "common/base/buf.h"
#include "common/text/json.h"
#include "common/text/verdict.h"
#include "router/api_request.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD     "index_capture"
#define MAX_FINDS 100 /* occurrences of a text that are counted */

_Static_assert((int)TEXT_BF16 == (int)WIRE_SHADOW_BF16 && (int)TEXT_FP8 == (int)WIRE_SHADOW_FP8 &&
                   (int)TEXT_FP4 == (int)WIRE_SHADOW_FP4,
               "one order of key types");

struct parse {
    const struct json *v;
    const struct rtr_capture_rules *rules;
    struct tow_arena *arena;
    struct rtr_capture *c;
    struct rtr_api_error *e;
    struct tow_err err;
};

#define WRONG(p, field, ...)                                                                       \
    rtr_api_fail((p)->e, 400, "invalid_index_capture", FIELD field, FIELD field __VA_ARGS__)

static int no_memory(struct parse *p)
{
    return rtr_api_fail(p->e, 503, "out_of_memory", NULL, "out of memory for this request");
}

/* A misspelt field would change what is measured, and nobody would see it. names: NULL at the
 * end. */
static int only_known(struct parse *p, const struct json *v, const char *const *names,
                      const char *param)
{
    JSON_EACH(it, v)
    {
        char is[JSON_SHOW_BYTES], known[128] = "";
        const char *key = json_key(it);
        size_t i = 0;
        for (; names[i] && strcmp(names[i], key) != 0; i++)
            snprintf(known + strlen(known), sizeof known - strlen(known), i ? ", %s" : "%s",
                     names[i]);
        if (!names[i])
            return rtr_api_fail(p->e, 400, "invalid_index_capture", param,
                                "%s: has no field %s; its fields are %s", param,
                                json_show_text(key, strlen(key), is), known);
    }
    return 0;
}

/* ---- spans ---- */

/* The bytes of the prompt. */
static void prompt_text(const struct rtr_capture_rules *rules, struct tow_buf *out)
{
    size_t len;
    for (uint32_t i = 0; i < rules->n_prompt; i++) {
        const uint8_t *bytes = text_tokenizer_peek(rules->tok, rules->prompt[i], &len);
        if (len) tow_buf_put(out, bytes, len);
    }
}

/* Occurrences, overlapping ones too; *at is the first. */
static uint32_t count_finds(const char *text, size_t n, const char *what, size_t len, size_t *at)
{
    uint32_t finds = 0;
    for (const char *from = text; finds < MAX_FINDS; finds++) {
        const char *found = memmem(from, n - (size_t)(from - text), what, len);
        if (!found) break;
        if (!finds) *at = (size_t)(found - text);
        from = found + 1;
    }
    return finds;
}

/* The tokens that hold the bytes from .. to - 1. */
static struct rtr_capture_span tokens_of_bytes(const struct rtr_capture_rules *rules, size_t from,
                                               size_t to)
{
    struct rtr_capture_span s = {0, 0};
    size_t at = 0, len;
    for (uint32_t i = 0; i < rules->n_prompt && at < to; i++) {
        text_tokenizer_peek(rules->tok, rules->prompt[i], &len);
        if (at + len <= from) s.start = i + 1;
        at += len;
        s.end = i + 1;
    }
    return s;
}

static int find_text(struct parse *p, const struct json *v, struct rtr_capture_span *out)
{
    size_t len, at = 0;
    const char *text = json_string(json_find(v, "text"), &len);
    char is[JSON_SHOW_BYTES];
    static const char *const known[] = {"text", NULL};
    int rc = only_known(p, v, known, FIELD ".spans");
    if (rc < 0) return rc;
    if (!text || !len)
        return WRONG(p, ".spans", ": text must be a string that is not empty, is %s",
                     json_show(json_find(v, "text"), is));
    struct tow_buf all;
    tow_buf_init(&all, 0);
    prompt_text(p->rules, &all);
    bool failed = tow_buf_failed(&all);
    uint32_t finds = failed || !all.len ? 0 : count_finds(all.data, all.len, text, len, &at);
    tow_buf_fini(&all);
    if (failed) return no_memory(p);
    json_show_text(text, len, is);
    if (!finds) return WRONG(p, ".spans", ": the text %s is not in the encoded prompt", is);
    if (finds > 1)
        return WRONG(p, ".spans", ": the text %s is %s%u times in the encoded prompt, must be once",
                     is, finds == MAX_FINDS ? "at least " : "", finds);
    *out = tokens_of_bytes(p->rules, at, at + len);
    return 0;
}

static int take_pair(struct parse *p, const struct json *v, size_t i, struct rtr_capture_span *out)
{
    int64_t start, end;
    const struct json *first = json_first(v);
    char is[JSON_SHOW_BYTES], next[JSON_SHOW_BYTES];
    if (json_type(v) != JSON_ARRAY)
        return WRONG(p, ".spans", "[%zu]: must be [start, end] or {\"text\": \"...\"}, is %s", i,
                     json_show(v, is));
    if (json_size(v) != 2)
        return WRONG(p, ".spans", "[%zu]: must be [start, end], is a list of %zu", i, json_size(v));
    if (!json_int(first, &start) || !json_int(json_next(first), &end))
        return WRONG(p, ".spans", "[%zu]: must be [start, end], two integers, is [%s, %s]", i,
                     json_show(first, is), json_show(json_next(first), next));
    if (start < 0 || start >= end || end > p->rules->n_prompt)
        return WRONG(p, ".spans",
                     "[%zu]: [%" PRId64 ", %" PRId64 "] is no span of the prompt, which has %u "
                     "tokens; 0 <= start < end <= %u",
                     i, start, end, p->rules->n_prompt, p->rules->n_prompt);
    *out = (struct rtr_capture_span){(uint32_t)start, (uint32_t)end};
    return 0;
}

static int read_spans(struct parse *p)
{
    const struct json *v = json_find(p->v, "spans");
    struct rtr_capture *c = p->c;
    char is[JSON_SHOW_BYTES];
    if (json_type(v) == JSON_OBJECT) {
        c->n_spans = 1;
        return find_text(p, v, &c->spans[0]);
    }
    size_t n = json_size(v);
    if (json_type(v) != JSON_ARRAY)
        return WRONG(p, ".spans", ": must be a list of [start, end] or {\"text\": \"...\"}, is %s",
                     json_show(v, is));
    if (n < 1 || n > RTR_CAPTURE_MAX_SPANS)
        return WRONG(p, ".spans", ": %zu spans, must be 1 to %d", n, RTR_CAPTURE_MAX_SPANS);
    JSON_EACH(it, v)
    {
        struct rtr_capture_span *s = &c->spans[c->n_spans];
        int rc =
            json_type(it) == JSON_OBJECT ? find_text(p, it, s) : take_pair(p, it, c->n_spans, s);
        if (rc < 0) return rc;
        c->n_spans++;
    }
    return 0;
}

/* ---- entries ---- */

/* Token t is in the entries t / 4 and t / 4 + 1. */
uint32_t rtr_capture_first_entry(struct rtr_capture_span s)
{
    return s.start / RTR_CAPTURE_RATIO;
}

uint32_t rtr_capture_last_entry(struct rtr_capture_span s)
{
    return (s.end - 1) / RTR_CAPTURE_RATIO + 1;
}

static int by_start(const void *a, const void *b)
{
    const struct rtr_capture_span *x = a, *y = b;
    return (x->start > y->start) - (x->start < y->start);
}

/* The union of what the spans cover, ascending. */
static int make_entries(struct parse *p)
{
    struct rtr_capture_span sorted[RTR_CAPTURE_MAX_SPANS];
    uint32_t n = p->c->n_spans, next = 0, count = 0;
    memcpy(sorted, p->c->spans, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, by_start);
    uint32_t *ids = tow_arena_alloc(p->arena, WIRE_CAPTURE_MAX_ENTRIES * sizeof *ids);
    if (!ids) return no_memory(p);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = rtr_capture_first_entry(sorted[i]);
        uint32_t last = rtr_capture_last_entry(sorted[i]);
        for (uint32_t e = first > next ? first : next; e <= last; e++) {
            if (count < WIRE_CAPTURE_MAX_ENTRIES) ids[count] = e;
            count++;
            next = e + 1;
        }
    }
    if (count > WIRE_CAPTURE_MAX_ENTRIES)
        return WRONG(p, ".spans", ": cover %u compressed entries, at most %d", count,
                     WIRE_CAPTURE_MAX_ENTRIES);
    p->c->ask.entries = (struct wire_ids){ids, count};
    return 0;
}

/* ---- the other fields ---- */

static int read_steps(struct parse *p)
{
    static const char *const names[] = {[WIRE_CAPTURE_PREFILL] = "prefill_last",
                                        [WIRE_CAPTURE_DECODE] = "decode",
                                        [WIRE_CAPTURE_ALL] = "all"};
    const struct json *v = json_find(p->v, "steps");
    const char *s = json_string(v, NULL);
    char is[JSON_SHOW_BYTES];
    int64_t max;
    if (json_type(v) == JSON_NULL) s = names[WIRE_CAPTURE_PREFILL];
    for (uint8_t i = WIRE_CAPTURE_PREFILL; s && i <= WIRE_CAPTURE_ALL; i++)
        if (!strcmp(s, names[i])) p->c->ask.steps = i;
    if (!p->c->ask.steps)
        return WRONG(p, ".steps", ": must be \"prefill_last\", \"decode\" or \"all\", is %s",
                     json_show(v, is));
    if (json_get_int(p->v, "max_steps", 64, 1, WIRE_CAPTURE_MAX_STEPS, &max, &p->err) < 0)
        return WRONG(p, ".max_steps", ": must be an integer from 1 to %d, is %s",
                     WIRE_CAPTURE_MAX_STEPS, json_show(json_find(p->v, "max_steps"), is));
    p->c->ask.max_steps = (uint32_t)max;
    return 0;
}

static bool has_indexer(const struct rtr_capture_rules *rules, int64_t layer)
{
    return layer >= 0 && layer < rules->n_layers && rules->ratios[layer] == RTR_CAPTURE_RATIO;
}

/* "2, 4, 6" */
static void print_layers(const struct rtr_capture_rules *rules, char *out, size_t cap)
{
    size_t n = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < rules->n_layers && n < cap; i++)
        if (has_indexer(rules, i)) n += (size_t)snprintf(out + n, cap - n, n ? ", %u" : "%u", i);
}

static int read_layers(struct parse *p)
{
    const struct json *v = json_find(p->v, "layers");
    const char *s = json_string(v, NULL);
    char all[512], is[JSON_SHOW_BYTES];
    bool want[WIRE_CAPTURE_MAX_LAYERS] = {false};
    print_layers(p->rules, all, sizeof all);
    if (!all[0]) return WRONG(p, ".layers", ": this model has no layer with an indexer");
    if (json_type(v) == JSON_NULL || (s && !strcmp(s, "all"))) return 0;
    if (json_type(v) != JSON_ARRAY || !json_first(v))
        return WRONG(p, ".layers",
                     ": must be \"all\" or a list of layers, is %s; layers with an indexer: %s",
                     json_type(v) == JSON_ARRAY ? "an empty list" : json_show(v, is), all);
    JSON_EACH(it, v)
    {
        int64_t layer;
        if (!json_int(it, &layer))
            return WRONG(p, ".layers",
                         ": each must be the number of a layer, is %s; layers with an indexer: %s",
                         json_show(it, is), all);
        if (!has_indexer(p->rules, layer) || layer >= WIRE_CAPTURE_MAX_LAYERS)
            return WRONG(p, ".layers",
                         ": layer %" PRId64 " has no indexer; layers with an indexer: %s", layer,
                         all);
        want[layer] = true;
    }
    uint32_t *ids = tow_arena_alloc(p->arena, WIRE_CAPTURE_MAX_LAYERS * sizeof *ids), n = 0;
    if (!ids) return no_memory(p);
    for (uint32_t i = 0; i < WIRE_CAPTURE_MAX_LAYERS; i++)
        if (want[i]) ids[n++] = i;
    p->c->ask.layers = (struct wire_ids){ids, n};
    return 0;
}

static int read_shadow(struct parse *p)
{
    const struct json *v = json_find(p->v, "shadow");
    char is[JSON_SHOW_BYTES];
    if (json_type(v) != JSON_NULL && json_type(v) != JSON_ARRAY)
        return WRONG(p, ".shadow", ": must be a list of \"bf16\", \"fp8\", \"fp4\", is %s",
                     json_show(v, is));
    JSON_EACH(it, v)
    {
        const char *name = json_string(it, NULL);
        int key = name ? text_precision_find(name) : -1;
        if (key < 0)
            return WRONG(p, ".shadow", ": each must be \"bf16\", \"fp8\" or \"fp4\", is %s",
                         json_show(it, is));
        p->c->ask.shadow |= (uint8_t)(1 << key);
    }
    return 0;
}

static int read_rest(struct parse *p)
{
    bool lists;
    char is[JSON_SHOW_BYTES];
    if (json_get_bool(p->v, "lists", false, &lists, &p->err) < 0)
        return WRONG(p, ".lists", ": must be true or false, is %s",
                     json_show(json_find(p->v, "lists"), is));
    p->c->ask.lists = lists;
    const struct json *v = json_find(p->v, "expect");
    if (json_type(v) == JSON_NULL) return 0;
    p->c->expect = json_string(v, &p->c->expect_len);
    if (!p->c->expect || p->c->expect_len < 1 || p->c->expect_len > RTR_CAPTURE_MAX_EXPECT)
        return WRONG(p, ".expect", ": must be a string of 1 to %d bytes, is %s%s",
                     RTR_CAPTURE_MAX_EXPECT, json_show(v, is),
                     p->c->expect_len > RTR_CAPTURE_MAX_EXPECT ? " and longer" : "");
    return 0;
}

static int pack(struct parse *p)
{
    struct wire_writer count = {0}, w = {0};
    wire_put_capture(&count, &p->c->ask);
    w.cap = count.len;
    w.data = tow_arena_alloc(p->arena, count.len);
    if (!w.data) return no_memory(p);
    wire_put_capture(&w, &p->c->ask);
    p->c->packed = w.data;
    p->c->packed_bytes = (uint32_t)w.len;
    return 0;
}

int rtr_capture_parse(struct rtr_capture **out, const struct json *v,
                      const struct rtr_capture_rules *rules, struct tow_arena *arena,
                      struct rtr_api_error *e)
{
    static const char *const fields[] = {"spans",  "steps", "max_steps", "layers",
                                         "shadow", "lists", "expect",    NULL};
    struct parse p = {.v = v, .rules = rules, .arena = arena, .e = e};
    int rc;
    char is[JSON_SHOW_BYTES];
    if (json_type(v) != JSON_OBJECT)
        return WRONG(&p, "", ": must be an object, is %s", json_show(v, is));
    p.c = tow_arena_alloc(arena, sizeof *p.c);
    if (!p.c) return no_memory(&p);
    p.c->prompt = rules->prompt;
    p.c->n_prompt = rules->n_prompt;
    if ((rc = only_known(&p, v, fields, FIELD)) < 0) return rc;
    if ((rc = read_spans(&p)) < 0 || (rc = make_entries(&p)) < 0 || (rc = read_steps(&p)) < 0 ||
        (rc = read_layers(&p)) < 0 || (rc = read_shadow(&p)) < 0 || (rc = read_rest(&p)) < 0 ||
        (rc = pack(&p)) < 0)
        return rc;
    *out = p.c;
    return 0;
}
