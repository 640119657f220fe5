/* kernels/gemm/amx_cpu.c - weights to bf16 tiles, and the loops over tiles.
 *
 * Up to 32 rows of x: 128 values of 32 weight rows are converted into a buffer of the first-level
 * cache while the matrix unit works on the 128 before. More: the whole panel is converted once,
 * then multiplied with 32 rows of x at a time.
 *
 * Conversion is integer work on sixteen-bit lanes. fp8: exponent and mantissa are moved into place
 * and the scale, a power of two, is added to the exponent; a subnormal code is looked up, since
 * bf16 has no room for it as it stands. mxfp4: codes look up a table of sixteen values, and the
 * scale is added likewise. What that cannot do (NaN codes, scales at the ends of their range) is
 * noticed and the panel converted again value by value.
 */
#include "kernels/gemm/amx_cpu.h"

#if KERN_ISA_AMX
#include <immintrin.h>

enum {
    QUARTERS = 4, /* of a run: 32 values each, a tile wide */
    STRIPS = 2,
    RUN = KERN_AMX_ROWS * KERN_AMX_RUN, /* values of a converted one */
    ROWS_AT_ONCE = 8,
    RUNS_AHEAD = 4
};
/* The compiler does not know that tile instructions read and write memory. */
#define TILES_SEE_MEMORY() __asm__ volatile("" ::: "memory")

/* Scale codes with which every number of the format is a normal one in bf16, whose exponent codes
 * for those are 1 to 254: a number in 2^e .. 2^(e+1) gets code e + scale. fp8 has e from -9 to 8,
 * mxfp4 from -1 to 2. */
enum {
    FP8_SCALE_MIN = 1 + 9,
    FP8_SCALE_MAX = 254 - 8,
    MXFP4_SCALE_MIN = 1 + 1,
    MXFP4_SCALE_MAX = 254 - 2
};

struct panel {
    const struct kern_weight *w;
    /* Rows past the last are the first again; nobody reads their sums. */
    const uint8_t *row[KERN_AMX_ROWS];
    const uint8_t *row_scale[KERN_AMX_ROWS]; /* mxfp4: their scale codes */
    uint16_t *less;       /* fp8: [2][blocks], what is subtracted from a raised bf16 exponent */
    int split;            /* fp8: rows from here on have the second scales */
    int64_t runs, blocks; /* of a row: KERN_AMX_RUN values, values of one scale */
    bool by_value;        /* a scale or a code that lanes cannot do */
};

/* --- x */

void KERN_ISA(kern_amx_pack)(const struct kern_weight *w, const float *x, uint32_t *packed,
                             int64_t t, int64_t T)
{
    int64_t cols = kern_amx_cols(T), words = kern_amx_runs(w->k) * KERN_AMX_RUN_WORDS;
    int64_t have = kern_pad16(w->k);
    const uint32_t *u = (const uint32_t *)(const void *)x;
    uint32_t *to = packed + kern_amx_x_at(t & ~(int64_t)15, w->k) + (t & 15);
    for (int64_t i = 0; i < words; i++) {
        /* Of mxfp4 weights the first quarter is every fourth value of the run, and so on. */
        int64_t j = i % KERN_AMX_RUN_WORDS, run = i - j;
        int64_t at = w->fmt == KERN_W_MXFP4 ? 2 * run + j % 16 * 8 + j / 16 : 2 * i;
        int64_t step = w->fmt == KERN_W_MXFP4 ? 4 : 1;
        uint32_t lo = at < have ? u[at] : 0, hi = at + step < have ? u[at + step] : 0;
        to[i * cols] = (lo >> 16) | (hi & 0xffff0000u);
    }
    /* What lies in a column without a row is multiplied too; it must only be there. */
    if (t == T - 1)
        for (int64_t c = (t & 15) + 1; c < cols; c++)
            for (int64_t i = 0; i < words; i++) to[i * cols + c - (t & 15)] = 0;
}

/* --- scales */

/* Smallest and largest of n scale codes, into both. */
V_INLINE void code_range(const uint8_t *s, int64_t n, __m512i *least, __m512i *most)
{
    for (int64_t b = 0; b < n; b += 64) {
        __mmask64 k = n - b < 64 ? ((__mmask64)1 << (n - b)) - 1 : ~(__mmask64)0;
        __m512i v = _mm512_maskz_loadu_epi8(k, s + b);
        *least = _mm512_mask_min_epu8(*least, k, *least, v);
        *most = _mm512_max_epu8(*most, v);
    }
}

