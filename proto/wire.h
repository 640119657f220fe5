/* proto/wire.h - the fixed message header and bounds-checked little-endian put and get.
 *
 * Why      Foreign bytes are read in one place only, and no read or write can pass its end.
 * Errors   Cursors are sticky: after a read past the end, a value above its cap or a write past the
 *          room, `failed` is set, later calls do nothing (gets give 0), and the owner asks once.
 * Holds    Allocates nothing, does no I/O. Spans point into the frame they were read from and live
 *          as long as it does. Hosts are little-endian (asserted in wire.c), so an array of the
 *          host may be put as a span.
 */
#ifndef TOW_PROTO_WIRE_H
#define TOW_PROTO_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_err;

#define WIRE_MAGIC        0x50574f54u /* the bytes "TOWP" */
#define WIRE_VERSION      1           /* version of header and field rules */
#define WIRE_HEADER_BYTES 16
#define WIRE_MAX_BODY     (5u << 20) /* no message may be larger; each has its own cap below that */

/* On the wire: magic u32, version u8, flags u8, type u16, body_bytes u32, check u32 (FNV-1a of the
 * twelve bytes before it, so that a reader which has lost its place notices at once). */
struct wire_header {
    uint32_t body_bytes;
    uint16_t type;
    uint8_t version;
    uint8_t flags; /* 0 so far; unknown bits are ignored */
};

/* out has WIRE_HEADER_BYTES. */
void wire_header_pack(const struct wire_header *h, void *out);
/* Reads exactly WIRE_HEADER_BYTES. TOW_EWIRE: wrong magic, check or version, or a body above
 * WIRE_MAX_BODY; *err (NULL is fine) says which. Caps of single messages: wire_check_header(). */
int wire_header_unpack(struct wire_header *h, const void *bytes, struct tow_err *err);

/* Spans: borrowed from the frame (after unpack) or from the caller (before pack). */
struct wire_text { /* UTF-8 by convention, without control characters by check; not terminated */
    const char *data;
    uint32_t len;
};
struct wire_bytes {
    const void *data;
    uint32_t len;
};
struct wire_ids { /* token ids; u32 each, maybe unaligned */
    const void *data;
    uint32_t n;
};
struct wire_u64s { /* u64 each, maybe unaligned */
    const void *data;
    uint32_t n;
};

struct wire_text wire_text(const char *s); /* NULL reads as "" */
/* Terminated copy, cut to cap - 1 bytes; returns out. */
char *wire_text_copy(struct wire_text t, char *out, size_t cap);
bool wire_text_is(struct wire_text t, const char *s);
uint32_t wire_ids_at(struct wire_ids s, uint32_t i);   /* i < n */
uint64_t wire_u64s_at(struct wire_u64s s, uint32_t i); /* i < n */
float wire_f32_at(const void *bytes);
uint32_t wire_u32_at(const void *bytes);

struct wire_writer {
    uint8_t *data; /* borrowed; NULL: count bytes only */
    size_t cap, len;
    bool failed;
};
struct wire_reader {
    const uint8_t *data; /* borrowed */
    size_t len, at;
    bool failed;
};

void wire_put_u8(struct wire_writer *w, uint8_t v);
void wire_put_u16(struct wire_writer *w, uint16_t v);
void wire_put_u32(struct wire_writer *w, uint32_t v);
void wire_put_u64(struct wire_writer *w, uint64_t v);
void wire_put_i16(struct wire_writer *w, int16_t v);
void wire_put_f32(struct wire_writer *w, float v); /* bits as they are */
void wire_put_raw(struct wire_writer *w, const void *p, size_t n);
/* Length first (u16 for text, u32 for the others), then the bytes; a length above max fails. */
void wire_put_text(struct wire_writer *w, struct wire_text v, uint32_t max);
void wire_put_bytes(struct wire_writer *w, struct wire_bytes v, uint32_t max);
void wire_put_ids(struct wire_writer *w, struct wire_ids v, uint32_t max);
void wire_put_u64s(struct wire_writer *w, struct wire_u64s v, uint32_t max);

uint8_t wire_get_u8(struct wire_reader *r);
uint16_t wire_get_u16(struct wire_reader *r);
uint32_t wire_get_u32(struct wire_reader *r);
uint64_t wire_get_u64(struct wire_reader *r);
int16_t wire_get_i16(struct wire_reader *r);
float wire_get_f32(struct wire_reader *r);
const void *wire_get_raw(struct wire_reader *r, size_t n); /* NULL when failed */
/* Caps are checked before the length is believed. Text with control characters fails. */
struct wire_text wire_get_text(struct wire_reader *r, uint32_t max);
struct wire_bytes wire_get_bytes(struct wire_reader *r, uint32_t max);
struct wire_ids wire_get_ids(struct wire_reader *r, uint32_t max);
struct wire_u64s wire_get_u64s(struct wire_reader *r, uint32_t max);

#endif
