/* Tests of common/base/opt.h. */
#include "tests/support/check.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/opt.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct {
    const char *model;
    int64_t queued, threads;
    uint64_t body, tier;
    double fraction;
    int dtype;
    bool quiet;
    struct tow_addr http;
    struct tow_strings join;
} got;

static const char *const dtypes[] = {"fp8", "bf16", "f32", NULL};
static const char *const schemes[] = {"tcp://", "ipc://", NULL};

static const struct tow_opt table[] = {
    {.name = "model",
     .type = TOW_OPT_STRING,
     .out = &got.model,
     .required = true,
     .help = "folder"},
    {.name = "max-queued",
     .type = TOW_OPT_INT,
     .out = &got.queued,
     .def = "64",
     .min = 1,
     .max = 4096,
     .unit = "requests",
     .help = "queue"},
    {.name = "threads",
     .type = TOW_OPT_INT,
     .out = &got.threads,
     .min = 1,
     .max = 1024,
     .otherwise = "all cores",
     .help = "team"},
    {.name = "max-body-bytes",
     .type = TOW_OPT_BYTES,
     .out = &got.body,
     .def = "8M",
     .min = 1024,
     .max = INT64_MAX,
     .help = "body"},
    {.name = "host-tier",
     .type = TOW_OPT_BYTES,
     .out = &got.tier,
     .def = "0",
     .max = 0,
     .help = "there is none yet"},
    {.name = "memory-fraction",
     .type = TOW_OPT_FLOAT,
     .out = &got.fraction,
     .def = "0.9",
     .fmin = 0.01,
     .fmax = 1,
     .help = "share"},
    {.name = "kv-dtype",
     .type = TOW_OPT_ENUM,
     .out = &got.dtype,
     .def = "fp8",
     .choices = dtypes,
     .help = "cache"},
    {.name = "quiet", .type = TOW_OPT_BOOL, .out = &got.quiet, .def = "false", .help = "less"},
    {.name = "http",
     .type = TOW_OPT_ADDR,
     .out = &got.http,
     .def = "127.0.0.1:8000",
     .help = "listen"},
    {.name = "join",
     .type = TOW_OPT_URLS,
     .out = &got.join,
     .def = "tcp://127.0.0.1:7000",
     .choices = schemes,
     .help = "routers"},
};
static const struct tow_opts_spec spec = {.program = "towpath-test",
                                          .about = "a table to test with",
                                          .operands = "FILE",
                                          .max_operands = 1,
                                          .table = table,
                                          .n = sizeof table / sizeof *table};

enum { MAX_ARGS = 16 };
static struct tow_err err;
static enum tow_opts_do what;
static struct tow_opts *opts;

/* args: separated by single spaces; env: one variable or NULL. */
static int parse(const char *args, const char *env1)
{
    static char text[1000];
    const char *argv[MAX_ARGS] = {"towpath-test"}, *env[] = {"PATH=/bin", env1, NULL};
    int argc = 1;
    tow_opts_free(opts);
    opts = NULL;
    memset(&got, 0, sizeof got);
    memset(&err, 0, sizeof err);
    snprintf(text, sizeof text, "%s", args);
    for (char *p = strtok(text, " "); p; p = strtok(NULL, " ")) argv[argc++] = p;
    return tow_opts_new(&opts, &spec, argc, argv, env, &what, &err);
}

static void refused(const char *args, const char *env, const char *part1, const char *part2)
{
    if (parse(args, env) != TOW_ECONFIG) fail_msg("accepted: %s", args);
    if (!strstr(err.msg, part1) || !strstr(err.msg, part2))
        fail_msg("%s: '%s' lacks '%s' or '%s'", args, err.msg, part1, part2);
}

static char config_path[] = "/tmp/towpath-opt-test-XXXXXX";

static void write_config(const char *text)
{
    int fd = open(config_path, O_WRONLY | O_TRUNC);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
}

static int parse_config(const char *text, const char *more)
{
    char args[500];
    write_config(text);
    snprintf(args, sizeof args, "--config %s %s", config_path, more);
    return parse(args, NULL);
}

