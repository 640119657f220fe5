/* base/list.h - intrusive doubly linked list with a sentinel. An unlinked node points to itself. */
#ifndef TOW_BASE_LIST_H
#define TOW_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct tow_list {
    struct tow_list *next, *prev; /* borrowed: the neighbours */
};

static inline void tow_list_init(struct tow_list *n)
{
    n->next = n->prev = n;
}
static inline bool tow_list_empty(const struct tow_list *n)
{
    return n->next == n;
}
static inline void tow_list_remove(struct tow_list *n)
{
    n->prev->next = n->next;
    n->next->prev = n->prev;
    tow_list_init(n);
}
static inline void tow_list_append(struct tow_list *head, struct tow_list *n)
{
    n->prev = head->prev;
    n->next = head;
    head->prev->next = n;
    head->prev = n;
}
static inline void tow_list_prepend(struct tow_list *head, struct tow_list *n)
{
    tow_list_append(head->next, n);
}

#define TOW_CONTAINER(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

/* n: the name of the loop variable, a struct tow_list *. */
#define TOW_LIST_EACH(n, head) for (struct tow_list *n = (head)->next; n != (head); n = n->next)
/* Safe against removal of n inside the loop. */
#define TOW_LIST_EACH_SAFE(n, head)                                                                \
    for (struct tow_list *n = (head)->next, *n##_next = n->next; n != (head);                      \
         n = n##_next, n##_next = n->next)

#endif
