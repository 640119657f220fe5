/* Tests of common/model/safetensors.h: every way a file can be wrong, the writer, the guard. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/model/safetensors.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* A file in memory: header text and n zero bytes of data. */
struct file {
    uint8_t *bytes;
    size_t n;
};

static struct file file_of(const char *header, size_t data)
{
    size_t len = strlen(header);
    struct file f = {calloc(1, 8 + len + data + 1), 8 + len + data};
    assert_non_null(f.bytes);
    for (int i = 0; i < 8; i++) f.bytes[i] = (uint8_t)((uint64_t)len >> (8 * i));
    memcpy(f.bytes + 8, header, len);
    return f;
}

static int parse(const char *header, size_t data, struct tow_err *err)
{
    struct file f = file_of(header, data);
    struct model_safetensors *st = NULL;
    int rc = model_safetensors_parse(&st, "x.safetensors", f.bytes, f.n, err);
    model_safetensors_close(st);
    free(f.bytes);
    return rc;
}

static void refused(const char *header, size_t data, const char *part)
{
    struct tow_err err = {0};
    int rc = parse(header, data, &err);
    if (rc == 0) fail_msg("accepted: %s", header);
    if (!strstr(err.msg, part) || !strstr(err.msg, "x.safetensors"))
        fail_msg("%s: message: %s", header, err.msg);
}

static void accepted(const char *header, size_t data)
{
    struct tow_err err = {0};
    if (parse(header, data, &err) != 0) fail_msg("%s: %s", header, err.msg);
}

#define T(name, dtype, shape, offsets)                                                             \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_safetensors__offsets_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    refused("{" T("a", "F32", "[4]", "[0,12]") "}", 12,
            "tensor a: data_offsets span 12 bytes; expected 16");
    refused("{" T("a", "F32", "[4]", "[0,20]") "}", 20, "span 20 bytes; expected 16");
    refused("{" T("a", "F32", "[4]", "[16,0]") "}", 16,
            "tensor a: data_offsets begin 16 lies after end 0");
    refused("{" T("a", "F32", "[4]", "[-16,0]") "}", 16, "tensor a: data_offsets");
    refused("{" T("a", "F32", "[4]", "[16]") "}", 16, "tensor a: data_offsets");
    refused("{" T("a", "F32", "[4]", "[0,16,16]") "}", 16, "tensor a: data_offsets");
    refused("{" T("a", "F32", "[4]", "[0.0,16.0]") "}", 16, "tensor a: data_offsets");
    refused("{" T("a", "F32", "[4]", "[0,\"16\"]") "}", 16, "tensor a: data_offsets");
    refused("{" T("a", "F32", "[4]", "[0,18446744073709551615]") "}", 16, "tensor a: data_offsets");
    refused("{" T("a", "F128", "[4]", "[0,9223372036854775807]") "}", 16, "tensor a ends at byte");
    refused("{" T("a", "F32", "[4294967296,4294967296]", "[0,16]") "}", 16, "passes 64 bits");
    refused("{" T("a", "F32", "[4611686018427387904]", "[0,16]") "}", 16, "passes 64 bits");
    refused("{" T("a", "F32", "[-1]", "[0,4]") "}", 4, "tensor a: shape[0]");
    refused("{" T("a", "F32", "[1.5]", "[0,4]") "}", 4, "tensor a: shape[0]");
    refused("{" T("a", "F32", "{}", "[0,4]") "}", 4, "tensor a: shape is an object");
    refused("{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "more than 8 dimensions");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets is missing");
    refused("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape is missing");
    refused("{\"a\":7}", 0, "tensor a is a number");
    refused("{" T("a", "F4", "[3]", "[0,2]") "}", 2, "ends inside a byte");
}

static void test_safetensors__empty_and_scalar_tensors_are_legal(void **state)
{
    (void)state;
    accepted("{" T("a", "F32", "[0,7]", "[0,0]") "," T("b", "F32", "[]", "[0,4]") "}", 4);
    accepted("{" T("a", "F32", "[9223372036854775807,9223372036854775807,0]", "[0,0]") "}", 0);
    accepted("{" T("b", "F4", "[2,2]", "[0,2]") "}   ", 2);
    accepted("{}", 0);
}

