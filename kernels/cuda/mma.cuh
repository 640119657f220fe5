/* kernels/cuda/mma.cuh - the matrix unit and copies to shared memory, as single instructions.
 *
 * Numerics dev_mma adds 16 products to each sum; the order inside an instruction is the machine's.
 *          Two kernels give the same bits when each sum meets the same instructions in the same
 *          order, with the same values in the same slots of k and the same operand on the M side.
 *          Ours put weights on the M side and deal k as follows.
 * Slots    Of 64 consecutive k, thread c of a quad (lane % 4) takes the sixteen from 16 c on;
 *          instruction i of four takes four of them: 16 c + 4 i + {0, 1} in slots 2 c, 2 c + 1, and
 *          + {2, 3} in slots 2 c + 8, 2 c + 9. So a thread reads 16 consecutive elements of a row,
 *          of weights and activations alike, with wide loads, and nothing is shuffled.
 */
#ifndef KERN_CUDA_MMA_CUH
#define KERN_CUDA_MMA_CUH

#include <stdint.h>

/* d += a b: m16n8k16, bf16 factors, f32 sums. With g = lane / 4, c = lane % 4:
 * a[0] row g, slots 2c, 2c+1; a[1] row g+8, the same; a[2], a[3] the same rows, slots 2c+8, 2c+9;
 * b[0] column g, slots 2c, 2c+1; b[1] slots 2c+8, 2c+9; d[0], d[1] row g, columns 2c, 2c+1; d[2],
 * d[3] row g+8. The lower slot is the lower half of a word. */
static __device__ __forceinline__ void dev_mma(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8. */
static __device__ __forceinline__ void dev_ldmatrix4(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}
static __device__ __forceinline__ void dev_ldmatrix4_trans(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* The reverse. */
static __device__ __forceinline__ void dev_store_matrix4(void *row, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

static __device__ __forceinline__ void dev_store_matrix4_trans(void *row, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* 16 bytes from global to shared memory, both 16-byte aligned; zeros when !there (from is not read,
 * but must be a valid address). Past the first-level cache. */
static __device__ __forceinline__ void dev_copy16(void *to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}
static __device__ __forceinline__ void dev_copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most N of this thread's groups are under way; a barrier shows the rest to
 * others. */
template <int N> static __device__ __forceinline__ void dev_copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* 16 bytes of weights: read once, so that they push nothing out of the first-level cache. */
static __device__ __forceinline__ uint4 dev_stream16(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(p)));
    return v;
}
static __device__ __forceinline__ uint2 dev_stream8(const void *p)
{
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(__cvta_generic_to_global(p)));
    return v;
}

#endif
