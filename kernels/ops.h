/* kernels/ops.h - the list of ops, their parameters, and the table a back end fills.
 *
 * Why      The forward pass is written once against this table;
 *          CPU and CUDA share every line above it.
 * Rules    An op enqueues on its stream and returns 0 or TOW_EINVAL (shape contract broken); it
 *          allocates nothing the caller can see and its scratch is bounded by T, never by the
 *          context length. T = 0 is legal and does nothing. Pointers are borrowed for the call;
 *          those into a checkpoint (weights, norm vectors, base, scale, ape, sink, bias, tid2eid)
 *          may have any alignment.
 * Numerics `act` names the type of activations and so the mode: KERN_BF16 rounds where it stores
 *          (deployed), KERN_F32 never rounds (exact). All sums in f32. A row's result depends on
 *          that row alone: the order of every sum is fixed by K (products: 16 lanes, lane j adds k
 *          = j, j+16, ... with fma, then a fixed tree), by the sequence's own keys in ascending
 *          order (attention), by ascending expert id (MoE); never on T, on the batch or on the
 *          number of threads. All instruction sets give the same bits.
 * Source   The model's specification; docs/numerics.md names the equation each op implements.
 */
#ifndef KERN_OPS_H
#define KERN_OPS_H

#include "kernels/kv_layout.h"
#include "kernels/types.h"

struct kern_stream;

/* out[t, j, :] = w[ids[t], :] for j < hc. An id outside [0, w.n) gives a zero row. */
struct kern_embed {
    const int32_t *ids;   /* [T] */
    struct kern_weight w; /* [V, D], F32 or BF16 */
    void *out;            /* [T, hc, D] act */
    int32_t T, hc;
    enum kern_dtype act;
};

/* y = w * x * rsqrt(mean(x^2) + eps), rounded once; row by row; y may be x. */
struct kern_rmsnorm {
    const void *x;     /* [T, D] act, rows ld_x elements apart */
    struct kern_vec w; /* [D] */
    void *y;           /* [T, D] act, rows ld_y apart */
    int64_t ld_x, ld_y;
    int32_t T, D;
    float eps;
    enum kern_dtype act;
};

/* y[t, g, :] = quant(x[t, g, :]) . W[g*N .. (g+1)*N-1, :]t; groups = 1 for a plain product. */
struct kern_linear {
    const void *x;        /* [T, groups, K] x_dtype; rows ld_x elements apart */
    struct kern_weight w; /* [groups*N, K] */
    void *y;              /* [T, groups, N] y_dtype; rows ld_y elements apart */
    int64_t ld_x, ld_y;
    int32_t T, N, K, groups;
    enum kern_dtype x_dtype, y_dtype;
    enum kern_act_quant aq;
    bool round_w; /* round the dequantized weight to bf16 (wo_a in deployed mode) */
};

/* Hyper-connection collapse: x = round(sum_j pre_j h_j), with post and comb for the expand. */
struct kern_hc_collapse {
    const void *h;         /* [T, hc, D] act */
    struct kern_weight fn; /* [(2+hc)*hc, hc*D]; for the head [hc, hc*D]; F32 (or BF16) */
    const float *base;     /* [fn.n] */
    const float *scale;    /* [3]; for the head [1] */
    void *x;               /* [T, D] act */
    float *post;           /* [T, hc]; NULL for the head */
    float *comb;           /* [T, hc, hc]; NULL for the head */
    int32_t T, hc, D, iters;
    float hc_eps, norm_eps;
    enum kern_dtype act;
};

/* out_k = round(post_k y + sum_j comb[j][k] h_j); out may be h. */
struct kern_hc_expand {
    const void *y;     /* [T, D] act */
    const void *h;     /* [T, hc, D] act */
    const float *post; /* [T, hc] */
    const float *comb; /* [T, hc, hc] */
    void *out;         /* [T, hc, D] act */
    int32_t T, hc, D;
    enum kern_dtype act;
};

/* What lies between two sub-layers: add, hc_expand in place, hc_collapse of the streams that makes,
 * and rmsnorm, one after the other and with the same bits. */
struct kern_hc_boundary {
    const float *routed; /* NULL, or [T, D]: added to y */
    void *y;             /* [T, D] act, afterwards undefined; NULL: the streams stay as they are */
    void *h;             /* [T, hc, D] act */
    struct kern_weight fn; /* this and the next two as hc_collapse has them */
    const float *base;
    const float *scale;
    struct kern_vec norm; /* [D] */
    void *x;              /* [T, D] act */
    float *post, *comb;   /* as hc_expand reads and then hc_collapse writes them */
    bool head;            /* the collapse is the head's: post and comb stay */
    int32_t T, hc, D, iters;
    float hc_eps, norm_eps; /* norm_eps: also rmsnorm's */
    enum kern_dtype act;
};

