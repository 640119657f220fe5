/* text/bpe.c - three ways through a piece, from cheap to general.
 *
 * 1. The piece is one token, and merging is known to make it: one look-up. finish() finds out which
 *    tokens merging makes of their own bytes, so nothing has to be cached later, no thread waits
 *    for another and no memory grows.
 * 2. Short: an array of symbols, scanned for the best merge until there is none.
 * 3. Long: symbols in a linked list, candidate merges in a heap by (rank, position). An entry whose
 *    pair has changed since is dropped when it comes up. Candidates of one rank nearly always come
 *    in order of position: those wait in a queue of their rank, of which only the first is in the
 *    heap. So the heap holds about as many entries as there are different pairs, not positions, and
 *    stays in the cache: a megabyte of one letter is a matter of queues alone.
 * Before 2 and 3 the piece is cut wherever no merge can ever join the two bytes (left one ends,
 * right one begins), which is exact and makes long pieces shorter.
 *
 * Order is that of the reference: the lowest rank first, of equal ranks the leftmost.
 */
#include "common/text/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/err.h"
#include "common/base/hash.h"

#define NO_RANK   UINT32_MAX
#define NONE      UINT32_MAX
#define SHORT_MAX 32 /* symbols; the scan is quadratic, and past this the heap is faster */

struct text_bpe_pair {
    text_id left, right; /* left < 0: free */
    uint32_t rank;
    text_id made;
};

struct text_bpe_symbol {
    text_id id;
    uint32_t prev, next; /* positions; NONE at the ends */
    uint32_t rank;       /* of the merge with next; NO_RANK when there is none, or this is gone */
};

struct text_bpe_queue {
    uint32_t head, tail; /* places in waiting; 0: empty. Positions rise from head to tail. */
};

struct text_bpe_waiting {
    uint32_t position, next;
};

struct text_bpe {
    const struct text_spelling *spellings; /* borrowed */
    text_id n_ids;
    uint32_t max_len; /* bytes of the longest token */
    text_id byte_ids[256];
    text_id *by_spelling; /* owned; open addressing, -1 free */
    size_t by_spelling_mask;
    struct text_bpe_pair *pairs; /* owned; open addressing */
    size_t pairs_mask;
    size_t n_merges, max_merges;
    uint64_t *whole;        /* owned; bit per id: a piece of its bytes is this token */
    uint64_t joins[256][4]; /* bit: some merge joins a byte with this next one */
};

/* ---- tables ---- */

static size_t table_size(size_t n)
{
    size_t size = 16;
    while (size < n * 2) size *= 2;
    return size;
}

text_id text_bpe_find(const struct text_bpe *b, const uint8_t *bytes, size_t len)
{
    if (len == 0 || len > b->max_len) return -1;
    for (size_t i = tow_hash64(bytes, len);; i++) {
        text_id id = b->by_spelling[i & b->by_spelling_mask];
        if (id < 0) return -1;
        const struct text_spelling *s = &b->spellings[id];
        if (s->len == len && memcmp(s->bytes, bytes, len) == 0) return id;
    }
}

static size_t pair_slot(const struct text_bpe *b, text_id left, text_id right)
{
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    size_t i = (size_t)(h >> 29);
    for (;; i++) {
        const struct text_bpe_pair *p = &b->pairs[i & b->pairs_mask];
        if (p->left < 0 || (p->left == left && p->right == right)) return i & b->pairs_mask;
    }
}

static const struct text_bpe_pair *pair_find(const struct text_bpe *b, text_id left, text_id right)
{
    const struct text_bpe_pair *p = &b->pairs[pair_slot(b, left, right)];
    return p->left < 0 ? NULL : p;
}

static uint32_t pair_rank(const struct text_bpe *b, text_id left, text_id right)
{
    const struct text_bpe_pair *p = pair_find(b, left, right);
    return p ? p->rank : NO_RANK;
}

static bool may_join(const struct text_bpe *b, uint8_t left, uint8_t right)
{
    return b->joins[left][right >> 6] >> (right & 63) & 1;
}

/* ---- building ---- */

