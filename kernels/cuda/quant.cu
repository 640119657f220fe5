/* kernels/cuda/quant.cu - rows of activations as products read them: quantized and back, as codes,
 * in the order of slots, rotated on the way.
 *
 * One warp takes 128 elements of a row, four a lane: a block of A128, or eight of NVFP4, whose
 * sixteen elements lie in a quad. Scale and codes are the CPU's, so are NVFP4's divisions in
 * double.
 */
#include "kernels/cuda/quant.cuh"
#include "kernels/cuda/row.cuh"

enum { WARPS = 8, SPAN = 128 };

/* Blocks take the last rows first: those of x were written last and may still be in L2; and the
 * first rows, with which a product begins, are then what is written last here. */
static __device__ __forceinline__ uint32_t last_first(void)
{
    return gridDim.x - 1 - blockIdx.x;
}

/* Elements k .. k+3 of the row that begins at `row` of `out`, in the order of slots. */
static __device__ __forceinline__ void put_slots(void *out, int64_t row, int32_t k,
                                                 const float v[4])
{
    const uint2 u = dev_pack4(v);
    uint16_t *group = (uint16_t *)out + row + k / 64 * 64;
    group += k % 16 / 4 * 16 + k % 64 / 16 * 2;
    *(uint32_t *)group = u.x;
    *(uint32_t *)(group + 8) = u.y;
}

static __global__ void quant_kernel(struct cuda_quant q, bool by_fours, uint32_t spans)
{
    cuda_hurry(); /* a product may begin to read its weights */
    cuda_await();
    const int lane = threadIdx.x % 32;
    const uint32_t part = blockIdx.x * WARPS + threadIdx.x / 32; /* (t, group, span) */
    const uint32_t row_of_out = part / spans;
    const int64_t tg = row_of_out;
    uint32_t t = row_of_out, g = 0;
    if (q.groups > 1) t = row_of_out / q.groups, g = row_of_out % q.groups;
    if (t >= (uint32_t)q.T) return;
    const int32_t k = (part % spans) * SPAN + 4 * lane;
    const int64_t row = q.rows ? q.rows[t] : t;
    if (row < 0) return;
    float v[4];
    dev_load4(q.x, q.x_dtype, row * q.ld_x + (int64_t)g * q.K + k, k, q.K, by_fours, v);
    if (q.plain && k < q.Kp) put_slots(q.plain, tg * q.Kp, k, v);
    if (q.aq == KERN_AQ_A128) dev_quant4_a128(v);
    if (q.aq == KERN_AQ_NVFP4)
        dev_quant4_nvfp4(v, q.input_scales ? q.input_scales[t] : q.input_scale, q.wide);
    if (k >= q.Kp) return;
    const int64_t to = tg * q.Kp + k; /* Kp is a multiple of 8, k of 4 */
    if (q.slots)
        put_slots(q.out, tg * q.Kp, k, v);
    else if (q.wide)
        *(float4 *)((float *)q.out + to) = make_float4(v[0], v[1], v[2], v[3]);
    else
        *(uint2 *)((uint16_t *)q.out + to) = dev_pack4(v);
}

/* bf16 rows that only change the order of k, or are rotated too: a warp has BATCH groups of 64, one
 * word a lane. */
