/* kernels/kv_layout.h - where every byte of a sequence's cache lies.
 *
 * Why      Prefill writes it, UCX ships it, decode reads it, the router budgets it: one place
 *          computes it. No other file does arithmetic on page bytes.
 * Holds    A sequence's cache is pages (page p covers tokens p*page_tokens .. (p+1)*page_tokens-1
 *          of all layers) and one tail (what is not page aligned: window rings, compressor states,
 *          position). Parts of a page lie layer-major, each 256-byte aligned; a part is what one
 *          digest covers.
 * Formats  A part of n main entries is n rows of (d-rd) e4m3 + rd bf16, then n rows of (d-rd)/64
 *          ue8m0 scales padded to a multiple of 8 (FP8); or n x d bf16 / f32. A part of n index
 *          keys is n x w/2 codes then n x w/32 ue8m0 (FP4), n x w e4m3 then n f32 scales (FP8), n x
 *          w bf16 / f32. All numbers little-endian. KERN_KV_LAYOUT_VERSION names this;
 *          it is part of the handshake.
 */
#ifndef KERN_KV_LAYOUT_H
#define KERN_KV_LAYOUT_H

#include "kernels/types.h"

#include <stddef.h>

struct tow_err;

#define KERN_KV_LAYOUT_VERSION 1
enum { KERN_KV_MAX_LAYERS = 256, KERN_KV_DEFAULT_PAGE_TOKENS = 256, KERN_KV_MAX_RATIO = 1024 };

/* Index keys that a captured sequence keeps besides those that select, in its companion pages. */
enum kern_shadow { KERN_SHADOW_BF16, KERN_SHADOW_FP8, KERN_SHADOW_FP4, KERN_SHADOWS };
enum kern_ik_fmt kern_shadow_fmt(enum kern_shadow s);

/* Everything the geometry depends on. Layers are the main ones, then the MTP ones. */
struct kern_kv_spec {
    int32_t n_layers;                   /* main + MTP */
    int32_t n_mtp;                      /* of them, at the end */
    int32_t ratios[KERN_KV_MAX_LAYERS]; /* 0; 4 = overlapping, with index; else dense */
    int32_t head_dim, rope_dim, window, index_dim;
    int32_t stream_width; /* hc_mult * hidden_size; for the MTP input state */
    int32_t page_tokens;  /* 0: choose (256, or the next multiple that all ratios divide) */
    enum kern_kv_fmt kv_fmt;
    enum kern_ik_fmt ik_fmt;
};

/* One layer: offsets in a page (pages of ratio 0 layers hold nothing) and in the tail. */
struct kern_kv_layer {
    int32_t ratio;
    int32_t per_page;               /* entries of this layer in a page: page_tokens / ratio, or 0 */
    int64_t main_off, main_bytes;   /* in the page */
    int64_t index_off, index_bytes; /* in the page; bytes 0 where there is no indexer */
    int64_t window_off, window_bytes; /* in the tail: window rows, slot = position mod window */
    int64_t mstate_off, mstate_bytes; /* in the tail: main compressor state, f32 */
    int64_t istate_off, istate_bytes; /* in the tail: index compressor state, f32 */
    int64_t shadow_off[KERN_SHADOWS]; /* in a companion page: index keys of each shadow type but the
                                       * selecting one, whose keys are in the page itself */
};

struct kern_kv_layout {
    struct kern_kv_spec spec;
    int32_t page_tokens;
    int32_t n_parts;      /* per page; at least 1 */
    int64_t page_bytes;   /* multiple of 4096 */
    int64_t tail_bytes;   /* multiple of 4096 */
    int64_t shadow_bytes; /* of a companion page in use; 0: there can be none (they would not fit
                           * into page_bytes, or keys are F32) */
    int64_t stream_off;   /* in the tail: last position's streams, f32 [stream_width]; MTP only */
    struct kern_kv_layer layer[KERN_KV_MAX_LAYERS];
};

/* First bytes of a tail. */
struct kern_kv_tail_head {
    uint64_t magic;  /* KERN_KV_TAIL_MAGIC */
    int64_t pos;     /* tokens in the cache */
    int64_t mtp_pos; /* positions the MTP block has run */
    uint64_t reserved;
};
#define KERN_KV_TAIL_MAGIC UINT64_C(0x3130304c494154) /* "TAIL001" */

/* Computes the whole layout. TOW_EINVAL names the field and its right range. */
int kern_kv_layout_init(struct kern_kv_layout *l, const struct kern_kv_spec *spec,
                        struct tow_err *err);

/* Pages that n_tokens tokens occupy. The router budgets with this very function. */
static inline int64_t kern_kv_pages_for(int64_t n_tokens, int32_t page_tokens)
{
    return (n_tokens + page_tokens - 1) / page_tokens;
}

/* Offset and length of part i (0 .. n_parts-1) of a page, in page order.
 * The last one ends at or before page_bytes. */
void kern_kv_part(const struct kern_kv_layout *l, int32_t i, int64_t *off, int64_t *bytes);

/* Bytes of n stored rows. */
int64_t kern_kv_rows_bytes(enum kern_kv_fmt fmt, int32_t d, int32_t rd, int64_t n);
int64_t kern_ik_rows_bytes(enum kern_ik_fmt fmt, int32_t w, int64_t n);

/* One row i of a part of n rows <-> d floats. Storing FP8 quantizes the first d-rd values per 64
 * (K64) and rounds the rest to bf16; values that were quantized before come back unchanged. */
void kern_kv_store(enum kern_kv_fmt fmt, void *part, int64_t n, int64_t i, const float *x,
                   int32_t d, int32_t rd);
void kern_kv_load(enum kern_kv_fmt fmt, const void *part, int64_t n, int64_t i, float *x, int32_t d,
                  int32_t rd);
void kern_ik_store(enum kern_ik_fmt fmt, void *part, int64_t n, int64_t i, const float *x,
                   int32_t w);
void kern_ik_load(enum kern_ik_fmt fmt, const void *part, int64_t n, int64_t i, float *x,
                  int32_t w);

/* Compressor state of one layer, f32. Overlapping (ratio 4): kv rows [ratio-1][2e], score rows
 * [ratio-1][2e], previous group's first halves kv [ratio][e] and score [ratio][e]. Dense: folded
 * softmax, per channel maximum [e], sum [e], weighted sum [e]. Which rows are live follows from
 * the position; nothing is cleared. */
int64_t kern_kv_state_floats(int32_t ratio, int32_t e);
static inline bool kern_kv_overlaps(int32_t ratio)
{
    return ratio == 4;
}

#endif
