/* text/added.h - finds added tokens in text: the longest at the leftmost place.
 *
 * Why      Added tokens (control tokens among them) are looked for before any splitting, and only
 *          where the caller says they may stand.
 * Owner    Immutable once built; text_added_next is [any thread].
 */
#ifndef TOW_TEXT_ADDED_H
#define TOW_TEXT_ADDED_H

#include <stddef.h>
#include <stdint.h>

#include "common/text/tokenizer.h"

struct tow_err;

#define TEXT_ADDED_MAX_LEN 1024 /* bytes of one added token */

struct text_added {
    struct text_added_node *nodes; /* owned; [0] is the root */
    uint32_t n, cap;
    uint32_t first[256]; /* node of each first byte, 0 for none */
};

/* All-zero is an empty set. content is 1 to TEXT_ADDED_MAX_LEN bytes;
 * TOW_EINVAL when it is there. */
int text_added_put(struct text_added *a, const char *content, size_t len, text_id id,
                   struct tow_err *err);
void text_added_fini(struct text_added *a);

/* The token that begins first in text[from..end), of those the longest; -1 for none. */
text_id text_added_next(const struct text_added *a, const char *text, size_t from, size_t end,
                        size_t *begin, size_t *stop);

#endif
