/* worker/limits.h - what the machine must allow this process before libraries are started that
 * abort it, or hang, where they are refused. */
#ifndef WORK_LIMITS_H
#define WORK_LIMITS_H

struct tow_err;

/* As many threads as the transport, the engine and the control channel start, besides those of
 * --threads: they are started, and ended. TOW_ESYS says how many there were. */
int work_limits_threads(struct tow_err *err);

#endif