/* False: a scale is so small or large that adding exponents would leave bf16's range. */
static bool panel_open(struct panel *p, const struct kern_weight *w, int64_t n, int64_t nb,
                       void *scratch)
{
    bool fp8 = w->fmt == KERN_W_FP8;
    int64_t block = fp8 ? 128 : 32;
    __m512i least = _mm512_set1_epi8(127), most = least;
    p->w = w;
    p->less = scratch;
    p->runs = kern_amx_runs(w->k);
    p->blocks = (w->k + block - 1) / block;
    for (int64_t r = 0; r < KERN_AMX_ROWS; r++)
        p->row[r] = (const uint8_t *)w->data + (n + (r < nb ? r : 0)) * w->row_bytes;
    if (fp8) {
        p->split = 128 - (int)(n % 128);
        for (int64_t i = 0; i < 2 && n / 128 + i <= (n + nb - 1) / 128; i++) {
            const uint8_t *s = (const uint8_t *)w->scale + (n / 128 + i) * w->scale_row_bytes;
            code_range(s, p->blocks, &least, &most);
            for (int64_t b = 0; b < p->blocks; b++)
                p->less[i * p->blocks + b] = (uint16_t)((120 + 127 - s[b]) * 128);
        }
    } else if (w->fmt == KERN_W_MXFP4) {
        for (int64_t r = 0; r < KERN_AMX_ROWS; r++) {
            const uint8_t *s =
                (const uint8_t *)w->scale + (n + (r < nb ? r : 0)) * w->scale_row_bytes;
            p->row_scale[r] = s;
            code_range(s, p->blocks, &least, &most);
        }
    }
    __m512i low = _mm512_set1_epi8(fp8 ? FP8_SCALE_MIN : MXFP4_SCALE_MIN);
    __m512i high = _mm512_set1_epi8((char)(fp8 ? FP8_SCALE_MAX : MXFP4_SCALE_MAX));
    return !_mm512_cmplt_epu8_mask(least, low) && !_mm512_cmpgt_epu8_mask(most, high);
}

/* --- conversion of one run
 *
 * Ahead (what is used at once): out[32 rows][128], whose lines the rows of a weight, often 4 KiB
 * apart, push out of the first-level cache less. Not ahead (a panel that many rows of x meet): tile
 * after tile, out[quarter][strip][16][32]. */

V_INLINE int64_t quarter_step(bool ahead)
{
    return ahead ? 32 : STRIPS * 16 * 32;
}
V_INLINE int64_t row_step(bool ahead)
{
    return ahead ? KERN_AMX_RUN : 32;
}
V_INLINE uint16_t *row_out(uint16_t *out, int r, bool ahead)
{
    return out + (ahead ? r * KERN_AMX_RUN : (r / 16 * 16 * 32 + r % 16 * 32));
}

static void convert_by_value(const struct panel *p, int64_t run, int r0, uint16_t *out, bool ahead)
{
    const struct kern_weight *w = p->w;
    for (int r = r0; r < r0 + ROWS_AT_ONCE; r++)
        for (int i = 0; i < KERN_AMX_RUN; i++) {
            int64_t k = run * KERN_AMX_RUN + i;
            int64_t row = (p->row[r] - (const uint8_t *)w->data) / w->row_bytes;
            float v = 0;
            if (k < w->k)
                v = kern_weight_scale(w, row, k) *
                    (w->fmt == KERN_W_FP8 ? kern_e4m3_decode(p->row[r][k])
                                          : kern_e2m1_value[kern_nibble(p->row[r], k)]);
            int quarter = w->fmt == KERN_W_FP8 ? i / 32 : i % 4;
            int lane = w->fmt == KERN_W_FP8 ? i % 32 : i / 4;
            row_out(out, r, ahead)[quarter * quarter_step(ahead) + lane] = kern_bf16_encode(v);
        }
}

/* Upper and lower bytes of the subnormal numbers of e4m3 as bf16 with 120 added to the exponent:
 * m/8 * 2^-6, both signs of each, from place 2 on. Zero is 0. See fp8_to_bf16(). */
