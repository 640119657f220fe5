/* How: map the file, parse the header with the strict JSON reader (which refuses repeated keys,
 * also escaped ones), check every tensor alone, then sort by offset and walk once: in a legal file
 * each tensor begins where the one before it ends. Names are copied so that the JSON tree can go;
 * an open-addressing table finds them.
 *
 * The map is private and read-only. A file that shrinks later faults on use; maps are listed in a
 * fixed table that the SIGBUS handler can read without locks (see model_weights_guard).
 */
#include "common/model/safetensors.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/base/hash.h"
#include "common/text/json.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_MAX ((uint64_t)100 << 20) /* the format's own limit */

struct meta {
    char *key, *value; /* owned */
};

struct model_safetensors {
    char *path;         /* owned */
    const uint8_t *map; /* the whole file */
    uint64_t size;
    bool mapped;               /* else map is the caller's */
    int slot;                  /* in the guard's table, or -1 */
    struct model_tensor *list; /* owned; header order */
    size_t n;
    uint32_t *table; /* owned; index + 1 by hash, 0 = empty */
    size_t table_size;
    char *names;       /* owned; every name and dtype, one after the other */
    struct meta *meta; /* owned */
    size_t n_meta;
};

/* ---- element types ---- */

static const struct {
    const char *name;
    int bits;
} DTYPES[] = {
#define X(e, name, bits) {name, bits},
    MODEL_DTYPES(X)
#undef X
};

const char *model_dtype_name(enum model_dtype t)
{
    return (unsigned)t < MODEL_DT_UNKNOWN ? DTYPES[t].name : "?";
}

int model_dtype_bits(enum model_dtype t)
{
    return (unsigned)t < MODEL_DT_UNKNOWN ? DTYPES[t].bits : 0;
}

static enum model_dtype dtype_of(const char *s)
{
    for (int i = 0; i < MODEL_DT_UNKNOWN; i++)
        if (strcmp(s, DTYPES[i].name) == 0) return (enum model_dtype)i;
    return MODEL_DT_UNKNOWN;
}

char *model_tensor_shape_text(const struct model_tensor *t, char *buf, size_t n)
{
    size_t at = (size_t)snprintf(buf, n, "[");
    for (int i = 0; i < t->n_dims && at < n; i++)
        at += (size_t)snprintf(buf + at, n - at, "%s%" PRId64, i ? ", " : "", t->dims[i]);
    if (at < n) snprintf(buf + at, n - at, "]");
    return buf;
}

/* ---- the guard against files cut while mapped ---- */

enum { GUARD_SLOTS = 4096, GUARD_PATH = 256 };
static struct {
    _Atomic uintptr_t base; /* 0 = free, 1 = being filled */
    size_t size;
    char path[GUARD_PATH];
} guard[GUARD_SLOTS];

static int guard_add(const void *base, size_t size, const char *path)
{
    for (int i = 0; i < GUARD_SLOTS; i++) {
        uintptr_t empty = 0;
        if (!atomic_compare_exchange_strong(&guard[i].base, &empty, 1)) continue;
        guard[i].size = size;
        snprintf(guard[i].path, sizeof guard[i].path, "%s", path);
        atomic_store(&guard[i].base, (uintptr_t)base);
        return i;
    }
    return -1; /* the fault then has no name, nothing else */
}

/* Only async-signal-safe calls. */
static void on_sigbus(int sig, siginfo_t *info, void *context)
{
    (void)context;
    uintptr_t at = (uintptr_t)info->si_addr;
    for (int i = 0; i < GUARD_SLOTS; i++) {
        uintptr_t base = atomic_load(&guard[i].base);
        if (base <= 1 || at < base || at - base >= guard[i].size) continue;
        static const char head[] = "error: ",
                          tail[] = ": the file was cut or its disk failed while it was "
                                   "in use; the weights are gone, stopping\n";
        char line[GUARD_PATH + sizeof head + sizeof tail];
        size_t n = 0;
        for (const char *p = head; *p; p++) line[n++] = *p;
        for (const char *p = guard[i].path; *p; p++) line[n++] = *p;
        for (const char *p = tail; *p; p++) line[n++] = *p;
        ssize_t ignored = write(STDERR_FILENO, line, n);
        (void)ignored;
        _exit(74);
    }
    /* Not ours: the access is made again and ends the process in the ordinary way. */
    signal(sig, SIG_DFL);
}