template <int BATCH, bool ROTATED>
static __global__ void slots_kernel(struct cuda_quant q, uint32_t per_row)
{
    cuda_hurry();
    cuda_await();
    const uint32_t lane = threadIdx.x % 32,
                   first = (last_first() * WARPS + threadIdx.x / 32) * BATCH;
    /* Word `lane` of a group: of instruction lane / 8, slots 2 c and 2 c + 8 of thread
     * c = lane % 4. */
    const uint32_t from = lane % 4 * 8 + lane / 8 * 2 + lane / 4 % 2;
    const uint32_t row = first / per_row;
    uint32_t at = first % per_row, t = row, g = 0;
    if (q.groups > 1) t = row / q.groups, g = row % q.groups;
    uint32_t word[BATCH];
    float2 cos_sin[BATCH];
    bool there[BATCH], rotated[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int32_t k = at * 64 + from * 2, of = q.rows && t < (uint32_t)q.T ? q.rows[t] : t;
        there[i] = t < (uint32_t)q.T && of >= 0;
        word[i] = 0;
        if (there[i] && k < q.K)
            word[i] =
                *(const uint32_t *)((const uint16_t *)q.x + of * q.ld_x + (int64_t)g * q.K + k);
        rotated[i] = false;
        if (ROTATED) { /* a group lies in the end of a head or before it */
            const uint32_t part = at % (q.rotation.d / 64),
                           ends = (q.rotation.d - q.rotation.rd) / 64;
            rotated[i] = there[i] && part >= ends;
            if (rotated[i]) {
                const int64_t pair = (int64_t)t * (q.rotation.rd / 2) + (part - ends) * 32 + from;
                cos_sin[i] =
                    make_float2(q.rotation.cos[pair], q.rotation.sign * q.rotation.sin[pair]);
            }
        }
        if (++at < per_row) continue;
        at = 0;
        if (++g == (uint32_t)q.groups) g = 0, t++;
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (!there[i]) continue;
        if (rotated[i]) {
            float v[2] = {kern_float(word[i] << 16), kern_float(word[i] & 0xffff0000u)};
            dev_rotate2(&v[0], &v[1], cos_sin[i].x, cos_sin[i].y);
            const __nv_bfloat162 two = __floats2bfloat162_rn(v[0], v[1]);
            memcpy(&word[i], &two, 4);
        }
        ((uint32_t *)q.out)[(int64_t)(first + i) * 32 + lane] = word[i];
    }
}

/* A warp has BATCH blocks, all loaded before the first is quantized. */
template <int BATCH>
static __global__ void codes_kernel(struct cuda_codes q, bool by_fours, uint32_t spans)
{
    cuda_hurry();
    cuda_await();
    const uint32_t lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * BATCH;
    const uint32_t row = first / spans; /* of (t, group) */
    uint32_t span = first % spans, t = row, g = 0;
    if (q.groups > 1) t = row / q.groups, g = row % q.groups;
    float v[BATCH][4];
    float *to[BATCH]; /* where its scale goes; NULL: there is no such block */
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        to[i] = NULL;
        if (t < (uint32_t)q.T) {
            const int32_t from = q.rows ? q.rows[t] : (int32_t)t, k = span * SPAN + 4 * lane;
            if (from >= 0) {
                to[i] = q.scales + (int64_t)(g * spans + span) * q.ld_scales + t;
                dev_load4(q.x, q.x_dtype, from * q.ld_x + (int64_t)g * q.K + k, k, q.K, by_fours,
                          v[i]);
            }
        }
        if (++span < spans) continue;
        span = 0;
        if (++g == (uint32_t)q.groups) g = 0, t++;
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (!to[i]) continue;
        float scale;
        const uint32_t word = dev_codes4_a128(v[i], &scale);
        ((uint32_t *)q.codes)[(int64_t)(first + i) * (SPAN / 4) + lane] = word;
        if (lane == 0) *to[i] = scale;
    }
}

/* A warp's part of bf16 rows that are whole blocks and may be read 16 bytes at a time: eight lanes
 * have a block, so that a warp has four at once, STEPS times; 2^log_warps warps have a row. `row`
 * counts (t, group); `first` is the lane's first span, then every fourth. False: no row. */
