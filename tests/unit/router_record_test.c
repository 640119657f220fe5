/* Tests of router/record.h over a back end that does what it is told: what is recorded and what is
 * not, every end a request can have, the bounds of the queue and of the folder. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/metrics.h"
#include "common/net/loop.h"
#include "common/text/record.h"
#include "proto/messages.h"
#include "router/record.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "/tmp/towpath-record-test-XXXXXX";
static char records[64];
static struct net_loop *loop;
static struct tow_metrics *metrics;
static struct rtr_recorder *recorder;
static const struct rtr_backend *const top = &rtr_recorder_backend;

/* ------------------------------------------------------------------ the back end below */

static struct {
    struct rtr_sink sink;
    void *ctx;
    bool refuses, rows_to_come;
    int n_cancelled, n_cancelled_choices;
} below;

static int submit(void *self, const struct rtr_request *req, const struct rtr_sink *sink, void *ctx,
                  struct rtr_accepted **out, struct rtr_refusal *refusal)
{
    (void)self, (void)req;
    if (below.refuses) return tow_fail(&refusal->err, TOW_EBUSY, "refused as asked");
    below.sink = *sink;
    below.ctx = ctx;
    *out = (struct rtr_accepted *)(void *)&below;
    return 0;
}
static void cancel(void *self, struct rtr_accepted *t)
{
    (void)self;
    assert_ptr_equal(t, &below);
    below.n_cancelled++;
}
static bool cancel_choice(void *self, struct rtr_accepted *t, uint32_t which)
{
    (void)self, (void)which;
    assert_ptr_equal(t, &below);
    below.n_cancelled_choices++;
    return !below.rows_to_come;
}
static const struct rtr_backend inner = {
    .submit = submit, .cancel = cancel, .cancel_choice = cancel_choice};

/* ------------------------------------------------------------------ the client above */

static struct {
    int n_tokens, n_finished, n_failed, n_captured;
} above;

static void on_tokens(void *ctx, const struct rtr_tokens *t)
{
    (void)ctx;
    above.n_tokens += (int)t->n;
}
static void on_finish(void *ctx, uint32_t c, enum rtr_finish reason)
{
    (void)ctx, (void)c, (void)reason;
    above.n_finished++;
}
static void on_fail(void *ctx, const struct rtr_refusal *refusal)
{
    (void)ctx, (void)refusal;
    above.n_failed++;
}
static void on_captured(void *ctx, const struct rtr_captured *c)
{
    (void)ctx, (void)c;
    above.n_captured++;
}
static const struct rtr_sink client = {on_tokens, on_finish, on_fail, on_captured, NULL};

static const text_id prompt[] = {5, 6, 7};
static const struct rtr_choice choices[2] = {{prompt, 3, 40}, {prompt, 3, 41}};
static struct rtr_request request;

static struct rtr_accepted *ask(const char *id, uint32_t n_choices)
{
    struct rtr_accepted *t = NULL;
    struct rtr_refusal refusal = {0};
    request =
        (struct rtr_request){.sampling = {.temperature = 0.7f, .top_p = 1, .repetition_penalty = 1},
                             .n_choices = n_choices,
                             .choices = choices,
                             .n_prompt_total = 3,
                             .max_tokens = 9};
    snprintf(request.id, sizeof request.id, "%s", id);
    assert_int_equal(top->submit(recorder, &request, &client, &above, &t, &refusal), 0);
    return t;
}

static void tokens(uint32_t choice, uint32_t n)
{
    static const text_id ids[] = {10, 11, 12, 13};
    const struct rtr_tokens t = {.choice = choice, .n = n, .ids = ids};
    below.sink.on_tokens(below.ctx, &t);
}

static void finish(uint32_t choice)
{
    below.sink.on_finish(below.ctx, choice, RTR_FINISH_STOP);
}

static void answer(const char *id)
{
    ask(id, 1);
    tokens(0, 2);
    finish(0);
}

/* ------------------------------------------------------------------ around it */

