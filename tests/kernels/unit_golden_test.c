/* tests/kernels/unit_golden_test.c - the ops against the unit goldens: the CPU's in every
 * instruction set here, or those of TOW_TEST_DEVICE. */
#include "tests/support/device.h"
#include "tests/support/golden.h"

#include "common/base/err.h"
#include "kernels/cpu/team.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct kern_dev *devs[KERN_CPU_N_ISA];
static int n_devs;

#define EACH_ISA(s)                                                                                \
    for (int i_ = 0; i_ < n_devs; i_++)                                                            \
        for (struct kern_stream *s = kern_dev_stream(devs[i_]); s; s = NULL)

static const struct kern_ops *ops = &kern_cpu;

/* The device may keep weights by their addresses. */
static void forget(void)
{
    for (int i = 0; i < n_devs; i++) test_forget(devs[i]);
}
static void close_golden(struct golden *g)
{
    forget();
    golden_close(g);
}
static void know(const void *pool, size_t bytes)
{
    for (int i = 0; i < n_devs; i++) test_know(devs[i], pool, bytes);
}

/* README's bound for everything that is not a code or a rounded value. */
static void check_close(const char *what, const float *a, const float *b, int64_t n)
{
    double rel = golden_rel(a, b, n), max = golden_max_diff(a, b, n);
    if (!(rel <= 1e-5) || !(max <= 1e-5 * golden_max_abs(b, n)))
        fail_msg("%s: rel %g max %g of %g", what, rel, max, golden_max_abs(b, n));
}
static void check_equal(const char *what, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i] && !(a[i] != a[i] && b[i] != b[i]))
            fail_msg("%s[%lld]: %a, golden %a", what, (long long)i, (double)a[i], (double)b[i]);
}
static void to_bf16(const float *x, uint16_t *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = kern_bf16_encode(x[i]);
}
static void from_bf16(const uint16_t *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = kern_bf16_decode(x[i]);
}

static void test_formats(void **state)
{
    struct golden *g = golden_open("unit/formats.safetensors");
    (void)state;
    float *v = golden_f32(g, "e4m3.decode"), *in = golden_f32(g, "e4m3.in");
    float *code = golden_f32(g, "e4m3.code"), *out = golden_f32(g, "e4m3.out");
    int64_t n = golden_get(g, "e4m3.in")->n;
    for (int i = 0; i < 256; i++) {
        float d = kern_e4m3_decode((uint8_t)i);
        check_equal("e4m3.decode", &d, &v[i], 1);
    }
    for (int64_t i = 0; i < n; i++) {
        uint8_t c = kern_e4m3_encode(in[i]);
        float d = kern_e4m3_decode(c);
        assert_int_equal(c, (int)code[i]);
        check_equal("e4m3.out", &d, &out[i], 1);
    }
    v = golden_f32(g, "e2m1.decode"), in = golden_f32(g, "e2m1.in");
    code = golden_f32(g, "e2m1.code"), out = golden_f32(g, "e2m1.out");
    n = golden_get(g, "e2m1.in")->n;
    for (int i = 0; i < 16; i++) assert_true(kern_e2m1_decode((uint8_t)i) == v[i]);
    for (int64_t i = 0; i < n; i++) {
        uint8_t c = kern_e2m1_encode(in[i]);
        assert_int_equal(c, (int)code[i]);
        assert_true(kern_e2m1_decode(c) == out[i]);
    }
    v = golden_f32(g, "e8m0.decode");
    for (int i = 0; i < 256; i++) {
        float d = kern_ue8m0_decode((uint8_t)i);
        check_equal("e8m0.decode", &d, &v[i], 1);
    }
    in = golden_f32(g, "e8m0.ceil_in"), code = golden_f32(g, "e8m0.ceil_code");
    for (int64_t i = 0; i < golden_get(g, "e8m0.ceil_in")->n; i++)
        assert_int_equal(kern_pow2_ceil_code(in[i]), (int)code[i]);
    in = golden_f32(g, "bf16.in"), out = golden_f32(g, "bf16.out");
    for (int64_t i = 0; i < golden_get(g, "bf16.in")->n; i++) {
        float d = kern_bf16_round(in[i]);
        check_equal("bf16", &d, &out[i], 1);
    }
    close_golden(g);
}

