/* text/json.c - see json.h.
 *
 * scan() walks the text once, without recursion, and checks everything; cJSON then builds the tree
 * from text it cannot misread. Numbers that a double would change (fractions, exponents, more than
 * 15 digits) are written over with MARK in a copy; after cJSON is done the tree is walked in text
 * order and each mark gets its own text (in valuestring, which cJSON leaves unused in numbers and
 * frees with the node) and its value. That keeps cJSON's 63-character limit and its locale out of
 * play.
 *
 * Repeated keys are found with one hash set for the whole text, keyed by (object, key bytes), the
 * hash seeded at random so that nobody can prepare collisions. Comparing each key with its siblings
 * was rejected: quadratic.
 */
#include "common/text/json.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/text/utf8.h"

#include <cjson/cJSON.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define MAX_DEPTH    512
#define PLAIN_DIGITS 15 /* an integer this short is exact in a double */
#define SHOWN        40 /* bytes of a string, characters of a number that a message quotes */
#define MARK         "0.5"
#define MARK_VALUE   0.5

/* struct json is never defined: a value is a cJSON node under a name that hides it. */
static const cJSON *node(const struct json *v)
{
    return (const cJSON *)(const void *)v;
}

static const struct json *value(const cJSON *n)
{
    return (const struct json *)(const void *)n;
}

int json_utf8_len(const char *p, size_t n)
{
    uint32_t cp;
    int k = text_utf8_next((const uint8_t *)p, n, &cp);
    return k > 0 ? k : 0;
}

/* ---- the checking pass ---- */

struct span {
    size_t off, len;
};

struct frame {
    bool object;
    uint32_t id;     /* of the object, for the key set */
    size_t index;    /* of the current element */
    struct span key; /* raw text of the current key */
};

struct seen_key {
    uint64_t hash;
    uint32_t object; /* 0: free slot */
    bool decoded;
    struct span at; /* in the text, or in scan.decoded */
};

struct scan {
    const char *text;
    size_t len, pos;
    struct json_limits lim;
    struct tow_err *err;

    uint32_t depth, keys, values, objects;
    struct frame stack[MAX_DEPTH];

    struct seen_key *set; /* owned; open addressing, a power of two, at most half full */
    size_t set_cap;
    uint64_t seed;
    struct tow_buf decoded; /* keys that had escapes, unescaped */

    struct span *marks; /* owned; numbers whose text must be kept, in text order */
    size_t n_marks, marks_cap;
};

/* messages[2].content, as far as known; long keys are cut at a character. */
static void path_of(const struct scan *s, char *out, size_t cap)
{
    size_t n = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < s->depth; i++) {
        const struct frame *f = &s->stack[i];
        if (n + 80 > cap) {
            snprintf(out + n, cap - n, "...");
            return;
        }
        if (!f->object) {
            n += (size_t)snprintf(out + n, cap - n, "[%zu]", f->index);
        } else if (f->key.len) {
            const char *k = s->text + f->key.off;
            size_t len = f->key.len > 60 ? 60 : f->key.len;
            while (len < f->key.len && len > 0 && ((unsigned char)k[len] & 0xc0) == 0x80) len--;
            n += (size_t)snprintf(out + n, cap - n, "%s%.*s", n ? "." : "", (int)len, k);
        }
    }
}

static int refuse_at(const struct scan *s, size_t pos, const char *what)
{
    char path[400];
    path_of(s, path, sizeof path);
    return tow_fail(s->err, TOW_EFORMAT, "json: byte %zu: %s%s%s", pos, path, path[0] ? ": " : "",
                    what);
}

static int refuse(const struct scan *s, const char *what)
{
    return refuse_at(s, s->pos, what);
}

static int refuse_char(const struct scan *s, const char *wanted)
{
    char what[120];
    if (s->pos >= s->len) {
        snprintf(what, sizeof what, "the text ends where %s should stand", wanted);
    } else {
        unsigned char c = (unsigned char)s->text[s->pos];
        if (c > 0x20 && c < 0x7f)
            snprintf(what, sizeof what, "'%c' where %s should stand", c, wanted);
        else
            snprintf(what, sizeof what, "byte 0x%02x where %s should stand", c, wanted);
    }
    return refuse(s, what);
}

static void skip_blanks(struct scan *s)
{
    while (s->pos < s->len) {
        char c = s->text[s->pos];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
        s->pos++;
    }
}

