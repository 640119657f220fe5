/* text/detok.h - token ids to text, one id at a time, in whole characters.
 *
 * Why      A character may be spread over several tokens, and tokens may hold bytes that are no
 *          character at all. One rule serves streams and whole answers, so that both give the same
 *          text: `text_detok_all` is nothing but the stream run to its end.
 * Rule     The bytes of the tokens are read as UTF-8. A whole character goes out as soon as its
 *          last byte is in. Up to three bytes of an unfinished one are held back. Bytes that can be
 *          no part of a character are written as U+FFFD, one for each longest run that begins like
 *          a character (Unicode's "substitution of maximal subparts", as Python and Rust do it),
 *          and so is, once, what is unfinished at the end.
 * Prompt   After a prompt that ends inside a character, the bytes that finish that character are
 *          the prompt's: they are swallowed, and so is it. If other bytes follow, the prompt's
 *          beginning is forgotten without a trace. Nothing of the prompt is ever written.
 * Owner    Whoever embeds it; the tokenizer must outlive it.
 */
#ifndef TOW_TEXT_DETOK_H
#define TOW_TEXT_DETOK_H

#include "common/text/tokenizer.h"

struct tow_buf;

struct text_detok {
    const struct text_tokenizer *tok; /* borrowed */
    bool skip_special;
    bool of_prompt; /* the held bytes began in the prompt */
    uint8_t n_held; /* 0..3 bytes that begin a character, between calls */
    uint8_t held[4];
};

void text_detok_init(struct text_detok *d, const struct text_tokenizer *tok, bool skip_special);
/* Starts after these ids; only the last few matter. Call between init and the first push. */
void text_detok_prompt(struct text_detok *d, const text_id *ids, size_t n);
/* Appends the characters that are complete now; maybe none. Ids without a token, and special ones
 * when skipped, stand for no bytes. Failure shows in the buffer. */
void text_detok_push(struct text_detok *d, text_id id, struct tow_buf *out);
/* Appends U+FFFD if something is held; d is then as after init. */
void text_detok_end(struct text_detok *d, struct tow_buf *out);

/* The text of n ids. */
void text_detok_all(const struct text_tokenizer *tok, const text_id *ids, size_t n,
                    bool skip_special, struct tow_buf *out);

#endif
