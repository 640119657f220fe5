/* router/output.h - one answer: token ids in, text, reasoning, calls and log-probabilities out.
 *
 * Why      Streams and whole answers must say the same, whatever the number of tokens per step. So
 *          both read from here, and tokens are taken one at a time: what a client gets depends on
 *          the ids alone.
 * Way      ids -> characters (text/detok) -> chat parser (text/chat) -> stop strings in the
 *          content.
 * Counts   n_tokens counts what was generated up to the end of the answer: the token that completed
 *          a stop string is counted, later ones of the same step are not. An end token is never
 *          among the ids (router/backend.h), so not counted either.
 * Owner    Whoever calls; no I/O.
 */
#ifndef RTR_OUTPUT_H
#define RTR_OUTPUT_H

#include "common/base/buf.h"
#include "router/backend.h"
#include "router/stop.h"

struct text_tokenizer;
struct rtr_ask;

enum rtr_answer_end { RTR_END_NONE, RTR_END_STOP, RTR_END_LENGTH, RTR_END_TOOL_CALLS };

/* A call a client may run: name and arguments are whole. */
struct rtr_call {
    char id[32];            /* "call_..." */
    char *name, *arguments; /* owned; NUL-terminated JSON text in arguments */
};

/* Log-probability of one token of the answer. */
struct rtr_scored {
    text_id id;
    float logprob;
    uint32_t text_offset; /* characters of the answer before it; echo included */
    uint32_t n_top;
    struct rtr_logprob top[RTR_MAX_TOP];
};

struct rtr_output; /* see output.c; fields are read through these */

/* Sets up choice `choice` of the ask. The tokenizer and the ask are borrowed.
 * NULL: out of memory. */
struct rtr_output *rtr_output_new(const struct text_tokenizer *tok, const struct rtr_ask *ask,
                                  uint32_t choice);
void rtr_output_free(struct rtr_output *o); /* NULL is fine */

/* Takes tokens until the answer ends. True when it ended here: a stop string, or a call that no
 * other may follow; the back end can forget the choice. */
bool rtr_output_push(struct rtr_output *o, const struct rtr_tokens *t);
/* The generation is over; what was held back comes out. Once, unless push said true. */
void rtr_output_finish(struct rtr_output *o, enum rtr_finish reason);
bool rtr_output_failed(const struct rtr_output *o); /* out of memory somewhere on the way */

enum rtr_answer_end rtr_output_end(const struct rtr_output *o);
uint32_t rtr_output_n_tokens(const struct rtr_output *o);
uint32_t rtr_output_n_reasoning(const struct rtr_output *o);
uint32_t rtr_output_n_cached(const struct rtr_output *o);

/* What has come out and was not yet taken with rtr_output_taken(); all borrowed until then. */
struct rtr_delta {
    const char *content, *reasoning;
    size_t content_len, reasoning_len;
    const struct rtr_call *calls;
    uint32_t n_calls, first_call; /* number of calls[0] in the answer */
    const struct rtr_scored *scored;
    uint32_t n_scored;
};
void rtr_output_peek(const struct rtr_output *o, struct rtr_delta *out);
void rtr_output_taken(struct rtr_output *o);

#endif