int text_bpe_new(struct text_bpe **out, const struct text_spelling *spellings, text_id n_ids,
                 size_t n_merges, struct tow_err *err)
{
    struct text_bpe *b = calloc(1, sizeof *b);
    if (!b) return tow_fail(err, TOW_ENOMEM, "merges: out of memory");
    b->spellings = spellings;
    b->n_ids = n_ids;
    b->max_merges = n_merges;
    b->by_spelling_mask = table_size((size_t)n_ids) - 1;
    b->pairs_mask = table_size(n_merges) - 1;
    b->by_spelling = malloc((b->by_spelling_mask + 1) * sizeof *b->by_spelling);
    b->pairs = malloc((b->pairs_mask + 1) * sizeof *b->pairs);
    b->whole = calloc((size_t)n_ids / 64 + 1, sizeof *b->whole);
    int rc;
    if (!b->by_spelling || !b->pairs || !b->whole) {
        rc = tow_fail(err, TOW_ENOMEM, "merges: out of memory");
        goto fail;
    }
    memset(b->by_spelling, 0xFF, (b->by_spelling_mask + 1) * sizeof *b->by_spelling);
    memset(b->pairs, 0xFF, (b->pairs_mask + 1) * sizeof *b->pairs);

    for (text_id id = 0; id < n_ids; id++) {
        const struct text_spelling *s = &spellings[id];
        if (s->len == 0) continue;
        size_t i = tow_hash64(s->bytes, s->len);
        text_id other;
        for (; (other = b->by_spelling[i & b->by_spelling_mask]) >= 0; i++) {
            if (spellings[other].len != s->len || memcmp(spellings[other].bytes, s->bytes, s->len))
                continue;
            rc = tow_fail(err, TOW_EFORMAT, "tokens %d and %d spell the same bytes", (int)other,
                          (int)id);
            goto fail;
        }
        b->by_spelling[i & b->by_spelling_mask] = id;
        if (s->len > b->max_len) b->max_len = s->len;
    }
    for (int c = 0; c < 256; c++) {
        uint8_t byte = (uint8_t)c;
        b->byte_ids[c] = text_bpe_find(b, &byte, 1);
        if (b->byte_ids[c] < 0) {
            rc = tow_fail(err, TOW_EFORMAT, "no token for byte 0x%02x", (unsigned)c);
            goto fail;
        }
    }
    *out = b;
    return 0;

fail:
    text_bpe_free(b);
    return rc;
}

void text_bpe_free(struct text_bpe *b)
{
    if (!b) return;
    free(b->by_spelling);
    free(b->pairs);
    free(b->whole);
    free(b);
}

int text_bpe_add(struct text_bpe *b, text_id left, text_id right, text_id *made,
                 struct tow_err *err)
{
    tow_assert(left >= 0 && left < b->n_ids && right >= 0 && right < b->n_ids);
    tow_assert(b->n_merges < b->max_merges);
    const struct text_spelling *l = &b->spellings[left], *r = &b->spellings[right];
    uint8_t small[256], *joined = small;
    size_t len = (size_t)l->len + r->len;
    text_id id = -1;
    if (len <= b->max_len) {
        if (len > sizeof small && !(joined = malloc(len)))
            return tow_fail(err, TOW_ENOMEM, "merges: out of memory");
        memcpy(joined, l->bytes, l->len);
        memcpy(joined + l->len, r->bytes, r->len);
        id = text_bpe_find(b, joined, len);
        if (joined != small) free(joined);
    }
    if (id < 0) return tow_fail(err, TOW_EFORMAT, "makes no token of the vocabulary");

    struct text_bpe_pair *p = &b->pairs[pair_slot(b, left, right)];
    if (p->left >= 0)
        return tow_fail(err, TOW_EINVAL, "the pair stands already at merges[%u]", p->rank);
    *p = (struct text_bpe_pair){left, right, (uint32_t)b->n_merges++, id};
    uint8_t a = l->bytes[l->len - 1], z = r->bytes[0];
    b->joins[a][z >> 6] |= (uint64_t)1 << (z & 63);
    *made = id;
    return 0;
}

int text_bpe_finish(struct text_bpe *b, bool whole_words, struct tow_err *err)
{
    struct text_bpe_scratch w = {0};
    struct text_ids ids = {0};
    int rc = 0;
    for (text_id id = 0; id < b->n_ids && rc == 0; id++) {
        const struct text_spelling *s = &b->spellings[id];
        if (s->len == 0) continue;
        bool whole = whole_words || s->len == 1;
        if (!whole) {
            ids.n = 0;
            rc = text_bpe_encode(b, &w, s->bytes, s->len, 0, &ids, err);
            whole = rc == 0 && ids.n == 1 && ids.ids[0] == id;
        }
        if (whole) b->whole[id / 64] |= (uint64_t)1 << (id % 64);
    }
    text_ids_fini(&ids);
    text_bpe_scratch_fini(&w);
    return rc;
}

/* ---- encoding ---- */

int text_ids_put(struct text_ids *out, text_id id, size_t max_ids, struct tow_err *err)
{
    if (max_ids && out->n >= max_ids)
        return tow_fail(err, TOW_ETOOBIG, "text: more than %zu tokens", max_ids);
    if (out->n == out->cap) {
        size_t cap = out->cap ? out->cap * 2 : 64;
        text_id *ids = cap > SIZE_MAX / sizeof *ids ? NULL : realloc(out->ids, cap * sizeof *ids);
        if (!ids) return tow_fail(err, TOW_ENOMEM, "token ids: out of memory");
        out->ids = ids;
        out->cap = cap;
    }
    out->ids[out->n++] = id;
    return 0;
}

