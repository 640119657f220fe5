/* net/files.h - are there file descriptors, address space, threads and stacks enough?
 *
 * Why      UCX aborts the process when it gets none, and a router that runs out turns clients away;
 *          nng hangs or crashes when a thread's stack finds no room, libuv aborts when its pool
 *          gets no thread. All are known before anything is opened.
 * Owner    Nobody; call it at start.
 */
#ifndef TOW_NET_FILES_H
#define TOW_NET_FILES_H

#include <stdint.h>

struct tow_err;

/* What processes open, counted (docs/operations.md, "Limits"): */
enum {
    NET_FILES_OWN = 48, /* standard streams, log, loop, nng, UCX and its shared memory: 27 to 31 */
    NET_FILES_PEER = 4, /* of a worker, for each peer over TCP: one seen for each direction */
    NET_FILES_STATUS = 32, /* readers of a worker's --status at once */
    /* The least size of a stack: with 72 a worker may die in UCX 1.13 when it meets a peer, with
     * 56 a router of a request with tools. Other versions may need more. */
    NET_STACK_KIB = 256
};

/* Raises the soft limit to the hard one when it is below `needed`. TOW_ECONFIG when that is too
 * little too: one line with both numbers, `why` (how `needed` comes about) and what to do. */
int net_files_check(uint64_t needed, const char *why, struct tow_err *err);

/* Do `more` bytes fit beside what is in use (ulimit -v)? TOW_ECONFIG when not: one line with both
 * numbers, `why` (what `more` is for) and what to do, or `otherwise` ("" or " or lower --x"). */
int net_space_check(uint64_t more, const char *why, const char *otherwise, struct tow_err *err);

/* Have stacks, of the main thread and all others, NET_STACK_KIB at least (ulimit -s)? TOW_ECONFIG
 * when not: one line with both numbers. */
int net_stack_check(struct tow_err *err);

/* Can n threads be had besides those that run (ulimit -u, pids of a container)? They are started,
 * and ended. TOW_ESYS says how many there were, and for_what, such as "transport and control". */
int net_threads_check(unsigned n, const char *for_what, struct tow_err *err);

#endif
