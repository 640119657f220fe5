/* tests/support/golden_cases.c - see golden_cases.h. */
#include "tests/support/golden_cases.h"

const struct golden_case golden_cases[N_GOLDEN_CASES] = {
    {"exact-bf16", "exact", 5, true, KERN_IK_F32, KERN_AQ_A128},
    {"exact-bf16", "exact", 130, true, KERN_IK_F32, KERN_AQ_A128},
    {"exact-bf16", "exact", 300, true, KERN_IK_F32, KERN_AQ_A128},
    {"exact-bf16", "exact", 517, true, KERN_IK_F32, KERN_AQ_A128},
    {"native", "exact", 130, true, KERN_IK_F32, KERN_AQ_A128},
    {"nvfp4", "exact", 130, true, KERN_IK_F32, KERN_AQ_A128},
    {"native", "fp4", 5, false, KERN_IK_FP4, KERN_AQ_A128},
    {"native", "fp4", 130, false, KERN_IK_FP4, KERN_AQ_A128},
    {"native", "fp4", 300, false, KERN_IK_FP4, KERN_AQ_A128},
    {"native", "fp4", 517, false, KERN_IK_FP4, KERN_AQ_A128},
    {"native", "fp8", 300, false, KERN_IK_FP8, KERN_AQ_A128},
    {"native", "bf16", 300, false, KERN_IK_BF16, KERN_AQ_A128},
    {"nvfp4", "w4a8", 5, false, KERN_IK_FP4, KERN_AQ_A128},
    {"nvfp4", "w4a8", 300, false, KERN_IK_FP4, KERN_AQ_A128},
    {"nvfp4", "w4a16", 5, false, KERN_IK_FP4, KERN_AQ_NONE},
    {"nvfp4", "w4a16", 300, false, KERN_IK_FP4, KERN_AQ_NONE},
    {"nvfp4", "w4a4", 130, false, KERN_IK_FP4, KERN_AQ_NVFP4},
};
