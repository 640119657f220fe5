/* kernels/cuda/wgmma.cuh - the matrix unit by whole warpgroups (sm_90a), as single instructions.
 *
 * Shape    d [64, N] (+)= a [64, k] b [k, N]; k = 16 bf16 or f16, or 32 e4m3, 32 bytes of a row
 *          either way. Warp w of the group has rows 16 w on; with g = lane / 4, c = lane % 4,
 *          d[4 n + e] is row g + 8 (e / 2), column 8 n + 2 c + e % 2. `a` from registers lies as
 *          dev_mma's (e4m3: four k to a word, slots 4 c on, the upper two words 16 + 4 c on); from
 *          shared memory by a descriptor.
 * Sums     The same sums have the same bits at every N, and with `a` from registers or shared
 *          memory (seen on an H200). bf16: also those of dev_mma with the same slots. e4m3: sums
 *          keep about 13 bits below the largest product, an error of 2^-14.3 of the sum of
 *          magnitudes (rms; worst 2^-10.3, where dev_mma has 2^-21.6): so 128 products are summed
 *          at most before they go to an f32 total. mma.sync of e4m3 is another thing on this chip:
 *          it multiplies as f16.
 * Use      wgmma_fence(), instructions, wgmma_commit(), wgmma_wait<left>(). Registers of d and a
 *          must not be touched between. What threads wrote to shared memory is for wgmma after
 *          wgmma_shared() in each writer and a barrier.
 * Source   PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
 */
#ifndef KERN_CUDA_WGMMA_CUH
#define KERN_CUDA_WGMMA_CUH

#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most LEFT groups are under way. */
template <int LEFT> static __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
static __device__ __forceinline__ void wgmma_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* The compiler must not move uses of a register across this point. */
template <int N> static __device__ __forceinline__ void wgmma_pin(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* Rows of 128 bytes in the 128-byte swizzle (16-byte piece p of row r lies at p ^ (r & 7)), eight
 * rows 1024 bytes, the first aligned to 1024. + 2 i: from 32 bytes of a row further on. */
static __device__ __forceinline__ uint64_t wgmma_rows(const void *shared)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}
/* Operand b of bf16 with k along the rows of shared memory ("transposed"): blocks of 64 columns
 * (128 bytes in the same swizzle) x 8 k are 1024 bytes; block_bytes from one block of 64 columns to
 * the next, eight k further on are k_bytes. */
static __device__ __forceinline__ uint64_t wgmma_columns(const void *shared, int block_bytes,
                                                         int k_bytes)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(block_bytes >> 4) << 16 |
           (uint64_t)(k_bytes >> 4) << 32 | (uint64_t)1 << 62;
}

#define WGMMA_D4(i)   "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define WGMMA_D8(i)   WGMMA_D4(i), WGMMA_D4((i) + 4)
#define WGMMA_D12(i)  WGMMA_D8(i), WGMMA_D4((i) + 8)
#define WGMMA_D16(i)  WGMMA_D8(i), WGMMA_D8((i) + 8)
#define WGMMA_D20(i)  WGMMA_D16(i), WGMMA_D4((i) + 16)
#define WGMMA_D24(i)  WGMMA_D16(i), WGMMA_D8((i) + 16)
#define WGMMA_D28(i)  WGMMA_D24(i), WGMMA_D4((i) + 24)
#define WGMMA_D32(i)  WGMMA_D16(i), WGMMA_D16((i) + 16)
#define WGMMA_D64(i)  WGMMA_D32(i), WGMMA_D32((i) + 32)
#define WGMMA_D48(i)  WGMMA_D32(i), WGMMA_D16((i) + 32)
#define WGMMA_D36(i)  WGMMA_D32(i), WGMMA_D4((i) + 32)
#define WGMMA_D40(i)  WGMMA_D32(i), WGMMA_D8((i) + 32)
#define WGMMA_D44(i)  WGMMA_D40(i), WGMMA_D4((i) + 40)
#define WGMMA_D52(i)  WGMMA_D48(i), WGMMA_D4((i) + 48)
#define WGMMA_D56(i)  WGMMA_D48(i), WGMMA_D8((i) + 48)
#define WGMMA_D80(i)  WGMMA_D64(i), WGMMA_D16((i) + 64)
#define WGMMA_D96(i)  WGMMA_D64(i), WGMMA_D32((i) + 64)
#define WGMMA_D112(i) WGMMA_D96(i), WGMMA_D16((i) + 96)
#define WGMMA_D128(i) WGMMA_D64(i), WGMMA_D64((i) + 64)
#define WGMMA_S4      "%0, %1, %2, %3"
#define WGMMA_S8                                                                                   \
    WGMMA_S4                                                                                       \
    ", %4, %5, %6, %7"
#define WGMMA_S12                                                                                  \
    WGMMA_S8                                                                                       \
    ", %8, %9, %10, %11"
#define WGMMA_S16                                                                                  \
    WGMMA_S8                                                                                       \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_S20                                                                                  \
    WGMMA_S16                                                                                      \
    ", %16, %17, %18, %19"
#define WGMMA_S24                                                                                  \
    WGMMA_S16                                                                                      \
    ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_S28                                                                                  \
    WGMMA_S24                                                                                      \
    ", %24, %25, %26, %27"
