/* ctl/explain.c - see explain.h. A way is a few numbers; one function runs any way and shows the
 * logits of each step to whoever keeps (baseline) or compares (rows) them. */
#include "deploy/ctl/explain.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/model/sample.h"
#include "common/model/settings.h"
#include "deploy/ctl/sequence.h"
#include "kernels/dev.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_CHUNK = 256,
    COMPANIONS = 2,
    BEFORE = 3, /* rows of the companion that stands before ours in a pass, */
    AFTER = 1,  /* and of the one behind it */
    COMPANY = BEFORE + AFTER,
    ONE_BY_ONE_MAX = 64, /* longest prompt that is replayed one token a pass, */
    BY_SEVEN_MAX = 2048, /* and by seven */
    BEHIND_LOSS = 8,     /* steps compared behind a recorded loss */
    INDEX_RATIO = 4,     /* source tokens of an entry that the indexer ranks */
};
static const int32_t chunk_sizes[] = {1, 7, 64, 256, 512};

struct way {
    int32_t chunk;
    int32_t topk;         /* 0: the model's */
    bool companions;      /* other sequences in every pass */
    bool hand_over;       /* into another pool once the prompt is computed */
    int32_t prefix_pages; /* these go into another pool, the rest is computed there */
    int32_t resume;       /* this many outputs are computed like a prompt; 0: none */
};

struct run {
    const struct ctl_explain *e;
    bool planning; /* rows are named, nothing is run */
    int32_t n_planned;
    const struct text_record_choice *choice;
    struct ctl_explain_report *out;
    struct model_options opt;
    char device[CTL_DEVICE_CHARS]; /* opt's */
    struct model *m;
    int32_t V, page_tokens;
    int32_t *ids; /* [n_prompt + n_output] owned */
    int32_t n_prompt, n_output;
    int32_t n_steps; /* of which logits are compared, */
    int32_t n_drawn; /* and of which tokens are */
    int32_t n_now;   /* of the way that runs */
    struct model_sampling sampling;
    struct model_bias *bias;       /* owned */
    float *base;                   /* [n_steps, V] owned */
    int32_t *drawn;                /* [n_steps] by the baseline; owned */
    struct model_sampler *sampler; /* owned */
};

typedef void (*on_step_fn)(struct run *r, void *ctx, int32_t step, float *logits);

/* ------------------------------------------------------------------ one way */

struct walk {
    struct run *r;
    struct model *m;
    const struct way *way;
    struct ctl_seq seq;
    struct kv_table company[COMPANIONS];
    int32_t at[COMPANIONS]; /* positions they have reached */
    int32_t *pass_ids;      /* owned */
    float *logits;          /* [V] owned */
    struct ctl_hand_over over;
};

/* Rows of a companion: our ids backwards, from its start again when its page is full. */
static struct kern_seq company_rows(struct walk *w, int which, int32_t n, int32_t row0,
                                    int32_t *ids)
{
    const struct run *r = w->r;
    if (w->at[which] + n > r->page_tokens) w->at[which] = 0;
    for (int32_t i = 0; i < n; i++)
        ids[i] = r->ids[(r->n_prompt - 1) - (w->at[which] + i + which) % r->n_prompt];
    struct kern_seq q = ctl_seq_rows(&w->seq, &w->company[which], w->at[which], n, w->way->topk);
    q.row0 = row0;
    w->at[which] += n;
    return q;
}

/* n of our ids from pos0; the logits of the last row when wanted. */
static int pass(struct walk *w, int64_t pos0, int32_t n, bool last, struct tow_err *err)
{
    struct kern_seq q[1 + COMPANIONS];
    int32_t n_seqs = 0, T = 0;
    if (w->way->companions) {
        q[n_seqs++] = company_rows(w, 0, BEFORE, 0, w->pass_ids);
        T = BEFORE;
    }
    q[n_seqs] = ctl_seq_rows(&w->seq, &w->seq.table, pos0, n, w->way->topk);
    q[n_seqs++].row0 = T;
    memcpy(w->pass_ids + T, w->r->ids + pos0, (size_t)n * sizeof *w->pass_ids);
    T += n;
    const int32_t row = T - 1;
    if (w->way->companions) {
        q[n_seqs++] = company_rows(w, 1, AFTER, T, w->pass_ids + T);
        T += AFTER;
    }
    const struct model_batch b = {.ids = w->pass_ids,
                                  .T = T,
                                  .seqs = q,
                                  .n_seqs = n_seqs,
                                  .pages = w->seq.pages,
                                  .n_pages = kv_pool_capacity(w->seq.pool),
                                  .logit_rows = &row,
                                  .n_logit_rows = last ? 1 : 0,
                                  .logits = w->logits};
    return model_forward(w->m, &b, err);
}

