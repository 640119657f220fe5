/* ctl/needle, needle_results, needle_report, ask, verify: what needs no server. */
#include "tests/support/check.h"

#include "common/base/err.h"
#include "common/text/json.h"
#include "deploy/ctl/needle_report.h"
#include "deploy/ctl/needle_results.h"
#include "deploy/ctl/verify.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------------ axes and cells */

static void test_ctl_needle__axis_reads_lists_and_names_what_is_wrong(void **state)
{
    (void)state;
    int64_t v[CTL_AXIS_MAX];
    int n;
    struct tow_err err = {0};
    assert_int_equal(ctl_axis_parse(CTL_AXIS_LENGTH, "1M,2m", v, &n, &err), 0);
    assert_true(n == 2 && v[0] == 1 << 20 && v[1] == 2 << 20);
    assert_int_equal(ctl_axis_parse(CTL_AXIS_LENGTH, "64,4K,16384", v, &n, &err), 0);
    assert_int_equal(n, 3);
    assert_int_equal(v[1], 4096);
    assert_int_equal(ctl_axis_parse(CTL_AXIS_TOPK, "default,8", v, &n, &err), 0);
    assert_int_equal(v[0], 0);
    assert_int_equal(ctl_axis_parse(CTL_AXIS_FILLER, "logs,words", v, &n, &err), 0);
    assert_int_equal(v[0], CTL_FILL_LOGS);
    static const struct {
        enum ctl_axis axis;
        const char *list, *says;
    } wrong[] = {
        {CTL_AXIS_LENGTH, "63", "--lengths: '63'"},
        {CTL_AXIS_LENGTH, "", "--lengths: ''"},
        {CTL_AXIS_LENGTH, "64,", "--lengths: ''"},
        {CTL_AXIS_LENGTH, "64, 65", "--lengths: ' 65'"},
        {CTL_AXIS_LENGTH, "9999999999", "--lengths: '9999999999'"},
        {CTL_AXIS_DEPTH, "101", "percent, 0 to 100"},
        {CTL_AXIS_DEPTH, "5,5", "--depths: '5' stands twice"},
        {CTL_AXIS_FILLER, "log", "one of words, prose"},
        {CTL_AXIS_KEYS, "f32", "one of own, fp4"},
        {CTL_AXIS_TOPK, "0", "default, or entries"},
        {CTL_AXIS_TOPK, "4097", "default, or entries"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(ctl_axis_parse(wrong[i].axis, wrong[i].list, v, &n, &err), TOW_ECONFIG);
        if (!strstr(err.msg, wrong[i].says)) fail_msg("'%s': %s", wrong[i].list, err.msg);
    }
    struct tow_buf many;
    tow_buf_init(&many, 0);
    for (int i = 0; i <= CTL_AXIS_MAX; i++) tow_buf_printf(&many, "%s%d", i ? "," : "", 64 + i);
    assert_int_equal(ctl_axis_parse(CTL_AXIS_LENGTH, many.data, v, &n, &err), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "more than 64 values"));
    tow_buf_fini(&many);
}

static const struct ctl_grid grid = {.lengths = {1024, 4096},
                                     .n_lengths = 2,
                                     .depths = {0, 50, 100},
                                     .n_depths = 3,
                                     .fillers = {CTL_FILL_LOGS, CTL_FILL_CODE},
                                     .n_fillers = 2,
                                     .keys = {CTL_KEYS_FP4, CTL_KEYS_BF16},
                                     .n_keys = 2,
                                     .topks = {0, 64},
                                     .n_topks = 2,
                                     .n_reps = 3};

