/* kernels/cuda/tma.cuh - tiles of rows to shared memory by the copy engine (sm_90a), barriers that
 * count what has come, and neighbours in a cluster; as single instructions.
 *
 * Tiles    cuda_tile_map() describes rows of bytes in device memory once a launch; a kernel takes
 *          it as `const __grid_constant__ CUtensorMap`. A tile is `rows` rows of 128 bytes and lies
 *          in shared memory as wgmma_rows() wants it, its start aligned to 1024. What is beyond the
 *          last row or byte comes as zeros, and counts as come.
 * Barriers full: one arrival, by bar_expect() with the bytes of all copies; empty: one by each
 *          reader. Phase n (from 0) is over when bar_wait(bar, n & 1) returns.
 * Source   PTX ISA, "Asynchronous copy" and "mbarrier".
 */
#ifndef KERN_CUDA_TMA_CUH
#define KERN_CUDA_TMA_CUH

#include <cuda.h>
#include <stdint.h>

enum { TILE_BYTES = 128 /* of a row */ };

/* n_rows rows at `base`, each `width` bytes, ld apart; base and ld multiples of 16, rows <= 256.
 * False: the driver refuses. */
bool cuda_tile_map(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width, int64_t ld,
                   int rows);
/* The same in tiles of 64 bytes a row, one row after the other, nothing swizzled. */
bool cuda_half_tile_map(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width,
                        int64_t ld, int rows);

/* n such matrices, step bytes (a multiple of 16) apart, in tiles of `bytes` a row: 128 as above,
 * else one row after the other. What is beyond a matrix's last row comes as zeros, too. */
bool cuda_stack_map(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width, int64_t ld,
                    int64_t n, int64_t step, int rows, int bytes);

/* Rows of `parts` parts, each `width` bytes: in tiles of `bytes` (a multiple of 128, as width) of
 * each part of a row, which lie as tiles of 128 one after the other, part by part. For
 * parts_load() and parts_store(); nothing is written beyond the last row. */
bool cuda_parts_map(CUtensorMap *map, const void *base, int64_t n_rows, int parts, int64_t width,
                    int rows, int bytes);

/* Results, bf16 [n_rows, groups, width] with rows ld elements apart, which leave by tile_store() in
 * tiles of `rows` x 64 swizzled as above; what is beyond the last row or the width is not written.
 * False too where the copy engine cannot: y and its rows must be 16-byte aligned, and groups. */
bool cuda_store_map(CUtensorMap *map, const void *y, int64_t n_rows, int groups, int64_t width,
                    int64_t ld, int rows);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ uint32_t dev_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void bar_init(uint64_t *bar, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(dev_shared(bar)), "r"(arrivals)
                 : "memory");
}
/* By the thread that initialized, before others (and the copy engine) use them. */
static __device__ __forceinline__ void bar_init_done(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ __forceinline__ void bar_expect(uint64_t *bar, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(dev_shared(bar)),
                 "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void bar_arrive(uint64_t *bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(dev_shared(bar)) : "memory");
}
/* When what this thread asked for by dev_copy16() has come; one of the barrier's arrivals. */
static __device__ __forceinline__ void bar_arrive_copied(uint64_t *bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(dev_shared(bar))
                 : "memory");
}
/* The same place in block `rank` of the cluster, as an address of shared::cluster. */
static __device__ __forceinline__ uint32_t dev_shared_of(const void *p, int rank)
{
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(dev_shared(p)), "r"(rank));
    return at;
}
/* Says that this thread has read there. */
static __device__ __forceinline__ void bar_arrive_at(uint64_t *bar, int rank)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(dev_shared_of(bar, rank))
                 : "memory");
}
static __device__ __forceinline__ void bar_wait(uint64_t *bar, int parity)
{
    asm volatile("{ .reg .pred p; wait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; "
                 "@p bra done; bra wait; done: }" ::"r"(dev_shared(bar)),
                 "r"(parity)
                 : "memory");
}
/* Stores to a block of the cluster, counted in bytes by its barrier; both as dev_shared_of() has
 * them. There bar_wait() is enough, as for tile_load_to(): to wait with the scope of the cluster
 * means to forget the first-level cache, and brings nothing to shared memory. */
