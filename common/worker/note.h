/* worker/note.h - what travels with a tail: how many tokens the cache covers and the first output token.
 *
 * Format   position u32, first u32, has_logprobs u8, n_top u8, then one row of log-probabilities as TOKENS carries
 *          them (4 + 8 * n_top bytes, or none). Little-endian; bytes behind it are ignored.
 */
#ifndef WORK_NOTE_H
#define WORK_NOTE_H

#include "proto/messages.h"

struct work_note {
    uint32_t position;
    uint32_t first;
    bool has_logprobs;
    uint8_t n_top;
    struct wire_bytes logprobs; /* borrowed */
};

enum { WORK_NOTE_MAX = 10 + 4 + 4 + 8 * WIRE_MAX_TOP };

/* out: WORK_NOTE_MAX bytes; returns the bytes written. */
uint32_t work_note_pack(const struct work_note *n, void *out);
/* Total: any bytes give a note or TOW_EWIRE. */
int work_note_unpack(struct work_note *n, const void *bytes, uint32_t len);

#endif