static void test_ctl_needle__grid_has_each_cell_once_and_prints_as_it_parses(void **state)
{
    (void)state;
    const size_t n = ctl_grid_size(&grid);
    assert_int_equal(n, 2 * 3 * 2 * 2 * 2 * 3);
    struct tow_buf b;
    tow_buf_init(&b, 0);
    for (size_t i = 0; i < n; i++) {
        struct ctl_cell c = ctl_grid_at(&grid, i), back;
        for (size_t k = 0; k < i; k++) {
            struct ctl_cell other = ctl_grid_at(&grid, k);
            assert_false(ctl_cell_same(&c, &other));
        }
        tow_buf_clear(&b);
        ctl_cell_put(&b, &c);
        assert_int_equal(ctl_cell_parse(b.data, &back, NULL), 0);
        assert_true(ctl_cell_same(&c, &back));
    }
    /* keys change once only: another type opens the model anew */
    assert_int_equal(ctl_grid_at(&grid, n / 2 - 1).keys, CTL_KEYS_FP4);
    assert_int_equal(ctl_grid_at(&grid, n / 2).keys, CTL_KEYS_BF16);
    static const char *const wrong[] = {"",
                                        "1024",
                                        "1024,0,logs,0,own",
                                        "1024,0,logs,0,own,8,",
                                        "1024,0,logs,-1,own,8",
                                        "1024,0,logs,0,own,x",
                                        "1024,0,1,0,own,8"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct tow_err err = {0};
        struct ctl_cell c;
        assert_int_equal(ctl_cell_parse(wrong[i], &c, &err), TOW_ECONFIG);
        assert_non_null(strstr(err.msg, "LENGTH,DEPTH,FILLER,REP,KEYS,TOPK"));
    }
    struct ctl_cell c;
    struct tow_err err = {0};
    assert_int_equal(ctl_cell_parse("1024,0,foo,0,own,1", &c, &err), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "FILLER 'foo' is not right; expected one of words"));
    tow_buf_fini(&b);
}

static void test_ctl_needle__seed_is_of_the_text_only(void **state)
{
    (void)state;
    const struct ctl_cell a = {4096, 50, CTL_FILL_LOGS, 0, CTL_KEYS_FP4, 8};
    struct ctl_cell b = a;
    b.keys = CTL_KEYS_BF16;
    b.topk = 512;
    assert_int_equal(ctl_cell_seed(1, &a), ctl_cell_seed(1, &b));
    /* known: a cell of an old result file must still make its text */
    assert_int_equal(ctl_cell_seed(1, &a), UINT64_C(0xce739d26bb1b657f));
    assert_int_not_equal(ctl_cell_seed(1, &a), ctl_cell_seed(2, &a));
    b = a;
    b.rep = 1;
    assert_int_not_equal(ctl_cell_seed(1, &a), ctl_cell_seed(1, &b));
    b = a;
    b.depth = 51;
    assert_int_not_equal(ctl_cell_seed(1, &a), ctl_cell_seed(1, &b));
    b = a;
    b.filler = CTL_FILL_CODE;
    assert_int_not_equal(ctl_cell_seed(1, &a), ctl_cell_seed(1, &b));
    b = a;
    b.length = 4097;
    assert_int_not_equal(ctl_cell_seed(1, &a), ctl_cell_seed(1, &b));
}

/* ------------------------------------------------------------------ records and their file */

static const struct ctl_texts texts = {.seed = 5, .hard = {.decoys = 2}};

static struct ctl_record record_of(struct ctl_cell c, bool found, uint32_t rank)
{
    struct ctl_record r = {.cell = c,
                           .texts = texts,
                           .found = found,
                           .prompt_tokens = c.length,
                           .finish = "stop",
                           .expect = "tk-1",
                           .answer = "is <\"tk-1\"> & more\n\x1b[2J",
                           .seconds = 1.5};
    if (rank) {
        const struct text_verdict_row rows[] = {
            {.step = 0, .layer = 4, .topk = 8, .rank = rank, .shadow = {1, rank, rank + 1}},
            {.step = 1, .layer = 2, .topk = 8, .rank = rank + 200, .shadow = {0}},
        };
        ctl_ranks_judge(&r.ranks, rows, 2, found);
    }
    return r;
}

static void assert_same(const struct ctl_record *a, const struct ctl_record *b)
{
    struct tow_buf x, y;
    tow_buf_init(&x, 0);
    tow_buf_init(&y, 0);
    ctl_record_put(&x, a);
    ctl_record_put(&y, b);
    assert_string_equal(x.data, y.data);
    tow_buf_fini(&x);
    tow_buf_fini(&y);
}