/* cos, sin [T, rd/2] of f32(pos) * inv_freq, the product rounded to f32. */
struct kern_rope_table {
    const int32_t *pos;    /* [T] */
    const float *inv_freq; /* [rd/2] */
    float *cos, *sin;      /* [T, rd/2] */
    int32_t T, rd;
};

/* Each head: divide by its RMS (bf16 steps when act is BF16: q^2, mean, mean+eps, rsqrt and product
 * each rounded; f32 else), then rotate its last rd values; in place. norm false: rotation only.
 * inverse: negated angle. */
struct kern_heads_rope {
    void *q;                /* [T, H, d] act */
    const float *cos, *sin; /* [T, rd/2] */
    int32_t T, H, d, rd;
    float eps;
    bool norm, inverse;
    enum kern_dtype act;
};

/* Products of the same rows, none of which reads what another writes: as if one linear followed the
 * other. Before them norm or rope make these rows, in place; or nowhere, if the products do it on
 * the way: what is in x afterwards is one or the other. */
struct kern_linears {
    const struct kern_linear *each;     /* [n], of one x: pointer, type, ld_x, T, groups * K */
    const struct kern_rmsnorm *norm;    /* NULL, or x and y are that x */
    const struct kern_heads_rope *rope; /* NULL, or q is that x, its rows tight; without a norm */
    int32_t n;                          /* a mirrored device takes up to 16 */
};

/* Window keys: rmsnorm(x, w), rotate, and K64 when act is BF16; y may be x. */
struct kern_kv_prep {
    const void *x;          /* [T, d] act */
    struct kern_vec w;      /* [d] */
    const float *cos, *sin; /* [T, rd/2] */
    void *y;                /* [T, d] act */
    int32_t T, d, rd;
    float eps;
    enum kern_dtype act;
};

/* Stores the last min(n_rows, window) rows of each sequence in its ring of `layer`. After
 * attention; or before, if no sequence has more than one row: its place is then one that the row
 * does not see. */
struct kern_window_store {
    const void *kv; /* [T, d] act */
    const struct kern_kv_layout *layout;
    int32_t layer;
    const struct kern_seq *seqs;
    int32_t n_seqs;
    enum kern_dtype act;
};

/* Compressor: feeds each sequence's rows to its state, writes finished entries to its pages.
 * score = gate + ape[pos mod ratio]; pooled by softmax over the group per channel; rounded,
 * rmsnorm, rotated at position w*ratio, then K64 (main) or Hadamard and index quantization
 * (index) when act is BF16, and stored. */
struct kern_compress {
    const float *kv, *gate; /* [T, c*e], c = 2 if overlapping */
    const float *ape;       /* [ratio, c*e] */
    struct kern_vec norm;   /* [e] */
    const float *inv_freq;  /* [rd/2] */
    uint8_t *pages;         /* base of the page pool; page id i at i * layout->page_bytes */
    const struct kern_kv_layout *layout;
    int32_t layer;
    bool index; /* the indexer's compressor: e = index_dim */
    const struct kern_seq *seqs;
    int32_t n_seqs;
    float eps;
    enum kern_dtype act;
    /* NULL, or the layer's other compressor: as if it were the next op, with the same batch and
     * pages. */
    const struct kern_compress *also;
};

/* Index queries: rotate the last rd, and when act is BF16 Hadamard and quantize as fmt (round
 * trip); in place. */
struct kern_index_query {
    void *q;                /* [T, H, w] act */
    const float *cos, *sin; /* [T, rd/2] */
    int32_t T, H, w, rd;
    enum kern_ik_fmt fmt;
    enum kern_dtype act;
};

/* What lies between the products of a layer and its attention: as if one of these followed the
 * other, in this order; NULL: without. */
struct kern_prepare {
    const struct kern_heads_rope *heads;
    const struct kern_kv_prep *kv;
    const struct kern_window_store *store; /* of what kv makes */
    const struct kern_compress *compress;  /* of the same sequences */
    const struct kern_index_query *index;
};

/* Scores every visible entry, keeps each row's topk highest (ties: lower index), ascending.
 * score[t, e] = sum_h wt[t,h] * factor * max(0, q[t,h] . key[e]); visible: e < (pos+1)/ratio. */
