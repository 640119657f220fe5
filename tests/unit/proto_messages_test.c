/* Tests of proto/wire.c, proto/messages.c and proto/page.c.
 *
 * tests/golden/wire/<NAME>.hex pins the bytes of one sample of every message; docs/protocol.md
 * holds the table of fields between two marker lines. Both are made here: TOW_WIRE_WRITE=1 writes
 * them instead of comparing. Change a golden only with a new protocol version. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "proto/messages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DOC_FILE  "docs/protocol.md"
#define DOC_BEGIN "<!-- messages: made from proto/messages.h by proto_messages_test -->\n"
#define DOC_END   "<!-- end of messages -->\n"

/* --- a sample of every message ---------------------------------------------------------------- */

static const uint32_t sample_ids[3] = {3, 1000, 0x00fedcba};
static const uint64_t sample_digests[2] = {0x0123456789abcdef, 0xfedcba9876543210};
static const uint8_t sample_bytes[16] = {0, 0, 0, 0, 0, 0, 0x80, 0x3f, 9, 0, 0, 0, 0, 0, 0, 0xc0};
static uint32_t g_count; /* makes each number different */

static uint64_t next_number(uint64_t max)
{
    uint64_t v = 0x0101 * (uint64_t)++g_count;
    return v <= max ? v : v % (max + 1);
}
static void fill_u8(uint8_t *v, uint64_t max)
{
    *v = (uint8_t)next_number(max);
}
static void fill_u16(uint16_t *v, uint64_t max)
{
    *v = (uint16_t)next_number(max);
}
static void fill_u32(uint32_t *v, uint64_t max)
{
    *v = (uint32_t)next_number(max);
}
static void fill_u64(uint64_t *v, uint64_t max)
{
    *v = next_number(max) * 0x100000001;
}
static void fill_i16(int16_t *v, uint64_t max)
{
    (void)max;
    *v = TOW_EPEER;
}
static void fill_f32(float *v, uint64_t max)
{
    (void)max;
    *v = (float)++g_count + 0.5f;
}
static void fill_text(struct wire_text *v, uint64_t max)
{
    (void)max;
    *v = wire_text("node-1.a_b");
}
static void fill_bytes(struct wire_bytes *v, uint64_t max)
{
    (void)max;
    *v = (struct wire_bytes){sample_bytes, 16};
}
static void fill_ids(struct wire_ids *v, uint64_t max)
{
    *v = (struct wire_ids){sample_ids, max < 3 ? (uint32_t)max : 3};
}
static void fill_ticket(struct wire_ticket *v, uint64_t max)
{
    (void)max;
    *v = (struct wire_ticket){0x1122334455667788, 0x99aabbccddeeff01};
}
static void fill_part(struct wire_part *v, uint64_t max)
{
    (void)max;
    *v = (struct wire_part){WIRE_TAIL, 5, 0x123456789a, 4096, {sample_digests, 2}};
}
#define FILL(kind, name, max, note) fill_##kind(&m->name, max);
static void fill_sampling(struct wire_sampling *m, uint64_t max_of_list)
{
    (void)max_of_list;
    WIRE_SAMPLING(FILL)
}
#define M(name, NAME, number, since, cap, dir, note)                                               \
    static void fill_##name(struct wire_##name *m)                                                 \
    {                                                                                              \
        WIRE_##NAME(FILL)                                                                          \
    }
WIRE_MESSAGES(M)
#undef M

static uint8_t g_facts[128], g_capture[128], g_row[256];

static struct wire_bytes sample_capture(void)
{
    static const uint32_t layers[2] = {2, 4};
    struct wire_writer w = {.data = g_capture, .cap = sizeof g_capture};
    struct wire_capture c = {.steps = WIRE_CAPTURE_ALL,
                             .shadow = 1 << WIRE_SHADOW_BF16 | 1 << WIRE_SHADOW_FP4,
                             .lists = 1,
                             .max_steps = 64,
                             .layers = {layers, 2},
                             .entries = {sample_ids, 3}};
    wire_put_capture(&w, &c);
    return (struct wire_bytes){g_capture, (uint32_t)w.len};
}

