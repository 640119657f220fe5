/* worker/capture.c - see capture.h. Rows go into one growing buffer, which keeps its memory from
 * step to step. Rejected: one buffer of the largest size per request. Most asks name two
 * entries. */
#include "common/worker/capture.h"

#include "common/base/err.h"
#include "common/base/log.h"

#include <stdlib.h>

/* Shadow types go through as bits. */
_Static_assert((int)WIRE_SHADOW_BF16 == (int)KERN_SHADOW_BF16, "order of shadow types");
_Static_assert((int)WIRE_SHADOW_FP8 == (int)KERN_SHADOW_FP8, "order of shadow types");
_Static_assert((int)WIRE_SHADOW_FP4 == (int)KERN_SHADOW_FP4, "order of shadow types");
_Static_assert((int)WIRE_SHADOWS == (int)KERN_SHADOWS, "order of shadow types");
_Static_assert((int)WIRE_CAPTURE_MAX_ENTRIES <= (int)MODEL_CAPTURE_ENTRIES, "entries of an ask");

enum { HEAD_BYTES = 8 };

/* A row's ranks of one key type as the wire has them. */
struct packed {
    uint8_t bytes[MODEL_CAPTURE_ENTRIES * WIRE_RANK_BYTES];
};

static struct wire_ranks pack_ranks(struct packed *p, const struct model_ranks *r, int32_t n)
{
    struct wire_writer w = {.data = p->bytes, .cap = sizeof p->bytes};
    for (int32_t i = 0; i < n; i++) {
        wire_put_u32(&w, (uint32_t)r->ranks[i].rank);
        wire_put_u32(&w, (uint32_t)r->ranks[i].equal);
        wire_put_f32(&w, r->ranks[i].score);
    }
    tow_assert(!w.failed);
    return (struct wire_ranks){r->kth, r->next, {p->bytes, (uint32_t)w.len}};
}

static struct wire_ids ids(const int32_t *v, int32_t n)
{
    return (struct wire_ids){v, (uint32_t)n};
}

/* [engine thread] */
static void on_row(void *ctx, const struct model_capture_row *row)
{
    struct work_capture *c = ctx;
    struct packed own, shadows[KERN_SHADOWS];
    struct wire_capture_row r = {.topk = (uint32_t)row->topk,
                                 .n_visible = (uint32_t)row->n_visible,
                                 .entries = ids(row->entries, row->n_entries),
                                 .own = pack_ranks(&own, &row->own, row->n_entries),
                                 .shadow = (uint8_t)row->shadow,
                                 .list = ids(row->list, row->n_list)};
    for (int s = 0; s < KERN_SHADOWS; s++)
        if (row->shadow >> s & 1)
            r.shadows[s] = pack_ranks(&shadows[s], &row->shadows[s], row->n_entries);
    struct wire_writer size = {0}, w = {0};
    wire_put_capture_row(&size, &r);
    w.data = c->lost || size.failed ? NULL : tow_buf_room(&c->rows, HEAD_BYTES + size.len);
    if (!w.data) {
        c->lost = true;
        tow_buf_clear(&c->rows);
        return;
    }
    w.cap = HEAD_BYTES + size.len;
    wire_put_u32(&w, (uint32_t)row->layer);
    wire_put_u32(&w, (uint32_t)size.len);
    wire_put_capture_row(&w, &r);
    tow_assert(!w.failed);
    c->rows.len += w.len;
}

/* The engine counts in int32_t; ids ascend. */
static bool ids_fit(struct wire_ids v)
{
    return v.n == 0 || wire_ids_at(v, v.n - 1) <= INT32_MAX;
}

const char *work_capture_check(struct wire_bytes ask, bool shadows, bool *shadowed)
{
    struct wire_capture a;
    *shadowed = false;
    if (ask.len == 0) return NULL;
    if (wire_get_capture(&a, ask.data, ask.len) < 0)
        return "capture: a field is out of range or ids are not ascending, see proto/capture.h";
    if (!ids_fit(a.layers)) return "capture.layers: an id is above 2147483647";
    if (!ids_fit(a.entries)) return "capture.entries: an id is above 2147483647";
    if (a.shadow && !shadows)
        return "capture.shadow: this worker can keep no shadow keys: its own index keys are f32, "
               "or "
               "those of the other two types do not fit into a page (wider with --kv-dtype bf16)";
    *shadowed = a.shadow != 0;
    return NULL;
}

static void copy_ids(int32_t *out, struct wire_ids v)
{
    for (uint32_t i = 0; i < v.n; i++) out[i] = (int32_t)wire_ids_at(v, i);
}

int work_capture_new(struct work_capture **out, struct wire_bytes ask)
{
    struct wire_capture a;
    *out = NULL;
    if (ask.len == 0) return 0;
    tow_assert(wire_get_capture(&a, ask.data, ask.len) == 0); /* it passed the check */
    struct work_capture *c = calloc(1, sizeof *c);
    if (!c) return TOW_ENOMEM;
    tow_buf_init(&c->rows, 0);
    c->ids = malloc((a.layers.n + a.entries.n) * sizeof *c->ids);
    if (!c->ids) {
        free(c);
        return TOW_ENOMEM;
    }
    copy_ids(c->ids, a.layers);
    copy_ids(c->ids + a.layers.n, a.entries);
    c->steps = a.steps;
    c->max_steps = a.max_steps;
    c->ask = (struct model_capture){.layers = c->ids,
                                    .n_layers = (int32_t)a.layers.n,
                                    .entries = c->ids + a.layers.n,
                                    .n_entries = (int32_t)a.entries.n,
                                    .shadow = a.shadow,
                                    .lists = a.lists,
                                    .on_row = on_row,
                                    .ctx = c};
    *out = c;
    return 0;
}

void work_capture_free(struct work_capture *c)
{
    if (!c) return;
    tow_buf_fini(&c->rows);
    free(c->ids);
    free(c);
}

const struct model_capture *work_capture_begin(struct work_capture *c, uint32_t step)
{
    if (!c) return NULL;
    tow_buf_clear(&c->rows);
    c->sent = 0;
    c->lost = false;
    c->step = step;
    bool wanted = step == 0 ? c->steps & WIRE_CAPTURE_PREFILL
                            : c->steps & WIRE_CAPTURE_DECODE && step <= c->max_steps;
    return wanted ? &c->ask : NULL;
}

void work_capture_warn(const char *worker, const struct model_capture *ask)
{
    const struct work_capture *c = ask ? ask->ctx : NULL;
    if (c && c->lost) tow_warn("%s: no memory for a capture: step %u is left out", worker, c->step);
}

bool work_capture_take(struct work_capture *c, struct wire_captured *out)
{
    if (!c || c->sent == c->rows.len) return false;
    const char *head = c->rows.data + c->sent;
    *out = (struct wire_captured){.step = c->step,
                                  .layer = wire_u32_at(head),
                                  .row = {head + HEAD_BYTES, wire_u32_at(head + 4)}};
    c->sent += HEAD_BYTES + out->row.len;
    return true;
}
