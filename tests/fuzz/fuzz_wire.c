/* Any bytes are a message or a refusal. The first two are the type, the rest is its body (so that
 * the fuzzer need not find the header's check). What is accepted packs, and packs the same after
 * another unpack. The ask and the answer of a capture are taken as bodies of their own as well. */
#include "common/base/err.h"
#include "proto/messages.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void walk(const struct wire_msg *m)
{
    struct wire_fact f;
    size_t at = 0;
    uint32_t token;
    float lp;
    if (m->type == WIRE_HELLO_MSG)
        while (wire_next_fact(m->hello.facts, &at, &f)) {
        }
    if (m->type == WIRE_RESERVE_MSG)
        for (uint32_t i = 0; i < wire_n_bias(&m->reserve.sampling); i++)
            (void)wire_bias_at(&m->reserve.sampling, i);
    if (m->type != WIRE_TOKENS_MSG || !m->tokens.has_logprobs) return;
    for (uint32_t i = 0; i < m->tokens.ids.n; i++)
        for (uint32_t k = 0; k < m->tokens.n_top; k++)
            wire_top_at(m->tokens.logprobs, m->tokens.n_top, i, k, &token, &lp);
}

/* What is accepted packs to the bytes it came from. */
static void capture(const uint8_t *data, size_t size)
{
    struct wire_capture c;
    struct wire_capture_row r;
    uint8_t *back = malloc(size ? size : 1);
    if (!back) abort();
    struct wire_writer w = {.data = back, .cap = size};
    if (wire_get_capture(&c, data, size) == 0) {
        wire_put_capture(&w, &c);
        if (w.failed || memcmp(back, data, w.len)) abort();
    }
    w = (struct wire_writer){.data = back, .cap = size};
    if (wire_get_capture_row(&r, data, size) == 0) {
        wire_put_capture_row(&w, &r);
        if (w.failed || memcmp(back, data, w.len)) abort();
        for (uint32_t i = 0; i < r.entries.n; i++)
            if (wire_rank_at(&r.own, i).rank > r.n_visible) abort();
    }
    free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tow_err err = {0};
    struct wire_msg m, again;
    (void)wire_unpack_frame(&m, data, size, &err);
    capture(data, size);
    if (size < 2) return 0;
    struct wire_header h = {.type = (uint16_t)(data[0] | data[1] << 8),
                            .version = WIRE_VERSION,
                            .body_bytes = (uint32_t)(size - 2)};
    if (wire_check_header(&h, &err) < 0 || wire_unpack(&m, &h, data + 2, &err) < 0) {
        if (err.code >= 0 || err.msg[0] == 0) abort();
        return 0;
    }
    walk(&m);
    int64_t n = wire_frame_bytes(&m);
    if (n < 0) abort();
    uint8_t *a = malloc((size_t)n), *b = malloc((size_t)n);
    if (!a || !b) abort();
    if (wire_pack(&m, a, (size_t)n) != n) abort();
    if (wire_unpack_frame(&again, a, (size_t)n, &err) < 0) abort();
    if (wire_pack(&again, b, (size_t)n) != n || memcmp(a, b, (size_t)n)) abort();
    if (memcmp(a + WIRE_HEADER_BYTES, data + 2, (size_t)n - WIRE_HEADER_BYTES)) abort();
    free(a);
    free(b);
    return 0;
}
