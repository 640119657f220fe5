/* kernels/attn/key_tile.cuh - tiles of 64 keys of width 512 as bf16 in shared memory (sm_90a).
 *
 * A tile is eight blocks of 64 columns: 64 rows of 128 bytes, piece p of 16 bytes of row r at
 * p ^ (r & 7), as wgmma and ldmatrix like it. Four lanes bring a key, lane % 4 = c the columns
 * 16 (4 i + c) on for every i. To find a key takes up to three reads that wait for one another:
 * key_look(), key_find(), key_source_of() are the steps between, so that each can be begun ahead.
 */
#ifndef KERN_ATTN_KEY_TILE_CUH
#define KERN_ATTN_KEY_TILE_CUH

#include "kernels/attn/attention.cuh"
#include "kernels/attn/widen.cuh"
#include "kernels/cuda/mma.cuh"

enum {
    KEY_ROWS = 64, /* of a tile */
    KEY_WIDTH = 512,
    KEY_CODES = 448, /* of a key, in e4m3, 64 to a scale; the rest is bf16 */
    KEY_BYTES = KEY_CODES + 2 * (KEY_WIDTH - KEY_CODES),
    KEY_BLOCK = KEY_ROWS * 128, /* bytes */
    KEY_TILE = KEY_WIDTH / 64 * KEY_BLOCK,
};

/* A key: its bytes, and its scales where it is stored in e4m3. */
struct key_source {
    const uint8_t *row; /* NULL: past the last key, zeros */
    const uint8_t *scales;
};

/* The 128 bytes there, to L2. */
static __device__ __forceinline__ void key_prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

struct key_looked {
    const void *at; /* part; or table of pages; NULL: no such key */
    int32_t row;    /* of the part; or place among the row's entries */
    int32_t n;      /* rows of the part, 0: the batch's; negative: minus the table's step */
};
struct key_found {
    const void *at; /* part; n negative: where its page's number stands */
    int32_t row, n;
};

/* Where key i of a row of n is to be looked up. */
static __device__ __forceinline__ struct key_looked
key_look(const struct attn_job &j, const struct attn_keys &ks, int32_t i, int32_t n)
{
    if (i >= n) return {NULL, 0, 0};
    if (i >= ks.n_window) return {ks.q.page_ids, i - ks.n_window, -ks.q.page_step};
    const struct attn_place p = attn_window_place(j, ks, i);
    return {p.part, (int32_t)p.row, p.n};
}
/* The same key, an entry being number e of its sequence. */
static __device__ __forceinline__ struct key_found key_find(const struct attn_job &j,
                                                            const struct key_looked &a, uint32_t e)
{
    if (a.n >= 0) return {a.at, a.row, a.n};
    /* Entries are below 2^31: short divisions. */
    const uint32_t per_page = (uint32_t)j.k.y.per_page;
    return {(const uint32_t *)a.at + (int64_t)(e / per_page) * -a.n, (int32_t)(e % per_page), a.n};
}
static __device__ __forceinline__ struct key_source
key_source_of(const struct attn_job &j, const struct key_found &f, uint32_t page)
{
    const uint8_t *part = (const uint8_t *)f.at;
    int32_t n = f.n;
    if (n < 0) {
        part = j.k.pages + (int64_t)page * j.k.page_bytes + j.k.y.main_off;
        n = j.k.y.per_page;
    }
    if (!part) return {NULL, NULL};
    if (n == 0 || j.k.kv_fmt == KERN_KV_BF16) return {part + (int64_t)f.row * KEY_WIDTH * 2, NULL};
    return {part + (int64_t)f.row * KEY_BYTES, part + (int64_t)n * KEY_BYTES + (int64_t)f.row * 8};
}

/* Whether some of the pieces of codes of a lane are odd: NaN, or a scale above 2^6 (times 2^120
 * those end beyond bf16). add() takes codes, scales() four scales; any() tells of all or'ed. */
