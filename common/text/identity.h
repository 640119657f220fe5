/* text/identity.h - which model a folder holds, as far as that shows without its weights.
 *
 * Why      The router reads config.json and tokenizer.json, workers read the weights, perhaps of
 *          another folder on another host. Ids of one tokenizer mean nothing to another model.
 * Holds    What must be alike for the ids of one side to be right on the other, and no more:
 *          weights in another number format are the same model here, and the ids that end an
 *          answer come from the router alone.
 * Threads  [any thread]
 */
#ifndef TEXT_IDENTITY_H
#define TEXT_IDENTITY_H

#include "common/text/config.h"

enum { TEXT_IDENTITY_MAX = 4, TEXT_IDENTITY_CHARS = 24 };

struct text_identity {
    uint32_t n;
    struct text_identity_item {
        const char *field; /* "model.vocab_size"; static */
        char value[TEXT_IDENTITY_CHARS];
    } items[TEXT_IDENTITY_MAX];
};

/* c: dir/config.json, loaded. The last item is the XXH3 of dir/tokenizer.json, left out where the
 * file cannot be read: a worker does not need it. */
void text_identity_read(struct text_identity *out, const char *dir, const struct text_config *c);

/* The last part of the path, for people: whole UTF-8 characters, cap - 1 bytes at most (cap > 0),
 * '?' for what is no character or a control character, which no frame may carry. Returns out. */
const char *text_folder_name(const char *dir, char *out, size_t cap);

#endif
