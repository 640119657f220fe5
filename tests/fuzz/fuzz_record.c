/* Fuzzes the reader of recorded requests: what it takes, written and read again, is the same; what
 * it does not take has a reason. */
#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/record.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    struct text_record r, again;
    struct tow_err err = {0};
    struct tow_buf one, two;
    if (text_record_parse(&r, (const char *)bytes, n, &err) < 0) {
        tow_assert(err.code < 0 && err.msg[0]);
        return 0;
    }
    tow_assert(r.n_choices > 0 && r.choices[0].prompt < r.n_prompts);
    tow_assert(text_record_id_ok(r.id));
    tow_buf_init(&one, 0);
    tow_buf_init(&two, 0);
    text_record_put(&one, &r);
    tow_assert(text_record_parse(&again, one.data, one.len, &err) == 0);
    text_record_put(&two, &again);
    tow_assert(one.len == two.len && !memcmp(one.data, two.data, one.len));
    tow_buf_fini(&one);
    tow_buf_fini(&two);
    text_record_fini(&r);
    text_record_fini(&again);
    return 0;
}
