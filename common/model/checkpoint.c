/* How: find out which files there are (index, or every *.safetensors of the folder), open each, put
 * all tensors in one array sorted by name, and check the index against it.
 * Everything is linear or n log n in the tensors.
 *
 * Files that the index does not name are left alone: folders often hold a second copy in another
 * form.
 */
#include "common/model/checkpoint.h"

#include "common/base/buf.h"
#include "common/base/err.h"
#include "common/text/json.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define INDEX_NAME  "model.safetensors.index.json"
#define INDEX_MAX   ((size_t)256 << 20)
#define FILES_MAX   4096
#define NAMES_SHOWN 10

struct model_checkpoint {
    char *dir;                        /* owned */
    struct model_safetensors **files; /* owned */
    char **names;                     /* owned; file names without the folder, sorted */
    size_t n_files;
    const struct model_tensor **by_name; /* owned array; tensors belong to their files */
    size_t n;
    uint64_t bytes;
};

/* ---- lists of names ---- */

struct names {
    char **v; /* owned */
    size_t n, cap;
};

static int names_add(struct names *s, const char *name)
{
    if (s->n == s->cap) {
        size_t cap = s->cap ? s->cap * 2 : 16;
        char **grown = realloc(s->v, cap * sizeof *grown);
        if (!grown) return TOW_ENOMEM;
        s->v = grown;
        s->cap = cap;
    }
    if (!(s->v[s->n] = strdup(name))) return TOW_ENOMEM;
    s->n++;
    return 0;
}

static void names_free(struct names *s)
{
    for (size_t i = 0; i < s->n; i++) free(s->v[i]);
    free(s->v);
    *s = (struct names){0};
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void names_sort_unique(struct names *s)
{
    if (s->n == 0) return;
    qsort(s->v, s->n, sizeof *s->v, compare_names);
    size_t kept = 1;
    for (size_t i = 1; i < s->n; i++) {
        if (strcmp(s->v[i], s->v[kept - 1]) == 0)
            free(s->v[i]);
        else
            s->v[kept++] = s->v[i];
    }
    s->n = kept;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

/* ---- what is in the folder ---- */

static int list_folder(const char *dir, struct names *weights, struct names *indexes,
                       struct tow_err *err)
{
    DIR *d = opendir(dir);
    if (!d) return tow_fail(err, TOW_EIO, "%s: %s", dir, strerror(errno));
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        if (ends_with(e->d_name, ".safetensors"))
            rc = names_add(weights, e->d_name);
        else if (ends_with(e->d_name, ".safetensors.index.json"))
            rc = names_add(indexes, e->d_name);
        if (weights->n > FILES_MAX) rc = TOW_ETOOBIG;
    }
    closedir(d);
    if (rc == TOW_ETOOBIG)
        return tow_fail(err, rc, "%s: more than %d .safetensors files", dir, FILES_MAX);
    if (rc < 0) return tow_fail(err, rc, "%s: out of memory", dir);
    names_sort_unique(weights);
    names_sort_unique(indexes);
    return 0;
}

/* Without an index, "x-00002-of-00003.safetensors" still says how many there must be. */
static int check_numbering(const char *dir, const struct names *files, struct tow_err *err)
{
    struct tow_buf lost;
    tow_buf_init(&lost, 4096);
    unsigned n_lost = 0, total = 0;
    for (size_t i = 0; i < files->n; i++) {
        const char *name = files->v[i], *of = strstr(name, "-of-"), *dash = of;
        if (!of) continue;
        while (dash > name && dash[-1] != '-') dash--;
        unsigned long part, parts;
        char tail[16];
        if (dash == name || sscanf(dash, "%5lu-of-%5lu%15s", &part, &parts, tail) != 3 ||
            strcmp(tail, ".safetensors") != 0 || parts > FILES_MAX)
            continue;
        /* Only the first file of a set asks for the others;
         * the set without its first is asked by its own first. */
        if (i > 0 && strncmp(files->v[i - 1], name, (size_t)(dash - name)) == 0) continue;
        total = (unsigned)parts;
        for (unsigned long k = 1; k <= parts; k++) {
            char want[300];
            snprintf(want, sizeof want, "%.*s%05lu-of-%05lu.safetensors", (int)(dash - name), name,
                     k, parts);
            char *key = want;
            if (bsearch(&key, files->v, files->n, sizeof *files->v, compare_names)) continue;
            if (n_lost++ < NAMES_SHOWN) tow_buf_printf(&lost, "%s%s", lost.len ? ", " : "", want);
        }
    }
    int rc = 0;
    if (n_lost)
        rc = tow_fail(err, TOW_ENOENT,
                      "%s: %u of %u weight files missing (incomplete download): %s%s", dir, n_lost,
                      total, lost.data, n_lost > NAMES_SHOWN ? ", ..." : "");
    tow_buf_fini(&lost);
    return rc;
}

/* ---- the index ---- */

static int read_index(const char *path, struct json **out, struct tow_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return tow_fail(err, TOW_EIO, "%s: %s", path, strerror(errno));
    struct stat st;
    int rc = 0;
    char *text = NULL;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        rc = tow_fail(err, TOW_EIO, "%s: not a regular file", path);
        goto shut;
    }
    if ((uint64_t)st.st_size > INDEX_MAX) {
        rc = tow_fail(err, TOW_ETOOBIG, "%s: %lld bytes; right: at most %zu", path,
                      (long long)st.st_size, INDEX_MAX);
        goto shut;
    }
    size_t n = 0, size = (size_t)st.st_size;
    if (!(text = malloc(size + 1))) {
        rc = tow_fail(err, TOW_ENOMEM, "%s: out of memory", path);
        goto shut;
    }
    for (ssize_t k; n < size; n += (size_t)k) {
        k = read(fd, text + n, size - n);
        if (k < 0) {
            rc = tow_fail(err, TOW_EIO, "%s: %s", path, strerror(errno));
            goto shut;
        }
        if (k == 0) break;
    }
    const struct json_limits limits = {
        .max_bytes = INDEX_MAX, .max_depth = 16, .max_keys = 16u << 20, .max_values = 32u << 20};
    if ((rc = json_parse(out, text, n, &limits, err)) < 0) tow_note(err, "%s", path);
shut:
    free(text);
    close(fd);
    return rc;
}