static void test_safetensors__overlaps_and_holes_are_refused(void **state)
{
    (void)state;
    refused("{" T("k", "U8", "[8]", "[0,8]") "," T("v", "U8", "[8]", "[0,8]") "}", 8, "overlap");
    refused("{" T("k", "U8", "[8]", "[0,8]") "," T("v", "U8", "[8]", "[7,15]") "}", 15,
            "tensors k and v overlap");
    refused("{" T("k", "U8", "[8]", "[0,8]") "," T("v", "U8", "[8]", "[16,24]") "}", 24,
            "hole of 8 bytes before tensor v");
    refused("{" T("k", "U8", "[8]", "[4,12]") "}", 12, "hole of 4 bytes before tensor k");
    refused("{" T("k", "U8", "[8]", "[0,8]") "}", 9, "1 bytes belong to no tensor");
    refused("{}", 3, "3 bytes belong to no tensor");
    /* Any order of entries is legal. */
    accepted("{" T("v", "U8", "[8]", "[8,16]") "," T("k", "U8", "[8]", "[0,8]") "}", 16);
    /* An empty tensor inside another is not. */
    refused("{" T("k", "U8", "[8]", "[0,8]") "," T("e", "U8", "[0]", "[4,4]") "}", 8, "overlap");
}

static void test_safetensors__a_key_twice_is_refused_by_name(void **state)
{
    (void)state;
    refused("{" T("k", "U8", "[8]", "[0,8]") "," T("k", "U8", "[8]", "[8,16]") "}", 16,
            "duplicate key k");
    refused("{" T("k", "U8", "[8]", "[0,8]") "," T("k", "U8", "[8]", "[0,8]") "}", 8,
            "duplicate key k");
    refused("{\"__metadata__\":{},\"__metadata__\":{}," T("k", "U8", "[8]", "[0,8]") "}", 8,
            "duplicate key __metadata__");
    refused("{" T("k", "U8", "[8]", "[0,8]") "," T("\\u006b", "U8", "[8]", "[8,16]") "}", 16,
            "duplicate key k");
    refused("{\"k\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
            "duplicate key dtype");
}

static void test_safetensors__unknown_types_are_range_checked_all_the_same(void **state)
{
    (void)state;
    static const char *const known[] = {"F8_E4M3", "F8_E8M0", "U8", "I8", "BOOL"};
    static const char *const unknown[] = {"E2M1", "f32", "F128", ""};
    char header[200];
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,4]}}", known[i]);
        accepted(header, 4);
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[5],\"data_offsets\":[0,4]}}", known[i]);
        refused(header, 4, "expected 5");
    }
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,4]}}", unknown[i]);
        accepted(header, 4);
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,5]}}", unknown[i]);
        refused(header, 4, "tensor a ends at byte");
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[9223372036854775808,"
                 "9223372036854775808]}}",
                 unknown[i]);
        refused(header, 4, "tensor a: data_offsets");
    }
    refused("{\"a\":{\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "tensor a: dtype is missing");
    refused("{\"a\":{\"dtype\":1,\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
            "tensor a: dtype is a number");
}

static void test_safetensors__a_bad_header_is_refused(void **state)
{
    (void)state;
    refused(" {}", 0, "does not begin with '{'");
    refused("{\"a\":", 0, "header");
    refused("{} x", 0, "header");
    refused("{\"__metadata__\":{\"a\":1}}", 0, "__metadata__.a is a number");
    refused("{\"__metadata__\":[]}", 0, "__metadata__ is an array");
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[[[[1]]]],\"data_offsets\":[0,1]}}", 1, "header");
    struct tow_err err = {0};
    struct model_safetensors *st = NULL;
    uint8_t huge[16] = {0, 0, 0, 0, 0, 0, 0, 0x80};
    assert_int_equal(model_safetensors_parse(&st, "x", huge, sizeof huge, &err), TOW_EFORMAT);
    assert_non_null(strstr(err.msg, "header length 9223372036854775808"));
}

