/* base/arena.c - see arena.h. Blocks of 4 KiB or the size asked for, in one list. */
#include "common/base/arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct tow_arena_block {
    struct tow_arena_block *next;
    size_t used, cap;
    _Alignas(16) unsigned char data[];
};

void tow_arena_init(struct tow_arena *a, size_t max)
{
    memset(a, 0, sizeof *a);
    a->max = max;
}

void tow_arena_fini(struct tow_arena *a)
{
    struct tow_arena_block *b = a->head;
    while (b) {
        struct tow_arena_block *next = b->next;
        free(b);
        b = next;
    }
    a->head = NULL;
    a->used = 0;
}

void *tow_arena_alloc(struct tow_arena *a, size_t n)
{
    if (n > SIZE_MAX / 4) return NULL;
    n = (n + 15) & ~(size_t)15;
    if (a->max && (n > a->max || a->used > a->max - n)) return NULL;
    struct tow_arena_block *b = a->head;
    if (!b || b->cap - b->used < n) {
        size_t cap = n > 4096 ? n : 4096;
        b = malloc(sizeof *b + cap);
        if (!b) return NULL;
        b->next = a->head;
        b->used = 0;
        b->cap = cap;
        a->head = b;
    }
    void *p = b->data + b->used;
    b->used += n;
    a->used += n;
    memset(p, 0, n);
    return p;
}

char *tow_arena_strndup(struct tow_arena *a, const char *s, size_t n)
{
    char *p = tow_arena_alloc(a, n + 1);
    if (p && n) memcpy(p, s, n);
    return p;
}
