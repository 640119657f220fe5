/* Any JSON as a request: text_chat_encode() refuses it by name,
 * or gives segments that join to its text. */
#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/chat.h"
#include "common/text/json.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tow_err err = {0};
    struct json *v = NULL;
    if (size < 1 || json_parse(&v, (const char *)data + 1, size - 1, NULL, &err) < 0) return 0;
    struct text_chat_options o = {
        .thinking = data[0] & 1,
        .keep_thinking = data[0] & 2,
        .no_bos = data[0] & 4,
        .as_release = data[0] & 8,
        .effort = data[0] & 16 ? TEXT_EFFORT_MAX : TEXT_EFFORT_NONE,
        .tools = json_find(v, "tools"),
        .response_format = json_find(v, "response_format"),
        .context = json_find(v, "context"),
    };
    struct text_chat_prompt p;
    if (text_chat_set_tool_choice(&o, json_find(v, "tool_choice"), &err) == 0) {
        int rc = text_chat_encode(&p, json_find(v, "messages"), &o, &err);
        if (rc < 0 && (rc != TOW_EINVAL || !err.msg[0])) abort();
        const char *at = p.text.data;
        for (size_t i = 0; i < p.n_segs; i++) {
            if (p.segs[i].bytes != at || !p.segs[i].len) abort();
            at += p.segs[i].len;
        }
        if (rc == 0 && p.text.len && at != p.text.data + p.text.len) abort();
        text_chat_prompt_fini(&p);
    }
    json_free(v);
    return 0;
}