static void check_fp8(struct golden *g, const char *name, int block)
{
    char key[64];
    int64_t n = 10 * 256;
    float *in = golden_f32(g, "in"), y[2560];
    uint8_t codes[2560], scales[64];
    for (int r = 0; r < 10; r++)
        kern_quant_e4m3(in + r * 256, 256, block, codes + r * 256, scales + r * (256 / block));
    kern_roundtrip_e4m3(in, n, block, y);
    snprintf(key, sizeof key, "%s.code", name);
    assert_memory_equal(codes, golden_get(g, key)->data, n);
    snprintf(key, sizeof key, "%s.scale", name);
    assert_memory_equal(scales, golden_get(g, key)->data, n / block);
    snprintf(key, sizeof key, "%s.out", name);
    check_equal(key, y, golden_f32(g, key), n);
    for (int64_t i = 0; i < n; i++) y[i] = kern_bf16_round(y[i]);
    snprintf(key, sizeof key, "%s.out_bf16", name);
    check_equal(key, y, golden_f32(g, key), n);
}

static void test_act_quant(void **state)
{
    struct golden *g = golden_open("unit/act_quant.safetensors");
    float y[2560], *in = golden_f32(g, "in");
    uint8_t packed[1280], scales[80];
    (void)state;
    check_fp8(g, "fp8_128", 128);
    check_fp8(g, "fp8_64", 64);
    for (int r = 0; r < 10; r++)
        kern_quant_e2m1(in + r * 256, 256, 32, packed + r * 128, scales + r * 8);
    assert_memory_equal(packed, golden_get(g, "fp4_32.packed")->data, 1280);
    assert_memory_equal(scales, golden_get(g, "fp4_32.scale")->data, 80);
    kern_roundtrip_e2m1(in, 2560, 32, y);
    check_equal("fp4_32.out", y, golden_f32(g, "fp4_32.out"), 2560);
    kern_roundtrip_nvfp4(in, 2560, golden_f32(g, "nvfp4_act.global_scale")[0], y);
    /* The golden was made with the scale before it was stored as a float. */
    check_close("nvfp4_act.out", y, golden_f32(g, "nvfp4_act.out"), 2560);

    /* The vector form inside a product: A128 and NVFP4 rows times the unit matrix come back as
     * they are. */
    EACH_ISA(s)
    {
        static float unit[256 * 256];
        for (int i = 0; i < 256; i++) unit[i * 257] = 1.0f;
        struct kern_weight w = {.data = unit,
                                .fmt = KERN_W_F32,
                                .n = 256,
                                .k = 256,
                                .row_bytes = 1024,
                                .scale2 = 1,
                                .input_scale = golden_f32(g, "nvfp4_act.global_scale")[0]};
        struct kern_linear p = {.x = in,
                                .w = w,
                                .y = y,
                                .ld_x = 256,
                                .ld_y = 256,
                                .T = 10,
                                .N = 256,
                                .K = 256,
                                .groups = 1,
                                .aq = KERN_AQ_A128};
        assert_int_equal(ops->linear(s, &p), 0);
        check_equal("linear a128", y, golden_f32(g, "fp8_128.out"), 2560);
        p.aq = KERN_AQ_NVFP4;
        assert_int_equal(ops->linear(s, &p), 0);
        check_close("linear nvfp4", y, golden_f32(g, "nvfp4_act.out"), 2560);
    }
    close_golden(g);
}

static void test_hadamard(void **state)
{
    struct golden *g = golden_open("unit/hadamard.safetensors");
    float y[768], *in = golden_f32(g, "in");
    uint16_t q[768];
    (void)state;
    memcpy(y, in, sizeof y);
    for (int r = 0; r < 6; r++) kern_hadamard(y + r * 128, 128);
    check_close("out", y, golden_f32(g, "out"), 768);
    static const struct {
        enum kern_ik_fmt fmt;
        const char *key;
    } forms[] = {{KERN_IK_BF16, "out_bf16"}, {KERN_IK_FP4, "out_fp4"}, {KERN_IK_FP8, "out_fp8"}};
    EACH_ISA(s)
    for (int f = 0; f < 3; f++) {
        to_bf16(in, q, 768);
        struct kern_index_query p = {
            .q = q, .T = 2, .H = 3, .w = 128, .rd = 0, .fmt = forms[f].fmt, .act = KERN_BF16};
        assert_int_equal(ops->index_query(s, &p), 0);
        from_bf16(q, y, 768);
        check_equal(forms[f].key, y, golden_f32(g, forms[f].key), 768);
    }
    close_golden(g);
}

