/* worker/capture.h - what one request asks to see of the indexer, and the rows found for it.
 *
 * Why      Both roles take the same ask from the wire, hand it to the engine and send what it
 *          found; they differ only in which rows they compute.
 * Owner    The control thread; from work_capture_begin() until the step has ended, the engine
 *          thread (as everything a step points to).
 * Holds    Rows are packed in the pass and kept until the next begin. A row that finds no memory
 *          loses the rows of its step, never the request.
 */
#ifndef WORK_CAPTURE_H
#define WORK_CAPTURE_H

#include "common/base/buf.h"
#include "common/model/forward.h"
#include "proto/messages.h"

#include <stdbool.h>
#include <stdint.h>

struct work_capture {
    struct model_capture ask;
    int32_t *ids;        /* owned: the ask's layers, then its entries */
    uint8_t steps;       /* enum wire_capture_steps */
    uint32_t max_steps;  /* the last step of decode that is ranked */
    uint32_t step;       /* of the rows */
    struct tow_buf rows; /* {layer u32, bytes u32, packed row} each */
    size_t sent;         /* of them */
    bool lost;           /* no memory for a row of the last step begun */
};

/* NULL when the ask can be kept, or what is wrong with it (static). shadows: sequences here can
 * keep shadow keys. *shadowed: this one has to. An empty ask asks for nothing. */
const char *work_capture_check(struct wire_bytes ask, bool shadows, bool *shadowed);
/* Copies an ask that passed the check; *out is NULL when it is empty. TOW_ENOMEM. */
int work_capture_new(struct work_capture **out, struct wire_bytes ask);
void work_capture_free(struct work_capture *c); /* NULL is fine */

static inline bool work_capture_shadowed(const struct work_capture *c) /* c may be NULL */
{
    return c && c->ask.shadow != 0;
}
/* Pages of a sequence that would take n_pages without shadow keys: each has a companion. */
static inline uint32_t work_capture_pages(bool shadowed, uint32_t n_pages)
{
    return shadowed ? 2 * n_pages : n_pages;
}

/* What to give to the engine for the row that chooses output `step`: NULL when that row is not
 * asked for (or c is NULL). Step 0 is prefill's; later ones are decode's, also when a prefill
 * computes them again for a sequence that lost its decode worker. Forgets the rows of the step
 * before. */
const struct model_capture *work_capture_begin(struct work_capture *c, uint32_t step);
/* Logs it when rows of the step that ended were lost; ask: what begin gave, may be NULL. */
void work_capture_warn(const char *worker, const struct model_capture *ask);
/* The next row found, each once; false: no more, or c is NULL. The ticket is the caller's to fill
 * in; bytes are valid until the next begin. */
bool work_capture_take(struct work_capture *c, struct wire_captured *out);

#endif