static void test_ctl_needle_results__record_reads_back(void **state)
{
    (void)state;
    const struct ctl_cell c = {4096, 50, CTL_FILL_LOGS, 2, CTL_KEYS_FP4, 8};
    for (uint32_t rank = 0; rank < 60; rank += 9)
        for (int found = 0; found < 2; found++) {
            struct ctl_record r = record_of(c, found, rank), back;
            struct tow_err err = {0};
            struct tow_buf line;
            tow_buf_init(&line, 0);
            ctl_record_put(&line, &r);
            assert_null(strchr(line.data, '\n'));
            if (ctl_record_parse(&back, line.data, line.len, &err) < 0) fail_msg("%s", err.msg);
            assert_same(&r, &back);
            assert_int_equal(back.ranks.captured, rank > 0);
            tow_buf_fini(&line);
        }
}

static void test_ctl_needle_results__long_answer_is_cut_between_characters(void **state)
{
    (void)state;
    char to[8];
    ctl_copy_text(to, sizeof to, "1234567");
    assert_string_equal(to, "1234567");
    ctl_copy_text(to, sizeof to, "123456é");
    assert_string_equal(to, "123456");
    ctl_copy_text(to, sizeof to, "12345éx");
    assert_string_equal(to, "12345é");
    ctl_copy_text(to, sizeof to, "1234é世");
    assert_string_equal(to, "1234é");
}

static void test_ctl_needle_results__the_default_topk_is_null_and_was_0(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct ctl_record r;
        struct tow_err err = {0};
        struct tow_buf text;
        tow_buf_init(&text, 0);
        tow_buf_printf(&text,
                       "{\"length\": 64, \"depth\": 0, \"filler\": \"logs\", \"rep\": 0, "
                       "\"keys\": \"own\", \"topk\": %s, \"seed\": 1, \"found\": true}",
                       i ? "0" : "null");
        assert_int_equal(ctl_record_parse(&r, text.data, text.len, &err), 0);
        assert_int_equal(r.cell.topk, 0);
        tow_buf_clear(&text);
        ctl_record_put(&text, &r);
        assert_non_null(strstr(text.data, "\"topk\": null, "));
        tow_buf_fini(&text);
    }
}

static void test_ctl_needle_results__what_is_no_record_is_refused(void **state)
{
    (void)state;
    static const char *const wrong[] = {
        "[]",
        "{",
        "{\"length\": 64}",
        "{\"length\": 64, \"depth\": 0, \"filler\": \"logs\", \"rep\": 0, \"keys\": \"own\", "
        "\"seed\": 1, \"found\": true}",
        "{\"length\": 0, \"depth\": 0, \"filler\": \"logs\", \"rep\": 0, \"keys\": \"own\", "
        "\"topk\": "
        "0, \"seed\": 1, \"found\": true}",
        "{\"length\": 64, \"depth\": 0, \"filler\": \"log\", \"rep\": 0, \"keys\": \"own\", "
        "\"topk\": "
        "0, \"seed\": 1, \"found\": true}",
        "{\"length\": 64, \"depth\": 0, \"filler\": \"logs\", \"rep\": 0, \"keys\": \"own\", "
        "\"topk\": "
        "0, \"seed\": 1, \"found\": 1}",
        "{\"length\": 64, \"depth\": 0, \"filler\": \"logs\", \"rep\": 0, \"keys\": \"own\", "
        "\"topk\": "
        "0, \"seed\": 1, \"found\": true, \"verdict\": \"fine\"}",
        "{\"length\": 64, \"depth\": 0, \"filler\": \"logs\", \"rep\": 0, \"keys\": \"own\", "
        "\"topk\": "
        "0, \"seed\": 1, \"found\": true, \"verdict\": \"selected\", \"layers\": [[1]]}",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct ctl_record r;
        struct tow_err err = {0};
        if (ctl_record_parse(&r, wrong[i], strlen(wrong[i]), &err) == 0)
            fail_msg("taken: %s", wrong[i]);
        assert_true(err.msg[0]);
    }
}

/* A file in a folder of its own. */
static char folder[64], file[96];

static int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/towpath-needle-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(file, sizeof file, "%s/results.jsonl", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(file);
    return rmdir(folder);
}

