/* router/output.c - see output.h.
 *
 *   id --text_detok--> characters --text_chat_parser--> reasoning, calls
 *                                          +--> content --rtr_stop--> content that is certain
 *
 * Special tokens are not shown, but for the three that a reader of the text needs: <think>,
 * </think> and the mark of tool calls. In a chat the parser takes them away.
 * Stop strings are looked for in the content alone: a stop of "\n\n" must not end a thought, nor a
 * call in the middle of its arguments.
 */
#include "router/output.h"

#include "common/base/clock.h"
#include "common/text/chat.h"
#include "common/text/detok.h"
#include "router/api_request.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct rtr_output {
    const struct text_tokenizer *tok; /* borrowed */
    const struct rtr_ask *ask;        /* borrowed */
    struct text_detok detok;
    struct text_chat_parser *parser; /* owned; NULL for a completion */
    struct rtr_stop *stop;           /* owned */
    struct tow_buf text;             /* characters of one token */
    struct tow_buf content, reasoning;
    struct rtr_call *calls; /* owned */
    uint32_t n_calls, calls_cap, calls_taken;
    struct rtr_scored *scored; /* owned; those not yet taken */
    uint32_t n_scored, scored_cap;
    uint32_t n_chars; /* of the text, echo included */
    uint32_t n_tokens, n_reasoning, n_cached;
    text_id shown[3];
    enum rtr_answer_end end;
    bool stopped; /* by a stop string or by a call that is the last */
    bool cut;     /* the end of the output cut off a call */
    bool failed;
};

static uint32_t count_chars(const char *s, size_t n)
{
    uint32_t chars = 0;
    for (size_t i = 0; i < n; i++) chars += ((unsigned char)s[i] & 0xc0) != 0x80;
    return chars;
}

struct rtr_output *rtr_output_new(const struct text_tokenizer *tok, const struct rtr_ask *ask,
                                  uint32_t choice)
{
    static const char *const shown[3] = {"<think>", "</think>", TEXT_DSML};
    struct rtr_output *o = calloc(1, sizeof *o);
    if (!o) return NULL;
    o->tok = tok;
    o->ask = ask;
    tow_buf_init(&o->text, 0);
    tow_buf_init(&o->content, 0);
    tow_buf_init(&o->reasoning, 0);
    for (int i = 0; i < 3; i++) {
        if (text_tokenizer_find(tok, shown[i], &o->shown[i], NULL) < 0) o->shown[i] = -1;
    }
    const struct rtr_choice *c = &ask->req.choices[choice];
    text_detok_init(&o->detok, tok, false);
    text_detok_prompt(&o->detok, c->prompt, c->n_prompt);
    o->stop = rtr_stop_new(ask->stops, ask->n_stops);
    if (!o->stop) goto free_output;
    if (ask->route == RTR_CHAT &&
        text_chat_parser_new(&o->parser, &ask->chat, ask->tools, NULL) < 0) {
        goto free_output;
    }
    if (ask->echo) {
        uint32_t p = choice / ask->n;
        o->n_chars = count_chars(ask->echo[p], ask->echo_len[p]);
    }
    return o;

free_output:
    rtr_output_free(o);
    return NULL;
}

void rtr_output_free(struct rtr_output *o)
{
    if (!o) return;
    text_chat_parser_free(o->parser);
    rtr_stop_free(o->stop);
    tow_buf_fini(&o->text);
    tow_buf_fini(&o->content);
    tow_buf_fini(&o->reasoning);
    for (uint32_t i = 0; i < o->n_calls; i++) {
        free(o->calls[i].name);
        free(o->calls[i].arguments);
    }
    free(o->calls);
    free(o->scored);
    free(o);
}

static void add_call(struct rtr_output *o, const char *name, size_t len)
{
    struct rtr_call *calls = tow_grow(o->calls, o->n_calls, &o->calls_cap, 4, sizeof *calls);
    char *copy = strndup(name, len);
    if (calls) o->calls = calls;
    if (!calls || !copy) {
        free(copy);
        o->failed = true;
        return;
    }
    struct rtr_call *call = &o->calls[o->n_calls++];
    memset(call, 0, sizeof *call);
    snprintf(call->id, sizeof call->id, "call_%016" PRIx64 "%08" PRIx32, tow_random_u64(),
             (uint32_t)tow_random_u64());
    call->name = copy;
}

static void add_content(struct rtr_output *o, const char *text, size_t len)
{
    if (!rtr_stop_push(o->stop, text, len, &o->content)) return;
    o->stopped = true;
    o->end = o->n_calls ? RTR_END_TOOL_CALLS : RTR_END_STOP;
}

static void on_event(void *arg, const struct text_chat_event *ev)
{
    struct rtr_output *o = arg;
    if (o->stopped || o->failed) return;
    switch (ev->kind) {
    case TEXT_EV_REASONING: tow_buf_put(&o->reasoning, ev->text, ev->len); break;
    case TEXT_EV_CONTENT: add_content(o, ev->text, ev->len); break;
    case TEXT_EV_CALL: add_call(o, ev->name, ev->name_len); break;
    case TEXT_EV_ARGUMENTS:
        o->calls[o->n_calls - 1].arguments = strndup(ev->text, ev->len);
        if (!o->calls[o->n_calls - 1].arguments) o->failed = true;
        if (!o->ask->parallel_tool_calls) {
            o->stopped = true;
            o->end = RTR_END_TOOL_CALLS;
        }
        break;
    case TEXT_EV_CUT: o->cut = true; break;
    case TEXT_EV_MALFORMED: break; /* its raw text follows */
    }
}