/* Two entries, their ranks by the model's own keys and by fp8 ones. */
static struct wire_bytes sample_row(void)
{
    static const uint32_t entries[2] = {3, 17}, list[2] = {0, 17};
    static uint8_t ranks[2 * WIRE_RANK_BYTES];
    struct wire_writer k = {.data = ranks, .cap = sizeof ranks},
                       w = {.data = g_row, .cap = sizeof g_row};
    for (uint32_t i = 0; i < 2; i++) {
        wire_put_u32(&k, 3 - i);
        wire_put_u32(&k, i);
        wire_put_f32(&k, 0.25f * (float)(i + 1));
    }
    struct wire_ranks all = {.kth = 0.5f, .next = 0.25f, .ranks = {ranks, sizeof ranks}};
    struct wire_capture_row r = {.topk = 2,
                                 .n_visible = 20,
                                 .entries = {entries, 2},
                                 .own = all,
                                 .shadow = 1 << WIRE_SHADOW_FP8,
                                 .list = {list, 2}};
    r.shadows[WIRE_SHADOW_FP8] = all;
    wire_put_capture_row(&w, &r);
    return (struct wire_bytes){g_row, (uint32_t)w.len};
}

static void sample(struct wire_msg *m, unsigned type)
{
    memset(m, 0, sizeof *m);
    g_count = type;
    m->type = type;
    switch (type) {
#define M(name, NAME, number, since, cap, dir, note)                                               \
    case number: fill_##name(&m->name); break;
        WIRE_MESSAGES(M)
#undef M
    }
    /* Rules between fields. */
    struct wire_writer w = {.data = g_facts, .cap = sizeof g_facts};
    wire_put_fact(&w, &(struct wire_fact){1, wire_text("page_tokens"), wire_text("256")});
    wire_put_fact(&w, &(struct wire_fact){3, wire_text("index_topk"), wire_text("512")});
    struct wire_bytes facts = {g_facts, (uint32_t)w.len};
    if (type == WIRE_HELLO_MSG) m->hello.facts = facts;
    if (type == WIRE_XHELLO_MSG) m->xhello.facts = facts;
    if (type == WIRE_PREFILL_MSG) m->prefill.n_prompt = 2;
    if (type == WIRE_RESERVE_MSG) m->reserve.capture = sample_capture();
    if (type == WIRE_PREFILL_MSG) m->prefill.capture = sample_capture();
    if (type == WIRE_CAPTURED_MSG) m->captured.row = sample_row();
    if (type == WIRE_TOKENS_MSG) {
        m->tokens.ids.n = 1;
        m->tokens.has_logprobs = m->tokens.n_top = 1;
        m->tokens.logprobs.len = 12;
    }
    if (type == WIRE_FIRST_MSG) {
        m->first.has_logprobs = m->first.n_top = 1;
        m->first.logprobs.len = 12;
    }
}

static size_t pack_sample(unsigned type, uint8_t *frame, size_t cap)
{
    struct wire_msg m;
    sample(&m, type);
    int64_t n = wire_pack(&m, frame, cap);
    if (n < 0) fail_msg("%s cannot be packed: %s", wire_type_name(type), tow_err_name((int)n));
    assert_int_equal(n, wire_frame_bytes(&m));
    return (size_t)n;
}

/* --- messages --------------------------------------------------------------------------------- */

static void test_messages__every_sample_has_its_golden_bytes(void **state)
{
    (void)state;
    struct wire_type_doc doc;
    for (unsigned row = 0; wire_doc_type(row, &doc); row++) {
        uint8_t frame[4096];
        char path[128], want[9000] = "", got[9000] = "";
        size_t n = pack_sample(doc.number, frame, sizeof frame), at = 0;
        for (size_t i = 0; i < n; i++)
            at += (size_t)snprintf(got + at, sizeof got - at, "%02x%s", frame[i],
                                   i % 32 == 31 || i + 1 == n ? "\n" : "");
        snprintf(path, sizeof path, "tests/golden/wire/%s.hex", doc.name);
        if (getenv("TOW_WIRE_WRITE")) {
            FILE *f = fopen(path, "w");
            assert_non_null(f);
            fputs(got, f);
            fclose(f);
            continue;
        }
        FILE *f = fopen(path, "r");
        if (!f) fail_msg("%s is missing; it would hold:\n%s", path, got);
        want[fread(want, 1, sizeof want - 1, f)] = 0;
        fclose(f);
        if (strcmp(want, got)) fail_msg("%s: the bytes are now:\n%s", path, got);
    }
}

static void test_messages__unpack_of_pack_packs_to_the_same_bytes(void **state)
{
    (void)state;
    struct wire_type_doc doc;
    struct tow_err err;
    for (unsigned row = 0; wire_doc_type(row, &doc); row++) {
        uint8_t frame[4096], again[4096];
        struct wire_msg m;
        size_t n = pack_sample(doc.number, frame, sizeof frame);
        if (wire_unpack_frame(&m, frame, n, &err) < 0) fail_msg("%s: %s", doc.name, err.msg);
        assert_int_equal(m.type, doc.number);
        assert_int_equal(wire_pack(&m, again, sizeof again), n);
        assert_memory_equal(frame, again, n);
        assert_int_equal(wire_pack(&m, again, n - 1), TOW_EFULL);
    }
}