/* Four hex digits at p, or -1. */
static int hex4(const char *p)
{
    int v = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int d;
        if (c >= '0' && c <= '9')
            d = c - '0';
        else if (c >= 'a' && c <= 'f')
            d = c - 'a' + 10;
        else if (c >= 'A' && c <= 'F')
            d = c - 'A' + 10;
        else
            return -1;
        v = v * 16 + d;
    }
    return v;
}

/* A \uXXXX at pos, with its second half where needed. Moves past it; *code is the character. */
static int scan_unicode_escape(struct scan *s, uint32_t *code)
{
    const char *p = s->text + s->pos;
    size_t left = s->len - s->pos;
    int hi = left >= 6 ? hex4(p + 2) : -1;
    if (hi < 0) return refuse(s, "\\u needs four hex digits");
    if (hi == 0) return refuse(s, "the character U+0000 is not accepted");
    if (hi >= 0xdc00 && hi <= 0xdfff) return refuse(s, "lone low surrogate escape");
    if (hi < 0xd800 || hi > 0xdbff) {
        *code = (uint32_t)hi;
        s->pos += 6;
        return 0;
    }
    int lo = left >= 12 && p[6] == '\\' && p[7] == 'u' ? hex4(p + 8) : -1;
    if (lo < 0xdc00 || lo > 0xdfff) return refuse(s, "lone high surrogate escape");
    *code = 0x10000 + (((uint32_t)hi - 0xd800) << 10) + ((uint32_t)lo - 0xdc00);
    s->pos += 12;
    return 0;
}

/* A string at pos (on its quote). Moves past it; *inside is the text between the quotes. */
static int scan_string(struct scan *s, struct span *inside, bool *escapes)
{
    size_t start = s->pos++;
    *escapes = false;
    for (;;) {
        if (s->pos >= s->len) return refuse_at(s, start, "string without an end");
        unsigned char c = (unsigned char)s->text[s->pos];
        if (c == '"') break;
        if (c < 0x20) return refuse(s, "control character in a string; write it as an escape");
        if (c == '\\') {
            *escapes = true;
            char e = s->pos + 1 < s->len ? s->text[s->pos + 1] : 0;
            if (e == 'u') {
                uint32_t code;
                int rc = scan_unicode_escape(s, &code);
                if (rc < 0) return rc;
            } else if (e && strchr("\"\\/bfnrt", e)) {
                s->pos += 2;
            } else {
                return refuse(s, "unknown escape in a string");
            }
        } else if (c < 0x80) {
            s->pos++;
        } else {
            int n = json_utf8_len(s->text + s->pos, s->len - s->pos);
            if (n == 0) return refuse(s, "invalid UTF-8");
            s->pos += (size_t)n;
        }
    }
    inside->off = start + 1;
    inside->len = s->pos - start - 1;
    s->pos++;
    return 0;
}

static void put_utf8(struct tow_buf *b, uint32_t c)
{
    if (c < 0x80) {
        tow_buf_putc(b, (char)c);
    } else if (c < 0x800) {
        tow_buf_putc(b, (char)(0xc0 | c >> 6));
        tow_buf_putc(b, (char)(0x80 | (c & 0x3f)));
    } else if (c < 0x10000) {
        tow_buf_putc(b, (char)(0xe0 | c >> 12));
        tow_buf_putc(b, (char)(0x80 | (c >> 6 & 0x3f)));
        tow_buf_putc(b, (char)(0x80 | (c & 0x3f)));
    } else {
        tow_buf_putc(b, (char)(0xf0 | c >> 18));
        tow_buf_putc(b, (char)(0x80 | (c >> 12 & 0x3f)));
        tow_buf_putc(b, (char)(0x80 | (c >> 6 & 0x3f)));
        tow_buf_putc(b, (char)(0x80 | (c & 0x3f)));
    }
}

/* Appends the checked string text `in` to s->decoded without its escapes. */
static struct span unescape(struct scan *s, struct span in)
{
    struct span out = {s->decoded.len, 0};
    size_t back = s->pos, end = in.off + in.len;
    s->pos = in.off;
    while (s->pos < end) {
        char c = s->text[s->pos];
        if (c != '\\') {
            tow_buf_putc(&s->decoded, c);
            s->pos++;
            continue;
        }
        uint32_t code = 0;
        const char *from = "\"\\/bfnrt", *to = "\"\\/\b\f\n\r\t";
        char e = s->text[s->pos + 1];
        if (e == 'u') {
            scan_unicode_escape(s, &code);
        } else {
            code = (uint32_t)(unsigned char)to[strchr(from, e) - from];
            s->pos += 2;
        }
        put_utf8(&s->decoded, code);
    }
    s->pos = back;
    out.len = s->decoded.len - out.off;
    return out;
}

