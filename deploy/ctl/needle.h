/* ctl/needle.h - `towpath-ctl needle`: is one value found among much text, over lengths, depths,
 * kinds of text, repetitions, index-key types and top-k; and how the index ranked it.
 *
 * Cell     One request. Its text comes from (seed, length, depth, filler, repetition) alone, so
 *          that key types and top-k are compared on the same text.
 * Run      Against a served model, or with the engine in this process (its own index keys then).
 * Exit     0 all found; 1 some not found; 2 the sweep could not be completed.
 */
#ifndef CTL_NEEDLE_H
#define CTL_NEEDLE_H

#include "deploy/ctl/ask.h"
#include "deploy/ctl/haystack.h"

/* OWN: whatever the served model keeps. The others are set, in this process. */
enum ctl_keys { CTL_KEYS_OWN, CTL_KEYS_FP4, CTL_KEYS_FP8, CTL_KEYS_BF16, CTL_KEYS };
extern const char *const ctl_keys_names[]; /* NULL at the end */

struct ctl_cell {
    int64_t length; /* tokens of the prompt */
    int depth;      /* percent of the text before the fact */
    enum ctl_filler filler;
    int rep;
    enum ctl_keys keys;
    int64_t topk; /* 0: the server's */
};

/* The values of each axis, in the order given; no value twice. */
enum { CTL_AXIS_MAX = 64 };
struct ctl_grid {
    int64_t lengths[CTL_AXIS_MAX], depths[CTL_AXIS_MAX], fillers[CTL_AXIS_MAX], keys[CTL_AXIS_MAX],
        topks[CTL_AXIS_MAX];
    int n_lengths, n_depths, n_fillers, n_keys, n_topks, n_reps;
};
enum ctl_axis { CTL_AXIS_LENGTH, CTL_AXIS_DEPTH, CTL_AXIS_FILLER, CTL_AXIS_KEYS, CTL_AXIS_TOPK };

/* "2048,8192" and the like; lengths may end in K (1024), top-k may be "default".
 * TOW_ECONFIG names flag, value and what is right. */
int ctl_axis_parse(enum ctl_axis axis, const char *list, int64_t *out, int *n, struct tow_err *err);
/* LENGTH,DEPTH,FILLER,REP,KEYS,TOPK */
int ctl_cell_parse(const char *text, struct ctl_cell *out, struct tow_err *err);
void ctl_cell_put(struct tow_buf *out, const struct ctl_cell *c); /* so that it parses again */

size_t ctl_grid_size(const struct ctl_grid *g);
/* Cell i; keys vary slowest, since another type opens the model anew. */
struct ctl_cell ctl_grid_at(const struct ctl_grid *g, size_t i);
bool ctl_cell_same(const struct ctl_cell *a, const struct ctl_cell *b);

/* What all texts of a sweep have in common. */
struct ctl_texts {
    uint64_t seed; /* at most INT64_MAX */
    struct ctl_hard hard;
};
bool ctl_texts_same(const struct ctl_texts *a, const struct ctl_texts *b);
/* Of the cell's text; keys and top-k do not count. */
uint64_t ctl_cell_seed(uint64_t seed, const struct ctl_cell *c);

/* What came of a cell. */
struct ctl_record {
    struct ctl_cell cell;
    struct ctl_texts texts;
    bool found;
    int64_t prompt_tokens;
    char finish[24], expect[32];
    char answer[320]; /* as it was, cut there */
    double seconds;
    struct ctl_ranks ranks;
};

int ctl_needle_main(int argc, char **argv);

#endif
