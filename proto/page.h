/* proto/page.h - the descriptor of one part of a KV cache: a page or the tail.
 *
 * Why      The receiver moves the bytes itself, so the sender only says where they lie and what
 *          their digests are. Bytes and layout of a part: docs/kv-layout.md.
 * Trust    A descriptor comes from outside: wire_part_check() before its numbers are used.
 */
#ifndef TOW_PROTO_PAGE_H
#define TOW_PROTO_PAGE_H

#include "proto/wire.h"

#define WIRE_MAX_DIGESTS 2048 /* sub-parts of a page: two per layer and one spare, with room */

enum wire_part_kind { WIRE_PAGE = 0, WIRE_TAIL = 1 };

/* Field rows as in messages.h. */
#define WIRE_PART(F)                                                                               \
    F(u8, kind, 1, "0 page (in the pool), 1 tail (in the tail area)")                              \
    F(u32, index, 1u << 20, "page: which one of the sequence, from 0; tail: 0")                    \
    F(u64, offset, UINT64_MAX, "bytes from the base of its area")                                  \
    F(u32, bytes, UINT32_MAX, "length")                                                            \
    F(u64s, digests, WIRE_MAX_DIGESTS, "XXH3-64 of each sub-part, in layout order")

struct wire_part {
    uint8_t kind; /* enum wire_part_kind */
    uint32_t index;
    uint64_t offset;
    uint32_t bytes;
    struct wire_u64s digests;
};

/* What the receiver knows must be true of a part. */
struct wire_part_shape {
    uint64_t area_bytes; /* of the sender's pool or tail area */
    uint32_t bytes;      /* of a page or of the tail */
    uint32_t n_digests;
    uint32_t n_parts; /* pages of the sequence; 1 for the tail */
};

/* 0 or TOW_EWIRE naming the field, its value and the right one. */
int wire_part_check(const struct wire_part *part, const struct wire_part_shape *shape,
                    struct tow_err *err);

void wire_put_part(struct wire_writer *w, const struct wire_part *part);
void wire_get_part(struct wire_reader *r, struct wire_part *part);

#endif
