/* kernels/attn/index_score.cuh - scores of all that rows of a batch see; for selection and ranks. */
#ifndef KERN_ATTN_INDEX_SCORE_CUH
#define KERN_ATTN_INDEX_SCORE_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/kv.cuh"

/* Passed to kernels by value. */
struct index_score {
    const void *q;  /* [T, H, w] act */
    const void *wt; /* [T, H] act */
    float factor;
    struct cuda_kv kv;
    enum kern_ik_fmt fmt; /* of the keys */
    int64_t key_off;      /* their part in a page */
    int32_t companion;    /* 1: in the companion pages */
    struct cuda_batch b;
    int32_t H;
    enum kern_dtype act;
    int32_t row0, n_rows; /* rows to score; all below b.T */
    bool all;             /* also of rows that see no more than they keep */
    float *out;           /* [n_rows, ld]; what a row does not see is not written */
    int64_t ld;
};

void index_score_launch(struct kern_stream *s, const struct index_score *p);

/* Entries that row t of sequence q sees. */
static __device__ __forceinline__ int32_t dev_visible(const struct cuda_kv &kv,
                                                      const struct cuda_seq &q, int32_t t)
{
    return (int32_t)((q.pos0 + (t - q.row0) + 1) / kv.y.ratio);
}

#endif