static void test_messages__cut_anywhere_is_ewire_and_longer_is_read(void **state)
{
    (void)state;
    struct wire_type_doc doc;
    struct tow_err err;
    for (unsigned row = 0; wire_doc_type(row, &doc); row++) {
        uint8_t frame[4096] = {0};
        struct wire_msg m;
        struct wire_header h;
        size_t n = pack_sample(doc.number, frame, sizeof frame);
        assert_int_equal(wire_header_unpack(&h, frame, &err), 0);
        assert_int_equal(wire_check_header(&h, &err), 0);
        for (uint32_t cut = 0; cut < n - WIRE_HEADER_BYTES; cut++) {
            /* A copy of the exact size, so that a sanitizer sees a read behind it. */
            uint8_t *body = malloc(cut ? cut : 1);
            memcpy(body, frame + WIRE_HEADER_BYTES, cut);
            h.body_bytes = cut;
            assert_int_equal(wire_unpack(&m, &h, body, &err), TOW_EWIRE);
            free(body);
        }
        h.body_bytes = (uint32_t)(n - WIRE_HEADER_BYTES) + 7; /* fields of a later version */
        assert_int_equal(wire_unpack(&m, &h, frame + WIRE_HEADER_BYTES, &err), 0);
    }
}

static void test_messages__header_that_lies_is_refused_with_the_reason(void **state)
{
    (void)state;
    uint8_t frame[256];
    struct tow_err err;
    struct wire_header h;
    pack_sample(WIRE_PING_MSG, frame, sizeof frame);
    frame[0] ^= 1;
    assert_int_equal(wire_header_unpack(&h, frame, &err), TOW_EWIRE);
    assert_non_null(strstr(err.msg, "magic"));
    frame[0] ^= 1;
    frame[8] ^= 1; /* length */
    assert_int_equal(wire_header_unpack(&h, frame, &err), TOW_EWIRE);
    assert_non_null(strstr(err.msg, "check"));
    h = (struct wire_header){
        .type = WIRE_PING_MSG, .version = WIRE_VERSION, .body_bytes = WIRE_MAX_BODY + 1};
    wire_header_pack(&h, frame);
    assert_int_equal(wire_header_unpack(&h, frame, &err), TOW_EWIRE);
    h = (struct wire_header){.type = WIRE_PING_MSG, .version = WIRE_VERSION + 1};
    wire_header_pack(&h, frame);
    assert_int_equal(wire_header_unpack(&h, frame, &err), TOW_EWIRE);
    h = (struct wire_header){.type = WIRE_PING_MSG, .version = WIRE_VERSION, .body_bytes = 2000};
    assert_int_equal(wire_check_header(&h, &err), TOW_EWIRE);
    assert_non_null(strstr(err.msg, "PING"));
    h.type = 999;
    assert_int_equal(wire_check_header(&h, &err), TOW_ENOENT);
}

static void test_messages__values_above_their_caps_are_refused_both_ways(void **state)
{
    (void)state;
    static uint32_t many[65];
    uint8_t frame[4096];
    struct wire_msg m;
    sample(&m, WIRE_RESERVE_MSG);
    m.reserve.eos = (struct wire_ids){many, 65};
    assert_int_equal(wire_pack(&m, frame, sizeof frame), TOW_EINVAL);
    sample(&m, WIRE_RESERVE_MSG);
    uint32_t nan_bits = 0x7fc00000;
    memcpy(&m.reserve.sampling.top_p, &nan_bits, 4);
    assert_int_equal(wire_pack(&m, frame, sizeof frame), TOW_EINVAL);
    sample(&m, WIRE_RESERVE_MSG);
    m.reserve.n_tokens = 2; /* fewer than its outputs */
    assert_int_equal(wire_pack(&m, frame, sizeof frame), TOW_EINVAL);
    sample(&m, WIRE_HELLO_MSG);
    m.hello.name = wire_text("a b");
    assert_int_equal(wire_pack(&m, frame, sizeof frame), TOW_EINVAL);
    sample(&m, WIRE_TOKENS_MSG);
    m.tokens.logprobs.len = 8;
    assert_int_equal(wire_pack(&m, frame, sizeof frame), TOW_EINVAL);

    /* The same from outside: a count far beyond the body, and a control character. */
    struct tow_err err;
    size_t n = pack_sample(WIRE_BYE_MSG, frame, sizeof frame);
    frame[WIRE_HEADER_BYTES] = frame[WIRE_HEADER_BYTES + 1] = 0xff;
    assert_int_equal(wire_unpack_frame(&m, frame, n, &err), TOW_EWIRE);
    n = pack_sample(WIRE_BYE_MSG, frame, sizeof frame);
    frame[n - 1] = '\n';
    assert_int_equal(wire_unpack_frame(&m, frame, n, &err), TOW_EWIRE);
}

