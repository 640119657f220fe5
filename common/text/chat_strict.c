/* text/chat_strict.c - the release's own parser of a whole completion; see chat.h.
 *
 * It accepts exactly what the model was trained to write and refuses the rest, so it is what
 * goldens and evaluations use. Serving uses the stream parser of chat_parse.c, which never fails.
 * Both are kept because their answers to faulty text differ on purpose.
 */
#include "common/text/chat.h"

#include "common/base/err.h"
#include "common/text/json.h"

#include <stdlib.h>
#include <string.h>

#define CALLS "\n\n<" TEXT_DSML "tool_calls"

struct strict {
    const char *s;
    size_t len, pos;
    struct tow_err *err;
};

static int refuse(const struct strict *t, const char *what)
{
    return tow_fail(t->err, TOW_EFORMAT, "completion: byte %zu: %s", t->pos, what);
}

static bool take(struct strict *t, const char *lit)
{
    size_t n = strlen(lit);
    if (t->len - t->pos < n || memcmp(t->s + t->pos, lit, n) != 0) return false;
    t->pos += n;
    return true;
}

/* Where lit stands next, or len. */
static size_t find(const struct strict *t, const char *lit)
{
    const char *at = memmem(t->s + t->pos, t->len - t->pos, lit, strlen(lit));
    return at ? (size_t)(at - t->s) : t->len;
}

static void skip_blanks(struct strict *t)
{
    while (t->pos < t->len && strchr(" \t\n\r", t->s[t->pos])) t->pos++;
}

/* No special token may stand in the text that becomes the message. */
static int check_text(const struct strict *t, const struct tow_buf *b)
{
    static const char *const bad[] = {TEXT_BOS, TEXT_EOS, "<think>", "</think>", TEXT_DSML};
    for (size_t i = 0; b->len && i < sizeof bad / sizeof *bad; i++)
        if (memmem(b->data, b->len, bad[i], strlen(bad[i])))
            return refuse(t, "a control token inside content or reasoning");
    return 0;
}

struct key {
    const char *s;
    size_t len;
};

static int by_key(const void *a, const void *b)
{
    const struct key *x = a, *y = b;
    int c = memcmp(x->s, y->s, x->len < y->len ? x->len : y->len);
    return c ? c : (x->len > y->len) - (x->len < y->len);
}

static bool key_twice(struct key *keys, size_t n)
{
    if (n > 1) qsort(keys, n, sizeof *keys, by_key);
    for (size_t i = 1; i < n; i++)
        if (by_key(&keys[i - 1], &keys[i]) == 0) return true;
    return false;
}

/* One parameter, after its "<｜DSML｜parameter"; ends after ">\n". */
static int parameter(struct strict *t, struct tow_buf *args, struct key *key)
{
    size_t end = find(t, "/" TEXT_DSML "parameter");
    if (end == t->len) return refuse(t, "a parameter without its end");
    if (!take(t, " name=\"")) return refuse(t, "a parameter without name");
    size_t from = t->pos, at = t->len;
    bool string = false;
    const char *flags[] = {"\" string=\"true\">", "\" string=\"false\">"};
    for (int i = 0; i < 2; i++) {
        size_t f = find(t, flags[i]);
        if (f < at) {
            at = f;
            string = i == 0;
        }
    }
    if (at >= end) return refuse(t, "a parameter whose string attribute is neither true nor false");
    *key = (struct key){t->s + from, at - from};
    t->pos = at + strlen(flags[string ? 0 : 1]);
    if (end <= t->pos || t->s[end - 1] != '<') return refuse(t, "a value without its closing tag");
    if (args->len > 1) tow_buf_puts(args, ", ");
    json_put_string(args, key->s, key->len);
    tow_buf_puts(args, ": ");
    if (string)
        json_put_string(args, t->s + t->pos, end - 1 - t->pos);
    else
        tow_buf_put(args, t->s + t->pos, end - 1 - t->pos);
    t->pos = end + strlen("/" TEXT_DSML "parameter");
    return take(t, ">\n") ? 0 : refuse(t, "'>' and a line break should follow the parameter");
}