static const uint8_t e4m3_low[2][64]
    __attribute__((aligned(64))) = {{0, 0, 0x00, 0x00, 0x77, 0xf7, 0x77, 0xf7, 0x77, 0xf7, 0x78,
                                     0xf8, 0x78, 0xf8, 0x78, 0xf8, 0x78, 0xf8},
                                    {0, 0, 0x00, 0x00, 0x00, 0x00, 0x80, 0x80, 0xc0, 0xc0, 0x00,
                                     0x00, 0x20, 0x20, 0x40, 0x40, 0x60, 0x60}};
/* The sixteen codes of e2m1 as bf16 with 125 added to the exponent, twice; both zeros are 0. See
 * convert_mxfp4(). */
static const uint16_t e2m1_high[32] = {
    0x0000, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0x0000, 0xfd80, 0xfe00,
    0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40, 0x0000, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0,
    0x7f00, 0x7f40, 0x0000, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40};

/* Which of 64 bytes are there if `left` are. */
V_INLINE __mmask64 bytes_left(int64_t left)
{
    return left >= 64 ? ~(__mmask64)0 : left <= 0 ? 0 : ((__mmask64)1 << left) - 1;
}
/* Which of quarter q's 32 values are there if the run has `left`. */
V_INLINE __mmask32 lanes_left(int64_t left, int q)
{
    int64_t n = left - 32 * q;
    return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : ((__mmask32)1 << n) - 1;
}

/* A bit matrix for eight bits at a time: row i is what is added up (exclusive or) to bit i. */
#define BITS(b7, b6, b5, b4, b3, b2, b1, b0)                                                       \
    ((uint64_t)(b7) | (uint64_t)(b6) << 8 | (uint64_t)(b5) << 16 | (uint64_t)(b4) << 24 |          \
     (uint64_t)(b3) << 32 | (uint64_t)(b2) << 40 | (uint64_t)(b1) << 48 | (uint64_t)(b0) << 56)

/* 64 codes, whose eights come in the order 0 4 1 5 2 6 3 7, to two times 32 numbers.
 *
 * The exponent code of a normal number is e + 120. Raised by another 120 it is e below four ones:
 * its bits move, none are added. Turned left by one bit, codes of subnormal numbers and zero are
 * the least ones, those of NaN the greatest; two added with wrap-around, these come first. What is
 * less than 18 is looked up. 120 less the scale's exponent is subtracted with saturation, so that
 * zero stays below the normal numbers, which is zero to the matrix unit. */
V_INLINE void fp8_to_bf16(__m512i codes, __m512i less, uint16_t *out, int64_t step, __m512i *least)
{
    const __m512i turn = _mm512_set1_epi64((int64_t)BITS(64, 32, 16, 8, 4, 2, 1, 128)),
                  upper = _mm512_set1_epi64((int64_t)BITS(128, 0, 0, 0, 0, 64, 32, 16)),
                  lower = _mm512_set1_epi64((int64_t)BITS(8, 4, 2, 1, 0, 0, 0, 0));
    __m512i at =
                _mm512_add_epi8(_mm512_gf2p8affine_epi64_epi8(codes, turn, 0), _mm512_set1_epi8(2)),
            h = _mm512_gf2p8affine_epi64_epi8(codes, upper, 0x78),
            l = _mm512_gf2p8affine_epi64_epi8(codes, lower, 0);
    __mmask64 low = _mm512_cmplt_epu8_mask(at, _mm512_set1_epi8(18));
    h = _mm512_mask_permutexvar_epi8(h, low, at, _mm512_load_si512(e4m3_low[0]));
    l = _mm512_mask_permutexvar_epi8(l, low, at, _mm512_load_si512(e4m3_low[1]));
    *least = _mm512_min_epu8(*least, at);
    _mm512_storeu_si512(out, _mm512_subs_epu16(_mm512_unpacklo_epi8(l, h), less));
    _mm512_storeu_si512(out + step, _mm512_subs_epu16(_mm512_unpackhi_epi8(l, h), less));
}

/* From a run to what is fetched with it: a few runs on in the same row, or at the start of the next
 * panel's. 0: nothing. run_bytes: of a row. */
V_INLINE int64_t ahead_of(const struct panel *p, int64_t run, int64_t run_bytes)
{
    int64_t whole = p->w->k / KERN_AMX_RUN, to = run + RUNS_AHEAD;
    if (to < whole) return RUNS_AHEAD * run_bytes;
    return to - whole >= whole ? 0
                               : KERN_AMX_ROWS * p->w->row_bytes + (RUNS_AHEAD - whole) * run_bytes;
}

