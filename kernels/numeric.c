/* kernels/numeric.c - tables and block quantizers; the definition that vector code is tested
 * against. */
#include "kernels/numeric.h"

#include <math.h>

#define M8(s, e)                                                                                   \
    s 1.0f * e, s 1.125f * e, s 1.25f * e, s 1.375f * e, s 1.5f * e, s 1.625f * e, s 1.75f * e,    \
        s 1.875f * e
#define HALF(s)                                                                                    \
    s 0.0f, s 0x1p-9f, s 0x2p-9f, s 0x3p-9f, s 0x4p-9f, s 0x5p-9f, s 0x6p-9f, s 0x7p-9f,           \
        M8(s, 0x1p-6f), M8(s, 0x1p-5f), M8(s, 0x1p-4f), M8(s, 0x1p-3f), M8(s, 0x1p-2f),            \
        M8(s, 0x1p-1f), M8(s, 1.0f), M8(s, 2.0f), M8(s, 4.0f), M8(s, 8.0f), M8(s, 16.0f),          \
        M8(s, 32.0f), M8(s, 64.0f), M8(s, 128.0f), s 256.0f, s 288.0f, s 320.0f, s 352.0f,         \
        s 384.0f, s 416.0f, s 448.0f, s NAN
const float kern_e4m3_value[256] = {HALF(+), HALF(-)};

const float kern_e2m1_value[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

float kern_amax(const float *x, int64_t n)
{
    float m = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        if (a > m) m = a;
    }
    return m;
}

void kern_quant_e4m3(const float *x, int64_t n, int32_t block, uint8_t *codes, uint8_t *scales)
{
    for (int64_t b = 0; b < n; b += block) {
        int64_t m = n - b < block ? n - b : block;
        uint8_t c = kern_e4m3_scale_code(kern_amax(x + b, m));
        float inv = kern_ue8m0_inverse(c);
        *scales++ = c;
        for (int64_t i = b; i < b + m; i++) codes[i] = kern_e4m3_encode(x[i] * inv);
    }
}

void kern_quant_e2m1(const float *x, int64_t n, int32_t block, uint8_t *packed, uint8_t *scales)
{
    for (int64_t b = 0; b < n; b += block) {
        int64_t m = n - b < block ? n - b : block;
        uint8_t c = kern_e2m1_scale_code(kern_amax(x + b, m));
        float inv = kern_ue8m0_inverse(c);
        *scales++ = c;
        for (int64_t i = b; i < b + m; i += 2)
            packed[i >> 1] =
                (uint8_t)(kern_e2m1_encode(x[i] * inv) | kern_e2m1_encode(x[i + 1] * inv) << 4);
    }
}

void kern_roundtrip_e4m3(const float *x, int64_t n, int32_t block, float *y)
{
    for (int64_t b = 0; b < n; b += block) {
        int64_t m = n - b < block ? n - b : block;
        uint8_t c = kern_e4m3_scale_code(kern_amax(x + b, m));
        float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
        for (int64_t i = b; i < b + m; i++)
            y[i] = kern_e4m3_decode(kern_e4m3_encode(x[i] * inv)) * s;
    }
}

void kern_roundtrip_e2m1(const float *x, int64_t n, int32_t block, float *y)
{
    for (int64_t b = 0; b < n; b += block) {
        int64_t m = n - b < block ? n - b : block;
        uint8_t c = kern_e2m1_scale_code(kern_amax(x + b, m));
        float s = kern_ue8m0_decode(c), inv = kern_ue8m0_inverse(c);
        for (int64_t i = b; i < b + m; i++)
            y[i] = kern_e2m1_decode(kern_e2m1_encode(x[i] * inv)) * s;
    }
}

void kern_roundtrip_nvfp4(const float *x, int64_t n, float g, float *y)
{
    for (int64_t b = 0; b < n; b += 16) {
        int64_t m = n - b < 16 ? n - b : 16;
        /* Divided in double: the golden's quotient is, and a float quotient can land on a tie of
         * e4m3. */
        double q = (double)kern_amax(x + b, m) / 6.0 / (double)g;
        double s = (double)kern_e4m3_decode(kern_e4m3_encode((float)q)) * (double)g;
        for (int64_t i = b; i < b + m; i++) {
            float e = s > 0 ? kern_e2m1_decode(kern_e2m1_encode((float)((double)x[i] / s))) : 0.0f;
            y[i] = (float)((double)e * s);
        }
    }
}

void kern_hadamard(float *x, int32_t n)
{
    for (int32_t h = 1; h < n; h *= 2)
        for (int32_t i = 0; i < n; i += 2 * h)
            for (int32_t j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
    float s = (float)(1.0 / sqrt((double)n));
    for (int32_t i = 0; i < n; i++) x[i] *= s;
}
