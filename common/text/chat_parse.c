/* text/chat_parse.c - the model's output as a message, while it comes; see chat.h and docs/chat.md.
 *
 * REASONING --</think>--> CONTENT
 *     |                      |
 *     +---- opening of a block of calls ----> BLOCK --closed--> CONTENT, its calls given out
 *                                               |
 *                              not a block of calls: back, all of it as text, and no more calls
 *
 * In the two text states `pend` holds only what cannot be decided yet: a beginning of a marker, and
 * blanks that may belong to the opening of a block. In BLOCK it holds the block from its first
 * blank on; the block is read in one pass (`at`, `look` never go back) and is all or nothing: its
 * calls are given out when it is closed, so a fault in it, wherever it stands, leaves no call
 * half-told. Everything depends on the bytes alone, never on how they were split, because nothing
 * is decided before the bytes that decide it are there. Giving out each call as it ends was
 * rejected: a block that breaks later would have run in part.
 */
#include "common/text/chat.h"

#include "common/base/err.h"
#include "common/text/json.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK_MAX ((size_t)32 << 20) /* bytes of one block; beyond it is text */

#define OPEN_CALLS     "<" TEXT_DSML "tool_calls>"
#define OPEN_CALLS_OLD "<" TEXT_DSML "function_calls>"
#define OPEN_INVOKE    "<" TEXT_DSML "invoke"
#define CLOSE_INVOKE   "</" TEXT_DSML "invoke>"
#define OPEN_PARAM     "<" TEXT_DSML "parameter"
#define CLOSE_PARAM    "</" TEXT_DSML "parameter>"

enum mode { REASONING, CONTENT, BLOCK };

/* Where in a block we are. */
enum part {
    TAG,   /* before a call or the end of the block */
    NAME,  /* after "<invoke" */
    PARAM, /* before a parameter or the end of the call */
    KEY,   /* after "<parameter" */
    VALUE, /* in a value */
};

struct call {
    struct tow_buf name, args;
    uint32_t n_params;
};

struct span {
    size_t off, len; /* in pend */
};

struct param {
    struct span key, value;
    bool string;
};

struct text_chat_parser {
    enum mode mode;
    enum mode back;           /* where a broken block's text goes */
    bool calls;               /* blocks are looked for */
    bool tail;                /* a block was closed and nothing but blanks came since */
    const struct json *tools; /* borrowed; may be NULL */
    struct tow_buf pend;      /* see above */
    size_t blanks;            /* of pend's front, known to be blanks (text states) */
    struct tow_buf out;       /* text of one event */
    uint32_t n_calls;         /* given out */
    bool no_memory;

    /* of the block */
    enum part part;
    bool bare;            /* a call without a block around it */
    const char *closer;   /* of the block */
    size_t at;            /* everything before is read */
    size_t look;          /* searched up to here */
    struct span name;     /* of the call being read */
    struct param *params; /* owned; of the call being read */
    size_t n_params, params_cap;
    struct call *done; /* owned; complete calls of this block */
    size_t n_done, done_cap;
};

struct to {
    text_chat_on_event on_event;
    void *arg;
};

/* ---- what is looked for in text ---- */

enum mark {
    MARK_NONE,
    MARK_WAIT,
    MARK_DROP,
    MARK_THINK_END,
    MARK_CLOSE,
    MARK_BLOCK,
    MARK_OLD_BLOCK,
    MARK_CALL
};

static const struct {
    const char *text;
    enum mark mark;
} marks[] = {
    {OPEN_CALLS, MARK_BLOCK},
    {OPEN_CALLS_OLD, MARK_OLD_BLOCK},
    {OPEN_INVOKE " name=\"", MARK_CALL},
    {"</" TEXT_DSML "tool_calls>", MARK_CLOSE}, /* of a call that had no block around it */
    {"</" TEXT_DSML "function_calls>", MARK_CLOSE},
    {"</think>", MARK_THINK_END},
    {"<think>", MARK_DROP},
    {TEXT_BOS, MARK_DROP},
    {TEXT_EOS, MARK_DROP},
    {"<｜User｜>", MARK_DROP},
    {"<｜Assistant｜>", MARK_DROP},
    {"<｜latest_reminder｜>", MARK_DROP},
    {"<｜action｜>", MARK_DROP},
    {"<｜query｜>", MARK_DROP},
    {"<｜authority｜>", MARK_DROP},
    {"<｜domain｜>", MARK_DROP},
    {"<｜title｜>", MARK_DROP},
    {"<｜read_url｜>", MARK_DROP},
};

