/* tests/gpu/bench_sample.c - drawing the tokens of a step on the device, against one reading of its
 * logits there, and against sending them to the host.
 *
 * Rows are like a model's: normal, with a dozen tokens that stand out.
 */
#include "tests/gpu/bench.h"

enum { V = 129280, MOST = 128, OUTSTANDING = 12 };

struct call {
    struct bench *b;
    struct kern_sample p;
};
static int draw(void *ctx, int i)
{
    const struct call *c = ctx;
    (void)i;
    return c->b->ops->sample(c->b->s, &c->p);
}

struct reading {
    struct bench *b;
    void *to;
    const void *from;
    size_t bytes;
};
static int read_all(void *ctx, int i)
{
    const struct reading *r = ctx;
    (void)i;
    return kern_stream_read(r->b->s, r->to, r->from, r->bytes);
}

static float *logits(struct bench *b)
{
    uint64_t seed = 77;
    float *x = bench_random(b, (double)MOST * V, KERN_F32, 2.5f);
    for (int t = 0; t < MOST; t++)
        for (int k = 0; k < OUTSTANDING; k++) {
            const float high = 8 + 3 * bench_normal(&seed);
            kern_stream_write(b->s, x + (int64_t)t * V + bench_next(&seed) % V, &high, sizeof high);
        }
    kern_stream_sync(b->s);
    return x;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        struct kern_sample_row row;
    } forms[] = {{"greedy", {.top_p = 1, .n_logprobs = -1}},
                 {"temperature", {.temperature = 1, .top_p = 1, .n_logprobs = -1}},
                 {"top_p .95", {.temperature = 0.3f, .top_p = 0.95f, .n_logprobs = -1}},
                 {"top_k 40", {.temperature = 1, .top_p = 1, .top_k = 40, .n_logprobs = -1}},
                 {"top_p .9 flat", {.temperature = 3, .top_p = 0.9f, .n_logprobs = -1}},
                 {"top_k 1000", {.temperature = 1, .top_p = 1, .top_k = 1000, .n_logprobs = -1}},
                 {"1000 edits", {.top_p = 1, .n_logprobs = -1, .presence = 1, .n_edits = 1000}},
                 {"20 logprobs", {.top_p = 1, .n_logprobs = 20}}};
    static const int32_t batches[] = {1, 32, MOST};
    struct bench b;
    int rc = bench_open(&b, argc, argv, NULL);
    if (rc) return rc;
    float *x = logits(&b);
    struct kern_edit *edits = calloc(MOST * 1000, sizeof *edits);
    struct kern_sample_row *rows = calloc(MOST, sizeof *rows);
    float *to = malloc((size_t)MOST * V * sizeof *to);
    if (!edits || !rows || !to) return 1;
    for (int i = 0; i < MOST * 1000; i++)
        edits[i] = (struct kern_edit){.id = i % 1000 * 129, .count = 1};
    struct kern_edit *dev_edits = bench_send(&b, edits, MOST * 1000 * sizeof *edits);
    struct kern_sample_row *dev_rows = bench_alloc(&b, MOST * sizeof *rows);
    struct kern_choice *choices = bench_alloc(&b, MOST * sizeof *choices);
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++)
        for (int k = 0; k < 3; k++) {
            char shape[32];
            for (int t = 0; t < MOST; t++) {
                rows[t] = forms[f].row;
                rows[t].u = (t + 0.5) / MOST;
                rows[t].edit0 = t * 1000;
            }
            kern_stream_write(b.s, dev_rows, rows, MOST * sizeof *rows);
            struct call c = {&b,
                             {.logits = x,
                              .rows = dev_rows,
                              .edits = dev_edits,
                              .choices = choices,
                              .T = batches[k],
                              .V = V,
                              .n_edits = MOST * 1000}};
            snprintf(shape, sizeof shape, "%d x %d", batches[k], V);
            bench_run(&b, &(struct bench_case){.name = forms[f].name,
                                               .shape = shape,
                                               .call = draw,
                                               .ctx = &c,
                                               .bytes = 4.0 * batches[k] * V});
        }
    for (int k = 0; k < 6; k++) {
        const bool all = k >= 3;
        const size_t bytes = (size_t)batches[k % 3] * (all ? V * sizeof *to : sizeof *choices);
        struct reading r = {&b, to, all ? (void *)x : choices, bytes};
        char shape[32];
        snprintf(shape, sizeof shape, "%d %s", batches[k % 3], all ? "x 129280" : "choices");
        bench_run(&b, &(struct bench_case){.name = "read to the host",
                                           .shape = shape,
                                           .call = read_all,
                                           .ctx = &r,
                                           .bytes = (double)bytes});
    }
    free(edits), free(rows), free(to);
    return bench_close(&b);
}
