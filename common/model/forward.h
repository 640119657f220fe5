/* model/forward.h - the model on one device: weights, layout, scratch, and the forward pass.
 *
 * Why      Prefill, decode and the operator's tools run the same pass; what differs is only which
 *          rows are in a batch. It knows layers, weights and batches, and nothing of roles,
 *          requests or sockets.
 * Owner    The engine thread (one at a time); nothing in here is shared.
 * Memory   Pages and tails are device memory (kern_dev_alloc of model_peek_dev()); all else in a
 *          batch is the host's. What a tap or a capture is told of is host memory.
 * Holds    Scratch is allocated once, for max_rows rows; a pass allocates nothing. Scores for
 *          captures are taken by model_warm(); without it, and for taps, a pass takes them for
 *          itself. The logits of a sequence are the same bits whatever the chunk size, the
 *          companions in the batch, the number of threads and the process it runs in.
 * Source   The model's specification; docs/numerics.md.
 */
#ifndef MODEL_FORWARD_H
#define MODEL_FORWARD_H

#include "common/model/weights.h"
#include "kernels/kv_layout.h"
#include "kernels/ops.h"
#include "kernels/types.h"

#include <stdbool.h>
#include <stdint.h>

struct model;
struct kern_dev;
struct kern_ops;
struct tow_err;

enum { MODEL_MAX_TOPK = 4096, MODEL_MAX_ROWS = 65536 };

struct model_options {
    const char *device; /* "cpu", "cuda:N" */
    int32_t n_threads;  /* 0 = all cores */
    bool exact;         /* --numerics exact; kv_fmt and ik_fmt must be F32 */
    enum kern_kv_fmt kv_fmt;
    enum kern_ik_fmt ik_fmt;
    bool fp8_products;             /* multiply fp8 codes as they are, kern_dev_fp8_products() */
    enum kern_act_quant expert_aq; /* NVFP4 experts: A128 (w4a8), NONE (w4a16), NVFP4 (w4a4) */
    int32_t index_topk;            /* default of sequences; 0 = the checkpoint's */
    int32_t max_topk;              /* most a sequence may ask; 0 = MODEL_MAX_TOPK */
    int32_t max_rows;              /* rows of one pass: the chunk, or the decode batch */
    int32_t page_tokens;           /* 0 = chosen by the layout */
    int32_t n_layers;              /* 0; benchmarks: see struct model_weights_options */
    bool mtp;                      /* keep the MTP block's state and allow model_mtp() */
    /* NULL, or gives the table to use in place of the device's (an audit's tests plant faults in
     * single ops); both tables outlive the model. */
    const struct kern_ops *(*wrap_ops)(const struct kern_ops *of_device);
};

/* The checks of model_open() that need neither weights nor a device, and the layout that comes of
 * them; opt's defaults are filled in. */
int model_plan(struct kern_kv_layout *out, struct model_options *opt,
               const struct model_shape *shape, struct tow_err *err);

/* Opens the checkpoint and the device. Caller frees with model_close(). Errors name the option. */
int model_open(struct model **out, const char *dir, const struct model_options *opt,
               struct tow_err *err);
void model_close(struct model *m); /* NULL is fine */

const struct model_weights *model_peek_weights(const struct model *m);
const struct kern_kv_layout *model_peek_layout(const struct model *m);
const struct model_options *model_peek_options(const struct model *m); /* with defaults filled in */
struct kern_dev *model_peek_dev(struct model *m);

/* What a capture is told of: name, and a [rows, width] array valid during the call only. */
enum model_elem { MODEL_ELEM_F32, MODEL_ELEM_BF16, MODEL_ELEM_I32 };
struct model_tap {
    /* Names are the goldens': "hidden" [T, hc*D], "experts" "expert_weights" [T, k],
     * "expert_margin" [T, 1], "index_scores" [T, entries], "index_selected" [T, sel_ld],
     * "index_margin" [T, 1], and the compressors' rows "main.kv" "main.gate" "index.kv"
     * "index.gate" [T, c*e] before the position bias; intermediates of a layer (trace files):
     * "attn_collapsed", "attn_x", "qr", "q", "kv", "index_q", "index_weights", "o_raw", "o",
     * "o_low", "attn_out", "streams_mid", "ffn_x", "routed_out", "shared_act", "shared_out",
     * "ffn_out". */
    void (*on_tensor)(void *ctx, int32_t layer, const char *name, enum model_elem elem,
                      const void *data, int64_t rows, int64_t width);
    void *ctx;
    bool scores; /* also compute index_scores, index_margin and expert_margin */
};

