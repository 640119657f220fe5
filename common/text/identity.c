/* text/identity.c - see identity.h. */
#include "common/text/identity.h"

#include "common/base/hash.h"
#include "common/text/utf8.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char *next_item(struct text_identity *out, const char *field)
{
    struct text_identity_item *it = &out->items[out->n++];
    it->field = field;
    return it->value;
}

static bool hash_file(const char *path, uint64_t *digest)
{
    char piece[16384];
    struct tow_hash h;
    struct stat st;
    ssize_t n = -1;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe has no end */
    if (fd < 0) return false;
    tow_hash_begin(&h);
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
        while ((n = read(fd, piece, sizeof piece)) > 0) tow_hash_add(&h, piece, (size_t)n);
    close(fd);
    *digest = tow_hash_end(&h);
    return n == 0;
}

void text_identity_read(struct text_identity *out, const char *dir, const struct text_config *c)
{
    const struct {
        const char *field;
        int32_t value;
    } numbers[] = {{"model.vocab_size", c->vocab_size},
                   {"model.n_layers", c->n_layers},
                   {"model.dim", c->hidden_size}};
    char path[4096];
    uint64_t digest;
    out->n = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        snprintf(next_item(out, numbers[i].field), TEXT_IDENTITY_CHARS, "%d", numbers[i].value);
    const int n = snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    if (n > 0 && (size_t)n < sizeof path && hash_file(path, &digest))
        snprintf(next_item(out, "model.tokenizer"), TEXT_IDENTITY_CHARS, "%016" PRIx64, digest);
}

const char *text_folder_name(const char *dir, char *out, size_t cap)
{
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;
    size_t at = n;
    while (at > 0 && dir[at - 1] != '/') at--;
    size_t used = 0;
    while (at < n) {
        uint32_t cp = 0;
        const int bytes = text_utf8_next((const uint8_t *)dir + at, n - at, &cp);
        const bool shown = bytes > 0 && cp >= 0x20 && cp != 0x7f;
        const size_t take = bytes > 0 ? (size_t)bytes : 1, put = shown ? take : 1;
        if (used + put >= cap) break;
        memcpy(out + used, shown ? dir + at : "?", put);
        used += put;
        at += take;
    }
    out[used] = 0;
    return out;
}