static void test_tow_opt__defaults_of_every_type(void **state)
{
    (void)state;
    assert_int_equal(parse("--model m", NULL), 0);
    assert_int_equal(what, TOW_OPTS_RUN);
    assert_string_equal(got.model, "m");
    assert_int_equal(got.queued, 64);
    assert_int_equal(got.threads, 0); /* left as it was */
    assert_int_equal(got.body, 8 << 20);
    assert_true(got.fraction == 0.9);
    assert_int_equal(got.dtype, 0);
    assert_false(got.quiet);
    assert_string_equal(got.http.host, "127.0.0.1");
    assert_int_equal(got.http.port, 8000);
    assert_int_equal(got.join.n, 1);
    assert_int_equal(tow_opts_source(opts, "http"), TOW_FROM_DEFAULT);
}

static void test_tow_opt__flags_of_every_type_in_both_forms(void **state)
{
    (void)state;
    assert_int_equal(parse("--model=a=b --max-queued 7 --threads=2 --max-body-bytes 64k "
                           "--memory-fraction 0.5 --kv-dtype=bf16 --quiet --http [::1]:0 "
                           "--join=tcp://[fe80::1]:1,ipc:///run/x file",
                           NULL),
                     0);
    assert_string_equal(got.model, "a=b");
    assert_int_equal(got.queued, 7);
    assert_int_equal(got.threads, 2);
    assert_int_equal(got.body, 65536);
    assert_true(got.fraction == 0.5);
    assert_int_equal(got.dtype, 1);
    assert_true(got.quiet);
    assert_string_equal(got.http.host, "::1");
    assert_int_equal(got.http.port, 0);
    assert_int_equal(got.join.n, 2);
    assert_string_equal(got.join.items[0], "tcp://[fe80::1]:1");
    assert_string_equal(got.join.items[1], "ipc:///run/x");
    assert_int_equal(tow_opts_n_operands(opts), 1);
    assert_string_equal(tow_opts_operand(opts, 0), "file");
    assert_int_equal(parse("--model m --quiet=false --max-queued 1 --max-queued 2", NULL), 0);
    assert_false(got.quiet);
    assert_int_equal(got.queued, 2);
}

static void test_tow_opt__flag_wins_over_environment_over_file(void **state)
{
    (void)state;
    assert_int_equal(parse_config("# a comment\n\n max-queued = 5 \r\nmodel=from file\n", ""), 0);
    assert_int_equal(got.queued, 5);
    assert_string_equal(got.model, "from file");
    char args[300];
    snprintf(args, sizeof args, "--config=%s", config_path);
    assert_int_equal(parse(args, "TOWPATH_MAX_QUEUED=6"), 0);
    assert_int_equal(got.queued, 6);
    assert_int_equal(tow_opts_source(opts, "max-queued"), TOW_FROM_ENV);
    snprintf(args, sizeof args, "--config=%s --max-queued 7", config_path);
    assert_int_equal(parse(args, "TOWPATH_MAX_QUEUED=6"), 0);
    assert_int_equal(got.queued, 7);
    assert_int_equal(tow_opts_source(opts, "model"), TOW_FROM_FILE);
    snprintf(args, sizeof args, "TOWPATH_CONFIG=%s", config_path);
    assert_int_equal(parse("", args), 0);
    assert_int_equal(got.queued, 5);
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_opts_print(opts, &b);
    assert_string_equal(b.data, "model=from file max-queued=5");
    tow_buf_fini(&b);
}

