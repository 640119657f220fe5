/* kernels/cpu/vec.h - sixteen floats at a time, in the instruction set this file is compiled for.
 *
 * Why      Every *_cpu.c is compiled once per instruction set (plain C, AVX2, AVX-512, AMX; see
 *          the Makefile) from one source written in these terms, so that all give the same bits by
 *          construction; only products on the matrix unit (gemm/amx_cpu.h) have their own order.
 * Rules    Each operation is exactly rounded or bitwise; v_fma rounds once; v_sum adds in one fixed
 *          tree: lanes 8 apart, then 4, 2, 1. v_max and v_min give b when a or b is NaN.
 */
#ifndef KERN_CPU_VEC_H
#define KERN_CPU_VEC_H

#include "kernels/numeric.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define KERN_ISA_AVX512 1
#if defined(KERN_BUILD_AMX) /* the Makefile; compilers name these features differently */
#define KERN_ISA_AMX    1   /* AVX-512 and, for products, the matrix unit (gemm/amx_cpu.h) */
#define KERN_ISA_SUFFIX _amx
#else
#define KERN_ISA_SUFFIX _avx512
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#define KERN_ISA_AVX2   1
#define KERN_ISA_SUFFIX _avx2
#else
#define KERN_ISA_C      1
#define KERN_ISA_SUFFIX _c
#endif

#define KERN_CAT_(a, b) a##b
#define KERN_CAT(a, b)  KERN_CAT_(a, b)
/* Name of a function that exists once per instruction set. */
#define KERN_ISA(name) KERN_CAT(name, KERN_ISA_SUFFIX)

#define V_INLINE static inline __attribute__((always_inline, unused))

#if KERN_ISA_AVX512
#include <immintrin.h>

typedef __m512 v16;
typedef __m512i v16i;

V_INLINE v16 v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
V_INLINE v16 v_loadn(const float *p, int n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
V_INLINE void v_store(float *p, v16 a)
{
    _mm512_storeu_ps(p, a);
}
V_INLINE void v_storen(float *p, v16 a, int n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), a);
}
V_INLINE v16 v_set1(float x)
{
    return _mm512_set1_ps(x);
}
V_INLINE v16 v_zero(void)
{
    return _mm512_setzero_ps();
}
V_INLINE v16 v_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}
V_INLINE v16 v_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}
V_INLINE v16 v_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}
V_INLINE v16 v_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}
V_INLINE v16 v_sqrt(v16 a)
{
    return _mm512_sqrt_ps(a);
}
V_INLINE v16 v_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}
V_INLINE v16 v_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}
V_INLINE v16 v_min(v16 a, v16 b)
{
    return _mm512_min_ps(a, b);
}
V_INLINE v16i v_bits(v16 a)
{
    return _mm512_castps_si512(a);
}
V_INLINE v16 v_float(v16i a)
{
    return _mm512_castsi512_ps(a);
}
V_INLINE v16 v_abs(v16 a)
{
    return _mm512_castsi512_ps(
        _mm512_and_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
/* a < b ? x : y, lane by lane; y where either is NaN. */
V_INLINE v16 v_sel_lt(v16 a, v16 b, v16 x, v16 y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
V_INLINE v16 v_sel_nan(v16 a, v16 x, v16 y) /* a is NaN ? x : y */
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), y, x);
}
V_INLINE v16i vi_set1(int32_t x)
{
    return _mm512_set1_epi32(x);
}
V_INLINE v16i vi_add(v16i a, v16i b)
{
    return _mm512_add_epi32(a, b);
}
V_INLINE v16i vi_sub(v16i a, v16i b)
{
    return _mm512_sub_epi32(a, b);
}
V_INLINE v16i vi_and(v16i a, v16i b)
{
    return _mm512_and_epi32(a, b);
}
V_INLINE v16i vi_or(v16i a, v16i b)
{
    return _mm512_or_epi32(a, b);
}
#define vi_sll(a, n) _mm512_slli_epi32(a, n)
#define vi_srl(a, n) _mm512_srli_epi32(a, n)
#define vi_sra(a, n) _mm512_srai_epi32(a, n)

