/* ctl/verify.h - `towpath-ctl verify`: the three standing checks of a deployment.
 *
 * Checks   tools: a conversation in which the model calls tools twice and uses what they returned.
 *          secret: a value told in an earlier turn, other turns since.
 *          structured: a value that stands once among about 8K tokens of files, tables and logs.
 * Exit     0 all passed; 1 one failed; 2 one could not be made (no server, refused, bad setting):
 *          what is known of the others is printed all the same. A capture that the server refuses
 *          changes none of these: the check was made, and the report says that there is no capture.
 */
#ifndef CTL_VERIFY_H
#define CTL_VERIFY_H

#include "deploy/ctl/ask.h"

enum ctl_check_id { CTL_CHECK_TOOLS, CTL_CHECK_SECRET, CTL_CHECK_STRUCTURED, CTL_CHECKS };

/* A check that could not be made ends the run: those behind it are not run. */
enum ctl_check_state { CTL_NOT_RUN, CTL_NOT_MADE, CTL_FAILED, CTL_PASSED };

struct ctl_check {
    enum ctl_check_id id;
    enum ctl_check_state state;
    int turns;                /* requests sent */
    const char *expect;       /* text the last answer must have; borrowed */
    char why[600];            /* of a failure: what was missing; of one not made: the error */
    char note[200];           /* why there is no capture although one was asked for; often empty */
    struct ctl_answer answer; /* the last one */
};

/* The report as lines for people, or as one JSON object. [pure] */
void ctl_verify_print(const struct ctl_check *checks, size_t n, struct tow_buf *out);
void ctl_verify_json(const struct ctl_check *checks, size_t n, struct tow_buf *out);
/* A list of key types ("bf16,fp8") as bits of enum text_precision; NULL is none. */
int ctl_shadow_parse(const char *list, unsigned *out, struct tow_err *err);
/* {"verdict": ..., "rank": ..., ...} without braces, each member with a comma before it; nothing
 * when there was no capture. */
void ctl_put_ranks(struct tow_buf *out, const struct ctl_ranks *r);

int ctl_verify_main(int argc, char **argv);

#endif
