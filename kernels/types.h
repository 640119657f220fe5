/* kernels/types.h - element types, stored weight formats, and the views that ops take.
 *
 * Why      Every op of both back ends speaks of tensors in these terms and no others.
 * Letters  T rows (tokens of all sequences of a batch), H heads, d head width, D hidden width, K
 *          inner width of a product, N outer width, E experts, rd rotated width (the last rd of d).
 */
#ifndef KERN_TYPES_H
#define KERN_TYPES_H

#include <stdbool.h>
#include <stdint.h>

/* Activations. F32 in exact mode, BF16 in deployed mode: storing to BF16 is the rounding point. */
enum kern_dtype { KERN_F32, KERN_BF16 };

static inline int kern_dtype_bytes(enum kern_dtype t)
{
    return t == KERN_F32 ? 4 : 2;
}

/* How a weight matrix is stored in a checkpoint; see docs/numerics.md, number formats. */
enum kern_wfmt {
    KERN_W_F32,
    KERN_W_BF16,
    KERN_W_FP8,   /* e4m3, one scale per 128 x 128 block (last blocks may be partial) */
    KERN_W_MXFP4, /* e2m1, two a byte (even index low), one ue8m0 scale per 32 along K */
    KERN_W_NVFP4, /* e2m1, one e4m3 scale per 16 along K, times scale2 */
};
enum kern_sfmt { KERN_S_NONE, KERN_S_UE8M0, KERN_S_F32, KERN_S_E4M3 };

/* A matrix [n, k] used as y = x . Wt. Points into the mapped checkpoint; never owned.
 * Alignment: data of any alignment is legal (safetensors promises none). */
struct kern_weight {
    const void *data;  /* borrowed from the map; NULL = absent */
    const void *scale; /* borrowed; by sfmt; [ceil(n/128), ceil(k/128)] or [n, k/32 or k/16] */
    enum kern_wfmt fmt;
    enum kern_sfmt sfmt;
    int32_t n, k;
    int64_t row_bytes;       /* from one row of data to the next */
    int64_t scale_row_bytes; /* from one row of scale to the next */
    float scale2;            /* NVFP4: second scale; else 1 */
    float input_scale;       /* NVFP4 with 4-bit activations; else 0 = absent */
};

/* A vector of n values in F32 or BF16 (norm weights); borrowed from the map. */
struct kern_vec {
    const void *data;
    enum kern_dtype dtype;
    int32_t n;
};

/* What happens to activations before a product. */
enum kern_act_quant {
    KERN_AQ_NONE,  /* as they are */
    KERN_AQ_A128,  /* e4m3 per 128 along K, power-of-two scale, amax floor 1e-4 */
    KERN_AQ_NVFP4, /* e2m1 per 16 with e4m3 scale times the weight's input_scale */
};

/* Router score function. */
enum kern_score { KERN_SCORE_SQRTSOFTPLUS, KERN_SCORE_SIGMOID, KERN_SCORE_SOFTMAX };

/* Stored form of window keys and main compressed entries (width d, last rd rotated). */
enum kern_kv_fmt { KERN_KV_FP8, KERN_KV_BF16, KERN_KV_F32 };
/* Stored form of index keys. */
enum kern_ik_fmt { KERN_IK_FP4, KERN_IK_FP8, KERN_IK_BF16, KERN_IK_F32 };

/* One sequence's part of a batch: n_rows consecutive tokens that start at position pos0 and lie in
 * rows row0 .. row0+n_rows-1 of every [T, ...] tensor.
 * A sequence appears at most once in a batch. */
struct kern_seq {
    int32_t row0, n_rows;
    int64_t pos0;
    /* Borrowed [n_pages]; page p holds tokens p*page_tokens .. ; enough for pos0+n_rows. */
    const uint32_t *page_ids;
    int32_t n_pages;
    uint8_t *tail; /* borrowed; layout->tail_bytes long */
    int32_t topk;  /* index_topk of this sequence */
    bool shadowed; /* each page is followed in page_ids by its companion: the same tokens' index
                    * keys in other types (layout->shadow_bytes); n_pages counts both */
};

#endif
