/* router/api_stream.c - answers as server-sent events; see api_response.h.
 *
 * Each choice: one chunk with the role, chunks with what came, exactly one with finish_reason,
 * which also carries what was still there. Then usage and captured rows, when asked for, with no
 * choices, and [DONE]. */
#include "router/api_response.h"

#include "common/base/buf.h"
#include "common/text/json.h"
#include "router/sse.h"

static void begin(struct tow_buf *b, const struct rtr_ask *a, uint32_t choice)
{
    rtr_sse_begin(b);
    rtr_put_envelope(b, a, "chat.completion.chunk");
    tow_buf_printf(b, "\"choices\": [{\"index\": %u, ", choice);
}

static void end(struct tow_buf *b, const struct rtr_ask *a, const char *finish)
{
    if (finish) {
        tow_buf_printf(b, ", \"finish_reason\": \"%s\"}]", finish);
    } else {
        tow_buf_puts(b, ", \"finish_reason\": null}]");
    }
    /* OpenAI: with include_usage every chunk but the last has a null usage. */
    tow_buf_puts(b, a->include_usage ? ", \"usage\": null}" : "}");
    rtr_sse_end(b);
}

void rtr_put_first_chunk(struct tow_buf *b, const struct rtr_ask *a, uint32_t choice)
{
    if (a->route == RTR_CHAT) {
        begin(b, a, choice);
        tow_buf_puts(b,
                     "\"delta\": {\"role\": \"assistant\", \"content\": \"\"}, \"logprobs\": null");
    } else if (a->echo) {
        begin(b, a, choice);
        tow_buf_puts(b, "\"text\": ");
        json_put_string(b, a->echo[choice / a->n], a->echo_len[choice / a->n]);
        tow_buf_puts(b, ", \"logprobs\": null");
    } else {
        return;
    }
    end(b, a, NULL);
}

static void put_delta(struct tow_buf *b, const struct rtr_delta *d)
{
    const char *comma = "";
    tow_buf_puts(b, "\"delta\": {");
    if (d->reasoning_len) {
        tow_buf_puts(b, "\"reasoning_content\": ");
        json_put_string(b, d->reasoning, d->reasoning_len);
        comma = ", ";
    }
    if (d->content_len) {
        tow_buf_printf(b, "%s\"content\": ", comma);
        json_put_string(b, d->content, d->content_len);
        comma = ", ";
    }
    if (d->n_calls) {
        tow_buf_printf(b, "%s\"tool_calls\": ", comma);
        rtr_put_calls(b, d, true);
    }
    tow_buf_putc(b, '}');
}

void rtr_put_chunk(struct tow_buf *b, const struct text_tokenizer *tok, const struct rtr_ask *a,
                   uint32_t choice, struct rtr_output *o)
{
    struct rtr_delta d;
    rtr_output_peek(o, &d);
    const char *finish = rtr_finish_name(rtr_output_end(o));
    if (!finish && !d.content_len && !d.reasoning_len && !d.n_calls && !d.n_scored) return;
    begin(b, a, choice);
    if (a->route == RTR_CHAT) {
        put_delta(b, &d);
    } else {
        tow_buf_puts(b, "\"text\": ");
        json_put_string(b, d.content, d.content_len);
    }
    tow_buf_puts(b, ", \"logprobs\": ");
    if (d.n_scored) {
        rtr_put_logprobs(b, tok, a, &d);
    } else {
        tow_buf_puts(b, "null");
    }
    end(b, a, finish);
    rtr_output_taken(o);
}

void rtr_put_last_chunks(struct tow_buf *b, const struct text_tokenizer *tok,
                         const struct rtr_ask *a, struct rtr_output *const *outputs,
                         const struct rtr_capture_rows *rows)
{
    if (a->include_usage || a->capture) {
        rtr_sse_begin(b);
        rtr_put_envelope(b, a, "chat.completion.chunk");
        tow_buf_puts(b, "\"choices\": []");
        if (a->include_usage) {
            tow_buf_puts(b, ", ");
            rtr_put_usage(b, a, outputs);
        }
        if (a->capture) {
            tow_buf_puts(b, ", ");
            rtr_capture_rows_print(rows, tok, b);
        }
        tow_buf_putc(b, '}');
        rtr_sse_end(b);
    }
    rtr_sse_done(b);
}

void rtr_put_error_event(struct tow_buf *b, const struct rtr_api_error *e)
{
    rtr_sse_begin(b);
    rtr_put_error(b, e);
    rtr_sse_end(b);
}
