/* prefill/job.h - one ticket on a prefill worker: a prompt from its arrival to its last
 * acknowledged page.
 *
 *   (prefill) QUEUED --start--> ACTIVE --on_chunk, the last--> SHIPPING --on_ended(0)--> GONE
 *               |                 |                               |
 *               +-- cancel, move failed, chunk failed, router lost, drain limit
 *                                 v
 *                              CLOSING --mover ended and no chunk in flight--> GONE
 *
 * state     true in it                                             deadline
 * QUEUED    no pages; the mover keeps the ticket alive             the router's queue limit
 * ACTIVE    pages and tail held; takes turns at the engine         the engine always answers
 * SHIPPING  all computed, all offered; a page is free once acked   the mover's lease
 * CLOSING   outcome decided; mover or engine may touch its pages   none: both always answer
 * GONE      pages are back, the router has been told               -
 *
 * Arrows are drawn by prefill/sched.c; nobody else calls pre_job_set_state().
 */
#ifndef PRE_JOB_H
#define PRE_JOB_H

#include "common/base/list.h"
#include "common/kv/table.h"
#include "common/worker/capture.h"
#include "proto/messages.h"

#include <stdbool.h>
#include <stdint.h>

enum pre_job_state {
    PRE_JOB_QUEUED,
    PRE_JOB_ACTIVE,
    PRE_JOB_SHIPPING,
    PRE_JOB_CLOSING,
    PRE_JOB_GONE,
    PRE_JOB_STATES
};

struct pre_job {
    struct tow_list all;   /* all jobs, oldest first */
    struct tow_list line;  /* QUEUED: the queue; ACTIVE: one of the two rotations */
    struct tow_list by_id; /* hash chain */
    struct wire_ticket ticket;
    uint64_t owner; /* connection of the router it belongs to */
    enum pre_job_state state;
    uint64_t since_ms;

    char decode[WIRE_MAX_NAME + 1];
    uint64_t decode_incarnation;
    uint32_t lease_ms;

    struct wire_sampling sampling; /* logit_bias: owned copy */
    uint32_t *eos;                 /* owned, [n_eos] */
    uint32_t n_eos;
    uint32_t *tokens; /* owned, [n_tokens]: prompt, then outputs so far */
    uint32_t n_tokens, n_prompt;
    uint32_t max_output;
    struct work_capture *capture; /* owned; NULL: nothing is to be ranked */
    uint32_t n_done;              /* tokens computed */
    uint32_t n_offered;           /* pages given to the mover */
    uint32_t passed;              /* QUEUED: younger jobs that started before this one */

    struct kv_table table; /* pages and tail */
    uint8_t *acked;        /* owned, [pages]: arrived over there */
    bool mover_live, engine_open;
    bool computing; /* its chunk is in flight */

    uint32_t first; /* SHIPPING: the first output token */
    bool has_logprobs;
    uint8_t n_top;
    uint32_t logprob_bytes;
    uint8_t logprobs[4 + 8 * WIRE_MAX_TOP];

    int outcome;     /* CLOSING: 0 cancelled as asked, else TOW_E* for FAILED */
    bool tell;       /* CLOSING: the router is still there */
    const char *why; /* CLOSING: literal */
    void *user;      /* the server's: engine state */
};

void pre_job_set_state(struct pre_job *j, enum pre_job_state to, uint64_t now_ms);
const char *pre_job_state_name(enum pre_job_state s); /* static */

/* Copies what the PREFILL holds; its capture has been checked. TOW_ENOMEM. */
int pre_job_new(struct pre_job **out, uint64_t owner, const struct wire_prefill *m,
                uint32_t n_pages, uint64_t now_ms);
void pre_job_free(struct pre_job *j); /* table must be empty */

#endif