static void put_in_file(const char *text, size_t n)
{
    FILE *f = fopen(file, "a");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void test_ctl_needle_results__resume_goes_on_after_a_cut_line(void **state)
{
    (void)state;
    struct ctl_results r;
    struct tow_err err = {0};
    const struct ctl_cell one = {1024, 0, CTL_FILL_LOGS, 0, CTL_KEYS_OWN, 0},
                          two = {4096, 0, CTL_FILL_LOGS, 0, CTL_KEYS_OWN, 0};
    const struct ctl_texts other = {.seed = 5};
    const struct ctl_record a = record_of(one, true, 3), b = record_of(two, false, 40);

    assert_int_equal(ctl_results_open(&r, file, false, &err), 0);
    assert_int_equal(ctl_results_add(&r, &a, &err), 0);
    ctl_results_close(&r);
    assert_int_equal(ctl_results_open(&r, file, false, &err), TOW_ECONFIG);
    assert_non_null(strstr(err.msg, "--resume"));
    ctl_results_close(&r);

    /* the begin of b, as far as each of its bytes: a stays, b is run again */
    struct tow_buf line;
    tow_buf_init(&line, 0);
    ctl_record_put(&line, &b);
    for (size_t cut = 0; cut <= line.len; cut += 17) {
        put_in_file(line.data, cut);
        if (ctl_results_open(&r, file, true, &err) < 0) fail_msg("%s", err.msg);
        assert_int_equal(r.n, 1);
        assert_same(ctl_results_find(&r, &one, &texts), &a);
        assert_null(ctl_results_find(&r, &two, &texts));
        assert_null(ctl_results_find(&r, &one, &other)); /* another text */
        ctl_results_close(&r);
    }
    put_in_file(line.data, 30);
    assert_int_equal(ctl_results_open(&r, file, true, &err), 0);
    assert_int_equal(ctl_results_add(&r, &b, &err), 0);
    ctl_results_close(&r);
    assert_int_equal(ctl_results_open(&r, file, true, &err), 0);
    assert_int_equal(r.n, 2);
    assert_same(ctl_results_find(&r, &two, &texts), &b);
    ctl_results_close(&r);

    put_in_file("{}\n", 3);
    assert_int_equal(ctl_results_open(&r, file, true, &err), TOW_EINVAL);
    assert_non_null(strstr(err.msg, "line 3"));
    ctl_results_close(&r);
    tow_buf_fini(&line);
}

/* ------------------------------------------------------------------ reports */

/* Of every setting: 1024 at depth 0 all found, at 50 one of three, at 100 none;
 * 4096 was not run. */
static void fill(struct ctl_results *r)
{
    assert_int_equal(ctl_results_open(r, NULL, false, NULL), 0);
    for (size_t i = 0; i < ctl_grid_size(&grid); i++) {
        struct ctl_cell c = ctl_grid_at(&grid, i);
        if (c.length != 1024) continue;
        bool found = c.depth == 0 || (c.depth == 50 && c.rep == 1);
        struct ctl_record rec = record_of(c, found, 5 + 10 * (uint32_t)(c.rep + c.depth / 50));
        assert_int_equal(ctl_results_add(r, &rec, NULL), 0);
    }
}

static struct ctl_report report_of(const struct ctl_results *results)
{
    return (struct ctl_report){.grid = &grid,
                               .results = results,
                               .texts = texts,
                               .shadow = 1u << TEXT_BF16 | 1u << TEXT_FP8,
                               .title = "a <b> & \"c\""};
}

static void test_ctl_needle_report__field_counts_and_takes_the_median(void **state)
{
    (void)state;
    struct ctl_results results;
    fill(&results);
    const struct ctl_report r = report_of(&results);
    struct ctl_cell c = {1024, 50, CTL_FILL_CODE, 0, CTL_KEYS_BF16, 64};
    struct ctl_field f = ctl_report_field(&r, &c, -1);
    assert_int_equal(f.n, 3);
    assert_int_equal(f.hits, 1);
    assert_int_equal(f.rank, 25); /* of 15, 25, 35 */
    f = ctl_report_field(&r, &c, TEXT_BF16);
    assert_int_equal(f.n, 3);
    assert_int_equal(f.hits, 3);
    assert_int_equal(f.rank, 1);
    f = ctl_report_field(&r, &c, TEXT_FP8);
    assert_int_equal(f.hits, 0); /* 15 and more against top-k 8 */
    c.length = 4096;
    assert_int_equal(ctl_report_field(&r, &c, -1).n, 0);
    ctl_results_close(&results);
}

static void test_ctl_needle_report__table_has_panels_and_misses(void **state)
{
    (void)state;
    struct ctl_results results;
    struct tow_buf out;
    fill(&results);
    tow_buf_init(&out, 0);
    const struct ctl_report r = report_of(&results);
    ctl_report_table(&r, &out);
    assert_false(tow_buf_failed(&out));
    assert_non_null(strstr(out.data, "code, keys bf16, top-k 64\n"));
    assert_non_null(
        strstr(out.data, "logs, keys fp4, shadow bf16, top-k default: would be selected"));
    assert_non_null(strstr(out.data, "1/3 rank 25"));
    assert_non_null(strstr(out.data, "layer 2: 225, layer 4: 25\n"));
    assert_non_null(strstr(out.data, "missed 1024,100,code,2,bf16,64  key_precision: rank 45"));
    assert_non_null(strstr(out.data, "found 32 of 72\n"));
    assert_null(strchr(out.data, '\x1b')); /* an answer must not drive the terminal */
    tow_buf_fini(&out);
    ctl_results_close(&results);
}

static void test_ctl_needle_report__json_parses_and_holds_all(void **state)
{
    (void)state;
    struct ctl_results results;
    struct tow_buf out;
    struct json *root = NULL;
    struct tow_err err = {0};
    fill(&results);
    tow_buf_init(&out, 0);
    const struct ctl_report r = report_of(&results);
    ctl_report_json(&r, &out);
    if (json_parse(&root, out.data, out.len, NULL, &err) < 0) fail_msg("%s", err.msg);
    assert_int_equal(json_size(json_find(root, "panels")), 8 * 3);
    assert_int_equal(json_size(json_find(root, "cells")), 72);
    assert_string_equal(json_string(json_find(root, "title"), NULL), r.title);
    int64_t n = 0, ran = 0;
    JSON_EACH(p, json_find(root, "panels"))
    {
        JSON_EACH(f, json_find(p, "fields"))
        {
            assert_true(json_int(json_find(f, "n"), &n));
            ran += n;
        }
    }
    assert_int_equal(ran, 72 * 3);
    json_free(root);
    tow_buf_fini(&out);
    ctl_results_close(&results);
}

/* Enough of XML to see that ours is well-formed: tags nest, attributes are quoted, and no text has
 * a bare '<' or '&'. Returns the number of elements. */
static int check_xml(const char *p)
{
    char stack[32][16];
    int depth = 0, n = 0;
    while (*p) {
        if (*p == '&') {
            size_t len = strcspn(p, ";");
            assert_true(p[len] == ';' && len < 7);
            p += len + 1;
        } else if (!strncmp(p, "<?xml", 5)) {
            p = strstr(p, "?>") + 2;
        } else if (*p == '<') {
            bool closing = p[1] == '/';
            const char *name = p + 1 + closing;
            size_t len = strcspn(name, " />");
            assert_true(len > 0 && len < sizeof *stack);
            p = name + len;
            while (*p == ' ') {
                p += strcspn(p, "=");
                assert_true(p[0] == '=' && p[1] == '"');
                size_t value = strcspn(p + 2, "\"<");
                assert_int_equal(p[2 + value], '"');
                p += 2 + value + 1;
            }
            bool empty = *p == '/';
            p += empty;
            assert_int_equal(*p++, '>');
            if (closing) {
                assert_true(depth > 0);
                depth--;
                assert_true(strlen(stack[depth]) == len && !memcmp(stack[depth], name, len));
            } else {
                n++;
                if (!empty) {
                    assert_true(depth < 32);
                    snprintf(stack[depth++], sizeof *stack, "%.*s", (int)len, name);
                }
            }
        } else {
            assert_true(*p != '>' && ((unsigned char)*p >= ' ' || *p == '\n'));
            p++;
        }
    }
    assert_int_equal(depth, 0);
    return n;
}

static void test_ctl_needle_report__svg_is_well_formed(void **state)
{
    (void)state;
    struct ctl_results results;
    struct tow_buf out;
    fill(&results);
    tow_buf_init(&out, 0);
    const struct ctl_report r = report_of(&results);
    ctl_report_svg(&r, &out);
    assert_false(tow_buf_failed(&out));
    /* a rectangle for each field at least */
    assert_true(check_xml(out.data) > 24 * 6);
    assert_non_null(strstr(out.data, ">a &lt;b&gt; &amp; &quot;c&quot;<"));
    assert_non_null(strstr(out.data, ">1/3<"));
    assert_non_null(strstr(out.data, ">rank 25<"));
    assert_non_null(strstr(out.data, ">all found<"));
    tow_buf_clear(&out);
    ctl_put_xml(&out, "\x01'\x7fü");
    assert_string_equal(out.data, "?&#39;?ü");
    tow_buf_fini(&out);
    ctl_results_close(&results);
}

/* ------------------------------------------------------------------ request and answer */

static void test_ctl_ask__request_is_json_with_what_was_asked(void **state)
{
    (void)state;
    const struct ctl_ask q = {.messages = "[{\"role\": \"user\", \"content\": \"x\"}]",
                              .max_tokens = 9,
                              .topk = 128,
                              .expect = "a\"b",
                              .shadow = 1u << TEXT_FP8};
    struct tow_buf b;
    struct json *root = NULL;
    int64_t v;
    tow_buf_init(&b, 0);
    ctl_ask_put(&q, &b);
    assert_int_equal(json_parse(&root, b.data, b.len, NULL, NULL), 0);
    assert_true(json_int(json_find(root, "index_topk"), &v) && v == 128);
    const struct json *capture = json_find(root, "index_capture");
    assert_string_equal(json_string(json_find(json_find(capture, "spans"), "text"), NULL), "a\"b");
    assert_string_equal(json_string(json_find(capture, "expect"), NULL), "a\"b");
    assert_string_equal(json_string(json_item(json_find(capture, "shadow"), 0), NULL), "fp8");
    assert_null(json_item(json_find(capture, "shadow"), 1));
    assert_null(json_find(root, "tools"));
    json_free(root);
    tow_buf_fini(&b);
}

static int parse_answer(struct ctl_answer *a, const char *text, const char *expect,
                        struct tow_err *err)
{
    struct json *root = NULL;
    ctl_answer_init(a);
    assert_int_equal(json_parse(&root, text, strlen(text), NULL, NULL), 0);
    int rc = ctl_answer_parse(a, root, expect, err);
    json_free(root);
    return rc;
}

static void test_ctl_ask__answer_with_a_capture(void **state)
{
    (void)state;
    struct ctl_answer a;
    const char *text =
        "{\"choices\": [{\"message\": {\"content\": \"it is no\"}, \"finish_reason\": \"stop\"}], "
        "\"usage\": {\"prompt_tokens\": 70, \"completion_tokens\": 4}, \"towpath\": "
        "{\"index_capture\": {\"steps\": [{\"step\": 0, \"layers\": [{\"layer\": 4, \"topk\": 8, "
        "\"entries\": [{\"entry\": 5, \"rank\": 30}, {\"entry\": 6, \"rank\": 12}], \"shadow\": "
        "{\"bf16\": {\"entries\": [{\"entry\": 5, \"rank\": 7}]}}}, {\"layer\": 2, \"topk\": 8, "
        "\"entries\": []}]}, {\"step\": 1, \"layers\": [{\"layer\": 4, \"topk\": 8, \"entries\": "
        "[{\"entry\": 5, \"rank\": 90}]}]}]}}}";
    assert_int_equal(parse_answer(&a, text, "yes", NULL), 0);
    assert_int_equal(a.prompt_tokens, 70);
    assert_string_equal(a.finish, "stop");
    assert_true(a.ranks.captured);
    assert_int_equal(a.ranks.verdict.kind, TEXT_VERDICT_KEY_PRECISION);
    assert_int_equal(a.ranks.verdict.rank, 12);
    assert_int_equal(a.ranks.shadow[TEXT_BF16], 7);
    assert_int_equal(a.ranks.n_layers, 2);
    assert_int_equal(a.ranks.layers[0].layer, 2);
    assert_int_equal(a.ranks.layers[0].rank, 0); /* sees none */
    ctl_answer_fini(&a);
}

static void test_ctl_ask__answer_that_is_none_is_refused(void **state)
{
    (void)state;
    static const char *const wrong[] = {
        "{}",
        "{\"choices\": []}",
        "{\"choices\": [{\"message\": \"x\"}]}",
        "{\"choices\": [{\"message\": {}}], \"towpath\": {\"index_capture\": {\"steps\": "
        "[{\"step\": 0, \"layers\": [{\"layer\": 4}]}]}}}",
        "{\"choices\": [{\"message\": {}}], \"towpath\": {\"index_capture\": {\"steps\": "
        "[{\"layers\": [{\"layer\": 4, \"topk\": 8}]}]}}}",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct ctl_answer a;
        struct tow_err err = {0};
        assert_int_equal(parse_answer(&a, wrong[i], "x", &err), TOW_EWIRE);
        assert_true(err.msg[0]);
        ctl_answer_fini(&a);
    }
}

/* Lines and tabs stay; what a terminal obeys or writes backwards for is shown. */
static void test_ctl_put_clean__foreign_text_commands_no_terminal(void **state)
{
    static const char foreign[] = "a\n\tb\x1b\x7f\xc2\x9b\xe2\x80\xae\xe2\x81\xa6\xff\xc3\xa9\xc2";
    struct tow_buf out;
    (void)state;
    tow_buf_init(&out, 0);
    ctl_put_clean(&out, foreign, sizeof foreign - 1);
    assert_string_equal(out.data, "a\n\tb\\x1b\\x7f\\xc2\\x9b\\xe2\\x80\\xae\\xe2\\x81\\xa6\\xff"
                                  "\xc3\xa9\\xc2");
    tow_buf_fini(&out);
}

static void test_ctl_verify__reports_say_pass_and_fail(void **state)
{
    (void)state;
    struct ctl_check checks[2] = {
        {.id = CTL_CHECK_SECRET, .state = CTL_PASSED, .turns = 1, .expect = "tk"},
        {.id = CTL_CHECK_STRUCTURED,
         .state = CTL_FAILED,
         .turns = 1,
         .expect = "v",
         .why = "the answer lacks \"v\""}};
    struct tow_buf out;
    struct json *root = NULL;
    bool pass = true;
    tow_buf_init(&out, 0);
    for (int i = 0; i < 2; i++) {
        ctl_answer_init(&checks[i].answer);
        tow_buf_puts(&checks[i].answer.content, "one\ntwo\x1b[2J");
        snprintf(checks[i].answer.finish, sizeof checks[i].answer.finish, "stop");
        checks[i].answer.prompt_tokens = 8192;
    }
    const struct text_verdict_row row = {.layer = 4, .topk = 8, .rank = 20};
    ctl_ranks_judge(&checks[1].answer.ranks, &row, 1, false);
    ctl_verify_print(checks, 2, &out);
    assert_non_null(strstr(
        out.data, "PASS  secret       8192 prompt tokens, stop, 1 request: one two\\x1b[2J\n"));
    assert_non_null(strstr(out.data, "FAIL  structured"));
    assert_non_null(strstr(out.data, "the answer lacks \"v\"\n"));
    assert_non_null(strstr(out.data, "verdict coverage: "));
    assert_non_null(strstr(out.data, "1 of 2 checks passed\n"));
    tow_buf_clear(&out);
    ctl_verify_json(checks, 2, &out);
    assert_int_equal(json_parse(&root, out.data, out.len, NULL, NULL), 0);
    assert_true(json_bool(json_find(root, "pass"), &pass) && !pass);
    const struct json *second = json_item(json_find(root, "checks"), 1);
    assert_string_equal(json_string(json_find(second, "verdict"), NULL), "coverage");
    assert_string_equal(json_string(json_find(second, "why"), NULL), "the answer lacks \"v\"");
    json_free(root);
    /* One that could not be made is neither. */
    checks[1].state = CTL_NOT_MADE;
    snprintf(checks[1].why, sizeof checks[1].why, "503: \x1b[2Jfull");
    tow_buf_clear(&out);
    ctl_verify_print(checks, 2, &out);
    assert_non_null(strstr(out.data, "----  structured not made: 503: \\x1b[2Jfull\n"));
    assert_non_null(strstr(out.data, "1 of 2 checks passed, 1 could not be made, 0 not run\n"));
    tow_buf_clear(&out);
    ctl_verify_json(checks, 2, &out);
    assert_int_equal(json_parse(&root, out.data, out.len, NULL, NULL), 0);
    second = json_item(json_find(root, "checks"), 1);
    assert_int_equal(json_type(json_find(second, "pass")), JSON_NULL);
    assert_string_equal(json_string(json_find(second, "state"), NULL), "not_made");
    assert_null(json_find(second, "answer"));
    json_free(root);
    for (int i = 0; i < 2; i++) ctl_answer_fini(&checks[i].answer);
    tow_buf_fini(&out);
}

/* ------------------------------------------------------------------ exit statuses */

#define RUN(main, ...)                                                                             \
    main((int)(sizeof((char *[]){__VA_ARGS__}) / sizeof(char *)), (char *[]){__VA_ARGS__, NULL})

static void test_ctl_needle__what_cannot_be_made_exits_2(void **state)
{
    (void)state;
    unsetenv("TOWPATH_URL");
    /* nothing listens on port 1 */
    assert_int_equal(RUN(ctl_verify_main, "verify", "--url", "http://127.0.0.1:1"), 2);
    assert_int_equal(RUN(ctl_verify_main, "verify", "--shadow", "fp5"), 2);
    assert_int_equal(RUN(ctl_verify_main, "verify", "--length", "5"), 2);
    assert_int_equal(RUN(ctl_verify_main, "verify", "--check-config"), 0);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--url", "http://127.0.0.1:1"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--lengths", "1"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--in-process"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--in-process", "--model", "/nowhere"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--keys", "fp8"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--kv-dtype", "fp8", "--check-config"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--threads", "3", "--check-config"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--in-process", "--model", "/nowhere",
                         "--kv-dtype", "bf16", "--threads", "3", "--check-config"),
                     0);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--resume"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--cell", "1,2"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--shadow", "fp8", "--capture", "off"), 2);
    assert_int_equal(RUN(ctl_needle_main, "needle", "--check-config"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ctl_needle__axis_reads_lists_and_names_what_is_wrong),
        cmocka_unit_test(test_ctl_needle__grid_has_each_cell_once_and_prints_as_it_parses),
        cmocka_unit_test(test_ctl_needle__seed_is_of_the_text_only),
        cmocka_unit_test(test_ctl_needle_results__record_reads_back),
        cmocka_unit_test(test_ctl_needle_results__long_answer_is_cut_between_characters),
        cmocka_unit_test(test_ctl_needle_results__the_default_topk_is_null_and_was_0),
        cmocka_unit_test(test_ctl_needle_results__what_is_no_record_is_refused),
        cmocka_unit_test_setup_teardown(test_ctl_needle_results__resume_goes_on_after_a_cut_line,
                                        make_folder, remove_folder),
        cmocka_unit_test(test_ctl_needle_report__field_counts_and_takes_the_median),
        cmocka_unit_test(test_ctl_needle_report__table_has_panels_and_misses),
        cmocka_unit_test(test_ctl_needle_report__json_parses_and_holds_all),
        cmocka_unit_test(test_ctl_needle_report__svg_is_well_formed),
        cmocka_unit_test(test_ctl_ask__request_is_json_with_what_was_asked),
        cmocka_unit_test(test_ctl_ask__answer_with_a_capture),
        cmocka_unit_test(test_ctl_ask__answer_that_is_none_is_refused),
        cmocka_unit_test(test_ctl_put_clean__foreign_text_commands_no_terminal),
        cmocka_unit_test(test_ctl_verify__reports_say_pass_and_fail),
        cmocka_unit_test(test_ctl_needle__what_cannot_be_made_exits_2),
    };
    return cmocka_run_group_tests_name("ctl_needle", tests, NULL, NULL);
}
