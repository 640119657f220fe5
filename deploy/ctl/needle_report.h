/* ctl/needle_report.h - what a sweep found, as a table, as JSON and as an SVG heat map.
 *
 * Panel    One setting (filler, key type, top-k; a shadow type where ranks by other keys were asked
 *          for) over length and depth. A field of it says how many of its repetitions found the
 *          value and the median of its ranks. A shadow panel counts those that its keys would
 *          select.
 * Pure     Records in, text out; cells that were not run stay empty.
 */
#ifndef CTL_NEEDLE_REPORT_H
#define CTL_NEEDLE_REPORT_H

#include "deploy/ctl/needle_results.h"

struct ctl_report {
    const struct ctl_grid *grid;
    const struct ctl_results *results;
    struct ctl_texts texts;
    unsigned shadow;   /* bit per enum text_precision: panels for these too */
    const char *title; /* of the page: what was measured */
};

/* One field of a panel. */
struct ctl_field {
    int n, hits;   /* repetitions run; found (or, shadow: selected) */
    uint32_t rank; /* median of the ranks known, the lower one of two; 0: none known */
};
/* shadow -1: the keys that select. */
struct ctl_field ctl_report_field(const struct ctl_report *r, const struct ctl_cell *setting,
                                  int shadow);

void ctl_report_table(const struct ctl_report *r, struct tow_buf *out);
void ctl_report_json(const struct ctl_report *r, struct tow_buf *out);
void ctl_report_svg(const struct ctl_report *r, struct tow_buf *out);
void ctl_put_xml(struct tow_buf *out, const char *text); /* escaped; controls become '?' */

#endif
