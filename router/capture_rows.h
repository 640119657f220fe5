/* router/capture_rows.h - the rows of a capture as they come back, and what a client is told.
 *
 * Why      Rows come from two workers in any order, some twice after a retry, and they may be many:
 *          here they are kept in order and within a bound, and written when the answer ends.
 * Holds    At most max_steps decode steps and RTR_CAPTURE_MAX_BYTES; what comes beyond is dropped
 *          and `truncated` says so. One row per step and layer: the one that came last.
 * Owner    The loop thread.
 */
#ifndef RTR_CAPTURE_ROWS_H
#define RTR_CAPTURE_ROWS_H

#include "common/base/buf.h"
#include "common/text/tokenizer.h"
#include "router/backend.h"
#include "router/capture.h"

/* Packed rows of one request; their JSON, about six times as long, is written in one go. */
#define RTR_CAPTURE_MAX_BYTES ((size_t)4 << 20)

struct rtr_capture_row; /* see capture_rows.c */

struct rtr_capture_rows {
    const struct rtr_capture *capture; /* borrowed */
    struct rtr_capture_row *items;     /* owned, by step and layer */
    uint32_t n, cap, n_decode_steps;
    size_t bytes;
    bool dropped, failed; /* failed: out of memory */
    text_id *tokens;      /* owned: the outputs, which name the steps */
    uint32_t n_tokens, cap_tokens;
    struct tow_buf answer; /* what `expect` is looked for in */
};

void rtr_capture_rows_init(struct rtr_capture_rows *r, const struct rtr_capture *capture);
void rtr_capture_rows_fini(struct rtr_capture_rows *r); /* zeroed ones are fine */

void rtr_capture_rows_take(struct rtr_capture_rows *r, const struct rtr_captured *row);
void rtr_capture_rows_tokens(struct rtr_capture_rows *r, const text_id *ids, uint32_t n);
/* Text of the answer that a client was shown, in order. */
void rtr_capture_rows_answer(struct rtr_capture_rows *r, const char *text, size_t n);

/* "towpath": {"index_capture": {...}} - no comma on either side. docs/http-api.md has the
 * fields. */
void rtr_capture_rows_print(const struct rtr_capture_rows *r, const struct text_tokenizer *tok,
                            struct tow_buf *out);

#endif
