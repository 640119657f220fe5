/* text/chat_encode.c - a conversation to the model's prompt; see chat.h and docs/chat.md.
 *
 *   fold()    tool messages become blocks of user turns, neighbouring user messages one turn
 *   sort()    tool results of a turn into the order of the calls they answer
 *   drop()    reasoning and developer messages before the last user turn go
 *   render()  what is left, as control and plain segments
 *
 * Messages stay where they are in the JSON tree; the steps work on small records beside it, in an
 * arena that lives for the call. All steps are linear in the messages but for sorting. A template
 * engine was rejected: the rules do not fit one, and the release has none.
 */
#include "common/text/chat.h"
#include "common/text/chat_texts.h"

#include "common/base/arena.h"
#include "common/base/err.h"
#include "common/text/json.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define USER      "<｜User｜>"
#define ASSISTANT "<｜Assistant｜>"
#define REMINDER  "<｜latest_reminder｜>"

enum role { SYSTEM, USER_ROLE, ASSISTANT_ROLE, TOOL, REMINDER_ROLE, DEVELOPER };

static const struct {
    const char *name;
    enum role role;
} roles[] = {
    {"system", SYSTEM}, {"user", USER_ROLE},      {"assistant", ASSISTANT_ROLE},
    {"tool", TOOL},     {"developer", DEVELOPER}, {"latest_reminder", REMINDER_ROLE},
};

static const struct {
    const char *name, *token;
} tasks[] = {
    {"action", "<｜action｜>"}, {"query", "<｜query｜>"}, {"authority", "<｜authority｜>"},
    {"domain", "<｜domain｜>"}, {"title", "<｜title｜>"}, {"read_url", "<｜read_url｜>"},
};

/* Text of a message: a string or a list of parts. */
struct text {
    const char *s; /* borrowed from the tree; "" when absent */
    size_t len;
    const struct json *parts; /* or NULL */
};

struct block {
    struct block *next;
    bool result;    /* of a tool; else text */
    const char *id; /* the call's; "" when none */
    size_t at;      /* position of that call, when sorting */
    struct text text;
};

struct msg {
    enum role role;
    struct text content;
    const struct json *src; /* NULL for the system message we put in front */
    const char *list;       /* as enc's, and the place there */
    size_t at;
    const struct json *tools, *format, *calls;
    const char *reasoning; /* NULL when none or dropped */
    size_t reasoning_len;
    struct block *first, *last; /* user turns */
    size_t n_results;
    int task; /* index into tasks, -1 none */
    bool wo_eos;
};

struct msgs {
    struct msg *m; /* in the arena */
    size_t n;
};

struct enc {
    const struct text_chat_options *o;
    struct text_chat_prompt *out;
    struct tow_arena arena;
    struct tow_err *err;
    size_t segs_cap;
    const char *list; /* "messages" or "context", for messages of errors */
    bool drop;        /* drop_thinking is in force */
};

/* Puts a place in front of the message: "role: is wrong" of "messages[2]" becomes
 * "messages[2].role: is wrong", and what begins with no field follows after a colon. */