/* Rows of 4-bit codes are short, and several lie in a page, where the processor's own prefetching
 * follows one: what is fetched with row r of a run lies after the panel, in memory's order. */
V_INLINE const uint8_t *ahead_in_order(const struct panel *p, int64_t run, int r)
{
    return p->row[0] + KERN_AMX_ROWS * p->w->row_bytes + (run * KERN_AMX_ROWS + r) * 64;
}

/* whole: the run lies within the row. */
V_INLINE void convert_fp8(const struct panel *p, int64_t run, int r0, uint16_t *out, __m512i *least,
                          bool ahead, const bool whole)
{
    const int64_t k = run * KERN_AMX_RUN, left = p->w->k - k;
    const int64_t far = ahead ? ahead_of(p, run, KERN_AMX_RUN) : 0;
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    uint16_t *o = row_out(out, r0, ahead);
    const int64_t step = quarter_step(ahead);
    __m512i seen = *least;
    for (int r = r0, end = r0 + ROWS_AT_ONCE; r < end;) {
        bool second = r >= p->split;
        int stop = !second && p->split < end ? p->split : end;
        __m512i less = _mm512_set1_epi16((int16_t)p->less[(second ? p->blocks : 0) + run]);
        for (; r < stop; r++, o += row_step(ahead)) {
            const uint8_t *d = p->row[r] + k;
            if (far) {
                V_PREFETCH(d + far);
                V_PREFETCH(d + far + 64);
            }
#pragma GCC unroll 2
            for (int i = 0; i < KERN_AMX_RUN; i += 64) {
                __m512i codes = whole ? _mm512_loadu_si512(d + i)
                                      : _mm512_maskz_loadu_epi8(bytes_left(left - i), d + i);
                fp8_to_bf16(_mm512_permutexvar_epi64(order, codes), less, o + i / 32 * step, step,
                            &seen);
            }
        }
    }
    *least = seen;
}

/* A 16-bit lane holds four codes, one for each quarter: shifted down, its lowest four bits look up
 * a bf16 number (the table ignores the fifth), whose exponent is 125 too high. 125 less the scale's
 * exponent is subtracted with saturation, so that zero stays below the normal numbers, which is
 * zero to the matrix unit. */
V_INLINE void convert_mxfp4(const struct panel *p, int64_t run, int r0, uint16_t *out, bool ahead,
                            const bool whole)
{
    const int64_t k = run * KERN_AMX_RUN, left = p->w->k - k;
    const __m512i table = _mm512_loadu_si512(e2m1_high);
    /* Group i of the run has lanes 8i to 8i+7: its scale code to their upper bytes. */
    const __m512i where = _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_set1_epi16((int16_t)0x0080)), _mm_set1_epi16(0x0180), 1)),
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi16(0x0280)),
                                _mm_set1_epi16(0x0380), 1),
        1);
    const __m512i most = _mm512_set1_epi16((125 + 127) << 7);
    uint16_t *o = row_out(out, r0, ahead);
    const int64_t step = quarter_step(ahead);
    if (ahead && r0 == 0) { /* four bytes of each row's scales; they lie together */
        V_PREFETCH(p->row_scale[0] + KERN_AMX_ROWS * p->w->scale_row_bytes + k);
        V_PREFETCH(p->row_scale[0] + KERN_AMX_ROWS * p->w->scale_row_bytes + k + 64);
    }
    for (int r = r0; r < r0 + ROWS_AT_ONCE; r++, o += row_step(ahead)) {
        const uint8_t *d = p->row[r] + k / 2, *s = p->row_scale[r] + k / 32;
        int32_t four = 0;
        if (ahead) V_PREFETCH(ahead_in_order(p, run, r));
        memcpy(&four, s, whole ? 4 : (size_t)(left / 32));
        __m512i scale = _mm512_srli_epi16(_mm512_shuffle_epi8(_mm512_set1_epi32(four), where), 1);
        __m512i w = whole ? _mm512_loadu_si512(d)
                          : _mm512_maskz_loadu_epi8(((__mmask64)1 << left / 2) - 1, d);
        __m512i less = _mm512_sub_epi16(most, scale);
#define QUARTER(q, at)                                                                             \
    _mm512_storeu_si512(o + (q)*step, _mm512_subs_epu16(_mm512_permutexvar_epi16(at, table), less))
        QUARTER(0, w);
        QUARTER(1, _mm512_srli_epi16(w, 4));
        QUARTER(2, _mm512_srli_epi16(w, 8));
        QUARTER(3, _mm512_srli_epi16(w, 12));
#undef QUARTER
    }
}

