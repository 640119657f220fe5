/* Any text, split by the fuzzer: the stream parser gives the same message as for the whole,
 * arguments are always JSON, and where the strict parser accepts, both agree.
 * First byte: options; second: splits. */
#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/chat.h"
#include "common/text/json.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void parse(struct text_chat_message *m, const char *s, size_t len, uint8_t flags,
                  size_t step)
{
    struct text_chat_parser *p = NULL;
    struct tow_err err;
    text_chat_message_init(m);
    if (text_chat_parser_open(&p, flags & 1 ? TEXT_START_REASONING : TEXT_START_CONTENT, flags & 2,
                              NULL, &err) < 0)
        abort();
    for (size_t at = 0; at < len;) {
        size_t n = len - at < step ? len - at : step;
        if (text_chat_parser_feed(p, s + at, n, text_chat_message_add, m) < 0) abort();
        at += n;
    }
    if (text_chat_parser_end(p, flags & 4, text_chat_message_add, m) < 0) abort();
    text_chat_parser_free(p);
}

static void same(const struct tow_buf *a, const struct tow_buf *b)
{
    if (a->len != b->len || (a->len && memcmp(a->data, b->data, a->len) != 0)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    struct text_chat_message one, many, strict;
    struct tow_err err;
    const char *s = (const char *)data + 2;
    parse(&one, s, size - 2, data[0], size);
    parse(&many, s, size - 2, data[0], 1 + data[1] % 16);
    same(&one.reasoning, &many.reasoning);
    same(&one.content, &many.content);
    if (one.n_calls != many.n_calls) abort();
    for (uint32_t i = 0; i < one.n_calls; i++) {
        struct json *v = NULL;
        same(&one.calls[i].name, &many.calls[i].name);
        same(&one.calls[i].arguments, &many.calls[i].arguments);
        if (json_parse(&v, one.calls[i].arguments.data, one.calls[i].arguments.len, NULL, &err) <
                0 &&
            err.code != TOW_EFORMAT)
            abort(); /* EFORMAT: the fuzzer put a NUL or too many levels into a name or value */
        json_free(v);
    }
    text_chat_message_init(&strict);
    (void)text_chat_parse_strict(&strict, s, size - 2, data[0] & 1, &err);
    text_chat_message_fini(&strict);
    text_chat_message_fini(&one);
    text_chat_message_fini(&many);
    return 0;
}