static int at_place(struct tow_err *err, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
static int at_place(struct tow_err *err, const char *fmt, ...)
{
    char place[80];
    struct tow_err was = *err;
    size_t field = strcspn(was.msg, ": ");
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(place, sizeof place, fmt, ap);
    va_end(ap);
    return tow_fail(err, was.code, "%s%s%s", place, was.msg[field] == ':' ? "." : ": ", was.msg);
}

static int no_memory(struct enc *e)
{
    return tow_fail(e->err, TOW_ENOMEM, "chat: out of memory");
}

/* ---- reading one message ---- */

static int read_text(struct enc *e, const struct json *v, size_t i, const char *field,
                     bool any_parts, struct text *out)
{
    char is[JSON_SHOW_BYTES];
    *out = (struct text){.s = ""};
    if (json_type(v) == JSON_NULL) return 0;
    const char *s = json_string(v, &out->len);
    if (s) {
        out->s = s;
        return 0;
    }
    if (json_type(v) != JSON_ARRAY)
        return tow_fail(e->err, TOW_EINVAL,
                        "%s[%zu].%s: must be a string or a list of content parts, is %s", e->list,
                        i, field, json_show(v, is));
    size_t k = 0;
    JSON_EACH(part, v)
    {
        const char *type, *text;
        int rc = json_get_string(part, "type", NULL, &type, NULL, e->err);
        if (rc == 0) rc = json_get_string(part, "text", "", &text, NULL, e->err);
        if (rc == 0 && json_type(part) != JSON_OBJECT)
            rc = tow_fail(e->err, TOW_EINVAL, "must be an object, is %s", json_show(part, is));
        if (rc == 0 && !type) rc = tow_fail(e->err, TOW_EINVAL, "type: is required but missing");
        if (rc == 0 && strcmp(type, "text") != 0 && !(e->o->as_release && any_parts))
            rc = tow_fail(e->err, TOW_EINVAL, "type: must be \"text\", is %s",
                          json_show_text(type, strlen(type), is));
        if (rc < 0) {
            at_place(e->err, "%s[%zu].%s[%zu]", e->list, i, field, k);
            return rc;
        }
        k++;
    }
    out->parts = v;
    return 0;
}

static bool empty_text(const struct text *t)
{
    return t->len == 0 && !json_first(t->parts);
}

static bool has_elements(const struct json *array)
{
    return json_first(array) != NULL;
}

/* Every call must be {function: {name, arguments}} with strings in it. */
static int check_calls(struct enc *e, const struct json *calls)
{
    size_t k = 0;
    JSON_EACH(call, calls)
    {
        const struct json *f;
        const char *s;
        int rc = json_get_object(call, "function", &f, e->err);
        if (rc == 0 && !f)
            rc = tow_fail(e->err, TOW_EINVAL, "function: is required but missing");
        else if (rc == 0 &&
                 (!json_require(f, "name", e->err) || !json_require(f, "arguments", e->err)))
            rc = at_place(e->err, "function");
        else if (rc == 0 && ((rc = json_get_string(f, "name", "", &s, NULL, e->err)) < 0 ||
                             (rc = json_get_string(f, "arguments", "", &s, NULL, e->err)) < 0 ||
                             (rc = json_get_string(f, "id", "", &s, NULL, e->err)) < 0))
            at_place(e->err, "function");
        if (rc == 0) rc = json_get_string(call, "id", "", &s, NULL, e->err);
        if (rc < 0) {
            at_place(e->err, "tool_calls[%zu]", k);
            return rc;
        }
        k++;
    }
    return 0;
}

static int check_tools(const struct json *tools, struct tow_err *err)
{
    char is[JSON_SHOW_BYTES];
    size_t k = 0;
    JSON_EACH(tool, tools)
    {
        const struct json *f = NULL;
        const char *s = NULL, *type = NULL;
        int rc = json_get_string(tool, "type", "function", &type, NULL, err);
        if (rc == 0 && strcmp(type, "function") != 0)
            rc = tow_fail(err, TOW_EINVAL, "type: must be \"function\", is %s",
                          json_show_text(type, strlen(type), is));
        if (rc == 0) rc = json_get_object(tool, "function", &f, err);
        if (rc == 0 && !f) rc = tow_fail(err, TOW_EINVAL, "function: is required but missing");
        if (rc == 0 && (rc = json_get_string(f, "name", "", &s, NULL, err)) == 0 && !*s)
            rc = tow_fail(err, TOW_EINVAL, "name: must be a string that is not empty, is %s",
                          json_show(json_find(f, "name"), is));
        if (rc == 0 && strpbrk(s, "\"<>\n\r"))
            rc = tow_fail(err, TOW_EINVAL,
                          "name: must hold no quote, angle bracket or line break, is %s",
                          json_show_text(s, strlen(s), is));
        if (rc < 0) {
            at_place(err, "tools[%zu]", k);
            return rc;
        }
        k++;
    }
    return 0;
}

static int read_task(struct enc *e, const struct json *src, int *out)
{
    char is[JSON_SHOW_BYTES];
    const char *name;
    int rc = json_get_string(src, "task", NULL, &name, NULL, e->err);
    *out = -1;
    if (rc < 0 || !name) return rc;
    for (size_t i = 0; i < sizeof tasks / sizeof *tasks; i++)
        if (strcmp(tasks[i].name, name) == 0) {
            *out = (int)i;
            return 0;
        }
    return tow_fail(e->err, TOW_EINVAL,
                    "task: must be action, query, authority, domain, title or read_url, is %s",
                    json_show_text(name, strlen(name), is));
}

static int read_role(struct enc *e, const struct json *src, enum role *out)
{
    char is[JSON_SHOW_BYTES];
    const char *name;
    if (json_type(src) != JSON_OBJECT)
        return tow_fail(e->err, TOW_EINVAL, "must be an object, is %s", json_show(src, is));
    int rc = json_get_string(src, "role", NULL, &name, NULL, e->err);
    if (rc < 0) return rc;
    if (!name) return tow_fail(e->err, TOW_EINVAL, "role: is required but missing");
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strcmp(roles[i].name, name) == 0) {
            *out = roles[i].role;
            return 0;
        }
    return tow_fail(e->err, TOW_EINVAL,
                    "role: must be system, user, assistant, tool, developer or latest_reminder, is "
                    "%s",
                    json_show_text(name, strlen(name), is));
}

