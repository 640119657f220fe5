/* prefill/server.h - the prefill role: performs what prefill/sched.c decides. */
#ifndef PRE_SERVER_H
#define PRE_SERVER_H

#include "common/worker/worker.h"

extern const struct work_role pre_role;

#endif
