/* Every allocation of a scenario made to fail in turn: the 1st, the 2nd, the 3rd ... until a run sees no failure.
 *
 * The linker sends our calls of malloc, calloc, realloc and aligned_alloc through the wrappers below (Makefile, rule of
 * tests/fault). After each failure the scenario must have ended with an error code and given everything back: what is
 * still allocated then is counted here, so a leak fails the test in every build, not only under ASan. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/kv/table.h"
#include "common/model/forward.h"
#include "common/text/chat.h"
#include "common/text/json.h"
#include "common/text/tokenizer.h"
#include "deploy/ctl/eval.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t a, size_t n);
void __real_free(void *p);

static _Atomic long passed, fail_at, live; /* live: blocks out since the scenario began */
static _Atomic int counting;

static int fails(void)
{
    return atomic_load(&counting) && atomic_fetch_add(&passed, 1) + 1 == atomic_load(&fail_at);
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

/* Runs the scenario with allocation n failing, for n in steps that grow, so that long scenarios stay short. */
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
        /* Some allocations are only an optimisation: success is then right, an error must be a real one. */
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

static void test_alloc__text(void **state)
{
    (void)state;
    struct text_tokenizer *t = NULL;
    torture("tokenizer", load_tokenizer, "deploy/demo-model/tokenizer.json");
    assert_int_equal(text_tokenizer_load(&t, "deploy/demo-model/tokenizer.json", NULL), 0);
    torture("chat", encode_chat, t);
    text_tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alloc__opening_a_model),
        cmocka_unit_test(test_alloc__eval),
        cmocka_unit_test(test_alloc__text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