V_INLINE v16 v_load_bf16(const void *p)
{
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
V_INLINE void vi_store_low16(void *p, v16i a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(a));
}
/* Sixteen codes -> their values. */
V_INLINE v16 v_load_e4m3(const uint8_t *p)
{
    /* As f16 with the exponent too small by 8: its subnormals convert without a stall. */
    __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
    w = _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16((int16_t)0xbfff));
    __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(w, _mm256_set1_epi16(0x3f80)),
                                            _mm256_set1_epi16(0x3f80));
    __m512 v = _mm512_mul_ps(_mm512_cvtph_ps(w), _mm512_set1_ps(256.0f));
    return _mm512_mask_mov_ps(v, nan, _mm512_set1_ps(NAN));
}
/* Eight bytes = sixteen nibbles -> values in a table whose second half is the first negated. */
V_INLINE v16 v_lookup16(const uint8_t *p, v16 table)
{
    int32_t lo, hi;
    memcpy(&lo, p, 4);
    memcpy(&hi, p + 4, 4);
    __m512i w = _mm512_mask_set1_epi32(_mm512_set1_epi32(lo), 0xff00, hi);
    w = _mm512_srlv_epi32(
        w, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
    return _mm512_permutexvar_ps(w, table);
}
V_INLINE float v_sum(v16 a)
{
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
V_INLINE float v_hmax(v16 a)
{
    return _mm512_reduce_max_ps(a);
} /* no NaN in a */
/* Four v_sums at once: halves of two vectors are brought side by side before each addition. */
V_INLINE void v_sum4(float *out, v16 a, v16 b, v16 c, v16 d)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 x =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
    x = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
                              x);
    _mm_storeu_ps(out, _mm512_castps512_ps128(x));
}
/* Thirty-two e4m3 codes / 256, faster than v_load_e4m3; a NaN code gives +-1.875 and a zero lane in
 * *seen. */
typedef __m256i v_seen;
V_INLINE v_seen v_seen_none(void)
{
    return _mm256_set1_epi8(-1);
}
V_INLINE bool v_seen_nan(v_seen s)
{
    return _mm256_testn_epi8_mask(s, s) != 0;
}
V_INLINE void v_load_e4m3x2(const uint8_t *p, v16 *lo, v16 *hi, v_seen *seen)
{
    __m256i b = _mm256_loadu_si256((const __m256i *)p);
    *seen = _mm256_min_epu8(*seen, _mm256_andnot_si256(b, _mm256_set1_epi8(0x7f)));
    __m512i z = _mm512_slli_epi16(_mm512_cvtepi8_epi16(b), 7);
    z = _mm512_and_si512(z, _mm512_set1_epi16((int16_t)0xbfff));
    *lo = _mm512_cvtph_ps(_mm512_castsi512_si256(z));
    *hi = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(z, 1));
}
#define V_E4M3X2_SCALE 256.0f
/* As v_lookup16, but lane 2i is nibble i and lane 2i+1 nibble 8+i, which saves a shuffle. */
V_INLINE v16 v_lookup16_mixed(const uint8_t *p, v16 table)
{
    int64_t q;
    memcpy(&q, p, 8);
    __m512i w = _mm512_set1_epi64(q);
    w = _mm512_srlv_epi32(
        w, _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28));
    return _mm512_permutexvar_ps(w, table);
}
/* Lanes in that order, and back. */
V_INLINE v16 v_mix(v16 a)
{
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), a);
}
V_INLINE v16 v_unmix(v16 a)
{
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), a);
}
V_INLINE v16 v_load_ue8m0(const uint8_t *p) /* sixteen codes -> powers of two */
{
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i u = _mm512_slli_epi32(b, 23);
    u = _mm512_mask_mov_epi32(u, _mm512_testn_epi32_mask(b, b), _mm512_set1_epi32(0x400000));
    u = _mm512_mask_mov_epi32(u, _mm512_cmpeq_epi32_mask(b, _mm512_set1_epi32(255)),
                              _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(u);
}
/* Rows to columns of a 16 x 16 block: out[i * ld + j] = in[j * ld_in + i]. */
V_INLINE void v_transpose(const float *in, int64_t ld_in, float *out, int64_t ld)
{
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(in + i * ld_in);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) { /* pairs of rows */
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* fours: within each quarter, one column */
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* quarters to their places */
        __m512 p = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        __m512 q = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        __m512 r = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        __m512 s = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
        _mm512_storeu_ps(out + i * ld, _mm512_shuffle_f32x4(p, q, 0x88));
        _mm512_storeu_ps(out + (i + 8) * ld, _mm512_shuffle_f32x4(p, q, 0xdd));
        _mm512_storeu_ps(out + (i + 4) * ld, _mm512_shuffle_f32x4(r, s, 0x88));
        _mm512_storeu_ps(out + (i + 12) * ld, _mm512_shuffle_f32x4(r, s, 0xdd));
    }
}
#define KERN_HAVE_TRANSPOSE 1
#define V_PREFETCH(p)       _mm_prefetch((const char *)(p), _MM_HINT_T1)

