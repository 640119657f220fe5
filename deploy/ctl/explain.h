/* ctl/explain.h - one recorded request replayed in this process: is the answer the model's, or did
 * the way it was computed change it?
 *
 * Why      Chunks, batches, the hand-over, reused prefixes and resumed streams must not change one
 *          bit of a logit; key types and top-k may. Both are asked of the very request that was
 *          complained about, by its ids.
 * Baseline One process, recorded chunk and formats, alone; teacher-forced on the recorded output,
 *          so that each step is compared on its own.
 * Owner    One thread; one model is open at a time, besides the baseline's.
 */
#ifndef CTL_EXPLAIN_H
#define CTL_EXPLAIN_H

#include "common/text/record.h"

#include <stdbool.h>
#include <stdint.h>

struct kern_ops;
struct tow_buf;
struct tow_err;

enum {
    CTL_EXPLAIN_ROWS = 32,
    CTL_EXPLAIN_STEPS = 64,       /* of which logits are compared, */
    CTL_EXPLAIN_STEPS_LOSS = 512, /* to reach a recorded loss, */
    CTL_EXPLAIN_DRAWN = 4096      /* and of which the tokens are */
};

/* Rows by kind; a row is named as its kind, or KIND.WHICH. The last one has no name. */
struct ctl_explain_kind {
    const char *name;
    const char *what;  /* "hand-over", for a list of what was run */
    const char *cause; /* what it says of the deployment when it fails; NULL: it cannot fail */
};
extern const struct ctl_explain_kind ctl_explain_kinds[];
/* The kind of a row. */
const struct ctl_explain_kind *ctl_explain_kind_of(const char *row);

struct ctl_explain {
    const char *model_dir, *device;   /* borrowed; "cpu" or "cuda:N" */
    const struct text_record *record; /* borrowed */
    uint32_t choice;
    int32_t n_threads;    /* 0: all cores */
    int32_t chunk_tokens; /* 0: as recorded */
    int32_t max_steps;    /* output tokens compared, in tokens and logits; 0: as above */
    const char *only;     /* NULL, or a list of names or beginnings: "chunk,handover" */
    /* NULL, or told when row i of n begins (seconds below 0) and when it ends. */
    void (*on_progress)(void *ctx, int32_t i, int32_t n, const char *name, double seconds);
    /* For tests, as in ctl_numerics. */
    const struct kern_ops *(*wrap_ops)(const struct kern_ops *of_device);
    void (*on_page_landed)(void *ctx, uint32_t page, uint8_t *bytes, size_t n);
    void *ctx;
};

/* Another way to compute the same steps, compared with the baseline. */
struct ctl_explain_row {
    char name[24];
    bool must;           /* must be identical; else it is information */
    bool skipped;        /* note says why */
    const char *meaning; /* what is ruled out when it is identical */
    char note[200];
    int64_t n_logits, n_differ;
    double max_abs;     /* largest difference of two logits; NaN when one is no number */
    int32_t first_step; /* that has another bit; -1: none */
    int32_t token_step; /* the first at which another token is drawn; -1: none */
    int32_t token_was, token_is;
};

struct ctl_explain_report {
    struct ctl_explain_row rows[CTL_EXPLAIN_ROWS];
    int32_t n_rows, n_failed; /* failed: must be identical and is not */
    char fingerprint[17], isa[16], recorded_isa[16];
    const char *kv, *ik, *numerics; /* names; literals */
    int32_t n_threads, chunk, topk;
    int32_t n_prompt, n_output;
    int32_t n_steps, n_drawn; /* steps whose logits, and tokens, are compared, of */
    int32_t n_whole;          /* these; one more than outputs: the end token */
    /* The first step at which the recorded sampler draws another token than was recorded. */
    int32_t drawn_step;      /* -1: none */
    int32_t recorded, drawn; /* recorded -1: an end token */
    float recorded_logit, drawn_logit;
    char note[300]; /* what the record lacks or mixes; may be empty */
    double seconds;
};

/* Each name of the list begins a kind's name, or is one of KIND.WHICH. Needs no model and no
 * record, which may then lack the row: ctl_explain_run() says so before it computes anything. */
int ctl_explain_check_only(const char *only, struct tow_err *err);

/* 0 also when rows fail; TOW_E* when the replay could not be made. */
int ctl_explain_run(const struct ctl_explain *e, struct ctl_explain_report *out,
                    struct tow_err *err);
/* Nothing failed, and every recorded token was drawn again. */
bool ctl_explain_good(const struct ctl_explain_report *r);

/* text_of: NULL, or appends the text of a token, quoted. */
typedef void (*ctl_token_text)(void *ctx, int32_t id, struct tow_buf *out);
void ctl_explain_table(const struct ctl_explain *e, const struct ctl_explain_report *r,
                       ctl_token_text text_of, void *ctx, struct tow_buf *out);
void ctl_explain_json(const struct ctl_explain *e, const struct ctl_explain_report *r,
                      struct tow_buf *out);
/* One paragraph in plain words. */
void ctl_explain_verdict(const struct ctl_explain_report *r, ctl_token_text text_of, void *ctx,
                         struct tow_buf *out);

/* The subcommand; its exit status: 0 good, 1 not, 2 it could not be asked. */
int ctl_explain_main(int argc, char **argv);

#endif
