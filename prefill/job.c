/* prefill/job.c - see job.h for the chart. */
#include "prefill/job.h"

#include "common/base/buf.h"
#include "common/base/err.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[PRE_JOB_STATES] = {"queued", "active", "shipping", "closing",
                                                  "gone"};

const char *pre_job_state_name(enum pre_job_state s)
{
    return s < PRE_JOB_STATES ? names[s] : "?";
}

void pre_job_set_state(struct pre_job *j, enum pre_job_state to, uint64_t now_ms)
{
    static const uint8_t legal[PRE_JOB_STATES] = {
        [PRE_JOB_QUEUED] = 1 << PRE_JOB_ACTIVE | 1 << PRE_JOB_CLOSING,
        [PRE_JOB_ACTIVE] = 1 << PRE_JOB_SHIPPING | 1 << PRE_JOB_CLOSING,
        [PRE_JOB_SHIPPING] = 1 << PRE_JOB_GONE | 1 << PRE_JOB_CLOSING,
        [PRE_JOB_CLOSING] = 1 << PRE_JOB_GONE,
    };
    tow_assert(legal[j->state] & 1 << to);
    j->state = to;
    j->since_ms = now_ms;
}

int pre_job_new(struct pre_job **out, uint64_t owner, const struct wire_prefill *m,
                uint32_t n_pages, uint64_t now_ms)
{
    struct pre_job *j = calloc(1, sizeof *j);
    if (!j) return TOW_ENOMEM;
    bool ok = true;
    tow_list_init(&j->all);
    tow_list_init(&j->line);
    tow_list_init(&j->by_id);
    j->ticket = m->ticket;
    j->owner = owner;
    j->since_ms = now_ms;
    wire_text_copy(m->decode_name, j->decode, sizeof j->decode);
    j->decode_incarnation = m->decode_incarnation;
    j->lease_ms = m->lease_ms;
    j->sampling = m->sampling;
    j->sampling.logit_bias.data =
        tow_copy(m->sampling.logit_bias.data, m->sampling.logit_bias.len, &ok);
    j->n_eos = m->eos.n;
    j->eos = tow_copy(m->eos.data, 4 * (size_t)m->eos.n, &ok);
    j->n_tokens = m->tokens.n;
    j->n_prompt = m->n_prompt;
    j->tokens = tow_copy(m->tokens.data, 4 * (size_t)m->tokens.n, &ok);
    j->max_output = m->max_tokens;
    if (work_capture_new(&j->capture, m->capture) < 0) ok = false;
    j->acked = calloc(n_pages, 1);
    if (!j->acked) ok = false;
    j->tell = true;
    kv_table_init(&j->table);
    if (!ok) {
        pre_job_free(j);
        return TOW_ENOMEM;
    }
    *out = j;
    return 0;
}

void pre_job_free(struct pre_job *j)
{
    if (!j) return;
    tow_assert(j->table.n_pages == 0 && !j->table.has_tail);
    tow_list_remove(&j->all);
    tow_list_remove(&j->line);
    tow_list_remove(&j->by_id);
    free((void *)j->sampling.logit_bias.data);
    free(j->eos);
    free(j->tokens);
    free(j->acked);
    work_capture_free(j->capture);
    free(j);
}
