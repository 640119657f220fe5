/* kernels/hc/hc.h - limits of the hyper-connection ops. */
#ifndef KERN_HC_HC_H
#define KERN_HC_HC_H

enum { KERN_HC_MAX = 8 }; /* streams */

#endif
