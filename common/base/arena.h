/* base/arena.h - memory of one request, freed whole.
 *
 * Holds    Blocks are never moved; each allocation is 16-byte aligned and zeroed.
 * Errors   NULL when the cap is passed or memory is gone.
 */
#ifndef TOW_BASE_ARENA_H
#define TOW_BASE_ARENA_H

#include <stddef.h>

struct tow_arena_block;
struct tow_arena {
    struct tow_arena_block *head; /* owned */
    size_t used;                  /* bytes handed out */
    size_t max;                   /* bytes allowed; 0 means no cap */
};

void tow_arena_init(struct tow_arena *a, size_t max);
void tow_arena_fini(struct tow_arena *a);
void *tow_arena_alloc(struct tow_arena *a, size_t n);
char *tow_arena_strndup(struct tow_arena *a, const char *s, size_t n);

#endif