int model_weights_guard(struct tow_err *err)
{
    struct sigaction sa = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    sigemptyset(&sa.sa_mask);
    if (sigaction(SIGBUS, &sa, NULL) < 0)
        return tow_fail(err, TOW_ESYS, "sigaction: %s", strerror(errno));
    return 0;
}

/* ---- names ---- */

static size_t hash_of(const char *name)
{
    return (size_t)tow_hash64(name, strlen(name));
}

static int build_table(struct model_safetensors *f)
{
    size_t size = 16;
    while (size < f->n * 2) size *= 2;
    f->table = calloc(size, sizeof *f->table);
    if (!f->table) return TOW_ENOMEM;
    f->table_size = size;
    for (size_t i = 0; i < f->n; i++) {
        size_t k = hash_of(f->list[i].name) & (size - 1);
        while (f->table[k]) k = (k + 1) & (size - 1);
        f->table[k] = (uint32_t)(i + 1);
    }
    return 0;
}

const struct model_tensor *model_safetensors_find(const struct model_safetensors *f,
                                                  const char *name)
{
    for (size_t k = hash_of(name) & (f->table_size - 1); f->table[k];
         k = (k + 1) & (f->table_size - 1)) {
        const struct model_tensor *t = &f->list[f->table[k] - 1];
        if (strcmp(t->name, name) == 0) return t;
    }
    return NULL;
}

/* ---- the header ---- */

/* shape and data_offsets of one entry -> *t (name and dtype are set).
 * data_bytes: length of the data part. */
static int read_entry(struct model_safetensors *f, const struct json *entry, const uint8_t *data,
                      uint64_t data_bytes, struct model_tensor *t, struct tow_err *err)
{
    const struct json *shape = json_find(entry, "shape"),
                      *offsets = json_find(entry, "data_offsets");
    if (json_type(shape) != JSON_ARRAY)
        return tow_fail(err, TOW_EFORMAT, "%s: tensor %s: shape is %s; right: a list of sizes",
                        f->path, t->name, shape ? json_type_name(shape) : "missing");
    uint64_t values = 1;
    bool overflow = false;
    JSON_EACH(it, shape)
    {
        int64_t x;
        if (!json_int(it, &x) || x < 0)
            return tow_fail(err, TOW_EFORMAT,
                            "%s: tensor %s: shape[%d] is no size; right: a whole number >= 0",
                            f->path, t->name, t->n_dims);
        if (t->n_dims == MODEL_MAX_DIMS)
            return tow_fail(err, TOW_EFORMAT, "%s: tensor %s: more than %d dimensions", f->path,
                            t->name, MODEL_MAX_DIMS);
        t->dims[t->n_dims++] = x;
        overflow |= __builtin_mul_overflow(values, (uint64_t)x, &values);
    }
    /* A zero anywhere makes the product zero, however large the other sizes are. */
    for (int i = 0; i < t->n_dims; i++)
        if (t->dims[i] == 0) {
            values = 0;
            overflow = false;
        }
    uint64_t bits = 0;
    int per = model_dtype_bits(t->dtype);
    if (per && !overflow) overflow = __builtin_mul_overflow(values, (uint64_t)per, &bits);
    char text[160];
    if (overflow)
        return tow_fail(err, TOW_EFORMAT, "%s: tensor %s: shape %s of %s passes 64 bits", f->path,
                        t->name, model_tensor_shape_text(t, text, sizeof text), t->dtype_name);

    int64_t range[2] = {0, 0};
    int n = 0;
    bool whole = json_type(offsets) == JSON_ARRAY;
    if (whole) JSON_EACH(it, offsets)
        {
            int64_t x;
            whole = whole && n < 2 && json_int(it, &x) && x >= 0;
            if (whole) range[n] = x;
            n++;
        }
    if (!whole || n != 2)
        return tow_fail(
            err, TOW_EFORMAT,
            "%s: tensor %s: data_offsets is %s; right: [begin, end], whole numbers >= 0 below 2^63",
            f->path, t->name,
            !offsets                           ? "missing"
            : json_type(offsets) != JSON_ARRAY ? json_type_name(offsets)
                                               : "not two such numbers");
    if (range[0] > range[1])
        return tow_fail(err, TOW_EFORMAT,
                        "%s: tensor %s: data_offsets begin %" PRId64 " lies after end %" PRId64,
                        f->path, t->name, range[0], range[1]);
    t->bytes = (uint64_t)(range[1] - range[0]);
    if (per && t->bytes != (bits + 7) / 8)
        return tow_fail(err, TOW_EFORMAT,
                        "%s: tensor %s: data_offsets span %" PRIu64 " bytes; expected %" PRIu64
                        " for %s %s",
                        f->path, t->name, t->bytes, (bits + 7) / 8, t->dtype_name,
                        model_tensor_shape_text(t, text, sizeof text));
    if (per && bits % 8)
        return tow_fail(err, TOW_EFORMAT, "%s: tensor %s: %s %s ends inside a byte", f->path,
                        t->name, t->dtype_name, model_tensor_shape_text(t, text, sizeof text));
    if ((uint64_t)range[1] > data_bytes)
        return tow_fail(err, TOW_EFORMAT,
                        "%s: tensor %s ends at byte %" PRIu64 " of the file, which has %" PRIu64
                        ": the file is cut (incomplete download)",
                        f->path, t->name, f->size - data_bytes + (uint64_t)range[1], f->size);
    t->data = data + range[0];
    return 0;
}