static int read_fields(struct enc *e, const struct json *src, struct msg *m)
{
    int rc = read_role(e, src, &m->role);
    if (rc < 0) return rc;
    m->src = src;
    rc = read_task(e, src, &m->task);
    if (rc == 0) rc = json_get_bool(src, "wo_eos", false, &m->wo_eos, e->err);
    if (rc == 0) rc = json_get_array(src, "tools", &m->tools, e->err);
    if (rc == 0) rc = check_tools(m->tools, e->err);
    if (rc == 0) rc = json_get_object(src, "response_format", &m->format, e->err);
    if (rc == 0 && m->role == ASSISTANT_ROLE) {
        rc = json_get_array(src, "tool_calls", &m->calls, e->err);
        if (rc == 0) rc = check_calls(e, m->calls);
        if (rc == 0)
            rc = json_get_string(src, "reasoning_content", NULL, &m->reasoning, &m->reasoning_len,
                                 e->err);
    }
    return rc;
}

/* ---- step 1: tool messages into user turns ---- */

static int add_block(struct enc *e, struct msg *m, bool result, const char *id, struct text text)
{
    struct block *b = tow_arena_alloc(&e->arena, sizeof *b);
    if (!b) return no_memory(e);
    *b = (struct block){.result = result, .id = id, .text = text};
    if (m->last)
        m->last->next = b;
    else
        m->first = b;
    m->last = b;
    m->n_results += result;
    return 0;
}

/* Without content an assistant's message may have calls or reasoning; nobody else's is a message
 * then. The release's encoder takes such for empty. */
static int check_content(struct enc *e, const struct msg *m, size_t i)
{
    char is[JSON_SHOW_BYTES];
    const struct json *v = json_find(m->src, "content");
    const bool assistant = m->role == ASSISTANT_ROLE;
    if (json_type(v) != JSON_NULL || e->o->as_release) return 0;
    if (assistant && (json_first(m->calls) || m->reasoning)) return 0;
    return tow_fail(
        e->err, TOW_EINVAL, "%s[%zu].content: must be a string or a list of content parts%s, is %s",
        e->list, i, assistant ? " where there are no tool_calls" : "", json_show(v, is));
}

static int fold(struct enc *e, const struct json *list, size_t extra, struct msgs *out)
{
    out->n = 0;
    out->m = tow_arena_alloc(&e->arena, (json_size(list) + extra + 1) * sizeof *out->m);
    if (!out->m) return no_memory(e);
    size_t i = 0;
    JSON_EACH(src, list)
    {
        struct msg m = {.list = e->list, .at = i};
        const char *id = "";
        int rc = read_fields(e, src, &m);
        if (rc == 0 && m.role == TOOL)
            rc = json_get_string(src, "tool_call_id", "", &id, NULL, e->err);
        if (rc < 0) {
            at_place(e->err, "%s[%zu]", e->list, i);
            return rc;
        }
        rc = check_content(e, &m, i);
        if (rc < 0) return rc;
        rc = read_text(e, json_find(src, "content"), i, "content", m.role == TOOL, &m.content);
        if (rc == 0 && m.role == DEVELOPER && empty_text(&m.content))
            rc = tow_fail(e->err, TOW_EINVAL,
                          "%s[%zu].content: of a developer message must not be empty", e->list, i);
        if (rc < 0) return rc;
        struct msg *last =
            out->n && out->m[out->n - 1].role == USER_ROLE ? &out->m[out->n - 1] : NULL;
        if (m.role == TOOL || m.role == USER_ROLE) {
            if (!last || (m.role == USER_ROLE && last->task >= 0)) {
                out->m[out->n] = m;
                last = &out->m[out->n++];
                last->role = USER_ROLE;
                last->tools = last->format = NULL; /* a user turn shows none */
                if (m.role == TOOL) last->task = -1;
            }
            rc = add_block(e, last, m.role == TOOL, id, m.content);
            if (rc < 0) return rc;
        } else {
            out->m[out->n++] = m;
        }
        i++;
    }
    return 0;
}