static void test_messages__a_prompt_of_a_million_tokens_fits(void **state)
{
    (void)state;
    struct wire_msg m, back;
    struct tow_err err;
    uint32_t *ids = calloc(WIRE_MAX_TOKENS, sizeof *ids);
    for (uint32_t i = 0; i < WIRE_MAX_TOKENS; i++) ids[i] = i * 7;
    sample(&m, WIRE_PREFILL_MSG);
    m.prefill.tokens = (struct wire_ids){ids, WIRE_MAX_TOKENS};
    int64_t n = wire_frame_bytes(&m);
    assert_true(n > 4 * (int64_t)WIRE_MAX_TOKENS);
    uint8_t *frame = malloc((size_t)n);
    assert_int_equal(wire_pack(&m, frame, (size_t)n), n);
    assert_int_equal(wire_unpack_frame(&back, frame, (size_t)n, &err), 0);
    assert_int_equal(wire_ids_at(back.prefill.tokens, WIRE_MAX_TOKENS - 1),
                     (WIRE_MAX_TOKENS - 1) * 7);
    free(frame);
    free(ids);
}

static void test_messages__items_inside_spans_come_out_as_they_went_in(void **state)
{
    (void)state;
    struct wire_msg m;
    struct wire_fact f;
    size_t at = 0;
    sample(&m, WIRE_HELLO_MSG);
    assert_true(wire_next_fact(m.hello.facts, &at, &f));
    assert_int_equal(f.class, WIRE_FACT_LAYOUT);
    assert_true(wire_text_is(f.field, "page_tokens") && wire_text_is(f.value, "256"));
    assert_true(wire_next_fact(m.hello.facts, &at, &f));
    assert_false(wire_next_fact(m.hello.facts, &at, &f));
    sample(&m, WIRE_RESERVE_MSG);
    assert_int_equal(wire_n_bias(&m.reserve.sampling), 2);
    assert_int_equal(wire_bias_at(&m.reserve.sampling, 1).token, 9);
    assert_true(wire_bias_at(&m.reserve.sampling, 1).bias == -2.0f);
    uint32_t token;
    float lp;
    sample(&m, WIRE_TOKENS_MSG);
    assert_true(wire_logprob_at(m.tokens.logprobs, 1, 0) == 0.0f);
    wire_top_at(m.tokens.logprobs, 1, 0, 0, &token, &lp);
    assert_int_equal(token, 0x3f800000);
}

static void test_messages__numbers_are_unique_and_caps_positive(void **state)
{
    (void)state;
    struct wire_type_doc a, b;
    for (unsigned i = 0; wire_doc_type(i, &a); i++) {
        assert_true(a.cap > 0 && a.cap <= WIRE_MAX_BODY && a.since >= 1);
        for (unsigned k = 0; k < i; k++) {
            assert_true(wire_doc_type(k, &b));
            assert_int_not_equal(a.number, b.number);
        }
    }
}

/* --- parts ------------------------------------------------------------------------------------ */

static void test_page__part_outside_its_area_is_named(void **state)
{
    (void)state;
    struct tow_err err;
    const struct wire_part_shape shape = {
        .area_bytes = 8192, .bytes = 4096, .n_digests = 2, .n_parts = 3};
    const struct wire_part good = {WIRE_PAGE, 2, 4096, 4096, {sample_digests, 2}};
    struct wire_part p = good;
    assert_int_equal(wire_part_check(&p, &shape, &err), 0);
    p.index = 3;
    assert_int_equal(wire_part_check(&p, &shape, &err), TOW_EWIRE);
    assert_non_null(strstr(err.msg, "index is 3, must be below 3"));
    p = good;
    p.offset = 4097;
    assert_int_equal(wire_part_check(&p, &shape, &err), TOW_EWIRE);
    p.offset = UINT64_MAX - 10;
    assert_int_equal(wire_part_check(&p, &shape, &err), TOW_EWIRE);
    p = good;
    p.bytes = 4095;
    assert_int_equal(wire_part_check(&p, &shape, &err), TOW_EWIRE);
    p = good;
    p.digests.n = 1;
    assert_int_equal(wire_part_check(&p, &shape, &err), TOW_EWIRE);
}

