/* kernels/gemm/linear_cuda.cu - y = quant(x) . Wt on the device.
 *
 * bf16 rows go to the matrix unit: quantized, padded rows are made first where x is not fit to be
 * read as it is, once for all products of an op. What has f32 factors (exact mode; weights that are
 * rounded after scaling) takes a plain kernel: one warp per weight row and eight rows of x, lanes
 * along k.
 */
#include "kernels/cuda/quant.cuh"
#include "kernels/gemm/product.cuh"

extern "C" {
#include "kernels/cuda/table.h"
}

extern "C" int kern_rmsnorm_cuda(struct kern_stream *s, const struct kern_rmsnorm *p);
extern "C" int kern_heads_rope_cuda(struct kern_stream *s, const struct kern_heads_rope *p);

enum { PLAIN_WARPS = 4, PLAIN_ROWS = 8 };

int cuda_wide_products = 1;
int cuda_fp8_products = 0;
int cuda_given_codes = 0;

/* Can rounding to bf16 change a value of this weight? */
static bool weight_rounds(const struct kern_weight *w)
{
    return w->fmt == KERN_W_F32 || w->fmt == KERN_W_NVFP4 || w->sfmt == KERN_S_F32;
}

static __device__ float weight_at(const struct kern_weight &w, int64_t n, int32_t k, bool round_w)
{
    const uint8_t *row = (const uint8_t *)w.data + n * w.row_bytes;
    const uint8_t *sc = (const uint8_t *)w.scale;
    const uint32_t *words = (const uint32_t *)row;
    float v = 0;
    switch (w.fmt) {
    case KERN_W_F32: v = ((const float *)row)[k]; break;
    case KERN_W_BF16: return kern_bf16_decode(((const uint16_t *)row)[k]);
    case KERN_W_FP8: {
        float s = 1.0f;
        sc += n / BLOCK_N * w.scale_row_bytes;
        if (w.sfmt == KERN_S_UE8M0) s = kern_ue8m0_decode(sc[k / BLOCK_K]);
        if (w.sfmt == KERN_S_E4M3) s = dev_e4m3_decode(sc[k / BLOCK_K]);
        if (w.sfmt == KERN_S_F32) s = ((const float *)sc)[k / BLOCK_K];
        v = dev_e4m3_in(words[k / 4], k % 4) * s;
        break;
    }
    case KERN_W_MXFP4: {
        const uint32_t placed = sc[n * w.scale_row_bytes + k / 32];
        return dev_e2m1_in(words[k / 8], k % 8) *
               (placed == 255 ? kern_float(0x7fc00000u)
                              : kern_ue8m0_decode((uint8_t)(placed - 110)));
    }
    case KERN_W_NVFP4:
        v = dev_e2m1_in(words[k / 8], k % 8) * dev_e4m3_decode(sc[n * w.scale_row_bytes + k / 16]);
        if (round_w) v *= w.scale2;
        break;
    }
    return round_w ? kern_bf16_round(v) : v;
}

static __global__ void plain_kernel(struct kern_linear p, const float *x, int32_t Kp, float post)
{
    const int lane = threadIdx.x % 32;
    const int32_t n = blockIdx.x * PLAIN_WARPS + threadIdx.x / 32, t0 = blockIdx.y * PLAIN_ROWS;
    if (n >= p.N) return;
    const int64_t g = blockIdx.z, row = g * p.N + n;
    const int32_t T = p.T - t0 < PLAIN_ROWS ? p.T - t0 : PLAIN_ROWS;
    float sum[PLAIN_ROWS];
#pragma unroll
    for (int t = 0; t < PLAIN_ROWS; t++) sum[t] = 0;
    for (int32_t k = lane; k < p.K; k += 32) {
        const float w = weight_at(p.w, row, k, p.round_w);
#pragma unroll
        for (int t = 0; t < PLAIN_ROWS; t++)
            if (t < T) sum[t] = fmaf(w, x[((int64_t)(t0 + t) * p.groups + g) * Kp + k], sum[t]);
    }
#pragma unroll
    for (int t = 0; t < PLAIN_ROWS; t++) {
        if (t >= T) break;
        const float v = dev_warp_sum(sum[t]) * post;
        if (lane == 0) dev_store(p.y, (t0 + t) * p.ld_y + row, p.y_dtype, v);
    }
}

