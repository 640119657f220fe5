/* Fuzzes what towpath-ctl reads of a sweep: a line of a results file, which read, written and read
 * again must be the same, and a server's answer with a capture, whose report must be JSON. */
#include "common/base/err.h"
#include "common/text/json.h"
#include "deploy/ctl/needle_results.h"
#include "deploy/ctl/verify.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static void take_record(const char *line, size_t n)
{
    struct ctl_record rec, again;
    struct tow_err err = {0};
    struct tow_buf one, two;
    if (ctl_record_parse(&rec, line, n, &err) < 0) {
        tow_assert(err.code < 0 && err.msg[0]);
        return;
    }
    tow_buf_init(&one, 0);
    tow_buf_init(&two, 0);
    ctl_record_put(&one, &rec);
    tow_assert(ctl_record_parse(&again, one.data, one.len, &err) == 0);
    ctl_record_put(&two, &again);
    tow_assert(one.len == two.len && !memcmp(one.data, two.data, one.len));
    tow_assert(!memchr(one.data, '\n', one.len)); /* a record is a line */
    tow_buf_fini(&one);
    tow_buf_fini(&two);
}

static void take_answer(const char *text, size_t n)
{
    struct json *root = NULL, *report = NULL;
    struct tow_err err = {0};
    struct tow_buf out;
    struct ctl_check check = {.expect = "x"};
    if (json_parse(&root, text, n, NULL, NULL) < 0) return;
    ctl_answer_init(&check.answer);
    tow_buf_init(&out, 0);
    if (ctl_answer_parse(&check.answer, root, "x", &err) == 0) {
        ctl_verify_json(&check, 1, &out);
        tow_assert(json_parse(&report, out.data, out.len, NULL, NULL) == 0);
        json_free(report);
        tow_buf_clear(&out);
        ctl_verify_print(&check, 1, &out);
        tow_assert(!memchr(out.data, '\x1b', out.len)); /* it goes to a terminal */
    }
    tow_buf_fini(&out);
    ctl_answer_fini(&check.answer);
    json_free(root);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    if (n == 0) return 0;
    (bytes[0] == 'r' ? take_record : take_answer)((const char *)bytes + 1, n - 1);
    return 0;
}