#elif KERN_ISA_AVX2
#include <immintrin.h>

typedef struct {
    __m256 l, h;
} v16;
typedef struct {
    __m256i l, h;
} v16i;

#define V_EACH2(name, op)                                                                          \
    V_INLINE v16 name(v16 a, v16 b)                                                                \
    {                                                                                              \
        return (v16){op(a.l, b.l), op(a.h, b.h)};                                                  \
    }
#define VI_EACH2(name, op)                                                                         \
    V_INLINE v16i name(v16i a, v16i b)                                                             \
    {                                                                                              \
        return (v16i){op(a.l, b.l), op(a.h, b.h)};                                                 \
    }

V_INLINE v16 v_load(const float *p)
{
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
V_INLINE void v_store(float *p, v16 a)
{
    _mm256_storeu_ps(p, a.l);
    _mm256_storeu_ps(p + 8, a.h);
}
V_INLINE v16 v_loadn(const float *p, int n)
{
    float t[16] = {0};
    memcpy(t, p, (size_t)n * 4);
    return v_load(t);
}
V_INLINE void v_storen(float *p, v16 a, int n)
{
    float t[16];
    v_store(t, a);
    memcpy(p, t, (size_t)n * 4);
}
V_INLINE v16 v_set1(float x)
{
    return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
V_INLINE v16 v_zero(void)
{
    return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()};
}
V_EACH2(v_add, _mm256_add_ps)
V_EACH2(v_sub, _mm256_sub_ps)
V_EACH2(v_mul, _mm256_mul_ps)
V_EACH2(v_div, _mm256_div_ps)
V_EACH2(v_max, _mm256_max_ps)
V_EACH2(v_min, _mm256_min_ps)
V_INLINE v16 v_sqrt(v16 a)
{
    return (v16){_mm256_sqrt_ps(a.l), _mm256_sqrt_ps(a.h)};
}
V_INLINE v16 v_fma(v16 a, v16 b, v16 c)
{
    return (v16){_mm256_fmadd_ps(a.l, b.l, c.l), _mm256_fmadd_ps(a.h, b.h, c.h)};
}
V_INLINE v16i v_bits(v16 a)
{
    return (v16i){_mm256_castps_si256(a.l), _mm256_castps_si256(a.h)};
}
V_INLINE v16 v_float(v16i a)
{
    return (v16){_mm256_castsi256_ps(a.l), _mm256_castsi256_ps(a.h)};
}
VI_EACH2(vi_add, _mm256_add_epi32)
VI_EACH2(vi_sub, _mm256_sub_epi32)
VI_EACH2(vi_and, _mm256_and_si256)
VI_EACH2(vi_or, _mm256_or_si256)
V_INLINE v16i vi_set1(int32_t x)
{
    return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
#define vi_sll(a, n)   ((v16i){_mm256_slli_epi32((a).l, n), _mm256_slli_epi32((a).h, n)})
#define vi_srl(a, n)   ((v16i){_mm256_srli_epi32((a).l, n), _mm256_srli_epi32((a).h, n)})
#define vi_sra(a, n)   ((v16i){_mm256_srai_epi32((a).l, n), _mm256_srai_epi32((a).h, n)})
V_INLINE v16 v_abs(v16 a)
{
    return v_float(vi_and(v_bits(a), vi_set1(0x7fffffff)));
}
V_INLINE v16 v_sel_lt(v16 a, v16 b, v16 x, v16 y)
{
    return (v16){_mm256_blendv_ps(y.l, x.l, _mm256_cmp_ps(a.l, b.l, _CMP_LT_OQ)),
                 _mm256_blendv_ps(y.h, x.h, _mm256_cmp_ps(a.h, b.h, _CMP_LT_OQ))};
}
V_INLINE v16 v_sel_nan(v16 a, v16 x, v16 y)
{
    return (v16){_mm256_blendv_ps(y.l, x.l, _mm256_cmp_ps(a.l, a.l, _CMP_UNORD_Q)),
                 _mm256_blendv_ps(y.h, x.h, _mm256_cmp_ps(a.h, a.h, _CMP_UNORD_Q))};
}
V_INLINE v16 v_load_bf16(const void *p)
{
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    return (v16){_mm256_castsi256_ps(
                     _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(h)), 16)),
                 _mm256_castsi256_ps(
                     _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(h, 1)), 16))};
}
V_INLINE void vi_store_low16(void *p, v16i a)
{
    __m256i m = _mm256_set1_epi32(0xffff);
    __m256i w = _mm256_packus_epi32(_mm256_and_si256(a.l, m), _mm256_and_si256(a.h, m));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(w, 0xd8));
}
V_INLINE v16 v_load_e4m3(const uint8_t *p)
{
    __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
    w = _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16((int16_t)0xbfff));
    v16 v = {_mm256_cvtph_ps(_mm256_castsi256_si128(w)),
             _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1))};
    v = v_mul(v, v_set1(256.0f));
    return v_sel_lt(v_set1(448.0f), v_abs(v), v_set1(NAN), v);
}
V_INLINE v16 v_lookup16(const uint8_t *p, v16 table)
{
    int32_t lo, hi;
    memcpy(&lo, p, 4);
    memcpy(&hi, p + 4, 4);
    __m256i sh = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    __m256i wl = _mm256_srlv_epi32(_mm256_set1_epi32(lo), sh);
    __m256i wh = _mm256_srlv_epi32(_mm256_set1_epi32(hi), sh);
    /* The table's second half is the first negated: three bits look up, the fourth is the sign. */
    __m256i m = _mm256_set1_epi32((int32_t)0x80000000);
    return (v16){
        _mm256_xor_ps(_mm256_permutevar8x32_ps(table.l, wl),
                      _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(wl, 28), m))),
        _mm256_xor_ps(_mm256_permutevar8x32_ps(table.l, wh),
                      _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(wh, 28), m)))};
}
V_INLINE float v_sum(v16 a)
{
    __m256 h = _mm256_add_ps(a.l, a.h);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
V_INLINE float v_hmax(v16 a)
{
    __m256 h = _mm256_max_ps(a.l, a.h);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
V_INLINE void v_sum4(float *out, v16 a, v16 b, v16 c, v16 d)
{
    __m256 ha = _mm256_add_ps(a.l, a.h), hb = _mm256_add_ps(b.l, b.h);
    __m256 hc = _mm256_add_ps(c.l, c.h), hd = _mm256_add_ps(d.l, d.h);
    __m256 ab =
        _mm256_add_ps(_mm256_permute2f128_ps(ha, hb, 0x20), _mm256_permute2f128_ps(ha, hb, 0x31));
    __m256 cd =
        _mm256_add_ps(_mm256_permute2f128_ps(hc, hd, 0x20), _mm256_permute2f128_ps(hc, hd, 0x31));
    ab = _mm256_add_ps(ab, _mm256_permute_ps(ab, 0x4e));
    cd = _mm256_add_ps(cd, _mm256_permute_ps(cd, 0x4e));
    ab = _mm256_add_ps(ab, _mm256_permute_ps(ab, 0xb1));
    cd = _mm256_add_ps(cd, _mm256_permute_ps(cd, 0xb1));
    __m256 x = _mm256_unpacklo_ps(ab, cd); /* a c .. | b d .. */
    __m128 l = _mm256_castps256_ps128(x), h = _mm256_extractf128_ps(x, 1);
    _mm_storeu_ps(out, _mm_unpacklo_ps(l, h));
}
typedef __m256i v_seen;
V_INLINE v_seen v_seen_none(void)
{
    return _mm256_set1_epi8(-1);
}
V_INLINE bool v_seen_nan(v_seen s)
{
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(s, _mm256_setzero_si256())) != 0;
}
V_INLINE void v_load_e4m3x2(const uint8_t *p, v16 *lo, v16 *hi, v_seen *seen)
{
    __m256i b = _mm256_loadu_si256((const __m256i *)p);
    *seen = _mm256_min_epu8(*seen, _mm256_andnot_si256(b, _mm256_set1_epi8(0x7f)));
    for (int i = 0; i < 2; i++) {
        __m128i h = i ? _mm256_extracti128_si256(b, 1) : _mm256_castsi256_si128(b);
        __m256i z = _mm256_slli_epi16(_mm256_cvtepi8_epi16(h), 7);
        z = _mm256_and_si256(z, _mm256_set1_epi16((int16_t)0xbfff));
        v16 v = {_mm256_cvtph_ps(_mm256_castsi256_si128(z)),
                 _mm256_cvtph_ps(_mm256_extracti128_si256(z, 1))};
        *(i ? hi : lo) = v;
    }
}
#define V_E4M3X2_SCALE 256.0f
V_INLINE v16 v_lookup16_mixed(const uint8_t *p, v16 table)
{
    return v_lookup16(p, table);
}
V_INLINE v16 v_mix(v16 a)
{
    return a;
} /* nothing to save here */
V_INLINE v16 v_unmix(v16 a)
{
    return a;
}
V_INLINE v16 v_load_ue8m0(const uint8_t *p)
{
    float f[16];
    for (int i = 0; i < 16; i++) f[i] = kern_ue8m0_decode(p[i]);
    return v_load(f);
}
#define V_PREFETCH(p)  _mm_prefetch((const char *)(p), _MM_HINT_T0)

#else

typedef struct {
    float f[16];
} v16;
typedef struct {
    uint32_t u[16];
} v16i;

#define V_EACH(expr)                                                                               \
    v16 r;                                                                                         \
    for (int i = 0; i < 16; i++) r.f[i] = (expr);                                                  \
    return r
#define VI_EACH(expr)                                                                              \
    v16i r;                                                                                        \
    for (int i = 0; i < 16; i++) r.u[i] = (expr);                                                  \
    return r

V_INLINE v16 v_load(const float *p)
{
    v16 r;
    memcpy(&r, p, 64);
    return r;
}
V_INLINE v16 v_loadn(const float *p, int n)
{
    v16 r = {{0}};
    memcpy(&r, p, (size_t)n * 4);
    return r;
}
V_INLINE void v_store(float *p, v16 a)
{
    memcpy(p, &a, 64);
}
V_INLINE void v_storen(float *p, v16 a, int n)
{
    memcpy(p, &a, (size_t)n * 4);
}
V_INLINE v16 v_set1(float x)
{
    V_EACH(x);
}
V_INLINE v16 v_zero(void)
{
    V_EACH(0.0f);
}
V_INLINE v16 v_add(v16 a, v16 b)
{
    V_EACH(a.f[i] + b.f[i]);
}
V_INLINE v16 v_sub(v16 a, v16 b)
{
    V_EACH(a.f[i] - b.f[i]);
}
V_INLINE v16 v_mul(v16 a, v16 b)
{
    V_EACH(a.f[i] * b.f[i]);
}
V_INLINE v16 v_div(v16 a, v16 b)
{
    V_EACH(a.f[i] / b.f[i]);
}
V_INLINE v16 v_sqrt(v16 a)
{
    V_EACH(sqrtf(a.f[i]));
}
V_INLINE v16 v_fma(v16 a, v16 b, v16 c)
{
    V_EACH(fmaf(a.f[i], b.f[i], c.f[i]));
}
V_INLINE v16 v_max(v16 a, v16 b)
{
    V_EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]);
}
V_INLINE v16 v_min(v16 a, v16 b)
{
    V_EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]);
}
V_INLINE v16 v_abs(v16 a)
{
    V_EACH(fabsf(a.f[i]));
}
V_INLINE v16 v_sel_lt(v16 a, v16 b, v16 x, v16 y)
{
    V_EACH(a.f[i] < b.f[i] ? x.f[i] : y.f[i]);
}
V_INLINE v16 v_sel_nan(v16 a, v16 x, v16 y)
{
    V_EACH(a.f[i] != a.f[i] ? x.f[i] : y.f[i]);
}
V_INLINE v16i v_bits(v16 a)
{
    v16i r;
    memcpy(&r, &a, 64);
    return r;
}
V_INLINE v16 v_float(v16i a)
{
    v16 r;
    memcpy(&r, &a, 64);
    return r;
}
V_INLINE v16i vi_set1(int32_t x)
{
    VI_EACH((uint32_t)x);
}
V_INLINE v16i vi_add(v16i a, v16i b)
{
    VI_EACH(a.u[i] + b.u[i]);
}
V_INLINE v16i vi_sub(v16i a, v16i b)
{
    VI_EACH(a.u[i] - b.u[i]);
}
V_INLINE v16i vi_and(v16i a, v16i b)
{
    VI_EACH(a.u[i] & b.u[i]);
}
V_INLINE v16i vi_or(v16i a, v16i b)
{
    VI_EACH(a.u[i] | b.u[i]);
}
V_INLINE v16i vi_sll(v16i a, int n)
{
    VI_EACH(a.u[i] << n);
}
V_INLINE v16i vi_srl(v16i a, int n)
{
    VI_EACH(a.u[i] >> n);
}
V_INLINE v16i vi_sra(v16i a, int n)
{
    VI_EACH((uint32_t)((int32_t)a.u[i] >> n));
}
V_INLINE v16 v_load_bf16(const void *p)
{
    uint16_t h[16];
    memcpy(h, p, 32);
    V_EACH(kern_bf16_decode(h[i]));
}
V_INLINE void vi_store_low16(void *p, v16i a)
{
    uint16_t h[16];
    for (int i = 0; i < 16; i++) h[i] = (uint16_t)a.u[i];
    memcpy(p, h, 32);
}
V_INLINE v16 v_load_e4m3(const uint8_t *p)
{
    V_EACH(kern_e4m3_decode(p[i]));
}
V_INLINE v16 v_lookup16(const uint8_t *p, v16 table)
{
    V_EACH(table.f[kern_nibble(p, i)]);
}
V_INLINE float v_sum(v16 a)
{
    for (int w = 8; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a.f[i] = a.f[i] + a.f[i + w];
    return a.f[0];
}
V_INLINE float v_hmax(v16 a)
{
    float m = a.f[0];
    for (int i = 1; i < 16; i++) m = a.f[i] > m ? a.f[i] : m;
    return m;
}
V_INLINE void v_sum4(float *out, v16 a, v16 b, v16 c, v16 d)
{
    out[0] = v_sum(a), out[1] = v_sum(b), out[2] = v_sum(c), out[3] = v_sum(d);
}
typedef int v_seen;
V_INLINE v_seen v_seen_none(void)
{
    return 0;
}
V_INLINE bool v_seen_nan(v_seen s)
{
    return s != 0;
}
V_INLINE void v_load_e4m3x2(const uint8_t *p, v16 *lo, v16 *hi, v_seen *seen)
{
    (void)seen; /* the table holds NaN itself */
    *lo = v_load_e4m3(p);
    *hi = v_load_e4m3(p + 16);
}
#define V_E4M3X2_SCALE 1.0f
V_INLINE v16 v_lookup16_mixed(const uint8_t *p, v16 table)
{
    return v_lookup16(p, table);
}
V_INLINE v16 v_mix(v16 a)
{
    return a;
}
V_INLINE v16 v_unmix(v16 a)
{
    return a;
}
V_INLINE v16 v_load_ue8m0(const uint8_t *p)
{
    V_EACH(kern_ue8m0_decode(p[i]));
}
#define V_PREFETCH(p)  __builtin_prefetch(p)
#endif

/* --- built on the above, the same text for all */

#ifndef KERN_HAVE_TRANSPOSE
V_INLINE void v_transpose(const float *in, int64_t ld_in, float *out, int64_t ld)
{
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) out[i * ld + j] = in[j * ld_in + i];
}
#endif

