/* router/api_response.c - see api_response.h. Whole bodies, and the pieces that chunks share. */
#include "router/api_response.h"

#include "common/base/buf.h"
#include "common/text/json.h"
#include "common/text/tokenizer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static void put_str(struct tow_buf *b, const char *s)
{
    json_put_string(b, s, strlen(s));
}

void rtr_put_error(struct tow_buf *b, const struct rtr_api_error *e)
{
    tow_buf_puts(b, "{\"error\": {\"message\": ");
    put_str(b, e->message);
    tow_buf_puts(b, ", \"type\": ");
    put_str(b, e->type);
    tow_buf_puts(b, ", \"param\": ");
    if (e->param[0]) {
        put_str(b, e->param);
    } else {
        tow_buf_puts(b, "null");
    }
    tow_buf_puts(b, ", \"code\": ");
    put_str(b, e->code);
    tow_buf_puts(b, "}}");
}

void rtr_error_of(struct rtr_api_error *e, const struct rtr_refusal *r)
{
    int status = r->http ? r->http : tow_err_http(r->err.code);
    if (status < 400 || status == 499) status = 500;
    rtr_api_fail(e, status, r->reason ? r->reason : tow_err_name(r->err.code), r->param, "%s",
                 r->err.msg[0] ? r->err.msg : tow_err_text(r->err.code));
}

const char *rtr_finish_name(enum rtr_answer_end end)
{
    switch (end) {
    case RTR_END_STOP: return "stop";
    case RTR_END_LENGTH: return "length";
    case RTR_END_TOOL_CALLS: return "tool_calls";
    case RTR_END_NONE: break;
    }
    return NULL;
}

static void put_number(struct tow_buf *b, float logprob)
{
    json_put_double(b, isfinite(logprob) ? (double)logprob : RTR_LOGPROB_FLOOR);
}

static bool is_utf8(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n;) {
        int k = json_utf8_len((const char *)p + i, n - i);
        if (!k) return false;
        i += (size_t)k;
    }
    return true;
}

/* A token by name: its text, or "bytes:\xE2\x82" when it is no whole characters. */
static void put_token(struct tow_buf *b, const struct text_tokenizer *tok, text_id id)
{
    size_t n;
    const uint8_t *p = text_tokenizer_peek(tok, id, &n);
    if (is_utf8(p, n)) {
        json_put_string(b, p ? (const char *)p : "", n);
        return;
    }
    tow_buf_puts(b, "\"bytes:");
    for (size_t i = 0; i < n; i++) tow_buf_printf(b, "\\\\x%02x", p[i]);
    tow_buf_putc(b, '"');
}

static void put_chat_token(struct tow_buf *b, const struct text_tokenizer *tok, text_id id,
                           float logprob)
{
    size_t n;
    const uint8_t *p = text_tokenizer_peek(tok, id, &n);
    tow_buf_puts(b, "{\"token\": ");
    put_token(b, tok, id);
    tow_buf_puts(b, ", \"logprob\": ");
    put_number(b, logprob);
    tow_buf_puts(b, ", \"bytes\": [");
    for (size_t i = 0; i < n; i++) tow_buf_printf(b, i ? ", %u" : "%u", p[i]);
    tow_buf_putc(b, ']');
}

static void put_chat_logprobs(struct tow_buf *b, const struct text_tokenizer *tok,
                              const struct rtr_delta *d)
{
    tow_buf_puts(b, "{\"content\": [");
    for (uint32_t i = 0; i < d->n_scored; i++) {
        const struct rtr_scored *s = &d->scored[i];
        if (i) tow_buf_puts(b, ", ");
        put_chat_token(b, tok, s->id, s->logprob);
        tow_buf_puts(b, ", \"top_logprobs\": [");
        for (uint32_t k = 0; k < s->n_top; k++) {
            if (k) tow_buf_puts(b, ", ");
            put_chat_token(b, tok, s->top[k].id, s->top[k].logprob);
            tow_buf_putc(b, '}');
        }
        tow_buf_puts(b, "]}");
    }
    tow_buf_puts(b, "], \"refusal\": null}");
}

void rtr_put_logprobs(struct tow_buf *b, const struct text_tokenizer *tok, const struct rtr_ask *a,
                      const struct rtr_delta *d)
{
    if (!a->req.sampling.want_logprobs) {
        tow_buf_puts(b, "null");
        return;
    }
    if (a->route == RTR_CHAT) {
        put_chat_logprobs(b, tok, d);
        return;
    }
    tow_buf_puts(b, "{\"tokens\": [");
    for (uint32_t i = 0; i < d->n_scored; i++) {
        if (i) tow_buf_puts(b, ", ");
        put_token(b, tok, d->scored[i].id);
    }
    tow_buf_puts(b, "], \"token_logprobs\": [");
    for (uint32_t i = 0; i < d->n_scored; i++) {
        if (i) tow_buf_puts(b, ", ");
        put_number(b, d->scored[i].logprob);
    }
    tow_buf_puts(b, "], \"top_logprobs\": [");
    for (uint32_t i = 0; i < d->n_scored; i++) {
        tow_buf_puts(b, i ? ", {" : "{");
        for (uint32_t k = 0; k < d->scored[i].n_top; k++) {
            if (k) tow_buf_puts(b, ", ");
            put_token(b, tok, d->scored[i].top[k].id);
            tow_buf_puts(b, ": ");
            put_number(b, d->scored[i].top[k].logprob);
        }
        tow_buf_putc(b, '}');
    }
    tow_buf_puts(b, "], \"text_offset\": [");
    for (uint32_t i = 0; i < d->n_scored; i++) {
        tow_buf_printf(b, i ? ", %u" : "%u", d->scored[i].text_offset);
    }
    tow_buf_puts(b, "]}");
}

