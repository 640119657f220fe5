/* tests/support/checkpoint.h - a small checkpoint in memory that a test can spoil before it is
 * written.
 *
 * Why      Loader tests need one file that is right in all but one thing. The bytes are laid out
 *          here by hand, not by the writer under test.
 */
#ifndef TESTS_SUPPORT_CHECKPOINT_H
#define TESTS_SUPPORT_CHECKPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ckpt_form {
    CKPT_BF16,
    CKPT_NATIVE,
    CKPT_F32SCALE,
    CKPT_BASE,
    CKPT_NVFP4,
    CKPT_HF_BF16,
    CKPT_HF_FP8,
    CKPT_HF_NVFP4
};

struct ckpt_tensor {
    char name[128];
    char dtype[16];
    int64_t dims[4];
    int n_dims;
    uint8_t *data; /* owned */
    size_t bytes;
};

struct ckpt {
    struct ckpt_tensor *v; /* owned */
    size_t n;
    char *config; /* owned */
    char dir[64]; /* temporary folder; removed by ckpt_fini */
};

/* Layers 0 (hash), 4, 6 (dense) and an MTP block; D 128, 4 experts of inner width 128. */
void ckpt_init(struct ckpt *c, enum ckpt_form form);
void ckpt_fini(struct ckpt *c);

struct ckpt_tensor *ckpt_get(struct ckpt *c, const char *name); /* fails the test when absent */
void ckpt_remove(struct ckpt *c, const char *name);
size_t ckpt_remove_matching(struct ckpt *c,
                            const char *part); /* every name that contains part; how many */
void ckpt_set_dtype(struct ckpt *c, const char *name, const char *dtype,
                    size_t value_bytes); /* data zeroed */
void ckpt_add(struct ckpt *c, const char *name, const char *dtype, size_t value_bytes, int n_dims,
              const int64_t *dims, uint8_t fill);

/* Writes config.json and model.safetensors, or `shards` files with an index. */
void ckpt_write(const struct ckpt *c, int shards);
void ckpt_write_text(const struct ckpt *c, const char *name, const void *text, size_t len);
/* "DIR/name"; valid until the next call but three. */
const char *ckpt_path(const struct ckpt *c, const char *name);

#endif