/* The weight_map of the index, every value a plain file name; those names into *files. */
static int read_weight_map(const char *path, const struct json *index, const struct json **map,
                           struct names *files, struct tow_err *err)
{
    *map = json_find(index, "weight_map");
    if (json_type(*map) != JSON_OBJECT || !json_first(*map))
        return tow_fail(err, TOW_EFORMAT, "%s: weight_map is %s; right: an object {tensor: file}",
                        path,
                        !*map                            ? "missing"
                        : json_type(*map) == JSON_OBJECT ? "empty"
                                                         : json_type_name(*map));
    const char *last = NULL;
    JSON_EACH(it, *map)
    {
        const char *file = json_string(it, NULL);
        if (!file)
            return tow_fail(err, TOW_EFORMAT, "%s: weight_map.%s is %s; right: a file name", path,
                            json_key(it), json_type_name(it));
        if (last && strcmp(file, last) == 0)
            continue; /* names of one file mostly follow each other */
        last = file;
        if (!*file || strchr(file, '/') || strchr(file, '\\') || file[0] == '.' ||
            strlen(file) > 250)
            return tow_fail(
                err, TOW_EFORMAT,
                "%s: weight_map.%s is \"%.100s\"; right: the name of a file in the same folder",
                path, json_key(it), file);
        if (!ends_with(file, ".safetensors"))
            return tow_fail(err, TOW_EFORMAT,
                            "%s: weight_map.%s is \"%.100s\"; right: a .safetensors file", path,
                            json_key(it), file);
        if (names_add(files, file) < 0) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", path);
    }
    names_sort_unique(files);
    if (files->n > FILES_MAX)
        return tow_fail(err, TOW_ETOOBIG, "%s: names %zu files; right: at most %d", path, files->n,
                        FILES_MAX);
    return 0;
}

