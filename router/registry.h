/* router/registry.h - the workers of this router: who may join, how they are, which pairs are
 * proved.
 *
 * Why      A request is placed by what is known here: capacity, load, life signs, proofs, failures.
 * Owner    The loop thread, through router/route. Pure: time is an argument, nothing is sent from
 *          here.
 *
 *   (free) --join--> STARTING --warm-up passed--> SERVING --2 heartbeats missed--> SUSPECT
 *                       |                            |                               |
 *                       +--- connection closed, 5 missed, replaced, stuck -----------+--> GONE
 *   SUSPECT --heard--> SERVING. DRAINING is a flag beside the state: no new work, the old goes on.
 *
 * state     true in it                                         deadline
 * STARTING  joined; only warm-up requests go there             5 heartbeats missed
 * SERVING   a real request went through it                     2 missed: SUSPECT
 * SUSPECT   no new work                                        5 missed: GONE
 * GONE      no connection; the slot keeps name and failures    -
 *
 * Failures are remembered by name across restarts: `RTR_TRIP` in a row open the circuit; after a
 * pause (1 s, doubled up to 8 s) one request at a time probes; one success closes it. Being busy is
 * no failure. Pages that do not arrive may be either side's fault, so they count against the link
 * between the two, by the same rule: a decode worker that cannot fetch does not take its healthy
 * prefill workers down with it.
 *
 * A worker may stop hearing its peers for ever while it lives (net/link.c, Stuck). It shows as
 * greetings without answer, two in a row on one link, at a worker that has no proved link at all;
 * that one has to make its link anew. When both ends are such, decode is first, and the next two
 * greetings without answer name the other.
 */
#ifndef RTR_REGISTRY_H
#define RTR_REGISTRY_H

#include "proto/messages.h"

#include <stdbool.h>
#include <stdint.h>

#define RTR_MAX_WORKERS 64
#define RTR_TRIP        3
#define RTR_NO_WORKER   UINT32_MAX
#define RTR_WHY_BYTES   160
#define RTR_MODEL_NAME  "free.model" /* the fact that names a model folder, for people */
/* Greetings in a row without answer until one end has to relink, and until it has to although it
 * still works on something; the least time between two times at one worker. */
#define RTR_UNANSWERED      2
#define RTR_UNANSWERED_BUSY 6
#define RTR_RELINK_MS       30000u
/* Workers that are turned away are remembered, so that the operator sees them at the router: so
 * many, and each until it has not come for so long. */
#define RTR_MAX_REFUSED 16
#define RTR_REFUSED_MS  60000u

struct tow_err;

enum rtr_worker_state { RTR_GONE, RTR_STARTING, RTR_SERVING, RTR_SUSPECT };
enum rtr_circuit { RTR_CLOSED, RTR_OPEN, RTR_HALF_OPEN };
enum rtr_proof { RTR_UNPROVED, RTR_PROVING, RTR_PROVED, RTR_REFUTED };

struct rtr_worker {
    enum rtr_worker_state state;
    bool warm, draining;
    enum wire_role role;
    char name[WIRE_MAX_NAME + 1];
    uint64_t incarnation;
    uint64_t conn; /* the server's id of its connection; 0: none */
    uint64_t heard_ms, joined_ms;

    uint32_t pages, page_tokens, max_context, max_batch, chunk_tokens, max_pending_tokens;
    uint32_t max_tickets, reserve_tokens;
    uint8_t address[WIRE_MAX_ADDRESS];
    uint32_t address_bytes;
    char status_url[WIRE_MAX_VALUE + 1];
    uint8_t *facts; /* owned: as HELLO brought them */
    uint32_t facts_bytes;

    /* What our own tickets hold there, and what others hold by the last heartbeat. */
    uint32_t held_pages, tickets;
    uint64_t held_tokens; /* prefill: prompt tokens sent and not reported computed */
    /* Of these, what prompts longer than one chunk hold; see route.h, Lane. */
    uint32_t long_pages, long_tickets;
    uint64_t long_tokens;
    uint32_t foreign_pages, foreign_tickets;
    uint64_t foreign_tokens;
    struct wire_heartbeat beat; /* the last one */
    uint64_t progress_ms;       /* when beat.progress last moved, or it had nothing to do */
    uint64_t busy_until_ms;     /* it said no: not before */
    uint64_t picked;            /* order number of the last pick, to spread ties */

    enum rtr_circuit circuit;
    uint32_t failures; /* in a row */
    uint32_t pause_ms;
    uint64_t reopen_ms; /* OPEN: when to probe */
    uint32_t probes;    /* HALF_OPEN: requests out */
    uint64_t total_failures;

    uint64_t relinks, relinked_ms; /* told so often, and when last; of the name */
};

/* What the proof of a link found (of use to people only), and what became of requests since. */
struct rtr_link {
    char transport[WIRE_MAX_NAME + 1]; /* as the transport names it; "" until proved */
    bool by_am;                        /* pages come by active message, not by get */
    char why[RTR_WHY_BYTES];           /* of a refuted one; "" else */
    uint32_t mb_per_s, latency_us;     /* of the proof's pages */
    uint32_t failures, pause_ms;       /* in a row; the pause after the last one */
    uint64_t reopen_ms;                /* nothing goes this way before */
    uint32_t unanswered;               /* greetings in a row */
};

/* A worker that is not let in. */
struct rtr_refused {
    char name[WIRE_MAX_NAME + 1]; /* as it calls itself */
    enum wire_role role;
    char field[WIRE_MAX_NAME + 1], why[WIRE_MAX_NOTE + 1];
    uint64_t times, last_ms; /* times 0: free; last_ms: the last time, as now_ms */
};

