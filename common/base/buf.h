/* base/buf.h - a growable byte string with a hard cap.
 *
 * Why      Text is built piece by piece in many places; each piece must not need its own check.
 * Errors   Sticky: after a failed append (cap passed or memory gone) `failed` is set, later appends
 *          do nothing, and the owner checks once at the end with tow_buf_failed().
 * Holds    data[len] is always 0 when data is not NULL, so it can be read as a C string.
 */
#ifndef TOW_BASE_BUF_H
#define TOW_BASE_BUF_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_buf {
    char *data; /* owned; NULL when empty and never grown */
    size_t len; /* bytes */
    size_t cap; /* bytes allocated */
    size_t max; /* most bytes allowed; 0 means SIZE_MAX / 4 */
    bool failed;
};

void tow_buf_init(struct tow_buf *b, size_t max);
void tow_buf_fini(struct tow_buf *b);  /* frees; b may be used again after init */
void tow_buf_clear(struct tow_buf *b); /* len = 0, failed = false; keeps the memory */
bool tow_buf_failed(const struct tow_buf *b);

void tow_buf_put(struct tow_buf *b, const void *p, size_t n);
void tow_buf_puts(struct tow_buf *b, const char *s);
void tow_buf_putc(struct tow_buf *b, char c);
void tow_buf_printf(struct tow_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Room for n more bytes; returns where to write or NULL (failed). Add what was written to len. */
void *tow_buf_room(struct tow_buf *b, size_t n);
/* Removes n <= len bytes at the front. */
void tow_buf_shift(struct tow_buf *b, size_t n);
/* Ownership of the bytes moves to the caller, who frees with free(). NULL when failed. */
char *tow_buf_take(struct tow_buf *b);

/* A copy of n bytes for free(). NULL when n is 0; NULL and *ok = false when there is no memory. */
void *tow_copy(const void *bytes, size_t n, bool *ok);
/* An array of n items that may be full: room for one more. The array, which may have moved, or NULL
 * with nothing changed. The first room is for `first` items; then it doubles. */
void *tow_grow(void *items, uint32_t n, uint32_t *cap, uint32_t first, size_t item_bytes);

#endif
