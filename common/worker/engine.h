/* worker/engine.h - the engine thread: runs steps of the model and draws tokens, one step at a
 * time.
 *
 * Why      A forward pass takes milliseconds to seconds; the control thread must never wait for it.
 * Owner    Control thread: submit and done. The thread in here owns the model; a step and all it
 *          points to belong to it from submit until the step comes back.
 * Holds    Every submitted step comes back exactly once, in order. At most WORK_ENGINE_QUEUE wait.
 */
#ifndef WORK_ENGINE_H
#define WORK_ENGINE_H

#include "common/model/forward.h"
#include "common/model/sample.h"
#include "common/worker/cache.h"

#include <stdbool.h>
#include <stdint.h>

struct tow_err;
struct work_engine;

enum { WORK_ENGINE_QUEUE = 4 };

/* One sequence's rows in a step. */
struct work_item {
    struct kern_seq seq; /* row0 is filled in by the engine; the tail is the host's */
    const int32_t *ids;  /* [seq.n_rows] borrowed */
    bool sample;         /* draw a token from the last row */
    struct model_sampling sampling;
    const int32_t *output; /* [n_output] drawn before, for penalties; borrowed */
    int32_t n_output;
    uint64_t index;                      /* number of the token to draw in the whole answer */
    const struct model_capture *capture; /* what to rank of the last row, or NULL; borrowed */
    /* What no pass changes after this one: finished when it is over, see work_cache_finish(). */
    struct work_cache_parts whole;
    /* result */
    struct kern_choice choice; /* its rc: 0, or why no token could be drawn */
    void *user;
};

struct work_step {
    struct work_item *items; /* [n] borrowed; rows together <= max_rows, samples <= max_samples */
    int32_t n;  /* 0: computes nothing; that it comes back shows that the thread is there */
    bool await; /* begins when what was copied in is there, see work_cache_in() */
    /* result */
    int rc;              /* not 0: the pass failed as a whole */
    struct tow_err *err; /* borrowed, may be NULL; filled when rc != 0 */
    uint64_t busy_us;
    void *user;
};

/* cache: borrowed; where the pages and tails are. max_samples: most sampled items of
 * one step. wake: called on the engine thread when a step has ended. The model is borrowed and
 * used by nobody else until work_engine_close(). */
int work_engine_open(struct work_engine **out, struct model *m, struct work_cache *cache,
                     int32_t max_samples, void (*wake)(void *arg), void *wake_arg,
                     struct tow_err *err);
/* Waits for what is running; steps not taken back are dropped. NULL is fine. */
void work_engine_close(struct work_engine *e);

/* TOW_EFULL when WORK_ENGINE_QUEUE steps are inside. */
int work_engine_submit(struct work_engine *e, struct work_step *step);
/* The next ended step, or NULL. Call until NULL after each wake. */
struct work_step *work_engine_done(struct work_engine *e);
/* How long the step that runs now, or should, has been running; 0 when idle. [any thread] */
uint64_t work_engine_running_ms(const struct work_engine *e);
uint64_t work_engine_steps(const struct work_engine *e); /* ended since start [any thread] */

#endif
