/* worker/limits.c - see limits.h. */
#include "common/worker/limits.h"

#include "common/net/files.h"

#include <unistd.h>

enum {
    OURS = 3,      /* transfer, engine, UCX's own */
    NNG_FIXED = 9, /* resolvers, timers, poller, reaper */
    NNG_TASKS = 16 /* at most, of two a core */
};

int work_limits_threads(struct tow_err *err)
{
    const long tasks = 2 * sysconf(_SC_NPROCESSORS_ONLN);
    return net_threads_check(OURS + NNG_FIXED + (unsigned)(tasks < NNG_TASKS ? tasks : NNG_TASKS),
                             "transport and control", err);
}
