/* proto/wire.c - see wire.h. Each value is assembled byte by byte or copied whole; nothing is ever
 * read through a cast pointer, because spans of a frame have no alignment. */
#include "proto/wire.h"

#include "common/base/err.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "arrays are sent as the host holds them");
_Static_assert(sizeof(float) == 4, "f32 on the wire is the host's float");

static uint32_t header_check(const uint8_t *b)
{
    uint32_t h = 2166136261u;
    for (int i = 0; i < WIRE_HEADER_BYTES - 4; i++) h = (h ^ b[i]) * 16777619u;
    return h;
}

void wire_header_pack(const struct wire_header *h, void *out)
{
    struct wire_writer w = {.data = out, .cap = WIRE_HEADER_BYTES};
    wire_put_u32(&w, WIRE_MAGIC);
    wire_put_u8(&w, h->version);
    wire_put_u8(&w, h->flags);
    wire_put_u16(&w, h->type);
    wire_put_u32(&w, h->body_bytes);
    wire_put_u32(&w, header_check(out));
}

int wire_header_unpack(struct wire_header *h, const void *bytes, struct tow_err *err)
{
    struct wire_reader r = {.data = bytes, .len = WIRE_HEADER_BYTES};
    uint32_t magic = wire_get_u32(&r);
    h->version = wire_get_u8(&r);
    h->flags = wire_get_u8(&r);
    h->type = wire_get_u16(&r);
    h->body_bytes = wire_get_u32(&r);
    uint32_t check = wire_get_u32(&r);
    if (magic != WIRE_MAGIC)
        return tow_fail(err, TOW_EWIRE, "header magic is %08x, not %08x", magic, WIRE_MAGIC);
    if (check != header_check(bytes))
        return tow_fail(err, TOW_EWIRE, "header check is %08x, not %08x", check,
                        header_check(bytes));
    if (h->version != WIRE_VERSION)
        return tow_fail(err, TOW_EWIRE, "wire version is %u, not %u", h->version, WIRE_VERSION);
    if (h->body_bytes > WIRE_MAX_BODY)
        return tow_fail(err, TOW_EWIRE, "body of %u bytes, at most %u", h->body_bytes,
                        WIRE_MAX_BODY);
    return 0;
}

struct wire_text wire_text(const char *s)
{
    return (struct wire_text){.data = s ? s : "", .len = s ? (uint32_t)strlen(s) : 0};
}

char *wire_text_copy(struct wire_text t, char *out, size_t cap)
{
    size_t n = t.len < cap ? t.len : cap - 1;
    if (n) memcpy(out, t.data, n);
    out[n] = 0;
    return out;
}

bool wire_text_is(struct wire_text t, const char *s)
{
    return strlen(s) == t.len && (t.len == 0 || memcmp(t.data, s, t.len) == 0);
}

uint32_t wire_u32_at(const void *bytes)
{
    uint32_t v;
    memcpy(&v, bytes, sizeof v);
    return v;
}

float wire_f32_at(const void *bytes)
{
    float v;
    memcpy(&v, bytes, sizeof v);
    return v;
}

uint32_t wire_ids_at(struct wire_ids s, uint32_t i)
{
    tow_assert(i < s.n);
    return wire_u32_at((const uint8_t *)s.data + 4 * (size_t)i);
}

uint64_t wire_u64s_at(struct wire_u64s s, uint32_t i)
{
    uint64_t v;
    tow_assert(i < s.n);
    memcpy(&v, (const uint8_t *)s.data + 8 * (size_t)i, sizeof v);
    return v;
}

/* --- put ------------------------------------------------------------------------------------ */

void wire_put_raw(struct wire_writer *w, const void *p, size_t n)
{
    if (w->failed) return;
    if (w->data) {
        if (n > w->cap - w->len) {
            w->failed = true;
            return;
        }
        if (n) memcpy(w->data + w->len, p, n);
    }
    w->len += n;
}

static void put_uint(struct wire_writer *w, uint64_t v, size_t n)
{
    uint8_t b[8];
    for (size_t i = 0; i < n; i++) b[i] = (uint8_t)(v >> (8 * i));
    wire_put_raw(w, b, n);
}

