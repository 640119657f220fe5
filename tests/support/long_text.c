/* tests/support/long_text.c - repeats a unit,
 * or draws characters from a fixed xorshift sequence. */
#include "tests/support/long_text.h"

#include <stdint.h>
#include <string.h>

static const struct {
    const char *kind, *unit;
} repeated[] = {
    {"spaces", " "},
    {"newlines", "\n"},
    {"a", "a"},
    {"underline", "_"},
    {"one CJK", "\xE5\xA4\xA9"},
    {"one emoji", "\xF0\x9F\x91\x8D"},
    {"abab", "ab"},
    {"json", "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"string\"},\"n\":[1,2],\"on\":"
             "true}},"},
    {"controls", "\x01"},
    {"prose", "It was a bright cold day in April, and 13 clocks were striking; she didn't look "
              "up. "},
};

const char *const long_text_kinds[] = {
    "spaces",    "tabs spaces", "newlines", "a",         "random letters",
    "underline", "digits",      "one CJK",  "one emoji", "random CJK",
    "abab",      "json",        "controls", "prose",     NULL,
};

static uint32_t draw(uint64_t *x, uint32_t n)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return (uint32_t)(*x >> 33) % n;
}

size_t long_text_fill(const char *kind, char *p, size_t n)
{
    size_t used = 0;
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < sizeof repeated / sizeof repeated[0]; i++) {
        if (strcmp(kind, repeated[i].kind) != 0) continue;
        size_t len = strlen(repeated[i].unit);
        for (; used + len <= n; used += len) memcpy(p + used, repeated[i].unit, len);
        return used;
    }
    while (used + 3 <= n) {
        if (!strcmp(kind, "tabs spaces")) {
            p[used++] = draw(&x, 2) ? '\t' : ' ';
        } else if (!strcmp(kind, "random letters")) {
            p[used++] = (char)('a' + draw(&x, 26));
        } else if (!strcmp(kind, "digits")) {
            p[used++] = (char)('0' + draw(&x, 10));
        } else { /* random CJK */
            uint32_t c = 0x4E00 + draw(&x, 0x9FA6 - 0x4E00);
            p[used++] = (char)(0xE0 | c >> 12);
            p[used++] = (char)(0x80 | (c >> 6 & 0x3F));
            p[used++] = (char)(0x80 | (c & 0x3F));
        }
    }
    return used;
}
