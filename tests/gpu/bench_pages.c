/* tests/gpu/bench_pages.c - pages packed and digested on the device, and copies to and from the
 * host: how fast, by page and in one piece, pinned and not, and beside products of another stream.
 *
 * A page is one of a V4-Flash model with fp4 index keys (256 tokens); 32 of them are a chunk of
 * 8192.
 */
#include "tests/gpu/bench.h"

#include "common/base/hash.h"
#include "kernels/pages.h"

#include <sys/mman.h>

enum { PAGE = 986 << 10, CHUNK = 32, POOL = 2048 };

struct pages {
    struct bench *b;
    struct kern_pages p;
    const uint32_t *ids; /* [POOL] in no order */
    int turns;
};
static int call_pages(void *ctx, int i)
{
    struct pages *x = ctx;
    struct kern_pages p = x->p;
    p.ids = x->ids + i % x->turns * p.n;
    return kern_stream_pages(x->b->s, &p);
}

static void bench_moves(struct bench *b, uint8_t *pool, const uint32_t *ids)
{
    static const struct {
        const char *name;
        bool move, unpack, digest;
        const char *goal;
    } kinds[] = {{"pages_pack", true, false, false, ">= 3200 GB/s"},
                 {"pages_unpack", true, true, false, ">= 3200 GB/s"},
                 {"pages_pack_digest", true, false, true, NULL},
                 {"pages_digest", false, false, true, NULL}};
    uint8_t *packed = bench_alloc(b, (double)POOL / 2 * PAGE);
    uint64_t *digests = bench_alloc(b, POOL * sizeof *digests);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int n = 1; n <= 1024; n *= n == 1 || n == 128 ? 8 : 4) {
            char shape[64];
            snprintf(shape, sizeof shape, "%d x %d KiB", n, PAGE >> 10);
            struct pages x = {.b = b,
                              .p = {.pool = pool,
                                    .n = n,
                                    .page_bytes = PAGE,
                                    .packed = kinds[k].move ? packed : NULL,
                                    .unpack = kinds[k].unpack,
                                    .digests = kinds[k].digest ? digests : NULL},
                              .ids = ids,
                              .turns = POOL / n < 256 ? POOL / n : 256};
            bench_run(b, &(struct bench_case){.name = kinds[k].name,
                                              .shape = shape,
                                              .call = call_pages,
                                              .ctx = &x,
                                              .bytes = (double)n * PAGE * (kinds[k].move ? 2 : 1),
                                              .goal = n >= CHUNK ? kinds[k].goal : NULL});
        }
}

static double host_digest(const uint8_t *p)
{
    volatile uint64_t sink = 0;
    double best = 0;
    for (int r = 0; r < 3; r++) {
        const double t0 = bench_now();
        for (int i = 0; i < CHUNK; i++) sink += tow_hash64(p + (size_t)i * PAGE, PAGE);
        const double rate = (double)CHUNK * PAGE / (bench_now() - t0);
        if (rate > best) best = rate;
    }
    return best;
}

/* Bytes per second of n copies of `each` bytes on the second stream. */
static double copy_rate(struct kern_stream *s, uint8_t *dev, uint8_t *host, size_t each, int n,
                        bool out)
{
    double best = 0;
    for (int r = 0; r < 4; r++) {
        const double t0 = bench_now();
        for (int i = 0; i < n; i++) {
            uint8_t *d = dev + (size_t)i * each, *h = host + (size_t)i * each;
            if ((out ? kern_stream_get(s, h, d, each) : kern_stream_put(s, d, h, each)) < 0)
                return 0;
        }
        if (kern_stream_sync(s) < 0) return 0;
        const double rate = (double)each * n / (bench_now() - t0);
        if (rate > best) best = rate;
    }
    return best;
}

static void print_rate(struct bench *b, const char *name, const char *shape, double rate,
                       const char *goal)
{
    b->n_timed++;
    printf("%-18s %-30s %9s %7.1f GB/s  %s%s\n", name, shape, "", rate * 1e-9, goal ? "goal " : "",
           goal ? goal : "");
}

static void bench_copies(struct bench *b, struct kern_stream *second, uint8_t *dev, uint8_t *host,
                         bool pinned)
{
    static const struct {
        size_t each;
        int n;
    } cuts[] = {
        {16 << 10, 256}, {64 << 10, 256}, {256 << 10, 128}, {PAGE, CHUNK}, {PAGE * CHUNK, 4}};
    for (int out = 1; out >= 0; out--) {
        const char *name = out      ? pinned ? "get_pinned" : "get_pageable"
                           : pinned ? "put_pinned"
                                    : "put_pageable";
        for (size_t k = 0; bench_wants(b, name) && k < sizeof cuts / sizeof *cuts; k++) {
            char shape[64];
            snprintf(shape, sizeof shape, "%d x %zu KiB", cuts[k].n, cuts[k].each >> 10);
            print_rate(b, name, shape, copy_rate(second, dev, host, cuts[k].each, cuts[k].n, out),
                       pinned && cuts[k].each >= PAGE ? ">= 50 GB/s" : NULL);
        }
    }
}

