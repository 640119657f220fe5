/* kernels/gemm/linear_cuda.cu - y = quant(x) . Wt on the device.
 *
 * bf16 rows go to the matrix unit: quantized, padded rows are made first where x is not fit to be
 * read as it is. What has f32 factors (exact mode; weights that are rounded after scaling) takes a
 * plain kernel: one warp per weight row and eight rows of x, lanes along k.
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

/* Products of codes. */
static int linear_codes(struct kern_stream *s, const struct kern_linear *p, struct cuda_product *c)
{
    const bool few_tiles = cuda_codes_narrow_fits(s, c);
    c->Kx = cuda_code_width(p->K);
    if (!few_tiles || !cuda_codes_own(c)) {
        const size_t bytes = (size_t)p->T * p->groups * (size_t)c->Kx;
        c->ld_scales = cuda_ceil(p->T, CUDA_CODES_T) * CUDA_CODES_T;
        const size_t scale_bytes = (size_t)c->ld_scales * p->groups * (c->Kx / BLOCK_K) * 4;
        uint8_t *rows = (uint8_t *)cuda_scratch(s, CUDA_SLOT_ROWS, bytes + scale_bytes);
        if (!rows) return cuda_done(s, "linear");
        float *scales = (float *)(rows + bytes);
        const struct cuda_codes q = {p->x, p->x_dtype, p->ld_x, p->T,   p->groups,
                                     p->K, NULL,       rows,    scales, c->ld_scales};
        cuda_quant_codes(s, &q);
        c->codes = rows;
        c->x_scales = scales;
    }
    const bool described = few_tiles                          ? cuda_product_codes_narrow(s, c)
                           : cuda_narrow_fits(s, p->w.fmt, c) ? cuda_product_narrow(s, p->w.fmt, c)
                                                              : cuda_product_codes(s, c);
    const int rc = cuda_done(s, "linear");
    return described ? rc : TOW_EDEVICE;
}

