/* kernels/kvpack/kvpack.h - what every op that takes sequences checks, and where an entry lies. */
#ifndef KERN_KVPACK_KVPACK_H
#define KERN_KVPACK_KVPACK_H

#include "kernels/kv_layout.h"
#include "kernels/types.h"

/* Rows, positions, tail and enough pages for the layer. */
bool kern_seqs_ok(const struct kern_seq *seqs, int32_t n_seqs, const struct kern_kv_layout *l,
                  int32_t layer);

/* The part (main or index) that holds entry e of a sequence; *row is the entry's row in it. Offsets
 * are 64 bits wide throughout: page ids times page bytes pass 2^32 on large pools. */
static inline const uint8_t *kern_entry_part(const uint8_t *pages, const struct kern_kv_layout *l,
                                             int32_t layer, bool index, const struct kern_seq *q,
                                             int64_t e, int64_t *row)
{
    const struct kern_kv_layer *y = &l->layer[layer];
    int64_t page = q->page_ids[e / y->per_page * (q->shadowed ? 2 : 1)];
    *row = e % y->per_page;
    return pages + page * l->page_bytes + (index ? y->index_off : y->main_off);
}
/* The same for the keys of a shadow type; q is shadowed. The selecting type has no second copy. */
static inline const uint8_t *kern_shadow_part(const uint8_t *pages, const struct kern_kv_layout *l,
                                              int32_t layer, enum kern_shadow s,
                                              const struct kern_seq *q, int64_t e, int64_t *row)
{
    const struct kern_kv_layer *y = &l->layer[layer];
    if (kern_shadow_fmt(s) == l->spec.ik_fmt)
        return kern_entry_part(pages, l, layer, true, q, e, row);
    int64_t page = q->page_ids[e / y->per_page * 2 + 1];
    *row = e % y->per_page;
    return pages + page * l->page_bytes + y->shadow_off[s];
}

#endif
