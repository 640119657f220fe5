/* kernels/moe/route_cpu.c - the router: scores, the choice of experts, their weights.
 *
 * A choice is a plain selection of k among E: k is small, and the order (descending, lower id
 * first) falls out. NaN counts as lower than everything, so that ids are always distinct and in
 * range.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/ops.h"

#include "common/base/err.h"

enum { ROWS = 16 };

struct job {
    const struct kern_route *p;
    uint8_t *scratch;
    size_t stride;
};

static void score_row(const struct kern_route *p, const float *z, float *score)
{
    int32_t E = p->E;
    float m = -INFINITY, sum = 0.0f;
    if (p->score_fn == KERN_SCORE_SOFTMAX)
        for (int32_t e = 0; e < E; e++) m = z[e] > m ? z[e] : m;
    for (int32_t e = 0; e < E; e += 16) {
        int w = E - e < 16 ? E - e : 16;
        v16 a = v_loadn(z + e, w);
        if (p->score_fn == KERN_SCORE_SQRTSOFTPLUS) a = v_sqrt(v_softplus(a));
        if (p->score_fn == KERN_SCORE_SIGMOID) a = v_sigmoid(a);
        if (p->score_fn == KERN_SCORE_SOFTMAX) a = v_exp(v_sub(a, v_set1(m)));
        v_store(score + e, a);
    }
    if (p->score_fn != KERN_SCORE_SOFTMAX) return;
    for (int32_t e = 0; e < E; e++) sum += score[e];
    for (int32_t e = 0; e < E; e++) score[e] /= sum;
}

static bool better(float a, float b)
{
    return a > b || (a == a && b != b);
}

/* Takes the best k of key into ids; key of a taken one is not changed, `taken` marks it. */
static void choose(const float *key, int32_t E, int32_t k, uint8_t *taken, int32_t *ids)
{
    for (int32_t e = 0; e < E; e++) taken[e] = 0;
    for (int32_t i = 0; i < k; i++) {
        int32_t best = -1;
        for (int32_t e = 0; e < E; e++)
            if (!taken[e] && (best < 0 || better(key[e], key[best]))) best = e;
        taken[best] = 1;
        ids[i] = best;
    }
}

static bool from_table(const struct kern_route *p, int64_t t, int32_t *ids)
{
    int32_t id = p->ids[t];
    if (id < 0 || id >= p->V) return false;
    for (int32_t i = 0; i < p->k; i++) {
        const uint8_t *at = (const uint8_t *)p->tid2eid + ((int64_t)id * p->k + i) * p->tid_bytes;
        int64_t e = 0;
        int32_t e4;
        if (p->tid_bytes == 8) {
            memcpy(&e, at, 8);
        } else {
            memcpy(&e4, at, 4);
            e = e4;
        }
        ids[i] = e >= 0 && e < p->E ? (int32_t)e : -1;
    }
    return true;
}

static void route_row(const struct kern_route *p, int64_t t, float *score, float *key,
                      uint8_t *taken)
{
    int32_t *ids = p->experts + t * p->k, E = p->E;
    float *w = p->weights + t * p->k, sum = 0.0f, margin = INFINITY;
    score_row(p, p->logits + t * E, score);
    if (p->tid2eid) {
        if (!from_table(p, t, ids))
            for (int32_t i = 0; i < p->k; i++) ids[i] = -1;
    } else {
        for (int32_t e = 0; e < E; e++)
            key[e] = p->bias ? score[e] + kern_f32_at(p->bias, e) : score[e];
        choose(key, E, p->k, taken, ids);
        float last = key[ids[p->k - 1]], next = NAN;
        for (int32_t e = 0; e < E; e++)
            if (!taken[e] && better(key[e], next)) next = key[e];
        if (p->k < E && last == last && next == next) margin = last - next;
    }
    if (p->margin) p->margin[t] = margin;
    for (int32_t i = 0; i < p->k; i++) {
        w[i] = ids[i] < 0 ? 0.0f : score[ids[i]];
        sum += w[i];
    }
    bool divide = p->normalize && p->score_fn != KERN_SCORE_SOFTMAX;
    for (int32_t i = 0; i < p->k; i++)
        if (ids[i] >= 0) w[i] = (divide ? w[i] / sum : w[i]) * p->scale;
}

static void route_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_route *p = j->p;
    float *score = (float *)(j->scratch + j->stride * (size_t)thread);
    float *key = score + kern_pad16(p->E);
    uint8_t *taken = (uint8_t *)(key + kern_pad16(p->E));
    for (int64_t t = part * ROWS; t < p->T && t < (part + 1) * ROWS; t++)
        route_row(p, t, score, key, taken);
}

int KERN_ISA(kern_route)(struct kern_stream *s, const struct kern_route *p)
{
    struct job j = {.p = p};
    if (p->T == 0) return 0;
    j.scratch = kern_scratch_each(s, KERN_SLOT_OP, (size_t)kern_pad16(p->E) * 9, &j.stride);
    if (!j.scratch) return TOW_ENOMEM;
    kern_parallel(s, (p->T + ROWS - 1) / ROWS, route_part, &j);
    return 0;
}