static void test_tow_opt__unknown_names_are_errors_everywhere(void **state)
{
    (void)state;
    refused("--model m --max-queue 3", NULL, "--max-queue", "did you mean 'max-queued'");
    refused("--model m --utterly-other", NULL, "--utterly-other", "unknown");
    refused("--model m -x", NULL, "-x", "unknown");
    refused("--model m", "TOWPATH_MAX_QUEUEDD=3", "TOWPATH_MAX_QUEUEDD", "did you mean");
    refused("--model m", "TOWPATH_=3", "TOWPATH_", "unknown");
    refused("--modl m", NULL, "--modl", "did you mean 'model'");
    refused("--model m", "TOWPATH_FOO=1", "TOWPATH_FOO",
            "unknown to"); /* --join is three letters off */
    refused("--model m", "TOWPATH_URLS=3", "TOWPATH_URLS", "unknown");
    refused("--model m --url x", NULL, "--url", "unknown"); /* as a flag it is wrong all the same */
    assert_int_equal(parse("--model m", "TOWPATH_URL=x"), 0); /* towpath-ctl's */
    refused("--model m", "TOWPATH_max-queued=3", "TOWPATH_max", "unknown");
    assert_int_equal(parse_config("model = m\nmax_queued = 3\n", ""), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, ":2: key 'max_queued'"));
    refused("--model m --help=1", NULL, "--help: '1'", "takes no value"); /* not: unknown */
    refused("--model m --check-config=true", NULL, "--check-config: 'true'", "takes no value");
    assert_int_equal(parse_config("\xef\xbb\xbfmodel = m\n", ""), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "byte order mark")); /* which nobody sees */
    assert_int_equal(parse_config("model = m\nnonsense\n", ""), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, ":2:"));
    assert_int_equal(parse_config("model = m\nmodel = n\n", ""), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "line 1 too"));
}

static void test_tow_opt__values_out_of_range_name_flag_value_and_range(void **state)
{
    (void)state;
    refused("", NULL, "--model", "must be given");
    refused("--model", NULL, "--model", "needs a value");
    refused("--model=", NULL, "--model", "not empty");
    refused("--model m --max-queued 0", NULL, "--max-queued: '0'", "1 to 4096 requests");
    refused("--model m --max-queued 4097", NULL, "'4097'", "1 to 4096");
    refused("--model m --max-queued 1x", NULL, "'1x'", "1 to 4096");
    refused("--model m --max-queued 99999999999999999999", NULL, "'999", "1 to 4096");
    refused("--model m --max-body-bytes 1023", NULL, "'1023'", "1K or more");
    refused("--model m --max-body-bytes 8MB", NULL, "'8MB'", "8M or 2G");
    refused("--model m --max-body-bytes 9999999T", NULL, "'9999999T'", "or more");
    refused("--model m --memory-fraction nan", NULL, "'nan'", "0.01 to 1");
    refused("--model m --memory-fraction 1.5", NULL, "'1.5'", "0.01 to 1");
    refused("--model m --kv-dtype fp4", NULL, "'fp4'", "fp8|bf16|f32");
    refused("--model m --quiet=maybe", NULL, "'maybe'", "true|false");
    refused("--model m --http 8000", NULL, "'8000'", "ADDR:PORT");
    static const char *const hosts[] = {"256.0.0.1", "0177.0.0.1", "127.1", "1",      "0x7f.1",
                                        "[::g]",     "[1.2.3.4]",  "a..b",  "a.1",    "-a",
                                        "a b",       "a.",         "[::1",  "[::1%]", "\xc3\xa9"};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        char text[64];
        struct tow_addr a;
        snprintf(text, sizeof text, "%s:80", hosts[i]);
        assert_int_equal(tow_addr_parse(text, "http", &a, &err), TOW_ECONFIG);
        assert_non_null(strstr(err.msg, hosts[i]));
    }
    static const char *const good_hosts[] = {
        "0.0.0.0", "localhost", "3f2a", "router_1", "p-0.svc.local", "[::]", "[fe80::1%eth0]"};
    for (size_t i = 0; i < sizeof good_hosts / sizeof *good_hosts; i++) {
        char text[64];
        struct tow_addr a;
        snprintf(text, sizeof text, "%s:80", good_hosts[i]);
        assert_int_equal(tow_addr_parse(text, "http", &a, NULL), 0);
    }
    refused("--model m --http ::1:8000", NULL, "'::1:8000'", "ADDR:PORT");
    refused("--model m --http a:65536", NULL, "'a:65536'", "65535");
    refused("--model m --http a:", NULL, "'a:'", "ADDR:PORT");
    refused("--model m --http []:1", NULL, "'[]:1'", "ADDR:PORT");
    refused("--model m --join udp://x:1", NULL, "'udp://x:1'", "tcp://ADDR:PORT or ipc:///PATH");
    refused("--model m --join tcp://x:1,", NULL, "''", "tcp://");
    refused("--model m --join tcp://x", NULL, "--join: 'tcp://x'",
            "tcp://ADDR:PORT or ipc:///PATH");
    refused("--model m --join tcp://:7000", NULL, "'tcp://:7000'", "tcp://ADDR:PORT");
    refused("--model m --join tcp://x:70000", NULL, "'tcp://x:70000'", "tcp://ADDR:PORT");
    refused("--model m --join ipc://", NULL, "'ipc://'", "ipc:///PATH");
    refused("--model m --join ipc://here", NULL, "'ipc://here'", "ipc:///PATH");
    char longest[140] = "--model m --join ipc:///";
    size_t n = strlen(longest);
    memset(longest + n, 'x', 106);
    assert_int_equal(parse(longest, NULL), 0);
    longest[n + 106] = 'x'; /* more than a socket's address holds */
    refused(longest, NULL, "--join", "a path of 108 bytes; a socket's has at most 107");
    refused("--model m --host-tier 1G", NULL, "--host-tier: '1G' is not right; must be 0 (there is",
            "none yet)"); /* not 0 to 0 */
    refused("--model m a b", NULL, "'b'", "FILE");
    refused("--model m", "TOWPATH_MAX_QUEUED=zero", "TOWPATH_MAX_QUEUED: 'zero'", "1 to 4096");
    refused("--model m --config /no/such/file", NULL, "--config", "/no/such/file");
    assert_int_equal(parse_config("max-queued = none\nmodel = m\n", "--max-queued 3"), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, ":1: max-queued: 'none'")); /* though the flag hides it */
}

