/* kernels/cuda/table.c - the op table of the CUDA back end: each op's contract first, then its
 * kernels. */
#ifdef TOW_CUDA
#include "kernels/cuda/table.h"

#include "common/base/err.h"

#define X(op) int kern_##op##_cuda(struct kern_stream *s, const struct kern_##op *p);
KERN_OPS(X)
#undef X

#define X(op)                                                                                      \
    static int op##_cuda(struct kern_stream *s, const struct kern_##op *p)                         \
    {                                                                                              \
        int rc = kern_##op##_check(p);                                                             \
        return rc < 0 ? rc : kern_##op##_cuda(s, p);                                               \
    }
KERN_OPS(X)
#undef X

const struct kern_ops kern_cuda = {.name = "cuda",
#define X(op) .op = op##_cuda,
                                   KERN_OPS(X)
#undef X
};
#endif
