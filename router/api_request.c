/* router/api_request.c - see api_request.h. One function per group of fields; the first wrong field
 * ends the check. Rejected: a table of fields, which hid the rules that tie two fields together. */
#include "router/api_request.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/text/json.h"
#include "common/text/detok.h"
#include "common/text/sampling.h"
#include "common/text/tokenizer.h"
#include "common/text/utf8.h"

#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BYTES   ((size_t)1 << 30)
#define RTR_MAX_TOOLS 512
/* Values of any kind in one body: a context of a million ids, and 65,536 besides. The tree takes
 * about 100 bytes for each, so --max-body-bytes alone would bound nothing. */
#define MAX_VALUES ((1u << 20) + (1u << 16))
/* Keys of all objects: eight for each of 32,768 messages. To find a key that stands twice costs at
 * most 24 MiB while a body is read. */
#define MAX_KEYS (1u << 18)

/* Characters that change how the text around them is shown: controls, and marks and overrides of
 * the direction. */
static bool is_hidden(uint32_t c)
{
    return c < 0x20 || (c >= 0x7f && c <= 0x9f) || c == 0x61c || c == 0x200e || c == 0x200f ||
           (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
}

/* A message holds what a client sent, and is read in terminals and logs. Ends before what has no
 * room and before half a character, which a cut may have left. */
static void put_visible(char *out, size_t cap, const char *s)
{
    const size_t n = strlen(s);
    size_t to = 0;
    for (size_t at = 0; at < n;) {
        char escape[8];
        uint32_t c;
        const int k = text_utf8_next((const uint8_t *)s + at, n - at, &c);
        if (k <= 0) break;
        const bool hidden = is_hidden(c);
        if (hidden) snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
        const size_t len = hidden ? strlen(escape) : (size_t)k;
        if (to + len >= cap) break;
        memcpy(out + to, hidden ? escape : s + at, len);
        to += len;
        at += (size_t)k;
    }
    out[to] = 0;
}

int rtr_api_fail(struct rtr_api_error *e, int status, const char *code, const char *param,
                 const char *fmt, ...)
{
    char text[sizeof e->message];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    put_visible(e->message, sizeof e->message, text);
    e->status = status;
    e->code = code;
    e->type = status == 401   ? "authentication_error"
              : status == 429 ? "rate_limit_error"
              : status >= 500 ? "server_error"
                              : "invalid_request_error";
    snprintf(e->param, sizeof e->param, "%s", param ? param : "");
    return status == 404 ? TOW_ENOENT : status == 413 ? TOW_ETOOBIG : TOW_EINVAL;
}

struct check {
    struct rtr_ask *a;
    const struct json *root;
    const struct rtr_ask_rules *rules;
    struct rtr_api_error *e;
    struct tow_err err;
};

static int bad(struct check *c, const char *param, const char *code)
{
    return rtr_api_fail(c->e, 400, code ? code : "invalid_value", param, "%s", c->err.msg);
}

/* For a field of a nested object: the message knows only its last name. */
static int bad_inner(struct check *c, const char *param)
{
    int parent = (int)(strrchr(param, '.') + 1 - param);
    return rtr_api_fail(c->e, 400, "invalid_value", param, "%.*s%s", parent, param, c->err.msg);
}

/* "param: must be WANTED, is VALUE", in the client's words; v NULL is missing. */
static int must_be(struct check *c, const char *code, const char *param, const struct json *v,
                   const char *wanted, ...) __attribute__((format(printf, 5, 6)));
static int must_be(struct check *c, const char *code, const char *param, const struct json *v,
                   const char *wanted, ...)
{
    char what[200], is[JSON_SHOW_BYTES];
    va_list ap;
    va_start(ap, wanted);
    vsnprintf(what, sizeof what, wanted, ap);
    va_end(ap);
    return rtr_api_fail(c->e, 400, code, param, "%s: must be %s, is %s", param, what,
                        json_show(v, is));
}

static int no_memory(struct check *c)
{
    return rtr_api_fail(c->e, 503, "out_of_memory", NULL, "out of memory for this request");
}

static int get_float(struct check *c, const char *key, double def, double lo, double hi, float *out)
{
    double v;
    if (json_get_double(c->root, key, def, lo, hi, &v, &c->err) < 0) return bad(c, key, NULL);
    *out = (float)v;
    return 0;
}

static int get_bool(struct check *c, const char *key, bool def, bool *out)
{
    return json_get_bool(c->root, key, def, out, &c->err) < 0 ? bad(c, key, NULL) : 0;
}

static int get_int(struct check *c, const char *key, int64_t def, int64_t lo, int64_t hi,
                   int64_t *out)
{
    return json_get_int(c->root, key, def, lo, hi, out, &c->err) < 0 ? bad(c, key, NULL) : 0;
}

static int check_model(struct check *c)
{
    const char *s;
    size_t n;
    if (json_get_string(c->root, "model", NULL, &s, &n, &c->err) < 0) return bad(c, "model", NULL);
    const char *served = c->rules->served_model_name;
    if (!s) {
        c->a->model = served ? served : c->rules->model_name;
        c->a->model_len = strlen(c->a->model);
        return 0;
    }
    if (served && (n != strlen(served) || memcmp(s, served, n))) {
        char is[JSON_SHOW_BYTES];
        return rtr_api_fail(c->e, 404, "model_not_found", "model",
                            "model: %s is not served here; \"%.200s\" is", json_show_text(s, n, is),
                            served);
    }
    if (n > RTR_MAX_MODEL_NAME) { /* it stands in every chunk of a stream */
        return rtr_api_fail(c->e, 400, "invalid_value", "model",
                            "model: must be a string of at most %d bytes, is one of %zu bytes",
                            RTR_MAX_MODEL_NAME, n);
    }
    c->a->model = s;
    c->a->model_len = n;
    return 0;
}

/* Of the one way to write an id, so that no two keys mean the same token: no sign, no blank, no 0
 * in front. -1: not written so. */
static int64_t id_of_key(const char *key)
{
    size_t n = strspn(key, "0123456789");
    if (n < 1 || n > 9 || key[n] || (n > 1 && key[0] == '0')) return -1;
    return strtol(key, NULL, 10);
}

static int check_bias(struct check *c)
{
    const struct json *obj;
    if (json_get_object(c->root, "logit_bias", &obj, &c->err) < 0) {
        return bad(c, "logit_bias", NULL);
    }
    size_t n = obj ? json_size(obj) : 0;
    if (!n) return 0;
    if (n > TEXT_MAX_BIASES) {
        return rtr_api_fail(c->e, 400, "invalid_value", "logit_bias",
                            "logit_bias: %zu entries, at most %d", n, TEXT_MAX_BIASES);
    }
    struct rtr_bias *bias = tow_arena_alloc(&c->a->req.arena, n * sizeof *bias);
    if (!bias) return no_memory(c);
    size_t i = 0;
    JSON_EACH(it, obj)
    {
        char is[JSON_SHOW_BYTES], at[JSON_SHOW_BYTES];
        const char *key = json_key(it);
        int64_t id = id_of_key(key);
        json_show_text(key, strlen(key), at);
        if (id < 0 || id >= c->rules->n_vocab) {
            return rtr_api_fail(c->e, 400, "invalid_value", "logit_bias",
                                "logit_bias: each key must be a token id from 0 to %u in plain "
                                "decimal digits, is %s",
                                c->rules->n_vocab - 1, at);
        }
        double v;
        if (!json_double(it, &v) || v < -TEXT_MAX_BIAS || v > TEXT_MAX_BIAS) {
            return rtr_api_fail(c->e, 400, "invalid_value", "logit_bias",
                                "logit_bias[%s]: must be a number from %g to %g, is %s", at,
                                -TEXT_MAX_BIAS, TEXT_MAX_BIAS, json_show(it, is));
        }
        bias[i++] = (struct rtr_bias){(text_id)id, (float)v};
    }
    c->a->req.sampling.bias = bias;
    c->a->req.sampling.n_bias = (uint32_t)n;
    return 0;
}

static int check_logprobs(struct check *c)
{
    struct rtr_sampling *s = &c->a->req.sampling;
    int64_t top;
    if (c->a->route == RTR_COMPLETIONS) {
        if (get_int(c, "logprobs", -1, 0, RTR_MAX_TOP, &top) < 0) return TOW_EINVAL;
        s->want_logprobs = top >= 0;
        s->n_top = top > 0 ? (uint8_t)top : 0;
        return 0;
    }
    if (get_bool(c, "logprobs", false, &s->want_logprobs) < 0) return TOW_EINVAL;
    if (get_int(c, "top_logprobs", -1, 0, RTR_MAX_TOP, &top) < 0) return TOW_EINVAL;
    if (top >= 0 && !s->want_logprobs) {
        return rtr_api_fail(c->e, 400, "invalid_value", "top_logprobs",
                            "top_logprobs: is %" PRId64 ", but logprobs is not true", top);
    }
    s->n_top = top > 0 ? (uint8_t)top : 0;
    return 0;
}

static int check_sampling(struct check *c)
{
    struct rtr_sampling *s = &c->a->req.sampling;
    int64_t v;
    if (get_float(c, "temperature", 1, 0, TEXT_MAX_TEMPERATURE, &s->temperature) < 0 ||
        get_float(c, "top_p", 1, 0, 1, &s->top_p) < 0 ||
        get_float(c, "min_p", 0, 0, 1, &s->min_p) < 0 ||
        get_float(c, "presence_penalty", 0, -TEXT_MAX_PENALTY, TEXT_MAX_PENALTY,
                  &s->presence_penalty) < 0 ||
        get_float(c, "frequency_penalty", 0, -TEXT_MAX_PENALTY, TEXT_MAX_PENALTY,
                  &s->frequency_penalty) < 0 ||
        get_float(c, "repetition_penalty", 1, TEXT_MIN_REPETITION, TEXT_MAX_REPETITION,
                  &s->repetition_penalty) < 0 ||
        get_bool(c, "ignore_eos", false, &s->ignore_eos) < 0) {
        return TOW_EINVAL;
    }
    if (s->top_p < FLT_MIN) s->top_p = FLT_MIN; /* the likeliest token alone */
    if (get_int(c, "top_k", 0, -1, INT32_MAX, &v) < 0) return TOW_EINVAL;
    s->top_k = v > 0 ? (uint32_t)v : 0;
    if (get_int(c, "index_topk", 0, 1, TEXT_MAX_INDEX_TOPK, &v) < 0) return TOW_EINVAL;
    s->index_topk = (uint32_t)v;
    const struct json *capture = json_find(c->root, "index_capture");
    char is[JSON_SHOW_BYTES];
    if (json_type(capture) != JSON_NULL && !c->rules->index_capture) {
        return rtr_api_fail(c->e, 400, "index_capture_disabled", "index_capture",
                            "index_capture: must be null or absent, is %s; captures are not "
                            "enabled on this server",
                            json_show(capture, is));
    }
    if (check_bias(c) < 0) return TOW_EINVAL;
    return check_logprobs(c);
}

static int check_one_stop(struct check *c, const struct json *v, size_t i, bool in_list)
{
    char param[32];
    snprintf(param, sizeof param, in_list ? "stop[%zu]" : "stop", i);
    size_t len;
    const char *s = json_string(v, &len);
    if (!s) {
        return must_be(c, "invalid_type", param, v, "a string of 1 to %d bytes", RTR_MAX_STOP_LEN);
    }
    if (len < 1 || len > RTR_MAX_STOP_LEN) {
        char is[JSON_SHOW_BYTES];
        return rtr_api_fail(c->e, 400, "invalid_value", param,
                            "%s: must be a string of 1 to %d bytes, is %s of %zu bytes", param,
                            RTR_MAX_STOP_LEN, json_show(v, is), len);
    }
    c->a->stops[c->a->n_stops++] = (struct rtr_stop_string){s, len};
    return 0;
}

static int check_stop(struct check *c)
{
    const struct json *v = json_find(c->root, "stop");
    if (json_type(v) == JSON_NULL) return 0;
    if (json_type(v) == JSON_STRING) return check_one_stop(c, v, 0, false);
    if (json_type(v) != JSON_ARRAY) {
        return must_be(c, "invalid_type", "stop", v, "a string or a list of strings");
    }
    size_t n = json_size(v), i = 0;
    if (n > RTR_MAX_STOPS) {
        return rtr_api_fail(c->e, 400, "invalid_value", "stop", "stop: %zu strings, at most %d", n,
                            RTR_MAX_STOPS);
    }
    JSON_EACH(it, v)
    {
        if (check_one_stop(c, it, i++, true) < 0) return TOW_EINVAL;
    }
    return 0;
}

static int check_stream(struct check *c)
{
    const struct json *options;
    const char *user;
    if (get_bool(c, "stream", false, &c->a->stream) < 0) return TOW_EINVAL;
    if (json_get_object(c->root, "stream_options", &options, &c->err) < 0) {
        return bad(c, "stream_options", NULL);
    }
    if (options && !c->a->stream) {
        return rtr_api_fail(c->e, 400, "invalid_value", "stream_options",
                            "stream_options: must be null or absent when stream is not true, is "
                            "an object");
    }
    if (options &&
        json_get_bool(options, "include_usage", false, &c->a->include_usage, &c->err) < 0) {
        return bad(c, "stream_options.include_usage", NULL);
    }
    if (json_get_string(c->root, "user", NULL, &user, NULL, &c->err) < 0) {
        return bad(c, "user", NULL);
    }
    return 0;
}

/* ---- prompts ---- */

static int take_ids(struct check *c, const struct json *list, const char *param, text_id **out,
                    uint32_t *n_out)
{
    size_t n = json_size(list), i = 0;
    if (n > c->rules->context_length) {
        return rtr_api_fail(c->e, 400, "context_length_exceeded", param,
                            "%s: %zu tokens; the context limit is %u tokens", param, n,
                            c->rules->context_length);
    }
    text_id *ids = tow_arena_alloc(&c->a->req.arena, (n ? n : 1) * sizeof *ids);
    if (!ids) return no_memory(c);
    JSON_EACH(it, list)
    {
        int64_t v;
        if (!json_int(it, &v) || v < 0 || v >= c->rules->n_vocab) {
            char is[JSON_SHOW_BYTES];
            return rtr_api_fail(c->e, 400, "invalid_token_id", param,
                                "%s[%zu]: must be a token id from 0 to %u, is %s", param, i,
                                c->rules->n_vocab - 1, json_show(it, is));
        }
        ids[i++] = (text_id)v;
    }
    if (text_tokenizer_check_ids(c->rules->tok, ids, n, &c->err) < 0) {
        return rtr_api_fail(c->e, 400, "invalid_token_id", param, "%s: %s", param, c->err.msg);
    }
    *out = ids;
    *n_out = (uint32_t)n;
    return 0;
}

static int take_segments(struct check *c, const struct text_segment *segs, size_t n_segs,
                         const char *param, text_id **out, uint32_t *n_out)
{
    struct text_ids ids = {0};
    int rc = text_tokenizer_encode(c->rules->tok, segs, n_segs, 0, &ids, NULL, &c->err);
    if (rc < 0) {
        rc = rc == TOW_ENOMEM
                 ? no_memory(c)
                 : rtr_api_fail(c->e, 400, "invalid_value", param, "%s: %s", param, c->err.msg);
        goto free_ids;
    }
    rc = 0;
    *out = tow_arena_alloc(&c->a->req.arena, (ids.n ? ids.n : 1) * sizeof **out);
    if (!*out) {
        rc = no_memory(c);
        goto free_ids;
    }
    if (ids.n) memcpy(*out, ids.ids, ids.n * sizeof **out);
    *n_out = (uint32_t)ids.n;
free_ids:
    text_ids_fini(&ids);
    return rc;
}

struct prompt {
    text_id *ids;
    uint32_t n;
};

/* One prompt of /v1/completions or /tokenize: a string or a list of ids. */
static int take_prompt(struct check *c, const struct json *v, const char *param, struct prompt *p)
{
    size_t len;
    const char *s = json_string(v, &len);
    if (!s) return take_ids(c, v, param, &p->ids, &p->n);
    struct text_segment seg = {s, len, true};
    return take_segments(c, &seg, 1, param, &p->ids, &p->n);
}

static int echo_prompt(struct check *c, const struct prompt *p, uint32_t i)
{
    struct tow_buf b;
    tow_buf_init(&b, 0);
    text_detok_all(c->rules->tok, p->ids, p->n, false, &b);
    if (tow_buf_failed(&b)) {
        tow_buf_fini(&b);
        return no_memory(c);
    }
    c->a->echo[i] = tow_arena_strndup(&c->a->req.arena, b.data ? b.data : "", b.len);
    c->a->echo_len[i] = b.len;
    tow_buf_fini(&b);
    return c->a->echo[i] ? 0 : no_memory(c);
}

#define PROMPT_FORMS "a string, a list of strings, a list of token ids or a list of such lists"

/* Is it a list of numbers (one prompt), of strings or of lists (several)? */
static bool is_one_prompt(const struct json *v)
{
    return json_type(v) == JSON_STRING ||
           (json_type(v) == JSON_ARRAY && json_type(json_first(v)) == JSON_NUMBER);
}

static int check_prompts(struct check *c, struct prompt **out)
{
    const struct json *v = json_find(c->root, "prompt");
    if (json_type(v) == JSON_NULL) {
        return must_be(c, "missing_field", "prompt", v, PROMPT_FORMS);
    }
    bool one = is_one_prompt(v);
    size_t n = one ? 1 : json_size(v);
    if (!one && (json_type(v) != JSON_ARRAY || n == 0)) {
        if (n == 0 && json_type(v) == JSON_ARRAY)
            return rtr_api_fail(c->e, 400, "invalid_type", "prompt",
                                "prompt: must be " PROMPT_FORMS ", is an empty list");
        return must_be(c, "invalid_type", "prompt", v, PROMPT_FORMS);
    }
    if (n > RTR_MAX_CHOICES) {
        return rtr_api_fail(c->e, 400, "invalid_value", "prompt", "prompt: %zu prompts, at most %d",
                            n, RTR_MAX_CHOICES);
    }
    struct prompt *p = tow_arena_alloc(&c->a->req.arena, n * sizeof *p);
    if (!p) return no_memory(c);
    c->a->n_prompts = (uint32_t)n;
    size_t i = 0;
    for (const struct json *it = one ? v : json_first(v); it;
         it = one ? NULL : json_next(it), i++) {
        char param[32] = "prompt";
        if (!one) snprintf(param, sizeof param, "prompt[%zu]", i);
        if (json_type(it) != JSON_STRING && json_type(it) != JSON_ARRAY) {
            return must_be(c, "invalid_type", param, it, "a string or a list of token ids");
        }
        if (take_prompt(c, it, param, &p[i]) < 0) return TOW_EINVAL;
        if (!p[i].n) {
            return rtr_api_fail(c->e, 400, "invalid_value", param,
                                "%s: must be at least one token, is empty", param);
        }
    }
    *out = p;
    return 0;
}

static int check_completion_only(struct check *c, struct prompt *prompts)
{
    bool echo;
    int64_t best_of;
    if (get_bool(c, "echo", false, &echo) < 0) return TOW_EINVAL;
    if (get_int(c, "best_of", c->a->n, 1, RTR_MAX_CHOICES, &best_of) < 0) return TOW_EINVAL;
    if (best_of != c->a->n) {
        return rtr_api_fail(c->e, 400, "invalid_value", "best_of",
                            "best_of: must be the value of n, %u, is %" PRId64, c->a->n, best_of);
    }
    const struct json *suffix = json_find(c->root, "suffix");
    if (json_type(suffix) != JSON_NULL) {
        return must_be(c, "unsupported", "suffix", suffix, "null or absent");
    }
    if (!echo) return 0;
    c->a->echo = tow_arena_alloc(&c->a->req.arena, c->a->n_prompts * sizeof *c->a->echo);
    c->a->echo_len = tow_arena_alloc(&c->a->req.arena, c->a->n_prompts * sizeof *c->a->echo_len);
    if (!c->a->echo || !c->a->echo_len) return no_memory(c);
    for (uint32_t i = 0; i < c->a->n_prompts; i++) {
        if (echo_prompt(c, &prompts[i], i) < 0) return TOW_EINVAL;
    }
    return 0;
}

/* ---- chat ---- */

static bool is_function_name(const char *s, size_t n)
{
    if (n < 1 || n > 64) return false;
    for (size_t i = 0; i < n; i++) {
        char ch = s[i];
        bool good = (ch >= 'a' && ch <= 'z') || (ch >= 'A' && ch <= 'Z') ||
                    (ch >= '0' && ch <= '9') || ch == '_' || ch == '-' || ch == '.';
        if (!good) return false;
    }
    return true;
}

static int check_tools(struct check *c, const struct json **out)
{
    const struct json *tools;
    if (json_get_array(c->root, "tools", &tools, &c->err) < 0) return bad(c, "tools", NULL);
    size_t i = 0;
    *out = NULL;
    if (json_size(tools) > RTR_MAX_TOOLS) {
        return rtr_api_fail(c->e, 400, "invalid_value", "tools", "tools: %zu of them, at most %d",
                            json_size(tools), RTR_MAX_TOOLS);
    }
    JSON_EACH(it, tools)
    {
        char param[48];
        size_t n;
        snprintf(param, sizeof param, "tools[%zu]", i);
        if (json_type(it) != JSON_OBJECT) {
            return must_be(c, "invalid_value", param, it,
                           "an object with type \"function\" and function");
        }
        const struct json *v = json_find(it, "type");
        const char *type = json_string(v, &n);
        snprintf(param, sizeof param, "tools[%zu].type", i);
        if (!type || strcmp(type, "function") != 0) {
            return must_be(c, "invalid_value", param, v, "\"function\"");
        }
        const struct json *f = json_find(it, "function");
        snprintf(param, sizeof param, "tools[%zu].function", i);
        if (json_type(f) != JSON_OBJECT) {
            return must_be(c, "invalid_value", param, f, "an object with a name");
        }
        v = json_find(f, "name");
        const char *name = json_string(v, &n);
        snprintf(param, sizeof param, "tools[%zu].function.name", i);
        if (!name || !is_function_name(name, n)) {
            return must_be(c, "invalid_value", param, v,
                           "a string of 1 to 64 letters, digits, _, - and .");
        }
        v = json_find(f, "description");
        snprintf(param, sizeof param, "tools[%zu].function.description", i);
        if (json_type(v) != JSON_NULL && json_type(v) != JSON_STRING) {
            return must_be(c, "invalid_type", param, v, "a string");
        }
        v = json_find(f, "parameters");
        snprintf(param, sizeof param, "tools[%zu].function.parameters", i);
        if (json_type(v) != JSON_NULL && json_type(v) != JSON_OBJECT) {
            return must_be(c, "invalid_type", param, v, "an object");
        }
        i++;
    }
    if (i) *out = tools;
    return 0;
}

static int check_tool_choice(struct check *c, struct text_chat_options *o)
{
    const struct json *v = json_find(c->root, "tool_choice");
    char is[JSON_SHOW_BYTES];
    if (text_chat_set_tool_choice(o, v, &c->err) < 0) return bad(c, "tool_choice", NULL);
    if (!o->tools && o->tool_choice != TEXT_TOOL_AUTO && o->tool_choice != TEXT_TOOL_NONE) {
        return rtr_api_fail(c->e, 400, "invalid_value", "tool_choice",
                            "tool_choice: must be \"auto\" or \"none\" without tools, is %s",
                            json_show(v, is));
    }
    if (o->tool_choice != TEXT_TOOL_NAMED) return 0;
    JSON_EACH(it, o->tools)
    {
        const char *name = json_string(json_find(json_find(it, "function"), "name"), NULL);
        if (name && !strcmp(name, o->tool_name)) return 0;
    }
    return rtr_api_fail(c->e, 400, "invalid_value", "tool_choice",
                        "tool_choice.function.name: must be the name of one of the tools, is %s",
                        json_show_text(o->tool_name, strlen(o->tool_name), is));
}

/* Thinking: chat_template_kwargs, else thinking.type, else reasoning_effort, else the server's
 * default. */
static int check_thinking(struct check *c, struct text_chat_options *o)
{
    const char *effort, *type;
    const struct json *kwargs, *thinking;
    bool on = c->rules->default_thinking, drop;
    if (json_get_string(c->root, "reasoning_effort", NULL, &effort, NULL, &c->err) < 0 ||
        text_chat_set_effort(o, effort, &c->err) < 0) {
        return bad(c, "reasoning_effort", NULL);
    }
    if (effort) on = strcmp(effort, "none") != 0 && strcmp(effort, "minimal") != 0;
    if (json_get_object(c->root, "thinking", &thinking, &c->err) < 0) {
        return bad(c, "thinking", NULL);
    }
    if (json_get_string(thinking, "type", NULL, &type, NULL, &c->err) < 0) {
        return bad_inner(c, "thinking.type");
    }
    if (type && strcmp(type, "enabled") != 0 && strcmp(type, "disabled") != 0) {
        return must_be(c, "invalid_value", "thinking.type", json_find(thinking, "type"),
                       "\"enabled\" or \"disabled\"");
    }
    if (type) on = type[0] == 'e';
    if (json_get_object(c->root, "chat_template_kwargs", &kwargs, &c->err) < 0) {
        return bad(c, "chat_template_kwargs", NULL);
    }
    if (json_get_bool(kwargs, "enable_thinking", on, &on, &c->err) < 0) {
        return bad_inner(c, "chat_template_kwargs.enable_thinking");
    }
    if (json_get_bool(kwargs, "thinking", on, &on, &c->err) < 0) {
        return bad_inner(c, "chat_template_kwargs.thinking");
    }
    if (json_get_bool(kwargs, "drop_thinking", true, &drop, &c->err) < 0) {
        return bad_inner(c, "chat_template_kwargs.drop_thinking");
    }
    o->thinking = on;
    o->keep_thinking = !drop;
    return 0;
}

static int check_response_format(struct check *c, struct text_chat_options *o)
{
    const struct json *f, *schema;
    const char *type;
    if (json_get_object(c->root, "response_format", &f, &c->err) < 0) {
        return bad(c, "response_format", NULL);
    }
    if (!f) return 0;
    type = json_string(json_find(f, "type"), NULL);
    if (type && !strcmp(type, "text")) return 0;
    if (type && !strcmp(type, "json_object")) {
        o->response_format = f;
        return 0;
    }
    if (!type || strcmp(type, "json_schema") != 0) {
        return must_be(c, "invalid_value", "response_format.type", json_find(f, "type"),
                       "\"text\", \"json_object\" or \"json_schema\"");
    }
    schema = json_find(json_find(f, "json_schema"), "schema");
    if (json_type(schema) != JSON_OBJECT) {
        return must_be(c, "invalid_value", "response_format.json_schema.schema", schema,
                       "an object");
    }
    o->response_format = schema;
    return 0;
}

static int check_chat(struct check *c, struct prompt **out)
{
    struct text_chat_options o = {0};
    struct rtr_ask *a = c->a;
    int rc;
    if ((rc = check_tools(c, &o.tools)) < 0 || (rc = check_tool_choice(c, &o)) < 0 ||
        (rc = get_bool(c, "parallel_tool_calls", true, &a->parallel_tool_calls)) < 0 ||
        (rc = check_thinking(c, &o)) < 0 || (rc = check_response_format(c, &o)) < 0) {
        return rc;
    }
    const struct json *messages = json_find(c->root, "messages");
    if (json_type(messages) != JSON_ARRAY || !json_first(messages)) {
        char is[JSON_SHOW_BYTES];
        return rtr_api_fail(
            c->e, 400, json_type(messages) == JSON_NULL ? "missing_field" : "invalid_type",
            "messages", "messages: must be a list of at least one message, is %s",
            json_type(messages) == JSON_ARRAY ? "an empty list" : json_show(messages, is));
    }
    rc = text_chat_encode(&a->chat, messages, &o, &c->err);
    a->has_chat = true;
    if (rc == TOW_ENOMEM) return no_memory(c);
    if (rc < 0) {
        char param[64]; /* the message begins with the field: "messages[2].role: ..." */
        size_t n = strcspn(c->err.msg, ": ");
        snprintf(param, sizeof param, "%.*s",
                 strncmp(c->err.msg, "messages", 8) || n >= sizeof param ? 8 : (int)n,
                 strncmp(c->err.msg, "messages", 8) || n >= sizeof param ? "messages" : c->err.msg);
        return bad(c, param, NULL);
    }
    a->tools = o.tools;
    struct prompt *p = tow_arena_alloc(&a->req.arena, sizeof *p);
    if (!p) return no_memory(c);
    rc = take_segments(c, a->chat.segs, a->chat.n_segs, "messages", &p->ids, &p->n);
    if (rc < 0) return rc;
    a->n_prompts = 1;
    *out = p;
    return 0;
}

/* Keys of other types take room from the context; what is wrong with them is said later. */
static bool asks_shadow(struct check *c)
{
    const struct json *capture = json_find(c->root, "index_capture");
    return c->rules->index_capture && json_first(json_find(capture, "shadow")) != NULL;
}

/* Length and the choices. */
static int check_length(struct check *c, const struct prompt *prompts)
{
    struct rtr_ask *a = c->a;
    const char *key = "max_tokens";
    int64_t max, other, seed;
    if (get_int(c, "max_tokens", 0, 1, INT32_MAX, &max) < 0) return TOW_EINVAL;
    if (a->route == RTR_CHAT) {
        if (get_int(c, "max_completion_tokens", 0, 1, INT32_MAX, &other) < 0) return TOW_EINVAL;
        if (other && max && other != max) {
            return rtr_api_fail(c->e, 400, "invalid_value", "max_completion_tokens",
                                "max_completion_tokens: %" PRId64 ", but max_tokens is %" PRId64
                                "; give one of them",
                                other, max);
        }
        if (other) key = "max_completion_tokens";
        if (other) max = other;
    }
    if (get_int(c, "seed", -1, INT64_MIN, INT64_MAX, &seed) < 0) return TOW_EINVAL;
    uint64_t first_seed =
        json_type(json_find(c->root, "seed")) == JSON_NULL ? tow_random_u64() : (uint64_t)seed;
    uint32_t longest = 0;
    for (uint32_t i = 0; i < a->n_prompts; i++) {
        if (prompts[i].n > longest) longest = prompts[i].n;
        a->n_prompt_tokens += prompts[i].n;
    }
    bool shadow = asks_shadow(c) && c->rules->shadow_context;
    uint32_t limit = shadow ? c->rules->shadow_context : c->rules->context_length;
    const char *why = shadow ? " with index_capture.shadow" : "";
    if (longest >= limit || (max && longest + (uint64_t)max > limit)) {
        const char *param = longest >= limit ? a->route == RTR_CHAT ? "messages" : "prompt" : key;
        if (max) {
            return rtr_api_fail(c->e, 400, "context_length_exceeded", param,
                                "%s: the prompt has %u tokens and %s is %" PRId64 ", %" PRIu64
                                " together; the context limit%s is %u tokens",
                                param, longest, key, max, longest + (uint64_t)max, why, limit);
        }
        return rtr_api_fail(c->e, 400, "context_length_exceeded", param,
                            "%s: the prompt has %u tokens; the context limit%s is %u tokens, "
                            "answer included",
                            param, longest, why, limit);
    }
    a->req.max_tokens = max ? (uint32_t)max : limit - longest;
    a->req.n_choices = a->n * a->n_prompts;
    a->req.n_prompt_total = (uint32_t)a->n_prompt_tokens;
    struct rtr_choice *choices = tow_arena_alloc(&a->req.arena, a->req.n_choices * sizeof *choices);
    if (!choices) return no_memory(c);
    for (uint32_t i = 0; i < a->req.n_choices; i++) {
        const struct prompt *p = &prompts[i / a->n];
        choices[i] = (struct rtr_choice){p->ids, p->n, first_seed + i % a->n};
    }
    a->req.choices = choices;
    return 0;
}

/* Once the prompt is known: spans are of its tokens. */
static int check_capture(struct check *c)
{
    struct rtr_request *req = &c->a->req;
    const struct json *v = json_find(c->root, "index_capture");
    if (json_type(v) == JSON_NULL) return 0;
    if (req->n_choices != 1) {
        return rtr_api_fail(c->e, 400, "invalid_index_capture", "index_capture",
                            "index_capture: is for one answer, but n and the prompts make %u",
                            req->n_choices);
    }
    struct rtr_capture_rules rules = {.tok = c->rules->tok,
                                      .ratios = c->rules->ratios,
                                      .n_layers = c->rules->n_layers,
                                      .prompt = req->choices[0].prompt,
                                      .n_prompt = req->choices[0].n_prompt};
    int rc = rtr_capture_parse(&c->a->capture, v, &rules, &req->arena, c->e);
    if (rc < 0) return rc;
    req->capture = c->a->capture->packed;
    req->capture_bytes = c->a->capture->packed_bytes;
    req->capture_shadow = c->a->capture->ask.shadow != 0;
    return 0;
}

static int check_n(struct check *c)
{
    int64_t n;
    if (get_int(c, "n", 1, 1, RTR_MAX_CHOICES, &n) < 0) return TOW_EINVAL;
    c->a->n = (uint32_t)n;
    return 0;
}

static int check_generation(struct check *c)
{
    struct prompt *prompts = NULL;
    int rc;
    if ((rc = check_model(c)) < 0 || (rc = check_stream(c)) < 0 || (rc = check_n(c)) < 0 ||
        (rc = check_sampling(c)) < 0 || (rc = check_stop(c)) < 0) {
        return rc;
    }
    if (c->a->route == RTR_CHAT) {
        rc = check_chat(c, &prompts);
    } else {
        rc = check_prompts(c, &prompts);
        if (rc == 0) rc = check_completion_only(c, prompts);
        if (rc == 0 && c->a->n * c->a->n_prompts > RTR_MAX_CHOICES) {
            rc = rtr_api_fail(c->e, 400, "invalid_value", "n",
                              "n: %u for each of %u prompts makes %u answers, at most %d", c->a->n,
                              c->a->n_prompts, c->a->n * c->a->n_prompts, RTR_MAX_CHOICES);
        }
    }
    if (rc == 0) rc = check_length(c, prompts);
    return rc < 0 ? rc : check_capture(c);
}

/* /tokenize and /detokenize: the ids become choice 0's prompt. */
static int check_ids_only(struct check *c)
{
    struct prompt *p = NULL;
    int rc = check_model(c);
    if (rc < 0) return rc;
    const char *key = c->a->route == RTR_TOKENIZE ? "prompt" : "tokens";
    const struct json *v = json_find(c->root, key);
    if (c->a->route == RTR_TOKENIZE && json_type(v) == JSON_NULL &&
        json_type(json_find(c->root, "messages")) != JSON_NULL) {
        rc = check_chat(c, &p);
        if (rc < 0) return rc;
    } else {
        enum json_type want = c->a->route == RTR_TOKENIZE ? JSON_STRING : JSON_ARRAY;
        if (json_type(v) != want) {
            return must_be(c, json_type(v) == JSON_NULL ? "missing_field" : "invalid_type", key, v,
                           want == JSON_ARRAY          ? "a list of token ids"
                           : json_type(v) == JSON_NULL ? "a string, or messages be given"
                                                       : "a string");
        }
        p = tow_arena_alloc(&c->a->req.arena, sizeof *p);
        if (!p) return no_memory(c);
        if ((rc = take_prompt(c, v, key, p)) < 0) return rc;
    }
    struct rtr_choice *choice = tow_arena_alloc(&c->a->req.arena, sizeof *choice);
    if (!choice) return no_memory(c);
    *choice = (struct rtr_choice){p->ids, p->n, 0};
    c->a->req.choices = choice;
    c->a->req.n_choices = 1;
    return 0;
}

/* Members that an ask points into: model, stops, tools, and what a capture expects. */
static const char *const borrowed_from[] = {"model", "stop", "tools", "index_capture", NULL};

int rtr_ask_parse(struct rtr_ask **out, enum rtr_route route, const char *body, size_t n,
                  const struct rtr_ask_rules *rules, struct rtr_api_error *e)
{
    struct rtr_ask_rules r = *rules;
    if (!r.n_vocab) r.n_vocab = (uint32_t)text_tokenizer_n_ids(r.tok);
    struct json_limits limits = {
        .max_bytes = rules->max_body_bytes, .max_keys = MAX_KEYS, .max_values = MAX_VALUES};
    struct check c = {.rules = &r, .e = e};
    memset(e, 0, sizeof *e);
    struct rtr_ask *a = calloc(1, sizeof *a);
    if (!a) return no_memory(&c);
    tow_arena_init(&a->req.arena, ARENA_BYTES);
    a->route = route;
    a->created = tow_wall_s();
    c.a = a;
    int rc = json_parse(&a->tree, body, n, &limits, &c.err);
    if (rc < 0) {
        rc = rc == TOW_ENOMEM    ? no_memory(&c)
             : rc == TOW_ETOOBIG ? rtr_api_fail(e, 413, "body_too_large", NULL, "%s", c.err.msg)
                                 : rtr_api_fail(e, 400, "invalid_json", NULL, "%s", c.err.msg);
        goto free_ask;
    }
    c.root = a->tree;
    if (json_type(a->tree) != JSON_OBJECT) {
        char is[JSON_SHOW_BYTES];
        rc = rtr_api_fail(e, 400, "invalid_type", NULL, "the body must be an object, is %s",
                          json_show(a->tree, is));
        goto free_ask;
    }
    rc = route == RTR_CHAT || route == RTR_COMPLETIONS ? check_generation(&c) : check_ids_only(&c);
    if (rc < 0) goto free_ask;
    json_keep(a->tree, borrowed_from); /* the rest may be a hundred times as large as all we keep */
    snprintf(a->req.id, sizeof a->req.id, "%s-%016" PRIx64 "%08" PRIx32,
             route == RTR_CHAT ? "chatcmpl" : "cmpl", tow_random_u64(), (uint32_t)tow_random_u64());
    *out = a;
    return 0;

free_ask:
    rtr_ask_free(a);
    return rc;
}

void rtr_ask_free(struct rtr_ask *a)
{
    if (!a) return;
    if (a->has_chat) text_chat_prompt_fini(&a->chat);
    json_free(a->tree);
    tow_arena_fini(&a->req.arena);
    free(a);
}
