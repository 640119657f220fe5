/* kernels/cpu/team.h - the CPU stream: a team of threads and the scratch memory of ops.
 *
 * Why      Every CPU op splits its work into parts; which thread runs which part never changes a
 *          bit.
 * Owner    One thread drives a stream; it takes parts too. Workers spin for a tenth of a
 *          millisecond or two between ops, then sleep.
 */
#ifndef KERN_CPU_TEAM_H
#define KERN_CPU_TEAM_H

#include "kernels/dev.h"

/* Each contains those before it. All but AMX give the same bits; AMX has an order of its own for
 * sums of products. */
enum kern_cpu_isa { KERN_CPU_C, KERN_CPU_AVX2, KERN_CPU_AVX512, KERN_CPU_AMX, KERN_CPU_N_ISA };

/* Best instruction set of this machine, the operating system's support included. */
enum kern_cpu_isa kern_cpu_best_isa(void);

/* As kern_dev_open for the CPU, with a given instruction set; TOW_EINVAL where the machine lacks
 * it. */
int kern_dev_open_cpu(struct kern_dev **out, int n_threads, enum kern_cpu_isa isa,
                      struct tow_err *err);

enum kern_cpu_isa kern_stream_isa(const struct kern_stream *s);
int kern_stream_threads(const struct kern_stream *s);

/* Runs fn for every part 0 .. n_parts-1 on the team; thread is 0 .. threads-1. Returns when all are
 * done. */
typedef void kern_part_fn(void *arg, int64_t part, int thread);
void kern_parallel(struct kern_stream *s, int64_t n_parts, kern_part_fn *fn, void *arg);

/* Scratch of one slot, 64-byte aligned, kept and grown between calls; contents undefined. NULL when
 * there is no memory. Ops that call others use different slots. */
enum kern_slot {
    KERN_SLOT_OP, /* of the op itself */
    KERN_SLOT_OP2,
    KERN_SLOT_OP3,
    KERN_SLOT_PANEL, /* per thread, of the matrix kernels */
    KERN_SLOT_ROWS,  /* activation rows of the matrix kernels */
    KERN_N_SLOTS
};
void *kern_scratch(struct kern_stream *s, enum kern_slot slot, size_t bytes);
/* bytes for each thread; thread i's part is at i * *stride. */
void *kern_scratch_each(struct kern_stream *s, enum kern_slot slot, size_t bytes, size_t *stride);

#endif
