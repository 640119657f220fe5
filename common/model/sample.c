/* model/sample.c - see sample.h.
 *
 * Penalties and biases become one list of edits, an id once: what the op does with it then has no
 * order. It is made anew for each token, on the host, while the device computes the row; keeping
 * counts on the device was rejected, since they would have to follow sequences that come and go.
 */
#include "common/model/sample.h"

#include "common/base/err.h"
#include "kernels/dev.h"

#include <math.h>
#include <stdlib.h>

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

double model_sample_uniform(uint64_t seed, uint64_t index)
{
    uint64_t z = mix(seed + UINT64_C(0x9e3779b97f4a7c15));
    z = mix(z ^ mix((index + 1) * UINT64_C(0x9e3779b97f4a7c15)));
    return (double)(z >> 11) * 0x1p-53;
}

/* ------------------------------------------------------------------ edits */

bool model_edits_init(struct model_edits *e, int32_t V, int32_t room)
{
    *e = (struct model_edits){.V = V, .room = room};
    e->items = malloc((size_t)room * sizeof *e->items);
    e->place = calloc((size_t)V, sizeof *e->place);
    return e->items && e->place;
}

void model_edits_fini(struct model_edits *e)
{
    free(e->items);
    free(e->place);
    *e = (struct model_edits){0};
}

/* The edit of an id in the row that begins at `from`; NULL: no such id, or no room. */
static struct kern_edit *edit_of(struct model_edits *e, int32_t from, int32_t id, bool *full)
{
    if (id < 0 || id >= e->V) return NULL;
    if (e->place[id] == 0) {
        if (e->n == e->room) {
            *full = true;
            return NULL;
        }
        e->items[e->n++] = (struct kern_edit){.id = id};
        e->place[id] = e->n - from;
    }
    return &e->items[from + e->place[id] - 1];
}

bool model_edits_add(struct model_edits *e, const struct model_draw *d, struct kern_sample_row *out)
{
    const struct model_sampling *p = &d->sampling;
    const bool penalties = p->presence_penalty != 0 || p->frequency_penalty != 0 ||
                           (p->repetition_penalty > 0 && p->repetition_penalty != 1);
    const int32_t from = e->n;
    bool full = false;
    for (int32_t i = 0; penalties && i < d->n_output && !full; i++) {
        struct kern_edit *x = edit_of(e, from, d->output[i], &full);
        if (x) x->count++;
    }
    for (int32_t i = 0; i < p->n_bias && !full; i++) {
        struct kern_edit *x = edit_of(e, from, p->bias[i].id, &full);
        if (x) x->bias += p->bias[i].value <= -100 ? -INFINITY : p->bias[i].value;
    }
    for (int32_t i = from; i < e->n; i++) e->place[e->items[i].id] = 0;
    if (full) {
        e->n = from;
        return false;
    }
    *out = (struct kern_sample_row){.u = model_sample_uniform(p->seed, d->index),
                                    .temperature = p->temperature,
                                    .top_p = p->top_p,
                                    .min_p = p->min_p,
                                    .repetition = p->repetition_penalty,
                                    .presence = p->presence_penalty,
                                    .frequency = p->frequency_penalty,
                                    .top_k = p->top_k,
                                    .n_logprobs = p->n_logprobs,
                                    .edit0 = from,
                                    .n_edits = e->n - from};
    return true;
}

/* ------------------------------------------------------------------ on the host */

struct model_sampler {
    struct kern_dev *dev; /* owned */
    struct model_edits edits;
};

int model_sampler_new(struct model_sampler **out, int32_t V, struct tow_err *err)
{
    struct model_sampler *s = calloc(1, sizeof *s);
    if (!s) return tow_fail(err, TOW_ENOMEM, "sampler: out of memory");
    int rc = kern_dev_open(&s->dev, "cpu", 1, err);
    if (rc == 0 && !model_edits_init(&s->edits, V, V))
        rc = tow_fail(err, TOW_ENOMEM, "sampler: out of memory");
    if (rc < 0) {
        model_sampler_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void model_sampler_free(struct model_sampler *s)
{
    if (!s) return;
    model_edits_fini(&s->edits);
    kern_dev_close(s->dev);
    free(s);
}

int model_sample(struct model_sampler *s, float *logits, struct model_draw *d)
{
    struct kern_sample_row row;
    s->edits.n = 0;
    tow_assert(model_edits_add(&s->edits, d, &row)); /* one row always fits */
    const struct kern_sample p = {.logits = logits,
                                  .rows = &row,
                                  .edits = s->edits.items,
                                  .choices = &d->choice,
                                  .T = 1,
                                  .V = s->edits.V,
                                  .n_edits = s->edits.n};
    const int rc = kern_dev_ops(s->dev)->sample(kern_dev_stream(s->dev), &p);
    return rc < 0 ? rc : d->choice.rc;
}
