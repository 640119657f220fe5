/* kernels/gemm/linear_cpu.c - y = quant(x) . Wt, and the embedding.
 *
 * Rows of x are taken in blocks: each block is quantized once into shared floats, then the threads share out
 * panels of weight rows; a panel is dequantized into the thread's own scratch (it stays in the second-level
 * cache) and multiplied with every row of the block. The result of a row never depends on the blocks.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/gemm/tile_cpu.h"
#include "kernels/gemm/weight_cpu.h"
#include "kernels/ops.h"

#include "common/base/err.h"

enum {
    BLOCK_ROWS = 256, /* rows of x at a time: dequantizing a panel is then 1/256 of the work */
    PANEL_BYTES = 512 * 1024, /* of dequantized weights per thread */
    PANEL_MAX = 32,
    C_ROWS = 32, /* rows of a panel's result held before they are stored */
};

struct job {
    const struct kern_linear *p;
    float *rows; /* [block][groups][kp] */
    uint8_t *panel;
    size_t stride;
    int64_t kp, t0;
    int32_t n_rows, panel_rows, panels; /* panels per group */
};

static void rows_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_linear *p = j->p;
    int64_t t = part / p->groups, g = part % p->groups;
    float *r = j->rows + part * j->kp;
    (void)thread;
    kern_row_load(kern_at(p->x, (j->t0 + t) * p->ld_x + g * p->K, p->x_dtype), p->x_dtype, p->K, r);
    kern_row_aq(r, p->K, p->aq, p->w.input_scale);
}

static void panel_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_linear *p = j->p;
    float *w = (float *)(j->panel + j->stride * (size_t)thread);
    int64_t g = part / j->panels, n0 = part % j->panels * j->panel_rows;
    int64_t nb = p->N - n0 < j->panel_rows ? p->N - n0 : j->panel_rows;
    const float *a[C_ROWS];
    float c[C_ROWS * PANEL_MAX];
    for (int64_t i = 0; i < nb; i++)
        kern_weight_row(&p->w, g * p->N + n0 + i, p->round_w, w + i * j->kp);
    for (int64_t t = 0; t < j->n_rows; t += C_ROWS) {
        int64_t na = j->n_rows - t < C_ROWS ? j->n_rows - t : C_ROWS;
        for (int64_t i = 0; i < na; i++) a[i] = j->rows + ((t + i) * p->groups + g) * j->kp;
        kern_tile(a, na, w, nb, j->kp, j->kp, c, PANEL_MAX);
        for (int64_t i = 0; i < na; i++)
            kern_row_store(kern_at_mut(p->y, (j->t0 + t + i) * p->ld_y + g * p->N + n0, p->y_dtype),
                           p->y_dtype, nb, c + i * PANEL_MAX);
    }
}

int KERN_ISA(kern_linear)(struct kern_stream *s, const struct kern_linear *p)
{
    struct job j = {.p = p, .kp = kern_pad16(p->K)};
    int64_t fit = PANEL_BYTES / (j.kp * 4), block = p->T < BLOCK_ROWS ? p->T : BLOCK_ROWS;
    if (p->T == 0) return 0;
    j.panel_rows = fit < 4 ? 4 : fit > PANEL_MAX ? PANEL_MAX : (int32_t)(fit & ~(int64_t)3);
    j.panels = (p->N + j.panel_rows - 1) / j.panel_rows;
    j.rows = kern_scratch(s, KERN_SLOT_ROWS, (size_t)(block * p->groups * j.kp) * 4);
    j.panel = kern_scratch_each(s, KERN_SLOT_PANEL, (size_t)(j.panel_rows * j.kp) * 4, &j.stride);
    if (!j.rows || !j.panel) return TOW_ENOMEM;
    for (j.t0 = 0; j.t0 < p->T; j.t0 += BLOCK_ROWS) {
        j.n_rows = (int32_t)(p->T - j.t0 < BLOCK_ROWS ? p->T - j.t0 : BLOCK_ROWS);
        kern_parallel(s, (int64_t)j.n_rows * p->groups, rows_part, &j);
        kern_parallel(s, (int64_t)j.panels * p->groups, panel_part, &j);
    }
    return 0;
}

struct embed_job {
    const struct kern_embed *p;
    uint8_t *scratch;
    size_t stride;
};

static void embed_part(void *arg, int64_t t, int thread)
{
    const struct embed_job *j = arg;
    const struct kern_embed *p = j->p;
    float *r = (float *)(j->scratch + j->stride * (size_t)thread);
    int32_t d = p->w.k;
    if (p->ids[t] >= 0 && p->ids[t] < p->w.n)
        kern_weight_row(&p->w, p->ids[t], false, r);
    else
        memset(r, 0, (size_t)d * 4);
    for (int32_t i = 0; i < p->hc; i++)
        kern_row_store(kern_at_mut(p->out, (t * p->hc + i) * d, p->act), p->act, d, r);
}

int KERN_ISA(kern_embed)(struct kern_stream *s, const struct kern_embed *p)
{
    struct embed_job j = {.p = p};
    if (p->T == 0) return 0;
    j.scratch = kern_scratch_each(s, KERN_SLOT_OP, (size_t)kern_pad16(p->w.k) * 4, &j.stride);
    if (!j.scratch) return TOW_ENOMEM;
    kern_parallel(s, p->T, embed_part, &j);
    return 0;
}