static int read_meta(struct model_safetensors *f, const struct json *m, struct tow_err *err)
{
    if (json_type(m) != JSON_OBJECT)
        return tow_fail(err, TOW_EFORMAT, "%s: __metadata__ is %s; right: an object of strings",
                        f->path, json_type_name(m));
    f->meta = calloc(json_size(m) + 1, sizeof *f->meta);
    if (!f->meta) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", f->path);
    JSON_EACH(it, m)
    {
        const char *s = json_string(it, NULL);
        if (!s)
            return tow_fail(err, TOW_EFORMAT, "%s: __metadata__.%s is %s; right: a string", f->path,
                            json_key(it), json_type_name(it));
        struct meta *p = &f->meta[f->n_meta++];
        p->key = strdup(json_key(it));
        p->value = strdup(s);
        if (!p->key || !p->value) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", f->path);
    }
    return 0;
}

/* Fills the list; names are copied into one block. */
static int read_tensors(struct model_safetensors *f, const struct json *root, uint64_t data_at,
                        struct tow_err *err)
{
    size_t n = 0, name_bytes = 0;
    JSON_EACH(it, root)
    {
        if (strcmp(json_key(it), "__metadata__") == 0) continue;
        if (json_type(it) != JSON_OBJECT)
            return tow_fail(err, TOW_EFORMAT, "%s: tensor %s is %s; right: an object", f->path,
                            json_key(it), json_type_name(it));
        const struct json *dtype = json_find(it, "dtype");
        size_t len;
        if (!json_string(dtype, &len))
            return tow_fail(err, TOW_EFORMAT, "%s: tensor %s: dtype is %s; right: a string",
                            f->path, json_key(it), dtype ? json_type_name(dtype) : "missing");
        n++;
        name_bytes += strlen(json_key(it)) + 1 + len + 1;
    }
    f->list = calloc(n + 1, sizeof *f->list);
    f->names = malloc(name_bytes + 1);
    if (!f->list || !f->names) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", f->path);
    char *at = f->names;
    JSON_EACH(it, root)
    {
        if (strcmp(json_key(it), "__metadata__") == 0) {
            int rc = read_meta(f, it, err);
            if (rc < 0) return rc;
            continue;
        }
        struct model_tensor *t = &f->list[f->n];
        t->file = f;
        t->name = at;
        at = stpcpy(at, json_key(it)) + 1;
        t->dtype_name = at;
        at = stpcpy(at, json_string(json_find(it, "dtype"), NULL)) + 1;
        t->dtype = dtype_of(t->dtype_name);
        int rc = read_entry(f, it, f->map + data_at, f->size - data_at, t, err);
        if (rc < 0) return rc;
        f->n++;
    }
    return 0;
}

