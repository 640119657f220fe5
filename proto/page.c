/* proto/page.c - see page.h. */
#include "proto/page.h"

#include "common/base/err.h"

void wire_put_part(struct wire_writer *w, const struct wire_part *part)
{
    if (part->kind > WIRE_TAIL || part->index > 1u << 20) w->failed = true;
    wire_put_u8(w, part->kind);
    wire_put_u32(w, part->index);
    wire_put_u64(w, part->offset);
    wire_put_u32(w, part->bytes);
    wire_put_u64s(w, part->digests, WIRE_MAX_DIGESTS);
}

void wire_get_part(struct wire_reader *r, struct wire_part *part)
{
    part->kind = wire_get_u8(r);
    part->index = wire_get_u32(r);
    part->offset = wire_get_u64(r);
    part->bytes = wire_get_u32(r);
    part->digests = wire_get_u64s(r, WIRE_MAX_DIGESTS);
    if (part->kind > WIRE_TAIL || part->index > 1u << 20) r->failed = true;
}

int wire_part_check(const struct wire_part *part, const struct wire_part_shape *shape,
                    struct tow_err *err)
{
    const char *what = part->kind == WIRE_PAGE ? "page" : "tail";
    if (part->index >= shape->n_parts)
        return tow_fail(err, TOW_EWIRE, "%s index is %u, must be below %u", what, part->index,
                        shape->n_parts);
    if (part->bytes != shape->bytes)
        return tow_fail(err, TOW_EWIRE, "%s %u has %u bytes, must be %u", what, part->index,
                        part->bytes, shape->bytes);
    if (part->digests.n != shape->n_digests)
        return tow_fail(err, TOW_EWIRE, "%s %u has %u digests, must be %u", what, part->index,
                        part->digests.n, shape->n_digests);
    if (part->offset > shape->area_bytes || part->bytes > shape->area_bytes - part->offset)
        return tow_fail(err, TOW_EWIRE, "%s %u lies at %llu, outside the %llu bytes of its area",
                        what, part->index, (unsigned long long)part->offset,
                        (unsigned long long)shape->area_bytes);
    return 0;
}
