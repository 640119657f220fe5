/* tests/support/long_text.h - long texts without a split point, the same bytes each time.
 *
 * tests/golden/tokenizer/make_long.py makes the same ones. */
#ifndef TESTS_SUPPORT_LONG_TEXT_H
#define TESTS_SUPPORT_LONG_TEXT_H

#include <stddef.h>

/* The names of the kinds, NULL at the end. */
extern const char *const long_text_kinds[];

/* Fills p with whole characters, at most n bytes; returns how many bytes. */
size_t long_text_fill(const char *kind, char *p, size_t n);

#endif
