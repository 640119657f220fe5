/* ctl/numerics_impl.h - what the files of the audit share: the opened model, the activations of the
 * sample prompt, the making of rows, and the references in double. */
#ifndef CTL_NUMERICS_IMPL_H
#define CTL_NUMERICS_IMPL_H

#include "common/model/forward.h"
#include "deploy/ctl/numerics.h"
#include "kernels/dev.h"
#include "kernels/ops.h"

enum {
    CTL_NUM_LAYERS = 3,    /* audited of each kind: first, middle, last */
    CTL_NUM_ROWS = 8,      /* rows of products, experts, attention that are computed in double */
    CTL_NUM_COLUMNS = 256, /* outputs of a product that are */
};

/* One captured tensor: its last n_rows rows. */
struct ctl_num_tensor {
    int32_t layer;
    const char *name; /* of the tap */
    bool all;         /* every row of the prompt; else the last few */
    enum model_elem elem;
    int64_t width;
    uint8_t *data; /* [rows, width]; owned */
};

/* The audit. Memory of ops comes from hold(), which also gives it back. */
struct ctl_num {
    const struct ctl_numerics *n;
    struct ctl_numerics_report *out;
    struct model *m;
    const struct model_weights *w;
    const struct model_shape *s;
    struct kern_dev *dev;
    const struct kern_ops *ops;
    struct kern_stream *stream;
    float *inv_freq[2]; /* 0 plain, 1 layers with a compressor; held */
    int32_t *prompt;    /* [T]; held */
    int32_t T;
    int32_t n_last;                               /* rows kept of a tensor that is not kept whole */
    int32_t layers[3 * CTL_NUM_LAYERS], n_layers; /* audited, ascending */
    struct ctl_num_tensor *tensors;               /* owned */
    int32_t n_tensors;
    int64_t chunk_pos0; /* of the pass that is being captured */
    void **held;
    size_t n_held;
    uint64_t rng;
    bool no_memory;
};

/* Zeroed device memory until the audit ends, or until the mark is given back. NULL is remembered in
 * no_memory. */
void *ctl_num_hold(struct ctl_num *c, int64_t n, size_t elem);
size_t ctl_num_mark(const struct ctl_num *c);
void ctl_num_release(struct ctl_num *c, size_t mark);

double ctl_num_random(struct ctl_num *c); /* in [-1, 1) */

/* Adds a row. detail may be NULL. */
void ctl_num_row(struct ctl_num *c, const char *name, double value, double bound, const char *what,
                 const char *meaning, const char *detail_fmt, ...)
    __attribute__((format(printf, 7, 8)));
void ctl_num_row_at_least(struct ctl_num *c, const char *name, double value, double bound,
                          const char *what, const char *meaning, const char *detail_fmt, ...)
    __attribute__((format(printf, 7, 8)));

/* Runs an op and waits for it. */
#define CTL_NUM_OP(c, rc, op, ...)                                                                 \
    do {                                                                                           \
        struct kern_##op op_args = {__VA_ARGS__};                                                  \
        if ((rc) == 0 && (c)->no_memory) (rc) = TOW_ENOMEM;                                        \
        if ((rc) == 0) (rc) = (c)->ops->op((c)->stream, &op_args);                                 \
        if ((rc) == 0) (rc) = kern_stream_sync((c)->stream);                                       \
    } while (0)

/* A captured tensor, or NULL; *first is the position of its first row. */
const struct ctl_num_tensor *ctl_num_find(const struct ctl_num *c, int32_t layer, const char *name,
                                          int64_t *first);
/* Element i of the row at position pos. */
double ctl_num_at(const struct ctl_num *c, const struct ctl_num_tensor *t, int64_t pos, int64_t i);
/* The row itself. */
const void *ctl_num_row_of(const struct ctl_num *c, const struct ctl_num_tensor *t, int64_t pos);

/* A layout like the model's with other formats of keys. */
int ctl_num_layout(const struct ctl_num *c, struct kern_kv_layout *l, enum kern_kv_fmt kv,
                   enum kern_ik_fmt ik, struct tow_err *err);

/* The sections; each adds its rows. */
int ctl_num_topk(struct ctl_num *c, struct tow_err *err);
int ctl_num_index(struct ctl_num *c, struct tow_err *err);
int ctl_num_mhc(struct ctl_num *c, struct tow_err *err);
int ctl_num_products(struct ctl_num *c, struct tow_err *err);
int ctl_num_experts(struct ctl_num *c, struct tow_err *err);
int ctl_num_scaling(struct ctl_num *c, struct tow_err *err);
int ctl_num_rope(struct ctl_num *c, struct tow_err *err);
int ctl_num_kv(struct ctl_num *c, struct tow_err *err);
int ctl_num_flow(struct ctl_num *c, struct tow_err *err);

/* ------------------------------------------------------------------ numerics_ref.c */

double ctl_ref_vec(const struct kern_vec *v, int64_t i);
/* Row n of a stored weight, dequantized. */
void ctl_ref_weight_row(const struct kern_weight *w, int64_t n, double *out);
double ctl_ref_bf16(double x); /* rounded to float, then to bf16 */
double ctl_ref_tf32(double x); /* ten bits of mantissa */

/* The last rd of x [n] rotated by position pos; pairs are neighbours. sign -1: back. */
void ctl_ref_rotate(double *x, int32_t n, int32_t rd, int64_t pos, const float *inv_freq,
                    double sign);
void ctl_ref_rmsnorm(double *x, int64_t n, const struct kern_vec *w, double eps);

/* Entry w of a compressor from kv and gate rows [T, c*e] (before the position bias): pooled,
 * normed, rotated; not quantized. rounded: to bf16 where the deployed model rounds. */
void ctl_ref_entry(const struct model_compressor *comp, int32_t ratio, const float *kv,
                   const float *gate, int64_t w, int32_t e, int32_t rd, const float *inv_freq,
                   double eps, bool rounded, double *out);
/* Index keys and queries as stored: Hadamard, bf16, codes of the format, dequantized. */
void ctl_ref_index_round(double *x, int32_t n, enum kern_ik_fmt fmt);
/* Activations in front of a quantized product, in place. */
void ctl_ref_aq(double *x, int64_t n, enum kern_act_quant aq, double input_scale);

/* Relative root mean square distance, and cosine, of a to b. */
double ctl_ref_rel(const double *a, const double *b, int64_t n);
double ctl_ref_cos(const double *a, const double *b, int64_t n);

#endif
