/* model/safetensors.h - one safetensors file: mapped and checked whole, or written.
 *
 * Why      Weights are used where they lie in the map; nothing may point outside it, alias or miss.
 * Holds    An open file's header is valid JSON without duplicate keys; every tensor lies inside the
 *          file; the tensors cover the data exactly, without hole or overlap; where the dtype is
 *          known the range fits shape and dtype.
 * Errors   TOW_EIO or TOW_EFORMAT, one line: file, tensor, expected, found.
 * Format   u64 LE header length; JSON {name: {dtype, shape, data_offsets}}; data. Alignment is not
 *          promised.
 */
#ifndef MODEL_SAFETENSORS_H
#define MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

struct tow_err;
struct model_safetensors;

/* X(enum, name in the file, bits per value) */
/* clang-format off */
#define MODEL_DTYPES(X) \
    X(F64, "F64", 64) X(F32, "F32", 32) X(F16, "F16", 16) X(BF16, "BF16", 16) \
    X(I64, "I64", 64) X(I32, "I32", 32) X(I16, "I16", 16) X(I8, "I8", 8) \
    X(U64, "U64", 64) X(U32, "U32", 32) X(U16, "U16", 16) X(U8, "U8", 8) \
    X(BOOL, "BOOL", 8) X(F8_E4M3, "F8_E4M3", 8) X(F8_E5M2, "F8_E5M2", 8) X(F8_E8M0, "F8_E8M0", 8) \
    X(C64, "C64", 64) X(F6_E2M3, "F6_E2M3", 6) X(F6_E3M2, "F6_E3M2", 6) X(F4, "F4", 4)
/* clang-format on */

enum model_dtype {
#define X(e, name, bits) MODEL_DT_##e,
    MODEL_DTYPES(X)
#undef X
        MODEL_DT_UNKNOWN, /* range-checked all the same; refused only where it is needed */
};

enum { MODEL_MAX_DIMS = 8 };

struct model_tensor {
    const char *name;       /* borrowed from the file */
    const char *dtype_name; /* as written; borrowed from the file */
    enum model_dtype dtype;
    int32_t n_dims; /* 0: scalar, one value */
    int64_t dims[MODEL_MAX_DIMS];
    const void *data; /* in the map; any alignment */
    uint64_t bytes;
    const struct model_safetensors *file; /* borrowed */
};

/* Maps and checks path. Caller frees with model_safetensors_close(); tensors live until then. */
int model_safetensors_open(struct model_safetensors **out, const char *path, struct tow_err *err);
/* The same over bytes in memory, which stay the caller's and must outlive the object. */
int model_safetensors_parse(struct model_safetensors **out, const char *path, const void *bytes,
                            size_t n, struct tow_err *err);
void model_safetensors_close(struct model_safetensors *f); /* NULL is fine */

const char *model_safetensors_path(const struct model_safetensors *f);
uint64_t model_safetensors_size(const struct model_safetensors *f); /* bytes of the file */
size_t model_safetensors_count(const struct model_safetensors *f);
const struct model_tensor *model_safetensors_at(const struct model_safetensors *f,
                                                size_t i); /* header order */
const struct model_tensor *model_safetensors_find(const struct model_safetensors *f,
                                                  const char *name); /* or NULL */
const char *model_safetensors_meta(const struct model_safetensors *f,
                                   const char *key); /* __metadata__, or NULL */

const char *model_dtype_name(enum model_dtype t);
int model_dtype_bits(enum model_dtype t); /* 0 when unknown */
/* "[128, 64]" into buf, cut when too long; returns buf. */
char *model_tensor_shape_text(const struct model_tensor *t, char *buf, size_t n);

/* A file cut while it is mapped faults on use. This installs a SIGBUS handler that writes one line
 * naming the file and ends the process with status 74 (EX_IOERR); a fault outside every map goes on
 * as before. [any thread] */
int model_weights_guard(struct tow_err *err);

/* ---- writing ---- */
struct model_safetensors_writer;
int model_safetensors_writer_new(struct model_safetensors_writer **out, struct tow_err *err);
void model_safetensors_writer_free(struct model_safetensors_writer *w);
int model_safetensors_writer_meta(struct model_safetensors_writer *w, const char *key,
                                  const char *value, struct tow_err *err);
/* data is borrowed until _write returns, which refuses a name that was added twice. */
int model_safetensors_writer_add(struct model_safetensors_writer *w, const char *name,
                                 enum model_dtype dtype, int32_t n_dims, const int64_t *dims,
                                 const void *data, struct tow_err *err);
/* Writes path.tmp and renames it. Widest types first: each tensor is aligned to its type. */
int model_safetensors_writer_write(const struct model_safetensors_writer *w, const char *path,
                                   struct tow_err *err);

#endif