/* ---- step 1b: tool results in the order of the calls ---- */

struct called {
    const char *id;
    size_t at;
};

static int by_id(const void *a, const void *b)
{
    const struct called *x = a, *y = b;
    int c = strcmp(x->id, y->id);
    return c ? c : (x->at > y->at) - (x->at < y->at);
}

/* The position of the last call with this id; 0 when there is none. */
static size_t position(const struct called *order, size_t n, const char *id)
{
    size_t lo = 0, hi = n; /* first entry above id */
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(order[mid].id, id) <= 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo && strcmp(order[lo - 1].id, id) == 0 ? order[lo - 1].at : 0;
}

struct slot {
    struct text text;
    const char *id;
    size_t at, was;
};

static int by_position(const void *a, const void *b)
{
    const struct slot *x = a, *y = b;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->was < y->was ? -1 : 1;
}

static int order_of(struct enc *e, const struct msg *m, struct called **order, size_t *n)
{
    size_t at = 0;
    *n = 0;
    *order = tow_arena_alloc(&e->arena, json_size(m->calls) * sizeof **order);
    if (!*order) return no_memory(e);
    JSON_EACH(call, m->calls)
    {
        const char *id = json_string(json_find(call, "id"), NULL);
        if (!id || !*id) id = json_string(json_find(json_find(call, "function"), "id"), NULL);
        if (id && *id) (*order)[(*n)++] = (struct called){id, at};
        at++;
    }
    qsort(*order, *n, sizeof **order, by_id);
    return 0;
}

static int sort_results(struct enc *e, struct msgs *all)
{
    struct called *order = NULL;
    size_t n_order = 0;
    for (size_t i = 0; i < all->n; i++) {
        struct msg *m = &all->m[i];
        if (m->role == ASSISTANT_ROLE && has_elements(m->calls)) {
            int rc = order_of(e, m, &order, &n_order);
            if (rc < 0) return rc;
        }
        if (m->role != USER_ROLE || m->n_results < 2 || n_order == 0) continue;
        struct slot *slots = tow_arena_alloc(&e->arena, m->n_results * sizeof *slots);
        if (!slots) return no_memory(e);
        size_t n = 0;
        for (struct block *b = m->first; b; b = b->next) {
            if (!b->result) continue;
            slots[n] = (struct slot){b->text, b->id, position(order, n_order, b->id), n};
            n++;
        }
        qsort(slots, n, sizeof *slots, by_position);
        n = 0;
        for (struct block *b = m->first; b; b = b->next) {
            if (!b->result) continue;
            b->text = slots[n].text;
            b->id = slots[n++].id;
        }
    }
    return 0;
}

/* ---- step 2: what of earlier turns stays ---- */

static size_t last_user(const struct msgs *l, bool *any)
{
    size_t at = 0;
    *any = false;
    for (size_t i = 0; i < l->n; i++)
        if (l->m[i].role == USER_ROLE || l->m[i].role == DEVELOPER) {
            at = i;
            *any = true;
        }
    return at;
}

/* Counts what drop_old() would leave of the first n messages taken alone. */
static size_t kept_alone(const struct msgs *l, size_t n)
{
    struct msgs head = {l->m, n};
    bool any;
    size_t last = last_user(&head, &any), kept = 0;
    for (size_t i = 0; i < n; i++) kept += !any || i >= last || l->m[i].role != DEVELOPER;
    return kept;
}

static void drop_old(struct msgs *l)
{
    bool any;
    size_t last = last_user(l, &any), kept = 0;
    for (size_t i = 0; i < l->n; i++) {
        struct msg m = l->m[i];
        if (any && i < last) {
            if (m.role == DEVELOPER) continue;
            m.reasoning = NULL;
        }
        l->m[kept++] = m;
    }
    l->n = kept;
}

/* ---- step 3: writing ---- */