/* 1: text begins with lit; 0: text is a beginning of lit; -1: neither. */
static int match(const char *text, size_t len, const char *lit)
{
    size_t n = strlen(lit);
    if (len >= n) return memcmp(text, lit, n) == 0 ? 1 : -1;
    return memcmp(text, lit, len) == 0 ? 0 : -1;
}

static enum mark mark_at(const struct text_chat_parser *p, const char *s, size_t len,
                         size_t *mark_len)
{
    bool wait = false;
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        if (marks[i].mark >= MARK_CLOSE && !p->calls) continue;
        int m = match(s, len, marks[i].text);
        if (m > 0) {
            *mark_len = strlen(marks[i].text);
            return marks[i].mark;
        }
        wait |= m == 0;
    }
    return wait ? MARK_WAIT : MARK_NONE;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

/* ---- giving out ---- */

static void give(const struct to *to, enum text_chat_event_kind kind, const char *text, size_t len)
{
    const struct text_chat_event ev = {.kind = kind, .text = text, .len = len};
    to->on_event(to->arg, &ev);
}

static void give_text(struct text_chat_parser *p, const struct to *to, const char *s, size_t len)
{
    if (!len) return;
    tow_buf_clear(&p->out);
    tow_buf_put(&p->out, s, len);
    if (tow_buf_failed(&p->out)) {
        p->no_memory = true;
        return;
    }
    give(to, p->mode == REASONING ? TEXT_EV_REASONING : TEXT_EV_CONTENT, p->out.data, len);
}

static void give_calls(struct text_chat_parser *p, const struct to *to)
{
    for (size_t i = 0; i < p->n_done; i++) {
        struct call *c = &p->done[i];
        struct text_chat_event ev = {.kind = TEXT_EV_CALL,
                                     .text = "",
                                     .name = c->name.data,
                                     .name_len = c->name.len,
                                     .index = p->n_calls++};
        to->on_event(to->arg, &ev);
        ev.kind = TEXT_EV_ARGUMENTS;
        ev.text = c->args.data;
        ev.len = c->args.len;
        to->on_event(to->arg, &ev);
    }
}

/* ---- a block ---- */

static void forget_calls(struct text_chat_parser *p)
{
    for (size_t i = 0; i < p->n_done; i++) {
        tow_buf_fini(&p->done[i].name);
        tow_buf_fini(&p->done[i].args);
    }
    p->n_done = 0;
    p->n_params = 0;
}

static bool is_json(const char *s, size_t len, struct json **out)
{
    return json_parse(out, s, len, NULL, NULL) == 0;
}

/* The properties of the schema of this tool, or NULL when there are none to go by. */
static const struct json *properties(const struct text_chat_parser *p, const struct tow_buf *name)
{
    JSON_EACH(tool, p->tools)
    {
        const struct json *f = json_find(tool, "function");
        size_t len = 0;
        const char *s = json_string(json_find(f, "name"), &len);
        if (!s || len != name->len || memcmp(s, name->data, len) != 0) continue;
        const struct json *props = json_find(json_find(f, "parameters"), "properties");
        return json_first(props) ? props : NULL;
    }
    return NULL;
}

/* Models at times put all arguments into one parameter "arguments" or "input". True when this is
 * such a wrapper: the only parameter, an object, and the schema has properties but none of that
 * name. */
static bool is_wrapper(const struct text_chat_parser *p, const struct tow_buf *name)
{
    if (p->n_params != 1) return false;
    const struct param *a = &p->params[0];
    const char *key = p->pend.data + a->key.off;
    const char *word = a->key.len == 5 ? "input" : "arguments";
    if (a->key.len != strlen(word) || memcmp(key, word, a->key.len) != 0) return false;
    const struct json *props = properties(p, name);
    if (!props || json_find(props, word)) return false;
    struct json *v = NULL;
    bool object =
        is_json(p->pend.data + a->value.off, a->value.len, &v) && json_type(v) == JSON_OBJECT;
    json_free(v);
    return object;
}

