/* router/api_response.h - answers as JSON: whole bodies, stream chunks, errors. Bytes into a
 * buffer, no I/O. Every number written is finite, every string valid UTF-8. */
#ifndef RTR_API_RESPONSE_H
#define RTR_API_RESPONSE_H

#include "router/api_request.h"
#include "router/capture_rows.h"
#include "router/output.h"

#define RTR_LOGPROB_FLOOR (-9999.0) /* stands for what is not finite */

void rtr_put_error(struct tow_buf *b, const struct rtr_api_error *e);
/* A refusal or failure of the back end as an error. */
void rtr_error_of(struct rtr_api_error *e, const struct rtr_refusal *r);

/* The whole answer: all choices have ended. rows: of an ask with a capture, else not looked at. */
void rtr_put_answer(struct tow_buf *b, const struct text_tokenizer *tok, const struct rtr_ask *a,
                    struct rtr_output *const *outputs, const struct rtr_capture_rows *rows);

/* ---- stream: SSE events (api_stream.c) ---- */
/* The chunk every choice begins with: the role, or the echoed prompt; nothing for a completion
 * without echo. */
void rtr_put_first_chunk(struct tow_buf *b, const struct rtr_ask *a, uint32_t choice);
/* What a choice has ready, and its finish_reason once it has ended;
 * nothing when there is neither. */
void rtr_put_chunk(struct tow_buf *b, const struct text_tokenizer *tok, const struct rtr_ask *a,
                   uint32_t choice, struct rtr_output *o);
/* After the last choice: usage and captured rows if they were asked for, and [DONE]. */
void rtr_put_last_chunks(struct tow_buf *b, const struct text_tokenizer *tok,
                         const struct rtr_ask *a, struct rtr_output *const *outputs,
                         const struct rtr_capture_rows *rows);
/* One error event; the stream ends without [DONE]. */
void rtr_put_error_event(struct tow_buf *b, const struct rtr_api_error *e);

/* Shared by the two files. */
void rtr_put_usage(struct tow_buf *b, const struct rtr_ask *a, struct rtr_output *const *outputs);
void rtr_put_envelope(struct tow_buf *b, const struct rtr_ask *a, const char *chat_object);
void rtr_put_calls(struct tow_buf *b, const struct rtr_delta *d, bool with_index);
void rtr_put_logprobs(struct tow_buf *b, const struct text_tokenizer *tok, const struct rtr_ask *a,
                      const struct rtr_delta *d);
const char *rtr_finish_name(enum rtr_answer_end end); /* "stop"; NULL for RTR_END_NONE */

#endif
