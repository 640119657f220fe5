/* ctl/status.h - `towpath-ctl status`: is the router serving, and with which workers. */
#ifndef CTL_STATUS_H
#define CTL_STATUS_H

#include <stdbool.h>

struct json;
struct tow_buf;

/* Exit status: 0 serving, 1 alive but not serving, 2 when it could not be asked. */
int ctl_status_main(int argc, char **argv);

/* The workers' list as a table: name, role, state and load; with all, whatever else the router
 * tells of them, objects inside one taken apart as "capacity.pages". */
void ctl_status_table(const struct json *workers, bool all, struct tow_buf *out);

/* One line per link: who to whom, the proof, and what rides on it or why it is refuted. */
void ctl_status_pairs(const struct json *workers, struct tow_buf *out);

/* One line for each worker that the router turns away; NULL: it does not tell. */
void ctl_status_refused(const struct json *refused, struct tow_buf *out);

#endif