static void test_weights(void **state)
{
    struct golden *g = golden_open("unit/weights.safetensors");
    static float unit[128 * 128], y[128 * 128], t[128 * 128];
    (void)state;
    for (int i = 0; i < 128; i++) unit[i * 129] = 1.0f;
    struct kern_weight w[4] = {
        {golden_get(g, "fp8.weight")->data, golden_get(g, "fp8.scale")->data, KERN_W_FP8,
         KERN_S_UE8M0, 128, 128, 128, 1, 1, 0},
        {golden_get(g, "mxfp4.weight")->data, golden_get(g, "mxfp4.scale")->data, KERN_W_MXFP4,
         KERN_S_UE8M0, 128, 128, 64, 4, 1, 0},
        {golden_get(g, "nvfp4.weight")->data, golden_get(g, "nvfp4.weight_scale")->data,
         KERN_W_NVFP4, KERN_S_E4M3, 128, 128, 64, 8, golden_f32(g, "nvfp4.weight_scale_2")[0], 0},
        {golden_get(g, "nvfp4_cast.weight")->data, golden_get(g, "nvfp4_cast.weight_scale")->data,
         KERN_W_NVFP4, KERN_S_E4M3, 128, 128, 64, 8, golden_f32(g, "nvfp4_cast.weight_scale_2")[0],
         0}};
    static const char *const keys[4] = {"value.fp8", "value.mxfp4", "value.nvfp4",
                                        "value.nvfp4_cast"};
    EACH_ISA(s)
    for (int f = 0; f < 4; f++)
        for (int T = 1; T <= 128; T += 127) { /* the path of one row and the path of many */
            for (int t0 = 0; t0 < 128; t0 += T) {
                struct kern_linear p = {.x = unit + t0 * 128,
                                        .w = w[f],
                                        .y = y + t0 * 128,
                                        .ld_x = 128,
                                        .ld_y = 128,
                                        .T = T,
                                        .N = 128,
                                        .K = 128,
                                        .groups = 1};
                assert_int_equal(ops->linear(s, &p), 0);
            }
            for (int i = 0; i < 128; i++)
                for (int j = 0; j < 128; j++) t[i * 128 + j] = y[j * 128 + i];
            check_equal(keys[f], t, golden_f32(g, keys[f]), 128 * 128);
        }
    close_golden(g);
}

static void test_rope(void **state)
{
    struct golden *g = golden_open("unit/rope.safetensors");
    (void)state;
    EACH_ISA(s)
    for (int k = 0; k < 2; k++) {
        char key[64];
        float c[11 * 32], sn[11 * 32], x[11 * 128];
        const char *nm = k ? "compress" : "main";
        snprintf(key, sizeof key, "%s.inv_freq", nm);
        struct kern_rope_table p = {.pos = golden_i32(g, "positions"),
                                    .inv_freq = golden_f32(g, key),
                                    .cos = c,
                                    .sin = sn,
                                    .T = 11,
                                    .rd = 64};
        assert_int_equal(ops->rope_table(s, &p), 0);
        snprintf(key, sizeof key, "%s.cos", nm);
        assert_true(golden_max_diff(c, golden_f32(g, key), 352) <= 2e-7);
        snprintf(key, sizeof key, "%s.sin", nm);
        assert_true(golden_max_diff(sn, golden_f32(g, key), 352) <= 2e-7);
        for (int inv = 0; inv < 2; inv++) {
            snprintf(key, sizeof key, "%s.in", nm);
            memcpy(x, golden_f32(g, key), sizeof x);
            struct kern_heads_rope r = {.q = x,
                                        .cos = c,
                                        .sin = sn,
                                        .T = 11,
                                        .H = 1,
                                        .d = 128,
                                        .rd = 64,
                                        .inverse = inv,
                                        .act = KERN_F32};
            assert_int_equal(ops->heads_rope(s, &r), 0);
            snprintf(key, sizeof key, "%s.%s", nm, inv ? "unrotated" : "rotated");
            check_close(key, x, golden_f32(g, key), 11 * 128);
        }
    }
    close_golden(g);
}

