/* kernels/cuda/cuda.cuh - what every CUDA op stands on: the stream, scratch, sequences and placed
 * weights on the device, and how a launch ends.
 *
 * Why      Ops come with host arrays of sequences and weights; here is where their copies are
 *          found.
 * Rules    An op is `extern "C" int kern_<op>_cuda()` of a stream s and a struct kern_<op>; its
 *          contract was checked before (table.c). T = 0 returns 0, for an empty grid is no launch.
 *          Else it enqueues on s->cu, never waits for the device (batch metadata of a foreign array
 *          apart) and ends with `return cuda_done(s, "<op>")`.
 *          The shape of a launch depends on T, n_seqs and sizes that do not change while a model is
 *          open, never on a sequence's length or position: those are read on the device, so that a
 *          captured graph can be launched again for other positions.
 *          A row's result depends on that row alone: no order of a sum depends on T, n_seqs or the
 *          grid.
 * Build    --fmad=false: a fused operation is written fmaf(), as on the CPU. Every kernel compiles
 *          for sm_90a and sm_120a (99 KiB of shared memory a block, no wgmma, no clusters there).
 */
#ifndef KERN_CUDA_CUH
#define KERN_CUDA_CUH

extern "C" {
#include "common/base/err.h"
#include "kernels/cuda/table.h"
#include "kernels/dev_impl.h"
#include "kernels/kv_layout.h"
#include "kernels/ops.h"
#include "kernels/types.h"
}
#include <cuda_runtime.h>

/* A sequence of the batch, on the device. */
struct cuda_seq {
    int64_t pos0;
    const uint32_t *page_ids; /* device */
    uint8_t *tail;            /* device */
    int32_t row0, n_rows;
    int32_t topk;
    int32_t page_step; /* 2 where each page is followed by its companion, else 1 */
};
/* The sequences of a pass. */
struct cuda_batch {
    const struct cuda_seq *seqs; /* device [n_seqs] */
    const int32_t *row_seq;      /* device [T]: the sequence of a row */
    int32_t n_seqs, T;
};

/* One weight of a placed array, on the device. */
struct cuda_weight {
    const uint8_t *data, *scale; /* as kern_weight, but aligned, see kern_dev_place in dev.cu */
    float scale2, input_scale;
};

enum cuda_slot { /* scratch; an op that calls another's helper uses slots of its own */
                 CUDA_SLOT_ROWS, /* quantized or widened activation rows of products */
                 CUDA_SLOT_OP,   /* of the op itself */
                 CUDA_SLOT_OP2,
                 CUDA_SLOT_OP3,
                 CUDA_SLOT_SPLIT, /* partial results of split sums */
                 CUDA_N_SLOTS
};

struct cuda_own; /* dev.cu's */
struct kern_stream {
    struct kern_head head; /* first */
    cudaStream_t cu;
    int n_sm;       /* multiprocessors */
    int arch;       /* 90 or 120: major * 10 + minor, rounded down to what was compiled */
    int max_shared; /* bytes of shared memory a block may ask for */
    int number;     /* of the device */
    struct cuda_own *own;
};

/* Device scratch of one slot, 256-byte aligned, kept and grown between calls, contents undefined;
 * NULL (and an error kept for cuda_done) when there is none, or none may be taken any more
 * (kern_dev_seal). Growing waits for the stream. It gets a quarter more than was asked for:
 * model_warm() counts on that. */
void *cuda_scratch(struct kern_stream *s, enum cuda_slot slot, size_t bytes);

/* The batch of this array of sequences, on the device until the next op. TOW_ENOMEM,
 * TOW_EDEVICE. */
int cuda_batch_of(struct kern_stream *s, const struct kern_seq *seqs, int32_t n_seqs,
                  struct cuda_batch *out);

/* Device table [n] of an array placed by kern_dev_place(); NULL: it was not. */
const struct cuda_weight *cuda_weights_of(struct kern_stream *s, const struct kern_weight *w);

/* Are the codes of this placed array of MXFP4 in the form for products of codes? */
bool cuda_placed_e4m3(struct kern_stream *s, const struct kern_weight *w);
/* Enqueues that they are in bf16's from now on: once, for ops that cannot have products of codes.
 * TOW_EINVAL: not placed; or a graph is being captured, which never comes to that, for what is
 * captured has run before. */
int cuda_place_for_bf16(struct kern_stream *s, const struct kern_weight *w);

/* A host array [n] of bytes to the device, until the next call of this function; NULL: no memory.
 * For small arguments such as a list of rows. */
const void *cuda_send(struct kern_stream *s, const void *host, size_t bytes);

/* 0, or TOW_EDEVICE for anything that has failed on this stream, or TOW_ENOMEM in this pass. */
int cuda_done(struct kern_stream *s, const char *op);

/* Lets a kernel ask for up to `bytes` of dynamic shared memory, less what it holds statically and
 * no more than the device has. raised: by number of the device, so that it is asked for once on
 * each. */
enum { CUDA_MAX_DEVICES = 64 };
void cuda_raise_shared(const void *kernel, int bytes, bool *raised);
/* Before each launch, on the device that is the thread's current one. */
#define CUDA_SHARED(kernel, bytes)                                                                 \
    do {                                                                                           \
        static bool raised_[CUDA_MAX_DEVICES];                                                     \
        cuda_raise_shared((const void *)kernel, (int)(bytes), raised_);                            \
    } while (0)

/* Launches a kernel that may begin before the one before it on the stream has ended: all of its
 * threads call cuda_await() before they read what other kernels write, or write anything. Batch
 * metadata and weights may be read earlier. With cuda_hurry() a kernel says that the next one may
 * begin once all blocks have said so; what only saves launching is lost nowhere else, for the next
 * one waits in cuda_await(). */
template <typename... P, typename... A>
static inline void cuda_launch_early(struct kern_stream *s, void (*kernel)(P...), dim3 grid,
                                     unsigned threads, size_t shared, A... args)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared;
    c.stream = s->cu;
    c.attrs = &early;
    c.numAttrs = cuda_early_launches ? 1 : 0;
    cudaLaunchKernelEx(&c, kernel, P(args)...);
}
static __device__ __forceinline__ void cuda_await(void)
{
    cudaGridDependencySynchronize();
}
static __device__ __forceinline__ void cuda_hurry(void)
{
    cudaTriggerProgrammaticLaunchCompletion();
}

static inline int64_t cuda_ceil(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

#endif
