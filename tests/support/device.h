/* tests/support/device.h - whether the device that a test is to run on is there. */
#ifndef TESTS_SUPPORT_DEVICE_H
#define TESTS_SUPPORT_DEVICE_H

#include "tests/support/check.h"

#include "common/base/err.h"
#include "kernels/dev.h"

#include <stdio.h>

/* What a test ends with when its device could not be opened, after a line that says why: 77 (skipped)
 * where there is none, or no code for it; 1 where it is there and cannot be used. */
static inline int test_no_device(const struct tow_err *err)
{
    printf("%s\n", err->msg);
    return err->code == TOW_EINVAL ? 77 : 1;
}

/* 0, or that. */
static inline int test_device_there(const char *spec)
{
    struct kern_dev *dev = NULL;
    struct tow_err err = {0};
    if (kern_dev_open(&dev, spec, 1, &err) < 0) return test_no_device(&err);
    kern_dev_close(dev);
    return 0;
}

#endif
