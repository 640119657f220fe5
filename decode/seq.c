/* decode/seq.c - see seq.h for the chart. */
#include "decode/seq.h"

#include "common/base/buf.h"
#include "common/base/err.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[DEC_SEQ_STATES] = {"reserved", "loading", "ready",
                                                  "running",  "closing", "gone"};

const char *dec_seq_state_name(enum dec_seq_state s)
{
    return s < DEC_SEQ_STATES ? names[s] : "?";
}

void dec_seq_set_state(struct dec_seq *s, enum dec_seq_state to, uint64_t now_ms)
{
    static const uint8_t legal[DEC_SEQ_STATES] = {
        [DEC_SEQ_RESERVED] = 1 << DEC_SEQ_LOADING | 1 << DEC_SEQ_READY | 1 << DEC_SEQ_CLOSING,
        [DEC_SEQ_LOADING] = 1 << DEC_SEQ_READY | 1 << DEC_SEQ_CLOSING,
        [DEC_SEQ_READY] = 1 << DEC_SEQ_RUNNING | 1 << DEC_SEQ_CLOSING | 1 << DEC_SEQ_GONE,
        [DEC_SEQ_RUNNING] = 1 << DEC_SEQ_READY | 1 << DEC_SEQ_CLOSING | 1 << DEC_SEQ_GONE,
        [DEC_SEQ_CLOSING] = 1 << DEC_SEQ_GONE,
    };
    tow_assert(legal[s->state] & 1 << to);
    s->state = to;
    s->since_ms = now_ms;
}

bool dec_seq_ends_with(const struct dec_seq *s, uint32_t token)
{
    if (s->sampling.ignore_eos) return false;
    for (uint32_t i = 0; i < s->n_eos; i++)
        if (s->eos[i] == token) return true;
    return false;
}

int dec_seq_new(struct dec_seq **out, uint64_t owner, const struct wire_reserve *m, uint64_t now_ms)
{
    struct dec_seq *s = calloc(1, sizeof *s);
    if (!s) return TOW_ENOMEM;
    bool ok = true;
    tow_list_init(&s->age);
    tow_list_init(&s->turn);
    tow_list_init(&s->by_id);
    s->ticket = m->ticket;
    s->owner = owner;
    s->since_ms = now_ms;
    wire_text_copy(m->prefill_name, s->prefill, sizeof s->prefill);
    s->prefill_incarnation = m->prefill_incarnation;
    s->lease_ms = m->lease_ms;
    s->sampling = m->sampling;
    s->sampling.logit_bias.data =
        tow_copy(m->sampling.logit_bias.data, m->sampling.logit_bias.len, &ok);
    s->n_eos = m->eos.n;
    s->eos = tow_copy(m->eos.data, 4 * (size_t)m->eos.n, &ok);
    s->n_prior = s->n_output = m->outputs.n;
    s->outputs = tow_copy(m->outputs.data, 4 * (size_t)m->outputs.n, &ok);
    s->max_output = m->max_tokens;
    s->n_tokens = s->n_cached = m->n_tokens;
    if (work_capture_new(&s->capture, m->capture) < 0) ok = false;
    s->tell = true;
    kv_table_init(&s->table);
    if (!ok) {
        dec_seq_free(s);
        return TOW_ENOMEM;
    }
    *out = s;
    return 0;
}

void dec_seq_free(struct dec_seq *s)
{
    if (!s) return;
    tow_assert(s->table.n_pages == 0 && !s->table.has_tail);
    tow_list_remove(&s->age);
    tow_list_remove(&s->turn);
    tow_list_remove(&s->by_id);
    free((void *)s->sampling.logit_bias.data);
    free(s->eos);
    free(s->outputs);
    work_capture_free(s->capture);
    free(s);
}
