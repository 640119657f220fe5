/* text/split.h - cuts text into pieces by a chain of regexes, as a tokenizer.json's pre_tokenizer.
 *
 * Why      Merges never cross the borders of these pieces, so the pieces decide the ids.
 * How      PCRE2, just-in-time compiled where the host allows it. Patterns were written for another
 *          engine (Oniguruma): what the two understand differently is refused when loaded.
 * Owner    Immutable once the stages are added; text_split_run is [any thread].
 * Errors   TOW_EFORMAT for a pattern we do not take, TOW_ETOOBIG when a match passes its limits.
 */
#ifndef TOW_TEXT_SPLIT_H
#define TOW_TEXT_SPLIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_err;
struct text_split;

#define TEXT_SPLIT_MAX_STAGES 16

/* What becomes of a match; the text between matches is a piece in any case. */
enum text_split_behavior {
    TEXT_SPLIT_ISOLATED,        /* a piece of its own */
    TEXT_SPLIT_REMOVED,         /* dropped */
    TEXT_SPLIT_MERGED_PREVIOUS, /* the end of the piece before it */
    TEXT_SPLIT_MERGED_NEXT,     /* the beginning of the piece after it */
    TEXT_SPLIT_CONTIGUOUS,      /* neighbouring matches make one piece */
};

/* Caller frees with text_split_free(). jit false: the interpreter, with the same results. */
int text_split_new(struct text_split **out, bool jit, struct tow_err *err);
void text_split_free(struct text_split *s); /* NULL is fine */

/* Adds the next stage; it cuts the pieces of the stages before. invert: what does not match counts
 * as the match. literal: the pattern is no regex. */
int text_split_add(struct text_split *s, const char *pattern, size_t len, bool literal,
                   enum text_split_behavior behavior, bool invert, struct tow_err *err);
size_t text_split_n_stages(const struct text_split *s);
bool text_split_has_jit(const struct text_split *s); /* every stage was compiled to machine code */

/* Scratch of one thread at a time. */
struct text_split_scratch;
int text_split_scratch_new(struct text_split_scratch **out, const struct text_split *s,
                           struct tow_err *err);
void text_split_scratch_free(struct text_split_scratch *w); /* NULL is fine */

/* Called for each piece, in order; begin < end are offsets into the text. Not 0 stops the run. */
typedef int (*text_split_on_piece)(void *ctx, size_t begin, size_t end, struct tow_err *err);

/* Cuts text[begin..end), which must be valid UTF-8 (and has its stand-ins, text/unicode.h, if the
 * pieces are to be those of the reference). The pieces' offsets are into text. *n_matches grows
 * by the searches made. */
int text_split_run(const struct text_split *s, struct text_split_scratch *w, const char *text,
                   size_t begin, size_t end, text_split_on_piece on_piece, void *ctx,
                   uint64_t *n_matches, struct tow_err *err);

/* Whether the first stage's regex matches in a short text. */
bool text_split_matches(const struct text_split *s, struct text_split_scratch *w, const char *text,
                        size_t len);

#endif