/* The op takes streams, the golden gives mixes: row t of h is one large value at place t of stream
 * j, which the RMS turns into sqrt(hc*D) = 16, and column t of fn holds that row's mixes / 16. */
static void test_hyper(void **state)
{
    struct golden *g = golden_open("unit/hyper.safetensors");
    float *mixes = golden_f32(g, "mixes"), *pre = golden_f32(g, "pre");
    static float h[9 * 256], fn[24 * 256], x[9 * 64], post[36], comb[144], out[9 * 256];
    const float big = 1000.0f;
    (void)state;
    EACH_ISA(s)
    {
        for (int j = 0; j < 4; j++) {
            memset(h, 0, sizeof h);
            memset(fn, 0, sizeof fn);
            for (int t = 0; t < 9; t++) {
                h[t * 256 + j * 64 + t] = big;
                for (int m = 0; m < 24; m++) fn[m * 256 + j * 64 + t] = mixes[t * 24 + m] / 16;
            }
            forget();
            struct kern_hc_collapse p = {
                .h = h,
                .fn = {.data = fn, .fmt = KERN_W_F32, .n = 24, .k = 256, .row_bytes = 1024},
                .base = golden_f32(g, "base"),
                .scale = golden_f32(g, "scale"),
                .x = x,
                .post = post,
                .comb = comb,
                .T = 9,
                .hc = 4,
                .D = 64,
                .iters = 20,
                .hc_eps = 1e-6f,
                .norm_eps = 1e-6f,
                .act = KERN_F32};
            assert_int_equal(ops->hc_collapse(s, &p), 0);
            check_close("post", post, golden_f32(g, "post"), 36);
            check_close("comb", comb, golden_f32(g, "comb"), 144);
            for (int t = 0; t < 9; t++) {
                float a = x[t * 64 + t] / big;
                assert_true(fabsf(a - pre[t * 4 + j]) <= 1e-5f);
            }
        }
        struct kern_hc_expand e = {.y = golden_f32(g, "sub_out"),
                                   .h = golden_f32(g, "streams"),
                                   .post = golden_f32(g, "post"),
                                   .comb = golden_f32(g, "comb"),
                                   .out = out,
                                   .T = 9,
                                   .hc = 4,
                                   .D = 64,
                                   .act = KERN_F32};
        assert_int_equal(ops->hc_expand(s, &e), 0);
        check_close("mixed", out, golden_f32(g, "mixed"), 9 * 256);
    }
    close_golden(g);
}

static void test_router(void **state)
{
    struct golden *g = golden_open("unit/router.safetensors");
    (void)state;
    EACH_ISA(s)
    {
        int32_t pick[21];
        float w[21], margin[7];
        struct kern_route p = {.logits = golden_f32(g, "logits"),
                               .bias = golden_f32(g, "bias"),
                               .T = 7,
                               .E = 8,
                               .k = 3,
                               .scale = 1.5f,
                               .normalize = true,
                               .score_fn = KERN_SCORE_SQRTSOFTPLUS,
                               .experts = pick,
                               .weights = w,
                               .margin = margin};
        assert_int_equal(ops->route(s, &p), 0);
        assert_memory_equal(pick, golden_i32(g, "pick"), sizeof pick);
        check_close("weights", w, golden_f32(g, "weights"), 21);
        for (int t = 0; t < 7; t++) assert_true(margin[t] >= 0);
        p.bias = NULL; /* weight of a single expert is its score */
        p.k = 1;
        p.normalize = false;
        p.scale = 1;
        assert_int_equal(ops->route(s, &p), 0);
        for (int t = 0; t < 7; t++)
            check_close("score", &w[t], golden_f32(g, "score") + t * 8 + pick[t], 1);
    }
    close_golden(g);
}

static struct kern_kv_layout layout_of(int32_t ratio, int32_t d, int32_t window,
                                       enum kern_kv_fmt kv, enum kern_ik_fmt ik)
{
    struct kern_kv_layout l;
    struct kern_kv_spec sp = {.n_layers = 1,
                              .ratios = {ratio},
                              .head_dim = d,
                              .rope_dim = 64,
                              .window = window,
                              .index_dim = 128,
                              .kv_fmt = kv,
                              .ik_fmt = ik};
    assert_int_equal(kern_kv_layout_init(&l, &sp, NULL), 0);
    return l;
}