/* Every tensor the index names is in the file it names. */
static int check_weight_map(const struct model_checkpoint *c, const char *path,
                            const struct json *map, struct tow_err *err)
{
    struct tow_buf lost;
    tow_buf_init(&lost, 4096);
    size_t n_lost = 0, n = 0;
    JSON_EACH(it, map)
    {
        const char *file = json_string(it, NULL);
        char *key = (char *)(uintptr_t)file;
        char **at = bsearch(&key, c->names, c->n_files, sizeof *c->names, compare_names);
        n++;
        if (at && model_safetensors_find(c->files[at - c->names], json_key(it))) continue;
        if (n_lost++ < NAMES_SHOWN)
            tow_buf_printf(&lost, "%s%s (in %s)", lost.len ? ", " : "", json_key(it), file);
    }
    int rc = 0;
    if (n_lost)
        rc = tow_fail(err, TOW_EFORMAT,
                      "%s: %zu of %zu tensors are not in the file the index names (incomplete "
                      "download): %s%s",
                      path, n_lost, n, lost.data, n_lost > NAMES_SHOWN ? ", ..." : "");
    tow_buf_fini(&lost);
    return rc;
}

/* ---- opening ---- */

/* All missing ones are told at once, with the size of the damage. */
static int check_there(const char *dir, const struct names *files, struct tow_err *err)
{
    struct tow_buf lost;
    tow_buf_init(&lost, 4096);
    size_t n_lost = 0;
    for (size_t i = 0; i < files->n; i++) {
        char path[4200];
        struct stat st;
        snprintf(path, sizeof path, "%s/%s", dir, files->v[i]);
        if (stat(path, &st) == 0) continue; /* follows links: a dangling one is missing */
        if (n_lost++ < NAMES_SHOWN)
            tow_buf_printf(&lost, "%s%s", lost.len ? ", " : "", files->v[i]);
    }
    int rc = 0;
    if (n_lost)
        rc = tow_fail(err, TOW_ENOENT,
                      "%s: %zu of %zu weight files missing (incomplete download): %s%s", dir,
                      n_lost, files->n, lost.data, n_lost > NAMES_SHOWN ? ", ..." : "");
    tow_buf_fini(&lost);
    return rc;
}

static int open_files(struct model_checkpoint *c, struct names *files, struct tow_err *err)
{
    c->files = calloc(files->n, sizeof *c->files);
    if (!c->files) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", c->dir);
    c->names = files->v;
    size_t n = files->n;
    *files = (struct names){0};
    for (size_t i = 0; i < n; i++) {
        char path[4200];
        snprintf(path, sizeof path, "%s/%s", c->dir, c->names[i]);
        c->n_files = i + 1; /* names are ours from here on; a file that fails stays NULL */
        int rc = model_safetensors_open(&c->files[i], path, err);
        if (rc < 0) {
            for (size_t k = i + 1; k < n; k++) free(c->names[k]);
            return rc;
        }
        c->bytes += model_safetensors_size(c->files[i]);
    }
    return 0;
}

static int by_tensor_name(const void *a, const void *b)
{
    return strcmp((*(const struct model_tensor *const *)a)->name,
                  (*(const struct model_tensor *const *)b)->name);
}

static int sort_tensors(struct model_checkpoint *c, struct tow_err *err)
{
    size_t n = 0;
    for (size_t i = 0; i < c->n_files; i++) n += model_safetensors_count(c->files[i]);
    c->by_name = malloc((n + 1) * sizeof *c->by_name);
    if (!c->by_name) return tow_fail(err, TOW_ENOMEM, "%s: out of memory", c->dir);
    for (size_t i = 0; i < c->n_files; i++)
        for (size_t k = 0; k < model_safetensors_count(c->files[i]); k++)
            c->by_name[c->n++] = model_safetensors_at(c->files[i], k);
    qsort(c->by_name, c->n, sizeof *c->by_name, by_tensor_name);
    for (size_t i = 1; i < c->n; i++)
        if (strcmp(c->by_name[i - 1]->name, c->by_name[i]->name) == 0)
            return tow_fail(err, TOW_EFORMAT, "tensor %s is in two files: %s and %s",
                            c->by_name[i]->name, model_safetensors_path(c->by_name[i - 1]->file),
                            model_safetensors_path(c->by_name[i]->file));
    return 0;
}