static void put_arguments(struct text_chat_parser *p, struct call *c)
{
    const char *base = p->pend.data;
    if (is_wrapper(p, &c->name)) {
        tow_buf_put(&c->args, base + p->params[0].value.off, p->params[0].value.len);
        return;
    }
    tow_buf_putc(&c->args, '{');
    for (size_t i = 0; i < p->n_params; i++) {
        const struct param *a = &p->params[i];
        const char *value = base + a->value.off;
        struct json *v = NULL;
        if (i) tow_buf_puts(&c->args, ", ");
        json_put_string(&c->args, base + a->key.off, a->key.len);
        tow_buf_puts(&c->args, ": ");
        if (!a->string && is_json(value, a->value.len, &v))
            tow_buf_put(&c->args, value, a->value.len);
        else
            json_put_string(&c->args, value, a->value.len);
        json_free(v);
    }
    tow_buf_putc(&c->args, '}');
}

static int by_key(const void *a, const void *b, void *base)
{
    const struct span *x = &((const struct param *)a)->key, *y = &((const struct param *)b)->key;
    size_t n = x->len < y->len ? x->len : y->len;
    int c = memcmp((const char *)base + x->off, (const char *)base + y->off, n);
    return c ? c : (x->len > y->len) - (x->len < y->len);
}

/* True when two parameters have the same key. Sorts a copy, so it stays fast for many. */
static bool key_twice(struct text_chat_parser *p)
{
    size_t n = p->n_params;
    struct param *sorted = n < 2 ? NULL : malloc(n * sizeof *sorted);
    bool twice = false;
    if (!sorted) {
        p->no_memory |= n >= 2;
        return false;
    }
    memcpy(sorted, p->params, n * sizeof *sorted);
    qsort_r(sorted, n, sizeof *sorted, by_key, p->pend.data);
    for (size_t i = 1; i < n && !twice; i++)
        twice = by_key(&sorted[i - 1], &sorted[i], p->pend.data) == 0;
    free(sorted);
    return twice;
}

static void call_ends(struct text_chat_parser *p)
{
    if (p->n_done == p->done_cap) {
        size_t cap = p->done_cap ? p->done_cap * 2 : 4;
        struct call *c = realloc(p->done, cap * sizeof *c);
        if (!c) {
            p->no_memory = true;
            return;
        }
        p->done = c;
        p->done_cap = cap;
    }
    struct call *c = &p->done[p->n_done++];
    tow_buf_init(&c->name, 0);
    tow_buf_init(&c->args, 0);
    tow_buf_put(&c->name, p->pend.data + p->name.off, p->name.len);
    put_arguments(p, c);
    p->no_memory |= tow_buf_failed(&c->name) || tow_buf_failed(&c->args);
    p->n_params = 0;
}

static bool add_param(struct text_chat_parser *p)
{
    if (p->n_params == p->params_cap) {
        size_t cap = p->params_cap ? p->params_cap * 2 : 8;
        struct param *a = realloc(p->params, cap * sizeof *a);
        if (!a) {
            p->no_memory = true;
            return false;
        }
        p->params = a;
        p->params_cap = cap;
    }
    p->params[p->n_params++] = (struct param){0};
    return true;
}

enum step { WAIT, GO, CLOSED, BROKEN };

/* Reads ` name="...">`, the rest of a tag; it holds no line break. */
static enum step read_head(struct text_chat_parser *p, const char *lead, struct span *head)
{
    const char *s = p->pend.data;
    int m = match(s + p->at, p->pend.len - p->at, lead);
    if (m <= 0) return m == 0 ? WAIT : BROKEN;
    size_t from = p->at + strlen(lead);
    for (size_t i = p->look > from ? p->look : from; i < p->pend.len; i++) {
        if (s[i] == '\n') return BROKEN;
        if (s[i] != '"') continue;
        if (i + 1 == p->pend.len) {
            p->look = i;
            return WAIT;
        }
        if (s[i + 1] != '>') continue;
        *head = (struct span){from, i - from};
        p->at = p->look = i + 2;
        return GO;
    }
    p->look = p->pend.len;
    return WAIT;
}

static enum step read_name(struct text_chat_parser *p)
{
    enum step st = read_head(p, " name=\"", &p->name);
    if (st != GO) return st;
    if (p->name.len == 0 || memchr(p->pend.data + p->name.off, '"', p->name.len)) return BROKEN;
    p->part = PARAM;
    return GO;
}

