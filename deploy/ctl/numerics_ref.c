/* ctl/numerics_ref.c - the references of the audit, in double, written from the definitions in
 * docs/numerics.md and not from the kernels. Only the scalar conversions between number formats
 * (kernels/numeric.h), which define the formats, are shared with what is under test. */
#include "deploy/ctl/numerics_impl.h"

#include "kernels/numeric.h"

#include <math.h>
#include <string.h>

double ctl_ref_bf16(double x)
{
    return kern_bf16_round((float)x);
}

double ctl_ref_tf32(double x)
{
    uint32_t u = kern_bits((float)x);
    u += 0xfffu + ((u >> 13) & 1u); /* nearest, ties to even */
    return kern_float(u & ~0x1fffu);
}

double ctl_ref_vec(const struct kern_vec *v, int64_t i)
{
    float f;
    uint16_t b;
    if (v->dtype == KERN_F32) {
        memcpy(&f, (const char *)v->data + i * 4, 4);
        return f;
    }
    memcpy(&b, (const char *)v->data + i * 2, 2);
    return kern_bf16_decode(b);
}

static double scale_at(const struct kern_weight *w, int64_t row, int64_t col)
{
    const uint8_t *s = (const uint8_t *)w->scale + row * w->scale_row_bytes;
    float f;
    switch (w->sfmt) {
    case KERN_S_UE8M0: return kern_ue8m0_decode(s[col]);
    case KERN_S_E4M3: return kern_e4m3_decode(s[col]);
    case KERN_S_F32: memcpy(&f, s + col * 4, 4); return f;
    default: return 1;
    }
}

void ctl_ref_weight_row(const struct kern_weight *w, int64_t n, double *out)
{
    const uint8_t *row = (const uint8_t *)w->data + n * w->row_bytes;
    for (int64_t k = 0; k < w->k; k++) {
        float f;
        uint16_t b;
        switch (w->fmt) {
        case KERN_W_F32:
            memcpy(&f, row + k * 4, 4);
            out[k] = f;
            break;
        case KERN_W_BF16:
            memcpy(&b, row + k * 2, 2);
            out[k] = kern_bf16_decode(b);
            break;
        case KERN_W_FP8: out[k] = kern_e4m3_decode(row[k]) * scale_at(w, n / 128, k / 128); break;
        case KERN_W_MXFP4:
            out[k] = kern_e2m1_decode(kern_nibble(row, k)) * scale_at(w, n, k / 32);
            break;
        case KERN_W_NVFP4:
            out[k] =
                kern_e2m1_decode(kern_nibble(row, k)) * scale_at(w, n, k / 16) * (double)w->scale2;
            break;
        }
    }
}

void ctl_ref_rotate(double *x, int32_t n, int32_t rd, int64_t pos, const float *inv_freq,
                    double sign)
{
    for (int32_t i = 0; i < rd / 2; i++) {
        /* The angle is a float product by definition; only its cosine and sine are exact here. */
        double angle = (float)((float)pos * inv_freq[i]), cs = cos(angle), sn = sign * sin(angle);
        double *a = x + n - rd + 2 * i, *b = a + 1, t = *a * cs - *b * sn;
        *b = *a * sn + *b * cs;
        *a = t;
    }
}

void ctl_ref_rmsnorm(double *x, int64_t n, const struct kern_vec *w, double eps)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    double f = 1 / sqrt(sum / (double)n + eps);
    for (int64_t i = 0; i < n; i++) x[i] *= f * ctl_ref_vec(w, i);
}

static void round_all(double *x, int64_t n, bool rounded)
{
    for (int64_t i = 0; rounded && i < n; i++) x[i] = ctl_ref_bf16(x[i]);
}

void ctl_ref_entry(const struct model_compressor *comp, int32_t ratio, const float *kv,
                   const float *gate, int64_t w, int32_t e, int32_t rd, const float *inv_freq,
                   double eps, bool rounded, double *out)
{
    const bool overlap = kern_kv_overlaps(ratio);
    const int32_t width = overlap ? 2 * e : e;
    const int64_t from = overlap && w > 0 ? (w - 1) * ratio : w * ratio, end = (w + 1) * ratio;
    for (int32_t ch = 0; ch < e; ch++) {
        double top = -INFINITY, sum = 0, acc = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int64_t t = from; t < end; t++) {
                /* Overlapping: the group before gives its first halves, this one its second. */
                int64_t col = overlap && t >= w * ratio ? e + ch : ch;
                double g = (double)gate[t * width + col] + comp->ape[t % ratio * width + col];
                if (pass == 0) {
                    top = fmax(top, g);
                } else {
                    sum += exp(g - top);
                    acc += exp(g - top) * kv[t * width + col];
                }
            }
        out[ch] = acc / sum;
    }
    round_all(out, e, rounded);
    ctl_ref_rmsnorm(out, e, &comp->norm, eps);
    round_all(out, e, rounded);
    ctl_ref_rotate(out, e, rd, w * ratio, inv_freq, 1);
    round_all(out, e, rounded);
}

static void through_float(double *x, int64_t n, void (*f)(const float *, int64_t, int32_t, float *),
                          int32_t block)
{
    float t[1024];
    for (int64_t i = 0; i < n; i += 1024) {
        int64_t m = n - i < 1024 ? n - i : 1024; /* a multiple of every block but at the end */
        for (int64_t j = 0; j < m; j++) t[j] = (float)x[i + j];
        f(t, m, block, t);
        for (int64_t j = 0; j < m; j++) x[i + j] = t[j];
    }
}

void ctl_ref_index_round(double *x, int32_t n, enum kern_ik_fmt fmt)
{
    double y[1024];
    for (int32_t i = 0; i < n; i++) {
        y[i] = 0;
        for (int32_t j = 0; j < n; j++)
            y[i] += __builtin_popcount((unsigned)(i & j)) & 1 ? -x[j] : x[j];
    }
    for (int32_t i = 0; i < n; i++) x[i] = ctl_ref_bf16(y[i] / sqrt(n));
    if (fmt == KERN_IK_FP4) through_float(x, n, kern_roundtrip_e2m1, 32);
    if (fmt == KERN_IK_FP8) through_float(x, n, kern_roundtrip_e4m3, n);
}

static void nvfp4_of(double *x, int64_t n, double g)
{
    float t[16];
    for (int64_t i = 0; i < n; i += 16) {
        for (int j = 0; j < 16; j++) t[j] = (float)x[i + j];
        kern_roundtrip_nvfp4(t, 16, (float)g, t);
        for (int j = 0; j < 16; j++) x[i + j] = t[j];
    }
}

void ctl_ref_aq(double *x, int64_t n, enum kern_act_quant aq, double input_scale)
{
    if (aq == KERN_AQ_A128) through_float(x, n, kern_roundtrip_e4m3, 128);
    if (aq == KERN_AQ_NVFP4) nvfp4_of(x, n, input_scale);
}

double ctl_ref_rel(const double *a, const double *b, int64_t n)
{
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) d += (a[i] - b[i]) * (a[i] - b[i]), s += b[i] * b[i];
    return d == 0 ? 0 : s > 0 ? sqrt(d / s) : INFINITY;
}

double ctl_ref_cos(const double *a, const double *b, int64_t n)
{
    double ab = 0, aa = 0, bb = 0;
    for (int64_t i = 0; i < n; i++) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
    return aa > 0 && bb > 0 ? ab / sqrt(aa * bb) : 0;
}