/* Hands on the characters in o->text. */
static void feed(struct rtr_output *o)
{
    if (tow_buf_failed(&o->text)) o->failed = true;
    if (o->failed || !o->text.len) return;
    o->n_chars += count_chars(o->text.data, o->text.len);
    if (!o->parser) {
        add_content(o, o->text.data, o->text.len);
    } else if (text_chat_parser_feed(o->parser, o->text.data, o->text.len, on_event, o) < 0) {
        o->failed = true;
    }
    tow_buf_clear(&o->text);
}

static bool is_hidden(const struct rtr_output *o, text_id id)
{
    if (!text_tokenizer_is_special(o->tok, id)) return false;
    return id != o->shown[0] && id != o->shown[1] && id != o->shown[2];
}

static void add_scored(struct rtr_output *o, const struct rtr_tokens *t, uint32_t i)
{
    struct rtr_scored *items = tow_grow(o->scored, o->n_scored, &o->scored_cap, 4, sizeof *items);
    if (!items) {
        o->failed = true;
        return;
    }
    o->scored = items;
    struct rtr_scored *s = &o->scored[o->n_scored++];
    uint32_t n_top = t->top ? t->n_top : 0, want = o->ask->req.sampling.n_top;
    s->id = t->ids[i];
    s->logprob = t->logprobs ? t->logprobs[i] : -1.0f / 0.0f;
    s->text_offset = o->n_chars;
    s->n_top = n_top < want ? n_top : want;
    for (uint32_t k = 0; k < s->n_top; k++) s->top[k] = t->top[(size_t)i * t->n_top + k];
}

bool rtr_output_push(struct rtr_output *o, const struct rtr_tokens *t)
{
    o->n_cached = t->n_cached;
    for (uint32_t i = 0; i < t->n && !o->stopped && !o->failed; i++) {
        o->n_tokens++;
        if (o->parser && text_chat_parser_reasoning(o->parser)) o->n_reasoning++;
        if (o->ask->req.sampling.want_logprobs) add_scored(o, t, i);
        if (is_hidden(o, t->ids[i])) continue;
        text_detok_push(&o->detok, t->ids[i], &o->text);
        feed(o);
    }
    return o->stopped;
}

void rtr_output_finish(struct rtr_output *o, enum rtr_finish reason)
{
    if (o->stopped) return;
    /* An unfinished character at the end is the end of whatever text comes last; it must not make a
     * call that was cut off look like a broken one. */
    bool reasoning = o->parser && text_chat_parser_reasoning(o->parser);
    if (o->parser && text_chat_parser_end(o->parser, reason == RTR_FINISH_STOP, on_event, o) < 0) {
        o->failed = true;
    }
    text_detok_end(&o->detok, &o->text);
    if (tow_buf_failed(&o->text)) o->failed = true;
    if (o->text.len && !o->cut && !o->stopped && !o->failed) {
        if (reasoning) {
            tow_buf_put(&o->reasoning, o->text.data, o->text.len);
        } else {
            add_content(o, o->text.data, o->text.len);
        }
    }
    if (o->stopped) return;
    bool found = rtr_stop_end(o->stop, &o->content);
    o->end = found                         ? RTR_END_STOP
             : reason == RTR_FINISH_LENGTH ? RTR_END_LENGTH
             : o->n_calls                  ? RTR_END_TOOL_CALLS
                                           : RTR_END_STOP;
}

bool rtr_output_failed(const struct rtr_output *o)
{
    return o->failed || tow_buf_failed(&o->content) || tow_buf_failed(&o->reasoning);
}

enum rtr_answer_end rtr_output_end(const struct rtr_output *o)
{
    return o->end;
}

uint32_t rtr_output_n_tokens(const struct rtr_output *o)
{
    return o->n_tokens;
}

uint32_t rtr_output_n_reasoning(const struct rtr_output *o)
{
    return o->n_reasoning;
}

uint32_t rtr_output_n_cached(const struct rtr_output *o)
{
    return o->n_cached;
}

void rtr_output_peek(const struct rtr_output *o, struct rtr_delta *out)
{
    *out = (struct rtr_delta){
        .content = o->content.data ? o->content.data : "",
        .content_len = o->content.len,
        .reasoning = o->reasoning.data ? o->reasoning.data : "",
        .reasoning_len = o->reasoning.len,
        .calls = o->calls ? o->calls + o->calls_taken : NULL,
        .n_calls = o->n_calls - o->calls_taken,
        .first_call = o->calls_taken,
        .scored = o->scored,
        .n_scored = o->n_scored,
    };
}

void rtr_output_taken(struct rtr_output *o)
{
    tow_buf_clear(&o->content);
    tow_buf_clear(&o->reasoning);
    o->calls_taken = o->n_calls;
    o->n_scored = 0;
}
