/* router/capture.h - what a request asks to see of the indexer: read, found in the prompt, packed
 * for the workers.
 *
 * Why      Clients ask by text or by token, the indexer ranks compressed entries. Only the router
 *          knows all three, so the way from one to the next is here and nobody else walks it.
 * Way      text -> bytes of the encoded prompt -> tokens (a border inside a token takes the whole
 *          token in) -> entries. Of a layer of ratio 4 entry e covers the tokens 4(e-1) .. 4e+3.
 * Threads  Reads what it is given, writes into the arena: [any thread].
 */
#ifndef RTR_CAPTURE_H
#define RTR_CAPTURE_H

#include "common/base/arena.h"
#include "common/text/tokenizer.h"
#include "proto/capture.h"

struct json;
struct rtr_api_error;

enum {
    RTR_CAPTURE_RATIO = 4, /* of the layers that have an indexer */
    RTR_CAPTURE_MAX_SPANS = 16,
    RTR_CAPTURE_MAX_EXPECT = 4096 /* bytes */
};

struct rtr_capture_span {
    uint32_t start, end; /* tokens of the prompt, end exclusive */
};

/* Everything is in the arena; expect points into the JSON tree. */
struct rtr_capture {
    struct rtr_capture_span spans[RTR_CAPTURE_MAX_SPANS];
    uint32_t n_spans;
    const text_id *prompt; /* what the spans are of */
    uint32_t n_prompt;
    struct wire_capture ask;
    const char *expect; /* NULL: nothing is expected */
    size_t expect_len;
    const void *packed; /* the ask, as RESERVE and PREFILL carry it */
    uint32_t packed_bytes;
};

/* What an ask is checked against. Borrowed for the call. */
struct rtr_capture_rules {
    const struct text_tokenizer *tok;
    const int32_t *ratios; /* of the model's layers */
    uint32_t n_layers;
    const text_id *prompt; /* as long as the arena */
    uint32_t n_prompt;
};

/* 0 and *out, or a negative code and *e filled: 400 invalid_index_capture with param naming the
 * field, or 503. v is the value of index_capture, not null. */
int rtr_capture_parse(struct rtr_capture **out, const struct json *v,
                      const struct rtr_capture_rules *rules, struct tow_arena *arena,
                      struct rtr_api_error *e);

/* First and last entry that covers a token of the span. */
uint32_t rtr_capture_first_entry(struct rtr_capture_span s);
uint32_t rtr_capture_last_entry(struct rtr_capture_span s);

#endif