static int linear_plain(struct kern_stream *s, const struct kern_linear *p)
{
    const int32_t Kp = cuda_row_width(p->K);
    float *rows = (float *)cuda_scratch(s, CUDA_SLOT_ROWS,
                                        (size_t)p->T * p->groups * (size_t)Kp * sizeof(float));
    if (!rows) return cuda_done(s, "linear");
    const struct cuda_quant q = {
        p->x, p->x_dtype, p->ld_x, p->T, p->groups, p->K, p->aq, p->w.input_scale,
        NULL, NULL,       rows,    Kp,   true,      false};
    cuda_quant_rows(s, &q);
    const float post = p->w.fmt == KERN_W_NVFP4 && !p->round_w ? p->w.scale2 : 1.0f;
    const dim3 grid((unsigned)cuda_ceil(p->N, PLAIN_WARPS), (unsigned)cuda_ceil(p->T, PLAIN_ROWS),
                    (unsigned)p->groups);
    plain_kernel<<<grid, 32 * PLAIN_WARPS, 0, s->cu>>>(*p, rows, Kp, post);
    return cuda_done(s, "linear");
}

/* Fewer, and the bf16 kind is faster by few_cuda.cu. */
static bool enough_tiles(const struct kern_stream *s, const struct cuda_product *p)
{
    const int64_t tiles = cuda_ceil(p->N, BLOCK_N) * p->groups;
    return tiles * cuda_ceil(p->T, 64) * 2 > s->n_sm || (p->T >= 32 && tiles * 5 >= s->n_sm);
}

/* What the kernels of bf16 rows are told. */
static struct cuda_product product_of(const struct kern_linear *p)
{
    const struct kern_weight *w = &p->w;
    struct cuda_product c;
    c.x = (const uint16_t *)p->x;
    c.ld_x = p->ld_x;
    c.x_group = p->K;
    c.Kx = p->K;
    c.w = (const uint8_t *)w->data;
    c.scale = (const uint8_t *)w->scale;
    c.nan_rows =
        cuda_has_nan_rows(w->fmt) ? cuda_nan_rows(w->scale, w->fmt, w->sfmt, w->n, w->k) : NULL;
    c.row_bytes = w->row_bytes;
    c.scale_row_bytes = w->scale_row_bytes;
    c.y = p->y;
    c.ld_y = p->ld_y;
    c.T = p->T, c.N = p->N, c.K = p->K, c.groups = p->groups;
    c.sfmt = w->sfmt;
    c.y_dtype = p->y_dtype;
    const bool four_bits = w->fmt == KERN_W_MXFP4 || w->fmt == KERN_W_NVFP4;
    c.post = w->fmt == KERN_W_NVFP4 ? w->scale2 : 1.0f;
    if (four_bits) c.post *= DEV_E2M1_POST;
    if (p->aq == KERN_AQ_NVFP4) c.post *= w->input_scale;
    c.aq = p->aq;
    c.by_fours = cuda_by_fours(p->x, KERN_BF16, p->ld_x, p->K, p->groups);
    c.codes = NULL;
    c.own = c.after_quant = false;
    return c;
}

/* The scales that placed weights have. */
static bool scales_fit(const struct kern_weight *w)
{
    return !(w->fmt == KERN_W_MXFP4 && w->sfmt != KERN_S_UE8M0) &&
           !(w->fmt == KERN_W_NVFP4 && w->sfmt != KERN_S_E4M3);
}
/* Rows of bf16 can be read as they are. */
static bool is_readable(const struct kern_linear *p)
{
    return (uintptr_t)p->x % 16 == 0 && p->ld_x % 8 == 0 && p->K % 8 == 0 &&
           p->ld_x < (int64_t)1 << 30;
}
static bool is_plain(const struct kern_linear *p)
{
    return p->x_dtype != KERN_BF16 || (p->round_w && weight_rounds(&p->w));
}

/* ------------------------------------------------------------------ one product */

enum way { PLAIN, CODES, TURNS, WGMMA, FEW };
/* By which kernels a product goes; those of bf16 rows and of codes are told by *c. */
static enum way way_of(const struct kern_stream *s, const struct kern_linear *p,
                       struct cuda_product *c)
{
    if (is_plain(p)) return PLAIN;
    const enum kern_wfmt fmt = p->w.fmt;
    *c = product_of(p);
    if (cuda_codes_fits(s, fmt, c)) return CODES;
    if (cuda_wide_products && cuda_turns_takes(s, fmt, c)) {
        const struct cuda_set one = {.p = {*c}, .fmt = {fmt}, .n = 1};
        if (cuda_turns_fits(s, &one)) return TURNS;
    }
    if (cuda_wide_products && p->T > CUDA_FEW_T && enough_tiles(s, c) &&
        (cuda_narrow_fits(s, fmt, c) || cuda_wide_fits(s, fmt, c)))
        return WGMMA;
    const bool four_bits = fmt == KERN_W_MXFP4 || fmt == KERN_W_NVFP4;
    /* Rows that can be read as they are need no copy in shared memory. */
    c->own = !four_bits && p->aq != KERN_AQ_NVFP4 && (p->aq != KERN_AQ_NONE || !is_readable(p)) &&
             p->T <= 8 && (int64_t)p->T * p->K <= CUDA_OWN_ELEMENTS;
    return FEW;
}

