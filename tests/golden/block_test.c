/* Deployed mode, one block at a time: golden streams in, streams out, every position of the trace
 * file.
 *
 * Rounding noise does not pile up over layers here, so this bound (median 0.025, 95th percentile
 * 0.04) sees mistakes that the end-to-end bound hides. Positions whose choice of experts or
 * entries hangs on less than 0.01 are left out. */
#include "tests/support/device.h"
#include "tests/support/golden.h"

#include "common/base/err.h"
#include "common/kv/table.h"
#include "common/model/forward.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_T = 1024 };

struct margins {
    float least[MAX_T]; /* of expert and index margin, in the layer under test */
};

static void on_tensor(void *ctx, int32_t layer, const char *name, enum model_elem elem,
                      const void *data, int64_t rows, int64_t width)
{
    struct margins *m = ctx;
    (void)layer, (void)elem, (void)width;
    if (strcmp(name, "expert_margin") != 0 && strcmp(name, "index_margin") != 0) return;
    for (int64_t i = 0; i < rows; i++) m->least[i] = fminf(m->least[i], ((const float *)data)[i]);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void test_block__streams_in_to_streams_out_within_the_bound(void **state)
{
    (void)state;
    const char *root = getenv("TOWPATH_GOLDEN_DATA");
    char dir[256];
    snprintf(dir, sizeof dir, "%s/native/checkpoint", root ? root : "tests/golden/data");
    struct model_options opt = {.device = test_device(),
                                .kv_fmt = KERN_KV_FP8,
                                .ik_fmt = KERN_IK_FP4,
                                .fp8_products = test_products_fp8(),
                                .max_rows = MAX_T};
    struct model *m = NULL;
    struct tow_err err = {0};
    if (model_open(&m, dir, &opt, &err) < 0) fail_msg("%s", err.msg);
    const struct model_shape *s = &model_peek_weights(m)->shape;
    const struct kern_kv_layout *l = model_peek_layout(m);
    struct golden *g = golden_open("native/expected/trace-fp4-132.safetensors");
    const int32_t T = (int32_t)golden_get(g, "prompt")->n;
    const int64_t width = (int64_t)s->hc * s->D;

    for (int32_t layer = 0; layer < s->n_layers; layer++) {
        uint32_t n_pages = (uint32_t)kern_kv_pages_for(T, l->page_tokens);
        struct kern_dev *dev = model_peek_dev(m);
        uint8_t *pages = test_poisoned(dev, (size_t)n_pages * (size_t)l->page_bytes);
        uint8_t *tail = test_poisoned(dev, (size_t)l->tail_bytes);
        struct kv_pool *pool = NULL;
        struct kv_table table;
        assert_int_equal(kv_pool_new(&pool, pages, n_pages, (size_t)l->page_bytes, tail, 1,
                                     (size_t)l->tail_bytes, &err),
                         0);
        kv_table_init(&table);
        assert_int_equal(kv_table_grow(&table, pool, n_pages), 0);

        char name[64];
        snprintf(name, sizeof name, "layers.%d.streams", layer - 1);
        struct margins margins;
        struct model_tap tap = {.on_tensor = on_tensor, .ctx = &margins, .scores = true};
        struct kern_seq q = {.n_rows = T,
                             .page_ids = table.ids,
                             .n_pages = (int32_t)n_pages,
                             .tail = tail,
                             .topk = model_peek_options(m)->index_topk};
        struct model_batch b = {.ids = golden_i32(g, "prompt"),
                                .T = T,
                                .seqs = &q,
                                .n_seqs = 1,
                                .pages = pages,
                                .n_pages = n_pages,
                                .tap = &tap,
                                .first_layer = layer,
                                .last_layer = layer + 1,
                                .streams_in = layer ? golden_get(g, name)->data : NULL};
        for (int32_t i = 0; i < T; i++) margins.least[i] = INFINITY;
        if (model_forward(m, &b, &err) < 0) fail_msg("layer %d: %s", layer, err.msg);

        snprintf(name, sizeof name, "layers.%d.streams", layer);
        assert_int_equal(golden_get(g, name)->n, T * width);
        const float *want = golden_f32(g, name);
        uint16_t *got = malloc((size_t)(T * width) * sizeof *got);
        if (!got) abort();
        assert_int_equal(model_read_streams(m, 0, T, got), 0);
        double all = 0, errors[MAX_T];
        int n = 0;
        for (int64_t i = 0; i < T * width; i++) all += (double)want[i] * want[i];
        all = sqrt(all / (double)(T * width));
        for (int32_t t = 0; t < T; t++) {
            double sum = 0;
            if (!(margins.least[t] > 0.01f)) continue;
            for (int64_t i = 0; i < width; i++) {
                uint32_t bits = (uint32_t)got[t * width + i] << 16;
                float v;
                memcpy(&v, &bits, sizeof v);
                sum += ((double)v - want[t * width + i]) * ((double)v - want[t * width + i]);
            }
            errors[n++] = sqrt(sum / (double)width) / all;
        }
        free(got);
        assert_true(n > T / 2);
        qsort(errors, (size_t)n, sizeof *errors, compare_doubles);
        double median = errors[n / 2], p95 = errors[(int)(0.95 * n)];
        print_message("layer %d: %d positions, median %.4f, 95th percentile %.4f\n", layer, n,
                      median, p95);
        assert_true(median <= 0.025 && p95 <= 0.04);

        kv_table_fini(&table, pool);
        kv_pool_free(pool);
        kern_dev_free(dev, pages);
        kern_dev_free(dev, tail);
    }
    golden_close(g);
    model_close(m);
}

int main(void)
{
    const int absent = test_device_there(test_device());
    if (absent) return absent;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block__streams_in_to_streams_out_within_the_bound)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
