/* kernels/attn/attend_cuda.cu - attention and what its output goes through.
 *
 * Where wo_a reads its rows in the order of slots, attention of many rows stores them so, turned
 * back: between the two there is no pass then (of a chunk of 8192, 1 GiB that was read and
 * written).
 */
#include "kernels/attn/attention.cuh"
#include "kernels/gemm/product.cuh"

extern "C" int kern_linears_cuda(struct kern_stream *s, const struct kern_linears *p);

extern "C" int kern_attend_cuda(struct kern_stream *s, const struct kern_attend *p)
{
    bool slots;
    const bool wanted = cuda_linear_reads_slots(s, &p->wo_a);
    int rc = attention_run(s, &p->attention, wanted ? &p->back : NULL, &slots);
    if (rc < 0) return rc;
    const struct kern_linears a = {.each = &p->wo_a, .rope = &p->back, .n = 1},
                              b = {.each = &p->wo_b, .n = 1};
    rc = slots ? cuda_linear_of_slots(s, &p->wo_a) : kern_linears_cuda(s, &a);
    return rc < 0 ? rc : kern_linears_cuda(s, &b);
}