struct product {
    struct bench *b;
    struct kern_linear p;
};
static int call_product(void *ctx, int i)
{
    struct product *x = ctx;
    (void)i;
    return x->b->ops->linear(x->b->s, &x->p);
}

/* A chunk's products alone, its pages' copies alone (with digests), and both. */
static void bench_overlap(struct bench *b, struct kern_stream *second, uint8_t *pool, uint8_t *host,
                          const uint32_t *ids, uint64_t *digests)
{
    enum { T = 8192, D = 4096, CALLS = 8 };
    struct tow_err err = {0};
    if (!bench_wants(b, "overlap")) return;
    uint16_t *w = calloc((size_t)D * D, sizeof *w);
    struct product x = {
        .b = b,
        .p = {.x = bench_random(b, (double)T * D, KERN_BF16, 1),
              .y = bench_alloc(b, (double)T * D * 2),
              .w = {.data = w, .fmt = KERN_W_BF16, .n = D, .k = D, .row_bytes = D * 2, .scale2 = 1},
              .ld_x = D,
              .ld_y = D,
              .T = T,
              .N = D,
              .K = D,
              .groups = 1,
              .x_dtype = KERN_BF16,
              .y_dtype = KERN_BF16}};
    if (!w || kern_dev_place(b->dev, &x.p.w, 1, &err) < 0) exit(1);
    b->n_timed++;
    double t[3] = {0};
    for (int r = 0; r < 3; r++)
        for (int what = 0; what < 3; what++) {
            const double t0 = bench_now();
            if (what != 0) {
                const struct kern_pages p = {
                    .pool = pool, .ids = ids, .n = CHUNK, .page_bytes = PAGE, .digests = digests};
                if (kern_stream_pages(second, &p) < 0) exit(1);
                for (int i = 0; i < CHUNK; i++)
                    kern_stream_get(second, host + (size_t)i * PAGE, pool + (size_t)ids[i] * PAGE,
                                    PAGE);
            }
            for (int i = 0; what != 1 && i < CALLS; i++)
                if (call_product(&x, i) < 0) exit(1);
            if (kern_stream_sync(b->s) < 0 || kern_stream_sync(second) < 0) exit(1);
            t[what] = bench_now() - t0;
        }
    printf("%-18s %d products of %d x %d x %d: %.0f us; %d pages out: %.0f us; both: %.0f us, of "
           "the copies %.0f %% hidden\n",
           "overlap", CALLS, T, D, D, t[0] * 1e6, CHUNK, t[1] * 1e6, t[2] * 1e6,
           100 * (t[0] + t[1] - t[2]) / (t[0] < t[1] ? t[0] : t[1]));
    kern_dev_unplace(b->dev, x.p.w.data);
    free(w);
}

int main(int argc, char **argv)
{
    struct bench b;
    struct tow_err err = {0};
    struct kern_stream *second;
    int rc = bench_open(&b, argc, argv, NULL);
    if (rc) return rc;
    const size_t area = (size_t)4 * CHUNK * PAGE;
    uint32_t *ids = malloc(POOL * sizeof *ids);
    uint64_t seed = 7;
    for (uint32_t i = 0; i < POOL; i++) ids[i] = i;
    for (uint32_t i = POOL - 1; i > 0; i--) {
        const uint32_t k = (uint32_t)(bench_next(&seed) >> 33) % (i + 1), was = ids[i];
        ids[i] = ids[k];
        ids[k] = was;
    }
    uint8_t *pool = bench_bytes(&b, (double)POOL * PAGE, 0, 255);
    bench_moves(&b, pool, ids);

    /* As the transport has it: shared, and touched. */
    uint8_t *host = mmap(NULL, area, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t *digests = aligned_alloc(4096, POOL * sizeof *digests);
    if (host == MAP_FAILED || !digests || kern_stream_open(&second, b.dev, &err) < 0) {
        printf("%s: %s\n", argv[0], err.msg);
        return 1;
    }
    memset(host, 1, area);
    if (bench_wants(&b, "host_digest"))
        print_rate(&b, "host_digest", "XXH3 on one core, of 986 KiB", host_digest(host), NULL);
    bench_copies(&b, second, pool, host, false);
    const double t0 = bench_now();
    if (kern_dev_pin(b.dev, host, area, &err) < 0 ||
        kern_dev_pin(b.dev, digests, POOL * sizeof *digests, &err) < 0) {
        printf("%s: %s\n", argv[0], err.msg);
        return 1;
    }
    printf("%-18s %zu MiB in %.1f ms\n", "pin", area >> 20, (bench_now() - t0) * 1e3);
    bench_copies(&b, second, pool, host, true);
    bench_overlap(&b, second, pool, host, ids, digests);
    kern_stream_close(second);
    kern_dev_unpin(b.dev, host);
    kern_dev_unpin(b.dev, digests);
    munmap(host, area);
    free(digests);
    free(ids);
    return bench_close(&b);
}