static enum step read_key(struct text_chat_parser *p)
{
    static const char is_string[] = "\" string=\"true", is_json_value[] = "\" string=\"false";
    struct span head;
    enum step st = read_head(p, " name=\"", &head);
    if (st != GO) return st;
    const char *end = p->pend.data + head.off + head.len;
    size_t yes = sizeof is_string - 1, no = sizeof is_json_value - 1;
    bool string = head.len >= yes && memcmp(end - yes, is_string, yes) == 0;
    if (!string && (head.len < no || memcmp(end - no, is_json_value, no) != 0)) return BROKEN;
    if (!add_param(p)) return BROKEN;
    struct param *a = &p->params[p->n_params - 1];
    a->string = string;
    a->key = (struct span){head.off, head.len - (string ? yes : no)};
    if (memchr(p->pend.data + a->key.off, '"', a->key.len)) return BROKEN;
    p->part = VALUE;
    return GO;
}

static enum step read_value(struct text_chat_parser *p)
{
    static const char bar[] = TEXT_DSML;
    const char *s = p->pend.data;
    size_t n = sizeof bar - 1;
    const char *hit = memmem(s + p->look, p->pend.len - p->look, bar, n);
    if (!hit) {
        if (p->pend.len - p->look > n) p->look = p->pend.len - n;
        return WAIT;
    }
    size_t bar_at = (size_t)(hit - s);
    p->look = bar_at;
    if (bar_at < p->at + 2 || memcmp(hit - 2, "</", 2) != 0) return BROKEN;
    int m = match(hit - 2, p->pend.len - (bar_at - 2), CLOSE_PARAM);
    if (m <= 0) return m == 0 ? WAIT : BROKEN;
    p->params[p->n_params - 1].value = (struct span){p->at, bar_at - 2 - p->at};
    p->at = p->look = bar_at - 2 + sizeof CLOSE_PARAM - 1;
    p->part = PARAM;
    return GO;
}

/* Before a tag: either `open`, which leads to `then`, or `close`. */
static enum step read_tag(struct text_chat_parser *p, const char *open, enum part then,
                          const char *close)
{
    while (p->at < p->pend.len && is_blank(p->pend.data[p->at])) p->at++;
    const char *s = p->pend.data + p->at;
    size_t left = p->pend.len - p->at;
    int o = match(s, left, open), c = match(s, left, close);
    if (o > 0) {
        p->at += strlen(open);
        p->look = p->at;
        p->part = then;
        return GO;
    }
    if (c > 0) {
        p->at += strlen(close);
        p->look = p->at;
        return CLOSED;
    }
    return o == 0 || c == 0 ? WAIT : BROKEN;
}

static enum step read_part(struct text_chat_parser *p)
{
    enum step st;
    switch (p->part) {
    case TAG:
        st = read_tag(p, OPEN_INVOKE, NAME, p->closer);
        return st == CLOSED && p->n_done == 0 ? BROKEN : st;
    case NAME: return read_name(p);
    case KEY: return read_key(p);
    case VALUE: return read_value(p);
    case PARAM:
        st = read_tag(p, OPEN_PARAM, KEY, CLOSE_INVOKE);
        if (st != CLOSED) return st;
        if (key_twice(p)) return BROKEN;
        call_ends(p);
        p->part = TAG;
        return p->bare ? CLOSED : GO;
    }
    return BROKEN;
}

static void enter_block(struct text_chat_parser *p, enum mark mark, size_t lead, size_t mark_len)
{
    p->back = p->mode;
    p->mode = BLOCK;
    p->bare = mark == MARK_CALL;
    p->closer =
        mark == MARK_OLD_BLOCK ? "</" TEXT_DSML "function_calls>" : "</" TEXT_DSML "tool_calls>";
    p->part = p->bare ? NAME : TAG;
    p->at = p->look = lead + (p->bare ? sizeof OPEN_INVOKE - 1 : mark_len);
    p->blanks = 0;
}

static void leave_block(struct text_chat_parser *p, enum mode mode)
{
    forget_calls(p);
    p->mode = mode;
    p->blanks = 0;
}

static const char *const why[] = {
    [TAG] = "neither a call nor the end of the block where one should stand",
    [NAME] = "a call without a proper name",
    [PARAM] = "neither a parameter nor the end of the call, or a parameter given twice",
    [KEY] = "a parameter without a proper name and string attribute",
    [VALUE] = "a value without its closing tag",
};

static void break_block(struct text_chat_parser *p, const struct to *to, const char *reason)
{
    give(to, TEXT_EV_MALFORMED, reason, strlen(reason));
    leave_block(p, p->back);
    p->tail = false;
    p->calls = false; /* what follows cannot be trusted to be a call either */
}

