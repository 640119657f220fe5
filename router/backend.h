/* router/backend.h - the seam between the half that talks to clients and the half that knows the
 * workers.
 *
 * Why      api.c turns bytes into a checked request of token ids and token ids into answers; it has
 *          never heard of a worker. The back end admits, places, retries and cancels; it has never
 *          heard of HTTP. Tests put a stub here and need no worker.
 * Owner    The router's loop thread, on both sides of the seam, always.
 * Holds    A request that submit() accepted ends exactly once: for each choice on_finish, or one
 *          on_fail for all choices not finished yet, or cancel(). No callback comes inside
 *          submit(), cancel() or cancel_choice(), and none after the end; but these may be called
 *          inside a callback, also for the request it is about.
 */
#ifndef RTR_BACKEND_H
#define RTR_BACKEND_H

#include "common/base/arena.h"
#include "common/base/err.h"
#include "common/text/tokenizer.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_buf;

#define RTR_MAX_TOP        20  /* alternatives per position */
#define RTR_MAX_CHOICES    128 /* n times prompts */
#define RTR_MAX_MODEL_NAME 200 /* bytes */

struct rtr_bias {
    text_id id;
    float bias; /* -100..100 */
};

struct rtr_sampling {
    float temperature;       /* 0 is greedy */
    float top_p;             /* 1 is off */
    float min_p;             /* 0 is off */
    uint32_t top_k;          /* 0 is off */
    float frequency_penalty; /* output tokens only */
    float presence_penalty;
    float repetition_penalty; /* 1 is off */
    bool ignore_eos;
    bool want_logprobs;
    uint8_t n_top;       /* alternatives, 0..RTR_MAX_TOP; only with want_logprobs */
    uint32_t index_topk; /* 0: the worker's own */
    uint32_t n_bias;
    const struct rtr_bias *bias; /* in the request's arena */
};

/* One answer to be generated. Choices of one prompt share its ids. */
struct rtr_choice {
    const text_id *prompt; /* in the request's arena */
    uint32_t n_prompt;
    uint64_t seed; /* the request's seed + its number among the choices of one prompt */
};

/* What a client asked for, checked and tokenised. Everything it points to lives in its arena and
 * stays as it is until the back end has ended the request. */
struct rtr_request {
    struct tow_arena arena; /* owned */
    char id[48];            /* "chatcmpl-..."; unique in this process's life, fit for a log line */
    struct rtr_sampling sampling;
    uint32_t n_choices;
    const struct rtr_choice *choices; /* [n_choices] */
    uint32_t n_prompt_total;          /* ids of all different prompts: what admission counts */
    uint32_t max_tokens;              /* per choice, >= 1; prompt + max_tokens fits the context */
    const void *capture;              /* a packed ask (proto/capture.h), or NULL; one choice only */
    uint32_t capture_bytes;
    bool capture_shadow; /* it also ranks by other keys, which cost each page a companion */
};

/* Why a request is not, or no longer, served. */
struct rtr_refusal {
    struct tow_err err;     /* the code decides the HTTP status, unless http says otherwise */
    int http;               /* 0: tow_err_http(err.code) */
    uint32_t retry_after_s; /* 0: none; else 1..600 */
    const char *reason;     /* a literal such as "queue_full", for X-Towpath-Reason; NULL: none */
    const char *param;      /* a literal: the field of the request that is wrong; NULL: none */
};

struct rtr_logprob {
    text_id id;
    float logprob; /* may be -inf; NaN is treated as -inf */
};

/* Output tokens of one choice, gapless. An end token that ends the choice is not among them; with
 * ignore_eos end tokens are ordinary ones. Borrowed for the call. */
struct rtr_tokens {
    uint32_t choice;
    uint32_t n;
    const text_id *ids;            /* [n] */
    const float *logprobs;         /* [n] of the chosen ids, or NULL */
    const struct rtr_logprob *top; /* [n * n_top], best first, or NULL */
    uint32_t n_top;
    uint32_t n_cached; /* prompt tokens that came out of a cache; as known now */
};

enum rtr_finish {
    RTR_FINISH_STOP,  /* an end token */
    RTR_FINISH_LENGTH /* max_tokens or the context is full */
};

/* Where the entries asked for rank, by one layer of one row. Borrowed for the call. */
struct rtr_captured {
    uint32_t step, layer;
    const void *row; /* proto/capture.h: what wire_get_capture_row() takes */
    uint32_t row_bytes;
};

/* A process that takes part in a request. */
struct rtr_placed_worker {
    const char *name;
    uint64_t incarnation;
    uint32_t chunk_tokens; /* 0 for decode */
    const uint8_t *facts;  /* as HELLO brought them (proto/messages.h: wire_next_fact) */
    uint32_t facts_bytes;
};

/* A choice is in the hands of a pair: the first, or another after a loss. Borrowed for the call. */
struct rtr_placed {
    uint32_t choice, n_output; /* outputs it has so far */
    struct rtr_placed_worker prefill, decode;
};

/* ctx is what was given to submit(). */
struct rtr_sink {
    void (*on_tokens)(void *ctx, const struct rtr_tokens *tokens);
    void (*on_finish)(void *ctx, uint32_t choice, enum rtr_finish reason);
    /* The request as a whole is over; refusal is borrowed for the call. */
    void (*on_fail)(void *ctx, const struct rtr_refusal *refusal);
    /* Only for requests with a capture; all of them come before on_finish. A second one of the same
     * step and layer (after a retry) replaces the first. */
    void (*on_captured)(void *ctx, const struct rtr_captured *captured);
    /* NULL: not of interest. */
    void (*on_placed)(void *ctx, const struct rtr_placed *placed);
};

/* One accepted request, as the back end knows it. */
struct rtr_accepted;

struct rtr_backend {
    /* Quick look before a body is tokenised: would a request be refused by counts alone? 0 yes, go
     * on; else TOW_E* with *refusal filled. */
    int (*room)(void *self, struct rtr_refusal *refusal);
    /* Takes all choices or none. req is borrowed until the end (see Holds). On refusal nothing was
     * started, *out is untouched and *refusal is filled. */
    int (*submit)(void *self, const struct rtr_request *req, const struct rtr_sink *sink, void *ctx,
                  struct rtr_accepted **out, struct rtr_refusal *refusal);
    /* The request ends now; req is no longer valid. */
    void (*cancel)(void *self, struct rtr_accepted *req);
    /* This choice alone ends now (a stop string was found), as if it had finished. When it was the
     * last one the request is over and req no longer valid. False (only with a capture): rows of it
     * are still under way; no tokens come any more, and on_finish, on_fail or cancel() ends it. */
    bool (*cancel_choice)(void *self, struct rtr_accepted *req, uint32_t choice);

    /* Serving: true. Else false with *why, a literal: "starting", "draining", ... */
    bool (*ready)(void *self, const char **why);
    /* The context limit all workers share, or 0 while none has joined; of requests that ask for
     * shadow keys, which take room too. */
    uint32_t (*context_length)(void *self, bool shadow);
    /* Appends a JSON array of workers. */
    void (*workers_json)(void *self, struct tow_buf *out);
    /* Appends a JSON array of those that wanted to join just now and were turned away. */
    void (*refused_json)(void *self, struct tow_buf *out);
    /* TOW_ENOENT when there is none of that name (bytes of the path, decoded; no NUL). */
    int (*drain_worker)(void *self, const char *name, struct tow_err *err);
    /* Appends Prometheus text of what the back end counts itself; NULL when there is nothing. */
    void (*metrics)(void *self, struct tow_buf *out);
};

#endif