/* Every row is a sequence with a window of one: its last visible key is its own,
 * the rest are entries. */
static void test_attention(void **state)
{
    struct golden *g = golden_open("unit/attention.safetensors");
    struct kern_kv_layout l = layout_of(4, 128, 1, KERN_KV_F32, KERN_IK_F32);
    float *kv = golden_f32(g, "kv"), own[3 * 128], out[3 * 4 * 128];
    float *seen = golden_f32(g, "visible");
    (void)state;
    EACH_ISA(s)
    {
        uint8_t *pages = calloc(1, (size_t)l.page_bytes), *tails = calloc(3, l.tail_bytes);
        know(pages, (size_t)l.page_bytes);
        uint32_t page = 0;
        int32_t sel[3 * 20], n_sel[3];
        struct kern_seq q[3];
        for (int e = 0; e < 20; e++)
            kern_kv_store(KERN_KV_F32, pages + l.layer[0].main_off, l.layer[0].per_page, e,
                          kv + e * 128, 128, 64);
        for (int t = 0; t < 3; t++) {
            int last = 19;
            while (!seen[t * 20 + last]) last--;
            n_sel[t] = 0;
            for (int e = 0; e < last; e++)
                if (seen[t * 20 + e]) sel[t * 20 + n_sel[t]++] = e;
            memcpy(own + t * 128, kv + last * 128, 512);
            q[t] = (struct kern_seq){.row0 = t,
                                     .n_rows = 1,
                                     .pos0 = 99,
                                     .page_ids = &page,
                                     .n_pages = 1,
                                     .tail = tails + t * l.tail_bytes};
        }
        struct kern_attention p = {.q = golden_f32(g, "q"),
                                   .kv = own,
                                   .sink = golden_f32(g, "sink"),
                                   .o = out,
                                   .pages = pages,
                                   .layout = &l,
                                   .seqs = q,
                                   .n_seqs = 3,
                                   .selected = sel,
                                   .n_selected = n_sel,
                                   .sel_ld = 20,
                                   .T = 3,
                                   .H = 4,
                                   .scale = 1.0f / sqrtf(128),
                                   .act = KERN_F32};
        assert_int_equal(ops->attention(s, &p), 0);
        check_close("out", out, golden_f32(g, "out"), 3 * 4 * 128);
        forget();
        free(pages);
        free(tails);
    }
    close_golden(g);
}

static void product(struct kern_stream *s, struct golden *g, const char *w, const float *x, int T,
                    int N, float *y)
{
    struct kern_linear p = {.x = x,
                            .y = y,
                            .ld_x = 128,
                            .ld_y = N,
                            .T = T,
                            .N = N,
                            .K = 128,
                            .groups = 1,
                            .w = {.data = golden_get(g, w)->data,
                                  .fmt = KERN_W_BF16,
                                  .n = N,
                                  .k = 128,
                                  .row_bytes = 256}};
    assert_int_equal(ops->linear(s, &p), 0);
}

static void check_entries(const char *what, const float *a, const float *b, int64_t n, bool exact)
{
    if (exact)
        check_close(what, a, b, n);
    else /* a product in front of the rounding points may sit on a tie */
        assert_true(golden_equal_share(a, b, n) >= 0.99 && golden_rel(a, b, n) <= 5e-3);
}

