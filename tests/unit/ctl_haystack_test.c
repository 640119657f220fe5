/* ctl/haystack: texts are the same bytes every time, hold their fact once, and meet a length
 * exactly. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/text/tokenizer.h"
#include "deploy/ctl/haystack.h"

#include <string.h>

static const struct ctl_hard plain = {0};

static uint64_t text_hash(enum ctl_filler filler, uint64_t seed, uint32_t units, int depth)
{
    struct ctl_hay h;
    struct tow_buf out;
    ctl_hay_init(&h, filler, seed, plain);
    tow_buf_init(&out, 0);
    assert_int_equal(ctl_hay_put(&h, units, 3, depth, &out, NULL), 0);
    uint64_t hash = tow_hash64(out.data, out.len);
    tow_buf_fini(&out);
    ctl_hay_fini(&h);
    return hash;
}

/* A result names its cell only, so these bytes may never change under the same seed. */
static void test_ctl_haystack__seed_gives_known_bytes(void **state)
{
    (void)state;
    static const uint64_t known[CTL_FILLERS] = {
        UINT64_C(0x91c2b155cbcea6e5), UINT64_C(0x57e6b363e0d29d97), UINT64_C(0xeb4f375a117f8411),
        UINT64_C(0xed059419e7d34e2f), UINT64_C(0x2ad4cc8bdde74215), UINT64_C(0xf60587ca04f72a80)};
    for (int f = 0; f < CTL_FILLERS; f++)
        assert_int_equal(text_hash((enum ctl_filler)f, 7, 100, 50), known[f]);
}

static void test_ctl_haystack__other_seed_gives_other_text(void **state)
{
    (void)state;
    for (int f = 0; f < CTL_FILLERS; f++)
        assert_int_not_equal(text_hash((enum ctl_filler)f, 7, 100, 50),
                             text_hash((enum ctl_filler)f, 8, 100, 50));
}

/* Grown in steps or at once, asked at one depth after another: the text is a function of its
 * arguments. */
static void test_ctl_haystack__growth_leaves_no_trace(void **state)
{
    (void)state;
    struct ctl_hay h;
    struct tow_buf out;
    ctl_hay_init(&h, CTL_FILL_MIXED, 3, plain);
    tow_buf_init(&out, 0);
    for (uint32_t n = 200; n > 0; n -= 50) {
        tow_buf_clear(&out);
        assert_int_equal(ctl_hay_put(&h, n, 3, 20, &out, NULL), 0);
        assert_int_equal(tow_hash64(out.data, out.len), text_hash(CTL_FILL_MIXED, 3, n, 20));
    }
    tow_buf_fini(&out);
    ctl_hay_fini(&h);
}

static int times(const char *text, const char *what)
{
    int n = 0;
    for (const char *p = text; (p = strstr(p, what)); p++) n++;
    return n;
}

static void test_ctl_haystack__fact_stands_once_at_its_depth(void **state)
{
    (void)state;
    for (int f = 0; f < CTL_FILLERS; f++)
        for (uint64_t seed = 0; seed < 20; seed++)
            for (int depth = 0; depth <= 100; depth += 25) {
                struct ctl_hay h;
                struct tow_buf out;
                ctl_hay_init(&h, (enum ctl_filler)f, seed, plain);
                tow_buf_init(&out, 0);
                assert_int_equal(ctl_hay_put(&h, 400, 0, depth, &out, NULL), 0);
                assert_int_equal(times(out.data, h.value), 1);
                double at = (double)(strstr(out.data, h.value) - out.data) / (double)out.len;
                assert_true(at > depth / 100.0 - 0.03 && at < depth / 100.0 + 0.03);
                /* the question closes the text and names a service that only the fact has */
                assert_string_equal(out.data + out.len - strlen(h.question), h.question);
                assert_non_null(strstr(h.question, h.service));
                assert_true(times(out.data, h.service) <= 2);
                tow_buf_fini(&out);
                ctl_hay_fini(&h);
            }
}

static void test_ctl_haystack__decoys_have_other_values_elsewhere(void **state)
{
    (void)state;
    for (int f = 0; f < CTL_FILLERS; f++)
        for (int strange = 0; strange < 2; strange++) {
            struct ctl_hay h;
            struct tow_buf out;
            ctl_hay_init(&h, (enum ctl_filler)f, 4,
                         (struct ctl_hard){.decoys = CTL_MAX_DECOYS, .strange = strange});
            tow_buf_init(&out, 0);
            assert_int_equal(ctl_hay_put(&h, 300, 0, 50, &out, NULL), 0);
            assert_int_equal(times(out.data, h.value), 1);
            double at = (double)(strstr(out.data, h.value) - out.data) / (double)out.len;
            assert_true(at > 0.45 && at < 0.55);
            assert_non_null(strstr(out.data, "staging"));
            assert_non_null(strstr(out.data, "canary")); /* only decoys are there */
            tow_buf_fini(&out);
            ctl_hay_fini(&h);
        }
}

