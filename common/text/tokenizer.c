/* text/tokenizer.c - reads tokenizer.json, and leads a text through its stations.
 *
 *   bytes -> UTF-8 check -> added tokens (text/added), where allowed
 *         -> regex splits of what lies between (text/split) -> merges of each piece (text/bpe)
 *
 * Every station works in place on one text: segments are joined before, and offsets are all that is
 * handed on. Rejected: tokenising segment by segment, which gives other ids at their borders.
 */
#include "common/text/tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/err.h"
#include "common/text/added.h"
#include "common/text/bpe.h"
#include "common/text/json.h"
#include "common/text/split.h"
#include "common/text/unicode.h"
#include "common/text/utf8.h"

enum {
    ADDED = 1,
    SPECIAL = 2,
    LSTRIP = 4,
    RSTRIP = 8,
    SINGLE_WORD = 16,
};

#define N_ADDED_SETS 2

struct text_tokenizer {
    text_id n_ids;
    struct text_spelling
        *spellings; /* owned; by id, into blob or the added contents; 0: no token */
    struct text_spelling *mergeable; /* owned; the same without added and raw tokens */
    uint8_t *flags;                  /* owned; by id */
    uint8_t *blob;                   /* owned; all spellings */
    struct text_bpe *bpe;            /* owned */
    struct text_split *split;        /* owned */
    struct text_added
        added[N_ADDED_SETS]; /* [1]: "normalized" ones, looked for in what [0] leaves */
    bool has_single_word;
    struct text_split *word; /* owned; one stage: a character that is part of a word */
};

/* ---- the byte-level alphabet: one visible character for each byte ---- */

/* Printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order. */
static bool is_self(uint32_t c)
{
    return (c >= '!' && c <= '~') || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF);
}

static int byte_of_char(uint32_t cp)
{
    static const uint32_t n_moved = 68;
    if (cp < 0x100) return is_self(cp) ? (int)cp : -1;
    if (cp >= 0x100 + n_moved) return -1;
    uint32_t k = cp - 0x100;
    for (int b = 0; b < 256; b++)
        if (!is_self((uint32_t)b) && k-- == 0) return b;
    return -1;
}

/* Writes the bytes that s stands for; false when it holds a character outside the alphabet. */
static bool bytes_of_key(const int16_t map[0x200], const char *s, size_t len, uint8_t *out,
                         size_t *n)
{
    *n = 0;
    for (size_t i = 0; i < len;) {
        uint32_t cp;
        int r = text_utf8_next((const uint8_t *)s + i, len - i, &cp);
        if (r <= 0 || cp >= 0x200 || map[cp] < 0) return false;
        out[(*n)++] = (uint8_t)map[cp];
        i += (size_t)r;
    }
    return true;
}

/* ---- loading ---- */

struct loader {
    struct text_tokenizer *t;
    const char *name; /* of the file, for messages */
    struct tow_err *err;
    int16_t map[0x200]; /* character of the alphabet -> byte, or -1 */
    bool *has_key;      /* owned; by id: the vocabulary names it */
};

