/* proto/capture.h - what a request asks to see of the indexer, and what the indexer answers.
 *
 * Why      A client asks where a span of its prompt ranks; the router turns the span into
 *          compressed entries, since only it knows text; the workers rank them. The ask travels in
 *          RESERVE and PREFILL, each answer (one layer of one row) in CAPTURED.
 * Entry    Of a layer of ratio 4 entry e covers tokens 4(e-1) .. 4e+3: its own group and the one
 *          before. A token t is in the entries t/4 and t/4 + 1.
 * Rank     1 is the highest score; of equal scores the lower entry comes first, as selection
 *          breaks ties. An entry is selected exactly when its rank is at most the row's topk.
 * Step     Names the row by what it chose: step i is the row whose logits gave output i. Step 0 is
 *          the prompt's last row, computed at prefill; later ones count as decode's, also when a
 *          prefill computes one for a sequence that lost its decode worker.
 * Total    As messages.h: any bytes give a value or TOW_EWIRE, and spans inside are borrowed.
 */
#ifndef TOW_PROTO_CAPTURE_H
#define TOW_PROTO_CAPTURE_H

#include "proto/wire.h"

enum {
    WIRE_CAPTURE_MAX_ENTRIES = 512,
    WIRE_CAPTURE_MAX_LAYERS = 256,
    WIRE_CAPTURE_MAX_STEPS = 4096,
    WIRE_CAPTURE_MAX_LIST = 4096, /* as many as one row may select */
    WIRE_MAX_CAPTURE = 4096,      /* bytes of an ask */
    WIRE_MAX_CAPTURED = 49152     /* bytes of an answer */
};

enum wire_capture_steps { WIRE_CAPTURE_PREFILL = 1, WIRE_CAPTURE_DECODE = 2, WIRE_CAPTURE_ALL = 3 };

/* Key types in the order of their bits in `shadow`. */
enum wire_shadow { WIRE_SHADOW_BF16, WIRE_SHADOW_FP8, WIRE_SHADOW_FP4, WIRE_SHADOWS };

struct wire_capture {
    uint8_t steps;           /* enum wire_capture_steps */
    uint8_t shadow;          /* bit per enum wire_shadow: also rank by keys of this type */
    uint8_t lists;           /* 1: send the selected entries themselves */
    uint32_t max_steps;      /* decode rows ranked at most, 1 .. WIRE_CAPTURE_MAX_STEPS */
    struct wire_ids layers;  /* ascending; empty: all that have an indexer */
    struct wire_ids entries; /* ascending, at least one */
};
void wire_put_capture(struct wire_writer *w, const struct wire_capture *c);
/* 0 or TOW_EWIRE; fields out of range and unordered ids are refused. */
int wire_get_capture(struct wire_capture *out, const void *body, size_t n);

/* Where one entry stands. */
struct wire_rank {
    uint32_t rank;  /* 1-based */
    uint32_t equal; /* other visible entries with the same score */
    float score;
};

/* By keys of one type. kth: score of the last entry selected; next: of the best one that is not;
 * NaN where there is none (all visible entries are selected). */
struct wire_ranks {
    float kth, next;
    struct wire_bytes ranks; /* WIRE_RANK_BYTES each, one per entry of the row */
};
enum { WIRE_RANK_BYTES = 12 };

struct wire_capture_row {
    uint32_t topk, n_visible;
    struct wire_ids entries; /* those asked for that this row sees */
    struct wire_ranks own;   /* by the keys that select */
    uint8_t shadow;          /* which of the following are there */
    struct wire_ranks shadows[WIRE_SHADOWS];
    struct wire_ids list; /* the selected entries, ascending; empty unless asked for */
};
void wire_put_capture_row(struct wire_writer *w, const struct wire_capture_row *r);
int wire_get_capture_row(struct wire_capture_row *out, const void *body, size_t n);
struct wire_rank wire_rank_at(const struct wire_ranks *r, uint32_t i); /* i < entries.n */

#endif
