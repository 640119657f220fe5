/* model/sample.c - see sample.h.
 *
 * Cuts (top_k, top_p, min_p) need tokens in falling order, but rarely many of them: a heap is built
 * in O(V) and popped until the cut is reached.
 * A full sort of 129 K logits was rejected (milliseconds a token). */
#include "common/model/sample.h"

#include "common/base/err.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

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

int64_t model_sample_scratch(int32_t V)
{
    return (int64_t)V * (int64_t)(sizeof(float) + sizeof(int32_t));
}

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

static void logprobs(const float *logits, int32_t V, int32_t want, int32_t *heap,
                     struct model_choice *out)
{
    float m = -INFINITY;
    for (int32_t i = 0; i < V; i++)
        if (logits[i] > m) m = logits[i];
    double lse = 0;
    if (isinf(m)) {
        int32_t n_inf = 0;
        for (int32_t i = 0; i < V; i++) n_inf += logits[i] == m;
        out->logprob = logits[out->id] == m ? (float)-log((double)n_inf) : -INFINITY;
    } else {
        double sum = 0;
        for (int32_t i = 0; i < V; i++) sum += exp((double)logits[i] - (double)m);
        /* cppcheck-suppress invalidFunctionArg ; the largest logit alone adds 1 */
        lse = (double)m + log(sum);
        out->logprob = (float)((double)logits[out->id] - lse);
    }
    out->n_top = want < V ? want : V;
    if (out->n_top == 0) return;
    heap_build(heap, V, logits);
    int32_t n = V;
    for (int32_t k = 0; k < out->n_top; k++) {
        int32_t id = heap_pop(heap, &n, logits);
        out->top_ids[k] = id;
        out->top_logprobs[k] =
            isinf(m) ? (logits[id] == m ? 0.0f : -INFINITY) : (float)((double)logits[id] - lse);
    }
}

static int32_t argmax(const float *x, int32_t V)
{
    int32_t best = 0;
    for (int32_t i = 1; i < V; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

static int32_t draw_all(const float *x, int32_t V, double m, double inv_t, double u)
{
    double sum = 0;
    for (int32_t i = 0; i < V; i++) sum += exp(((double)x[i] - m) * inv_t);
    double at = u * sum, acc = 0;
    int32_t last = 0;
    for (int32_t i = 0; i < V; i++) {
        double e = exp(((double)x[i] - m) * inv_t);
        if (e <= 0) continue;
        acc += e;
        last = i;
        if (at < acc) return i;
    }
    return last; /* rounding left u*sum a hair above the last partial sum */
}

/* Tokens come off the heap only as far as the cut needs them. */
static int32_t draw_cut(const float *x, int32_t V, const struct model_sampling *p, double m,
                        double inv_t, double u, int32_t *heap)
{
    heap_build(heap, V, x);
    const int32_t *falling = heap + V - 1; /* falling[-j] is the j-th best, once popped */
    int32_t n = V, popped = 0, limit = p->top_k > 0 && p->top_k < V ? p->top_k : V;
    double total = 0; /* mass that top_p is a share of: what top_k left over */
    if (limit < V) {
        for (; popped < limit; popped++)
            total += exp(((double)x[heap_pop(heap, &n, x)] - m) * inv_t);
    } else {
        for (int32_t i = 0; i < V; i++) total += exp(((double)x[i] - m) * inv_t);
    }
    int32_t kept = 0;
    double mass = 0;
    while (kept < limit && (kept == 0 || p->top_p >= 1 || mass < (double)p->top_p * total)) {
        if (kept == popped) {
            heap_pop(heap, &n, x);
            popped++;
        }
        double e = exp(((double)x[falling[-kept]] - m) * inv_t);
        if (kept > 0 && (e < (double)p->min_p || e <= 0)) break;
        mass += e;
        kept++;
    }
    double at = u * mass, acc = 0;
    for (int32_t j = 0; j < kept; j++) {
        acc += exp(((double)x[falling[-j]] - m) * inv_t);
        if (at < acc) return falling[-j];
    }
    return falling[-(kept - 1)];
}

int model_sample(const float *logits, int32_t V, const struct model_sampling *p,
                 const int32_t *output, int32_t n_output, uint64_t index, void *scratch,
                 struct model_choice *out)
{
    float *x = scratch;
    int32_t *heap = (int32_t *)(x + V);
    bool any = false;
    for (int32_t i = 0; i < V; i++) {
        if (isnan(logits[i])) return TOW_ENUMERIC;
        any |= logits[i] > -INFINITY;
    }
    if (!any) return TOW_ENUMERIC;
    memcpy(x, logits, (size_t)V * sizeof *x);
    bool scaled = p->repetition_penalty > 0 && p->repetition_penalty != 1;
    if (p->presence_penalty != 0 || scaled) {
        memset(heap, 0,
               (size_t)V * sizeof *heap); /* not in use yet: marks of ids already counted */
        for (int32_t i = 0; i < n_output; i++) {
            int32_t id = output[i];
            if (id < 0 || id >= V || heap[id]) continue;
            heap[id] = 1;
            if (scaled)
                x[id] = x[id] > 0 ? x[id] / p->repetition_penalty : x[id] * p->repetition_penalty;
            x[id] -= p->presence_penalty;
        }
    }
    if (p->frequency_penalty != 0)
        for (int32_t i = 0; i < n_output; i++)
            if (output[i] >= 0 && output[i] < V) x[output[i]] -= p->frequency_penalty;
    for (int32_t i = 0; i < p->n_bias; i++)
        if (p->bias[i].id >= 0 && p->bias[i].id < V)
            x[p->bias[i].id] =
                p->bias[i].value <= -100 ? -INFINITY : x[p->bias[i].id] + p->bias[i].value;

    int32_t best = argmax(x, V);
    if (!(x[best] > -INFINITY)) return TOW_ENUMERIC; /* the bias banned everything */
    if (p->temperature <= 0 || isinf(x[best])) {
        out->id = best;
    } else {
        double u = model_sample_uniform(p->seed, index), m = x[best],
               inv_t = 1.0 / (double)p->temperature;
        bool cut = (p->top_k > 0 && p->top_k < V) || p->top_p < 1 || p->min_p > 0;
        out->id = cut ? draw_cut(x, V, p, m, inv_t, u, heap) : draw_all(x, V, m, inv_t, u);
    }
    out->n_top = 0;
    out->logprob = 0;
    if (p->n_logprobs >= 0)
        logprobs(logits, V, p->n_logprobs < MODEL_MAX_LOGPROBS ? p->n_logprobs : MODEL_MAX_LOGPROBS,
                 heap, out);
    return 0;
}
