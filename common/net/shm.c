/* net/shm.c - see shm.h. */
#include "common/net/shm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/shm.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* UCX_TLS is a list of transports, or with ^ in front of those left out; `all`, `shm`, `sm` and
 * `mm` are groups that hold both kinds. */
static bool may_use(const char *kind)
{
    const char *list = getenv("UCX_TLS");
    if (!list || !*list) return true;
    bool listed_out = *list == '^', named = false;
    if (listed_out) list++;
    const char *const names[] = {kind, "all", "shm", "sm", "mm"};
    for (const char *p = list; *p; p += strcspn(p, ","), p += *p == ',') {
        size_t n = strcspn(p, ",");
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (strlen(names[i]) == n && !strncmp(p, names[i], n)) named = true;
    }
    return named != listed_out;
}

static uint64_t room_for_sysv(void)
{
    struct shminfo limits;
    struct shm_info used;
    if (shmctl(0, IPC_INFO, (struct shmid_ds *)(void *)&limits) < 0 ||
        shmctl(0, SHM_INFO, (struct shmid_ds *)(void *)&used) < 0)
        return 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), most = limits.shmmax;
    uint64_t left = limits.shmall > used.shm_tot ? limits.shmall - used.shm_tot : 0;
    return left < most / page ? left * page : most;
}

void net_shm_look(struct net_shm *out)
{
    const char *dir = getenv("UCX_POSIX_DIR");
    struct statvfs v;
    memset(out, 0, sizeof *out);
    snprintf(out->dir, sizeof out->dir, "%s", dir && *dir ? dir : "/dev/shm");
    out->posix = may_use("posix");
    out->sysv = may_use("sysv");
    if (statvfs(out->dir, &v) == 0) out->posix_free = (uint64_t)v.f_bavail * v.f_frsize;
    out->sysv_most = room_for_sysv();
}

bool net_shm_holds(const struct net_shm *s, uint64_t bytes)
{
    if (!s->posix && !s->sysv) return true;
    return (s->posix && bytes <= s->posix_free) || (s->sysv && bytes <= s->sysv_most);
}

static unsigned long long kib(uint64_t bytes)
{
    return (bytes + 1023) >> 10;
}

#define LARGER                                                                                     \
    "(mount -o remount,size=1G %s; docker run --shm-size=1g; in Kubernetes an emptyDir of medium " \
    "Memory there)"

void net_shm_explain_worker(const struct net_shm *s, char *out, size_t cap)
{
    out[0] = '\0';
    if (s->posix && s->posix_free < NET_SHM_WORKER_BYTES)
        snprintf(out, cap,
                 "%s has %llu KiB free and a worker needs %llu KiB: make it larger " LARGER
                 ", or leave it out with UCX_TLS=^posix",
                 s->dir, kib(s->posix_free), kib(NET_SHM_WORKER_BYTES), s->dir);
    else if (s->sysv && s->sysv_most < NET_SHM_WORKER_BYTES)
        snprintf(out, cap,
                 "System V shared memory has room for %llu KiB and a worker needs %llu KiB: raise "
                 "kernel.shmmax and kernel.shmall (sysctl), or leave it out with UCX_TLS=^sysv",
                 kib(s->sysv_most), kib(NET_SHM_WORKER_BYTES));
}

void net_shm_explain_pool(const struct net_shm *s, uint64_t bytes, char *out, size_t cap)
{
    char sysv[100] = "", posix[200] = "";
    if (s->sysv)
        snprintf(sysv, sizeof sysv, "System V has room for %llu KiB (kernel.shmmax, kernel.shmall)",
                 kib(s->sysv_most));
    if (s->posix) snprintf(posix, sizeof posix, "%s has %llu KiB free", s->dir, kib(s->posix_free));
    snprintf(out, cap,
             "%llu KiB fit into no shared memory: %s%s%s; processes of this host will get pages by "
             "messages, slower: make one of them larger, or the pool smaller",
             kib(bytes), sysv, s->sysv && s->posix ? ", " : "", posix);
}
