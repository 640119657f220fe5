/* worker/engine.c - see engine.h. Two inboxes, one each way;
 * the thread sleeps on a condition in between. */
#include "common/worker/engine.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/inbox.h"
#include "common/worker/cache.h"
#include "kernels/dev.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct work_engine {
    struct model *model;      /* borrowed */
    struct work_cache *cache; /* borrowed */
    int32_t max_samples;
    int32_t *ids;                          /* owned [max_rows] */
    int32_t *rows;                         /* owned [max_samples] */
    struct model_draw *draws;              /* owned [max_samples] */
    struct kern_seq *seqs;                 /* owned [max_rows] */
    const struct model_capture **captures; /* owned [max_rows] */
    struct tow_inbox *todo, *done;         /* of struct work_step * */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more;
    bool posted, quit; /* under lock */
    uint32_t n_inside; /* submitted and not ended; under lock */
    /* Since when the oldest of them could have been running; 0: none. Set when it is submitted, not
     * when the thread takes it: a thread that hangs takes nothing. Written under lock. */
    _Atomic uint64_t started_ms;
    _Atomic uint64_t n_steps;
};

static int await_pages(struct work_engine *e, const struct work_step *step)
{
    const int rc = step->await ? work_cache_await(e->cache) : 0;
    return rc < 0 ? tow_fail(step->err, rc, "engine: pages to the device: %s", tow_err_text(rc))
                  : 0;
}

static void run(struct work_engine *e, struct work_step *step)
{
    int32_t T = 0, n_rows = 0;
    bool captured = false;
    for (int32_t i = 0; i < step->n; i++) {
        struct work_item *it = &step->items[i];
        it->choice.rc = 0;
        it->seq.row0 = T;
        memcpy(e->ids + T, it->ids, (size_t)it->seq.n_rows * sizeof *e->ids);
        e->seqs[i] = it->seq;
        e->seqs[i].tail = work_cache_tail(e->cache, it->seq.tail);
        e->captures[i] = it->capture;
        if (it->capture) captured = true;
        T += it->seq.n_rows;
        if (!it->sample) continue;
        e->draws[n_rows] = (struct model_draw){.sampling = it->sampling,
                                               .output = it->output,
                                               .n_output = it->n_output,
                                               .index = it->index};
        e->rows[n_rows++] = T - 1;
    }
    struct model_batch b = {.ids = e->ids,
                            .T = T,
                            .seqs = e->seqs,
                            .n_seqs = step->n,
                            .logit_rows = e->rows,
                            .n_logit_rows = n_rows,
                            .draws = e->draws,
                            .captures = captured ? e->captures : NULL,
                            .pages = work_cache_pages(e->cache),
                            .n_pages = work_cache_capacity(e->cache)};
    step->rc = tow_fault("engine.step") ? tow_fail(step->err, TOW_EDEVICE, "engine: injected fault")
                                        : await_pages(e, step);
    if (step->rc == 0 && tow_fault("engine.memory"))
        step->rc = tow_fail(step->err, TOW_ENOMEM, "engine: injected lack of memory");
    if (step->rc == 0) step->rc = model_forward(e->model, &b, step->err);
    if (step->rc < 0) return;
    for (int32_t i = 0; i < step->n; i++) work_cache_finish(e->cache, &step->items[i].whole);
    for (int32_t i = 0, r = 0; i < step->n; i++)
        if (step->items[i].sample) step->items[i].choice = e->draws[r++].choice;
}

static void count_inside(struct work_engine *e, int change)
{
    pthread_mutex_lock(&e->lock);
    uint32_t before = e->n_inside;
    e->n_inside = before + (uint32_t)change;
    if (change < 0 || before == 0) atomic_store(&e->started_ms, e->n_inside ? tow_now_ms() : 0);
    pthread_mutex_unlock(&e->lock);
}