static int encode_short(const struct text_bpe *b, struct text_bpe_scratch *w, const uint8_t *piece,
                        size_t n, size_t max_ids, struct text_ids *out, struct tow_err *err)
{
    text_id ids[SHORT_MAX];
    uint32_t ranks[SHORT_MAX]; /* of the merge of i and i + 1 */
    for (size_t i = 0; i < n; i++) ids[i] = b->byte_ids[piece[i]];
    for (size_t i = 0; i + 1 < n; i++) ranks[i] = pair_rank(b, ids[i], ids[i + 1]);
    w->n_steps += n;
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[best]) best = i;
        w->n_steps += n;
        if (ranks[best] == NO_RANK) break;
        ids[best] = pair_find(b, ids[best], ids[best + 1])->made;
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
        if (best + 1 < n) {
            memmove(ranks + best + 1, ranks + best + 2, (n - best - 2) * sizeof *ranks);
            ranks[best] = pair_rank(b, ids[best], ids[best + 1]);
        }
        if (best > 0) ranks[best - 1] = pair_rank(b, ids[best - 1], ids[best]);
    }
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) rc = text_ids_put(out, ids[i], max_ids, err);
    return rc;
}

static int grow(void **p, size_t *cap, size_t want, size_t size, struct tow_err *err)
{
    if (want <= *cap) return 0;
    size_t n = *cap * 2 > want ? *cap * 2 : want;
    void *q = n > SIZE_MAX / size ? NULL : realloc(*p, n * size);
    if (!q) return tow_fail(err, TOW_ENOMEM, "tokenizer: out of memory for a piece of %zu", want);
    *p = q;
    *cap = n;
    return 0;
}

/* The heap has four children to a node: half the levels, and they share a cache line. */
static void sift_down(struct text_bpe_scratch *w, size_t i)
{
    uint64_t v = w->heap[i];
    for (;;) {
        size_t child = 4 * i + 1, end = child + 4 < w->heap_n ? child + 4 : w->heap_n;
        if (child >= w->heap_n) break;
        size_t least = child;
        for (size_t c = child + 1; c < end; c++)
            if (w->heap[c] < w->heap[least]) least = c;
        if (w->heap[least] >= v) break;
        w->heap[i] = w->heap[least];
        i = least;
        w->n_steps++;
    }
    w->heap[i] = v;
}

static int heap_push(struct text_bpe_scratch *w, uint64_t v, struct tow_err *err)
{
    int rc = grow((void **)&w->heap, &w->heap_cap, w->heap_n + 1, sizeof *w->heap, err);
    if (rc < 0) return rc;
    size_t i = w->heap_n++;
    while (i > 0 && w->heap[(i - 1) / 4] > v) {
        w->heap[i] = w->heap[(i - 1) / 4];
        i = (i - 1) / 4;
        w->n_steps++;
    }
    w->heap[i] = v;
    w->n_steps++;
    return 0;
}

static uint64_t entry(uint32_t rank, uint32_t position)
{
    return (uint64_t)rank << 32 | position;
}

/* A queue's head is in the heap too. What does not fit its order goes into the heap directly. */
static int add_candidate(struct text_bpe_scratch *w, uint32_t rank, uint32_t position,
                         struct tow_err *err)
{
    struct text_bpe_queue *q = &w->queues[rank];
    if (q->head && w->waiting[q->tail].position >= position)
        return heap_push(w, entry(rank, position), err);

    uint32_t place = w->waiting_free;
    if (place) {
        w->waiting_free = w->waiting[place].next;
    } else {
        size_t want = w->waiting_n + 1;
        int rc = grow((void **)&w->waiting, &w->waiting_cap, want, sizeof *w->waiting, err);
        if (rc < 0) return rc;
        place = (uint32_t)w->waiting_n++;
    }
    w->waiting[place] = (struct text_bpe_waiting){position, 0};
    w->n_steps++;
    if (q->head) {
        w->waiting[q->tail].next = place;
        q->tail = place;
        return 0;
    }
    q->head = q->tail = place;
    return heap_push(w, entry(rank, position), err);
}

/* Takes the best candidate; the heap must not be empty. */
static uint64_t take_candidate(struct text_bpe_scratch *w)
{
    uint64_t top = w->heap[0];
    uint32_t rank = (uint32_t)(top >> 32);
    struct text_bpe_queue *q = &w->queues[rank];
    uint32_t place = q->head;
    w->n_steps++;
    if (place && w->waiting[place].position == (uint32_t)top) {
        q->head = w->waiting[place].next;
        w->waiting[place].next = w->waiting_free;
        w->waiting_free = place;
        if (q->head) { /* the next in the queue takes its place in the heap */
            w->heap[0] = entry(rank, w->waiting[q->head].position);
            sift_down(w, 0);
            return top;
        }
    }
    w->heap[0] = w->heap[--w->heap_n];
    if (w->heap_n > 1) sift_down(w, 0);
    return top;
}

