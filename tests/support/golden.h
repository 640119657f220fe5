/* tests/support/golden.h - reads the golden safetensors and measures how close numbers are.
 *
 * Why      Tests compare with stored files without the loader that is itself under test.
 * Rules    For tests only: files are ours, so anything unexpected aborts with a line that names it.
 */
#ifndef TESTS_SUPPORT_GOLDEN_H
#define TESTS_SUPPORT_GOLDEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct golden;
struct golden_tensor {
    char name[160];
    char dtype[12]; /* as in the file: F32, BF16, I32, U8, F8_E4M3, ... */
    int rank;
    int64_t shape[8];
    int64_t n;        /* elements */
    const void *data; /* borrowed from the golden */
    int64_t bytes;
};

/* path below tests/golden/data (TOWPATH_GOLDEN_DATA moves that root), else as given. */
struct golden *golden_open(const char *path);
void golden_close(struct golden *g);

int golden_count(const struct golden *g);
const struct golden_tensor *golden_at(const struct golden *g, int i);
const struct golden_tensor *golden_find(const struct golden *g, const char *name); /* or NULL */
const struct golden_tensor *golden_get(const struct golden *g, const char *name);  /* must exist */

/* The tensor as floats or ints (BF16, F32, U8, I32, I64, codes as numbers);
 * freed by golden_close. */
float *golden_f32(struct golden *g, const char *name);
int32_t *golden_i32(struct golden *g, const char *name);

/* rms(a - b) / rms(b); the largest |a - b|; the share of elements equal (NaN equals NaN). */
double golden_rel(const float *a, const float *b, int64_t n);
double golden_max_diff(const float *a, const float *b, int64_t n);
double golden_equal_share(const float *a, const float *b, int64_t n);
double golden_max_abs(const float *b, int64_t n);

#endif
