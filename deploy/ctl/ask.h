/* ctl/ask.h - one question to a served model, whole answer at once, and where the asked-for text
 * ranked in the index.
 *
 * Why      `verify` and `needle` send the same kind of request and read the same answer; in-process
 *          runs give theirs in the same form.
 * Owner    An answer belongs to its caller; parsing is pure.
 */
#ifndef CTL_ASK_H
#define CTL_ASK_H

#include "common/base/buf.h"
#include "common/text/verdict.h"
#include "deploy/ctl/client.h"

struct json;

enum { CTL_RANK_LAYERS = 64 };

/* What captures said of the entries that cover the asked-for text. Rank 0: not looked at. */
struct ctl_ranks {
    bool captured;
    struct text_verdict verdict;      /* its best row: the layer that looks */
    char text[320];                   /* one line for people */
    uint32_t shadow[TEXT_PRECISIONS]; /* best rank by other keys */
    struct {
        uint32_t layer, rank, shadow[TEXT_PRECISIONS];
    } layers[CTL_RANK_LAYERS]; /* best of each over all steps, ascending layers */
    uint32_t n_layers;
};

/* From all rows of one request. */
void ctl_ranks_judge(struct ctl_ranks *out, const struct text_verdict_row *rows, size_t n,
                     bool found);

struct ctl_ask {
    const char *model;    /* NULL: the server's only one */
    const char *messages; /* JSON list */
    const char *tools;    /* JSON list or NULL */
    int64_t max_tokens;
    int64_t topk;       /* index_topk; 0: the server's */
    const char *expect; /* text that stands once in the prompt; NULL: no capture */
    unsigned shadow;    /* bit per enum text_precision */
};

struct ctl_answer {
    struct tow_buf content; /* also that of a turn with calls */
    struct tow_buf calls;   /* JSON list of tool_calls; empty when there are none */
    char finish[24];
    int64_t prompt_tokens, tokens; /* -1: not said */
    struct ctl_ranks ranks;
};
void ctl_answer_init(struct ctl_answer *a);
void ctl_answer_fini(struct ctl_answer *a);

void ctl_ask_put(const struct ctl_ask *q, struct tow_buf *out); /* the request's body */
/* The body of a 200. TOW_EWIRE names what is missing. */
int ctl_answer_parse(struct ctl_answer *a, const struct json *root, const char *expect,
                     struct tow_err *err);

/* Sends it, waiting as long as the server says where it is full (at most a few times). a must be
 * initialised. A server that allows no captures gives TOW_EAUTH, another refused capture
 * TOW_EINVAL, anything else as ctl_client_refused(). */
int ctl_ask(const struct ctl_client *c, const struct ctl_ask *q, struct ctl_answer *a,
            struct tow_err *err);

/* Tokens of the prompt that these messages make, as the server counts. *max_len: its context, may
 * be NULL. */
int ctl_ask_count(const struct ctl_client *c, const char *model, const char *messages,
                  int64_t *tokens, int64_t *max_len, struct tow_err *err);

/* A copy that is cut, where it must be, between characters. */
void ctl_copy_text(char *to, size_t cap, const char *text);
/* [{"role": "user", "content": text}] */
void ctl_put_user(struct tow_buf *out, const char *text, size_t n);

#endif