static void *thread_main(void *arg)
{
    struct work_engine *e = arg;
    kern_dev_use(model_peek_dev(e->model));
    for (;;) {
        struct work_step *step;
        if (tow_inbox_take(e->todo, &step)) {
            uint64_t t0 = tow_now_us();
            if (step->n == 0)
                (void)tow_fault("engine.probe"); /* may hang; nothing can fail */
            else
                run(e, step);
            step->busy_us = tow_now_us() - t0;
            count_inside(e, -1);
            if (step->n > 0) atomic_fetch_add(&e->n_steps, 1);
            tow_assert(tow_inbox_post(e->done, &step) == 0);
            continue;
        }
        pthread_mutex_lock(&e->lock);
        while (!e->posted && !e->quit) pthread_cond_wait(&e->more, &e->lock);
        e->posted = false;
        bool quit = e->quit;
        pthread_mutex_unlock(&e->lock);
        if (quit) return NULL;
    }
}

int work_engine_open(struct work_engine **out, struct model *m, struct work_cache *cache,
                     int32_t max_samples, void (*wake)(void *arg), void *wake_arg,
                     struct tow_err *err)
{
    const int32_t max_rows = model_peek_options(m)->max_rows;
    struct work_engine *e = calloc(1, sizeof *e);
    if (!e) return tow_fail(err, TOW_ENOMEM, "engine: out of memory");
    e->model = m;
    e->cache = cache;
    e->max_samples = max_samples;
    e->ids = malloc((size_t)max_rows * sizeof *e->ids);
    e->rows = malloc((size_t)max_samples * sizeof *e->rows);
    e->draws = malloc((size_t)max_samples * sizeof *e->draws);
    e->seqs = malloc((size_t)max_rows * sizeof *e->seqs);
    e->captures = malloc((size_t)max_rows * sizeof *e->captures);
    int rc = e->ids && e->rows && e->draws && e->seqs && e->captures
                 ? 0
                 : tow_fail(err, TOW_ENOMEM, "engine: out of memory");
    if (rc == 0)
        rc =
            tow_inbox_new(&e->todo, WORK_ENGINE_QUEUE, sizeof(struct work_step *), NULL, NULL, err);
    if (rc == 0)
        rc = tow_inbox_new(&e->done, 2 * WORK_ENGINE_QUEUE + 2, sizeof(struct work_step *), wake,
                           wake_arg, err);
    if (rc < 0) goto fail;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->more, NULL);
    if (pthread_create(&e->thread, NULL, thread_main, e) != 0) {
        pthread_cond_destroy(&e->more);
        pthread_mutex_destroy(&e->lock);
        rc = tow_fail(err, TOW_ESYS, "engine: no thread");
        goto fail;
    }
    *out = e;
    return 0;

fail:
    tow_inbox_free(e->todo);
    tow_inbox_free(e->done);
    free(e->ids);
    free(e->rows);
    free(e->draws);
    free(e->seqs);
    free(e->captures);
    free(e);
    return rc;
}

void work_engine_close(struct work_engine *e)
{
    if (!e) return;
    pthread_mutex_lock(&e->lock);
    e->quit = true;
    pthread_cond_signal(&e->more);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    pthread_cond_destroy(&e->more);
    pthread_mutex_destroy(&e->lock);
    tow_inbox_free(e->todo);
    tow_inbox_free(e->done);
    free(e->ids);
    free(e->rows);
    free(e->draws);
    free(e->seqs);
    free(e->captures);
    free(e);
}

int work_engine_submit(struct work_engine *e, struct work_step *step)
{
    count_inside(e, 1);
    int rc = tow_inbox_post(e->todo, &step);
    if (rc < 0) {
        count_inside(e, -1);
        return rc;
    }
    pthread_mutex_lock(&e->lock);
    e->posted = true;
    pthread_cond_signal(&e->more);
    pthread_mutex_unlock(&e->lock);
    return 0;
}

struct work_step *work_engine_done(struct work_engine *e)
{
    struct work_step *step = NULL;
    return tow_inbox_take(e->done, &step) ? step : NULL;
}

uint64_t work_engine_running_ms(const struct work_engine *e)
{
    uint64_t t = atomic_load(&((struct work_engine *)(uintptr_t)e)->started_ms);
    return t ? tow_now_ms() - t : 0;
}

uint64_t work_engine_steps(const struct work_engine *e)
{
    return atomic_load(&((struct work_engine *)(uintptr_t)e)->n_steps);
}