/* In chunks, from..to; the logits of to - 1 when wanted. */
static int compute(struct walk *w, int32_t from, int32_t to, bool last, struct tow_err *err)
{
    int rc = 0;
    for (int32_t at = from; rc == 0 && at < to; at += w->way->chunk) {
        const int32_t n = to - at < w->way->chunk ? to - at : w->way->chunk;
        rc = pass(w, at, n, last && at + n == to, err);
    }
    return rc;
}

static int open_seq(struct walk *w, struct ctl_seq *s, uint64_t seed, struct tow_err *err)
{
    return ctl_seq_open(s, w->m, (int64_t)w->r->n_prompt + w->r->n_now, COMPANIONS, COMPANIONS,
                        seed, err);
}

static int join_company(struct walk *w, struct tow_err *err)
{
    int rc = 0;
    for (int i = 0; rc == 0 && i < COMPANIONS; i++) {
        w->at[i] = 0;
        rc = kv_table_grow(&w->company[i], w->seq.pool, 1);
    }
    return rc < 0 ? tow_fail(err, rc, "no pages for the companions") : 0;
}

static void leave_company(struct walk *w)
{
    for (int i = 0; i < COMPANIONS && w->seq.pool; i++) kv_table_fini(&w->company[i], w->seq.pool);
}

/* The first n_tokens go into a pool of their own, and the sequence with them. */
static int move(struct walk *w, int32_t n_tokens, struct tow_err *err)
{
    struct ctl_seq to = {0};
    int rc = open_seq(w, &to, 5, err);
    if (rc < 0) {
        ctl_seq_close(&to);
        return rc;
    }
    w->over =
        (struct ctl_hand_over){.on_page_landed = w->r->e->on_page_landed, .ctx = w->r->e->ctx};
    ctl_seq_hand_over(&w->seq, &to, (uint32_t)kern_kv_pages_for(n_tokens, w->r->page_tokens),
                      &w->over);
    leave_company(w);
    ctl_seq_close(&w->seq);
    w->seq = to;
    return w->way->companions ? join_company(w, err) : 0;
}

static int go(struct walk *w, on_step_fn on_step, void *ctx, struct tow_err *err)
{
    const struct run *r = w->r;
    const int32_t first = r->n_prompt + w->way->resume,
                  prefix = w->way->prefix_pages * r->page_tokens;
    int rc = open_seq(w, &w->seq, 2, err);
    if (rc == 0 && w->way->companions) rc = join_company(w, err);
    if (rc == 0 && prefix) rc = compute(w, 0, prefix, false, err);
    if (rc == 0 && prefix) rc = move(w, prefix, err);
    if (rc == 0) rc = compute(w, prefix, first, true, err);
    if (rc < 0) return rc;
    on_step(w->r, ctx, w->way->resume, w->logits);
    if (w->way->hand_over) rc = move(w, first, err);
    for (int32_t i = w->way->resume + 1; rc == 0 && i < r->n_now; i++) {
        rc = pass(w, (int64_t)r->n_prompt + i - 1, 1, true, err);
        if (rc == 0) on_step(w->r, ctx, i, w->logits);
    }
    return rc;
}

static int run_way(struct run *r, struct model *m, const struct way *way, on_step_fn on_step,
                   void *ctx, struct ctl_hand_over *over, struct tow_err *err)
{
    struct walk w = {.r = r, .m = m, .way = way};
    for (int i = 0; i < COMPANIONS; i++) kv_table_init(&w.company[i]);
    w.pass_ids = malloc((size_t)(way->chunk + COMPANY) * sizeof *w.pass_ids);
    w.logits = malloc((size_t)r->V * sizeof *w.logits);
    int rc = w.pass_ids && w.logits ? go(&w, on_step, ctx, err)
                                    : tow_fail(err, TOW_ENOMEM, "explain: no memory for a row");
    leave_company(&w);
    ctl_seq_close(&w.seq);
    free(w.pass_ids);
    free(w.logits);
    if (over) *over = w.over;
    return rc;
}

/* ------------------------------------------------------------------ baseline */

/* What the recorded sampler makes of a row; -1: nothing can be drawn. */
static int32_t draw(const struct run *r, int32_t step, float *logits)
{
    struct model_draw d = {.sampling = r->sampling,
                           .output = r->ids + r->n_prompt,
                           .n_output = step,
                           .index = (uint64_t)step};
    return model_sample(r->sampler, logits, &d) < 0 ? -1 : d.choice.id;
}

static bool is_end(const struct run *r, int32_t id)
{
    const struct text_record_ids *eos = &r->e->record->eos;
    for (uint32_t i = 0; i < eos->n; i++)
        if (eos->ids[i] == id) return true;
    return false;
}

