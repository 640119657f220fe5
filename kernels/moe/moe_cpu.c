/* kernels/moe/moe_cpu.c - the routed experts; all experts of a layer in order.
 *
 * Rows are taken in blocks. Of a block, (row, slot) pairs are sorted by expert, stably. Three
 * rounds of parts follow: quantize x; per (expert, panel of the inner width) gate and up products
 * and the activation; per panel of the output the down products of all experts in ascending order,
 * added as they come. An output element thus belongs to one part, and its sum has one order,
 * whatever the threads do. An expert with few rows goes through the decode kernel, one with many
 * through panels; both give the same bits. Where the matrix unit does the products, the rows of
 * each expert are packed for it before each of the two.
 */
#include "kernels/cpu/row.h"
#include "kernels/cpu/team.h"
#include "kernels/gemm/amx_cpu.h"
#include "kernels/gemm/gemv_cpu.h"
#include "kernels/gemm/panel_cpu.h"
#include "kernels/ops.h"

#include "common/base/err.h"

int KERN_ISA(kern_linear)(struct kern_stream *s, const struct kern_linear *p);
int KERN_ISA(kern_route)(struct kern_stream *s, const struct kern_route *p);
int KERN_ISA(kern_swiglu)(struct kern_stream *s, const struct kern_swiglu *p);

enum {
    BLOCK_ROWS = 1024, /* so that an expert's weights are dequantized for several rows each */
    PANEL_BYTES = 512 * 1024,
    PANEL_MAX = 32,
    C_ROWS = 48,
};

struct pair {
    int32_t expert, row; /* row within the block */
    float weight;
};
struct group {
    int32_t expert, first, n;   /* pairs first .. first+n-1 */
    int64_t x_packed, y_packed; /* matrix unit: where its rows begin, in words */
};

struct job {
    const struct kern_moe *p;
    struct pair *pairs;
    struct group *groups;
    float *x, *y;   /* [rows, dl], [pairs, il] */
    float *x_small; /* x in the order the decode kernel wants, or NULL: the same */
    uint8_t *panel;
    size_t stride;
    int64_t dp, ip, dl, il, t0;              /* padded widths; floats from row to row */
    int32_t n_rows, n_pairs, n_groups, most; /* most: rows of one expert */
    int32_t up_rows, up_panels, down_rows;
    bool tiles;       /* products on the matrix unit */
    uint32_t *packed; /* its rows of x, later of y */
    int64_t packed_words;
    size_t c_at; /* results in a thread's scratch */
};

static void sort_pairs(struct job *j, int32_t *count)
{
    const struct kern_moe *p = j->p;
    int32_t at = 0;
    int64_t x_at = 0, y_at = 0;
    j->most = 0;
    memset(count, 0, (size_t)p->E * sizeof *count);
    for (int64_t i = 0; i < (int64_t)j->n_rows * p->k; i++) {
        int32_t e = p->experts[j->t0 * p->k + i];
        if (e >= 0 && e < p->E) count[e]++;
    }
    j->n_groups = 0;
    for (int32_t e = 0; e < p->E; e++) {
        if (count[e] == 0) continue;
        int32_t n = count[e];
        j->groups[j->n_groups++] = (struct group){e, at, n, x_at, y_at};
        x_at += kern_amx_x_words(n, p->D);
        y_at += kern_amx_x_words(n, p->I);
        if (n > j->most) j->most = n;
        count[e] = at; /* from now on: where the next pair of e goes */
        at += n;
    }
    j->n_pairs = at;
    j->packed_words = x_at > y_at ? x_at : y_at;
    for (int64_t i = 0; i < (int64_t)j->n_rows * p->k; i++) {
        int32_t e = p->experts[j->t0 * p->k + i];
        if (e >= 0 && e < p->E)
            j->pairs[count[e]++] =
                (struct pair){e, (int32_t)(i / p->k), p->weights[j->t0 * p->k + i]};
    }
}

