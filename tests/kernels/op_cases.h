/* tests/kernels/op_cases.h - random cases for every op of the table, run on any back end.
 *
 * The op list makes the table: an op without a case does not compile. A case builds its inputs from
 * a seed, runs the op in pieces, checks what can be said of the result alone, and leaves its output
 * bytes in the run, to be compared with another run's: of another instruction set, thread count,
 * piece size or back end. Inputs are allocated to size and their gaps hold NaN, outputs lie between
 * guards.
 */
#ifndef TESTS_KERNELS_OP_CASES_H
#define TESTS_KERNELS_OP_CASES_H

#include "kernels/ops.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How a piece of output is compared with that of a back end which sums in another order. */
enum op_view {
    OP_VIEW_EXACT, /* ids and counts: equal */
    OP_VIEW_FLOAT, /* numbers of elem bytes: near */
    OP_VIEW_NONE,  /* not at all: the case itself has said all (choices among near scores, stored
                    * bytes; those are seen as numbers in another piece) */
};
struct op_piece {
    size_t at, n; /* bytes in out */
    int elem;     /* 1; 2 = bf16, 4 = f32 */
    enum op_view view;
};

struct op_run {
    const struct kern_ops *ops;
    struct kern_stream *s;
    int piece; /* rows of a call; 0 = all, -1 = random */
    int variant;
    bool twin;         /* the CPU: orders of sums are those that docs/numerics.md gives it */
    uint64_t rng, cut; /* inputs; piece sizes */
    uint8_t *out;      /* owned by the caller of op_case_run(), who frees it */
    size_t n, room;
    struct op_piece pieces[16];
    int n_pieces;
    void *mem[256]; /* freed with the run */
    int n_mem;
    bool odd; /* NaN or infinity is in the inputs on purpose */
    bool f32; /* nothing is rounded to bf16 on the way */
    /* Told of the page pool of a case, or NULL: a mirror must know its size. */
    void (*on_pool)(void *ctx, const void *pages, int64_t bytes);
    void *ctx;
};

struct op_case {
    const char *name;
    void (*run)(struct op_run *r);
};
/* clang-format off */
enum {
#define X(op) OP_CASE_##op,
    KERN_OPS(X)
#undef X
    N_OP_CASES
};
/* clang-format on */
extern const struct op_case op_cases[N_OP_CASES];
enum { OP_VARIANTS = 24 };
int op_case_variants(const struct op_case *c);

/* ops, s, piece, variant, twin, cut and on_pool are the caller's; asserts (cmocka) on what the case
 * itself can tell. */
void op_case_run(const struct op_case *c, struct op_run *r);

#endif