static void keep_step(struct run *r, void *ctx, int32_t step, float *logits)
{
    struct ctl_explain_report *out = r->out;
    (void)ctx;
    const int32_t id = draw(r, step, logits);
    if (step < r->n_steps) {
        memcpy(r->base + (int64_t)step * r->V, logits, (size_t)r->V * sizeof *logits);
        r->drawn[step] = id;
    }
    const bool at_end = step == r->n_output;
    const int32_t was = at_end ? -1 : r->ids[r->n_prompt + step];
    if (out->drawn_step >= 0 || (at_end ? is_end(r, id) : id == was)) return;
    out->drawn_step = step;
    out->recorded = was;
    out->drawn = id;
    out->recorded_logit = NAN;
    for (uint32_t i = 0; at_end && i < r->e->record->eos.n; i++) { /* the likeliest end token */
        const float v = logits[r->e->record->eos.ids[i]];
        if (!(out->recorded_logit >= v)) out->recorded_logit = v;
    }
    if (!at_end) out->recorded_logit = logits[was];
    out->drawn_logit = id < 0 ? NAN : logits[id];
}

/* ------------------------------------------------------------------ rows */

static void compare_step(struct run *r, void *ctx, int32_t step, float *logits)
{
    struct ctl_explain_row *row = ctx;
    const float *base = r->base + (int64_t)step * r->V;
    row->n_logits += r->V;
    if (memcmp(base, logits, (size_t)r->V * sizeof *base) == 0) return;
    if (row->first_step < 0) row->first_step = step;
    for (int32_t i = 0; i < r->V; i++) {
        if (memcmp(&base[i], &logits[i], sizeof *base) == 0) continue;
        const double d = fabs((double)base[i] - (double)logits[i]);
        row->n_differ++;
        if (!(row->max_abs >= d)) row->max_abs = d; /* NaN stays */
    }
    const int32_t id = draw(r, step, logits);
    if (row->token_step >= 0 || id == r->drawn[step]) return;
    row->token_step = step;
    row->token_was = r->drawn[step];
    row->token_is = id;
}

const struct ctl_explain_kind ctl_explain_kinds[] = {
    {"again", "the same again", "the replay differs from itself (chance, a race, bad memory)"},
    {"chunk", "chunks", "chunking changes the answer"},
    {"batch", "company", "batching changes the answer"},
    {"handover", "hand-over", "disaggregation changes the answer"},
    {"prefix", "reused prefix", "prefix reuse changes the answer"},
    {"resume", "resumption", "resuming a stream elsewhere changes the answer"},
    {"threads", "threads", "the number of threads changes the answer"},
    {"index", "types of index keys", NULL},
    {"kv", "types of keys and entries", NULL},
    {"topk", "top-k", NULL},
    {NULL, NULL, NULL}};

const struct ctl_explain_kind *ctl_explain_kind_of(const char *row)
{
    const struct ctl_explain_kind *k = ctl_explain_kinds;
    for (; k->name; k++) {
        const size_t n = strlen(k->name);
        if (!strncmp(row, k->name, n) && (row[n] == 0 || row[n] == '.')) break;
    }
    tow_assert(k->name != NULL);
    return k;
}

/* Is there a row that begins with these n letters, as far as kinds say? */
static bool begins_kind(const char *p, size_t n)
{
    for (const struct ctl_explain_kind *k = ctl_explain_kinds; n > 0 && k->name; k++) {
        const size_t whole = strlen(k->name);
        if (!strncmp(k->name, p, n < whole ? n : whole) && (n <= whole || p[whole] == '.'))
            return true;
    }
    return false;
}

int ctl_explain_check_only(const char *only, struct tow_err *err)
{
    for (const char *p = only;; p++) {
        const size_t n = strcspn(p, ",");
        if (!begins_kind(p, n)) {
            char rows[160] = "";
            for (const struct ctl_explain_kind *k = ctl_explain_kinds; k->name; k++)
                snprintf(rows + strlen(rows), sizeof rows - strlen(rows), *rows ? ", %s" : "%s",
                         k->name);
            return tow_fail(err, TOW_ECONFIG, "--only: no row begins with '%.*s'; rows are: %s",
                            n < 40 ? (int)n : 40, p, rows);
        }
        p += n;
        if (!*p) return 0;
    }
}

/* By --only: a list of names or their beginnings. */
static bool wanted(const struct run *r, const char *name)
{
    if (!r->e->only || r->planning) return true;
    for (const char *p = r->e->only; *p;) {
        const size_t n = strcspn(p, ",");
        if (n > 0 && strncmp(name, p, n) == 0) return true;
        p += n + (p[n] == ',');
    }
    return false;
}