static bool is_small(const struct job *j, int32_t rows)
{
    return kern_gemv_fits(&j->p->w1[0], rows, false);
}

static void x_part(void *arg, int64_t r, int thread)
{
    const struct job *j = arg;
    const struct kern_moe *p = j->p;
    float *x = j->x + r * j->dl;
    (void)thread;
    kern_row_load(kern_at(p->x, (j->t0 + r) * p->D, p->act), p->act, p->D, x);
    /* NVFP4 scales belong to the expert: input_rows() quantizes there. */
    if (p->aq == KERN_AQ_NVFP4) return;
    kern_row_aq(x, p->D, p->aq, 0);
    if (!j->x_small) return;
    memcpy(j->x_small + r * j->dl, x, (size_t)j->dp * 4);
    kern_gemv_prepare(&p->w1[0], j->x_small + r * j->dl, j->dp);
}

static int32_t rows_per_panel(int64_t ld, int matrices)
{
    int64_t fit = PANEL_BYTES / (ld * 4 * matrices);
    return fit < 4 ? 4 : fit > PANEL_MAX ? PANEL_MAX : (int32_t)(fit & ~(int64_t)3);
}

/* The quantized x rows of n pairs; NVFP4 ones are made in q, by the scale of w. */
static void input_rows(const struct job *j, const struct pair *pairs, int64_t n, bool small,
                       const struct kern_weight *w, float *q, const float **a)
{
    const float *x = small && j->x_small ? j->x_small : j->x;
    for (int64_t i = 0; i < n; i++) {
        a[i] = x + pairs[i].row * j->dl;
        if (j->p->aq != KERN_AQ_NVFP4) continue;
        memcpy(q + i * j->dl, j->x + pairs[i].row * j->dl, (size_t)j->dp * 4);
        kern_row_aq(q + i * j->dl, j->p->D, KERN_AQ_NVFP4, w->input_scale);
        if (small) kern_gemv_prepare(w, q + i * j->dl, j->dp);
        a[i] = q + i * j->dl;
    }
}

#if KERN_ISA_AMX
static void pack_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct group *g = &j->groups[part];
    (void)thread;
    for (int32_t i = 0; i < g->n; i++) {
        const float *x = j->x + j->pairs[g->first + i].row * j->dl;
        KERN_ISA(kern_amx_pack)(&j->p->w1[g->expert], x, j->packed + g->x_packed, i, g->n);
    }
}
#endif

/* All rows of the group times nb weight rows on the matrix unit; packed: where they begin in
 * j->packed; c has rows of ld_c. */
static void tiles_times(const struct job *j, const struct kern_weight *w, int64_t n0, int64_t nb,
                        int64_t packed, const struct group *g, float *c, int64_t ld_c,
                        uint8_t *scratch)
{
#if KERN_ISA_AMX
    KERN_ISA(kern_amx_times)(w, n0, nb, j->packed + packed, g->n, c, ld_c, scratch);
#else
    (void)j, (void)w, (void)n0, (void)nb, (void)packed, (void)g, (void)c, (void)ld_c, (void)scratch;
#endif
}

/* y = round(weight * gate(up)) for the pairs at c's rows. */
static void gate_rows(const struct job *j, const struct group *g, int64_t r, int64_t na, int64_t n0,
                      int64_t nb, const float *cg, const float *cu, int64_t ld_c)
{
    const struct kern_moe *p = j->p;
    for (int64_t i = 0; i < na; i++) {
        float *y = j->y + (g->first + r + i) * j->il + n0;
        for (int64_t n = 0; n < nb; n += 16) {
            int w = nb - n < 16 ? (int)(nb - n) : 16;
            v16 gv = v_round_act(v_loadn(cg + i * ld_c + n, w), p->act);
            v16 uv = v_round_act(v_loadn(cu + i * ld_c + n, w), p->act);
            v16 v = v_mul(kern_gate(gv, uv, p->limit), v_set1(j->pairs[g->first + r + i].weight));
            v_storen(y + n, v_round_act(v, p->act), w);
        }
    }
}

