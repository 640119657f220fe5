/* tests/gpu/pages_test.c - pages gathered, scattered and digested on the device; copies beside its
 * work; the memory it may take. TOW_TEST_DEVICE (cuda:0) is the device; exit 77 where there is
 * none.
 */
#include "tests/support/device.h"

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "kernels/pages.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

static struct kern_dev *dev;
static struct kern_stream *s;

static const char *spec(void)
{
    return strcmp(test_device(), "cpu") == 0 ? "cuda:0" : test_device();
}

static uint64_t rng = 0x9e3779b97f4a7c15u;
static uint64_t next(void)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return rng;
}
static void fill(uint8_t *p, size_t n)
{
    for (size_t i = 0; i + 8 <= n; i += 8) {
        const uint64_t x = next() * UINT64_C(0x2545f4914f6cdd1d);
        memcpy(p + i, &x, 8);
    }
}
static void *host(size_t bytes)
{
    void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!p) abort();
    return p;
}
static uint8_t *device(size_t bytes)
{
    uint8_t *p = kern_dev_alloc(dev, bytes);
    if (!p) fail_msg("no device memory for %zu bytes", bytes);
    return p;
}
static void write_dev(void *to, const void *from, size_t n)
{
    assert_int_equal(kern_stream_write(s, to, from, n), 0);
}
static void read_dev(void *to, const void *from, size_t n)
{
    assert_int_equal(kern_stream_read(s, to, from, n), 0);
}

/* n of the pool's pages, none twice, in no order. */
static void pick(uint32_t *ids, int32_t n, uint32_t pool)
{
    uint32_t *all = malloc(pool * sizeof *all);
    for (uint32_t i = 0; i < pool; i++) all[i] = i;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t k = (uint32_t)i + (uint32_t)(next() >> 33) % (pool - (uint32_t)i);
        ids[i] = all[k];
        all[k] = all[i];
    }
    free(all);
}

/* Sizes of a stripe's and a launch's edges; the last is a page of a V4-Flash model. */
static void test_pages__move_and_digest_as_the_twin_does(void **state)
{
    static const struct {
        int64_t bytes;
        int32_t n, pool;
    } cases[] = {{1024, 1, 1},      {1024, 5, 9},     {2048, 3, 4},
                 {4096, 129, 150},  {32768, 7, 16},   {33792, 128, 200},
                 {36864, 300, 301}, {1009664, 9, 24}, {12582912, 1, 3}};
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int64_t bytes = cases[c].bytes;
        const int32_t n = cases[c].n;
        const size_t pool = (size_t)(cases[c].pool * bytes), list = (size_t)(n * bytes);
        const size_t marks = (size_t)cases[c].pool * sizeof(uint64_t);
        uint8_t *pages = host(pool), *got = host(pool), *packed = host(list), *want = host(pool);
        uint64_t *digests = host(marks), *twin = host(marks), *no_move = host(marks);
        uint8_t *dev_pages = device(pool), *dev_packed = device(list);
        uint64_t *dev_digests = (uint64_t *)(void *)device(marks);
        uint32_t *ids = malloc((size_t)n * sizeof *ids), *to = malloc((size_t)n * sizeof *to);
        fill(pages, pool);
        pick(ids, n, (uint32_t)cases[c].pool);
        pick(to, n, (uint32_t)cases[c].pool);
        write_dev(dev_pages, pages, pool);
        struct kern_pages p = {.pool = dev_pages,
                               .ids = ids,
                               .n = n,
                               .page_bytes = bytes,
                               .packed = dev_packed,
                               .digests = dev_digests};
        assert_int_equal(kern_stream_pages(s, &p), 0);
        read_dev(packed, dev_packed, list);
        read_dev(digests, dev_digests, marks);
        for (int32_t i = 0; i < n; i++) {
            const uint8_t *page = pages + ids[i] * bytes;
            assert_memory_equal(packed + i * bytes, page, (size_t)bytes);
            if (digests[ids[i]] != tow_hash64(page, (size_t)bytes))
                fail_msg("%d pages of %lld: digest of page %u is %016llx, not %016llx", n,
                         (long long)bytes, ids[i], (unsigned long long)digests[ids[i]],
                         (unsigned long long)tow_hash64(page, (size_t)bytes));
        }
        /* The same without moving, and only moving. */
        p.packed = NULL;
        assert_int_equal(kern_stream_pages(s, &p), 0);
        read_dev(no_move, dev_digests, marks);
        assert_memory_equal(no_move, digests, marks);
        memset(want, 0x5a, pool);
        write_dev(dev_pages, want, pool);
        p.packed = dev_packed, p.unpack = true, p.ids = to, p.digests = NULL;
        assert_int_equal(kern_stream_pages(s, &p), 0);
        read_dev(got, dev_pages, pool);
        p.pool = want, p.packed = packed, p.digests = twin;
        assert_int_equal(kern_pages_cpu(&p), 0);
        assert_memory_equal(got, want, pool);
        for (int32_t i = 0; i < n; i++) assert_true(twin[to[i]] == digests[ids[i]]);
        free(pages), free(got), free(packed), free(want), free(digests), free(twin), free(no_move);
        free(ids), free(to);
        kern_dev_free(dev, dev_pages);
        kern_dev_free(dev, dev_packed);
        kern_dev_free(dev, dev_digests);
    }
}

