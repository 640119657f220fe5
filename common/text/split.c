/* text/split.c - the chain of stages, run depth first.
 *
 * Each stage cuts what it is given and hands every piece at once to the next, so no list of pieces
 * is ever built: a stage remembers at most one piece that a later match may still lengthen. A piece
 * is matched as a text of its own (lookahead and lookbehind see nothing outside it), from an offset
 * that only grows; searches look at each character a bounded number of times for patterns of the
 * usual kind, and PCRE2's match limit, set in proportion to the text, ends the others.
 *
 * Rejected: a hand-written scanner for DeepSeek's pattern. It would be faster, but then the pattern
 * would stand in two places and the file's own would be ignored.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "common/text/split.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/text/utf8.h"

/* A match may take this many steps, and so many more for each byte of its piece. The machine code
 * counts coarser steps than the interpreter; a usual pattern needs 2 or 3 a byte. */
#define MATCH_STEPS          1000000u
#define MATCH_STEPS_PER_BYTE 64u
#define MATCH_HEAP_KIB       (64u << 10)

struct stage {
    pcre2_code *code; /* owned */
    enum text_split_behavior behavior;
    bool invert;
};

struct text_split {
    struct stage stages[TEXT_SPLIT_MAX_STAGES];
    size_t n;
    bool want_jit;
    bool has_jit;
};

struct text_split_scratch {
    pcre2_match_data *match[TEXT_SPLIT_MAX_STAGES]; /* owned; a stage runs inside the one before */
    pcre2_match_context *limits;                    /* owned */
};

/* ---- patterns: only what both engines understand alike ---- */

