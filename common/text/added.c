/* text/added.c - a trie, walked from each place where an added token's first byte stands.
 *
 * A walk is never longer than the longest token, so a search costs at most that many steps per byte
 * whatever the text. Rejected: Aho-Corasick, which saves those steps for text made of beginnings of
 * added tokens and nothing else.
 */
#include "common/text/added.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/err.h"

struct text_added_node {
    uint32_t child, sibling; /* 0: none */
    text_id id;              /* of the token that ends here, or -1 */
    uint8_t byte;
};

static int new_node(struct text_added *a, uint8_t byte, uint32_t *out, struct tow_err *err)
{
    if (a->n == a->cap) {
        uint32_t cap = a->cap ? a->cap * 2 : 64;
        struct text_added_node *nodes = realloc(a->nodes, cap * sizeof *nodes);
        if (!nodes) return tow_fail(err, TOW_ENOMEM, "out of memory");
        a->nodes = nodes;
        a->cap = cap;
    }
    if (a->n == 0) a->nodes[a->n++] = (struct text_added_node){.id = -1}; /* index 0 means none */
    a->nodes[a->n] = (struct text_added_node){.id = -1, .byte = byte};
    *out = a->n++;
    return 0;
}

static uint32_t child_of(const struct text_added *a, uint32_t node, uint8_t byte)
{
    uint32_t c = a->nodes[node].child;
    while (c && a->nodes[c].byte != byte) c = a->nodes[c].sibling;
    return c;
}

int text_added_put(struct text_added *a, const char *content, size_t len, text_id id,
                   struct tow_err *err)
{
    if (len == 0 || len > TEXT_ADDED_MAX_LEN)
        return tow_fail(err, TOW_EFORMAT, "content has %zu bytes, want 1 to %d", len,
                        TEXT_ADDED_MAX_LEN);
    uint8_t b = (uint8_t)content[0];
    int rc;
    if (!a->first[b]) {
        rc = new_node(a, b, &a->first[b], err);
        if (rc < 0) return rc;
    }
    uint32_t node = a->first[b];
    for (size_t i = 1; i < len; i++) {
        b = (uint8_t)content[i];
        uint32_t next = child_of(a, node, b);
        if (!next) {
            rc = new_node(a, b, &next, err);
            if (rc < 0) return rc;
            a->nodes[next].sibling = a->nodes[node].child;
            a->nodes[node].child = next;
        }
        node = next;
    }
    if (a->nodes[node].id >= 0)
        return tow_fail(err, TOW_EINVAL, "content is that of id %d too", (int)a->nodes[node].id);
    a->nodes[node].id = id;
    return 0;
}

void text_added_fini(struct text_added *a)
{
    free(a->nodes);
    memset(a, 0, sizeof *a);
}

text_id text_added_next(const struct text_added *a, const char *text, size_t from, size_t end,
                        size_t *begin, size_t *stop)
{
    for (size_t i = from; i < end; i++) {
        uint32_t node = a->first[(uint8_t)text[i]];
        text_id id = -1;
        for (size_t j = i + 1; node; j++) {
            if (a->nodes[node].id >= 0) {
                id = a->nodes[node].id;
                *begin = i;
                *stop = j;
            }
            node = j < end ? child_of(a, node, (uint8_t)text[j]) : 0;
        }
        if (id >= 0) return id;
    }
    return -1;
}
