/* model/sample.h - from one row of logits to one token.
 *
 * Why      Prefill samples the first token and decode the rest; both must draw the same token from
 *          the same row, also when a lost stream is computed again elsewhere. So the random number
 *          is a function of (seed, output index) and nothing else is kept between steps.
 * Order    penalties, bias, then: temperature 0 takes the largest (ties: lowest id); else divide by
 *          the temperature, keep top_k, then the smallest set that reaches top_p, then those >=
 *          min_p * best, draw.
 * Logprobs are of the model's own distribution: before penalties, bias, temperature and cuts.
 * Threads  [any thread]; all memory is the caller's.
 */
#ifndef TOW_MODEL_SAMPLE_H
#define TOW_MODEL_SAMPLE_H

#include <stdint.h>

enum { MODEL_MAX_LOGPROBS = 20 };

struct model_bias {
    int32_t id;
    float value; /* -100 .. 100; -100 bans the token */
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
    int32_t n_logprobs;            /* -1 = none, else 0 .. MODEL_MAX_LOGPROBS alternatives */
    const struct model_bias *bias; /* borrowed; [n_bias] */
    int32_t n_bias;
};

struct model_choice {
    int32_t id;
    float logprob; /* valid if n_logprobs >= 0 was asked */
    int32_t n_top;
    int32_t top_ids[MODEL_MAX_LOGPROBS];
    float top_logprobs[MODEL_MAX_LOGPROBS]; /* descending; ties: lower id */
};

/* Scratch bytes for rows of V logits. */
int64_t model_sample_scratch(int32_t V);

/* logits [V]; output: the n_output ids generated so far (for penalties); index: number of the token
 * drawn in the whole answer, counted from 0. scratch: model_sample_scratch(V) bytes, 8-byte
 * aligned. TOW_ENUMERIC when the row holds NaN or nothing above -inf.
 * +inf wins over all finite values. */
int model_sample(const float *logits, int32_t V, const struct model_sampling *p,
                 const int32_t *output, int32_t n_output, uint64_t index, void *scratch,
                 struct model_choice *out);

/* The number in [0, 1) that draw `index` under `seed` uses. */
double model_sample_uniform(uint64_t seed, uint64_t index);

#endif