/* NULL: not wanted. */
static struct ctl_explain_row *add_row(struct run *r, bool must, const char *meaning,
                                       const char *name)
{
    if (!wanted(r, name)) return NULL;
    tow_assert(r->out->n_rows < CTL_EXPLAIN_ROWS);
    struct ctl_explain_row *row = &r->out->rows[r->out->n_rows++];
    *row = (struct ctl_explain_row){
        .must = must, .meaning = meaning, .first_step = -1, .token_step = -1};
    snprintf(row->name, sizeof row->name, "%s", name);
    return row;
}

static void skip_row(struct run *r, bool must, const char *meaning, const char *name,
                     const char *fmt, ...) __attribute__((format(printf, 5, 6)));
static void skip_row(struct run *r, bool must, const char *meaning, const char *name,
                     const char *fmt, ...)
{
    struct ctl_explain_row *row = add_row(r, must, meaning, name);
    va_list ap;
    if (!row) return;
    row->skipped = true;
    va_start(ap, fmt);
    vsnprintf(row->note, sizeof row->note, fmt, ap);
    va_end(ap);
}

static uint64_t begin(const struct run *r, const char *name)
{
    if (r->e->on_progress) r->e->on_progress(r->e->ctx, r->out->n_rows, r->n_planned, name, -1);
    return tow_now_ms();
}

static void end(const struct run *r, const char *name, uint64_t began)
{
    if (r->e->on_progress)
        r->e->on_progress(r->e->ctx, r->out->n_rows, r->n_planned, name,
                          (double)(tow_now_ms() - began) / 1000);
}

static int run_row(struct run *r, struct model *m, const struct way *way, bool must,
                   const char *meaning, const char *name, struct tow_err *err)
{
    struct ctl_explain_row *row = add_row(r, must, meaning, name);
    struct ctl_hand_over over = {0};
    if (!row || r->planning) return 0;
    const uint64_t began = begin(r, name);
    int rc = run_way(r, m, way, compare_step, row, &over, err);
    end(r, name, began);
    if (rc < 0) return tow_note(err, "explain: %s", name), rc;
    if (over.n_stale > 0)
        snprintf(row->note, sizeof row->note,
                 "page %u of the sequence differs after it had landed (%lld pages do): stale, or "
                 "written to",
                 over.first_stale, (long long)over.n_stale);
    if (over.n_flipped > 0)
        snprintf(row->note, sizeof row->note, "%lld copies of pages failed their digest",
                 (long long)over.n_flipped);
    if (must && (row->n_differ > 0 || over.n_stale > 0 || over.n_flipped > 0)) r->out->n_failed++;
    return 0;
}

/* Where the stream was last taken up elsewhere; 0: nowhere. */
static int32_t last_loss(const struct text_record_choice *c)
{
    int32_t at = 0;
    for (uint32_t i = 0; i < c->n_attempts; i++)
        if (c->attempts[i].first_output > 0) at = (int32_t)c->attempts[i].first_output;
    return at;
}

static int chunk_rows(struct run *r, const struct way *base, struct tow_err *err)
{
    static const char meaning[] = "the chunk size of prefill";
    const int32_t n = r->n_prompt, own = base->chunk < n ? base->chunk : n;
    int32_t before = 0;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < sizeof chunk_sizes / sizeof *chunk_sizes; i++) {
        struct way w = *base;
        char name[24];
        w.chunk = chunk_sizes[i] < n ? chunk_sizes[i] : n; /* more is the prompt in one piece */
        if (w.chunk == own || w.chunk == before) continue;
        if ((w.chunk == 1 && n > ONE_BY_ONE_MAX) || (w.chunk == 7 && n > BY_SEVEN_MAX)) continue;
        before = w.chunk;
        snprintf(name, sizeof name, "chunk.%d", w.chunk);
        rc = run_row(r, r->m, &w, true, meaning, name, err);
    }
    if (n == 1) skip_row(r, true, meaning, "chunk", "the prompt has one token");
    return rc;
}

static int way_rows(struct run *r, const struct way *base, struct tow_err *err)
{
    static const char reused[] = "a prefix whose pages are reused";
    static const char resumed[] = "a stream that goes on elsewhere after a loss";
    char name[24];
    struct way w = *base;
    int rc = run_row(r, r->m, &w, true, "the same again: chance, races", "again", err);
    if (rc == 0) rc = chunk_rows(r, base, err);
    w.companions = true;
    if (rc == 0) rc = run_row(r, r->m, &w, true, "other sequences in the batch", "batch", err);
    w = *base;
    w.hand_over = true;
    if (rc == 0) rc = run_row(r, r->m, &w, true, "prefill and decode apart", "handover", err);
    w = *base;
    w.prefix_pages = (r->n_prompt - 1) / r->page_tokens;
    if (rc == 0 && w.prefix_pages > 0)
        rc = run_row(r, r->m, &w, true, reused, "prefix", err);
    else if (rc == 0)
        skip_row(r, true, reused, "prefix", "the prompt fills no page of %d tokens",
                 r->page_tokens);
    w = *base;
    const int32_t loss = last_loss(r->choice);
    w.resume = loss > 0 ? loss : r->n_steps / 2;
    snprintf(name, sizeof name, "resume.%d", w.resume);
    if (rc == 0 && w.resume >= r->n_steps && loss > 0)
        skip_row(r, true, resumed, "resume", "the loss at output %d lies behind the %d compared",
                 loss, r->n_steps);
    else if (rc == 0 && w.resume > 0)
        rc = run_row(r, r->m, &w, true, resumed, name, err);
    else if (rc == 0)
        skip_row(r, true, resumed, "resume", "the answer has one step");
    return rc;
}

