/* base/clock.h - monotonic time and random bits. [any thread] */
#ifndef TOW_BASE_CLOCK_H
#define TOW_BASE_CLOCK_H

#include <stdint.h>

uint64_t tow_now_ns(void); /* CLOCK_MONOTONIC */
static inline uint64_t tow_now_us(void)
{
    return tow_now_ns() / 1000u;
}
static inline uint64_t tow_now_ms(void)
{
    return tow_now_ns() / 1000000u;
}
uint64_t tow_wall_s(void); /* seconds since 1970 */

/* 64 bits from the kernel; never 0. Used for tickets and incarnations. */
uint64_t tow_random_u64(void);

#endif
