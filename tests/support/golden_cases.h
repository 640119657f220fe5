/* tests/support/golden_cases.h - the end-to-end goldens, and how each was made.
 *
 * A case is tests/golden/data/CKPT/expected/VARIANT-LENGTH.safetensors, computed from
 * CKPT/checkpoint in this mode, with these keys and expert activations.
 */
#ifndef TESTS_SUPPORT_GOLDEN_CASES_H
#define TESTS_SUPPORT_GOLDEN_CASES_H

#include "common/model/forward.h"

struct golden_case {
    const char *ckpt, *variant;
    int length;
    bool exact;
    enum kern_ik_fmt ik;
    enum kern_act_quant aq;
};
enum { N_GOLDEN_CASES = 17 };
extern const struct golden_case golden_cases[N_GOLDEN_CASES];

#endif