/* ------------------------------------------------------------------ lengths */

static int count_tokens(void *ctx, const char *text, size_t n, int64_t *tokens, struct tow_err *err)
{
    const struct text_segment seg = {text, n, false};
    struct text_ids ids = {0};
    int rc = text_tokenizer_encode(ctx, &seg, 1, 0, &ids, NULL, err);
    *tokens = (int64_t)ids.n + 5; /* what a chat format adds */
    text_ids_fini(&ids);
    return rc;
}

static void test_ctl_haystack__fit_meets_every_length(void **state)
{
    (void)state;
    struct text_tokenizer *tok = NULL;
    struct tow_err err = {0};
    if (text_tokenizer_load(&tok, "deploy/demo-model/tokenizer.json", &err) < 0)
        fail_msg("%s", err.msg);
    static const int64_t lengths[] = {80, 127, 128, 129, 500, 1024, 1031, 4096};
    for (int f = 0; f < CTL_FILLERS; f++)
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            struct ctl_hay h;
            struct tow_buf out;
            int64_t tokens = 0;
            ctl_hay_init(&h, (enum ctl_filler)f, 11 + i, plain);
            tow_buf_init(&out, 0);
            if (ctl_hay_fit(&h, 40, lengths[i], count_tokens, tok, &out, &err) < 0)
                fail_msg("%s %d: %s", ctl_filler_names[f], (int)lengths[i], err.msg);
            assert_int_equal(count_tokens(tok, out.data, out.len, &tokens, NULL), 0);
            assert_int_equal(tokens, lengths[i]);
            assert_int_equal(times(out.data, h.value), 1);
            tow_buf_fini(&out);
            ctl_hay_fini(&h);
        }
    text_tokenizer_free(tok);
}

/* Two tokens a word: no odd number can be met. */
static int count_even(void *ctx, const char *text, size_t n, int64_t *tokens, struct tow_err *err)
{
    (void)err;
    ++*(int *)ctx;
    *tokens = 0;
    for (size_t i = 0; i < n; i++) *tokens += text[i] == ' ' ? 2 : 0;
    return 0;
}

static void test_ctl_haystack__length_that_cannot_be_is_refused(void **state)
{
    (void)state;
    struct ctl_hay h;
    struct tow_buf out;
    struct tow_err err = {0};
    int calls = 0;
    ctl_hay_init(&h, CTL_FILL_WORDS, 1, plain);
    tow_buf_init(&out, 0);
    assert_int_equal(ctl_hay_fit(&h, 0, 301, count_even, &calls, &out, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "exactly 301 tokens"));
    assert_true(calls < 200);
    assert_int_equal(ctl_hay_fit(&h, 0, 300, count_even, &calls, &out, &err), 0);
    assert_int_equal(ctl_hay_fit(&h, 0, 4, count_even, &calls, &out, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "4 tokens: fact and question alone"));
    tow_buf_fini(&out);
    ctl_hay_fini(&h);
}

static int count_fails(void *ctx, const char *text, size_t n, int64_t *tokens, struct tow_err *err)
{
    (void)text;
    (void)n;
    *tokens = 50;
    return --*(int *)ctx < 0 ? tow_fail(err, TOW_EPEER, "gone") : 0;
}

static void test_ctl_haystack__count_that_fails_ends_the_search(void **state)
{
    (void)state;
    for (int good = 0; good < 3; good++) {
        struct ctl_hay h;
        struct tow_buf out;
        struct tow_err err = {0};
        int left = good;
        ctl_hay_init(&h, CTL_FILL_LOGS, 1, plain);
        tow_buf_init(&out, 0);
        assert_int_equal(ctl_hay_fit(&h, 0, 1000, count_fails, &left, &out, &err), TOW_EPEER);
        assert_int_equal(left, -1);
        tow_buf_fini(&out);
        ctl_hay_fini(&h);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ctl_haystack__seed_gives_known_bytes),
        cmocka_unit_test(test_ctl_haystack__other_seed_gives_other_text),
        cmocka_unit_test(test_ctl_haystack__growth_leaves_no_trace),
        cmocka_unit_test(test_ctl_haystack__fact_stands_once_at_its_depth),
        cmocka_unit_test(test_ctl_haystack__decoys_have_other_values_elsewhere),
        cmocka_unit_test(test_ctl_haystack__fit_meets_every_length),
        cmocka_unit_test(test_ctl_haystack__length_that_cannot_be_is_refused),
        cmocka_unit_test(test_ctl_haystack__count_that_fails_ends_the_search),
    };
    return cmocka_run_group_tests_name("ctl_haystack", tests, NULL, NULL);
}