static bool is_category(const char *name, size_t n)
{
    static const char *const all[] = {
        "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",
        "Nd", "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po",
        "S",  "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp",
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (strlen(all[i]) == n && memcmp(all[i], name, n) == 0) return true;
    return false;
}

static int refuse(const char *p, size_t at, size_t n, const char *why, struct tow_err *err)
{
    return tow_fail(err, TOW_EFORMAT, "regex byte %zu: '%.*s' %s", at, (int)n, p + at, why);
}

static bool is_hex(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

/* An escape at p[at]; *next is where the pattern goes on. */
static int check_escape(const char *p, size_t len, size_t at, size_t *next, struct tow_err *err)
{
    if (at + 1 == len) return refuse(p, at, 1, "ends the pattern", err);
    char c = p[at + 1];
    *next = at + 2;
    if (strchr("sSdDrntf", c) && c) return 0;
    if (c == 'p' || c == 'P') {
        size_t name = at + 3;
        const char *close = name < len ? memchr(p + name, '}', len - name) : NULL;
        if (at + 2 >= len || p[at + 2] != '{' || !close)
            return refuse(p, at, 2, "must be followed by {a general category}", err);
        if (name < len && p[name] == '^') name++;
        if (!is_category(p + name, (size_t)(close - (p + name))))
            return refuse(p, at, (size_t)(close + 1 - (p + at)),
                          "is no property we take (only general categories such as L or Nd)", err);
        *next = (size_t)(close + 1 - p);
        return 0;
    }
    if (c == 'x') {
        size_t i = at + 2;
        if (i < len && p[i] == '{') {
            size_t first = ++i;
            while (i < len && is_hex(p[i])) i++;
            if (i > first && i - first <= 8 && i < len && p[i] == '}') {
                *next = i + 1;
                return 0;
            }
        } else if (i + 1 < len && p[i] >= '0' && p[i] <= '7' && is_hex(p[i + 1])) {
            *next = i + 2;
            return 0;
        }
        return refuse(p, at, 2, "must be \\x{..} or \\x00 to \\x7f", err);
    }
    if ((c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
        (c >= '{' && c <= '~') || c == ' ')
        return 0;
    return refuse(p, at, 2, "is an escape we do not take", err);
}

static int check_class(const char *p, size_t len, size_t at, size_t *next, struct tow_err *err)
{
    size_t i = at + 1;
    int rc;
    if (i < len && p[i] == '^') i++;
    if (i < len && p[i] == ']') return refuse(p, at, i + 1 - at, "is an empty class", err);
    while (i < len && p[i] != ']') {
        if (p[i] == '[') return refuse(p, i, 1, "inside a class must be written \\[", err);
        if (p[i] == '&' && i + 1 < len && p[i + 1] == '&')
            return refuse(p, i, 2, "(intersection of classes) is not supported", err);
        if (p[i] == '\\') {
            rc = check_escape(p, len, i, &i, err);
            if (rc < 0) return rc;
        } else {
            i++;
        }
    }
    if (i == len) return refuse(p, at, 1, "opens a class that is not closed", err);
    *next = i + 1;
    return 0;
}

static int check_group(const char *p, size_t len, size_t at, size_t *next, struct tow_err *err)
{
    static const char *const kinds[] = {"?:", "?=", "?!", "?>", "?<=", "?<!", "?i:"};
    size_t left = len - at - 1;
    *next = at + 1;
    if (left > 0 && p[at + 1] == '*') return refuse(p, at, 2, "is not supported", err);
    if (left == 0 || p[at + 1] != '?') return 0;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        size_t n = strlen(kinds[i]);
        if (left >= n && memcmp(p + at + 1, kinds[i], n) == 0) {
            *next = at + 1 + n;
            return 0;
        }
    }
    return refuse(p, at, left < 3 ? left + 1 : 4, "opens a group we do not take", err);
}

/* {n}, {n,} or {n,m}; the two engines read any other brace, and what may follow, differently. */
static int check_braces(const char *p, size_t len, size_t at, size_t *next, struct tow_err *err)
{
    size_t i = at + 1, first = i;
    while (i < len && p[i] >= '0' && p[i] <= '9') i++;
    bool ok = i > first;
    bool range = i < len && p[i] == ',';
    if (range)
        for (i++; i < len && p[i] >= '0' && p[i] <= '9'; i++) {
        }
    if (!ok || i >= len || p[i] != '}')
        return refuse(p, at, 1, "must open {n}, {n,} or {n,m}, or be written \\{", err);
    *next = i + 1;
    if (*next < len && (p[*next] == '+' || (p[*next] == '?' && !range)))
        return refuse(p, at, *next + 1 - at, "means different things in different engines", err);
    return 0;
}

static int check_pattern(const char *p, size_t len, struct tow_err *err)
{
    size_t i = 0;
    int rc = 0;
    while (i < len && rc == 0) {
        switch (p[i]) {
        case '\\': rc = check_escape(p, len, i, &i, err); break;
        case '[': rc = check_class(p, len, i, &i, err); break;
        case '(': rc = check_group(p, len, i, &i, err); break;
        case '{': rc = check_braces(p, len, i, &i, err); break;
        case '^':
        case '$': return refuse(p, i, 1, "(an anchor) is not supported", err);
        default: i++;
        }
    }
    return rc;
}

/* ---- building ---- */

int text_split_new(struct text_split **out, bool jit, struct tow_err *err)
{
    struct text_split *s = calloc(1, sizeof *s);
    if (!s) return tow_fail(err, TOW_ENOMEM, "pre-tokenizer: out of memory");
    s->want_jit = jit;
    s->has_jit = jit;
    *out = s;
    return 0;
}

void text_split_free(struct text_split *s)
{
    if (!s) return;
    for (size_t i = 0; i < s->n; i++) pcre2_code_free(s->stages[i].code);
    free(s);
}

int text_split_add(struct text_split *s, const char *pattern, size_t len, bool literal,
                   enum text_split_behavior behavior, bool invert, struct tow_err *err)
{
    if (s->n == TEXT_SPLIT_MAX_STAGES)
        return tow_fail(err, TOW_EFORMAT, "more than %d stages", TEXT_SPLIT_MAX_STAGES);
    if (len == 0) return tow_fail(err, TOW_EFORMAT, "empty pattern");
    if (!literal) {
        int rc = check_pattern(pattern, len, err);
        if (rc < 0) return rc;
    }
    pcre2_compile_context *ctx = pcre2_compile_context_create(NULL);
    if (!ctx) return tow_fail(err, TOW_ENOMEM, "pre-tokenizer: out of memory");
    pcre2_set_newline(ctx, PCRE2_NEWLINE_LF); /* what '.' leaves out; else a choice of the build */
    uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C);
    int code;
    PCRE2_SIZE at;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)pattern, len, options, &code, &at, ctx);
    pcre2_compile_context_free(ctx);
    if (!re) {
        PCRE2_UCHAR why[160] = "";
        pcre2_get_error_message(code, why, sizeof why);
        return tow_fail(err, TOW_EFORMAT, "regex byte %zu: %s", (size_t)at, (const char *)why);
    }
    /* No JIT in this build, or no executable memory to be had: the interpreter will do. */
    if (!s->want_jit || tow_fault("text.jit") || pcre2_jit_compile(re, PCRE2_JIT_COMPLETE) != 0)
        s->has_jit = false;
    s->stages[s->n++] = (struct stage){.code = re, .behavior = behavior, .invert = invert};
    return 0;
}

