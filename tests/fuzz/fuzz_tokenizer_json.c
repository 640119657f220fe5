/* Any bytes are a tokenizer.json or a refusal with a message. What is accepted gives every text
 * back, and never more than its vocabulary. */
#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/detok.h"
#include "common/text/tokenizer.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] =
        "abc  abc, a'b\n12345 \xC3\xA9\xE5\xA4\xA9\xF0\x9F\x91\x8D <A><A> tok\xE1\xA0\x8E";
    struct text_tokenizer *t = NULL;
    struct tow_err err = {0};
    int rc = text_tokenizer_parse(&t, "fuzz", (const char *)data, size, &err);
    if (rc != 0) {
        if (t || err.code != rc || err.msg[0] == 0) abort();
        return 0;
    }
    for (int special = 0; special < 2; special++) {
        struct text_segment segs[] = {{text, 20, special}, {text + 20, sizeof text - 21, true}};
        struct text_ids ids = {0};
        rc = text_tokenizer_encode(t, segs, 2, 0, &ids, NULL, &err);
        if (rc == 0 && text_tokenizer_check_ids(t, ids.ids, ids.n, &err) != 0) abort();
        if (rc != 0 && rc != TOW_ETOOBIG) abort(); /* a pattern may be too costly */
        struct tow_buf out;
        tow_buf_init(&out, 0);
        text_detok_all(t, ids.ids, ids.n, false, &out);
        if (out.len > sizeof text * 1024) abort();
        tow_buf_fini(&out);
        text_ids_fini(&ids);
    }
    text_tokenizer_free(t);
    return 0;
}