/* The row by a model of its own. */
static int other_model(struct run *r, const struct model_options *opt, const struct way *way,
                       bool must, const char *meaning, const char *name, struct tow_err *err)
{
    struct model *m = NULL;
    if (!wanted(r, name)) return 0;
    if (r->planning) return run_row(r, NULL, way, must, meaning, name, err);
    int rc = model_open(&m, r->e->model_dir, opt, err);
    if (rc == 0) rc = run_row(r, m, way, must, meaning, name, err);
    model_close(m);
    return rc;
}

static int thread_row(struct run *r, const struct way *base, struct tow_err *err)
{
    static const char meaning[] = "the number of threads";
    struct model_options opt = r->opt;
    char name[24];
    if (strcmp(r->e->device, "cpu") != 0) {
        skip_row(r, true, meaning, "threads", "only the CPU has a team of threads");
        return 0;
    }
    opt.n_threads = kern_dev_threads(model_peek_dev(r->m)) == 1 ? 2 : 1;
    snprintf(name, sizeof name, "threads.%d", opt.n_threads);
    return other_model(r, &opt, base, true, meaning, name, err);
}

static int key_rows(struct run *r, const struct way *base, struct tow_err *err)
{
    static const char index[] = "the type of index keys", kv[] = "the type of keys and entries";
    char name[24];
    int rc = 0;
    if (r->opt.exact) {
        skip_row(r, false, index, "index", "exact numerics keep f32");
        skip_row(r, false, kv, "kv", "exact numerics keep f32");
        return 0;
    }
    for (int t = KERN_IK_FP4; rc == 0 && t <= KERN_IK_BF16; t++) {
        struct model_options opt = r->opt;
        if (t == (int)opt.ik_fmt) continue;
        opt.ik_fmt = (enum kern_ik_fmt)t;
        snprintf(name, sizeof name, "index.%s", model_ik_names[t]);
        rc = other_model(r, &opt, base, false, index, name, err);
    }
    for (int t = KERN_KV_FP8; rc == 0 && t <= KERN_KV_BF16; t++) {
        struct model_options opt = r->opt;
        if (t == (int)opt.kv_fmt) continue;
        opt.kv_fmt = (enum kern_kv_fmt)t;
        snprintf(name, sizeof name, "kv.%s", model_kv_names[t]);
        rc = other_model(r, &opt, base, false, kv, name, err);
    }
    return rc;
}

static int topk_rows(struct run *r, const struct way *base, struct tow_err *err)
{
    static const char meaning[] = "how many entries a token keeps";
    const int32_t entries = (r->n_prompt + r->n_steps - 1) / INDEX_RATIO;
    char name[24];
    int rc = 0;
    for (int32_t k = 2 * base->topk, i = 0; rc == 0 && i < 3; i++, k *= 2) {
        struct way w = *base;
        if (base->topk >= entries) {
            skip_row(r, false, meaning, "topk", "all %d entries are selected already", entries);
            break;
        }
        if (i == 2 || k > entries) k = entries; /* all there are */
        if (k > MODEL_MAX_TOPK) k = MODEL_MAX_TOPK;
        w.topk = k;
        snprintf(name, sizeof name, "topk.%d", k);
        rc = run_row(r, r->m, &w, false, meaning, name, err);
        if (k == entries || k == MODEL_MAX_TOPK) break;
    }
    return rc;
}

/* ------------------------------------------------------------------ what the record says */

static const struct text_record_worker *last_worker(const struct run *r, bool prefill)
{
    const struct text_record_choice *c = r->choice;
    if (c->n_attempts == 0) return NULL;
    const struct text_record_attempt *a = &c->attempts[c->n_attempts - 1];
    return &r->e->record->workers[prefill ? a->prefill : a->decode];
}

/* The index of what the worker said, among names. */
static int named(const struct text_record_worker *w, const char *field, const char *const *names,
                 int def, int *out, struct tow_err *err)
{
    const char *s = w ? text_record_fact(w, field) : NULL;
    *out = def;
    if (!s) return 0;
    for (*out = 0; names[*out]; ++*out)
        if (!strcmp(names[*out], s)) return 0;
    char right[64] = "";
    for (int i = 0; names[i]; i++)
        snprintf(right + strlen(right), sizeof right - strlen(right), i ? ", %s" : "%s", names[i]);
    return tow_fail(err, TOW_EINVAL, "record: %s of %s: '%.60s' is none of %s", field, w->name, s,
                    right);
}