struct rtr_registry {
    struct rtr_worker workers[RTR_MAX_WORKERS];
    /* By pair: [prefill][decode]. */
    uint8_t proof[RTR_MAX_WORKERS][RTR_MAX_WORKERS]; /* enum rtr_proof */
    struct rtr_link links[RTR_MAX_WORKERS][RTR_MAX_WORKERS];
    uint64_t retry_ms[RTR_MAX_WORKERS][RTR_MAX_WORKERS]; /* when to ask for the next proof */
    uint32_t heartbeat_ms, stall_ms;
    char join_token[257]; /* "" : none */
    uint8_t *facts;       /* owned: what the router's own model folder says; NULL: not compared */
    uint32_t facts_bytes;
    struct rtr_refused refused[RTR_MAX_REFUSED];
    uint64_t picks;
    uint64_t joins, refusals, losses; /* counters */
};

void rtr_registry_init(struct rtr_registry *g, uint32_t heartbeat_ms, uint32_t stall_ms,
                       const char *join_token);
void rtr_registry_fini(struct rtr_registry *g);
/* What the router's own model folder says: text facts that workers must not contradict, and the
 * free fact RTR_MODEL_NAME. Copied; once, after init. */
int rtr_registry_own_facts(struct rtr_registry *g, struct wire_bytes facts, struct tow_err *err);

struct rtr_join {
    uint32_t slot; /* on success */
    /* A slot (may be the same) whose old connection is dead now, or RTR_NO_WORKER. */
    uint32_t replaced;
    uint64_t old_conn; /* of it: close */
    /* on refusal */
    char field[WIRE_MAX_NAME + 1], ours[WIRE_MAX_VALUE + 1], theirs[WIRE_MAX_VALUE + 1];
};
/* Admits or refuses. Wire, model and layout facts must equal those of all live workers, text facts
 * the router's own where it has the field; numerics may differ (such pairs are not made); free ones
 * too. When *join->replaced is set, the caller has
 * to end the old tickets before it uses the slot: check() says so without admitting. */
int rtr_registry_check(const struct rtr_registry *g, const struct wire_hello *m, uint64_t now_ms,
                       struct rtr_join *join, struct tow_err *err);
int rtr_registry_admit(struct rtr_registry *g, const struct rtr_join *join, uint64_t conn,
                       const struct wire_hello *m, uint64_t now_ms, struct tow_err *err);
/* What check() or admit() refused. True: the log should say it, as this worker was not refused for
 * this reason just before; false too while there is no room to remember another one. */
bool rtr_registry_refused(struct rtr_registry *g, const struct wire_hello *m,
                          const struct rtr_join *join, const struct tow_err *err, uint64_t now_ms);
/* The next one that still knocks, from *at (0 at first) on; NULL: no more. */
const struct rtr_refused *rtr_registry_next_refused(const struct rtr_registry *g, uint32_t *at,
                                                    uint64_t now_ms);
void rtr_registry_lost(struct rtr_registry *g, uint32_t slot);
uint32_t rtr_registry_by_conn(const struct rtr_registry *g, uint64_t conn);
uint32_t rtr_registry_by_name(const struct rtr_registry *g,
                              struct wire_text name); /* GONE ones too */
void rtr_registry_heard(struct rtr_registry *g, uint32_t slot, uint64_t now_ms);
void rtr_registry_beat(struct rtr_registry *g, uint32_t slot, const struct wire_heartbeat *m,
                       uint64_t now_ms);
/* Judges silence and standstill. False: it is dead now, *why a literal;
 * call lost after ending its tickets. */
bool rtr_registry_alive(struct rtr_registry *g, uint32_t slot, uint64_t now_ms, const char **why);

/* Numerics equal, so that a link is worth proving. False with *diff set: which one differs. */
bool rtr_registry_fit(const struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                      struct rtr_join *diff);

/* The outcome of a proof; refuted forgets what an earlier one found. */
void rtr_registry_proved(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                         const struct wire_paired *m);
/* Refutes a pair without a proof: rtr_registry_fit() was false and set diff. */
void rtr_registry_unfit(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                        const struct rtr_join *diff);

/* A greeting found no answer. Which of the two has to relink now, or RTR_NO_WORKER. */
uint32_t rtr_registry_unanswered(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                                 uint64_t now_ms);

void rtr_registry_warmed(struct rtr_registry *g, uint32_t slot); /* a request went through it */
void rtr_registry_failed(struct rtr_registry *g, uint32_t slot, uint64_t now_ms);
void rtr_registry_worked(struct rtr_registry *g, uint32_t slot);
void rtr_registry_busy(struct rtr_registry *g, uint32_t slot, uint32_t retry_ms, uint64_t now_ms);
/* May a request go there? warm_up: into STARTING ones too.
 * A pick of a HALF_OPEN one counts as its probe. */
bool rtr_registry_open(struct rtr_registry *g, uint32_t slot, bool warm_up, uint64_t now_ms);
/* The same for the link of a pair. picked: a request goes this way now;
 * while it is a probe, no other. */
void rtr_registry_link_failed(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                              uint64_t now_ms);
void rtr_registry_link_worked(struct rtr_registry *g, uint32_t prefill, uint32_t decode);
void rtr_registry_link_picked(struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                              uint64_t now_ms);
bool rtr_registry_link_open(const struct rtr_registry *g, uint32_t prefill, uint32_t decode,
                            uint64_t now_ms);
uint32_t rtr_registry_free_pages(const struct rtr_registry *g, uint32_t slot);
uint64_t rtr_registry_free_tokens(const struct rtr_registry *g, uint32_t slot);

const char *
rtr_worker_state_name(const struct rtr_worker *w); /* "starting", "draining" ...; static */

#endif
