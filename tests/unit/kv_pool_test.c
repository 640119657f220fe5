/* Tests of common/kv/pool.h and table.h. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/kv/table.h"

#include <stdlib.h>
#include <string.h>

static uint8_t pages[64 * 16], tails[8 * 16];

static struct kv_pool *make(uint32_t n_pages, uint32_t n_tails)
{
    struct kv_pool *p = NULL;
    assert_int_equal(kv_pool_new(&p, pages, n_pages, 16, tails, n_tails, 16, NULL), 0);
    return p;
}

static void test_kv_pool__take_more_than_free_takes_none(void **state)
{
    (void)state;
    struct kv_pool *p = make(5, 1);
    kv_page_id ids[6];
    assert_int_equal(kv_pool_take(p, 6, ids), TOW_EFULL);
    assert_int_equal(kv_pool_free_pages(p), 5);
    assert_int_equal(kv_pool_take(p, 5, ids), 0);
    assert_int_equal(kv_pool_take(p, 1, ids + 5), TOW_EFULL);
    assert_int_equal(kv_pool_take(p, 0, NULL), 0);
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < i; j++) assert_int_not_equal(ids[i], ids[j]);
    kv_pool_ref(p, ids[2]);
    for (int i = 0; i < 5; i++) kv_pool_unref(p, ids[i]);
    assert_int_equal(kv_pool_free_pages(p), 4);
    kv_pool_unref(p, ids[2]);
    assert_int_equal(kv_pool_free_pages(p), 5);
    kv_pool_free(p);
}

static void test_kv_pool__random_use_never_hands_a_page_out_twice(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed < 200; seed++) {
        struct kv_pool *p = make(64, 8);
        kv_pool_shuffle(p, seed);
        struct kv_table t[8];
        int owner[64];
        memset(owner, -1, sizeof owner);
        for (int i = 0; i < 8; i++) kv_table_init(&t[i]);
        srand(seed);
        for (int step = 0; step < 300; step++) {
            int i = rand() % 8;
            uint32_t before = kv_pool_free_pages(p), had = t[i].n_pages;
            if (rand() % 3) {
                uint32_t want = had + (uint32_t)(rand() % 12);
                int rc = kv_table_grow(&t[i], p, want);
                if (rc == 0) {
                    for (uint32_t k = had; k < t[i].n_pages; k++) {
                        assert_int_equal(owner[t[i].ids[k]], -1);
                        owner[t[i].ids[k]] = i;
                    }
                } else {
                    assert_int_equal(rc, TOW_EFULL);
                    assert_int_equal(kv_pool_free_pages(p), before);
                    assert_true(want - had > before);
                }
            } else {
                if (had && rand() % 2 && t[i].ids[0] != KV_PAGE_GONE) {
                    owner[t[i].ids[0]] = -1;
                    kv_table_drop(&t[i], p, 0);
                }
                for (uint32_t k = 0; k < t[i].n_pages; k++)
                    if (t[i].ids[k] != KV_PAGE_GONE) owner[t[i].ids[k]] = -1;
                kv_table_fini(&t[i], p);
            }
        }
        for (int i = 0; i < 8; i++) kv_table_fini(&t[i], p);
        assert_int_equal(kv_pool_free_pages(p), 64);
        assert_int_equal(kv_pool_free_tails(p), 8);
        kv_pool_free(p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_pool__take_more_than_free_takes_none),
        cmocka_unit_test(test_kv_pool__random_use_never_hands_a_page_out_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