/* "file: what is wrong with it" */
__attribute__((format(printf, 2, 3))) static int refuse(struct loader *l, const char *fmt, ...)
{
    char why[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    tow_fail(l->err, TOW_EFORMAT, "%s: %s", l->name, why);
    return TOW_EFORMAT;
}

/* The same for what a lower layer refused: any fault but a lack of memory is the file's. */
static int refused(struct loader *l, int rc, const char *where)
{
    tow_note(l->err, "%s: %s", l->name, where);
    if (rc == TOW_ENOMEM) return rc;
    l->err->code = TOW_EFORMAT;
    return TOW_EFORMAT;
}

/* A short rendering of a value for messages. */
static const char *show(const struct json *v, char buf[80])
{
    size_t len;
    int64_t i;
    bool b;
    const char *s = json_string(v, &len);
    if (s)
        snprintf(buf, 80, "\"%.*s\"%s", (int)(len < 60 ? len : 60), s, len < 60 ? "" : "...");
    else if (json_bool(v, &b))
        snprintf(buf, 80, "%s", b ? "true" : "false");
    else if (json_int(v, &i))
        snprintf(buf, 80, "%lld", (long long)i);
    else
        snprintf(buf, 80, "%s", json_type_name(v));
    return buf;
}

static bool is_null(const struct json *v)
{
    return !v || json_type(v) == JSON_NULL;
}

static bool is_text(const struct json *v, const char *want)
{
    const char *s = json_string(v, NULL);
    return s && strcmp(s, want) == 0;
}

/* obj.key must be a bool; absent means def. */
static int take_bool(struct loader *l, const struct json *obj, const char *where, const char *key,
                     bool def, bool *out)
{
    char buf[80];
    const struct json *v = json_find(obj, key);
    *out = def;
    if (is_null(v) || json_bool(v, out)) return 0;
    return refuse(l, "%s.%s: %s, want true or false", where, key, show(v, buf));
}

/* obj.key may only be null, or false, or empty text: a feature we do not have. */
static int want_unused(struct loader *l, const struct json *obj, const char *where, const char *key)
{
    char buf[80];
    const struct json *v = json_find(obj, key);
    size_t len;
    bool b;
    int64_t i;
    double d;
    if (is_null(v) || (json_bool(v, &b) && !b) || (json_string(v, &len) && len == 0) ||
        (json_int(v, &i) && i == 0) || (json_double(v, &d) && d == 0))
        return 0;
    return refuse(l, "%s.%s: %s is not supported", where, key, show(v, buf));
}

static int read_normalizer(struct loader *l, const struct json *v)
{
    char buf[80];
    if (is_null(v)) return 0;
    const struct json *type = json_find(v, "type"), *list = json_find(v, "normalizers");
    if (!is_text(type, "Sequence"))
        return refuse(l, "normalizer.type: %s is not supported (only null or an empty Sequence)",
                      show(type, buf));
    if (json_type(list) != JSON_ARRAY)
        return refuse(l, "normalizer.normalizers: %s, want an array", show(list, buf));
    const struct json *first = json_first(list);
    if (!first) return 0;
    return refuse(l, "normalizer.normalizers[0].type: %s is not supported",
                  show(json_find(first, "type"), buf));
}

static int read_split(struct loader *l, const struct json *v, const char *where)
{
    static const struct {
        const char *name;
        enum text_split_behavior behavior;
    } behaviors[] = {
        {"Isolated", TEXT_SPLIT_ISOLATED},
        {"Removed", TEXT_SPLIT_REMOVED},
        {"MergedWithPrevious", TEXT_SPLIT_MERGED_PREVIOUS},
        {"MergedWithNext", TEXT_SPLIT_MERGED_NEXT},
        {"Contiguous", TEXT_SPLIT_CONTIGUOUS},
    };
    char buf[80];
    const struct json *pattern = json_find(v, "pattern"), *behavior = json_find(v, "behavior");
    const struct json *regex = json_find(pattern, "Regex"), *text = json_find(pattern, "String");
    size_t len, i, n = sizeof behaviors / sizeof behaviors[0];
    bool invert;
    if (json_type(pattern) != JSON_OBJECT || json_size(pattern) != 1 ||
        !json_string(regex ? regex : text, &len))
        return refuse(l, "%s.pattern: %s, want {\"Regex\": text} or {\"String\": text}", where,
                      show(pattern, buf));
    for (i = 0; i < n && !is_text(behavior, behaviors[i].name); i++) {
    }
    if (i == n)
        return refuse(l,
                      "%s.behavior: %s, want Isolated, Removed, MergedWithPrevious, MergedWithNext "
                      "or Contiguous",
                      where, show(behavior, buf));
    int rc = take_bool(l, v, where, "invert", false, &invert);
    if (rc < 0) return rc;
    const char *s = json_string(regex ? regex : text, &len);
    rc = text_split_add(l->t->split, s, len, !regex, behaviors[i].behavior, invert, l->err);
    return rc < 0 ? refused(l, rc, where) : 0;
}

static int read_digits(struct loader *l, const struct json *v, const char *where)
{
    bool each;
    int rc = take_bool(l, v, where, "individual_digits", false, &each);
    if (rc < 0) return rc;
    const char *pattern = each ? "\\p{N}" : "\\p{N}+";
    return text_split_add(l->t->split, pattern, strlen(pattern), false, TEXT_SPLIT_ISOLATED, false,
                          l->err);
}

static int read_byte_level(struct loader *l, const struct json *v, const char *where)
{
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|"
                               "\\s+(?!\\S)|\\s+";
    bool prefix, regex;
    int rc = take_bool(l, v, where, "add_prefix_space", true, &prefix);
    if (rc == 0) rc = take_bool(l, v, where, "use_regex", true, &regex);
    if (rc < 0) return rc;
    if (prefix) return refuse(l, "%s.add_prefix_space: true is not supported", where);
    if (!regex) return 0;
    return text_split_add(l->t->split, gpt2, strlen(gpt2), false, TEXT_SPLIT_ISOLATED, false,
                          l->err);
}

/* One stage; *bytes is set by the one that ends the chain. */
static int read_stage(struct loader *l, const struct json *v, const char *where, bool *bytes)
{
    char buf[80];
    const struct json *type = json_find(v, "type");
    if (*bytes) return refuse(l, "%s: stands after ByteLevel, which must be the last", where);
    if (is_text(type, "Split")) return read_split(l, v, where);
    if (is_text(type, "Digits")) return read_digits(l, v, where);
    if (is_text(type, "ByteLevel")) {
        *bytes = true;
        return read_byte_level(l, v, where);
    }
    return refuse(l, "%s.type: %s is not supported (Split, Digits and ByteLevel are)", where,
                  show(type, buf));
}

static int read_pre_tokenizer(struct loader *l, const struct json *v)
{
    char buf[80], where[80];
    bool bytes = false;
    int rc = 0;
    if (json_type(v) != JSON_OBJECT)
        return refuse(l, "pre_tokenizer: %s, want an object", show(v, buf));
    if (is_text(json_find(v, "type"), "Sequence")) {
        const struct json *list = json_find(v, "pretokenizers");
        size_t i = 0;
        if (json_type(list) != JSON_ARRAY)
            return refuse(l, "pre_tokenizer.pretokenizers: %s, want an array", show(list, buf));
        JSON_EACH(stage, list)
        {
            snprintf(where, sizeof where, "pre_tokenizer.pretokenizers[%zu]", i++);
            rc = read_stage(l, stage, where, &bytes);
            if (rc < 0) return rc;
        }
    } else {
        rc = read_stage(l, v, "pre_tokenizer", &bytes);
        if (rc < 0) return rc;
    }
    if (!bytes)
        return refuse(l, "pre_tokenizer: has no ByteLevel; only byte-level BPE is supported");
    return 0;
}

/* Parts that change ids or text only in ways we would not follow. */
static int check_rest(struct loader *l, const struct json *root)
{
    static const char *const model_unused[] = {
        "dropout",  "unk_token",    "continuing_subword_prefix", "end_of_word_suffix",
        "fuse_unk", "byte_fallback"};
    char buf[80];
    const struct json *v = json_find(root, "version"), *model = json_find(root, "model");
    if (!is_null(v) && !is_text(v, "1.0"))
        return refuse(l, "version: %s, want \"1.0\"", show(v, buf));
    int rc = want_unused(l, root, "root", "truncation");
    if (rc == 0) rc = want_unused(l, root, "root", "padding");
    if (rc < 0) return rc;
    v = json_find(root, "post_processor");
    if (!is_null(v) && !is_text(json_find(v, "type"), "ByteLevel"))
        return refuse(l, "post_processor.type: %s is not supported (only null or ByteLevel)",
                      show(json_find(v, "type"), buf));
    v = json_find(root, "decoder");
    if (!is_text(json_find(v, "type"), "ByteLevel"))
        return refuse(l, "decoder.type: %s, want ByteLevel", show(json_find(v, "type"), buf));
    if (json_type(model) != JSON_OBJECT)
        return refuse(l, "model: %s, want an object", show(model, buf));
    if (!is_text(json_find(model, "type"), "BPE"))
        return refuse(l, "model.type: %s, want BPE", show(json_find(model, "type"), buf));
    for (size_t i = 0; i < sizeof model_unused / sizeof model_unused[0] && rc == 0; i++)
        rc = want_unused(l, model, "model", model_unused[i]);
    return rc;
}

static int take_id(struct loader *l, const struct json *v, const char *where, text_id *out)
{
    char buf[80];
    int64_t id;
    if (!json_int(v, &id) || id < 0 || id > TEXT_MAX_ID)
        return refuse(l, "%s: id %s, want 0 to %d", where, show(v, buf), (int)TEXT_MAX_ID);
    *out = (text_id)id;
    return 0;
}

/* Counts ids and bytes, so that all tables are made once. */
static int measure(struct loader *l, const struct json *vocab, const struct json *added,
                   size_t *blob_bytes)
{
    char buf[80], where[80];
    text_id id = -1, top = -1;
    size_t i = 0, len;
    int rc;
    if (json_type(vocab) != JSON_OBJECT)
        return refuse(l, "model.vocab: %s, want an object", show(vocab, buf));
    if (!is_null(added) && json_type(added) != JSON_ARRAY)
        return refuse(l, "added_tokens: %s, want an array", show(added, buf));
    *blob_bytes = 0;
    JSON_EACH(v, vocab)
    {
        rc = take_id(l, v, "model.vocab", &id);
        if (rc < 0) return rc;
        if (id > top) top = id;
        *blob_bytes += strlen(json_key(v));
    }
    JSON_EACH(v, added)
    {
        snprintf(where, sizeof where, "added_tokens[%zu].id", i);
        rc = take_id(l, json_find(v, "id"), where, &id);
        if (rc < 0) return rc;
        if (!json_string(json_find(v, "content"), &len))
            return refuse(l, "added_tokens[%zu].content: %s, want text", i,
                          show(json_find(v, "content"), buf));
        if (id > top) top = id;
        *blob_bytes += len;
        i++;
    }
    if (top < 0) return refuse(l, "model.vocab: empty");
    l->t->n_ids = top + 1;
    return 0;
}

/* Token spellings of the vocabulary. *used grows by what the blob takes. */
static int read_vocab(struct loader *l, const struct json *vocab, size_t *used)
{
    struct text_tokenizer *t = l->t;
    JSON_EACH(v, vocab)
    {
        const char *key = json_key(v);
        size_t len = strlen(key), n;
        text_id id = -1;
        int rc = take_id(l, v, "model.vocab", &id);
        if (rc < 0) return rc;
        if (l->has_key[id]) return refuse(l, "model.vocab: id %d is given twice", (int)id);
        if (len == 0) return refuse(l, "model.vocab: id %d has an empty token", (int)id);
        l->has_key[id] = true;
        uint8_t *bytes = t->blob + *used;
        bool plain = bytes_of_key(l->map, key, len, bytes, &n);
        if (!plain) { /* decoding writes such a token as it stands; no text makes it */
            memcpy(bytes, key, len);
            n = len;
        }
        *used += n;
        t->spellings[id] = (struct text_spelling){bytes, (uint32_t)n};
        if (plain) t->mergeable[id] = t->spellings[id];
    }
    return 0;
}

/* Whether the vocabulary writes this id with just this content. */
static bool same_key(struct loader *l, text_id id, const char *content, size_t len)
{
    const struct text_spelling *s = &l->t->spellings[id];
    if (!l->t->mergeable[id].len) return s->len == len && memcmp(s->bytes, content, len) == 0;
    uint8_t bytes[TEXT_ADDED_MAX_LEN];
    size_t n;
    return len <= sizeof bytes && bytes_of_key(l->map, content, len, bytes, &n) && n == s->len &&
           memcmp(s->bytes, bytes, n) == 0;
}

static int read_added(struct loader *l, const struct json *list, size_t *used)
{
    static const struct {
        const char *key;
        uint8_t flag;
    } fields[] = {
        {"special", SPECIAL}, {"lstrip", LSTRIP}, {"rstrip", RSTRIP}, {"single_word", SINGLE_WORD}};
    struct text_tokenizer *t = l->t;
    size_t i = 0;
    JSON_EACH(v, list)
    {
        char where[40];
        text_id id = -1;
        size_t len;
        bool on = false, normalized = false;
        uint8_t flags = ADDED;
        snprintf(where, sizeof where, "added_tokens[%zu]", i++);
        const char *content = json_string(json_find(v, "content"), &len);
        int rc = take_id(l, json_find(v, "id"), where, &id);
        for (size_t k = 0; k < sizeof fields / sizeof fields[0] && rc == 0; k++) {
            rc = take_bool(l, v, where, fields[k].key, false, &on);
            if (on) flags |= fields[k].flag;
        }
        if (rc == 0) rc = take_bool(l, v, where, "normalized", !(flags & SPECIAL), &normalized);
        if (rc < 0) return rc;
        if (t->flags[id] & ADDED) return refuse(l, "%s: id %d is given twice", where, (int)id);
        if (l->has_key[id] && !same_key(l, id, content, len))
            return refuse(l, "%s: id %d is another token in model.vocab", where, (int)id);
        rc = text_added_put(&t->added[normalized], content, len, id, l->err);
        if (rc < 0) {
            return refused(l, rc, where);
        }
        if (flags & SINGLE_WORD) t->has_single_word = true;
        memcpy(t->blob + *used, content, len);
        t->spellings[id] = (struct text_spelling){t->blob + *used, (uint32_t)len};
        t->mergeable[id].len = 0; /* never made from ordinary text */
        t->flags[id] = flags;
        *used += len;
    }
    return 0;
}

/* The two names of merge i, from "a b" or ["a", "b"]; borrowed. */
static bool merge_names(const struct json *v, const char *name[2], size_t len[2])
{
    if (json_type(v) == JSON_ARRAY) {
        const struct json *a = json_first(v), *b = a ? json_next(a) : NULL;
        if (!b || json_next(b)) return false;
        name[0] = json_string(a, &len[0]);
        name[1] = json_string(b, &len[1]);
        return name[0] && name[1];
    }
    size_t n;
    const char *s = json_string(v, &n), *space = s ? strchr(s, ' ') : NULL;
    if (!space || strchr(space + 1, ' ')) return false;
    name[0] = s;
    len[0] = (size_t)(space - s);
    name[1] = space + 1;
    len[1] = n - len[0] - 1;
    return true;
}

static int read_merges(struct loader *l, const struct json *list, bool whole_words)
{
    struct text_tokenizer *t = l->t;
    char buf[80];
    size_t i = 0;
    if (json_type(list) != JSON_ARRAY)
        return refuse(l, "model.merges: %s, want an array", show(list, buf));
    int rc = text_bpe_new(&t->bpe, t->mergeable, t->n_ids, json_size(list), l->err);
    if (rc < 0) return refused(l, rc, "model.vocab");
    JSON_EACH(v, list)
    {
        const char *name[2];
        size_t len[2], n;
        text_id side[2], made;
        uint8_t bytes[4096];
        const char *s = json_string(v, NULL);
        if (i == 0 && s && strncmp(s, "#version", 8) == 0) continue; /* a heading, no merge */
        if (!merge_names(v, name, len))
            return refuse(l, "model.merges[%zu]: %s, want \"a b\" or [\"a\", \"b\"]", i,
                          show(v, buf));
        for (int k = 0; k < 2; k++) {
            side[k] = -1;
            /* a character of the alphabet takes at most two bytes, so n <= len */
            if (len[k] <= sizeof bytes && bytes_of_key(l->map, name[k], len[k], bytes, &n))
                side[k] = text_bpe_find(t->bpe, bytes, n);
            if (side[k] < 0)
                return refuse(l, "model.merges[%zu]: '%.*s' is no ordinary token of model.vocab", i,
                              (int)(len[k] < 60 ? len[k] : 60), name[k]);
        }
        rc = text_bpe_add(t->bpe, side[0], side[1], &made, l->err);
        if (rc < 0) {
            char where[140];
            snprintf(where, sizeof where, "model.merges[%zu]: %s", i, show(v, buf));
            return refused(l, rc, where);
        }
        i++;
    }
    return text_bpe_finish(t->bpe, whole_words, l->err);
}

static int read_all(struct loader *l, const struct json *root)
{
    struct text_tokenizer *t = l->t;
    const struct json *model = json_find(root, "model"), *vocab = json_find(model, "vocab");
    const struct json *added = json_find(root, "added_tokens");
    /* What Unicode calls a word character: Alphabetic, marks, digits, connectors, joiners. */
    static const char word[] =
        "[\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{200C}\\x{200D}\\x{24B6}-\\x{24E9}"
        "\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}]";
    size_t blob_bytes = 0, used = 0;
    bool whole_words = false;

    int rc = check_rest(l, root);
    if (rc == 0) rc = read_normalizer(l, json_find(root, "normalizer"));
    if (rc == 0) rc = text_split_new(&t->split, true, l->err);
    if (rc == 0) rc = read_pre_tokenizer(l, json_find(root, "pre_tokenizer"));
    if (rc == 0) rc = take_bool(l, model, "model", "ignore_merges", false, &whole_words);
    if (rc == 0) rc = measure(l, vocab, added, &blob_bytes);
    if (rc < 0) return rc;

    t->spellings = calloc((size_t)t->n_ids, sizeof *t->spellings);
    t->mergeable = calloc((size_t)t->n_ids, sizeof *t->mergeable);
    t->flags = calloc((size_t)t->n_ids, 1);
    t->blob = malloc(blob_bytes + 1);
    l->has_key = calloc((size_t)t->n_ids, sizeof *l->has_key);
    if (!t->spellings || !t->mergeable || !t->flags || !t->blob || !l->has_key)
        return tow_fail(l->err, TOW_ENOMEM, "%s: out of memory for %d tokens", l->name,
                        (int)t->n_ids);
    rc = read_vocab(l, vocab, &used);
    if (rc == 0) rc = read_added(l, added, &used);
    if (rc == 0) rc = read_merges(l, json_find(model, "merges"), whole_words);
    if (rc == 0 && t->has_single_word) {
        rc = text_split_new(&t->word, true, l->err);
        if (rc == 0)
            rc = text_split_add(t->word, word, strlen(word), false, TEXT_SPLIT_ISOLATED, false,
                                l->err);
    }
    return rc;
}

int text_tokenizer_parse(struct text_tokenizer **out, const char *name, const char *json,
                         size_t len, struct tow_err *err)
{
    const struct json_limits limits = {
        .max_bytes = TEXT_MAX_FILE, .max_keys = 4u << 20, .max_values = 16u << 20};
    struct json *root;
    struct tow_err unread;
    if (!err) err = &unread;
    int rc = json_parse(&root, json, len, &limits, err);
    if (rc < 0) {
        tow_note(err, "%s", name);
        return rc;
    }
    struct loader l = {.name = name, .err = err};
    l.t = calloc(1, sizeof *l.t);
    if (!l.t) {
        rc = tow_fail(err, TOW_ENOMEM, "%s: out of memory", name);
        goto free_root;
    }
    for (uint32_t c = 0; c < 0x200; c++) l.map[c] = (int16_t)byte_of_char(c);
    char buf[80];
    if (json_type(root) == JSON_OBJECT)
        rc = read_all(&l, root);
    else
        rc = refuse(&l, "%s, want an object", show(root, buf));
    free(l.has_key);
    if (rc == 0)
        *out = l.t;
    else
        text_tokenizer_free(l.t);

free_root:
    json_free(root);
    return rc;
}

int text_tokenizer_load(struct text_tokenizer **out, const char *path, struct tow_err *err)
{
    int rc;
    char *data = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe has no end */
    FILE *f = fd < 0 ? NULL : fdopen(fd, "rb");
    if (!f) {
        rc = tow_fail(err, TOW_EIO, "%s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return rc;
    }
    struct stat st;
    size_t size = 0;
    if (fstat(fileno(f), &st) != 0) {
        rc = tow_fail(err, TOW_EIO, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        rc = tow_fail(err, TOW_EIO, "%s: not a regular file", path);
    } else if ((uint64_t)st.st_size > TEXT_MAX_FILE) {
        rc = tow_fail(err, TOW_ETOOBIG, "%s: %lld bytes, at most %zu", path, (long long)st.st_size,
                      TEXT_MAX_FILE);
    } else if (!(data = malloc((size = (size_t)st.st_size) + 1))) {
        rc = tow_fail(err, TOW_ENOMEM, "%s: out of memory", path);
    } else if (fread(data, 1, size, f) != size) {
        rc = tow_fail(err, TOW_EIO, "%s: shorter than its %zu bytes", path, size);
    } else {
        rc = text_tokenizer_parse(out, path, data, size, err);
    }
    free(data);
    fclose(f);
    return rc;
}

void text_tokenizer_free(struct text_tokenizer *t)
{
    if (!t) return;
    text_split_free(t->word);
    text_added_fini(&t->added[0]);
    text_added_fini(&t->added[1]);
    text_split_free(t->split);
    text_bpe_free(t->bpe);
    free(t->blob);
    free(t->flags);
    free(t->mergeable);
    free(t->spellings);
    free(t);
}

/* ---- the vocabulary ---- */

text_id text_tokenizer_n_ids(const struct text_tokenizer *t)
{
    return t->n_ids;
}

const uint8_t *text_tokenizer_peek(const struct text_tokenizer *t, text_id id, size_t *len)
{
    *len = 0;
    if (id < 0 || id >= t->n_ids || !t->spellings[id].len) return NULL;
    *len = t->spellings[id].len;
    return t->spellings[id].bytes;
}

bool text_tokenizer_is_added(const struct text_tokenizer *t, text_id id)
{
    return id >= 0 && id < t->n_ids && (t->flags[id] & ADDED);
}

bool text_tokenizer_is_special(const struct text_tokenizer *t, text_id id)
{
    return id >= 0 && id < t->n_ids && (t->flags[id] & SPECIAL);
}

int text_tokenizer_find(const struct text_tokenizer *t, const char *content, text_id *out,
                        struct tow_err *err)
{
    size_t len = strlen(content), begin, stop;
    for (int k = 0; k < N_ADDED_SETS; k++) {
        text_id id = text_added_next(&t->added[k], content, 0, len, &begin, &stop);
        if (id >= 0 && begin == 0 && stop == len) {
            *out = id;
            return 0;
        }
    }
    return tow_fail(err, TOW_ENOENT, "the tokenizer has no added token '%s'", content);
}

int text_tokenizer_check_ids(const struct text_tokenizer *t, const text_id *ids, size_t n,
                             struct tow_err *err)
{
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= t->n_ids)
            return tow_fail(err, TOW_EINVAL, "token %zu: id %d is not in 0 to %d", i, (int)ids[i],
                            (int)t->n_ids - 1);
        if (!t->spellings[ids[i]].len)
            return tow_fail(err, TOW_EINVAL, "token %zu: id %d has no token", i, (int)ids[i]);
    }
    return 0;
}

void text_ids_fini(struct text_ids *ids)
{
    free(ids->ids);
    memset(ids, 0, sizeof *ids);
}

/* ---- encoding ---- */

struct region {
    size_t begin, end;
};

struct encoder {
    const struct text_tokenizer *t;
    const char *text;    /* all segments, one after another */
    const char *subject; /* the same with stand-ins, for the regexes; same offsets */
    size_t len;
    struct region *regions; /* owned; where added tokens may be, in order, none touching another */
    size_t n_regions;
    struct text_split_scratch *split;
    struct text_split_scratch *word; /* NULL unless some added token wants whole words */
    struct text_bpe_scratch bpe;
    struct text_encode_stats stats;
    size_t max_ids;
    struct text_ids *out;
    struct tow_err *err;
};

static int on_piece(void *ctx, size_t begin, size_t end, struct tow_err *err)
{
    struct encoder *e = ctx;
    e->stats.n_pieces++;
    return text_bpe_encode(e->t->bpe, &e->bpe, (const uint8_t *)e->text + begin, end - begin,
                           e->max_ids, e->out, err);
}

/* The text must be UTF-8. *copy is set when the regexes have to be shown another text. */
static int check_text(struct encoder *e, char **copy)
{
    const uint8_t *p = (const uint8_t *)e->text;
    for (size_t i = 0; i < e->len;) {
        uint32_t cp, shown;
        if (p[i] < 0x80) {
            i++;
            continue;
        }
        int n = text_utf8_next(p + i, e->len - i, &cp);
        if (n <= 0) return tow_fail(e->err, TOW_EINVAL, "text: byte %zu is not valid UTF-8", i);
        shown = text_unicode_standin(cp);
        if (shown) {
            if (!*copy) {
                *copy = malloc(e->len);
                if (!*copy) return tow_fail(e->err, TOW_ENOMEM, "text: out of memory");
                memcpy(*copy, e->text, e->len);
                e->subject = *copy;
            }
            for (int k = n - 1; k > 0; k--, shown >>= 6)
                (*copy)[i + (size_t)k] = (char)(0x80 | (shown & 0x3F));
            (*copy)[i] = (char)((n == 2 ? 0xC0 : n == 3 ? 0xE0 : 0xF0) | shown);
        }
        i += (size_t)n;
    }
    return 0;
}

/* ---- added tokens in a stretch of text, by the reference's rules ---- */

/* The character before at, which is > begin. */
static size_t char_before(const char *text, size_t begin, size_t at)
{
    size_t i = at - 1;
    while (i > begin && ((uint8_t)text[i] & 0xC0) == 0x80) i--;
    return i;
}

/* The length of the character at, which is < end; *space says whether it is white space. */
static size_t char_after(const char *text, size_t at, size_t end, bool *space)
{
    uint32_t cp = 0;
    int n = text_utf8_next((const uint8_t *)text + at, end - at, &cp);
    *space = n > 0 && text_utf8_is_space(cp);
    return n > 0 ? (size_t)n : 1;
}

static bool word_before(struct encoder *e, size_t begin, size_t at)
{
    if (at == begin) return false;
    size_t c = char_before(e->subject, begin, at);
    return text_split_matches(e->t->word, e->word, e->subject + c, at - c);
}

static bool word_after(struct encoder *e, size_t at, size_t end)
{
    bool space;
    if (at == end) return false;
    size_t n = char_after(e->subject, at, end, &space);
    return text_split_matches(e->t->word, e->word, e->subject + at, n);
}

/* The next added token of set k in [from, end), as far as the segments allow it. */
static text_id next_added(struct encoder *e, int k, size_t from, size_t end, size_t *begin,
                          size_t *stop)
{
    size_t lo = 0, hi = e->n_regions;
    while (lo < hi) { /* the first region that ends behind from */
        size_t mid = (lo + hi) / 2;
        if (e->regions[mid].end <= from)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (; lo < e->n_regions && e->regions[lo].begin < end; lo++) {
        const struct region *r = &e->regions[lo];
        text_id id = text_added_next(&e->t->added[k], e->text, r->begin > from ? r->begin : from,
                                     r->end < end ? r->end : end, begin, stop);
        if (id >= 0) return id;
    }
    return -1;
}

/* Encodes [begin, end): the added tokens of set k and, between them, what comes after set k. */
static int encode_stretch(struct encoder *e, int k, size_t begin, size_t end)
{
    if (begin == end) return 0;
    if (k == N_ADDED_SETS)
        return text_split_run(e->t->split, e->split, e->subject, begin, end, on_piece, e,
                              &e->stats.n_matches, e->err);

    size_t from = begin, done = begin, start, stop;
    text_id id;
    int rc;
    while ((id = next_added(e, k, from, end, &start, &stop)) >= 0) {
        uint8_t flags = e->t->flags[id];
        bool space = true;
        from = stop;
        if (flags & SINGLE_WORD && (word_before(e, begin, start) || word_after(e, stop, end)))
            continue;
        while (flags & LSTRIP && space && start > done) {
            size_t c = char_before(e->text, done, start);
            char_after(e->text, c, start, &space);
            if (space) start = c;
        }
        space = true;
        while (flags & RSTRIP && space && stop < end) {
            size_t n = char_after(e->text, stop, end, &space);
            if (space) stop += n;
        }
        if (start < done) continue; /* it began in white space that the last one took */
        rc = encode_stretch(e, k + 1, done, start);
        if (rc == 0) rc = text_ids_put(e->out, id, e->max_ids, e->err);
        if (rc != 0) return rc;
        done = stop;
    }
    return encode_stretch(e, k + 1, done, end);
}

/* ---- the whole ---- */

/* Joins the segments (*joined is set when that takes memory) and notes where added tokens may
 * be. */
static int take_segments(struct encoder *e, const struct text_segment *segs, size_t n_segs,
                         char **joined)
{
    size_t used = 0, last = 0;
    for (size_t i = 0; i < n_segs; i++) {
        if (segs[i].len > TEXT_MAX_TEXT - e->len)
            return tow_fail(e->err, TOW_ETOOBIG, "text: more than %zu bytes", TEXT_MAX_TEXT);
        e->len += segs[i].len;
        if (segs[i].len) {
            used++;
            last = i;
        }
    }
    if (used == 0) return 0;
    e->regions = malloc(used * sizeof *e->regions);
    if (!e->regions) return tow_fail(e->err, TOW_ENOMEM, "text: out of memory");
    if (used == 1) {
        e->text = segs[last].bytes;
    } else {
        *joined = malloc(e->len);
        if (!*joined) return tow_fail(e->err, TOW_ENOMEM, "text: out of memory");
        e->text = *joined;
    }
    e->subject = e->text;

    size_t at = 0;
    for (size_t i = 0; i < n_segs; i++) {
        size_t end = at + segs[i].len;
        if (segs[i].len == 0) continue;
        if (*joined) memcpy(*joined + at, segs[i].bytes, segs[i].len);
        if (segs[i].allow_special) {
            if (e->n_regions && e->regions[e->n_regions - 1].end == at)
                e->regions[e->n_regions - 1].end = end;
            else
                e->regions[e->n_regions++] = (struct region){at, end};
        }
        at = end;
    }
    return 0;
}

int text_tokenizer_encode(const struct text_tokenizer *t, const struct text_segment *segs,
                          size_t n_segs, size_t max_ids, struct text_ids *out,
                          struct text_encode_stats *stats, struct tow_err *err)
{
    struct encoder e = {.t = t, .max_ids = max_ids, .out = out, .err = err};
    char *joined = NULL, *shown = NULL;
    size_t n_before = out->n;
    int rc = take_segments(&e, segs, n_segs, &joined);
    if (rc == 0) rc = check_text(&e, &shown);
    if (rc == 0) rc = text_split_scratch_new(&e.split, t->split, err);
    if (rc == 0 && t->word) rc = text_split_scratch_new(&e.word, t->word, err);
    if (rc == 0) rc = encode_stretch(&e, 0, 0, e.len);
    if (rc < 0) out->n = n_before;
    if (stats) {
        stats->n_matches += e.stats.n_matches;
        stats->n_pieces += e.stats.n_pieces;
        stats->n_steps += e.bpe.n_steps;
        if (e.bpe.peak_symbols > stats->peak_symbols) stats->peak_symbols = e.bpe.peak_symbols;
    }
    text_bpe_scratch_fini(&e.bpe);
    text_split_scratch_free(e.word);
    text_split_scratch_free(e.split);
    free(e.regions);
    free(shown);
    free(joined);
    return rc;
}