struct key_odd {
    static __device__ __forceinline__ uint32_t add(uint32_t sum, const uint4 &c)
    {
        /* One more changes a code's sign where it is NaN; what that carries over only adds to the
         * alarm. */
        sum |= ((c.x + 0x01010101u) ^ c.x);
        sum |= ((c.y + 0x01010101u) ^ c.y);
        sum |= ((c.z + 0x01010101u) ^ c.z);
        return sum | ((c.w + 0x01010101u) ^ c.w);
    }
    static __device__ __forceinline__ uint32_t scales(uint32_t four)
    {
        /* 134 >> 1, 67, and what is above reach the high bit. */
        return (four >> 1 & 0x7f7f7f7fu) + 0x3d3d3d3du;
    }
    static __device__ __forceinline__ bool any(uint32_t sum) { return sum & 0x80808080u; }
};
/* Sixteen codes of each of a key's next n scales once more, the slow way: rare. To each block's
 * piece at `place`, in shared memory, and the one after it, where bit 4 is another. */
static __device__ __noinline__ void key_odd_codes(const uint8_t *codes, const uint8_t *scales,
                                                  int n, uint32_t place)
{
#pragma unroll 1
    for (int i = 0; i < n; i++, place += KEY_BLOCK) {
        const uint32_t scale = dev_ue8m0_bf16x2(scales[i]);
        uint4 lo, hi;
        dev_e4m3x16_bf16(__ldg((const uint4 *)(codes + 64 * i)), &lo, &hi);
        *(uint4 *)__cvta_shared_to_generic(place) = dev_mul_bf16x8(lo, scale);
        *(uint4 *)__cvta_shared_to_generic(place ^ 16) = dev_mul_bf16x8(hi, scale);
    }
}
/* 2^120 times scale i of four, in both halves. */
static __device__ __forceinline__ uint32_t key_factor(uint32_t four, int i)
{
    return (__byte_perm(four, 0, 0x4040 | i * 0x101) + 0x00780078u) << 7;
}

/* Where a lane stores its pieces of a key. */
struct key_spot {
    uint8_t *row;
    int turn, quarter;
    __device__ __forceinline__ key_spot(uint8_t *tile, int key, int lane)
        : row(tile + key * 128), turn(key % 8), quarter(lane % 4)
    {
    }
    __device__ __forceinline__ uint4 *at(int block, int piece) const
    {
        return (uint4 *)(row + ((piece ^ turn) << 4) + block * KEY_BLOCK);
    }
    /* Sixteen codes, columns 16 (4 i + quarter) on. */
    __device__ __forceinline__ void codes(int i, const uint4 &c, uint32_t factor) const
    {
        uint4 lo, hi;
        dev_e4m3x16_times(c, factor, &lo, &hi);
        *at(i, 2 * quarter) = lo;
        *at(i, 2 * quarter + 1) = hi;
    }
    /* Of n scales from `first` on, to the tile's first blocks. */
    __device__ __forceinline__ void odd_codes(const struct key_source &s, int first, int n) const
    {
        key_odd_codes(s.row + 64 * first + 16 * quarter, s.scales + first, n,
                      (uint32_t)__cvta_generic_to_shared(at(0, 2 * quarter)));
    }
    /* The bf16 values behind the codes, on their way when this returns. */
    __device__ __forceinline__ void rest(const uint8_t *from) const
    {
        dev_copy16(at(KEY_CODES / 64, quarter), from + KEY_CODES + 16 * quarter, true);
        dev_copy16(at(KEY_CODES / 64, quarter + 4), from + KEY_CODES + 16 * quarter + 64, true);
    }
    /* A key in bf16, on its way when this returns, or zeros. */
    __device__ __forceinline__ void plain(const uint8_t *from) const
    {
#pragma unroll 1
        for (int i = 0; i < KEY_WIDTH / 64; i++) {
            if (from) {
                dev_copy16(at(i, quarter), from + i * 128 + quarter * 16, true);
                dev_copy16(at(i, quarter + 4), from + i * 128 + quarter * 16 + 64, true);
            } else {
                *at(i, quarter) = make_uint4(0, 0, 0, 0);
                *at(i, quarter + 4) = make_uint4(0, 0, 0, 0);
            }
        }
    }
};

#endif
