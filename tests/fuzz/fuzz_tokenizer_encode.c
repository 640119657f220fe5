/* Any text, cut anywhere, on the demo model's vocabulary: bad UTF-8 is refused, all else comes back
 * byte for byte; plain text gives no control id; where the cuts are changes nothing; a stream of
 * the ids is the whole text. And any ids give valid UTF-8. The first byte places the cut. */
#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/detok.h"
#include "common/text/tokenizer.h"
#include "common/text/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct text_tokenizer *demo; /* kept for the life of the process */

static int is_utf8(const uint8_t *p, size_t n)
{
    uint32_t cp;
    for (size_t i = 0; i < n;) {
        int r = text_utf8_next(p + i, n - i, &cp);
        if (r <= 0) return 0;
        i += (size_t)r;
    }
    return 1;
}

static void decode_any(const uint8_t *data, size_t size)
{
    struct text_detok d;
    struct tow_buf whole, part;
    text_id *ids = malloc((size + 1) * sizeof *ids);
    if (!ids) return;
    for (size_t i = 0; i < size; i++)
        ids[i] = i % 3 ? data[i] + 16 : data[i] * 11; /* bytes, and others */
    tow_buf_init(&whole, 0);
    tow_buf_init(&part, 0);
    text_detok_init(&d, demo, false);
    text_detok_prompt(&d, ids, size / 2);
    for (size_t i = size / 2; i < size; i++) {
        tow_buf_clear(&part);
        text_detok_push(&d, ids[i], &part);
        if (!is_utf8((const uint8_t *)part.data, part.len)) abort();
    }
    text_detok_all(demo, ids, size, true, &whole);
    if (!is_utf8((const uint8_t *)whole.data, whole.len)) abort();
    tow_buf_fini(&part);
    tow_buf_fini(&whole);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tow_err err = {0};
    if (!demo && text_tokenizer_load(&demo, "deploy/demo-model/tokenizer.json", &err) != 0) {
        fprintf(stderr, "%s\n", err.msg);
        abort();
    }
    if (size == 0) return 0;
    decode_any(data + 1, size - 1);
    const char *text = (const char *)data + 1;
    size_t n = size - 1, cut = n ? data[0] % (n + 1) : 0;
    int valid = is_utf8(data + 1, n);
    for (int special = 0; special < 2; special++) {
        struct text_segment whole = {text, n, special};
        struct text_segment cuts[] = {{text, cut, special}, {text + cut, n - cut, special}};
        struct text_ids a = {0}, b = {0};
        int rc = text_tokenizer_encode(demo, &whole, 1, 0, &a, NULL, &err);
        if (rc != (valid ? 0 : TOW_EINVAL)) abort();
        if (text_tokenizer_encode(demo, cuts, 2, 0, &b, NULL, &err) != rc) abort();
        if (a.n != b.n || (a.n && memcmp(a.ids, b.ids, a.n * sizeof *a.ids))) abort();
        struct tow_buf out;
        tow_buf_init(&out, 0);
        text_detok_all(demo, a.ids, a.n, false, &out);
        if (rc == 0 && (out.len != n || (n && memcmp(out.data, text, n)))) abort();
        for (size_t i = 0; i < a.n && !special; i++)
            if (text_tokenizer_is_added(demo, a.ids[i])) abort();
        tow_buf_fini(&out);
        text_ids_fini(&a);
        text_ids_fini(&b);
    }
    return 0;
}