/* What follows is control text or plain text until the next call. */
static void kind(struct enc *e, bool control)
{
    struct text_chat_prompt *p = e->out;
    size_t at = p->text.len;
    if (p->n_segs) {
        struct text_segment *s = &p->segs[p->n_segs - 1];
        if (s->allow_special == control) return;
        if (s->len == at) { /* nothing was written in it */
            s->allow_special = control;
            if (p->n_segs > 1 && s[-1].allow_special == control) p->n_segs--;
            return;
        }
    }
    if (p->n_segs == e->segs_cap) {
        size_t cap = e->segs_cap ? e->segs_cap * 2 : 16;
        struct text_segment *s = realloc(p->segs, cap * sizeof *s);
        if (!s) {
            p->text.failed = true;
            return;
        }
        p->segs = s;
        e->segs_cap = cap;
    }
    p->segs[p->n_segs++] = (struct text_segment){.len = at, .allow_special = control};
}

/* While writing, len of a segment holds its first byte's place; here it gets its meaning. */
static void close_segments(struct text_chat_prompt *p)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n_segs; i++) {
        size_t from = p->segs[i].len, to = i + 1 < p->n_segs ? p->segs[i + 1].len : p->text.len;
        if (from == to) continue;
        p->segs[n++] =
            (struct text_segment){p->text.data + from, to - from, p->segs[i].allow_special};
    }
    p->n_segs = n;
}

static void control(struct enc *e, const char *s)
{
    kind(e, true);
    tow_buf_puts(&e->out->text, s);
}

static void plain(struct enc *e, const char *s, size_t len)
{
    if (!len) return;
    kind(e, false);
    tow_buf_put(&e->out->text, s, len);
}

static void plain_json(struct enc *e, const struct json *v)
{
    kind(e, false);
    json_dump(&e->out->text, v);
}

static void write_text(struct enc *e, const struct text *t)
{
    if (!t->parts) {
        plain(e, t->s, t->len);
        return;
    }
    const char *sep = "";
    JSON_EACH(part, t->parts)
    {
        size_t len = 0;
        const char *type = json_string(json_find(part, "type"), NULL);
        const char *s = json_string(json_find(part, "text"), &len);
        control(e, sep);
        sep = "\n\n";
        if (strcmp(type, "text") == 0) {
            plain(e, s ? s : "", len);
        } else {
            control(e, "[Unsupported ");
            plain(e, type, strlen(type));
            control(e, "]");
        }
    }
}

static void write_tools(struct enc *e, const struct msg *m)
{
    if (has_elements(m->tools)) {
        const char *sep = "";
        control(e, "\n\n");
        control(e, text_chat_tools_head);
        JSON_EACH(tool, m->tools)
        {
            control(e, sep);
            sep = "\n";
            plain_json(e, json_find(tool, "function"));
        }
        control(e, text_chat_tools_tail);
    }
    if (m->format && json_first(m->format)) {
        control(e, "\n\n");
        control(e, text_chat_format_head);
        plain_json(e, m->format);
    }
}

static void write_user(struct enc *e, const struct msg *m)
{
    control(e, USER);
    for (const struct block *b = m->first; b; b = b->next) {
        if (b != m->first) control(e, "\n\n");
        if (b->result) control(e, "<tool_result>");
        write_text(e, &b->text);
        if (b->result) control(e, "</tool_result>");
    }
}

static void write_parameter(struct enc *e, const char *key, const char *s, size_t len,
                            const struct json *value)
{
    control(e, "<" TEXT_DSML "parameter name=\"");
    plain(e, key, strlen(key));
    control(e, s ? "\" string=\"true\">" : "\" string=\"false\">");
    if (s)
        plain(e, s, len);
    else
        plain_json(e, value);
    control(e, "</" TEXT_DSML "parameter>");
}

static int write_call(struct enc *e, const struct json *call)
{
    const struct json *f = json_find(call, "function");
    size_t name_len, len;
    const char *name = json_string(json_find(f, "name"), &name_len);
    const char *text = json_string(json_find(f, "arguments"), &len);
    struct json *args = NULL;
    char is[JSON_SHOW_BYTES];
    control(e, "<" TEXT_DSML "invoke name=\"");
    plain(e, name, name_len);
    control(e, "\">\n");
    int rc = json_parse(&args, text, len, NULL, NULL);
    if (rc == TOW_ENOMEM) return no_memory(e);
    if (rc < 0) {
        write_parameter(e, "arguments", text, len, NULL);
    } else if (json_type(args) != JSON_OBJECT) {
        rc = tow_fail(e->err, TOW_EINVAL, "must be a JSON object in a string, is %s",
                      json_show(args, is));
        json_free(args);
        return rc;
    } else {
        const char *sep = "";
        JSON_EACH(arg, args)
        {
            size_t n = 0;
            const char *s = json_string(arg, &n);
            control(e, sep);
            sep = "\n";
            write_parameter(e, json_key(arg), s, n, arg);
        }
    }
    json_free(args);
    control(e, "\n</" TEXT_DSML "invoke>");
    return 0;
}

