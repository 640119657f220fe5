/* ctl/needle_engine.h - the engine in this process as one that answers questions: text in, greedy
 * answer out, and the ranks of one piece of the text on the way.
 *
 * Why      A sweep over index-key types needs an engine for each; a served model keeps its own.
 * Owner    One thread; an engine holds its model until it is closed.
 */
#ifndef CTL_NEEDLE_ENGINE_H
#define CTL_NEEDLE_ENGINE_H

#include "deploy/ctl/needle.h"

struct ctl_engine;

/* keys: not OWN. kv_bf16: keys and entries in bf16 instead of fp8. Caller closes. */
int ctl_engine_open(struct ctl_engine **out, const char *model_dir, enum ctl_keys keys,
                    bool kv_bf16, int32_t n_threads, struct tow_err *err);
void ctl_engine_close(struct ctl_engine *e); /* NULL is fine */

/* A ctl_count_tokens; ctx is the engine. */
int ctl_engine_count(void *e, const char *text, size_t n, int64_t *tokens, struct tow_err *err);
/* Answers the user's text. expect must stand once in it (NULL: no ranks); topk 0: the
 * checkpoint's; shadow: bit per enum text_precision. a must be initialised. */
int ctl_engine_ask(struct ctl_engine *e, const char *text, size_t n, int32_t max_tokens,
                   int64_t topk, const char *expect, unsigned shadow, struct ctl_answer *a,
                   struct tow_err *err);

#endif