void wire_put_u8(struct wire_writer *w, uint8_t v)
{
    put_uint(w, v, 1);
}
void wire_put_u16(struct wire_writer *w, uint16_t v)
{
    put_uint(w, v, 2);
}
void wire_put_u32(struct wire_writer *w, uint32_t v)
{
    put_uint(w, v, 4);
}
void wire_put_u64(struct wire_writer *w, uint64_t v)
{
    put_uint(w, v, 8);
}
void wire_put_i16(struct wire_writer *w, int16_t v)
{
    put_uint(w, (uint16_t)v, 2);
}

void wire_put_f32(struct wire_writer *w, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    wire_put_u32(w, bits);
}

static bool put_count(struct wire_writer *w, uint32_t n, uint32_t max, size_t count_bytes)
{
    if (n > max)
        w->failed = true;
    else
        put_uint(w, n, count_bytes);
    return !w->failed;
}

void wire_put_text(struct wire_writer *w, struct wire_text v, uint32_t max)
{
    if (put_count(w, v.len, max, 2)) wire_put_raw(w, v.data, v.len);
}

void wire_put_bytes(struct wire_writer *w, struct wire_bytes v, uint32_t max)
{
    if (put_count(w, v.len, max, 4)) wire_put_raw(w, v.data, v.len);
}

void wire_put_ids(struct wire_writer *w, struct wire_ids v, uint32_t max)
{
    if (put_count(w, v.n, max, 4)) wire_put_raw(w, v.data, 4 * (size_t)v.n);
}

void wire_put_u64s(struct wire_writer *w, struct wire_u64s v, uint32_t max)
{
    if (put_count(w, v.n, max, 4)) wire_put_raw(w, v.data, 8 * (size_t)v.n);
}

/* --- get ------------------------------------------------------------------------------------ */

const void *wire_get_raw(struct wire_reader *r, size_t n)
{
    if (r->failed || n > r->len - r->at) {
        r->failed = true;
        return NULL;
    }
    const void *p = r->data + r->at;
    r->at += n;
    return p;
}

static uint64_t get_uint(struct wire_reader *r, size_t n)
{
    const uint8_t *b = wire_get_raw(r, n);
    uint64_t v = 0;
    for (size_t i = 0; b && i < n; i++) v |= (uint64_t)b[i] << (8 * i);
    return v;
}

uint8_t wire_get_u8(struct wire_reader *r)
{
    return (uint8_t)get_uint(r, 1);
}
uint16_t wire_get_u16(struct wire_reader *r)
{
    return (uint16_t)get_uint(r, 2);
}
uint32_t wire_get_u32(struct wire_reader *r)
{
    return (uint32_t)get_uint(r, 4);
}
uint64_t wire_get_u64(struct wire_reader *r)
{
    return get_uint(r, 8);
}
int16_t wire_get_i16(struct wire_reader *r)
{
    return (int16_t)(uint16_t)get_uint(r, 2);
}

float wire_get_f32(struct wire_reader *r)
{
    uint32_t bits = wire_get_u32(r);
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* A counted span: n items of item_bytes each. */
static const void *get_span(struct wire_reader *r, uint32_t max, size_t count_bytes,
                            size_t item_bytes, uint32_t *n)
{
    *n = (uint32_t)get_uint(r, count_bytes);
    if (*n > max) r->failed = true;
    const void *p = wire_get_raw(r, item_bytes * (size_t)*n);
    if (!p) *n = 0;
    return p;
}

struct wire_text wire_get_text(struct wire_reader *r, uint32_t max)
{
    struct wire_text v;
    v.data = get_span(r, max, 2, 1, &v.len);
    for (uint32_t i = 0; i < v.len; i++) {
        unsigned char c = (unsigned char)v.data[i];
        if (c < 0x20 || c == 0x7f) r->failed = true;
    }
    return v;
}

struct wire_bytes wire_get_bytes(struct wire_reader *r, uint32_t max)
{
    struct wire_bytes v;
    v.data = get_span(r, max, 4, 1, &v.len);
    return v;
}

struct wire_ids wire_get_ids(struct wire_reader *r, uint32_t max)
{
    struct wire_ids v;
    v.data = get_span(r, max, 4, 4, &v.n);
    return v;
}

struct wire_u64s wire_get_u64s(struct wire_reader *r, uint32_t max)
{
    struct wire_u64s v;
    v.data = get_span(r, max, 4, 8, &v.n);
    return v;
}