/* Sets the rank of the merge that begins at i and enters it as a candidate. */
static int offer(const struct text_bpe *b, struct text_bpe_scratch *w, uint32_t i,
                 struct tow_err *err)
{
    struct text_bpe_symbol *s = &w->symbols[i];
    s->rank = s->next == NONE ? NO_RANK : pair_rank(b, s->id, w->symbols[s->next].id);
    w->n_steps++;
    return s->rank == NO_RANK ? 0 : add_candidate(w, s->rank, i, err);
}

static int make_queues(const struct text_bpe *b, struct text_bpe_scratch *w, struct tow_err *err)
{
    if (w->queues) return 0;
    w->queues = calloc(b->max_merges + 1, sizeof *w->queues); /* pages untouched cost nothing */
    if (!w->queues) return tow_fail(err, TOW_ENOMEM, "tokenizer: out of memory");
    w->waiting_n = 1; /* place 0 means none */
    return 0;
}

static int encode_long(const struct text_bpe *b, struct text_bpe_scratch *w, const uint8_t *piece,
                       size_t n, size_t max_ids, struct text_ids *out, struct tow_err *err)
{
    int rc = grow((void **)&w->symbols, &w->symbols_cap, n, sizeof *w->symbols, err);
    if (rc == 0) rc = make_queues(b, w, err);
    if (rc < 0) return rc;
    struct text_bpe_symbol *sym = w->symbols;
    if (n > w->peak_symbols) w->peak_symbols = n;

    for (size_t i = 0; i < n; i++)
        sym[i] = (struct text_bpe_symbol){.id = b->byte_ids[piece[i]],
                                          .prev = i ? (uint32_t)i - 1 : NONE,
                                          .next = i + 1 < n ? (uint32_t)i + 1 : NONE,
                                          .rank = NO_RANK};
    w->n_steps += n;
    for (size_t i = 0; i + 1 < n && rc == 0; i++) rc = offer(b, w, (uint32_t)i, err);
    if (rc < 0) return rc;

    while (w->heap_n > 0) {
        uint64_t top = take_candidate(w);
        uint32_t i = (uint32_t)top, rank = (uint32_t)(top >> 32);
        if (sym[i].rank != rank) continue; /* the pair is another one by now, or gone */
        uint32_t j = sym[i].next;
        sym[i].id = pair_find(b, sym[i].id, sym[j].id)->made;
        sym[i].next = sym[j].next;
        sym[j].rank = NO_RANK;
        if (sym[j].next != NONE) sym[sym[j].next].prev = i;
        if (sym[i].prev != NONE) rc = offer(b, w, sym[i].prev, err);
        if (rc == 0) rc = offer(b, w, i, err);
        if (rc < 0) return rc;
    }
    for (uint32_t i = 0; i != NONE && rc == 0; i = sym[i].next)
        rc = text_ids_put(out, sym[i].id, max_ids, err);
    return rc;
}

static int encode_joined(const struct text_bpe *b, struct text_bpe_scratch *w, const uint8_t *piece,
                         size_t len, size_t max_ids, struct text_ids *out, struct tow_err *err)
{
    if (len == 1) return text_ids_put(out, b->byte_ids[piece[0]], max_ids, err);
    return len <= SHORT_MAX ? encode_short(b, w, piece, len, max_ids, out, err)
                            : encode_long(b, w, piece, len, max_ids, out, err);
}

int text_bpe_encode(const struct text_bpe *b, struct text_bpe_scratch *w, const uint8_t *piece,
                    size_t len, size_t max_ids, struct text_ids *out, struct tow_err *err)
{
    text_id id = text_bpe_find(b, piece, len);
    w->n_steps++;
    if (id >= 0 && b->whole[id / 64] >> (id % 64) & 1) return text_ids_put(out, id, max_ids, err);
    if (len >= NONE) return tow_fail(err, TOW_ETOOBIG, "text: a piece of %zu bytes", len);

    size_t begin = 0;
    int rc = 0;
    for (size_t i = 1; i <= len && rc == 0; i++) {
        if (i < len && may_join(b, piece[i - 1], piece[i])) continue;
        rc = encode_joined(b, w, piece + begin, i - begin, max_ids, out, err);
        begin = i;
    }
    return rc;
}

void text_bpe_scratch_fini(struct text_bpe_scratch *w)
{
    free(w->symbols);
    free(w->heap);
    free(w->queues);
    free(w->waiting);
    memset(w, 0, sizeof *w);
}