size_t text_split_n_stages(const struct text_split *s)
{
    return s->n;
}

bool text_split_has_jit(const struct text_split *s)
{
    return s->has_jit;
}

int text_split_scratch_new(struct text_split_scratch **out, const struct text_split *s,
                           struct tow_err *err)
{
    struct text_split_scratch *w = calloc(1, sizeof *w);
    if (!w) goto no_memory;
    w->limits = pcre2_match_context_create(NULL);
    if (!w->limits) goto no_memory;
    pcre2_set_heap_limit(w->limits, MATCH_HEAP_KIB);
    for (size_t i = 0; i < s->n; i++) {
        w->match[i] = pcre2_match_data_create(1, NULL);
        if (!w->match[i]) goto no_memory;
    }
    *out = w;
    return 0;

no_memory:
    text_split_scratch_free(w);
    return tow_fail(err, TOW_ENOMEM, "pre-tokenizer: out of memory");
}

void text_split_scratch_free(struct text_split_scratch *w)
{
    if (!w) return;
    for (size_t i = 0; i < TEXT_SPLIT_MAX_STAGES; i++) pcre2_match_data_free(w->match[i]);
    pcre2_match_context_free(w->limits);
    free(w);
}

/* ---- running ---- */

struct run {
    const struct text_split *split;
    struct text_split_scratch *w;
    const char *text;
    text_split_on_piece on_piece;
    void *ctx;
    uint64_t n_matches;
    struct tow_err *err;
};

/* The piece a stage is making. In MERGED_NEXT it is a match that waits for what follows it; in the
 * other merging behaviours it is the last piece, which a match may still lengthen. */
struct pending {
    size_t begin, end;
    bool held;
    bool last_was_match;
};

static int run_stage(struct run *r, size_t k, size_t begin, size_t end);

static int flush(struct run *r, size_t k, struct pending *p)
{
    if (!p->held) return 0;
    p->held = false;
    return run_stage(r, k + 1, p->begin, p->end);
}