int model_checkpoint_open(struct model_checkpoint **out, const char *dir, struct tow_err *err)
{
    if (strlen(dir) > 3900) return tow_fail(err, TOW_EIO, "%.80s...: path too long", dir);
    struct names files = {0}, indexes = {0}, named = {0};
    struct json *index = NULL;
    const struct json *map = NULL;
    char index_path[4200] = "";
    struct model_checkpoint *c = calloc(1, sizeof *c);
    int rc = 0;
    if (!c || !(c->dir = strdup(dir))) {
        rc = tow_fail(err, TOW_ENOMEM, "%s: out of memory", dir);
        goto fail;
    }
    if ((rc = list_folder(dir, &files, &indexes, err)) < 0) goto fail;
    const char *index_name = indexes.n == 1 ? indexes.v[0] : NULL;
    for (size_t i = 0; i < indexes.n; i++)
        if (strcmp(indexes.v[i], INDEX_NAME) == 0) index_name = indexes.v[i];
    if (indexes.n && !index_name) {
        rc = tow_fail(err, TOW_EFORMAT, "%s: %zu index files and none is " INDEX_NAME, dir,
                      indexes.n);
        goto fail;
    }
    if (index_name) {
        snprintf(index_path, sizeof index_path, "%s/%s", dir, index_name);
        if ((rc = read_index(index_path, &index, err)) < 0) goto fail;
        if ((rc = read_weight_map(index_path, index, &map, &named, err)) < 0) goto fail;
        names_free(&files);
        files = named;
        named = (struct names){0};
    } else if (files.n == 0) {
        rc = tow_fail(err, TOW_ENOENT, "%s: no .safetensors file", dir);
        goto fail;
    } else if ((rc = check_numbering(dir, &files, err)) < 0) {
        goto fail;
    }
    if ((rc = check_there(dir, &files, err)) < 0) goto fail;
    if ((rc = open_files(c, &files, err)) < 0) goto fail;
    if (map && (rc = check_weight_map(c, index_path, map, err)) < 0) goto fail;
    if ((rc = sort_tensors(c, err)) < 0) goto fail;
    *out = c;
    c = NULL;
fail:
    model_checkpoint_close(c);
    json_free(index);
    names_free(&named);
    names_free(&indexes);
    names_free(&files);
    return rc;
}

void model_checkpoint_close(struct model_checkpoint *c)
{
    if (!c) return;
    for (size_t i = 0; i < c->n_files; i++) {
        model_safetensors_close(c->files[i]);
        free(c->names[i]);
    }
    free(c->names);
    free(c->files);
    free(c->by_name);
    free(c->dir);
    free(c);
}

const char *model_checkpoint_dir(const struct model_checkpoint *c)
{
    return c->dir;
}
size_t model_checkpoint_count(const struct model_checkpoint *c)
{
    return c->n;
}
size_t model_checkpoint_files(const struct model_checkpoint *c)
{
    return c->n_files;
}
uint64_t model_checkpoint_bytes(const struct model_checkpoint *c)
{
    return c->bytes;
}

const struct model_tensor *model_checkpoint_at(const struct model_checkpoint *c, size_t i)
{
    return i < c->n ? c->by_name[i] : NULL;
}

int64_t model_checkpoint_index(const struct model_checkpoint *c, const char *name)
{
    size_t lo = 0, hi = c->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int d = strcmp(c->by_name[mid]->name, name);
        if (d == 0) return (int64_t)mid;
        if (d < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return -1;
}

const struct model_tensor *model_checkpoint_find(const struct model_checkpoint *c, const char *name)
{
    int64_t i = model_checkpoint_index(c, name);
    return i < 0 ? NULL : c->by_name[i];
}