/* What rows of x become before products: nothing, aligned and padded bf16, the same in the order of
 * slots, codes. All but the last are quantized if aq says so. */
enum form { AS_THEY_ARE, ROWS, SLOTS, CODE_ROWS };
static enum form form_of(const struct kern_stream *s, const struct kern_linear *p, enum way way,
                         const struct cuda_product *c)
{
    switch (way) {
    case CODES: return cuda_codes_narrow_fits(s, c) && cuda_codes_own(c) ? AS_THEY_ARE : CODE_ROWS;
    case TURNS:
    case WGMMA: return SLOTS;
    case FEW: return !c->own && (p->aq != KERN_AQ_NONE || !is_readable(p)) ? ROWS : AS_THEY_ARE;
    default: return AS_THEY_ARE;
    }
}

/* Rows that products of one op need, each kind once, in scratch. */
enum { MOST = CUDA_SET_MOST };
struct rows {
    const struct kern_linear *of; /* the first product that needs them */
    enum form form;
    size_t at;
    bool made;
};
struct all_rows {
    struct rows each[MOST];
    int n, of[MOST]; /* which each product needs, or none: -1 */
    size_t bytes;
    uint8_t *base;
    struct cuda_rotation rotation; /* on the way to them, or cos is NULL */
};

static int64_t scales_ld(const struct kern_linear *p)
{
    return cuda_ceil(p->T, CUDA_CODES_T) * CUDA_CODES_T;
}
static size_t code_bytes(const struct kern_linear *p)
{
    return (size_t)p->T * p->groups * (size_t)cuda_code_width(p->K);
}
static size_t bytes_of(const struct kern_linear *p, enum form form)
{
    if (form == CODE_ROWS)
        return code_bytes(p) +
               (size_t)(scales_ld(p) * p->groups * (cuda_code_width(p->K) / BLOCK_K)) * 4;
    const int32_t width = form == SLOTS ? cuda_code_width(p->K) : cuda_row_width(p->K);
    return (size_t)p->T * p->groups * (size_t)width * 2;
}

/* p[i] needs rows in this form. */
static void need(struct all_rows *a, const struct kern_linear *p, int i, enum form form)
{
    a->of[i] = -1;
    if (form == AS_THEY_ARE) return;
    for (int k = 0; k < a->n && p[i].aq != KERN_AQ_NVFP4 /* its scale is the weight's */; k++) {
        const struct kern_linear *o = a->each[k].of;
        if (a->each[k].form == form && o->aq == p[i].aq && o->K == p[i].K) a->of[i] = k;
    }
    if (a->of[i] >= 0) return;
    a->of[i] = a->n;
    a->each[a->n++] = (struct rows){&p[i], form, a->bytes, false};
    a->bytes += (bytes_of(&p[i], form) + 255) / 256 * 256;
}

static struct cuda_quant quant_of(const struct kern_linear *p, enum form form)
{
    struct cuda_quant q = {.x = p->x,
                           .x_dtype = p->x_dtype,
                           .ld_x = p->ld_x,
                           .T = p->T,
                           .groups = p->groups,
                           .K = p->K,
                           .aq = p->aq,
                           .input_scale = p->w.input_scale};
    q.slots = form == SLOTS;
    q.Kp = q.slots ? cuda_code_width(p->K) : cuda_row_width(p->K);
    return q;
}
/* Can all rows that products need be rotated on the way? */
static bool rotates_on_the_way(const struct all_rows *a, int n, const struct kern_heads_rope *r)
{
    for (int i = 0; i < n; i++)
        if (a->of[i] < 0) return false;
    for (int i = 0; i < a->n; i++) {
        const struct cuda_quant q = quant_of(a->each[i].of, a->each[i].form);
        if (!cuda_rotates_on_the_way(&q, r)) return false;
    }
    return true;
}

/* Enqueues that these rows are made, if they were not; those in slots at once with the same rows
 * not quantized, where these are needed too. */
