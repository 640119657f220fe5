/* kernels/sample/sample_cpu.c - one part is one row.
 *
 * Cuts (top_k, top_p) and the largest log-probabilities need tokens in falling order, but rarely
 * many of them: a heap is built in O(V) and popped until the cut is reached. A full sort of 129 K
 * logits was rejected (milliseconds a token).
 */
#include "kernels/cpu/team.h"
#include "kernels/cpu/vec.h"
#include "kernels/ops.h"
#include "kernels/sample/sample.h"

#include "common/base/err.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

struct job {
    const struct kern_sample *p;
    uint8_t *scratch; /* a thread: masses [V], heap [V] */
    size_t stride;
};

/* a before b in falling order of logit, then rising id. */
static bool before(const float *x, int32_t a, int32_t b)
{
    return x[a] == x[b] ? a < b : x[a] > x[b];
}

static void sift_down(int32_t *heap, int32_t n, int32_t i, const float *x)
{
    int32_t moving = heap[i];
    for (;;) {
        int32_t c = 2 * i + 1;
        if (c >= n) break;
        if (c + 1 < n && before(x, heap[c + 1], heap[c])) c++;
        if (!before(x, heap[c], moving)) break;
        heap[i] = heap[c];
        i = c;
    }
    heap[i] = moving;
}

static void heap_build(int32_t *heap, int32_t n, const float *x)
{
    for (int32_t i = 0; i < n; i++) heap[i] = i;
    for (int32_t i = n / 2 - 1; i >= 0; i--) sift_down(heap, n, i, x);
}

/* Removes and returns the best; the freed slot behind the heap receives it, so the popped ones end
 * up at heap[n-1], heap[n-2], ... in falling order. */
static int32_t heap_pop(int32_t *heap, int32_t *n, const float *x)
{
    int32_t top = heap[0];
    heap[0] = heap[--*n];
    heap[*n] = top;
    if (*n > 0) sift_down(heap, *n, 0, x);
    return top;
}

static int32_t argmax(const float *x, int32_t V)
{
    int32_t best = 0;
    for (int32_t i = 1; i < V; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* Each token's mass; their sum. */
static uint64_t masses(const float *x, int32_t V, float max, double inv_t, uint64_t *mass)
{
    uint64_t sum = 0;
    for (int32_t i = 0; i < V; i++) mass[i] = kern_mass(x[i], max, inv_t);
    for (int32_t i = 0; i < V; i++) sum += mass[i];
    return sum;
}

/* Takes the mass of tokens that top_k and top_p cut. */
static void cut(const float *x, int32_t V, const struct kern_sample_row *r, uint64_t *mass,
                uint64_t total, int32_t *heap)
{
    const int32_t *falling = heap + V - 1; /* falling[-j] is the j-th best, once popped */
    const bool some = r->top_k > 0 && r->top_k < V;
    const int32_t limit = some ? r->top_k : V;
    int32_t n = V, kept = 0;
    heap_build(heap, V, x);
    if (some) {
        total = 0;
        while (V - n < limit) total += mass[heap_pop(heap, &n, x)];
    }
    const uint64_t need = kern_share(r->top_p, total);
    for (uint64_t sum = 0; kept < limit && (r->top_p < 1 ? sum < need : some); kept++) {
        if (kept == V - n) heap_pop(heap, &n, x);
        sum += mass[falling[-kept]];
    }
    for (int32_t i = 0; i < V - kept; i++) mass[heap[i]] = 0;
}

static int32_t draw(const float *x, int32_t V, const struct kern_sample_row *r, float max,
                    uint64_t *mass, int32_t *heap)
{
    uint64_t sum = masses(x, V, max, 1.0 / (double)r->temperature, mass);
    if ((r->top_k > 0 && r->top_k < V) || r->top_p < 1) cut(x, V, r, mass, sum, heap);
    const uint64_t least = kern_share(r->min_p, KERN_MASS_ONE);
    sum = 0;
    for (int32_t i = 0; i < V; i++) {
        if (mass[i] < least) mass[i] = 0;
        sum += mass[i];
    }
    const uint64_t place = kern_place(r->u, sum);
    uint64_t at = 0;
    for (int32_t i = 0;; i++) {
        at += mass[i];
        if (place < at) return i;
    }
}

static void logprobs(const float *x, int32_t V, int32_t n_top, uint64_t *mass, int32_t *heap,
                     struct kern_choice *out)
{
    const float max = x[argmax(x, V)];
    const double ln = kern_ln_mass(masses(x, V, max, 1.0, mass));
    int32_t n = V;
    out->logprob = kern_logprob(x[out->id], max, ln);
    if (n_top > KERN_SAMPLE_TOP) n_top = KERN_SAMPLE_TOP;
    if (n_top > V) n_top = V;
    if (n_top > 0) heap_build(heap, V, x);
    for (out->n_top = 0; out->n_top < n_top; out->n_top++) {
        const int32_t id = heap_pop(heap, &n, x);
        out->top_ids[out->n_top] = id;
        out->top_logprobs[out->n_top] = kern_logprob(x[id], max, ln);
    }
}

/* A row that a token can be drawn from. */
static bool good(const float *x, int32_t V)
{
    bool nan = false, any = false;
    for (int32_t i = 0; i < V; i++) {
        nan |= isnan(x[i]);
        any |= x[i] > -INFINITY;
    }
    return !nan && any;
}

static void edit(float *x, int32_t V, const struct kern_sample_row *r, struct kern_edit *e)
{
    for (int32_t i = 0; i < r->n_edits; i++) {
        if (e[i].id < 0 || e[i].id >= V) continue;
        e[i].was = x[e[i].id];
        x[e[i].id] = kern_edited(e[i].was, r, e[i].count, e[i].bias);
    }
}
static void put_back(float *x, int32_t V, const struct kern_sample_row *r,
                     const struct kern_edit *e)
{
    for (int32_t i = 0; i < r->n_edits; i++)
        if (e[i].id >= 0 && e[i].id < V) x[e[i].id] = e[i].was;
}

static void sample_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_sample *p = j->p;
    const struct kern_sample_row *r = &p->rows[part];
    const int32_t V = p->V;
    float *x = p->logits + part * V;
    struct kern_edit *e = r->n_edits ? p->edits + r->edit0 : NULL;
    struct kern_choice *out = &p->choices[part];
    uint64_t *mass = (uint64_t *)(j->scratch + j->stride * (size_t)thread);
    int32_t *heap = (int32_t *)(mass + V);

    memset(out, 0, sizeof *out);
    out->id = -1;
    out->rc = TOW_ENUMERIC;
    if (!good(x, V)) return;
    edit(x, V, r, e);
    const int32_t best = argmax(x, V);
    const float max = x[best];
    if (max > -INFINITY) {
        out->rc = 0;
        out->id = r->temperature > 0 && !isinf(max) ? draw(x, V, r, max, mass, heap) : best;
    }
    put_back(x, V, r, e);
    if (out->rc == 0 && r->n_logprobs >= 0) logprobs(x, V, r->n_logprobs, mass, heap, out);
}

int KERN_ISA(kern_sample)(struct kern_stream *s, const struct kern_sample *p)
{
    struct job j = {.p = p};
    if (p->T == 0) return 0;
    j.scratch = kern_scratch_each(s, KERN_SLOT_OP,
                                  (size_t)p->V * (sizeof(uint64_t) + sizeof(int32_t)), &j.stride);
    if (!j.scratch) return TOW_ENOMEM;
    kern_parallel(s, p->T, sample_part, &j);
    return 0;
}
