/* text/record.h - one request as the router recorded it: token ids in and out, and how it ran.
 *
 * Why      The router writes it, towpath-ctl explain replays it; both read the format from here.
 * Format   docs/http-api.md, *Recorded requests*: one JSON object, `"towpath_record": 1`. Fields
 *          are added, never changed or reused; unknown ones are ignored. Ids stand for the user's
 *          text and are as private.
 * Owner    All memory of a record is in its arena.
 */
#ifndef TOW_TEXT_RECORD_H
#define TOW_TEXT_RECORD_H

#include "common/base/arena.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tow_buf;
struct tow_err;

enum { TEXT_RECORD_VERSION = 1 };
#define TEXT_RECORD_MAX_BYTES    ((size_t)64 << 20)
#define TEXT_RECORD_MAX_TOKENS   (1u << 20) /* of one prompt, of one output */
#define TEXT_RECORD_MAX_ID       63         /* letters, digits, '-', '_' */
#define TEXT_RECORD_MAX_CHOICES  128
#define TEXT_RECORD_MAX_WORKERS  256
#define TEXT_RECORD_MAX_ATTEMPTS 256 /* of one choice */
#define TEXT_RECORD_MAX_FACTS    64  /* of one worker */
#define TEXT_RECORD_MAX_VOCAB    (1 << 24)
#define TEXT_RECORD_SUFFIX       ".json" /* of a file named by its request */

struct text_record_ids {
    const int32_t *ids; /* [n] */
    uint32_t n;
};

struct text_record_bias {
    int32_t id;
    float bias;
};

/* A process that worked on the request, as it said in its HELLO. */
struct text_record_worker {
    const char *name, *role; /* "prefill" or "decode" */
    uint64_t incarnation;
    uint32_t chunk_tokens;   /* prefill: rows of one pass; decode: 0 */
    const char *(*facts)[2]; /* [n_facts] field, value: "layout.kv_dtype", "fp8" */
    uint32_t n_facts;
};

/* One pair of workers that had a choice in hand; all but the last lost it again. */
struct text_record_attempt {
    uint32_t first_output;    /* outputs that were there before */
    uint32_t prefill, decode; /* indices of workers */
};

struct text_record_choice {
    uint32_t prompt;    /* index of prompts */
    uint64_t seed;      /* as drawn with: also when the client gave none */
    const char *finish; /* "stop", "length", "stop_string", "cancelled", "failed" */
    struct text_record_ids output;
    const struct text_record_attempt *attempts;
    uint32_t n_attempts;
};

struct text_record {
    struct tow_arena arena; /* owned */
    const char *id, *model;
    uint64_t created; /* seconds since 1970 */
    uint32_t n_vocab, max_tokens;
    struct text_record_ids eos;
    float temperature, top_p, min_p;
    float frequency_penalty, presence_penalty, repetition_penalty;
    uint32_t top_k, index_topk; /* 0: off; the worker's own */
    bool ignore_eos;
    const struct text_record_bias *bias;
    uint32_t n_bias;
    const struct text_record_ids *prompts;
    uint32_t n_prompts;
    const struct text_record_worker *workers;
    uint32_t n_workers;
    const struct text_record_choice *choices;
    uint32_t n_choices;
};

void text_record_fini(struct text_record *r); /* of a zeroed one is fine */
/* Appends it; tow_buf_failed() says that it was too long or memory ran out. */
/* What every record begins with: by it a file is told from others of such a name. */
#define TEXT_RECORD_BEGINS "{\"towpath_record\":"

void text_record_put(struct tow_buf *b, const struct text_record *r);

/* Any bytes give a record, to be ended with text_record_fini(), or an error with *out untouched:
 * TOW_EFORMAT, TOW_EINVAL or TOW_ETOOBIG with field, value and right range; TOW_ENOMEM. */
int text_record_parse(struct text_record *out, const char *text, size_t n, struct tow_err *err);
int text_record_load(struct text_record *out, const char *path, struct tow_err *err);

bool text_record_id_ok(const char *id);
/* What a worker said of a field; NULL when it said nothing. */
const char *text_record_fact(const struct text_record_worker *w, const char *field);

#endif
