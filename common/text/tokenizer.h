/* text/tokenizer.h - text to token ids and back, from a checkpoint's tokenizer.json.
 *
 * Why      The ids must be those the model was trained with: byte-level BPE behind regex splits,
 *          equal to Hugging Face `tokenizers` id for id, in time linear in the text (but for the
 *          logarithm of a heap) whatever the text is.
 * Owner    Immutable after load: every call on a const tokenizer is [any thread]. What one encode
 *          needs is taken for that call and freed with it.
 * Errors   TOW_EFORMAT for a tokenizer.json that is broken or uses a feature we do not have, naming
 *          file, field and value. TOW_EINVAL for text that is not UTF-8, with the byte offset.
 *          TOW_ETOOBIG when there are more ids than asked for or the text passes TEXT_MAX_TEXT.
 */
#ifndef TOW_TEXT_TOKENIZER_H
#define TOW_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_err;
struct text_tokenizer;

typedef int32_t text_id; /* a token; never negative in what we give out */

#define TEXT_MAX_ID   ((text_id)(1 << 24) - 1)
#define TEXT_MAX_TEXT ((size_t)64 << 20) /* bytes of one encode */
#define TEXT_MAX_FILE ((size_t)64 << 20)

/* Reads a tokenizer.json. Caller frees. On failure *out is untouched and *err says why. */
int text_tokenizer_load(struct text_tokenizer **out, const char *path, struct tow_err *err);
/* The same from memory; name stands for the file in messages. */
int text_tokenizer_parse(struct text_tokenizer **out, const char *name, const char *json,
                         size_t len, struct tow_err *err);
void text_tokenizer_free(struct text_tokenizer *t); /* NULL is fine */

/* ---- the vocabulary ---- */

/* One past the highest id; some ids below may have no token. */
text_id text_tokenizer_n_ids(const struct text_tokenizer *t);
/* The bytes a token stands for (not always whole characters), borrowed until free; NULL and
 * *len = 0 when the id has no token. */
const uint8_t *text_tokenizer_peek(const struct text_tokenizer *t, text_id id, size_t *len);
/* Added tokens never come out of plain text; special ones are those that decoding may skip. */
bool text_tokenizer_is_added(const struct text_tokenizer *t, text_id id);
bool text_tokenizer_is_special(const struct text_tokenizer *t, text_id id);
/* The added token written exactly so; TOW_ENOENT when there is none. */
int text_tokenizer_find(const struct text_tokenizer *t, const char *content, text_id *out,
                        struct tow_err *err);
/* Ids from a client: each must have a token. TOW_EINVAL names the first that has none, its index
 * and the range. */
int text_tokenizer_check_ids(const struct text_tokenizer *t, const text_id *ids, size_t n,
                             struct tow_err *err);

/* ---- encoding ---- */

/* A prompt is the bytes of its segments, one after another. Where allow_special is set the text may
 * be added tokens; elsewhere it is only ever ordinary text, whatever it spells. An added token must
 * lie whole in neighbouring segments that allow it. Borders mean nothing else: the ids are those of
 * the whole string, and a character may even be split by one. */
struct text_segment {
    const char *bytes; /* borrowed; may be NULL when len is 0 */
    size_t len;
    bool allow_special;
};

struct text_ids {
    text_id *ids; /* owned; free with text_ids_fini */
    size_t n;
    size_t cap;
};
void text_ids_fini(struct text_ids *ids); /* leaves it empty, fit for another encode */

/* What an encode did; for tests and benchmarks of its growth. */
struct text_encode_stats {
    uint64_t n_matches;    /* regex searches */
    uint64_t n_pieces;     /* pieces between splits */
    uint64_t n_steps;      /* BPE: symbols looked at and heap moves */
    uint64_t peak_symbols; /* bytes of the longest piece that went through the heap */
};

/* Appends the ids of the text to *out, at most max_ids in all (0: no bound but memory). On failure
 * out->n is as before. stats may be NULL; when given it is added to. */
int text_tokenizer_encode(const struct text_tokenizer *t, const struct text_segment *segs,
                          size_t n_segs, size_t max_ids, struct text_ids *out,
                          struct text_encode_stats *stats, struct tow_err *err);

#endif
