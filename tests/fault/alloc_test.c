/* Every allocation of a scenario made to fail in turn: the 1st, the 2nd, the 3rd ...
 * until a run sees no failure.
 *
 * The linker sends our calls of malloc, calloc, realloc and aligned_alloc through the wrappers
 * below (Makefile, rule of tests/fault). After each failure the scenario must have ended with an
 * error code and given everything back: what is still allocated then is counted here, so a leak
 * fails the test in every build, not only under ASan. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/kv/table.h"
#include "common/model/forward.h"
#include "common/net/loop.h"
#include "common/net/status.h"
#include "common/text/chat.h"
#include "common/text/json.h"
#include "common/text/tokenizer.h"
#include "deploy/ctl/eval.h"
#include "deploy/ctl/explain.h"
#include "router/http_conn.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t a, size_t n);
void __real_free(void *p);

static _Atomic long passed, fail_at, live; /* live: blocks out since the scenario began */
static _Atomic int counting;
static _Atomic int all_fail;

static int fails(void)
{
    return atomic_load(&all_fail) ||
           (atomic_load(&counting) && atomic_fetch_add(&passed, 1) + 1 == atomic_load(&fail_at));
}
static void *out(void *p)
{
    if (p && atomic_load(&counting)) atomic_fetch_add(&live, 1);
    return p;
}

void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t a, size_t n);
void __wrap_free(void *p);

void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : out(__real_malloc(n));
}
void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : out(__real_calloc(n, size));
}
void *__wrap_aligned_alloc(size_t a, size_t n)
{
    return fails() ? NULL : out(__real_aligned_alloc(a, n));
}
void *__wrap_realloc(void *p, size_t n)
{
    if (fails()) return NULL;
    void *q = __real_realloc(p, n);
    if (!p && q && atomic_load(&counting)) atomic_fetch_add(&live, 1);
    return q;
}
char *__wrap_strdup(const char *s);
char *__wrap_strndup(const char *s, size_t n);
char *__wrap_strndup(const char *s, size_t n)
{
    size_t k = strnlen(s, n);
    char *p = __wrap_malloc(k + 1);
    if (p) {
        memcpy(p, s, k);
        p[k] = 0;
    }
    return p;
}
char *__wrap_strdup(const char *s)
{
    return __wrap_strndup(s, SIZE_MAX);
}
void __wrap_free(void *p)
{
    if (p && atomic_load(&counting)) atomic_fetch_sub(&live, 1);
    __real_free(p);
}

/* Runs the scenario with allocation n failing, for n in steps that grow,
 * so that long scenarios stay short. */
static void torture(const char *name, int (*scenario)(void *arg, struct tow_err *err), void *arg)
{
    long n_failed = 0;
    for (long n = 1;; n += 1 + n / 40) {
        struct tow_err err = {0};
        atomic_store(&passed, 0);
        atomic_store(&live, 0);
        atomic_store(&fail_at, n);
        atomic_store(&counting, 1);
        int rc = scenario(arg, &err);
        atomic_store(&counting, 0);
        if (atomic_load(&live) != 0)
            fail_msg("%s: allocation %ld failed: %ld blocks not given back", name, n, (long)live);
        if (atomic_load(&passed) < n) {
            if (rc != 0)
                fail_msg("%s: nothing failed, yet %s: %s", name, tow_err_name(rc), err.msg);
            break;
        }
        /* Some allocations are only an optimisation: success is then right,
         * an error must be a real one. */
        if (rc > 0 || !strcmp(tow_err_name(rc), "?"))
            fail_msg("%s: allocation %ld failed: %d is no code", name, n, rc);
        n_failed += rc < 0;
    }
    print_message("%s: %ld failures told\n", name, n_failed);
    assert_true(n_failed > 0);
}

static int open_model(void *arg, struct tow_err *err)
{
    struct model_options o = {.device = "cpu",
                              .n_threads = 1,
                              .kv_fmt = KERN_KV_FP8,
                              .ik_fmt = KERN_IK_FP4,
                              .max_rows = 4,
                              .mtp = true};
    struct model *m = NULL;
    int rc = model_open(&m, arg, &o, err);
    model_close(m);
    return rc;
}

static int run_eval(void *arg, struct tow_err *err)
{
    struct ctl_eval e = {.model_dir = "tests/golden/data/exact-bf16/checkpoint",
                         .tokens_path = "tests/golden/data/exact-bf16/expected/exact-5.safetensors",
                         .out_path = arg,
                         .greedy = 2,
                         .handover = true};
    e.model.device = "cpu";
    e.model.n_threads = 1;
    e.model.exact = true;
    e.model.kv_fmt = KERN_KV_F32;
    e.model.ik_fmt = KERN_IK_F32;
    return ctl_eval_run(&e, err);
}

static int run_explain(void *arg, struct tow_err *err)
{
    struct text_record record = {0};
    struct ctl_explain_report report;
    const struct ctl_explain e = {.model_dir = "tests/golden/data/native/checkpoint",
                                  .device = "cpu",
                                  .n_threads = 1,
                                  .record = &record,
                                  .only = "again,batch,handover,index.fp8"};
    int rc = text_record_load(&record, arg, err);
    if (rc == 0) rc = ctl_explain_run(&e, &report, err);
    text_record_fini(&record);
    return rc;
}