static int try_open(struct rtr_recorder **out, uint64_t max_bytes, uint32_t max_requests,
                    struct tow_err *err)
{
    static const int32_t eos[] = {1};
    const struct rtr_record_config c = {.dir = records,
                                        .mode = 0640,
                                        .max_bytes = max_bytes,
                                        .max_requests = max_requests,
                                        .model = "m",
                                        .n_vocab = 64,
                                        .eos = eos,
                                        .n_eos = 1,
                                        .metrics = metrics,
                                        .inner = &inner};
    return rtr_recorder_open(out, net_loop_uv(loop), &c, err);
}

static void open_with(uint64_t max_bytes, uint32_t max_requests)
{
    struct tow_err err = {0};
    if (try_open(&recorder, max_bytes, max_requests, &err) < 0) fail_msg("%s", err.msg);
}

/* The folder is refused with a line that has this in it, and nothing is left in it. */
static void refuses(const char *said)
{
    struct rtr_recorder *none = NULL;
    struct tow_err err = {0};
    assert_int_equal(try_open(&none, 1 << 20, 3, &err), TOW_ECONFIG);
    if (!strstr(err.msg, said)) fail_msg("'%s', expected '%s'", err.msg, said);
}

static void put(const char *name, const char *text)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", records, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static bool is_there(const char *name)
{
    char path[200];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", records, name);
    return lstat(path, &st) == 0;
}

