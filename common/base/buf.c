/* base/buf.c - see buf.h. Grows by half again, so n appends cost O(n) copies. */
#include "common/base/buf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void tow_buf_init(struct tow_buf *b, size_t max)
{
    memset(b, 0, sizeof *b);
    b->max = max ? max : SIZE_MAX / 4;
}

void tow_buf_fini(struct tow_buf *b)
{
    free(b->data);
    b->data = NULL;
    b->len = b->cap = 0;
    b->failed = false;
}

void tow_buf_clear(struct tow_buf *b)
{
    b->len = 0;
    b->failed = false;
    if (b->data) b->data[0] = 0;
}

bool tow_buf_failed(const struct tow_buf *b)
{
    return b->failed;
}

void *tow_buf_room(struct tow_buf *b, size_t n)
{
    if (b->failed) return NULL;
    if (n > b->max || b->len > b->max - n) {
        b->failed = true;
        return NULL;
    }
    size_t need = b->len + n + 1;
    if (need > b->cap) {
        size_t cap = b->cap + b->cap / 2;
        if (cap < need) cap = need;
        if (cap < 64) cap = 64;
        char *p = realloc(b->data, cap);
        if (!p) {
            b->failed = true;
            return NULL;
        }
        b->data = p;
        b->cap = cap;
        b->data[b->len] = 0;
    }
    return b->data + b->len;
}

void tow_buf_put(struct tow_buf *b, const void *p, size_t n)
{
    char *to = tow_buf_room(b, n);
    if (!to) return;
    if (n) memcpy(to, p, n);
    b->len += n;
    b->data[b->len] = 0;
}

void tow_buf_puts(struct tow_buf *b, const char *s)
{
    tow_buf_put(b, s, strlen(s));
}

void tow_buf_putc(struct tow_buf *b, char c)
{
    tow_buf_put(b, &c, 1);
}

void tow_buf_printf(struct tow_buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) {
        b->failed = true;
    } else {
        char *to = tow_buf_room(b, (size_t)n);
        if (to) {
            vsnprintf(to, (size_t)n + 1, fmt, again);
            b->len += (size_t)n;
        }
    }
    va_end(again);
}

void tow_buf_shift(struct tow_buf *b, size_t n)
{
    if (n >= b->len) {
        b->len = 0;
    } else {
        memmove(b->data, b->data + n, b->len - n);
        b->len -= n;
    }
    if (b->data) b->data[b->len] = 0;
}

char *tow_buf_take(struct tow_buf *b)
{
    if (b->failed || !tow_buf_room(b, 0)) return NULL;
    char *p = b->data;
    b->data = NULL;
    b->len = b->cap = 0;
    return p;
}

void *tow_copy(const void *bytes, size_t n, bool *ok)
{
    if (n == 0) return NULL;
    void *copy = malloc(n);
    if (copy)
        memcpy(copy, bytes, n);
    else
        *ok = false;
    return copy;
}

void *tow_grow(void *items, uint32_t n, uint32_t *cap, uint32_t first, size_t item_bytes)
{
    if (n < *cap) return items;
    if (*cap > UINT32_MAX / 2) return NULL;
    uint32_t more = *cap ? 2 * *cap : first;
    void *grown = realloc(items, more * item_bytes);
    if (grown) *cap = more;
    return grown;
}