static int numbered(const struct text_record_worker *w, const char *field, int32_t def, int32_t lo,
                    int32_t hi, int32_t *out, struct tow_err *err)
{
    const char *s = w ? text_record_fact(w, field) : NULL;
    char *end = NULL;
    const long long v = s ? strtoll(s, &end, 10) : def;
    if (s && (!*s || *end || v < lo || v > hi))
        return tow_fail(err, TOW_EINVAL, "record: %s of %s: '%.60s' is not in %d..%d", field,
                        w->name, s, lo, hi);
    *out = (int32_t)v;
    return 0;
}

/* Attempts under other settings than the last one's, which the replay uses. */
static void note_mixture(struct run *r)
{
    static const char *const fields[] = {"model.fingerprint",   "numerics.mode",
                                         "numerics.index_topk", "numerics.expert_activations",
                                         "layout.kv_dtype",     "layout.index_keys"};
    const struct text_record_choice *c = r->choice;
    const struct text_record_worker *last = last_worker(r, false);
    char *note = r->out->note;
    if (!last) {
        snprintf(note, sizeof r->out->note,
                 "the record names no workers: the defaults of a worker are assumed");
        return;
    }
    const struct text_record_worker *const ran[] = {last, last_worker(r, true)};
    for (size_t i = 0; i < 2 && !*note; i++) {
        const char *products = ran[i] ? text_record_fact(ran[i], "free.products") : NULL;
        if (products && strcmp(products, "bf16") != 0)
            snprintf(note, sizeof r->out->note,
                     "%s ran with --products %s: the replay has bf16's sums, which are closer",
                     ran[i]->name, products);
    }
    for (uint32_t i = 0; i + 1 < c->n_attempts && !*note; i++) {
        const struct text_record_worker *w = &r->e->record->workers[c->attempts[i].decode];
        for (size_t k = 0; k < sizeof fields / sizeof *fields && !*note; k++) {
            const char *a = text_record_fact(w, fields[k]), *b = text_record_fact(last, fields[k]);
            if (a && b && strcmp(a, b) != 0)
                snprintf(note, sizeof r->out->note,
                         "%s ran with %s %s, %s with %s: the replay is as the second", w->name,
                         fields[k], a, last->name, b);
        }
    }
}

static int read_settings(struct run *r, struct tow_err *err)
{
    const struct text_record_worker *w = last_worker(r, false), *p = last_worker(r, true);
    struct model_options *o = &r->opt;
    struct model_settings set = {.device = ctl_host_device(r->device, r->e->device),
                                 .threads = r->e->n_threads};
    int32_t topk = 0;
    int rc = named(w, "numerics.mode", model_numerics_names, 1, &set.numerics, err);
    if (rc == 0) rc = named(w, "layout.kv_dtype", model_kv_names, KERN_KV_FP8, &set.kv_dtype, err);
    if (rc == 0)
        rc = named(w, "layout.index_keys", model_ik_names, KERN_IK_FP4, &set.index_keys, err);
    if (rc == 0)
        rc = named(w, "numerics.expert_activations", model_expert_activations_names, 0,
                   &set.expert_activations, err);
    if (rc == 0) rc = numbered(w, "numerics.index_topk", 0, 1, MODEL_MAX_TOPK, &topk, err);
    if (rc == 0) rc = numbered(w, "layout.page_tokens", 0, 1, 1 << 20, &o->page_tokens, err);
    if (rc < 0) return rc;
    if (set.numerics == 0 && (set.kv_dtype != KERN_KV_F32 || set.index_keys != KERN_IK_F32))
        return tow_fail(err, TOW_EINVAL,
                        "record: numerics.mode exact with kv_dtype %s and index_keys %s: exact "
                        "goes with f32 for both",
                        model_kv_names[set.kv_dtype], model_ik_names[set.index_keys]);
    set.index_topk = topk;
    model_settings_take(&set, o);
    o->wrap_ops = r->e->wrap_ops;
    r->out->kv = model_kv_names[set.kv_dtype];
    r->out->ik = model_ik_names[set.index_keys];
    r->out->numerics = model_numerics_names[set.numerics];
    r->out->chunk = r->e->chunk_tokens ? r->e->chunk_tokens : p ? (int32_t)p->chunk_tokens : 0;
    if (r->out->chunk <= 0) r->out->chunk = DEFAULT_CHUNK;
    if (r->out->chunk > MODEL_MAX_ROWS - COMPANY) r->out->chunk = MODEL_MAX_ROWS - COMPANY;
    o->max_rows = r->out->chunk;
    const int32_t most = chunk_sizes[sizeof chunk_sizes / sizeof *chunk_sizes - 1];
    if (o->max_rows < most) o->max_rows = most;
    o->max_rows += COMPANY;
    const char *isa = w ? text_record_fact(w, "free.isa") : NULL;
    snprintf(r->out->recorded_isa, sizeof r->out->recorded_isa, "%s", isa ? isa : "");
    note_mixture(r);
    return 0;
}

