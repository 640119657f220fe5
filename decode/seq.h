/* decode/seq.h - one ticket on a decode worker: a sequence from its reservation to its last token.
 *
 *   (reserve) RESERVED --on_part--> LOADING --on_loaded--> READY <--on_stepped-- RUNNING
 *                |                     |                   |  \-----start_step----/|
 *                +-- cancel, failed move, router lost, pushed back, drain limit ---+
 *                                      v
 *                                   CLOSING --nothing in flight--> GONE
 *
 * state     true in it                                              deadline
 * RESERVED  pages and tail held, the mover expects them             the mover's lease
 * LOADING   at least one page has arrived                           the mover's lease
 * READY     the cache is whole, the next input token is known       none: it is in the rotation
 * RUNNING   its pages are in the engine's step                      none: the engine always answers
 * CLOSING   outcome decided, mover or engine may touch its pages    none: both always answer
 * GONE      pages are back, the router has been told                -
 *
 * Arrows are drawn by decode/sched.c; nobody else calls dec_seq_set_state().
 */
#ifndef DEC_SEQ_H
#define DEC_SEQ_H

#include "common/base/list.h"
#include "common/kv/table.h"
#include "common/worker/capture.h"
#include "proto/messages.h"

#include <stdbool.h>
#include <stdint.h>

enum dec_seq_state {
    DEC_SEQ_RESERVED,
    DEC_SEQ_LOADING,
    DEC_SEQ_READY,
    DEC_SEQ_RUNNING,
    DEC_SEQ_CLOSING,
    DEC_SEQ_GONE,
    DEC_SEQ_STATES
};

struct dec_seq {
    struct tow_list age;   /* all sequences, oldest first */
    struct tow_list turn;  /* READY ones, next in the rotation first */
    struct tow_list by_id; /* hash chain */
    struct wire_ticket ticket;
    uint64_t owner; /* connection of the router it belongs to */
    enum dec_seq_state state;
    uint64_t since_ms; /* in this state */

    char prefill[WIRE_MAX_NAME + 1];
    uint64_t prefill_incarnation;
    uint32_t lease_ms;

    struct wire_sampling sampling; /* logit_bias: owned copy */
    uint32_t *eos;                 /* owned, [n_eos] */
    uint32_t n_eos;
    uint32_t *outputs; /* owned, [n_prior] ids of earlier attempts */
    uint32_t n_prior;  /* outputs when it came */
    uint32_t n_output; /* outputs so far, over all attempts */
    uint32_t max_output;
    uint32_t n_tokens; /* tokens the shipped cache covers */
    uint32_t n_cached; /* tokens in the cache now: position of the next input */
    uint32_t token;    /* next input, sampled last; valid from READY on */

    struct work_capture *capture; /* owned; NULL: nothing is to be ranked */

    struct kv_table table; /* pages and tail */
    bool mover_live;       /* the mover has not said ENDED yet */
    bool engine_open;      /* DEC_DO_OPEN was given, DEC_DO_CLOSE not yet */
    int outcome;           /* CLOSING: 0 cancelled as asked, else TOW_E* for FAILED */
    bool tell;             /* CLOSING: the router is still there to be told */
    const char *why;       /* CLOSING: literal */
    void *user;            /* the server's: engine state */
};

void dec_seq_set_state(struct dec_seq *s, enum dec_seq_state to, uint64_t now_ms);
const char *dec_seq_state_name(enum dec_seq_state s);            /* static */
bool dec_seq_ends_with(const struct dec_seq *s, uint32_t token); /* an eos id that counts */

/* Copies what the RESERVE holds; its capture has been checked. TOW_ENOMEM. */
int dec_seq_new(struct dec_seq **out, uint64_t owner, const struct wire_reserve *m,
                uint64_t now_ms);
void dec_seq_free(struct dec_seq *s); /* table must be empty */

#endif
