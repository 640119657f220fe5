/* proto/messages.c - pack and unpack, made from the field lists of messages.h. A list is walked in
 * the same order by put and by get, which is what keeps the two from drifting apart. */
#include "proto/messages.h"

#include "common/base/err.h"

#include <string.h>

/* --- one put and one get per kind ------------------------------------------------------------- */
#define CAPPED(kind, ctype)                                                                        \
    static void put_##kind(struct wire_writer *w, const ctype *v, uint64_t max)                    \
    {                                                                                              \
        if (*v > max)                                                                              \
            w->failed = true;                                                                      \
        else                                                                                       \
            wire_put_##kind(w, *v);                                                                \
    }                                                                                              \
    static void get_##kind(struct wire_reader *r, ctype *v, uint64_t max)                          \
    {                                                                                              \
        *v = wire_get_##kind(r);                                                                   \
        if (*v > max) r->failed = true;                                                            \
    }
CAPPED(u8, uint8_t)
CAPPED(u16, uint16_t)
CAPPED(u32, uint32_t)
CAPPED(u64, uint64_t)

#define SPAN(kind, ctype)                                                                          \
    static void put_##kind(struct wire_writer *w, const ctype *v, uint64_t max)                    \
    {                                                                                              \
        wire_put_##kind(w, *v, (uint32_t)max);                                                     \
    }                                                                                              \
    static void get_##kind(struct wire_reader *r, ctype *v, uint64_t max)                          \
    {                                                                                              \
        *v = wire_get_##kind(r, (uint32_t)max);                                                    \
    }
SPAN(text, struct wire_text)
SPAN(bytes, struct wire_bytes)
SPAN(ids, struct wire_ids)

static void put_i16(struct wire_writer *w, const int16_t *v, uint64_t max)
{
    (void)max;
    wire_put_i16(w, *v);
}
static void get_i16(struct wire_reader *r, int16_t *v, uint64_t max)
{
    (void)max;
    *v = wire_get_i16(r);
}

static bool finite_bits(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}
static void put_f32(struct wire_writer *w, const float *v, uint64_t max)
{
    (void)max;
    if (!finite_bits(*v))
        w->failed = true;
    else
        wire_put_f32(w, *v);
}
static void get_f32(struct wire_reader *r, float *v, uint64_t max)
{
    (void)max;
    *v = wire_get_f32(r);
    if (!finite_bits(*v)) r->failed = true;
}

static void put_ticket(struct wire_writer *w, const struct wire_ticket *v, uint64_t max)
{
    (void)max;
    wire_put_u64(w, v->id);
    wire_put_u64(w, v->nonce);
}
static void get_ticket(struct wire_reader *r, struct wire_ticket *v, uint64_t max)
{
    (void)max;
    v->id = wire_get_u64(r);
    v->nonce = wire_get_u64(r);
}

static void put_part(struct wire_writer *w, const struct wire_part *v, uint64_t max)
{
    (void)max;
    wire_put_part(w, v);
}
static void get_part(struct wire_reader *r, struct wire_part *v, uint64_t max)
{
    (void)max;
    wire_get_part(r, v);
}

#define PUT(kind, name, max, note) put_##kind(w, &m->name, max);
#define GET(kind, name, max, note) get_##kind(r, &m->name, max);

static void put_sampling(struct wire_writer *w, const struct wire_sampling *m, uint64_t max)
{
    (void)max;
    WIRE_SAMPLING(PUT)
}

/* --- rules between fields --------------------------------------------------------------------- */

static bool sampling_holds(const struct wire_sampling *s)
{
    if (s->logit_bias.len % 8) return false;
    for (uint32_t i = 0; i < wire_n_bias(s); i++)
        if (!finite_bits(wire_bias_at(s, i).bias)) return false;
    return true;
}

static void get_sampling(struct wire_reader *r, struct wire_sampling *m, uint64_t max)
{
    (void)max;
    WIRE_SAMPLING(GET)
    if (!r->failed && !sampling_holds(m)) r->failed = true;
}

