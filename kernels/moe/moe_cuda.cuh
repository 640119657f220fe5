/* kernels/moe/moe_cuda.cuh - what the kernels of the moe op tell each other: sorted pairs, tiles of
 * them, prepared rows, and one product of all experts.
 *
 * Words    A pair is a (row, slot) with an expert; pairs are sorted by expert, which gives each its
 *          place. A tile is up to as many neighbouring pairs of one expert as a block
 *          multiplies at once.
 * Rows     A prepared row is bf16, quantized and back, padded with zeros to a multiple of MOE_PAD.
 *          Products by wgmma read images of rows instead, see moe_wgmma.cuh.
 */
#ifndef KERN_MOE_CUDA_CUH
#define KERN_MOE_CUDA_CUH

#include "kernels/cuda/cuda.cuh"

enum {
    MOE_PAD = 256,
    MOE_WIDE = 248,  /* pairs of a tile of products by wgmma: what fits in bf16 */
    MOE_MIDDLE = 64, /* the same where experts have fewer */
    MOE_FEW = 32,    /* or few */
    MOE_CODES = 224, /* the same of products of codes: what fits in registers */
    MOE_NARROW = 32  /* and for few pairs an expert */
};

struct moe_tile {
    int32_t expert, first, n; /* pairs first .. first+n-1 */
};
/* On the device. */
struct moe_plan {
    int32_t *n_pairs; /* [1]: places in use */
    /* [room]: row * k + slot of the pair at a place, -1: none; written where pairs are sorted, or,
     * but for -1, where x becomes images. */
    int32_t *order;
    int32_t *place;         /* [T * k]: where in order, or -1 */
    struct moe_tile *tiles; /* [max_tiles], large ones by size, those beyond the last have n 0 */
    int32_t max_tiles;      /* of T * k pairs, however they fall */
    int32_t tokens;         /* pairs of a tile */
    int32_t align;          /* an expert's first place is a multiple of it: some stay empty */
    int32_t room;           /* places there can be at most, a multiple of align */
};

/* One matrix of each expert. */
struct moe_matrix {
    const struct cuda_weight *w; /* device [E] */
    int64_t row_bytes, scale_bytes;
    enum kern_wfmt fmt;
    enum kern_sfmt sfmt;
    const uint8_t *data, *scale; /* the first expert's; from one to the next: */
    int64_t data_step, scale_step;
};

/* Gate and up: out[i] = round(weight * gate(round(x0 . a), round(x1 . b))), or down:
 * out[i] = round(x0 . a); i counts pairs. */
struct moe_product {
    struct moe_plan plan;
    struct moe_matrix a, b;
    const uint16_t *x0, *x1; /* prepared rows of kp values; x1 NULL: the same */
    bool by_pair;            /* row i is pair i's, else a row of the batch */
    bool input_scaled;       /* sums are multiplied with input_scale (4-bit activations) */
    bool up;
    int32_t rows, k, kp; /* of a matrix: rows, inner width, that padded */
    int32_t slots;       /* k of the op */
    const float *weights;
    float limit;
    uint16_t *out;        /* [room, rows]; of codes, up: two of each, see moe_wgmma.cuh, Gates */
    const uint8_t *image; /* by wgmma: instead of x0 */
    int32_t n_experts;
};

/* Enqueues the product for tiles of 8, 32 or (4-bit weights) 128 pairs. */
int moe_product_mxfp4(struct kern_stream *s, const struct moe_product *p);
int moe_product_nvfp4(struct kern_stream *s, const struct moe_product *p);
int moe_product_fp8(struct kern_stream *s, const struct moe_product *p);
int moe_product_bf16(struct kern_stream *s, const struct moe_product *p);
/* The same bits by wgmma, where there is: 4-bit weights with 16 bytes of scales or a multiple to a
 * row, x1 NULL, rows a multiple of 8, tiles of MOE_FEW, MOE_MIDDLE or MOE_WIDE pairs. */
int moe_product_wide(struct kern_stream *s, const struct moe_product *p);
/* Products of codes by wgmma: rows and k multiples of 128, tiles of MOE_NARROW (_e4m3) or MOE_CODES
 * pairs; mxfp4 placed for it. Other bits than the above, the same at every number of pairs; without
 * the activation and the scales of x's rows. */
int moe_product_e4m3(struct kern_stream *s, const struct moe_product *p);
int moe_product_codes(struct kern_stream *s, const struct moe_product *p);

#endif
