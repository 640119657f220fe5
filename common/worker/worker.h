/* worker/worker.h - what a prefill and a decode process have in common: settings, model, pool,
 * threads, routers.
 *
 * Why      The two roles differ in which tickets they take and what they do with them, and in
 *          nothing else. The process around that (flags, checkpoint, page pool, transfer and engine
 *          thread, connections to routers, heartbeats, own HTTP status, drain) is here once.
 * Owner    The control thread: every hook and every call.
 * Order    work_run() loads and checks everything first;
 *          a worker joins no router before it could serve.
 */
#ifndef WORK_WORKER_H
#define WORK_WORKER_H

#include "common/base/opt.h"
#include "common/kv/mover.h"
#include "common/kv/pool.h"
#include "common/model/forward.h"
#include "common/model/settings.h"
#include "common/worker/engine.h"
#include "proto/messages.h"

struct net_loop;
struct tow_metrics;
struct work;

/* Settings of both roles, filled from flags, environment and file. */
struct work_settings {
    const char *model_dir, *name, *join_token_file, *fault;
    struct tow_strings join;
    struct tow_addr status;
    struct model_settings engine;
    int64_t context_length, kv_pages, lease_ms, drain_s, step_limit_s;
    uint64_t host_tier;
    double memory_fraction;
    int log_level, log_format;
};

/* One role. All hooks are called on the control thread with the role's object. */
struct work_role {
    const char *program, *about;
    enum wire_role role;
    const struct tow_opt *options; /* flags besides the common ones */
    size_t n_options;
    /* After flags are read, before anything is opened.
     * max_rows, max_samples, max_tickets, n_tails must be set. */
    int (*plan)(struct work *w, struct tow_err *err);
    int (*start)(struct work *w, void **self, struct tow_err *err);
    void (*stop)(void *self); /* mover and engine are closed already */
    void (*on_message)(void *self, uint64_t owner, const struct wire_msg *m);
    void (*on_router_lost)(void *self, uint64_t owner);
    void (*on_move)(void *self, const struct kv_mover_event *ev); /* never RELINKED */
    /* Pages have left the device, see work_cache_out(); NULL: none do. */
    void (*on_landed)(void *self);
    /* Every step must have an err; one that failed with scope PROCESS ends the process instead. */
    void (*on_stepped)(void *self, struct work_step *step);
    void (*on_tick)(void *self, uint64_t now_ms);    /* every WORK_TICK_MS */
    void (*on_drain)(void *self, uint32_t limit_ms); /* call work_drained() when nothing is left */
    /* Queues and tickets; the rest is filled in. */
    void (*load)(void *self, struct wire_heartbeat *out);
    void (*collect)(void *self); /* set gauges before a print */
};
enum { WORK_TICK_MS = 100 };

struct work {
    const struct work_role *role;
    struct work_settings set;
    struct model *model;
    const struct kern_kv_layout *layout;
    struct kv_mover *mover;
    struct kv_pool *pool;
    struct work_cache *cache; /* the device's side of the pool */
    struct work_engine *engine;
    struct net_loop *loop;
    struct tow_metrics *metrics;
    uint64_t incarnation; /* changes when the data link is made anew, see RELINK */
    char name[WIRE_MAX_NAME + 1];
    uint32_t max_context, n_pages;
    /* set by plan() */
    int32_t max_rows, max_samples;
    uint32_t max_tickets; /* live at once at the mover */
    uint32_t n_tails;     /* sequences that hold a tail at once */
    bool tails_of_batch;  /* n_tails follows from --max-batch: an error names it */
    uint32_t max_batch, chunk_tokens, max_pending_tokens, reserve_tokens; /* for HELLO */
    struct work_own *own;
};

/* Runs a worker until it has drained or died; the exit status, 1 also after a drain that was cut
 * short. */
int work_run(const struct work_role *role, int argc, char **argv);

/* To the router behind owner; a router that is gone is skipped. */
void work_send(struct work *w, uint64_t owner, const struct wire_msg *m);
uint64_t work_now_ms(struct work *w);
/* kv_mover_connect() with its errors, and a kv_mover_drop() that is repeated until it is taken. */
int work_connect_peer(struct work *w, const char *name, uint64_t incarnation, const void *address,
                      size_t bytes);
void work_drop_peer(struct work *w, const char *name, uint64_t incarnation);
/* cut: the drain's limit ended work; the exit status is 1 then. */
void work_drained(struct work *w, bool cut);
/* Ends the process with an error: the engine's state is unknown. */
void work_die(struct work *w, const struct tow_err *err);
/* Tokens per second while busy, an average over the last steps, for HEARTBEAT. */
void work_measured(struct work *w, uint32_t tokens, uint64_t busy_us);

/* The sampler's parameters from the wire; bias must hold wire_n_bias() entries and outlive the
 * result. */
void work_sampling(const struct wire_sampling *s, struct model_bias *bias,
                   struct model_sampling *out);
/* The index_topk of one request: 0 means the worker's own, more than the engine takes is cut. */
int32_t work_topk(const struct work *w, uint32_t asked);
/* One row of log-probabilities as TOKENS carries them: bytes written (4 + 8 * n_top). */
uint32_t work_pack_logprobs(const struct kern_choice *c, uint8_t n_top, void *out);

#endif