static int read_choice(struct run *r, struct tow_err *err)
{
    const struct text_record *rec = r->e->record;
    if (r->e->choice >= rec->n_choices)
        return rec->n_choices == 1
                   ? tow_fail(err, TOW_EINVAL, "--choice %u: the record has one choice, 0",
                              r->e->choice)
                   : tow_fail(err, TOW_EINVAL, "--choice %u: the record has choices 0 to %u",
                              r->e->choice, rec->n_choices - 1);
    const struct text_record_choice *c = r->choice = &rec->choices[r->e->choice];
    const struct text_record_ids *prompt = &rec->prompts[c->prompt];
    const int32_t loss = last_loss(c);
    int32_t max = r->e->max_steps, max_drawn = max;
    if (max == 0) {
        max_drawn = CTL_EXPLAIN_DRAWN;
        max = CTL_EXPLAIN_STEPS;
        if (loss >= max && loss + BEHIND_LOSS <= CTL_EXPLAIN_STEPS_LOSS) max = loss + BEHIND_LOSS;
    }
    const int32_t whole = (int32_t)c->output.n + !strcmp(c->finish, "stop");
    r->n_prompt = (int32_t)prompt->n;
    r->n_output = (int32_t)c->output.n;
    r->n_steps = whole < max ? whole : max;
    r->n_drawn = whole < max_drawn ? whole : max_drawn;
    r->out->n_drawn = r->n_drawn;
    r->out->n_whole = whole;
    if (r->n_steps == 0)
        return tow_fail(err, TOW_EINVAL,
                        "record: choice %u has no output (%.40s): nothing to replay", r->e->choice,
                        c->finish);
    r->ids = malloc((size_t)(r->n_prompt + r->n_output) * sizeof *r->ids);
    r->bias = malloc((rec->n_bias + 1) * sizeof *r->bias);
    if (!r->ids || !r->bias) return tow_fail(err, TOW_ENOMEM, "explain: no memory for the ids");
    memcpy(r->ids, prompt->ids, prompt->n * sizeof *r->ids);
    if (c->output.n) memcpy(r->ids + prompt->n, c->output.ids, c->output.n * sizeof *r->ids);
    for (uint32_t i = 0; i < rec->n_bias; i++)
        r->bias[i] = (struct model_bias){rec->bias[i].id, rec->bias[i].bias};
    r->sampling = (struct model_sampling){.temperature = rec->temperature,
                                          .top_p = rec->top_p,
                                          .min_p = rec->min_p,
                                          .top_k = (int32_t)rec->top_k,
                                          .presence_penalty = rec->presence_penalty,
                                          .frequency_penalty = rec->frequency_penalty,
                                          .repetition_penalty = rec->repetition_penalty,
                                          .seed = c->seed,
                                          .n_logprobs = -1,
                                          .bias = r->bias,
                                          .n_bias = (int32_t)rec->n_bias};
    r->out->n_prompt = r->n_prompt;
    r->out->n_output = r->n_output;
    r->out->n_steps = r->n_steps;
    return 0;
}

/* Is this the model, and does the request fit it? */
static int check_model(struct run *r, struct tow_err *err)
{
    const struct model_shape *s = &model_peek_weights(r->m)->shape;
    const struct text_record_worker *w = last_worker(r, false);
    const char *print = w ? text_record_fact(w, "model.fingerprint") : NULL;
    model_weights_fingerprint(model_peek_weights(r->m), r->out->fingerprint);
    if (print && strcmp(print, r->out->fingerprint) != 0)
        return tow_fail(err, TOW_EMISMATCH,
                        "--model %s: its fingerprint is %s, the request was served by %.40s",
                        r->e->model_dir, r->out->fingerprint, print);
    for (int32_t i = 0; i < r->n_prompt + r->n_output; i++)
        if (r->ids[i] >= s->V)
            return tow_fail(err, TOW_EINVAL, "record: id %d: the model has 0..%d", r->ids[i],
                            s->V - 1);
    for (uint32_t i = 0; i < r->e->record->eos.n; i++)
        if (r->e->record->eos.ids[i] >= s->V)
            return tow_fail(err, TOW_EINVAL, "record: eos %d: the model has 0..%d",
                            r->e->record->eos.ids[i], s->V - 1);
    for (int32_t i = 0; i < r->sampling.n_bias; i++)
        if (r->bias[i].id >= s->V)
            return tow_fail(err, TOW_EINVAL, "record: logit_bias of %d: the model has 0..%d",
                            r->bias[i].id, s->V - 1);
    if ((int64_t)r->n_prompt + r->n_output > s->max_positions)
        return tow_fail(err, TOW_EINVAL,
                        "record: prompt of %d tokens and %d outputs exceed the model's %d "
                        "positions",
                        r->n_prompt, r->n_output, s->max_positions);
    return 0;
}

