/* tests/support/engine.h - a model with a page pool, for programs that run rows of one sequence.
 *
 * Rules    For benchmarks and tests only: deployed numerics on the CPU, pages that hold zeros.
 */
#ifndef TESTS_SUPPORT_ENGINE_H
#define TESTS_SUPPORT_ENGINE_H

#include "common/kv/table.h"
#include "common/model/forward.h"

#include <stddef.h>

struct tow_err;

struct test_engine {
    struct model *m;
    struct kv_pool *pool;
    uint8_t *pages, *tails;
    float *logits;        /* [V], of the last row of the last pass */
    uint32_t n_seq_pages; /* that hold n_tokens */
};

/* Room for `n_sets` sequences of n_tokens, of which n_tails at once. Closed also after a
 * failure. */
int test_engine_open(struct test_engine *e, const char *dir, int32_t n_threads, int32_t max_rows,
                     int64_t n_tokens, uint32_t n_sets, uint32_t n_tails, struct tow_err *err);
void test_engine_close(struct test_engine *e);

/* One pass over n rows from pos0 of the sequence in t; a table with twice the pages is shadowed.
 * captures: as in struct model_batch; NULL: none. */
int test_engine_pass(struct test_engine *e, const struct kv_table *t, const int32_t *ids, int32_t n,
                     int64_t pos0, const struct model_capture *const *captures,
                     struct tow_err *err);

#endif
