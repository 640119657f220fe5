/* Tests of text/record.h: a record is read as it was written, and whatever is wrong in one is named
 * by field, value and right range. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/record.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char path[] = "tests/fuzz/corpus/record/whole.json";

static void read_whole(struct text_record *r)
{
    struct tow_err err = {0};
    if (text_record_load(r, path, &err) < 0) fail_msg("%s", err.msg);
}

static void test_text_record__is_read_as_it_was_written(void **state)
{
    struct text_record r, again;
    struct tow_buf one, two;
    struct tow_err err = {0};
    (void)state;
    read_whole(&r);
    assert_string_equal(r.id, "chatcmpl-8e66");
    assert_int_equal(r.created, 1796001142);
    assert_true(r.temperature == 0.5f && r.index_topk == 8 && !r.ignore_eos && r.n_bias == 1);
    assert_true(r.bias[0].id == 40 && r.bias[0].bias == -3.5f);
    assert_true(r.n_prompts == 2 && r.prompts[0].n == 3 && r.prompts[0].ids[2] == 89);
    assert_true(r.workers[0].incarnation == 0x923f0841c8317fe0 && r.workers[0].chunk_tokens == 256);
    assert_string_equal(text_record_fact(&r.workers[0], "layout.kv_dtype"), "fp8");
    assert_null(text_record_fact(&r.workers[1], "layout.kv_dtype"));
    assert_true(r.n_choices == 2 && r.choices[1].seed == UINT64_MAX && r.choices[1].prompt == 1);
    assert_true(r.choices[0].n_attempts == 2 && r.choices[0].attempts[1].first_output == 1);
    tow_buf_init(&one, 0);
    tow_buf_init(&two, 0);
    text_record_put(&one, &r);
    assert_int_equal(text_record_parse(&again, one.data, one.len, &err), 0);
    text_record_put(&two, &again);
    assert_string_equal(one.data, two.data);
    tow_buf_fini(&one);
    tow_buf_fini(&two);
    text_record_fini(&r);
    text_record_fini(&again);
}

/* What a request may ask for at most and at least stands in a record as the router keeps it. */
static void test_text_record__the_ends_of_sampling_are_read(void **state)
{
    static const float ends[][6] = {
        /* temperature, top_p, min_p, frequency, presence, repetition */
        {0, FLT_MIN, 0, -2, -2, 0.01f},
        {2, 1, 1, 2, 2, 10},
        {1e-30f, 1e-12f, 1e-30f, 0, 0, 1},
        {FLT_TRUE_MIN, 1.2e-38f, FLT_TRUE_MIN, -FLT_TRUE_MIN, FLT_TRUE_MIN, 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const float *e = ends[i];
        struct text_record_bias bias[] = {{0, -100}, {1, 100}, {2, FLT_TRUE_MIN}};
        struct text_record r, again;
        struct tow_buf b;
        struct tow_err err = {0};
        read_whole(&r);
        r.temperature = e[0], r.top_p = e[1], r.min_p = e[2];
        r.frequency_penalty = e[3], r.presence_penalty = e[4], r.repetition_penalty = e[5];
        r.top_k = INT32_MAX, r.index_topk = 4096;
        r.bias = bias, r.n_bias = 3;
        tow_buf_init(&b, 0);
        text_record_put(&b, &r);
        if (text_record_parse(&again, b.data, b.len, &err) < 0) fail_msg("%zu: %s", i, err.msg);
        assert_true(again.temperature == e[0] && again.top_p == e[1] && again.min_p == e[2]);
        assert_true(again.frequency_penalty == e[3] && again.presence_penalty == e[4]);
        assert_true(again.repetition_penalty == e[5] && again.top_k == INT32_MAX);
        assert_true(again.index_topk == 4096 && again.bias[2].bias == FLT_TRUE_MIN);
        tow_buf_fini(&b);
        text_record_fini(&r);
        text_record_fini(&again);
    }
}

/* The whole record with `from` replaced by `to`. */
static void refused(const char *from, const char *to, const char *said)
{
    struct text_record r;
    struct tow_buf b, changed;
    struct tow_err err = {0};
    tow_buf_init(&b, 0);
    tow_buf_init(&changed, 0);
    read_whole(&r);
    text_record_put(&b, &r);
    text_record_fini(&r);
    const char *at = strstr(b.data, from);
    if (!at) fail_msg("no '%s' in %s", from, b.data);
    tow_buf_put(&changed, b.data, (size_t)(at - b.data));
    tow_buf_puts(&changed, to);
    tow_buf_puts(&changed, at + strlen(from));
    if (text_record_parse(&r, changed.data, changed.len, &err) == 0) fail_msg("took '%s'", to);
    if (!strstr(err.msg, said)) fail_msg("'%s' for '%s', expected '%s'", err.msg, to, said);
    tow_buf_fini(&b);
    tow_buf_fini(&changed);
}

static void test_text_record__what_is_wrong_is_named(void **state)
{
    (void)state;
    refused("\"towpath_record\": 1", "\"towpath_record\": 2", "version 2, this program reads 1");
    refused("chatcmpl-8e66", "../../etc/passwd", "id: '../../etc/passwd' is not 1 to 63 letters");
    refused("\"n_vocab\": 90", "\"n_vocab\": 0", "n_vocab");
    refused("\"n_vocab\": 90", "\"n_vocab\": 89", "prompts[0][2]: 89 is not in 0..88");
    refused("[56, 73]", "[56, 90]", "choices[0].output[1]: 90 is not in 0..89");
    refused("[56, 73]", "[56, 7.5]", "choices[0].output[1]: expected an id from 0 to 89");
    refused("[56, 73]", "[-1, 7]", "choices[0].output[0]: -1 is not in 0..89");
    refused("\"temperature\": 0.5", "\"temperature\": -1", "sampling");
    refused("\"top_p\": 1.0, ", "", "top_p: is required but missing");
    refused("\"temperature\": 0.5", "\"temperature\": 2.1", "must be a number from 0 to 2, is 2.1");
    refused("\"frequency_penalty\": 0.0", "\"frequency_penalty\": -2.01", "from -2 to 2");
    refused("\"presence_penalty\": 0.0", "\"presence_penalty\": 3", "from -2 to 2");
    refused("\"repetition_penalty\": 1.0", "\"repetition_penalty\": 0.009", "to 10, is 0.009");
    refused("\"repetition_penalty\": 1.0", "\"repetition_penalty\": 11", "to 10, is 11");
    refused("\"index_topk\": 8", "\"index_topk\": 4097", "from 0 to 4096, is 4097");
    refused("[40, -3.5]", "[40, -3.5], [40, 1]", "logit_bias[1]: id 40 stands in entry 0, too");
    refused("[40, -3.5]", "[40]", "sampling.logit_bias[0]: expected [id below n_vocab");
    refused("[40, -3.5]", "[40, 101]", "sampling.logit_bias[0]");
    refused("923f0841c8317fe0", "923f0841c8317fe00", "incarnation: '923f0841c8317fe00'");
    refused("\"layout.kv_dtype\": \"fp8\"", "\"layout.kv_dtype\": 8", "workers[0].facts");
    refused("\"seed\": \"5\"", "\"seed\": \"-5\"", "choices[0].seed: '-5' is no string of decimal");
    refused("\"seed\": \"18446744073709551615\"", "\"seed\": \"18446744073709551616\"", "seed");
    refused("\"decode\": 1", "\"decode\": 2", "choices[0].attempts[0]");
    refused("\"first_output\": 1", "\"first_output\": 3", "choices[0].attempts[1]");
    refused("\"prompt\": 1", "\"prompt\": 2", "choices[1]");
    refused("\"prompts\": [[0, 3, 89],", "\"prompts\": [[],", "prompts[0]: expected an array of 1");
    refused("\"prompts\": [[0, 3, 89],", "\"prompts\": [7,", "prompts[0]: expected an array of 1");
    refused("\"finish\": \"failed\"", "\"finish\": \"lost\"",
            "choices[1].finish: 'lost' is none of stop, length, stop_string, cancelled, failed");
    refused("\"role\": \"prefill\"", "\"role\": \"router\"",
            "workers[0].role: 'router' is none of prefill, decode");
    /* what a terminal would obey */
    refused("\"role\": \"prefill\"", "\"role\": \"\\u001b[2J\"", "workers[0].role: byte 0 is a");
    refused("\"finish\": \"failed\"", "\"finish\": \"fail\\u007f\"", "choices[1].finish: byte 4");
    refused("\"fp8\"", "\"f\\u009bp8\"", "workers[0].facts: byte 1 is a control");
    refused("\"fp8\"", "\"f\\u202ep8\"", "workers[0].facts: byte 1 is a control");
    refused("\"layout.kv_dtype\"", "\"\\u0007layout.kv_dtype\"", "workers[0].facts: byte 0");
    refused("chatcmpl-8e66", "chatcmpl\\u0007", "id: byte 8 is a control");
    refused("{\"towpath_record\"", "[{\"towpath_record\"", "record");
}

static void test_text_record__files_that_are_none(void **state)
{
    struct text_record r;
    struct tow_err err = {0};
    (void)state;
    assert_int_equal(text_record_load(&r, "tests/no-such-file.json", &err), TOW_ENOENT);
    assert_true(text_record_load(&r, "tests", &err) < 0);
    assert_true(text_record_load(&r, "/dev/null", &err) < 0);
    assert_true(text_record_load(&r, "/dev/zero", &err) < 0); /* has no end */
    char pipe[] = "/tmp/tow-record-XXXXXX";
    assert_non_null(mkdtemp(pipe));
    assert_int_equal(rmdir(pipe), 0);
    assert_int_equal(mkfifo(pipe, 0600), 0);
    assert_true(text_record_load(&r, pipe, &err) < 0); /* nobody writes to it */
    assert_non_null(strstr(err.msg, "not a regular file"));
    unlink(pipe);
    assert_false(text_record_id_ok("a/b") || text_record_id_ok("") || text_record_id_ok("a.json"));
    assert_true(text_record_id_ok("chatcmpl-0_A"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text_record__is_read_as_it_was_written),
        cmocka_unit_test(test_text_record__the_ends_of_sampling_are_read),
        cmocka_unit_test(test_text_record__what_is_wrong_is_named),
        cmocka_unit_test(test_text_record__files_that_are_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
