/* worker/limits.h - what the machine must allow this process before libraries are started that take a
 * refusal for the end of the world. */
#ifndef WORK_LIMITS_H
#define WORK_LIMITS_H

struct tow_err;

/* As many threads as the transport, the engine and the control channel start: they are started, and
 * ended. TOW_ESYS says how many there were. */
int work_limits_threads(struct tow_err *err);

#endif