V_INLINE v16 v_neg(v16 a)
{
    return v_sub(v_set1(-0.0f), a);
}

/* Bits of a rounded to bf16, in the upper half of each lane; NaN becomes a quiet NaN. */
V_INLINE v16i v_bf16_bits(v16 a)
{
    v16i u = v_bits(a);
    v16i odd = vi_and(vi_srl(u, 16), vi_set1(1));
    v16i r = vi_add(vi_add(u, vi_set1(0x7fff)), odd);
    v16i q = vi_or(u, vi_set1(0x400000));
    return vi_and(v_bits(v_sel_nan(a, v_float(q), v_float(r))), vi_set1((int32_t)0xffff0000));
}
V_INLINE v16 v_round_bf16(v16 a)
{
    return v_float(v_bf16_bits(a));
}
V_INLINE void v_store_bf16(void *p, v16 a)
{
    vi_store_low16(p, vi_srl(v_bf16_bits(a), 16));
}

/* Rounded to the nearest e4m3 value, saturating; NaN stays. */
V_INLINE v16 v_round_e4m3(v16 x)
{
    v16i u = v_bits(x), sign = vi_and(u, vi_set1((int32_t)0x80000000));
    v16 a = v_min(v_abs(x), v_set1(448.0f));
    v16i v = v_bits(a);
    v = vi_add(vi_add(v, vi_set1(0x7ffff)), vi_and(vi_srl(v, 20), vi_set1(1)));
    v = vi_and(v, vi_set1((int32_t)0xfff00000));
    v16 sub = v_sub(v_add(a, v_set1(16384.0f)), v_set1(16384.0f));
    v16 r = v_sel_lt(a, v_set1(0x1p-6f), sub, v_float(v));
    r = v_float(vi_or(v_bits(r), sign));
    return v_sel_nan(x, x, r);
}
/* Rounded to the nearest e2m1 value, saturating; NaN becomes +-6. */
V_INLINE v16 v_round_e2m1(v16 x)
{
    v16i sign = vi_and(v_bits(x), vi_set1((int32_t)0x80000000));
    v16 a = v_min(v_abs(x), v_set1(6.0f));
    v16i v = v_bits(a);
    v = vi_add(vi_add(v, vi_set1(0x1fffff)), vi_and(vi_srl(v, 22), vi_set1(1)));
    v = vi_and(v, vi_set1((int32_t)0xffc00000));
    v16 sub = v_sub(v_add(a, v_set1(4194304.0f)), v_set1(4194304.0f));
    v16 r = v_sel_lt(a, v_set1(1.0f), sub, v_float(v));
    return v_float(vi_or(v_bits(r), sign));
}

#endif