static void up_tiles(const struct job *j, const struct group *g, int64_t n0, int64_t nb,
                     uint8_t *scratch)
{
    float *c1 = (float *)(scratch + j->c_at), *c3 = c1 + (int64_t)j->most * j->up_rows;
    tiles_times(j, &j->p->w1[g->expert], n0, nb, g->x_packed, g, c1, j->up_rows, scratch);
    tiles_times(j, &j->p->w3[g->expert], n0, nb, g->x_packed, g, c3, j->up_rows, scratch);
    gate_rows(j, g, 0, g->n, n0, nb, c1, c3, j->up_rows);
}

static void up_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_moe *p = j->p;
    const struct group *g = &j->groups[part / j->up_panels];
    const struct kern_weight *m1 = &p->w1[g->expert], *m3 = &p->w3[g->expert];
    int64_t n0 = part % j->up_panels * j->up_rows;
    int64_t nb = p->I - n0 < j->up_rows ? p->I - n0 : j->up_rows;
    uint8_t *scratch = j->panel + j->stride * (size_t)thread;
    float *w1 = (float *)scratch;
    float *w3 = w1 + j->up_rows * j->dl, *q = w3 + j->up_rows * j->dl;
    bool small = is_small(j, g->n);
    const float *a[C_ROWS];
    float cg[C_ROWS * PANEL_MAX], cu[C_ROWS * PANEL_MAX];
    if (j->tiles) {
        up_tiles(j, g, n0, nb, scratch);
        return;
    }
    if (!small) {
        kern_panel(m1, n0, nb, false, w1, j->dl);
        kern_panel(m3, n0, nb, false, w3, j->dl);
    }
    for (int64_t r = 0; r < g->n; r += C_ROWS) {
        const struct pair *pairs = j->pairs + g->first + r;
        int64_t na = g->n - r < C_ROWS ? g->n - r : C_ROWS;
        input_rows(j, pairs, na, small, m1, q, a);
        if (small)
            KERN_ISA(kern_gemv)(m1, n0, nb, a, na, cg, PANEL_MAX);
        else
            kern_panel_times(m1, false, a, na, w1, nb, j->dl, j->dp, cg, PANEL_MAX);
        if (p->aq == KERN_AQ_NVFP4) input_rows(j, pairs, na, small, m3, q, a);
        if (small)
            KERN_ISA(kern_gemv)(m3, n0, nb, a, na, cu, PANEL_MAX);
        else
            kern_panel_times(m3, false, a, na, w3, nb, j->dl, j->dp, cu, PANEL_MAX);
        gate_rows(j, g, r, na, n0, nb, cg, cu, PANEL_MAX);
    }
}

static void y_part(void *arg, int64_t g, int thread)
{
    const struct job *j = arg;
    const struct kern_moe *p = j->p;
    const struct group *group = &j->groups[g];
    const struct kern_weight *w2 = &p->w2[group->expert];
    (void)thread;
    for (int32_t i = group->first; i < group->first + group->n; i++) {
        float *y = j->y + i * j->il;
        for (int64_t n = p->I; n < j->ip; n++) y[n] = 0.0f;
        kern_row_aq(y, p->I, p->aq, w2->input_scale);
#if KERN_ISA_AMX
        if (j->tiles) {
            KERN_ISA(kern_amx_pack)(w2, y, j->packed + group->y_packed, i - group->first, group->n);
            continue;
        }
#endif
        if (is_small(j, group->n)) kern_gemv_prepare(w2, y, j->ip);
    }
}

