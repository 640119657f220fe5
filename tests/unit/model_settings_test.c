/* Tests of common/model/settings.h. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/model/settings.h"

#include <string.h>

/* Reads flags after a program's name; n of them. */
static int take(const char *const *flags, int n, struct model_options *out, struct tow_err *err)
{
    struct model_settings set = {0};
    const struct tow_opt table[] = {MODEL_OPTS(&set)};
    const struct tow_opts_spec spec = {
        .program = "test", .about = "test", .table = table, .n = sizeof table / sizeof *table};
    const char *argv[8] = {"test"};
    enum tow_opts_do what;
    struct tow_opts *opts = NULL;
    for (int i = 0; i < n; i++) argv[i + 1] = flags[i];
    int rc = tow_opts_new(&opts, &spec, n + 1, argv, NULL, &what, err);
    if (rc == 0) rc = model_settings_check(&set, opts, err);
    if (rc == 0) model_settings_take(&set, out);
    out->device = NULL; /* dies with opts */
    tow_opts_free(opts);
    return rc;
}

static void test_model_settings__defaults_are_the_formats_of_training(void **state)
{
    (void)state;
    struct model_options o = {.max_rows = 7};
    struct tow_err err;
    assert_int_equal(take(NULL, 0, &o, &err), 0);
    assert_false(o.exact);
    assert_int_equal(o.kv_fmt, KERN_KV_FP8);
    assert_int_equal(o.ik_fmt, KERN_IK_FP4);
    assert_int_equal(o.expert_aq, KERN_AQ_A128);
    assert_false(o.fp8_products);
    assert_int_equal(o.index_topk, 0);
    assert_int_equal(o.n_threads, 0);
    assert_int_equal(o.max_rows, 7);
}

static void test_model_settings__each_name_means_its_format(void **state)
{
    (void)state;
    struct model_options o = {0};
    struct tow_err err;
    for (int i = 0; model_kv_names[i]; i++) {
        const char *const flags[] = {"--kv-dtype", model_kv_names[i]};
        assert_int_equal(take(flags, 2, &o, &err), 0);
        assert_int_equal(o.kv_fmt, i);
    }
    for (int i = 0; model_ik_names[i]; i++) {
        const char *const flags[] = {"--index-keys", model_ik_names[i]};
        if (i == KERN_IK_F32) {
            assert_int_equal(take(flags, 2, &o, &err), TOW_ECONFIG);
            assert_non_null(strstr(err.msg, "--index-keys f32: only with --numerics exact"));
            continue;
        }
        assert_int_equal(take(flags, 2, &o, &err), 0);
        assert_int_equal(o.ik_fmt, i);
    }
    assert_string_equal(model_kv_names[KERN_KV_BF16], "bf16");
    assert_string_equal(model_ik_names[KERN_IK_FP8], "fp8");
    const char *const fp8[] = {"--products=fp8"};
    assert_int_equal(take(fp8, 1, &o, &err), 0);
    assert_true(o.fp8_products);
    const char *const w4a16[] = {"--expert-activations=w4a16"};
    assert_int_equal(take(w4a16, 1, &o, &err), 0);
    assert_int_equal(o.expert_aq, KERN_AQ_NONE);
    const char *const w4a4[] = {"--expert-activations=w4a4"};
    assert_int_equal(take(w4a4, 1, &o, &err), 0);
    assert_int_equal(o.expert_aq, KERN_AQ_NVFP4);
}

static void test_model_settings__exact_means_f32_and_contradicts_other_types(void **state)
{
    (void)state;
    struct model_options o = {0};
    struct tow_err err;
    const char *const exact[] = {"--numerics=exact"};
    assert_int_equal(take(exact, 1, &o, &err), 0);
    assert_true(o.exact);
    assert_int_equal(o.kv_fmt, KERN_KV_F32);
    assert_int_equal(o.ik_fmt, KERN_IK_F32);
    const char *const kv[] = {"--numerics=exact", "--kv-dtype=bf16"};
    assert_int_equal(take(kv, 2, &o, &err), TOW_ECONFIG);
    assert_string_equal(err.msg, "--kv-dtype bf16: --numerics exact keeps f32");
    const char *const keys[] = {"--numerics=exact", "--index-keys=fp4"};
    assert_int_equal(take(keys, 2, &o, &err), TOW_ECONFIG);
    assert_string_equal(err.msg, "--index-keys fp4: --numerics exact keeps f32");
    const char *const codes[] = {"--numerics=exact", "--products=fp8"};
    assert_int_equal(take(codes, 2, &o, &err), TOW_ECONFIG);
    assert_string_equal(
        err.msg, "--products fp8: only with --numerics deployed; exact quantizes no activations");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_settings__defaults_are_the_formats_of_training),
        cmocka_unit_test(test_model_settings__each_name_means_its_format),
        cmocka_unit_test(test_model_settings__exact_means_f32_and_contradicts_other_types),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
