/* Tests of kernels/pages.h on host memory: the digest is the transport's, and bytes go where they
 * should. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/base/hash.h"
#include "kernels/dev.h"
#include "kernels/pages.h"

#include <string.h>

enum { N = 6, MOST = 40960 };
static _Alignas(64) uint8_t pool[N * MOST], other[N * MOST], packed[N * MOST];
static const int64_t sizes[] = {1024, 2048, 4096, 36864, 40960};

static void fill(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++, seed = seed * UINT64_C(6364136223846793005) + 1)
        p[i] = (uint8_t)(seed >> 56);
}

static struct kern_stream *stream_of(const char *spec, struct kern_dev **dev)
{
    struct tow_err err = {0};
    if (kern_dev_open(dev, spec, 1, &err) < 0) fail_msg("%s", err.msg);
    return kern_dev_stream(*dev);
}

static void test_pages__digest_is_that_of_the_transport(void **state)
{
    struct kern_dev *dev;
    struct kern_stream *s = stream_of("cpu", &dev);
    (void)state;
    fill(pool, sizeof pool, 1);
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const uint32_t ids[] = {3, 0, 5};
        uint64_t digests[N] = {0};
        const struct kern_pages p = {
            .pool = pool, .ids = ids, .n = 3, .page_bytes = sizes[k], .digests = digests};
        assert_int_equal(kern_stream_pages(s, &p), 0);
        for (uint32_t i = 0; i < N; i++)
            assert_true(digests[i] == (i == 3 || i == 0 || i == 5
                                           ? tow_hash64(pool + i * sizes[k], (size_t)sizes[k])
                                           : 0));
    }
    kern_dev_close(dev);
}

static void test_pages__packed_and_unpacked_elsewhere_are_the_same(void **state)
{
    struct kern_dev *dev;
    struct kern_stream *s = stream_of("cpu", &dev);
    const uint32_t from[] = {4, 1, 2}, to[] = {0, 5, 3};
    uint64_t a[N], b[N];
    (void)state;
    fill(pool, sizeof pool, 2);
    memset(other, 0x5a, sizeof other);
    struct kern_pages p = {
        .pool = pool, .ids = from, .n = 3, .page_bytes = 4096, .packed = packed, .digests = a};
    assert_int_equal(kern_stream_pages(s, &p), 0);
    p.pool = other, p.ids = to, p.unpack = true, p.digests = b;
    assert_int_equal(kern_stream_pages(s, &p), 0);
    for (int i = 0; i < 3; i++) {
        assert_memory_equal(packed + i * 4096, pool + from[i] * 4096, 4096);
        assert_memory_equal(other + to[i] * 4096, pool + from[i] * 4096, 4096);
        assert_true(a[from[i]] == b[to[i]]);
    }
    for (int i = 0; i < 4096; i++) assert_int_equal(other[4 * 4096 + i], 0x5a);
    kern_dev_close(dev);
}

static void test_pages__broken_shapes_are_refused(void **state)
{
    struct kern_dev *dev;
    struct kern_stream *s = stream_of("cpu", &dev);
    const uint32_t id = 0;
    uint64_t digest;
    const struct kern_pages good = {
        .pool = pool, .ids = &id, .n = 1, .page_bytes = 1024, .digests = &digest};
    (void)state;
    struct kern_pages p = good;
    p.page_bytes = 1000;
    assert_int_equal(kern_stream_pages(s, &p), TOW_EINVAL);
    p = good, p.digests = NULL;
    assert_int_equal(kern_stream_pages(s, &p), TOW_EINVAL);
    p = good, p.unpack = true;
    assert_int_equal(kern_stream_pages(s, &p), TOW_EINVAL);
    p = good, p.pool++;
    assert_int_equal(kern_stream_pages(s, &p), TOW_EINVAL);
    p = good, p.n = -1;
    assert_int_equal(kern_stream_pages(s, &p), TOW_EINVAL);
    p = good, p.n = 0, p.pool = NULL;
    assert_int_equal(kern_stream_pages(s, &p), 0);
    kern_dev_close(dev);
}

/* Where device memory is host memory there is nothing to copy beside anything. */
static void test_stream__a_second_one_needs_memory_apart(void **state)
{
    struct kern_dev *dev;
    struct kern_stream *second;
    struct tow_err err = {0};
    (void)state;
    stream_of("cpu", &dev);
    assert_int_equal(kern_stream_open(&second, dev, &err), TOW_EINVAL);
    assert_int_equal(kern_dev_seal(dev), 0);
    kern_dev_close(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages__digest_is_that_of_the_transport),
        cmocka_unit_test(test_pages__packed_and_unpacked_elsewhere_are_the_same),
        cmocka_unit_test(test_pages__broken_shapes_are_refused),
        cmocka_unit_test(test_stream__a_second_one_needs_memory_apart)};
    return cmocka_run_group_tests_name("kernels/pages", tests, NULL, NULL);
}
