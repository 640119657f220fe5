/* kernels/gemm/linear_cpu.c - y = quant(x) . Wt, and the embedding.
 *
 * Rows of x are taken in blocks that fit the second-level cache as floats: a block is quantized
 * once into shared scratch, then the threads share out panels of weight rows; a panel is
 * dequantized into the thread's own scratch and multiplied with every row of the block. Keeping the
 * panel and streaming x instead was slower: floats of x from the third level cost more than
 * dequantizing again. The result of a row never depends on the blocks.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/gemm/amx_cpu.h"
#include "kernels/gemm/gemv_cpu.h"
#include "kernels/gemm/panel_cpu.h"
#include "kernels/ops.h"

#include "common/base/err.h"

int KERN_ISA(kern_rmsnorm)(struct kern_stream *s, const struct kern_rmsnorm *p);
int KERN_ISA(kern_heads_rope)(struct kern_stream *s, const struct kern_heads_rope *p);

enum {
    BLOCK_BYTES = 1300 * 1024, /* of a block of rows, out of 2 MiB */
    BLOCK_MIN = 36,            /* rows, however wide: below, dequantizing shows */
    BLOCK_MAX = 240,
    PANEL_BYTES = 320 * 1024, /* of dequantized weights per thread */
    PANEL_MAX = 32,
    C_ROWS = 48, /* rows of a panel's result held before they are stored */
};

struct job {
    const struct kern_linear *p;
    float *rows; /* [block][groups][ld] */
    uint8_t *panel;
    size_t stride;
    int64_t kp, ld, t0; /* ld: floats from row to row of the scratch */
    bool gemv; /* few rows: weights are converted in registers, panels are only shares of work */
    int32_t n_rows, panel_rows, panels; /* panels per group */
};

static void rows_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_linear *p = j->p;
    int64_t t = part / p->groups, g = part % p->groups;
    float *r = j->rows + part * j->ld;
    (void)thread;
    kern_row_load(kern_at(p->x, (j->t0 + t) * p->ld_x + g * p->K, p->x_dtype), p->x_dtype, p->K, r);
    kern_row_aq(r, p->K, p->aq, p->w.input_scale);
    if (j->gemv) kern_gemv_prepare(&p->w, r, j->kp);
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
    if (!j->gemv) kern_panel(&p->w, g * p->N + n0, nb, p->round_w, w, j->ld);
    for (int64_t t = 0; t < j->n_rows; t += C_ROWS) {
        int64_t na = j->n_rows - t < C_ROWS ? j->n_rows - t : C_ROWS;
        for (int64_t i = 0; i < na; i++) a[i] = j->rows + ((t + i) * p->groups + g) * j->ld;
        if (j->gemv)
            KERN_ISA(kern_gemv)(&p->w, g * p->N + n0, nb, a, na, c, PANEL_MAX);
        else
            kern_panel_times(&p->w, p->round_w, a, na, w, nb, j->ld, j->kp, c, PANEL_MAX);
        for (int64_t i = 0; i < na; i++)
            kern_row_store(kern_at_mut(p->y, (j->t0 + t + i) * p->ld_y + g * p->N + n0, p->y_dtype),
                           p->y_dtype, nb, c + i * PANEL_MAX);
    }
}

/* Equal blocks of whole tiles, none larger than the cache. */
static int64_t rows_per_block(int64_t T, int64_t floats)
{
    int64_t fit = BLOCK_BYTES / (floats * 4);
    fit = fit < BLOCK_MIN ? BLOCK_MIN : fit > BLOCK_MAX ? BLOCK_MAX : fit;
    int64_t n = (T + fit - 1) / fit, rows = (T + n - 1) / n;
    return rows <= KERN_TILE_A ? rows : (rows + KERN_TILE_A - 1) / KERN_TILE_A * KERN_TILE_A;
}

#if KERN_ISA_AMX
/* --- the same through the matrix unit: x is packed into tiles, sixteen rows a part */

enum {
    /* Of packed x of one group: with a panel they fit the second-level cache. */
    TILES_BYTES = 1024 * 1024,
    TILES_ROWS = 256, /* of a block; a panel is unpacked once for each block */
};

struct tiles_job {
    const struct kern_linear *p;
    uint32_t *x;      /* [groups][words] packed */
    uint8_t *scratch; /* per thread: floats of a row or a panel, then the panel's result */
    size_t stride, c_at;
    int64_t t0, n_rows, words;
    int64_t row_blocks, part_rows, parts; /* of a group */
};

static void tiles_pack(void *arg, int64_t part, int thread)
{
    const struct tiles_job *j = arg;
    const struct kern_linear *p = j->p;
    int64_t g = part / j->row_blocks, t = part % j->row_blocks * KERN_AMX_COLS;
    float *row = (float *)(j->scratch + j->stride * (size_t)thread);
    int64_t end = t + KERN_AMX_COLS < j->n_rows ? t + KERN_AMX_COLS : j->n_rows;
    for (; t < end; t++) {
        const void *x = kern_at(p->x, (j->t0 + t) * p->ld_x + g * p->K, p->x_dtype);
        kern_row_load(x, p->x_dtype, p->K, row);
        kern_row_aq(row, p->K, p->aq, 0);
        KERN_ISA(kern_amx_pack)(&p->w, row, j->x + g * j->words, t, j->n_rows);
    }
}

