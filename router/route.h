/* router/route.h - every request from its admission to its last token, over all workers.
 *
 * Why      Admission, placement, retries, cancel, drain and the joining of workers are one piece of
 *          bookkeeping: each decision needs the others' numbers. It is pure, so that tests can
 *          drive every order of messages, deaths and deadlines; router/main performs the actions.
 * Owner    The loop thread.
 *
 * One choice of one request is a run:
 *   (submit) QUEUED --dispatch--> RESERVING --on_grant--> PREFILLING --on_tokens--> STREAMING
 *               ^                     |                      |                        |
 *               +--- denied, worker lost, failed, pushed back: prompt + outputs so far go elsewhere
 *   STREAMING --on_finish--> (end). Cancel ends a run at once in any state; its attempt is wound
 *   up in the background.
 *   STREAMING --on_finish, stop string--> CLOSING --prefill's last word--> (end): with a capture,
 *   whose rows come from prefill over another connection than the tokens.
 *
 * state       true in it                                        deadline
 * QUEUED      no ticket                                         queue_timeout since it began to
 *                                                               wait
 * RESERVING   a ticket; decode and prefill budgets are held     the same, and reserve_ms
 * PREFILLING  decode granted; prefill has the tokens            the same until the first PROGRESS,
 *                                                               then stall_ms
 * STREAMING   at least one token of this attempt came           stall_ms since the last
 * CLOSING     the answer is whole; captured rows may come       lease_ms, then without them
 *
 * One ticket is an attempt. It holds budgets at its two workers until each has said its last word
 * about it (DENY, FAILED, FINISH, PREFILL_DONE, CANCELLED) or is lost; a worker that does not
 * answer a CANCEL in cancel_ms is broken and its connection is closed.
 *
 * Queue    At most max_queued runs and max_queued_tokens prompt tokens wait (n counts n); more are
 *          refused at once. In order of arrival; a later run that fits may pass the first that does
 *          not fit yet, max_passes times, then it waits behind.
 *          Runs that come back keep their place and count apart.
 * Lane     A prompt of one chunk must not wait for long ones. Long ones leave an eighth (at least a
 *          chunk's worth) of each worker's pages, prompt tokens and tickets free. When the first in
 *          the queue is long and may be passed no more, short ones still pass as long as short ones
 *          hold no more than that eighth: so it starts when the long ones before it have ended.
 *          Only a prompt that leaves no eighth at all holds up everyone.
 * Tries    max_attempts failures end a run; being denied for want of room, pushed back or drained
 *          is none.
 * Pages    A capture by other keys needs twice the pages, on both sides: each has a companion.
 * Counts   started == finished + failed + cancelled + live, in runs, warm-ups left out.
 */
#ifndef RTR_ROUTE_H
#define RTR_ROUTE_H

#include "router/backend.h"
#include "router/registry.h"

struct rtr_route;
struct rtr_job; /* one accepted request */

struct rtr_route_config {
    uint32_t max_queued, max_queued_tokens; /* at least 1 each */
    uint32_t queue_timeout_ms;
    uint32_t lease_ms;       /* 0: 30000 */
    uint32_t reserve_ms;     /* 0: 10000 */
    uint32_t stall_ms;       /* 0: 120000 */
    uint32_t cancel_ms;      /* 0: 30000 */
    uint32_t heartbeat_ms;   /* 0: 1000 */
    uint32_t max_attempts;   /* 0: 4 */
    uint32_t max_passes;     /* 0: 64 */
    const char *join_token;  /* NULL: none; copied */
    struct wire_bytes facts; /* see rtr_registry_own_facts() */
    const uint32_t *eos;     /* copied */
    uint32_t n_eos;
    const uint32_t *warm_up; /* ids of a small prompt, copied; NULL: {0} */
    uint32_t n_warm_up;
    uint64_t incarnation;
    uint64_t (*random)(void *arg); /* 64 new bits each time, never 0 */
    void *random_arg;
};

enum rtr_event_kind {
    RTR_ON_MESSAGE, /* msg came on conn; the first must be HELLO */
    RTR_ON_CLOSED,  /* conn is closed, by whomever */
    RTR_ON_TICK,    /* at least each 100 ms */
    RTR_ON_DRAIN    /* take no new requests; limit_ms 0: none */
};

struct rtr_event {
    enum rtr_event_kind kind;
    uint64_t now_ms;
    uint64_t conn; /* a number the server never uses twice; not 0 */
    const struct wire_msg *msg;
    uint32_t limit_ms;
};

