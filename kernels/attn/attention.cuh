/* kernels/attn/attention.cuh - what the attention kernels share: a row's keys, in their order, and
 * where each of them lies. */
#ifndef KERN_ATTN_ATTENTION_CUH
#define KERN_ATTN_ATTENTION_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/kv.cuh"

struct attn_job {
    const void *q, *kv;
    const float *sink;
    void *o;
    struct cuda_kv k;
    struct cuda_batch b;
    const int32_t *selected, *n_selected;
    int64_t sel_ld;
    int32_t T, H;
    float scale;
    enum kern_dtype act;
    /* NULL, or angles [T, rd / 2]: o is what wo_a reads, its heads turned back and each 64 columns
     * in the order of slots (cuda_quant.slots). Only for attention_wgmma(), and attention_few() of
     * more rows than find room at once. */
    const float *cos, *sin;
};

/* attention_wgmma_cuda.cu, attention_few_cuda.cu, attention_spread_cuda.cu: bf16 activations, keys
 * of 448 e4m3 (or bf16) and 64 bf16 values; q, kv, o and pages 16-byte aligned. The second: for
 * rows so few that two CTAs for each 64 heads of a row find room at once, or, one after the other,
 * ATTN_PAIR_ROWS times; the third: that eight do at once; room: device memory of the call's,
 * ATTN_SPREAD_ROOM bytes for each CTA. All give the same bits.
 * Enqueue; false: the driver refuses to describe the queries. */
bool attention_wgmma(struct kern_stream *s, const struct attn_job *j);
bool attention_few(struct kern_stream *s, const struct attn_job *j);
bool attention_spread(struct kern_stream *s, const struct attn_job *j, void *room);
enum {
    ATTN_SPREAD_ROOM = 8448,
    ATTN_PAIR_ROWS = 3,
};

/* attention_cuda.cu: what kern_attention_cuda() does and returns. With `back` (or NULL), where the
 * kernel that takes the rows can, o becomes what attn_job says of angles; *slots: it did. */
int attention_run(struct kern_stream *s, const struct kern_attention *p,
                  const struct kern_heads_rope *back, bool *slots);

/* Stored keys of a batch's sequences in bf16, in scratch of the op: of each sequence its ring by
 * slots, then its entries in their order. */
struct attn_wide {
    uint8_t *rows;  /* of 512 values each; NULL: none */
    int32_t *first; /* [n_seqs] a sequence's first row; [n_seqs]: the number of all */
    int32_t room;   /* rows there is room for; where first[n_seqs] is more, none is there */
};
/* attention_widen_cuda.cu: keys as above. Enqueues; w->rows is NULL where rows are too few for
 * it. False: no memory. */
bool attention_widen(struct kern_stream *s, const struct attn_job *j, struct attn_wide *w);

/* One row's keys. */
struct attn_keys {
    struct cuda_seq q;
    int64_t from; /* window: positions from this on */
    int32_t n_window, n;
    const int32_t *selected; /* entries, or NULL: 0, 1, ... */
};
/* All but `q` of row t of a sequence whose row row0 is position pos0. */
static __device__ __forceinline__ struct attn_keys
attn_keys_at(const struct attn_job &j, int32_t t, int64_t pos0, int32_t row0, int32_t n_selected)
{
    struct attn_keys ks;
    const int64_t pos = pos0 + (t - row0);
    ks.from = pos - j.k.window + 1 > 0 ? pos - j.k.window + 1 : 0;
    ks.n = ks.n_window = (int32_t)(pos - ks.from + 1);
    ks.selected = NULL;
    if (j.k.y.ratio && j.selected) {
        ks.selected = j.selected + t * j.sel_ld;
        ks.n += n_selected;
    } else if (j.k.y.ratio) {
        ks.n += (int32_t)((uint32_t)(pos + 1) / (uint32_t)j.k.y.ratio); /* positions: below 2^31 */
    }
    return ks;
}
/* False: row t belongs to no sequence. */
static __device__ __forceinline__ bool attn_keys_of(const struct attn_job &j, int32_t t,
                                                    struct attn_keys *ks)
{
    const int32_t i = j.b.row_seq[t];
    if (i < 0) return false;
    const struct cuda_seq q = j.b.seqs[i];
    *ks = attn_keys_at(j, t, q.pos0, q.row0, j.k.y.ratio && j.selected ? j.n_selected[t] : 0);
    ks->q = q;
    return true;
}

/* Where a key lies: row `row` of a stored part of `n` rows, or of the batch's kv (n = 0). */
struct attn_place {
    const uint8_t *part;
    int64_t row;
    int32_t n;
};
/* Of key i of the window. */
static __device__ __forceinline__ struct attn_place
attn_window_place(const struct attn_job &j, const struct attn_keys &ks, int32_t i)
{
    const int64_t pos = ks.from + i;
    if (pos >= ks.q.pos0) return {(const uint8_t *)j.kv, ks.q.row0 + (pos - ks.q.pos0), 0};
    return {ks.q.tail + j.k.y.window_off, (uint32_t)pos % (uint32_t)j.k.window, j.k.window};
}
static __device__ __forceinline__ struct attn_place
attn_place_of(const struct attn_job &j, const struct attn_keys &ks, int32_t i)
{
    if (i < ks.n_window) return attn_window_place(j, ks, i);
    /* Positions and entries are below 2^31: short divisions. */
    const uint32_t e = (uint32_t)(ks.selected ? ks.selected[i - ks.n_window] : i - ks.n_window);
    const uint32_t per_page = (uint32_t)j.k.y.per_page;
    const int64_t page = ks.q.page_ids[(int64_t)(e / per_page) * ks.q.page_step];
    return {j.k.pages + page * j.k.page_bytes + j.k.y.main_off, e % per_page, j.k.y.per_page};
}

#endif