static __device__ __forceinline__ void put_at(uint32_t to, uint32_t bar, float v)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
        "r"(__float_as_uint(v)), "r"(bar)
        : "memory");
}
static __device__ __forceinline__ void put_at(uint32_t to, uint32_t bar, float4 v)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)),
        "r"(__float_as_uint(v.w)), "r"(bar)
        : "memory");
}
/* The tile from byte `at` of row `row` on. */
static __device__ __forceinline__ void tile_load(void *to, const CUtensorMap *map, uint64_t *bar,
                                                 int32_t at, int32_t row)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(dev_shared(to)),
                 "l"(map), "r"(at), "r"(row), "r"(dev_shared(bar))
                 : "memory");
}
/* The same tile to L2. */
static __device__ __forceinline__ void tile_prefetch(const CUtensorMap *map, int32_t at,
                                                     int32_t row)
{
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
                 "r"(at), "r"(row)
                 : "memory");
}
/* tile_load() to the same place of every block of the cluster in `mask`, and to its barrier. */
static __device__ __forceinline__ void tile_load_to(void *to, const CUtensorMap *map, uint64_t *bar,
                                                    int32_t at, int32_t row, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dev_shared(to)),
                 "l"(map), "r"(at), "r"(row), "r"(dev_shared(bar)), "h"(mask)
                 : "memory");
}
/* A tile of matrix i of a stack. */
static __device__ __forceinline__ void stack_load(void *to, const CUtensorMap *map, uint64_t *bar,
                                                  int32_t at, int32_t row, int32_t i)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dev_shared(to)),
                 "l"(map), "r"(at), "r"(row), "r"(i), "r"(dev_shared(bar))
                 : "memory");
}
/* From byte `at` of each part of row `row` on; both multiples of 128. */
static __device__ __forceinline__ void parts_load(void *to, const CUtensorMap *map, uint64_t *bar,
                                                  int32_t at, int32_t row)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %2}], [%5];" ::"r"(dev_shared(to)),
                 "l"(map), "r"(0), "r"(row), "r"(at / TILE_BYTES), "r"(dev_shared(bar))
                 : "memory");
}
/* The same to L2. */
static __device__ __forceinline__ void parts_prefetch(const CUtensorMap *map, int32_t at,
                                                      int32_t row)
{
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %1}];" ::"l"(map),
        "r"(0), "r"(row), "r"(at / TILE_BYTES)
        : "memory");
}
/* Plain bytes, both ends and `bytes` multiples of 16. */
static __device__ __forceinline__ void bulk_load(void *to, const void *from, int bytes,
                                                 uint64_t *bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(dev_shared(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(dev_shared(bar))
                 : "memory");
}
/* bulk_load() to the same place of every block of the cluster in `mask`, and to its barrier. */
static __device__ __forceinline__ void bulk_load_to(void *to, const void *from, int bytes,
                                                    uint64_t *bar, uint16_t mask)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(dev_shared(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(dev_shared(bar)), "h"(mask)
                 : "memory");
}

/* A tile of results, after wgmma_shared() in its writers and their barrier. Stores of a thread that
 * were committed together are a group. */
static __device__ __forceinline__ void tile_store(const CUtensorMap *map, const void *from,
                                                  int32_t at, int32_t group, int32_t row)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group "
                 "[%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(at), "r"(group), "r"(row), "r"(dev_shared(from))
                 : "memory");
}
/* The same from where parts_load() puts a tile back to where it finds it. */
static __device__ __forceinline__ void parts_store(const CUtensorMap *map, const void *from,
                                                   int32_t at, int32_t row)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%1, %2, %3, %1}], [%4];" ::"l"(map),
                 "r"(0), "r"(row), "r"(at / TILE_BYTES), "r"(dev_shared(from))
                 : "memory");
}
static __device__ __forceinline__ void tile_store_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Waits until at most LEFT of this thread's groups are still to be read from shared memory. */
template <int LEFT> static __device__ __forceinline__ void tile_store_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
/* Until all are written. */
static __device__ __forceinline__ void tile_store_wait(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

static __device__ __forceinline__ int cluster_rank(void)
{
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return (int)r;
}
/* All threads of all blocks of the cluster; between the two, work that needs no neighbour. */
static __device__ __forceinline__ void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
/* The same where nothing else that was written is to be seen by the others: it does not wait for
 * that. */
static __device__ __forceinline__ void cluster_arrive_relaxed(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_meet(void)
{
    cluster_arrive();
    cluster_wait();
}
/* The same where nobody reads what others wrote before (but barriers, after bar_init_done()). */
static __device__ __forceinline__ void cluster_meet_relaxed(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    cluster_wait();
}

#endif /* sm_90a */
#endif