/* One spelling for each number, so that none is read in two ways. */
static void test_tow_opt__numbers_have_one_spelling(void **state)
{
    (void)state;
    static const char *const wrong_ints[] = {"+1",   "01",   "007", "1.0", "1e0",
                                             "0x10", "-0x1", "1 ",  "--1", ""};
    for (size_t i = 0; i < sizeof wrong_ints / sizeof *wrong_ints; i++) {
        char flag[60];
        snprintf(flag, sizeof flag, "TOWPATH_MAX_QUEUED=%s", wrong_ints[i]);
        refused("--model m", flag, wrong_ints[i], "a whole number, 1 to 4096 requests");
    }
    static const char *const wrong_floats[] = {"+0.5", ".5",   "0.",   "00.5", "0x1p-1",
                                               "inf",  "0.5f", " 0.5", "5e",   "5e-"};
    for (size_t i = 0; i < sizeof wrong_floats / sizeof *wrong_floats; i++) {
        char flag[60];
        snprintf(flag, sizeof flag, "TOWPATH_MEMORY_FRACTION=%s", wrong_floats[i]);
        refused("--model m", flag, wrong_floats[i], "a number, 0.01 to 1");
    }
    assert_int_equal(parse("--model m --memory-fraction 5e-1", NULL), 0);
    assert_true(got.fraction == 0.5);
    refused("--model m --max-body-bytes 08M", NULL, "'08M'", "bytes like");
    refused("--model m --max-body-bytes +8M", NULL, "'+8M'", "bytes like");
    refused("--model m --http a:08000", NULL, "'a:08000'", "ADDR:PORT");
    assert_int_equal(parse("--model m --http a:0", NULL), 0);
}

static void test_tow_opt__a_password_in_a_url_is_refused_and_not_repeated(void **state)
{
    (void)state;
    refused("--model m --join tcp://me:sesame@host:1", NULL, "--join", "user or password");
    assert_null(strstr(err.msg, "sesame"));
}

