/* kernels/attn/key_tile.cuh - tiles of 64 keys of width 512 as bf16 in shared memory (sm_90a's kernels).
 *
 * A tile is eight blocks of 64 columns: 64 rows of 128 bytes, piece p of 16 bytes of row r at p ^ (r & 7), as
 * wgmma and ldmatrix like it. Four lanes bring a key, lane % 4 = c the columns 16 (4 i + c) on for every i.
 * To find a key takes up to three reads that wait for one another: look, find, source_of are the steps
 * between, so that each can be begun a tile ahead.
 */
#ifndef KERN_ATTN_KEY_TILE_CUH
#define KERN_ATTN_KEY_TILE_CUH

#include "kernels/attn/attention.cuh"
#include "kernels/attn/widen.cuh"
#include "kernels/cuda/mma.cuh"

enum {
    KEYS = 64, /* of a tile */
    WIDTH = 512,
    CODES = 448, /* of a key, in e4m3, 64 to a scale; the rest is bf16 */
    ROW = CODES + 2 * (WIDTH - CODES),
    BLOCK = KEYS * 128, /* bytes */
    TILE = WIDTH / 64 * BLOCK,
};

/* A key: its bytes, and its scales where it is stored in e4m3. */
struct source {
    const uint8_t *row; /* NULL: past the last key, zeros */
    const uint8_t *scales;
};

/* The 128 bytes there, to L2. */
static __device__ __forceinline__ void prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

struct looked {
    const void *at; /* part; or table of pages; NULL: no such key */
    int32_t row;    /* of the part; or place among the row's entries */
    int32_t n;      /* rows of the part, 0: the batch's; negative: minus the table's step */
};
struct found {
    const void *at; /* part; n negative: where its page's number stands */
    int32_t row, n;
};

/* Where key i of a row of n is to be looked up. */
static __device__ __forceinline__ struct looked
look(const struct attn_job &j, const struct attn_keys &ks, int32_t i, int32_t n)
{
    if (i >= n) return {NULL, 0, 0};
    if (i >= ks.n_window) return {ks.q.page_ids, i - ks.n_window, -ks.q.page_step};
    const struct attn_place p = attn_window_place(j, ks, i);
    return {p.part, (int32_t)p.row, p.n};
}
/* The same key, an entry being number e of its sequence. */
static __device__ __forceinline__ struct found find(const struct attn_job &j,
                                                    const struct looked &a, uint32_t e)
{
    if (a.n >= 0) return {a.at, a.row, a.n};
    /* Entries are below 2^31: short divisions. */
    const uint32_t per_page = (uint32_t)j.k.y.per_page;
    return {(const uint32_t *)a.at + (int64_t)(e / per_page) * -a.n, (int32_t)(e % per_page), a.n};
}
static __device__ __forceinline__ struct source source_of(const struct attn_job &j,
                                                          const struct found &f, uint32_t page)
{
    const uint8_t *part = (const uint8_t *)f.at;
    int32_t n = f.n;
    if (n < 0) {
        part = j.k.pages + (int64_t)page * j.k.page_bytes + j.k.y.main_off;
        n = j.k.y.per_page;
    }
    if (!part) return {NULL, NULL};
    if (n == 0 || j.k.kv_fmt == KERN_KV_BF16) return {part + (int64_t)f.row * WIDTH * 2, NULL};
    return {part + (int64_t)f.row * ROW, part + (int64_t)n * ROW + (int64_t)f.row * 8};
}

/* Whether some of the pieces of codes of a lane are odd: NaN, or a scale above 2^6 (times 2^120 those end
 * beyond bf16); what add() returns is to be collected by |. */
struct odd {
    static __device__ __forceinline__ uint32_t add(const uint4 &c)
    {
        return ((c.x & 0x7f7f7f7fu) + 0x01010101u) | ((c.y & 0x7f7f7f7fu) + 0x01010101u) |
               ((c.z & 0x7f7f7f7fu) + 0x01010101u) | ((c.w & 0x7f7f7f7fu) + 0x01010101u);
    }
    static __device__ __forceinline__ uint32_t add(const uint2 &scales)
    {
        /* 134 >> 1, 67, and what is above reach the high bit. Seven scales. */
        return ((scales.x >> 1 & 0x7f7f7f7fu) + 0x3d3d3d3du) |
               ((scales.y >> 1 & 0x007f7f7fu) + 0x3d3d3d3du);
    }
    static __device__ __forceinline__ bool any(uint32_t sum) { return sum & 0x80808080u; }
};
/* Sixteen codes of each of a key's seven scales once more, the slow way: rare; to the pieces at
 * `even` and `next` of every block. */
static __device__ __noinline__ void odd_codes(const uint8_t *codes, const uint8_t *scales,
                                              uint8_t *even, uint8_t *next)
{
#pragma unroll 1
    for (int i = 0; i < CODES / 64; i++) {
        const uint32_t scale = dev_ue8m0_bf16x2(scales[i]);
        uint4 lo, hi;
        dev_e4m3x16_bf16(__ldg((const uint4 *)(codes + 64 * i)), &lo, &hi);
        *(uint4 *)(even + i * BLOCK) = dev_mul_bf16x8(lo, scale);
        *(uint4 *)(next + i * BLOCK) = dev_mul_bf16x8(hi, scale);
    }
}
/* Scale i of a key's seven. */
static __device__ __forceinline__ uint32_t scale_at(const uint2 &scales, int i)
{
    return (i < 4 ? scales.x : scales.y) >> i % 4 * 8 & 0xff;
}

/* Where a lane stores its pieces of a key. */
struct spot {
    uint8_t *row;
    int turn, quarter;
    __device__ __forceinline__ spot(uint8_t *tile, int key, int lane)
        : row(tile + key * 128), turn(key % 8), quarter(lane % 4)
    {
    }
    __device__ __forceinline__ uint4 *at(int block, int piece) const
    {
        return (uint4 *)(row + ((piece ^ turn) << 4) + block * BLOCK);
    }
    /* Sixteen codes, columns 16 (4 i + quarter) on; the place is `on` bytes further, eight keys each. */
    __device__ __forceinline__ void codes(int i, const uint4 &c, uint32_t scale, int on = 0) const
    {
        uint4 lo, hi;
        dev_e4m3x16_times(c, scale, &lo, &hi);
        *(uint4 *)((uint8_t *)at(i, 2 * quarter) + on) = lo;
        *(uint4 *)((uint8_t *)at(i, 2 * quarter + 1) + on) = hi;
    }
    __device__ __forceinline__ void odd_codes(const struct source &s) const
    {
        ::odd_codes(s.row + 16 * quarter, s.scales, (uint8_t *)at(0, 2 * quarter),
                    (uint8_t *)at(0, 2 * quarter + 1));
    }
    /* The bf16 values behind the codes, on their way when this returns. */
    __device__ __forceinline__ void rest(const uint8_t *from) const
    {
        dev_copy16(at(CODES / 64, quarter), from + CODES + 16 * quarter, true);
        dev_copy16(at(CODES / 64, quarter + 4), from + CODES + 16 * quarter + 64, true);
    }
    /* A key in bf16, on its way when this returns, or zeros. */
    __device__ __forceinline__ void plain(const uint8_t *from) const
    {
#pragma unroll 1
        for (int i = 0; i < WIDTH / 64; i++) {
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
