/* text/sampling.h - what a request may ask of sampling. A record of one holds nothing else, so both
 * are checked against these. */
#ifndef TEXT_SAMPLING_H
#define TEXT_SAMPLING_H

#include "common/text/config.h"

#define TEXT_MAX_TEMPERATURE 2.0
#define TEXT_MAX_PENALTY     2.0 /* presence and frequency, of either sign */
#define TEXT_MIN_REPETITION  0.01
#define TEXT_MAX_REPETITION  10.0
#define TEXT_MAX_BIAS        100.0 /* of either sign */
#define TEXT_MAX_BIASES      1024  /* entries of logit_bias, an id once */
#define TEXT_MAX_INDEX_TOPK  TEXT_CONFIG_MAX_TOPK

#endif