enum rtr_action_kind {
    RTR_DO_SEND,     /* msg on conn */
    RTR_DO_CLOSE,    /* conn, after what was sent; why is a literal */
    RTR_DO_TOKENS,   /* to the client: msg->tokens of choice; first counts over all attempts */
    RTR_DO_CAPTURED, /* to the client: msg->captured of choice */
    RTR_DO_PLACED,   /* to the client: choice goes to a pair; outputs it has so far */
    RTR_DO_FINISH,   /* choice ended; reason */
    RTR_DO_FAIL,     /* the whole request ended */
    RTR_DO_DRAINED,  /* once: nothing is left; cut */
    RTR_DO_LOG       /* refusal.err, for the operator */
};

struct rtr_action {
    enum rtr_action_kind kind;
    uint64_t conn;
    struct wire_msg msg; /* SEND, TOKENS, CAPTURED; spans valid until the next step or reap */
    const char *why;
    struct rtr_job *job; /* TOKENS, CAPTURED, PLACED, FINISH, FAIL */
    void *cookie;        /* of that job */
    uint32_t choice;
    uint32_t prefill, decode, n_output; /* PLACED: slots */
    enum rtr_finish reason;
    struct rtr_refusal refusal; /* FAIL */
    bool cut;                   /* DRAINED: requests still ran when the limit passed */
};

struct rtr_actions {
    struct rtr_action *items; /* owned; perform in this order */
    uint32_t n, cap;
};
void rtr_actions_init(struct rtr_actions *a);
void rtr_actions_clear(struct rtr_actions *a);
void rtr_actions_fini(struct rtr_actions *a);

int rtr_route_new(struct rtr_route **out, const struct rtr_route_config *cfg, struct tow_err *err);
void rtr_route_free(struct rtr_route *r); /* without a word to anyone */
void rtr_route_step(struct rtr_route *r, const struct rtr_event *ev, struct rtr_actions *out);

/* As rtr_backend's calls of the same names. Only SEND and CLOSE come out of these three, so that no
 * callback can come inside them. req stays until the job is over. */
int rtr_route_room(struct rtr_route *r, uint64_t now_ms, struct rtr_refusal *refusal);
int rtr_route_submit(struct rtr_route *r, uint64_t now_ms, const struct rtr_request *req,
                     void *cookie, struct rtr_job **out, struct rtr_refusal *refusal,
                     struct rtr_actions *acts);
void rtr_route_cancel(struct rtr_route *r, struct rtr_job *job, uint64_t now_ms,
                      struct rtr_actions *acts);
bool rtr_route_cancel_choice(struct rtr_route *r, struct rtr_job *job, uint32_t choice,
                             uint64_t now_ms, struct rtr_actions *acts);

/* A callback may cancel requests whose own actions still stand further down the list: skip actions
 * of a job that is deaf. Jobs that are over stay readable until rtr_route_reap(), to be called when
 * no list of actions is being performed. */
bool rtr_job_deaf(const struct rtr_job *job);
void rtr_route_reap(struct rtr_route *r);

bool rtr_route_ready(struct rtr_route *r, uint64_t now_ms, const char **why);
/* 0 while none has joined. shadow: of requests with companions for their pages. */
uint32_t rtr_route_context(const struct rtr_route *r, bool shadow);
int rtr_route_drain_worker(struct rtr_route *r, const char *name, struct tow_err *err,
                           struct rtr_actions *acts);
uint32_t rtr_route_retry_after_s(const struct rtr_route *r); /* 1..600, from measured rates */
const struct rtr_registry *rtr_route_registry(const struct rtr_route *r);

struct rtr_route_stats {
    uint64_t started, finished, failed, cancelled, refused; /* runs; refused were never started */
    uint64_t attempts, retries, pushed_back, denied, output_tokens, warm_ups;
    uint64_t relinks;    /* workers told to make their data link anew */
    uint64_t distrusted; /* attempts given up because a worker broke the protocol */
    uint32_t queued, reserving, prefilling, streaming; /* gauges, warm-ups left out */
    uint32_t waiting;                                  /* what max_queued limits */
    uint64_t waiting_tokens;
    uint32_t tickets; /* also those being wound up */
    bool draining;
};
void rtr_route_stats(const struct rtr_route *r, struct rtr_route_stats *out);

#endif