V_INLINE void convert_bf16(const struct panel *p, int64_t run, int r0, uint16_t *out, bool ahead)
{
    int64_t k = run * KERN_AMX_RUN, left = p->w->k - k;
    for (int r = r0; r < r0 + ROWS_AT_ONCE; r++)
        for (int q = 0; q < QUARTERS; q++)
            _mm512_storeu_si512(
                row_out(out, r, ahead) + q * quarter_step(ahead),
                _mm512_maskz_loadu_epi16(lanes_left(left, q), p->row[r] + 2 * k + q * 64));
}

/* ROWS_AT_ONCE rows from r0 on. */
V_INLINE void convert(const struct panel *p, int64_t run, int r0, uint16_t *out, __m512i *least,
                      bool ahead, const bool whole, const enum kern_wfmt fmt)
{
    if (fmt == KERN_W_BF16)
        convert_bf16(p, run, r0, out, ahead);
    else if (p->by_value)
        convert_by_value(p, run, r0, out, ahead);
    else if (fmt == KERN_W_FP8)
        convert_fp8(p, run, r0, out, least, ahead, whole);
    else
        convert_mxfp4(p, run, r0, out, ahead, whole);
}
V_INLINE void convert_all(const struct panel *p, int64_t run, uint16_t *out, __m512i *least,
                          bool ahead, const bool whole, const enum kern_wfmt fmt)
{
    for (int r = 0; r < KERN_AMX_ROWS; r += ROWS_AT_ONCE)
        convert(p, run, r, out, least, ahead, whole, fmt);
}

/* --- tiles: 0 to 3 sums [strip][columns], 4 and 5 weights, 6 and 7 x */

static void configure(int64_t cols)
{
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = 16;
        c.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 64 : 4 * cols);
    }
    TILES_SEE_MEMORY();
    _tile_loadconfig(&c);
}

V_INLINE void zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Where a run of the panel's weights lies as bf16. */
struct run_at {
    const void *strip[STRIPS];
    int64_t row_bytes, quarter_bytes;
};