static const char *key_bytes(const struct scan *s, const struct seen_key *k)
{
    return k->decoded ? s->decoded.data + k->at.off : s->text + k->at.off;
}

static int grow_set(struct scan *s)
{
    size_t cap = s->set_cap ? s->set_cap * 2 : 64;
    struct seen_key *set = calloc(cap, sizeof *set);
    if (!set) return tow_fail(s->err, TOW_ENOMEM, "json: out of memory for %zu keys", cap);
    for (size_t i = 0; i < s->set_cap; i++) {
        if (!s->set[i].object) continue;
        size_t at = s->set[i].hash & (cap - 1);
        while (set[at].object) at = (at + 1) & (cap - 1);
        set[at] = s->set[i];
    }
    free(s->set);
    s->set = set;
    s->set_cap = cap;
    return 0;
}

/* Puts the key into the set; refuses it when its object has it already. */
static int remember_key(struct scan *s, uint32_t object, struct span raw, bool escapes)
{
    if (++s->keys > s->lim.max_keys) {
        char what[80];
        snprintf(what, sizeof what, "more than %u keys", s->lim.max_keys);
        return refuse(s, what);
    }
    if ((size_t)s->keys * 2 > s->set_cap) {
        int rc = grow_set(s);
        if (rc < 0) return rc;
    }
    struct seen_key k = {.object = object, .decoded = escapes, .at = raw};
    if (escapes) {
        k.at = unescape(s, raw);
        if (tow_buf_failed(&s->decoded))
            return tow_fail(s->err, TOW_ENOMEM, "json: out of memory for keys");
    }
    const char *bytes = key_bytes(s, &k);
    k.hash = tow_hash64_seed(bytes, k.at.len, s->seed ^ object);
    size_t at = k.hash & (s->set_cap - 1);
    for (; s->set[at].object; at = (at + 1) & (s->set_cap - 1)) {
        const struct seen_key *o = &s->set[at];
        if (o->hash == k.hash && o->object == object && o->at.len == k.at.len &&
            memcmp(key_bytes(s, o), bytes, k.at.len) == 0) {
            char what[200];
            snprintf(what, sizeof what, "this key stands twice in its object (duplicate key %.*s)",
                     (int)(k.at.len < 140 ? k.at.len : 140), bytes);
            return refuse_at(s, raw.off - 1, what);
        }
    }
    s->set[at] = k;
    return 0;
}

/* "key": at pos; the frame on top is its object. */
static int scan_key(struct scan *s)
{
    struct frame *f = &s->stack[s->depth - 1];
    bool escapes;
    f->key.len = 0;
    skip_blanks(s);
    if (s->pos >= s->len || s->text[s->pos] != '"') return refuse_char(s, "a key in quotes");
    struct span raw;
    int rc = scan_string(s, &raw, &escapes);
    if (rc < 0) return rc;
    f->key = raw;
    rc = remember_key(s, f->id, raw, escapes);
    if (rc < 0) return rc;
    skip_blanks(s);
    if (s->pos >= s->len || s->text[s->pos] != ':') return refuse_char(s, "':' after the key");
    s->pos++;
    return 0;
}

static size_t skip_digits(struct scan *s)
{
    size_t from = s->pos;
    while (s->pos < s->len && s->text[s->pos] >= '0' && s->text[s->pos] <= '9') s->pos++;
    return s->pos - from;
}

static int keep_mark(struct scan *s, size_t off, size_t len)
{
    if (s->n_marks == s->marks_cap) {
        size_t cap = s->marks_cap ? s->marks_cap * 2 : 32;
        struct span *m = realloc(s->marks, cap * sizeof *m);
        if (!m) return tow_fail(s->err, TOW_ENOMEM, "json: out of memory for %zu numbers", cap);
        s->marks = m;
        s->marks_cap = cap;
    }
    s->marks[s->n_marks++] = (struct span){off, len};
    return 0;
}

