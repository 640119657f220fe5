/* kernels/moe/moe_cuda.cuh - what the kernels of the moe op tell each other: sorted pairs, tiles of them,
 * prepared rows, and one product of all experts.
 *
 * Words    A pair is a (row, slot) with an expert; pairs are sorted by expert, then row, then slot. A tile
 *          is up to as many neighbouring pairs of one expert as a block multiplies at once.
 * Rows     A prepared row is bf16, quantized and back, padded with zeros to a multiple of MOE_PAD. A dealt
 *          one has k in the order in which moe_product.cuh's instructions take it: of 128 values, number
 *          32 t + 4 q + 2 h + e lies at 16 q + 8 h + 2 t + e (t, h, e: thread, half and place in a word).
 */
#ifndef KERN_MOE_CUDA_CUH
#define KERN_MOE_CUDA_CUH

#include "kernels/cuda/cuda.cuh"

enum { MOE_PAD = 256, MOE_WIDE = 256 /* pairs of a tile of wide products */ };

struct moe_tile {
    int32_t expert, first, n; /* pairs first .. first+n-1 */
};
/* On the device. */
struct moe_plan {
    int32_t *n_pairs;       /* [1] */
    int32_t *order;         /* [n_pairs]: row * k + slot of a pair */
    int32_t *place;         /* [T * k]: where in order, or -1 */
    struct moe_tile *tiles; /* [max_tiles], those beyond the last have n 0 */
    int32_t max_tiles;      /* of T * k pairs, however they fall */
    int32_t tokens;         /* pairs of a tile */
};

/* One matrix of each expert. */
struct moe_matrix {
    const struct cuda_weight *w; /* device [E] */
    int64_t row_bytes, scale_bytes;
    enum kern_wfmt fmt;
    enum kern_sfmt sfmt;
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
    uint16_t *out; /* [n_pairs, rows] */
};

/* Enqueues the product for tiles of 8, 32 or (4-bit weights) 128 pairs. */
int moe_product_mxfp4(struct kern_stream *s, const struct moe_product *p);
int moe_product_nvfp4(struct kern_stream *s, const struct moe_product *p);
int moe_product_fp8(struct kern_stream *s, const struct moe_product *p);
int moe_product_bf16(struct kern_stream *s, const struct moe_product *p);
/* The same bits by wgmma, where there is: 4-bit weights, x1 NULL, rows a multiple of 8, dealt rows of x,
 * tiles of MOE_WIDE pairs. */
int moe_product_wide(struct kern_stream *s, const struct moe_product *p);

#endif
