/* net/sdnotify.c - a thin cover over sd_notify(3), so that nothing else knows libsystemd. */
#include "common/net/sdnotify.h"

#ifdef TOW_HAVE_SYSTEMD

#include <systemd/sd-daemon.h>

enum { STATUS_BYTES = 200 };

/* status comes first on its line: a line end in it would start another assignment,
 * so it is cut there. */
static int status_len(const char *status)
{
    int n = 0;
    while (n < STATUS_BYTES && status[n] && status[n] != '\n') n++;
    return n;
}

void net_sd_ready(const char *status)
{
    sd_notifyf(0, "READY=1\nSTATUS=%.*s", status_len(status), status);
}

void net_sd_status(const char *status)
{
    sd_notifyf(0, "STATUS=%.*s", status_len(status), status);
}

void net_sd_stopping(const char *status)
{
    sd_notifyf(0, "STOPPING=1\nSTATUS=%.*s", status_len(status), status);
}

void net_sd_watchdog(void)
{
    sd_notify(0, "WATCHDOG=1");
}

uint64_t net_sd_watchdog_ms(void)
{
    uint64_t us = 0;
    if (sd_watchdog_enabled(0, &us) <= 0) return 0;
    return us / 2000 ? us / 2000 : 1;
}

#else

void net_sd_ready(const char *status)
{
    (void)status;
}

void net_sd_status(const char *status)
{
    (void)status;
}

void net_sd_stopping(const char *status)
{
    (void)status;
}

void net_sd_watchdog(void) {}

uint64_t net_sd_watchdog_ms(void)
{
    return 0;
}

#endif