static double to_double(const char *text, size_t len)
{
    char copy[JSON_NUMBER_MAX + 1];
    memcpy(copy, text, len);
    copy[len] = 0;
    return strtod(copy, NULL);
}

static int scan_number(struct scan *s)
{
    size_t start = s->pos, digits;
    bool is_float = false;
    if (s->text[s->pos] == '-') s->pos++;
    if (s->pos < s->len && s->text[s->pos] == '0') {
        s->pos++;
        digits = 1;
        if (s->pos < s->len && s->text[s->pos] >= '0' && s->text[s->pos] <= '9')
            return refuse_at(s, start, "a number must not begin with 0");
    } else {
        digits = skip_digits(s);
        if (!digits) return refuse_char(s, "a digit");
    }
    if (s->pos < s->len && s->text[s->pos] == '.') {
        s->pos++;
        is_float = true;
        if (!skip_digits(s)) return refuse_char(s, "a digit after the point");
    }
    if (s->pos < s->len && (s->text[s->pos] | 0x20) == 'e') {
        s->pos++;
        is_float = true;
        if (s->pos < s->len && (s->text[s->pos] == '+' || s->text[s->pos] == '-')) s->pos++;
        if (!skip_digits(s)) return refuse_char(s, "a digit of the exponent");
    }
    size_t len = s->pos - start;
    if (len > JSON_NUMBER_MAX) {
        char what[96];
        snprintf(what, sizeof what, "number of %zu characters; at most %d are accepted", len,
                 JSON_NUMBER_MAX);
        return refuse_at(s, start, what);
    }
    if (!is_float && digits <= PLAIN_DIGITS) return 0;
    if (is_float && !isfinite(to_double(s->text + start, len)))
        return refuse_at(s, start, "number out of range; at most 1.7976931348623157e308");
    return keep_mark(s, start, len);
}

static int scan_word(struct scan *s, const char *word)
{
    size_t n = strlen(word);
    if (s->len - s->pos < n || memcmp(s->text + s->pos, word, n) != 0)
        return refuse_char(s, "a value");
    s->pos += n;
    return 0;
}

static int scan_scalar(struct scan *s)
{
    struct span in;
    bool escapes;
    switch (s->pos < s->len ? s->text[s->pos] : 0) {
    case '"': return scan_string(s, &in, &escapes);
    case 't': return scan_word(s, "true");
    case 'f': return scan_word(s, "false");
    case 'n': return scan_word(s, "null");
    case '-':
    case '0':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case '8':
    case '9': return scan_number(s);
    default: return refuse_char(s, "a value");
    }
}

/* Opens an array or object at pos. *empty: it is closed again already. */
static int scan_open(struct scan *s, bool *empty)
{
    if (s->depth >= s->lim.max_depth) {
        char what[80];
        snprintf(what, sizeof what, "nested more than %u deep", s->lim.max_depth);
        return refuse(s, what);
    }
    bool object = s->text[s->pos++] == '{';
    s->stack[s->depth++] = (struct frame){.object = object, .id = object ? ++s->objects : 0};
    skip_blanks(s);
    *empty = s->pos < s->len && s->text[s->pos] == (object ? '}' : ']');
    if (*empty) {
        s->pos++;
        s->depth--;
        return 0;
    }
    return object ? scan_key(s) : 0;
}

/* After a value: closes what ends here, and stops at the next value (*done false) or the end. */
static int scan_after(struct scan *s, bool *done)
{
    *done = false;
    for (;;) {
        skip_blanks(s);
        if (s->depth == 0) {
            *done = true;
            return s->pos == s->len ? 0 : refuse_char(s, "the end");
        }
        struct frame *f = &s->stack[s->depth - 1];
        char c = s->pos < s->len ? s->text[s->pos] : 0;
        if (c == ',') {
            s->pos++;
            f->index++;
            return f->object ? scan_key(s) : 0;
        }
        if (c != (f->object ? '}' : ']'))
            return refuse_char(s, f->object ? "',' or '}'" : "',' or ']'");
        s->pos++;
        s->depth--;
    }
}

