/* ctl/needle_results.h - records of a sweep, one JSON object a line, in a file that a later run can
 * go on with.
 *
 * Why      A sweep takes hours; what was run once is not run again.
 * Holds    A line is written whole and flushed. A last line without its end (the process or machine
 *          died) is cut off at the next open; anything else that is not a record is an error that
 *          names the line.
 */
#ifndef CTL_NEEDLE_RESULTS_H
#define CTL_NEEDLE_RESULTS_H

#include "deploy/ctl/needle.h"

struct ctl_results {
    struct ctl_record *items; /* owned */
    uint32_t n, cap;
    int fd;           /* -1: kept in memory only */
    const char *path; /* borrowed */
};

/* path NULL: no file. An existing file with something in it needs resume. Close also after a
 * failure. */
int ctl_results_open(struct ctl_results *r, const char *path, bool resume, struct tow_err *err);
void ctl_results_close(struct ctl_results *r);
int ctl_results_add(struct ctl_results *r, const struct ctl_record *rec, struct tow_err *err);
/* The record of that cell with such texts, or NULL. */
const struct ctl_record *ctl_results_find(const struct ctl_results *r, const struct ctl_cell *c,
                                          const struct ctl_texts *texts);

void ctl_record_put(struct tow_buf *out, const struct ctl_record *rec); /* without a line end */
/* null for the default, which is 0 in a cell. */
void ctl_put_topk(struct tow_buf *out, int64_t topk);
int ctl_record_parse(struct ctl_record *out, const char *line, size_t n, struct tow_err *err);

#endif