void rtr_put_calls(struct tow_buf *b, const struct rtr_delta *d, bool with_index)
{
    tow_buf_putc(b, '[');
    for (uint32_t i = 0; i < d->n_calls; i++) {
        tow_buf_puts(b, i ? ", {" : "{");
        if (with_index) tow_buf_printf(b, "\"index\": %u, ", d->first_call + i);
        tow_buf_puts(b, "\"id\": ");
        put_str(b, d->calls[i].id);
        tow_buf_puts(b, ", \"type\": \"function\", \"function\": {\"name\": ");
        put_str(b, d->calls[i].name);
        tow_buf_puts(b, ", \"arguments\": ");
        put_str(b, d->calls[i].arguments);
        tow_buf_puts(b, "}}");
    }
    tow_buf_putc(b, ']');
}

void rtr_put_envelope(struct tow_buf *b, const struct rtr_ask *a, const char *chat_object)
{
    tow_buf_printf(b, "{\"id\": \"%s\", \"object\": \"%s\", \"created\": %" PRIu64 ", \"model\": ",
                   a->req.id, a->route == RTR_CHAT ? chat_object : "text_completion", a->created);
    json_put_string(b, a->model, a->model_len);
    tow_buf_puts(b, ", ");
}

void rtr_put_usage(struct tow_buf *b, const struct rtr_ask *a, struct rtr_output *const *outputs)
{
    uint64_t completion = 0, reasoning = 0, cached = 0;
    for (uint32_t i = 0; i < a->req.n_choices; i++) {
        completion += rtr_output_n_tokens(outputs[i]);
        reasoning += rtr_output_n_reasoning(outputs[i]);
        if (i % a->n == 0) cached += rtr_output_n_cached(outputs[i]); /* once for each prompt */
    }
    tow_buf_printf(
        b,
        "\"usage\": {\"prompt_tokens\": %" PRIu64 ", \"completion_tokens\": %" PRIu64
        ", \"total_tokens\": %" PRIu64 ", \"prompt_tokens_details\": {\"cached_tokens\": %" PRIu64
        "}, \"completion_tokens_details\": {\"reasoning_tokens\": %" PRIu64 "}}",
        a->n_prompt_tokens, completion, a->n_prompt_tokens + completion, cached, reasoning);
}

static void put_message(struct tow_buf *b, const struct rtr_delta *d)
{
    tow_buf_puts(b, "\"message\": {\"role\": \"assistant\", \"content\": ");
    if (d->content_len || !d->n_calls) {
        json_put_string(b, d->content, d->content_len);
    } else {
        tow_buf_puts(b, "null");
    }
    if (d->reasoning_len) {
        tow_buf_puts(b, ", \"reasoning_content\": ");
        json_put_string(b, d->reasoning, d->reasoning_len);
    }
    tow_buf_puts(b, ", \"refusal\": null");
    if (d->n_calls) {
        tow_buf_puts(b, ", \"tool_calls\": ");
        rtr_put_calls(b, d, false);
    }
    tow_buf_putc(b, '}');
}

void rtr_put_answer(struct tow_buf *b, const struct text_tokenizer *tok, const struct rtr_ask *a,
                    struct rtr_output *const *outputs, const struct rtr_capture_rows *rows)
{
    rtr_put_envelope(b, a, "chat.completion");
    tow_buf_puts(b, "\"choices\": [");
    for (uint32_t i = 0; i < a->req.n_choices; i++) {
        struct rtr_delta d;
        rtr_output_peek(outputs[i], &d);
        tow_buf_printf(b, "%s{\"index\": %u, ", i ? ", " : "", i);
        if (a->route == RTR_CHAT) {
            put_message(b, &d);
        } else {
            struct tow_buf text;
            tow_buf_init(&text, 0);
            if (a->echo) tow_buf_put(&text, a->echo[i / a->n], a->echo_len[i / a->n]);
            tow_buf_put(&text, d.content, d.content_len);
            if (tow_buf_failed(&text)) b->failed = true;
            tow_buf_puts(b, "\"text\": ");
            json_put_string(b, text.data ? text.data : "", text.len);
            tow_buf_fini(&text);
        }
        tow_buf_puts(b, ", \"logprobs\": ");
        rtr_put_logprobs(b, tok, a, &d);
        tow_buf_printf(b, ", \"finish_reason\": \"%s\"}",
                       rtr_finish_name(rtr_output_end(outputs[i])));
    }
    tow_buf_puts(b, "], ");
    rtr_put_usage(b, a, outputs);
    if (a->capture) {
        tow_buf_puts(b, ", ");
        rtr_capture_rows_print(rows, tok, b);
    }
    tow_buf_putc(b, '}');
}