static void run_block(struct text_chat_parser *p, const struct to *to)
{
    for (;;) {
        enum step st = read_part(p);
        if (p->no_memory) return;
        if (st == WAIT && p->pend.len > BLOCK_MAX) {
            break_block(p, to, "a block of calls larger than 32 MiB");
            return;
        }
        if (st == WAIT) return;
        if (st == BROKEN) {
            break_block(p, to, why[p->part]);
            return;
        }
        if (st == CLOSED) {
            size_t read = p->at;
            give_calls(p, to);
            leave_block(p, CONTENT);
            tow_buf_shift(&p->pend, read);
            p->tail = true;
            return;
        }
    }
}

/* ---- text ---- */

/* Gives out what is certain; leaves the text state when a block opens. */
static void run_text(struct text_chat_parser *p, const struct to *to)
{
    size_t from = 0, i = p->blanks; /* from..i is certain, but for blanks right before i */
    size_t run = 0;                 /* first of the blanks right before i */
    for (;;) {
        const char *s = p->pend.data;
        size_t len = p->pend.len;
        while (i < len && s[i] != '<' && (!p->calls || !is_blank(s[i]))) run = ++i;
        if (i < len && s[i] != '<') { /* blanks: they may belong to the opening of a block */
            while (i < len && is_blank(s[i])) i++;
            if (i < len && s[i] != '<') {
                run = i;
                continue;
            }
        }
        if (p->tail && run > from) p->tail = false;
        if (i >= len) break;

        size_t mark_len = 0;
        enum mark m = mark_at(p, s + i, len - i, &mark_len);
        if (m == MARK_WAIT) break;
        if (m == MARK_NONE) {
            p->tail = false;
            run = ++i;
            continue;
        }
        if (m >= MARK_BLOCK) {
            give_text(p, to, s + from, run - from);
            tow_buf_shift(&p->pend, run);
            enter_block(p, m, i - run, mark_len);
            return;
        }
        if (!p->tail) give_text(p, to, s + from, i - from); /* else only blanks after a block */
        if (m == MARK_THINK_END) p->mode = CONTENT;
        from = i = run = i + mark_len;
    }
    give_text(p, to, p->pend.data + from, run - from);
    tow_buf_shift(&p->pend, run);
    p->blanks = i - run;
}

static int run(struct text_chat_parser *p, const struct to *to)
{
    if (!p->pend.len) return 0;
    enum mode was;
    bool calls;
    do {
        was = p->mode;
        calls = p->calls;
        if (p->mode == BLOCK)
            run_block(p, to);
        else
            run_text(p, to);
    } while (!p->no_memory && p->pend.len && (was != p->mode || calls != p->calls));
    return p->no_memory || tow_buf_failed(&p->pend) ? TOW_ENOMEM : 0;
}

int text_chat_parser_feed(struct text_chat_parser *p, const char *text, size_t len,
                          text_chat_on_event on_event, void *arg)
{
    const struct to to = {on_event, arg};
    tow_buf_put(&p->pend, text, len);
    if (tow_buf_failed(&p->pend)) return TOW_ENOMEM;
    return run(p, &to);
}

/* A marker of a call, cut: more than the "<" that text may end with. */
static bool is_cut_marker(const struct text_chat_parser *p)
{
    size_t lead = p->blanks;
    return p->calls && match(p->pend.data + lead, p->pend.len - lead, "<｜DSML") >= 0 &&
           p->pend.len - lead > 1;
}

int text_chat_parser_end(struct text_chat_parser *p, bool whole, text_chat_on_event on_event,
                         void *arg)
{
    const struct to to = {on_event, arg};
    if (p->mode == BLOCK && whole) {
        bool complete = p->part == TAG && p->n_done > 0 &&
                        match(p->pend.data + p->at, p->pend.len - p->at, p->closer) == 0;
        if (complete) { /* only the end of the block is missing; nothing of a call is */
            give_calls(p, &to);
            leave_block(p, CONTENT);
            tow_buf_clear(&p->pend);
        } else {
            break_block(p, &to, "the output ended inside a call");
            if (run(p, &to) < 0) return TOW_ENOMEM;
        }
    }
    if (p->pend.len && !whole && (p->mode == BLOCK || is_cut_marker(p))) {
        give(&to, TEXT_EV_CUT, p->pend.data, p->pend.len);
        leave_block(p, p->mode == BLOCK ? p->back : p->mode);
    } else if (p->pend.len && !(p->tail && p->blanks == p->pend.len)) {
        give_text(p, &to, p->pend.data, p->pend.len);
    }
    tow_buf_clear(&p->pend);
    p->blanks = 0;
    return p->no_memory ? TOW_ENOMEM : 0;
}