static int by_range(const void *a, const void *b)
{
    const struct model_tensor *x = *(const struct model_tensor *const *)a,
                              *y = *(const struct model_tensor *const *)b;
    if (x->data != y->data) return (uintptr_t)x->data < (uintptr_t)y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* Tensors, in order of offset, must lie end to end and fill the data. */
static int check_cover(const struct model_safetensors *f, uint64_t data_at, struct tow_err *err)
{
    const struct model_tensor **order = malloc((f->n + 1) * sizeof *order);
    if (!order) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", f->path);
    for (size_t i = 0; i < f->n; i++) order[i] = &f->list[i];
    qsort(order, f->n, sizeof *order, by_range);
    const uint8_t *base = f->map + data_at;
    uint64_t end = 0;
    int rc = 0;
    for (size_t i = 0; i < f->n && rc == 0; i++) {
        uint64_t begin = (uint64_t)((const uint8_t *)order[i]->data - base);
        if (begin < end)
            rc = tow_fail(err, TOW_EFORMAT,
                          "%s: tensors %s and %s overlap: one ends at byte %" PRIu64
                          " of the data, the other begins at %" PRIu64,
                          f->path, order[i - 1]->name, order[i]->name, end, begin);
        else if (begin > end)
            rc = tow_fail(err, TOW_EFORMAT,
                          "%s: hole of %" PRIu64
                          " bytes before tensor %s: its data begins at %" PRIu64
                          ", expected %" PRIu64,
                          f->path, begin - end, order[i]->name, begin, end);
        end = begin + order[i]->bytes;
    }
    if (rc == 0 && end != f->size - data_at)
        rc = tow_fail(err, TOW_EFORMAT,
                      "%s: the file has %" PRIu64 " bytes, its tensors end at %" PRIu64 ": %" PRIu64
                      " bytes belong to no tensor",
                      f->path, f->size, data_at + end, f->size - data_at - end);
    free(order);
    return rc;
}

/* Everything but the mapping; f->map, size and path are set. */
static int read_file(struct model_safetensors *f, struct tow_err *err)
{
    if (f->size < 8)
        return tow_fail(err, TOW_EFORMAT,
                        "%s: %" PRIu64
                        " bytes; a safetensors file has at least 8 (incomplete download)",
                        f->path, f->size);
    uint64_t len = 0;
    for (int i = 7; i >= 0; i--) len = len << 8 | f->map[i];
    if (len > HEADER_MAX)
        return tow_fail(err, TOW_EFORMAT,
                        "%s: header length %" PRIu64 "; right: at most %" PRIu64
                        " (is this a safetensors file?)",
                        f->path, len, HEADER_MAX);
    if (len > f->size - 8)
        return tow_fail(err, TOW_EFORMAT,
                        "%s: the header needs %" PRIu64 " bytes, the file has %" PRIu64
                        ": the file is cut (incomplete download)",
                        f->path, len + 8, f->size);
    const char *text = (const char *)f->map + 8;
    if (len < 2 || text[0] != '{')
        return tow_fail(err, TOW_EFORMAT, "%s: the header does not begin with '{'", f->path);
    const struct json_limits limits = {
        .max_bytes = HEADER_MAX, .max_depth = 4, .max_keys = 16u << 20, .max_values = 64u << 20};
    struct json *root = NULL;
    int rc = json_parse(&root, text, (size_t)len, &limits, err);
    if (rc < 0) {
        tow_note(err, "%s: header", f->path);
        return rc;
    }
    rc = read_tensors(f, root, 8 + len, err);
    json_free(root);
    if (rc < 0) return rc;
    if ((rc = check_cover(f, 8 + len, err)) < 0) return rc;
    if (build_table(f) < 0) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", f->path);
    return 0;
}

static struct model_safetensors *new_file(const char *path)
{
    struct model_safetensors *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->slot = -1;
    f->path = strdup(path);
    if (f->path) return f;
    free(f);
    return NULL;
}

int model_safetensors_parse(struct model_safetensors **out, const char *path, const void *bytes,
                            size_t n, struct tow_err *err)
{
    struct model_safetensors *f = new_file(path);
    if (!f) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", path);
    f->map = bytes;
    f->size = n;
    int rc = read_file(f, err);
    if (rc < 0) {
        model_safetensors_close(f);
        return rc;
    }
    *out = f;
    return 0;
}

int model_safetensors_open(struct model_safetensors **out, const char *path, struct tow_err *err)
{
    struct model_safetensors *f = new_file(path);
    if (!f) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", path);
    int rc = 0;
    /* A pipe in the folder must not block the start. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st, again;
    if (fd < 0) {
        rc = tow_fail(err, TOW_EIO, "%s: %s", path, strerror(errno));
        goto close_file;
    }
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        rc = tow_fail(err, TOW_EIO, "%s: not a regular file", path);
        goto close_fd;
    }
    f->size = (uint64_t)st.st_size;
    if (f->size > 0) {
        void *p = mmap(NULL, (size_t)f->size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            rc = tow_fail(err, TOW_EIO, "%s: mmap of %" PRIu64 " bytes: %s", path, f->size,
                          strerror(errno));
            goto close_fd;
        }
        f->map = p;
        f->mapped = true;
        /* Only a hint: where the file system has huge pages, the file comes in by them, and passes
         * read weights faster (docs/performance.md). What is in the page cache already stays as it
         * is. */
        (void)madvise(p, (size_t)f->size, MADV_HUGEPAGE);
        f->slot = guard_add(p, (size_t)f->size, path);
    }
    if ((rc = read_file(f, err)) < 0) goto close_fd;
    if (fstat(fd, &again) < 0 || again.st_size != st.st_size) {
        rc = tow_fail(err, TOW_EIO, "%s: changed from %lld to %lld bytes while it was being opened",
                      path, (long long)st.st_size, (long long)again.st_size);
        goto close_fd;
    }
    *out = f;
    f = NULL;
close_fd:
    close(fd);
close_file:
    model_safetensors_close(f);
    return rc;
}

