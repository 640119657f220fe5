/* net/shm.h - how much shared memory the system grants, for a clear word when UCX finds too little.
 *
 * Why      UCX says which call failed, not what to do about it; and a pool that fits into no shared
 *          memory is quietly made of private memory, which no neighbour can read.
 * Owner    Nobody; it looks and remembers nothing.
 */
#ifndef TOW_NET_SHM_H
#define TOW_NET_SHM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a UCX worker takes of each kind it uses: receive buffers of 512 * 8256 bytes, and queues. */
#define NET_SHM_WORKER_BYTES ((uint64_t)4500 << 10)

struct net_shm {
    bool posix, sysv; /* UCX_TLS lets UCX use it */
    char dir[128];    /* where POSIX shared memory lies */
    uint64_t posix_free;
    uint64_t sysv_most; /* the largest System V segment there is room for */
};

void net_shm_look(struct net_shm *out);
/* A segment of so many bytes can be had of one kind or the other; true if none is to be used. */
bool net_shm_holds(const struct net_shm *s, uint64_t bytes);
/* What there is less of than a worker needs, and what to do; "" if nothing is short. */
void net_shm_explain_worker(const struct net_shm *s, char *out, size_t cap);
/* Why `bytes` of pool are held by nothing, and what to do. */
void net_shm_explain_pool(const struct net_shm *s, uint64_t bytes, char *out, size_t cap);

#endif
