/* router/stop.c - see stop.h.
 *
 * One Knuth-Morris-Pratt automaton per string: its state is the length of the longest beginning of
 * the string that the text now ends with, so text length - state is the earliest place where an
 * occurrence of it may still start. Rejected: Aho-Corasick, which finds ends, not earliest starts.
 */
#include "router/stop.h"

#include "common/base/buf.h"

#include <stdlib.h>
#include <string.h>

struct automaton {
    const char *bytes; /* in rtr_stop */
    uint32_t len, state;
    uint16_t *fail; /* [len]: length of the longest border of the first i + 1 bytes */
};

struct rtr_stop {
    size_t n;
    struct automaton a[RTR_MAX_STOPS];
    struct tow_buf held;
    bool found;
    uint64_t seen;       /* bytes of text so far */
    uint64_t held_at;    /* position of held's first byte */
    uint64_t best_start; /* of the earliest complete occurrence, when found */
};

static void build(struct automaton *a)
{
    uint32_t k = 0;
    for (uint32_t i = 1; i < a->len; i++) {
        while (k && a->bytes[i] != a->bytes[k]) k = a->fail[k - 1];
        if (a->bytes[i] == a->bytes[k]) k++;
        a->fail[i] = (uint16_t)k;
    }
}

struct rtr_stop *rtr_stop_new(const struct rtr_stop_string *strings, size_t n)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) bytes += strings[i].len;
    struct rtr_stop *s = calloc(1, sizeof *s + bytes * (1 + sizeof(uint16_t)));
    if (!s) return NULL;
    tow_buf_init(&s->held, 0);
    s->n = n;
    uint16_t *fail = (uint16_t *)(void *)(s + 1);
    char *copy = (char *)(fail + bytes);
    for (size_t i = 0; i < n; i++) {
        struct automaton *a = &s->a[i];
        memcpy(copy, strings[i].bytes, strings[i].len);
        a->bytes = copy;
        a->len = (uint32_t)strings[i].len;
        a->fail = fail;
        build(a);
        copy += strings[i].len;
        fail += strings[i].len;
    }
    return s;
}

void rtr_stop_free(struct rtr_stop *s)
{
    if (!s) return;
    tow_buf_fini(&s->held);
    free(s);
}

/* Gives out what stands before `to`. */
static void release(struct rtr_stop *s, uint64_t to, struct tow_buf *out)
{
    size_t n = (size_t)(to - s->held_at);
    if (!n) return;
    tow_buf_put(out, s->held.data, n);
    tow_buf_shift(&s->held, n);
    s->held_at = to;
}

bool rtr_stop_push(struct rtr_stop *s, const char *bytes, size_t n, struct tow_buf *out)
{
    if (!s->n) {
        tow_buf_put(out, bytes, n);
        return false;
    }
    tow_buf_put(&s->held, bytes, n);
    if (tow_buf_failed(&s->held)) {
        out->failed = true;
        return false;
    }
    uint64_t live = s->seen; /* earliest start that may still become an occurrence */
    for (size_t i = 0; i < n; i++) {
        s->seen++;
        live = s->seen;
        for (size_t k = 0; k < s->n; k++) {
            struct automaton *a = &s->a[k];
            while (a->state == a->len || (a->state && a->bytes[a->state] != bytes[i])) {
                a->state = a->fail[a->state - 1];
            }
            if (a->bytes[a->state] == bytes[i]) a->state++;
            uint64_t start = s->seen - a->state;
            if (a->state == a->len) {
                if (!s->found || start < s->best_start) s->best_start = start;
                s->found = true;
                uint32_t border = a->fail[a->len - 1];
                start = s->seen - border;
            }
            if (start < live) live = start;
        }
        if (s->found && live >= s->best_start) {
            release(s, s->best_start, out);
            return true;
        }
    }
    /* While found, an earlier start is live, so this holds back enough in both cases. */
    release(s, live, out);
    return false;
}

bool rtr_stop_end(struct rtr_stop *s, struct tow_buf *out)
{
    if (!s->n) return false;
    release(s, s->found ? s->best_start : s->seen, out);
    return s->found;
}
