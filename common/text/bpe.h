/* text/bpe.h - byte pair encoding: merges neighbouring tokens of a piece, best rank first.
 *
 * Why      The heart of the tokenizer, apart from files and regexes, so that its cost can be seen:
 *          n log n in the length of the piece, whatever the piece.
 * Owner    Immutable once text_bpe_finish was called; text_bpe_encode is then [any thread].
 * Holds    Every byte has a token. A merge's result spells what its two parts spell.
 */
#ifndef TOW_TEXT_BPE_H
#define TOW_TEXT_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/text/tokenizer.h"

struct tow_err;

/* The bytes of a token, borrowed from the owner of the vocabulary. */
struct text_spelling {
    const uint8_t *bytes;
    uint32_t len;
};

struct text_bpe;

/* spellings[0..n_ids) must outlive it; len 0: no such token, or none that merging may make.
 * TOW_EFORMAT when two spell the same or a byte has none. Caller frees with text_bpe_free(). */
int text_bpe_new(struct text_bpe **out, const struct text_spelling *spellings, text_id n_ids,
                 size_t n_merges, struct tow_err *err);
void text_bpe_free(struct text_bpe *b); /* NULL is fine */

/* The token spelled so, or -1. */
text_id text_bpe_find(const struct text_bpe *b, const uint8_t *bytes, size_t len);
/* Adds the next merge, best first, at most n_merges. *made is the token it makes. TOW_EFORMAT when
 * there is no such token, TOW_EINVAL when the pair has a rank already. */
int text_bpe_add(struct text_bpe *b, text_id left, text_id right, text_id *made,
                 struct tow_err *err);
/* After the last merge. whole_words: a piece that is a token is that token, even where merging
 * would not make it (tokenizer.json's ignore_merges). */
int text_bpe_finish(struct text_bpe *b, bool whole_words, struct tow_err *err);

/* Appends one id; TOW_ETOOBIG when there are max_ids already (0: no bound). */
int text_ids_put(struct text_ids *out, text_id id, size_t max_ids, struct tow_err *err);

/* Memory of one thread at a time; grows with the longest piece, freed whole. */
struct text_bpe_scratch {
    struct text_bpe_symbol *symbols; /* owned */
    size_t symbols_cap;
    uint64_t *heap; /* owned; rank in the high half, position in the low */
    size_t heap_n, heap_cap;
    struct text_bpe_queue *queues;    /* owned; by rank */
    struct text_bpe_waiting *waiting; /* owned; what stands in the queues */
    size_t waiting_n, waiting_cap;
    uint32_t waiting_free; /* a list of places to use again; 0 ends it */
    uint64_t n_steps;      /* symbols looked at, heap entries moved: what the work is made of */
    uint64_t peak_symbols; /* of one piece through the heap */
};
void text_bpe_scratch_fini(struct text_bpe_scratch *w); /* all-zero is a fresh one */

/* Appends the tokens of one piece. TOW_ETOOBIG past max_ids ids in *out (0: no bound). */
int text_bpe_encode(const struct text_bpe *b, struct text_bpe_scratch *w, const uint8_t *piece,
                    size_t len, size_t max_ids, struct text_ids *out, struct tow_err *err);

#endif
