/* Tests of common/worker/cache.h on a device with memory of its own: "apart:cpu", whose copies
 * begin later than they are asked for, or TOW_TEST_DEVICE. */
#include "tests/support/device.h"

#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/hash.h"
#include "common/worker/cache.h"

#include <pthread.h>
#include <string.h>

enum { PAGES = 12, TAILS = 3 };

struct world {
    struct kern_dev *dev;
    struct kern_kv_layout layout;
    struct work_cache *cache;
    uint8_t *pages, *tails; /* the host's */
    pthread_mutex_t lock;
    pthread_cond_t woken;
    int wakes;
};

static const char *spec(void)
{
    return strcmp(test_device(), "cpu") == 0 ? "apart:cpu" : test_device();
}

static void wake(void *arg)
{
    struct world *w = arg;
    pthread_mutex_lock(&w->lock);
    w->wakes++;
    pthread_cond_broadcast(&w->woken);
    pthread_mutex_unlock(&w->lock);
}
static void wait_landed(struct world *w, uint64_t number)
{
    pthread_mutex_lock(&w->lock);
    while (work_cache_landed(w->cache) < number) pthread_cond_wait(&w->woken, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

static uint8_t byte_of(int seed, size_t i)
{
    return (uint8_t)(((i + 1) * 2654435761u >> 13) + (unsigned)seed * 37);
}
static void fill(uint8_t *p, size_t n, int seed)
{
    for (size_t i = 0; i < n; i++) p[i] = byte_of(seed, i);
}

static uint8_t *zeros(size_t bytes)
{
    uint8_t *p = aligned_alloc(4096, bytes);
    if (!p) abort();
    return memset(p, 0, bytes);
}

static void open_world(struct world *w, const char *device)
{
    struct tow_err err = {0};
    const struct kern_kv_spec sp = {.n_layers = 3,
                                    .ratios = {0, 4, 128},
                                    .head_dim = 128,
                                    .rope_dim = 64,
                                    .window = 128,
                                    .index_dim = 128,
                                    .kv_fmt = KERN_KV_FP8,
                                    .ik_fmt = KERN_IK_FP4};
    memset(w, 0, sizeof *w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->woken, NULL);
    if (kern_dev_open(&w->dev, device, 1, &err) < 0) fail_msg("%s", err.msg);
    assert_int_equal(kern_kv_layout_init(&w->layout, &sp, &err), 0);
    w->pages = zeros(PAGES * (size_t)w->layout.page_bytes);
    w->tails = zeros(TAILS * (size_t)w->layout.tail_bytes);
    const struct work_cache_config c = {.name = "test",
                                        .dev = w->dev,
                                        .layout = &w->layout,
                                        .host_pages = w->pages,
                                        .host_tails = w->tails,
                                        .n_pages = PAGES,
                                        .n_tails = TAILS,
                                        .wake = wake,
                                        .wake_arg = w};
    if (work_cache_open(&w->cache, &c, &err) < 0) fail_msg("%s", err.msg);
}
static void close_world(struct world *w)
{
    work_cache_close(w->cache);
    kern_dev_close(w->dev);
    free(w->pages);
    free(w->tails);
    pthread_cond_destroy(&w->woken);
    pthread_mutex_destroy(&w->lock);
}

/* Seed's bytes into a page of the device, by the stream of passes. */
static void write_page(struct world *w, uint32_t id, int seed)
{
    const size_t n = (size_t)w->layout.page_bytes;
    uint8_t *bytes = malloc(n);
    fill(bytes, n, seed);
    assert_int_equal(
        kern_stream_write(kern_dev_stream(w->dev), work_cache_pages(w->cache) + id * n, bytes, n),
        0);
    assert_int_equal(kern_stream_sync(kern_dev_stream(w->dev)), 0);
    free(bytes);
}
static bool is(const uint8_t *p, size_t n, int seed)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != byte_of(seed, i)) return false;
    return true;
}

static void out_lands(void)
{
    struct world w;
    const uint32_t ids[] = {2, 3, 4, 9, 0}; /* a run, and two alone */
    uint64_t number = 0;
    open_world(&w, spec());
    const size_t n = (size_t)w.layout.page_bytes, tail = (size_t)w.layout.tail_bytes;
    for (uint32_t i = 0; i < PAGES; i++) write_page(&w, i, 100 + (int)i);
    uint8_t *host_tail = w.tails + tail, *bytes = malloc(tail);
    fill(bytes, tail, 7);
    assert_int_equal(
        kern_stream_write(kern_dev_stream(w.dev), work_cache_tail(w.cache, host_tail), bytes, tail),
        0);
    assert_int_equal(kern_stream_sync(kern_dev_stream(w.dev)), 0);
    free(bytes);
    const struct work_cache_parts p = {.ids = ids, .n = 5, .tail = host_tail};
    assert_int_equal(work_cache_out(w.cache, &p, &number), 0);
    assert_int_equal(number, 1);
    wait_landed(&w, number);
    for (uint32_t i = 0; i < PAGES; i++) {
        const bool sent = i == 0 || (i >= 2 && i <= 4) || i == 9;
        if (!sent) {
            for (size_t k = 0; k < n; k++) assert_int_equal(w.pages[i * n + k], 0);
            continue;
        }
        assert_true(is(w.pages + i * n, n, 100 + (int)i));
        assert_true(work_cache_page_digest(w.cache, i) == tow_hash64(w.pages + i * n, n));
    }
    assert_true(is(host_tail, tail, 7));
    assert_true(work_cache_tail_digest(w.cache, host_tail) == tow_hash64(host_tail, tail));
    assert_true(w.wakes > 0);
    close_world(&w);
}