void model_safetensors_close(struct model_safetensors *f)
{
    if (!f) return;
    if (f->slot >= 0) atomic_store(&guard[f->slot].base, 0);
    if (f->mapped) munmap((void *)(uintptr_t)f->map, (size_t)f->size);
    for (size_t i = 0; i < f->n_meta; i++) {
        free(f->meta[i].key);
        free(f->meta[i].value);
    }
    free(f->meta);
    free(f->names);
    free(f->table);
    free(f->list);
    free(f->path);
    free(f);
}

const char *model_safetensors_path(const struct model_safetensors *f)
{
    return f->path;
}
uint64_t model_safetensors_size(const struct model_safetensors *f)
{
    return f->size;
}
size_t model_safetensors_count(const struct model_safetensors *f)
{
    return f->n;
}

const struct model_tensor *model_safetensors_at(const struct model_safetensors *f, size_t i)
{
    return i < f->n ? &f->list[i] : NULL;
}

const char *model_safetensors_meta(const struct model_safetensors *f, const char *key)
{
    for (size_t i = 0; i < f->n_meta; i++)
        if (strcmp(f->meta[i].key, key) == 0) return f->meta[i].value;
    return NULL;
}

/* ---- writing ---- */

struct out_tensor {
    char *name; /* owned */
    enum model_dtype dtype;
    int32_t n_dims;
    int64_t dims[MODEL_MAX_DIMS];
    const void *data; /* borrowed until the write */
    uint64_t bytes;
};

