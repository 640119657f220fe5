/* proto/capture.c - see capture.h. */
#include "proto/capture.h"

#include "common/base/err.h"

static bool ascending(struct wire_ids ids)
{
    for (uint32_t i = 1; i < ids.n; i++)
        if (wire_ids_at(ids, i - 1) >= wire_ids_at(ids, i)) return false;
    return true;
}

void wire_put_capture(struct wire_writer *w, const struct wire_capture *c)
{
    wire_put_u8(w, c->steps);
    wire_put_u8(w, c->shadow);
    wire_put_u8(w, c->lists);
    wire_put_u32(w, c->max_steps);
    wire_put_ids(w, c->layers, WIRE_CAPTURE_MAX_LAYERS);
    wire_put_ids(w, c->entries, WIRE_CAPTURE_MAX_ENTRIES);
}

int wire_get_capture(struct wire_capture *out, const void *body, size_t n)
{
    struct wire_reader r = {.data = body, .len = n};
    *out = (struct wire_capture){.steps = wire_get_u8(&r)};
    out->shadow = wire_get_u8(&r);
    out->lists = wire_get_u8(&r);
    out->max_steps = wire_get_u32(&r);
    out->layers = wire_get_ids(&r, WIRE_CAPTURE_MAX_LAYERS);
    out->entries = wire_get_ids(&r, WIRE_CAPTURE_MAX_ENTRIES);
    bool good = !r.failed && out->steps >= WIRE_CAPTURE_PREFILL && out->steps <= WIRE_CAPTURE_ALL &&
                out->shadow < 1 << WIRE_SHADOWS && out->lists <= 1 && out->max_steps >= 1 &&
                out->max_steps <= WIRE_CAPTURE_MAX_STEPS && out->entries.n >= 1 &&
                ascending(out->layers) && ascending(out->entries);
    return good ? 0 : TOW_EWIRE;
}

static void put_ranks(struct wire_writer *w, const struct wire_ranks *r)
{
    wire_put_f32(w, r->kth);
    wire_put_f32(w, r->next);
    wire_put_bytes(w, r->ranks, WIRE_CAPTURE_MAX_ENTRIES * WIRE_RANK_BYTES);
}

static void get_ranks(struct wire_reader *r, uint32_t n_entries, struct wire_ranks *out)
{
    out->kth = wire_get_f32(r);
    out->next = wire_get_f32(r);
    out->ranks = wire_get_bytes(r, WIRE_CAPTURE_MAX_ENTRIES * WIRE_RANK_BYTES);
    if (out->ranks.len != n_entries * WIRE_RANK_BYTES) r->failed = true;
}

void wire_put_capture_row(struct wire_writer *w, const struct wire_capture_row *r)
{
    wire_put_u32(w, r->topk);
    wire_put_u32(w, r->n_visible);
    wire_put_ids(w, r->entries, WIRE_CAPTURE_MAX_ENTRIES);
    put_ranks(w, &r->own);
    wire_put_u8(w, r->shadow);
    for (int i = 0; i < WIRE_SHADOWS; i++)
        if (r->shadow >> i & 1) put_ranks(w, &r->shadows[i]);
    wire_put_ids(w, r->list, WIRE_CAPTURE_MAX_LIST);
}

static bool ranks_hold(const struct wire_ranks *r, uint32_t n_entries, uint32_t n_visible)
{
    for (uint32_t i = 0; i < n_entries; i++) {
        uint32_t rank = wire_rank_at(r, i).rank;
        if (rank < 1 || rank > n_visible) return false;
    }
    return true;
}

/* Ascending, and all of them visible. */
static bool entries_hold(struct wire_ids entries, uint32_t n_visible)
{
    return ascending(entries) &&
           (entries.n == 0 || wire_ids_at(entries, entries.n - 1) < n_visible);
}

int wire_get_capture_row(struct wire_capture_row *out, const void *body, size_t n)
{
    struct wire_reader r = {.data = body, .len = n};
    *out = (struct wire_capture_row){.topk = wire_get_u32(&r)};
    out->n_visible = wire_get_u32(&r);
    out->entries = wire_get_ids(&r, WIRE_CAPTURE_MAX_ENTRIES);
    get_ranks(&r, out->entries.n, &out->own);
    out->shadow = wire_get_u8(&r);
    for (int i = 0; i < WIRE_SHADOWS; i++)
        if (out->shadow >> i & 1) get_ranks(&r, out->entries.n, &out->shadows[i]);
    out->list = wire_get_ids(&r, WIRE_CAPTURE_MAX_LIST);
    bool good = !r.failed && out->topk >= 1 && out->shadow < 1 << WIRE_SHADOWS &&
                entries_hold(out->entries, out->n_visible) &&
                entries_hold(out->list, out->n_visible) && out->list.n <= out->topk &&
                ranks_hold(&out->own, out->entries.n, out->n_visible);
    for (int i = 0; good && i < WIRE_SHADOWS; i++)
        if (out->shadow >> i & 1)
            good = ranks_hold(&out->shadows[i], out->entries.n, out->n_visible);
    return good ? 0 : TOW_EWIRE;
}

struct wire_rank wire_rank_at(const struct wire_ranks *r, uint32_t i)
{
    const uint8_t *p = (const uint8_t *)r->ranks.data + (size_t)i * WIRE_RANK_BYTES;
    return (struct wire_rank){wire_u32_at(p), wire_u32_at(p + 4), wire_f32_at(p + 8)};
}