static int load_tokenizer(void *arg, struct tow_err *err)
{
    struct text_tokenizer *t = NULL;
    int rc = text_tokenizer_load(&t, arg, err);
    text_tokenizer_free(t);
    return rc;
}

/* arg: the tokenizer. From JSON messages to ids. */
static int encode_chat(void *arg, struct tow_err *err)
{
    static const char text[] =
        "[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"What is "
        "\\u00e9?\"},"
        "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"a\",\"type\":"
        "\"function\",\"function\":"
        "{\"name\":\"f\",\"arguments\":\"{\\\"x\\\": "
        "1}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":\"2\"}]";
    struct json *messages = NULL;
    struct text_chat_prompt prompt = {0};
    struct text_chat_options o = {.thinking = true};
    struct text_ids ids = {0};
    int rc = json_parse(&messages, text, sizeof text - 1, NULL, err);
    if (rc == 0) {
        rc = text_chat_encode(&prompt, messages, &o, err);
        if (rc == 0) {
            rc = text_tokenizer_encode(arg, prompt.segs, prompt.n_segs, 1000, &ids, NULL, err);
            text_ids_fini(&ids);
        }
        text_chat_prompt_fini(&prompt);
        json_free(messages);
    }
    return rc;
}

static void test_alloc__opening_a_model(void **state)
{
    (void)state;
    torture("native", open_model, "tests/golden/data/native/checkpoint");
    torture("nvfp4", open_model, "tests/golden/data/nvfp4/checkpoint");
}

static void test_alloc__eval(void **state)
{
    (void)state;
    char path[64];
    snprintf(path, sizeof path, "/tmp/towpath-alloc-test-%d.safetensors", (int)getpid());
    torture("eval", run_eval, path);
    unlink(path);
}

static void test_alloc__explain(void **state)
{
    (void)state;
    torture("explain", run_explain, "tests/fuzz/corpus/record/whole.json");
}

static void test_alloc__text(void **state)
{
    (void)state;
    struct text_tokenizer *t = NULL;
    torture("tokenizer", load_tokenizer, "deploy/demo-model/tokenizer.json");
    assert_int_equal(text_tokenizer_load(&t, "deploy/demo-model/tokenizer.json", NULL), 0);
    torture("chat", encode_chat, t);
    text_tokenizer_free(t);
}

/* ---- clients of a server that has no memory for them ---- */

static int connect_to(uint16_t port)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* Turns the loop until the client has bytes or its end; how many, or -1 with errno. */
static ssize_t hear(struct net_loop *loop, int fd, char *buf, size_t cap)
{
    time_t until = time(NULL) + test_limit_ms(60000) / 1000;
    for (;;) {
        net_loop_turn(loop, 0);
        ssize_t n = recv(fd, buf, cap, MSG_DONTWAIT);
        if (n >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return n;
        if (time(NULL) > until) fail_msg("the listener is deaf");
    }
}

static void check_not_deaf(struct net_loop *loop, uint16_t port)
{
    enum { CLIENTS = 5 };
    int fds[CLIENTS];
    char buf[4096];
    /* All at once, so that one waits while another is being turned away. */
    for (int i = 0; i < CLIENTS; i++) fds[i] = connect_to(port);
    atomic_store(&all_fail, 1);
    for (int i = 0; i < CLIENTS; i++) {
        assert_true(hear(loop, fds[i], buf, sizeof buf) <= 0);
        close(fds[i]);
    }
    atomic_store(&all_fail, 0);
    int fd = connect_to(port);
    assert_int_equal(send(fd, "nonsense\r\n\r\n", 12, MSG_NOSIGNAL), 12);
    ssize_t n = hear(loop, fd, buf, sizeof buf - 1);
    assert_true(n > 12);
    buf[n] = 0;
    assert_memory_equal(buf, "HTTP/1.1 400", 12);
    close(fd);
}

static void test_alloc__listeners_do_not_go_deaf(void **state)
{
    (void)state;
    const struct net_status_hooks hooks = {0}; /* no request of this test gets so far */
    const struct rtr_http_handler handler = {0};
    struct net_loop *loop = NULL;
    struct net_status *status = NULL;
    struct rtr_http *http = NULL;
    assert_int_equal(net_loop_open(&loop, NULL), 0);
    assert_int_equal(net_status_open(&status, loop, "127.0.0.1:0", &hooks, NULL), 0);
    assert_int_equal(rtr_http_open(&http, net_loop_uv(loop), "127.0.0.1:0", &rtr_http_defaults,
                                   &handler, NULL, NULL),
                     0);
    check_not_deaf(loop, net_status_port(status));
    check_not_deaf(loop, rtr_http_port(http));
    net_status_close(status);
    rtr_http_close(http, NULL, NULL);
    net_loop_free(loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alloc__opening_a_model),
        cmocka_unit_test(test_alloc__eval),
        cmocka_unit_test(test_alloc__explain),
        cmocka_unit_test(test_alloc__text),
        cmocka_unit_test(test_alloc__listeners_do_not_go_deaf),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
