/* net/sdnotify.h - telling systemd how we are: READY, STATUS, WATCHDOG, STOPPING.
 *
 * Rules    All calls do nothing when NOTIFY_SOCKET is unset or the build has no libsystemd.
 * Threads  Owner: the control thread, so that a stuck loop stops feeding the watchdog.
 */
#ifndef TOW_NET_SDNOTIFY_H
#define TOW_NET_SDNOTIFY_H

#include <stdint.h>

void net_sd_ready(const char *status);    /* start-up is done; status as in net_sd_status() */
void net_sd_status(const char *status);   /* one line for `systemctl status`; cut at 200 bytes */
void net_sd_stopping(const char *status); /* draining has begun */
void net_sd_watchdog(void);               /* alive: call from a timer at the interval below */

/* How often to call net_sd_watchdog(): half of WatchdogSec. 0: systemd does not watch us. */
uint64_t net_sd_watchdog_ms(void);

#endif
