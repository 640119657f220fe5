/* What is said about too little shared memory. With real limits: tests/cluster/test_edges.py. */
#include "tests/support/check.h"

#include "common/net/shm.h"

#include <stdlib.h>
#include <string.h>

static void uses(const char *tls, bool posix, bool sysv)
{
    struct net_shm s;
    if (tls)
        setenv("UCX_TLS", tls, 1);
    else
        unsetenv("UCX_TLS");
    net_shm_look(&s);
    if (s.posix != posix || s.sysv != sysv)
        fail_msg("UCX_TLS=%s: posix %d, sysv %d", tls ? tls : "", s.posix, s.sysv);
}

static void test_net_shm__follows_the_list_of_transports(void **state)
{
    (void)state;
    uses(NULL, true, true);
    uses("", true, true);
    uses("all", true, true);
    uses("tcp", false, false);
    uses("tcp,self,sysv", false, true);
    uses("posix,tcp", true, false);
    uses("shm,tcp", true, true);
    uses("sm", true, true);
    uses("posixx,tcp", false, false);
    uses("^posix", false, true);
    uses("^tcp", true, true);
    uses("^posix,sysv", false, false);
    uses("^mm", false, false);
    unsetenv("UCX_TLS");
}

static void test_net_shm__looks_where_it_is_told(void **state)
{
    (void)state;
    struct net_shm s;
    net_shm_look(&s);
    assert_string_equal(s.dir, "/dev/shm");
    setenv("UCX_POSIX_DIR", "/nowhere at all", 1);
    net_shm_look(&s);
    assert_string_equal(s.dir, "/nowhere at all");
    assert_int_equal(s.posix_free, 0);
    unsetenv("UCX_POSIX_DIR");
}

static void test_net_shm__says_what_is_there_needed_and_to_be_done(void **state)
{
    (void)state;
    char text[400];
    struct net_shm s = {.posix = true,
                        .sysv = true,
                        .dir = "/dev/shm",
                        .posix_free = 1 << 20,
                        .sysv_most = UINT64_MAX};
    net_shm_explain_worker(&s, text, sizeof text);
    assert_non_null(strstr(text, "/dev/shm has 1024 KiB free and a worker needs 4500 KiB"));
    assert_non_null(strstr(text, "--shm-size"));
    assert_non_null(strstr(text, "UCX_TLS=^posix"));
    assert_true(net_shm_holds(&s, (uint64_t)1 << 40));
    s.posix_free = NET_SHM_WORKER_BYTES;
    net_shm_explain_worker(&s, text, sizeof text);
    assert_string_equal(text, "");
    s.sysv_most = 2 << 20;
    net_shm_explain_worker(&s, text, sizeof text);
    assert_non_null(strstr(text, "room for 2048 KiB and a worker needs 4500 KiB"));
    assert_non_null(strstr(text, "kernel.shmmax"));
    assert_non_null(strstr(text, "UCX_TLS=^sysv"));

    assert_true(net_shm_holds(&s, NET_SHM_WORKER_BYTES));
    assert_false(net_shm_holds(&s, NET_SHM_WORKER_BYTES + 1));
    net_shm_explain_pool(&s, 8 << 20, text, sizeof text);
    assert_non_null(strstr(text, "8192 KiB fit into no shared memory: System V has room for 2048"));
    assert_non_null(strstr(text, "/dev/shm has 4500 KiB free"));
    s.sysv = false;
    net_shm_explain_worker(&s, text, sizeof text);
    assert_string_equal(text, "");
    s.posix = false; /* a choice, and no fault */
    assert_true(net_shm_holds(&s, UINT64_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_net_shm__follows_the_list_of_transports),
        cmocka_unit_test(test_net_shm__looks_where_it_is_told),
        cmocka_unit_test(test_net_shm__says_what_is_there_needed_and_to_be_done),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