struct model_capture_row;
struct model_draw; /* model/sample.h */

/* What to rank of one sequence: its last row in the batch, in the layers named. */
enum { MODEL_CAPTURE_ENTRIES = 512 };
struct model_capture {
    const int32_t *layers; /* [n_layers] ascending; none: every layer with an indexer */
    int32_t n_layers;
    const int32_t *entries; /* [n_entries] ascending; those the row does not see are left out */
    int32_t n_entries;      /* <= MODEL_CAPTURE_ENTRIES */
    unsigned shadow;        /* bit per enum kern_shadow; the sequence must be shadowed */
    bool lists;
    /* Called once per layer, in the pass; what it points to is valid during the call only. */
    void (*on_row)(void *ctx, const struct model_capture_row *row);
    void *ctx;
};
struct model_ranks {
    const struct kern_rank *ranks; /* [n_entries] */
    float kth, next;               /* NaN where there is none */
};
struct model_capture_row {
    int32_t layer, topk, n_entries;
    int64_t n_visible;
    const int32_t *entries; /* [n_entries] those asked for that the row sees */
    struct model_ranks own, shadows[KERN_SHADOWS]; /* shadows: those asked for */
    unsigned shadow;
    const int32_t *list; /* [n_list] selected entries, ascending; none unless asked for */
    int32_t n_list;
};

struct model_batch {
    const int32_t *ids;          /* [T] */
    int32_t T;                   /* <= max_rows */
    const struct kern_seq *seqs; /* rows of all sequences cover 0 .. T-1 */
    int32_t n_seqs;
    uint8_t *pages;            /* base of the page pool */
    uint32_t n_pages;          /* in the pool: page ids are below it */
    const int32_t *logit_rows; /* [n_logit_rows] ascending; rows that need logits */
    int32_t n_logit_rows;
    float *logits;            /* [n_logit_rows, V]; may be NULL with draws */
    struct model_draw *draws; /* NULL = none, or [n_logit_rows]: a token is drawn from each */
    struct model_tap *tap;    /* NULL = none */
    const struct model_capture *const *captures; /* NULL = none, or [n_seqs], each may be NULL */
    /* Part of the stack only (tests): layers first .. last-1 from these streams [T, hc, D], or from
     * ids when first is 0; both 0 = all. */
    int32_t first_layer, last_layer;
    const void *streams_in;
};

/* Runs the rows through all layers, appends to each sequence's pages and tail, gives logits. 0,
 * TOW_EINVAL (batch broken), TOW_EDEVICE. */
int model_forward(struct model *m, const struct model_batch *b, struct tow_err *err);

/* Before a device is sealed (kern_dev_seal), in this order; both do nothing where device memory is
 * host memory, whose scratch is small.
 *
 * model_warm() takes all memory that passes of up to n_seqs sequences of up to n_rows rows each,
 * and captures, will need at positions up to context, by running such passes over pages that hold
 * nothing: one sequence where n_rows is above 1, else one row each. What is left, less *later, may
 * go to pages.
 * model_warm_steps() runs the decode steps of 1 .. n_seqs sequences, over pages and tails of the
 * pool that nobody uses yet, so that each is kept as a graph; they take *later bytes.
 * TOW_ENOMEM, TOW_EDEVICE. */
struct model_warm {
    int32_t n_seqs, n_rows;
    int64_t context;
};
int model_warm(struct model *m, const struct model_warm *w, uint64_t *later, struct tow_err *err);
int model_warm_steps(struct model *m, int32_t n_seqs, uint8_t *pages, uint8_t *tails,
                     struct tow_err *err);

/* Copies rows row0 .. row0+n-1 of the streams [T, hc, D] (act type) that left the last layer of the
 * last pass to host memory. 0, TOW_EDEVICE. */
int model_read_streams(struct model *m, int32_t row0, int32_t n, void *out);

/* MTP block 0 over the rows of the last pass, or of streams_in: b->ids are the *next* tokens;
 * b->seqs say the same rows and positions. Logits predict the token after next. */
int model_mtp(struct model *m, const struct model_batch *b, struct tow_err *err);

/* Tail header of a sequence: position reached. */
void model_tail_set(uint8_t *tail, int64_t pos, int64_t mtp_pos);
int64_t model_tail_pos(const uint8_t *tail); /* -1: not a tail */
int64_t model_tail_mtp_pos(const uint8_t *tail);

#endif