static int write_assistant(struct enc *e, const struct msg *m, bool thinks)
{
    if (thinks) {
        plain(e, m->reasoning ? m->reasoning : "", m->reasoning ? m->reasoning_len : 0);
        control(e, "</think>");
    }
    write_text(e, &m->content);
    if (has_elements(m->calls)) {
        size_t k = 0;
        control(e, "\n\n<" TEXT_DSML "tool_calls>\n");
        JSON_EACH(call, m->calls)
        {
            if (k) control(e, "\n");
            int rc = write_call(e, call);
            if (rc < 0) {
                if (rc == TOW_EINVAL)
                    at_place(e->err, "%s[%zu].tool_calls[%zu].function.arguments", m->list, m->at,
                             k);
                return rc;
            }
            k++;
        }
        control(e, "\n</" TEXT_DSML "tool_calls>");
    }
    if (!m->wo_eos) control(e, TEXT_EOS);
    return 0;
}

/* What stands between this message and the next turn. */
static void write_lead(struct enc *e, const struct msgs *l, size_t i, size_t last)
{
    const struct msg *m = &l->m[i];
    if (i + 1 < l->n && l->m[i + 1].role != ASSISTANT_ROLE && l->m[i + 1].role != REMINDER_ROLE)
        return;
    const char *open = "</think>";
    if (m->task >= 0) {
        if (m->task == 0) {
            control(e, ASSISTANT);
            control(e, e->o->thinking ? "<think>" : open);
        }
        control(e, tasks[m->task].token);
    } else if (m->role == USER_ROLE || m->role == DEVELOPER) {
        if (e->o->thinking && (!e->drop || i >= last)) open = "<think>";
        control(e, ASSISTANT);
        control(e, open);
    }
    if (i + 1 == l->n && open[1] == 't' && m->task < 0) e->out->start = TEXT_START_REASONING;
}

static int render(struct enc *e, const struct msgs *l, size_t from)
{
    bool any;
    size_t last = last_user(l, &any);
    for (size_t i = from; i < l->n; i++) {
        const struct msg *m = &l->m[i];
        int rc = 0;
        if (i == 0 && e->o->thinking && e->o->effort == TEXT_EFFORT_MAX)
            control(e, text_chat_effort_max);
        switch (m->role) {
        case DEVELOPER: control(e, USER); /* fall through */
        case SYSTEM:
            write_text(e, &m->content);
            write_tools(e, m);
            break;
        case USER_ROLE: write_user(e, m); break;
        case REMINDER_ROLE:
            control(e, REMINDER);
            write_text(e, &m->content);
            break;
        case ASSISTANT_ROLE: {
            bool after_task = i > 0 && l->m[i - 1].task >= 0;
            rc = write_assistant(e, m,
                                 e->o->thinking && !after_task && (!e->drop || !any || i > last));
            break;
        }
        case TOOL: tow_assert(!"folded away"); break;
        }
        if (rc < 0) return rc;
        write_lead(e, l, i, any ? last : 0);
    }
    return 0;
}

/* ---- the request's own tools and format ---- */

static bool is_format_text(const struct json *format)
{
    const char *type = json_string(json_find(format, "type"), NULL);
    return type && strcmp(type, "text") == 0;
}

static int check_tool_choice(struct enc *e)
{
    const struct text_chat_options *o = e->o;
    char is[JSON_SHOW_BYTES];
    if (o->tool_choice != TEXT_TOOL_REQUIRED && o->tool_choice != TEXT_TOOL_NAMED) return 0;
    if (!has_elements(o->tools))
        return tow_fail(e->err, TOW_EINVAL,
                        "tool_choice: asks for a call, but tools is missing or empty");
    if (o->tool_choice == TEXT_TOOL_REQUIRED) return 0;
    JSON_EACH(tool, o->tools)
    {
        const char *name = json_string(json_find(json_find(tool, "function"), "name"), NULL);
        if (name && strcmp(name, o->tool_name) == 0) return 0;
    }
    return tow_fail(e->err, TOW_EINVAL,
                    "tool_choice.function.name: must be one of the tools, is %s",
                    json_show_text(o->tool_name, strlen(o->tool_name), is));
}

