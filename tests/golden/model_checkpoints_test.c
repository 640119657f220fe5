/* Every checkpoint that comes with the project loads whole: each expected tensor found once,
 * none left over. */
#include "tests/support/check.h"
#include "tests/support/golden.h"

#include "common/base/err.h"
#include "common/model/weights.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *dir;
    size_t tensors, files;
    enum kern_wfmt experts;
    bool input_scales;
} CHECKPOINTS[] = {
    {"tests/golden/data/exact-bf16/checkpoint", 263, 1, KERN_W_BF16, false},
    {"tests/golden/data/native/checkpoint", 339, 3, KERN_W_MXFP4, false},
    {"tests/golden/data/nvfp4/checkpoint", 531, 2, KERN_W_NVFP4, true},
    {"deploy/demo-model", 673, 1, KERN_W_MXFP4, false},
};

static void test_checkpoints__load_whole(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof CHECKPOINTS / sizeof CHECKPOINTS[0]; i++) {
        struct tow_err err = {0};
        struct model_weights *w = NULL;
        if (model_weights_open(&w, CHECKPOINTS[i].dir, NULL, &err) != 0) fail_msg("%s", err.msg);
        assert_int_equal(w->report.n_expected, CHECKPOINTS[i].tensors);
        assert_int_equal(w->report.n_found, CHECKPOINTS[i].tensors);
        assert_int_equal(w->report.n_unused, 0);
        assert_int_equal(w->report.n_files, CHECKPOINTS[i].files);
        assert_int_equal(w->report.experts, CHECKPOINTS[i].experts);
        assert_int_equal(w->report.input_scales, CHECKPOINTS[i].input_scales);
        assert_int_equal(w->shape.n_mtp, 1);
        assert_false(w->report.mtp_absent);
        char a[MODEL_FINGERPRINT_CHARS], b[MODEL_FINGERPRINT_CHARS];
        model_weights_fingerprint(w, a);
        assert_int_equal(model_fingerprint(CHECKPOINTS[i].dir, b, &err), 0);
        assert_string_equal(a, b);
        model_weights_close(w);
    }
}

static void test_shape__rotation_frequencies_equal_the_golden(void **state)
{
    (void)state;
    struct model_shape s = {.rd = 64,
                            .rope_theta = 10000,
                            .compress_rope_theta = 160000,
                            .yarn = true,
                            .yarn_factor = 16,
                            .yarn_beta_fast = 32,
                            .yarn_beta_slow = 1,
                            .yarn_original = 65536};
    struct golden *g = golden_open("unit/rope.safetensors");
    const char *const names[] = {"main.inv_freq", "compress.inv_freq"};
    for (int k = 0; k < 2; k++) {
        float got[32];
        const float *want = golden_f32(g, names[k]);
        model_shape_inv_freq(&s, k ? 4 : 0, got);
        /* pow() of two C libraries may differ in the last place of a double,
         * hardly ever in that of a float. */
        for (int i = 0; i < 32; i++) assert_true(fabsf(got[i] - want[i]) <= 2e-7f * want[i]);
    }
    golden_close(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checkpoints__load_whole),
        cmocka_unit_test(test_shape__rotation_frequencies_equal_the_golden),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