static int set_up(void **state)
{
    struct tow_err err = {0};
    (void)state;
    memset(&below, 0, sizeof below);
    memset(&above, 0, sizeof above);
    strcpy(dir + sizeof dir - 7, "XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(records, sizeof records, "%s/r", dir);
    return net_loop_open(&loop, &err) < 0 || tow_metrics_new(&metrics, &err) < 0 ? -1 : 0;
}

static int n_files(void)
{
    DIR *d = opendir(records);
    int n = 0;
    for (const struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

static int tear_down(void **state)
{
    char path[400];
    DIR *d = opendir(records);
    (void)state;
    net_loop_free(loop);
    rtr_recorder_free(recorder);
    tow_metrics_free(metrics);
    recorder = NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "%s/%s", records, e->d_name);
        unlink(path);
    }
    if (d) closedir(d);
    rmdir(records);
    return rmdir(dir);
}

/* As /metrics shows it. */
static uint64_t count(const char *name)
{
    char line[128];
    struct tow_buf text;
    tow_buf_init(&text, 0);
    tow_metrics_print(metrics, &text);
    snprintf(line, sizeof line, "\ntowpath_%s ", name);
    const char *at = strstr(text.data, line);
    if (!at) fail_msg("no %s in %s", name, text.data);
    const uint64_t n = strtoull(at + strlen(line), NULL, 10);
    tow_buf_fini(&text);
    return n;
}

static uint64_t dropped(const char *why)
{
    char name[80];
    snprintf(name, sizeof name, "router_record_dropped_total{reason=\"%s\"}", why);
    return count(name);
}

static void until_recorded(uint64_t n)
{
    while (count("router_recorded_total") < n) net_loop_turn(loop, 1);
}

static void load(const char *id, struct text_record *r)
{
    char path[200];
    struct tow_err err = {0};
    snprintf(path, sizeof path, "%s/%s.json", records, id);
    if (text_record_load(r, path, &err) < 0) fail_msg("%s", err.msg);
}

/* ------------------------------------------------------------------ tests */

static void test_router_record__holds_ids_ends_and_workers(void **state)
{
    struct text_record r;
    struct stat st;
    char path[200];
    uint8_t facts[200];
    struct wire_writer w = {.data = facts, .cap = sizeof facts};
    const struct wire_fact f = {WIRE_FACT_LAYOUT, wire_text("layout.kv_dtype"), wire_text("fp8")};
    (void)state;
    open_with(1 << 20, 10);
    ask("cmpl-one", 2);
    wire_put_fact(&w, &f);
    struct rtr_placed placed = {.choice = 0,
                                .prefill = {"p", 1, 256, facts, (uint32_t)w.len},
                                .decode = {"d", 2, 0, facts, (uint32_t)w.len}};
    below.sink.on_placed(below.ctx, &placed);
    tokens(0, 2);
    placed.n_output = 2;
    placed.decode.name = "e";
    placed.decode.incarnation = 3;
    below.sink.on_placed(below.ctx, &placed);
    tokens(0, 1);
    tokens(1, 4);
    below.sink.on_captured(below.ctx, NULL);
    finish(0);
    assert_int_equal(n_files(), 0);
    below.sink.on_finish(below.ctx, 1, RTR_FINISH_LENGTH);
    until_recorded(1);
    assert_true(above.n_tokens == 7 && above.n_finished == 2 && above.n_captured == 1);

    load("cmpl-one", &r);
    assert_true(r.n_prompts == 1 && r.prompts[0].n == 3 && r.prompts[0].ids[2] == 7);
    assert_true(r.n_choices == 2 && r.choices[0].seed == 40 && r.choices[1].seed == 41);
    assert_true(r.choices[0].output.n == 3 && r.choices[0].output.ids[2] == 10);
    assert_string_equal(r.choices[0].finish, "stop");
    assert_string_equal(r.choices[1].finish, "length");
    assert_true(r.n_workers == 3 && r.choices[0].n_attempts == 2 && r.choices[1].n_attempts == 0);
    assert_true(r.choices[0].attempts[1].first_output == 2 && r.choices[0].attempts[1].decode == 2);
    assert_string_equal(text_record_fact(&r.workers[2], "layout.kv_dtype"), "fp8");
    assert_true(r.temperature == 0.7f && r.max_tokens == 9 && r.n_vocab == 64 && r.eos.ids[0] == 1);
    text_record_fini(&r);
    snprintf(path, sizeof path, "%s/cmpl-one.json", records);
    assert_true(stat(path, &st) == 0 && (st.st_mode & 0777) == 0640);
    assert_true(stat(records, &st) == 0 && (st.st_mode & 0777) == 0700);
}

static void test_router_record__every_end_is_told_apart(void **state)
{
    static const char *const ends[][2] = {{"cmpl-cancelled", "cancelled"},
                                          {"cmpl-failed", "failed"},
                                          {"cmpl-stopped", "stop_string"},
                                          {"cmpl-waited", "stop_string"}};
    struct rtr_refusal refusal = {.err = {.code = TOW_EPEER}};
    struct rtr_accepted *t;
    (void)state;
    open_with(1 << 20, 10);
    t = ask("cmpl-cancelled", 1);
    tokens(0, 1);
    top->cancel(recorder, t);
    assert_int_equal(below.n_cancelled, 1);
    ask("cmpl-failed", 1);
    tokens(0, 1);
    below.sink.on_fail(below.ctx, &refusal);
    t = ask("cmpl-stopped", 1);
    tokens(0, 1);
    assert_true(top->cancel_choice(recorder, t, 0));
    below.rows_to_come = true; /* with a capture the end comes later */
    t = ask("cmpl-waited", 1);
    tokens(0, 1);
    assert_false(top->cancel_choice(recorder, t, 0));
    finish(0);
    /* Without one token there is nothing to explain. */
    top->cancel(recorder, ask("cmpl-left", 1));
    ask("cmpl-none", 1);
    below.sink.on_fail(below.ctx, &refusal);
    below.refuses = true;
    assert_true(top->submit(recorder, &request, &client, &above, &t, &refusal) < 0);
    until_recorded(4);
    assert_int_equal(n_files(), 4);
    for (int i = 0; i < 4; i++) {
        struct text_record r;
        load(ends[i][0], &r);
        assert_string_equal(r.choices[0].finish, ends[i][1]);
        text_record_fini(&r);
    }
    assert_int_equal(above.n_failed, 2);
}

static void test_router_record__a_full_queue_drops_and_counts(void **state)
{
    char id[40];
    (void)state;
    open_with(1 << 20, 1000);
    /* No turn of the loop: one is being written, the rest waits. */
    for (int i = 0; i < RTR_RECORD_QUEUE + 1 + 5; i++) {
        snprintf(id, sizeof id, "cmpl-%d", i);
        answer(id);
    }
    assert_int_equal(dropped("queue_full"), 5);
    assert_int_equal(above.n_finished, RTR_RECORD_QUEUE + 6);
    until_recorded(RTR_RECORD_QUEUE + 1);
    assert_int_equal(n_files(), RTR_RECORD_QUEUE + 1);
}

static void test_router_record__the_folder_is_bounded(void **state)
{
    char id[40], path[200];
    struct stat st;
    (void)state;
    open_with(1 << 20, 3);
    for (int i = 0; i < 300; i++) {
        snprintf(id, sizeof id, "cmpl-%d", i);
        answer(id);
        until_recorded((uint64_t)i + 1);
        assert_int_equal(n_files(), i < 3 ? i + 1 : 3);
    }
    assert_int_equal(count("router_record_removed_total"), 297);
    snprintf(path, sizeof path, "%s/cmpl-299.json", records);
    assert_int_equal(stat(path, &st), 0);

    /* A later run goes on with them; one record larger than all may be is dropped. */
    net_loop_free(loop);
    rtr_recorder_free(recorder);
    struct tow_err err = {0};
    assert_int_equal(net_loop_open(&loop, &err), 0);
    open_with((uint64_t)st.st_size * 2 + 10, 100);
    assert_int_equal(n_files(), 2);
    answer("cmpl-x");
    until_recorded(301);
    assert_int_equal(n_files(), 2);
    net_loop_free(loop);
    rtr_recorder_free(recorder);
    assert_int_equal(net_loop_open(&loop, &err), 0);
    open_with((uint64_t)st.st_size / 2, 100);
    assert_int_equal(n_files(), 0);
    answer("cmpl-y");
    while (dropped("too_large") == 0) net_loop_turn(loop, 1);
    assert_int_equal(n_files(), 0);
}

/* What is in the folder, then the folder. */
static void remove_folder(void)
{
    char path[400];
    DIR *d = opendir(records);
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "%s/%s", records, e->d_name);
        unlink(path);
    }
    if (d) closedir(d);
    assert_int_equal(rmdir(records), 0);
}

