/* tests/support/device.h - whether the device that a test is to run on is there. */
#ifndef TESTS_SUPPORT_DEVICE_H
#define TESTS_SUPPORT_DEVICE_H

#include "tests/support/args.h"
#include "tests/support/check.h"

#include "common/base/err.h"
#include "kernels/dev.h"
#include "kernels/mirror.h"

#include <stdio.h>
#include <string.h>

/* What a test ends with when its device could not be opened, after a line that says why: 77
 * (skipped) where the machine has none, or the build no code for it; 2 where TOW_TEST_DEVICE is
 * wrong; 1 where the device is there and cannot be used. */
static inline int test_no_device(const struct tow_err *err)
{
    const bool wrong = err->code == TOW_EINVAL;
    printf("%s%s\n", wrong ? "TOW_TEST_DEVICE " : "", test_without_flag(err->msg));
    return wrong ? 2 : err->code == TOW_ENOENT ? 77 : 1;
}

/* TOW_TEST_PRODUCTS=fp8: whole-model tests of deployed mode run with --products fp8. */
static inline bool test_products_fp8(void)
{
    const char *p = getenv("TOW_TEST_PRODUCTS");
    if (!p || !*p || strcmp(p, "bf16") == 0) return false;
    if (strcmp(p, "fp8") == 0) return true;
    printf("TOW_TEST_PRODUCTS \"%s\": must be \"bf16\" or \"fp8\"\n", p);
    exit(2);
}

/* 0, or that; 77 also where the device does not have the products that are asked for. */
static inline int test_device_there(const char *spec)
{
    struct kern_dev *dev = NULL;
    struct tow_err err = {0};
    if (kern_dev_open(&dev, spec, 1, &err) < 0) return test_no_device(&err);
    const bool can = !test_products_fp8() || kern_dev_fp8_products(dev, true);
    if (!can) printf("%s (%s) has no products of fp8 codes\n", spec, kern_dev_isa(dev));
    kern_dev_fp8_products(dev, false);
    kern_dev_close(dev);
    return can ? 0 : 77;
}

/* Device memory full of 0xff: nothing in fresh pages or tails may matter. Freed by
 * kern_dev_free(). */
static inline uint8_t *test_poisoned(struct kern_dev *dev, size_t bytes)
{
    void *ff = malloc(bytes);
    uint8_t *p = kern_dev_alloc(dev, bytes);
    if (!ff || !p) abort();
    memset(ff, 0xff, bytes);
    if (kern_stream_write(kern_dev_stream(dev), p, ff, bytes) < 0) abort();
    free(ff);
    return p;
}

/* The device for tests that give ops host memory: the CPU, or a mirror of TOW_TEST_DEVICE. */
static inline bool test_is_mirrored(void)
{
    return strcmp(test_device(), "cpu") != 0;
}
static inline int test_open_mirrored(struct kern_dev **out, int n_threads, struct tow_err *err)
{
    char spec[64];
    const char *d = test_device();
    const bool as_it_is = !test_is_mirrored() || strncmp(d, "mirror:", 7) == 0;
    snprintf(spec, sizeof spec, "%s%s", as_it_is ? "" : "mirror:", d);
    return kern_dev_open(out, spec, n_threads, err);
}
/* A page pool that an op is about to be given; and before memory is freed, or weights change. */
static inline void test_know(struct kern_dev *dev, const void *pool, size_t bytes)
{
    if (test_is_mirrored()) kern_mirror_know(dev, pool, bytes);
}
static inline void test_forget(struct kern_dev *dev)
{
    if (test_is_mirrored()) kern_mirror_forget(dev);
}

#endif