static void tiles_part(void *arg, int64_t part, int thread)
{
    const struct tiles_job *j = arg;
    const struct kern_linear *p = j->p;
    uint8_t *scratch = j->scratch + j->stride * (size_t)thread;
    float *c = (float *)(scratch + j->c_at);
    int64_t g = part / j->parts, n0 = part % j->parts * j->part_rows;
    int64_t nb = p->N - n0 < j->part_rows ? p->N - n0 : j->part_rows;
    const uint32_t *x = j->x + g * j->words;
    KERN_ISA(kern_amx_times)(&p->w, g * p->N + n0, nb, x, j->n_rows, c, j->part_rows, scratch);
    for (int64_t t = 0; t < j->n_rows; t++)
        kern_row_store(kern_at_mut(p->y, (j->t0 + t) * p->ld_y + g * p->N + n0, p->y_dtype),
                       p->y_dtype, nb, c + t * j->part_rows);
}

static int linear_tiles(struct kern_stream *s, const struct kern_linear *p)
{
    struct tiles_job j = {.p = p};
    const int64_t step = 2 * KERN_AMX_COLS; /* a panel meets so many rows of x at a time */
    int64_t fit = TILES_BYTES / (4 * kern_amx_x_words(1, p->K)) / step * step;
    int64_t block = fit < step ? step : fit > TILES_ROWS ? TILES_ROWS : fit;
    if (block > p->T) block = p->T;
    size_t row = (size_t)kern_pad16(p->K) * 4,
           times = kern_amx_scratch_bytes(p->K, block <= KERN_AMX_STREAM);
    j.part_rows = kern_amx_part((int64_t)p->N * p->groups, block, kern_stream_threads(s));
    j.parts = (p->N + j.part_rows - 1) / j.part_rows;
    j.words = kern_amx_x_words(block, p->K);
    j.c_at = ((row > times ? row : times) + 63) & ~(size_t)63;
    j.x = kern_scratch(s, KERN_SLOT_ROWS, (size_t)(j.words * p->groups) * 4);
    j.scratch = kern_scratch_each(s, KERN_SLOT_PANEL, j.c_at + (size_t)(block * j.part_rows) * 4,
                                  &j.stride);
    if (!j.x || !j.scratch) return TOW_ENOMEM;
    for (j.t0 = 0; j.t0 < p->T; j.t0 += block) {
        j.n_rows = p->T - j.t0 < block ? p->T - j.t0 : block;
        j.row_blocks = (j.n_rows + KERN_AMX_COLS - 1) / KERN_AMX_COLS;
        kern_parallel(s, j.row_blocks * p->groups, tiles_pack, &j);
        kern_parallel(s, j.parts * p->groups, tiles_part, &j);
    }
    return 0;
}
#endif

int KERN_ISA(kern_linear)(struct kern_stream *s, const struct kern_linear *p)
{
    struct job j = {.p = p, .kp = kern_pad16(p->K)};
    j.ld = kern_row_ld(j.kp);
    if (p->T == 0) return 0;
#if KERN_ISA_AMX
    if (kern_amx_fits(&p->w, p->x_dtype, p->aq)) return linear_tiles(s, p);
#endif
    int64_t block = rows_per_block(p->T, j.ld * p->groups), fit = PANEL_BYTES / (j.ld * 4);
    j.panel_rows = fit < 4 ? 4 : fit > PANEL_MAX ? PANEL_MAX : (int32_t)(fit & ~(int64_t)3);
    j.gemv = kern_gemv_fits(&p->w, p->T, p->round_w);
    if (j.gemv) j.panel_rows = PANEL_MAX;
    j.panels = (p->N + j.panel_rows - 1) / j.panel_rows;
    j.rows = kern_scratch(s, KERN_SLOT_ROWS, (size_t)(block * p->groups * j.ld) * 4);
    j.panel = kern_scratch_each(s, KERN_SLOT_PANEL, (size_t)(j.panel_rows * j.ld) * 4, &j.stride);
    if (!j.rows || !j.panel) return TOW_ENOMEM;
    for (j.t0 = 0; j.t0 < p->T; j.t0 += block) {
        j.n_rows = (int32_t)(p->T - j.t0 < block ? p->T - j.t0 : block);
        kern_parallel(s, (int64_t)j.n_rows * p->groups, rows_part, &j);
        kern_parallel(s, (int64_t)j.panels * p->groups, panel_part, &j);
    }
    return 0;
}

int KERN_ISA(kern_linears)(struct kern_stream *s, const struct kern_linears *p)
{
    int rc = p->norm ? KERN_ISA(kern_rmsnorm)(s, p->norm) : 0;
    if (rc == 0 && p->rope) rc = KERN_ISA(kern_heads_rope)(s, p->rope);
    for (int32_t i = 0; i < p->n && rc == 0; i++) rc = KERN_ISA(kern_linear)(s, &p->each[i]);
    return rc;
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