static void test_pages__offsets_beyond_2_32_are_right(void **state)
{
    enum { PAGE = 1 << 20, POOL = 4200 };
    const uint32_t ids[] = {4199, 1, 4097};
    uint8_t *pages = host(3 * PAGE), *got = host(3 * PAGE);
    (void)state;
    uint8_t *pool = kern_dev_alloc(dev, (size_t)POOL * PAGE), *packed = device(3 * PAGE);
    if (!pool) skip();
    fill(pages, 3 * PAGE);
    for (int i = 0; i < 3; i++) write_dev(pool + (size_t)ids[i] * PAGE, pages + i * PAGE, PAGE);
    const struct kern_pages p = {
        .pool = pool, .ids = ids, .n = 3, .page_bytes = PAGE, .packed = packed};
    assert_int_equal(kern_stream_pages(s, &p), 0);
    read_dev(got, packed, 3 * PAGE);
    assert_memory_equal(got, pages, 3 * PAGE);
    kern_dev_free(dev, pool);
    kern_dev_free(dev, packed);
    free(pages), free(got);
}

struct landing {
    _Atomic bool there;
    const uint8_t *byte; /* of what should be there before on_landed() is called */
    uint8_t seen;
    pthread_t thread;
};
static void on_landed(void *arg)
{
    struct landing *l = arg;
    l->seen = *l->byte;
    l->thread = pthread_self();
    atomic_store(&l->there, true);
}
static void wait_for(struct landing *l)
{
    const uint64_t t0 = tow_now_ms();
    while (!atomic_load(&l->there))
        if (tow_now_ms() > t0 + test_limit_ms(10000)) fail_msg("nothing has landed in 10 s");
}

