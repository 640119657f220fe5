/* ctl/numerics.h - `towpath-ctl numerics`: the audit that rules suspects out, on the operator's own
 * checkpoint and device, in this process.
 *
 * Why      A fact that is not recalled looks the same whether a kernel, a number format, the
 *          hand-over or the model is at fault. Each row here clears one suspect: what was measured,
 *          the bound it must keep, PASS or FAIL, and what that means.
 * Holds    References are computed in double from the checkpoint and from activations of a sample
 *          prompt. Everything under test runs through the op table of the device, so a back end
 *          that fills the table is audited by the same rows.
 */
#ifndef CTL_NUMERICS_H
#define CTL_NUMERICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_err;
struct tow_buf;
struct kern_ops;

enum { CTL_NUMERICS_MAX_ROWS = 64, CTL_NUMERICS_MIN_TOKENS = 272 };

struct ctl_numerics {
    const char *model_dir;
    const char *device; /* "cpu" or "cuda:N" */
    int32_t n_threads;  /* 0 = all cores */
    int32_t n_tokens;   /* length of the sample prompt; 0 = 1024 */
    int64_t n_entries;  /* of the largest selection; 0 = 1,048,576 */
    /* For the tests of the audit itself; NULL when it is used. wrap_ops replaces the device's table
     * by a faulty one. The other two get the bytes of each page of the second pool: before its
     * digest is checked, and after all digests were good. */
    const struct kern_ops *(*wrap_ops)(const struct kern_ops *of_device);
    void (*on_page_copied)(void *ctx, uint32_t page, uint8_t *bytes, size_t n);
    void (*on_page_landed)(void *ctx, uint32_t page, uint8_t *bytes, size_t n);
    void *ctx;
};

struct ctl_numerics_row {
    char name[32];
    double value, bound;
    bool at_least;       /* PASS when value >= bound; else when value <= bound */
    bool pass;           /* a value that is no number never passes */
    const char *what;    /* what value counts or measures */
    const char *meaning; /* one line */
    char detail[320];    /* further numbers; may be empty */
};

struct ctl_numerics_report {
    struct ctl_numerics_row rows[CTL_NUMERICS_MAX_ROWS];
    int32_t n_rows, n_failed;
    char broken_off[200]; /* why there are no more rows; empty when all were made */
    char fingerprint[17];
    char device[32], isa[16];
    int32_t n_threads, n_tokens;
    bool sample_is_text; /* else token ids drawn from a seed: the folder has no tokenizer */
    uint32_t n_pages;    /* handed over */
    uint64_t *digests;   /* [n_pages] of each page's parts; owned */
    double seconds;
};

/* Makes every row. 0 even when rows fail; TOW_E* when the audit could not be made, or not to its
 * end: the rows made until then are in the report.
 * ctl_numerics_fini() after every outcome. */
int ctl_numerics_run(const struct ctl_numerics *n, struct ctl_numerics_report *out,
                     struct tow_err *err);
void ctl_numerics_fini(struct ctl_numerics_report *r);

/* The report as a table for a terminal, as JSON, as a Markdown page; appended to out. */
void ctl_numerics_table(const struct ctl_numerics_report *r, struct tow_buf *out);
void ctl_numerics_json(const struct ctl_numerics_report *r, struct tow_buf *out);
void ctl_numerics_markdown(const struct ctl_numerics_report *r, const char *model_dir,
                           struct tow_buf *out);

/* The subcommand with its flags; returns the exit status: 0 all rows pass, 1 one fails, 2 the audit
 * could not be made (what was made of it is printed). */
int ctl_numerics_main(int argc, char **argv);

#endif
