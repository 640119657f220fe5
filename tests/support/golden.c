/* tests/support/golden.c - a safetensors reader as small as our own files allow,
 * and error measures. */
#include "tests/support/golden.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct golden {
    char path[512];
    void *map;
    size_t bytes;
    struct golden_tensor *tensors;
    int n;
    void **copies;
    int n_copies;
};

static void die(const char *path, const char *what, const char *name)
{
    fprintf(stderr, "golden %s: %s %s\n", path, what, name ? name : "");
    abort();
}

/* Header text is `"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}` without spaces. */
static void parse(struct golden *g, const char *h, size_t n, const char *data)
{
    const char *end = h + n;
    g->tensors = calloc(n / 40 + 1, sizeof *g->tensors);
    for (const char *p = h; p < end && (p = memchr(p, '"', (size_t)(end - p)));) {
        const char *q = memchr(p + 1, '"', (size_t)(end - p - 1));
        if (!q) break;
        size_t len = (size_t)(q - p - 1);
        struct golden_tensor *t = &g->tensors[g->n];
        if (len == 12 && memcmp(p + 1, "__metadata__", 12) == 0) {
            p = memchr(q, '}', (size_t)(end - q));
            continue;
        }
        if (len >= sizeof t->name) die(g->path, "name too long", NULL);
        memcpy(t->name, p + 1, len);
        const char *close = memchr(q, '}', (size_t)(end - q));
        const char *dt = strstr(q, "\"dtype\":\""), *sh = strstr(q, "\"shape\":["),
                   *of = strstr(q, "\"data_offsets\":[");
        if (!close || !dt || !sh || !of || dt > close || sh > close || of > close)
            die(g->path, "cannot read header at", t->name);
        sscanf(dt + 9, "%11[^\"]", t->dtype);
        t->n = 1;
        for (sh += 9; *sh != ']'; sh += *sh == ',') {
            t->shape[t->rank] = strtoll(sh, (char **)&sh, 10);
            t->n *= t->shape[t->rank++];
        }
        long long a = 0, b = 0;
        sscanf(of + 16, "%lld,%lld", &a, &b);
        t->data = data + a;
        t->bytes = b - a;
        g->n++;
        p = close + 1;
    }
}

struct golden *golden_open(const char *path)
{
    struct golden *g = calloc(1, sizeof *g);
    const char *root = getenv("TOWPATH_GOLDEN_DATA");
    snprintf(g->path, sizeof g->path, "%s/%s", root ? root : "tests/golden/data", path);
    int fd = open(g->path, O_RDONLY);
    if (fd < 0) {
        snprintf(g->path, sizeof g->path, "%s", path);
        fd = open(g->path, O_RDONLY);
    }
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0) die(path, "cannot open", NULL);
    g->bytes = (size_t)st.st_size;
    g->map = mmap(NULL, g->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    uint64_t head;
    if (g->map == MAP_FAILED || g->bytes < 8) die(path, "cannot map", NULL);
    memcpy(&head, g->map, 8);
    if (head > g->bytes - 8) die(path, "header too long", NULL);
    char *text = malloc(head + 1);
    memcpy(text, (char *)g->map + 8, head);
    text[head] = 0;
    parse(g, text, head, (char *)g->map + 8 + head);
    free(text);
    return g;
}

void golden_close(struct golden *g)
{
    if (!g) return;
    for (int i = 0; i < g->n_copies; i++) free(g->copies[i]);
    free(g->copies);
    free(g->tensors);
    munmap(g->map, g->bytes);
    free(g);
}

int golden_count(const struct golden *g)
{
    return g->n;
}
const struct golden_tensor *golden_at(const struct golden *g, int i)
{
    return &g->tensors[i];
}

const struct golden_tensor *golden_find(const struct golden *g, const char *name)
{
    for (int i = 0; i < g->n; i++)
        if (strcmp(g->tensors[i].name, name) == 0) return &g->tensors[i];
    return NULL;
}
const struct golden_tensor *golden_get(const struct golden *g, const char *name)
{
    const struct golden_tensor *t = golden_find(g, name);
    if (!t) die(g->path, "no tensor", name);
    return t;
}

static void *keep(struct golden *g, void *p)
{
    g->copies = realloc(g->copies, (size_t)(g->n_copies + 1) * sizeof *g->copies);
    return g->copies[g->n_copies++] = p;
}

static double value(const struct golden *g, const struct golden_tensor *t, int64_t i)
{
    const uint8_t *d = t->data;
    if (strcmp(t->dtype, "F32") == 0) {
        float f;
        memcpy(&f, d + i * 4, 4);
        return f;
    }
    if (strcmp(t->dtype, "F64") == 0) {
        double f;
        memcpy(&f, d + i * 8, 8);
        return f;
    }
    if (strcmp(t->dtype, "BF16") == 0) {
        uint16_t b;
        memcpy(&b, d + i * 2, 2);
        uint32_t u = (uint32_t)b << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    if (strcmp(t->dtype, "I32") == 0) {
        int32_t v;
        memcpy(&v, d + i * 4, 4);
        return v;
    }
    if (strcmp(t->dtype, "I64") == 0) {
        int64_t v;
        memcpy(&v, d + i * 8, 8);
        return (double)v;
    }
    if (strcmp(t->dtype, "I8") == 0) return (int8_t)d[i];
    if (t->bytes == t->n) return d[i];
    die(g->path, "cannot convert", t->name);
    return 0;
}

float *golden_f32(struct golden *g, const char *name)
{
    const struct golden_tensor *t = golden_get(g, name);
    float *out = keep(g, malloc((size_t)t->n * 4 + 4));
    for (int64_t i = 0; i < t->n; i++) out[i] = (float)value(g, t, i);
    return out;
}

int32_t *golden_i32(struct golden *g, const char *name)
{
    const struct golden_tensor *t = golden_get(g, name);
    int32_t *out = keep(g, malloc((size_t)t->n * 4 + 4));
    for (int64_t i = 0; i < t->n; i++) out[i] = (int32_t)value(g, t, i);
    return out;
}

double golden_rel(const float *a, const float *b, int64_t n)
{
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        s += (double)b[i] * b[i];
    }
    if (d == 0) return 0;
    return sqrt(d / s);
}

double golden_max_diff(const float *a, const float *b, int64_t n)
{
    double m = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - b[i]);
        if (d != d && a[i] == b[i]) d = 0; /* equal infinities */
        if (d > m || d != d) m = d;
    }
    return m;
}

double golden_equal_share(const float *a, const float *b, int64_t n)
{
    int64_t same = 0;
    for (int64_t i = 0; i < n; i++) same += a[i] == b[i] || (a[i] != a[i] && b[i] != b[i]);
    return n ? (double)same / (double)n : 1.0;
}

double golden_max_abs(const float *b, int64_t n)
{
    double m = 0;
    for (int64_t i = 0; i < n; i++) m = fabs((double)b[i]) > m ? fabs((double)b[i]) : m;
    return m;
}
