/* Any bytes: json_parse() refuses them with a message,
 * or what json_dump() writes parses to the same. */
#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/json.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tow_err err = {0};
    struct json *v = NULL, *again = NULL;
    int rc = json_parse(&v, (const char *)data, size, NULL, &err);
    if (rc < 0) {
        if (v || err.code != rc || !err.msg[0]) abort();
        return 0;
    }
    struct tow_buf a, b;
    tow_buf_init(&a, 0);
    tow_buf_init(&b, 0);
    json_dump(&a, v);
    if (json_parse(&again, a.data, a.len, NULL, &err) < 0) abort();
    json_dump(&b, again);
    if (a.len != b.len || memcmp(a.data, b.data, a.len) != 0) abort();
    json_free(v);
    json_free(again);
    tow_buf_fini(&a);
    tow_buf_fini(&b);
    return 0;
}
