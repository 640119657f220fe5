/* kernels/cuda/tma.cu - descriptions of tiles for the copy engine. The driver makes them; it is
 * asked for the function at run time, so that nothing links against the driver. */
#include "kernels/cuda/tma.cuh"

#include <cuda_runtime.h>

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_fn driver_encode(void)
{
    static encode_fn fn;
    if (!fn) {
        void *p = NULL;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault,
                                             &found) == cudaSuccess &&
            found == cudaDriverEntryPointSuccess)
            fn = (encode_fn)p;
    }
    return fn;
}

static bool describe(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width, int64_t ld,
                     int64_t n, int64_t step, int rows, int bytes)
{
    const encode_fn encode = driver_encode();
    const cuuint64_t dims[3] = {(cuuint64_t)width, (cuuint64_t)n_rows, (cuuint64_t)n};
    const cuuint64_t strides[2] = {(cuuint64_t)ld, (cuuint64_t)step};
    const cuuint32_t box[3] = {(cuuint32_t)bytes, (cuuint32_t)rows, 1}, steps[3] = {1, 1, 1};
    return encode &&
           encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, n > 0 ? 3 : 2, (void *)base, dims, strides,
                  box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  bytes == TILE_BYTES ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool cuda_tile_map(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width, int64_t ld,
                   int rows)
{
    return describe(map, base, n_rows, width, ld, 0, 0, rows, TILE_BYTES);
}

bool cuda_half_tile_map(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width,
                        int64_t ld, int rows)
{
    return describe(map, base, n_rows, width, ld, 0, 0, rows, TILE_BYTES / 2);
}

bool cuda_stack_map(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width, int64_t ld,
                    int64_t n, int64_t step, int rows, int bytes)
{
    return describe(map, base, n_rows, width, ld, n, step, rows, bytes);
}

bool cuda_parts_map(CUtensorMap *map, const void *base, int64_t n_rows, int parts, int64_t width,
                    int rows, int bytes)
{
    const encode_fn encode = driver_encode();
    const cuuint64_t blocks = (cuuint64_t)(width / TILE_BYTES), ld = (cuuint64_t)(parts * width);
    const cuuint64_t dims[4] = {TILE_BYTES, (cuuint64_t)n_rows, blocks, (cuuint64_t)parts};
    const cuuint64_t strides[3] = {ld, TILE_BYTES, (cuuint64_t)width};
    const cuuint32_t box[4] = {TILE_BYTES, (cuuint32_t)rows, (cuuint32_t)(bytes / TILE_BYTES),
                               (cuuint32_t)parts};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    return encode && encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, (void *)base, dims, strides, box,
                            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool cuda_store_map(CUtensorMap *map, const void *y, int64_t n_rows, int groups, int64_t width,
                    int64_t ld, int rows)
{
    if ((uintptr_t)y % 16 || ld % 8 || (groups > 1 && width % 8)) return false;
    const encode_fn encode = driver_encode();
    const cuuint64_t dims[3] = {(cuuint64_t)width, (cuuint64_t)groups, (cuuint64_t)n_rows};
    /* One group's distance is never used, but must be a multiple of 16 bytes. */
    const cuuint64_t strides[2] = {(cuuint64_t)(groups > 1 ? width : 8) * 2, (cuuint64_t)ld * 2};
    const cuuint32_t box[3] = {TILE_BYTES / 2, 1, (cuuint32_t)rows}, steps[3] = {1, 1, 1};
    return encode && encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)y, dims, strides, box,
                            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_NONE,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
