/* text/json.h - strict JSON: read, check, walk, write.
 *
 * Why      Requests, model configs, tokenizers and tool schemas are foreign JSON. cJSON builds the
 *          tree, but it takes broken UTF-8, lone surrogates, repeated keys, deep nesting and
 *          numbers it cannot hold. One linear pass before it refuses all that, and keeps the text
 *          of every number that a double would change.
 * Rules    RFC 8259 and nothing more. Refused besides: a byte order mark, invalid UTF-8, lone
 *          surrogate escapes, U+0000 (raw or escaped), a key twice in one object (also when written
 *          with escapes), numbers whose float value is not finite, numbers longer than
 *          JSON_NUMBER_MAX characters, and whatever passes the limits below. No value is ever taken
 *          for another type.
 * Errors   TOW_EFORMAT for text that is not accepted: "json: byte 41: messages[2].content: ...".
 *          TOW_ETOOBIG for max_bytes. TOW_EINVAL from the getters, naming field, value and range.
 * Owner    A tree belongs to whoever parsed it; a tree nobody changes may be read from any thread.
 */
#ifndef TOW_TEXT_JSON_H
#define TOW_TEXT_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_buf;
struct tow_err;

/* One value of a tree; the root owns all below it. Members and elements: JSON_EACH. */
struct json;

enum json_type { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

#define JSON_NUMBER_MAX 4300 /* characters of one number; Python's own limit for integers */

struct json_limits {
    size_t max_bytes;    /* of the text; 0: JSON_DEFAULT_BYTES */
    uint32_t max_depth;  /* nested arrays and objects; 0: 64; at most 512 */
    uint32_t max_keys;   /* members of all objects together; 0: 65,536 */
    uint32_t max_values; /* values of any kind; 0: 4,194,304 */
};
#define JSON_DEFAULT_BYTES ((size_t)64 << 20)

/* Parses len bytes; text needs no final NUL. limits NULL means the defaults above. On failure *out
 * is untouched. Caller frees with json_free(). */
int json_parse(struct json **out, const char *text, size_t len, const struct json_limits *limits,
               struct tow_err *err);
void json_free(struct json *root); /* NULL is fine */
/* Frees every member of an object but those named; keep ends with NULL. */
void json_keep(struct json *obj, const char *const *keep);

/* ---- looking at a value; a NULL value reads as null ---- */
enum json_type json_type(const struct json *v);
const char *json_type_name(const struct json *v); /* "an object", "a string", ... */

/* The bytes (UTF-8, NUL-terminated, without NUL inside), or NULL when v is no string. */
const char *json_string(const struct json *v, size_t *len);
/* True when v is of that type; *out untouched otherwise. An integer is a number written without
 * fraction and exponent that fits in 64 bits: 1.0 and 1e3 are not integers. */
bool json_bool(const struct json *v, bool *out);
bool json_int(const struct json *v, int64_t *out);
bool json_double(const struct json *v, double *out);

/* Linear walk: for (it = json_first(v); it; it = json_next(it)). NULL for scalars, empty ones. */
const struct json *json_first(const struct json *v);
const struct json *json_next(const struct json *v);
const char *json_key(const struct json *v); /* of an object's member, else NULL */
#define JSON_EACH(it, v) for (const struct json *it = json_first(v); it; it = json_next(it))

size_t json_size(const struct json *v);                       /* counts; linear */
const struct json *json_item(const struct json *v, size_t i); /* element i or NULL; linear */
const struct json *json_find(const struct json *obj, const char *key); /* or NULL; linear */

/* ---- for messages: the value as it was sent, short ----
 * Strings in quotes with escapes and numbers, cut behind 40 bytes; an array or object by its type;
 * NULL is "missing". Both fill out[JSON_SHOW_BYTES] and return it. */
#define JSON_SHOW_BYTES 256
const char *json_show(const struct json *v, char *out);
const char *json_show_text(const char *bytes, size_t len, char *out);

/* ---- typed members ----
 * Absent or null gives the default and 0. Another type, or a number outside lo..hi, gives
 * TOW_EINVAL. */
int json_get_string(const struct json *obj, const char *key, const char *def, const char **out,
                    size_t *len, struct tow_err *err); /* len may be NULL */
int json_get_int(const struct json *obj, const char *key, int64_t def, int64_t lo, int64_t hi,
                 int64_t *out, struct tow_err *err);
int json_get_double(const struct json *obj, const char *key, double def, double lo, double hi,
                    double *out, struct tow_err *err);
int json_get_bool(const struct json *obj, const char *key, bool def, bool *out,
                  struct tow_err *err);
int json_get_array(const struct json *obj, const char *key, const struct json **out,
                   struct tow_err *err); /* *out NULL when absent or null */
int json_get_object(const struct json *obj, const char *key, const struct json **out,
                    struct tow_err *err);
/* The member, which must be there and not null; else NULL and *err says so. */
const struct json *json_require(const struct json *obj, const char *key, struct tow_err *err);

/* ---- writing, as Python's json.dumps(..., ensure_ascii=False) ----
 * Failure shows in the buffer. */
void json_put_string(struct tow_buf *b, const char *bytes, size_t len); /* bad UTF-8 -> U+FFFD */
void json_put_int(struct tow_buf *b, int64_t v);
void json_put_double(struct tow_buf *b, double v); /* shortest that reads back; not finite: null */
/* The whole value: ", " and ": " between, order kept, integers of any size as written, floats
 * shortest. */
void json_dump(struct tow_buf *b, const struct json *v);

/* Bytes of the UTF-8 character at p (1 to 4), or 0 when it is not valid: overlong, surrogate, past
 * U+10FFFF, cut short. n > 0. */
int json_utf8_len(const char *p, size_t n);

#endif
