/* kernels/attn/attention_warp.cuh - what all attention kernels of sm_90a share: a warpgroup's
 * registers, a warp's arrival, parts of a descriptor. */
#ifndef KERN_ATTN_ATTENTION_WARP_CUH
#define KERN_ATTN_ATTENTION_WARP_CUH

#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* To N registers a thread, a multiple of 8; every warp of a warpgroup. */
template <int N> static __device__ __forceinline__ void set_registers_less(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void set_registers_more(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
/* What the warp's lanes did before is done: one arrival. */
static __device__ __forceinline__ void arrive(uint64_t *bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(bar);
}

/* The same for a barrier that counts threads: 32 arrivals. Where other lanes have touched what is
 * given back by stores and loads of their own, each arrives by bar_arrive(): racecheck does not
 * follow the order of __syncwarp(). */
static __device__ __forceinline__ void arrive_all(uint64_t *bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 32;" ::"r"(dev_shared(bar))
                     : "memory");
}

/* The descriptor of what lies `bytes` further on: the address never carries into the upper word. */
static __device__ __forceinline__ uint64_t on(uint64_t descriptor, int bytes)
{
    return (descriptor & ~(uint64_t)0xffffffff) | (uint32_t)((uint32_t)descriptor + (bytes >> 4));
}

#endif /* sm_90a */
#endif