static void make(struct kern_stream *s, struct all_rows *a, int i)
{
    struct rows *r = &a->each[i];
    const struct kern_linear *p = r->of;
    uint8_t *to = a->base + r->at;
    if (r->made) return;
    r->made = true;
    if (r->form == CODE_ROWS) {
        const struct cuda_codes q = {p->x,        p->x_dtype, p->ld_x,
                                     p->T,        p->groups,  p->K,
                                     NULL,        to,         (float *)(to + code_bytes(p)),
                                     scales_ld(p)};
        if (!cuda_given_codes) cuda_quant_codes(s, &q);
        return;
    }
    struct cuda_quant q = quant_of(p, r->form);
    q.out = to;
    q.rotation = a->rotation;
    for (int k = 0; k < a->n && q.slots && p->aq == KERN_AQ_A128; k++) {
        struct rows *o = &a->each[k];
        if (o->made || o->form != SLOTS || o->of->aq != KERN_AQ_NONE || o->of->K != p->K) continue;
        q.plain = a->base + o->at;
        o->made = true;
    }
    cuda_quant_rows(s, &q);
}

/* A product reads rows i. */
static void reads(struct cuda_product *c, const struct all_rows *a, int i)
{
    if (i < 0) return;
    const struct rows *r = &a->each[i];
    uint8_t *rows = a->base + r->at;
    c->Kx = r->form == ROWS ? cuda_row_width(c->K) : cuda_code_width(c->K);
    if (r->form == CODE_ROWS) {
        c->codes = rows;
        c->x_scales = (float *)(rows + code_bytes(r->of));
        c->ld_scales = scales_ld(r->of);
        return;
    }
    c->x = (const uint16_t *)rows;
    c->ld_x = (int64_t)c->groups * c->Kx;
    c->x_group = c->Kx;
    c->after_quant = r->form == ROWS;
}

static int multiply(struct kern_stream *s, const struct kern_linear *p, enum way way,
                    struct cuda_product *c)
{
    const enum kern_wfmt fmt = p->w.fmt;
    const struct cuda_set one = {.p = {*c}, .fmt = {fmt}, .n = 1};
    bool described = true;
    switch (way) {
    case PLAIN: return linear_plain(s, p);
    case CODES:
        c->Kx = cuda_code_width(p->K);
        described = cuda_codes_narrow_fits(s, c)  ? cuda_product_codes_narrow(s, c)
                    : cuda_narrow_fits(s, fmt, c) ? cuda_product_narrow(s, fmt, c)
                                                  : cuda_product_codes(s, c);
        break;
    case TURNS: described = cuda_product_turns(s, &one); break;
    case WGMMA:
        described =
            cuda_narrow_fits(s, fmt, c) ? cuda_product_narrow(s, fmt, c) : cuda_product_wide(s, c);
        break;
    case FEW:
        if (cuda_few_fits(s, fmt, c))
            cuda_product_few(s, fmt, c);
        else
            cuda_product_many(s, fmt, c);
    }
    const int rc = cuda_done(s, "linear");
    return described ? rc : TOW_EDEVICE;
}

bool cuda_linear_reads_slots(const struct kern_stream *s, const struct kern_linear *p)
{
    struct cuda_product c;
    if (!scales_fit(&p->w) || is_plain(p) || p->aq != KERN_AQ_NONE) return false;
    if (p->K % BLOCK_K || p->ld_x != (int64_t)p->groups * p->K || (uintptr_t)p->x % 16)
        return false;
    const enum way way = way_of(s, p, &c);
    return form_of(s, p, way, &c) == SLOTS;
}
int cuda_linear_of_slots(struct kern_stream *s, const struct kern_linear *p)
{
    struct cuda_product c;
    if (p->T == 0) return 0;
    return multiply(s, p, way_of(s, p, &c), &c); /* product_of() says of x what is true */
}

/* ------------------------------------------------------------------ products of the same rows */

static bool is_few(const struct kern_linear *p)
{
    return p->T <= CUDA_FEW_T;
}
/* Norms and rotations before more rows are launches of their own. */
static bool is_own(const struct kern_linear *p)
{
    return is_few(p) && (int64_t)p->T * p->K <= CUDA_SET_ELEMENTS;
}
/* Can it be one of several in a launch? As told by *c then. */
static bool joins(const struct kern_stream *s, const struct kern_linear *p, struct cuda_product *c)
{
    if (is_plain(p)) return false;
    if (is_few(p) && !is_own(p) && p->aq == KERN_AQ_NONE && !is_readable(p)) return false;
    *c = product_of(p);
    if (cuda_codes_fits(s, p->w.fmt, c)) return false;
    return is_few(p) ? cuda_set_takes(p->w.fmt, c)
                     : cuda_wide_products && cuda_turns_takes(s, p->w.fmt, c);
}