/* ---- life ---- */

int text_chat_parser_open(struct text_chat_parser **out, enum text_chat_start start, bool calls,
                          const struct json *tools, struct tow_err *err)
{
    struct text_chat_parser *p = calloc(1, sizeof *p);
    if (!p) return tow_fail(err, TOW_ENOMEM, "chat: out of memory");
    p->mode = start == TEXT_START_REASONING ? REASONING : CONTENT;
    p->calls = calls;
    p->tools = tools;
    tow_buf_init(&p->pend, 0);
    tow_buf_init(&p->out, 0);
    *out = p;
    return 0;
}

static void no_event(void *arg, const struct text_chat_event *ev)
{
    (void)arg;
    (void)ev;
}

int text_chat_parser_new(struct text_chat_parser **out, const struct text_chat_prompt *prompt,
                         const struct json *tools, struct tow_err *err)
{
    struct text_chat_parser *p = NULL;
    int rc = text_chat_parser_open(&p, prompt->start, prompt->calls, tools, err);
    if (rc < 0) return rc;
    /* Forced text is the opening of a block, which gives no event. */
    rc = text_chat_parser_feed(p, prompt->forced.data, prompt->forced.len, no_event, NULL);
    if (rc < 0) {
        text_chat_parser_free(p);
        return tow_fail(err, rc, "chat: out of memory");
    }
    *out = p;
    return 0;
}

void text_chat_parser_free(struct text_chat_parser *p)
{
    if (!p) return;
    forget_calls(p);
    tow_buf_fini(&p->pend);
    tow_buf_fini(&p->out);
    free(p->params);
    free(p->done);
    free(p);
}

bool text_chat_parser_reasoning(const struct text_chat_parser *p)
{
    return p->mode == REASONING || (p->mode == BLOCK && p->back == REASONING);
}

uint32_t text_chat_parser_n_calls(const struct text_chat_parser *p)
{
    return p->n_calls;
}

/* ---- whole messages ---- */

void text_chat_message_init(struct text_chat_message *m)
{
    memset(m, 0, sizeof *m);
    tow_buf_init(&m->reasoning, 0);
    tow_buf_init(&m->content, 0);
}

void text_chat_message_fini(struct text_chat_message *m)
{
    tow_buf_fini(&m->reasoning);
    tow_buf_fini(&m->content);
    for (uint32_t i = 0; i < m->n_calls; i++) {
        tow_buf_fini(&m->calls[i].name);
        tow_buf_fini(&m->calls[i].arguments);
    }
    free(m->calls);
    text_chat_message_init(m);
}

static struct text_chat_call *add_call(struct text_chat_message *m)
{
    if (m->n_calls == m->calls_cap) {
        uint32_t cap = m->calls_cap ? m->calls_cap * 2 : 4;
        struct text_chat_call *c = realloc(m->calls, cap * sizeof *c);
        if (!c) {
            m->failed = true;
            return NULL;
        }
        m->calls = c;
        m->calls_cap = cap;
    }
    struct text_chat_call *c = &m->calls[m->n_calls++];
    tow_buf_init(&c->name, 0);
    tow_buf_init(&c->arguments, 0);
    return c;
}

void text_chat_message_add(void *arg, const struct text_chat_event *ev)
{
    struct text_chat_message *m = arg;
    struct text_chat_call *c;
    switch (ev->kind) {
    case TEXT_EV_REASONING: tow_buf_put(&m->reasoning, ev->text, ev->len); break;
    case TEXT_EV_CONTENT: tow_buf_put(&m->content, ev->text, ev->len); break;
    case TEXT_EV_CALL:
        c = m->failed ? NULL : add_call(m);
        if (c) tow_buf_put(&c->name, ev->name, ev->name_len);
        break;
    case TEXT_EV_ARGUMENTS:
        if (!m->failed && m->n_calls)
            tow_buf_put(&m->calls[m->n_calls - 1].arguments, ev->text, ev->len);
        break;
    case TEXT_EV_MALFORMED:
    case TEXT_EV_CUT: break;
    }
    m->failed |= tow_buf_failed(&m->reasoning) || tow_buf_failed(&m->content);
}