static bool facts_hold(struct wire_bytes facts)
{
    size_t at = 0;
    struct wire_fact f;
    while (wire_next_fact(facts, &at, &f)) {
    }
    return at == facts.len;
}

static bool rows_hold(struct wire_bytes rows, uint32_t n_ids, uint8_t has, uint8_t n_top)
{
    return has ? rows.len == n_ids * (4u + 8u * n_top) : rows.len == 0 && n_top == 0;
}

static bool name_holds(struct wire_text name)
{
    for (uint32_t i = 0; i < name.len; i++) {
        char c = name.data[i];
        bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '_' || c == '-';
        if (!ok) return false;
    }
    return name.len > 0;
}

static bool capture_holds(struct wire_bytes ask)
{
    struct wire_capture c;
    return ask.len == 0 || wire_get_capture(&c, ask.data, ask.len) == 0;
}

static bool capture_row_holds(struct wire_bytes row)
{
    struct wire_capture_row r;
    return wire_get_capture_row(&r, row.data, row.len) == 0;
}

/* Only what makes a message self-contradictory; what depends on the receiver is the receiver's. */
static bool holds(const struct wire_msg *m)
{
    switch (m->type) {
    case WIRE_HELLO_MSG:
        return facts_hold(m->hello.facts) && name_holds(m->hello.name) && m->hello.incarnation != 0;
    case WIRE_XHELLO_MSG: return facts_hold(m->xhello.facts) && name_holds(m->xhello.name);
    case WIRE_RESERVE_MSG:
        return m->reserve.outputs.n <= m->reserve.n_tokens && capture_holds(m->reserve.capture);
    case WIRE_PREFILL_MSG:
        return m->prefill.n_prompt <= m->prefill.tokens.n && capture_holds(m->prefill.capture);
    case WIRE_CAPTURED_MSG: return capture_row_holds(m->captured.row);
    case WIRE_TOKENS_MSG:
        return rows_hold(m->tokens.logprobs, m->tokens.ids.n, m->tokens.has_logprobs,
                         m->tokens.n_top);
    case WIRE_FIRST_MSG:
        return rows_hold(m->first.logprobs, 1, m->first.has_logprobs, m->first.n_top);
    case WIRE_OFFER_MSG: return m->offer.part.kind == WIRE_TAIL || m->offer.note.len == 0;
    default: return true;
    }
}

/* --- one pair per message --------------------------------------------------------------------- */
#define M(name, NAME, number, since, cap, dir, note)                                               \
    void wire_put_##name(struct wire_writer *w, const struct wire_##name *m)                       \
    {                                                                                              \
        WIRE_##NAME(PUT)                                                                           \
    }                                                                                              \
    static void read_##name(struct wire_reader *r, struct wire_##name *m)                          \
    {                                                                                              \
        WIRE_##NAME(GET)                                                                           \
    }                                                                                              \
    int wire_get_##name(struct wire_##name *m, const void *body, size_t n)                         \
    {                                                                                              \
        struct wire_msg any = {.type = number};                                                    \
        struct wire_reader r = {.data = body, .len = n};                                           \
        read_##name(&r, &any.name);                                                                \
        if (r.failed || !holds(&any)) return TOW_EWIRE;                                            \
        *m = any.name;                                                                             \
        return 0;                                                                                  \
    }
WIRE_MESSAGES(M)
#undef M

static void put_body(struct wire_writer *w, const struct wire_msg *m)
{
    switch (m->type) {
#define M(name, NAME, number, since, cap, dir, note)                                               \
    case number: wire_put_##name(w, &m->name); return;
        WIRE_MESSAGES(M)
#undef M
    }
    w->failed = true;
}