template <int STEPS, class Q>
static __device__ __forceinline__ bool take_spans(const Q &q, uint32_t spans, int log_warps,
                                                  uint32_t *row, uint32_t *t, uint32_t *g,
                                                  uint32_t *first, uint4 (&v)[STEPS][2])
{
    const uint32_t lane = threadIdx.x % 32, me = last_first() * WARPS + threadIdx.x / 32;
    *row = me >> log_warps;
    *first = (me & ((1u << log_warps) - 1)) * (4 * STEPS) + lane / 8;
    *t = *row, *g = 0;
    if (q.groups > 1) *t = *row / q.groups, *g = *row % q.groups;
    if (*t >= (uint32_t)q.T) return false;
    const int64_t from = q.rows ? q.rows[*t] : *t;
    if (from < 0) return false;
    const uint4 *x =
        (const uint4 *)((const uint16_t *)q.x + from * q.ld_x + (int64_t)*g * q.K) + lane % 8;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t span = *first + 4 * i;
            v[i][j] = make_uint4(0, 0, 0, 0);
            if (span < spans) v[i][j] = x[span * (SPAN / 8) + 8 * j];
        }
    return true;
}

/* Codes and scales of such rows. */
template <int STEPS>
static __global__ void __launch_bounds__(32 * WARPS)
    whole_codes_kernel(struct cuda_codes q, uint32_t spans, int log_warps)
{
    cuda_hurry();
    cuda_await();
    const uint32_t lane = threadIdx.x % 32;
    uint32_t row, t, g, first;
    uint4 v[STEPS][2];
    if (!take_spans<STEPS>(q, spans, log_warps, &row, &t, &g, &first, v)) return;
    uint2 *codes = (uint2 *)(q.codes + (int64_t)row * q.K) + lane % 8;
    float *scales = q.scales + (int64_t)g * spans * q.ld_scales + t;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const uint32_t span = first + 4 * i;
        const float scale = dev_codes16_a128(v[i]);
        if (span >= spans) continue;
#pragma unroll
        for (int j = 0; j < 2; j++)
            codes[span * (SPAN / 8) + 8 * j] = make_uint2(v[i][j].x, v[i][j].y);
        if (lane % 8 == 0) scales[span * q.ld_scales] = scale;
    }
}

/* Such rows quantized and back in the order of slots, and perhaps the same not quantized; work is
 * shared out as there. */
template <int STEPS>
static __global__ void __launch_bounds__(32 * WARPS)
    whole_slots_kernel(struct cuda_quant q, uint32_t spans, int log_warps)
{
    cuda_hurry();
    cuda_await();
    uint32_t row, t, g, first;
    uint4 v[STEPS][2];
    if (!take_spans<STEPS>(q, spans, log_warps, &row, &t, &g, &first, v)) return;
    const int64_t at = (int64_t)row * q.K / 8; /* in uint4 */
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const uint32_t span = first + 4 * i;
        if (q.plain) { /* the same in all lanes */
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint4 as_it_is = v[i][j];
                const uint32_t piece = dev_to_slots(&as_it_is);
                if (span < spans)
                    ((uint4 *)q.plain)[at + span * (SPAN / 8) + 8 * j + piece] = as_it_is;
            }
        }
        dev_quant16_a128(v[i]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t piece = dev_to_slots(&v[i][j]);
            if (span < spans) ((uint4 *)q.out)[at + span * (SPAN / 8) + 8 * j + piece] = v[i][j];
        }
    }
}

/* How such rows are shared out: 2^log_warps warps to a row, each `steps` times four blocks. */
struct sharing {
    unsigned blocks;
    uint32_t spans;
    int steps, log_warps;
};
enum { STEPS = 2 };
static struct sharing share_out(const struct kern_stream *s, int64_t rows, int32_t K)
{
    struct sharing h;
    h.spans = (uint32_t)(K / SPAN);
    h.steps = rows * h.spans > (int64_t)16 * WARPS * s->n_sm ? STEPS : 1;
    h.log_warps = 0;
    while ((uint32_t)(4 * h.steps) << h.log_warps < h.spans) h.log_warps++;
    h.blocks = (unsigned)cuda_ceil(rows << h.log_warps, WARPS);
    return h;
}
static bool is_whole(const void *x, enum kern_dtype t, int64_t ld_x, int32_t K)
{
    return t == KERN_BF16 && K % SPAN == 0 && (uintptr_t)x % 16 == 0 && ld_x % 8 == 0;
}

