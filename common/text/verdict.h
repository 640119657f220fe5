/* text/verdict.h - why an answer had, or had not, what was asked for.
 *
 * Why      Four causes look the same from outside: the needle ranks just beyond top-k, the keys are
 *          too coarse, the indexer does not look for it at all, or it was selected and the model
 *          errs further down. Router and towpath-ctl say the same of the same ranks.
 * Measure  A row (one layer of one step) counts by the best rank of any entry asked for; a request
 *          by its best row: the layer that looks.
 *
 * verdict         when
 * selected        a row selects an entry asked for
 * downstream      so too, but the answer lacks what was expected
 * key_precision   by keys of a finer or other type a row would select one
 * coverage        the best rank is at most TEXT_VERDICT_NEAR times top-k: a larger one would do
 * discrimination  it ranks low, by every type of key that was looked at
 *
 * Pure     No I/O, no allocation, rows in any order: [any thread].
 */
#ifndef TOW_TEXT_VERDICT_H
#define TOW_TEXT_VERDICT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A rank this many times top-k is still near: top-k can be set so per request (512 to 2048). */
enum { TEXT_VERDICT_NEAR = 4 };

/* Key types from the finest to the coarsest. */
enum text_precision { TEXT_BF16, TEXT_FP8, TEXT_FP4, TEXT_PRECISIONS };

enum text_verdict_kind {
    TEXT_VERDICT_NONE, /* no row sees any entry asked for: nothing can be said */
    TEXT_VERDICT_SELECTED,
    TEXT_VERDICT_COVERAGE,
    TEXT_VERDICT_KEY_PRECISION,
    TEXT_VERDICT_DISCRIMINATION,
    TEXT_VERDICT_DOWNSTREAM
};

struct text_verdict_row {
    uint32_t step, layer, topk;
    uint32_t rank;                    /* best of the entries asked for; 0: the row sees none */
    uint32_t shadow[TEXT_PRECISIONS]; /* the same by other keys; 0: not looked at */
};

struct text_verdict {
    enum text_verdict_kind kind;
    uint32_t layer, step, rank, topk; /* of the best row; the top-k that suffices is rank */
    /* KEY_PRECISION: the coarsest type by whose keys it is selected, and its rank by them.
     * DISCRIMINATION: the type that ranks it best, if any was looked at. */
    bool has_precision;
    enum text_precision precision;
    uint32_t precision_rank, precision_layer, precision_step;
    bool expects, found; /* was something expected, and did the answer have it? */
};

/* expects: the answer was searched, and found says with which outcome. */
void text_verdict_judge(struct text_verdict *out, const struct text_verdict_row *rows, size_t n,
                        bool expects, bool found);

const char *text_verdict_name(enum text_verdict_kind kind); /* "coverage"; NULL for NONE; static */
const char *text_precision_name(enum text_precision p);     /* "fp8"; static */
/* -1 when it is none. */
int text_precision_find(const char *name);
/* One line for people, with the numbers behind it; cut to cap. */
void text_verdict_print(const struct text_verdict *v, char *out, size_t cap);

#endif
