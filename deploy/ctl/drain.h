/* ctl/drain.h - `towpath-ctl drain NAME`: no new work for a worker, and wait until it has gone. */
#ifndef CTL_DRAIN_H
#define CTL_DRAIN_H

int ctl_drain_main(int argc, char **argv);

#endif