struct model_safetensors_writer {
    struct out_tensor *list; /* owned */
    size_t n, cap;
    struct meta *meta; /* owned */
    size_t n_meta;
};

int model_safetensors_writer_new(struct model_safetensors_writer **out, struct tow_err *err)
{
    struct model_safetensors_writer *w = calloc(1, sizeof *w);
    if (!w) return tow_fail(err, TOW_ENOMEM, "safetensors writer: out of memory");
    *out = w;
    return 0;
}

void model_safetensors_writer_free(struct model_safetensors_writer *w)
{
    if (!w) return;
    for (size_t i = 0; i < w->n; i++) free(w->list[i].name);
    for (size_t i = 0; i < w->n_meta; i++) {
        free(w->meta[i].key);
        free(w->meta[i].value);
    }
    free(w->list);
    free(w->meta);
    free(w);
}

int model_safetensors_writer_meta(struct model_safetensors_writer *w, const char *key,
                                  const char *value, struct tow_err *err)
{
    struct meta *grown = realloc(w->meta, (w->n_meta + 1) * sizeof *grown);
    if (!grown) return tow_fail(err, TOW_ENOMEM, "safetensors writer: out of memory");
    w->meta = grown;
    struct meta m = {strdup(key), strdup(value)};
    if (!m.key || !m.value) {
        free(m.key);
        free(m.value);
        return tow_fail(err, TOW_ENOMEM, "safetensors writer: out of memory");
    }
    w->meta[w->n_meta++] = m;
    return 0;
}

int model_safetensors_writer_add(struct model_safetensors_writer *w, const char *name,
                                 enum model_dtype dtype, int32_t n_dims, const int64_t *dims,
                                 const void *data, struct tow_err *err)
{
    if (n_dims < 0 || n_dims > MODEL_MAX_DIMS || !model_dtype_bits(dtype) ||
        strcmp(name, "__metadata__") == 0)
        return tow_fail(err, TOW_EINVAL,
                        "safetensors writer: tensor %s: illegal name, type or %d dimensions", name,
                        n_dims);
    struct out_tensor t = {.dtype = dtype, .n_dims = n_dims, .data = data};
    uint64_t bits = (uint64_t)model_dtype_bits(dtype);
    for (int i = 0; i < n_dims; i++) {
        t.dims[i] = dims[i];
        if (dims[i] < 0 || __builtin_mul_overflow(bits, (uint64_t)dims[i], &bits))
            return tow_fail(err, TOW_EINVAL, "safetensors writer: tensor %s: illegal size", name);
    }
    if (bits % 8)
        return tow_fail(err, TOW_EINVAL, "safetensors writer: tensor %s ends inside a byte", name);
    t.bytes = bits / 8;
    if (w->n == w->cap) {
        size_t cap = w->cap ? w->cap * 2 : 64;
        struct out_tensor *grown = realloc(w->list, cap * sizeof *grown);
        if (!grown) return tow_fail(err, TOW_ENOMEM, "safetensors writer: out of memory");
        w->list = grown;
        w->cap = cap;
    }
    if (!(t.name = strdup(name)))
        return tow_fail(err, TOW_ENOMEM, "safetensors writer: out of memory");
    w->list[w->n++] = t;
    return 0;
}

static int widest_first(const void *a, const void *b)
{
    const struct out_tensor *x = *(const struct out_tensor *const *)a,
                            *y = *(const struct out_tensor *const *)b;
    int bx = model_dtype_bits(x->dtype), by = model_dtype_bits(y->dtype);
    return bx != by ? by - bx : strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const struct out_tensor *const *)a)->name,
                  (*(const struct out_tensor *const *)b)->name);
}