/* Takes the next stretch of the text, a match or what lies between two. */
static int take_stretch(struct run *r, size_t k, struct pending *p, size_t begin, size_t end,
                        bool is_match)
{
    const struct stage *st = &r->split->stages[k];
    bool joins = false;
    int rc;
    is_match = is_match != st->invert;
    switch (st->behavior) {
    case TEXT_SPLIT_ISOLATED: return run_stage(r, k + 1, begin, end);
    case TEXT_SPLIT_REMOVED: return is_match ? 0 : run_stage(r, k + 1, begin, end);
    case TEXT_SPLIT_MERGED_PREVIOUS: joins = is_match && !p->last_was_match; break;
    case TEXT_SPLIT_MERGED_NEXT: joins = !is_match && p->last_was_match; break;
    case TEXT_SPLIT_CONTIGUOUS: joins = is_match == p->last_was_match; break;
    }
    p->last_was_match = is_match;
    if (joins && p->held) {
        p->end = end;
        return 0;
    }
    rc = flush(r, k, p);
    if (rc != 0) return rc;
    p->begin = begin;
    p->end = end;
    p->held = true;
    return 0;
}

static int search(struct run *r, size_t k, const char *subject, size_t len, size_t from)
{
    const struct stage *st = &r->split->stages[k];
    r->n_matches++;
    int rc = pcre2_match(st->code, (PCRE2_SPTR)subject, len, from, PCRE2_NO_UTF_CHECK,
                         r->w->match[k], r->w->limits);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(st->code, (PCRE2_SPTR)subject, len, from,
                         PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, r->w->match[k], r->w->limits);
    return rc;
}

static int run_stage(struct run *r, size_t k, size_t begin, size_t end)
{
    if (begin == end) return 0;
    if (k == r->split->n) return r->on_piece(r->ctx, begin, end, r->err);

    const char *subject = r->text + begin;
    size_t len = end - begin, from = 0, done = 0;
    struct pending p = {.held = false};
    bool matched = false; /* a match ended at done */
    int rc;
    uint64_t steps = MATCH_STEPS + (uint64_t)MATCH_STEPS_PER_BYTE * len;
    while (from <= len) {
        /* Each time: the stages inside this one set their own. */
        pcre2_set_match_limit(r->w->limits, steps > UINT32_MAX ? UINT32_MAX : (uint32_t)steps);
        rc = search(r, k, subject, len, from);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) {
            PCRE2_UCHAR why[160] = "";
            pcre2_get_error_message(rc, why, sizeof why);
            return tow_fail(r->err, TOW_ETOOBIG, "text: byte %zu: pre-tokenizer stage %zu: %s",
                            begin + from, k, (const char *)why);
        }
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(r->w->match[k]);
        if (at[0] == at[1] && matched && at[1] == done) {
            /* An empty match right behind the last one is none; look one character further. */
            uint32_t cp;
            if (from == len) break;
            int n = text_utf8_next((const uint8_t *)subject + from, len - from, &cp);
            from += n > 0 ? (size_t)n : 1;
            continue;
        }
        size_t m0 = at[0], m1 = at[1];
        if (m0 > done) {
            rc = take_stretch(r, k, &p, begin + done, begin + m0, false);
            if (rc != 0) return rc;
        }
        rc = take_stretch(r, k, &p, begin + m0, begin + m1, true);
        if (rc != 0) return rc;
        from = done = m1;
        matched = true;
    }
    if (done < len) {
        rc = take_stretch(r, k, &p, begin + done, begin + len, false);
        if (rc != 0) return rc;
    }
    return flush(r, k, &p);
}

int text_split_run(const struct text_split *s, struct text_split_scratch *w, const char *text,
                   size_t begin, size_t end, text_split_on_piece on_piece, void *ctx,
                   uint64_t *n_matches, struct tow_err *err)
{
    struct run r = {.split = s, .w = w, .text = text, .on_piece = on_piece, .ctx = ctx, .err = err};
    int rc = run_stage(&r, 0, begin, end);
    *n_matches += r.n_matches;
    return rc;
}

bool text_split_matches(const struct text_split *s, struct text_split_scratch *w, const char *text,
                        size_t len)
{
    struct run r = {.split = s, .w = w};
    pcre2_set_match_limit(w->limits, MATCH_STEPS);
    return search(&r, 0, text, len, 0) >= 0;
}