/* Up to MOST products: those that can in one launch, the others one by one. */
static int multiply_some(struct kern_stream *s, const struct kern_linears *p)
{
    struct cuda_set a = {.n = 0};
    struct cuda_product c[MOST];
    enum way way[MOST];
    struct all_rows rows = {.n = 0};
    bool in_set[MOST];
    int rc = 0;
    for (int32_t i = 0; i < p->n; i++) {
        in_set[i] = p->n > 1 || is_few(p->each) ? joins(s, &p->each[i], &c[i]) : false;
        if (!in_set[i]) continue;
        a.p[a.n] = c[i];
        a.fmt[a.n++] = p->each[i].w.fmt;
    }
    const bool on_the_way = a.n == p->n && is_own(p->each);
    a.own = is_own(p->each);
    a.norm = on_the_way ? p->norm : NULL;
    a.rope = on_the_way ? p->rope : NULL;
    const bool together = a.n > 0 && (is_few(p->each) ? cuda_set_fits(&a) : cuda_turns_fits(s, &a));
    for (int32_t i = 0; i < p->n; i++) {
        enum form form;
        in_set[i] = in_set[i] && together;
        if (in_set[i]) {
            form = !is_few(p->each)                          ? SLOTS
                   : !a.own && p->each[i].aq == KERN_AQ_A128 ? ROWS
                                                             : AS_THEY_ARE;
        } else {
            way[i] = way_of(s, &p->each[i], &c[i]);
            form = form_of(s, &p->each[i], way[i], &c[i]);
        }
        need(&rows, p->each, i, form);
    }
    if (p->norm && !(together && a.norm)) rc = kern_rmsnorm_cuda(s, p->norm);
    if (p->rope && rotates_on_the_way(&rows, p->n, p->rope))
        rows.rotation = (struct cuda_rotation){p->rope->cos, p->rope->sin, p->rope->d, p->rope->rd,
                                               p->rope->inverse ? -1.0f : 1.0f};
    else if (p->rope && !(together && a.rope))
        rc = kern_heads_rope_cuda(s, p->rope);
    if (rc < 0) return rc;
    if (rows.n > 0) {
        rows.base = (uint8_t *)cuda_scratch(s, CUDA_SLOT_ROWS, rows.bytes);
        if (!rows.base) return cuda_done(s, "linears");
    }
    for (int32_t i = 0, k = 0; together && i < p->n; i++) {
        if (!in_set[i]) continue;
        if (rows.of[i] >= 0) make(s, &rows, rows.of[i]);
        reads(&a.p[k++], &rows, rows.of[i]);
    }
    bool described = true;
    if (together && is_few(p->each))
        cuda_product_set(s, &a);
    else if (together)
        described = cuda_product_turns(s, &a);
    rc = described ? cuda_done(s, "linears") : TOW_EDEVICE;
    for (int plain = 0; plain < 2; plain++) /* those last: they use the same scratch */
        for (int32_t i = 0; i < p->n && rc == 0; i++) {
            if (in_set[i] || (way[i] == PLAIN) != plain) continue;
            if (rows.of[i] >= 0) make(s, &rows, rows.of[i]);
            reads(&c[i], &rows, rows.of[i]);
            rc = multiply(s, &p->each[i], way[i], &c[i]);
        }
    return rc;
}

extern "C" int kern_linears_cuda(struct kern_stream *s, const struct kern_linears *p)
{
    if (p->n == 0 || p->each[0].T == 0) return 0;
    for (int32_t i = 0; i < p->n; i++)
        if (!scales_fit(&p->each[i].w)) return TOW_EINVAL;
    struct kern_linears some = *p;
    int rc = 0;
    for (int32_t i = 0; i < p->n && rc == 0; i += MOST) {
        some.each = p->each + i;
        some.n = p->n - i < MOST ? p->n - i : (int32_t)MOST;
        rc = multiply_some(s, &some);
        some.norm = NULL, some.rope = NULL;
    }
    return rc;
}

extern "C" int kern_linear_cuda(struct kern_stream *s, const struct kern_linear *p)
{
    struct cuda_product c;
    struct all_rows rows = {.n = 0};
    if (p->T == 0) return 0;
    if (!scales_fit(&p->w)) return TOW_EINVAL;
    const enum way way = way_of(s, p, &c);
    need(&rows, p, 0, form_of(s, p, way, &c));
    if (rows.n > 0) {
        rows.base = (uint8_t *)cuda_scratch(s, CUDA_SLOT_ROWS, rows.bytes);
        if (!rows.base) return cuda_done(s, "linear");
        make(s, &rows, 0);
    }
    reads(&c, &rows, rows.of[0]);
    return multiply(s, p, way, &c);
}
