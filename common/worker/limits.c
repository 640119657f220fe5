/* worker/limits.c - see limits.h. */
#include "common/worker/limits.h"

#include "common/base/err.h"
#include "common/base/fault.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    MIN_STACK_KIB = 64,
    OURS = 3,       /* transfer, engine, UCX's own */
    NNG_FIXED = 9,  /* resolvers, timers, poller, reaper */
    NNG_TASKS = 16, /* at most, of two a core */
    MAX_THREADS = OURS + NNG_FIXED + NNG_TASKS
};

int work_limits_stack(struct tow_err *err)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_STACK, &r) < 0 || r.rlim_cur == RLIM_INFINITY ||
        r.rlim_cur >= MIN_STACK_KIB * 1024)
        return 0;
    return tow_fail(err, TOW_ECONFIG, "stacks of %llu KiB: at least %d KiB are needed (ulimit -s)",
                    (unsigned long long)r.rlim_cur / 1024, MIN_STACK_KIB);
}

/* Stays until it is let go. */
static void *wait_for_end(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

int work_limits_threads(struct tow_err *err)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t threads[MAX_THREADS];
    const long tasks = 2 * sysconf(_SC_NPROCESSORS_ONLN);
    const int n = OURS + NNG_FIXED + (int)(tasks < NNG_TASKS ? tasks : NNG_TASKS);
    int started = 0, problem = 0;
    pthread_mutex_lock(&gate);
    while (started < n && problem == 0) {
        problem = tow_fault("worker.thread")
                      ? EAGAIN
                      : pthread_create(&threads[started], NULL, wait_for_end, &gate);
        if (problem == 0) started++;
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&gate);
    if (started == n) return 0;
    return tow_fail(err, TOW_ESYS,
                    "transport and control need %d threads, %d could be started: %s (ulimit -u, "
                    "memory, or the pids limit of a container)",
                    n, started, strerror(problem));
}
