/* router/api_request.h - a request body, checked, encoded and tokenised, or the reason why not.
 *
 * Rules    No value is coerced; null means the default; unknown fields are ignored; a wrong field
 *          is named in the error's message and param. docs/http-api.md lists every field and range.
 * Threads  rtr_ask_parse() reads what it is given and writes only *out: [any thread].
 */
#ifndef RTR_API_REQUEST_H
#define RTR_API_REQUEST_H

#include "common/text/chat.h"
#include "router/backend.h"
#include "router/capture.h"
#include "router/stop.h"

struct text_tokenizer;
struct json;

enum rtr_route { RTR_CHAT, RTR_COMPLETIONS, RTR_TOKENIZE, RTR_DETOKENIZE };

/* What a body is checked against. Borrowed, constant while a check runs. */
struct rtr_ask_rules {
    const struct text_tokenizer *tok;
    const char *served_model_name; /* NULL: any */
    const char *model_name;        /* what answers say when the request names none */
    uint32_t context_length;       /* prompt + max_tokens <= this, */
    uint32_t shadow_context;       /* or this with index_capture.shadow; 0: the same */
    uint32_t n_vocab;              /* token ids from a client are below it; 0: as the tokenizer */
    bool default_thinking;
    size_t max_body_bytes;
    bool index_capture;    /* may requests ask for one? */
    const int32_t *ratios; /* compression of each layer; only with index_capture */
    uint32_t n_layers;
};

struct rtr_api_error {
    int status;
    const char *type, *code; /* literals */
    char param[64];          /* "" : none */
    char message[640];
};

/* All memory is in req.arena, but for the tree. */
struct rtr_ask {
    struct rtr_request req;
    enum rtr_route route;
    struct json *tree; /* owned; what is left of the body: strings below point into it */
    const char *model;
    size_t model_len;
    uint64_t created; /* seconds since 1970 */
    uint32_t n, n_prompts;
    uint64_t n_prompt_tokens; /* for usage: all different prompts */
    bool stream, include_usage;
    struct rtr_stop_string stops[RTR_MAX_STOPS];
    size_t n_stops;
    /* chat */
    bool has_chat;
    struct text_chat_prompt chat; /* owned; the parser of the answer starts from it */
    const struct json *tools;     /* NULL: none */
    bool parallel_tool_calls;
    struct rtr_capture *capture; /* NULL: none */
    /* completions */
    const char **echo; /* [n_prompts] text before the answer, or NULL */
    size_t *echo_len;
    /* detokenize: the ids are choice 0's prompt */
};

/* 0 and *out (free with rtr_ask_free), or a negative code and *e filled. */
int rtr_ask_parse(struct rtr_ask **out, enum rtr_route route, const char *body, size_t n,
                  const struct rtr_ask_rules *rules, struct rtr_api_error *e);
void rtr_ask_free(struct rtr_ask *a); /* NULL is fine */

/* Fills *e; returns TOW_EINVAL, or the code of a status that has one. */
int rtr_api_fail(struct rtr_api_error *e, int status, const char *code, const char *param,
                 const char *fmt, ...) __attribute__((format(printf, 5, 6)));

#endif
