/* kernels/attn/attention_slots.cuh - a row's output as wo_a reads it (attn_job), by what each
 * thread of a warpgroup has (sm_90a).
 *
 * A thread has of two heads every fourth column of eight, two columns of each such. Those of 64
 * columns are two pieces of 16 bytes, for slot words 4 c + i and 16 + 4 c + i of a group of 64 are
 * words 8 i + c and 8 i + 4 + c of the head's, c = lane % 4.
 */
#ifndef KERN_ATTN_ATTENTION_SLOTS_CUH
#define KERN_ATTN_ATTENTION_SLOTS_CUH

#include "kernels/attn/attention.cuh"
#include "kernels/attn/key_tile.cuh"
#include "kernels/attn/softmax.cuh"
#include "kernels/cuda/row.cuh"

/* Sums o of columns `from` on of row t and 64 heads from h0 on, times one over their denominators:
 * wgmma's of PARTS times 2 N columns, by all lanes of its warpgroup. angles: cos and sin of the row, by which a head's end is turned back. */
template <int PARTS, int N>
static __device__ __forceinline__ void
store_slots(const struct attn_job &j, int32_t t, int32_t h0, int from, const float (&inverse)[2],
            const float (&angles)[2][32], const float (&o)[PARTS][N])
{
    static_assert(N % 32 == 0, "whole groups of 64 columns");
    const int lane = threadIdx.x % 32, head0 = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int head = head0 + 8 * r;
        uint16_t *to =
            (uint16_t *)j.o + ((int64_t)t * j.H + h0 + head) * KEY_WIDTH + from + lane % 4 * 8;
#pragma unroll
        for (int q = 0; q < PARTS * N / 32; q++) { /* 64 columns */
            uint32_t w[8];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float *two = &o[q * 32 / N][q * 32 % N + n * 4 + 2 * r];
                w[n] = attn_bf16x2(two[0] * inverse[r], two[1] * inverse[r]);
                if (q == PARTS * N / 32 - 1 && from + PARTS * N * 2 == KEY_WIDTH) {
                    const int at = 4 * n + lane % 4;
                    float x = kern_float(w[n] << 16), y = kern_float(w[n] & 0xffff0000u);
                    dev_rotate2(&x, &y, angles[0][at], -angles[1][at]);
                    w[n] = attn_bf16x2(x, y);
                }
            }
            if (h0 + head < j.H) {
                __stcs((uint4 *)(to + q * 64), make_uint4(w[0], w[2], w[4], w[6]));
                __stcs((uint4 *)(to + q * 64 + 32), make_uint4(w[1], w[3], w[5], w[7]));
            }
        }
    }
}

#endif