struct kern_index_select {
    const void *q;  /* [T, H, w] act */
    const void *wt; /* [T, H] act */
    float factor;   /* w^-0.5 * H^-0.5 */
    const uint8_t *pages;
    const struct kern_kv_layout *layout;
    int32_t layer;
    const struct kern_seq *seqs;
    int32_t n_seqs;
    int32_t T, H;
    int32_t *selected;   /* [T, sel_ld]; ascending, then -1 */
    int32_t *n_selected; /* [T] */
    int64_t sel_ld;      /* >= the largest topk of seqs */
    float *scores;       /* NULL, or [T, score_ld]: every score, -inf where not visible */
    int64_t score_ld;
    const int32_t *score_rows; /* NULL, or the rows whose scores are kept, ascending: */
    int32_t n_score_rows;      /* then scores is [n_score_rows, score_ld] */
    float *margin; /* NULL, or [T]: k-th minus (k+1)-th score, +inf if none is rejected */
    enum kern_dtype act;
};

/* Where entries stand among all that one row sees: rank 1 is the highest score, of equals the lower
 * entry comes first, NaN ranks below everything, so an entry is selected exactly when its rank is
 * at most seq->topk. Counts in one pass over the scores, which never leave the device: those that
 * index_select has left for the row, or else its own, made of q and keys of any type. */
enum { KERN_KEYS_OWN = -1 };
struct kern_rank {
    int32_t rank, equal; /* equal: other visible entries with the same score */
    float score;
};
struct kern_index_rank {
    const float *scores; /* NULL, or the row's by its own keys: then q and wt are not read */
    const void *q;       /* [T, H, w] act, prepared for the type of the keys (kern_index_query) */
    const void *wt;      /* [T, H] act */
    float factor;        /* w^-0.5 * H^-0.5 */
    const uint8_t *pages;
    const struct kern_kv_layout *layout;
    int32_t layer;
    const struct kern_seq *seq; /* one row: n_rows 1 at row0; shadowed if keys are */
    int32_t T, H;
    int keys;               /* KERN_KEYS_OWN, or an enum kern_shadow: the companion pages' */
    const int32_t *entries; /* [n_entries] each visible to the row */
    int32_t n_entries;
    struct kern_rank *ranks; /* [n_entries] */
    float *kth, *next;       /* [1] last score selected, first one not; NaN where there is none */
    enum kern_dtype act;
};

/* Attention of each row over window keys (ascending position) then compressed entries (ascending
 * index): s = q.k * scale; weights exp(s - max) rounded to act before the product, sum unrounded
 * plus exp(sink - max). Positions before the sequence's pos0 come from its ring, later ones from
 * kv. */
struct kern_attention {
    const void *q;     /* [T, H, d] act */
    const void *kv;    /* [T, d] act: this batch's window keys */
    const float *sink; /* [H] */
    void *o;           /* [T, H, d] act */
    const uint8_t *pages;
    const struct kern_kv_layout *layout;
    int32_t layer;
    const struct kern_seq *seqs;
    int32_t n_seqs;
    const int32_t *selected;   /* [T, sel_ld], or NULL: every visible entry */
    const int32_t *n_selected; /* [T] */
    int64_t sel_ld;
    int32_t T, H;
    float scale;
    enum kern_dtype act;
};

/* Attention and what its output goes through: attention, heads_rope, linear and linear once more,
 * one after the other and with the same bits. Each reads what the one before it writes; what only
 * they hand on (attention.o, wo_a.y) is undefined afterwards. */
struct kern_attend {
    struct kern_attention attention;
    struct kern_heads_rope back; /* of attention.o; without a norm */
    struct kern_linear wo_a;     /* of attention.o, its rows tight */
    struct kern_linear wo_b;     /* of wo_a.y */
};

/* Router: scores, choice, weights. experts in descending order of score + bias (ties: lower id),
 * or the table's. */
struct kern_route {
    const float *logits; /* [T, E] */
    const float *bias;   /* [E], NULL in hash layers */
    const void *tid2eid; /* NULL, or [V, k] i64 / i32, any alignment */
    int32_t tid_bytes;   /* 8 or 4 */
    /* [T], hash layers; ids outside [0, V) route nowhere (experts -1, weights 0). */
    const int32_t *ids;
    int32_t T, E, k, V;
    float scale;    /* routed_scaling_factor */
    bool normalize; /* divide by the sum of the chosen; never for softmax */
    enum kern_score score_fn;
    int32_t *experts; /* [T, k] */
    float *weights;   /* [T, k] */
    float *margin;    /* NULL, or [T]: last chosen minus first rejected score + bias */
};

/* Routed experts: out[t] = sum over ascending expert id of expert(x[t]) (each rounded to act),
 * in f32. */
struct kern_moe {
    const void *x;                          /* [T, D] act */
    const int32_t *experts;                 /* [T, k]; -1 = none */
    const float *weights;                   /* [T, k] */
    const struct kern_weight *w1, *w2, *w3; /* [E] matrices [I, D], [D, I], [I, D] */
    float *out;                             /* [T, D] */
    int32_t T, D, I, E, k;
    float limit; /* 0 = no clamp */
    enum kern_act_quant aq;
    enum kern_dtype act;
};