/* Products by wgmma, of the bf16 kind. */
static int linear_wgmma(struct kern_stream *s, const struct kern_linear *p, struct cuda_product *c)
{
    const int32_t Kx = cuda_code_width(p->K);
    void *rows = cuda_scratch(s, CUDA_SLOT_ROWS, (size_t)p->T * p->groups * (size_t)Kx * 2);
    if (!rows) return cuda_done(s, "linear");
    const struct cuda_quant q = {
        p->x, p->x_dtype, p->ld_x, p->T, p->groups, p->K, p->aq, p->w.input_scale,
        NULL, NULL,       rows,    Kx,   false,     true};
    cuda_quant_rows(s, &q);
    c->Kx = Kx;
    c->x = (const uint16_t *)rows;
    const bool described = cuda_narrow_fits(s, p->w.fmt, c) ? cuda_product_narrow(s, p->w.fmt, c)
                                                            : cuda_product_wide(s, c);
    const int rc = cuda_done(s, "linear");
    return described ? rc : TOW_EDEVICE;
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

/* Its rows in scratch, aligned, padded and quantized; NULL: no memory. */
static uint16_t *quantized(struct kern_stream *s, const struct kern_linear *p)
{
    const int32_t Kp = cuda_row_width(p->K);
    uint16_t *rows =
        (uint16_t *)cuda_scratch(s, CUDA_SLOT_ROWS, (size_t)p->T * p->groups * (size_t)Kp * 2);
    if (!rows) return NULL;
    const struct cuda_quant q = {
        p->x, p->x_dtype, p->ld_x, p->T, p->groups, p->K, p->aq, p->w.input_scale,
        NULL, NULL,       rows,    Kp,   false,     false};
    cuda_quant_rows(s, &q);
    return rows;
}
static void reads(struct cuda_product *c, const uint16_t *rows)
{
    const int32_t Kp = cuda_row_width(c->K);
    c->x = rows;
    c->ld_x = (int64_t)c->groups * Kp;
    c->x_group = c->Kx = Kp;
}

extern "C" int kern_linear_cuda(struct kern_stream *s, const struct kern_linear *p)
{
    if (p->T == 0) return 0;
    const struct kern_weight *w = &p->w;
    if (!scales_fit(w)) return TOW_EINVAL;
    if (is_plain(p)) return linear_plain(s, p);

    struct cuda_product c = product_of(p);
    const bool fit = is_readable(p);
    if (cuda_codes_fits(s, w->fmt, &c)) return linear_codes(s, p, &c);
    if (cuda_wide_products && p->T > CUDA_FEW_T && enough_tiles(s, &c) &&
        (cuda_narrow_fits(s, w->fmt, &c) || cuda_wide_fits(s, w->fmt, &c)))
        return linear_wgmma(s, p, &c);
    const bool four_bits = w->fmt == KERN_W_MXFP4 || w->fmt == KERN_W_NVFP4;
    /* Rows that can be read as they are need no copy in shared memory. */
    c.own = !four_bits && p->aq != KERN_AQ_NVFP4 && (p->aq != KERN_AQ_NONE || !fit) && p->T <= 8 &&
            (int64_t)p->T * p->K <= CUDA_OWN_ELEMENTS;
    c.after_quant = !c.own && (p->aq != KERN_AQ_NONE || !fit);
    if (c.after_quant) {
        uint16_t *rows = quantized(s, p);
        if (!rows) return cuda_done(s, "linear");
        reads(&c, rows);
    }
    if (cuda_few_fits(s, w->fmt, &c))
        cuda_product_few(s, w->fmt, &c);
    else
        cuda_product_many(s, w->fmt, &c);
    return cuda_done(s, "linear");
}

static bool is_own(const struct kern_linear *p)
{
    return (int64_t)p->T * p->K <= CUDA_SET_ELEMENTS;
}
/* Can it be one of several in a launch? As told by *c then. */
static bool joins(const struct kern_stream *s, const struct kern_linear *p, struct cuda_product *c)
{
    if (!scales_fit(&p->w) || is_plain(p)) return false;
    if (!is_own(p) && p->aq == KERN_AQ_NONE && !is_readable(p)) return false;
    *c = product_of(p);
    return !cuda_codes_fits(s, p->w.fmt, c) && cuda_set_takes(p->w.fmt, c);
}
/* Those of p that can. */
static void set_of(const struct kern_stream *s, const struct kern_linears *p, struct cuda_set *a)
{
    struct cuda_product c;
    a->n = 0;
    for (int32_t i = 0; i < p->n && a->n < CUDA_SET_MOST; i++)
        if (joins(s, &p->each[i], &c)) {
            a->p[a->n] = c;
            a->fmt[a->n++] = p->each[i].w.fmt;
        }
    const bool on_the_way = a->n == p->n && is_own(p->each);
    a->own = is_own(p->each);
    a->norm = on_the_way ? p->norm : NULL;
    a->rope = on_the_way ? p->rope : NULL;
}

static int multiply_set(struct kern_stream *s, const struct kern_linears *p, struct cuda_set *a)
{
    const uint16_t *rows = NULL;
    struct cuda_product c;
    for (int32_t i = 0, k = 0; i < p->n && k < a->n && !a->own; i++) {
        if (!joins(s, &p->each[i], &c)) continue;
        if (p->each[i].aq == KERN_AQ_A128) {
            if (!rows) rows = quantized(s, &p->each[i]);
            if (!rows) return cuda_done(s, "linears");
            reads(&a->p[k], rows);
        }
        k++;
    }
    cuda_product_set(s, a);
    return cuda_done(s, "linears");
}

extern "C" int kern_linears_cuda(struct kern_stream *s, const struct kern_linears *p)
{
    struct cuda_set a;
    struct cuda_product c;
    int rc = 0;
    if (p->n == 0 || p->each[0].T == 0) return 0;
    set_of(s, p, &a);
    const bool together = a.n > 0 && cuda_set_fits(&a);
    if (p->norm && !(together && a.norm)) rc = kern_rmsnorm_cuda(s, p->norm);
    if (p->rope && !(together && a.rope)) rc = kern_heads_rope_cuda(s, p->rope);
    if (rc == 0 && together) rc = multiply_set(s, p, &a);
    for (int32_t i = 0, joined = 0; i < p->n && rc == 0; i++)
        if (together && joined < a.n && joins(s, &p->each[i], &c))
            joined++;
        else
            rc = kern_linear_cuda(s, &p->each[i]);
    return rc;
}