/* Puts tools and response_format of the request onto the first message; see chat.h. */
static int place_request(struct enc *e, struct msgs *l)
{
    const struct text_chat_options *o = e->o;
    const struct json *tools = o->tool_choice == TEXT_TOOL_NONE ? NULL : o->tools;
    const struct json *format = is_format_text(o->response_format) ? NULL : o->response_format;
    if (json_type(o->tools) != JSON_NULL && json_type(o->tools) != JSON_ARRAY)
        return tow_fail(e->err, TOW_EINVAL, "tools: must be an array, is %s",
                        json_type_name(o->tools));
    if (json_type(o->response_format) != JSON_NULL && json_type(o->response_format) != JSON_OBJECT)
        return tow_fail(e->err, TOW_EINVAL, "response_format: must be an object, is %s",
                        json_type_name(o->response_format));
    int rc = check_tools(o->tools, e->err);
    if (rc == 0) rc = check_tool_choice(e);
    if (rc < 0) return rc;
    if (!has_elements(tools)) tools = NULL;
    if (!json_first(format)) format = NULL;
    if (!tools && !format) return 0;
    if (!l->n || (l->m[0].role != SYSTEM && l->m[0].role != DEVELOPER)) {
        memmove(l->m + 1, l->m, l->n * sizeof *l->m);
        l->m[0] = (struct msg){.role = SYSTEM, .content = {.s = ""}, .task = -1};
        l->n++;
    }
    struct msg *m = &l->m[0];
    if (tools && has_elements(m->tools))
        return tow_fail(e->err, TOW_EINVAL, "tools: given in the request and in messages[0].tools");
    if (format && json_first(m->format))
        return tow_fail(e->err, TOW_EINVAL,
                        "response_format: given in the request and in messages[0].response_format");
    if (tools) m->tools = tools;
    if (format) m->format = format;
    return 0;
}

/* Opens the answer with a call. In thinking mode the reasoning of this turn is closed, empty. */
static void force_call(struct enc *e)
{
    struct tow_buf *f = &e->out->forced;
    if (e->o->tool_choice != TEXT_TOOL_REQUIRED && e->o->tool_choice != TEXT_TOOL_NAMED) return;
    if (e->out->start == TEXT_START_REASONING) {
        control(e, "</think>");
        e->out->start = TEXT_START_CONTENT;
    }
    size_t from = e->out->text.len;
    control(e, "\n\n<" TEXT_DSML "tool_calls>\n<" TEXT_DSML "invoke");
    if (e->o->tool_choice == TEXT_TOOL_NAMED) {
        control(e, " name=\"");
        plain(e, e->o->tool_name, strlen(e->o->tool_name));
        control(e, "\">\n");
    }
    if (tow_buf_failed(&e->out->text)) return;
    tow_buf_put(f, e->out->text.data + from, e->out->text.len - from);
}

static bool calls_expected(const struct enc *e, const struct msgs *l)
{
    if (e->o->tool_choice == TEXT_TOOL_NONE) return false;
    for (size_t i = 0; i < l->n; i++)
        if (has_elements(l->m[i].tools)) return true;
    return false;
}

static int encode(struct enc *e, const struct json *messages)
{
    struct msgs context, all;
    e->list = "context";
    if (json_type(e->o->context) != JSON_NULL && json_type(e->o->context) != JSON_ARRAY)
        return tow_fail(e->err, TOW_EINVAL, "context: must be an array, is %s",
                        json_type_name(e->o->context));
    int rc = fold(e, e->o->context, 0, &context);
    if (rc < 0) return rc;
    e->list = "messages";
    if (json_type(messages) != JSON_ARRAY)
        return tow_fail(e->err, TOW_EINVAL, "messages: must be an array, is %s",
                        json_type_name(messages));
    rc = fold(e, messages, context.n + 1, &all);
    if (rc == 0) rc = place_request(e, &all);
    if (rc < 0) return rc;
    memmove(all.m + context.n, all.m, all.n * sizeof *all.m);
    memcpy(all.m, context.m, context.n * sizeof *all.m);
    all.n += context.n;
    rc = sort_results(e, &all);
    if (rc < 0) return rc;

    size_t rendered = context.n;
    e->drop = !e->o->keep_thinking;
    for (size_t i = 0; i < all.n; i++)
        if (has_elements(all.m[i].tools)) e->drop = false;
    e->out->calls = calls_expected(e, &all);
    if (e->o->thinking && e->drop) {
        rendered = kept_alone(&all, context.n);
        drop_old(&all);
    }
    if (!e->o->no_bos && context.n == 0) control(e, TEXT_BOS);
    rc = render(e, &all, rendered);
    if (rc < 0) return rc;
    force_call(e);
    if (tow_buf_failed(&e->out->text) || tow_buf_failed(&e->out->forced)) return no_memory(e);
    close_segments(e->out);
    return 0;
}