/* --- docs/protocol.md ------------------------------------------------------------------------- */

static size_t put_fields(char *out, size_t cap,
                         bool (*field)(unsigned, unsigned, struct wire_field_doc *), unsigned row)
{
    struct wire_field_doc f;
    size_t n = 0;
    for (unsigned i = 0; field(row, i, &f); i++) {
        char max[32] = "";
        if (f.max && f.max != UINT64_MAX)
            snprintf(max, sizeof max, "%llu", (unsigned long long)f.max);
        if (i == 0)
            n += (size_t)snprintf(out + n, cap - n,
                                  "| field | kind | max | meaning |\n|---|---|---|---|\n");
        n += (size_t)snprintf(out + n, cap - n, "| %s | %s | %s | %s |\n", f.name, f.kind, max,
                              f.note);
    }
    return n;
}

static bool sampling_field(unsigned row, unsigned i, struct wire_field_doc *f)
{
    (void)row;
    return wire_doc_sampling(i, f);
}
static bool part_field(unsigned row, unsigned i, struct wire_field_doc *f)
{
    (void)row;
    return wire_doc_part(i, f);
}

static char *message_docs(void)
{
    size_t cap = 1 << 17, n = 0;
    char *out = malloc(cap);
    struct wire_type_doc t;
    n += (size_t)snprintf(out + n, cap - n,
                          "| number | name | direction | since | body cap | meaning |\n"
                          "|---|---|---|---|---|---|\n");
    for (unsigned row = 0; wire_doc_type(row, &t); row++)
        n += (size_t)snprintf(out + n, cap - n, "| %u | %s | %s | %u | %u | %s |\n", t.number,
                              t.name, t.direction, t.since, t.cap, t.note);
    n += (size_t)snprintf(out + n, cap - n, "\n### sampling\n\n");
    n += put_fields(out + n, cap - n, sampling_field, 0);
    n += (size_t)snprintf(out + n, cap - n, "\n### part\n\n");
    n += put_fields(out + n, cap - n, part_field, 0);
    for (unsigned row = 0; wire_doc_type(row, &t); row++) {
        n += (size_t)snprintf(out + n, cap - n, "\n### %s (%u, %s)\n\n", t.name, t.number,
                              t.direction);
        n += put_fields(out + n, cap - n, wire_doc_field, row);
    }
    assert_true(n < cap);
    return out;
}

static void test_messages__docs_hold_the_table_of_the_code(void **state)
{
    (void)state;
    static char text[1 << 18];
    char *want = message_docs();
    FILE *f = fopen(DOC_FILE, "r");
    if (!f) fail_msg("%s is missing", DOC_FILE);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    char *begin = strstr(text, DOC_BEGIN), *end = begin ? strstr(begin, DOC_END) : NULL;
    if (!end) fail_msg("%s has lost its marker lines", DOC_FILE);
    char *body = begin + strlen(DOC_BEGIN);
    if (getenv("TOW_WIRE_WRITE")) {
        f = fopen(DOC_FILE, "w");
        assert_non_null(f);
        fprintf(f, "%.*s%s%s", (int)(body - text), text, want, end);
        fclose(f);
    } else if (strlen(want) != (size_t)(end - body) || memcmp(want, body, strlen(want))) {
        fail_msg("%s differs from proto/messages.h; the table is now:\n%s", DOC_FILE, want);
    }
    free(want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages__every_sample_has_its_golden_bytes),
        cmocka_unit_test(test_messages__unpack_of_pack_packs_to_the_same_bytes),
        cmocka_unit_test(test_messages__cut_anywhere_is_ewire_and_longer_is_read),
        cmocka_unit_test(test_messages__header_that_lies_is_refused_with_the_reason),
        cmocka_unit_test(test_messages__values_above_their_caps_are_refused_both_ways),
        cmocka_unit_test(test_messages__a_prompt_of_a_million_tokens_fits),
        cmocka_unit_test(test_messages__items_inside_spans_come_out_as_they_went_in),
        cmocka_unit_test(test_messages__numbers_are_unique_and_caps_positive),
        cmocka_unit_test(test_page__part_outside_its_area_is_named),
        cmocka_unit_test(test_messages__docs_hold_the_table_of_the_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