static void check_compressor(struct kern_stream *s, int32_t ratio, bool exact, bool index)
{
    struct golden *g = golden_open(ratio == 4 ? "unit/compressor_4.safetensors"
                                              : "unit/compressor_128.safetensors");
    struct golden *gr = golden_open("unit/rope.safetensors");
    struct kern_kv_layout l = layout_of(ratio, 128, 4, exact ? KERN_KV_F32 : KERN_KV_FP8,
                                        exact ? KERN_IK_F32 : KERN_IK_FP4);
    int T = ratio == 4 ? 14 : 260, N = ratio == 4 ? 256 : 128, n = T / ratio;
    float *kv = malloc((size_t)(T * N) * 4), *gate = malloc((size_t)(T * N) * 4), got[3 * 128];
    float *x = golden_f32(g, "x");
    uint8_t *pages = calloc(2, (size_t)l.page_bytes), *tail = malloc((size_t)l.tail_bytes);
    uint32_t ids[2] = {1, 0};
    char key[64];
    know(pages, 2 * (size_t)l.page_bytes);
    memset(tail, 0xff, (size_t)l.tail_bytes); /* nothing in a fresh tail may matter */
    product(s, g, "c.wkv.weight", x, T, N, kv);
    product(s, g, "c.wgate.weight", x, T, N, gate);
    for (int t = 0; t < T; t++) {
        struct kern_seq q = {.n_rows = 1, .pos0 = t, .page_ids = ids, .n_pages = 2, .tail = tail};
        struct kern_compress p = {.kv = kv + t * N,
                                  .gate = gate + t * N,
                                  .ape = golden_f32(g, "c.ape"),
                                  .norm = {golden_get(g, "c.norm.weight")->data, KERN_BF16, 128},
                                  .inv_freq = golden_f32(gr, "compress.inv_freq"),
                                  .pages = pages,
                                  .layout = &l,
                                  .index = index,
                                  .seqs = &q,
                                  .n_seqs = 1,
                                  .eps = 1e-6f,
                                  .act = exact ? KERN_F32 : KERN_BF16};
        assert_int_equal(ops->compress(s, &p), 0);
        snprintf(key, sizeof key, "after.%02d.pending_kv", t);
        if (ratio != 4 || !exact || index || !golden_find(g, key)) continue;
        const float *st = (const float *)(tail + l.layer[0].mstate_off);
        if (t % 4 < 3) {
            check_close(key, st, golden_f32(g, key), (t % 4 + 1) * 256);
            snprintf(key, sizeof key, "after.%02d.pending_score", t);
            check_close(key, st + 3 * 256, golden_f32(g, key), (t % 4 + 1) * 256);
        }
        snprintf(key, sizeof key, "after.%02d.prev_kv", t);
        if (!golden_find(g, key)) continue;
        check_close(key, st + 6 * 256, golden_f32(g, key), 4 * 128);
        snprintf(key, sizeof key, "after.%02d.prev_score", t);
        check_close(key, st + 6 * 256 + 4 * 128, golden_f32(g, key), 4 * 128);
    }
    for (int e = 0; e < n; e++) {
        const struct kern_kv_layer *y = &l.layer[0];
        uint8_t *page = pages + (size_t)ids[e / y->per_page] * (size_t)l.page_bytes;
        if (index)
            kern_ik_load(l.spec.ik_fmt, page + y->index_off, y->per_page, e % y->per_page,
                         got + e * 128, 128);
        else
            kern_kv_load(l.spec.kv_fmt, page + y->main_off, y->per_page, e % y->per_page,
                         got + e * 128, 128, 64);
    }
    snprintf(key, sizeof key, "%s.%s.entries", exact ? "exact" : "deployed",
             index ? "index" : "main");
    check_entries(key, got, golden_f32(g, key), n * 128, exact);
    forget();
    free(kv);
    free(gate);
    free(pages);
    free(tail);
    close_golden(gr);
    close_golden(g);
}

static void test_compressors(void **state)
{
    (void)state;
    EACH_ISA(s)
    for (int exact = 0; exact < 2; exact++) {
        check_compressor(s, 4, exact, false);
        check_compressor(s, 4, exact, true);
        check_compressor(s, 128, exact, false);
    }
}

int main(void)
{
    struct tow_err err = {0};
    if (test_is_mirrored()) {
        if (test_open_mirrored(&devs[n_devs++], 2, &err) < 0) return test_no_device(&err);
        ops = kern_dev_ops(devs[0]);
    }
    for (int i = 0; !test_is_mirrored() && i <= (int)kern_cpu_best_isa(); i++)
        if (kern_dev_open_cpu(&devs[n_devs++], 1 + i, (enum kern_cpu_isa)i, NULL) < 0) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),    cmocka_unit_test(test_act_quant),
        cmocka_unit_test(test_hadamard),   cmocka_unit_test(test_weights),
        cmocka_unit_test(test_rope),       cmocka_unit_test(test_hyper),
        cmocka_unit_test(test_router),     cmocka_unit_test(test_attention),
        cmocka_unit_test(test_compressors)};
    int failed = cmocka_run_group_tests_name("kernels/unit_golden", tests, NULL, NULL);
    for (int i = 0; i < n_devs; i++) kern_dev_close(devs[i]);
    return failed;
}
