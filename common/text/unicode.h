/* text/unicode.h - makes every PCRE2 see the characters that the reference tokenizer sees.
 *
 * Why      Which characters are letters grows with each Unicode version. The reference (Hugging
 *          Face `tokenizers`) has Unicode 16; PCRE2 has 13 on Ubuntu 22.04, 14 on Debian 12, 16 on
 *          Debian 13. A split that hangs on the version would give other ids on another host.
 * How      Where the versions differ, the regex is shown another character in place: of the same
 *          general category, as many bytes long, and known to all versions. Exact for patterns that
 *          name characters by category; text/split refuses other properties.
 */
#ifndef TOW_TEXT_UNICODE_H
#define TOW_TEXT_UNICODE_H

#include <stdint.h>

/* The character to show for cp, of the same UTF-8 length, or 0 when cp itself will do.
 * [any thread] */
uint32_t text_unicode_standin(uint32_t cp);

#endif