static void put_header(struct tow_buf *b, const struct model_safetensors_writer *w,
                       const struct out_tensor **order)
{
    tow_buf_putc(b, '{');
    if (w->n_meta) {
        tow_buf_puts(b, "\"__metadata__\":{");
        for (size_t i = 0; i < w->n_meta; i++) {
            if (i) tow_buf_putc(b, ',');
            json_put_string(b, w->meta[i].key, strlen(w->meta[i].key));
            tow_buf_putc(b, ':');
            json_put_string(b, w->meta[i].value, strlen(w->meta[i].value));
        }
        tow_buf_putc(b, '}');
    }
    uint64_t at = 0;
    for (size_t i = 0; i < w->n; i++) {
        const struct out_tensor *t = order[i];
        if (i || w->n_meta) tow_buf_putc(b, ',');
        json_put_string(b, t->name, strlen(t->name));
        tow_buf_printf(b, ":{\"dtype\":\"%s\",\"shape\":[", model_dtype_name(t->dtype));
        for (int d = 0; d < t->n_dims; d++)
            tow_buf_printf(b, "%s%" PRId64, d ? "," : "", t->dims[d]);
        tow_buf_printf(b, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", at, at + t->bytes);
        at += t->bytes;
    }
    tow_buf_putc(b, '}');
    while (!tow_buf_failed(b) && b->len % 8) tow_buf_putc(b, ' ');
}

int model_safetensors_writer_write(const struct model_safetensors_writer *w, const char *path,
                                   struct tow_err *err)
{
    /* A file appears whole or not at all; a device or a pipe (/dev/null) is written to and stays
     * what it is. */
    struct stat there;
    bool in_place = stat(path, &there) == 0 && !S_ISREG(there.st_mode);
    char tmp[4200];
    if (snprintf(tmp, sizeof tmp, in_place ? "%s" : "%s.tmp", path) >= (int)sizeof tmp)
        return tow_fail(err, TOW_EIO, "%.80s...: path too long", path);
    const struct out_tensor **order = malloc((w->n + 1) * sizeof *order);
    struct tow_buf head;
    tow_buf_init(&head, HEADER_MAX);
    int rc = 0;
    if (!order) {
        rc = tow_fail(err, TOW_ENOMEM, "%s: out of memory", path);
        goto free_order;
    }
    for (size_t i = 0; i < w->n; i++) order[i] = &w->list[i];
    qsort(order, w->n, sizeof *order, by_name);
    for (size_t i = 1; i < w->n; i++)
        if (strcmp(order[i - 1]->name, order[i]->name) == 0) {
            rc = tow_fail(err, TOW_EINVAL, "%s: tensor %s was added twice", path, order[i]->name);
            goto free_order;
        }
    qsort(order, w->n, sizeof *order, widest_first);
    put_header(&head, w, order);
    if (tow_buf_failed(&head)) {
        rc = tow_fail(err, TOW_ETOOBIG, "%s: the header would pass %" PRIu64 " bytes", path,
                      HEADER_MAX);
        goto free_order;
    }
    FILE *out = fopen(tmp, "wb");
    if (!out) {
        rc = tow_fail(err, TOW_EIO, "%s: %s", tmp, strerror(errno));
        goto free_order;
    }
    uint8_t len[8];
    for (int i = 0; i < 8; i++) len[i] = (uint8_t)((uint64_t)head.len >> (8 * i));
    bool ok = fwrite(len, 1, 8, out) == 8 && fwrite(head.data, 1, head.len, out) == head.len;
    for (size_t i = 0; i < w->n && ok; i++)
        ok = order[i]->bytes == 0 ||
             fwrite(order[i]->data, 1, order[i]->bytes, out) == order[i]->bytes;
    int saved = errno;
    if (fclose(out) != 0 && ok) {
        ok = false;
        saved = errno;
    }
    if (ok && !in_place && rename(tmp, path) < 0) {
        ok = false;
        saved = errno;
    }
    if (!ok) {
        rc = tow_fail(err, TOW_EIO, "%s: %s", path, strerror(saved));
        if (!in_place) unlink(tmp);
    }
free_order:
    tow_buf_fini(&head);
    free(order);
    return rc;
}
