/* base/fault.h - named places that can be made to fail, for tests.
 *
 *     if (tow_fault("kv.put")) return TOW_EIO;
 *
 * Why      Every error path has a place where it starts; a test makes the 1st, 2nd, 3rd ... fail
 *          until a run sees none (the torture idiom, see tests/fault/README.md).
 * Cost     Off (the default): one relaxed load and one branch that is never taken.
 * Rules    A name is a literal "area.what", not longer than 47 bytes. It stands where the real
 *          failure would be noticed, so that the caller cannot tell the difference.
 * Threads  [any thread]; arming and reading counts too.
 */
#ifndef TOW_BASE_FAULT_H
#define TOW_BASE_FAULT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct tow_buf;
struct tow_err;

extern _Atomic int tow_fault_on; /* written by the functions below only */
bool tow_fault_hit(const char *name);

/* True when this place has to fail now. */
static inline bool tow_fault(const char *name)
{
    return __builtin_expect(atomic_load_explicit(&tow_fault_on, memory_order_relaxed), 0) &&
           tow_fault_hit(name);
}

enum tow_fault_act {
    TOW_FAULT_FAIL, /* tow_fault() returns true */
    TOW_FAULT_KILL, /* the process kills itself with SIGKILL, as an out-of-memory killer would */
    TOW_FAULT_STOP, /* the process stops itself with SIGSTOP; goes on, unharmed, on SIGCONT */
    TOW_FAULT_HANG, /* the thread that came here never goes on; the others do */
};

/* The nth pass (from 1) of `name` acts, and with `always` each later one too. name "*": any place,
 * so the nth pass of all of them together. At most 16 may be armed. TOW_EINVAL, TOW_EFULL. */
int tow_fault_arm(const char *name, uint64_t nth, bool always, enum tow_fault_act act,
                  struct tow_err *err);
/* The value of --fault: "NAME=N[+][:fail|kill|stop|hang][,...]";
 * + means the Nth and all later ones. */
int tow_fault_arm_text(const char *text, struct tow_err *err);
/* Counts passes without making anything fail. */
void tow_fault_watch(void);
/* Off, with nothing armed and all counts forgotten. */
void tow_fault_reset(void);

uint64_t tow_fault_passes(const char *name); /* since the last reset, while on; "*": all together */
uint64_t tow_fault_fired(void);              /* how often a place was made to fail since then */
/* Appends one line "NAME PASSES" for each place passed. */
void tow_fault_print(struct tow_buf *out);

#endif
