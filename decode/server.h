/* decode/server.h - the decode role: performs what decode/sched.c decides. */
#ifndef DEC_SERVER_H
#define DEC_SERVER_H

#include "common/worker/worker.h"

extern const struct work_role dec_role;

#endif