static void write_bytes(const char *path, const void *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void test_safetensors__a_cut_or_long_file_is_refused_with_both_sizes(void **state)
{
    (void)state;
    char path[] = "/tmp/towpath-st-XXXXXX";
    assert_true(close(mkstemp(path)) == 0);
    struct file f = file_of("{" T("a", "U8", "[8192]", "[0,8192]") "}", 8192);
    size_t header = f.n - 8192;
    const size_t sizes[] = {f.n - 1, f.n - 4096, header, header - 1, 9, 7, 0, f.n + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct tow_err err = {0};
        struct model_safetensors *st = NULL;
        write_bytes(path, f.bytes, sizes[i]);
        assert_int_equal(model_safetensors_open(&st, path, &err), TOW_EFORMAT);
        assert_null(st);
        char real[32];
        snprintf(real, sizeof real, "%zu", sizes[i]);
        assert_non_null(strstr(err.msg, path));
        assert_non_null(strstr(err.msg, real));
    }
    struct tow_err err = {0};
    struct model_safetensors *st = NULL;
    write_bytes(path, f.bytes, f.n);
    assert_int_equal(model_safetensors_open(&st, path, &err), 0);
    assert_int_equal(model_safetensors_size(st), f.n);
    model_safetensors_close(st);
    assert_int_equal(model_safetensors_open(&st, "/tmp", &err), TOW_EIO);
    assert_int_equal(model_safetensors_open(&st, "/nonexistent/x", &err), TOW_EIO);
    unlink(path);
    free(f.bytes);
}

/* The child maps a file, the file is cut, the child reads: it must name the file and leave with
 * 74. */
static void test_safetensors__a_file_cut_after_open_ends_the_process_with_its_name(void **state)
{
    (void)state;
    char path[] = "/tmp/towpath-st-XXXXXX";
    assert_true(close(mkstemp(path)) == 0);
    enum { DATA = 1 << 16 };
    char text[100];
    snprintf(text, sizeof text, "{" T("a", "U8", "[%d]", "[0,%d]") "}", DATA, DATA);
    struct file f = file_of(text, DATA);
    write_bytes(path, f.bytes, f.n);
    int out[2];
    assert_int_equal(pipe(out), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct model_safetensors *st = NULL;
        dup2(out[1], STDERR_FILENO);
        if (model_weights_guard(NULL) != 0 || model_safetensors_open(&st, path, NULL) != 0)
            _exit(1);
        const struct model_tensor *t = model_safetensors_find(st, "a");
        if (truncate(path, 4096) != 0) _exit(2);
        volatile uint8_t x = ((const volatile uint8_t *)t->data)[DATA - 1];
        (void)x;
        _exit(3);
    }
    close(out[1]);
    char said[1000];
    size_t n = 0;
    for (ssize_t k; n < sizeof said - 1 && (k = read(out[0], said + n, sizeof said - 1 - n)) > 0;)
        n += (size_t)k;
    said[n] = 0;
    close(out[0]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 74);
    assert_non_null(strstr(said, path));
    unlink(path);
    free(f.bytes);
}

static void test_safetensors__what_is_written_reads_back(void **state)
{
    (void)state;
    char path[] = "/tmp/towpath-st-XXXXXX";
    assert_true(close(mkstemp(path)) == 0);
    const float logits[6] = {1, 2, 3, 4, 5, 6};
    const uint16_t hidden[3] = {0x3f80, 0x4000, 0x4040};
    const int32_t scalar = -7;
    struct tow_err err = {0};
    struct model_safetensors_writer *w;
    assert_int_equal(model_safetensors_writer_new(&w, &err), 0);
    assert_int_equal(model_safetensors_writer_meta(w, "mode", "ex\"act", &err), 0);
    assert_int_equal(
        model_safetensors_writer_add(w, "hidden", MODEL_DT_BF16, 1, (int64_t[]){3}, hidden, &err),
        0);
    assert_int_equal(
        model_safetensors_writer_add(w, "logits", MODEL_DT_F32, 2, (int64_t[]){2, 3}, logits, &err),
        0);
    assert_int_equal(model_safetensors_writer_add(w, "one", MODEL_DT_I32, 0, NULL, &scalar, &err),
                     0);
    assert_int_equal(
        model_safetensors_writer_add(w, "none", MODEL_DT_F32, 2, (int64_t[]){0, 5}, NULL, &err), 0);
    assert_int_equal(model_safetensors_writer_write(w, path, &err), 0);

    struct model_safetensors *st = NULL;
    if (model_safetensors_open(&st, path, &err) != 0) fail_msg("%s", err.msg);
    assert_int_equal(model_safetensors_count(st), 4);
    assert_string_equal(model_safetensors_meta(st, "mode"), "ex\"act");
    assert_null(model_safetensors_meta(st, "other"));
    const struct model_tensor *t = model_safetensors_find(st, "logits");
    assert_non_null(t);
    assert_int_equal(t->dtype, MODEL_DT_F32);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dims[1], 3);
    assert_int_equal((uintptr_t)t->data % 4, 0);
    assert_memory_equal(t->data, logits, sizeof logits);
    t = model_safetensors_find(st, "hidden");
    assert_memory_equal(t->data, hidden, sizeof hidden);
    t = model_safetensors_find(st, "one");
    assert_int_equal(t->n_dims, 0);
    assert_memory_equal(t->data, &scalar, sizeof scalar);
    assert_null(model_safetensors_find(st, "two"));
    model_safetensors_close(st);

    assert_int_equal(model_safetensors_writer_add(w, "one", MODEL_DT_I32, 0, NULL, &scalar, &err),
                     0);
    assert_int_equal(model_safetensors_writer_write(w, path, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "tensor one was added twice"));
    model_safetensors_writer_free(w);
    unlink(path);
}

