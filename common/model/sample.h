/* model/sample.h - what a request asks of the sampler, as the op that draws wants it.
 *
 * Why      Prefill samples the first token and decode the rest; both must draw the same token from
 *          the same row, also when a lost stream is computed again elsewhere. So the random number
 *          is a function of (seed, output index) and nothing else is kept between steps.
 * Order    penalties, bias, then: temperature 0 takes the largest (ties: lowest id); else divide by
 *          the temperature, keep top_k, then the smallest set that reaches top_p, then those >=
 *          min_p * best, draw. The op says it to the bit (kernels/ops.h).
 * Logprobs are of the model's own distribution: before penalties, bias, temperature and cuts.
 * Threads  A sampler or a list of edits is one thread's at a time.
 */
#ifndef TOW_MODEL_SAMPLE_H
#define TOW_MODEL_SAMPLE_H

#include "kernels/ops.h"

#include <stdbool.h>
#include <stdint.h>

struct model_sampler;
struct tow_err;

struct model_bias {
    int32_t id;
    float value; /* -100 .. 100; -100 bans the token; an id given twice gets the sum */
};

struct model_sampling {
    float temperature;       /* >= 0 */
    float top_p;             /* 0 < top_p <= 1; 1 = off */
    float min_p;             /* 0 .. 1; 0 = off */
    int32_t top_k;           /* 0 = off */
    float presence_penalty;  /* subtracted once if the token was generated before */
    float frequency_penalty; /* subtracted per earlier occurrence in the output */
    /* Of a token generated before: logit / p if positive, else * p; 0 or 1 = off. */
    float repetition_penalty;
    uint64_t seed;
    int32_t n_logprobs;            /* -1 = none, else 0 .. KERN_SAMPLE_TOP alternatives */
    const struct model_bias *bias; /* borrowed; [n_bias] */
    int32_t n_bias;
};

/* One token to draw, and what was drawn. */
struct model_draw {
    struct model_sampling sampling;
    const int32_t *output; /* [n_output] generated so far, for penalties; borrowed */
    int32_t n_output;
    uint64_t index; /* number of the token in the whole answer, from 0 */
    struct kern_choice choice;
};

/* The number in [0, 1) that draw `index` under `seed` uses. */
double model_sample_uniform(uint64_t seed, uint64_t index);

/* What the rows of one call change of their logits. */
struct model_edits {
    struct kern_edit *items; /* owned [room] */
    int32_t *place;          /* owned [V]: of an id in the row being made, from 1; 0 */
    int32_t n, room, V;
};
/* room >= V, so that the edits of any one row fit. False: no memory; fini is right even so. */
bool model_edits_init(struct model_edits *e, int32_t V, int32_t room);
void model_edits_fini(struct model_edits *e);
/* The draw as a row of the op, its edits added behind those there. False: they do not fit. */
bool model_edits_add(struct model_edits *e, const struct model_draw *d,
                     struct kern_sample_row *out);

/* Draws from logits that the host has. */
int model_sampler_new(struct model_sampler **out, int32_t V, struct tow_err *err);
void model_sampler_free(struct model_sampler *s); /* NULL is fine */
/* logits [V] are the same afterwards. d->choice.rc, or TOW_ENOMEM. */
int model_sample(struct model_sampler *s, float *logits, struct model_draw *d);

#endif