static void test_tow_opt__help_and_check_config_say_so(void **state)
{
    (void)state;
    assert_int_equal(parse("--help", NULL), 0); /* without the required one */
    assert_int_equal(what, TOW_OPTS_HELP);
    static const char *const wrong[] = {"TOWPATH_NONSENSE=1", "TOWPATH_MAX_QUEUED=x",
                                        "TOWPATH_CONFIG=/nowhere"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(parse("--help", wrong[i]), 0);
        assert_int_equal(what, TOW_OPTS_HELP);
        assert_int_equal(parse("--version", wrong[i]), 0);
        assert_int_equal(what, TOW_OPTS_VERSION);
        assert_int_equal(parse("--model m", wrong[i]), TOW_ECONFIG);
    }
    assert_int_equal(parse("--model m --check-config", NULL), 0);
    assert_int_equal(what, TOW_OPTS_CHECK);
    refused("--check-config --model m --max-queued 0", NULL, "--max-queued", "1 to 4096");
    struct tow_buf b;
    tow_buf_init(&b, 0);
    tow_opts_help(&spec, &b);
    for (size_t i = 0; i < spec.n; i++) {
        char flag[80];
        snprintf(flag, sizeof flag, "  --%s", table[i].name);
        assert_non_null(strstr(b.data, flag));
    }
    assert_non_null(strstr(b.data, "1 to 4096 requests; default 64"));
    assert_non_null(strstr(b.data, "all cores"));
    assert_non_null(strstr(b.data, "required"));
    tow_buf_fini(&b);
}

static void test_tow_secret__mode_and_content_are_checked(void **state)
{
    (void)state;
    struct tow_buf b;
    tow_buf_init(&b, 0);
    write_config("sesame\n");
    assert_int_equal(chmod(config_path, 0600), 0);
    assert_int_equal(tow_secret_read(config_path, "--api-key-file", 100, &b, &err), 0);
    assert_string_equal(b.data, "sesame");
    static const mode_t wide[] = {0644, 0604, 0660, 0620, 0601};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        assert_int_equal(chmod(config_path, wide[i]), 0);
        assert_int_equal(tow_secret_read(config_path, "--api-key-file", 100, &b, &err),
                         TOW_ECONFIG);
        assert_non_null(strstr(err.msg, "0640 or tighter"));
        assert_null(strstr(err.msg, "sesame"));
    }
    assert_int_equal(chmod(config_path, 0640), 0);
    assert_int_equal(tow_secret_read(config_path, "--api-key-file", 100, &b, &err), 0);
    assert_int_equal(chmod(config_path, 0600), 0);
    assert_int_equal(tow_secret_read(config_path, "--api-key-file", 3, &b, &err), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "larger than 3 bytes"));
    write_config("\n");
    assert_int_equal(tow_secret_read(config_path, "--api-key-file", 100, &b, &err), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "empty"));
    for (int at = 0; at < 3; at += 2) { /* a C string of it would be shorter, or empty */
        FILE *f = fopen(config_path, "w");
        fwrite(at ? "ab\0cd" : "\0bcde", 1, 5, f);
        fclose(f);
        assert_int_equal(tow_secret_read(config_path, "--join-token-file", 100, &b, &err),
                         TOW_ECONFIG);
        assert_non_null(
            strstr(err.msg, at ? "holds a zero byte, at 2" : "holds a zero byte, at 0"));
    }
    assert_int_equal(tow_secret_read("/tmp", "--api-key-file", 100, &b, &err), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "--api-key-file"));
    tow_buf_fini(&b);
}

static int setup(void **state)
{
    (void)state;
    int fd = mkstemp(config_path);
    if (fd >= 0) close(fd);
    return fd < 0;
}

static int teardown(void **state)
{
    (void)state;
    tow_opts_free(opts);
    return unlink(config_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tow_opt__defaults_of_every_type),
        cmocka_unit_test(test_tow_opt__flags_of_every_type_in_both_forms),
        cmocka_unit_test(test_tow_opt__flag_wins_over_environment_over_file),
        cmocka_unit_test(test_tow_opt__unknown_names_are_errors_everywhere),
        cmocka_unit_test(test_tow_opt__values_out_of_range_name_flag_value_and_range),
        cmocka_unit_test(test_tow_opt__numbers_have_one_spelling),
        cmocka_unit_test(test_tow_opt__a_password_in_a_url_is_refused_and_not_repeated),
        cmocka_unit_test(test_tow_opt__help_and_check_config_say_so),
        cmocka_unit_test(test_tow_secret__mode_and_content_are_checked),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