/* Shared memory, as the transport has it: pinned, then not. */
static void test_copies__go_both_ways_and_tell(void **state)
{
    enum { N = 24 << 20 };
    struct tow_err err = {0};
    struct kern_stream *second;
    (void)state;
    uint8_t *area = mmap(NULL, N, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint8_t *mem = device(N), *copy = host(N);
    assert_true(area != MAP_FAILED);
    if (kern_stream_open(&second, dev, &err) < 0) fail_msg("%s", err.msg);
    for (int pinned = 1; pinned >= 0; pinned--) {
        if (pinned && kern_dev_pin(dev, area, N, &err) < 0) fail_msg("%s", err.msg);
        fill(area, N);
        memcpy(copy, area, N);
        assert_int_equal(kern_stream_put(second, mem, area, N), 0);
        assert_int_equal(kern_stream_await(s, second), 0);
        /* The first stream finds all of it, and changes it. */
        const uint32_t id = 0;
        uint64_t *digest = (uint64_t *)(void *)device(8), seen = 0;
        const struct kern_pages p = {
            .pool = mem, .ids = &id, .n = 1, .page_bytes = N, .digests = digest};
        assert_int_equal(kern_stream_pages(s, &p), 0);
        read_dev(&seen, digest, sizeof seen);
        assert_true(seen == tow_hash64(copy, N));
        kern_dev_free(dev, digest);
        memset(area, 0, N);
        struct landing l = {.byte = area + N - 1};
        assert_int_equal(kern_stream_get(second, area, mem, N), 0);
        assert_int_equal(kern_stream_tell(second, on_landed, &l), 0);
        wait_for(&l);
        assert_int_equal(l.seen, copy[N - 1]);
        assert_memory_equal(area, copy, N);
        if (pinned) kern_dev_unpin(dev, area);
    }
    kern_stream_close(second);
    kern_dev_free(dev, mem);
    munmap(area, N);
    free(copy);
}

/* Digests may go to pinned host memory; memory that cannot be pinned is refused with a reason, and
 * what was never pinned may be let go. */
static void test_pin__lends_memory_to_ops_or_says_why_not(void **state)
{
    enum { PAGE = 4096, N = 8 };
    const uint32_t ids[] = {7, 0, 3};
    struct tow_err err = {0};
    uint64_t *digests = host(4096);
    uint8_t *pages = host(N * PAGE), *pool = device(N * PAGE);
    (void)state;
    fill(pages, N * PAGE);
    write_dev(pool, pages, N * PAGE);
    memset(digests, 0, 4096);
    if (kern_dev_pin(dev, digests, 4096, &err) < 0) fail_msg("%s", err.msg);
    const struct kern_pages p = {
        .pool = pool, .ids = ids, .n = 3, .page_bytes = PAGE, .digests = digests};
    assert_int_equal(kern_stream_pages(s, &p), 0);
    assert_int_equal(kern_stream_sync(s), 0);
    for (int i = 0; i < N; i++)
        assert_true(digests[i] ==
                    (i == 7 || i == 0 || i == 3 ? tow_hash64(pages + i * PAGE, PAGE) : 0));
    if (strncmp(spec(), "cuda:", 5) == 0) {
        err = (struct tow_err){0};
        assert_int_equal(kern_dev_pin(dev, (void *)(uintptr_t)0x10000, 4096, &err), TOW_EDEVICE);
        assert_true(strstr(err.msg, "cannot be pinned") != NULL);
        kern_dev_unpin(dev, pages);
    }
    assert_int_equal(kern_stream_pages(s, &p), 0); /* the stream is whole */
    assert_int_equal(kern_stream_sync(s), 0);
    kern_dev_unpin(dev, digests);
    kern_dev_free(dev, pool);
    free(digests), free(pages);
}

/* After the seal an op that needs more than any before is refused, in words, and only that pass
 * ends. */
static void test_seal__refuses_growth_and_goes_on(void **state)
{
    enum { PAGE = 8 << 20 };
    const uint32_t id = 0;
    struct tow_err err = {0};
    struct kern_dev *own;
    (void)state;
    if (strncmp(spec(), "cuda:", 5) != 0) skip();
    if (kern_dev_open(&own, spec(), 1, &err) < 0) fail_msg("%s", err.msg);
    struct kern_stream *t = kern_dev_stream(own);
    uint8_t *pool = kern_dev_alloc(own, PAGE);
    uint64_t *digest = kern_dev_alloc(own, 8);
    assert_true(pool && digest);
    struct kern_pages p = {
        .pool = pool, .ids = &id, .n = 1, .page_bytes = PAGE / 4, .digests = digest};
    assert_int_equal(kern_stream_pages(t, &p), 0);
    assert_int_equal(kern_dev_seal(own), 0);
    const uint64_t before = kern_dev_free_bytes(own);
    p.page_bytes = PAGE;
    assert_int_equal(kern_stream_pages(t, &p), TOW_ENOMEM);
    print_message("%s\n", kern_dev_why(own));
    assert_true(strstr(kern_dev_why(own), "planned at start") != NULL);
    assert_int_equal(kern_stream_batch(t, NULL, 0), 0); /* the pass ends */
    p.page_bytes = PAGE / 4;
    assert_int_equal(kern_stream_pages(t, &p), 0);
    assert_int_equal(kern_stream_sync(t), 0);
    assert_int_equal(kern_dev_free_bytes(own), before);
    kern_dev_free(own, pool);
    kern_dev_free(own, digest);
    kern_dev_close(own);
}

int main(int argc, char **argv)
{
    struct tow_err err = {0};
    if (kern_dev_open(&dev, spec(), 1, &err) < 0) return test_no_device(&err);
    s = kern_dev_stream(dev);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages__move_and_digest_as_the_twin_does),
        cmocka_unit_test(test_pages__offsets_beyond_2_32_are_right),
        cmocka_unit_test(test_copies__go_both_ways_and_tell),
        cmocka_unit_test(test_pin__lends_memory_to_ops_or_says_why_not),
        cmocka_unit_test(test_seal__refuses_growth_and_goes_on)};
    TEST_CHOOSE(argc, argv, tests);
    const int failed = cmocka_run_group_tests_name("gpu/pages", tests, NULL, NULL);
    kern_dev_close(dev);
    return failed;
}