/* Adds quarter q of a run; x of the second sixteen rows lies `second` words on (0: none). */
V_INLINE void add_quarter(struct run_at w, int q, const uint32_t *x, int64_t cols, int64_t second)
{
    TILES_SEE_MEMORY();
    x += q * KERN_AMX_WORDS * cols;
    _tile_loadd(4, (const uint8_t *)w.strip[0] + q * w.quarter_bytes, (size_t)w.row_bytes);
    _tile_loadd(5, (const uint8_t *)w.strip[1] + q * w.quarter_bytes, (size_t)w.row_bytes);
    _tile_loadd(6, x, (size_t)cols * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (!second) return;
    _tile_loadd(7, x + second, (size_t)cols * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}
V_INLINE void add_run(struct run_at w, const uint32_t *x, int64_t cols, int64_t second)
{
    for (int q = 0; q < QUARTERS; q++) add_quarter(w, q, x, cols, second);
}

V_INLINE struct run_at run_in(const uint16_t *converted, bool ahead)
{
    return (struct run_at){{converted, converted + 16 * row_step(ahead)},
                           row_step(ahead) * 2,
                           quarter_step(ahead) * 2};
}

/* Whole bf16 runs need no copy. */
V_INLINE bool run_stored(const struct panel *p, int64_t nb, int64_t run, struct run_at *at)
{
    if (nb < KERN_AMX_ROWS || (run + 1) * KERN_AMX_RUN > p->w->k) return false;
    int64_t k = run * KERN_AMX_RUN * 2;
    *at = (struct run_at){{p->row[0] + k, p->row[16] + k}, p->w->row_bytes, 64};
    return true;
}

V_INLINE void to_rows(const float *s, int64_t nb, int64_t nt, int64_t cols, float *c, int64_t ld_c)
{
    TILES_SEE_MEMORY();
    for (int64_t t = 0; t < nt; t++)
        for (int64_t r = 0; r < nb; r++) c[t * ld_c + r] = s[r * cols + t];
}

/* Sums of nt <= 32 rows to c. */
static void store_sums(int64_t nb, int64_t nt, int64_t cols, float *c, int64_t ld_c)
{
    float s[KERN_AMX_ROWS * KERN_AMX_COLS];
    size_t ld = (size_t)cols * 4;
    _tile_stored(0, s, ld);
    _tile_stored(2, s + 16 * cols, ld);
    to_rows(s, nb, nt < 16 ? nt : 16, cols, c, ld_c);
    if (nt <= KERN_AMX_COLS) return;
    _tile_stored(1, s, ld);
    _tile_stored(3, s + 16 * cols, ld);
    to_rows(s, nb, nt - 16, cols, c + 16 * ld_c, ld_c);
}

V_INLINE bool is_nan_seen(__m512i least)
{
    return _mm512_cmplt_epu8_mask(least, _mm512_set1_epi8(2)) != 0;
}

V_INLINE void bf16_ahead(const struct panel *p, int64_t run)
{
    int64_t far = ahead_of(p, run, KERN_AMX_RUN * 2), at = run * KERN_AMX_RUN * 2 + far;
    for (int r = 0; far && r < KERN_AMX_ROWS; r++)
        for (int i = 0; i < KERN_AMX_RUN * 2; i += 64) V_PREFETCH(p->row[r] + at + i);
}

/* False: a NaN code was met, nothing is stored. */
V_INLINE bool times_stream(const struct panel *p, int64_t nb, const uint32_t *x, int64_t T,
                           float *c, int64_t ld_c, const enum kern_wfmt fmt)
{
    uint16_t buffer[2][RUN] __attribute__((aligned(64)));
    int64_t cols = kern_amx_cols(T), second = T > 16 ? kern_amx_x_at(16, p->w->k) : 0;
    int64_t x_run = KERN_AMX_RUN_WORDS * cols, whole = p->w->k / KERN_AMX_RUN, i = 0;
    __m512i least = _mm512_set1_epi8(-1);
    struct run_at at;
    zero_sums();
    if (fmt != KERN_W_BF16 && whole > 0) {
        /* The quarters of the run before are added in between, since each waits for the last. */
        convert_all(p, 0, buffer[0], &least, true, true, fmt);
        for (i = 1; i < whole; i++)
            for (int q = 0; q < QUARTERS; q++) {
                convert(p, i, q * ROWS_AT_ONCE, buffer[i & 1], &least, true, true, fmt);
                add_quarter(run_in(buffer[(i - 1) & 1], true), q, x + (i - 1) * x_run, cols,
                            second);
            }
        add_run(run_in(buffer[(i - 1) & 1], true), x + (i - 1) * x_run, cols, second);
    }
    for (; i < p->runs; i++) {
        if (fmt == KERN_W_BF16) bf16_ahead(p, i);
        if (fmt != KERN_W_BF16 || !run_stored(p, nb, i, &at)) {
            convert_all(p, i, buffer[0], &least, true, false, fmt);
            at = run_in(buffer[0], true);
        }
        add_run(at, x + i * x_run, cols, second);
    }
    if (is_nan_seen(least)) return false;
    store_sums(nb, T, cols, c, ld_c);
    return true;
}

V_INLINE bool times_panel(const struct panel *p, int64_t nb, const uint32_t *x, int64_t T, float *c,
                          int64_t ld_c, uint16_t *panel, const enum kern_wfmt fmt)
{
    int64_t whole = p->w->k / KERN_AMX_RUN, i = 0;
    __m512i least = _mm512_set1_epi8(-1);
    for (; i < whole; i++) convert_all(p, i, panel + i * RUN, &least, false, true, fmt);
    for (; i < p->runs; i++) convert_all(p, i, panel + i * RUN, &least, false, false, fmt);
    if (is_nan_seen(least)) return false;
    for (int64_t t = 0; t < T; t += 32) {
        int64_t nt = T - t < 32 ? T - t : 32, second = nt > 16 ? kern_amx_x_at(16, p->w->k) : 0;
        const uint32_t *xt = x + kern_amx_x_at(t, p->w->k);
        zero_sums();
        for (i = 0; i < p->runs; i++)
            add_run(run_in(panel + i * RUN, false), xt + i * KERN_AMX_RUN_WORDS * 16, 16, second);
        store_sums(nb, nt, 16, c + t * ld_c, ld_c);
    }
    return true;
}

/* --- up to sixteen rows
 *
 * Panel after panel without a pause: one has tiles 0 and 2, the next one 1 and 3, so that the sums
 * of the first are fetched while the second is under way. */

V_INLINE void add_to(const bool odd, struct run_at w, int q, const uint32_t *x, int64_t cols)
{
    TILES_SEE_MEMORY();
    _tile_loadd(4, (const uint8_t *)w.strip[0] + q * w.quarter_bytes, (size_t)w.row_bytes);
    _tile_loadd(5, (const uint8_t *)w.strip[1] + q * w.quarter_bytes, (size_t)w.row_bytes);
    _tile_loadd(6, x + q * KERN_AMX_WORDS * cols, (size_t)cols * 4);
    if (odd) {
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
    } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
    }
}

V_INLINE void zero_pair(const bool odd)
{
    if (odd) {
        _tile_zero(1);
        _tile_zero(3);
    } else {
        _tile_zero(0);
        _tile_zero(2);
    }
}

/* A panel under way: the pipeline has two, one being converted, one whose sums are fetched. */
struct stage {
    struct panel p;
    int64_t n, nb; /* its rows of the weight, from the first on */
    __m512i least; /* fp8: what tells that a NaN code was met */
    bool stored;
};

static void stage_store(struct stage *o, bool odd, int64_t T, float *c, int64_t ld_c)
{
    float s[KERN_AMX_ROWS * KERN_AMX_COLS];
    int64_t cols = kern_amx_cols(T);
    o->stored = true;
    if (odd) {
        _tile_stored(1, s, (size_t)cols * 4);
        _tile_stored(3, s + 16 * cols, (size_t)cols * 4);
    } else {
        _tile_stored(0, s, (size_t)cols * 4);
        _tile_stored(2, s + 16 * cols, (size_t)cols * 4);
    }
    to_rows(s, o->nb, T, cols, c + o->n, ld_c);
}

struct pipeline {
    uint16_t buffer[2][RUN];
    struct stage stages[2];
    struct run_at at; /* the run converted last, not added yet */
    const uint32_t *x;
    int64_t steps;
    uint64_t nan_panels; /* bit per panel: a NaN code was met, it has to be done again */
};

/* One panel's runs; the last one stays to be added. */
V_INLINE void stage_run(struct pipeline *z, int64_t panel, const uint32_t *x, int64_t T, float *c,
                        int64_t ld_c, const bool odd, const enum kern_wfmt fmt)
{
    struct stage *o = &z->stages[odd], *before = &z->stages[!odd];
    int64_t cols = kern_amx_cols(T), whole = o->p.w->k / KERN_AMX_RUN;
    zero_pair(odd);
    for (int64_t i = 0; i < o->p.runs; i++) {
        uint16_t *to = z->buffer[z->steps & 1];
        struct run_at at = run_in(to, true);
        bool stored = fmt == KERN_W_BF16 && run_stored(&o->p, o->nb, i, &at);
        if (fmt == KERN_W_BF16) bf16_ahead(&o->p, i);
        for (int q = 0; q < QUARTERS; q++) {
            if (!stored && i < whole)
                convert(&o->p, i, q * ROWS_AT_ONCE, to, &o->least, true, true, fmt);
            else if (!stored)
                convert(&o->p, i, q * ROWS_AT_ONCE, to, &o->least, true, false, fmt);
            if (z->steps == 0) continue;
            if (i == 0)
                add_to(!odd, z->at, q, z->x, cols);
            else
                add_to(odd, z->at, q, z->x, cols);
        }
        if (i == 1 && panel > 0) stage_store(before, !odd, T, c, ld_c);
        z->at = at;
        z->x = x + i * KERN_AMX_RUN_WORDS * cols;
        z->steps++;
    }
    if (panel > 0 && !before->stored) stage_store(before, !odd, T, c, ld_c);
    if (is_nan_seen(o->least)) z->nan_panels |= (uint64_t)1 << panel;
}

V_INLINE uint64_t times_pipelined(const struct kern_weight *w, int64_t n, int64_t nb,
                                  const uint32_t *x, int64_t T, float *c, int64_t ld_c,
                                  uint8_t *scratch, const enum kern_wfmt fmt)
{
    struct pipeline z __attribute__((aligned(64)));
    int64_t panels = (nb + KERN_AMX_ROWS - 1) / KERN_AMX_ROWS, cols = kern_amx_cols(T);
    size_t scales = kern_amx_scratch_bytes(w->k, true) / 2;
    z.steps = 0;
    z.nan_panels = 0;
    for (int64_t j = 0; j < panels; j++) {
        struct stage *o = &z.stages[j & 1];
        int64_t from = j * KERN_AMX_ROWS;
        o->n = from;
        o->nb = nb - from < KERN_AMX_ROWS ? nb - from : KERN_AMX_ROWS;
        o->least = _mm512_set1_epi8(-1);
        o->stored = false;
        o->p.by_value = !panel_open(&o->p, w, n + from, o->nb, scratch + (size_t)(j & 1) * scales);
        if (j & 1)
            stage_run(&z, j, x, T, c, ld_c, true, fmt);
        else
            stage_run(&z, j, x, T, c, ld_c, false, fmt);
    }
    for (int q = 0; q < QUARTERS; q++)
        if (panels & 1)
            add_to(false, z.at, q, z.x, cols);
        else
            /* cppcheck-suppress uninitvar ; a call has at least one panel */
            add_to(true, z.at, q, z.x, cols);
    stage_store(&z.stages[(panels - 1) & 1], !(panels & 1), T, c, ld_c);
    return z.nan_panels;
}

/* --- one panel, or all of a call, by format */

static bool times(const struct panel *p, int64_t nb, const uint32_t *x, int64_t T, float *c,
                  int64_t ld_c, uint16_t *panel)
{
    const bool stream = T <= KERN_AMX_STREAM;
    switch (p->w->fmt) {
    case KERN_W_BF16:
        return stream ? times_stream(p, nb, x, T, c, ld_c, KERN_W_BF16)
                      : times_panel(p, nb, x, T, c, ld_c, panel, KERN_W_BF16);
    case KERN_W_FP8:
        return stream ? times_stream(p, nb, x, T, c, ld_c, KERN_W_FP8)
                      : times_panel(p, nb, x, T, c, ld_c, panel, KERN_W_FP8);
    default:
        return stream ? times_stream(p, nb, x, T, c, ld_c, KERN_W_MXFP4)
                      : times_panel(p, nb, x, T, c, ld_c, panel, KERN_W_MXFP4);
    }
}

static uint64_t times_few(const struct kern_weight *w, int64_t n, int64_t nb, const uint32_t *x,
                          int64_t T, float *c, int64_t ld_c, uint8_t *scratch)
{
    switch (w->fmt) {
    case KERN_W_BF16: return times_pipelined(w, n, nb, x, T, c, ld_c, scratch, KERN_W_BF16);
    case KERN_W_FP8: return times_pipelined(w, n, nb, x, T, c, ld_c, scratch, KERN_W_FP8);
    default: return times_pipelined(w, n, nb, x, T, c, ld_c, scratch, KERN_W_MXFP4);
    }
}

_Static_assert(KERN_AMX_PART / KERN_AMX_ROWS <= 64, "a bit for each panel of a call");

void KERN_ISA(kern_amx_times)(const struct kern_weight *w, int64_t n, int64_t nb,
                              const uint32_t *packed, int64_t T, float *c, int64_t ld_c,
                              void *scratch)
{
    uint16_t *panel = (uint16_t *)((uint8_t *)scratch + kern_amx_scratch_bytes(w->k, true));
    uint64_t left = ~(uint64_t)0; /* bit per panel not stored yet; a call has at most sixteen */
    bool again = T <= KERN_AMX_COLS;
    configure(kern_amx_cols(T));
    if (again) left = times_few(w, n, nb, packed, T, c, ld_c, scratch);
    for (int64_t j = 0; j * KERN_AMX_ROWS < nb && left != 0; j++) {
        struct panel p;
        int64_t from = j * KERN_AMX_ROWS,
                rows = nb - from < KERN_AMX_ROWS ? nb - from : KERN_AMX_ROWS;
        if (!(left >> j & 1)) continue;
        p.by_value = !panel_open(&p, w, n + from, rows, scratch) || again;
        if (times(&p, rows, packed, T, c + from, ld_c, panel)) continue;
        p.by_value = true;
        times(&p, rows, packed, T, c + from, ld_c, panel);
    }
    _tile_release();
}
#endif