#define WGMMA_S32                                                                                  \
    WGMMA_S16                                                                                      \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_S36                                                                                  \
    WGMMA_S32                                                                                      \
    ", %32, %33, %34, %35"
#define WGMMA_S40                                                                                  \
    WGMMA_S32                                                                                      \
    ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_S44                                                                                  \
    WGMMA_S40                                                                                      \
    ", %40, %41, %42, %43"
#define WGMMA_S48                                                                                  \
    WGMMA_S32                                                                                      \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_S52                                                                                  \
    WGMMA_S48                                                                                      \
    ", %48, %49, %50, %51"
#define WGMMA_S56                                                                                  \
    WGMMA_S48                                                                                      \
    ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_S64                                                                                  \
    WGMMA_S48                                                                                      \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_S80                                                                                  \
    WGMMA_S64                                                                                      \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_S96                                                                                  \
    WGMMA_S80                                                                                      \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_S112                                                                                 \
    WGMMA_S96                                                                                      \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_S128                                                                                 \
    WGMMA_S112                                                                                     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
    "%127"

/* For N columns, R = N / 2 registers of d; A0 to A5 name the operands after those. */
#define WGMMA(N, R, A0, A1, A2, A3, A4, A5)                                                        \
    WGMMA_16(N, R, wgmma_bf16, "bf16", "0", A0, A1, A2, A3, A4, A5)                                \
    WGMMA_16(N, R, wgmma_bf16_columns, "bf16", "1", A0, A1, A2, A3, A4, A5)                        \
    WGMMA_16(N, R, wgmma_f16, "f16", "0", A0, A1, A2, A3, A4, A5)                                  \
    static __device__ __forceinline__ void wgmma_e4m3(float(&d)[R], const uint32_t a[4],           \
                                                      uint64_t b, int add)                         \
    {                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " A5 ", 0; "                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_S##R       \
                     "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", p, 1, 1; }"                     \
                     : WGMMA_D##R(0)                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));              \
    }                                                                                              \
    static __device__ __forceinline__ void wgmma_e4m3(float(&d)[R], uint64_t a, uint64_t b,        \
                                                      int add)                                     \
    {                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " A2 ", 0; "                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_S##R       \
                     "}, " A0 ", " A1 ", p, 1, 1; }"                                               \
                     : WGMMA_D##R(0)                                                               \
                     : "l"(a), "l"(b), "r"(add));                                                  \
    }
/* `name`: b by wgmma_rows; name_columns: b by wgmma_columns. */
#define WGMMA_16(N, R, name, TYPE, COLUMNS, A0, A1, A2, A3, A4, A5)                                \
    static __device__ __forceinline__ void name(float(&d)[R], const uint32_t a[4], uint64_t b,     \
                                                int add)                                           \
    {                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " A5 ", 0; "                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE               \
                     " {" WGMMA_S##R "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4                    \
                                     ", p, 1, 1, " COLUMNS "; }"                                   \
                     : WGMMA_D##R(0)                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));              \
    }                                                                                              \
    static __device__ __forceinline__ void name(float(&d)[R], uint64_t a, uint64_t b, int add)     \
    {                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " A2 ", 0; "                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE               \
                     " {" WGMMA_S##R "}, " A0 ", " A1 ", p, 1, 1, 0, " COLUMNS "; }"               \
                     : WGMMA_D##R(0)                                                               \
                     : "l"(a), "l"(b), "r"(add));                                                  \
    }

WGMMA(8, 4, "%4", "%5", "%6", "%7", "%8", "%9")
WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
WGMMA(24, 12, "%12", "%13", "%14", "%15", "%16", "%17")
WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA(40, 20, "%20", "%21", "%22", "%23", "%24", "%25")
WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29")
WGMMA(56, 28, "%28", "%29", "%30", "%31", "%32", "%33")
WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA(72, 36, "%36", "%37", "%38", "%39", "%40", "%41")
WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA(88, 44, "%44", "%45", "%46", "%47", "%48", "%49")
WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA(104, 52, "%52", "%53", "%54", "%55", "%56", "%57")
WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA(224, 112, "%112", "%113", "%114", "%115", "%116", "%117")
WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef WGMMA
#undef WGMMA_16

#undef WGMMA_D4
#undef WGMMA_D8
#undef WGMMA_D12
#undef WGMMA_D16
#undef WGMMA_D20
#undef WGMMA_D24
#undef WGMMA_D28
#undef WGMMA_D32
#undef WGMMA_D48
#undef WGMMA_D36
#undef WGMMA_D40
#undef WGMMA_D44
#undef WGMMA_D52
#undef WGMMA_D56
#undef WGMMA_D64
#undef WGMMA_D80
#undef WGMMA_D96
#undef WGMMA_D112
#undef WGMMA_D128
#undef WGMMA_S4
#undef WGMMA_S8
#undef WGMMA_S12
#undef WGMMA_S16
#undef WGMMA_S20
#undef WGMMA_S24
#undef WGMMA_S28
#undef WGMMA_S32
#undef WGMMA_S48
#undef WGMMA_S36
#undef WGMMA_S40
#undef WGMMA_S44
#undef WGMMA_S52
#undef WGMMA_S56
#undef WGMMA_S64
#undef WGMMA_S80
#undef WGMMA_S96
#undef WGMMA_S112
#undef WGMMA_S128

#endif /* sm_90a */
#endif