static int scan(struct scan *s)
{
    bool done = false;
    if (s->len >= 3 && memcmp(s->text, "\xef\xbb\xbf", 3) == 0)
        return refuse(s, "byte order mark; not accepted");
    while (!done) {
        bool whole = true; /* the value is complete, not a container just opened */
        int rc;
        skip_blanks(s);
        if (++s->values > s->lim.max_values) {
            char what[80];
            snprintf(what, sizeof what, "more than %u values", s->lim.max_values);
            return refuse(s, what);
        }
        if (s->pos < s->len && (s->text[s->pos] == '{' || s->text[s->pos] == '['))
            rc = scan_open(s, &whole);
        else
            rc = scan_scalar(s);
        if (rc == 0 && whole) rc = scan_after(s, &done);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- building the tree ---- */

/* Gives each marked number its text and value, in text order. Recursion is bounded by max_depth. */
static int fill_marks(cJSON *n, const struct scan *s, size_t *next)
{
    for (; n; n = n->next) {
        if (cJSON_IsNumber(n) && n->valuedouble == MARK_VALUE) {
            tow_assert(*next < s->n_marks);
            struct span m = s->marks[(*next)++];
            char *text = cJSON_malloc(m.len + 1);
            if (!text) return TOW_ENOMEM;
            memcpy(text, s->text + m.off, m.len);
            text[m.len] = 0;
            n->valuestring = text;
            n->valuedouble = strtod(text, NULL);
        } else if (n->child) {
            int rc = fill_marks(n->child, s, next);
            if (rc < 0) return rc;
        }
    }
    return 0;
}

static int build(const struct scan *s, struct json **out)
{
    char *copy = NULL;
    const char *text = s->text;
    int rc = TOW_ENOMEM;
    if (s->n_marks) {
        copy = malloc(s->len);
        if (!copy) goto fail;
        memcpy(copy, text, s->len);
        for (size_t i = 0; i < s->n_marks; i++) {
            char *at = copy + s->marks[i].off;
            memset(at, ' ', s->marks[i].len);
            memcpy(at, MARK, sizeof MARK - 1); /* a marked number has three characters or more */
        }
        text = copy;
    }
    cJSON *root = cJSON_ParseWithLengthOpts(text, s->len, NULL, 0);
    free(copy);
    if (!root) goto fail; /* the text is checked, so only memory can be missing */
    size_t next = 0;
    if (s->n_marks && (rc = fill_marks(root, s, &next)) < 0) {
        cJSON_Delete(root);
        goto fail;
    }
    *out = (struct json *)(void *)root;
    return 0;

fail:
    return tow_fail(s->err, rc, "json: out of memory for %zu bytes of text", s->len);
}

int json_parse(struct json **out, const char *text, size_t len, const struct json_limits *limits,
               struct tow_err *err)
{
    struct json_limits lim = limits ? *limits : (struct json_limits){0};
    if (!lim.max_bytes) lim.max_bytes = JSON_DEFAULT_BYTES;
    if (!lim.max_depth) lim.max_depth = 64;
    if (!lim.max_keys) lim.max_keys = 65536;
    if (!lim.max_values) lim.max_values = 1u << 22;
    if (lim.max_depth > MAX_DEPTH) lim.max_depth = MAX_DEPTH;
    if (len > lim.max_bytes)
        return tow_fail(err, TOW_ETOOBIG, "json: %zu bytes; at most %zu are accepted", len,
                        lim.max_bytes);
    struct scan *s = malloc(sizeof *s);
    if (!s) return tow_fail(err, TOW_ENOMEM, "json: out of memory");
    memset(s, 0, offsetof(struct scan, stack));
    memset(&s->set, 0, sizeof *s - offsetof(struct scan, set));
    s->text = text;
    s->len = len;
    s->lim = lim;
    s->err = err;
    tow_buf_init(&s->decoded, 0);
    if (getrandom(&s->seed, sizeof s->seed, GRND_NONBLOCK) != (ssize_t)sizeof s->seed)
        s->seed = (uint64_t)(uintptr_t)s; /* early boot only; the address is random too */
    int rc = scan(s);
    if (rc == 0) rc = build(s, out);
    tow_buf_fini(&s->decoded);
    free(s->set);
    free(s->marks);
    free(s);
    return rc;
}

void json_free(struct json *root)
{
    cJSON_Delete((cJSON *)(void *)root);
}

void json_keep(struct json *obj, const char *const *keep)
{
    cJSON *root = (cJSON *)(void *)obj, *next;
    if (json_type(obj) != JSON_OBJECT) return;
    for (cJSON *n = root->child; n; n = next) {
        size_t i = 0;
        next = n->next;
        while (keep[i] && strcmp(keep[i], n->string) != 0) i++;
        if (!keep[i]) cJSON_Delete(cJSON_DetachItemViaPointer(root, n));
    }
}

/* ---- looking at a value ---- */

enum json_type json_type(const struct json *v)
{
    const cJSON *n = node(v);
    switch (n ? n->type & 0xff : cJSON_NULL) {
    case cJSON_False:
    case cJSON_True: return JSON_BOOL;
    case cJSON_Number: return JSON_NUMBER;
    case cJSON_String: return JSON_STRING;
    case cJSON_Array: return JSON_ARRAY;
    case cJSON_Object: return JSON_OBJECT;
    default: return JSON_NULL;
    }
}

const char *json_type_name(const struct json *v)
{
    static const char *const names[] = {"null",     "a boolean", "a number",
                                        "a string", "an array",  "an object"};
    return names[json_type(v)];
}

const char *json_string(const struct json *v, size_t *len)
{
    if (json_type(v) != JSON_STRING) return NULL;
    if (len) *len = strlen(node(v)->valuestring);
    return node(v)->valuestring;
}

bool json_bool(const struct json *v, bool *out)
{
    if (json_type(v) != JSON_BOOL) return false;
    *out = (node(v)->type & 0xff) == cJSON_True;
    return true;
}

/* A number without kept text is an integer of at most PLAIN_DIGITS digits. */
static bool written_as_integer(const cJSON *n)
{
    return !n->valuestring || !n->valuestring[strcspn(n->valuestring, ".eE")];
}

bool json_int(const struct json *v, int64_t *out)
{
    if (json_type(v) != JSON_NUMBER || !written_as_integer(node(v))) return false;
    const cJSON *n = node(v);
    if (!n->valuestring) {
        *out = (int64_t)n->valuedouble;
        return true;
    }
    bool minus = n->valuestring[0] == '-';
    uint64_t magnitude = 0, most = (uint64_t)INT64_MAX + minus;
    for (const char *p = n->valuestring + minus; *p; p++) {
        unsigned d = (unsigned)(*p - '0');
        if (magnitude > (most - d) / 10) return false;
        magnitude = magnitude * 10 + d;
    }
    *out = minus ? (int64_t)(0 - magnitude) : (int64_t)magnitude;
    return true;
}

bool json_double(const struct json *v, double *out)
{
    if (json_type(v) != JSON_NUMBER || !isfinite(node(v)->valuedouble)) return false;
    *out = node(v)->valuedouble;
    return true;
}

const struct json *json_first(const struct json *v)
{
    return v ? value(node(v)->child) : NULL;
}

const struct json *json_next(const struct json *v)
{
    return value(node(v)->next);
}

const char *json_key(const struct json *v)
{
    return v ? node(v)->string : NULL;
}

size_t json_size(const struct json *v)
{
    size_t n = 0;
    JSON_EACH(it, v) n++;
    return n;
}

const struct json *json_item(const struct json *v, size_t i)
{
    if (json_type(v) != JSON_ARRAY) return NULL;
    JSON_EACH(it, v) if (i-- == 0) return it;
    return NULL;
}

const struct json *json_find(const struct json *obj, const char *key)
{
    if (json_type(obj) != JSON_OBJECT) return NULL;
    JSON_EACH(it, obj) if (strcmp(node(it)->string, key) == 0) return it;
    return NULL;
}

/* ---- typed members ---- */

const char *json_show_text(const char *s, size_t len, char *out)
{
    struct tow_buf b;
    size_t keep = len > SHOWN ? SHOWN : len;
    while (keep < len && keep > 0 && ((unsigned char)s[keep] & 0xc0) == 0x80) keep--;
    tow_buf_init(&b, 0);
    json_put_string(&b, s, keep); /* at most six bytes for each of them */
    snprintf(out, JSON_SHOW_BYTES, "%.*s%s", (int)b.len, b.data ? b.data : "",
             keep < len ? "..." : "");
    tow_buf_fini(&b);
    return out;
}

const char *json_show(const struct json *v, char *out)
{
    const enum json_type type = json_type(v);
    if (!v || type == JSON_ARRAY || type == JSON_OBJECT) {
        snprintf(out, JSON_SHOW_BYTES, "%s", v ? json_type_name(v) : "missing");
        return out;
    }
    size_t len;
    const char *s = json_string(v, &len);
    if (s) return json_show_text(s, len, out);
    struct tow_buf b;
    tow_buf_init(&b, 0);
    if (type == JSON_NUMBER && node(v)->valuestring)
        tow_buf_puts(&b, node(v)->valuestring); /* as it was sent: 1e3, not 1000.0 */
    else
        json_dump(&b, v);
    snprintf(out, JSON_SHOW_BYTES, "%.*s%s", b.len > SHOWN ? SHOWN : (int)b.len,
             b.data ? b.data : "", b.len > SHOWN ? "..." : "");
    tow_buf_fini(&b);
    return out;
}

static int wrong(const char *key, const char *wanted, const struct json *v, struct tow_err *err)
{
    char is[JSON_SHOW_BYTES];
    return tow_fail(err, TOW_EINVAL, "%s: must be %s, is %s", key, wanted, json_show(v, is));
}

static bool absent(const struct json *v)
{
    return json_type(v) == JSON_NULL;
}

int json_get_string(const struct json *obj, const char *key, const char *def, const char **out,
                    size_t *len, struct tow_err *err)
{
    const struct json *v = json_find(obj, key);
    const char *s = absent(v) ? def : json_string(v, NULL);
    if (!s && !absent(v)) return wrong(key, "a string", v, err);
    *out = s;
    if (len) *len = s ? strlen(s) : 0;
    return 0;
}

int json_get_int(const struct json *obj, const char *key, int64_t def, int64_t lo, int64_t hi,
                 int64_t *out, struct tow_err *err)
{
    const struct json *v = json_find(obj, key);
    int64_t got = def;
    if (!absent(v) && (!json_int(v, &got) || got < lo || got > hi)) {
        char wanted[96];
        if (lo == hi)
            snprintf(wanted, sizeof wanted, "the integer %" PRId64, lo);
        else
            snprintf(wanted, sizeof wanted, "an integer from %" PRId64 " to %" PRId64, lo, hi);
        return wrong(key, wanted, v, err);
    }
    *out = got;
    return 0;
}

int json_get_double(const struct json *obj, const char *key, double def, double lo, double hi,
                    double *out, struct tow_err *err)
{
    const struct json *v = json_find(obj, key);
    double got = def;
    if (!absent(v) && (!json_double(v, &got) || got < lo || got > hi)) {
        char wanted[96];
        snprintf(wanted, sizeof wanted, "a number from %g to %g", lo, hi);
        return wrong(key, wanted, v, err);
    }
    *out = got;
    return 0;
}

int json_get_bool(const struct json *obj, const char *key, bool def, bool *out, struct tow_err *err)
{
    const struct json *v = json_find(obj, key);
    bool got = def;
    if (!absent(v) && !json_bool(v, &got)) return wrong(key, "true or false", v, err);
    *out = got;
    return 0;
}

static int get_container(const struct json *obj, const char *key, enum json_type type,
                         const char *wanted, const struct json **out, struct tow_err *err)
{
    const struct json *v = json_find(obj, key);
    if (!absent(v) && json_type(v) != type) return wrong(key, wanted, v, err);
    *out = absent(v) ? NULL : v;
    return 0;
}

int json_get_array(const struct json *obj, const char *key, const struct json **out,
                   struct tow_err *err)
{
    return get_container(obj, key, JSON_ARRAY, "an array", out, err);
}

int json_get_object(const struct json *obj, const char *key, const struct json **out,
                    struct tow_err *err)
{
    return get_container(obj, key, JSON_OBJECT, "an object", out, err);
}

const struct json *json_require(const struct json *obj, const char *key, struct tow_err *err)
{
    const struct json *v = json_find(obj, key);
    if (!absent(v)) return v;
    tow_fail(err, TOW_EINVAL, "%s: is required but %s", key, v ? "null" : "missing");
    return NULL;
}

/* ---- writing ---- */

void json_put_string(struct tow_buf *b, const char *bytes, size_t len)
{
    size_t from = 0, i = 0; /* bytes from..i go out unchanged */
    tow_buf_putc(b, '"');
    while (i < len) {
        unsigned char c = (unsigned char)bytes[i];
        int n = c < 0x80 ? 1 : json_utf8_len(bytes + i, len - i);
        if (n && c >= 0x20 && c != '"' && c != '\\') {
            i += (size_t)n;
            continue;
        }
        tow_buf_put(b, bytes + from, i - from);
        from = ++i;
        const char *plain = "\"\\\b\f\n\r\t", *letter = "\"\\bfnrt";
        const char *at = c ? strchr(plain, c) : NULL;
        if (!n)
            tow_buf_puts(b, "\xef\xbf\xbd");
        else if (at)
            tow_buf_put(b, (const char[]){'\\', letter[at - plain]}, 2);
        else
            tow_buf_printf(b, "\\u%04x", c);
    }
    tow_buf_put(b, bytes + from, len - from);
    tow_buf_putc(b, '"');
}

void json_put_int(struct tow_buf *b, int64_t v)
{
    tow_buf_printf(b, "%" PRId64, v);
}

/* The fewest digits that read back as v, as d.ddde+XX. */
static void shortest(double v, char *e, size_t cap)
{
    int digits = fabs(v) < DBL_MIN ? 1 : 15; /* 15 always survive, except below the normal range */
    for (; digits < 17; digits++) {
        snprintf(e, cap, "%.*e", digits - 1, v);
        if (strtod(e, NULL) == v) return;
        int exp2;
        if (digits < 16 || fabs(frexp(v, &exp2)) != 0.5) continue;
        /* A power of two has twice the room above it: the nearest 16 digits may miss. */
        char *last = strchr(e, 'e') - 1;
        if (*last == '9') continue;
        ++*last;
        if (strtod(e, NULL) == v) return;
    }
    snprintf(e, cap, "%.16e", v);
}

void json_put_double(struct tow_buf *b, double v)
{
    if (!isfinite(v)) {
        tow_buf_puts(b, "null");
        return;
    }
    /* Python's rule for the point: plain for exponents -4 to 15, else d.ddde+XX. */
    char e[40];
    shortest(v, e, sizeof e);
    char *p = e, *exp_at = strchr(e, 'e');
    int exp10 = atoi(exp_at + 1), n = 0;
    char digit[20] = "";
    if (*p == '-') {
        tow_buf_putc(b, '-');
        p++;
    }
    for (; p < exp_at; p++)
        if (*p != '.') digit[n++] = *p;
    while (n > 1 && digit[n - 1] == '0') n--;
    if (exp10 < -4 || exp10 >= 16) {
        tow_buf_putc(b, digit[0]);
        if (n > 1) tow_buf_putc(b, '.');
        tow_buf_put(b, digit + 1, (size_t)n - 1);
        tow_buf_printf(b, "e%c%02d", exp10 < 0 ? '-' : '+', abs(exp10));
    } else if (exp10 < 0) {
        tow_buf_put(b, "0.000", (size_t)1 - (size_t)exp10);
        tow_buf_put(b, digit, (size_t)n);
    } else {
        for (int i = 0; i <= exp10; i++) tow_buf_putc(b, i < n ? digit[i] : '0');
        tow_buf_putc(b, '.');
        if (n > exp10 + 1)
            tow_buf_put(b, digit + exp10 + 1, (size_t)(n - exp10 - 1));
        else
            tow_buf_putc(b, '0');
    }
}

static void dump_number(struct tow_buf *b, const cJSON *n)
{
    if (!n->valuestring)
        json_put_int(b, (int64_t)n->valuedouble);
    else if (written_as_integer(n))
        tow_buf_puts(b, n->valuestring);
    else
        json_put_double(b, n->valuedouble);
}

/* Recursion is bounded by the depth limit of json_parse(). */
void json_dump(struct tow_buf *b, const struct json *v)
{
    enum json_type type = json_type(v);
    switch (type) {
    case JSON_NULL: tow_buf_puts(b, "null"); return;
    case JSON_BOOL:
        tow_buf_puts(b, (node(v)->type & 0xff) == cJSON_True ? "true" : "false");
        return;
    case JSON_NUMBER: dump_number(b, node(v)); return;
    case JSON_STRING:
        json_put_string(b, node(v)->valuestring, strlen(node(v)->valuestring));
        return;
    case JSON_ARRAY:
    case JSON_OBJECT: break;
    }
    const char *sep = "";
    tow_buf_putc(b, type == JSON_ARRAY ? '[' : '{');
    JSON_EACH(it, v)
    {
        tow_buf_puts(b, sep);
        sep = ", ";
        if (type == JSON_OBJECT) {
            json_put_string(b, node(it)->string, strlen(node(it)->string));
            tow_buf_puts(b, ": ");
        }
        json_dump(b, it);
    }
    tow_buf_putc(b, type == JSON_ARRAY ? ']' : '}');
}