/* out += round(c) for the pairs at c's rows. */
static void add_rows(const struct job *j, const struct group *g, int64_t r, int64_t na, int64_t n0,
                     int64_t nb, const float *c, int64_t ld_c)
{
    const struct kern_moe *p = j->p;
    for (int64_t i = 0; i < na; i++) {
        float *o = p->out + (j->t0 + j->pairs[g->first + r + i].row) * p->D + n0;
        for (int64_t n = 0; n < nb; n += 16) {
            int k = nb - n < 16 ? (int)(nb - n) : 16;
            v16 v = v_round_act(v_loadn(c + i * ld_c + n, k), p->act);
            v_storen(o + n, v_add(v_loadn(o + n, k), v), k);
        }
    }
}

static void down_tiles(const struct job *j, const struct group *g, int64_t n0, int64_t nb,
                       uint8_t *scratch)
{
    float *c = (float *)(scratch + j->c_at);
    tiles_times(j, &j->p->w2[g->expert], n0, nb, g->y_packed, g, c, j->down_rows, scratch);
    add_rows(j, g, 0, g->n, n0, nb, c, j->down_rows);
}

static void down_part(void *arg, int64_t part, int thread)
{
    const struct job *j = arg;
    const struct kern_moe *p = j->p;
    uint8_t *scratch = j->panel + j->stride * (size_t)thread;
    float *w = (float *)scratch;
    int64_t n0 = part * j->down_rows;
    int64_t nb = p->D - n0 < j->down_rows ? p->D - n0 : j->down_rows;
    const float *a[C_ROWS];
    float c[C_ROWS * PANEL_MAX];
    for (int64_t r = 0; r < j->n_rows; r++)
        memset(p->out + (j->t0 + r) * p->D + n0, 0, (size_t)nb * 4);
    for (int32_t e = 0; e < j->n_groups; e++) {
        const struct group *g = &j->groups[e];
        const struct kern_weight *w2 = &p->w2[g->expert];
        bool small = is_small(j, g->n);
        if (j->tiles) {
            down_tiles(j, g, n0, nb, scratch);
            continue;
        }
        if (!small) kern_panel(w2, n0, nb, false, w, j->il);
        for (int64_t r = 0; r < g->n; r += C_ROWS) {
            int64_t na = g->n - r < C_ROWS ? g->n - r : C_ROWS;
            for (int64_t i = 0; i < na; i++) a[i] = j->y + (g->first + r + i) * j->il;
            if (small)
                KERN_ISA(kern_gemv)(w2, n0, nb, a, na, c, PANEL_MAX);
            else
                kern_panel_times(w2, false, a, na, w, nb, j->il, j->ip, c, PANEL_MAX);
            add_rows(j, g, r, na, n0, nb, c, PANEL_MAX);
        }
    }
}

static bool tiles_fit(const struct kern_moe *p)
{
    for (int32_t e = 0; e < p->E; e++)
        if (!kern_amx_fits(&p->w1[e], p->act, p->aq) || !kern_amx_fits(&p->w2[e], p->act, p->aq) ||
            !kern_amx_fits(&p->w3[e], p->act, p->aq))
            return false;
    return true;
}

/* How the pairs of this block are shared out on the matrix unit, and the room for it. */
static int tiles_room(struct kern_stream *s, struct job *j)
{
    const struct kern_moe *p = j->p;
    int threads = kern_stream_threads(s);
    int64_t k = j->dp > j->ip ? j->dp : j->ip;
    j->up_rows = (int32_t)kern_amx_part((int64_t)p->I * j->n_groups, j->most, threads);
    j->up_panels = (p->I + j->up_rows - 1) / j->up_rows;
    j->down_rows = (int32_t)kern_amx_part(p->D, j->most, threads);
    int64_t c = (int64_t)j->most * (2 * j->up_rows > j->down_rows ? 2 * j->up_rows : j->down_rows);
    j->c_at = (kern_amx_scratch_bytes(k, j->most <= KERN_AMX_STREAM) + 63) & ~(size_t)63;
    j->panel = kern_scratch_each(s, KERN_SLOT_PANEL, j->c_at + (size_t)c * 4, &j->stride);
    j->packed = kern_scratch(s, KERN_SLOT_OP3, (size_t)j->packed_words * 4);
    return j->panel && j->packed ? 0 : TOW_ENOMEM;
}

