/* base/inbox.c - a ring of cells, each with a ticket that says whose turn it is.
 *
 * Cell i at lap k is writable when its turn is k * n + i and readable when it is one more. Posters
 * claim a place by compare-and-swap on `tail`, fill it, then publish the turn; the owner alone
 * moves `head`. A mutex would be as short, but then a poster stopped by the scheduler inside it
 * could hold up the owner's whole loop; here it holds up only the events behind its own.
 *
 * `awake` is 1 from the moment a poster has called wake until the owner finds the ring empty. Both
 * sides swap it (never plain stores): if the owner's swap comes second it sees the poster's event,
 * if the poster's comes second it sees 0 and wakes.
 */
#include "common/base/inbox.h"

#include "common/base/err.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { CACHE_LINE = 64, MAX_EVENT_BYTES = 4096, MAX_CAPACITY = 1 << 24 };

struct tow_inbox {
    size_t event_bytes;
    size_t cell_bytes;    /* turn + event, 8-byte aligned */
    uint64_t mask;        /* capacity - 1 */
    unsigned char *cells; /* owned */
    tow_inbox_wake wake;
    void *wake_arg; /* borrowed for the inbox's life */
    _Alignas(CACHE_LINE) _Atomic uint64_t tail;
    _Alignas(CACHE_LINE) _Atomic uint64_t head; /* written by the owner only */
    _Alignas(CACHE_LINE) _Atomic int awake;
    _Atomic uint64_t refused;
};

static _Atomic uint64_t *turn_of(const struct tow_inbox *in, uint64_t at)
{
    return (_Atomic uint64_t *)(void *)(in->cells + (at & in->mask) * in->cell_bytes);
}

static unsigned char *event_of(const struct tow_inbox *in, uint64_t at)
{
    return in->cells + (at & in->mask) * in->cell_bytes + sizeof(uint64_t);
}

int tow_inbox_new(struct tow_inbox **out, uint32_t capacity, size_t event_bytes,
                  tow_inbox_wake wake, void *wake_arg, struct tow_err *err)
{
    if (capacity == 0 || capacity > MAX_CAPACITY || event_bytes == 0 ||
        event_bytes > MAX_EVENT_BYTES)
        return tow_fail(err, TOW_EINVAL, "inbox: %u events of %zu bytes; 1 to %d of 1 to %d",
                        capacity, event_bytes, (int)MAX_CAPACITY, (int)MAX_EVENT_BYTES);
    uint64_t n =
        2; /* with one cell, "readable" and "writable a lap later" would be the same turn */
    while (n < capacity) n *= 2;
    struct tow_inbox *in = aligned_alloc(CACHE_LINE, sizeof *in);
    if (!in) return tow_fail(err, TOW_ENOMEM, "inbox: out of memory");
    memset(in, 0, sizeof *in);
    in->event_bytes = event_bytes;
    in->cell_bytes = sizeof(uint64_t) + ((event_bytes + 7) & ~(size_t)7);
    in->mask = n - 1;
    in->wake = wake;
    in->wake_arg = wake_arg;
    in->cells = calloc(n, in->cell_bytes);
    if (!in->cells) {
        free(in);
        return tow_fail(err, TOW_ENOMEM, "inbox: out of memory for %llu events of %zu bytes",
                        (unsigned long long)n, event_bytes);
    }
    for (uint64_t i = 0; i < n; i++) atomic_init(turn_of(in, i), i);
    *out = in;
    return 0;
}

void tow_inbox_free(struct tow_inbox *in)
{
    if (!in) return;
    free(in->cells);
    free(in);
}

static void wake_owner(struct tow_inbox *in)
{
    if (in->wake && atomic_exchange_explicit(&in->awake, 1, memory_order_acq_rel) == 0)
        in->wake(in->wake_arg);
}

int tow_inbox_post(struct tow_inbox *in, const void *event)
{
    uint64_t at = atomic_load_explicit(&in->tail, memory_order_relaxed);
    for (;;) {
        uint64_t turn = atomic_load_explicit(turn_of(in, at), memory_order_acquire);
        if (turn == at) {
            if (atomic_compare_exchange_weak_explicit(&in->tail, &at, at + 1, memory_order_relaxed,
                                                      memory_order_relaxed))
                break;
        } else if (turn < at) { /* still holds the event of a lap ago */
            atomic_fetch_add_explicit(&in->refused, 1, memory_order_relaxed);
            return TOW_EFULL;
        } else { /* another poster took this place */
            at = atomic_load_explicit(&in->tail, memory_order_relaxed);
        }
    }
    memcpy(event_of(in, at), event, in->event_bytes);
    atomic_store_explicit(turn_of(in, at), at + 1, memory_order_release);
    wake_owner(in);
    return 0;
}

static bool readable(const struct tow_inbox *in)
{
    uint64_t at = atomic_load_explicit(&in->head, memory_order_relaxed);
    return atomic_load_explicit(turn_of(in, at), memory_order_acquire) == at + 1;
}

static bool try_take(struct tow_inbox *in, void *event)
{
    if (!readable(in)) return false;
    uint64_t at = atomic_load_explicit(&in->head, memory_order_relaxed);
    memcpy(event, event_of(in, at), in->event_bytes);
    atomic_store_explicit(turn_of(in, at), at + in->mask + 1, memory_order_release);
    atomic_store_explicit(&in->head, at + 1, memory_order_relaxed);
    return true;
}

int tow_inbox_take(struct tow_inbox *in, void *event)
{
    if (try_take(in, event)) return 1;
    atomic_exchange_explicit(&in->awake, 0, memory_order_acq_rel);
    return try_take(in, event);
}

uint32_t tow_inbox_drain(struct tow_inbox *in, uint32_t max, tow_inbox_on_event on_event, void *arg)
{
    _Alignas(16) unsigned char event[MAX_EVENT_BYTES];
    uint32_t n = 0;
    while (n < max) {
        if (!tow_inbox_take(in, event)) return n;
        on_event(arg, event);
        n++;
    }
    /* Stopping early: fall asleep as take() does,
     * and wake again at once if anything is readable. */
    atomic_exchange_explicit(&in->awake, 0, memory_order_acq_rel);
    if (readable(in)) wake_owner(in);
    return n;
}

uint32_t tow_inbox_capacity(const struct tow_inbox *in)
{
    return (uint32_t)(in->mask + 1);
}

uint32_t tow_inbox_count(const struct tow_inbox *in)
{
    uint64_t head = atomic_load_explicit(&in->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&in->tail, memory_order_relaxed);
    return tail > head ? (uint32_t)(tail - head) : 0;
}

uint64_t tow_inbox_refused(const struct tow_inbox *in)
{
    return atomic_load_explicit(&in->refused, memory_order_relaxed);
}