static bool launch_whole(struct kern_stream *s, const struct cuda_codes *q)
{
    if (!is_whole(q->x, q->x_dtype, q->ld_x, q->K)) return false;
    const struct sharing h = share_out(s, (int64_t)q->T * q->groups, q->K);
    cuda_launch_early(s, h.steps == STEPS ? whole_codes_kernel<STEPS> : whole_codes_kernel<1>,
                      h.blocks, 32 * WARPS, 0, *q, h.spans, h.log_warps);
    return true;
}
static bool launch_whole(struct kern_stream *s, const struct cuda_quant *q)
{
    if (!q->slots || q->aq != KERN_AQ_A128 || !is_whole(q->x, q->x_dtype, q->ld_x, q->K))
        return false;
    const struct sharing h = share_out(s, (int64_t)q->T * q->groups, q->K);
    cuda_launch_early(s, h.steps == STEPS ? whole_slots_kernel<STEPS> : whole_slots_kernel<1>,
                      h.blocks, 32 * WARPS, 0, *q, h.spans, h.log_warps);
    return true;
}

void cuda_quant_codes(struct kern_stream *s, const struct cuda_codes *q)
{
    if (q->T == 0 || launch_whole(s, q)) return;
    const bool by_fours = cuda_by_fours(q->x, q->x_dtype, q->ld_x, q->K, q->groups);
    const uint32_t spans = (uint32_t)cuda_ceil(q->K, SPAN);
    /* Their codes fit memory, so a word holds it. */
    const int64_t all = (int64_t)q->T * q->groups * spans;
    if (all > (int64_t)64 * WARPS * s->n_sm)
        cuda_launch_early(s, codes_kernel<4>, (unsigned)cuda_ceil(all, 4 * WARPS), 32 * WARPS, 0,
                          *q, by_fours, spans);
    else
        cuda_launch_early(s, codes_kernel<1>, (unsigned)cuda_ceil(all, WARPS), 32 * WARPS, 0, *q,
                          by_fours, spans);
}

/* What slots_kernel takes. */
static bool only_slots(const struct cuda_quant *q)
{
    return q->slots && q->aq == KERN_AQ_NONE && q->x_dtype == KERN_BF16 &&
           (uintptr_t)q->x % 4 == 0 && q->ld_x % 2 == 0 && q->K % 2 == 0;
}
bool cuda_rotates_on_the_way(const struct cuda_quant *q, const struct kern_heads_rope *r)
{
    return only_slots(q) && !q->rows && r->d % 64 == 0 && r->rd % 64 == 0 && q->K % r->d == 0;
}

void cuda_quant_rows(struct kern_stream *s, const struct cuda_quant *q)
{
    if (q->T == 0) return;
    const bool by_fours = cuda_by_fours(q->x, q->x_dtype, q->ld_x, q->K, q->groups);
    if (only_slots(q)) {
        enum { BATCH = 8 };
        const int64_t all = (int64_t)q->T * q->groups * (q->Kp / 64);
        cuda_launch_early(
            s, q->rotation.cos ? slots_kernel<BATCH, true> : slots_kernel<BATCH, false>,
            (unsigned)cuda_ceil(all, BATCH * WARPS), 32 * WARPS, 0, *q, (uint32_t)q->Kp / 64);
        return;
    }
    if (launch_whole(s, q)) return;
    const uint32_t spans = (uint32_t)cuda_ceil(q->Kp, SPAN);
    const int64_t warps = (int64_t)q->T * q->groups * spans;
    cuda_launch_early(s, quant_kernel, (unsigned)cuda_ceil(warps, WARPS), 32 * WARPS, 0, *q,
                      by_fours, spans);
}
