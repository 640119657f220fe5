/* prefill/sched.h - all tickets of a prefill worker: queue, chunks in turn, shipping, drain.
 *
 * Why      Who computes next, what is offered to the decode side when, and when a page is free
 *          again is decided here, without I/O, so that tests can drive every order of events.
 * Owner    The control thread. Pure: an event goes in, actions come out; time is in the event.
 *
 * Queue    Accepted while the prompt tokens not computed yet stay within max_pending_tokens and the
 *          jobs within max_jobs; else DENY EBUSY. A prompt that the pool or the queue could never
 *          hold is denied for good.
 * Pages    A job takes all its pages and a tail before its first chunk (a later chunk reads the
 *          earlier pages), so no two jobs can wait for each other. A younger job that fits may
 *          start before an older one that does not fit yet, but only `max_passes` times. Prompts
 *          longer than one chunk leave an eighth (at least a chunk's worth) of the pages and of the
 *          tails free; beyond the limit short ones still pass a long one as long as they hold no
 *          more than that together, so it does start when the long ones before it have ended. A
 *          prompt that leaves no eighth at all holds up everyone.
 * Capture  A job whose capture asks for shadow keys takes each page with its companion: page 2i and
 *          2i + 1 of its table hold the same tokens. The rows of its last chunk are sent before
 *          its tail is offered.
 * Turns    One chunk is computed at a time. Jobs that end with their next chunk ("short") go first,
 *          in order; but after each chunk of a long one they get at most chunk_tokens tokens
 *          together, then the next long one has its chunk. So a short prompt waits for at most one
 *          long chunk and the short ones before it, and the long ones keep at least half of the
 *          engine.
 * Holds    Every PREFILL accepted ends in exactly one PREFILL_DONE, FAILED or CANCELLED, sent after
 *          its pages are back; others are answered by one DENY.
 */
#ifndef PRE_SCHED_H
#define PRE_SCHED_H

#include "prefill/job.h"

#include <stddef.h>

struct kv_pool;
struct pre_sched;
struct tow_err;

struct pre_sched_config {
    uint32_t page_tokens;
    uint32_t max_context;
    uint32_t chunk_tokens;
    uint32_t max_pending_tokens;
    uint32_t max_jobs;   /* live at once, 1..65536 */
    uint32_t n_vocab;    /* token ids are below it; 0: not checked */
    bool shadows;        /* pages can have companions with shadow keys */
    uint32_t max_passes; /* 0: 64 */
    uint32_t touch_ms;   /* 0: 1000; how often waiting tickets are touched, cancels repeated */
    uint32_t stall_ms;   /* 0: 60000; a chunk longer than this stops keeping tickets alive */
};

enum pre_event_kind {
    PRE_ON_MESSAGE, /* PREFILL, CANCEL or DRAIN from a router; others are ignored */
    PRE_ON_ROUTER_LOST,
    PRE_ON_CHUNK,     /* the engine finished the chunk it was given */
    PRE_ON_PART,      /* the decode side has page `index`, verified */
    PRE_ON_ENDED,     /* the mover is done with ticket: 0 when all arrived */
    PRE_ON_UNOFFERED, /* the mover did not take a PRE_DO_OFFER of ticket; code says why */
    PRE_ON_DRAIN,
    PRE_ON_TICK /* at least each second */
};

struct pre_event {
    enum pre_event_kind kind;
    uint64_t now_ms;
    uint64_t owner;             /* MESSAGE, ROUTER_LOST */
    const struct wire_msg *msg; /* MESSAGE */
    struct wire_ticket ticket;  /* PART, ENDED, UNOFFERED */
    uint32_t index;             /* PART; the tail is not reported here or has UINT32_MAX */
    int code;                   /* CHUNK, ENDED, UNOFFERED */
    uint32_t first;             /* CHUNK, the last of a job: the token sampled */
    bool has_logprobs;
    uint8_t n_top;
    struct wire_bytes logprobs; /* one row, as in TOKENS */
    uint32_t limit_ms;          /* DRAIN; 0 for none */
};

enum pre_action_kind {
    PRE_DO_SEND,        /* msg to the router behind owner */
    PRE_DO_OPEN_MOVE,   /* kv_mover_send() for job with n pages */
    PRE_DO_CANCEL_MOVE, /* kv_mover_cancel(ticket, code); again each touch_ms until PRE_ON_ENDED */
    PRE_DO_TOUCH,       /* kv_mover_touch(ticket) */
    PRE_DO_OPEN,        /* job got its pages: make its engine state */
    PRE_DO_CLOSE,       /* drop its engine state; comes before its pages go back */
    PRE_DO_CHUNK,  /* compute tokens [from, from + n) of job; last: sample; then PRE_ON_CHUNK. The
                     n_whole pages after those offered are whole then; last: so is the tail */
    PRE_DO_OFFER,  /* kv_mover_offer() pages [from, from + n) of job; tail: and its tail, last */
    PRE_DO_DRAINED /* once; cut */
};

struct pre_action {
    enum pre_action_kind kind;
    uint64_t owner;
    struct wire_msg msg; /* spans valid until the next step call */
    struct wire_ticket ticket;
    int code;
    struct pre_job *job; /* valid until the next step call */
    uint32_t from, n, n_whole;
    bool last, tail;
    bool cut; /* DRAINED: work still ran when the limit passed */
};

struct pre_actions {
    struct pre_action *items; /* owned; in the order in which they must be performed */
    uint32_t n, cap;
};
void pre_actions_init(struct pre_actions *a);
void pre_actions_clear(struct pre_actions *a);
void pre_actions_fini(struct pre_actions *a);

struct pre_stats {
    uint64_t accepted, denied, finished, failed, cancelled; /* tickets */
    uint64_t orphaned; /* of failed: the other side stayed silent, or its router died */
    uint64_t prompt_tokens, chunks;
    uint32_t queued, active, shipping, closing; /* gauges */
    uint32_t queued_tokens;                     /* not computed yet */
    uint32_t pages_free;
    bool draining;
    uint64_t progress;
};

int pre_sched_new(struct pre_sched **out, const struct pre_sched_config *cfg, struct kv_pool *pool,
                  struct tow_err *err);
void pre_sched_free(struct pre_sched *p); /* gives all pages back; nothing may be in flight */
void pre_sched_step(struct pre_sched *p, const struct pre_event *ev, struct pre_actions *out);
void pre_sched_stats(const struct pre_sched *p, struct pre_stats *out);

#endif
