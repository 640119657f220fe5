/* text/utf8.h - one step through UTF-8; the only place that knows its byte ranges. */
#ifndef TOW_TEXT_UTF8_H
#define TOW_TEXT_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Looks at the character that begins at p; n > 0 bytes may be read.
 *   1..4  its length; *cp is the code point
 *   0     the n bytes begin a character and end before it does
 *   -k    the first k bytes (1 to 3) begin like a character and cannot go on as they do: the
 *         "maximal subpart" that one U+FFFD stands for                                          */
static inline int text_utf8_next(const uint8_t *p, size_t n, uint32_t *cp)
{
    uint8_t b = p[0], lo = 0x80, hi = 0xBF;
    if (b < 0x80) {
        *cp = b;
        return 1;
    }
    int len;
    uint32_t c;
    if (b >= 0xC2 && b <= 0xDF) {
        len = 2;
        c = b & 0x1F;
    } else if (b >= 0xE0 && b <= 0xEF) {
        len = 3;
        c = b & 0x0F;
        if (b == 0xE0) lo = 0xA0; /* overlong below */
        if (b == 0xED) hi = 0x9F; /* surrogates above */
    } else if (b >= 0xF0 && b <= 0xF4) {
        len = 4;
        c = b & 0x07;
        if (b == 0xF0) lo = 0x90; /* overlong below */
        if (b == 0xF4) hi = 0x8F; /* past U+10FFFF above */
    } else {
        return -1;
    }
    for (int i = 1; i < len; i++) {
        if ((size_t)i == n) return 0;
        if (p[i] < lo || p[i] > hi) return -i;
        c = c << 6 | (p[i] & 0x3F);
        lo = 0x80;
        hi = 0xBF;
    }
    *cp = c;
    return len;
}

/* The characters that count as white space (Unicode's White_Space). */
static inline int text_utf8_is_space(uint32_t cp)
{
    return (cp >= 0x09 && cp <= 0x0D) || cp == 0x20 || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F ||
           cp == 0x205F || cp == 0x3000;
}

#endif