int KERN_ISA(kern_moe)(struct kern_stream *s, const struct kern_moe *p)
{
    struct job j = {.p = p, .dp = kern_pad16(p->D), .ip = kern_pad16(p->I)};
    if (p->T == 0) return 0;
    j.dl = kern_row_ld(j.dp);
    j.il = kern_row_ld(j.ip);
    int64_t rows = p->T < BLOCK_ROWS ? p->T : BLOCK_ROWS, pairs = rows * p->k;
    j.tiles = tiles_fit(p);
    j.up_rows = rows_per_panel(j.dl, 2);
    j.up_panels = (p->I + j.up_rows - 1) / j.up_rows;
    j.down_rows = rows_per_panel(j.il, 1);
    size_t up = (size_t)(2 * j.up_rows + (p->aq == KERN_AQ_NVFP4 ? C_ROWS : 0)) * (size_t)j.dl * 4;
    size_t down = (size_t)(j.down_rows * j.il) * 4;
    size_t lists = (size_t)pairs * sizeof(struct pair) + (size_t)p->E * (sizeof(struct group) + 4);
    if (!j.tiles) j.panel = kern_scratch_each(s, KERN_SLOT_PANEL, up > down ? up : down, &j.stride);
    bool mixed = !j.tiles && kern_gemv_mixed(&p->w1[0]) && p->aq != KERN_AQ_NVFP4;
    j.x = kern_scratch(s, KERN_SLOT_ROWS, (size_t)((1 + mixed) * rows * j.dl) * 4);
    j.y = kern_scratch(s, KERN_SLOT_OP, (size_t)(pairs * j.il) * 4);
    j.groups = kern_scratch(s, KERN_SLOT_OP2, lists); /* first: they hold 64-bit numbers */
    if ((!j.tiles && !j.panel) || !j.x || !j.y || !j.groups) return TOW_ENOMEM;
    j.x_small = mixed ? j.x + rows * j.dl : NULL;
    j.pairs = (struct pair *)(j.groups + p->E);
    int32_t *count = (int32_t *)(j.pairs + pairs);
    for (j.t0 = 0; j.t0 < p->T; j.t0 += BLOCK_ROWS) {
        j.n_rows = (int32_t)(p->T - j.t0 < BLOCK_ROWS ? p->T - j.t0 : BLOCK_ROWS);
        sort_pairs(&j, count);
        if (j.tiles && tiles_room(s, &j) < 0) return TOW_ENOMEM;
        kern_parallel(s, j.n_rows, x_part, &j);
#if KERN_ISA_AMX
        if (j.tiles) kern_parallel(s, j.n_groups, pack_part, &j);
#endif
        kern_parallel(s, (int64_t)j.n_groups * j.up_panels, up_part, &j);
        kern_parallel(s, j.n_groups, y_part, &j);
        kern_parallel(s, (p->D + j.down_rows - 1) / j.down_rows, down_part, &j);
    }
    return 0;
}

int KERN_ISA(kern_ffn)(struct kern_stream *s, const struct kern_ffn *p)
{
    int rc = KERN_ISA(kern_linear)(s, &p->gate);
    if (rc == 0) rc = KERN_ISA(kern_route)(s, &p->route);
    if (rc == 0) rc = KERN_ISA(kern_moe)(s, &p->moe);
    if (rc == 0) rc = KERN_ISA(kern_linear)(s, &p->w1);
    if (rc == 0) rc = KERN_ISA(kern_linear)(s, &p->w3);
    if (rc == 0) rc = KERN_ISA(kern_swiglu)(s, &p->swiglu);
    return rc < 0 ? rc : KERN_ISA(kern_linear)(s, &p->w2);
}