static uint32_t body_cap(unsigned type)
{
    switch (type) {
#define M(name, NAME, number, since, cap, dir, note)                                               \
    case number: return cap;
        WIRE_MESSAGES(M)
#undef M
    default: return 0;
    }
}

#define M(name, NAME, number, since, cap, dir, note)                                               \
    _Static_assert((cap) <= WIRE_MAX_BODY, #NAME " may be larger than any body");
WIRE_MESSAGES(M)
#undef M

int64_t wire_frame_bytes(const struct wire_msg *m)
{
    struct wire_writer w = {.data = NULL};
    put_body(&w, m);
    if (w.failed || w.len > body_cap(m->type) || !holds(m)) return TOW_EINVAL;
    return (int64_t)w.len + WIRE_HEADER_BYTES;
}

int64_t wire_pack(const struct wire_msg *m, void *frame, size_t cap)
{
    int64_t n = wire_frame_bytes(m);
    if (n < 0) return n;
    if ((uint64_t)n > cap) return TOW_EFULL;
    struct wire_header h = {.type = (uint16_t)m->type,
                            .version = WIRE_VERSION,
                            .body_bytes = (uint32_t)(n - WIRE_HEADER_BYTES)};
    wire_header_pack(&h, frame);
    struct wire_writer w = {.data = (uint8_t *)frame + WIRE_HEADER_BYTES, .cap = h.body_bytes};
    put_body(&w, m);
    tow_assert(!w.failed && w.len == h.body_bytes);
    return n;
}

int wire_check_header(const struct wire_header *h, struct tow_err *err)
{
    uint32_t cap = body_cap(h->type);
    if (cap == 0) return tow_fail(err, TOW_ENOENT, "message type %u is not known", h->type);
    if (h->body_bytes > cap)
        return tow_fail(err, TOW_EWIRE, "%s has a body of %u bytes, at most %u",
                        wire_type_name(h->type), h->body_bytes, cap);
    return 0;
}

int wire_unpack(struct wire_msg *out, const struct wire_header *h, const void *body,
                struct tow_err *err)
{
    int rc = TOW_EWIRE;
    switch (h->type) {
#define M(name, NAME, number, since, cap, dir, note)                                               \
    case number: rc = wire_get_##name(&out->name, body, h->body_bytes); break;
        WIRE_MESSAGES(M)
#undef M
    default: return tow_fail(err, TOW_ENOENT, "message type %u is not known", h->type);
    }
    if (rc < 0)
        return tow_fail(err, rc, "%s with a body of %u bytes is malformed", wire_type_name(h->type),
                        h->body_bytes);
    out->type = h->type;
    return 0;
}

int wire_unpack_frame(struct wire_msg *out, const void *frame, size_t n, struct tow_err *err)
{
    struct wire_header h;
    if (n < WIRE_HEADER_BYTES)
        return tow_fail(err, TOW_EWIRE, "frame of %zu bytes has no header", n);
    int rc = wire_header_unpack(&h, frame, err);
    if (rc == 0) rc = wire_check_header(&h, err);
    if (rc < 0) return rc;
    if (h.body_bytes > n - WIRE_HEADER_BYTES)
        return tow_fail(err, TOW_EWIRE, "frame of %zu bytes is cut: its body has %u", n,
                        h.body_bytes);
    return wire_unpack(out, &h, (const uint8_t *)frame + WIRE_HEADER_BYTES, err);
}

const char *wire_type_name(unsigned type)
{
    switch (type) {
#define M(name, NAME, number, since, cap, dir, note)                                               \
    case number: return #NAME;
        WIRE_MESSAGES(M)
#undef M
    default: return "?";
    }
}

const char *wire_step_name(unsigned type, bool sent)
{
    switch (type) {
#define M(name, NAME, number, since, cap, dir, note)                                               \
    case number: return sent ? "send." #NAME : "take." #NAME;
        WIRE_MESSAGES(M)
#undef M
    default: return sent ? "send.?" : "take.?";
    }
}

/* --- items inside spans ----------------------------------------------------------------------- */

void wire_put_fact(struct wire_writer *w, const struct wire_fact *f)
{
    wire_put_u8(w, f->class);
    wire_put_text(w, f->field, WIRE_MAX_NAME);
    wire_put_text(w, f->value, WIRE_MAX_VALUE);
}

bool wire_next_fact(struct wire_bytes facts, size_t *at, struct wire_fact *out)
{
    struct wire_reader r = {.data = facts.data, .len = facts.len, .at = *at};
    if (r.at >= r.len) return false;
    out->class = wire_get_u8(&r);
    out->field = wire_get_text(&r, WIRE_MAX_NAME);
    out->value = wire_get_text(&r, WIRE_MAX_VALUE);
    if (r.failed) return false;
    *at = r.at;
    return true;
}

uint32_t wire_n_bias(const struct wire_sampling *s)
{
    return s->logit_bias.len / 8;
}

struct wire_bias wire_bias_at(const struct wire_sampling *s, uint32_t i)
{
    tow_assert(i < wire_n_bias(s));
    const uint8_t *p = (const uint8_t *)s->logit_bias.data + 8 * (size_t)i;
    return (struct wire_bias){.token = wire_u32_at(p), .bias = wire_f32_at(p + 4)};
}

float wire_logprob_at(struct wire_bytes rows, uint8_t n_top, uint32_t i)
{
    size_t at = (size_t)i * (4u + 8u * n_top);
    tow_assert(at + 4 <= rows.len);
    return wire_f32_at((const uint8_t *)rows.data + at);
}

void wire_top_at(struct wire_bytes rows, uint8_t n_top, uint32_t i, uint32_t k, uint32_t *token,
                 float *logprob)
{
    size_t at = (size_t)i * (4u + 8u * n_top) + 4 + 8 * (size_t)k;
    tow_assert(k < n_top && at + 8 <= rows.len);
    *token = wire_u32_at((const uint8_t *)rows.data + at);
    *logprob = wire_f32_at((const uint8_t *)rows.data + at + 4);
}

/* --- the tables as data, for docs/protocol.md ------------------------------------------------- */

#define DOC(kind, name, max, note) {#kind, #name, note, max},
#define END                                                                                        \
    {                                                                                              \
        NULL, NULL, NULL, 0                                                                        \
    }
static const struct wire_field_doc sampling_docs[] = {WIRE_SAMPLING(DOC) END};
static const struct wire_field_doc part_docs[] = {WIRE_PART(DOC) END};
#define M(name, NAME, number, since, cap, dir, note)                                               \
    static const struct wire_field_doc name##_docs[] = {WIRE_##NAME(DOC) END};
WIRE_MESSAGES(M)
#undef M

static const struct {
    struct wire_type_doc type;
    const struct wire_field_doc *fields;
} docs[] = {
#define M(name, NAME, number, since, cap, dir, note)                                               \
    {{#NAME, dir, note, number, since, cap}, name##_docs},
    WIRE_MESSAGES(M)
#undef M
};

static bool doc_of(const struct wire_field_doc *list, unsigned i, struct wire_field_doc *out)
{
    for (unsigned k = 0; k <= i; k++)
        if (!list[k].name) return false;
    *out = list[i];
    return true;
}

bool wire_doc_type(unsigned row, struct wire_type_doc *out)
{
    if (row >= sizeof docs / sizeof docs[0]) return false;
    *out = docs[row].type;
    return true;
}

bool wire_doc_field(unsigned row, unsigned i, struct wire_field_doc *out)
{
    return row < sizeof docs / sizeof docs[0] && doc_of(docs[row].fields, i, out);
}

bool wire_doc_sampling(unsigned i, struct wire_field_doc *out)
{
    return doc_of(sampling_docs, i, out);
}
bool wire_doc_part(unsigned i, struct wire_field_doc *out)
{
    return doc_of(part_docs, i, out);
}
