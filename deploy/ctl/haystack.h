/* ctl/haystack.h - long texts with one fact in them, the same bytes each time.
 *
 * Why      Recall is measured by asking for a value that stands once among much else. Whoever reads
 *          a result must be able to make its prompt again: all text comes from a seed, and nothing
 *          from the clock, the machine or a file.
 * Fact     "deploy_token of SERVICE in production", written as the text around it is written.
 * Units    A text is a row of units (a sentence, a record, a line), each a function of the seed and
 *          its number alone. No unit names the fact's service or holds its value; decoys name it.
 * Pure     No I/O; a haystack belongs to one thread.
 */
#ifndef CTL_HAYSTACK_H
#define CTL_HAYSTACK_H

#include "common/base/buf.h"

#include <stdint.h>

struct tow_err;

enum ctl_filler {
    CTL_FILL_WORDS, /* words in no order */
    CTL_FILL_PROSE,
    CTL_FILL_CONFIG,
    CTL_FILL_CODE,
    CTL_FILL_LOGS,
    CTL_FILL_MIXED, /* config files, tables, code and logs in turn */
    CTL_FILLERS
};
extern const char *const ctl_filler_names[]; /* NULL at the end */
int ctl_filler_find(const char *name);       /* -1: none */

/* Numbers from a seed: splitmix64. */
struct ctl_rng {
    uint64_t state;
};
uint64_t ctl_rng_next(struct ctl_rng *r);
uint32_t ctl_rng_below(struct ctl_rng *r, uint32_t n); /* 0 .. n-1; n >= 1 */

/* What makes a fact harder to find than its like. */
enum { CTL_MAX_DECOYS = 4 };
struct ctl_hard {
    int decoys;   /* of the same service in other environments, with other values */
    bool strange; /* service and value are letters in no known order */
};

struct ctl_hay {
    enum ctl_filler filler;
    uint64_t seed;
    struct ctl_hard hard;
    char service[48], value[32];
    char question[128];
    struct tow_buf units; /* their text, one after another */
    uint32_t *ends;       /* owned; [n] where each ends in units */
    uint32_t n, cap;
};

/* Free with ctl_hay_fini(). */
void ctl_hay_init(struct ctl_hay *h, enum ctl_filler filler, uint64_t seed, struct ctl_hard hard);
void ctl_hay_fini(struct ctl_hay *h);

/* Appends the user's message: n_units of filler with the fact behind depth percent of their bytes
 * (at the nearest border of units), n_pad short words, the question. TOW_ENOMEM. */
int ctl_hay_put(struct ctl_hay *h, uint32_t n_units, uint32_t n_pad, int depth, struct tow_buf *out,
                struct tow_err *err);

/* Tokens of the whole encoded prompt whose only message is this text. */
typedef int (*ctl_count_tokens)(void *ctx, const char *text, size_t n, int64_t *tokens,
                                struct tow_err *err);
/* The message whose prompt has exactly n_tokens, into *out (cleared first). TOW_EINVAL names the
 * least that is possible, or says that this tokenizer never counts to n_tokens. */
int ctl_hay_fit(struct ctl_hay *h, int depth, int64_t n_tokens, ctl_count_tokens count, void *ctx,
                struct tow_buf *out, struct tow_err *err);

#endif