/* Linear time: 80,000 tensors are no matter. A quadratic check would take minutes and meet the
 * runner's limit. */
/* The output of a run for its messages alone: renaming would put a file in the place of the
 * device. */
static void test_safetensors__a_device_is_written_to_and_not_replaced(void **state)
{
    (void)state;
    char dir[] = "/tmp/towpath-writer-XXXXXX", link[64];
    assert_non_null(mkdtemp(dir));
    snprintf(link, sizeof link, "%s/out", dir);
    assert_int_equal(symlink("/dev/null", link), 0);
    struct model_safetensors_writer *w = NULL;
    struct tow_err err = {0};
    const int64_t dims[1] = {1};
    const int32_t one = 1;
    assert_int_equal(model_safetensors_writer_new(&w, &err), 0);
    assert_int_equal(model_safetensors_writer_add(w, "x", MODEL_DT_I32, 1, dims, &one, &err), 0);
    if (model_safetensors_writer_write(w, link, &err) < 0) fail_msg("%s", err.msg);
    struct stat st;
    assert_int_equal(lstat(link, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_int_equal(unlink(link), 0);
    assert_int_equal(symlink("/dev/full", link), 0);
    assert_int_equal(model_safetensors_writer_write(w, link, &err), TOW_EIO);
    assert_int_equal(lstat(link, &st), 0);
    unlink(link);
    rmdir(dir);
    model_safetensors_writer_free(w);
}

static void test_safetensors__many_tensors_are_found(void **state)
{
    (void)state;
    enum { N = 80000 };
    char *header = malloc((size_t)N * 80 + 10), *at = header;
    assert_non_null(header);
    at += sprintf(at, "{");
    for (int i = 0; i < N; i++)
        at += sprintf(at, "%s\"t.%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                      i ? "," : "", i, i, i + 1);
    sprintf(at, "}");
    struct file f = file_of(header, N);
    struct model_safetensors *st = NULL;
    struct tow_err err = {0};
    if (model_safetensors_parse(&st, "many", f.bytes, f.n, &err) != 0) fail_msg("%s", err.msg);
    assert_int_equal(model_safetensors_count(st), N);
    const struct model_tensor *t = model_safetensors_find(st, "t.79999");
    assert_non_null(t);
    assert_ptr_equal(t->data, f.bytes + f.n - 1);
    model_safetensors_close(st);
    free(f.bytes);
    free(header);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_safetensors__offsets_that_do_not_fit_are_refused),
        cmocka_unit_test(test_safetensors__empty_and_scalar_tensors_are_legal),
        cmocka_unit_test(test_safetensors__overlaps_and_holes_are_refused),
        cmocka_unit_test(test_safetensors__a_key_twice_is_refused_by_name),
        cmocka_unit_test(test_safetensors__unknown_types_are_range_checked_all_the_same),
        cmocka_unit_test(test_safetensors__a_bad_header_is_refused),
        cmocka_unit_test(test_safetensors__a_cut_or_long_file_is_refused_with_both_sizes),
        cmocka_unit_test(test_safetensors__a_file_cut_after_open_ends_the_process_with_its_name),
        cmocka_unit_test(test_safetensors__what_is_written_reads_back),
        cmocka_unit_test(test_safetensors__a_device_is_written_to_and_not_replaced),
        cmocka_unit_test(test_safetensors__many_tensors_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
