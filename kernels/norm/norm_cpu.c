/* kernels/norm/norm_cpu.c - row norms and rotations; one part is a block of rows or heads. */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/ops.h"

#include "common/base/err.h"

enum { ROWS = 8 }; /* rows a part takes: a row is microseconds, a part should be more */

struct job {
    const void *p;
    uint8_t *scratch;
    size_t stride;
};

static int open_job(struct kern_stream *s, struct job *j, const void *p, int64_t floats)
{
    j->p = p;
    j->scratch = kern_scratch_each(s, KERN_SLOT_OP, (size_t)kern_pad16(floats) * 4, &j->stride);
    return j->scratch ? 0 : TOW_ENOMEM;
}
static float *row_of(const struct job *j, int thread)
{
    return (float *)(j->scratch + j->stride * (size_t)thread);
}
static int64_t parts_of(int64_t n)
{
    return (n + ROWS - 1) / ROWS;
}

static void rmsnorm_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_rmsnorm *p = j->p;
    float *r = row_of(j, thread);
    for (int64_t t = part * ROWS; t < p->T && t < (part + 1) * ROWS; t++) {
        kern_row_load(kern_at(p->x, t * p->ld_x, p->act), p->act, p->D, r);
        kern_row_rmsnorm(r, p->D, p->eps, &p->w);
        kern_row_store(kern_at_mut(p->y, t * p->ld_y, p->act), p->act, p->D, r);
    }
}

int KERN_ISA(kern_rmsnorm)(struct kern_stream *s, const struct kern_rmsnorm *p)
{
    struct job j;
    if (p->T == 0) return 0;
    if (open_job(s, &j, p, p->D) < 0) return TOW_ENOMEM;
    kern_parallel(s, parts_of(p->T), rmsnorm_part, &j);
    return 0;
}

static void rope_table_part(void *arg, int64_t part, int thread)
{
    const struct kern_rope_table *p = arg;
    int32_t h = p->rd / 2;
    (void)thread;
    for (int64_t t = part * ROWS; t < p->T && t < (part + 1) * ROWS; t++)
        for (int32_t i = 0; i < h; i++)
            kern_cos_sin((float)p->pos[t] * p->inv_freq[i], &p->cos[t * h + i], &p->sin[t * h + i]);
}

int KERN_ISA(kern_rope_table)(struct kern_stream *s, const struct kern_rope_table *p)
{
    if (p->T == 0 || p->rd == 0) return 0;
    kern_parallel(s, parts_of(p->T), rope_table_part, (void *)p);
    return 0;
}

/* q / rms(q) with every step rounded to bf16, as the released code does it. */
static void head_norm_bf16(float *r, int32_t d, float eps)
{
    v16 s = v_zero();
    for (int32_t i = 0; i < d; i += 16) {
        v16 a = v_load(r + i);
        s = v_add(s, v_round_bf16(v_mul(a, a)));
    }
    float ms = kern_bf16_round(v_sum(s) / (float)d);
    v16 f = v_set1(kern_bf16_round(1.0f / sqrtf(kern_bf16_round(ms + eps))));
    for (int32_t i = 0; i < d; i += 16) v_store(r + i, v_round_bf16(v_mul(v_load(r + i), f)));
}

static void head_norm_f32(float *r, int32_t d, float eps)
{
    v16 f = v_set1(1.0f / sqrtf(kern_row_sumsq(r, d) / (float)d + eps));
    for (int32_t i = 0; i < d; i += 16) v_store(r + i, v_mul(v_load(r + i), f));
}

static void heads_rope_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_heads_rope *p = j->p;
    float *r = row_of(j, thread);
    int64_t n = (int64_t)p->T * p->H;
    for (int64_t i = part * ROWS; i < n && i < (part + 1) * ROWS; i++) {
        int64_t t = i / p->H;
        void *q = kern_at_mut(p->q, i * p->d, p->act);
        int32_t from = p->norm ? 0 : p->d - p->rd; /* without the norm only the end changes */
        kern_row_load(kern_at(q, from, p->act), p->act, p->d - from, r);
        if (p->norm && p->act == KERN_BF16) head_norm_bf16(r, p->d, p->eps);
        if (p->norm && p->act == KERN_F32) head_norm_f32(r, p->d, p->eps);
        kern_rotate(r + p->d - p->rd - from, p->cos + t * (p->rd / 2), p->sin + t * (p->rd / 2),
                    p->rd, p->inverse ? -1.0f : 1.0f);
        kern_row_store(kern_at_mut(q, from, p->act), p->act, p->d - from, r);
    }
}

int KERN_ISA(kern_heads_rope)(struct kern_stream *s, const struct kern_heads_rope *p)
{
    struct job j;
    if (p->T == 0) return 0;
    if (open_job(s, &j, p, p->d) < 0) return TOW_ENOMEM;
    kern_parallel(s, parts_of((int64_t)p->T * p->H), heads_rope_part, &j);
    return 0;
}

static void kv_prep_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_kv_prep *p = j->p;
    float *r = row_of(j, thread);
    int32_t h = p->rd / 2;
    for (int64_t t = part * ROWS; t < p->T && t < (part + 1) * ROWS; t++) {
        kern_row_load(kern_at(p->x, t * p->d, p->act), p->act, p->d, r);
        kern_row_rmsnorm(r, p->d, p->eps, &p->w);
        kern_row_round(r, p->d, p->act);
        kern_rotate(r + p->d - p->rd, p->cos + t * h, p->sin + t * h, p->rd, 1.0f);
        if (p->act == KERN_BF16) kern_row_e4m3(r, p->d - p->rd, 64, r);
        kern_row_store(kern_at_mut(p->y, t * p->d, p->act), p->act, p->d, r);
    }
}

int KERN_ISA(kern_kv_prep)(struct kern_stream *s, const struct kern_kv_prep *p)
{
    struct job j;
    if (p->T == 0) return 0;
    if (open_job(s, &j, p, p->d) < 0) return TOW_ENOMEM;
    kern_parallel(s, parts_of(p->T), kv_prep_part, &j);
    return 0;
}