/* One call, after its "<｜DSML｜invoke"; ends after ">\n". */
static int invoke(struct strict *t, struct text_chat_message *m)
{
    const struct text_chat_event ev = {.kind = TEXT_EV_CALL, .text = "", .name = ""};
    struct key *keys = NULL;
    size_t n = 0, cap = 0;
    int rc = 0;
    text_chat_message_add(m, &ev);
    if (m->failed) return tow_fail(t->err, TOW_ENOMEM, "chat: out of memory");
    struct text_chat_call *c = &m->calls[m->n_calls - 1];
    skip_blanks(t);
    if (!take(t, "name=\"")) return refuse(t, "a call without name");
    size_t end = find(t, "\">\n");
    if (end == t->len) return refuse(t, "a call without name");
    tow_buf_put(&c->name, t->s + t->pos, end - t->pos);
    t->pos = end + 3;
    take(t, "\n"); /* the encoder's own empty call has it */
    tow_buf_putc(&c->arguments, '{');
    while (rc == 0 && !take(t, "</" TEXT_DSML "invoke")) {
        if (n == cap) {
            cap = cap ? cap * 2 : 8;
            struct key *k = realloc(keys, cap * sizeof *k);
            if (!k) {
                rc = tow_fail(t->err, TOW_ENOMEM, "chat: out of memory");
                break;
            }
            keys = k;
        }
        rc = take(t, "<" TEXT_DSML "parameter")
                 ? parameter(t, &c->arguments, &keys[n++])
                 : refuse(t, "neither a parameter nor the end of the call");
    }
    if (rc == 0 && key_twice(keys, n)) rc = refuse(t, "a parameter twice in one call");
    free(keys);
    tow_buf_putc(&c->arguments, '}');
    if (rc < 0) return rc;
    if (tow_buf_failed(&c->name) || tow_buf_failed(&c->arguments))
        return tow_fail(t->err, TOW_ENOMEM, "chat: out of memory");
    return take(t, ">\n") ? 0 : refuse(t, "'>' and a line break should follow the call");
}

static int calls(struct strict *t, struct text_chat_message *m)
{
    if (!take(t, ">\n"))
        return refuse(t, "'>' and a line break should follow the opening of calls");
    while (!take(t, "</" TEXT_DSML "tool_calls>")) {
        if (!take(t, "<" TEXT_DSML "invoke"))
            return refuse(t, "neither a call nor the end of the calls");
        int rc = invoke(t, m);
        if (rc < 0) return rc;
    }
    take(t, TEXT_EOS); /* here it may be missing */
    return t->pos == t->len ? 0 : refuse(t, "text after the calls");
}

int text_chat_parse_strict(struct text_chat_message *m, const char *text, size_t len, bool thinking,
                           struct tow_err *err)
{
    struct strict t = {text, len, 0, err};
    if (thinking) {
        size_t end = find(&t, "</think>");
        if (end == len || find(&t, CALLS) < end) return refuse(&t, "reasoning without its end");
        tow_buf_put(&m->reasoning, text, end);
        t.pos = end + strlen("</think>");
    }
    size_t eos = find(&t, TEXT_EOS), open = find(&t, CALLS), end = eos < open ? eos : open;
    if (end == len) return refuse(&t, "neither an end of the turn nor calls");
    tow_buf_put(&m->content, text + t.pos, end - t.pos);
    if (tow_buf_failed(&m->content) || tow_buf_failed(&m->reasoning))
        return tow_fail(err, TOW_ENOMEM, "chat: out of memory");
    int rc = check_text(&t, &m->content);
    if (rc == 0) rc = check_text(&t, &m->reasoning);
    if (rc < 0) return rc;
    t.pos = end;
    if (take(&t, CALLS)) return calls(&t, m);
    take(&t, TEXT_EOS);
    return t.pos == len ? 0 : refuse(&t, "text after the end of the turn");
}
