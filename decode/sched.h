/* decode/sched.h - all tickets of a decode worker: admission, loading, continuous batching, drain.
 *
 * Why      What may be admitted, which sequences step together, who gives way when pages run out
 *          and when pages are free again is decided here, without I/O, so that tests can drive
 *          every order.
 * Owner    The control thread. Pure: an event goes in, actions come out; time is in the event.
 *
 * Pages    A RESERVE holds pages for the tokens shipped and for the first outputs (reserve_tokens
 *          ahead, or as many as it has produced in earlier attempts, if that is more), never more
 *          than the whole answer can need. A request whose whole answer exceeds the pool is denied
 *          for good. A sequence that outgrows its pages takes more at a step boundary. If there are
 *          none, the *youngest* ticket is pushed back: it fails with EFULL and the router brings it
 *          again, later, with the tokens it has. The oldest ticket is never pushed back and always
 *          finishes, so two half-admitted loads cannot wait for each other: everything ends, by
 *          induction over age. Because a pushed-back one reserves twice as far, it comes back only
 *          log2(answer) times.
 * Capture  A sequence whose capture asks for shadow keys takes each page with its companion: page
 *          2i and 2i + 1 of its table hold the same tokens. The rows of a step are sent before what
 *          the step chose.
 * Holds    Every ticket granted ends in exactly one FINISH, FAILED or CANCELLED, sent after its
 *          pages are back; every RESERVE is answered by one GRANT or DENY. granted == finished +
 *          failed + cancelled + live, always.
 */
#ifndef DEC_SCHED_H
#define DEC_SCHED_H

#include "decode/seq.h"

#include <stddef.h>

struct kv_pool;
struct dec_sched;
struct tow_err;

struct dec_sched_config {
    uint32_t page_tokens;
    uint32_t max_context;    /* tokens of one sequence */
    uint32_t max_batch;      /* sequences per step */
    uint32_t max_tickets;    /* live at once, 1..65536 */
    uint32_t reserve_tokens; /* outputs reserved ahead */
    bool shadows;            /* pages can have companions with shadow keys */
};

enum dec_event_kind {
    DEC_ON_MESSAGE,     /* RESERVE, CANCEL or DRAIN from a router; others are ignored */
    DEC_ON_ROUTER_LOST, /* its connection is closed: all its tickets die */
    DEC_ON_PART,        /* the mover verified one more page of ticket */
    DEC_ON_LOADED,      /* the mover is done with ticket: code 0 and the first token, or why not */
    DEC_ON_STEPPED,     /* the engine finished the step it was given */
    DEC_ON_DRAIN,       /* own SIGTERM, or the operator: limit_ms, 0 for none */
    DEC_ON_TICK         /* time passes; at least each second */
};

/* What one sequence got out of a step, or the mover's note about the first token. */
struct dec_token {
    uint32_t id;
    bool has_logprobs;
    uint8_t n_top;
    struct wire_bytes logprobs; /* one row as in TOKENS; borrowed until the actions are performed */
    int code;                   /* ENUMERIC and the like: the sequence fails */
};

struct dec_event {
    enum dec_event_kind kind;
    uint64_t now_ms;
    uint64_t owner;                 /* MESSAGE, ROUTER_LOST */
    const struct wire_msg *msg;     /* MESSAGE */
    struct wire_ticket ticket;      /* PART, LOADED */
    int code;                       /* LOADED: 0 or TOW_E*; STEPPED: not 0 when the step failed */
    struct dec_token first;         /* LOADED with 0 */
    uint32_t position;              /* LOADED with 0: tokens the tail covers; must fit */
    const struct dec_token *tokens; /* STEPPED: in the order of the batch given */
    uint32_t limit_ms;              /* DRAIN */
};

enum dec_action_kind {
    DEC_DO_SEND,        /* msg to the router behind owner */
    DEC_DO_EXPECT,      /* kv_mover_expect() for seq; comes before its GRANT */
    DEC_DO_CANCEL_MOVE, /* kv_mover_cancel(ticket, code); again each second until DEC_ON_LOADED */
    DEC_DO_OPEN,        /* seq became ready: make its engine state (sampler, prior outputs) */
    DEC_DO_CLOSE,       /* drop its engine state; comes before its pages are given back */
    DEC_DO_STEP,        /* one step with batch[n]; exactly one DEC_ON_STEPPED must follow */
    DEC_DO_DRAINED      /* once: nothing is left after a drain; say BYE and leave. cut */
};

struct dec_action {
    enum dec_action_kind kind;
    uint64_t owner;
    struct wire_msg msg; /* spans valid until dec_actions_clear() or the next step call */
    struct wire_ticket ticket;
    int code;
    struct dec_seq *seq;          /* EXPECT, OPEN, CLOSE; valid until the next step call */
    struct dec_seq *const *batch; /* STEP; stays until STEPPED */
    uint32_t n; /* STEP: sequences; EXPECT: pages that will be shipped, the first n */
    bool cut;   /* DRAINED: work still ran when the limit passed */
};

/* In the order in which they must be performed. */
struct dec_actions {
    struct dec_action *items; /* owned */
    uint32_t n, cap;
};
void dec_actions_init(struct dec_actions *a);
void dec_actions_clear(struct dec_actions *a);
void dec_actions_fini(struct dec_actions *a);

struct dec_stats {
    uint64_t granted, denied, finished, failed, cancelled; /* tickets */
    uint64_t pushed_back;                                  /* of failed: gave way for pages */
    uint64_t orphaned; /* of failed: the sender stayed silent, or its router died */
    uint64_t output_tokens, steps;
    uint32_t reserved, loading, ready, running, closing; /* gauges */
    uint32_t pages_free;
    bool draining;
    uint64_t progress; /* grows with each part and step */
};

/* pool: borrowed, outlives the machine. TOW_EINVAL names the field. */
int dec_sched_new(struct dec_sched **out, const struct dec_sched_config *cfg, struct kv_pool *pool,
                  struct tow_err *err);
void dec_sched_free(struct dec_sched *d); /* gives all pages back; nothing may be in flight */
void dec_sched_step(struct dec_sched *d, const struct dec_event *ev, struct dec_actions *out);
void dec_sched_stats(const struct dec_sched *d, struct dec_stats *out);

#endif