static void test_router_record__a_lost_folder_fails_no_request(void **state)
{
    (void)state;
    open_with(1 << 20, 3);
    answer("cmpl-0");
    until_recorded(1);
    remove_folder();
    answer("cmpl-1");
    while (dropped("failed") == 0) net_loop_turn(loop, 1);
    assert_int_equal(above.n_finished, 2);
    assert_int_equal(count("router_record_files"), 0);
    assert_int_equal(count("router_record_bytes"), 0);

    /* Made again, with the same checks and what is there taken over. */
    assert_int_equal(mkdir(records, 0777), 0);
    assert_int_equal(chmod(records, 0777), 0);
    answer("cmpl-2");
    while (dropped("failed") == 1) net_loop_turn(loop, 1);
    assert_int_equal(n_files(), 0);
    assert_int_equal(chmod(records, 0700), 0);
    put("cmpl-old.json", TEXT_RECORD_BEGINS " 1}");
    answer("cmpl-3");
    until_recorded(2);
    assert_true(is_there("cmpl-3.json") && is_there("cmpl-old.json"));
    assert_int_equal(count("router_record_files"), 2);

    /* Moved away with another in its place: none between the two goes astray. */
    char aside[80];
    snprintf(aside, sizeof aside, "%s/aside", dir);
    assert_int_equal(rename(records, aside), 0);
    assert_int_equal(mkdir(records, 0700), 0);
    answer("cmpl-4");
    until_recorded(3);
    assert_true(is_there("cmpl-4.json"));
    assert_int_equal(count("router_record_files"), 1);
    remove_folder();
    assert_int_equal(rename(aside, records), 0);
    assert_false(is_there("cmpl-4.json"));
}

