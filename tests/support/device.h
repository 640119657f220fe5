/* tests/support/device.h - whether the device that a test is to run on is there. */
#ifndef TESTS_SUPPORT_DEVICE_H
#define TESTS_SUPPORT_DEVICE_H

#include "tests/support/check.h"

#include "common/base/err.h"
#include "kernels/dev.h"

#include <stdio.h>

/* False after a line that says why not; the test then ends with 77. */
static inline bool test_device_there(const char *spec)
{
    struct kern_dev *dev = NULL;
    struct tow_err err;
    if (kern_dev_open(&dev, spec, 1, &err) < 0) {
        printf("%s\n", err.msg);
        return false;
    }
    kern_dev_close(dev);
    return true;
}

#endif
