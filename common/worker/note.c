/* worker/note.c - see note.h. */
#include "common/worker/note.h"

#include "common/base/err.h"

uint32_t work_note_pack(const struct work_note *n, void *out)
{
    struct wire_writer w = {.data = out, .cap = WORK_NOTE_MAX};
    wire_put_u32(&w, n->position);
    wire_put_u32(&w, n->first);
    wire_put_u8(&w, n->has_logprobs);
    wire_put_u8(&w, n->n_top);
    if (n->has_logprobs) wire_put_raw(&w, n->logprobs.data, n->logprobs.len);
    tow_assert(!w.failed);
    return (uint32_t)w.len;
}

int work_note_unpack(struct work_note *n, const void *bytes, uint32_t len)
{
    struct wire_reader r = {.data = bytes, .len = len};
    n->position = wire_get_u32(&r);
    n->first = wire_get_u32(&r);
    uint8_t has = wire_get_u8(&r);
    n->n_top = wire_get_u8(&r);
    n->has_logprobs = has == 1;
    n->logprobs = (struct wire_bytes){0};
    if (r.failed || has > 1 || n->n_top > WIRE_MAX_TOP) return TOW_EWIRE;
    if (has) {
        n->logprobs.len = 4 + 8u * n->n_top;
        n->logprobs.data = wire_get_raw(&r, n->logprobs.len);
        if (r.failed) return TOW_EWIRE;
    }
    return 0;
}