static void test_router_record__files_of_others_are_left_alone(void **state)
{
    static const char *const foreign[] = {"chatcmpl-my-notes1.json", "cmpl-probe.json",
                                          "cmpl-empty.json", ".cmpl-mine.json.tmp", "notes.txt"};
    char path[200];
    (void)state;
    assert_int_equal(mkdir(records, 0700), 0);
    for (size_t i = 0; i < 5; i++) put(foreign[i], i == 2 ? "" : "{}");
    put("cmpl-old1.json", TEXT_RECORD_BEGINS " 1}");
    put("cmpl-old2.json", TEXT_RECORD_BEGINS " 1}");
    put(".cmpl-half.json.tmp", TEXT_RECORD_BEGINS " 1");
    snprintf(path, sizeof path, "%s/cmpl-link.json", records);
    assert_int_equal(symlink("cmpl-old1.json", path), 0);
    snprintf(path, sizeof path, "%s/cmpl-pipe.json", records);
    assert_int_equal(mkfifo(path, 0600), 0);
    open_with(1 << 20, 2);
    assert_int_equal(count("router_record_files"), 2);
    assert_false(is_there(".cmpl-half.json.tmp"));
    put("cmpl-old1.json", "{}"); /* by now somebody's own: no longer counted, not removed */
    answer("cmpl-1");
    until_recorded(1);
    answer("cmpl-2");
    until_recorded(2);
    assert_int_equal(count("router_record_removed_total"), 1);
    assert_true(is_there("cmpl-1.json") && is_there("cmpl-2.json"));
    assert_true(is_there("cmpl-old1.json") && !is_there("cmpl-old2.json"));
    assert_true(is_there("cmpl-link.json") && is_there("cmpl-pipe.json"));
    for (size_t i = 0; i < 5; i++) assert_true(is_there(foreign[i]));
}

static void test_router_record__folders_that_are_refused(void **state)
{
    struct rlimit was, small;
    struct tow_err err = {0};
    (void)state;
    /* A disk that is full shows in the first block, not in an empty file. */
    assert_int_equal(mkdir(records, 0700), 0);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    small = was;
    small.rlim_cur = 1000;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    refuses(".probe.tmp: File too large");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_false(is_there(".probe.tmp"));

    assert_int_equal(chmod(records, 0770), 0);
    refuses("mode 0770: its group may write there; 0700 is meant");
    assert_int_equal(rtr_record_check_dir(records, &err), TOW_ECONFIG);
    assert_int_equal(chmod(records, 0755), 0);

    open_with(1 << 20, 3);
    refuses("another router records there (.lock is locked)");
    assert_int_equal(rtr_record_check_dir(records, &err), 0); /* of a running router as well */
    rtr_recorder_free(recorder);
    recorder = NULL;
    open_with(1 << 20, 3);
    rtr_recorder_free(recorder);
    recorder = NULL;

    if (geteuid() != 0) return; /* only root can give a folder away */
    assert_int_equal(chown(records, 12345, 0), 0);
    refuses("belongs to user 12345; must belong to root or to user 0");
    assert_int_equal(chown(records, 0, 0), 0);
}

static void test_router_record__modes_that_are_none(void **state)
{
    static const char *const wrong[] = {"",     "rw",   "888",  "0602",  "0777",
                                        "0400", "0200", "0611", "04600", "-600"};
    uint32_t mode;
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct tow_err err = {0};
        assert_int_equal(rtr_record_mode(wrong[i], "--record-mode", &mode, &err), TOW_ECONFIG);
        assert_non_null(strstr(err.msg, "--record-mode"));
    }
    assert_true(rtr_record_mode("0600", "", &mode, NULL) == 0 && mode == 0600);
    assert_true(rtr_record_mode("664", "", &mode, NULL) == 0 && mode == 0664);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_router_record__holds_ids_ends_and_workers, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_router_record__every_end_is_told_apart, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_router_record__a_full_queue_drops_and_counts, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_router_record__the_folder_is_bounded, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_router_record__a_lost_folder_fails_no_request, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_router_record__files_of_others_are_left_alone, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_router_record__folders_that_are_refused, set_up,
                                        tear_down),
        cmocka_unit_test(test_router_record__modes_that_are_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
