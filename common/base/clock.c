/* base/clock.c - see clock.h. */
#include "common/base/clock.h"

#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

uint64_t tow_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t tow_wall_s(void)
{
    return (uint64_t)time(NULL);
}

uint64_t tow_random_u64(void)
{
    uint64_t v = 0;
    while (v == 0)
        if (getrandom(&v, sizeof v, 0) != (ssize_t)sizeof v) v = 0;
    return v;
}