static int32_t topk_of(const struct run *r)
{
    const struct model_options *o = model_peek_options(r->m);
    const uint32_t asked = r->e->record->index_topk;
    if (asked == 0) return o->index_topk;
    return asked > (uint32_t)o->max_topk ? o->max_topk : (int32_t)asked;
}

static int all_rows(struct run *r, const struct way *base, struct tow_err *err)
{
    int rc = way_rows(r, base, err);
    if (rc == 0) rc = thread_row(r, base, err);
    if (rc == 0) rc = key_rows(r, base, err);
    if (rc == 0) rc = topk_rows(r, base, err);
    return rc;
}

/* Which rows this record has, and whether each name of --only is one's beginning. */
static int plan(struct run *r, const struct way *base, struct tow_err *err)
{
    struct ctl_explain_report *out = r->out;
    char names[CTL_EXPLAIN_ROWS * 24] = "";
    r->planning = true;
    int rc = all_rows(r, base, err);
    r->planning = false;
    const int32_t n_rows = out->n_rows;
    out->n_rows = 0;
    for (int32_t i = 0; rc == 0 && i < n_rows; i++) {
        snprintf(names + strlen(names), sizeof names - strlen(names), i ? ", %s" : "%s",
                 out->rows[i].name);
        r->n_planned += wanted(r, out->rows[i].name);
    }
    for (const char *p = r->e->only; rc == 0 && p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL) {
        const size_t n = strcspn(p, ",");
        int32_t i = 0;
        while (i < n_rows && strncmp(out->rows[i].name, p, n) != 0) i++;
        if (i == n_rows)
            rc = tow_fail(err, TOW_ECONFIG,
                          "--only: no row of this record begins with '%.*s'; rows are: %s",
                          n < 40 ? (int)n : 40, p, names);
    }
    return rc;
}

static int run_all(struct run *r, struct tow_err *err)
{
    struct ctl_explain_report *out = r->out;
    int rc = r->e->only ? ctl_explain_check_only(r->e->only, err) : 0;
    if (rc == 0) rc = read_choice(r, err);
    if (rc == 0) rc = read_settings(r, err);
    if (rc == 0) rc = model_open(&r->m, r->e->model_dir, &r->opt, err);
    if (rc == 0) rc = check_model(r, err);
    if (rc < 0) return rc;
    r->V = model_peek_weights(r->m)->shape.V;
    r->page_tokens = model_peek_layout(r->m)->page_tokens;
    snprintf(out->isa, sizeof out->isa, "%s", kern_dev_isa(model_peek_dev(r->m)));
    out->n_threads = kern_dev_threads(model_peek_dev(r->m));
    out->topk = topk_of(r);
    r->base = malloc((size_t)r->n_steps * (size_t)r->V * sizeof *r->base);
    r->drawn = malloc((size_t)r->n_steps * sizeof *r->drawn);
    if (!r->base || !r->drawn)
        return tow_fail(err, TOW_ENOMEM, "explain: no memory for %d rows of logits", r->n_steps);
    rc = model_sampler_new(&r->sampler, r->V, err);
    if (rc < 0) return rc;

    const struct way base = {.chunk = out->chunk, .topk = out->topk};
    rc = plan(r, &base, err);
    if (rc < 0) return rc;
    const uint64_t began = begin(r, "baseline");
    r->n_now = r->n_drawn;
    rc = run_way(r, r->m, &base, keep_step, NULL, NULL, err);
    r->n_now = r->n_steps;
    end(r, "baseline", began);
    return rc < 0 ? rc : all_rows(r, &base, err);
}

int ctl_explain_run(const struct ctl_explain *e, struct ctl_explain_report *out,
                    struct tow_err *err)
{
    const uint64_t began = tow_now_ms();
    struct run r = {.e = e, .out = out};
    memset(out, 0, sizeof *out);
    out->drawn_step = -1;
    int rc = run_all(&r, err);
    model_close(r.m);
    free(r.ids);
    free(r.bias);
    free(r.base);
    free(r.drawn);
    model_sampler_free(r.sampler);
    out->seconds = (double)(tow_now_ms() - began) / 1000;
    return rc;
}

bool ctl_explain_good(const struct ctl_explain_report *r)
{
    return r->n_failed == 0 && r->drawn_step < 0;
}