/* y = round(silu(min(g, limit)) * clamp(u, +-limit)); y may be g. */
struct kern_swiglu {
    const void *g, *u; /* [T, I] act */
    void *y;           /* [T, I] act */
    int32_t T, I;
    float limit; /* 0 = no clamp */
    enum kern_dtype act;
};

/* All of a layer's experts: these ops one after the other, with the same bits. What only they hand
 * on (gate.y, w1.y, w3.y, swiglu.y) is undefined afterwards. */
struct kern_ffn {
    struct kern_linear gate; /* to route.logits */
    struct kern_route route; /* to moe.experts, moe.weights */
    struct kern_moe moe;
    struct kern_linear w1, w3; /* the shared expert's, to swiglu.g and swiglu.u */
    struct kern_swiglu swiglu; /* to w2.x */
    struct kern_linear w2;
};

/* y = round(a + b): a f32, b act, y act; n elements (routed sum + shared expert). */
struct kern_add {
    const float *a;
    const void *b;
    void *y;
    int64_t n;
    enum kern_dtype act;
};

/* MTP input: out[t, j] = round(e[t] + g[t, j]);
 * e = lin(.., e_proj), g = lin(.., h_proj), both rounded. */
struct kern_mtp_mix {
    const void *e; /* [T, D] act */
    const void *g; /* [T, hc, D] act */
    void *out;     /* [T, hc, D] act; may be g */
    int32_t T, hc, D;
    enum kern_dtype act;
};

/* One token from each row of logits, by the row's own parameters. In this order: edits; without a
 * temperature the largest (ties: lowest id), as where the largest is +inf; else each token has the
 * mass exp((x - max) / temperature), a whole number of 2^-40 (kernels/sample/sample.h), so that no
 * sum depends on its order; of them stay the top_k largest, of these the smallest set of largest
 * that reaches top_p of their mass, of these those of at least min_p times the largest's. u's share
 * of what is left, by ascending id, is drawn. Log-probabilities are of the logits before edits. The
 * same bits on every back end. */
enum { KERN_SAMPLE_TOP = 20, KERN_SAMPLE_MAX_V = 1 << 22 };
struct kern_sample_row {
    double u;           /* 0 <= u < 1 */
    float temperature;  /* <= 0: the largest */
    float top_p, min_p; /* top_p >= 1, min_p <= 0: off */
    float repetition;   /* factor; 0 or 1: off */
    float presence, frequency;
    int32_t top_k;      /* <= 0: off */
    int32_t n_logprobs; /* < 0: none; else with that many of the largest, at most KERN_SAMPLE_TOP */
    int32_t edit0, n_edits; /* this row's part of edits */
};
/* What a row changes of one logit: penalties if the token was generated before (count > 0): divided
 * by the repetition factor if positive, else multiplied; less presence; less frequency * count;
 * then bias is added; -inf bans. NaN from these is -inf. */
struct kern_edit {
    int32_t id; /* once a row; outside [0, V): nothing */
    int32_t count;
    float bias;
    float was; /* the op's own */
};
struct kern_choice {
    int32_t rc; /* TOW_ENUMERIC: NaN in the row, or nothing above -inf; then id is -1, all else 0 */
    int32_t id;
    float logprob; /* 0 if none was asked for */
    int32_t n_top;
    int32_t top_ids[KERN_SAMPLE_TOP]; /* falling; ties: lower id */
    float top_logprobs[KERN_SAMPLE_TOP];
};
struct kern_sample {
    float *logits;                      /* [T, V]; edited in place and put back */
    const struct kern_sample_row *rows; /* [T] */
    struct kern_edit *edits;            /* [n_edits] of all rows */
    struct kern_choice *choices;        /* [T] */
    int32_t T, V, n_edits;
};

/* The list; it makes the table's members and drives the parity tests. */
/* clang-format off */
#define KERN_OPS(X)                                                                                \
    X(embed) X(rmsnorm) X(linear) X(linears) X(hc_collapse) X(hc_expand) X(hc_boundary)            \
    X(rope_table) X(heads_rope) X(kv_prep) X(window_store) X(compress) X(index_query) X(prepare)   \
    X(index_select) X(index_rank) X(attention) X(attend) X(route) X(moe) X(swiglu) X(ffn) X(add)   \
    X(mtp_mix) X(sample)
/* clang-format on */

struct kern_ops {
    const char *name;
#define X(op) int (*op)(struct kern_stream * s, const struct kern_##op *p);
    KERN_OPS(X)
#undef X
};

#define X(op) int kern_##op##_check(const struct kern_##op *p);
KERN_OPS(X)
#undef X

extern const struct kern_ops kern_cpu;

#endif
