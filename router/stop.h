/* router/stop.h - finds stop strings in text that arrives piece by piece.
 *
 * Rule     Of all occurrences the one that *starts* first ends the text; the text is what stands
 *          before it. An occurrence that is complete therefore waits while one that started earlier
 *          may still become complete; if the text ends first, the complete one counts.
 * Holds    What was given out is never part of an occurrence; what is held back begins one, or has
 *          to wait for one. How the text was cut into pieces never matters.
 * Cost     One step of a matching automaton per byte and stop string.
 */
#ifndef RTR_STOP_H
#define RTR_STOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct rtr_stop;
struct tow_buf;

#define RTR_MAX_STOPS    16
#define RTR_MAX_STOP_LEN 1024 /* bytes of one */

struct rtr_stop_string {
    const char *bytes;
    size_t len; /* 1..RTR_MAX_STOP_LEN */
};

/* The strings are copied. n may be 0. NULL when memory is gone. */
struct rtr_stop *rtr_stop_new(const struct rtr_stop_string *strings, size_t n);
void rtr_stop_free(struct rtr_stop *s); /* NULL is fine */

/* Appends to *out what is certain not to be part of a stop string. True once the end was found;
 * nothing more may be pushed then. */
bool rtr_stop_push(struct rtr_stop *s, const char *bytes, size_t n, struct tow_buf *out);
/* The text is over: appends what was held back. True when a stop string had ended it. */
bool rtr_stop_end(struct rtr_stop *s, struct tow_buf *out);

#endif
