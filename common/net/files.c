/* net/files.c - see files.h. */
#include "common/net/files.h"

#include "common/base/err.h"
#include "common/base/fault.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* Above it nothing is gained, and some libraries keep a table entry for every possible
 * descriptor. */
#define MOST ((rlim_t)1 << 20)

int net_files_check(uint64_t needed, const char *why, struct tow_err *err)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) < 0)
        return tow_fail(err, TOW_EIO, "open files: %s", strerror(errno));
    if (r.rlim_cur >= needed) return 0;
    if (r.rlim_max < needed)
        return tow_fail(err, TOW_ECONFIG,
                        "open files: %llu needed (%s), the hard limit is %llu: raise it (ulimit "
                        "-Hn, LimitNOFILE= of systemd)",
                        (unsigned long long)needed, why, (unsigned long long)r.rlim_max);
    r.rlim_cur = r.rlim_max < MOST ? r.rlim_max : needed > MOST ? (rlim_t)needed : MOST;
    if (setrlimit(RLIMIT_NOFILE, &r) < 0)
        return tow_fail(err, TOW_ECONFIG, "open files: %llu needed (%s); raising the limit: %s",
                        (unsigned long long)needed, why, strerror(errno));
    return 0;
}

int net_space_check(uint64_t more, const char *why, const char *otherwise, struct tow_err *err)
{
    struct rlimit r;
    FILE *f = fopen("/proc/self/statm", "re");
    unsigned long long used_pages = 0;
    if (f) {
        if (fscanf(f, "%llu", &used_pages) != 1) used_pages = 0;
        fclose(f);
    }
    if (getrlimit(RLIMIT_AS, &r) < 0 || r.rlim_cur == RLIM_INFINITY) return 0;
    const uint64_t used = used_pages * (uint64_t)sysconf(_SC_PAGESIZE);
    if (used + more <= r.rlim_cur) return 0;
    return tow_fail(
        err, TOW_ECONFIG,
        "address space: %.0f MiB needed (%.0f in use, %s), the limit is %.0f MiB: raise "
        "it (ulimit -v, LimitAS= of systemd)%s",
        (double)(used + more) / (1 << 20), (double)used / (1 << 20), why,
        (double)r.rlim_cur / (1 << 20), otherwise);
}

int net_stack_check(struct tow_err *err)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_STACK, &r) < 0 || r.rlim_cur == RLIM_INFINITY ||
        r.rlim_cur >= NET_STACK_KIB * 1024)
        return 0;
    return tow_fail(err, TOW_ECONFIG, "stacks of %llu KiB: at least %d KiB are needed (ulimit -s)",
                    (unsigned long long)r.rlim_cur / 1024, NET_STACK_KIB);
}

/* Stays until it is let go. */
static void *wait_for_end(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

int net_threads_check(unsigned n, const char *for_what, struct tow_err *err)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t *threads = calloc(n, sizeof *threads);
    unsigned started = 0;
    int problem = threads ? 0 : ENOMEM;
    pthread_mutex_lock(&gate);
    while (started < n && problem == 0) {
        problem = tow_fault("net.thread")
                      ? EAGAIN
                      : pthread_create(&threads[started], NULL, wait_for_end, &gate);
        if (problem == 0) started++;
    }
    pthread_mutex_unlock(&gate);
    for (unsigned i = 0; i < started; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&gate);
    free(threads);
    if (started == n) return 0;
    return tow_fail(err, TOW_ESYS,
                    "%s need %u threads, %u could be started: %s (ulimit -u, memory, or the pids "
                    "limit of a container)",
                    for_what, n, started, strerror(problem));
}