static void test_cache__out_lands_with_digests_and_leaves_others_alone(void **state)
{
    (void)state;
    out_lands();
}
/* Where the system lends no pinned memory, the device's digests take another way. */
static void test_cache__out_lands_the_same_where_nothing_can_be_pinned(void **state)
{
    (void)state;
    assert_int_equal(tow_fault_arm("cache.pin", 1, true, TOW_FAULT_FAIL, NULL), 0);
    out_lands();
    assert_true(tow_fault_fired() > 0);
    tow_fault_reset();
}

/* A page that goes to one owner after the other ends with the last one's bytes, and is counted each
 * time. */
static void test_cache__copies_land_in_order(void **state)
{
    struct world w;
    const uint32_t id = 5;
    const struct work_cache_parts p = {.ids = &id, .n = 1};
    uint64_t number = 0;
    (void)state;
    open_world(&w, spec());
    for (int round = 1; round <= 20; round++) {
        write_page(&w, id, round);
        assert_int_equal(work_cache_out(w.cache, &p, &number), 0);
        assert_int_equal(number, round);
        assert_int_equal(work_cache_await(w.cache), 0); /* the next owner's pass */
    }
    wait_landed(&w, number);
    assert_true(is(w.pages + id * w.layout.page_bytes, (size_t)w.layout.page_bytes, 20));
    close_world(&w);
}

static void test_cache__a_pass_that_awaits_finds_what_came_in(void **state)
{
    struct world w;
    const uint32_t ids[] = {1, 7, 8};
    (void)state;
    open_world(&w, spec());
    const size_t n = (size_t)w.layout.page_bytes, tail = (size_t)w.layout.tail_bytes;
    struct kern_stream *s = kern_dev_stream(w.dev);
    uint8_t *got = malloc(n > tail ? n : tail);
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 3; i++) fill(w.pages + ids[i] * n, n, round * 3 + i);
        fill(w.tails + 2 * tail, tail, round);
        const struct work_cache_parts p = {.ids = ids, .n = 3, .tail = w.tails + 2 * tail};
        assert_int_equal(work_cache_in(w.cache, &p), 0);
        assert_int_equal(work_cache_await(w.cache), 0);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(kern_stream_read(s, got, work_cache_pages(w.cache) + ids[i] * n, n),
                             0);
            assert_true(is(got, n, round * 3 + i));
        }
        assert_int_equal(kern_stream_read(s, got, work_cache_tails(w.cache) + 2 * tail, tail), 0);
        assert_true(is(got, tail, round));
    }
    free(got);
    close_world(&w);
}

/* Where the memory is the same, all is there at once, with the digests of what was finished. */
static void test_cache__nothing_moves_where_memory_is_the_hosts(void **state)
{
    struct world w;
    const uint32_t ids[] = {3, 7};
    uint64_t number = 1;
    (void)state;
    open_world(&w, "cpu");
    const size_t n = (size_t)w.layout.page_bytes, tail = (size_t)w.layout.tail_bytes;
    uint8_t *own_tail = w.tails + tail;
    const struct work_cache_parts p = {.ids = ids, .n = 2, .tail = own_tail};
    for (uint32_t i = 0; i < PAGES; i++) write_page(&w, i, 40 + (int)i);
    fill(own_tail, tail, 8);
    assert_true(work_cache_pages(w.cache) == w.pages && work_cache_tails(w.cache) == w.tails);
    work_cache_finish(w.cache, &p);
    assert_int_equal(work_cache_out(w.cache, &p, &number), 0);
    assert_int_equal(number, 0);
    for (int i = 0; i < 2; i++)
        assert_true(work_cache_page_digest(w.cache, ids[i]) == tow_hash64(w.pages + ids[i] * n, n));
    assert_true(work_cache_tail_digest(w.cache, own_tail) == tow_hash64(own_tail, tail));
    /* Made once: a page that changes afterwards has another digest where it arrives. */
    const uint64_t before = work_cache_page_digest(w.cache, 7);
    w.pages[7 * n] ^= 1;
    assert_int_equal(work_cache_out(w.cache, &p, &number), 0);
    assert_true(work_cache_page_digest(w.cache, 7) == before);
    assert_true(before != tow_hash64(w.pages + 7 * n, n));
    assert_int_equal(work_cache_in(w.cache, &p), 0);
    assert_int_equal(work_cache_await(w.cache), 0);
    close_world(&w);
}

int main(void)
{
    const int absent = test_device_there(spec());
    if (absent) return absent;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cache__out_lands_with_digests_and_leaves_others_alone),
        cmocka_unit_test(test_cache__out_lands_the_same_where_nothing_can_be_pinned),
        cmocka_unit_test(test_cache__copies_land_in_order),
        cmocka_unit_test(test_cache__a_pass_that_awaits_finds_what_came_in),
        cmocka_unit_test(test_cache__nothing_moves_where_memory_is_the_hosts)};
    return cmocka_run_group_tests_name("worker/cache", tests, NULL, NULL);
}