int text_chat_encode(struct text_chat_prompt *out, const struct json *messages,
                     const struct text_chat_options *o, struct tow_err *err)
{
    struct enc e = {.o = o, .out = out, .err = err};
    memset(out, 0, sizeof *out);
    tow_buf_init(&out->text, TEXT_MAX_TEXT);
    tow_buf_init(&out->forced, 0);
    tow_arena_init(&e.arena, 0);
    int rc = encode(&e, messages);
    tow_arena_fini(&e.arena);
    if (rc < 0) out->n_segs = 0;
    return rc;
}

void text_chat_prompt_fini(struct text_chat_prompt *p)
{
    tow_buf_fini(&p->text);
    tow_buf_fini(&p->forced);
    free(p->segs);
    p->segs = NULL;
    p->n_segs = 0;
}

/* ---- options ---- */

int text_chat_set_effort(struct text_chat_options *o, const char *name, struct tow_err *err)
{
    static const char *const weaker[] = {"none", "minimal", "low", "medium"};
    char is[JSON_SHOW_BYTES];
    o->effort = TEXT_EFFORT_NONE;
    if (!name) return 0;
    for (size_t i = 0; !o->as_release && i < sizeof weaker / sizeof *weaker; i++)
        if (strcmp(name, weaker[i]) == 0) return 0;
    if (strcmp(name, "high") == 0)
        o->effort = TEXT_EFFORT_HIGH;
    else if (strcmp(name, "max") == 0)
        o->effort = TEXT_EFFORT_MAX;
    else
        return tow_fail(err, TOW_EINVAL, "reasoning_effort: must be %s\"high\" or \"max\", is %s",
                        o->as_release ? "" : "\"none\", \"minimal\", \"low\", \"medium\", ",
                        json_show_text(name, strlen(name), is));
    return 0;
}

int text_chat_set_tool_choice(struct text_chat_options *o, const struct json *value,
                              struct tow_err *err)
{
    static const struct {
        const char *name;
        enum text_tool_choice choice;
    } words[] = {
        {"auto", TEXT_TOOL_AUTO}, {"none", TEXT_TOOL_NONE}, {"required", TEXT_TOOL_REQUIRED}};
    const char *word = json_string(value, NULL), *type = NULL, *name = NULL;
    char is[JSON_SHOW_BYTES], inner[JSON_SHOW_BYTES];
    o->tool_name = NULL;
    o->tool_choice = TEXT_TOOL_AUTO;
    if (json_type(value) == JSON_NULL) return 0;
    for (size_t i = 0; word && i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i].name) == 0) {
            o->tool_choice = words[i].choice;
            return 0;
        }
    type = json_string(json_find(value, "type"), NULL);
    name = json_string(json_find(json_find(value, "function"), "name"), NULL);
    if (!type || strcmp(type, "function") != 0 || !name || !*name) {
        const bool object = json_type(value) == JSON_OBJECT;
        const struct json *inside = json_find(json_find(value, "function"), "name");
        json_show(object ? json_find(value, "type") : value, is);
        return tow_fail(err, TOW_EINVAL,
                        "tool_choice: must be \"none\", \"auto\", \"required\" or {\"type\": "
                        "\"function\", \"function\": {\"name\": ...}}, is %s%s%s%s",
                        object ? "an object with type " : "", is,
                        object ? " and function.name " : "",
                        object ? json_show(inside, inner) : "");
    }
    o->tool_choice = TEXT_TOOL_NAMED;
    o->tool_name = name;
    return 0;
}
